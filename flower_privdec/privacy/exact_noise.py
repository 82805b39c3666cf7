"""Exact noise in NumPy: normals of the operating system's entropy with all their digits, added and rounded to a grid.

How it is drawn. Z is Box-Muller of two uniform numbers of infinitely many random bits, of which the first 63 and 64 are
drawn. Where these decide to what the sum is rounded, whatever the others are, it is rounded so; else (8 in a million)
more bits are drawn, and the rest is done in intervals of as many digits as it takes. What it is for:
`privacy.noise.deployed`.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np

from flower_privdec.common.errors import ArgumentError, ScenarioError

PIECE = 2**15  # elements drawn at a time (a few hundred kB)
GRID_BITS = 20  # the grid's step is 2^-20 to 2^-21 of the noise
FLOAT_ERROR = 2.0**-40  # of a normal in float64, at most, where the radius is none of the extreme ones
DOUBT = 2.0**-18  # of a step: that error, 2^21 times, and what is lost in adding
LEAST_SHARE, MOST_SHARE = 2**38, 2**63 - 2**42  # of U, in units of 2^-63: beyond, the radius is not as exact
LEAST_STD = 2.0**-900  # below, a grid would have no room in float64


def imported_ciphers() -> Any:
    """Return the module of ciphers.

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
    return ciphers


def system_normals(count: int, key: bytes | None = None) -> SystemNormals:
    """Return normals from a new key of the operating system's entropy, or from a given one.

    Args:
        count: the most that are drawn at a time, up to PIECE.
        key: 32 bytes, for one call alone.

    Raises:
        ScenarioError: see `imported_ciphers`.
    """
    ciphers = imported_ciphers()
    cipher = ciphers.Cipher(ciphers.algorithms.AES(key or os.urandom(32)), ciphers.modes.CTR(bytes(16)))
    return SystemNormals(cipher.encryptor(), min(PIECE, count))


def exactly_noised(values: np.ndarray, std: float) -> np.ndarray:
    """Return values with N(0, std² I) added and rounded exactly, float64 [d].

    Args:
        values: finite, float64 [d].
        std: the standard deviation.

    Raises:
        ValueError: the noise is too small for a grid, or a value is not finite.
    """
    check_std(np.array([std]))
    if not np.isfinite(values).all():
        raise ValueError(NOT_FINITE)
    normals, out = system_normals(values.size), np.empty(values.size)
    for start in range(0, values.size, PIECE):
        part = values[None, start : start + PIECE].astype(np.float64)
        out[start : start + PIECE] = add_exactly(part, np.array([[std]]), normals)[0]
    return out


NOT_FINITE = "noise is added to a sum that is not finite: clip what is summed"


def check_std(stds: np.ndarray) -> None:
    """Refuse standard deviations that are not 0, and too small for a grid or not finite; raises ValueError."""
    wrong = stds[~((stds == 0) | ((stds >= LEAST_STD) & np.isfinite(stds)))]
    if len(wrong):
        raise ArgumentError(f"std={wrong[0]:g} must be 0, or finite and at least {LEAST_STD:g}", code="noise.std")


class SystemNormals:
    """Normals from the key stream of a cipher, in buffers that are reused.

    Attributes:
        words: the bits of the last normals, uint64 [2 pairs]: U's first 63 bits, above one that is not used, of
            every pair (n, n + pairs), whose radius is sqrt(-2 ln U), and then the first 64 of its angle over π, signed.
    """

    def __init__(self, encryptor: Any, most: int) -> None:
        pairs = (most + 1) // 2
        self._encryptor, self._zeros = encryptor, memoryview(bytes(16 * pairs))
        self._stream = bytearray(16 * pairs + 15)  # the cipher needs a block more, less one byte
        self._radius, self._angle, self._out = np.empty(pairs), np.empty(pairs), np.empty(2 * pairs)

    def draw(self, count: int) -> np.ndarray:
        """Return the next normals, float64 [count], until the next call."""
        pairs = (count + 1) // 2
        self._encryptor.update_into(self._zeros[: 16 * pairs], self._stream)
        self.words = words = np.frombuffer(self._stream, np.uint64, 2 * pairs)
        radius, angle, out = self._radius[:pairs], self._angle[:pairs], self._out[: 2 * pairs]
        np.add(words[:pairs] >> np.uint64(1), 0.5, out=radius, casting="unsafe")
        np.log(np.multiply(radius, 2.0**-63, out=radius), out=radius)
        np.sqrt(np.multiply(radius, -2.0, out=radius), out=radius)
        cosines, sines = out[:pairs], out[pairs:]  # (1 - t²) / (1 + t²) and 2 t / (1 + t²) of t = tan(angle / 2)
        tangents = np.tan(np.multiply(words[pairs:].view(np.int64), math.pi * 2.0**-64, out=angle), out=angle)
        squares = np.multiply(tangents, tangents, out=cosines)
        np.divide(radius, np.add(squares, 1.0, out=sines), out=radius)
        np.multiply(np.subtract(1.0, squares, out=cosines), radius, out=cosines)
        np.multiply(np.add(tangents, tangents, out=sines), radius, out=sines)
        return out[:count]

    def more(self) -> int:
        """Return the next 64 bits of the key stream."""
        return int.from_bytes(self._encryptor.update(bytes(8)), "little")


def grid_steps(scales: np.ndarray) -> np.ndarray:
    """Return the step of the grid for each standard deviation, a power of two."""
    _, exponent = np.frexp(scales)
    return np.asarray(np.ldexp(1.0, exponent - (1 + GRID_BITS)))


def add_exactly(sums: np.ndarray, scales: np.ndarray, normals: SystemNormals) -> np.ndarray:
    """Return sums with noise, rounded to the grid.

    Every operation on a sum before its noise is exact, and so is the result but for one last rounding to float64, of a
    number that is on the grid already.

    Args:
        sums: float64 [r, c].
        scales: standard deviations, float64 [r, 1].
        normals: of the noise.
    """
    grid = grid_steps(scales)
    ratio = scales / grid
    with np.errstate(over="ignore", invalid="ignore"):
        over = sums / grid
        whole = np.trunc(over)
        over -= whole
        is_far = not math.isfinite(float(over.sum()))
    if is_far:
        over[~np.isfinite(over)] = 0.0  # a sum of infinitely many steps, which is on the grid
    noised = normals.draw(sums.size).reshape(sums.shape)
    noised *= ratio
    noised += over
    rounded = np.rint(noised)
    noised -= rounded
    doubtful = _doubtful(noised.reshape(-1), normals.words)
    if len(doubtful):
        facts = (over.reshape(-1)[doubtful].tolist(), np.broadcast_to(ratio, sums.shape).reshape(-1)[doubtful].tolist())
        rounded.reshape(-1)[doubtful] = _resolved(doubtful, *facts, normals)
    with np.errstate(over="ignore"):
        if is_far:
            return np.asarray(sums - over * grid + rounded * grid)
        rounded += whole
        rounded *= grid
        return np.asarray(rounded)


def _doubtful(rests: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the indices of numbers whose rounding more bits of their normals may change, int64 [doubtful].

    Args:
        rests: what rounding took away, float64 [n].
        words: see `SystemNormals`.
    """
    pairs, unsure = len(words) // 2, np.abs(rests) > 0.5 - DOUBT
    first = words[:pairs]  # twice the share of U
    if first.min() < 2 * LEAST_SHARE or first.max() > 2 * MOST_SHARE + 1:
        for pair in np.flatnonzero((first < 2 * LEAST_SHARE) | (first > 2 * MOST_SHARE + 1)):
            unsure[pair::pairs] = True
    return np.flatnonzero(unsure)


def _resolved(doubtful: np.ndarray, over: list[float], ratio: list[float], normals: SystemNormals) -> list[float]:
    """Return the rounded values of some numbers; two normals of one pair share their bits."""
    words, drawn_pairs, values = normals.words, dict[int, _Pair](), []
    pairs = len(words) // 2
    for number, offset, scale in zip(doubtful.tolist(), over, ratio, strict=True):
        half, pair = divmod(number, pairs)
        if pair not in drawn_pairs:
            angle = int(words[pairs + pair])
            drawn_pairs[pair] = _Pair(int(words[pair]) >> 1, angle - (angle >> 63 << 64), normals)
        values.append(float(drawn_pairs[pair].rounded(half, offset, scale)))
    return values


@cache
def _intervals() -> Any:
    from mpmath.ctx_iv import MPIntervalContext

    return MPIntervalContext()


class _Pair:
    """A pair of normals of which bits are drawn until a rounding is decided.

    Its U lies between share and share + 1 units of 2^-bits; its angle is π times a number between angle and angle + 1
    of them.
    """

    def __init__(self, share: int, angle: int, normals: SystemNormals) -> None:
        self._share, self._share_bits, self._angle, self._angle_bits = share, 63, angle, 63
        self._normals = normals

    def rounded(self, half: int, offset: float, scale: float) -> int:
        """Return floor(offset + scale Z + 1/2), Z being the first (cos) or the second (sin) of the pair."""
        from mpmath.libmp import round_floor, to_int

        while True:
            if self._share > 0:  # else U may be 0, so far, and Z infinite
                ends = (self._normal(half) * scale + offset + 0.5)._mpi_
                low, high = (int(to_int(end, round_floor)) for end in ends)
                if low == high:
                    return low
            self._share, self._share_bits = self._share << 64 | self._normals.more(), self._share_bits + 64
            self._angle, self._angle_bits = self._angle << 64 | self._normals.more(), self._angle_bits + 64

    def _normal(self, half: int) -> Any:
        iv = _intervals()  # valid at any precision: threads may share it
        iv.prec = self._share_bits + 64
        share = iv.mpf([self._share, self._share + 1]) / 2**self._share_bits
        angle = iv.pi * iv.mpf([self._angle, self._angle + 1]) / 2**self._angle_bits
        return iv.sqrt(-2 * iv.log(share)) * (iv.sin(angle) if half else iv.cos(angle))
