"""What an observer can do at most, given ε: how often a test for one example is right, and what several examples cost.

A *test* looks at everything that an observer sees and says whether one given example was in the data. Its true positive
rate (TPR) is the probability that it says yes if the example was in the data, and its false positive rate (FPR) the
probability that it says yes if it was not. Whatever the test, (ε, δ)-differential privacy means that, at an FPR of α,

    TPR <= min(e^ε α + δ, 1 - e^-ε (1 - δ - α)),

where the second bound is the first one for the test that gives the opposite answer (Wasserman and Zhou 2010, Theorem
2.4; Dong, Roth and Su 2022, Proposition 2.5). One training has an ε for every δ, and each of these pairs gives such a
bound. The least of them at a given α is the trade-off curve of what was really released; it is far below the bound of
any single pair: an ε of 3 is a factor of 20 at outcomes that hardly ever happen, and much less over all of them.

A pair (ε, δ) is called a *point*. Every function here takes points that hold together and returns an upper bound, so
leaving out a point can only make it larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.mechanism.events import Release, canonical

Point = tuple[float, float]

DELTAS = (*np.geomspace(1e-6, 0.03, 11).tolist(), *np.linspace(0.05, 0.95, 19).tolist())
FEW_DELTAS = (1e-5, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5)  # for compositions that take a second each
SEARCH = 20  # halvings of the logarithm of δ


def _checked(epsilon: float, delta: float) -> None:
    """Refuse a pair that is not a guarantee."""
    if not epsilon >= 0 or not delta >= 0:  # NaN is neither
        raise ScenarioError(
            f"epsilon={epsilon} and delta={delta} must be >= 0, and epsilon=inf if nothing is protected",
            code="reading.point",
        )


def true_positive_rate(points: Iterable[Point], false_positive_rate: float) -> float:
    """Return an upper bound on how often a test finds an example that was in the data.

    Args:
        points: pairs (ε, δ) that all hold; with none nothing is known, which is a bound of 1.
        false_positive_rate: how often the test names an example that was not in the data, in [0, 1].

    Returns:
        A chance in [`false_positive_rate`, 1]: a test that tosses a coin reaches the lower end.

    Raises:
        ScenarioError: a pair, or the rate, is out of range.
    """
    alpha = false_positive_rate
    if not 0 <= alpha <= 1:
        raise ScenarioError(f"false_positive_rate={alpha} must be in [0, 1]", code="reading.rate")
    return min((_true_positive_rate(point, alpha) for point in points), default=1.0)


def _true_positive_rate(point: Point, alpha: float) -> float:
    epsilon, delta = point
    _checked(epsilon, delta)
    if math.isinf(epsilon) or delta >= 1:
        return 1.0

    # e^ε may overflow although e^ε α does not, so the product is taken as a sum of logarithms.
    exponent = -math.inf
    if alpha > 0:
        exponent = epsilon + math.log(alpha)
    by_finding = 1.0
    if exponent < 0:
        by_finding = math.exp(exponent) + delta
    by_missing = 1 - math.exp(-epsilon) * (1 - delta - alpha)

    return max(alpha, min(1.0, by_finding, by_missing))


def right_guesses(points: Iterable[Point]) -> float:
    """Return an upper bound on how often a test is right, if the example is in the data by the toss of a coin.

    It is (1 + max_α (TPR(α) - α)) / 2, and for one pair (e^ε + δ) / (e^ε + 1).

    Args:
        points: see `true_positive_rate`.

    Returns:
        A chance in [0.5, 1]; 0.5 is a guess.
    """
    chances = [1.0]
    for epsilon, delta in points:
        _checked(epsilon, delta)
        fade = math.exp(-epsilon)
        chances.append(min(1.0, (1 + delta * fade) / (1 + fade)))
    return min(chances)


def points_of(epsilon_at: Callable[[float], float], deltas: Sequence[float] = DELTAS) -> tuple[Point, ...]:
    """Return the pairs of one training, each of which holds.

    Args:
        epsilon_at: its ε at a δ, from the accountant.
        deltas: at which to ask.
    """
    return tuple((epsilon_at(delta), delta) for delta in deltas)


# --- several examples of one person ---


def of_group(releases: Iterable[Release], examples: int) -> tuple[Release, ...] | None:
    """Return releases that bound what k examples of one peer show together; None if no such bound is known.

    Proof. Noise of variance σ² is a sum of k independent noises of variance σ² / k. So a step's sum is a function of k
    sums, one for each of the k examples, which holds its share of that example and noise of its own; and publishing
    those shows at least as much. Each is a release of the same mechanism with one example and the noise multiplier
    σ / √k, and given what was published before they are independent, for a Poisson sample draws each example by itself,
    `full` draws all, and of `shuffle` the permutation may even be known. So k examples cost at most as much as one
    example in k times as many steps with noise σ / √k. With `full` that is exact: k² / σ² = k / (σ / √k)².  ∎

    `uniform` and `blocks` draw examples together, so that they are not independent; for them `group_epsilon` has the
    bound that needs nothing but ε.
    """
    if examples < 1:
        raise ScenarioError(f"examples={examples} must be >= 1", code="reading.examples")
    together = []
    for release in releases:
        if examples > 1 and release.sampling_rate < 1 and release.sampling in ("uniform", "blocks"):
            return None
        noise = release.noise_multiplier / math.sqrt(examples)
        together.append(replace(release, noise_multiplier=noise).times(examples * release.steps))
    return canonical(together)


def group_epsilon(epsilon_at: Callable[[float], float], delta: float, examples: int) -> float:
    """Return an ε at δ for k examples together, from the ε for one: the bound that holds for every mechanism.

    If one example costs (ε', δ'), k of them cost (k ε', δ' (1 + e^ε' + ... + e^((k - 1) ε'))), one after the other. The
    δ' is the largest of those tried for which the sum stays within δ.

    Returns:
        ε, or ∞ if no δ' that can be computed is small enough: then this bound says nothing.
    """
    if examples == 1:
        return epsilon_at(delta)

    low = math.log(1e-280)
    high = math.log(delta)
    best = math.inf
    for _ in range(SEARCH):
        middle = (low + high) / 2
        epsilon = epsilon_at(math.exp(middle))
        if middle + log_group_factor(epsilon, examples) <= math.log(delta):
            best = min(best, examples * epsilon)
            low = middle
        else:
            high = middle
    return best


def log_group_factor(epsilon: float, examples: int) -> float:
    """Return log(1 + e^ε + ... + e^((k - 1) ε)), by which δ grows for k examples."""
    if math.isinf(epsilon):
        return math.inf
    exponents = epsilon * np.arange(examples)
    return float(exponents[-1] + math.log(np.exp(exponents - exponents[-1]).sum()))
