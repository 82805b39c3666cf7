"""Regression, several labels and tokens: trajectories against plain loops, their data, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import NoiseTape, exponential_graph
from loop_kernel import build_kernel
from raising import raises
from tasks import TASKS
from tiny_scenario import Build
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.data import PublicSet
from flower_privdec.data.drawn_sets import draw_labels, draw_words
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.models import build_model, flatten, parameter_count, unflatten

ROUNDS, RATE, CLIP = 6, 0.2, 0.5
SET_UP = [f"rounds={ROUNDS}", f"privacy.clip_norm={CLIP}"]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numbers": functional.mse_loss,
    "numbers, huber": functional.huber_loss,
    "labels": functional.binary_cross_entropy_with_logits,
    "tokens": functional.cross_entropy,
}


def vr(table: str = "dense") -> str:
    return f"algorithm={{name: privsgp-vr, learning_rate: {RATE}, table: {table}}}"


# --- trajectories ---


def reference_privsgp_vr(experiment: Experiment, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, NoiseTape]:
    """PrivSGP-VR, Algorithm 1: one module, one example, one backward pass at a time, in float64."""
    own, model = experiment.own, experiment.module
    x = experiment.initial.repeat(4, 1)
    w, tape = torch.ones(4, dtype=torch.float64), NoiseTape(len(experiment.initial))
    assert own.protection is not None

    def gradients(i: int, z: Tensor, local: np.ndarray) -> Tensor:
        found = []
        for row in own.examples.parts[i][local]:
            example, target = own.examples.x[row][None], own.examples.y[row][None]
            if example.is_floating_point():
                example = example.double()
            value = loss(unflatten(model, z)(example), target.double() if target.is_floating_point() else target)
            g = torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))])
            found.append(g * min(1.0, CLIP / max(float(g.norm()), 1e-300)))
        return torch.stack(found) if found else torch.zeros(0, len(z), dtype=torch.float64)

    tables = [gradients(i, x[i], np.arange(len(own.examples.parts[i]))) for i in range(4)]
    for k in range(ROUNDS):
        half = x.clone()
        for i in range(4):
            batch = own.sampler.batch(k, [i])
            chosen = batch.index[0][batch.weight[0] > 0]
            now = gradients(i, x[i] / w[i], chosen)
            estimate = (now - tables[i][chosen]).sum(0) / 4 + tables[i].mean(0)
            tables[i][chosen] = now
            noise = own.protection.noise_multiplier(k)[i] * CLIP * torch.from_numpy(tape.draw(k, i)) / 4
            half[i] -= RATE * (estimate - noise)
        p = torch.from_numpy(exponential_graph(k, 4))
        x, w = p @ half, p @ w
    return x, tape


@pytest.mark.parametrize("task", TASKS)
def test_privsgp_vr_follows_a_loop_over_examples(build: Build, task: str) -> None:
    experiment = build(*TASKS[task], vr(), *SET_UP)
    expected, tape = reference_privsgp_vr(experiment, LOSSES[task])
    cohort = experiment.cohort()
    cohort.noise = tape  # type: ignore[assignment]
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(ROUNDS):
        engine.round()
    assert (expected - experiment.initial).norm(dim=1).min() > 0.01
    torch.testing.assert_close(engine.state.rows["x"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", ["numbers", "labels"])
def test_the_factored_table_is_the_dense_one(build: Build, alike: Any, task: str) -> None:
    def last(experiment: Experiment) -> Tensor:
        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        for _ in range(ROUNDS):
            engine.round()
        return engine.state.rows["x"]

    first = build(*TASKS[task], vr("factored"), *SET_UP)
    second = alike(build(*TASKS[task], vr(), *SET_UP), first)
    torch.testing.assert_close(last(first), last(second), rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learned_and_reported_by_its_metrics(build: Build, tmp_path: Path, task: str) -> None:
    at_first, found = [], []
    for rounds, into in ((1, at_first), (60, found)):
        rate = 2 if task == "tokens" else 0.1
        experiment = build(*TASKS[task], "privacy=none", f"rounds={rounds}", f"algorithm.learning_rate={rate}")
        into.append(run(experiment, tmp_path / f"run-{rounds}"))
    summary = found[0]
    assert list(summary["metrics"]) == experiment.scenario.task.metrics
    for name, kind in summary["metrics"].items():
        assert set(summary[name]) == {"mean_model", "peer_mean", "peer_min", "peer_max"}
        before, after = at_first[0][name]["mean_model"], summary[name]["mean_model"]
        assert after >= before if kind["high"] else after <= before
    assert summary["loss"]["mean_model"] < 0.9 * at_first[0]["loss"]["mean_model"]
    assert {path.stem for path in (tmp_path / "run-60" / "plots").glob("*")} <= {
        *summary["metrics"],
        "loss",
        "consensus",
    }


def test_a_loss_that_starts_large_is_no_divergence(build: Build) -> None:
    """House prices: the mean squared error of a blind guess is far above what stops a run of classes."""
    experiment = build(*TASKS["numbers"], "privacy=none")
    large = experiment.public.y * 1e5
    experiment = Experiment(**{**vars(experiment), "public": PublicSet("diabetes", experiment.public.x, large, 1)})
    cohort = experiment.cohort()
    rows = experiment.initial_state(cohort).rows
    assert evaluate(experiment, rows, 0)["mse"]["mean_model"] > 1e8
    with raises(RunError, "run.diverged"):
        evaluate(experiment, rows | {"x": rows["x"] + 1e12}, 0)


def test_metrics_that_are_no_numbers_are_none(build: Build) -> None:
    """Two peers whose outputs overflow, and whose mean is nothing out of the ordinary."""
    experiment = build(*TASKS["numbers"], "privacy=none", "compute.dtype=float32")
    rows = experiment.initial_state(experiment.cohort()).rows
    x = torch.zeros_like(rows["x"])
    x[0], x[1] = 3e38, -3e38
    found = evaluate(experiment, rows | {"x": x}, 0)
    assert found["rmse"]["mean_model"] > 0
    assert [found["rmse"][f"peer_{which}"] for which in ("mean", "min", "max")] == [None] * 3


# --- data ---


@dataclass
class Arrays:
    """An .npz of ten training and five test examples."""

    folder: Path
    dataset: str = "npz"

    def settings(self, task: str, model: str, more: str = "", **arrays: Any) -> list[str]:
        path = self.folder / "data.npz"
        made = {key: values[:5] if key.endswith("test") else values for key, values in arrays.items()}
        np.savez(path, **made)
        data = f"data={{dataset: npz, root: {path}, batch: {{sampling: uniform, size: 2}}{more}}}"
        return [data, f"task={task}", f"model={model}", "n_peers=2"]

    def both(self, task: str, model: str, more: str = "", *, x: Any, y: Any) -> list[str]:
        return self.settings(task, model, more, x_train=x, y_train=y, x_test=x, y_test=y)


@pytest.fixture
def arrays(tmp_path: Path) -> Arrays:
    return Arrays(tmp_path)


RNG = np.random.default_rng(3)
X, TOKENS = RNG.standard_normal((10, 3)), RNG.integers(0, 9, (10, 4))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16, bool])
def test_numbers_and_labels_are_read(build: Build, arrays: Arrays, dtype: Any) -> None:
    y = (RNG.random((10, 2)) < 0.5).astype(dtype)
    numbers = build(*arrays.both("{loss: mse}", "{name: linear}", x=X, y=y))
    labels = build(*arrays.both("{loss: binary-cross-entropy}", "{name: linear}", x=X, y=y))
    for experiment in (numbers, labels):
        assert (experiment.own.examples.y.dtype, experiment.public.n_classes) == (torch.float32, 2)
        np.testing.assert_array_equal(experiment.own.examples.y.numpy(), y.astype(np.float32))
        assert experiment.module[-1].out_features == 2  # type: ignore[index]
    one = build(*arrays.both("{loss: mse}", "{name: linear}", x=X, y=y[:, 0]))
    assert (one.own.examples.y.shape, one.public.n_classes) == ((10, 1), 1)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_tokens_stay_whole_numbers(build: Build, arrays: Arrays, dtype: Any) -> None:
    settings = arrays.both("{}", "{name: text}", ", vocabulary: 9", x=TOKENS.astype(dtype), y=np.arange(10) % 2)
    experiment = build(*settings, "compute.dtype=float32")
    assert experiment.public.x.dtype == experiment.own.examples.x.dtype == torch.int64
    cohort = experiment.cohort()
    assert cohort.data.batch(0, [0, 1]).x.dtype == torch.int64
    np.testing.assert_array_equal(experiment.own.examples.x.numpy(), TOKENS)
    assert experiment.module.embedding.weight.shape == (9, 32)


LINEAR, TEXT, TWO = "{name: linear}", "{name: text}", np.arange(10) % 2
NUMBERS, ANY = "{loss: mse}", "{loss: binary-cross-entropy}"
REFUSED = [
    (NUMBERS, LINEAR, "", X, np.full(10, np.nan), ("data.not-finite", "y_")),
    (NUMBERS, LINEAR, "", X, np.full(10, 1e39), ("data.not-finite", "y_")),
    (NUMBERS, LINEAR, "", X, np.zeros((10, 2, 2)), ("data.targets",)),
    (NUMBERS, LINEAR, "", X, np.array(["a"] * 10), ("data.targets",)),
    (NUMBERS, LINEAR, "", X, np.zeros((10, 0)), ("data.targets",)),
    (NUMBERS, LINEAR, "", X, np.zeros(9), ("data.lengths",)),
    (NUMBERS, LINEAR, ", classes: 3", X, X, ("data.classes", "data.classes=3")),
    (
        NUMBERS,
        LINEAR,
        ", partition: {kind: dirichlet, alpha: 1.0}",
        X,
        X,
        ("data.no-classes", "kind=dirichlet"),
    ),
    (ANY, LINEAR, ", partition: {kind: shards, shards_per_peer: 1}", X, X > 0, ("data.no-classes", "kind=shards")),
    (ANY, LINEAR, "", X, X, ("data.labels",)),
    (ANY, LINEAR, "", X, TWO, ("data.targets", r"int64 \[5\]")),
    (ANY, LINEAR, "", X, np.where(X > 0, np.nan, 1.0), ("data.labels",)),
    ("{}", LINEAR, "", X, X, ("data.labels",)),
    ("{}", TEXT, ", vocabulary: 8", TOKENS, TWO, ("data.tokens",)),
    ("{}", TEXT, ", vocabulary: 9", -TOKENS, TWO, ("data.tokens",)),
    ("{}", TEXT, ", vocabulary: 9", X, TWO, ("data.tokens", "float64")),
    (
        "{}",
        LINEAR,
        ", vocabulary: 9",
        TOKENS,
        TWO,
        ("model.tokens", "model.name='linear'"),
    ),
    ("{}", TEXT, "", X, TWO, ("model.tokens", "model.name='text'")),
]


@pytest.mark.parametrize(("task", "model", "more", "x", "y", "refusal"), REFUSED)
def test_data_that_do_not_fit_the_task_are_refused(
    build: Build, arrays: Arrays, task: str, model: str, more: str, x: Any, y: Any, refusal: tuple[str, ...]
) -> None:
    with raises(ScenarioError, *refusal) as caught:
        build(*arrays.both(task, model, more, x=x, y=y))
    assert "\n" not in str(caught.value)


def test_targets_of_both_halves_are_alike(build: Build, arrays: Arrays) -> None:
    settings = arrays.settings(NUMBERS, LINEAR, x_train=X, y_train=X, x_test=X, y_test=X[:, :2])
    with raises(ScenarioError, "data.shapes", r"\[3\]"):
        build(*settings)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["task.loss=mse"], ("data.targets", "data.dataset=digits")),
        (["data.dataset=diabetes"], ("data.targets", "task.loss")),
        (["data.vocabulary=10"], ("data.vocabulary",)),
        (["task.loss=logistic"], ("loss.classes",)),
        (["task.loss=msee"], ("scenario.literal_error", "task.loss='msee'")),
        (["task.metrics=[acuracy]"], ("scenario.literal_error", "task.metrics.0='acuracy'")),
        (["task.metrics=[rmse]"], ("metrics.unfit", "cross-entropy")),
        (["task={loss: hinge, metrics: [log-loss]}"], ("metrics.unfit", "log-loss")),
        (["task.metrics=[accuracy, accuracy]"], ("metrics.repeated",)),
        (["task.metrics=[]"], ("scenario.too_short",)),
        (["model.width=3"], ("scenario.other-choice", "resnet18-gn")),
    ],
)
def test_an_unfit_task_is_refused_in_one_line(build: Build, settings: list[str], refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as caught:
        build(*settings)
    assert "\n" not in str(caught.value)


def test_drawn_data_have_what_they_say() -> None:
    x, labels = draw_labels(2500)
    assert x.shape == (2500, 20)
    assert (np.diff(labels.mean(0)) < 0.05).all()
    assert 0.4 < labels[:, 0].mean() < 0.6
    assert 0.05 < labels[:, -1].mean() < 0.2
    words, topics = draw_words(2500)
    lengths = (words > 0).sum(1)
    assert (words.min(), words.max(), lengths.min(), lengths.max()) == (0, 199, 5, 20)
    own = ((words - 1) // 40 == topics[:, None]) & (words > 0)
    assert 0.55 < own.sum() / lengths.sum() < 0.65  # half of them, and a fifth of the others
    assert all(np.array_equal(*pair) for pair in zip(draw_words(2500), (words, topics), strict=True))


# --- tokens under the kernel ---


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    weight: Tensor


def text_problem(seed: int = 0) -> tuple[nn.Module, Tensor, Batch]:
    module = build_model("text", (5,), 3, seed=1, n_tokens=9, width=4)
    g = torch.Generator().manual_seed(seed)
    params = flatten(module).repeat(2, 1) + 0.1 * torch.randn(2, parameter_count(module), generator=g)
    x = torch.randint(0, 9, (2, 4, 5), generator=g)
    return module, params, Batch(x, torch.randint(0, 3, (2, 4), generator=g), torch.ones(2, 4))


@pytest.mark.parametrize("bad", [-1, 9, 10**12, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("kind", ["factored", "vmap", "loop"])
def test_an_unknown_token_counts_its_example_as_zero(kind: str, bad: int) -> None:
    module, params, batch = text_problem()
    kernel = build_kernel(module, "cross-entropy", (5,), kind=kind, n_tokens=9)
    batch.x[0, 1, 3] = bad
    given = torch.full((2,), 0.3), torch.ones(2)
    out, without = torch.zeros_like(params), torch.zeros_like(params)
    norms = kernel.add_clipped_(out, params, batch, *given)
    weight = batch.weight.clone()
    weight[0, 1] = 0
    kernel.add_clipped_(without, params, Batch(batch.x.clamp(0, 8), batch.y, weight), *given)
    assert norms[0, 1] == 0
    assert (norms.flatten() > 0).sum() == 7
    assert torch.equal(out, without)


def test_kernels_agree_with_the_loop_on_tokens() -> None:
    module, params, batch = text_problem()
    batch = Batch(batch.x, batch.y, batch.weight.double())
    given = torch.tensor([0.3, 1e6]).double(), torch.tensor([1.0, -2.0]).double()
    found = []
    for kind in ("factored", "vmap", "loop"):
        kernel, out = (
            build_kernel(module, "cross-entropy", (5,), kind=kind, n_tokens=9),
            torch.zeros_like(params).double(),
        )
        kernel.add_clipped_(out, params.double(), batch, *given)
        found.append(out)
        logits = kernel.logits(params.double(), batch.x[0])
        torch.testing.assert_close(logits[1], unflatten(module.double(), params[1].double())(batch.x[0]))
    for sums in found[:2]:
        torch.testing.assert_close(sums, found[2], rtol=0, atol=1e-12)


def test_padding_does_not_count_among_the_words() -> None:
    module, _, batch = text_problem()
    words = batch.x[0].clamp(min=1)
    longer = functional.pad(words, (0, 3))
    torch.testing.assert_close(module(longer), module(words))
    assert torch.isfinite(module(torch.zeros(1, 5, dtype=torch.int64))).all()


def test_tokens_are_not_reckoned_with() -> None:
    with raises(ScenarioError, "gradients.kind"):
        build_kernel(text_problem()[0], "cross-entropy", (5,), kind="stacked", n_tokens=9)


# --- targets under the kernel ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e25, -3e38])
@pytest.mark.parametrize("kind", ["stacked", "factored", "vmap", "loop"])
def test_a_target_that_overflows_counts_its_example_as_zero(kind: str, bad: float) -> None:
    module = build_model("mlp", (3,), 2, seed=1, hidden=[4])
    kernel, params = build_kernel(module, "mse", (3,), kind=kind), flatten(module)[None]
    g = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(1, 4, 3, generator=g), torch.randn(1, 4, 2, generator=g), torch.ones(1, 4))
    batch.y[0, 2, 1] = bad
    for clip in (torch.tensor([0.2]), None):
        out, without = torch.zeros_like(params), torch.zeros_like(params)
        norms = kernel.add_clipped_(out, params, batch, clip, torch.ones(1))
        kernel.add_clipped_(
            without,
            params,
            Batch(batch.x, batch.y.nan_to_num(0, 0, 0), torch.tensor([[1.0, 1, 0, 1]])),
            clip,
            torch.ones(1),
        )
        assert norms[0, 2] == 0
        assert torch.equal(out, without)
        assert out.any()
