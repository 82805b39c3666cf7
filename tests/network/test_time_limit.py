"""A call that takes too long to arrive is ended once, and so is the slowest of too many; any other is left alone."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from raising import raises

from flower_privdec.network.transport import grpc_transport
from flower_privdec.network.transport.grpc_transport import Admission, RefusedError

LIMIT, CALLER = 1000.0, "ipv4:127.0.0.1:4242"


def test_only_what_takes_too_long_is_ended_once() -> None:
    admission, ended = Admission(1, 16, patience=LIMIT), list[str]()
    admission.close()  # looked at by this test alone
    now = time.monotonic()
    with (
        admission.call(CALLER, 1, lambda: ended.append("slow")),
        admission.call(CALLER, 1, lambda: ended.append("arrived")) as call,
    ):
        call.has_arrived = True
        with admission.call(CALLER, 1, lambda: ended.append("quick")):
            admission.look(now + 0.9 * LIMIT)
            assert not ended
        for _ in range(2):
            admission.look(now + 2 * LIMIT)
    with admission.call(CALLER, 1, lambda: ended.append("later")):
        pass
    admission.look(now + 9 * LIMIT)
    assert ended == ["slow"]
    assert not admission._calls


def test_of_too_many_calls_the_slowest_is_ended() -> None:
    """So a member's streams that trickle keep out no call of it that comes at once, or goes on coming."""
    admission, ended = Admission(1, 16, patience=LIMIT), list[str]()
    admission.close()
    with ExitStack() as under_way:

        def begin(name: str, member: int = 1) -> grpc_transport._Call:
            return under_way.enter_context(admission.call(CALLER, member, lambda: ended.append(name)))

        begin("of another member", member=2)
        trickling = [begin(f"trickling {number}") for number in range(3)]
        arriving = begin("arriving")
        arriving.began -= LIMIT / 2  # it is older, and large
        next(arriving.counted([bytes(1 << 20)] * 3))
        for age, call in enumerate(trickling, 1):
            call.size, call.began = age, call.began - 5 * age**2  # the last began first and has come most slowly
        begin("next")
        assert ended == ["trickling 2"]
        begin("next but one")
        assert ended == ["trickling 2", "trickling 1"]
        for call in admission._calls:
            call.has_arrived = True
        with raises(RefusedError, "call.too-many", names="peer 1"):
            begin("refused")
    assert len(ended) == 2
    assert not admission._calls


def test_it_looks_at_the_clock_by_itself() -> None:
    admission, ended = Admission(1, 16, patience=0.2), threading.Event()
    try:
        with admission.call(CALLER, 1, ended.set):
            assert ended.wait(100)
    finally:
        admission.close()
