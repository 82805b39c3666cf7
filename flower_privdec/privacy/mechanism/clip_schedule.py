"""How clip norms and noise change over a run: C_k, and the shape of σ_k / C_k.

A schedule has everything about a peer's noise but one number, its scale: the noise multiplier of round k is
scale * noise_shape[k]. The scale is what `protection` solves from a peer's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.scenario import Scenario


@dataclass(frozen=True)
class Schedule:
    """C_k and the shape of σ_k / C_k over the rounds.

    Attributes:
        clip_norm: float64 [n_peers], C_0 of each peer.
        clip_factor: float64 [rounds], C_k / C_0.
        noise_shape: float64 [rounds], the noise multiplier of round k at scale 1.
        exponential: (ρ_c, ρ_μ) if the shape is Dyn-D2P's; None if it is given by lists.
    """

    clip_norm: np.ndarray
    clip_factor: np.ndarray
    noise_shape: np.ndarray
    exponential: tuple[float, float] | None

    @property
    def constant(self) -> bool:
        """Return whether every round is alike."""
        return self.exponential == (1.0, 1.0)

    def repeated(self, times: int) -> Schedule:
        """Return the schedule of steps, so many a round, instead of rounds."""
        return replace(self, clip_factor=self.clip_factor.repeat(times), noise_shape=self.noise_shape.repeat(times))


def build_schedule(scenario: Scenario) -> Schedule:
    """Return the schedule of a scenario with privacy.

        C_k = C_0 ρ_c^{-k/K},  μ_k = μ_0 ρ_μ^{k/K},  σ_k = C_k / μ_k

    so the noise multiplier σ_k / C_k is (1/μ_0) ρ_μ^{-k/K}: a shape times the scale 1/μ_0.

    Source: Dyn-D2P (Zhu et al.), Algorithm 1, lines 5 to 8 (and 2 for lists).
    """
    private = scenario.private
    if private is None:
        raise ValueError("a scenario without privacy has no schedule")

    clip, clip_decay, noise_growth = scenario.algorithm.own_schedule or (None, 1.0, 1.0)  # C_0, ρ_c, ρ_μ
    clip = clip or private.clip_norm
    if np.ndim(clip) and np.size(clip) != scenario.n_peers:
        raise ScenarioError(
            f"algorithm: its clip norm lists {np.size(clip)} numbers for n_peers={scenario.n_peers}: give one a peer",
            code="privacy.clip-norm",
        )
    norms = np.broadcast_to(np.asarray(clip, dtype=np.float64), (scenario.n_peers,))

    rounds = scenario.rounds
    section = private.schedule
    if section is not None and (section.clip_norms is not None or section.noise is not None):
        factor = np.ones(rounds)
        sigma = np.ones(rounds)
        if section.clip_norms is not None:
            factor = _stretched(section.clip_norms, rounds, "clip_norms")
        if section.noise is not None:
            sigma = _stretched(section.noise, rounds, "noise")
        return Schedule(norms, factor, sigma / factor, None)

    if section is not None:
        clip_decay = section.rho_c
        noise_growth = section.rho_mu
    share = np.arange(rounds) / rounds  # k / K
    return Schedule(norms, clip_decay**-share, noise_growth**-share, (clip_decay, noise_growth))


def _stretched(values: Sequence[float], rounds: int, name: str) -> np.ndarray:
    """Return one value a round: the list itself, or straight lines through fewer values."""
    if not 1 <= len(values) <= rounds:
        raise ScenarioError(
            f"privacy.schedule.{name} lists {len(values)} values for rounds={rounds}: give one a round, or fewer",
            code="privacy.schedule",
        )
    knots = np.linspace(0, max(rounds - 1, 1), len(values))
    lines = np.interp(np.arange(rounds), knots, np.asarray(values, dtype=np.float64))
    return np.asarray(lines)
