"""Noise: the distribution, the keys, and that no row depends on who else is drawn."""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from flower_privdec.errors import ScenarioError
from flower_privdec.randomness import (
    NOISE_PURPOSES,
    FastNoise,
    NoiseSource,
    TorchNoise,
    build_noise,
    keyed_generator,
)

FALSE_ALARM = 1e-7  # of each statistical check; the seeds are fixed, so a check that passes goes on passing
HAVE_NUMBA = importlib.util.find_spec("numba") is not None
SOURCES = [
    pytest.param("fast", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="numba is not installed")),
    "torch",
]


def draw(
    source: NoiseSource,
    peers: Any,
    d: int,
    round_index: int = 0,
    purpose: str = "noise",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Standard normals [peers, d]."""
    out = torch.zeros(len(peers), d, dtype=dtype)
    source.add_(out, torch.ones(len(peers), dtype=dtype), round_index, np.asarray(peers), purpose)
    return out


def philox_reference(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-7 in plain Python, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32-7
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    numba = pytest.importorskip("numba")
    from flower_privdec._philox import philox

    run = numba.njit(lambda a, b, c, d, low, high: philox(a, b, c, d, low, high))
    words = run(*(np.uint64(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in words) == expected
    assert philox_reference(counter, key) == expected


def test_fast_noise_is_box_muller_of_philox() -> None:
    """Every element of a row, tail included, against a reference of two formulas."""
    pytest.importorskip("numba")
    from flower_privdec._philox import LANES
    from flower_privdec.randomness import _digest

    seed, peer, round_index, d = 2**40 + 17, 3, 5, 300
    row = draw(FastNoise(seed, 10), [peer], d, round_index, dtype=torch.float64)[0]
    for column in range(d):
        tile, place = divmod(column, 4 * LANES)
        word, lane = divmod(place, LANES)
        counter = (tile * LANES + lane, round_index, peer, _digest("noise", 4))
        words = philox_reference(counter, (seed & ONES, seed >> 32))
        x, y = words[word // 2 * 2 : word // 2 * 2 + 2]
        radius = math.sqrt(-2 * math.log((x + 0.5) / 2**32)) * (-1 if y >> 30 & 1 else 1)
        angle = (((y << 2) & ONES) ^ 0x80000000) - 0x80000000
        pair = math.cos(angle * math.pi / 2**33), math.sin(angle * math.pi / 2**33)
        expected = radius * pair[(word % 2) ^ (y >> 31)]
        assert row[column].item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("peers", "d"), [(4, 50_000), (100, 2000), (2000, 100)])
def test_noise_is_standard_normal(source: str, dtype: torch.dtype, peers: int, d: int) -> None:
    values = draw(build_noise(source, 7, peers), range(peers), d, dtype=dtype).double().numpy().ravel()
    n, z = len(values), stats.norm.isf(FALSE_ALARM / 2)
    assert abs(values.mean()) < z / math.sqrt(n)
    assert abs(values.var() - 1) < z * math.sqrt(2 / n)
    assert abs((values**3).mean()) < z * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < z * math.sqrt(96 / n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    expected = n * 2 * stats.norm.sf(4)  # the tail beyond 4 sigma is Poisson
    count = int((np.abs(values) > 4).sum())
    assert stats.poisson.ppf(FALSE_ALARM / 2, expected) <= count <= stats.poisson.isf(FALSE_ALARM / 2, expected)


@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_different_keys_are_uncorrelated(source: str) -> None:
    """Peers, rounds, purposes and seeds: neither values nor squares correlate, at lag 0 or a few."""
    d = 20_000
    keys = list(itertools.product((1, 2), (0, 1, 2), ("noise", "personal"), (0, 1, 2)))
    rows = [
        draw(build_noise(source, seed, 3), [peer], d, index, purpose)[0].double() for seed, index, purpose, peer in keys
    ]
    stacked = torch.stack(rows)
    bound = stats.norm.isf(FALSE_ALARM / 2 / (len(keys) ** 2 * 8))
    for lag in (0, 1, 2, 16):
        for values, variance in ((stacked, 1.0), (stacked**2 - 1, 4.0)):
            left, right = values[:, : d - lag], values[:, lag:]
            correlation = left @ right.T / math.sqrt((d - lag) * variance)
            if lag == 0:
                correlation.fill_diagonal_(0)
            assert correlation.abs().max() < bound


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("d", [3, 100, 2000, 9000, 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_the_cohort(source: str, d: int, dtype: torch.dtype) -> None:
    """Bitwise: all peers, some of them, one at a time, in any order of rounds, by sources old and new."""
    whole = {index: draw(build_noise(source, 3, 6), range(6), d, index, dtype=dtype) for index in (0, 1, 9)}
    used = build_noise(source, 3, 6)
    for index, peers in [(9, [2]), (0, [5, 1]), (1, [0, 1, 2, 3, 4, 5]), (0, [3]), (9, [5, 2]), (0, [1, 5])]:
        assert torch.equal(draw(used, peers, d, index, dtype=dtype), whole[index][peers])


@pytest.mark.parametrize("source", SOURCES)
def test_keys_differ(source: str) -> None:
    d = 50
    rows = [
        tuple(draw(build_noise(source, seed, 40), [peer], d, index, purpose)[0].tolist())
        for seed in (0, 1, 2**63)
        for peer in (0, 1, 39)
        for index in (0, 1, 163, 164, 5000)
        for purpose in NOISE_PURPOSES
    ]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_added_with_its_scale(source: str) -> None:
    noise, std = build_noise(source, 1, 3), torch.tensor([0.5, 0.0, 2.0])
    start = torch.full((3, 2001), 3.0)
    out = start.clone()
    noise.add_(out, std, 4, np.arange(3))
    unit = draw(noise, range(3), 2001, 4)
    torch.testing.assert_close(out, start + std[:, None] * unit, rtol=0, atol=1e-6)
    assert torch.equal(out[1], start[1])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("d", [100, 20_000])
def test_noise_is_added_to_rows_of_any_layout(source: str, d: int) -> None:
    noise, ones = build_noise(source, 1, 4), torch.ones(4)
    expected = draw(noise, range(4), d)
    for out in (torch.zeros(4, d + 5)[:, :d], torch.zeros(d, 4).T, torch.zeros(8, d)[::2]):
        noise.add_(out, ones, 0, np.arange(4))
        assert torch.equal(out, expected)


def test_padding_between_rows_is_left_alone() -> None:
    pytest.importorskip("numba")
    base = torch.zeros(4, 205)
    FastNoise(1, 4).add_(base[:, :200], torch.ones(4), 0, np.arange(4))
    assert not base[:, 200:].any()


def test_fast_noise_does_not_depend_on_threads() -> None:
    pytest.importorskip("numba")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = draw(FastNoise(1, 3), range(3), 100_001)
        torch.set_num_threads(3)
        assert torch.equal(draw(FastNoise(1, 3), range(3), 100_001), alone)
    finally:
        torch.set_num_threads(threads)


def test_fast_noise_is_the_same_in_both_precisions() -> None:
    pytest.importorskip("numba")
    single, double = (
        draw(FastNoise(5, 3), range(3), 10_000, dtype=dtype).double() for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=2e-5, atol=5e-6)


def test_torch_seeds_never_collide() -> None:
    """The seed is a one-to-one function of (block of rounds, peer, purpose)."""
    n_peers, seeds = 20, []

    class Recorder:
        def manual_seed(self, seed: int) -> None:
            seeds.append(seed)

    noise = TorchNoise(123, n_peers)
    noise._generator = Recorder()  # type: ignore[assignment]
    for block, peer, purpose in itertools.product(range(200), range(n_peers), NOISE_PURPOSES):
        noise._reseed(block, peer, purpose)
    assert len(set(seeds)) == len(seeds) == 200 * n_peers * len(NOISE_PURPOSES)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_torch_noise_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    draw(build_noise("torch", 1, 2), range(2), 30_000)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_noise("quick", 1, 2), "generator='quick'"),
        (lambda: build_noise("fast", 1, 2, "cuda"), "runs on a CPU"),
        (lambda: build_noise("torch", -1, 2), "seed=-1"),
        (lambda: draw(build_noise("torch", 1, 2), [2], 5), "n_peers=2"),
        (lambda: draw(build_noise("torch", 1, 2), [0], 5, purpose="nose"), "purpose='nose'"),
        (lambda: draw(build_noise("torch", 1, 2), [0], 9000, round_index=2**29), "set generator to fast"),
        (lambda: draw(build_noise("auto", 1, 2), [0], 5, round_index=-1), "-1"),
        (lambda: draw(build_noise("torch", 1, 2), [0], 5, dtype=torch.float16), "float16"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        call()


def test_without_numba_auto_falls_to_torch_and_fast_says_what_to_do(monkeypatch: Any) -> None:
    import sys

    import flower_privdec

    monkeypatch.setitem(sys.modules, "flower_privdec._philox", None)
    monkeypatch.delattr(flower_privdec, "_philox", raising=False)
    assert isinstance(build_noise("auto", 1, 2), TorchNoise)
    with pytest.raises(ScenarioError, match=r"pip install 'flower-privdec\[fast\]'"):
        build_noise("fast", 1, 2)


def test_auto_takes_the_fast_generator_on_a_cpu() -> None:
    pytest.importorskip("numba")
    assert isinstance(build_noise("auto", 1, 2), FastNoise)


def test_keyed_generator_depends_on_every_part_of_the_key() -> None:
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 0), (1, "a1"), (1, "a", -1)]
    first = [keyed_generator(*key).integers(2**63) for key in keys]  # type: ignore[arg-type]
    assert len(set(first)) == len(keys)
    assert keyed_generator(1, "a", np.int64(3)).random() == keyed_generator(1, "a", 3).random()
