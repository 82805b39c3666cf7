"""What a round of PushSum costs beside one of Flower's FedAvg: this build, and another one, in one run.

    python -m tools.flower_round [--before PATH] [--repeat N] [--cases small,small-noise,...] [--stores memory,disk]

PATH is a checkout of an earlier build. Eight nodes of a LocalGrid run in one process, one after the other, so that
neither Ray nor a SuperLink is in the figures. The app trains nothing: both of its functions read the arrays as NumPy's,
as one that loads a model does, and the train function returns them as a new ArrayRecord. In each round each node trains
and evaluates: FedAvg sends it a message for either, PushSum (since it evaluates along) one for both.

A figure is CPU time of the process, all of its threads, between the begins of two rounds: server and nodes together, on
average over the rounds after the first ones. FedAvg and PushSum take turns in one process, and builds take turns; each
figure is the least of the repetitions, since other work on the machine can only add to it.

With `disk` the nodes keep state and ledgers in a folder, as in Flower's simulation; with `memory` they have none, as a
LocalGrid without a folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

NODES = 8
WARM_UP = 6  # rounds that are not counted: compiling, first introductions
FEDAVG = "FedAvg"

# By name: how many parameters, and what PeerMod is given.
NOISE = {"clip_norm": 1.0, "noise_multiplier": 1.0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (100, {}),
    "small-noise": (100, NOISE),
    "small-sealed": (100, {**NOISE, "seal": True}),
    "large": (300_000, {}),
    "large-noise": (300_000, NOISE),
    "large-sealed": (300_000, {**NOISE, "seal": True}),
}
ASKED = {"small": 2.5, "small-noise": 4.0, "small-sealed": 8.0}
ASKED |= {"large": 2.5, "large-noise": 6.0, "large-sealed": 8.0}


def measure(case: str, store: str, rounds: int, repeat: int) -> dict[str, float]:
    """Measure the build that is imported; return the CPU milliseconds of a round of either strategy."""
    from flwr.serverapp.strategy import FedAvg

    from flower_privdec.flower import PeerMod, PushSum

    logging.getLogger("flwr").setLevel(logging.ERROR)
    size, options = CASES[case]
    least = dict[str, float]()
    for _ in range(repeat):
        figures = {
            FEDAVG: _one_run(FedAvg(), [], size, store, rounds),
            "PushSum": _one_run(PushSum(), [PeerMod(**options)], size, store, rounds),
        }
        for name, figure in figures.items():
            least[name] = min(figure, least.get(name, figure))
    return least


def _one_run(strategy: Any, mods: list[Any], size: int, store: str, rounds: int) -> float:
    """Run an app; return the CPU milliseconds of one of its rounds."""
    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from flower_privdec.flower import LocalGrid

    app = ClientApp(mods=mods)
    begins = list[float]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            begins.append(time.process_time())
        metrics = MetricRecord({"num-examples": 1})
        arrays = ArrayRecord(message.content.array_records["arrays"].to_numpy_ndarrays())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        message.content.array_records["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord({"num-examples": 1, "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with tempfile.TemporaryDirectory() as folder:
        grid = LocalGrid(app, NODES, folder=folder if store == "disk" else None)
        initial = ArrayRecord([np.zeros(size, np.float32)])
        strategy.start(grid, initial, num_rounds=WARM_UP + rounds)
    return (begins[-1] - begins[WARM_UP - 1]) / (len(begins) - WARM_UP) * 1e3


def compare(arguments: argparse.Namespace) -> None:
    """Measure all that is asked for, and print it."""
    from tools.round_cost import in_build  # an earlier build, which is only measured, may not have it

    here = Path(__file__).resolve().parents[1]
    builds = {"now": here}
    if arguments.before:
        builds = {"before": arguments.before.resolve(), "now": here}

    for case in arguments.cases.split(","):
        size, options = CASES[case]
        for store in arguments.stores.split(","):
            best: dict[str, dict[str, float]] = {build: {} for build in builds}
            for _ in range(arguments.repeat):
                for build, path in builds.items():
                    found = in_build(path, "measure", case, store, arguments.rounds, 2, module=Path(__file__))
                    for name, figure in found.items():
                        best[build][name] = min(figure, best[build].get(name, figure))
            floor = min(found[FEDAVG] for found in best.values())
            print(f"{size:,} parameters, {options or 'open'}, {store}: CPU of a round of {NODES} nodes", flush=True)
            print(f"  FedAvg          {floor:8.2f} ms", flush=True)
            for build, found in best.items():
                times = found["PushSum"] / floor
                asked = f", asked {ASKED[case]:g}" if build == "now" else ""
                print(f"  PushSum {build:<6}  {found['PushSum']:8.2f} ms, {times:5.2f} of FedAvg{asked}", flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier build")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--stores", default="memory")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24, help="that are counted")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call is None:
        compare(arguments)
        return
    function, given = json.loads(arguments.call)
    print(json.dumps(globals()[function](*given)))


if __name__ == "__main__":
    main()
