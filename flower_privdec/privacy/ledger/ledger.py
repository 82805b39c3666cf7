"""The ledger of one data source: everything charged to it, in one locked, hash-chained file.

Every front end charges here: a cohort's plan (`CohortLedger`), a torch training loop, a Flower app's peer.

The file has one JSON object a line. `hash` is the SHA-256 of a line's object without it (keys sorted, no spaces);
`previous` is the hash of the line before. Line 1 names the data source. Each later line is one entry of a run, for all
peers that one process hosts:
    {"index", "run", "scenario", "environment", "from_step", "to_step",
     "charges": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...],
     "previous", "hash"}
The chain detects a line that was edited, removed, inserted, or written by two processes at once. It does not detect
whole lines cut from the end: a checkpoint names the head it saw, and resuming compares.

Privacy: a charge is on disk before the step that it covers draws its batch or its noise. After a crash at most one
charge has no step; no step is without its charge.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flower_privdec.common.files import sync_folder
from flower_privdec.errors import BudgetError, ScenarioError
from flower_privdec.privacy.accountant.accounting import Alternatives, epsilon
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical

FORMAT = "flower-privdec-ledger-3"
EMPTY_HASH = "0" * 64
RESTORE = "restore it from a backup, or give a new ledger folder and count what was spent here as unknown"

Body = dict[str, Any]
Head = tuple[int, str]
Interval = tuple[int, int]

_log = logging.getLogger(__name__)


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


class Ledger:
    """The ledger of one data source, open, verified and locked; a context manager.

    Attributes:
        path: the file.
        entries: every entry that is safe on disk, oldest first.
    """

    def __init__(self, directory: Path | str, source: str) -> None:
        """Open DIRECTORY/SOURCE.jsonl, created if missing.

        Raises:
            BudgetError: the file is in use, was edited, or belongs to another source.
        """
        self.path = ledger_path(directory, source)
        _make_folder(self.path.parent)
        self._header = header(source)
        self._unsynced: tuple[list[Entry], list[str]] = ([], [])
        self._fd: int | None = _open_locked(self.path)
        try:
            content = b"".join(iter(lambda: os.read(self._descriptor, 1 << 20), b""))
            bodies, size = parse(content, self.path)
            for name, value in self._header.items():
                if bodies and bodies[0].get(name) != value:
                    raise BudgetError(
                        f"{self.path} line 1: {name} is {bodies[0].get(name)!r} and must be {value!r}; give another "
                        "ledger folder",
                        code="ledger.format" if name == "format" else "ledger.source",
                    )
            if size < len(content):
                _log.warning("%s: dropped an incomplete last line; no step had begun on it", self.path)
                os.ftruncate(self._descriptor, size)
            elif content and not content.endswith(b"\n"):
                os.write(self._descriptor, b"\n")
            self.entries = entries_of(bodies, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise
        self._hashes = [str(body["hash"]) for body in bodies]

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            message = f"{self.path} is closed, or could not be written; open it again before another step"
            raise BudgetError(message, code="ledger.closed")
        return self._fd

    @property
    def head(self) -> Head:
        """Return the number of lines and the last line's hash: what a checkpoint names."""
        return len(self._hashes), self._hashes[-1] if self._hashes else EMPTY_HASH

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds everything that a checkpoint saw (it may have grown since).

        Raises:
            BudgetError: it is shorter, or differs there.
        """
        length, digest = head or (0, EMPTY_HASH)
        length = int(length)
        if length > len(self._hashes):
            message = f"{self.path} has {len(self._hashes)} lines where the checkpoint saw {length}; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")
        if length > 0 and self._hashes[length - 1] != digest:
            message = f"{self.path} line {length}: not the line that the checkpoint saw; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")

    def fits(self, charge: Charge, budget: float, delta: float) -> bool:
        """Return whether a budget allows one more charge, as if one example had taken part in all of them.

        Args:
            charge: what would be added.
            budget: ε; infinity allows everything.
            delta: δ in (0, 1).
        """
        return math.isinf(budget) or epsilon(releases_in(self.entries, charge), delta) <= budget

    def charge(self, run: RunName, from_step: int, to_step: int, charges: Iterable[Charge]) -> None:
        """Append one entry, whole or not at all; it counts, and is safe on disk, when this returns.

        Args:
            run: the run that takes the steps.
            from_step, to_step: the steps [from_step, to_step) that are covered.
            charges: the cost to each group of peers.

        Raises:
            BudgetError: the disk fails; then no step may be taken.
        """
        entry = Entry(run, from_step, to_step, tuple(charges))
        if self._unsynced[1]:
            self._sync()  # an interrupt came between write and sync
        bodies = [entry.to_json()] if self._hashes else [self._header, entry.to_json()]
        content, hashes = chained(bodies, self.head)
        self._unsynced = ([entry], hashes)
        self._guarded(lambda fd: _write_all(fd, content))
        self._sync()

    def _sync(self) -> None:
        self._guarded(os.fsync)
        entries, hashes = self._unsynced
        self.entries += entries
        self._hashes += hashes
        self._unsynced = ([], [])

    def _guarded(self, action: Callable[[int], None]) -> None:
        try:
            action(self._descriptor)
        except OSError as error:
            self.close()
            raise BudgetError(
                f"{self.path} could not be written ({error.strerror}), no step was taken; make room, resume",
                code="ledger.disk",
            ) from error

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def leave(self) -> None:
        """Close the file in a process forked from its holder, which keeps the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def releases_in(entries: Iterable[Entry], *more: Charge) -> tuple[Release, ...]:
    """Return all releases of some entries and further charges, equal mechanisms together."""
    charges = chain((charge for entry in entries for charge in entry.charges), more)
    return canonical(release for charge in charges for release in charge.releases)


def charged_until(entries: Iterable[Entry], run: str) -> int:
    """Return the step before which everything that a run may do is charged."""
    return max((entry.to_step for entry in entries if entry.run.id == run), default=0)


def charged_by_peer(entries: Iterable[Entry], run: str) -> dict[int, int]:
    """Return the step up to which each peer's own active steps of a run are charged, by peer."""
    ends: dict[int, int] = {}
    for entry in entries:
        for charge in entry.charges if entry.run.id == run else ():
            end = max(b for steps, _ in charge.parts for _, b in steps)
            ends |= {peer: max(end, ends.get(peer, 0)) for peer in charge.peers}
    return ends


def runs_in(entries: Iterable[Entry]) -> dict[str, Alternatives]:
    """Return the cost of each run, by its id: the distinct lists of releases charged to its peers.

    Which peer held an example in a run depends on the partition of the data, so each example is charged as if it had
    been at the peer that costs most: an upper bound for any partition.
    """
    lists: dict[str, dict[int, list[Release]]] = {}
    for entry in entries:
        for charge in entry.charges:
            for peer in charge.peers:
                lists.setdefault(entry.run.id, {}).setdefault(peer, []).extend(charge.releases)
    return {run: tuple(dict.fromkeys(map(canonical, peers.values()))) for run, peers in lists.items()}


def read_entries(directory: Path | str, source: str) -> list[Entry]:
    """Return the entries of a source's ledger without locking it; none where there is no ledger yet.

    Raises:
        BudgetError: it cannot be read or fails verification.
    """
    path = ledger_path(directory, source)
    return read_chain(path)[1] if path.exists() and path.stat().st_size else []


def ledger_path(directory: Path | str, source: str) -> Path:
    """Return the path of a data source's ledger."""
    return Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source)}.jsonl"


def _make_folder(folder: Path) -> None:
    """Create a ledger folder and sync its name to disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    except OSError as error:
        message = f"{folder} cannot be created ({error.strerror}); give another ledger folder"
        raise BudgetError(message, code="ledger.folder") from error


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{path} cannot be opened ({error.strerror}); give another ledger folder"
        raise BudgetError(message, code="ledger.folder") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        message = f"{path} is not a regular file, so what is written to it may be lost; give another ledger folder"
        raise BudgetError(message, code="ledger.not-a-file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        message = f"{path} is in use by another run; wait for its end or give another ledger folder"
        raise BudgetError(message, code="ledger.in-use") from None
    return fd


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


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
