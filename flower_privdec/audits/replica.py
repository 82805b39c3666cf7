"""Draws from the declared mechanism itself, without a model, so that an audit can afford many more trials.

A trial plays all releases of one peer, once without the attacked example and once with it, in the worst case that the
releases allow. Its score is the exact log likelihood ratio of the two cases, so no attacker could guess better.

All numbers are in units of how far a drawn example may move the sum; σ, the noise multiplier, is in the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.rows.keys import keyed_generator

NUMBERS_AT_ONCE = 1 << 20  # bounds the memory of the draws
LARGE_EXPONENT = 50


def replica_scores(releases: Sequence[Release], trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the releases with and without an example; return each trial's log likelihood ratio of with to without.

    The example moves every sum as far as its release allows, and all other examples add nothing. Only in batches of a
    fixed size do they add something, as far in the opposite direction, because the example then takes another's place.

    This attacks the mechanism, not an implementation of it. The scores give a lower bound on the ε of every
    implementation that releases at least as much.

    Args:
        releases: all releases of one peer in a whole run.
        trials: how many trials to draw with the example, and again without it.
        seed: keys the draws.

    Returns:
        The scores without the example and those with it, float64 [trials] each.
    """
    scores = []
    for present in (False, True):
        draws = keyed_generator(seed, "audit replica", int(present))
        total = np.zeros(trials)
        for release in releases:
            _add_log_ratios_(total, release, draws, present=present)
        scores.append(total)
    return scores[0], scores[1]


def _add_log_ratios_(total: np.ndarray, release: Release, draws: np.random.Generator, *, present: bool) -> None:
    """Add the log ratios of all steps of a release to the trials' total [trials], in place."""
    trials = len(total)
    sigma = release.noise_multiplier
    steps = release.steps

    # Without noise, one look at the sum decides.
    if sigma == 0:
        total += math.inf if present else -math.inf
        return

    # If the example is in every step, the steps together are one Gaussian whose mean moves sqrt(steps) times as far.
    if release.sampling in ("full", "shuffle") or release.sampling_rate == 1:
        move = math.sqrt(steps) / sigma
        total += move * (draws.standard_normal(trials) + move * present) - move**2 / 2
        return

    steps_at_once = max(1, NUMBERS_AT_ONCE // trials)
    for start in range(0, steps, steps_at_once):
        shape = (min(steps_at_once, steps - start), trials)
        total += _sampled_log_ratios(release, draws, shape, present=present).sum(0)


def _sampled_log_ratios(
    release: Release, draws: np.random.Generator, shape: tuple[int, int], *, present: bool
) -> np.ndarray:
    """Draw some steps of a release that samples its batches; return their log likelihood ratios [steps, trials]."""
    sigma = release.noise_multiplier
    rate = release.sampling_rate
    idle = release.idle

    # First the noise, to which the branches below add the example's move. float32 halves the time of the draws.
    released = draws.standard_normal(shape, dtype=np.float32) * np.float32(sigma)

    def log_ratio_to_zero(move: float) -> np.ndarray:
        """Return log N(released; move, σ²) / N(released; 0, σ²)."""
        return np.asarray(2 * move * (released - move / 2) / (2 * sigma**2))

    if release.sampling == "uniform" and idle == 0:
        # All other examples add -1 each, and the sum is measured from -b, its value if this example is not drawn. If it
        # is drawn, it takes the place of another: 2 if it adds +1, and 1 in the case without it, if it adds 0.
        move = np.float32(2 if present else 1)
        released += np.where(draws.random(shape, dtype=np.float32) < rate, move, np.float32(0))
        log_present = _log_mixture(log_ratio_to_zero(2), rate)
        log_absent = _log_mixture(log_ratio_to_zero(1), rate)
        return np.asarray(log_present - log_absent)

    if present:
        released += np.where(draws.random(shape, dtype=np.float32) < rate, np.float32(1), np.float32(idle))

    drawn = log_ratio_to_zero(1)
    if idle == 0:
        return _log_mixture(drawn, rate)

    # log((1 - q) e^idle + q e^drawn), with e^idle taken out of the sum.
    not_drawn = log_ratio_to_zero(idle)
    return np.asarray(not_drawn + _log_mixture(drawn - not_drawn, rate))


def _log_mixture(exponent: np.ndarray, rate: float) -> np.ndarray:
    """Return log(1 - q + q e^a) in float64, for the rate q."""
    a = exponent.astype(np.float64)

    # For a large a, 1 - q vanishes beside q e^a, and e^a might overflow. Both branches of `where` are computed, so the
    # large ones are replaced before expm1 sees them.
    is_large = a > LARGE_EXPONENT
    small = np.where(is_large, 0.0, a)
    return np.where(is_large, a + math.log(rate), np.log1p(rate * np.expm1(small)))
