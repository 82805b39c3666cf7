"""A case of the search: a network and what goes wrong in it, both drawn from a seed; and how a failure is shrunk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.faults import HONEST, FaultSchedule, Lose, Restore
from flower_privdec.peer.laws import Laws
from flower_privdec.peer.mass_law import BrokenLawError
from flower_privdec.peer.memory_trainer import MemoryHome
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.virtual_network import VirtualNetwork
from tools.schedules import whole_peers
from tools.schedules.light_peers import LightDisk, LightHome
from tools.schedules.noise_audit import ShortNoiseError, audited

MOST_EVENTS = 100_000  # of a case, and so many more for each link and second; beyond that it does not end
EVENTS_OF_A_LINK = 100  # a second: ten calls at most, of some events each
SECONDS = 12.0  # in which faults begin
DIRECTED = [
    "{name: directed-ring}",
    "{name: directed-exponential}",
    "{name: complete}",
    "{name: ring}",
    "{name: random-edges, edges: 2}",
]
UNDIRECTED = ["{name: ring}", "{name: complete}", "{name: star}", "{name: bipartite}", "{name: random-edges, edges: 2}"]


@dataclass(frozen=True)
class Case:
    """A network and its faults.

    Attributes:
        seed: it was drawn from.
        kind, mode, n_peers, rounds, graph, network: see `LightHome`.
        schedule: what goes wrong.
        settings: what whole peers have, see `whole_peers`; None for light ones.
        clean: whether every fault passes and no folder is put back or lost, so that all peers must come to their end.
        options: of the command that draws it, beside the seed.
    """

    seed: int
    kind: str
    mode: Literal["asynchronous", "synchronous"]
    n_peers: int
    rounds: int
    graph: str
    network: str
    schedule: FaultSchedule
    clean: bool
    options: str = ""
    settings: tuple[str, ...] | None = None

    @classmethod
    def whole(cls, seed: int) -> Case:
        """Draw a case of whole peers; members may lie in it if their models are judged."""
        draw = Random(f"whole case {seed}")
        settings = whole_peers.settings_of(seed)
        mode: Literal["asynchronous", "synchronous"] = draw.choice(["asynchronous", "synchronous"])
        n_peers = draw.choice([4, 4, 5, 6])
        graph = draw.choice(["{name: complete}", "{name: directed-exponential}"])

        kinds = HONEST
        clean = draw.random() < 0.4
        if clean:
            kinds = tuple(name for name in HONEST if name not in ("restore", "lose"))
        elif any("robust" in setting for setting in settings):
            kinds = (*HONEST, "lie", "lie")
        if kinds is not HONEST and "lie" in kinds:
            graph = "{name: complete}"
        schedule = FaultSchedule.drawn(seed, n_peers, SECONDS / 2, most=4, kinds=kinds)
        if mode == "synchronous" and schedule.links.loss > 0.02:
            schedule = schedule.model_copy(update={"links": schedule.links.model_copy(update={"loss": 0.02})})
        return cls(
            seed=seed,
            kind="whole",
            mode=mode,
            n_peers=n_peers,
            rounds=draw.choice([4, 8, 12]),
            graph=graph,
            network=f"links: lan, deadline: {draw.choice([2.0, 10.0])}, final_mixing: {draw.choice([0, 2])}",
            schedule=schedule,
            clean=clean,
            options=" --whole",
            settings=settings,
        )

    @classmethod
    def drawn(cls, seed: int, only: Literal["asynchronous", "synchronous"] | None = None) -> Case:
        """Draw a case.

        Args:
            only: the mode of all cases; by default every fifth is synchronous.
        """
        draw = Random(f"case {seed}")
        kind = draw.choice(["push-sum", "push-sum", "gossip"])
        mode: Literal["asynchronous", "synchronous"] = "synchronous" if draw.random() < 0.2 else "asynchronous"
        if only is not None:
            mode = only
        n_peers = draw.choice([2, 3, 3, 4, 4, 4, 5, 6, 8, 10])
        graphs = UNDIRECTED if kind == "gossip" else DIRECTED + UNDIRECTED
        graph = draw.choice(graphs)
        if "random-edges" in graph and n_peers < 4:
            graph = "{name: complete}"
        if "ring" in graph and n_peers < 3:
            graph = "{name: complete}"

        # Drawn apart, so that a seed's case stays what it was otherwise.
        mixing_steps = Random(f"steps {seed}").choice([1, 1, 2, 3])
        graph = graph.replace("}", f", mixing_steps: {mixing_steps}}}")

        keys = ["links: " + draw.choice(["local", "lan", "lan", "lan"]), f"deadline: {draw.choice([2.0, 10.0])}"]
        if mode == "asynchronous":
            keys.append(f"commit_every: {draw.choice([1, 1, 1, 2, 3])}")
            keys.append(f"quorum: {draw.choice([1, 1, 2])}")
            keys.append(f"lead: {draw.choice([1, 4, 4, 'null'])}")
            keys.append("alone: " + draw.choice(["wait", "wait", "wait", "go-on"]))
        keys.append(f"final_mixing: {draw.choice(['auto', 0, 2, 2])}")

        clean = draw.random() < 0.4
        kinds = HONEST
        if clean:
            kinds = tuple(name for name in HONEST if name not in ("restore", "lose"))
        lasting = not clean and draw.random() < 0.5
        schedule = FaultSchedule.drawn(seed, n_peers, SECONDS, kinds=kinds, lasting=lasting)
        if mode == "synchronous" and schedule.links.loss > 0.02:
            schedule = schedule.model_copy(update={"links": schedule.links.model_copy(update={"loss": 0.02})})
        return cls(
            seed=seed,
            kind=kind,
            mode=mode,
            n_peers=n_peers,
            rounds=draw.choice([2, 4, 8, 16]),
            graph=graph,
            network=", ".join(keys),
            schedule=schedule,
            clean=clean,
            options=f" --mode {only}" if only else "",
        )

    @property
    def command(self) -> str:
        """Return what repeats it."""
        return f"python -m tools.schedules --seeds {self.seed}{self.options}"


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        broken: the law that did not hold, as `code: message`; "" if all did.
        events, faults, named: what happened, counted; see Laws.
        seconds: of CPU.
        virtual: of the virtual clock.
        ends: of the peers, by code.
    """

    broken: str = ""
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    virtual: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    network: VirtualNetwork | None = None

    @property
    def law(self) -> str:
        """Return the code of the broken law."""
        return self.broken.partition(":")[0]


def run(case: Case) -> Outcome:
    """Run a case under all laws."""
    if case.settings is not None:
        return _run_whole(case)
    home = LightHome(case.kind, case.mode, case.n_peers, case.rounds, case.graph, case.network)
    return _run(case, home, Laws(_moved))


def _run_whole(case: Case) -> Outcome:
    """Run a case of whole peers; of their mass only the weights are watched, for steps and codecs change x."""
    settings = case.settings or ()
    scenario = whole_peers.scenario_of(settings, case.mode, case.n_peers, case.rounds, case.graph, case.network)
    home = whole_peers.home_of(scenario)
    if not any("cancelling" in setting for setting in settings):
        with _no_warnings():
            return _run(case, home, Laws())

    with audited() as audit, _no_warnings():
        outcome = _run(case, home, Laws())
    try:
        audit.check(whole_peers.COLLUDING)
    except ShortNoiseError as error:
        outcome.broken = outcome.broken or f"law.noise: {error}"
    return outcome


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Let peers not warn of faults, which are meant here."""
    logger = logging.getLogger("flower_privdec")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _run(case: Case, home: LightHome | MemoryHome, laws: Laws) -> Outcome:
    began = time.process_time()
    outcome = Outcome()

    def watch(network: VirtualNetwork) -> None:
        laws(network)
        links = case.n_peers * (case.n_peers - 1)
        most = MOST_EVENTS + EVENTS_OF_A_LINK * links * network.now
        if network.events > most:
            raise BrokenLawError(f"more than {most:.0f} events", code="law.bounded")

    network = VirtualNetwork(home, range(case.n_peers), case.schedule, watch)
    outcome.network = network

    if isinstance(home, LightHome):
        light = home

        def on_draw(peer: int, disk: LightDisk) -> None:
            _check_paid(light, network, peer, disk)

        home.on_draw = on_draw
    try:
        network.run()
        _check_end(case, network)
    except BrokenLawError as error:
        outcome.broken = f"{error.code}: {error}"
    except Exception as error:  # whatever a peer's process would die of without a line
        outcome.broken = f"law.crash: {type(error).__name__}: {error}"
    finally:
        network.close()
    outcome.events = network.events
    outcome.faults = network.faults
    outcome.named = laws.named
    outcome.virtual = network.now
    outcome.seconds = time.process_time() - began
    for end in network.ends.values():
        outcome.ends["done" if end is None else (getattr(end, "code", "") or type(end).__name__)] += 1
    return outcome


def _moved(checkpoint: Checkpoint) -> float:
    rows = checkpoint.state.rows
    return float(rows["moved"].sum()) * rows["x"].shape[-1]


def _check_paid(home: LightHome, network: VirtualNetwork, peer: int, disk: LightDisk) -> None:
    """Check that a step that is drawn now is paid for, and so is all that a neighbour has seen, as far as it told."""
    ledger = disk.ledger
    if disk.is_original and ledger.charged < home.drawn[peer]:
        raise BrokenLawError(
            f"peer {peer} has drawn {home.drawn[peer]} steps and paid {ledger.charged}", code="law.paid"
        )
    process = network.machines[peer].process
    assert process is not None
    witness = process.peer.witness
    heard = [j for j in witness.neighbors if witness.has_heard(j)]
    if witness.neighbors and not heard:
        raise BrokenLawError(f"peer {peer} takes a step before any neighbour reported", code="law.paid")
    for neighbor in heard:
        told = witness._reported.get(neighbor, {})
        if ledger.lacks(told):
            raise BrokenLawError(
                f"peer {peer} takes a step with a ledger that lacks {ledger.lacks(told)} lines of which peer "
                f"{neighbor} has told it",
                code="law.paid",
            )


FINE = {  # ends that a fault can lead to, each of which says why
    "network.not-agreed",
    "network.silent",
    "network.unreachable",
    "network.standstill",
    "network.no-witness",
    "network.refused",
    "lockstep.stale",
    "ledger.witnessed",
    "virtual.killed",
}


def _check_end(case: Case, network: VirtualNetwork) -> None:
    """Check what must be so once all peers have ended."""
    for peer, end in network.ends.items():
        code = getattr(end, "code", "")
        if end is None:
            continue
        # What was put back or lost is charged again, and may use up a budget.
        puts_back = any(getattr(fault, "peer", None) == peer for fault in case.schedule.faults if _puts_back(fault))
        if puts_back and code == "ledger.spent-elsewhere":
            continue
        is_disk = any(fault.kind == "full-disk" for fault in case.schedule.faults) and isinstance(end, OSError)
        was_left = code == "network.standstill" and _have_left(network, peer)
        if case.clean and not is_disk and not was_left and code != "network.silent":
            raise BrokenLawError(f"peer {peer} did not come to its end: {code} {end}", code="law.clean")
        if not is_disk and code not in FINE:
            raise BrokenLawError(f"peer {peer} ended by {type(end).__name__} {code}: {end}", code="law.ends")


def _puts_back(fault: Any) -> bool:
    return isinstance(fault, Restore | Lose)


def _have_left(network: VirtualNetwork, peer: int) -> bool:
    """Return whether all neighbours of a peer had ended before it did: it was away for longer than they wait.

    If peers wait for each other, one that has left stops all, also those that still wait by a clock that goes slowly.
    """
    if isinstance(network.peers[peer], SynchronousPeer):
        return any(getattr(end, "code", "") == "network.silent" for end in network.ends.values())
    ended_at = network.machines[peer].ended_at or 0.0
    others = [network.machines[j] for j in network.peers[peer].neighbours]
    return all((one.ended_at or 0.0) <= ended_at for one in others)


def shrink(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """Return a smaller case that breaks the same law: with fewer faults, plain links, fewer rounds."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(case):
            found = run(candidate)
            if found.law == outcome.law:
                case = candidate
                outcome = found
                is_smaller = True
                break
    return case, outcome


def _smaller(case: Case) -> Iterator[Case]:
    schedule = case.schedule
    for number in range(len(schedule.faults)):
        yield replace(case, schedule=schedule.without(number))
    links = schedule.links
    plain: dict[str, Any] = {"loss": 0.0, "duplicates": 0.0, "jitter": 0.0, "bandwidth": None}
    for name, value in plain.items():
        if getattr(links, name) != value:
            changed = links.model_copy(update={name: value})
            yield replace(case, schedule=schedule.model_copy(update={"links": changed}))
    for rounds in sorted({case.rounds // 2, case.rounds - 1}):
        if 1 <= rounds < case.rounds:
            yield replace(case, rounds=rounds)
