"""ε of sampled Gaussian sums by contour integration: exact to many digits, and without a grid of losses.

δ(ε) = E[(1 - e^{ε - L})_+] has the two-sided Laplace transform ∫ e^{zε} δ(ε) dε = M(z) / (z (z + 1)), M(z) = E e^{zL},
so with any t > 0
    δ(ε) = (1/π) ∫_0^∞ Re[M(t + is) e^{-(t + is) ε} / ((t + is) (t + is + 1))] ds.
M is an integral over the noise, and the M of independent steps multiply. Both integrals are of analytic functions, for
which the trapezoidal rule converges exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

Mechanism = tuple[float, float, float, int]  # sampling rate, noise multiplier, idle, steps


class Exact:
    """A composition of Poisson-sampled steps, with an example against without it (or the reverse, `add`)."""

    def __init__(self, mechanisms: Sequence[Mechanism], add: bool) -> None:
        self.steps = [(*_nodes(q, noise, idle, add), count) for q, noise, idle, count in mechanisms]

    def log_transform(self, t: float, s: np.ndarray) -> np.ndarray:
        """Return log M at t + is, [n]."""
        total = np.zeros(len(s), dtype=complex)
        for log_weight, loss, count in self.steps:
            exponents = log_weight + t * loss
            top = exponents.max()
            sums = np.exp(1j * np.outer(s, loss)) @ np.exp(exponents - top)
            total += count * (np.log(np.where(sums == 0, 1e-300, sums)) + top)
        return total

    def _real(self, t: float) -> float:
        return float(self.log_transform(t, np.zeros(1))[0].real)

    def saddle(self, epsilon: float) -> float:
        """Return the t at which the integrand is least at s = 0, and so steepest."""

        def height(u: float) -> float:
            t = math.exp(u)
            return self._real(t) - t * epsilon - math.log(t) - math.log1p(t)

        return math.exp(optimize.minimize_scalar(height, bounds=(-7, 14), method="bounded").x)

    def deltas(self, least: float, t: float) -> Callable[[float], float]:
        """Return δ(ε) as a function of ε >= `least`: M, which knows no ε, is taken once."""
        log_m = self._real(t)
        step = 2 * math.pi / self._period(least, t, log_m)
        blocks: list[np.ndarray] = []
        while not blocks or np.abs(blocks[-1][-16:]).max() >= 1e-10 / (t * (t + 1)):
            assert len(blocks) < 32, "the transform does not fall off: too little noise for this method"
            s = step * np.arange(256 * len(blocks), 256 * (len(blocks) + 1))
            z = t + 1j * s
            blocks.append(np.exp(self.log_transform(t, s) - log_m) / (z * (z + 1)))
        values = np.concatenate(blocks)
        values[0] /= 2
        places = -1j * step * np.arange(len(values))
        return lambda e: float((values * np.exp(places * e)).real.sum()) * step / math.pi * math.exp(log_m - t * e)

    def _period(self, epsilon: float, t: float, log_m: float) -> float:
        """Return a P such that what the sum over s = 2 π j / P adds, Σ_j e^{tPj} δ(ε + Pj), is next to nothing.

        Above ε by Chernoff's bounds δ(ε + P) <= M(t') e^{-t' (ε + P)}, below it by δ <= 1.
        """
        further = ((u, self._real(t + u)) for u in t * 2.0 ** np.arange(-6, 1))
        return max(min((found - log_m - u * epsilon + 30) / u for u, found in further), 60 / t)

    def epsilon(self, delta: float, near: float) -> float:
        """Return ε at a δ, somewhere in 0.97 to 1.01 of `near`; 0 where it is less."""
        delta_at = self.deltas(0.97 * near, self.saddle(near))
        if delta_at(0.97 * near) < delta:
            return 0.0
        return optimize.brentq(lambda e: delta_at(e) / delta - 1, 0.97 * near, 1.01 * near, rtol=1e-11)


def _nodes(q: float, noise: float, idle: float, add: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return log weights of the first density and the loss, over the noise."""
    mu = 1 / noise
    x = np.linspace(-13, mu + 13, 1501)
    drawn = math.log(q) + mu * x - mu * mu / 2
    loss = np.logaddexp(math.log1p(-q) + idle * mu * x - (idle * mu) ** 2 / 2, drawn) if q < 1 else drawn
    log_noise = -x * x / 2 - 0.5 * math.log(2 * math.pi) + math.log(x[1] - x[0])
    return (log_noise, -loss) if add else (log_noise + loss, loss)


def exact_epsilon(mechanisms: Sequence[Mechanism], delta: float, near: float) -> float:
    """Return the larger ε of both directions, somewhere in 0.97 to 1.01 of `near`; 0 where both are less."""
    return max(Exact(mechanisms, add).epsilon(delta, near) for add in (False, True))
