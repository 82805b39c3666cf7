"""What peers that nobody waits for say, without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from share_machines import commit, greeted_sessions

from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.peer.asynchronous_session import LOST, AsynchronousSession
from flower_privdec.peer.driving import NO_STREAM
from flower_privdec.peer.pace import Want
from flower_privdec.peer.session import Messages
from flower_privdec.pushsum.exactly_once import Acknowledgement, FrozenShare, PushSumProtocol
from flower_privdec.pushsum.frames import TensorArithmetic


def two() -> tuple[AsynchronousSession, AsynchronousSession]:
    """Return the mails of two peers that have greeted each other, the first with a share for the second on disk."""
    sender, receiver = greeted_sessions()
    sender.protocol.split(0, {1: 0.5})
    commit(sender.protocol)
    for mail in (sender, receiver):
        mail.neighbours[1 - mail.protocol.peer].queue.hello_at = 1e9
    return sender, receiver


def decoded(sender: AsynchronousSession, receiver: AsynchronousSession, messages: Messages) -> Messages:
    """Return messages as their receiver decodes them."""
    return receiver.read(sender.peer, memoryview(bytearray().join(sender.write(receiver.peer, messages)[1])))


def test_an_answer_acknowledges_a_share_once_on_disk() -> None:
    sender, receiver = two()
    assert sender.has_news(1, 0.0)
    ((share,),) = sender.calls(1, 0.0)
    assert isinstance(share, FrozenShare)
    said = decoded(sender, receiver, [share])
    answer = receiver.receive(0, said, 0.0)
    assert not receiver.is_answered(0, said)  # it is in memory alone
    receiver.protocol.absorb()
    assert not receiver.is_answered(0, said)
    commit(receiver.protocol)
    receiver.committed([])
    assert receiver.is_answered(0, said)
    assert not receiver.has_news(0, 0.0)  # no call says what the answer does
    (word,) = answer()
    assert isinstance(word, Acknowledgement)
    assert not receiver.has_news(0, 0.0)
    sender.answered(1, [share], decoded(receiver, sender, [word]), 0.0)
    assert sender.protocol.is_ready(1)
    assert not sender.has_news(1, 0.0)


def test_a_device_that_dials_out_has_time_to_dial() -> None:
    """Without its stream each call fails at once: four of them within a moment do not make it lost."""
    sender, _ = two()
    missing = UnreachableError("no stream", code=NO_STREAM)
    now = 0.0
    while now < sender.retry:
        now = max(now + 0.01, sender.failed(1, missing, now))
        assert not sender.is_lost(1)
    for _ in range(LOST):
        now += sender.retry
        sender.failed(1, missing, now)
    assert sender.is_lost(1)
    assert not sender.protocol.is_open(1)


@pytest.mark.parametrize("lost", [True, False])
def test_an_urgent_answer_leaves_acknowledgement_to_a_call(lost: bool) -> None:
    sender, receiver = two()
    ((share,),) = sender.calls(1, 0.0)
    assert receiver.receive(0, decoded(sender, receiver, [share]), 0.0)() == []  # too early
    receiver.protocol.absorb()
    commit(receiver.protocol)
    receiver.committed([])
    assert receiver.has_news(0, 0.0)
    ((word,),) = receiver.calls(0, 0.0)
    if lost:  # the share comes again, is not added again, and is acknowledged again
        said = decoded(sender, receiver, [share])
        answer = receiver.receive(0, said, 0.0)
        assert receiver.is_answered(0, said)
        assert [type(each) for each in answer()] == [Acknowledgement]
        assert float(receiver.protocol.mass["w"]) == 1.5
    sender.receive(1, decoded(receiver, sender, [word]), 0.0)()
    assert sender.protocol.is_ready(1)


def advanced(session: AsynchronousSession, round_index: int) -> None:
    """Put a later round on a peer's disk."""
    session.protocol.committed(session.protocol.snapshot(round_index))


def test_every_call_and_answer_reports_the_round() -> None:
    sender, receiver = two()
    sender.receive(1, [receiver.protocol.hello(0)], 0.0)
    receiver.receive(0, [sender.protocol.hello(1)], 0.0)
    advanced(sender, 4)
    advanced(receiver, 6)
    sent, _ = sender.write(1, [])
    answer = receiver.receive(0, decoded(sender, receiver, []), 0.0)()
    sender.answered(1, sent, decoded(receiver, sender, answer), 0.0)
    assert (receiver.neighbours[0].round_index, sender.neighbours[1].round_index) == (4, 6)
    assert (sender.neighbours[1].informed, sender.neighbours[1].reported_to) == (4, 4)
    assert (receiver.neighbours[0].informed, receiver.neighbours[0].reported_to) == (None, 6), "an answer may be lost"


def test_who_may_wait_hears_the_round_without_a_greeting() -> None:
    sender, receiver = two()
    sender.receive(1, [receiver.protocol.hello(0)], 0.0)
    receiver.receive(0, [sender.protocol.hello(1)], 0.0)
    sender.neighbours[1].queue.share = sender.protocol.shares_for(1)[0]  # it was brought
    advanced(sender, 4)
    assert not sender.has_news(1, 0.0)

    sender.committed([], waiting=[1])
    assert sender.has_news(1, 0.0)
    assert sender.calls(1, 0.0) == [[]]  # every call begins with a report
    receiver.receive(0, decoded(sender, receiver, []), 0.0)
    assert receiver.neighbours[0].round_index == 4
    assert not sender.has_news(1, 0.0)
    assert sender.calls(1, 0.0) == []


def test_a_report_from_an_ended_process_is_ignored() -> None:
    sender, receiver = two()
    advanced(sender, 7)
    late = decoded(sender, receiver, [])
    machine = sender.protocol
    started = PushSumProtocol(0, [0, 1], machine.boot + 1, machine.mass, TensorArithmetic())
    started.committed(started.snapshot(2))
    receiver.receive(0, [started.hello(1)], 0.0)
    receiver.receive(0, late, 0.0)
    assert receiver.neighbours[0].round_index == 2


def test_an_unreachable_neighbour_is_gone_until_called_again() -> None:
    sender, receiver = two()
    sender.receive(1, [receiver.protocol.hello(0)], 0.0)
    for _ in range(LOST):
        assert not sender.is_lost(1)
        sender.failed(1, UnreachableError("cut"), 0.0)
    sender.receive(1, [receiver.protocol.hello(0)], 0.0)  # it reaches this peer and is not reached itself
    assert sender.is_lost(1)
    machine = receiver.protocol
    started = PushSumProtocol(1, [0, 1], machine.boot + 1, machine.mass, TensorArithmetic())
    started.restore(machine._durable)
    sender.receive(1, [started.hello(0)], 0.0)
    assert not sender.is_lost(1)


def test_a_want_that_is_none_ends_nobody() -> None:
    sender, receiver = two()
    for want in range(4):  # as many as a hello can carry
        hello = replace(sender.protocol.hello(1), want=want)
        receiver.receive(0, decoded(sender, receiver, [hello]), 0.0)
        assert receiver.neighbours[0].want == want
        receiver.report(Want.WAITS, 0)


def test_an_idle_edge_is_greeted_ever_more_rarely() -> None:
    sender, receiver = greeted_sessions()
    sender.retry = 1.0
    sender.rest = 5.0

    def pauses(count: int) -> list[float]:
        """Greet some times, and return how long it was until the next greeting."""
        found = []
        for _ in range(count):
            now = sender.neighbours[1].queue.hello_at
            ((hello,),) = sender.calls(1, now)
            answer = receiver.receive(0, decoded(sender, receiver, [hello]), now)()
            sender.answered(1, [hello], decoded(receiver, sender, answer), now)
            found.append(sender.neighbours[1].queue.hello_at - now)
        return found

    assert pauses(5) == [1.0, 2.0, 4.0, 5.0, 5.0]
    sender.want = Want.WAITS
    assert pauses(2) == [1.0, 1.0]
    sender.want = Want.UNKNOWN
    assert pauses(1) == [2.0]
    sender.protocol.close(1)
    assert pauses(1) == [1.0]
