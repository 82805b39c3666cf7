"""Frames, the bytes that travel between peers; wire codecs, which encode rows; and a peer's edges in a file.

A frame is a fixed header, a line for each row, and the rows as they lie in memory:

    header      88 bytes  magic, version, kind, flags, sender, receiver, round, exchange, number of rows, the sender's
                          incarnation, the receiver's, boot, number, length of the whole frame, the run
    share,      40 bytes  for each row: type, number of axes, length of each of up to four axes
    rows                  then zeros up to a multiple of 64, and each row, with zeros up to a multiple of 8
    hello       72 bytes  the counters
    acknowledgement  8 bytes  the boot that froze the share
    progress     0 bytes  the header's number says all
    ledger report  16 bytes  challenge, answer; the header's number counts the sender's boots, and in place of
                          an exchange it has how many entries of the list of members the sender has
                  16 bytes  for each of these, and then for each boot of the receiver: the boot and its lines
    presence     8 bytes  for each peer of the run: its heartbeat
    key records 52 bytes  for each: peer, bytes of the signature and of the certificates, counter, public key; the
                          header's number counts them; and then the two
    promises    72 bytes  for each: peer, bytes of the signature, number, first step, end, level, session key; the
                          header's number counts them; and then the signature
    member entries  lines of text: entries of the list of members, see `membership`

All numbers are little-endian. Names are not sent: the run defines which rows come in which order. A frame has only one
encoding: what decodes is encoded to the same bytes again, so fields that a kind does not have must be zero, and nothing
may follow. Decoded rows are views of the frame's own bytes. Nothing that comes in is ever run or unpickled.

The body of a share or a ledger report may be encrypted (`Seal`). The header is then authenticated: it names sender,
receiver, their incarnations, number, round and run.

`FrameCodec.encode` and `decode` convert messages. A receiver reads the header first, by which it knows how many bytes
to expect; every check is made before a row is looked at, and rows before they are used: a peer may be hostile.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from flower_privdec.common.catalogue import CODECS, CodecKeys
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError, did_you_mean
from flower_privdec.common.fields import OwnSection, section_from
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.pushsum.codecs.casts import ExactCodec
from flower_privdec.pushsum.exactly_once import (
    LAST,
    Acknowledgement,
    Durable,
    Edge,
    FrozenShare,
    Hello,
    RefusedError,
    Shared,
)
from flower_privdec.pushsum.membership import ENTRIES_AT_ONCE, MOST_LINE, MemberEntries
from flower_privdec.pushsum.promises import PROMISE, PROMISES_AT_ONCE, UNITS, Promise, Promises
from flower_privdec.pushsum.roster import (
    HEARTBEAT,
    MOST_COUNTER,
    RECORDS_AT_ONCE,
    KeyRecord,
    KeyRecords,
    Presence,
)
from flower_privdec.pushsum.witness import MANY, LedgerReport
from flower_privdec.rows.tensors import INTEGERS, all_finite, bits_of, has_finite_square

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.core import State

Buffer = bytes | bytearray | memoryview
Check = Callable[[str, Any], None]  # of a row that came, by its name; raises ArgumentError
MAGIC = b"prvd"
VERSION = 9
HEADER = struct.Struct("<4sHBBIIQIIQQQQQ16s")
HELLO = struct.Struct("<9Q")
ACKNOWLEDGEMENT = struct.Struct("<Q")
LEDGER_REPORT = struct.Struct("<2Q")
KEY_RECORD = struct.Struct("<IIIQ32s")  # peer, bytes of signature and certificates, counter, public key
LINES = struct.Struct("<2Q")
LINE = struct.Struct("<BB6x4Q")  # type, number of axes, their lengths
SMALL = 256  # the most bytes of a frame without rows, except a ledger report
REPORT = 256 + 2 * MANY * LINES.size  # the most bytes of a ledger report
ENTRIES_CAP = HEADER.size + ENTRIES_AT_ONCE + MOST_LINE  # the most bytes of a frame of member entries
MOST_RECORD = 2**15  # bytes of a key record, with the certificates of several authorities
AXES = 4
DATA_AT = 64  # the first row begins at a multiple of this, in bytes
ROW_AT = 8  # the other rows begin at a multiple of this
CHUNK = 2**18  # numbers checked at a time
LAYOUTS = 64  # the number of layouts that are remembered

# Flags of a header. A hello's `want` (0 to 3) and `level` (0 to 15) are added as multiples of WANT and LEVEL.
OPENED = 1
SEALED = 2
WANT = 4
LEVEL = 16

WIRE_TYPES = {1: "float16", 2: "float32", 3: "float64", 4: "bfloat16", 5: "uint8"}
LITTLE = {size: np.dtype(name).newbyteorder("<") for size, name in INTEGERS.items()}  # as they are sent
CODES = {dtype: code for code, dtype in WIRE_TYPES.items()}


@dataclass(frozen=True, eq=False)
class RowMessage:
    """Named rows from one peer to another, for an exchange.

    Attributes:
        sender, receiver: peers.
        round_index, at: the round, and the index of the exchange in the algorithm's program.
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
        exchanges: the number of exchanges that it has performed, with its state on disk, plus one; 0 before it is
            ready for the first.
    """

    sender: int
    receiver: int
    exchanges: int


OfMass = FrozenShare[Any] | Acknowledgement | Hello | RowMessage | Progress
OfPeers = LedgerReport | Presence | KeyRecords | Promises | MemberEntries
Message = OfMass | OfPeers


class FrameKind(IntEnum):
    """The kind of message that a frame holds."""

    HELLO = 1
    ACKNOWLEDGEMENT = 2
    SHARE = 3
    ROWS = 4
    PROGRESS = 5
    LEDGER_REPORT = 6
    PRESENCE = 7
    KEY_RECORDS = 8
    PROMISES = 9
    MEMBER_ENTRIES = 10


KINDS = tuple(FrameKind)
PASSED_ON = (FrameKind.PRESENCE, FrameKind.KEY_RECORDS, FrameKind.PROMISES)
KIND_OF = {
    Hello: FrameKind.HELLO,
    Acknowledgement: FrameKind.ACKNOWLEDGEMENT,
    FrozenShare: FrameKind.SHARE,
    RowMessage: FrameKind.ROWS,
    Progress: FrameKind.PROGRESS,
    LedgerReport: FrameKind.LEDGER_REPORT,
    Presence: FrameKind.PRESENCE,
    KeyRecords: FrameKind.KEY_RECORDS,
    Promises: FrameKind.PROMISES,
    MemberEntries: FrameKind.MEMBER_ENTRIES,
}
BODY_BYTES = {FrameKind.HELLO: HELLO.size, FrameKind.ACKNOWLEDGEMENT: ACKNOWLEDGEMENT.size, FrameKind.PROGRESS: 0}
SEALABLE = (FrameKind.SHARE, FrameKind.LEDGER_REPORT)
WITH_ROWS = (FrameKind.SHARE, FrameKind.ROWS)
SHARES = -1  # in place of an exchange


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


# The fields of a header that only some kinds have, and which of them each kind has; all others are 0.
FIELDS: dict[FrameKind, set[str]] = {
    FrameKind.HELLO: {"flags", "round_index", "incarnation", "boot"},
    FrameKind.ACKNOWLEDGEMENT: {"incarnation", "addressed", "boot", "number"},
    FrameKind.SHARE: {"flags", "round_index", "rows", "incarnation", "addressed", "boot", "number"},
    FrameKind.ROWS: {"round_index", "at", "rows"},
    FrameKind.PROGRESS: {"number"},
    FrameKind.LEDGER_REPORT: {"flags", "round_index", "at", "boot", "number"},
    FrameKind.PRESENCE: set(),
    FrameKind.KEY_RECORDS: {"number"},
    FrameKind.PROMISES: {"number"},
    FrameKind.MEMBER_ENTRIES: set(),
}
OPTIONAL = set[str]().union(*FIELDS.values())
ZEROS = {kind: [FrameHeader._fields.index(name) for name in OPTIONAL - fields] for kind, fields in FIELDS.items()}


@dataclass(frozen=True)
class RowFormat:
    """Shape and type of a row on the wire.

    Attributes:
        shape: up to four axes.
        dtype: one of WIRE_TYPES, of torch or NumPy; rows are decoded to the same library.
        nonnegative: whether each number must be at least 0, as a push-sum weight.
        judged: whether the receiver judges the row, and so takes NaN and infinity too.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | np.dtype[Any]
    nonnegative: bool = False
    judged: bool = False


RowFormats = Mapping[str, RowFormat]  # in the order in which they are sent


@lru_cache(LAYOUTS)
def type_name(dtype: torch.dtype | np.dtype[Any] | str) -> str:
    """Return the name of a type of numbers, of torch or of NumPy."""
    return str(dtype).removeprefix("torch.")


def formats_of(values: Mapping[str, Tensor]) -> RowFormats:
    """Return the formats of rows as encoded for the wire, in the order in which they are sent; `w` is a weight."""
    formats = {}
    for name, value in values.items():
        is_weight = name in ("w", "average.w")
        formats[name] = RowFormat(tuple(value.shape), value.dtype, is_weight)
    return formats


def frame_size(formats: RowFormats) -> int:
    """Return the bytes of a frame with rows."""
    return HEADER.size + _layout_of(formats).size


class _Layout(NamedTuple):
    """What follows the header of a frame with rows.

    Attributes:
        lines: the lines that describe the rows.
        spans: where each row begins and ends, in bytes behind the header.
        size: the bytes of lines, rows and zeros together.
    """

    lines: bytes
    spans: list[tuple[int, int]]
    size: int


def _layout_of(rows: RowFormats | Mapping[str, Tensor]) -> _Layout:
    """Return the layout of a frame with some rows."""
    return _layout(tuple((row.dtype, *row.shape) for row in rows.values()))


@lru_cache(LAYOUTS)
def _layout(rows: tuple[tuple[Any, ...], ...]) -> _Layout:
    """Return the layout of rows, of each its type and the lengths of its axes."""
    lines = list[bytes]()
    spans = list[tuple[int, int]]()

    # Positions are multiples counted from the beginning of the frame, so that its rows are aligned in memory if it is.
    end = HEADER.size + len(rows) * LINE.size
    for number, (dtype, *shape) in enumerate(rows):
        unused_axes = (0,) * (AXES - len(shape))
        lines.append(LINE.pack(CODES[type_name(dtype)], len(shape), *shape, *unused_axes))

        begin = _multiple(end, DATA_AT if number == 0 else ROW_AT)
        end = begin + math.prod(shape) * dtype.itemsize
        spans.append((begin - HEADER.size, end - HEADER.size))
    return _Layout(b"".join(lines), spans, _multiple(end, ROW_AT) - HEADER.size)


def _multiple(position: int, unit: int) -> int:
    """Return the first multiple of a unit that is not before a position."""
    return -(-position // unit) * unit


class Seal(Protocol):
    """Encrypts the bodies of shares and ledger reports, end to end.

    Attributes:
        overhead: the bytes that encryption adds.
    """

    overhead: int

    def encrypt(self, receiver: int, header: bytes, body: bytes) -> list[bytes]:
        """Return a body that only its receiver can read, bound to its header, in parts."""

    def decrypt(self, sender: int, header: bytes, body: memoryview) -> bytes:
        """Return the body that a sender encrypted for this peer.

        Raises:
            RefusedError: it was encrypted by another sender, for another peer or with another header, or changed since.
        """


class FrameCodec:
    """Encodes the messages of one run as frames, and decodes them.

    Args:
        run: bytes that all peers of a run have in common, and no other run has, such as the hash of the scenario.
        shares: the rows of a share; None if there are no shares.
        exchanges: the rows of each exchange that sends rows, by its index in the algorithm's program.
        seal: encrypts shares and ledger reports; None leaves them in plain text.
        check: refuses rows that the run's wire codec encodes nothing as; None if every number may come.

    Attributes:
        cap: the bytes of the largest frame, except a ledger report and what is PASSED_ON.
        members: how many peers the run has, if they pass on presence, key records and promises; 0 if they do not.
    """

    def __init__(
        self,
        run: bytes,
        shares: RowFormats | None = None,
        exchanges: Mapping[int, RowFormats] | None = None,
        seal: Seal | None = None,
        check: Check | None = None,
    ) -> None:
        self._check = check
        self.run = hashlib.sha256(run).digest()[:16]
        self.shares = shares
        self.exchanges = exchanges or {}
        self._seal = seal
        self._overhead = 0 if seal is None else seal.overhead
        self.members = 0

        sizes = [SMALL, *map(frame_size, self.exchanges.values())]
        if shares is not None:
            sizes.append(frame_size(shares) + self._overhead)
        self.cap = max(sizes)

        by_place = dict(self.exchanges)
        if shares is not None:
            by_place[SHARES] = shares
        self._rows = {at: (formats, _layout_of(formats)) for at, formats in by_place.items()}

    @property
    def roster_cap(self) -> int:
        """Return the most bytes of presence, of key records, and of promises, together."""
        records = RECORDS_AT_ONCE + MOST_RECORD
        promises = PROMISES_AT_ONCE + MOST_RECORD
        return 3 * HEADER.size + HEARTBEAT.itemsize * self.members + records + promises

    # --- messages to bytes ---

    def encode(self, message: Message) -> list[Buffer]:
        """Return the frame of a message as buffers, to be sent one after the other; no row is copied.

        Raises:
            struct.error, KeyError: a number or a type does not fit into a frame, which is the caller's mistake.
        """
        fields, body = self._parts(message)
        kind = KIND_OF[type(message)]
        length = HEADER.size + sum(map(len, body))
        is_sealed = self._seal is not None and kind in SEALABLE
        flags = 0
        if isinstance(message, Hello):
            flags = OPENED * message.opened | WANT * message.want | LEVEL * message.level
        elif is_sealed:
            flags = SEALED
            length += self._overhead

        ends = (message.sender, message.receiver)
        header = HEADER.pack(MAGIC, VERSION, kind, flags, *ends, *fields, length, self.run)
        if not is_sealed:
            return [header, *body]
        assert self._seal is not None
        return [header, *self._seal.encrypt(message.receiver, header, b"".join(body))]

    @staticmethod
    def _parts(message: Message) -> tuple[tuple[int, ...], list[Buffer]]:
        """Return a message's fields of the header, from `round_index` to `number`, and what follows the header.

        Fields that its kind does not have are 0.
        """
        if isinstance(message, LedgerReport):
            numbers = [message.challenge, message.answers, *chain(*message.own, *message.seen)]
            report = struct.pack(f"<{len(numbers)}Q", *numbers)
            fields = (message.round_index, message.entries, 0, 0, 0, message.boot, len(message.own))
            return fields, [report]
        if isinstance(message, FrozenShare):
            sides = (message.incarnation, message.addressed, message.boot)
            rows = (message.round_index, 0, len(message.values))
            return (*rows, *sides, message.number), _body_of_rows(message.values)
        if isinstance(message, RowMessage):
            rows = (message.round_index, message.at, len(message.values))
            return (*rows, 0, 0, 0, 0), _body_of_rows(message.values)
        if isinstance(message, Acknowledgement):
            sides = (message.incarnation, message.addressed, message.boot)
            return (0, 0, 0, *sides, message.number), [ACKNOWLEDGEMENT.pack(message.share_boot)]
        if isinstance(message, Hello):
            counters = (message.challenge, message.answers, message.knows, message.sent, message.sent_boot)
            seen = (message.acknowledged, message.received, message.seen, message.seen_boot)
            fields = (message.round_index, 0, 0, message.incarnation, 0, message.boot, 0)
            return fields, [HELLO.pack(*counters, *seen)]
        if isinstance(message, Presence):
            return (0,) * 7, [message.heartbeats]
        if isinstance(message, KeyRecords):
            parts = [part for record in message.records for part in _record_parts(record)]
            return (*(0,) * 6, len(message.records)), parts
        if isinstance(message, Promises):
            parts = [part for promise in message.promises for part in _promise_parts(promise)]
            return (*(0,) * 6, len(message.promises)), parts
        if isinstance(message, MemberEntries):
            return (0,) * 7, [message.lines]
        return (*(0,) * 6, message.exchanges), []  # of progress the header says all

    # --- bytes to messages ---

    def read_header(self, data: Buffer, cap: int | None = None) -> FrameHeader:
        """Return the header of a frame, of which the rest need not be there.

        Args:
            data: the first bytes.
            cap: the largest frame that is accepted, in bytes; by default the largest of the run.

        Raises:
            RefusedError: it names the sender (as it calls itself), the fault and what would be right.
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
        elif not 1 <= header.kind <= len(KINDS):
            problem = f"is of kind {header.kind}, which must be one of 1 to {len(KINDS)}"
            code = "kind"
        elif header.round_index >= 2**63:
            problem = f"is of round {header.round_index}, which must be < 2^63"
            code = "round"
        else:
            if cap is None and header.kind == FrameKind.LEDGER_REPORT:
                cap = REPORT + self._overhead
            elif cap is None and header.kind == FrameKind.MEMBER_ENTRIES:
                cap = ENTRIES_CAP
            elif cap is None and header.kind in PASSED_ON:
                cap = self.roster_cap
            elif cap is None:
                cap = self.cap
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
            The message; its rows are views of the data, or of the decrypted body.

        Raises:
            RefusedError: it names the sender (as it calls itself), the fault and what would be right.
        """
        return self._decoded(self.read_header(data, cap), memoryview(data))

    def _decoded(self, header: FrameHeader, view: memoryview) -> Message:
        """Return the message of a whole frame whose header was read; see `decode`."""
        size = len(view)
        frame = f"a frame of peer {header.sender}"
        kind = KINDS[header.kind - 1]
        if header.length != size:
            raise RefusedError(f"{frame} has {size} bytes and claims {header.length}", code="frame.length")

        seal = None
        if kind in SEALABLE:
            seal = self._seal
        is_sealed = bool(header.flags & SEALED)
        if is_sealed != (seal is not None):
            state = "sealed" if is_sealed else "not sealed"
            raise RefusedError(f"{frame} is {state}; seal at all peers, or at none", code="frame.sealed")

        # The size is checked before anything is decrypted or read. That of a ledger report or of key records follows
        # from the body.
        formats: RowFormats | None = None
        layout: _Layout | None = None
        expected = size
        if kind in WITH_ROWS:
            formats, layout = self._formats(header)
            expected = HEADER.size + layout.size
            if seal is not None:
                expected += self._overhead
        elif kind in BODY_BYTES:
            expected = HEADER.size + BODY_BYTES[kind]
        elif kind == FrameKind.PRESENCE:
            expected = HEADER.size + HEARTBEAT.itemsize * self.members
        if size != expected:
            raise RefusedError(
                f"{frame} of kind {kind} has {size} bytes, which must be {expected}", code="frame.length"
            )

        body = view[HEADER.size :]
        if seal is not None:
            head = bytes(view[: HEADER.size])
            body = memoryview(seal.decrypt(header.sender, head, body))

        values: Mapping[str, Tensor] = {}
        if formats is not None and layout is not None:
            values = _read_rows(body, formats, layout, frame)
            if self._check is not None:
                self._check_rows(values, self._check, frame)
        # A frame has only one encoding, so what its kind does not have is 0.
        if any(map(header.__getitem__, ZEROS[kind])) or (kind in SEALABLE and header.flags not in (0, SEALED)):
            raise RefusedError(
                f"{frame} of kind {kind} must have zeros in fields that it does not have", code="frame.zeros"
            )
        return self._message(header, body, values)

    @staticmethod
    def _check_rows(values: Mapping[str, Tensor], check: Check, frame: str) -> None:
        for name, value in values.items():
            try:
                check(name, value)
            except ArgumentError as error:
                raise RefusedError(f"{frame}: {name!r}: {error}", code="frame.codec") from error

    def _formats(self, header: FrameHeader) -> tuple[RowFormats, _Layout]:
        """Return the rows that a frame of some must have."""
        frame = f"a frame of peer {header.sender}"
        at = SHARES if header.kind == FrameKind.SHARE else header.at
        formats, layout = self._rows.get(at, (None, None))
        if formats is None or layout is None:
            raise RefusedError(
                f"{frame} is of kind {header.kind} for exchange {header.at}, which this algorithm does not have; all "
                "peers must run one scenario",
                code="frame.exchange",
            )
        if header.rows != len(formats):
            raise RefusedError(
                f"{frame} has {header.rows} rows, not {len(formats)}; all peers must run one scenario",
                code="frame.rows",
            )
        return formats, layout

    def _message(self, header: FrameHeader, body: memoryview, values: Mapping[str, Tensor]) -> Message:
        """Return the message of a frame; refuse a report or records that have another form than `encode` gives them."""
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

        if header.kind == FrameKind.PRESENCE:
            return Presence(*ends, bytes(body))
        if header.kind == FrameKind.KEY_RECORDS:
            return KeyRecords(*ends, tuple(self._records(header, body)))
        if header.kind == FrameKind.PROMISES:
            return Promises(*ends, tuple(self._promises(header, body)))

        if header.kind == FrameKind.MEMBER_ENTRIES:
            return MemberEntries(*ends, bytes(body))

        # What is left is a ledger report.
        if len(body) < LEDGER_REPORT.size or (len(body) - LEDGER_REPORT.size) % LINES.size:
            raise RefusedError(
                f"a report of peer {header.sender} has {header.length} bytes, which none has", code="frame.length"
            )

        counted = tuple(LINES.iter_unpack(body[LEDGER_REPORT.size :]))
        if header.number > len(counted):
            raise RefusedError(
                f"a report of peer {header.sender} counts {header.number} starts of its process, and lists "
                f"{len(counted)}",
                code="frame.length",
            )
        own = counted[: header.number]
        seen = counted[header.number :]
        for part in (own, seen):
            if len(part) > 1 and any(boot <= last for (last, _), (boot, _) in pairwise(part)):
                raise RefusedError(
                    f"a ledger report of peer {header.sender} is not in ascending order of its process's starts",
                    code="frame.boots",
                )

        challenge, answers = LEDGER_REPORT.unpack_from(body)
        return LedgerReport(*ends, header.boot, challenge, answers, own, seen, header.round_index, header.at)

    def _records(self, header: FrameHeader, body: memoryview) -> Iterator[KeyRecord]:
        """Yield the key records of a frame: of peers of the run, at most one of each, in ascending order."""
        begin = 0
        last = -1
        for _ in range(header.number):
            end = begin + KEY_RECORD.size
            if end > len(body):
                break
            peer, signed, certified, counter, public = KEY_RECORD.unpack_from(body, begin)
            if not last < peer < self.members or not 1 <= counter <= MOST_COUNTER:
                raise RefusedError(
                    f"peer {header.sender} brings key record {counter} of peer {peer} after that of peer {last}: they "
                    f"must be of peers 0 to {self.members - 1}, in ascending order, and 1 to 2^62",
                    code="frame.records",
                )
            last = peer
            begin = end + signed + certified
            yield KeyRecord(peer, counter, public, bytes(body[end : end + signed]), bytes(body[end + signed : begin]))

        if begin != len(body) or header.number > self.members:
            raise RefusedError(
                f"key records of peer {header.sender} have {header.length} bytes, which {header.number} have not",
                code="frame.length",
            )

    def _promises(self, header: FrameHeader, body: memoryview) -> Iterator[Promise]:
        """Yield the promises of a frame: of peers of the run, at most one of each, in ascending order."""
        begin = 0
        last = -1
        for _ in range(header.number):
            end = begin + PROMISE.size
            if end > len(body):
                break
            peer, signed, number, first, before, level, public = PROMISE.unpack_from(body, begin)
            begin = end + signed
            promise = Promise(peer, number, public, first, before, level, bytes(body[end:begin]))
            if not last < peer < self.members or not promise.is_possible:
                raise RefusedError(
                    f"peer {header.sender} brings promise {number} of peer {peer} after that of peer {last}, of level "
                    f"{level} for steps {first} to {before}: they must be of peers 0 to {self.members - 1}, in "
                    f"ascending order, of levels 1 to {UNITS}, and for some steps",
                    code="frame.promises",
                )
            last = peer
            yield promise

        if begin != len(body) or header.number > self.members:
            raise RefusedError(
                f"promises of peer {header.sender} have {header.length} bytes, which {header.number} have not",
                code="frame.length",
            )

    def decode_all(self, data: memoryview, most: int) -> Iterator[Message]:
        """Yield the messages of several frames, one after the other.

        Args:
            data: the frames and nothing else.
            most: the largest number of frames that is accepted.

        Raises:
            RefusedError: see `decode`, or there are more.
        """
        while len(data):
            header = self.read_header(data)
            if most == 0:
                raise RefusedError(
                    f"a call of peer {header.sender} has more frames than any peer has to send", code="frame.many"
                )
            yield self._decoded(header, data[: header.length])
            data = data[header.length :]
            most = most - 1


def _record_parts(record: KeyRecord) -> tuple[Buffer, ...]:
    """Return a key record as buffers."""
    sizes = (len(record.signature), len(record.certificates))
    return KEY_RECORD.pack(record.peer, *sizes, record.counter, record.public), record.signature, record.certificates


def _promise_parts(promise: Promise) -> tuple[Buffer, ...]:
    """Return a promise as buffers."""
    numbers = (promise.number, promise.first, promise.end, promise.level)
    return PROMISE.pack(promise.peer, len(promise.signature), *numbers, promise.public), promise.signature


def _integers_of(value: Tensor | np.ndarray) -> np.ndarray:
    """Return a row's bits as whole numbers of the same size, [n]."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(INTEGERS[value.itemsize])
    return bits_of(value)


def _has_finite_sum(part: Any) -> bool:
    """Return whether the sum of some numbers is finite. If it is, no number is infinite or NaN."""
    if not isinstance(part, np.ndarray):
        return math.isfinite(part.sum().item())
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(part.sum()))


def _read_rows(body: memoryview, formats: RowFormats, layout: _Layout, frame: str) -> dict[str, Tensor]:
    """Return the rows of a frame as views of its body, after a check of formats, padding and every number."""
    end = len(layout.lines)
    if body[:end] != layout.lines:
        _refuse_lines(body, formats, layout, frame)

    # Between the lines and the first row, between rows, and behind the last.
    for begin, next_end in [*layout.spans, (layout.size, 0)]:
        if bytes(body[end:begin]).strip(b"\0"):
            raise RefusedError(f"{frame} must have zeros between its rows", code="frame.zeros")
        end = next_end

    rows = dict[str, Any]()
    for (name, row), (begin, _) in zip(formats.items(), layout.spans, strict=True):
        flat = _numbers_at(body, begin, row)
        if "float" in type_name(row.dtype) and not row.judged:
            _check_numbers(flat, row, f"{frame}: {name!r}")
        rows[name] = flat.reshape(row.shape)
    return rows


def _refuse_lines(body: memoryview, formats: RowFormats, layout: _Layout, frame: str) -> None:
    """Refuse lines that describe other rows than a frame must have, by the first of them that does."""
    for number, (name, row) in enumerate(formats.items()):
        place = slice(number * LINE.size, (number + 1) * LINE.size)
        if body[place] == layout.lines[place]:
            continue
        code, axes, *lengths = LINE.unpack(body[place])
        dtype = WIRE_TYPES.get(code, f"type {code}")
        raise RefusedError(
            f"{frame}: {name!r} is described as {axes} axes of {lengths} {dtype}, which must be {len(row.shape)} "
            f"of {list(row.shape)} {type_name(row.dtype)}; all peers must run one scenario",
            code="frame.row-format",
        )


def _numbers_at(body: memoryview, begin: int, row: RowFormat) -> Any:
    """Return the numbers of a row, [n], as a view of a frame's body if the machine and the library can have one."""
    bits = np.frombuffer(body, LITTLE[row.dtype.itemsize], math.prod(row.shape), begin)
    bits = bits.astype(INTEGERS[row.dtype.itemsize], copy=False)
    if isinstance(row.dtype, np.dtype):
        return bits.view(row.dtype)

    if not bits.flags.writeable:  # torch has no read-only tensors
        bits = bits.copy()
    return torch.from_numpy(bits).view(row.dtype)


def _check_numbers(flat: Any, row: RowFormat, what: str) -> None:
    """Refuse numbers that are not finite, or negative if the row may not be, by the first of them."""
    if len(flat) == 1 and 0 <= float(flat[0]) < math.inf:  # a weight
        return
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        if not row.nonnegative and _has_finite_sum(part):  # the fast way, for all rows but weights
            continue

        rules = {"finite": abs(part) < math.inf}
        if row.nonnegative:
            rules[">= 0"] = part >= 0
        for rule, holds in rules.items():
            if not bool(holds.all()):
                at = start + holds.tolist().index(False)
                raise RefusedError(f"{what}[{at}] is {float(flat[at])}, which must be {rule}", code="frame.number")


def _body_of_rows(values: Mapping[str, Tensor]) -> list[Buffer]:
    """Return the lines of some rows and the rows, with zeros between them, as buffers."""
    layout = _layout_of(values)
    body: list[Buffer] = [layout.lines]
    position = len(layout.lines)
    for (begin, end), value in zip(layout.spans, values.values(), strict=True):
        whole = _integers_of(value)
        little = whole.astype(LITTLE[whole.itemsize], copy=False)
        body.append(bytes(begin - position))
        body.append(little.view(np.uint8).data)
        position = end
    body.append(bytes(layout.size - position))
    return body


AT_ONCE = 2**17  # numbers whose sum stays in cache
Facts = dict[str, Any]
FROZEN = "frozen."  # begins the names of tensors
MODELS = ("told", "heard")  # of an edge, by which codecs that send differences go on
COUNTERS = [field.name for field in fields(Edge) if field.name not in ("frozen", *MODELS)]
OF_SHARE = ["incarnation", "addressed", "number", "boot", "round_index"]
counters_of = attrgetter(*COUNTERS)
numbers_of_share = attrgetter(*OF_SHARE)


class WireCodec(Protocol):
    """Encodes rows for the wire.

    A codec may round, and leave numbers out. The remainder stays in the sender's mass: `PushSumProtocol` subtracts what
    the receiver adds. So Σ x and Σ w over all peers and shares in flight do not change, whatever a codec does.

    A codec may have more than the two methods:

        remembers   True if it encodes differences: what changed in the sender's model since its last share to the same
                    neighbour, in place of the share's rows. Each end keeps the model that was told so far.
        damping     which part of the graph's weights a share has, at most 1
        counts      True if `encode` takes a second argument: how many shares came before over this edge
        check       called with what `decode` is, before: raises ArgumentError for what no row is encoded as
        cautions    returns what to warn of, as sentences with a remedy
    """

    def encode(self, row: Tensor) -> Tensor:
        """Return a row as it is sent: float16, bfloat16, float32, float64 or uint8, of up to four axes.

        Its shape and type must depend only on the row's shape and type.
        """

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent, in the shape and type of `like`; not finite if no row is encoded like that."""


def wire_codec(section: CodecKeys | OwnSection | str) -> WireCodec:
    """Return the wire codec of a section, `network.codec`, or of what stands for one: a name, or `package.module:Name`.

    Raises:
        ScenarioError: there is no such codec, or a user's own cannot be built or does not bring a row back.
    """
    if isinstance(section, str) and ":" in section:
        section = OwnSection(module=section)
    elif isinstance(section, str):
        if section not in CODECS:
            raise ScenarioError(
                f"network.codec={section!r} must be one of {', '.join(CODECS)}, or your own, as package.module:Name"
                f"{did_you_mean(section, CODECS)}",
                code="network.codec",
            )
        section = cast(CodecKeys, CODECS.section(section))

    codec: WireCodec
    if isinstance(section, CodecKeys):
        built_in: Any = CODECS[section.name]
        codec = built_in(**section.options())
        return codec

    def accepts(part: Any) -> bool:
        return hasattr(part, "encode") and hasattr(part, "decode")

    must_be = "a class with the methods encode and decode"
    own = load_own(section.module, "network.codec", accepts=accepts, must_be=must_be)
    where = f"network.codec={section.module!r}"
    arguments = section.arguments
    keys = getattr(own, "Section", CodecKeys)
    if keys is not CodecKeys:
        arguments = section_from(keys, arguments, where).options()
    called = f"with {arguments}" if arguments else "without arguments"
    with users_code(f"{where} could not be called {called}", "code.fails"):
        codec = own(**arguments)
    _check_codec(codec, where)
    return codec


def codec_text(section: CodecKeys | OwnSection) -> str:
    """Return a codec with its keys in one line, as peers that agree about it all have it."""
    options = section.arguments if isinstance(section, OwnSection) else section.options()
    keys = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return f"{section.name} ({keys})" if keys else section.name


def _check_codec(codec: WireCodec, where: str) -> None:
    """Refuse a user's codec that does not bring a row back in its shape and type, by trying it on two rows.

    Raises:
        ScenarioError: naming what it returns for them.
    """
    damping = getattr(codec, "damping", 1.0)
    if not (isinstance(damping, int | float) and 0 < damping <= 1):
        raise ScenarioError(f"{where}: damping={damping!r} must be above 0 and at most 1", code="network.codec-form")

    arithmetic = TensorArithmetic(codec)
    for dtype in (torch.float32, torch.float64):
        row = torch.linspace(-1, 1, 16, dtype=dtype)
        with users_code(f"{where} fails on a row of 16 numbers of {dtype}", "code.fails"):
            sent: Any = arithmetic.encode(row.clone())
            received: Any = None
            if isinstance(sent, torch.Tensor):
                received = codec.decode(sent, row)

        if not isinstance(sent, torch.Tensor) or type_name(sent.dtype) not in WIRE_TYPES.values():
            what = sent.dtype if isinstance(sent, torch.Tensor) else type(sent).__name__
            raise ScenarioError(
                f"{where}: encode() returns {what} and must return a tensor of {', '.join(WIRE_TYPES.values())}",
                code="network.codec-form",
            )
        if not isinstance(received, torch.Tensor) or (received.shape, received.dtype) != (row.shape, row.dtype):
            what = type(received).__name__
            if isinstance(received, torch.Tensor):
                what = f"{list(received.shape)} of {received.dtype}"
            raise ScenarioError(
                f"{where}: decode() returns {what} and must return {list(row.shape)} of {dtype}, as `like` is",
                code="network.codec-form",
            )
        if not bool(torch.isfinite(received).all()):
            raise ScenarioError(
                f"{where}: decode() returns NaN or infinity for a row of numbers from -1 to 1",
                code="network.codec-form",
            )


class RowMass(MutableMapping[str, Any]):
    """Some named rows of a state of one peer: `mass["x"]` is [d], `mass["w"]` has no axis.

    Setting a value writes it into the row, which stays where it lies in memory. Steps may replace rows by others.

    Args:
        state: the state of one peer.
        names: the names of the rows that an exchange mixes.
    """

    def __init__(self, state: State, names: Iterable[str]) -> None:
        self._state = state
        self._names = tuple(names)
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # rows, each with the peer's own part of it

    def __getitem__(self, name: str) -> Tensor:
        rows = self._state.rows[name]
        known, own = self._views.get(name, (None, rows))
        if known is not rows:
            own = rows[0]
            self._views[name] = rows, own
        return own

    def __setitem__(self, name: str, value: Tensor) -> None:
        row = self[name]
        if value is not row and value.data_ptr() != row.data_ptr():
            row.copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"row {name!r} belongs to the algorithm and must stay")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorArithmetic:
    """Operations on rows on any device, see `pushsum.exactly_once.Arithmetic`; subtraction and addition are in place.

    Parts leave as a wire codec encodes them. Numbers without an axis, such as weights, leave as they are.

    With a codec that sends differences, a share (x', w') stands for the model that its sender's shares to this
    neighbour have told so far, the difference in this share included, times w': x' = w' told. Both ends compute that
    alike. The sender subtracts it, so that what was not told yet stays with it.

    Attributes:
        is_exact: whether rows are sent as they are.
        remembers: whether the codec sends differences.
        damping: which part of the graph's weights a share has.
        shares_parts: whether shares of equal weights, to several neighbours, are the same.
    """

    def __init__(self, codec: WireCodec | None = None) -> None:
        self._codec: Any = codec or ExactCodec()
        self._counts = bool(getattr(self._codec, "counts", False))
        self.is_exact = isinstance(self._codec, ExactCodec)
        self.remembers = bool(getattr(self._codec, "remembers", False))
        self.damping = float(getattr(self._codec, "damping", 1.0))
        self.shares_parts = not (self.remembers or self._counts)

    def encode(self, row: Tensor, number: int = 0) -> Tensor:
        """Return a row as it is sent. It may share memory with the row if the codec does not change the type.

        Args:
            number: how many shares came before over this edge.
        """
        if row.ndim == 0:
            return row
        sent: Tensor
        if self._counts:
            sent = self._codec.encode(row, number)
        else:
            sent = self._codec.encode(row)
        return sent

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent, in the type of `like`."""
        if like.ndim == 0:
            return sent.to(like)
        row: Tensor = self._codec.decode(sent, like)
        return row

    def check(self, sent: Tensor, like: Tensor) -> None:
        """Refuse what no row is encoded as.

        Raises:
            ArgumentError: names the fault.
        """
        check = getattr(self._codec, "check", None)
        if check is not None and like.ndim > 0:
            check(sent, like)

    def cautions(self) -> list[str]:
        """Return what to warn of about the codec."""
        cautions: Callable[[], list[str]] = getattr(self._codec, "cautions", list)
        return cautions()

    def checks(self, rows: Mapping[str, Tensor]) -> Check | None:
        """Return what checks received rows by their names; None if every number may come.

        Args:
            rows: a row of each name, as it is before it is encoded.
        """
        if not hasattr(self._codec, "check"):
            return None

        def check(name: str, sent: Tensor) -> None:
            self.check(sent, rows[name])

        return check

    def freeze(
        self, mass: Mapping[str, Tensor], weight: float, told: Mapping[str, Tensor], number: int = 0
    ) -> Shared[Tensor]:
        """See Arithmetic."""
        if self.is_exact:
            parts = {name: mass[name] * weight for name in mass}
            return Shared(parts, parts, {})
        if not self.remembers:
            values = {name: self.encode(value * weight, number) for name, value in mass.items()}
            return Shared(values, self._decoded(values, mass), {})

        model = _ratios(mass)
        values = {name: self.encode(row - told[name] if told else row, number) for name, row in model.items()}
        for name, value in mass.items():
            if name not in model:
                values[name] = value * weight
        values = {name: values[name] for name in mass}
        parts, now = self.open(values, mass, told)
        return Shared(values, parts, now)

    def open(
        self, values: Mapping[str, Tensor], mass: Mapping[str, Tensor], told: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See Arithmetic."""
        parts = self._decoded(values, mass)
        if not self.remembers:
            return parts, {}

        now = {}
        for name, part in parts.items():
            if part.ndim > 0:
                now[name] = told[name].to(part) + part if told else part
        weight = parts.get("w")
        for name, model in now.items():
            parts[name] = model if weight is None else model * weight
        return parts, now

    def _decoded(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.is_exact:
            return {name: value.to(like[name]) for name, value in values.items()}
        return {name: self.decode(value, like[name]) for name, value in values.items()}

    def times(self, value: Tensor, factor: float) -> Tensor:
        return value * factor

    def subtract(self, value: Tensor, part: Tensor) -> Tensor:
        return value.sub_(part)

    def add(self, value: Tensor, part: Tensor) -> Tensor:
        return value.add_(part)

    def nothing(self, value: Tensor) -> Tensor:
        return value.new_zeros(value.shape)

    def copy(self, value: Tensor) -> Tensor:
        return value.clone()

    def same(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic. Bits are compared, so -0 differs from 0, and NaN is the same as NaN.

        A number without an axis is never the same: to copy it costs less.
        """
        if value.dtype != part.dtype or value.shape != part.shape or value.ndim == 0:
            return False
        return np.array_equal(bits_of(value), bits_of(part))  # several times as fast as torch.equal

    def fits(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic. Numbers whose squares add up to something finite are far from infinite, and so is a sum."""
        if value.ndim == 0:
            return math.isfinite(float(value) + float(part))
        if has_finite_square(value) and has_finite_square(part):
            return True
        if value.numel() <= AT_ONCE:
            return all_finite(value + part)
        ours = value.reshape(-1).split(AT_ONCE)
        theirs = part.reshape(-1).split(AT_ONCE)
        return all(all_finite(one + other) for one, other in zip(ours, theirs, strict=True))


def _ratios(mass: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of a mass over its push-sum weight, which is the model; as they are if there is no weight yet."""
    weight = mass.get("w")
    rows = {name: value for name, value in mass.items() if value.ndim > 0}
    if weight is None or float(weight) == 0:
        return rows
    return {name: row / weight for name, row in rows.items()}


# --- what a checkpoint holds beside a peer's own rows ---


def pack(durable: Durable[Any]) -> tuple[Facts, dict[str, Any]]:
    """Return all but the mass: facts that JSON can hold, and tensors.

    Of each edge there are two lists: its COUNTERS; and for each share in flight the numbers OF_SHARE, and which values
    it has. Values that several shares hold come once.
    """
    tensors: dict[str, Any] = {}
    numbers: dict[int, int] = {}  # the number of each set of values, by identity: equal weights share one
    edges = {}
    for neighbor, edge in durable.edges.items():
        shares = []
        for share in edge.frozen:
            number = numbers.setdefault(id(share.values), len(numbers))
            for name, value in share.values.items():
                tensors[f"{FROZEN}{number}.{name}"] = value
            shares.append([*numbers_of_share(share), number])

        for kind in MODELS:
            for name, model in getattr(edge, kind).items():
                tensors[f"{kind}.{neighbor}.{name}"] = model
        edges[str(neighbor)] = [list(counters_of(edge)), shares]

    facts = {"incarnation": durable.incarnation, "round_index": durable.round_index, "edges": edges}
    return facts, tensors


def unpack(peer: int, facts: Facts, tensors: Mapping[str, Any], mass: Mapping[str, Any]) -> Durable[Any]:
    """Return the state that was packed, bit for bit.

    Args:
        mass: the peer's own values, in the order in which parts of them are sent.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: facts and tensors do not fit together; says why.
    """
    edges: dict[int, Edge[Any]] = {}
    shared: dict[int, dict[str, Any]] = {}
    for neighbor, (packed, shares) in facts["edges"].items():
        counters: dict[str, Any] = {name: _count(name, value) for name, value in zip(COUNTERS, packed, strict=True)}
        frozen = []
        for *of_share, number in shares:
            numbers = {name: _count(name, value) for name, value in zip(OF_SHARE, of_share, strict=True)}
            _count("values", number)
            values = shared.setdefault(number, {name: tensors[f"{FROZEN}{number}.{name}"] for name in mass})
            frozen.append(FrozenShare(peer, int(neighbor), **numbers, values=values))

        if frozen and (frozen[-1].number, frozen[-1].boot) != (counters["sent"], counters["sent_boot"]):
            raise ArgumentError(f"the last share for peer {neighbor} is not the last one sent", code="frame.last-share")
        models: dict[str, Any] = {}
        for kind in MODELS:
            prefix = f"{kind}.{neighbor}."
            models[kind] = {name: tensors[prefix + name] for name in mass if prefix + name in tensors}
        edges[int(neighbor)] = Edge(**counters, **models, frozen=tuple(frozen))

    incarnation = _count("incarnation", facts["incarnation"])
    round_index = _count("round_index", facts["round_index"])
    return Durable(incarnation, round_index, mass, edges)


def _count(name: str, value: Any) -> int:
    """Return a counter of a file, after a check that a frame could carry it."""
    if type(value) is not int or not 0 <= value <= LAST:
        raise ArgumentError(f"{name}={value!r} must be a number of at most 64 bits", code="frame.count")
    return value
