"""Errors of a device's owner name their own cause: addresses, names, clocks, certificates and disks."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from networked import LONG
from raising import raises
from streaming import served

from flower_privdec.common import files
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import disk_error, sync, write_atomically
from flower_privdec.network.transport import failures
from flower_privdec.network.transport.failures import calling_error, identity_at, listening_error
from flower_privdec.network.transport.tls import Authority, Credentials

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


MEMBERS = {"peer-0.tiny": 0, "peer-1.tiny": 1}


# --- an address to listen on


@pytest.mark.parametrize(
    ("host", "code"), [("127.0.0.1", "in-use"), ("203.0.113.7", "not-here"), ("no-such-host.invalid", "unknown")]
)
def test_an_address_that_cannot_be_listened_on(authority: Authority, host: str, code: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        with (
            raises(RunError, f"listen.{code}", names=address),
            served(authority.issue("peer-0.tiny"), MEMBERS, address=address),
        ):
            pass


def test_a_port_that_this_user_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(failures.socket.socket, "bind", forbidden)
    error = listening_error("127.0.0.1:443")
    assert error.code == "listen.forbidden"
    assert "127.0.0.1:443" in str(error)


# --- an address to call


def code_of(address: str, credentials: Credentials, identity: str | None = "peer-0.tiny") -> str | None:
    error = calling_error(address, identity, credentials, LONG)
    assert error is None or address in str(error)
    return None if error is None else error.code


def test_only_an_absent_peer_is_an_error(authority: Authority) -> None:
    with served(authority.issue("peer-0.tiny"), MEMBERS) as server:
        address = f"127.0.0.1:{server.port}"
        assert code_of(address, authority.issue("peer-1.tiny")) is None
        with raises(RunError, "certificate.authority", names=address):  # which Python raises as a ValueError too
            identity_at(address, Authority.create("other").issue("peer-1.tiny"))
    assert code_of(address, authority.issue("peer-1.tiny")) == "call.refused"
    with raises(RunError, "call.refused", names=address):
        identity_at(address, authority.issue("peer-1.tiny"))


def test_a_name_without_an_address(authority: Authority) -> None:
    assert code_of("no-such-host.invalid:7100", authority.issue("peer-1.tiny")) == "call.unknown"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EHOSTUNREACH, "no-route"),
        (errno.ENETUNREACH, "no-route"),
        (errno.ETIMEDOUT, "silent"),
        (errno.EACCES, "forbidden"),
        (errno.EPERM, "forbidden"),
        (errno.EMFILE, "few-descriptors"),
    ],
)
def test_a_way_that_is_not_there(authority: Authority, number: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(failures.socket, "create_connection", fail)
    assert code_of("10.0.0.7:7100", authority.issue("peer-1.tiny")) == f"call.{code}"


def test_another_service_at_the_address_is_named(authority: Authority) -> None:
    from threading import Thread

    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with closing(other.accept()[0]) as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = Thread(target=answer)
        thread.start()
        assert code_of(f"127.0.0.1:{other.getsockname()[1]}", authority.issue("peer-1.tiny")) == "call.no-tls"
        thread.join()


Issue = Callable[[Authority], Credentials]
CERTIFICATES: dict[str, tuple[Issue, str]] = {
    "early": (lambda authority: authority.issue("peer-0.tiny", NOW + timedelta(days=1), 2), "set that clock"),
    "expired": (lambda authority: authority.issue("peer-0.tiny", NOW - timedelta(days=9), 2), "makes a new one"),
    "identity": (lambda authority: authority.issue("peer-1.tiny"), "peer-1.tiny, not for peer-0.tiny"),
    "authority": (lambda _: Authority.create("other").issue("peer-0.tiny"), "other authority signed it"),
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_a_wrong_certificate_is_named_by_both_sides(authority: Authority, case: str, tmp_path: Path) -> None:
    """A clock before the certificate's first day is set; a new certificate would not be valid either."""
    issue, remedy = CERTIFICATES[case]
    wrong = issue(authority)
    with served(wrong, MEMBERS) as server:
        error = calling_error(f"127.0.0.1:{server.port}", "peer-0.tiny", authority.issue("peer-1.tiny"), LONG)
    assert error is not None
    assert error.code == f"certificate.{case}"
    assert remedy in str(error)
    paths = [tmp_path / name for name in ("certificate", "key", "authority")]
    for path, content in zip(paths, (wrong.certificate, wrong.key, authority.pem), strict=True):
        path.write_bytes(content)
    with raises(ScenarioError, f"certificate.{case}", names=remedy) as caught:
        Credentials.read(*paths, "peer-0.tiny")
    assert str(paths[0]) in str(caught.value)
    assert case != "early" or "privdec certs" not in str(caught.value)


# --- a disk


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "forbidden"),
        (errno.EIO, "failed"),
        (errno.EMFILE, "few-descriptors"),
    ],
)
def test_an_unwritable_disk_is_named_with_its_file(
    number: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system's error names none, as those of writing and flushing do."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    for action in (lambda: write_atomically(tmp_path / "checkpoint-0", b"state"), lambda: sync(tmp_path)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            action()
        error = disk_error(caught.value)
        assert error.code == f"disk.{code}"
        assert str(tmp_path) in str(error)
    assert not (tmp_path / "checkpoint-0").exists()
