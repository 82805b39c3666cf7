"""What takes too long is ended once, and what does not is left alone."""

from __future__ import annotations

import threading
import time

from flower_privdec.network.transport.grpc_transport import TimeLimit

LIMIT = 1000.0


def test_what_takes_too_long_is_ended_once_and_nothing_else() -> None:
    limit, calls = TimeLimit(LIMIT), list[str]()
    now = time.monotonic()
    try:
        with limit.ending(lambda: calls.append("slow")):
            with limit.ending(lambda: calls.append("quick")):
                limit.look(now + 0.9 * LIMIT)
                assert not calls
            for _ in range(2):
                limit.look(now + 2 * LIMIT)
        with limit.ending(lambda: calls.append("later")):
            pass
        limit.look(now + 9 * LIMIT)
    finally:
        limit.close()
    assert calls == ["slow"]
    assert not limit._under_way


def test_it_looks_at_the_clock_by_itself() -> None:
    limit, ended = TimeLimit(0.2), threading.Event()
    try:
        with limit.ending(ended.set):
            assert ended.wait(100)
    finally:
        limit.close()
