"""A SuperLink and SuperNodes on 127.0.0.1, each a process of its own, with TLS between them and pinned identities."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import distributions
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import flwr
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from flower_privdec.flower.launch.supervisor import end_family, family
from flower_privdec.peer.identity import public_key

ROOT = Path(__file__).resolve().parents[2]
MARK = "FLOWER_DEPLOYED"  # names the process of the deployment from which another one descends
PATIENCE = 600.0  # seconds
SERVER_TLS = ["--ssl-ca-certfile", "authority.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]


def flower_version() -> str:
    """Return the version of Flower that is imported, which another one on PYTHONPATH may hide from importlib."""
    site = str(Path(flwr.__file__).parents[1])
    for found in distributions(path=[site]):
        if found.metadata["Name"] in ("flwr", "flwr-nightly"):
            return f"{found.metadata['Name']} {found.version}"
    raise RuntimeError(f"no distribution of Flower lies in {site}")


class Deployment:
    """A SuperLink and SuperNodes, which end with the `with` block.

    Every SuperNode has the public keys of all peers (`known-peers`), so that no relay can introduce another's.

    Args:
        folder: of certificates, logs, database, and the peers' folders; commands run in it.
        nodes: the number of SuperNodes.
        poll: seconds after which a SuperExec looks for a task again.
        variables: further environment variables of all processes, the apps' too.
    """

    def __init__(self, folder: Path, nodes: int, poll: float, variables: dict[str, str]) -> None:
        self.folder = folder
        self.nodes = nodes
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(poll),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
            # Another version of Flower may come first on the path.
            "PYTHONPATH": os.pathsep.join([*filter(None, inherited), str(ROOT)]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            **variables,
        }

        certify(folder)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "authority.pem"}"\n'
        )
        keys = {str(peer): public_key(self.peer_folder(peer)) for peer in range(nodes)}
        (folder / "known-peers.json").write_text(json.dumps(keys))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._processes)):
            self.end(name)

    def peer_folder(self, peer: int) -> Path:
        """Return the folder of a peer's state, ledger and identity."""
        return self.folder / "peers" / f"peer-{peer}"

    # --- processes ---

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """Start a command; what it prints is appended to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as file:
            self._processes[name] = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=self.environment | {MARK: self._mark(name)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._processes[name]

    def start_superlink(self) -> None:
        """Start the SuperLink on its port and its database, which a second one goes on with."""
        host = ["--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "superlink.db"]
        self.start("superlink", "flower-superlink", *SERVER_TLS, *host)
        wait_for(self.port)

    def start_node(self, peer: int, *guard: object) -> None:
        """Start a peer's SuperNode, and wait until the SuperLink knows it.

        Args:
            peer: its number.
            guard: the words before the command, such as those of `privdec guard`.
        """
        settings = {
            "partition-id": str(peer),
            "num-partitions": str(self.nodes),
            "known-peers": f'"{self.folder / "known-peers.json"}"',
        }
        if not guard:  # a guard's policy names the folder
            settings["folder"] = f'"{self.folder / "peers"}"'
        node_config = " ".join(f"{key}={value}" for key, value in settings.items())
        link = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "authority.pem"]
        own = ["--port", free_port(), *SERVER_TLS, "--node-config", node_config]

        name = f"node-{peer}"
        connected = self.log(name).count("SuperNode ID")
        process = self.start(name, *guard, "flower-supernode", *link, *own)

        def is_connected() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended: {self.log(name)[-1500:]}")
            return self.log(name).count("SuperNode ID") > connected

        self.wait_until(is_connected, f"{name} is connected")

    def kill(self, name: str) -> None:
        """Kill a process by signal 9, and no other one: what it has started is left to itself."""
        self._processes[name].kill()
        self._processes[name].wait()

    def is_left(self, name: str) -> bool:
        """Return whether any process is left of what was started under a name."""
        return bool(family(self._processes[name].pid, self._mark(name)))

    def end(self, name: str) -> None:
        """End a process by SIGTERM, and then what is left of all that it has started."""
        process = self._processes[name]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        end_family(process, self._mark(name))

    def _mark(self, name: str) -> str:
        # Flower starts SuperExecs in sessions of their own, so that their environment must say whose they are.
        return f"{self.folder}:{name};"

    # --- Flower's commands ---

    def flwr(self, *words: object) -> str:
        """Run `flwr` to its end, and return what it prints; raises RuntimeError if it fails."""
        command = ["flwr", *(str(word) for word in words)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def run_of(self, started: int) -> dict[str, Any]:
        """Return what `flwr list` says of a run, by how many were started before it."""
        answer = json.loads(self.flwr("list", "here", "--format", "json"))
        runs = sorted(answer["runs"], key=lambda run: str(run["pending-at"]))
        return dict(runs[started])

    # --- waiting ---

    def log(self, name: str) -> str:
        """Return what a process has printed; nothing if it has not been started."""
        path = self.folder / f"{name}.log"
        if not path.exists():
            return ""
        return path.read_text(errors="replace")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; raises TimeoutError with the logs' ends after a while."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                names = [path.stem for path in self.folder.glob("*.log")]
                ends = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in names)
                raise TimeoutError(f"{ends}\nafter {PATIENCE:g} s not: {what}")
            time.sleep(0.1)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until something listens on a port of 127.0.0.1; raises TimeoutError after a while."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"nobody listens on port {port}")


def certify(folder: Path) -> None:
    """Write an authority's certificate, and a certificate of 127.0.0.1 by it with its key."""
    now = datetime.now(UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])

    for name in ("authority", "server"):
        key = authority_key
        if name == "server":
            key = ec.generate_private_key(ec.SECP256R1())
            private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            (folder / "server.key").write_bytes(private)

        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder(authority, subject, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(name == "authority", None), critical=True)
        made = made.add_extension(here, critical=False)
        (folder / f"{name}.pem").write_bytes(made.sign(authority_key, SHA256()).public_bytes(Encoding.PEM))
