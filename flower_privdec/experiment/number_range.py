"""Checks that no step of a run multiplies by numbers that its floating-point type cannot hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import LearningRate
from flower_privdec.privacy.mechanism.declared import MOST_INFLATION, OTHER, Declares, Drawing, rounding_error
from flower_privdec.privacy.mechanism.protection import Protection

# What float32 holds is 2^-126 to 2^128; `gradients.protocol` says why the limits are narrower.
LEAST_FACTOR = 1e-15
MOST_FACTOR = 1e30


def check_number_range(plan: Protection, learning_rate: LearningRate, sizes: np.ndarray, batches: np.ndarray) -> None:
    """Check every number that a step multiplies clipped gradients and noise by.

    Args:
        sizes: examples of each peer, int64 [n_peers].
        batches: expected batch size of each peer, float64 [n_peers].

    Raises:
        ScenarioError: the message names the first quantity that is out of range.
    """
    rounds = len(plan.clip_norms) // plan.steps_per_round
    rates = learning_rate.of_rounds(rounds).repeat(plan.steps_per_round, axis=0)  # [steps, n_peers]

    # Infinity is out of range like any other number that is too large, and needs no warning.
    with np.errstate(over="ignore"):
        one_example = rates / batches * plan.clip_norms
        all_examples = one_example * sizes
        noises = [one_example * plan.noise_multipliers]
        if plan.receivers:  # what goes to each neighbour is not multiplied by the learning rate
            noises.append(plan.clip_norms / batches * plan.noise_multipliers)

    _check("privacy.clip_norm", plan.clip_norms)
    _check("algorithm.learning_rate, over the batch size, times privacy.clip_norm", one_example)
    _check("algorithm.learning_rate", rates)
    _check("the learning rate, times the clip norm, of all a peer's examples", all_examples)
    for noise in noises:
        _check("the noise of a step", noise[noise > 0])


def _check(what: str, values: np.ndarray) -> None:
    # Written so that NaN, which compares as neither, is out of range too.
    in_range = (values >= LEAST_FACTOR) & (values <= MOST_FACTOR)
    wrong = values[~in_range]
    if wrong.size:
        raise ScenarioError(
            f"{what} is {wrong.flat[0]:g} in some step and must be between {LEAST_FACTOR:g} and {MOST_FACTOR:g}; "
            "beyond that, numbers overflow or vanish and noise covers nothing: change algorithm.learning_rate or "
            "privacy.clip_norm",
            code="experiment.range",
        )


def noise_inflation(algorithm: Declares, drawings: Iterable[Drawing], steps: int, dtype: torch.dtype) -> float:
    """Return by what share hardened noise has to be larger: the largest share that some peers need.

    Args:
        drawings: how each of these peers draws its examples.
        steps: the number of steps of the run.
        dtype: in which sums are made.

    Raises:
        ScenarioError: rounding may change a sum by more than a tenth of what one example adds to it.

    Privacy: with a chance of 2^-64 a step a Poisson batch has more examples than are assumed here; δ includes that.
    """
    unit = torch.finfo(dtype).eps / 2
    largest = 0.0
    for drawing in dict.fromkeys(drawings):
        size = drawing.most
        inflation = rounding_error(size, unit)

        # A sum that remembers earlier gradients carries the rounding of all steps before.
        remembers = any(part.idle for part in algorithm.released(0, drawing) or ())
        if remembers:
            inflation += 4 * size * (steps * size + drawing.size) * unit

        if inflation > MOST_INFLATION:
            raise ScenarioError(
                f"privacy.hardened: rounding may change a sum of {size} examples in "
                f"{str(dtype).removeprefix('torch.')} by {inflation:.2g} clip norms, which must be <= "
                f"{MOST_INFLATION:g}; set compute.dtype=float64",
                code="privacy.hardened",
            )
        largest = max(largest, inflation)
    return largest + OTHER
