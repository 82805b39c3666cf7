"""No key is taken in silence: set to another value it changes the run, is refused, or is named as one without effect.

The law walks through the sections of scenarios of many kinds. Runs are compared with equal draws, for otherwise any
change of a scenario would draw other noise, and so change the numbers of a key without effect, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import yaml
from tiny_scenario import TINY

from flower_privdec.common.catalogue import Choice
from flower_privdec.common.errors import PrivdecError
from flower_privdec.common.fields import Section
from flower_privdec.common.registry import PartName
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment, run_name, view
from flower_privdec.planner.optimal_rounds import optimum
from flower_privdec.scenario import Scenario, load_scenario, parse_scenario
from flower_privdec.scenario.loading import shipped
from flower_privdec.scenario.unused_keys import unused_keys

ROUNDS = 3
# Of an algorithm that takes one value only, which is what the default means.
ONE_VALUE = {("one pair at a time", "topology.weights")}
# Keys that change no number of a simulation, and why nobody need be told.
NOT_OF_A_RUN = {
    "name": "names files",
    "earlier": "a run writes it",
    "compute": "device, speed and the source of draws",
    "evaluation": "steers what is tried and written",
    "network": "of deployed peers; what a simulation uses of it is tried by its own tests",
    "data.source": "names data in a ledger",
    "data.root": "a place",
    "data.test": "a place",
    "data.at_least": "a promise, which is checked: peers with fewer examples are refused",
    "data.batch.small_peers": "what happens to peers that are smaller than a batch, of which there are none here",
    "task.metrics": "what is measured",
    "model.from": "a place",
    "privacy.ledger": "a place",
    "privacy.hardened": "of deployed peers",
    "privacy.noise_cap": "warned of by the plan if it changes nothing, see test_noise_balance",
    "model.name": "each model has a base of its own, elsewhere",
    "algorithm.name": "each kind of algorithm has a base of its own here",
    "seeds.run": "batches and noise follow from it by the hash, which this law holds equal",
    "attack": "no key of its own here",
}
IRREGULAR = "topology={name: erdos-renyi, probability: 0.6}"  # on which weights of different kinds differ
MORE = "seeds={data: 5, model: 6, run: 7}"
BASES = {
    "local": ["algorithm.name=local", MORE, "plan={smoothness: 1}"],
    "server": ["algorithm.name=fedavg", "topology.name=server"],
    "push-sum": [IRREGULAR, "algorithm.optimizer={name: momentum}", "plan={smoothness: 1, gradient_bound: 2}"],
    "gossip": [IRREGULAR, "algorithm.name=d-psgd", "algorithm.average={decay: 0.5}"],
    "dual averaging": ["topology={name: erdos-renyi, probability: 0.5}", "algorithm={name: dp-dda}", MORE],
    "tables": [IRREGULAR, "algorithm.name=privsgp-vr"],
    "two models": [IRREGULAR, "algorithm.name=feddeper"],
    "own schedule": [IRREGULAR, "algorithm={name: dyn-c-d2p, learning_rate: 0.5, initial_clip: 2}"],
    "no privacy": [IRREGULAR, "privacy=none", "plan={smoothness: 1}", "participation={kind: uniform, fraction: 0.5}"],
    "one pair at a time": [IRREGULAR, "algorithm.name=adp2-sgd"],
}


@pytest.fixture
def equal_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all scenarios on the same data draw the same numbers."""
    for module in (run_name, view):
        monkeypatch.setattr(module, "numbers_hash", lambda scenario: "the same")
    monkeypatch.setattr(run_name, "shared_secret", lambda *parts: b"the same")


def effect(scenario: Scenario) -> str:
    """Return a hash of what a scenario comes to: data, exchanges, participants, noise, plan and trajectory."""
    experiment = Experiment.build(scenario)
    digest = hashlib.sha256(experiment.tested + experiment.constants.encode())
    if experiment.mixing is not None:
        for k in range(ROUNDS):
            digest.update(repr(experiment.mixing.matrix(k).links()).encode())
    digest.update(np.concatenate([experiment.participation.active(k) for k in range(ROUNDS)]).tobytes())

    plan = experiment.own.protection
    if plan is not None:
        digest.update(repr([(account.delta, account.budget, account.spends) for account in plan.accounts]).encode())
        digest.update(repr(optimum(experiment)).encode())

    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(scenario.rounds)
    for name, rows in sorted(engine.state.rows.items()):
        digest.update(name.encode() + rows.numpy().tobytes())
    return digest.hexdigest()


def keys_of(section: Section, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each key of a section and of those inside it, its field, and its value."""
    for name, field in type(section).model_fields.items():
        key = f"{path}{field.alias or name}"
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from keys_of(value, f"{key}.")
        else:
            yield key, field, value


def other_values(field: Any, value: Any) -> list[Any]:
    """Return some values that a key may have in place of its own, by its type."""
    others: list[Any] = [word for word in _words(field.annotation) if word not in (value, None)]
    for rule in field.metadata:
        if isinstance(rule, Choice):
            others += [name for name in rule if name != value]
        elif isinstance(rule, PartName):
            others += [name for name in rule.registry if name != value]

    text = repr(field.annotation)
    if isinstance(value, bool):
        others.append(not value)
    elif isinstance(value, int):
        others.append(value + 1)
    elif isinstance(value, float):
        others += [1.5 * value or 0.5, value / 2]
    elif value is None and not others:
        if "bool" in text:
            others.append(True)
        if "int" in text:
            others += [1, 2, 3]
        if "float" in text:
            others += [0.5, 2.0]
    return others


def _words(annotation: Any) -> Iterator[Any]:
    """Yield the words of all literals in a type."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for part in get_args(annotation):
        yield from _words(part)


def is_left_out(key: str) -> bool:
    """Return whether a key, or a section that it is in, changes no number of a simulation."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in NOT_OF_A_RUN for end in range(1, len(parts) + 1))


@pytest.mark.slow
@pytest.mark.usefixtures("equal_draws")
@pytest.mark.parametrize("kind", BASES)
def test_every_key_has_an_effect_or_is_named(kind: str) -> None:
    settings = [*BASES[kind], "n_peers=6", f"rounds={ROUNDS}"]
    base = parse_scenario(TINY, overrides=settings)
    named_before = {key for unused in unused_keys(base) for key in unused.keys}
    same = effect(base)

    silent = []
    blamed = []
    for key, field, value in keys_of(base):
        if is_left_out(key):
            continue

        effects = []  # of the values that are not refused; one of them may mean what stands there already
        for other in other_values(field, value):
            try:
                changed = parse_scenario(TINY, overrides=[*settings, f"{key}={json.dumps(other)}"])
                has_effect = effect(changed) != same
            except PrivdecError:
                continue
            named = {name for unused in unused_keys(changed) for name in unused.keys} | named_before
            effects.append(has_effect or key in named)
            if has_effect and key in named:
                blamed.append(f"{key}={other}")
        if effects and not any(effects) and (kind, key) not in ONE_VALUE:
            silent.append(key)
    assert not silent
    assert not blamed


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (["algorithm.name=local", "topology.mixing_steps=3"], "topology.mixing_steps"),
        (["algorithm.name=local", "topology={name: ring, weights: metropolis}"], "topology.name, topology.weights"),
        (["algorithm.name=local", "network.final_mixing=3"], "network.final_mixing"),
        (["topology={name: server, weights: metropolis}"], "topology.weights"),
        (["seeds={data: 1, model: 2, run: 3}"], "seed"),
        (["network={mode: synchronous, quorum: 2, lead: null}"], "network.quorum, network.lead"),
        (["algorithm.name=local", "privacy.paper.c_2=2"], "privacy.paper.c_2"),
        (["algorithm.name=local", "plan.smoothness=2"], "plan.smoothness"),
        (["algorithm={name: const-d2p, learning_rate: 1, clip_norm: 2}", "privacy.clip_norm=3"], "privacy.clip_norm"),
        (["algorithm.learning_rate_schedule=linear"], "algorithm.learning_rate_schedule"),
        (["features={kind: scattering, ridge: 0.1}"], "features.ridge"),
        (["model.from=runs/x", "model.init=zeros"], "model.init"),
        ([], None),
        (["algorithm.name=local"], None),
    ],
)
def test_a_key_without_effect_is_named(settings: list[str], keys: str | None) -> None:
    lines = [str(unused) for unused in unused_keys(parse_scenario(TINY, overrides=settings))]
    if keys is None:
        assert not lines
    else:
        assert [line.partition(" ha")[0] for line in lines] == [keys]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_no_bundled_scenario_has_unused_keys(name: str) -> None:
    path = shipped()[name]
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert not unused_keys(load_scenario(Path(path))), data["algorithm"]
