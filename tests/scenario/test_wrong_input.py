"""Whatever is wrong with what a user gives is one line with the value, the rule and the remedy, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_scenario import TINY
from wrong_inputs import ARCHIVES, COMMANDS, EDGES, GRAPH, SETTINGS, TEXTS

from flower_privdec.cli import main

SHORT = TINY.replace("rounds: 6", "rounds: 2").replace("every: 2", "every: 1")
OWN = SHORT.replace("dataset: digits, samples: 240, test_samples: 100", "dataset: npz, root: d.npz")
STUDY = """\
name: own
base: s.yaml
parts: [{name: a, axes: {rate: {key: algorithm.learning_rate, values: [0.1, 0.5]}}}]
"""
WHOLE = len(SETTINGS) + len(TEXTS) + len(COMMANDS) + len(EDGES) + len(ARCHIVES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run in a folder with a scenario, and with files that are none; what a test leaves there is found by the next."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "folder").mkdir()
    (folder / "text").write_text("x")
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "empty.yaml").write_text("")
    (folder / "tab.yaml").write_text("name: a\n\tseed: 1\n")
    (folder / "own.yaml").write_text(STUDY)
    (folder / "capital.yaml").write_text(STUDY.replace("own", "Own"))
    (folder / "broken").mkdir()
    (folder / "broken" / "scenario.yaml").write_text("name: [")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


def check(place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    """Check that a command ends with status 2, one line and no new file."""
    before = sorted(place.rglob("*"))
    with pytest.raises(SystemExit) as left:
        main.main(list(arguments))
    out, said = capsys.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 800
    assert message in said
    assert sorted(place.rglob("*")) == before


def test_the_table_is_long() -> None:
    assert WHOLE >= 200


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[:80])
def test_a_wrong_setting(place: Path, capsys: pytest.CaptureFixture[str], setting: str) -> None:
    (place / "s.yaml").write_text(SHORT)
    check(place, capsys, ("run", "s.yaml", "--set", setting), SETTINGS[setting])


@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_text(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, message = TEXTS[name]
    (place / "s.yaml").write_text(text.replace("{}", SHORT))
    check(place, capsys, ("run", "s.yaml"), message)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments)[:80])
def test_a_wrong_command(place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    (place / "s.yaml").write_text(SHORT)
    check(place, capsys, arguments, COMMANDS[arguments])


@pytest.mark.parametrize("name", EDGES)
def test_a_wrong_list_of_edges(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, message = EDGES[name]
    (place / "s.yaml").write_text(SHORT)
    if content is not None:
        (place / f"{name}.txt").write_bytes(content)
    check(place, capsys, ("run", "s.yaml", "--set", GRAPH.format(f"{name}.txt")), message)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_wrong_archive(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, message = ARCHIVES[name]
    (place / "s.yaml").write_text(OWN)
    (place / "d.npz").unlink(missing_ok=True)
    if content is not None:
        (place / "d.npz").write_bytes(content)
    check(place, capsys, ("run", "s.yaml"), message)
