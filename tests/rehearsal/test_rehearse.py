"""`privdec rehearse` and `fp.rehearse`: what they print, draw and refuse."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from tiny_scenario import TINY, Tiny

import flower_privdec as fp
from flower_privdec.cli.main import main
from flower_privdec.common.errors import ScenarioError
from flower_privdec.rehearsal.rehearsal import Moment, PeerEnd
from flower_privdec.rehearsal.weather import LINKS
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.rehearsals import CELLS, draw_rehearsal

ROOT = Path(__file__).resolve().parents[2]


def status_of(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_the_command_prints_and_draws_what_became_of_peers(
    scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{kind: crash, peer: 3, at: 0.3}]\n")
    out = tmp_path / "out"
    assert status_of(["rehearse", str(scenario_file), "--faults", str(faults), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "finished" in text
    assert " killed " in text
    assert "peer 3: killed, and nobody starts it again" in text
    assert "gone" in text
    assert "the budget of peers" not in text  # it was not the budget that ended peer 3
    assert "not a private release" in text
    assert (out / "plots" / "rehearsal.png").stat().st_size > 10_000


def test_a_picture_of_many_peers_has_distributions() -> None:
    moment = dict.fromkeys(vars_of(Moment), "1")
    peer = dict.fromkeys(vars_of(PeerEnd), "1")
    peers = [peer | {"end": "finished" if number else "virtual.killed"} for number in range(CELLS + 1)]
    with drawing():
        few = draw_rehearsal([moment, moment], peers[:9])
        many = draw_rehearsal([moment, moment], peers)
    assert "Each peer" in few.axes[5].get_title(loc="left")
    counted = many.axes[5]
    assert counted.get_title(loc="left") == "Peers by what they sent"
    assert sum(bar.get_height() for bar in counted.patches) == CELLS + 1
    assert any(bar.get_hatch() for bar in counted.patches)  # the one that was killed, also in grey


def vars_of(record: type) -> list[str]:
    return [field.name for field in fields(record)]


@pytest.mark.parametrize("words", [["--step-seconds", "soon"], ["--slow", "half"], ["--faults", "nowhere.yaml"]])
def test_wrong_words_leave_nothing(
    words: list[str], scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["rehearse", str(scenario_file), *words, "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_from_python_a_callback_ends_it_and_nothing_stays(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []

    def stop(metrics: dict[str, Any]) -> bool:
        seen.append(metrics["round"])
        return len(seen) == 2

    result = fp.rehearse(tiny(), faults={"links": {"latency": 0.2}}, peers=5, on_evaluation=stop)
    assert seen == [2, 4]
    assert result.summary["stopped_by"] == "callback"
    assert len(result.peers) == 5
    assert "waiting" in str(result)
    assert list(tmp_path.iterdir()) == []
    with raises(ScenarioError, "api.argument"):
        fp.rehearse(tiny(), random_faults="many")  # type: ignore[arg-type]


def test_the_page_has_the_links_that_are_assumed() -> None:
    page = (ROOT / "docs" / "how-to" / "rehearse.md").read_text()
    for name, links in LINKS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert f"| {1000 * links.latency:g} ms | {1000 * links.jitter:g} ms |" in row
        loss = f"{100 * links.loss:g} %" if links.loss else "0"
        unit = (1e9, "G") if links.bandwidth >= 1e9 else (1e6, "M")
        assert f"| {loss} | {links.bandwidth / unit[0]:g} {unit[1]}bit/s |" in row
