"""Noise that cancels between peers: how much noise of its own each peer still needs.

In a step each active peer i releases, in the units of the rows that are exchanged,

    s_i Σ_b clip(∇f_i, C_i) + D_i ξ_i + Σ_j ± c_ij ζ_ij                 (+ for i < j, - for i > j)

with normals ξ_i of its own and ζ_ij that both ends of a pair draw from a secret that only they have. Every exchange
that conserves Σ_i x_i then leaves only the own noise in the sum. Peers that are active in a step have pairs in it.

`PairPlan` is what all peers know of a run's noise. How large the pairs' noise is follows from a *strength*
(`pair_noise`, `best_strength`). The own noise is the least with which a proof holds: the one below, by the covariance
of all peers' noise (`solve_pairs`), or that of `partners` (`solve_by_partners`).

| symbol | name here | is |
|---|---|---|
| V_i | `needed` | the noise that peer i would need by itself |
| D_i | `own` (over V_i) | the noise of its own that it adds |
| c_ij | `pair`; `squares` for c_ij² | the noise that a pair draws |
| q | `colluding` | how many peers share all that they know |
| H | `chosen`, a row of `sets` | the honest peers that q colluders leave |
| d | `variances` | D², as the unknown of a search |

Privacy. An observer sees all messages and has all secrets of up to q colluding peers. It can subtract what colluders
drew, so from the honest peers H of a step it learns, coordinate by coordinate, their sums plus normals of covariance

    Σ_H = D² + L_H,     L_H the Laplacian of the c_ij² among H

and nothing else: later exchanges are functions of these. Zeroing out one example of peer i moves only coordinate i of
that vector, by v with |v| <= |s_i| C_i if the example is drawn, whatever the other peers drew. Whitened by Σ_H^{-1/2},
the shift has the length |v| sqrt([Σ_H^{-1}]_ii). So the step is the same sampled Gaussian as without pairs (see
`events`), with noise V_i = [Σ_H^{-1}]_ii^{-1/2} in place of D_i. Steps draw independent numbers, so they compose as
before. Fewer than q colluders know less, so the sets of exactly q are the worst. A peer whose budget is spent releases
its noise without an example, which changes no covariance. If peers of a step release nothing, what is seen has a
submatrix of Σ_H, the inverse of which is smaller on the rest. If all others collude, D_i is left. ∎

Sizes that are private. V_i then is that of a peer with `data.at_least` examples. A peer with more has the same s_i C_i,
for Poisson batches are divided by their expected size, and draws an example with a smaller chance. Its step is a
mixture of the step at the larger chance and of that without the example, and divergences are convex. ∎

When it is used. This needs every peer: who is gone hides nobody. A plan counts so if all peers are known to take every
step, in a simulation. Where peers may restart, stay away or leave, and on every network, a plan counts with each peer's
own partners only (`partners`, where the proof is); on sparse graphs of secrets that is less than all of them hide.

Source: Allouah et al. 2024 (Decor, arXiv:2405.01031) for the mechanism; the covariance argument is our own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice
from typing import Any

import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.privacy.mechanism import partners
from flower_privdec.privacy.mechanism.partners import Partners

# Solving a step.
LARGEST_WORK = 2e8  # of the eigenvalues of all honest sets of a step, in m³: beyond it they are bounded
LARGEST_SHAPED = 5e6  # of that work, up to which peers have factors of their own: it is done some thirty times
AT_ONCE = 2**22  # numbers of the matrices that are decomposed at once
MARGIN = 1e-9  # of squares, above the rounding of eigenvalues: no peer has less noise than it needs
ROUNDING = 1e-14  # of eigenvalues, over the largest
HALVINGS = 60
SPARED = 1.03  # times the least noise in the sum: for that much more, own noise is left if all others collude

# The search for a shape of own noise (`_shape`).
RELAXED = 0.995  # of the noise that peers need: they have it with the largest own noise by itself
LAST_GAP = 3e-3  # the share of Σ d that is not yet gained when the search ends
BARRIERS = 8
NEWTON_STEPS = 3  # at each barrier
LEAST_STEP = 1e-3  # of Newton's: a smaller one is left out
BOOSTS = (1.005, 1.02, 1.1, 1.5, math.inf)  # of a shape, until it is enough
GRID = 2.0**12  # to which a shape is rounded, as factors of V

# The choice of a strength. With this horizon 16 peers on directed-exponential take strength 1 at one mixing step and
# 1.4 at two; an MLP on MNIST did best at 1 (of 0.5 to 4), and at 1 to 2 (of 0.5 to 2).
STRENGTHS = tuple(float(2 ** (number / 2)) for number in range(-4, 9))  # 1/4 to 16
HORIZON = 64  # rounds
LEFT_BY_RESTART = 3.0  # steps in which its partners add what they draw with a peer that is away

# The plan of a run.
DIGITS = 12  # to which the noise of two steps is compared
RECORDED = (0, 1, 2, 3, 4)  # numbers of colluders whose cost is recorded, beside powers of two
RECORDED_DIGITS = 5
MOST_LEVELS = 64  # of different sets of peers that are gone, which are kept
SAME_SCALE = 1e-4  # relative: float32's roundings are far below it


@dataclass(frozen=True)
class PairNoise:
    """The noise of one step.

    Attributes:
        own: D_i / V_i in (0, 1], which need not be the same for all, float64 [n_peers]; 1 for a peer without a pair.
        pair: c_ij of each pair in the units of V, float64 [E]; 0 if one of the two is idle.
    """

    own: np.ndarray
    pair: np.ndarray


def solve_pairs(needed: np.ndarray, edges: np.ndarray, colluding: int, strength: float) -> PairNoise:
    """Return the pairs' noise, and the least own noise with which every peer has the noise that it needs.

        c_ij = strength sqrt(V_i V_j) / (deg_i deg_j)^(1/4)

    Own noise is t s_i with one t for each connected part of the graph of pairs: the least for which
    [Σ_H^{-1}]_ii <= 1 / V_i² for each i in each set H that q colluders leave of the part. The shape s is V, one factor
    for all peers of the part; if that leaves some of them more noise than they need, `_shape` looks for one that leaves
    less in the sum. Whatever the shape is, the condition on t is what protects the peers.

    If these sets are too many for LARGEST_WORK, s is V and t solves v / t² + (1 - v) / (t² + λ) = 1, a bound over all
    of them, with v = max_i V_i² / Σ_H V² at most and

        λ_2(V^{-1} L_H V^{-1}) >= λ = (λ_2(L) - max_i (the q largest c_ij² of i)) / max V².

    For V spans the kernel of the scaled Laplacian, and with y ⊥ 1 on H and 0 elsewhere
    λ_2(L) |y|² <= y' L y = y' L_H y + Σ_i y_i² Σ_{colluding j} c_ij².

    Args:
        needed: V, the noise that each peer would need by itself, float64 [n_peers]; 0 if it is idle.
        edges: the pairs that share a secret, int64 [E, 2].
        colluding: q.
        strength: standard deviation of all that a peer draws with others, over V.
    """
    needed = np.asarray(needed, dtype=np.float64)
    pair = pair_noise(needed, edges, strength)

    # The own noise, of each connected part by itself.
    own = np.ones(len(needed))
    squares = _squares(len(needed), edges, pair)
    for members in _connected_parts(squares > 0):
        needs = needed[members]
        between = squares[np.ix_(members, members)]
        own[members] = _own_noise(needs, between, min(colluding, len(members) - 1)) / needs
    return PairNoise(own, pair)


def solve_by_partners(needed: np.ndarray, edges: np.ndarray, dropped: int, strength: float) -> PairNoise:
    """Return the pairs' noise, and own noise with which every peer has enough by its own partners; see `partners`.

    Args:
        needed, edges, strength: see `solve_pairs`.
        dropped: how many partners of each peer do not count, those that collude and those that are absent.
    """
    needed = np.asarray(needed, dtype=np.float64)
    pair = pair_noise(needed, edges, strength)
    own = np.ones(len(needed))
    active = np.flatnonzero(needed > 0)
    if len(active):
        own[active] = partners.least_own_noise(needed[active], _among(active, edges, pair), dropped) / needed[active]
    return PairNoise(own, pair)


def _among(active: np.ndarray, edges: np.ndarray, pair: np.ndarray) -> Partners:
    """Return who draws with whom among the active peers, numbered as they stand there."""
    place = np.full(int(max(active.max(), edges.max(initial=0))) + 1, -1)
    place[active] = np.arange(len(active))
    drawn = pair > 0  # only pairs of active peers
    return Partners.of(len(active), place[edges[drawn]], pair[drawn])


def pair_noise(needed: np.ndarray, edges: np.ndarray, strength: float) -> np.ndarray:
    """Return c_ij of each pair, float64 [E]; 0 if one of the two is idle. For arguments see `solve_pairs`."""
    both = (needed[edges] > 0).all(axis=1)
    ends = edges[both]
    degrees = np.bincount(ends.ravel(), minlength=len(needed))
    pair = np.zeros(len(edges))
    pair[both] = strength * np.sqrt(needed[ends].prod(axis=1)) / degrees[ends].prod(axis=1) ** 0.25
    return pair


def _squares(n: int, edges: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Return c_ij² as a symmetric matrix [n, n], from the noise of each pair."""
    squares = np.zeros((n, n))
    squares[edges[:, 0], edges[:, 1]] = pair**2
    squares[edges[:, 1], edges[:, 0]] = pair**2
    return squares


def _connected_parts(joined: np.ndarray) -> list[np.ndarray]:
    """Return the members of each connected part with two members or more."""
    # Each peer takes the least label among itself and its neighbours, until nothing changes.
    label = np.arange(len(joined))
    for _ in range(len(joined)):
        least = np.minimum(label, np.where(joined, label, len(joined)).min(axis=1))
        if np.array_equal(least, label):
            break
        label = least

    parts = [np.flatnonzero(label == one) for one in np.unique(label)]
    return [part for part in parts if len(part) > 1]


def _own_noise(needed: np.ndarray, squares: np.ndarray, colluding: int) -> np.ndarray:
    """Return the own noise D of a connected part, from V and the c_ij² of its members."""
    honest = len(needed) - colluding
    between_peers = squares[~np.eye(len(needed), dtype=bool)]
    is_symmetric = np.ptp(needed) == 0 and np.ptp(between_peers) == 0  # then all sets are alike
    count = 1 if is_symmetric else math.comb(len(needed), honest)
    if count * honest**3 > LARGEST_WORK:
        return math.sqrt(_bounded_square(needed, squares, colluding)) * needed

    sets = _honest_sets(len(needed), honest, count)
    square = _least_square(needed, squares, sets, needed)
    assert square is not None, "own noise of V is enough without any pairs"
    uniform = math.sqrt(square) * needed
    if is_symmetric or count * honest**3 > LARGEST_SHAPED:
        return uniform

    largest = float(needed.max())  # solved in its units, so that equal steps of other sizes have equal shapes
    shape = _shape(needed / largest, squares / largest**2, sets, uniform / largest)
    if shape is None:
        return uniform
    for boost in BOOSTS:
        shaped = np.minimum(boost * shape * largest, needed)
        square = _least_square(needed, squares, sets, shaped)
        if square is not None:
            return _spared(math.sqrt(square) * shaped, uniform, needed)
    return uniform


def _spared(shaped: np.ndarray, uniform: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return own noise with as large a least factor D_i / V_i as SPARED times the noise of the shaped one allows.

    For the sum hardly matters what the peers add that need little, and to them it matters if all others collude.
    """
    allowed = SPARED * float(np.square(shaped).sum())
    if float(np.square(uniform).sum()) <= allowed:
        return uniform
    low = 0.0
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        in_sum = float(np.square(np.maximum(shaped, middle * needed)).sum())
        if in_sum <= allowed:
            low = middle
        else:
            high = middle
    spared: np.ndarray = np.maximum(shaped, low * needed)
    return spared


def _honest_sets(members: int, honest: int, count: int) -> list[np.ndarray]:
    """Return the first sets that colluders leave of a part, int64 [AT_ONCE or fewer, honest] at a time."""
    sets = islice(combinations(range(members), honest), count)
    at_once = max(1, AT_ONCE // honest**2)
    batches = []
    while batch := list(islice(sets, at_once)):
        batches.append(np.array(batch))
    return batches


def _least_square(
    needed: np.ndarray, squares: np.ndarray, sets: Sequence[np.ndarray], shape: np.ndarray
) -> float | None:
    """Return the least t² <= 1 with which own noise t s is enough against all sets; None if s itself is not.

    With Σ_H = S (t² + S^{-1} L_H S^{-1}) S and the eigenvalues λ and eigenvectors u of the scaled Laplacian,
    V_i² [Σ_H^{-1}]_ii = (V_i / s_i)² Σ_k u_ik² / (t² + λ_k).
    """
    largest = 0.0
    ratios = np.square(needed / shape)
    for chosen in sets:
        between = squares[chosen[:, :, None], chosen[:, None]]  # [sets, peers, peers]
        values, vectors = np.linalg.eigh(_scaled_laplacian(shape[chosen], between))
        values = np.clip(values - ROUNDING * values[:, -1:], 0.0, None)  # never above the true ones
        shares = vectors**2 * ratios[chosen][:, :, None]  # [sets, peers, eigenvalues]
        values = values[:, None]

        def worst(square: float, shares: np.ndarray = shares, values: np.ndarray = values) -> float:
            return float((shares / (square + values)).sum(axis=2).max())

        if worst(1.0) > 1 + MARGIN:
            return None
        largest = max(largest, _least(worst))
    return largest


def _shape(
    needed: np.ndarray, squares: np.ndarray, sets: Sequence[np.ndarray], uniform: np.ndarray
) -> np.ndarray | None:
    """Return proportions of own noise that leave little in the sum; None if one factor for all is as good.

    The sum carries Σ_i d_i with d = D². The noise that peer i has, 1 / [Σ_H^{-1}]_ii = min_{x: x_i = 1} x' Σ_H x, is a
    minimum of linear functions of d and so concave: the d that are enough form a convex set. The least sum in it is
    found by Newton's method with a logarithmic barrier, which has one solution, so that every peer computes the same.
    No d_i is above V_i², with which a peer needs no other, nor below its share V_i² / m of a trusted server's noise, so
    that something is left if all others collude.

    Args:
        uniform: the own noise with one factor for all.
    """
    least = np.full(len(needed), np.inf)
    for chosen in sets:
        std = noise_left(np.square(uniform), squares, chosen)[1] ** 0.5
        np.minimum.at(least, chosen, std / needed[chosen])
    if least.max() < math.sqrt(SPARED):
        return None

    # The bounds: of d from below and above, and of the noise that is left from below.
    honest = sets[0].shape[1]
    upper = needed**2
    lower = needed**2 / honest
    relaxed = needed**2 * RELAXED
    bounds = (lower, upper, relaxed)
    constraints = sum(chosen.size for chosen in sets) + 2 * len(needed)

    # From within all bounds along barriers that get lower, halving steps that would leave them.
    variances = upper * (1 + RELAXED) / 2
    for gap in np.geomspace(1.0, LAST_GAP, BARRIERS):
        weight = gap * float(variances.sum()) / constraints
        for _ in range(NEWTON_STEPS):
            step = _newton_step(variances, squares, sets, bounds, weight)
            size = 1.0
            while size > LEAST_STEP and not _is_inside(variances + size * step, squares, sets, bounds):
                size /= 2
            if size > LEAST_STEP:
                variances = variances + size * step

    ratios = np.sqrt(variances) / needed
    return np.asarray(np.ceil(ratios * GRID) / GRID * needed)  # the roundings of two machines give one shape


Bounds = tuple[np.ndarray, np.ndarray, np.ndarray]  # of d from below and above, and of the noise left from below


def noise_left(variances: np.ndarray, squares: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ_H^{-1} of some sets, and 1 / [Σ_H^{-1}]_ii, in variances: d of own noise and c_ij² between peers.

    Args:
        variances: d, float64 [n].
        squares: c_ij², float64 [n, n].
        chosen: the members of each set, int64 [sets, honest].
    """
    between = squares[chosen[:, :, None], chosen[:, None]]
    diagonal = variances[chosen] + between.sum(axis=2)
    inverse = np.linalg.inv(np.eye(chosen.shape[1]) * diagonal[:, None] - between)
    return inverse, 1 / np.diagonal(inverse, axis1=1, axis2=2)


def _is_inside(variances: np.ndarray, squares: np.ndarray, sets: Sequence[np.ndarray], bounds: Bounds) -> bool:
    """Return whether d is strictly within all bounds."""
    lower, upper, relaxed = bounds
    if (variances <= lower).any() or (variances >= upper).any():
        return False
    for chosen in sets:
        _, left = noise_left(variances, squares, chosen)
        if not (left > relaxed[chosen]).all():
            return False
    return True


def _newton_step(
    variances: np.ndarray, squares: np.ndarray, sets: Sequence[np.ndarray], bounds: Bounds, weight: float
) -> np.ndarray:
    """Return Newton's step for Σ d less weight times the sum of the logarithms of all distances to bounds.

    With M = Σ_H^{-1} and x_k = M_ik / M_ii, the noise left at i has the derivatives x_k² by d_k, and
    -2 x_k x_l (M_kl - M_ik M_il / M_ii) by d_k and d_l.
    """
    lower, upper, relaxed = bounds
    gradient = 1 - weight / (variances - lower) + weight / (upper - variances)
    curvature = np.diag(weight / (variances - lower) ** 2 + weight / (upper - variances) ** 2)

    for chosen in sets:
        inverse, left = noise_left(variances, squares, chosen)
        harmonic = inverse * left[:, :, None]  # x of each peer i, in the row i
        slopes = harmonic**2
        force = weight / (left - relaxed[chosen])
        np.add.at(gradient, chosen, -(force[:, :, None] * slopes).sum(axis=1))

        pulled = (force / math.sqrt(weight))[:, :, None] * slopes
        bent = inverse * (harmonic.transpose(0, 2, 1) @ (force[:, :, None] * harmonic))
        bent -= slopes.transpose(0, 2, 1) @ ((force / left)[:, :, None] * slopes)
        second = pulled.transpose(0, 2, 1) @ pulled + 2 * bent
        np.add.at(curvature, (chosen[:, :, None], chosen[:, None]), second)

    step: np.ndarray = np.linalg.solve(curvature, -gradient)
    return step


def _bounded_square(needed: np.ndarray, squares: np.ndarray, colluding: int) -> float:
    ((share, gap),) = _gaps(needed, squares, [colluding])
    return _least(lambda square: share / square + (1 - share) / (square + gap))


def _bounded_left(
    needed: np.ndarray, profile: PairNoise, edges: np.ndarray, numbers: Sequence[int]
) -> list[np.ndarray]:
    """Return a lower bound on the noise that each peer has left, over V, against each of some numbers of colluders.

    In a connected part no peer has less own noise than t V with t its least D_i / V_i, and more noise leaves more, so
    the bound of `solve_pairs` holds with this t.

    Args:
        needed: V of a step, float64 [n_peers].
        profile: its noise.
        edges: the pairs, int64 [E, 2].
        numbers: q of each bound.
    """
    squares = _squares(len(needed), edges, profile.pair)
    bounds = [profile.own.copy() for _ in numbers]
    for members in _connected_parts(squares > 0):
        part = squares[np.ix_(members, members)]
        square = float(profile.own[members].min()) ** 2
        gaps = _gaps(needed[members], part, numbers)
        for bound, (share, gap) in zip(bounds, gaps, strict=True):
            left = (share / square + (1 - share) / (square + gap)) ** -0.5
            bound[members] = np.maximum(bound[members], left)
    return bounds


def _gaps(needed: np.ndarray, squares: np.ndarray, numbers: Sequence[int]) -> list[tuple[float, float]]:
    """Return v and λ of `solve_pairs` for each of some numbers of colluders, of a connected part."""
    second = float(np.linalg.eigvalsh(np.diag(squares.sum(axis=1)) - squares)[1])
    sizes = np.sort(needed**2)
    ascending = np.sort(squares, axis=1)
    gaps = []
    for colluding in numbers:
        honest = max(1, len(sizes) - colluding)
        share = min(1.0, float(sizes[-1] / sizes[:honest].sum()))
        lost = float(ascending[:, honest:].sum(axis=1).max())
        gaps.append((share, max(0.0, second * (1 - MARGIN) - lost) / float(sizes[-1])))
    return gaps


def _scaled_laplacian(needed: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return V^{-1} L V^{-1}, [..., m, m]."""
    laplacian = np.eye(squares.shape[-1]) * squares.sum(axis=-1)[..., None] - squares
    scaled: np.ndarray = laplacian / needed[..., :, None] / needed[..., None, :]
    return scaled


def _least(worst: Callable[[float], float]) -> float:
    """Return the least t² in (0, 1] at which a function that falls is at most 1, by bisection from above."""
    low = 0.0
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if worst(middle) <= 1:
            high = middle
        else:
            low = middle
    return min(1.0, high * (1 + MARGIN))


def _relative(needed: np.ndarray) -> np.ndarray:
    """Return V of a step over the largest, as steps are solved."""
    return np.asarray(needed / max(float(needed.max()), 1e-300))


def _rounded_down(values: np.ndarray) -> np.ndarray:
    """Return positive numbers rounded down to RECORDED_DIGITS significant digits."""
    unit = 10.0 ** (np.floor(np.log10(values)) - RECORDED_DIGITS + 1)
    return np.asarray(np.floor(values / unit) * unit)


@dataclass(frozen=True)
class Lasting:
    """The variances of noise that is correlated over steps, each over that of independent noise.

    Attributes:
        mean: the variance of the noise in the mean model, where it stays for many steps.
        step: of the noise of a single step.
        missed: of what a peer that restarts, or leaves, leaves in the mean.
    """

    mean: float = 1.0
    step: float = 1.0
    missed: float = 1.0


AS_INDEPENDENT = Lasting()


@dataclass(frozen=True)
class Trade:
    """What a strength gives: variances, each over that of the noise which a peer would need by itself.

    Attributes:
        strength: see `solve_pairs`.
        mean: the variance of the noise in the mean model; independent noise has 1 / n.
        models: of the noise of pairs that is in the peers' models when they take a step.
        restart: of what a peer that restarts, or leaves, leaves in the mean, once: what its partners draw with it in
            the steps that they take without it.
    """

    strength: float
    mean: float
    models: float
    restart: float

    def error(self, *, deployed: bool, lasting: Lasting = AS_INDEPENDENT) -> float:
        """Return the figure by which strengths are compared, of which the least is best.

        Noise in the mean stays for about HORIZON rounds, so it counts as many times.

        Args:
            deployed: whether peers are processes of their own, of which one may restart in that time.
            lasting: what correlation over steps changes.
        """
        error = HORIZON * lasting.mean * self.mean + lasting.step * self.models
        if deployed:
            error += lasting.missed * self.restart
        return error


Solver = Callable[[np.ndarray, np.ndarray, int, float], PairNoise]  # `solve_pairs` or `solve_by_partners`


def trades(
    needed: np.ndarray,
    edges: np.ndarray,
    colluding: int,
    left: float,
    solver: Solver = solve_pairs,
    strengths: Sequence[float] = STRENGTHS,
) -> list[Trade]:
    """Return what each strength gives.

    Args:
        needed, edges, colluding: see `solve_pairs`.
        left: see `disagreement_left`.
        solver: solves a step.
    """
    active = needed > 0
    peers = max(1, int(active.sum()))
    unit = float(np.square(needed[active]).mean()) if active.any() else 1.0
    results = []
    for strength in strengths:
        own = solver(needed, edges, colluding, strength).own
        mean = float(np.square(own * needed).sum() / unit / peers**2)
        restart = LEFT_BY_RESTART * strength**2 / peers**2
        results.append(Trade(strength, mean, models=strength**2 * left, restart=restart))
    return results


def best_strength(choices: Sequence[Trade], *, deployed: bool, lasting: Lasting = AS_INDEPENDENT) -> float:
    """Return the strength of the least error, see `Trade.error`."""
    return min(choices, key=lambda trade: trade.error(deployed=deployed, lasting=lasting)).strength


@dataclass(frozen=True)
class PairPlan:
    """The pairs' noise in every step of a run, which all peers know.

    Attributes:
        edges: the pairs that share a secret, int64 [E, 2], the lower id first.
        colluding: q.
        strength: see `solve_pairs`.
        trades: what other strengths give in the first step; empty if the scenario gives the strength.
        needed: V of every step in the units of what the network conserves, float64 [steps, n_peers].
        weights: how often a row of each peer counts in what the network conserves, float64 [n_peers].
        same_rates: whether all learning rates are equal, so that an algorithm may leave them out.
        sizes: how many examples each peer has, as far as the plan knows, int64 [n_peers].
        factors: for each kind of step the noise of its sums over that of the step, by name; None for 1.
        kind_of: which kind every step is of, int64 [steps].
        by_partners: why noise is counted by each peer's own partners; "" if by the covariance of all peers' noise.
        absent: a, how many partners may be absent before a peer has to add more noise of its own.
        dropped: of a simulation in which peers leave, whose pairs nobody draws in a step, bool [steps, n_peers]; None
            if nobody leaves.
        lasting: what correlation over steps makes of the noise.
    """

    edges: np.ndarray
    colluding: int
    strength: float
    needed: np.ndarray
    weights: np.ndarray
    same_rates: bool
    trades: tuple[Trade, ...] = ()
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    factors: tuple[Mapping[str, float | None] | None, ...] = (None,)
    kind_of: np.ndarray | None = None
    by_partners: str = ""
    absent: int = 0
    dropped: np.ndarray | None = None
    lasting: Lasting = AS_INDEPENDENT

    @property
    def accounting(self) -> str:
        """Return how noise is counted: by `partners`, or by the `covariance` of all peers' noise."""
        return "partners" if self.by_partners else "covariance"

    @property
    def counted(self) -> str:
        """Return how noise is counted, and why, in words."""
        if self.by_partners:
            return f"by each peer's own partners, for {self.by_partners}"
        return "by the covariance of all peers' noise, for all take every step; a network counts by partners"

    @cached_property
    def planned(self) -> np.ndarray:
        """Return D_i / V_i of every step if no partner is gone, float64 [steps, n_peers]."""
        profile_of, own_of_profiles = self._solved
        return np.asarray(own_of_profiles[profile_of])

    @cached_property
    def own(self) -> np.ndarray:
        """Return D_i / V_i of every step with the partners that are there, as far as is known, [steps, n_peers]."""
        if self.dropped is None or not self.dropped.any():
            return self.planned

        own = self.planned.copy()
        for step in np.flatnonzero(self.dropped.any(axis=1)).tolist():
            own[step] = self.levels(step, self.dropped[step])
        return own

    def levels(self, step: int, gone: np.ndarray) -> np.ndarray:
        """Return D_i / V_i of a step that is enough without some peers if all others count on it, [n_peers].

        It is what those peers promise that know who is gone, see (4) of `partners`, and never less than planned.

        Args:
            gone: who is, bool [n_peers].
        """
        profile_of, _ = self._solved
        key = (int(profile_of[step]), gone.tobytes())
        known = self._known_levels.get(key)
        if known is not None:
            return known

        needed = _relative(self.needed[step])
        left = np.flatnonzero((needed > 0) & ~gone)
        own = np.array(self.planned[step])
        if len(left):
            pair = pair_noise(np.round(needed, DIGITS), self.edges, self.strength)
            pair[gone[self.edges].any(axis=1)] = 0.0
            variances = np.square(own * needed)[left]
            demands = self._demands[profile_of[step]].of_peers(left)
            enough = partners.raised(variances, demands, _among(left, self.edges, pair))
            own[left] = np.where(enough > variances, np.sqrt(enough) / needed[left], own[left])

        if len(self._known_levels) == MOST_LEVELS:
            self._known_levels.clear()
        self._known_levels[key] = own
        return own

    def worth_promising(self, peer: int, gone: Collection[int], first: int, end: int) -> float:
        """Return what own noise a peer had better promise for steps [first, end) if some peers are gone, over V.

        It is the least of the `levels` of these steps: a promise holds in all of them. It is 0 if nothing is gained by
        a promise: what was planned is enough, or no partner is left that would count on it and be counted on.
        """
        partners_left = {other for ends in self.edges.tolist() if peer in ends for other in ends} - {peer, *gone}
        if not gone or len(partners_left) <= self.colluding:
            return 0.0

        mask = np.zeros(self.needed.shape[1], dtype=bool)
        mask[list(gone)] = True
        profile_of, _ = self._solved
        steps = np.arange(first, min(end, len(profile_of)))
        _, different = np.unique(profile_of[first:end], return_index=True)
        wanted = [float(self.levels(step, mask)[peer]) for step in steps[different] if self.needed[step, peer] > 0]
        planned = [float(self.planned[step, peer]) for step in steps[different] if self.needed[step, peer] > 0]
        is_more = any(more > least * (1 + MARGIN) for more, least in zip(wanted, planned, strict=True))
        return min(wanted) if is_more else 0.0

    @cached_property
    def _known_levels(self) -> dict[tuple[int, bytes], np.ndarray]:
        return {}

    def own_with(
        self, step: int, peer: int, others: np.ndarray, promised: np.ndarray | None = None, at_least: float = 0.0
    ) -> float:
        """Return D_i(S) / V_i of a peer in a step with some partners, see (4) of `partners`.

        Args:
            others: S, the peers with which it shares a draw, int64 [s].
            promised: L_j / V_j that each of them has promised for the step, float64 [s]; 0 for none.
            at_least: what the peer has promised itself.
        """
        needed = _relative(self.needed[step])
        if needed[peer] == 0:
            return 1.0  # it needs no noise

        mine = (self.edges == peer).any(axis=1)
        ends = self.edges[mine]
        other = np.where(ends[:, 0] == peer, ends[:, 1], ends[:, 0])
        squares = np.where(np.isin(other, others), self._relative_pairs(step)[mine] ** 2, 0.0)

        # In a simulation in which all know who is gone, they add what they would promise.
        least = np.array(self.own[step])
        if promised is not None:
            least[others] = np.maximum(least[others], promised)
        least[peer] = max(least[peer], at_least)
        variances = np.square(least * needed)

        profile_of, _ = self._solved
        demands = self._demands[profile_of[step]].of_peers(np.array([peer]))
        row = Partners(other[None], squares[None])
        topped = partners.topped_up(variances[[peer]], demands, row.hidden(variances))
        return max(float(np.sqrt(topped[0]) / needed[peer]), float(least[peer]))

    def left(self, colluding: int) -> np.ndarray | None:
        """Return the noise that each peer has left against any so many colluders, over V, float64 [steps, n_peers].

        Returns:
            By the covariance [Σ_H^{-1}]_ii^{-1/2} / V_i, the least over all sets H that the colluders leave; None if
            these sets are too many for a tenth of LARGEST_WORK. By partners (3) of that module. 1 for an idle peer.
        """
        if self.by_partners:
            return self._left_by_partners(colluding)

        profile_of, profiles = self._solved
        n = self.needed.shape[1]
        honest = n - colluding
        n_sets = math.comb(n, honest)
        # A tenth, for this is done for each number of colluders.
        if n_sets * honest**3 * len(profiles) > LARGEST_WORK / 10:
            return None

        left = np.full((len(profiles), n), np.inf)
        for number, step in enumerate(self._first_steps()):
            profile = self._profile(step)
            needed = _relative(self.needed[step])
            own = np.where(needed > 0, profile.own * needed, 1.0)
            units = np.where(needed > 0, needed, 1.0)
            squares = _squares(n, self.edges, profile.pair)
            for chosen in _honest_sets(n, honest, n_sets):
                part = squares[chosen[:, :, None], chosen[:, None]]
                diagonal = own[chosen] ** 2 + part.sum(axis=2)
                covariances = np.eye(honest) * diagonal[:, None] - part
                std = np.diagonal(np.linalg.inv(covariances), axis1=1, axis2=2) ** -0.5 / units[chosen]
                np.minimum.at(left[number], chosen, std)
        return np.asarray(left[profile_of])

    def _left_by_partners(self, colluding: int) -> np.ndarray:
        """Return (3) of `partners` over V: in any step, whoever is absent in it, float64 [steps, n_peers].

        For a number that is not recorded it is that of the next larger one; see (4) there.
        """
        profile_of, own_of_profiles = self._solved
        left = np.ones_like(own_of_profiles)
        if colluding > self.colluding:
            for number, step in enumerate(self._first_steps()):
                demands = self._demands[number]
                place = bisect_left(demands.colluding, colluding)
                left[number] = own_of_profiles[number]
                if place < len(demands.colluding):
                    needed = _relative(self.needed[step])
                    active = needed > 0
                    left[number, active] = np.sqrt(demands.variances[place, active]) / needed[active]
        return np.asarray(left[profile_of])

    @cached_property
    def _demands(self) -> list[partners.Demands]:
        """Return N_i of `partners` for each different step and each number that is recorded."""
        _, own_of_profiles = self._solved
        numbers = tuple(number for number in self._recorded if number >= self.colluding)
        demands = []
        for number, step in enumerate(self._first_steps()):
            needed = _relative(self.needed[step])
            variances = np.zeros((len(numbers), len(needed)))
            active = np.flatnonzero(needed > 0)
            if len(active):
                needs = needed[active] ** 2
                own = np.square(own_of_profiles[number])[active] * needs
                among = _among(active, self.edges, pair_noise(needed, self.edges, self.strength))
                dropped = self.colluding + self.absent
                more = partners.with_more_gone(own, needed[active], among, dropped)
                for place, colluding in enumerate(numbers):
                    left = partners.left_against(own, more, needs, among, colluding, self.colluding)
                    variances[place, active] = left
            demands.append(partners.Demands(numbers, variances))
        return demands

    @property
    def _recorded(self) -> list[int]:
        """Return for which numbers of colluders a ledger records the cost of a step, ascending."""
        n = self.needed.shape[1]
        recorded = {*RECORDED, *(2**power for power in range(3, n.bit_length()))}
        return sorted({number for number in recorded if number < n - 1} | {self.colluding})

    def left_against(self) -> dict[int, np.ndarray]:
        """Return the noise that each peer has left against some numbers of colluders, over V, by that number.

        A ledger records these, so that what a step cost is known against adversaries that another run names.

        Returns:
            float64 [steps, n_peers] each, a lower bound: never below the own noise, and at least 1 up to `colluding`,
            for which it was solved. By the covariance, a peer that needs little has more than it needs beside peers
            that need much.
        """
        numbers = self._recorded

        # Exactly if that can be computed, else a bound.
        exact: dict[int, np.ndarray] = {}
        others = []
        for colluding in numbers:
            computed = self.left(colluding)
            if computed is None:
                others.append(colluding)
            else:
                exact[colluding] = computed
        bounds = exact | self._left_at_least(others)

        left: dict[int, np.ndarray] = {}
        for colluding in numbers:
            # Few digits, rounded down, so that equal peers stay equal and few mechanisms are composed.
            least = _rounded_down(bounds[colluding] * (1 - MARGIN))
            if colluding <= self.colluding:
                left[colluding] = np.maximum(least, 1.0)
            else:
                left[colluding] = np.maximum(least, self.own)
        return left

    def _left_at_least(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Return bounds for numbers of colluders whose sets are too many to be tried; see `_bounded_left`."""
        if not numbers:
            return {}
        profile_of, _ = self._solved
        by_profile = []
        for step in self._first_steps():
            needed = _relative(self.needed[step])
            by_profile.append(_bounded_left(needed, self._profile(step), self.edges, numbers))

        left = {}
        for i, number in enumerate(numbers):
            of_profiles = np.stack([bounds[i] for bounds in by_profile])
            left[number] = of_profiles[profile_of]
        return left

    def _first_steps(self) -> list[int]:
        """Return the first step of each of the different ones."""
        profile_of, profiles = self._solved
        return [int(np.argmax(profile_of == number)) for number in range(len(profiles))]

    def _profile(self, step: int) -> PairNoise:
        """Return the noise of a step if nobody is dropped, in units of the largest V."""
        return PairNoise(self.planned[step], pair_noise(_relative(self.needed[step]), self.edges, self.strength))

    @cached_property
    def _solved(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the different steps every step is, int64 [steps], and D_i / V_i of each, [different, n]."""
        largest = np.maximum(self.needed.max(axis=1, keepdims=True), 1e-300)
        relative = np.round(self.needed / largest, DIGITS)
        different, profile_of = np.unique(relative, axis=0, return_inverse=True)
        solved = []
        for row in different:
            if self.by_partners:
                noise = solve_by_partners(row, self.edges, self.colluding + self.absent, self.strength)
            else:
                noise = solve_pairs(row, self.edges, self.colluding, self.strength)
            solved.append(noise.own)
        return profile_of.ravel(), np.stack(solved)

    def _factor(self, step: int, name: str) -> float:
        """Return the noise of a sum of a step over that of the step."""
        number = 0 if self.kind_of is None else int(self.kind_of[step])
        kind = self.factors[number]
        if kind is None:
            return 1.0
        return kind.get(name) or 1.0

    def for_batches(self, times: np.ndarray) -> PairPlan:
        """Return the plan for peers whose batches are other times as large as those that it was made for, [n_peers]."""
        return replace(self, needed=self.needed / times)

    def pair_std(self, step: int, peers: np.ndarray, std: np.ndarray, name: str = "gradient") -> np.ndarray:
        """Return c_ij of every pair, in the units of what the network conserves, float64 [E].

        Args:
            peers: some active peers, int64 [r].
            std: the standard deviation of their own noise, in the units of their rows, [r].
            name: the name of the sum that it is added to.

        Raises:
            RunError: their noise does not have the proportions that were planned.
        """
        if not self.needed[step].any():
            return np.zeros(len(self.edges))
        return self.planned_pairs(step) * self._times_planned(step, peers, std, name)

    def _times_planned(self, step: int, peers: np.ndarray, std: np.ndarray, name: str) -> float:
        """Return by how much a step is larger than planned; for arguments see `pair_std`."""
        # The same for all peers, or the noise would not cancel.
        scales = std * self.weights[peers] / (self.own[step, peers] * self.needed[step, peers])
        wanted = scales.mean() if self.same_rates else self._factor(step, name)
        if (np.abs(scales - wanted) > SAME_SCALE * wanted).any():
            raise RunError(
                f"step {step}: the noise of peers {peers[:3].tolist()} is {scales[:3].tolist()} times the planned one, "
                f"which must be {wanted:g} for all peers: give them one learning rate, or leave privacy.noise out",
                code="noise.pair-scale",
            )
        return float(wanted)

    @cached_property
    def is_complete(self) -> bool:
        """Return whether every two peers share a secret."""
        n = len(self.weights)
        return len(self.edges) == n * (n - 1) // 2

    def member_std(self, step: int, peers: np.ndarray, std: np.ndarray, name: str = "gradient") -> np.ndarray:
        """Return a of every peer with c_ij² = a_i² a_j² for each pair, if every two share a secret, float64 [n_peers].

        It is 0 for a peer that draws with nobody. For arguments, units and errors see `pair_std`.
        """
        needed = np.round(_relative(self.needed[step]), DIGITS)
        others = np.count_nonzero(needed) - 1
        if others < 1:
            return np.zeros(len(needed))
        times = self._times_planned(step, peers, std, name) * self.needed[step].max()
        squares = times * self.strength * needed / math.sqrt(others)
        if self.dropped is not None:
            squares[self.dropped[step]] = 0.0
        return np.asarray(np.sqrt(squares))

    def planned_pairs(self, step: int) -> np.ndarray:
        """Return c_ij of every pair that draws in a step, in the units of `needed`, float64 [E]; 0 for others."""
        return np.asarray(self._relative_pairs(step) * self.needed[step].max())

    def _relative_pairs(self, step: int) -> np.ndarray:
        """Return `planned_pairs` over the largest V; most steps are as the one before, so the last one is kept."""
        dropped = None if self.dropped is None else self.dropped[step]
        key = (self.needed[step].tobytes(), b"" if dropped is None else dropped.tobytes())
        if self._last_pairs.get("key") != key:
            pair = pair_noise(np.round(_relative(self.needed[step]), DIGITS), self.edges, self.strength)
            if dropped is not None:
                pair[dropped[self.edges].any(axis=1)] = 0.0
            self._last_pairs.update(key=key, pair=pair)
        return np.asarray(self._last_pairs["pair"])

    @cached_property
    def _last_pairs(self) -> dict[str, Any]:
        return {}
