"""What the terminal shows: wording of numbers and guarantees, progress, tables."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from rich.console import Console
from run_folders import metrics_line, privacy_row, small_scenario, summary_of

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.common import formatting
from flower_privdec.common.errors import ScenarioError
from flower_privdec.reporting import console, progress, wording
from flower_privdec.reporting.console import _table, adjacency_picture, comparison_row, parts
from flower_privdec.reporting.progress import PLAIN_LINES, scalars


@given(st.floats(min_value=1e-6, max_value=1e8))
def test_a_printed_epsilon_is_rounded_up_within_a_percent(epsilon: float) -> None:
    printed = float(formatting.epsilon_text(epsilon))
    assert epsilon * (1 - 1e-8) <= printed <= epsilon * 1.011


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (2.991, "3.00"),
        (2.99, "2.99"),
        (0.1234, "0.124"),
        (0.9991, "1.00"),
        (9.991, "10.0"),
        (30, "30.0"),
        (1234.2, "1240"),
        ("inf", "∞"),
        (0, "0"),
    ],
)
def test_epsilon_is_rounded_up(epsilon: float | str, text: str) -> None:
    assert formatting.epsilon_text(epsilon) == text


@given(st.sets(st.integers(0, 60), min_size=1))
def test_peer_ranges_name_every_peer_once(peers: set[int]) -> None:
    named: list[int] = []
    for part in formatting.peer_ranges(peers).split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(peers)


def test_numbers_times_and_sizes_read_well() -> None:
    assert [formatting.setting(x) for x in (1e-5, 0.001, 3.0, None)] == ["1e-5", "0.001", "3", "–"]
    numbers = [formatting.number(x) for x in (1.2e-5, 0.45, 20, 123.4, 12345.6, 0, None)]
    assert numbers == ["1.20e-5", "0.450", "20.0", "123", "12,346", "0", "–"]
    times = [formatting.duration(x) for x in (0.42, 9.999, 185, 7500)]
    assert times == ["0.42 s", "10.0 s", "3 min 05 s", "2 h 05 min"]
    sizes = [formatting.memory(x) for x in (512, 1536, 5 << 20, 3 << 40)]
    assert sizes == ["512 B", "1.5 KiB", "5 MiB", "3 TiB"]


def test_equal_guarantees_are_one_line() -> None:
    said = wording.guarantee(summary_of(small_scenario()))
    assert said == "every peer: ε = 2.00 at δ = 0.001 (unit: example, adjacency: zero-out, calibration: rigorous)"


def test_unequal_guarantees_are_a_range() -> None:
    rows = [privacy_row(0, 0.991), privacy_row(1, 2.0, delta=1e-5)]
    said = wording.guarantee(summary_of(small_scenario(), rows))
    assert said.startswith("over the peers: ε = 0.991–2.00 at δ = 1e-5–0.001 (")


def test_a_claimed_epsilon_is_called_a_claim() -> None:
    summary = summary_of(small_scenario(), [privacy_row(0, 21.0, claimed_epsilon=1.0, calibration="paper")])
    assert "ε = 21.0" in wording.guarantee(summary)
    assert wording.claim(summary) == "the paper's formula claims ε = 1: a claim, not a guarantee"
    assert wording.claim(summary_of(small_scenario())) is None


def test_no_privacy_says_so() -> None:
    summary = summary_of(small_scenario("privacy=none"), [privacy_row(0, "inf", delta=0.0, calibration="none")])
    assert wording.guarantee(summary) == "ε = ∞ (no privacy)"
    assert not wording.is_private(summary)
    assert "may reveal anything" in wording.meaning(summary)


def test_meaning_names_the_factor_of_the_largest_epsilon() -> None:
    summary = summary_of(small_scenario(), [privacy_row(0, 1.0), privacy_row(1, 2.0)])
    assert f"e^ε = {math.exp(2):.3g}," in wording.meaning(summary)
    beyond = wording.meaning(summary_of(small_scenario(), [privacy_row(0, 1e9)]))
    assert "e^ε beyond 1e304, which protects no one," in beyond


def test_summary_shows_result_privacy_and_folder(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_summary(summary_of(small_scenario()), Path("runs/small"))
    shown = capsys.readouterr().out
    for text in (
        "small: mean model 90.0 %",
        "88.0 % on average, 85.0–89.0 % from worst to best",
        "every peer: ε = 2.00",
        "4.00 s",
        "runs/small",
    ):
        assert text in shown
    assert not any(line != line.rstrip() for line in shown.splitlines())


def test_summary_shows_what_few_algorithms_have(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(small_scenario())
    summary["privacy"] = [row | {"epsilon_of_replies_to_one": 0.8391} for row in summary["privacy"]]
    summary |= {"coalition_evaluations": 8764, "coalition_share_of_wall_time": 0.3813}
    summary |= {"suboptimality": 0.127, "optimum": {"value": 0.13922, "gap": 9.4e-7}}
    console.print_summary(summary, Path("runs/small"))
    said = " ".join(capsys.readouterr().out.split())
    assert "8,764 evaluated for Shapley values, which took 38.1 % of the time" in said
    assert "ε ≤ 0.840 for the replies to one neighbour" in said
    assert "0.127 above the minimum, which is 0.13922 (within 9.4e-07)" in said


def test_isolated_peers_are_judged_by_their_own_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = summary_of(small_scenario("algorithm.name=local"))
    console.print_summary(summary, Path("runs/alone"))
    assert "peers' own models, on average 88.0 %" in capsys.readouterr().out
    row = comparison_row(summary)
    assert (row["mean model"], row["peers' models"], row["loss"]) == ("–", "88.0 % (85.0–89.0)", "–")


def test_comparison_has_a_row_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [summary_of(small_scenario(f"name=run-{i}")) for i in range(3)]
    console.print_comparison(runs)
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if "run-" in line] == ["run-0", "run-1", "run-2"]
    assert "90.0 %" in shown


def _plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80, highlight=False), file


@pytest.mark.parametrize("rounds", [7, 40, 1000])
def test_progress_outside_a_terminal_is_a_few_plain_lines(tmp_path: Path, rounds: int) -> None:
    shown_on, file = _plain()
    scenario = small_scenario(f"rounds={rounds}", "evaluation.every=1")
    with progress.progress(scenario, tmp_path / "run", console=shown_on) as on_metrics:
        for k in range(1, rounds + 1):
            on_metrics(metrics_line(k))
    lines = file.getvalue().splitlines()
    assert min(rounds, PLAIN_LINES) >= len(lines) > 3
    assert lines[-1].startswith(f"small: round {rounds}/{rounds}  accuracy 90.0 %")
    assert lines[-1].endswith("ε 2.00  done")
    assert file.getvalue().replace("\n", "").isprintable()
    assert not (tmp_path / "run").exists()


def test_progress_may_begin_in_the_middle(tmp_path: Path) -> None:
    shown_on, file = _plain()
    with progress.progress(small_scenario(), tmp_path, console=shown_on) as on_metrics:
        on_metrics(metrics_line(30))
        on_metrics(metrics_line(40))
    assert [line.split()[2] for line in file.getvalue().splitlines()] == ["30/40", "40/40"]


def test_the_first_line_tells_only_a_known_time(tmp_path: Path) -> None:
    for expected, said in ((None, "ε 2.00"), (75.0, "ε 2.00  1 min 15 s left")):
        shown_on, file = _plain()
        with progress.progress(small_scenario(), tmp_path, console=shown_on) as on_metrics:
            on_metrics.expect(expected)
            on_metrics(metrics_line(20))
        assert file.getvalue().splitlines()[0].endswith(said)


def test_progress_on_a_terminal_is_a_bar(tmp_path: Path) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=80)
    with progress.progress(small_scenario("name='[odd]'"), tmp_path, console=terminal) as on_metrics:
        on_metrics(metrics_line(20, epsilon="inf"))
        on_metrics(metrics_line(40, epsilon="inf"))
    shown = file.getvalue()
    for text in ("[odd]", "40/40", "accuracy 90.0 %", "consensus distance 0.0250", "ε ∞", "done"):
        assert text in shown


def test_scalars_leave_infinity_out() -> None:
    assert scalars(metrics_line(10))["epsilon"] == 2.0
    unlimited = scalars(metrics_line(10, epsilon="inf"))
    assert "epsilon" not in unlimited
    assert unlimited["accuracy/mean_model"] == 0.9


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed")
def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown_on, _ = _plain()
    with progress.progress(small_scenario(), tmp_path / "run", tensorboard=True, console=shown_on) as on_metrics:
        assert not (tmp_path / "run").exists()
        for k in (10, 20):
            on_metrics(metrics_line(k, accuracy=k / 100))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("accuracy/mean_model")] == [
        (10, 0.1),
        (20, 0.2),
    ]
    assert set(events.Tags()["scalars"]) == set(scalars(metrics_line(10)))


def test_tensorboard_without_its_extra_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with (
        raises(ScenarioError, "reporting.no-tensorboard", names=r"flower-privdec\[tensorboard\]"),
        progress.progress(small_scenario(), tmp_path, tensorboard=True),
    ):
        pass


def test_everything_a_scenario_can_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_parts(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert set(listed["algorithms"]) == set(ALGORITHMS)
    console.print_parts(as_json=False)
    shown = capsys.readouterr().out
    names = [name for group in parts().values() for name in group]
    assert all(f"  {name} " in shown for name in names)
    assert all(line for group in listed.values() for line in group.values())


def test_adjacency_picture_marks_who_hears_whom() -> None:
    lines = adjacency_picture(3, [[(0, 1), (1, 2)], [(2, 0)]], width=80)
    assert lines[1:] == [
        "  round 0     round 1",
        "0 · · ·     0 · · ●",
        "1 ● · ·     1 · · ·",
        "2 · ● ·     2 · · ·",
    ]
    assert len(adjacency_picture(3, [[(0, 1)]] * 2, width=9)) == 9


@pytest.mark.parametrize("width", [40, 60, 79, 80, 120])
def test_a_bar_fits_its_terminal_and_cuts_no_number(width: int) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False)
    scenario = small_scenario("name=a-run-with-quite-a-long-name-of-its-own", "rounds=4000")
    with progress.progress(scenario, Path("nowhere"), console=screen) as show:
        show(metrics_line(2000, 1.5, 0.5))
        show(metrics_line(4000, 3.0, 0.75))
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", text).splitlines()
    lines = [line for line in shown if line.strip()]
    assert max(map(len, lines)) <= width
    bar = next(line for line in reversed(lines) if "4000/4000" in line)
    assert bar.rstrip().endswith("done")
    assert ("0:00" in bar) == (width >= 80)


def test_a_narrow_terminal_folds_a_table_without_loss() -> None:
    table = _table([("peers", "left"), ("noise multiplier", "right"), ("ε after each quarter", "right")])
    table.add_row("0-3, 5, 7-12", "4.24", "1.31, 1.98, 2.52, 3.00")
    screen = Console(file=io.StringIO(), width=48)
    screen.print(table)
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    for word in ("0-3,", "7-12", "multiplier", "quarter", "4.24", "1.31,", "3.00"):
        assert word in said
