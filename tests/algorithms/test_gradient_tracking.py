"""The proof that the package is open: an algorithm that the documents write outside it keeps every law."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hosting import hosting
from pages import ROOT, fences
from raising import raises
from salts import pin_salts

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.core import State, advance
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.testing import BrokenLaw

NAME = "my_tracking.py"
(SOURCE,) = (fence.text for fence in fences(ROOT / "docs" / "tutorial.md") if fence.title == NAME)
TRACKING: dict[str, Any] = {
    "name": "tracking",
    "n_peers": 4,
    "rounds": 6,
    "data": {"dataset": "digits", "samples": 48, "test_samples": 50, "batch": {"size": 4}},
    "model": {"name": "softmax"},
    "algorithm": {"module": "my_tracking:GradientTracking", "learning_rate": 0.2},
    "topology": {"name": "ring"},
    "privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 0.05},
    "evaluation": {"every": 3},
    "compute": {"dtype": "float64"},
}
FULL = {"data": {**TRACKING["data"], "batch": {"sampling": "full"}}, "privacy": "none"}


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of algorithms of one's own be compared."""
    pin_salts(monkeypatch)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Save the page's file where a user would, and import it."""
    (tmp_path / NAME).write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_tracking

    yield my_tracking
    del sys.modules["my_tracking"]


def built(settings: dict[str, Any] | None = None, **sections: Any) -> Experiment:
    return Experiment.build(fp.make_scenario(TRACKING, settings, **sections))


def test_it_is_short() -> None:
    assert len(SOURCE.splitlines()) < 60


@pytest.mark.parametrize("sections", [{}, {"participation": {"kind": "uniform", "fraction": 0.5}}], ids=["all", "some"])
def test_it_keeps_the_laws_of_privacy(sections: dict[str, Any]) -> None:
    experiment = built(**sections)
    testing.assert_sensitivity(experiment, 6, 0, 5, peer=1)
    testing.assert_noise(experiment, 6)
    testing.assert_nothing_else_leaves(experiment, peer=1)


def test_a_step_that_releases_more_than_declared_is_found(module: ModuleType) -> None:
    class Leaking(module.GradientTracking):  # type: ignore[misc,name-defined]
        """Its messages have the gradient without noise in them."""

        released = module.one_sum

        def __init__(self, section: Any) -> None:
            super().__init__(section)
            self.program = (self.leak, *self.program)

        def leak(self, cohort: Any, state: State) -> None:
            batch = cohort.data.batch(state.round_index, cohort.rows)
            clip = cohort.tensor(np.full(len(cohort.peers), 0.05))
            cohort.kernel.add_clipped_(state.rows["tracker"], state.rows["x"], batch, clip, clip)

    module.Leaking = Leaking  # type: ignore[attr-defined]
    leaking = {"module": "my_tracking:Leaking", "learning_rate": 0.2}
    with raises(BrokenLaw, "law.leak", "peer 0"):
        testing.assert_nothing_else_leaves(built(algorithm=leaking))


def test_a_declaration_left_out_is_refused(module: ModuleType) -> None:
    del module.GradientTracking.released  # type: ignore[attr-defined]
    with raises(fp.ScenarioError, "privacy.undeclared", "ε is ∞"):
        built()
    assert built(privacy="none").own.protection is None


def test_the_estimates_follow_the_mean_of_the_steps() -> None:
    """In every round Σ_i y_i = Σ_i s_i, with the noise, whoever is active."""
    for sections in ({}, {"participation": {"kind": "uniform", "fraction": 0.5}}):
        experiment = built(**sections)  # type: ignore[arg-type]
        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        for _ in range(6):
            engine.round()
            rows = engine.state.rows
            assert float(rows["last"].sum(0).norm()) > 0
            torch.testing.assert_close(rows["tracker"].sum(0), rows["last"].sum(0), rtol=1e-9, atol=1e-12)


def test_it_follows_the_equations() -> None:
    """A few rounds with all examples are those of a plain reference over NumPy's matrices."""
    experiment = built(**FULL)
    engine = testing.run_rounds(experiment, 5)
    mixing, cohort = experiment.mixing, experiment.cohort()
    assert mixing is not None
    x = experiment.initial.expand(4, -1).clone().numpy()
    y, last = np.zeros_like(x), np.zeros_like(x)
    for k in range(5):
        step = torch.zeros(x.shape, dtype=torch.float64)
        cohort.add_step_(step, torch.from_numpy(x), k)
        y = y + step.numpy() - last
        last = step.numpy()
        W = mixing.matrix(k).dense()
        x, y = W @ (x + y), W @ y
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-10, atol=1e-12)


def test_a_row_of_a_step_depends_on_that_row() -> None:
    experiment = built()
    whole = experiment.cohort()
    state = experiment.initial_state(whole)
    advance(experiment.algorithm, whole, state)
    for peer in range(4):
        alone = hosting(experiment, [peer])
        cohort = alone.cohort()
        own = alone.initial_state(cohort)
        advance(alone.algorithm, cohort, own)
        for name, rows in own.rows.items():
            torch.testing.assert_close(rows[0], state.rows[name][peer], rtol=1e-12, atol=1e-14)


def test_its_directed_form_follows_the_equations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Push-DIGing as the recipe writes it: a few rounds with all examples are those of NumPy's matrices."""
    (source,) = (f.text for f in fences(ROOT / "docs/how-to/own-algorithm.md") if f.title == "push_tracking.py")
    (tmp_path / "push_tracking.py").write_text(source)
    section = {"module": "push_tracking:PushTracking", "learning_rate": 0.2}
    experiment = built(**FULL, algorithm=section, topology=[[1, 2], [2], [3], [0]])
    engine = testing.run_rounds(experiment, 5)
    mixing, cohort = experiment.mixing, experiment.cohort()
    assert mixing is not None
    x = experiment.initial.expand(4, -1).clone().numpy()
    y, last, w = np.zeros_like(x), np.zeros_like(x), np.ones(4)
    for k in range(5):
        gradient = torch.zeros(x.shape, dtype=torch.float64)
        cohort.add_step_(gradient, torch.from_numpy(x / w[:, None]), k, factor=1.0)
        y, last = y + gradient.numpy() - last, gradient.numpy()
        P = mixing.matrix(k).dense()
        x, y, w = P @ (x - 0.2 * y), P @ y, P @ w
    assert np.ptp(w) > 0.1
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(engine.state.rows["w"].numpy(), w, rtol=1e-12)
    step = torch.zeros(x.shape, dtype=torch.float64)
    cohort.add_step_(step, torch.from_numpy(x), 5)
    cohort.add_step_(gradient.zero_(), torch.from_numpy(x), 5, factor=1.0)
    torch.testing.assert_close(step, -0.2 * gradient)


@pytest.mark.slow
def test_it_finds_the_optimum_where_gossip_stays_beside_it(label_partitions: None) -> None:
    """What it is for: with one class a peer and all examples, its peers agree, and plain gossip's do not."""
    data = {**FULL["data"], "partition": {"kind": "pathological", "classes_per_peer": 3}}  # type: ignore[dict-item]
    common = {"rounds": 400, "evaluation": {"every": 400}, "privacy": "none", "data": data}
    apart = {}
    for algorithm in ({"name": "d-psgd"}, {"module": "my_tracking:GradientTracking"}):
        result = fp.run(fp.make_scenario(TRACKING, algorithm={**algorithm, "learning_rate": 0.2}, **common))
        apart[next(iter(algorithm))] = result.metrics[-1]["consensus_distance"]
    assert apart["module"] < 0.1 * apart["name"]


def test_it_runs_from_python_and_its_models_come_back() -> None:
    result = fp.run(fp.make_scenario(TRACKING))
    assert 2.9 < result.privacy[0]["epsilon"] <= 3
    assert result.summary["traffic"]["vectors"] == 2
    assert result.model()(torch.zeros(1, 1, 8, 8, dtype=torch.float64)).shape == (1, 10)
