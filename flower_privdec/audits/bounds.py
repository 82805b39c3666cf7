"""Lower bounds on ε from what an attack got right: of many trials of one example, and of one run with many examples."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

CANDIDATES = 64  # thresholds that are tried on the first half of the trials


def epsilon_from_scores(absent: np.ndarray, present: np.ndarray, delta: float, confidence: float) -> float:
    """Return an ε that the mechanism exceeds, from the scores of trials without and with one example.

    (ε, δ)-differential privacy bounds every test: its chance of a hit is at most e^ε times that of a false alarm,
    plus δ. The test `score >= t`, or `score < t` in the other direction, is chosen on the first half of each kind of
    trials. On the second half its two chances are bounded by Clopper and Pearson's intervals.

    Args:
        absent, present: one score for each independent trial, float64 [n] and [m]; any function of what was released.
        delta: δ.
        confidence: the chance, at least, with which the result is a lower bound.

    Returns:
        ε >= 0; 0 where nothing is shown.
    """
    halves = [(scores[: len(scores) // 2], scores[len(scores) // 2 :]) for scores in (absent, present)]
    (first_absent, second_absent), (first_present, second_present) = halves
    if not min(map(len, (first_absent, first_present))):
        return 0.0
    pooled = np.sort(np.concatenate([first_absent, first_present]))
    count = len(pooled)  # a δ is exceeded far out, where few trials are: so as many thresholds for each tenth of those
    tails = np.concatenate([np.geomspace(1, count, CANDIDATES) - 1, np.linspace(0, count - 1, CANDIDATES)]).astype(int)
    thresholds = np.unique(pooled[np.unique(np.concatenate([tails, len(pooled) - 1 - tails]))])
    tests = [(above, float(t)) for above in (True, False) for t in thresholds]
    best = max(tests, key=lambda test: _bound_of(test, first_absent, first_present, delta, confidence))
    return max(0.0, _bound_of(best, second_absent, second_present, delta, confidence))


def epsilon_at_zero(absent: np.ndarray, present: np.ndarray, delta: float, confidence: float) -> float:
    """Return an ε that the mechanism exceeds, by the test `score >= 0`, which needs no trials to be chosen on.

    Args:
        absent, present: log likelihood ratios, otherwise as in `epsilon_from_scores`.
        delta, confidence: as there.
    """
    if not min(len(absent), len(present)):
        return 0.0
    return max(0.0, _bound_of((True, 0.0), absent, present, delta, confidence))


def _bound_of(
    test: tuple[bool, float], absent: np.ndarray, present: np.ndarray, delta: float, confidence: float
) -> float:
    """Return log((hit - δ) / false alarm) at the ends of both intervals that count against the attack."""
    above, threshold = test
    hits, alarms = (present, absent) if above else (absent, present)
    chosen = (hits >= threshold, alarms >= threshold) if above else (hits < threshold, alarms < threshold)
    error = (1 - confidence) / 2
    hit = _least(int(chosen[0].sum()), len(hits), error)
    alarm = 1 - _least(int((~chosen[1]).sum()), len(alarms), error)
    return math.log((hit - delta) / alarm) if hit > delta else -math.inf


def _least(count: int, of: int, error: float) -> float:
    """Return the lower end of Clopper and Pearson's one-sided interval for a chance."""
    return float(stats.beta.ppf(error, count, of - count + 1)) if count else 0.0


def epsilon_from_guesses(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return an ε that a run exceeds, from guesses which of many examples, each put in by a fair coin, were in it.

    Under (ε, δ)-differential privacy the number of right guesses is at most a binomial one of chance e^ε / (1 + e^ε),
    but for a probability that grows with δ and the number of examples. ε is the largest at which so many are too
    unlikely.

    Args:
        canaries: m, how many examples there were.
        guesses: r, on how many of them a guess was made.
        right: v, how many were right.
        delta: δ.
        confidence: as in `epsilon_from_scores`.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2.
    """
    if not right or _chance(canaries, guesses, right, 0.0, delta) > 1 - confidence:
        return 0.0
    low = 0.0
    high = 64.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        fails = _chance(canaries, guesses, right, middle, delta) <= 1 - confidence
        low, high = (middle, high) if fails else (low, middle)
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the most chance of `right` or more right guesses under (ε, δ)."""
    rate = 1 / (1 + math.exp(-epsilon))
    at_least = float(stats.binom.sf(right - 1, guesses, rate))
    below = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, rate)  # of right - 1, right - 2, ..., 0
    excess = float((np.cumsum(below) / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, at_least + 2 * canaries * delta * excess)
