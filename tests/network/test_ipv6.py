"""A deployment whose addresses are all of IPv6: kits, doctor, peers, status, the live page, metrics."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path

import pytest
from command_line import privdec
from networked import LONG, finish, running, wait_until
from ports import own_addresses
from wards import write_ward

from flower_privdec.devices.doctor import ExaminedDevice, examine
from flower_privdec.devices.kit import deploy
from flower_privdec.network.local.peer_processes import on_this_machine
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.network.peer.telemetry import Telemetry, TelemetryServer
from flower_privdec.network.transport.tls import files_of, identities_of
from flower_privdec.scenario import load_scenario
from flower_privdec.watching.asker import Asker, Target


@pytest.fixture
def addresses() -> list[str]:
    """Return two addresses of IPv6 on this machine that nobody listens on."""
    ports = [address.rpartition(":")[2] for address in own_addresses(2)]
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("NOT TESTED: no IPv6 here")
    return [f"[::1]:{port}" for port in ports]


def test_a_deployment_speaks_ipv6(addresses: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One peer waits for the other, is asked by all that ask peers, and both end."""
    scenario = load_scenario(write_ward(tmp_path, addresses))
    assert on_this_machine(scenario).network.peers == scenario.network.peers
    deploy(scenario, tmp_path / "kits", root="own-{peer}.npz")
    certificates = [tmp_path / f"kits/devices/ward-7-{peer}/certs" for peer in range(2)]
    for peer, folder in enumerate(certificates):
        # A certificate is for a name, so that it holds at any address.
        assert identities_of(files_of(folder, peer)[0].read_bytes()) == (f"peer-{peer}.ward-7",)

    own = [str(tmp_path / f"own-{peer}.npz") for peer in range(2)]
    peers = [
        running_peer(scenario, device_of(scenario, peer, tmp_path / f"peer-{peer}", certificates[peer], own[peer]))
        for peer in range(2)
    ]
    target = Target.of_scenario(tmp_path / "ward.yaml", (), certificates[1], 1)
    with running(peers[:1]) as (first,), Asker(target, 0.2) as asker:
        wait_until(lambda: asker.board.state()["peers"][0].get("awaited") == [1])
        status = ("status", addresses[0], "--certs", certificates[1], "--as", "1", "--json")
        assert privdec(*status) == 0
        assert json.loads(capsys.readouterr().out)["peer"] == 0

        device = ExaminedDevice(scenario, 1, tmp_path / "peer-1", certificates[1], own[1])
        found = {one.check: one for one in examine(device)}
        assert found["port"].message == f"{addresses[1]} is free"
        assert f"peer 0 at {addresses[0]}" in found["neighbours"].message
        assert found["neighbours"].level == "ok"

        finish(peers[1])
        first.result(LONG)


def test_metrics_are_served_on_ipv6_loopback(addresses: list[str]) -> None:
    pytest.importorskip("prometheus_client")
    port = int(addresses[0].rpartition(":")[2])
    with TelemetryServer(addresses[0], Telemetry("ward", 0, "1.0")):
        for host, wanted in ((addresses[0], 200), ("evil.example", 403)):
            connection = HTTPConnection("::1", port, timeout=LONG)
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == wanted
            connection.close()
