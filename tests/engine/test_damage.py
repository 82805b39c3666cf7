"""A run's folder that was damaged, is full, or is somebody else's just now: one line, nothing lost, and it goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import privdec
from raising import raises
from safetensors import safe_open
from safetensors.torch import save
from tiny_scenario import TINY, Build

from flower_privdec.cli import main
from flower_privdec.common.files import FolderLock
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.recorder import keep_metrics_until, read_metrics
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.scenario import parse_scenario

OPEN, PRIVATE = ["privacy=none"], ["privacy.epsilon=3"]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the curves at a run's end, which look at nothing that is damaged here."""
    monkeypatch.setattr("flower_privdec.reporting.plots.save_run_plots", lambda folder: [])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of which 4 of 6 rounds are done."""
    out = tmp_path_factory.mktemp("half") / "run"
    under_way = Run(Experiment.build(parse_scenario(TINY)), out)
    under_way.advance()
    under_way.advance()
    under_way.close()
    return out


@pytest.fixture
def half(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that folder, beside its scenario s.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(TINY)
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def finished(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of that run, gone on with to its end."""
    out = tmp_path_factory.mktemp("done") / "run"
    shutil.copytree(kept, out)
    run(Experiment.build(parse_scenario(TINY)), out, resume=True)
    return out


@pytest.fixture
def done(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that folder, beside its scenario s.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(TINY)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    """Return the one line with which a command is refused."""
    assert privdec(*arguments) == status
    said = "".join(capsys.readouterr().err.splitlines(keepends=True)[-1:] if status == 1 else capsys.readouterr().err)
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    return said


# --- two at once ---


@pytest.mark.parametrize("privacy", [OPEN, PRIVATE], ids=["open", "private"])
@pytest.mark.parametrize("flag", [[], ["--resume"]], ids=["anew", "resume"])
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(
    tmp_path: Path,
    tiny_text: str,
    build: Build,
    capsys: pytest.CaptureFixture[str],
    privacy: list[str],
    flag: list[str],
) -> None:
    (tmp_path / "s.yaml").write_text(tiny_text)
    out = tmp_path / "run"
    first = Run(build(*privacy), out)
    first.advance()
    before = files(out)
    setting = ["--set", privacy[0]]
    said = refused(capsys, "run", tmp_path / "s.yaml", "--out", out, *setting, *flag)
    assert "another run writes to it (process" in said
    assert files(out) == before
    first.advance()
    first.close()
    assert privdec("run", tmp_path / "s.yaml", "--out", out, *setting, "--resume") == 0


def test_two_that_begin_together_do_not_both_write(tmp_path: Path, build: Build) -> None:
    one, other = (Run.__new__(Run) for _ in range(2))
    lock = FolderLock(tmp_path / "run")
    lock.take()
    with raises(main.ScenarioError, "run.in-use"):
        other.__init__(build(*OPEN), tmp_path / "run")  # type: ignore[misc]
    lock.release()
    one.__init__(build(*OPEN), tmp_path / "run")  # type: ignore[misc]
    one.close()
    with raises(main.ScenarioError, "run.folder-taken"):
        Run(build(*OPEN), tmp_path / "run")


def test_a_folder_that_changes_between_look_and_lock_is_refused(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = FolderLock.take

    def late(lock: FolderLock) -> None:
        monkeypatch.setattr(FolderLock, "take", taken)
        run(build(*OPEN), tmp_path / "run")
        taken(lock)

    monkeypatch.setattr(FolderLock, "take", late)
    with raises(main.ScenarioError, "run.folder-changed"):
        run(build(*OPEN), tmp_path / "run")


def test_the_lock_dies_with_its_process(tmp_path: Path, build: Build) -> None:
    program = (
        "import os, sys; from pathlib import Path; from flower_privdec.common.files import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); lock.take(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False, timeout=500)
    assert (tmp_path / "run" / ".lock").exists()
    assert run(build(*OPEN), tmp_path / "run")["rounds"] == 6


# --- metrics.jsonl ---


def test_a_half_written_line_costs_nothing(half: Path, build: Build, tmp_path: Path) -> None:
    whole = run(build(), tmp_path / "whole")
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "accur')
    assert [record["round"] for record in read_result(half).metrics] == [2, 4]
    resumed = run(build(), half, resume=True)
    assert [record["round"] for record in read_metrics(half)] == [2, 4, 6]
    assert resumed["accuracy"] == whole["accuracy"]
    assert resumed["loss"] == whole["loss"]


@pytest.mark.parametrize("content", [None, b"", b"\x00\xff", b'{"round": 6'])
def test_a_run_whose_last_evaluation_was_lost_is_evaluated_again(
    half: Path, build: Build, tmp_path: Path, content: bytes | None
) -> None:
    whole = run(build(), tmp_path / "whole")
    finished = Run(build(), half, resume=True)
    finished.advance()
    finished.close()
    (half / "metrics.jsonl").unlink()
    if content is not None:
        (half / "metrics.jsonl").write_bytes(content)
    resumed = run(build(), half, resume=True)
    assert resumed["accuracy"] == whole["accuracy"]
    assert [record["round"] for record in read_metrics(half)] == [6]


LINE = {"round": 1, "accuracy": {}, "loss": {}, "consensus_distance": 1.0, "epsilon": 1.0, "seconds": 0.1}
ODD = [
    json.dumps(LINE | {name: value}).encode()
    for name, value in {
        "round": 4,
        "accuracy": "x",
        "loss": 3,
        "epsilon": None,
        "seconds": [],
        "consensus_distance": {},
    }.items()
]


@pytest.mark.parametrize(
    "line", [b"nonsense", b"3", b"[]", b'{"round": "2"}', b"{}", b"\xff\xfe", b"[" * 100_000, *ODD]
)
def test_a_damaged_line_is_named_and_nothing_is_touched(
    half: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    path = half / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    before = files(half)
    for command in (["run", "s.yaml", "--out", half, "--resume"], ["report", half]):
        said = refused(capsys, *command)  # a round that comes too early is found at the line after it
        assert re.search(r"metrics\.jsonl:[12]: is no record of an evaluation", said)
    assert files(half) == before
    with pytest.raises(main.ScenarioError):
        keep_metrics_until(half, 2)
    path.write_bytes(path.read_bytes()[len(line) + 1 :])
    assert privdec("run", "s.yaml", "--out", half, "--resume") == 0


# --- summary.json ---


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", "other"), ("algorithm", "sgp"), ("n_peers", None), ("rounds", "6"), ("accuracy", 3), ("loss", "x")]
    + [("privacy", value) for value in (None, 3, "x", [3], [{"epsilon": 1}])],
)
def test_a_summary_of_something_else_is_one_line(
    done: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
) -> None:
    summary = json.loads((done / "summary.json").read_bytes())
    (done / "summary.json").write_text(json.dumps(summary | {name: value}))
    said = refused(capsys, "report", done, "--out", done / "page.html")
    assert f"summary.json: is damaged (ValueError: its {name} is {value!r}" in said


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"{}", b'{"name": "x"}', b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_summary_is_one_line_and_is_written_again(
    done: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    whole = (done / "summary.json").read_bytes()
    (done / "summary.json").write_bytes(content)
    said = refused(capsys, "report", done, "--out", done / "page.html")
    assert "summary.json: is damaged" in said
    assert "--resume` writes it again" in said
    assert not (done / "page.html").exists()
    assert privdec("run", "s.yaml", "--out", done, "--resume") == 0
    assert json.loads((done / "summary.json").read_bytes())["privacy"] == json.loads(whole)["privacy"]


# --- checkpoint ---


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write a checkpoint again with other facts or tensors."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["privdec"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(facts, tensors)
    path.write_bytes(save(tensors, {"privdec": json.dumps(facts)}))


KEYS = ("scenario", "run", "seconds", "head", "transport", "round_index", "at", "peers", "edges", "tensors")
SWAPS: dict[str, dict[str, Any]] = {
    "a negative round": {"round_index": -1},
    "a round without end": {"round_index": 10**30},
    "a round after the last": {"round_index": 7},
    "half a round": {"round_index": 2.5},
    "no number": {"round_index": "4"},
    "truth": {"round_index": True},
    "a place before the first": {"at": -1},
    "foreign peers": {"peers": [0, 1, 2, 9]},
    "fewer peers": {"peers": [0, 1]},
    "peers in disorder": {"peers": [1, 0, 2, 3]},
    "a peer twice": {"peers": [0, 0, 1, 2]},
    "peers that are words": {"peers": ["a", "b", "c", "d"]},
    "no peers": {"peers": []},
    "time that ran backwards": {"seconds": -1},
    "time without end": {"seconds": float("inf")},
    "a run without a name": {"run": {"id": "x"}},
    "a run that is a list": {"run": [1]},
    "a head that is none": {"head": [1]},
    "a head of words": {"head": ["a", "b"]},
    "counters that are words": {"transport": {"sent": "x"}},
    "edges of nobody": {"edges": {"table": [[0], [1]]}},
    "edges that are none": {"edges": 3},
}


@pytest.mark.parametrize("key", KEYS)
def test_a_checkpoint_without_a_key_is_refused(half: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    changed(half / "checkpoint", lambda facts, _: facts.pop(key))
    before = files(half)
    said = refused(capsys, "run", "s.yaml", "--out", half, "--resume")
    assert "checkpoint: " in said
    assert "another --out" in said
    assert files(half) == before


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_a_checkpoint_with_an_impossible_fact_is_refused(
    half: Path, capsys: pytest.CaptureFixture[str], swap: dict[str, Any]
) -> None:
    changed(half / "checkpoint", lambda facts, _: facts.update(swap))
    before = files(half)
    said = refused(capsys, "run", "s.yaml", "--out", half, "--resume")
    assert "checkpoint: " in said
    assert "another --out" in said
    assert files(half) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda _, tensors: tensors.pop("w"),
        lambda _, tensors: tensors.update(x=tensors["x"][:2].clone()),
        lambda _, tensors: tensors.update(x=tensors["x"].float()),
        lambda _, tensors: tensors.update(more=tensors["x"].clone()),
        lambda facts, tensors: (tensors.clear(), facts.update(tensors={})),
    ],
    ids=["a row less", "fewer rows", "another type", "a row more", "nothing"],
)
def test_a_checkpoint_with_other_tensors_is_refused(
    half: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    changed(half / "checkpoint", change)
    said = refused(capsys, "run", "s.yaml", "--out", half, "--resume")
    assert "checkpoint: " in said


@pytest.mark.parametrize("keep", [0, 1, 8, 100, -1])
def test_a_checkpoint_cut_short_is_refused(half: Path, capsys: pytest.CaptureFixture[str], keep: int) -> None:
    path = half / "checkpoint"
    path.write_bytes(path.read_bytes()[:keep])
    assert "cannot be read as a checkpoint" in refused(capsys, "run", "s.yaml", "--out", half, "--resume")


def test_a_checkpoint_that_is_whole_reads_back(half: Path) -> None:
    state = read_checkpoint(half / "checkpoint").state
    assert (state.round_index, state.peers.tolist()) == (4, [0, 1, 2, 3])


# --- the disk ---


@pytest.mark.parametrize("name", ["checkpoint", "metrics.jsonl", "summary.json", "model.safetensors"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_what_was_kept(
    half: Path,
    build: Build,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    whole = run(build(), tmp_path / "whole")
    opened = Path.open

    def full(path: Path, mode: str = "r", *more: Any, **given: Any) -> Any:
        if path.name.startswith(name) and ("w" in mode or "a" in mode):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, *more, **given)

    opened_by_system = os.open

    def full_by_system(path: Any, flags: int, *more: Any, **given: Any) -> int:
        if Path(path).name.startswith(name) and flags & os.O_WRONLY:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened_by_system(path, flags, *more, **given)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        patched.setattr(os, "open", full_by_system)
        said = refused(capsys, "run", "s.yaml", "--out", half, "--resume", status=1)
    assert "No space left on device" in said
    assert "make room" in said
    assert not list(half.glob("*.part"))
    assert privdec("run", "s.yaml", "--out", half, "--resume") == 0
    assert json.loads((half / "summary.json").read_text())["accuracy"] == whole["accuracy"]


def test_a_disk_that_is_full_before_the_first_checkpoint_leaves_nothing_to_resume_and_says_so(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_text: str
) -> None:
    (tmp_path / "s.yaml").write_text(tiny_text)
    monkeypatch.chdir(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("flower_privdec.experiment.recorder.save_checkpoint", full)
        said = refused(capsys, "run", "s.yaml", status=1)
    assert said.endswith("make room, then run the same command again\n")
    assert privdec("run", "s.yaml") == 0


@pytest.mark.parametrize("place", ["file", "under a file"])
def test_a_folder_that_cannot_be_made_is_one_line(
    half: Path, capsys: pytest.CaptureFixture[str], place: str, tmp_path: Path
) -> None:
    out = tmp_path / "s.yaml" if place == "file" else tmp_path / "s.yaml" / "run"
    for privacy in (OPEN, PRIVATE):
        said = refused(capsys, "run", "s.yaml", "--out", out, "--set", privacy[0])
        assert "s.yaml" in said
