"""The verdicts on the papers' claims: what is published follows from the published tables."""

from __future__ import annotations

import csv
import dataclasses
import html
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from flower_privdec.studies.cells import expand
from flower_privdec.studies.results import Estimate, Finding, judge, value_text
from flower_privdec.studies.runner import run_and_publish
from flower_privdec.studies.spec import Reading, Study
from tools.docs import claims, repeat
from tools.docs.union import union


def test_page_and_verdicts_are_what_the_tables_say() -> None:
    """`python -m tools.docs.claims` changes nothing; and a row that is missing is not judged."""
    written = claims.written()
    assert len(written) == 1 + len(claims.PUBLISHED)
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run python -m tools.docs.claims"
    study, _, _, parts = next(claims.results())
    result = next(part for part in parts if part.part.name == "cnn")
    assert study.name == "feddeper"
    check = result.part.checks[0]
    assert [case.outcome for case in judge(check, result).cases] == [Finding.SHOWN]
    gone = tuple(dataclasses.replace(group, cells=None) for group in result.groups)  # type: ignore[call-arg]
    assert [case.outcome for case in judge(check, dataclasses.replace(result, groups=gone)).cases] == [Finding.NOT_RUN]


def test_the_overview_counts_the_verdicts_below_it() -> None:
    """By the sentences of the page, which are read here and not judged again; the whole table fits on one screen."""
    text = claims.PAGE.read_text(encoding="utf-8")
    table = text.partition("| study |")[2].partition("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in table[0].strip("|").split("|")]
    assert columns == ["size, results", "criteria", "shown", "in part", "undecided", "not", "seeds"]
    assert len(table) <= 25

    # What each sentence comes to, by results and by who claims it.
    found: dict[tuple[str, bool], Counter[str]] = {}
    ours = False
    for line in text.partition("\n## FedDeper\n")[2].splitlines():
        row = re.match(r"\| (.*) \| \*\*(.*)\*\* \| \[[\w-]+, \w+\]\(\.\./results/([\w-]+)/", line)
        if row is None:
            continue
        if not row[1].startswith("the same"):
            ours = row[1].startswith("Ours: ")
        outcomes = row[2].partition(";")[0].lower()
        if re.fullmatch(r"shown( in all \d+ cells| in both cells)?\.?", outcomes):
            standing = "shown"
        elif re.match(r"shown in", outcomes):
            standing = "in part"
        elif "contradicted" in outcomes or "not shown" in outcomes:
            standing = "not"
        else:
            standing = "undecided"
        found.setdefault((row[3], ours), Counter())[standing] += 1

    for line in table[2:-1]:
        name, link, criteria, *counts, _ = (cell.strip() for cell in line.strip("|").split("|"))
        folder = re.search(r"results/([\w-]+)/", link)
        assert folder is not None
        counted = found.pop((folder[1], name.endswith(", ours")))
        assert [int(count or 0) for count in counts] == [counted[column] for column in columns[2:-1]], line
        assert int(criteria) == counted.total()
    assert not found


BASE = """
name: base
n_peers: 4
rounds: 3
data: {dataset: digits, samples: 240, test_samples: 50, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
"""
STUDY = "{name: one, base: base.yaml, seeds: [1, 2], parts: [{name: main, axes: {rounds: {points: [POINTS]}}}]}"
POINTS = ["{label: a}", "{label: b, settings: [rounds=2]}", "{label: c, settings: [rounds=1]}"]


def test_two_publications_of_a_study_merge_their_rows(tmp_path: Path) -> None:
    """As the study publishes them itself, but for the lines on what made it; a row of neither was not run."""
    (tmp_path / "base.yaml").write_text(BASE)
    path, (a, b, c) = tmp_path / "study.yaml", POINTS
    folders = [tmp_path / name for name in ("one", "other", "whole", "union")]
    for out, points in zip(folders[:3], ([a], [b, a], [a, b]), strict=True):
        path.write_text(STUDY.replace("POINTS", ", ".join(points)))
        run_and_publish(str(path), lambda *_: nullcontext(lambda _: None), out=out, jobs=1, cache=tmp_path / "cells")
    path.write_text(STUDY.replace("POINTS", ", ".join([a, b, c])))
    assert union(str(path), folders[3], folders[:2]) == {"equal": 1}
    whole, both = ((folder / "table-main.csv").read_text().splitlines() for folder in folders[2:])
    assert both[:-1] == whole
    assert both[-1].startswith("c,")
    whole, both = ((folder / "README.md").read_text().splitlines() for folder in folders[2:])
    lines = [line for line in both if not line.startswith(("Made by", "| c "))]
    assert [line for line in lines if line] == [line for line in whole if line and not line.startswith("Made by")]
    assert sum(line.startswith("Made by `privdec study ") for line in both) == 2
    assert any(line.startswith("| c | not run |") for line in both)
    table = folders[0] / "table-main.csv"
    table.write_text(table.read_text().replace(",2\n", ",7\n"))
    assert union(str(path), folders[3], [folders[1], folders[0]]) == {"replaced": 1}
    assert "| a | " in (folders[3] / "README.md").read_text()


def test_drawn_rows_are_run_again_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    path, out = tmp_path / "study.yaml", tmp_path / "results"
    path.write_text(STUDY.replace("POINTS", ", ".join(POINTS)))
    run_and_publish(str(path), lambda *_: nullcontext(lambda _: None), out=out, jobs=1, cache=tmp_path / "cells")
    assert repeat.main([str(out), "--rows", "4"]) == 0
    assert capsys.readouterr().out.endswith("8 of 8 numbers are those of the table\n")
    table = out / "table-main.csv"
    table.write_text(re.sub(r"(?m)^(a,\S+?,\S+?),\S+", r"\1,0.1 0.2", table.read_text()))
    assert repeat.main([str(out), "--rows", "6"]) == 1
    assert "IS NOT" in capsys.readouterr().out


def comparison(name: str, column: str = "accuracy_mean") -> dict[tuple[str, ...], str]:
    """Return a comparison's figures, in percent, by ε, partition and algorithm, where three seeds were run."""
    head, *lines = csv.reader((ROOT / "results" / name / "table-table.csv").read_text().splitlines())
    place = head.index(column)
    return {tuple(line[:3]): f"{100 * float(line[place]):.1f}" for line in lines if line[-1] == "3"}


def test_the_pages_comparison_equals_the_table() -> None:
    """All that is there was run with three seeds, and the sentence under it holds of all algorithms."""
    shown = comparison("compared-laptop")
    places = [("1", "iid"), ("1", "Dirichlet 0.3"), ("3", "iid")]
    rows = [
        re.split(r"  +", line.strip())
        for line in (ROOT / "docs" / "studies.md")
        .read_text(encoding="utf-8")
        .partition("ε 3, iid\n")[2]
        .partition("```")[0]
        .splitlines()
    ]
    assert len(rows) == 11
    for name, *values in rows:
        assert [value.removesuffix(" %") for value in values] == [shown[*place, name] for place in places]
    listed = {name for name, *_ in rows}
    deviations = comparison("compared-laptop", "accuracy_std")
    names = {name for *_, name in shown}
    assert len(names) == 19
    for place in places:
        plain = float(shown[*place, "PrivSGP, Const-D2P"])
        sharing = names - {"each alone", "DP-SGD (all data in one place)"}
        assert max(float(shown[*place, name]) for name in sharing) <= plain + 0.8
        assert 0.39 <= float(shown[*place, "DP-SGD (all data in one place)"]) - plain <= 3
        assert 4 <= plain - float(shown[*place, "each alone"]) <= 40
        assert max(float(spread) for key, spread in deviations.items() if key[:2] == place and key[2] in listed) <= 1.3
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    for place in (("8", "iid"), ("8", "Dirichlet 0.3"), ("0.5", "iid")):
        values = sorted((shown[*place, name] for name in sharing), key=float)
        assert f"{values[0]} to {values[-1]} %" in text
    assert f"all data in one place {shown['8', 'iid', 'DP-SGD (all data in one place)']} %" in text
    cifar = comparison("compared-cifar-laptop")
    for partition in ("iid", "Dirichlet 0.3"):
        values = sorted((cifar["1", partition, name] for name in sharing), key=float)
        assert f"{values[0]} to {values[-1]} %" in text
        assert f"{cifar['1', partition, 'each alone']} %" in text
    assert f"ε = 1 leaves {cifar['1', 'iid', 'DP-SGD (all data in one place)']} % with all data" in text
    low = sorted((cifar["0.5", "iid", name] for name in sharing), key=float)
    alone = "DP-SGD (all data in one place)"
    assert f"have {low[0]} to {low[-1]} %, where all data have {cifar['0.5', 'iid', alone]} %" in text
    best = max(sharing, key=lambda name: float(cifar["8", "iid", name]))
    assert (best, cifar["8", "iid", alone]) == ("Dyn-D2P", "44.2")
    assert f"At ε = 8 {best}, with {cifar['8', 'iid', best]} % the best" in text
    assert len(cifar) == len(shown) == 4 * 2 * 19


def test_the_readmes_noise_table_equals_the_tables() -> None:
    rows = [
        row
        for name in ("cancelling-laptop", "cancelling-alone-laptop")
        for row in claims.rows_of(ROOT / "results" / name / "table-table.csv")
    ]
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("| noise ")[2].partition("\n\n")[0]
    shown = {name.strip(): values for name, *values in (line.strip("| ").split("|") for line in text.splitlines()[2:])}
    assert list(shown) == ["each alone", "each for itself", "cancelling", "trusted server"]
    for name, values in shown.items():
        wanted = [
            f"{100 * float(row['accuracy_mean']):.1f} ± {100 * float(row['accuracy_std']):.1f} %"
            for row in rows
            if row["axis.noise"] == name
        ]
        assert [value.strip() for value in values] == wanted


def test_the_pages_speed_up_equals_the_tables() -> None:
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    for size, sentence in (
        ("paper", "25, 50 and 100 peers end at {} % and at a training loss of {} after"),
        ("laptop", "undecided here ({} % and a training loss of {} with 25, 50 and 100 peers)"),
    ):
        rows = claims.rows_of(ROOT / "results" / f"privsgp-vr-{size}" / "table-speedup.csv")
        accuracies = [f"{100 * float(row['accuracy_mean']):.1f}" for row in rows]
        losses = [f"{float(row['training-loss_mean']):.3f}" for row in rows]
        assert sentence.format(*("{}, {} and {}".format(*values) for values in (accuracies, losses))) in text


def test_the_pages_figures_equal_the_results() -> None:
    """Each row, point and paragraph that links to results has no figure that the linked pages lack, but differences.

    Two figures one over the other stand in one line there.
    """
    text, of_results = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8"), 0
    figures, linked = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)(?! points)"), list[set[str]]()
    for block in re.split(r"\n\n|\n(?=[|-] )", text.partition("## Results in the laptop size")[2]):
        links = re.findall(r"\]\(([^)#]+\.md)", block)
        if not links and not block.startswith("|"):
            continue
        if any("results/" in link for link in links):
            linked, of_results = [], of_results + 1
        for link in links:
            page = (ROOT / "docs" / link).read_text(encoding="utf-8")
            linked += [set(figures.findall(line)) for line in page.splitlines()]
        assert not set(figures.findall(block)) - set[str]().union(*linked), block[:80]
        for two in re.findall(r"(\d+\.\d+) over (\d+\.\d+)", block):
            assert any(set(two) <= line for line in linked), f"{block[:80]}: {' over '.join(two)}"
    assert of_results >= 12


def of_one_seed(study: Study) -> Study:
    """Return a study whose cells differ in all but their seed, which decides nothing about the generator."""

    def of_first(layer: Any) -> Any:
        return layer.model_copy(update={"seeds": layer.seeds and layer.seeds[:1]})

    sizes = {name: of_first(size) for name, size in study.sizes.items()}
    shortened: Study = of_first(study).model_copy(update={"sizes": sizes})
    return shortened


def test_studies_that_vary_by_machine_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    sentence = re.search(r"In the laptop size all do but (.*?)\. ", text)
    assert sentence is not None
    others = set()
    grids = [
        *(ROOT / "simulations").glob("*/*study.yaml"),
        *(ROOT / "simulations" / "cancelling" / name for name in ("alone.yaml", "leaving.yaml")),
    ]
    for path in [*(ROOT / "scenarios" / "studies").glob("*.yaml"), *grids]:
        monkeypatch.syspath_prepend(path.parent)  # where `held_out` is
        study, base = claims.load_study(str(path))
        size = study.size("laptop" if study.sizes else None)
        study = of_one_seed(study)
        cells = expand(study, base, size, study.parts)
        if not all(cell.scenario.compute.generator == "portable" for cell in cells):
            others.add(study.name)
    assert others == set(re.findall(r"`([\w-]+)`", sentence[1]))


def test_every_results_figure_has_the_pages_title() -> None:
    for readme in (ROOT / "results").glob("*/README.md"):
        for title, file in re.findall(r"(?m)^!\[(.*)\]\((.*)\)$", readme.read_text(encoding="utf-8")):
            drawn = html.unescape((readme.parent / file).read_text(encoding="utf-8"))
            assert f">{title}<" in drawn, f"{readme.parent.name}/{file}: {title}"


def test_a_value_reads_alike_from_run_and_csv() -> None:
    """A mean that ends in 5 is rounded once, as the table has it."""
    share = Reading("accuracy", lambda line, _: None, share=True)
    for ends_in_5 in (0.3095, 0.4145, 0.0125, 0.9985):
        read, *around = (
            value_text(share, Estimate(mean, mean, 3, 0), spread=True)
            for mean in (ends_in_5, ends_in_5 * (1 - 1e-12), ends_in_5 * (1 + 1e-12))
        )
        assert around == [read, read]


def test_n_times_more_peers_have_n_times_fewer_rounds() -> None:
    """Final values show a speed-up only where n times more peers have n times fewer rounds."""
    for name in ("privsgp-vr", "privsgp-vr-cifar"):
        study, _ = claims.load_study(name)
        part = next(part for part in study.parts if part.name == "speedup")
        for size in study.sizes or [None]:
            keys = [
                dict(line.split("=") for line in point.settings) for point in part.axes_at(size)["peers"].all_points()
            ]
            totals = [int(point["n_peers"]) * int(point["rounds"]) for point in keys]
            assert totals == [pytest.approx(totals[0], rel=0.01)] * len(totals)
