"""Exact Gaussian noise in NumPy: infinitely precise normals, added to a sum and rounded to a grid once.

A normal is Box-Muller's: sqrt(-2 ln U) times the cosine or sine of π V, with U in (0, 1) and V in (-1, 1) uniform
numbers of infinitely many random bits. The first 63 bits of U and 64 of V are drawn, and nearly always they determine
to which point of the grid the noised sum is rounded, whatever the remaining bits are. If they do not (8 in a million),
more bits are drawn, and the normal is computed in interval arithmetic until they do.

    add_exactly     draws normals in float64, rounds the noised sums, and finds those that are too near to a half
    _decided        rounds these again, with as many more bits as it takes

`privacy.noise.deployed` says why noise is drawn so.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from flower_privdec.common.errors import ArgumentError, ScenarioError

PIECE = 2**15  # elements drawn at a time: few calls, and what is computed of them at a time stays in cache
GRID_BITS = 20  # the grid's step is 2^-20 to 2^-21 of the noise
MARGIN = 2.0**-18  # of a step: no float64 error of a noised sum is larger (2^21 times 2^-40, and that of the addition)
FAR = 2.0**30  # steps: to a sum that is not longer, noise is added with an error below 2^-22 of a step
LEAST_U = 2**38  # in units of 2^-63: below it, and above the next, sqrt(-2 ln U) has a larger error in float64
MOST_U = 2**63 - 2**42
LEAST_STD = 2.0**-900  # below, a grid would have no room in float64
NOBODY = np.empty(0, np.int64)
NOT_FINITE = "noise is added to a sum that is not finite: clip what is summed"


def key_stream(key: bytes | None = None) -> Any:
    """Return the key stream of AES-256 in counter mode, as an encryptor of zeros.

    Args:
        key: 32 bytes, for only one stream; drawn by the operating system if it is not given.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError as error:
        raise ScenarioError(
            "noise of the operating system needs cryptography, which is not installed: pip install cryptography",
            code="noise.cryptography",
        ) from error
    cipher = ciphers.algorithms.AES(key or os.urandom(32))
    counter = ciphers.modes.CTR(bytes(16))
    return ciphers.Cipher(cipher, counter).encryptor()


def exactly_noised(values: np.ndarray, std: float) -> np.ndarray:
    """Return values with N(0, std² I) added and rounded exactly, [d] of their own type.

    Args:
        values: finite, float64 or float32 [d].
        std: the standard deviation.

    Raises:
        ValueError: the noise is too small for a grid, or a value is not finite.
    """
    check_std(np.array([std]))
    normals = SystemNormals(key_stream(), values.size)
    out = np.empty_like(values)
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        with np.errstate(over="ignore", invalid="ignore"):
            has_finite_sum = math.isfinite(float(part.sum()))  # as with NaN or infinity it is not
        if not has_finite_sum and not np.isfinite(part).all():
            raise ValueError(NOT_FINITE)
        add_exactly(part, std, normals, out=out[start : start + PIECE])
    return out


def check_std(stds: np.ndarray) -> None:
    """Refuse standard deviations that are not 0, and too small for a grid or not finite; raises ValueError."""
    in_range = (stds >= LEAST_STD) & np.isfinite(stds)
    wrong = stds[~((stds == 0) | in_range)]
    if len(wrong):
        raise ArgumentError(f"std={wrong[0]:g} must be 0, or finite and at least {LEAST_STD:g}", code="noise.std")


class SystemNormals:
    """Standard normals from a key stream, in buffers that are reused.

    Normals n and n + pairs are a Box-Muller pair, the cosine's and the sine's.

    Args:
        encryptor: the key stream, see `key_stream`.
        most: how many are drawn at a time; more than PIECE never are.

    Attributes:
        encryptor: the key stream; another one may take its place.
        words: the bits of the last normals, uint64 [2 pairs]: for each pair the first 63 bits of U, above one that is
            not used; then for each pair the first 64 bits of V, a signed number.
    """

    def __init__(self, encryptor: Any, most: int) -> None:
        pairs = (min(PIECE, most) + 1) // 2
        self.encryptor = encryptor
        self._zeros = memoryview(bytes(16 * pairs))
        self._stream = bytearray(16 * pairs + 15)  # the cipher needs a block more, less one byte
        self._radius = np.empty(pairs)
        self._angle = np.empty(pairs)
        self._out = np.empty(2 * pairs)
        self._spare = np.empty((2, 2 * pairs))

    def draw(self, count: int, std: float = 1.0) -> np.ndarray:
        """Return the next normals, times a standard deviation, float64 [count], until the next call."""
        pairs = (count + 1) // 2
        self.encryptor.update_into(self._zeros[: 16 * pairs], self._stream)
        self.words = words = np.frombuffer(self._stream, np.uint64, 2 * pairs)
        radius = self._radius[:pairs]
        angle = self._angle[:pairs]
        out = self._out[: 2 * pairs]

        # sqrt(-2 ln U), with U in the middle of the cell that its 63 bits leave. In place, as all that follows.
        # Signed numbers, because NumPy converts unsigned ones several times as slowly.
        np.add((words[:pairs] >> np.uint64(1)).view(np.int64), 0.5, out=radius)
        np.log(np.multiply(radius, 2.0**-63, out=radius), out=radius)
        np.sqrt(np.multiply(radius, -2.0, out=radius), out=radius)
        if std != 1.0:
            np.multiply(radius, std, out=radius)

        # The cosine is 2 / (1 + t²) - 1 and the sine 2 t / (1 + t²), of t = tan(angle / 2).
        cosines = out[:pairs]
        sines = out[pairs:]
        tangents = np.tan(np.multiply(words[pairs:].view(np.int64), math.pi * 2.0**-64, out=angle), out=angle)
        np.add(np.multiply(tangents, tangents, out=cosines), 1.0, out=cosines)
        np.divide(radius, cosines, out=cosines)
        np.add(cosines, cosines, out=cosines)
        np.multiply(cosines, tangents, out=sines)
        np.subtract(cosines, radius, out=cosines)
        return out[:count]

    def spare(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return memory for two arrays of a shape, of no more elements than are drawn at a time."""
        count = math.prod(shape)
        one, other = self._spare[:, :count]
        return one.reshape(shape), other.reshape(shape)

    def next_word(self) -> int:
        """Return the next 64 bits of the key stream."""
        return int.from_bytes(self.encryptor.update(bytes(8)), "little")


def grid_steps(stds: np.ndarray | float) -> np.ndarray:
    """Return the step of the grid for each standard deviation, a power of two."""
    _, exponent = np.frexp(stds)
    return np.asarray(np.ldexp(1.0, exponent - (1 + GRID_BITS)))


def add_exactly(
    sums: np.ndarray, stds: np.ndarray | float, normals: SystemNormals, out: np.ndarray | None = None
) -> np.ndarray:
    """Return sums with noise, rounded to the grid.

    Counting in steps of the grid is exact, and so is the way back, but for one last rounding to float64 of a number
    that is on the grid already. float64 decides where a noised sum rounds to, unless that is too near to a half.

    Args:
        sums: float64 or float32, [r, c]; or [c], for one standard deviation.
        stds: standard deviations, float64 [r, 1]; or one number.
        normals: the random numbers of the noise.
        out: where to put them, of the shape of the sums, float64 or float32, to which a sum on the grid is then
            rounded; by default in memory of their own, float64.
    """
    step = grid_steps(stds)
    noise_steps = stds / step  # the noise's standard deviation in steps
    if out is None:
        out = np.empty(sums.shape)
    steps, rounded = normals.spare(sums.shape)

    with np.errstate(over="ignore", invalid="ignore"):
        # To divide by a power of two is to multiply by its inverse.
        np.multiply(sums, 1.0 / step, out=steps)
        flat = steps.reshape(-1)
        is_far = not np.dot(flat, flat) < FAR**2  # with NaN or infinity too
        if is_far:
            # Only fractions of steps are noised, so that nothing of the noise is lost.
            steps -= np.trunc(steps)
            steps[~np.isfinite(steps)] = 0.0  # a sum of infinitely many steps, which is on the grid

        # Round the noised sums; more bits decide those that are too near to a half.
        noised = normals.draw(sums.size).reshape(sums.shape)
        noised *= noise_steps
        noised += steps
        np.rint(noised, out=rounded)
        noised -= rounded
        undecided = _undecided(noised.reshape(-1), normals.words)
        if len(undecided):
            scales = np.broadcast_to(noise_steps, sums.shape).reshape(-1)[undecided].tolist()
            offsets = flat[undecided].tolist()
            rounded.reshape(-1)[undecided] = _decided(undecided, offsets, scales, normals)

        if is_far:
            # The noised sum is made whole before it is rounded, and so is all that its digits say.
            np.add(rounded * step, sums - steps * step, out=out, casting="same_kind")
        else:
            np.multiply(rounded, step, out=out, casting="same_kind")
    return out


def _undecided(remainders: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the indices of numbers whose rounding further bits of their normals may change, int64 [undecided].

    Args:
        remainders: what rounding took away, float64 [n].
        words: see `SystemNormals`.
    """
    pairs = len(words) // 2
    doubled = words[:pairs]  # 2 U, and the bit that is not used

    # There is hardly ever one: look which only if there is.
    is_near = remainders.max() > 0.5 - MARGIN or remainders.min() < MARGIN - 0.5
    is_inexact = doubled.min() < 2 * LEAST_U or doubled.max() > 2 * MOST_U + 1
    if not is_near and not is_inexact:
        return NOBODY

    # Both normals of a pair whose radius is not exact enough.
    unsure = np.abs(remainders) > 0.5 - MARGIN
    if is_inexact:
        for pair in np.flatnonzero((doubled < 2 * LEAST_U) | (doubled > 2 * MOST_U + 1)):
            unsure[pair::pairs] = True
    return np.flatnonzero(unsure)


def _decided(undecided: np.ndarray, offsets: list[float], scales: list[float], normals: SystemNormals) -> list[float]:
    """Return the rounded values of some numbers, offset + scale Z; two normals of one pair share their bits."""
    words = normals.words
    pairs = len(words) // 2
    drawn_pairs: dict[int, _NormalPair] = {}
    values = []
    for number, offset, scale in zip(undecided.tolist(), offsets, scales, strict=True):
        is_sine, pair = divmod(number, pairs)
        if pair not in drawn_pairs:
            u = int(words[pair]) >> 1
            v = int(words[pairs + pair])
            signed_v = v - (v >> 63 << 64)
            drawn_pairs[pair] = _NormalPair(u, signed_v, normals)
        rounded = drawn_pairs[pair].rounded(bool(is_sine), offset, scale)
        values.append(float(rounded))
    return values


class _NormalPair:
    """A Box-Muller pair of which bits are drawn until a rounding is decided.

    Args:
        u, v: the bits so far: U and V lie between u and u + 1, v and v + 1 units of 2^-63.
        normals: draws the further bits.
    """

    def __init__(self, u: int, v: int, normals: SystemNormals) -> None:
        self._u = u
        self._v = v
        self._bits = 63
        self._normals = normals

    def rounded(self, is_sine: bool, offset: float, scale: float) -> int:
        """Return floor(offset + scale Z + 1/2), with Z the normal of the sine or of the cosine."""
        from mpmath.libmp import from_float, mpi_add, mpi_mul, round_floor, to_int

        while True:
            # As long as U may be 0, Z may be infinite.
            if self._u > 0:
                precision = self._bits + 64
                total = mpi_mul(self._normal(is_sine, precision), (from_float(scale),) * 2, precision)
                for term in (offset, 0.5):
                    total = mpi_add(total, (from_float(term),) * 2, precision)
                low, high = (int(to_int(end, round_floor)) for end in total)
                if low == high:
                    return low

            self._u = self._u << 64 | self._normals.next_word()
            self._v = self._v << 64 | self._normals.next_word()
            self._bits += 64

    def _normal(self, is_sine: bool, precision: int) -> Any:
        """Return the interval in which the normal lies, as mpmath's interval functions have it: its two ends."""
        from mpmath.libmp import (
            from_int,
            from_man_exp,
            mpf_pi,
            mpi_cos,
            mpi_log,
            mpi_mul,
            mpi_sin,
            mpi_sqrt,
            round_ceiling,
            round_floor,
        )

        u = from_man_exp(self._u, -self._bits), from_man_exp(self._u + 1, -self._bits)
        v = from_man_exp(self._v, -self._bits), from_man_exp(self._v + 1, -self._bits)
        minus_two = (from_int(-2),) * 2
        radius = mpi_sqrt(mpi_mul(mpi_log(u, precision), minus_two, precision), precision)
        pi = mpf_pi(precision, round_floor), mpf_pi(precision, round_ceiling)
        angle = mpi_mul(pi, v, precision)
        if is_sine:
            return mpi_mul(radius, mpi_sin(angle, precision), precision)
        return mpi_mul(radius, mpi_cos(angle, precision), precision)
