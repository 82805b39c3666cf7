"""The noise that hides a peer by its own partners only: whoever else is there, restarts or leaves.

`cancelling` has the mechanism and its symbols. There the noise that a peer has left follows from the covariance of all
honest peers' noise, so all of them have to be there. Here it follows from what the peer does itself:

    σ_i²  =  D_i²  +  Σ t_ij  over the partners j of i in this step but those q with the largest t_ij,

    t_ij  =  c_ij² D_j² / (c_ij² + D_j²)                                                                       (1)

with D_j the noise of its own that partner j adds at least.

Proof. Let a *node* be one release of a step by one process of a peer. Two rules are enforced (`noise.pair_noise`):

 (a) the draw of a pair is added by one node of either end at most: secrets live and die with a process, which takes a
     step once and has one secret with each other peer at a time;
 (b) each node of peer j adds noise D_j of its own at least.

Tell an observer everything but what one honest node of peer i drew itself, its own noise ξ_i and the draws ζ_ij with
its honest partners, and but the own noise ξ_j of the nodes that added one of these draws too. It knows all examples but
one of peer i, the draws with q colluders, the draws of all other pairs, all other nodes. Of a partner's node, which it
sees, it knows all but D_j ξ_j ± c_ij ζ_ij. Given this sum, c_ij ζ_ij is normal with variance t_ij; if no node of the
partner added the draw, with variance c_ij² > t_ij. Own noise above D_j makes t_ij larger. The sums of different
partners have no draw in common, so what i's node drew is normal with variance D_i² + Σ t_ij over its honest partners,
which are fewest, and the least protecting ones, if colluders are those with the largest t_ij. An example moves the
node's sum by |s_i| C_i at most, if it is drawn: the step is a sampled Gaussian (see `events`) of noise σ_i.

Several nodes of one peer. By (a) no node of a partner adds draws with two of them, so the noise terms that hide them
are independent: each has its σ_i if the others' is known, and steps that are taken twice cost what is charged twice.
Steps draw independent numbers. What a node does may depend on all that was released before: fix that, and what is
left of the step is as above, so steps compose as ever. ∎

What a peer does (`topped_up`). All peers know from the plan what noise V_i each needs and D_i, with which (1) is V_i²
at least when any a of its partners are absent and any q others collude. A node that has the partners S adds

    D_i(S)²  =  max(D_i², V_i² - Σ t_ij over S but the q largest)                                               (2)

so that σ_i >= V_i whatever S is: with fewer partners it adds more noise of its own, never less than D_i, and its ε is
as planned. With no partner it adds V_i, as if there were no pairs. Peers need not agree on who is there.

More colluders than q. Let b_1 >= b_2 >= ... be the t_ij of all partners that i has by the plan, with some E_j >= D_j in
place of D_j. Against q' > q of them

    σ_i²  >=  N_i(q')  =  max(D_i², V_i² - (b_{q+1} + ... + b_q'))                                              (3)

whatever S is. For by (2) it is D_i(S)² + Σ over S but the q' largest >= V_i² less those of S in the ranks q + 1 to q',
and the r-th largest of some is never above the r-th largest of all. N_i(q') is V_i² for q' <= q. ∎

Promises (`raised`). When somebody is gone, all top up alike, so each could count on more noise of its partners than the
plan's D_j, and all would need less. So a process of peer j may *promise*: each of its nodes of the steps [k, l) adds
own noise of L_j at least. It signs this with the identity of j, together with the public key of its secrets. Of the
steps from k on it has taken none by then, or only some in which it kept to a promise of L_j or more. Rule (b) then is,
for the node that adds ζ_ij of step s at j's end:

 (b') it adds noise of its own of M_j >= D_j at least, and of L_j if the process whose key made ζ_ij promised L_j for s.

With M_j for D_j in (1) the proof above holds word by word: only the process of that key can add ζ_ij at j's end, so it
is the one that promised, and bound itself before it took the step. Whatever it adds above M_j may be told the observer.
Peer i may have heard of a promise or not, and count it in one step and not in the next: all that is counted is true. A
peer that does not keep a promise counts among the q colluders, as one that adds less than D_j. A process that is gone
keeps all its promises; one that is started from an old folder has another key, with which no draw of the old one is
made, and has promised nothing. Who repeats an old promise repeats what is still true, in its steps and for its key.

A node with the partners S then adds

    D_i(S)²  =  max(D_i², L_i², N_i(q') - Σ t_ij over S but the q' largest, for each q' >= q of a list)         (4)

with t_ij of M_j. So (3) holds for each q' of the list, which are those that a ledger records, whatever is promised; for
a q' between them the number of the next larger one counts. If nobody promises more than E_j, the terms of q' > q add
nothing, by the proof of (3). And (4) is never above (2), for t_ij only grow with promises. If only the q' best partners
are there, and have promised E_j, no more than (3) is left, so it cannot be improved for steps of which S is unknown. ∎

What is promised is a solution of (4) without those who are gone: M = D(S) of all who are left. Then everybody tops up
to what it promised, and no more. E is the least own noise if some more were gone than planned for (`with_more_gone`):
until then nothing is lost by the list. Eight equal peers of large c and q = 1, of which one is gone, add 53 % of V
by (2), and 41 % by (4).

The plan (`least_own_noise`). Each t_ij is concave in d_j = D_j², and so is a sum of the smallest ones: the d that are
enough form a convex set. Take any d⁰ and top every peer up by (2): that is enough, for t_ij only grow. Of d⁰ = s e with
some proportions e the sum Σ d_i is convex in s, as a sum of maxima of lines and convex functions; so the best s is
found by sections. Of a few e the best is taken, and then what is left over is taken off (`_trimmed`). Against
linear programs the noise in the sum was within 5 % of the least, mostly within 1 %; for equal peers it is the least.

Source: ours; the mechanism is Decor's (Allouah et al. 2024, arXiv:2405.01031).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SECTIONS = 60  # golden ones: the scale is right to 3e-13
GOLDEN = (math.sqrt(5) - 1) / 2
NO_BETTER = 1e-9  # relative: sums closer than this are equal, on any machine
TRIMS = 60
LAST_TRIM = 1e-4  # of Σ d, below which trimming ends
LARGEST_TRIMMED = 1e5  # partners of all peers, up to which more than one proportion is tried
MARGIN = 1e-12  # of squares, above rounding: no peer has less noise than it needs
SPARED = 1.03  # times the least Σ d: for that much more, own noise is left if all others collude
HALVINGS = 40
FORESEEN = 8  # of so many peers one may be gone, so that promises cost no more than against q colluders


@dataclass(frozen=True)
class Partners:
    """Who shares secrets with whom in a step, as rows of equal length.

    Attributes:
        others: the partners of each peer, int64 [n, most]; what stands in unused places does not matter.
        squares: c_ij² of each, float64 [n, most]; 0 in unused places.
    """

    others: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, n: int, edges: np.ndarray, pair: np.ndarray) -> Partners:
        """Arrange pairs by their ends.

        Args:
            edges: the pairs, int64 [E, 2].
            pair: c_ij of each, float64 [E]; pairs with 0 are left out.
        """
        drawn = pair > 0
        one_way = edges[drawn]
        ends = np.concatenate([one_way, one_way[:, ::-1]])
        squares = np.tile(pair[drawn] ** 2, 2)
        by_peer = np.argsort(ends[:, 0], kind="stable")
        ends = ends[by_peer]

        degrees = np.bincount(ends[:, 0], minlength=n)
        first = np.cumsum(degrees) - degrees
        place = np.arange(len(ends)) - first[ends[:, 0]]
        shape = (n, max(1, int(degrees.max(initial=0))))
        partners = cls(np.zeros(shape, dtype=np.int64), np.zeros(shape))
        partners.others[ends[:, 0], place] = ends[:, 1]
        partners.squares[ends[:, 0], place] = squares[by_peer]
        return partners

    @property
    def degrees(self) -> np.ndarray:
        """Return how many partners each peer has, int64 [n]."""
        return np.asarray(np.count_nonzero(self.squares, axis=1))

    def hidden(self, variances: np.ndarray) -> np.ndarray:
        """Return t_ij of each peer's partners, float64 [n, most], from d of all; 0 in unused places."""
        of_others = variances[self.others]
        # Written so that neither a strength of 1e150 nor one of 1e-150 overflows or is lost.
        larger = np.maximum(self.squares, of_others)
        smaller = np.minimum(self.squares, of_others)
        return np.asarray(smaller / (1 + smaller / np.where(larger > 0, larger, 1.0)))


@dataclass(frozen=True)
class Demands:
    """Which noise each peer is to have left at least, against how many colluders.

    Attributes:
        colluding: the numbers, ascending.
        variances: of each peer for each number, float64 [numbers, n]; those of the first are the largest, V².
    """

    colluding: tuple[int, ...]
    variances: np.ndarray

    @property
    def needed(self) -> np.ndarray:
        """Return V², float64 [n]."""
        return np.asarray(self.variances[0])

    def of_peers(self, peers: np.ndarray) -> Demands:
        """Return those of some peers."""
        return Demands(self.colluding, self.variances[:, peers])

    def lacking(self, hidden: np.ndarray) -> np.ndarray:
        """Return what each peer's own noise has to be, given t_ij of its partners, float64 [n]."""
        lacking: np.ndarray = self.variances[0] - all_but_largest(hidden, self.colluding[0])
        for colluding, variances in zip(self.colluding[1:], self.variances[1:], strict=True):
            lacking = np.maximum(lacking, variances - all_but_largest(hidden, colluding))
        return lacking


def all_but_largest(values: np.ndarray, dropped: int) -> np.ndarray:
    """Return the sum of each row without its largest numbers, float64 [n]."""
    most = values.shape[1]
    if dropped >= most:
        return np.zeros(len(values))
    if dropped == 0:
        return np.asarray(values.sum(axis=1))
    kept = np.partition(values, most - dropped - 1, axis=1)[:, : most - dropped]
    return np.asarray(kept.sum(axis=1))


def topped_up(variances: np.ndarray, demands: Demands, hidden: np.ndarray) -> np.ndarray:
    """Return d with what each peer has to add to it, float64 [n]: (4) of the module.

    Args:
        variances: d that each adds at least, float64 [n].
        demands: what is to be left.
        hidden: t_ij of the partners that each has, float64 [n, most].
    """
    needed = demands.needed
    lacking = demands.lacking(hidden)
    enough = np.minimum(lacking * (1 + MARGIN) + MARGIN * needed, needed)
    return np.where(lacking > variances, np.maximum(enough, variances), variances)


def raised(variances: np.ndarray, demands: Demands, partners: Partners) -> np.ndarray:
    """Return d that is enough if all peers count on each other's: a solution of (4), never above (2), float64 [n].

    Those that lack noise raise what they promise, all by the same share of what they would top up by themselves; the
    others promise nothing. The share is the one with the least noise in the sum.

    Args:
        variances: d as planned, float64 [n].
        demands: what is to be left.
        partners: who is left.
    """
    alone = topped_up(variances, demands, partners.hidden(variances))
    missing = alone - variances
    if not missing.any():
        return alone

    def at(share: float) -> np.ndarray:
        promised = variances + share * missing
        return topped_up(promised, demands, partners.hidden(promised))

    return _least_sum(at, 1.0)


def least_own_noise(needed: np.ndarray, partners: Partners, dropped: int) -> np.ndarray:
    """Return own noise D with which (1) is V² at least, whichever partners are taken away, float64 [n].

    Nobody has more than V. Every machine computes the same, and equal peers have equal noise.

    Args:
        needed: V, float64 [n], positive.
        dropped: how many partners of each peer do not count, q + a.
    """
    squares = needed**2
    degrees = partners.degrees
    if (degrees <= dropped).all():
        return needed

    demands = Demands((dropped,), squares[None])
    equal = _of_equal_peers(squares, partners, dropped)
    if equal is not None:
        return _with_margin(equal, squares)

    # What a peer needs if all partners are alike, and what its partners need of it.
    share = squares / np.maximum(degrees + 1 - dropped, 1)
    of_partners = np.where(partners.squares > 0, share[partners.others], 0.0)
    asked = np.maximum(share, of_partners.max(axis=1))
    proportions = [squares, share, asked, np.full(len(needed), float(squares.max()))]

    is_large = partners.squares.size > LARGEST_TRIMMED
    if is_large:
        proportions = proportions[:1]
    best = _best_scale(proportions[0], demands, partners)
    for shape in proportions[1:]:
        variances = _best_scale(shape, demands, partners)
        if variances.sum() < best.sum() * (1 - NO_BETTER):
            best = variances
    if not is_large:
        best = _trimmed(best, squares, partners, dropped)
    return _with_margin(_spared(best, squares), squares)


def _with_margin(variances: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return D a little larger: one rounding more or less then makes no peer top up what is enough."""
    return np.asarray(np.sqrt(np.minimum(variances + 10 * MARGIN * needed, needed)))


def _of_equal_peers(squares: np.ndarray, partners: Partners, dropped: int) -> np.ndarray | None:
    """Return d of peers that are all alike: the root of d + m c² d / (c² + d) = V²; None if they differ."""
    if np.ptp(squares) > 0 or np.ptp(partners.squares) > 0:
        return None
    need = float(squares[0])
    pair = float(partners.squares[0, 0])
    counted = partners.squares.shape[1] - dropped

    # d² + (c² (m + 1) - V²) d - c² V² = 0, written so that no digits cancel.
    linear = pair * (counted + 1) - need
    root = math.hypot(linear, 2 * math.sqrt(pair) * math.sqrt(need))
    if linear > 0:
        variance = 2 * pair * need / (linear + root)
    else:
        variance = (root - linear) / 2
    return np.full(len(squares), min(need, variance * (1 + MARGIN)))


def _best_scale(shape: np.ndarray, demands: Demands, partners: Partners) -> np.ndarray:
    """Return d of the least sum among s times a shape, topped up."""
    needed = demands.needed

    def at(scale: float) -> np.ndarray:
        planned = np.minimum(scale * shape, needed)
        return topped_up(planned, demands, partners.hidden(planned))

    return _least_sum(at, float((needed / shape).max()))


def _least_sum(at: Callable[[float], np.ndarray], high: float) -> np.ndarray:
    """Return d of the least sum, which is convex in a number from 0 to `high`, by golden sections."""
    low = 0.0
    left = high - GOLDEN * (high - low)
    right = low + GOLDEN * (high - low)
    of_left = float(at(left).sum())
    of_right = float(at(right).sum())
    for _ in range(SECTIONS):
        # If two are as good, the smaller one: by the same margin on every machine.
        if of_left <= of_right * (1 + NO_BETTER):
            high = right
            right = left
            of_right = of_left
            left = high - GOLDEN * (high - low)
            of_left = float(at(left).sum())
        else:
            low = left
            left = right
            of_left = of_right
            right = low + GOLDEN * (high - low)
            of_right = float(at(right).sum())
    return at(high)


def _trimmed(variances: np.ndarray, needed: np.ndarray, partners: Partners, dropped: int) -> np.ndarray:
    """Return d with less of what no peer needs.

    A peer with slack in (1) stays above V² if it and its partners each give up at most an equal part of the slack, for
    t_ij grows no faster than d_j. So all can give up the least of their own and their partners' parts at once.
    """
    members = partners.degrees + 1
    floor = needed / members  # its share of a trusted server's noise, so that something is left if all others collude
    drawn = partners.squares > 0
    target = needed * (1 + MARGIN)
    for _ in range(TRIMS):
        noise = variances + all_but_largest(partners.hidden(variances), dropped)
        part = np.maximum(noise - target, 0.0) / members
        of_partners = np.where(drawn, part[partners.others], np.inf).min(axis=1)
        given_up = np.minimum(np.minimum(part, of_partners), np.maximum(variances - floor, 0.0))
        if given_up.sum() < LAST_TRIM * variances.sum():
            break
        variances = variances - given_up
    return variances


def _spared(variances: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return d with as large a least D_i / V_i as SPARED times the sum allows.

    For the sum hardly matters what the peers add that need little, and to them it matters if all others collude.
    """
    allowed = SPARED * float(variances.sum())
    low = 0.0
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float(np.maximum(variances, middle * needed).sum()) <= allowed:
            low = middle
        else:
            high = middle
    return np.asarray(np.maximum(variances, low * needed))


def with_more_gone(variances: np.ndarray, needed: np.ndarray, partners: Partners, dropped: int) -> np.ndarray:
    """Return d with which (1) would be V² at least if some more were gone than planned: E², float64 [n].

    Args:
        variances: d as planned, float64 [n].
        needed: V, float64 [n].
        dropped: how many partners do not count by the plan, q + a.
    """
    degrees = partners.degrees
    more = max(1, (int(degrees.min()) + 1) // FORESEEN)
    if (degrees <= dropped + more).any():
        return np.asarray(needed**2)
    return np.asarray(np.maximum(variances, np.square(least_own_noise(needed, partners, dropped + more))))


def left_against(
    variances: np.ndarray, promised: np.ndarray, needed: np.ndarray, partners: Partners, colluding: int, counted: int
) -> np.ndarray:
    """Return the variance that is left at each peer against some colluders in any step: (4), float64 [n].

    Args:
        variances: d as planned, float64 [n].
        promised: what peers may promise at no more cost, E², float64 [n]; see `with_more_gone`.
        needed: V², float64 [n].
        colluding: q', against how many it is asked.
        counted: q, against how many a step is topped up.
    """
    if colluding <= counted:
        return needed

    hidden = partners.hidden(promised)
    if np.ptp(hidden) == 0:
        hidden = hidden[:1]  # peers that are all alike: one stands for all
    ranks = all_but_largest(hidden, counted) - all_but_largest(hidden, colluding)
    return np.asarray(np.maximum(variances, needed * (1 - MARGIN) - np.maximum(ranks, 0.0)))
