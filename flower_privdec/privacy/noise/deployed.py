"""Noise of deployed peers: from the operating system's entropy, never seeded and never the same twice.

A floating-point normal takes some values and skips others, and which of them it reaches from a sum reveals the sum
(Mironov, CCS 2012). Sums of several such normals (Holohan and Braghin, ESORICS 2021) make that hard to use, and prove
nothing. `ExactNoise` releases

    h round((S + σ Z) / h),    Z normal with all its digits, h = 2^-20 of σ's power of two,

drawn from exactly that law. It is the release of a real Gaussian mechanism, post-processed by a fixed function; so all
that is proved of that mechanism, sampled batches, vectors and many steps included, holds for it. A discrete Gaussian
(Canonne, Kamath, Steinke, NeurIPS 2020) has a law of its own, for which that is not proved.

`privacy.exact_noise` draws it, in NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError
from flower_privdec.privacy.exact_noise import NOT_FINITE, PIECE, SystemNormals, add_exactly, check_std, key_stream
from flower_privdec.privacy.noise.source import check_call, pieces
from flower_privdec.rows.tensors import all_finite

if TYPE_CHECKING:
    from torch import Tensor


class SystemNoise:
    """Normals by AES-256 in counter mode, under a new key from the operating system for every call, and Box-Muller.

    A pair of normals takes its radius from 63 bits and its angle from 64, in float64, so that they end at 9.4
    standard deviations. They are added in float64, and the sum is rounded once to the rows' type: normals that were
    rounded before would leave the binades of their own rounding in the difference of a release and a guess of its sum.

    Privacy: only a reader of this process's memory during the call learns the noise. `ExactNoise` protects against
    what the rounding of floating-point sums reveals; this class does not.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Check that the cipher is installed.

        Args:
            key: 32 bytes in place of fresh entropy, for only one call.

        Raises:
            ScenarioError: the package cryptography is not installed.
        """
        self._key = key
        key_stream(key=bytes(32))

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
        stds = std.to(out.device, torch.float64)[:, None]  # [m, 1]
        normals = SystemNormals(key_stream(self._key), out.numel())

        # In pieces, so that the normals of a large model need not all be in memory at once.
        for rows, columns in pieces(out.shape[0], out.shape[1], PIECE):
            part = out[rows, columns]
            drawn = torch.from_numpy(normals.draw(part.numel())).to(out.device).view_as(part)
            part.copy_(torch.addcmul(part.double(), drawn, stds[rows]))


class SharedNoise(SystemNoise):
    """SystemNoise under a key that two peers share: both draw the same normals, up to their libraries' rounding.

    A negative standard deviation takes away what the positive one adds, to the bit on one machine.

    Privacy: a key is for only one call; two calls under one key add the same normals.

    Args:
        key: 32 bytes.
        normals: whose memory to use, for rows that are no longer than its; by default new memory.
    """

    def __init__(self, key: bytes, normals: SystemNormals | None = None) -> None:
        self._key: bytes = key
        self._normals = normals

    def _add_(self, out: Tensor, std: Tensor) -> None:
        """Add in place: a peer has many partners, and their draws go to one row."""
        stream = key_stream(self._key)
        normals = self._normals
        if normals is None:
            normals = SystemNormals(stream, out.numel())
        else:
            normals.encryptor = stream

        for row, scale in zip(out, std.double().tolist(), strict=True):
            for _, columns in pieces(1, row.numel(), PIECE):
                part = row[columns]
                drawn = torch.from_numpy(normals.draw(part.numel(), scale))
                part.add_(drawn.to(part.device))


class ExactNoise(SystemNoise):
    """Real normals of the operating system's entropy, added and rounded to a grid exactly.

    `add_` also raises ValueError if a sum or its noise is not a finite number, or if the noise is too small for a grid.

    Privacy: exact for the sum as it was computed, whose own rounding `noise_inflation` pays for, as long as this
    machine's log, sqrt and tan in float64 are right to 2^-45 (its libraries document 2^-50). How long a draw takes, and
    what is left of it in memory, is not protected.
    """

    def _add_(self, out: Tensor, std: Tensor) -> None:
        stds = std.detach().double().cpu()
        check_std(stds.numpy())
        noised = stds > 0
        if not bool(noised.any()):
            return
        if not bool(noised.all()):
            # Rows with a standard deviation of 0 stay as they are: not even rounded to a grid.
            chosen = noised.to(out.device)
            rows = out[chosen]
            self._add_(rows, stds[noised])
            out[chosen] = rows
            return

        if not all_finite(out):
            raise ArgumentError(NOT_FINITE, code="noise.not-finite")
        normals = SystemNormals(key_stream(), out.numel())
        for rows_of_piece, columns in pieces(out.shape[0], out.shape[1], PIECE):
            part = out[rows_of_piece, columns]
            sums = part.detach().double().cpu().numpy()
            exact = add_exactly(sums, stds[rows_of_piece, None].numpy(), normals)
            part.copy_(torch.from_numpy(exact))
