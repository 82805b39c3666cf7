"""Dyn-D2P and its three special cases: push-sum with clipping and noise that change over the rounds."""

from __future__ import annotations

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.common.errors import ArgumentError
from flower_privdec.common.fields import Growth, PerPeer
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.scenario import DescentSection
from flower_privdec.scenario.algorithm_sections import OwnSchedule
from flower_privdec.scenario.sections import Scenario


class DynSection(DescentSection):
    """An algorithm of the family, which schedules clip norms and noise itself."""

    @property
    def own_schedule(self) -> OwnSchedule:
        """C_0, ρ_c and ρ_μ; a factor of which an algorithm has no key is 1."""
        clip = getattr(self, "initial_clip", None) or getattr(self, "clip_norm", None)
        return OwnSchedule(clip, getattr(self, "rho_c", 1.0), getattr(self, "rho_mu", 1.0))

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse a second schedule."""
        if scenario.private is not None and scenario.private.schedule is not None:
            raise ArgumentError(
                f"privacy.schedule: {self.name} has a schedule of its own; use privsgp with it",
                code="privacy.schedule",
            )


class DynCSection(DynSection):
    """Dyn[C]-D2P: a decaying clip norm, a constant per-step budget.

    Attributes:
        initial_clip: C_0, the clip norm at the start; left out, it is privacy.clip_norm.
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
    """

    initial_clip: PerPeer | None = None
    rho_c: Growth = 2.0


class ConstSection(DynSection):
    """Const-D2P: a constant clip norm and per-step budget.

    Attributes:
        clip_norm: C; left out, it is privacy.clip_norm.
    """

    clip_norm: PerPeer | None = None


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
    line = "push-sum, decaying clip norm and growing per-step budget (Dyn-D2P, Alg. 1)"

    class Section(DynCSection):
        """Dyn-D2P: a decaying clip norm and a growing per-step budget.

        Attributes:
            rho_mu: ρ_μ, by how much a step's budget has grown at the end.
        """

        rho_mu: Growth = 2.0

    paper_noise = "gdp"
    released = one_sum


class DynCD2P(SGP):
    """Push gradients with a decaying clip norm C_k = C_0 ρ_c^{-k/K} and σ_k = C_k / μ̄.

    Privacy, deviations: as DynD2P; paper calibration takes μ̄ from eq. 9. Source: Dyn-D2P, Algorithm 3.
    """

    name = "dyn-c-d2p"
    line = "push-sum, decaying clip norm (Dyn[C]-D2P, Alg. 3)"
    Section = DynCSection

    paper_noise = "gdp"
    released = one_sum


class DynMuD2P(SGP):
    """Push gradients with a constant clip norm C and σ_k = C / (μ_0 ρ_μ^{k/K}).

    Privacy, deviations: as DynD2P. Source: Dyn-D2P, Algorithm 4.
    """

    name = "dyn-mu-d2p"
    line = "push-sum, growing per-step budget (Dyn[μ]-D2P, Alg. 4)"

    class Section(ConstSection):
        """Dyn[μ]-D2P: a constant clip norm, a growing per-step budget.

        Attributes:
            rho_mu: ρ_μ, by how much a step's budget has grown at the end.
        """

        rho_mu: Growth = 2.0

    paper_noise = "gdp"
    released = one_sum


class ConstD2P(SGP):
    """Push gradients with a constant clip norm C and σ = C / μ̄.

    Privacy, deviations: as DynCD2P. Source: Dyn-D2P, Algorithm 5.
    """

    name = "const-d2p"
    line = "push-sum, constant clip norm and noise (Const-D2P, Alg. 5)"
    Section = ConstSection

    paper_noise = "gdp"
    released = one_sum
