"""Shares on disk, each once: in files beside the checkpoints that hold it until it is acknowledged."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flower_privdec.common.tensor_file import write_tensors
from flower_privdec.engine.checkpoint import BESIDE, Place

LARGE = 2**20  # bytes of a tensor from which a file of its own costs less than to write it again


class ShareFiles:
    """The files of one peer's large shares.

    What is in one never changes, and no two have one name: a checkpoint that was put back finds its own or none.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, set(folder.glob(BESIDE.format("*")))
        self._known: dict[tuple[int, int], tuple[Tensor, Place]] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Write those that are large and on no disk yet, and know where they are; to be called before a checkpoint.

        Args:
            tensors: all that the checkpoint has to hold; they never change.

        Raises:
            OSError: the disk is full; what was there stays.
        """
        large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= LARGE}
        new = {name: tensor for name, tensor in large.items() if self.place(tensor) is None}
        path = self._folder / BESIDE.format(secrets.token_hex(8))
        if new:
            self._files.add(path)
            write_tensors(path, new, {})
        places = {_key(each): (each, self.place(each) or (path.name, name)) for name, each in large.items()}
        self._known = places

    def place(self, tensor: Tensor) -> Place | None:
        """Return where the numbers of a tensor are on disk, or None."""
        return self._known.get(_key(tensor), (tensor, None))[1]

    def tidy(self) -> None:
        """Remove what the last checkpoint does not hold; to be called once that is on disk."""
        used = {self._folder / file for _, (file, _) in self._known.values()}
        for path in self._files - used:
            path.unlink(missing_ok=True)
        self._files &= used


def _key(tensor: Tensor) -> tuple[int, int]:
    """Return what tells a tensor that is held from others that are."""
    return tensor.data_ptr(), tensor.nbytes
