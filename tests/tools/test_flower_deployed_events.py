"""The app and the lines that the events of a Flower deployment are told by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import python_path

from tools.flower_deployed.events import told, write_app


def test_the_app_has_its_mods_in_order(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    show = (
        "from sklearn_digits.client_app import app\n"
        "print([getattr(mod, '__name__', type(mod).__name__) for mod in app._mods])"
    )
    environment = os.environ | {"EVENTS": str(tmp_path), "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", show], cwd=tmp_path / "app", env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['leaves', 'PeerMod', 'held']"
    assert 'name="digits"' in (tmp_path / "app" / "sklearn_digits" / "server_app.py").read_text()


def test_what_a_log_tells_of_peers() -> None:
    log = (
        "\x1b[92mINFO \x1b[0m:      [ROUND 2/7]\n"
        "\x1b[93mWARNING \x1b[0m:   peer 3 (SuperNode 16) is lost since round 2: its SuperNode gives no sign of life\n"
        "\x1b[92mINFO \x1b[0m:      aggregate_train: 3 of 4 peers trained (peer 3: no answer)\n"
    )
    assert told(log) == [
        "peer 3 (SuperNode 16) is lost since round 2: its SuperNode gives no sign of life",
        "3 of 4 peers trained (peer 3: no answer)",
    ]
