"""Scenario files: what is accepted, what is refused, and how it is said."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from raising import raises

from flower_privdec import make_scenario
from flower_privdec.common.errors import ScenarioError
from flower_privdec.reporting.console import complete_yaml
from flower_privdec.scenario import Scenario, load_scenario, parse_scenario, scenario_hash, to_yaml

TEXT = """\
name: tiny
n_peers: 4
rounds: 10
data:
  dataset: digits
  batch: {sampling: poisson, size: 16}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy:
  epsilon: 3.0
  delta: 1e-5
"""


def test_defaults_are_visible_and_read_back():
    scenario = parse_scenario(TEXT)
    text = to_yaml(scenario)
    assert "learning_rate_decay: 0.0" in text
    assert "calibration: rigorous" in text
    assert parse_scenario(text) == scenario


def turned_off_by_none(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the keys of a scenario of which None is a value and not the default."""
    for name, field in section.model_fields.items():
        forms: list[Any] = [field.annotation]
        while any(get_args(form) for form in forms):
            forms = [part for form in forms for part in (get_args(form) or (form,))]
        if type(None) in get_args(field.annotation) and field.default is not None and not field.is_required():
            yield path + name
        for form in forms:
            if isinstance(form, type) and issubclass(form, BaseModel) and path.count(".") < 3:
                yield from turned_off_by_none(form, f"{path}{name}.")


def test_a_key_turned_off_by_none_round_trips():
    keys = set(turned_off_by_none(Scenario))
    assert "network.lead" in keys
    for key in keys:
        scenario = parse_scenario(TEXT, overrides=[f"{key}=null"])
        assert parse_scenario(to_yaml(scenario)) == scenario
        assert parse_scenario(complete_yaml(scenario)) == scenario
        assert make_scenario(scenario) == scenario


def test_all_keys_that_are_missing_are_named():
    text = "".join(
        line for line in TEXT.splitlines(keepends=True) if not line.startswith(("n_peers", "rounds", "model"))
    )
    with raises(ScenarioError, "scenario.missing", names="'n_peers', 'rounds', 'model' are missing; add them$"):
        parse_scenario(text)


def test_exponent_without_a_point_is_a_number():
    scenario = parse_scenario(TEXT)
    assert scenario.private is not None
    assert scenario.private.delta == 1e-5


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("rounds=0", ["rounds=0", ">= 1"]),
        ("rounds=abc", ["rounds='abc'", "whole number"]),
        ("rounds=1.5", ["rounds=1.5", "whole number"]),
        ("n_peers=1", ["n_peers=1", ">= 2", "local"]),
        ("algorithm.learning_rate=-1", ["algorithm.learning_rate=-1", "> 0"]),
        ("algorithm.learnig_rate=1", ["algorithm.learnig_rate", "did you mean 'learning_rate'"]),
        ("algorithm.name=privsgd", ["algorithm.name='privsgd'", "did you mean 'privsgp'"]),
        ("privacy.epsilon=0", ["privacy.epsilon=0", "> 0"]),
        ("privacy.epsilon=[1, 2]", ["privacy.epsilon", "2 numbers", "n_peers=4"]),
        ("privacy.delta=1", ["privacy.delta=1", "< 1"]),
        ("privacy.clip_norm=0", ["privacy.clip_norm=0", "> 0"]),
        ("privacy=maybe", ["privacy='maybe'", "none"]),
        ("data.partition.kind=dirichlet", ["data.partition", "alpha"]),
        ("data.partition.alpha=1", ["data.partition", "alpha", "remove"]),
        ("data.batch.sampling=full", ["data.batch", "size"]),
        ("participation.kind=uniform", ["participation", "fraction"]),
        ("model={name: linear, hidden: [3]}", ["model", "hidden"]),
        ("model={name: module}", ["model", "module"]),
        ("nonsense", ["--set nonsense", "key.path=value"]),
        ("a\nb=1", ["--set a\\nb=1", "key.path=value"]),
        ("a..b=1", ["--set a..b=1", "key.path=value"]),
        ("a" + ".a" * 500 + "=1", ["501 parts"]),
        ("rounds=[", ["--set rounds=[: not valid YAML", "quote"]),
        ("rounds={1: 2}", ["--set rounds={1: 2}: the key '1' must be a word"]),
        ("rounds=&a [*a]", ["--set rounds=&a [*a]: not valid YAML"]),
        ("rounds=null", ["rounds=None", "whole number", "give one"]),
        ("epsilon=1", ["unknown key 'epsilon'", "did you mean 'privacy.epsilon'"]),
        ("topology.p=1", ["unknown key 'topology.p'", "did you mean 'probability'"]),
        ("privacy.ledger=''", ["privacy.ledger=''", "not empty"]),
        ("task.metrics=[]", ["task.metrics=[]", "not empty"]),
        ("model=[]", ["model=[]", "section"]),
        ("name=../../evil", ["name='../../evil'", "a name, not a path", "--out"]),
        ("name='a\\b'", ["a name, not a path"]),
        ("name=.hidden", ["a name, not a path"]),
        ("name=--out", ["a name, not a path"]),
        ("name=''", ["a name, not a path"]),
        ('name="a\\nb"', ["a name, not a path"]),
        ("name=" + 101 * "x", ["at most 100 bytes"]),
    ],
)
def test_wrong_values_name_value_rule_and_remedy(setting, parts):
    with pytest.raises(ScenarioError) as error:
        parse_scenario(TEXT, overrides=[setting])
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_unknown_key_names_line_and_nearest_key():
    with raises(ScenarioError, "scenario.extra_forbidden", r"^tiny\.yaml:10"):
        parse_scenario(TEXT.replace("epsilon:", "epsilonn:"), where="tiny.yaml")


def test_a_missing_key_is_named_at_its_section():
    with raises(ScenarioError, "scenario.missing", "^s:4"):
        parse_scenario(TEXT.replace("  batch: {sampling: poisson, size: 16}\n", ""), where="s")


def test_repeated_keys_and_broken_yaml_name_their_line():
    with raises(ScenarioError, "yaml.repeated-key", "^s:12"):
        parse_scenario(TEXT + "name: again\n", where="s")
    with raises(ScenarioError, "scenario.yaml", "^s:13"):
        parse_scenario(TEXT + "x: [1\n", where="s")
    with raises(ScenarioError, "scenario.no-mapping"):
        parse_scenario("- 1\n")


def test_privacy_may_be_none_or_per_peer():
    assert parse_scenario(TEXT, overrides=["privacy=none"]).private is None
    private = parse_scenario(TEXT, overrides=["privacy.epsilon=[1, 2, 3, 4.5]"]).private
    assert private is not None
    assert private.epsilon == (1.0, 2.0, 3.0, 4.5)


def test_the_hash_follows_numbers_and_not_threads():
    base = scenario_hash(parse_scenario(TEXT))
    assert scenario_hash(parse_scenario(TEXT, overrides=["compute.threads=2"])) == base
    assert scenario_hash(parse_scenario(TEXT, overrides=["seed=2"])) != base


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("digtis", "'digits'"),
        ("digtis.yaml", "'digits'"),
        ("elsewhere/digits.yaml", "'digits'"),
        ("wrad.yaml", "'ward.yaml'"),
        ("wrad", "'ward.yaml'"),
        ("ward.yml", "'ward.yaml'"),
        ("sites/nort.yaml", "'sites/north.yaml'"),
        ("sites/north", "'sites/north.yaml'"),
        ("sites", "such as sites/north.yaml"),
        ("qqqq.yaml", "such as ward.yaml"),
    ],
)
def test_a_missing_file_has_near_names(typed, meant, tmp_path, monkeypatch):
    (tmp_path / "ward.yaml").write_text(TEXT)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "north.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)

    code = "scenario.unreadable"
    if typed in ("digtis", "wrad"):
        code = "scenario.unknown-name"
    with raises(ScenarioError, code, names=meant):
        load_scenario(typed)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with raises(ScenarioError, "scenario.unreadable", r"nowhere\.yaml"):
        load_scenario(tmp_path / "nowhere.yaml")
