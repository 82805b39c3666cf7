"""The task in flower_privdec: `privdec run` of a scenario, every peer averaging with every other, no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCENARIO = """\
name: side-by-side
seed: 1
n_peers: {n_peers}
rounds: {rounds}
data: {{dataset: mnist, root: {data}, partition: {{kind: iid}}, batch: {{sampling: {sampling}, size: {batch}}}}}
model: {{name: mlp, hidden: [{hidden}]}}
algorithm: {{name: fedavg, local_steps: {steps}, learning_rate: {learning_rate}}}
topology: {{name: complete}}
privacy: {privacy}
evaluation: {{every: {rounds}}}
"""


def scenario(task: dict) -> str:
    """Return the task as a scenario."""
    example = task["privacy"] == "example"
    section = "{{epsilon: {epsilon}, delta: {delta}, clip_norm: {clip_norm}, calibration: rigorous}}".format(**task)
    steps = -(-60_000 // task["n_peers"] // task["batch"])
    return SCENARIO.format(
        **task | {"privacy": section if example else "none"},
        sampling="poisson" if example else "uniform",
        steps=steps,
    )


def main() -> None:
    task = json.loads(Path(os.environ["SIDE_BY_SIDE_TASK"]).read_text())
    Path("task.yaml").write_text(scenario(task))
    privdec = Path(sys.executable).parent / "privdec"
    subprocess.run([privdec, "run", "task.yaml", "--out", "run"], check=True)
    summary = json.loads(Path("run/summary.json").read_text())
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    outcome = {"training_seconds": last["seconds"], "accuracy": summary["accuracy"]["mean_model"]}
    if task["privacy"] != "none":
        outcome["claimed_epsilon"] = max(peer["epsilon"] for peer in summary["privacy"])
    Path(task["outcome"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
