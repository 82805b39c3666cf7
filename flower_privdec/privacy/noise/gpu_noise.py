"""Noise from the counter-based generator compiled by Triton, for rows on a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.errors import RunError
from flower_privdec.privacy.noise.source import NOBODY, check_call
from flower_privdec.rows.keys import PeerKeys

_KEPT = 16  # sets of keys and receivers that stay on the device
_BLOCK = 4096  # elements of a row that one program adds to

# What `philox` draws for key 1099511627798, step 7 and no receiver: one or two columns of each word, of a radius that
# is refined, at the end of a block and in the next.
_KNOWN_KEY, _KNOWN_STEP = 1099511627798, 7
_KNOWN = {
    0: 1.351081007438877,
    33: 0.7446968593819507,
    66: 1.0491245880597828,
    99: 1.5802805086650944,
    127: -1.3599363465462873,
    1872: -2.3743692477365745,
    1904: -4.10489051254272,
    4095: 1.112579248451285,
    4096: 1.0812301479730426,
    4199: -0.34569075938046845,
}
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}


def has_triton() -> bool:
    """Say whether Triton is here, and the C compiler that it needs."""
    return find_spec("triton") is not None and bool(os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))))


class GPUNoise:
    """The numbers of FastNoise on a GPU, but for roundings: all rows in one launch, and nothing read back.

    Keys and receivers stay on the device, so that a step like the one before copies nothing to it.
    """

    def __init__(self, keys: Mapping[int, bytes], device: torch.device | str = "cuda") -> None:
        """Compile the kernel, and try it on numbers that are known.

        Raises:
            ImportError: Triton is not installed.
            RunError: this GPU draws other numbers than a CPU.
        """
        from flower_privdec.privacy.noise import triton_philox

        self._prepare(triton_philox.add_normals, keys, torch.device(device))
        for dtype in _TOLERANCES:
            self._try(dtype)

    def _prepare(self, kernel: Any, keys: Mapping[int, bytes], device: torch.device) -> None:
        self._kernel, self._keys, self._device = kernel, PeerKeys(keys), device
        self._there: dict[tuple[str, bytes, bytes], Tensor] = {}

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
        keys, to = self._on_device(purpose, peers, receivers)
        if out.numel() == 0:
            return
        rows = out.detach()
        if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
            rows = rows.contiguous()
        self._launch(rows, std.detach().to(out).contiguous(), keys, to, step)
        if rows.data_ptr() != out.data_ptr():
            out.detach().copy_(rows)

    def _launch(self, rows: Tensor, std: Tensor, keys: Tensor, receivers: Tensor, step: int) -> None:
        grid, double = (len(rows), -(-rows.shape[1] // _BLOCK)), rows.dtype == torch.float64
        self._kernel[grid](
            rows, rows.stride(0), rows.shape[1], std, keys, receivers, step, DOUBLE=double, enable_fp_fusion=True
        )

    def _on_device(self, purpose: str, peers: np.ndarray, receivers: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return the rows' keys and receivers, int64 [m] each, and keep them for the next call."""
        asked = (purpose, peers.tobytes(), b"" if receivers is None else receivers.tobytes())
        if asked not in self._there:
            keys = self._keys.table(purpose, 1)[self._keys.slots(peers), 0].view(np.int64)
            to = np.full(len(peers), NOBODY) if receivers is None else receivers
            while len(self._there) >= _KEPT:
                self._there.pop(next(iter(self._there)))
            self._there[asked] = torch.from_numpy(np.stack([keys, to.astype(np.int64)])).to(self._device)
        keys_there, to_there = self._there[asked].unbind(0)
        return keys_there, to_there

    def _try(self, dtype: torch.dtype) -> None:
        rows = torch.zeros(1, max(_KNOWN) + 1, dtype=dtype, device=self._device)
        keys, nobody = torch.tensor([[_KNOWN_KEY], [NOBODY]], device=self._device).unbind(0)
        self._launch(rows, rows.new_ones(1), keys, nobody, _KNOWN_STEP)
        drawn, known = rows.cpu().double().numpy()[0, list(_KNOWN)], np.array(list(_KNOWN.values()))
        if not (np.abs(drawn - known) <= _TOLERANCES[dtype]).all():
            raise RunError(
                f"compute.generator='fast' draws other {dtype} numbers on {self._device} than on a CPU; set it to torch"
            )
