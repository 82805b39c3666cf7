"""What a run will release: each peer's clipping and noise in every round, solved from its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flower_privdec.data import Sampler
from flower_privdec.errors import ScenarioError
from flower_privdec.participation import Participation
from flower_privdec.privacy import paper
from flower_privdec.privacy.accounting import epsilon
from flower_privdec.privacy.calibration import scale_for_budget
from flower_privdec.privacy.ledger import Account
from flower_privdec.privacy.mechanisms import Mechanism, build_mechanism
from flower_privdec.privacy.schedules import Schedule, build_schedule
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.algorithms import VRSection, dynamic, steps_per_round
from flower_privdec.scenario.schema import PrivacySection

UNLIMITED = "inf"  # how JSON, which has no infinity, says that there is no bound on ε


def cost(account: Account, steps: int) -> float:
    """Return ε of what a peer releases in the first steps of a run."""
    parts = (spend.between(0, steps) for spend in account.spends)
    return epsilon([part.release for part in parts if part is not None], account.delta)


@dataclass(frozen=True)
class Claim:
    """What a paper's formula says of one peer.

    Attributes:
        epsilon: the ε it claims at the peer's δ.
        mu_total, mu_0: of Gaussian differential privacy, where the formula uses it.
    """

    epsilon: float
    mu_total: float | None = None
    mu_0: float | None = None


@dataclass(frozen=True)
class PrivacyPlan:
    """Clip norms and noise multipliers of the whole network, and the accounts they are charged to.

    Attributes:
        clip_norms: float64 [steps, n_peers], where a round has `steps_per_round` steps.
        noise_multipliers: likewise; noise std over clip norm, of the sum over a batch.
        accounts: one for each peer.
        claims: what the paper's formula claims, where it made the noise; else None for each peer.
        calibration: how the noise was solved for.
    """

    clip_norms: np.ndarray
    noise_multipliers: np.ndarray
    accounts: tuple[Account, ...]
    claims: tuple[Claim | None, ...]
    calibration: str
    steps_per_round: int = 1

    def clip_norm(self, step: int) -> np.ndarray:
        """Return the clip norm of every peer in a step, [n_peers]."""
        return np.asarray(self.clip_norms[step])

    def noise_multiplier(self, step: int) -> np.ndarray:
        """Return the noise multiplier of every peer in a step, [n_peers]."""
        return np.asarray(self.noise_multipliers[step])

    def epsilons(self, rounds: int) -> list[float]:
        """Return ε of every peer after so many rounds."""
        return [cost(account, rounds * self.steps_per_round) for account in self.accounts]


def _each(value: float | Sequence[float], n_peers: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (n_peers,))


def build_plan(
    scenario: Scenario, section: PrivacySection, sampler: Sampler, participation: Participation
) -> PrivacyPlan:
    """Solve every peer's noise from its budget, for the rounds in which it is active.

    Who is active is public and decided beforehand, so a peer's noise is solved for its own number of
    active rounds: activity amplifies nothing and idle rounds cost nothing.

    Raises:
        ScenarioError: when a budget is below what any noise can keep, or a paper's formula does not apply.
    """
    n_peers, each_round = scenario.n_peers, steps_per_round(scenario.algorithm)
    schedule = build_schedule(scenario).repeated(each_round)
    active = np.stack([participation.active(k) for k in range(scenario.rounds)]).repeat(each_round, axis=0)
    deltas = _each(section.delta, n_peers)
    budgets = [None] * n_peers if section.epsilon is None else _each(section.epsilon, n_peers).tolist()
    noise = np.empty(active.shape)
    accounts, claims = [], []
    for peer in range(n_peers):
        mechanism = build_mechanism(scenario, sampler, peer, schedule)
        budget, delta = budgets[peer], float(deltas[peer])
        scale, claim = _scale(section, scenario, schedule, mechanism, active[:, peer], budget, delta)
        noise[:, peer] = mechanism.noise(scale)
        account = Account(peer, mechanism.spends(active[:, peer], scale), None if claim else budget, delta)
        accounts.append(_within_budget(account, len(active)))
        claims.append(claim)
    clip = schedule.clip_factor[:, None] * schedule.clip_norm
    return PrivacyPlan(clip, noise, tuple(accounts), tuple(claims), section.calibration, each_round)


def _within_budget(account: Account, steps: int) -> Account:
    """Return the account cut to the steps its budget allows, where the noise was given and not solved for.

    Raises:
        ScenarioError: when the budget allows not even one step.
    """
    if account.budget is None or cost(account, steps) <= account.budget:
        return account
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(account, middle) <= account.budget else (low, middle)
    parts = (spend.between(0, low) for spend in account.spends)
    kept = tuple(part for part in parts if part is not None)
    if not kept:
        raise ScenarioError(
            f"privacy.epsilon={account.budget:g} of peer {account.peer} is below what its first step costs, "
            f"{cost(account, account.spends[0].from_round + 1):.3g}; raise it or privacy.noise_multiplier"
        )
    return replace(account, spends=kept)


def _scale(
    section: PrivacySection,
    scenario: Scenario,
    schedule: Schedule,
    mechanism: Mechanism,
    active: np.ndarray,
    budget: float | None,
    delta: float,
) -> tuple[float, Claim | None]:
    """Return the scale of one peer's noise, and the claim where a paper's formula gave it."""
    if section.noise_multiplier is not None:
        return section.noise_multiplier, None
    if budget is None or not active.any():
        return 1.0, None
    if section.calibration == "paper":
        return _paper_scale(section, scenario, schedule, mechanism, active, budget, delta)
    return scale_for_budget(lambda scale: mechanism.releases(active, scale), budget, delta), None


def _paper_scale(
    section: PrivacySection,
    scenario: Scenario,
    schedule: Schedule,
    mechanism: Mechanism,
    active: np.ndarray,
    budget: float,
    delta: float,
) -> tuple[float, Claim]:
    """Return the scale by eq. 11 (PrivSGP-VR), eq. 8 and 9, or Proposition 4 (Dyn-D2P)."""
    if isinstance(scenario.algorithm, VRSection) and not schedule.constant:
        raise ScenarioError(
            "privacy.calibration='paper' has no formula for privsgp-vr with a schedule: no paper claims an ε for it; "
            "use calibration rigorous"
        )
    release, rounds = mechanism.release, int(active.sum())
    if schedule.constant and dynamic(scenario.algorithm) is None:
        factor = 3.0 if isinstance(scenario.algorithm, VRSection) else 1.0
        sigma = paper.moments_sigma(
            budget,
            delta,
            rounds=rounds,
            dataset_size=release.dataset_size,
            clip_norm=1.0,
            c_2=section.c_2,
            factor=factor,
        )
        return sigma * release.batch_size, Claim(budget)
    total = paper.gdp_mu(budget, delta)
    if schedule.exponential is None:
        return paper.proposition_4(total, release.sampling_rate, schedule.noise_shape[active]), Claim(budget, total)
    mu_0 = paper.gdp_mu_0(total, release.sampling_rate, rounds, schedule.exponential[1])
    return 1 / mu_0, Claim(budget, total, mu_0)


def privacy_rows(plan: PrivacyPlan | None, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Return each peer's guarantee as the summary says it; ε is "inf" where there is none.

    Args:
        epsilons: what each peer has spent.
    """
    if plan is None:
        row = {"epsilon": UNLIMITED, "delta": 0.0, "unit": "example", "adjacency": "zero-out"}
        return [{"peer": peer, **row, "calibration": "none", "claimed_epsilon": None} for peer in range(len(epsilons))]
    return [
        {
            "peer": account.peer,
            "epsilon": UNLIMITED if math.isinf(total) else total,
            "delta": account.delta,
            "unit": "example",
            "adjacency": "zero-out",
            "calibration": plan.calibration,
            "claimed_epsilon": claim.epsilon if claim else None,
        }
        for account, total, claim in zip(plan.accounts, epsilons, plan.claims, strict=True)
    ]
