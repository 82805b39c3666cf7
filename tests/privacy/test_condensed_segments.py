"""Condensed lines of sealed segments: they stand for the very lines that were written, and for no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import BudgetError
from flower_privdec.privacy.ledger import segments
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import (
    EMPTY_HASH,
    FORMAT,
    MERGED,
    Charge,
    Entry,
    RunName,
    Totals,
    chained,
    condensed,
    parse,
    read_chain,
    sealed_path,
    sealed_segments,
)
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.events import Release, Spend, plan_spends

DATA = "digits"
RUN = RunName("run", "scenario", "torch, cpu")
HERE = Path("here.jsonl")


def entry(step: int, length: int = 1, noise: float = 20.0, boot: int = 7) -> Entry:
    release = Release("full", 1.0, 50, 50, noise).times(length)
    return Entry(RUN, step, step + length, (Charge((0,), ((((step, step + length),), release),)),), boot)


def written(entries: list[Entry]) -> bytes:
    """Return a segment as it is before it is sealed: an entry that repeats the one before is in short."""
    bodies: list[dict[str, Any]] = [
        {"format": FORMAT, "source": DATA, "segment": 0, "previous": EMPTY_HASH} | Totals().to_json()
    ]
    template = None
    for one in entries:
        if template is not None and template.at(one.from_step) == one:
            bodies.append({"from_step": one.from_step})
            continue
        bodies.append(one.to_json())
        template = one
    return chained(bodies, (0, EMPTY_HASH))[0]


gaps = st.lists(st.integers(-3, 3), max_size=30)


@given(st.lists(st.tuples(gaps, st.integers(1, 3), st.sampled_from([20.0, 30.0])), max_size=4))
def test_condensed_segments_are_read_as_they_were_written(parts: list[tuple[list[int], int, float]]) -> None:
    entries = []
    step = 100
    for moves, length, noise in parts:
        for move in moves:
            step += move * length
            entries.append(entry(step, length, noise))
    content = written(entries)
    plain, plainly = parse(content, HERE, DATA)
    short, shortly = parse(condensed(content), HERE, DATA)
    assert (short.hashes, shortly) == (plain.hashes, plainly)
    assert plainly == entries
    assert condensed(condensed(content)) == condensed(content)


def changed(change: Any) -> bytes:
    """Return a condensed segment of 100 lines whose condensed line was changed, under the hash that it had."""
    *lines, last = condensed(written([entry(k) for k in range(100)])).splitlines(keepends=True)
    body = json.loads(last)
    assert body["from_steps"] == [[1, 100]]
    body |= change
    return b"".join(lines) + json.dumps(body, separators=(",", ":")).encode() + b"\n"


ATTACKS: dict[str, dict[str, Any]] = {
    "a line fewer": {"from_steps": [[1, 99]]},
    "a line more": {"from_steps": [[1, 101]]},
    "others": {"from_steps": [[2, 101]]},
    "none": {"from_steps": []},
    "an empty interval": {"from_steps": [[1, 100], [100, 100]]},
    "one twice": {"from_steps": [[1, 100], [99, 100]]},
    "another order": {"from_steps": [[50, 100], [1, 50]]},
    "a later index": {"index": 3},
    "more than any disk holds": {"from_steps": [[1, 10**18]]},
    "more than a number holds": {"from_steps": [[1, 10**400]]},
    "backwards": {"from_steps": [[100, 1]]},
    "no intervals": {"from_steps": 7},
    "no numbers": {"from_steps": [["a", "b"]]},
    "not finite": {"from_steps": [[1, float("inf")]]},
    "intervals of three": {"from_steps": [[1, 50, 100]]},
    "another hash": {"hash": "0" * 64},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_condensed_line_is_refused(attack: str) -> None:
    with raises(BudgetError, "ledger.damaged"):
        parse(changed(ATTACKS[attack]), HERE, DATA)
    assert len(parse(changed({}), HERE, DATA)[1]) == 100


def test_a_condensed_line_repeats_a_full_one() -> None:
    header, _, last = condensed(written([entry(k) for k in range(100)])).splitlines(keepends=True)
    with raises(BudgetError, "ledger.damaged"):
        parse(header + last, HERE, DATA)


def test_a_ledger_of_equal_steps_grows_by_few_bytes(tmp_path: Path) -> None:
    """A line takes 100 bytes until its segment is sealed, and then less than one."""
    with Ledger(tmp_path, DATA, durable=False) as ledger:
        ledger.name_lines(7)
        for step in range(11_000):
            one = entry(step)
            ledger.append(one.run, one.from_step, one.to_step, one.charges)
        head = ledger.head
    sealed = [sealed_path(ledger.path, number) for number in sorted(sealed_segments(ledger.path))]
    lines = sum(len(parse(path.read_bytes(), path, DATA)[0].hashes) for path in sealed)
    assert lines > 8_000
    assert sum(path.stat().st_size for path in sealed) < lines
    with Ledger(tmp_path, DATA) as ledger:
        assert ledger.head == head
        assert ledger.lines == {7: 11_000}
    assert read_chain(ledger.path) == (DATA, [entry(step) for step in range(11_000)])


def test_a_crash_after_sealing_leaves_one_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The condensed copy is on disk, and the segment itself still has its place."""
    entries = [entry(step) for step in range(40)]
    monkeypatch.setattr("flower_privdec.privacy.ledger.ledger.SEGMENT", 1 << 30)
    with Ledger(tmp_path, DATA) as ledger:
        for one in entries:
            ledger.name_lines(one.boot)
            ledger.append(one.run, one.from_step, one.to_step, one.charges)
        head = ledger.head
    content = ledger.path.read_bytes()
    sealed_path(ledger.path, 0).write_bytes(condensed(content))
    with Ledger(tmp_path, DATA) as ledger:
        assert ledger.head == head
        assert not sealed_segments(ledger.path)

    sealed_path(ledger.path, 0).write_bytes(condensed(content)[:-1] + b" \n")
    with raises(BudgetError, "ledger.stale"):
        Ledger(tmp_path, DATA)


def test_a_payment_costs_the_same_however_long_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is active in random rounds has a spend for each: a payment looks at one, and entries merge seldom."""
    looked: list[int] = []
    merged: list[int] = []
    between = Spend.between
    merge = segments.merged
    monkeypatch.setattr(Spend, "between", lambda spend, a, b: (looked.append(a), between(spend, a, b))[1])
    monkeypatch.setattr(segments, "merged", lambda entries: (merged.append(1), merge(entries))[1])
    active = np.arange(8_000) % 2 == 0
    release = Release("full", 1.0, 50, 50, 20.0)
    account = Account(0, plan_spends(release, active, None), None, 1e-5)
    with CohortLedger(tmp_path, DATA, RUN, [account], block=1, fresh=True) as ledger:
        looked.clear()
        for step in np.flatnonzero(active).tolist():
            ledger.charge(step, np.zeros(1, dtype=np.int64))
        assert ledger.charged == 7_999
    assert len(looked) < 4 * active.sum()
    assert len(merged) < active.sum() / MERGED / 1.2
