"""Push-sum state machines without I/O: carry a handshake, commit."""

from __future__ import annotations

from typing import Any

from flower_privdec.pushsum.exactly_once import PushSumProtocol


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
