"""A peer's checkpoints in one file, written in place with one fdatasync for each.

The file begins with three *roots*, a page each. A root has a sequence number and names a *record*: the facts of a
checkpoint as JSON, its small tensors, and where the large ones lie. A new checkpoint is written to parts of the file
that no kept checkpoint uses, and its root over the oldest one. One fdatasync follows for all of it, so a machine that
stops in between may have written any part: root, record and large tensors have checks, and the newest checkpoints that
pass them count. What was torn has never been relied on, for nothing leaves a peer before the fdatasync has returned.

A tensor that never changes is written once, however many checkpoints hold it, and two of the same memory are one.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import naming, open_file, replacing
from flower_privdec.common.formatting import one_line
from flower_privdec.experiment.checkpoint import CARRIED, DTYPES, Checkpoint, described, numbers_of, restored

MAGIC = b"privdec1"
PAGE = 4096
ROOT = struct.Struct("<8sQQQI")  # magic, sequence, offset and bytes of the record, its CRC-32; the root's own follows
ROOTS = 3  # of which the oldest is written over: two checkpoints remain readable
SMALL = 4096  # bytes of a tensor at most that lies in the record

Extent = tuple[int, int, int]  # of the file: offset, bytes, and the check of what lies there


class CheckpointLog:
    """The file of a peer's checkpoints; see the module.

    Args:
        path: of the file, made by the first checkpoint.
        count: how many of the last checkpoints remain readable, 1 or 2.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._file, self._size, self._sequence = path, -1, 0, 0
        self._used = deque[list[Extent]](maxlen=count)
        self._constant: dict[tuple[int, int], tuple[Tensor, Extent]] = {}  # by address and size

    def read(self, device: torch.device) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none where there is no file.

        Raises:
            ScenarioError: it has no readable checkpoint.
        """
        if not self._path.exists():
            return []
        self._open(self._path)
        os.fdatasync(self._file)  # a process that was killed may have left what it did not sync
        records = _read_records(self._path, device)[-self._used.maxlen :]  # type: ignore[operator]
        self._sequence = records[-1][0]
        self._used.extend(extents for _, extents, _ in records)
        return [checkpoint for _, _, checkpoint in records]

    def _open(self, path: Path) -> None:
        self._file = open_file(path, os.O_RDWR)
        self._size = os.fstat(self._file).st_size

    def write(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint on disk, in place of the oldest.

        Args:
            checkpoint: its carried tensors never change.

        Raises:
            OSError: the disk fails; the checkpoints before are whole.
        """
        with naming(self._path):
            if self._file < 0:
                with replacing(self._path) as part:
                    self._open(part)
                    self._write(checkpoint)
            else:
                self._write(checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        facts, tensors = described(checkpoint)
        used = [extent for extents in self._used for extent in extents]
        places: dict[str, Any] = {}
        inline, end, own, places_of = list[memoryview](), 0, list[Extent](), dict(self._constant)
        for name, tensor in tensors.items():
            if tensor.nbytes <= SMALL:
                places[name] = [end, tensor.nbytes]
                inline.append(numbers_of(tensor))
                end += tensor.nbytes
                continue
            key = tensor.data_ptr(), tensor.nbytes
            if key not in places_of:
                numbers = numbers_of(tensor)
                places_of[key] = tensor, (self._place(numbers, used + own), tensor.nbytes, page_check(numbers))
            own.append(places_of[key][1])
            places[name] = own[-1]
        text = json.dumps({**facts, "places": places}, separators=(",", ":")).encode()
        record = b"".join((len(text).to_bytes(8, "little"), text, *inline))
        check = crc32(record)
        offset = self._place(memoryview(record), used + own)
        own.append((offset, len(record), check))
        root = ROOT.pack(MAGIC, self._sequence + 1, offset, len(record), check)
        page = (self._sequence + 1) % ROOTS * PAGE
        self._write_at(memoryview(root + crc32(root).to_bytes(4, "little")), page)
        os.fdatasync(self._file)
        self._sequence += 1
        self._used.append(own)
        self._constant = {
            (tensor.data_ptr(), tensor.nbytes): places_of[tensor.data_ptr(), tensor.nbytes]
            for name, tensor in tensors.items()
            if name.startswith(CARRIED) and tensor.nbytes > SMALL
        }

    def _place(self, content: memoryview, used: list[Extent]) -> int:
        """Write something to where nothing used lies, which the file is extended for, and return its offset."""
        offset = ROOTS * PAGE
        for start, nbytes, _ in sorted(used):
            if start >= offset + len(content):
                break
            offset = max(offset, -(-(start + nbytes) // PAGE) * PAGE)
        end = -(-(offset + len(content)) // PAGE) * PAGE
        if end > self._size:
            os.posix_fallocate(self._file, self._size, end - self._size)
            self._size = end
        self._write_at(content, offset)
        return offset

    def _write_at(self, content: memoryview, offset: int) -> None:
        while content:
            done = os.pwrite(self._file, content, offset)
            content, offset = content[done:], offset + done

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the readable checkpoints of a peer's file, the older first, to look at.

    Raises:
        ScenarioError: there is none.
    """
    return [checkpoint for _, _, checkpoint in _read_records(path, torch.device("cpu"))]


def page_check(content: memoryview) -> int:
    """Return a checksum of numbers that detects a page that was not written, as fast as memory is read.

    It is the CRC-32 of the sums of the pages, each of 512 words of 64 bits, and of what is left after them.
    """
    whole = len(content) // PAGE * PAGE
    sums = np.frombuffer(content[:whole], np.uint64).reshape(-1, PAGE // 8).sum(1)
    return crc32(content[whole:], crc32(sums))


def _read_records(path: Path, device: torch.device) -> list[tuple[int, list[Extent], Checkpoint]]:
    """Return the sequence number, the extents and the content of each readable checkpoint, the older first."""
    records, problem = [], "it has no root"
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        content, problem = memoryview(b""), error.strerror or str(error)
    for at in range(0, ROOTS * PAGE, PAGE):
        root = bytes(content[at : at + ROOT.size + 4])
        if not any(root):
            continue  # never written
        try:
            if crc32(root[:-4]) != int.from_bytes(root[-4:], "little"):
                raise ValueError("a root is torn, or of another format")
            sequence, *extent = ROOT.unpack(root[:-4])[1:]
            records.append((sequence, *_read_record(content, tuple(extent), device)))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
            problem = one_line(error)
    if not records:
        raise ScenarioError(
            f"{path}: cannot be read as checkpoints ({problem}); restore it from a copy, or start again with another "
            "--out",
            code="checkpoints.damaged",
        )
    return sorted(records, key=lambda record: record[0])


def _read_record(content: memoryview, extent: Extent, device: torch.device) -> tuple[list[Extent], Checkpoint]:
    """Return the extents of a record and the checkpoint that it holds.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, RuntimeError: it is torn, or was written by no peer.
    """
    offset, nbytes, check = extent
    record = content[offset : offset + nbytes]
    if len(record) != nbytes or crc32(record) != check:
        raise ValueError("a record is torn")
    begin = 8 + int.from_bytes(record[:8], "little")
    facts, extents = json.loads(bytes(record[8:begin])), [extent]
    tensors = {}
    for name, (start, size, *checks) in facts.pop("places").items():
        numbers = content[start : start + size] if checks else record[begin + start : begin + start + size]
        if checks and page_check(numbers) != checks[0]:
            raise ValueError(f"{name} is torn")
        if checks:
            extents.append((start, size, checks[0]))
        dtype, *shape = facts["tensors"][name]
        flat = torch.frombuffer(bytearray(numbers), dtype=DTYPES[dtype]) if size else torch.empty(0)
        tensors[name] = flat.to(device, DTYPES[dtype]).reshape(shape)
    return extents, restored(facts, tensors)
