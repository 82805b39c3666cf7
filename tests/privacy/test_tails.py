"""The tails of the noise: exact far beyond where 24 or 32 bits of radius would end them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numba
import numpy as np
import pytest
import torch
from scipy import stats

from flower_privdec.privacy.noise import build_noise
from flower_privdec.privacy.noise import philox as kernels
from flower_privdec.privacy.noise.philox import REFINED, PhiloxNoise
from flower_privdec.rows.keys import seed_keys

FALSE_ALARM = 1e-7
THRESHOLD = 4.25
ONES = 2**32 - 1


# --- the distribution


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_beyond_the_threshold_have_normal_tails(dtype: torch.dtype) -> None:
    """How many, how far, and on which side."""
    noise, d, total, beyond = build_noise(seed_keys(5, range(1))), 2_000_000, 100_000_000, []
    ones, peers = torch.ones(1, dtype=dtype), np.arange(1)
    for step in range(total // d):
        out = torch.zeros(1, d, dtype=dtype)
        noise.add_(out, ones, step, peers)
        beyond.append(out[out.abs() > THRESHOLD].double())
    values = torch.cat(beyond).numpy()
    n, mass = len(values), 2 * stats.norm.sf(THRESHOLD)
    expected = total * mass
    assert stats.poisson.ppf(FALSE_ALARM / 2, expected) <= n <= stats.poisson.isf(FALSE_ALARM / 2, expected)
    assert stats.kstest(2 * stats.norm.sf(np.abs(values)) / mass, "uniform").pvalue > FALSE_ALARM
    assert stats.binomtest(int((values > 0).sum()), n).pvalue > FALSE_ALARM


# --- refined radii


def philox(counters: np.ndarray, step: int, receiver: int, domain: int, key: int) -> list[np.ndarray]:
    """Philox4x32-7 of many counters, uint64."""
    c = [counters, *(np.full_like(counters, word) for word in (step, receiver, domain))]
    k0, k1 = key & ONES, key >> 32
    low, half = np.uint64(ONES), np.uint64(32)
    for _ in range(7):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> half) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> half) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c


def box_muller(v: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two normals of a radius at v of 2**32 and the word of an angle."""
    radius = np.sqrt(-2 * np.log(v / 2**32)) * np.where(y >> np.uint64(30) & np.uint64(1), -1, 1)
    angle = (y << np.uint64(2)).astype(np.uint32).view(np.int32) * (np.pi / 2**33)
    first, second = radius * np.cos(angle), radius * np.sin(angle)
    swap = (y >> np.uint64(31)).astype(bool)
    return np.where(swap, second, first), np.where(swap, first, second)


def fast_row(d: int, step: int, receiver: int, key: int, refined: int) -> tuple[np.ndarray, int]:
    """A row of whole tiles by NumPy, and how many radii were refined."""
    counters, count = np.arange(d // 4, dtype=np.uint64), 0
    words, more = (philox(counters, step, receiver, domain, key) for domain in (0, 1))
    numbers = []
    for i in (0, 2):
        fraction = (more[i] + (more[i + 1] + 0.5) / 2**32) / 2**32
        rare = words[i] < refined
        count += int(rare.sum())
        numbers += box_muller(words[i] + np.where(rare, fraction, 0.5), words[i + 1])
    return np.stack([each.reshape(-1, 32) for each in numbers], axis=1).reshape(-1), count


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
def test_fast_rows_are_refined_where_their_words_are_small(dtype: torch.dtype, tolerance: float) -> None:
    """Every one of a million numbers against NumPy, in whole tiles and in the last one."""
    keys, d = seed_keys(2, [3]), 2**21
    key = int(PhiloxNoise(keys).table("noise")[0])
    expected, count = fast_row(d, 9, ONES, key, int(REFINED))
    assert count > 8  # of 16 expected
    for length in (d, d - 50):
        out = torch.zeros(1, length, dtype=dtype)
        build_noise(keys).add_(out, torch.ones(1, dtype=dtype), 9, np.array([3]))
        assert np.abs(out[0].double().numpy() - expected[:length]).max() < tolerance


def fast_radii(words: Any) -> list[float]:
    """The radii of refined words, as the kernel computes them."""
    run = numba.njit(lambda x, x1, x2: kernels.polar64(kernels.refined(x, x1, x2), np.uint32(0))[0])
    return [float(run(*(np.uint32(word) for word in each))) for each in words]


def test_refined_radii_are_the_quantiles_without_a_gap() -> None:
    """In the order of their words radii fall, each by little; they reach 11.5, and meet the 32-bit grid."""
    steps = [0, 1, 2, 3, *(2**k for k in range(2, 32)), ONES]
    words = [(0, 0, low) for low in steps] + [(0, high, 7) for high in steps[1:]]
    words += [(x, high, ONES) for x in (*steps[1:18], int(REFINED) - 1) for high in (0, 2**31, ONES)]
    radii = fast_radii(words)
    shares = [(x * 2**64 + x1 * 2**32 + x2 + 0.5) / 2**96 for x, x1, x2 in words]
    assert radii == pytest.approx([math.sqrt(-2 * math.log(share)) for share in shares], rel=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(radii))
    assert max(a - b for a, b in itertools.pairwise(radii)) < 0.2
    assert radii[0] > 11.5
    assert radii[-1] == pytest.approx(math.sqrt(-2 * math.log((int(REFINED) + 0.5) / 2**32)), abs=2e-6)
