"""One publication of what several runs of a study published: `python -m tools.docs.union STUDY OUT FOLDER...`.

Rows have the values of the last folder whose table has them; figures and verdicts are made from all. The page has each
folder's line on what made it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flower_privdec.studies.cells import expand
from flower_privdec.studies.publish import MADE_BY, README, publish
from flower_privdec.studies.spec import Part, kinds_of, load_study
from tools.docs.claims import place_of, published, rows_of


def union(name: str, out: Path, folders: Sequence[Path]) -> Counter[str]:
    """Publish what several folders have of a study, at its first size.

    Returns:
        How many rows two folders have, by `equal` and `replaced`.
    """
    study, base = load_study(name)
    size = study.size(None)
    results = []
    shared = Counter[str]()
    cells = expand(study, base, size, study.parts)
    for part in study.parts:
        own = tuple(cell for cell in cells if cell.part == part.name)
        kinds = kinds_of(cell.scenario for cell in own)
        results.append(replace(published(folders, part, size or "", kinds), cells=own))
        shared += _shared(folders, part)

    made = [line for folder in folders for line in _made_by(folder)]
    publish(study, size, "-", results, [], out)
    text = re.sub(r"(?m)^Made by `-` .*$", lambda _: "\n\n".join(made), (out / README).read_text(encoding="utf-8"))
    (out / README).write_text(text, encoding="utf-8")
    return shared


def _made_by(folder: Path) -> list[str]:
    head = (folder / README).read_text(encoding="utf-8").partition("\n## ")[0]
    return [line for line in head.splitlines() if line.startswith(MADE_BY)]


def _shared(folders: Sequence[Path], part: Part) -> Counter[str]:
    """Compare the rows of a part that two folders have."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    shared = Counter[str]()
    for folder in folders:
        for row in rows_of(folder / f"table-{part.name}.csv"):
            place = place_of(row, [axis for axis in part.axes if axis not in part.best_over])
            if place in rows:
                shared["equal" if rows[place] == row else "replaced"] += 1
            rows[place] = row
    return shared


if __name__ == "__main__":
    name, out, *folders = sys.argv[1:]
    print(dict(union(name, Path(out), [Path(folder) for folder in folders])))
