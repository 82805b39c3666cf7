"""A SuperLink and four SuperNodes as real processes, over TLS: a mesh of 40 rounds with the engine's numbers."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ports import own_addresses
from safetensors.numpy import load_file

from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import parse_scenario
from flower_privdec.scenario.loading import parse_app_scenario

ROUNDS, N = 12, 3
SCENARIO = f"""
name: deployed
n_peers: {N}
rounds: {ROUNDS}
data: {{dataset: digits, batch: {{size: 12}}}}
model: {{name: softmax}}
algorithm: {{name: sgp, learning_rate: 0.1}}
privacy: none
"""
PYPROJECT = """
[project]
name = "deployed"
version = "0.1.0"
description = "An app for a test"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "privdec"

[tool.flwr.app.components]
serverapp = "deployed.server_app:app"
clientapp = "deployed.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
"""
SERVER = f"""
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flower_privdec.flower import Mesh
from deployed.client_app import experiment

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = Mesh(
        name="deployed", mode="synchronous", final_mixing=0, fraction_evaluate=0.0, patience=800.0
    )
    arrays = ArrayRecord(experiment.module.state_dict())
    strategy.start(grid, arrays, num_rounds={ROUNDS}, timeout=800)
    print("the mesh is done", flush=True)
"""
CLIENT = f'''
import copy
import time

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from flower_privdec.experiment import Experiment
from flower_privdec.flower import PeerMod, peer_folder
from flower_privdec.scenario import parse_scenario

torch.set_num_threads(1)
experiment = Experiment.build(parse_scenario("""{SCENARIO}"""))
batches = experiment.cohort().data
app = ClientApp(mods=[PeerMod()])


@app.train()
def train(message, context):
    peer, done = context.node_config["partition-id"], message.content["config"]["server-round"]
    with (peer_folder() / "times.txt").open("a") as file:
        file.write(f"{{time.time()}}\\n")
    module = copy.deepcopy(experiment.module)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batch = batches.batch(done - 1, [peer])
    losses = functional.cross_entropy(module(batch.x[0]), batch.y[0], reduction="none")
    gradients = torch.autograd.grad((losses * batch.weight[0]).sum() / 12, list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    return Message(RecordDict({{"arrays": ArrayRecord(module.state_dict())}}), reply_to=message)
'''


class Deployment:
    """A SuperLink and SuperNodes in a folder, which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            until = time.monotonic() + 10
            while any(each.poll() is None for each in self.processes) and time.monotonic() < until:
                time.sleep(0.1)


def write_certificate(folder: Path) -> None:
    """Write link.pem and link.key, by which a SuperLink on this machine is known; it is its own authority."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "link")])
    now, here = datetime.now(UTC), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "link.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "link.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))


def wait_for(port: int) -> None:
    """Wait until somebody listens on a port of this machine."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on port {port}")


@contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Yield a SuperLink over TLS and SuperNodes that have an address and certificates."""
    found = Deployment(folder)
    (folder / "home").mkdir()
    write_certificate(folder)
    link, *runtime = own_addresses(1 + N)
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "dep"\n\n[superlink.dep]\naddress = "{link}"\n'
        f'root-certificates = "{folder / "link.pem"}"\n'
    )
    scenario = parse_app_scenario(f"{{name: deployed, n_peers: {N}, rounds: 1, privacy: none}}")
    make_certificates(scenario, folder / "certs")
    try:
        tls = "--ssl-ca-certfile link.pem --ssl-certfile link.pem --ssl-keyfile link.key"
        port = link.rpartition(":")[2]
        found.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", port, *tls.split())
        wait_for(int(port))
        for peer, (address, api) in enumerate(zip(own_addresses(N), runtime, strict=True)):
            config = f'partition-id={peer} num-partitions={N} folder="{folder}" address="{address}"'
            config += f' certificates="{folder / "certs"}"'
            options = f"--superlink {link} --root-certificates link.pem --port {api.rpartition(':')[2]}".split()
            found.start(f"node-{peer}", "flower-supernode", *options, "--node-config", config)
        yield found
    finally:
        found.end()


def write_app(folder: Path) -> Path:
    package = folder / "app" / "deployed"
    package.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "server_app": SERVER, "client_app": CLIENT}.items():
        (package / f"{name}.py").write_text(text)
    return folder / "app"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("flower-superlink", path=str(Path(sys.executable).parent)) is None, reason="no flwr")
def test_a_mesh_over_tls_matches_the_engine(tmp_path, capsys):
    app = write_app(tmp_path)
    with deployment(tmp_path) as deployed:
        run = deployed.start("run", "flwr", "run", str(app), "dep", "--stream")
        until = time.monotonic() + 800
        while "the mesh is done" not in deployed.log("run") and time.monotonic() < until:
            assert run.poll() is None or "the mesh is done" in deployed.log("run"), deployed.log("run")
            time.sleep(0.5)
        said = deployed.log("run")
    assert "the mesh is done" in said, said
    assert f"{N} of {N} peers are done" in said
    experiment = Experiment.build(parse_scenario(SCENARIO))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(ROUNDS):
        engine.round()
    rows = engine.state.rows["x"] / engine.state.rows["w"][:, None]
    names = list(experiment.module.state_dict())
    for peer, row in enumerate(rows):
        model = load_file(tmp_path / f"peer-{peer}" / "mesh-deployed" / "model.safetensors")
        np.testing.assert_allclose(np.concatenate([model[name].ravel() for name in names]), row, atol=1e-5)
    times = [float(line) for line in (tmp_path / "peer-0" / "times.txt").read_text().splitlines()]
    assert len(times) == ROUNDS
    with capsys.disabled():
        print(f"\n{(times[-1] - times[0]) / (ROUNDS - 1):.4f} s a round over TLS, {N} SuperNodes on this machine")
