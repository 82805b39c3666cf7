"""A ledger on disk: hash-chained lines in a sequence of files, and how they are read and verified.

    SOURCE.000000.sealed   SOURCE.000001.sealed   ...   SOURCE.jsonl

Each file is a *segment*. All but the last are sealed: nothing is written to them again. Lines are appended to
SOURCE.jsonl. A line is one JSON object, and ends with `hash`: the SHA-256 of the hash before it, and of the line's
object without it.

The first line of a segment is its header, which sums up all segments before it:

    {"index", "format", "source", "segment", "previous", "lines", "charged": [ENTRY, ...], "hash"}

`charged` has one entry for each run (`charges.merged`). So the last segment by itself gives every ε; opening a ledger
reads and verifies only that one, however long the ledger is. `verified` and `read_chain` go through all of them.

Each later line is one entry of a run, for all the peers that one process hosts:

    {"index", "run", "scenario", "environment", "partition", "from_step", "to_step",
     "charges": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...], "hash"}

An entry that differs from the last such line of the segment only in its steps is written in short:

    {"index", "from_step", "hash"}

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.privacy.ledger.charges import Body, Entry, Totals

FORMAT = "flower-privdec-ledger-5"
EMPTY_HASH = "0" * 64  # the hash before the first line
LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n?')
SHORT = {"index", "from_step"}  # the keys of an entry in short
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
        model: the last entry that was written whole, which entries in short repeat.
    """

    number: int = 0
    first: int = 0
    previous: str = EMPTY_HASH
    before: Totals = field(default_factory=Totals)
    header_size: int = 0
    size: int = 0
    hashes: list[str] = field(default_factory=list)
    source: str = ""
    model: Entry | None = None

    @property
    def start(self) -> Place:
        """Return where it starts."""
        return Place(self.number, self.first, self.previous)

    @property
    def end(self) -> Place:
        """Return where the segment after it would start."""
        last = self.hashes[-1] if self.hashes else self.previous
        return Place(self.number + 1, self.first + len(self.hashes), last)


# --- names of files ---


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
        text = json.dumps({"index": index} | body, separators=(",", ":"))
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
            segment = _begun(body, path, source, len(line))

        defect = _defect(body, text, digest, segment.end, is_first)
        if defect:
            # A last line without its newline is a write that a crash cut off. It was never acknowledged, so no step
            # began on it. It still counts if it is complete; only an incomplete one is dropped.
            is_last = segment.size + len(line) == len(content)
            if is_last and not line.endswith(b"\n"):
                rest = Segment() if is_first else segment
                return rest, entries
            raise _damaged(path, number, defect)
        assert body is not None  # else it had a defect

        segment.hashes.append(digest)
        segment.size += len(line)
        if is_first:
            continue

        try:
            if segment.model is not None and body.keys() == SHORT:
                entry = segment.model.at(int(body["from_step"]))
            else:
                entry = Entry.from_json(body)
        except (KeyError, TypeError, ValueError, ScenarioError) as error:
            raise _damaged(path, number, f"not an entry ({error})") from error
        entries.append(entry)
        if "run" in body:
            segment.model = entry
    return segment, entries


def _split(line: bytes) -> tuple[str, str]:
    """Split a line into the text of its object without the hash, and the hash; both empty if it is no line."""
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


def _defect(body: Body | None, text: str, digest: str, end: Place, is_first: bool) -> str:
    """Return what is wrong with the next line of a segment that ends at a place; "" if nothing is."""
    if body is None:
        return "not a record"

    is_header = "format" in body
    if body.get("index") != end.first or is_header != is_first:
        return "does not follow the line before it (lines lost, inserted, or written twice)"
    if hash_of(end.previous, text) != digest:
        return "its hash does not match its content (edited)"
    return ""


def _begun(header: Body, path: Path, source: str | None, size: int) -> Segment:
    """Return the segment that a header begins."""
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
        before = before - {segment.number}  # a copy of the last segment itself: a seal under way
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
    """Refuse a ledger that is gone and that a checkpoint saw, before another is begun in its place.

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
    """Return the hash of a ledger's line, in whichever segment it is.

    Args:
        path: the file of the last segment.
        segment: the last segment.
        length: how many lines there are up to this one, at least 1.

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
