"""Peers that go on without each other: what holds whatever is lost, slow, killed, put back or cut off."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from asynchronous_network import FOLDERS, POINTS, QUICK, STILL, again, check_mass, initial, join_late, stop_all
from networked import LONG, Killed, devices, driver_of, go_on, holding, mortal, running, wait_until
from raising import raises
from tiny_scenario import Tiny
from variants import settings_for

from flower_privdec.common.errors import BudgetError, StoppedError
from flower_privdec.core.cohort import Cohort
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.transport import Done, UnreachableError
from flower_privdec.peer.asynchronous_session import LOST
from flower_privdec.peer.driving import Program, Wait
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.exactly_once import FIRST, RefusedError
from tools.mass_on_disk import mass_on_disk

HASTY = "network={links: local, deadline: 0.5}"


# --- killed, gone, late, put back ---


@pytest.mark.parametrize(
    ("point", "moment"),
    [(point, moment) for i, point in enumerate(POINTS) for moment in (1, 2, 3) if (i + moment) % 2 == 0],
)
def test_a_peer_that_dies_pays_for_every_step(
    point: str, moment: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, release = [], Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        taken.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    graph = "topology.name=ring" if moment == 2 else "topology.name=directed-exponential"
    scenario = tiny(graph, "rounds=6", QUICK, "algorithm.learning_rate=1.0e-12", "evaluation.every=2")
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=moment > 1)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS[point], 1 if point == "at the end" else moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        go_on(again(scenario, theirs[1]), [futures[peer] for peer in (0, 2, 3)])
    check_mass(tmp_path, initial(scenario))
    for peer in range(4):
        (ledger,) = (tmp_path / f"peer-{peer}" / "ledger").glob("*.jsonl")
        paid = sum(payment.to_step - payment.from_step for payment in read_chain(ledger)[1])
        reserved = paid - taken.count(peer)  # a step that the process which died did not come to
        assert paid >= 6, f"peer {peer}"
        assert 0 <= reserved <= (peer == 1), f"peer {peer}"


def test_a_peer_dying_after_its_last_step_finishes_alone(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("topology.name=ring", "rounds=6", QUICK)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS["at the end"], 1)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        for peer, future in zip((0, 2, 3), (futures[0], *futures[2:]), strict=True):
            peers[peer].stop()
            with suppress(StoppedError):
                future.result(LONG)
    second, leaving = again(scenario, theirs[1]), Event()
    second._leave = holding(lambda: iter(()), leaving.set)  # type: ignore[method-assign]
    with running([second]):
        wait_until(leaving.is_set)
    assert second.state.round_index == 6


@pytest.mark.parametrize("name", ["privsgp", "d-psgd", "pdsl", "dp-dda"])
def test_a_peer_gone_for_good_ends_no_run(name: str, tiny: Tiny, tmp_path: Path) -> None:
    setting = "algorithm={name: dp-dda}" if name == "dp-dda" else f"algorithm.name={name}"
    scenario = tiny(*settings_for(setting), "topology.name=complete", "rounds=8", HASTY)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path)]
    for peer in peers:
        driver_of(peer)._patience = LONG  # with each other
    dying, left = peers[3]._exchange, [3]

    def exchange(*arguments: Any) -> Program[None]:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return dying(*arguments)

    peers[3]._exchange = exchange  # type: ignore[method-assign]
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[3].result(LONG)
        for peer in (0, 1, 2):
            futures[peer].result(LONG)
    for peer in peers[:3]:
        assert peer.state.round_index == peer.end
        assert bool(peer.state.rows["x"].isfinite().all())
        assert set(peer.status()["down"]) <= {"3"}


def test_a_latecomer_starts_with_a_neighbours_model_and_weight(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, "topology.name=complete", "rounds=30000", "evaluation.every=30000", QUICK)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path)]
    start = peers[0].state.rows["x"][0].clone()
    peers[3].state.rows["x"] += 5.0  # what it would begin with
    join_late(peers)
    last = peers[3].state.rows
    assert peers[3].protocol.incarnation > FIRST  # type: ignore[attr-defined]
    assert float(last["w"]) > 0
    torch.testing.assert_close(last["x"][0] / last["w"], start)
    found = mass_on_disk([tmp_path / name for name in FOLDERS])
    torch.testing.assert_close(found["w"], torch.tensor(4.0, dtype=torch.float64))
    torch.testing.assert_close(found["x"], 4 * start)


def test_in_gossip_a_latecomer_adopts_a_neighbours_model(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        *settings_for("algorithm.name=d-psgd"),
        "topology.name=complete",
        "algorithm.learning_rate=1.0e-12",
        "rounds=30000",
        "evaluation.every=30000",
        QUICK,
    )
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    start = peers[0].state.rows["x"].clone()
    peers[3].state.rows["x"] += 5.0
    join_late(peers)
    for peer in peers:
        torch.testing.assert_close(peer.state.rows["x"], start)


def taken_from(peer: RunningPeer) -> int:
    """Return how many shares of a peer its neighbours have taken."""
    return sum(edge.sent - len(edge.frozen) for edge in peer.protocol.edges.values())  # type: ignore[attr-defined]


def test_a_restored_checkpoint_is_found_and_counts_once(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, "rounds=30000", "evaluation.every=30000", QUICK)  # until they are stopped
    theirs = devices(scenario, tmp_path)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS["after a commit"], 4)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        older = tmp_path / "older"
        shutil.copy(theirs[1].folder / "checkpoints", older)
        second = again(scenario, theirs[1])
        before = taken_from(second)
        with running([second]) as (future,):
            wait_until(lambda: taken_from(second) >= before + 3)
            stop_all([second], [future])
        shutil.copy(older, theirs[1].folder / "checkpoints")
        third: Any = again(scenario, theirs[1])
        absorb, brought = third.protocol.absorb, list[float]()

        def absorb_and_count(*given: Any) -> list[Any]:
            weight, absorbed = float(third.protocol.mass["w"]), absorb(*given)
            if weight == 0 and absorbed:
                brought.append(float(third.protocol.mass["w"]) - sum(float(share.values["w"]) for share in absorbed))
            return absorbed

        third.protocol.absorb = absorb_and_count
        with running([third]) as (future,):
            wait_until(lambda: bool(brought))  # not by the weight, which a reset under way may not have taken yet
            stop_all([third, peers[0], *peers[2:]], [future, futures[0], *futures[2:]])
    found = mass_on_disk([device.folder for device in theirs])
    assert third.protocol.incarnation > FIRST
    assert len(brought) == 1
    assert float(found["w"]) - sum(brought) < 4.0
    torch.testing.assert_close(found["x"], found["w"] * initial(scenario), rtol=0, atol=1e-9)


@pytest.mark.parametrize("also", ["checkpoint", "ledger"])
@pytest.mark.parametrize(
    ("name", "every"), [("privsgp", 1), ("d-psgd", 1), ("d-psgd", 2), ("dp-cga", 1)], ids=lambda each: str(each)
)
def test_a_ledger_restored_with_its_checkpoint_is_found(
    name: str, every: int, also: str, tiny: Tiny, tmp_path: Path
) -> None:
    network = QUICK.replace("}", f", commit_every: {every}}}")
    graph = [] if name == "privsgp" else ["topology.name=ring"]
    scenario = tiny(
        f"algorithm.name={name}", *graph, "rounds=30000", "evaluation.every=30000", network
    )  # until stopped
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=(name, every) != ("d-psgd", 1))
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS["after a commit"], 4)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        older = Path(shutil.copytree(theirs[1].folder, tmp_path / "older"))
        second, others = again(scenario, theirs[1]), peers[:1] + peers[2:]
        is_ahead = has_gone_on(second, others)
        with running([second]) as (future,):
            wait_until(is_ahead)  # by shares, which a peer sends without a step too, and by lines of its ledger
            wait_until(lambda: any(other.witness.seen.get(1, {}).get(second.witness.boot) for other in others))
            stop_all([second], [future])
        shutil.copy(older / "checkpoints", theirs[1].folder / "checkpoints")
        if also == "ledger":
            shutil.copytree(older / "ledger", theirs[1].folder / "ledger", dirs_exist_ok=True)
        third = again(scenario, theirs[1])
        with running([third]) as (future,):
            if also == "ledger":
                with raises(BudgetError, "ledger.witnessed", "digits.jsonl"):
                    future.result(LONG)
            else:
                wait_until(lambda: third.protocol.incarnation > FIRST)  # type: ignore[attr-defined]
                stop_all([third], [future])
        stop_all([peers[0], *peers[2:]], [futures[0], *futures[2:]])


def has_gone_on(peer: RunningPeer, others: Iterable[RunningPeer]) -> Callable[[], bool]:
    """Return what tells whether a neighbour has seen three rounds of a peer, or its shares, that it does not know."""
    if "w" in peer.state.rows:
        before = taken_from(peer)
        return lambda: taken_from(peer) >= before + 3
    number, wanted = peer.device.peer, peer.session.resumed_at + 3  # type: ignore[attr-defined]
    seen = [other.neighbours[number] for other in others if number in other.neighbours]
    return lambda: any(known.place is not None and known.place[0] >= wanted for known in seen)


# --- sent nothing, or not reached for a moment ---


@pytest.mark.parametrize(("held", "left"), [(1.0, 0.5), (0.9, 0.45), (0.6, 0.4), (0.4, 0.4), (0.3, 0.3), (0.0, 0.0)])
def test_a_peer_keeps_the_weight_its_steps_need(held: float, left: float, tiny: Tiny, tmp_path: Path) -> None:
    peer = running_peer(tiny(STILL, QUICK), devices(tiny(STILL, QUICK), tmp_path, memory=True)[0])
    machine = peer.protocol  # type: ignore[attr-defined]
    machine._open.add(1)
    peer.state.rows["w"].fill_(held)
    peer.exchanges.split(0, {1: 0.5})  # type: ignore[attr-defined]
    assert float(peer.state.rows["w"]) == pytest.approx(left)
    assert machine.owes(1) == (held > 0.4)
    peer.close()


def test_one_lost_call_loses_no_neighbour_several_do(tiny: Tiny, tmp_path: Path) -> None:
    peer = running_peer(tiny(STILL, QUICK), devices(tiny(STILL, QUICK), tmp_path)[0])
    machine, mail = peer.protocol, peer.session  # type: ignore[attr-defined]
    neighbor = peer.timetable.neighbours(0)[0]
    machine._open.add(neighbor)
    for _ in range(LOST - 1):
        mail.failed(neighbor, UnreachableError("cut"), 0.0)
        assert machine.is_open(neighbor)
    mail.failed(neighbor, UnreachableError("cut"), 0.0)
    assert not machine.is_open(neighbor)
    mail.answered(neighbor, [], [], 0.0)
    machine._open.add(neighbor)
    mail.failed(neighbor, RefusedError("greet first"), 0.0)
    assert not machine.is_open(neighbor)
    peer.close()


def before_its_end(tiny: Tiny, tmp_path: Path) -> tuple[RunningPeer, list[int]]:
    """Return a peer that commits nothing, whose neighbours are done and know that it is, and these."""
    scenario = tiny(STILL, "topology.name=complete", HASTY)
    peer = running_peer(scenario, devices(scenario, tmp_path)[0])
    peer.commit = lambda *arguments: iter(())  # type: ignore[attr-defined]
    neighbors = peer.timetable.neighbours(0)
    for neighbor in neighbors:
        peer.protocol._open.add(neighbor)
        peer.neighbours[neighbor].round_index = peer.neighbours[neighbor].informed = peer.end
    return peer, list(neighbors)


def test_a_neighbour_owed_a_share_at_end_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    peer, (first, *others) = before_its_end(tiny, tmp_path)
    machine = peer.protocol
    assert all(map(peer._is_over, [first, *others]))  # type: ignore[attr-defined]
    machine.split(0, {first: 0.5})  # type: ignore[attr-defined]
    assert not peer._is_over(first)  # type: ignore[attr-defined]
    machine.close(first)
    assert not peer._is_over(first)  # type: ignore[attr-defined]
    assert all(map(peer._is_over, others))  # type: ignore[attr-defined]
    peer.close()


def test_an_unreachable_finished_neighbour_is_awaited_until_the_deadline(tiny: Tiny, tmp_path: Path) -> None:
    peer, (first, *_) = before_its_end(tiny, tmp_path)
    peer.neighbours[first].informed = None
    assert peer.protocol.is_open(first)  # type: ignore[attr-defined]
    peer._start(peer._leave())
    wait = peer.on_tick(0.0)
    assert isinstance(wait, Wait)
    while (wait := peer.on_tick(now := wait.until)) is not None:
        assert isinstance(wait, Wait)
        assert now <= peer.times.deadline + peer.times.poll
    assert now > peer.times.deadline
    peer.close()


# --- cut off ---


class Cut:
    """Links that are down: calls over them do not arrive, or their answers are lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sides: dict[str, int]) -> None:
        self.down = False
        self.sides = sides
        post = StreamConnection.post

        def cut(link: StreamConnection, content: Any, seconds: float, done: Done) -> None:
            def lose() -> None:
                done(UnreachableError(f"{link.identity} at {link.address}: cut"))

            if self._lost(link):
                lose()
            else:
                post(link, content, seconds, lambda answer: lose() if self._lost(link) else done(answer))

        monkeypatch.setattr(StreamConnection, "post", cut)

    def _lost(self, link: StreamConnection) -> bool:
        return self.down and self.sides[link.address] != self.sides[_own_address(link)]


def _own_address(link: StreamConnection) -> str:
    return link.own  # type: ignore[attr-defined, no-any-return]


def test_both_sides_of_a_partition_go_on_and_merge(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tiny(STILL, "topology.name=complete", "rounds=30000", "evaluation.every=30000", QUICK)
    theirs = devices(scenario, tmp_path, dials_out=())
    peers = [running_peer(scenario, device) for device in theirs]
    for peer, shift in zip(peers, (0.0, 0.0, 1.0, 1.0), strict=True):
        peer.state.rows["x"] += shift  # what the two sides differ in
    sides = {address: number // 2 for number, address in enumerate(theirs[0].addresses)}
    opened = StreamConnection.__init__

    def knowing(
        link: StreamConnection, address: str, identity: str, credentials: Any, *more: Any, **options: Any
    ) -> None:
        opened(link, address, identity, credentials, *more, **options)
        numbers = [number for number, device in enumerate(theirs) if device.credentials is credentials]
        link.own = theirs[0].addresses[numbers[0]]  # type: ignore[attr-defined]

    monkeypatch.setattr(StreamConnection, "__init__", knowing)
    cut, met = Cut(monkeypatch, sides), Barrier(5)
    for peer in peers:
        peer._before = holding(peer._before, lambda peer=peer: peer.state.round_index or met.wait(LONG))  # type: ignore
    with running(peers) as futures:
        wait_until(lambda: met.n_waiting == 4)
        cut.down = True
        met.wait(LONG)
        wait_until(lambda: all(peer.state.round_index >= 10 for peer in peers))
        assert apart(peers) > 0.4
        cut.down = False
        wait_until(lambda: apart(peers) < 1e-3)
        stop_all(peers, futures)
    assert apart(peers) < 1e-2  # each moves as shares come, one after the other
    found = mass_on_disk([device.folder for device in theirs])
    torch.testing.assert_close(found["w"], torch.tensor(4.0, dtype=torch.float64))
    torch.testing.assert_close(found["x"], 4 * initial(scenario) + 2.0)


def apart(peers: list[RunningPeer]) -> float:
    """Return how far the models of peers are from their mean."""
    models = torch.cat([peer.state.rows["x"] / peer.state.rows["w"][:, None] for peer in peers])
    return float((models - models.mean(0)).abs().max())
