"""A peer's records in one file: whole wherever a write is cut off, and each array once."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from share_machines import commit, shake
from torn_disk import torn

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core import State
from flower_privdec.experiment.checkpoint import CARRIED, Checkpoint, described
from flower_privdec.peer import record_log
from flower_privdec.peer.app_state import PeerState, load_state, save_state, state_path
from flower_privdec.peer.record_log import PAGE, ROOTS, RecordLog, page_check
from flower_privdec.peer.store import CheckpointLog, read_checkpoints
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.frames import TensorArithmetic, pack

CPU = torch.device("cpu")
RUN = RunName("run", "scenario", "environment")


class MachineStopped(BaseException):
    """The machine stops."""


def checkpoint(number: int, **carried: torch.Tensor) -> Checkpoint:
    """Return a checkpoint with a row of some pages and two small ones."""
    rows = {
        "x": torch.randn(1, 3000 + 500 * (number % 3)),
        "w": torch.tensor([float(number)]),
        "small": torch.randn(1, 900),
    }
    return Checkpoint(State(np.array([3]), number, 0, rows), "hash", RUN, transport={"place": number}, carried=carried)


def contents(held: Checkpoint) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    facts, tensors = described(held)
    return facts, {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is written, as it is."""
    sizes, write = list[int](), os.pwrite

    def counting(file: int, content: memoryview, at: int) -> int:
        sizes.append(len(content))
        return write(file, content, at)

    monkeypatch.setattr(os, "pwrite", counting)
    return sizes


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_after_any_stop_a_whole_checkpoint_is_left(
    kept: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that writes or syncs is the last one once, and any part of what was not synced is on the disk."""
    random, path, calls = Random(seed), tmp_path / "file", {"left": -1}
    share = torch.randn(4000)
    durable = [b""]

    def stopping(name: str) -> None:
        call = getattr(os, name)

        def counted(*arguments: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise MachineStopped
            done = call(*arguments)
            if name == "fdatasync":
                durable[0] = path.read_bytes() if path.exists() else b""
            return done

        monkeypatch.setattr(record_log.os, name, counted)

    for name in ("pwrite", "posix_fallocate", "fdatasync"):
        stopping(name)
    log, number, stops = CheckpointLog(path, kept), 1, 0
    log.write(checkpoint(1))
    durable[0] = path.read_bytes()  # it was synced by another name
    committed = [contents(read_checkpoints(path)[-1])]
    while stops < 40:
        number += 1
        new = (
            checkpoint(number, share=share)
            if random.random() < 0.5
            else checkpoint(number, share=share, other=torch.ones(2000))
        )
        calls["left"] = random.randint(1, 9)
        try:
            log.write(new)
        except MachineStopped:
            log.close()
            path.write_bytes(torn(durable[0], path.read_bytes(), random))
            log, stops = CheckpointLog(path, kept), stops + 1
            calls["left"] = -1
            read = [contents(held) for held in log.read(CPU)]
            if read[-1] == contents(new):
                committed.append(read[-1])
            assert read == committed[-kept:]
        else:
            committed.append(contents(new))
            assert [contents(held) for held in read_checkpoints(path)][-kept:] == committed[-kept:]
    log.close()


def test_checkpoints_are_synced_once_and_their_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = list[str]()

    def counted(name: str, call: Any) -> Any:
        return lambda *arguments: (syncs.append(name), call(*arguments))[1]

    for name in ("fsync", "fdatasync", "replace", "rename"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    log = CheckpointLog(tmp_path / "file", 1)
    log.write(checkpoint(1))
    assert syncs.count("fdatasync") == 1
    syncs.clear()
    for number in range(2, 9):
        log.write(checkpoint(number))
    assert syncs == ["fdatasync"] * 7
    size = (tmp_path / "file").stat().st_size
    assert size <= ROOTS * PAGE + 2 * (4 * 4000 + 2 * PAGE)  # this checkpoint's place and the last one's
    log.close()


def test_a_tensor_that_stays_is_written_once(written: list[int], tmp_path: Path) -> None:
    log, share = CheckpointLog(tmp_path / "file", 1), torch.randn(9000)
    for number in range(1, 6):
        log.write(checkpoint(number, share=share, same=share))
        assert (written.count(share.nbytes)) == 1
    log.write(checkpoint(6))
    log.write(checkpoint(7, share=share))  # no checkpoint held it in between
    assert written.count(share.nbytes) == 2
    assert contents(log.read(CPU)[-1])[1][CARRIED + "share"] == share.tolist()
    log.close()


@pytest.mark.parametrize(("weight", "start", "same"), [(0.5, 1.7, True), (0.25, 1.7, False), (0.5, -0.0, False)])
def test_half_of_a_mass_is_written_once_as_share(
    weight: float, start: float, same: bool, written: list[int], tmp_path: Path
) -> None:
    a, b = (PushSumProtocol(i, [0, 1], 5 + i, {"x": torch.full((4000,), start)}, TensorArithmetic()) for i in range(2))
    commit(a, b)
    shake(a, b)
    a.split(0, {1: weight})
    durable = a.snapshot(1)
    facts, carried = pack(durable)
    state = State(np.array([0]), 1, 0, {"x": durable.mass["x"][None]})
    log = CheckpointLog(tmp_path / "file", 1)
    log.write(Checkpoint(state, "hash", RUN, transport={"shares": facts, "place": 1}, carried=carried))
    assert written.count(16000) == (1 if same else 2)
    before = durable.mass["x"].clone()
    a.mass["x"].add_(1)
    assert torch.equal(durable.mass["x"], before)
    log.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fdatasync"])
def test_a_failing_disk_is_named_and_a_checkpoint_survives(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CheckpointLog(tmp_path / "file", 1)
    log.write(checkpoint(1))
    whole = contents(read_checkpoints(tmp_path / "file")[-1])

    def failing(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(OSError, match=str(tmp_path)):
            log.write(checkpoint(2))
    log.close()
    if call != "fdatasync":  # else the next one may be whole too
        assert contents(read_checkpoints(tmp_path / "file")[-1]) == whole
    else:
        assert read_checkpoints(tmp_path / "file")[0].transport["place"] == 1


@pytest.mark.parametrize("content", [b"", b"\0" * 3 * PAGE, b"nonsense" * PAGE])
def test_a_file_without_a_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ScenarioError) as refused:
        CheckpointLog(tmp_path / "file", 1).read(CPU)
    assert refused.value.code == "checkpoints.damaged"
    assert "\n" not in str(refused.value)
    assert (tmp_path / "file").read_bytes() == content


def test_a_byte_that_changed_anywhere_is_noticed(tmp_path: Path) -> None:
    log = CheckpointLog(tmp_path / "file", 1)
    log.write(checkpoint(1))
    log.close()
    whole, before = (tmp_path / "file").read_bytes(), contents(read_checkpoints(tmp_path / "file")[0])
    for at in [*range(PAGE, PAGE + 40, 7), *range(ROOTS * PAGE, len(whole), 997)]:
        (tmp_path / "file").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert contents(read_checkpoints(tmp_path / "file")[0]) == before  # between the parts
        except ScenarioError:
            assert at < PAGE + 40 or whole[at - 8 : at + 8].strip(b"\0")


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_the_page_check_finds_an_unwritten_page(size: int) -> None:
    content = np.random.default_rng(1).bytes(size)
    for page in range(-(-size // PAGE)):
        other = bytearray(content)
        other[page * PAGE : (page + 1) * PAGE] = bytes(len(content[page * PAGE : (page + 1) * PAGE]))
        assert page_check(memoryview(bytes(other))) != page_check(memoryview(content))


# --- relayed peers' states, in the same kind of file ---


def relayed(folder: Path, size: int = 2000) -> tuple[RecordLog, PeerState]:
    """Return a relayed peer's state with a model of some pages, and the log that it is saved to."""
    arrays = {"x": np.arange(1.0, size + 1), "steps": np.array([3])}
    state = PeerState.begun("run", 0, arrays, founding=True, incarnation=5)
    return RecordLog(state_path(folder, "run"), 1), state


def moved(state: PeerState) -> None:
    """Move a state by a round, in which it sends half of its mass."""
    state.shares.introduce(1, 7)
    state.round_index += 1
    state.x = state.x + 1.0
    state.shares.split(state.round_index, {1: 0.5})


def summary(state: PeerState | None) -> Any:
    assert state is not None
    edge = state.shares.edges.get(1)
    shares = [] if edge is None else [(share.number, share.values["x"].tolist()) for share in edge.frozen]
    return state.round_index, state.x.tolist(), state.w, shares, state.unmixed["steps"].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_after_any_stop_a_relayed_state_is_whole(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that may have left is in the state; the stop loses only a save that did not return."""
    random, calls = Random(seed), {"left": -1}
    log, state = relayed(tmp_path)
    path = state_path(tmp_path, "run")
    durable = [b""]

    def counted(name: str, call: Any) -> Any:
        def stopping(*arguments: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise MachineStopped
            done = call(*arguments)
            if name == "fdatasync":
                durable[0] = path.read_bytes()
            return done

        return stopping

    save_state(log, state)
    durable[0] = path.read_bytes()
    for name in ("pwrite", "posix_fallocate", "fdatasync"):
        monkeypatch.setattr(record_log.os, name, counted(name, getattr(os, name)))

    saved = load_state(path)
    for _ in range(30):
        assert saved is not None
        before = summary(saved.state)
        state = saved.taken(as_read=False)
        moved(state)
        calls["left"] = random.randint(1, 6)
        try:
            saved = save_state(saved.log, state)
            wanted = [summary(saved.state)]
        except MachineStopped:
            saved.log.close()
            path.write_bytes(torn(durable[0], path.read_bytes(), random))
            # All of it may have reached the disk.
            wanted = [before, summary(state)]
        calls["left"] = -1
        again = load_state(path)
        assert summary(again and again.state) in wanted
        saved = again


def test_a_byte_that_changed_in_a_state_is_noticed(tmp_path: Path) -> None:
    log, state = relayed(tmp_path)
    path = state_path(tmp_path, "run")
    states = []
    for _ in range(2):
        moved(state)
        states.append(summary(save_state(log, state).state))
    whole = path.read_bytes()
    for at in range(ROOTS * PAGE, len(whole), 499):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with suppress(RunError):
            saved = load_state(path)
            assert saved is not None
            assert summary(saved.state) in states
    path.write_bytes(whole[: ROOTS * PAGE])
    with raises(RunError, "app.damaged-state"):
        load_state(path)
    path.write_bytes(whole)
    saved = load_state(path)
    assert saved is not None
    assert summary(saved.state) == states[-1]


def test_a_relayed_state_is_saved_by_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, state = relayed(tmp_path)
    save_state(log, state)
    syncs = list[str]()

    def counted(name: str, call: Any) -> Any:
        return lambda *arguments: (syncs.append(name), call(*arguments))[1]

    for name in ("fsync", "fdatasync", "replace", "rename"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    moved(state)
    save_state(log, state)
    assert syncs == ["fdatasync"]
    save_state(log, state, durable=False)
    assert syncs == ["fdatasync"]


def test_a_failed_first_record_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is not written to the file that was removed."""
    log, state = relayed(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="run-"):
            save_state(log, state)
    assert not list(tmp_path.iterdir())
    save_state(log, state)
    saved = load_state(state_path(tmp_path, "run"))
    assert saved is not None
    assert summary(saved.state) == summary(state)


def test_a_log_whose_file_was_removed_begins_another(tmp_path: Path) -> None:
    log, state = relayed(tmp_path)
    save_state(log, state)
    state_path(tmp_path, "run").unlink()
    moved(state)
    save_state(log, state)
    saved = load_state(state_path(tmp_path, "run"))
    assert saved is not None
    assert summary(saved.state) == summary(state)
