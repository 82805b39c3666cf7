"""Calibration: the least noise that keeps a budget, solved and checked with the accountant that reports the ε.

Whatever the search does, its result is accepted only if `accounting.epsilon` of the releases is within the budget and
at least ACCEPTED of it. So neither the search nor its cache has to be trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import cache_folder, read_cached, write_cached
from flower_privdec.privacy.accountant import accounting
from flower_privdec.privacy.accountant.accounting import last_that_fits
from flower_privdec.privacy.mechanism.events import ACCOUNTANT, Release, canonical, epoch_steps

ACCEPTED = 0.995  # a solution spends at least so much of the budget, and at most all of it
AIM = 0.999  # of the budget, where the search aims
NEAR = 0.998  # of the budget, from which on it stops
FEW = 32  # mechanisms that stand for thousands at first
NEARBY = 0.01  # how far off their scale the search then steps, in log scale
SCALE_LIMIT = 1e9  # no search leaves [1 / limit, limit]

_solved: dict[str, float] = {}  # scales by question, in this process

MakeReleases = Callable[[float], Sequence[Release]]
Point = tuple[float, float]  # (x, f(x))


def scale_for_budget(
    make_releases: MakeReleases, epsilon: float, delta: float, *, cache_dir: Path | str | None = None
) -> float:
    """Find the least scale of noise whose releases keep a budget.

    Args:
        make_releases: the releases at a scale; their ε must fall as the scale grows (as noise multipliers
            `scale * shape[k]` do, or `shape[k] / mu_0` at scale `1 / mu_0`).
        epsilon, delta: the budget.
        cache_dir: the folder of solved calibrations; None is $XDG_CACHE_HOME/flower_privdec, or
            ~/.cache/flower_privdec. A cached solution is checked like any other.

    Returns:
        A scale with ACCEPTED * epsilon <= accounting.epsilon(make_releases(scale), delta) <= epsilon.

    Raises:
        ScenarioError: ε <= 0 or is not finite, δ is not in (0, 1), or no scale spends such a budget.
    """
    accounting.check_delta(delta)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        message = f"privacy.epsilon={epsilon} must be finite and > 0; for no privacy set privacy: none"
        raise ScenarioError(message, code="privacy.epsilon")

    # Two scales tell apart all functions of the scale that are used; a cached solution is checked anyhow.
    shapes = [[r.to_json() for r in canonical(make_releases(scale))] for scale in (1.0, 2.0)]
    question = {"accountant": ACCOUNTANT, "epsilon": float(epsilon), "delta": float(delta), "releases": shapes}
    key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    if key in _solved:
        return _solved[key]

    folder = cache_folder() if cache_dir is None else Path(cache_dir)
    path = folder / f"noise-{key}.json"

    def accepted(entry: Any) -> float:
        scale = float(entry["scale"])
        if entry["accountant"] != ACCOUNTANT or not (scale > 0 and math.isfinite(scale)):
            raise ValueError("from another accountant, or not a scale")
        if not ACCEPTED * epsilon <= accounting.epsilon(make_releases(scale), delta) <= epsilon:
            raise ValueError("a wrong solution")
        return scale

    scale = read_cached(path, accepted)
    if scale is None:
        scale = _solve(make_releases, epsilon, delta)
        solution = {"accountant": ACCOUNTANT, "epsilon": float(epsilon), "delta": float(delta), "scale": scale}
        write_cached(path, solution)
    _solved[key] = scale
    return scale


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    sampling: str,
    sampling_rate: float,
    dataset_size: int,
    batch_size: int,
    steps: int,
    cache_dir: Path | str | None = None,
) -> float:
    """Find the least noise multiplier with which a budget allows a peer's steps.

    Args:
        epsilon, delta: the budget.
        sampling, sampling_rate, dataset_size, batch_size: as in `Release`.
        steps: those in which the peer is active (of `shuffle`: consecutive ones from an epoch's start).
        cache_dir: as in `scale_for_budget`.

    Returns:
        Noise std over clip norm; its accountant's ε is at most the budget and at least 99.5 % of it.

    Raises:
        ScenarioError: the budget is impossible, or the mechanism malformed.

    Privacy: unit one example, adjacency zero-out, one `Release` a step.
    """
    if steps < 1:
        raise ScenarioError(f"steps={steps} must be >= 1 to solve for noise", code="privacy.steps")
    count = charged_steps(sampling, dataset_size, batch_size, steps)

    def make(noise: float) -> list[Release]:
        return [Release(sampling, sampling_rate, dataset_size, batch_size, noise, count)]

    return scale_for_budget(make, epsilon, delta, cache_dir=cache_dir)


def charged_steps(sampling: str, dataset_size: int, batch_size: int, steps: int) -> int:
    """Return the `Release.steps` that consecutive steps cost: of `shuffle`, the number of started epochs."""
    if sampling != "shuffle":
        return steps
    return -(-steps // epoch_steps(dataset_size, batch_size))  # rounded up


def max_steps(release: Release, epsilon: float, delta: float, *, limit: int = 10**7) -> int:
    """Find how many steps of a release (`release.steps` ignored) a budget allows.

    Args:
        limit: the largest number of interest.

    Returns:
        The largest number of steps, up to `limit`, whose ε is within the budget; 0 if one is too many.

    Raises:
        ScenarioError: ε <= 0, or δ is not in (0, 1).

    Examples:
        >>> max_steps(Release("poisson", 0.1, 600, 60, noise_multiplier=2.0), epsilon=1.0, delta=1e-5)
        16
    """
    accounting.check_delta(delta)
    if not epsilon > 0:
        raise ScenarioError(f"privacy.epsilon={epsilon} must be > 0", code="privacy.epsilon")

    def fits(steps: int) -> bool:
        return accounting.epsilon([release.times(steps)], delta) <= epsilon

    low = 0
    high = 1
    while high <= limit and fits(high):
        low = high
        high = 4 * high
    return last_that_fits(fits, low, min(high, limit + 1))


def _solve(make_releases: MakeReleases, budget: float, delta: float) -> float:
    """Return an accepted scale: bracket the aim, then regula falsi on log ε over log scale.

    Thousands of different steps are solved for by some dozens of mechanisms first, which takes a fraction of the time;
    the ε of all of them is then computed once or twice.
    """

    def excess(log_scale: float, some: Callable[[Sequence[Release]], Sequence[Release]] = tuple) -> float:
        """Return log ε at a scale, less the aim's; it falls as the scale grows."""
        spent = accounting.epsilon(some(make_releases(math.exp(log_scale))), delta)
        if not math.isfinite(spent):
            return 700.0
        return math.log(max(spent, 1e-300) / (AIM * budget))

    start = 0.0
    step = math.log(2)
    limit = math.log(SCALE_LIMIT)
    if len(canonical(make_releases(1.0))) > 2 * FEW:
        near = bracket(lambda x: excess(x, fewer), start, step, limit)
        if near is not None:
            low, high = narrow(lambda x: excess(x, fewer), *near, _near_the_aim, 1e-7)
            start, _ = low if _near_the_aim(low[1]) else high
            step = NEARBY
            if _near_the_aim(excess(start)):
                return math.exp(start)

    ends = bracket(excess, start, step, limit)
    if ends is None:
        rule = "is more than these releases can spend at any noise"
        if excess(0.0) > 0:
            rule = "needs more noise than any"
        message = f"privacy.epsilon={budget} {rule}; change the budget, the rounds or the sampling"
        raise ScenarioError(message, code="privacy.calibration")

    for log_scale, value in reversed(narrow(excess, *ends, _near_the_aim, 1e-7)):
        if _near_the_aim(value):
            return math.exp(log_scale)
    raise ScenarioError(
        f"privacy.epsilon={budget} cannot be met within 0.5 %: at delta={delta} ε jumps over it as the noise grows "
        "(is delta above an example's chance to be used at all?); lower delta or change epsilon",
        code="privacy.calibration",
    )


def fewer(releases: Sequence[Release]) -> list[Release]:
    """Return about FEW mechanisms that cost nearly what releases do: neighbours in noise, of the mean of 1/σ²."""
    # Those that differ only in noise, in order of noise.
    kinds: dict[tuple[Any, ...], list[Release]] = {}
    for release in canonical(releases):
        kinds.setdefault(release.mechanism[:-1], []).append(release)

    few = []
    for group in kinds.values():
        size = -(-len(group) * len(kinds) // FEW)  # rounded up
        for start in range(0, len(group), size):
            part = group[start : start + size]
            steps = sum(release.steps for release in part)
            noises = np.array([release.noise_multiplier for release in part])
            with np.errstate(divide="ignore"):
                mean = np.average(noises**-2.0, weights=[release.steps for release in part])
            few.append(replace(part[0], noise_multiplier=float(mean**-0.5), steps=steps))
    return few


def bracket(function: Callable[[float], float], start: float, step: float, limit: float) -> tuple[Point, Point] | None:
    """Return two points of a falling function: one with f > 0 and, further up, one with f <= 0.

    Args:
        step: the first one from `start`, up or down; each next is half as long again.
        limit: the largest |x| that is evaluated; beyond it None is returned.
    """
    x = start
    value = function(start)
    step = abs(step) if value > 0 else -abs(step)
    while abs(x + step) <= limit:
        before = (x, value)
        x += step
        value = function(x)
        point = (x, value)
        if before[1] > 0 >= value:
            return before, point
        if value > 0 >= before[1]:
            return point, before
        step *= 1.5
    return None


def narrow(
    function: Callable[[float], float], low: Point, high: Point, accept: Callable[[float], bool], width: float
) -> tuple[Point, Point]:
    """Narrow a bracket until it is narrower than a width, or one of its ends has an accepted value.

    By regula falsi, at least a tenth of the way off both ends; by halves while values are far from 0.
    """
    while high[0] - low[0] > width and not (accept(low[1]) or accept(high[1])):
        share = 0.5
        if max(low[1], -high[1]) < 3:
            share = low[1] / (low[1] - high[1])
        x = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
        value = function(x)
        if value > 0:
            low = (x, value)
        else:
            high = (x, value)
    return low, high


def _near_the_aim(excess: float) -> bool:
    """Return whether log ε, less the aim's, is near enough, and not above the budget's."""
    return math.log(NEAR / AIM) <= excess <= math.log(1 / AIM)
