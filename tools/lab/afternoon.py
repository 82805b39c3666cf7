"""A new operator's afternoon: three devices from kits to a model, and what happens to them on the way.

In a first run, whose noise cancels between the devices, the cable of one is pulled out and put back, and all end with
one model. In a second one, with new kits, the power of a device goes, the card of another dies, a certificate is
renewed, a fourth device joins, one leaves for good, and one is shut out. (Nobody joins a run whose noise cancels.)

The program is installed first, as on a device: an empty environment gets the small peer's wheel and what that needs,
from the index, and nothing of the checkout. In the second run the operator's page (`privdec watch`) is open from the
first round on: a browser takes its picture before somebody joins and after.

Each device is a network namespace with files of its own: it sees its kit, its state and its own table, and neither the
operator's folder nor another device's. What its unit says is done here as systemd does it, by `Service`.

    python -m tools.lab.afternoon
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from flower_privdec.devices.doctor import read_environment
from tools.lab.air import SUBNET, Air, Line, UnavailableError
from tools.peer_wheel import build_peer_wheel
from tools.try_install import make_environment

DEVICES = 3
JOINING = 3  # the number of the device that joins
PORT = 7100
PAGE = 8700  # port of the operator's page
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURE = "page.png"
ROUNDS = 60
EVERY = 2  # rounds lie between two statuses in a journal
LATER_ROUNDS = 5000  # of the second run, which is stopped
TEST = 397  # examples that no device has
DELAY = 0.15  # seconds of each packet, so that a round takes about as long as over the internet
LONG = 400.0  # seconds that no step takes
PULLED = 2  # whose cable is pulled out
OFF = 2  # which device loses its power, and leaves for good
LOST = 1  # whose card dies, and which is shut out
RENEWED = 0
CANCELLING = ", noise: {kind: cancelling, colluding: 0}"
INDEPENDENT = ""
SAMPLED = "{size: 120}"
WHOLE = "{sampling: full}"  # whose ε takes no time to count, however many rounds a journal has a status of
CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
ROUND = re.compile(r" round (\d+)/")
FEATURES = [f"p{pixel}" for pixel in range(64)]
SCENARIO = """\
name: {name}
n_peers: {n}
rounds: {rounds}
data:
  dataset: csv
  root: own-{{peer}}.csv
  test: public.csv
  table: {{target: digit, numbers: {{{numbers}}}}}
  classes: 10
  at_least: 400
  batch: {batch}
model: {{name: softmax}}
algorithm: {{name: privsgp, learning_rate: 2.0}}
topology: {{name: complete}}
privacy: {{epsilon: 3.0, delta: 1.0e-5{noise}}}
evaluation: {{every: {every}}}
network: {{peers: [{peers}]}}
"""


def privdec(*words: object, cwd: Path | None = None) -> str:
    """Run a command of the operator's, and return what it prints.

    Raises:
        RuntimeError: it fails.
    """
    command = [sys.executable, "-m", "flower_privdec", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def settings_of(unit: Path) -> dict[str, str]:
    """Return the settings of a unit's section Service."""
    lines = unit.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@dataclass
class Service:
    """A unit that is started, and started again by its rules, as systemd does.

    Attributes:
        unit: its settings.
        inside: returns the command that runs words on the device.
        log: what the peer prints.
        ends: the statuses with which its process ended so far; of a signal, minus its number.
        is_off: whether the device has no power.
    """

    unit: dict[str, str]
    inside: Callable[..., tuple[str, ...]]
    environment: Callable[[], dict[str, str]]
    log: Path
    ends: list[int] = field(default_factory=list)
    is_off: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _again_at: float | None = None

    def start(self) -> None:
        """Start the process."""
        command = self.inside(*shlex.split(self.unit["ExecStart"]))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._again_at = None

    def look(self) -> None:
        """Note an end, and start the process again if the unit says so, and it is time."""
        process = self._process
        if process is not None and process.poll() is not None:
            self.ends.append(process.returncode)
            self._process = None
            if self._is_restarted(process.returncode):
                self._again_at = time.monotonic() + float(self.unit["RestartSec"])
        if self._again_at is not None and time.monotonic() >= self._again_at and not self.is_off:
            self.start()

    def _is_restarted(self, status: int) -> bool:
        done = {0, *map(int, self.unit["SuccessExitStatus"].split()), *(-number for number in CLEAN_SIGNALS)}
        stays_down = {*map(int, self.unit["RestartPreventExitStatus"].split())}
        return self.unit["Restart"] == "on-failure" and status not in done | stays_down

    @property
    def is_over(self) -> bool:
        """Return whether it has ended and stays down."""
        return self._process is None and self._again_at is None

    def kill(self) -> None:
        """Kill the process, as when the power goes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Stop it, as `systemctl stop` does."""
        self._again_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass
class Afternoon:
    """The operator's machine and the devices.

    Attributes:
        air: the network.
        folder: of everything; an operator's folder and one for each device lie below it.
        program: the folder of the environment that is installed as on a device; all have it at this path.
        name: of the present run.
        minutes: how long each step took.
    """

    air: Air
    folder: Path
    program: Path
    name: str = "ward"
    minutes: dict[str, float] = field(default_factory=dict)
    services: list[Service] = field(default_factory=list)
    _page: subprocess.Popen[bytes] | None = None

    @property
    def operator(self) -> Path:
        """Return the operator's folder."""
        return self.folder / "operator"

    @property
    def here(self) -> Path:
        """Return the path at which each device has its own files."""
        return self.folder / "device"

    def disk(self, device: int) -> Path:
        """Return the folder that a device has there."""
        return self.folder / "disks" / str(device)

    def peer_folder(self, device: int) -> Path:
        """Return what a device's peer writes to, as seen from outside."""
        return self.disk(device) / f"var/{self.name}-{device}/peer"

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Do a step, and print its minutes."""
        began = time.monotonic()
        yield
        self.minutes[name] = (time.monotonic() - began) / 60
        print(f"{self.minutes[name]:5.2f} min  {name}", flush=True)

    # --- the operator ---

    def write_tables(self) -> None:
        """Write the public test set, and for each device a table of its own."""
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x = x[order] / 16
        y = y[order]
        self.operator.mkdir()
        _write_table(self.operator / "public.csv", x[:TEST], y[:TEST])
        parts = np.array_split(np.arange(TEST, len(x)), DEVICES)
        for device, part in enumerate([*parts, parts[0]]):  # who joins has no others' examples in earnest
            self.disk(device).mkdir(parents=True)
            _write_table(self.disk(device) / f"own-{device}.csv", x[part], y[part])

    def write_scenario(self, rounds: int, noise: str, batch: str) -> None:
        """Write the scenario of the present run."""
        numbers = ", ".join(f"{name}: [0.3, 0.35]" for name in FEATURES)
        peers = ", ".join(f'{{address: "{SUBNET}{device + 1}:{PORT}"}}' for device in range(DEVICES))
        text = SCENARIO.format(
            name=self.name,
            every=EVERY,
            n=DEVICES,
            rounds=rounds,
            noise=noise,
            batch=batch,
            numbers=numbers,
            peers=peers,
        )
        (self.operator / f"{self.name}.yaml").write_text(text)

    def deploy(self) -> str:
        """Make the kits, or bring them up to date."""
        program = self.program / "bin/privdec"
        places = ("--folder", self.here / "etc", "--state", self.here / "var", "--program", program)
        return privdec("deploy", f"{self.name}.yaml", "--out", f"kits-{self.name}", *places, cwd=self.operator)

    def copy_kit(self, device: int) -> None:
        """Bring a device its kit, and its table to the place that the kit names, as `cp -r` does."""
        kit = self.operator / f"kits-{self.name}/devices/{self.name}-{device}"
        shutil.copytree(kit, self.kit(device), dirs_exist_ok=True)
        state = self.peer_folder(device).parent
        state.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.disk(device) / f"own-{device}.csv", state)

    def kit(self, device: int) -> Path:
        """Return the kit on a device, as seen from outside."""
        return self.disk(device) / f"etc/{self.name}-{device}"

    def unit(self, device: int) -> Path:
        """Return a device's unit."""
        return self.kit(device) / f"privdec-{self.name}-{device}.service"

    def verify_units(self) -> str:
        """Let systemd look at the units, if it is here; return what it says."""
        if shutil.which("systemd-analyze") is None:
            return "NOT TESTED: there is no systemd-analyze here"
        units = [str(self.unit(device)) for device in range(DEVICES)]
        done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode == 0 else f"status {done.returncode}: {done.stderr}"

    # --- on a device ---

    def inside(self, device: int, *words: str) -> tuple[str, ...]:
        """Return a command that runs on a device: with its files at one path, and nobody else's at any."""
        mounts = (
            f"mount --bind {self.disk(device)} {self.here}",
            f"mount -t tmpfs none {self.folder / 'disks'}",
            f"mount -t tmpfs none {self.operator}",
        )
        return self.air.command(device, "sh", "-c", f"{' && '.join(mounts)} && exec {shlex.join(words)}")

    def doctor(self, device: int) -> list[dict[str, Any]]:
        """Return what a device's doctor finds."""
        scenario = self.here / f"etc/{self.name}-{device}/scenario.yaml"
        program = str(self.program / "bin/privdec")
        words = (program, "doctor", str(scenario), "--id", str(device), "--json")
        done = subprocess.run(self.inside(device, *words), capture_output=True, text=True, check=False)
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        has_errors = any(one["level"] == "error" for one in findings)
        if done.returncode != int(has_errors):
            raise RuntimeError(f"doctor ended with {done.returncode} after {findings}")
        return findings

    def start(self, device: int) -> None:
        """Start a device's unit."""
        kit = self.kit(device)
        service = Service(
            unit=settings_of(self.unit(device)),
            inside=lambda *words: self.inside(device, *words),
            environment=lambda: read_environment(kit / "peer.env"),
            log=self.disk(device) / f"{self.name}.journal",
        )
        service.start()
        self.services.append(service)

    def journal(self, device: int) -> str:
        """Return what a device's peer printed."""
        return (self.disk(device) / f"{self.name}.journal").read_text(errors="replace")

    def last_status(self, device: int) -> str:
        """Return the last line of a device's journal that has a round; empty if there is none."""
        lines = [line for line in self.journal(device).splitlines() if ROUND.search(line)]
        return lines[-1] if lines else ""

    def rounds(self, device: int) -> list[int]:
        """Return the rounds that a device's journal has a status of, from all its lives."""
        return [int(found) for found in ROUND.findall(self.journal(device))]

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, and let units be restarted meanwhile.

        Raises:
            RuntimeError: it is not so in time; with the ends of all logs.
        """
        since = time.monotonic()
        while not ready():
            if time.monotonic() - since > LONG:
                tails = "\n".join(self.journal(device)[-600:] for device in range(DEVICES))
                raise RuntimeError(f"it was not so within {LONG:.0f} s; the logs end with\n{tails}")
            for service in self.services:
                service.look()
            time.sleep(0.3)

    def go_on(self, *devices: int, rounds: int = 4) -> None:
        """Wait until devices have come some rounds further, whatever their rounds are now."""
        starts = {device: len(self.rounds(device)) for device in devices}
        statuses = rounds // EVERY
        self.until(lambda: all(len(self.rounds(device)) >= starts[device] + statuses for device in devices))

    def accuracy(self, device: int) -> float:
        """Return the accuracy of a device's own model on the public test set."""
        return _accuracy(self.peer_folder(device) / "model.safetensors", self.operator / "public.csv")

    def epsilon(self, device: int) -> float:
        """Return the ε in a device's summary."""
        return float(json.loads((self.peer_folder(device) / "summary.json").read_text())["epsilon"])

    def engines_accuracy(self) -> float:
        """Return what `privdec run` reaches, with all tables in one place, which no operator has."""
        together = self.folder / "together"
        together.mkdir()
        for device in range(DEVICES):
            shutil.copy(self.disk(device) / f"own-{device}.csv", together)
        for name in (f"{self.name}.yaml", "public.csv"):
            shutil.copy(self.operator / name, together)
        privdec("run", f"{self.name}.yaml", "--out", "run", cwd=together)
        summary = json.loads((together / "run/summary.json").read_text())
        return float(summary["accuracy"]["peer_min"])

    # --- the afternoon ---

    def install(self) -> None:
        """Install the small peer into an empty environment."""
        with self.step("build the small peer's wheel, which devices get from the index in earnest"):
            wheel = build_peer_wheel(self.folder)
        with self.step("install it and what it needs in an empty environment, as on a device"):
            make_environment(self.program, wheel)

    def prepare(self) -> None:
        """Bring three devices to the moment before their start, for a run that ends."""
        self._prepare("ward", ROUNDS, CANCELLING, SAMPLED)

    def prepare_later(self) -> None:
        """Bring them there for a second run, with new kits, that is stopped."""
        self._prepare("later", LATER_ROUNDS, INDEPENDENT, WHOLE)

    def _prepare(self, name: str, rounds: int, noise: str, batch: str) -> None:
        self.name = name
        self.services = []
        if not self.program.exists():
            self.install()
        with self.step(f"{name}: the operator writes the scenario, and each owner a table"):
            if not self.here.exists():
                self.here.mkdir()
                self.write_tables()
            self.write_scenario(rounds, noise, batch)
        with self.step(f"{name}: privdec deploy"):
            self.deploy()
        with self.step(f"{name}: copy each kit to its device"):
            for device in range(DEVICES):
                self.copy_kit(device)

    def start_all(self) -> None:
        """Start all units."""
        with self.step(f"{self.name}: start three units, until all take rounds"):
            for device in range(DEVICES):
                self.start(device)
            self.go_on(*range(DEVICES))

    def train(self) -> None:
        """Run the devices to the end of their rounds; the cable of one is pulled out and put back."""
        self.start_all()
        others = [device for device in range(DEVICES) if device != PULLED]
        with self.step("pull a cable, until the others go on without that device"):
            self.air.partition(others)
            self.until(lambda: all(f"down: {PULLED}" in self.last_status(device) for device in others))
        with self.step("put it back, until the device takes rounds"):
            self.air.heal()
            self.go_on(PULLED)
        with self.step("train to the end"):
            self.until(lambda: all(service.is_over for service in self.services))

    def open_page(self) -> None:
        """Serve the operator's page, from the network that all devices are in."""
        kit = f"kits-{self.name}/devices/{self.name}-0/certs"
        words = ("-m", "flower_privdec", "watch", f"{self.name}.yaml", "--certs", kit)
        command = self.air.command(JOINING, sys.executable, *words, "--port", str(PAGE))
        with (self.folder / "page.log").open("wb") as log:
            self._page = subprocess.Popen(command, cwd=self.operator, stdout=log, stderr=log)

    def picture(self) -> str | None:
        """Take a picture of the page; return its elements as HTML, None if there is no browser here."""
        browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        if browser is None:
            return None
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000")
        profile = f"--user-data-dir={self.folder / 'browser'}"
        for what in (f"--screenshot={self.folder / PICTURE}", "--dump-dom"):
            words = (browser, *options, profile, "--window-size=1280,1400", what, f"http://127.0.0.1:{PAGE}/")
            command = self.air.command(JOINING, *words)
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG)
        return done.stdout

    def look_at_page(self, count: int) -> None:
        """Look at the page until it shows so many peers that answer.

        Raises:
            RuntimeError: it does not in time.
        """
        shown = re.compile(r'<g class="node (?:up|waiting)"[^>]*data-peer')
        since = time.monotonic()
        while True:
            if self._page is None or self._page.poll() is not None:
                raise RuntimeError(f"the page has ended: {(self.folder / 'page.log').read_text()[-600:]}")
            dom = self.picture()
            if dom is None:
                print("NOT TESTED: the page's picture, as there is no Chromium here", flush=True)
                return
            found = len(shown.findall(dom))
            if found == count:
                return
            if time.monotonic() - since > LONG:
                raise RuntimeError(f"the page shows {found} of {count} peers: {dom[-2000:]}")

    def live_on(self) -> None:
        """Let happen what happens in weeks, to a run that is stopped in the end."""
        settings = self.kit(LOST) / "peer.env"
        settings.write_text(settings.read_text().replace("CHARGE_WITNESSED=no", "CHARGE_WITNESSED=yes"))
        self.start_all()
        with self.step("the live page, until its picture has all three devices"):
            self.open_page()
            self.look_at_page(DEVICES)
        with self.step("the power of a device goes: its unit starts it again"):
            self.services[OFF].kill()
            self.go_on(OFF)
        with self.step("a card dies: an empty one recovers unattended"):
            self.services[LOST].kill()
            shutil.rmtree(self.peer_folder(LOST))
            self.until(lambda: "lines that the ledger lacked" in self.journal(LOST))
            self.go_on(LOST)
        with self.step("renew a certificate while all run"):
            self.change("renew", "--id", RENEWED)
            self.until(lambda: "was renewed" in self.journal(RENEWED))
            self.go_on(RENEWED)
        with self.step("a device joins"):
            self.change("add", "--address", f"{SUBNET}{JOINING + 1}:{PORT}")
            self.copy_kit(JOINING)
            self.start(JOINING)
            self.go_on(JOINING, 0)
        with self.step("the page shows who joined, without a restart"):
            self.look_at_page(DEVICES + 1)
        with self.step("a device leaves for good"):
            self.change("leave", "--id", OFF)
            self.until(lambda: self.services[OFF].is_over)
            self.go_on(JOINING, 0)
        with self.step("a device is shut out"):
            self.change("revoke", "--id", LOST)
            self.until(lambda: self.services[LOST].is_over)
            self.go_on(JOINING, 0)
        with self.step("stop the units"):
            self.stop()

    def change(self, *what: object) -> None:
        """Change the list of members, and bring the kit of device 0 there again."""
        certificates = ("--certs", f"kits-{self.name}/authority")
        privdec("members", f"{self.name}.yaml", *what, *certificates, cwd=self.operator)
        self.deploy()
        self.copy_kit(0)

    def stop(self) -> None:
        """End what still runs."""
        for service in self.services:
            service.stop()
        if self._page is not None and self._page.poll() is None:
            self._page.terminate()
            self._page.wait()


def _write_table(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*FEATURES, "digit"])
        for row, digit in zip(x.tolist(), y.tolist(), strict=True):
            table.writerow([*(f"{value:g}" for value in row), digit])


def _accuracy(model: Path, table: Path) -> float:
    rows = np.loadtxt(table, delimiter=",", skiprows=1, dtype="float32")
    softmax = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    softmax.load_state_dict(load_file(model))
    outputs = softmax(torch.from_numpy((rows[:, :64] - np.float32(0.3)) / np.float32(0.35)))
    return float((outputs.argmax(1) == torch.from_numpy(rows[:, 64]).long()).float().mean())


def main() -> None:
    """Go through the afternoon, and print each step's minutes and what the devices end with."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    try:
        with tempfile.TemporaryDirectory(prefix="afternoon") as folder, Air(DEVICES + 1, Line(DELAY)) as air:
            afternoon = Afternoon(air, Path(folder), Path(folder) / "program")
            try:
                afternoon.prepare()
                print(afternoon.verify_units() or "systemd takes the units")
                afternoon.train()
                for device, service in enumerate(afternoon.services):
                    figures = f"accuracy {afternoon.accuracy(device):.1%}, ε {afternoon.epsilon(device):.2f}"
                    print(f"device {device}: {figures}, ended with {service.ends}")
                print(f"the engine: {afternoon.engines_accuracy():.1%}")
                afternoon.prepare_later()
                afternoon.live_on()
            finally:
                afternoon.stop()
                if os.environ.get("KEEP"):
                    shutil.copytree(folder, os.environ["KEEP"])
            print(f"{sum(afternoon.minutes.values()):5.2f} min in all")
    except UnavailableError as error:
        sys.exit(f"no afternoon on this machine: {error}")


if __name__ == "__main__":
    main()
