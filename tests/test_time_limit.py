"""What takes too long is ended once, and what does not is left alone."""

from __future__ import annotations

import threading

from flower_privdec.runtime.network.time_limit import TimeLimit


def test_what_takes_too_long_is_ended_once_and_nothing_else() -> None:
    limit, ended, quick = TimeLimit(0.2), threading.Event(), threading.Event()
    calls: list[str] = []

    def end() -> None:
        calls.append("slow")
        ended.set()

    try:
        with limit.ending(end):
            for _ in range(20):
                with limit.ending(quick.set):
                    pass
            assert ended.wait(30)
        with limit.ending(ended.clear):
            pass
        assert not quick.wait(0.5)
    finally:
        limit.close()
    assert calls == ["slow"]
    assert ended.is_set()
    assert not limit._under_way
