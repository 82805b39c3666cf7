"""Noise: the distribution, the keys, and that no row depends on who else is drawn."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import TESTS
from raising import raises
from scipy import stats

from flower_privdec.common.errors import ArgumentError
from flower_privdec.privacy.noise import NoiseSource, build_noise
from flower_privdec.privacy.noise.philox import LANES, PhiloxNoise, philox
from flower_privdec.rows.keys import WeakKeyError, digest, keyed_generator, seed_keys

FALSE_ALARM = 1e-7  # of each statistical check; the keys are fixed, so a check that passes goes on passing
DTYPES = [torch.float32, torch.float64]
ONES = 0xFFFFFFFF


def source(seed: int = 1, peers: Any = range(10)) -> NoiseSource:
    """A noise source for some peers."""
    return build_noise(seed_keys(seed, peers))


def draw(
    noise: NoiseSource,
    peers: Any,
    d: int,
    step: int = 0,
    purpose: str = "noise",
    dtype: torch.dtype = torch.float32,
    receivers: Any = None,
) -> torch.Tensor:
    """Standard normals [peers, d]."""
    out = torch.zeros(len(peers), d, dtype=dtype)
    to = None if receivers is None else np.asarray(receivers)
    noise.add_(out, torch.ones(len(peers), dtype=dtype), step, np.asarray(peers), purpose, to)
    return out


def philox_reference(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-7 in plain Python, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


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
    run = numba.njit(lambda a, b, c, d, low, high: philox(a, b, c, d, low, high))
    words = run(*(np.uint64(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in words) == expected
    assert philox_reference(counter, key) == expected


@pytest.mark.parametrize("receiver", [None, 7])
def test_fast_noise_is_box_muller_of_philox(receiver: int | None) -> None:
    """Every element of a row, the last tile's included, against a reference of two formulas."""
    key, peer, step, d = bytes(range(20)), 3, 2**32 - 2, 300
    noise = PhiloxNoise({peer: key, 4: bytes(16)})
    row = draw(noise, [peer], d, step, dtype=torch.float64, receivers=None if receiver is None else [receiver])[0]
    derived = int.from_bytes(digest(8, key, "noise", "noise", peer), "little")
    for column in range(d):
        tile, place = divmod(column, 4 * LANES)
        word, lane = divmod(place, LANES)
        counter = (tile * LANES + lane, step, ONES if receiver is None else receiver, 0)
        words = philox_reference(counter, (derived & ONES, derived >> 32))
        x, y = words[word // 2 * 2 : word // 2 * 2 + 2]
        radius = math.sqrt(-2 * math.log((x + 0.5) / 2**32)) * (-1 if y >> 30 & 1 else 1)
        angle = (((y << 2) & ONES) ^ 0x80000000) - 0x80000000
        pair = math.cos(angle * math.pi / 2**33), math.sin(angle * math.pi / 2**33)
        assert row[column].item() == pytest.approx(radius * pair[(word % 2) ^ (y >> 31)], abs=1e-13)


# --- the distribution


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("peers", "d"), [(4, 50_000), (100, 2000), (2000, 100)])
def test_noise_is_standard_normal(dtype: torch.dtype, peers: int, d: int) -> None:
    values = draw(source(7, range(peers)), range(peers), d, dtype=dtype).double().numpy().ravel()
    n, z = len(values), stats.norm.isf(FALSE_ALARM / 2)
    assert abs(values.mean()) < z / math.sqrt(n)
    assert abs(values.var() - 1) < z * math.sqrt(2 / n)
    assert abs((values**3).mean()) < z * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < z * math.sqrt(96 / n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    expected = n * 2 * stats.norm.sf(4)  # the tail beyond 4 sigma is Poisson
    count = int((np.abs(values) > 4).sum())
    assert stats.poisson.ppf(FALSE_ALARM / 2, expected) <= count <= stats.poisson.isf(FALSE_ALARM / 2, expected)


STREAMS = list(itertools.product((1, 2), (0, 1, 2), (0, 1, 5), ("noise", "personal"), (None, 0, 1)))


@pytest.mark.parametrize("d", [2_000, 20_000])
def test_rows_of_different_keys_are_uncorrelated(d: int) -> None:
    """Keys, peers, steps, purposes and receivers: neither values nor squares correlate, at lag 0 or a few."""
    rows = [
        draw(source(seed), [peer], d, step, purpose, receivers=None if to is None else [to])[0].double()
        for seed, peer, step, purpose, to in STREAMS
    ]
    stacked = torch.stack(rows)
    bound = stats.norm.isf(FALSE_ALARM / 2 / (len(rows) ** 2 * 8))
    for lag in (0, 1, 2, 16):
        for values, variance in ((stacked, 1.0), ((stacked**2 - 1).clamp(max=8), 4.0)):
            left, right = values[:, : d - lag], values[:, lag:]
            correlation = left @ right.T / math.sqrt((d - lag) * variance)
            if lag == 0:
                correlation.fill_diagonal_(0)
            assert correlation.abs().max() < bound


@pytest.mark.parametrize("d", [2_000, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_two_streams_share_a_number(d: int, dtype: torch.dtype) -> None:
    """Two runs, peers, steps, purposes, receivers: not four numbers in a row of one stand in another, nor twice."""
    quads: list[bytes] = []
    for seed, peer, step, purpose, to in STREAMS:
        row = draw(source(seed), [peer], d, step, purpose, dtype, None if to is None else [to])[0]
        quads += row.numpy().reshape(-1, 4).view(f"V{4 * row.element_size()}").ravel().tolist()
    assert len(set(quads)) == len(quads) == len(STREAMS) * d // 4


def test_peers_who_were_given_the_same_key_still_differ() -> None:
    rows = draw(build_noise(dict.fromkeys(range(3), bytes(16))), range(3), 100)
    assert len({tuple(row.tolist()) for row in rows}) == 3


def test_every_bit_of_a_key_counts() -> None:
    base = bytes(range(100, 132))
    keys = [base, base[:-1], base + b"\0", *(base[:i] + bytes([base[i] ^ 1]) + base[i + 1 :] for i in range(32))]
    rows = {tuple(draw(build_noise({0: key}), [0], 20)[0].tolist()) for key in keys}
    assert len(rows) == len(keys)


# --- the law of rows


ROWS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0, 3, 2**32 - 2])), min_size=1, max_size=8)
CALLS = st.lists(
    st.tuples(
        st.integers(0, 9) | st.integers(0, 2**32 - 1), st.sampled_from(["noise", "personal"]), st.booleans(), ROWS
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("dtype", DTYPES)
@given(calls=CALLS, d=st.sampled_from([1, 3, 100, 2000, 4097, 9000]))
@settings(max_examples=25)
def test_a_row_depends_only_on_its_keys(dtype: torch.dtype, calls: Any, d: int) -> None:
    """Bitwise: any rows in any order and number of a source that was used before, against a fresh one for one row."""
    used, generator = source(3), torch.Generator().manual_seed(1)
    for step, purpose, to_all, rows in calls:
        peers = np.array([peer for peer, _ in rows])
        receivers = None if to_all else np.array([to or 0 for _, to in rows])
        start = torch.randn(len(rows), d, generator=generator, dtype=dtype)
        std = torch.rand(len(rows), generator=generator, dtype=dtype)
        out = start.clone()
        used.add_(out, std, step, peers, purpose, receivers)
        for i in range(len(rows)):
            alone, one = start[i : i + 1].clone(), slice(i, i + 1)
            to = None if receivers is None else receivers[one]
            source(3).add_(alone, std[one], step, peers[one], purpose, to)
            assert torch.equal(alone[0], out[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_do_not_depend_on_the_cohort(dtype: torch.dtype) -> None:
    whole = {step: draw(source(), range(6), 200_000, step, dtype=dtype) for step in (0, 9)}
    used = source()
    for step, peers in [(9, [2]), (0, [5, 1]), (9, [5, 2]), (0, [1, 5])]:
        assert torch.equal(draw(used, peers, 200_000, step, dtype=dtype), whole[step][peers])


def test_some_rows_may_be_steps_ahead_of_others() -> None:
    noise = source()
    for step, peers in [(0, range(10)), (4, [3]), (4, range(10)), (0, [1]), (4, [3, 1]), (0, [3, 1])]:
        assert torch.equal(draw(noise, peers, 2000, step), draw(source(), peers, 2000, step))


def test_noise_is_added_with_its_scale() -> None:
    for d in (2001, 9001):
        noise, std = source(), torch.tensor([0.5, 0.0, 2.0])
        start = torch.full((3, d), 3.0)
        out = start.clone()
        noise.add_(out, std, 4, np.arange(3))
        torch.testing.assert_close(out, start + std[:, None] * draw(noise, range(3), d, 4), rtol=0, atol=2e-6)
        assert torch.equal(out[1], start[1])


@pytest.mark.parametrize("d", [100, 20_000])
def test_noise_is_added_to_rows_of_any_layout(d: int) -> None:
    noise, ones = source(), torch.ones(4)
    expected = draw(noise, range(4), d)
    for out in (torch.zeros(4, d + 5)[:, :d], torch.zeros(d, 4).T, torch.zeros(8, d)[::2]):
        noise.add_(out, ones, 0, np.arange(4))
        assert torch.equal(out, expected)


def test_padding_between_rows_stays_unchanged() -> None:
    base = torch.zeros(4, 205)
    source().add_(base[:, :200], torch.ones(4), 0, np.arange(4))
    assert not base[:, 200:].any()


def test_fast_noise_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = draw(source(), range(3), 100_001)
        torch.set_num_threads(3)
        assert torch.equal(draw(source(), range(3), 100_001), alone)
    finally:
        torch.set_num_threads(threads)


def test_fast_noise_is_the_same_in_both_precisions() -> None:
    single, double = (draw(source(), range(3), 10_000, dtype=dtype).double() for dtype in DTYPES)
    torch.testing.assert_close(single, double, rtol=2e-5, atol=5e-6)


def test_noise_leaves_the_global_generator_unchanged() -> None:
    state = torch.get_rng_state()
    draw(source(), range(2), 30_000)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="GPU NOISE NOT TESTED: Triton is not installed")
def test_gpu_code_draws_what_a_cpu_draws() -> None:
    """Triton interprets the kernel where there is no GPU; an interpreter of its own, for that is decided at import."""
    script = TESTS / "support" / "interpreted_noise.py"
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FAST NOISE ON CUDA NOT TESTED: no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_draws_what_a_cpu_draws(dtype: torch.dtype) -> None:
    outs = [torch.zeros(4, 159_010, dtype=dtype, device=device) for device in ("cpu", "cuda")]
    for out in outs:
        noise, std = build_noise(seed_keys(1, range(4)), out.device), out.new_ones(4)
        for step in (0, 1, 16, 2**32 - 1):
            noise.add_(out, std, step, np.arange(4))
    torch.testing.assert_close(outs[1].cpu(), outs[0], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOISE ON CUDA NOT TESTED: no GPU here")
@pytest.mark.parametrize("d", [100, 20_000])
def test_noise_on_a_gpu_obeys_the_law_of_rows(d: int) -> None:
    def on_gpu(peers: list[int], step: int, receivers: list[int] | None = None) -> torch.Tensor:
        out = torch.zeros(len(peers), d, device="cuda")
        noise = build_noise(seed_keys(1, range(5)), "cuda")
        to = None if receivers is None else np.array(receivers)
        noise.add_(out, torch.ones(len(peers), device="cuda"), step, np.array(peers), "noise", to)
        return out.cpu()

    whole = on_gpu([0, 1, 2, 3, 4], 6)
    assert torch.equal(on_gpu([3, 1], 6), whole[[3, 1]])
    assert not torch.equal(on_gpu([3, 1], 6, [0, 1]), whole[[3, 1]])
    assert abs(float(whole.std()) - 1) < 6 / math.sqrt(2 * whole.numel())


def test_rows_of_another_device_get_the_cpus_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel can be compiled for a device, its rows are copied to the CPU and back; so are these."""
    expected = draw(source(), range(3), 300)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    assert torch.equal(draw(source(), range(3), 300), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [5, 300, 200_000])
def test_both_ends_of_a_pair_draw_the_same(dtype: torch.dtype, d: int) -> None:
    """As if each pair's row was drawn by itself and added twice; threads, blocks and hosted ends change no bit."""
    noise, pairs, ends = source(3, range(6)), np.array([1, 4, 5]), np.array([[0, 1], [1, 2], [0, 2]])
    factors = np.array([[2.0, -2.0], [0.5, -0.5], [3.0, -3.0]])
    drawn = torch.zeros(3, d, dtype=dtype)
    noise.add_(drawn, torch.ones(3), 7, pairs, "pair")
    expected, out = torch.ones(3, d, dtype=dtype), torch.ones(3, d, dtype=dtype)
    for row, both, scales in zip(drawn, ends, factors, strict=True):
        for end, scale in zip(both, scales, strict=True):
            expected[end] += scale * row
    noise.add_shared_(out, ends, factors, 7, pairs, "pair")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
    alone = torch.ones(1, d, dtype=dtype)
    noise.add_shared_(alone, np.where(ends == 2, 0, -1)[1:], factors[1:], 7, pairs[1:], "pair")
    assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [5, 300, 200_000])
def test_what_all_draw_in_common_follows_its_formula(dtype: torch.dtype, d: int) -> None:
    """Threads, blocks and who else is hosted change no bit, and members that are not hosted draw their share."""
    noise, members, rows = source(3, range(6)), np.array([0, 2, 3, 5]), np.array([2, -1, 0, 1])
    factors = np.array([[2.0, 1.0, 0.5, 3.0], [1.0, 0.5, 0.25, 2.0], [0.5, 4.0, 1.0, 0.125]])
    drawn = torch.zeros(4, d, dtype=dtype)
    noise.add_(drawn, torch.ones(4), 7, members, "common")
    total = torch.from_numpy(factors[1]).to(drawn) @ drawn
    expected = torch.ones(3, d, dtype=dtype)
    for member, row in enumerate(rows.tolist()):
        if row >= 0:
            expected[row] += factors[0, member] * drawn[member] - factors[2, member] * total

    out = torch.ones(3, d, dtype=dtype)
    noise.add_common_(out, rows, factors, 7, members, "common")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
    alone = torch.ones(1, d, dtype=dtype)
    noise.add_common_(alone, np.array([-1, -1, 0, -1]), factors, 7, members, "common")
    assert torch.equal(alone[0], out[0])


# --- what is refused


def called(step: int = 0, d: int = 5, peers: Any = (0,), receivers: Any = None, **options: Any) -> Any:
    return lambda: draw(source(), list(peers), d, step, receivers=receivers, **options)


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (lambda: draw(build_noise({}), [0], 5), ("keys.missing", r"\[0\]")),
        (called(peers=[3, 10, -1]), ("keys.missing", r"\[10, -1\]")),
        (called(step=-1), ("noise.step", "step=-1")),
        (called(step=2**32), ("noise.step", "step=4294967296")),
        (called(dtype=torch.float16), ("noise.rows", "float16")),
        (called(receivers=[-1]), ("noise.receivers", "-1..-1")),
        (called(receivers=[2**32 - 1]), ("noise.receivers",)),
        (called(receivers=[1, 2]), ("noise.receivers", r"\[2\]")),
    ],
)
def test_bad_arguments_are_refused(call: Any, refusal: tuple[str, ...]) -> None:
    with raises(ArgumentError, *refusal):
        call()


def test_no_rows_and_no_columns_are_fine() -> None:
    for shape in ((0, 5), (2, 0)):
        source().add_(torch.zeros(shape), torch.ones(shape[0]), 0, np.arange(shape[0]))


def test_no_error_shows_a_key() -> None:
    secret = b"do not print me.."
    short, missing = (lambda: build_noise({0: secret[:9]})), (lambda: draw(build_noise({0: secret}), [1], 3))
    for call in (short, missing):
        with pytest.raises((WeakKeyError, ArgumentError)) as caught:
            call()
        assert "print" not in str(caught.value)


# --- generators of NumPy


def test_keyed_generator_depends_on_every_part_of_the_key() -> None:
    key = bytes(range(16))
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 0), (1, "a1"), (1, "a", -1)]
    keys += [(key, "a"), (key[::-1], "a"), (key + b"\0", "a"), (key, "b"), (key, "a", 0), (key, "a", 1)]
    first = [keyed_generator(*key).integers(2**63) for key in keys]  # type: ignore[arg-type]
    assert len(set(first)) == len(keys)
    assert keyed_generator(1, "a", np.int64(3)).random() == keyed_generator(1, "a", 3).random()


def test_public_draws_stay_what_they_were() -> None:
    assert keyed_generator(3, "sampling", 0, 2).integers(2**62) == 648480664982853114
    assert keyed_generator(2**70, "partition").integers(2**62) == 4502721388496052587


def test_keyed_generator_is_philox_keyed_by_the_hash() -> None:
    key = digest(16, 7, "sampling", (3, -1))
    expected = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    drawn = keyed_generator(7, "sampling", 3, -1)
    assert (
        drawn.integers(2**64, size=9, dtype=np.uint64).tolist()
        == expected.integers(2**64, size=9, dtype=np.uint64).tolist()
    )


def test_a_short_key_is_refused() -> None:
    with pytest.raises(WeakKeyError):
        keyed_generator(bytes(8), "sampling", 0, 2)
    for key in (bytes(15), "x" * 20):
        with pytest.raises(WeakKeyError):
            build_noise({1: key})  # type: ignore[dict-item]


def test_seed_keys_differ_by_seed_and_peer() -> None:
    keys = [*seed_keys(1, range(3)).values(), *seed_keys(2, range(3)).values()]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {32}
    assert seed_keys(1, np.array([2])) == {2: keys[2]}
