"""Run `privdec` and count what it releases: `python -m tools.soak.release_counter FILE ARGUMENTS`.

A byte is appended to FILE after every private step, when its noise is in and before anything of it can leave; so
whenever the process is killed, what left it is never more than the count, which lacks at most the last step paid for.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from flower_privdec.core.cohort import Cohort


def count_into(path: Path) -> None:
    """Append a byte to a file after every private step that this process takes from now on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    release = Cohort.release_rows_

    def counted(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        release(cohort, *arguments, **options)
        os.write(handle, b".")

    Cohort.release_rows_ = counted  # type: ignore[method-assign, assignment]


def counted_in(path: Path) -> int:
    """Return how many private steps were counted; 0 before the first."""
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    count_into(Path(sys.argv[1]))
    sys.argv = ["privdec", *sys.argv[2:]]
    runpy.run_module("flower_privdec", run_name="__main__", alter_sys=True)
