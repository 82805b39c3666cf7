"""The format of a ledger file: a hash chain of JSON lines.

`hash` is the SHA-256 of a line's object without it (keys sorted, no spaces); `previous` is the hash of the line before.
Line 1 names the data source. Each later line is one entry of a run, for all peers that one process hosts:
    {"index", "run", "scenario", "environment", "from_step", "to_step",
     "charges": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...],
     "previous", "hash"}
The chain detects a line that was edited, removed, inserted, or written by two processes at once. It does not detect
whole lines cut from the end: a checkpoint names the head it saw, and resuming compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flower_privdec.errors import BudgetError, ScenarioError
from flower_privdec.privacy.mechanism.events import Release, Spend

FORMAT = "flower-privdec-ledger-3"
EMPTY_HASH = "0" * 64
RESTORE = "restore it from a backup, or give a new ledger folder and count what was spent here as unknown"

Body = dict[str, Any]
Head = tuple[int, str]
Interval = tuple[int, int]


@dataclass(frozen=True)
class RunName:
    """The identity of a run in a ledger: equal for two runs exactly when they draw the same noise.

    Attributes:
        id: a hash of everything that determines the run's numbers, the data included.
        scenario: the scenario's hash.
        environment: the generator, device and versions that compute the numbers.
    """

    id: str
    scenario: str
    environment: str


@dataclass(frozen=True)
class Charge:
    """The cost of some steps to some peers.

    Attributes:
        peers: their global ids, ascending.
        parts: the intervals [a, b) of steps that use one mechanism, and the release that covers them all.
    """

    peers: tuple[int, ...]
    parts: tuple[tuple[tuple[Interval, ...], Release], ...]

    @classmethod
    def of(cls, peers: Sequence[int], spends: Sequence[Spend]) -> Charge:
        """Return the charge to peers for some spends, in order of steps."""
        by_mechanism: dict[tuple[object, ...], list[Spend]] = {}
        for spend in spends:
            by_mechanism.setdefault(spend.release.mechanism, []).append(spend)
        parts = tuple(
            (
                tuple((s.from_step, s.to_step) for s in group),
                group[0].release.times(sum(s.release.steps for s in group)),
            )
            for group in by_mechanism.values()
        )
        return cls(tuple(peers), parts)

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return the releases charged to each of the peers."""
        return tuple(release for _, release in self.parts)

    def to_json(self) -> Body:
        """Return the charge as a JSON object."""
        releases = [{"steps": steps, "release": release.to_json()} for steps, release in self.parts]
        return {"peers": _intervals(self.peers), "releases": releases}

    @classmethod
    def from_json(cls, body: Body) -> Charge:
        """Return the charge of a JSON object; raises as `Entry.from_json`."""
        peers = tuple(peer for a, b in body["peers"] for peer in range(int(a), int(b)))
        parts = tuple(
            (tuple((int(a), int(b)) for a, b in part["steps"]), Release.from_json(part["release"]))
            for part in body["releases"]
        )
        return cls(peers, parts)


def _intervals(numbers: Sequence[int]) -> list[Interval]:
    """Return ascending numbers as intervals [a, b)."""
    edges = [i for i, (one, other) in enumerate(pairwise(numbers), start=1) if other != one + 1]
    return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise([0, *edges, len(numbers)]) if b > a]


@dataclass(frozen=True)
class Entry:
    """One line of a ledger: the charges for steps [from_step, to_step) of a run."""

    run: RunName
    from_step: int
    to_step: int
    charges: tuple[Charge, ...]

    def to_json(self) -> Body:
        """Return the entry as a JSON object."""
        return {
            "run": self.run.id,
            "scenario": self.run.scenario,
            "environment": self.run.environment,
            "from_step": self.from_step,
            "to_step": self.to_step,
            "charges": [charge.to_json() for charge in self.charges],
        }

    @classmethod
    def from_json(cls, body: Body) -> Entry:
        """Return the entry of a JSON object.

        Raises:
            KeyError, TypeError, ValueError, ScenarioError: the object is not an entry.
        """
        run = RunName(str(body["run"]), str(body["scenario"]), str(body["environment"]))
        charges = tuple(Charge.from_json(charge) for charge in body["charges"])
        return cls(run, int(body["from_step"]), int(body["to_step"]), charges)


def header(source: str) -> Body:
    """Return the body of the first line, without its place in the chain."""
    return {"format": FORMAT, "source": source}


def hash_of(body: Body) -> str:
    """Return the hash of a line's object (without its `hash`)."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def chained(bodies: Iterable[Body], head: Head) -> tuple[bytes, list[str]]:
    """Return the lines that append bodies to a chain with this head, and their hashes."""
    index, previous = head
    lines, hashes = [], []
    for body in bodies:
        body = body | {"index": index, "previous": previous}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256(text.encode()).hexdigest()
        lines.append(f'{text[:-1]},"hash":"{previous}"}}\n')
        hashes.append(previous)
        index += 1
    return "".join(lines).encode(), hashes


def parse(content: bytes, path: Path) -> tuple[list[Body], int]:
    """Verify the bytes of a ledger.

    A last line without its newline is a write that a crash interrupted. Its write was never acknowledged, so no step
    began on it; it still counts when it is complete, and is dropped only when it is not.

    Args:
        path: for messages.

    Returns:
        The lines' objects, and how many of the bytes hold them.

    Raises:
        BudgetError: a line is not a record, was edited, or does not follow the line before it.
    """
    bodies: list[Body] = []
    size, previous = 0, EMPTY_HASH
    for line in content.splitlines(keepends=True):
        torn = not line.endswith(b"\n") and size + len(line) == len(content)
        try:
            body = _verified(line, len(bodies), previous)
        except ValueError as error:
            if torn:
                break
            raise BudgetError(f"{path} line {len(bodies) + 1}: {error}; {RESTORE}", code="ledger.damaged") from None
        bodies.append(body)
        previous, size = body["hash"], size + len(line)
    return bodies, size


def _verified(line: bytes, index: int, previous: str) -> Body:
    """Return the object of a line, or raise ValueError with what is wrong with it."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a record") from None
    if not isinstance(body, dict) or "hash" not in body:
        raise ValueError("not a record")
    if body["hash"] != hash_of({name: value for name, value in body.items() if name != "hash"}):
        raise ValueError("its hash does not match its content (edited)")
    if body.get("index") != index or body.get("previous") != previous:
        raise ValueError("does not follow the line before it (lines lost, inserted, or written twice)")
    return body


def entries_of(bodies: Sequence[Body], path: Path) -> list[Entry]:
    """Return the entries of verified lines.

    Raises:
        BudgetError: the first line is not of this format, or a later one is not an entry.
    """
    if bodies and bodies[0].get("format") != FORMAT:
        message = f"{path} line 1: not a ledger of format {FORMAT}; read it with the version that wrote it"
        raise BudgetError(message, code="ledger.format")
    entries = []
    for number, body in enumerate(bodies[1:], start=2):
        try:
            entries.append(Entry.from_json(body))
        except (KeyError, TypeError, ValueError, ScenarioError) as error:
            message = f"{path} line {number}: not an entry ({error}); {RESTORE}"
            raise BudgetError(message, code="ledger.damaged") from error
    return entries


def read_chain(path: Path) -> tuple[Body, list[Entry]]:
    """Read and verify a ledger without locking it.

    Returns:
        Its first line (the data source) and its entries.

    Raises:
        BudgetError: it cannot be read, is empty, or fails verification.
    """
    try:
        bodies, _ = parse(path.read_bytes(), path)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); give a ledger file"
        raise BudgetError(message, code="ledger.unreadable") from error
    if not bodies:
        message = f"{path} is empty: nothing was spent; give a ledger that was written to"
        raise BudgetError(message, code="ledger.empty")
    return bodies[0], entries_of(bodies, path)
