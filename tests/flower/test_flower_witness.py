"""A Flower peer whose folder was restored, lost or copied takes no further step: its neighbours counted its ledger.

The observer of releases is the app, which runs once for each: the charge is before it, the noise after it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from ports import own_addresses
from routing_peers import client, zeros

from flower_privdec.common.errors import RunError
from flower_privdec.flower import Gossip, LocalGrid, Mesh, PushSum
from flower_privdec.flower.mods.peer_messages import INBOX, LEDGER, PeerReport, pack_bytes, unpack_bytes
from flower_privdec.flower.mods.request_handler import UNWITNESSED
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.peer.app_state import Layout, load_state, run_frames, save_state, state_path
from flower_privdec.peer.app_updates import spent_so_far
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.frames import FrameHeader
from flower_privdec.pushsum.witness import LedgerReport
from flower_privdec.scenario.loading import parse_app_scenario
from tools.battery.together_grid import TogetherGrid

RELAYS = [PushSum, Gossip]
Forge = Callable[[int, str, bytes], bytes | None]  # receiver, name, frame -> what is delivered in its place


class ForgingGrid(LocalGrid):
    """Delivers other reports of ledgers than were sent, or none, and keeps why peers failed or did not train."""

    forge: Forge = staticmethod(lambda receiver, name, frame: frame)
    why = ""

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        said = reply.error.reason if reply.has_error() else PeerReport.of(reply.content, "no report", "").stopped
        self.why += said + "\n" if self.contexts[message.metadata.dst_node_id].node_config["partition-id"] == 1 else ""
        return reply

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            if INBOX in message.content.array_records:
                to = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
                inbox = unpack_bytes(message.content[INBOX])
                changed = [(name, self.forge(to, name, f) if name.startswith(LEDGER) else f) for name, f in inbox]
                message.content[INBOX] = pack_bytes({name: frame for name, frame in changed if frame is not None})
        return super().push_messages(sent)


def dies() -> None:
    """End the ServerApp before it has relayed what peers answered."""
    raise KeyboardInterrupt


class Peers:
    """Three peers in a folder, and how many releases each has made."""

    def __init__(self, folder: Path, strategy: type[PushSum] | type[Gossip], **options: Any) -> None:
        self.folder, self.strategy, self.count = folder, strategy, Counter[int]()
        self.before: dict[tuple[int, int], Callable[[], object]] = {}
        options = {"clip_norm": 1.0, "noise_multiplier": 9.0, "seal": True, **options}
        self.app = client(self.step, **options)

    def step(self, arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
        self.before.pop((peer, server_round), lambda: None)()
        self.count[peer] += 1
        return [arrays[0] + 0.01]

    def run(self, rounds: int, *, charge: bool = False, forge: Forge | None = None) -> str:
        """Run to a round, as a new ServerApp, and return why peer 1 failed or did not train."""
        grid = ForgingGrid(self.app, 3, folder=self.folder, config={1: {"charge-missing": charge}})
        grid.forge = forge or grid.forge
        graph = "ring" if self.strategy is Gossip else "directed-exponential"
        strategy = self.strategy(graph, name="law", fraction_evaluate=0.0)
        strategy.start(grid, zeros(), rounds)
        return grid.why

    @property
    def one(self) -> Path:
        return self.folder / "peer-1"

    def copy(self, name: str) -> Path:
        """Copy peer 1's folder, and return the copy."""
        return Path(shutil.copytree(self.one, self.folder / name))

    def put(self, folder: Path | None, keep: str = "identity.*") -> None:
        """Put a folder in the place of peer 1's, or nothing but what it keeps."""
        kept = {path.name: path.read_bytes() for path in self.one.glob(keep)} if folder is None else {}
        shutil.rmtree(self.one)
        if folder is not None:
            shutil.copytree(folder, self.one)
        else:
            self.one.mkdir()
        for name, content in kept.items():
            (self.one / name).write_bytes(content)

    def payments(self) -> int:
        """Return how many releases peer 1's ledger pays for."""
        entries = read_chain(self.one / "peer-updates.jsonl")[1]
        return sum(entry.to_step - entry.from_step for entry in entries)


@pytest.mark.parametrize("strategy", RELAYS)
@pytest.mark.parametrize("fault", ["restored", "lost", "ledger deleted"])
def test_a_restored_or_empty_folder_takes_no_step(fault, strategy, tmp_path):
    peers = Peers(tmp_path, strategy)
    peers.run(2)
    backup = peers.copy("backup")
    peers.run(4)
    assert (peers.count[1], peers.payments()) == (4, 4)
    if fault == "ledger deleted":
        (peers.one / "peer-updates.jsonl").unlink()
    else:
        peers.put(backup if fault == "restored" else None)
    why = peers.run(6)
    assert peers.count[1] == 4
    assert peers.count[0] == 6  # the others go on
    missing = {"restored": 2, "lost": 4, "ledger deleted": 4}[fault]
    assert f"lacks {missing} lines that a neighbour" in why
    assert "charge-missing=true in its node-config" in why
    peers.run(10, charge=True)
    assert peers.payments() == peers.count[1] > 4
    peers.run(12, charge=True)
    assert peers.payments() == peers.count[1]


def test_lost_lines_of_solved_noise_cost_the_budget(tmp_path):
    """Two rounds have less noise than twenty: both lines were as dear as the whole budget."""
    peers = Peers(tmp_path, PushSum, noise_multiplier=None, epsilon=8.0)
    peers.run(2)
    peers.put(None)
    peers.run(20, charge=True)
    assert peers.count == {0: 2, 1: 2, 2: 2}
    assert 8 <= spent_so_far(peers.one, 1e-5).epsilon < 8.1


@pytest.mark.parametrize("strategy", RELAYS)
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_of_restored_folders_releases_unpaid(seed, strategy, tmp_path):
    draw, peers, rounds, names = Random(seed), Peers(tmp_path, strategy), 0, count()

    def run(*, charge: bool) -> None:
        nonlocal rounds
        rounds += draw.randint(1, 2)
        peers.run(rounds, charge=charge)

    run(charge=False)
    saved = [peers.copy("first")]
    for _ in range(8):
        event, at = draw.choice(["run", "run", "save", "restore", "swap", "lose", "delete"]), draw.randrange(len(saved))
        if event == "run":
            run(charge=draw.random() < 0.3)
        if event in ("save", "swap"):
            saved.append(peers.copy(f"copy-{next(names)}"))
        if event in ("restore", "swap"):
            peers.put(saved[at])
        if event == "lose":
            peers.put(None)
        if event == "delete":
            (peers.one / "peer-updates.jsonl").unlink(missing_ok=True)
    before = peers.count[1]
    for _ in range(2):
        run(charge=True)
    assert before < peers.count[1] <= peers.payments()


@pytest.mark.parametrize("strategy", RELAYS)
def test_a_folder_restored_between_rounds_takes_no_step(strategy, tmp_path):
    peers = Peers(tmp_path, strategy)
    peers.before[0, 3] = lambda: peers.copy("backup")
    peers.before[0, 5] = lambda: peers.put(tmp_path / "backup")
    assert "lacks 1 lines" in peers.run(6)  # of two: the other one was not counted by the time of these reports
    assert peers.count[1] == 4


def test_a_check_of_the_ledger_comes_before_the_step(tmp_path):
    """The state has its mass and was not told of the ledger, so that nothing else stops the peer."""
    peers = Peers(tmp_path, PushSum)
    peers.run(2)
    saved = load_state(state_path(peers.one, "law"))
    saved.state.paid.clear()
    save_state(saved.log, saved.state)
    (peers.one / "peer-updates.jsonl").unlink()
    assert "lacks 2 lines" in peers.run(4)
    assert peers.count[1] == 2


def test_a_state_misses_lines_no_neighbour_counted(tmp_path):
    peers = Peers(tmp_path, PushSum)
    peers.run(2)
    peers.before[2, 3] = dies
    with pytest.raises(KeyboardInterrupt):
        peers.run(3)
    (peers.one / "peer-updates.jsonl").unlink()
    assert "lacks 3 lines" in peers.run(5)
    assert peers.count[1] == 3


@pytest.mark.parametrize("strategy", RELAYS)
def test_a_peer_without_its_key_takes_no_step(strategy, tmp_path):
    peers = Peers(tmp_path, strategy)
    peers.run(2)
    peers.put(None, keep="nothing")
    peers.run(4)
    assert peers.count == {0: 4, 1: 2, 2: 4}


@pytest.mark.parametrize("strategy", RELAYS)
def test_neither_of_two_copies_continues_without_the_other(strategy, tmp_path):
    """The original takes a step of which no neighbour hears, then the copy one, then the original comes back."""
    peers = Peers(tmp_path, strategy)
    peers.run(2)
    copy = peers.copy("copy")

    peers.before[2, 3] = dies
    with pytest.raises(KeyboardInterrupt):
        peers.run(3)
    original = peers.copy("original")
    assert peers.count[1] == 3
    peers.put(copy)
    peers.run(3)
    assert (peers.count[1], peers.payments()) == (4, 3)
    peers.put(original)
    assert "lacks 1 lines" in peers.run(5)
    assert peers.count[1] == 4
    peers.run(8, charge=True)
    assert peers.payments() == peers.count[1] > 4


def test_a_server_dropping_reports_can_only_stop_peers(tmp_path):
    peers = Peers(tmp_path, PushSum)
    assert UNWITNESSED in peers.run(3, forge=lambda receiver, name, frame: None if receiver == 1 else frame)
    assert peers.count == {0: 3, 2: 3}


@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "open"])
def test_a_server_cannot_write_a_report(seal, tmp_path):
    """A restored peer is told by the server, in its neighbours' names, that they counted nothing."""
    peers = Peers(tmp_path, PushSum, seal=seal)
    peers.run(2)
    backup = peers.copy("backup")
    peers.run(4)
    peers.put(backup)
    layout = Layout.of({"0": np.zeros(3)})
    frames = run_frames("law", layout)

    def forge(receiver: int, name: str, frame: bytes) -> bytes:
        if receiver != 1:
            return frame
        header: FrameHeader = frames.read_header(frame, len(frame))
        boot = int((peers.one / "start").read_text())  # the headers of its own reports are open
        return b"".join(frames.encode(LedgerReport(header.sender, 1, 1, 1, boot, (), ())))

    why = peers.run(6, forge=forge)
    assert (peers.count[1] == 4) is seal  # an open run trusts the server
    if seal:
        assert UNWITNESSED in why


@pytest.mark.slow
def test_lines_lost_between_mesh_runs_are_missed(tmp_path):
    make_certificates(parse_app_scenario("{name: law, n_peers: 3, rounds: 1, privacy: none}"), tmp_path / "certs")
    peers, addresses = Peers(tmp_path, PushSum), own_addresses(3)

    def run(charge: bool = False) -> str:
        config = {
            peer: {
                "address": address,
                "certificates": str(tmp_path / "certs"),
                "charge-missing": charge and peer == 1,
            }
            for peer, address in enumerate(addresses)
        }
        grid = TogetherGrid(peers.app, 3, folder=tmp_path, config=config)
        try:
            Mesh(name="law", fraction_evaluate=0.0, deadline=1.0).start(grid, zeros(), 3, timeout=600)
        except RunError as error:
            return str(error)
        return ""

    def forget_the_run() -> None:
        for peer in range(3):
            shutil.rmtree(tmp_path / f"peer-{peer}" / "mesh-law", ignore_errors=True)
            for state in (tmp_path / f"peer-{peer}").glob("run-*"):
                state.unlink()

    assert not run()
    forget_the_run()
    peers.put(None)
    assert "peers [1] did not finish" in run()
    assert peers.count[1] == 3
    forget_the_run()
    assert not run(charge=True)
    assert peers.payments() == peers.count[1] == 6
