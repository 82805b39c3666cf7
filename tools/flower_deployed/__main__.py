"""Where the time of a round goes on a Flower deployment: a SuperLink and SuperNodes with TLS on this machine, by part.

    python -m tools.flower_deployed [--nodes 4] [--rounds 4] [--poll SECONDS] [--no-evaluate]

The app trains nothing, has 100 parameters and private peers. Flower (1.41 to 1.43) gives each message to a process of
its own. That process notes its CPU time when it begins to import the app, after Flower's modules, after this package's,
and before and after it answers; the rest of a round is Flower's: a SuperNode without work looks for a message every 3
seconds, a SuperExec for a task every --poll seconds (FLWR_SUPEREXEC_TASK_POLL_INTERVAL, 1 by default).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, median

from tools.flower_deployed.deployment import Deployment, flower_version

PARTS = {
    "Python and Flower": "begun",
    "what else of Flower": "flower",
    "this package": "imported",
    "the message": "answered",
}

PYPROJECT = """
[project]
name = "flower-deployed"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "tools"
fab-format-version = 0

[tool.flwr.app.components]
serverapp = "timed.server:app"
clientapp = "timed.client:app"

[tool.flwr.app.config]
rounds = {rounds}
evaluate = {evaluate}
"""
SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from flower_privdec.flower import PushSum

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = PushSum(fraction_evaluate=context.run_config["evaluate"])
    strategy.start(grid, ArrayRecord([np.zeros(100, np.float32)]), num_rounds=context.run_config["rounds"])
"""
CLIENT = """
import json
import os
import time

begun = time.process_time()
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

flower = time.process_time()
from flower_privdec.flower import PeerMod

imported = time.process_time()


def timed(message, context, app):
    answer = app(message, context)
    answered = time.process_time()
    stamps = {"begun": begun, "flower": flower, "imported": imported, "answered": answered, "clock": time.time()}
    stamps |= {"round": message.metadata.group_id, "type": message.metadata.message_type}
    with open(os.environ["TIMED"], "a") as file:
        file.write(json.dumps(stamps) + chr(10))
    return answer


app = ClientApp(mods=[timed, PeerMod(clip_norm=1.0, noise_multiplier=1.0)])


@app.train()
def train(message, context):
    arrays = ArrayRecord(message.content["arrays"].to_numpy_ndarrays())
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}), reply_to=message)
"""


def measure(nodes: int, rounds: int, poll: float, evaluate: float) -> None:
    """Run the app, and print seconds a round and CPU seconds of a message's process by part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = folder / "app"
        (app / "timed").mkdir(parents=True)
        (app / "pyproject.toml").write_text(PYPROJECT.format(rounds=rounds, evaluate=evaluate))
        for module, text in (("__init__", ""), ("server", SERVER), ("client", CLIENT)):
            (app / "timed" / f"{module}.py").write_text(text)

        stamps_file = folder / "stamps.jsonl"
        with Deployment(folder, nodes, poll, {"TIMED": str(stamps_file)}) as flower:
            flower.start_superlink()
            for peer in range(nodes):
                flower.start_node(peer)
            said = flower.flwr("run", "app", "here", "--stream")
        if not stamps_file.exists():
            raise RuntimeError(said[-3000:])
        stamps = [json.loads(line) for line in stamps_file.read_text().splitlines()]

    ends: dict[int, float] = {}
    for stamp in stamps:
        done_round = int(stamp["round"])
        ends[done_round] = max(stamp["clock"], ends.get(done_round, 0.0))
    if not set(range(1, rounds + 1)) <= ends.keys():
        raise RuntimeError(said[-3000:])
    seconds = [ends[done_round] - ends[done_round - 1] for done_round in range(2, rounds + 1)]
    listed = ", ".join(f"{one:.1f}" for one in seconds)
    asked = f"{nodes} nodes, poll {poll:g} s, evaluate {evaluate:g}"
    print(f"{flower_version()}, {asked}: {median(seconds):.1f} s a round ({listed})")

    of_rounds = [stamp for stamp in stamps if int(stamp["round"]) > 1]
    before = 0.0
    for part, stamp_name in PARTS.items():
        until = mean(stamp[stamp_name] for stamp in of_rounds)
        print(f"  {part:<17} {until - before:5.2f} CPU s of a message's process")
        before = until


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--no-evaluate", action="store_true")
    arguments = parser.parse_args()
    measure(arguments.nodes, arguments.rounds, arguments.poll, 0.0 if arguments.no_evaluate else 1.0)


if __name__ == "__main__":
    main()
