"""The laws of GPUNoise, run under Triton's interpreter (TRITON_INTERPRET=1) on a CPU: see test_randomness.py."""

from __future__ import annotations

import numpy as np
import torch
from raising import raises
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.privacy.noise import gpu_philox
from flower_privdec.privacy.noise.gpu_philox import GPUNoise
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.rows.keys import seed_keys
from flower_privdec.rows.tensors import empty_rows

KEYS = seed_keys(1, range(6))
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}


def drawn(noise: PhiloxNoise | GPUNoise, out: Tensor, peers: list[int], step: int, **options: object) -> Tensor:
    std = torch.linspace(0.5, 2, len(peers), dtype=out.dtype)
    noise.add_(out, std, step, np.array(peers), **options)
    return out


def same_as_on_a_cpu(gpu: GPUNoise) -> None:
    cpu = PhiloxNoise(KEYS)
    for dtype, close in CLOSE.items():
        for d, step in ((1, 0), (127, 1), (129, 16), (4101, 2**32 - 1)):
            for to in (None, np.array([0, 2**32 - 2])):
                rows = [drawn(noise, torch.ones(2, d, dtype=dtype), [4, 1], step, receivers=to) for noise in (cpu, gpu)]
                torch.testing.assert_close(*rows, rtol=0, atol=close)


def pairs_as_on_a_cpu(gpu: GPUNoise) -> None:
    for dtype, close in CLOSE.items():
        rows = [torch.ones(3, 300, dtype=dtype) for _ in range(2)]
        for noise, out in zip((PhiloxNoise(KEYS), gpu), rows, strict=True):
            ends, factors = np.array([[0, 1], [1, -1], [2, 0]]), np.array([[2.0, -2.0], [0.5, -0.5], [3.0, -3.0]])
            noise.add_shared_(out, ends, factors, 7, np.array([1, 4, 5]), "pair")
        torch.testing.assert_close(*rows, rtol=0, atol=4 * close)


def common_as_on_a_cpu(gpu: GPUNoise) -> None:
    for dtype, close in CLOSE.items():
        rows = [torch.ones(2, 300, dtype=dtype) for _ in range(2)]
        for noise, out in zip((PhiloxNoise(KEYS), gpu), rows, strict=True):
            factors = np.array([[2.0, 0.5, 3.0], [1.0, 2.0, 0.5], [0.5, 0.25, 1.0]])
            noise.add_common_(out, np.array([1, -1, 0]), factors, 7, np.array([1, 4, 5]), "common")
        torch.testing.assert_close(*rows, rtol=0, atol=8 * close)


def law_of_rows(gpu: GPUNoise) -> None:
    def unit(peers: list[int], **options: object) -> Tensor:
        out = torch.zeros(len(peers), 300)
        gpu.add_(out, torch.ones(len(peers)), 5, np.array(peers), **options)
        return out

    whole = unit([0, 1, 2, 3])
    assert torch.equal(unit([3, 1]), whole[[3, 1]])
    assert torch.equal(unit([0, 1, 2, 3]), whole)
    others = unit([0, 1], purpose="other"), unit([0, 1], receivers=np.array([0, 0]))
    assert not any((other == whole[:2]).any() for other in others)


def untouched_and_padded(gpu: GPUNoise) -> None:
    out = torch.full((2, 200), torch.inf)
    gpu.add_(out, torch.zeros(2), 5, np.arange(2))
    assert bool((out == torch.inf).all())
    plain, padded = torch.zeros(3, 200), empty_rows(torch.zeros(3, 200), 3, 200).zero_()
    across = torch.zeros(200, 3).T
    for rows in (plain, padded, across):
        drawn(gpu, rows, [0, 1, 2], 5)
        assert torch.equal(rows, plain)
    gpu.add_(torch.zeros(0, 200), torch.zeros(0), 5, np.arange(0))


def what_stays_is_bounded(gpu: GPUNoise) -> None:
    for number in range(gpu_philox._MOST_SETS + 5):
        drawn(gpu, torch.zeros(1, 3), [1], 5, receivers=np.array([number]))
    assert len(gpu._device_keys) == gpu_philox._MOST_SETS


def other_numbers_are_refused() -> None:
    gpu_philox._EXPECTED[0] += 1e-4
    with raises(RunError, "noise.gpu"):
        GPUNoise(KEYS, "cpu")


noise = GPUNoise(KEYS, "cpu")
same_as_on_a_cpu(noise)
pairs_as_on_a_cpu(noise)
common_as_on_a_cpu(noise)
law_of_rows(noise)
untouched_and_padded(noise)
what_stays_is_bounded(noise)
other_numbers_are_refused()
