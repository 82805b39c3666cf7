"""Networked peers whose disk is full or whose data are another's, and that die between two commits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import privdec
from networked import LONG, Killed, devices, go_on, mortal, running, running_peer, wait_until
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.common.exit_codes import FAILED, FINISHED
from flower_privdec.core import Exchange, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Experiment
from flower_privdec.network.local.peer_processes import PRIVDEC
from flower_privdec.privacy.ledger.segments import read_chain

ASYNCHRONOUS = "network={mode: asynchronous, links: local, deadline: 100.0}"
SYNCHRONOUS = "network={mode: synchronous, links: local, deadline: 100.0}"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of every peer that have read examples, from outside."""
    peers, release = list[int](), Cohort.add_noise_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        peers.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "add_noise_", counting)
    return peers


def paid(folder: Path) -> int:
    """Return how many steps the ledger in a peer's folder pays for; a peer that waits may commit before the first."""
    (ledger,) = (folder / "ledger").glob("*.jsonl")
    if not ledger.stat().st_size:
        return 0
    return sum(entry.to_step - entry.from_step for entry in read_chain(ledger)[1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that makes or enlarges a file system of some bytes, and its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def sized(size: str) -> Path:
        options = f"size={size}" + (",remount" if folder.is_mount() else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("a disk that is full needs the right to mount one")
        return folder

    yield sized
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    """Leave no page of a small file system free; what a file has of its last page can still be written."""
    with open(folder / "filler", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("network", [ASYNCHRONOUS, SYNCHRONOUS])
@pytest.mark.parametrize("advances", [1, 20], ids=["the next checkpoint has no room", "the ledger comes to have none"])
def test_a_full_disk_ends_a_peer_paid_and_resumable(
    advances: int, network: str, tiny: Tiny, tmp_path: Path, taken: list[int], small_disk: Callable[[str], Path]
) -> None:
    settings = "n_peers=2", "rounds=60", "topology.name=complete", "evaluation.every=60"
    scenario = tiny(*settings, "privacy={noise_multiplier: 1, delta: 1.0e-3}", network)
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    folder = tmp_path / "peer-1"
    folder.symlink_to(small_disk("256k"))
    peers = [running_peer(scenario, device) for device in theirs]
    advance, left = peers[1].trainer.advance, [advances]

    def filling(state: State) -> Exchange | None:
        exchange = advance(state)
        left[0] -= 1
        if left[0] == 0:
            fill(folder)
        return exchange

    peers[1].trainer.advance = filling  # type: ignore[method-assign]
    with running(peers) as futures:
        with pytest.raises((PrivdecError, OSError)):
            futures[1].result(LONG)
        before = taken.count(1)
        assert 0 < before < 60
        assert before <= paid(folder) <= before + 1
        small_disk("8m")
        go_on(running_peer(scenario, theirs[1]), futures[:1])
    assert taken.count(0) == paid(tmp_path / "peer-0") == 60
    # the step that no checkpoint has is taken again, and one may have been reserved
    assert 60 <= taken.count(1) <= paid(folder) <= 62


@pytest.mark.parametrize(
    "network", [SYNCHRONOUS, *(ASYNCHRONOUS.replace("}", f", commit_every: {every}}}") for every in (2, 3))]
)
@pytest.mark.parametrize(
    ("point", "moment"),
    [
        (("_save", "before"), 3),
        (("_save", "after"), 4),
        (("trainer.advance", "after"), 3),
        (("trainer.advance", "before"), 4),
    ],
)
def test_a_peer_dying_between_commits_pays_again(
    network: str, point: tuple[str, str], moment: int, tiny: Tiny, tmp_path: Path, taken: list[int]
) -> None:
    scenario = tiny("n_peers=2", "rounds=7", "topology.name=complete", network)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], point, moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        before = taken.count(1)
        assert before <= paid(tmp_path / "peer-1") <= before + 1
        go_on(running_peer(scenario, theirs[1]), futures[:1])
    assert taken.count(0) == paid(tmp_path / "peer-0") == 7
    # the budget pays for seven steps, of which one may have been reserved when it died
    assert 6 <= taken.count(1) <= paid(tmp_path / "peer-1") <= 7


@pytest.mark.parametrize("by", ["data.root", "--data"])
def test_two_peers_of_one_file_do_not_train_together(by: str, tiny: Tiny, tmp_path: Path) -> None:
    examples = Experiment.build(tiny()).own.examples
    x, y = examples.x.numpy(), examples.y.numpy()
    np.savez(tmp_path / "all.npz", x_train=x, y_train=y)
    np.savez(tmp_path / "test.npz", x_test=x, y_test=y)
    root = tmp_path / ("{peer}.npz" if by == "data.root" else "all.npz")
    scenario = tiny(
        *("n_peers=2", "topology.name=complete", "data.dataset=npz", "data.test_samples=null", "data.samples=null"),
        *(f"data.root={root}", f"data.test={tmp_path}/test.npz", ASYNCHRONOUS),
    )
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    for peer in (0, 1):
        (tmp_path / f"{peer}.npz").symlink_to(tmp_path / "all.npz")
        if by == "--data":
            theirs[peer] = replace(theirs[peer], data=f"{tmp_path}/{peer}.npz")
    one = running_peer(scenario, theirs[0])
    with raises(RunError, "peer.data-in-use", "1.npz"):
        running_peer(scenario, theirs[1])
    one.close()
    running_peer(scenario, theirs[1]).close()


ROUNDS = 200
FEW_LINES = 4000  # bytes of some lines of a ledger
DEVICES = """\
name: full
seed: 3
n_peers: 2
rounds: {rounds}
data: {{dataset: npz, root: "{{peer}}.npz", test: test.npz, batch: {{sampling: full}}}}
model: {{name: softmax}}
algorithm: {{name: privsgp, learning_rate: 0.5}}
privacy: {{noise_multiplier: 1.0, delta: 1.0e-3}}
evaluation: {{every: 1}}
network: {{links: local, peers: [{{address: "{0}"}}, {{address: "{1}"}}]}}
"""


@pytest.mark.slow
def test_a_process_on_a_full_disk_goes_on(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """Its log is on the disk, too, and is begun anew many times; then it is killed; its ledger lacks nothing."""
    disk = small_disk("512k")
    random = np.random.default_rng(0)
    for name, half in (("0", "train"), ("1", "train"), ("test", "test")):
        x = random.normal(size=(60, 5)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", **{f"x_{half}": x, f"y_{half}": (x[:, 0] > 0).astype(np.int64)})
    scenario = tmp_path / "full.yaml"
    scenario.write_text(DEVICES.format(*own_addresses(2), rounds=ROUNDS))
    assert privdec("certs", scenario, "--out", tmp_path / "certs") == 0
    folders = [tmp_path / "peer-0", disk / "peer-1"]

    def begin(peer: int) -> subprocess.Popen[str]:
        words = ["peer", scenario, "--id", peer, "--certs", tmp_path / "certs", "--out", folders[peer], "--small"]
        log = ["--log-file", folders[peer].with_suffix(".log"), "--log-size", "0.01", "--log-format", "json"]
        command = [*map(str, [*PRIVDEC, *words, *log])]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def written() -> int:
        """Return how many bytes the second peer's ledger has."""
        return sum(path.stat().st_size for path in folders[1].glob("ledger/*.jsonl"))

    first = begin(0)
    second = begin(1)
    try:
        wait_until(lambda: written() > FEW_LINES)
        fill(disk)
        _, errors = second.communicate(timeout=LONG)
        assert second.returncode == FAILED, errors
        assert "Traceback" not in errors
        last = errors.splitlines()[-1]
        assert "No space left on device; free some space on its disk, then run the same command again" in last
        before = written()

        # More room comes, and the process is killed while it writes.
        small_disk("16m")
        second = begin(1)
        wait_until(lambda: written() > before + FEW_LINES)
        second.kill()
        second.communicate()
        second = begin(1)
        for process in (first, second):
            _, errors = process.communicate(timeout=3 * LONG)
            assert process.returncode == FINISHED, errors
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()

    # Each of the two ends may cost a step that is taken again, and one that was reserved.
    assert ROUNDS == paid(folders[0]) <= paid(folders[1]) <= ROUNDS + 4
    logs = sorted(disk.glob("peer-1.log*"))
    assert len(logs) == 6
    assert all(path.stat().st_size <= 0.01 * 2**20 for path in logs)
