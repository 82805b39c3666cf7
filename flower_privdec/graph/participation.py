"""Which peers are active in a round: everybody, a share drawn at random, or the ends of drawn edges.

In a simulation some peers may leave besides (`Leaving`), which the others notice only after some rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flower_privdec.common.catalogue import PARTICIPATIONS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.topology import RandomEdges
from flower_privdec.rows.keys import keyed_generator


class Participation(Protocol):
    """The active peers of each round, at least one."""

    @property
    def kind(self) -> str:
        """The name it has in a scenario."""

    @property
    def n_peers(self) -> int:
        """How many peers there are."""

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Return the chance of each peer to be active in a round, [n_peers]; ι is their mean."""

    def active(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of active peers, [n_peers]."""


@dataclass(frozen=True)
class UniformParticipation:
    """The same number of peers each round, drawn without replacement; the draw is keyed by (seed, round)."""

    n_peers: int
    count: int
    seed: int = 0
    kind: str = "uniform"

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Return count over n_peers, [n_peers]."""
        return np.full(self.n_peers, self.count / self.n_peers)

    def active(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the round's peers, [n_peers], read-only."""
        if self.kind == "all":
            round_index = 0  # every round is the same
        return _drawn(self.n_peers, self.count, self.seed, round_index)


@lru_cache(maxsize=8)  # steps and exchanges of one round all need it
def _drawn(n_peers: int, count: int, seed: int, round_index: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(n_peers, dtype=bool)
    generator = keyed_generator(seed, "participation", round_index)
    mask[generator.choice(n_peers, size=count, replace=False, shuffle=False)] = True
    mask.flags.writeable = False
    return mask


@dataclass(frozen=True)
class EdgeParticipation:
    """The ends of a round's edges: of a graph of some edges of another one, drawn again each round.

    Two edges may share an end, so that up to twice as many peers as edges are active. A peer of degree g among the E
    edges of the supergraph is active unless none of its own is drawn: with chance 1 - C(E - g, e) / C(E, e).
    """

    graph: RandomEdges
    kind: str = "edges"

    @property
    def n_peers(self) -> int:
        """How many peers there are."""
        return self.graph.n_peers

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Return the chance that some edge of each peer is drawn, [n_peers]."""
        edges = len(self.graph.candidates)
        drawn = self.graph.count
        degrees = np.bincount(self.graph.candidates.ravel(), minlength=self.n_peers)

        # C(E - g, e) / C(E, e) as a product over the draws, [n_peers, drawn]: binomials would overflow.
        others_left = (edges - degrees[:, None] - np.arange(drawn)).clip(min=0)
        none_of_own = others_left / (edges - np.arange(drawn))
        return np.asarray(1 - none_of_own.prod(axis=1))

    def active(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the round's ends, [n_peers]."""
        mask = np.zeros(self.n_peers, dtype=bool)
        mask[self.graph.edges(round_index).ravel()] = True
        return mask


@dataclass(frozen=True)
class Absence:
    """When a peer is away: in the rounds [first, end), for good if `end` is None."""

    peer: int
    first: int
    end: int | None

    def covers(self, round_index: int) -> bool:
        """Return whether the peer is away in a round."""
        return self.first <= round_index and (self.end is None or round_index < self.end)

    def __str__(self) -> str:
        if self.end is None:
            return f"peer {self.peer} is gone from round {self.first} on"
        return f"peer {self.peer} is away in the rounds {self.first} to {self.end - 1}"


@dataclass(frozen=True)
class Leaving:
    """A participation in which some peers leave, for good or for some rounds, and nobody was told beforehand.

    Attributes:
        whole: who would be active if all stayed, as all peers plan.
        absences: who is away when.
        noticed_after: in how many rounds of an absence the others still count on the peer.
    """

    whole: Participation
    absences: tuple[Absence, ...]
    noticed_after: int
    kind: str = "leaving"

    @property
    def n_peers(self) -> int:
        """How many peers there are."""
        return self.whole.n_peers

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Return the chance of each peer to be active in a round in which it is there, [n_peers]."""
        return self.whole.chances

    def active(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of active peers, [n_peers]."""
        return self.whole.active(round_index) & self.present(round_index)

    def present(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the peers that are there in a round, [n_peers]."""
        mask = np.ones(self.n_peers, dtype=bool)
        for absence in self.absences:
            if absence.covers(round_index):
                mask[absence.peer] = False
        return mask

    def noticed(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the peers that are away in a round and on which no one counts any more, [n_peers]."""
        mask = np.zeros(self.n_peers, dtype=bool)
        for absence in self.absences:
            if absence.covers(round_index) and round_index >= absence.first + self.noticed_after:
                mask[absence.peer] = True
        return mask

    def __str__(self) -> str:
        return "; ".join(map(str, self.absences))


def planned(participation: Participation) -> Participation:
    """Return who would be active if no peer left, as all peers plan."""
    if isinstance(participation, Leaving):
        return participation.whole
    return participation


def present(participation: Participation, rounds: int) -> npt.NDArray[np.bool_]:
    """Return which peers are still there after so many rounds, [n_peers]: all of them unless some left."""
    if isinstance(participation, Leaving):
        return participation.present(max(0, rounds - 1))
    return np.ones(participation.n_peers, dtype=bool)


def expected_rounds(participation: Participation, rounds: int) -> npt.NDArray[np.float64]:
    """Return in how many of the first rounds each peer is expected to be active, float64 [n_peers]."""
    if not isinstance(participation, Leaving):
        return rounds * participation.chances
    there = np.sum([participation.present(k) for k in range(rounds)], axis=0)
    return np.asarray(there * participation.chances)


def leave(participation: Participation, absences: Sequence[Absence], noticed_after: int) -> Participation:
    """Return a participation in which some peers leave; itself if none does."""
    if not absences:
        return participation
    return Leaving(participation, tuple(absences), noticed_after)


def activity(participation: Participation, rounds: int) -> npt.NDArray[np.bool_]:
    """Return who is active in each of the first rounds, [rounds, n_peers], read-only."""
    if (participation.chances == 1).all() and not isinstance(participation, Leaving):
        return np.broadcast_to(np.ones(participation.n_peers, dtype=bool), (rounds, participation.n_peers))
    return np.stack([participation.active(k) for k in range(rounds)])


def build_participation(kind: str, n_peers: int, seed: int = 0, fraction: float | None = None) -> Participation:
    """Build a participation from its name.

    Args:
        kind: all or uniform; for edges see `sample_edges`.
        fraction: the share of peers active in a round, in (0, 1]; only `uniform` takes it.

    Returns:
        The participation; `uniform` has ceil(fraction n_peers) peers active, so at least one.

    Raises:
        ScenarioError: an unknown kind, or a fraction missing, out of range or out of place.

    Examples:
        >>> build_participation("uniform", 10, seed=1, fraction=0.25).active(0).sum().item()
        3
    """
    PARTICIPATIONS.some("all", "uniform").check(kind, "participation.kind")
    if n_peers < 1:
        raise ScenarioError(f"n_peers={n_peers} must be >= 1", code="participation.n-peers")
    if kind == "all":
        if fraction is not None:
            raise ScenarioError(
                f"participation.fraction={fraction} must not be set with kind all; use kind uniform",
                code="participation.fraction",
            )
        return UniformParticipation(n_peers, n_peers, kind="all")

    if fraction is None or not 0 < fraction <= 1:
        raise ScenarioError(
            f"participation.fraction={fraction} must be in (0, 1] for kind uniform", code="participation.fraction"
        )

    count = math.ceil(round(fraction * n_peers, 9))  # 0.07 * 100 is a hair above 7 in floating point
    return UniformParticipation(n_peers, max(count, 1), seed)
