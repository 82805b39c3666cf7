"""Direct connections between shards: torch.distributed's gloo, with rows in flat buffers and nothing pickled.

What gloo is: TCP between every two shards, without encryption and without authentication. Whoever reaches the ports
can read rows, take a shard's place or send it any rows; see `meeting` for where they listen. What comes in is checked
all the same: that it is of this place of the run, and that it is finite. A shard that is gone is known by its closed
connections, at once, and one whose machine is gone by its silence, after PATIENCE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from flower_privdec.errors import RunError
from flower_privdec.rows.finite import all_finite
from flower_privdec.runtime.sharded.dealing import Shards
from flower_privdec.words import one_line

PATIENCE = 600.0  # seconds to wait for rows: longer than any shard computes or is evaluated in one go
LONG = 2**16  # bytes of a row from which it goes by itself, straight from where it lies to where it is wanted
UNIT = 64  # bytes between the beginnings of parts of a buffer
LAST_TAG = 2**30
LOST = "lost touch with"


class ShardGroup(Protocol):
    """What is used of torch.distributed's groups."""

    def send(self, tensors: list[Tensor], shard: int, tag: int) -> Work:
        """Send a tensor."""

    def recv(self, tensors: list[Tensor], shard: int, tag: int) -> Work:
        """Receive a tensor."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Add a tensor up over all shards, in place."""

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor]) -> Work:
        """Tell all shards a tensor."""

    def barrier(self) -> Work:
        """Wait for all shards."""


class LostShardError(RunError):
    """Another shard is gone, or silent; it knows better why."""


@dataclass(frozen=True)
class Traffic:
    """Which rows go to and come from each other shard in one exchange; both sides work it out alike.

    Attributes:
        sends: by shard, which of the rows here, int64, in the order in which they go.
        receives: by shard, where among the rows from elsewhere its own stand, which are consecutive.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, slice]

    @property
    def foreign(self) -> int:
        """Return how many rows come from elsewhere."""
        return max((part.stop for part in self.receives.values()), default=0)


@dataclass
class Pending:
    """Rows on their way, see `Wires.begin`.

    Attributes:
        arriving: what is waited for, with the shard it comes from.
        leaving: what is sent, with the shard it goes to.
        land: by shard, puts what came packed into its place.
        here: where the run is, for errors.
    """

    shards: Shards
    here: str
    arriving: list[tuple[int, Work]] = field(default_factory=list)
    leaving: list[tuple[int, Work]] = field(default_factory=list)
    land: list[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all rows have come, are checked and are where they are wanted, and all that was sent is gone.

        Raises:
            LostShardError: naming the shard that is gone.
            RunError: naming the shard whose rows are not finite, or are of another place of the run.
        """
        self._wait(self.arriving)
        for land in self.land:
            land()
        self._wait(self.leaving)

    def _wait(self, ways: list[tuple[int, Work]]) -> None:
        for shard, work in ways:
            try:
                work.wait()
            except RuntimeError as error:
                del work  # while anything holds it, connections stay open and the others wait on
                raise lost(self.shards.name(shard), self.here, error) from error

    def forget(self) -> None:
        """Let go of all that holds connections open."""
        self.arriving.clear()
        self.leaving.clear()


def lost(whom: str, here: str, error: RuntimeError) -> LostShardError:
    """Return the error of a shard that is gone."""
    said = one_line(error).partition("] ")[2] or one_line(error)
    return LostShardError(f"{LOST} {whom} in {here} ({said.split('. This is')[0][:160]})")


class Wires:
    """The connections of one shard to all others.

    Args:
        group: gloo's.
        shard: this one's number.
        shards: who hosts whom.
    """

    def __init__(self, group: ShardGroup, shard: int, shards: Shards) -> None:
        self._group: ShardGroup | None = group
        self.shard, self.shards = shard, shards
        self._tag, self._pending = 0, Pending(shards, "")
        self._buffers: dict[tuple[str, int], Tensor] = {}

    @classmethod
    def meet(cls, store: Store, shard: int, shards: Shards, address: str, patience: float = PATIENCE) -> Wires:
        """Connect with all other shards, which have to do so too.

        Args:
            store: where they meet.
            address: of this machine, at which the others reach it; nothing listens anywhere else.
            patience: seconds that any wait may last.

        Raises:
            LostShardError: they cannot be reached.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=patience)
        try:
            group = ProcessGroupGloo(store, shard, len(shards), options)
        except RuntimeError as error:
            raise lost("the other shards", "their meeting", error) from error
        return cls(cast(ShardGroup, group), shard, shards)

    @property
    def group(self) -> ShardGroup:
        """Return the group.

        Raises:
            RunError: the connections are closed.
        """
        if self._group is None:
            raise RunError("the connections of this shard are closed")
        return self._group

    def close(self) -> None:
        """Close all connections, which tells the others at once."""
        self._pending.forget()
        self._group = None
        self._buffers.clear()

    def agree(self, digest: bytes) -> None:
        """Check that all shards have the same 32 bytes to say of what they are about to do.

        Raises:
            RunError: naming one that says something else.
        """
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        said = [torch.empty_like(mine) for _ in range(len(self.shards))]
        try:
            self.group.allgather([said], [mine]).wait()
        except RuntimeError as error:
            raise lost("another shard", "their meeting", error) from error
        for shard, theirs in enumerate(said):
            if not torch.equal(theirs, mine):
                raise RunError(
                    f"{self.shards.name(shard)} is about to run something else than {self.shards.name(self.shard)}: "
                    "install the same versions of flower-privdec and torch, and give the same public data, everywhere"
                )

    def part(self) -> None:
        """Wait until all shards have come to the end.

        Raises:
            LostShardError: one did not.
        """
        try:
            self.group.barrier().wait()
        except RuntimeError as error:
            raise lost("another shard", "the end", error) from error

    def total(self, values: Tensor, here: str) -> Tensor:
        """Return the sum of a tensor over all shards, which all call this; `values` is used up.

        Raises:
            LostShardError: a shard is gone.
            RunError: the sum is not finite.
        """
        summed = values.cpu()
        try:
            self.group.allreduce([summed]).wait()
        except RuntimeError as error:
            raise lost("another shard", here, error) from error
        if not all_finite(summed):
            raise RunError(f"{here}: what the shards add up is not finite; a peer diverged")
        return summed.to(values.device)

    def begin(self, rows: Sequence[Tensor], traffic: Traffic, foreign: Sequence[Tensor], here: str) -> Pending:
        """Send some rows to other shards and receive theirs; no row is touched until `wait` has returned.

        Long rows go one by one, from where they lie to where they are wanted; short ones of all names in one buffer.

        Args:
            rows: of each name, those here, [m, ...].
            foreign: of each name, where those from elsewhere go, [f, ...].
            here: where the run is, for errors.
        """
        first, self._tag = self._tag, (self._tag + len(rows) + 1) % LAST_TAG
        self._pending = pending = Pending(self.shards, here)
        long = [goes_alone(part) for part in rows]
        for shard, part in traffic.receives.items():
            for number, each in enumerate(foreign):
                if long[number]:
                    wanted = each[part]
                    for row in wanted:
                        self._recv(pending, row, shard, first + number)
                    pending.land.append(_Landing(wanted, None, self.shards.name(shard), here))
            short = [each[part] for each, alone in zip(foreign, long, strict=True) if not alone]
            self._receive_packed(pending, shard, short, first + len(rows))
        for shard, which in traffic.sends.items():
            for number, each in enumerate(rows):
                if long[number]:
                    for row in which.tolist():
                        self._send(pending, each[row], shard, first + number)
            short = [each for each, alone in zip(rows, long, strict=True) if not alone]
            self._send_packed(pending, shard, short, which, first + len(rows))
        return pending

    def _send(self, pending: Pending, values: Tensor, shard: int, tag: int) -> None:
        try:
            pending.leaving.append((shard, self.group.send([values], shard, tag)))
        except RuntimeError as error:
            raise lost(self.shards.name(shard), pending.here, error) from error

    def _recv(self, pending: Pending, values: Tensor, shard: int, tag: int) -> None:
        try:
            pending.arriving.append((shard, self.group.recv([values], shard, tag)))
        except RuntimeError as error:
            raise lost(self.shards.name(shard), pending.here, error) from error

    def _send_packed(self, pending: Pending, shard: int, rows: list[Tensor], which: Tensor, tag: int) -> None:
        """Send the chosen rows of all names, and behind them the tag, by which a message of another place is known."""
        shapes = [(len(which), *each.shape[1:]) for each in rows]
        buffer, parts, stamp = self._packed("out", shard, rows, shapes)
        for each, part in zip(rows, parts, strict=True):
            if each.device.type == "cpu":
                torch.index_select(each, 0, which, out=part)
            else:
                part.copy_(each.index_select(0, which.to(each.device)))
        stamp.fill_(tag)
        self._send(pending, buffer, shard, tag)

    def _receive_packed(self, pending: Pending, shard: int, foreign: list[Tensor], tag: int) -> None:
        buffer, parts, stamp = self._packed("in", shard, foreign, [tuple(each.shape) for each in foreign])
        self._recv(pending, buffer, shard, tag)
        name = self.shards.name(shard)
        pending.land.append(_Stamped(stamp, tag, name, pending.here))
        pending.land += [_Landing(part, into, name, pending.here) for part, into in zip(parts, foreign, strict=True)]

    def _packed(
        self, way: str, shard: int, like: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return a buffer for a shard, the parts of it that hold tensors of some types and shapes, and the tag's."""
        sizes = [torch.Size(shape).numel() * each.element_size() for each, shape in zip(like, shapes, strict=True)]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // UNIT) * UNIT)
        end = begins[-1] + 8
        kept = self._buffers.get((way, shard))
        if kept is None or len(kept) < end:
            kept = self._buffers[way, shard] = torch.zeros(end, dtype=torch.uint8)
        parts = [
            kept[begin : begin + size].view(each.dtype).view(shape)
            for begin, size, each, shape in zip(begins, sizes, like, shapes, strict=False)
        ]
        return kept[:end], parts, kept[end - 8 : end].view(torch.int64)


def goes_alone(rows: Tensor) -> bool:
    """Return whether rows, [m, ...], are long enough to go one by one, from memory that the network reads."""
    return rows.device.type == "cpu" and rows.shape[1:].numel() * rows.element_size() >= LONG


@dataclass(frozen=True)
class _Landing:
    """Rows that have come, which are checked and put where they are wanted."""

    rows: Tensor
    into: Tensor | None
    sender: str
    here: str

    def __call__(self) -> None:
        parts = self.rows if self.into is None else [self.rows]
        if not all(all_finite(part) for part in parts):
            raise RunError(f"{self.here}: rows of {self.sender} are not finite; a peer diverged")
        if self.into is not None:
            self.into.copy_(self.rows)


@dataclass(frozen=True)
class _Stamped:
    """A message whose tag is to be looked at."""

    stamp: Tensor
    tag: int
    sender: str
    here: str

    def __call__(self) -> None:
        if int(self.stamp) != self.tag:
            raise RunError(f"{self.here}: {self.sender} sent rows of another place; all shards must run one scenario")
