"""A federation changes while it runs: certificates are renewed and revoked, and peers move."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import privdec
from networked import LONG, wait_until
from ports import own_addresses
from raising import raises
from streaming import CAP, directory_of, echo, linked, served

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.exit_codes import NOT_VALID_NOW
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.foreground import device_of, joined_scenario, running_peer
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.network.transport.directory import Directory, fingerprint_of_certificate
from flower_privdec.network.transport.kinds.over_tls import TlsTransport
from flower_privdec.network.transport.stream_server import CalledStream
from flower_privdec.network.transport.tls import Authority, files_of, identities_of
from flower_privdec.network.transport.transport import NAME, STREAMS, UnreachableError, greeting_problem
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario import load_scenario
from flower_privdec.scenario.loading import load_membership

MEMBERS = {"peer-0.tiny": 0, "peer-1.tiny": 1}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


def on_loop(server: object, change: object) -> None:
    """Change a server in the thread of its loop, as its owner does."""
    done = threading.Event()

    def perform() -> None:
        change()  # type: ignore[operator]
        done.set()

    server.loop.soon(perform)  # type: ignore[attr-defined]
    assert done.wait(LONG)


def test_a_revoked_peer_is_cut_off_and_refused(authority: Authority) -> None:
    ended: list[str] = []
    own = authority.issue("peer-0.tiny")
    with served(own, MEMBERS) as server, linked(server, authority.issue("peer-1.tiny")) as link:
        assert link.call([b"hello"], LONG) == b"1:hello"
        link._stream.ended = ended.append  # type: ignore[union-attr, method-assign]
        why = "peer-1.tiny was shut out by entry 1 of the list of members"
        directory = Directory(("", ""), tuple(MEMBERS), {1: why})
        on_loop(server, lambda: server.update(directory, None))
        while not ended:
            link._loop.turn(0.05)  # the connection is closed without another call
        link._stream = None
        with raises(RefusedError, "call.revoked", names="peer-1.tiny was shut out by entry 1"):
            link.call([b"hello"], LONG)


def test_a_caller_says_nothing_to_a_revoked_peer(authority: Authority) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-1.tiny")) as link,
    ):
        assert link.call([b"hello"], LONG) == b"1:hello"
        link.update(link.address, None, lambda certificate: "it was shut out")
        with raises(UnreachableError, "call.unanswered", names="it was shut out"):
            link.call([b"hello"], LONG)


def test_only_the_certificate_of_the_list_counts(authority: Authority) -> None:
    """A stolen key: its owner goes on with a new certificate, and the old one is refused on both sides."""
    stolen = authority.issue("peer-1.tiny")
    renewed = authority.issue("peer-1.tiny")
    only = {1: fingerprint_of_certificate(renewed.certificate)}
    with served(authority.issue("peer-0.tiny"), MEMBERS) as server:
        on_loop(server, lambda: server.update(Directory(("", ""), tuple(MEMBERS), {}, only), None))
        with linked(server, stolen) as link, raises(RefusedError, "call.replaced", names="was replaced"):
            link.call([b"hello"], LONG)
        with linked(server, renewed) as link:
            assert link.call([b"hello"], LONG) == b"1:hello"


def test_a_renewed_certificate_is_shown_by_both_sides(authority: Authority) -> None:
    shown: list[bytes] = []
    old = authority.issue("peer-1.tiny")
    new = authority.issue("peer-1.tiny")
    server_old = authority.issue("peer-0.tiny")
    server_new = authority.issue("peer-0.tiny")
    with served(server_old, MEMBERS) as server, linked(server, old) as link:
        link.call([b"hello"], LONG)
        shown.append(link._stream.certificate)  # type: ignore[union-attr]
        (called,) = server._streams_of[1]
        assert called.certificate == old.certificate

        link.update(link.address, new, lambda certificate: "")
        assert link.call([b"hello"], LONG) == b"1:hello"
        assert any(one.certificate == new.certificate for one in server._streams_of[1])

        on_loop(server, lambda: server.update(directory_of(MEMBERS), server_new))
        assert not [one for one in server._streams_of[1] if not one.is_closed]  # what was open is closed
        while link._stream is not None:
            link._loop.turn(0.01)
        assert link.call([b"hello"], LONG) == b"1:hello"
        shown.append(link._stream.certificate)  # type: ignore[union-attr]
    assert shown == [server_old.certificate, server_new.certificate]


@contextmanager
def transports(authority: Authority) -> Iterator[tuple[TlsTransport, TlsTransport, list[str]]]:
    addresses = own_addresses(3)
    identities = [*MEMBERS]
    one, other = (
        TlsTransport(peer, addresses[:2], identities, authority.issue(name)) for peer, name in enumerate(identities)
    )
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            one.turn(0.02)

    one.listen(echo, CAP, 2)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield one, other, addresses
    finally:
        over.set()
        thread.join()
        one.close()
        other.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_peer_that_moved_is_called_there(host: str, authority: Authority) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("NOT TESTED: no IPv6 here")
    with transports(authority) as (one, other, addresses):
        addresses[2] = f"{host}:{addresses[2].rpartition(':')[2]}"
        link = other.connect(0, CAP)
        assert link.call([b"hello"], LONG) == b"1:hello"
        moved = Directory((addresses[2], addresses[1]), tuple(MEMBERS))
        one._loop.soon(lambda: one.update(moved, one._credentials))
        other.update(moved, other._credentials)
        wait_until(lambda: one._listens_at == addresses[2])
        assert link.call([b"hello"], LONG) == b"1:hello"
        assert link._stream._socket.getpeername()[1] == int(addresses[2].rpartition(":")[2])  # type: ignore[union-attr]


def test_an_older_peer_is_named_with_both_versions(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    both = rf"version 0 of the streams .* version {STREAMS}"
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-1.tiny")) as link,
    ):
        monkeypatch.setattr(CalledStream, "opened", lambda stream: stream.send_plain(NAME + b"0"))
        with raises(UnreachableError, "call.unanswered", names=both):
            link.call([b"hello"], LONG)
        assert re.search(both, link.diagnosis(LONG))
    assert "no peer" in greeting_problem(b"HTTP/1.1")


# --- the files of a device ---


@pytest.fixture
def ward(tiny_text: str, tmp_path: Path) -> Path:
    scenario = tmp_path / "tiny.yaml"
    peers = "\n".join(f'    - {{address: "127.0.0.1:{7100 + peer}"}}' for peer in range(4))
    scenario.write_text(f"{tiny_text}\nnetwork:\n  peers:\n{peers}\n")
    assert privdec("certs", str(scenario), "--out", str(tmp_path / "certs")) == 0
    return scenario


def operate(ward: Path, *arguments: str) -> int:
    command, *options = arguments
    return privdec("members", str(ward), command, "--certs", str(ward.parent / "certs"), *options)


def test_a_device_takes_up_new_files(ward: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    files = PeerFiles(load_membership(ward), 1, tmp_path / "peer-1", certs)
    before = files.credentials

    assert operate(ward, "renew", "--id", "1", "--only") == 0
    key = (certs / "peer-1.key").read_bytes()
    (certs / "peer-1.key").write_bytes(b"half")  # as it is while it is copied
    files.look()
    assert files.credentials is before
    (certs / "peer-1.key").write_bytes(key)
    files.look()
    assert files.credentials.key == key

    directory = files.directory()
    assert directory.problem(1, files.credentials.certificate) == ""
    assert "was replaced" in directory.problem(1, before.certificate)

    assert operate(ward, "revoke", "--id", "3") == 0
    assert operate(ward, "address", "--id", "2", "--address", "[::1]:7300") == 0
    files.look()
    assert files.directory().addresses[2] == "[::1]:7300"
    assert list(files.directory().refused) == [3]
    again = PeerFiles(load_membership(ward), 1, tmp_path / "peer-1", certs)
    assert again.members.members == files.members.members


def test_a_replaced_certificate_starts_no_peer(ward: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    old = {path: path.read_bytes() for path in files_of(certs, 1)}
    assert operate(ward, "renew", "--id", "1", "--only") == 0
    new = {path: path.read_bytes() for path in files_of(certs, 1)}
    for path, content in old.items():
        path.write_bytes(content)
    with raises(ScenarioError, "certificate.replaced", "peer-1.pem") as refused:
        PeerFiles(load_membership(ward), 1, tmp_path / "peer-1", certs)
    assert refused.value.exit_status == NOT_VALID_NOW
    for path, content in new.items():
        path.write_bytes(content)
    PeerFiles(load_membership(ward), 1, tmp_path / "peer-1", certs)

    # A further one gets an entry, too: else it would not count.
    assert operate(ward, "renew", "--id", "1") == 0
    PeerFiles(load_membership(ward), 1, tmp_path / "peer-1", certs)


def test_an_old_list_gives_no_number_twice(ward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs = tmp_path / "certs"
    assert operate(ward, "add", "--address", "10.0.0.4:7100") == 0
    key = (certs / "peer-4.key").read_bytes()
    (certs / "members").unlink()
    assert operate(ward, "add", "--address", "10.0.0.5:7100") == 2
    assert "old copy" in capsys.readouterr().err
    assert (certs / "peer-4.key").read_bytes() == key


def test_a_half_written_list_is_recovered(ward: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    for peer in ("3", "2"):
        assert operate(ward, "revoke", "--id", peer) == 0
    whole = (certs / "members").read_bytes()
    (certs / "members").unlink()
    folder = tmp_path / "peer-1"
    folder.mkdir()
    (folder / "members").write_bytes(whole[:-9])
    files = PeerFiles(load_membership(ward), 1, folder, certs)
    assert len(files.members.entries) == 1
    (certs / "members").write_bytes(whole)
    files.look()
    assert (folder / "members").read_bytes() == whole


def test_an_operator_sees_what_is_wrong(ward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate(ward, "revoke", "--id", "9") == 2
    assert "peers that do are 0, 1, 2, 3" in capsys.readouterr().err
    assert operate(ward, "address", "--id", "1", "--address", "nowhere") == 2
    assert "must be HOST:PORT" in capsys.readouterr().err
    assert operate(ward, "revoke", "--id", "3") == 0
    assert operate(ward, "list") == 0
    said = capsys.readouterr().out
    assert "shut out by entry 1" in said
    path = tmp_path / "certs" / "members"
    path.write_bytes(path.read_bytes().replace(b'"peer":3', b'"peer":2'))
    assert operate(ward, "list") == 2
    assert "is not signed by the authority" in capsys.readouterr().err


def test_who_joins_and_leaves_is_checked_beforehand(ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs = ward.parent / "certs"
    add = ("add", "--address", "10.0.0.4:7100")
    for setting, why in {
        "network.mode=synchronous": "in the same round",
        "privacy.noise={kind: cancelling, colluding: 1}": "shares noise",
        "algorithm.name=pdsl": "answers",
        "topology={name: edge-list, edges: [[0, 1], [1, 2], [2, 3], [3, 0]]}": "",
    }.items():
        assert operate(ward, *add, "--set", setting) == 2
        assert why in capsys.readouterr().err
        assert not (certs / "peer-4.pem").exists()
    assert operate(ward, "leave", "--id", "1", "--set", "network.mode=synchronous") == 2
    assert not (certs / "members").exists()

    assert operate(ward, *add) == 0
    assert credentials_of_number(ward, 4) == ("peer-4.tiny",)
    assert operate(ward, *add) == 2
    assert "is that of a peer" in capsys.readouterr().err
    assert operate(ward, "leave", "--id", "1") == 0
    assert operate(ward, "list") == 0
    assert "left by entry 2" in capsys.readouterr().out


MORE = ("extend", "--rounds", "9")
NO_MORE = {
    "network.mode=synchronous": "network.mode",
    "privacy.noise={kind: cancelling, colluding: 1}": "cancelling",
    "privacy.noise={kind: correlated, bands: 2}": "correlated",
    "participation={kind: uniform, fraction: 0.5}": "participation.kind",
    "algorithm.name=pdsl": "algorithm.name",
    "algorithm.name=dyn-d2p": "schedule",
    "privacy.calibration=paper": "calibration",
    "privacy.noise_cap=1.0": "noise_cap",
    "data.batch.sampling=shuffle": "sampling",
}


@pytest.mark.parametrize("setting", NO_MORE)
def test_rounds_that_cannot_be_are_not_signed(setting: str, ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate(ward, *MORE, "--set", setting) == 2
    said = capsys.readouterr().err
    assert NO_MORE[setting] in said
    assert "begin another run" in said
    assert not (ward.parent / "certs" / "members").exists()


def test_more_rounds_are_signed_only_upwards(ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rounds in ("6", "2", str(10**12)):
        assert operate(ward, "extend", "--rounds", rounds) == 2
        assert "must be more than 6" in capsys.readouterr().err
    assert operate(ward, *MORE) == 0
    assert "--max-epsilon" in capsys.readouterr().out
    assert operate(ward, *MORE) == 2
    assert operate(ward, "extend") == 2
    assert operate(ward, "list") == 0
    assert "entry 1: the run has 9 rounds" in capsys.readouterr().out


def test_nobody_joins_a_run_of_listed_budgets(ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add = ("add", "--address", "10.0.0.4:7100", "--set", "privacy.epsilon=[3.0, 3.0, 3.0, 2.0]")
    assert operate(ward, *add) == 2
    assert "lists a budget" in capsys.readouterr().err
    assert not (ward.parent / "certs" / "members").exists()


def credentials_of_number(ward: Path, peer: int) -> tuple[str, ...]:
    return identities_of((ward.parent / "certs" / f"peer-{peer}.pem").read_bytes())


# --- devices that only dial out ---


@pytest.fixture
def half_hidden(tiny_text: str, tmp_path: Path) -> Path:
    """Return a ring in which every other peer only dials out."""
    scenario = tmp_path / "tiny.yaml"
    places = ["address: '127.0.0.1:7100'", "dial: out", "address: '127.0.0.1:7102'", "dial: out"]
    peers = ", ".join(f"{{{place}}}" for place in places)
    scenario.write_text(f"{tiny_text}\ntopology: {{name: ring}}\nnetwork: {{peers: [{peers}]}}\n")
    Experiment.build(load_scenario(scenario))  # as long as all are there, each edge can be dialled
    assert privdec("certs", str(scenario), "--out", str(tmp_path / "certs")) == 0
    return scenario


def test_nobody_leaves_two_that_only_dial(half_hidden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ring closes over who leaves, so that two would be neighbours of whom neither can dial the other."""
    assert operate(half_hidden, "leave", "--id", "0") == 2
    assert "peers 1 and 3 both have dial: out" in capsys.readouterr().err
    assert operate(half_hidden, "address", "--id", "3", "--address", "10.66.0.4:7100") == 0
    assert operate(half_hidden, "leave", "--id", "0") == 0


def test_who_is_stolen_is_shut_out_with_a_warning(half_hidden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate(half_hidden, "revoke", "--id", "2", "--offline") == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: of those who are left: ")
    assert "peers 1 and 3 both have dial: out" in said
    assert operate(half_hidden, "revoke", "--id", "1", "--offline") == 0
    assert "warning" not in capsys.readouterr().err


def test_who_is_left_goes_on_with_a_warning(
    half_hidden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert operate(half_hidden, "revoke", "--id", "2") == 0
    scenario = load_scenario(half_hidden)
    running_peer(scenario, device_of(scenario, 1, tmp_path / "peer-1", tmp_path / "certs")).close()
    assert "of those who take part now: network.peers: peers 1 and 3 both have dial: out" in caplog.text


def test_one_joins_those_that_only_dial(half_hidden: Path, tmp_path: Path) -> None:
    assert operate(half_hidden, "add", "--address", "10.0.0.5:7100") == 0
    scenario = load_scenario(half_hidden)
    device = replace(device_of(scenario, 4, tmp_path / "peer-4", tmp_path / "certs"), data="own.npz")
    peers = joined_scenario(scenario, device).network.peers
    assert peers is not None
    assert [peer.dial for peer in peers] == [None, "out", None, "out", None]


@pytest.mark.parametrize("anywhere", ["0.0.0.0:7100", "[::]:7100"])
def test_a_member_is_not_at_every_address(anywhere: str, ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such an entry, which nobody can take back, would keep all the others from starting again."""
    for command in (("add",), ("address", "--id", "1")):
        assert operate(ward, *command, "--address", anywhere) == 2
        assert "the others reach it" in capsys.readouterr().err
    assert not (ward.parent / "certs/members").exists()


def test_one_address_has_one_spelling(ward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate(ward, "add", "--address", "[fd00::5]:7100") == 0
    assert operate(ward, "add", "--address", "[fd00:0:0::5]:7100") == 2
    assert "is that of a peer" in capsys.readouterr().err
