"""What grows in a network of real peers, and by how much: `python -m tools.weeks --minutes 60`.

It runs `privdec up` on a small scenario of a million rounds, looks every few seconds at each peer's process and folder,
stops the peers in the end, and prints what each thing comes to and by how much it grows in a million rounds. It needs
Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SCENARIO = """\
name: weeks
seed: 1
n_peers: {peers}
rounds: 1000000
data: {{dataset: digits, partition: {{kind: iid}}, batch: {{sampling: poisson, size: 45}}}}
model: {{name: softmax}}
algorithm: {{name: privsgp, learning_rate: 1.0}}
topology: {{name: directed-exponential}}
privacy: {{epsilon: 3.0, delta: 1.0e-3}}
evaluation: {{every: {every}}}
"""
TITLE = "privdec peer "  # of a peer's process, before its number
MILLION = 1e6

# Of a peer, in the order of the table; of files, bytes.
THINGS = {
    "resident": "memory (resident), MiB",
    "anonymous": "memory (of its own), MiB",
    "threads": "threads",
    "descriptors": "open descriptors",
    "sealed": "ledger, sealed files, bytes",
    "open": "ledger, open file, bytes (sealed at half a megabyte)",
    "checkpoints": "checkpoints, bytes",
    "log": "log, bytes",
    "others": "all other files, bytes",
    "metrics": "metrics.jsonl of `privdec up`, bytes",
}
Sample = dict[str, float]


def sample(out: Path, peer: int, process: int) -> Sample:
    """Return what a peer takes now, and its round."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line
    )
    folder = out / "peers" / str(peer)
    sizes = dict.fromkeys(("sealed", "open", "checkpoints", "others"), 0)
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        kind = path.name if path.name in sizes else "others"
        if path.parent.name == "ledger":
            kind = "sealed" if path.suffix == ".sealed" else "open"
        sizes[kind] += path.stat().st_size

    return {
        "round": evaluated(out / "metrics.jsonl"),
        "resident": int(status["VmRSS"].split()[0]) / 1024,
        "anonymous": int(status["RssAnon"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        **sizes,
        "log": (out / "peers" / f"{peer}.log").stat().st_size,
        "metrics": (out / "metrics.jsonl").stat().st_size,
    }


def evaluated(metrics: Path) -> int:
    """Return the round of the last evaluation."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return int(json.loads(lines[-1])["round"]) if lines else 0


def processes(command: int) -> dict[int, int]:
    """Return the process of each peer of a `privdec up` by its number."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            title = (path / "comm").read_text().strip()
            is_ours = title.startswith(TITLE) and _descends(int(path.name), command)
        except OSError:
            continue
        if is_ours:
            found[int(title.removeprefix(TITLE))] = int(path.name)
    return found


def _descends(process: int, ancestor: int) -> bool:
    """Return whether a process was started by another, or by one that it started."""
    while process > 1:
        if process == ancestor:
            return True
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.partition("PPid:")[2].split()[0])
    return False


def growth(samples: Sequence[Mapping[str, float]], thing: str) -> float:
    """Return by how much something grows in a million rounds, by the second half of some samples.

    What a peer takes while it begins is no growth, so the first half does not count.
    """
    late = samples[len(samples) // 2 :]
    rounds = np.array([one["round"] for one in late])
    if len(late) < 2 or rounds[0] == rounds[-1]:
        return 0.0
    slope, _ = np.polyfit(rounds, [one[thing] for one in late], 1)
    return float(slope) * MILLION


def table(samples: Sequence[Mapping[str, float]]) -> str:
    """Return what a peer takes and by how much that grows, as Markdown."""
    last = samples[-1]
    lines = ["| of one peer | at the end | in a million rounds more |", "|---|---|---|"]
    for thing, words in THINGS.items():
        lines.append(f"| {words} | {last[thing]:,.0f} | {growth(samples, thing):+,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the peers, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.weeks", description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=int, default=1000, help="rounds between evaluations (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds between samples (default: %(default)s)")
    chosen = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="weeks") as folder:
        scenario = Path(folder, "weeks.yaml")
        scenario.write_text(SCENARIO.format(peers=chosen.peers, every=chosen.every))
        out = Path(folder, "run")
        command = [sys.executable, "-m", "flower_privdec", "up", str(scenario), "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as up:
            try:
                samples = followed(up, out, chosen.minutes * 60, chosen.pause)
            finally:
                os.killpg(up.pid, signal.SIGTERM)
    if not samples:
        sys.exit("no peer came to its first evaluation: raise --minutes, or lower --every")
    seconds = samples[-1]["time"] - samples[0]["time"]
    rounds = samples[-1]["round"] - samples[0]["round"]
    print(f"{rounds:,.0f} rounds in {seconds / 60:.0f} minutes, {len(samples)} samples of peer 0 of {chosen.peers}")
    print(table(samples))


def followed(up: subprocess.Popen[bytes], out: Path, seconds: float, pause: float) -> list[Sample]:
    """Return samples of peer 0 from its first evaluation on."""
    samples: list[Sample] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and up.poll() is None:
        time.sleep(pause)
        process = processes(up.pid).get(0)
        if process is None or not evaluated(out / "metrics.jsonl"):
            continue
        try:
            samples.append({"time": time.monotonic(), **sample(out, 0, process)})
        except OSError:
            continue  # a file was replaced, or the peer ends
    return samples


if __name__ == "__main__":
    main()
