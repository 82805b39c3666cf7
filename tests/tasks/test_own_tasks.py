"""Losses and metrics of a user's own: what they come to, what they cannot do, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pages import ROOT, fences
from raising import raises
from salts import pin_salts
from tasks import TASKS
from tiny_scenario import Build
from torch import Tensor
from user_tasks import gaussian, near

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.cli import main
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.planner.optimal_rounds import optimum
from flower_privdec.reporting.console import print_summary
from flower_privdec.scenario import load_scenario
from flower_privdec.scenario.loading import own_parts
from flower_privdec.tasks.losses import LOSSES
from flower_privdec.tasks.own_losses import own_loss

NUMBERS = TASKS["numbers"][0]
OWN = "task={{loss: {{module: 'user_tasks:{}', targets: {}}}}}"
GAUSSIAN = (
    "task={loss: {module: 'user_tasks:gaussian', targets: numbers, outputs: 2}, "
    "metrics: [{module: 'user_tasks:nothing', better: lower}]}"
)


def last(experiment: Experiment, rounds: int = 4) -> Tensor:
    return testing.run_rounds(experiment, rounds).state.rows["x"]


@pytest.mark.parametrize(
    ("own", "named", "settings"),
    [
        (OWN.format("cross_entropy", "classes"), "task.loss=cross-entropy", []),
        (
            OWN.format("cross_entropy", "classes"),
            "task.loss=cross-entropy",
            ["model={module: 'user_models:convolutional'}"],
        ),
        (OWN.format("cross_entropy", "classes"), "task.loss=cross-entropy", ["model={module: 'user_models:unproved'}"]),
        (OWN.format("squares", "numbers"), "task.loss=mse", [NUMBERS]),
    ],
    ids=["stacked", "factored", "vmap", "numbers, changed in place"],
)
@pytest.mark.parametrize("sampling", ["poisson, size: 4", "full"])
def test_an_own_loss_is_what_the_named_one_is(
    build: Build, alike: Callable[..., Experiment], own: str, named: str, settings: list[str], sampling: str
) -> None:
    more = [*settings, f"data.batch={{sampling: {sampling}}}", "privacy.clip_norm=0.2"]
    expected = build(named, *more)
    found = alike(build(own, *more), expected)
    assert (last(expected) - expected.initial).abs().max() > 1e-3
    torch.testing.assert_close(last(found), last(expected), rtol=0, atol=1e-12)


def test_a_loss_of_several_outputs_is_learned(build: Build, tmp_path: Path) -> None:
    settings = [NUMBERS, "privacy=none", "rounds=40", "algorithm.learning_rate=0.05"]
    metric = "{module: 'user_tasks:near', share: true, name: near}"
    experiment = build(*settings, GAUSSIAN)
    assert experiment.module[-1].out_features == 2  # type: ignore[index]
    summary = run(experiment, tmp_path / "gaussian")
    x, y = experiment.public.x.double(), experiment.public.y.double()
    outputs = experiment.kernel.logits(torch.zeros_like(experiment.initial)[None], x)[0]
    at_zero = torch.stack([gaussian(*pair) for pair in zip(outputs, y, strict=True)]).mean()
    assert summary["loss"]["mean_model"] < float(at_zero)
    assert summary["nothing"] == dict.fromkeys(("mean_model", "peer_mean", "peer_min", "peer_max"))
    print_summary(summary, tmp_path)
    other = run(build(*settings, f"task={{loss: mse, metrics: [{metric}, rmse]}}"), tmp_path / "near")
    assert other["metrics"]["near"] == {"title": "near", "high": True, "share": True}
    assert 0 < other["near"]["mean_model"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "near" / "metrics.jsonl").read_text().splitlines()]
    assert {"near", "rmse", "loss"} <= lines[-1].keys()


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_runs_of_own_metrics_are_reported(tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(tiny_text)
    ours = "task={loss: mse, metrics: [{module: 'user_tasks:near', better: lower}]}"
    settings = [NUMBERS, "privacy=none", "algorithm.learning_rate=0.05"]

    def command(*words: str | Path) -> None:
        with pytest.raises(SystemExit) as left:
            main.main(list(map(str, words)))
        assert left.value.code == 0

    for name, task in (("own", ours), ("rmse", "task.loss=mse")):
        more = [part for setting in (*settings, task, f"name={name}") for part in ("--set", setting)]
        command("run", scenario, *more, "--out", tmp_path / name)
    assert (tmp_path / "own" / "plots" / "near.png").exists()
    command("report", tmp_path / "own", tmp_path / "rmse", "--out", tmp_path / "page.html")
    said, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    assert "near 0." in said
    assert "RMSE" in said
    assert "the runs have different metrics" in page
    assert "Test near" in page
    assert "Test RMSE" in page


@pytest.mark.parametrize("name", ["words", "decile"])
def test_the_pages_own_task_is_learned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for fence in fences(ROOT / "docs" / "how-to" / "researcher.md"):
        if fence.title is not None:
            Path(fence.title).write_text(fence.text)
    scenario = load_scenario(f"{name}.yaml")
    summary = run(Experiment.build(scenario), tmp_path / "run")
    first = summary[next(iter(summary["metrics"]))]["mean_model"]
    assert first > 0.7  # the code on the page keys the noise: its words move this by some hundredths
    assert max(row["epsilon"] for row in summary["privacy"]) <= 3


# --- it cannot break privacy ---


@pytest.mark.parametrize("loss", ["huge", "cross_entropy"])
@pytest.mark.parametrize(
    "model", ["{name: softmax}", "{module: 'user_models:convolutional'}", "{module: 'user_models:unproved'}"]
)
def test_the_laws_hold_for_own_losses(build: Build, loss: str, model: str) -> None:
    settings = ["rounds=3", "data.samples=48", "privacy.clip_norm=0.05", "algorithm.learning_rate=2.0"]
    experiment = build(*settings, OWN.format(loss, "classes"), f"model={model}", "data.batch.size=4")
    testing.assert_sensitivity(experiment, 3, 0, 5)
    testing.assert_noise(experiment, 3)


def test_an_own_loss_never_sees_two_examples() -> None:
    loss = own_loss("user_tasks:cross_entropy", "classes")
    outputs = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10).view(2, 5) % 3
    alone = torch.stack([loss.derivative(outputs[i, b], labels[i, b]) for i in range(2) for b in range(5)])
    torch.testing.assert_close(loss.derivative(outputs, labels).flatten(0, 1), alone, rtol=0, atol=1e-15)
    torch.testing.assert_close(alone.view_as(outputs), LOSSES["cross-entropy"].derivative(outputs, labels))
    outputs[0, 1] = torch.nan
    assert torch.isnan(loss.derivative(outputs, labels)).any(-1).sum() == 1
    assert loss.derivative(outputs[:, :0], labels[:, :0]).shape == (2, 0, 3)


def test_a_losss_error_on_private_examples_is_withheld() -> None:
    loss = own_loss("user_tasks:by_hand", "classes")
    with raises(RunError, "code.withheld", r"task\.loss\.module='user_tasks:by_hand'") as caught:
        loss.derivative(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_code_of_a_loss_but_not_metric_changes_runs(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    pin_salts(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from user_tasks import cross_entropy, failing\ndef loss(o, t):\n    return cross_entropy(o, t)  # {}\n"
    metric = "def metric(o, t):\n    return 1  # {}\n"
    names = []
    for which, (one, other) in enumerate((("a", "a"), ("b", "a"), ("a", "b"))):
        (tmp_path / "ours.py").write_text(source.format(one))
        (tmp_path / "theirs.py").write_text(metric.format(other))
        for module in ("ours", "theirs"):
            sys.modules.pop(module, None)
        experiment = build(
            "task={loss: {module: 'ours:loss'}, metrics: [{module: 'theirs:metric'}]}", f"name=run{which}"
        )
        names.append(experiment.own.run.id)
    assert names[0] == names[2] != names[1]


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (OWN.format("pair", "classes"), ("loss.not-a-number", r"\[2\]")),
        (OWN.format("by_hand", "classes"), ("loss.not-per-example", r".*torch\.where")),
        (OWN.format("number", "classes"), ("loss.not-per-example",)),
        (OWN.format("together", "classes"), ("loss.not-per-example",)),
        (OWN.format("gaussian", "classes"), ("loss.not-per-example",)),
        (OWN.format("absent", "classes"), ("code.no-name", "task.loss.module='user_tasks:absent': user_tasks")),
        (
            OWN.format("NOT_A_FUNCTION", "classes"),
            ("code.kind",),
        ),
        (
            OWN.format("squares", "images"),
            ("scenario.literal_error", "task.loss.targets='images'"),
        ),
        ("task.loss={modul: a}", ("scenario.extra_forbidden", "'task.loss.modul'")),
        (OWN.format("squares", "numbers"), ("data.targets", "data.dataset=digits")),
        ("task.metrics=[{module: 'user_tasks:failing'}]", ("metrics.fails",)),
        ("task.metrics=[{module: 'user_tasks:absent'}]", ("code.no-name", "user_tasks")),
        ("task.metrics=[{module: 'user_tasks:near', name: loss}]", ("metrics.name-taken",)),
        ("task.metrics=[{module: 'user_tasks:near', name: '../x'}]", ("scenario.string_pattern_mismatch",)),
        ("task.metrics=[accuracy, {module: 'user_tasks:near', name: accuracy}]", ("metrics.repeated",)),
        (
            "task={loss: {module: 'user_tasks:cross_entropy', outputs: 3}}",
            ("metrics.unfit",),
        ),
        ("task={loss: {module: 'user_tasks:cross_entropy'}, metrics: [log-loss]}", ("metrics.unfit", "log-loss")),
    ],
)
def test_unfit_own_tasks_are_refused_before_work_starts(build: Build, settings: str, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as caught:
        build(settings)
    assert "\n" not in str(caught.value)


def test_a_loss_below_zero_bounds_no_gap(build: Build) -> None:
    experiment = build(NUMBERS, GAUSSIAN, "algorithm={name: privsgp-vr, learning_rate: 0.1}")
    with torch.no_grad():
        experiment.module[-1].bias[1] = -3.0  # type: ignore[index]
        experiment.module[-1].weight.zero_()  # type: ignore[index]
    experiment.public.y.zero_()
    assert "plan.initial_gap is missing" in optimum(experiment)["optimal_rounds_note"]


def test_runs_are_compared_by_an_own_metric(build: Build) -> None:
    task = "task={loss: mse, metrics: [{module: 'user_tasks:near'}]}"
    scenario = build(NUMBERS, "privacy=none", task, "algorithm.learning_rate=0.05").scenario
    (row,) = fp.compare(scenario, seeds=[1, 2]).rows
    assert 0 < row["near"]["mean"] <= 1
    assert 0 < row["peer-near"]["mean"] <= 1
    assert own_parts(scenario) == []
    assert own_parts(scenario, metrics=True) == [near]
