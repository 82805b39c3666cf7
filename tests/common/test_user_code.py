"""Parts of a user's own, named in a scenario: what is taken, what is refused, and what a run's name tells of them."""

from __future__ import annotations

import ast
import importlib
import linecache
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import user_parts
from raising import raises
from salts import pin_salts
from tiny_scenario import Build

from flower_privdec import testing
from flower_privdec.cli import main
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.user_code import load_own, only_from
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.source_code import _imported, code_of
from flower_privdec.graph.topology import build_topology
from flower_privdec.planner.plan import make_plan
from flower_privdec.scenario import Scenario, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.sections import OwnTopologySection

BLOBS = "data={dataset: {module: 'user_parts:blobs'}, batch: {size: 8}}"
HEAVY = "algorithm={module: 'user_parts:HeavyBall', learning_rate: 0.1}"
SHORT = ["rounds=4", "data.samples=48", "n_peers=4", "data.batch.size=4", "privacy.clip_norm=0.05"]


def topology(name: str, **arguments: Any) -> str:
    return f"topology={{module: 'user_parts:{name}', arguments: {arguments}}}"


# --- algorithms ---


def test_an_own_algorithm_reads_its_keys_and_shows_defaults(tiny: Callable[..., Scenario]) -> None:
    scenario = tiny(HEAVY)
    assert "beta: 0.5" in to_yaml(scenario)
    assert scenario.algorithm.name == "user_parts:HeavyBall"
    assert parse_scenario(to_yaml(scenario)) == scenario
    other = tiny(HEAVY, "algorithm.beta=0.25")
    assert other.algorithm.beta == 0.25  # type: ignore[union-attr]
    assert len({scenario_hash(each) for each in (scenario, other, tiny(HEAVY, "algorithm.beta=0.5"))}) == 2


def test_an_own_algorithm_is_run_planned_and_drawn(build: Build, tmp_path: Path) -> None:
    experiment = build(HEAVY, "rounds=2")
    planned = make_plan(experiment)
    assert planned["algorithm"] == "user_parts:HeavyBall"
    assert 2.9 < planned["peers"][0]["epsilon"] <= 3
    summary = run(experiment, tmp_path / "run")
    assert summary["algorithm"] == "user_parts:HeavyBall"
    assert 2.9 < float(summary["privacy"][0]["epsilon"]) <= 3


def test_zero_momentum_is_stochastic_gradient_push(build: Build, alike: Any) -> None:
    plain = build("algorithm={name: privsgp, learning_rate: 0.1}")
    own = alike(build(HEAVY, "algorithm.beta=0"), plain)
    one, other = (testing.run_rounds(each, 4).state.rows["x"] for each in (plain, own))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_an_own_algorithm_keeps_the_laws_of_privacy(build: Build) -> None:
    experiment = build(*SHORT, HEAVY)
    testing.assert_sensitivity(experiment, 4, 0, 5)
    testing.assert_noise(experiment, 4)
    testing.assert_nothing_else_leaves(experiment)


def test_an_own_algorithm_without_declaration_has_no_finite_budget(build: Build) -> None:
    undeclared = HEAVY.replace("HeavyBall", "Undeclared")
    with raises(ScenarioError, "privacy.undeclared", "'user_parts:Undeclared'"):
        build(undeclared)
    planned = make_plan(build(undeclared, "privacy={noise_multiplier: 1.0, delta: 1.0e-3}"))
    assert planned["peers"][0]["epsilon"] == "inf"
    assert build(undeclared, "privacy=none").own.protection is None


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        (
            f"{HEAVY[:-1]}, bta: 1}}",
            ("scenario.extra_forbidden", r"'algorithm\.bta'"),
        ),
        (f"{HEAVY[:-1]}, beta: x}}", ("scenario.float_type", r"algorithm\.beta='x'")),
        (
            f"{HEAVY[:-1]}, learning_rate: -1}}".replace("learning_rate: 0.1, ", ""),
            ("scenario.not-positive", r"algorithm\.learning_rate=-1"),
        ),
        ("algorithm={module: 'user_parts:HeavyBall'}", ("scenario.missing", r"'algorithm\.learning_rate'")),
        ("algorithm={module: 3, learning_rate: 1}", ("code.name", r"algorithm\.module=3")),
        ("algorithm={module: 'user_parts:HevyBall', learning_rate: 1}", ("code.no-name", "'HeavyBall'")),
        (
            "algorithm={module: 'user_parts:LEARNING_RATE', learning_rate: 1}",
            ("code.kind",),
        ),
        (
            "algorithm={module: 'user_parts:DescentSection', learning_rate: 1}",
            ("code.kind",),
        ),
        (
            "algorithm={module: 'user_parts:NoSection', learning_rate: 1}",
            ("code.kind",),
        ),
        ("algorithm={module: 'user_parts:Strict', learning_rate: 1, steps: 2}", ("code.fails",)),
        ("algorithm={module: 'user_parts:Unfinished', learning_rate: 1}", ("algorithm.program",)),
        ("algorithm={module: 'user_parts:Deaf', learning_rate: 1}", ("algorithm.weights",)),
        ("algorithm={module: 'user_parts:Broken', learning_rate: 1}", ("code.fails",)),
        (
            "algorithm={module: 'user_parts:Broken', name: sgp, learning_rate: 1}",
            ("scenario.extra_forbidden", r"'algorithm\.name'"),
        ),
    ],
)
def test_an_unfit_own_algorithm_is_refused_in_one_line(build: Build, setting: str, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as error:
        build(setting)
    assert "\n" not in str(error.value)
    assert str(error.value).count("algorithm.module=") <= 1


# --- modules that cannot be imported ---

MODULES = {
    "absent": (None, "there is no module absent; it must be importable from where the command runs"),
    "needy": (
        "import no_such_thing\n",
        "importing needy failed: ModuleNotFoundError: No module named 'no_such_thing' (",
    ),
    "torn": ("x = (\n", "torn.py, line 1 is not valid Python"),
    "angry": ("raise ValueError('one\\ntwo')\n", "importing angry failed: ValueError: one two ("),
    "leaving": ("import sys\nsys.exit(3)\n", "importing leaving ends the program"),
    "empty": ("", "empty has no part"),
}
PLACES = {
    "algorithm": "algorithm={{module: '{}:part', learning_rate: 1}}",
    "topology": "topology={{module: '{}:part'}}",
    "data.dataset": "data.dataset={{module: '{}:part'}}",
    "model": "model={{module: '{}:part'}}",
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("place", PLACES)
def test_an_unloadable_module_is_one_line_and_exit_2(
    name: str,
    place: str,
    tiny_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, message = MODULES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "s.yaml").write_text(tiny_text)
    if source is not None:
        (tmp_path / f"{name}.py").write_text(source)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit) as left:
        main.main(["run", "s.yaml", "--set", PLACES[place].format(name)])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert f"{place}.module='{name}:part'" in said
    assert message in said
    assert f"{name}.py, line 1" in said or name in ("absent", "leaving", "empty")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before
    assert name in sys.modules if name == "empty" else name not in sys.modules
    sys.modules.pop(name, None)


FAILS_ON_THE_TEST_SET = {
    "task.metrics=[{{module: {}:part, better: higher}}]": """
calls = []
def part(outputs, targets):
    calls.append(1)
    if len(calls) > 1:
        raise ValueError("late")
    return 0.5
""",
    "model={{module: {}:part}}": """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        if len(x) > 40:
            raise ValueError("late")
        return super().forward(x.flatten(1))
def part():
    return Net(64, 10)
""",
}


@pytest.mark.parametrize("setting", FAILS_ON_THE_TEST_SET)
def test_own_code_that_fails_on_test_set_is_named(
    setting: str,
    tiny_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"late_{setting[:4]}"
    (tmp_path / f"{name}.py").write_text(FAILS_ON_THE_TEST_SET[setting])
    (tmp_path / "s.yaml").write_text(tiny_text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    line = 1 + FAILS_ON_THE_TEST_SET[setting].splitlines().index(
        next(x for x in FAILS_ON_THE_TEST_SET[setting].splitlines() if "raise" in x)
    )
    with pytest.raises(SystemExit):
        main.main(["run", "s.yaml", "--set", setting.format(name), "--set", "data.test_samples=60"])
    assert re.search(rf"fails on the public test set: .*late.*{name}\.py, line {line}\)", capsys.readouterr().err)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("target", ["", "a", "a:", ":b", "a:b:c", "a.b:c.d", "../a:b", "a b:c", "a:b()", "a..b:c"])
def test_a_target_that_names_no_part_is_refused(target: str) -> None:
    with raises(ScenarioError, "code.name", r"'package\.module:name'"):
        load_own(target, "key")


def test_only_what_is_allowed_is_imported() -> None:
    with only_from(["user_models"]):
        assert load_own("user_models:residual", "model.module")
        with raises(ScenarioError, "code.not-allowed"):
            load_own("user_parts:hub", "topology.module")
        with only_from([]), raises(ScenarioError, "code.not-allowed"):
            load_own("user_models:residual", "model.module")
    assert load_own("user_parts:hub", "topology.module")


# --- what a user's code raises ---

RAISED = {
    "builds": ("def part():\n    raise KeyError('a\\nb')\n", "could not be built with {}: KeyError: 'a"),
    "leaves": ("import sys\ndef part():\n    sys.exit(3)\n", "could not be built with {}: SystemExit: 3"),
    "none": ("def part():\n    pass\n", "must be a torch.nn.Module, not NoneType"),
    "tuple": ("(self.out(x.flatten(1)),)", "returns tuple for 2 examples: it must be one tensor [2, 10]"),
    "whole": ("self.out(x.flatten(1)).long()", "returns torch.int64: it must be floating numbers"),
    "complex": ("self.out(x.flatten(1)) * 1j", "returns torch.complex"),
    "few": ("self.out(x.flatten(1))[:, :3]", "turns 2 examples into [2, 3]: it must be [2, 10]"),
    "exits": ("__import__('sys').exit(4)", "cannot take inputs of shape [1, 8, 8]: SystemExit: 4"),
    "raises": ("{}[('x' * 9000)]", "cannot take inputs of shape [1, 8, 8]: KeyError: 'xxx"),
    "detaches": ("self.out(x.flatten(1)).detach()", "returns what depends on no parameter: is there a detach()"),
    "begins": (
        "from torch import nn\ndef part():\n    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "    nn.init.constant_(made[1].bias, float('nan'))\n    return made\n",
        "begins with NaN or infinity in 1.bias: mend how it is made",
    ),
    "null": (
        "def part():\n    return 1\0",
        "my_null is not valid Python (source code string cannot contain null bytes)",
    ),
    "reads": ("self.out(x.flatten(1) + 0 * x.sum().item())", "cannot be clipped example by example: RuntimeError"),
}
FORWARD = """\
from torch import nn
class part(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)
    def forward(self, x):
        return {}
"""


@pytest.mark.parametrize("name", RAISED)
def test_any_failing_model_is_one_line_and_exit_2(
    name: str,
    tiny_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, message = RAISED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "s.yaml").write_text(tiny_text)
    (tmp_path / f"my_{name}.py").write_text(source if "def part" in source else FORWARD.format(source))
    with pytest.raises(SystemExit) as left:
        main.main(["run", "s.yaml", "--set", f"model={{module: 'my_{name}:part'}}"])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: --set: model")
    assert said.count("\n") == 1
    assert message in said
    assert len(said) < 700
    assert not (tmp_path / "runs").exists()


LATE = """\
import sys
from torch import nn
class Late(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)
    def forward(self, x):
        Late.calls += 1
        if Late.calls > {}:
            {}
        return self.out(x.flatten(1)).cummax(1)[0]
def part():
    return Late()
"""


@pytest.mark.parametrize("what", ["sys.exit(3)", "raise KeyError('secret')"])
@pytest.mark.parametrize("after", [12, 15])
def test_a_failing_forward_ends_the_run_in_one_line(
    what: str,
    after: int,
    tiny_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "s.yaml").write_text(tiny_text)
    (tmp_path / "my_late.py").write_text(LATE.format(after, what))
    sys.modules.pop("my_late", None)
    importlib.invalidate_caches()
    with pytest.raises(SystemExit) as left:
        main.main(["run", "s.yaml", "--set", "model={module: 'my_late:part'}"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 1
    assert said.startswith("error: ")
    assert "forward" in said
    assert ("secret" in said) == ("public test set" in said and "secret" in what)


def test_errors_of_an_own_algorithm_are_named_by_place(build: Build, tmp_path: Path) -> None:
    with raises(RunError, "run.own-code", "1: algorithm.module='user_parts:Stumbling'"):
        run(build("algorithm={module: 'user_parts:Stumbling', learning_rate: 0.1}", "privacy=none"), tmp_path / "run")


def test_errors_while_building_own_parts_are_one_line(build: Build, tmp_path: Path) -> None:
    with raises(ScenarioError, "code.fails", "user_parts:sloppy"):
        build("topology={module: 'user_parts:sloppy'}")
    with raises(ScenarioError, "code.fails"):
        build("algorithm={module: 'user_parts:Leaving', learning_rate: 0.1}")
    with raises(RunError, "run.own-code", r"0: algorithm\.module='user_parts:Late'"):
        run(build("algorithm={module: 'user_parts:Late', learning_rate: 0.1}", "privacy=none"), tmp_path / "run")


def test_a_plan_names_the_gradient_kernel_and_why(build: Build) -> None:
    wanted = {
        "model.name=softmax": "stacked (stacks of linear layers: closed form, all peers at once), because",
        "model={module: 'user_models:convolutional'}": "factored (models proved to keep examples apart",
        "model={module: 'user_models:unproved'}": "vmap (any model: torch.func, a few examples at a time), because",
        "model={module: 'user_models:halved'}": "factored (models proved to keep examples apart",
    }
    for setting, said in wanted.items():
        assert make_plan(build(setting, "rounds=1"))["gradients"].startswith(said)


# --- a run's name depends on it ---


@pytest.mark.parametrize("place", ["algorithm", "topology", "data.dataset"])
def test_the_code_of_an_own_part_changes_the_run(
    place: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_salts(monkeypatch)
    source = {
        "algorithm": "from user_parts import HeavyBall\nclass part(HeavyBall):\n    pass  # 1\n",
        "topology": "def part(n_peers):\n    return [[(peer + 1) % n_peers] for peer in range(n_peers)]  # 1\n",
        "data.dataset": "from user_parts import blobs\ndef part(half):\n    return blobs(half)  # 1\n",
    }[place]
    setting = PLACES[place].format("my_part")
    monkeypatch.syspath_prepend(str(tmp_path))
    ids = []
    for text in (source, source, source.replace("1\n", "2\n")):
        (tmp_path / "my_part.py").write_text(text)
        sys.modules.pop("my_part", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        few = ["data.samples=60", "data.test_samples=20"]
        experiment = build("rounds=1", *few, setting)
        ids.append((experiment.own.run.id, experiment.own.keys[0]))
    assert ids[0] == ids[1] != ids[2]
    assert not {ids[0][0], ids[0][1]} & {ids[2][0], ids[2][1]}


def test_the_code_of_a_base_class_counts_too() -> None:
    class Mine(user_parts.HeavyBall):
        pass

    source = b"user_parts" + Path(user_parts.__file__).read_bytes()
    assert source in list(code_of([Mine]))
    assert source in list(code_of([user_parts.hub]))
    assert list(code_of([torch.nn.Linear(1, 1), len, dict])) == []


def test_threads_do_not_parse_source_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 fails with "AST constructor recursion depth mismatch" where two threads parse at once."""
    inside, most, parse = [], [], ast.parse
    _imported.cache_clear()

    def slow_parse(source: Any, *settings: Any) -> ast.AST:
        inside.append(source)
        most.append(len(inside))
        time.sleep(0.002)
        tree = parse(source, *settings)
        inside.pop()
        return tree

    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(ast, "parse", slow_parse)
        codes = list(pool.map(lambda _: list(code_of([user_parts.HeavyBall])), range(4)))
    assert max(most) == 1
    assert codes[0] == codes[3]


def test_the_arguments_of_an_own_part_change_the_run(build: Build) -> None:
    ids = [build("rounds=1", topology("hub", spokes=spokes)).own.run.id for spokes in (2, 2, 3)]
    assert ids[0] == ids[1] != ids[2]


# --- topologies ---


def test_own_graphs_are_networkx_graphs_lists_mappings_and_topologies() -> None:
    hub = build_topology("user_parts:hub", 5, arguments={"spokes": 3})
    assert hub.directed
    assert hub.edges(0).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [2, 3], [3, 4], [4, 0]]
    ring = build_topology("user_parts:mapping", 5)
    assert not ring.directed
    assert ring.edges(3).tolist() == build_topology("ring", 5).edges(0).tolist()
    assert build_topology("networkx:cycle_graph", 5).edges(0).tolist() == ring.edges(0).tolist()
    assert build_topology("user_parts:changing", 8).period == 3


def test_a_parameter_named_seed_gets_the_scenarios_seed() -> None:
    edges = [
        build_topology("user_parts:seeded", 9, seed=seed, arguments=given).edges(0).tolist()
        for seed, given in ((1, {}), (1, {}), (2, {}), (2, {"seed": 1}))
    ]
    assert edges[0] == edges[1] == edges[3] != edges[2]


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("number", ("topology.own",)),
        ("letters", ("topology.own",)),
        ("few", ("topology.own",)),
        ("loop", ("topology.own", "peer 0")),
        ("outside", ("topology.own", "peer 0")),
        ("text", ("topology.own", "peer 0")),
        ("other", ("topology.own",)),
        ("missing", ("code.fails", "{'kind': 'missing'}")),
    ],
)
def test_an_own_graph_of_wrong_type_is_refused(build: Build, kind: str, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as error:
        build(topology("answer", kind=kind))
    assert "topology.module='user_parts:answer'" in str(error.value)


def test_an_own_graph_is_mixed_over_and_takes_weights(build: Build, tmp_path: Path) -> None:
    experiment = build(topology("hub"), "rounds=2")
    assert experiment.mixing is not None
    assert experiment.mixing.topology.name == "user_parts:hub"
    assert run(experiment, tmp_path / "run")["rounds"] == 2
    with raises(ScenarioError, "mixing.directed", "user_parts:hub"):
        build("topology={module: 'user_parts:hub', weights: metropolis}")
    with raises(ScenarioError, "scenario.extra_forbidden", r"'topology\.spokes'.*module"):
        build("topology={module: 'user_parts:hub', spokes: 3}")


# --- datasets ---


def test_own_arrays_are_dealt_out_and_trained_on(build: Build, tmp_path: Path) -> None:
    experiment = build(BLOBS, "data.samples=50", "data.test_samples=20", "data.dataset.arguments={per_class: 30}")
    public, examples = experiment.public, experiment.own.examples
    assert (public.name, public.n_classes, tuple(public.x.shape)) == ("own", 2, (20, 3))
    assert tuple(examples.x.shape) == (50, 3)
    assert examples.x.dtype is torch.float32
    summary = run(experiment, tmp_path / "run")
    assert summary["accuracy"]["mean_model"] > 0.5
    assert (tmp_path / "run" / "ledger" / "own.jsonl").exists()


def test_reading_the_test_set_draws_no_training_example(
    tiny: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, blobs = [], user_parts.blobs

    def watched(part: str, **arguments: Any) -> Any:
        asked.append(part)
        return blobs(part, **arguments)

    monkeypatch.setattr(user_parts, "blobs", watched)
    Agreement.of(tiny(BLOBS))
    assert asked == ["test"]


def test_the_root_reaches_an_own_dataset_peer_by_peer(build: Build) -> None:
    plain = build(BLOBS).own.examples
    rooted = build(BLOBS[:-1] + ", root: there}").own.examples
    assert not torch.equal(plain.x, rooted.x)
    each = build(BLOBS[:-1] + ", root: '{peer}', test: tests}").own.examples
    assert each.sizes.tolist() == [80] * 4


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("{module: 'user_parts:no_data', arguments: {kind: three}}", ("data.no-pair", "'test'")),
        ("{module: 'user_parts:no_data', arguments: {kind: number}}", ("data.no-pair", "'test'")),
        (
            "{module: 'user_parts:no_data', arguments: {kind: ragged}}",
            ("data.no-arrays", "'test'"),
        ),
        ("{module: 'user_parts:no_data', arguments: {kind: short}}", ("data.lengths",)),
        ("{module: 'user_parts:no_data'}", ("code.fails", "'test'")),
        ("{modul: 'user_parts:no_data'}", ("scenario.extra_forbidden", r"'data\.dataset\.modul'")),
        ("digit", ("scenario.literal_error", r"data\.dataset='digit'")),
        ("3", ("scenario.model_type", r"data\.dataset")),
    ],
)
def test_an_own_dataset_of_wrong_type_is_refused(build: Build, setting: str, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as error:
        build(f"data={{dataset: {setting}, batch: {{size: 8}}}}")
    assert "\n" not in str(error.value)


def test_own_sections_can_be_built_in_python(tiny: Callable[..., Scenario]) -> None:
    scenario = tiny(HEAVY)
    again = Scenario(**{name: getattr(scenario, name) for name in Scenario.model_fields} | {"topology": own_topology()})
    assert again.algorithm == scenario.algorithm
    assert Experiment.build(again).mixing is not None
    data = scenario.data.model_copy(update={"dataset": OwnSection(module="user_parts:blobs"), "samples": None})
    data = data.model_copy(update={"test_samples": None})
    assert Experiment.build(replace_section(again, data=data)).public.name == "own"


def own_topology() -> OwnTopologySection:
    return OwnTopologySection(module="user_parts:hub")


def replace_section(scenario: Scenario, **sections: Any) -> Scenario:
    return scenario.model_copy(update=sections)
