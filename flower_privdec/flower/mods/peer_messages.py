"""The messages between a strategy and the peers of a Flower app, and the records that they carry.

A message is one ConfigRecord with one value, the bytes of a `PeerRequest` or a `PeerReport`, and ArrayRecords. What
passes between peers goes through the relay as frames: the large ones as an Array each, which Flower carries in pieces,
and all small ones as one Array. Flower (1.41 to 1.43) checks each value of each record in Python, several times on its
way, so a round of a small model costs as much as it has values.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy

from flower_privdec.common.errors import RunError
from flower_privdec.peer.app_pairs import UNTOLD
from flower_privdec.peer.app_state import Arrays
from flower_privdec.pushsum.exactly_once import RefusedError

R = TypeVar("R", ArrayRecord, ConfigRecord)

# The names of a message's records.
SAYS = "privdec.says"  # the PeerRequest, or the PeerReport
INITIAL = "privdec.initial"
MODEL = "privdec.model"
INBOX = "privdec.inbox"
OUTBOX = "privdec.outbox"
MASS = "privdec.mass"

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

FIELDS = "fields"  # the only value of the ConfigRecord SAYS

# What to do if a mod of Flower's needs what its own strategies or workflows send.
FLOWERS_MODS = (
    "take Flower's clipping and secure aggregation mods out of the app: PeerMod(clip_norm=..., seal=...) clips and "
    "encrypts in their place"
)
NEEDED_BY_MODS = ("secaggplus_configs", "clipping_norm")  # in what these mods raise, in flwr 1.41 to 1.43

LEDGER = "ledger of "  # before the name of a sender or receiver: a report, among the shares
PEER_MOD_FAILED = 1002  # the code of an error that the mod itself answers with; Flower's own are small


class _Record:
    """A record of plain fields, which travels as one value: JSON, with bytes as the characters of the same codes.

    Attributes:
        together: fields that are lists of one length.
    """

    together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def record(self) -> ConfigRecord:
        """Return the fields as a record, without those that are as by default."""
        defaults = _DEFAULTS[type(self)]
        given = {name: value for name, value in self.__dict__.items() if value != defaults.get(name)}
        for name in _OF_BYTES[type(self)] & given.keys():
            given[name] = _as_text(given[name])
        text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        return ConfigRecord({FIELDS: text.encode()})

    @classmethod
    def of(cls, content: RecordDict, remedy: str, code: str) -> Self:
        """Read the record of a message.

        Raises:
            RunError: it has none of the kind; the remedy says what to do, and the code is the error's.
        """
        given = cls._given(record_in(content, SAYS, ConfigRecord))
        kinds = _KINDS[cls]
        if not _NEEDED[cls] <= given.keys() <= kinds.keys():
            raise RunError(remedy, code=code)
        if not all(_is(value, kinds[name]) for name, value in given.items()):
            raise RunError(remedy, code=code)

        for together in cls.together:
            if len({len(given.get(name, ())) for name in together}) > 1:
                raise RunError(
                    f"a message whose {', '.join(together)} are not of one length is none of ours: {remedy}", code=code
                )
        return cls(**given)

    @classmethod
    def _given(cls, record: ConfigRecord | None) -> dict[str, Any]:
        """Return the fields that a record has, of any types; none if it is not a record of ours."""
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


def _is(value: Any, kind: str) -> bool:
    """Return whether a value is of a field's type, as the type is written here; whole numbers have 64 bits."""
    values = [value]
    if kind.startswith("list["):
        if type(value) is not list:
            return False
        kind = kind[5:-1]
        values = value
    if not {*map(type, values)} <= {_TYPES[kind]}:
        return False
    return kind != "int" or not values or (min(values) >= -(2**63) and max(values) < 2**63)


_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "bytes": bytes}


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
        round_index, rounds: the round, from 1, and how many there will be; deliver: the round whose mean it is.
        founding: join: whether the initial arrays are this peer's mass, or only say what a model looks like.
        receivers, weights: round: the peers j that W[j, peer] of the mass goes to.
        wants_mass: whether to hand in (x, w), for the mean of the network.
        mean_of: the peers whose mean it is, if their masses are masked.
        neighbors, incarnations, keys: all peers that are known: the incarnation of each one's state and its public key.
        held_by, held: which shares need not be handed in again: receivers and numbers.
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
        peer, n_peers: which it is, of how many.
        incarnation: the incarnation of its state in this run; 0 if it has no state.
        round_index: the last round in which it took part.
        key: its public key.
        sealed: whether it seals what it sends.
        trained: whether it trained now.
        idle: over a server, whether it took no step in the last round that it took part in.
        stopped: why it did not train; empty if it did.
        exhausted: whether that is for good, its budget being spent.
        spent: its ε in words, with unit, adjacency and what was charged; empty if nothing is protected.
        epsilon: its ε; ∞ if nothing is protected. If the app protects its examples, at the end theirs.
        app_spent: that of the app's examples in words, at the end.
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


_KINDS: dict[type, dict[str, str]] = {  # of each record: its fields' types, as they are written here
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


_NEEDED = {record: _KINDS[record].keys() - _DEFAULTS[record].keys() for record in _KINDS}
_OF_BYTES = {record: {name for name, kind in kinds.items() if "bytes" in kind} for record, kinds in _KINDS.items()}

TOGETHER = "privdec.frames"  # the name of the Array that has the small frames
SMALL = 4096  # bytes of a small frame
LENGTHS = struct.Struct("<HI")  # bytes of a name, and of the frame that follows it


def pack_bytes(frames: Mapping[str, bytes]) -> ArrayRecord:
    """Return frames as a record that Flower carries in pieces, whatever they hold."""
    record = ArrayRecord()
    together = list[bytes]()
    for name, content in frames.items():
        if len(content) > SMALL:
            record[name] = Array("uint8", (len(content),), "privdec.share", content)
        else:
            encoded = name.encode()
            together += (LENGTHS.pack(len(encoded), len(content)), encoded, content)
    if together:
        content = b"".join(together)
        record[TOGETHER] = Array("uint8", (len(content),), "privdec.share", content)
    return record


def unpack_bytes(record: ArrayRecord | None) -> list[tuple[str, bytes]]:
    """Return the frames of a record with their names, those of one size in their order.

    Raises:
        RefusedError: it was packed otherwise.
    """
    frames = list[tuple[str, bytes]]()
    for name, array in (record or {}).items():
        if name == TOGETHER:
            frames += _apart(array.data)
        else:
            frames.append((name, array.data))
    return frames


def _apart(content: bytes) -> Iterable[tuple[str, bytes]]:
    """Yield the frames of one Array, with their names."""
    begin = 0
    while begin < len(content):
        try:
            name_bytes, frame_bytes = LENGTHS.unpack_from(content, begin)
            middle = begin + LENGTHS.size + name_bytes
            name = content[begin + LENGTHS.size : middle].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise RefusedError(f"frames of {len(content)} bytes are none of ours", code="frame.length") from error
        begin = middle + frame_bytes
        if begin > len(content):
            raise RefusedError(f"frames of {len(content)} bytes are cut short", code="frame.length")
        yield name, content[middle:begin]


def record_in(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name and kind; None if it is missing."""
    record = content.get(name)
    return record if isinstance(record, kind) else None


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's, which may be written to."""
    return {name: array.numpy() for name, array in record.items()}


def views_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's, to be read only: they lie in the record, and no number is copied."""
    return {name: _view(array) for name, array in record.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return arrays as the record that the framework knows: same names, order and types."""
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


def _view(array: Array) -> np.ndarray:
    """Return an array as NumPy's, as a view if it is as `array_of` or Flower made it."""
    content = array.data
    begin = 10 + int.from_bytes(content[8:10], "little")
    if array.stype != "numpy.ndarray" or content[:8] != MAGIC or begin > MOST_HEADER:
        return array.numpy()

    parsed = _parsed(content[:begin])
    if parsed is None or not parsed[0].itemsize or len(content) - begin != parsed[1] * parsed[0].itemsize:
        return array.numpy()
    dtype, size, shape = parsed
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
    """Return the type, the number of numbers and the shape that a header says; None if np.load has to say more."""
    file = io.BytesIO(header[len(MAGIC) :])
    try:
        shape, is_fortran, dtype = npy.read_array_header_1_0(file)
    except ValueError:
        return None
    if is_fortran or dtype.hasobject:
        return None
    return dtype, math.prod(shape), shape
