"""Real peers go on while one is shut out, one moves, and one shows another certificate."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from command_line import privdec
from networked import LONG, driver_of, finish, trainer_of, wait_until
from ports import own_addresses
from raising import raises
from torch import Tensor

from flower_privdec.common.errors import MembersChangedError, RunError
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.peer import OnRound, RunningPeer
from flower_privdec.pushsum.exactly_once import Edge
from flower_privdec.scenario import Scenario, load_scenario

ROUNDS = 40


def hold(peer: RunningPeer, stages: dict[int, int]) -> RunningPeer:
    """Let a peer wait before a round, and relay meanwhile, until its list of members has so many entries.

    So a change meets peers in the middle of a run, however fast they are.
    """
    assert isinstance(peer, AsynchronousPeer)
    real = peer._must_wait

    def must_wait(round_index: int) -> bool:
        has_to = real(round_index)
        members = peer.device.members
        assert members is not None
        if any(round_index >= stage and len(members.entries) < least for stage, least in stages.items()):
            peer.waits_for = "the list of members"
            return True
        return has_to

    peer._must_wait = must_wait  # type: ignore[method-assign]
    return peer


building = Lock()  # models are drawn by the generator that a process has once


def live(
    scenario: Scenario,
    peer: int,
    folder: Path,
    lives: dict[int, RunningPeer],
    stages: dict[int, int],
    on_round: OnRound | None = None,
) -> None:
    """Run a peer to its end, and begin again whenever the members changed, as `privdec peer` does; see `hold`."""
    while True:
        with building:
            device = device_of(scenario, peer, folder / f"peer-{peer}", folder / f"certs-{peer}")
            running = hold(running_peer(scenario, device), stages)
            lives[peer] = running
        try:
            finish(running, on_round)
            return
        except MembersChangedError:
            continue


@pytest.mark.slow
def test_peers_go_on_when_one_is_shut_out(tiny_text: str, tmp_path: Path) -> None:
    """The list reaches all from one; who is shut out ends by name; a certificate and an address change meanwhile."""
    *addresses, moved = own_addresses(5)
    scenario = tmp_path / "tiny.yaml"
    lines = "\n".join(f'    - {{address: "{address}"}}' for address in addresses)
    text = tiny_text.replace("rounds: 6", f"rounds: {ROUNDS}")
    scenario.write_text(f"{text}\nnetwork:\n  links: local\n  deadline: 3\n  peers:\n{lines}\n")
    operators = tmp_path / "certs"
    assert privdec("certs", str(scenario), "--out", str(operators)) == 0
    folders = [Path(shutil.copytree(operators, tmp_path / f"certs-{peer}")) for peer in range(4)]

    loaded = load_scenario(scenario)
    lives: dict[int, RunningPeer] = {}

    def operate(*arguments: str) -> None:
        command, *options = arguments
        assert privdec("members", str(scenario), command, "--certs", str(operators), *options) == 0

    def change(peer: RunningPeer) -> None:
        if peer.state.round_index != 5:
            return
        operate("renew", "--id", "2", "--only")
        for name in ("peer-2.pem", "peer-2.key"):
            shutil.copy(operators / name, folders[2] / name)
        operate("address", "--id", "1", "--address", moved)
        operate("revoke", "--id", "3")
        shutil.copy(operators / "members", folders[0] / "members")

    with ThreadPoolExecutor(4) as pool:
        ended = [
            pool.submit(live, loaded, peer, tmp_path, lives, {6: 3}, change if peer == 0 else None) for peer in range(4)
        ]
        with raises(RunError, "call.revoked", names=r"peer-3\.tiny was shut out by entry 3"):
            ended[3].result(LONG)
        for one in ended[:3]:
            one.result(LONG)

    for number in range(3):
        assert lives[number].state.round_index == lives[number].end
        assert len((tmp_path / f"peer-{number}" / "members").read_bytes().splitlines()) == 3
        assert trainer_of(lives[number]).status(lives[number]._trained)["epsilon"] <= 3.0
    assert driver_of(lives[1])._transport._listens_at == moved  # type: ignore[attr-defined]
    shown = driver_of(lives[2])._shown
    assert shown is not None
    assert shown.certificate == (operators / "peer-2.pem").read_bytes()


def under_way(lives: dict[int, RunningPeer]) -> float:
    """Return the weight of the shares that their receivers have not added."""
    weight = 0.0
    for sender, running in lives.items():
        edges: Mapping[int, Edge[Tensor]] = running.session.protocol.edges  # type: ignore[attr-defined]
        for receiver, edge in edges.items():
            theirs = lives[receiver].session.protocol.edges.get(sender, Edge())  # type: ignore[attr-defined]
            weight += sum(float(one.values["w"]) for one in edge.frozen if one.number > theirs.received)
    return weight


@pytest.mark.slow
def test_one_joins_and_one_leaves(tiny_text: str, tmp_path: Path) -> None:
    """Five real peers in the end: the weights add up, budgets hold, and the graph is that of the members."""
    addresses = own_addresses(5)
    scenario = tmp_path / "tiny.yaml"
    lines = "\n".join(f'    - {{address: "{address}"}}' for address in addresses[:4])
    draw = np.random.default_rng(0)
    for name in ("test", *map(str, range(5))):
        x = draw.random((60, 8), np.float32)
        y = np.arange(60) % 3
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = f"data: {{dataset: npz, root: '{tmp_path}/{{peer}}.npz', test: {tmp_path}/test.npz, batch: {{size: 6}}}}"
    text = re.sub("data: .*", own, tiny_text.replace("rounds: 6", f"rounds: {ROUNDS}"))
    text = text.replace("generator: portable", "generator: system")
    scenario.write_text(f"{text}\nnetwork:\n  links: local\n  deadline: 3\n  peers:\n{lines}\n")
    operators = tmp_path / "certs"
    assert privdec("certs", str(scenario), "--out", str(operators)) == 0
    for peer in range(4):
        shutil.copytree(operators, tmp_path / f"certs-{peer}")

    lives: dict[int, RunningPeer] = {}

    def reaches(peer: int, round_index: int) -> None:
        wait_until(lambda: peer in lives and lives[peer].state.round_index >= round_index)

    loaded = load_scenario(scenario)
    with ThreadPoolExecutor(5) as pool:
        ended = [pool.submit(live, loaded, peer, tmp_path, lives, {4: 1, 8: 2}) for peer in range(4)]
        reaches(0, 4)
        options = ["--certs", str(operators)]
        assert privdec("members", str(scenario), "add", "--address", addresses[4], *options) == 0
        shutil.copytree(operators, tmp_path / "certs-4")
        shutil.copy(operators / "members", tmp_path / "certs-0" / "members")
        ended.append(pool.submit(live, loaded, 4, tmp_path, lives, {2: 2}))
        reaches(4, 1)
        assert privdec("members", str(scenario), "leave", "--id", "2", *options) == 0
        shutil.copy(operators / "members", tmp_path / "certs-3" / "members")
        for one in ended:
            one.result(3 * LONG)

    weights = {peer: float(running.state.rows["w"][0]) for peer, running in lives.items()}
    assert weights[2] == 0.0
    assert lives[2].state.round_index < ROUNDS
    assert sum(weights.values()) + under_way(lives) == pytest.approx(5.0, rel=1e-9)
    for peer in (0, 1, 3, 4):
        assert lives[peer].state.round_index >= ROUNDS
        assert lives[peer].timetable.mixing.topology.members == (0, 1, 3, 4)  # type: ignore[attr-defined]
        assert trainer_of(lives[peer]).status(lives[peer]._trained)["epsilon"] <= 3.0
