"""Small scenarios that several tests share."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest

from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario, parse_scenario

# The core runs without Flower; so do all tests of the core.
collect_ignore_glob = [] if find_spec("flwr") else ["test_flower*.py"]

TINY = """\
name: tiny
seed: 3
n_peers: 4
rounds: 6
data: {dataset: digits, samples: 240, test_samples: 100, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 2}
compute: {dtype: float64, generator: torch}
"""


@pytest.fixture
def tiny_text() -> str:
    """Return the YAML of a scenario that runs in well under a second."""
    return TINY


@pytest.fixture
def tiny() -> Callable[..., Scenario]:
    """Return a maker of tiny scenarios: tiny("rounds=3", ...)."""
    return lambda *settings: parse_scenario(TINY, overrides=settings)


@pytest.fixture
def build(tiny: Callable[..., Scenario]) -> Callable[..., Experiment]:
    """Return a maker of built tiny experiments."""
    return lambda *settings: Experiment.build(tiny(*settings))


@pytest.fixture
def alike() -> Callable[[Experiment, Experiment], Experiment]:
    """Return a function that gives an experiment the keys of another, so that both draw the same noise and batches."""

    def with_keys_of(experiment: Experiment, other: Experiment) -> Experiment:
        sampler = experiment.own.sampler.like(keys=other.own.sampler.keys)
        return replace(experiment, own=replace(experiment.own, keys=other.own.keys, sampler=sampler))

    return with_keys_of


@pytest.fixture
def label_partitions() -> None:
    """Skip a test where the library that partitions by label is not installed."""
    pytest.importorskip("flwr_datasets")
