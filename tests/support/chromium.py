"""A page in a headless Chromium, if the machine has one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
needs_chromium = pytest.mark.skipif(not PROGRAM, reason="this machine has no Chromium")


def dom_of(address: str, folder: Path, *options: str, seconds: float = 100.0) -> str:
    """Return a page's elements as HTML, after its own script has run for some seconds of its own clock.

    Args:
        folder: an empty one for the browser's files.
    """
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=4000",
    ]
    command = [PROGRAM, *words, *options, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
