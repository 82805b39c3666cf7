"""The live page: nothing from elsewhere, nothing that a peer says becomes markup, real peers and a real fault."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import uvicorn
from chromium import dom_of, needs_chromium
from command_line import privdec
from networked import LONG, wait_until
from ports import own_addresses
from raising import raises

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.network.local.peer_processes import PRIVDEC
from flower_privdec.watching.asker import Asker, Target
from flower_privdec.watching.board import Board
from flower_privdec.watching.page_server import PAGES, application, listening

MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
STATIC = Path(sys.modules[Board.__module__].__file__ or "").parent / "static"


@contextmanager
def served(board: Board) -> Iterator[str]:
    """Serve a board's page in a thread; yield its address."""
    (address,) = own_addresses(1)
    sock = listening(int(address.rpartition(":")[2]))
    server = uvicorn.Server(uvicorn.Config(application(board), log_level="warning", lifespan="off"))
    thread = Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://{address}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def asked(address: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Return status code, headers and content of an answer."""
    call = urllib.request.Request(address, method=method)
    if host is not None:
        call.add_header("Host", host)
    try:
        with urllib.request.urlopen(call, timeout=LONG) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def lying_board() -> Board:
    """Return what is known of two peers, one of which says markup wherever it may say text."""
    board = Board(MARKUP, 2, MARKUP, [(0, 1)])
    lie: dict[str, Any] = {"peer": 0, "round": 5, "rounds": 9, "neighbours": [1], "down": {"1": MARKUP}, "idle": MARKUP}
    lie |= {"waits_for": MARKUP, "figures": {MARKUP: 0.5}, "noise": MARKUP, "quarantined": {MARKUP: MARKUP}}
    lie |= {"adversaries": {MARKUP: 1.0, "b": 2.0}, "epsilon": 1.0, "budget": 2.0, "known": {MARKUP: {"awaited": True}}}
    board.answered(0, lie)
    board.silent(1, MARKUP)
    return board


def test_the_page_is_this_packages_files_and_one_json() -> None:
    board = lying_board()
    with served(board) as address:
        for path in PAGES:
            code, headers, _ = asked(address + path)
            assert code == 200
            assert headers["x-content-type-options"] == "nosniff"
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
        code, headers, content = asked(f"{address}/state.json")
        assert headers["content-type"] == "application/json"
        assert b"<" not in content
        assert json.loads(content)["name"] == MARKUP
        for method in ("POST", "PUT", "DELETE"):
            assert asked(f"{address}/state.json", method=method)[0] == 405, "nothing can be changed"
        for path in ("/../board.py", "/static/watch.js", "/docs", "/%2e%2e/board.py"):
            assert asked(address + path)[0] == 404
        for host in ("evil.example", "127.0.0.1.evil.example:80", "10.0.0.7"):
            assert asked(address, host)[0] == 403
        assert asked(address, "localhost:8700")[0] == 200


def test_the_files_load_nothing_and_make_no_markup() -> None:
    for name in ("watch.html", "watch.css", "watch.js"):
        text = (STATIC / name).read_text()
        links = {found for found in re.findall(r"https?://[^\"'\s)]+", text) if found != "http://www.w3.org/2000/svg"}
        assert not links, "nothing comes from elsewhere"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|import\(|@import", text
        )
        assert not re.search(r"\son\w+=|\sstyle=", text), "the policy allows no code and no style in the page"


def test_a_taken_port_names_who_has_it() -> None:
    with served(Board("a run", 2, "here")) as address:
        port = int(address.rpartition(":")[2])
        with raises(RunError, "watch.port", names=f"{port}.*another privdec watch shows 'a run'.*another port"):
            listening(port)
    (address,) = own_addresses(1)
    taken = listening(int(address.rpartition(":")[2]))
    taken.listen(0)
    with taken, raises(RunError, "watch.port", names="another process"):
        listening(taken.getsockname()[1])


def test_what_cannot_be_watched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises(ScenarioError, "watch.no-network", names="network.yaml"):
        Target.of_folder(tmp_path)
    assert privdec("watch", tmp_path) == 2
    assert privdec("watch", tmp_path / "none") == 2
    assert privdec("watch", "digits") == 2
    assert "network.peers is missing" in capsys.readouterr().err


@needs_chromium
@pytest.mark.slow
def test_a_lying_peers_text_is_no_markup(tmp_path: Path) -> None:
    with served(lying_board()) as address:
        dom = dom_of(address, tmp_path)
    assert "<img" not in dom
    assert "broken'</script>" not in dom
    assert "&lt;img" in dom
    assert "&lt;script&gt;" in re.findall(r"<title>(.*?)</title>", dom)[0], "no lie ran: the title is the run's name"


@needs_chromium
@pytest.mark.slow
def test_a_killed_peer_is_shown_with_its_edges(tmp_path: Path) -> None:
    """Real peers of `privdec up`, one of which is killed; then the run is stopped, and the page says so."""
    out = tmp_path / "up"
    settings = ("n_peers=4", "rounds=100000", "evaluation.every=5", "network.links=local")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [*PRIVDEC, "up", "digits", "--out", out, *words]
    with (tmp_path / "up.log").open("wb") as log:
        run = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
    try:
        wait_until(lambda: (out / "network.yaml").exists())
        with Asker(Target.of_folder(out), 0.2) as asker, served(asker.board) as address:
            wait_until(lambda: seen(asker)["quality"] and {*states(asker)} <= {"up", "waiting"})
            dom = dom_of(address, tmp_path / "a")
            assert len(re.findall(r'<g class="edge up" data-edge', dom)) == 6
            assert re.search(r"4 peers: ", dom)

            os.kill(json.loads((out / "peers" / "2" / "process.json").read_text())["process"], signal.SIGKILL)
            wait_until(lambda: states(asker)[2] == "gone")
            dom = dom_of(address, tmp_path / "b")
            assert len(re.findall(r'<g class="node gone"[^>]*data-peer="2"', dom)) == 1
            down = {*re.findall(r'<g class="edge down" data-edge="(\d-\d)"', dom)}
            assert down == {"0-2", "1-2", "2-3"}
            assert "ended: killed" in dom
            assert "3 of 6 edges down" in dom
            assert re.search(r'<polyline class="curve" points="[\d.,]+', dom)

            run.send_signal(signal.SIGINT)
            run.wait(LONG)
            wait_until(lambda: seen(asker)["finished"])
            assert {*states(asker)} == {"gone"}
            assert "the run was stopped" in seen(asker)["finished"]
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()


def seen(asker: Asker) -> dict[str, Any]:
    return asker.board.state()


def states(asker: Asker) -> list[str]:
    return [peer["state"] for peer in seen(asker)["peers"]]
