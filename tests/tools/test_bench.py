"""The benchmark: it refuses to time what computes something else, and its figures have the promised shape."""

import gc
import importlib.util
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from raising import raises

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.graph.topology import build_topology
from tools import bench
from tools.bench import (
    comparison,
    equality,
    flower_relay,
    ledgers,
    limit,
    local_steps,
    noise,
    printing,
    sharding,
    timing,
)
from tools.bench.baselines import OpacusLoop, PeerLoop, TextbookVmap
from tools.bench.workloads import WORKLOADS, Setup

CPU = torch.device("cpu")
FIGURES = ("ratio_to_loop", "fraction_of_limit", "times_the_limit", "peer_steps_per_second")


def tiny(name):
    """Return a workload with all its parts and little work."""
    work = WORKLOADS[name]
    shape = (1, 8, 8) if len(work.shape) == 3 else (20,)
    options = {"hidden": [5]} if work.model == "mlp" else {}
    return replace(work, n_peers=4, batch=min(work.batch, 3), shape=shape, options=options, examples=6)


@pytest.fixture
def tiny_workloads(monkeypatch):
    """Make the command measure tiny workloads."""
    monkeypatch.setattr(timing, "STRETCH", 1e-4)
    for name in WORKLOADS:
        monkeypatch.setitem(WORKLOADS, name, tiny(name))


def test_workloads_are_those_promised():
    sizes = {name: (Setup.build(work.resized(2)).d, work.n_peers, work.batch) for name, work in WORKLOADS.items()}
    assert sizes == {
        "W1": (79_510, 50, 1),
        "W2": (159_010, 16, 32),
        "W3": (105_866, 20, 32),
        "W4": (2_000, 100, 1),
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_round_by_flowers_relay_is_timed(name):
    assert flower_relay.in_process(WORKLOADS[name].resized(2), 1) > 0


TINY_FEDDEPER = replace(
    local_steps.WORKLOAD, n_peers=10, batch=3, shape=(1, 8, 8), options={"hidden": [6, 5]}, examples=6
)


@pytest.mark.slow
def test_shards_are_timed_beside_one_process_and_beside_gloo(monkeypatch):
    monkeypatch.setattr(sharding, "ROUNDS", {"W1": 1, "W2": 1, "W3": 1})
    monkeypatch.setattr(sharding, "MANY", {"W4": 10, "W1": 4})
    found = sharding.measure_sharding(repeats=1, sizes=[2000])
    assert found["pace"].keys() == {"W1", "W2", "W3"}
    assert all(facts["ratio"] > 0 for facts in found["pace"].values())
    assert found["exchanges"].keys() == {"8000"}
    lines = sharding.sharding_lines(found)
    assert len(lines) == 3 + 1 + 1 + 2
    assert "on paper, 100,000 peers of W4 (d = 2,000) on 64 hosts" in lines[-2]


def test_the_forecast_counts_the_rows_that_cross():
    graph, shards = build_topology("directed-exponential", 40), Shards.split(40, 4)
    crossing = []
    for phase in range(graph.period):
        senders, receivers = graph.edges(phase).T
        leaves = (shards.of(senders) == 1) & (shards.of(receivers) != 1)
        crossing.append(len(np.unique(senders[leaves])))
    found = sharding.forecast(40, 4, d=10, step_ms=2.0)
    assert found.exchanged == pytest.approx(np.mean(crossing))
    assert (found.step_ms, found.bytes) == (20.0, found.exchanged * 40)
    assert found.collected_bytes == 40 * 10 * 4


def test_feddeper_is_timed_beside_the_loop_and_the_floor(monkeypatch, capsys):
    monkeypatch.setattr(timing, "STRETCH", 1e-4)
    monkeypatch.setattr(local_steps, "WORKLOAD", TINY_FEDDEPER)
    results = bench.measure(["FedDeper"], rounds=3)
    result = results["FedDeper"]
    assert result["times_the_floor"] > 0
    assert result["fraction_of_floor"] == pytest.approx(1 / result["times_the_floor"])
    assert result["ratio_to_loop"] > 0
    assert set(result["variants"]) == {comparison.LOOP, local_steps.ENGINE}
    printing.print_results(results)
    assert "times that" in capsys.readouterr().out


def test_a_wrong_engine_stops_the_timing_of_feddeper(monkeypatch):
    built = local_steps.engine

    def tampered(setup):
        engine = built(setup)
        engine.algorithm.rho *= 1.001
        return engine

    monkeypatch.setattr(local_steps, "engine", tampered)
    with raises(RunError, "bench.differs"):
        local_steps.measure_feddeper(TINY_FEDDEPER, CPU, 3)


def test_every_source_of_noise_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(timing, "STRETCH", 1e-4)
    results = {"noise": noise.measure_noise(CPU, 3, 1000)}
    assert {"simulated", "system", "exact"} <= results["noise"]["normals"].keys()
    assert all(0 < rate < float("inf") for rate in results["noise"]["normals"].values())
    printing.print_results(results)
    assert "exact: " in capsys.readouterr().out


@pytest.mark.parametrize("name", WORKLOADS)
def test_engine_and_textbook_vmap_make_the_loops_update(name):
    equality.check_equal(tiny(name), CPU, {"vmap": TextbookVmap})


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="opacus is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["W2", "W3"])
def test_opacus_makes_the_loops_update(name):
    equality.check_equal(tiny(name), CPU, {"opacus": OpacusLoop})


def step_without_clipping(engine):
    kernel = engine.cohort.kernel
    clipped = kernel.add_clipped_
    kernel.add_clipped_ = lambda out, params, batch, clip, *rest: clipped(out, params, batch, None, *rest)


def step_with_less_noise(engine):
    noise = engine.cohort.noise
    add = noise.add_
    noise.add_ = lambda out, std, *rest: add(out, std * 0.999, *rest)


def step_at_the_biased_point(engine):
    kernel = engine.cohort.kernel
    clipped = kernel.add_clipped_
    kernel.add_clipped_ = lambda out, params, batch, clip, scale, _: clipped(out, params, batch, clip, scale)


def step_of_other_examples(engine):
    data = engine.cohort.data
    engine.cohort.data = type("Shifted", (), {"sampler": data.sampler, "batch": lambda _, k, p: data.batch(k + 1, p)})()


def mixing_left_out(engine):
    engine.perform = lambda exchange: setattr(engine.state, "at", engine.state.at + 1)


TAMPERINGS = [
    step_without_clipping,
    step_with_less_noise,
    step_at_the_biased_point,
    step_of_other_examples,
    mixing_left_out,
]


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__)
def test_nothing_is_timed_when_the_engine_does_something_else(monkeypatch, tiny_workloads, tamper):
    built = Setup.engine

    def tampered(setup, noise):
        engine = built(setup, noise)
        tamper(engine)
        return engine

    monkeypatch.setattr(Setup, "engine", tampered)
    monkeypatch.setattr(comparison, "paired", lambda *_: pytest.fail("it was timed"))
    with raises(RunError, "bench.differs", "W2"):
        bench.measure(["W2"], ledger_seconds=0)


def test_figures_have_the_promised_shape(monkeypatch, tiny_workloads, capsys):
    monkeypatch.setattr(bench, "ledger_share", lambda *_: {"share": 0.001, "rounds": 10, "seconds": 1.0})
    bench.main(["W1", "W4"], rounds=3, as_json=True)
    results = json.loads(capsys.readouterr().out)
    assert list(results) == ["W1", "W4"]
    for result in results.values():
        for figure in FIGURES:
            assert 0 < result[figure] < float("inf")
        assert {comparison.LOOP, comparison.ENGINE} <= result["variants"].keys()
    assert "ledger" in results["W1"]
    assert "ledger" not in results["W4"]


@pytest.mark.slow
def test_as_many_peers_as_asked_for(tiny_workloads):
    results = bench.measure(["W2"], rounds=3, peers=6)
    assert results["W2"]["description"].startswith("6 peers, ")
    assert "ledger" not in results["W2"]


def test_figures_follow_from_the_times():
    """Four peers, a loop of 12 ms beside an engine of 2 ms whose parts take 1.5 ms."""
    setup = Setup.build(tiny("W1"))

    def times(seconds):
        return timing.Times(np.array(seconds), np.array(seconds), 0.5)

    measured = {
        comparison.LOOP: times([0.012, 0.012, 0.024]),
        comparison.ENGINE: times([0.002, 0.002, 0.001]),
        comparison.CANCELLING: times([0.003, 0.003, 0.0015]),
        "gemm": times([0.0004] * 3),
        "copy": times([0.0001] * 3),
        "noise": times([0.001] * 3),
        "peak": times([0.001] * 3),
    }
    facts = comparison._facts(setup, measured, [comparison.LOOP, comparison.ENGINE])
    assert facts["ratio_to_loop"] == pytest.approx(6)
    assert facts["fraction_of_limit"] == pytest.approx(0.75)
    assert facts["times_the_limit"] == pytest.approx(4 / 3)
    assert facts["cancelling"] == pytest.approx(1.5)
    assert facts["peer_steps_per_second"] == pytest.approx(4 / 0.002)


def test_every_way_is_timed_equally_often_in_turn(monkeypatch):
    monkeypatch.setattr(timing, "STRETCH", 0)
    calls = []
    times = timing.paired({name: lambda name=name: calls.append(name) for name in "ab"}, 4, CPU)
    assert "".join(calls[-8:]) == "abbaabba"
    assert all(len(each.clock) == len(each.wall) == 4 for each in times.values())


def test_quiet_restores_what_it_changed():
    before = torch.get_num_threads(), gc.isenabled(), os.sched_getaffinity(0)
    with timing.quiet():
        assert (torch.get_num_threads(), gc.isenabled(), len(os.sched_getaffinity(0))) == (1, False, 1)
    assert (torch.get_num_threads(), gc.isenabled(), os.sched_getaffinity(0)) == before


def test_products_are_counted_without_the_lowest_derivative():
    setup = Setup.build(tiny("W1"))  # 64-5-10, 4 peers, 1 example
    assert limit.operations(setup) == 4 * 2 * (2 * 64 * 5 + 3 * 5 * 10)


def test_ledgers_are_written_and_timed():
    facts = ledgers.ledger_share(Setup.build(tiny("W1")), seconds=0.05)
    assert facts["rounds"] >= 1
    assert 0 < facts["share"] < 1


def test_a_loop_round_uses_every_peers_own_examples():
    setup = Setup.build(tiny("W4"))
    loop = PeerLoop(setup)
    x, y = loop._examples(2)
    rows = setup.examples.x[12:18]
    assert (rows == x).all(1).any()
    assert len(y) == 1


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [({"workloads": ["W9"]}, ("bench.unknown", "workload='W9'")), ({"device": "cuda"}, ("compute.no-gpu",))],
)
def test_wrong_input_is_refused(monkeypatch, arguments, refusal: tuple[str, ...]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ScenarioError, *refusal):
        bench.main(**{"workloads": [], **arguments})


def test_a_measurement_that_cannot_be_had_gives_the_reason():
    result = {}

    def missing():
        raise RunError("no such thing here")

    bench._try(result, "relay", missing)
    assert result == {"left_out": ["relay: left out, no such thing here"]}


def test_engine_is_the_real_one():
    engine = Setup.build(tiny("W1")).engine()
    assert type(engine) is Engine
    assert engine.algorithm.name == "privsgp"
