"""Noise that is correlated over steps: what it costs, and which correlation leaves the least of it in the models.

Independent noise adds up: after n steps a model holds that of all n. A peer can instead subtract, in each step, a
part of the noise of those before it. With normals z_t, and numbers c_0 = 1, c_1, ..., c_{b-1} (*b bands*), step t
gets

    w_t = z_t - Σ_{0<j<b} c_j w_{t-j},        that is, C w = z with C_{t,s} = c_{t-s},

in standard deviations of its noise. Every step is noisier, and the sum of many steps is not. To keep the price low,
the examples of a peer are divided into b *groups* by their position: step t draws from group t mod b, each example of
it by itself, at b times the rate, so that batches are as large as ever. With b = 1 this is DP-SGD.

| symbol | name here | is |
|---|---|---|
| c | `coefficients` | see above |
| b | `bands`; `groups` of a drawing | after how many steps noise is forgotten, and an example may be drawn again |
| |c| | `norm` | how far an example moves a block of b steps, in clip norms |

Privacy. Write the released sums of a peer, in clip norms over σ_t, as G + w. C is lower triangular and public, so
publishing them in turn shows as much as publishing C G + z in turn. Fix an example; its group is drawn in steps g, g
+ b, g + 2b, ... only, in each with probability q by a coin of its own. If it is drawn in step t, it moves the row t +
j of C G by c_j v, |v| <= 1 / σ_t, for 0 <= j < b, and no other. So the rows [t, t + b) are moved by this one draw
only, and those of the next draw come after. Given all that was published before, the rest of these rows is known but
for z. So the rows of one draw are the sampled Gaussian of rate q in which a drawn example moves the sum by |c| clip
norms (`events`), and those of different draws compose. In any block of b steps in a row an example is drawn at most
once: a block costs one release, at the least noise of its steps, and is paid before its first step. ∎

Forgetting. A peer may begin again at any step k as if no noise had been before: w_{k-1} = w_{k-2} = ... = 0. What it
releases from k on is a mechanism of its own, with fresh z. A draw before k then moves the rows [t, k) only, by less
than |c|; one from k on is as above. So forgetting costs accuracy and never ε. Three things follow. After a round in
which a peer is idle it forgets: noise is correlated over steps that follow each other. A process that draws what no
one can draw again begins without memory, and keeps it to itself: noise of past steps, on a disk, would uncover them.
And if such a process takes steps again, it pays for the blocks that they are in again: the steps of each process are
one mechanism, and those of several, with coins and normals of their own, compose. ∎

Under noise that cancels between peers (`cancelling`) the z of a step is all the noise of that step: D ξ of the peer's
own, and ± c_j ζ_j of what it draws with its partners, over the noise V that it needs by itself. It goes through the
peer's C, in the peer's steps, whatever the others do; so what two peers draw in a step is taken back by both alike. An
observer can take every peer's C off again, whatever all of them released meanwhile: each C is lower triangular and
public, and so is when a peer forgets. Left are the sums C G of each peer plus its z. These are releases of `cancelling`
and `partners`, with C G for G, and both proofs hold as they stand. Each draw is in one z of either of its ends at most.
Tell an observer all that these proofs tell it, and a peer's z are independent normals from step to step, with the
standard deviation σ_eff >= 1 that they prove of each step against q colluders, and m >= D / V against more. Who is
there, and who draws with whom, may follow from what was released: a draw that no one adds is one that the observer
is not told. So the rows of one draw of an example are as above, with noise m_t of each row t. Rows of a block reach
into the next one: a block is paid at the least σ_t min_{0<=j<b} m_{t+j} of its steps t (`least_ahead`). If all peers
take every step, the covariance of all z counts as in `cancelling`, for the same reason: steps are independent. ∎

What it cannot do is cancel if two peers keep different clocks. After a partner restarts or leaves, a peer goes on
taking back what it drew with it, and nobody takes it back at the other end: of each draw of variance c² that is
Σ_{i>=1} (Σ_{j>=i} a_j)² c² in the sum of all models, with a the first column of C^{-1}, once. With 16 bands or fewer
that is less than a single draw which a partner misses, and a missed draw leaves less: (Σ a_j)² c². If peers rest in
turns it would be so in each step, so a scenario cannot ask for that.

How much it helps. Noise in a model is taken out again by later steps (`Workload`): what is correlated over more steps
than that gains nothing, and a block of more steps costs amplification. So small budgets take few
bands, large ones more.

Sources: Choquette-Choo et al. 2023 (arXiv:2306.08153) for bands, groups and amplification; Kalinin and Lampert 2024
(arXiv:2405.13763) for the square root of the workload, with which the search for c begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import scipy

from flower_privdec.privacy.accountant.calibration import scale_for_budget
from flower_privdec.privacy.mechanism.events import Release

DIGITS = 4  # of a coefficient: machines whose searches differ by less have the same noise
HORIZON = 64  # steps after which training has taken most of some noise out of a model again
LAGS = 1024  # steps after which nothing of it is left
NODES = 64  # draws, spread over a run, whose shares stand for those of all
CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)  # bands that `auto` looks at; each is a row of memory and of work a step
WORTH = 0.98  # of the noise in the models: more bands have to leave less than that of what fewer leave
WORSE = 2  # candidates in a row that leave more noise, after which `auto` looks no further


@dataclass(frozen=True)
class Correlation:
    """How the noise of a peer's steps is correlated.

    Attributes:
        coefficients: c, beginning with 1; all numbers of it are public.
    """

    coefficients: tuple[float, ...] = (1.0,)

    @property
    def bands(self) -> int:
        """Return b."""
        return len(self.coefficients)

    @cached_property
    def norm(self) -> float:
        """Return |c|, rounded up: by how much more an example moves a block than a step without correlation."""
        if self.bands == 1:
            return 1.0
        return math.sqrt(math.fsum(c * c for c in self.coefficients)) * (1 + 1e-12)

    @cached_property
    def response(self) -> np.ndarray:
        """Return what is left of a step's z in the noise of that step and of those after it, float64 [LAGS]."""
        impulse = np.zeros(LAGS)
        impulse[0] = 1.0
        return np.asarray(scipy.signal.lfilter([1.0], self.coefficients, impulse))


INDEPENDENT_STEPS = Correlation()


def least_ahead(left: np.ndarray, bands: int) -> np.ndarray:
    """Return the least of each step and the b - 1 steps after it, float64 [steps]."""
    least = np.array(left, dtype=np.float64)
    for lag in range(1, min(bands, len(least))):
        least[:-lag] = np.minimum(least[:-lag], left[lag:])
    return least


@dataclass(frozen=True)
class Workload:
    """How the noise of steps enters a model: with weight u_t at step t, and again through momentum.

    Later steps take it out again, since gradients are taken at the model that holds it. How fast depends on the loss;
    a step counts here as taking out one part in `horizon`.

    Attributes:
        weights: u, such as the learning rates over the largest, a number a step.
        momentum: β of the local optimizer; 0 without.
        horizon: see above; ∞ for steps whose noise stays.
    """

    weights: tuple[float, ...]
    momentum: float = 0.0
    horizon: float = HORIZON

    @cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights from some draws on, [nodes, lags], and which steps draw them."""
        weights = np.asarray(self.weights)
        count = min(len(weights), NODES)
        lags = min(len(weights), LAGS)
        first = np.floor((np.arange(count) + 0.5) * len(weights) / count).astype(np.int64)
        padded = np.concatenate([weights, np.zeros(lags)])
        return padded[first[:, None] + np.arange(lags)], first

    def on_average(self, correlation: Correlation) -> float:
        """Return the noise in a model, over that of one step's z: root mean square over the steps.

        The model holds x_t = (1 - 1 / horizon) x_{t-1} + u_t m_t after step t, with m_t = w_t + β m_{t-1}.
        """
        windows, first = self._windows
        steps = len(self.weights)
        lags = windows.shape[1]

        impulse = np.zeros(lags)
        impulse[0] = 1.0
        shares = self._kept(windows * self._response(correlation, impulse))  # of a draw, so many steps later
        is_within = np.arange(lags) < (steps - first)[:, None]
        draws = steps / len(first)  # that each of these stands for
        return math.sqrt(draws * float(np.square(shares)[is_within].sum()) / steps)

    def at_end(self, correlation: Correlation) -> float:
        """Return the noise in a model after the last step, over that of one step's z."""
        # The share of the draw k steps before the last one, for all k: the same filters, backwards in time.
        kept = (1 - 1 / self.horizon) ** np.arange(len(self.weights))
        shares = self._response(correlation, kept * np.asarray(self.weights)[::-1])
        return float(np.linalg.norm(shares))

    def _kept(self, entering: np.ndarray) -> np.ndarray:
        """Return what is left in a model of what enters it in a row of steps."""
        return np.asarray(scipy.signal.lfilter([1.0], [1.0, 1 / self.horizon - 1], entering, axis=1))

    def _response(self, correlation: Correlation, entering: np.ndarray) -> np.ndarray:
        """Return what correlation and momentum make of a row of numbers."""
        noise = scipy.signal.lfilter([1.0], correlation.coefficients, entering)
        return np.asarray(scipy.signal.lfilter([1.0], [1.0, -self.momentum], noise))


@lru_cache(maxsize=256)
def best_correlation(bands: int, workload: Workload) -> Correlation:
    """Return the c of so many bands, 1 >= c_1 >= ... > 0, with nearly the least noise in the models at one ε.

    The noise that one ε asks for grows with |c|, whatever ε is, so |c| times the noise in the models is minimised, by
    L-BFGS over the ratios of c. The search begins with the square root of the workload, 1 / sqrt((1 - x) (1 - βx)) as a
    series. Whatever it finds, privacy counts |c| of.
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
    numbers = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod(x * (1 - 0.5 / numbers))])


def _from_ratios(ratios: np.ndarray) -> Correlation:
    return Correlation((1.0, *np.cumprod(ratios).tolist()))


@dataclass(frozen=True)
class BandChoice:
    """What one number of bands would do at a peer's budget.

    Attributes:
        correlation: the best with so many bands.
        noise_multiplier: that of z, with which the budget is kept.
        in_models: root mean square of the noise in the peer's own sum of steps, over the run, in clip norms of one step
            at the largest learning rate.
        at_end: that after the last step.
    """

    correlation: Correlation
    noise_multiplier: float
    in_models: float
    at_end: float


def choices(
    workload: Workload, bands: Sequence[int], *, size: int, rate: float, batch: float, epsilon: float, delta: float
) -> list[BandChoice]:
    """Return what some numbers of bands, ascending, would do at one peer's budget, until more only do harm.

    Args:
        size: the peer's examples.
        rate: the chance of each to be in a step's batch without groups.
        batch: expected examples a step.
    """
    found: list[BandChoice] = []
    worse = 0
    for count in bands:
        correlation = best_correlation(count, workload)
        blocks = -(-len(workload.weights) // correlation.bands)  # rounded up
        grouped = min(1.0, rate * correlation.bands)

        def releases(scale: float, grouped: float = grouped, blocks: int = blocks) -> list[Release]:
            kind = "poisson" if grouped < 1 else "full"
            return [Release(kind, grouped, size, max(1, round(batch)), scale, blocks)]

        noise = scale_for_budget(releases, epsilon, delta) * correlation.norm
        on_average = noise * workload.on_average(correlation)
        at_end = noise * workload.at_end(correlation)
        found.append(BandChoice(correlation, noise, on_average, at_end))

        if found[-1].in_models > min(one.in_models for one in found):
            worse += 1
        else:
            worse = 0
        if worse == WORSE:
            break
    return found


def best_choice(found: Sequence[BandChoice]) -> BandChoice:
    """Return the choice of the fewest bands of which no other leaves less than WORTH of the noise in the models."""
    least = min(one.in_models for one in found)
    return next(one for one in found if WORTH * one.in_models <= least)
