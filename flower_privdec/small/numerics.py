"""The part of SciPy that a peer's accounts need, over NumPy: SciPy takes 143 MB of disk and 30 MiB of memory.

It stands for scipy in a small peer's process (`common.deferred`). Each function here is as precise as SciPy's, to some
1e-15 of its value, so ε, noise and ledger lines are those of other peers. What else of SciPy is asked for comes from
SciPy if that is installed; if not, `NeedsScipyError` names it.

Source: W. J. Cody, "Rational Chebyshev approximation for the error function", Math. Comp. 23 (1969), for `erfcx`.
"""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError

_SMALL = 0.46875
_MIDDLE = 4.0
_FAR = 26.0  # exp(x²) is finite up to here
# Numerators and denominators, from the highest power down; a denominator's first is 1.
_A = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_C = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_D = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_P = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_Q = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)
_BLOCK = 512  # numbers of a recursion that are added up one after the other, side by side with other blocks


class NeedsScipyError(ScenarioError):
    """Something of SciPy that a small peer has not."""


# --- special functions ---


def erfcx(x: np.ndarray) -> np.ndarray:
    """Return exp(x²) erfc(x)."""
    x = np.asarray(x, dtype=np.float64)
    size = np.abs(x)
    out = np.empty_like(size)

    small = size <= _SMALL
    far = size > _MIDDLE
    middle = ~(small | far)
    if middle.any():
        out[middle] = np.polyval(_C, size[middle]) / np.polyval(_D, size[middle])
    if far.any():
        inverse = 1 / size[far]
        y = inverse * inverse
        rest = y * np.polyval(_P, y) / np.polyval(_Q, y)
        out[far] = inverse * (1 / math.sqrt(math.pi) - rest)
    if small.any():
        y = size[small] ** 2
        erf = x[small] * np.polyval(_A, y) / np.polyval(_B, y)
        out[small] = np.exp(y) * (1 - erf)

    # erfc(-x) = 2 - erfc(x), and the small ones have their sign already.
    negative = (x < 0) & ~small
    if negative.any():
        out[negative] = 2 * _exp_square(x[negative]) - out[negative]
    return out


def _exp_square(x: np.ndarray) -> np.ndarray:
    """Return exp(x²), with the square in two parts: one float64 of it would lose digits of the power."""
    high = np.trunc(x * 16) / 16
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(high * high) * np.exp((x - high) * (x + high)))


def ndtr(x: np.ndarray) -> np.ndarray:
    """Return Φ(x), the chance that a standard normal is at most x."""
    x = np.asarray(x, dtype=np.float64)
    size = np.abs(x) / math.sqrt(2)
    with np.errstate(over="ignore"):
        tail = 0.5 * erfcx(size) / _exp_square(size)
    return np.where(x > 0, 1 - tail, tail)


def log_ndtr(x: np.ndarray) -> np.ndarray:
    """Return log Φ(x)."""
    x = np.asarray(x, dtype=np.float64)
    size = np.abs(x)
    log_tail = np.log(0.5 * erfcx(size / math.sqrt(2))) - size * size / 2
    return np.where(x > 0, np.log1p(-np.exp(log_tail)), log_tail)


def ndtri_exp(y: np.ndarray) -> np.ndarray:
    """Return the x of log Φ(x) = y, for y < 0.

    By Newton's method from x = -sqrt(-2 y), where log Φ is less: it is concave, so no step passes the solution.
    """
    y = np.asarray(y, dtype=np.float64)
    x = -np.sqrt(-2 * y)
    for _ in range(100):
        value = log_ndtr(x)
        slope = np.exp(-x * x / 2 - value) / math.sqrt(2 * math.pi)
        step = (value - y) / slope
        x = x - step
        if np.all(np.abs(step) <= 1e-15 * np.maximum(1.0, np.abs(x))):
            break
    return np.asarray(x)


# --- Fourier transforms, and recursions ---


def next_fast_len(target: int, real: bool = False) -> int:
    """Return the least number from `target` on whose only prime factors are 2, 3 and 5."""
    best = 2 ** math.ceil(math.log2(max(target, 1)))
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            twos = 2 ** max(0, math.ceil(math.log2(target / threes)))
            if threes * twos >= target:
                best = min(best, threes * twos)
            threes *= 3
        fives *= 5
    return best


def dgtsv(lower: np.ndarray, diagonal: np.ndarray, upper: np.ndarray, values: np.ndarray) -> tuple[Any, ...]:
    """Solve y_j = values_j + fade y_{j-1}: a lower diagonal of -fade under a diagonal of ones, as LAPACK's dgtsv does.

    Returns:
        What LAPACK returns: the solution is the last but one, and 0 the last.
    """
    fade = -float(lower[0])
    count = len(values)
    blocks = -(-count // _BLOCK)
    columns = np.zeros((blocks, _BLOCK))
    columns.reshape(-1)[:count] = values
    columns = np.ascontiguousarray(columns.T)  # [_BLOCK, blocks]: the j-th of all blocks together

    for j in range(1, _BLOCK):
        columns[j] += fade * columns[j - 1]

    # What comes in from the block before fades from number to number.
    entering = np.zeros(blocks)
    whole = fade**_BLOCK
    for block in range(1, blocks):
        entering[block] = columns[-1, block - 1] + whole * entering[block - 1]
    columns += fade ** np.arange(1, _BLOCK + 1)[:, None] * entering
    return lower, diagonal, upper, columns.T.reshape(-1)[:count], 0


def isotonic_regression(y: np.ndarray, *, weights: np.ndarray) -> SimpleNamespace:
    """Return in `x` the ascending numbers nearest to `y`, by pooling neighbours that descend."""
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(y.tolist(), weights.tolist(), strict=True):
        mean = value
        mass = weight
        count = 1
        while means and means[-1] >= mean:
            before = masses.pop()
            mean = (means.pop() * before + mean * mass) / (before + mass)
            mass += before
            count += counts.pop()
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    return SimpleNamespace(x=np.repeat(means, counts))


# --- as scipy ---


class _Part:
    """A module of SciPy: what is here, and the rest from SciPy."""

    def __init__(self, name: str, **here: Any) -> None:
        vars(self).update(here)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(f"scipy.{self._name}")
        except ImportError as error:
            raise NeedsScipyError(
                f"this scenario needs scipy.{self._name}.{attribute}, and a small peer has no SciPy: pip install scipy",
                code="small.needs-scipy",
            ) from error
        return getattr(module, attribute)


special = _Part("special", erfcx=erfcx, ndtr=ndtr, ndtri_exp=ndtri_exp)
fft = _Part("fft", next_fast_len=next_fast_len, rfft=np.fft.rfft, irfft=np.fft.irfft)
linalg = _Part("linalg", lapack=_Part("linalg.lapack", dgtsv=dgtsv))
optimize = _Part("optimize", isotonic_regression=isotonic_regression)
signal = _Part("signal")
sparse = _Part("sparse", csgraph=_Part("sparse.csgraph"))
