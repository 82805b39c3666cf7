"""Where the live page learns of peers: calls for their status over TLS, and a folder of `privdec up`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
from command_line import privdec
from networked import LONG, finish, running, wait_until
from ports import own_addresses
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.network.peer.lifetime import DONE, End, Lifetime
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.network.peer.status import STATUS_CAP, STATUS_REQUEST
from flower_privdec.network.transport.kinds.over_tls import TlsTransport
from flower_privdec.network.transport.tls import Credentials, files_of
from flower_privdec.network.transport.transport import Reply
from flower_privdec.scenario import load_scenario
from flower_privdec.watching import asker as asker_module
from flower_privdec.watching.asker import Asker, Target


def network(tmp_path: Path, tiny_text: str, *settings: str) -> Path:
    """Write a scenario of two peers with addresses, and certificates for them, as `privdec up` lays them out."""
    addresses = own_addresses(2)
    listed = ", ".join(f"{{address: {address!r}}}" for address in addresses)
    path = tmp_path / "network.yaml"
    text = tiny_text.replace("n_peers: 4", "n_peers: 2").replace("rounds: 6", "rounds: 3")
    path.write_text(f"{text}network: {{links: local, peers: [{listed}]}}\n")
    words = [word for setting in settings for word in ("--set", setting)]
    assert privdec("certs", path, "--out", tmp_path / "certs", *words) == 0
    return path


@contextmanager
def answering(path: Path, answer: Callable[[int, bytes], bytes | None]) -> Iterator[None]:
    """Let something with the certificate of each peer answer calls, or not, told the peer and what it is asked."""

    def take(peer: int, caller: int, asked: memoryview, reply: Reply) -> None:
        content = answer(peer, bytes(asked))
        if content is not None:
            reply([content])

    files = PeerFiles(load_scenario(path), 0, None, path.parent / "certs")
    directory = files.directory()
    over = Event()
    threads = []
    for peer, identity in enumerate(directory.identities):
        credentials = Credentials.read(*files_of(path.parent / "certs", peer), identity)
        transport = TlsTransport(peer, directory.addresses, directory.identities, credentials)
        transport.listen(partial(take, peer), STATUS_CAP, 4)

        def serve(transport: TlsTransport = transport) -> None:
            while not over.is_set():
                transport.turn(0.05)
            transport.close()

        threads.append(Thread(target=serve))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def states(asker: Asker) -> list[str]:
    return [peer["state"] for peer in asker.board.state()["peers"]]


def test_deployed_peers_are_asked_as_a_member(tiny_text: str, tmp_path: Path) -> None:
    """One is there and waits; the other one comes; both end."""
    path = network(tmp_path, tiny_text)
    scenario = load_scenario(path)
    peers = [
        running_peer(scenario, device_of(scenario, peer, tmp_path / f"peer-{peer}", tmp_path / "certs"))
        for peer in range(2)
    ]
    target = Target.of_scenario(path, (), tmp_path / "certs", 1)
    assert target.edges == ((0, 1), (1, 0))
    with Asker(target, 0.2) as asker:
        wait_until(lambda: bool(asker.board.state()["peers"][0]["why"]))
        assert states(asker) == ["unknown", "unknown"]
        with running(peers[:1]) as (first,):
            wait_until(lambda: states(asker) == ["waiting", "unknown"])
            row = asker.board.state()["peers"][0]
            assert row["awaited"] == [1]
            assert row["epsilon"] == 0
            finish(peers[1])
            first.result(LONG)
    assert asker.board.state()["edges"][0][:2] == [0, 1]
    assert any(event["kind"] == "up" for event in asker.board.state()["events"])


def test_who_joins_is_shown_while_the_page_is_open(tiny_text: str, tmp_path: Path) -> None:
    """The page has certificates of its own: it learns of the list, which lies beside the peer's, from the peer."""
    path = network(tmp_path, tiny_text)
    shutil.copytree(tmp_path / "certs", tmp_path / "page")
    scenario = load_scenario(path)
    peer = running_peer(scenario, device_of(scenario, 0, tmp_path / "peer-0", tmp_path / "certs"))
    with Asker(Target.of_scenario(path, (), tmp_path / "page", 1), 0.2) as asker, running([peer]):
        wait_until(lambda: states(asker) == ["waiting", "unknown"])
        operator = ("members", path, "--certs", tmp_path / "certs")
        (address,) = own_addresses(1)
        assert privdec(operator[0], operator[1], "add", "--address", address, *operator[2:]) == 0
        wait_until(lambda: len(states(asker)) == 3)
        assert any(event["text"] == "joins" for event in asker.board.state()["events"])

        assert privdec(operator[0], operator[1], "leave", "--id", 1, *operator[2:]) == 0
        wait_until(lambda: states(asker)[1] == "left")
        peer.stop()
    assert not (tmp_path / "page" / "members").exists(), "it changes nothing"


GARBAGE = [
    b"",
    b"\xff" * 1000,
    b"[" * 100_000,
    b"9" * 5000,
    b'{"peer": 0, "round": 1e999}',
    b'{"peer": 0, "round": 1, "rounds": 2, "known": {"'
    + b'": {}, "'.join(b"%d" % j for j in range(10_001))
    + b'": {}}}',
    b"{" + b" " * STATUS_CAP + b"}",
    None,
]


def test_garbage_of_one_peer_leaves_the_others_shown(
    tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peer 0 answers what is no status, what is too long, or not; peer 1 says it has entries, which nobody signed."""
    monkeypatch.setattr(asker_module, "ANSWER_SECONDS", 0.3)
    path = network(tmp_path, tiny_text)
    good = json.dumps({"peer": 1, "round": 1, "rounds": 3, "members": {"entries": 2**50}}).encode()
    asked = [0, 0]
    garbage: bytes | None = good

    def said(peer: int, call: bytes) -> bytes | None:
        asked[peer] += 1
        return good if peer == 1 and call == STATUS_REQUEST else garbage

    with answering(path, said), Asker(Target.of_scenario(path, (), tmp_path / "certs", 1), 0.2) as asker:
        for said_next in GARBAGE:
            garbage = said_next
            asked[:] = [0, 0]
            # The third call is made after the answer to the second has been looked at.
            wait_until(lambda: min(asked) >= 3)
            wait_until(lambda: states(asker) == ["unknown", "up"])
            assert asker.board.state()["peers"][0]["why"]
            json.dumps(asker.board.state(), allow_nan=False)


def test_a_folder_is_followed_through_restarts_and_its_end(
    tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(asker_module, "TURN_SECONDS", 0.02)
    network(tmp_path, tiny_text)
    folders = [tmp_path / "peers" / str(peer) for peer in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
    lifetime = Lifetime(folders[0])
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (folders[1] / "process.json").write_text(json.dumps({"starts": 1, "began": "", "process": dead.pid, "end": None}))

    def record(round_index: int, accuracy: float) -> str:
        spread = {"mean_model": accuracy, "peer_min": accuracy, "peer_max": accuracy}
        return json.dumps({"round": round_index, "accuracy": spread, "consensus_distance": 0.5}) + "\n"

    records = tmp_path / "metrics.jsonl"
    records.write_text(record(2, 0.5) + record(4, 0.6)[:20])
    with Asker(Target.of_folder(tmp_path), 0.2) as asker:
        wait_until(lambda: states(asker) == ["starting", "gone"])
        assert [point["round"] for point in asker.board.state()["quality"]] == [2]
        with records.open("a") as file:
            file.write(record(4, 0.6)[20:])
        wait_until(lambda: len(asker.board.state()["consensus"]) == 2)

        # A resume writes the addresses again, and the peers begin again; the records may be cut.
        records.write_text(record(2, 0.5))
        text = (tmp_path / "network.yaml").read_text()
        (tmp_path / "network.new").write_text(text)
        os.replace(tmp_path / "network.new", tmp_path / "network.yaml")
        wait_until(lambda: any(event["text"] == "the run was started again" for event in asker.board.state()["events"]))
        wait_until(lambda: len(asker.board.state()["consensus"]) == 1)
        lifetime.end(End(DONE, 0))
        wait_until(lambda: states(asker)[0] == "done")
        (tmp_path / "summary.json").write_text("{}")
        wait_until(lambda: asker.board.state()["finished"] == "the run is finished")


def test_targets_that_cannot_be_asked_are_refused(tiny_text: str, tmp_path: Path) -> None:
    path = network(tmp_path, tiny_text)
    with raises(ScenarioError, "peer.id", names="--as 2"):
        Target.of_scenario(path, (), tmp_path / "certs", 2)
    with raises(ScenarioError, "certificate.missing", names="none"):
        Target.of_scenario(path, (), tmp_path / "none", 0)


def test_watching_imports_no_torch() -> None:
    code = (
        "import sys, flower_privdec.watching.page_server, flower_privdec.watching.asker; print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"
