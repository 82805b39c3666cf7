"""What a ledger records: the steps that a run took, and what they cost each of its peers.

A line of a ledger is one `Entry`. It holds a `Charge` for each group of peers that pay the same, and a charge holds the
releases (`events.Release`) of its steps.

Entries add up exactly (`merged`, `Totals`): a cost is a count of equal releases, so nothing is ever rounded. Any sum of
entries gives the same ε, the same charged steps and the same plan as the entries themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flower_privdec.privacy.mechanism.events import Mechanism, Release, Spend

MERGED = 64  # entries that are held in memory before those of one run are merged

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
    def of(cls, peers: Sequence[int], spends: Iterable[Spend]) -> Charge:
        """Return the charge to peers for some spends, in order of steps."""
        return cls.of_parts(peers, (([(spend.from_step, spend.to_step)], spend.release) for spend in spends))

    @classmethod
    def of_parts(cls, peers: Sequence[int], parts: Iterable[tuple[Iterable[Interval], Release]]) -> Charge:
        """Return the charge to peers for parts, in which those of one mechanism are put together."""
        steps_by: dict[Mechanism, list[Interval]] = {}
        releases_by: dict[Mechanism, list[Release]] = {}
        for intervals, release in parts:
            mechanism = release.mechanism
            steps_by.setdefault(mechanism, []).extend(intervals)
            releases_by.setdefault(mechanism, []).append(release)

        together = []
        for mechanism, releases in releases_by.items():
            n_steps = sum(release.steps for release in releases)
            together.append((tuple(steps_by[mechanism]), releases[-1].times(n_steps)))
        return cls(tuple(peers), tuple(together))

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return the releases charged to each of the peers."""
        return tuple(release for _, release in self.parts)

    def moved(self, by: int) -> Charge:
        """Return the same charge, for steps that come later by some number."""
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
        """Read the charge from a JSON object; raises as `Entry.from_json`."""
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
        boot: the process of a networked peer that wrote the line; 0 for other processes.
        witnessed: for a line that replaces lost ones, how many lines of each process are charged by then.
    """

    run: RunName
    from_step: int
    to_step: int
    charges: tuple[Charge, ...]
    boot: int = 0
    witnessed: Mapping[int, int] = field(default_factory=dict)

    def at(self, step: int) -> Entry:
        """Return the entry for as many steps, beginning with another one."""
        by = step - self.from_step
        charges = tuple(charge.moved(by) for charge in self.charges)
        return replace(self, from_step=step, to_step=self.to_step + by, charges=charges)

    def to_json(self) -> Body:
        """Return the entry as a JSON object, whose order of keys the hash of its line depends on."""
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
            # Twice as many: merging then costs a constant for each entry, even if every run is another one.
            self._merge_above = 2 * len(self.entries) + MERGED

    def to_json(self) -> Body:
        """Return the totals as a JSON object."""
        charged = [entry.to_json() for entry in merged(self.entries)]
        return {"lines": [list(pair) for pair in self.lines.items()], "charged": charged}

    @classmethod
    def from_json(cls, body: Body) -> Totals:
        """Read the totals from a JSON object; raises as `Entry.from_json`."""
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
        total = Charge.of_parts(peers, parts)
        united = tuple((_united(steps), release) for steps, release in total.parts)
        charges.append(Charge(peers, united))
    return tuple(charges)


def _united(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals [a, b), ascending and apart."""
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
