"""Muffliato: a noised local step, then several gossip steps, accelerated or not."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.algorithm import Algorithm, Step
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Exchange, Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import MOST_MEASURED, spectral_gap
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.scenario import DescentSection

if TYPE_CHECKING:
    from torch import Tensor


def descend(cohort: Cohort, state: State) -> None:
    """Take x_i ← x_i - γ g̃_i(x_i), in place."""
    cohort.add_step_(state.rows["x"], state.rows["x"], state.round_index)


def remember(cohort: Cohort, state: State) -> None:
    """Keep what is about to be mixed, and what was mixed before."""
    rows = state.rows
    spare = rows["older"]
    rows["older"] = rows["last"]
    rows["last"] = spare.copy_(rows["x"])


def accelerate(cohort: Cohort, state: State) -> None:
    """Take x^{t+1} = ω W x^t + (1 - ω) x^{t-1}, where x is W x^t."""
    mixing = cohort.mixing
    assert mixing is not None  # x has just been mixed
    state.rows["x"].lerp_(state.rows["older"], 1 - relaxation(mixing))


@lru_cache(maxsize=8)  # every gossip step needs it
def relaxation(mixing: Mixing) -> float:
    """Return ω of a static graph: 1 if one step reaches the mean, else between 1 and 2."""
    gap = spectral_gap(mixing)
    if gap == 1:
        return 1.0
    return 2 * (1 - math.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2


class Muffliato(Algorithm):
    """Take a noised step, then gossip T times. With W symmetric and doubly stochastic, round k at peer i is

        x_i^0 = x_i - γ (g_i(x_i; ξ) + N(0, σ_i² I))
        x_i^{t+1} = Σ_j W_ij x_j^t                                             (acceleration: none)
        x_i^{t+1} = ω Σ_j W_ij x_j^t + (1 - ω) x_i^{t-1},   x_i^1 = Σ_j W_ij x_j^0    (acceleration: chebyshev)
        x_i ← x_i^T,    ω = 2 (1 - sqrt(λ (1 - λ/4))) / (1 - λ/2)²

    λ is the spectral gap of W, computed once from the graph, which is public. Both keep the mean over the peers: ω and
    1 - ω add up to 1. If one step reaches the mean (λ = 1), there is nothing to accelerate, and ω = 1.

    Plain gossip takes any doubly stochastic weights: all T steps of a round are on the round's graph between the
    round's active peers. The acceleration is refused if W changes or is not symmetric, because ω belongs to one W.

    Privacy: one release a round and peer, of the noised gradient; whatever is gossiped is a function of releases, so
    more gossip steps cost nothing. ε is towards an observer of all messages (local DP). The paper's smaller pairwise
    ε is towards a single peer that does not collude; `planner.pairwise` computes it from the covariance of messages.

    Deviations from the paper: gradients are clipped example by example; every peer gossips T times a round, where the
    paper derives T from λ and σ. λ is 1 - |λ_2| with λ_2 the second eigenvalue by size; the authors' code takes the
    second by value, which differs where the least is the larger by size. The recursion and its first step are those of
    that code's accelerated gossip.

    Source: Cyffers et al. 2022 (Muffliato), Algorithm 1 (gossip) and Muffliato-SGD, as in the authors' code.
    """

    name = "muffliato"
    line = "a noised step, then several gossip steps, accelerated if asked (Muffliato-SGD)"

    class Section(DescentSection):
        """Muffliato: several gossip steps after each gradient step.

        Attributes:
            gossip_steps: how many in a round.
            acceleration: none is plain gossip; chebyshev agrees sooner, on a static undirected graph with all peers
                active.
        """

        gossip_steps: Annotated[int, Field(ge=1, le=1000)] = 5
        acceleration: Literal["none", "chebyshev"] = "none"

    needs = ("topology.name=ring",)
    variants = (("algorithm.acceleration=chebyshev",),)
    weights = "doubly-stochastic"
    released = one_sum

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.accelerated = section.acceleration == "chebyshev" and section.gossip_steps > 1
        mix: list[Step | Exchange] = [Mix(("x",))]
        if self.accelerated:
            # The first step has no step before it to accelerate by.
            first = [remember, *mix]
            gossip = first + [*first, accelerate] * (section.gossip_steps - 1)
            self.slots = 3
        else:
            gossip = mix * section.gossip_steps
            self.slots = 1
        self.program = (descend, *gossip)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x_i^0 = x^0 and, for the acceleration, room for two gossip steps' models."""
        rows = super().initial(cohort)
        extra = ("last", "older") if self.accelerated else ()
        return rows | {name: torch.zeros_like(rows["x"]) for name in extra}

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Refuse to accelerate if W is not one symmetric matrix, or too large for its eigenvalues."""
        if self.accelerated:
            self._check(topology, participation)
        return super().exchange(topology, weights, participation, seed)

    @staticmethod
    def _check(topology: Topology, participation: Participation) -> None:
        where = f"algorithm.acceleration=chebyshev on topology {topology.name} with participation {participation.kind}"
        if topology.directed or topology.period != 1 or participation.kind != "all":
            raise ScenarioError(
                f"{where} must have an undirected graph that stays the same, and participation all: it is tuned to "
                "one matrix; use acceleration: none",
                code="muffliato.chebyshev",
            )

        if topology.n_peers > MOST_MEASURED:
            raise ScenarioError(
                f"{where} must have n_peers <= {MOST_MEASURED}, not {topology.n_peers}: it needs the eigenvalues of W; "
                "use acceleration: none",
                code="muffliato.many-peers",
            )
