"""Noise of deployed peers: from the operating system's entropy, never seeded and never the same twice."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.noise.source import check_call, pieces

PIECE = 2**15  # elements drawn at a time (a few hundred kB)


class SystemNoise:
    """AES-256 in counter mode under a fresh key from the operating system for every call, then Box-Muller.

    A pair of normals takes its radius from 63 bits and its angle from 64, in float64, so that they end at 9.4
    standard deviations. They are then rounded to the rows' type.

    Privacy: only a reader of this process's memory during the call knows the noise. What the rounding of
    floating-point sums reveals (Mironov, CCS 2012) is guarded against by `ExactNoise`, and not here.
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
        """Add noise in place; see NoiseSource. Step, peers, purpose and receivers decide nothing here."""
        check_call(out, std, step, peers, receivers)
        if out.numel() == 0:
            return
        normals = SystemNormals(fresh_stream(self._ciphers), min(PIECE, out.numel()))
        with torch.no_grad():
            scales = std.to(out)[:, None]
            for rows, columns in pieces(out.shape[0], out.shape[1], PIECE):
                part = out[rows, columns]
                part.addcmul_(normals.draw(part.numel()).to(out).view_as(part), scales[rows])


def installed_ciphers() -> Any:
    """Return the module of ciphers.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError as error:
        raise ScenarioError(
            "noise of the operating system needs cryptography, which is not installed: pip install cryptography"
        ) from error
    return ciphers


def fresh_stream(ciphers: Any) -> Any:
    """Return AES-256 in counter mode under a new key from the operating system."""
    key, start = ciphers.algorithms.AES(os.urandom(32)), ciphers.modes.CTR(bytes(16))
    return ciphers.Cipher(key, start).encryptor()


class SystemNormals:
    """Normals from the key stream of a cipher, in memory that is used again and again.

    Attributes:
        words: what the last normals were made of, uint64 [2 pairs]: U's first 63 bits, above one that is not used, of
            every pair (n, n + pairs), whose radius is sqrt(-2 ln U), and then the first 64 of its angle over π, signed.
    """

    def __init__(self, encryptor: Any, most: int) -> None:
        pairs = (most + 1) // 2
        self._encryptor, self._zeros = encryptor, memoryview(bytes(16 * pairs))
        self._stream = bytearray(16 * pairs + 15)  # the cipher asks for a block more, less one byte
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
        """Return 64 bits more of the key stream."""
        return int.from_bytes(self._encryptor.update(bytes(8)), "little")
