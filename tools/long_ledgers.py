"""What a long ledger takes to open: `python -m tools.long_ledgers ROUNDS ...`.

It writes the ledger of a deployed peer, a line a round (not flushed, to be quick), and opens it in another process.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.events import Release, Spend

RUN = RunName("benchmark", "none", "none")


def write_long(folder: Path, rounds: int) -> None:
    """Write the ledger of a deployed peer that reserves one step at a time."""
    release = Release("poisson", 0.1, 450, 45, 2.0, rounds)
    accounts = [Account(0, (Spend(0, rounds, release),), None, 1e-5)]
    os.fsync = lambda fd: None
    with CohortLedger(folder, "synthetic", RUN, accounts, block=1, fresh=True) as ledger:
        ledger.name_lines(1 << 63)
        for step in range(rounds):
            ledger.charge(step, np.zeros(1, dtype=np.int64))


def time_opening(folder: Path) -> str:
    """Open a ledger, and return CPU seconds and by how much the process grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with Ledger(folder, "synthetic"):
        seconds = time.process_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"opens in {seconds:.2f} CPU seconds and {grown:.0f} MiB"


def main(words: list[str]) -> None:
    """Write and open ledgers of some rounds, or open one in a folder."""
    for word in words:
        if not word.isdecimal():
            print(time_opening(Path(word)))
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_long(Path(folder), int(word))
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
            opened = subprocess.run(
                [sys.executable, "-m", "tools.long_ledgers", folder], capture_output=True, text=True, check=True
            )
            print(f"{int(word):,} rounds: {size / int(word):.0f} bytes a round, {opened.stdout.strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])
