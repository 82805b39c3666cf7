"""A relayed peer's state of one run, in memory and in its folder.

The state is the model's mass (x, w) with its shares (`PushSumProtocol`). Each message of a run is answered by a process
of its own, in the protocol's words: it restores the state, absorbs the shares that came, trains, splits, and writes the
state before anything that follows from it leaves. The relay introduces the peers and holds what it carries only in
memory; what it has not, senders hand in again. A state that is lost begins a later life, with x = 0 and w = 0: it
trains when its first share has come. A state that is restored from an older copy is noticed by the acknowledgements of
what it no longer remembers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.common.files import open_file, write_atomically
from flower_privdec.peer.app_model import AppModel, Layout, mass_of
from flower_privdec.peer.masking import Handed
from flower_privdec.peer.record_log import DamagedLogError, Facts, NamedArrays, RecordLog
from flower_privdec.pushsum.exactly_once import LAST, Durable, PushSumProtocol, RefusedError
from flower_privdec.pushsum.frames import FrameCodec, RowFormat, Seal, pack, unpack
from flower_privdec.pushsum.witness import draw_boot


class Cache(Protocol):
    """What the files of peers hold, in the memory of the one process that runs them all.

    Attributes:
        is_temporary: whether the folders are removed with the process, so that nothing has to be on disk.
    """

    is_temporary: bool

    def get(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return what a file holds, as `read` returns it if the entry is not of the file as it is."""

    def put(self, path: Path, value: Any) -> None:
        """Remember what a file holds as it is now."""


class ArrayArithmetic:
    """NumPy's rows, which leave as they are and are never written over; see `pushsum.exactly_once.Arithmetic`.

    So a row is its own copy, and costs nothing.
    """

    def part(self, value: np.ndarray, weight: float) -> np.ndarray:
        return np.asarray(value * weight)

    def subtract(self, value: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.asarray(value - part)

    def add(self, value: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.asarray(value + part)

    def nothing(self, value: np.ndarray) -> np.ndarray:
        return np.zeros_like(value)

    def copy(self, value: np.ndarray) -> np.ndarray:
        return value

    def same(self, value: np.ndarray, part: np.ndarray) -> bool:
        return value is part

    def fits(self, value: np.ndarray, part: np.ndarray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            total = value + part
            return math.isfinite(float(total.sum())) or bool(np.isfinite(total).all())


def protocol(
    peer: int, mass: dict[str, np.ndarray], incarnation: int, neighbors: Iterable[int] = ()
) -> PushSumProtocol[np.ndarray]:
    """Return a peer's side of its edges, which a relay introduces: any number of shares may be on their way."""
    boot = secrets.randbits(63) + 1
    return PushSumProtocol(peer, neighbors, boot, mass, ArrayArithmetic(), window=LAST, incarnation=incarnation)


@lru_cache(maxsize=256)
def run_frames(run: str, layout: Layout, seal: Seal | None = None) -> FrameCodec:
    """Return the codec of the shares of one run, of models of one layout."""
    rows = {
        "x": RowFormat((layout.size,), layout.dtype),
        "w": RowFormat((), np.dtype(np.float64), nonnegative=True),
    }
    return FrameCodec(json.dumps([run, layout.parts]).encode(), rows, seal=seal)


@dataclass(kw_only=True)
class PeerState(AppModel):
    """All that a peer has to remember of a run.

    Attributes:
        run: its name.
        shares: the mass (x, w), whose model is z = x / w, and the shares that are not acknowledged.
        round_index: the last round it took part in; 0 before the first.
        orphaned: how many shares went to states that were lost, before this start.
        handed: what it handed in for masked means.
        paid: how many lines of each process the peer's ledger held when it last paid; one that lacks some is not the
            same.
        idle: over a server, whether it took no step in its last round, and so has no part in that round's mean.
        local_arrays: of the record that never leaves the peer (`PeerRequest.local_record`); empty if there is none.
        adopted: over a server, the model that it sent last; empty if there is none.
        app_ledgers: δ, caveats and assumptions of each ledger of examples that the app's own training pays into.
        acknowledged: the frames of acknowledgements that this process has taken in. Not on disk.
    """

    peer: int = field(init=False)
    mass: MutableMapping[str, np.ndarray] = field(init=False)
    run: str
    shares: PushSumProtocol[np.ndarray]
    round_index: int = 0
    orphaned: int = 0
    handed: Handed = field(default_factory=Handed)
    paid: dict[int, int] = field(default_factory=dict)
    idle: bool = False
    local_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    adopted: dict[str, np.ndarray] = field(default_factory=dict)
    app_ledgers: dict[str, tuple[float, str, str]] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Let the model's mass be the one whose shares are sent."""
        self.peer = self.shares.peer
        self.mass = self.shares.mass

    @classmethod
    def begun(
        cls, run: str, peer: int, arrays: Mapping[str, np.ndarray], founding: bool, incarnation: int
    ) -> PeerState:
        """Return a state at the start: the arrays given with weight 1, or no mass at all for a peer that comes later.

        Args:
            incarnation: numbers the state; more than that of any state of this peer that was lost.

        Raises:
            RunError: the arrays are no model, or not finite.
        """
        layout = Layout.of(arrays)
        start = layout.vector(arrays)
        if not np.isfinite(start).all():
            raise RunError("initial_arrays are not finite: check how the model is made")
        x = start if founding else np.zeros_like(start)
        mass = mass_of(x.astype(layout.dtype), float(founding))
        shares = protocol(peer, mass, incarnation)
        return cls(layout=layout, unmixed=layout.unmixed(arrays), run=run, shares=shares)

    @classmethod
    def after_rounds(cls, model: AppModel, run: str, rounds: int, incarnation: int) -> PeerState:
        """Return the state of a peer whose rounds are done, with the model that came of them."""
        shares = protocol(model.peer, dict(model.mass), incarnation)
        return cls(
            layout=model.layout,
            unmixed=model.unmixed,
            unprotected=model.unprotected,
            run=run,
            shares=shares,
            round_index=rounds,
        )

    def adopt(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the mass by a server's model with weight 1.

        Raises:
            RunError: the peer exchanges shares in this run, or the arrays are not this model's, or not finite.
        """
        if any(edge.sent or edge.received for edge in self.shares.edges.values()):
            raise RunError(
                f"run {self.run!r} is over a graph, where no server's model may replace peer {self.peer}'s mass: give "
                "the run another name",
                code="flower.model-in-a-graph",
            )
        if difference := self.layout.misfit(arrays):
            raise RunError(f"the server's {difference}, as in peer {self.peer}'s model: build the same model")
        x = self.layout.vector(arrays)
        if not np.isfinite(x).all():
            raise RunError("the server's model is not finite: lower the learning rate")
        self.mass.update(mass_of(x.astype(self.layout.dtype), 1.0))
        self.adopted = dict(arrays)


def check_shares(weights: Mapping[int, float], others: set[int]) -> None:
    """Refuse weights that would leave a peer nothing, or more than it has, or go to no peer.

    Raises:
        RefusedError: naming them.
    """
    if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
        raise RefusedError(f"the weights {dict(weights)} must be > 0 with a sum < 1")
    if weights.keys() - others:
        raise RefusedError(f"shares for peers {sorted(weights.keys() - others)} must be for others that are there")


FORMAT = "flower-privdec-peer-8"
BOOT = "start"  # the file of a number that each introduction to a ServerApp draws anew
WITNESSED = "neighbour-ledgers"  # the file of the ledger lines that neighbours' starts have
WITNESSES = 4  # on either side, in the order of peers' numbers


def boot_of(folder: Path, renew: bool, cache: Cache) -> int:
    """Return the boot of a relayed peer, whose processes answer one message each; see `LedgerWitness`.

    Args:
        folder: the peer's.
        renew: whether to draw another one, as each introduction to a ServerApp does: after it a folder that was
            restored or copied writes lines of its own.
        cache: of the process.
    """
    path = folder / BOOT

    def begun() -> int:
        boot = draw_boot()
        write_atomically(path, str(boot).encode())
        return boot

    if renew:
        cache.put(path, begun())
    boot: int = cache.get(path, lambda: int(path.read_text()) if path.exists() else begun())
    return boot


def witnesses_of(peer: int, n_peers: int) -> set[int]:
    """Return the neighbours of a relayed peer's ledger: the nearest numbers around it, whatever the graph is."""
    return {(peer + step) % n_peers for step in range(-WITNESSES, WITNESSES + 1)} - {peer}


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other message is at work on a peer's folder, and hold it.

    Raises:
        RunError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_file(folder / ".lock", os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error.strerror}); give another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def state_path(folder: Path, run: str) -> Path:
    """Return where a run's state lies; a run's name is anybody's words, so it is only hashed."""
    return folder / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


@dataclass
class SavedState:
    """A state as it is on disk, or instead of it in memory.

    Attributes:
        log: the file that holds it.
        state: whose shares are those of the snapshot.
        snapshot: does not change.
        live: the same state, as the message that saved it went on with it to its end; None if it failed, or if the
            state was read.
    """

    log: RecordLog
    state: PeerState
    snapshot: Durable[np.ndarray]
    live: PeerState | None = None

    def taken(self, as_read: bool) -> PeerState:
        """Return the state for one message: as the last one left it, or as a process begins that has read it.

        Args:
            as_read: whether to begin as such a process in any case.
        """
        # What a message does to the live state counts once it has saved it.
        live = self.live
        self.live = None
        if live is not None and not as_read:
            return live

        snapshot = self.snapshot
        state = self.state
        shares = protocol(state.peer, dict(snapshot.mass), snapshot.incarnation, snapshot.edges)
        shares.restore(snapshot)
        return replace(state, shares=shares, acknowledged=set())


def save_state(log: RecordLog, state: PeerState, *, durable: bool = True, in_memory: bool = False) -> SavedState:
    """Save a state, whole or not at all; then its new shares and acknowledgements may leave.

    Args:
        log: of the state's run, which has read it or begins it.
        durable: whether it must be safe on disk whatever happens to the machine.
        in_memory: whether only what is returned holds the state, and nothing is written.

    Returns:
        The state as it was saved.
    """
    snapshot = state.shares.snapshot(state.round_index)
    edges = {j: edge for j, edge in snapshot.edges.items() if edge.sent or edge.received}
    snapshot = replace(snapshot, edges=edges)
    orphaned = state.orphaned + state.shares.orphaned.total()
    if not in_memory:
        _write_state(log, state, snapshot, orphaned, durable)
    state.shares.committed(snapshot)
    return SavedState(log, replace(state, round_index=snapshot.round_index, orphaned=orphaned), snapshot)


def _write_state(log: RecordLog, state: PeerState, snapshot: Durable[np.ndarray], orphaned: int, durable: bool) -> None:
    exchange, shares = pack(snapshot)
    arrays = {**snapshot.mass, **shares, "average": state.average}
    for group, own in (("unmixed", state.unmixed), ("local", state.local_arrays), ("adopted", state.adopted)):
        arrays |= {f"{group}/{name}": np.asarray(value) for name, value in own.items()}
    facts = {
        "format": FORMAT,
        "run": state.run,
        "peer": state.peer,
        "layout": state.layout.parts,
        "exchange": exchange,
        "orphaned": orphaned,
        "handed": asdict(state.handed),
        "paid": {str(boot): lines for boot, lines in state.paid.items()},
        "unprotected": state.unprotected,
        "idle": state.idle,
        "examples": [state.examples, state.first_weight],
        "app_ledgers": state.app_ledgers,
        "average_weight": state.average_weight,
    }
    log.write(facts, arrays, lasting=shares, durable=durable)
    log.close()  # one process may answer for more peers than it may open files


def load_state(path: Path) -> SavedState | None:
    """Load the state; None if the file is missing.

    Raises:
        RunError: the file cannot be read, or is no state.
    """
    log = RecordLog(path, count=1)
    try:
        states = log.read(_state)
    except (OSError, DamagedLogError) as error:
        raise RunError(
            f"{path} is no peer's state ({error}); restore it, or delete it to start again", code="app.damaged-state"
        ) from error
    finally:
        log.close()

    if not states:
        return None
    state, durable = states[-1]
    return SavedState(log, state, durable)


def _state(facts: Facts, arrays: NamedArrays) -> tuple[PeerState, Durable[np.ndarray]]:
    if facts["format"] != FORMAT:
        raise ValueError(f"format {facts['format']!r}, not {FORMAT}")
    peer = int(facts["peer"])
    apart = {name: dict[str, np.ndarray]() for name in ("unmixed", "local", "adopted")}
    tensors = {}
    for name, value in arrays.items():
        group, _, rest = name.partition("/")
        if group in apart:
            apart[group][rest] = value
        else:
            tensors[name] = value
    mass = {name: tensors[name] for name in ("x", "w")}
    durable = unpack(peer, facts["exchange"], tensors, mass)
    shares = protocol(peer, dict(mass), durable.incarnation, durable.edges)
    shares.restore(durable)
    state = PeerState(
        layout=Layout.from_json(facts["layout"]),
        run=str(facts["run"]),
        shares=shares,
        unmixed=apart["unmixed"],
        round_index=durable.round_index,
        orphaned=int(facts["orphaned"]),
        handed=Handed(**facts["handed"]),
        paid={int(boot): int(lines) for boot, lines in facts["paid"].items()},
        unprotected=int(facts["unprotected"]),
        idle=bool(facts["idle"]),
        local_arrays=apart["local"],
        adopted=apart["adopted"],
        examples=float(facts["examples"][0]),
        first_weight=float(facts["examples"][1]),
        average=tensors["average"],
        average_weight=float(facts["average_weight"]),
        app_ledgers={
            path: (float(delta), str(caveat), str(assumption))
            for path, (delta, caveat, assumption) in facts["app_ledgers"].items()
        },
    )
    return state, durable
