"""Local optimizers and schedules of the rate: torch's numbers, a resumed run, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Build, Tiny

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import LearningRate
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Experiment
from flower_privdec.models import flatten, unflatten

OPTIMIZERS: dict[str, tuple[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ("{name: sgd}", lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": ("{name: momentum, momentum: 0.8}", lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
    "adam": ("{name: adam, beta2: 0.99, eps: 1.0e-3}", lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99), 1e-3)),
}
ALONE = ("algorithm.name=local", "privacy=none", "data.batch={sampling: full}", "algorithm.learning_rate=0.1")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torch_s(name: str, build: Build) -> None:
    text, make = OPTIMIZERS[name]
    experiment = build(*ALONE, f"algorithm.optimizer={text}", "rounds=4")
    rows = testing.run_rounds(experiment, 4).state.rows["x"]
    own, loss = experiment.own, experiment.loss
    for peer, part in enumerate(own.examples.parts):
        module = unflatten(experiment.module, experiment.initial)
        x, y = own.examples.x[part].double(), own.examples.y[part]
        optimizer = make(module.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            loss.value(module(x), y).mean().backward()
            optimizer.step()
        torch.testing.assert_close(rows[peer], flatten(module), rtol=1e-10, atol=1e-12)


def test_sgd_is_what_no_optimizer_is(build: Build) -> None:
    plain, named = (
        testing.run_rounds(build("privacy=none", *more), 3).state.rows["x"]
        for more in ((), ("algorithm.optimizer={name: sgd}",))
    )
    torch.testing.assert_close(named, plain, rtol=1e-12, atol=1e-14)


def test_an_optimizer_sees_only_noised_gradients(build: Build) -> None:
    plain, adam = build("rounds=2"), build("rounds=2", "algorithm.optimizer={name: adam}")
    assert plain.own.protection is not None
    assert adam.own.protection is not None
    assert np.array_equal(plain.own.protection.noise_multipliers, adam.own.protection.noise_multipliers)
    first = testing.run_rounds(adam, 2).state.rows["optimizer.first"]
    assert (first != 0).all()  # every number of a moment has noise


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_resumed_run_follows_the_same_trajectory(name: str, tiny: Tiny, tmp_path: Path) -> None:
    text = OPTIMIZERS[name][0]
    scenario = tiny(f"algorithm.optimizer={text}", "algorithm.learning_rate_schedule=cosine")
    run(Experiment.build(scenario), tmp_path / "whole")
    stopped = Run(Experiment.build(scenario), tmp_path / "parts")
    for _ in range(3):
        stopped.advance()
        if stopped.round_index >= 4:
            break
    stopped.close()
    assert 0 < stopped.round_index < 6
    run(Experiment.build(scenario), tmp_path / "parts", resume=True)
    whole, parts = (load_file(tmp_path / folder / "checkpoint") for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys() > {"optimizer.first"}
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize(
    ("decay", "cosine", "warmup", "expected"),
    [
        (0.0, False, 0.5, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1]),
        (0.5, True, 0.0, [1, 1, 1, 1, 1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4]),
        (0.0, True, 0.5, [1 / 4, 2 / 4, 3 / 4, 1, 1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4]),
        (1.0, True, 0.0, [(1 + np.cos(np.pi * k / 8)) / 2 for k in range(8)]),
    ],
)
def test_the_rate_rises_and_falls(decay: float, cosine: bool, warmup: float, expected: list[float]) -> None:
    rate = LearningRate(np.array([2.0, 0.5]), decay, 8, cosine=cosine, warmup=warmup)
    for k, share in enumerate(expected):
        np.testing.assert_allclose(rate.at(k), [2.0 * share, 0.5 * share], rtol=1e-12)


def test_a_scenario_names_the_schedule(build: Build) -> None:
    rate = build(
        "rounds=4", "algorithm.learning_rate_warmup=0.5", "algorithm.learning_rate_schedule=cosine"
    ).learning_rate
    assert [rate.at(k)[0] for k in range(4)] == pytest.approx([0.25, 0.5, 0.5, 0.25])


@pytest.mark.parametrize(
    "name", ["privsgp-vr", "adp2-sgd", "scaffold", "dp-net-fleet", "feddeper", "dp-cga", "pdsl", "dp-dda"]
)
def test_an_algorithm_whose_steps_must_be_plain_says_why(name: str, tiny: Tiny) -> None:
    rate = "" if name == "dp-dda" else ", learning_rate: 0.1"
    with raises(ScenarioError, "algorithm.optimizer", names="algorithm"):
        tiny(f"algorithm={{name: {name}{rate}, optimizer: {{name: adam}}}}")


def test_a_key_of_another_optimizer_is_refused(tiny: Tiny) -> None:
    with raises(ScenarioError, "optimizer.key", names="beta1"):
        tiny("algorithm.optimizer={name: momentum, beta1: 0.5}")


def test_noise_that_cancels_between_peers_needs_plain_steps(tiny: Tiny) -> None:
    with raises(ScenarioError, "algorithm.optimizer", names="cancelling"):
        tiny("algorithm.optimizer={name: adam}", "privacy.noise={kind: cancelling, colluding: 1}")
