"""What several runs over the same data cost together, where an example may have been at any peer of each run.

How a run dealt its data out to peers is its own affair, and another run may have dealt them out otherwise: so an
example is charged, in each run, what the dearest peer for it paid. Which peers are dearest together is found by trying
every choice, or, where there are too many, bounded order by order: the Rényi divergence of a composition is the
sum of its parts', so with the largest of each run's it bounds every choice at once (Mironov 2017, arXiv:1702.07476,
Proposition 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, product

import numpy as np

from flower_privdec.privacy.accountant.accounting import beyond_numbers, check_delta, epsilon
from flower_privdec.privacy.accountant.composition import renyi_epsilon, together
from flower_privdec.privacy.accountant.loss_distributions import group_steps
from flower_privdec.privacy.accountant.refinement import Divergences, divergences
from flower_privdec.privacy.mechanism.events import Mechanism, Release

Alternatives = tuple[tuple[Release, ...], ...]

MOST_CHOICES = 64  # compositions worked out one by one
ORDERS = tuple(np.geomspace(1e-2, 1e4, 97).tolist())


def epsilon_of_runs(runs: Sequence[Alternatives], delta: float) -> float:
    """Return an ε of all runs together, (ε, δ) for an example at any one peer of each run.

    Args:
        runs: for each run the different lists of releases that its peers paid for, each canonical.
        delta: δ in (0, 1).

    Returns:
        ε: the largest over all choices of a peer in each run, up to MOST_CHOICES of them, or a Rényi bound on it.

    Raises:
        ScenarioError: when δ is not in (0, 1).
    """
    check_delta(delta)
    dearest = [_dearest(run) for run in runs if run]
    if math.prod(map(len, dearest)) <= MOST_CHOICES:
        return max((epsilon(chain(*choice), delta) for choice in product(*dearest)), default=0.0)
    if any(beyond_numbers(releases) for run in dearest for releases in run):
        return math.inf
    return max(_renyi_bound(dearest, delta, add) for add in (False, True))


def _dearest(run: Alternatives) -> Alternatives:
    """Return a run's alternatives without those that another one contains."""
    largest: list[tuple[dict[Mechanism, int], tuple[Release, ...]]] = []
    for releases in sorted(run, key=lambda releases_of_peer: sum(r.steps for r in releases_of_peer), reverse=True):
        steps = {r.mechanism: r.steps for r in releases}
        if not any(all(more.get(m, 0) >= count for m, count in steps.items()) for more, _ in largest):
            largest.append((steps, releases))
    return tuple(releases for _, releases in largest)


def _renyi_bound(runs: Sequence[Alternatives], delta: float, add: bool) -> float:
    """Return a bound on the ε of every choice, in one direction."""
    run_divergences = [[_divergences(releases, delta, add) for releases in run] for run in runs]
    rest = delta - together([max(d.infinite for d in run) for run in run_divergences])
    if rest <= 0:
        return math.inf
    log_masses = np.sum([np.max([d.log_masses for d in run], axis=0) for run in run_divergences], axis=0)
    bounds = (renyi_epsilon(k, t, math.log(rest)) for k, t in zip(log_masses.tolist(), ORDERS, strict=True))
    return max(0.0, min(bounds))


@lru_cache(maxsize=8192)
def _divergences(releases: tuple[Release, ...], delta: float, add: bool) -> Divergences:
    return divergences(group_steps(releases), delta, ORDERS, add=add)
