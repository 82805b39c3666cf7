"""The format of a ledger file: one JSON object a line, each naming the hash of the line before it.

`hash` is SHA-256 of a line's object without it (keys sorted, no spaces), `previous` the hash of the line
before. Line 1 names the data's source; each later line is one payment of a run, for all peers that one process hosts:
    {"index", "run", "scenario", "environment", "from_step", "to_step",
     "shares": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...],
     "previous", "hash"}
What a chain shows by itself: a line edited, taken out, put in, or written by two processes at once. What it
cannot show: whole lines cut from its end; so a checkpoint names the head it saw, and resuming compares.
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

FORMAT = "flower-privdec-ledger-2"
NOTHING = "0" * 64
RESTORE = "restore it from a backup, or give a new ledger folder and count what was spent here as unknown"

Body = dict[str, Any]
Head = tuple[int, str]
Interval = tuple[int, int]


@dataclass(frozen=True)
class RunName:
    """What a ledger calls a run: two that draw the same noise have one name, and no others do.

    Attributes:
        id: a hash of all that decides the run's numbers, the data included.
        scenario: the scenario's hash.
        environment: the generator, device and versions with which the numbers are made.
    """

    id: str
    scenario: str
    environment: str


@dataclass(frozen=True)
class Share:
    """What some peers pay for the steps of a payment.

    Attributes:
        peers: their global ids, ascending.
        parts: the intervals [a, b) of steps that share a mechanism, and the release that pays for them all.
    """

    peers: tuple[int, ...]
    parts: tuple[tuple[tuple[Interval, ...], Release], ...]

    @classmethod
    def of(cls, peers: Sequence[int], spends: Sequence[Spend]) -> Share:
        """Return the share of peers that pay for some spends, in order of steps."""
        shared: dict[tuple[object, ...], list[Spend]] = {}
        for spend in spends:
            shared.setdefault(spend.release.mechanism, []).append(spend)
        parts = tuple(
            (
                tuple((s.from_step, s.to_step) for s in group),
                group[0].release.times(sum(s.release.steps for s in group)),
            )
            for group in shared.values()
        )
        return cls(tuple(peers), parts)

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return what each of the peers pays for."""
        return tuple(release for _, release in self.parts)

    def to_json(self) -> Body:
        """Return the share as a JSON object."""
        releases = [{"steps": steps, "release": release.to_json()} for steps, release in self.parts]
        return {"peers": _intervals(self.peers), "releases": releases}

    @classmethod
    def from_json(cls, body: Body) -> Share:
        """Return the share an object says; see `Payment.from_json`."""
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
class Payment:
    """What the steps [from_step, to_step) of a run cost the peers that one process hosts."""

    run: RunName
    from_step: int
    to_step: int
    shares: tuple[Share, ...]

    def to_json(self) -> Body:
        """Return the payment as a JSON object."""
        return {
            "run": self.run.id,
            "scenario": self.run.scenario,
            "environment": self.run.environment,
            "from_step": self.from_step,
            "to_step": self.to_step,
            "shares": [share.to_json() for share in self.shares],
        }

    @classmethod
    def from_json(cls, body: Body) -> Payment:
        """Return the payment a line says.

        Raises:
            KeyError, TypeError, ValueError, ScenarioError: when it says none.
        """
        run = RunName(str(body["run"]), str(body["scenario"]), str(body["environment"]))
        shares = tuple(Share.from_json(share) for share in body["shares"])
        return cls(run, int(body["from_step"]), int(body["to_step"]), shares)


def header(source: str) -> Body:
    """Return what the first line says, but for its place in the chain."""
    return {"format": FORMAT, "source": source}


def hash_of(body: Body) -> str:
    """Return the hash of a line's object (without its `hash`)."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def chained(bodies: Iterable[Body], head: Head) -> tuple[bytes, list[str]]:
    """Return lines that carry bodies on from a head, and their hashes."""
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
    """Verify a ledger's bytes.

    A last line without its newline is a write that a crash cut short. Nobody was told that it was safe, so no
    step began on it; yet it counts when it is complete, and is dropped only when it is not.

    Args:
        path: for messages.

    Returns:
        The lines' objects, and how many of the bytes hold them.

    Raises:
        BudgetError: when a line is not a record, was edited, or does not follow the line before it.
    """
    bodies: list[Body] = []
    kept, previous = 0, NOTHING
    for line in content.splitlines(keepends=True):
        torn = not line.endswith(b"\n") and kept + len(line) == len(content)
        try:
            body = _verified(line, len(bodies), previous)
        except ValueError as error:
            if torn:
                break
            raise BudgetError(f"{path} line {len(bodies) + 1}: {error}; {RESTORE}") from None
        bodies.append(body)
        previous, kept = body["hash"], kept + len(line)
    return bodies, kept


def _verified(line: bytes, index: int, previous: str) -> Body:
    """Return a line's object, or raise ValueError saying what is wrong with it."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a record") from None
    if not isinstance(body, dict) or "hash" not in body:
        raise ValueError("not a record")
    if body["hash"] != hash_of({name: value for name, value in body.items() if name != "hash"}):
        raise ValueError("its hash does not match what it says (edited)")
    if body.get("index") != index or body.get("previous") != previous:
        raise ValueError("does not follow the line before it (lines lost, put in, or written twice)")
    return body


def payments(bodies: Sequence[Body], path: Path) -> list[Payment]:
    """Return what verified lines paid for.

    Raises:
        BudgetError: when the first line is not this format's, or another is no payment.
    """
    if bodies and bodies[0].get("format") != FORMAT:
        raise BudgetError(f"{path} line 1: not a ledger of format {FORMAT}; read it with the version that wrote it")
    found = []
    for number, body in enumerate(bodies[1:], start=2):
        try:
            found.append(Payment.from_json(body))
        except (KeyError, TypeError, ValueError, ScenarioError) as error:
            raise BudgetError(f"{path} line {number}: not a payment ({error}); {RESTORE}") from error
    return found


def read_chain(path: Path) -> tuple[Body, list[Payment]]:
    """Read and verify a ledger without locking it.

    Returns:
        Its first line (the data's source) and its payments.

    Raises:
        BudgetError: when it cannot be read, is empty, or does not hold together.
    """
    try:
        bodies, _ = parse(path.read_bytes(), path)
    except OSError as error:
        raise BudgetError(f"{path} cannot be read ({error.strerror}); give a ledger file") from error
    if not bodies:
        raise BudgetError(f"{path} is empty: nothing was spent; give a ledger that was written to")
    return bodies[0], payments(bodies, path)
