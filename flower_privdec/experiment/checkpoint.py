"""A run's state on disk, whole and safe to read: safetensors with a few strings, or a peer's `CheckpointLog`.

A log is written in place, with one fdatasync for each checkpoint. It begins with three *roots*, a page each. A root has
a sequence number and names a *record*: the facts of a checkpoint as JSON, its small tensors, and where the large ones
lie. A new checkpoint is written to parts of the file that no kept checkpoint uses, and its root over the oldest one.
One fdatasync follows for all of it, so a machine that stops in between may have written any part: root, record and
large tensors have checks, and the newest checkpoints that pass them count. What was torn has never been relied on, for
nothing leaves a peer before the fdatasync has returned. A tensor that never changes is written once, however many
checkpoints hold it, and two of the same memory are one.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import close_to_others, named, open_file, replacing
from flower_privdec.common.formatting import one_line, peer_ranges
from flower_privdec.core import Edges, State
from flower_privdec.privacy.ledger.charges import RunName

# Prefixes of the names of edges and of a transport's tensors, which are no rows.
EDGE = "edge."
CARRIED = "carried."


@dataclass(frozen=True)
class Checkpoint:
    """A state between two rounds and what belongs to it.

    Attributes:
        state: the rows of every peer.
        scenario: hash of the scenario it belongs to.
        run: names the run in the ledger.
        seconds: training time so far.
        head: the length and the last hash of the ledger.
        transport: the transport's own state, as JSON can hold it, by name.
        carried: its tensors.
        metrics: how many bytes metrics.jsonl had, and their hash, if the folder has that file.
    """

    state: State
    scenario: str
    run: RunName
    seconds: float = 0.0
    head: tuple[int, str] | None = None
    transport: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: tuple[int, str] | None = None


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    facts, tensors = described(checkpoint)
    write_tensors(path, tensors, {"privdec": json.dumps(facts)})


def described(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint as facts, which JSON can hold, and tensors by name; `restored` is the inverse."""
    state = checkpoint.state
    tensors = dict(state.rows)
    tensors |= {EDGE + name: edges.values for name, edges in state.edges.items()}
    tensors |= {CARRIED + name: tensor for name, tensor in checkpoint.carried.items()}
    facts: dict[str, Any] = {
        "scenario": checkpoint.scenario,
        "run": asdict(checkpoint.run),
        "seconds": checkpoint.seconds,
        "head": checkpoint.head,
        "metrics": checkpoint.metrics,
        "transport": dict(checkpoint.transport),
        "round_index": state.round_index,
        "at": state.at,
        "peers": state.peers.tolist(),
        "edges": {name: [edges.own.tolist(), edges.other.tolist()] for name, edges in state.edges.items()},
        "tensors": _layout(tensors),
    }
    return facts, tensors


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in sorted(tensors.items())}


def load_checkpoint(path: Path, scenario: str, run: RunName, device: torch.device) -> Checkpoint:
    """Read a checkpoint back, bit for bit.

    Args:
        scenario: hash of the scenario that would continue.
        run: what that run is called here and now.

    Raises:
        ScenarioError: the file is no whole checkpoint, or the run could not continue from it with the same numbers.
    """
    checkpoint = read_checkpoint(path, device)
    check_run(path, checkpoint, scenario, run)
    return checkpoint


def _refused(path: Path, problem: str, code: str) -> ScenarioError:
    return ScenarioError(f"{path}: {problem}, or start again with another {option('out')}", code=f"checkpoint.{code}")


def check_run(path: Path, checkpoint: Checkpoint, scenario: str, run: RunName) -> None:
    """Refuse a checkpoint from which a run could not continue with the same numbers; see `load_checkpoint`."""
    if checkpoint.scenario != scenario:
        problem = "is a checkpoint of another scenario; resume with the scenario.yaml beside it"
        raise _refused(path, problem, "other-scenario")
    made = checkpoint.run
    if made.environment != run.environment:
        problem = f"was made with {made.environment}, and here is {run.environment}, which draws other numbers"
        raise _refused(path, f"{problem}; resume where it was made", "other-environment")
    if made.id != run.id:
        problem = "was made with other data, another version of the model's code or in another runtime; restore them"
        raise _refused(path, problem, "other-data")


def check_state(path: Path, state: State, peers: np.ndarray, rounds: int, rows: Iterable[str] = ("x",)) -> None:
    """Refuse the state of other peers, or of a round that a run does not have.

    Args:
        path: the file that it was read from.
        peers: global ids of those hosted here.
        rounds: the number of rounds of the run.
        rows: names of those that there must be.

    Raises:
        ScenarioError: the message names what is wrong.
    """
    missing = [name for name in rows if name not in state.rows]
    if missing:
        raise _refused(path, f"lacks {missing}; restore it from a copy", "incomplete")

    if not np.array_equal(state.peers, peers):
        holds = peer_ranges(state.peers.tolist())
        here = peer_ranges(peers.tolist())
        raise _refused(path, f"holds the peers {holds}, and here are {here}; resume where it was made", "other-peers")

    if state.round_index > rounds:
        problem = f"is of round {state.round_index} of rounds={rounds}; restore it from a copy"
        raise _refused(path, problem, "round")


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read any checkpoint, to look at; a run continues from `load_checkpoint`.

    Raises:
        ScenarioError: the file is no checkpoint.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = json.loads(file.metadata()["privdec"])
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return restored(facts, rows)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"cannot be read as a checkpoint ({one_line(error)}); restore it from a copy"
        raise _refused(path, problem, "unreadable") from error


Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _Facts(BaseModel):
    """What `described` returns beside tensors, read back from a file that may be damaged."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    scenario: str
    run: RunName
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    head: tuple[Count, str] | None
    metrics: tuple[Count, str] | None
    transport: dict[str, Count | dict[str, Any]]
    round_index: Count
    at: Count
    peers: list[Count]
    edges: dict[str, tuple[list[Count], list[Count]]]
    tensors: dict[str, list[Any]]


def restored(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """Put a checkpoint together again from the facts and tensors that `described` returned.

    Raises:
        ValueError: these are not facts and tensors that `described` can return.
    """
    checked = _Facts.model_validate(facts)
    if checked.tensors != _layout(tensors):
        raise ValueError("its tensors are not those that were written")
    carried = {name.removeprefix(CARRIED): tensors.pop(name) for name in list(tensors) if name.startswith(CARRIED)}
    values = {name.removeprefix(EDGE): tensors.pop(name) for name in list(tensors) if name.startswith(EDGE)}
    peers = checked.peers
    if sorted(set(peers)) != peers or any(len(row) != len(peers) for row in tensors.values()):
        raise ValueError("its peers do not ascend, or have rows of another number")
    if checked.edges.keys() != values.keys():
        raise ValueError("its edges are not those of its tensors")
    edges = {}
    for name, (own, other) in checked.edges.items():
        if not len(own) == len(other) == len(values[name]):
            raise ValueError("its edges are not as many as their values")
        edges[name] = Edges(np.asarray(own, dtype=np.int64), np.asarray(other, dtype=np.int64), values[name])
    state = State(np.asarray(peers, dtype=np.int64), checked.round_index, checked.at, tensors, edges)
    head = checked.head
    transport = checked.transport
    return Checkpoint(
        state=state,
        scenario=checked.scenario,
        run=checked.run,
        seconds=checked.seconds,
        head=head,
        transport=transport,
        carried=carried,
        metrics=checked.metrics,
    )


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype): dtype for dtype in NAMES}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file in the place of another, whole or not at all.

    Args:
        tensors: by name; wherever and however they lie.
        facts: strings beside them.

    Raises:
        OSError: the disk is full, or the path cannot be written.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    described: dict[str, Any] = {"__metadata__": dict(facts)}
    end = 0
    for name, tensor in ordered.items():
        begin = end
        end = end + tensor.nbytes
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    rows = map(numbers_of, ordered.values())
    with replacing(path) as part, os.fdopen(open_file(part, os.O_WRONLY), "wb", buffering=0) as file:
        for remaining in (memoryview(len(header).to_bytes(8, "little") + header), *rows):
            while remaining:
                remaining = remaining[file.write(remaining) :]


def numbers_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, wherever and however it lies."""
    numbers: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return numbers


# --- a peer's checkpoints in one file ---

MAGIC = b"privdec1"
PAGE = 4096
ROOT = struct.Struct("<8sQQQI")  # magic, sequence, offset and bytes of the record, its CRC-32; the root's own follows
ROOTS = 3  # of which the oldest is written over: two checkpoints remain readable
SMALL = 4096  # bytes of a tensor at most that lies in the record

Extent = tuple[int, int, int]  # of the file: offset, bytes, and the check of what lies there


class CheckpointLog:
    """The file of a peer's checkpoints; see the module.

    Args:
        path: the path of the file, made by the first checkpoint.
        count: how many of the last checkpoints remain readable, 1 or 2.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._file = -1
        self._size = 0
        self._sequence = 0
        self._used = deque[list[Extent]](maxlen=count)
        self._constant: dict[tuple[int, int], tuple[Tensor, Extent]] = {}  # by address and size

    def read(self, device: torch.device) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none if the file is missing.

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
        close_to_others(self._file)
        self._size = os.fstat(self._file).st_size

    def write(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint on disk, in place of the oldest.

        Args:
            checkpoint: its carried tensors never change.

        Raises:
            OSError: the disk fails; the checkpoints before are whole.
        """
        try:
            with ExitStack() as stack:
                if self._file < 0:
                    self._open(stack.enter_context(replacing(self._path)))
                self._write(checkpoint)
        except OSError as error:
            raise named(error, self._path) from error.__cause__

    def _write(self, checkpoint: Checkpoint) -> None:
        facts, tensors = described(checkpoint)
        used = [extent for extents in self._used for extent in extents]
        places: dict[str, Any] = {}
        inline = list[memoryview]()
        end = 0
        own = list[Extent]()
        places_of = dict(self._constant)
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

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _page_end(offset: int) -> int:
    """Return the end of the page that an offset lies in, or the offset itself between two pages."""
    return -(-offset // PAGE) * PAGE


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
    records = []
    problem = "it has no root"
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        content = memoryview(b"")
        problem = error.strerror or str(error)
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
            f"{option('out')}",
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
    facts = json.loads(bytes(record[8:begin]))
    extents = [extent]
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
