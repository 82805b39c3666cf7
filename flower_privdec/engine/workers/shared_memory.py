"""Memory that a process shares with those it forks: tensors that stay where they are, and boxes that grow.

Nothing of it has a name: it is gone with the last process that has it mapped, whatever ends that.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from flower_privdec.core import Edges
from flower_privdec.rows.aligned import BOUNDARY, aligned

LENGTH = 8  # bytes of the number before a box's contents


def shared_copy(rows: Tensor, *, filled: bool = True) -> Tensor:
    """Return a copy in shared memory that lies as the rows do, by which products of either have the same bits.

    Args:
        filled: whether the numbers are copied, and not the room for them alone.
    """
    if not _padded_or_dense(rows):
        rows = aligned(rows)
    count = max(1, len(rows) * rows.stride(0)) if rows.ndim else 1
    memory = mmap.mmap(-1, count * rows.element_size())
    with suppress(OSError, ValueError, AttributeError):  # a kernel that has no huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=rows.dtype, count=count)
    copy = flat.as_strided(rows.shape, rows.stride())
    return copy.copy_(rows) if filled else copy


def _padded_or_dense(rows: Tensor) -> bool:
    """Return whether each row is contiguous, and they follow one another without overlap."""
    return rows.numel() > 0 and rows[0].is_contiguous() and rows.stride(0) >= rows[0].numel()


class EdgeBox:
    """Edges that one process puts where the others can read them."""

    def __init__(self) -> None:
        """Make an empty box, before the processes are forked."""
        self._file = os.memfd_create("edges", os.MFD_CLOEXEC)

    def put(self, edges: Sequence[Mapping[str, Edges]]) -> None:
        """Put in the edges of some blocks, in place of what was there, which nobody may be reading."""
        buffers: list[pickle.PickleBuffer] = []
        parts = [{name: (e.own, e.other, e.values.numpy()) for name, e in block.items()} for block in edges]
        payload = pickle.dumps(parts, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        head = pickle.dumps((payload, [view.nbytes for view in views]))
        places = _places(len(head), [view.nbytes for view in views])
        _write(self._file, len(head).to_bytes(LENGTH, "little") + head, 0)
        for view, place in zip(views, places, strict=False):
            _write(self._file, view, place)

    def look(self) -> list[dict[str, Edges]]:
        """Return what is in the box, as views that hold until something else is put in."""
        memory = memoryview(mmap.mmap(self._file, 0))
        stop = LENGTH + int.from_bytes(memory[:LENGTH], "little")
        payload, sizes = pickle.loads(memory[LENGTH:stop])  # of a process of one's own
        places = _places(stop - LENGTH, sizes)
        views = [memory[place : place + size] for place, size in zip(places, sizes, strict=False)]
        parts = pickle.loads(payload, buffers=views)
        return [{name: Edges(e[0], e[1], torch.from_numpy(e[2])) for name, e in block.items()} for block in parts]

    def close(self) -> None:
        """Let go of the box."""
        os.close(self._file)


def _places(head: int, sizes: list[int]) -> list[int]:
    """Return where each of some contents begins behind a head, and where the last ends."""
    found = [-(-(LENGTH + head) // BOUNDARY) * BOUNDARY]
    for size in sizes:
        found.append(found[-1] + -(-size // BOUNDARY) * BOUNDARY)
    return found


def _write(file: int, content: bytes | memoryview, place: int) -> None:
    left = memoryview(content).cast("B")
    while left.nbytes:
        written = os.pwrite(file, left, place)
        left, place = left[written:], place + written
