"""Refuse steps whose numbers would overflow or vanish: what the machine makes of them then is no longer noised.

An infinite step of a finite sum shows the sum's sign beside infinite noise, and one that underflows is rounded by as
much as it is long. Clip norm, learning rate, noise and batch size are public, so this is settled before the first step.
"""

from __future__ import annotations

import numpy as np

from flower_privdec.core.cohort import LearningRate
from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.mechanism.protection import Protection

LEAST, MOST = 1e-15, 1e30  # see `gradients.bounds`; 2^-126 to 2^128 is what float32 holds


def check_number_range(plan: Protection, learning_rate: LearningRate, sizes: np.ndarray, batches: np.ndarray) -> None:
    """Check what every step multiplies clipped gradients and noise by.

    Args:
        sizes: examples of each peer, int64 [n_peers].
        batches: the expected batch size of each, float64 [n_peers].

    Raises:
        ScenarioError: naming the first quantity that is out of range.
    """
    rounds = len(plan.clip_norms) // plan.steps_per_round
    rates = np.stack([learning_rate.at(k) for k in range(rounds)]).repeat(plan.steps_per_round, axis=0)
    with np.errstate(over="ignore"):
        one = rates / batches * plan.clip_norms
        _check("privacy.clip_norm", plan.clip_norms)
        _check("algorithm.learning_rate, over the batch size, times privacy.clip_norm", one)
        _check("algorithm.learning_rate", rates)
        _check("the learning rate, times the clip norm, of all a peer's examples", one * sizes)
        noises = [one * plan.noise_multipliers]
        if plan.receivers:  # what goes to each neighbour is not multiplied by the learning rate
            noises.append(plan.clip_norms / batches * plan.noise_multipliers)
        for noise in noises:
            _check("the noise of a step", noise[noise > 0])


def _check(what: str, values: np.ndarray) -> None:
    wrong = values[~((values >= LEAST) & (values <= MOST))]
    if wrong.size:
        raise ScenarioError(
            f"{what} is {wrong.flat[0]:g} in some step and must be between {LEAST:g} and {MOST:g}, beyond which "
            "numbers overflow or vanish and noise covers nothing; change algorithm.learning_rate or privacy.clip_norm"
        )
