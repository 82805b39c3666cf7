"""Clip norms and noise over the rounds, as shapes whose scale a calibration solves for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import dynamic


@dataclass(frozen=True)
class Schedule:
    """C_k and the shape of σ_k / C_k over the rounds.

    Attributes:
        clip_norm: float64 [n_peers], C_0 of each peer.
        clip_factor: float64 [rounds], C_k / C_0.
        noise_shape: float64 [rounds], the noise multiplier of round k at scale 1.
        exponential: (ρ_c, ρ_μ) where the shape is Dyn-D2P's, None where it is given by lists.
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
    rounds, section = scenario.rounds, private.schedule
    clip, rho_c, rho_mu = dynamic(scenario.algorithm) or (None, 1.0, 1.0)
    norms = _one_each(clip or private.clip_norm, scenario.n_peers)
    if section is not None and (section.clip_norms is not None or section.noise is not None):
        factor = _stretch([1.0] if section.clip_norms is None else section.clip_norms, rounds, "clip_norms")
        sigma = _stretch([1.0] if section.noise is None else section.noise, rounds, "noise")
        return Schedule(norms, factor, sigma / factor, None)
    if section is not None:
        rho_c, rho_mu = section.rho_c, section.rho_mu
    share = np.arange(rounds) / rounds
    return Schedule(norms, rho_c**-share, rho_mu**-share, (rho_c, rho_mu))


def _one_each(clip: float | Sequence[float], n_peers: int) -> np.ndarray:
    """Return the first round's clip norm of every peer."""
    if np.ndim(clip) and np.size(clip) != n_peers:
        raise ScenarioError(
            f"algorithm: its clip norm lists {np.size(clip)} numbers for n_peers={n_peers}: give one a peer"
        )
    return np.broadcast_to(np.asarray(clip, dtype=np.float64), (n_peers,))


def _stretch(values: Sequence[float], rounds: int, name: str) -> np.ndarray:
    """Return one value a round: the list itself, or straight lines through fewer values."""
    if not 1 <= len(values) <= rounds:
        raise ScenarioError(
            f"privacy.schedule.{name} lists {len(values)} values for rounds={rounds}: give one a round, or fewer"
        )
    knots = np.linspace(0, max(rounds - 1, 1), len(values))
    return np.asarray(np.interp(np.arange(rounds), knots, np.asarray(values, dtype=np.float64)))
