"""Averaged iterates: what they are, that they are what is handed out, at no ε, and what refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Build, Tiny

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.peer.trainer import network_mixing

EMA = "algorithm.average={kind: ema, decay: 0.7}"


@pytest.mark.parametrize("name", ["privsgp", "d-psgd", "fedavg", "local"])
def test_an_average_covers_the_rows_of_all_rounds(name: str, build: Build) -> None:
    settings = [f"algorithm.name={name}", "topology.name=complete", "rounds=5"]
    experiment, plain = build(*settings, EMA, "privacy=none"), build(*settings, "privacy=none")
    cohort = plain.cohort()
    engine = Engine(plain.algorithm, cohort, plain.initial_state(cohort))
    averages: dict[str, torch.Tensor] = {}
    for k in range(5):
        engine.round()
        beta = min(0.7, k / (k + 1))
        for row in experiment.algorithm.averaged:
            now = engine.state.rows[row]
            averages[row] = now.clone() if k == 0 else beta * averages[row] + (1 - beta) * now
    rows = testing.run_rounds(experiment, 5).state.rows
    assert torch.equal(rows["x"], engine.state.rows["x"])  # the iterates are as without
    for row, value in averages.items():
        torch.testing.assert_close(rows[f"average.{row}"], value, rtol=1e-12, atol=1e-14)
    expected = averages["x"] / averages["w"][:, None] if "w" in averages else averages["x"]
    torch.testing.assert_close(experiment.algorithm.models(rows), expected, rtol=1e-12, atol=1e-14)


def test_averages_are_evaluated_and_written_and_spend_nothing(tiny: Tiny, tmp_path: Path) -> None:
    plain, averaged = (run(Experiment.build(tiny(*more)), tmp_path / str(len(more))) for more in ((), (EMA,)))
    assert [row["epsilon"] for row in plain["privacy"]] == [row["epsilon"] for row in averaged["privacy"]]
    models, rows = load_file(tmp_path / "1" / "model.safetensors"), load_file(tmp_path / "1" / "checkpoint")
    mean = rows["average.x"].sum(0) / rows["average.w"].sum()
    assert torch.equal(models["mean/1.weight"].flatten(), mean[:640])
    peer = rows["average.x"][2] / rows["average.w"][2]
    assert torch.equal(models["peer-2/1.weight"].flatten(), peer[:640])
    assert averaged["consensus_distance"] < plain["consensus_distance"]


def test_a_resumed_run_has_the_same_averages(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny(EMA)), tmp_path / "whole")
    stopped = Run(Experiment.build(tiny(EMA)), tmp_path / "parts")
    stopped.advance()
    stopped.close()
    run(Experiment.build(tiny(EMA)), tmp_path / "parts", resume=True)
    whole, parts = (load_file(tmp_path / folder / "checkpoint") for folder in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_workers_change_no_bit_of_an_average(tiny: Tiny, tmp_path: Path) -> None:
    for workers in (1, 2):
        run(Experiment.build(tiny(EMA, "compute.memory_mib=16")), tmp_path / str(workers), workers=workers)
    one, two = (load_file(tmp_path / folder / "checkpoint") for folder in ("1", "2"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_final_mixing_is_of_the_averages(build: Build) -> None:
    experiment = build(EMA, "rounds=3")
    state = testing.run_rounds(experiment, 3).state
    exchange, mixing = experiment.algorithm.final_exchange, experiment.mixing
    assert mixing is not None
    mean = experiment.algorithm.mean_model(state.rows)
    for _ in range(40):
        exchange.together(state, mixing, {}).apply_(state)
        state.round_index += 1
    torch.testing.assert_close(experiment.algorithm.models(state.rows), mean.expand(4, -1), rtol=1e-8, atol=1e-9)


def test_averages_are_counted_in_memory(build: Build) -> None:
    from flower_privdec.experiment.memory_estimate import memory_need

    plain, averaged = memory_need(build()), memory_need(build(EMA))
    d = build().initial.numel()
    assert averaged.state - plain.state == 4 * d * 8


def test_algorithms_without_averages_say_why(tiny: Tiny) -> None:
    with raises(ScenarioError, "algorithm.average", names="average"):
        tiny("algorithm={name: dp-dda, average: {decay: 0.9}}")
    with raises(ScenarioError, "algorithm.average", names="asynchronous"):
        network_mixing(Agreement.of(tiny(EMA)))
    network_mixing(Agreement.of(tiny(EMA, "network.mode=synchronous")))


def test_a_budget_that_is_spent_ends_no_average(build: Build) -> None:
    rows = testing.run_rounds(build(EMA, "privacy.noise_multiplier=0.9", "rounds=8"), 8).state.rows
    assert np.isfinite(rows["average.x"].numpy()).all()
