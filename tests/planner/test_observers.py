"""What a scenario promises to each observer, in words, from its declarations."""

from __future__ import annotations

import json

import pytest
from tiny_scenario import TINY
from variants import VARIANTS, settings_for

from flower_privdec.cli.main import main
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.planner.observers import privacy_statement, statement_text
from flower_privdec.privacy.mechanism.declared import Drawing, joint_release
from flower_privdec.privacy.mechanism.events import EVERYBODY
from flower_privdec.scenario import parse_scenario

SHORT = ["rounds=4", "data.samples=48"]
BATCH = "data.batch={sampling: poisson, size: 4}"
CANCELLING = "privacy.noise={kind: cancelling, colluding: 1, secrets: complete}"


def experiment_of(*overrides: str) -> Experiment:
    return Experiment.build(parse_scenario(TINY, overrides=[*SHORT, *overrides]))


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_statement_names_every_sum_and_undercounts_no_observer(variant: list[str]) -> None:
    batch = [] if any(setting.startswith("data.batch") for setting in variant) else [BATCH]
    experiment = experiment_of(*settings_for(*variant), *batch)
    plan = experiment.own.protection
    assert plan is not None
    statement = privacy_statement(experiment)
    ends = [min(plan.epsilons(4)), max(plan.epsilons(4))]
    towards = {row["observer"]: row["epsilon"] for row in statement["observers"]}
    assert towards["all other peers, relays and servers together"] == ends
    assert ("one neighbour, by its replies" in towards) == ("replies" in plan.others)
    text = statement_text(statement)
    for step in range(4):
        for part in experiment.algorithm.released(step, plan_drawing(experiment)) or ():
            assert f"the sum {part.name!r}" in text
            assert f"moves it by {part.drawn:g} clip norms" in text


def plan_drawing(experiment: Experiment) -> Drawing:
    return drawings_of(experiment, experiment.own.peers, experiment.own.sampler)[0]


def test_cancelling_noise_has_an_epsilon_against_all_others() -> None:
    experiment = experiment_of(BATCH, CANCELLING, "topology.name=complete")
    plan = experiment.own.protection
    assert plan is not None
    statement = privacy_statement(experiment)
    towards = {row["observer"]: row["epsilon"][1] for row in statement["observers"]}
    assert [count for count, _ in statement["by_colluders"]] == [0, 1, 2, 3]
    assert "colluders" in statement_text(statement)
    assert towards["up to 1 other peers, relays and servers together"] == max(plan.epsilons(4))
    assert towards["all other peers together"] == max(plan.epsilons(4, EVERYBODY)) > max(plan.epsilons(4))


def test_without_privacy_every_observer_has_no_bound() -> None:
    statement = privacy_statement(experiment_of(BATCH, "privacy=none"))
    assert [row["epsilon"] for row in statement["observers"]] == [["inf", "inf"]]
    assert "∞" in statement_text(statement)


def test_a_step_that_declares_nothing_is_named() -> None:
    experiment = experiment_of(BATCH, "privacy={epsilon: null, noise_multiplier: 1.0, delta: 1.0e-3}")
    experiment.algorithm.released = lambda step, drawing: None  # type: ignore[method-assign]
    assert joint_release(None, plan_drawing(experiment)) is not None
    assert "a step declares nothing: ε = ∞" in statement_text(privacy_statement(experiment))


def test_the_command_prints_words_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as done:
            main(["plan", "digits", "--privacy", *more])
        assert done.value.code == 0
    printed = capsys.readouterr().out
    text, _, data = printed.partition("{")
    assert "hops" in text
    assert "one example of one peer" in text
    assert json.loads("{" + data)["observers"][0]["epsilon"][1] <= 3.0
