"""Shards in threads of this process that run one at a time, in an order of their own: what they do can be repeated.

A shard runs until it waits for a message that has not been sent, and then the next one does. Everything that is sent
can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from unittest.mock import patch

import torch
from torch import Tensor

from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.rendezvous import Rendezvous

MINUTE = 60.0


@dataclass
class Turns:
    """Whose turn it is, and what is under way.

    Attributes:
        seen: from whom to whom what was sent, in order.
    """

    here: set[int] = field(default_factory=set)
    whose: int = 0
    changed: Condition = field(default_factory=Condition)
    in_transit: dict[tuple[int, int, int], list[Tensor]] = field(default_factory=dict)
    shared: dict[tuple[str, int], dict[int, Tensor]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def join(self, shard: int, count: int) -> None:
        with self.changed:
            self.here.add(shard)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.here) == count and self.whose == shard, MINUTE)

    def leave(self, shard: int) -> None:
        with self.changed:
            self.here.discard(shard)
            self._pass(shard)
            if not self.here:
                self.whose = 0

    def until(self, shard: int, ready: Callable[[], bool]) -> None:
        with self.changed:
            while not ready():
                assert self.here - {shard}, "everybody else has left"
                self._pass(shard)
                assert self.changed.wait_for(lambda: self.whose == shard, MINUTE)

    def _pass(self, shard: int) -> None:
        later = sorted(self.here, key=lambda other: (other <= shard, other))
        self.whose = later[0] if later else 0
        self.changed.notify_all()

    def say(self, what: str, tensor: Tensor) -> None:
        digest = hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        self.seen.append(f"{what} {digest}")


@dataclass
class _Done:
    then: Callable[[], None]

    def wait(self) -> None:
        self.then()


class InTurn:
    """A group of shards, of one of them: see `process_group.ProcessGroup`."""

    def __init__(self, turns: Turns, shard: int, count: int) -> None:
        self.turns, self.shard, self.count, self.calls = turns, shard, count, 0
        turns.join(shard, count)

    def send(self, tensors: list[Tensor], shard: int, tag: int) -> _Done:
        self.turns.in_transit.setdefault((self.shard, shard, tag), []).append(tensors[0].clone())
        self.turns.say(f"{self.shard} to {shard}", tensors[0])
        return _Done(lambda: None)

    def recv(self, tensors: list[Tensor], shard: int, tag: int) -> _Done:
        key = (shard, self.shard, tag)

        def arrive() -> None:
            self.turns.until(self.shard, lambda: bool(self.turns.in_transit.get(key)))
            tensors[0].copy_(self.turns.in_transit[key].pop(0))

        return _Done(arrive)

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        return _Done(lambda: tensors[0].copy_(torch.stack(self._all("sum", tensors[0])).sum(0)))

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor]) -> _Done:
        def put() -> None:
            for into, value in zip(found[0], self._all("all", tensors[0]), strict=True):
                into.copy_(value)

        return _Done(put)

    def barrier(self) -> _Done:
        return _Done(lambda: self._all("end", torch.zeros(1)) and None)

    def _all(self, kind: str, tensor: Tensor) -> list[Tensor]:
        self.calls += 1
        said = self.turns.shared.setdefault((kind, self.calls), {})
        said[self.shard] = tensor.clone()
        self.turns.say(f"{self.shard} {kind}", tensor)
        self.turns.until(self.shard, lambda: len(said) == self.count)
        return [said[shard] for shard in range(self.count)]


@contextmanager
def in_turn() -> Iterator[Turns]:
    """Let shards of this process meet without a file and without gloo; yield what they say."""
    turns = Turns()

    @contextmanager
    def nowhere(*_: object) -> Iterator[None]:
        yield None

    def join(store: object, shard: int, shards: Shards, address: str) -> ProcessGroup:
        turns.shared.clear() if not turns.here else None
        return ProcessGroup(InTurn(turns, shard, len(shards)), shard, shards)  # type: ignore[arg-type]

    close = ProcessGroup.close

    def leave(process_group: ProcessGroup) -> None:
        turns.leave(process_group.shard)
        close(process_group)

    with (
        patch.object(Rendezvous, "store", nowhere),
        patch.object(ProcessGroup, "join", join),
        patch.object(ProcessGroup, "close", leave),
    ):
        yield turns
