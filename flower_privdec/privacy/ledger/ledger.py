"""The ledger of one data source: everything charged to it, in locked, hash-chained files.

Every front end charges here: a cohort's plan (`CohortLedger`), a torch training loop, a Flower app's peer. The ledger
belongs to the data source, before subsets and partition: another part of it, another order or number of peers, or a
changed pixel is charged to it too. Each example is charged what any peer was charged in a run, and in runs of one
partition what one peer was charged in all of them (`costs_in`).

A release keeps its noise against each adversary (`events.Release.against`), so the ε of all runs is composed against
one and the same adversary, whichever is asked about.

An entry names the run and the steps that it covers. A run's name is a hash of everything that determines its numbers
(scenario, seed, data, generator, device and versions), so taking those steps again gives the same releases bit for bit
and costs nothing more. Anything else over the same data adds up; a run that draws fresh noise has a new name.

A ledger is a sequence of segments: SOURCE.000000.sealed, SOURCE.000001.sealed, ..., and SOURCE.jsonl, the last one, to
which lines are appended. Each is one JSON object a line. `hash` ends a line; it is the SHA-256 of the hash before it
and of the line's object without it. Line 1 of a segment is its header, which sums up all segments before it:
    {"index", "format", "source", "segment", "previous", "lines", "charged": [ENTRY, ...], "hash"}
`charged` has one entry for each run, in which costs are added up by peers and mechanism: integers, so nothing is
rounded. So the last segment alone gives every ε, and opening a ledger reads and verifies that one; `read_chain` and
`verify` go through all. Each later line is one entry of a run, for all peers that one process hosts:
    {"index", "run", "scenario", "environment", "partition", "from_step", "to_step",
     "charges": [{"peers": [[a, b], ...], "releases": [{"steps": [[a, b], ...], "release": {...}}, ...]}, ...], "hash"}
or, where it has the run, the boot and the cost of the last such line before it in the segment, and other steps:
    {"index", "from_step", "hash"}
The chain detects a line that was edited, removed, inserted, or written by two processes at once, and the header a
missing segment. It does not detect whole lines cut from the end: a checkpoint names the head it saw, and resuming
compares.

A segment that is long enough is sealed before the next entry: its copy is put on disk under its own name, and a file
with the next header then replaces SOURCE.jsonl. A crash between the two leaves both, which are equal; the copy is then
removed and made again.

Privacy: a charge is on disk before the step that it covers draws its batch or its noise. A charge may cover steps
ahead: after a crash that is never resumed, at most those are charged without having been run; no step is run without
its charge.
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
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from threading import current_thread
from typing import Any, Self

import numpy as np

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.common.files import disk_error, make_owners_folder, open_file, replacing, sync
from flower_privdec.privacy.accountant.accounting import Alternatives, epsilon, epsilon_of_runs, last_that_fits
from flower_privdec.privacy.mechanism.events import (
    EVERYBODY,
    Adversary,
    Mechanism,
    Release,
    Spend,
    canonical,
    towards,
)

FORMAT = "flower-privdec-ledger-5"
MERGED = 64  # further entries in memory until those of a run become one
SEGMENT = 1 << 19  # bytes after which a segment is sealed; more where its header is long
EMPTY_HASH = "0" * 64
LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n?')
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
        partition: a hash of which examples each of the peers holds: in two runs of one partition each example is at
            the same peer. "" if that is not known.
    """

    id: str
    scenario: str
    environment: str
    partition: str = ""


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
    def of(cls, peers: Sequence[int], spends: Iterable[Spend]) -> Charge:
        """Return the charge to peers for some spends, in order of steps."""
        return cls.of_parts(peers, (([(s.from_step, s.to_step)], s.release) for s in spends))

    @classmethod
    def of_parts(cls, peers: Sequence[int], parts: Iterable[tuple[Iterable[Interval], Release]]) -> Charge:
        """Return the charge to peers for parts, those of one mechanism together."""
        groups: dict[Mechanism, tuple[list[Interval], list[Release]]] = {}
        for intervals, release in parts:
            steps, releases = groups.setdefault(release.mechanism, ([], []))
            steps += intervals
            releases.append(release)
        added = ((tuple(steps), group[-1].times(sum(r.steps for r in group))) for steps, group in groups.values())
        return cls(tuple(peers), tuple(added))

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
    """One line of a ledger: the charges for steps [from_step, to_step) of a run.

    Attributes:
        run: which.
        from_step, to_step: steps.
        charges: the cost to each group of peers.
        boot: the process of a networked peer that wrote the line; 0 for others.
        witnessed: for a line that replaces lost ones, how many lines of each process are then charged.
    """

    run: RunName
    from_step: int
    to_step: int
    charges: tuple[Charge, ...]
    boot: int = 0
    witnessed: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> Body:
        """Return the entry as a JSON object."""
        return {
            "run": self.run.id,
            "scenario": self.run.scenario,
            "environment": self.run.environment,
            "partition": self.run.partition,
            "from_step": self.from_step,
            "to_step": self.to_step,
            "charges": [charge.to_json() for charge in self.charges],
            **({"boot": self.boot} if self.boot else {}),
            **({"witnessed": {str(boot): lines for boot, lines in self.witnessed.items()}} if self.witnessed else {}),
        }

    def at(self, step: int) -> Entry:
        """Return the entry for as many steps from another one on."""
        by = step - self.from_step
        charges = tuple(
            Charge(charge.peers, tuple((tuple((a + by, b + by) for a, b in steps), r) for steps, r in charge.parts))
            for charge in self.charges
        )
        return replace(self, from_step=step, to_step=self.to_step + by, charges=charges)

    @classmethod
    def from_json(cls, body: Body) -> Entry:
        """Return the entry of a JSON object.

        Raises:
            KeyError, TypeError, ValueError, ScenarioError: the object is not an entry.
        """
        run = RunName(str(body["run"]), str(body["scenario"]), str(body["environment"]), str(body["partition"]))
        charges = tuple(Charge.from_json(charge) for charge in body["charges"])
        witnessed = {int(boot): int(lines) for boot, lines in dict(body.get("witnessed", {})).items()}
        return cls(run, int(body["from_step"]), int(body["to_step"]), charges, int(body.get("boot", 0)), witnessed)


class Totals:
    """What entries add up to: every cost, and how many lines each process wrote.

    Attributes:
        entries: oldest first; those of one run may be one, see `merged`.
        lines: of each boot, those of processes whose ledger was lost included once they are charged.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.entries: list[Entry] = []
        self.lines: dict[int, int] = {}
        self._most = MERGED

    def count(self, entries: Sequence[Entry]) -> None:
        """Add entries."""
        for entry in entries:
            if entry.boot:
                self.lines[entry.boot] = self.lines.get(entry.boot, 0) + 1
            self.lines |= entry.witnessed
        self.entries += entries
        if len(self.entries) > self._most:
            self.entries = merged(self.entries)
            self._most = 2 * len(self.entries) + MERGED

    def to_json(self) -> Body:
        """Return the totals as a JSON object."""
        charged = [entry.to_json() for entry in merged(self.entries)]
        return {"lines": [list(pair) for pair in self.lines.items()], "charged": charged}

    @classmethod
    def from_json(cls, body: Body) -> Totals:
        """Return the totals of a JSON object; raises as `Entry.from_json`."""
        totals = Totals()
        totals.count([Entry.from_json(entry) for entry in body["charged"]])
        totals.lines = {int(boot): int(lines) for boot, lines in body["lines"]}
        return totals


@dataclass
class Segment:
    """The lines of one file of a ledger.

    Attributes:
        number: how many segments come before it.
        first: how many lines they have.
        previous: the hash of the last of them.
        before: what they add up to.
        header_size, size: bytes of the header, and of all lines.
        hashes: of the lines.
        source: the data's.
        model: the last entry whose line has it whole.
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
    def start(self) -> tuple[int, int, str]:
        """Return its number, its first line's, and the hash before that."""
        return self.number, self.first, self.previous

    @property
    def end(self) -> tuple[int, int, str]:
        """Return the start of the segment after it."""
        return self.number + 1, self.first + len(self.hashes), self.hashes[-1] if self.hashes else self.previous


class Ledger(Totals):
    """The ledger of one data source, open, verified and locked; a context manager.

    Its `entries` are those that are safe on disk.

    Attributes:
        path: the file of the last segment.
        boot: of the process, which its lines then name; 0 where no neighbours witness the ledger.
        durable: whether a line outlasts a stop of the machine, and not only of the process.
    """

    boot = 0

    def __init__(self, directory: Path | str, source: str, *, durable: bool = True) -> None:
        """Open DIRECTORY/SOURCE.jsonl, created if missing.

        Args:
            durable: see above; False for a folder that is removed in the end.

        Raises:
            BudgetError: the file is in use, was edited, lacks a segment, or belongs to another source.
        """
        super().__init__()
        self.path = ledger_path(directory, source)
        self._source = source
        self.durable = durable
        self._unsynced: tuple[list[Entry], list[str], int, Entry | None] = ([], [], 0, None)
        self._fd: int | None = _open_locked(self.path, durable)
        self._status: os.stat_result | None = None  # of the file, as it was closed
        try:
            content = b"".join(iter(lambda: os.read(self._descriptor, 1 << 20), b""))
            segment, entries = parse(content, self.path, source)
            sealed = sealed_segments(self.path)
            copy = sealed_path(self.path, segment.number)
            if segment.number in sealed and segment.size and copy.read_bytes() == content:
                copy.unlink()  # a crash came before the next segment
                sealed.remove(segment.number)
            _check_segments(self.path, segment, sealed, sealed)
            if segment.size < len(content):
                _log.warning("%s: dropped an incomplete last line; no step had begun on it", self.path)
                os.ftruncate(self._descriptor, segment.size)
            elif content and not content.endswith(b"\n"):
                segment.size += os.write(self._descriptor, b"\n")
            if durable:
                sync(self.path.parent)
        except BaseException:
            self.close()
            raise
        self._segment = segment
        before = segment.before
        self.entries = before.entries
        self.lines = before.lines
        self.count(entries)

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            message = f"{self.path} is closed, or could not be written; open it again before another step"
            raise BudgetError(message, code="ledger.closed")
        return self._fd

    @property
    def head(self) -> Head:
        """Return the number of lines and the last line's hash, which a checkpoint names."""
        segment = self._segment
        length = len(segment.hashes)  # to which another thread may append one, see `CohortLedger.reserve`
        return segment.first + length, segment.hashes[length - 1] if length else EMPTY_HASH

    @property
    def n_entries(self) -> int:
        """Return how many entries were appended."""
        return max(0, self.head[0] - self._segment.number - 1)

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds all lines that a checkpoint saw; it may have grown since.

        Raises:
            BudgetError: it is shorter, or differs there.
        """
        length, digest = head or (0, EMPTY_HASH)
        length = int(length)
        segment = self._segment
        if length > self.head[0]:
            message = f"{self.path} has {self.head[0]} lines where the checkpoint saw {length}; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")
        while segment.first >= length > 0:
            after, (segment, _) = segment, _read_sealed(self.path, segment.number - 1)
            _check_follows(self.path, segment.end, after)
        if length > 0 and segment.hashes[length - 1 - segment.first] != digest:
            message = f"{self.path} line {length}: not the line that the checkpoint saw; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")

    def name_lines(self, boot: int) -> None:
        """Name a boot in each line that is written from now on, which neighbours witness."""
        self.boot = boot

    def lacks(self, witnessed: Mapping[int, int]) -> int:
        """Return how many lines of those that neighbours have seen are not in the ledger.

        Args:
            witnessed: how many lines they have seen of each boot.
        """
        return sum(max(0, lines - self.lines.get(boot, 0)) for boot, lines in witnessed.items())

    def check_witnessed(self, witnessed: Mapping[int, int]) -> None:
        """Check that the ledger holds what a neighbour has seen of it.

        Raises:
            BudgetError: it lacks some: an old copy, a new ledger, or one beside which a copy was continued.
        """
        if missing := self.lacks(witnessed):
            raise BudgetError(
                f"{self.path} lacks {missing} lines that a neighbour (or its own state) has seen: it is an old copy or "
                "a new ledger, or a copy was continued beside it, so its ε is too small; put the newest copy back, or "
                "charge the missing lines by --charge-witnessed (of a SuperNode: charge-witnessed=true in its "
                "node-config)",
                code="ledger.witnessed",
            )

    def fits(self, charge: Charge, budget: float, delta: float) -> bool:
        """Return whether a budget allows one more charge, as if one example had taken part in all of them.

        Args:
            charge: what would be added.
            budget: ε; infinity allows everything.
            delta: δ in (0, 1).
        """
        return math.isinf(budget) or epsilon(releases_in(self.entries, charge), delta) <= budget

    def append(
        self,
        run: RunName,
        from_step: int,
        to_step: int,
        charges: Iterable[Charge],
        *,
        witnessed: Mapping[int, int] | None = None,
    ) -> None:
        """Append one entry, whole or not at all; it counts, and is safe on disk, when this returns.

        Args:
            run: the run that takes the steps.
            from_step, to_step: the steps [from_step, to_step) that are covered.
            charges: the cost to each group of peers.
            witnessed: see `lacks`; then the line is in place of those.

        Raises:
            BudgetError: the disk fails; then no step may be taken.
        """
        if witnessed is None:
            entry = Entry(run, from_step, to_step, tuple(charges), self.boot)
        else:
            lacking = {boot: lines for boot, lines in witnessed.items() if lines > self.lines.get(boot, 0)}
            entry = Entry(run, from_step, to_step, tuple(charges), witnessed=lacking)
        segment = self._segment
        if self._unsynced[1]:  # an interrupt came before the sync
            if os.fstat(self._descriptor).st_size != segment.size + self._unsynced[2]:
                self.close()  # and before the end of the write
            self._sync()
        if segment.size >= max(SEGMENT, 2 * segment.header_size):
            self._seal()
            segment = self._segment
        repeats = segment.model is not None and segment.model.at(from_step) == entry
        bodies = [{"from_step": from_step} if repeats else entry.to_json()]
        if not segment.size:
            bodies.insert(0, self._header(0))
        content, hashes = chained(bodies, self.head)
        self._unsynced = ([entry], hashes, len(content), segment.model if repeats else entry)
        self._guarded(partial(_write, content=content))
        self._sync()

    def _header(self, number: int) -> Body:
        """Return the header of a segment that follows what there is."""
        places = {"format": FORMAT, "source": self._source, "segment": number, "previous": self.head[1]}
        return places | self.to_json()

    def _seal(self) -> None:
        """Seal the segment, and begin the next; each is on disk, under its name, before the other.

        An interrupt closes the ledger, for it may not know which file is the last segment.
        """
        segment = self._segment
        fd = -1
        done = False
        content, hashes = chained([self._header(segment.number + 1)], self.head)
        try:
            with replacing(sealed_path(self.path, segment.number)) as part:
                part.write_bytes(os.pread(self._descriptor, segment.size, 0))
            with replacing(self.path) as part:
                fd = _open_locked(part)
                _write(fd, content)
            size = len(content)
            self._segment = Segment(*segment.end, Totals(), size, size, hashes, self._source)
            sealed = self._descriptor
            self._fd = fd
            done = True
            os.close(sealed)
        except OSError as error:
            raise self._disk_error(error) from error
        finally:
            if not done:
                self.close()
                if fd >= 0:
                    os.close(fd)

    def _sync(self) -> None:
        if self.durable:
            self._guarded(os.fsync)
        entries, hashes, size, self._segment.model = self._unsynced
        self._segment.hashes += hashes
        self._segment.size += size
        self.count(entries)
        self._unsynced = ([], [], 0, None)

    def _guarded(self, action: Callable[[int], None]) -> None:
        try:
            action(self._descriptor)
        except OSError as error:
            self.close()
            raise self._disk_error(error) from error

    def _disk_error(self, error: OSError) -> BudgetError:
        error.filename = error.filename or str(self.path)
        return BudgetError(f"{disk_error(error)}; no step was taken", code="ledger.disk")

    def close(self, *, unlock: bool = True) -> None:
        """Close the file and release its lock, unless this process was forked from its holder, which keeps it."""
        if self._fd is not None:
            self._status = None if self._unsynced[1] else os.fstat(self._fd)
            if unlock:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def reopen(self) -> bool:
        """Open a closed ledger again where its file is as it was, and return whether it is.

        Raises:
            BudgetError: it is in use.
        """
        if self._status is None or not self.path.exists():
            return False
        fd = _open_locked(self.path, durable=False)
        before = self._status
        now = os.fstat(fd)
        if any(getattr(now, name) != getattr(before, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns")):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Return one entry for each run: its costs, added up by peers and mechanism, and the steps that they cover.

    Every ε, charged step and plan can be computed from them as from the entries themselves, exactly. Their lines are
    not in them: no boot, nothing witnessed.
    """
    runs: dict[RunName, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.run, []).append(entry)
    return [
        Entry(run, min(e.from_step for e in group), max(e.to_step for e in group), _added_up(group))
        for run, group in runs.items()
    ]


def _added_up(entries: Iterable[Entry]) -> tuple[Charge, ...]:
    groups: dict[tuple[int, ...], list[tuple[tuple[Interval, ...], Release]]] = {}
    for charge in chain.from_iterable(entry.charges for entry in entries):
        groups.setdefault(charge.peers, []).extend(charge.parts)
    charges = (Charge.of_parts(peers, parts) for peers, parts in groups.items())
    return tuple(Charge(c.peers, tuple((_united(steps), release) for steps, release in c.parts)) for c in charges)


def _united(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals [a, b), ascending and apart."""
    union: list[Interval] = []
    for a, b in sorted(intervals):
        if union and a <= union[-1][1]:
            a = union[-1][0]
            b = max(b, union.pop()[1])
        union.append((a, b))
    return tuple(union)


def releases_in(entries: Iterable[Entry], *more: Charge) -> tuple[Release, ...]:
    """Return all releases of some entries and further charges, equal mechanisms together."""
    charges = chain((charge for entry in entries for charge in entry.charges), more)
    return canonical(release for charge in charges for release in charge.releases)


def charged_until(entries: Iterable[Entry], run: str) -> int:
    """Return the step before which all steps of a run are charged."""
    return max((entry.to_step for entry in entries if entry.run.id == run), default=0)


def charged_by_peer(entries: Iterable[Entry], run: str) -> dict[int, int]:
    """Return the step up to which each peer's own active steps of a run are charged, by peer."""
    ends: dict[int, int] = {}
    for entry in entries:
        for charge in entry.charges if entry.run.id == run else ():
            end = max(b for steps, _ in charge.parts for _, b in steps)
            ends |= {peer: max(end, ends.get(peer, 0)) for peer in charge.peers}
    return ends


def runs_in(entries: Iterable[Entry], adversary: Adversary = EVERYBODY) -> dict[str, Alternatives]:
    """Return the cost of each run alone against an adversary, by its id: the different lists that its peers paid for.

    See `costs_in` for the cost of all runs together.
    """
    runs = _paid_by_peer((entry.run.id, entry) for entry in entries)
    return {run: _alternatives(peers, adversary) for run, peers in runs.items()}


def costs_in(entries: Iterable[Entry], adversary: Adversary = EVERYBODY) -> list[Alternatives]:
    """Return the cost of all runs, to be composed against an adversary by `epsilon_of_runs`.

    Which peer held an example in a run depends on the partition of the data. In runs of one partition an example was
    at one peer, so what that peer paid for adds up. Beyond that each example is charged as if it had been at the peer
    that costs most: an upper bound for any partitions.

    Args:
        entries: of one ledger.
        adversary: who sees all these runs; by default all other peers together.
    """
    groups = _paid_by_peer((entry.run.partition or entry.run.id, entry) for entry in entries)
    return [_alternatives(peers, adversary) for peers in groups.values()]


def _paid_by_peer(named: Iterable[tuple[str, Entry]]) -> dict[str, dict[int, list[Release]]]:
    """Return the releases charged to each peer in the entries of each name."""
    paid: dict[str, dict[int, list[Release]]] = {}
    for name, entry in named:
        for charge in entry.charges:
            for peer in charge.peers:
                paid.setdefault(name, {}).setdefault(peer, []).extend(charge.releases)
    return paid


def _alternatives(peers: Mapping[int, Iterable[Release]], adversary: Adversary) -> Alternatives:
    return tuple(dict.fromkeys(towards(releases, adversary) for releases in peers.values()))


def read_entries(directory: Path | str, source: str) -> list[Entry]:
    """Return the entries of a source's ledger, those of one run perhaps as one, without locking it.

    Returns:
        None where there is no ledger yet.

    Raises:
        BudgetError: it cannot be read or fails verification.
    """
    segment, entries = _read_last(ledger_path(directory, source))
    return [*segment.before.entries, *entries]


_noted: ContextVar[list[tuple[Path, float, str, str]] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_budgets() -> Iterator[list[tuple[Path, float, str, str]]]:
    """Yield a list that gets the ledger, δ, caveats and assumptions of each budget that a loop opens inside."""
    noted: list[tuple[Path, float, str, str]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_budget(path: Path, delta: float, caveat: str = "", assumption: str = "") -> None:
    """Note a budget for `noting_budgets`, where one is around.

    Args:
        path: of its ledger.
        delta: δ of its ε.
        caveat: what ε does not cover, to be said beside it.
        assumption: what ε holds under, to be said beside it.
    """
    if (noted := _noted.get()) is not None:
        noted.append((path, delta, caveat, assumption))


def ledger_path(directory: Path | str, source: str) -> Path:
    """Return the path of a data source's ledger."""
    return Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source)}.jsonl"


def check_ledger_there(directory: Path | str, source: str, head: Head | None) -> None:
    """Refuse a ledger that a checkpoint saw and that is gone, before another is begun in its place.

    Raises:
        BudgetError: its file is missing.
    """
    path = ledger_path(directory, source)
    if head is not None and head[0] > 0 and not path.exists():
        message = f"{path} is missing, and the checkpoint saw {head[0]} lines of it; {RESTORE}"
        raise BudgetError(message, code="ledger.stale")


def _open_locked(path: Path, durable: bool = True) -> int:
    """Open a ledger file, created with its folder if missing, and lock it."""
    try:
        make_owners_folder(path.parent)
        if durable:
            sync(path.parent.parent)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        message = f"{error.filename or path} cannot be created ({error.strerror}); give another ledger folder"
        raise BudgetError(message, code="ledger.folder") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        message = f"{path} is not a regular file, so what is written to it may be lost; give another ledger folder"
        raise BudgetError(message, code="ledger.not-a-file")
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.stat(), os.fstat(fd)):  # else another process sealed it meanwhile
            return fd
    os.close(fd)
    message = f"{path} is in use by another run; wait for its end or give another ledger folder"
    raise BudgetError(message, code="ledger.in-use")


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def sealed_path(path: Path, number: int) -> Path:
    """Return the path of a sealed segment of the ledger whose last one is at a path."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{number:06d}.sealed")


def sealed_segments(path: Path) -> set[int]:
    """Return the numbers of a ledger's sealed segments that are on disk."""
    name = re.compile(re.escape(path.name.removesuffix(".jsonl")) + r"\.(\d{6,})\.sealed")
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    return {int(match[1]) for match in map(name.fullmatch, names) if match}


def _check_segments(path: Path, segment: Segment, before: set[int], after: set[int]) -> None:
    """Refuse a ledger that lacks a segment, or whose last one is older than one sealed before or after it was read."""
    if missing := set(range(segment.number)) - after:
        message = f"{sealed_path(path, min(missing))} is missing, and {path.name} continues from it; {RESTORE}"
        raise BudgetError(message, code="ledger.segment")
    if later := {number for number in before if number >= segment.number}:
        raise BudgetError(
            f"{path} is an old copy, cut short or empty: {sealed_path(path, max(later)).name} has later lines; "
            f"{RESTORE}",
            code="ledger.stale",
        )


def _check_follows(path: Path, end: tuple[int, int, str], segment: Segment, before: Totals | None = None) -> None:
    """Refuse a segment that does not start where the one before it ends, or sums up other lines than come before."""
    if segment.start != end or (before is not None and segment.before.to_json() != before.to_json()):
        raise BudgetError(
            f"{path}: segment {segment.number} does not follow the lines before it, which were edited or belong to "
            f"another copy; {RESTORE}",
            code="ledger.damaged",
        )


def _read_sealed(path: Path, number: int) -> tuple[Segment, list[Entry]]:
    """Read and verify a sealed segment of the ledger whose last one is at a path."""
    place = sealed_path(path, number)
    return parse(_read(place), place)


def _read_last(path: Path) -> tuple[Segment, list[Entry]]:
    """Read and verify the last segment without locking it."""
    before = sealed_segments(path)
    segment, entries = parse(_read(path) if path.exists() else b"", path)
    _check_segments(path, segment, before - {segment.number} if segment.size else before, sealed_segments(path))
    return segment, entries


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); give a ledger file"
        raise BudgetError(message, code="ledger.unreadable") from error


def hash_of(previous: str, text: str) -> str:
    """Return the hash of a line.

    Args:
        previous: the hash of the line before.
        text: the line's object without its hash.
    """
    return hashlib.sha256((previous + text).encode()).hexdigest()


def chained(bodies: Iterable[Body], head: Head) -> tuple[bytes, list[str]]:
    """Return the lines that append bodies to a chain with this head, and their hashes."""
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

    A last line without its newline is a write that a crash interrupted. Its write was never acknowledged, so no step
    began on it; it still counts when it is complete, and is dropped only when it is not.

    Args:
        path: for messages.
        source: what its header must name; None for any.

    Returns:
        The segment, whose size counts no dropped line, and its entries.

    Raises:
        BudgetError: a line is not a record, was edited, or does not follow the line before it; or the first is not a
            header of this format and source.
    """
    segment = Segment()
    entries = list[Entry]()
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        match = LINE.fullmatch(line)
        text, digest = (match[1].decode(errors="replace") + "}", match[2].decode()) if match else ("", "")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        if number == 1 and isinstance(body, dict) and "format" in body:
            segment = _begun(body, path, source, len(line))
        _, index, previous = segment.end
        defect = ""
        if not isinstance(body, dict):
            defect = "not a record"
        elif body.get("index") != index or ("format" in body) != (number == 1):
            defect = "does not follow the line before it (lines lost, inserted, or written twice)"
        elif hash_of(previous, text) != digest:
            defect = "its hash does not match its content (edited)"
        if defect and not line.endswith(b"\n") and segment.size + len(line) == len(content):
            return (segment, entries) if number > 1 else (Segment(), entries)
        if defect:
            raise _damaged(path, number, defect)
        segment.hashes.append(digest)
        segment.size += len(line)
        if number > 1:
            try:
                model = segment.model if body.keys() == {"index", "from_step"} else None
                entries.append(Entry.from_json(body) if model is None else model.at(int(body["from_step"])))
            except (KeyError, TypeError, ValueError, ScenarioError) as error:
                raise _damaged(path, number, f"not an entry ({error})") from error
            segment.model = entries[-1] if "run" in body else segment.model
    return segment, entries


def _damaged(path: Path, line: int, defect: str) -> BudgetError:
    return BudgetError(f"{path} line {line}: {defect}; {RESTORE}", code="ledger.damaged")


def _begun(header: Body, path: Path, source: str | None, size: int) -> Segment:
    """Return the segment that a header begins."""
    for name, value in {"format": FORMAT, "source": header.get("source") if source is None else source}.items():
        if header.get(name) != value:
            raise BudgetError(
                f"{path} line 1: {name} is {header.get(name)!r} and must be {value!r}; give another ledger folder, or "
                "read it with the version that wrote it",
                code=f"ledger.{name}",
            )
    try:
        place = int(header["segment"]), int(header["index"]), str(header["previous"])
        return Segment(*place, Totals.from_json(header), size, source=str(header["source"]))
    except (KeyError, TypeError, ValueError, ScenarioError) as error:
        raise _damaged(path, 1, f"not a header ({error})") from error


def verified(path: Path) -> Iterator[tuple[Segment, list[Entry]]]:
    """Read and verify a whole ledger, a segment at a time, without locking it.

    Beside every line this checks what opening a ledger relies on: that each header sums up exactly the lines before it.

    Yields:
        Each segment, with its entries.

    Raises:
        BudgetError: it cannot be read, is empty, or fails verification.
    """
    last = _read_last(path)
    if not last[0].size:
        if path.exists() and (size := path.stat().st_size):
            message = f"{path} has no whole line: its {size:,} bytes were cut from a ledger, or are of another file"
            raise BudgetError(f"{message}; {RESTORE}", code="ledger.unfinished")
        message = f"{path} is missing or empty: nothing was spent; give a ledger that was written to"
        raise BudgetError(message, code="ledger.empty" if path.exists() else "ledger.unreadable")
    end = Segment().start
    totals = Totals()
    for number in range(last[0].number + 1):
        segment, entries = last if number == last[0].number else _read_sealed(path, number)
        _check_follows(path, end, segment, totals)
        yield segment, entries
        totals.count(entries)
        end = segment.end


def read_chain(path: Path) -> tuple[str, list[Entry]]:
    """Return a ledger's data source, and all its entries, each as it was appended; see `verified`."""
    segments = list(verified(path))
    return segments[0][0].source, [entry for _, entries in segments for entry in entries]


RESERVING = "ledger-reserving"  # names the thread that charges a step ahead
WRITE_FRACTION = 0.005  # of the wall time, the target for writing adaptive blocks
FIRST_BLOCK = 16  # an adaptive block covers at least this fraction (one in FIRST_BLOCK) of the plan's steps


@dataclass(frozen=True)
class Account:
    """One peer's plan for a run, and its budget for the data over all runs.

    Attributes:
        peer: global id.
        spends: the cost of its active steps, in order of steps, none overlapping.
        budget: ε, or None for no limit (everything is still recorded).
        delta: δ of the budget.
        adversary: the one that the budget is to hold against.
        at_once: how many steps are taken all or none, as those of a round are.
    """

    peer: int
    spends: tuple[Spend, ...]
    budget: float | None
    delta: float
    adversary: Adversary = EVERYBODY
    at_once: int = 1

    def releases(self, start: int, stop: int) -> tuple[Release, ...]:
        """Return the releases of steps [start, stop), equal mechanisms together."""
        parts = (spend.between(start, stop) for spend in self.spends)
        return canonical(part.release for part in parts if part is not None)

    def towards(self, adversary: Adversary) -> Account:
        """Return the account as an adversary sees it: each step at the noise that it cannot take off."""
        seen = tuple(replace(spend, release=spend.release.towards(adversary)) for spend in self.spends)
        return replace(self, spends=seen, adversary=adversary)


class Spending:
    """The cost of some peers' accounts beside the charges of all other runs over the same data.

    ε grows with every release. A plan that fits its budget beside the recorded charges is allowed as a whole; of
    another one the longest prefix that fits.

    Attributes:
        accounts: of the peers hosted here.
        start: the step from which this run continues.
        steps: the number of steps in its plan.
        limits: int64 [m], the first step that each account's peer may not take.
        others_cancelled: whether noise cancelled between peers in another run, so that its cost depends on who asks.
    """

    def __init__(
        self,
        others: Sequence[Entry],
        accounts: Sequence[Account],
        *,
        partition: str = "",
        charged: Mapping[int, int] | None = None,
        start: int = 0,
    ) -> None:
        """Compute the limits.

        Args:
            others: what the ledger has of other runs over the data.
            accounts: of the peers hosted here.
            partition: of this run, see `RunName`; what others of that partition cost is counted peer by peer.
            charged: the step up to which each peer was charged for this run, whatever the budget is now.
            start: the step from which this run continues; what came before is among the others.
        """
        self.start = start
        self.accounts = tuple(accounts)
        self.steps = max((account.spends[-1].to_step for account in accounts if account.spends), default=0)
        elsewhere = [entry for entry in others if not partition or entry.run.partition != partition]
        here = [(partition, entry) for entry in others if partition and entry.run.partition == partition]
        self.others_cancelled = any(release.against for release in releases_in(others))
        self._elsewhere = elsewhere
        self._paid = _paid_by_peer(here).get(partition, {})
        self._costs: dict[Adversary, list[Alternatives]] = {}
        self._seen: dict[tuple[int, Adversary], tuple[Release, ...]] = {}
        self._equal: dict[tuple[Release, ...], tuple[Release, ...]] = {}
        self._epsilons: dict[tuple[object, ...], float] = {}

        limit_of: dict[tuple[object, ...], int] = {}
        limits = []
        for account in accounts:
            covered = max(start, (charged or {}).get(account.peer, 0))
            # Peers that paid the same so far and plan the same have the same limit.
            key = (*self._key(account, account.adversary), account.budget, covered)
            if key not in limit_of:
                fits = partial(self._fits, account)
                all_fit = covered >= self.steps or fits(self.steps)
                limit = self.steps
                if not all_fit:
                    limit = last_that_fits(fits, covered, self.steps)
                    # A round of which a part fits is not begun, and so it is not paid for.
                    limit = max(covered, limit - limit % account.at_once)
                limit_of[key] = limit
            limits.append(limit_of[key])
        self.limits = np.array(limits, dtype=np.int64)

    def _fits(self, account: Account, stop: int) -> bool:
        return account.budget is None or self._epsilon(account, stop, account.adversary) <= account.budget

    def _key(self, account: Account, adversary: Adversary) -> tuple[object, ...]:
        """Return what ε of an account depends on, beside the step."""
        paid = self._paid_before(account.peer, adversary)
        return id(account.spends), id(paid), account.delta, adversary

    def _paid_before(self, peer: int, adversary: Adversary) -> tuple[Release, ...]:
        """Return the releases that a peer paid for in other runs of this partition; equal tuples are one object."""
        if (peer, adversary) not in self._seen:
            paid = towards(self._paid.get(peer, ()), adversary)
            self._seen[peer, adversary] = self._equal.setdefault(paid, paid)
        return self._seen[peer, adversary]

    def _epsilon(self, account: Account, stop: int, adversary: Adversary) -> float:
        """Return ε after `stop` steps of this run, over all runs."""
        key = (*self._key(account, adversary), stop)
        if key not in self._epsilons:
            planned = towards(account.releases(self.start, stop), adversary)
            own = canonical([*self._paid_before(account.peer, adversary), *planned])
            if adversary not in self._costs:
                self._costs[adversary] = costs_in(self._elsewhere, adversary)
            runs = [*self._costs[adversary], (own,)] if own else self._costs[adversary]
            self._epsilons[key] = epsilon_of_runs(runs, account.delta)
        return self._epsilons[key]

    def epsilons(self, steps: int, adversary: Adversary | None = None) -> np.ndarray:
        """Return the ε of each peer after `steps` steps of this run, over all runs in the ledger, [m].

        Args:
            adversary: who looks; by default the adversary of the peer's budget.
        """
        values = []
        for account, limit in zip(self.accounts, self.limits.tolist(), strict=True):
            values.append(self._epsilon(account, min(steps, limit), adversary or account.adversary))
        return np.array(values)


class CohortLedger(Ledger):
    """The ledger of the peers that one process hosts, for one run whose plan is known; a context manager.

    A step costs a comparison, and a write only where a new block of steps begins.

    Attributes:
        spending: the cost of the run beside the others in the ledger.
        charged: the step before which all steps are charged, or were taken before this run began.
    """

    def __init__(
        self,
        directory: Path | str,
        source: str,
        run: RunName,
        accounts: Sequence[Account],
        *,
        block: int | None = None,
        fresh: bool = False,
        start: int = 0,
    ) -> None:
        """Open the ledger of a data source for some peers' accounts.

        Args:
            block: steps that an entry covers (1: none ahead), or None to let it grow until writing costs under 1 % of
                the wall time (for simulations, where a crashed run can be resumed exactly).
            fresh: whether the run draws fresh noise, so that every step it takes is charged.
            start: the first step that it may take; those before it were charged under other ids.

        Raises:
            BudgetError: the ledger is in use, fails verification, or has this run with another plan.
        """
        super().__init__(directory, source)
        try:
            self._check_same_plan(run, {account.peer: account.spends for account in accounts})
            self.spending = _spending(self.entries, run, accounts, start)
        except BaseException:
            self.close()
            raise
        self._run = run
        self._block = block
        self._fresh = fresh
        self.charged = max(charged_until(self.entries, run.id), start)
        self._steps = self.spending.steps
        self._limits = self.spending.limits
        plans = {id(account.spends): account.spends for account in accounts}
        numbers = {key: number for number, key in enumerate(plans)}
        self._plan_of = np.array([numbers[id(account.spends)] for account in accounts], dtype=np.int64)
        self._planned = np.zeros((self._steps, len(plans)), dtype=bool)
        for number, plan in enumerate(plans.values()):
            for spend in plan:
                self._planned[spend.from_step : spend.to_step, number] = True
        self._allowed = (-1, np.zeros(len(accounts), dtype=bool))  # a step, and which peers may take it
        self._last_write: tuple[int, float, float] | None = None  # its step, its end, its duration in seconds
        self._reserved: tuple[int, Future[None]] | None = None  # a step that another thread charges
        self._reserving: ThreadPoolExecutor | None = None

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]: in their plan, and within their budget."""
        if self._allowed[0] != step:
            planned = self._planned[step][self._plan_of] if step < self._steps else np.zeros_like(self._allowed[1])
            self._allowed = step, planned & (step < self._limits)
        return self._allowed[1]

    def charge(self, step: int, rows: np.ndarray) -> None:
        """Ensure that a step of some peers is charged, on disk, before it is taken.

        Args:
            step: the step.
            rows: int64, the peers' positions among the accounts.

        Raises:
            BudgetError: a peer may not take the step, it is before the first one that this run may take, or the disk
                fails; then no step may be taken.
        """
        if not self.allowed(step)[rows].all():
            message = f"{self.path}: step {step} is not within the plan and the budget of every peer"
            raise BudgetError(message, code="ledger.not-allowed")
        if step < self.spending.start:
            message = f"{self.path}: step {step} is before {self.spending.start}, with which this run begins"
            raise BudgetError(f"{message}; what came before was charged to others", code="ledger.before-start")
        if step < self.charged:
            return
        if self._reserved is not None:
            (reserved, done), self._reserved = self._reserved, None
            done.result()
            if reserved == step:
                self.charged = step + 1
                return
        if self._fresh:
            self.charged = step  # earlier steps belong to another run
        started = time.perf_counter()
        length = self._block
        if length is None:
            length = max(1, self._steps // FIRST_BLOCK)
            if self._last_write is not None:
                written, ended, duration = self._last_write
                seconds_per_step = max((started - ended) / max(1, step - written), 1e-9)
                length = max(length, math.ceil(min(duration / WRITE_FRACTION / seconds_per_step, self._steps)))
        stop = min(step + length, self._steps)
        self.append(self._run, self.charged, stop, self._charges(self.charged, stop))
        self.charged, ended = stop, time.perf_counter()
        self._last_write = (step, ended, ended - started)

    def reserve(self) -> None:
        """Charge the step after the last one that was charged in another thread; `charge` waits for the disk.

        A step that is then not taken stays charged: one at most for each process. So nothing is reserved before the
        process has charged a first step, nor where entries cover several steps or a step may not be taken.
        """
        step = self.charged
        if self._block != 1 or not self._last_write or self._reserved is not None or not self.allowed(step).all():
            return
        if self._reserving is None:
            self._reserving = ThreadPoolExecutor(1, RESERVING)
        charges = tuple(self._charges(step, step + 1))
        self._reserved = step, self._reserving.submit(self.append, self._run, step, step + 1, charges)

    def close(self, *, unlock: bool = True) -> None:
        """See Ledger; what is being reserved is written first."""
        reserving = getattr(self, "_reserving", None)
        if reserving is not None and unlock and not current_thread().name.startswith(RESERVING):
            reserving.shutdown()
        super().close(unlock=unlock)

    def _charges(self, start: int, stop: int) -> Iterable[Charge]:
        """Yield the charge to each group of equal peers for the steps [start, stop).

        An epoch under way is charged already, but not to a run that begins in it with an order of its own.
        """
        begins = self._fresh and self._last_write is None
        groups: dict[tuple[int, int], list[Account]] = {}
        for account, limit in zip(self.spending.accounts, self._limits.tolist(), strict=True):
            groups.setdefault((id(account.spends), min(stop, limit)), []).append(account)
        for (_, end), accounts in groups.items():
            due = (spend.between(start, end) for spend in accounts[0].spends)
            parts = [part for part in due if part and (begins or part.from_step >= start)]
            if parts:
                yield Charge.of([account.peer for account in accounts], parts)

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        """Charge the lines that a ledger lacks, each as a step of the plan, and return how many there are.

        Where steps of the plan differ, the whole plan is charged for them: an upper bound.

        Args:
            witnessed: see `lacks`.
        """
        missing = self.lacks(witnessed)
        plan = self._steps
        if missing:
            run = replace(self._run, id=f"{self._run.id}-witnessed-{self.n_entries}")
            charges = []
            for account in self.spending.accounts:
                releases = {spend.release.mechanism: spend.release for spend in account.spends}
                if len(releases) == 1 and not any(spend.whole for spend in account.spends):
                    parts = [((0, missing), release.times(missing)) for release in releases.values()]
                else:
                    times = math.ceil(missing / plan)
                    parts = [
                        ((spend.from_step, spend.to_step), spend.release.times(times * spend.release.steps))
                        for spend in account.spends
                    ]
                charges.append(Charge((account.peer,), tuple(((steps,), release) for steps, release in parts)))
            self.append(run, 0, missing, charges, witnessed=witnessed)
        return missing

    def _check_same_plan(self, run: RunName, plans: Mapping[int, Sequence[Spend]]) -> None:
        """Raise BudgetError where charged steps of the run use another mechanism in this plan."""
        starts = {peer: [spend.from_step for spend in plan] for peer, plan in plans.items()}

        def same(peer: int, a: int, b: int, release: Release) -> bool:
            plan = plans[peer]
            at = bisect_right(starts[peer], a) - 1
            while at >= 0 and a < b:  # equal epochs, one after the other, may be one interval
                follows = at < len(plan) and plan[at].from_step <= a < plan[at].to_step
                if not follows or plan[at].release.mechanism != release.mechanism:
                    return False
                a = plan[at].to_step
                at = at + 1
            return at >= 0

        for entry in self.entries:
            for charge in entry.charges if entry.run.id == run.id else ():
                steps = [(a, b, release) for intervals, release in charge.parts for a, b in intervals]
                if not all(same(peer, *part) for peer in charge.peers if peer in plans for part in steps):
                    raise BudgetError(
                        f"{self.path}: steps {entry.from_step} to {entry.to_step} of this run were charged with "
                        "another mechanism than its plan has; continue with the scenario of those charges",
                        code="ledger.other-plan",
                    )


def _spending(entries: Sequence[Entry], run: RunName, accounts: Sequence[Account], start: int) -> Spending:
    """Return the cost of a run beside the others in a ledger."""
    others = [entry for entry in entries if entry.run.id != run.id]
    charged = charged_by_peer(entries, run.id)
    return Spending(others, accounts, partition=run.partition, charged=charged, start=start)


def spending_of(
    directory: Path | str, source: str, run: RunName, accounts: Sequence[Account], start: int = 0
) -> Spending:
    """Return the cost of a run beside a ledger's other runs, without locking or changing it.

    Raises:
        BudgetError: the ledger cannot be read or fails verification.
    """
    return _spending(read_entries(directory, source), run, accounts, start)
