"""A scenario that runs in well under a second, and the types of the fixtures that make and build it."""

from collections.abc import Callable

from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario

Tiny = Callable[..., Scenario]
Build = Callable[..., Experiment]

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
compute: {dtype: float64, generator: portable}
"""
