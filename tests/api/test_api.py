"""The Python API: scenarios, runs and results, as good as the command line."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_sections import SECTIONS
from paths import ROOT
from raising import raises

import flower_privdec as fp
from flower_privdec.api.run_result import OTHER_NAMES
from flower_privdec.common.errors import ArgumentError
from flower_privdec.engine.run import run as run_in_process
from flower_privdec.scenario import parse_scenario, to_yaml

# --- the package ---


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'flwr', 'rich', 'pandas'}"
    code = f"import sys, flower_privdec as fp; dir(fp); print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


def test_every_name_of_the_api_is_there_and_described() -> None:
    assert set(fp.__all__) <= set(dir(fp))
    for name in fp.__all__:
        assert getattr(fp, name).__doc__ or name.startswith("On")
    with pytest.raises(AttributeError):
        fp.rnu  # type: ignore[attr-defined]  # noqa: B018


def test_the_wheel_ships_the_whole_typed_package() -> None:
    assert (ROOT / "flower_privdec" / "py.typed").is_file()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["flower_privdec"], "force-include": {"scenarios": "flower_privdec/scenarios"}}


# --- scenarios ---


def test_a_scenario_of_python_is_that_of_a_file(tiny_text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text)
    scenario = fp.make_scenario(SECTIONS)
    assert scenario == fp.load_scenario(path) == fp.make_scenario(**SECTIONS) == parse_scenario(tiny_text)
    assert fp.make_scenario(scenario) == scenario
    assert to_yaml(fp.make_scenario(scenario)) == to_yaml(scenario)


def test_settings_change_values_and_sections_replace_sections(tiny_text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text)
    for scenario in (
        fp.load_scenario(
            path, {"privacy.epsilon": 1, "evaluation.peer_samples": 10}, rounds=9, topology={"name": "ring"}
        ),
        fp.make_scenario(
            SECTIONS, {"privacy.epsilon": 1, "evaluation.peer_samples": 10}, rounds=9, topology={"name": "ring"}
        ),
    ):
        private = scenario.private
        assert private is not None
        assert (private.epsilon, private.delta) == (1, 1e-3)
        assert (scenario.rounds, scenario.topology.name) == (9, "ring")
        assert (scenario.evaluation.every, scenario.evaluation.peer_samples) == (2, 10)
    assert fp.make_scenario(SECTIONS, privacy="none").private is None
    assert SECTIONS["privacy"] == {"epsilon": 3.0, "delta": 1.0e-3}  # what is given stays as it is


def test_numbers_and_paths_of_python_are_taken(tmp_path: Path) -> None:
    scenario = fp.make_scenario(
        SECTIONS,
        {"data.dataset": "npz", "data.root": tmp_path / "a.npz", "privacy.epsilon": (1, 2, 3, np.float64(4))},
        rounds=np.int64(7),
        model={"name": "mlp", "hidden": (8, np.int32(4))},
    )
    assert scenario.data.root == str(tmp_path / "a.npz")
    assert scenario.private is not None
    assert scenario.private.epsilon == (1, 2, 3, 4)
    assert (scenario.rounds, scenario.model.hidden) == (7, [8, 4])


@pytest.mark.parametrize(
    ("settings", "sections", "refusal"),
    [
        ({}, {"rounds": 0}, ("scenario.greater_than_equal", "rounds=0")),
        ({}, {"raunds": 1}, ("scenario.extra_forbidden", "'raunds'")),
        ({"privacy.epsilom": 1}, {}, ("scenario.extra_forbidden", r"'privacy\.epsilom'")),
        ({"privacy.epsilon": float("nan")}, {}, ("scenario.not-positive", r"privacy\.epsilon=nan")),
        ({"data.batch.size": 12.5}, {}, ("scenario.int_type", r"data\.batch\.size=12\.5")),
        (
            {},
            {"algorithm": {"name": "privsgb", "learning_rate": 1}},
            ("scenario.union_tag_invalid", r"algorithm\.name='privsgb'"),
        ),
        ({}, {"model": {3: "softmax"}}, ("api.mapping",)),
        ({}, {"data": {"batch": {"size": 3}}}, ("scenario.missing", r"'data\.dataset'")),
        ({}, {"name": None}, ("scenario.string_type", "name=None")),
    ],
)
def test_a_mistake_is_one_line(settings: dict[str, Any], sections: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with raises(fp.ScenarioError, *refusal) as error:
        fp.make_scenario(SECTIONS, settings, **sections)
    assert "\n" not in str(error.value)


WRONG = [
    (lambda: fp.run({"name": "x"}), "api.argument", "dict .*make_scenario"),
    (lambda: fp.plan(None), "api.argument", "NoneType"),
    (lambda: fp.run(fp.make_scenario(SECTIONS), out=""), "api.path", "out=''"),
    (lambda: fp.run(fp.make_scenario(SECTIONS), out=3), "api.path", "out=3"),
    (lambda: fp.run(fp.make_scenario(SECTIONS), on_evaluation=3), "api.argument", "on_evaluation=3"),
    (lambda: fp.load_scenario(b"digits"), "api.path", "path=b'digits'"),
    (lambda: fp.load_scenario("x" * 300), "scenario.unknown-name", "xxx"),
    (lambda: fp.load_scenario("digits", ["rounds=1"]), "api.mapping", r"settings=\['rounds=1'\]"),
    (lambda: fp.load_scenario("digits", {1: 2}), "api.mapping", r"settings=\{1: 2\}"),
    (lambda: fp.make_scenario("digits"), "api.mapping", "base='digits'"),
    (lambda: fp.make_scenario([("name", "x")]), "api.mapping", "base="),
    (lambda: fp.make_scenario(SECTIONS, {"privacy.epsilon": 10**400}), "scenario.not-positive", r"privacy\.epsilon="),
    (lambda: fp.make_scenario(SECTIONS, plan=_loop()), "api.mapping", r"plan\.loop\.loop"),
    (lambda: fp.load_run(""), "api.path", "folder=''"),
    (lambda: fp.load_run(None), "api.path", "folder=None"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), ["sgp"], seeds=3), "api.argument", "seeds=3"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), ["sgp"], jobs="2"), "api.argument", "jobs='2'"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), [None]), "api.argument", "algorithms: None"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), {1: "sgp"}), "api.argument", "label 1 must be text"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), metrics="loss"), "api.argument", "metrics='loss' must be a list"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), folder=b"x"), "api.path", "folder=b'x'"),
    (lambda: fp.compare(fp.make_scenario(SECTIONS), folder=__file__), "api.argument", "is a file"),
    (lambda: fp.make_scenario(SECTIONS, seed=-0.0), "scenario.int_type", "write 0$"),
    (
        lambda: fp.make_scenario(SECTIONS, {"algorithm.learning_rate": np.ones(4)}),
        "scenario.per-peer",
        r"array\(\[1.* give its \.tolist\(\)",
    ),
    (
        lambda: fp.make_scenario(SECTIONS, task={"metrics": [lambda outputs, targets: 0.5]}),
        "api.metric-name",
        "a lambda, .* made by def",
    ),
    (
        lambda: fp.make_scenario(SECTIONS, task={"loss": torch.nn.MSELoss}),
        "api.class",
        r"task.loss is the class MSELoss.*MSELoss\(\)",
    ),
    (
        lambda: fp.make_scenario(
            SECTIONS, data=dict.fromkeys(("train", "test"), (np.ma.masked_greater(np.ones((9, 2)), 0), np.zeros(9)))
        ),
        "api.data",
        r"data.train: x is an array with masked numbers",
    ),
]


def _loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    return loop


@pytest.mark.parametrize(("call", "code", "names"), WRONG)
def test_an_argument_that_is_something_else_is_one_line(
    call: Callable[[], Any], code: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(fp.ScenarioError, code, names) as error:
        call()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_file_names_its_line(tiny_text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text.replace("rounds: 6", "rounds: 0"))
    with raises(fp.ScenarioError, "scenario.greater_than_equal", r"tiny\.yaml:4: rounds=0"):
        fp.load_scenario(path)
    with raises(fp.ScenarioError, "scenario.greater_than_equal", r"tiny\.yaml: rounds=-1"):
        fp.load_scenario(path, rounds=-1)
    with raises(fp.ScenarioError, "scenario.unreadable"):
        fp.load_scenario(tmp_path / "absent.yaml")


# --- runs ---


def test_a_run_says_what_the_command_line_would(tmp_path: Path) -> None:
    scenario = fp.make_scenario(SECTIONS)
    seen: list[dict[str, Any]] = []
    result = fp.run(scenario, out=tmp_path / "run", on_evaluation=seen.append)
    assert result.folder == tmp_path / "run"
    assert [record["round"] for record in result.metrics] == [2, 4, 6]
    assert seen == result.metrics
    assert result.summary == json.loads((tmp_path / "run" / "summary.json").read_text()) | {"finished": True}
    assert [row["peer"] for row in result.privacy] == [0, 1, 2, 3]
    assert 2.9 < result.privacy[0]["epsilon"] <= 3
    assert (result.privacy[0]["scope"], result.finished) == ("this run alone", True)
    assert str(result).startswith("tiny: mean model ")


def test_a_file_runs_with_ones_own_thread_count(tiny_text: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fp.run(tmp_path / "tiny.yaml").scenario == fp.make_scenario(SECTIONS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_finished_run_goes_on(tmp_path: Path) -> None:
    first = fp.run(fp.make_scenario(SECTIONS, rounds=4), out=tmp_path / "run")
    with raises(fp.ScenarioError, "run.budget-spent", r"privacy\.epsilon"):
        fp.run(first.scenario, out=tmp_path / "run", resume=True, rounds=6)
    larger = fp.make_scenario(first.scenario, {"privacy.epsilon": 6.0})
    second = fp.run(larger, out=tmp_path / "run", resume=True, rounds=6)
    assert (second.finished, second.summary["rounds"]) == (True, 6)
    assert 5 < second.privacy[0]["epsilon"] <= 6


def test_a_temporary_folder_lives_as_long_as_its_result() -> None:
    result = fp.run(fp.make_scenario(SECTIONS, rounds=2))
    folder = result.folder
    assert (folder / "ledger" / "digits.jsonl").is_file()
    assert result.models.keys() == {"mean", *(f"peer-{i}" for i in range(4))}
    del result
    gc.collect()
    assert not folder.parent.exists()


def test_a_run_that_fails_leaves_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with raises(fp.RunError, "run.diverged"):
        fp.run(fp.make_scenario(SECTIONS, {"algorithm.learning_rate": 1e30}, privacy="none", model={"name": "mlp"}))
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_a_frame_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fp.run(fp.make_scenario(SECTIONS))
    if find_spec("pandas") is not None:
        frame = result.frame()
        assert frame["round"].tolist() == [2, 4, 6]
        assert frame["accuracy.peer_min"].tolist() == [record["accuracy"]["peer_min"] for record in result.metrics]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(fp.ScenarioError, "code.not-installed"):
        result.frame()


# --- callbacks ---


def test_a_run_stopped_by_callback_resumes_exactly(tmp_path: Path) -> None:
    scenario = fp.make_scenario(SECTIONS)
    whole = fp.run(scenario)
    part = fp.run(scenario, out=tmp_path / "run", on_evaluation=lambda metrics: np.bool(metrics["round"] >= 4))
    assert not part.finished
    assert (part.summary["rounds_done"], part.summary["stopped_at"], part.summary["stopped_by"]) == (4, 4, "callback")
    assert [0 < row["epsilon"] < 3 for row in part.privacy] == [True] * 4
    assert part.models["mean"].keys() == whole.models["mean"].keys()
    assert not torch.equal(part.models["mean"]["1.weight"], whole.models["mean"]["1.weight"])
    assert "stopped, 4 of 6 rounds" in str(part)
    rest = fp.run(scenario, out=tmp_path / "run", resume=True)
    assert rest.finished
    assert torch.equal(rest.models["peer-2"]["1.weight"], whole.models["peer-2"]["1.weight"])


def test_a_stopped_runs_models_equal_those_of_fewer_rounds() -> None:
    scenario = fp.make_scenario(SECTIONS, privacy="none")
    part = fp.run(scenario, on_evaluation=lambda metrics: metrics["round"] == 4)
    whole = fp.run(fp.make_scenario(scenario, rounds=4))
    for peer in (None, 0, 3):
        one, other = part.model(peer).state_dict(), whole.model(peer).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_run_stopped_at_its_end_is_finished() -> None:
    assert fp.run(fp.make_scenario(SECTIONS), on_evaluation=lambda metrics: metrics["round"] == 6).finished


def test_callbacks_are_called_at_each_round_evaluation_and_end(tmp_path: Path) -> None:
    calls: list[tuple[str, object]] = []
    callbacks: dict[str, Any] = {
        "on_round": lambda done: calls.append(("round", done)),
        "on_evaluation": lambda metrics: calls.append(("evaluation", metrics["round"])),
        "on_end": lambda result: calls.append(("end", result)),
    }
    result = fp.run(fp.make_scenario(SECTIONS), **callbacks)
    rounds = [event for k in range(1, 7) for event in [("round", k), *([("evaluation", k)] if k % 2 == 0 else [])]]
    assert calls == [*rounds, ("end", result)]
    plain = fp.run(fp.make_scenario(SECTIONS))
    assert torch.equal(result.models["mean"]["1.weight"], plain.models["mean"]["1.weight"])
    calls.clear()
    stopped = fp.run(fp.make_scenario(SECTIONS), **callbacks | {"on_evaluation": lambda metrics: True})
    assert calls == [("round", 1), ("round", 2), ("end", stopped)]
    with raises(fp.ScenarioError, "api.argument", "on_round"):
        fp.run(fp.make_scenario(SECTIONS), on_round=print, runtime="flower")


def test_a_callback_that_raises_or_returns_nonsense_is_reported(tmp_path: Path) -> None:
    with raises(ArgumentError, "api.on-evaluation", "on_evaluation"):
        fp.run(fp.make_scenario(SECTIONS), on_evaluation=lambda metrics: metrics["epsilon"])

    def angry(metrics: dict[str, Any]) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        fp.run(fp.make_scenario(SECTIONS), out=tmp_path / "run", on_evaluation=angry)
    assert fp.run(fp.make_scenario(SECTIONS), out=tmp_path / "run", resume=True).finished  # its ledger is free again


# --- models ---


def test_a_model_is_ready_to_use_and_was_evaluated(tmp_path: Path) -> None:
    scenario = fp.make_scenario(SECTIONS, {"data.test_samples": 100})
    result = fp.run(scenario, out=tmp_path / "run")
    public = fp_public(scenario)
    for run in (result, fp.load_run(tmp_path / "run")):
        module = run.model()
        assert not module.training
        right = module(public.x.double()).argmax(1) == public.y
        assert float(right.double().mean()) == result.metrics[-1]["accuracy"]["mean_model"]
        tried = [run.model(peer)(public.x.double()).argmax(1) == public.y for peer in range(4)]
        assert min(float(right.double().mean()) for right in tried) == result.metrics[-1]["accuracy"]["peer_min"]
    for peer in (-1, 4):
        with raises(fp.ScenarioError, "api.argument", names=rf"peer={peer} .*0 to 3"):
            result.model(peer)


def fp_public(scenario: fp.Scenario) -> Any:
    from flower_privdec.data import read_public

    return read_public(scenario.data, scenario.seed)


def test_a_model_fills_a_module_of_ones_own() -> None:
    result = fp.run(fp.make_scenario(SECTIONS))
    mine = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    assert result.model(1, into=mine) is mine
    assert torch.equal(mine[1].weight, result.models["peer-1"]["1.weight"])
    with raises(fp.ScenarioError, "api.model-misfit", names="size mismatch") as error:
        result.model(into=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9)))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_buffers_and_tied_parameters_of_a_model_come_back(tmp_path: Path) -> None:
    model = {"module": "user_models:tied"}
    result = fp.run(fp.make_scenario(SECTIONS, model=model), out=tmp_path / "run")
    module = fp.load_run(tmp_path / "run").model()
    assert (
        set(result.models["mean"]) == set(module.state_dict()) == {"scale", "first.weight", "last.weight", "out.weight"}
    )
    assert module.first.weight is module.last.weight
    assert torch.equal(module.scale, torch.full((64,), 0.5))


# --- runs from their folders ---


def test_a_folder_gives_what_the_run_gave(tmp_path: Path) -> None:
    result = fp.run(fp.make_scenario(SECTIONS), out=tmp_path / "run")
    again = fp.load_run(str(tmp_path / "run"))
    assert (again.metrics, again.summary, again.privacy) == (result.metrics, result.summary, result.privacy)
    assert again.scenario == result.scenario
    for owner, state in result.models.items():
        assert all(torch.equal(again.models[owner][name], tensor) for name, tensor in state.items())


def test_what_others_call_a_result_is_named(tmp_path: Path) -> None:
    result = fp.run(fp.make_scenario(SECTIONS), out=tmp_path / "run")
    for names in OTHER_NAMES.values():
        for name in names.split():
            with pytest.raises(AttributeError) as caught:
                getattr(result, name)
            remedy = str(caught.value).partition("; use .")[2]
            assert eval(f"result.{remedy.replace('model.pt', str(tmp_path / 'model.pt'))}") is not None
    assert not hasattr(result, "nothing_like_it")
    assert copy.copy(result).summary == result.summary


def test_a_damaged_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    scenario = fp.make_scenario(SECTIONS, rounds=2)
    folder = fp.run(scenario, out=tmp_path / "run").folder
    damages: dict[str, Callable[[], Any]] = {
        r"model\.safetensors: ": lambda: (folder / "model.safetensors").write_bytes(b"no"),
        r"no model\.safetensors": (folder / "model.safetensors").unlink,
    }
    for names, damage in damages.items():
        damage()
        for read in (fp.load_run(folder).model, lambda: fp.load_run(folder).models):
            with raises(fp.ScenarioError, "api.no-model", names) as error:
                read()
            assert "\n" not in str(error.value)
    (folder / "summary.json").unlink()
    (folder / "checkpoint").write_bytes(b"no")
    with raises(fp.ScenarioError, "checkpoint.unreadable"):
        fp.load_run(folder).model()
    (folder / "metrics.jsonl").write_text("{\n{}\n")
    with raises(fp.ScenarioError, "run.metrics-damaged"):
        fp.load_run(folder)
    with raises(fp.ScenarioError, "reporting.not-a-run", names="absent"):
        fp.load_run(tmp_path / "absent")
    with raises(fp.ScenarioError, "reporting.not-a-run", names=r"scenario\.yaml"):
        fp.load_run(tmp_path)


def test_a_run_of_the_command_line_is_read_too(tiny_text: str, tmp_path: Path) -> None:
    from flower_privdec.experiment import Experiment

    run_in_process(Experiment.build(parse_scenario(tiny_text)), tmp_path / "run")
    assert fp.load_run(tmp_path / "run").model(0).training is False


def test_wrong_arguments_are_refused_before_any_write(tmp_path: Path) -> None:
    scenario = fp.make_scenario(SECTIONS, rounds=2)
    with raises(fp.ScenarioError, "api.argument", names=r"runtime='cloud' .*engine, flower"):
        fp.run(scenario, out=tmp_path / "run", runtime="cloud")  # type: ignore[arg-type]
    with raises(fp.ScenarioError, "api.argument", names="resume=True"):
        fp.run(scenario, resume=True)
    assert not (tmp_path / "run").exists()
    fp.run(scenario, out=tmp_path / "run")
    with raises(fp.ScenarioError, "run.folder-taken"):
        fp.run(scenario, out=tmp_path / "run")
