"""What peers that wait for each other say: each message once, and a last word that arrives."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("grpc")

from flower_privdec.network.peer.synchronous_session import GONE, SynchronousMail
from flower_privdec.network.transport.channel import UnreachableError
from flower_privdec.pushsum.letters import CARRYING, PLACE
from flower_privdec.pushsum.lockstep import Lockstep
from flower_privdec.pushsum.parts import Parts

RUN = bytes(range(32))


class TwoMails:
    """Two peers that send to each other at every place, and what is said between them, carried by hand."""

    def __init__(self, places: int) -> None:
        """Begin with both at the first place."""
        self.places, self.carried = places, 0
        self.mails = []
        for peer in (0, 1):
            machine = Lockstep[Any, Any](peer, lambda place, other=1 - peer: {other}, places)
            self.mails.append(SynchronousMail(machine, RUN, lambda sender, place, content: {}, [1 - peer], retry=1e6))
            self.arrive(peer, 0)

    def arrive(self, peer: int, place: int) -> None:
        outgoing, awaited = ({1 - peer: Parts((bytes(8),))}, {1 - peer}) if place < self.places else ({}, ())
        self.mails[peer].machine.arrive(place, outgoing, awaited)

    def say(self, peer: int, lose_answer: bool = False) -> bool:
        """Let one say what it has to say; return whether there was something."""
        mine, other = self.mails[peer], self.mails[1 - peer]
        if not mine.has_news(1 - peer, time.monotonic()):
            return False
        for words in mine.news(1 - peer, time.monotonic()):
            self.carried += words[0] == CARRYING
            call = memoryview(bytes(mine.written(1 - peer, words)))
            answer = memoryview(bytes(other.written(peer, other.take(peer, other.read(peer, call))())))
            if lose_answer:
                mine.failed(1 - peer, UnreachableError("lost"), time.monotonic())
            else:
                mine.answered(1 - peer, words, mine.read(1 - peer, answer))
        return True

    def to_the_end(self) -> None:
        """Go through all places, up to the last word."""
        for place in range(1, self.places + 1):
            while any([self.say(0), self.say(1)]):
                pass
            for peer in (0, 1):
                assert not self.mails[peer].machine.missing()
                self.arrive(peer, place)


def test_without_faults_each_message_is_sent_once() -> None:
    both = TwoMails(places=5)
    both.to_the_end()
    while any([both.say(0), both.say(1)]):
        pass
    assert both.carried == 2 * 5
    assert all(mail.over() for mail in both.mails)


def test_who_did_not_hear_an_answer_at_the_end_is_waited_for() -> None:
    both = TwoMails(places=2)
    both.to_the_end()
    first, second = both.mails
    assert both.say(0, lose_answer=True)
    assert not first.over()
    assert not second.over(), "the other does not know that this one is at the end: its answer was lost"
    assert both.say(1)
    assert second.over()
    assert not first.over() or first._said[1] == 2
    assert both.say(0)
    assert first.over()


def test_who_is_at_the_end_and_has_left_is_not_waited_for() -> None:
    both = TwoMails(places=2)
    both.to_the_end()
    assert both.say(0)
    assert both.mails[0].over()
    for _ in range(GONE):
        assert not both.mails[1].over()
        both.mails[1].failed(0, UnreachableError("gone"), 0.0)
    assert both.mails[1].over()
    one = TwoMails(places=2)
    for _ in range(2 * GONE):
        one.mails[1].failed(0, UnreachableError("gone"), 0.0)
    assert not one.mails[1].over(), "who is not at the end is"


def test_an_answer_to_rows_waits_until_they_were_used() -> None:
    mails = TwoMails(2)
    mine, other = mails.mails
    (words,) = mine.news(1, time.monotonic())
    said = other.read(0, memoryview(bytes(mine.written(1, words))))
    answer = other.take(0, said)
    assert not other.is_answered(0, said)
    mails.arrive(1, 1)  # peer 1 has used them, and has that on disk
    assert other.is_answered(0, said)
    mine.answered(1, words, mine.read(1, memoryview(bytes(other.written(0, answer())))))
    assert not mine.machine.behind(0)
    again = mine.read(1, memoryview(bytes(other.written(0, (PLACE, 1, 1, Parts(()))))))
    assert mine.is_answered(1, again)


def test_rows_that_come_early_are_answered_once_they_were_used_and_the_answer_is_all_that_is_said() -> None:
    mails = TwoMails(3)
    mine, other = mails.mails
    assert mails.say(0)  # what peer 1 awaits at its first place
    assert mails.say(1)
    mails.arrive(0, 1)
    (words,) = mine.news(1, time.monotonic())
    said = other.read(0, memoryview(bytes(mine.written(1, words))))
    assert said.place == other.machine.place + 1
    answer = other.take(0, said)
    assert not other.is_answered(0, said)
    mails.arrive(1, 1)
    assert not other.is_answered(0, said)
    assert other._due(0, time.monotonic())
    other._again[0, 1] = 1e9  # its own rows of this place are on their way
    assert not other.has_news(0, time.monotonic())
    mails.arrive(1, 2)
    other._again[0, 2] = 1e9
    assert other.is_answered(0, said)
    assert not other.has_news(0, time.monotonic()), "the answer that is held says it"
    mine.answered(1, words, mine.read(1, memoryview(bytes(other.written(0, answer())))))
    assert not mine.machine.behind(1)
    assert not other.has_news(0, time.monotonic())
