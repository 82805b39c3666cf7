"""Peers of a tiny scenario as threads of one process, over real gRPC and TLS on this machine or by function calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from threading import Event
from typing import Any

import torch
from ports import own_addresses
from torch import Tensor

from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.tls import Authority, identities
from flower_privdec.network.transport.transport import MemoryNetwork
from flower_privdec.peer.driving import Program, Work
from flower_privdec.peer.peer import OnRound, RunningPeer
from flower_privdec.peer.trainer import ScenarioTrainer
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import AppScenario

LONG = 100.0  # seconds that nothing takes, however busy the machine is


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + LONG
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


def begin_without(peers: Iterable[RunningPeer], absent: int) -> None:
    """Let peers that nobody waits for begin once they have greeted all others but one, however long that takes."""
    for peer in peers:
        others = [j for j in peer.timetable.neighbours(peer.device.peer) if j != absent]
        peer._has_greeted = lambda since, peer=peer, others=others: all(map(peer.protocol.is_open, others))  # type: ignore[attr-defined]


def driver_of(peer: RunningPeer) -> Driver:
    """Return what runs a peer: the same one each time."""
    if "driver" not in vars(peer):
        vars(peer)["driver"] = Driver(peer)
    driver: Driver = vars(peer)["driver"]
    return driver


def holding(program: Callable[..., Program[Any]], held: Callable[[], object]) -> Callable[..., Program[Any]]:
    """Return a program of a peer that is held before it begins, while neighbours are answered."""

    def held_program(*arguments: Any, **options: Any) -> Program[Any]:
        yield Work("hold", held)
        return (yield from program(*arguments, **options))

    return held_program


def trainer_of(peer: RunningPeer) -> ScenarioTrainer:
    """Return what a peer of a scenario trains."""
    assert isinstance(peer.trainer, ScenarioTrainer)
    return peer.trainer


def devices(
    scenario: Scenario | AppScenario,
    folder: Path,
    *,
    insecure_seeds: bool = True,
    memory: bool = False,
    dials_out: Collection[int] | None = None,
) -> list[PeerDevice]:
    """Return a device for each peer, with a certificate of a new authority.

    Args:
        memory: let peers call each other's functions, which takes half the CPU; a law that takes it takes gRPC in
            some of its cases.
        dials_out: peers that nobody can dial; by default the last one, so that every law holds over streams that
            either side opened.
    """
    authority = Authority.create(scenario.name)
    network = MemoryNetwork()
    addresses: tuple[str | None, ...] = ()
    if not memory:
        nobody_dials = {scenario.n_peers - 1} if dials_out is None else dials_out
        places = own_addresses(scenario.n_peers)
        addresses = tuple(None if peer in nobody_dials else place for peer, place in enumerate(places))
    return [
        PeerDevice(
            peer,
            folder / f"peer-{peer}",
            authority.issue(name),
            addresses,
            insecure_seeds=insecure_seeds,
            transport=network.transport(peer) if memory else None,
        )
        for peer, name in enumerate(identities(scenario))
    ]


def finish(peer: RunningPeer, on_round: OnRound | None = None) -> dict[str, Tensor]:
    """Run one peer to the end and return its rows."""
    driver = driver_of(peer)
    try:
        driver.open()
        driver.run(on_round)
        return peer.state.rows
    finally:
        driver.close()


def run_network(scenario: Scenario, folder: Path, *, memory: bool = False) -> dict[str, Tensor]:
    """Run all peers of a scenario and return their rows, stacked.

    They are built one after the other, for models are drawn by the generator that a process has once.
    """
    peers = [running_peer(scenario, device) for device in devices(scenario, folder, memory=memory)]
    with ThreadPoolExecutor(len(peers)) as pool:
        rows = list(pool.map(finish, peers))
    return {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


class Killed(BaseException):
    """What nothing catches."""


def mortal(peer: RunningPeer, point: tuple[str, str], moment: int) -> None:
    """Make a peer die "before" or "after" a method of its own or of its parts, at the moment-th call."""
    path, when = point
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, peer)
    method, left = getattr(owner, name), [moment]

    def dying(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            raise Killed
        found = method(*arguments, **options)
        if isinstance(found, Generator):
            return then_dying(found, left[0] == 0)
        if left[0] == 0:
            raise Killed
        return found

    def then_dying(program: Program[Any], is_last: bool) -> Program[Any]:
        result = yield from program
        if is_last:
            raise Killed
        return result

    setattr(owner, name, dying)


@contextmanager
def running(peers: list[RunningPeer]) -> Iterator[list[Future[Any]]]:
    """Run peers to their ends; stop them where the test fails."""
    with ThreadPoolExecutor(len(peers)) as pool:
        try:
            yield [pool.submit(finish, peer) for peer in peers]
        except BaseException:
            for peer in peers:
                peer.stop()
            raise


def go_on(peer: RunningPeer, others: Iterable[Future[Any]]) -> dict[str, Tensor]:
    """Run a peer that was started again to its end and return its rows.

    Where the others were done and have left, it need not wait for them as long as a deadline.
    """
    leaving = Event()
    peer._leave = holding(peer._leave, leaving.set)  # type: ignore[method-assign]
    with running([peer]) as (future,):
        for other in others:
            other.result(LONG)
        wait_until(lambda: leaving.is_set() or future.done())
        peer.stop()
        rows: dict[str, Tensor] = future.result(LONG)
        return rows
