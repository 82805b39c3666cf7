"""Noise of deployed peers: from the operating system's entropy, never seeded and never the same twice.

A floating-point normal takes some values and skips others, and which of them it reaches from a sum reveals the sum
(Mironov, CCS 2012). Sums of several such normals (Holohan and Braghin, ESORICS 2021) make that hard to use, and prove
nothing. `ExactNoise` releases

    h round((S + σ Z) / h),    Z normal with all its digits, h = 2^-20 of σ's power of two,

drawn from exactly that law. It is the release of a real Gaussian mechanism, post-processed by a fixed function; so all
that is proved of that mechanism, sampled batches, vectors and many steps included, holds for it. A discrete Gaussian
(Canonne, Kamath, Steinke, NeurIPS 2020) has a law of its own, for which that is not proved.

How it is drawn. Z is Box-Muller of two uniform numbers of infinitely many random bits, of which the first 63 and 64 are
drawn. Where these decide to what the sum is rounded, whatever the others are, it is rounded so; else (8 in a million)
more bits are drawn, and the rest is done in intervals of as many digits as it takes.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.noise.source import check_call, pieces
from flower_privdec.rows.tensors import all_finite

PIECE = 2**15  # elements drawn at a time (a few hundred kB)
GRID_BITS = 20  # the grid's step is 2^-20 to 2^-21 of the noise
FLOAT_ERROR = 2.0**-40  # of a normal in float64, at most, where the radius is none of the extreme ones
DOUBT = 2.0**-18  # of a step: that error, 2^21 times, and what is lost in adding
LEAST_SHARE, MOST_SHARE = 2**38, 2**63 - 2**42  # of U, in units of 2^-63: beyond, the radius is not as exact
LEAST_STD = 2.0**-900  # below, a grid would have no room in float64


class SystemNoise:
    """AES-256 in counter mode under a new key from the operating system for every call, then Box-Muller.

    A pair of normals takes its radius from 63 bits and its angle from 64, in float64, so that they end at 9.4
    standard deviations. They are added in float64, and the sum is rounded once to the rows' type: normals that were
    rounded before would leave the binades of their own rounding in the difference of a release and a guess of its sum.

    Privacy: only a reader of this process's memory during the call learns the noise. `ExactNoise` protects against
    what the rounding of floating-point sums reveals; this class does not.
    """

    def __init__(self) -> None:
        """Import the cipher.

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
        self._ciphers = ciphers

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place; see NoiseSource. Step, peers, purpose and receivers change nothing here."""
        check_call(out, std, step, peers, receivers)
        if out.numel():
            with torch.no_grad():
                self._add_(out, std)

    def _add_(self, out: Tensor, std: Tensor) -> None:
        scales = std.to(out.device, torch.float64)[:, None]
        normals = self._normals(out.numel())
        for rows, columns in pieces(out.shape[0], out.shape[1], PIECE):
            part = out[rows, columns]
            part.copy_(
                torch.addcmul(part.double(), normals.draw(part.numel()).to(out.device).view_as(part), scales[rows])
            )

    def _key_of_call(self) -> bytes:
        return os.urandom(32)

    def _normals(self, count: int) -> SystemNormals:
        key, start = self._ciphers.algorithms.AES(self._key_of_call()), self._ciphers.modes.CTR(bytes(16))
        return SystemNormals(self._ciphers.Cipher(key, start).encryptor(), min(PIECE, count))


class SharedNoise(SystemNoise):
    """SystemNoise under a key that two peers share: both draw the same normals, but for their libraries' rounding.

    Privacy: a key is for one call alone; two calls under one key add the same normals.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def _key_of_call(self) -> bytes:
        return self._key


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
        self._radius, self._angle = (torch.empty(pairs, dtype=torch.float64) for _ in range(2))
        self._out = torch.empty(2 * pairs, dtype=torch.float64)

    def draw(self, count: int) -> Tensor:
        """Return the next normals, float64 [count], until the next call."""
        pairs = (count + 1) // 2
        self._encryptor.update_into(self._zeros[: 16 * pairs], self._stream)
        self.words = words = np.frombuffer(self._stream, np.uint64, 2 * pairs)
        radius, angle, out = self._radius[:pairs], self._angle[:pairs], self._out[: 2 * pairs]
        radius.copy_(torch.from_numpy((words[:pairs] >> np.uint64(1)).view(np.int64)))
        radius.add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
        angle.copy_(torch.from_numpy(words[pairs:].view(np.int64))).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=out[:pairs]).mul_(radius)
        torch.sin(angle, out=out[pairs:]).mul_(radius)
        return out[:count]

    def more(self) -> int:
        """Return the next 64 bits of the key stream."""
        return int.from_bytes(self._encryptor.update(bytes(8)), "little")


class ExactNoise(SystemNoise):
    """Real normals of the operating system's entropy, added and rounded to a grid exactly.

    `add_` raises ValueError also where a sum or its noise is not a finite number, or the noise is too small for a grid.

    Privacy: exact for the sum as it was computed, whose own rounding `noise_inflation` pays for, as long
    as this machine's log, sqrt, sin and cos in float64 are right to 2^-45, where its libraries document 2^-50. How
    long a draw takes, and what is left of it in memory, is not protected.
    """

    def _add_(self, out: Tensor, std: Tensor) -> None:
        scales = std.detach().double().cpu()
        wrong = scales[~((scales == 0) | ((scales >= LEAST_STD) & torch.isfinite(scales)))]
        if len(wrong):
            raise ValueError(f"std={wrong[0].item():g} must be 0, or finite and at least {LEAST_STD:g}")
        chosen = scales > 0
        if not bool(chosen.all()):
            places = chosen.to(out.device)
            if bool(chosen.any()):
                rows = out[places]
                self._add_(rows, scales[chosen])
                out[places] = rows
            return
        if not all_finite(out):
            raise ValueError("noise is added to a sum that is not finite: clip what is summed")
        normals = self._normals(out.numel())
        for rows_, columns in pieces(out.shape[0], out.shape[1], PIECE):
            part = out[rows_, columns]
            part.copy_(add_exactly(part.double().cpu(), scales[rows_, None], normals))


def grid_steps(scales: Tensor) -> Tensor:
    """Return the step of the grid for each standard deviation, a power of two."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (1 + GRID_BITS))


def add_exactly(sums: Tensor, scales: Tensor, normals: SystemNormals) -> Tensor:
    """Return sums with noise, rounded to the grid.

    Every operation on a sum before its noise is exact, and so is the result but for one last rounding to float64, of a
    number that is on the grid already.

    Args:
        sums: float64 [r, c].
        scales: standard deviations, float64 [r, 1].
        normals: of the noise.
    """
    grid = grid_steps(scales)
    ratio, over = scales / grid, (sums / grid).frac_()
    if not all_finite(over):  # a sum of infinitely many steps, which is on the grid
        over.nan_to_num_(0.0)
    noised = torch.addcmul(over, ratio, normals.draw(sums.numel()).view_as(sums))
    rounded = (noised + 0.5).floor_()
    doubtful = _doubtful(noised.sub_(rounded).reshape(-1), normals.words)
    if len(doubtful):
        facts = (over.reshape(-1)[doubtful].tolist(), ratio.expand_as(sums).reshape(-1)[doubtful].tolist())
        rounded.view(-1)[doubtful] = torch.tensor(_resolved(doubtful, *facts, normals), dtype=torch.float64)
    return torch.addcmul(sums, over, grid, value=-1).addcmul_(rounded, grid)


def _doubtful(rests: Tensor, words: np.ndarray) -> Tensor:
    """Return the indices of numbers whose rounding more bits of their normals may change, int64 [doubtful].

    Args:
        rests: what rounding took away, float64 [n]; overwritten.
        words: see `SystemNormals`.
    """
    pairs, unsure = len(words) // 2, rests.abs_() > 0.5 - DOUBT
    first = words[:pairs]  # twice the share of U
    if first.min() < 2 * LEAST_SHARE or first.max() > 2 * MOST_SHARE + 1:
        for pair in np.flatnonzero((first < 2 * LEAST_SHARE) | (first > 2 * MOST_SHARE + 1)):
            unsure[pair::pairs] = True
    return unsure.nonzero().view(-1)


def _resolved(doubtful: Tensor, over: list[float], ratio: list[float], normals: SystemNormals) -> list[float]:
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
