"""Noise that is correlated over steps: what it costs, and which correlation leaves the least of it in the models.

Independent noise adds up: after n steps a model holds that of all n. A peer can instead subtract, in each step, a part
of the noise of those before it. With normals z_t, and numbers c_0 = 1, c_1, ..., c_{b-1} (*b bands*), step t gets

    w_t = z_t - Σ_{0<j<b} c_j w_{t-j},        that is, C w = z with C_{t,s} = c_{t-s},

in units of the standard deviation of that step's noise. Every step is noisier, and the sum of many steps is less noisy.
To keep the price low, the examples of a peer are divided into b *groups* by their position: step t draws from group t
mod b, each example of it by a coin of its own, at b times the rate, so that batches are as large as before. With b = 1
this is DP-SGD.

| symbol | name here | is |
|---|---|---|
| c | `coefficients` | see above |
| b | `bands`; `groups` of a drawing | after how many steps noise is forgotten, and an example may be drawn again |
| |c| | `norm` | how far an example moves a block of b steps, in clip norms |

Privacy. Divide the released sum of each step t by its clip norm and by σ_t, and write those of all steps as rows G + w:
G are the clipped sums. C is lower triangular and public, so publishing these rows one after the other shows as much as
publishing those of C G + z. Fix an example. Its group is drawn in steps g, g + b, g + 2b, ... only, and it is drawn in
each with probability q, by a coin of its own. If it is drawn in step t, it moves row t + j of C G by c_j v, |v| <= 1 /
σ_t, for 0 <= j < b, and no other row. So this one draw is all by which it can move the rows [t, t + b), and the rows of
its next draw come after them. Given all that was published before, everything else in these rows is known, except z. So
the rows of one draw are the sampled Gaussian of rate q in which a drawn example moves the sum by |c| clip norms
(`events`), and those of different draws compose. In any b steps in a row, a *block*, an example is drawn at most once:
a block costs one release, at the least noise of its steps, and is paid before its first step. ∎

Forgetting. A peer may begin again at any step k as if no noise had been before: w_{k-1} = w_{k-2} = ... = 0. What it
releases from k on is a mechanism of its own, with fresh z. A draw before k then moves the rows [t, k) only, by less
than |c|; one from k on is as above. So forgetting costs accuracy and never ε. Three things follow. After a round in
which a peer is idle it forgets: noise is correlated over steps that follow each other. A process that draws what no one
can draw again begins without memory, and keeps it to itself: noise of past steps, on a disk, would uncover them. And if
such a process takes steps again, it pays for the blocks that they are in again: the steps of each process are one
mechanism, and those of several, with coins and normals of their own, compose. ∎

With noise that cancels between peers (`cancelling`), the z of a step is all the noise of that step, over the noise V
that the peer would need by itself: D ξ of its own, and ± s_j ζ_j, what it draws with each partner j. (s_j is the
strength of the pair, there c_ij.) z goes through the peer's C, in the peer's steps, whatever the others do; so both
ends take back alike what they drew together. An observer can undo every peer's C, whatever all of them released
meanwhile: each C is lower triangular and public, and so is when a peer forgets. What is left is C G + z of each peer.
These are the releases of `cancelling` and `partners`, with C G for G, and both proofs hold as they stand. Each draw
enters one z at most at each of its two ends. Give the observer all that these proofs give it: then a peer's z are
independent normals from step to step, with the standard deviation σ_eff >= 1 that they prove for each step against q
colluders, and m >= D / V against more. Who is there, and who draws with whom, may depend on what was released: the
observer is not told a draw that no one has added. So the rows of one draw of an example are as above, with noise m_t in
row t. The rows of a block reach into the next one: a block is paid at the least σ_t min_{0<=j<b} m_{t+j} of its steps t
(`least_ahead`). If all peers take every step, the covariance of all z counts as in `cancelling`, for the same reason:
steps are independent. ∎

What does not cancel. After a partner restarts or leaves, a peer goes on taking back what the two drew before, and
nobody does so at the other end. If each draw has the variance s², all those before together leave Σ_{i>=1} (Σ_{j>=i}
a_j)² s² in the sum of all models, once, where a is the first column of C^{-1}. With 16 bands or fewer that is less than
the s² of one uncorrelated draw that a partner misses; a correlated draw that it misses leaves less, too: (Σ_{j>=0}
a_j)² s². If peers took turns to rest, this would happen in each step, so a scenario cannot ask for it.

How much it helps. Later steps take the noise in a model out again anyway (`Workload`), so correlation over more steps
than that takes gains nothing; and longer blocks cost amplification by sampling. So a small budget takes few bands, a
large one more.

Sources: Choquette-Choo et al. 2023 (arXiv:2306.08153) for bands, groups and amplification; Kalinin and Lampert 2024
(arXiv:2405.13763) for the square root of the workload, with which the search for c begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.privacy.accountant.calibration import scale_for_budget
from flower_privdec.privacy.mechanism.events import Release

DIGITS = 4  # of a coefficient: searches on two machines may differ by less, and the noise must not
HORIZON = 64  # steps after which training has taken most of a step's noise out of the model again
LAGS = 1024  # steps after which nothing of it is left
NODES = 64  # steps, spread over a run, whose noise stands for that of all
CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)  # bands that `auto` tries; each costs a row of memory, and work in each step
WORTH = 0.98  # more bands are taken only if they leave less than this share of the noise that fewer leave
WORSE = 2  # after so many candidates in a row that leave more noise, `auto` looks no further


@dataclass(frozen=True)
class Correlation:
    """How the noise of a peer's steps is correlated.

    Attributes:
        coefficients: c, of which the first is 1; they are public.
    """

    coefficients: tuple[float, ...] = (1.0,)

    @property
    def bands(self) -> int:
        """Return b."""
        return len(self.coefficients)

    @cached_property
    def norm(self) -> float:
        """Return |c|, rounded up: how far an example moves a block, in clip norms; 1 without correlation."""
        if self.bands == 1:
            return 1.0
        return math.sqrt(math.fsum(c * c for c in self.coefficients)) * (1 + 1e-12)

    @cached_property
    def response(self) -> np.ndarray:
        """Return a, the first column of C^{-1}: the share of a step's z in the noise of later steps, float64 [LAGS]."""
        impulse = np.zeros(LAGS)
        impulse[0] = 1.0
        return np.asarray(scipy.signal.lfilter([1.0], self.coefficients, impulse))


INDEPENDENT_STEPS = Correlation()


def least_ahead(left: np.ndarray, bands: int) -> np.ndarray:
    """Return, for each step, the minimum over it and the b - 1 steps after it, float64 [steps]."""
    least = np.array(left, dtype=np.float64)
    for lag in range(1, min(bands, len(least))):
        least[:-lag] = np.minimum(least[:-lag], left[lag:])
    return least


@dataclass(frozen=True)
class Workload:
    """How the noise of steps enters a model: with weight u_t at step t, and again through momentum.

    Later steps take it out again, since gradients are taken at the noisy model. How fast depends on the loss; here each
    step is assumed to take out 1 / horizon of it.

    Attributes:
        weights: u, one number for each step, such as its learning rate over the largest one.
        momentum: β of the local optimizer; 0 without.
        horizon: see above; ∞ for steps whose noise stays.
    """

    weights: tuple[float, ...]
    momentum: float = 0.0
    horizon: float = HORIZON

    @cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return some steps spread over the run, and u of each and of the steps after it, [nodes, lags]."""
        weights = np.asarray(self.weights)
        count = min(len(weights), NODES)
        lags = min(len(weights), LAGS)
        first = np.floor((np.arange(count) + 0.5) * len(weights) / count).astype(np.int64)
        padded = np.concatenate([weights, np.zeros(lags)])
        return first, padded[first[:, None] + np.arange(lags)]

    def on_average(self, correlation: Correlation) -> float:
        """Return the noise in a model over that of one step's z: root mean square over all steps.

        After step t the noise in the model is x_t = (1 - 1 / horizon) x_{t-1} + u_t m_t, with m_t = w_t + β m_{t-1}.
        """
        first, windows = self._windows
        steps = len(self.weights)
        lags = windows.shape[1]

        impulse = np.zeros(lags)
        impulse[0] = 1.0
        shares = self._kept(windows * self._response(correlation, impulse))  # of a node's z in x, by lag
        is_within = np.arange(lags) < (steps - first)[:, None]  # the run has no steps after its last
        steps_per_node = steps / len(first)
        variance = steps_per_node * float(np.square(shares)[is_within].sum()) / steps
        return math.sqrt(variance)

    def at_end(self, correlation: Correlation) -> float:
        """Return the noise in a model after the last step, over that of one step's z."""
        # The share of z of k steps before the last, for all k: the same filters, backwards in time.
        kept = (1 - 1 / self.horizon) ** np.arange(len(self.weights))
        shares = self._response(correlation, kept * np.asarray(self.weights)[::-1])
        return float(np.linalg.norm(shares))

    def _kept(self, entering: np.ndarray) -> np.ndarray:
        """Return how much is in a model after each step, given how much enters it at each."""
        return np.asarray(scipy.signal.lfilter([1.0], [1.0, 1 / self.horizon - 1], entering, axis=1))

    def _response(self, correlation: Correlation, entering: np.ndarray) -> np.ndarray:
        """Pass a row of numbers, one for each step, through the filters of correlation and momentum."""
        noise = scipy.signal.lfilter([1.0], correlation.coefficients, entering)
        return np.asarray(scipy.signal.lfilter([1.0], [1.0, -self.momentum], noise))


@lru_cache(maxsize=256)
def best_correlation(bands: int, workload: Workload) -> Correlation:
    """Return the c of so many bands, 1 >= c_1 >= ... > 0, with nearly the least noise in the models at one ε.

    The noise that an ε asks for is proportional to |c|, so |c| times the noise in the models is minimised, by L-BFGS
    over the ratios c_{j+1} / c_j. The search begins with the square root of the workload, 1 / sqrt((1 - x) (1 - βx))
    as a series. Privacy does not depend on the search: it counts |c| of whatever is found.
    """
    bands = min(bands, len(workload.weights))
    if bands <= 1:
        return INDEPENDENT_STEPS

    def objective(logits: np.ndarray) -> float:
        correlation = _from_ratios(scipy.special.expit(logits))
        value = correlation.norm * workload.on_average(correlation)
        return math.log(value)

    start = np.convolve(_square_root(1.0, bands), _square_root(workload.momentum, bands))[:bands]
    ratios = np.clip(start[1:] / start[:-1], 0.01, 0.99)
    found = scipy.optimize.minimize(objective, scipy.special.logit(ratios), method="L-BFGS-B", options={"maxiter": 60})
    best = _from_ratios(scipy.special.expit(found.x))
    return Correlation(tuple(round(c, DIGITS) for c in best.coefficients))


def _square_root(x: float, count: int) -> np.ndarray:
    """Return the first coefficients of 1 / sqrt(1 - x y) as a series in y: x^j (2j choose j) / 4^j."""
    j = np.arange(1, count)
    factors = x * (1 - 0.5 / j)  # each coefficient over the one before
    return np.concatenate([[1.0], np.cumprod(factors)])


def _from_ratios(ratios: np.ndarray) -> Correlation:
    return Correlation((1.0, *np.cumprod(ratios).tolist()))


@dataclass(frozen=True)
class BandChoice:
    """What one number of bands would do at a peer's budget.

    Attributes:
        correlation: the best with so many bands.
        noise_multiplier: of z, so that the budget holds.
        in_models: the noise in the peer's own model, root mean square over the run, in clip norms of one step at the
            largest learning rate.
        at_end: the same after the last step.
    """

    correlation: Correlation
    noise_multiplier: float
    in_models: float
    at_end: float


def choices(
    workload: Workload, bands: Sequence[int], *, size: int, rate: float, batch: float, epsilon: float, delta: float
) -> list[BandChoice]:
    """Return what each of some numbers of bands would do at one peer's budget; stop when more bands only do harm.

    Args:
        bands: ascending.
        size: the peer's number of examples.
        rate: the probability of each to be in a step's batch, without groups.
        batch: the expected number of examples in a step.
    """
    found: list[BandChoice] = []
    worse = 0
    for count in bands:
        correlation = best_correlation(count, workload)
        blocks = math.ceil(len(workload.weights) / correlation.bands)
        grouped = min(1.0, rate * correlation.bands)  # the rate within the group of a step

        def releases(scale: float, grouped: float = grouped, blocks: int = blocks) -> list[Release]:
            kind = "poisson" if grouped < 1 else "full"
            return [Release(kind, grouped, size, max(1, round(batch)), scale, blocks)]

        noise = scale_for_budget(releases, epsilon, delta) * correlation.norm
        on_average = noise * workload.on_average(correlation)
        at_end = noise * workload.at_end(correlation)
        found.append(BandChoice(correlation, noise, on_average, at_end))

        least = min(one.in_models for one in found)
        if on_average > least:
            worse += 1
        else:
            worse = 0
        if worse == WORSE:
            break
    return found


def best_choice(found: Sequence[BandChoice]) -> BandChoice:
    """Return the choice with the fewest bands that leaves at most 1 / WORTH times the least noise in the models."""
    least = min(one.in_models for one in found)
    return next(one for one in found if WORTH * one.in_models <= least)
