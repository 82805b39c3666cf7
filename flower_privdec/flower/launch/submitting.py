"""A run submitted to a SuperLink of one's own, followed to its end; how it ended is asked, for `flwr run` is silent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flower_privdec.errors import RunError
from flower_privdec.flower.launch.superlink import CONNECTION, LocalSuperLink, tail


def submit(
    superlink: LocalSuperLink,
    app: str,
    resources: Mapping[str, int | float],
    run_config: Sequence[str],
    kept: Path,
    poll: Callable[[Path], object],
) -> None:
    """Run an app to its end.

    Args:
        superlink: where to.
        app: its folder, absolute or from the SuperLink's.
        resources: of the simulation, as Flower names them.
        run_config: what is laid over the app's own, each as `flwr run --run-config` takes it.
        kept: where the log is to lie in the end, if its folder is there.
        poll: called with the log, several times a second.

    Raises:
        RunError: it did not complete, with the reason.
    """
    log = superlink.folder / "flower.log"
    command = ["flwr", "run", app, CONNECTION, "--stream"]
    command += [word for each in run_config for word in ("--run-config", each)]
    given = " ".join(f"{key}={value}" for key, value in resources.items())
    process = superlink.popen(*command, "--federation-config", given, output=log)
    try:
        while process.poll() is None:
            poll(log)
            time.sleep(0.1)
        poll(log)
        _check_completed(superlink, log, kept)
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):  # a run that failed at once may have left no folder
            kept.write_bytes(log.read_bytes())


def _check_completed(superlink: LocalSuperLink, log: Path, kept: Path) -> None:
    """Ask the SuperLink how the run ended.

    Raises:
        RunError: when it did not complete, with the reason.
    """
    listing = superlink.call("flwr", "list", CONNECTION, "--format", "json")
    runs: list[dict[str, str]] = []
    with suppress(json.JSONDecodeError):
        runs = json.loads(listing[listing.index("{") :])["runs"] if "{" in listing else []
    if not runs:
        raise RunError(f"`flwr run` did not submit the run:\n{tail(log)}")
    status = runs[0]["status"]
    if status != "finished:completed":
        details = " ".join(runs[0]["status-details"].removeprefix("Simulation failed with exception: ").split())
        where = f"; its log is {kept}" if kept.parent.is_dir() else ""
        raise RunError(f"the Flower run ended as {status}: {details or tail(log)}{where}")
