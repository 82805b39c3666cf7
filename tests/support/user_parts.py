"""Parts of a user's own, for tests: scenarios name them as `user_parts:name`."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.core import Algorithm, Mix, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.graph.topology import DirectedExponential
from flower_privdec.scenario import DescentSection
from tools.battery import parts


class HeavyBall(parts.HeavyBall):
    """Momentum over push-sum, under the name of a module that only tests have."""


class Stumbling(HeavyBall):
    """It raises in its second round."""

    def descend(self, cohort: Cohort, state: State) -> None:
        """Move, or not."""
        if state.round_index == 1:
            raise LookupError(str(state.rows["x"]))
        super().descend(cohort, state)


class Undeclared(HeavyBall):
    """It says nothing of what it releases."""

    def descend(self, cohort: Cohort, state: State) -> None:
        """Move as before."""
        super().descend(cohort, state)


class Strict(SGP):
    """Its section refuses more than the form of its keys says."""

    class Section(DescentSection):
        """The keys of its own."""

        steps: int = 1

        def model_post_init(self, context: Any) -> None:
            """Refuse what is not to be had."""
            {1: "one"}[self.steps]


class Unfinished(Algorithm):
    """No program, no weights."""


class Deaf(Algorithm):
    """Exchanges, without weights to do it by."""

    weights = None
    program = (Mix(("x",)),)


class Broken(SGP):
    """It cannot be built."""

    def __init__(self, section: Any) -> None:
        raise LookupError("two\nlines")


class NoSection(SGP):
    """Its section has another base."""

    Section = dict  # type: ignore[assignment]


def hub(n_peers: int, spokes: int = 2) -> nx.DiGraph:
    """Return a directed ring whose peer 0 sends to some more."""
    graph = nx.cycle_graph(n_peers, create_using=nx.DiGraph)
    graph.add_edges_from((0, peer) for peer in range(2, 1 + spokes))
    return graph


def seeded(n_peers: int, seed: int) -> list[list[int]]:
    """Return who sends to whom, in an order drawn by the seed: a ring."""
    order = np.random.default_rng(seed).permutation(n_peers)
    lists: list[list[int]] = [[] for _ in order]
    for sender, receiver in zip(order, np.roll(order, 1), strict=True):
        lists[sender] = [int(receiver)]
    return lists


def mapping(n_peers: int) -> dict[int, set[int]]:
    """Return who sends to whom by peer."""
    return {peer: {(peer + 1) % n_peers, (peer - 1) % n_peers} for peer in range(n_peers)}


def changing(n_peers: int) -> DirectedExponential:
    """Return a graph that changes from round to round."""
    return DirectedExponential(n_peers)


def answer(n_peers: int, kind: str) -> Any:
    """Return what is no graph of these peers."""
    return {
        "number": 3,
        "letters": nx.Graph([("a", "b")]),
        "few": nx.cycle_graph(2),
        "loop": [[0]] * n_peers,
        "outside": [[n_peers]] * n_peers,
        "text": ["12"] * n_peers,
        "other": DirectedExponential(n_peers + 1),
    }[kind]


def blobs(part: str, per_class: int = 40, root: str | None = None) -> tuple[Any, Any]:
    """Return two clouds of points."""
    generator = np.random.default_rng([len(part), 0 if root is None else len(root)])
    y = np.arange(2 * per_class) % 2
    return generator.normal(size=(len(y), 3)) * 0.5 + y[:, None], torch.from_numpy(y)


def no_data(part: str, kind: str) -> Any:
    """Return what is no half of a dataset."""
    x, y = blobs(part)
    return {"three": (x, y, x), "ragged": ([[1.0], [1.0, 2.0]], y), "short": (x[:3], y), "number": 3}[kind]


LEARNING_RATE = 0.5


class Sloppy:
    """A graph whose methods fail."""

    name, n_peers, directed, period = "sloppy", 4, True, None

    def edges(self, round_index: int) -> Any:
        """Return the edges of a round, or not."""
        raise SystemExit(str(round_index))

    def support(self) -> Any:
        """Return all edges, or not."""
        raise LookupError("not here")


def sloppy(n_peers: int) -> Any:
    """Return a graph whose methods fail."""
    return Sloppy()


class Leaving(SGP):
    """Its section ends the program."""

    class Section(DescentSection):
        """The keys of its own."""

        def model_post_init(self, context: Any) -> None:
            """Leave."""
            raise SystemExit(3)


class Late(HeavyBall):
    """Its first rows cannot be had."""

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return them, or not."""
        raise SystemExit(4)
