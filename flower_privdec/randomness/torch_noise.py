"""Noise from torch's own generator, for rows on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.randomness.keys import PeerKeys
from flower_privdec.randomness.mersenne import TwisterState, splitmix, twister_words
from flower_privdec.randomness.source import NOBODY, STEPS, check_call, pieces

_BLOCK = 2**13  # rows shorter than this are drawn several steps at a time
_ROOM = 2**12  # such blocks that are kept, at most (128 MB in float32)
_SCRATCH = 2**17  # elements drawn at a time on a CPU (512 kB in float32)
_STATES = 64  # generator states derived at a time


class TorchNoise:
    """One stream of a torch.Generator for each (peer's key, purpose, receiver, block of steps), on any device.

    On a CPU a stream is a state of the generator filled from 128 bits of key, on a GPU a seed of 64 bits.
    Rows of at most 4,096 elements are drawn for 2**13 // d consecutive steps at once, in blocks of which 4,096 are
    kept; longer ones pass through a scratch of 512 kB. Of all this the numbers depend on d alone.
    """

    def __init__(self, keys: Mapping[int, bytes], device: torch.device | str = "cpu") -> None:
        self._keys = PeerKeys(keys)
        self._streams = _Streams(torch.device(device))
        self._caches: dict[tuple[str, torch.dtype, int], _Cache] = {}

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
        ids = self._keys.slots(peers) * STEPS + (NOBODY if receivers is None else receivers)
        if out.numel() == 0:
            return
        with torch.no_grad():
            if _BLOCK // out.shape[1] >= 2:
                self._add_short(out, std.to(out), step, ids, purpose)
            else:
                self._add_long(out, std.tolist(), step, ids, purpose)

    def _add_long(self, out: Tensor, std: list[float], step: int, ids: np.ndarray, purpose: str) -> None:
        wanted = np.flatnonzero(std)
        d, size = out.shape[1], self._streams.scratch
        keys = self._stream_keys(ids[wanted], purpose)
        starts = self._streams.starts(keys, step)
        scratch = torch.empty(min(size, len(wanted) * d), dtype=out.dtype, device=out.device)
        for rows, columns in pieces(len(wanted), d, size):
            for i in wanted[rows].tolist():
                if columns.start == 0:
                    next(starts)
                part = scratch[: columns.stop - columns.start].normal_(generator=self._streams.generator)
                out[i, columns].add_(part, alpha=std[i])

    def _add_short(self, out: Tensor, std: Tensor, step: int, ids: np.ndarray, purpose: str) -> None:
        """Add rows from the kept blocks, and those for which there is no room from blocks that are dropped again."""
        kind = (purpose, out.dtype, out.shape[1])
        self._add_from(self._cache(kind, ids[:_ROOM]), out[:_ROOM], std[:_ROOM], step, ids[:_ROOM])
        for rows, _ in pieces(len(ids) - _ROOM, _BLOCK, _SCRATCH):
            late = slice(_ROOM + rows.start, _ROOM + rows.stop)
            self._add_from(self._extended(None, kind, ids[late]), out[late], std[late], step, ids[late])

    def _add_from(self, cache: _Cache, out: Tensor, std: Tensor, step: int, ids: np.ndarray) -> None:
        block, place = divmod(step, cache.normals.shape[1])
        slots = np.searchsorted(cache.ids, ids)
        self._refill(cache, np.unique(slots[cache.block[slots] != block]), block)
        normals = cache.normals[:, place]
        if not np.array_equal(slots, np.arange(len(cache.ids))):
            normals = normals.index_select(0, torch.as_tensor(slots, device=out.device))
        out.addcmul_(normals, std[:, None])

    def _refill(self, cache: _Cache, slots: np.ndarray, block: int) -> None:
        starts = self._streams.starts(cache.keys[slots], block)
        for slot in slots.tolist():
            next(starts)
            cache.normals[slot].normal_(generator=self._streams.generator)
        cache.block[slots] = block

    def _cache(self, kind: tuple[str, torch.dtype, int], ids: np.ndarray) -> _Cache:
        """Return the kept blocks of one kind of rows, these among them; other kinds make room, the oldest first."""
        cache = self._caches.get(kind)
        if cache is None or not np.isin(ids, cache.ids).all():
            self._caches.pop(kind, None)
            cache = self._extended(cache, kind, ids)
            while sum(len(other.ids) for other in self._caches.values()) + len(cache.ids) > _ROOM:
                self._caches.pop(next(iter(self._caches)))
            self._caches[kind] = cache
        return cache

    def _extended(self, cache: _Cache | None, kind: tuple[str, torch.dtype, int], ids: np.ndarray) -> _Cache:
        """Return a cache with room for some more rows; only for these where there is no room for all."""
        known = np.unique(ids if cache is None else np.concatenate([cache.ids, ids]))
        if len(known) > _ROOM:
            cache, known = None, np.unique(ids)
        keys = np.empty((len(known), 3), np.uint64)
        new = np.ones(len(known), bool)
        if cache is not None:
            old = np.searchsorted(known, cache.ids)
            keys[old], new[old] = cache.keys, False
        keys[new] = self._stream_keys(known[new], kind[0])
        shape = (len(known), _BLOCK // kind[2], kind[2])
        normals = torch.empty(shape, dtype=kind[1], device=self._streams.device)
        return _Cache(known, keys, np.full(len(known), -1), normals)

    def _stream_keys(self, ids: np.ndarray, purpose: str) -> np.ndarray:
        """Return three 64-bit keys for each stream, uint64 [m, 3]."""
        slots, receivers = np.divmod(ids, STEPS)
        pairs = zip(slots.tolist(), receivers.tolist(), strict=True)
        found = b"".join(self._keys.derive(slot, 24, purpose, receiver) for slot, receiver in pairs)
        return np.frombuffer(found, np.uint64).reshape(-1, 3)


@dataclass
class _Cache:
    """The last block of steps of each known stream: derived, and drawn again whenever it is missing."""

    ids: np.ndarray  # sorted
    keys: np.ndarray  # of the streams, uint64 [streams, 3]
    block: np.ndarray  # which block of steps a stream holds, -1 for none
    normals: Tensor  # [streams, steps in a block, d]


class _Streams:
    """A torch.Generator that can be started anew for any stream and block of steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = _SCRATCH if device.type == "cpu" else 64 * _SCRATCH
        self._twister = TwisterState() if device.type == "cpu" else None
        self.generator = torch.Generator(device) if self._twister is None else self._twister.generator

    def starts(self, keys: np.ndarray, block: int) -> Iterator[None]:
        """Set the generator to the start of each stream's block, one after the other."""
        if self._twister is None:
            for seed in splitmix(keys[:, 0], np.array([block], np.uint64)).tolist():
                self.generator.manual_seed(seed)
                yield
            return
        for first in range(0, len(keys), _STATES):
            for words in twister_words(keys[first : first + _STATES, :2], block):
                self._twister.set_(words)
                yield
