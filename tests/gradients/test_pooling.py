"""Max pooling by compiled loops: torch's bits, whatever the numbers; and gradients of the convolution before it."""

import math

import pytest
import torch
from gradient_problems import CLASSES, Batch, added
from loop_kernel import build_kernel
from torch import nn

from flower_privdec.gradients import factored, pooling
from flower_privdec.models import flatten, parameter_count

LAYER = nn.MaxPool2d(2)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return made.to(memory_format=torch.channels_last)


def both(monkeypatch, x, layer=LAYER):
    """Return outputs and derivatives in the inputs by loops, then by torch; the loops were used."""
    pairs = []
    for least in (0, math.inf):
        monkeypatch.setattr(pooling, "COMPILED_FROM", least)
        y, kept = pooling.pooled(layer, x)
        assert kept.is_compiled is (least == 0)
        delta = torch.linspace(-1, 1, y.numel(), dtype=x.dtype).view(y.shape)
        delta[0] = -0.0
        pairs.append((y, pooling.unpooled(layer, delta, kept)))
    return pairs


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 5, 7, 9), (1, 2, 2, 3), (4, 33, 6, 6)])
def test_loops_have_torchs_bits(monkeypatch, shape, dtype):
    for x in (images(*shape, dtype=dtype), images(*shape, dtype=dtype).relu_(), images(*shape, dtype=dtype).round_()):
        (y, back), (expected, wanted) = both(monkeypatch, x)
        assert bits(y) == bits(expected)
        assert bits(back) == bits(wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_pooled_as_by_torch(monkeypatch, bad):
    x = images(3, 4, 6, 6)
    x[0] = bad
    x[1, :, ::2, 1::2] = bad
    x[2, :2, 1::2] = bad
    (y, back), (expected, wanted) = both(monkeypatch, x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert bits(back) == bits(wanted)


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True)]
)
def test_other_pooling_is_torchs(monkeypatch, layer):
    monkeypatch.setattr(pooling, "COMPILED_FROM", 0)
    x = images(2, 4, 7, 7)
    assert not pooling.pooled(layer, x)[1].is_compiled
    assert not pooling.pooled(LAYER, x.contiguous())[1].is_compiled
    assert torch.equal(pooling.pooled(layer, x)[0], layer(x))


# --- gradients of the convolution before a pooling ---

SHAPE = (2, 9, 7)
POOLED = {
    "padded": [nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
    "activation first": [nn.Conv2d(2, 5, 3, padding=(2, 0)), nn.ReLU(), nn.MaxPool2d(2)],
    "no ReLU, no bias": [nn.Conv2d(2, 5, (2, 3), bias=False), nn.MaxPool2d(2), nn.Tanh()],
    "both activations": [nn.Conv2d(2, 5, 2), nn.ReLU(), nn.Tanh(), nn.MaxPool2d(2), nn.ReLU()],
    "strides": [nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(3, 1)), nn.MaxPool2d(2), nn.ReLU()],
    "dilation": [nn.Conv2d(2, 5, 3, dilation=(1, 2), padding=2), nn.MaxPool2d(2), nn.ReLU()],
    "dilated lines": [nn.Conv2d(2, 5, 2, dilation=(3, 1)), nn.MaxPool2d(2), nn.ReLU()],
    "single pixels": [nn.Conv2d(2, 5, 1), nn.MaxPool2d(2), nn.ReLU()],
    "two": [nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 6, 2), nn.ReLU(), nn.MaxPool2d(2)],
    "behind another": [nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.MaxPool2d(2), nn.ReLU()],
    "before a pooling": [nn.MaxPool2d(2, 1), nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(2, 1)],
}


@pytest.fixture
def listed(monkeypatch):
    """Use the loops for every pooled convolution, and count their calls."""
    monkeypatch.setattr(pooling, "COMPILED_FROM", 0)
    monkeypatch.setattr(pooling, "SHORTEST", 1)
    monkeypatch.setattr(pooling, "MOST_THREADS", torch.get_num_threads())
    calls = []
    make = factored.pooled_pieces

    def counted(call, *places):
        calls.append(call.name)
        return make(call, *places)

    monkeypatch.setattr(factored, "pooled_pieces", counted)
    return calls


def chain(*layers):
    module = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))
    module(torch.zeros(2, *SHAPE))
    return module


def batch_of(module, m=2, examples=4, dtype=torch.float64):
    """Rows near the module's, and a batch of which one example is padding."""
    g = torch.Generator().manual_seed(5)
    params = flatten(module) + 0.1 * torch.randn(m, parameter_count(module), generator=g)
    x = torch.randn(m, examples, *SHAPE, generator=g)
    weight = torch.ones(m, examples)
    weight[0, -1] = 0
    y = torch.arange(m * examples).view(m, examples) % CLASSES
    return params.to(dtype), Batch(x.to(dtype), y, weight.to(dtype))


@pytest.mark.parametrize("memory_bytes", [1, 2**28])
@pytest.mark.parametrize("name", POOLED)
def test_listed_derivatives_give_the_loop_s_gradients(listed, name, memory_bytes):
    module = chain(*POOLED[name])
    params, batch = batch_of(module)
    clip = torch.tensor([0.3, 1e6], dtype=torch.float64)
    scale = torch.tensor([-0.5, 2.0], dtype=torch.float64)
    expected, norms = added(build_kernel(module, "cross-entropy", SHAPE, kind="loop"), params, batch, clip, scale)

    kernel = build_kernel(module, "cross-entropy", SHAPE, kind="factored", memory_bytes=memory_bytes)
    listed.clear()  # of the calls by which the kernel measures its memory
    sums, bounds = added(kernel, params, batch, clip, scale)
    assert listed
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)
    counted = batch.weight > 0
    torch.testing.assert_close(bounds[counted], norms[counted], rtol=1e-9, atol=0)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_only_trained_parameters_get_listed_gradients(listed, trained):
    module = chain(*POOLED["padded"])
    for name, parameter in module[0].named_parameters():
        parameter.requires_grad_(name == trained)
    params, batch = batch_of(module)
    free = (None, torch.ones(2, dtype=torch.float64))
    expected, _ = added(build_kernel(module, "cross-entropy", SHAPE, kind="loop"), params, batch, *free)
    sums, _ = added(build_kernel(module, "cross-entropy", SHAPE, kind="factored"), params, batch, *free)
    assert listed
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["pixel", "weight"])
def test_what_is_not_finite_counts_as_zero(listed, bad, where):
    """Even if no derivative meets it, as products with zero would have it."""
    layers = [nn.Conv2d(2, 4, 1), nn.MaxPool2d(2), nn.ReLU()]
    if where == "weight":
        layers.insert(0, nn.Conv2d(2, 2, 1))  # then a derivative is needed below the convolution that is pooled
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, CLASSES))
    params, batch = batch_of(module, m=1)
    if where == "pixel":
        batch.x[0, 1, 0, -1, -1] = bad  # outside the squares that are pooled
    else:
        batch.x.abs_()
        params[:, :6] = 1.0  # the first convolution puts out what is positive
        params[0, 6] = bad  # minus infinity is never the largest, and rectified
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind="factored")
    sums, norms = added(kernel, params, batch, None, torch.ones(1, dtype=torch.float64))
    assert listed
    assert torch.isfinite(sums).all()
    everywhere = where == "weight"
    assert (norms[0, :3] == 0).tolist() == [everywhere, True, everywhere]


def test_listed_and_dense_gradients_agree_in_float32(listed, monkeypatch):
    module = chain(nn.Conv2d(2, 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 9, 3, padding=2), nn.ReLU())
    params, batch = batch_of(module, m=1, examples=3, dtype=torch.float32)
    free = (torch.full((1,), 0.5), torch.ones(1))
    kernel = build_kernel(module, "cross-entropy", SHAPE, kind="factored")
    sums, _ = added(kernel, params, batch, *free)
    assert listed
    monkeypatch.setattr(pooling, "COMPILED_FROM", math.inf)
    dense, _ = added(kernel, params, batch, *free)
    torch.testing.assert_close(sums, dense, rtol=2e-4, atol=2e-6)


def test_many_threads_take_dense_gradients(listed, monkeypatch):
    module = chain(*POOLED["padded"])
    params, batch = batch_of(module)
    monkeypatch.setattr(pooling, "MOST_THREADS", torch.get_num_threads() - 1)
    listed.clear()
    added(build_kernel(module, "cross-entropy", SHAPE, kind="factored"), params, batch, None, batch.weight[:, 0])
    assert not listed


def test_a_rectified_pooling_has_torchs_bits(monkeypatch):
    x = images(3, 5, 6, 7).round_()
    x[0, :, :2, :2] = -0.0
    x[1, :, :2, :2] = math.nan
    made = []
    for least in (0, math.inf):
        monkeypatch.setattr(pooling, "COMPILED_FROM", least)
        link = pooling.PooledConvolution(nn.Conv2d(5, 5, 1), LAYER, rectified=True)
        y, kept = pooling.pooled(LAYER, x, rectified=True)
        delta = torch.linspace(-1, 1, y.numel()).view(y.shape).contiguous(memory_format=torch.channels_last)
        made.append((y, link.dense(delta, y, kept)))
    (y, back), (expected, wanted) = made
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert bits(back) == bits(wanted)
