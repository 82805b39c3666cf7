"""Flower's relay mode, one peer on each node: seconds a round when the messages stay in this process, and by
`flwr run`, where Flower's queues set the pace."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flower_privdec.scenario import Scenario, parse_scenario
from tools.bench.workloads import (
    CLIP_NORM,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    SEED,
    Workload,
    synthetic,
)

FLWR_PEERS = 4
FLWR_ROUNDS = 10
TRIED = 100  # examples on which the models are tried, at the end


def in_process(workload: Workload, rounds: int) -> float:
    """Return the wall milliseconds of a relay round on an in-process grid with a node for each peer."""
    from flower_privdec.flower.apps.client_app import client_app
    from flower_privdec.flower.apps.server_app import Relay
    from flower_privdec.flower.launch.local_grid import LocalGrid

    with tempfile.TemporaryDirectory() as folder, _silence():
        scenario = scenario_of(workload, rounds, Path(folder))
        relay = Relay(scenario, Path(folder) / "run")
        relay.start(LocalGrid(client_app(), workload.n_peers))
    return relay.recorder.seconds / rounds * 1e3


def by_flwr_run(workload: Workload) -> float:
    """Return the wall milliseconds of a relay round of FLWR_PEERS SuperNodes under `flwr run`."""
    from flower_privdec.flower.launch.launcher import flower_run

    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(workload.resized(FLWR_PEERS), FLWR_ROUNDS, Path(folder))
        summary = flower_run(scenario, Path(folder) / "run", mode="relay")
    return float(summary["wall_seconds"]) / FLWR_ROUNDS * 1e3


def scenario_of(workload: Workload, rounds: int, folder: Path) -> Scenario:
    """Write a workload's data to a folder and return the scenario that trains on them."""
    examples = synthetic(workload)
    path = folder / "data.npz"
    x = np.asarray(examples.x)
    y = np.asarray(examples.y)
    np.savez(path, x_train=x, y_train=y, x_test=x[:TRIED], y_test=y[:TRIED])
    batch = {"sampling": "uniform", "size": workload.batch}
    sections = {
        "name": "benchmark",
        "seed": SEED,
        "n_peers": workload.n_peers,
        "rounds": rounds,
        "data": {"dataset": "npz", "root": str(path), "batch": batch},
        "model": {"name": workload.model, **workload.options},
        "task": {"loss": workload.loss},
        "algorithm": {"name": "privsgp", "learning_rate": LEARNING_RATE},
        "privacy": {"noise_multiplier": NOISE_MULTIPLIER, "clip_norm": CLIP_NORM, "delta": 1e-5},
        "evaluation": {"every": rounds},
    }

    return parse_scenario(json.dumps(sections))  # JSON is YAML


@contextmanager
def _silence() -> Iterator[None]:
    """Keep Flower's log lines out of the table."""
    loggers = [logging.getLogger(name) for name in ("flwr", "flwr.privdec")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
