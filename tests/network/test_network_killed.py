"""Peers of every family that die and go on, of which nobody waits: what they paid for, and what they end with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from asynchronous_network import QUICK, STILL, again, join_late, stop_all
from networked import LONG, Killed, begin_without, devices, finish, go_on, holding, mortal, running, wait_until
from tiny_scenario import Tiny
from variants import settings_for

from flower_privdec.core.cohort import Cohort
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.peer.asynchronous_session import LOST
from flower_privdec.peer.driving import Program, Work, performed
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.exactly_once import FIRST, RefusedError
from tools.mass_on_disk import mass_on_disk

POINTS = {  # around everything that is put on disk, sent or used
    "before a commit": ("_save", "before"),
    "after a commit": ("_save", "after"),
    "before rows leave": ("exchanges.post", "before"),
    "after rows left": ("exchanges.post", "after"),
    "before it mixes": ("exchanges._mix", "before"),
    "after it mixed": ("exchanges._mix", "after"),
    "after it split": ("exchanges.split", "after"),
    "after it added what came": ("exchanges.absorb", "after"),
    "before it hands in": ("trainer.evaluate", "before"),
    "in the last commit": ("_is_over", "before"),
    "when a round is settled": ("exchanges._settle", "after"),
}
ROWS = [
    "before a commit",
    "after a commit",
    "before rows leave",
    "after rows left",
    "before it mixes",
    "after it mixed",
]
SHARES = ["after a commit", "after it split", "after it added what came", "before it hands in", "in the last commit"]
GOSSIP = ["d-psgd", "pdsl", "dp-cga", "dp-dda"]
PUSH = ["privsgp", "privsgp-vr", "feddeper"]
GRAPHS = {"pdsl": "star", "dp-cga": "ring", "d-psgd": "complete", "dp-dda": "ring"}
OTHERS = ["directed-exponential-full", "complete", "directed-ring"]
# Every family dies at every point, two algorithms of gossip and one or two of push-sum at each.
CASES = [
    *(
        (name, GRAPHS[name], point, 1 + (i + j) % 4)
        for i, name in enumerate(GOSSIP)
        for j, point in enumerate(ROWS)
        if (i + j) % 2 == 0
    ),
    *(
        (name, OTHERS[(i + j) % 3], point, 1 + (i + j) % 3)
        for i, name in enumerate(PUSH)
        for j, point in enumerate(SHARES)
        if (i + j) % 2 == 0
    ),
]
EMPTY: Mapping[int, int] = {}


def choosing(name: str) -> str:
    return f"algorithm={{name: {name}}}" if name == "dp-dda" else f"algorithm.name={name}"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of every peer, from outside."""
    found, release = list[int](), Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        found.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    return found


def check_ledgers(folder: Path, taken: list[int], least: int, deaths: Mapping[int, int] = EMPTY) -> None:
    """Check that each step is paid for; the budget of a peer that died lacks the step that was reserved then."""
    for peer in range(4):
        (ledger,) = (folder / f"peer-{peer}" / "ledger").glob("*.jsonl")
        paid = sum(payment.to_step - payment.from_step for payment in read_chain(ledger)[1])
        assert paid >= taken.count(peer) >= least - deaths.get(peer, 0), f"peer {peer}"


def check_weight(folder: Path) -> None:
    """Check that the four have the weight of four; who joins late adds that of a peer that begins."""
    total = mass_on_disk([folder / f"peer-{peer}" for peer in range(4)], ["w"])["w"]
    assert float(total) == pytest.approx(4.0, rel=1e-12)


@pytest.mark.parametrize(("name", "graph", "point", "moment"), CASES)
def test_a_peer_killed_at_any_point_continues(
    name: str, graph: str, point: str, moment: int, tiny: Tiny, tmp_path: Path, taken: list[int]
) -> None:
    every = 1 if moment % 2 else 2
    scenario = tiny(
        *settings_for(choosing(name)),
        f"topology.name={graph}",
        "rounds=4",
        QUICK.replace("}", f", commit_every: {every}}}"),
    )
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=moment > 1)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS[point], 1 if point in ("before it hands in", "in the last commit") else moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        last = again(scenario, theirs[1])
        go_on(last, [futures[peer] for peer in (0, 2, 3)])
    for peer in [last, peers[0], *peers[2:]]:  # type: ignore[assignment]
        assert peer.state.round_index == peer.end  # type: ignore[attr-defined]
        assert bool(peer.state.rows["x"].isfinite().all())  # type: ignore[attr-defined]
    check_ledgers(tmp_path, taken, 1)
    if name in PUSH:
        check_weight(tmp_path)


@pytest.mark.parametrize("name", ["privsgp", "pdsl"])
def test_two_peers_die_together_and_one_dies_twice(name: str, tiny: Tiny, tmp_path: Path, taken: list[int]) -> None:
    scenario = tiny(*settings_for(choosing(name)), "topology.name=complete", "rounds=5", QUICK)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=name == "pdsl")
    peers = [running_peer(scenario, device) for device in theirs]
    all_met = Barrier(4)  # whoever begins waits for all others, and the two come back together alone
    for peer in peers:
        peer._before = holding(peer._before, lambda peer=peer: peer.state.round_index or all_met.wait(LONG))  # type: ignore
    for victim in (1, 2):
        mortal(peers[victim], POINTS["after a commit"], 3)
    with running(peers) as futures:
        for victim in (1, 2):
            with pytest.raises(Killed):
                futures[victim].result(LONG)
        second = again(scenario, theirs[1])
        mortal(second, POINTS["after a commit"], 1)
        others = [again(scenario, theirs[2])]
        with running([second, *others]) as restarted:
            with pytest.raises(Killed):
                restarted[0].result(LONG)
            go_on(again(scenario, theirs[1]), [futures[0], futures[3], restarted[1]])
    check_ledgers(tmp_path, taken, 5, {1: 2, 2: 1})
    if name in PUSH:
        check_weight(tmp_path)


@pytest.mark.parametrize(
    ("point", "moment", "first"),
    [("when a round is settled", 2, 2), ("after a commit", 2, 1)],
    ids=["the round is over", "its shares are on disk"],
)
def test_a_restarted_peer_splits_once_a_round(point: str, moment: int, first: int, tiny: Tiny, tmp_path: Path) -> None:
    """Killed at the end of a round, it takes a whole one next; after it split, it sends those shares as they are."""
    scenario = tiny("topology.name=complete", "rounds=6", QUICK)
    theirs = devices(scenario, tmp_path)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS[point], moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        last = again(scenario, theirs[1])
        split, rounds = last.exchanges.split, list[int]()  # type: ignore[attr-defined]
        last.exchanges.split = lambda k, weights, **more: (rounds.append(k), split(k, weights, **more))  # type: ignore[attr-defined]
        go_on(last, [futures[peer] for peer in (0, 2, 3)])
    assert sorted({k for k in rounds if first <= k < 6}) == list(range(first, 6))  # and while it waited
    check_weight(tmp_path)


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
def test_a_finished_peer_unaware_of_the_end_is_awaited(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """A neighbour whose edge is closed, or that refuses a call, is there; one that is not reached has left."""
    scenario = tiny(f"algorithm.name={name}", "topology.name=ring", "rounds=4", QUICK)
    peer: Any = running_peer(scenario, devices(scenario, tmp_path)[0])
    performed(peer._begin())
    peer.neighbours[1].round_index = 3
    for _ in range(LOST):
        peer.session.failed(1, UnreachableError("nobody is there"), 0.0)
    assert not peer._is_over(1)  # it may come back, and has rounds to do
    peer.neighbours[1].round_index = peer.end
    assert peer._is_over(1)
    peer.session.failed(1, RefusedError("greet me first"), 0.0)
    assert not peer.protocol.is_open(1)
    assert not peer._is_over(1)
    for count in range(1, LOST + 1):
        peer.session.failed(1, UnreachableError("nobody is there"), 0.0)
        assert peer._is_over(1) == (count == LOST)
    peer.close()


def cut_off(peer: RunningPeer, neighbors: set[int]) -> None:
    """Let a peer neither call some neighbours nor hear them, as long as they are in the set."""
    mail: Any = peer.session
    has_news, take = mail.has_news, mail.receive

    def taking(caller: int, said: Any, now: float) -> Any:
        if caller in neighbors:
            raise RefusedError("cut off")
        return take(caller, said, now)

    mail.has_news, mail.receive = lambda to, now: to not in neighbors and has_news(to, now), taking


@pytest.mark.parametrize("when", ["before it begins anew", "after it began anew", "once a share is under way to it"])
def test_a_latecomer_killed_while_joining_joins_again(when: str, tiny: Tiny, tmp_path: Path) -> None:
    """Its first commit is on disk, with mass of its own, when it learns that the others began without it.

    That mass is lost, and no more: a share that one neighbour sent to what it begins anew as is for whoever goes on
    from its disk, also where it hears others first. With the weight of one that begins, the four have that of four.
    """
    scenario = tiny(STILL, "topology.name=complete", "rounds=30000", QUICK, "evaluation.every=30000")
    theirs = devices(scenario, tmp_path, memory=when.startswith("after"))
    peers = [running_peer(scenario, device) for device in theirs]
    begin_without(peers[:3], 3)
    cut_off(peers[3], {1, 2})
    begin_anew = peers[3].reset  # type: ignore[attr-defined]

    def share_is_under_way() -> None:
        wait_until(lambda: 3 in [share.receiver for share in peers[0].protocol.shares_to_send()])  # type: ignore[attr-defined]

    def dying() -> Program[None]:
        if when != "before it begins anew":
            yield from begin_anew()
        if when == "once a share is under way to it":
            yield Work("hold", share_is_under_way)
        raise Killed

    peers[3].reset = dying  # type: ignore[attr-defined]
    with running(peers[:3]) as futures:
        for peer in peers[:3]:
            await_round(peer, 2)
        with pytest.raises(Killed):
            finish(peers[3])
        last, silent = again(scenario, theirs[3]), {0}
        cut_off(last, silent)
        with running([last]) as (joining,):
            wait_until(lambda: last.protocol.is_open(1))
            silent.clear()
            await_round(last, 3)
            stop_all([*peers[:3], last], [*futures, joining])
    assert last.protocol.incarnation > FIRST  # type: ignore[attr-defined]
    check_weight(tmp_path)


@pytest.mark.parametrize("name", ["privsgp-vr", "feddeper", "pdsl", "dp-dda"])
def test_a_latecomer_pays_only_for_its_steps(name: str, tiny: Tiny, tmp_path: Path, taken: list[int]) -> None:
    scenario = tiny(
        *settings_for(choosing(name)),
        "topology.name=complete",
        "rounds=3000",
        "evaluation.every=3000",
        QUICK,
    )
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    join_late(peers, 20)
    assert bool(peers[3].state.rows["x"].isfinite().all())
    check_ledgers(tmp_path, taken, 2)
    if name in PUSH:
        check_weight(tmp_path)


def await_round(peer: RunningPeer, round_index: int) -> None:
    wait_until(lambda: peer.state.round_index >= round_index)


def await_without(peer: RunningPeer, neighbor: int) -> None:
    """Wait until a peer has found out that a neighbour does not come, and goes on for a while."""
    wait_until(lambda: neighbor not in peer.policy.on_time)  # type: ignore[attr-defined]
    await_round(peer, peer.state.round_index + 20)
    assert neighbor not in peer.policy.on_time  # type: ignore[attr-defined]


@pytest.mark.parametrize("graph", ["directed-ring", "ring"])
def test_an_absent_neighbour_is_noticed_and_left_behind(graph: str, tiny: Tiny, tmp_path: Path) -> None:
    """It is held up until the others have found it out, and gone on; how fast they do is `test_punctuality`'s."""
    free = "network.lead=null"  # or the others would wait for it, which is up
    scenario = tiny(STILL, f"topology.name={graph}", "rounds=30000", QUICK, "evaluation.every=30000", free)
    peers, go_on = (
        [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=graph == "ring")],
        Event(),
    )
    peers[2]._before = holding(peers[2]._before, lambda: peers[2].state.round_index == 0 or go_on.wait(LONG))  # type: ignore
    with running(peers) as futures:
        try:
            if graph == "ring":
                for j in (1, 3):
                    await_without(peers[j], 2)
                await_round(peers[1], 25)
            else:  # peer 1 only sends to it; the others run out of weight without what it would send
                wait_until(lambda: 2 not in peers[1].policy.on_time)  # type: ignore[attr-defined]
            assert peers[2].state.round_index <= 1
        finally:
            go_on.set()
        stop_all(peers, futures)
