"""Mistakes of people who write their first scenario: one line, with what they meant and a remedy that works."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from raising import raises

import flower_privdec
import flower_privdec as fp
from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import load_scenario, parse_scenario

FIRST = """\
name: first
n_peers: 4
rounds: 2
data: {dataset: digits, samples: 80, test_samples: 40, batch: {size: 5}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
"""
FILE_OF_EDGES = "topology: {name: edge-list, file: line.txt, directed: true}\n"


def changed(old: str, new: str) -> str:
    """Return the first scenario with one thing written in another way."""
    assert old in FIRST
    return FIRST.replace(old, new, 1)


# What is written, and what the line has to say beside naming it.
MISTAKES = {
    "number in quotes": (
        changed("epsilon: 3.0", "epsilon: '3.5'"),
        r"privacy\.epsilon='3\.5'.*write 3\.5, without quotes",
    ),
    "comma in braces": (changed("epsilon: 3.0", "epsilon: 4,0"), r"'4,0' .*write 4\.0"),
    "comma, second key": (changed("0.5}", "0,5}"), r"'0,5' .*write 0\.5"),
    "comma in a block": (
        changed("{epsilon: 3.0, delta: 1.0e-3}", "\n  epsilon: 4,5\n  delta: 0.001"),
        r"privacy\.epsilon='4,5'.*write 4\.5",
    ),
    "percentage": (changed("1.0e-3", "0.1%"), r"privacy\.delta='0\.1%'.*write 0\.001"),
    "percentage of a batch": (changed("size: 5", "rate: 10%"), r"data\.batch\.rate='10%'.*write 0\.1"),
    "word for a number": (changed("epsilon: 3.0", "epsilon: low"), r"privacy\.epsilon='low' must be a number"),
    "delta of one": (changed("1.0e-3", "1"), r"privacy\.delta=1 must be < 1"),
    "not a number": (changed("epsilon: 3.0", "epsilon: .nan"), r"privacy\.epsilon=nan"),
    "no peers": (changed("n_peers: 4", "n_peers: 0"), r"n_peers=0 must be >= 1"),
    "one peer": (changed("n_peers: 4", "n_peers: 1"), r"n_peers=1 .*local"),
    "peers as 1e9": (changed("n_peers: 4", "n_peers: 1e9"), r"n_peers=1000000000\.0 .*write 1000000000$"),
    "peers as 4.0": (changed("n_peers: 4", "n_peers: 4.0"), r"write 4$"),
    "peers in quotes": (changed("n_peers: 4", "n_peers: '4'"), r"write 4, without quotes"),
    "peers listed": (changed("n_peers: 4", "n_peers: [0, 1]"), r"n_peers=\[0, 1\] must be a whole number"),
    "more peers than examples": (changed("n_peers: 4", "n_peers: 5000"), r"n_peers=5000 must be 1 to 80"),
    "share as a size": (changed("size: 5", "size: 0.1"), r"data\.batch\.size=0\.1.*data\.batch\.rate"),
    "size as a rate": (changed("size: 5", "rate: 10"), r"data\.batch\.rate=10.*data\.batch\.size"),
    "epochs": (changed("rounds", "epochs"), r"'epochs'; did you mean 'rounds'"),
    "clients": (changed("n_peers", "num_clients"), r"'num_clients'; did you mean 'n_peers'"),
    "camel case": (changed("n_peers", "nPeers"), r"did you mean 'n_peers'"),
    "lr": (changed("learning_rate", "lr"), r"did you mean 'learning_rate'"),
    "clip of another library": (changed("delta", "max_grad_norm: 1, delta"), r"did you mean 'privacy\.clip_norm'"),
    "batch at the top": (FIRST + "batch_size: 5\n", r"did you mean 'data\.batch\.size'"),
    "gpu": (FIRST + "compute: {device: gpu}\n", r"did you mean 'cuda'"),
    "privacy off": (changed("{epsilon: 3.0, delta: 1.0e-3}", "off"), r"privacy=False.*write privacy: none"),
    "privacy empty": (changed("{epsilon: 3.0, delta: 1.0e-3}", ""), r"privacy=None.*write privacy: none"),
    "name that is a boolean": (changed("name: first", "name: no"), r"name=False must be text"),
    "unknown dataset": (changed("dataset: digits", "dataset: cifar"), r"did you mean 'cifar10'"),
    "unknown noise": (changed("delta", "noise: gaussian, delta"), r"privacy\.noise='gaussian'.*cancelling"),
    "graph as a word": (FIRST + "topology: ring\n", r"topology='ring'.*write \{name: ring\}"),
    "tab": (changed("data: {", "data:\n\tdataset: x\nmore: {"), r"spaces, not tabs"),
    "merge key": (
        changed("model: {name: softmax}", "model:\n  <<: {name: softmax}"),
        r"merge keys .*write the keys out",
    ),
    "key twice": (FIRST + "rounds: 9\n", r"'rounds' stands twice"),
    "no space": (changed("n_peers: 4", "n_peers:4"), r"a space after the colon"),
    "equals sign": (changed("n_peers: 4", "n_peers = 4"), r"`key: value`"),
    "brace not closed": (changed("{size: 5}}", "{size: 5}"), r"close each \{"),
    "indented": (changed("model:", " model:"), r"indent the keys"),
    "two documents": (FIRST + "---\n" + FIRST, r"without ---"),
    "empty": ("", r"is empty"),
    "list": ("- a\n", r"not \['a'\]"),
    "module with a syntax error": (
        changed("{name: softmax}", "{module: 'half_written:net'}"),
        r"half_written\.py, line 1",
    ),
    "file for a module": (changed("{name: softmax}", "{module: half_written.py}"), r"'package\.module:factory'"),
    "edges by commas": (FIRST + "topology: {name: edge-list, file: commas.txt}\n", r"line 1: '0,1'"),
    "arrays by other names": (
        changed("dataset: digits, samples: 80, test_samples: 40", "dataset: npz, root: other.npz"),
        r"other\.npz lacks",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    (folder / "half_written.py").write_text("def net(:\n    pass\n")
    (folder / "commas.txt").write_text("0,1\n1,2\n")
    (folder / "line.txt").write_text("0 1\n1 0\n1 2\n2 1\n2 3\n3 2\n")
    np.savez(folder / "other.npz", X=np.zeros((9, 2)), y=np.zeros(9))
    return folder


@pytest.mark.parametrize("label", MISTAKES)
def test_a_first_mistake_is_told_with_what_was_meant(label: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, said = MISTAKES[label]
    monkeypatch.syspath_prepend(place)
    (place / "s.yaml").write_text(text)
    with pytest.raises(ScenarioError) as caught:
        Experiment.build(load_scenario(place / "s.yaml"))
    line = str(caught.value)
    assert re.search(said, line), line
    assert "\n" not in line
    assert len(line) < 700


@pytest.mark.parametrize(
    "text", [FIRST.replace("\n", "\r\n"), "\ufeff" + FIRST, changed("n_peers: 4", "n_peers: &n 4")]
)
def test_what_editors_write_is_read(text: str) -> None:
    assert parse_scenario(text).n_peers == 4


# --- remedies ---

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    label: (text, {}) for label, (text, _) in MISTAKES.items() if label not in ("empty", "list")
}
for number, settings in enumerate(
    [
        {"algorithm.name": "d-psgd", "topology": {"name": "edge-list", "file": "line.txt", "directed": True}},
        {
            "algorithm.name": "d-psgd",
            "topology": {"name": "edge-list", "file": "line.txt", "directed": True, "weights": "metropolis"},
        },
        {"algorithm.name": "d-psgd", "topology": {"name": "star", "weights": "doubly-stochastic"}},
        {"algorithm.name": "d-psgd", "topology": {"name": "directed-ring", "weights": "max-degree"}},
        {"algorithm.name": "d-psgd", "topology.weights": "column-stochastic"},
        {"algorithm.name": "d-psgd", "topology.name": "ring", "network.codec": "int8"},
        {"topology": {"name": "ring", "weights": "metropolis"}, "network.codec": "int8"},
        {"compute.generator": "system", "privacy": "none"},
        {"compute.workers": 9},
        {"data.batch": {"sampling": "blocks", "size": 5}},
        {"privacy.noise": {"kind": "correlated", "bands": 3}, "data.batch": {"sampling": "shuffle", "size": 5}},
        {"privacy.noise": {"kind": "cancelling", "colluding": 9}},
        {"privacy.noise": {"kind": "cancelling", "colluding": 1}, "algorithm.optimizer": {"name": "adam"}},
        {"privacy.hardened": True, "privacy.calibration": "paper", "privacy.noise": {"kind": "correlated"}},
        {"evaluation.training_loss": True},
        {"privacy.noise_cap": 1.2, "algorithm.name": "local"},
        {"privacy.noise_cap": 1.2, "algorithm.optimizer": {"name": "adam"}},
        {"participation.noticed_after": 3},
        {"data.partition": {"kind": "dirichlet"}},
        {"data.partition": {"kind": "iid", "alpha": 1.0}},
        {"model.arguments": {"a": 1}},
        {"data.at_least": 90},
        {"task.class_weights": [0.0] * 10},
    ]
):
    WRONG[f"setting {number}: {', '.join(settings)}"] = (FIRST, settings)


# Codes of a key, or a value of one, that there is not.
UNKNOWN = {"scenario.extra_forbidden", "scenario.literal_error", "scenario.union_tag_invalid", "scenario.choice"}


def recommended(line: str) -> list[tuple[str, Any]]:
    """Return the settings that an error recommends as key=value or key: value, in the order in which it does."""
    found = []
    for match in re.finditer(r"\b(?:set|say|write|give) ((?:[a-z_]+\.)*[a-z_]+)(?:=|: )([^\s,;()]+)", line):
        if "." in match[1] or match[1] in ("privacy", "rounds", "n_peers"):
            found.append((match[1], yaml.safe_load(match[2])))
    return found


@pytest.mark.parametrize("label", WRONG)
def test_every_remedy_that_is_a_setting_works(label: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that recommends a setting is gone if it is followed, and no other one sends back."""
    text, settings = WRONG[label]
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    (place / "s.yaml").write_text(text)

    def refusal(more: dict[str, Any]) -> PrivdecError | None:
        try:
            Experiment.build(
                load_scenario(
                    place / "s.yaml", [f"{k}={yaml.safe_dump(v, default_flow_style=True)}" for k, v in more.items()]
                )
            )
        except PrivdecError as error:
            return error
        return None

    first = refusal(settings)
    if first is None:
        pytest.fail(f"{label} is not refused")
    for key, value in recommended(str(first)):
        after = refusal({**settings, key: value})
        assert after is None or after.code != first.code, f"{first}\n  {key}={value!r} gives\n{after}"
        if after is not None:
            for other, back in recommended(str(after)):
                assert (other, back) != (key, settings.get(key)), f"{first}\nand {after}\nrecommend each other"


def test_remedies_are_found_among_these_errors(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above is about something: several of its errors recommend a setting."""
    monkeypatch.chdir(place)
    count = 0
    for text, settings in WRONG.values():
        if not settings:
            continue
        try:
            lines = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in settings.items()]
            Experiment.build(parse_scenario(text, overrides=lines))
        except PrivdecError as error:
            count += len(recommended(str(error)))
    assert count >= 5


def settings_in_messages() -> set[tuple[str, str]]:
    """Return every key and value that some message of the package tells to set."""
    found = set[tuple[str, str]]()
    for path in Path(flower_privdec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for match in re.finditer(r"\b(?:set|say|give) ((?:[a-z_]+\.)+[a-z_]+)(?:=|: )([\w.-]*\w)", node.value):
                    found.add((match[1], match[2]))
    return found


def test_every_setting_that_a_message_names_exists() -> None:
    """A law over all messages of the package: what they tell to set is a key, and a value that it takes."""
    named = settings_in_messages()
    assert len(named) >= 10
    for key, value in sorted(named):
        section, _, leaf = key.rpartition(".")
        overrides = [f"{key}={value}"]
        if leaf == "kind" or leaf == "name":
            overrides = [f"{section}={{{leaf}: {value}}}"]
        refusal = refusal_of_settings(overrides)
        is_of_another_choice = refusal is not None and "it belongs to" in str(refusal)
        if refusal is not None and not is_of_another_choice:
            assert refusal.code not in UNKNOWN, f"a message recommends {key}={value}: {refusal}"

    for wrong in ("topology.weights=metropoli", "privacy.epsilo=1", "compute.device=gpu", "network.codec=exakt"):
        refusal = refusal_of_settings([wrong])
        assert refusal is not None
        assert refusal.code in UNKNOWN


def refusal_of_settings(overrides: list[str]) -> ScenarioError | None:
    try:
        parse_scenario(FIRST, overrides=overrides)
    except ScenarioError as error:
        return error
    return None


# --- data from Python ---


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(count)
    return random.normal(size=(count, 3)).astype(np.float32), random.integers(2, size=count)


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([arrays(20), arrays(0), arrays(20)], arrays(9), r"data\.train\[1\] has no examples: .*lower n_peers"),
        (arrays(0), arrays(9), r"data\.train has no examples"),
        ([arrays(20)] * 3, arrays(0), r"data\.test has no examples"),
    ],
)
def test_peers_without_examples_are_named(train: Any, test: Any, said: str) -> None:
    with raises(ScenarioError, "api.data", names=said):
        fp.make_scenario(
            name="empty",
            n_peers=3,
            rounds=1,
            data={"train": train, "test": test, "batch": {"size": 2}},
            model={"name": "softmax"},
            algorithm={"name": "privsgp", "learning_rate": 0.5},
            privacy="none",
        )


def test_no_error_has_the_inner_name_of_an_object() -> None:
    def first_output(outputs: Any, target: Any) -> Any:
        return outputs[0] if outputs[0] > 0 else outputs[1]

    base = parse_scenario(FIRST)
    scenario = fp.make_scenario(base, task={"loss": {"module": first_output}})
    with pytest.raises(ScenarioError) as caught:
        Experiment.build(scenario)
    assert "task.loss.module=first_output " in str(caught.value)
    assert "__python__" not in str(caught.value)

    given = fp.make_scenario(base, data={"train": arrays(40), "test": arrays(9), "batch": {"size": 2}})
    with raises(ScenarioError, "api.object-in-processes", names=r"^data: .*save them to a file"):
        fp.run(given, runtime="flower")
