"""NET-FLEET with noise: several local steps of gradient tracking between two exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.algorithms.federated import LocalSteps, LocalStepsSection
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import one_sum

if TYPE_CHECKING:
    from torch import Tensor


class DPNetFleet(Algorithm):
    """Correct local gradients recursively by the network's. With W doubly stochastic, round k at peer i is

        τ times:  v_i ← v_i + g̃_i(x_i; ξ) - ĝ_i,   ĝ_i ← g̃_i(x_i; ξ),   x_i ← x_i - γ v_i
        x_i ← Σ_j W_ij x_j,   v_i ← Σ_j W_ij v_j

    where g̃ is clipped and noised, ξ is a fresh batch, ĝ_i is what the step before used, and v = ĝ = 0 at first. Hence
    Σ_i v_i = Σ_i ĝ_i at all times, with the noise: a step adds the same to both sides, and mixing keeps both. So v_i
    follows the mean of all peers' gradients, and peers with unlike data descend alike. The state holds -γ v and -γ ĝ.

    Noise: it enters with ĝ and goes with it, so none piles up in v. What Σ_i v_i carries is the last step's noise of
    each peer; a single v_i has, of earlier rounds, only what mixing has not yet evened out.

    A peer that takes no step in a round takes its last ĝ back out of v (ĝ = 0), so that nothing stale pulls on others.

    Privacy: as `one_sum` declares, a release of one sum of sensitivity C in each of the τ steps. x and v, which are
    sent, and ĝ are functions of releases and of what came in. The difference of two gradients is never a release: its
    second half was noised and paid for before.

    Deviations from the paper: we have its abstract, not its pseudocode, and this is how we read "local updates with a
    recursive gradient correction": stochastic gradient tracking (τ = 1 is just that) whose recursion goes on through
    the local steps. The correction takes a fresh batch for each gradient. On one batch for both, as in SARAH, the
    difference would be the release, of sensitivity 2 C, and its noise would stay in v for ever. PDSL, which adds the
    noise, does not say where: here it is on every gradient.

    Source: Zhang et al. 2022 (NET-FLEET), abstract; with noise: PDSL, section VI-B, DP-NET-FLEET.
    """

    name = "dp-net-fleet"
    line = "local steps along a tracked, noised gradient; twice the traffic (NET-FLEET)"

    class Section(LocalStepsSection):
        """NET-FLEET: local steps along a tracked gradient."""

        no_optimizer = "sends the sum of its gradients' differences, whose total must stay that of the gradients"

        local_steps: LocalSteps = 5

    needs = ("topology.name=ring",)
    weights = "doubly-stochastic"
    slots = 3
    open_rows = ("x", "correction")
    released = one_sum

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.program = (self.walk, Mix(("x", "correction")))

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x_i^0 = x^0, and nothing tracked."""
        rows = super().initial(cohort)
        return rows | {name: torch.zeros_like(rows["x"]) for name in ("correction", "gradient")}

    def walk(self, cohort: Cohort, state: State) -> None:
        """Take τ corrected steps at every active row."""
        x, correction, gradient = (state.rows[name] for name in ("x", "correction", "gradient"))
        active = torch.as_tensor(np.flatnonzero(cohort.active(state.round_index)), device=cohort.device)
        for local_step in range(self.steps_per_round):
            correction.sub_(gradient)
            cohort.add_step_(gradient.zero_(), x, state.round_index, local_step=local_step)
            correction.add_(gradient)
            if len(active) == len(x):
                x.add_(correction)
            else:
                x[active] += correction[active]

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Refuse an average over some of the peers: it does not keep the sum of v."""
        if topology.name == "server" and participation.kind != "all":
            raise ScenarioError(
                f"algorithm.name={self.name} on topology server with participation {participation.kind} must have "
                "participation all, because the mean of some peers is not that of all; use a graph, or scaffold",
                code="participation.kind",
            )
        return super().exchange(topology, weights, participation, seed)
