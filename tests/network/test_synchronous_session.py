"""What peers that wait for each other say: each message once, and a last word that arrives."""

from __future__ import annotations

import sys
import time
from random import Random

import pytest
import torch
from witnesses import witness_of

pytest.importorskip("grpc")

from flower_privdec.core import Mix
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.peer.session import Messages
from flower_privdec.peer.synchronous import GONE, Machine, SynchronousSession
from flower_privdec.pushsum import frames, lockstep
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec, Progress, RowMessage, formats_of
from flower_privdec.pushsum.lockstep import Lockstep, Timetable
from tools import fuzz_peer

ROWS = {"x": torch.arange(3.0)}


class OneExchange:
    """An algorithm of one exchange a round."""

    program = (Mix(("x",)),)
    final_exchange = program[0]

    def robustly(self, mix: Mix) -> Mix:
        """See Algorithm: nobody judges."""
        return mix


class TwoSessions:
    """Two peers that send to each other at every place but a silent one; their calls are carried by hand."""

    def __init__(self, places: int, silent_place: int = -1) -> None:
        """Begin with both at the first place."""
        self.places, self.silent_place, self.carried = places, silent_place, 0
        self.sessions = []
        mixing = Mixing(build_topology("complete", 2), "column-stochastic")
        timetable = Timetable(OneExchange(), mixing, places)  # type: ignore[arg-type]  # the machine has its own graph
        for peer in (0, 1):
            machine: Machine = Lockstep(
                peer,
                lambda place, other=1 - peer: set() if place == silent_place else {other},
                places,  # type: ignore[misc]
            )
            frames = FrameCodec(b"run", exchanges={0: formats_of(ROWS)})
            self.sessions.append(
                SynchronousSession(machine, witness_of(peer, [1 - peer]), frames, timetable, retry=1e6)
            )
            self.arrive(peer, 0)

    def arrive(self, peer: int, place: int) -> None:
        outgoing, awaited = ({1 - peer: RowMessage(peer, 1 - peer, place, 0, ROWS)}, {1 - peer})
        if place in (self.places, self.silent_place):
            outgoing, awaited = {}, set()
        self.sessions[peer].machine.arrive(place, outgoing, awaited)

    def say(self, peer: int, lose_answer: bool = False, seconds: float = 0.0) -> bool:
        """Let one make its calls of some seconds later; return whether there was one."""
        mine, other = self.sessions[peer], self.sessions[1 - peer]
        if not mine.has_news(1 - peer, time.monotonic() + seconds):
            return False
        for messages in mine.calls(1 - peer, time.monotonic()):
            self.carried += len(messages) - 1
            answer = other.receive(peer, carried(mine, other, messages), time.monotonic())()
            if lose_answer:
                mine.failed(1 - peer, UnreachableError("lost"), time.monotonic())
            else:
                mine.answered(1 - peer, messages, carried(other, mine, answer), time.monotonic())
        return True

    def to_the_end(self) -> None:
        """Go through all places, up to the last word."""
        for place in range(1, self.places + 1):
            while any([self.say(0), self.say(1)]):
                pass
            for peer in (0, 1):
                assert not self.sessions[peer].machine.missing()
                self.arrive(peer, place)


def carried(sender: SynchronousSession, receiver: SynchronousSession, messages: Messages) -> Messages:
    """Return messages as their receiver decodes them."""
    return receiver.read(sender.peer, memoryview(bytearray().join(sender.write(receiver.peer, messages)[1])))


def test_without_faults_each_message_is_sent_once() -> None:
    both = TwoSessions(places=5)
    both.to_the_end()
    while any([both.say(0), both.say(1)]):
        pass
    assert both.carried == 2 * 5
    assert all(session.is_over() for session in both.sessions)


def test_a_neighbour_without_the_last_answer_is_awaited() -> None:
    both = TwoSessions(places=2)
    both.to_the_end()
    first, second = both.sessions
    assert both.say(0, lose_answer=True)
    assert not first.is_over()
    assert not second.is_over(), "the other does not know that this one is at the end: its answer was lost"
    assert both.say(1)
    assert second.is_over()
    assert not first.is_over() or first.neighbours[1].informed == 2
    assert both.say(0)
    assert first.is_over()


def test_an_informed_neighbour_is_asked_until_it_ends() -> None:
    """The neighbour's own calls could all be lost: it would leave, and this one would wait for a whole deadline."""
    both = TwoSessions(places=2, silent_place=1)
    first = both.sessions[0]
    while any([both.say(0), both.say(1)]):
        pass
    both.arrive(0, 1)
    both.arrive(1, 1)
    while any([both.say(0), both.say(1)]):
        pass
    both.arrive(0, 2)
    assert both.say(0)
    assert first.neighbours[1].informed == 2
    both.arrive(1, 2)
    assert not first.is_over()
    assert not both.say(0), "it asked a moment ago"
    assert both.say(0, seconds=2e6), "more than the seconds until a retry later"
    assert first.is_over()
    assert not both.say(0, seconds=4e6), "both are at the end, and it knows that"


def test_a_peer_that_ended_and_left_is_not_awaited() -> None:
    both = TwoSessions(places=2)
    both.to_the_end()
    assert both.say(0)
    assert both.sessions[0].is_over()
    for _ in range(GONE):
        assert not both.sessions[1].is_over()
        both.sessions[1].failed(0, UnreachableError("gone"), 0.0)
    assert both.sessions[1].is_over()
    one = TwoSessions(places=2)
    for _ in range(2 * GONE):
        one.sessions[1].failed(0, UnreachableError("gone"), 0.0)
    assert not one.sessions[1].is_over(), "who is not at the end is"


@pytest.mark.parametrize(("code", "ends"), [("call.failed", False), ("lockstep.exchange", True)])
def test_a_neighbour_with_trouble_of_its_own_is_awaited(code: str, ends: bool) -> None:
    session = TwoSessions(places=2).sessions[1]
    session.failed(0, RefusedError("No space left on device", code=code), 0.0)
    assert (session.fatal is not None) == ends


def test_an_answer_to_rows_waits_until_they_were_used() -> None:
    both = TwoSessions(2)
    mine, other = both.sessions
    (words,) = mine.calls(1, time.monotonic())
    said = carried(mine, other, words)
    answer = other.receive(0, said, time.monotonic())
    assert not other.is_answered(0, said)
    both.arrive(1, 1)  # peer 1 has used them, and has that on disk
    assert other.is_answered(0, said)
    mine.answered(1, words, carried(other, mine, answer()), time.monotonic())
    assert not mine.machine.behind(0)
    assert mine.is_answered(1, carried(other, mine, [Progress(1, 0, 2)]))


def test_early_rows_are_answered_once_used() -> None:
    both = TwoSessions(3)
    mine, other = both.sessions
    assert both.say(0)  # what peer 1 awaits at its first place
    assert both.say(1)
    both.arrive(0, 1)
    (words,) = mine.calls(1, time.monotonic())
    said = carried(mine, other, words)
    assert said[2].round_index == other.machine.place + 1  # type: ignore[union-attr]
    answer = other.receive(0, said, time.monotonic())
    assert not other.is_answered(0, said)
    both.arrive(1, 1)
    assert not other.is_answered(0, said)
    assert other._due(0, time.monotonic())
    other.neighbours[0].again[1] = 1e9  # its own rows of this place are on their way
    assert not other.has_news(0, time.monotonic())
    both.arrive(1, 2)
    other.neighbours[0].again[2] = 1e9
    assert other.is_answered(0, said)
    assert not other.has_news(0, time.monotonic()), "the answer that is held says it"
    mine.answered(1, words, carried(other, mine, answer()), time.monotonic())
    assert not mine.machine.behind(1)
    assert not other.has_news(0, time.monotonic())


def test_no_message_moves_others_rows_or_ends_runs_anonymously(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz_peer.fuzz(Random(1), 300) > 50
    monkeypatch.setattr(sys, "argv", ["fuzz_peer", "--minutes", "0.001"])
    fuzz_peer.main()
    assert " taken, all others refused in one line" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", ["numbers are not checked", "places are not checked", "the last message counts"])
def test_a_mistake_in_accepting_messages_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "numbers are not checked":
        monkeypatch.setattr(frames, "_has_finite_sum", lambda part: True)
    elif mistake == "places are not checked":
        monkeypatch.setattr(lockstep.Lockstep, "_check", lambda *arguments: None)
    else:
        monkeypatch.setattr(
            lockstep.Lockstep,
            "take",
            lambda self, sender, place, item: self._heard.setdefault(place, {}).update({2: item}),
        )
    with pytest.raises(AssertionError):
        fuzz_peer.fuzz(Random(1), 1_000)


def test_rows_that_are_not_used_come_ever_more_rarely() -> None:
    two = TwoSessions(places=3)
    session = two.sessions[0]
    session.retry = 1.0
    session.rest = 3.0
    rows = next(message for call in session.calls(1, 0.0) for message in call if isinstance(message, RowMessage))
    pauses = []
    for now in (10.0, 20.0, 30.0):
        session.answered(1, [rows], [], now)
        pauses.append(session.neighbours[1].again[0] - now)
    assert pauses == [1.0, 2.0, 3.0]

    session._learn(1, [Progress(1, 0, 2)])  # it came to another place
    session.answered(1, [rows], [], 40.0)
    assert session.neighbours[1].again[0] == 41.0
