"""Random numbers keyed by (seed, purpose, round, peer): the same for any cohort, any order and any resume.

None of these generators is cryptographic: they serve simulations; a deployed peer takes its noise elsewhere.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flower_privdec.errors import ScenarioError

NOISE_PURPOSES = ("noise", "personal")
GENERATORS = {
    "auto": "fast where numba is installed and the device is a CPU, else torch",
    "fast": "Philox4x32-7 and Box-Muller compiled by numba (CPU)",
    "torch": "one torch.Generator a row (any device)",
}
_PURPOSE_SLOTS = 8  # room for more purposes without moving the others' seeds
_BLOCK = 2**13  # rows shorter than this are drawn several rounds at a time
_SCRATCH = 2**17  # elements of a long row drawn at a time on a CPU (512 kB in float32)


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the NumPy generator of one (seed, purpose, key): always the same stream, unrelated to any other.

    Args:
        seed: the scenario's seed.
        purpose: what the numbers are for, such as "sampling".
        key: any integers, such as the round and the global peer id.

    Returns:
        A Philox generator whose 128-bit key is the BLAKE2b hash of all arguments.
    """
    text = repr((int(seed), str(purpose), tuple(int(part) for part in key)))
    return np.random.Generator(np.random.Philox(key=_digest(text, 16)))


class NoiseSource(Protocol):
    """Gaussian noise for the rows of a cohort."""

    def add_(self, out: Tensor, std: Tensor, round_index: int, peers: np.ndarray, purpose: str = "noise") -> None:
        """Add noise in place: out[i] += std[i] * N(0, I), keyed by (seed, purpose, round_index, peers[i]).

        Args:
            out: rows [m, d], float32 or float64.
            std: standard deviations [m]; a row with 0 is left as it is.
            round_index: the round, from 0.
            peers: global peer ids [m].
            purpose: one of NOISE_PURPOSES; two purposes never share numbers.

        Raises:
            ScenarioError: an unknown purpose, or a round or peer out of the generator's range.
        """
        ...


def build_noise(generator: str, seed: int, n_peers: int, device: torch.device | str = "cpu") -> NoiseSource:
    """Build a noise source by name.

    Args:
        generator: one of GENERATORS.
        seed: the scenario's seed, 0 <= seed < 2**64.
        n_peers: the number of peers; ids are 0 <= peer < n_peers.
        device: where the rows live.

    Raises:
        ScenarioError: an unknown generator, or `fast` where it cannot run.
    """
    device = torch.device(device)
    if generator not in GENERATORS:
        raise ScenarioError(f"generator={generator!r} must be one of {', '.join(GENERATORS)}")
    if not 0 <= seed < 2**64:
        raise ScenarioError(f"seed={seed} must be >= 0 and < 2**64")
    if generator == "fast" and device.type != "cpu":
        raise ScenarioError(f"generator='fast' runs on a CPU, not {device}: set generator to torch or auto")
    if generator == "torch" or device.type != "cpu":
        return TorchNoise(seed, n_peers, device)
    try:
        return FastNoise(seed, n_peers)
    except ImportError as error:
        if generator == "auto":
            return TorchNoise(seed, n_peers, device)
        raise ScenarioError(
            "generator='fast' needs numba, which is not installed: pip install 'flower-privdec[fast]', "
            "or set generator to torch"
        ) from error


class FastNoise:
    """Philox4x32-7 keyed by the 64-bit seed, with counter (block, round, peer, hash of the purpose).

    A value depends on its key and its column alone, not on the cohort, a slice of it or the number of threads
    (torch.get_num_threads()). float64 rows get the numbers of float32 rows, computed more precisely.
    """

    def __init__(self, seed: int, n_peers: int) -> None:
        from flower_privdec import _philox

        self._tile: int = _philox.TILE
        self._kernels: dict[torch.dtype, Any] = {
            torch.float32: _philox.add_normals32,
            torch.float64: _philox.add_normals64,
        }
        self._seed, self._n_peers = seed, n_peers
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

    def add_(self, out: Tensor, std: Tensor, round_index: int, peers: np.ndarray, purpose: str = "noise") -> None:
        """Add noise in place; see NoiseSource."""
        _check_rows(out, std, peers, purpose, self._n_peers)
        if not 0 <= round_index < 2**32:
            raise ScenarioError(f"round_index={round_index} must be >= 0 and < 2**32")
        if out.numel() == 0:
            return
        rows = out.detach()
        if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
            rows = rows.contiguous()
        (m, d), stride = rows.shape, rows.stride(0)
        key = (round_index, _digest(purpose, 4), self._seed & 0xFFFFFFFF, self._seed >> 32)
        arrays = (
            rows.as_strided(((m - 1) * stride + d,), (1,)).numpy(),
            (d, stride),
            std.detach().to(out.dtype).contiguous().numpy(),
            np.ascontiguousarray(peers, dtype=np.uint64),
            tuple(np.uint64(word) for word in key),
        )
        self._run(self._kernels[out.dtype], arrays, m * -(-d // self._tile))
        if rows.data_ptr() != out.data_ptr():
            out.detach().copy_(rows)

    def _run(self, kernel: Any, arrays: tuple[Any, ...], tiles: int) -> None:
        threads = min(torch.get_num_threads(), max(1, tiles * self._tile // 2**16))
        if threads == 1:
            kernel(*arrays, 0, tiles)
            return
        if self._pool is None or self._pool_size < threads:
            self._pool, self._pool_size = ThreadPoolExecutor(threads, "noise"), threads
        bounds = [tiles * part // threads for part in range(threads + 1)]
        parts = [self._pool.submit(kernel, *(*arrays, a, b)) for a, b in pairwise(bounds)]
        for part in parts:
            part.result()


@dataclass
class _Cache:
    """The last block of rounds of each known peer: derived state, drawn again whenever it is missing."""

    peers: np.ndarray  # sorted ids
    block: np.ndarray  # which block of rounds a row holds, -1 for none
    normals: Tensor  # [peers, rounds in a block, d]


class TorchNoise:
    """One stream per (purpose, block of rounds, peer) of a torch.Generator, on any device.

    torch keeps 32 bits of a CPU generator's seed, so the triples are numbered and mapped to seeds one to one.
    Short rows are drawn for 2**13 // d consecutive rounds at once; long ones through a scratch of 512 kB.
    """

    def __init__(self, seed: int, n_peers: int, device: torch.device | str = "cpu") -> None:
        self._device, self._n_peers = torch.device(device), n_peers
        self._base = _digest(f"base {seed}", 4)
        self._odd = _digest(f"odd {seed}", 4) | 1
        self._generator = torch.Generator(self._device)
        self._caches: dict[tuple[str, torch.dtype, int], _Cache] = {}

    def add_(self, out: Tensor, std: Tensor, round_index: int, peers: np.ndarray, purpose: str = "noise") -> None:
        """Add noise in place; see NoiseSource."""
        _check_rows(out, std, peers, purpose, self._n_peers)
        with torch.no_grad():
            if _BLOCK // out.shape[1] >= 2:
                self._add_short(out, std.to(out), round_index, peers, purpose)
            else:
                self._add_long(out, std.tolist(), round_index, peers, purpose)

    def _add_long(self, out: Tensor, std: list[float], round_index: int, peers: np.ndarray, purpose: str) -> None:
        d = out.shape[1]
        size = min(d, _SCRATCH if self._device.type == "cpu" else 64 * _SCRATCH)
        scratch = torch.empty(size, dtype=out.dtype, device=self._device)
        for row, scale, peer in zip(out, std, peers, strict=True):
            if scale == 0:
                continue
            self._reseed(round_index, int(peer), purpose)
            for start in range(0, d, size):
                part = scratch[: min(size, d - start)].normal_(generator=self._generator)
                row[start : start + size].add_(part, alpha=scale)

    def _add_short(self, out: Tensor, std: Tensor, round_index: int, peers: np.ndarray, purpose: str) -> None:
        d = out.shape[1]
        block, place = divmod(round_index, _BLOCK // d)
        cache = self._cache((purpose, out.dtype, d), peers)
        slots = np.searchsorted(cache.peers, peers)
        for slot in slots[cache.block[slots] != block]:
            self._reseed(block, int(cache.peers[slot]), purpose)
            cache.normals[slot].normal_(generator=self._generator)
            cache.block[slot] = block
        normals = cache.normals[:, place]
        if not np.array_equal(slots, np.arange(len(cache.peers))):
            normals = normals.index_select(0, torch.as_tensor(slots, device=self._device))
        out.addcmul_(normals, std[:, None])

    def _cache(self, key: tuple[str, torch.dtype, int], peers: np.ndarray) -> _Cache:
        cache = self._caches.get(key)
        if cache is None or not np.isin(peers, cache.peers).all():
            known = np.unique(peers if cache is None else np.concatenate([cache.peers, peers]))
            shape = (len(known), _BLOCK // key[2], key[2])
            normals = torch.empty(shape, dtype=key[1], device=self._device)
            cache = self._caches[key] = _Cache(known, np.full(len(known), -1), normals)
        return cache

    def _reseed(self, block: int, peer: int, purpose: str) -> None:
        number = (block * self._n_peers + peer) * _PURPOSE_SLOTS + NOISE_PURPOSES.index(purpose)
        if not 0 <= number < 2**32:
            limit = 2**32 // (_PURPOSE_SLOTS * self._n_peers)
            raise ScenarioError(
                f"round {block} must be >= 0 and < {limit} with generator='torch' and {self._n_peers} peers: "
                "torch has 2**32 seeds; set generator to fast"
            )
        self._generator.manual_seed((self._base + self._odd * number) % 2**32)


def _check_rows(out: Tensor, std: Tensor, peers: np.ndarray, purpose: str, n_peers: int) -> None:
    if purpose not in NOISE_PURPOSES:
        raise ScenarioError(f"purpose={purpose!r} must be one of {', '.join(NOISE_PURPOSES)}")
    if out.ndim != 2 or out.dtype not in (torch.float32, torch.float64):
        raise ScenarioError(f"noise is added to rows [m, d] of float32 or float64, not {out.dtype} {list(out.shape)}")
    if std.shape != out.shape[:1] or peers.shape != (out.shape[0],):
        raise ScenarioError(f"std {list(std.shape)} and peers {list(peers.shape)} must be [{out.shape[0]}]")
    if len(peers) and not (peers.min() >= 0 and peers.max() < n_peers):
        raise ScenarioError(f"peers {peers.min()}..{peers.max()} must be >= 0 and < n_peers={n_peers}")


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
