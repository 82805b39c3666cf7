"""Let a member say what it likes to a peer that waits for it: `python -m tools.fuzz_peer --minutes 10`.

Each case is a member that makes some calls, with hostile values in any field or damaged bytes, to a synchronous peer
that waits for it and for an honest one. Each call has to be refused in one line, or taken; the rows and the progress of
the honest one stay what it sent; and a lie about how far the member is, or what it saw of a ledger, alone ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.core import Mix
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.peer.synchronous import Machine, SynchronousSession
from flower_privdec.pushsum.frames import FrameCodec, Progress, RowMessage, formats_of
from flower_privdec.pushsum.lockstep import Lockstep, Timetable
from flower_privdec.pushsum.witness import LedgerReport, LedgerWitness
from tools.fuzz import ROWS, check_one_line, damaged, examples, run_for_minutes

LIAR = 0
PEER = 1
HONEST = 2
ROUNDS = 6
INTEGERS = [0, 1, 2, 7, 2**31, 2**32, 2**63, 2**64 - 1]
NUMBERS = [0.0, -1.0, float("nan"), float("inf"), 1e25, 3e38]
ENDS = {"lockstep.place", "lockstep.stale"}  # what a member can end a synchronous run by, with its number


class OneExchange:
    """An algorithm of one exchange a round."""

    program = (Mix(("x", "w")),)
    final_exchange = program[0]

    def robustly(self, mix: Mix) -> Mix:
        """See Algorithm: nobody judges."""
        return mix


@cache
def timetable_of_all() -> Timetable:
    """Return the places of the run."""
    mixing = Mixing(build_topology("complete", 3), "column-stochastic")
    return Timetable(OneExchange(), mixing, ROUNDS, 2)  # type: ignore[arg-type]  # it has what the session needs of one


class Waiting:
    """A synchronous peer at a place of its run, to which an honest neighbour has sent its rows."""

    def __init__(self, place: int) -> None:
        timetable = timetable_of_all()
        self.rows = {name: ROWS[name] for name in ("x", "w")}
        formats = formats_of(self.rows)
        self.frames = FrameCodec(b"run", exchanges={0: formats, timetable.final_at: formats})
        machine: Machine = Lockstep(PEER, lambda _: {LIAR, HONEST}, timetable.places)
        witness = LedgerWitness(PEER, [LIAR, HONEST], 5)
        self.session = SynchronousSession(machine, witness, self.frames, timetable, 1e6)
        for at in range(max(0, place - 1), place + 1):
            machine.arrive(at, {j: self.message(PEER, j, at) for j in (LIAR, HONEST)}, {LIAR, HONEST})
            machine.learn(LIAR, at)
            machine.learn(HONEST, at)
        self.place = place
        self.machine = machine
        machine.take(HONEST, place, self.rows)

    def message(self, sender: int, receiver: int, place: int) -> RowMessage:
        """Return the rows that one peer sends to another at a place."""
        return RowMessage(sender, receiver, place, 0 if place < ROUNDS else 1, self.rows)

    def call(self, draw: Random) -> bytes:
        """Return a call of the member that lies."""
        messages: list[Any] = [LedgerReport(LIAR, PEER, 7, 1, 0, (), ())]
        for _ in range(draw.choice([1, 1, 2, 3])):
            near = max(0, self.place + draw.randint(-2, 2))
            right = [Progress(LIAR, PEER, near + 1), self.message(LIAR, PEER, near), *examples()]
            messages.append(hostile(draw.choice(right[: draw.choice([2, len(right)])]), draw))
        if draw.random() < 0.2:
            messages[0] = hostile(messages[0], draw)
        frames = [b"".join(self.frames.encode(message)) for message in messages]
        return b"".join(damaged(frame, draw) if draw.random() < 0.2 else frame for frame in frames)

    def survives(self, content: bytes) -> bool:
        """Return whether a call was taken, which may be refused in one line, and nothing else may happen.

        Raises:
            AssertionError: it changed something of another, or ended the run for another reason.
        """
        session = self.session
        machine = self.machine
        try:
            messages = session.read(LIAR, memoryview(bytearray(content)))
            session.receive(LIAR, messages, 0.0)()
            is_taken = True
        except RunError as error:
            is_taken = False
            check_one_line(error)

        if session.fatal is not None and (session.fatal.code not in ENDS or f"peer {LIAR}" not in str(session.fatal)):
            raise AssertionError(f"ended by {session.fatal}")

        received = machine.received()
        if not received.keys() <= {LIAR, HONEST} or received[HONEST] is not self.rows:
            raise AssertionError(f"the rows of {sorted(received)} are there, and those of {HONEST} are other ones")
        if not is_right(received.get(LIAR, self.rows), self.rows):
            raise AssertionError("rows that no algorithm adds were taken")
        if not set(machine._heard) <= set(range(self.place, timetable_of_all().places)):
            raise AssertionError(f"rows of places {sorted(machine._heard)} were taken")
        if machine.place != self.place or machine.before(self.place, [HONEST]):
            raise AssertionError("another's place moved")

        return is_taken


def hostile(message: Any, draw: Random) -> Any:
    """Return a message with a hostile value or two in it, each one that a frame can carry."""
    for _ in range(draw.choice([0, 1, 1, 2])):
        name = draw.choice(
            [name for name in vars(message) if name not in ("own", "seen", "want", "level", "heartbeats", "records")]
        )
        if name == "values":
            part = draw.choice(sorted(message.values))
            values = {**message.values, part: torch.full_like(message.values[part], draw.choice(NUMBERS))}
            message = replace(message, values=values)
        elif isinstance(getattr(message, name), bytes):
            message = replace(message, **{name: draw.randbytes(draw.choice([0, 1, len(getattr(message, name)), 100]))})
        elif name == "opened":
            message = replace(message, opened=not message.opened)
        else:
            most = 2**32 - 1 if name in ("sender", "receiver", "at", "entries") else 2**64 - 1
            value = draw.choice([*INTEGERS, max(0, getattr(message, name) + draw.choice([-1, 1, 2]))])
            message = replace(message, **{name: min(value, most)})

    return message


def is_right(rows: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> bool:
    """Return whether rows have the names, shapes and types of others, and are finite, with a weight of at least 0."""
    same = [rows[name].shape == row.shape and rows[name].dtype == row.dtype for name, row in like.items()]
    return rows.keys() == like.keys() and all(same) and all(bool(row.isfinite().all()) for row in rows.values())


def fuzz(draw: Random, cases: int) -> int:
    """Let a member make some calls to peers that wait for it, each a few, and return how many were taken."""
    taken = 0
    for _ in range(cases):
        peer = Waiting(draw.randrange(ROUNDS + 2))
        for _ in range(draw.randint(1, 6)):
            taken += peer.survives(peer.call(draw))
            if peer.session.fatal is not None or peer.session.witness.problem is not None:
                break
    return taken


def main() -> None:
    """Try cases for some minutes."""
    run_for_minutes("let a member say what it likes to a synchronous peer", fuzz, 100, "peers")


if __name__ == "__main__":
    main()
