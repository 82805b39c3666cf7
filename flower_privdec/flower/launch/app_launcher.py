"""`privdec flower-run`: any Flower app in Flower's simulation, by a SuperLink of its own that is gone in the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from flower_privdec.common.folder_lock import FolderLock
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.flower.launch.in_process import read_app
from flower_privdec.flower.launch.launcher import check_machine
from flower_privdec.flower.launch.submitting import submit
from flower_privdec.flower.launch.superlink import INSTALL, LocalSuperLink, tail
from flower_privdec.flower.mods.peer_place import FOLDER

ROUND = re.compile(rb"\[ROUND (\d+)/(\d+)\]")  # as Flower's strategies and ours say it
LOG = "flower.log"
OnRound = Callable[[int, int], object]


def run_flower_app(
    app: Path,
    out: Path,
    *,
    n_supernodes: int = 8,
    cpus: int = 1,
    gpus: float = 0.0,
    run_config: Sequence[str] = (),
    on_round: OnRound | None = None,
) -> str:
    """Run a Flower app to its end, in the Python environment of this process.

    Args:
        app: the app's folder; nothing in it is changed.
        out: the folder in which the app's processes run: what they save by a relative path is there afterwards, with
            the log, and the peers' own folders of strategies of this package.
        n_supernodes: how many SuperNodes are simulated.
        cpus, gpus: what each ClientApp gets.
        run_config: laid over the app's own, as KEY=VALUE.
        on_round: called with the round that began and how many there are, where the app's log says so.

    Returns:
        The last lines of the log.

    Raises:
        ScenarioError: the input is wrong, or Flower's simulation is not installed; nothing was started.
        RunError: the run failed.
    """
    if find_spec("ray") is None:
        raise ScenarioError(f"Flower's simulation needs ray, which is not installed: {INSTALL}")
    _check_config(read_app(app)["config"], run_config)
    if n_supernodes < 1:
        raise ScenarioError(f"n_supernodes={n_supernodes} must be >= 1")
    check_machine(cpus, gpus)
    lock, out = FolderLock(out), out.absolute()
    lock.take()
    resources = {"num-supernodes": n_supernodes, "client-resources-num-cpus": cpus, "client-resources-num-gpus": gpus}
    try:
        with LocalSuperLink(out, {FOLDER: str(out / "peers")}) as superlink:
            submit(superlink, str(app.absolute()), resources, run_config, out / LOG, _Rounds(on_round))
    except RunError as error:
        raise RunError(f"{error}\nThe last lines of {out / LOG}:\n{tail(out / LOG)}") from error
    finally:
        lock.release()
    return tail(out / LOG)


def _check_config(known: dict[str, object], given: Sequence[str]) -> None:
    for each in given:
        key, equals, _ = each.partition("=")
        if not equals or key.strip() not in known:
            raise ScenarioError(f"run-config {each!r} must be KEY=VALUE with a key of the app's: {', '.join(known)}")


class _Rounds:
    """Passes on which round a log is in, when that changes."""

    def __init__(self, on_round: OnRound | None) -> None:
        self._on_round, self._last = on_round, (0, 0)

    def __call__(self, log: Path) -> None:
        found = ROUND.findall(log.read_bytes()) if self._on_round and log.exists() else []
        latest = (int(found[-1][0]), int(found[-1][1])) if found else self._last
        if self._on_round and latest != self._last:
            self._last = latest
            self._on_round(*latest)
