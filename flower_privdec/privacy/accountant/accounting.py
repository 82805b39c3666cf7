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
  - `poisson`: a Poisson-sampled Gaussian, or with idle examples a mixture of Gaussians (`profiles.poisson_remove`,
    `profiles.mixture_remove`).
  - `uniform`: a bound proved in `profiles.uniform_remove`; dp-accounting has no zero-out event for it.
  - `blocks`, and `uniform` with idle examples: the choice of examples counts as public (`profiles.shown_profile`).

One step, and Gaussians alone, are solved from their profile; other compositions go over a grid of privacy losses,
always upwards, as fine as changes their ε by no more than about 0.1 % (`refinement`). What this adds to
dp-accounting's PLDAccountant: a grid that follows the size of ε, tilted distributions, which keep their digits at
any δ, thousands of different steps without rounding their noise, and sampling without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.accountant.loss_distributions import Steps, group_steps, quietly
from flower_privdec.privacy.accountant.refinement import composed_epsilon
from flower_privdec.privacy.accountant.search import bracket, narrow
from flower_privdec.privacy.mechanism.events import Release, canonical

CLOSE = 1e-5  # relative difference of ε, or of δ, at which a δ is found
LEAST_DELTA = 1e-300
LARGEST = 1e100  # sensitivity over noise from which on ε counts as ∞


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Return an ε such that the releases together are (ε, δ)-differentially private.

    Args:
        releases: all releases of one peer on one data set, in any order.
        delta: δ in (0, 1).

    Returns:
        ε: 0.0 when nothing was released, ∞ when something was released without noise.

    Raises:
        ScenarioError: when δ is not in (0, 1).

    Privacy: unit one example, adjacency zero-out, against an adversary who sees everything that the peer sends.

    Examples:
        >>> step = Release("poisson", 0.1, 600, 60, noise_multiplier=2.0)
        >>> [round(epsilon([step.times(steps)], 1e-5), 2) for steps in (1, 100)]
        [0.37, 2.34]
    """
    check_delta(delta)
    return _epsilon(canonical(releases), float(delta))


def delta(releases: Iterable[Release], epsilon: float) -> float:
    """Return a δ such that the releases together are (ε, δ)-differentially private.

    Raises:
        ScenarioError: when ε < 0.
    """
    if not epsilon >= 0:
        raise ScenarioError(f"privacy.epsilon={epsilon} must be >= 0")
    merged = canonical(releases)
    if not merged:
        return 0.0
    if any(r.noise_multiplier == 0 for r in merged):
        return 1.0
    groups = group_steps(merged)
    if _is_one_step(groups):
        return float(_profile(groups[0], np.array([float(epsilon)]))[0])
    return _delta(merged, float(epsilon))


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), or so small that numbers run out."""
    if not 0 < delta < 1:
        raise ScenarioError(f"privacy.delta={delta} must be in (0, 1); use about one over 10 times the examples")
    if delta < LEAST_DELTA:
        raise ScenarioError(
            f"privacy.delta={delta} must be at least {LEAST_DELTA:g}; use about one over 10 times the examples"
        )


@lru_cache(maxsize=8192)
@quietly
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if beyond_numbers(releases):
        return math.inf
    groups = group_steps(releases)
    if no_event_gains(groups, delta):
        return 0.0
    if _is_one_step(groups):
        return _step_epsilon(groups[0], delta)
    return composed_epsilon(groups, delta)


def beyond_numbers(releases: Sequence[Release]) -> bool:
    """Return whether ε counts as ∞: something has no noise, or next to none for what it shows."""
    if any(r.noise_multiplier == 0 for r in releases):
        return True
    return max(float(g.drawn.max()) for g in group_steps(releases)) > LARGEST


def no_event_gains(groups: Sequence[Steps], delta: float) -> bool:
    """Return whether no event's chance changes by more than δ: it does so by at most the sum over all steps."""
    return math.fsum(float(g.counts @ _profiles(g, np.zeros(1))[0][:, 0]) for g in groups) <= delta


def _is_one_step(groups: Sequence[Steps]) -> bool:
    return len(groups) == 1 and float(groups[0].counts.sum()) == 1


def _profiles(steps: Steps, epsilon: np.ndarray) -> list[np.ndarray]:
    """Return δ(ε), (remove, add), each [b, n]."""
    return [profile(epsilon) for profile in steps.profiles()]


@quietly
def _profile(step: Steps, epsilon: np.ndarray) -> np.ndarray:
    """Return δ(ε) of one step, the larger of both directions."""
    return np.asarray(np.maximum(*_profiles(step, epsilon))[0])


def _step_epsilon(step: Steps, delta: float) -> float:
    """Return the least ε at which the profile of one step is at most δ."""
    low, high = 0.0, max(step.reach(math.log(delta)))
    while high - low > 1e-12 * high:
        points = np.linspace(low, high, 66)[1:-1]
        inside = _profile(step, points) <= delta
        first = int(np.argmax(inside)) if inside.any() else len(points)
        low, high = float((low, *points)[first]), float((*points, high)[first])
    return high


def _delta(releases: tuple[Release, ...], epsilon: float) -> float:
    """Return about the least δ at which ε is no more than a given one."""

    def excess(log_delta: float) -> float:
        value = _epsilon(releases, math.exp(log_delta)) if log_delta < 0 else 0.0
        if 0 < value < math.inf and epsilon > 0:
            return math.log(value / epsilon)
        return 1.0 if value > epsilon else -1.0

    ends = bracket(excess, -5.0, 3.0, -math.log(LEAST_DELTA))
    if ends is None:
        return LEAST_DELTA
    _, high = narrow(excess, *ends, lambda value: -CLOSE <= value <= 0, CLOSE)
    return min(1.0, math.exp(high[0]))
