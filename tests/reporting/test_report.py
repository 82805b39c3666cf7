"""The page about runs, the plots beside a run, and the folders they are read from."""

from __future__ import annotations

import csv
import html
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from raising import raises
from run_folders import make_run, privacy_row
from tiny_scenario import Tiny
from variants import PLAIN, settings_for

import flower_privdec as fp
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.reporting import page as page_of_runs
from flower_privdec.reporting import plots
from flower_privdec.reporting.console import print_comparison
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.page import write_report
from flower_privdec.reporting.run_folder import read_groups
from flower_privdec.reporting.wording import headline
from flower_privdec.scenario import parse_scenario

OWN_PICTURES = ("privsgp", "feddeper", "pdsl", "local")  # algorithms that differ in which pictures their page has
FETCHING = re.compile(r'(?:src|href|action|data)="(?!#)|url\((?!#)|@import|<(?:script|link|img|iframe|object|base)\b')


class _Page(HTMLParser):
    """Collects what the tests ask of a page, and checks that its tags nest."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _page(runs: list[Path], out: Path) -> tuple[str, _Page]:
    write_report(runs, out)
    text = out.read_text(encoding="utf-8")
    return text, _Page(text)


@pytest.fixture
def words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures of a page empty, which take ten times as long as its words."""
    monkeypatch.setattr(page_of_runs, "to_svg", lambda _figure, label: f'<svg aria-label="{label}"></svg>')


@pytest.mark.slow
def test_a_page_shows_result_curves_graph_and_scenario(tmp_path: Path) -> None:
    text, page = _page([make_run(tmp_path / "a")], tmp_path / "new" / "page.html")
    shown = " ".join(page.text)
    for expected in (
        "small",
        "mean model 90.0 % on the test set, ε = 2.00 at δ = 0.001",
        "every peer: ε = 2.00 at δ = 0.001",
        "jointly connected in 2 rounds",
        "Test accuracy",
        "of each peer",
        "Test loss",
        "Consensus distance",
        "ε spent",
        "learning_rate_decay: 0.0",
    ):
        assert expected in shown
    assert page.open == []
    assert text.count("<svg") == 6


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text, page = _page([make_run(tmp_path / "a"), make_run(tmp_path / "b")], tmp_path / "page.html")
    assert FETCHING.findall(text) == []
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, never fetched
    assert len(page.ids) == len(set(page.ids))


def test_pictures_follow_the_colours_of_the_page(tmp_path: Path) -> None:
    text, _ = _page([make_run(tmp_path / "a"), make_run(tmp_path / "b")], tmp_path / "page.html")
    declared = set(re.findall(r"(--[\w-]+):", text))
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)
        assert set(re.findall(r"var\((--[\w-]+)\)", picture)) <= declared
        assert set(re.findall(r"#[0-9a-f]{6}\b", picture)) == set()


@pytest.mark.usefixtures("words_alone")
def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", "name='<b>bold & co'")
    text, page = _page([folder, make_run(tmp_path / "b")], tmp_path / "page.html")
    assert "<b>bold" not in text
    assert "<b>bold & co" in page.text


@pytest.mark.usefixtures("words_alone")
def test_several_runs_are_compared_in_one_table(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", "name=alone", "algorithm.name=local"),
        make_run(tmp_path / "c", "name=open", "privacy=none", epsilon="inf", privacy=[privacy_row(0, "inf")]),
    ]
    summaries = write_report(folders, tmp_path / "page.html")
    assert [summary["label"] for summary in summaries] == ["small", "alone", "open"]
    page = _Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    shown = " ".join(page.text)
    assert "3 runs compared" in shown
    assert "best with ε = 3: small (90.0 %); with no privacy: open (90.0 %)" in shown
    assert "algorithm local exchanges nothing" in shown
    assert "ε = ∞ (no privacy)" in shown
    assert "(picture: small)" in shown  # the same graph is drawn once


@pytest.mark.usefixtures("words_alone")
def test_unequal_budgets_get_a_row_each(tmp_path: Path) -> None:
    rows = [privacy_row(peer, 1.0 if peer < 3 else 2.0) for peer in range(4)]
    _, page = _page([make_run(tmp_path / "a", privacy=rows)], tmp_path / "page.html")
    assert "0-2" in page.text
    assert "over the peers: ε = 1.00–2.00" in " ".join(page.text)


@pytest.mark.usefixtures("words_alone")
@pytest.mark.parametrize(("done", "expected"), [(20, "20 of 40 rounds"), (0, "0 of 40 rounds")])
def test_a_run_under_way_is_shown_as_unfinished(tmp_path: Path, done: int, expected: str) -> None:
    folder = make_run(tmp_path / "a", done=done)
    _, page = _page([folder], tmp_path / "page.html")
    assert "unfinished" in page.text
    assert expected in " ".join(page.text)


def test_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", done=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 30, "accu')
    assert [m["round"] for m in read_groups([folder])[0].runs[0].metrics] == [10, 20]


def test_labels_differ_where_names_repeat(tmp_path: Path) -> None:
    a, b, c = make_run(tmp_path / "x" / "a"), make_run(tmp_path / "x" / "b"), make_run(tmp_path / "y" / "a")
    assert [r.label for r in read_groups([a, b])] == ["a", "b"]
    assert [r.label for r in read_groups([a, c])] == [str(a), str(c)]
    assert [r.label for r in read_groups([a, a])] == [f"{a} #1", f"{a} #2"]


@pytest.mark.usefixtures("words_alone")
def test_runs_of_several_seeds_become_mean_and_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {3: 0.88, 1: 0.90, 2: 0.95}
    folders = [
        make_run(tmp_path / str(seed), f"name=small-s{seed}", f"seed={seed}", accuracy=share)
        for seed, share in shares.items()
    ]
    (group,) = groups = read_groups(folders)
    assert (group.label, group.seeds, len(group.runs)) == ("small (3 seeds)", "1-3", 3)
    deviation = 0.036055512754639896
    assert group.summary["accuracy"] == pytest.approx(
        {"mean_model": 0.91, "peer_mean": 0.89, "peer_min": 0.83, "peer_max": 0.94}
    )
    assert group.summary["spread"]["mean_model"] == pytest.approx(deviation)
    assert "mean model 91.0 ± 3.6 % on the test set" in headline(group.summary)
    print_comparison([group.summary])
    assert "91.0 ± 3.6 %   89.0 ± 3.6 % (83.0–94.0)" in capsys.readouterr().out
    accuracy, loss, *_ = plots.curves_of(groups)
    with drawing():
        axes = plots.draw_curve(accuracy, groups).axes[0]  # type: ignore[union-attr]
        assert axes.get_lines()[0].get_ydata() == pytest.approx([91.0] * 4)
        ends = axes.collections[0].get_paths()[0].get_extents().intervaly
        assert ends == pytest.approx([91 - 100 * deviation, 91 + 100 * deviation])
        assert "bands: their standard deviation" in axes.texts[0].get_text()
        assert len(plots.draw_curve(loss, groups).axes[0].collections) == 1  # type: ignore[union-attr]
    text, page = _page(folders, tmp_path / "page.html")
    assert "seeds" in page.text
    assert all(str(folder) in text for folder in folders)


def test_a_group_has_each_seed_once(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a")
    others = [
        make_run(tmp_path / "again"),
        make_run(tmp_path / "other", "seed=2", "algorithm.learning_rate=0.5"),
        make_run(tmp_path / "under-way", "seed=3", done=20),
        make_run(tmp_path / "flower", "seed=4"),
    ]
    told = json.loads((others[3] / "summary.json").read_text()) | {"runtime": "flower"}
    (others[3] / "summary.json").write_text(json.dumps(told))
    assert [[run.folder for run in group.runs] for group in read_groups([first, *others])] == [
        [folder] for folder in (first, *others)
    ]


@pytest.mark.usefixtures("words_alone")
def test_runs_of_unlike_budgets_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = [privacy_row(peer, "inf", delta=0.0) for peer in range(4)]
    folders = [
        make_run(tmp_path / "open", "privacy=none", epsilon="inf", privacy=endless, accuracy=0.97),
        *(make_run(tmp_path / f"3-{seed}", f"seed={seed}", accuracy=0.9) for seed in (1, 2)),
        make_run(tmp_path / "1", "privacy.epsilon=1.0", accuracy=0.8),
        make_run(tmp_path / "better", "privacy.epsilon=1.0", "name=better", accuracy=0.85),
        make_run(tmp_path / "paper", "privacy.calibration=paper", "algorithm.name=privsgp-vr", "name=paper"),
    ]
    summaries = write_report(folders, tmp_path / "page.html")
    labels = ["small, ε = 1", "better, ε = 1", "paper, ε = 2", "small, ε = 3 (2 seeds)", "small, no privacy"]
    assert [summary["label"] for summary in summaries] == labels
    shown = " ".join(_Page((tmp_path / "page.html").read_text(encoding="utf-8")).text)
    assert "best with ε = 1: better, ε = 1 (85.0 %); with ε = 2: paper, ε = 2 (90.0 %)" in shown
    assert "with no privacy: small, no privacy (97.0 %)" in shown
    print_comparison(summaries)
    lines = capsys.readouterr().out.splitlines()
    gaps = [lines[i + 1] == "" for i, line in enumerate(lines) if re.match(r" small, ε = 1| better| paper", line)]
    assert gaps == [False, True, True]


@pytest.mark.usefixtures("words_alone")
def test_like_peers_are_described_together(tmp_path: Path) -> None:
    rows = [privacy_row(peer, 1.99991 + 1e-6 * peer) for peer in range(4)]
    _, page = _page([make_run(tmp_path / "a", privacy=rows)], tmp_path / "page.html")
    assert "every peer: ε = 2.00 at δ = 0.001" in " ".join(page.text)
    assert "0-3" not in page.text


def _damage(folder: Path, what: str) -> Path:
    if what == "no folder":
        return folder / "missing"
    make_run(folder / "run")
    if what == "no scenario":
        (folder / "run" / "scenario.yaml").unlink()
    elif what == "no scenario of ours":
        (folder / "run" / "scenario.yaml").write_text("name: x\nnonsense: 1\n")
    elif what == "metrics":
        (folder / "run" / "metrics.jsonl").write_text("nonsense\n{}\n")
    else:
        (folder / "run" / "summary.json").write_text("{")
    return folder / "run"


@pytest.mark.parametrize(
    ("what", "code", "names"),
    [
        ("no folder", "reporting.not-a-run", "missing: "),
        ("no scenario", "reporting.not-a-run", r"scenario\.yaml"),
        ("no scenario of ours", "scenario.extra_forbidden", r"scenario\.yaml:2: unknown key 'nonsense'"),
        ("metrics", "run.metrics-damaged", r"metrics\.jsonl:1: "),
        ("summary", "reporting.summary-damaged", r"summary\.json: "),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, what: str, code: str, names: str) -> None:
    with raises(ScenarioError, code, names):
        write_report([_damage(tmp_path, what)], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("words_alone")
def test_an_unwritable_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with raises(ScenarioError, "path.is-folder", names=r"page\.html"):
        write_report([make_run(tmp_path / "a")], tmp_path / "page.html")


def test_a_page_takes_no_other_file_s_place(tmp_path: Path) -> None:
    scenario = make_run(tmp_path / "a") / "scenario.yaml"
    before = scenario.read_bytes()
    with raises(ScenarioError, "reporting.suffix", names=r"scenario\.yaml: .*\.html, "):
        write_report([tmp_path / "a"], scenario)
    assert scenario.read_bytes() == before


@pytest.mark.usefixtures("words_alone")
def test_an_unbuildable_graph_is_said_and_not_fatal(tmp_path: Path) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n3 0\n")
    folder = make_run(tmp_path / "a", "topology.name=edge-list", f"topology.file={edges}")
    edges.unlink()
    _, page = _page([folder], tmp_path / "page.html")
    assert "cannot be built here" in " ".join(page.text)


@pytest.mark.usefixtures("pictures")
def test_plots_of_a_run_are_png_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    written = plots.save_run_plots(folder)
    assert [path.name for path in written] == ["accuracy.png", "loss.png", "consensus.png", "epsilon.png"]
    assert all(path.parent == folder / "plots" and path.read_bytes()[:4] == b"\x89PNG" for path in written)


def test_plots_leave_out_what_a_run_does_not_have(tmp_path: Path) -> None:
    endless = make_run(tmp_path / "a", "privacy=none", epsilon="inf")
    assert "epsilon.png" not in [path.name for path in plots.save_run_plots(endless)]
    early = make_run(tmp_path / "b", done=0)
    assert plots.save_run_plots(early) == []
    assert not (early / "plots").exists()


def test_a_figure_of_its_own_follows_a_dark_theme() -> None:
    svg = plots.themed('<?xml version="1.0"?><svg width="3"><path style="fill: #ffffff; stroke: #0069a6"/></svg>')
    assert ET.fromstring(svg)[0].tag == "style"
    assert '[style*="stroke: #0069a6"]{stroke:#5ab0f0!important}' in svg
    assert '[style*="fill: #ffffff"]{fill:#161b22!important}' in svg


def test_the_ending_decides_between_table_and_curves(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a_b"), make_run(tmp_path / "c", done=10)]
    for name in ("runs.csv", "runs.tex", "runs.pdf", "runs.png", "runs.svg"):
        write_report(runs, tmp_path / name)
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(rows) == 2
    assert float(rows[0]["accuracy.mean_model"]) > 0
    table = (tmp_path / "runs.tex").read_text()
    assert table.startswith("\\begin{tabular}{ll")
    assert r"a\_b" in table
    assert table.count("\\\\") == 3
    assert "%" not in table.replace("\\%", "")
    assert (tmp_path / "runs.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "prefers-color-scheme: dark" in (tmp_path / "runs.svg").read_text()


def test_a_folder_of_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two")
    with raises(ScenarioError, "reporting.not-a-run", "one of the 2 runs in it, such as .*runs/one, .*runs/two"):
        write_report([tmp_path / "runs"], tmp_path / "page.html")


@pytest.mark.parametrize("more", [[], ["algorithm.average={decay: 0.9}"]], ids=["", "averaged"])
def test_a_single_run_has_appendix_and_figure_of_peers(more: list[str], tiny_text: str, tmp_path: Path) -> None:
    summary = fp.run(parse_scenario(tiny_text, overrides=more), out=tmp_path / "run").summary
    assert set(summary["made"]) == {"versions", "hardware", "commit", "command"}
    assert len(summary["peers"]["accuracy"]) == 4
    assert max(summary["peers"]["accuracy"]) == summary["accuracy"]["peer_max"]
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(text in html.unescape(page) for text in summary["made"].values())
    assert "each peer: its model and its ε" in page
    assert " UTC" in page


@pytest.mark.usefixtures("words_alone")
def test_a_summary_is_returned_as_it_stands(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (summary,) = write_report([folder], tmp_path / "page.html")
    assert json.loads((folder / "summary.json").read_text()).items() <= summary.items()


def test_a_run_without_exchange_reports_peers_accuracy(tmp_path: Path) -> None:
    groups = read_groups([make_run(tmp_path / "a", "algorithm.name=local")])
    accuracy, loss, *_ = plots.curves_of(groups)
    with drawing():
        figure = plots.draw_curve(accuracy, groups)
        assert figure is not None
        assert figure.axes[0].get_lines()[0].get_ydata() == pytest.approx([88.0] * 4)
        assert plots.draw_curve(loss, groups) is None


@pytest.mark.slow
@pytest.mark.parametrize("variant", PLAIN, ids=" ".join)
def test_a_run_of_every_algorithm_can_be_reported(
    variant: list[str], tiny: Tiny, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    full = "data.batch={sampling: full}"  # whose ε has a closed form: the page asks for many
    scenario = tiny(*settings_for(*variant), full, "rounds=2")
    if scenario.algorithm.name not in OWN_PICTURES:
        request.getfixturevalue("words_alone")
    run(Experiment.build(scenario), tmp_path / "run")
    text, _ = _page([tmp_path / "run"], tmp_path / "page.html")
    assert scenario.algorithm.name in text
