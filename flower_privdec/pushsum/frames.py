"""What travels between peers, as bytes: a fixed header, a line for each row, and the rows as they lie in memory.

    header      72 bytes  magic, protocol version, kind, flags, sender, receiver, round, place in the program, number of
                          rows, the sender's incarnation, the receiver's, life, number, length of the whole frame
    share,      40 bytes  for each row: type, number of axes, length of each of up to four axes
    message               then zeros up to a multiple of 64, and each row, with zeros up to a multiple of 8
    hello      104 bytes  the scenario's hash and the counters
    acknowledgement  8 bytes  the life that froze the share

All numbers are little-endian. Names are not sent: the scenario knows which rows come in which order. A frame has one
form alone: whatever decodes is encoded to the same bytes again, so zeros must be zeros and nothing may follow. What is
decoded is views of the frame's own bytes, and nothing is ever run or unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from flower_privdec.pushsum.parts import Parts
from flower_privdec.pushsum.share_protocol import VERSION, Acknowledgement, FrozenShare, Hello, RefusedError
from flower_privdec.pushsum.wire_rows import Layout, WireRow, frame_size, read_rows, row_parts

MAGIC = b"prvd"
HEADER = struct.Struct("<4sHBBIIQIIQQQQQ")
HELLO = struct.Struct("<32s9Q")
ACKNOWLEDGEMENT = struct.Struct("<Q")


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    ACKNOWLEDGEMENT = 2
    SHARE = 3
    EXCHANGE = 4


@dataclass(frozen=True, eq=False)
class RowMessage:
    """Named rows from one peer to another, for an exchange.

    Attributes:
        sender, receiver: peers.
        round_index, place: where in the run and in the algorithm's program.
        values: one row of each name.
    """

    sender: int
    receiver: int
    round_index: int
    place: int
    values: Mapping[str, Tensor]


Framed = FrozenShare[Tensor] | Acknowledgement | Hello | RowMessage


@dataclass(frozen=True)
class FrameHeader:
    """The first bytes of a frame, field by field; see the module."""

    magic: bytes
    version: int
    kind: int
    flags: int
    sender: int
    receiver: int
    round_index: int
    place: int
    rows: int
    incarnation: int
    addressed: int
    life: int
    number: int
    length: int

    def packed(self) -> bytes:
        """Return its bytes."""
        return HEADER.pack(*vars(self).values())


def encode(message: Framed) -> Parts:
    """Return the one frame that a message has; its rows are the message's own.

    Raises:
        struct.error, KeyError: a number or a type that frames do not have, which is the caller's mistake.
    """
    if isinstance(message, Hello):
        return Parts((_header(message, FrameKind.HELLO, HEADER.size + HELLO.size), _hello_body(message)))
    if isinstance(message, Acknowledgement):
        length = HEADER.size + ACKNOWLEDGEMENT.size
        body = ACKNOWLEDGEMENT.pack(message.share_life)
        return Parts((_header(message, FrameKind.ACKNOWLEDGEMENT, length), body))
    return _with_rows(message, FrameKind.SHARE if isinstance(message, FrozenShare) else FrameKind.EXCHANGE)


def _header(message: Framed, kind: FrameKind, length: int, rows: int = 0) -> bytes:
    """Return the header of a message; what its kind does not have is 0."""
    return FrameHeader(
        magic=MAGIC,
        version=getattr(message, "version", VERSION),
        kind=kind,
        flags=int(getattr(message, "opened", False)),
        sender=message.sender,
        receiver=message.receiver,
        round_index=getattr(message, "round_index", 0),
        place=getattr(message, "place", 0),
        rows=rows,
        incarnation=getattr(message, "incarnation", 0),
        addressed=getattr(message, "addressed", 0),
        life=getattr(message, "life", 0),
        number=getattr(message, "number", 0),
        length=length,
    ).packed()


def _hello_body(hello: Hello) -> bytes:
    counters = (hello.challenge, hello.answers, hello.knows, hello.sent, hello.sent_life, hello.acknowledged)
    return HELLO.pack(hello.scenario, *counters, hello.received, hello.seen, hello.seen_life)


def _with_rows(message: FrozenShare[Tensor] | RowMessage, kind: FrameKind) -> Parts:
    layout = {name: WireRow(tuple(value.shape), value.dtype) for name, value in message.values.items()}
    return Parts((_header(message, kind, frame_size(layout), len(layout)), *row_parts(message.values)))


def read_header(data: bytes | bytearray | memoryview, cap: int) -> FrameHeader:
    """Return the header of a frame, of which no more need be there.

    Args:
        data: the first bytes.
        cap: the largest frame that is taken, in bytes.

    Raises:
        RefusedError: naming the sender (as it calls itself), what is wrong and what would be right.
    """
    if len(data) < HEADER.size:
        raise RefusedError(f"a frame of {len(data)} bytes must have a header of {HEADER.size}")
    header = FrameHeader(*HEADER.unpack_from(data))
    if header.magic != MAGIC:
        raise RefusedError(f"a frame that begins with {header.magic!r} must begin with {MAGIC!r}")
    who = f"a frame of peer {header.sender}"
    if header.version != VERSION:
        raise RefusedError(
            f"{who} is of version {header.version} of the protocol, not {VERSION}; update one of the two"
        )
    if header.kind not in set(FrameKind):
        raise RefusedError(f"{who} is of kind {header.kind}, which must be one of 1 to {len(FrameKind)}")
    if not HEADER.size <= header.length <= cap:
        raise RefusedError(f"{who} says that it has {header.length} bytes, which must be {HEADER.size} to {cap}")
    if header.round_index >= 2**63:
        raise RefusedError(f"{who} is of round {header.round_index}, which must be < 2^63")
    return header


def decode(data: bytes | bytearray | memoryview, layout: Layout, cap: int | None = None) -> Framed:
    """Return what a whole frame says.

    Args:
        data: the frame and nothing else.
        layout: the rows that have to come, where its kind has rows.
        cap: the largest frame that is taken, in bytes; what the layout takes when not given.

    Returns:
        The message; its rows are views of the data.

    Raises:
        RefusedError: naming the sender (as it calls itself), what is wrong and what would be right.
    """
    least = HEADER.size + HELLO.size
    header = read_header(data, max(frame_size(layout), least) if cap is None else cap)
    if header.length != len(data):
        raise RefusedError(f"a frame of peer {header.sender} has {len(data)} bytes and says {header.length}")
    view = memoryview(data)
    if header.kind == FrameKind.HELLO:
        return _only(_decoded_hello(header, view), view, header)
    if header.kind == FrameKind.ACKNOWLEDGEMENT:
        return _only(_decoded_acknowledgement(header, view), view, header)
    return _decoded_rows(header, view, layout)


def _only(message: Framed, view: memoryview, header: FrameHeader) -> Framed:
    """Return a message whose frame says nothing that it does not."""
    if bytes(encode(message)) != view.tobytes():
        raise _unused(header)
    return message


def _body(header: FrameHeader, view: memoryview, form: struct.Struct) -> tuple[int, ...]:
    if header.length != HEADER.size + form.size:
        raise RefusedError(
            f"a frame of peer {header.sender} of kind {header.kind} has {header.length} bytes, which must be "
            f"{HEADER.size + form.size}"
        )
    return form.unpack_from(view, HEADER.size)


def _decoded_hello(header: FrameHeader, view: memoryview) -> Hello:
    scenario, challenge, answers, knows, sent, sent_life, acknowledged, received, seen, seen_life = _body(
        header, view, HELLO
    )
    return Hello(
        sender=header.sender,
        receiver=header.receiver,
        scenario=scenario,  # type: ignore[arg-type]
        version=header.version,
        incarnation=header.incarnation,
        life=header.life,
        challenge=challenge,
        answers=answers,
        opened=bool(header.flags & 1),
        round_index=header.round_index,
        knows=knows,
        sent=sent,
        sent_life=sent_life,
        acknowledged=acknowledged,
        received=received,
        seen=seen,
        seen_life=seen_life,
    )


def _decoded_acknowledgement(header: FrameHeader, view: memoryview) -> Acknowledgement:
    (share_life,) = _body(header, view, ACKNOWLEDGEMENT)
    ends, sides = (header.sender, header.receiver), (header.incarnation, header.addressed)
    return Acknowledgement(*ends, *sides, header.life, header.number, share_life)


def _decoded_rows(header: FrameHeader, view: memoryview, layout: Layout) -> Framed:
    values = read_rows(view, header.rows, layout, f"a frame of peer {header.sender}")
    kind, ends = FrameKind(header.kind), (header.sender, header.receiver)
    message: FrozenShare[Tensor] | RowMessage
    if kind == FrameKind.SHARE:
        sides = (header.incarnation, header.addressed)
        message = FrozenShare(*ends, *sides, header.number, header.life, header.round_index, values)
    else:
        message = RowMessage(*ends, header.round_index, header.place, values)
    if _header(message, kind, header.length, header.rows) != view[: HEADER.size]:
        raise _unused(header)
    return message


def _unused(header: FrameHeader) -> RefusedError:
    return RefusedError(f"a frame of peer {header.sender} of kind {header.kind} must have zeros where it has no field")
