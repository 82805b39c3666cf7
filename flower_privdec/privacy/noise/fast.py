"""Noise from a counter-based generator compiled by numba, for rows on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.noise.source import NOBODY, check_call
from flower_privdec.rows.keys import PeerKeys


class FastNoise:
    """Philox4x32-7 keyed by 64 bits of (peer's key, purpose), with counter (block, step, receiver, 0).

    A value depends on its key and its column alone, not on the cohort, a slice of it or the number of threads
    (torch.get_num_threads()). float64 rows get the numbers of float32 rows, computed more precisely.
    """

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        from flower_privdec.privacy.noise import philox

        self._tile: int = philox.TILE
        self._kernels: dict[torch.dtype, Any] = {
            torch.float32: philox.add_normals32,
            torch.float64: philox.add_normals64,
        }
        self._keys = PeerKeys(keys)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

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
        keys = self.keys_of(peers, purpose)
        if out.numel() == 0:
            return
        rows = out.detach()
        if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
            rows = rows.contiguous()
        (m, d), stride = rows.shape, rows.stride(0)
        arrays = (
            rows.as_strided(((m - 1) * stride + d,), (1,)).numpy(),
            (d, stride),
            std.detach().to(out.dtype).contiguous().numpy(),
            keys,
            self.receivers(m) if receivers is None else receivers.astype(np.uint64),
            np.uint64(step),
        )
        self._run(self._kernels[out.dtype], arrays, m * -(-d // self._tile))
        if rows.data_ptr() != out.data_ptr():
            out.detach().copy_(rows)

    def keys_of(self, peers: np.ndarray, purpose: str) -> np.ndarray:
        """Return the keys of some peers' streams for a purpose, uint64 [m]."""
        return np.asarray(self._keys.table(purpose, 1)[self._keys.slots(peers), 0])

    @staticmethod
    def receivers(m: int) -> np.ndarray:
        """Return what stands for the receiver of each of m rows that are for nobody in particular, uint64 [m]."""
        return np.full(m, NOBODY, np.uint64)

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
