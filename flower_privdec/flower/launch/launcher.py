"""Run a scenario or a Flower app by `flwr run`, on a SuperLink of its own that is gone afterwards.

`flower_run` (a scenario) and `run_flower_app` (any app) both use a `LocalSuperLink`: a temporary folder, a SuperLink
that listens on this machine, and a supervisor that ends it. What of flwr (1.41 to 1.43) it works around:

- `flwr run` starts a SuperLink that stays, with no command to stop it: so this one has a home, a port and a supervisor.
- It installs an app's dependencies anew for every run, torch included, unless a variable is set when the SuperLink
  starts.
- `flwr run --stream` exits with 0 even when the run fails: so `flwr list` is asked.
- It refuses a distribution's name with an underscore, and an option that the app's pyproject.toml does not have.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flower_privdec import __version__
from flower_privdec.common.catalogue import FLOWER_MODES
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import FolderLock, owners_file, write_atomically
from flower_privdec.common.machine import COMMAND, typed_command
from flower_privdec.engine.run import Run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.noise_balance import balance_note, balance_of
from flower_privdec.experiment.recorder import CHECKPOINT, NODES_PLAN, OnMetrics, Recorder, check_one_stage
from flower_privdec.flower.launch import supervisor
from flower_privdec.flower.launch.local_grid import read_config
from flower_privdec.flower.node_settings import FOLDER, check_hosting
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.unused_keys import unused_keys

_log = logging.getLogger(__name__)

CONNECTION = "privdec"  # the name of the SuperLink in its configuration
INSTALL = "pip install 'flower-privdec[simulation]'"
LOG = "flower.log"
APP = "privdec-run"
RUN_CONFIG = "run.toml"
PYPROJECT = f"""\
[project]
name = "privdec-run"
version = "{__version__}"
description = "Runs a scenario with the installed flower_privdec"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "privdec"

[tool.flwr.app.components]
serverapp = "privdec_run.server_app:app"
clientapp = "privdec_run.client_app:app"

[tool.flwr.app.config]
scenario = ""
out = ""
mode = "auto"
base = ""
resume = false
"""
SERVER_APP = """\
from pathlib import Path

from flower_privdec.flower.apps.server_app import server_app

app = server_app(Path.cwd())
"""
CLIENT_APP = """\
from flower_privdec.flower.apps.client_app import client_app

app = client_app()
"""
MODULES = {"__init__.py": "", "server_app.py": SERVER_APP, "client_app.py": CLIENT_APP}
ROUND = re.compile(rb"\[ROUND (\d+)/(\d+)\]")  # in the log of Flower's strategies and ours
OnRound = Callable[[int, int], object]  # called with a round and the number of rounds
Poll = Callable[[Path], object]  # called with a log, several times a second
HEALTH_SECONDS = 60  # for a SuperLink to answer


def flower_run(
    scenario: Scenario | Experiment,
    out: Path,
    *,
    mode: str = "auto",
    n_supernodes: int | None = None,
    cpus: int = 1,
    gpus: float = 0.0,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
) -> dict[str, Any]:
    """Run a scenario by `flwr run` in Flower's simulation, and return its summary.

    Args:
        scenario: what to train; an experiment is not built a second time.
        out: the run's folder.
        mode: "auto": one SuperNode hosts all peers; or, as a rehearsal of a deployment, "sharded" or "relay", see
            `catalogue.FLOWER_MODES`.
        n_supernodes: how many SuperNodes; by default one, in relay mode one a peer, and in sharded mode as many as
            there are CPUs for.
        cpus, gpus: what each ClientApp gets; if the scenario computes on a GPU and gpus is 0, the
            ClientApps share one.
        resume: continue from the checkpoint in `out`.
        on_metrics: called with each evaluation's metrics. If it returns True the run stops, and in mode auto
            leaves a summary, as after Ctrl-C.

    Returns:
        The summary as written to summary.json; empty if none was written.

    Raises:
        ScenarioError: the input is wrong, or Flower's simulation is not installed; nothing was started or written.
        RunError: the run failed.
    """
    _check_simulation(cpus, gpus)
    if isinstance(scenario, Experiment):
        experiment = scenario
    else:
        experiment = Experiment.build(scenario)
    nodes = _n_nodes(experiment.scenario.n_peers, mode, n_supernodes, cpus)
    if gpus == 0 and experiment.device.type == "cuda":
        gpus = 1 / nodes

    # One SuperNode that hosts all peers writes the run's folder itself. In the other modes the ServerApp does, and the
    # nodes read their peers' own parts.
    own = experiment.own if mode == "auto" else None
    if own is None:
        check_one_stage(experiment.scenario, NODES_PLAN)
        salted = experiment.own.unsalted is not None
        check_hosting(experiment.scenario, simulated=True, salted=salted)
        drowning = balance_note(experiment.scenario, balance_of(experiment))
        if drowning is not None:
            _log.warning("%s", drowning)
        for unused in unused_keys(experiment.scenario):
            _log.warning("%s", unused)
    Recorder(experiment, own, out, "flower", resume)  # refuses a folder that holds another run

    config = {"out": str(out.absolute()), "mode": mode, "base": str(Path.cwd()), "resume": resume}
    try:
        with LocalSuperLink() as superlink:
            _write_app(superlink.folder, experiment.scenario, config)
            poll = _metrics_poll(out / "metrics.jsonl", resume, on_metrics)
            superlink.run(APP, _resources(nodes, cpus, gpus), [RUN_CONFIG], out / LOG, poll)
    except _StopRequest:
        if own is not None:
            _conclude_stopped(experiment, out, "callback")
    except KeyboardInterrupt:
        if own is not None:
            _conclude_stopped(experiment, out, "interrupt")
        raise

    path = out / "summary.json"
    if not path.is_file():
        return {}
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def _conclude_stopped(experiment: Experiment, out: Path, why: str) -> None:
    """Write models and summary as of the last checkpoint, if there is one."""
    if not (out / CHECKPOINT).is_file():
        return
    under_way = Run(experiment, out, runtime="flower", resume=True, workers=1)
    try:
        under_way.stop(why)
    finally:
        under_way.close()


class _StopRequest(Exception):  # noqa: N818 (no error)
    """The callback stops the run."""


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
    """Run a Flower app by `flwr run` in the Python environment of this process, and return the last lines of its log.

    Args:
        app: the app's folder; nothing in it is changed.
        out: the working folder of the app's processes: files that they save by a relative path are there afterwards,
            with the log, and the peers' own folders of strategies of this package.
        n_supernodes: how many SuperNodes are simulated.
        cpus, gpus: what each ClientApp gets.
        run_config: overrides the app's own, as KEY=VALUE.
        on_round: called with the current round and the number of rounds, when the app's log shows a new round.

    Raises:
        ScenarioError: the input is wrong, or Flower's simulation is not installed; nothing was started.
        RunError: the run failed.
    """
    _check_simulation(cpus, gpus)
    read_config(app, run_config)
    if n_supernodes < 1:
        raise ScenarioError(f"n_supernodes={n_supernodes} must be >= 1", code="flower.supernodes")
    lock = FolderLock(out)
    out = out.absolute()
    lock.take()
    resources = _resources(n_supernodes, cpus, gpus)
    try:
        with LocalSuperLink(out, {FOLDER: str(out / "peers")}) as superlink:
            superlink.run(str(app.absolute()), resources, run_config, out / LOG, _round_poll(on_round))
    finally:
        lock.release()
    return tail(out / LOG)


def _check_simulation(cpus: int, gpus: float) -> None:
    """Raise ScenarioError unless Flower's simulation is installed and a ClientApp's resources exist here."""
    if find_spec("ray") is None:
        raise ScenarioError(f"Flower's simulation needs ray, which is not installed: {INSTALL}")
    available = os.cpu_count() or 1
    if not 1 <= cpus <= available:
        raise ScenarioError(
            f"cpus={cpus} must be 1 to {available}, the CPUs of this machine; give fewer", code="flower.resources"
        )
    if gpus > torch.cuda.device_count():
        raise ScenarioError(
            f"gpus={gpus} must be at most {torch.cuda.device_count()}, the GPUs of this machine; give fewer",
            code="flower.resources",
        )


def _resources(nodes: int, cpus: int, gpus: float) -> dict[str, int | float]:
    return {"num-supernodes": nodes, "client-resources-num-cpus": cpus, "client-resources-num-gpus": gpus}


def _n_nodes(n_peers: int, mode: str, n_supernodes: int | None, cpus: int) -> int:
    """Return how many SuperNodes to simulate."""
    at_once = max(1, (os.cpu_count() or 1) // max(cpus, 1))  # ClientApps that can run at the same time
    FLOWER_MODES.check(mode, "mode")
    if n_supernodes is None:
        return {"auto": 1, "sharded": min(at_once, n_peers), "relay": n_peers}[mode]

    problem = ""
    if mode == "auto" and n_supernodes > 1:
        problem = "1, which hosts all peers: leave it out, or choose mode sharded or relay"
    elif not 1 <= n_supernodes <= n_peers:
        problem = f"1 to n_peers={n_peers}: a SuperNode hosts at least one peer"
    elif mode == "sharded" and n_supernodes > at_once:
        problem = f"at most {at_once} in mode sharded, in which all run at once: give fewer, or choose mode relay"
    if problem:
        raise ScenarioError(
            f"n_supernodes={n_supernodes} (cpus={cpus} each) must be {problem}", code="flower.supernodes"
        )
    return n_supernodes


def _write_app(folder: Path, scenario: Scenario, config: dict[str, Any]) -> None:
    """Write a Flower app that imports the installed package's apps, with its run-config beside it."""
    package = folder / APP / "privdec_run"
    package.mkdir(parents=True)
    (folder / APP / "pyproject.toml").write_text(PYPROJECT)
    for name, text in MODULES.items():
        (package / name).write_text(text)
    (folder / "scenario.yaml").write_text(to_yaml(scenario))

    # TOML writes these kinds of values as JSON does.
    config = {"scenario": str(folder / "scenario.yaml")} | config
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items()]
    (folder / RUN_CONFIG).write_text("".join(lines))


def _metrics_poll(path: Path, resume: bool, on_metrics: OnMetrics | None) -> Poll:
    """Return a function that reports each new line of metrics.jsonl once."""

    def read() -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            complete = path.read_text().split("\n")[:-1]  # what follows the last end of a line is half-written
            return [json.loads(line) for line in complete]
        return []

    reported: set[int] = set()
    if resume:
        reported = {metrics["round"] for metrics in read()}

    def poll(log: Path) -> None:
        if on_metrics is None:
            return
        for metrics in read():
            if metrics["round"] in reported:
                continue
            reported.add(metrics["round"])
            if on_metrics(metrics) is True:
                raise _StopRequest

    return poll


def _round_poll(on_round: OnRound | None) -> Poll:
    """Return a function that reports the last round in a log when it changes."""
    reported = (0, 0)  # a round, and the number of rounds

    def poll(log: Path) -> None:
        nonlocal reported
        if on_round is None or not log.exists():
            return
        rounds = ROUND.findall(log.read_bytes())
        if not rounds:
            return
        last = (int(rounds[-1][0]), int(rounds[-1][1]))
        if last != reported:
            reported = last
            on_round(*last)

    return poll


class LocalSuperLink:
    """A SuperLink for simulations that listens on a free port of 127.0.0.1; stops all it started at exit.

    The user's own Flower configuration, app folder and SuperLink are neither read nor written. Runs use
    the Python environment of this process; Flower installs nothing.

    Args:
        cwd: the working folder of all processes; by default `folder`.
        variables: their environment variables.

    Attributes:
        folder: a temporary folder, removed at exit.
    """

    def __init__(self, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="privdec-"))
        self._cwd = cwd or self.folder
        self._variables = dict(variables or {})
        self.home = self.folder / "home"
        self.log = self.folder / "superlink.log"
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalSuperLink:
        try:
            for attempt in range(3):  # another process may take the port in between
                if self._starts():
                    return self
                time.sleep(0.2 * attempt)
            raise RunError(f"the SuperLink did not start:\n{tail(self.log)}")
        except BaseException:
            self._stop()
            raise

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(
        self,
        app: str,
        resources: Mapping[str, int | float],
        run_config: Sequence[str],
        log_copy: Path,
        poll: Poll,
    ) -> None:
        """Run an app to its end.

        Args:
            app: its folder, absolute or from `folder`.
            resources: the resources for the simulation, as Flower names them.
            run_config: overrides the app's own, each as `flwr run --run-config` takes it.
            log_copy: where the log is copied to in the end, if its folder exists.
            poll: called with the log, several times a second.

        Raises:
            RunError: it did not complete, with the reason.
        """
        log = self.folder / LOG
        options = []
        for override in run_config:
            options += ["--run-config", override]
        options += ["--federation-config", " ".join(f"{key}={value}" for key, value in resources.items())]

        process = self.popen("flwr", "run", app, CONNECTION, "--stream", *options, output=log)
        try:
            while process.poll() is None:
                poll(log)
                time.sleep(0.1)
            poll(log)
            self._check_run(log, log_copy)
        finally:
            process.kill()
            process.wait()
            with suppress(OSError):  # a run that failed at once may have left no folder
                write_atomically(log_copy, log.read_bytes())

    def _check_run(self, log: Path, log_copy: Path) -> None:
        """Raise RunError unless the run completed: `flwr run --stream` exits with 0 in any case."""
        listing = self.call("flwr", "list", CONNECTION, "--format", "json")
        runs: list[dict[str, str]] = []
        with suppress(json.JSONDecodeError):
            if "{" in listing:
                runs = json.loads(listing[listing.index("{") :])["runs"]  # warnings may come before
        if not runs:
            raise RunError(f"`flwr run` did not submit the run:\n{tail(log)}", code="flower.failed")

        status = runs[0]["status"]
        if status == "finished:completed":
            return
        details = " ".join(runs[0]["status-details"].removeprefix("Simulation failed with exception: ").split())
        # If Ray does not come up, Flower's status only says that there was an error.
        cause = first_exception(log)
        if cause is not None and details in ("", NO_CAUSE):
            details = cause
        its_log = f"; its log is {log_copy}" if log_copy.parent.is_dir() else ""
        raise RunError(f"the Flower run ended as {status}: {details or tail(log)}{its_log}", code="flower.failed")

    def popen(self, *command: str, output: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a command, such as `flwr`, that uses this SuperLink."""
        with open(output, "ab", opener=owners_file) as file:
            return subprocess.Popen(
                [self._executable(command[0]), *command[1:]],
                cwd=self._cwd,
                env=self._environment(),
                stdin=stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, *command: str, timeout: float = 60) -> str:
        """Run a command to its end and return its output."""
        output = self.folder / "call.log"
        output.unlink(missing_ok=True)
        process = self.popen(*command, output=output)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"`{' '.join(command)}` did not end within {timeout:.0f} s") from error
        finally:
            process.kill()
            process.wait()
        return output.read_text(errors="replace")

    def _executable(self, name: str) -> str:
        path = shutil.which(name, path=self._environment()["PATH"])
        if path is None:
            raise RunError(f"the command {name} is not there: {INSTALL}")
        return path

    def _environment(self) -> dict[str, str]:
        extra = {
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
            COMMAND: typed_command(),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        # Ray's sockets lie deep in its folder, and a socket's path may have 107 characters.
        if len(str(self.folder)) < 40:
            extra["RAY_TMPDIR"] = str(self.folder)
        return os.environ | extra | self._variables

    def _starts(self) -> bool:
        """Start the SuperLink on a free port and return whether it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        self.home.mkdir(exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        supervise = (sys.executable, "-I", supervisor.__file__, str(self.folder))
        superlink = (self._executable("flower-superlink"), "--insecure", "--simulation")
        address = ("--host", "127.0.0.1", "--port", str(port))
        self._supervisor = self.popen(*supervise, *superlink, *address, output=self.log, stdin=subprocess.PIPE)

        # Without a proxy, which the user's environment may name.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + HEALTH_SECONDS
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), direct.open(f"http://127.0.0.1:{port}/health", timeout=1):
                return True
            time.sleep(0.1)
        return False

    def _stop(self) -> None:
        """Let the supervisor end the SuperLink and all its descendants, and remove the folder."""
        if self._supervisor is not None and self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
            self._supervisor.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


NO_CAUSE = "An error was encountered. Ending simulation."  # in Flower's words


def first_exception(path: Path) -> str | None:
    """Return the line that ends the first traceback of a log, in which others may follow from it; None without one."""
    with suppress(FileNotFoundError):
        text = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace"))
        _, found, rest = text.partition("Traceback (most recent call last):\n")
        if found:
            match = re.search(r"^[A-Za-z_][\w.]*(:.*)?$", rest, re.MULTILINE)
            if match:
                return match[0].strip()
    return None


def tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, without colours."""
    with suppress(FileNotFoundError):
        text = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace"))
        written = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "\n".join(written[-lines:])
    return "(no log)"
