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

import numpy as np
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
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.scenario import parse_scenario, to_yaml

OPEN, PRIVATE = ["privacy=none"], ["privacy.epsilon=3"]


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
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs of 6 rounds that were stopped after 4: `stopped`, and `other` at another seed."""
    place = tmp_path_factory.mktemp("stopped")
    for name, seed in (("stopped", 3), ("other", 4)):
        scenario = parse_scenario(TINY, overrides=[f"seed={seed}"])
        run(Experiment.build(scenario), place / name, on_metrics=lambda metrics: metrics["round"] == 4)
    return place


@pytest.fixture
def stopped(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the first of them, beside the other one and their scenario s.yaml."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    (tmp_path / "s.yaml").write_text(TINY)
    return tmp_path / "stopped"


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
def test_a_second_run_in_a_live_folder_is_refused(
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


def test_a_folder_changed_before_its_lock_is_refused(
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


# --- every file, however it is damaged ---


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def without_a_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def a_line_twice(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))


def without_its_last_round(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def a_number_edited(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "UTF-16": lambda path: path.write_bytes(path.read_bytes().decode("latin-1").encode("utf-16")),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: cut(path, 0.6),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "without its first line": without_a_line,
    "without its last line": without_its_last_round,
    "its last line twice": a_line_twice,
    "a number edited": a_number_edited,
    "a folder": in_its_place,
    "missing": Path.unlink,
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "another run's": lambda path: shutil.copy(str(path).replace("/run/", "/other/"), path),
}
DAMAGED = (
    "checkpoint",
    "scenario.yaml",
    "metrics.jsonl",
    "ledger/digits.jsonl",
    "summary.json",
    "model.safetensors",
    "origin.json",
)


def outcome(folder: Path) -> tuple[Any, ...]:
    """Return what a finished run's folder says, but for times."""
    summary = json.loads((folder / "summary.json").read_text())
    kept = {key: value for key, value in summary.items() if key not in ("wall_seconds", "peer_steps_per_second")}
    lines = [{**record, "seconds": 0} for record in read_metrics(folder)]
    return kept, lines, (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_file_is_refused_first_or_harmless(
    stopped: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """A run that was stopped goes on to the end that it has undamaged, or says in one line why it does not."""
    whole = None
    for name, damage in {"none": lambda path: None, **DAMAGES}.items():
        out = stopped.with_name("run")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stopped, out)
        damage(out / file)
        before = files(out)
        capsys.readouterr()
        status = privdec("run", "s.yaml", "--out", out, "--resume")
        said = capsys.readouterr().err
        if status == 0:
            whole = whole or outcome(out)
            summary, lines, model = outcome(out)
            if (file, name) == ("metrics.jsonl", "missing"):  # what users do who go on without it
                lines = [*whole[1][:2], *lines]
            assert (summary, lines, model) == whole, name
        else:
            assert name != "none"
            assert said.startswith("error: "), name
            assert said.count("\n") == 1, name
            after = files(out)
            if file == "ledger/digits.jsonl":  # a line that is not whole goes, as ever: no step had begun on it
                ledger = str(out / file)
                assert before.get(ledger, b"").startswith(after.get(ledger, b"")), name
                after |= {ledger: before[ledger]} if ledger in before else {}
            assert after == before, name


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


def test_a_run_without_its_metrics_is_evaluated_again(half: Path, build: Build, tmp_path: Path) -> None:
    whole = run(build(), tmp_path / "whole")
    finished = Run(build(), half, resume=True)
    finished.advance()
    finished.close()
    (half / "metrics.jsonl").unlink()
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
    said = refused(capsys, "run", "s.yaml", "--out", half, "--resume")
    assert "metrics.jsonl: is not as the last checkpoint left it" in said
    said = refused(capsys, "report", half)  # a round that comes too early is found at the line after it
    assert re.search(r"metrics\.jsonl:[12]: is not a record of an evaluation", said)
    assert files(half) == before
    path.write_bytes(path.read_bytes()[len(line) + 1 :])
    assert privdec("run", "s.yaml", "--out", half, "--resume") == 0


# --- the data ---


@pytest.mark.parametrize("privacy", [OPEN, PRIVATE], ids=["open", "private"])
@pytest.mark.parametrize("edited", ["examples", "labels", "test set"])
def test_a_run_does_not_go_on_with_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, privacy: list[str], edited: str
) -> None:
    monkeypatch.chdir(tmp_path)
    halves = {}
    for half in ("train", "test"):
        halves[half] = {
            f"x_{half}": np.arange(240, dtype=np.float32).reshape(60, 4) % 7,
            f"y_{half}": np.arange(60) % 2,
        }
        np.savez(f"{half}.npz", **halves[half])
    data = "{dataset: npz, root: train.npz, test: test.npz, batch: {sampling: poisson, size: 5}}"
    scenario = parse_scenario(TINY, overrides=[f"data={data}", *privacy])
    Run(Experiment.build(scenario), tmp_path / "run").close()
    (tmp_path / "s.yaml").write_text(to_yaml(scenario))
    half, name = {"examples": ("train", "x"), "labels": ("train", "y"), "test set": ("test", "x")}[edited]
    halves[half][f"{name}_{half}"][0] += 1
    np.savez(f"{half}.npz", **halves[half])
    before = files(tmp_path)
    said = refused(capsys, "run", "s.yaml", "--out", "run", "--resume")
    assert "was made with other data" in said
    assert files(tmp_path) == before


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
def test_a_damaged_summary_is_reported_and_rewritten(
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


KEYS = ("scenario", "run", "seconds", "head", "metrics", "transport", "round_index", "at", "peers", "edges", "tensors")
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
def test_a_full_disk_is_one_line_and_resumable(
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


def test_a_disk_full_before_the_first_checkpoint_leaves_nothing(
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
