"""What a round cannot do without: the noise fill, the model's matrix products, and one copy of the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.bench.timing import Work
from flower_privdec.bench.workloads import SEED, Setup
from flower_privdec.randomness import build_noise


@dataclass(frozen=True)
class Layer:
    """A layer with a weight matrix, as products see it.

    Attributes:
        outputs, inputs: of the matrix; the inputs of a convolution are a patch.
        positions: how often it is applied to one example.
        first: whether nothing below it needs a derivative.
    """

    outputs: int
    inputs: int
    positions: int
    first: bool


def layers(setup: Setup) -> list[Layer]:
    """Return the linear and convolution layers of a workload's model, in order."""
    found: list[Layer] = []

    def record(layer: nn.Module, _: object, output: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        outputs = weight.shape[0]
        found.append(Layer(outputs, weight.numel() // outputs, output.numel() // outputs, not found))

    hooks = [
        part.register_forward_hook(record)
        for part in setup.module.modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        setup.module(torch.zeros(1, *setup.workload.shape, dtype=setup.dtype, device=setup.device))
    for hook in hooks:
        hook.remove()
    return found


def works(setup: Setup, generators: list[str]) -> dict[str, Work]:
    """Return the parts of the limit, to be timed: gemm, copy, and noise-GENERATOR for each generator."""
    n, d = setup.workload.n_peers, setup.d
    rows = torch.zeros(n, d, dtype=setup.dtype, device=setup.device)
    spare = torch.zeros_like(rows)
    parts: dict[str, Work] = {"gemm": _products(setup), "copy": lambda: spare.copy_(rows)}
    for generator in generators:
        parts[f"noise-{generator}"] = _fill(setup, rows, generator)
    return parts


def _fill(setup: Setup, rows: Tensor, generator: str) -> Work:
    if generator == "torch":
        return lambda: rows.normal_()
    source = build_noise(generator, SEED, len(rows), setup.device)
    std, peers = torch.ones(len(rows), dtype=rows.dtype), np.arange(len(rows))
    return lambda: source.add_(rows, std, 0, peers)


def _products(setup: Setup) -> Work:
    """Return forward, backward and gradient products of every layer: of all peers at once, or one convolution
    after the other, whose buffers then stay in the cache."""
    n, batch = setup.workload.n_peers, setup.workload.batch
    calls: list[tuple[int, list[tuple[Tensor, Tensor, Tensor]]]] = []
    for layer in layers(setup):
        peers, times = (n, 1) if layer.positions == 1 else (1, n)
        rows = batch * layer.positions

        def zeros(*shape: int, peers: int = peers) -> Tensor:
            return torch.ones(peers, *shape, dtype=setup.dtype, device=setup.device)

        weight, gradient = zeros(layer.outputs, layer.inputs), zeros(layer.outputs, layer.inputs)
        a, delta = zeros(layer.inputs, rows), zeros(layer.outputs, rows)
        products = [(weight, a, zeros(layer.outputs, rows)), (delta, a.transpose(1, 2), gradient)]
        if not layer.first:
            products.append((weight.transpose(1, 2), delta, zeros(layer.inputs, rows)))
        calls.append((times, products))

    def run() -> None:
        for times, products in calls:
            for _ in range(times):
                for left, right, out in products:
                    torch.bmm(left, right, out=out)

    return run
