"""Hardened noise: a real normal of endlessly many digits, rounded to a grid exactly, whatever it is added to."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp
from raising import raises
from scipy import stats
from tiny_scenario import Tiny

from flower_privdec.common.errors import ArgumentError

pytest.importorskip("cryptography.hazmat.primitives.ciphers")

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment, OwnParts
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import noise_inflation
from flower_privdec.privacy import exact_noise
from flower_privdec.privacy.exact_noise import SystemNormals
from flower_privdec.privacy.mechanism.declared import Drawing
from flower_privdec.privacy.noise import ExactNoise
from flower_privdec.scenario import numbers_hash

FALSE_ALARM = 1e-7  # of each check; entropy is fixed, so one that passes goes on passing
DTYPES = [torch.float32, torch.float64]
LARGE = [1e25, -1e25, 3.4e38, 1e-45, 0.0, -0.0, 1.0, 2.0**24 + 2, -7.123, 1e-3, 5e-324, 1e308, -1e300]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the operating system's entropy by a count."""
    calls: list[int] = []

    def urandom(size: int) -> bytes:
        calls.append(size)
        return len(calls).to_bytes(size, "big")

    monkeypatch.setattr(os, "urandom", urandom)
    return calls


def noised(sums: torch.Tensor, std: float) -> torch.Tensor:
    out = sums.clone()
    ExactNoise().add_(out, torch.full((len(sums),), std, dtype=sums.dtype), 0, np.arange(len(sums)))
    return out


class Words:
    """A cipher whose key stream is made up: some words, and then a pattern without end."""

    def __init__(self, words: np.ndarray, more: int = 0x123456789ABCDEF1) -> None:
        self.words, self.added, self._more = words.astype(np.uint64), [], more

    def update_into(self, zeros: Any, stream: bytearray) -> None:
        stream[: self.words.nbytes] = self.words.tobytes()

    def update(self, zeros: bytes) -> bytes:
        self.added.append(self._more)
        return self._more.to_bytes(8, "little")


def normals_of(shares: np.ndarray, angles: np.ndarray) -> tuple[SystemNormals, Words]:
    """Return the normals of given U (in 2^-63) and angles (in π 2^-63)."""
    cipher = Words(np.concatenate([shares.astype(np.uint64) << np.uint64(1), angles.astype(np.int64).view(np.uint64)]))
    return SystemNormals(cipher, 2 * len(shares)), cipher


def exact_normals(share: int, angle: int, bits: int) -> tuple[Any, Any]:
    """Return the normals of U = (share + 1/2) / 2^bits, and of such an angle, to a hundred digits."""
    with mp.workdps(100):
        radius = mp.sqrt(-2 * mp.log((mp.mpf(share) + mp.mpf(1) / 2) / mp.mpf(2) ** bits))
        turn = mp.pi * (mp.mpf(angle) + mp.mpf(1) / 2) / mp.mpf(2) ** bits
        return radius * mp.cos(turn), radius * mp.sin(turn)


# --- the grid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [1.0, 0.3, 1e-12, 7e20, 2.0**-40])
def test_every_release_is_on_the_grid_whatever_the_sum(asked: list[int], dtype: torch.dtype, std: float) -> None:
    values = torch.tensor([value for value in LARGE if abs(value) < torch.finfo(dtype).max], dtype=dtype)
    found = noised(values.repeat(400)[None], std)[0]
    step = Fraction(exact_noise.grid_steps(np.array([float(torch.tensor(std, dtype=dtype))])).item())
    assert step.numerator == 1 or step.denominator == 1  # a power of two
    assert std / 2**21 < step <= std / 2**20
    assert all((Fraction(value) / step).denominator == 1 for value in found.tolist())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30), st.floats(1e-12, 1e12))
@settings(max_examples=100)
def test_a_release_is_the_rounded_sum_of_exact_numbers(sums: list[float], std: float) -> None:
    """Against fractions: the same normals, added to the sums without any rounding before the last."""
    g = np.random.default_rng(len(sums))
    pairs = -(-len(sums) // 2)
    shares, angles = g.integers(2**40, 2**62, pairs), g.integers(-(2**63), 2**63, pairs)
    normals, cipher = normals_of(shares, angles)
    found = exact_noise.add_exactly(np.array([sums]), np.array([[std]]), normals)[0]
    if cipher.added:
        return  # more digits than these were used: the next test has those
    step = Fraction(exact_noise.grid_steps(np.array([std])).item())
    both = [exact_normals(int(share), int(angle), 63) for share, angle in zip(shares, angles, strict=True)]
    for number, (value, release) in enumerate(zip(sums, found.tolist(), strict=True)):
        half, pair = divmod(number, pairs)
        with mp.workdps(100):
            noise = Fraction(int(mp.floor(both[pair][half] * 2**200)), 2**200)
        rounded = math.floor((Fraction(value) + Fraction(std) * noise) / step + Fraction(1, 2)) * step
        assert release == float(rounded)


def test_a_release_in_float32_is_the_rounded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums near and far: it follows from the release in float64, and shows nothing more of the sum."""
    stream = exact_noise.key_stream
    monkeypatch.setattr(exact_noise, "key_stream", lambda: stream(bytes(32)))
    sums = np.array([0.0, 0.1, -3.0, 1e-30, 1e4, 3e9, -7e20, 2.0**31 + 2.0**8] * 40, np.float32)
    for values in (sums, sums[:4]):
        wide = exact_noise.exactly_noised(values.astype(np.float64), 1.3)
        narrow = exact_noise.exactly_noised(values, 1.3)
        assert narrow.dtype == np.float32
        assert narrow.tolist() == wide.astype(np.float32).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_refused_and_stays(value: float) -> None:
    out = torch.tensor([[1.0, value]])
    with raises(ArgumentError, "noise.not-finite"):
        ExactNoise().add_(out, torch.ones(1), 0, np.arange(1))
    assert out[0, 0] == 1
    for std in (value, -1.0, 1e-310):
        with raises(ArgumentError, "noise.std"):
            ExactNoise().add_(torch.zeros(1, 3), torch.tensor([std], dtype=torch.float64), 0, np.arange(1))


def test_rows_without_noise_stay_as_they_are(asked: list[int]) -> None:
    out = torch.full((3, 500), 0.1)
    ExactNoise().add_(out, torch.tensor([0.0, 1.0, 0.0]), 0, np.arange(3))
    assert (out[[0, 2]] == 0.1).all()
    assert len(set(out[1].tolist())) > 490


# --- the law


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 0.7), (0.5, 0.7), (0.4999, 1.3), (-0.25, 2.0)])
def test_noise_on_a_coarse_grid_is_a_rounded_normal(
    offset: float, scale: float, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square against Φ's differences, where a step is as large as the noise: every sum is between grid points."""
    monkeypatch.setattr(exact_noise, "GRID_BITS", -1)
    step = exact_noise.grid_steps(np.array([scale])).item()
    found = noised(torch.full((1, 400_000), offset, dtype=torch.float64), scale)[0].numpy() / step
    edges = np.arange(-3, 4) - 0.5
    cumulative = np.concatenate([[0], stats.norm.cdf((edges * step - offset) / scale), [1]])
    counts = np.bincount(np.digitize(found, edges), minlength=len(edges) + 1)
    expected = np.diff(cumulative) * len(found)
    keep = expected > 5
    assert (
        stats.chisquare(counts[keep], expected[keep] * counts[keep].sum() / expected[keep].sum()).pvalue > FALSE_ALARM
    )
    assert (found == np.rint(found)).all()


def _together(counts: np.ndarray, expected: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells that have enough, with all the others as one cell."""
    return tuple(np.append(each[keep], each[~keep].sum() + 1e-9) for each in (counts, expected))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_standard_normal(asked: list[int], dtype: torch.dtype) -> None:
    values = noised(torch.zeros(3, 300_001, dtype=dtype), 1.0).double().numpy().ravel()
    n, z = len(values), stats.norm.isf(FALSE_ALARM / 2)
    assert abs(values.mean()) < z / math.sqrt(n)
    assert abs(values.var() - 1) < z * math.sqrt(2 / n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    assert abs(values[1:] @ values[:-1]) < z * math.sqrt(n)


def test_the_last_digits_show_nothing_of_a_sum(asked: list[int]) -> None:
    """Mironov's attack: which numbers come out, in their last digits, for two sums that are no neighbours."""
    releases = [set(noised(torch.full((1, 20_000), value), 2.0**-14)[0].tolist()) for value in (0.1, 0.1 + 2.0**-16)]
    step = exact_noise.grid_steps(np.array([2.0**-14])).item()
    rests = [{math.fmod(value, step) for value in each} for each in releases]
    assert rests == [{0.0}, {0.0}]


# --- more digits where they are needed


def test_floats_are_as_exact_as_is_said() -> None:
    """Normals in float64 against a hundred digits, at radii up to the extreme ones and at all angles."""
    g = np.random.default_rng(5)
    drawn = [2**place + int(g.integers(2**38)) for place in g.integers(38, 63, 500).tolist()]
    drawn += [2**63 - 2**place - 1 for place in g.integers(42, 62, 500).tolist()]
    shares = np.array([*drawn, exact_noise.LEAST_U, exact_noise.MOST_U], dtype=np.uint64)
    angles = g.integers(-(2**63), 2**63, len(shares))
    angles[:6] = [0, -1, 2**62, -(2**62), -(2**63), 2**63 - 1]
    normals, _ = normals_of(shares, angles)
    found = normals.draw(2 * len(shares)).tolist()
    for number, (share, angle) in enumerate(zip(shares.tolist(), angles.tolist(), strict=True)):
        for half, value in enumerate(exact_normals(share, angle, 63)):
            slack = 2.0**-40 / 4 if 2**40 < share < 2**63 - 2**45 else 2.0**-40
            assert abs(value - found[half * len(shares) + number]) < slack


def boundary_pair() -> tuple[int, int, float]:
    """Return a U, an angle and an offset at which its first normal is rounded by later bits alone."""
    share, angle = 3 * 2**60 + 12345, 2**61 + 777
    value = exact_normals(share, angle, 63)[0]
    with mp.workdps(60):
        t = value * 2**20
        return share, angle, float(mp.floor(t) + mp.mpf(1) / 2 - t)


@pytest.mark.parametrize("more", [0, 2**64 - 1])
def test_later_bits_are_drawn_if_they_decide(more: int) -> None:
    """Beside the boundary between two grid points: the first bits leave it open, and the law is that of all."""
    share, angle, offset = boundary_pair()
    normals, cipher = normals_of(np.array([share]), np.array([angle]))
    cipher._more = more
    found = exact_noise.add_exactly(np.array([[offset * 2.0**-20]]), np.ones((1, 1)), normals)
    assert cipher.added
    bits = 63 + 64 * 3
    tail = 2**192 - 1 if more else 0
    with mp.workdps(100):
        normal = exact_normals((share << 192) | tail, (angle << 192) | tail, bits)[0]
        wanted = int(mp.floor((normal + mp.mpf(offset) * mp.mpf(2) ** -20) * 2**20 + mp.mpf(1) / 2))
    assert found.item() == wanted * 2.0**-20


def test_both_normals_of_a_pair_share_their_bits() -> None:
    normals, cipher = normals_of(np.array([0]), np.array([2**61]))  # U may be 0: both wait for more
    found = exact_noise.add_exactly(np.zeros((1, 2)), np.ones((1, 1)), normals)[0]
    added = [cipher._more] * (len(cipher.added) // 2)
    share = angle = 0
    angle = 2**61
    for word in added:
        share, angle = share << 64 | word, angle << 64 | word
    values = exact_normals(share, angle, 63 + 64 * len(added))
    assert found.tolist() == pytest.approx([float(value) for value in values], abs=2.0**-20)
    assert np.linalg.norm(found) > 9  # U is 2^-67 to 2^-66


def test_doubt_is_rare(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    doubts: list[int] = []
    resolved = exact_noise._decided
    monkeypatch.setattr(
        exact_noise, "_decided", lambda which, *rest: (doubts.append(len(which)), resolved(which, *rest))[1]
    )
    noised(torch.zeros(1, 1_000_000), 1.0)
    assert 0 < sum(doubts) < 40  # about 8 in a million, and never none


# --- what a scenario says of it


def test_deployed_peers_draw_it_and_simulations_do_not(tiny: Tiny) -> None:
    scenario = tiny("privacy.hardened=true")
    agreement = Agreement.of(scenario)
    own = OwnParts.of(agreement, np.array([1]), bytes(32))
    cohort = Experiment.joined(agreement, own).cohort()
    assert isinstance(cohort.noise, ExactNoise)
    assert cohort.apart
    assert 1e-13 < cohort.noise_inflation - 2.0**-20 < 1e-11  # some 40 examples, in float64
    assert own.run.environment.startswith("exact, ")
    simulated = Experiment.build(scenario).cohort()
    assert simulated.noise_inflation == 0
    assert not isinstance(simulated.noise, ExactNoise)
    plain = OwnParts.of(Agreement.of(tiny()), np.array([1]), bytes(32))
    assert plain.run.environment.startswith("system, ")


def test_a_scenario_without_it_is_called_as_before(tiny: Tiny) -> None:
    assert "hardened" not in tiny().model_dump_json(exclude_none=True)
    assert numbers_hash(tiny()) != numbers_hash(tiny("privacy.hardened=true"))


def test_noise_pays_for_the_rounding_of_a_sum(tiny: Tiny) -> None:
    """The bound against sums as float32 makes them, and where float32 is too short for a sum."""
    algorithm = Agreement.of(tiny()).algorithm
    full = noise_inflation(algorithm, [Drawing("full", 1.0, 300, 300)], 10, torch.float32)
    g = torch.Generator().manual_seed(1)
    vectors = torch.randn(300, 2000, generator=g)
    vectors /= vectors.norm(dim=1, keepdim=True)
    off = (vectors.sum(0).double() - vectors.double().sum(0)).norm().item()
    assert off < full / 2 < 0.01
    sizes = [noise_inflation(algorithm, [Drawing("poisson", 0.01, 6000, 60)], 10, dtype) for dtype in DTYPES]
    assert 1e-3 < sizes[0] < 4e-3
    assert sizes[1] < 1.1e-6
    with raises(ScenarioError, "privacy.hardened", r"3000 examples .*float32 .*compute\.dtype=float64"):
        noise_inflation(algorithm, [Drawing("full", 1.0, 3000, 3000)], 10, torch.float32)


def test_noise_of_a_step_follows_plan_and_headroom(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    agreement = Agreement.of(tiny("privacy.hardened=true", "compute.dtype=float32"))
    cohort = Experiment.joined(agreement, OwnParts.of(agreement, np.array([1]), bytes(32))).cohort()
    assert cohort.noise_inflation > 1e-4
    monkeypatch.setattr(cohort.noise, "add_", lambda out, std, *rest: seen.append(std.item()))
    params = cohort.initial.repeat(1, 1)
    cohort.add_step_(torch.zeros_like(params), params, 0)
    plan = cohort.protection
    assert plan is not None
    scale = 0.5 / cohort.data.sampler.normalizer[0] * plan.clip_norm(0)[0] * plan.noise_multiplier(0)[0]
    assert seen == pytest.approx([scale * (1 + cohort.noise_inflation)], rel=1e-6)
