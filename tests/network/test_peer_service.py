"""`privdec peer` as the one command of a service: it begins or goes on, waits for its neighbours, and says for whom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("grpc")

from command_line import privdec
from networked import LONG, devices, finish, running, trainer_of, wait_until
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import ScenarioError, StoppedError
from flower_privdec.common.logs import LogOptions, logging_to, message_of
from flower_privdec.network.peer import driver as driver_module
from flower_privdec.network.peer import foreground
from flower_privdec.network.peer.foreground import NeighbourNotes, run_in_foreground, running_peer
from flower_privdec.peer.times import LINKS
from flower_privdec.peer.trainer import ScenarioTrainer

MODES = ["asynchronous", "synchronous"]


@pytest.fixture(autouse=True)
def _logs(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Log on stderr, as the command does."""
    with logging_to(LogOptions()):
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_waiting_peer_takes_no_step(mode: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs a thousand times as fast shows that no time ends the wait; then a neighbour comes."""
    scenario = tiny("n_peers=2", f"network={{mode: {mode}, links: local, deadline: {LONG}}}", "rounds=2")
    theirs = devices(scenario, tmp_path, insecure_seeds=False, dials_out=())
    peer = running_peer(scenario, theirs[0])
    with running([peer]) as (future,):
        monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: 1000 * time.monotonic()))
        wait_until(lambda: "1" in peer.status()["down"])
        time.sleep(0.5)
        monkeypatch.undo()
        assert not future.done()
        assert peer.state.round_index == 0
        assert trainer_of(peer).cohort.ledger.charged == 0  # type: ignore[union-attr]
        assert "refused" in peer.waiting()
        finish(running_peer(scenario, theirs[1]))
        future.result(LONG)
    assert peer.waiting() == ""


@pytest.mark.parametrize("mode", MODES)
def test_the_same_command_begins_and_goes_on(
    mode: str, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that gave up because it met nobody runs again with the same command; so after an interruption."""
    monkeypatch.setitem(LINKS, "local", replace(LINKS["local"], give_up=0.3))
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(tiny_text)
    where = ", ".join(f"{{address: {address!r}}}" for address in own_addresses(2))
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}, peers: [{where}]}}"
    options = ["--set", network, "--set", "n_peers=2"]
    assert privdec("certs", scenario, "--out", tmp_path / "certs", *options) == 0
    command = ["peer", scenario, "--id", 0, "--out", tmp_path / "0", "--certs", tmp_path / "certs", *options]
    for _ in range(2):
        assert privdec(*command) == 1
    assert privdec(*command, "--resume") == 2
    assert privdec(*command, "--set", "algorithm.learning_rate=0.1") == (2 if mode == "asynchronous" else 1)


def test_a_peer_says_at_once_why_it_waits(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, again when the cause is known, and not every second after that."""
    monkeypatch.setattr(foreground, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(foreground, "WAITING_SECONDS", 0.3)
    monkeypatch.setattr(foreground.signal, "signal", lambda *_: None)  # pytest's threads may not
    scenario = tiny("n_peers=2", "network.links=local", "rounds=2")
    peer = running_peer(scenario, devices(scenario, tmp_path, dials_out=())[0])
    lines = list[str]()

    def stop() -> None:
        since = time.monotonic()
        while "refused" not in "".join(lines) or time.monotonic() - since < 2:
            lines.extend(map(message_of, capsys.readouterr().err.splitlines()))
            time.sleep(0.05)
            assert time.monotonic() - since < LONG
        peer.stop()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        with pytest.raises(StoppedError):
            run_in_foreground(peer, 1, with_parent=False)
        stopping.result(LONG)
    assert lines[0].startswith("peer 0 waits for its neighbours")
    assert "peer-1.tiny at 127.0.0.1:" in lines[-1]
    assert len(lines) <= 2


def test_a_neighbour_that_flaps_is_said_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    unheard, trouble = [2], dict[int, str]()
    notes = NeighbourNotes(SimpleNamespace(status_of_neighbors=lambda: (unheard, trouble)))  # type: ignore[arg-type]
    for second in range(3600):
        trouble.clear()
        trouble[2] = "it has not come yet"
        if second % 2:
            trouble[1] = "a call that failed, once"
        if second % 20 >= 10:
            trouble[3] = "off"
        if second >= 100:
            trouble[4] = "off for good"
        notes.look(float(second))
    lines = [message_of(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["peer 3 is down: off", "peer 3 is up again, after 10 s"]
    assert len([line for line in lines if "peer 3" in line]) <= 2 * 3600 / 60
    assert [line for line in lines if "peer 3" not in line] == ["peer 4 is down: off for good"]


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_peer_restarted_keeps_its_summary(
    mode: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(foreground, "WAITING_SECONDS", 0.1)
    monkeypatch.setattr(foreground.signal, "signal", lambda *_: None)
    scenario = tiny("n_peers=2", f"network={{mode: {mode}, links: local, deadline: {LONG}}}", "rounds=2")
    theirs = devices(scenario, tmp_path, dials_out=())
    with running([running_peer(scenario, theirs[1])]) as (other,):
        run_in_foreground(running_peer(scenario, theirs[0]), 1, with_parent=False)
        other.result(LONG)
    summary = theirs[0].folder / "summary.json"
    before = summary.read_bytes()
    assert json.loads(before)["bytes_sent"] > 0
    assert json.loads(before)["waits_for"] == ""
    capsys.readouterr()
    again, shown = running_peer(scenario, theirs[0]), list[str]()

    def stop() -> None:
        since = time.monotonic()
        while "waits for its neighbours to end (peer-1.tiny at 127.0.0.1:" not in "".join(shown):
            assert time.monotonic() - since < LONG
            shown.append(capsys.readouterr().err)
            time.sleep(0.05)
        again.stop()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        run_in_foreground(again, 1, with_parent=False)
        stopping.result(LONG)
    assert summary.read_bytes() == before


# --- its own data


def archive(path: Path, examples: int) -> Path:
    x, y = np.random.default_rng(3).normal(size=(examples, 4)).astype(np.float32), np.arange(examples) % 3
    np.savez(path, x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    return path


def test_a_devices_own_file_is_taken_whole(tiny: Tiny, tmp_path: Path) -> None:
    """Where the scenario's root is one dataset for all peers too, of which each has a part."""
    shared, own = archive(tmp_path / "shared.npz", 400), archive(tmp_path / "own.npz", 90)
    scenario = tiny(f"data={{dataset: npz, root: {shared}, batch: {{size: 12}}}}")
    trainers = [ScenarioTrainer(scenario, 1, tmp_path / "1", data) for data in (None, str(own))]
    assert [trainer.experiment.own.examples.sizes.tolist() for trainer in trainers] == [[100], [90]]


def test_own_data_of_a_fileless_dataset_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with raises(ScenarioError, "data.embedded", names="digits"):
        ScenarioTrainer(tiny(), 1, tmp_path, str(tmp_path / "own.npz"))
