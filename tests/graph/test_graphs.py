"""A scenario's graph: what is said of it and how it is drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from raising import raises
from run_folders import small_scenario

from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.topology import build_topology
from flower_privdec.reporting import console, plots
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.plots import to_svg


def test_directed_exponential_is_described() -> None:
    said = plots.describe(small_scenario("n_peers=8"))
    assert (said["name"], said["directed"], said["period"]) == ("directed-exponential", True, 3)
    assert (said["edges_per_round"], said["joint_connectivity"]) == ([8, 8, 8], 3)
    assert said["spectral_gap"] == pytest.approx(1.0)
    assert said["weights"] == "column-stochastic"
    assert [1, 3] in said["edges"][1]
    assert json.loads(json.dumps(said)) == said


def test_ring_by_gossip_is_described() -> None:
    said = plots.describe(small_scenario("n_peers=6", "topology.name=ring", "algorithm.name=d-psgd"))
    assert (said["directed"], said["period"], said["edges_per_round"]) == (False, 1, [12])
    assert (said["weights"], said["joint_connectivity"]) == ("metropolis", 1)
    assert said["spectral_gap"] == pytest.approx(1 / 3)  # 1 - (1 + 2 cos 60°) / 3


def test_a_large_graph_lists_no_edges() -> None:
    said = plots.describe(small_scenario("n_peers=33"))
    assert said["edges"] is None
    assert said["edges_per_round"][0] == 33


def test_an_algorithm_without_exchange_has_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    said = plots.describe(small_scenario("algorithm.name=local"))
    assert said["name"] is None
    console.print_topology(said, as_json=False)
    assert "exchanges nothing" in capsys.readouterr().out


def test_text_shows_facts_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_topology(plots.describe(small_scenario()), as_json=False)
    shown = capsys.readouterr().out
    assert "4 a round (repeating after 2 rounds)" in shown
    assert "jointly connected in 2 rounds, spectral gap 1.00" in shown
    assert shown.count("●") == 1 + 8  # the legend, and four edges in each of two rounds


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_pictures_are_written(tmp_path: Path, suffix: str, magic: bytes) -> None:
    out = tmp_path / "new" / f"graph{suffix}"
    assert plots.describe(small_scenario(), out)["picture"] == str(out)
    assert out.read_bytes().startswith(magic)


def test_a_wrong_suffix_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with raises(ScenarioError, "reporting.suffix"):
        plots.describe(small_scenario(), tmp_path / "new" / "graph.txt")
    assert not (tmp_path / "new").exists()


def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(ScenarioError, "reporting.unwritable"):
        plots.describe(small_scenario(), tmp_path / "file" / "graph.png")


def test_a_graph_that_can_never_agree_is_refused(tmp_path: Path) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n2 3\n")
    with raises(ScenarioError, "topology.disconnected"):
        plots.describe(small_scenario("topology.name=edge-list", f"topology.file={edges}"))


def _labels(name: str, n_peers: int, **options: int) -> list[str]:
    with drawing():
        picture = to_svg(plots.draw_topology(build_topology(name, n_peers, **options)), "a graph")
    return [text.text or "" for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_every_round_of_the_period_is_a_panel() -> None:
    labels = _labels("directed-exponential", 8)
    assert [label for label in labels if "round" in label] == ["round 0", "round 1", "round 2"]
    assert sorted(label for label in labels if label.isdigit()) == sorted(3 * [str(i) for i in range(8)])


def test_random_graphs_show_six_rounds_and_static_ones_one() -> None:
    assert sum("round" in label for label in _labels("random-edges", 6, edges=2)) == plots.ROUNDS_SHOWN
    assert [label for label in _labels("star", 5) if "round" in label] == ["every round"]
