"""Studies: strict definitions, cells run once and cached, verdicts that follow from the numbers."""

from __future__ import annotations

import csv
import importlib
import json
import linecache
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from raising import raises
from rich.console import Console
from run_folders import metrics_line, privacy_row, summary_of
from scipy.stats import ttest_ind
from tiny_scenario import Tiny

from flower_privdec import __version__
from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.cli import study_command
from flower_privdec.cli.main import main
from flower_privdec.cli.study_command import print_verdicts, run_study
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.reporting.look import new_axes, new_figure
from flower_privdec.scenario import to_yaml
from flower_privdec.scenario.loading import shipped
from flower_privdec.studies.cells import (
    Cell,
    Outcome,
    _digests,
    expand,
    folder_of,
    missing_cells,
    run_cell,
    run_cells,
    stamps_of,
)
from flower_privdec.studies.publish import budgets_text, columns, publish, row, to_csv
from flower_privdec.studies.results import Estimate, Finding, PartResult, Verdict, collect, compare, difference, judge
from flower_privdec.studies.runner import choices_of, run_and_publish
from flower_privdec.studies.spec import Axis, Part, load_study
from flower_privdec.studies.study_pictures import draw_panel, save_figure

BASE = """
name: base
n_peers: 4
rounds: 4
data: {dataset: digits, samples: 240, test_samples: 50, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 2}
"""
STUDY = """
name: small
title: A small study
paper: Nobody, 2020.
base: base.yaml
sizes:
  laptop: {seeds: [1, 2]}
  paper: {seeds: [1, 2, 3], settings: [rounds=8]}
parts:
  - name: main
    title: Budgets
    claim: More is better.
    axes:
      epsilon: {title: ε, key: privacy.epsilon, values: [1, 3]}
      algorithm:
        points:
          - {label: push-sum, value: 1}
          - {label: no privacy, value: 2, ignores: [epsilon], settings: [privacy=none]}
    figures:
      - {kind: final, x: epsilon, by: algorithm, title: Accuracy by ε}
      - {kind: curves, by: algorithm, panels: epsilon, title: Curves}
    pivot: {rows: algorithm, columns: epsilon}
    fields: [rounds, algorithm.learning_rate]
    checks:
      - {kind: ordered, axis: epsilon}
"""


@pytest.fixture
def study_at(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of study files; arguments lay values over the one part, by dotted key."""

    def make(text: str = STUDY, **part: object) -> Path:
        data = yaml.safe_load(text)
        data["parts"][0] |= part
        (tmp_path / "base.yaml").write_text(BASE)
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
        return path

    return make


def cells_of(path: Path, size: str | None = None, *settings: str) -> list[Cell]:
    study, base = load_study(str(path))
    return expand(study, base, study.size(size), study.parts, settings)


def part_of(path: Path) -> Part:
    return load_study(str(path))[0].parts[0]


def fake_run(cache: Path, cell: Cell, curve: dict[int, float], **privacy: object) -> None:
    """Make up a finished cell whose accuracy and loss follow a curve over the rounds."""
    folder = folder_of(cache, cell.key)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [metrics_line(k, 1.0, value) | {"loss": {"mean_model": value}} for k, value in curve.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "scenario.yaml").write_text(to_yaml(cell.scenario))
    rows = [privacy_row(peer, **privacy) for peer in range(4)]
    (folder / "summary.json").write_text(json.dumps(summary_of(cell.scenario, rows)))
    finish(folder)


def finish(folder: Path) -> None:
    """Let a cell's files be those of a finished run."""
    facts = {"seconds": 2.0, "version": __version__, "inputs": {}, "files": _digests(folder)}
    (folder / "cell.json").write_text(json.dumps(facts))


def made_up(path: Path, cache: Path, value: Callable[[Cell], dict[int, float] | None], **privacy: object) -> PartResult:
    """Return a part whose runs are made up; None leaves a run out."""
    cells = cells_of(path)
    for cell in cells:
        curve = value(cell)
        if curve is not None:
            fake_run(cache, cell, curve, **privacy)
    return collect(part_of(path), "laptop", cells, cache)


def verdicts(result: PartResult) -> list[Verdict]:
    return [judge(check, result) for check in result.part.checks]


# --- definitions


SIZES = [(name, size) for name in sorted(shipped("studies")) for size in load_study(name)[0].sizes or [None]]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_published_study_is_sound_in_each_size(name: str, size: str | None) -> None:
    cells = cells_of(shipped("studies")[name], size)
    for part in (part.name for part in load_study(name)[0].parts if part.claim):
        assert len({cell.seed for cell in cells if cell.part == part}) >= 3, part
    assert {cell.scenario.name for cell in cells} == {name}


def test_parts_without_results_are_ready() -> None:
    """Every command in the table of missing results resolves to sound cells, here with one seed of each."""
    text = (ROOT / "docs" / "studies.md").read_text().partition("## What has not been run")[2]
    commands = re.findall(r"\| `privdec study (.*?)` \|", text)
    assert len(commands) > 10
    for words in map(shlex.split, commands):
        options = list(zip(words[1::2], words[2::2], strict=True))
        only, settings = ([value for key, value in options if key == name] for name in ("--only", "--set"))
        study, base = load_study(words[0])
        size = study.size(dict(options).get("--size"))
        short = {name: s.model_copy(update={"seeds": [1]}) for name, s in study.sizes.items()}
        parts = [
            part.model_copy(update={"sizes": {n: s.model_copy(update={"seeds": None}) for n, s in part.sizes.items()}})
            for part in study.chosen(only)
        ]
        assert expand(study.model_copy(update={"sizes": short, "seeds": [1]}), base, size, parts, settings)


def test_cases_have_settings_of_their_own(study_at: Callable[..., Path]) -> None:
    case = {"where": {"epsilon": "3", "algorithm": "push-sum"}, "settings": ["algorithm.learning_rate=0.25"]}
    rates = {cell.labels: cell.scenario.algorithm.learning_rate for cell in cells_of(study_at(cases=[case]))}
    assert {labels for labels, rate in rates.items() if rate == 0.25} == {("3", "push-sum")}
    with raises(ScenarioError, "scenario.value_error", "cases.0"):
        cells_of(study_at(cases=[{"where": {"epsilon": "7"}, "settings": []}]))


def test_the_study_of_noise_that_cancels_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns differ by their noise alone, which of a server is that of the mean of 16 peers."""
    monkeypatch.chdir(ROOT / "simulations" / "cancelling")
    cells = [cell for cell in cells_of(Path("study.yaml")) if cell.part == "table"]
    assert {cell.seed for cell in cells} == {1, 2, 3}
    for cell in cells:
        (epsilon, noise), private = cell.labels, cell.scenario.private
        assert private is not None
        own = {"0.5": 2.58268, "1": 1.52855, "3": 0.86299}[epsilon]
        assert private.noise_multiplier == (pytest.approx(own / 4, rel=1e-3) if noise == "trusted server" else None)
        assert (private.noise is not None) == noise.startswith("cancelling")


@pytest.mark.parametrize("name", ["study.yaml", "cifar-study.yaml"])
def test_algorithms_are_compared_at_equal_budget_and_rates(name: str) -> None:
    """Left out are those that are another by another name, and those that only average or have no noise."""
    study, base = load_study(str(ROOT / "simulations" / "compared" / name))
    axes = {"epsilon": Axis(key="privacy.epsilon", values=[1])}
    rates, table = (part.model_copy(update={"axes": part.axes | axes, "sizes": {}}) for part in study.parts)
    short = study.model_copy(update={"seeds": [1], "sizes": {}})
    tried, compared = expand(short, base, None, [rates]), expand(short, base, None, [table])
    assert {cell.scenario.algorithm.name for cell in compared} == set(ALGORITHMS) - {
        "sgp", "d-psgd", "const-d2p", "dp-dpsgd", "dda"
    }  # fmt: skip
    assert all(cell.scenario.private and cell.scenario.private.epsilon == 1 for cell in [*tried, *compared])
    counts = Counter((cell.labels[1], cell.labels[3]) for cell in tried)
    assert set(counts.values()) == {4}
    assert set(counts) == {(cell.labels[1], cell.labels[2]) for cell in compared}
    held_out = str(tried[0].scenario.data.root)
    assert held_out == str(compared[0].scenario.data.root).replace(".npz", "-held-out.npz")


def test_ordered_settings_merge_equal_scenarios_into_one_cell(study_at: Callable[..., Path]) -> None:
    path = study_at(settings=["rounds=6"], sizes={"paper": {"settings": ["evaluation.every=1"], "seeds": [9]}})
    laptop, paper = cells_of(path), cells_of(path, "paper", "n_peers=5")
    assert [(cell.labels, cell.seed) for cell in laptop[:3]] == [
        (("1", "push-sum"), 1),
        (("1", "push-sum"), 2),
        (("1", "no privacy"), 1),
    ]
    assert {cell.seed for cell in paper} == {9}
    assert all((c.scenario.rounds, c.scenario.evaluation.every, c.scenario.n_peers) == (6, 1, 5) for c in paper)
    assert all((c.scenario.rounds, c.scenario.n_peers) == (6, 4) for c in laptop)
    assert len(laptop) == 8
    assert len(missing_cells(laptop, Path("nowhere"))) == 6  # without privacy ε makes no difference


def test_rows_are_what_they_are_called(study_at: Callable[..., Path]) -> None:
    """No run is in two rows, unless a point ignores what the rows differ in; and then it is one run."""
    rates = {"key": "algorithm.learning_rate", "values": [0.1, 0.2]}
    same = [{"label": "a"}, {"label": "b", "settings": ["algorithm.learning_rate=0.3"]}]
    plain = {"figures": [], "pivot": None, "checks": []}
    one_run = "'0.1, b' and '0.2, b' .*ignores: .rate."
    with raises(ScenarioError, "study.one-run", names=one_run):
        cells_of(study_at(axes={"rate": rates, "other": {"points": same}}, **plain))
    same[1]["ignores"] = ["rate"]
    assert len({cell.key for cell in cells_of(study_at(axes={"rate": rates, "other": {"points": same}}, **plain))}) == 6
    same[0]["ignores"] = ["rate"]
    with raises(ScenarioError, "study.ignores", names="'0.1, a' and '0.2, a' are different runs"):
        cells_of(study_at(axes={"rate": rates, "other": {"points": same}}, **plain))


def test_missing_data_are_found_before_the_first_cell(study_at: Callable[..., Path], tmp_path: Path) -> None:
    data = {"key": "data.root", "values": [str(tmp_path / "there"), str(tmp_path / "gone")]}
    path = study_at(axes={"data": data}, figures=[], pivot=None, checks=[], settings=["data.dataset=mnist"])
    with raises(ScenarioError, "data.no-file", names=r"main: .*there, seed 1: data\.root=.*there has no MNIST/raw"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    assert not (tmp_path / "cells").exists()
    assert not (tmp_path / "out").exists()


def test_a_cells_name_covers_users_code_and_its_errors(
    study_at: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "models_of_a_study.py"
    path = study_at(settings=["model={module: 'models_of_a_study:net', arguments: {}}"], checks=[])

    def keys(code: str) -> set[str]:
        module.write_text(f"import torch\n\ndef net():\n    {code}\n")
        sys.modules.pop("models_of_a_study", None)
        linecache.checkcache()
        importlib.invalidate_caches()
        return {cell.key for cell in cells_of(path)}

    first = keys("return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))")
    assert first.isdisjoint(keys("return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))"))
    keys("return torch.nn.Linear('64', 10)")
    with raises(ScenarioError, "code.fails", names=r"^main: .*models_of_a_study\.py, line 4.*nothing was run"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"clam": "x"}, ("unknown key 'parts.0.clam'", "did you mean 'claim'")),
        ({"checks": [{"kind": "bets", "axis": "epsilon"}]}, ("parts.0.checks.0.kind='bets'", "did you mean 'best'")),
        ({"checks": [{"kind": "ordered", "axs": "epsilon"}]}, ("parts.0.checks.0.axs", "did you mean 'axis'")),
        ({"checks": [{"kind": "ordered", "axis": "eps"}]}, ("axis 'eps'", "epsilon, algorithm")),
        ({"checks": [{"kind": "best", "axis": "epsilon", "label": "7"}]}, ("'7' must be a label of axis epsilon (",)),
        ({"checks": [{"kind": "ordered", "axis": "epsilon", "metric": 7}]}, ("parts.0.checks.0.metric=7",)),
        ({"checks": [{"kind": "above", "baseline": {}}]}, ("parts.0.checks.0.baseline",)),
        ({"sizes": {"laptop": {"seeds": [1, 1]}}}, ("parts.0.sizes.laptop.seeds", "must differ")),
        ({"pivot": {"rows": "foo", "columns": "epsilon"}}, ("pivot", "'foo'")),
        ({"figures": [{"kind": "final", "title": "t"}]}, ("figures.0", "needs x")),
        ({"figures": [{"kind": "curves", "by": "peers", "title": "t"}]}, ("figures.0", "'peers'")),
        ({"axes": {"epsilon": {"key": "rounds"}}}, ("parts.0.axes.epsilon", "key and values, or points")),
        ({"axes": {"epsilon": {"key": "rounds", "values": [1, 1]}}}, ("labels differ",)),
        ({"axes": {"epsilon": {"key": "privacy.epsilon", "values": [1, 3]}, "algorithm": {"key": "privacy", "values":
            ["none"]}}}, ("'epsilon' has the key privacy.epsilon and 'algorithm' privacy", "one axis")),
        ({"axes": {"epsilon": {"key": "seed", "values": [1, 2]}}}, ("'seed=1' would be overwritten", "`seeds`")),
        ({"settings": ["name=mine"]}, ("'name=mine' would be overwritten", "leave it out")),
        ({"axes": {"epsilon": {"points": [{"label": "a", "settings": ["seed=3"]}, {"label": "b"}]}}},
            ("'seed=3' would be overwritten",)),
        ({"axes": {"epsilon": {"points": [{"label": "a", "ignores": ["peers"]}]}}, "figures": [], "pivot": None},
            ("'a': ignores: axis 'peers'",)),
        ({"best_over": ["epsilon"]}, ("best_over", "figures, pivot and checks cannot name it")),
        ({"sizes": {"huge": {}}}, ("parts.0.sizes.huge must be one of the study's sizes (laptop, paper)",)),
        ({"checks": [{"kind": "speedup", "axis": "algorithm"}], "sizes": {"paper": {"axes": {"algorithm": {
            "points": [{"label": "x"}]}}}}}, ("speedup needs a value",)),
        ({"checks": [{"kind": "speedup", "axis": "peers"}], "axes": {"peers": {"key": "n_peers", "values": [0, 2]}},
            "figures": [], "pivot": None}, ("speedup needs a value > 0",)),
    ],
)  # fmt: skip
def test_a_wrong_definition_names_line_value_and_remedy(
    study_at: Callable[..., Path], changes: dict[str, object], parts: tuple[str, ...]
) -> None:
    path = study_at(**changes)
    with pytest.raises(ScenarioError) as caught:
        load_study(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert all(part in message for part in parts), message


def test_unrunnable_studies_are_refused_before_anything_runs(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path = study_at(settings=["privacy.epsilonn=1"])
    with raises(ScenarioError, "scenario.extra_forbidden", r"part main, cell 1, push-sum: .*epsilonn.*'epsilon'"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    with raises(ScenarioError, "study.ledger", names=r"part main: .*privacy\.ledger"):
        cells_of(study_at(settings=["privacy.ledger=x"]))
    with raises(ScenarioError, "study.unknown-part", names=r"--only nothing: .* main"):
        run_study(str(study_at()), out=tmp_path / "out", jobs=1, only=["nothing"], cache=tmp_path / "cells")
    with raises(ScenarioError, "study.unknown", names=r"'no-such' .*dyn-d2p"):
        load_study("no-such")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cells").exists()


def test_an_unpublishable_folder_is_refused_first(study_at: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    for out, reason in (("text", "File exists"), ("text/x", "Not a directory"), ("x" * 300, "File name too long")):
        with raises(ScenarioError, "study.unwritable", names=rf"--out .*: .*\({reason}\)"):
            run_study(str(study_at()), out=tmp_path / out, jobs=1, cache=tmp_path / "cells")
    assert not (tmp_path / "cells").exists()


def test_dollars_and_colons_in_labels_are_themselves(study_at: Callable[..., Path], tmp_path: Path) -> None:
    points = "{points: [{label: 'a:b:', settings: [rounds=1]}, {label: '$x_$', settings: [rounds=2]}]}"
    text = MINIMAL.replace("{key: privacy.epsilon, values: [1, 3]}", points)
    text += "    figures: [{kind: curves, by: epsilon, title: '$\\foo{$'}]\n"
    output = quiet()
    run_study(str(study_at(text)), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=output)
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert "a:b:" in printed
    assert "$x_$" in (tmp_path / "out" / "budgets-1.svg").read_text()


MINIMAL = """
name: sweep
base: base.yaml
parts:
  - name: budgets
    axes:
      epsilon: {key: privacy.epsilon, values: [1, 3]}
"""


def test_a_sweep_needs_only_name_base_and_axes(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path, output = study_at(MINIMAL), quiet()
    (result,) = run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=output)
    assert [cell.seed for cell in result.cells] == [1, 1]  # the base's own
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert "test accuracy" in printed
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.startswith(f"# sweep\n\nMade by `privdec study {path}` with")
    assert "claim" not in readme.replace("its ε is a claim", "").replace("(claimed)", "")
    assert "## budgets" in readme


def test_the_base_may_be_a_bundled_scenario(study_at: Callable[..., Path]) -> None:
    path = study_at(STUDY.replace("base: base.yaml", "base: digits"))
    assert {cell.scenario.data.dataset for cell in cells_of(path)} == {"digits"}


def test_a_studys_seeds_and_settings_are_the_default(
    study_at: Callable[..., Path],
) -> None:
    data = yaml.safe_load(MINIMAL) | {"seeds": [5, 6], "settings": ["rounds=9"], "sizes": {"short": {}, "long": {}}}
    data["sizes"]["long"] = {"seeds": [7], "settings": ["rounds=90"]}
    path = study_at(yaml.safe_dump(data, sort_keys=False))
    for size, seeds, rounds in (("short", [5, 6], 9), ("long", [7], 90)):
        cells = cells_of(path, size)
        assert ([c.seed for c in cells], {c.scenario.rounds for c in cells}) == (seeds * 2, {rounds})
    study, _ = load_study(str(path))
    assert (study.size(None), study.size("long")) == ("short", "long")
    with raises(ScenarioError, "study.unknown-size", names=r"--size huge: study sweep .* short, long"):
        study.size("huge")
    with raises(ScenarioError, "study.unknown-size", names=r"--size long: study sweep"):
        load_study(str(study_at(MINIMAL)))[0].size("long")


def test_a_name_of_digits_is_a_name(study_at: Callable[..., Path]) -> None:
    assert {cell.scenario.name for cell in cells_of(study_at(MINIMAL.replace("sweep", "'2024'")))} == {"2024"}


def test_a_huge_grid_or_unknown_column_is_refused(study_at: Callable[..., Path]) -> None:
    keys = ("rounds", "n_peers", "evaluation.every")
    axes = {key: {"key": key, "values": list(range(1, 1001))} for key in keys}
    with raises(ScenarioError, "study.too-many-cells", names=r"part budgets: 1,000,000,000 .* 20,000"):
        cells_of(study_at(MINIMAL, axes=axes))
    with raises(ScenarioError, "study.unknown-field", names=r"fields\.0='algorithm\.learning_rat'"):
        cells_of(study_at(MINIMAL, fields=["algorithm.learning_rat"]))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"metrics": ["acuracy"]},
            "part main, metrics.0: metric 'acuracy' .*'accuracy'",
        ),
        ({"metrics": ["loss", "accuracy.peer_maxx"]}, "part main, metrics.1: .*'accuracy.peer_max'"),
        ({"metrics": ["late-rmse"]}, "metrics.0: metric 'late-rmse' .*accuracy, loss"),
        ({"figures": [{"kind": "curves", "metric": "los"}]}, "figures.0.metric: .*'loss'"),
        ({"metrics": ["training-los"]}, "metrics.0: .*'training-loss'"),
        ({"checks": [{"kind": "ordered", "axis": "epsilon", "metric": "x"}]}, "checks.0.metric: metric 'x'"),
        ({"pivot": {"rows": "epsilon", "columns": "algorithm", "metric": "privacy"}}, "pivot.metric: metric 'privacy'"),
    ],
)
def test_a_wrong_metric_is_refused_before_anything_runs(
    study_at: Callable[..., Path], tmp_path: Path, changes: dict[str, object], names: str
) -> None:
    path = study_at(**changes)
    with raises(ScenarioError, "study.unknown-metric", names):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cells").exists()


def test_a_training_loss_that_no_run_measures_is_refused(study_at: Callable[..., Path]) -> None:
    with raises(ScenarioError, "study.training-loss", names=r"part budgets, metrics\.0: .*evaluation\.private=ignored"):
        cells_of(study_at(MINIMAL, metrics=["training-loss"]))
    asked = ["evaluation.training_loss=true", "evaluation.private=ignored"]
    assert cells_of(study_at(MINIMAL, metrics=["training-loss"], settings=asked))


def test_figures_of_a_class_must_be_asked_for(study_at: Callable[..., Path], tmp_path: Path) -> None:
    """And the class must be there, before any cell runs."""
    with raises(ScenarioError, "study.by-class", names=r"metrics\.0: .*evaluation\.by_class=true"):
        cells_of(study_at(MINIMAL, metrics=["by_class.3.f1"]))
    path = study_at(MINIMAL, metrics=["by_class.30.f1"], settings=["evaluation.by_class=true"])
    with raises(ScenarioError, "study.unknown-class", names="class 30 must be one of 0, 1"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    assert not (tmp_path / "out").exists()


def test_an_own_metric_is_measured(
    study_at: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_metrics_of_a_study.py").write_text("def mistakes(outputs, targets): ...\n")
    own = "task.metrics=[accuracy, {module: own_metrics_of_a_study:mistakes, better: lower, share: true}]"
    checks = [{"kind": "best", "axis": "epsilon", "label": "1", "metric": "mistakes"}]
    figures = [{"kind": "curves", "metric": "late-mistakes"}]
    path = study_at(MINIMAL, settings=[own], metrics=["best-mistakes"], checks=checks, figures=figures)
    for cell in cells_of(path):
        epsilon = cell.scenario.private.epsilon  # type: ignore[union-attr]
        fake_run(tmp_path, cell, {2: 0.1, 4: 0.5})
        lines = [metrics_line(k, 1.0) | {"mistakes": {"mean_model": epsilon / 10 / k}} for k in (2, 4)]
        (folder_of(tmp_path, cell.key) / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        finish(folder_of(tmp_path, cell.key))
    result = collect(part_of(path), None, cells_of(path), tmp_path)
    assert verdicts(result)[0].cases[0].numbers == "best first: 1 2.5 %, 3 7.5 %"
    assert [row(result, group)[1] for group in result.groups] == ["2.5 %", "7.5 %"]
    assert columns(result)[1] == "best test mistakes of the run"


def test_seeds_vary_what_the_scenario_does_not_fix(study_at: Callable[..., Path]) -> None:
    data = yaml.safe_load(MINIMAL) | {"seeds": [5, 6]}
    fixed = study_at(yaml.safe_dump(data | {"settings": ["seeds.data=1"]}, sort_keys=False))
    assert [cell.scenario.all_seeds() for cell in cells_of(fixed)[:2]] == [
        {"data": 1, "model": seed, "run": seed} for seed in (5, 6)
    ]
    with raises(ScenarioError, "study.seeds-fixed", names="part budgets: "):
        cells_of(study_at(yaml.safe_dump(data | {"settings": ["seeds={data: 1, model: 1, run: 2}"]}, sort_keys=False)))


# --- verdicts


def by_place(values: dict[tuple[str, ...], float]) -> Callable[[Cell], dict[int, float] | None]:
    """Return final values a seed apart by 0.02, in the middle the given ones."""
    return lambda cell: {4: values[cell.labels] + 0.02 * cell.seed - 0.03} if cell.labels in values else None


GRID = {("1", "push-sum"): 0.5, ("3", "push-sum"): 0.7, ("1", "no privacy"): 0.9, ("3", "no privacy"): 0.9}


def test_an_order_is_judged_place_by_place(study_at: Callable[..., Path], tmp_path: Path) -> None:
    result = made_up(study_at(), tmp_path, by_place(GRID))
    (verdict,) = verdicts(result)
    assert [case.outcome for case in verdict.cases] == [Finding.SHOWN, Finding.UNDECIDED]
    assert verdict.cases[0].numbers == "1: 50.0 ± 1.4 % < 3: 70.0 ± 1.4 % (+13.9 to +26.1)"
    assert verdict.cases[1].numbers.startswith("1: 90.0 ± 1.4 % = 3: 90.0 ± 1.4 % (")
    assert verdict.sentence == "Shown in 1 of 2 cells, undecided in 1."


def test_an_order_of_several_counts_its_pairs(study_at: Callable[..., Path], tmp_path: Path) -> None:
    axes = {"rounds": {"key": "rounds", "values": [1, 2, 3, 4]}}
    values = {("1",): 0.1, ("2",): 0.3, ("3",): 0.31, ("4",): 0.2}
    checks = [{"kind": "ordered", "axis": "rounds"}, {"kind": "ordered", "axis": "rounds", "by": -0.25}]
    strict, lenient = verdicts(
        made_up(study_at(axes=axes, checks=checks, figures=[], pivot=None), tmp_path, by_place(values))
    )
    assert strict.sentence == (
        "Contradicted; of 3 neighbouring pairs 2 in the claimed order, 1 by more than the spread."
    )
    assert lenient.sentence.startswith("Shown; of 3 neighbouring pairs 3 in the claimed order, 3 ")


# --- the rule


def estimate(*values: float) -> Estimate | None:
    return Estimate.of(values)


@pytest.mark.parametrize(
    ("less", "more", "by", "outcome"),
    [
        ([0.70, 0.71, 0.72], [0.80, 0.81, 0.82], 0.0, Finding.SHOWN),
        ([0.80, 0.81, 0.82], [0.70, 0.71, 0.72], 0.0, Finding.CONTRADICTED),
        ([0.681, 0.706, 0.731], [0.695, 0.720, 0.745], 0.0, Finding.UNDECIDED),  # 70.6 and 72.0, a spread of 2.5
        ([0.893, 0.894, 0.895], [0.896, 0.897, 0.898], 0.03, Finding.NOT_SHOWN),  # 89.4 and 89.7, claimed by 3
        ([0.80, 0.81, 0.82], [0.70, 0.71, 0.72], 0.03, Finding.CONTRADICTED),
        ([0.70, 0.71, 0.72], [0.80, 0.81, 0.82], 0.03, Finding.SHOWN),
        ([0.70, 0.71, 0.72], [0.70, 0.76, 0.82], 0.03, Finding.UNDECIDED),
        ([0.900, 0.901, 0.902], [0.899, 0.900, 0.901], -0.01, Finding.SHOWN),  # below by less than the margin
        ([0.900, 0.901, 0.902], [0.879, 0.880, 0.881], -0.01, Finding.CONTRADICTED),
        ([0.8, 0.8], [0.8, 0.8], 0.0, Finding.NOT_SHOWN),  # a tie without any spread
        ([0.1] * 3, [0.1] * 4, 0.0, Finding.NOT_SHOWN),  # whose sums in floating point have other means
        ([0.1] * 4, [0.1] * 3, 0.0, Finding.NOT_SHOWN),
        ([0.56] * 3, [0.57] * 3, 0.01, Finding.SHOWN),  # 0.57 - 0.56 is less than 0.01 in floating point
        ([0.8, 0.8], [0.8, 0.8], -0.01, Finding.SHOWN),
        ([0.8, 0.8], [0.9, 0.9], 0.0, Finding.SHOWN),
        ([0.1], [0.9], 0.0, Finding.UNDECIDED),  # one seed
        ([0.1, 0.1, 0.1], [0.9], 0.0, Finding.UNDECIDED),
        ([0.1, 0.11, 0.12], [0.9, 0.91, math.nan], 0.0, Finding.UNDECIDED),  # a run diverged
        ([math.inf, 0.1, 0.1], [0.9, 0.9, 0.9], 0.0, Finding.UNDECIDED),
        ([math.nan, math.nan], [0.9, 0.9], 0.0, Finding.UNDECIDED),
        ([], [0.9, 0.9], 0.0, Finding.UNDECIDED),
    ],
)
def test_a_difference_is_judged_against_its_spread(
    less: list[float], more: list[float], by: float, outcome: Finding
) -> None:
    assert compare(estimate(*less), estimate(*more), by) is outcome


@given(
    less=st.lists(st.floats(0, 1, width=16), min_size=2, max_size=6),
    more=st.lists(st.floats(0, 1, width=16), min_size=2, max_size=6),
)
def test_the_interval_is_that_of_welchs_test(less: list[float], more: list[float]) -> None:
    interval = difference(estimate(*less), estimate(*more))
    assert interval is not None
    if len({*less}) > 1 or len({*more}) > 1:
        expected = ttest_ind(more, less, equal_var=False).confidence_interval(0.95)
        assert interval == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    reverse = {Finding.SHOWN: Finding.CONTRADICTED, Finding.CONTRADICTED: Finding.SHOWN}
    outcome = compare(estimate(*less), estimate(*more))
    assert compare(estimate(*more), estimate(*less)) is reverse.get(outcome, outcome)


def test_several_outcomes_are_one_by_the_worst() -> None:
    assert Finding.of_all([Finding.SHOWN, Finding.UNDECIDED, Finding.SHOWN]) is Finding.UNDECIDED
    assert Finding.of_all([Finding.NOT_RUN, Finding.UNDECIDED, Finding.SHOWN]) is Finding.NOT_RUN
    assert Finding.of_all([Finding.NOT_RUN, Finding.CONTRADICTED]) is Finding.CONTRADICTED


def test_a_claim_with_a_run_missing_is_not_decided(study_at: Callable[..., Path], tmp_path: Path) -> None:
    part = {k: v for k, v in GRID.items() if k != ("3", "push-sum")}
    checks = [
        {"kind": "ordered", "axis": "epsilon", "where": {"algorithm": "push-sum"}},
        {"kind": "best", "axis": "algorithm", "label": "push-sum"},
        {"kind": "speedup", "axis": "algorithm", "metric": "loss"},
    ]
    first, second, third = verdicts(made_up(study_at(checks=checks), tmp_path, by_place(part)))
    assert first.sentence == "Not run."
    assert [case.outcome for case in second.cases] == [Finding.CONTRADICTED, Finding.NOT_RUN]
    assert second.sentence == "Not run in 1 of 2 cells, contradicted in 1."
    assert [case.outcome for case in third.cases if case.where.startswith("ε 3")] == [Finding.NOT_RUN]


def test_best_allows_near_neighbours_and_minimizes_losses(study_at: Callable[..., Path], tmp_path: Path) -> None:
    values = {("1",): 0.3, ("2",): 0.5, ("3",): 0.4, ("4",): 0.1}
    checks = [
        {"kind": "best", "axis": "rounds", "label": label, "reach": reach, "metric": metric}
        for label, reach, metric in [("2", 0, "accuracy"), ("4", 1, "accuracy"), ("3", 1, "accuracy"), ("4", 0, "loss")]
    ]
    axes = {"rounds": {"key": "rounds", "values": [1, 2, 3, 4]}}
    result = made_up(study_at(axes=axes, checks=checks, figures=[], pivot=None), tmp_path, by_place(values))
    shown, undecided, contradicted = Finding.SHOWN, Finding.UNDECIDED, Finding.CONTRADICTED
    outcomes = [verdict.cases[0].outcome for verdict in verdicts(result)]
    assert outcomes == [shown, contradicted, shown, shown]
    close = made_up(study_at(axes=axes, checks=checks[:1], figures=[], pivot=None), tmp_path, by_place(
        values | {("1",): 0.49}
    ))  # fmt: skip
    assert verdicts(close)[0].cases[0].outcome is undecided
    assert verdicts(result)[0].cases[0].numbers.startswith("best first: 2 50.0 ± 1.4 %, 3 40.0")


def test_above_compares_every_place_with_the_baseline(study_at: Callable[..., Path], tmp_path: Path) -> None:
    checks = [
        {"kind": "above", "baseline": {"epsilon": "3", "algorithm": "push-sum"}},
        {"kind": "above", "baseline": {"algorithm": "push-sum"}, "where": {"epsilon": "3"}, "metric": "loss"},
    ]
    first, second = verdicts(made_up(study_at(checks=checks), tmp_path, by_place(GRID)))
    assert {case.where: case.outcome for case in first.cases} == {
        "ε 1, algorithm push-sum": Finding.CONTRADICTED,
        "ε 1, algorithm no privacy": Finding.SHOWN,
        "ε 3, algorithm no privacy": Finding.SHOWN,
    }
    assert "70.0 ± 1.4 %" in first.detail
    assert [case.outcome for case in second.cases] == [Finding.CONTRADICTED]


def test_speedup_compares_rounds_to_a_level(study_at: Callable[..., Path], tmp_path: Path) -> None:
    axes = {
        "peers": {
            "points": [
                {"label": str(n), "value": n, "settings": [f"n_peers={n}"]}
                for n in (2, 4, 8)
            ]
        }
    }  # fmt: skip
    checks = [{"kind": "speedup", "axis": "peers", "levels": [1.0, 0.1]}, {"kind": "speedup", "axis": "peers"}]
    path = study_at(axes=axes, checks=checks, figures=[], pivot=None)

    def curve(cell: Cell) -> dict[int, float]:
        n = cell.scenario.n_peers
        slow = {2: 40, 4: 20, 8: 18}[n]  # rounds from loss 2 to loss 0.5
        return {slow: 2.0, 2 * slow: 0.5}

    first, second = verdicts(made_up(path, tmp_path, curve))
    outcomes = [case.outcome for case in first.cases]
    assert outcomes == [Finding.SHOWN, Finding.NOT_SHOWN, Finding.UNDECIDED, Finding.UNDECIDED]
    assert "67 and 33 rounds" in first.cases[0].numbers
    assert "2.00 times fewer where 2 is claimed" in first.cases[0].numbers
    assert "is not reached" in first.cases[2].numbers
    assert "80 and 40 rounds to test loss 0.500" in second.cases[0].numbers


def test_curves_with_a_gap_decide_nothing(study_at: Callable[..., Path], tmp_path: Path) -> None:
    checks = [{"kind": "speedup", "axis": "peers"}, {"kind": "slope", "metric": "loss", "at_most": -1, "first": 1}]
    points = [{"label": str(n), "value": n, "settings": [f"n_peers={n}"]} for n in (2, 4)]
    path = study_at(axes={"peers": {"points": points}}, checks=checks, figures=[], pivot=None)
    made_up(path, tmp_path, lambda _: {2: 2.0, 4: 0.5})
    metrics = folder_of(tmp_path, cells_of(path)[0].key) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[0]["loss"] = {"mean_model": None}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish(metrics.parent)
    speedup, slope = verdicts(collect(part_of(path), "laptop", cells_of(path), tmp_path))
    assert [case.outcome for case in speedup.cases] == [Finding.UNDECIDED]
    assert slope.cases[0].outcome is Finding.UNDECIDED


def test_a_slope_is_of_logarithms_from_a_round(study_at: Callable[..., Path], tmp_path: Path) -> None:
    checks = [{"kind": "slope", "at_most": -0.9, "first": 10, "metric": "loss"}]
    powers = {("1", "push-sum"): -1.0, ("3", "push-sum"): -0.8}

    def curve(cell: Cell) -> dict[int, float]:
        power = powers.get(tuple(dict(cell.labels).values()) if isinstance(cell.labels, dict) else cell.labels)
        rounds = (1, 10, 100, 1000)
        return {k: -1.0 if power is None else 1e9 if k == 1 else k**power for k in rounds}

    (verdict,) = verdicts(made_up(study_at(checks=checks, figures=[], pivot=None), tmp_path, curve))
    outcomes = [case.outcome for case in verdict.cases]
    assert outcomes == [Finding.SHOWN, Finding.UNDECIDED, Finding.CONTRADICTED, Finding.UNDECIDED]
    assert "power -1.00 ± 0.00 from round 10 to 1,000" in verdict.cases[0].numbers
    assert "has no logarithm" in verdict.cases[3].numbers


def test_curves_may_be_drawn_over_the_gradients_computed(study_at: Callable[..., Path], tmp_path: Path) -> None:
    figures = [{"kind": "curves", "by": "algorithm", "along": "gradients", "where": {"epsilon": "1"}}]
    result = made_up(study_at(figures=figures), tmp_path / "cells", by_place(GRID), rounds_run=3)
    group = result.groups[0]
    axes, batch = new_axes(new_figure(4, 3))[0, 0], group.runs[0].scenario.data.batch.size
    assert group.gradients_per_round() == 4 * 3 * batch / group.runs[0].scenario.rounds
    assert draw_panel(axes, result.part.figures[0], result, {"epsilon": "1"})
    rounds, _ = group.curves("accuracy")
    assert axes.get_lines()[0].get_xdata().tolist() == (rounds * group.gradients_per_round()).tolist()


def test_an_axis_can_be_chosen_from(study_at: Callable[..., Path], tmp_path: Path) -> None:
    axes = {
        "epsilon": {"key": "privacy.epsilon", "values": [1, 3]},
        "rate": {"key": "algorithm.learning_rate", "values": [0.1, 0.2]},
    }
    values = {("1", "0.1"): 0.3, ("1", "0.2"): 0.5, ("3", "0.1"): 0.6, ("3", "0.2"): 0.4}
    path = study_at(axes=axes, best_over=["rate"], figures=[], pivot=None)
    result = made_up(path, tmp_path, by_place(values))
    assert [(group.labels, group.chosen) for group in result.groups] == [(("1",), ("0.2",)), (("3",), ("0.1",))]
    assert verdicts(result)[0].cases[0].numbers.startswith("1: 50.0 ± 1.4 % < 3: 60.0 ± 1.4 %")


CHOSEN = """
name: chosen
base: base.yaml
parts:
  - name: rates
    axes:
      rate: {key: algorithm.learning_rate, values: [0.1, 0.2, 0.4]}
      algorithm: &algorithms
        points:
          - {label: push-sum}
          - {label: duals, settings: ["algorithm={name: dp-dda, gamma: 3}"]}
    cases:
      - {where: {algorithm: duals, rate: "0.1"}, settings: [algorithm.gamma=1]}
      - {where: {algorithm: duals, rate: "0.2"}, settings: [algorithm.gamma=2]}
      - {where: {algorithm: duals, rate: "0.4"}, settings: [algorithm.gamma=7]}
    best_over: [rate]
    settings: [rounds=2, topology.name=ring, privacy.clip_norm=2]
    metrics: [loss]
  - name: main
    chosen_in: rates
    settings: [topology.name=ring]
    axes: {epsilon: {key: privacy.epsilon, values: [1, 3]}, algorithm: *algorithms}
"""


def test_a_part_runs_the_choice_of_another(study_at: Callable[..., Path], tmp_path: Path) -> None:
    """Each cell has what was best in its place, with the cases there, and none of what else was set there."""
    path, cache = study_at(CHOSEN), tmp_path / "cells"
    study, base = load_study(str(path))
    (waiting, done) = ([cell for cell in cells_of(path) if cell.waits is waits] for waits in (True, False))
    assert {cell.part for cell in waiting} == {"main"}
    losses = {("0.1", "push-sum"): 0.5, ("0.2", "push-sum"): 0.3, ("0.4", "push-sum"): 0.9}
    for cell in done:
        fake_run(cache, cell, {2: losses.get(cell.labels, 0.2 if cell.labels[0] == "0.4" else 0.4)})
    choices = choices_of(study, None, cells_of(path), cache)
    assert choices == {"rates": {("push-sum",): ("0.2",), ("duals",): ("0.4",)}}
    chosen = [cell for cell in expand(study, base, None, study.parts, (), choices) if cell.part == "main"]
    assert [cell.waits for cell in chosen] == [False] * 4
    for cell in chosen:
        section = cell.scenario.algorithm
        assert (getattr(section, "learning_rate", None), getattr(section, "gamma", None)) == (
            (0.2, None) if cell.labels[1] == "push-sum" else (None, 7)
        )
        assert (cell.scenario.rounds, cell.scenario.private.clip_norm) == (4, 1)  # type: ignore[union-attr]
    shutil.rmtree(folder_of(cache, done[0].key))
    failed = [Outcome(done[0], "diverged")]
    assert choices_of(study, None, cells_of(path), cache)["rates"] == {("duals",): ("0.4",)}
    assert choices_of(study, None, cells_of(path), cache, failed) == choices
    assert study.chosen(["main"]) == study.parts


def test_a_shared_missing_run_is_missing_in_both(study_at: Callable[..., Path], tmp_path: Path) -> None:
    data = yaml.safe_load(CHOSEN)
    epsilon, shared = data["parts"][1]["axes"]["epsilon"], {"label": "no privacy", "settings": ["privacy=none"]}
    algorithm = {"points": [shared | {"ignores": ["epsilon"]}]}
    rate = data["parts"][0]["axes"]["rate"]
    data["parts"][0] |= {
        "axes": {"rate": rate, "epsilon": epsilon, "algorithm": algorithm},
        "cases": [],
        "settings": [],
    }
    data["parts"][1] |= {"axes": {"epsilon": epsilon, "algorithm": algorithm}, "settings": []}
    path = study_at(yaml.safe_dump(data, sort_keys=False))
    study, _ = load_study(str(path))
    cells = cells_of(path)
    for cell in cells[:-2]:
        if cell.part == "rates" and cell.labels[0] != "0.4":
            fake_run(tmp_path, cell, {4: 0.5})
    assert choices_of(study, None, cells, tmp_path) == {"rates": {}}


def test_the_command_runs_what_is_chosen_from_first(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = study_at(CHOSEN), tmp_path / "cells"
    results = run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, only=["main"], console=quiet())
    assert [(result.part.name, result.complete) for result in results] == [("rates", True), ("main", True)]
    best = {group.labels: group.chosen[0] for group in results[0].groups}
    rates = {group.labels[1]: group.runs[0].scenario.algorithm for group in results[1].groups}
    assert rates["push-sum"].learning_rate == float(best["push-sum",])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen_in": "nothing"}, "'nothing' must be an earlier part with best_over .rates."),
        ({"axes": {"epsilon": {"key": "privacy.epsilon", "values": [1]}}}, "axis 'algorithm'"),
        ({"axes": {"algorithm": {"points": [{"label": "other"}]}}}, "'other' must be a label of axis algorithm"),
    ],
)
def test_a_part_is_chosen_from_an_earlier_one(
    study_at: Callable[..., Path], changes: dict[str, object], message: str
) -> None:
    data = yaml.safe_load(CHOSEN)
    data["parts"][1] |= changes
    with raises(ScenarioError, "scenario.value_error", names=rf"parts\.1\.chosen_in: .*{message}"):
        load_study(str(study_at(yaml.safe_dump(data, sort_keys=False))))


def test_estimates_leave_out_infinite_values() -> None:
    assert Estimate.of([1.0, 3.0, float("inf")]) == Estimate(2.0, pytest.approx(2**0.5), 2, diverged=1)
    assert Estimate.of([1.0]) == Estimate(1.0, None, 1)
    assert Estimate.of([float("nan")]) is None


# --- what is published


def test_tables_show_mean_spread_seeds_and_both_epsilons(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path = study_at()
    result = made_up(path, tmp_path / "cells", by_place(GRID), epsilon=2.5, claimed_epsilon=1.0)
    study, _ = load_study(str(path))
    publish(study, "laptop", "privdec study small", [result], [], tmp_path / "out")
    rows = list(csv.DictReader(StringIO((tmp_path / "out" / "table-main.csv").read_text())))
    assert [(row["axis.epsilon"], row["axis.algorithm"]) for row in rows][1] == ("1", "no privacy")
    assert rows[1]["epsilon"] == "2.5"
    assert rows[0]["accuracy_mean"] == "0.5"
    assert float(rows[0]["accuracy_std"]) == pytest.approx(0.02 / 2**0.5, rel=1e-4)
    assert rows[0]["accuracy_by_seed"] == "0.49 0.51"
    assert (rows[0]["claimed_epsilon"], rows[0]["delta"], rows[0]["seeds"]) == ("1", "0.001", "2")
    readme = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "# A small study (laptop size)",
        "`privdec study small`",
        "6 runs, 12.0 s",
        "All runs of this study, over cells and seeds, use the same data set. Each run's ε stands alone",
        "Each seed is a run, a release of its own of the same data",
        "Criterion: test accuracy in the order 1 < 3. **Shown in 1 of 2 cells, undecided in 1.**",
        "- shown, algorithm push-sum: 1: 50.0",
        "undecided otherwise",
        "| ε | algorithm | rounds | learning rate | test accuracy | test loss | ε (claimed) | ε (exact) | δ | seeds |",
        "| 1 | push-sum | 4 | 0.5 | 50.0 ± 1.4 % | 0.500 ± 0.0141 | 1 | 2.50 | 0.001 | 2 |",
        "| algorithm | ε 1 | ε 3 |",
        "![Curves](main-2.svg)",
    ):
        assert text in readme, text
    assert (tmp_path / "out" / "main-1.svg").read_text().count("push-sum") >= 1


def test_the_terminal_warns_that_seeds_reuse_data(
    study_at: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = made_up(study_at(), tmp_path / "cells", by_place(GRID), epsilon=2.5)
    print_verdicts([result], tmp_path)
    assert "Each seed is a run, a release of its own of the same data" in " ".join(capsys.readouterr().out.split())
    bare = [cell for cell in result.cells if cell.scenario.private is None]
    assert bare
    print_verdicts([replace(result, cells=bare)], tmp_path)
    assert "Each seed" not in capsys.readouterr().out


def test_a_cell_not_run_is_shown_so(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path = study_at()
    values = {place: value for place, value in GRID.items() if place != ("3", "push-sum")}
    result = made_up(path, tmp_path / "cells", by_place(values))
    study, _ = load_study(str(path))
    publish(study, "laptop", "privdec study small", [result], [], tmp_path / "out")
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "| push-sum | 50.0 ± 1.4 % | not run |" in readme
    assert "| 3 | push-sum | – | – | not run | not run | – | – | 0 (2 missing) |" in readme
    assert f": {len(list((tmp_path / 'cells').glob('*/cell.json')))} runs, " in readme
    assert "- not run, algorithm push-sum:" in readme


def test_many_long_labels_stand_below_one_another(study_at: Callable[..., Path], tmp_path: Path) -> None:
    points = [{"label": f"an algorithm, number {i}", "settings": [f"rounds={i}"]} for i in range(1, 9)]
    figures = [{"kind": "final", "x": "algorithm"}]
    path = study_at(axes={"algorithm": {"points": points}}, figures=figures, pivot=None, checks=[])
    result = made_up(path, tmp_path / "cells", lambda cell: {4: 0.5})
    axes = new_axes(new_figure(5, 3))[0, 0]
    assert draw_panel(axes, result.part.figures[0], result, {})
    assert [label.get_text() for label in axes.get_yticklabels()] == [point["label"] for point in points]
    assert axes.yaxis_inverted()
    assert axes.get_lines()[0].get_xdata() == pytest.approx([50.0] * 8)


@pytest.mark.parametrize("far", [0.1, 0.99])
def test_a_far_value_is_an_arrow_with_its_value(study_at: Callable[..., Path], tmp_path: Path, far: float) -> None:
    """The axis shows the others apart; in a picture whose values are spread, each is a point."""
    points = [{"label": f"an algorithm, number {i}", "settings": [f"rounds={i}"]} for i in range(1, 10)]
    path = study_at(
        axes={"algorithm": {"points": points}}, figures=[{"kind": "final", "x": "algorithm"}], pivot=None, checks=[]
    )
    values = {(point["label"],): 0.5 + 0.01 * i for i, point in enumerate(points)}
    spread = made_up(path, tmp_path / "spread", by_place(values))
    axes = new_axes(new_figure(5, 3))[0, 0]
    assert draw_panel(axes, spread.part.figures[0], spread, {})
    assert len(axes.get_lines()[0].get_xdata()) == 9
    assert not axes.texts

    values[points[4]["label"],] = far
    result = made_up(path, tmp_path / "far", by_place(values))
    axes = new_axes(new_figure(5, 3))[0, 0]
    assert draw_panel(axes, result.part.figures[0], result, {})
    low, high = axes.get_xlim()
    drawn = axes.get_lines()[0].get_xdata()
    assert len(drawn) == 8
    assert low < min(drawn)
    assert max(drawn) < high
    assert high - low < 20
    assert [text.get_text() for text in axes.texts] == [f"{100 * far:.3g} ± 1.4"]
    (arrow,) = (line for line in axes.get_lines() if line.get_marker() in ("<", ">"))
    assert arrow.get_marker() == ("<" if far < 0.5 else ">")
    assert list(arrow.get_ydata()) == [4]


def test_every_budget_stands_in_the_column_where_they_differ(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path = study_at(MINIMAL)
    for cell in cells_of(path):
        fake_run(tmp_path, cell, {4: 0.5})
    folder = folder_of(tmp_path, cells_of(path)[1].key)
    rows = [privacy_row(peer, [1.0, 3.0, 3.0, 8.0][peer]) for peer in range(4)]
    (folder / "summary.json").write_text(json.dumps(summary_of(cells_of(path)[1].scenario, rows)))
    finish(folder)
    result = collect(part_of(path), None, cells_of(path), tmp_path)
    assert [row(result, group)[-3] for group in result.groups] == ["2.00", "1.00, 3.00, 8.00"]
    assert [line["epsilon"] for line in csv.DictReader(StringIO(to_csv(result)))] == ["2", "1 3 8"]


def test_many_budgets_stand_as_their_span() -> None:
    assert budgets_text([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], epsilon_text).count(",") == 5
    assert budgets_text([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, math.inf], epsilon_text) == "0.500 to ∞"
    assert budgets_text([], epsilon_text) == "–"


@pytest.mark.parametrize(("x", "lines"), [("epsilon", 2), ("algorithm", 0)])
def test_lines_join_numbers_and_never_categories(
    study_at: Callable[..., Path], tmp_path: Path, x: str, lines: int
) -> None:
    other = {"epsilon": "algorithm", "algorithm": "epsilon"}[x]
    data = yaml.safe_load(STUDY)
    for point in data["parts"][0]["axes"]["algorithm"]["points"]:
        del point["value"]
    path = study_at(yaml.safe_dump(data, sort_keys=False), figures=[{"kind": "final", "x": x, "by": other}])
    result = made_up(path, tmp_path / "cells", by_place(GRID))
    axes = new_axes(new_figure(4, 3))[0, 0]
    assert draw_panel(axes, result.part.figures[0], result, {})
    drawn = [line for line in axes.get_lines() if line.get_marker() in ("o", "s")]
    assert {line.get_marker() for line in drawn} == {"o", "s"}  # lines that meet differ by these too
    assert len(drawn) == 2
    assert sum(line.get_linestyle() != "None" for line in drawn) == lines
    places = [tuple(line.get_xdata()) for line in drawn]
    assert (places[0] == places[1]) == (x == "epsilon")  # points of one category stand side by side


# --- running


def quiet() -> Console:
    return Console(file=StringIO(), force_terminal=False, highlight=False, emoji=False, width=200)


def test_a_second_study_reuses_cells_with_results_only(study_at: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = study_at(), tmp_path / "cells"
    (result,) = run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    assert result.complete
    folders = list(cache.iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert {p.name for p in folder.iterdir()} == {
            "cell.json",
            "lock",
            "metrics.jsonl",
            "scenario.yaml",
            "summary.json",
        }
    before = {p: p.stat().st_mtime_ns for p in cache.glob("*/summary.json")}
    readme = (tmp_path / "out" / "README.md").read_text()
    run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    assert {p: p.stat().st_mtime_ns for p in cache.glob("*/summary.json")} == before
    assert (tmp_path / "out" / "README.md").read_text() == readme
    shutil.rmtree(folders[0])
    (less,) = run_study(str(path), out=tmp_path / "out", jobs=0, cache=cache, console=quiet())
    assert not less.complete
    whole = (tmp_path / "out" / "README.md").read_text()
    with raises(ScenarioError, "study.nothing-finished"):  # in another folder than that of the cells
        run_study(str(path), out=tmp_path / "out", jobs=0, cache=tmp_path / "elsewhere", console=quiet())
    assert (tmp_path / "out" / "README.md").read_text() == whole
    assert not folders[0].exists()
    assert "1 missing" in (tmp_path / "out" / "README.md").read_text()
    for group in result.groups:
        spent = float("inf") if "no privacy" in group.labels else pytest.approx(float(group.labels[0]), rel=0.01)
        assert group.budgets("epsilon") == [spent] * 8


def test_the_example_compares_four_algorithms_over_three_seeds(tmp_path: Path) -> None:
    (result,) = run_study("digits", out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    assert [(group.labels, len(group.runs)) for group in result.groups] == [
        ((name,), 3) for name in ("local", "const-d2p", "dyn-d2p", "privsgp")
    ]
    assert all(group.budgets("epsilon")[-1] <= 3.0 for group in result.groups)
    assert "**Shown in all 3 cells" in (tmp_path / "out" / "README.md").read_text()
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".md", ".svg", ".csv"}


def test_the_published_command_makes_just_what_is_published(study_at: Callable[..., Path], tmp_path: Path) -> None:
    text = yaml.safe_load(STUDY)
    text["parts"].append(text["parts"][0] | {"name": "other", "title": "Other", "settings": ["rounds=2"]})
    path, cache = study_at(yaml.safe_dump(text, sort_keys=False)), tmp_path / "cells"
    for only, command in (["other"], f"study {path} --size laptop --only other`"), ([], f"study {path} --size laptop`"):
        run_study(str(path), out=tmp_path / "out", jobs=1, only=only, cache=cache, console=quiet())
        assert command in (tmp_path / "out" / "README.md").read_text()


def test_a_part_published_earlier_keeps_its_command(study_at: Callable[..., Path], tmp_path: Path) -> None:
    text = yaml.safe_load(STUDY)
    text["parts"].append({"name": "other", "title": "Rounds", "axes": {"rounds": {"key": "rounds", "values": [2, 4]}}})
    twins = yaml.safe_dump(text, sort_keys=False).replace("title: Rounds", "title: Budgets")
    with raises(ScenarioError, "scenario.value_error", names="titles must differ.*'Budgets', 'Budgets'"):
        load_study(str(study_at(twins)))
    path, out = study_at(yaml.safe_dump(text, sort_keys=False)), tmp_path / "out"
    study, base = load_study(str(path))
    cells = expand(study, base, "laptop", study.parts)
    for cell in cells:
        fake_run(tmp_path / "cells", cell, {4: 0.5})
    main_part, other = (collect(part, "laptop", cells, tmp_path / "cells") for part in study.parts)
    publish(study, "laptop", "privdec study first", [main_part, other], [], out)
    both = (out / "README.md").read_text()
    publish(study, "laptop", "privdec study second", [other], [], out)
    publish(study, "laptop", "privdec study third", [other], [], out)
    head, budgets, rounds = re.split(r"(?m)^(?=## )", (out / "README.md").read_text())
    assert "Made by `privdec study third` with" in head
    assert "95 % interval" in head  # by which the section that stays was judged
    assert (budgets.count("Made by"), rounds.count("Made by")) == (1, 0)
    made, first = "Made by `privdec study first` with", re.split(r"(?m)^(?=## )", both)
    assert budgets.partition("\n\n")[2].startswith(made)
    assert budgets.split("\n\n")[2:] == first[1].split("\n\n")[1:]
    publish(study, "laptop", "privdec study first", [main_part, other], [], out)
    assert (out / "README.md").read_text() == both
    (out / "README.md").write_text(both.replace("of the same data: releasing", "of the data: releasing"))
    bare = [cell for cell in main_part.cells if cell.scenario.private is None]
    publish(study, "laptop", "privdec study fourth", [replace(other, cells=bare)], [], out)
    assert "Each run's ε stands alone" in (out / "README.md").read_text()  # for the part that stays, as worded now


def test_a_folder_with_another_readme_is_refused_first(study_at: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project\n")
    with raises(ScenarioError, "study.folder-taken", names=r"README\.md .*A small study"):
        run_study(str(study_at()), out=tmp_path, jobs=1, cache=tmp_path / "cells")
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    assert not (tmp_path / "cells").exists()


def test_only_a_failed_cell_is_retried(study_at: Callable[..., Path], tmp_path: Path) -> None:
    axes = {"rate": {"key": "algorithm.learning_rate", "values": [0.5, 1e25]}}
    path = study_at(axes=axes, checks=[{"kind": "ordered", "axis": "rate"}], figures=[], pivot=None)
    output = quiet()
    with raises(RunError, "study.cells-failed", names=r"2 cells .*: main: 1e25, seed 1: round "):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=output)
    assert "failed: main: 1e25, seed 2" in output.file.getvalue()  # type: ignore[attr-defined]
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "**2 runs failed:**" in readme
    assert "**Not run.**" in readme
    assert [cell.labels for cell in missing_cells(cells_of(path), tmp_path / "cells")] == [("1e25",)] * 2


def test_the_time_left_follows_from_finished_work(
    study_at: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = {"rounds": {"key": "rounds", "values": [40, 60]}}
    cells, clock, output = cells_of(study_at(axes=axes, checks=[], figures=[], pivot=None)), iter([0.0, 40.0]), quiet()
    chosen = [next(cell for cell in cells if cell.scenario.rounds == rounds) for rounds in (40, 60)]
    monkeypatch.setattr(study_command.time, "monotonic", lambda: next(clock, 40.0))
    with study_command.study_progress("small", chosen, output) as on_cell:
        on_cell(Outcome(chosen[0]))
    assert "1/2 " in output.file.getvalue()  # type: ignore[attr-defined]
    assert "1 min 00 s left" in output.file.getvalue()  # type: ignore[attr-defined]


def test_a_cell_cut_short_goes_on_another_time(study_at: Callable[..., Path], tmp_path: Path) -> None:
    (cell, *_) = cells_of(study_at())
    folder = folder_of(tmp_path, cell.key)
    folder.mkdir()
    (folder / "scenario.yaml").write_text("as a run leaves it that was killed before its first checkpoint")
    (folder / "metrics.jsonl").write_text(json.dumps(metrics_line(2)) + "\n")
    assert run_cells([cell], tmp_path, 1, lambda _: None) == []
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [2, 4]
    assert missing_cells([cell], tmp_path) == []


@pytest.mark.slow
def test_processes_run_the_same_cells(study_at: Callable[..., Path], tmp_path: Path) -> None:
    cells = missing_cells(cells_of(study_at()), tmp_path)[:2]
    done: list[str] = []
    for jobs in (1, 2):
        assert run_cells(cells, tmp_path / str(jobs), jobs, lambda outcome: done.append(outcome.cell.key)) == []
    assert sorted(done) == sorted([cell.key for cell in cells] * 2)
    for cell in cells:
        one, two = (
            [
                json.loads(line)
                for line in (folder_of(tmp_path / n, cell.key) / "metrics.jsonl").read_text().splitlines()
            ]
            for n in ("1", "2")
        )
        assert [line["accuracy"] for line in one] == [line["accuracy"] for line in two]


def test_the_command_lists_counts_and_asks_for_a_name(
    study_at: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*arguments: str) -> int:
        with pytest.raises(SystemExit) as leaving:
            main(["study", *arguments])
        return int(leaving.value.code or 0)

    assert status("--list") == 0
    assert "dyn-d2p" in capsys.readouterr().out
    assert status(str(study_at()), "--dry-run", "--size", "paper") == 0
    assert capsys.readouterr().out.split()[-2:] == ["12", "9"]
    assert status() == 2
    assert "--list" in capsys.readouterr().err


ENDLESS = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from flower_privdec.studies.cells import _end_with_the_study

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_the_study)
    pool.submit(int).result()
    pool.submit(time.sleep, 800)
    print("at work", flush=True)
    time.sleep(800)
"""


@pytest.mark.slow
def test_workers_end_when_their_study_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    study = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert study.stdout is not None
    assert study.stdout.readline() == "at work\n"
    study.kill()
    rest, _ = study.communicate(timeout=500)  # ends when nobody holds the pipe: the worker inherited it
    assert rest == ""


# --- what goes wrong


PLAIN: dict[str, object] = {"figures": [], "pivot": None, "checks": [], "fields": []}
RATES = {"key": "algorithm.learning_rate", "values": [0.1, 0.2]}
ONE = {**RATES, "values": [0.1]}
ORDERED: dict[str, object] = {"kind": "ordered", "axis": "rate"}
ABOVE: dict[str, object] = {"kind": "above", "baseline": {"rate": "0.1"}}
SECTION = "algorithm={name: privsgp, learning_rate: 3}"


def test_a_run_ending_without_a_number_counts_as_one(study_at: Callable[..., Path], tmp_path: Path) -> None:
    """It is no earlier value, and no seed that is gone: the table says so, and the claim is undecided."""
    checks = [{"kind": "ordered", "axis": "rate"}]
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "checks": checks})

    def value(cell: Cell) -> dict[int, float]:
        bad = cell.labels == ("0.2",) and cell.seed == 2
        return {2: 0.4, 4: math.nan if bad else 0.5 + cell.seed / 100 + float(cell.labels[0])}

    result = made_up(path, tmp_path, value)
    for cell in cells_of(path):
        metrics = folder_of(tmp_path, cell.key) / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace("NaN", "null"))
        finish(metrics.parent)
    result = collect(part_of(path), "laptop", cells_of(path), tmp_path)
    assert [group.final("accuracy").diverged for group in result.groups] == [0, 1]  # type: ignore[union-attr]
    assert row(result, result.groups[1])[1] == "71.0 % (1 of 2 without a number)"
    assert [line["accuracy_by_seed"] for line in csv.DictReader(StringIO(to_csv(result)))] == ["0.61 0.62", "0.71 nan"]
    assert [case.outcome for case in verdicts(result)[0].cases] == [Finding.UNDECIDED]


@pytest.mark.parametrize("what", ["failed", "diverged"])
def test_a_point_with_a_failed_seed_is_not_best(study_at: Callable[..., Path], tmp_path: Path, what: str) -> None:
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "best_over": ["rate"]})

    def value(cell: Cell) -> dict[int, float] | None:
        if cell.labels == ("0.2",):
            return {4: 0.9} if cell.seed == 1 else None if what == "failed" else {4: math.nan}
        return {4: 0.5}

    assert [group.chosen for group in made_up(path, tmp_path, value).groups] == [("0.1",)]


def test_a_number_no_run_has_chooses_nothing(study_at: Callable[..., Path], tmp_path: Path) -> None:
    data = yaml.safe_load(CHOSEN)
    alone = {"points": [{"label": "alone", "settings": ["algorithm.name=local"]}]}
    for part in data["parts"]:
        part["axes"]["algorithm"], part["cases"] = alone, []
    path = study_at(yaml.safe_dump(data, sort_keys=False))
    with raises(ScenarioError, "study.nothing-chosen", names="no run of 'alone' has the test loss"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())


def test_a_choice_shared_with_a_row_is_published_twice(study_at: Callable[..., Path], tmp_path: Path) -> None:
    data = yaml.safe_load(CHOSEN)
    tuned = [{"label": "tuned"}, *({"label": str(r), "settings": [f"algorithm.learning_rate={r}"]} for r in (0.1, 0.2))]
    data["parts"][0] |= {"axes": {"rate": RATES}, "cases": []}
    data["parts"][1] |= {"axes": {"how": {"points": tuned}}, "settings": data["parts"][0]["settings"][:-1]}
    path = study_at(yaml.safe_dump(data, sort_keys=False))
    results = run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    chosen, *others = [group.final("accuracy") for group in results[1].groups]
    assert chosen in others
    data["parts"][1]["axes"]["how"]["points"] = [{"label": "tuned"}, {"label": "the same"}]
    with raises(ScenarioError, "study.one-run"):
        cells_of(study_at(yaml.safe_dump(data, sort_keys=False)))


def test_a_folder_of_images_is_known_by_its_files(tiny: Tiny, tmp_path: Path) -> None:
    deep = tmp_path / "images" / "cat" / "patient-1"
    deep.mkdir(parents=True)
    (tmp_path / "public").mkdir()
    scenario = tiny(
        f"data={{dataset: image-folder, root: {tmp_path}/images, test: {tmp_path}/public, labels: [cat, dog], "
        "images: {nested: true}, batch: {size: 2}}"
    )
    seen = [stamps_of(scenario)]
    (deep / "0.png").write_bytes(b"first")
    seen.append(stamps_of(scenario))
    (deep / "0.png").write_bytes(b"other")
    os.utime(deep / "0.png", ns=(1, 1))  # as a copy that keeps its time does
    seen.append(stamps_of(scenario))
    assert list(seen[0]) == [f"{tmp_path}/images", f"{tmp_path}/public"]
    assert len({tuple(stamps.items()) for stamps in seen}) == 3


def test_cells_run_again_if_a_named_file_changes(study_at: Callable[..., Path], tmp_path: Path) -> None:
    """By its time: no name of a cell depends on what data hold."""
    graph, cache = tmp_path / "ring.txt", tmp_path / "cells"
    graph.write_text("0 1\n1 2\n2 3\n3 0\n")
    settings = ["topology={name: edge-list, file: ring.txt}"]
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "settings": settings})
    run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    secrets = "privacy.noise={kind: cancelling, colluding: 0, secrets: {name: edge-list, file: ring.txt}}"
    (cell, *_) = cells_of(study_at(**PLAIN | {"axes": {"rate": RATES}, "settings": [secrets]}))
    assert list(stamps_of(cell.scenario)) == [str(graph)]
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "settings": settings})
    keys, table = [cell.key for cell in cells_of(path)], (tmp_path / "out" / "table-main.csv").read_text()
    assert missing_cells(cells_of(path), cache) == []
    graph.write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    os.utime(graph, ns=(1, 1))
    assert [cell.key for cell in cells_of(path)] == keys
    assert len(missing_cells(cells_of(path), cache)) == 4
    run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    assert (tmp_path / "out" / "table-main.csv").read_text() != table
    graph.unlink()
    with raises(ScenarioError, "study.no-file", names=r"topology\.file=.*: .*ring\.txt"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())


def test_a_cell_restarts_if_its_data_changed(
    study_at: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose data change while it runs is not kept."""
    from flower_privdec.engine import run as engine

    graph = tmp_path / "ring.txt"
    graph.write_text("0 1\n1 2\n2 3\n3 0\n")
    settings = ["topology={name: edge-list, file: ring.txt}"]
    (cell, *_) = cells_of(study_at(**PLAIN | {"axes": {"rate": ONE}, "settings": settings}))
    folder, seen = folder_of(tmp_path / "cells", cell.key), list[bool]()

    def interrupted(_: object, out: Path, *, resume: bool, **options: object) -> None:
        seen.append(resume)
        (out / "checkpoint").write_text("")
        raise KeyboardInterrupt

    def whole(_: object, out: Path, *, resume: bool, **options: object) -> None:
        seen.append(resume)
        os.utime(graph, ns=(9, 9))

    monkeypatch.setattr(engine, "run", interrupted)
    for written in (1, 1, 2):
        os.utime(graph, ns=(written, written))
        with pytest.raises(KeyboardInterrupt):
            run_cell(to_yaml(cell.scenario), folder)
    assert seen == [False, True, False]
    monkeypatch.setattr(engine, "run", whole)
    with raises(RunError, "study.changed"):
        run_cell(to_yaml(cell.scenario), folder)
    assert not (folder / "cell.json").exists()


def test_one_peers_missing_file_is_found_first(study_at: Callable[..., Path], tmp_path: Path) -> None:
    x, y = np.zeros((20, 64), dtype=np.float32), np.arange(20) % 10
    for name in ("test", "0", "1", "2"):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = ["data.dataset=npz", "data.root='{peer}.npz'", "data.test=test.npz", "data.samples=null"]
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "settings": [*settings, "data.test_samples=null"]})
    with raises(ScenarioError, "data.no-file", names=r"main: 0\.1, seed 1: data\.root=.*3\.npz"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    np.savez(tmp_path / "3.npz", x_train=x[:, :9], y_train=y, x_test=x, y_test=y)
    with raises(ScenarioError, "data.shapes"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    assert not (tmp_path / "cells").exists()


def test_a_module_changed_during_a_study_ends_it(
    study_at: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result of the code before stands for the code after."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "changing_models_of_a_study.py"
    module.write_text(
        "import torch\n\ndef net():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    own = ["model={module: 'changing_models_of_a_study:net', arguments: {}}"]
    path = study_at(**PLAIN | {"axes": {"rate": RATES}, "settings": own})

    @contextmanager
    def progress(title: str, cells: Sequence[Cell]) -> Iterator[Callable[[Outcome], None]]:
        yield (
            lambda outcome: None if "#" in module.read_text() else bool(module.write_text(f"{module.read_text()}# 2\n"))
        )

    with raises(RunError, "study.changed", names="changed while the study ran; run the same command again"):
        run_and_publish(str(path), progress, out=tmp_path / "out", jobs=1, cache=tmp_path / "cells")
    finished = {folder.parent.name for folder in (tmp_path / "cells").glob("*/cell.json")}
    assert len(finished) == 1
    assert finished.isdisjoint(cell.key[:20] for cell in cells_of(path))


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "scenario.yaml", "cell.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "half"])
def test_a_damaged_cell_runs_again(study_at: Callable[..., Path], tmp_path: Path, name: str, damage: str) -> None:
    path, cache = study_at(**PLAIN | {"axes": {"rate": {**RATES, "values": [0.1]}}}), tmp_path / "cells"
    run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    table = (tmp_path / "out" / "table-main.csv").read_text()
    file = next(cache.glob(f"*/{name}"))
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    assert len(missing_cells(cells_of(path), cache)) == 1
    run_study(str(path), out=tmp_path / "out", jobs=1, cache=cache, console=quiet())
    assert (tmp_path / "out" / "table-main.csv").read_text() == table


def test_a_speed_up_ignores_the_order_of_its_axis(study_at: Callable[..., Path], tmp_path: Path) -> None:
    points = [{"label": str(n), "value": n, "settings": [f"n_peers={n}"]} for n in (4, 2)]
    checks = [{"kind": "speedup", "axis": "peers"}]
    path = study_at(**PLAIN | {"axes": {"peers": {"points": points}}, "checks": checks})
    (verdict,) = verdicts(made_up(path, tmp_path, lambda _: {2: 2.0, 4: 0.5}))
    assert [case.outcome for case in verdict.cases] == [Finding.NOT_SHOWN]


def test_seeds_that_change_nothing_are_refused(study_at: Callable[..., Path]) -> None:
    points = [{"label": "vary"}, {"label": "fixed", "settings": ["seeds={data: 5, model: 5, run: 5}"]}]
    with raises(ScenarioError, "study.seeds-fixed"):
        cells_of(study_at(**PLAIN | {"axes": {"seeds": {"points": points}}}))


@pytest.mark.parametrize(
    ("changes", "settings", "code"),
    [
        ({"axes": {"rate": ONE, "b": {"points": [{"label": "a", "settings": ["algorithm.learning_rate=3"]}]}}}, [],
            "study.label"),
        ({"axes": {"rate": ONE, "b": {"points": [{"label": "a", "settings": [SECTION]}]}}}, [], "study.label"),
        ({"axes": {"rate": RATES}, "cases": [{"where": {"rate": "0.1"}, "settings": ["algorithm.learning_rate=7"]}]},
            [], "study.label"),
        ({"axes": {"rate": {**RATES, "values": [1]}}}, ["algorithm.learning_rate=9"], "study.label"),
        ({"axes": {"name": {"key": "algorithm.name", "values": ["privsgp", "sgp"]}}, "cases": [{"where": {"name":
            "privsgp"}, "settings": ["algorithm.name=local"]}]}, [], "study.label"),
        ({"axes": {"n": {"key": "data.samples", "values": [None, 100]}}, "cases": [{"where": {"n": "None"}, "settings":
            ["data.samples=150"]}]}, [], "study.label"),
        ({"axes": {"rate": RATES}}, ["seed=77"], "study.set"),
        ({"axes": {"rate": RATES}}, ["name=mine"], "study.set"),
        ({"axes": {"rate": RATES, "b": {"key": "data.batch.rate", "values": [0.25]}}, "settings":
            ["data.batch={rate: 0.1}"], "figures": [{"kind": "curves", "along": "gradients"}]}, [], "study.gradients"),
    ],
)  # fmt: skip
def test_a_mislabelled_study_is_refused(
    study_at: Callable[..., Path], changes: dict[str, object], settings: list[str], code: str
) -> None:
    with raises(ScenarioError, code):
        cells_of(study_at(**PLAIN | changes), None, *settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checks": [ORDERED], "axes": {"rate": ONE}}, "nothing to compare"),
        ({"checks": [ORDERED], "sizes": {"laptop": {"axes": {"rate": ONE}}}}, "nothing to compare"),
        ({"checks": [{"kind": "best", "axis": "rate", "label": "0.1", "reach": 1}]}, "nothing to compare"),
        ({"checks": [ABOVE | {"without": {"rate": ["0.2"]}}]}, "nothing to compare"),
        ({"checks": [ABOVE | {"without": {"b": ["0.2"]}}]}, "one of the baseline's"),
        ({"checks": [ORDERED | {"order": ["0.1", "0.1"]}]}, "must differ"),
        ({"figures": [{"kind": "final", "x": "rate", "by": "rate"}]}, "must differ"),
        ({"figures": [{"kind": "final", "x": "rate", "where": {"rate": "0.1"}}]}, "must differ"),
        ({"pivot": {"rows": "rate", "columns": "rate"}}, "must differ"),
        ({"axes": {"rate": RATES, "b": {"points": [{"label": "b"}]}}, "best_over": ["b"], "pivot":
            {"rows": "rate", "columns": "b"}}, "pivot and checks cannot name it"),
        ({"axes": {"rate": {"points": [{"label": "two\nlines"}]}}}, "must be one line"),
        ({"notes": ["A note.\n## Not a heading"]}, "begins with #"),
    ],
)  # fmt: skip
def test_a_part_that_could_not_be_published_is_refused(
    study_at: Callable[..., Path], changes: dict[str, object], message: str
) -> None:
    with raises(ScenarioError, "scenario.value_error", names=message):
        load_study(str(study_at(**PLAIN | {"axes": {"rate": RATES}} | changes)))


def test_a_choice_within_itself_is_refused(study_at: Callable[..., Path]) -> None:
    data = yaml.safe_load(CHOSEN)
    data["parts"][1] |= {"best_over": ["epsilon"]}
    data["parts"].append(
        {"name": "last", "chosen_in": "main", "axes": {"algorithm": data["parts"][1]["axes"]["algorithm"]}}
    )
    with raises(ScenarioError, "scenario.value_error", names="'main' is chosen in rates itself"):
        load_study(str(study_at(yaml.safe_dump(data, sort_keys=False))))


def test_different_numbers_have_different_labels(study_at: Callable[..., Path]) -> None:
    axis = {"key": "seeds.data", "values": [20240101, 20240102]}
    path = study_at(**PLAIN | {"axes": {"data": axis}, "settings": ["data.source=null"]})
    assert {cell.labels for cell in cells_of(path)} == {("20240101",), ("20240102",)}
    values = Axis(key="algorithm.name", values=["\U0001f600"]).all_points()
    assert values[0].settings == ['algorithm.name="\U0001f600"']


def test_texts_of_several_lines_are_published_twice(study_at: Callable[..., Path], tmp_path: Path) -> None:
    data = yaml.safe_load(STUDY) | {"title": "A small\nstudy\n", "paper": "A paper.\n\n## A section\n"}
    texts = {"title": "Two\nrates\n", "claim": "One.\n\n## Two\n"}
    path = study_at(yaml.safe_dump(data, sort_keys=False), **PLAIN | {"axes": {"rate": RATES}} | texts)
    for _ in range(2):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.startswith("# A small study (laptop size)\n")
    assert re.findall("(?m)^## .*", readme) == ["## Two rates"]


def test_an_unwritable_folder_for_cells_is_refused(study_at: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "cells").write_text("")
    path = study_at(**PLAIN | {"axes": {"rate": RATES}})
    with raises(ScenarioError, "study.cache", names="cells"):
        run_study(str(path), out=tmp_path / "out", jobs=1, cache=tmp_path / "cells", console=quiet())
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_legend_has_every_line_of_every_panel(study_at: Callable[..., Path], tmp_path: Path) -> None:
    points = [{"label": "_first"}, {"label": "second", "settings": ["rounds=2"]}]
    figures = [{"kind": "curves", "by": "how", "panels": "rate"}]
    path = study_at(**PLAIN | {"axes": {"rate": RATES, "how": {"points": points}}, "figures": figures})
    result = made_up(path, tmp_path, lambda cell: None if cell.labels[0] == "0.2" else {2: 0.4})
    assert save_figure(result.part.figures[0], result, tmp_path / "figure.svg")
    assert all(
        f">{label}<" in (tmp_path / "figure.svg").read_text().replace("> _", ">_") for label in ("_first", "second")
    )
