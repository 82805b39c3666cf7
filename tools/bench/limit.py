"""What a round cannot do without: the noise fill, the model's matrix products, and one copy of the parameters.

Every product is made in the fastest of the forms that torch has for it, and into memory that is there already; so
the limit is no straw man, and a round that comes near it wastes little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.privacy.noise import build_noise
from flower_privdec.rows.keys import seed_keys
from flower_privdec.rows.tensors import aligned
from tools.bench.timing import Work, once
from tools.bench.workloads import SEED, Setup

TRIALS = 5  # of each form of a product
PEAK_SIZE = 512


@dataclass(frozen=True)
class MatrixLayer:
    """A layer with a weight matrix: its module and the shape of one example's input and output."""

    module: nn.Linear | nn.Conv2d
    inputs: torch.Size
    outputs: torch.Size

    @property
    def multiplications(self) -> int:
        """Return the multiplications of one product for one example."""
        return self.module.weight[0].numel() * self.outputs.numel()


def layers(setup: Setup) -> list[MatrixLayer]:
    """Return the linear and convolution layers of a workload's model, in order."""
    layers_in_order: list[MatrixLayer] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layers_in_order.append(MatrixLayer(layer, inputs[0].shape[1:], output.shape[1:]))

    hooks = [part.register_forward_hook(record) for part in setup.module.modules()]
    with torch.no_grad():
        setup.module(torch.zeros(1, *setup.workload.shape, dtype=setup.dtype, device=setup.device))
    for hook in hooks:
        hook.remove()
    return layers_in_order


def works(setup: Setup) -> dict[str, Work]:
    """Return the parts of the limit, to be timed: gemm, copy and noise."""
    rows = aligned(torch.zeros(setup.workload.n_peers, setup.d, dtype=setup.dtype, device=setup.device))
    peers = np.arange(len(rows))
    source = build_noise(seed_keys(SEED, peers), setup.device)
    std = rows.new_ones(len(rows))
    return {
        "gemm": _products(setup),
        "copy": copy(setup),
        "noise": lambda: source.add_(rows, std, 0, peers),
    }


def copy(setup: Setup) -> Work:
    """Return one copy of all peers' rows."""
    rows = aligned(torch.zeros(setup.workload.n_peers, setup.d, dtype=setup.dtype, device=setup.device))
    spare = aligned(rows)
    return lambda: spare.copy_(rows)


def operations(setup: Setup) -> int:
    """Return the floating-point operations of a round's products."""
    per_example = [2 * layer.multiplications * (2 if index == 0 else 3) for index, layer in enumerate(layers(setup))]
    return sum(per_example) * setup.workload.n_peers * setup.workload.batch


def peak(setup: Setup) -> Work:
    """Return one large product, of 2 PEAK_SIZE³ operations, whose speed is the most to be had of products."""
    a, b, out = (torch.ones(PEAK_SIZE, PEAK_SIZE, dtype=setup.dtype, device=setup.device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def forward(setup: Setup) -> Work:
    """Return the forward products of every layer."""
    return _products(setup, ("forward",))


def _products(setup: Setup, kinds: tuple[str, ...] = ("forward", "backward", "gradient")) -> Work:
    """Return products of every layer: of all peers' linear layers at once, and of convolutions one peer after the
    other, whose buffers then stay in the cache.

    Args:
        kinds: which of its products.
    """
    n = setup.workload.n_peers
    batch = setup.workload.batch
    calls: list[tuple[Work, int]] = []
    for index, layer in enumerate(layers(setup)):
        conv = layer.module if isinstance(layer.module, nn.Conv2d) else None
        for name, ways in _linear(layer, n, batch) if conv is None else _convolution(layer, conv, batch):
            needed = name != "backward" or index > 0  # nothing below the first layer needs a derivative
            if needed and name in kinds:
                fastest = min(ways, key=lambda way: min(once(way, setup.device)[0] for _ in range(TRIALS)))
                calls.append((fastest, 1 if conv is None else n))

    def run() -> None:
        for call, times in calls:
            for _ in range(times):
                call()

    return run


def _linear(layer: MatrixLayer, n: int, batch: int) -> Iterator[tuple[str, list[Work]]]:
    weight = layer.module.weight.detach().expand(n, -1, -1).contiguous()
    outputs, inputs = weight.shape[1:]
    new = weight.new_ones

    a = new(n, batch, inputs)
    delta = new(n, batch, outputs)
    z = torch.empty_like(delta)
    below = torch.empty_like(a)
    gradient = torch.empty_like(weight)
    up = weight.transpose(1, 2)
    down = a.transpose(1, 2)
    across = delta.transpose(1, 2)

    yield (
        "forward",
        [lambda: torch.bmm(a, up, out=z), lambda: torch.bmm(weight, down, out=z.view(n, outputs, batch))],
    )
    yield (
        "backward",
        [lambda: torch.bmm(delta, weight, out=below), lambda: torch.bmm(up, across, out=below.view(n, inputs, batch))],
    )
    outer: list[Work] = [lambda: torch.bmm(across, a, out=gradient)]
    yield "gradient", outer if batch > 1 else [*outer, lambda: torch.mul(across, a, out=gradient)]


def _convolution(layer: MatrixLayer, conv: nn.Conv2d, batch: int) -> Iterator[tuple[str, list[Work]]]:
    weight = conv.weight.detach()
    a = weight.new_ones(batch, *layer.inputs)
    delta = weight.new_ones(batch, *layer.outputs)
    stride = list(conv.stride)
    padding = list(conv.padding)
    dilation = list(conv.dilation)
    last = tuple(t.contiguous(memory_format=torch.channels_last) for t in (delta, a, weight))
    rows = weight[0].numel()
    positions = layer.outputs[1:].numel()
    patches = weight.new_ones(batch, rows, positions)
    written = weight.new_empty(batch, rows, len(weight))
    lines = delta.flatten(2).transpose(1, 2)

    def backward(tensors: tuple[Tensor, ...], *wanted: bool) -> Work:
        sizes = (stride, padding, dilation, False, [0, 0], 1)
        return lambda: torch.ops.aten.convolution_backward(*tensors, None, *sizes, [*wanted, False])

    def forward(_: Tensor, x: Tensor, w: Tensor) -> Work:
        return lambda: torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0, 0], 1)

    both = ((delta, a, weight), last)
    yield "forward", [forward(*tensors) for tensors in both]
    yield "backward", [backward(tensors, True, False) for tensors in both]
    by_example: list[Work] = [lambda: torch.bmm(patches, lines, out=written)]
    yield "gradient", [*by_example, *(backward(tensors, False, True) for tensors in both)]
