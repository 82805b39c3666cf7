"""Every algorithm in processes that host one peer each, against the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from paths import TESTS
from safetensors.torch import load_file
from variants import VARIANTS, settings_for

from flower_privdec import testing
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario, to_yaml

SHORT = [
    "n_peers=4",
    "rounds=3",
    "data.samples=120",
    "data.batch.size=4",
    "compute.dtype=float64",
    "privacy={noise_multiplier: 1.5, delta: 1.0e-3}",
]
OWN = [
    ["topology.name=star", f"algorithm={{module: exchanging:{name}, learning_rate: 0.5}}"]
    for name in ("Courteous", "CrossGradient")
]


def test_processes_that_hold_one_peer_each_do_what_the_engine_does(
    tiny: Callable[..., Scenario], tmp_path: Path, some: Callable[..., list[list[str]]]
) -> None:
    several = [settings_for(*variant) for variant in some(VARIANTS) if "algorithm.name=dp-sgd" not in variant]
    scenarios = [tiny(*SHORT, *settings) for settings in [*several, *OWN]]
    cases = {"peers": 4, "scenarios": [to_yaml(scenario) for scenario in scenarios]}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(TESTS / "support" / "gloo_peers.py"), str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    for number, scenario in enumerate(scenarios):
        experiment = Experiment.build(scenario)
        expected = experiment.algorithm.debiased(testing.run_rounds(experiment, scenario.rounds).state.rows)
        for peer in range(4):
            found = load_file(tmp_path / f"{number}-{peer}.safetensors")["model"][0]
            torch.testing.assert_close(found, expected[peer], rtol=1e-9, atol=1e-12, msg=scenario.algorithm.name)
