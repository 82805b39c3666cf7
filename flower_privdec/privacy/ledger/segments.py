"""What a ledger records, and its files: hash-chained lines, and how they are read and verified.

A line is one `Entry`: the steps that a run took, and what they cost each of its peers. It holds a `Charge` for each
group of peers that pay the same, and a charge holds the releases (`events.Release`) of its steps. Entries add up
exactly (`merged`, `Totals`): a cost is a count of equal releases, so nothing is ever rounded. Any sum of entries gives
the same ε, the same charged steps and the same plan as the entries themselves. On disk they lie in a sequence of files:

    SOURCE.000000.sealed   SOURCE.000001.sealed   ...   SOURCE.jsonl

Each file is a *segment*. All but the last are sealed: nothing is written to them again. Lines are appended to
SOURCE.jsonl. A line is one JSON object, and ends with `hash`: the SHA-256 of the hash before it, and of the line's
object without it.

The first line of a segment is its header, which sums up all segments before it:

    {"index", "format", "source", "segment", "previous", "lines", "charged": [ENTRY, ...], "hash"}

`charged` has one entry for each run (`merged`). So the last segment by itself gives every ε; opening a ledger
reads and verifies only that one, however long the ledger is. `verified` and `read_chain` go through all of them.

Each later line is one entry of a run, for all the peers that one process hosts:

    {"index", "run", "scenario", "environment", "partition", "from_step", "to_step",
     "charges": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...], "hash"}

An entry that differs from the last such line of the segment only in its steps is written in short:

    {"index", "from_step", "hash"}

In a sealed segment, short lines that follow each other are *condensed*: one line stands for all of them,

    {"index", "from_steps": [[a, b], ...], "hash"}

namely for the short lines with from_step a, a + n, a + 2 n, ... below b, for each [a, b), n being how many steps the
last full line covers. `index` is that of the first of them, and `hash` that of the last. This changes nothing about the
chain: a reader writes each of these lines out again and hashes it after the one before, so that the last hash holds all
of them, and how many there are. A peer that trains each second leaves some 2 kB in 5,000 rounds, in place of 500.

What the chain detects: a line that was edited, removed or inserted, lines written by two processes at once, and a
missing segment. What it cannot detect: whole lines cut from the end, or an old copy put back. For these, the newer
lines must have been seen elsewhere: by a checkpoint, or a neighbour (see `ledger`).

Nothing here writes to a ledger, or locks it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.privacy.mechanism.events import Mechanism, Release

GAPS = 64  # intervals of steps for which one more entry is held in memory before the next merger
MERGED = 64  # entries that are held in memory; if there are more, those of each run are merged

TEXT = json.JSONEncoder(separators=(",", ":"))

Body = dict[str, Any]  # a JSON object
Interval = tuple[int, int]  # [a, b)


@dataclass(frozen=True)
class RunName:
    """The identity of a run in a ledger: equal for two runs exactly when they draw the same noise.

    Attributes:
        id: a hash of everything that determines the run's numbers, the data included.
        scenario: the scenario's hash.
        environment: the generator, device and versions that compute the numbers.
        partition: a hash of which examples each peer holds. In two runs of one partition, each example is at the same
            peer. "" if the partition is not known.
    """

    id: str
    scenario: str
    environment: str
    partition: str = ""


@dataclass(frozen=True)
class Charge:
    """The cost of some steps to each of some peers.

    Attributes:
        peers: their global ids, ascending.
        parts: for each mechanism, the intervals [a, b) of steps that use it, and one release for all of them.
    """

    peers: tuple[int, ...]
    parts: tuple[tuple[tuple[Interval, ...], Release], ...]

    @classmethod
    def of(cls, peers: Sequence[int], parts: Iterable[tuple[Iterable[Interval], Release]]) -> Charge:
        """Return the charge to peers for parts; those of one mechanism are put together."""
        steps_by: dict[Mechanism, list[Interval]] = {}
        releases_by: dict[Mechanism, list[Release]] = {}
        for intervals, release in parts:
            mechanism = release.mechanism
            steps_by.setdefault(mechanism, []).extend(intervals)
            releases_by.setdefault(mechanism, []).append(release)

        together = []
        for mechanism, releases in releases_by.items():
            n_steps = sum(release.steps for release in releases)
            # Releases of one mechanism cost the same, whichever of them is repeated.
            together.append((tuple(steps_by[mechanism]), releases[-1].times(n_steps)))
        return cls(tuple(peers), tuple(together))

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return the releases charged to each of the peers."""
        return tuple(release for _, release in self.parts)

    def moved(self, by: int) -> Charge:
        """Return the same charge for steps that are later by some number."""
        parts = []
        for intervals, release in self.parts:
            moved = tuple((a + by, b + by) for a, b in intervals)
            parts.append((moved, release))
        return Charge(self.peers, tuple(parts))

    def to_json(self) -> Body:
        """Return the charge as a JSON object."""
        releases = [{"steps": steps, "release": release.to_json()} for steps, release in self.parts]
        return {"peers": _as_intervals(self.peers), "releases": releases}

    @classmethod
    def from_json(cls, body: Body) -> Charge:
        """Read a charge from a JSON object; raises what `Entry.from_json` raises."""
        peers: list[int] = []
        for a, b in body["peers"]:
            peers.extend(range(int(a), int(b)))

        parts = []
        for part in body["releases"]:
            steps = tuple((int(a), int(b)) for a, b in part["steps"])
            parts.append((steps, Release.from_json(part["release"])))
        return cls(tuple(peers), tuple(parts))


@dataclass(frozen=True)
class Entry:
    """One line of a ledger: the charges for steps [from_step, to_step) of a run.

    Attributes:
        run: the run that takes the steps.
        from_step, to_step: the steps.
        charges: the cost to each group of peers.
        boot: a number of the process that wrote the line, if it was a networked peer's; else 0.
        witnessed: only in a line that replaces lost ones: for each boot, how many of its lines are then charged.
    """

    run: RunName
    from_step: int
    to_step: int
    charges: tuple[Charge, ...]
    boot: int = 0
    witnessed: Mapping[int, int] = field(default_factory=dict)

    def at(self, step: int) -> Entry:
        """Return the same entry for as many steps that begin with another one."""
        by = step - self.from_step
        charges = tuple(charge.moved(by) for charge in self.charges)
        return replace(self, from_step=step, to_step=self.to_step + by, charges=charges)

    def to_json(self) -> Body:
        """Return the entry as a JSON object. Keep the order of its keys: the hash of the line depends on it."""
        body: Body = {
            "run": self.run.id,
            "scenario": self.run.scenario,
            "environment": self.run.environment,
            "partition": self.run.partition,
            "from_step": self.from_step,
            "to_step": self.to_step,
            "charges": [charge.to_json() for charge in self.charges],
        }
        if self.boot:
            body["boot"] = self.boot
        if self.witnessed:
            body["witnessed"] = {str(boot): lines for boot, lines in self.witnessed.items()}
        return body

    @classmethod
    def from_json(cls, body: Body) -> Entry:
        """Read the entry from a JSON object.

        Raises:
            KeyError, TypeError, ValueError, ScenarioError: the object is not an entry.
        """
        run = RunName(
            id=str(body["run"]),
            scenario=str(body["scenario"]),
            environment=str(body["environment"]),
            partition=str(body["partition"]),
        )

        witnessed = dict(body.get("witnessed", {}))
        return cls(
            run=run,
            from_step=int(body["from_step"]),
            to_step=int(body["to_step"]),
            charges=tuple(Charge.from_json(charge) for charge in body["charges"]),
            boot=int(body.get("boot", 0)),
            witnessed={int(boot): int(lines) for boot, lines in witnessed.items()},
        )


class Totals:
    """What entries add up to: every cost, and how many lines each process wrote.

    Attributes:
        entries: oldest first. Those of one run may have been merged into one, see `merged`.
        lines: for each boot, how many lines it wrote. Lines that were lost and then charged again are included.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self.entries: list[Entry] = []
        self.lines: dict[int, int] = {}
        self._merge_above = MERGED

    def count(self, entries: Sequence[Entry]) -> None:
        """Add entries."""
        for entry in entries:
            if entry.boot:
                self.lines[entry.boot] = self.lines.get(entry.boot, 0) + 1
            self.lines |= entry.witnessed
        self.entries += entries

        if len(self.entries) > self._merge_above:
            self.entries = merged(self.entries)
            # Merge again when there are twice as many: so an entry costs a constant, even if no two are of one run, or
            # if their steps leave gaps, as those of a peer that is active in random rounds.
            gaps = sum(len(steps) for entry in self.entries for charge in entry.charges for steps, _ in charge.parts)
            self._merge_above = 2 * len(self.entries) + MERGED + gaps // GAPS

    def copy(self) -> Totals:
        """Return the same totals, to which others may be added."""
        other = Totals()
        other.entries = [*self.entries]
        other.lines = {**self.lines}
        other._merge_above = self._merge_above
        return other

    def to_json(self) -> Body:
        """Return the totals as a JSON object."""
        charged = [entry.to_json() for entry in merged(self.entries)]
        return {"lines": [list(pair) for pair in self.lines.items()], "charged": charged}

    @classmethod
    def from_json(cls, body: Body) -> Totals:
        """Read totals from a JSON object; raises what `Entry.from_json` raises."""
        totals = Totals()
        totals.count([Entry.from_json(entry) for entry in body["charged"]])
        totals.lines = {int(boot): int(lines) for boot, lines in body["lines"]}
        return totals


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Merge the entries of each run into one: its costs, added up by peers and mechanism, and the steps they cover.

    Every ε, charged step and plan that is computed from the result equals that of the entries themselves. What belonged
    to their lines (boot, witnessed) is left out.
    """
    by_run: dict[RunName, list[Entry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run, []).append(entry)

    one_each = []
    for run, group in by_run.items():
        first = min(entry.from_step for entry in group)
        last = max(entry.to_step for entry in group)
        one_each.append(Entry(run, first, last, _added_up(group)))
    return one_each


def _added_up(entries: Iterable[Entry]) -> tuple[Charge, ...]:
    """Return the charges of entries, one for each group of peers."""
    by_peers: dict[tuple[int, ...], list[tuple[tuple[Interval, ...], Release]]] = {}
    for entry in entries:
        for charge in entry.charges:
            by_peers.setdefault(charge.peers, []).extend(charge.parts)

    charges = []
    for peers, parts in by_peers.items():
        total = Charge.of(peers, parts)
        united = tuple((_united(steps), release) for steps, release in total.parts)
        charges.append(Charge(peers, united))
    return tuple(charges)


def _united(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals [a, b): ascending ones, of which no two touch."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        touches = bool(union) and start <= union[-1][1]
        if touches:
            first, last = union.pop()
            union.append((first, max(stop, last)))
        else:
            union.append((start, stop))
    return tuple(union)


def _as_intervals(numbers: Iterable[int]) -> list[Interval]:
    """Return ascending numbers as intervals [a, b)."""
    intervals: list[Interval] = []
    for number in numbers:
        if intervals and intervals[-1][1] == number:
            intervals[-1] = (intervals[-1][0], number + 1)
        else:
            intervals.append((number, number + 1))
    return intervals


# --- lines on disk ---

FORMAT = "flower-privdec-ledger-5"
EMPTY_HASH = "0" * 64  # the hash before the first line
LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n?')
SHORT = {"index", "from_step"}  # the keys of an entry in short
SHORT_LINE = re.compile(rb'\{"index":(\d{1,18}),"from_step":(\d{1,18}),"hash":"([0-9a-f]{64})"\}\n')
CONDENSED = {"index", "from_steps"}  # the keys of a line that stands for several short ones
MOST_CONDENSED = 1 << 17  # lines that one may stand for: many more than a segment has
RESTORE = "restore it from a backup, or give a new ledger folder and count what was spent here as unknown"

Head = tuple[int, str]  # how many lines, and the hash of the last one


class Place(NamedTuple):
    """Where a segment starts in the chain.

    Attributes:
        number: how many segments come before it.
        first: how many lines they have.
        previous: the hash of the last of these.
    """

    number: int = 0
    first: int = 0
    previous: str = EMPTY_HASH


@dataclass
class Segment:
    """The lines of one file of a ledger.

    Attributes:
        number, first, previous: where it starts, see `Place`.
        before: what the segments before it add up to.
        header_size, size: bytes of the header, and of all lines.
        hashes: the hash of each line.
        source: the name of the data source.
        template: the last entry that was written in full, which the short ones after it repeat.
    """

    number: int = 0
    first: int = 0
    previous: str = EMPTY_HASH
    before: Totals = field(default_factory=Totals)
    header_size: int = 0
    size: int = 0
    hashes: list[str] = field(default_factory=list)
    source: str = ""
    template: Entry | None = None

    @property
    def start(self) -> Place:
        """Return where it starts."""
        return Place(self.number, self.first, self.previous)

    @property
    def head(self) -> Head:
        """Return how many lines the ledger has up to its last one, and the hash of that; the next line follows it."""
        last = self.hashes[-1] if self.hashes else self.previous
        return self.first + len(self.hashes), last

    @property
    def end(self) -> Place:
        """Return where the segment after it would start."""
        lines, last = self.head
        return Place(self.number + 1, lines, last)


# --- names of files ---


@lru_cache(maxsize=4096)
def ledger_path(directory: Path | str, source: str) -> Path:
    """Return the path of a data source's ledger: the file of its last segment."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source)
    return Path(directory) / f"{name}.jsonl"


def sealed_path(path: Path, number: int) -> Path:
    """Return the path of a ledger's sealed segment by its number; `path` is that of the last segment."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{number:06d}.sealed")


def sealed_segments(path: Path) -> set[int]:
    """Return the numbers of a ledger's sealed segments that are on disk."""
    if not path.parent.is_dir():
        return set()
    name = re.compile(re.escape(path.name.removesuffix(".jsonl")) + r"\.(\d{6,})\.sealed")
    matches = [name.fullmatch(file) for file in os.listdir(path.parent)]
    return {int(match[1]) for match in matches if match}


# --- lines ---


def hash_of(previous: str, text: str) -> str:
    """Return the hash of a line.

    Args:
        previous: the hash of the line before.
        text: the line's object without its hash.
    """
    return hashlib.sha256((previous + text).encode()).hexdigest()


def chained(bodies: Iterable[Body], head: Head) -> tuple[bytes, list[str]]:
    """Return the lines that append objects to a chain with this head, and their hashes."""
    index, previous = head
    lines = []
    hashes = []
    for body in bodies:
        text = TEXT.encode({"index": index} | body)
        previous = hash_of(previous, text)
        lines.append(f'{text[:-1]},"hash":"{previous}"}}\n')
        hashes.append(previous)
        index += 1
    return "".join(lines).encode(), hashes


def parse(content: bytes, path: Path, source: str | None = None) -> tuple[Segment, list[Entry]]:
    """Verify the bytes of a segment.

    Args:
        path: for messages.
        source: what its header must name; None for any.

    Returns:
        The segment, whose size does not count a dropped line, and its entries.

    Raises:
        BudgetError: a line is not a record, was edited, or does not follow the line before it; or the first one is not
            a header of this format and source.
    """
    segment = Segment()
    entries: list[Entry] = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        is_first = number == 1
        text, digest = _split(line)
        body = _loaded(text)
        if is_first and body is not None and "format" in body:
            # Before its line is verified: the header itself says what comes before it.
            segment = _from_header(body, path, source, len(line))

        more: list[Entry] = []
        if body is not None and body.keys() == CONDENSED:
            hashes, more, defect = _written_out(body, digest, segment)
        else:
            hashes = [digest]
            defect = _defect(body, text, digest, segment.head, is_first)
        if defect:
            # A last line without its newline is a write that a crash cut off. It was never acknowledged, so no step
            # began on it. It still counts if it is complete; only an incomplete one is dropped.
            is_last = segment.size + len(line) == len(content)
            if is_last and not line.endswith(b"\n"):
                whole_lines = Segment() if is_first else segment
                return whole_lines, entries
            raise _damaged(path, number, defect)
        assert body is not None  # else it had a defect

        segment.hashes += hashes
        segment.size += len(line)
        if is_first or more:
            entries += more
            continue

        try:
            if segment.template is not None and body.keys() == SHORT:
                entry = segment.template.at(int(body["from_step"]))
            else:
                entry = Entry.from_json(body)
        except (KeyError, TypeError, ValueError, ScenarioError) as error:
            raise _damaged(path, number, f"not an entry ({error})") from error
        entries.append(entry)
        if "run" in body:  # it was written in full
            segment.template = entry
    return segment, entries


def _split(line: bytes) -> tuple[str, str]:
    """Split a line into the text of its object without the hash, and the hash; both empty if it is not a line."""
    match = LINE.fullmatch(line)
    if match is None:
        return "", ""
    return match[1].decode(errors="replace") + "}", match[2].decode()


def _loaded(text: str) -> Body | None:
    """Load a JSON object; None if the text is not one."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _defect(body: Body | None, text: str, digest: str, head: Head, is_first: bool) -> str:
    """Return what is wrong with the line after a head, the first of its segment or a later one; "" if nothing is."""
    if body is None:
        return "not a record"

    lines, previous = head
    is_header = "format" in body
    if body.get("index") != lines or is_header != is_first:
        return "does not follow the line before it (lines lost, inserted, or written twice)"
    if hash_of(previous, text) != digest:
        return "its hash does not match its content (edited)"
    return ""


def _short_text(index: int, from_step: int) -> str:
    """Return the text of a short line's object without its hash, as `TEXT` encodes it."""
    return f'{{"index":{index},"from_step":{from_step}}}'


def _written_out(body: Body, digest: str, segment: Segment) -> tuple[list[str], list[Entry], str]:
    """Write a condensed line out again.

    Args:
        body, digest: the line's object, and its hash.
        segment: up to the line before.

    Returns:
        The hash and the entry of each line that it stands for, and what is wrong with it; "" if nothing is.
    """
    template = segment.template
    index, previous = segment.head
    if template is None or body["index"] != index:
        return [], [], "does not follow the line before it (lines lost, inserted, or written twice)"

    length = template.to_step - template.from_step
    steps: list[int] = []
    try:
        for start, stop in body["from_steps"]:
            interval = range(int(start), int(stop), length)
            if not 0 < len(interval) <= MOST_CONDENSED - len(steps):
                raise ValueError
            steps += interval
    except (TypeError, ValueError, OverflowError):
        return [], [], "not a record of condensed lines"

    hashes = []
    for step in steps:
        previous = hash_of(previous, _short_text(index, step))
        hashes.append(previous)
        index += 1
    if not steps or previous != digest:
        return [], [], "its hash does not match the lines that it stands for (edited)"
    return hashes, [template.at(step) for step in steps], ""


def condensed(content: bytes) -> bytes:
    """Return the bytes of a whole segment with its short lines condensed; see the module."""
    lines: list[bytes] = []
    run: list[tuple[int, int, bytes]] = []  # index, from_step and hash of short lines that follow each other
    length = 0  # steps of the last full line

    def put_down() -> None:
        """Write the run down."""
        if not run:
            return
        first, _, _ = run[0]
        _, _, last = run[-1]
        intervals = _united((step, step + length) for _, step, _ in run)
        # A line stands for its steps in ascending order, each once.
        written = [step for start, stop in intervals for step in range(start, stop, length)]
        if written == [step for _, step, _ in run]:
            text = TEXT.encode({"index": first, "from_steps": intervals})
            lines.append(f'{text[:-1]},"hash":"{last.decode()}"}}\n'.encode())
        else:
            for index, step, digest in run:
                lines.append(f'{_short_text(index, step)[:-1]},"hash":"{digest.decode()}"}}\n'.encode())
        run.clear()

    for line in content.splitlines(keepends=True):
        short = SHORT_LINE.fullmatch(line)
        if short is not None and length:
            run.append((int(short[1]), int(short[2]), short[3]))
            if len(run) == MOST_CONDENSED:
                put_down()
            continue

        put_down()
        lines.append(line)
        body = _loaded(_split(line)[0]) or {}
        if "run" in body:
            length = int(body["to_step"]) - int(body["from_step"])
    put_down()
    return b"".join(lines)


def _from_header(header: Body, path: Path, source: str | None, size: int) -> Segment:
    """Return a segment that has only its header yet, which is a line of some bytes."""
    expected = {"format": FORMAT}
    if source is not None:
        expected["source"] = source
    for name, value in expected.items():
        if header.get(name) != value:
            raise BudgetError(
                f"{path} line 1: {name} is {header.get(name)!r} and must be {value!r}; give another ledger folder, or "
                "read it with the version that wrote it",
                code=f"ledger.{name}",
            )

    try:
        return Segment(
            number=int(header["segment"]),
            first=int(header["index"]),
            previous=str(header["previous"]),
            before=Totals.from_json(header),
            header_size=size,
            source=str(header["source"]),
        )
    except (KeyError, TypeError, ValueError, ScenarioError) as error:
        raise _damaged(path, 1, f"not a header ({error})") from error


def _damaged(path: Path, line: int, defect: str) -> BudgetError:
    return BudgetError(f"{path} line {line}: {defect}; {RESTORE}", code="ledger.damaged")


# --- the last segment, without locking it ---


def read_entries(directory: Path | str, source: str) -> list[Entry]:
    """Read the entries of a source's ledger without locking it; those of one run may have been merged.

    Returns:
        No entries if there is no ledger yet.

    Raises:
        BudgetError: it cannot be read or fails verification.
    """
    segment, entries = _read_last(ledger_path(directory, source))
    return [*segment.before.entries, *entries]


def _read_last(path: Path) -> tuple[Segment, list[Entry]]:
    """Read and verify the last segment without locking it."""
    # A writer may seal the segment while it is being read. So a segment counts as missing only if it is still missing
    # after the read, and as too new only if it was there before.
    before = sealed_segments(path)
    content = _read(path) if path.exists() else b""
    segment, entries = parse(content, path)
    after = sealed_segments(path)

    if segment.size:
        # To seal a segment, a writer copies it first. Then its number stands on a sealed file for a moment.
        before = before - {segment.number}
    check_segments(path, segment, before, after)
    return segment, entries


def check_segments(path: Path, segment: Segment, before: set[int], after: set[int]) -> None:
    """Refuse a ledger that lacks a segment, or whose last one is older than a sealed one.

    Args:
        segment: the last one.
        before, after: the sealed segments that were on disk before it was read, and after that.

    Raises:
        BudgetError: see above.
    """
    missing = set(range(segment.number)) - after
    if missing:
        message = f"{sealed_path(path, min(missing))} is missing, and {path.name} continues from it; {RESTORE}"
        raise BudgetError(message, code="ledger.segment")

    later = {number for number in before if number >= segment.number}
    if later:
        raise BudgetError(
            f"{path} is an old copy, cut short or empty: {sealed_path(path, max(later)).name} has later lines; "
            f"{RESTORE}",
            code="ledger.stale",
        )


def check_ledger_there(directory: Path | str, source: str, head: Head | None) -> None:
    """Refuse to begin a new ledger in the place of one that a checkpoint saw, and that is gone.

    Raises:
        BudgetError: its file is missing.
    """
    path = ledger_path(directory, source)
    if head is not None and head[0] > 0 and not path.exists():
        message = f"{path} is missing, and the checkpoint saw {head[0]} lines of it; {RESTORE}"
        raise BudgetError(message, code="ledger.stale")


# --- all segments ---


def verified(path: Path) -> Iterator[tuple[Segment, list[Entry]]]:
    """Read and verify a whole ledger, a segment at a time, without locking it.

    Besides every line this checks what opening a ledger relies on: that each header sums up exactly the lines before
    it.

    Yields:
        Each segment, with its entries.

    Raises:
        BudgetError: it cannot be read, is empty, or fails verification.
    """
    last = _read_last(path)
    last_segment, _ = last
    if not last_segment.size:
        raise _empty(path)

    end = Place()
    totals = Totals()
    for number in range(last_segment.number + 1):
        segment, entries = last
        if number < last_segment.number:
            segment, entries = read_sealed(path, number)
        check_follows(path, end, segment)
        if segment.before.to_json() != totals.to_json():
            raise _does_not_follow(path, segment)
        yield segment, entries
        totals.count(entries)
        end = segment.end


def _empty(path: Path) -> BudgetError:
    """Return the error about a ledger without a line."""
    if not path.exists():
        return BudgetError(_nothing_spent(path), code="ledger.unreadable")
    size = path.stat().st_size
    if not size:
        return BudgetError(_nothing_spent(path), code="ledger.empty")
    message = f"{path} has no whole line: its {size:,} bytes were cut from a ledger, or are of another file"
    return BudgetError(f"{message}; {RESTORE}", code="ledger.unfinished")


def _nothing_spent(path: Path) -> str:
    return f"{path} is missing or empty: nothing was spent; give a ledger that was written to"


def read_chain(path: Path) -> tuple[str, list[Entry]]:
    """Return a ledger's data source, and all its entries, each as it was appended; see `verified`."""
    source = ""
    entries: list[Entry] = []
    for segment, more in verified(path):
        source = source or segment.source
        entries += more
    return source, entries


def read_sealed(path: Path, number: int) -> tuple[Segment, list[Entry]]:
    """Read and verify a sealed segment of the ledger whose last one is at a path."""
    place = sealed_path(path, number)
    return parse(_read(place), place)


def check_follows(path: Path, end: Place, segment: Segment) -> None:
    """Refuse a segment that does not start where the one before it ends.

    Raises:
        BudgetError: see above.
    """
    if segment.start != end:
        raise _does_not_follow(path, segment)


def _does_not_follow(path: Path, segment: Segment) -> BudgetError:
    return BudgetError(
        f"{path}: segment {segment.number} does not follow the lines before it, which were edited or belong to "
        f"another copy; {RESTORE}",
        code="ledger.damaged",
    )


def hash_at(path: Path, segment: Segment, length: int) -> str:
    """Return the hash of one line of a ledger, from whichever segment it is in.

    Args:
        path: the file of the last segment.
        segment: the last segment.
        length: how many lines there are up to and with this one, at least 1.

    Raises:
        BudgetError: an earlier segment cannot be read, or fails verification.
    """
    while segment.first >= length:
        after = segment
        segment, _ = read_sealed(path, segment.number - 1)
        check_follows(path, segment.end, after)
    return segment.hashes[length - 1 - segment.first]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); give a ledger file"
        raise BudgetError(message, code="ledger.unreadable") from error
