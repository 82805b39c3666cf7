"""Noise from torch's own generator, for rows on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.noise.mersenne import Twister, splitmix
from flower_privdec.privacy.noise.source import NOBODY, STEPS, check_call, pieces
from flower_privdec.privacy.noise.tails import Tails
from flower_privdec.rows.keys import PeerKeys

_BLOCK = 2**13  # rows shorter than this are drawn several steps at a time
_ROOM = 2**12  # such blocks that are kept, at most (128 MB in float32)
_SCRATCH = 2**17  # elements drawn at a time on a CPU (512 kB in float32)


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
            add = self._add_short if _BLOCK // out.shape[1] >= 2 else self._add_long
            add(out, std.to(out), step, ids, purpose)

    def _add_long(self, out: Tensor, std: Tensor, step: int, ids: np.ndarray, purpose: str) -> None:
        scales, lines = np.array(std.tolist()), out.unbind(0)
        wanted = np.flatnonzero(scales)
        keys, d, size = self._stream_keys(ids[wanted], purpose), out.shape[1], self._streams.scratch
        starts, tails = self._streams.starts(keys, step), Tails()
        scratch = _Scratch(out, min(size, len(wanted) * d))
        for rows, columns in pieces(len(wanted), d, size):
            part, normals = scratch.part(rows.stop - rows.start, columns.stop - columns.start)
            for row in normals:
                if columns.start == 0:
                    next(starts)
                row.normal_(generator=self._streams.generator)
            tails.take_(part, rows.start * d + columns.start)
            for i, row in zip(wanted[rows].tolist(), normals, strict=True):
                lines[i][columns].add_(row, alpha=scales[i])
        found, places, values = tails.draw(d, keys[:, 2], step)
        _add_at_(out, wanted[found], places, scales[wanted[found]] * values)

    def _add_short(self, out: Tensor, std: Tensor, step: int, ids: np.ndarray, purpose: str) -> None:
        """Add rows from the kept blocks, and those for which there is no room from blocks that are dropped again."""
        kind = (purpose, out.dtype, out.shape[1])
        self._add_from(self._cache(kind, ids[:_ROOM]), out[:_ROOM], std[:_ROOM], step, ids[:_ROOM])
        for rows, _ in pieces(len(ids) - _ROOM, _BLOCK, _SCRATCH):
            late = slice(_ROOM + rows.start, _ROOM + rows.stop)
            self._add_from(self._extended(None, kind, ids[late]), out[late], std[late], step, ids[late])

    def _add_from(self, cache: _Cache, out: Tensor, std: Tensor, step: int, ids: np.ndarray) -> None:
        block, place = divmod(step, cache.normals.shape[1])
        slots = cache.ids.searchsorted(ids)
        stale = slots[cache.block[slots] != block]
        if len(stale):
            self._refill(cache, np.unique(stale), block)
        normals = cache.normals[:, place]
        if not np.array_equal(slots, np.arange(len(cache.ids))):
            normals = normals.index_select(0, torch.as_tensor(slots, device=out.device))
        out.addcmul_(normals, std[:, None])

    def _refill(self, cache: _Cache, slots: np.ndarray, block: int) -> None:
        starts, tails = self._streams.starts(cache.keys[slots], block), Tails()
        normals = cache.normals.view(len(cache.ids), -1)
        cache.block[slots] = -1  # until all is done
        for run in _runs(slots, self._streams.scratch // _BLOCK):
            part = normals[run[0] : run[-1] + 1]
            for row in part.unbind(0):
                next(starts)
                row.normal_(generator=self._streams.generator)
            tails.take_(part, int(run[0]) * normals.shape[1])
        _add_at_(normals, *tails.draw(normals.shape[1], cache.keys[:, 2], block))
        cache.block[slots] = block

    def _cache(self, kind: tuple[str, torch.dtype, int], ids: np.ndarray) -> _Cache:
        """Return the kept blocks of one kind of rows, these among them; other kinds make room, the oldest first."""
        cache = self._caches.get(kind)
        if cache is None or not np.array_equal(cache.ids.take(cache.ids.searchsorted(ids), mode="clip"), ids):
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
            known = np.unique(ids)
        shape = (len(known), _BLOCK // kind[2], kind[2])
        normals = torch.empty(shape, dtype=kind[1], device=self._streams.device)
        return _Cache(known, self._stream_keys(known, kind[0]), np.full(len(known), -1), normals)

    def _stream_keys(self, ids: np.ndarray, purpose: str) -> np.ndarray:
        """Return three 64-bit keys for each stream, uint64 [m, 3]."""
        slots, receivers = np.divmod(ids, STEPS)
        return splitmix(self._keys.table(purpose, 3)[slots], receivers.astype(np.uint64)[:, None])


@dataclass
class _Cache:
    """The last block of steps of each known stream: derived, and drawn again whenever it is missing."""

    ids: np.ndarray  # sorted
    keys: np.ndarray  # of the streams, uint64 [streams, 3]
    block: np.ndarray  # which block of steps a stream holds, -1 for none
    normals: Tensor  # [streams, steps in a block, d]


class _Scratch:
    """Memory through which long rows pass, some rows or a part of one at a time."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._memory = like.new_empty(size)
        self._parts: dict[tuple[int, int], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def part(self, count: int, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return its first count * width elements, and these as rows; the same tensors when asked for again."""
        if (count, width) not in self._parts:
            flat = self._memory[: count * width]
            self._parts[count, width] = flat, flat.view(count, width).unbind(0)
        return self._parts[count, width]


class _Streams:
    """A torch.Generator that can be started anew for any stream and block of steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = _SCRATCH if device.type == "cpu" else 64 * _SCRATCH
        self._twister = Twister() if device.type == "cpu" else None
        self.generator = torch.Generator(device) if self._twister is None else self._twister.generator

    def starts(self, keys: np.ndarray, block: int) -> Iterator[None]:
        """Set the generator to the start of each stream's block, one after the other."""
        return self._seeds(keys, block) if self._twister is None else self._twister.starts(keys[:, :2], block)

    def _seeds(self, keys: np.ndarray, block: int) -> Iterator[None]:
        for seed in splitmix(keys[:, 0], np.array([block], np.uint64)).tolist():
            self.generator.manual_seed(seed)
            yield


def _runs(slots: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Cut ascending slots into runs of neighbours, `most` at a time."""
    for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
        yield from (run[start : start + most] for start in range(0, len(run), most))


def _add_at_(out: Tensor, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
    """Add a value to each of some places, none of which comes twice."""
    if out.device.type == "cpu":
        out.detach().numpy()[rows, columns] += values  # torch's own indexing takes fifteen times as long
    else:
        out[torch.from_numpy(rows), torch.from_numpy(columns)] += torch.from_numpy(values).to(out)
