"""Push-sum state machines without I/O: carry a handshake, commit."""

from __future__ import annotations

from typing import Any

import torch
from witnesses import witness_of

from flower_privdec.peer.asynchronous_session import ShareSession
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.frames import FrameCodec, TensorArithmetic, formats_of


def shake(one: PushSumProtocol[Any], other: PushSumProtocol[Any]) -> None:
    """Carry a handshake to its end, without faults."""
    word, listener, speaker = one.hello(other.peer), other, one
    for _ in range(9):
        if (reply := listener.receive_hello(word)) is None:
            return
        word, listener, speaker = reply, speaker, listener
    raise AssertionError("the handshake does not end")


def commit(*machines: PushSumProtocol[Any]) -> None:
    for each in machines:
        each.committed(each.snapshot(1))


def greeted_sessions() -> tuple[ShareSession, ShareSession]:
    """Return the sessions of two peers that have greeted each other."""
    sides = []
    for peer in range(2):
        mass = {"x": torch.full((3,), 4.0), "w": torch.tensor(1.0)}
        arithmetic, frames = TensorArithmetic(), FrameCodec(b"run", formats_of(mass))
        machine = PushSumProtocol(peer, [0, 1], 5 + peer, mass, arithmetic)
        witness = witness_of(peer, [1 - peer])
        sides.append(ShareSession(machine, witness, frames, [], 1e6, rounds=9, n_peers=2))
    sender, receiver = sides
    commit(sender.protocol, receiver.protocol)
    shake(sender.protocol, receiver.protocol)
    return sender, receiver
