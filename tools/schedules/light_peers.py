"""Peers that are real but for what they train: a step moves x by a known amount and pays a line of a small ledger.

A network of them on a virtual clock costs a fraction of a second, so thousands of schedules can be tried, and all that
the laws ask about can be read off: each row counts what its peer has moved, each folder its ledger's lines, and the
home how many steps were ever drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from flower_privdec.common.errors import BudgetError
from flower_privdec.core import Algorithm, Exchange, Mix, State
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.graph.mixing import Mixing
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.member_graph import MemberGraph
from flower_privdec.peer.peer import PeerPlace, RunningPeer
from flower_privdec.peer.store import MemoryStore, full_disk
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.times import Times
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.pushsum.membership import MemberList
from flower_privdec.scenario import Scenario, parse_scenario

MODES: dict[str, type[RunningPeer]] = {"asynchronous": AsynchronousPeer, "synchronous": SynchronousPeer}
RUN = RunName("light", "light", "light")
WIDE = 3  # numbers of a model
SHORT = 15.0  # seconds of the longest wait at the start: virtual time is free, events are not


def move(cohort: Any, state: State) -> None:
    """Take a private step: pay, and move x by a known amount."""
    cohort.step(state)


class LightPush(Algorithm):
    """Push-sum of a known step."""

    name = "sgp"
    weights = "column-stochastic"
    program = (move, Mix(("x", "w")))
    open_rows = ("x", "w")


class LightGossip(Algorithm):
    """Gossip of a known step."""

    name = "d-psgd"
    weights = "doubly-stochastic"
    program = (move, Mix(("x",)))
    open_rows = ("x",)


KINDS: dict[str, type[Algorithm]] = {"push-sum": LightPush, "gossip": LightGossip}


@lru_cache(maxsize=64)
def scenario_of(
    kind: str, mode: Literal["asynchronous", "synchronous"], n_peers: int, rounds: int, graph: str, network: str
) -> tuple[Scenario, Algorithm, Mixing]:
    """Return a scenario of a network, its algorithm and its mixing.

    Args:
        kind: push-sum or gossip.
        graph: the topology section, as YAML.
        network: further keys of the network section, as YAML.
    """
    algorithm = "sgp" if kind == "push-sum" else "d-psgd"
    text = f"""\
name: light
n_peers: {n_peers}
rounds: {rounds}
data: {{dataset: digits, batch: {{size: 12}}}}
model: {{name: softmax}}
algorithm: {{name: {algorithm}, learning_rate: 0.5}}
privacy: none
topology: {graph}
evaluation: {{every: 5}}
compute: {{dtype: float64}}
network: {{mode: {mode}, {network}}}
"""

    scenario = parse_scenario(text)
    built = KINDS[kind](scenario.algorithm)
    mixing, _ = build_exchange(scenario, built)
    assert mixing is not None
    return scenario, built, mixing


@dataclass
class LightLedger:
    """The lines of a peer's ledger, by the process that wrote them.

    Attributes:
        lines: by boot.
        boot: the process that writes now.
        is_full: whether nothing can be written.
    """

    path: ClassVar[Path] = Path("ledger")
    lines: dict[int, int] = field(default_factory=dict)
    boot: int = 0
    is_full: bool = False

    @property
    def charged(self) -> int:
        """Return how many steps are paid for."""
        return sum(self.lines.values())

    def name_lines(self, boot: int) -> None:
        """Name the process in each line from now on."""
        self.boot = boot

    def charge(self) -> None:
        """Pay for a step."""
        if self.is_full:
            raise full_disk()
        self.lines = {**self.lines, self.boot: self.lines.get(self.boot, 0) + 1}

    def lacks(self, witnessed: Mapping[int, int]) -> int:
        """Return how many of the lines that neighbours have seen are not here."""
        return sum(max(0, lines - self.lines.get(boot, 0)) for boot, lines in witnessed.items())

    def check_witnessed(self, witnessed: Mapping[int, int]) -> None:
        """See Ledger."""
        missing = self.lacks(witnessed)
        if missing:
            raise BudgetError(f"lacks {missing} lines that a neighbour has seen", code="ledger.witnessed")

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        """Charge the lines that are missing."""
        missing = self.lacks(witnessed)
        if missing and self.is_full:
            raise full_disk()
        both = self.lines.keys() | witnessed.keys()
        self.lines = {boot: max(self.lines.get(boot, 0), witnessed.get(boot, 0)) for boot in both}
        return missing


class LightDisk:
    """A folder: a store and a ledger.

    Attributes:
        is_original: whether it was never put back from a copy, and never lost.
    """

    def __init__(self, store: MemoryStore, ledger: LightLedger, is_original: bool = True) -> None:
        self.store = store
        self.ledger = ledger
        self.is_original = is_original

    def copy(self) -> LightDisk:
        """Return a backup."""
        return LightDisk(self.store.copy(), LightLedger(dict(self.ledger.lines)), is_original=False)

    def fill(self, is_full: bool) -> None:
        """See Disk."""
        self.store.is_full = is_full
        self.ledger.is_full = is_full


class LightTrainer:
    """What a light peer trains: see Trainer."""

    run = RUN
    device = torch.device("cpu")
    constants = ""
    pair_secrets = None
    pair_plan = None

    def __init__(self, home: LightHome, peer: int, disk: LightDisk) -> None:
        self.scenario = home.scenario
        self.algorithm = home.algorithm
        self.mixing = home.mixing
        self.steps_taken = 0
        self._home = home
        self._peer = peer
        self._disk = disk

    @property
    def witnessed_ledger(self) -> Any:
        return self._disk.ledger

    def reserve(self) -> tuple[int, Any]:
        return self._disk.ledger.charged, None

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        return self._disk.ledger.charge_witnessed(witnessed)

    def charge_confirmed(self, confirmed: Mapping[int, int], reported: Mapping[int, int]) -> int:
        raise NotImplementedError  # these peers charge all that is missing

    def open(self, state: State | None, paid: int, head: Any) -> State:
        if state is not None:
            return state
        rows = {"x": torch.zeros(1, WIDE, dtype=torch.float64), "moved": torch.zeros(1, 1, dtype=torch.float64)}
        if self._home.kind == "push-sum":
            rows["w"] = torch.ones(1, dtype=torch.float64)
        return State(np.array([self._peer]), rows=rows)

    def use_mixing(self, mixing: Mixing) -> None:
        """Nothing here depends on it."""

    def step(self, state: State) -> None:
        """Pay, draw and move: by another amount if a step is taken again, as new noise would."""
        self._pay()
        self._home.draws(self._peer, self._disk)
        self.steps_taken += 1
        amount = 1.0 + self._peer + self._home.drawn[self._peer] / 7
        state.rows["x"] += amount
        state.rows["moved"] += amount

    def _pay(self) -> None:
        self._disk.ledger.charge()

    def advance(self, state: State) -> Exchange | None:
        program = self.algorithm.program
        while state.at < len(program):
            item = program[state.at]
            if isinstance(item, Exchange):
                state.waiting = True
                return item
            item(self, state)  # type: ignore[arg-type]
            state.at += 1
        state.at = 0
        state.round_index += 1
        return None

    def is_active(self, round_index: int) -> bool:
        return True

    def evaluate(self, state: State) -> None:
        """Nothing is evaluated."""

    def status(self, state: State) -> dict[str, Any]:
        return {"loss": None, "epsilon": None, "budget": None, "noise": "none"}

    def finish(self, state: State) -> None:
        """Nothing is saved."""

    def close(self) -> None:
        """Nothing is open."""


class LightHome:
    """Makes light peers; see Home.

    Args:
        kind: push-sum or gossip.
        mode, n_peers, rounds, graph, network: see `scenario_of`.

    Attributes:
        drawn: how many steps each peer has drawn in all its lives.
        on_draw: called at each draw with the peer, after it was paid.
    """

    def __init__(
        self,
        kind: str = "push-sum",
        mode: Literal["asynchronous", "synchronous"] = "asynchronous",
        n_peers: int = 4,
        rounds: int = 20,
        graph: str = "{name: directed-exponential}",
        network: str = "links: lan",
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.scenario, self.algorithm, self.mixing = scenario_of(kind, mode, n_peers, rounds, graph, network)
        self.drawn: Counter[int] = Counter()
        self.on_draw: Callable[[int, LightDisk], None] = lambda peer, disk: None

    def draws(self, peer: int, disk: LightDisk) -> None:
        """Record that a step was drawn."""
        self.drawn[peer] += 1
        self.on_draw(peer, disk)

    def empty(self, peer: int) -> LightDisk:
        """See Home."""
        return LightDisk(MemoryStore(MODES[self.mode].generations), LightLedger())

    def start(self, peer: int, disk: LightDisk, draw: Callable[[], int]) -> RunningPeer:
        """See Home."""
        return self.start_with(peer, disk, draw, None)

    def start_with(
        self, peer: int, disk: LightDisk, draw: Callable[[], int], members: MemberList | None
    ) -> RunningPeer:
        """Start a process that goes by a list of members."""
        times = replace(Times.of(self.scenario.network), start=SHORT, standstill=20 * SHORT)
        place = PeerPlace(peer, Path(f"peer-{peer}"), draw=draw, times=times, members=members)
        if members is not None and self.mode == "asynchronous":
            place = replace(place, graph=MemberGraph.of(self.scenario, self.mixing, members.members))
        return MODES[self.mode](LightTrainer(self, peer, disk), place, disk.store)
