"""Stochastic gradient push and its private form (PrivSGP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flower_privdec.core.algorithm import Algorithm, Step, push_weights
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Exchange, Mix, State
from flower_privdec.privacy.mechanism.declared import one_sum

if TYPE_CHECKING:
    from torch import Tensor


def descend(cohort: Cohort, state: State) -> None:
    """Take x_i ← x_i - γ g̃_i(x_i / w_i), in place."""
    cohort.add_step_(state.rows["x"], state.rows["x"], state.round_index, divisor=state.rows["w"])


class SGP(Algorithm):
    """Push stochastic gradients over directed, time-varying graphs.

    With z_i = x_i / w_i and P^k column-stochastic, round k at peer i is

        x_i^{k+1/2} = x_i^k - γ ∇f_i(z_i^k; ξ_i^k)
        x_i^{k+1}   = Σ_j P_ij^k x_j^{k+1/2}
        w_i^{k+1}   = Σ_j P_ij^k w_j^k

    Deviations from the paper: a mini-batch instead of one example; if the scenario has a privacy
    section the gradient is clipped per example and noised, which is PrivSGP.

    Source: Assran et al. 2019, Algorithm 1; PrivSGP-VR (Zhu et al.), Appendix C.
    """

    name = "sgp"
    line = "stochastic gradient push (push-sum) over directed graphs"

    weights = "column-stochastic"
    program: tuple[Step | Exchange, ...] = (descend, Mix(("x", "w")))
    open_rows: tuple[str, ...] = ("x", "w")
    released = one_sum

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x_i^0 = x^0 and w_i^0 = 1."""
        return super().initial(cohort) | {"w": push_weights(cohort)}

    def debiased(self, rows: dict[str, Tensor]) -> Tensor:
        """Return z_i = x_i / w_i, [m, d]."""
        return rows["x"] / rows["w"].unsqueeze(1)


class PrivSGP(SGP):
    """Push clipped and noised stochastic gradients: SGP with g̃ = clipped mean + N(0, σ_i² I).

    Privacy: one release a round and peer; σ_i is solved from the peer's own (ε_i, δ_i).

    Deviations from the paper: Poisson-sampled mini-batches clipped per example, calibrated by an
    exact accountant, instead of one example drawn uniformly and eq. 11.

    Source: PrivSGP-VR (Zhu et al.), Appendix C, Algorithm 2, lines 2 to 10.
    """

    name = "privsgp"
    line = "private stochastic gradient push (PrivSGP, Alg. 2), a budget for each peer"

    paper_noise = "moments"
