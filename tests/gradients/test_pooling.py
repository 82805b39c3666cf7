"""Max pooling by compiled loops: torch's bits, whatever the numbers."""

import math

import pytest
import torch
from torch import nn

from flower_privdec.gradients import factored

LAYER = nn.MaxPool2d(2)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return made.to(memory_format=torch.channels_last)


def both(monkeypatch, x, layer=LAYER):
    """Return outputs and derivatives in the inputs by loops, then by torch; the loops were used."""
    pairs = []
    for least in (0, math.inf):
        monkeypatch.setattr(factored, "COMPILED_FROM", least)
        y, places = factored.pooled(layer, x)
        assert (places.dtype == torch.uint8) is (least == 0)
        delta = torch.linspace(-1, 1, y.numel(), dtype=x.dtype).view(y.shape)
        delta[0] = -0.0
        pairs.append((y, factored.unpooled(layer, delta, x, places)))
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
    monkeypatch.setattr(factored, "COMPILED_FROM", 0)
    x = images(2, 4, 7, 7)
    assert factored.pooled(layer, x)[1].dtype == torch.int64
    assert factored.pooled(LAYER, x.contiguous())[1].dtype == torch.int64
    assert torch.equal(factored.pooled(layer, x)[0], layer(x))
