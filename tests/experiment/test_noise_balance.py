"""Peers whose noise drowns the others: who they are, and weights that bound what they cost."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hosting import hosting
from raising import raises
from tiny_scenario import Build, Tiny
from variants import PLAIN, settings_for

from flower_privdec import make_scenario, run
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import percent
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.noise_balance import (
    balance_note,
    balance_of,
    cap_note,
    capped,
    excess,
    public_balance,
)
from flower_privdec.network.local.up import Up
from flower_privdec.planner.peers import peer_rows
from flower_privdec.planner.plan import make_plan
from flower_privdec.planner.warnings import privacy_warnings
from flower_privdec.privacy.mechanism.protection import Protection

SIZES = "data.partition={kind: sizes, sizes: [80, 79, 80, 1]}"
TINY_PEER = [SIZES, "data.batch={rate: 0.2}"]
EXCHANGING = [variant for variant in PLAIN if "local" not in variant[0] and "dp-sgd" not in variant[0]]


def random_peers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how much some peers count and their noise, over many orders of magnitude."""
    random = np.random.default_rng(seed)
    n_peers = int(random.integers(2, 12))
    counts = np.exp(random.normal(scale=random.choice([0.0, 0.5, 3.0]), size=n_peers))
    noise = np.exp(random.normal(scale=random.choice([0.1, 2.0, 12.0]), size=n_peers))
    return counts, noise


@pytest.mark.parametrize("seed", range(40))
def test_weights_are_the_best_that_favour_nobody_more(seed: int) -> None:
    """They meet the conditions of Karush, Kuhn and Tucker, which are enough as the problem is convex."""
    counts, noise = random_peers(seed)
    for cap in (1.0, 1.1, 2.0, 30.0):
        factors = capped(counts, noise, cap)
        weights = counts * factors
        assert excess(weights, noise) <= cap * (1 + 1e-9)
        assert weights.sum() == pytest.approx(counts.sum())

        # Half the derivative of the variance by each weight: equal where it is free, and less at the bound.
        slopes = weights * noise**2
        is_bound = factors >= factors.max() * (1 - 1e-12)
        if not is_bound.all():
            free = slopes[~is_bound]
            assert free == pytest.approx(free[0], rel=1e-6)
            assert slopes[is_bound].max() <= free[0] * (1 + 1e-6)


def test_no_weights_of_three_peers_do_better() -> None:
    counts = np.ones(3)
    noise = np.array([1.0, 2.0, 9.0])
    factors = capped(counts, noise, 1.2)
    most = factors.max() / factors.sum()
    least = excess(factors, noise)
    grid = np.linspace(0.001, most, 60)
    for first in grid:
        for second in grid:
            weights = np.array([first, second, 1 - first - second])
            if 0 < weights[2] <= most:
                assert excess(weights, noise) >= least - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_cap_changes_as_little_as_it_must(seed: int) -> None:
    counts, noise = random_peers(seed)
    before = excess(counts, noise)
    assert before >= 1 - 1e-12
    assert capped(counts, noise, before * 1.001).tolist() == [1.0] * len(counts)
    if before > 1.01:
        cap = (1 + before) / 2
        assert excess(counts * capped(counts, noise, cap), noise) == pytest.approx(cap, rel=1e-6)
    best = counts * capped(counts, noise, 1.0)
    assert best * noise**2 == pytest.approx(best[0] * noise[0] ** 2, rel=1e-6)


def test_an_idle_peer_does_not_count() -> None:
    counts = np.array([1.0, 1.0, 0.0])
    noise = np.array([1.0, 10.0, 1e9])
    assert capped(counts, noise, 1.0)[2] == 1.0
    assert excess(counts, noise) == pytest.approx(excess(counts[:2], noise[:2]))


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (TINY_PEER, "batches of 0.200 examples on average, where the others have 16.0"),
        (["privacy.epsilon=[3,3,3,0.2]"], "times the others' noise multiplier"),
        (["privacy.clip_norm=[1,1,1,10]"], "10.0 times the others' clip norm"),
        (["algorithm.learning_rate=[0.1,0.1,0.1,2]"], "20.0 times the others' learning rate"),
        (
            ["data.partition={kind: sizes, sizes: [90, 90, 48, 12]}", "data.batch={size: 20, small_peers: full}"],
            "times the others' noise multiplier",
        ),
    ],
)
def test_a_peer_that_drowns_the_others_is_named(build: Build, settings: list[str], cause: str) -> None:
    experiment = build(*settings)
    note = balance_note(experiment.scenario, balance_of(experiment))
    assert note is not None
    assert note.startswith("peer 3 may drown the others in noise: ")
    assert cause in note

    rows = peer_rows(experiment)
    share = f"{100 * rows[3]['noise_share']:.1f} %"
    assert share in note
    assert sum(row["noise_share"] for row in rows) == pytest.approx(1)
    assert note in make_plan(experiment)["warnings"]

    # Its first remedy works.
    assert "set privacy.noise_cap=1.2" in note
    followed = build(*settings, "privacy.noise_cap=1.2")
    assert balance_note(followed.scenario, balance_of(followed)) is None


@pytest.mark.parametrize(
    "settings",
    [[], ["privacy.epsilon=[2,3,4,5]"], ["privacy=none"], ["algorithm.name=local", *TINY_PEER]],
)
def test_peers_that_fit_together_are_not_warned_of(build: Build, settings: list[str]) -> None:
    experiment = build(*settings)
    assert balance_note(experiment.scenario, balance_of(experiment)) is None


@pytest.mark.parametrize(
    ("settings", "said", "hardly"),
    [
        (["privacy.noise_cap=2"], "privacy.noise_cap=2 has no effect", []),
        (["privacy.noise_cap=1", "privacy.epsilon=[0.3,0.3,0.3,30]"], "privacy.noise_cap=1: peers 0-2 ", [0, 1, 2]),
        (["privacy.noise_cap=1.2", *TINY_PEER], "privacy.noise_cap=1.2: peer 3 counts for ", [3]),
        (["privacy.noise_cap=1.05", "privacy.epsilon=[2,3,4,5]"], None, []),
        (["privacy.epsilon=[2,3,4,5]"], None, []),
    ],
)
def test_a_cap_that_does_nothing_or_much_is_named(
    build: Build, settings: list[str], said: str | None, hardly: list[int]
) -> None:
    experiment = build(*settings)
    note = cap_note(experiment)
    if said is None:
        assert note is None
    else:
        assert note is not None
        assert note.startswith(said)
        assert note in privacy_warnings(experiment)

    if note is not None and hardly:
        uncapped = balance_of(build(*(setting for setting in settings if "noise_cap" not in setting)))
        assert uncapped is not None
        assert f"for {percent(float(uncapped.weights[hardly].sum()))} without the cap" in note


def test_peers_that_count_by_their_examples_fit_together(build: Build) -> None:
    by_examples = "algorithm={name: fedavg, learning_rate: 0.5, local_steps: 1}"
    uniform = "algorithm={name: fedavg, learning_rate: 0.5, local_steps: 1, weighting: uniform}"
    balanced = balance_of(build(by_examples, *TINY_PEER))
    drowned = balance_of(build(uniform, *TINY_PEER))
    assert balanced is not None
    assert drowned is not None
    assert balanced.excess < 1.2
    assert drowned.excess > 20


def test_a_run_says_and_notes_who_drowns(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tiny(*TINY_PEER), out=tmp_path / "run")
    assert "peer 3 may drown the others" in caplog.text
    assert json.loads((tmp_path / "run/summary.json").read_text())["balance_note"].startswith("peer 3 may drown")


def test_up_says_who_drowns_before_a_peer_starts(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Up(tiny(*TINY_PEER), tmp_path / "up")
    assert "peer 3 may drown the others" in caplog.text
    agreement = Agreement.of(tiny(*TINY_PEER, "privacy.noise_cap=1.2"))
    balance = public_balance(agreement)
    assert balance is not None
    assert balance.excess == pytest.approx(1.2, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["privsgp", "d-psgd", "fedavg", "dp-dda"])
def test_every_process_computes_the_same_weights(tiny: Tiny, algorithm: str) -> None:
    section = f"algorithm={{name: {algorithm}, learning_rate: 0.5}}"
    if algorithm == "dp-dda":
        section = "algorithm={name: dp-dda}"
    settings = [section, "topology.name=complete", *TINY_PEER]
    scenario = tiny(*settings, "privacy.noise_cap=1.1", "privacy.epsilon=[3,1,3,3]")
    agreement = Agreement.of(scenario)
    whole = Experiment.build(scenario)
    assert np.ptp(whole.learning_rate.base) > 0
    for peer in range(4):
        part = hosting(agreement, [peer])
        assert part.learning_rate.base.tolist() == whole.learning_rate.base.tolist()
    deployed = OwnParts.of(agreement, np.array([3]), b"of one peer", runtime="network")
    assert deployed.learning_rate.base == pytest.approx(whole.learning_rate.base, rel=1e-12)


def test_a_cap_changes_no_epsilon_and_no_noise_multiplier(build: Build) -> None:
    plain = build(*TINY_PEER).own.protection
    with_cap = build(*TINY_PEER, "privacy.noise_cap=1").own.protection
    assert isinstance(plain, Protection)
    assert isinstance(with_cap, Protection)
    assert with_cap.noise_multipliers.tolist() == plain.noise_multipliers.tolist()
    assert with_cap.epsilons(6) == plain.epsilons(6)


@pytest.mark.parametrize("variant", EXCHANGING, ids=lambda variant: variant[0])
def test_noise_reaches_others_only_by_the_rate(build: Build, variant: list[str]) -> None:
    """A peer with a millionfold noise, and a rate that takes it back, moves nobody; or the key is refused."""
    settings = settings_for(*variant)
    loud = [*settings, "privacy={noise_multiplier: 1.0, delta: 1.0e-3, clip_norm: [1, 1, 1, 1.0e+6]}"]
    experiment = build(*loud)
    rate = experiment.learning_rate
    object.__setattr__(rate, "base", rate.base * [1, 1, 1, 1e-8])

    state = experiment.initial_state(experiment.cohort())
    engine = Engine(experiment.algorithm, experiment.cohort(), state)
    engine.rounds(4)
    moved = float((experiment.algorithm.debiased(engine.state.rows)[:3] - experiment.initial).abs().max())
    if experiment.algorithm.noise_follows_rate:
        assert moved < 1e3
    elif experiment.algorithm.name in ("scaffold", "pdsl"):  # of others it turns directions, and no numbers show it
        assert moved > 1e3


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["algorithm.name=local"], "privacy.noise-cap"),
        (["algorithm.name=scaffold", "topology.name=server"], "privacy.noise-cap"),
        (["algorithm={name: dp-cga, learning_rate: 0.5}", "topology.name=ring"], "privacy.noise-cap"),
        (["algorithm.optimizer={name: adam}"], "privacy.noise-cap"),
        (["privacy.noise_cap=0.9"], "scenario.greater_than_equal"),
        (["privacy.noise_cap=.inf"], "scenario.finite_number"),
        (["privacy.noise_cap=.nan"], "scenario.finite_number"),
        (["privacy.clip_norm=[1,1,1,1.0e+12]"], "privacy.noise-cap-nothing"),
        (["data.at_least=2", "data.batch={rate: 0.2}"], "noise.cancelling-batches"),
    ],
)
def test_a_cap_that_would_be_wrong_is_refused(build: Build, settings: list[str], code: str) -> None:
    with raises(ScenarioError, code, "privacy.noise_cap"):
        build("privacy.noise_cap=1.2", *settings)


def test_private_sizes_are_refused_on_a_device(tiny: Tiny, tmp_path: Path) -> None:
    whole = Experiment.build(tiny()).own.examples
    for peer, rows in enumerate(whole.parts):
        np.savez(tmp_path / f"peer-{peer}.npz", x_train=whole.x[rows].numpy(), y_train=whole.y[rows].numpy())
    np.savez(tmp_path / "test.npz", x_test=whole.x.numpy(), y_test=whole.y.numpy())
    places = [f"data.root={tmp_path}/peer-{{peer}}.npz", f"data.test={tmp_path}/test.npz", "data.dataset=npz"]
    plain = ["data.samples=null", "data.test_samples=null", "privacy.noise_cap=1.2", "privacy.epsilon=[1,3,3,3]"]
    agreement = Agreement.of(tiny(*places, *plain))
    with raises(ScenarioError, "noise.cancelling-sizes", "privacy.noise_cap needs the number of every peer's"):
        OwnParts.of(agreement, np.array([0]), b"secret", runtime="network")

    known = Agreement.of(tiny(*places, *plain, "data.at_least=40"))
    one = OwnParts.of(known, np.array([0]), b"secret", runtime="network")
    two = OwnParts.of(known, np.array([2]), b"secret", runtime="network")
    assert one.learning_rate.base.tolist() == two.learning_rate.base.tolist()
    assert one.learning_rate.base[0] < one.learning_rate.base[1]


def test_noise_that_cancels_is_planned_with_the_weights(build: Build) -> None:
    cancelling = "privacy.noise={kind: cancelling, colluding: 0}"
    settings = [*TINY_PEER, cancelling, "topology.name=complete"]
    plain = balance_of(build(*settings))
    with_cap = build(*settings, "privacy.noise_cap=1.1")
    assert plain is not None
    balance = balance_of(with_cap)
    assert balance is not None

    def noise(of: np.ndarray, counts: np.ndarray) -> float:
        return float(np.sqrt(np.square(of * counts).sum()) / counts.sum())

    by_itself = build(*TINY_PEER, "topology.name=complete", "privacy.noise_cap=1.1")
    alone = balance_of(by_itself)
    assert alone is not None
    assert noise(balance.noise, balance.counts) < 0.8 * noise(alone.noise, alone.counts)
    assert noise(plain.noise, plain.counts) > 10 * noise(balance.noise, balance.counts)
    protection = with_cap.own.protection
    assert isinstance(protection, Protection)
    assert max(protection.epsilons(6)) <= 3.0


def some(random: np.random.Generator, centres: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = random.integers(len(centres), size=count)
    return (centres[labels] + random.normal(size=(count, centres.shape[1]))).astype(np.float32), labels


def test_one_example_drowns_nobody_with_a_cap() -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(6, 5)) * 2
    train = [some(random, centres, count) for count in (200, 200, 1)]
    test = some(random, centres, 600)

    def accuracy(**privacy: float) -> float:
        scenario = make_scenario(
            name="drowning",
            n_peers=3,
            rounds=20,
            data={"train": train, "test": test, "batch": {"rate": 0.2}},
            model={"name": "softmax"},
            algorithm={"name": "privsgp", "learning_rate": 0.5},
            privacy={"epsilon": 5.0, "delta": 1e-3, **privacy},
            compute={"generator": "portable"},
        )
        return float(run(scenario).summary["accuracy"]["mean_model"])

    assert accuracy() < 0.6
    assert accuracy(noise_cap=1.2) > 0.8
