"""A real SuperNode under a guard, with an app that has no mod and sends its data: what reaches the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from paths import python_path
from ports import own_addresses

from flower_privdec.privacy.ledger.segments import read_chain

pytestmark = [pytest.mark.slow, pytest.mark.versions]

FILES = {
    "LICENSE": "Apache-2.0\n",
    "pyproject.toml": """
[project]
name = "raw"
version = "0.1.0"
description = "An app without protection"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "raw.server_app:app"
clientapp = "raw.client_app:app"

[tool.flwr.app.config]
out = ""
""",
    "raw/__init__.py": "",
    "raw/server_app.py": """
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
import numpy as np

app = ServerApp()


@app.main()
def main(grid, context):
    while not list(grid.get_node_ids()):
        time.sleep(0.2)
    node, = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord([np.zeros(4)])})
    reply, = grid.send_and_receive([Message(content, node, "train")])
    arrays = reply.content["arrays"].to_numpy_ndarrays()[0].tolist()
    received = {"arrays": arrays, "metrics": dict(reply.content["metrics"]), "names": list(reply.content)}
    Path("received").write_text(json.dumps(received))
    Path("received").rename(context.run_config["out"])
""",
    "raw/client_app.py": """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import numpy as np

app = ClientApp()


@app.train()
def answer(message, context):
    records = {"arrays": ArrayRecord([np.full(4, 424242.0)]), "metrics": MetricRecord({"num-examples": 424242})}
    return Message(RecordDict(records), reply_to=message)
""",
}


def test_a_supernode_under_a_guard_sends_only_noised_updates(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    state, out = tmp_path / "state", tmp_path / "out.json"
    (tmp_path / "policy.yaml").write_text(
        f"folder: {state}\nepsilon: 1.0e+6\ndelta: 1e-5\nclip_norm: 1\nnoise_multiplier: 0.01\napps: any\n"
    )
    link, node = (int(address.rpartition(":")[2]) for address in own_addresses(2))
    environment = os.environ | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(log: str, *command: object) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{log}.log").open("wb") as file:
            started.append(
                subprocess.Popen(
                    [*map(str, command)],
                    cwd=tmp_path,
                    env=environment,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
        return started[-1]

    def logs() -> str:
        return "\n".join(f"{path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in tmp_path.glob("*.log"))

    try:
        start("link", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", link)
        where = ["--insecure", "--superlink", f"127.0.0.1:{link}", "--port", node]
        start("node", sys.executable, "-m", "flower_privdec", "guard", "policy.yaml", "flower-supernode", *where)
        wait_until(lambda: "SuperNode ID" in (tmp_path / "node.log").read_text(), logs)
        start("run", "flwr", "run", "app", "here", "--stream", "--run-config", f'out="{out}"')
        wait_until(out.exists, logs)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
    received = json.loads(out.read_text())
    assert received["metrics"] == {"num-examples": 1}
    assert received["names"] == ["arrays", "metrics"]
    assert all(abs(value - 0.5) < 0.1 for value in received["arrays"]), received  # of norm 1, with noise of 0.01
    assert len(read_chain(state / "peer-0" / "peer-updates.jsonl")[1]) == 1


def wait_until(holds: Callable[[], bool], logs: Callable[[], str]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, logs()
        time.sleep(0.2)
