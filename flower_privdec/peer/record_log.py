"""One file of a peer's last records, whole and safe to read: what it keeps on disk between two processes.

A *record* is facts, which JSON can hold, and NumPy arrays by name. Both kinds of peers write such a file: a network
peer its checkpoints (`store`), a relayed peer its state of a run (`app_state`). Nothing here needs torch.

The file is written in place, with one fdatasync for each record. It begins with three *roots*, a page each. A root has
a sequence number and names the place of a record, which holds the facts, the small arrays, and where the large ones
lie. A new record is written to parts of the file that no kept record uses, and its root over the oldest one. One
fdatasync follows for all of it, so a machine that stops in between may have written any part: root, record and large
arrays have checks, and the newest records that pass them count. What was torn has never been relied on, for nothing
leaves a peer before the fdatasync has returned. An array that never changes is written once, however many records hold
it, and two of the same memory are one.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from flower_privdec.common.files import close_to_others, named, open_file, replacing
from flower_privdec.common.formatting import one_line

T = TypeVar("T")
Facts = dict[str, Any]
NamedArrays = dict[str, np.ndarray]

MAGIC = b"privdec2"
PAGE = 4096
ROOT = struct.Struct("<8sQQQI")  # magic, sequence, offset and bytes of the record, its CRC-32; the root's own follows
ROOTS = 3  # of which the oldest is written over: two records remain readable
SMALL = 4096  # bytes of an array at most that lies in the record

TEXT = json.JSONEncoder(separators=(",", ":"))

Extent = tuple[int, int, int]  # of the file: offset, bytes, and the check of what lies there
Memory = tuple[int, int]  # address and bytes of an array

# What parsing a damaged record may raise. Its checks find nearly all damage before.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, struct.error)


class DamagedLogError(ValueError):
    """A file has no readable record; says why."""


class RecordLog:
    """The file of a peer's records; see the module.

    Args:
        path: the path of the file, which the first record makes.
        count: how many of the last records remain readable, 1 or 2.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._file = -1
        self._size = 0
        self._sequence = 0
        self._used = deque[list[Extent]](maxlen=count)
        self._lasting: dict[Memory, tuple[np.ndarray, Extent]] = {}

    def read(self, parse: Callable[[Facts, NamedArrays], T]) -> list[T]:
        """Return the records to continue from, the older first; none if the file is missing.

        Args:
            parse: makes something of a record's facts and arrays; a record for which it raises one of DAMAGE does not
                count.

        Raises:
            DamagedLogError: the file has no readable record.
        """
        if not self._path.exists():
            return []

        self._open(self._path)
        os.fdatasync(self._file)  # a process that was killed may have left what it did not sync

        kept = self._used.maxlen or 0
        records = _read_records(self._path, parse)[-kept:]
        self._sequence = records[-1][0]
        self._used.extend(extents for _, extents, _ in records)
        return [content for _, _, content in records]

    def write(self, facts: Facts, arrays: NamedArrays, lasting: Collection[str] = (), *, durable: bool = True) -> None:
        """Put a record on disk, in place of the oldest.

        Args:
            lasting: names of the arrays that never change, which later records may hold too.
            durable: whether it must outlast a stop of the machine, not only of the process.

        Raises:
            OSError: the disk fails; the records before are whole.
        """
        try:
            if self._file < 0 and self._is_known():
                self._open(self._path)
            if self._file >= 0:
                self._write(facts, arrays, lasting, durable)
            else:
                self._begin(facts, arrays, lasting, durable)
        except OSError as error:
            raise named(error, self._path) from error.__cause__

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _is_known(self) -> bool:
        """Return whether this log has read or written the file that is there."""
        return self._sequence > 0 and self._path.exists()

    def _begin(self, facts: Facts, arrays: NamedArrays, lasting: Collection[str], durable: bool) -> None:
        """Write the first record of a new file, which then replaces what is at the path."""
        self._sequence = 0
        self._used.clear()
        self._lasting = {}
        try:
            with replacing(self._path, durable=durable) as part:
                self._open(part)
                self._write(facts, arrays, lasting, durable)
        except BaseException:
            # The file that failed is removed, and no later record may go to it.
            self.close()
            self._sequence = 0
            raise

    def _open(self, path: Path) -> None:
        self._file = open_file(path, os.O_RDWR)
        close_to_others(self._file)
        self._size = os.fstat(self._file).st_size

    def _write(self, facts: Facts, arrays: NamedArrays, lasting: Collection[str], durable: bool) -> None:
        others = [extent for extents in self._used for extent in extents]
        own = list[Extent]()
        extents = dict(self._lasting)
        places: dict[str, list[Any]] = {}
        inline = list[memoryview]()
        inline_end = 0
        for name, array in arrays.items():
            numbers = numbers_of(array)
            layout = [array.dtype.str, list(array.shape)]
            if array.nbytes <= SMALL:
                places[name] = [*layout, inline_end, array.nbytes]
                inline.append(numbers)
                inline_end += array.nbytes
                continue

            memory = memory_of(array)
            if memory not in extents:
                offset = self._place(numbers, others + own)
                extents[memory] = array, (offset, array.nbytes, page_check(numbers))
            extent = extents[memory][1]
            own.append(extent)
            places[name] = [*layout, *extent]

        text = TEXT.encode({"facts": facts, "arrays": places}).encode()
        record = b"".join((len(text).to_bytes(8, "little"), text, *inline))
        check = crc32(record)
        offset = self._place(memoryview(record), others + own)
        own.append((offset, len(record), check))

        # The root comes last: a process that is killed before it leaves the record before.
        sequence = self._sequence + 1
        root = ROOT.pack(MAGIC, sequence, offset, len(record), check)
        self._write_at(memoryview(root + crc32(root).to_bytes(4, "little")), sequence % ROOTS * PAGE)
        if durable:
            os.fdatasync(self._file)

        self._sequence = sequence
        self._used.append(own)
        lasting_memory = {memory_of(arrays[name]) for name in lasting if arrays[name].nbytes > SMALL}
        self._lasting = {memory: extents[memory] for memory in lasting_memory}

    def _place(self, content: memoryview, used: list[Extent]) -> int:
        """Write something to the first gap between what is used, extending the file if needed; return its offset."""
        offset = ROOTS * PAGE
        for start, nbytes, _ in sorted(used):
            if start >= offset + len(content):
                break
            offset = max(offset, _page_end(start + nbytes))

        end = _page_end(offset + len(content))
        if end > self._size:
            os.posix_fallocate(self._file, self._size, end - self._size)
            self._size = end
        self._write_at(content, offset)
        return offset

    def _write_at(self, content: memoryview, offset: int) -> None:
        while content:
            done = os.pwrite(self._file, content, offset)
            content = content[done:]
            offset = offset + done


def read_records(path: Path, parse: Callable[[Facts, NamedArrays], T]) -> list[T]:
    """Return the readable records of a file, the older first, to look at; see `RecordLog.read`.

    Raises:
        DamagedLogError: there is none.
    """
    return [content for _, _, content in _read_records(path, parse)]


def numbers_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array, however it lies."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def memory_of(array: np.ndarray) -> Memory:
    """Return where an array lies: of two that exist, the same numbers lie at the same place."""
    return array.__array_interface__["data"][0], array.nbytes


def page_check(content: memoryview) -> int:
    """Return a checksum of numbers that detects a page that was not written, as fast as memory is read.

    It is the CRC-32 of the sums of the pages, each of 512 words of 64 bits, and of what is left after them.
    """
    whole = len(content) // PAGE * PAGE
    sums = np.frombuffer(content[:whole], np.uint64).reshape(-1, PAGE // 8).sum(1)
    return crc32(content[whole:], crc32(sums))


def _page_end(offset: int) -> int:
    """Return the end of the page that an offset lies in, or the offset itself between two pages."""
    return -(-offset // PAGE) * PAGE


def _read_records(path: Path, parse: Callable[[Facts, NamedArrays], T]) -> list[tuple[int, list[Extent], T]]:
    """Return the sequence number, the extents and the content of each readable record, the older first."""
    problem = "it has no root"
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        content = memoryview(b"")
        problem = error.strerror or str(error)

    records = []
    for at in range(0, ROOTS * PAGE, PAGE):
        root = bytes(content[at : at + ROOT.size + 4])
        if not any(root):
            continue  # never written
        try:
            if root[: len(MAGIC)] != MAGIC or crc32(root[:-4]) != int.from_bytes(root[-4:], "little"):
                raise ValueError("a root was written only in part, or has another format")
            _, sequence, *extent = ROOT.unpack(root[:-4])
            extents, facts, arrays = _read_record(content, tuple(extent))
            records.append((sequence, extents, parse(facts, arrays)))
        except DAMAGE as error:
            problem = one_line(error)

    if not records:
        raise DamagedLogError(problem)
    return sorted(records, key=lambda record: record[0])


def _read_record(content: memoryview, extent: Extent) -> tuple[list[Extent], Facts, NamedArrays]:
    """Return the extents of a record, and what it holds.

    Raises:
        any of DAMAGE: it is torn, or was written by no peer.
    """
    offset, nbytes, check = extent
    record = content[offset : offset + nbytes]
    if len(record) != nbytes or crc32(record) != check:
        raise ValueError("a record is torn")

    begin = 8 + int.from_bytes(record[:8], "little")
    described = json.loads(bytes(record[8:begin]))
    inline = record[begin:]
    extents = [extent]
    arrays: NamedArrays = {}
    for name, (dtype, shape, start, size, *checks) in described["arrays"].items():
        lies_in = content if checks else inline
        numbers = lies_in[start : start + size]
        if checks:
            if page_check(numbers) != checks[0]:
                raise ValueError(f"{name} is torn")
            extents.append((start, size, checks[0]))
        # A copy, which may be written to and does not hold the whole file in memory.
        arrays[name] = np.frombuffer(bytearray(numbers), np.dtype(dtype)).reshape(shape)

    return extents, described["facts"], arrays
