"""Noise: the distribution, the keys, and that no row depends on who else is drawn."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import TESTS
from scipy import stats

from flower_privdec import rows as randomness
from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.noise import FastNoise, NoiseSource, TorchNoise, build_noise, mersenne, torch_noise
from flower_privdec.rows.keys import digest, keyed_generator, seed_keys

FALSE_ALARM = 1e-7  # of each statistical check; the keys are fixed, so a check that passes goes on passing
HAVE_NUMBA = importlib.util.find_spec("numba") is not None
NEEDS_NUMBA = pytest.mark.skipif(not HAVE_NUMBA, reason="numba is not installed")
SOURCES = [pytest.param("fast", marks=NEEDS_NUMBA), "torch"]
DTYPES = [torch.float32, torch.float64]
ONES = 0xFFFFFFFF


def source(name: str, seed: int = 1, peers: Any = range(10)) -> NoiseSource:
    """A noise source for some peers."""
    return build_noise(name, seed_keys(seed, peers))


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
    numba = pytest.importorskip("numba")
    from flower_privdec.privacy.noise.philox import philox

    run = numba.njit(lambda a, b, c, d, low, high: philox(a, b, c, d, low, high))
    words = run(*(np.uint64(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in words) == expected
    assert philox_reference(counter, key) == expected


@NEEDS_NUMBA
@pytest.mark.parametrize("receiver", [None, 7])
def test_fast_noise_is_box_muller_of_philox(receiver: int | None) -> None:
    """Every element of a row, the last tile's included, against a reference of two formulas."""
    from flower_privdec.privacy.noise.philox import LANES

    key, peer, step, d = bytes(range(20)), 3, 2**32 - 2, 300
    noise = FastNoise({peer: key, 4: bytes(16)})
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


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("peers", "d"), [(4, 50_000), (100, 2000), (2000, 100)])
def test_noise_is_standard_normal(name: str, dtype: torch.dtype, peers: int, d: int) -> None:
    values = draw(source(name, 7, range(peers)), range(peers), d, dtype=dtype).double().numpy().ravel()
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


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("d", [2_000, 20_000])
def test_rows_of_different_keys_are_uncorrelated(name: str, d: int) -> None:
    """Keys, peers, steps, purposes and receivers: neither values nor squares correlate, at lag 0 or a few."""
    rows = [
        draw(source(name, seed), [peer], d, step, purpose, receivers=None if to is None else [to])[0].double()
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


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("d", [2_000, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_two_streams_share_a_number(name: str, d: int, dtype: torch.dtype) -> None:
    """Two runs, peers, steps, purposes, receivers: not four numbers in a row of one stand in another, nor twice."""
    quads: list[bytes] = []
    for seed, peer, step, purpose, to in STREAMS:
        row = draw(source(name, seed), [peer], d, step, purpose, dtype, None if to is None else [to])[0]
        quads += row.numpy().reshape(-1, 4).view(f"V{4 * row.element_size()}").ravel().tolist()
    assert len(set(quads)) == len(quads) == len(STREAMS) * d // 4


def test_peers_who_were_given_the_same_key_still_differ() -> None:
    for name in ("auto", "torch"):
        rows = draw(build_noise(name, dict.fromkeys(range(3), bytes(16))), range(3), 100)
        assert len({tuple(row.tolist()) for row in rows}) == 3


def test_every_bit_of_a_key_counts() -> None:
    base = bytes(range(100, 132))
    keys = [base, base[:-1], base + b"\0", *(base[:i] + bytes([base[i] ^ 1]) + base[i + 1 :] for i in range(32))]
    for name in ("auto", "torch"):
        rows = {tuple(draw(build_noise(name, {0: key}), [0], 20)[0].tolist()) for key in keys}
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


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(calls=CALLS, d=st.sampled_from([1, 3, 100, 2000, 4097, 9000]), room=st.sampled_from([1, 3, 4096]))
@settings(max_examples=25)
def test_a_row_depends_on_its_keys_alone(name: str, dtype: torch.dtype, calls: Any, d: int, room: int) -> None:
    """Bitwise: any rows in any order and number of a source that was used before, against a fresh one for one row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_noise, "_ROOM", room)
        used, generator = source(name, 3), torch.Generator().manual_seed(1)
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
                source(name, 3).add_(alone, std[one], step, peers[one], purpose, to)
                assert torch.equal(alone[0], out[i])


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_do_not_depend_on_the_cohort(name: str, dtype: torch.dtype) -> None:
    whole = {step: draw(source(name), range(6), 200_000, step, dtype=dtype) for step in (0, 9)}
    used = source(name)
    for step, peers in [(9, [2]), (0, [5, 1]), (9, [5, 2]), (0, [1, 5])]:
        assert torch.equal(draw(used, peers, 200_000, step, dtype=dtype), whole[step][peers])


@pytest.mark.parametrize("d", [10, 2000])
def test_short_rows_take_bounded_memory(monkeypatch: pytest.MonkeyPatch, d: int) -> None:
    """Many receivers and many purposes: no more blocks are kept than there is room for."""
    monkeypatch.setattr(torch_noise, "_ROOM", 20)
    noise = source("torch")
    assert isinstance(noise, TorchNoise)
    for step, purpose in itertools.product(range(2), ("noise", "personal", "third")):
        for peers in (np.zeros(50, np.int64), np.repeat(range(10), 5), np.arange(7)):
            draw(noise, peers, d, step, purpose, receivers=np.arange(len(peers)))
            kept = sum(cache.normals.numel() for cache in noise._caches.values())
            assert kept <= 20 * 2**13


def test_rows_that_come_again_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, drawn = source("torch"), []
    starts = torch_noise._Streams.starts
    monkeypatch.setattr(
        torch_noise._Streams, "starts", lambda self, keys, block: drawn.append(len(keys)) or starts(self, keys, block)
    )
    for step in range(8):  # four steps of 2,000 numbers to a block
        draw(noise, range(10), 2000, step)
    assert drawn == [10, 10]


@pytest.mark.parametrize("name", SOURCES)
def test_some_rows_may_be_steps_ahead_of_others(name: str) -> None:
    noise = source(name)
    for step, peers in [(0, range(10)), (4, [3]), (4, range(10)), (0, [1]), (4, [3, 1]), (0, [3, 1])]:
        assert torch.equal(draw(noise, peers, 2000, step), draw(source(name), peers, 2000, step))


def test_rows_that_were_drawn_in_part_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = source("torch")
    first, starts = draw(noise, range(10), 2000, 0), torch_noise._Streams.starts

    def interrupted(self: Any, keys: np.ndarray, block: int) -> Any:
        yield from itertools.islice(starts(self, keys, block), 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch_noise._Streams, "starts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draw(noise, range(10), 2000, 4)
    assert torch.equal(draw(noise, range(10), 2000, 0), first)


@pytest.mark.parametrize("name", SOURCES)
def test_noise_is_added_with_its_scale(name: str) -> None:
    for d in (2001, 9001):
        noise, std = source(name), torch.tensor([0.5, 0.0, 2.0])
        start = torch.full((3, d), 3.0)
        out = start.clone()
        noise.add_(out, std, 4, np.arange(3))
        torch.testing.assert_close(out, start + std[:, None] * draw(noise, range(3), d, 4), rtol=0, atol=2e-6)
        assert torch.equal(out[1], start[1])


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("d", [100, 20_000])
def test_noise_is_added_to_rows_of_any_layout(name: str, d: int) -> None:
    noise, ones = source(name), torch.ones(4)
    expected = draw(noise, range(4), d)
    for out in (torch.zeros(4, d + 5)[:, :d], torch.zeros(d, 4).T, torch.zeros(8, d)[::2]):
        noise.add_(out, ones, 0, np.arange(4))
        assert torch.equal(out, expected)


@NEEDS_NUMBA
def test_padding_between_rows_is_left_alone() -> None:
    base = torch.zeros(4, 205)
    source("fast").add_(base[:, :200], torch.ones(4), 0, np.arange(4))
    assert not base[:, 200:].any()


@NEEDS_NUMBA
def test_fast_noise_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = draw(source("fast"), range(3), 100_001)
        torch.set_num_threads(3)
        assert torch.equal(draw(source("fast"), range(3), 100_001), alone)
    finally:
        torch.set_num_threads(threads)


@NEEDS_NUMBA
def test_fast_noise_is_the_same_in_both_precisions() -> None:
    single, double = (draw(source("fast"), range(3), 10_000, dtype=dtype).double() for dtype in DTYPES)
    torch.testing.assert_close(single, double, rtol=2e-5, atol=5e-6)


# --- the states of torch's generator


def test_torch_draws_from_the_whole_state_that_it_is_given() -> None:
    """Against NumPy's Mersenne Twister from the same words."""
    keys = np.random.default_rng(5).integers(0, 2**64, (100, 2), dtype=np.uint64)
    twister, reference = mersenne.Twister(), np.random.MT19937()
    words = mersenne.twister_words(keys, 7)
    assert words.shape == (100, 624)
    for row, _ in zip(words, twister.starts(keys, 7), strict=True):  # what was drawn before is forgotten
        reference.state = {"bit_generator": "MT19937", "state": {"key": row, "pos": mersenne.WORDS}}
        drawn = torch.empty(2000, dtype=torch.int64).random_(0, 2**20, generator=twister.generator)
        np.testing.assert_array_equal(drawn.numpy(), reference.random_raw(2000) % 2**20)


def test_splitmix_known_answers() -> None:
    """The first numbers after seed 1234567 by the authors' reference, which adds GAMMA before it mixes."""
    found = mersenne.splitmix(np.array([1234567], np.uint64), np.arange(1, 4, dtype=np.uint64))
    assert found.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_states_of_different_keys_and_blocks_share_no_word_in_place() -> None:
    keys = np.array([[1, 2], [1, 3], [2, 2], [2**64 - 1, 5]], np.uint64)
    states = [mersenne.twister_words(keys, block) for block in (0, 1, 2, 2**32 - 1)]
    halves = np.concatenate(states).view(np.uint64).reshape(-1, 2, 156)
    by_first = {tuple(half) for half in halves[:, 0].tolist()}
    assert len(by_first) == 3 * 4  # three keys of four
    assert len({tuple(both) for both in halves.reshape(-1, 312).tolist()}) == 4 * 4
    assert len(np.unique(halves[[0, 4, 8, 12], 0])) == 4 * 156  # blocks of one key share no number


def test_another_form_of_torchs_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mersenne, "_HEAD", 16)
    with pytest.raises(RuntimeError, match="unknown form"):
        mersenne.Twister()


def test_torch_noise_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    draw(source("torch"), range(2), 30_000)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(find_spec("triton") is None, reason="GPU NOISE NOT TESTED: Triton is not installed")
def test_what_is_compiled_for_a_gpu_draws_what_a_cpu_draws() -> None:
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
        noise, std = build_noise("fast", seed_keys(1, range(4)), out.device), out.new_ones(4)
        for step in (0, 1, 16, 2**32 - 1):
            noise.add_(out, std, step, np.arange(4))
    torch.testing.assert_close(outs[1].cpu(), outs[0], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOISE ON CUDA NOT TESTED: no GPU here")
@pytest.mark.parametrize("generator", ["fast", "torch"])
@pytest.mark.parametrize("d", [100, 20_000])
def test_noise_on_a_gpu_obeys_the_law_of_rows(d: int, generator: str) -> None:
    def on_gpu(peers: list[int], step: int, receivers: list[int] | None = None) -> torch.Tensor:
        out = torch.zeros(len(peers), d, device="cuda")
        noise = build_noise(generator, seed_keys(1, range(5)), "cuda")
        to = None if receivers is None else np.array(receivers)
        noise.add_(out, torch.ones(len(peers), device="cuda"), step, np.array(peers), "noise", to)
        return out.cpu()

    whole = on_gpu([0, 1, 2, 3, 4], 6)
    assert torch.equal(on_gpu([3, 1], 6), whole[[3, 1]])
    assert not torch.equal(on_gpu([3, 1], 6, [0, 1]), whole[[3, 1]])
    assert abs(float(whole.std()) - 1) < 6 / math.sqrt(2 * whole.numel())


# --- what is refused


def called(step: int = 0, d: int = 5, peers: Any = (0,), receivers: Any = None, **options: Any) -> Any:
    return lambda: draw(source("auto"), list(peers), d, step, receivers=receivers, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: build_noise("quick", {}), ScenarioError, "generator='quick'"),
        (lambda: build_noise("fast", {}, "meta"), ScenarioError, "on meta needs Triton and a C compiler"),
        (lambda: build_noise("auto", {1: bytes(15)}), ValueError, "key of 15 bytes must have at least 16"),
        (lambda: build_noise("torch", {1: bytes(15)}), ValueError, "key of 15 bytes must have at least 16"),
        (lambda: build_noise("torch", {1: "x" * 20}), ValueError, "must be bytes, not str"),
        (lambda: draw(build_noise("torch", {}), [0], 5), ValueError, r"peers \[0\] have no key here"),
        (called(peers=[3, 10, -1]), ValueError, r"peers \[10, -1\] have no key here"),
        (called(step=-1), ValueError, "step=-1"),
        (called(step=2**32), ValueError, "step=4294967296 must be"),
        (called(dtype=torch.float16), ValueError, "float16"),
        (called(receivers=[-1]), ValueError, "receivers -1..-1"),
        (called(receivers=[2**32 - 1]), ValueError, "must be >= 0 and < 2"),
        (called(receivers=[1, 2]), ValueError, r"receivers \[2\] must be \[1\]"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", SOURCES)
def test_no_rows_and_no_columns_are_fine(name: str) -> None:
    for shape in ((0, 5), (2, 0)):
        source(name).add_(torch.zeros(shape), torch.ones(shape[0]), 0, np.arange(shape[0]))


def test_no_error_shows_a_key() -> None:
    secret = b"do not print me.."
    for call in (lambda: build_noise("torch", {0: secret[:9]}), lambda: draw(TorchNoise({0: secret}), [1], 3)):
        with pytest.raises(ValueError, match=r"key") as caught:
            call()
        assert "print" not in str(caught.value)


def test_without_numba_auto_falls_to_torch_and_fast_says_what_to_do(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "flower_privdec.privacy.noise.philox", None)
    monkeypatch.delattr(randomness, "philox", raising=False)
    assert isinstance(build_noise("auto", {}), TorchNoise)
    with pytest.raises(ScenarioError, match=r"pip install 'flower-privdec\[fast\]'"):
        build_noise("fast", {})


@NEEDS_NUMBA
def test_auto_takes_the_fast_generator_on_a_cpu() -> None:
    assert isinstance(build_noise("auto", {}), FastNoise)


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


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        keyed_generator(bytes(8), "sampling", 0, 2)


def test_seed_keys_differ_by_seed_and_peer() -> None:
    keys = [*seed_keys(1, range(3)).values(), *seed_keys(2, range(3)).values()]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {32}
    assert seed_keys(1, np.array([2])) == {2: keys[2]}
