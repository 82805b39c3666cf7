"""The same task in p2pfl, pfl-research, plain Flower and flower_privdec, each in an environment of its own.

    python -m tools.side_by_side --data FOLDER --work FOLDER
    python -m tools.side_by_side --data FOLDER --work FOLDER --only flower_privdec

creates the missing environments (some 20 GB in all), runs the task in each, and writes results/side-by-side. Rows that
exist are kept, unless --only names them or --again is set. Run it with a Python that has flower_privdec installed; it
downloads packages and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.side_by_side import results
from tools.side_by_side.accountant import exact_epsilon
from tools.side_by_side.environments import OWN, ROOT, make, version
from tools.side_by_side.measuring import Measured, measure
from tools.side_by_side.task import CONTESTANTS, LIMIT, RUNNERS, Contestant, Place, Task, chosen, write

NOT_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV")  # each tool has its own defaults
CLAIMED_FOR = {"example": "the whole run", "local": "one message", "central": "the whole run"}
OTHERWISE = {"flower-opacus": "one round", "pfl-research-local": "the whole run"}


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and what was started with it
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    for name in NOT_PASSED_ON:
        os.environ.pop(name, None)
    stored = results.load() if results.FILE.exists() else None
    for contestant in chosen(given.only):
        exists = stored is not None and any(row.name == contestant.name and not row.failed for row in stored.rows)
        if exists and not (given.only or given.again):
            continue
        row = measured(contestant, given.data.resolve(), given.work.resolve(), given.cores)
        before = stored.rows if stored is not None else ()
        stored = results.Results(machine(), given.cores, Task("").delta, before)
        stored = stored.with_row(row, [one.name for one in CONTESTANTS])
        results.save(stored)

    assert stored is not None
    print(results.tables(stored))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="side_by_side", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds MNIST/raw")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the environments and their output")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="measure only this row or tool, again if it exists"
    )
    parser.add_argument("--again", action="store_true", help="measure existing rows again")
    parser.add_argument("--cores", type=int, default=2, help="how many cores the tools may use")
    given = parser.parse_args()
    if given.work.resolve().is_relative_to(ROOT):
        parser.error(f"--work {given.work} must lie outside the repository")
    if not (given.data / "MNIST" / "raw" / "train-images-idx3-ubyte").exists():
        parser.error(f"--data {given.data} must hold MNIST/raw/train-images-idx3-ubyte and the other three files")
    return given


def machine() -> str:
    """Return a description of this machine."""
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"


def measured(contestant: Contestant, data: Path, work: Path, cores: int) -> results.Row:
    """Run the task once with a contestant; return its figures, or why there are none."""
    print(f"{contestant.name}: its environment", file=sys.stderr)
    binaries = make(contestant.tool, work / "environments")
    folder = work / "runs" / contestant.name
    clear(folder)
    place = Place(binaries, folder, folder / "task.json")
    task = contestant.task(data, folder / "outcome.json", cores)
    write(task, place.task)
    print(f"{contestant.name}: running, at most {LIMIT / 60:.0f} minutes", file=sys.stderr)
    took = measure(contestant.command(place), folder, folder / "log.txt", LIMIT, variables(place))
    return row_of(contestant, task, took, version(binaries, contestant.package), folder / "log.txt")


def clear(folder: Path) -> None:
    """Create a folder, without the files of an earlier run of this script."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def variables(place: Place) -> dict[str, str]:
    """Return the environment of a contestant: its commands first, its own Flower, and nothing that phones home."""
    return {
        "SIDE_BY_SIDE_TASK": str(place.task),
        "PATH": f"{place.binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(RUNNERS),
        "FLWR_HOME": str(place.folder / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # or Ray ends its workers when others fill the machine's memory
    }


def free_port() -> str:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def row_of(contestant: Contestant, task: Task, took: Measured, of: str, log: Path) -> results.Row:
    """Return the row of the measurement and of the contestant's outcome."""
    who = {key: getattr(contestant, key) for key in ("name", "tool", "says", "privacy", "protects")}
    times = {key: asdict(took)[key] for key in ("seconds", "cpu_seconds", "peak_bytes", "load")}
    outcome = Path(task.outcome)
    if took.stopped or not outcome.exists():
        why = took.stopped or f"failed with status {took.status}"
        print(f"{contestant.name}: {why}; see {log}", file=sys.stderr)
        return results.Row(**who, **times, version=of, seconds_a_round=None, failed=why)

    outcome_facts = json.loads(outcome.read_text())
    return results.Row(
        **who,
        **times,
        version=of,
        seconds_a_round=outcome_facts["training_seconds"] / task.rounds,
        accuracy=outcome_facts["accuracy"],
        **privacy(contestant, task, outcome_facts),
    )


def privacy(contestant: Contestant, task: Task, outcome_facts: dict[str, Any]) -> dict[str, Any]:
    """Return a contestant's claimed ε, and that of an exact accountant; for this tool both are its accountant's."""
    if contestant.privacy == "none":
        return {}
    claimed = outcome_facts["claimed_epsilon"]
    return {
        "claimed_epsilon": claimed,
        "claimed_for": OTHERWISE.get(contestant.name, CLAIMED_FOR[contestant.privacy]),
        "exact_epsilon": claimed if contestant.tool == OWN else exact_epsilon(task, outcome_facts["noise_multiplier"]),
    }


if __name__ == "__main__":
    main()
