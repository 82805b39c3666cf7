"""The strategies on a deployment: a SuperLink and SuperNodes as processes of their own, with TLS between them."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec
from paths import ROOT, python_path
from ports import own_addresses

from flower_privdec.privacy.ledger.segments import read_chain

pytestmark = pytest.mark.slow

REPOSITORY = ROOT
APP = REPOSITORY / "simulations" / "adapted-quickstart-sklearn" / "after"
PEERS, ROUNDS = 2, 1


def certify(folder: Path) -> None:
    """Write an authority's certificate, and one with its key for 127.0.0.1."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "localhost")]
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    for name, key, file in zip(names, keys, ("authority", "server"), strict=True):
        made = x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(file == "authority", None), critical=True)
        made = made.add_extension(here, critical=False)
        (folder / f"{file}.pem").write_bytes(made.sign(keys[0], hashes.SHA256()).public_bytes(serial.Encoding.PEM))
    private = keys[1].private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
    (folder / "server.key").write_bytes(private)


def free_port() -> int:
    return int(own_addresses(1)[0].rpartition(":")[2])


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a Flower command, all of which end with the test."""
    own = {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": python_path(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(log: str, *command: object) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{log}.log").open("wb") as file:
            process = subprocess.Popen(
                [*map(str, command)],
                cwd=tmp_path,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        process.terminate()
    for process in reversed(started):
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.versions
def test_supernodes_behind_tls_train_charge_and_seal(
    flower: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    certify(tmp_path)
    port = free_port()
    tls = ["--ssl-ca-certfile", "authority.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    flower("superlink", "flower-superlink", *tls, "--host", "127.0.0.1", "--port", port)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{tmp_path / "authority.pem"}"\n'
    )
    wait_for(port)
    for peer in range(PEERS):
        where = f'partition-id={peer} num-partitions={PEERS} folder="{tmp_path / "peers"}"'
        flower(
            f"node-{peer}", "flower-supernode", "--root-certificates", "authority.pem", *tls,
            "--superlink", f"127.0.0.1:{port}", "--port", free_port(), "--node-config", where,
        )  # fmt: skip
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    run = flower("run", "flwr", "run", "app", "here", "--stream", "--run-config", f"num-server-rounds={ROUNDS}")
    run.wait(800)
    said = (tmp_path / "run.log").read_text(errors="replace")
    assert f"{PEERS} of {PEERS} peers trained" in said, said[-3000:]
    assert "Shares are sealed between the peers" in said
    for peer in range(PEERS):
        assert len(read_chain(tmp_path / "peers" / f"peer-{peer}" / "peer-updates.jsonl")[1]) == ROUNDS


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"nobody listens on port {port}")
