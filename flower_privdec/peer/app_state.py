"""A relayed peer's model and its state of one run, in memory and in its folder.

The model is an app's named arrays, of which the floating ones make up the x of push-sum (`Layout`). The model that the
app sees is z = x / w. Counters, masks and whatever else is not floating stay with the peer, and so do local arrays: the
personal layers of each peer, which the app names by patterns.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.common.files import open_file, write_atomically
from flower_privdec.peer.dual_step import DualStep
from flower_privdec.peer.masking import Handed
from flower_privdec.peer.record_log import DamagedLogError, Facts, NamedArrays, RecordLog
from flower_privdec.pushsum.exactly_once import LAST, Durable, PushSumProtocol, RefusedError, Shared
from flower_privdec.pushsum.frames import FrameCodec, RowFormat, Seal, pack, unpack
from flower_privdec.pushsum.witness import draw_boot

Arrays = Mapping[str, np.ndarray]
MOST_NAMES = 20  # of arrays, in an error


def names_matched(names: Sequence[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names that patterns match, such as `head.*`, in their order; a name as it is matches only itself.

    Raises:
        RunError: a pattern matches none of them.
    """
    matched: set[str] = set()
    for pattern in patterns:
        # A framework's names may have brackets, which a pattern reads as a choice of characters.
        found = [pattern]
        if pattern not in names:
            found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise RunError(
                f"local={pattern!r} matches none of the model's arrays, which are {_listed(names)}: write one of these "
                "names, or a pattern such as 'head.*'",
                code="app.local",
            )
        matched.update(found)
    return tuple(name for name in names if name in matched)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays, in their order.

    Floating arrays make up the vector that is mixed, clipped and noised: float64 if one of them is, else float32.
    Arrays of whole numbers and truth values (counters, masks), and local arrays, are each peer's own and enter nothing.

    Attributes:
        parts: (name, type, shape) of each array.
        local: the names of the arrays that each peer keeps to itself, although they may be floating.
    """

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]
    local: tuple[str, ...] = ()

    @classmethod
    def of(cls, arrays: Arrays, local: Iterable[str] = ()) -> Layout:
        """Return the layout of arrays.

        Args:
            local: patterns of the names of those that each peer keeps to itself.

        Raises:
            RunError: nothing in them is floating, or a type has no mean; or a pattern matches no array, or all of them
                leave nothing to mix.
        """
        layout = cls(tuple((name, str(value.dtype), value.shape) for name, value in arrays.items()))
        for name, value in arrays.items():
            if value.dtype.kind not in "fiub":
                raise RunError(
                    f"array {name!r} has type {value.dtype} and must be of real or whole numbers: split it into those",
                    code="app.arrays",
                )
        if not any(value.dtype.kind == "f" for value in arrays.values()):
            raise RunError(
                f"the model's arrays {list(arrays)} have no floating one, so nothing can be mixed: bytes, as of trees, "
                "have no mean; take a model of real-valued parameters",
                code="app.arrays",
            )
        return layout.keeping(local)

    def keeping(self, patterns: Iterable[str]) -> Layout:
        """Return the layout in which each peer keeps the arrays to itself whose names some patterns match.

        Raises:
            RunError: a pattern matches no array, or all of them leave nothing to mix.
        """
        given = list(patterns)
        names = [name for name, _, _ in self.parts]
        layout = Layout(self.parts, names_matched(names, given))

        if not layout.size and not given:
            raise RunError(
                f"the floating arrays of the model {_listed(names)} have no numbers, so nothing can be mixed: start "
                "from the initialized model",
                code="app.arrays",
            )
        if not layout.size:
            raise RunError(
                f"local={given} matches every array of the model that has a mean, {_listed(names)}, so nothing would "
                "be shared: leave out what the peers are to train together",
                code="app.local",
            )
        return layout

    @classmethod
    def from_json(cls, parts: list[tuple[str, str, list[int]]], local: list[str]) -> Layout:
        """Return the layout that `parts` and `local` say, as JSON has them."""
        read = tuple((str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in parts)
        return cls(read, tuple(map(str, local)))

    @cached_property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the vector's type."""
        is_wide = any(np.dtype(kind).itemsize > 4 for _, kind, _ in self._mixed)
        return np.dtype(np.float64 if is_wide else np.float32)

    @cached_property
    def size(self) -> int:
        """Return how many numbers the vector has."""
        return sum(math.prod(shape) for _, _, shape in self._mixed)

    @cached_property
    def _mixed(self) -> list[tuple[str, str, tuple[int, ...]]]:
        local = set(self.local)
        return [part for part in self.parts if np.dtype(part[1]).kind == "f" and part[0] not in local]

    @cached_property
    def unmixed_parts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return the parts that are not mixed: each peer's own."""
        mixed = {name for name, _, _ in self._mixed}
        return [part for part in self.parts if part[0] not in mixed]

    def vector(self, arrays: Arrays) -> np.ndarray:
        """Return the mixed arrays as one vector, float64 [size]."""
        return np.concatenate([np.ravel(arrays[name]) for name, _, _ in self._mixed], dtype=np.float64)

    def moved_by(self, arrays: Arrays, start: np.ndarray) -> np.ndarray:
        """Return the mixed arrays minus a vector, [size] of the vector's type."""
        update = np.empty(self.size, self.dtype)
        begin = 0
        for name, _, shape in self._mixed:
            end = begin + math.prod(shape)
            np.subtract(np.ravel(arrays[name]), start[begin:end], out=update[begin:end], casting="same_kind")
            begin = end
        return update

    @cached_property
    def only_kind(self) -> np.dtype[np.floating] | None:
        """Return the type of all mixed arrays; None if they have several."""
        kinds = {kind for _, kind, _ in self._mixed}
        return np.dtype(kinds.pop()) if len(kinds) == 1 else None

    def rounded(self, vector: np.ndarray) -> np.ndarray:
        """Return a vector as `arrays` has it, rounded to the arrays' types, [size]."""
        with np.errstate(over="ignore"):
            if self.only_kind is not None:
                return vector.astype(self.only_kind, copy=False)
            ends = np.cumsum([math.prod(shape) for _, _, shape in self._mixed])[:-1]
            parts = zip(np.split(vector, ends), self._mixed, strict=True)
            return np.concatenate([part.astype(kind).astype(np.float64) for part, (_, kind, _) in parts])

    def unmixed(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that are not mixed, in the layout's types."""
        with np.errstate(over="ignore", invalid="ignore"):
            return {name: np.asarray(arrays[name]).astype(kind, copy=False) for name, kind, _ in self.unmixed_parts}

    def arrays(self, vector: np.ndarray, unmixed: Arrays) -> dict[str, np.ndarray]:
        """Return a vector [size], and what is not mixed, as the app's arrays: same names, order, types and shapes."""
        arrays = dict[str, np.ndarray]()
        start = 0
        for name, kind, shape in self.parts:
            if name in unmixed:
                arrays[name] = np.asarray(unmixed[name])
                continue
            stop = start + math.prod(shape)
            with np.errstate(over="ignore"):
                arrays[name] = vector[start:stop].reshape(shape).astype(kind, copy=False)
            start = stop
        return arrays

    def misfit(self, arrays: Arrays) -> str:
        """Return in words how arrays do not fit; empty if they do.

        Types of the same kind fit: they are cast. So do arrays in another order, see `ordered`.
        """
        kinds = self._kinds
        ours = {name: f"{kind} {shape}" for name, kind, shape in self.parts}
        theirs = dict[str, str]()
        for name, value in arrays.items():
            is_cast = name in kinds and (np.dtype(kinds[name]).kind == "f") == (value.dtype.kind == "f")
            theirs[name] = f"{kinds[name] if is_cast else value.dtype} {value.shape}"
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return f"array {name!r} is {theirs.get(name, 'missing')} and must be {ours.get(name, 'missing')}"
        return ""

    def odd_local(self, arrays: Arrays) -> str:
        """Return the name of a local array that is not finite; empty if they all are."""
        for name in self.local:
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(np.asarray(arrays[name]).astype(self._kinds[name], copy=False)).all():
                    return name
        return ""

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {name: kind for name, kind, _ in self.parts}

    def ordered(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return arrays that fit in the layout's order, in which an app that reads them by position expects them."""
        return {name: arrays[name] for name, _, _ in self.parts}


def mass_of(x: np.ndarray, w: float) -> dict[str, np.ndarray]:
    """Return (x, w) as the protocol holds them; x [d] stays where it lies."""
    return {"x": np.ascontiguousarray(x), "w": np.array(w, np.float64)}


@dataclass
class AppModel:
    """The mass (x, w) of a model, and what belongs to it.

    Attributes:
        peer: whose it is.
        layout: of the model's arrays.
        mass: x [d] and w, by name.
        unmixed: the arrays that are not mixed.
        unprotected: how many of the peer's own updates are in it without protection.
        examples: the number of examples by which its next update counts.
        first_weight: what it brings into the run: 1, or its number of examples; if it came later, or its state was an
            old copy, with its first share.
        average: of dual averaging, over the models with which it took part; empty before the first.
        average_weight: what that average has added up.
        dual: how x / w gives the model in dual averaging, and the round for which; None elsewhere. Not on disk.
    """

    peer: int
    layout: Layout
    mass: MutableMapping[str, np.ndarray]
    unmixed: dict[str, np.ndarray]
    unprotected: int = 0
    examples: float = 1.0
    first_weight: float = 1.0
    average: np.ndarray = field(default_factory=lambda: np.empty(0))
    average_weight: float = 0.0
    dual: tuple[DualStep, int] | None = None

    @property
    def x(self) -> np.ndarray:
        """Return x [d], where it lies."""
        return self.mass["x"]

    @x.setter
    def x(self, value: np.ndarray) -> None:
        self.mass["x"] = mass_of(value, 0.0)["x"]

    @property
    def w(self) -> float:
        """Return the push-sum weight."""
        return float(self.mass["w"])

    def model(self) -> np.ndarray:
        """Return z = x / w, float64 [d]; in dual averaging the step along it.

        Raises:
            RunError: there is no mass yet.
        """
        if not self.w > 0:
            raise RunError(f"peer {self.peer} has no model yet: its first share has not come")
        z = np.asarray(np.divide(self.x, self.w, dtype=np.float64))
        return z if self.dual is None else self.dual[0].point(z, self.dual[1])

    def given_model(self) -> np.ndarray:
        """Return the model as the app's train function is given it, rounded to the arrays' types, [d]."""
        kind = self.layout.only_kind
        if kind is None or self.dual is not None or not self.w > 0:
            return self.layout.rounded(self.model())
        if kind == self.x.dtype and self.w == 1:
            return self.x
        with np.errstate(over="ignore"):
            out = np.empty(self.layout.size, kind)
            np.divide(self.x, self.w, out=out, dtype=np.float64, casting="unsafe")
        return out

    def result(self) -> np.ndarray:
        """Return the model to evaluate and to hand in, float64 [d]: z, or in dual averaging the average."""
        return self.average if self.average_weight else self.model()

    def count_in_average(self) -> None:
        """Take the model into the running average of dual averaging."""
        if self.dual is not None:
            weight = self.dual[0].weight(self.dual[1])
            before = self.average if self.average_weight else 0.0
            self.average_weight += weight
            self.average = before + weight / self.average_weight * (self.model() - before)

    def recount(self, examples: float) -> None:
        """Let the peer count by a number of examples from now on.

        Of the mass that it brought into the run there is then so much, at its model as it is; so Σ w is the number of
        all examples, and Σ x / Σ w, once the models agree, their mean weighted by them.
        """
        more = examples - self.first_weight
        w = self.w
        if more and w + more > 0:
            self.x = (self.x.astype(np.float64) * ((w + more) / w)).astype(self.x.dtype)
            self.mass["w"] = mass_of(self.x, w + more)["w"]
            self.first_weight = examples
        self.examples = examples


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

    shares_parts = True

    def __init__(self) -> None:
        self._sums: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # that `fits` computed, for `add`

    def freeze(
        self, mass: Mapping[str, np.ndarray], weight: float, told: Mapping[str, np.ndarray], number: int
    ) -> Shared[np.ndarray]:
        values = {name: self.times(value, weight) for name, value in mass.items()}
        return Shared(values, values, told)

    def open(
        self, values: Mapping[str, np.ndarray], mass: Mapping[str, np.ndarray], told: Mapping[str, np.ndarray]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        return values, told

    def times(self, value: np.ndarray, factor: float) -> np.ndarray:
        return np.asarray(value * factor)

    def subtract(self, value: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.asarray(value - part)

    def add(self, value: np.ndarray, part: np.ndarray) -> np.ndarray:
        known = self._sums.pop(id(value), None)
        if known is not None and known[0] is value and known[1] is part:
            return known[2]
        return np.asarray(value + part)

    def nothing(self, value: np.ndarray) -> np.ndarray:
        return np.zeros_like(value)

    def copy(self, value: np.ndarray) -> np.ndarray:
        return value

    def same(self, value: np.ndarray, part: np.ndarray) -> bool:
        return value is part

    def fits(self, value: np.ndarray, part: np.ndarray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.asarray(value + part)
            is_finite = math.isfinite(float(total.sum())) or bool(np.isfinite(total).all())
        if is_finite:
            self._sums[id(value)] = (value, part, total)
        return is_finite


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
    return FrameCodec(json.dumps([run, layout.parts, layout.local]).encode(), rows, seal=seal)


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
        cls,
        run: str,
        peer: int,
        arrays: Mapping[str, np.ndarray],
        founding: bool,
        incarnation: int,
        local: Iterable[str] = (),
    ) -> PeerState:
        """Return a state at the start: the arrays given with weight 1, or no mass at all for a peer that comes later.

        Args:
            incarnation: numbers the state; more than that of any state of this peer that was lost.
            local: patterns of the names of the arrays that never leave the peer.

        Raises:
            RunError: the arrays are not model, or not finite, or a pattern is wrong.
        """
        layout = Layout.of(arrays, local)
        start = layout.vector(arrays)
        if not np.isfinite(start).all() or layout.odd_local(arrays):
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
        self.adopted = self.layout.ordered(arrays)


def check_shares(weights: Mapping[int, float], others: set[int]) -> None:
    """Refuse weights that would leave a peer nothing, or more than it has, or go to no peer.

    Raises:
        RefusedError: naming them.
    """
    if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
        raise RefusedError(f"the weights {dict(weights)} must be > 0 with a sum < 1")
    if weights.keys() - others:
        raise RefusedError(f"shares for peers {sorted(weights.keys() - others)} must be for others that are there")


FORMAT = "flower-privdec-peer-9"
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
    path = file_in(folder, BOOT)

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
    lock = file_in(folder, ".lock")
    try:
        try:
            file = open_file(lock, os.O_WRONLY | os.O_CREAT)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            file = open_file(lock, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error.strerror}); give another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@lru_cache(maxsize=4096)
def file_in(folder: Path, name: str) -> Path:
    """Return a file of a folder; the same object each time, which spares parsing and hashing it for each message."""
    return folder / name


@lru_cache(maxsize=4096)
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
    saved = copy(state)
    saved.orphaned = orphaned
    return SavedState(log, saved, snapshot)


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
        "local": state.layout.local,
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
        RunError: the file cannot be read, or is not a state.
    """
    log = RecordLog(path, count=1)
    try:
        states = log.read(_state)
    except (OSError, DamagedLogError) as error:
        raise RunError(
            f"{path} is not a peer's state ({error}); restore it, or delete it to start again", code="app.damaged-state"
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
        layout=Layout.from_json(facts["layout"], facts["local"]),
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
