"""What a step with memory gives away: exact simulation of small mechanisms, the code's own steps, and the plan."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from delta_of_releases import delta
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
from hosting import hosting
from raising import raises

from flower_privdec.algorithms import ALGORITHMS, build_algorithm
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.gradients import StackedKernel
from flower_privdec.privacy.accountant import calibration, loss_distributions
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism.declared import Drawing
from flower_privdec.privacy.mechanism.events import Release, canonical, event
from flower_privdec.privacy.mechanism.peer_mechanism import Mechanism, Schedule, build_mechanism

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0)
FINENESS = {1: 200, 2: 40, 3: 6}  # grid points in a standard deviation, by the number of rounds


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_solved", {})


def vr(**options):
    return build_algorithm(ALGORITHMS.section("privsgp-vr", learning_rate=0.1, **options))


def table_sensitivities(q: float) -> tuple[float, float]:
    """What the algorithm declares: how far an example moves a step, (not drawn, drawn), in clip norms."""
    (declared,) = vr().released(0, Drawing("poisson", q, 100, 100 * q))
    return declared.idle, declared.drawn


# --- exact simulation: K noised sums over J examples, every hidden draw enumerated, example 0 there or zeroed ---

Draws = list[tuple[float, tuple[int, ...]]]  # a round's batches and their chances
Play = Callable[[int, list, list[np.ndarray]], list]  # (round, table, published sums) -> everybody's gradient now
Sum = Callable[[int, tuple[int, ...], list, list, list[float]], object]  # (round, batch, gradients, table, kept)


def poisson_draws(size: int, q: float) -> Draws:
    subsets = itertools.chain.from_iterable(itertools.combinations(range(size), b) for b in range(size + 1))
    return [(q ** len(batch) * (1 - q) ** (size - len(batch)), batch) for batch in subsets]


def equal_draws(batches: Sequence[tuple[int, ...]]) -> Draws:
    return [(1 / len(batches), batch) for batch in batches]


def with_table(q: float) -> Sum:
    """b times eq. 6: the batch's g - table, and q times the sum of the table."""

    def total(k, batch, g, table, kept):
        return sum(kept[j] * (g[j] - table[j]) for j in batch) + q * sum(map(np.multiply, kept, table))

    return total


def with_snapshot(k, batch, g, table, kept):
    """The full gradient in round 0, whose batch is everybody, and then the batch's g - snapshot."""
    return sum(kept[j] * (g[j] - (table[j] if k else 0.0)) for j in batch)


def published(
    draws: Sequence[Draws], total: Sum, play: Play, start: list, sigmas: Sequence[float], remember: float = math.inf
):
    """Return the joint distribution of all rounds' noised sums on a grid, with example 0 and with it zeroed.

    The play may be adaptive: it sees what was published, and even the (hidden) table. The table keeps the
    gradients of a round's batch, in the first `remember` rounds.
    """
    reach, per = max(3.0, float(len(start) + 1)), FINENESS[len(sigmas)]
    grids = [np.arange(-reach - 6.5 * s, reach + 6.5 * s, s / per) for s in sigmas]
    axes = [grid.reshape([-1 if a == k else 1 for a in range(len(sigmas))]) for k, grid in enumerate(grids)]
    worlds = []
    for zeroed in (1.0, 0.0):
        kept, density = [zeroed] + [1.0] * (len(start) - 1), 0.0
        for path in itertools.product(*draws):
            table, one = list(start), np.float64(math.prod(chance for chance, _ in path))
            for k, (_, batch) in enumerate(path):
                g = play(k, table, axes[:k])
                z = (axes[k] - total(k, batch, g, table, kept)) / sigmas[k]
                one = one * np.exp(-z * z / 2) / (per * math.sqrt(2 * math.pi))
                if k < remember:
                    table = [g[j] if j in batch else table[j] for j in range(len(table))]
            density = density + one
        worlds.append(density)
    return worlds


def exact_delta(worlds, eps: float) -> float:
    """Return the larger hockey-stick divergence of the two worlds."""
    p, o = worlds
    return max(float(np.maximum(a - math.exp(eps) * b, 0).sum()) for a, b in ((p, o), (o, p)))


def assert_bounded(worlds, releases: list[Release], slack: float = 1e-6) -> None:
    """Check the accountant's curve against the exact one: at an exact δ, less the slack, its ε is above the exact ε."""
    for eps in EPSILONS:
        least = (exact_delta(worlds, eps) - slack) / (1 + 1e-4)
        assert least <= 0 or epsilon(releases, least) > eps * (1 - 1e-9), eps


def nearness(worlds, releases: list[Release]) -> float:
    """Return how near the exact δ comes to the accountant's."""
    pairs = [(exact_delta(worlds, eps), delta(releases, eps)) for eps in EPSILONS]
    return max(exact / bound for exact, bound in pairs if bound > 1e-9)


def table_release(sampling: str, q: float, size: int, batch: int, noise: float, steps: int = 1) -> Release:
    """A step with a table of noise std `noise`, in clip norms."""
    idle, drawn = table_sensitivities(q)
    return Release(sampling, q, size, batch, noise / drawn, steps, idle / drawn)


def sign(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1.0, -1.0)


PLAYS: dict[str, tuple[Play, float]] = {  # gradients of example 0, all of norm C = 1, and its first table entry
    "against its table": (lambda k, table, seen: [-table[0]], -1.0),
    "alternating": (lambda k, table, seen: [(-1.0) ** k], -1.0),
    "turned around once": (lambda k, table, seen: [1.0], -1.0),
    "constant": (lambda k, table, seen: [1.0], 1.0),
    "adaptive": (lambda k, table, seen: [-sign(seen[-1]) if seen else 1.0], -1.0),
}
NINE = [
    (0.01, 0.7, "against its table"),
    (0.01, 4.0, "constant"),
    (0.1, 0.7, "adaptive"),
    (0.1, 1.5, "against its table"),
    (0.1, 4.0, "turned around once"),
    (0.3, 1.0, "alternating"),
    (0.5, 0.7, "against its table"),
    (0.5, 1.5, "adaptive"),
    (0.5, 4.0, "constant"),
]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("q", "noise", "pattern"), NINE)
def test_no_play_against_a_table_beats_the_mixture_event(q, noise, pattern, rounds):
    play, start = PLAYS[pattern]
    worlds = published([poisson_draws(1, q)] * rounds, with_table(q), play, [start], [noise] * rounds)
    assert sum(map(np.sum, worlds)) == pytest.approx(2, abs=1e-6)
    assert_bounded(worlds, [table_release("poisson", q, 1000, round(1000 * q), noise, rounds)])


def test_the_mixture_is_nearly_attained_unlike_plain_amplification():
    play, start = PLAYS["against its table"]
    worlds = published([poisson_draws(1, 0.01)], with_table(0.01), play, [start], [0.7])
    assert 0.98 < nearness(worlds, [table_release("poisson", 0.01, 100, 1, 0.7)]) <= 1.0001
    plain = Release("poisson", 0.01, 100, 1, 0.7)  # what amplification by 1/J would promise: refuted
    assert exact_delta(worlds, 1.0) > 20 * delta([plain], 1.0)


OTHERS: list[tuple[Play, list]] = [  # with other examples, whose draws are hidden as well
    (lambda k, table, seen: [-table[0], *(table[0] for _ in table[1:])], [-1.0, 1.0, 1.0, 1.0]),
    (lambda k, table, seen: [1.0, *(sign(seen[-1]) if seen else 1.0 for _ in table[1:])], [1.0, -1.0, -1.0, -1.0]),
]


@pytest.mark.parametrize(("play", "start"), OTHERS)
@pytest.mark.parametrize(("size", "batch", "noise"), [(2, 1, 0.8), (3, 1, 2.0), (3, 2, 1.0)])
def test_at_rate_b_over_j_the_mixture_is_attained(size, batch, noise, play, start):
    q = batch / size
    worlds = published([poisson_draws(size, q)] * 2, with_table(q), play, start[:size], [noise] * 2)
    assert_bounded(worlds, [table_release("poisson", q, size, batch, noise, 2)])


@pytest.mark.parametrize(("play", "start"), OTHERS)
@pytest.mark.parametrize(("size", "batch", "noise"), [(2, 1, 0.8), (3, 1, 2.0), (3, 2, 1.0)])
def test_batches_without_replacement_respect_the_bound(size, batch, noise, play, start):
    q, draws = batch / size, equal_draws(list(itertools.combinations(range(size), batch)))
    worlds = published([draws] * 2, with_table(q), play, start[:size], [noise] * 2)
    assert_bounded(worlds, [table_release("uniform", q, size, batch, noise, 2)])


@pytest.mark.parametrize(("play", "start"), OTHERS)
@pytest.mark.parametrize(("noise", "rounds"), [(0.8, 2), (2.0, 3)])
def test_fixed_blocks_respect_the_bound(noise, rounds, play, start):
    draws = equal_draws([(0, 1), (2, 3)])
    worlds = published([draws] * rounds, with_table(0.5), play, start, [noise] * rounds)
    releases = [table_release("blocks", 0.5, 4, 2, noise, rounds)]
    assert_bounded(worlds, releases)
    assert nearness(worlds, releases) > 0.4


def test_a_choice_that_is_shown_attains_its_bound():
    q, noise = 0.25, 0.9
    drawn, idle = (loss_distributions.gaussian_profile(np.array([1.0]), move / noise)[0] for move in (2 - q, q))
    found = delta([table_release("uniform", q, 4, 1, noise)], 1.0)
    assert found == pytest.approx(q * drawn + (1 - q) * idle, rel=0.01)


def noises(mechanism: Mechanism, scale: float) -> np.ndarray:
    """Return the noise multiplier of the gradient in each step, over the sum of a batch."""
    factors = [kind[0].noise if kind else 0.0 for kind in mechanism.kinds]
    return np.asarray(scale * mechanism.shape * np.array(factors)[mechanism.kind_of])


def snapshot_steps(q: float, rounds: int) -> Mechanism:
    plain = Schedule(np.ones(1), np.ones(rounds), np.ones(rounds), (1.0, 1.0))
    return build_mechanism(vr(table="snapshot", snapshot_every=3), Drawing("poisson", q, 100, 100 * q), plain)


def snapshot_worlds(mechanism: Mechanism, scale: float, size: int):
    """SVRG's worst case: the snapshot's gradients are -C and those of every later draw +C."""
    q, noise = mechanism.drawing.rate, noises(mechanism, scale)
    draws = [[(1.0, tuple(range(size)))], *[poisson_draws(size, q)] * (len(noise) - 1)]
    sigmas = [noise[0] / q, *noise[1:]]  # round 0's is over the sum of all J = b / q examples
    return published(draws, with_snapshot, lambda k, table, seen: [1.0 if k else -1.0] * size, [0.0] * size, sigmas, 1)


@pytest.mark.parametrize(("rounds", "size"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize(("q", "scale"), [(0.1, 3.0), (0.5, 2.0)])
def test_a_snapshot_costs_one_sum_and_wider_steps(q, scale, rounds, size):
    mechanism = snapshot_steps(q, rounds)
    worlds = snapshot_worlds(mechanism, scale, size)
    releases = mechanism.releases(np.ones(rounds, dtype=bool), scale)
    assert_bounded(worlds, releases)
    assert size > 1 or nearness(worlds, releases) > 0.99


def test_a_snapshots_noise_counts_like_m_steps():
    noise = noises(snapshot_steps(0.25, 7), 6.0)  # every third step is a snapshot
    np.testing.assert_allclose(noise, 6.0 * np.array([3**-0.5, 1, 1, 3**-0.5, 1, 1, 3**-0.5]), rtol=1e-15)


def test_a_snapshot_charged_too_little_is_found():
    mechanism = snapshot_steps(0.5, 2)
    charged = [Release("poisson", 0.5, 100, 50, 2.0, 2)]
    worlds = snapshot_worlds(mechanism, 2.0, 1)
    assert exact_delta(worlds, 1.0) > 2 * delta(charged, 1.0)
    with pytest.raises(AssertionError):
        assert_bounded(worlds, charged)


# --- what one example really moves, in the package's own steps ---


class Zeroed(StackedKernel):
    """A kernel that zeroes the gradient of one local example."""

    def __init__(self, kernel: StackedKernel, example: int) -> None:
        self.__dict__.update(copy.copy(kernel).__dict__, example=example)

    def factors(self, params, batch, divisor=None):
        found = super().factors(params, batch, divisor)
        if not hasattr(batch, "index"):
            return found
        there = (batch.index != self.example).to(params.dtype).unsqueeze(-1)
        return replace(found, deltas=[part * there for part in found.deltas])

    def add_clipped_(self, out, params, batch, clip_norm, scale, divisor=None):
        weight = batch.weight * (batch.index != self.example)
        return super().add_clipped_(out, params, replace(batch, weight=weight), clip_norm, scale, divisor)


class Silence:
    """Noise that is none."""

    def add_(self, out, std, step, peers, purpose="noise", receivers=None):
        pass


def moved_by_one_example(experiment, rounds: int):
    """Yield (round, drawn?, how far the sum over a batch moves, in clip norms) where both see the same models."""
    experiment = hosting(experiment, [0])
    cohort, other = experiment.cohort(), experiment.cohort()
    other.kernel = Zeroed(cohort.kernel, example=4)
    cohort.noise = other.noise = Silence()
    state, shadow = experiment.initial_state(cohort), experiment.initial_state(other)
    for k in range(rounds):
        state.round_index = shadow.round_index = k
        experiment.algorithm.program[0](cohort, state)
        experiment.algorithm.program[0](other, shadow)
        batch = cohort.data.batch(k, np.array([0]))
        drawn = bool(((batch.index == 4) & (batch.weight > 0)).any())
        sum_to_step = cohort.learning_rate.at(k)[0] / cohort.data.sampler.normalizer[0]
        apart = (
            float((state.rows["x"] - shadow.rows["x"]).norm())
            / sum_to_step
            / float(experiment.own.protection.clip_norm(k)[0])
        )
        yield k, drawn, apart
        for name in ("x", "snapshot", "anchor"):  # published: both go on from the same
            if name in state.rows:
                shadow.rows[name] = state.rows[name].clone()


TIGHT = ["privacy.clip_norm=0.05", "n_peers=2", "data.samples=20", "rounds=40", "privacy.epsilon=50"]
BATCHES = {
    "dense": "data.batch={sampling: poisson, size: 3}",
    "factored": "data.batch={sampling: uniform, size: 3}",
    "blocks": "data.batch={sampling: blocks, size: 2}",
}


@pytest.mark.parametrize("table", BATCHES)
def test_one_example_moves_a_table_step_as_declared(build, table):
    algorithm = f"algorithm={{name: privsgp-vr, learning_rate: 300.0, table: {table}}}"
    settings = [*TIGHT, BATCHES[table], algorithm, "model={name: mlp, hidden: [8], activation: tanh}"]
    experiments = [build(*settings, f"seed={seed}") for seed in range(4)]
    q = float(experiments[0].own.sampler.sampling_rate[0])
    found = [each for experiment in experiments for each in moved_by_one_example(experiment, 40)]
    idle, drawn = ([apart for _, was, apart in found if was is which] for which in (False, True))
    assert max(idle) == pytest.approx(q)  # a gradient as long as the clip norm, shown without being drawn
    assert 1 < max(drawn) <= 2 - q + 1e-9


def test_one_example_moves_a_snapshot_once_its_steps_twice(build):
    algorithm = "algorithm={name: privsgp-vr, learning_rate: 3.0, table: snapshot, snapshot_every: 10}"
    experiment = build(*TIGHT, BATCHES["dense"], algorithm)
    q = float(experiment.own.sampler.sampling_rate[0])
    for k, drawn, apart in moved_by_one_example(experiment, 40):
        if k % 10 == 0:
            assert apart == pytest.approx(q, rel=1e-6)  # of all J examples' sum: one clip norm
        else:
            assert apart <= (2 + 1e-9 if drawn else 1e-9)
    for spend in experiment.own.protection.accounts[0].spends:  # and that is what it is charged for
        taken, noise = (
            spend.from_step % 10 == 0,
            float(experiment.own.protection.noise_multiplier(spend.from_step)[0]),
        )
        assert spend.release.sampling == ("full" if taken else "poisson")
        assert spend.release.noise_multiplier == pytest.approx(noise / q if taken else noise / 2)


# --- the mixture's numbers, and the event ---


@pytest.mark.parametrize(("q", "noise"), [(0.01, 1.5), (0.2, 1.5), (0.5, 4.0)])
def test_mixture_profiles_are_googles(q, noise):
    low, high = table_sensitivities(q)
    theirs = from_mixture_gaussian_mechanism(noise, [low, high], [1 - q, q], value_discretization_interval=0.1)
    both = (loss_distributions.mixture_remove, loss_distributions.mixture_add)
    for eps in (0.1, 0.5, 1.0, 3.0):  # on its grid, where its distribution is exact
        ours = max(float(profile(np.array([eps]), q, low / noise, high / noise)[0]) for profile in both)
        assert ours == pytest.approx(theirs.get_delta_for_epsilon(eps), rel=1e-6, abs=1e-12)


def test_googles_accountant_agrees_on_the_event_of_a_table():
    release = table_release("poisson", 0.25, 200, 50, 1.5, 4)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 0.05)
    accountant.compose(event([release]))
    theirs = accountant.get_epsilon(1e-4)
    assert theirs * 0.99 <= epsilon([release], 1e-4) <= theirs * (1 + 1e-3)


def test_a_table_costs_between_plain_steps_and_full_disclosure():
    table, shown = (table_release(kind, 0.02, 200, 4, 2.0, 200) for kind in ("poisson", "uniform"))
    plain, full = (Release(kind, 0.02, 200, 4, 2.0, 200) for kind in ("poisson", "full"))
    found = [epsilon([release], 1e-5) for release in (plain, table, shown)]
    assert found[0] < found[1] < found[2] < epsilon([replace(full, noise_multiplier=1.0)], 1e-5)


def test_a_table_of_full_batches_is_a_gaussian():
    table, full = table_release("poisson", 1.0, 50, 50, 3.0, 20), Release("full", 1.0, 50, 50, 3.0, 20)
    assert epsilon([table], 1e-5) == pytest.approx(epsilon([full], 1e-5))


# --- the plan ---

FAMILY = ("sgp", "privsgp", "privsgp-vr", "dyn-d2p", "dyn-c-d2p", "dyn-mu-d2p", "const-d2p")
FAMILY += ("d-psgd", "dp2-sgd", "adp2-sgd", "muffliato", "dp-net-fleet", "dp-dpsgd", "local", "dp-sgd")
PLANS = [
    *(f"algorithm={{name: {name}, learning_rate: 0.1}}" for name in FAMILY),
    "algorithm={name: privsgp-vr, learning_rate: 0.1, table: dense}",
    "algorithm={name: privsgp-vr, learning_rate: 0.1, table: snapshot, snapshot_every: 7}",
]


def assert_budgets_met(experiment, budgets):
    spent = experiment.own.protection.epsilons(experiment.scenario.rounds)
    for one, budget in zip(spent, budgets, strict=True):
        assert 0.995 * budget <= one <= budget


@pytest.mark.parametrize("algorithm", PLANS)
def test_every_algorithm_spends_its_budget_and_no_more(build, algorithm):
    alone = "dp-sgd" in algorithm
    graph = "ring" if "d-psgd" in algorithm or "2-sgd" in algorithm else "directed-exponential"
    budgets = [1.5] if alone else [0.7, 1.5, 3.0]
    settings = [
        f"n_peers={len(budgets)}",
        "rounds=30",
        f"topology.name={graph}",
        "data.partition={kind: sizes, sizes: ",
    ]
    settings[-1] += "[240]}" if alone else "[90, 90, 60]}"
    experiment = build(*settings, algorithm, f"privacy.epsilon={budgets}")
    assert_budgets_met(experiment, budgets)


@pytest.mark.parametrize(
    ("table", "batch", "kinds"),
    [
        ("factored", "uniform, size: 12", {"uniform"}),
        ("factored", "full", {"full"}),
        ("blocks", "blocks, size: 12", {"blocks"}),
        ("snapshot", "uniform, size: 12", {"full", "uniform"}),
        ("snapshot", "full", {"full"}),
    ],
)
def test_every_table_spends_its_budget_under_every_sampling(build, table, batch, kinds):
    algorithm = f"algorithm={{name: privsgp-vr, learning_rate: 0.1, table: {table}}}"
    some = "participation={kind: uniform, fraction: 0.5}"
    experiment = build("rounds=20", f"data.batch={{sampling: {batch}}}", algorithm, some)
    assert_budgets_met(experiment, [3.0] * 4)
    assert kinds == {
        spend.release.sampling for account in experiment.own.protection.accounts for spend in account.spends
    }


def test_a_table_of_full_batches_pays_less_than_snapshots(build):
    full = "data.batch={sampling: full}"
    table, snapshot = (
        build(full, f"algorithm={{name: privsgp-vr, learning_rate: 0.1, table: {name}, snapshot_every: 4}}")
        for name in ("factored", "snapshot")
    )
    assert table.own.protection.noise_multiplier(1)[0] == pytest.approx(
        build(full).own.protection.noise_multiplier(1)[0]
    )
    assert snapshot.own.protection.noise_multiplier(1)[0] > 1.5 * table.own.protection.noise_multiplier(1)[0]


@pytest.mark.slow
def test_a_thousand_distinct_steps_are_solved_for(build):
    name = "algorithm={name: dyn-d2p, learning_rate: 0.1, rho_c: 2.0, rho_mu: 3.0}"
    experiment = build("rounds=1000", "n_peers=2", name, "data.samples=1200", "privacy={epsilon: 1.0, delta: 1.0e-4}")
    assert_budgets_met(experiment, [1.0, 1.0])
    releases = [spend.release for spend in experiment.own.protection.accounts[0].spends]
    assert len({r.noise_multiplier for r in releases}) == 1000
    less = coarsened(releases, 8)  # up to an eighth of the range more noise than the run's: it must cost less
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 1e-3)
    accountant.compose(event(less))
    assert 0.9 < accountant.get_epsilon(1e-4) < experiment.own.protection.epsilons(1000)[0] <= 1.0


def coarsened(releases: list[Release], bins: int) -> list[Release]:
    """Return releases with few noise multipliers, each raised to the largest of its bin."""
    ordered = sorted(releases, key=lambda r: r.noise_multiplier)
    parts = np.array_split(np.array([r.noise_multiplier for r in ordered]), bins)
    return list(canonical(replace(ordered[0], noise_multiplier=part.max(), steps=len(part)) for part in parts))


# --- refused ---

VR = "algorithm={name: privsgp-vr, learning_rate: 0.1, table: dense}"


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ([VR, "data.batch={sampling: shuffle, size: 12}"], "release.shuffle-table", "'shuffle'"),
        ([VR, "privacy.schedule={rho_c: 2.0}"], "privacy.schedule", "privacy.schedule"),
        ([VR, "privacy.schedule={clip_norms: [2.0, 1.0]}"], "privacy.schedule", "privacy.schedule"),
        (["privacy={epsilon: 0.1, delta: 1.0e-3, noise_multiplier: 0.5}"], "privacy.budget", "first step costs, 4.9"),
    ],
)
def test_a_mechanism_without_proved_bound_is_refused(build, settings, code, names):
    with raises(ScenarioError, code, names) as refused:
        build(*settings)
    assert "\n" not in str(refused.value)


def test_tables_may_change_noise_and_snapshots_clip_norms(build):
    assert_budgets_met(build(VR, "privacy.schedule={rho_mu: 2.0}"), [3.0] * 4)
    snapshot = "algorithm={name: privsgp-vr, learning_rate: 0.1, table: snapshot}"
    assert_budgets_met(build(snapshot, "privacy.schedule={rho_c: 2.0}"), [3.0] * 4)


def test_given_noise_ends_where_its_budget_does(build):
    experiment = build("privacy={epsilon: 2.0, delta: 1.0e-3, noise_multiplier: 1.0}", "rounds=60")
    (spend,) = experiment.own.protection.accounts[0].spends
    assert 1 < spend.to_step < 60
    assert experiment.own.protection.epsilons(60)[0] <= 2.0 < epsilon([spend.release.times(spend.to_step + 1)], 1e-3)


def test_a_run_uses_its_plans_noise_and_batches(build):
    experiment = build(VR, "n_peers=2", "algorithm.learning_rate=0.5")
    cohort = experiment.cohort()
    asked = []

    class Tape:
        def add_(self, out, std, step, peers, purpose="noise", receivers=None):
            asked.append((step, std.clone()))

    cohort.noise = Tape()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.round()
    ((k, std),) = asked
    expected = 0.5 * experiment.own.protection.noise_multiplier(k) * experiment.own.protection.clip_norm(k) / 12
    torch.testing.assert_close(std, torch.from_numpy(expected))
    release = experiment.own.protection.accounts[0].spends[0].release
    assert (release.sampling_rate, release.dataset_size) == (cohort.data.sampler.sampling_rate[0], 120)
