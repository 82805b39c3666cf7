"""The ledger of a rehearsal's peer, in memory: weeks of lines take little, and cost what they cost."""

from __future__ import annotations

import tracemalloc

from flower_privdec.privacy.ledger.memory_ledger import LedgerLines
from flower_privdec.privacy.ledger.segments import Charge, Entry, RunName, merged
from flower_privdec.privacy.mechanism.events import Release

RUN = RunName("run", "scenario", "torch, cpu")
BOOT = 7
LINE_BYTES = 60  # a hash of 32, and what a growing array has in reserve


def entry(step: int, length: int = 1) -> Entry:
    release = Release("full", 1.0, 50, 50, 20.0).times(length)
    return Entry(RUN, step, step + length, (Charge((0,), ((((step, step + length),), release),)),), BOOT)


def test_weeks_of_lines_take_little_memory_and_stay_exact() -> None:
    lines = LedgerLines()
    for step in range(2000):
        lines.append(entry(step))

    # The objects that differ from line to line are made before, and none of them is kept.
    tracemalloc.start()
    try:
        began, _ = tracemalloc.get_traced_memory()
        for step in range(2000, 10_000):
            lines.append(entry(step))
        ended, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ended - began < 8000 * LINE_BYTES

    (whole,) = merged(lines.totals.entries)
    (expected,) = merged([entry(0, 10_000)])
    assert whole == expected
    assert lines.totals.lines == {BOOT: 10_000}
    assert lines.head[0] == 10_000


def test_a_backup_goes_its_own_way() -> None:
    lines = LedgerLines()
    for step in range(3):
        lines.append(entry(step))
    backup = lines.copy()
    lines.append(entry(3))
    backup.append(entry(4))
    assert lines.head[0] == backup.head[0] == 4
    assert lines.hash_at(3) == backup.hash_at(3) != lines.hash_at(2)
    assert lines.hash_at(4) != backup.hash_at(4)
    assert len(lines.hash_at(4)) == 64
    assert merged(lines.totals.entries) != merged(backup.totals.entries)
