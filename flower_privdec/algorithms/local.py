"""Training alone: what a peer reaches without collaboration."""

from __future__ import annotations

from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import State
from flower_privdec.privacy.mechanism.declared import one_sum


def descend(cohort: Cohort, state: State) -> None:
    """Take x_i ← x_i - γ g̃_i(x_i), in place."""
    cohort.add_step_(state.rows["x"], state.rows["x"], state.round_index)


class Local(Algorithm):
    """Descend on one's own data and exchange nothing: x_i^{k+1} = x_i^k - γ g̃_i(x_i^k; ξ_i^k).

    The baseline every exchange has to beat at the same privacy. Source: none needed.
    """

    weights = None
    program = (descend,)
    released = one_sum


class DPSGD(Local):
    """Descend on pooled data at one peer: DP-SGD, the centralized reference. Source: Abadi et al. 2016, Alg. 1."""

    paper_noise = "moments"
