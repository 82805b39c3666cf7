"""`privdec bench --algorithms`: every algorithm has a task, an engine that makes its loop's rounds, and a line."""

import json
from dataclasses import replace

import pytest
from raising import raises

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.common.errors import RunError, ScenarioError
from tools import bench
from tools.bench import catalogue_table, timing
from tools.bench.catalogue_tasks import TASKS


def tiny(task):
    """Return a task with all its parts and little work: no convolutions, which have tests of their own."""
    work = task.workload
    is_linear = work.model == "linear"
    sizes = {
        "n_peers": min(work.n_peers, 4),
        "batch": min(work.batch, 3),
        "examples": 7,
        "shape": (20,) if is_linear else (1, 6, 6),
        "n_classes": work.n_classes if is_linear else 3,
        "model": "linear" if is_linear else "mlp",
        "options": {} if is_linear else {"hidden": [5]},
    }
    settings = dict(task.settings)
    if "snapshot_every" in settings:
        settings["snapshot_every"] = 2
    floor = replace(task.floor, models=min(task.floor.models, 4), tried=min(task.floor.tried, 4))
    floor = replace(floor, full=min(floor.full, 7))
    active = task.active and 2
    return replace(
        task,
        workload=replace(work, **sizes),
        floor=floor,
        settings=settings,
        active=active,
        unit=min(task.unit, 2),
        validation=min(task.validation, 12),
    )


@pytest.fixture
def tiny_tasks(monkeypatch):
    """Make the command measure tiny tasks."""
    monkeypatch.setattr(timing, "STRETCH", 1e-4)
    for title, task in TASKS.items():
        monkeypatch.setitem(TASKS, title, tiny(task))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_stands_in_the_table(name):
    assert name in TASKS
    assert TASKS[name].algorithm == name


def test_every_table_of_variance_reduction_stands_in_it():
    tables = {task.settings.get("table", "factored") for task in TASKS.values() if task.algorithm == "privsgp-vr"}
    assert tables == {"factored", "dense", "blocks", "snapshot"}


@pytest.mark.parametrize("title", TASKS)
def test_an_engine_makes_the_rounds_of_its_loop(title):
    assert catalogue_table.check_task(tiny(TASKS[title])) < catalogue_table.TOLERANCE


@pytest.mark.parametrize("title", TASKS)
def test_an_engine_of_another_rate_is_refused(monkeypatch, title):
    built = type(TASKS[title]).engine

    def tampered(task, setup, noise=None):
        engine = built(task, setup, noise)
        rounds = engine.rounds

        def run(count):
            rates = engine.cohort.learning_rate
            engine.cohort.learning_rate = replace(rates, base=rates.base * 1.00001)
            rounds(count)
            engine.cohort.learning_rate = rates

        engine.rounds = run
        return engine

    monkeypatch.setattr(type(TASKS[title]), "engine", tampered)
    monkeypatch.setattr(catalogue_table, "paired", lambda *_: pytest.fail("it was timed"))
    with raises(RunError, "bench.differs", title):
        catalogue_table.measure_task(tiny(TASKS[title]), 3)


def test_lines_have_figures_and_reasons(monkeypatch, tiny_tasks, capsys):
    monkeypatch.setattr(catalogue_table, "peak", lambda title: 12.0)
    monkeypatch.setattr(catalogue_table, "LEAST_LOOPS", 1e9)
    bench.main(["dda", "pdsl", "privsgp-vr, snapshot"], rounds=3, algorithms=True, as_json=True)
    results = json.loads(capsys.readouterr().out)
    assert list(results) == ["dda", "pdsl", "privsgp-vr, snapshot"]
    for title, result in results.items():
        assert all(0 < result[figure] < float("inf") for figure in ("engine_ms", "times_the_loop", "times_the_floor"))
        assert {"products", "noise", "copies"} <= result["floor"].keys()
        assert result["reason"] == (TASKS[title].reason or "not known")
    assert "trials" in results["pdsl"]["floor"]
    assert "full" in results["privsgp-vr, snapshot"]["floor"]

    catalogue_table.print_catalogue(results)
    assert "12" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_is_measured_in_a_process():
    assert 0 < catalogue_table.peak("dda") < 1000


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"workloads": ["fedsgd"]}, ("bench.unknown", "algorithm='fedsgd'")),
        ({"workloads": [], "device": "cuda"}, ("bench.device",)),
    ],
)
def test_wrong_algorithms_and_devices_are_refused(arguments, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal):
        bench.main(**arguments, algorithms=True)
