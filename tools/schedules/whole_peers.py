"""Peers of a rehearsal under drawn faults, with the parts that light peers lack, drawn from a seed too.

They train a small model with their noise, codec, rule against liars, or participation. A case costs some tenths of a
second, so there are fewer of them than of light peers; the laws are the same, but that x is not summed: see
`search.run`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from flower_privdec.peer.memory_trainer import MemoryHome, rehearsed
from flower_privdec.scenario import Scenario, parse_scenario
from tools.schedules.light_peers import SHORT

SCENARIO = """\
name: whole
seed: 3
data: {dataset: digits, samples: 240, test_samples: 60, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 100}
compute: {dtype: float64, generator: portable}
"""
COLLUDING = 1
NOISE = [
    "{kind: cancelling, colluding: 1, secrets: complete, strength: 2.0}",
    "{kind: cancelling, colluding: 1, absent: 1}",
    "{kind: cancelling, colluding: 1, bands: 3}",
    "{kind: cancelling, colluding: 1, bands: 3, absent: 1}",
    "{kind: correlated, bands: 3}",
]
CODECS = ["bfloat16", "int8", "int4", "top-k", "random-k"]
PARTS = ("noise", "codec", "robust", "participation")
ROBUST = "{kind: clipped, byzantine: 1}"


def settings_of(seed: int) -> tuple[str, ...]:
    """Draw which parts the peers of a seed have, one or two of them: settings laid over the scenario."""
    draw = Random(f"whole {seed}")
    parts = draw.sample(PARTS, draw.choice([1, 1, 2]))
    settings = []
    noise = draw.choice(NOISE)
    is_refused = "robust" in parts or ("participation" in parts and "bands" in noise)
    if "noise" in parts and not is_refused:
        settings.append(f"privacy.noise={noise}")
    if "codec" in parts:
        settings.append(f"network.codec={draw.choice(CODECS)}")
    if "robust" in parts:
        settings.append(f"network.robust={ROBUST}")
    if "participation" in parts:
        settings.append("participation={kind: uniform, fraction: 0.6}")
    return tuple(settings)


def scenario_of(settings: tuple[str, ...], mode: str, n_peers: int, rounds: int, graph: str, network: str) -> Scenario:
    """Return the scenario of a network; see `search.Case`."""
    size = [f"n_peers={n_peers}", f"rounds={rounds}", f"topology={graph}", f"network={{mode: {mode}, {network}}}"]
    return parse_scenario(SCENARIO, overrides=[*size, *settings])


def home_of(scenario: Scenario) -> MemoryHome:
    """Return a home of a scenario's peers, which wait as long as light ones."""
    home = MemoryHome(rehearsed(scenario))
    home.times = replace(home.times, start=SHORT, standstill=20 * SHORT)
    return home
