"""Noise mechanisms of a user's own: what they are told, what they keep, and what they cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import own_noises
import pytest
import torch
from raising import raises
from salts import pin_salts
from tiny_scenario import Build
from worker_runs import whole

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.noise import PairSecrets
from flower_privdec.rows.keys import seed_keys
from flower_privdec.testing import assert_nothing_else_leaves, recording


def own(name: str, epsilon: str = "noise_multiplier: 1.5") -> str:
    return f"privacy={{{epsilon}, delta: 1.0e-3, noise: {{module: 'own_noises:{name}'}}}}"


def final_rows(experiment: Experiment, rounds: int = 4) -> dict[str, torch.Tensor]:
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(rounds)
    return engine.state.rows


def test_a_mechanism_that_changes_nothing_gives_the_same_bits(build: Build, alike) -> None:
    plain = build()
    mine = alike(build(own("Same", "epsilon: 3.0")), plain)
    assert torch.equal(final_rows(mine)["x"], final_rows(plain)["x"])


def test_a_mechanisms_state_is_the_previous_steps_noise(build: Build) -> None:
    """Under independent noise a release holds ξ_t; here ξ_t - ξ_{t-1} / 2 of the same draws."""
    experiment = build(own("Alternating"))
    with recording() as tape:
        last = final_rows(experiment, 3)["noise.last"]
    noises = [step.after["gradient"] - step.before["gradient"] - step.raw["gradient"] for step in tape.steps]
    fresh = noises[0]
    for noise in noises[1:]:
        fresh = noise + fresh / 2
    torch.testing.assert_close(last, fresh)
    assert float(last.std()) > 0


def test_state_is_in_the_checkpoint_and_in_every_block(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_salts(monkeypatch)
    experiment = build(own("Alternating"))
    rows, _ = whole(experiment, tmp_path / "one", 1)
    shared, _ = whole(experiment, tmp_path / "two", 2)
    assert all(torch.equal(shared[name], part) for name, part in rows.items())
    assert "noise.last" in rows
    under_way = Run(experiment, tmp_path / "again")
    under_way.advance()
    under_way.close()
    resumed = Run(experiment, tmp_path / "again", resume=True)
    while resumed.round_index < experiment.scenario.rounds:
        resumed.advance()
    undivided = final_rows(experiment, 6)
    assert all(torch.equal(resumed.engine.state.rows[name], part) for name, part in undivided.items())
    resumed.finish()
    resumed.close()


def test_state_stays_on_its_peer(build: Build) -> None:
    assert_nothing_else_leaves(build(own("Alternating")))


def test_pairs_share_a_secret_that_cancels(build: Build) -> None:
    """Every row is noised, and the sum over the peers is not."""
    with recording() as tape:
        final_rows(build(own("Cancelling"), "algorithm={name: local, learning_rate: 0.5}"), 2)
    for step in tape.steps:
        noise = step.after["gradient"] - step.before["gradient"] - step.raw["gradient"]
        assert float(noise.std(1).min()) > 0.5
        torch.testing.assert_close(noise.sum(0), torch.zeros_like(noise[0]), rtol=0, atol=1e-9)


def test_each_pair_has_a_secret_of_its_own() -> None:
    secrets = PairSecrets(seed_keys(1, range(4)))
    found = {secrets.of(i, j) for i in range(4) for j in range(i)}
    assert len(found) == 6
    assert secrets.of(1, 3) == secrets.of(3, 1)
    assert PairSecrets(seed_keys(2, range(4))).of(1, 3) not in found
    with raises(ScenarioError, "noise.pair-secret", names="peers 1 and 7"):
        secrets.of(7, 1)


def test_noise_that_declares_nothing_costs_infinity(build: Build, tmp_path: Path) -> None:
    with raises(ScenarioError, "privacy.undeclared", names="own_noises:Alternating"):
        build(own("Alternating", "epsilon: 3.0"))
    run = Run(build(own("Alternating")), tmp_path / "run")
    while run.round_index < 6:
        run.advance()
    run.finish()
    run.close()
    assert {peer["epsilon"] for peer in json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]} == {
        "inf"
    }


def test_a_changed_mechanism_inherits_no_declaration(build: Build) -> None:
    assert max(build(own("Declared", "epsilon: 3.0")).own.protection.epsilons(6)) == pytest.approx(3, rel=1e-2)
    assert own_noises.Changed().released(()) is None
    assert own_noises.Mixed().released(()) is None
    assert math.isinf(build(own("Changed")).own.protection.epsilons(6)[0])


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        (own("Broken"), "noise.build", "own_noises:Broken"),
        (own("build_noise"), "code.kind", "own_noises:build_noise"),
        (own("Same", "epsilon: 3.0, calibration: paper"), "privacy.own-noise", "calibration"),
        (own("Same", "epsilon: 3.0, hardened: true"), "privacy.own-noise", "hardened"),
    ],
)
def test_wrong_mechanisms_are_refused(build: Build, settings: str, code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names):
        build(settings)
