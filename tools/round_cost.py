"""What a round of a network costs beside its private step: this build, another one, and bare gRPC, in one run.

    python -m tools.round_cost --before PATH [--repeat N] [--sizes small,million] [--modes ...] [--stores ...]

PATH is a checkout of an earlier build. Eight private peers, processes on this machine, train push-sum over a directed
exponential graph. Each line is CPU time of one peer in one round, of all of its threads, less the time of its private
step, which is measured in the peer itself. Beside it, as many processes send the same bytes over the same links by
bare gRPC with TLS: a call for each message, and one stream that stays open for each link. Builds take turns, and each
figure is the least of some repetitions, since other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = {"small": ("79,510 parameters", 1060, 40), "million": ("999,985 parameters", 13333, 20)}
MODES = ("asynchronous", "synchronous")
STORES = ("memory", "disk")
FLOORS = ("unary", "stream")
MEMORY = Path("/dev/shm")
WARM_UP = 3


def run_peer(scenario: str, peer: int, folder: str, certificates: str) -> list[tuple[float, ...]]:
    """Run a peer; return after each round [clock, CPU seconds, those of its private steps, bytes sent, syncs]."""
    from flower_privdec.network.peer.driver import Driver, PeerDevice
    from flower_privdec.network.peer.foreground import running_peer
    from flower_privdec.network.transport.tls import credentials_of
    from flower_privdec.scenario import load_scenario
    from tools.bench.network import TimedSync

    loaded = load_scenario(Path(scenario))
    assert loaded.network.peers is not None
    addresses = tuple(one.address for one in loaded.network.peers)
    credentials = credentials_of(loaded, Path(certificates), peer)
    running = running_peer(loaded, PeerDevice(peer, Path(folder), credentials, addresses))
    timed = TimedSync()
    advance = running.trainer.advance
    steps = [0.0]

    def timed_advance(state: Any) -> Any:
        began = time.thread_time()
        try:
            return advance(state)
        finally:
            steps[0] += time.thread_time() - began

    vars(running.trainer)["advance"] = timed_advance
    stamps = list[tuple[float, ...]]()

    def note(one: Any) -> None:
        stamps.append((time.monotonic(), time.process_time(), steps[0], one.session.bytes_sent, timed.count))

    driver = Driver(running)
    try:
        driver.open()
        driver.run(note)
    finally:
        driver.close()
    return stamps


def measure_peers(model: str, mode: str, store: str, rounds: int, out: str) -> dict[str, float]:
    """Run eight peers of the build that is imported; return milliseconds and more of one peer in one round."""
    import numpy as np

    from tools.bench.network import _placed
    from tools.bench.together import together

    with tempfile.TemporaryDirectory(dir=MEMORY if store == "memory" else out) as name:
        folder = Path(name)
        placed = _placed(scenario_of(model, mode, rounds), folder)
        file = str(folder / "network.yaml")
        certs = str(folder / "certs")
        calls = [(run_peer, (file, peer, str(folder / str(peer)), certs)) for peer in range(placed.n_peers)]
        stamps = together(calls)

    spans = np.array([np.subtract(one[-2], one[WARM_UP]) for one in stamps]) / (len(stamps[0]) - 2 - WARM_UP)
    clock, cpu, step, sent, syncs = (float(column) for column in spans.mean(0))
    return {"beside": (cpu - step) * 1e3, "step": step * 1e3, "wall": clock * 1e3, "bytes": sent, "syncs": syncs}


def measure_floor(model: str, mode: str, kind: str, rounds: int, size: int) -> dict[str, float]:
    """Send as many bytes by bare gRPC; return milliseconds of one process in one round."""
    from dataclasses import asdict

    from tools.bench.network import _floor, _receivers

    scenario = scenario_of(model, mode, rounds)
    receivers = _receivers(scenario)
    messages = sum(len(peers) for place in receivers for peers in place) / scenario.rounds / scenario.n_peers
    pace = asdict(_floor(scenario, receivers, round(size / messages), kind))
    return {"beside": pace["cpu_ms"] / scenario.n_peers, "wall": 1e3 / pace["rounds_per_second"]}


def scenario_of(model: str, mode: str, rounds: int) -> Any:
    """Return the scenario that is measured."""
    from flower_privdec.scenario import parse_scenario
    from tools.bench.network import BASE

    chosen = [f"model.hidden=[{MODELS[model][1]}]", f"network.mode={mode}", f"rounds={rounds + WARM_UP + 2}"]
    return parse_scenario(BASE, overrides=chosen)


def in_build(path: Path, function: str, *arguments: Any, module: Path | None = None) -> dict[str, float]:
    """Call a function of a module in another process, with the packages of a checkout.

    Args:
        module: the file of one whose `--call` does it; by default this one.
    """
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(module or __file__), "--call", json.dumps([function, arguments])]
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path}: {done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(arguments: argparse.Namespace) -> None:
    """Measure all that is asked for, and print it."""
    here = Path(__file__).resolve().parents[1]
    builds = {"now": here}
    if arguments.before:
        builds = {"before": arguments.before.resolve(), "now": here}

    for model in arguments.sizes.split(","):
        name, _, usual = MODELS[model]
        rounds = arguments.rounds or usual
        for mode in arguments.modes.split(","):
            best: dict[str, dict[str, float]] = {}
            stores = arguments.stores.split(",")
            for _ in range(arguments.repeat):
                for store in stores:
                    for build, path in builds.items():
                        found = in_build(path, "measure_peers", model, mode, store, rounds, str(arguments.out))
                        _keep(best, f"{build}, {store}", found)
                size = best[f"now, {stores[0]}"]["bytes"]
                for kind in FLOORS:
                    _keep(best, f"bare gRPC, {kind}", in_build(here, "measure_floor", model, mode, kind, rounds, size))
            _print(f"{name}, {mode}", best, stores)


def _keep(best: dict[str, dict[str, float]], name: str, found: dict[str, float]) -> None:
    if name not in best or found["beside"] < best[name]["beside"]:
        best[name] = found


def _print(title: str, best: dict[str, dict[str, float]], stores: list[str]) -> None:
    floor = min(best[f"bare gRPC, {kind}"]["beside"] for kind in FLOORS)
    print(f"{title}: of one peer in one round", flush=True)
    for name, found in best.items():
        facts = [f"{found['beside']:7.2f} ms CPU beside the step", f"{found['wall']:7.1f} ms"]
        facts.append(f"{found['beside'] / floor:5.2f} of bare gRPC")
        store = name.partition(", ")[2]
        before = best.get(f"before, {store}")
        if before is not None and name.startswith("now") and store in stores:
            facts.append(f"{found['beside'] / before['beside']:.2f} of before")
        if "step" in found:
            facts.append(f"step {found['step']:.2f} ms, {found['bytes'] / 1e6:.2f} MB, {found['syncs']:.1f} syncs")
        print(f"  {name:<18} " + "; ".join(facts), flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier build")
    parser.add_argument("--sizes", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="that are counted")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call is None:
        compare(arguments)
        return
    function, given = json.loads(arguments.call)
    print(json.dumps(globals()[function](*given)))


if __name__ == "__main__":
    main()
