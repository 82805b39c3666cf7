"""Frames: what travels between peers, as bytes; wire codecs, which encode rows; a peer's edges as a file holds them.

A frame is a fixed header, a line for each row, and the rows as they lie in memory:

    header      88 bytes  magic, version, kind, flags, sender, receiver, round, exchange, number of rows, the sender's
                          incarnation, the receiver's, boot, number, length of the whole frame, the run
    share,      40 bytes  for each row: type, number of axes, length of each of up to four axes
    rows                  then zeros up to a multiple of 64, and each row, with zeros up to a multiple of 8
    hello       72 bytes  the counters
    acknowledgement  8 bytes  the boot that froze the share
    progress     0 bytes  the number alone
    ledger report  48 bytes  challenge, answer, public key or zeros; the number: of boots of the sender that follow
                  16 bytes  for each of them, and then for each boot of the receiver: the boot and its lines

All numbers are little-endian. Names are not sent: the run defines which rows come in which order. A frame has one
encoding: whatever decodes is encoded to the same bytes again, so zeros must be zeros and nothing may follow. Decoded
rows are views of the frame's own bytes, and nothing is ever run or unpickled.

The body of a share or a ledger report may be encrypted (`Seal`): the header, which is then authenticated, names sender,
receiver, their incarnations, number, round and run.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from flower_privdec.common.catalogue import CODECS
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.user_code import load_own
from flower_privdec.pushsum.codecs.casts import ExactCodec
from flower_privdec.pushsum.exactly_once import LAST, Acknowledgement, Durable, Edge, FrozenShare, Hello, RefusedError
from flower_privdec.pushsum.witness import MANY, LedgerReport

if TYPE_CHECKING:  # a peer whose app has no torch needs none: its rows are NumPy's
    import torch
    from torch import Tensor

    from flower_privdec.core import State

Buffer = bytes | bytearray | memoryview
MAGIC = b"prvd"
VERSION = 7
HEADER = struct.Struct("<4sHBBIIQIIQQQQQ16s")
HELLO = struct.Struct("<9Q")
ACKNOWLEDGEMENT = struct.Struct("<Q")
LEDGER_REPORT = struct.Struct("<2Q32s")
LINES = struct.Struct("<2Q")
LINE = struct.Struct("<BB6x4Q")  # type, number of axes, their lengths
SMALL = 256  # bytes that a frame without rows has at most, but for a report
REPORT = 256 + 2 * MANY * LINES.size  # that a report has at most
AXES = 4
DATA_AT, ROW_AT = 64, 8  # the rows begin at a multiple of the first, each at one of the second
CHUNK = 2**18  # numbers checked at a time
LAYOUTS = 64  # of frames with rows that are remembered
OPENED, SEALED, WANT, LEVEL = 1, 2, 4, 16  # flags; times WANT a hello's `want`, 0 to 3, and times LEVEL its `level`
WIRE_TYPES = {1: "float16", 2: "float32", 3: "float64", 4: "bfloat16", 5: "uint8"}
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # of as many bytes as a number
CODES = {dtype: code for code, dtype in WIRE_TYPES.items()}


@dataclass(frozen=True, eq=False)
class RowMessage:
    """Named rows from one peer to another, for an exchange.

    Attributes:
        sender, receiver: peers.
        round_index, at: of the run, and of the exchange in the algorithm's program.
        values: one row of each name, as encoded for the wire.
    """

    sender: int
    receiver: int
    round_index: int
    at: int
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Progress:
    """How far a peer of a synchronous run is.

    Attributes:
        sender, receiver: peers.
        exchanges: how many it has performed, with its state on disk, plus one; 0 before it is ready for the first.
    """

    sender: int
    receiver: int
    exchanges: int


Message = FrozenShare[Any] | Acknowledgement | Hello | RowMessage | Progress | LedgerReport


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    ACKNOWLEDGEMENT = 2
    SHARE = 3
    ROWS = 4
    PROGRESS = 5
    LEDGER_REPORT = 6


KIND_OF = {
    Hello: FrameKind.HELLO,
    Acknowledgement: FrameKind.ACKNOWLEDGEMENT,
    FrozenShare: FrameKind.SHARE,
    RowMessage: FrameKind.ROWS,
    Progress: FrameKind.PROGRESS,
    LedgerReport: FrameKind.LEDGER_REPORT,
}
BODY_BYTES = {FrameKind.HELLO: HELLO.size, FrameKind.ACKNOWLEDGEMENT: ACKNOWLEDGEMENT.size, FrameKind.PROGRESS: 0}
SEALABLE = (FrameKind.SHARE, FrameKind.LEDGER_REPORT)
HEADER_FIELDS = ("sender", "receiver", "round_index", "at", "incarnation", "addressed", "boot", "number")


class FrameHeader(NamedTuple):
    """The first bytes of a frame, field by field; see the module."""

    magic: bytes
    version: int
    kind: int
    flags: int
    sender: int
    receiver: int
    round_index: int
    at: int
    rows: int
    incarnation: int
    addressed: int
    boot: int
    number: int
    length: int
    run: bytes


@dataclass(frozen=True)
class RowFormat:
    """How a row has to look on the wire.

    Attributes:
        shape: of up to four axes.
        dtype: of WIRE_TYPES; rows are decoded as torch's or NumPy's, as it is.
        nonnegative: whether each of its numbers is at least 0, as a push-sum weight is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | np.dtype[Any]
    nonnegative: bool = False


RowFormats = Mapping[str, RowFormat]  # in the order in which they are sent


def type_name(dtype: torch.dtype | np.dtype[Any] | str) -> str:
    """Return the name of a type of numbers, of torch or of NumPy."""
    return str(dtype).removeprefix("torch.")


def formats_of(values: Mapping[str, Tensor]) -> RowFormats:
    """Return the formats of rows as encoded for the wire, in the order in which they are sent; `w` is a weight."""
    return {
        name: RowFormat(tuple(value.shape), value.dtype, name in ("w", "average.w")) for name, value in values.items()
    }


def frame_size(formats: RowFormats) -> int:
    """Return the bytes of a frame with rows."""
    return HEADER.size + _layout(tuple(formats.values())).size


class _Layout(NamedTuple):
    """What follows the header of a frame with rows: the lines that describe them, where each row begins and ends, and
    the bytes of all."""

    lines: list[bytes]
    spans: list[tuple[int, int]]
    size: int


@lru_cache(LAYOUTS)
def _layout(rows: tuple[RowFormat, ...]) -> _Layout:
    lines = list[bytes]()
    spans = list[tuple[int, int]]()
    end = HEADER.size + len(rows) * LINE.size
    for number, row in enumerate(rows):
        lines.append(
            LINE.pack(CODES[type_name(row.dtype)], len(row.shape), *row.shape, *(0,) * (AXES - len(row.shape)))
        )
        unit = ROW_AT if number else DATA_AT
        begin = -(-end // unit) * unit
        end = begin + math.prod(row.shape) * row.dtype.itemsize
        spans.append((begin - HEADER.size, end - HEADER.size))
    return _Layout(lines, spans, -(-end // ROW_AT) * ROW_AT - HEADER.size)


class Seal(Protocol):
    """Encrypts what shares and ledger reports hold, end to end.

    Attributes:
        overhead: bytes that encryption adds.
    """

    overhead: int

    def encrypt(self, receiver: int, header: bytes, body: bytes) -> bytes:
        """Return a body that only its receiver can read, bound to its header."""

    def decrypt(self, sender: int, header: bytes, body: bytes) -> bytes:
        """Return what a sender encrypted for this peer.

        Raises:
            RefusedError: another one encrypted it, with another header or for another peer, or it was changed since.
        """


class FrameCodec:
    """Encodes the messages of one run as frames, and decodes them.

    Args:
        run: bytes that are the same at all peers of a run, and at no other's, such as the hash of the scenario.
        shares: the rows of a share; None where there are no shares.
        exchanges: the rows of each exchange that sends such, by its index in the algorithm's program.
        seal: encrypts shares and ledger reports; None leaves them in plain text.

    Attributes:
        cap: bytes of the largest frame.
    """

    def __init__(
        self,
        run: bytes,
        shares: RowFormats | None = None,
        exchanges: Mapping[int, RowFormats] | None = None,
        seal: Seal | None = None,
    ) -> None:
        self.run = hashlib.sha256(run).digest()[:16]
        self.shares = shares
        self.exchanges = exchanges or {}
        self._seal = seal
        self._overhead = 0 if seal is None else seal.overhead
        share = 0 if shares is None else frame_size(shares) + self._overhead
        self.cap = max([SMALL, share, *map(frame_size, self.exchanges.values())])

    # --- messages to bytes ---

    def encode(self, message: Message) -> list[Buffer]:
        """Return the frame of a message in buffers, to be sent one after the other; its rows are the message's own.

        Raises:
            struct.error, KeyError: a number or a type that frames do not have, which is the caller's mistake.
        """
        body: list[Buffer] = []
        if isinstance(message, FrozenShare | RowMessage):
            layout = _layout(tuple(formats_of(message.values).values()))
            body = [*layout.lines]
            at = len(layout.lines) * LINE.size
            for (begin, end), value in zip(layout.spans, message.values.values(), strict=True):
                whole = _integers_of(value)
                little = whole.astype(whole.dtype.newbyteorder("<"), copy=False)
                body += [bytes(begin - at), little.view(np.uint8).data]
                at = end
            body.append(bytes(layout.size - at))
        elif isinstance(message, Hello):
            counters = (message.challenge, message.answers, message.knows, message.sent, message.sent_boot)
            seen = (message.acknowledged, message.received, message.seen, message.seen_boot)
            body = [HELLO.pack(*counters, *seen)]
        elif isinstance(message, Acknowledgement):
            body = [ACKNOWLEDGEMENT.pack(message.share_boot)]
        elif isinstance(message, LedgerReport):
            body = [LEDGER_REPORT.pack(message.challenge, message.answers, message.public_key)]
            body += (LINES.pack(*counted) for counted in (*message.own, *message.seen))
        seal = self._seal if KIND_OF[type(message)] in SEALABLE else None
        header = self._header(message, HEADER.size + sum(map(len, body)) + (self._overhead if seal else 0))
        if seal is not None:
            body = [seal.encrypt(message.receiver, header, b"".join(body))]
        return [header, *body]

    def _header(self, message: Message, length: int) -> bytes:
        """Return the header of a message; what its kind does not have is 0."""
        kind = KIND_OF[type(message)]
        facts = [getattr(message, name, 0) for name in HEADER_FIELDS]
        ends = facts[:4]
        counters = [len(getattr(message, "values", ())), *facts[4:]]
        if isinstance(message, Progress | LedgerReport):
            counters[-1] = message.exchanges if isinstance(message, Progress) else len(message.own)
        flags = SEALED if self._seal is not None and kind in SEALABLE else 0
        if isinstance(message, Hello):
            flags |= OPENED * message.opened | WANT * message.want | LEVEL * message.level
        return HEADER.pack(MAGIC, VERSION, kind, flags, *ends, *counters, length, self.run)

    # --- bytes to messages ---

    def read_header(self, data: Buffer, cap: int | None = None) -> FrameHeader:
        """Return the header of a frame, of which no more need be there.

        Args:
            data: the first bytes.
            cap: the largest frame that is accepted, in bytes; that of the run when not given.

        Raises:
            RefusedError: naming the sender (as it calls itself), what is wrong and what would be right.
        """
        if len(data) < HEADER.size:
            raise RefusedError(f"a frame of {len(data)} bytes must have a header of {HEADER.size}", code="frame.length")
        header = FrameHeader(*HEADER.unpack_from(data))
        if header.magic != MAGIC:
            raise RefusedError(
                f"a frame that begins with {header.magic!r} must begin with {MAGIC!r}; is it flower_privdec's?",
                code="frame.magic",
            )
        if header.version != VERSION:
            problem = f"has version {header.version} of the protocol, not {VERSION}; update one of the two"
            code = "version"
        elif header.run != self.run:
            problem = f"is of run {header.run.hex()}, not {self.run.hex()}; give all peers one scenario and one model"
            code = "run"
        elif not 1 <= header.kind <= len(FrameKind):
            problem = f"is of kind {header.kind}, which must be one of 1 to {len(FrameKind)}"
            code = "kind"
        elif header.round_index >= 2**63:
            problem = f"is of round {header.round_index}, which must be < 2^63"
            code = "round"
        else:
            if cap is None:
                cap = REPORT + self._overhead if header.kind == FrameKind.LEDGER_REPORT else self.cap
            if HEADER.size <= header.length <= cap:
                return header
            problem = f"claims {header.length} bytes, which must be {HEADER.size} to {cap}"
            code = "length"
        raise RefusedError(f"a frame of peer {header.sender} {problem}", code=f"frame.{code}")

    def decode(self, data: Buffer, cap: int | None = None) -> Message:
        """Return the message of a whole frame.

        Args:
            data: the frame and nothing else.
            cap: see `read_header`.

        Returns:
            The message; its rows are views of the data, or of what was decrypted.

        Raises:
            RefusedError: naming the sender (as it calls itself), what is wrong and what would be right.
        """
        header = self.read_header(data, cap)
        view = memoryview(data)
        size = len(data)
        frame = f"a frame of peer {header.sender}"
        kind = FrameKind(header.kind)
        formats = None
        if header.length != size:
            raise RefusedError(f"{frame} has {size} bytes and claims {header.length}", code="frame.length")
        if kind in (FrameKind.SHARE, FrameKind.ROWS):
            formats = self.shares if kind == FrameKind.SHARE else self.exchanges.get(header.at)
            if formats is None:
                raise RefusedError(
                    f"{frame} is of kind {kind} for exchange {header.at}, which this algorithm does not have; all "
                    "peers must run one scenario",
                    code="frame.exchange",
                )
        seal = self._seal if kind in SEALABLE else None
        if bool(header.flags & SEALED) != (seal is not None):
            sealed = "sealed" if seal is None else "not sealed"
            raise RefusedError(f"{frame} is {sealed}; seal at all peers, or at none", code="frame.sealed")
        if formats is not None and header.rows != len(formats):
            raise RefusedError(
                f"{frame} has {header.rows} rows, not {len(formats)}; all peers must run one scenario",
                code="frame.rows",
            )
        expected = HEADER.size + BODY_BYTES[kind] if kind in BODY_BYTES else size
        if formats is not None:
            expected = frame_size(formats) + (self._overhead if seal else 0)
        if size != expected:
            raise RefusedError(
                f"{frame} of kind {kind} has {size} bytes, which must be {expected}", code="frame.length"
            )
        head = bytes(view[: HEADER.size])
        body = view[HEADER.size :]
        if seal is not None:
            body = memoryview(bytearray(seal.decrypt(header.sender, head, bytes(body))))
        message = self._message(header, body, {} if formats is None else _read_rows(body, formats, frame))
        if self._header(message, size) != head:
            raise RefusedError(f"{frame} of kind {kind} must have zeros where it has no field", code="frame.zeros")
        return message

    @staticmethod
    def _message(header: FrameHeader, body: memoryview, values: Mapping[str, Tensor]) -> Message:
        """Return the message of a frame; refuse a ledger report that is not in its one form."""
        ends = (header.sender, header.receiver)
        sides = (header.incarnation, header.addressed)
        if header.kind == FrameKind.SHARE:
            return FrozenShare(*ends, *sides, header.number, header.boot, header.round_index, values)
        if header.kind == FrameKind.ROWS:
            return RowMessage(*ends, header.round_index, header.at, values)
        if header.kind == FrameKind.ACKNOWLEDGEMENT:
            return Acknowledgement(*ends, *sides, header.boot, header.number, *ACKNOWLEDGEMENT.unpack(body))
        if header.kind == FrameKind.PROGRESS:
            return Progress(*ends, header.number)
        if header.kind == FrameKind.HELLO:
            challenge, answers, *counters = HELLO.unpack(body)
            opened = bool(header.flags & OPENED)
            counters += [header.flags // WANT % WANT, header.flags // LEVEL]
            return Hello(
                *ends, header.incarnation, header.boot, challenge, answers, opened, header.round_index, *counters
            )
        if len(body) < LEDGER_REPORT.size or (len(body) - LEDGER_REPORT.size) % LINES.size:
            raise RefusedError(
                f"a report of peer {header.sender} has {header.length} bytes, which none has", code="frame.length"
            )
        counted = tuple(LINES.iter_unpack(body[LEDGER_REPORT.size :]))
        own = counted[: header.number]
        seen = counted[header.number :]
        if any(boot <= last for part in (own, seen) for (last, _), (boot, _) in pairwise(part)):
            raise RefusedError(
                f"a report of peer {header.sender} has boots that are not in ascending order", code="frame.boots"
            )
        challenge, answers, public_key = LEDGER_REPORT.unpack_from(body)
        return LedgerReport(*ends, header.boot, challenge, answers, own, seen, public_key, header.round_index)

    def decode_all(self, data: memoryview, most: int) -> Iterator[Message]:
        """Yield the messages of several frames, one after the other.

        Args:
            data: the frames and nothing else.
            most: how many there may be.

        Raises:
            RefusedError: see `decode`, or there are more.
        """
        while len(data):
            header = self.read_header(data)
            if most == 0:
                raise RefusedError(
                    f"a call of peer {header.sender} has more frames than any peer has to send", code="frame.many"
                )
            yield self.decode(data[: header.length])
            data = data[header.length :]
            most = most - 1


def _integers_of(value: Tensor | np.ndarray) -> np.ndarray:
    """Return a row's bits as whole numbers of as many bytes, [n]."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(INTEGERS[value.itemsize])
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    return np.asarray(flat.view(getattr(torch, INTEGERS[value.element_size()])).numpy())


def _has_finite_sum(part: Any) -> bool:
    """Return whether numbers have a finite sum, as no infinite one and no NaN among them leaves."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(part.sum()))


def _read_rows(body: memoryview, formats: RowFormats, frame: str) -> dict[str, Tensor]:
    """Return the rows of a frame as views of what follows its header, once each of their numbers may be one."""
    layout = _layout(tuple(formats.values()))
    end = 0
    rows = dict[str, Any]()
    for (name, row), expected in zip(formats.items(), layout.lines, strict=True):
        line = body[end : end + LINE.size]
        end = end + LINE.size
        if line != expected:
            code, axes, *lengths = LINE.unpack(line)
            dtype = WIRE_TYPES.get(code, f"type {code}")
            raise RefusedError(
                f"{frame}: {name!r} is described as {axes} axes of {lengths} {dtype}, which must be {len(row.shape)} "
                f"of {list(row.shape)} {type_name(row.dtype)}; all peers must run one scenario",
                code="frame.row-format",
            )
    for begin, following in [*layout.spans, (layout.size, 0)]:
        if any(body[end:begin]):
            raise RefusedError(f"{frame} must have zeros between its rows", code="frame.zeros")
        end = following
    for (name, row), (begin, _) in zip(formats.items(), layout.spans, strict=True):
        little = np.dtype(INTEGERS[row.dtype.itemsize]).newbyteorder("<")
        whole = np.frombuffer(body, little, math.prod(row.shape), begin)
        native = whole.astype(little.newbyteorder("="), copy=False)
        bits: Any = native
        if not isinstance(row.dtype, np.dtype):
            import torch

            bits = torch.from_numpy(native if native.flags.writeable else native.copy())  # it has no read-only rows
        flat = bits.view(row.dtype)
        for start in range(0, len(flat) if "float" in type_name(row.dtype) else 0, CHUNK):
            part = flat[start : start + CHUNK]
            if not row.nonnegative and _has_finite_sum(part):
                continue
            rules = {"finite": abs(part) < math.inf} | ({">= 0": part >= 0} if row.nonnegative else {})
            for rule, holds in rules.items():
                if not bool(holds.all()):
                    at = start + holds.tolist().index(False)
                    raise RefusedError(
                        f"{frame}: {name!r}[{at}] is {float(flat[at])}, which must be {rule}", code="frame.number"
                    )
        rows[name] = flat.reshape(row.shape)
    return rows


AT_ONCE = 2**17  # numbers whose sum stays in cache
Facts = dict[str, Any]
FROZEN = "frozen."  # before the names of tensors
COUNTERS = [field.name for field in fields(Edge) if field.name != "frozen"]
OF_SHARE = ["incarnation", "addressed", "number", "boot", "round_index"]


class WireCodec(Protocol):
    """How rows look on the wire.

    What rounding takes away stays in the sender's mass: `PushSumProtocol` subtracts `decode(encode(part))`, which is
    what the receiver adds, so that Σ x and Σ w over all peers and shares in flight do not change, whatever a codec
    does.
    """

    def encode(self, row: Tensor) -> Tensor:
        """Return a row as it is sent: float16, bfloat16, float32, float64 or uint8, of up to four axes.

        Its shape and type must follow from the row's shape and type alone.
        """

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent, of another row's shape and type; not finite where no row was encoded so."""


def wire_codec(name: str) -> WireCodec:
    """Return the wire codec of a name, or the user's own, `package.module:Name`.

    Raises:
        ScenarioError: there is none.
    """
    codec: WireCodec
    if name in CODECS:
        built_in: Any = CODECS[name]
        codec = built_in()
        return codec
    if ":" not in name:
        raise ScenarioError(
            f"network.codec={name!r} must be one of {', '.join(CODECS)}, or your own, as package.module:Name",
            code="network.codec",
        )

    def accepts(part: Any) -> bool:
        return hasattr(part, "encode") and hasattr(part, "decode")

    own = load_own(name, "network.codec", accepts=accepts, must_be="a class with the methods encode and decode")
    codec = own()
    return codec


class RowMass(MutableMapping[str, Any]):
    """Some named rows of a state of one peer: `mass["x"]` is [d], `mass["w"]` has no axis.

    What is set is written into the row, which stays where it lies; steps may put other rows in their place.

    Args:
        state: of one peer.
        names: of the rows that an exchange mixes.
    """

    def __init__(self, state: State, names: Iterable[str]) -> None:
        self._state, self._names = state, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._state.rows[name][0]

    def __setitem__(self, name: str, value: Tensor) -> None:
        row = self._state.rows[name][0]
        if value.data_ptr() != row.data_ptr():
            row.copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"row {name!r} belongs to the algorithm and must stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorArithmetic:
    """Rows on any device, of which parts leave as a wire codec encodes them; numbers without an axis leave as they are.

    See `pushsum.exactly_once.Arithmetic`; subtractions and additions are in place.

    Attributes:
        is_exact: whether rows are sent as they are.
    """

    def __init__(self, codec: WireCodec | None = None) -> None:
        self._codec = codec or ExactCodec()
        self.is_exact = isinstance(self._codec, ExactCodec)

    def encode(self, row: Tensor) -> Tensor:
        """Return a row as it is sent, which later changes of the row do not affect where it is another type's."""
        return self._codec.encode(row) if row.ndim else row

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent."""
        return self._codec.decode(sent, like) if like.ndim else sent.to(like)

    def part(self, value: Tensor, weight: float) -> Tensor:
        return self.encode(value * weight)

    def subtract(self, value: Tensor, part: Tensor) -> Tensor:
        return value.sub_(self.decode(part, value))

    def add(self, value: Tensor, part: Tensor) -> Tensor:
        return value.add_(self.decode(part, value))

    def nothing(self, value: Tensor) -> Tensor:
        return value.new_zeros(value.shape)

    def copy(self, value: Tensor) -> Tensor:
        return value.clone()

    def same(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic; -0 is not 0 here."""
        import torch

        bits = getattr(torch, INTEGERS[value.element_size()])
        same = value.dtype == part.dtype and value.shape == part.shape
        return same and torch.equal(value.reshape(-1).view(bits), part.reshape(-1).view(bits))

    def fits(self, value: Tensor, part: Tensor) -> bool:
        from flower_privdec.rows.tensors import all_finite

        pairs = zip(value.reshape(-1).split(AT_ONCE), self.decode(part, value).reshape(-1).split(AT_ONCE), strict=True)
        return all(all_finite(ours + theirs) for ours, theirs in pairs)


# --- what has to be on disk beside a peer's own rows, for a checkpoint ---


def pack(durable: Durable[Any]) -> tuple[Facts, dict[str, Any]]:
    """Return all but the mass: what JSON can hold, and tensors; values that several shares have in common come once."""
    tensors: dict[str, Any] = {}
    numbers: dict[int, int] = {}
    edges = {}
    for neighbor, edge in durable.edges.items():
        shares = []
        for share in edge.frozen:
            number = numbers.setdefault(id(share.values), len(numbers))
            tensors |= {f"{FROZEN}{number}.{name}": value for name, value in share.values.items()}
            shares.append({name: getattr(share, name) for name in OF_SHARE} | {"values": number})
        edges[str(neighbor)] = {name: getattr(edge, name) for name in COUNTERS} | {"frozen": shares}
    return {"incarnation": durable.incarnation, "round_index": durable.round_index, "edges": edges}, tensors


def unpack(peer: int, facts: Facts, tensors: Mapping[str, Any], mass: Mapping[str, Any]) -> Durable[Any]:
    """Return what was packed, bit for bit.

    Args:
        mass: of the peer, in the order in which its parts are sent.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what `pack` returns, with the reason.
    """
    edges: dict[int, Edge[Any]] = {}
    shared: dict[int, dict[str, Any]] = {}
    for neighbor, packed in facts["edges"].items():
        counters = {name: _count(name, packed[name]) for name in COUNTERS}
        frozen = []
        for share in packed["frozen"]:
            number = _count("values", share["values"])
            values = shared.setdefault(number, {name: tensors[f"{FROZEN}{number}.{name}"] for name in mass})
            numbers = {name: _count(name, share[name]) for name in OF_SHARE}
            frozen.append(FrozenShare(peer, int(neighbor), **numbers, values=values))
        if frozen and (frozen[-1].number, frozen[-1].boot) != (counters["sent"], counters["sent_boot"]):
            raise ArgumentError(f"the last share for peer {neighbor} is not the last one sent", code="frame.last-share")
        edges[int(neighbor)] = Edge(**counters, frozen=tuple(frozen))
    return Durable(
        _count("incarnation", facts["incarnation"]), _count("round_index", facts["round_index"]), mass, edges
    )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LAST:
        raise ArgumentError(f"{name}={value!r} must be a number of at most 64 bits", code="frame.count")
    return value
