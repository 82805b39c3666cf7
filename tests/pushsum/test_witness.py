"""Neighbours remember the longest ledger: an old copy stops its peer, and two processes of one identity are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from flower_privdec.errors import BudgetError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.witness import EMPTY, TWICE, Head, LedgerReport, LedgerWitness


def digest(lines: list[str]) -> str:
    """Return a hash of a chain of lines."""
    return "".join(f"{ord(line[0]):02x}" for line in lines[-1:]).ljust(64, "0")


class Process:
    """A process of peer 0 with a ledger, and reports that it exchanges with others."""

    def __init__(self, peer: int, others: list[int], lines: list[str], seen: dict[int, Head] | None = None) -> None:
        self.lines = lines
        self.witness = LedgerWitness(peer, others, random.randrange(1, 2**64), self.head, self.check, seen)

    def head(self) -> Head:
        return (len(self.lines), digest(self.lines)) if self.lines else EMPTY

    def check(self, head: Head) -> None:
        if head[0] > len(self.lines) or digest(self.lines[: head[0]]) != head[1]:
            raise BudgetError("an old copy", code="ledger.witnessed")


def carry(report: LedgerReport) -> LedgerReport:
    """Return a report as its frame is decoded."""
    codec = FrameCodec(b"run")
    decoded = codec.decode(bytearray(bytes(codec.encode(report))))
    assert decoded == report
    return report


def call(caller: Process, answerer: Process) -> None:
    """Let one call another, which answers."""
    answerer.witness.receive(carry(caller.witness.report(answerer.witness.peer)))
    caller.witness.receive(carry(answerer.witness.report(caller.witness.peer)))


def test_a_longer_ledger_is_no_problem_and_a_shorter_one_is() -> None:
    peer, other = Process(0, [1], list("ab")), Process(1, [0], [])
    assert not peer.witness.is_witnessed
    for line in "cde":
        call(peer, other)
        assert peer.witness.is_witnessed
        peer.lines.append(line)
    assert peer.witness.problem is None
    assert other.witness.seen[0][0] == 4
    restored = Process(0, [1], list("abc"))
    call(restored, other)
    assert isinstance(restored.witness.problem, BudgetError)
    assert restored.witness.problem.code == "ledger.witnessed"
    assert restored.witness.longest[0] == 4
    assert Process(0, [], []).witness.is_witnessed  # nobody could have seen anything


def test_what_was_seen_survives_the_neighbours_restart() -> None:
    peer, other = Process(0, [1], list("abcd")), Process(1, [0], [])
    call(peer, other)
    call(peer, other)
    again = Process(1, [0], [], other.witness.seen)
    lost = Process(0, [1], [])
    call(lost, again)
    assert lost.witness.problem is not None
    forgetful = Process(1, [0], [])
    lost = Process(0, [1], [])
    call(lost, forgetful)
    assert lost.witness.problem is None  # a neighbour that lost its checkpoint too cannot help


def test_another_ledger_of_the_same_length_is_refused() -> None:
    peer, other = Process(0, [1], list("abc")), Process(1, [0], [])
    call(peer, other)
    call(peer, other)
    with pytest.raises(RefusedError, match="not the one which peer 1 has seen"):
        call(Process(0, [1], list("abx")), other)
    longer = Process(0, [1], list("abxy"))
    call(longer, other)
    assert longer.witness.problem is not None


def test_two_processes_of_one_identity_are_refused_both_until_both_are_stopped() -> None:
    one, two, other = Process(0, [1], ["a"]), Process(0, [1], ["a"]), Process(1, [0], [])
    call(one, other)
    call(one, other)
    call(two, other)
    call(two, other)  # its second call answers the challenge: it is alive
    call(one, other)  # which it may have sent before the other was started
    for process in (one, two, one):
        with pytest.raises(RefusedError, match=f"^{TWICE} 0, "):
            call(process, other)
    third = Process(0, [1], ["a"])
    for _ in range(3):
        call(third, other)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(0, 2**32))
def test_one_process_after_another_is_never_taken_for_two(steps: list[tuple[int, bool]], seed: int) -> None:
    """Reports are late, repeated or lost, and of processes that are dead by then; each started after the one before."""
    draw = random.Random(seed)
    other, lines = Process(1, [0], []), ["a"]
    process, under_way = Process(0, [1], lines), []
    for kind, is_lost in steps:
        if kind == 0:
            process = Process(0, [1], lines)
        elif kind == 1:
            under_way.append(process.witness.report(1))
        elif kind == 2 and under_way:
            report = draw.choice(under_way)  # and it may come again
            other.witness.receive(report)
            if not is_lost and report.boot == process.witness.boot:
                process.witness.receive(other.witness.report(0))
        else:
            lines.append("b")
    assert process.witness.problem is None


@pytest.mark.parametrize("field", ["own", "seen"])
def test_a_report_decodes_to_itself(field: str) -> None:
    values: dict[str, Any] = {"own": EMPTY, "seen": EMPTY, field: (2**64 - 1, "ab" * 32)}
    carry(LedgerReport(0, 1, 7, 8, 9, **values))


def test_a_stranger_is_refused() -> None:
    with raises(RefusedError, ""):
        Process(0, [1], []).witness.receive(LedgerReport(2, 0, 7, 8, 0, EMPTY, EMPTY))
