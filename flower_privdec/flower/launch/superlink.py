"""A SuperLink of one's own: a private home, a free port on this machine, and nothing left behind."""

from __future__ import annotations

import json
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
from pathlib import Path
from types import TracebackType

from flower_privdec.errors import RunError
from flower_privdec.flower.launch import supervisor

CONNECTION = "privdec"
INSTALL = "pip install 'flower-privdec[simulation]'"


class LocalSuperLink:
    """Starts a SuperLink for simulations that listens on 127.0.0.1 alone, and stops all it started.

    The user's own Flower configuration, app folder and SuperLink are neither read nor written. Runs use
    the Python environment of this process; Flower installs nothing.

    Args:
        cwd: the folder in which all that it starts runs; by default `folder`.
        variables: of the environment, for all that it starts.

    Attributes:
        folder: a temporary folder; it goes with the SuperLink.
    """

    def __init__(self, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="privdec-"))
        self._cwd, self._variables = cwd or self.folder, dict(variables or {})
        self.home = self.folder / "home"
        self.log = self.folder / "superlink.log"
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalSuperLink:
        try:
            for attempt in range(3):
                port = _free_port()
                if self._starts(port):
                    return self
                time.sleep(0.2 * attempt)
            raise RunError(f"the SuperLink did not start:\n{tail(self.log)}")
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def popen(self, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a Flower command, such as `flwr`, in this SuperLink's surroundings."""
        return self._popen(self._command(*arguments), output, stdin=subprocess.DEVNULL)

    def _command(self, name: str, *arguments: str) -> list[str]:
        command = shutil.which(name, path=self._environment()["PATH"])
        if command is None:
            raise RunError(f"the command {name} is not there: {INSTALL}")
        return [command, *arguments]

    def _popen(self, command: list[str], output: Path, stdin: int) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=self._cwd,
                env=self._environment(),
                stdin=stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, *arguments: str, timeout: float = 60) -> str:
        """Run a Flower command to its end and return what it printed."""
        output = self.folder / "call.log"
        output.unlink(missing_ok=True)
        process = self.popen(*arguments, output=output)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"`{' '.join(arguments)}` did not end within {timeout:.0f} s") from error
        finally:
            process.kill()
            process.wait()
        return output.read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        """Return the environment of everything Flower starts here."""
        extra = {
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        if len(str(self.folder)) < 40:  # Ray's sockets lie below, and a socket's path has 107 characters
            extra["RAY_TMPDIR"] = str(self.folder)
        return os.environ | extra | self._variables

    def _starts(self, port: int) -> bool:
        """Start the SuperLink and wait until it answers; return whether it does."""
        self.home.mkdir(exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        options = f"--insecure --simulation --host 127.0.0.1 --port {port}"
        superlink = self._command("flower-superlink", *options.split())
        keep = [sys.executable, "-I", supervisor.__file__, str(self.folder), *superlink]
        self._keeper = self._popen(keep, self.log, stdin=subprocess.PIPE)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 60
        while self._keeper.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), direct.open(f"http://127.0.0.1:{port}/health", timeout=1):
                return True
            time.sleep(0.1)
        return False

    def _stop(self) -> None:
        """Let the keeper end the SuperLink and all its descendants, and remove the folder."""
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, without colours."""
    with suppress(FileNotFoundError):
        text = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace"))
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])
    return "(no log)"


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
