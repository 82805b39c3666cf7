"""A peer's loop: who is answered while it works, and what a neighbour or a transport cannot do to it."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from networked import LONG, devices, driver_of, wait_until
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.network.peer.driver import REMEMBERED, Driver
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.status import STATUS_REQUEST
from flower_privdec.network.transport.in_threads import InThreads, call_and_wait, evented
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.transport import MemoryNetwork, UnreachableError
from flower_privdec.peer.driving import Work
from flower_privdec.pushsum.exactly_once import RefusedError


@contextmanager
def opened(tiny: Tiny, folder: Path) -> Iterator[tuple[Driver, StreamConnection]]:
    """Open a peer of four, whose neighbours are not there, and connect to it as peer 3."""
    theirs = devices(tiny("rounds=2"), folder)
    driver = driver_of(running_peer(tiny("rounds=2"), theirs[0]))
    port = driver.open()
    link = StreamConnection(f"127.0.0.1:{port}", "peer-0.tiny", theirs[3].credentials, 1 << 20)  # type: ignore[arg-type]
    try:
        yield driver, link
    finally:
        link.close()
        driver.close()


@pytest.mark.parametrize("took_before", [[], [0.001], [10.0]], ids=["first", "brief so far", "long so far"])
def test_neighbours_are_answered_during_work_that_lasts(took_before: list[float], tiny: Tiny, tmp_path: Path) -> None:
    over = threading.Event()
    answers = list[dict[str, Any]]()
    with opened(tiny, tmp_path) as (driver, link):
        driver._end_beside()

        def ask() -> None:
            answers.append(json.loads(bytes(link.call([STATUS_REQUEST], LONG))))
            over.set()

        asking = threading.Thread(target=ask)
        asking.start()
        work = Work("train", lambda: over.wait(LONG))
        driver._took["train"] = deque(took_before)
        with driver._stand_in:
            driver._perform(work)
        asking.join()
    assert work.result is True
    assert answers[0]["peer"] == 0


def test_brief_work_takes_no_thread(tiny: Tiny, tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "peer-loop"]

    with opened(tiny, tmp_path) as (driver, _):
        driver._end_beside()
        first = Work("train", threads)
        driver._perform(first)
        later = [Work("train", threads) for _ in range(2 * REMEMBERED)]
        for work in later:
            driver._took["train"].append(0.001)  # whatever else the machine does
            driver._perform(work)
    assert first.result == ["peer-loop"]
    assert all(work.result == [] for work in later)


def test_a_message_brings_news_for_its_sender_first(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = list[int]()

    def has_news(neighbor: int, now: float) -> bool:
        looked_at.append(neighbor)
        return False

    with opened(tiny, tmp_path) as (driver, _):
        driver._end_beside()
        monkeypatch.setattr(driver.peer.conversation, "has_news", has_news)
        for line in driver._lines.values():
            line.is_calling = False
            line.calls = []
            line.again = 0.0
        now = 1e9
        driver._speak(now)
        everybody = sorted(looked_at)
        driver._heard = {everybody[0]}
        soon = driver._speak(now)
        assert [*everybody, everybody[0]] == sorted(looked_at[: len(everybody)]) + looked_at[len(everybody) :]
        assert everybody == sorted(driver.peer.neighbours)

        # What the message brought for others is found a moment later, although nothing comes.
        assert soon < now + driver.peer.times.retry / 2
        looked_at.clear()
        driver._speak(soon)
        assert sorted(looked_at) == everybody


def test_who_calls_is_called_at_once(tiny: Tiny, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as (driver, link):
        driver._end_beside()
        driver._lines[3].again = math.inf

        def ask() -> None:
            with raises(RefusedError, "frame.length"):
                link.call([b"?"], LONG)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: driver.speak_and_listen(0.0) or driver._lines[3].again == 0.0)
        wait_until(lambda: driver.speak_and_listen(0.0) or not asking.is_alive())


def test_an_unforeseen_error_refuses_the_call_only(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("nobody thought of this")

    with opened(tiny, tmp_path) as (driver, link):
        monkeypatch.setattr(driver.peer.conversation, "receive", broken)
        monkeypatch.setattr(driver.peer.conversation, "read", lambda *_: [])
        with raises(RefusedError, "call.failed", names="nobody thought of this"):
            link.call([b"?"], LONG)
        assert json.loads(bytes(link.call([STATUS_REQUEST], LONG)))["peer"] == 0
    assert "could not be taken in" in caplog.text


def test_a_transport_that_fails_answers_no_call() -> None:
    network = MemoryNetwork()
    one = evented(network.transport(0))
    other = evented(network.transport(1))
    assert isinstance(one, InThreads)
    connection = other.connect(0, 100)

    def broken(*_: Any) -> Any:
        raise KeyError("its author did not think of this")

    connection.connection.call = broken  # type: ignore[attr-defined]
    with raises(UnreachableError, "call.failed", names="its author"):
        call_and_wait(other.turn, connection, [b"?"], LONG)
    connection.close()


def test_calls_that_nobody_answers_fail_at_the_end() -> None:
    """A blocking transport closes once nothing is answered, which must not wait for a peer that has ended."""
    network = MemoryNetwork()
    one = evented(network.transport(0))
    other = evented(network.transport(1))
    one.listen(lambda caller, content, reply: None, 100, 1)
    connection = other.connect(0, 100)
    answers: list[Any] = []
    connection.post([b"?"], LONG, answers.append)
    wait_until(lambda: bool(one._unanswered))  # type: ignore[attr-defined]
    one.close()
    wait_until(lambda: other.turn(0.01) or bool(answers))  # type: ignore[func-returns-value]
    assert isinstance(answers[0], UnreachableError)
    connection.close()
