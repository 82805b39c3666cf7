"""A peer's checkpoints in one file: whole wherever a write is cut off, and each tensor once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from asynchronous_network import QUICK, again
from networked import LONG, Killed, devices, go_on, running
from share_machines import commit, shake
from tiny_scenario import Tiny

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import checkpoint as checkpoint_module
from flower_privdec.experiment.checkpoint import (
    CARRIED,
    PAGE,
    ROOTS,
    Checkpoint,
    CheckpointLog,
    described,
    page_check,
    read_checkpoints,
)
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.privacy.ledger.charges import RunName
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.frames import TensorArithmetic, pack
from tools.mass_on_disk import mass_on_disk

CPU, SECTOR = torch.device("cpu"), 512
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


def torn(durable: bytes, now: bytes, random: Random) -> bytes:
    """Return what a disk may hold of a file whose sectors were partly written since its last sync."""
    durable = durable.ljust(len(now), b"\0")
    share = random.choice([0.1, 0.5, 0.9, 1.0])
    return b"".join(
        (now if random.random() < share else durable)[at : at + SECTOR] for at in range(0, len(now), SECTOR)
    )


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

        monkeypatch.setattr(checkpoint_module.os, name, counted)

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


# --- peers ---


class StoppingDisk:
    """Stops one peer's machine at a write or sync, and leaves on its disk a part of what was not synced.

    Args:
        folder: of the peer.
        stop_at: the number of the call at which the machine stops, from 1.
        random: decides what is on the disk.
    """

    CALLS = ("write", "pwrite", "fsync", "fdatasync", "posix_fallocate")

    def __init__(self, folder: Path, stop_at: int, random: Random) -> None:
        self._folder, self._left, self._random = f"{folder}/", stop_at, random
        self._durable: dict[Path, bytes] = {}
        self.has_stopped = self.is_off = False

    @contextmanager
    def patched(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Watch the calls of this process."""
        with patch.context() as context:
            for name in self.CALLS:
                context.setattr(os, name, self._watched(name, getattr(os, name)))
            yield

    def _watched(self, name: str, call: Any) -> Any:
        def watched(file: Any, *arguments: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{file}")) if isinstance(file, int) else Path()
            is_counted = path.name.startswith(CHECKPOINTS) or path.suffix == ".jsonl"
            if not (str(path).startswith(self._folder) and is_counted):
                return call(file, *arguments)
            self._left -= 1
            if self._left == 0:
                self.has_stopped = self.is_off = True
            if self.is_off:
                raise Killed
            self._durable.setdefault(path, path.read_bytes())
            done = call(file, *arguments)
            if name in ("fsync", "fdatasync"):
                self._durable[path] = path.read_bytes()
            return done

        return watched

    def lose(self) -> None:
        """Leave on the disk what a machine may leave that stopped."""
        for path, durable in self._durable.items():
            if not path.exists():  # it was renamed, synced
                continue
            now = path.read_bytes()
            if path.suffix == ".jsonl":
                path.write_bytes(now[: self._random.randint(len(durable), len(now))])
            else:
                path.write_bytes(torn(durable, now, self._random))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
@pytest.mark.parametrize("first", range(4))
def test_a_peer_stopped_at_any_write_continues(
    mode: str, first: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write and sync of checkpoints and ledger once: no mass is lost, each step is paid, and one more at most."""
    taken, release = list[int](), Cohort.add_noise_  # which follows the charge

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        taken.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "add_noise_", counting)
    stop_at = first + 1
    while True:
        folder = tmp_path / str(stop_at)
        scenario = tiny("algorithm.name=privsgp", "n_peers=2", "rounds=3", QUICK, f"network.mode={mode}")
        theirs = devices(scenario, folder, insecure_seeds=False, memory=(mode, first) != ("synchronous", 0))
        disk = StoppingDisk(theirs[1].folder, stop_at, Random(stop_at))
        taken.clear()
        with disk.patched(monkeypatch):
            peers = [running_peer(scenario, device) for device in theirs]
            with running(peers) as futures:
                try:
                    futures[1].result(LONG)
                except Killed:
                    disk.lose()
                    disk.is_off = False
                    go_on(again(scenario, theirs[1]), futures[:1])
        (ledger,) = (theirs[1].folder / "ledger").glob("*.jsonl")
        paid = sum(entry.to_step - entry.from_step for entry in read_chain(ledger)[1])
        assert taken.count(1) <= paid <= taken.count(1) + disk.has_stopped, stop_at
        if mode == "asynchronous":
            total = mass_on_disk([device.folder for device in theirs], ["w"])["w"]
            assert float(total) == pytest.approx(2.0, rel=1e-12), stop_at
        if not disk.has_stopped:
            return
        stop_at += 4
