"""What peers that nobody waits for say, without a network."""

from __future__ import annotations

import pytest
import torch
from share_machines import commit, shake
from share_schedules import SCENARIO

from flower_privdec.network.peer.asynchronous_session import AsynchronousMail, Words
from flower_privdec.network.peer.row_mass import TensorArithmetic
from flower_privdec.network.transport.channel import UnreachableError
from flower_privdec.pushsum.send_queue import GIVEN_UP
from flower_privdec.pushsum.share_protocol import Acknowledgement, FrozenShare
from flower_privdec.pushsum.shares import Shares
from flower_privdec.pushsum.wire_rows import layout_of


def two() -> tuple[AsynchronousMail, AsynchronousMail]:
    """Return the mails of two peers that have greeted each other, the first with a share for the second on disk."""
    found = []
    for peer in range(2):
        mass = {"x": torch.full((3,), 4.0), "w": torch.tensor(1.0)}
        machine = Shares(peer, [0, 1], SCENARIO, 5 + peer, mass, TensorArithmetic(torch.float32))
        shares = layout_of(mass, torch.float32)
        found.append(AsynchronousMail(machine, [1 - peer], shares, {}, [], retry=1e6, last=9))
    sender, receiver = found
    commit(sender.machine, receiver.machine)
    shake(sender.machine, receiver.machine)
    sender.machine.split(0, {1: 0.5})
    commit(sender.machine)
    for mail in found:
        mail._out[1 - mail.machine.peer].hello_at = 1e9
    return sender, receiver


def heard(mail: AsynchronousMail, words: Words) -> Words:
    """Return what a mail reads from the bytes of some words that the other says."""
    return mail.read(1 - mail.machine.peer, memoryview(bytearray(bytes(mail.written(1 - mail.machine.peer, words)))))


def test_an_answer_to_a_share_acknowledges_it_once_that_is_on_disk() -> None:
    sender, receiver = two()
    assert sender.has_news(1, 0.0)
    ((share,),) = sender.news(1, 0.0)
    assert isinstance(share, FrozenShare)
    said = heard(receiver, [share])
    answer = receiver.take(0, said)
    assert not receiver.is_answered(0, said)  # it is in memory alone
    receiver.machine.absorb()
    assert not receiver.is_answered(0, said)
    commit(receiver.machine)
    receiver.committed([])
    assert receiver.is_answered(0, said)
    assert not receiver.has_news(0, 0.0)  # no call says what the answer does
    (word,) = answer()
    assert isinstance(word, Acknowledgement)
    assert not receiver.has_news(0, 0.0)
    sender.answered(1, [share], heard(sender, [word]))
    assert sender.machine.is_ready(1)
    assert not sender.has_news(1, 0.0)


@pytest.mark.parametrize("lost", [True, False])
def test_an_answer_that_cannot_wait_leaves_the_word_to_a_call(lost: bool) -> None:
    sender, receiver = two()
    ((share,),) = sender.news(1, 0.0)
    assert receiver.take(0, heard(receiver, [share]))() == []  # too early
    receiver.machine.absorb()
    commit(receiver.machine)
    receiver.committed([])
    assert receiver.has_news(0, 0.0)
    ((word,),) = receiver.news(0, 0.0)
    if lost:  # the share comes again, is not added again, and is acknowledged again
        said = heard(receiver, [share])
        answer = receiver.take(0, said)
        assert receiver.is_answered(0, said)
        assert [type(each) for each in answer()] == [Acknowledgement]
        assert float(receiver.machine.mass["w"]) == 1.5
    sender.take(1, heard(sender, [word]))()
    assert sender.machine.is_ready(1)


def test_a_neighbour_that_cannot_be_reached_is_gone_until_it_is_called_again_or_started_again() -> None:
    sender, receiver = two()
    sender.take(1, [receiver.machine.hello(0)])
    for _ in range(GIVEN_UP):
        assert not sender.is_gone(1)
        sender.failed(1, UnreachableError("cut"), 0.0)
    sender.take(1, [receiver.machine.hello(0)])  # it reaches this peer and is not reached itself
    assert sender.is_gone(1)
    machine = receiver.machine
    started = Shares(1, [0, 1], SCENARIO, machine.life + 1, machine.mass, TensorArithmetic(torch.float32))
    started.restore(machine._durable)
    sender.take(1, [started.hello(0)])
    assert not sender.is_gone(1)
