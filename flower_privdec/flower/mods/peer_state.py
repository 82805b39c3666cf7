"""A peer's state of one run, its private training step, and its keys: all that it keeps in its folder.

The state is the mass (x, w) with its shares (`PushSumProtocol`). Each message of a run is answered by a process of its
own, in the protocol's words: it restores the state, absorbs the shares that came, trains, splits, and writes the state
before anything that follows from it leaves. The relay introduces the peers and holds what it carries in memory alone;
what it has not, senders hand in again. A state that is lost begins as a later incarnation, with x = 0 and w = 0: it
trains when its first share has come. A state that is restored from an older copy is noticed by the acknowledgements of
what it no longer remembers.

The update of a step is charged, clipped as a whole, noised and added to x. Shares are sealed end to end (`PeerSeal`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_privdec.common.arguments import check_numbers, check_paths
from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.common.files import open_file, owners_file, write_atomically
from flower_privdec.common.formatting import one_line
from flower_privdec.flower.mods.dual_step import DualStep
from flower_privdec.flower.mods.masking import Handed
from flower_privdec.flower.node_settings import PeerCache, PeerSettings
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import noise_multiplier
from flower_privdec.privacy.exact_noise import exactly_noised
from flower_privdec.privacy.ledger.charges import Charge, RunName
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.ledger.spending import releases_in
from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.privacy.updates import UPDATES
from flower_privdec.pushsum.exactly_once import LAST, Durable, PushSumProtocol, RefusedError
from flower_privdec.pushsum.frames import FrameCodec, RowFormat, Seal, pack, unpack
from flower_privdec.pushsum.witness import draw_boot
from flower_privdec.scenario.loading import validated
from flower_privdec.scenario.sections import AppPrivacySection

Arrays = Mapping[str, np.ndarray]
R = TypeVar("R", ArrayRecord, ConfigRecord)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays, in their order.

    Floating arrays make up the vector that is mixed, clipped and noised: float64 if one of them is, else float32.
    Arrays of whole numbers and truth values (counters, masks) are each peer's own and enter nothing.

    Attributes:
        parts: (name, type, shape) of each array.
    """

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """Return the layout of arrays.

        Raises:
            RunError: nothing in them is floating, or a type has no mean.
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
        return layout

    @classmethod
    def from_json(cls, parts: list[tuple[str, str, list[int]]]) -> Layout:
        """Return the layout that `parts` say, as JSON has them."""
        return cls(tuple((str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in parts))

    @cached_property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the vector's type."""
        return np.dtype(np.float64 if any(np.dtype(kind).itemsize > 4 for _, kind, _ in self._floating) else np.float32)

    @cached_property
    def size(self) -> int:
        """Return how many numbers the vector has."""
        return sum(math.prod(shape) for _, _, shape in self._floating)

    @cached_property
    def _floating(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [part for part in self.parts if np.dtype(part[1]).kind == "f"]

    def vector(self, arrays: Arrays) -> np.ndarray:
        """Return the floating arrays as one vector, float64 [size]."""
        return np.concatenate([np.ravel(arrays[name]) for name, _, _ in self._floating], dtype=np.float64)

    def moved_by(self, arrays: Arrays, start: np.ndarray) -> np.ndarray:
        """Return the floating arrays minus a vector, [size] of the vector's type."""
        update = np.empty(self.size, self.dtype)
        begin = 0
        for name, _, shape in self._floating:
            end = begin + math.prod(shape)
            np.subtract(np.ravel(arrays[name]), start[begin:end], out=update[begin:end], casting="same_kind")
            begin = end
        return update

    @cached_property
    def only_kind(self) -> np.dtype[np.floating] | None:
        """Return the type of all floating arrays; None where they have several."""
        kinds = {kind for _, kind, _ in self._floating}
        return np.dtype(kinds.pop()) if len(kinds) == 1 else None

    def rounded(self, vector: np.ndarray) -> np.ndarray:
        """Return a vector as its `record` has it, rounded to the arrays' types, [size]."""
        with np.errstate(over="ignore"):
            if self.only_kind is not None:
                return vector.astype(self.only_kind, copy=False)
            ends = np.cumsum([math.prod(shape) for _, _, shape in self._floating])[:-1]
            parts = zip(np.split(vector, ends), self._floating, strict=True)
            return np.concatenate([part.astype(kind).astype(np.float64) for part, (_, kind, _) in parts])

    def unmixed(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that are not mixed."""
        floating = {name for name, _, _ in self._floating}
        return {name: np.asarray(value) for name, value in arrays.items() if name not in floating}

    def record(self, vector: np.ndarray, unmixed: Arrays) -> ArrayRecord:
        """Return a vector, and what is not mixed, as the record that the framework knows: same names, order, types."""
        arrays = {}
        start = 0
        for name, kind, shape in self.parts:
            if name in unmixed:
                arrays[name] = Array(np.asarray(unmixed[name]))
                continue
            stop = start + math.prod(shape)
            with np.errstate(over="ignore"):
                arrays[name] = Array(vector[start:stop].reshape(shape).astype(kind, copy=False))
            start = stop
        return ArrayRecord(arrays)

    def misfit(self, arrays: Arrays) -> str:
        """Return in words how arrays do not fit; empty where they do. Types of the same kind fit: they are cast."""
        kinds = {name: kind for name, kind, _ in self.parts}
        ours = {name: f"{kind} {shape}" for name, kind, shape in self.parts}
        theirs = dict[str, str]()
        for name, value in arrays.items():
            is_cast = name in kinds and (np.dtype(kinds[name]).kind == "f") == (value.dtype.kind == "f")
            theirs[name] = f"{kinds[name] if is_cast else value.dtype} {value.shape}"
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return f"array {name!r} is {theirs.get(name, 'missing')} and must be {ours.get(name, 'missing')}"
        if list(ours) != list(theirs):
            return f"the arrays are in the order {list(theirs)} and must be in the order {list(ours)}"
        return ""


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's."""
    return {name: array.numpy() for name, array in record.items()}


def mass_of(x: np.ndarray, w: float) -> dict[str, np.ndarray]:
    """Return (x, w) as the protocol holds them; x [d] stays where it lies."""
    return {"x": np.ascontiguousarray(x), "w": np.array(w, np.float64)}


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


def new_incarnation() -> int:
    """Return an incarnation that is later than that of any state which this machine lost."""
    return time.time_ns()


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


@dataclass
class PeerState:
    """All that a peer has to remember of a run.

    Attributes:
        run: its name.
        layout: of the model's arrays.
        shares: the mass (x, w), whose model is z = x / w, and the shares that are not acknowledged.
        unmixed: the arrays that are not mixed.
        round_index: the last round it took part in; 0 before the first.
        orphaned: how many shares went to states that were lost, before this start.
        handed: what it handed in for masked means.
        paid: how many lines of each boot the peer's ledger held when it last paid; one that lacks some is not the same.
        unprotected: how many updates of its own are in it without protection.
        idle: over a server, whether it took no step in its last round, and so has no part in that round's mean.
        local_arrays: of the record that never leaves the peer (`PeerRequest.local_record`); empty where there is none.
        adopted: over a server, the model that it sent last; empty where there is none.
        examples: the number of examples by which its next update counts.
        app_ledgers: δ, caveats and assumptions of each ledger of examples that the app's own training pays into.
        first_weight: what it brings into the run: 1, or its number of examples; where it came later, or its state was
            an old copy, with its first share.
        average: of dual averaging, over the models with which it took part; empty before the first.
        average_weight: what that average has added up.
        dual: how x / w gives the model in dual averaging, and the round for which; None elsewhere. Not on disk.
        acknowledged: the frames of acknowledgements that this process has taken in. Not on disk.
    """

    run: str
    layout: Layout
    shares: PushSumProtocol[np.ndarray]
    unmixed: dict[str, np.ndarray]
    round_index: int = 0
    orphaned: int = 0
    handed: Handed = field(default_factory=Handed)
    paid: dict[int, int] = field(default_factory=dict)
    unprotected: int = 0
    idle: bool = False
    local_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    adopted: dict[str, np.ndarray] = field(default_factory=dict)
    examples: float = 1.0
    first_weight: float = 1.0
    app_ledgers: dict[str, tuple[float, str, str]] = field(default_factory=dict)
    average: np.ndarray = field(default_factory=lambda: np.empty(0))
    average_weight: float = 0.0
    dual: tuple[DualStep, int] | None = None
    acknowledged: set[bytes] = field(default_factory=set)

    @classmethod
    def begun(cls, run: str, peer: int, arrays: Mapping[str, np.ndarray], founding: bool) -> PeerState:
        """Return a state at the start: the arrays given with weight 1, or no mass at all for a peer that comes later.

        Raises:
            RunError: the arrays are no model, or not finite.
        """
        layout = Layout.of(arrays)
        start = layout.vector(arrays)
        if not np.isfinite(start).all():
            raise RunError("initial_arrays are not finite: check how the model is made")
        x = start if founding else np.zeros_like(start)
        mass = mass_of(x.astype(layout.dtype), float(founding))
        shares = protocol(peer, mass, new_incarnation())
        return cls(run, layout, shares, layout.unmixed(arrays))

    @property
    def peer(self) -> int:
        """Return the peer's id."""
        return self.shares.peer

    @property
    def x(self) -> np.ndarray:
        """Return x [d], where it lies."""
        return self.shares.mass["x"]

    @x.setter
    def x(self, value: np.ndarray) -> None:
        self.shares.mass["x"] = mass_of(value, 0.0)["x"]

    @property
    def w(self) -> float:
        """Return the push-sum weight."""
        return float(self.shares.mass["w"])

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
            self.shares.mass["w"] = mass_of(self.x, w + more)["w"]
            self.first_weight = examples
        self.examples = examples

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
        self.shares.mass.update(mass_of(x.astype(self.layout.dtype), 1.0))
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


FORMAT = "flower-privdec-peer-7"
BOOT, WITNESSED = "boot", "witnessed"  # files of a peer's folder
WITNESSES = 4  # on either side, in the order of peers' numbers


def boot_of(folder: Path, renew: bool, cache: PeerCache) -> int:
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
    return folder / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}.safetensors"


@dataclass
class SavedState:
    """A state as it is on disk, or instead of it in memory.

    Attributes:
        state: whose shares are those of the snapshot.
        snapshot: does not change.
        live: the same state, as the message that saved it went on with it to its end; None where it failed.
    """

    state: PeerState
    snapshot: Durable[np.ndarray]
    live: PeerState | None = None

    def taken(self, as_read: bool) -> PeerState:
        """Return the state for one message: as the last one left it, or as a process begins that has read it.

        Args:
            as_read: whether to begin as such a process in any case.
        """
        live, self.live = self.live, None  # what the message does to it counts once it has saved it
        if live is not None and not as_read:
            return live
        snapshot = self.snapshot
        state = self.state
        shares = protocol(state.peer, dict(snapshot.mass), snapshot.incarnation, snapshot.edges)
        shares.restore(snapshot)
        return replace(state, shares=shares, acknowledged=set())


def save_state(path: Path, state: PeerState, *, durable: bool = True, cache: PeerCache | None = None) -> None:
    """Save a state, whole or not at all, from which on its new shares and acknowledgements may leave.

    Args:
        durable: whether it must be safe on disk whatever happens to the machine.
        cache: of the process; one of a temporary folder is all that the state is written to.
    """
    snapshot = state.shares.snapshot(state.round_index)
    edges = {j: edge for j, edge in snapshot.edges.items() if edge.sent or edge.received}
    snapshot = replace(snapshot, edges=edges)
    orphaned = state.orphaned + state.shares.orphaned.total()
    if cache is None or not cache.is_temporary:
        _write_state(path, state, snapshot, orphaned, durable)
    if cache is not None:
        cache.put(path, SavedState(replace(state, round_index=snapshot.round_index, orphaned=orphaned), snapshot))
    state.shares.committed(snapshot)


def _write_state(path: Path, state: PeerState, snapshot: Durable[np.ndarray], orphaned: int, durable: bool) -> None:
    exchange, tensors = pack(snapshot)
    arrays = {**snapshot.mass, **tensors}
    for group, own in (("unmixed", state.unmixed), ("local", state.local_arrays), ("adopted", state.adopted)):
        arrays |= {f"{group}/{name}": np.array(value, order="C") for name, value in own.items()}
    arrays |= {"average": state.average}
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
    write_atomically(path, save(arrays, {"state": json.dumps(facts)}), durable=durable)


def load_state(path: Path) -> PeerState | None:
    """Read a state, or None where there is none.

    Raises:
        RunError: the file cannot be read, or is no state.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            facts = json.loads(file.metadata()["state"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return _state(facts, arrays)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RunError(f"{path} is no peer's state ({error}); restore it, or delete it to start again") from error


def _state(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> PeerState:
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
    return PeerState(
        run=str(facts["run"]),
        layout=Layout.from_json(facts["layout"]),
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


log = logging.getLogger("flwr.privdec")

SOURCE = "peer-updates"  # what the ledger is of; the file is FOLDER/peer-updates.jsonl
UNIT = "one peer with all its data"
ADJACENCY = "its update of every round replaced by zero"
UNPROTECTED = f"epsilon = inf (unit: {UNIT}); what an app's own training protects is not counted here"


def unprotected_words(updates: int) -> str:
    """Return what to report of ε where some updates of a run were made without protection."""
    return f"epsilon = inf (unit: {UNIT}; {updates} update{'s' * (updates > 1)} of this run had no protection)"


def update_release(noise: float, steps: int = 1) -> Release:
    """Return what a round releases: one Gaussian sum that the peer's whole update enters, as its only example."""
    return Release("full", 1.0, 1, 1, noise_multiplier=noise, steps=steps)


@lru_cache(maxsize=64)
def solved_noise(budget: float, delta: float, rounds: int) -> float:
    """Return the least noise multiplier with which so many rounds keep a budget."""
    common = {"sampling": "full", "sampling_rate": 1.0, "dataset_size": 1, "batch_size": 1}
    return noise_multiplier(budget, delta, steps=rounds, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PeerSpent:
    """What a peer has spent by now.

    Attributes:
        releases: all of them, equal ones together.
        delta: δ.
    """

    releases: tuple[Release, ...]
    delta: float

    @property
    def epsilon(self) -> float:
        """Return ε, an upper bound."""
        return epsilon(self.releases, self.delta)

    def __str__(self) -> str:
        charged = " and ".join(
            f"{release.steps} Gaussian update{'s' * (release.steps > 1)} of noise multiplier "
            f"{release.noise_multiplier:.4g}"
            for release in self.releases
        )
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} (unit: {UNIT}; adjacency: {ADJACENCY}; "
            f"charged: {charged or 'nothing'})"
        )


class PeerLedger(Ledger):
    """The open ledger of one peer's updates.

    Each round draws fresh noise, so each charge counts, that of a round begun twice as well.

    Attributes:
        peer: its id.
        delta: δ at which ε is reported.
        budget: the ε that all runs together may not exceed, or ∞.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        incarnation: int,
        peer: int,
        delta: float,
        budget: float = math.inf,
        *,
        durable: bool = True,
    ) -> None:
        """Open the ledger in a folder.

        Args:
            run: the run's name.
            incarnation: of the peer in that run.
            durable: see `Ledger`.

        Raises:
            BudgetError: the ledger is in use or fails verification.
        """
        super().__init__(folder, SOURCE, durable=durable)
        self.peer = peer
        self.delta = delta
        self.budget = budget
        self.name_run(run, incarnation)

    def name_run(self, run: str, incarnation: int) -> None:
        """Let the lines from now on be of a run, and of the peer's incarnation in it."""
        self._run = RunName(f"{run}-{incarnation}", run, "system entropy")

    @property
    def spent(self) -> PeerSpent:
        """Return the total of all charges of all runs."""
        return PeerSpent(releases_in(self.entries), self.delta)

    def charge_witnessed(self, witnessed: Mapping[int, int], noise: float) -> int:
        """Charge the lines that the ledger lacks, each as an update of a noise multiplier; return how many there are.

        Args:
            witnessed: see `Ledger.lacks`.
        """
        missing = self.lacks(witnessed)
        if missing:
            run = replace(self._run, id=f"{self._run.id}-witnessed-{self.n_entries}")
            charge = Charge((self.peer,), ((((0, missing),), update_release(noise).times(missing)),))
            self.append(run, 0, missing, [charge], witnessed=witnessed)
        return missing

    def allows(self, noise: float) -> bool:
        """Return whether the budget allows one more update of a noise multiplier."""
        return self.fits(Charge((self.peer,), (((), update_release(noise)),)), self.budget, self.delta)

    def charge(self, round_index: int, noise: float) -> bool:
        """Charge one round's update, on disk before it is computed, and return True; False where the budget is spent.

        Args:
            round_index: from 1.
            noise: the noise multiplier.

        Raises:
            BudgetError: the disk fails.
        """
        if not self.allows(noise):
            return False
        steps = (round_index - 1, round_index)
        self.append(self._run, *steps, [Charge((self.peer,), (((steps,), update_release(noise)),))])
        return True

    def check_budget(self, noise: float) -> None:
        """Refuse a run of which no update fits the budget.

        Raises:
            BudgetError: with what is spent.
        """
        if not self.allows(noise):
            raise BudgetError(
                f"{self.path}: epsilon = {self.spent.epsilon:.4g} is spent, and privacy.epsilon={self.budget:g} allows "
                f"this run no update of noise multiplier {noise:.4g}; raise the budget or the noise",
                code="ledger.budget-spent",
            )


def spent_so_far(folder: Path, delta: float) -> PeerSpent:
    """Return the total of a peer's ledger without locking it.

    Raises:
        BudgetError: it fails verification.
    """
    return PeerSpent(releases_in(read_entries(folder, SOURCE)), delta)


_folder: ContextVar[Path] = ContextVar("folder")


def peer_folder() -> Path:
    """Return the folder of the peer whose train or evaluate function is running, for what it wants to keep.

    A ledger of its examples, say: `private(..., ledger=peer_folder() / "examples.jsonl")` counts over all rounds, and
    for each peer apart. In a simulation the folder is the run's, as the peer's own ledger is.

    Raises:
        RunError: no function of an app with PeerMod is running.
    """
    try:
        return _folder.get()
    except LookupError:
        raise RunError(
            "peer_folder() is for the functions of an app with PeerMod: call it inside one", code="app.peer-folder"
        ) from None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let `peer_folder` be a folder, for as long as an app's function runs."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class UnfitAnswerError(RunError):
    """An app's answer is no model of the peer's; its details may tell of the app's data.

    Attributes:
        what: what the app did, which tells nothing.
        details: what is wrong with it, and what to do.
    """

    def __init__(self, what: str, details: str) -> None:
        super().__init__(f"the app {what}; {details}")
        self.what = what
        self.details = details


def record_in(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record of a kind; None where there is none of that name and kind."""
    record = content.get(name)
    return record if isinstance(record, kind) else None


def returned_arrays(content: RecordDict, key: str, layout: Layout) -> Arrays:
    """Return the arrays of a train function's answer.

    Args:
        content: the answer.
        key: under which they are, where there are several.
        layout: of the arrays that it was given.

    Raises:
        UnfitAnswerError: there are none, or several and none under the key, or others than were given.
    """
    records = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    if key not in records and len(records) != 1:
        raise UnfitAnswerError(
            "returned no model",
            f"its answer has {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} and none named {key!r}: "
            f"return RecordDict({{{key!r}: ArrayRecord(...)}})",
        )
    returned = records[key] if key in records else next(iter(records.values()))
    arrays: Arrays = {}
    try:
        arrays = numpy_arrays(returned)
        difference = layout.misfit(arrays)
    except (TypeError, ValueError) as error:  # what Flower says of arrays of another framework
        difference = f"they cannot be read as NumPy's: {one_line(error)}"
    if difference:
        raise UnfitAnswerError("returned other arrays than it was given", difference)
    return arrays


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm of a vector, float64 [d], without overflow below it; NaN or ∞ where it has such."""
    with np.errstate(over="ignore"):
        length = math.sqrt(float(np.square(vector).sum()))  # pairwise, and on one core
    if 1e-100 < length < 1e100:  # no square of a number that matters was 0 or infinite
        return length
    largest = float(np.max(np.abs(vector), initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(vector / largest))


def clipped(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Return u · min(1, C / ‖u‖), float64 [d]; a zero update stays zero.

    Args:
        update: finite, float64 [d].
        clip_norm: C.
    """
    length = norm(update)
    if length <= clip_norm:
        return update
    if math.isfinite(length):
        short = update * (clip_norm / length)
    else:
        direction = update / float(np.max(np.abs(update)))
        short = direction * (clip_norm / float(np.linalg.norm(direction)))
    length = norm(short)
    return short if length <= clip_norm else short * (clip_norm / length)  # rounding could leave it a hair too long


def unsound(update: np.ndarray) -> str:
    """Return what is wrong with an update in words; empty where nothing is."""
    if math.isfinite(float(update.sum())):  # as with an infinite number or NaN among them it is not
        return ""
    if np.isnan(update).any():
        return f"{int(np.isnan(update).sum())} of its {update.size} numbers are NaN"
    infinite = int((~np.isfinite(update)).sum())
    return f"{infinite} of its {update.size} numbers are infinite" if infinite else ""


def app_privacy(
    clip_norm: float | None, noise_multiplier: float | None, epsilon: float | None, delta: float
) -> AppPrivacySection | None:
    """Return what an app asks for: None where it gives no clip norm, noise or budget.

    Raises:
        ScenarioError: a value of the wrong kind or out of its range, or a clip norm without noise, or noise without a
            clip norm.
    """
    given = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
    check_numbers({**given, "delta": delta})
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    checked = numbers or {"clip_norm": 1.0, "noise_multiplier": 1.0}  # where nothing is asked for, δ is checked alone
    section = validated(AppPrivacySection, {**checked, "delta": delta}, "PeerMod")
    return section if numbers else None


def binding_privacy(privacy: AppPrivacySection | None, node: PeerSettings) -> AppPrivacySection | None:
    """Return what an app asks for, with the stricter of its budget and that of the peer's owner.

    Raises:
        BudgetError: the owner has a budget and nothing is protected.
    """
    if privacy is None:
        if math.isfinite(node.epsilon):
            raise BudgetError(
                f"epsilon={node.epsilon} of the node-config needs clip_norm and noise: say PeerMod(clip_norm=..., "
                "epsilon=...)"
            )
        return None
    epsilon = min(node.epsilon, privacy.epsilon or math.inf)
    delta = privacy.delta if node.delta is None else min(privacy.delta, node.delta)
    return privacy.model_copy(update={"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta})


def noise_for(privacy: AppPrivacySection, rounds: int) -> float:
    """Return the noise multiplier: the given one, or the least with which so many rounds keep the budget."""
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None
    return solved_noise(privacy.epsilon, privacy.delta, max(1, rounds))


LEAST_WEIGHT = 1e-6  # with less of the mass a peer waits for some before it trains again
APP_SPENT = "its app's own budget allows no more training; it only exchanges"
Train = Callable[[ArrayRecord], Arrays]


class NoStep(NamedTuple):
    """Why a peer took no step.

    Attributes:
        why: in words.
        for_good: whether it takes none in later rounds either, a budget being spent.
    """

    why: str
    for_good: bool


def take_step(
    state: PeerState, train: Train, round_index: int, ledger: PeerLedger | None, clip_norm: float | None, noise: float
) -> NoStep | None:
    """Charge one update, let the app train, and add m · (u · min(1, C / ‖u‖) + N(0, σ² C² I)) to x.

    u is what the app moved z by. m is the peer's number of examples, 1 where peers count alike, and at most 2 w: of a
    peer that holds little of the mass, z = x / w would leap.

    Args:
        state: its x, and the arrays that are not mixed, are put in place.
        train: returns arrays of the state's layout, as `returned_arrays` has them.
        round_index: from 1.
        ledger: None for no protection.
        clip_norm: C; None where there is no ledger.
        noise: σ, noise std over C.

    Returns:
        None where a step was taken. Where the app's own ledger, as `private` has one, allows no more, the state is as
        it was, and the words of that ledger stay in the app's log.

    Privacy: one Gaussian release of the whole update, charged before the app runs. Without protection the state counts
    the update in `unprotected`.
    """
    if state.w < LEAST_WEIGHT:
        return NoStep(f"it holds {state.w:.2g} of the mass, and waits for a share before it trains", for_good=False)
    observer = UPDATES.observer()
    if ledger is not None and observer is not None:
        observer.admit(ledger, ledger.delta)
    if ledger is not None and not ledger.charge(round_index, noise):
        why = f"its next update would exceed epsilon = {ledger.budget:g}; it stops training and only exchanges"
        return NoStep(why, for_good=True)
    given = state.given_model()
    try:
        returned = train(state.layout.record(given, state.unmixed))
    except BudgetError:
        return NoStep(APP_SPENT, for_good=True)
    with np.errstate(all="ignore"):  # also where the app has numpy raise
        update = state.layout.moved_by(returned, given)
        if wrong := unsound(update):
            update = np.zeros_like(update)
        else:
            state.unmixed = state.layout.unmixed(returned)
        if clip_norm is not None and ledger is not None and observer is not None:
            update = observer.released(ledger, update, clip_norm, noise, protected)
        elif clip_norm is not None:
            update = protected(clip_norm, noise, update)
        weight = min(state.examples, 2 * state.w) * (1.0 if state.dual is None else state.dual[0].weight(state.dual[1]))
        step = update if weight == 1 else weight * update
        after = np.empty_like(state.x)
        np.add(state.x, step, out=after, casting="same_kind")
        if infinite := unsound(after):
            wrong = wrong or infinite
        else:
            state.x = after
            state.unprotected += clip_norm is None
    if wrong:
        words = "peer %s, round %s: %s, so its update counts as zero; lower the learning rate, or look at its data"
        log.warning(words, state.peer, round_index, wrong)
    return None


def protected(clip_norm: float, noise: float, update: np.ndarray) -> np.ndarray:
    """Return u · min(1, C / ‖u‖) + N(0, σ² C² I), float64 [d], of the operating system's entropy.

    Args:
        clip_norm: C.
        noise: σ, over C.
        update: u, finite, [d].

    Privacy: one Gaussian release of the whole update, which has to be paid for before; rounded exactly, which costs
    little beside an app's training.
    """
    return exactly_noised(clipped(update.astype(np.float64, copy=False), clip_norm), noise * clip_norm)


def keep_metrics(folder: Path, round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Add an app's metrics to the peer's own file, from which they do not leave."""
    with open(folder / "metrics.jsonl", "a", opener=owners_file) as file:
        for metrics in records.values():
            file.write(json.dumps({"round": round_index, "of": kind, **metrics}) + "\n")


IDENTITY = "identity.key"
PUBLIC = "identity.pub"
KNOWN = "known-peers.json"
SALT, KEY, TAG = 16, 32, 16  # bytes
_NONCE = bytes(12)  # each key seals one message


class Identity:
    """A peer's X25519 key, made by the operating system's entropy at first use and kept in its folder.

    The public half is beside it in hexadecimal, to be pinned by others.
    """

    def __init__(self, folder: Path) -> None:
        """Read the key, or make it.

        Raises:
            RunError: the file is no key.
        """
        path = folder / IDENTITY
        if not path.exists():
            write_atomically(path, os.urandom(KEY))
        content = path.read_bytes()
        if len(content) != KEY:
            raise RunError(
                f"{path} must hold {KEY} bytes and has {len(content)}; restore it, or delete it for a new one"
            )
        self._private = X25519PrivateKey.from_private_bytes(content)
        self.public = self._private.public_key().public_bytes_raw()
        if not (folder / PUBLIC).exists():
            write_atomically(folder / PUBLIC, self.public.hex().encode() + b"\n", public=True)

    def key_for(self, public: bytes, salt: bytes, purpose: bytes) -> bytes:
        """Return a key that this peer and the owner of a public key share, and no one else.

        Raises:
            RefusedError: it is no public key.
        """
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise RefusedError(f"{public.hex()!r} is no public key") from error
        both = b"".join(sorted((self.public, public)))
        return HKDF(SHA256(), KEY, salt, b"flower-privdec 1 " + purpose + both).derive(secret)


def public_key(folder: Path | str) -> str:
    """Return the public key of the peer whose folder this is, in hexadecimal; made if it has none.

    It is what other peers pin: a JSON file of peer ids and keys, named by `known-peers` in their node-config.

    Raises:
        ScenarioError: the folder cannot be made.
    """
    check_paths({"folder": folder})
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"folder={str(folder)!r} cannot be made ({error.strerror}); give another") from error
    return Identity(Path(folder)).public.hex()


class KnownPeers:
    """Whose key is whose, as one peer has it: pinned by its owner, or as first seen.

    Args:
        folder: the peer's, where what is first seen is kept.
        pinned: a JSON file {"PEER": "PUBLIC KEY IN HEXADECIMAL", ...} of the owner's; then no one else is known.

    Raises:
        RunError: a file cannot be read.
    """

    def __init__(self, folder: Path, pinned: Path | None = None) -> None:
        self._path = folder / KNOWN if pinned is None else pinned
        self._pinned = pinned is not None
        self._keys: dict[int, bytes] = {}
        self._claimed: dict[int, bytes] = {}
        if self._pinned or self._path.exists():
            self._keys = _read_keys(self._path)

    def meet(self, introduced: dict[int, bytes]) -> None:
        """Take note of the keys that the relay introduces; one that is known is not replaced."""
        new = {peer: key for peer, key in introduced.items() if peer not in self._keys}
        if new and not self._pinned:
            self._keys |= new
            text = json.dumps({str(peer): key.hex() for peer, key in sorted(self._keys.items())}, indent=1)
            write_atomically(self._path, text.encode())
        self._claimed = introduced

    def key(self, peer: int) -> bytes:
        """Return a peer's key.

        Raises:
            RefusedError: it is unknown, or the relay says another one.
        """
        known = self._keys.get(peer)
        if known is None:
            raise RefusedError(f"peer {peer} has no key in {self._path}: add it there")
        if self._claimed.get(peer, known) != known:
            raise RefusedError(
                f"the key of peer {peer} is not the one in {self._path}: a man in the middle, or it has a new "
                "identity; compare its identity.pub, and change that line only then"
            )
        return known


@dataclass(eq=False)
class PeerSeal:
    """Seals shares end to end: X25519 between two peers' keys, HKDF, ChaCha20-Poly1305; see `pushsum.frames.Seal`.

    What it is against: the relay (the ServerApp, the SuperLink, who reads their disks or the line) neither reads a
    share or a ledger report nor changes it, nor passes one off as another's, another edge's, another run's or another
    number's: all of
    these are in the header, which is authenticated. Every sealed frame has a salt, and so a key, of its own, so no
    nonce is used twice.

    What it is not against: the relay also introduces the peers to each other. A relay that swaps keys in that first
    introduction is the man in the middle of all that follows. Pin the keys to rule that out: give each SuperNode a file
    of its peers' public keys, carried there by hand (`known-peers` in its node-config). Without one a key is trusted
    when it is first seen, and refused when it changes later. A thief of a peer's identity file reads what was sealed
    for it, before and after: there is no forward secrecy. Senders, receivers, times and sizes are open.
    """

    identity: Identity
    known: KnownPeers
    overhead: int = SALT + TAG

    def encrypt(self, receiver: int, header: bytes, body: bytes) -> bytes:
        """See Seal."""
        salt = os.urandom(SALT)
        key = self.identity.key_for(self.known.key(receiver), salt, b"share")
        return salt + ChaCha20Poly1305(key).encrypt(_NONCE, body, header)

    def decrypt(self, sender: int, header: bytes, body: bytes) -> bytes:
        """See Seal.

        Raises:
            RefusedError: it was not sealed by that peer for this one with that header, or was changed since.
        """
        key = self.identity.key_for(self.known.key(sender), body[:SALT], b"share")
        try:
            return ChaCha20Poly1305(key).decrypt(_NONCE, body[SALT:], header)
        except InvalidTag as error:
            raise RefusedError(
                "its seal is broken: it was changed, or sealed with another key", code="share.seal"
            ) from error


def _read_keys(path: Path) -> dict[int, bytes]:
    try:
        return {int(peer): bytes.fromhex(key) for peer, key in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f'{path} must be a JSON file {{"PEER": "KEY IN HEXADECIMAL"}}: {error}') from error
