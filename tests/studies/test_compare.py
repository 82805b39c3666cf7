"""Plans and comparisons from Python: typed, printed as the command line does, and honest about what runs cost."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import user_parts
from api_sections import SECTIONS
from raising import raises

import flower_privdec as fp
from flower_privdec.cli import main
from flower_privdec.core import Algorithm

SHORT: dict[str, Any] = {**SECTIONS, "rounds": 4, "evaluation": {"every": 4}}


def test_a_plan_is_what_the_command_prints(
    tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text)
    monkeypatch.setattr("flower_privdec.planner.plan.estimate_seconds", lambda _: (1.0, 0.0))
    plan = fp.plan(path)
    with pytest.raises(SystemExit):
        main.main(["plan", str(path)])
    *lines, blank, more = capsys.readouterr().out.splitlines()
    assert (str(plan), blank) == ("\n".join(lines), "")
    assert "--verbose" in more
    with pytest.raises(SystemExit):
        main.main(["plan", str(path), "--verbose"])
    assert plan.details() == capsys.readouterr().out.rstrip("\n")
    assert (plan.name, plan.algorithm, plan.rounds, len(plan.peers)) == ("tiny", "privsgp", 6, 4)
    assert 2.9 < plan.epsilon <= 3
    assert (plan.ledger, plan.seconds, plan.facts["name"]) == (None, 1.0, "tiny")
    assert plan.memory_bytes > 0
    assert math.isinf(fp.plan(fp.make_scenario(SECTIONS, privacy="none")).epsilon)
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_mean_and_spread_of_the_runs_themselves() -> None:
    base = fp.make_scenario(SHORT)
    table = fp.compare(base, ["privsgp", "local"], seeds=[3, 5])
    assert [(row["label"], row["runs"]) for row in table.rows] == [("privsgp", 2), ("local", 2)]
    runs = [fp.run(fp.make_scenario(base, seed=seed)).metrics[-1]["accuracy"]["mean_model"] for seed in (3, 5)]
    found = table.rows[0]["accuracy"]
    spread = pytest.approx(np.std(runs, ddof=1))
    assert found == {"mean": pytest.approx(np.mean(runs)), "std": spread, "n": 2, "diverged": 0}
    assert table.rows[1]["accuracy"] == table.rows[1]["peer-accuracy"]  # nobody has the mean of models kept apart
    assert (tuple(table.metrics), table.seeds, table.failures) == (
        ("accuracy", "peer-accuracy", "consensus"),
        (3, 5),
        {},
    )
    assert 2.9 < table.rows[0]["epsilon"] <= 3


def test_the_table_says_what_the_runs_cost_together() -> None:
    table = fp.compare(fp.make_scenario(SHORT), seeds=[1, 2])
    assert table.note.endswith("ε is that of a run alone; all 2 together cost up to ε = 6.00 at δ = 0.002.")
    assert table.note in str(table)
    assert "±" in str(table)
    single = fp.compare(fp.make_scenario(SHORT, privacy="none"), seeds=[1])
    assert single.note == ""
    assert "±" not in str(single)
    assert math.isinf(single.rows[0]["epsilon"])


def test_a_comparison_is_a_frame() -> None:
    if find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    frame = fp.compare(fp.make_scenario(SHORT), seeds=[1]).frame()
    assert frame.loc[0, "label"] == "privsgp"
    assert frame.loc[0, "accuracy.n"] == 1


def test_sections_classes_and_scenarios_are_compared_under_their_labels() -> None:
    base = fp.make_scenario(SHORT, privacy="none")
    own: list[str | type[Algorithm]] = ["sgp", user_parts.HeavyBall]
    assert [row["label"] for row in fp.compare(base, own, seeds=[1]).rows] == ["sgp", "HeavyBall"]
    sections = {
        "slow": {"name": "sgp", "learning_rate": 0.01},
        "steady": {"module": "user_parts:HeavyBall", "beta": 0.0},
    }
    scenarios = {
        "slow": fp.make_scenario(base, {"algorithm.learning_rate": 0.01, "algorithm.name": "sgp"}),
        "steady": fp.make_scenario(base, {"algorithm.name": "sgp"}),
    }
    one, other = fp.compare(base, sections, seeds=[1]).rows, fp.compare(scenarios, seeds=[1]).rows
    assert one[0] == other[0]
    assert one[1]["accuracy"]["mean"] == pytest.approx(other[1]["accuracy"]["mean"])


def test_finished_cells_are_kept_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = fp.make_scenario(SHORT)
    first = fp.compare(base, ["privsgp"], seeds=[1, 2], folder=tmp_path / "cells")
    attempts: list[Path] = []

    def attempt(text: str, folder: Path) -> str:
        attempts.append(folder)
        return "no"

    monkeypatch.setattr("flower_privdec.studies.cells.attempt", attempt)
    assert fp.compare(base, ["privsgp"], seeds=[2, 1], folder=tmp_path / "cells").rows == first.rows
    assert attempts == []
    with raises(fp.RunError, "api.all-failed", names="privsgp, seed 3: no"):
        fp.compare(base, ["privsgp"], seeds=[3], folder=tmp_path / "cells")
    partly = fp.compare(base, ["privsgp"], seeds=[1, 3], folder=tmp_path / "cells")
    assert partly.failures == {("privsgp", 3): "no"}
    assert partly.rows[0]["runs"] == 1
    assert "privsgp, seed 3, failed: no" in str(partly)


def test_changed_code_of_an_own_algorithm_makes_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "my_algorithm.py"
    module.write_text("from user_parts import HeavyBall\nclass Mine(HeavyBall):\n    factor = 1\n")
    base = fp.make_scenario(SHORT, privacy="none", algorithm={"module": "my_algorithm:Mine", "learning_rate": 0.1})
    for text, cells in ((module.read_text(), 1), (module.read_text().replace("1", "2"), 2)):
        module.write_text(text)
        fp.compare(base, seeds=[1], folder=tmp_path / "cells")
        assert len(list((tmp_path / "cells").iterdir())) == cells


def test_incomparable_scenarios_are_refused_before_anything_runs(tmp_path: Path) -> None:
    base, cells = fp.make_scenario(SHORT), tmp_path / "cells"
    wrong: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("scenario.union_tag_invalid", r"algorithm\.name='privsgb'", (base, ["privsgb"]), {}),
        ("api.argument", r"\['sgp', 'sgp'\]", (base, ["sgp", "sgp"]), {}),
        ("api.argument", r"algorithms .*\[\]", (base, []), {}),
        ("api.argument", "label", (base, [{"name": "sgp"}]), {}),
        ("api.argument", "mapping", ({"a": base}, ["sgp"]), {}),
        ("api.argument", r"seeds=\[\]", (base,), {"seeds": []}),
        ("api.argument", r"seeds=\[1, 1\]", (base,), {"seeds": [1, 1]}),
        ("scenario.greater_than_equal", "seed=-1", (base,), {"seeds": [-1]}),
        ("api.argument", "jobs=0", (base,), {"jobs": 0}),
        ("study.unknown-metric", "'acuracy' .*'accuracy'", (base,), {"metrics": ["acuracy"]}),
        (
            "study.ledger",
            r"privacy\.ledger",
            (fp.make_scenario(base, {"privacy.ledger": str(tmp_path / "ledger")}),),
            {},
        ),
    ]
    for code, names, arguments, options in wrong:
        with raises(fp.ScenarioError, code, names):
            fp.compare(*arguments, folder=cells, **options)
    assert not cells.exists()


def test_a_scenario_that_cannot_run_is_found_first(tmp_path: Path) -> None:
    """What only shows when a scenario is built is found before hours of others, and the culprit is named."""
    base = fp.make_scenario(SHORT)
    cells = tmp_path / "cells"
    culprits: dict[str, tuple[str, dict[str, Any]]] = {
        "directed": ("mixing.directed", {"topology": {"name": "directed-ring", "weights": "metropolis"}}),
        "budget": ("privacy.budget", {"privacy.noise_multiplier": 0.01, "privacy.epsilon": 0.1}),
        "range": ("experiment.range", {"algorithm.learning_rate": 1e35}),
        "vast": ("memory.short", {"model": {"name": "mlp", "hidden": [2_000_000, 2_000_000]}}),
    }
    for label, (code, changes) in culprits.items():
        with raises(fp.ScenarioError, code, names=f"^{label}, seed 1: .*nothing was run"):
            fp.compare({"fine": base, label: fp.make_scenario(base, changes)}, seeds=[1, 2], folder=cells)
        assert not cells.exists()


def test_labels_that_clash_are_told_what_to_write() -> None:
    base = fp.make_scenario(SHORT)
    for arguments in ((base, ["sgp", "sgp"]), ([base, base],), ((base, base),), ({1: base},), ({"": base},)):
        with raises(fp.ScenarioError, "api.argument", names=r"compare\(\{label: scenario, \.\.\.\}\)"):
            fp.compare(*arguments)  # type: ignore[arg-type]
