"""Real peers go on while one is shut out, one moves, and one shows another certificate."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import privdec
from networked import LONG, driver_of, finish, trainer_of
from ports import own_addresses
from raising import raises

from flower_privdec.common.errors import RunError
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.scenario import load_scenario

ROUNDS = 40


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
    peers: list[RunningPeer] = []
    for peer, certificates in enumerate(folders):
        device = device_of(loaded, peer, tmp_path / f"peer-{peer}", certificates, None, insecure_seeds=True)
        peers.append(running_peer(loaded, device))
    drivers = [driver_of(peer) for peer in peers]

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
        ended: list[Future[object]] = [
            pool.submit(finish, peer, change if number == 0 else None)  # type: ignore[arg-type]
            for number, peer in enumerate(peers)
        ]
        with raises(RunError, "call.revoked", names=r"peer-3\.tiny was shut out by entry 3"):
            ended[3].result(LONG)
        for one in ended[:3]:
            one.result(LONG)

    for number in range(3):
        assert peers[number].state.round_index == peers[number].end
        assert len((tmp_path / f"peer-{number}" / "members").read_bytes().splitlines()) == 3
        epsilon = trainer_of(peers[number]).status(peers[number]._trained)["epsilon"]
        assert epsilon <= 3.0
    transport = drivers[1]._transport
    assert transport._listens_at == moved  # type: ignore[attr-defined]
    assert drivers[2]._shown is not None
    assert drivers[2]._shown.certificate == (operators / "peer-2.pem").read_bytes()
