"""Noise of deployed peers: normal to the far tail, from fresh entropy of the operating system at every call."""

from __future__ import annotations

import itertools
import math
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from scipy import stats

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.privacy.exact_noise import PIECE, SystemNormals
from flower_privdec.privacy.noise import SystemNoise

ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")

FALSE_ALARM = 1e-7  # of each check; entropy is fixed in the statistical ones, so one that passes goes on passing
DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the operating system's entropy by a count, and return how many bytes each call asked for."""
    calls: list[int] = []

    def urandom(size: int) -> bytes:
        calls.append(size)
        return len(calls).to_bytes(size, "big")

    monkeypatch.setattr(os, "urandom", urandom)
    return calls


def draw(m: int, d: int, dtype: torch.dtype = torch.float64, noise: Any = None) -> torch.Tensor:
    """Standard normals [m, d]."""
    out = torch.zeros(m, d, dtype=dtype)
    (noise or SystemNoise()).add_(out, torch.ones(m, dtype=dtype), 0, np.arange(m))
    return out


def key_stream(key: bytes, words: int) -> np.ndarray:
    """AES-256 of 0, 1, 2, ..."""
    cipher = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.ECB()).encryptor()
    blocks = b"".join(number.to_bytes(16, "big") for number in range(-(-words // 2)))
    return np.frombuffer(cipher.update(blocks), np.uint64)[:words]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d"), [(1, 2_000_000), (100, 2000), (3, 70_001)])
def test_noise_is_standard_normal(asked: list[int], dtype: torch.dtype, m: int, d: int) -> None:
    values = draw(m, d, dtype).double().numpy().ravel()
    n, z = len(values), stats.norm.isf(FALSE_ALARM / 2)
    assert abs(values.mean()) < z / math.sqrt(n)
    assert abs(values.var() - 1) < z * math.sqrt(2 / n)
    assert abs((values**3).mean()) < z * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < z * math.sqrt(96 / n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    for beyond in (3, 4):
        expected = n * 2 * stats.norm.sf(beyond)
        count = int((np.abs(values) > beyond).sum())
        assert stats.poisson.ppf(FALSE_ALARM / 2, expected) <= count <= stats.poisson.isf(FALSE_ALARM / 2, expected)
    for lag in (1, 2, d // 2, 2**14, 2**15):
        assert abs(values[lag:] @ values[: n - lag]) < z * math.sqrt(n)


@pytest.mark.parametrize(("m", "d"), [(1, 7), (1, PIECE + 9), (3, 100)])
def test_noise_is_box_muller_of_the_key_stream(asked: list[int], m: int, d: int) -> None:
    """Every number against AES in another mode and NumPy, in pieces whose halves are radii and angles."""
    found, key = draw(m, d).numpy().ravel(), (1).to_bytes(32, "big")
    widths = [m * d] if m * d < PIECE else [-(-d // 2), d // 2]
    words, expected = key_stream(key, 2 * (m * d + 2)), []
    for width in widths:
        pairs = -(-width // 2)
        first, second, words = words[:pairs], words[pairs : 2 * pairs], words[2 * pairs :]
        radius = np.sqrt(-2 * np.log(((first >> np.uint64(1)).astype(float) + 0.5) / 2**63))
        angle = second.view(np.int64) * (np.pi / 2**63)
        expected += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:width].tolist()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_tails_reach_beyond_nine_without_a_gap() -> None:
    """From the words of a cipher that is made up."""

    class Words:
        def update_into(self, zeros: Any, stream: bytearray) -> None:
            stream[: words.nbytes] = words.tobytes()

    shares = np.array([0, 1, 2, 3, *(2**k for k in range(2, 63)), 2**63 - 1], dtype=np.uint64)
    words = np.concatenate([shares << np.uint64(1), np.zeros_like(shares)])
    normals = SystemNormals(Words(), 2 * len(shares)).draw(2 * len(shares))
    radii = normals[: len(shares)]
    np.testing.assert_allclose(radii, np.sqrt(-2 * np.log((shares.astype(float) + 0.5) / 2**63)), rtol=1e-12)
    assert all(a > b for a, b in itertools.pairwise(radii))
    assert max(a - b for a, b in itertools.pairwise(radii[radii > 3])) < 0.25  # ln 2 over a radius
    assert radii[0] > 9.4
    assert not normals[len(shares) :].any()


def test_every_call_asks_the_operating_system(asked: list[int]) -> None:
    noise = SystemNoise()
    rows = [draw(2, 50_000, noise=noise) for _ in range(3)]
    assert asked == [32, 32, 32]
    assert len({*torch.cat(rows).view(-1).tolist()}) == 3 * 2 * 50_000


def test_nothing_repeats_it(asked: list[int]) -> None:
    """Neither keys, steps, peers nor any seed: two calls, and two rows for one peer, share no number."""
    values: list[float] = []
    for _ in range(2):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        noise, out = SystemNoise(), torch.zeros(2, 5000, dtype=torch.float64)
        noise.add_(out, torch.ones(2), 3, np.zeros(2, np.int64), "noise", np.zeros(2, np.int64))
        values += out.view(-1).tolist()
    assert len(set(values)) == len(values)


def test_no_other_generator_is_touched() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    draw(1, 100_000)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_equal(np.random.get_state(), numpy_state)  # noqa: NPY002


def test_without_entropy_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(size: int) -> bytes:
        raise BlockingIOError

    monkeypatch.setattr(os, "urandom", broken)
    noise, out = SystemNoise(), torch.zeros(1, 10)
    with pytest.raises(BlockingIOError):
        noise.add_(out, torch.ones(1), 0, np.arange(1))
    assert not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 101, 40_001])
def test_noise_is_scaled_in_rows_of_any_layout(asked: list[int], dtype: torch.dtype, d: int) -> None:
    std = torch.tensor([0.5, 0.0, 2.0], dtype=dtype)
    unit = draw(3, d, dtype)
    for out in (torch.zeros(3, d + 5, dtype=dtype)[:, :d], torch.zeros(d, 3, dtype=dtype).T):
        asked.clear()  # so that the same key comes again
        out.add_(3)
        SystemNoise().add_(out, std, 0, np.arange(3))
        torch.testing.assert_close(out, 3 + std[:, None] * unit, rtol=0, atol=2e-6)
        assert (out[1] == 3).all()


def test_rules_are_those_of_every_source() -> None:
    with raises(ArgumentError, "noise.step", "step=-1"):
        SystemNoise().add_(torch.zeros(1, 3), torch.ones(1), -1, np.arange(1))
    for shape in ((0, 5), (2, 0)):
        SystemNoise().add_(torch.zeros(shape), torch.ones(shape[0]), 0, np.arange(shape[0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="SYSTEM NOISE ON CUDA NOT TESTED: no GPU here")
def test_noise_for_a_gpu_is_that_for_the_cpu(asked: list[int]) -> None:
    out, unit = torch.zeros(2, 50_000, device="cuda"), draw(2, 50_000, torch.float32)
    asked.clear()
    SystemNoise().add_(out, torch.ones(2, device="cuda"), 0, np.arange(2))
    torch.testing.assert_close(out.cpu(), unit, rtol=0, atol=1e-6)


def test_without_cryptography_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with raises(ScenarioError, "noise.cryptography", "pip install cryptography"):
        SystemNoise()


def test_a_release_hides_which_sum_was_rounded() -> None:
    """Normals rounded to float32 before they are added told two sums that differ by 2^-24 apart, 20 times of 20.

    A normal in [1, 1.25) then has no bit below 2^-23, so that a release in (0.75, 1) minus the true sum -0.25 has none.
    """
    out = torch.full((1, 400_000), -0.25)
    SystemNoise().add_(out, torch.ones(1), 0, np.zeros(1, dtype=np.int64))
    released = out[(out > 0.75) & (out < 1)].double()
    coarse = ((released + 0.25) * 2**23).frac() == 0
    assert len(released) > 10_000
    assert 0.45 < float(coarse.double().mean()) < 0.55  # over ten standard deviations away from luck
