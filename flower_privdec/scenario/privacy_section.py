"""The section of budgets, clipping and noise."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic.types import Discriminator

from flower_privdec.scenario.fields import (
    NonNegative,
    OwnSection,
    PathText,
    PerPeer,
    Positive,
    Section,
)


class ScheduleSection(Section):
    """Clip norms and noise that change over the rounds, C_k and the shape of σ_k of Dyn-D2P (Zhu et al.).

    Either rho_c and rho_mu: C_k = clip_norm ρ_c^{-k/K} and σ_k = C_k / (μ_0 ρ_μ^{k/K}) (Alg. 1). Or lists
    (Alg. 2): clip_norms as factors of clip_norm, and noise, the shape of σ_k, whose scale is solved for;
    one number a round, or fewer, which are joined by straight lines.

    Attributes:
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
        clip_norms: factors of clip_norm over the rounds; not beside rho_c and rho_mu.
        noise: the shape of σ_k over the rounds; not beside rho_c and rho_mu.
    """

    rho_c: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    rho_mu: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    clip_norms: list[Positive] | None = None
    noise: list[Positive] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ScheduleSection:
        lists = self.clip_norms is not None or self.noise is not None
        if lists and (self.rho_c, self.rho_mu) != (1.0, 1.0):
            raise ValueError("give rho_c and rho_mu, or the lists clip_norms and noise, not both")
        return self


class PrivacySection(Section):
    """Each peer's budget, clipping and noise; `privacy: none` trains without any.

    Attributes:
        epsilon: ε, the budget of all peers or of each; the noise is solved for it, or, beside noise_multiplier, it is
            what the ledger is held to.
        delta: δ, well below one over the number of a peer's examples.
        clip_norm: C, to which the gradient of every example is clipped.
        schedule: clip norms and noise that change over the rounds.
        noise_multiplier: the noise's standard deviation over the clip norm; left out, it is solved for epsilon.
        calibration: rigorous solves for the noise by the exact accountant; paper takes a paper's own formula, whose ε
            is then a claim.
        c_2: the constant of PrivSGP-VR's eq. 11, for calibration paper, and of eq. 12, for `privdec plan`.
        phi_min: φ̂_min of PDSL's eq. 27, the smallest share that any neighbour's weight ever has, for calibration paper
            with pdsl, which needs it. The paper's own normalisation makes it 0, and the noise infinite.
        noise: a noise mechanism of a user's own, a subclass of `flower_privdec.privacy.noise.NoiseMechanism`; left out,
            every sum gets independent Gaussian noise. Its ε is what it declares, else ∞.
        ledger: a folder of ledgers that several runs share, so that ε counts all of them; left out, the ledger lies in
            the run's own folder and counts this run alone.
        hardened: whether deployed peers draw and round their noise exactly, so that its digits show nothing of the sum
            below it. The noise is then larger by what rounding may add to a sum, 0.01 to 10 % in float32 and nothing to
            speak of in float64, and takes three to four times as long to draw. Simulations are as without.
    """

    epsilon: PerPeer | None = None
    delta: Annotated[PerPeer, BeforeValidator(lambda value: _below_one(value))]
    clip_norm: PerPeer = 1.0
    schedule: ScheduleSection | None = None
    noise_multiplier: NonNegative | None = None
    calibration: Literal["rigorous", "paper"] = "rigorous"
    c_2: Positive = 1.0
    phi_min: Annotated[float, Field(gt=0, le=1)] | None = None
    noise: OwnSection | None = None
    ledger: PathText | None = None
    hardened: bool | None = None

    @model_validator(mode="after")
    def _budget_or_noise(self) -> PrivacySection:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give epsilon (a budget the noise is solved for), noise_multiplier, or both")
        if self.calibration == "paper" and (self.epsilon is None or self.noise_multiplier is not None):
            raise ValueError("calibration paper computes the noise from epsilon: give epsilon, and no noise_multiplier")
        if self.noise is not None and (self.calibration == "paper" or self.hardened):
            raise ValueError(
                "noise.module changes the noise that calibration paper and hardened are proved for: use calibration "
                "rigorous without hardened, or leave noise out"
            )
        return self


def _below_one(value: Any) -> Any:
    """Refuse a delta of 1 or more, for one number or for a list."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(x, int | float) and x >= 1 for x in numbers):
        raise ValueError("must be < 1 (well below one over the number of examples)")
    return value


def _privacy_tag(value: Any) -> str:
    return "none" if isinstance(value, str) else "section"


PrivacyChoice = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[PrivacySection, Tag("section")],
    Discriminator(_privacy_tag),
]
