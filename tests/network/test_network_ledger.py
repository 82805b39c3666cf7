"""Peers of a network and their ledgers, seen from outside: nothing leaves that is not on disk as paid, always.

The observer stands at the one door from examples to messages, and at every release reads that peer's ledger from disk.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_scenario import Tiny
from variants import VARIANTS, modes_in_turn, settings_for

pytest.importorskip("grpc")

from networked import LONG, Killed, devices, finish, go_on, mortal, running, trainer_of
from raising import raises

from flower_privdec.common.errors import BudgetError
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.driving import Program
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.trainer import rows_path
from flower_privdec.privacy.ledger.segments import EMPTY_HASH, Entry, chained, read_chain
from flower_privdec.scenario import Scenario
from tools.mass_on_disk import mass_on_disk

MODES = ["synchronous", "asynchronous"]
UNFIT = ("scaffold", "local", "dp-sgd")  # which need a server, or no network
TOGETHER = [each for each in VARIANTS if each[0].removeprefix("algorithm.name=") not in UNFIT]


def quick(mode: str) -> str:
    """Return settings of a network in which no deadline ends a wait between peers that are there."""
    return f"network={{mode: {mode}, links: local, deadline: {LONG}, final_mixing: 0}}"


def ledger_of(folder: Path) -> Path:
    (found,) = (folder / "ledger").glob("*.jsonl")
    return found


def payments_of(folder: Path) -> list[Entry]:
    return read_chain(ledger_of(folder))[1] if ledger_of(folder).stat().st_size else []


class Observer:
    """Counts the steps that peers were seen to take, by every life of their processes.

    Attributes:
        steps: of each peer, the (life, step) of which something was released.
        unpaid: what was released before it was on disk as paid.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.unpaid = root, list[str]()
        self.steps: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self._lives: list[Cohort] = []  # kept, so that none takes the place of another

    def see(self, cohort: Cohort, step: PrivateStep) -> None:
        """Look at a release that is about to be made."""
        (peer,) = set(step.peers.tolist())
        if cohort not in self._lives:
            self._lives.append(cohort)
        self.steps[peer].add((self._lives.index(cohort), step.step))
        paid = sum(each.to_step - each.from_step for each in payments_of(self.root / f"peer-{peer}"))
        if paid < len(self.steps[peer]):
            self.unpaid.append(f"peer {peer}: {paid} steps paid, {len(self.steps[peer])} taken")


@pytest.fixture
def observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    watching, release = Observer(tmp_path), Cohort.add_noise_
    monkeypatch.setattr(Cohort, "__eq__", lambda one, other: one is other)

    def watched(cohort: Cohort, step: PrivateStep) -> None:
        watching.see(cohort, step)
        release(cohort, step)

    monkeypatch.setattr(Cohort, "add_noise_", watched)
    yield watching
    assert not watching.unpaid


POINTS = [(name, when) for name in ("_save", "await_neighbours", "trainer.evaluate") for when in ("before", "after")]
POINTS.append(("_leave", "before"))


def run_with_a_death(
    scenario: Scenario, theirs: list[PeerDevice], point: tuple[str, str], moment: int
) -> tuple[bool, list[RunningPeer]]:
    """Run all peers; peer 1 dies at a point, where it comes there, and goes on.

    Returns:
        Whether it died, and the peers at their ends.
    """
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], point, moment)
    with running(peers) as futures:
        died = isinstance(futures[1].exception(LONG), Killed)
        if died:
            peers[1] = running_peer(scenario, theirs[1])
            go_on(peers[1], futures[:1] + futures[2:])
        for each in futures[:1] + futures[2:]:
            each.result(LONG)
    return died, peers


def check_ends(peers: list[RunningPeer], theirs: list[PeerDevice]) -> None:
    """Check models, ε and weights of peers that are done, of which peer 1 died once."""
    rounds, algorithm = trainer_of(peers[0]).experiment.scenario.rounds, trainer_of(peers[0]).experiment.algorithm
    for peer in peers:
        assert peer.state.round_index == peer.end
        assert bool(algorithm.debiased(peer.state.rows).isfinite().all())
    for peer in peers[:1] + peers[2:]:
        planned = trainer_of(peer).experiment.own.protection
        if trainer_of(peer).cohort.ledger is not None and planned is not None:
            assert peer.status()["epsilon"] == pytest.approx(planned.epsilons(rounds)[0])
    if "w" in peers[0].state.rows and trainer_of(peers[0]).experiment.scenario.network.mode == "asynchronous":
        first = [
            trainer_of(peer).experiment.initial_state(trainer_of(peer).cohort).rows["w"].double().sum()
            for peer in peers
        ]
        total = mass_on_disk([device.folder for device in theirs])["w"]
        assert float(total) == pytest.approx(float(sum(first)), rel=1e-12)


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        pytest.param(number, mode, id=f"{' '.join(variant)}-{mode}")
        for number, (variant, mode) in enumerate(modes_in_turn(TOGETHER, 1))
    ],
)
def test_nothing_leaves_before_it_is_paid_for(
    number: int, mode: str, tiny: Tiny, tmp_path: Path, observer: Observer
) -> None:
    """Every algorithm, with a peer that is killed somewhere: each record is of one step, and none is missing.

    All come to their ends with finite models, the others with the ε that was planned, and no weight is lost.
    """
    scenario = tiny(*settings_for(*TOGETHER[number]), "rounds=3", "evaluation.every=2", quick(mode))
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=number % 4 > 0)
    died, peers = run_with_a_death(scenario, theirs, POINTS[number % len(POINTS)], 1)
    assert died
    check_ends(peers, theirs)
    for peer in range(scenario.n_peers):
        found = payments_of(theirs[peer].folder)
        assert {payment.to_step - payment.from_step for payment in found} <= {1}
        assert len(found) >= len(observer.steps[peer])
        assert len(found) <= len(observer.steps[peer]) + (peer == 1)  # the step during which it died
    assert sum(map(len, observer.steps.values())) > 0


MOMENTS = [("synchronous", 1), ("synchronous", 2), ("asynchronous", 2)]


@pytest.mark.parametrize(
    ("point", "mode", "moment"),
    [(point, *MOMENTS[(number + turn) % 3]) for number, point in enumerate(POINTS) for turn in (0, 2)],
)
def test_no_moment_to_die_leaves_a_step_unpaid(
    point: tuple[str, str], moment: int, mode: str, tiny: Tiny, tmp_path: Path, observer: Observer
) -> None:
    scenario = tiny("rounds=4", "evaluation.every=2", quick(mode))
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=(mode, moment) != ("synchronous", 1))
    assert run_with_a_death(scenario, theirs, point, moment)[0] == (point[0] != "_leave" or moment == 1)
    for peer in range(4):
        assert len(payments_of(theirs[peer].folder)) >= len(observer.steps[peer]) >= 3


@pytest.mark.parametrize(("mode", "algorithm"), [("synchronous", "privsgp"), ("asynchronous", "d-psgd")])
def test_final_mixing_charges_no_step_even_after_a_death(
    mode: str, algorithm: str, tiny: Tiny, tmp_path: Path, observer: Observer
) -> None:
    scenario = tiny("rounds=3", quick(mode).replace(", final_mixing: 0", ""), f"algorithm.name={algorithm}")
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mix = peers[1]._mix_finally

    def dying() -> Program[None]:  # once its first round of final mixing is on disk
        peers[1]._mix_finally = mix  # type: ignore[method-assign]
        mortal(peers[1], ("_save", "after"), 1)
        return mix()

    peers[1]._mix_finally = dying  # type: ignore[method-assign]
    with running(peers) as futures:
        assert isinstance(futures[1].exception(LONG), Killed)
        peers[1] = running_peer(scenario, theirs[1])
        go_on(peers[1], futures[:1] + futures[2:])
    check_ends(peers, theirs)
    assert peers[0].final > 0
    assert [peer.shortcoming() for peer in peers] == [None] * 4
    for peer in range(4):
        assert sum(entry.to_step - entry.from_step for entry in payments_of(theirs[peer].folder)) == 3
        assert len(observer.steps[peer]) == 3


# --- a ledger that is not what it was


@pytest.fixture(scope="module", params=MODES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a scenario, peer 0's device with its run that is over, and its ledger's lines."""
    from tiny_scenario import TINY

    from flower_privdec.scenario import parse_scenario

    root = tmp_path_factory.mktemp(request.param)
    scenario = parse_scenario(TINY, overrides=["rounds=3", quick(request.param)])
    theirs = devices(scenario, root, insecure_seeds=False)
    peers = [running_peer(scenario, device) for device in theirs]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    return scenario, theirs[0], ledger_of(theirs[0].folder).read_bytes().splitlines(keepends=True)


def forked(lines: list[bytes], path: Path) -> bytes:
    """Return a chain of the same length that holds together, whose last payment was another."""
    bodies = [payment.to_json() for payment in read_chain(path)[1]]
    bodies[-1]["charges"] = bodies[-1]["charges"][:0]
    header = json.loads(lines[0])
    del header["hash"]
    said, _ = chained([header, *bodies], (0, EMPTY_HASH))
    assert said.count(b"\n") == len(lines)
    return said


# What is left of a ledger, and the code of the error.
DAMAGE: dict[str, tuple[Callable[[list[bytes], Path], bytes | None], str]] = {
    "truncated": (lambda lines, path: b"".join(lines[:-1]), "ledger.stale"),
    "cut within a line": (lambda lines, path: b"".join(lines)[:-20], "ledger.stale"),
    "emptied": (lambda lines, path: b"", "ledger.stale"),
    "deleted": (lambda lines, path: None, "ledger.stale"),
    "forked": (forked, "ledger.stale"),
    "edited": (lambda lines, path: b"".join(lines).replace(b'"from_step":1', b'"from_step":2', 1), "ledger.damaged"),
    "a line taken out": (lambda lines, path: b"".join([*lines[:2], *lines[3:]]), "ledger.damaged"),
    "written twice": (lambda lines, path: b"".join([*lines, lines[-1]]), "ledger.damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_ledger_with_losses_stops_its_peer(damage: str, finished: Any, tmp_path: Path) -> None:
    scenario, device, lines = finished
    device = replace(device, folder=Path(shutil.copytree(device.folder, tmp_path / "peer-0")))
    path, (make, code) = ledger_of(device.folder), DAMAGE[damage]
    content = make(lines, path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with raises(BudgetError, code, names=str(path)):
        running_peer(scenario, device)
    if content is None:
        path.unlink(missing_ok=True)  # what was opened anew
    path.write_bytes(b"".join(lines))
    running_peer(scenario, device).close()  # the true one is taken again


def test_a_ledger_is_one_processes_at_a_time(finished: Any, tmp_path: Path) -> None:
    scenario, device, _ = finished
    shared = scenario.model_copy(
        update={"privacy": scenario.privacy.model_copy(update={"ledger": str(tmp_path / "ledger")})}
    )
    one = running_peer(shared, replace(device, folder=tmp_path / "one"))
    with raises(BudgetError, "ledger.in-use"):
        running_peer(shared, replace(device, folder=tmp_path / "other"))
    one.close()


# --- the end of a budget


@pytest.mark.parametrize("mode", MODES)
def test_a_spent_peer_relays_without_gradients(mode: str, tiny: Tiny, tmp_path: Path, observer: Observer) -> None:
    """Peer 1 may take two steps of six; the others take all, and its model goes on moving with theirs."""
    given = "privacy={epsilon: [9.0, 2.0, 9.0, 9.0], noise_multiplier: 1.0, delta: 1.0e-3}"
    scenario = tiny(given, "rounds=6", "evaluation.every=1", quick(mode))
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    taken = [len(observer.steps[peer]) for peer in range(4)]
    assert taken[0] == taken[2] == taken[3] == 6
    assert 0 < taken[1] < 5
    status = peers[1].status()
    assert status["round"] == 6
    assert 0 < status["epsilon"] <= status["budget"] == 2.0
    assert len(payments_of(theirs[1].folder)) == taken[1]
    models = [load_file(rows_path(theirs[1].folder, each))["x"] for each in range(taken[1] + 1, 7)]
    assert not all(torch.equal(one, other) for one, other in pairwise(models))
    peers_of_one = running_peer(scenario, theirs[1])  # and it may be started again, and takes no step
    assert not peers_of_one.trainer.is_active(5)
    peers_of_one.close()


def test_a_spent_ledger_allows_a_new_run_no_step(finished: Any, tmp_path: Path) -> None:
    scenario, device, _ = finished
    folder = Path(shutil.copytree(device.folder, tmp_path / "peer-0"))
    shared = scenario.model_copy(
        update={"privacy": scenario.privacy.model_copy(update={"ledger": str(folder / "ledger")})}
    )
    with raises(BudgetError, "ledger.spent-elsewhere", names="privacy.epsilon"):
        running_peer(shared, replace(device, folder=tmp_path / "new"))
