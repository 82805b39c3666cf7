"""A network peer continues from its checkpoints, whichever write its machine stops at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynchronous_network import QUICK, again
from networked import LONG, Killed, devices, go_on, running
from tiny_scenario import Tiny
from torn_disk import torn

from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.core.cohort import Cohort
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.privacy.ledger.segments import read_chain
from tools.mass_on_disk import mass_on_disk


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
