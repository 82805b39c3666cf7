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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from chromium import dom_of, needs_chromium
from command_line import privdec
from networked import LONG, wait_until
from ports import own_addresses
from raising import raises

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.network.local.peer_processes import PRIVDEC
from flower_privdec.pushsum.membership import MemberEntry, Members
from flower_privdec.watching.asker import Asker, Target
from flower_privdec.watching.board import Board
from flower_privdec.watching.page_server import PAGES, listening, server_of

MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
STATIC = Path(sys.modules[Board.__module__].__file__ or "").parent / "static"


@contextmanager
def served(board: Board) -> Iterator[str]:
    """Serve a board's page in a thread; yield its address."""
    (address,) = own_addresses(1)
    sock = listening(int(address.rpartition(":")[2]))
    server = server_of(board)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://{address}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def asked(
    address: str, host: str | None = None, method: str = "GET", headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, str], bytes]:
    """Return status code, headers and content of an answer."""
    call = urllib.request.Request(address, method=method, headers=dict(headers))
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


def test_pages_of_other_sites_are_told_nothing() -> None:
    with served(lying_board()) as address:
        for site, code in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
            for path in ("/state.json", "/watch.js", "/none"):
                headers = {"Sec-Fetch-Site": site, "Origin": "http://127.0.0.1:9"}
                found, answer, content = asked(address + path, headers=headers)
                assert found == (404 if path == "/none" and code == 200 else code)
                assert not [name for name in answer if name.lower().startswith("access-control-")]
                assert code == 200 or b"round" not in content
        assert asked(address, headers={"Sec-Fetch-Site": "cross-site"})[0] == 200, "a link to the page may be followed"
        code, headers, _ = asked(f"{address}/state.json", method="OPTIONS", headers={"Origin": "http://127.0.0.1:9"})
        assert code == 405
        assert "access-control-allow-origin" not in {name.lower() for name in headers}


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


ATTACK = """<!doctype html><title>attack</title><pre id=found></pre><script>
const found = document.getElementById("found");
const say = (how, what) => { found.textContent += `${how}: ${what}\n`; };
const target = "%s";
fetch(`${target}/state.json`).then((one) => one.text()).then((text) => say("read", text), () => say("read", "refused"));
fetch(`${target}/state.json`, {mode: "no-cors"}).then((one) => say("opaque", one.type), () => say("opaque", "refused"));
fetch(`${target}/state.json`, {method: "POST", mode: "no-cors", body: "{}"})
  .then((one) => say("post", one.type), () => say("post", "refused"));
for (const name of ["script", "img", "iframe"]) {
  const part = document.createElement(name);
  part.onload = () => {
    let inside = "";
    try { inside = part.contentDocument ? part.contentDocument.body.textContent : ""; } catch { inside = ""; }
    say(name, `loaded ${inside}`);
  };
  part.onerror = () => say(name, "refused");
  part.src = name === "iframe" ? target : `${target}/state.json`;
  document.body.append(part);
}
</script>"""


@needs_chromium
@pytest.mark.slow
def test_a_browser_reads_nothing_for_another_site(tmp_path: Path) -> None:
    """A page from another port attacks the page of peers, and one whose name leads to loopback."""
    with served(lying_board()) as address:
        attack = (ATTACK % address).encode()

        class Attacker(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(attack)

            def log_message(self, *arguments: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Attacker) as attacker:
            thread = Thread(target=attacker.serve_forever)
            thread.start()
            try:
                dom = dom_of(f"http://localhost:{attacker.server_port}/", tmp_path / "a")
            finally:
                attacker.shutdown()
                thread.join()
        found = re.findall(r"<pre.*?>(.*?)</pre>", dom, re.S)[0]
        for how in ("read", "opaque", "post", "script", "img"):
            assert f"{how}: refused" in found
        assert "onerror" not in found, "what a peer says is nowhere"
        assert "peers" not in found

        # By a name that leads to loopback, as after DNS rebinding, even the page itself is not shown.
        port = address.rpartition(":")[2]
        rule = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        dom = dom_of(f"http://evil.example:{port}/", tmp_path / "b", rule)
        assert "this is for programs on this device" in dom
        assert "watch.js" not in dom


@needs_chromium
@pytest.mark.slow
def test_a_browser_shows_deployed_peers_and_a_joiner(tmp_path: Path) -> None:
    """A hundred peers, of which some have no figure yet; then another one joins, while the page is open."""
    pairs = [(i, (i + hop) % 100) for i in range(100) for hop in (1, 2, 4, 8)]
    board = Board("many", 100, "here", pairs, is_deployed=True)
    for peer in range(100):
        figures = {"accuracy": 0.5 + peer / 1000} if peer < 80 else {}
        neighbours = sorted({j for pair in pairs if peer in pair for j in pair} - {peer})
        said = {"peer": peer, "round": 5, "rounds": 9, "neighbours": neighbours, "figures": figures}
        board.answered(peer, said)
    with served(board) as address:
        dom = dom_of(address, tmp_path / "a")
        assert len(re.findall(r'<g class="node up"[^>]*data-peer', dom)) == 100
        assert "Accuracy on public data: 54.0 % (50.0 % to 57.9 %, of 80 of 100 peers)" in dom
        assert "Spread of accuracy between peers: 7.9 %, of 80 of 100 peers" in dom
        assert "consensus distance is not known" in dom

        first = Members.first("many", [f"peer-{peer}" for peer in range(100)])
        change = {"kind": "add", "peer": 100, "identity": "peer-100", "address": "10.0.0.100:7100"}
        joined = first.after(MemberEntry(1, "", change))
        board.listed(joined.after(MemberEntry(2, "", {"kind": "leave", "peer": 3})))
        board.silent(3, "it is off")
        dom = dom_of(address, tmp_path / "b")
        assert len(re.findall(r'<g class="node unknown"[^>]*data-peer="100"', dom)) == 1
        assert len(re.findall(r'<g class="node left"[^>]*data-peer="3"', dom)) == 1


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
            wait_until(lambda: edges(asker) == dict.fromkeys(("0-1", "0-2", "0-3", "1-2", "1-3", "2-3"), "up"))
            dom = dom_of(address, tmp_path / "a")
            assert len(re.findall(r'<g class="edge up" data-edge', dom)) == 6
            assert re.search(r"4 peers: ", dom)

            os.kill(json.loads((out / "peers" / "2" / "process.json").read_text())["process"], signal.SIGKILL)
            wait_until(lambda: states(asker)[2] == "gone")
            wait_until(lambda: [edges(asker)[edge] for edge in ("0-1", "0-3", "1-3")] == ["up"] * 3)
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
            wait_until(lambda: {*states(asker)} == {"gone"})
            assert "the run was stopped" in seen(asker)["finished"]
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()


def seen(asker: Asker) -> dict[str, Any]:
    return asker.board.state()


def states(asker: Asker) -> list[str]:
    return [peer["state"] for peer in seen(asker)["peers"]]


def edges(asker: Asker) -> dict[str, str]:
    return {f"{i}-{j}": state for i, j, state in seen(asker)["edges"]}
