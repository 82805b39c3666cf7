"""The ε of any tool's noise by an exact accountant."""

from __future__ import annotations

import math

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from tools.side_by_side.task import Task


def exact_epsilon(task: Task, noise_multiplier: float) -> float:
    """Return the ε of a whole run at the task's δ, by privacy loss distributions.

    Adjacency: one example (privacy: example), or one peer's update (local, central), removed or zeroed out. Where
    examples are protected each is in a minibatch with probability 1 / steps, and every step is a release; else every
    round is one.

    Args:
        task: of the run.
        noise_multiplier: the noise's standard deviation over the clip norm; without any, ε is infinite.
    """
    if noise_multiplier == 0:
        return math.inf
    one: dp_event.DpEvent = dp_event.GaussianDpEvent(noise_multiplier)
    releases = task.rounds
    if task.privacy == "example":
        one = dp_event.PoissonSampledDpEvent(1 / task.steps, one)
        releases = task.rounds * task.steps
    accountant = PLDAccountant()
    accountant.compose(one, releases)
    return float(accountant.get_epsilon(task.delta))
