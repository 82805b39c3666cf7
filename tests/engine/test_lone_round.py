"""Rounds in one compiled loop: the bits of the parts one by one, wherever it takes a round at all."""

import importlib.util

import pytest
import torch

from flower_privdec.core import State
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.lone_round import LoneRound
from flower_privdec.errors import BudgetError
from flower_privdec.testing import recording

if importlib.util.find_spec("numba") is None:
    pytest.skip("the fast generator needs numba", allow_module_level=True)

LONE = (
    "data={dataset: breast-cancer, samples: 200, test_samples: 60, batch: {sampling: uniform, size: 1}}",
    "model={name: linear}",
    "task={loss: hinge}",
    "rounds=9",
)
WHOLE = {
    "plain": (),
    "logistic": ("task={loss: logistic}",),
    "squared hinge": ("task={loss: squared-hinge}",),
    "without privacy": ("privacy=none",),
    "noise and rates that change": ("privacy.schedule={rho_c: 3, rho_mu: 2}", "algorithm.learning_rate_decay=0.9"),
    "epochs": ("data.batch.sampling=shuffle",),
    "a ring": ("topology.name=directed-ring",),
    "two peers": ("n_peers=2",),
    "sgp": ("algorithm.name=sgp",),
}
IN_PARTS = {
    "some absent": ("participation={kind: uniform, fraction: 0.5}",),
    "no shift": ("topology={name: erdos-renyi, probability: 0.9}",),
}
NOT_AT_ALL = {
    "torch's noise": ("compute.generator=torch",),
    "two examples": ("data.batch.size=2",),
    "any number of examples": ("data.batch.sampling=poisson",),
    "two outputs": ("task={loss: cross-entropy}",),
    "another program": ("algorithm.name=d-psgd", "topology.name=ring"),
    "two layers": ("model={name: mlp, hidden: [3]}",),
}


def experiment_of(build, *settings, dtype="float32"):
    return build(*LONE, f"compute={{dtype: {dtype}, generator: fast}}", *settings)


def engines(experiment):
    """Return an engine as it is, and one that takes the parts one by one."""
    both = []
    for _ in range(2):
        cohort = experiment.cohort()
        both.append(Engine(experiment.algorithm, cohort, experiment.initial_state(cohort)))
    both[1]._whole = None
    return both


def same_bits(one: State, other: State) -> bool:
    return one.round_index == other.round_index and all(torch.equal(one.rows[name], other.rows[name]) for name in "xw")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("settings", [*WHOLE.values(), *IN_PARTS.values()], ids=[*WHOLE, *IN_PARTS])
def test_whole_rounds_have_the_bits_of_their_parts(build, settings, dtype):
    experiment = experiment_of(build, *settings, dtype=dtype)
    whole, parts = engines(experiment)
    for _ in range(experiment.scenario.rounds):
        whole.round()
        parts.round()
        assert same_bits(whole.state, parts.state)
    assert not torch.equal(whole.state.rows["x"][0], experiment.initial)


@pytest.mark.parametrize(
    ("settings", "taken"), [(WHOLE["plain"], True), *((each, False) for each in IN_PARTS.values())]
)
def test_a_round_is_taken_whole_where_everybody_is_active_and_hears_one(build, settings, taken):
    whole, _ = engines(experiment_of(build, *settings))
    assert whole._whole.take_(whole.state) is taken
    assert whole.state.round_index == taken


@pytest.mark.parametrize("settings", NOT_AT_ALL.values(), ids=NOT_AT_ALL)
def test_what_the_loop_does_not_know_is_left_to_the_parts(build, settings):
    experiment = experiment_of(build, *settings)
    assert LoneRound.of(experiment.algorithm, experiment.cohort()) is None


def test_rows_that_somebody_else_put_there_are_gone_on_from(build):
    whole, parts = engines(experiment_of(build))
    for engine in (whole, parts):
        for _ in range(3):
            engine.round()
            engine.state.rows["x"] = engine.state.rows["x"].clone()
            engine.state.rows["w"] = engine.state.rows["w"] * 1.5
        engine.round()
    assert same_bits(whole.state, parts.state)


def test_steps_are_paid_for_before_they_are_taken(build, tmp_path, monkeypatch):
    def refused(step, rows):
        raise BudgetError("no room")

    experiment = experiment_of(build, "privacy.epsilon=5")
    cohort = experiment.cohort(tmp_path)
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for done in range(1, experiment.scenario.rounds):
        engine.round()
        assert cohort.ledger.charged >= done
    before = engine.state.rows["x"].clone()
    monkeypatch.setattr(cohort.ledger, "pay", refused)
    with pytest.raises(BudgetError):
        engine.round()
    assert engine.state.round_index == done
    assert torch.equal(engine.state.rows["x"], before)


def test_loops_are_compiled_where_no_folder_can_keep_them(monkeypatch):
    import numba

    from flower_privdec.rows import compiling

    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(function, **options)

    original = numba.njit
    monkeypatch.setattr(numba, "njit", njit)
    assert compiling.compiled(lambda x: 1 / x)(0.0) == float("inf")


def test_who_watches_the_door_sees_every_release_of_a_whole_round(build):
    whole, parts = engines(experiment_of(build))
    with recording() as tape:
        whole.round()
    parts.round()
    assert [step.step for step in tape.steps] == [0]
    assert same_bits(whole.state, parts.state)
