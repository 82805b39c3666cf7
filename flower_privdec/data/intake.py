"""What was read of a place, and what was left: a line for its owner, before anything is trained.

    data.root=train.csv: 20 rows, 3 columns, 2 classes (no 10, yes 10); left 2 columns (id, zip)

Privacy: how many examples of each class there are, and what a reader doubts, is counted on private examples and covered
by no ε. `told` leaves both out on request, as the summary of a private run does. Nothing of it leaves a peer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_privdec.common.formatting import printable

MOST_LISTED = 8  # names in a list
LONGEST_NAME = 60  # characters
MOST_CLASSES = 20  # classes whose examples are told in a line
MOST_COUNTED = 2**16  # classes whose examples are counted: a wrong key may name any number


@dataclass(frozen=True)
class Intake:
    """What a reader took of one place.

    Attributes:
        where: the place, as errors call it.
        rows: how many examples it has.
        files: how many files they were in; 0 if none had to be opened.
        columns: how many columns of a table were read; None if it is no table.
        shape: the shape of one example's features; None if it is a table, or was not asked for.
        names: the names of the classes, if the scenario lists them.
        classes: how many examples of each class there are, by its number; empty if targets are none.
        left: what was not read, such as "2 columns (id, zip)".
        empty: the columns that hold no value.
        doubts: what the owner should look at.
    """

    where: str = ""
    rows: int = 0
    files: int = 0
    columns: int | None = None
    shape: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def of(self, where: str, labels: np.ndarray, n_classes: int | None) -> Intake:
        """Return what a reader said of a place with what follows from its targets.

        Args:
            labels: classes, int64 [N]; or numbers or labels, [N, k].
            n_classes: how many classes there are at least; None if targets are none.
        """
        classes: tuple[int, ...] = ()
        if n_classes is not None and n_classes <= MOST_COUNTED and labels.ndim == 1:
            classes = tuple(np.bincount(labels, minlength=n_classes).tolist())
        return replace(self, where=where, rows=len(labels), classes=classes)

    def shaped(self, shape: Sequence[int]) -> Intake:
        """Return it with the shape of the features of all rows, [N, ...]."""
        return replace(self, shape=tuple(shape[1:]))

    def empty_classes(self) -> list[str]:
        """Return the classes without an example, by name."""
        return [self.class_name(label) for label, count in enumerate(self.classes) if not count]

    def class_name(self, label: int) -> str:
        """Return the name of a class: its number if it has no other."""
        if label < len(self.names):
            return self.names[label]
        return str(label)


NOTHING = Intake()


def told(intakes: Sequence[Intake], where: str, n_classes: int, *, counts: bool) -> str:
    """Return the line about one place, or about the places of several peers that are alike.

    Args:
        intakes: of each.
        where: what to call them.
        n_classes: how many classes there are, if targets are classes.
        counts: whether the line may tell what was counted on private examples.
    """
    first = intakes[0]
    facts = []
    files = sum(one.files for one in intakes)
    if files > 1:
        facts.append(counted(files, "file"))
    facts.append(_rows(intakes))

    if first.columns is not None:
        fewest = min(one.columns or 0 for one in intakes)
        most = max(one.columns or 0 for one in intakes)
        columns = counted(most, "column")
        if fewest < most:
            columns = f"{fewest} to {most} columns"
        facts.append(columns)
    elif first.shape is not None and len(first.shape) == 1:
        facts.append(counted(first.shape[0], "feature"))
    elif first.shape:
        facts.append(" x ".join(map(str, first.shape)) + " each")
    if first.classes:
        facts.append(_classes(intakes, n_classes, counts=counts))

    line = f"{printable(where)}: {', '.join(facts)}"
    left = _merged(one.left for one in intakes)
    if left:
        line += f"; left {', '.join(left)}"

    # What looks wrong was found by looking at private examples.
    doubts = _doubts(intakes) if counts else []
    line += "".join(f"; {doubt}" for doubt in doubts[:MOST_LISTED])
    if len(doubts) > MOST_LISTED:
        line += f"; and {len(doubts) - MOST_LISTED} more"
    return line


def _doubts(intakes: Sequence[Intake]) -> list[str]:
    """Return what looks wrong about each place, with its name if there are several."""
    doubts = list[str]()
    for one in intakes:
        found = list(one.doubts)
        if one.empty:
            found.append(f"no value in {listed(one.empty)}")

        place = ""
        if len(intakes) > 1:
            place = f"{printable(one.where)}: "
        doubts += [place + doubt for doubt in found]
    return doubts


def listed(names: Iterable[str], most: int = MOST_LISTED) -> str:
    """Return some names in a line, a few of many, each without control characters and cut if it is long."""
    shown: list[str] = []
    for name in names:
        if len(shown) == most:
            shown.append("...")
            break
        plain = printable(name)
        if len(plain) > LONGEST_NAME:
            plain = f"{plain[:LONGEST_NAME]}..."
        shown.append(plain or "(no name)")
    return ", ".join(shown)


def quoted(text: str) -> str:
    """Return a text as YAML reads it, on one line."""
    if text.isprintable() and "'" not in text:
        return f"'{text}'"
    return json.dumps(text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun."""
    plural = {"class": "classes"}.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else plural}"


def _rows(intakes: Sequence[Intake]) -> str:
    sizes = [one.rows for one in intakes]
    text = counted(sum(sizes), "row")
    if len(sizes) > 1 and min(sizes) < max(sizes):
        text += f" ({min(sizes):,} to {max(sizes):,} at a peer)"
    elif len(sizes) > 1:
        text += f" ({sizes[0]:,} at each peer)"
    return text


def _classes(intakes: Sequence[Intake], n_classes: int, *, counts: bool) -> str:
    text = counted(n_classes, "class")
    if not counts or n_classes > MOST_CLASSES:
        return text
    totals = np.zeros(n_classes, dtype=np.int64)
    for one in intakes:
        totals[: len(one.classes)] += one.classes
    shares = ", ".join(f"{intakes[0].class_name(label)} {count:,}" for label, count in enumerate(totals.tolist()))
    return f"{text} ({shares})"


def _merged(parts: Iterable[tuple[str, ...]]) -> list[str]:
    """Return what was left at several places, each once, with how many places have it."""
    places = Counter(text for part in parts for text in part)
    lines = []
    for text, count in list(places.items())[:MOST_LISTED]:
        lines.append(text if count == 1 else f"{text} at {count} peers")
    if len(places) > MOST_LISTED:
        lines.append("and more")
    return lines
