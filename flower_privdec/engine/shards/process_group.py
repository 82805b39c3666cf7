"""Direct connections between shards: torch.distributed's gloo, with rows in flat buffers and nothing pickled.

Gloo is TCP between every two shards, without encryption and without authentication. A process that reaches the ports
can read rows, take a shard's place or send it any rows; `rendezvous` says where shards listen. Rows that come in are
checked all the same: they must be of this place of the run, and finite. A shard that has ended is noticed at once, by
its closed connections, and one whose machine is gone by its silence, after PATIENCE.

Rows go in one of two ways. Long runs of rows go by themselves, from where they lie in memory to where they are wanted.
All others of one exchange to one shard are packed into one `MessageBuffer`, with a stamp that names the exchange.
"""

from __future__ import annotations

import math
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

PATIENCE = 600.0  # seconds to wait for rows: longer than any shard computes or evaluates in one go
LONG = 2**16  # bytes: rows go by themselves if their runs have as many on average
LAST_TAG = 2**30  # after which tags, the numbers of exchanges, begin at 0 again
LOST = "lost touch with"
STAMP = 8  # bytes of the stamp
UNIT = 64  # if types differ, each part begins at a multiple of this many bytes
Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # type and shape of each part


@dataclass(frozen=True)
class MessageBuffer:
    """The packed rows of one message: views of one buffer, so that filling the parts fills the message.

    Attributes:
        whole: the bytes that are sent, uint8.
        parts: the rows of each name, [k, ...].
        numbers: what `finite` checks: one view of all numbers if they have one type, which is quicker; else the parts.
        stamp: the tag of the exchange, int64.
    """

    whole: Tensor
    parts: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    stamp: Tensor

    @classmethod
    def within(cls, buffer: Tensor, layout: Layout) -> MessageBuffer:
        """Return the views for a layout, in a buffer that is long enough."""
        begins, end = _places(layout)
        parts = []
        for begin, (dtype, shape) in zip(begins, layout, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            parts.append(buffer[begin : begin + size].view(dtype).view(shape))

        numbers = tuple(parts)
        if _is_of_one_type(layout):
            dtype = layout[0][0]
            size = sum(part.nbytes for part in parts)
            numbers = (buffer[:size].view(dtype),)

        stamp = buffer[end : end + STAMP].view(torch.int64)
        return cls(buffer[: end + STAMP], tuple(parts), numbers, stamp)

    def finite(self) -> bool:
        """Return whether all numbers are finite."""
        return all(all_finite(part) for part in self.numbers)


def layout_of(likes: Sequence[Tensor], count: int) -> Layout:
    """Return the layout of `count` rows of each name; `likes` has a tensor with such rows for each."""
    return tuple((like.dtype, (count, *like.shape[1:])) for like in likes)


def _places(layout: Layout) -> tuple[list[int], int]:
    """Return the beginning of each part, and of the stamp behind them; there are no gaps if all are of one type."""
    unit = 1 if _is_of_one_type(layout) else UNIT
    begins = []
    end = 0
    for dtype, shape in layout:
        begins.append(end)
        size = torch.Size(shape).numel() * dtype.itemsize
        end += math.ceil(size / unit) * unit
    return begins, math.ceil(end / STAMP) * STAMP


def _is_of_one_type(layout: Layout) -> bool:
    return len({dtype for dtype, _ in layout}) == 1


class LostShardError(RunError):
    """Another shard is gone, or silent; its log has the cause."""


@dataclass
class Pending:
    """Rows on their way, see `ProcessGroup.begin`.

    Attributes:
        shards: which shard hosts which peers.
        here: the place of the run, for errors.
        tag: the number of this exchange, with which its messages are stamped.
        arriving: gloo's works that receive, each with the shard from which it receives.
        leaving: gloo's works that send, each with the shard to which it sends.
        messages: the messages with packed rows, each with its shard and the rows into which its parts go.
        alone: the runs of rows that come by themselves, each with its shard.
    """

    shards: Shards
    here: str
    tag: int = 0
    arriving: list[tuple[int, Work]] = field(default_factory=list)
    leaving: list[tuple[int, Work]] = field(default_factory=list)
    messages: list[tuple[int, MessageBuffer, list[Tensor]]] = field(default_factory=list)
    alone: list[tuple[int, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all rows have come, are checked and lie where they are wanted, and until all sent rows are gone.

        Raises:
            LostShardError: a shard is gone; the message names it.
            RunError: rows of a shard are not finite, or are of another place of the run; the message names the shard.
        """
        self._wait(self.arriving)

        for shard, message, wanted in self.messages:
            self._check(shard, int(message.stamp) == self.tag, "are of another place; all shards must run one scenario")
            self._check(shard, message.finite(), "are not finite; a peer diverged")
            for into, part in zip(wanted, message.parts, strict=True):
                into.copy_(part)
        for shard, row in self.alone:
            self._check(shard, all_finite(row), "are not finite; a peer diverged")

        # Gloo may still be reading the rows that are sent; once this returns, steps may change them.
        self._wait(self.leaving)

    def _check(self, shard: int, is_right: bool, fault: str) -> None:
        if not is_right:
            raise RunError(f"{self.here}: rows of {self.shards.name(shard)} {fault}", code="shards.rows")

    def _wait(self, works: list[tuple[int, Work]]) -> None:
        for shard, work in works:
            with touching(self.shards.name(shard), self.here):
                try:
                    work.wait()
                finally:
                    # A work keeps gloo's connections open while anything refers to it, such as the frame of an error
                    # that is reported, and the other shards would wait.
                    del work

    def forget(self) -> None:
        """Drop the references that keep connections open."""
        self.arriving.clear()
        self.leaving.clear()


@contextmanager
def touching(shard: str, here: str) -> Iterator[None]:
    """Turn an error of gloo inside into a LostShardError that names a shard and the place of the run."""
    try:
        yield
    except RuntimeError as error:
        # Gloo begins with its source file and line, "[...] ", and ends with advice for its developers.
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
        self._tag = 0
        self._pending = Pending(shards, "")
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._messages: dict[tuple[str, int, Layout], MessageBuffer] = {}

    @classmethod
    def join(cls, store: Store, shard: int, shards: Shards, address: str, patience: float = PATIENCE) -> ProcessGroup:
        """Connect with all other shards, which have to do so too.

        Args:
            store: the rendezvous.
            address: the address of this machine at which the others reach it; nothing listens anywhere else.
            patience: the seconds that any wait may last.

        Raises:
            LostShardError: they cannot be reached.
        """
        # torch has no public way to listen at one address only.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=patience)
        with touching("the other shards", "their rendezvous"):
            return cls(ProcessGroupGloo(store, shard, len(shards), options), shard, shards)

    @property
    def group(self) -> Any:
        """Gloo's group.

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
        """Return what each shard gave, in the order of the shards; all must give the same number of bytes."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        answers = [torch.empty_like(mine) for _ in range(len(self.shards))]
        with touching("another shard", "their rendezvous"):
            self.group.allgather([answers], [mine]).wait()
        return [answer.numpy().tobytes() for answer in answers]

    def agree(self, digest: bytes) -> None:
        """Check that all shards give the same digest, 32 bytes, of what they are about to run.

        Raises:
            RunError: a shard differs; the message names it.
        """
        for shard, theirs in enumerate(self.gather(digest)):
            if theirs != digest:
                raise RunError(
                    f"{self.shards.name(shard)} is about to run something else than {self.shards.name(self.shard)}: "
                    "install the same versions of flower-privdec and torch, and give the same public data, everywhere",
                    code="shards.other-run",
                )

    def wait_for_all(self) -> None:
        """Wait until all shards have reached the end of the run.

        Raises:
            LostShardError: one did not.
        """
        with touching("another shard", "the end"):
            self.group.barrier().wait()

    def total(self, values: Tensor, here: str) -> Tensor:
        """Return the sum of a tensor over all shards, which call this together; `values` may be overwritten.

        Raises:
            LostShardError: a shard is gone.
            RunError: the sum is not finite.
        """
        summed = values.cpu()
        with touching("another shard", here):
            self.group.allreduce([summed]).wait()
        if not all_finite(summed):
            raise RunError(f"{here}: the sum over the shards is not finite; a peer diverged", code="shards.not-finite")
        return summed.to(values.device)

    def begin(self, rows: Sequence[Tensor], traffic: Traffic, foreign: Sequence[Tensor], here: str) -> Pending:
        """Start to send rows to other shards and to receive theirs; touch no rows until `Pending.wait` has returned.

        Args:
            rows: the rows here, [m, ...], for each name; made by `clean_rows`.
            traffic: which of them go to which shard.
            foreign: the rows from other shards, [f, ...], for each name, to be received; made by `clean_rows`.
            here: the place of the run, for errors.
        """
        self._tag = (self._tag + 1) % LAST_TAG
        pending = Pending(self.shards, here, self._tag)
        self._pending = pending

        # Both ends decide alike which rows go alone and which are packed, by their number, runs, shape and type; and
        # they go through shards, names and runs in the same order, in which gloo pairs what has one tag.
        for shard, received in traffic.receives.items():
            packed = []
            count = received.stop - received.start
            for table in foreign:
                if not go_alone(table, count, len(traffic.arrive[shard])):
                    packed.append(table)
                    continue
                for start, stop in traffic.arrive[shard]:
                    block = _block(table, start, stop)
                    self._start(self.group.recv, block, shard, pending.arriving)
                    pending.alone.append((shard, block))

            message = self._message("in", shard, layout_of(packed, count))
            self._start(self.group.recv, message.whole, shard, pending.arriving)
            pending.messages.append((shard, message, [table[received] for table in packed]))

        for shard, chosen in traffic.sends.items():
            packed = []
            count = chosen.shape[0]
            for table in rows:
                if not go_alone(table, count, len(traffic.leave[shard])):
                    packed.append(table)
                    continue
                for start, stop in traffic.leave[shard]:
                    self._start(self.group.send, _block(table, start, stop), shard, pending.leaving)

            message = self._message("out", shard, layout_of(packed, count))
            _fill(message, packed, chosen, self._tag)
            self._start(self.group.send, message.whole, shard, pending.leaving)

        return pending

    def _start(self, send_or_receive: Callable[..., Work], values: Tensor, shard: int, works: list[Any]) -> None:
        """Start to send values to a shard, or to receive them; append gloo's work to `works`."""
        with touching(self.shards.name(shard), self._pending.here):
            works.append((shard, send_or_receive([values], shard, self._tag)))

    def _message(self, way: str, shard: int, layout: Layout) -> MessageBuffer:
        """Return a message to or from a shard.

        All messages to a shard share one buffer, and all from it another. It grows to the longest of them.
        """
        key = (way, shard, layout)
        if key in self._messages:
            return self._messages[key]

        size = _places(layout)[1] + STAMP
        buffer = self._buffers.get((way, shard))
        if buffer is None or len(buffer) < size:
            buffer = torch.zeros(size, dtype=torch.uint8)
            self._buffers[way, shard] = buffer
            # Forget the views of the old buffer, which would keep its memory.
            self._messages = {other: message for other, message in self._messages.items() if other[:2] != (way, shard)}

        self._messages[key] = MessageBuffer.within(buffer, layout)
        return self._messages[key]


def _fill(message: MessageBuffer, rows: Sequence[Tensor], chosen: Tensor, tag: int) -> None:
    """Copy the chosen rows of all names into a message, and stamp it."""
    for table, part in zip(rows, message.parts, strict=True):
        if table.device.type == "cpu":
            torch.index_select(table, 0, chosen, out=part)
        else:
            part.copy_(table.index_select(0, chosen.to(table.device)))
    message.stamp.fill_(tag)


def go_alone(rows: Tensor, count: int, runs: int) -> bool:
    """Return whether `count` rows, which lie in so many runs, go by themselves, without a copy."""
    bytes_per_row = rows.shape[1:].numel() * rows.element_size()
    return rows.device.type == "cpu" and bytes_per_row * count >= LONG * runs


def _block(rows: Tensor, start: int, stop: int) -> Tensor:
    """Return a run of rows as one block of memory, padding included, see `clean_rows`."""
    part = rows[start:stop]
    if part.is_contiguous():
        return part
    whole = padded(part)
    assert whole is not None
    return whole


def clean_rows(like: Tensor, count: int) -> Tensor:
    """Return new rows [count, ...] shaped like others: their numbers are not set, and zeros are in their padding.

    Privacy: padding is sent with its rows, and fresh memory may hold anything that this process has had in it.
    """
    rows = empty_rows(like, count, *like.shape[1:])
    is_padded = rows.ndim == 2 and count > 0 and rows.stride(0) > rows.shape[1]
    if is_padded:
        d = rows.shape[1]
        stride = rows.stride(0)
        torch.as_strided(rows, (count, stride), (stride, 1))[:, d:] = 0
    return rows
