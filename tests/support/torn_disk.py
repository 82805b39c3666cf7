"""What a disk holds after a machine stopped between a write and its sync."""

from __future__ import annotations

from random import Random

SECTOR = 512


def torn(durable: bytes, now: bytes, random: Random) -> bytes:
    """Return what a disk may hold of a file whose sectors were partly written since its last sync."""
    durable = durable.ljust(len(now), b"\0")
    share = random.choice([0.1, 0.5, 0.9, 1.0])
    return b"".join(
        (now if random.random() < share else durable)[at : at + SECTOR] for at in range(0, len(now), SECTOR)
    )
