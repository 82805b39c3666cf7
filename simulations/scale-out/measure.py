"""Time one cohort in 1, 2 and 4 processes of this machine, and count what crosses between them.

python measure.py --data FOLDER [--repeats 3]

The ways alternate, so that other work on the machine meets all of them. A figure is the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from flower_privdec.core import Mix
from flower_privdec.engine.shards.communication_plan import Shards, mix_plan
from flower_privdec.experiment import Agreement
from flower_privdec.graph.mixing import AverageMatrix
from flower_privdec.scenario import Scenario, load_scenario

HERE = Path(__file__).parent
COUNTS = (1, 2, 4)
SIZES = {  # settings, and the rounds that are timed after as many others
    "mlp": (["rounds=120", "evaluation.every=60"], 60),
    "cnn": (["rounds=12", "evaluation.every=6", "model={name: cnn}"], 6),
}
GRAPHS = ("directed-exponential", "directed-ring", "complete")


def settings_of(model: str, data: str) -> list[str]:
    """Return the settings of a model's scenario."""
    settings, _ = SIZES[model]
    return [*settings, "evaluation.peers=2", f"data.root={Path(data).resolve()}"]


def commands(model: str, data: str, count: int, out: Path) -> dict[str, list[str]]:
    """Return each way's command for so many processes."""
    scenario = str(HERE / "mnist.yaml")
    options = [word for setting in settings_of(model, data) for word in ("--set", setting)]
    privdec = [sys.executable, "-m", "flower_privdec", "run", scenario, "--out", str(out)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    ways = {
        "workers": [*privdec, *options, "--set", f"compute.workers={count}"],
        "torchrun": [*torchrun, str(HERE / "shards.py"), scenario, *options, "--out", str(out)],
    }
    if count <= len(os.sched_getaffinity(0)):  # its simulation wants a core for each
        ways["Flower"] = [*privdec, *options, "--runtime", "flower", "--mode", "sharded", "--supernodes", str(count)]
    return ways


def milliseconds(folder: Path, rounds: int) -> float:
    """Return how long a round took on average, between the last two evaluations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return 1000 * (lines[-1]["seconds"] - lines[-2]["seconds"]) / rounds


def time_ways(data: str, repeats: int) -> None:
    """Print the milliseconds of a round, by model, way and number of processes."""
    took: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for model, (_, rounds) in SIZES.items():
            for count in COUNTS:
                with tempfile.TemporaryDirectory() as folder:
                    for way, command in commands(model, data, count, Path(folder) / "run").items():
                        out = Path(folder) / way
                        words = [str(out) if word == str(Path(folder) / "run") else word for word in command]
                        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                        took[model, way, count].append(milliseconds(out, rounds))
                        print(f"{model} {way} {count}: {took[model, way, count][-1]:.1f} ms a round", flush=True)
        print(f"repeat {repeat + 1}: load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", flush=True)

    for (model, way, count), times in took.items():
        spread = " ".join(f"{one:.1f}" for one in sorted(times))
        print(f"{model:4} {way:9} {count} processes: {min(times):7.1f} ms a round  (all: {spread})")


def crossing(scenario: Scenario, count: int) -> tuple[float, int]:
    """Return the bytes that leave a process in a round, on average over processes and rounds, and those of one row."""
    agreement = Agreement.of(scenario)
    assert agreement.mixing is not None
    shards = Shards.split(scenario.n_peers, count)
    row = 4 * (agreement.initial.numel() + 1)  # float32: the model, and its push-sum weight

    rows = []
    for round_index in range(scenario.rounds):
        for exchange in agreement.algorithm.program:
            if isinstance(exchange, Mix):
                matrix = agreement.mixing.matrix(exchange.place(round_index, agreement.mixing))
                if isinstance(matrix, AverageMatrix):  # only sums cross, by gloo's ring
                    rows.append(2 * (count - 1) / count)
                    continue
                for shard in range(count):
                    rows.append(sum(len(sent) for sent in mix_plan(matrix, shards, shard).traffic.sends.values()))
    return row * float(np.mean(rows)), row


def count_bytes(data: str) -> None:
    """Print what crosses between processes, by graph and number of processes."""
    for graph in GRAPHS:
        settings = [*settings_of("mlp", data), f"topology.name={graph}"]
        scenario = load_scenario(HERE / "mnist.yaml", settings)
        for count in COUNTS[1:]:
            sent, row = crossing(scenario, count)
            print(
                f"{graph:21} {count} processes: {sent / row:5.2f} rows of {row:,} bytes = {sent / 1e6:.2f} MB a round"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    count_bytes(given.data)
    time_ways(given.data, given.repeats)
