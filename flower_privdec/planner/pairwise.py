"""What one peer alone sees of another's examples on a graph, and what some colluders leave of noise that cancels.

These figures stand beside the ε that holds against everybody, and replace none of it: they hold against observers who
see less, and those over all rounds under an assumption besides.

One observer. Peer v sees what its neighbours send it and nothing else, and knows its own draws. Models are mixed
linearly, so every message is M z + O s, coordinate by coordinate, with z the normals of all peers and steps but v's,
and s the sums that a peer u adds to its own: u's part of M times its noise multipliers. Let P = M' (M M')^+ M be the
projector on what v sees, restricted to u's steps, of noise σ_k over an example's move. Then v learns no more of s
than from s_k + N(0, f_k² σ_k²) with independent normals, for any f with

    diag(f^-2) >= P,     as f_k^-2 = Σ_l |P_kl|  (rows that dominate)    or    f^-2 = λ_max(P) <= 1.

Proof. With D = diag(f² σ²), D^-1 >= Σ^-1 P Σ^-1 = O' (M M')^+ O for Σ = diag(σ), whence O D O' <= M M' (Schur
complements). So M z + O s has the law of O (s + N(0, D)) + w with w independent and drawn beforehand. Messages of a
round depend on s of earlier steps alone, so s may be chosen step by step, by all that v has seen: these are sampled
Gaussians of noise f_k σ_k, composed as ever. ∎

Over one step the steps of others are the same whatever u's example, given all that was published before: until their
next ones are mixed in, that is a theorem. Over all rounds it takes s of the others as given. They are gradients at
models that hold u's releases, and a gradient can be loud where noise is not, so an ε over all rounds is the paper's
count, not a bound.

Colluders. With secrets of q peers known, noise that cancels leaves peer i the normals of `cancelling`, V_i(q): q of
the plan is what its noise was solved for; fewer leave more, more leave less, and all others leave its own.

Messages of several mixing steps share their normals, so they are counted together: on a chain v - w - u, v computes
what u released from two messages of w, though each of them by itself has the normals of others.

Source: Cyffers et al. 2022 (Muffliato, arXiv:2206.05091) for pairwise network differential privacy; the projector and
its proof are our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import networkx as nx
import numpy as np
import torch
from scipy.optimize import linprog

from flower_privdec.common.catalogue import NoiseKeys
from flower_privdec.core import advance
from flower_privdec.core.cohort import STEPS, Cohort, PrivateStep
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.cancelling import LARGEST_SHAPED, PairPlan, noise_left
from flower_privdec.privacy.mechanism.events import EVERYBODY, Release
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.scenario.sections import CancellingSection

MIXED_LINEARLY = (  # algorithms whose messages are linear in what was released
    *("sgp", "privsgp", "dyn-d2p", "dyn-c-d2p", "dyn-mu-d2p", "const-d2p"),
    *("d-psgd", "dp2-sgd", "dp-dpsgd", "muffliato"),
)
MOST_SOURCES = 1024  # peers times steps: the projectors take its cube for each observer
SEEN = 1e-9  # of a projector, below which nothing is seen
MOST_BY_PARTNERS = 64  # peers: a linear program has as many conditions for each cut
MOST_CUTS = 30  # linear programs in a row
NEARLY = 1e-4  # by how much each must raise the bound
DIGITS = 1e4  # to which noise is rounded down, so that few mechanisms are composed


@dataclass(frozen=True)
class Distance:
    """What one peer sees of the peers at a distance.

    Attributes:
        hops: on the graph of all messages of the run.
        pairs: how many.
        one_step: the largest ε of one step, until the next ones are mixed in.
        all_rounds: the largest ε over all rounds, if others' steps did not depend on the example.
    """

    hops: int
    pairs: int
    one_step: float
    all_rounds: float


def not_computed(experiment: Experiment) -> str | None:
    """Return why one peer's view is not computed; None if it is."""
    scenario = experiment.scenario
    plan = experiment.own.protection
    sources = scenario.n_peers * scenario.rounds
    if plan is None or experiment.mixing is None:
        return "nothing is noised, or nothing exchanged"
    if plan.pairs is not None:
        return "noise depends on other peers' (see the colluders below)"

    noise = None if scenario.private is None else scenario.private.noise
    if noise is not None and not isinstance(noise, CancellingSection):
        called = noise.kind if isinstance(noise, NoiseKeys) else noise.module
        return f"the noise of {called} is not known to be independent from step to step"
    if scenario.algorithm.name not in MIXED_LINEARLY or getattr(scenario.algorithm, "optimizer", None) is not None:
        return f"what {scenario.algorithm.name} sends is not known to be linear in its releases"
    if scenario.participation.says != "all":
        return "not all peers are active in all rounds"
    if sources > MOST_SOURCES:
        return f"{sources:,} releases are more than {MOST_SOURCES:,}: set fewer rounds"

    return None


def views(experiment: Experiment) -> list[Distance]:
    """Return what one peer sees of others by their distance, of an experiment for which `not_computed` is None."""
    plan = experiment.own.protection
    mixing = experiment.mixing
    n = experiment.scenario.n_peers
    assert plan is not None
    assert mixing is not None
    graph = nx.DiGraph(mixing.topology.support().tolist())
    at: dict[int, list[tuple[int, int]]] = {}
    for peer, lengths in nx.all_pairs_shortest_path_length(graph):
        for observer, hops in lengths.items():
            at.setdefault(hops, []).append((observer, peer))
    received = messages(experiment)
    first = [[row for row in rows if not row[:, 1:].any()] for rows in received]  # that hold no later step
    one_step = projectors([[row[:, :1] for row in rows] for rows in first])
    all_rounds = projectors(received)
    assert len(received) == n

    return [
        Distance(hops, len(pairs), _largest(plan, pairs, one_step), _largest(plan, pairs, all_rounds))
        for hops, pairs in sorted(at.items())
        if hops > 0
    ]


Projectors = dict[tuple[int, int], np.ndarray]


def projectors(received: Sequence[Sequence[np.ndarray]]) -> Projectors:
    """Return P of each observer and each other peer, by (observer, peer), float64 [steps, steps].

    Args:
        received: see `messages`; the steps may be cut.
    """
    result: Projectors = {}
    for observer, rows in enumerate(received):
        others = np.delete(np.arange(len(received)), observer)
        seen = np.stack(rows)[:, others] if rows else np.zeros((0, len(others), 1))
        basis = _row_space(seen.reshape(len(seen), -1)).reshape(-1, *seen.shape[1:])
        for place, peer in enumerate(others.tolist()):
            result[observer, peer] = basis[:, place].T @ basis[:, place]
    return result


def _row_space(matrix: np.ndarray) -> np.ndarray:
    """Return orthonormal rows that span those of a matrix."""
    if not matrix.size:
        return np.zeros((0, matrix.shape[1]))
    _, values, rows = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(rows[values > SEEN * max(values[0], 1e-300)])


def messages(experiment: Experiment) -> list[list[np.ndarray]]:
    """Return all that each peer is sent, as the normals that it is made of, each float64 [n_peers, steps].

    The program runs with a parameter for each release, to which that release alone adds its noise's standard deviation.
    """
    n = experiment.scenario.n_peers
    rounds = experiment.scenario.rounds
    mixing = experiment.mixing
    assert mixing is not None
    cohort = replace(experiment, initial=torch.zeros(n * rounds, dtype=torch.float64)).cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    received: list[list[np.ndarray]] = [[] for _ in range(n)]
    with STEPS.open_to(_NoiseAlone(rounds)):
        for _ in range(rounds):
            while (exchange := advance(experiment.algorithm, cohort, engine.state)) is not None:
                for (_, receiver), payload in exchange.outgoing(engine.state, mixing).items():
                    rows = [row.reshape(n, rounds).numpy().copy() for row in payload.values() if row.ndim]
                    received[receiver] += rows
                engine.perform(exchange)

    return received


@dataclass(frozen=True)
class _NoiseAlone:
    """Adds to each sum its noise's standard deviation, at the parameter that stands for the release."""

    rounds: int

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        """See StepObserver."""
        columns = torch.from_numpy(step.peers * self.rounds + step.step)
        for name, noise_std in step.noise_std.items():
            step.sums[name][torch.arange(len(columns)), columns] += noise_std


def _largest(plan: Protection, pairs: Sequence[tuple[int, int]], seen: Projectors) -> float:
    """Return an ε of every one of some peers towards its observer, the smaller of both bounds."""
    parts = [seen[pair] for pair in pairs]
    sums = np.max([np.abs(part).sum(axis=1) for part in parts], axis=0)
    norm = min(1.0, max(float(np.linalg.eigvalsh(part)[-1]) for part in parts))
    accounts = [plan.accounts[peer] for _, peer in pairs]
    different = {(account.spends, account.delta): account for account in accounts}.values()
    return min(max(_cost(account, squares) for account in different) for squares in (sums, np.full(len(sums), norm)))


def _cost(account: Account, squares: np.ndarray) -> float:
    """Return the ε of the first steps of an account under f^-2."""
    with np.errstate(divide="ignore"):
        factors = np.where(squares > SEEN, squares, 0.0) ** -0.5
    return epsilon(with_noise_times(account, factors), account.delta)


def with_noise_times(account: Account, factors: np.ndarray) -> list[Release]:
    """Return the releases of the first steps of an account with other noise than against all other peers together.

    Args:
        factors: by how much each step's noise is larger; infinity for a step of which nothing is seen.
    """
    releases = []
    for spend in account.spends:
        part = factors[spend.from_step : spend.to_step]
        if not len(part):
            continue
        whole = [part.min()] if spend.whole else part
        for factor, count in zip(
            *np.unique(np.floor(DIGITS * np.asarray(whole)) / DIGITS, return_counts=True), strict=True
        ):
            if math.isfinite(factor):
                seen = spend.release.towards(EVERYBODY)
                noise = seen.noise_multiplier * float(factor)
                releases.append(replace(seen, noise_multiplier=noise, steps=int(count)))
    return releases


def least_own_noise(plan: PairPlan, step: int) -> float | None:
    """Return a lower bound on the own noise in the sum, sqrt(Σ D²), with the pairs of a step; None for too many sets.

    The noise left at peer i, min_{x: x_i = 1} x' Σ_H x, has to be V_i² at least. So every x gives a linear condition on
    D², and the least sum under some of these conditions is a bound, by whatever method D is solved for. If noise is
    counted by partners, what is left is concave in D², and its tangents are the conditions.
    """
    if plan.by_partners:
        return _least_by_partners(plan, step)

    needed = plan.needed[step]
    active = np.flatnonzero(needed > 0)
    honest = max(1, len(active) - plan.colluding)
    if not len(active) or math.comb(len(active), honest) * honest**3 > LARGEST_SHAPED:
        return None

    unit = float(needed.max())
    upper = np.square(needed[active] / unit)
    own = plan.own[step, active] * needed[active]
    pair = plan.planned_pairs(step) / unit
    squares = np.zeros((len(needed), len(needed)))
    for (one, other), std in zip(plan.edges.tolist(), pair.tolist(), strict=True):
        squares[one, other] = squares[other, one] = std**2
    squares = squares[np.ix_(active, active)]
    sets = np.array(list(combinations(range(len(active)), honest)))

    slopes = list[np.ndarray]()
    values = list[float]()
    variances = np.square(own / unit)
    bound = 0.0
    for _ in range(MOST_CUTS):
        inverse, left = noise_left(np.maximum(variances, SEEN * upper), squares, sets)
        for peer in range(len(active)):
            its_own = np.where(sets == peer, left, np.inf)
            one, row = np.unravel_index(int(its_own.argmin()), left.shape)
            x = np.zeros(len(active))
            x[sets[one]] = inverse[one, row] * left[one, row]
            part = squares[np.ix_(sets[one], sets[one])]
            between = x[sets[one]] @ (np.diag(part.sum(axis=1)) - part) @ x[sets[one]]
            slopes.append(np.square(x))
            values.append(float(upper[peer] - between))
        solved = linprog(np.ones(len(active)), A_ub=-np.array(slopes), b_ub=-np.array(values))
        if not solved.success or solved.fun < bound * (1 + NEARLY):
            break
        variances = solved.x
        bound = float(solved.fun)
    return unit * math.sqrt(bound)


def _least_by_partners(plan: PairPlan, step: int) -> float | None:
    """Return the bound of `least_own_noise` with each peer's own partners; None for too many peers."""
    needed = plan.needed[step]
    active = np.flatnonzero(needed > 0)
    count = len(active)
    if not count or count > MOST_BY_PARTNERS:
        return None

    # c_ij² of all active peers, in units of the largest V.
    unit = float(needed.max())
    upper = np.square(needed[active] / unit)
    squares = np.zeros((len(needed), len(needed)))
    pair = plan.planned_pairs(step) / unit
    squares[plan.edges[:, 0], plan.edges[:, 1]] = pair**2
    squares[plan.edges[:, 1], plan.edges[:, 0]] = pair**2
    squares = squares[np.ix_(active, active)]
    kept = max(0, count - 1 - plan.colluding - plan.absent)

    slopes = list[np.ndarray]()
    values = list[float]()
    variances = np.square(plan.own[step, active] * needed[active] / unit)
    bound = 0.0
    for _ in range(MOST_CUTS):
        least = np.maximum(variances, SEEN * upper)
        sums = squares + least
        hidden = squares * least / sums
        np.fill_diagonal(hidden, np.inf)  # nobody is a partner of its own
        for peer in range(count):
            # The tangent of d_i + Σ t_ij over the partners that count, at the last d.
            partners = np.argsort(hidden[peer], kind="stable")[:kept]
            slope = np.zeros(count)
            slope[peer] = 1.0
            slope[partners] = np.square(squares[peer, partners] / sums[peer, partners])
            at_last = least[peer] + hidden[peer, partners].sum()
            slopes.append(slope)
            values.append(float(upper[peer] - at_last + slope @ least))
        solved = linprog(
            np.ones(count),
            A_ub=-np.array(slopes),
            b_ub=-np.array(values),
            bounds=[(0, largest) for largest in upper * (1 + NEARLY)],
        )
        if not solved.success or solved.fun < bound * (1 + NEARLY):
            break
        variances = solved.x
        bound = float(solved.fun)
    return unit * math.sqrt(bound)


def by_colluders(experiment: Experiment) -> list[tuple[int, float]]:
    """Return the largest ε of a peer for each number of colluders, of those whose sets can be tried.

    Each is a bound, and so is the plan's ε against as many colluders as it names or fewer: the smaller one counts.
    """
    plan = experiment.own.protection
    assert plan is not None
    assert plan.pairs is not None
    planned = max(plan.epsilons(experiment.scenario.rounds))

    rows = []
    for colluding in range(experiment.scenario.n_peers):
        left = plan.pairs.left(colluding)
        if left is None:
            continue

        # Against all others the own noise is left, over which an account's factors are.
        costs = {
            (account.spends, account.delta, factors.tobytes()): (account, factors)
            for account, factors in zip(plan.accounts, np.maximum(left / plan.pairs.own, 1.0).T, strict=True)
        }
        largest = max(epsilon(with_noise_times(*pair), pair[0].delta) for pair in costs.values())

        # Factors are rounded down to few digits, which may lift this above the ε that the noise was solved for.
        if colluding <= plan.pairs.colluding:
            largest = min(largest, planned)
        rows.append((colluding, largest))
    return rows
