"""A peer whose ledger was restored, lost or copied takes no further step: its neighbours have seen more of it.

Each run is a network over real gRPC and TLS. The observer stands at the one door from examples to messages.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tiny_scenario import Tiny
from variants import settings_for

pytest.importorskip("grpc")

from networked import LONG, Killed, devices, driver_of, finish, mortal, running, wait_until
from raising import raises

from flower_privdec.common.errors import BudgetError, PrivdecError, RunError, StoppedError
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import MOST_UNFOUNDED, run_unattended, running_peer
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.times import Times
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.exactly_once import LAST
from flower_privdec.pushsum.witness import LedgerReport
from flower_privdec.scenario import Scenario

MODES = ["synchronous", "asynchronous"]
ALGORITHMS = ["algorithm.name=privsgp", "algorithm.name=d-psgd"]  # push-sum and gossip
ROUNDS = 6


class Releases:
    """Counts the releases of each peer, and calls a function before one of them."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.before: dict[tuple[int, int], Callable[[], None]] = {}

    def see(self, step: PrivateStep) -> None:
        """Count a release that is about to be made, paid already."""
        (peer,) = set(step.peers.tolist())
        self.before.pop((peer, self.count.get(peer, 0)), lambda: None)()
        self.count[peer] = self.count.get(peer, 0) + 1


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[Releases]:
    seen, release = Releases(), Cohort.add_noise_

    def watched(cohort: Cohort, step: PrivateStep) -> None:
        seen.see(step)
        release(cohort, step)

    monkeypatch.setattr(Cohort, "add_noise_", watched)
    return seen


def scenario_of(tiny: Tiny, algorithm: str, mode: str) -> Scenario:
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}}}"
    return tiny(*settings_for(algorithm), f"rounds={ROUNDS}", "evaluation.every=3", network)


def payments(folder: Path) -> int:
    """Return how many steps a peer's ledger pays for."""
    (path,) = (folder / "ledger").glob("*.jsonl")
    return sum(entry.to_step - entry.from_step for entry in read_chain(path)[1])


def run_until_peer_1_is_killed(scenario: Scenario, theirs: list[PeerDevice], then: Callable[[], Any]) -> Any:
    """Run all peers; kill peer 1 after a few rounds, and return what `then` does while the others are up."""
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], ("trainer.advance", "after"), 8)
    with running(peers) as futures:
        assert isinstance(futures[1].exception(LONG), Killed)
        result = then()
        for peer in peers:
            peer.stop()
        for future in futures:
            future.exception(LONG)
    return result


def outcome(peer: RunningPeer) -> PrivdecError:
    """Run a peer and return the error that ends it."""
    with pytest.raises(PrivdecError) as caught:
        finish(peer)
    return caught.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("backup", ["a payment ahead", "lost"])
def test_a_backup_or_an_empty_folder_takes_no_step(
    backup: str, algorithm: str, mode: str, tiny: Tiny, tmp_path: Path, releases: Releases
) -> None:
    scenario = scenario_of(tiny, algorithm, mode)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=mode == "synchronous")
    folder, copy = theirs[1].folder, tmp_path / "backup"
    releases.before[1, 2] = lambda: shutil.copytree(folder, copy)  # its checkpoint has two steps, its ledger three

    def start_again() -> PrivdecError:
        shutil.rmtree(folder)
        if backup == "a payment ahead":
            shutil.copytree(copy, folder)
        before = releases.count[1]
        error = outcome(running_peer(scenario, theirs[1]))
        assert releases.count[1] == before
        return error

    error = run_until_peer_1_is_killed(scenario, theirs, start_again)
    assert isinstance(error, BudgetError)
    assert error.code == "ledger.witnessed"
    assert "--charge-missing" in str(error)
    assert payments(copy) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lost_lines_can_be_charged_and_the_peer_continues(
    algorithm: str, tiny: Tiny, tmp_path: Path, releases: Releases
) -> None:
    scenario = scenario_of(tiny, algorithm, "asynchronous").model_copy(update={"rounds": 20_000})
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    folder = theirs[1].folder
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], ("trainer.advance", "after"), 8)
    with running(peers) as futures:
        assert isinstance(futures[1].exception(LONG), Killed)
        taken = releases.count[1]
        shutil.rmtree(folder)
        recovering = driver_of(running_peer(scenario, theirs[1]))
        try:
            recovering.open(begin=False)
            assert recovering.charge_witnessed() >= taken
        finally:
            recovering.close()
        assert payments(folder) >= taken
        again = running_peer(scenario, theirs[1])
        with running([again]) as (future,):
            wait_until(lambda: releases.count[1] > taken + 2 or future.done())
            for peer in [again, *peers]:
                peer.stop()
            assert isinstance(future.exception(LONG), StoppedError)
    assert payments(folder) >= releases.count[1] > taken + 2


def beside_others(
    scenario: Scenario, theirs: list[PeerDevice], releases: Releases, then: Callable[[list[RunningPeer]], None]
) -> None:
    """Kill peer 1 after a few rounds, and do something while the others are up."""
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], ("trainer.advance", "after"), 8)
    with running(peers) as futures:
        assert isinstance(futures[1].exception(LONG), Killed)
        then(peers)
        for peer in peers:
            peer.stop()
        for future in futures:
            future.exception(LONG)


def test_a_lost_folder_recovers_unattended_if_allowed(tiny: Tiny, tmp_path: Path, releases: Releases) -> None:
    """Its owner said so once, by --charge-witnessed: what it lost is charged, and it goes on in the same process."""
    scenario = scenario_of(tiny, ALGORITHMS[0], "asynchronous").model_copy(update={"rounds": 20_000})
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    folder = theirs[1].folder
    made: list[RunningPeer] = []

    def make() -> RunningPeer:
        made.append(running_peer(scenario, theirs[1]))
        return made[-1]

    def recover(peers: list[RunningPeer]) -> None:
        taken = releases.count[1]
        shutil.rmtree(folder)
        releases.before[1, taken + 2] = lambda: made[-1].stop()
        with pytest.raises(StoppedError):
            run_unattended(make, 10_000, with_parent=False)
        assert len(made) == 3  # one that found it, one that charged, one that went on
        assert payments(folder) >= releases.count[1] >= taken + 2
        assert made[-1].status()["charged_for_lost"] >= taken

    beside_others(scenario, theirs, releases, recover)


def test_a_lying_neighbour_burns_no_budget_unattended(tiny: Tiny, tmp_path: Path, releases: Releases) -> None:
    scenario = scenario_of(tiny, ALGORITHMS[0], "asynchronous").model_copy(update={"rounds": 20_000})
    theirs = devices(scenario, tmp_path, insecure_seeds=False)

    def lie(peers: list[RunningPeer]) -> None:
        paid = payments(theirs[1].folder)
        honest = peers[0].witness.report

        def lying(neighbor: int, *further: int) -> LedgerReport:
            report = honest(neighbor, *further)
            if neighbor != 1:
                return report
            return replace(report, seen=(*report.seen, (LAST, 19_000)))

        peers[0].witness.report = lying  # type: ignore[method-assign]
        with raises(BudgetError, "ledger.not-confirmed", "peer 0: .*19000"):
            run_unattended(lambda: running_peer(scenario, theirs[1]), 10_000, with_parent=False)
        assert payments(theirs[1].folder) <= paid + 2  # what two starts may count too much

    beside_others(scenario, theirs, releases, lie)


def test_a_lie_taken_back_is_not_believed_for_ever(tiny: Tiny, tmp_path: Path, releases: Releases) -> None:
    """A neighbour says that lines are missing whenever the peer runs, and not when it would charge them."""
    scenario = scenario_of(tiny, ALGORITHMS[0], "asynchronous").model_copy(update={"rounds": 20_000})
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    made: list[RunningPeer] = []

    def make() -> RunningPeer:
        assert len(made) < 2 * MOST_UNFOUNDED, "it starts for ever"
        made.append(running_peer(scenario, theirs[1]))
        return made[-1]

    def lie(peers: list[RunningPeer]) -> None:
        paid = payments(theirs[1].folder)
        honest = peers[0].witness.report

        def lying(neighbor: int, *further: int) -> LedgerReport:
            report = honest(neighbor, *further)
            if neighbor != 1 or not made or made[-1].witness.is_charging:
                return report
            return replace(report, seen=(*report.seen, (LAST, 1)))

        peers[0].witness.report = lying  # type: ignore[method-assign]
        with raises(BudgetError, "ledger.not-confirmed", "peer 0"):
            run_unattended(make, 10_000, with_parent=False)
        assert len(made) == 2 * MOST_UNFOUNDED
        assert payments(theirs[1].folder) <= paid + 2 * MOST_UNFOUNDED  # what each start may count too much

    beside_others(scenario, theirs, releases, lie)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_copied_folder_that_runs_at_once_ends_both(
    algorithm: str, tiny: Tiny, tmp_path: Path, releases: Releases
) -> None:
    scenario = scenario_of(tiny, algorithm, "asynchronous").model_copy(update={"rounds": 100_000})
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    copy, copied = tmp_path / "copy", Event()

    def backup() -> None:
        shutil.copytree(theirs[1].folder, copy, ignore=shutil.ignore_patterns(".lock"))
        copied.set()

    releases.before[1, 2] = backup
    peers = [running_peer(scenario, device) for device in theirs]
    with running(peers) as futures:
        assert copied.wait(LONG)
        elsewhere = tuple("127.0.0.1:0" if peer == 1 else address for peer, address in enumerate(theirs[1].addresses))
        twin = running_peer(scenario, replace(theirs[1], folder=copy, addresses=elsewhere))
        error = outcome(twin)
        assert error.code in ("ledger.witnessed", "network.runs-twice")
        for peer in peers:
            peer.stop()
        for future in futures:
            future.exception(LONG)


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_with_no_neighbour_up_takes_no_step(mode: str, tiny: Tiny, tmp_path: Path, releases: Releases) -> None:
    scenario = scenario_of(tiny, ALGORITHMS[0], mode)
    device = devices(scenario, tmp_path, insecure_seeds=False)[1]
    times = replace(Times.of(scenario.network), give_up=0.5)
    peer = running_peer(scenario, replace(device, times=times))
    assert isinstance(outcome(peer), RunError)
    assert not releases.count
