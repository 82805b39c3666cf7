"""The scale of a peer's noise: given, solved by the accountant, or by a paper's formula, with what that one claims."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.accountant.calibration import scale_for_budget
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.declared import Declares, Drawing
from flower_privdec.privacy.mechanism.mechanisms import Mechanism
from flower_privdec.privacy.mechanism.schedules import Schedule
from flower_privdec.scenario.sections import PrivacySection

FACTORS = {"moments": 1.0, "moments-table": 3.0}  # of eq. 11: how far an example moves a step, in clip norms
UNSCHEDULED = ("moments-table", "cross-gradients", "subsampling")  # formulas for steps that are all alike
QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Claim:
    """What a paper's formula says of one peer.

    Attributes:
        epsilon: the ε it claims at the peer's δ, for the whole run or for one round.
        each_round: whether it is for one round.
        mu_total, mu_0: of Gaussian differential privacy, where the formula uses it.
        quarters: the ε it claims after each quarter of the rounds, where the paper says that.
        breach: which condition of the formula does not hold; None where all do.
    """

    epsilon: float
    mu_total: float | None = None
    mu_0: float | None = None
    each_round: bool = False
    quarters: tuple[float, ...] | None = None
    breach: str | None = None


@dataclass(frozen=True)
class Solver:
    """Finds the scale of a peer's noise under one scenario's privacy section.

    Attributes:
        weight_factor: what the mixing weights add to PDSL's formula.
        share: ι, the chance of a peer to be active in a round, the mean over the peers.
    """

    section: PrivacySection
    algorithm: Declares
    schedule: Schedule
    weight_factor: float = 1.0
    share: float = 1.0

    def scale(
        self, mechanism: Mechanism, active: np.ndarray, budget: float | None, delta: float
    ) -> tuple[float, Claim | None]:
        """Return the scale of one peer's noise, and the claim where a paper's formula gave it.

        Args:
            active: bool [steps].

        Raises:
            ScenarioError: where no noise keeps the budget, nothing is declared, or no paper has a formula.
        """
        if budget is not None and None in mechanism.kinds:
            under = "" if self.section.noise is None else f" under privacy.noise.module={self.section.noise.module!r}"
            raise ScenarioError(
                f"algorithm.name={self.algorithm.name!r} declares no releases{under}, so its ε is ∞ and no noise keeps "
                f"privacy.epsilon={budget:g}; declare what its steps release (`released`), or set privacy: none",
                code="privacy.undeclared",
            )
        if self.section.noise_multiplier is not None:
            return self.section.noise_multiplier, None
        if budget is None or not mechanism.releases(active, 1.0):
            return 1.0, None
        if self.section.calibration == "paper":
            return self._by_paper(mechanism, active, budget, delta)
        return scale_for_budget(lambda scale: mechanism.releases(active, scale), budget, delta), None

    def _by_paper(self, mechanism: Mechanism, active: np.ndarray, budget: float, delta: float) -> tuple[float, Claim]:
        """Return the scale by eq. 11 (PrivSGP-VR), 8, 9, or Prop. 4 (Dyn-D2P), eq. 27 (PDSL), or Th. 1 (DP-DDA)."""
        formula, drawing = self.algorithm.paper_noise, mechanism.drawing
        scheduled = not self.schedule.constant and formula == "moments"  # Dyn-D2P's Algorithm 2 on PrivSGP's steps
        if formula is None or (formula in UNSCHEDULED and not self.schedule.constant):
            changed = " with a schedule" if formula else ""
            raise ScenarioError(
                f"privacy.calibration='paper' has no formula for {self.algorithm.name}{changed}: no paper claims an ε "
                "for it; use calibration rigorous"
            )
        if formula == "subsampling":
            return self._by_subsampling(drawing, len(active), budget, delta)
        if formula == "cross-gradients":
            sigma = paper.cross_gradient_sigma(
                budget,
                delta,
                clip_norm=1.0,
                phi_min=self.section.phi_min or 1.0,
                weight_factor=self.weight_factor,
            )
            return sigma * drawing.batch, Claim(budget, each_round=True)
        if formula != "gdp" and not scheduled:
            sigma = paper.moments_sigma(
                budget,
                delta,
                rounds=int(active.sum()),
                dataset_size=drawing.size,
                clip_norm=1.0,
                c_2=self.section.c_2,
                factor=FACTORS[formula],
            )
            return sigma * drawing.batch, Claim(budget)
        total, shape = paper.gdp_mu(budget, delta), self.schedule.noise_shape[active]
        if self.schedule.exponential is None:
            return paper.proposition_4(total, drawing.rate, shape), Claim(budget, total)
        mu_0 = paper.gdp_mu_0(total, drawing.rate, shape**-2.0)
        return 1 / mu_0, Claim(budget, total, mu_0)

    def _by_subsampling(self, drawing: Drawing, rounds: int, budget: float, delta: float) -> tuple[float, Claim]:
        """Return the scale by Theorem 1 of DP-DDA, and what its eq. 7 claims over the rounds."""
        q, share = drawing.size, self.share
        sigma = paper.subsampled_sigma(budget, delta, rounds=rounds, dataset_size=q, share=share, clip_norm=1.0)
        breach = paper.subsampling_breach(budget, rounds=rounds, dataset_size=q, batch=drawing.batch, share=share)
        quarters = tuple(paper.epsilon_after(budget, t) for t in QUARTERS)
        return sigma * drawing.batch, Claim(budget, quarters=quarters, breach=breach)
