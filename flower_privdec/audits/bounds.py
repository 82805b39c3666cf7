"""Lower bounds on ε from what an attack got right: of many trials of one example, and of one run with many examples."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

CANDIDATES = 64  # thresholds in each of the rows of them that `_thresholds` puts together


class Test(NamedTuple):
    """A rule that claims to know from a score which kind a trial was.

    If `above`, it claims that the example was there if score >= threshold; else, that it was not if score < threshold.
    """

    above: bool
    threshold: float


def epsilon_from_scores(absent: np.ndarray, present: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on the ε of a mechanism, from the scores of trials without and with one example.

    (ε, δ)-differential privacy bounds every test: its chance of a hit is at most e^ε times that of a false alarm,
    plus δ. The best of many tests is chosen on the first half of each kind of trials. On the second half its two
    chances are bounded by Clopper and Pearson's intervals.

    Args:
        absent, present: one score for each independent trial, float64 [n] and [m]; any function of what was released.
        delta: δ.
        confidence: the result is a lower bound with at least this probability.

    Returns:
        ε >= 0; 0 if nothing is shown.
    """
    first_absent, second_absent = _halves(absent)
    first_present, second_present = _halves(present)
    if not min(len(first_absent), len(first_present)):
        return 0.0

    tests = [
        Test(above, float(threshold))
        for above in (True, False)
        for threshold in _thresholds(np.concatenate([first_absent, first_present]))
    ]
    best = max(tests, key=lambda test: _bound_of(test, first_absent, first_present, delta, confidence))
    return max(0.0, _bound_of(best, second_absent, second_present, delta, confidence))


def _halves(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first half of some scores and the second, which may be one longer."""
    middle = len(scores) // 2
    return scores[:middle], scores[middle:]


def _thresholds(scores: np.ndarray) -> np.ndarray:
    """Return the thresholds that are tried: some of the scores, ascending."""
    count = len(scores)
    evenly = np.linspace(0, count - 1, CANDIDATES)
    # Also denser and denser towards the ends: a mechanism may exceed its δ only out there, among few trials.
    far_out = np.geomspace(1, count, CANDIDATES) - 1

    from_lowest = np.concatenate([far_out, evenly]).astype(int)
    from_highest = count - 1 - from_lowest
    places = np.unique(np.concatenate([from_lowest, from_highest]))
    return np.unique(np.sort(scores)[places])


def epsilon_at_zero(absent: np.ndarray, present: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on ε by the test `score >= 0`, which spends no trials on choosing one.

    Args:
        absent, present: log likelihood ratios, otherwise as in `epsilon_from_scores`.
        delta, confidence: as there.
    """
    if not min(len(absent), len(present)):
        return 0.0
    return max(0.0, _bound_of(Test(above=True, threshold=0.0), absent, present, delta, confidence))


def _bound_of(test: Test, absent: np.ndarray, present: np.ndarray, delta: float, confidence: float) -> float:
    """Return log((hit - δ) / false alarm), each chance at the end of its interval that counts against the attack.

    The definition holds in both directions, so a test may as well look for trials without the example.
    """
    if test.above:
        hits = present >= test.threshold
        alarms = absent >= test.threshold
    else:
        hits = absent < test.threshold
        alarms = present < test.threshold

    error = (1 - confidence) / 2  # for each of the two intervals, both of which have to hold
    hit = _least_chance(int(hits.sum()), len(hits), error)
    no_alarm = _least_chance(int((~alarms).sum()), len(alarms), error)
    alarm = 1 - no_alarm  # the most that it can be
    if hit <= delta:
        return -math.inf
    return math.log((hit - delta) / alarm)


def _least_chance(count: int, trials: int, error: float) -> float:
    """Return the lower end of Clopper and Pearson's one-sided interval for what happened in `count` of some trials."""
    if count == 0:
        return 0.0
    return float(stats.beta.ppf(error, count, trials - count + 1))


def epsilon_from_guesses(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return a lower bound on the ε of one run: a fair coin put each of many examples in or not, and someone guessed.

    Under (ε, δ)-differential privacy the number of right guesses is hardly larger than a binomial one, each guess being
    right with probability e^ε / (1 + e^ε). The bound is the largest ε at which so many right ones are too unlikely.

    Args:
        canaries: m, how many examples there were.
        guesses: r, on how many of them a guess was made.
        right: v, how many were right.
        delta: δ.
        confidence: as in `epsilon_from_scores`.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2.
    """
    if not right or _most_chance(canaries, guesses, right, 0.0, delta) > 1 - confidence:
        return 0.0

    low = 0.0  # so many right guesses are too unlikely here
    high = 64.0  # here they need not be
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _most_chance(canaries, guesses, right, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _most_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the maximum probability of at least `right` correct guesses under (ε, δ).

    P(B >= v) + 2 m δ max_{1 <= i <= v} P(v - i <= B < v) / i,      B ~ Binomial(r, e^ε / (1 + e^ε))
    """
    rate = 1 / (1 + math.exp(-epsilon))
    at_least = float(stats.binom.sf(right - 1, guesses, rate))

    below = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, rate)  # of right - 1, right - 2, ..., 0
    excess = float((np.cumsum(below) / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, at_least + 2 * canaries * delta * excess)
