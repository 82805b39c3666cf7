"""Where the checkout and its data lie."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SHARED = ROOT.parent / "shared" / "data"


def python_path() -> str:
    """Return the PYTHONPATH for a process, in which another version of Flower still comes first."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*filter(None, paths), str(ROOT)])
