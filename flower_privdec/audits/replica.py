"""A replica of declared releases without a model: many more trials, of the mechanism that is accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.rows.keys import keyed_generator

BLOCK = 1 << 20  # numbers drawn at once


def replica_scores(releases: Sequence[Release], trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw releases with and without an example, and return the log likelihood ratio of each trial.

    The example moves a step as far as the release allows, and the other examples add nothing; in a batch of fixed
    size they move it as far the other way, since another is drawn in each batch without the example. It is an attack on
    the mechanism: what it shows is a lower bound on the ε of every implementation that releases no less.

    Args:
        releases: of one peer in a whole run.
        trials: how many without the example, and as many with it.
        seed: keys the draws.

    Returns:
        Scores without and with it, float64 [trials] each.
    """
    scores = []
    for present in (False, True):
        draws = keyed_generator(seed, "audit replica", int(present))
        total = np.zeros(trials)
        for release in releases:
            _add(total, release, draws, present=present)
        scores.append(total)
    return scores[0], scores[1]


def _add(total: np.ndarray, release: Release, draws: np.random.Generator, *, present: bool) -> None:
    """Add the log ratios of all steps of a release to trials, in place."""
    sigma = release.noise_multiplier
    steps = release.steps

    if sigma == 0:
        total += math.inf if present else -math.inf
        return
    if release.sampling in ("full", "shuffle") or release.sampling_rate == 1:
        # Gaussians of all steps add up to one.
        move = math.sqrt(steps) / sigma
        total += move * (draws.standard_normal(len(total)) + move * present) - move**2 / 2
        return

    rows = max(1, BLOCK // len(total))  # steps at a time
    for start in range(0, steps, rows):
        shape = (min(rows, steps - start), len(total))
        total += _log_ratios(release, draws, shape, present=present).sum(0)


def _log_ratios(release: Release, draws: np.random.Generator, shape: tuple[int, int], *, present: bool) -> np.ndarray:
    """Draw some steps of a sampled release, and return the log likelihood ratio of each, of a shape."""
    sigma = release.noise_multiplier
    rate = release.sampling_rate
    idle = release.idle
    released = draws.standard_normal(shape, dtype=np.float32) * np.float32(sigma)

    def log_of_move(move: float) -> np.ndarray:
        """Return the log likelihood ratio of a move to none: N(move, σ²) over N(0, σ²)."""
        return np.asarray(2 * move * (released - move / 2) / (2 * sigma**2))

    if release.sampling == "uniform" and idle == 0:
        # Beside what the batch holds in any case: the example's place is worth 1 with another in it, and 2 with it.
        move = np.float32(2 if present else 1)
        released += np.where(draws.random(shape, dtype=np.float32) < rate, move, np.float32(0))
        return np.asarray(_log_mixture(log_of_move(2), rate) - _log_mixture(log_of_move(1), rate))

    if present:
        released += np.where(draws.random(shape, dtype=np.float32) < rate, np.float32(1), np.float32(idle))
    drawn = log_of_move(1)
    if idle == 0:
        return _log_mixture(drawn, rate)
    resting = log_of_move(idle)
    return np.asarray(resting + _log_mixture(drawn - resting, rate))


def _log_mixture(exponent: np.ndarray, rate: float) -> np.ndarray:
    """Return log(1 - q + q e^a) in float64."""
    a = exponent.astype(np.float64)
    is_large = a > 50  # 1 - q is then nothing beside q e^a, which would overflow later
    small = np.where(is_large, 0.0, a)
    return np.where(is_large, a + math.log(rate), np.log1p(rate * np.expm1(small)))
