"""Direct connections between shards: torch.distributed's gloo, with rows in flat buffers and nothing pickled.

What gloo is: TCP between every two shards, without encryption and without authentication. A process that reaches the
ports can read rows, take a shard's place or send it any rows; see `rendezvous` for where they listen. What comes in is
checked all the same: that it is of this place of the run, and that it is finite. A shard that is gone is known by its
closed connections, at once, and one whose machine is gone by its silence, after PATIENCE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.engine.shards.communication_plan import Shards, Traffic
from flower_privdec.rows.tensors import all_finite, empty_rows, padded

STAMP = 8  # bytes
UNIT = 64  # bytes between the beginnings of parts whose types differ
Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # type and shape of each part


@dataclass(frozen=True)
class MessageBuffer:
    """Views of a buffer.

    Attributes:
        whole: what is sent, uint8.
        parts: of each name, its rows, [k, ...].
        numbers: all of them in one row, where they are of one type, which is quicker to check; else the parts.
        stamp: int64, one number.
    """

    whole: Tensor
    parts: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    stamp: Tensor

    @classmethod
    def within(cls, buffer: Tensor, layout: Layout) -> MessageBuffer:
        """Return the views for a layout, in a buffer that is long enough."""
        begins, end = _places(layout)
        parts = tuple(
            buffer[begin : begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for begin, (dtype, shape) in zip(begins, layout, strict=True)
        )
        numbers = parts
        if len({dtype for dtype, _ in layout}) == 1:
            numbers = (buffer[: sum(part.nbytes for part in parts)].view(layout[0][0]),)
        return cls(buffer[: end + STAMP], parts, numbers, buffer[end : end + STAMP].view(torch.int64))

    def finite(self) -> bool:
        """Return whether all numbers are finite."""
        return all(all_finite(part) for part in self.numbers)


def layout_of(likes: Sequence[Tensor], count: int) -> Layout:
    """Return the layout of so many rows of each name."""
    return tuple((like.dtype, (count, *like.shape[1:])) for like in likes)


def _places(layout: Layout) -> tuple[list[int], int]:
    """Return where each part begins, without a gap where all are of one type, and where the stamp does."""
    unit = 1 if len({dtype for dtype, _ in layout}) == 1 else UNIT
    begins = []
    end = 0
    for dtype, shape in layout:
        begins.append(end)
        end += -(-torch.Size(shape).numel() * dtype.itemsize // unit) * unit
    return begins, -(-end // STAMP) * STAMP


PATIENCE = 600.0  # seconds to wait for rows: longer than any shard computes or is evaluated in one go
LONG = 2**16  # bytes of a run of rows from which it is not copied first
LAST_TAG = 2**30
LOST = "lost touch with"


class LostShardError(RunError):
    """Another shard is gone, or silent; it knows better why."""


@dataclass
class Pending:
    """Rows on their way, see `ProcessGroup.begin`.

    Attributes:
        here: where the run is, for errors.
        tag: the stamp of messages of this exchange.
        arriving: what is waited for, with the shard it comes from.
        leaving: what is sent, with the shard it goes to.
        messages: what comes packed, by shard, and where it is wanted.
        alone: runs of rows that come by themselves, each with its shard.
    """

    shards: Shards
    here: str
    tag: int = 0
    arriving: list[tuple[int, Work]] = field(default_factory=list)
    leaving: list[tuple[int, Work]] = field(default_factory=list)
    messages: list[tuple[int, MessageBuffer, list[Tensor]]] = field(default_factory=list)
    alone: list[tuple[int, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all rows have come, are checked and are where they are wanted, and all that was sent is gone.

        Raises:
            LostShardError: naming the shard that is gone.
            RunError: naming the shard whose rows are not finite, or are of another place of the run.
        """
        self._wait(self.arriving)
        for shard, message, wanted in self.messages:
            self._check(shard, int(message.stamp) == self.tag, "are of another place; all shards must run one scenario")
            self._check(shard, message.finite(), "are not finite; a peer diverged")
            for into, part in zip(wanted, message.parts, strict=True):
                into.copy_(part)
        for shard, row in self.alone:
            self._check(shard, all_finite(row), "are not finite; a peer diverged")
        self._wait(self.leaving)

    def _check(self, shard: int, right: bool, wrong: str) -> None:
        if not right:
            raise RunError(f"{self.here}: rows of {self.shards.name(shard)} {wrong}", code="shards.rows")

    def _wait(self, ways: list[tuple[int, Work]]) -> None:
        for shard, work in ways:
            with touching(self.shards.name(shard), self.here):
                try:
                    work.wait()
                finally:
                    del work  # while anything holds it, connections stay open and the others wait on

    def forget(self) -> None:
        """Release all that holds connections open."""
        self.arriving.clear()
        self.leaving.clear()


@contextmanager
def touching(shard: str, here: str) -> Iterator[None]:
    """Turn what gloo raises inside into a LostShardError that names a shard and where the run is."""
    try:
        yield
    except RuntimeError as error:
        message = one_line(error).partition("] ")[2] or one_line(error)
        problem = f"{LOST} {shard} in {here} ({message.split('. This is')[0][:160]})"
        raise LostShardError(problem, code="shards.lost") from error


class ProcessGroup:
    """The connections of one shard to all others.

    Args:
        group: gloo's, a `ProcessGroupGloo`.
        shard: this one's number.
        shards: which shard hosts which peers.
    """

    def __init__(self, group: Any, shard: int, shards: Shards) -> None:
        self._group = group
        self.shard = shard
        self.shards = shards
        self._tag, self._pending = 0, Pending(shards, "")
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._messages: dict[tuple[str, int, Layout], MessageBuffer] = {}

    @classmethod
    def join(cls, store: Store, shard: int, shards: Shards, address: str, patience: float = PATIENCE) -> ProcessGroup:
        """Connect with all other shards, which have to do so too.

        Args:
            store: the rendezvous.
            address: of this machine, at which the others reach it; nothing listens anywhere else.
            patience: seconds that any wait may last.

        Raises:
            LostShardError: they cannot be reached.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=patience)
        with touching("the other shards", "their rendezvous"):
            return cls(ProcessGroupGloo(store, shard, len(shards), options), shard, shards)

    @property
    def group(self) -> Any:
        """Return the group.

        Raises:
            RunError: the connections are closed.
        """
        if self._group is None:
            raise RunError("the connections of this shard are closed", code="shards.closed")
        return self._group

    def close(self) -> None:
        """Close all connections, which the others notice at once."""
        self._pending.forget()
        self._group = None
        self._buffers.clear()
        self._messages.clear()

    def gather(self, content: bytes) -> list[bytes]:
        """Return what every shard has to say, as many bytes each, in the order of the shards."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        answers = [torch.empty_like(mine) for _ in range(len(self.shards))]
        with touching("another shard", "their rendezvous"):
            self.group.allgather([answers], [mine]).wait()
        return [answer.numpy().tobytes() for answer in answers]

    def agree(self, digest: bytes) -> None:
        """Check that all shards have the same 32 bytes to say of what they are about to do.

        Raises:
            RunError: naming one that disagrees.
        """
        for shard, theirs in enumerate(self.gather(digest)):
            if theirs != digest:
                raise RunError(
                    f"{self.shards.name(shard)} is about to run something else than {self.shards.name(self.shard)}: "
                    "install the same versions of flower-privdec and torch, and give the same public data, everywhere",
                    code="shards.other-run",
                )

    def part(self) -> None:
        """Wait until all shards have reached the end.

        Raises:
            LostShardError: one did not.
        """
        with touching("another shard", "the end"):
            self.group.barrier().wait()

    def total(self, values: Tensor, here: str) -> Tensor:
        """Return the sum of a tensor over all shards, which all call this; `values` is used up.

        Raises:
            LostShardError: a shard is gone.
            RunError: the sum is not finite.
        """
        summed = values.cpu()
        with touching("another shard", here):
            self.group.allreduce([summed]).wait()
        if not all_finite(summed):
            raise RunError(f"{here}: what the shards add up is not finite; a peer diverged", code="shards.not-finite")
        return summed.to(values.device)

    def begin(self, rows: Sequence[Tensor], traffic: Traffic, foreign: Sequence[Tensor], here: str) -> Pending:
        """Send some rows to other shards and receive theirs; no row is touched until `wait` has returned.

        Runs of rows that are long enough go from where they lie to where they are wanted; the others, of all names, in
        one buffer.

        Args:
            rows: of each name, those here, [m, ...], made by `clean_rows`.
            foreign: of each name, where those from elsewhere go, [f, ...], likewise.
            here: where the run is, for errors.
        """
        tag = self._tag = (self._tag + 1) % LAST_TAG
        self._pending = pending = Pending(self.shards, here, tag)
        for shard, part in traffic.receives.items():
            short = []
            count = part.stop - part.start
            for table in foreign:
                if go_alone(table, count, len(traffic.arrive[shard])):
                    for start, stop in traffic.arrive[shard]:
                        block = _block(table, start, stop)
                        self._swap(self.group.recv, pending.arriving, block, shard)
                        pending.alone.append((shard, block))
                else:
                    short.append(table)
            message = self._message("in", shard, layout_of(short, count))
            self._swap(self.group.recv, pending.arriving, message.whole, shard)
            pending.messages.append((shard, message, [table[part] for table in short]))
        for shard, which in traffic.sends.items():
            short = []
            count = which.shape[0]
            for table in rows:
                if go_alone(table, count, len(traffic.leave[shard])):
                    for start, stop in traffic.leave[shard]:
                        self._swap(self.group.send, pending.leaving, _block(table, start, stop), shard)
                else:
                    short.append(table)
            message = self._message("out", shard, layout_of(short, count))
            _fill(message, short, which, tag)
            self._swap(self.group.send, pending.leaving, message.whole, shard)
        return pending

    def _swap(self, way: Callable[..., Work], ways: list[tuple[int, Work]], values: Tensor, shard: int) -> None:
        """Begin to send or receive some values, and add that to what is on its way."""
        with touching(self.shards.name(shard), self._pending.here):
            ways.append((shard, way([values], shard, self._tag)))

    def _message(self, way: str, shard: int, layout: Layout) -> MessageBuffer:
        """Return a message to or from a shard; all that go one way between two shards lie in one buffer."""
        key = (way, shard, layout)
        if key not in self._messages:
            size = _places(layout)[1] + STAMP
            buffer = self._buffers.get((way, shard))
            if buffer is None or len(buffer) < size:
                buffer = self._buffers[way, shard] = torch.zeros(size, dtype=torch.uint8)
                self._messages = {other: value for other, value in self._messages.items() if other[:2] != key[:2]}
            self._messages[key] = MessageBuffer.within(buffer, layout)
        return self._messages[key]


def _fill(message: MessageBuffer, rows: Sequence[Tensor], which: Tensor, tag: int) -> None:
    """Put the chosen rows of all names into a message, and which message it is."""
    for table, part in zip(rows, message.parts, strict=True):
        if table.device.type == "cpu":
            torch.index_select(table, 0, which, out=part)
        else:
            part.copy_(table.index_select(0, which.to(table.device)))
    message.stamp.fill_(tag)


def go_alone(rows: Tensor, count: int, runs: int) -> bool:
    """Return whether so many rows, in so many runs, go by themselves, straight from and to where they lie."""
    return rows.device.type == "cpu" and rows.shape[1:].numel() * rows.element_size() * count >= LONG * runs


def _block(rows: Tensor, start: int, stop: int) -> Tensor:
    """Return a run of rows as one block of memory, with what lies between them, see `clean_rows`."""
    part = rows[start:stop]
    if part.is_contiguous():
        return part
    whole = padded(part)
    assert whole is not None
    return whole


def clean_rows(like: Tensor, count: int) -> Tensor:
    """Return rows as long as others, [count, ...], which are not set, with zeros in the padding: it may be sent."""
    made = empty_rows(like, count, *like.shape[1:])
    if made.ndim == 2 and count and made.stride(0) > made.shape[1]:
        torch.as_strided(made, (count, made.stride(0)), (made.stride(0), 1))[:, made.shape[1] :] = 0
    return made
