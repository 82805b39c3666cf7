"""The messages between a strategy and the peers of a Flower app, and the records that they carry.

A message has a ConfigRecord with a single value, the bytes of a `PeerRequest` or a `PeerReport`, and ArrayRecords. What
passes between peers goes through the relay as frames: each large one as an Array, which Flower carries in pieces, and
all small ones together as one Array. Why so few values: Flower (1.41 to 1.43) checks each value of each record in
Python, several times on its way, and with a small model these checks are most of what a round costs.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.peer.app_pairs import UNTOLD
from flower_privdec.peer.app_state import Arrays
from flower_privdec.pushsum.exactly_once import RefusedError

R = TypeVar("R", ArrayRecord, ConfigRecord)

# The names of a message's records.
OURS = "privdec."  # begins all of them
SAYS = "privdec.says"  # the PeerRequest, or the PeerReport
INITIAL = "privdec.initial"
MODEL = "privdec.model"
INBOX = "privdec.inbox"
OUTBOX = "privdec.outbox"
MASS = "privdec.mass"

# What begins the names of records for the app's evaluate function in a message that is for its train function too, and
# of that function's metrics in the answer.
EVALUATION = "privdec.evaluation."

# The kinds of a request.
INTRODUCE = "introduce"
JOIN = "join"
GREET = "greet"
ROUND = "round"
DELIVER = "deliver"
EVALUATE = "evaluate"
MESH = "mesh"

# The requests that carry reports of ledgers, there and back. An evaluation pays for nothing, and leaves them out.
WITNESSED_KINDS = (GREET, ROUND, DELIVER)

FIELDS = "fields"  # the only key of the ConfigRecord SAYS
TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # made once, not for each message

# The remedy if a mod of Flower's fails because it needs what only Flower's own strategies or workflows send.
FLOWERS_MODS = (
    "take Flower's clipping and secure aggregation mods out of the app: PeerMod(clip_norm=..., seal=...) clips and "
    "encrypts in their place"
)
NEEDED_BY_MODS = ("secaggplus_configs", "clipping_norm")  # what these mods then say is missing, in flwr 1.41 to 1.43

LEDGER = "ledger of "  # begins the name of a frame that is a report of a ledger, and no share
PEER_MOD_FAILED = 1002  # the code of errors that PeerMod answers with; Flower's own codes are smaller


class _Record:
    """A record of plain fields, which travels as one value: JSON, in which bytes are text in Latin-1.

    Attributes:
        together: groups of fields that are columns of one table, so that their lists have one length.
    """

    together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def record(self) -> ConfigRecord:
        """Return the fields as a record; those that have their default are left out."""
        defaults = _DEFAULTS[type(self)]
        given = {name: value for name, value in self.__dict__.items() if value != defaults.get(name)}
        for name in _OF_BYTES[type(self)] & given.keys():
            given[name] = _as_text(given[name])
        return ConfigRecord({FIELDS: TEXT.encode(given).encode()})

    @classmethod
    def of(cls, content: RecordDict, remedy: str, code: str) -> Self:
        """Read the record of a message.

        Args:
            remedy: for the error: what to do.
            code: that of the error.

        Raises:
            RunError: the message has no such record.
        """
        given = cls._given(record_in(content, SAYS, ConfigRecord))
        checks = _CHECKS[cls]
        if not _NEEDED[cls] <= given.keys() <= checks.keys():
            raise RunError(remedy, code=code)
        if not all(checks[name](value) for name, value in given.items()):
            raise RunError(remedy, code=code)

        for together in cls.together:
            lengths = {len(given.get(name, ())) for name in together}
            if len(lengths) > 1:
                raise RunError(f"the message's {', '.join(together)} differ in length: {remedy}", code=code)
        return cls(**given)

    @classmethod
    def _given(cls, record: ConfigRecord | None) -> dict[str, Any]:
        """Return the fields that a record has, whatever their types; none if the record is not one of ours."""
        content: Any = None if record is None else record.get(FIELDS)
        try:
            given = json.loads(content.decode())
            for name in _OF_BYTES[cls] & given.keys():
                given[name] = _as_bytes(given[name])
        except (TypeError, ValueError, AttributeError, RecursionError):  # anybody may have sent it
            return {}
        return dict(given)


def _as_text(value: bytes | list[bytes]) -> str | list[str]:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return [one.decode("latin-1") for one in value]


def _as_bytes(value: str | list[str]) -> bytes | list[bytes]:
    if isinstance(value, str):
        return value.encode("latin-1")
    return [one.encode("latin-1") for one in value]


Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    """Return whether a value is a string of characters: JSON can also write halves of one, which no file's name has."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number of 64 bits; True is none here."""
    return type(value) is int and -(2**63) <= value < 2**63


# Whether a value has a field's type, just this one.
_ONE: dict[str, Check] = {
    "int": _is_whole,
    "str": _is_text,
    "float": lambda value: type(value) is float,
    "bool": lambda value: type(value) is bool,
    "bytes": lambda value: type(value) is bytes,
}


def _check_of(annotation: str) -> Check:
    """Return the check of a field's values, such as "list[int]"."""
    if annotation in _ONE:
        return _ONE[annotation]
    holds = _ONE[annotation.removeprefix("list[").removesuffix("]")]
    return lambda value: type(value) is list and all(map(holds, value))


@dataclass(frozen=True)
class PeerRequest(_Record):
    """What the strategy asks of a peer. It names no key, no ledger and, outside a simulation, no path.

    Attributes:
        kind: introduce, join, greet (only reports of ledgers), round, deliver, evaluate or mesh.
        run: the run's name.
        peer: the receiver.
        folder: where a simulation's peers keep their files.
        arrays: the key of the ArrayRecord that the app's functions look for.
        local_record: the name of an ArrayRecord that never leaves the peer: the initial arrays at first, then what the
            app's train function last answered under that name; it is given to both of the app's functions. Empty: none.
        dual: the step of dual averaging (`DualStep`) that gives the peer's model; empty if x / w is it.
        weighted_by: the metric of the app by whose value the peer counts, if its metrics leave; empty: by 1.
        round_index, rounds: the round, from 1, and how many there will be; deliver: the round that the mean is of.
        evaluated_round: round: the round whose model the app is to evaluate before it trains; 0 for none.
        founding: join: whether the initial arrays are this peer's mass, or only show the shapes of a model.
        receivers, weights: round: the peers j to which parts of the mass go, and W[j, peer], the part of each.
        wants_mass: whether to hand in (x, w), for the mean of the network.
        mean_of: if masses are masked, the peers whose masses the mean is taken of.
        neighbors, incarnations, keys: all peers that are known: the incarnation of each one's state and its public key.
        held_by, held: receivers and numbers of the shares that the strategy has and need not be handed in again.
        acknowledgements: frames: which shares of this peer's are in others' mass.
        scenario: mesh: what the peers agree on, and where they are, as YAML.
        round_size, disagreement: how many peers take part in a round, and how much of the variance of noise that
            cancels is left in their models; 0 and UNTOLD if that is not known.
        announcers, announced: round: the peers whose noise may cancel this one's, and what they announced to it.
    """

    together = (
        ("receivers", "weights"),
        ("neighbors", "incarnations", "keys"),
        ("held_by", "held"),
        ("announcers", "announced"),
    )

    kind: str
    run: str = ""
    peer: int = -1
    folder: str = ""
    arrays: str = "arrays"
    local_record: str = ""
    dual: str = ""
    weighted_by: str = ""
    round_index: int = 0
    rounds: int = 0
    evaluated_round: int = 0
    founding: bool = False
    receivers: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    wants_mass: bool = False
    mean_of: list[int] = field(default_factory=list)
    neighbors: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    held_by: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    acknowledgements: list[bytes] = field(default_factory=list)
    scenario: str = ""
    round_size: int = 0
    disagreement: float = UNTOLD
    announcers: list[int] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class PeerReport(_Record):
    """A peer's report to the strategy.

    Attributes:
        peer, n_peers: its number, and the number of peers.
        incarnation: the incarnation of its state in this run; 0 if it has no state.
        round_index: the last round in which it took part.
        key: its public key.
        sealed: whether it seals what it sends.
        trained: whether it trained now.
        evaluates_along: when introduced, whether its app can evaluate in a message that goes on to train.
        unevaluated: why its app could not evaluate in such a message; empty if it could, or was not to.
        idle: over a server, whether it took no step in the last round that it took part in.
        stopped: why it did not train; empty if it did.
        exhausted: whether its budget is spent, so that it will train no more.
        spent: its ε in words, with unit, adjacency and what was charged; empty if nothing is protected.
        epsilon: its ε; ∞ if nothing is protected. If the app itself protects single examples, at the end their ε.
        app_spent: the same in words, at the end.
        acknowledgements: frames: which shares are in its mass on disk.
        refused_keys, refused: the shares that it refused, and why.
        orphaned: how many of its shares went to states that were lost.
        address: HOST:PORT at which other peers can reach it; empty if they cannot.
        mean_of: the peers of the last masked sum that it entered.
        examples: the public number by which it counts.
        keeps_metrics: whether the app's metrics stay in its folder.
        cancels: whether it adds noise that cancels between peers.
        announced_to, announced: the peers to which it announces its session, and what; see `peer.app_pairs`.
        local: when introduced, the patterns of the names of arrays that never leave it.
    """

    together = (("refused_keys", "refused"), ("announced_to", "announced"))

    peer: int
    n_peers: int
    incarnation: int = 0
    round_index: int = 0
    key: bytes = b""
    sealed: bool = False
    trained: bool = False
    evaluates_along: bool = False
    unevaluated: str = ""
    idle: bool = False
    stopped: str = ""
    exhausted: bool = False
    spent: str = ""
    epsilon: float = 0.0
    app_spent: str = ""
    acknowledgements: list[bytes] = field(default_factory=list)
    refused_keys: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    orphaned: int = 0
    address: str = ""
    mean_of: list[int] = field(default_factory=list)
    examples: float = 1.0
    keeps_metrics: bool = False
    cancels: bool = False
    announced_to: list[int] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)
    local: list[str] = field(default_factory=list)


# For each kind of record: the types of its fields, as they are written above; their defaults; the checks of their
# values; the fields without a default; and those that hold bytes.
_KINDS: dict[type, dict[str, str]] = {
    record: {part.name: str(part.type) for part in fields(record)} for record in (PeerRequest, PeerReport)
}
_DEFAULTS: dict[type, dict[str, Any]] = {
    record: {
        part.name: [] if part.default is MISSING else part.default
        for part in fields(record)
        if part.default is not MISSING or part.default_factory is not MISSING
    }
    for record in (PeerRequest, PeerReport)
}
_CHECKS = {record: {name: _check_of(kind) for name, kind in kinds.items()} for record, kinds in _KINDS.items()}
_NEEDED = {record: _KINDS[record].keys() - _DEFAULTS[record].keys() for record in _KINDS}
_OF_BYTES = {record: {name for name, kind in kinds.items() if "bytes" in kind} for record, kinds in _KINDS.items()}

SMALL_FRAMES = "privdec.frames"  # the name of the Array that has the small frames
SMALL = 4096  # bytes of a small frame at most
LENGTHS = struct.Struct("<HI")  # before each small frame: the lengths of its name and of itself
MOST_FRAMES = 2**18  # in one Array: an object each, which takes many times as much memory as an empty one on the wire


def pack_bytes(frames: Mapping[str, bytes]) -> ArrayRecord:
    """Return frames, by name, as an ArrayRecord: the record that Flower carries in pieces."""
    record = ArrayRecord()
    small = list[bytes]()
    for name, content in frames.items():
        if len(content) > SMALL:
            record[name] = Array("uint8", (len(content),), "privdec.share", content)
        else:
            encoded = name.encode()
            small += (LENGTHS.pack(len(encoded), len(content)), encoded, content)
    if small:
        content = b"".join(small)
        record[SMALL_FRAMES] = Array("uint8", (len(content),), "privdec.share", content)
    return record


def unpack_bytes(record: ArrayRecord | None) -> list[tuple[str, bytes]]:
    """Return the frames of a record with their names; large ones, and small ones, each in their order.

    Raises:
        RefusedError: the small ones were not packed by `pack_bytes`.
    """
    frames = list[tuple[str, bytes]]()
    for name, array in (record or {}).items():
        if name == SMALL_FRAMES:
            frames += _small_frames(array.data)
        else:
            frames.append((name, array.data))
    return frames


def _small_frames(content: bytes) -> Iterable[tuple[str, bytes]]:
    """Yield the frames of one Array, with their names."""
    begin = 0
    count = 0
    while begin < len(content):
        count += 1
        if count > MOST_FRAMES:
            raise RefusedError(f"there are more than {MOST_FRAMES:,} frames in one record", code="frame.count")
        try:
            name_length, frame_length = LENGTHS.unpack_from(content, begin)
            name_end = begin + LENGTHS.size + name_length
            name = content[begin + LENGTHS.size : name_end].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise RefusedError(f"frames of {len(content)} bytes are not ours", code="frame.length") from error

        frame_end = name_end + frame_length
        if frame_end > len(content):
            raise RefusedError(f"frames of {len(content)} bytes are cut short", code="frame.length")
        yield name, content[name_end:frame_end]
        begin = frame_end


def record_in(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name and kind; None if it is missing."""
    record = content.get(name)
    return record if isinstance(record, kind) else None


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's, which may be written to."""
    return {name: array.numpy() for name, array in record.items()}


def sent_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays that a message brought, as NumPy's, which may be written to.

    Raises:
        RunError: one cannot be read.
    """
    return {name: sent_array(name, array) for name, array in record.items()}


def sent_array(name: str, array: Array) -> np.ndarray:
    """Return one array that a message brought; see `sent_arrays`."""
    try:
        value: object = array.numpy()  # of an archive, np.load returns another object
        if isinstance(value, np.ndarray):
            return value
        why = f"it is a {type(value).__name__}"
    except Exception as error:  # anybody may have sent it, and np.load raises whatever its bytes make it raise
        why = f"{type(error).__name__}: {one_line(error)}"
    raise RunError(f"array {name!r:.100} of the message cannot be read ({why:.200})", code="flower.sent-array")


def views_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as read-only NumPy arrays, which are views of the record's bytes."""
    return {name: _view(array) for name, array in record.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower's ArrayRecord: with the same names, order and types."""
    record = ArrayRecord()
    for name, value in arrays.items():
        record[name] = array_of(np.asarray(value))
    return record


# Flower (1.41 to 1.43) writes and reads arrays by np.save and np.load, which copy the numbers three times and parse the
# header of each array as Python. Here the same bytes are made and read with one copy, or none.


def array_of(value: np.ndarray) -> Array:
    """Return what Flower makes of an array, `Array(value)`."""
    if value.dtype.hasobject:
        return Array(value)
    header = _header(value.dtype, value.shape)
    numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return Array(str(value.dtype), value.shape, "numpy.ndarray", b"".join((header, numbers)))


class GivenArray(Array):
    """What `array_of` returns, whose bytes are made only if something asks for them.

    An app in this process asks for `numpy()`, a copy of its own. To write an array as a file and to parse that takes
    three copies, and longer than all else that is done to a small model. Whatever else is done to it (an app sends it,
    or keeps it in its context), it is Flower's own Array.

    Args:
        numbers: nobody writes to them any more.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self.__dict__.update(dtype=str(numbers.dtype), shape=numbers.shape, stype="numpy.ndarray", _numbers=numbers)

    def __getattr__(self, name: str) -> Any:
        if name != "data" or "_numbers" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.data = array_of(self.__dict__["_numbers"]).data
        return self.data

    def numpy(self) -> np.ndarray:
        """Return the array as NumPy's, which may be written to."""
        if "data" in self.__dict__:  # which the app may have replaced
            return super().numpy()
        return self.__dict__["_numbers"].copy()  # type: ignore[no-any-return]

    def view(self) -> np.ndarray | None:
        """Return the numbers where they lie, to be read only; None if there are bytes to be read."""
        return None if "data" in self.__dict__ else self.__dict__["_numbers"]

    def plain(self) -> Array:
        """Return the same array as Flower's class."""
        return Array(self.dtype, self.shape, self.stype, self.data)

    def deflate(self) -> bytes:
        """Return what Flower's class sends, with its name."""
        return self.plain().deflate()

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        ours = (self.dtype, self.shape, self.stype, self.data)
        return ours == (other.dtype, other.shape, other.stype, other.data)


def given_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as `record_of` does, for an app in this process; nobody writes to them any more."""
    record = ArrayRecord()
    for name, value in arrays.items():
        numbers = np.asarray(value)
        if numbers.dtype.hasobject:
            record[name] = array_of(numbers)
        else:
            record[name] = GivenArray(numbers)
    return record


def _view(array: Array) -> np.ndarray:
    """Return an array as NumPy's: a view, if its bytes are as `array_of` or Flower makes them; else as Flower does."""
    if isinstance(array, GivenArray):
        numbers = array.view()
        if numbers is not None:
            return numbers

    # Format 1.0 begins with the eight bytes of MAGIC, and two bytes with the length of the text that follows.
    content = array.data
    begin = 10 + int.from_bytes(content[8:10], "little")
    if array.stype != "numpy.ndarray" or content[:8] != MAGIC or begin > MOST_HEADER:
        return array.numpy()

    parsed = _parsed(content[:begin])
    if parsed is None:
        return array.numpy()
    dtype, size, shape = parsed
    is_whole = dtype.itemsize > 0 and len(content) - begin == size * dtype.itemsize
    if not is_whole:
        return array.numpy()
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(content, dtype, size, begin).reshape(shape)


MAGIC = npy.magic(1, 0)
MOST_HEADER = 2**10  # bytes of a header that is read here


@lru_cache(maxsize=256)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what np.save writes before the numbers of an array."""
    file = io.BytesIO()
    facts = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, facts)
    return file.getvalue()


@lru_cache(maxsize=256)
def _parsed(header: bytes) -> tuple[np.dtype[Any], int, tuple[int, ...]] | None:
    """Return the type, number of elements and shape that a header says; None if only np.load can read such an array."""
    file = io.BytesIO(header[len(MAGIC) :])
    try:
        shape, is_fortran, dtype = npy.read_array_header_1_0(file)
    except ValueError:
        return None
    if is_fortran or dtype.hasobject:
        return None
    return dtype, math.prod(shape), shape
