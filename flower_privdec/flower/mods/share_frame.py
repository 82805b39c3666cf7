"""A share on its way: who sent it to whom, which one it is, and a part of the sender's (x, w), open or sealed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from flower_privdec.flower.mods.layout import Layout
from flower_privdec.pushsum.exactly_once import RefusedError

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
