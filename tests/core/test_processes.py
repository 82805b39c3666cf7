"""Every algorithm in processes that host one peer each, against the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gloo_peers
import pytest
import torch
from command_line import forked, status_of
from safetensors.torch import load_file
from salts import pin_salts
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


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of algorithms of one's own be compared."""
    pin_salts(monkeypatch)


def test_processes_of_one_peer_each_match_the_engine(
    tiny: Callable[..., Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: Callable[..., list[list[str]]]
) -> None:
    several = [settings_for(*variant) for variant in some(VARIANTS) if "algorithm.name=dp-sgd" not in variant]
    scenarios = [tiny(*SHORT, *settings) for settings in [*several, *OWN]]
    cases = {"peers": 4, "scenarios": [to_yaml(scenario) for scenario in scenarios]}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert status_of(forked(gloo_peers.main, tmp_path)) == 0
    for number, scenario in enumerate(scenarios):
        experiment = Experiment.build(scenario)
        expected = experiment.algorithm.debiased(testing.run_rounds(experiment, scenario.rounds).state.rows)
        for peer in range(4):
            found = load_file(tmp_path / f"{number}-{peer}.safetensors")["model"][0]
            torch.testing.assert_close(found, expected[peer], rtol=1e-9, atol=1e-12, msg=scenario.algorithm.name)
