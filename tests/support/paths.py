"""Where the checkout and its data lie."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SHARED = ROOT.parent / "shared" / "data"


def python_path() -> str:
    """Return the PYTHONPATH for a process: what comes first in this one's does so there, such as a version of Flower."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*filter(None, paths), str(ROOT)])
