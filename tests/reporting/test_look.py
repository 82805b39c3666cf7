"""How pictures look: plain numbers, lines that differ in grey, colours that all can tell apart, for all figures."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legible import SIGHTS, check_legible, contrast, distance, texts_of
from matplotlib.figure import Figure
from run_folders import make_run, small_scenario

import flower_privdec
from flower_privdec.audits.audit import Audit, AuditedPeers
from flower_privdec.audits.report import draw_audit
from flower_privdec.graph.topology import build_topology
from flower_privdec.rehearsal.rehearsal import Moment, PeerEnd
from flower_privdec.reporting import plots
from flower_privdec.reporting.look import (
    DARK,
    DASHES,
    MARKS,
    MOST_BANDS,
    MOST_CURVES,
    SERIES,
    axis_texts,
    drawing,
    log_scale,
    look,
    new_axes,
    new_figure,
)
from flower_privdec.reporting.rehearsals import draw_rehearsal
from flower_privdec.reporting.run_folder import RunGroup, read_groups
from flower_privdec.studies.results import PartResult
from flower_privdec.studies.spec import Figure as StudyFigure
from flower_privdec.studies.spec import Part, kinds_of
from flower_privdec.studies.study_pictures import draw_figure
from tools.docs.claims import Published

# --- numbers


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.1, 1, 10, 1000], ["0.1", "1", "10", "1,000"]),
        ([0.00001, 1], ["0.00001", "1"]),
        ([-2, 0], ["−2", "0"]),
        ([1e-7, 2e-7, 0], ["10⁻⁷", "2×10⁻⁷", "0"]),
        ([1e25, -3e25], ["10²⁵", "−3×10²⁵"]),
        ([0.1 + 0.2, 0.6], ["0.3", "0.6"]),
        ([math.inf, 1], ["inf", "1"]),
        ([], []),
    ],
)
def test_numbers_of_an_axis_are_plain_text(values: list[float], texts: list[str]) -> None:
    assert axis_texts(values, each_its_own=True) == texts


def test_numbers_of_an_axis_have_equal_decimals() -> None:
    assert axis_texts([0, 0.5, 1]) == ["0.0", "0.5", "1.0"]
    assert axis_texts([0, 20_000]) == ["0", "20,000"]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.6, 2.3), (0.6, 1.1), (0.3, 7), (1, 14), (0.02, 60), (1e-5, 1.6), (1e-12, 1e12), (99.9, 100), (3, 3)],
)
def test_a_logarithmic_axis_has_a_few_round_numbers(low: float, high: float) -> None:
    with drawing():
        axes = new_axes(new_figure(4, 3))[0, 0]
        axes.plot([0, 1], [low, high])
        log_scale(axes)
        texts = [label.get_text() for label in axes.get_yticklabels()]
    bottom, top = axes.get_ylim()
    shown = [text for text, tick in zip(texts, axes.get_yticks(), strict=True) if bottom <= tick <= top]
    assert 2 <= len(shown) <= 9
    assert len(set(shown)) == len(shown)
    assert all(re.fullmatch(r"[\d.,]+|(\d×)?10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", text) for text in shown)
    assert axes.get_yminorticklabels() == []


# --- lines


def test_lines_differ_in_dashes_or_marks() -> None:
    looks = [look(index) for index in range(MOST_CURVES)]
    assert len({(one.dashes, one.mark) for one in looks}) == len(looks)
    assert len({one.dashes for one in looks[: len(DASHES)]}) == len(DASHES)
    assert all(MARKS[one.mark] in one.key() for one in looks)


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_differ_to_every_eye(sight: str) -> None:
    dark = [DARK[f"series-{i}"] for i in range(len(SERIES))]
    for colours, paper in ((SERIES, "#ffffff"), (dark, DARK["paper"])):
        assert all(contrast(colour, paper) >= 3 for colour in colours)
        assert all(distance(first, second, sight) >= 10 for first, second in combinations(colours, 2))


def test_a_label_looks_alike_in_every_picture(tmp_path: Path) -> None:
    groups = _groups(tmp_path, 3)
    colours = []
    with drawing():
        for curve in plots.curves_of(groups):
            figure = plots.draw_curve(curve, groups, legend=True)
            if figure is not None:
                colours.append({line.get_label(): line.get_color() for line in figure.axes[0].get_lines()})
    assert len(colours) > 2
    merged = {label: {one[label] for one in colours if label in one} for label in colours[0]}
    assert all(len(found) == 1 for found in merged.values())


def test_many_spreads_are_bars_and_few_are_bands(tmp_path: Path) -> None:
    for count in (MOST_BANDS, MOST_BANDS + 1):
        groups = _groups(tmp_path / str(count), count)
        accuracy = plots.curves_of(groups)[0]
        with drawing():
            figure = plots.draw_curve(accuracy, groups)
        assert figure is not None
        kinds = {type(part).__name__ for part in figure.axes[0].collections}
        bands = count <= MOST_BANDS
        assert kinds == ({"FillBetweenPolyCollection"} if bands else {"LineCollection"})
        assert ("bands: " if bands else "bars: ") in " ".join(texts_of(figure))


# --- every figure


def _groups(folder: Path, count: int) -> list[RunGroup]:
    """Return runs of which the first's models are a hundred times as far apart as the others'."""
    runs = [make_run(folder / f"run-{i}", f"privacy.epsilon={1 + i}", f"name=run-{i}") for i in range(count)]
    metrics = runs[0] / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line | {"consensus_distance": 50.0}) + "\n" for line in lines))
    return read_groups(runs)


def _runs_figures(folder: Path) -> Iterator[Figure | None]:
    for count in (1, 9):
        groups = _groups(folder / str(count), count)
        for curve in plots.curves_of(groups):
            yield plots.draw_curve(curve, groups, legend=True)


def _peers_figure(folder: Path) -> Iterator[Figure | None]:
    summary = _groups(folder, 1)[0].summary
    yield plots.draw_peers(summary | {"peers": {"accuracy": [0.5, 0.6, 0.7, 0.8]}})


def _budget_figures(folder: Path) -> Iterator[Figure | None]:
    for count in (2, 60):
        yield plots.draw_budget(100, [[0.1 + peer, 0.2 + peer, 0.3 + peer, 0.4 + peer] for peer in range(count)])


def _bars_figures(folder: Path) -> Iterator[Figure | None]:
    for name in ("sgp", "an algorithm with a long name"):
        rows = {f"{name} {i}": {"mean": 0.5, "std": 0.1 * i or None} for i in range(6)}
        yield plots.draw_bars(rows, "test accuracy", share=True)


def _generalization_figure(folder: Path) -> Iterator[Figure | None]:
    tried = {"personal_models": {"0": 0.9, "1": 0.5}, "global_model": {"0": 0.7, "1": 0.6}}
    yield plots.draw_generalization({"personalized": {"generalization": tried}})


def _contributions_figures(folder: Path) -> Iterator[Figure | None]:
    for count in (3, 60):
        shares = {str(i): {str(j): 0.1 * j for j in range(count)} for i in range(count)}
        yield plots.draw_contributions([{"round": k, "shapley": {str(k): shares}} for k in (1, 2)])


def _topology_figure(folder: Path) -> Iterator[Figure | None]:
    yield plots.draw_topology(build_topology("directed-exponential", 8))


def _rehearsal_figures(folder: Path) -> Iterator[Figure | None]:
    moment = dict.fromkeys((field.name for field in fields(Moment)), "1")
    peer = dict.fromkeys((field.name for field in fields(PeerEnd)), "1")
    for count in (9, 500):
        ends = [peer | {"end": "finished" if number else "virtual.killed"} for number in range(count)]
        yield draw_rehearsal([moment, moment | {"seconds": "9000"}], ends)


def _audit_figure(folder: Path) -> Iterator[Figure | None]:
    scores = (np.arange(5.0), np.ones(7))
    groups = [AuditedPeers((peer,), 0.5, 3.0, 1e-3, 1.0, 8, 2.0, 100, scores) for peer in range(2)]
    yield draw_audit(Audit(tuple(groups), 0.95, {}, 3))


NAMES = [f"an algorithm, number {i}" for i in range(9)]
STUDY_FIGURES: list[dict[str, Any]] = [
    {"kind": "curves", "by": "algorithm", "where": {"epsilon": "1"}},
    {"kind": "curves", "by": "epsilon", "log": True, "where": {"algorithm": NAMES[0]}},
    {"kind": "curves", "by": "epsilon"},  # an algorithm is one line at each budget
    {"kind": "curves", "by": "algorithm", "panels": "epsilon", "log": True},
    {"kind": "final", "x": "epsilon", "by": "algorithm", "log": True},
    {"kind": "final", "x": "algorithm", "by": "epsilon", "log": True},
]


def _study() -> PartResult:
    """Return a part whose values span a hundredth to 90 %, as it would be read from its published tables."""
    axes: dict[str, Any] = {
        "epsilon": {"title": "ε", "key": "privacy.epsilon", "values": [1, 3, 1000]},
        "algorithm": {"points": [{"label": name} for name in NAMES]},
    }
    part = Part.model_validate({"name": "main", "axes": axes, "figures": STUDY_FIGURES})
    kinds = kinds_of([small_scenario()])
    empty = PartResult(part, part.axes, {}, (), (), 0.0)
    groups = []
    for k, place in enumerate(empty.places({}, [])):
        numbers = {"accuracy_mean": str(0.9 * 0.85**k), "accuracy_std": str(0.01 * 0.85**k), "accuracy_by_seed": ""}
        rounds = tuple({"round": str(n), **numbers} for n in range(10, 110, 10))
        groups.append(Published(tuple(place.values()), (), 0, kinds, (), {"seeds": "3", **numbers}, rounds))
    return PartResult(part, part.axes, {}, tuple(groups), (), 0.0)


def _study_figures(folder: Path) -> Iterator[Figure | None]:
    result = _study()
    for figure in result.part.figures:
        yield draw_figure(figure, result)


FIGURES: dict[str, Callable[[Path], Iterator[Figure | None]]] = {
    "draw_audit": _audit_figure,
    "draw_bars": _bars_figures,
    "draw_budget": _budget_figures,
    "draw_contributions": _contributions_figures,
    "draw_curve": _runs_figures,
    "draw_figure": _study_figures,
    "draw_generalization": _generalization_figure,
    "draw_peers": _peers_figure,
    "draw_rehearsal": _rehearsal_figures,
    "draw_topology": _topology_figure,
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_read(name: str, tmp_path: Path) -> None:
    drawn = 0
    with drawing():
        for figure in FIGURES[name](tmp_path):
            if figure is not None:
                check_legible(figure)
                drawn += 1
    assert drawn


def test_the_law_of_figures_knows_them_all() -> None:
    names = set()
    for path in Path(flower_privdec.__file__).parent.rglob("*.py"):
        if "Figure" not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.returns is None:
                continue
            if node.name.startswith("draw_") and "Figure" in ast.unparse(node.returns):
                names.add(node.name)
    assert names == FIGURES.keys()


def test_lines_of_two_budgets_differ_and_say_so() -> None:
    result = _study()
    with drawing():
        figure = draw_figure(StudyFigure.model_validate({"kind": "curves", "by": "algorithm"}), result)
    assert figure is not None
    labels = [str(line.get_label()) for line in figure.axes[0].get_lines()]
    assert f"{NAMES[0]}, ε 1" in labels
    assert f"{NAMES[0]}, ε 3" in labels
    assert len(set(labels)) == 27


# --- words for those who do not see


def test_a_picture_has_words_in_its_place(tmp_path: Path) -> None:
    groups = _groups(tmp_path, 2)
    accuracy = plots.curves_of(groups)[0]
    with drawing():
        figure = plots.draw_curve(accuracy, groups)
        assert figure is not None
        svg = plots.to_svg(figure, accuracy.heading(groups))
    (label,) = re.findall('<svg[^>]* role="img" aria-label="([^"]*)"', svg)
    assert label.startswith("Test accuracy of the mean model (bands: the peers&#x27; models, lowest to highest). ")
    assert "run-0: from 90 % to 90 % (round 40)" in label
