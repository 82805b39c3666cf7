"""Every gradient kernel against the plain loop, and the laws clipping rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_problems import CLASSES, MARGINS, MODELS, ORDER, OTHERS, SHAPE, Batch, added, module_of, targets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_kernel import LoopKernel, build_kernel
from raising import raises
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.common.catalogue import LOSS_KINDS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.gradients import (
    KERNELS,
    StackedKernel,
    stacked,
)
from flower_privdec.models import flatten, parameter_count
from flower_privdec.tasks.losses import LOSSES, resolve_loss

FITTING = [  # every kernel from the fastest that fits on
    (name, kind) for name, (_, best) in MODELS.items() for kind in list(ORDER)[list(ORDER.values()).index(best) :]
]


def problem(module: nn.Module, m: int, examples: int, dtype: torch.dtype, seed: int = 0) -> Any:
    """Rows near the module's parameters, a batch, clip norms (one out of reach), scales and divisors."""
    g = torch.Generator().manual_seed(seed)
    d = parameter_count(module)
    params = flatten(module) + 0.1 * torch.randn(m, d, generator=g)
    x = torch.randn(m, examples, *SHAPE, generator=g)
    y = torch.randint(0, CLASSES, (m, examples), generator=g)
    weight = (torch.rand(m, examples, generator=g) < 0.7).float()
    clip = torch.rand(m, generator=g) + 0.05
    clip[-1] = 1e6
    scale = torch.randn(m, generator=g)
    divisor = 0.5 + torch.rand(m, generator=g)
    batch = Batch(x.to(dtype), y, weight.to(dtype))
    return params.to(dtype), batch, clip.to(dtype), scale.to(dtype), divisor.to(dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare rows by the norm of their difference over the norm of what is expected."""
    error, size = (actual - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    assert (error <= tolerance * size + 1e-30).all(), (error / size).max()


CHAINS: dict[str, list[nn.Module]] = {
    "strides": [nn.Conv2d(2, 8, 3, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=(2, 1), padding=(1, 2))],
    "strides both ways": [nn.Conv2d(2, 9, 1), nn.Conv2d(9, 5, (2, 3), stride=2, padding=1, bias=False)],
    "dilation": [nn.Conv2d(2, 8, 2), nn.Tanh(), nn.Conv2d(8, 3, 2, stride=(1, 2), dilation=(2, 3), padding=2)],
    "one column": [nn.Conv2d(2, 8, (3, 1)), nn.Conv2d(8, 3, (2, 1)), nn.Conv2d(3, 8, (1, 3), stride=(2, 1))],
    "padded to the same size": [nn.Conv2d(2, 8, 3, padding="same"), nn.Conv2d(8, 4, (2, 3), padding="same")],
    "pooling in pairs": [nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 9, 2)],
    "pooling what is odd": [nn.Conv2d(2, 8, 2), nn.Tanh(), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 9, 2)],
    "pools that overlap": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Tanh(), nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(3, 3, 2)],
    "activation, then pool, first": [nn.Tanh(), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(2, 9, 2)],
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("memory_bytes", [1, 2**28])
def test_convolution_chains_agree_with_the_loop(name: str, memory_bytes: int) -> None:
    module = nn.Sequential(*CHAINS[name], nn.Flatten(), nn.LazyLinear(CLASSES))
    module(torch.zeros(2, *SHAPE))
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind="factored", memory_bytes=memory_bytes)
    params, batch, clip, scale, divisor = problem(module, 2, 3, torch.float64)
    expected, _ = added(build_kernel(module, "cross-entropy", SHAPE, kind="loop"), params, batch, clip, scale, divisor)
    x = batch.x.clone()
    assert_near(added(kernel, params, batch, clip, scale, divisor)[0], expected, 1e-10)
    assert torch.equal(batch.x, x)


@pytest.mark.parametrize("channels", [2, 8])
@pytest.mark.parametrize("size", [1, 2**28])
def test_written_gradients_do_not_depend_on_patch_count(
    channels: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_privdec.gradients.factored._PATCH_BYTES", size)
    module = nn.Sequential(
        nn.Conv2d(2, channels, 1), nn.Conv2d(channels, 9, 3, padding=2), nn.Flatten(), nn.Linear(576, 4)
    )
    params, batch, clip, scale, _ = problem(module, 2, 5, torch.float64)
    expected, _ = added(build_kernel(module, "cross-entropy", SHAPE, kind="loop"), params, batch, clip, scale)
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind="factored")
    assert_near(added(kernel, params, batch, clip, scale)[0], expected, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_auto_takes_the_fastest_kernel_that_fits(name: str) -> None:
    assert type(build_kernel(module_of(name), "cross-entropy", SHAPE)) is MODELS[name][1]


@pytest.mark.parametrize("name", ["cnn-small", "cnn-dyn-d2p", "cnn-pdsl", "cnn-feddeper", "strided"])
def test_plain_chains_of_layers_need_no_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(name)
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    monkeypatch.delattr(torch.autograd, "grad")
    assert added(kernel, *problem(module, 2, 2, torch.float32)[:4])[0].any()


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tolerance"),
    [*((*each, torch.float64, 1e-10) for each in FITTING), *((*each, torch.float32, 2e-4) for each in FITTING[::3])],
)
def test_kernels_agree_with_the_loop(name: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """With and without clipping and divisor, with padding, for one example and several, in place or not."""
    module = module_of(name)
    kernel, oracle = (build_kernel(module, "cross-entropy", SHAPE, kind=which) for which in (kind, "loop"))
    for examples in (1, 3):
        params, batch, clip, scale, divisor = problem(module, 3, examples, dtype)
        for bound, share in ((clip, None), (None, None), (clip, divisor)):
            expected, norms = added(oracle, params, batch, bound, scale, share)
            own = params.clone()
            bounds = kernel.add_clipped_(own, own, batch, bound, scale, share)
            counted = batch.weight > 0
            torch.testing.assert_close(bounds[counted], norms[counted], rtol=tolerance, atol=0)
            if dtype == torch.float64:
                assert_near(own - params, expected, tolerance)
            assert_near(added(kernel, params, batch, bound, scale, share)[0], expected, tolerance)


COMPARED = [
    *(("mlp", kind, memory) for kind in ORDER for memory in (1, 2**28)),
    *(("cnn-small", "factored", 1), ("cnn-small", "vmap", 2**28), ("linear", "stacked", 2**28)),
]


@pytest.mark.parametrize(
    ("loss", "name", "kind", "memory_bytes"),
    [
        (loss, *each)
        for i, loss in enumerate([*MARGINS, *OTHERS])
        for j, each in enumerate(COMPARED)
        if (i + j) % 2 == 0
    ],
)
def test_other_losses_agree_with_the_loop(name: str, loss: str, kind: str, memory_bytes: int) -> None:
    module = module_of(name, 1 if LOSSES[loss].single else CLASSES)
    kernel, oracle = (build_kernel(module, loss, SHAPE, kind=k, memory_bytes=memory_bytes) for k in (kind, "loop"))
    params, batch, clip, scale, divisor = problem(module, 3, 4, torch.float64)
    batch = replace(batch, y=targets_of(LOSSES[loss], (3, 4), 1))
    for share in (None, divisor):
        expected, _ = added(oracle, params, batch, clip, scale, share)
        assert_near(added(kernel, params, batch, clip, scale, share)[0], expected, 1e-10)


def test_loop_agrees_with_the_formula_of_softmax_regression() -> None:
    """The oracle itself: g = (softmax(W x + b) - e_y) (x, 1)^T, clipped by hand."""
    module = module_of("linear")
    params, batch, clip, scale, _ = problem(module, 2, 3, torch.float64)
    out, norms = added(build_kernel(module, "cross-entropy", SHAPE, kind="loop"), params, batch, clip, scale)
    for i in range(2):
        weight, bias = params[i, :-CLASSES].view(CLASSES, -1), params[i, -CLASSES:]
        expected = torch.zeros_like(params[i])
        for b in range(3):
            x = batch.x[i, b].flatten()
            delta = torch.softmax(weight @ x + bias, 0) - functional.one_hot(batch.y[i, b], CLASSES)
            gradient = torch.cat([torch.outer(delta, x).flatten(), delta])
            assert norms[i, b].item() == pytest.approx(gradient.norm().item())
            expected += batch.weight[i, b] * gradient * min(1.0, float(clip[i] / gradient.norm()))
        torch.testing.assert_close(out[i], scale[i] * expected)


@pytest.mark.parametrize("columns", [1, 14, 1024])
@pytest.mark.parametrize("kind", [*KERNELS, "loop"])
def test_logits_are_the_module_s_outputs(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "SHARED_COLUMNS", columns)
    monkeypatch.setattr(stacked, "SHARED_EXAMPLES", 4)
    module = module_of("mlp")
    params, batch, *_ = problem(module, 3, 5, torch.float64)
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind=kind, memory_bytes=30_000)
    x = batch.x.flatten(0, 1)
    logits = kernel.logits(params, x)
    assert logits.shape == (3, 15, CLASSES)
    layers = [part for part in module if isinstance(part, nn.Linear)]  # type: ignore[union-attr]
    for row, output in zip(params, logits, strict=True):
        start, a = 0, x.flatten(1)
        for layer in layers:
            o, i = layer.weight.shape
            weight = row[start : start + o * i].view(o, i)
            start += o * i + o
            a = functional.linear(a, weight, row[start - o : start])
            a = a if layer is layers[-1] else a.relu()
        torch.testing.assert_close(output, a)


@pytest.mark.parametrize("name", ["mlp", "linear", "cnn-small", "residual", "scaled"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_row_law(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """step(state)[i] == step(state[i:i+1])."""
    module = module_of(name)
    for examples in (1, 5):
        params, batch, clip, scale, divisor = problem(module, 5, examples, dtype)
        batch.weight[2] = 0
        whole, norms = added(build_kernel(module, "cross-entropy", SHAPE), params, batch, clip, scale, divisor)
        kernel = build_kernel(module, "cross-entropy", SHAPE)
        for rows in (slice(0, 1), slice(2, 3), slice(3, 5), [4, 0]):
            part, part_norms = added(kernel, params[rows], batch.rows(rows), clip[rows], scale[rows], divisor[rows])
            assert_near(part, whole[rows], tolerance)
            torch.testing.assert_close(part_norms, norms[rows], rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual", "scaled"])
def test_memory_bounds_do_not_change_the_result(name: str) -> None:
    module = module_of(name)
    params, batch, clip, scale, divisor = problem(module, 4, 6, torch.float64)
    for share in (None, divisor):
        expected = added(build_kernel(module, "cross-entropy", SHAPE), params, batch, clip, scale, share)
        tight = build_kernel(module, "cross-entropy", SHAPE, memory_bytes=1)
        own = params.clone()
        norms = tight.add_clipped_(own, own, batch, clip, scale, share)
        assert_near(own - params, expected[0], 1e-12)
        counted = batch.weight > 0
        torch.testing.assert_close(norms[counted], expected[1][counted])


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "scaled"])
@pytest.mark.parametrize("kind", ["auto", "loop"])
def test_padding_and_empty_batches_add_nothing(name: str, kind: str) -> None:
    module = module_of(name)
    params, batch, clip, scale, _ = problem(module, 3, 4, torch.float64)
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind=kind)
    nothing = replace(batch, weight=torch.zeros_like(batch.weight))
    assert not added(kernel, params, nothing, clip, scale)[0].any()
    padded = Batch(
        torch.cat([batch.x, batch.x[:, :1]], 1),
        torch.cat([batch.y, batch.y[:, :1]], 1),
        torch.cat([batch.weight, torch.zeros(3, 1, dtype=torch.float64)], 1),
    )
    assert_near(added(kernel, params, padded, clip, scale)[0], added(kernel, params, batch, clip, scale)[0], 1e-12)
    empty = Batch(batch.x[:, :0], batch.y[:, :0], batch.weight[:, :0])
    out, norms = added(kernel, params, empty, clip, scale)
    assert norms.shape == (3, 0)
    assert not out.any()


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn-small", "residual", "scaled"])
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**16),
    clip=st.floats(1e-4, 10),
    scale=st.floats(-10, 10).filter(lambda value: abs(value) > 1e-3),
    size=st.floats(0.01, 30),
)
def test_one_example_moves_a_row_within_the_clip_norm(
    name: str, seed: int, clip: float, scale: float, size: float
) -> None:
    """In float32, as in a run: |with - without| <= |scale| * clip_norm, and equality where it is clipped."""
    module = module_of(name)
    params, batch, *_ = problem(module, 1, 3, torch.float32, seed)
    batch = replace(batch, x=size * batch.x, weight=torch.ones(1, 3))
    without = replace(batch, weight=torch.tensor([[1.0, 0.0, 1.0]]))
    bound, factor = torch.tensor([clip]), torch.tensor([scale])
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    whole, norms = added(kernel, params, batch, bound, factor)
    rest, _ = added(kernel, params, without, bound, factor)
    limit, moved = abs(scale) * clip, (whole - rest).norm().item()
    assert moved <= limit * (1 + 1e-4)
    assert moved == pytest.approx(abs(scale) * min(clip, norms[0, 1].item()), rel=1e-3, abs=1e-6 * limit)


@pytest.mark.parametrize("name", ["mlp", "linear", "cnn-small", "scaled"])
def test_divisor_is_division_of_the_parameters(name: str) -> None:
    module = module_of(name)
    params, batch, clip, scale, divisor = problem(module, 3, 3, torch.float64)
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    expected = added(kernel, params / divisor[:, None], batch, clip, scale)
    sums, norms = added(kernel, params, batch, clip, scale, divisor)
    assert_near(sums, expected[0], 1e-12)
    torch.testing.assert_close(norms, expected[1])


def test_factors_rebuild_the_gradients() -> None:
    """sum_l |delta|^2 (|a|^2 + 1) is the norm; accumulate_ with any coefficient is the weighted sum."""
    module = module_of("mlp")
    params, batch, _, _, divisor = problem(module, 3, 4, torch.float64)
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    assert isinstance(kernel, StackedKernel)
    factors = kernel.factors(params, batch, divisor)
    before = [value.clone() for value in (*factors.deltas, *factors.activations)]
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = kernel.accumulate_(torch.zeros_like(params), factors, weights)
    oracle = build_kernel(module, "cross-entropy", SHAPE, kind="loop")
    ones = torch.ones(3, dtype=torch.float64)
    expected, norms = added(oracle, params, replace(batch, weight=weights), None, ones, divisor)
    assert_near(total, expected, 1e-12)
    torch.testing.assert_close(factors.norms, norms)
    for value, old in zip((*factors.deltas, *factors.activations), before, strict=True):
        assert torch.equal(value, old)


def test_rows_may_be_views_of_a_wider_buffer() -> None:
    module = module_of("mlp")
    params, batch, clip, scale, _ = problem(module, 3, 2, torch.float64)
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    wide = torch.zeros(3, kernel.d + 11, dtype=torch.float64)
    rows = wide[:, 4 : 4 + kernel.d]
    rows.copy_(params)
    kernel.add_clipped_(rows, rows, batch, clip, scale)
    torch.testing.assert_close(rows, params + added(kernel, params, batch, clip, scale)[0])
    assert not wide[:, :4].any()
    assert not wide[:, 4 + kernel.d :].any()


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual", "scaled"])
def test_the_module_is_left_as_it_was(name: str) -> None:
    module = module_of(name)
    before = flatten(module).clone()
    params, batch, clip, scale, _ = problem(module, 2, 2, torch.float64)
    added(build_kernel(module, "cross-entropy", SHAPE), params, batch, clip, scale)
    assert torch.equal(flatten(module), before)
    assert all(p.requires_grad and p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize(
    ("module", "options", "code", "names"),
    [
        (nn.Linear(2, 2), {"kind": "ghost"}, "gradients.kind", "'ghost'.* auto, stacked"),
        (nn.Conv2d(1, 1, 1), {"kind": "stacked"}, "gradients.kind", "Sequential"),
        (nn.Sequential(nn.PReLU()), {"kind": "factored"}, "gradients.kind", "PReLU"),
        (nn.Linear(2, 2), {"loss": "hinges"}, "catalogue.unknown", "did you mean 'hinge'"),
        (nn.Linear(2, 2), {"memory_bytes": 0}, "gradients.memory", "memory_bytes=0"),
        (nn.BatchNorm1d(2), {}, "model.batch-norm", "GroupNorm"),
    ],
)
def test_bad_arguments_are_refused(module: nn.Module, options: dict[str, Any], code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names):
        build_kernel(module, options.pop("loss", "cross-entropy"), options.pop("shape", (2,)), **options)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_derivative_is_the_value_s(name: str) -> None:
    loss, g = LOSSES[name], torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(5, 7, 1 if loss.single else CLASSES, generator=g, dtype=torch.float64)
    outputs.requires_grad_()
    labels = targets_of(loss, (5, 7), 1)
    value = loss.value(outputs, labels)
    assert value.shape == (5, 7)
    (expected,) = torch.autograd.grad(value.sum(), outputs)
    assert expected.any()
    torch.testing.assert_close(loss.derivative(outputs.detach(), labels), expected)


def test_every_loss_that_a_scenario_can_name_is_there() -> None:
    assert {name: loss.targets for name, loss in LOSSES.items()} == {n: kind.targets for n, kind in LOSS_KINDS.items()}


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("mse", functional.mse_loss),
        ("mae", functional.l1_loss),
        ("huber", functional.huber_loss),
        ("binary-cross-entropy", functional.binary_cross_entropy_with_logits),
    ],
)
def test_losses_of_several_numbers_are_torch_s(name: str, reference: Any) -> None:
    loss = LOSSES[name]
    outputs = 3 * torch.randn(5, 7, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = targets_of(loss, (5, 7), 1)
    torch.testing.assert_close(loss.value(outputs, targets), reference(outputs, targets, reduction="none").mean(-1))
    assert torch.equal(loss.predict(outputs), (outputs > 0).long() if loss.targets == "labels" else outputs)
    assert (loss.n_outputs(1), loss.n_outputs(CLASSES)) == (1, CLASSES)
    assert loss.blank(outputs).shape == targets.shape


def test_losses_are_what_their_names_say() -> None:
    outputs, labels = torch.tensor([[0.3], [2.0], [-1.0]]), torch.tensor([1, 0, 0])
    margin = torch.tensor([0.3, -2.0, 1.0])
    expected = {
        "logistic": torch.log1p(torch.exp(-margin)),
        "hinge": (1 - margin).clamp(min=0),
        "squared-hinge": (1 - margin).clamp(min=0) ** 2,
    }
    for name, values in expected.items():
        torch.testing.assert_close(LOSSES[name].value(outputs, labels), values)
        assert LOSSES[name].predict(outputs).tolist() == [1, 1, 0]
        assert LOSSES[name].n_outputs(2) == 1
        with raises(ScenarioError, "loss.classes"):
            LOSSES[name].n_outputs(3)
    softmax, many = resolve_loss("cross-entropy"), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    reference = functional.cross_entropy(many, target, reduction="none")
    torch.testing.assert_close(softmax.value(many, target), reference)
    assert torch.equal(softmax.predict(many), many.argmax(1))
    assert softmax.n_outputs(3) == 3


def test_loop_is_the_oracle_s_kind() -> None:
    assert isinstance(build_kernel(nn.Linear(2, 2), "cross-entropy", (2,), kind="loop"), LoopKernel)
