"""A call that takes too long to arrive is ended once, and any other is left alone."""

from __future__ import annotations

import threading
import time

from flower_privdec.network.transport.grpc_transport import Admission

LIMIT, CALLER = 1000.0, "ipv4:127.0.0.1:4242"


def test_what_takes_too_long_is_ended_once_and_nothing_else() -> None:
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


def test_it_looks_at_the_clock_by_itself() -> None:
    admission, ended = Admission(1, 16, patience=0.2), threading.Event()
    try:
        with admission.call(CALLER, 1, ended.set):
            assert ended.wait(100)
    finally:
        admission.close()
