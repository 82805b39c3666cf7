"""Peers with few and with many examples: how they draw them, what each one's ε is, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from raising import raises
from tiny_scenario import Build, Tiny

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism.events import Release

SIZES = (3, 20, 90, 127)
UNEVEN = f"data.partition={{kind: sizes, sizes: {list(SIZES)}}}"
RATE = "data.batch={sampling: poisson, rate: 0.13}"
IN_FULL = "data.batch={sampling: poisson, size: 12, small_peers: full}"
RATES = {RATE: (0.13, 0.13, 0.13, 0.13), IN_FULL: (1.0, 12 / 20, 12 / 90, 12 / 127)}


def accountants(rate: float, size: int, noise: float, rounds: int) -> float:
    """Return what the accountant says of a peer that draws at a rate; at rate 1 it draws nobody."""
    kind = "poisson" if rate < 1 else "full"
    return epsilon([Release(kind, rate, size, max(1, round(rate * size)), noise, rounds)], 1e-3)


@pytest.mark.parametrize("batch", RATES)
def test_each_peers_epsilon_follows_its_own_rate(build: Build, batch: str) -> None:
    given = build(UNEVEN, batch, "privacy={noise_multiplier: 1.1, delta: 1.0e-3}")
    expected = [accountants(rate, size, 1.1, 6) for rate, size in zip(RATES[batch], SIZES, strict=True)]
    assert given.own.protection is not None
    np.testing.assert_allclose(given.own.protection.epsilons(6), expected, rtol=1e-12)
    assert (max(expected) > 1.5 * min(expected)) == (batch == IN_FULL)


@pytest.mark.parametrize("batch", RATES)
def test_each_peers_noise_is_solved_at_its_own_rate(build: Build, batch: str) -> None:
    solved = build(UNEVEN, batch).own.protection
    assert solved is not None
    noise = solved.noise_multiplier(0)
    spent = [accountants(rate, size, z, 6) for rate, size, z in zip(RATES[batch], SIZES, noise, strict=True)]
    assert all(2.98 < value <= 3.0 for value in spent), spent
    if batch == IN_FULL:
        assert (np.diff(noise) < 0).all()  # the less is drawn, the less noise
    else:
        np.testing.assert_array_equal(noise, np.full(4, noise[0]))


@pytest.mark.parametrize(
    "table", ["name: privsgp", *(f"name: privsgp-vr, table: {table}" for table in ("factored", "dense", "snapshot"))]
)
def test_a_peer_taking_everything_costs_full_batches(build: Build, table: str) -> None:
    algorithm = f"algorithm={{{table}, learning_rate: 0.5}}"
    several, full = (
        build(UNEVEN, batch, algorithm, "privacy={noise_multiplier: 1.1, delta: 1.0e-3}").own.protection
        for batch in (IN_FULL, "data.batch={sampling: full}")
    )
    assert several is not None
    assert full is not None
    assert several.epsilons(6)[0] == full.epsilons(6)[0]
    assert several.epsilons(6)[3] < full.epsilons(6)[3]


def test_a_plan_says_every_peers_noise_and_epsilon(build: Build) -> None:
    rows = make_plan(build(UNEVEN, RATE))["peers"]
    sigma = np.array([row["sigma"][0] for row in rows])  # of the mean gradient
    np.testing.assert_allclose(sigma * np.array(SIZES) * 0.13, rows[0]["noise_multiplier"])


def test_a_plan_of_a_table_takes_a_rate(build: Build) -> None:
    plan = make_plan(build(UNEVEN, RATE, "algorithm={name: privsgp-vr, learning_rate: 0.5}"))
    assert plan["seconds"] > 0


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("{sampling: poisson}", "sampling poisson needs size (examples a step) or rate: add it"),
        ("{sampling: uniform}", "sampling uniform needs size (examples a step): add it"),
        (
            "{sampling: uniform, rate: 0.1}",
            "rate belongs to sampling poisson, not to uniform: give size",
        ),
        ("{sampling: blocks, rate: 0.1}", "rate belongs to sampling poisson, not to blocks: give size, or use poisson"),
        ("{sampling: full, rate: 0.1}", "rate belongs to sampling poisson, not to full: remove it"),
        ("{sampling: poisson, rate: 0.1, size: 4}", "size and rate both set how much is drawn: give one"),
        ("{sampling: poisson, rate: 0}", "data.batch.rate=0 must be >= 0.000000001"),
        ("{sampling: poisson, rate: 1.01}", "data.batch.rate=1.01 must be <= 1"),
        ("{sampling: poisson, rate: .nan}", "data.batch.rate=nan must be"),
        ("{sampling: poisson, rate: 10 %}", "data.batch.rate='10 %' must be a number"),
        ("{sampling: poisson, rate: 0.1, small_peers: full}", "size is not given: remove small_peers"),
        ("{sampling: full, small_peers: full}", "size is not given: remove small_peers"),
        ("{sampling: poisson, size: 4, small_peers: all}", "data.batch.small_peers='all' must be one of 'refused' or"),
    ],
)
def test_a_wrong_batch_is_refused_in_one_line(tiny: Tiny, batch: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        tiny(f"data.batch={batch}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["poisson", "uniform"])
def test_a_batch_too_large_names_the_smallest_peer(build: Build, kind: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        build(UNEVEN, f"data.batch.sampling={kind}", "data.batch.size=25")
    said = str(caught.value)
    assert "data.batch.size=25 must be at most 3, what the smallest peer, 0, holds (2 of 4 hold fewer than 25)" in said
    assert "data.batch.small_peers: full" in said
    assert ("data.batch.rate" in said) == (kind == "poisson")
    build(UNEVEN, f"data.batch.sampling={kind}", "data.batch.size=25", "data.batch.small_peers=full")


HETEROGENEOUS = [
    "n_peers=30",
    "data={dataset: digits, partition: {kind: dirichlet, alpha: 0.1}, batch: {sampling: poisson, rate: 0.1}}",
]


@pytest.mark.slow
@pytest.mark.usefixtures("label_partitions")
@pytest.mark.parametrize("least", [None, 10])
def test_the_usual_heterogeneous_job_runs(tiny: Tiny, tmp_path: Path, least: int | None) -> None:
    """30 peers, Dirichlet 0.1, Poisson batches: as drawn, with peers of an example or two, or with a least size."""
    extra = [] if least is None else [f"data.partition.min_size={least}"]
    experiment = Experiment.build(tiny(*HETEROGENEOUS, *extra, "rounds=3"))
    sizes = experiment.own.examples.sizes
    assert sizes.sum() == 1440
    assert sizes.min() < 5 if least is None else sizes.min() == least
    assert sizes.max() > 100
    summary = run(experiment, tmp_path / "run", lean=True)
    assert all(2.9 < row["epsilon"] <= 3.0 for row in summary["privacy"])
    make_plan(experiment)


def test_a_least_size_belongs_to_dirichlet(tiny: Tiny) -> None:
    with raises(ScenarioError, "scenario.other-choice", "min_size"):
        tiny("data.partition.min_size=3")
