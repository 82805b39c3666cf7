"""A peer's mass (x, w), its shares in transit and their frames, exactly once; and how all of it is kept in a file.

Each share takes its part off the sender's mass and stays with the sender, frozen, until the receiver has said that it
is in *its* mass on disk; until then the sender hands in the same bytes again wherever the relay does not hold them. A
receiver takes the next number of each sender alone, so a share that comes twice is not added, one that comes before
its time is refused and comes again, and it says what it has in every answer. So whichever messages are lost, late or
repeated, and whoever is killed and started again, over all peers Σ mass + Σ shares not yet taken stays Σ at the
beginning + Σ updates. (In floating point each addition rounds; the number subtracted here is the one added there.)

A state that is lost begins anew under another epoch, with x = 0 and w = 0: it trains when its first share has come.
What had been on its way to the lost one is stranded, x with w, which moves no ratio. A state that is restored from an
older copy is found out by what others say they had from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_privdec.common.files import write_atomically
from flower_privdec.errors import RunError
from flower_privdec.pushsum.exactly_once import RefusedError

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
        return np.result_type(np.float32, *(kind for _, kind, _ in self._floating())).newbyteorder("=")

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


MAGIC = b"PDS1"
_LENGTH, _WEIGHT = struct.Struct("<I"), struct.Struct("<d")
Opened = tuple[Layout, np.ndarray, float]


@dataclass(frozen=True)
class ShareHeader:
    """What everybody can read of a share, and nobody change.

    Attributes:
        run: the run's name.
        sender, receiver: peers.
        epoch, addressed: the sender's and the receiver's: a state that was lost and begun anew has another.
        number: its place on this edge between these epochs, from 1.
        round_index: the sender's round, from 1.
        sealed: whether the body is.
    """

    run: str
    sender: int
    receiver: int
    epoch: int
    addressed: int
    number: int
    round_index: int
    sealed: bool

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, content: bytes) -> ShareHeader:
        """Return the header that bytes say.

        Raises:
            RefusedError: they say none.
        """
        try:
            given = json.loads(content)
            header = cls(**given)
        except (ValueError, TypeError, RecursionError) as error:
            raise RefusedError("it has no header of a share") from error
        kinds = {name: type(value) for name, value in asdict(header).items()}
        if kinds != {name: {"str": str, "int": int, "bool": bool}[kind] for name, kind in cls.__annotations__.items()}:
            raise RefusedError(f"its header says {given}, which is no share's")
        return header


def frame(header: ShareHeader, body: bytes) -> bytes:
    """Return a share as bytes."""
    head = header.encode()
    return MAGIC + _LENGTH.pack(len(head)) + head + body


def unframe(content: bytes) -> tuple[ShareHeader, bytes, bytes]:
    """Return a share's header, the same as bytes, and the body.

    Raises:
        RefusedError: the bytes are no share.
    """
    start = len(MAGIC) + _LENGTH.size
    if not content.startswith(MAGIC) or len(content) < start:
        raise RefusedError("it is no share")
    stop = start + _LENGTH.unpack_from(content, len(MAGIC))[0]
    head = content[start:stop]
    return ShareHeader.decode(head), head, content[stop:]


def pack_body(layout: Layout, x: np.ndarray, w: float) -> bytes:
    """Return what a share holds."""
    said = json.dumps(layout.parts).encode()
    return _LENGTH.pack(len(said)) + said + _WEIGHT.pack(w) + x.astype(x.dtype.newbyteorder("<"), copy=False).tobytes()


def unpack_body(body: bytes) -> Opened:
    """Return the layout, x and w that a share holds.

    Raises:
        RefusedError: it holds none, or they are no part of a mass: not finite, or w <= 0.
    """
    try:
        stop = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        layout = Layout.from_json(json.loads(body[_LENGTH.size : stop]))
        (w,) = _WEIGHT.unpack_from(body, stop)
        dtype = layout.dtype.newbyteorder("<")
        x = np.frombuffer(body, dtype, offset=stop + _WEIGHT.size).astype(layout.dtype)
    except (struct.error, ValueError, TypeError, OverflowError, SyntaxError, RecursionError) as error:
        raise RefusedError(f"what it holds cannot be read ({error})") from error
    if x.size != layout.size:
        raise RefusedError(f"it holds {x.size} numbers, and its arrays have {layout.size}")
    if not (np.isfinite(x).all() and np.isfinite(w) and w > 0):
        raise RefusedError("it is not finite, or its weight is not > 0")
    return layout, x, w


Seal = Callable[[int, bytes, bytes], bytes]  # for whom, header, body
Unseal = Callable[[int, bytes, bytes], bytes]  # from whom, header, sealed


@dataclass
class OutLink:
    """What a peer remembers of those it sends to.

    Attributes:
        epoch: the receiver's, that the numbers are about.
        sent: the number of the last share.
        frozen: the shares of which the receiver has not yet said that it has them, by number.
    """

    epoch: int
    sent: int = 0
    frozen: dict[int, bytes] = field(default_factory=dict)


@dataclass
class PeerState:
    """All that a peer has to remember of a run.

    Attributes:
        run, peer: whose it is.
        layout: of the model's arrays.
        x, w: the mass; z = x / w is the model.
        kept: the arrays that are not mixed.
        epoch: of this state, at random.
        round_index: the last round it took part in; 0 before the first.
        links: to those it sends to.
        received: the last number taken, by sender and by the sender's epoch.
        stranded: how many shares went to states that were lost.
        handed: the serial of the last mean that it had a part in, outside a round.
        paid: how many payments the peer's ledger held when it last paid; one with fewer is not the same.
        local_arrays: of the record that never leaves the peer (`Asked.local_record`); empty where there is none.
        bare: how many updates of its own are in it without protection.
        idle: over a server, whether it took no step in its last round, and so has no part in that round's mean.
    """

    run: str
    peer: int
    layout: Layout
    x: np.ndarray
    w: float
    kept: dict[str, np.ndarray]
    epoch: int = field(default_factory=lambda: secrets.randbits(62) + 1)
    round_index: int = 0
    links: dict[int, OutLink] = field(default_factory=dict)
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    stranded: int = 0
    handed: int = 0
    paid: int = 0
    bare: int = 0
    idle: bool = False
    local_arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def begun(cls, run: str, peer: int, arrays: Mapping[str, np.ndarray], founding: bool) -> PeerState:
        """Return a state at the start: the arrays given with weight 1, or nothing at all for who comes later.

        Raises:
            RunError: the arrays are no model, or not finite.
        """
        layout = Layout.of(arrays)
        start = layout.vector(arrays)
        if not np.isfinite(start).all():
            raise RunError("initial_arrays are not finite: check how the model is made")
        x = start if founding else np.zeros_like(start)
        return cls(run, peer, layout, x.astype(layout.dtype), float(founding), layout.kept(arrays))

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
        if self.links or self.received:
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
        self.x, self.w = x.astype(self.layout.dtype), 1.0

    # What comes in.

    def take(self, content: bytes, unseal: Unseal, only_sealed: bool) -> bool:
        """Add a share to the mass.

        Args:
            content: as it came.
            unseal: opens what is sealed.
            only_sealed: whether an open share is refused.

        Returns:
            Whether it was added; False for one that was taken before.

        Raises:
            RefusedError: it is no share for this peer, not the next, changed, not of these arrays, or not finite.
        """
        header, head, body = unframe(content)
        self._check_address(header, only_sealed)
        taken = self.received.get(header.sender, {}).get(header.epoch, 0)
        if 1 <= header.number <= taken:
            return False
        if header.number != taken + 1:
            raise RefusedError(f"it is number {header.number}, and {taken + 1} has to come first")
        layout, x, w = unpack_body(unseal(header.sender, head, body) if header.sealed else body)
        if difference := self.layout.differs(layout):
            raise RefusedError(f"its {difference}, as in this peer's model: build the same model at every peer")
        with np.errstate(over="ignore"):
            total = self.x + x
        if not np.isfinite(total).all():
            raise RefusedError("it would make the model infinite")
        self.x, self.w = total, self.w + w
        self.received.setdefault(header.sender, {})[header.epoch] = header.number
        return True

    def _check_address(self, header: ShareHeader, only_sealed: bool) -> None:
        if (header.run, header.receiver, header.addressed) != (self.run, self.peer, self.epoch):
            raise RefusedError(
                f"it is for peer {header.receiver} in run {header.run!r}, epoch {header.addressed}, and this is peer "
                f"{self.peer} in run {self.run!r}, epoch {self.epoch}"
            )
        if header.sender == self.peer:
            raise RefusedError("it says that this peer sent it itself")
        if only_sealed and not header.sealed:
            raise RefusedError("it is not sealed, and this peer takes sealed shares alone")

    def acknowledge(self, receiver: int, epoch: int, number: int) -> None:
        """Forget the shares that a receiver has in its mass.

        Raises:
            RunError: it has more than was sent: this state is an old copy.
        """
        link = self.links.get(receiver)
        if epoch != self.epoch or link is None:
            return  # about an earlier state of this peer
        if number > link.sent:
            raise RunError(
                f"peer {receiver} has had share {number} of peer {self.peer}, whose state says that it sent "
                f"{link.sent}: the state is an old copy; delete it, and the peer begins anew"
            )
        for old in [each for each in link.frozen if each <= number]:
            del link.frozen[old]

    def meet(self, epochs: Mapping[int, int]) -> None:
        """Give up what is on its way to states that were lost."""
        for receiver, link in self.links.items():
            if epochs.get(receiver, link.epoch) != link.epoch:
                self.stranded += len(link.frozen)
                self.links[receiver] = OutLink(epochs[receiver])

    # What leaves.

    def split(self, weights: Mapping[int, float], epochs: Mapping[int, int], seal: Seal | None) -> None:
        """Freeze a share for each receiver and take it off the mass.

        Args:
            weights: W[j, peer] of each receiver j, as `check_shares` has them; what is left of 1 is the peer's own.
            epochs: the receivers', whom `meet` knows.
            seal: None leaves the shares open.
        """
        if not self.w > 0:
            return
        parts = {weight: (self.x * self.x.dtype.type(weight), self.w * weight) for weight in set(weights.values())}
        for receiver, weight in sorted(weights.items()):
            self._freeze(receiver, epochs[receiver], *parts[weight], seal)

    def _freeze(self, receiver: int, epoch: int, x: np.ndarray, w: float, seal: Seal | None) -> None:
        link = self.links.setdefault(receiver, OutLink(epoch))
        link.sent += 1
        header = ShareHeader(
            self.run, self.peer, receiver, self.epoch, epoch, link.sent, self.round_index, seal is not None
        )
        body = pack_body(self.layout, x, w)
        sealed = body if seal is None else seal(receiver, header.encode(), body)
        link.frozen[link.sent] = frame(header, sealed)
        self.x, self.w = self.x - x, self.w - w


def check_shares(weights: Mapping[int, float], others: set[int]) -> None:
    """Refuse weights that would leave a peer nothing, or more than it has, or go to nobody.

    Raises:
        RefusedError: naming them.
    """
    if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
        raise RefusedError(f"the weights {dict(weights)} must be > 0 with a sum < 1")
    if weights.keys() - others:
        raise RefusedError(f"shares for peers {sorted(weights.keys() - others)} must be for others that are there")


FORMAT = "flower-privdec-peer-1"


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
    """Write a state, whole or not at all; if `durable`, safe on disk whatever happens to the machine."""
    arrays = {"x": state.x} | {f"kept/{name}": np.array(value, order="C") for name, value in state.kept.items()}
    arrays |= {f"local/{name}": np.array(value, order="C") for name, value in state.local_arrays.items()}
    for receiver, link in state.links.items():
        for number, content in link.frozen.items():
            arrays[f"frozen/{receiver}/{number}"] = np.frombuffer(content, dtype=np.uint8)
    said = {
        "format": FORMAT,
        "run": state.run,
        "peer": state.peer,
        "w": state.w.hex(),
        "epoch": state.epoch,
        "round": state.round_index,
        "stranded": state.stranded,
        "handed": state.handed,
        "paid": state.paid,
        "bare": state.bare,
        "idle": state.idle,
        "layout": state.layout.parts,
        "links": {receiver: [link.epoch, link.sent] for receiver, link in state.links.items()},
        "received": [[who, *pair] for who, epochs in state.received.items() for pair in epochs.items()],
    }
    write_atomically(path, save(arrays, {"state": json.dumps(said)}), private=True, durable=durable)


def load_state(path: Path) -> PeerState | None:
    """Read a state, or None where there is none.

    Raises:
        RunError: the file cannot be read, or is no state.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            said = json.loads(file.metadata()["state"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return _state(said, arrays)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RunError(f"{path} is no peer's state ({error}); restore it, or delete it to begin anew") from error


def _state(said: dict[str, object], arrays: dict[str, np.ndarray]) -> PeerState:
    if said["format"] != FORMAT:
        raise ValueError(f"format {said['format']!r}, not {FORMAT}")
    links = {int(receiver): OutLink(int(epoch), int(sent)) for receiver, (epoch, sent) in said["links"].items()}  # type: ignore[attr-defined]
    received: dict[int, dict[int, int]] = {}
    for sender, epoch, number in said["received"]:  # type: ignore[attr-defined]
        received.setdefault(int(sender), {})[int(epoch)] = int(number)
    for name, value in arrays.items():
        if name.startswith("frozen/"):
            _, receiver, number = name.split("/")
            links[int(receiver)].frozen[int(number)] = value.tobytes()
    return PeerState(
        run=str(said["run"]),
        peer=int(said["peer"]),  # type: ignore[call-overload]
        layout=Layout.from_json(said["layout"]),  # type: ignore[arg-type]
        x=arrays["x"],
        w=float.fromhex(str(said["w"])),
        kept={name.removeprefix("kept/"): value for name, value in arrays.items() if name.startswith("kept/")},
        epoch=int(said["epoch"]),  # type: ignore[call-overload]
        round_index=int(said["round"]),  # type: ignore[call-overload]
        links=links,
        received=received,
        stranded=int(said["stranded"]),  # type: ignore[call-overload]
        handed=int(said["handed"]),  # type: ignore[call-overload]
        paid=int(said["paid"]),  # type: ignore[call-overload]
        bare=int(said["bare"]),  # type: ignore[call-overload]
        idle=bool(said["idle"]),
        local_arrays={
            name.removeprefix("local/"): value for name, value in arrays.items() if name.startswith("local/")
        },
    )
