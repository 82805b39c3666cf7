"""What releases cost: ε at a δ, an upper bound, for any list of releases of one peer.

Unit: one example. Adjacency: zero-out (`events`), so the sensitivity of a sum of clipped gradients is one
clip norm C, and the noise multiplier of a plain step is noise std over C. How that reads in dp-accounting 0.6,
pinned by tests:
  - PLDAccountant: REPLACE_SPECIAL (zero-out) and ADD_OR_REMOVE_ONE take sensitivity C and give the same
    numbers; REPLACE_ONE takes 2 C by itself.
  - RdpAccountant: sensitivity is C under all three. Under REPLACE_ONE the caller has to halve the noise
    multiplier; SampledWithoutReplacementDpEvent exists under REPLACE_ONE alone.

By sampling, one step is
  - `full`: a Gaussian. Many of them are one Gaussian of 1/σ² = Σ 1/σ_k², whose ε has a closed form.
  - `shuffle`: a Gaussian an epoch. An epoch's batches are disjoint, so whatever the permutation, even if it
    were known, zeroing an example moves one of the epoch's sums, by at most C, and no other: the epoch is one
    Gaussian release, with the other steps as functions of it. A started epoch counts whole.
  - `poisson`: a Poisson-sampled Gaussian, or with idle examples a mixture of Gaussians, exact up to the grid
    (`profiles.poisson_profiles`, `profiles.mixture_profiles`).
  - `uniform`: a bound proved in `profiles.uniform_profiles`; dp-accounting has no zero-out event for it.
  - `blocks`, and `uniform` with idle examples: the choice of examples counts as public (`profiles.shown_profile`).

Many different noise multipliers (schedules) are binned: each is rounded down to the least of its bin, which
only adds loss (a Gaussian of more noise is the one of less noise, noised again).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.events import Release, canonical
from flower_privdec.privacy.losses import Losses, compose, grid_interval, step_losses
from flower_privdec.privacy.profiles import gaussian_profile

FEWEST_BINS, BIN_WIDTH = 64, 0.01  # at least so many bins; none wider than so much of log σ
LEAST_SAMPLED_NOISE = 0.01  # below, sampling is not credited (e^loss overflows)


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Return an ε such that the releases together are (ε, δ)-differentially private.

    Args:
        releases: all releases of one peer on one data set, in any order.
        delta: δ in (0, 1).

    Returns:
        ε: 0.0 when nothing was released, ∞ when something was released without noise.

    Raises:
        ScenarioError: when δ is not in (0, 1).

    Privacy: unit one example, adjacency zero-out, whoever sees all that the peer sends.
    """
    check_delta(delta)
    return _epsilon(canonical(releases), float(delta))


def delta(releases: Iterable[Release], epsilon: float) -> float:
    """Return a δ such that the releases together are (ε, δ)-differentially private.

    Raises:
        ScenarioError: when ε < 0.
    """
    if not epsilon >= 0:
        raise ScenarioError(f"epsilon={epsilon} must be >= 0")
    merged = canonical(releases)
    if not merged:
        return 0.0
    if any(r.noise_multiplier == 0 for r in merged):
        return 1.0
    if (sigma := _gaussian_only(merged)) is not None:
        return float(gaussian_profile(np.array([epsilon]), 1 / sigma)[0])
    return min(1.0, float(_composition(merged).get_delta_for_epsilon(epsilon)))


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    if not 0 < delta < 1:
        raise ScenarioError(f"delta={delta} must be in (0, 1); use about one over 10 times the number of examples")


@lru_cache(maxsize=8192)
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(r.noise_multiplier == 0 for r in releases):
        return math.inf
    if (sigma := _gaussian_only(releases)) is not None:
        with np.errstate(divide="ignore"):  # log δ = -∞ of next to no loss
            return float(get_epsilon_gaussian(sigma, delta))
    return float(_composition(releases).get_epsilon_for_delta(delta))


def _plain(release: Release) -> bool:
    """Return whether a step counts as a Gaussian of all examples.

    So does a sampled one of next to no noise: sampling only helps, and its ε is in the hundreds anyhow.
    """
    sampled = release.sampling not in ("full", "shuffle") and release.sampling_rate < 1
    return not sampled or release.noise_multiplier < LEAST_SAMPLED_NOISE


def _gaussian_only(releases: Sequence[Release]) -> float | None:
    """Return σ of one Gaussian that costs at least what all releases do, or None when sampling matters.

    Exactly what they cost when all are plain; beside plain ones of next to no noise all may count as plain.
    """
    plain = [r for r in releases if _plain(r)]
    if len(plain) == len(releases) or (plain and _combined(plain) < LEAST_SAMPLED_NOISE):
        return _combined(releases)
    return None


def _combined(plain: Iterable[Release]) -> float:
    """Return σ with 1/σ² = Σ 1/σ_k²."""
    return 1 / math.sqrt(math.fsum(r.steps / r.noise_multiplier**2 for r in plain))


@lru_cache(maxsize=8)
def _composition(releases: tuple[Release, ...]) -> PrivacyLossDistribution:
    """Return dp-accounting's privacy-loss distribution of a composition (losses > 0, where ε is read)."""
    plain = [r for r in releases if _plain(r)]
    steps = [r for r in _binned(releases) if not _plain(r)]
    if plain:
        steps.append(replace(plain[0], sampling="full", noise_multiplier=_combined(plain), steps=1, idle=0.0))
    interval = grid_interval(steps)
    pairs = [step_losses(r.sampling, r.sampling_rate, r.idle, 1 / r.noise_multiplier, interval) for r in steps]
    sides = zip(*pairs, strict=True)
    counts = [r.steps for r in steps]
    remove, add = (_pmf(compose(list(zip(side, counts, strict=True)), interval), interval) for side in sides)
    return PrivacyLossDistribution(remove, add)


def _pmf(losses: Losses, interval: float) -> DensePLDPmf:
    skipped = min(max(0, -losses.lowest), len(losses.mass) - 1)
    return DensePLDPmf(interval, losses.lowest + skipped, losses.mass[skipped:], losses.infinite, True)


def _binned(releases: Iterable[Release]) -> list[Release]:
    """Return releases with at most a moderate number of noise multipliers, none raised."""
    out: list[Release] = []
    for _, group in groupby(releases, key=lambda r: r.mechanism[:-1]):
        out += _bin_noise(list(group))
    return out


def _bin_noise(group: list[Release]) -> list[Release]:
    """Return releases that differ in noise alone, each noise multiplier rounded down to its bin's least."""
    if len(group) <= FEWEST_BINS:
        return group
    logs = np.log([r.noise_multiplier for r in group])
    width = min(BIN_WIDTH, float(logs[-1] - logs[0]) / FEWEST_BINS)
    bins = np.floor((logs - logs[0]) / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    steps = np.add.reduceat([r.steps for r in group], starts)
    return [group[start].times(int(count)) for start, count in zip(starts, steps, strict=True)]


# SHIM
Alternatives = tuple[tuple[Release, ...], ...]


def epsilon_of_runs(runs, delta):
    import itertools

    return max(
        (epsilon([r for part in choice for r in part], delta) for choice in itertools.product(*runs)), default=0.0
    )
