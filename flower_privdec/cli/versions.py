"""The versions that a report of a fault needs: `privdec --version`."""

from __future__ import annotations

import platform
import runpy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from flower_privdec import __version__

# What computes, and what carries messages; all but NumPy may be absent, as at a small peer.
DISTRIBUTIONS = ("torch", "numpy", "numba", "flwr")
NOT_INSTALLED = "not installed"


def versions_text() -> str:
    """Return a line for each version; nothing of what is named is imported but the formats of messages."""
    from flower_privdec.network.transport.transport import STREAMS
    from flower_privdec.pushsum.frames import VERSION

    rows = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    for name in DISTRIBUTIONS:
        try:
            rows[name] = _torch_build() if name == "torch" else version(name)
        except PackageNotFoundError:
            rows[name] = NOT_INSTALLED

    # Peers whose numbers differ refuse each other.
    rows["frames"] = str(VERSION)
    rows["streams"] = str(STREAMS)

    width = max(map(len, rows))
    return "\n".join([f"privdec {__version__}", *(f"{name:{width}} {value}" for name, value in rows.items())])


def _torch_build() -> str:
    """Return torch's version with its build, as 2.10.0+cpu, which the installed metadata may lack.

    Raises:
        PackageNotFoundError: torch is not installed.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise PackageNotFoundError("torch")

    # Importing torch takes seconds; this file of it is assignments only.
    names = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    return str(names["__version__"])
