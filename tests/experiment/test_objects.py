"""Objects in place of names: taken, told apart, counted, and refused where they cannot be had."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import user_models
import user_parts
from api_sections import SECTIONS
from raising import raises
from salts import pin_salts
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.algorithms.sgp import SGP
from flower_privdec.common.user_code import PYTHON, _given
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.object_hash import object_hash
from flower_privdec.graph.topology import DirectedExponential
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.reporting.page import write_report
from flower_privdec.scenario import scenario_hash, to_yaml

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(240, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)
NUMBERS = (X[:, 0] - X[:, 1]).astype(np.float32)
TEST = (X[200:], Y[200:])
BATCH = {"size": 8}


def given(**sections: Any) -> fp.Scenario:
    """Return a scenario over given arrays."""
    data = {"train": (X[:200], Y[:200]), "test": TEST, "batch": BATCH}
    return fp.make_scenario({**SECTIONS, "data": data, "compute": {"dtype": "float64"}, **sections})


def inside(source: str, name: str = "part", **values: Any) -> Any:
    """Return what a source defines, as a notebook would: it lies in no module."""
    names = {"__name__": "__main__", "torch": torch, "np": np, "nn": nn, **values}
    exec(textwrap.dedent(source), names)
    return names[name]


NET = "def part():\n    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))\n"
LOSS = "def part(outputs, target):\n    return torch.nn.functional.cross_entropy(outputs, target) * 0.5\n"
METRIC = "def part(outputs, targets):\n    return (outputs.argmax(-1) == targets).double().mean() / 2\n"


# --- every kind of part ---


@pytest.mark.slow
def test_objects_of_every_kind_make_a_run() -> None:
    scenario = given(
        model=inside(NET),
        task={"loss": inside(LOSS), "metrics": [inside(METRIC), "accuracy"]},
        algorithm={
            "module": inside("class part(Base):\n    released = one_sum\n", Base=SGP, one_sum=one_sum),
            "learning_rate": 0.5,
        },
        topology=nx.cycle_graph(4, create_using=nx.DiGraph),
    )
    result = fp.run(scenario)
    last = result.metrics[-1]
    assert last["part"]["mean_model"] == pytest.approx(last["accuracy"]["mean_model"] / 2)
    assert 2.9 < result.privacy[0]["epsilon"] <= 3
    assert result.model(2)(torch.zeros(3, 6, dtype=torch.float64)).shape == (3, 2)
    assert result.summary["algorithm"] == f"{PYTHON}:part"
    assert fp.plan(scenario).algorithm == f"{PYTHON}:part"
    table = fp.compare(scenario, seeds=[1, 2], metrics=["part", "peer-part", "loss"])
    assert table.rows[0]["part"]["n"] == 2


def test_given_parts_compute_what_named_ones_do() -> None:
    """The same algorithm, graph, model and data by name and as objects: the same numbers, bit for bit."""
    sections = {**SECTIONS, "privacy": "none", "rounds": 3}
    named = fp.make_scenario(
        sections,
        model={"module": "user_models:residual"},
        algorithm={"module": "user_parts:HeavyBall", "learning_rate": 0.1},
        topology={"module": "user_parts:hub", "arguments": {"spokes": 3}},
    )
    objects = fp.make_scenario(
        sections,
        model=lambda: user_models.residual(),
        algorithm={"module": user_parts.HeavyBall, "learning_rate": 0.1},
        topology={"module": lambda n_peers: user_parts.hub(n_peers, 3)},
    )
    one, other = (fp.run(each).models["mean"] for each in (named, objects))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_object_in_a_module_is_named_by_path() -> None:
    scenario = fp.make_scenario(
        SECTIONS,
        model=user_models.residual,
        algorithm={"module": user_parts.HeavyBall, "learning_rate": 0.1},
        topology={"module": user_parts.hub, "arguments": {"spokes": 3}},
    )
    assert (scenario.model.module, scenario.algorithm.name) == ("user_models:residual", "user_parts:HeavyBall")
    assert scenario.topology.name == "user_parts:hub"
    assert scenario.given == ()
    assert fp.make_scenario(SECTIONS, data={"dataset": {"module": user_parts.blobs}, "batch": BATCH}).given == ()


@pytest.mark.parametrize(
    "graph",
    [
        nx.cycle_graph(4),
        [[1, 3], [0, 2], [1, 3], [2, 0]],
        {0: [1, 3], 1: [0, 2], 2: [1, 3], 3: [2, 0]},
        {"module": nx.cycle_graph(4), "weights": "metropolis"},
        lambda n_peers: nx.cycle_graph(n_peers),
    ],
)
def test_a_graph_is_given_in_many_forms(graph: Any) -> None:
    mixing = Experiment.build(given(topology=graph)).mixing
    ring = Experiment.build(given(topology={"name": "ring"})).mixing
    assert mixing is not None
    assert ring is not None
    assert mixing.topology.edges(0).tolist() == ring.topology.edges(0).tolist()


def test_a_changing_topology_and_unnamed_section_are_accepted() -> None:
    mixing = Experiment.build(given(topology=DirectedExponential(4))).mixing
    assert mixing is not None
    assert mixing.topology.period == 2
    assert given(topology={"weights": "column-stochastic"}).topology.name == "directed-exponential"


def test_a_graph_changed_later_stays_as_given() -> None:
    graph = nx.cycle_graph(4)
    scenario = given(topology=graph)
    graph.remove_edge(0, 1)
    mixing = Experiment.build(scenario).mixing
    assert mixing is not None
    assert len(mixing.topology.edges(0)) == 8


# --- data ---


class Visits(Dataset[tuple[Tensor, int]]):
    """A torch dataset of one's own."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(X[self.start + i]), int(Y[self.start + i])


@pytest.mark.parametrize(
    "train",
    [
        (X[:200], Y[:200]),
        (torch.from_numpy(X[:200]), torch.from_numpy(Y[:200])),
        (X[:200].tolist(), Y[:200].tolist()),
        TensorDataset(torch.from_numpy(X[:200]), torch.from_numpy(Y[:200])),
        Visits(0, 200),
    ],
    ids=["arrays", "tensors", "lists", "tensor dataset", "own dataset"],
)
def test_data_of_every_form_are_dealt_out_alike(train: Any) -> None:
    examples = Experiment.build(given(data={"train": train, "test": Visits(200, 240), "batch": BATCH})).own.examples
    plain = Experiment.build(given()).own.examples
    assert torch.equal(examples.x, plain.x)
    assert torch.equal(examples.y, plain.y)
    assert [part.tolist() for part in examples.parts] == [part.tolist() for part in plain.parts]


def test_a_list_gives_each_peer_its_own() -> None:
    cuts = (0, 30, 80, 120, 200)
    train = [(X[a:b], Y[a:b]) for a, b in pairwise(cuts)]
    train[2] = Visits(80, 120)  # type: ignore[call-overload]
    scenario = given(data={"train": train, "test": TEST, "batch": BATCH})
    own = Experiment.build(scenario).own
    assert own.examples.sizes.tolist() == [30, 50, 40, 80]
    for peer, part in enumerate(own.examples.parts):
        assert torch.equal(own.examples.x[torch.from_numpy(part)], torch.from_numpy(X[cuts[peer] : cuts[peer + 1]]))
    for n_peers in (3, 5):
        with raises(fp.ScenarioError, "api.data-per-peer", f"n_peers={n_peers}"):
            fp.make_scenario(scenario, n_peers=n_peers)
    with raises(fp.ScenarioError, "data.own-files", "partition"):
        fp.make_scenario(scenario, {"data.partition": {"kind": "sizes", "sizes": [1.0] * 4}})


def test_data_are_copied_and_may_be_given_again() -> None:
    x, y = X[:200].copy(), Y[:200].copy()
    scenario = given(data={"train": (x, y), "test": TEST, "batch": BATCH})
    x[:], y[:] = 9, 0
    assert torch.equal(Experiment.build(scenario).own.examples.x, torch.from_numpy(X[:200]))
    each = fp.make_scenario(scenario, {"data.train": [(X[:20], Y[:20])] * 4, "data.test": TEST})
    assert Experiment.build(each).own.examples.sizes.tolist() == [20] * 4
    back = fp.make_scenario(each, {"data.train": (X[:200], Y[:200]), "data.test": TEST})
    assert Experiment.build(back).own.examples.sizes.tolist() == [50] * 4
    assert scenario_hash(back) == scenario_hash(scenario)


def test_numbers_and_labels_are_given_too() -> None:
    scenario = given(
        data={"train": (X[:200], NUMBERS[:200]), "test": (X[200:], NUMBERS[200:]), "batch": BATCH},
        task={"loss": "mse"},
        model={"name": "linear"},
    )
    assert fp.run(scenario).metrics[-1]["rmse"]["mean_model"] > 0


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        ({"train": (X, Y)}, ("api.data", r"data\.test")),
        ({"train": (X, Y), "test": TEST, "dataset": "digits"}, ("api.data-twice", r"data\.dataset")),
        ({"train": (X, Y), "test": TEST, "root": "here"}, ("api.data-twice", r"data\.root")),
        ({"train": X, "test": TEST}, ("api.data", r"data\.train")),
        ({"train": (X, Y, X), "test": TEST}, ("api.data", r"data\.train")),
        ({"train": [], "test": TEST}, ("api.data", "data.train")),
        ({"train": [(X, Y), X], "test": TEST}, ("api.data", r"data\.train\[1\]")),
        ({"train": (["a"], Y), "test": TEST}, ("api.data", r"data\.train")),
        ({"train": ([[1.0], [1.0, 2.0]], Y), "test": TEST}, ("api.data", r"data\.train")),
        ({"train": (X, Y), "test": TensorDataset(torch.zeros(3, 6))}, ("api.data", r"data\.test")),
        ({"train": (X[:3], Y), "test": TEST}, ("data.lengths",)),
        ({"train": (X[:, :5], Y), "test": TEST}, ("data.shapes", r"\[5\]")),
        ({"train": (X * np.nan, Y), "test": TEST}, ("data.not-finite",)),
    ],
)
def test_data_of_wrong_type_are_refused(data: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with raises(fp.ScenarioError, *refusal) as error:
        Experiment.build(given(data={**data, "batch": BATCH}))
    assert "\n" not in str(error.value)


# --- ledgers ---


def test_given_data_are_charged_under_their_source(tmp_path: Path) -> None:
    privacy = {"epsilon": 3.0, "delta": 1e-3, "ledger": str(tmp_path / "ledger")}
    with raises(fp.ScenarioError, "data.source", r"data\.source"):
        given(privacy=privacy)
    data = {"train": (X[:200], Y[:200]), "test": TEST, "batch": BATCH, "source": "visits"}
    fp.run(given(privacy=privacy | {"epsilon": 1.0}, data=data, rounds=2))
    assert (tmp_path / "ledger" / "visits.jsonl").is_file()
    ledger = fp.plan(given(privacy=privacy, data=data)).ledger
    assert ledger is not None
    assert 0.9 < ledger["epsilon_before"] <= 1
    for source in ("../visits", "", "a b"):
        with raises(fp.ScenarioError, "scenario.string_pattern_mismatch", r"data\.source="):
            given(data=data | {"source": source})
    with raises(fp.ScenarioError, "data.source", "source"):
        fp.make_scenario(SECTIONS, {"data.source": "mine"})


def test_given_data_without_ledger_folder_are_counted_separately() -> None:
    result = fp.run(given(rounds=2))
    assert (result.folder / "ledger" / "own.jsonl").is_file()
    assert result.privacy[0]["scope"] == "this run alone"


# --- keys ---


def ids(*scenarios: fp.Scenario) -> list[str]:
    return [Experiment.build(each).own.run.id for each in scenarios]


@pytest.mark.parametrize(
    ("place", "source", "old", "new"),
    [
        ("model", NET, "Tanh", "ReLU"),
        ("loss", LOSS, "0.5", "0.25"),
        ("algorithm", "class part(Base):\n    released = one_sum\n    factor = 1\n", "1\n", "2\n"),
    ],
)
def test_visible_content_of_given_code_names_its_run(
    monkeypatch: pytest.MonkeyPatch, place: str, source: str, old: str, new: str
) -> None:
    pin_salts(monkeypatch)

    def made(text: str) -> fp.Scenario:
        part = inside(text, Base=SGP, one_sum=one_sum)
        section = {
            "model": {"model": part},
            "loss": {"task": {"loss": part}},
            "algorithm": {"algorithm": {"module": part, "learning_rate": 0.5}},
        }[place]
        return given(**section)

    one, again, other = made(source), made("\n\n" + source), made(source.replace(old, new))
    found = ids(one, again, other)
    assert found[0] == found[1] != found[2]
    assert scenario_hash(one) == scenario_hash(again) == scenario_hash(other)  # it is public, and tells no code


def test_a_runs_key_depends_on_given_graphs_and_data() -> None:
    ring, path = given(topology=nx.cycle_graph(4)), given(topology=nx.path_graph(4))
    moved = X[:200].copy()
    moved[0, 0] += 1e-3
    other = given(data={"train": (moved, Y[:200]), "test": TEST, "batch": BATCH})
    found = ids(ring, given(topology=nx.cycle_graph(4)), path, given(), other, given())
    assert found[0] == found[1]
    assert found[3] == found[5]
    assert len(set(found)) == 4
    assert scenario_hash(other) == scenario_hash(given())  # nor does it confirm a guess of the data


def test_no_hash_of_what_is_given_is_written_down() -> None:
    scenario = given(model=inside(NET))
    text = to_yaml(scenario)
    assert all(part.content.hex()[:16] not in text for part in scenario.given)
    fresh = {part.target for part in scenario.given}
    del scenario
    gc.collect()
    assert not fresh & set(_given)  # nothing is kept for scenarios that are gone
    assert not fresh & {part.target for part in given(model=inside(NET)).given}


def test_objects_changed_since_given_are_refused() -> None:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "__main__", "WIDTH": 4}
    exec(
        "def wide():\n    return WIDTH\n"
        "def net():\n    return nn.Sequential(nn.Linear(6, wide()), nn.Linear(wide(), 2))\n",
        names,
    )
    scenario = given(model=names["net"])
    Experiment.build(scenario)
    names["WIDTH"] = 5
    with raises(fp.ScenarioError, "code.changed", r"model\.module=.*what"):
        Experiment.build(scenario)
    names["WIDTH"] = 4
    Experiment.build(scenario)


def test_a_function_may_complete_what_it_closes_over() -> None:
    """As models of transformers do their configurations."""
    sizes: dict[str, int] = {"width": 4}
    net = inside(
        "def part():\n    sizes.setdefault('inputs', 6)\n    return nn.Linear(sizes['inputs'], 2)\n", sizes=sizes
    )
    scenario = given(model=net)
    keys = [Experiment.build(scenario).own.keys for _ in range(2)]
    assert keys[0] != keys[1]  # a salt of its own, for code
    sizes["width"] = 5
    with raises(fp.ScenarioError, "code.changed"):
        Experiment.build(scenario)


def test_contentless_values_keep_a_part_distinct() -> None:
    """A lock, a generator or an open file: two such parts have two names and two runs, be they alike or not."""
    for held in (threading.Lock(), (each for each in ()), sys.stdout):
        net = inside("def part():\n    held\n    return nn.Linear(6, 2)\n", held=held)
        one, other = given(model=net), given(model=net)
        assert one.model.module != other.model.module
        keys = [Experiment.build(each).own.keys[0] for each in (one, other)]
        assert keys[0] != keys[1]


# --- what a hash of code takes in ---


def changed(source: str, old: str, new: str, **values: Any) -> tuple[bytes, bytes, bytes]:
    return (
        object_hash(inside(source, **values)),
        object_hash(inside("# a comment\n\n" + textwrap.dedent(source), **values)),
        object_hash(inside(source.replace(old, new), **values)),
    )


CODES = {
    "a constant": ("def part():\n    return 1\n", "1", "2"),
    "a name that is called": ("def part(x):\n    return x.sin()\n", "sin", "cos"),
    "a default": ("def part(x=1):\n    return x\n", "1", "2"),
    "a keyword's default": ("def part(*, x=1):\n    return x\n", "1", "2"),
    "a global": ("A = 1\ndef part():\n    return A\n", "1", "2"),
    "a helper": ("def helper():\n    return 1\ndef part():\n    return helper()\n", "1", "2"),
    "a helper's helper": ("def a():\n    return 1\ndef b():\n    return a()\npart = lambda: b()\n", "1", "2"),
    "a closure": ("def make(x):\n    return lambda: x\npart = make(1)\n", "1", "2"),
    "a global of an inner function": ("A = 1\ndef part():\n    return [A for _ in range(3)]\n", "A = 1", "A = 2"),
    "an array": ("A = np.arange(3)\ndef part():\n    return A\n", "3", "4"),
    "a tensor": ("A = torch.ones(3)\ndef part():\n    return A\n", "ones", "zeros"),
    "an array's type": ("A = np.zeros(3, np.int32)\ndef part():\n    return A\n", "int32", "float32"),
    "a method": ("class part:\n    def f(self):\n        return 1\n", "return 1", "return 2"),
    "an attribute": ("class part:\n    a = 1\n", "1", "2"),
    "a base's method": (
        "class B:\n    def f(self):\n        return 1\nclass part(B):\n    pass\n",
        "return 1",
        "return 2",
    ),
    "a cached function": (
        "import functools\n@functools.lru_cache\ndef part():\n    return 1\n",
        "return 1",
        "return 2",
    ),
    "a static method": ("class part:\n    @staticmethod\n    def f():\n        return 1\n", "return 1", "return 2"),
    "a property": ("class part:\n    @property\n    def f(self):\n        return 1\n", "return 1", "return 2"),
    "what an object holds": ("class C:\n    def __init__(self):\n        self.a = 1\npart = C()\n", "1", "2"),
    "a module's parameters": (
        "held = nn.Linear(2, 2)\nnn.init.ones_(held.weight)\nnn.init.ones_(held.bias)\ndef part():\n    return held\n",
        "ones_(held.bias)",
        "zeros_(held.bias)",
    ),
    "a set": ("A = {'a', 'b', 'c', 'd'}\ndef part():\n    return A\n", "'d'", "'e'"),
    "a dictionary": ("A = {'a': 1}\ndef part():\n    return A\n", "1", "2"),
    "an import": ("def part():\n    import math\n    return math.pi\n", "math.pi", "math.e"),
    "a random state": ("A = np.random.default_rng(1)\ndef part():\n    return A\n", "rng(1)", "rng(2)"),
    "an exception's handler": (
        "def part():\n    try:\n        return 1\n    except ValueError:\n        return 2\n",
        "ValueError",
        "KeyError",
    ),
}


@pytest.mark.parametrize("kind", CODES)
def test_the_hash_of_an_object_follows_its_content(kind: str) -> None:
    source, old, new = CODES[kind]
    one, again, other = changed(source, old, new)
    assert one == again != other


def test_partial_functions_and_methods_are_told_apart() -> None:
    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def add(self, x: int) -> int:
            return x + self.n

    assert (
        object_hash(functools.partial(max, 1))
        == object_hash(functools.partial(max, 1))
        != object_hash(functools.partial(max, 2))
    )
    assert object_hash(Adder(1).add) == object_hash(Adder(1).add) != object_hash(Adder(2).add)
    assert len({object_hash(each) for each in (1, 1.0, "1", b"1", True, (1,), [1], {1}, {1: 1}, None)}) == 10


def test_too_deep_objects_have_no_hash() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with raises(fp.ScenarioError, "api.not-hashable"):
        object_hash(nested)


def test_self_referencing_objects_have_a_hash() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    other: list[Any] = [2]
    other.append(other)
    assert object_hash(ring) != object_hash(other)
    source = "def part(n):\n    return part(n - 1) if n else 1\n"
    assert (
        object_hash(inside(source))
        == object_hash(inside(source))
        != object_hash(inside(source.replace("else 1", "else 2")))
    )


SETS = """\
A = {'a', 'b', 'c', 'd', 'e'}
def helper(x):
    return x in A
class Base:
    n = 3
class part(Base):
    def f(self) -> 'int | None':
        return helper('a'), self.n
"""


@pytest.mark.slow
def test_a_hash_is_the_same_in_another_process() -> None:
    code = f"from test_objects import inside, object_hash; print(object_hash(inside({SETS!r})).hex())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another one than this process has
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert said.strip() == object_hash(inside(SETS)).hex()


# --- where objects cannot go ---


def test_a_run_of_objects_is_readable_but_not_rerunnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = inside("class part(Base):\n    released = one_sum\n", Base=SGP, one_sum=one_sum)
    scenario = given(
        model=inside(NET), algorithm={"module": algorithm, "learning_rate": 0.5}, topology=nx.cycle_graph(4)
    )
    result = fp.run(scenario, out=tmp_path / "run")
    models = result.models
    assert (tmp_path / "run" / "scenario.yaml").read_text().startswith("# Parts named __python__ were given")
    fp.load_run(tmp_path / "run").model()  # while they live
    for part in scenario.given:
        monkeypatch.delitem(_given, part.target)
    again = fp.load_run(tmp_path / "run")  # as another process would
    assert (again.metrics, again.summary) == (result.metrics, result.summary)
    assert all(
        torch.equal(models[owner][name], each) for owner, state in again.models.items() for name, each in state.items()
    )
    assert again.model(into=inside(NET)())[2].weight.shape == (2, 4)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    for rerun in (again.model, lambda: fp.run(again.scenario), lambda: fp.plan(tmp_path / "run" / "scenario.yaml")):
        with raises(fp.ScenarioError, "code.not-here"):
            rerun()  # type: ignore[operator]


def test_a_stopped_run_of_objects_needs_the_same_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_salts(monkeypatch)

    def made(source: str) -> fp.Scenario:
        return given(model=inside(source))

    fp.run(made(NET), out=tmp_path / "run", on_evaluation=lambda metrics: True)
    with raises(fp.ScenarioError, "checkpoint.other-data", "model's"):
        fp.run(made(NET.replace("Tanh", "ReLU")), out=tmp_path / "run", resume=True)
    gc.collect()
    resumed = fp.run(made(NET), out=tmp_path / "run", resume=True)  # under another token
    assert torch.equal(resumed.models["mean"]["0.weight"], fp.run(made(NET)).models["mean"]["0.weight"])


def test_other_processes_cannot_have_objects(tmp_path: Path) -> None:
    scenario = given(model=inside(NET))
    with raises(fp.ScenarioError, "api.object-in-processes", "^data: "):
        fp.run(scenario, runtime="flower", out=tmp_path / "run")
    with raises(fp.ScenarioError, "api.object-in-processes", "jobs=2"):
        fp.compare(scenario, jobs=2, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_cells_of_objects_are_found_by_what_they_are(tmp_path: Path) -> None:
    for source, cells in ((NET, 1), (NET, 1), (NET.replace("Tanh", "ReLU"), 2)):
        kept = given(model=inside(source), rounds=2)
        fp.compare(kept, seeds=[1], folder=tmp_path / "cells")
        if cells == 1:
            first = kept  # the name holds for as long as a scenario does
        assert len(list((tmp_path / "cells").iterdir())) == cells
    assert first.given


def test_objects_in_place_of_classes_get_a_remedy() -> None:
    made = SGP(fp.make_scenario(SECTIONS).algorithm)
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"model": nn.Linear(6, 2)}, ("api.instance",)),
        ({"algorithm": {"module": made, "learning_rate": 1}}, ("api.instance", r"algorithm\.module")),
        ({"algorithm": {"module": dict, "learning_rate": 1}}, ("code.kind", "flower_privdec")),
        ({"model": 3}, ("api.not-callable",)),
        ({"task": {"loss": 3}}, ("api.not-callable", r"task\.loss")),
        ({"task": {"metrics": [3]}}, ("api.not-callable", r"task\.metrics")),
        ({"topology": 3}, ("topology.own",)),
        ({"topology": nx.cycle_graph(5)}, ("topology.own",)),
    ]
    for sections, refusal in wrong:
        with raises(fp.ScenarioError, *refusal) as error:
            Experiment.build(given(**sections))
        assert "\n" not in str(error.value)


# --- laws ---


def test_given_parts_keep_the_laws_of_privacy() -> None:
    scenario = given(
        model=inside(NET),
        task={"loss": inside(LOSS), "metrics": ["accuracy"]},
        algorithm={
            "module": inside("class part(Base):\n    released = one_sum\n", Base=user_parts.HeavyBall, one_sum=one_sum),
            "learning_rate": 0.1,
        },
        privacy={"epsilon": 3.0, "delta": 1e-3, "clip_norm": 0.05},
    )
    experiment = Experiment.build(scenario)
    testing.assert_sensitivity(experiment, 4, 3)
    testing.assert_noise(experiment, 4)
    testing.assert_nothing_else_leaves(experiment)


def test_a_metric_decides_no_noise_and_makes_other_cells(tmp_path: Path) -> None:
    both = [given(task={"metrics": [inside(METRIC.replace("2", by))]}, rounds=2) for by in ("2", "4")]
    assert len(set(ids(*both))) == 1
    rows = [fp.compare(each, seeds=[1], folder=tmp_path / "cells").rows[0]["part"]["mean"] for each in both]
    assert rows[0] == pytest.approx(2 * rows[1])
