"""A(DP)²SGD: asynchronous gossip in which one peer at a time applies a gradient of a stale model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import Count
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import EdgeArray, Topology, edge_array
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario import DescentSection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Waking:
    """One peer, uniformly at random, wakes at each event; keyed by (seed, event)."""

    n_peers: int
    seed: int
    kind: str = "waking"

    @property
    def chances(self) -> np.ndarray:
        """Return one over n_peers, [n_peers]."""
        return np.full(self.n_peers, 1 / self.n_peers)

    def peer(self, event: int) -> int:
        """Return who wakes."""
        return _woken(self.n_peers, self.seed, event)

    def active(self, round_index: int) -> np.ndarray:
        """Return a mask with the peer that wakes, [n_peers]."""
        return np.asarray(np.arange(self.n_peers) == self.peer(round_index))


@lru_cache(maxsize=8)  # the gradient, the exchange and the step of one event all ask
def _woken(n_peers: int, seed: int, event: int) -> int:
    return int(keyed_generator(seed, "waking", event).integers(n_peers))


@dataclass(frozen=True)
class WakingEdges:
    """At each event the edge between the peer that wakes and one random neighbour of it."""

    graph: Topology
    waking: Waking
    directed: bool = False
    period: int | None = None

    @property
    def name(self) -> str:
        """The graph's name."""
        return self.graph.name

    @property
    def n_peers(self) -> int:
        """How many peers it joins."""
        return self.graph.n_peers

    def edges(self, round_index: int) -> EdgeArray:
        """Return the event's edge in both directions, [2, 2], or none if the peer has no neighbour just then."""
        peer = self.waking.peer(round_index)
        edges = self.graph.edges(round_index)
        neighbours = edges[edges[:, 1] == peer, 0]
        if not len(neighbours):
            return edge_array([], self.n_peers)
        pick = keyed_generator(self.waking.seed, "waking-neighbour", round_index).integers(len(neighbours))
        return edge_array([[peer, neighbours[pick]]], self.n_peers, symmetric=True)

    def support(self) -> EdgeArray:
        """Return every edge that may be used."""
        return self.graph.support()


class ADP2SGD(Algorithm):
    """Average with a random neighbour and apply a noised gradient of a stale model, one peer at an event.

    At event k peer i wakes, draws a neighbour j and, with x̂_i the model i read after its last event,

        x_i, x_j ← (x_i + x_j) / 2
        x_i ← x_i - γ (∇f_i(x̂_i; ξ) + N(0, σ_i² I)),   x̂_i ← x_i

    A round of the scenario is one event, so n_peers events compare with one synchronous round. A model read
    more than `staleness` events ago is read again. The order of events is keyed by the seed.

    Privacy: a release at each event in which the peer wakes; who wakes is public.

    Deviations from the paper: gradients are clipped example by example, where the paper bounds them by a Lipschitz
    constant and clips nothing; the noised sum is divided by the expected batch size; events are drawn uniformly
    instead of by wall-clock speed; and noise is solved by the exact accountant instead of RDP.

    Source: Xu et al. 2021 (A(DP)²SGD) on AD-PSGD, Lian et al. 2018, Algorithm 1.
    """

    name = "adp2-sgd"
    line = "asynchronous pairwise gossip with stale noised gradients (A(DP)²SGD)"

    class Section(DescentSection):
        """A(DP)²SGD: one peer wakes at a time and uses a gradient of a stale model.

        Attributes:
            staleness: the most events since the model was read; left out, it is 4 n_peers.
        """

        no_optimizer = "applies gradients of models as old as its staleness, which moments would keep longer"

        staleness: Count | None = None

    needs = ("topology.name=ring",)
    weights = "doubly-stochastic"
    slots = 3
    released = one_sum

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.staleness = section.staleness
        self.program = (self.gradient, Mix(("x",)), self.apply_step)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x, the stale model, the step, and when the stale model was read."""
        rows = super().initial(cohort)
        x = rows["x"]
        return rows | {"stale": x.clone(), "step": torch.zeros_like(x), "read_at": x.new_zeros(len(x))}

    def gradient(self, cohort: Cohort, state: State) -> None:
        """Keep the step of the peer that wakes, at its stale model; the other peers' steps are 0."""
        limit = self.staleness or 4 * cohort.n_peers
        old = state.round_index - state.rows["read_at"] > limit
        state.rows["stale"][old] = state.rows["x"][old]
        state.rows["read_at"][old] = float(state.round_index)
        cohort.add_step_(state.rows["step"], state.rows["stale"], state.round_index)

    def apply_step(self, cohort: Cohort, state: State) -> None:
        """Add the kept step, and read the model for the peer's next gradient."""
        x, step, stale = (state.rows[name] for name in ("x", "step", "stale"))
        woken = np.flatnonzero(cohort.active(state.round_index))  # one peer, or none
        for row in woken.tolist():
            x[row].add_(step[row])
            step[row].zero_()
            stale[row].copy_(x[row])
            state.rows["read_at"][row] = float(state.round_index)

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Return the mixing over pairs and who wakes, instead of the scenario's participation."""
        if topology.directed or topology.name == "server" or participation.kind != "all":
            raise ScenarioError(
                f"algorithm.name=adp2-sgd on topology {topology.name} with participation {participation.kind} must "
                "have an undirected graph and participation all: one peer wakes and averages with a neighbour",
                code="mixing.directed",
            )
        if weights != "metropolis":
            raise ScenarioError(
                f"topology.weights={weights} has no effect with algorithm.name=adp2-sgd, in which two peers average: "
                "set topology.weights=auto",
                code="topology.weights",
            )
        waking = Waking(topology.n_peers, seed)
        return Mixing(WakingEdges(topology, waking), "metropolis"), waking
