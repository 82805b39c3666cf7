"""What peers that wait for each other send: a header of fixed size and rows of numbers, nothing that is ever executed.

Numbers lie one row after the other, in little-endian order, as the receiver expects them: it knows names, shapes and
types from the scenario, and takes nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_privdec.common.formatting import shown
from flower_privdec.errors import RunError
from flower_privdec.pushsum.parts import Buffer, Parts
from flower_privdec.rows.tensors import all_finite

MAGIC, VERSION = b"privdec\x00", 1
CARRYING, PLACE = 1, 2
KINDS = {CARRYING: "carrying", PLACE: "place"}
HEADER = struct.Struct("<8sHHIqq32sQ")
EMPTY = Parts(())


@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes:
        kind: of KINDS: carrying the rows of a place, or saying a place.
        sender: who wrote it.
        place: that the content is for.
        sender_place: where the sender is.
        content: rows, as `packed` makes them; empty unless it carries some.
    """

    kind: int
    sender: int
    place: int
    sender_place: int
    content: Buffer

    @classmethod
    def opened(cls, letter: Buffer, run: bytes, sender: int) -> Letter:
        """Read a letter, whose content is a view of its bytes.

        Args:
            letter: as it came.
            run: the run that it has to be of.
            sender: who sent it, as the certificate says.

        Raises:
            RunError: it is none of this run, or somebody else wrote it.
        """
        who = f"what peer {sender} sent"
        if len(letter) < HEADER.size or letter[: len(MAGIC)] != MAGIC:
            raise RunError(f"{who} is no letter of a peer ({shown(bytes(letter[:16]), 60)}); is it flower_privdec's?")
        _, version, kind, writer, place, sender_place, its_run, length = HEADER.unpack_from(letter)
        if version != VERSION:
            raise RunError(f"{who} has version {version} of the protocol, and here is {VERSION}; install one version")
        if its_run != run:
            raise RunError(
                f"{who} is of the scenario {its_run.hex()[:16]}, and here is {run.hex()[:16]}; give all peers one file"
            )
        if writer != sender:
            raise RunError(f"{who} is signed as peer {writer}'s; a peer speaks for itself alone")
        if kind not in KINDS or length != len(letter) - HEADER.size or (kind != CARRYING and length):
            raise RunError(
                f"{who} has kind {kind} and {length:,} of {len(letter) - HEADER.size:,} bytes; it is damaged"
            )
        return cls(kind, sender, place, sender_place, memoryview(letter)[HEADER.size :])


def sealed(kind: int, sender: int, run: bytes, place: int, sender_place: int, content: Parts = EMPTY) -> Parts:
    """Return a letter as it is sent."""
    header = HEADER.pack(MAGIC, VERSION, kind, sender, place, sender_place, run, len(content))
    return Parts((header, *content.held))


def packed(rows: Mapping[str, Tensor]) -> Parts:
    """Return the bytes of rows, which must stay as they are."""
    flat = [row.detach().cpu().contiguous().reshape(-1) for row in rows.values()]
    return Parts(tuple(each.view(torch.uint8).numpy().data for each in flat))


def unpacked(content: Buffer, like: Mapping[str, Tensor], who: str) -> dict[str, Tensor]:
    """Return rows from bytes: views of them where they can be written to, and are not shared.

    Args:
        content: as `packed` made it.
        like: a row of each name, as it should be.
        who: sent it, for errors.

    Raises:
        RunError: they are of another size, or not all finite.
    """
    expected = sum(row.numel() * row.element_size() for row in like.values())
    if len(content) != expected:
        raise RunError(f"{who} holds {len(content):,} bytes, not {expected:,}; all peers must run one scenario")
    rows, start = {}, 0
    view = memoryview(bytearray(content)) if memoryview(content).readonly else memoryview(content)
    for name, row in like.items():
        size = row.numel() * row.element_size()
        part = torch.frombuffer(view[start : start + size], dtype=row.dtype) if size else row.new_empty(0)
        rows[name] = part.view(row.shape).to(row.device)
        start += size
        if not all_finite(rows[name]):
            raise RunError(f"{who}: {name!r} is not finite; a peer diverged, or somebody made it up")
        if name == "w" and not bool((rows[name] >= 0).all()):
            raise RunError(f"{who}: its push-sum weight is negative, which no peer sends")
    return rows
