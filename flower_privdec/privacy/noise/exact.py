"""Noise whose rounding reveals nothing: a real normal is added to a sum, and only then rounded, both exactly.

A floating-point normal takes some values and skips others, and which of them it reaches from a sum shows the sum
(Mironov, CCS 2012). Sums of several such normals (Holohan and Braghin, ESORICS 2021) make that hard to use, and prove
nothing. Here

    released = h round((S + σ Z) / h),    Z normal with all its digits, h = 2^-20 of σ's power of two,

is drawn from exactly that law. It is what a real Gaussian mechanism releases, looked at through a fixed function; so
all that is proved of that mechanism, sampled batches, vectors and many steps included, holds of it as it stands. A
discrete Gaussian (Canonne, Kamath, Steinke, NeurIPS 2020) has a law of its own, of which that is not proved.

How it is drawn. Z is Box-Muller of two uniform numbers of endlessly many random bits, of which the first 63 and 64 are
drawn. Where these decide to what the sum is rounded, whatever the others are, it is rounded so; else (8 in a million)
more bits are drawn, and the rest is done in intervals of as many digits as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.noise.source import check_call, pieces
from flower_privdec.privacy.noise.system import PIECE, SystemNormals, fresh_stream, installed_ciphers
from flower_privdec.rows.tensors import all_finite

GRID_BITS = 20  # the grid's step is 2^-20 to 2^-21 of the noise
FLOAT_ERROR = 2.0**-40  # of a normal in float64, at most, where the radius is none of the extreme ones
DOUBT = 2.0**-18  # of a step: that error, 2^21 times, and what is lost in adding
LEAST_SHARE, MOST_SHARE = 2**38, 2**63 - 2**42  # of U, in units of 2^-63: beyond, the radius is not as exact
LEAST_STD = 2.0**-900  # below, a grid would have no room in float64


class ExactNoise:
    """Real normals of the operating system's entropy, added and rounded to a grid exactly.

    Privacy: exact for the sum as it was computed, whose own rounding `experiment.hardening` pays for, as long
    as this machine's log, sqrt, sin and cos in float64 are right to 2^-45, where its libraries document 2^-50. How
    long a draw takes, and what is left of it in memory, is not guarded.
    """

    def __init__(self) -> None:
        """Check that the cipher is there.

        Raises:
            ScenarioError: the package cryptography is not installed.
        """
        self._ciphers = installed_ciphers()

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place and round to the grid; see NoiseSource.

        Step, peers, purpose and receivers decide nothing here.

        Raises:
            ValueError: also where a sum or its noise is no finite number, or the noise is too small for a grid.
        """
        check_call(out, std, step, peers, receivers)
        if out.numel() == 0:
            return
        with torch.no_grad():
            scales = _checked(std.detach().double().cpu())[:, None]
            if not bool((scales > 0).all()):
                self._add_to_some_(out, std, step, peers)
                return
            if not all_finite(out):
                raise ValueError("noise is added to a sum that is not finite: clip what is summed")
            normals = SystemNormals(fresh_stream(self._ciphers), min(PIECE, out.numel()))
            for rows, columns in pieces(out.shape[0], out.shape[1], PIECE):
                part = out[rows, columns]
                part.copy_(add_exactly(part.double().cpu(), scales[rows], normals))

    def _add_to_some_(self, out: Tensor, std: Tensor, step: int, peers: np.ndarray) -> None:
        chosen = std > 0
        rows = out[chosen]
        self.add_(rows, std[chosen], step, peers[chosen.cpu().numpy()])
        out[chosen] = rows


def _checked(std: Tensor) -> Tensor:
    wrong = std[~((std == 0) | ((std >= LEAST_STD) & torch.isfinite(std)))]
    if len(wrong):
        raise ValueError(f"std={wrong[0].item():g} must be 0, or finite and at least {LEAST_STD:g}")
    return std


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
        normals: where the noise comes from.
    """
    grid = grid_steps(scales)
    ratio = (scales / grid).expand_as(sums)
    steps = sums / grid
    over = torch.where(steps.abs() < 2.0**53, steps.frac(), 0.0)  # a larger sum is on the grid
    rounded_sums = torch.addcmul(over, ratio, normals.draw(sums.numel()).view_as(sums)).reshape(-1).numpy()
    rounded = np.floor(rounded_sums + 0.5)
    doubtful = _doubtful(rounded_sums, rounded, normals.words)
    if len(doubtful):
        facts = (over.reshape(-1)[doubtful].tolist(), ratio.reshape(-1)[doubtful].tolist())
        rounded[doubtful] = _resolved(doubtful, *facts, normals)
    return (sums - over * grid).add_(torch.from_numpy(rounded).view_as(sums).mul_(grid))


def _doubtful(values: np.ndarray, rounded: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return which numbers may be rounded otherwise once more bits of their normals are known, int64 [doubtful]."""
    pairs, shares = len(words) // 2, words[: len(words) // 2] >> np.uint64(1)
    unsure = np.abs(np.abs(values - rounded) - 0.5) < DOUBT
    for pair in np.flatnonzero((shares < LEAST_SHARE) | (shares > MOST_SHARE)):
        unsure[pair::pairs] = True
    return np.flatnonzero(unsure)


def _resolved(doubtful: np.ndarray, over: list[float], ratio: list[float], normals: SystemNormals) -> list[float]:
    """Return to what some numbers are rounded; two normals of one pair are of the same bits."""
    words, drawn_pairs, values = normals.words.tolist(), dict[int, _Pair](), []
    pairs = len(words) // 2
    for number, offset, scale in zip(doubtful.tolist(), over, ratio, strict=True):
        half, pair = divmod(number, pairs)
        if pair not in drawn_pairs:
            angle = words[pairs + pair]
            drawn_pairs[pair] = _Pair(words[pair] >> 1, angle - (angle >> 63 << 64), normals)
        values.append(float(drawn_pairs[pair].rounded(half, offset, scale)))
    return values


class _Pair:
    """A pair of normals of which as many bits are drawn as it takes.

    Its U lies between share and share + 1 units of 2^-bits; its angle is π times a number between angle and angle + 1
    of them.
    """

    def __init__(self, share: int, angle: int, normals: SystemNormals) -> None:
        from mpmath.ctx_iv import MPIntervalContext
        from mpmath.libmp import round_floor, to_int

        self._share, self._share_bits, self._angle, self._angle_bits = share, 63, angle, 63
        self._normals, self._intervals = normals, MPIntervalContext()
        self._floor: Callable[[Any], int] = lambda end: int(to_int(end, round_floor))

    def rounded(self, half: int, offset: float, scale: float) -> int:
        """Return floor(offset + scale Z + 1/2), Z being the first (cos) or the second (sin) of the pair."""
        while True:
            if self._share > 0:  # else U may be 0, as far as is known, and Z infinite
                low, high = (self._normal(half) * scale + offset + 0.5)._mpi_
                if self._floor(low) == self._floor(high):
                    return self._floor(low)
            self._extend()

    def _normal(self, half: int) -> Any:
        iv = self._intervals
        iv.prec = self._share_bits + 64
        share = iv.mpf([self._share, self._share + 1]) / 2**self._share_bits
        angle = iv.pi * iv.mpf([self._angle, self._angle + 1]) / 2**self._angle_bits
        return iv.sqrt(-2 * iv.log(share)) * (iv.sin(angle) if half else iv.cos(angle))

    def _extend(self) -> None:
        self._share, self._share_bits = self._share << 64 | self._normals.more(), self._share_bits + 64
        self._angle, self._angle_bits = self._angle << 64 | self._normals.more(), self._angle_bits + 64
