"""Large shares lie on disk once each, beside the checkpoints that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asynchronous_network import FOLDERS, POINTS, QUICK, STILL, again, check_mass, initial
from networked import LONG, Killed, devices, finish, mortal, running
from safetensors import safe_open
from share_machines import commit, shake
from tiny_scenario import Tiny

from flower_privdec.errors import ScenarioError
from flower_privdec.network.peer import peer as peer_module
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.peer import ShareFiles
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.frames import TensorArithmetic, pack


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "LARGE", 1)


def kept_beside(checkpoint: Path) -> dict[str, list[str]]:
    with safe_open(checkpoint, framework="pt") as file:
        found: dict[str, list[str]] = json.loads(file.metadata()["privdec"])["beside"]
        assert not found.keys() & set(file.keys())
    return found


def test_each_is_written_once_and_removed_when_no_checkpoint_holds_it(tmp_path: Path) -> None:
    old, new = ({"x": torch.randn(9), "w": torch.tensor(0.5)} for _ in range(2))
    files = ShareFiles(tmp_path)
    for tensors in (old, old, {f"old.{name}": each for name, each in old.items()} | new, new, {}):
        before = set(tmp_path.iterdir())
        files.write(tensors)
        assert len(set(tmp_path.iterdir()) - before) == (tensors is old and not before) + ("old.x" in tensors)
        for each in tensors.values():
            file, name = files.place(each) or ("", "")
            with safe_open(tmp_path / file, framework="pt") as opened:
                torch.testing.assert_close(opened.get_tensor(name).reshape(each.shape), each, rtol=0, atol=0)
        files.remove_unused()
    assert not list(tmp_path.iterdir())


def test_what_a_crash_left_beside_a_checkpoint_goes_with_the_next_one(tmp_path: Path) -> None:
    ShareFiles(tmp_path).write({"x": torch.ones(3)})
    (tmp_path / "rows-3.safetensors").write_bytes(b"handed in")
    files = ShareFiles(tmp_path)
    files.write({})
    files.remove_unused()
    assert [path.name for path in tmp_path.iterdir()] == ["rows-3.safetensors"]


@pytest.mark.parametrize("graph", ["directed-exponential", "ring"])
@pytest.mark.parametrize(
    "point", ["before a commit", "after a commit, before it says so", "after it took its shares from itself"]
)
def test_whoever_dies_goes_on_and_no_mass_is_lost(graph: str, point: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, QUICK, f"topology.name={graph}", "rounds=6", "privacy=none")
    theirs = devices(scenario, tmp_path, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS[point], 3)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        finish(again(scenario, theirs[1]))
        for peer in (0, 2, 3):
            futures[peer].result(LONG)
    check_mass(tmp_path, initial(scenario))
    for name in FOLDERS:
        beside = kept_beside(tmp_path / name / "checkpoint-0")
        files = {path.name for path in (tmp_path / name).glob("share-*")}
        assert files == {file for file, _ in beside.values()}


@pytest.mark.parametrize(("weight", "start", "same"), [(0.5, 1.7, True), (0.25, 1.7, False), (0.5, -0.0, False)])
def test_half_of_a_mass_is_its_share_which_is_written_once(
    weight: float, start: float, same: bool, tmp_path: Path
) -> None:
    a, b = (PushSumProtocol(i, [0, 1], 5 + i, {"x": torch.full((4,), start)}, TensorArithmetic()) for i in range(2))
    commit(a, b)
    shake(a, b)
    a.split(0, {1: weight})
    durable, files = a.snapshot(1), ShareFiles(tmp_path)
    files.write(pack(durable)[1])
    assert (files.place(durable.mass["x"]) is not None) == same
    before = durable.mass["x"].clone()
    a.mass["x"].add_(1)
    assert torch.equal(durable.mass["x"], before)


@pytest.mark.parametrize("spoiled", ["missing", "cut", "elsewhere"])
def test_a_checkpoint_whose_shares_are_not_there_is_refused(spoiled: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, QUICK, "topology.name=directed-ring", "rounds=50", "privacy=none")
    theirs = devices(scenario, tmp_path, memory=True)
    peers, folder = [running_peer(scenario, device) for device in theirs], tmp_path / FOLDERS[1]
    commits = peers[1]._commit  # type: ignore[attr-defined]

    def dying(*arguments: Any) -> None:
        commits(*arguments)
        if kept_beside(folder / "checkpoint-0"):
            raise Killed

    peers[1]._commit = dying  # type: ignore[attr-defined]
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        for peer in (0, 2, 3):
            peers[peer].stop()
    file = folder / next(iter(kept_beside(folder / "checkpoint-0").values()))[0]
    content = file.read_bytes()
    if spoiled == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    if spoiled == "elsewhere":
        name = "../" + file.name[3:]
        (folder / name).write_bytes(content)
        checkpoint = folder / "checkpoint-0"
        checkpoint.write_bytes(checkpoint.read_bytes().replace(file.name.encode(), name.encode()))
    before = (folder / "checkpoint-0").read_bytes()
    with pytest.raises(ScenarioError, match=r"checkpoint-0: cannot be read as a checkpoint .*; restore it from a copy"):
        running_peer(scenario, theirs[1])
    assert (folder / "checkpoint-0").read_bytes() == before
