"""Dual averaging for Flower apps whose clients are peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from flower_privdec.algorithms.dual_averaging import DualAveragingSection
from flower_privdec.flower.strategies.push_sum import Gossip
from flower_privdec.graph.topology import Topology
from flower_privdec.peer.dual_step import DualStep
from flower_privdec.scenario.loading import validated


class DualAveragingStrategy(Gossip):
    """Let every peer add up its app's updates, mix the sums, and train from the regularized step along them.

        s_i ← Σ_j W_ij (s_j + a_t u_j),   x_i = argmin_x <-s_i, x> + ι A_t h(x) + γ_t ‖x‖²/2     (`DualStep`)

    u_j is what the app's train function moves the model by, clipped and noised by PeerMod: with one step of plain SGD
    of learning rate 1, minus the subgradient of Algorithm 1. At another rate η, u, 1/γ and l2 are η times as large. All
    peers begin at s = 0, whatever the initial arrays are, so the loss must be convex in the arrays, as of a linear
    model. A peer's model is the running average of its x, and the network's the mean of those.

    Args:
        topology: an undirected graph.
        regularizer: h, as `algorithm.regularizer` of a scenario: {"kind": "l1", "weight": 0.01}. The app's own loss has
            none then.
        schedule: strongly-convex, of an l2 or elastic-net regularizer; or convex.
        gamma: γ.
        options: those of PushSum; `fraction_train` is ι.

    Raises:
        ScenarioError: an option is out of range, or the regularizer has no least value.

    Privacy: that of `PeerMod`: u is clipped as a whole, noised and charged before a_t multiplies it. s, x and the
        average are functions of what was released. Who is active can be seen, and a peer pays for its active rounds.

    Deviations from the paper: the average is over the rounds in which a peer takes part; clipping in place of a
        Lipschitz constant.

    Source: Liu, Johansson and Shi (2024), Algorithm 1.
    """

    weighted: ClassVar[bool] = False

    def __init__(
        self,
        topology: str | Topology = "ring",
        *,
        regularizer: Mapping[str, Any] | None = None,
        schedule: str = "convex",
        gamma: float = 1.0,
        **options: Any,
    ) -> None:
        data: dict[str, Any] = {"schedule": schedule, "gamma": gamma}
        data["regularizer"] = {"kind": "none"} if regularizer is None else dict(regularizer)
        self.section = validated(DualAveragingSection, data, "DualAveraging")
        super().__init__(topology, **options)

    def _told_to_all(self, n_peers: int) -> dict[str, Any]:
        """Return the regularized step, which each peer takes itself."""
        h = self.section.regularizer

        # `weight` is the l2 weight of l2 and elastic-net, and the l1 weight of l1.
        l2 = 0.0
        l1 = h.l1_weight or 0.0
        if h.strongly_convex:
            l2 = h.weight or 0.0
        if h.kind == "l1":
            l1 = h.weight or 0.0

        def bound(value: float | None, unbounded: float) -> float:
            return unbounded if value is None else value

        n_active = self._sampled(self.fraction_train, self.min_train_nodes, n_peers)
        step = DualStep(
            self.section.schedule == "strongly-convex",
            self.section.gamma,
            l2=l2,
            l1=l1,
            lower=bound(h.lower, -math.inf),
            upper=bound(h.upper, math.inf),
            radius=bound(h.radius, math.inf),
            chance=n_active / n_peers,
        )
        return {"dual": step.to_json()}
