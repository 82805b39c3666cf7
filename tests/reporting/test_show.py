"""What `privdec show` prints: the scenario, and every default that is a value of its own or follows from another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from run_folders import small_scenario
from variants import VARIANTS, settings_for

from flower_privdec.cli.main import main
from flower_privdec.common.catalogue import MODELS, TOPOLOGIES
from flower_privdec.reporting.console import complete_yaml
from flower_privdec.scenario import parse_scenario

NEEDED = {"text": ["data.vocabulary=9"]}


def commented(text: str) -> dict[str, str]:
    """Return what the comments say of each key."""
    comments = [line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#")]
    return dict(comment.split(": ", 1) for comment in comments)


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_shown_scenario_reads_back(variant: list[str], tiny_text: str) -> None:
    scenario = parse_scenario(tiny_text, overrides=settings_for(*variant))
    assert parse_scenario(complete_yaml(scenario)) == scenario


@pytest.mark.parametrize("name", ["a: b", "#1", "'quoted'", "1e5", "ε 3", "yes"])
def test_text_that_yaml_might_misread_is_quoted(name: str) -> None:
    scenario = small_scenario("privacy=none").model_copy(update={"name": name})
    assert yaml.safe_load(complete_yaml(scenario))["name"] == name


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_option_is_shown_with_its_default(name: str) -> None:
    model = yaml.safe_load(complete_yaml(small_scenario(f"model.name={name}", *NEEDED.get(name, []))))["model"]
    assert model == {"name": name, **MODELS.keys_of(name), "init": "default"}


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_every_graph_option_is_shown_with_its_default(name: str) -> None:
    topology = yaml.safe_load(complete_yaml(small_scenario(f"topology.name={name}")))["topology"]
    options = {key: value for key, value in TOPOLOGIES.keys_of(name).items() if value is not None}
    assert topology == {"name": name, **options, "weights": "auto", "mixing_steps": 1}


def test_given_options_are_values_and_not_comments() -> None:
    text = complete_yaml(small_scenario("model={name: mlp, hidden: [7, 5]}", "topology={name: erdos-renyi}"))
    assert "\n  hidden: [7, 5]\n" in text
    assert "\n  activation: relu\n" in text
    assert "hidden" not in commented(text)
    assert "\n  probability: 0.5\n" in text


def test_derived_defaults_are_said_in_words() -> None:
    text = complete_yaml(small_scenario("algorithm.name=dyn-d2p", "topology.name=torus"))
    said = commented(text)
    assert said["initial_clip"] == "left out, it is privacy.clip_norm"
    assert said["rows"] == "left out, as square as n_peers allows"
    assert said["samples"] == "left out, all"
    assert not {"hidden", "degree", "alpha", "sizes"} & said.keys()  # which do not apply


def test_the_command_shows_it(tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    with pytest.raises(SystemExit) as leaving:
        main(["show", str(tmp_path / "tiny.yaml"), "--set", "model.name=mlp"])
    assert leaving.value.code == 0
    assert "\n  hidden: [100]\n" in capsys.readouterr().out
