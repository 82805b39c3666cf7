"""A peer's state of one run: its mass (x, w) with its shares (`PushSumProtocol`), and the file that holds all of it.

Each message of a run is answered by a process of its own, in the protocol's words: it restores the state, absorbs the
shares that came, trains, splits, and writes the state before anything that follows from it leaves. The relay introduces
the peers and holds what it carries in memory alone; what it has not, senders hand in again.

A state that is lost begins as a later incarnation, with x = 0 and w = 0: it trains when its first share has come. A
state that is restored from an older copy is noticed by the acknowledgements of what it no longer remembers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_privdec.common.files import write_atomically
from flower_privdec.errors import RunError
from flower_privdec.pushsum.codec import TensorArithmetic, pack, unpack
from flower_privdec.pushsum.exactly_once import LAST, PushSumProtocol, RefusedError
from flower_privdec.pushsum.frames import FrameCodec, RowFormat, Seal

Arrays = Mapping[str, np.ndarray]


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
                    f"array {name!r} has type {value.dtype} and must be of real or whole numbers: split it into those"
                )
        if not any(value.dtype.kind == "f" for value in arrays.values()):
            raise RunError(f"the model's arrays {list(arrays)} have no floating one, so nothing can be mixed")
        return layout

    @classmethod
    def from_json(cls, parts: list[tuple[str, str, list[int]]]) -> Layout:
        """Return the layout that `parts` say, as JSON has them."""
        return cls(tuple((str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in parts))

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the vector's type."""
        return np.dtype(
            np.float64 if any(np.dtype(kind).itemsize > 4 for _, kind, _ in self._floating()) else np.float32
        )

    @property
    def size(self) -> int:
        """Return how many numbers the vector has."""
        return sum(math.prod(shape) for _, _, shape in self._floating())

    def _floating(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [part for part in self.parts if np.dtype(part[1]).kind == "f"]

    def vector(self, arrays: Arrays) -> np.ndarray:
        """Return the floating arrays as one vector, float64 [size]."""
        parts = [np.asarray(arrays[name], dtype=np.float64).reshape(-1) for name, _, _ in self._floating()]
        return np.concatenate(parts)

    def kept(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that are not mixed."""
        floating = {name for name, _, _ in self._floating()}
        return {name: np.asarray(value) for name, value in arrays.items() if name not in floating}

    def record(self, vector: np.ndarray, kept: Arrays) -> ArrayRecord:
        """Return a vector, and what is not mixed, as the record that the framework knows: same names, order, types."""
        arrays, start = {}, 0
        for name, kind, shape in self.parts:
            if name in kept:
                arrays[name] = Array(np.asarray(kept[name]))
                continue
            stop = start + math.prod(shape)
            with np.errstate(over="ignore"):
                arrays[name] = Array(vector[start:stop].reshape(shape).astype(kind))
            start = stop
        return ArrayRecord(arrays)

    def misfit(self, arrays: Arrays) -> str:
        """Return in words how arrays do not fit; empty where they do. Types of the same kind fit: they are cast."""
        other = Layout(tuple((name, str(value.dtype), value.shape) for name, value in arrays.items()))
        same = {name: kind for name, kind, _ in self.parts}
        alike = tuple(
            (name, same[name] if _same_kind(kind, same.get(name)) else kind, shape) for name, kind, shape in other.parts
        )
        return self.differs(Layout(alike))

    def differs(self, other: Layout) -> str:
        """Return in words how another layout differs from this one; empty where it does not."""
        if self.parts == other.parts:
            return ""
        ours, theirs = ({name: part for name, *part in each.parts} for each in (self, other))
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                said = [" ".join(map(str, each[name])) if name in each else "missing" for each in (theirs, ours)]
                return f"array {name!r} is {said[0]} and must be {said[1]}"
        return f"the arrays are in the order {list(theirs)} and must be in the order {list(ours)}"


def _same_kind(one: str, other: str | None) -> bool:
    return other is not None and (np.dtype(one).kind == "f") == (np.dtype(other).kind == "f")


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's."""
    return {name: array.numpy() for name, array in record.items()}


def mass_of(x: np.ndarray, w: float) -> dict[str, torch.Tensor]:
    """Return (x, w) as the protocol holds them; x [d] stays where it lies."""
    return {"x": torch.from_numpy(np.ascontiguousarray(x)), "w": torch.tensor(w, dtype=torch.float64)}


def new_incarnation() -> int:
    """Return an incarnation that is later than that of any state which this machine lost."""
    return time.time_ns()


def protocol(
    peer: int, mass: dict[str, torch.Tensor], incarnation: int, neighbors: Iterable[int] = ()
) -> PushSumProtocol[torch.Tensor]:
    """Return a peer's side of its edges, which a relay introduces: any number of shares may be on their way."""
    boot = secrets.randbits(63) + 1
    return PushSumProtocol(peer, neighbors, boot, mass, TensorArithmetic(), window=LAST, incarnation=incarnation)


def run_frames(run: str, layout: Layout, seal: Seal | None = None) -> FrameCodec:
    """Return the codec of the shares of one run, of models of one layout."""
    size, dtype = layout.size, torch.from_numpy(np.empty(0, layout.dtype)).dtype
    rows = {"x": RowFormat((size,), dtype), "w": RowFormat((), torch.float64, nonnegative=True)}
    return FrameCodec(json.dumps([run, layout.parts]).encode(), rows, seal=seal)


@dataclass
class PeerState:
    """All that a peer has to remember of a run.

    Attributes:
        run: its name.
        layout: of the model's arrays.
        shares: the mass (x, w), whose model is z = x / w, and the shares that are not acknowledged.
        kept: the arrays that are not mixed.
        round_index: the last round it took part in; 0 before the first.
        orphaned: how many shares went to states that were lost, before this start.
        handed: the serial of the last mean that it had a part in, outside a round.
        paid: how many payments the peer's ledger held when it last paid; one with fewer is not the same.
        bare: how many updates of its own are in it without protection.
        idle: over a server, whether it took no step in its last round, and so has no part in that round's mean.
        local_arrays: of the record that never leaves the peer (`Asked.local_record`); empty where there is none.
    """

    run: str
    layout: Layout
    shares: PushSumProtocol[torch.Tensor]
    kept: dict[str, np.ndarray]
    round_index: int = 0
    orphaned: int = 0
    handed: int = 0
    paid: int = 0
    bare: int = 0
    idle: bool = False
    local_arrays: dict[str, np.ndarray] = field(default_factory=dict)

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
        return cls(run, layout, protocol(peer, mass, new_incarnation()), layout.kept(arrays))

    @property
    def peer(self) -> int:
        """Return the peer's id."""
        return self.shares.peer

    @property
    def x(self) -> np.ndarray:
        """Return x [d], where it lies."""
        return np.asarray(self.shares.mass["x"].numpy())

    @x.setter
    def x(self, value: np.ndarray) -> None:
        self.shares.mass["x"] = mass_of(value, 0.0)["x"]

    @property
    def w(self) -> float:
        """Return the push-sum weight."""
        return float(self.shares.mass["w"])

    def model(self) -> np.ndarray:
        """Return z = x / w, float64 [d].

        Raises:
            RunError: there is no mass yet.
        """
        if not self.w > 0:
            raise RunError(f"peer {self.peer} has no model yet: its first share has not come")
        return self.x.astype(np.float64) / self.w

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


def check_shares(weights: Mapping[int, float], others: set[int]) -> None:
    """Refuse weights that would leave a peer nothing, or more than it has, or go to nobody.

    Raises:
        RefusedError: naming them.
    """
    if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
        raise RefusedError(f"the weights {dict(weights)} must be > 0 with a sum < 1")
    if weights.keys() - others:
        raise RefusedError(f"shares for peers {sorted(weights.keys() - others)} must be for others that are there")


FORMAT = "flower-privdec-peer-2"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other message is at work on a peer's folder, and hold it.

    Raises:
        RunError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error.strerror}); give another folder") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def state_path(folder: Path, run: str) -> Path:
    """Return where a run's state lies; a run's name is anybody's words, so it is only hashed."""
    return folder / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}.safetensors"


def save_state(path: Path, state: PeerState, *, durable: bool = True) -> None:
    """Write a state, whole or not at all, from which on its new shares and acknowledgements may leave.

    Args:
        durable: whether it must be safe on disk whatever happens to the machine.
    """
    snapshot = state.shares.snapshot(state.round_index)
    exchange, tensors = pack(replace(snapshot, edges={j: e for j, e in snapshot.edges.items() if e.sent or e.received}))
    arrays = {name: tensor.numpy() for name, tensor in {**snapshot.mass, **tensors}.items()}
    arrays |= {f"kept/{name}": np.array(value, order="C") for name, value in state.kept.items()}
    arrays |= {f"local/{name}": np.array(value, order="C") for name, value in state.local_arrays.items()}
    facts = {
        "format": FORMAT,
        "run": state.run,
        "peer": state.peer,
        "layout": state.layout.parts,
        "exchange": exchange,
        "orphaned": state.orphaned + state.shares.orphaned.total(),
        "handed": state.handed,
        "paid": state.paid,
        "bare": state.bare,
        "idle": state.idle,
    }
    write_atomically(path, save(arrays, {"state": json.dumps(facts)}), private=True, durable=durable)
    state.shares.committed(snapshot)


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
        raise RunError(f"{path} is no peer's state ({error}); restore it, or delete it to begin anew") from error


def _state(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> PeerState:
    if facts["format"] != FORMAT:
        raise ValueError(f"format {facts['format']!r}, not {FORMAT}")
    peer, apart = int(facts["peer"]), {"kept": dict[str, np.ndarray](), "local": dict[str, np.ndarray]()}
    tensors = {}
    for name, value in arrays.items():
        group, _, rest = name.partition("/")
        if group in apart:
            apart[group][rest] = value
        else:
            tensors[name] = torch.from_numpy(value)
    mass = {name: tensors[name] for name in ("x", "w")}
    durable = unpack(peer, facts["exchange"], tensors, mass)
    shares = protocol(peer, dict(mass), durable.incarnation, durable.edges)
    shares.restore(durable)
    return PeerState(
        run=str(facts["run"]),
        layout=Layout.from_json(facts["layout"]),
        shares=shares,
        kept=apart["kept"],
        round_index=durable.round_index,
        orphaned=int(facts["orphaned"]),
        handed=int(facts["handed"]),
        paid=int(facts["paid"]),
        bare=int(facts["bare"]),
        idle=bool(facts["idle"]),
        local_arrays=apart["local"],
    )
