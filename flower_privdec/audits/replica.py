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
    size they move it as far the other way, since one of them is drawn wherever the example is not. It is an attack on
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
    if release.sampling in ("full", "shuffle") or release.sampling_rate == 1:  # Gaussians add up to one
        move = math.sqrt(steps) / sigma
        total += move * (draws.standard_normal(len(total)) + move * present) - move**2 / 2
        return
    rate = release.sampling_rate
    idle = release.idle
    rows = max(1, BLOCK // len(total))
    opposed = release.sampling == "uniform" and idle == 0
    for start in range(0, steps, rows):
        shape = (min(rows, steps - start), len(total))
        released = draws.standard_normal(shape, dtype=np.float32) * np.float32(sigma)
        if opposed:  # over what the batch holds without the example: its place is worth 1, the example 2
            released += np.where(draws.random(shape, dtype=np.float32) < rate, np.float32(1 + present), np.float32(0))
            with_it, without = (2 * move * (released - move / 2) / (2 * sigma**2) for move in (2, 1))
            total += (_log_mixture(with_it, rate) - _log_mixture(without, rate)).sum(0)
            continue
        if present:
            released += np.where(draws.random(shape, dtype=np.float32) < rate, np.float32(1), np.float32(idle))
        drawn = (2 * released - 1) / (2 * sigma**2)
        if idle == 0:
            total += _log_mixture(drawn, rate).sum(0)
        else:
            resting = idle * (2 * released - idle) / (2 * sigma**2)
            total += (resting + _log_mixture(drawn - resting, rate)).sum(0)


def _log_mixture(exponent: np.ndarray, rate: float) -> np.ndarray:
    """Return log(1 - q + q e^a) in float64."""
    a = exponent.astype(np.float64)
    large = a > 50  # beyond, 1 - q is nothing beside it
    return np.where(large, a + math.log(rate), np.log1p(rate * np.expm1(np.where(large, 0.0, a))))
