"""Run a scenario on devices of a lab, with what networks do to them, and check what they end with."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import parse_scenario
from tools.lab.air import SUBNET, Air, Line, UnavailableError
from tools.soak.checks import Paid, weight_on_disk

# Examples of digits that no device has
PORT = 7100
TEST = 397
# Which device gets another address, whose clock is off, and by how many seconds
MOVED = 3
WRONG = 5
CLOCK_OFF = 7200
NAMED_AFTER = 10.0  # seconds until the others' name service knows the new address
SCENARIO = """\
name: lab
n_peers: {n}
rounds: {rounds}
data: {{dataset: npz, root: "{folder}/{{peer}}.npz", test: "{folder}/public.npz", batch: {{size: 20}}}}
model: {{name: softmax}}
algorithm: {{name: privsgp, learning_rate: 1.0}}
topology: {{name: directed-exponential}}
privacy: {{epsilon: 3.0, delta: 1.0e-3}}
evaluation: {{every: 5}}
network: {{peers: [{peers}]}}
"""


@dataclass
class Lab:
    """Devices, each with its own data, certificate and copy of the scenario."""

    air: Air
    folder: Path
    rounds: int
    clock: Path | None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self) -> None:
        """Give each device its examples, its certificate and its scenario."""
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x = (x[order] / 16).astype("float32")
        y = y[order]
        np.savez(self.folder / "public.npz", x_test=x[:TEST], y_test=y[:TEST])
        for device, part in enumerate(np.array_split(np.arange(TEST, len(x)), self.count)):
            np.savez(self.folder / f"{device}.npz", x_train=x[part], y_train=y[part])
        make_certificates(parse_scenario(self.scenario(0)), self.folder / "certs")
        self.air.name(range(self.count), self.names)
        for device in range(self.count):
            (self.folder / f"{device}.yaml").write_text(self.scenario(device))

    @property
    def count(self) -> int:
        """Return how many devices there are."""
        return len(self.air.spaces)

    @property
    def names(self) -> list[str]:
        """Return the names by which devices are reached."""
        return [f"device-{device}.lab" for device in range(self.count)]

    def scenario(self, device: int) -> str:
        """Return a device's copy of the scenario: it listens on all of its own addresses."""
        hosts = ["0.0.0.0" if j == device else name for j, name in enumerate(self.names)]
        peers = ", ".join(f'{{address: "{host}:{PORT}"}}' for host in hosts)
        return SCENARIO.format(n=self.count, rounds=self.rounds, folder=self.folder, peers=peers)

    def start(self, device: int) -> None:
        """Start the peer of a device, with a wrong clock where that is its lot."""
        words = ["peer", f"{self.folder}/{device}.yaml", "--id", str(device), "--out", f"{self.folder}/{device}"]
        command = (sys.executable, "-m", "flower_privdec", *words, "--certs", f"{self.folder}/certs")
        environment = dict(os.environ)
        if device == WRONG and self.clock is not None:
            environment |= {"LD_PRELOAD": str(self.clock), "PRIVDEC_CLOCK": str(CLOCK_OFF)}
        with self.log(device).open("wb") as log:
            process = subprocess.Popen(
                self.air.command(device, *command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)

    def log(self, device: int) -> Path:
        """Return the file with what a device's peer prints."""
        return self.folder / f"{device}.log"

    def round(self, device: int) -> int:
        """Return the last round that a device's peer printed."""
        rounds = re.findall(r"round (\d+)/", self.log(device).read_text())
        return int(rounds[-1]) if rounds else 0

    def until(self, what: str, ready: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait until something is so, and say when.

        Raises:
            SystemExit: it is not so in time.
        """
        since = time.monotonic()
        while not ready():
            if time.monotonic() - since > seconds:
                sys.exit(f"after {seconds:.0f} s it was not so: {what}; rounds {[*map(self.round, range(self.count))]}")
            time.sleep(0.2)
        print(f"{time.monotonic() - since:6.1f} s until {what}", flush=True)

    def stop(self) -> None:
        """End the peers that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def accuracy(self, device: int) -> float:
        """Return the accuracy of a device's own last model on the public test set."""
        public = np.load(self.folder / "public.npz")
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        model.load_state_dict(load_file(self.folder / str(device) / "model.safetensors"))
        right = model(torch.from_numpy(public["x_test"])).argmax(1) == torch.from_numpy(public["y_test"])
        return float(right.float().mean())

    def problems(self, accuracies: Mapping[int, float]) -> list[str]:
        """Return what is wrong with what the devices ended with."""
        wrong = [
            f"device {device} ended with status {process.returncode}: {self.log(device).read_text()[-300:]}"
            for device, process in enumerate(self.processes)
            if process.returncode != 0
        ]
        for device in range(self.count):
            paid = Paid.of(self.folder / str(device) / "ledger").steps
            if not self.rounds <= paid <= self.rounds + 1:
                wrong.append(f"the ledger of device {device} pays for {paid} steps, and {self.rounds} were taken")

        weight = weight_on_disk([self.folder / str(device) for device in range(self.count)], at_the_end=True)
        if weight is None or not weight.is_right:
            wrong.append(f"the push-sum weights on the disks are {weight}")
        if max(accuracies.values()) - min(accuracies.values()) > 0.03:
            wrong.append(f"the devices' models are apart: {accuracies}")
        return wrong


def wrong_clock(folder: Path) -> Path | None:
    """Return a library that sets a process's clock off; None if no compiler is at hand."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    library = folder / "clock.so"
    if compiler is None:
        return None
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def main() -> None:
    """Run the lab and exit with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab", description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds of each packet (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.05, help="chance of each packet (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10e6, help="bits a second (default: %(default)g)")
    parser.add_argument("--partition", type=float, default=20.0, help="seconds (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="a new folder for what the devices leave (default: none is kept)")
    chosen = parser.parse_args()
    if chosen.devices <= WRONG:
        parser.error(f"--devices {chosen.devices} must be {WRONG + 1} or more")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and nothing is left behind
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lab") as folder,
            Air(chosen.devices, Line(chosen.delay, chosen.loss, chosen.rate)) as air,
        ):
            lab = Lab(air, Path(folder), chosen.rounds, wrong_clock(Path(folder)))
            try:
                run(lab, chosen.partition)
            finally:
                lab.stop()
                if chosen.keep:
                    shutil.copytree(folder, chosen.keep)
    except UnavailableError as error:
        sys.exit(f"no lab on this machine: {error}")


def run(lab: Lab, partition: float) -> None:
    """Run all devices to their ends, through a partition and a new address, and print what they end with."""
    everyone = range(lab.count)
    air = lab.air
    lab.prepare()
    for device in everyone:
        lab.start(device)
    if lab.clock is None:
        print("NOT TESTED: a wrong clock needs a C compiler")

    def reached(part: float) -> bool:
        return min(map(lab.round, everyone)) >= part * lab.rounds

    lab.until("all devices are in round 20 %", lambda: reached(0.2))
    half = lab.count // 2
    air.partition(everyone[:half], everyone[half:])
    before = [lab.round(device) for device in everyone]
    time.sleep(partition)
    print(f"{partition:6.1f} s in two halves: rounds {before} to {[lab.round(device) for device in everyone]}")
    air.heal()
    lab.until("all devices are in round 50 %", lambda: reached(0.5))
    before = [lab.round(device) for device in everyone]
    air.move(MOVED, f"{SUBNET}{100 + MOVED}")
    time.sleep(NAMED_AFTER)
    print(f"{NAMED_AFTER:6.1f} s with device {MOVED} elsewhere: rounds {before} to {[*map(lab.round, everyone)]}")
    air.name([device for device in everyone if device != MOVED], lab.names)
    lab.until("all devices are done", lambda: all(process.poll() is not None for process in lab.processes))
    print(f"{air.packets:,} packets, of which {air.lost:,} were lost")
    accuracies = {device: lab.accuracy(device) for device in everyone}
    print("accuracy of each device's own model: " + ", ".join(f"{value:.1%}" for value in accuracies.values()))
    problems = lab.problems(accuracies)
    sys.exit("\n".join(problems) if problems else None)


if __name__ == "__main__":
    main()
