"""Dyn-D2P and its three special cases: push-sum with clipping and noise that change over the rounds."""

from __future__ import annotations

from flower_privdec.algorithms.sgp import SGP


class DynD2P(SGP):
    """Push gradients with a decaying clip norm and a growing per-step budget.

        C_k = C_0 ρ_c^{-k/K},  μ_k = μ_0 ρ_μ^{k/K},  σ_k = C_k / μ_k
        g_i = Clip(∇f_i(z_i; ξ); C_k) + N(0, σ_k² I),  then as in SGP

    Privacy: rigorous calibration keeps the shape of C_k and μ_k and solves for μ_0 with the accountant; paper
    calibration takes μ_0 from eq. 8, a limit for K far above J² that its K is nowhere near.

    Deviations from the paper: mini-batches clipped per example.

    Source: Dyn-D2P (Zhu et al.), Algorithm 1. Algorithm 2, any C_k and σ_k, is privsgp with privacy.schedule.
    """

    name = "dyn-d2p"
    summary = "push-sum, decaying clip norm and growing per-step budget (Dyn-D2P, Alg. 1)"
    paper_noise = "gdp"


class DynCD2P(SGP):
    """Push gradients with a decaying clip norm C_k = C_0 ρ_c^{-k/K} and σ_k = C_k / μ̄.

    Privacy, deviations: as DynD2P; paper calibration takes μ̄ from eq. 9. Source: Dyn-D2P, Algorithm 3.
    """

    name = "dyn-c-d2p"
    summary = "push-sum, decaying clip norm (Dyn[C]-D2P, Alg. 3)"
    paper_noise = "gdp"


class DynMuD2P(SGP):
    """Push gradients with a constant clip norm C and σ_k = C / (μ_0 ρ_μ^{k/K}).

    Privacy, deviations: as DynD2P. Source: Dyn-D2P, Algorithm 4.
    """

    name = "dyn-mu-d2p"
    summary = "push-sum, growing per-step budget (Dyn[μ]-D2P, Alg. 4)"
    paper_noise = "gdp"


class ConstD2P(SGP):
    """Push gradients with a constant clip norm C and σ = C / μ̄.

    Privacy, deviations: as DynCD2P. Source: Dyn-D2P, Algorithm 5.
    """

    name = "const-d2p"
    summary = "push-sum, constant clip norm and noise (Const-D2P, Alg. 5)"
    paper_noise = "gdp"
