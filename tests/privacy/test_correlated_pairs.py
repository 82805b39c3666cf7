"""Noise that cancels between peers and is correlated over steps: against the covariance of all that is released."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from tiny_scenario import Build, Tiny
from torch import Tensor
from worker_runs import whole

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run
from flower_privdec.experiment import Experiment
from flower_privdec.planner.bands import band_facts
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.correlation import Correlation, least_ahead
from flower_privdec.privacy.mechanism.declared import Drawing, ReleasedSum
from flower_privdec.privacy.mechanism.events import EVERYBODY
from flower_privdec.privacy.mechanism.peer_mechanism import Mechanism
from flower_privdec.privacy.noise import NoisedSum, PairSecrets, deployed
from flower_privdec.privacy.noise.kinds import pair_noise
from flower_privdec.privacy.noise.kinds.correlated_noise import CorrelatedNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.testing import assert_noise, assert_nothing_else_leaves

COLUMNS = 640  # of all draws of a case
PAIRS = "privacy.noise={kind: cancelling, colluding: 1, bands: 3}"


class Columns:
    """Draws of noise as unit vectors: what is made of them is then a row of the linear map from draws to releases."""

    def __init__(self) -> None:
        self.of_draw: dict[Any, int] = {}
        self.node = 0  # which process draws

    def number(self, *draw: Any) -> int:
        return self.of_draw.setdefault(draw, len(self.of_draw))

    def add_(
        self, out: Tensor, std: Tensor, step: int, peers: np.ndarray, purpose: str = "", receivers: Any = None
    ) -> None:
        for row, peer in enumerate(peers.tolist()):
            out[row, self.number("own", peer, self.node, step)] += std[row]

    def add_shared_(
        self, out: Tensor, ends: np.ndarray, scales: np.ndarray, step: int, pairs: np.ndarray, purpose: str
    ) -> None:
        for pair, rows, factors in zip(pairs.tolist(), ends.tolist(), scales.tolist(), strict=True):
            for row, factor in zip(rows, factors, strict=True):
                if row >= 0:
                    out[row, self.number("pair", pair, step)] += factor

    def shared(self, key: str, normals: object) -> Shared:
        return Shared(self, key)

    def unknown_to(self, colluders: tuple[int, ...]) -> np.ndarray:
        """Return which draws some peers do not have, bool [COLUMNS]."""
        unknown = np.zeros(COLUMNS, dtype=bool)
        for draw, column in self.of_draw.items():
            peers = {draw[1]}
            if draw[0] == "pair":
                _, ends, *_ = literal_eval(draw[1])
                peers = {peer for peer, _ in literal_eval(ends)}
            unknown[column] = not peers & set(colluders)
        return unknown


@dataclass
class Shared:
    columns: Columns
    key: str

    def add_(self, out: Tensor, std: Tensor, step: int, peers: np.ndarray, purpose: str) -> None:
        out[0, self.columns.number("pair", self.key)] += std[0]


@dataclass
class Process:
    """One process of a peer: the steps that it takes, and with which process of each partner it draws in each.

    `promises` are what each process of the run has promised for each step, and `unheard` of which processes this one
    does not know it.
    """

    peer: int
    number: int
    steps: list[int]
    partners: dict[int, dict[int, int]] = field(default_factory=dict)
    promises: dict[tuple[int, int, int], float] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)

    simulated = False
    step = 0

    def knows(self, peer: int, other: int) -> bool:
        return self._other(peer, other) in self.partners[self.step]

    def promised(self, peer: int, step: int) -> float:
        number = self.number
        if peer != self.peer:
            number = self.partners[step][peer]
        if peer in self.unheard:
            return 0.0
        return self.promises.get((peer, number, step), 0.0)

    def of(self, peer: int, other: int) -> str:
        theirs = self._other(peer, other)
        return repr(sorted([(self.peer, self.number), (theirs, self.partners[self.step][theirs])]))

    def _other(self, peer: int, other: int) -> int:
        return other if peer == self.peer else peer


@dataclass
class Case:
    plan: PairPlan
    correlation: Correlation
    sensitivity: np.ndarray  # of each peer's rows in each step, [steps, n]
    processes: list[Process]


def case_of(seed: int) -> Case:
    """Return peers that restart, rest, come back, and have any partners in any step, whether or not these know them."""
    draws = np.random.default_rng(seed)
    n = int(draws.integers(2, 6))
    steps = int(draws.integers(1, 7))

    needed = draws.choice([0.5, 1.0, 3.0], steps)[:, None] * draws.choice([0.3, 1.0, 4.0], n)
    if draws.random() < 0.3:
        needed *= draws.choice([0.2, 1.0, 5.0], (steps, n))  # in general they change by different factors
    edges = np.stack(np.triu_indices(n, 1), axis=1)
    edges = edges[draws.random(len(edges)) < 0.8]
    plan = PairPlan(
        edges=edges,
        colluding=int(draws.integers(0, n)),
        strength=float(draws.choice([0.1, 1.0, 2.0, 20.0])),
        needed=needed,
        weights=draws.choice([1.0, 2.0], n),
        same_rates=True,
        by_partners="a test",
        absent=int(draws.integers(0, 3)),
    )

    processes = []
    lack = draws.choice([0.0, 0.1, 0.5])
    for peer in range(n):
        others = [other for ends in edges.tolist() if peer in ends for other in set(ends) - {peer}]
        count = 1 + int(draws.random() < lack)
        for number in range(count):
            first = 0 if number == 0 else int(draws.integers(0, steps))
            taken = [step for step in range(first, steps) if draws.random() >= lack]
            partners = {
                step: {other: int(draws.random() < lack) for other in others if draws.random() >= lack}
                for step in taken
            }
            processes.append(Process(peer, number, taken, partners))

    # What each promises, and who has not heard of it: mostly of those that are gone, of some steps, or of nobody.
    promises = {}
    if draws.random() < 0.7:
        for peer in range(n):
            for number in range(2):
                promises |= {(peer, number, step): float(draws.choice([0.0, 0.3, 0.6, 1.0])) for step in range(steps)}
    for process in processes:
        process.promises = promises
        process.unheard = {other for other in range(n) if other != process.peer and draws.random() < 0.3}
    sensitivity = plan.needed / plan.weights / draws.choice([0.7, 1.0, 2.0], steps)[:, None]
    coefficients = np.sort(draws.uniform(0.05, 1.0, int(draws.integers(0, 4))))[::-1]
    return Case(plan, Correlation((1.0, *coefficients.tolist())), sensitivity, processes)


def released(case: Case) -> tuple[list[tuple[Process, int]], np.ndarray, Columns]:
    """Return all releases, and their noise by all draws, [releases, draws], as the deployed mechanism adds it."""
    columns = Columns()
    nodes = []
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployed, "SharedNoise", columns.shared)
        patch.setattr(pair_noise, "digest", lambda size, *parts: repr(parts))
        for process in case.processes:
            columns.node = process.number
            mechanism = CorrelatedNoise(case.correlation, CancellingNoise(case.plan), draws_anew=True)
            for step in process.steps:
                process.step = step
                peers = np.array([process.peer])
                std = case.plan.own[step, peers] * case.plan.needed[step, peers] / case.plan.weights[peers]
                out = torch.zeros(1, COLUMNS, dtype=torch.float64)
                mechanism.add_(out, torch.from_numpy(std), noised(columns, process, step, peers, {}))
                nodes.append((process, step))
                rows.append(out[0].numpy())
    return nodes, np.array(rows), columns


class Everybody:
    chances = np.ones(1)

    def active(self, round_index: int) -> np.ndarray:
        return np.ones(8, dtype=bool)


def noised(columns: Columns, secrets: Any, step: int, peers: np.ndarray, state: dict[str, Tensor]) -> NoisedSum:
    return NoisedSum(
        normals=columns,
        secrets=secrets,
        name="gradient",
        step=step,
        round_index=step,
        peers=peers,
        rows=np.arange(len(peers)),
        receivers=None,
        scale=torch.ones(len(peers)),
        clip_norm=None,
        participation=Everybody(),  # type: ignore[arg-type]
        state=state,
    )


@pytest.mark.parametrize("part", range(4))
def test_no_pattern_of_draws_costs_more_than_is_charged(part: int) -> None:
    """One example's draws, at most one in each turn of groups of a process, against all rows that honest peers release.

    Whitened by the covariance of all these rows, whoever else is there, gone, or drawn with: the colluders' own rows
    and draws are known.
    """
    closest = 0.0
    for seed in range(30 * part, 30 * part + 30):
        case = case_of(seed)
        nodes, rows, columns = released(case)
        n = case.plan.needed.shape[1]
        for colluding in range(n):
            left = case.plan.left(colluding)
            assert left is not None
            for colluders in combinations(range(n), colluding):
                of_honest = np.array([process.peer not in colluders for process, _ in nodes], dtype=bool)
                if of_honest.any():
                    honest = [node for node, is_honest in zip(nodes, of_honest, strict=True) if is_honest]
                    seen = rows[of_honest][:, columns.unknown_to(colluders)]
                    closest = max(closest, dearest(case, honest, seen, left, seed))
    assert 0.9 < closest <= 1 + 1e-6


def dearest(case: Case, honest: list[tuple[Process, int]], seen: np.ndarray, left: np.ndarray, seed: int) -> float:
    """Return the largest cost of a pattern of draws over what is charged for it.

    Args:
        seen: the noise of all rows of honest peers, by the draws that are not known.
        left: what is left of each peer's noise against so many colluders.
    """
    draws = np.random.default_rng(seed)
    bands = case.correlation.bands
    scale = np.abs(seen).max(axis=1)
    scaled = seen / scale[:, None]
    inverse = np.linalg.inv(scaled @ scaled.T)

    largest = 0.0
    for peer in {process.peer for process, _ in honest}:
        charged = spends_of(case, peer, left[:, peer])
        for group in range(bands):
            places = [
                place for place, (process, step) in enumerate(honest) if process.peer == peer and step % bands == group
            ]
            if not places:
                continue

            # Each of its draws alone, and some of them together.
            patterns = [*np.eye(len(places)), *draws.choice([-1.0, 0.0, 1.0], (3, len(places)))]
            for pattern in patterns:
                moved = np.zeros(len(honest))
                paid = 0.0
                for place, sign in zip(places, pattern, strict=True):
                    step = honest[place][1]
                    moved[place] = sign * case.sensitivity[step, peer] / scale[place]
                    paid += abs(sign) * charged[step // bands]
                if paid:
                    largest = max(largest, float(moved @ inverse @ moved) / paid)
    return largest


def spends_of(case: Case, peer: int, left: np.ndarray) -> list[float]:
    """Return 1 / σ² of what each block of a peer is charged against some colluders, as a budget's plan makes it."""
    bands = case.correlation.bands
    n_steps = len(left)
    drawing = Drawing("poisson", 0.5, 40, 10.0, groups=bands)
    multiplier = case.plan.needed[:, peer] / case.plan.weights[peer] / case.sensitivity[:, peer]
    declared = CorrelatedNoise(case.correlation).released((ReleasedSum(),))
    mechanism = Mechanism(drawing, (declared,), np.zeros(n_steps, dtype=np.int64), multiplier)
    spends = mechanism.spends(np.ones(n_steps, dtype=bool), 1.0, least_ahead(left, bands))
    charged = []
    for spend in spends:
        charged += [spend.release.noise_multiplier**-2] * max(1, (spend.to_step - spend.from_step) // bands)
    return charged


def test_rows_of_the_next_block_count_too() -> None:
    """An example of the last step of a block also moves the next one, in which colluders leave less of its noise."""
    needed = np.array([[1.0, 0.01], [1.0, 0.01], [1.0, 1.0], [1.0, 1.0]])
    plan = PairPlan(np.array([[0, 1]]), 0, 20.0, needed, np.ones(2), True, by_partners="a test")
    left = plan.left(1)
    assert left is not None
    assert left[1, 0] > 0.99
    assert left[2, 0] < 0.8

    partners = {step: {1: 0} for step in range(4)}
    case = Case(plan, Correlation((1.0, 1.0)), needed, [Process(0, 0, [0, 1, 2, 3], partners)])
    nodes, rows, columns = released(case)
    largest = dearest(case, nodes, rows[:, columns.unknown_to((1,))], left, 0)
    assert 0.7 < largest <= 1 + 1e-6


def everybodys_rows(case: Case, weights: np.ndarray) -> tuple[np.ndarray, Columns]:
    """Return all releases of peers that take all steps, as a simulation adds them, [steps, n, draws]."""
    columns = Columns()
    pairs = CancellingNoise(case.plan)
    pairs.draws_apart = True
    pairs._pair_source = columns  # type: ignore[assignment]
    mechanism = CorrelatedNoise(case.correlation, pairs)
    n_steps, n = case.plan.needed.shape
    state = {name: torch.zeros(n, COLUMNS, dtype=torch.float64) for name in mechanism.state}
    peers = np.arange(n)
    rows = np.zeros((n_steps, n, COLUMNS))
    for step in range(n_steps):
        out = torch.zeros(n, COLUMNS, dtype=torch.float64)
        std = torch.from_numpy(case.plan.own[step] * case.plan.needed[step] / weights)
        secrets = PairSecrets(dict.fromkeys(peers.tolist(), bytes(32)))
        mechanism.add_(out, std, noised(columns, secrets, step, peers, state))
        rows[step] = out.numpy()
    return rows, columns


def steady(by_partners: str, n: int = 5, steps: int = 7, strength: float = 2.0) -> Case:
    """Return a case of peers that are all there, of different needs and weights, at a rate that falls."""
    rates = np.linspace(1.0, 0.3, steps)
    edges = np.stack(np.triu_indices(n, 1), axis=1)
    weights = np.linspace(1.0, 2.0, n)
    needed = rates[:, None] * np.linspace(1.0, 3.0, n)
    plan = PairPlan(edges, 1, strength, needed, weights, True, by_partners=by_partners)
    return Case(plan, Correlation((1.0, 0.7, 0.5)), needed / weights, [])


@pytest.mark.parametrize("by_partners", ["", "a test"])
def test_nothing_that_is_shared_stays_in_the_sum(by_partners: str) -> None:
    case = steady(by_partners)
    rows, columns = everybodys_rows(case, case.plan.weights)
    conserved = np.einsum("spd,p->sd", rows, case.plan.weights)
    shared = [column for draw, column in columns.of_draw.items() if draw[0] == "pair"]
    assert len(shared) == 7 * 10
    assert np.abs(rows[..., shared]).max() > 0.1
    np.testing.assert_allclose(conserved[:, shared], 0.0, atol=1e-12)

    # What stays is the peers' own noise, correlated as it would be without pairs.
    own = np.einsum("sd,td->st", conserved, conserved)
    inverse = np.linalg.inv(np.eye(7) + 0.7 * np.eye(7, k=-1) + 0.5 * np.eye(7, k=-2))
    rates = case.plan.needed[:, 0]
    expected = np.outer(rates, rates) * (inverse @ inverse.T) * np.square(case.plan.own * case.plan.needed)[0].sum()
    np.testing.assert_allclose(own, expected / rates[0] ** 2, rtol=1e-9)


def test_the_covariance_counts_if_all_take_every_step() -> None:
    """Against any peer that colludes, over all steps together, exactly what one step is planned with."""
    case = steady("")
    rows, columns = everybodys_rows(case, case.plan.weights)
    left = case.plan.left(1)
    assert left is not None
    closest = 0.0
    for colluder in range(5):
        unknown = np.array(
            [
                draw[1] != colluder if draw[0] == "own" else colluder not in case.plan.edges[draw[1]]
                for draw in columns.of_draw
            ]
        )
        honest = [peer for peer in range(5) if peer != colluder]
        seen = rows[:, honest][..., : len(unknown)][..., unknown].reshape(7 * 4, -1)
        nodes = [(Process(peer, 0, []), step) for step in range(7) for peer in honest]
        closest = max(closest, dearest(case, nodes, seen, left, colluder))
    assert 0.999 < closest <= 1 + 1e-9


@pytest.mark.parametrize("restarts", [False, True])
def test_a_gone_partner_leaves_what_is_taken_back(restarts: bool) -> None:
    """The theory's figure: of each draw of a pair the part that is taken back after one of the two has stopped."""
    steps, stop = 12, 5
    edges = np.array([[0, 1]])
    plan = PairPlan(edges, 0, 2.0, np.ones((steps, 2)), np.ones(2), True, by_partners="a test")
    correlation = Correlation((1.0, 0.6, 0.3))
    processes = [
        Process(0, 0, list(range(steps)), {step: {1: 0} if step < stop else {} for step in range(steps)}),
        Process(1, 0, list(range(stop)), {step: {0: 0} for step in range(stop)}),
    ]
    if restarts:
        processes.append(Process(1, 1, list(range(stop, steps)), {step: {} for step in range(stop, steps)}))
    _, rows, columns = released(Case(plan, correlation, np.ones((steps, 2)), processes))
    shared = [column for draw, column in columns.of_draw.items() if draw[0] == "pair"]
    in_sum = float(np.square(rows.sum(axis=0)[shared]).sum()) / plan.planned_pairs(0)[0] ** 2
    response = correlation.response[:steps]
    expected = sum(response[stop - step : steps - step].sum() ** 2 for step in range(stop))
    assert in_sum == pytest.approx(expected)
    assert in_sum < 1


# --- in runs


def test_whole_and_resumed_runs_have_the_same_bits(build: Build, tmp_path: Path) -> None:
    experiment = build(PAIRS)
    rows, _ = whole(experiment, tmp_path / "one", 1)
    shared, _ = whole(experiment, tmp_path / "two", 2)
    assert all(torch.equal(shared[name], part) for name, part in rows.items())

    under_way = Run(experiment, tmp_path / "again")
    under_way.advance()
    under_way.close()
    resumed = Run(experiment, tmp_path / "again", resume=True)
    while resumed.round_index < experiment.scenario.rounds:
        resumed.advance()
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(experiment.scenario.rounds)
    assert all(torch.equal(resumed.engine.state.rows[name], part) for name, part in engine.state.rows.items())
    resumed.finish()
    resumed.close()


def test_peers_keep_their_budgets_and_release_nothing_else(build: Build) -> None:
    experiment = build(PAIRS, "rounds=9")
    protection = experiment.own.protection
    assert protection is not None
    for value, alone in zip(protection.epsilons(9), protection.epsilons(9, EVERYBODY), strict=True):
        assert 0.99 * 3.0 <= value <= 3.0
        assert alone > value
    assert_noise(experiment, 6)
    assert_nothing_else_leaves(build(PAIRS))


def test_one_band_changes_nothing(build: Build) -> None:
    one = build("privacy.noise={kind: cancelling, colluding: 1, bands: 1}")
    plain = build("privacy.noise={kind: cancelling, colluding: 1}")
    assert one.own.protection is not None
    assert plain.own.protection is not None
    assert one.own.protection.accounts == plain.own.protection.accounts
    assert isinstance(one.cohort().mechanism, CancellingNoise)


def test_auto_takes_fewer_bands_if_little_is_mixed(build: Build) -> None:
    """What peers share is in their models until it is mixed, and steps that are noisier make it larger."""
    taken = []
    for exchanges in (1, 3):
        facts = band_facts(
            build(
                "privacy={epsilon: 12.0, delta: 1.0e-3, noise: {kind: cancelling, colluding: 0, bands: auto}}",
                "n_peers=8",
                "data.samples=800",
                "rounds=60",
                "topology={name: directed-exponential}",
                f"topology.mixing_steps={exchanges}",
            )
        )
        assert facts is not None
        assert facts["bands"] == facts["best_bands"]
        assert facts["in_models"] == pytest.approx(min(one["in_models"] for one in facts["choices"]), rel=0.03)
        taken.append(facts["bands"])
    assert 1 <= taken[0] < taken[1]


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ((PAIRS, "participation={kind: uniform, fraction: 0.5}"), "noise.bands-participation", "kind=uniform"),
        ((PAIRS, "data.batch.sampling=shuffle"), "noise.correlated-sampling", "not shuffle"),
        (("privacy.noise={kind: cancelling, colluding: 1, bands: 6}",), "noise.bands", "at most 5"),
    ],
)
def test_what_has_no_proof_is_refused(tiny: Tiny, settings: tuple[str, ...], code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names):
        Experiment.build(tiny(*settings))
