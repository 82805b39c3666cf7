"""Peers in processes that share nothing but a scenario, and exchange rows over gloo."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from salts import ONE_SALT
from torch import Tensor, distributed

from flower_privdec.experiment import Experiment
from flower_privdec.scenario import parse_scenario
from tools.bench.processes import Peer, fork, join


def main(folder: Path) -> None:
    """Run every scenario of a folder in as many processes as it has peers, and keep their models."""
    cases = json.loads((folder / "cases.json").read_text())
    fork(partial(_one, folder, cases), cases["peers"])


def _one(folder: Path, cases: dict, rank: int) -> None:
    join(folder, rank, cases["peers"])
    for number, text in enumerate(cases["scenarios"]):
        rows = _run(Experiment.build(parse_scenario(text), np.array([rank]), ONE_SALT))
        save_file({"model": rows}, folder / f"{number}-{rank}.safetensors")
        distributed.barrier()
    distributed.destroy_process_group()


def _run(experiment: Experiment) -> Tensor:
    cohort = experiment.cohort()
    peer = Peer(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(experiment.scenario.rounds):
        peer.round()
    return experiment.algorithm.debiased(peer.state.rows)
