"""Throw bytes at the decoder for as long as you like: `python -m tools.fuzz --minutes 10`.

Each case is a right frame with some of its bytes changed, cut or added, or bytes from nowhere.
It has to be refused in one line by RefusedError, or decoded to something that is encoded to the same bytes again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from random import Random, SystemRandom

import torch

from flower_privdec.pushsum.exactly_once import Acknowledgement, FrozenShare, Hello, RefusedError
from flower_privdec.pushsum.frames import FrameCodec, Message, Progress, RowMessage, formats_of
from flower_privdec.pushsum.membership import MemberEntries
from flower_privdec.pushsum.roster import KeyRecord, KeyRecords, Presence
from flower_privdec.pushsum.witness import LedgerReport

CAP = 4096
ROWS = {"x": torch.linspace(-1.0, 1.0, 5), "w": torch.tensor(0.5), "change": torch.zeros(2, 3)}
FRAMES = FrameCodec(bytes(range(32)), formats_of(ROWS), {1: formats_of(ROWS)})
FRAMES.members = 3


def examples() -> list[Message]:
    """Return a message of each kind."""
    hello = Hello(1, 2, 2**32, 77, 78, 79, True, 4, 2**32, 9, 77, 8, 6, 7, 55, 2, 3)
    share = FrozenShare(1, 2, 2**32, 2**33, 5, 77, 4, ROWS)
    acknowledgement = Acknowledgement(1, 2, 2**32, 2**33, 77, 5, 66)
    keys = KeyRecord(0, 2**40, b"k" * 32, b"signed", b"certified"), KeyRecord(2, 1, b"l" * 32)
    rows = RowMessage(1, 2, 4, 1, ROWS)
    report = LedgerReport(1, 2, 77, 5, 6, ((77, 3),), ((78, 4), (79, 5)), 4, 2)
    about_peers: list[Message] = [
        Presence(1, 2, bytes(24)),
        KeyRecords(1, 2, keys),
        MemberEntries(1, 2, b'{"number":1}\n'),
        report,
    ]
    return [hello, share, acknowledgement, rows, Progress(1, 2, 9), *about_peers]


def damaged(frame: bytes | bytearray, draw: Random) -> bytes:
    """Return a frame with a few faults."""
    data = bytearray(frame)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(data) + 1)
        fault = draw.random()
        if fault < 0.6 and at < len(data):
            data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        elif fault < 0.75:
            del data[at : at + draw.randint(1, 40)]
        elif fault < 0.9:
            data[at:at] = draw.randbytes(draw.randint(1, 40))
        else:
            data[at : at + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\xf8\x7f", b"\0\0\x80\xff" * 2])
    return bytes(data)


def check_one_line(error: Exception) -> None:
    """Raise AssertionError unless a refusal is one line, and no long one."""
    if len(str(error).splitlines()) != 1 or len(str(error)) > 400:
        raise AssertionError(f"refused in other than one line: {error}") from error


def survives(data: bytes) -> bool:
    """Return whether bytes were taken; they may be refused in one line, and nothing else may happen.

    Raises:
        AssertionError: they were taken for something that has other bytes, or refused in another way.
    """
    try:
        message = FRAMES.decode(bytearray(data), CAP)
    except RefusedError as error:
        check_one_line(error)
        return False
    if b"".join(FRAMES.encode(message)) != data:
        raise AssertionError(f"taken for something else: {data.hex()}")
    return True


def fuzz(draw: Random, cases: int) -> int:
    """Try some cases and return how many were taken."""
    frames = [b"".join(FRAMES.encode(message)) for message in examples()]
    taken = 0
    for _ in range(cases):
        nowhere = draw.random() < 0.05
        if nowhere:
            data = draw.randbytes(draw.randint(0, 300))
        else:
            data = damaged(draw.choice(frames), draw)
        taken += survives(data)
    return taken


def main() -> None:
    """Try cases for some minutes."""
    run_for_minutes("fuzz the decoder of frames", fuzz, 5_000, "cases")


def run_for_minutes(description: str, fuzz: Callable[[Random, int], int], cases: int, unit: str) -> None:
    """Fuzz for the minutes that the command line has, some cases at a time with a seed, printed where one fails."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=1.0)
    end = time.monotonic() + 60 * parser.parse_args().minutes
    done = taken = 0
    while time.monotonic() < end:
        seed = SystemRandom().getrandbits(64)
        try:
            taken += fuzz(Random(seed), cases)
        except BaseException:
            print(f"seed {seed}")
            raise
        done += cases
    print(f"{done:,} {unit}, {taken:,} taken, all others refused in one line")


if __name__ == "__main__":
    main()
