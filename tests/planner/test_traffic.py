"""What a plan says of the traffic of a network, and of codecs that are too coarse."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from command_line import privdec
from raising import raises
from tiny_scenario import TINY, Build, Tiny
from variants import settings_for

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.planner.traffic import codec_warnings, traffic_facts


def test_the_bytes_of_a_round_follow_from_the_codec(build: Build) -> None:
    sizes = {}
    for codec in ("exact", "bfloat16", "int8", "int4"):
        facts = traffic_facts(build(f"network={{codec: {codec}}}"))
        assert facts is not None
        assert facts["receivers"] == 1
        sizes[codec] = facts["bytes"]
    rows = {codec: size - sizes["int4"] for codec, size in sizes.items()}
    assert sizes["exact"] > 650 * 8
    assert rows["exact"] > rows["bfloat16"] > rows["int8"] > rows["int4"] == 0
    assert traffic_facts(build("algorithm.name=local")) is None


@pytest.mark.parametrize(
    ("codec", "warning"),
    [
        ("exact", ""),
        ("int4", ""),
        ("{name: top-k, part: 0.5}", ""),
        ("{name: top-k, part: 0.1}", "models agree about 5 times more slowly"),
        ("{name: top-k, part: 0.1, damping: 1}", "drive models apart; at most 0.2"),
        ("{name: top-k, part: 0.1, differences: false}", "models do not agree"),
        ("{name: random-k, part: 0.5}", "models agree about 4 times more slowly"),
        ("{name: int4, differences: false}", "stay apart"),
    ],
)
def test_a_codec_that_is_too_coarse_is_warned_of(build: Build, codec: str, warning: str) -> None:
    warnings = codec_warnings(build(f"network={{codec: {codec}}}"))
    assert len(warnings) == bool(warning)
    assert all(warning in text for text in warnings)


def test_a_simulation_refuses_rounding_without_mass(tiny: Tiny) -> None:
    scenario = tiny(*settings_for("algorithm.name=d-psgd"), "network={codec: int8}")
    with raises(ScenarioError, "network.codec-without-shares", names="d-psgd"):
        Experiment.build(scenario)
    for graph, named in (
        ("{name: server}", "name=server"),
        ("{name: ring, weights: metropolis}", "weights=metropolis"),
    ):
        scenario = tiny(f"topology={graph}", "network={codec: int8}")
        with raises(ScenarioError, "network.codec-without-shares", names=f"topology.{named}"):
            Experiment.build(scenario)
    with raises(ScenarioError, "code.import", names="no_codecs"):
        Experiment.build(tiny("network={codec: 'no_codecs:Mine'}"))


def test_starting_peers_with_a_coarse_codec_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ScenarioError("it would start here", code="test")

    monkeypatch.setattr("flower_privdec.network.local.up.Up.run", refuse)
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    codec = "network={codec: {name: top-k, part: 0.1, differences: false}}"
    assert privdec("up", scenario, "--out", tmp_path / "out", "--set", codec) == 2
    errors = capsys.readouterr().err
    assert "warning: network.codec: part=0.1 without differences: models do not agree" in errors
