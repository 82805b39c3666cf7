"""What a peer takes: resident memory of real peers, with torch and without, and of another build, in one run.

    python -m tools.peer_memory [--before PATH]

PATH is a checkout of an earlier build. Two private peers, processes that talk over TLS on this machine, train a softmax
model on data of their own. Each line is one kind of peer after its rounds, while it waits for its owner: resident
memory (RSS) and the part that no other process shares, or its part of what is shared (PSS), and what each stage of a
small peer's start adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TEXT = """\
name: memory
seed: 1
n_peers: 2
rounds: 20
data: {dataset: npz, root: "{peer}.npz", test: test.npz, batch: {size: 32}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 10}
network: {mode: synchronous, links: local, final_mixing: 1}
"""
# A peer in a process that then says how much it holds. The stages are those that a small peer's memory is made of.
PEER = """
import json, sys
from pathlib import Path

def held():
    lines = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return [int(lines["Rss:"]) / 1024, int(lines["Pss:"]) / 1024]

stages = {"Python": held()}
import numpy
stages["NumPy"] = held()
if sys.argv[1] == "small":
    from flower_privdec.common.deferred import use_small
    use_small()
import flower_privdec.cli.main
stages["command line"] = held()
import flower_privdec.network.peer.foreground
stages["all imports"] = held()
from flower_privdec.network.peer import foreground
from flower_privdec.scenario import load_scenario
scenario = load_scenario(Path("memory.yaml"), ["network.peers=" + sys.argv[3]])
foreground.run_peer(scenario, int(sys.argv[2]), Path(sys.argv[1] + sys.argv[2]), Path("certs"))
stages["after 20 rounds"] = held()
print(json.dumps(stages))
"""


def measure(root: Path, kind: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Run two peers of a build and return what the first holds after each stage, [RSS, PSS] in MiB.

    Args:
        root: the checkout.
        kind: `torch`, or `small` for peers without it.
        folder: of the scenario and the data.
    """
    from flower_privdec.network.local.peer_processes import free_addresses

    listed = ", ".join(f"{{address: '{address}'}}" for address in free_addresses(2))
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    certs = [sys.executable, "-m", "flower_privdec", "certs", "memory.yaml"]
    subprocess.run(certs, cwd=folder, env=environment, check=True, capture_output=True)
    running = []
    for peer in ("0", "1"):
        command = [sys.executable, "-c", PEER, kind, peer, f"[{listed}]"]
        log = open(folder / f"{kind}{peer}.log", "wb")  # noqa: SIM115 (the process writes to it)
        running.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log))
    outputs = []
    for number, process in enumerate(running):
        output, _ = process.communicate(timeout=500)
        if process.returncode:
            raise SystemExit((folder / f"{kind}{number}.log").read_text()[-2000:])
        outputs.append(output)
    stages: dict[str, tuple[float, float]] = json.loads(outputs[0].splitlines()[-1])
    return stages


def write_data(folder: Path) -> None:
    """Write the scenario, and 360 images of 8 x 8 numbers for each peer."""
    random = np.random.default_rng(0)
    for name, half, count in (("0", "train", 360), ("1", "train", 360), ("test", "test", 360)):
        x = random.normal(size=(count, 64)).astype(np.float32)
        y = random.integers(10, size=count)
        arrays: dict[str, Any] = {f"x_{half}": x, f"y_{half}": y}
        np.savez(folder / f"{name}.npz", **arrays)
    (folder / "memory.yaml").write_text(TEXT)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier build")
    before = parser.parse_args().before
    kinds = [("torch", ROOT, "torch"), ("small", ROOT, "small")]
    if before is not None:
        kinds.insert(0, ("before", before.resolve(), "torch"))

    columns = ["peer", "Python", "NumPy", "command line", "all imports", "after 20 rounds", "PSS"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name, root, kind in kinds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_data(folder)
            stages = measure(root, kind, folder)
        resident = [f"{rss:.0f}" for rss, _ in stages.values()]
        _, last = list(stages.values())[-1]
        print(f"| {name} | " + " | ".join([*resident, f"{last:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
