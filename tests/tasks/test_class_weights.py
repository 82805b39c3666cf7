"""Weights of classes: they act in every kernel, cost no ε, and are refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradient_problems import CLASSES, SHAPE, Batch, added, module_of, targets_of
from raising import raises
from tiny_scenario import Build, Tiny
from user_tasks import WEIGHTS

from flower_privdec import testing
from flower_privdec.algorithms.proximal import Regularizer
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.minimum import ConvexObjective
from flower_privdec.gradients import build_kernel
from flower_privdec.models import flatten
from flower_privdec.scenario import numbers_hash
from flower_privdec.tasks.losses import LOSSES
from flower_privdec.tasks.own_losses import own_loss, try_loss

KEY = f"task.class_weights={WEIGHTS.tolist()}"
OF_CLASSES = [name for name, loss in LOSSES.items() if loss.targets == "classes"]
KERNELS = [("linear", "stacked"), ("linear", "single"), ("cnn-small", "factored"), ("scaled", "vmap")]


@pytest.mark.parametrize("loss", OF_CLASSES)
@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_every_kernel_clips_the_weighted_gradients(loss: str, name: str, kind: str) -> None:
    """The sum is that of each example's gradient times its class's weight, clipped afterwards."""
    classes = 2 if LOSSES[loss].single else CLASSES
    if LOSSES[loss].single and name != "linear":
        return  # the other models have several outputs
    weights = (0.5, 30.0) if classes == 2 else (0.0, 30.0, 1.0, 0.25)
    module = module_of(name, 1 if LOSSES[loss].single else CLASSES)
    plain = replace(LOSSES[loss], width=classes)
    options: dict[str, Any] = {"single_example": True} if kind == "single" else {"kind": kind}
    kernels = [build_kernel(module, one, SHAPE, **options) for one in (plain, plain.weighted(weights))]

    examples = 1 if kind == "single" else 5
    x = torch.randn(1, examples, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = targets_of(LOSSES[loss], (1, examples), 3)
    params, one = flatten(module).double()[None], torch.ones(1, dtype=torch.float64)
    clip, expected = torch.tensor([2.0], dtype=torch.float64), torch.zeros_like(params)
    for row in range(examples):
        alone = Batch(x[:, row : row + 1], y[:, row : row + 1], one[None])
        gradient = weights[int(y[0, row])] * added(kernels[0], params, alone, None, one)[0]
        expected += gradient * min(1.0, 2.0 / max(float(gradient.norm()), 1e-300))

    weighted, _ = added(kernels[1], params, Batch(x, y, one.expand(1, examples)), clip, one)
    torch.testing.assert_close(weighted, expected, rtol=2e-4, atol=1e-12)
    assert expected.norm() > 0 or weights[int(y[0, 0])] == 0


def test_the_kernel_of_sparse_examples_weighs_them_too() -> None:
    loss = replace(LOSSES["cross-entropy"], width=CLASSES).weighted((0.0, 30.0, 1.0, 0.25))
    module = module_of("linear")
    dense, sparse = (build_kernel(module, loss, SHAPE, sparse=is_sparse) for is_sparse in (False, True))
    x = torch.randn(1, 5, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = torch.arange(x[0, 0].numel(), dtype=torch.float64).expand(1, 5, -1)
    y, weight = targets_of(loss, (1, 5), 3), torch.ones(1, 5, dtype=torch.float64)
    params, clip = flatten(module).double()[None], torch.tensor([2.0], dtype=torch.float64)
    rest = (params, Batch(x, y, weight), clip, torch.ones(1, dtype=torch.float64))
    expected, _ = added(dense, *rest)
    packed = Batch(torch.stack([columns, x.flatten(2)], 2), y, weight)
    torch.testing.assert_close(added(sparse, params, packed, *rest[2:])[0], expected)
    assert expected.norm() > 1


@pytest.mark.parametrize("own", ["weighed", "summed"])
@pytest.mark.parametrize("model", ["{name: softmax}", "{module: 'user_models:unproved'}"])
def test_weights_equal_an_own_weighted_loss(
    build: Build, alike: Callable[..., Experiment], own: str, model: str
) -> None:
    more = [f"model={model}", "privacy.clip_norm=0.2"]
    expected = build(f"task={{loss: {{module: 'user_tasks:{own}'}}}}", *more)
    weighted = alike(build(KEY, *more), expected)
    rows = [testing.run_rounds(experiment, 4).state.rows["x"] for experiment in (expected, weighted)]
    assert (rows[0] - expected.initial).abs().max() > 1e-3
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-12)


def test_weights_move_the_model_and_ones_do_not(build: Build, alike: Callable[..., Experiment]) -> None:
    without = build("privacy=none")
    rows = []
    for weights in ([1.0] * 10, WEIGHTS.tolist()):
        experiment = alike(build("privacy=none", f"task.class_weights={weights}"), without)
        rows.append(testing.run_rounds(experiment, 3).state.rows["x"])
    plain = testing.run_rounds(without, 3).state.rows["x"]
    torch.testing.assert_close(rows[0], plain, rtol=0, atol=1e-12)
    assert (rows[1] - plain).abs().max() > 1e-2


def test_the_laws_of_privacy_hold_with_weights(build: Build) -> None:
    experiment = build(KEY, "rounds=3", "data.samples=48", "privacy.clip_norm=0.05", "data.batch.size=4")
    testing.assert_sensitivity(experiment, 3, 0, 5)
    testing.assert_noise(experiment, 3)


def test_weights_are_part_of_what_decides_numbers(tiny: Tiny) -> None:
    hashes = {numbers_hash(tiny(*more)) for more in ([], [KEY], [KEY.replace("20.0", "21.0")])}
    assert len(hashes) == 3


def test_the_minimum_is_that_of_the_weighted_losses(build: Build) -> None:
    algorithm = ["algorithm={name: dp-dda}", "topology={name: ring}"]
    experiment = build(KEY, *algorithm)
    objective = ConvexObjective.of(experiment, experiment.own)
    x = torch.randn(len(experiment.initial), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = []
    for part in experiment.own.examples.parts:
        outputs = experiment.kernel.logits(x[None], experiment.own.examples.x[part].double())[0]
        means.append(float(experiment.loss.value(outputs, experiment.own.examples.y[part]).mean()))
    h: Regularizer = experiment.algorithm.regularizer  # type: ignore[attr-defined]
    assert objective.value(x) == pytest.approx(np.mean(means) + h.value(x), rel=1e-9)
    assert objective.loss.class_weights is None  # the solvers see these weights only once


@pytest.mark.parametrize(
    "setting",
    [
        "task.class_weights=[1, -1]",
        "task.class_weights=[1, .nan]",
        "task.class_weights=[1, .inf]",
        "task.class_weights=[1, 1.0e+25]",
        "task.class_weights=[1, 1.0e-25]",
        "task.class_weights=[0, 0]",
        "task.class_weights=[1, 2, 3]",
        "task={loss: mse, class_weights: [1, 2]}",
        "task={loss: binary-cross-entropy, class_weights: [1, 2]}",
        "task={loss: {module: 'user_tasks:squares', targets: numbers}, class_weights: [1, 2]}",
    ],
)
def test_weights_that_cannot_be_are_refused(build: Build, setting: str) -> None:
    with raises(ScenarioError, "task.class-weights", names="class_weights") as caught:
        build(setting)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cross_entropy", "weighed", "summed", "norm", "huge", "of_chances"])
def test_own_losses_that_stand_for_one_example_are_accepted(name: str) -> None:
    try_loss(replace(own_loss(f"user_tasks:{name}", "classes"), width=10), 10)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cancelling", "loss.not-additive"),
        ("cancelling_by_hand", "loss.not-additive"),
        ("error", "loss.no-gradient"),
    ],
)
def test_own_losses_with_cancelling_weights_are_refused(name: str, code: str) -> None:
    with raises(ScenarioError, code, names=f"user_tasks:{name}") as caught:
        try_loss(replace(own_loss(f"user_tasks:{name}", "classes"), width=10), 10)
    assert "\n" not in str(caught.value)
