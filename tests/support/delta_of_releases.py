"""δ of releases at an ε, by which tests look at the accountant's whole curve: found by searching its ε."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from flower_privdec.privacy.accountant import accounting
from flower_privdec.privacy.accountant.calibration import bracket, narrow
from flower_privdec.privacy.accountant.loss_distributions import group_steps
from flower_privdec.privacy.mechanism.events import Release, canonical

CLOSE = 1e-5  # relative difference of ε, or of δ, at which a δ is found


def delta(releases: Iterable[Release], epsilon: float) -> float:
    """Return a δ, close to the least, at which the releases together cost at most this ε >= 0."""
    merged = canonical(releases)
    if not merged:
        return 0.0
    if any(r.noise_multiplier == 0 for r in merged):
        return 1.0
    groups = group_steps(merged)
    if len(groups) == 1 and float(groups[0].counts.sum()) == 1:
        with np.errstate(all="ignore"):
            return max(float(profile(np.array([float(epsilon)]))[0, 0]) for profile in groups[0].profiles())

    def excess(log_delta: float) -> float:
        value = accounting.epsilon(merged, math.exp(log_delta)) if log_delta < 0 else 0.0
        if 0 < value < math.inf and epsilon > 0:
            return math.log(value / epsilon)
        return 1.0 if value > epsilon else -1.0

    ends = bracket(excess, -5.0, 3.0, -math.log(accounting.LEAST_DELTA))
    if ends is None:
        return accounting.LEAST_DELTA
    _, high = narrow(excess, *ends, lambda value: -CLOSE <= value <= 0, CLOSE)
    return min(1.0, math.exp(high[0]))
