"""What a device's doctor finds, and that it leaves everything as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from command_line import privdec
from networked import wait_until
from ports import own_addresses
from wards import ward

from flower_privdec.devices import doctor
from flower_privdec.devices.doctor import DeviceFinding, ExaminedDevice, examine, read_environment
from flower_privdec.devices.kit import KitPlaces, deploy
from flower_privdec.network.peer.driver import Driver
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.network.transport import tls
from flower_privdec.network.transport.failures import CALLING
from flower_privdec.network.transport.tls import Authority, identities
from flower_privdec.scenario import load_scenario
from flower_privdec.scenario.sections import NetworkPeer
from tools.lab.air import SUBNET, Air, Line, UnavailableError


@pytest.fixture
def device(tmp_path: Path) -> ExaminedDevice:
    """Return a device whose kit is in place, with its data."""
    scenario = ward(tmp_path, own_addresses(3))
    deploy(scenario, tmp_path / "kits", KitPlaces(str(tmp_path / "etc"), str(tmp_path / "var")), root="own-{peer}.npz")
    kit = tmp_path / "kits/devices/ward-7-0"
    settings = read_environment(kit / "peer.env")
    data = tmp_path / "own-0.npz"
    data.chmod(0o600)
    return ExaminedDevice(
        scenario=load_scenario(kit / "scenario.yaml"),
        peer=0,
        folder=tmp_path / "peer",
        certificates=kit / "certs",
        data=str(data),
        kit=settings["PRIVDEC_KIT"],
    )


def levels(findings: list[DeviceFinding]) -> dict[str, set[str]]:
    """Return the levels of each check's findings."""
    found: dict[str, set[str]] = {}
    for one in findings:
        found.setdefault(one.check, set()).add(one.level)
    return found


def codes(findings: list[DeviceFinding]) -> set[str]:
    return {one.code for one in findings if one.level != doctor.OK}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))}


def test_a_ready_device_lacks_only_its_neighbours(
    device: ExaminedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = snapshot(tmp_path)
    findings = examine(device)
    found = levels(findings)
    assert found.pop("neighbours") == {"warning"}
    assert found.pop("disk") <= {"ok", "warning"}  # a slow disk, or one in memory, is worth a word
    assert set(found) >= {"versions", "certificates", "ledger", "data", "memory", "port"}
    assert {level for one in found.values() for level in one} == {"ok"}, findings
    assert all(one.remedy for one in findings if one.level != "ok")
    assert snapshot(tmp_path) == before  # nothing was written, made or removed


def test_a_neighbours_certificate_and_clock_are_looked_at(
    device: ExaminedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits = tmp_path / "kits/devices"
    other = device_of(device.scenario, 1, tmp_path / "peer-1", kits / "ward-7-1/certs", str(tmp_path / "own-1.npz"))
    driver = Driver(running_peer(device.scenario, other))
    driver.open()
    try:
        assert levels(examine(device))["neighbours"] == {"ok", "warning"}  # peer 2 is not there
        now = tls.UTC_NOW
        monkeypatch.setattr(doctor, "UTC_NOW", lambda: now() - timedelta(hours=2))
        found = examine(device)
        assert next(one for one in found if one.check == "clock").message.count(" +7") == 1  # 7200 s ahead
        assert "doctor.clock" in codes(found)
    finally:
        driver.close()


def test_a_stranger_in_a_neighbours_place_is_an_error(device: ExaminedDevice) -> None:
    stranger = Authority.create("stranger").issue(identities(device.scenario)[1])
    context = tls.stream_context(stranger, is_called=True)

    def serve(server: socket.socket) -> None:
        with suppress(OSError):  # the server is closed, or the caller hangs up
            while True:
                with server.accept()[0] as plain, suppress(ssl.SSLError):
                    context.wrap_socket(plain, server_side=True).close()

    with closing(socket.create_server(tls_address(device, 1))) as server:
        thread = Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        findings = examine(device)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert "certificate.authority" in codes(findings)
    assert "error" in levels(findings)["neighbours"]


def tls_address(device: ExaminedDevice, peer: int) -> tuple[str, int]:
    peers = device.scenario.network.peers
    assert peers is not None
    host, _, port = peers[peer].address.rpartition(":")
    return host, int(port)


def test_each_thing_that_is_wrong_is_found(device: ExaminedDevice, tmp_path: Path) -> None:
    key = device.certificates / "peer-0.key"
    key.chmod(0o644)
    shutil.copy(tmp_path / "kits/authority/authority.key", device.certificates / "backup.pem")
    Path(str(device.data)).chmod(0o644)
    wrong = replace(device, kit="0.0.1")
    assert codes(examine(wrong)) >= {
        "doctor.key-mode",
        "doctor.authority-key",
        "doctor.data-mode",
        "doctor.other-version",
    }


def test_a_clock_before_its_certificate_is_found(device: ExaminedDevice) -> None:
    scenario = device.scenario
    folder = device.certificates
    authority = folder.parents[2] / "authority"
    later = Authority.read(authority / "authority.pem", authority / "authority.key").issue(
        identities(scenario)[0], datetime.now(UTC) + timedelta(days=2)
    )
    (folder / "peer-0.pem").write_bytes(later.certificate)
    (folder / "peer-0.key").write_bytes(later.key)
    findings = examine(device)
    assert "certificate.early" in codes(findings)
    assert "neighbours" not in levels(findings)  # not told twice


def test_data_of_another_shape_or_class_are_found(device: ExaminedDevice, tmp_path: Path) -> None:
    for columns, classes, code in ((4, 3, "data.shape"), (5, 9, "data.labels")):
        other = tmp_path / "other.npz"
        np.savez(other, x_train=np.ones((40, columns), "float32"), y_train=np.arange(40) % classes)
        findings = examine(replace(device, data=str(other)))
        assert levels(findings)["data"] == {"error"}, code
    findings = examine(replace(device, data=str(tmp_path / "missing.npz")))
    assert levels(findings)["data"] == {"error"}


def test_a_port_in_use_by_another_program_is_found(device: ExaminedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.2)  # for which the other program says nothing
    with closing(socket.create_server(tls_address(device, 0))):
        assert "listen.in-use" in codes(examine(device))


def test_a_deleted_or_damaged_ledger_is_found(device: ExaminedDevice) -> None:
    (device.folder / "ledger").mkdir(parents=True)
    (device.folder / "checkpoints").write_bytes(b"")
    assert "ledger.stale" in codes(examine(device))
    (device.folder / "ledger/own.jsonl").write_text("{}\n")
    assert levels(examine(device))["ledger"] == {"error"}


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT TESTED as root, who may write everywhere")
def test_a_folder_of_another_user_is_found(device: ExaminedDevice, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "disk.forbidden" in codes(examine(device))


def test_the_command_reads_the_kits_environment(
    device: ExaminedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = device.certificates.parent
    settings = (kit / "peer.env").read_text().replace(f"{tmp_path}/etc/ward-7-0", str(kit))
    settings = settings.replace(f"{tmp_path}/var/ward-7-0/own-0.npz", str(device.data))
    (kit / "peer.env").write_text(settings)
    for words in ((kit / "scenario.yaml", "--id", "0"), (kit,)):
        assert privdec("doctor", *words, "--json") == 0
        findings = json.loads(capsys.readouterr().out)
        assert {one["level"] for one in findings if one["check"] == "data"} == {"ok"}

    (kit / "peer.env").write_text(settings.replace("own-0", "gone"))
    assert privdec("doctor", kit / "scenario.yaml", "--id", "0") == 1
    assert "error   data" in capsys.readouterr().out
    (kit / "peer.env").unlink()
    assert privdec("doctor", kit) == 2
    assert "--id is missing" in capsys.readouterr().err


def replaced_peers(device: ExaminedDevice, *places: NetworkPeer, topology: str = "complete") -> ExaminedDevice:
    """Return a device whose scenario has other places for the first peers."""
    peers = device.scenario.network.peers
    assert peers is not None
    network = device.scenario.network.model_copy(update={"peers": [*places, *peers[len(places) :]]})
    graph = device.scenario.topology.model_copy(update={"name": topology})
    return replace(device, scenario=device.scenario.model_copy(update={"network": network, "topology": graph}))


def test_a_place_to_listen_is_the_environments(
    device: ExaminedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is the peer's, which a unit or a container starts with that environment."""
    listen = own_addresses(1)[0]
    kit = device.certificates.parent
    path = kit / "peer.env"
    path.write_text(path.read_text().replace("#PRIVDEC_LISTEN=", f"PRIVDEC_LISTEN={listen}"))
    words = ["--id", "0", "--certs", device.certificates, "--data", str(device.data), "--out", device.folder, "--json"]
    assert privdec("doctor", kit / "scenario.yaml", *words) == 0
    findings = json.loads(capsys.readouterr().out)
    host, port = tls_address(device, 0)
    assert [one["message"] for one in findings if one["check"] == "port"] == [
        f"{listen} is free; the others dial {host}:{port}, which has to lead there"
    ]
    assert privdec("doctor", kit / "scenario.yaml", *words, "--listen", "here") == 1
    assert "network.address" in capsys.readouterr().out


def test_a_place_that_nobody_reaches_is_found(device: ExaminedDevice) -> None:
    listen = own_addresses(1)[0]
    behind = replaced_peers(device, NetworkPeer(address="10.77.0.9:7100", listen=listen))
    assert "doctor.loopback" in codes(examine(behind))
    elsewhere = examine(replaced_peers(device, NetworkPeer(address="192.0.2.7:7100")))
    assert next(one for one in elsewhere if one.code == "listen.not-here").remedy.endswith("--listen 0.0.0.0:PORT")
    anywhere = replace(device, peer=1, certificates=device.certificates.parents[1] / "ward-7-1/certs")
    assert "peer.anywhere" in codes(examine(replaced_peers(anywhere, NetworkPeer(address="[::]:7100"))))


def test_two_that_only_dial_out_are_named(device: ExaminedDevice) -> None:
    out = NetworkPeer(dial="out")
    findings = examine(replaced_peers(device, out, out))
    assert next(one.code for one in findings if one.check == "neighbours") == "network.dials-out"
    assert not [one for one in findings if "calls this device" in one.message]

    # Around a third one, each reaches the other by it.
    third = replace(device, peer=1, certificates=device.certificates.parents[1] / "ward-7-1/certs")
    findings = examine(replaced_peers(third, NetworkPeer(address="127.0.0.1:9"), out, out, topology="star"))
    assert codes(findings) <= {"call.refused", "doctor.slow-disk", "doctor.volatile"}
    assert "this device only dials out" in next(one.message for one in findings if one.check == "port")


@pytest.mark.slow
def test_a_small_peers_device_is_looked_at_without_torch(device: ExaminedDevice) -> None:
    kit = device.certificates.parent
    command = [sys.executable, "-m", "flower_privdec", "doctor", kit / "scenario.yaml", "--id", "0", "--small"]
    options = ["--json", "--certs", device.certificates, "--data", str(device.data), "--out", device.folder]
    done = subprocess.run([*map(str, command), *map(str, options)], capture_output=True, text=True, check=False)
    findings = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {one["level"] for one in findings if one["check"] in ("data", "memory", "versions")} == {"ok"}
    assert "without torch" in next(one["message"] for one in findings if one["check"] == "versions")


def test_a_joined_peers_device_is_looked_at_likewise(device: ExaminedDevice, tmp_path: Path) -> None:
    """And by the list: who joined is a neighbour, and who left is none."""
    certificates = ("--certs", tmp_path / "kits/authority")
    (address,) = own_addresses(1)
    assert privdec("members", tmp_path / "ward.yaml", "add", "--address", address, *certificates) == 0
    assert privdec("members", tmp_path / "ward.yaml", "leave", "--id", 2, *certificates) == 0
    places = KitPlaces(str(tmp_path / "etc"), str(tmp_path / "var"))
    deploy(load_scenario(tmp_path / "ward.yaml"), tmp_path / "kits", places, root="own-{peer}.npz")
    shutil.copy(tmp_path / "own-2.npz", tmp_path / "own-3.npz")
    (tmp_path / "own-3.npz").chmod(0o600)
    kit = tmp_path / "kits/devices/ward-7-3"

    joined = replace(
        device,
        scenario=load_scenario(kit / "scenario.yaml"),
        peer=3,
        certificates=kit / "certs",
        data=str(tmp_path / "own-3.npz"),
    )
    found = examine(joined)
    assert levels(found) == levels(examine(device))
    assert {one.check for one in found if one.level == doctor.OK} >= {
        "certificates",
        "ledger",
        "data",
        "memory",
        "port",
    }
    for one, others in ((found, (0, 1)), (examine(device), (1, 3))):
        neighbours = [finding.message for finding in one if finding.check == "neighbours"]
        assert len(neighbours) == 2
        for peer, message in zip(others, neighbours, strict=True):
            assert f"peer-{peer}." in message

    assert "data.no-file" in codes(examine(replace(joined, data=None)))


RULES = {  # of the doctor's device: what it finds then, and a word of the remedy
    "output tcp dport 7100 drop": ("call.silent", "a firewall drops"),
    "output tcp dport 7100 reject with icmp type admin-prohibited": ("call.no-route", "a firewall rejects the call"),
}


def test_a_neighbour_that_cannot_reach_this_device_is_heard(
    device: ExaminedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has met this device before: a firewall or a router has changed since."""
    silent = f"peer-0.ward-7 does not answer: {CALLING[errno.ETIMEDOUT][1]}"
    refused = f"peer-0.ward-7 does not answer: {CALLING[errno.ECONNREFUSED][1]}"
    monkeypatch.setattr(doctor, "calling_error", lambda *_: None)
    for down, is_said in (({"0": silent}, True), ({"0": refused}, False), ({"2": silent}, False), (["0"], False)):
        monkeypatch.setattr(doctor, "request_status", lambda *_, down=down: {"round": 1, "rounds": 4, "down": down})
        found = [one for one in examine(device) if one.code == "doctor.unreached"]
        assert bool(found) == is_said
        for one in found:
            assert "let TCP in to port" in one.remedy


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft") is None, reason="NOT TESTED: there is no nft here")
def test_a_firewall_is_found_from_inside_with_its_remedy(tmp_path: Path) -> None:
    """A peer runs on another device, and this one's firewall lets no call out to it: by silence, or by a word."""
    try:
        with Air(2, Line()) as air:
            scenario = ward(tmp_path, [f"{SUBNET}{device + 1}:7100" for device in range(2)])
            places = KitPlaces(str(tmp_path / "etc"), str(tmp_path / "var"))
            deploy(scenario, tmp_path / "kits", places, root="own-{peer}.npz")
            kits = tmp_path / "kits/devices"

            def command(device: int, verb: str, *more: str) -> tuple[str, ...]:
                kit = kits / f"ward-7-{device}"
                words = [verb, str(kit / "scenario.yaml"), "--id", str(device), "--small"]
                words += ["--certs", str(kit / "certs")]
                own = ["--data", str(tmp_path / f"own-{device}.npz"), "--out", str(tmp_path / f"peer-{device}")]
                return air.command(device, sys.executable, "-m", "flower_privdec", *words, *own, *more)

            def findings() -> list[dict[str, str]]:
                done = subprocess.run(command(0, "doctor", "--json"), capture_output=True, text=True, check=False)
                found: list[dict[str, str]] = json.loads(done.stdout)
                return found

            with subprocess.Popen(command(1, "peer"), stderr=subprocess.DEVNULL) as other:
                try:
                    for rule, (code, remedy) in RULES.items():
                        hook = rule.split()[0]
                        subprocess.run(air.command(0, "nft", "flush", "ruleset"), check=True)
                        subprocess.run(air.command(0, "nft", "add", "table", "inet", "own"), check=True)
                        chain = f"{{ type filter hook {hook} priority 0; }}"
                        subprocess.run(air.command(0, "nft", "add", "chain", "inet", "own", hook, chain), check=True)
                        subprocess.run(air.command(0, "nft", "add", "rule", "inet", "own", *rule.split()), check=True)
                        wait_until(lambda code=code: code in {one["code"] for one in findings()})  # type: ignore[misc]
                        (found,) = [one for one in findings() if one["code"] == code]
                        assert found["level"] == doctor.WARNING
                        assert remedy in f"{found['message']} {found['remedy']}"
                finally:
                    other.kill()
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED: devices in namespaces: {error}")
