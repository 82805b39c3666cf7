"""What is known to be refused together, so that an array need not find it out again: `refused.txt`.

A line is `CODE: FACTOR = LEVEL / LEVEL; FACTOR = LEVEL`, and stands for all that it can be read as. What is missing
costs an array a few builds each time; `python -m tools.battery --learn` writes the file again. A line that is not true
any more would hide rows, so each sweep tries one part of each line, drawn by its seed, and names those that are stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tools.battery.covering import Part
from tools.battery.levels import LEVELS, NAMES

PATH = Path(__file__).with_name("refused.txt")


@dataclass(frozen=True)
class Line:
    """What one line of the file says.

    Attributes:
        code: of the refusals.
        parts: the levels that are refused together; levels that are no more are left out.
    """

    code: str
    parts: list[Part]


def read(path: Path = PATH) -> list[Line]:
    """Return the lines of a file of what is refused; none if it is missing."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        code, _, text = line.partition(": ")
        lines.append(Line(code, list(_parts(text))))
    return [line for line in lines if line.parts]


def known(lines: Iterable[Line] | None = None) -> dict[Part, str]:
    """Return what is known to be refused, with the code of its refusal.

    Args:
        lines: those of the file, if not given.
    """
    return {part: line.code for line in (read() if lines is None else lines) for part in line.parts}


def _parts(text: str) -> Iterator[Part]:
    choices = []
    for item in text.split("; "):
        name, _, levels = item.partition(" = ")
        if name not in NAMES:
            return
        numbers = [LEVELS[name].index(level) for level in levels.split(" / ") if level in LEVELS[name]]
        choices.append([(NAMES.index(name), number) for number in numbers])
    for chosen in product(*choices):
        yield frozenset(chosen)


def write(reasons: Mapping[Part, str], path: Path = PATH) -> None:
    """Write what is refused, parts that differ in one factor in one line."""
    groups: dict[tuple[str, tuple[int, ...]], list[Part]] = defaultdict(list)
    for part, code in reasons.items():
        if not any(other < part for other in reasons):
            groups[code, tuple(sorted(factor for factor, _ in part))].append(part)
    lines = []
    for (code, factors), some in groups.items():
        merged = min((_merged(some, factor) for factor in factors), key=len)
        lines += [f"{code}: {text}" for text in merged]
    path.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


def _merged(parts: Iterable[Part], varying: int) -> list[str]:
    """Return a text for all parts that differ in one factor only."""
    levels: dict[Part, list[int]] = defaultdict(list)
    for part in parts:
        rest = frozenset(item for item in part if item[0] != varying)
        levels[rest] += [level for factor, level in part if factor == varying]
    texts = []
    for rest, varied in levels.items():
        items = {factor: LEVELS[NAMES[factor]][level] for factor, level in rest}
        items[varying] = " / ".join(LEVELS[NAMES[varying]][level] for level in sorted(varied))
        texts.append("; ".join(f"{NAMES[factor]} = {text}" for factor, text in sorted(items.items())))
    return texts
