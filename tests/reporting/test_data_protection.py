"""The page for a data protection officer: its figures, its limits, and what it must say."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from run_folders import make_run, privacy_row, small_scenario
from tiny_scenario import Tiny

import flower_privdec as fp
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.experiment.noise_statement import NOISE
from flower_privdec.experiment.spent import Spent, privacy_rows
from flower_privdec.graph.participation import UniformParticipation
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.readings import points_of, right_guesses, true_positive_rate
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Charge, RunName
from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.reporting import page as page_of_runs
from flower_privdec.reporting.data_protection import OBSERVERS, at_least, notice, verdict
from flower_privdec.reporting.evidence import ADVERSARIES
from flower_privdec.reporting.page import write_report
from flower_privdec.reporting.run_folder import read_groups
from flower_privdec.reporting.wording import at_most

STEP = Release("poisson", 0.25, 180, 45, 1.4333)
SPENT = epsilon([STEP.times(20)], 1e-3)  # 2.997
WORTHLESS = re.compile(r"\b(nan|None|inf|GDPR|compliant|anonymous|anonymi[sz]ed)\b", re.IGNORECASE)


def charged_run(folder: Path, *overrides: str, steps: int = 20, run: str = "one", epsilon: float = SPENT) -> Path:
    """Make a run's folder with a ledger that paid for its steps."""
    rows = [privacy_row(peer, epsilon) for peer in range(4)]
    make_run(folder, *overrides, privacy=rows)
    pay(folder / "ledger", steps, run)
    return folder


def pay(folder: Path, steps: int, run: str, step: Release = STEP) -> None:
    with Ledger(folder, "digits", durable=False) as ledger:
        ledger.append(
            RunName(run, "scenario", "here"), 0, steps, [Charge((0, 1, 2, 3), ((((0, steps),), step.times(steps)),))]
        )


def page_of(folder: Path, *others: Path) -> str:
    """Return the page as text, having checked what no page may ever say."""
    out = folder.parent / "officer.md"
    write_report([folder, *others], out)
    text = out.read_text(encoding="utf-8")
    assert WORTHLESS.findall(text.replace(str(folder.parent), "")) == []
    assert "e^ε" not in text
    return text


def test_figures_cover_everything_the_ledger_paid_for(tmp_path: Path) -> None:
    text = page_of(charged_run(tmp_path / "a"))
    points = points_of(partial(epsilon, [STEP.times(20)]))
    right = right_guesses(points)
    assert 0.6 < right < 0.7  # ε and δ alone would allow 0.953
    assert f"right at most {at_most(right)} of the time" in text
    assert f"wrong at least {at_least(1 - right)} of the time" in text
    for rate in (0.001, 0.01, 0.05, 0.25):
        most = at_most(true_positive_rate(points, rate)).removesuffix(" %")
        assert f"| {100 * rate:g} | {most} | {100 * rate:g} |" in text
    assert f"would make it ε = {epsilon_text(epsilon([STEP.times(40)], 1e-3))}" in text
    assert f"Of the budget of ε = 3, {math.floor(1000 * (3 - SPENT)) / 1000:g} is left" in text


@pytest.mark.parametrize(
    ("spent", "right", "words"),
    [
        (0.1, "52.6 %", "hardly better than tossing a coin"),
        (1.0, "73.2 %", "wrong at least once in four times"),
        (3.0, "95.3 %", "leaves little doubt"),
        (8.0, "100.0 %", "rules out next to nothing"),
        (54.4, "100.0 %", "rules out next to nothing"),
        (1e9, "100.0 %", "rules out next to nothing"),
    ],
)
def test_without_a_ledger_figures_follow_from_epsilon_and_delta(
    tmp_path: Path, spent: float, right: str, words: str
) -> None:
    folder = make_run(tmp_path / "a", privacy=[privacy_row(peer, spent) for peer in range(4)])
    text = page_of(folder)
    assert f"right at most {right} of the time" in text
    assert words in text
    assert "The ledger could not be read" in text
    assert "follow only from ε and δ" in text


def test_no_privacy_is_said_plainly_and_without_figures(tmp_path: Path) -> None:
    endless = [privacy_row(peer, "inf", delta=0.0) for peer in range(4)]
    text = page_of(make_run(tmp_path / "a", "privacy=none", epsilon="inf", privacy=endless))
    assert "There is no protection (ε = ∞) for the data of all peers" in text
    assert "%" not in text
    some = [privacy_row(0), *(privacy_row(peer, "inf") for peer in range(1, 4))]
    text = page_of(make_run(tmp_path / "b", privacy=some))
    assert "There is no protection (ε = ∞) for the data of peers 1-3" in text


def test_a_delta_of_one_or_more_protects_no_one(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "a", privacy=[privacy_row(peer, 0.5, delta=1.0) for peer in range(4)]))
    assert "right at most 100.0 % of the time" in text
    assert "rules out next to nothing" in text


def test_nothing_spent_is_no_better_than_guessing(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "a", privacy=[privacy_row(peer, 0.0, delta=0.0) for peer in range(4)]))
    assert "right at most 50.0 % of the time" in text


def test_a_ledger_below_its_summary_is_reported(tmp_path: Path) -> None:
    text = page_of(charged_run(tmp_path / "a", steps=5))
    assert "holds less than this run has spent" in text
    assert "right at most 95.3 % of the time" in text  # by the summary


def test_a_ledger_that_has_grown_counts_whole(tmp_path: Path) -> None:
    folder = charged_run(tmp_path / "a")
    pay(folder / "ledger", 20, "two")
    text = page_of(folder)
    both = epsilon([STEP.times(40)], 1e-3)
    assert "more than this run had spent at its end" in text
    assert f"| {epsilon_text(both)} |" in text
    assert "2 runs over these data" in text
    assert "The budget of ε = 3 is used up" in text


def test_a_damaged_ledger_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    folder = charged_run(tmp_path / "a")
    path = folder / "ledger" / "digits.jsonl"
    path.write_text(path.read_text().replace('"steps":20', '"steps":19'))
    text = page_of(folder)
    assert "The ledger could not be read" in text
    assert "edited" in text


def test_runs_with_a_ledger_each_are_counted_together_too(tmp_path: Path) -> None:
    """Seeds are one group, and another algorithm is another; whoever sees all composes all."""
    folders = [
        charged_run(tmp_path / "1", run="one"),
        charged_run(tmp_path / "2", "seed=2", run="two"),
        charged_run(tmp_path / "3", "algorithm.name=local", run="three"),
    ]
    text = page_of(*folders)
    assert f"together ε = {epsilon_text(epsilon([STEP.times(40)], 1e-3))}" in text  # of the two seeds
    assert f"together ε = {epsilon_text(epsilon([STEP.times(60)], 1e-3))}" in text  # of all
    assert text.count("# For the data protection officer") == 2
    assert "together ε" not in page_of(folders[0])


@pytest.mark.parametrize(
    ("publishable", "words"),
    [(True, "of the operating system"), (False, "Nothing of this run may be published"), (None, "does not say where")],
)
def test_the_short_part_says_if_models_may_be_published(tmp_path: Path, publishable: bool | None, words: str) -> None:
    folder = charged_run(tmp_path / "a")
    change(folder, noise="of the operating system", publishable=publishable)
    text = page_of(folder)
    if publishable:
        assert "Nothing of this run may be published" not in text
    assert words in text


def change(folder: Path, **entries: Any) -> None:
    summary = json.loads((folder / "summary.json").read_text()) | entries
    if entries.get("publishable", True) is None:
        del summary["publishable"]
    (folder / "summary.json").write_text(json.dumps(summary))


def test_every_adversary_of_a_summary_has_a_line(tmp_path: Path) -> None:
    rows = [
        privacy_row(peer, 1.0, colluding=2, epsilon_if_all_collude=3.0, epsilon_of_replies_to_one=0.5)
        for peer in range(4)
    ]
    text = page_of(make_run(tmp_path / "a", privacy=rows))
    assert "up to 2 other peers together | 1.00 | 73.2 %" in text
    assert "all other peers together | 3.00 | 95.3 %" in text
    assert "by the replies to it only" in text
    assert "At most 2 peers share what they know" in text
    alone = [row | {"colluding": 0} for row in rows]
    assert "neither a peer nor helped by one | 1.00" in page_of(make_run(tmp_path / "b", privacy=alone))


def test_each_adversary_faces_the_noise_it_cannot_remove(tmp_path: Path) -> None:
    weak, strong = (epsilon([replace(STEP, noise_multiplier=noise).times(20)], 1e-3) for noise in (3.0, 1.4333))
    rows = [privacy_row(peer, weak, colluding=2, epsilon_if_all_collude=strong) for peer in range(4)]
    folder = make_run(tmp_path / "a", privacy=rows)
    pay(folder / "ledger", 20, "one", replace(STEP, against=((2, 3.0),)))
    text = page_of(folder)
    few, everybody = (
        at_most(right_guesses(points_of(partial(epsilon, [replace(STEP, noise_multiplier=noise).times(20)]))))
        for noise in (3.0, 1.4333)
    )
    assert f"up to 2 other peers together | {epsilon_text(weak)} | {few} |" in text
    assert f"all other peers together | {epsilon_text(strong)} | {everybody} |" in text
    assert "with the help of at most 2 other peers" in text
    assert f"However they test it, they are right at most {few}" in text
    assert f"If all other peers help, they are right at most {everybody}" in text


def test_among_ledger_copies_the_longest_counts(tmp_path: Path) -> None:
    whole, cut = charged_run(tmp_path / "1"), charged_run(tmp_path / "2", steps=10, epsilon=0.1)
    pay(tmp_path / "2" / "ledger", 5, "two")
    both = epsilon_text(epsilon([STEP.times(25)], 1e-3))
    for folders in ([whole, cut], [cut, whole]):
        assert f"together ε = {both}" in page_of(*folders)


def test_no_adversary_is_left_out() -> None:
    """Whatever ε a summary's row has, the page knows against whom it is."""
    scenario = small_scenario()
    spent = Spent([1.0] * 4, [1e-3] * 4, [None] * 4, [40] * 4, replies=[0.5] * 4, if_all_collude=[2.0] * 4, colluding=1)
    rows = privacy_rows(scenario, spent, UniformParticipation(4, 4), 40)
    printed = {key for row in rows for key in row if key.startswith("epsilon")}
    assert printed == set(OBSERVERS) == {"epsilon", *ADVERSARIES}


def test_a_run_under_way_says_so(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "a", done=20))
    assert "The run is not finished" in text
    assert "Nothing is known yet" in page_of(make_run(tmp_path / "b", done=0))


def test_a_papers_claim_is_no_guarantee_on_the_page(tmp_path: Path) -> None:
    rows = [privacy_row(peer, 40.0, claimed_epsilon=1.0, calibration="paper") for peer in range(4)]
    text = page_of(make_run(tmp_path / "a", "privacy.calibration=paper", "algorithm.name=privsgp-vr", privacy=rows))
    assert "a claim, not a guarantee" in text
    assert "right at most 100.0 % of the time" in text


@pytest.mark.parametrize("odd", [math.nan, -1.0, "nan", "much", None])
def test_a_summary_whose_epsilon_is_no_number_is_refused(tmp_path: Path, odd: Any) -> None:
    for name in ("epsilon", "delta"):
        folder = make_run(tmp_path / name, privacy=[privacy_row(0) | {name: odd}])
        with raises(ScenarioError, "reporting.summary-damaged"):
            write_report([folder], tmp_path / "officer.md")


def device(folder: Path, *overrides: str, **changes: Any) -> Path:
    """Make the folder of a deployed peer, with a ledger of its own."""
    make_run(folder, *overrides, done=0)
    status: dict[str, Any] = {"name": "small", "peer": 2, "round": 40, "rounds": 40, "epsilon": SPENT}
    status |= {"colluding": None, "epsilon_if_all_collude": None, "noise": NOISE["system"]}
    (folder / "summary.json").write_text(json.dumps(status | changes))
    pay(folder / "ledger", 20, "one")
    return folder


def test_a_devices_owner_gets_the_page_from_its_folder(tmp_path: Path) -> None:
    text = page_of(device(tmp_path / "a"))
    assert "The data of peer 2, one of 4 peers" in text
    assert f"right at most {at_most(right_guesses(points_of(partial(epsilon, [STEP.times(20)]))))}" in text
    assert "may not be published" not in text
    assert "Nothing of this run" not in text
    assert "The run is not finished" in page_of(device(tmp_path / "b", round=20))
    assert "There is no protection" in page_of(device(tmp_path / "c", "privacy=none", epsilon="inf"))
    with raises(ScenarioError, "reporting.summary-damaged"):
        page_of(device(tmp_path / "d", epsilon=math.nan))
    with raises(ScenarioError, "reporting.summary-damaged"):
        page_of(device(tmp_path / "e", peer=4))


def test_names_are_no_markup_in_the_text(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "a", "name='<b>bold | [link](x)'"))
    assert "\\<b\\>bold \\| \\[link\\](x)" in text


def test_chances_are_rounded_away_from_comfort() -> None:
    assert [at_most(chance) for chance in (0.0, 0.50001, 0.953, 1.0)] == ["0.0 %", "50.1 %", "95.3 %", "100.0 %"]
    assert [at_least(chance) for chance in (0.0, 0.04999, 0.5)] == ["0.0 %", "4.9 %", "50.0 %"]
    assert len({verdict(right) for right in (0.5, 0.7, 0.9, 0.97, 1.0)}) == 5


def test_the_html_page_folds_all_but_the_short_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_of_runs, "to_svg", lambda _figure, label: f'<svg aria-label="{label}"></svg>')
    groups = read_groups([charged_run(tmp_path / "a")])
    page = page_of_runs.render(groups)
    first, *others = (html.escape(sentence) for sentence in notice(groups[0]).short)
    assert all(sentence in page for sentence in others)
    assert page.index(first) < page.index('<details class="notice">') < page.index("For how long")


def test_page_of_a_real_run(tiny: Tiny, tmp_path: Path) -> None:
    result = fp.run(tiny(), out=tmp_path / "run")
    assert f"| {epsilon_text(result.privacy[0]['epsilon'])} |" in page_of(tmp_path / "run")
