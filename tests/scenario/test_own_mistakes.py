"""Mistakes in parts of a user's own: each is refused in one line before any work starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.common.catalogue import GraphSection, NoiseKeys
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import Count, Fraction, section_from
from flower_privdec.core import Algorithm, Mix
from flower_privdec.core.algorithm import check_algorithm, check_initial
from flower_privdec.data.dataset import embedded
from flower_privdec.experiment import Experiment
from flower_privdec.graph.topology import Graph
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.privacy.noise import NoiseMechanism
from flower_privdec.pushsum.frames import wire_codec
from tests.support.raising import raises

SCENARIO: dict[str, Any] = {
    "name": "own",
    "n_peers": 4,
    "rounds": 2,
    "data": {"dataset": "digits", "samples": 48, "batch": {"size": 4}},
    "model": {"name": "softmax"},
    "algorithm": {"name": "privsgp", "learning_rate": 0.1},
    "topology": {"name": "ring"},
    "privacy": {"epsilon": 3.0, "delta": 1e-3},
}


def own(name: str) -> str:
    return f"{__name__}:{name}"


class Hop(Graph):
    class Section(GraphSection):
        hop: Count = 2


class Silent(Graph):
    """It has no build."""


class Shared(NoiseMechanism):
    class Section(NoiseKeys):
        share: Fraction = 0.5

    def __init__(self, share: float) -> None:
        self.share = share

    def released(self, sums: Any) -> Any:
        return sums


class Secretive(Algorithm):
    weights = "doubly-stochastic"
    program = (lambda cohort, state: None, Mix(("x", "secret")))
    released = one_sum


class Open(Secretive):
    open_rows = ("x", "secret")
    released = one_sum


class Failing(Algorithm):
    weights = "doubly-stochastic"
    released = one_sum

    def step(cohort: Any, state: Any) -> None:  # type: ignore[misc]  # noqa: N805 (a step is a function of these)
        state.missing  # noqa: B018 (it raises)

    program = (step, Mix(("x",)))


class Halves:
    def encode(self, row: Tensor) -> Tensor:
        return row.half()

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return sent.to(like)


class WholeNumbers(Halves):
    def encode(self, row: Tensor) -> Tensor:
        return row.int()


class Cut(Halves):
    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return sent[:3].to(like)


class NoNumbers(Halves):
    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return torch.full_like(like, torch.nan)


class Demanding(Halves):
    def __init__(self, bits: int) -> None:
        self.bits = bits


def built(**sections: Any) -> Experiment:
    return Experiment.build(fp.make_scenario({**SCENARIO, **sections}))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [({"hpo": 2}, "arguments.hpo.*'hop'"), ({"hop": "x"}, "hop='x'"), ({"hop": 0}, "hop=0"), ({"hop": 2.5}, "hop=2.5")],
)
def test_wrong_arguments_of_a_class_name_the_key(arguments: dict[str, Any], names: str) -> None:
    with raises(ScenarioError, "code.arguments", names):
        section_from(Hop.Section, arguments, "topology.module")
    with raises(ScenarioError, "code.arguments", names):
        built(topology={"module": own("Hop"), "arguments": arguments})


@pytest.mark.parametrize("share", ["x", -1.0, float("nan"), 1e25])
def test_arguments_of_own_noise_are_checked_by_its_section(share: object) -> None:
    noise = {"module": own("Shared"), "arguments": {"share": share}}
    with raises(ScenarioError, "code.arguments", "share="):
        built(privacy={"epsilon": 3.0, "delta": 1e-3, "noise": noise})


def test_a_key_beside_a_module_is_told_its_place() -> None:
    with raises(ScenarioError, "scenario.extra_forbidden", "topology.hop.*arguments"):
        built(topology={"module": own("Hop"), "hop": 2})


def test_a_part_without_its_method_is_told_which() -> None:
    with raises(ScenarioError, "code.fails", r"Silent must define build\("):
        built(topology={"module": own("Silent")})


def test_an_algorithm_that_sends_a_closed_row_is_refused() -> None:
    with raises(ScenarioError, "algorithm.open-rows", "'secret'"):
        built(algorithm={"module": own("Secretive"), "learning_rate": 0.1})


def test_initial_returns_each_sent_row_for_every_peer() -> None:
    experiment = built(algorithm={"module": own("Open"), "learning_rate": 0.1})
    algorithm = experiment.algorithm
    check_algorithm(algorithm, "here")
    with raises(ScenarioError, "algorithm.initial", "'secret'"):
        experiment.initial_state(experiment.cohort())
    x = torch.zeros(4, 3)
    check_initial(algorithm, {"x": x, "secret": x}, 4)
    for wrong in (x[:3], torch.tensor(1.0), None):
        with raises(ScenarioError, "algorithm.initial", "'secret'"):
            check_initial(algorithm, {"x": x, "secret": wrong}, 4)  # type: ignore[dict-item]


def test_a_plan_reports_a_failing_step_in_one_line() -> None:
    with raises(ScenarioError, "code.fails", "Failing.*AttributeError"):
        make_plan(built(algorithm={"module": own("Failing"), "learning_rate": 0.1}))


@pytest.mark.parametrize(
    ("x", "labels", "n_train"),
    [
        (np.zeros((10, 2)), np.zeros(9), 5),
        (np.zeros((10, 2)), np.zeros(10), 10),
        (np.zeros((10, 2)), np.zeros(10), 0),
        (np.zeros((10, 2)), np.full(10, 0.5), 5),
        (np.zeros((10, 2)), np.full(10, -1), 5),
        (np.zeros((10, 2)), np.full(10, np.nan), 5),
        (np.full((10, 2), np.inf), np.zeros(10), 5),
    ],
)
def test_embedded_refuses_arrays_that_are_no_dataset(x: np.ndarray, labels: np.ndarray, n_train: int) -> None:
    with raises(ArgumentError, "data.embedded", "dataset mine"):
        embedded(x, labels, n_train, "mine")


@pytest.mark.parametrize("name", ["WholeNumbers", "Cut", "NoNumbers"])
def test_a_codec_that_loses_a_row_is_refused(name: str) -> None:
    wire_codec(own("Halves"))
    with raises(ScenarioError, "network.codec-form", name):
        wire_codec(own(name))


def test_a_codec_that_needs_arguments_is_refused() -> None:
    with raises(ScenarioError, "code.fails", "Demanding.*bits"):
        wire_codec(own("Demanding"))


def test_laws_refuse_more_rounds_than_are_planned() -> None:
    experiment = built()
    with raises(ArgumentError, "testing.rounds", "3"):
        testing.assert_sensitivity(experiment, 3)
    with raises(ArgumentError, "testing.rounds", "3"):
        testing.assert_noise(experiment, 3)
