"""Decentralized parallel SGD by gossip over undirected (or regular directed) graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flower_privdec.common.deferred import torch
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Mix, State
from flower_privdec.privacy.mechanism.declared import one_sum

if TYPE_CHECKING:
    from torch import Tensor


def gradient(cohort: Cohort, state: State) -> None:
    """Keep the step -γ g̃_i(x_i), taken at the model before mixing."""
    step = state.rows["step"].zero_()
    cohort.add_step_(step, state.rows["x"], state.round_index)


def apply_step(cohort: Cohort, state: State) -> None:
    """Add the kept step to the mixed model."""
    state.rows["x"].add_(state.rows["step"])


class DecentralizedSGD(Algorithm):
    """Gossip models and descend: with W doubly stochastic, round k at peer i is

        x_i^{k+1} = Σ_j W_ij x_j^k - γ g̃_i(x_i^k; ξ_i^k)

    Privacy: if the scenario has a privacy section, g̃ is clipped example by example and noised: one release a round and
    peer.

    Deviations from the paper: none without privacy.

    Source: Lian et al. 2017, Algorithm 1, lines 2 to 6.
    """

    name = "d-psgd"
    line = "decentralized parallel SGD (gossip, doubly stochastic weights)"

    needs = ("topology.name=ring",)
    weights = "doubly-stochastic"
    program = (gradient, Mix(("x",)), apply_step)
    slots = 2
    released = one_sum

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x_i^0 = x^0 and room for the step."""
        rows = super().initial(cohort)
        return rows | {"step": torch.zeros_like(rows["x"])}


class DP2SGD(DecentralizedSGD):
    """Gossip models with clipped and noised gradients: d-psgd with privacy, composed over all rounds.

    Deviations from the paper: noise solved by the exact accountant, not by basic composition.

    Source: Yu et al. 2021 (DP²-SGD); the update is D-PSGD's.
    """

    name = "dp2-sgd"
    line = "D-PSGD with clipped and noised gradients (DP²-SGD)"


class DPDPSGD(DP2SGD):
    """DP²-SGD by the name of PDSL, which compares with it: A(DP)²SGD in step, every peer in every round.

    Deviations from the paper: as DP²-SGD.

    Source: PDSL, section VI-B, after Xu et al. 2022 (A(DP)²SGD).
    """

    name = "dp-dpsgd"
    line = "DP²-SGD by the name PDSL compares with"
