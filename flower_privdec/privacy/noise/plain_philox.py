"""The noise of `philox` in NumPy, for a peer without numba: the same numbers, to a rounding of their last digits.

A deployed peer draws from the operating system (`deployed`), and needs none of this. It is for small peers whose noise
follows from a seed, as in tests that compare them with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError
from flower_privdec.privacy.noise.source import NO_RECEIVER, check_call
from flower_privdec.rows.keys import checked_key, digest

if TYPE_CHECKING:
    from torch import Tensor

# See `philox` for what these are, and for the layout of a tile.
LANES = 32
ROUNDS = 7
REFINED = 2**16
AT_ONCE = 2**9  # tiles

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
Words = tuple[np.ndarray, ...]


def words(first: np.ndarray, step: int, receiver: int, last: int, key: int) -> Words:
    """Encrypt the counters (first, step, receiver, last), uint64 of 32 bits each; return four words of each."""
    c0 = first.astype(np.uint64)
    c1 = np.full_like(c0, step)
    c2 = np.full_like(c0, receiver)
    c3 = np.full_like(c0, last)
    k0 = np.uint64(key & 0xFFFFFFFF)
    k1 = np.uint64(key >> 32)
    for _ in range(ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = (p1 >> _32) ^ c1 ^ k0
        c1 = p1 & _LOW
        c2 = (p0 >> _32) ^ c3 ^ k1
        c3 = p0 & _LOW
        k0 = (k0 + _STEPS[0]) & _LOW
        k1 = (k1 + _STEPS[1]) & _LOW
    return c0, c1, c2, c3


def pair(radius_word: np.ndarray, angle_word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two normals, float64, of a radius in units of 2^-32 and of the word of an angle."""
    radius = np.sqrt(-2.0 * np.log(radius_word * 2.0**-32))
    radius = np.where(angle_word & np.uint64(0x40000000), -radius, radius)

    # The last 30 bits are the angle in [-π/4, π/4), a signed number; the first says which normal gets the sine.
    signed = (angle_word << np.uint64(2)).astype(np.uint32).view(np.int32)
    angle = signed * (2.0**-31 * 0.7853981633974483)
    sine = radius * np.sin(angle)
    cosine = radius * np.cos(angle)
    swap = (angle_word & np.uint64(0x80000000)) != 0
    return np.where(swap, sine, cosine), np.where(swap, cosine, sine)


def normals(first_tile: int, tiles: int, step: int, receiver: int, key: int) -> np.ndarray:
    """Return the normals of some tiles of a row, float64."""
    counters = np.arange(first_tile * LANES, (first_tile + tiles) * LANES)
    x0, x1, x2, x3 = words(counters, step, receiver, 0, key)
    radii = [x0 + 0.5, x2 + 0.5]

    # Small words get 64 bits more: the tail of the distribution has its own numbers.
    small = np.flatnonzero(np.minimum(x0, x2) < REFINED)
    if len(small):
        more = words(counters[small], step, receiver, 1, key)
        for radius, word, high, low in ((radii[0], x0, more[0], more[1]), (radii[1], x2, more[2], more[3])):
            finer = word[small] + (high + (low + 0.5) * 2.0**-32) * 2.0**-32
            radius[small] = np.where(word[small] < REFINED, finer, radius[small])

    drawn = [*pair(radii[0], x1), *pair(radii[1], x3)]
    lanes = [part.reshape(tiles, LANES) for part in drawn]
    return np.stack(lanes, axis=1).reshape(-1)


class PlainPhiloxNoise:
    """Simulated Gaussian noise without a compiler; see `philox.PhiloxNoise`.

    Args:
        keys: from global peer id to key.

    Raises:
        ValueError: a key is not a key.
    """

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        self._keys = {peer: checked_key(key) for peer, key in keys.items()}

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place; see NoiseSource."""
        check_call(out, std, step, peers, receivers)
        missing = [peer for peer in peers.tolist() if peer not in self._keys]
        if missing:
            raise ArgumentError(
                f"peers {missing} have no key here: draw only for peers hosted here", code="keys.missing"
            )

        for row, peer in enumerate(peers.tolist()):
            scale = float(std[row])
            if scale == 0:
                continue
            key = int.from_bytes(digest(8, self._keys[peer], "noise", purpose, peer), "little")
            receiver = NO_RECEIVER if receivers is None else int(receivers[row])
            self._add_row_(out[row], scale, step, receiver, key)

    def _add_row_(self, row: Tensor, scale: float, step: int, receiver: int, key: int) -> None:
        tile = 4 * LANES
        tiles = -(-len(row) // tile)  # rounded up
        for first in range(0, tiles, AT_ONCE):
            count = min(AT_ONCE, tiles - first)
            part = row[first * tile : (first + count) * tile]
            drawn = normals(first, count, step, receiver, key)[: len(part)]
            part.add_(torch.from_numpy(drawn).to(part), alpha=scale)
