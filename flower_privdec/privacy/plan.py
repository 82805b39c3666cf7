"""What a run will release: each peer's clipping and noise in every round, solved from its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_privdec.data import Sampler
from flower_privdec.participation import Participation
from flower_privdec.privacy.accounting import epsilon
from flower_privdec.privacy.calibration import scale_for_budget
from flower_privdec.privacy.events import Release, plan_spends
from flower_privdec.privacy.ledger import Account
from flower_privdec.scenario.schema import PrivacySection

UNLIMITED = "inf"  # how JSON, which has no infinity, says that there is no bound on ε


def cost(account: Account, rounds: int) -> float:
    """Return ε of what a peer releases in the first `rounds` rounds."""
    parts = (spend.between(0, rounds) for spend in account.spends)
    return epsilon([part.release for part in parts if part is not None], account.delta)


@dataclass(frozen=True)
class PrivacyPlan:
    """Clip norms and noise multipliers of the whole network, and the accounts they are charged to.

    Attributes:
        clip_norms: float64 [n_peers], or [rounds, n_peers] for a schedule.
        noise_multipliers: likewise, noise std over clip norm.
        accounts: one for each peer.
        calibration: how the noise was solved for.
    """

    clip_norms: np.ndarray
    noise_multipliers: np.ndarray
    accounts: tuple[Account, ...]
    calibration: str = "rigorous"

    def clip_norm(self, round_index: int) -> np.ndarray:
        """Return the clip norm of every peer in a round, [n_peers]."""
        return self.clip_norms if self.clip_norms.ndim == 1 else np.asarray(self.clip_norms[round_index])

    def noise_multiplier(self, round_index: int) -> np.ndarray:
        """Return the noise multiplier of every peer in a round, [n_peers]."""
        noise = self.noise_multipliers
        return noise if noise.ndim == 1 else np.asarray(noise[round_index])

    def epsilons(self, rounds: int) -> list[float]:
        """Return ε of every peer after so many rounds."""
        return [cost(account, rounds) for account in self.accounts]


def _each(value: float | Sequence[float], n_peers: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (n_peers,))


def build_plan(section: PrivacySection, sampler: Sampler, participation: Participation, rounds: int) -> PrivacyPlan:
    """Solve every peer's noise from its budget, for the rounds in which it is active.

    Who is active is public and decided beforehand, so a peer's noise is solved for its own number of
    active rounds: activity amplifies nothing and idle rounds cost nothing.

    Raises:
        ScenarioError: when a budget is below what any noise can keep.
    """
    n_peers = participation.n_peers
    active = np.stack([participation.active(k) for k in range(rounds)])
    deltas = _each(section.delta, n_peers)
    budgets = None if section.epsilon is None else _each(section.epsilon, n_peers)
    noise = np.ones(n_peers)
    accounts = []
    for peer in range(n_peers):
        release = _template(sampler, peer)
        budget = None if budgets is None else float(budgets[peer])
        if section.noise_multiplier is not None:
            noise[peer] = section.noise_multiplier
        elif budget is not None and active[:, peer].any():
            noise[peer] = _solve(release, active[:, peer], budget, float(deltas[peer]))
        spends = plan_spends(_with_noise(release, noise[peer]), active[:, peer])
        accounts.append(Account(peer, spends, budget, float(deltas[peer])))
    return PrivacyPlan(_each(section.clip_norm, n_peers), noise, tuple(accounts))


def _template(sampler: Sampler, peer: int) -> Release:
    size = int(sampler.partition_sizes[peer])
    batch = round(float(sampler.normalizer[peer]))
    return Release(sampler.kind, float(sampler.sampling_rate[peer]), size, batch, 1.0)


def _with_noise(release: Release, noise_multiplier: float) -> Release:
    return Release(release.sampling, release.sampling_rate, release.dataset_size, release.batch_size, noise_multiplier)


def _solve(release: Release, active: np.ndarray, budget: float, delta: float) -> float:
    def releases(scale: float) -> list[Release]:
        return [spend.release for spend in plan_spends(_with_noise(release, scale), active)]

    return scale_for_budget(releases, budget, delta)


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
            "claimed_epsilon": None,
        }
        for account, total in zip(plan.accounts, epsilons, strict=True)
    ]
