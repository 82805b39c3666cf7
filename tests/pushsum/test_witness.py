"""Neighbours remember the longest ledger: an old copy stops its peer, and two processes of one identity are refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import BudgetError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.witness import MANY, RUNS_TWICE, LedgerReport, LedgerWitness


class Lines:
    """A ledger of nothing but the boots that wrote its lines."""

    def __init__(self, written: Sequence[int] = ()) -> None:
        self.written = list(written)

    @property
    def lines(self) -> dict[int, int]:
        return dict(Counter(self.written))

    def check_witnessed(self, witnessed: Mapping[int, int]) -> None:
        if self.lacks(witnessed):
            raise BudgetError("an old copy", code="ledger.witnessed")

    def lacks(self, witnessed: Mapping[int, int]) -> int:
        return sum((Counter(dict(witnessed)) - Counter(self.written)).values())


class Process:
    """A process of a peer that continues a ledger, or a copy of it, and exchanges reports with others."""

    def __init__(self, peer: int, others: list[int], written: Sequence[int] = (), seen: Any = None) -> None:
        self.ledger, boot = Lines(written), random.randrange(1, 2**64)
        self.remembered: dict[int, dict[int, int]] = {}
        self.witness = LedgerWitness(peer, others, boot, self.ledger, seen, self.remember)  # type: ignore[arg-type]

    def remember(self, neighbor: int, boot: int, lines: int) -> None:
        self.remembered.setdefault(neighbor, {})[boot] = lines

    def pay(self, steps: int = 1) -> None:
        self.ledger.written += [self.witness.boot] * steps


def carry(report: LedgerReport) -> LedgerReport:
    """Return a report as its frame is decoded."""
    codec = FrameCodec(b"run")
    decoded = codec.decode(bytearray().join(codec.encode(report)))
    assert decoded == report
    return report


def call(caller: Process, answerer: Process) -> None:
    """Let one call another, which answers."""
    answerer.witness.receive(carry(caller.witness.report(answerer.witness.peer)))
    caller.witness.receive(carry(answerer.witness.report(caller.witness.peer)))


def test_only_a_ledger_that_lacks_lines_is_refused() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    assert not peer.witness.is_witnessed
    call(peer, other)
    assert peer.witness.is_witnessed
    for _ in range(4):
        peer.pay()
        call(peer, other)
    assert peer.witness.problem is None
    restored = Process(0, [1], peer.ledger.written[:3])
    call(restored, other)
    assert isinstance(restored.witness.problem, BudgetError)
    assert restored.witness.problem.code == "ledger.witnessed"
    assert restored.ledger.lacks(restored.witness.reported) == 1
    assert Process(0, []).witness.is_witnessed  # nobody could have seen anything


def test_a_line_is_confirmed_if_enough_neighbours_counted_it() -> None:
    lost = Process(0, [1, 2, 3])
    others = [Process(peer, [0]) for peer in (1, 2, 3)]
    for other, lines in zip(others, (5, 3, 0), strict=True):
        other.witness.receive(LedgerReport(0, other.witness.peer, 7, 1, 0, ((7, lines),), ()))
        call(lost, other)
    assert lost.witness.reported == {7: 5}
    assert lost.witness.confirmed(2) == {7: 3}
    assert lost.witness.confirmed(3) == {}
    assert lost.witness.beyond({7: 3}) == [1]


def test_a_peer_is_witnessed_once_a_neighbour_answers() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    peer.witness.receive(other.witness.report(0))  # its own call, before it has heard of this process
    assert not peer.witness.is_witnessed
    call(peer, other)
    assert peer.witness.is_witnessed


def test_counted_lines_survive_the_neighbours_restart() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    peer.pay(4)
    call(peer, other)
    assert other.remembered == {0: {peer.witness.boot: 4}}
    again, lost = Process(1, [0], (), other.remembered), Process(0, [1])
    call(lost, again)
    assert lost.witness.problem is not None
    forgetful, lost = Process(1, [0]), Process(0, [1])
    call(lost, forgetful)
    assert lost.witness.problem is None  # a neighbour that lost its folder too cannot help


def test_lines_after_the_last_report_are_counted_later() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    call(peer, other)
    peer.pay(3)  # and is killed before it reports them
    call(Process(0, [1], peer.ledger.written), other)
    lost = Process(0, [1])
    call(lost, other)
    assert lost.ledger.lacks(lost.witness.reported) == 3


def test_lines_one_neighbour_counted_become_known_once_charged() -> None:
    """The neighbour that was nearest loses its folder, and then the peer does."""
    peer, near, far = Process(0, [1, 2]), Process(1, [0]), Process(2, [0])
    peer.pay()
    call(peer, far)
    peer.pay(9)
    call(peer, near)
    lost = Process(0, [1, 2])
    for other in (near, far):
        call(lost, other)
    missing = lost.ledger.lacks(lost.witness.reported)
    charged = Process(0, [1, 2], [peer.witness.boot] * missing)  # a charge counts as the lines that it stands for
    charged.pay()
    call(charged, far)
    lost_again = Process(0, [1, 2])
    for other in (Process(1, [0]), far):
        call(lost_again, other)
    assert (missing, lost_again.ledger.lacks(lost_again.witness.reported)) == (10, 11)


def test_a_report_leaves_out_what_the_receiver_has_counted() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    peer.pay(2)
    call(peer, other)
    assert peer.witness.report(1).own == ()
    peer.pay()
    assert peer.witness.report(1).own == ((peer.witness.boot, 3),)
    peer.witness.receive(Process(1, [0]).witness.report(0))  # the neighbour lost its folder
    assert peer.witness.report(1).own == ((peer.witness.boot, 3),)


def test_a_copys_lines_count_though_its_report_is_refused() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    peer.pay(2)
    for _ in range(2):
        call(peer, other)
    copy = Process(0, [1], peer.ledger.written)
    for process in (copy, copy, peer):
        call(process, other)
    for process in (peer, copy):
        process.pay()
        with raises(RefusedError, RUNS_TWICE, names="peer 0"):
            call(process, other)
    original = Process(0, [1], peer.ledger.written)
    original.witness.receive(other.witness.report(0))
    assert original.ledger.lacks(original.witness.reported) == 1


def test_a_copy_that_stepped_stops_the_original_too() -> None:
    peer, other = Process(0, [1]), Process(1, [0])
    peer.pay(2)
    call(peer, other)
    copy = Process(0, [1], peer.ledger.written)
    for process in (copy, peer):
        process.pay(3)
        call(process, other)
    call(copy, other)
    for process in (copy, peer):
        assert process.witness.problem is not None
        assert process.ledger.lacks(process.witness.reported) == 3


def test_a_peer_cannot_fill_its_neighbours_memory_with_boots() -> None:
    other = Process(1, [0])
    for boot in range(1, MANY + 1):
        other.witness.receive(LedgerReport(0, 1, boot, 8, 0, ((boot, 1),), ()))
    with raises(RefusedError, "witness.boots", names="4096"):
        other.witness.receive(LedgerReport(0, 1, MANY + 1, 8, 0, ((MANY + 1, 1),), ()))
    carry(other.witness.report(0))


def test_two_processes_of_one_identity_are_both_refused() -> None:
    one, two, other = Process(0, [1]), Process(0, [1]), Process(1, [0])
    call(one, other)
    call(one, other)
    call(two, other)
    call(two, other)  # its second call answers the challenge: it is alive
    call(one, other)  # which it may have sent before the other was started
    for process in (one, two, one):
        with raises(RefusedError, RUNS_TWICE, names="peer 0"):
            call(process, other)
    third = Process(0, [1])
    for _ in range(3):
        call(third, other)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(0, 2**32))
def test_one_process_after_another_is_never_taken_for_two(steps: list[tuple[int, bool]], seed: int) -> None:
    """Reports are late, repeated or lost, and of processes that are dead by then; each started after the one before."""
    draw = random.Random(seed)
    other, process, under_way = Process(1, [0]), Process(0, [1]), []
    for kind, is_lost in steps:
        if kind == 0:
            process = Process(0, [1], process.ledger.written)
        elif kind == 1:
            under_way.append(process.witness.report(1))
        elif kind == 2 and under_way:
            report = draw.choice(under_way)  # and it may come again
            other.witness.receive(report)
            if not is_lost and report.boot == process.witness.boot:
                process.witness.receive(other.witness.report(0))
        else:
            process.pay()
    assert process.witness.problem is None


@pytest.mark.parametrize("seen", [(), ((1, 2), (2**64 - 1, 2**64 - 1))])
def test_a_report_decodes_to_itself(seen: tuple[tuple[int, int], ...]) -> None:
    carry(LedgerReport(0, 1, 7, 8, 9, seen[:1], seen))


@pytest.mark.parametrize("boots", [((2, 1), (1, 1)), ((1, 1), (1, 2))])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_report_has_one_order_of_boots(boots: tuple[tuple[int, int], ...], is_own: bool) -> None:
    parts = (boots, ()) if is_own else ((), boots)
    with raises(RefusedError, "frame.boots"):
        carry(LedgerReport(0, 1, 7, 8, 9, *parts))


def test_a_stranger_is_refused() -> None:
    with raises(RefusedError, "witness.neighbor"):
        Process(0, [1]).witness.receive(LedgerReport(2, 0, 7, 8, 0, (), ()))
