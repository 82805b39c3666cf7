"""What releases cost: ε at a δ, an upper bound, for any list of releases of one peer.

The room's modules, from the top:

| module | has |
|---|---|
| `accounting` | ε of releases, and of all runs over one data set |
| `calibration` | the least noise that keeps a budget, by asking `accounting` |
| `composition` | δ(ε) of many steps together: privacy losses that are added up on a grid |
| `loss_distributions` | δ(ε) of one step, and its losses on a grid |
| `gaussian_steps` | ε of Gaussians of full sums, in closed form |
| `readings` | what an ε lets an observer do |

Unit: one example. Adjacency: zero-out (`events`), so the sensitivity of a sum of clipped gradients is one clip norm C,
and the noise multiplier of a plain step is noise std over C. In dp-accounting 0.6, pinned by tests:
  - PLDAccountant: REPLACE_SPECIAL (zero-out) and ADD_OR_REMOVE_ONE take sensitivity C and give the same
    numbers; REPLACE_ONE takes 2 C by itself.
  - RdpAccountant: sensitivity is C under all three. Under REPLACE_ONE the caller has to halve the noise
    multiplier; SampledWithoutReplacementDpEvent exists only under REPLACE_ONE.

By sampling, one step is
  - `full`: a Gaussian. Many of them are one Gaussian of 1/σ² = Σ 1/σ_k², whose ε has a closed form.
  - `shuffle`: a Gaussian an epoch. An epoch's batches are disjoint, so whatever the permutation, even if it
    were known, zeroing an example moves one of the epoch's sums, by at most C, and no other: the epoch is one
    Gaussian release, with the other steps as functions of it. A started epoch counts whole.
  - `poisson`: a Poisson-sampled Gaussian, or with idle examples a mixture of Gaussians (`poisson_remove` and
    `mixture_remove` in `loss_distributions`).
  - `uniform`: a bound proved in `loss_distributions.uniform_remove`; dp-accounting has no zero-out event for it.
  - `blocks`, and `uniform` with idle examples: the choice of examples counts as public (`shown_profile`).

A single step, or only Gaussians, are solved from their profile. Other compositions go over a grid of privacy losses,
always upwards, refined until ε changes by no more than about 0.1 % (`composition`). Beyond dp-accounting's
PLDAccountant it has a grid that follows the size of ε, tilted distributions, which keep their digits at any δ,
thousands of different steps without rounding their noise, and sampling without replacement.

Several runs over the same data: an example may have been at any peer of each run, since each run partitions the data in
its own way. So an example is charged, in each run, the cost of the most expensive peer for it. Which peers cost most
together is found by trying every choice; if there are too many choices, it is bounded order by order: the Rényi
divergence of a composition is the sum of its parts', so with the largest of each run's it bounds every choice at once
(Mironov 2017, arXiv:1702.07476, Proposition 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, product

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import setting
from flower_privdec.common.user_code import require
from flower_privdec.privacy.accountant.composition import (
    composed_epsilon,
    divergences,
    renyi_epsilon,
    together,
)
from flower_privdec.privacy.accountant.gaussian_steps import gaussian_delta, gaussian_epsilon
from flower_privdec.privacy.accountant.loss_distributions import Steps, gaussian_mu, group_steps, kind_of, quietly
from flower_privdec.privacy.mechanism.events import ACCOUNTING, Mechanism, Release, canonical, event

Alternatives = tuple[tuple[Release, ...], ...]  # of one run: the different lists of releases that its peers paid for

LEAST_DELTA = 1e-300
LARGEST = 1e100  # sensitivity over noise from which on ε counts as ∞
MOST_CHOICES = 64  # compositions computed one by one
FINE = 1e-4  # intervals of another accountant's grid, over ε
ORDERS = tuple(np.geomspace(1e-2, 1e4, 97).tolist())


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Return an ε such that the releases together are (ε, δ)-differentially private.

    Args:
        releases: all releases of one peer on one data set, in any order.
        delta: δ in (0, 1).

    Returns:
        ε: 0.0 if nothing was released, ∞ if something was released without noise.

    Raises:
        ScenarioError: δ is not in (0, 1).

    Privacy: unit one example, adjacency zero-out, against an adversary who sees everything that the peer sends.

    Examples:
        >>> step = Release("poisson", 0.1, 600, 60, noise_multiplier=2.0)
        >>> [round(epsilon([step.times(steps)], 1e-5), 2) for steps in (1, 100)]
        [0.37, 2.34]
    """
    check_delta(delta)
    return _epsilon(canonical(releases), float(delta))


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), or below what float64 can resolve."""
    if not 0 < delta < 1:
        message = f"privacy.delta={delta} must be in (0, 1); use about one over 10 times the examples"
        raise ScenarioError(message, code="privacy.delta")
    if delta < LEAST_DELTA:
        message = f"privacy.delta={delta} must be at least {LEAST_DELTA:g}; use about one over 10 times the examples"
        raise ScenarioError(message, code="privacy.delta")


def loose_delta(delta: float, examples: int, of: str = "", most: int | None = None) -> str:
    """Return a warning of a δ with which one example could be published as it is; empty if it is below one over them.

    Args:
        examples: how many there are.
        of: whose they are, such as " (peers 0-3)".
        most: how many the peer with the most examples has, if there are several peers.
    """
    if delta * examples < 1:
        return ""
    return (
        f"δ = {setting(delta)} >= 1/{examples}{of}: revealing one example outright would be allowed; take δ well below "
        f"1/{most or examples}"
    )


@lru_cache(maxsize=8192)
@quietly
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if beyond_numbers(releases):
        return math.inf

    if all(kind_of(release) == "gaussian" for release in releases):
        mu = gaussian_mu(releases)
        return gaussian_epsilon(mu, delta) if gaussian_delta(0.0, mu) > delta else 0.0

    # No event's chance changes by more than the sum over all steps of δ(0): if that is at most δ, ε is 0.
    groups = group_steps(releases)
    changes = []
    for group in groups:
        remove, _ = group.profiles()
        changes.append(float(group.counts @ remove(np.zeros(1))[:, 0]))
    if math.fsum(changes) <= delta:
        return 0.0

    is_one_step = len(groups) == 1 and float(groups[0].counts.sum()) == 1
    if is_one_step:
        return _step_epsilon(groups[0], delta)
    return composed_epsilon(groups, delta)


def beyond_numbers(releases: Sequence[Release]) -> bool:
    """Return whether ε counts as ∞: a release has no noise, or next to none for its sensitivity."""
    if any(release.noise_multiplier == 0 for release in releases):
        return True
    return max(float(group.drawn.max()) for group in group_steps(releases)) > LARGEST


def _step_epsilon(step: Steps, delta: float) -> float:
    """Return the least ε at which the larger of one step's two profiles is at most δ."""
    remove, add = step.profiles()
    low = 0.0
    high = max(step.reach(math.log(delta)))

    # As bisection, but with 64 points at a time: numpy computes them for the price of one. Profiles fall.
    while high - low > 1e-12 * high:
        points = np.linspace(low, high, 66)[1:-1]
        inside = np.maximum(remove(points), add(points))[0] <= delta
        first = int(np.argmax(inside)) if inside.any() else len(points)
        low_ends = (low, *points)
        high_ends = (*points, high)
        low = float(low_ends[first])
        high = float(high_ends[first])
    return high


def last_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest n with low <= n < high that fits; all numbers below one that fits must fit too.

    Neither end is evaluated: `low` is assumed to fit and `high` not to.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def epsilon_of_runs(runs: Sequence[Alternatives], delta: float) -> float:
    """Return an ε of all runs together, (ε, δ) for an example at any one peer of each run.

    Args:
        runs: for each run the different lists of releases that its peers paid for, each canonical.
        delta: δ in (0, 1).

    Returns:
        ε: the largest over all choices of a peer in each run, up to MOST_CHOICES of them, or a Rényi bound on it.

    Raises:
        ScenarioError: δ is not in (0, 1).
    """
    check_delta(delta)
    costliest = [_costliest(run) for run in runs if run]
    n_choices = math.prod(map(len, costliest))
    if n_choices <= MOST_CHOICES:
        return max((epsilon(choice, delta) for choice in _choices(costliest)), default=0.0)

    for run in costliest:
        if any(beyond_numbers(releases) for releases in run):
            return math.inf
    return max(_renyi_bound(costliest, delta, add) for add in (False, True))


def _choices(runs: Sequence[Alternatives]) -> Iterator[tuple[Release, ...]]:
    """Yield the releases of each choice of a peer in each run."""
    return (tuple(chain(*choice)) for choice in product(*runs))


def dp_accounting_epsilon(runs: Sequence[Alternatives], delta: float) -> float | None:
    """Return the ε that dp-accounting's PLDAccountant computes of the same events; an upper bound too.

    Args:
        runs, delta: see `epsilon_of_runs`.

    Returns:
        ε; None if it has no event for one of the mechanisms (uniform and block sampling under zero-out), or if the
        choices are too many to be tried.

    Raises:
        ScenarioError: dp-accounting is not installed, or δ is not in (0, 1).
    """
    pld = require("dp_accounting.pld", *ACCOUNTING)
    zero_out = require("dp_accounting", *ACCOUNTING).NeighboringRelation.REPLACE_SPECIAL
    costliest = [_costliest(run) for run in runs if run]
    if math.prod(map(len, costliest)) > MOST_CHOICES:
        return None

    costs = [0.0]
    for choice in _choices(costliest):
        ours = epsilon(choice, delta)
        if math.isinf(ours):
            return ours  # a release without noise, which has no distribution on a grid
        if any(release.sampling in ("uniform", "blocks") and release.sampling_rate < 1 for release in choice):
            return None

        interval = FINE * min(max(ours, 0.01), 10.0)
        accountant = pld.PLDAccountant(zero_out, interval)
        costs.append(float(accountant.compose(event(choice)).get_epsilon(delta)))
    return max(costs)


def _costliest(run: Alternatives) -> Alternatives:
    """Drop the alternatives of a run that are contained in another one and so cannot cost more."""

    def n_steps(releases: tuple[Release, ...]) -> int:
        return sum(release.steps for release in releases)

    largest: list[dict[Mechanism, int]] = []  # how often each mechanism is in those that are kept
    alternatives = []
    for releases in sorted(run, key=n_steps, reverse=True):
        steps = {release.mechanism: release.steps for release in releases}
        if not any(_contains(more, steps) for more in largest):
            largest.append(steps)
            alternatives.append(releases)
    return tuple(alternatives)


def _contains(more: dict[Mechanism, int], steps: dict[Mechanism, int]) -> bool:
    return all(more.get(mechanism, 0) >= count for mechanism, count in steps.items())


def _renyi_bound(runs: Sequence[Alternatives], delta: float, add: bool) -> float:
    """Return a bound on the ε of every choice, in one direction."""
    # Of each run, the largest chance of an infinite loss, and the largest divergence at each order.
    infinite_of_runs = []
    masses_of_runs = []
    for run in runs:
        bounds = [_divergences(releases, delta, add) for releases in run]
        infinite_of_runs.append(max(infinite for _, infinite in bounds))
        masses_of_runs.append(np.max([masses for masses, _ in bounds], axis=0))

    rest = delta - together(infinite_of_runs)
    if rest <= 0:
        return math.inf
    log_masses = np.sum(masses_of_runs, axis=0)  # [orders]
    pairs = zip(log_masses.tolist(), ORDERS, strict=True)
    return max(0.0, min(renyi_epsilon(mass, order, math.log(rest)) for mass, order in pairs))


@lru_cache(maxsize=8192)
def _divergences(releases: tuple[Release, ...], delta: float, add: bool) -> tuple[np.ndarray, float]:
    return divergences(group_steps(releases), delta, ORDERS, add=add)
