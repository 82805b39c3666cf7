"""Noise solved from a budget: never over it, hardly under it, and kept between runs without trust."""

from __future__ import annotations

import json
import logging
import math
import os

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.accountant import accounting, calibration
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import charged_steps, max_steps, noise_multiplier, scale_for_budget
from flower_privdec.privacy.mechanism.events import Release, canonical, event

MNIST = {
    "sampling": "poisson",
    "sampling_rate": 64 / 3750,
    "dataset_size": 3750,
    "batch_size": 64,
    "steps": 400,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_solved", {})
    return tmp_path / "flower_privdec"


def release_of(noise: float, mechanism: dict) -> Release:
    kind, size, batch = (mechanism[k] for k in ("sampling", "dataset_size", "batch_size"))
    return Release(
        kind,
        mechanism["sampling_rate"],
        size,
        batch,
        noise,
        charged_steps(kind, size, batch, mechanism["steps"]),
    )


@pytest.mark.parametrize(
    ("budget", "target", "change"),
    [
        (0.3, 1e-5, {}),
        (1.0, 1e-5, {}),
        (3.0, 1e-5, {}),
        (20.0, 1e-5, {}),
        (3.0, 1e-3, {"sampling_rate": 0.25, "dataset_size": 180, "batch_size": 45, "steps": 100}),
        (1.0, 1e-5, {"sampling_rate": 1 / 3125, "dataset_size": 3125, "batch_size": 1, "steps": 3120}),
        (3.0, 1e-5, {"sampling": "uniform"}),
        (3.0, 1e-5, {"sampling": "shuffle"}),
        (3.0, 1e-5, {"sampling": "full", "sampling_rate": 1.0}),
        (0.01, 1e-7, {"steps": 1}),
    ],
)
def test_noise_spends_the_budget_and_no_more(budget, target, change):
    mechanism = MNIST | change
    noise = noise_multiplier(budget, target, **mechanism)
    release = release_of(noise, mechanism)
    assert 0.995 * budget <= epsilon([release], target) <= budget
    assert epsilon([release_of(noise * 0.99, mechanism)], target) > budget * 0.9975


@settings(max_examples=12)
@given(
    st.floats(0.05, 30.0),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
    st.floats(1e-3, 1.0),
    st.integers(10, 3000),
)
def test_any_sensible_budget_can_be_spent(budget, target, rate, steps):
    mechanism = {
        "sampling": "poisson",
        "sampling_rate": rate,
        "dataset_size": 9999,
        "batch_size": 1,
        "steps": steps,
    }
    release = release_of(noise_multiplier(budget, target, **mechanism), mechanism)
    assert 0.995 * budget <= epsilon([release], target) <= budget


def test_googles_own_accountant_confirms_the_budget():
    noise = noise_multiplier(3.0, 1e-5, **MNIST)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 2e-4)
    accountant.compose(event([release_of(noise, MNIST)]))
    assert 0.995 * 3 <= accountant.get_epsilon(1e-5) <= 3


@pytest.mark.slow
def test_a_schedule_of_distinct_steps_meets_the_budget():
    shape = 2.0 ** (np.arange(300) / 300)

    def make(scale: float) -> list[Release]:
        return [Release("poisson", 0.01, 2500, 25, scale / mu) for mu in shape]

    scale = scale_for_budget(make, 1.0, 1e-4)
    assert 0.995 <= epsilon(make(scale), 1e-4) <= 1.0


def test_many_distinct_steps_are_solved_for_by_few_mechanisms(monkeypatch):
    sizes = []

    def counted(releases, target):
        sizes.append(len(canonical(releases)))
        return epsilon(releases, target)

    def make(scale: float) -> list[Release]:
        return [Release("poisson", 0.02, 2500, 50, scale / mu) for mu in 2.0 ** (np.arange(400) / 400)]

    monkeypatch.setattr(accounting, "epsilon", counted)
    scale = scale_for_budget(make, 2.0, 1e-5)
    assert 0.995 * 2 <= epsilon(make(scale), 1e-5) <= 2.0
    assert sizes.count(400) <= 3
    assert max(size for size in sizes if size < 400) <= 64


@pytest.mark.parametrize(
    ("budget", "target", "code", "names"),
    [
        (0.0, 1e-5, "privacy.epsilon", "epsilon=0.0"),
        (-1.0, 1e-5, "privacy.epsilon", "epsilon=-1.0"),
        (math.inf, 1e-5, "privacy.epsilon", "epsilon=inf"),
        (math.nan, 1e-5, "privacy.epsilon", "epsilon=nan"),
        (1.0, 0.0, "privacy.delta", "delta=0.0"),
        (1.0, 1.0, "privacy.delta", "delta=1.0"),
        (1.0, -1e-5, "privacy.delta", "delta=-1e-05"),
    ],
)
def test_impossible_budgets_are_refused_and_nothing_is_written(budget, target, code, names, own_cache):
    with raises(ScenarioError, code, names=names):
        noise_multiplier(budget, target, **MNIST)
    assert not own_cache.exists()


def test_releases_that_noise_cannot_help_are_refused():
    with raises(ScenarioError, "privacy.calibration", names="more noise"):
        scale_for_budget(lambda scale: [Release("full", 1.0, 5, 5, 1.0)], 0.1, 1e-5)
    with raises(ScenarioError, "privacy.calibration", names="can spend"):
        scale_for_budget(lambda scale: [], 0.1, 1e-5)
    with raises(ScenarioError, "privacy.calibration", names="jumps"):
        scale_for_budget(lambda scale: [Release("full", 1.0, 5, 5, 9.0 if scale > 3 else 0.1)], 1.0, 1e-5)
    with raises(ScenarioError, "privacy.calibration", names="delta above"):
        noise_multiplier(1.0, 1e-3, **(MNIST | {"sampling_rate": 1e-4, "batch_size": 1, "steps": 1}))
    with raises(ScenarioError, "privacy.steps", names="steps=0"):
        noise_multiplier(1.0, 1e-5, **(MNIST | {"steps": 0}))


# --- the cache ---


@pytest.fixture
def evaluations(monkeypatch):
    """Count the accountant's evaluations."""
    calls = []

    def counted(releases, target):
        calls.append(target)
        return epsilon(releases, target)

    monkeypatch.setattr(accounting, "epsilon", counted)
    return calls


def test_a_solution_is_kept_in_process_and_on_disk(own_cache, evaluations, monkeypatch):
    first = noise_multiplier(1.0, 1e-5, **MNIST)
    solved = len(evaluations)
    assert solved > 2
    assert noise_multiplier(1.0, 1e-5, **MNIST) == first
    assert len(evaluations) == solved
    monkeypatch.setattr(calibration, "_solved", {})  # another process
    assert noise_multiplier(1.0, 1e-5, **MNIST) == first
    assert len(evaluations) == solved + 1  # read, and checked
    (entry,) = own_cache.iterdir()
    assert entry.suffix == ".json"


def test_other_inputs_are_another_question(own_cache):
    a = noise_multiplier(1.0, 1e-5, **MNIST)
    b = noise_multiplier(1.0, 1e-6, **MNIST)
    c = noise_multiplier(1.0, 1e-5, **(MNIST | {"steps": 401}))
    assert len({a, b, c}) == 3
    assert len(list(own_cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "cannot be used"),
        ("{not json", "cannot be used"),
        ("[]", "cannot be used"),
        ('{"scale": 1}', "cannot be used"),
        ('{"accountant": "older", "scale": 1}', "from another accountant"),
        ("scale: nan", "not a scale"),
        ("scale: 0.01", "wrong solution"),  # far too little noise: must not be believed
        ("scale: 90", "wrong solution"),
    ],
)
def test_a_bad_cache_entry_is_reported_and_solved_again(own_cache, monkeypatch, caplog, content, said):
    right = noise_multiplier(1.0, 1e-5, **MNIST)
    (entry,) = own_cache.iterdir()
    if content.startswith("scale"):
        content = json.dumps(json.loads(entry.read_text()) | {"scale": float(content.split()[1])})
    entry.write_text(content)
    monkeypatch.setattr(calibration, "_solved", {})
    with caplog.at_level(logging.WARNING):
        assert noise_multiplier(1.0, 1e-5, **MNIST) == right
    assert said in caplog.text
    assert json.loads(entry.read_text())["scale"] == right


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert noise_multiplier(1.0, 1e-5, **MNIST, cache_dir=blocked / "cache") > 1
    assert "cannot be written" in caplog.text


def test_a_crash_while_writing_leaves_no_entry(own_cache, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        noise_multiplier(1.0, 1e-5, **MNIST)
    assert not list(own_cache.glob("*.json"))


# --- how many steps ---


def test_max_steps_is_the_last_that_fits():
    release = Release("poisson", 64 / 3750, 3750, 64, 1.0)
    steps = max_steps(release, 3.0, 1e-5)
    assert epsilon([release.times(steps)], 1e-5) <= 3.0 < epsilon([release.times(steps + 1)], 1e-5)


def test_max_steps_at_its_ends():
    loud = Release("full", 1.0, 10, 10, 0.1)
    assert max_steps(loud, 1.0, 1e-5) == 0
    assert max_steps(Release("full", 1.0, 10, 10, 0.0), 1.0, 1e-5) == 0
    assert max_steps(Release("full", 1.0, 10, 10, 1e6), 1.0, 1e-5, limit=1000) == 1000
    assert max_steps(loud, epsilon([loud.times(1)], 1e-5), 1e-5) == 1
    with raises(ScenarioError, "privacy.epsilon", names="epsilon=0"):
        max_steps(loud, 0.0, 1e-5)
