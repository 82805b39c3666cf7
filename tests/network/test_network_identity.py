"""Peers know each other by their certificates: every way in which one does not fit is refused, and named."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_line import privdec
from cryptography.x509.oid import ExtendedKeyUsageOID
from networked import LONG
from raising import raises
from streaming import linked, served

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import Authority, Credentials, certificate_problem, credentials_of
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario import load_scenario

NOW = datetime.now(UTC)
MEMBERS = {"peer-0.tiny": 0, "peer-1.tiny": 1}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


def test_a_call_is_answered_and_its_caller_known(authority: Authority) -> None:
    said = b"x" * (3 << 20)
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-1.tiny")) as link,
    ):
        assert link.call([said], LONG) == b"1:" + said
        assert link.call([b""], LONG) == b"1:"
        assert link.diagnosis(LONG).endswith("can be reached")


def test_the_cap_ends_a_stream(authority: Authority) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS, 1000) as server,
        linked(server, authority.issue("peer-1.tiny")) as link,
    ):
        with raises(RefusedError, "call.too-long", names="peer 1 .* 1,000"):
            link.call([b"x" * 1001], LONG)
        assert link.call([b"x" * 1000], LONG)
        with raises(RefusedError, "call.too-long"):
            link.call([bytes(8 << 20)], LONG)


STRANGERS = {
    "another authority": lambda authority: Authority.create("tiny").issue("peer-1.tiny"),
    "expired": lambda authority: authority.issue("peer-1.tiny", NOW - timedelta(days=3), 2),
    "not yet valid": lambda authority: authority.issue("peer-1.tiny", NOW + timedelta(days=1), 2),
    "a server's alone": lambda authority: authority.issue("peer-1.tiny", usages=[ExtendedKeyUsageOID.SERVER_AUTH]),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_not_answered(authority: Authority, stranger: str) -> None:
    shown = replace(STRANGERS[stranger](authority), authority=authority.pem)
    with served(authority.issue("peer-0.tiny"), MEMBERS) as server, linked(server, shown) as link:
        with pytest.raises(UnreachableError):
            link.call([b"hello"], 2)
        assert "refuses this peer's certificate" in link.diagnosis(LONG)


@pytest.mark.parametrize("stranger", ["another authority", "expired", "not yet valid"])
def test_a_called_peer_must_show_a_certificate(authority: Authority, stranger: str) -> None:
    shown = replace(STRANGERS[stranger](authority), authority=authority.pem)
    causes = {"another authority": "signed", "expired": "expired", "not yet valid": "is valid from"}
    with served(shown, MEMBERS) as server, linked(server, authority.issue("peer-0.tiny"), "peer-1.tiny") as link:
        with pytest.raises(UnreachableError):
            link.call([b"hello"], 2)
        assert "its certificate is refused here" in link.diagnosis(LONG)
        assert causes[stranger] in link.diagnosis(LONG)


def test_another_peer_at_an_address_is_not_spoken_to(authority: Authority) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-1.tiny"), "peer-9.tiny") as link,
    ):
        with pytest.raises(UnreachableError):
            link.call([b"hello"], 2)
        assert "its certificate is refused here" in link.diagnosis(LONG)


@pytest.mark.parametrize("identity", ["peer-7.tiny", "peer-1.other"])
def test_a_member_of_another_scenario_is_refused_by_name(authority: Authority, identity: str) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue(identity)) as link,
        raises(RefusedError, "call.stranger", names=identity),
    ):
        link.call([b"hello"], LONG)


def test_a_certificate_that_expires_while_connected_ends_the_talk(authority: Authority) -> None:
    times = [datetime.now(UTC), NOW + timedelta(days=3 * 365)]
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS, clock=lambda: times.pop(0)) as server,
        linked(server, authority.issue("peer-1.tiny")) as link,
    ):
        assert link.call([b"hello"], LONG) == b"1:hello"
        with raises(RefusedError, "certificate.expired", names="peer 1"):
            link.call([b"hello"], LONG)


def test_nobody_is_there(authority: Authority) -> None:
    with served(authority.issue("peer-0.tiny"), MEMBERS) as server:
        port = server.port
    link = StreamConnection(f"127.0.0.1:{port}", "peer-0.tiny", authority.issue("peer-1.tiny"), 1000)
    with raises(UnreachableError, "call.unanswered", names=r"peer-0\.tiny at 127.0.0.1"):
        link.call([b"hello"], 0.5)
    assert "Connection refused" in link.diagnosis(LONG)
    link.close()


def test_an_address_is_listened_on_once(authority: Authority) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        raises(RunError, "listen.in-use"),
        served(authority.issue("peer-1.tiny"), MEMBERS, address=f"127.0.0.1:{server.port}"),
    ):
        pass


def test_files_are_read_and_checked(authority: Authority, tmp_path: Path) -> None:
    made, other = authority.issue("peer-1.tiny"), authority.issue("peer-1.tiny")
    names = [tmp_path / name for name in ("peer.pem", "peer.key", "authority.pem")]
    for path, content in zip(names, (made.certificate, made.key, made.authority), strict=True):
        path.write_bytes(content)
    assert Credentials.read(*names, "peer-1.tiny") == made
    with raises(ScenarioError, "certificate.identity", names=r"peer-1\.tiny.*peer-2\.tiny"):
        Credentials.read(*names, "peer-2.tiny")
    names[1].write_bytes(other.key)
    with raises(ScenarioError, "certificate.key", names=r"peer\.key.*peer\.pem"):
        Credentials.read(*names, "peer-1.tiny")
    names[1].write_bytes(b"no key")
    with raises(ScenarioError, "certificate.key", names=r"peer\.key"):
        Credentials.read(*names, "peer-1.tiny")
    names[0].write_bytes(b"no certificate")
    with raises(ScenarioError, "certificate.unreadable", names=r"peer\.pem"):
        Credentials.read(*names, "peer-1.tiny")
    with raises(ScenarioError, "certificate.missing", names=r"gone\.pem"):
        Credentials.read(tmp_path / "gone.pem", *names[1:], "peer-1.tiny")


@pytest.mark.parametrize(
    ("stranger", "cause"),
    [
        ("another authority", "CN=tiny authority signed it, which is not one of the authorities"),
        ("expired", "expired on"),
        ("not yet valid", "is valid from"),
        ("a server's alone", "not for both clients and servers"),
    ],
)
def test_the_fault_of_a_certificate_is_named(authority: Authority, stranger: str, cause: str) -> None:
    shown = STRANGERS[stranger](authority)
    problem = certificate_problem(shown.certificate, authority.pem, "peer-1.tiny")
    assert problem is not None
    assert cause in str(problem)
    assert certificate_problem(authority.issue("peer-1.tiny").certificate, authority.pem, "peer-1.tiny") is None


# --- the command ---


def test_certificates_are_made_once_and_kept(
    tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, out = tmp_path / "tiny.yaml", tmp_path / "certs"
    scenario.write_text(tiny_text)
    assert privdec("certs", str(scenario), "--out", str(out)) == 0
    assert capsys.readouterr().out.count("made  peer-") == 4
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {path.name for path in out.iterdir() if path.stat().st_mode & 0o077 == 0} == {
        "authority.key",
        *(f"peer-{peer}.key" for peer in range(4)),
    }
    (out / "peer-2.key").unlink()
    assert privdec("certs", str(scenario), "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "made  peer-2.tiny" in said
    assert said.count("kept") == 3
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"peer-2.pem", "peer-2.key"}
    for peer in range(4):
        assert credentials_of(load_scenario(scenario), out, peer).authority == before["authority.pem"]


def test_an_authority_of_ones_own_signs(tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, own = tmp_path / "tiny.yaml", Authority.create("hospital")
    scenario.write_text(tiny_text)
    own.write(tmp_path / "ca.pem", tmp_path / "ca.key")
    given = ["--authority", str(tmp_path / "ca.pem"), "--authority-key", str(tmp_path / "ca.key")]
    assert privdec("certs", str(scenario), "--out", str(tmp_path / "certs"), *given) == 0
    assert not (tmp_path / "certs" / "authority.key").exists()
    assert credentials_of(load_scenario(scenario), tmp_path / "certs", 1).authority == own.pem
    assert privdec("certs", str(scenario), "--out", str(tmp_path / "other"), *given[:2]) == 2
    assert "give both --authority and --authority-key" in capsys.readouterr().err
