"""Run some rows of published tables again: `python -m tools.docs.repeat FOLDER [--rows 5] [--draw 1]`.

Of a results folder it draws rows and a seed of each, runs them by the command that the page names, and compares every
number with the table's. A study that sets `compute.generator: portable` should repeat them on any machine of a kind.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flower_privdec.reporting.run_folder import read_result
from flower_privdec.studies.cells import Cell, Choices, expand, folder_of, run_cells
from flower_privdec.studies.publish import MADE_BY, README
from flower_privdec.studies.results import Group, csv_number
from flower_privdec.studies.spec import Part, kinds_of, load_study
from tools.docs.claims import place_of, rows_of


class Repeated(NamedTuple):
    """A number of a published table, and what the run gives now.

    Attributes:
        title: the run's.
        name: of the metric.
    """

    title: str
    name: str
    published: str
    now: str


def command_of(page: str, part: Part) -> tuple[str, str | None, list[str]]:
    """Return the study, the size and the settings of the command that made a part, as its page says.

    Raises:
        ValueError: the page does not say.
    """
    section = page.partition(f"\n## {part.heading}\n")[2].partition("\n## ")[0]
    made = re.search(rf"(?m)^{MADE_BY}(.*?)`", section) or re.search(rf"(?m)^{MADE_BY}(.*?)`", page)
    if made is None:
        raise ValueError(f"the page has no line '{MADE_BY}...`' for {part.heading}")
    name, *words = shlex.split(made[1])
    options = list(zip(words[::2], words[1::2], strict=True))
    return name, dict(options).get("--size"), [value for key, value in options if key == "--set"]


def published_choices(folder: Path, part: Part) -> Choices:
    """Return what was chosen in the part that another is chosen in, as its table says."""
    free = [name for name in part.axes if name not in part.best_over]
    best = part.best_over
    rows = rows_of(folder / f"table-{part.name}.csv")
    return {part.name: {place_of(row, free): place_of(row, best) for row in rows}}


def drawn_cells(folder: Path, name: str, count: int, draw: int) -> list[tuple[Cell, Part, dict[str, str], int]]:
    """Return some cells of a study's published tables, each with its part, its row and the place of its seed."""
    study, base = load_study(name)
    page = (folder / README).read_text(encoding="utf-8")
    drawn = []
    parts = [part for part in study.parts if (folder / f"table-{part.name}.csv").is_file()]
    for part in parts:
        source = next((other for other in study.parts if other.name == part.chosen_in), None)
        choices = published_choices(folder, source) if source else None
        _, size, settings = command_of(page, part)
        cells = [cell for cell in expand(study, base, size, [part], settings, choices) if not cell.waits]
        for row in rows_of(folder / f"table-{part.name}.csv"):
            mine = [cell for cell in cells if cell.labels == place_of(row, part.axes)]
            drawn += [(cell, part, row, place) for place, cell in enumerate(mine)]
    return random.Random(draw).sample(drawn, min(count, len(drawn)))


def repeat(folder: Path, name: str, count: int, draw: int) -> Iterator[Repeated]:
    """Run drawn cells of a results folder, and yield each of their numbers beside the published one."""
    with tempfile.TemporaryDirectory() as cache:
        for cell, part, row, place in drawn_cells(folder, name, count, draw):
            failed = run_cells([cell], Path(cache), 1, lambda _: None)
            kinds = kinds_of([cell.scenario])
            runs = () if failed else (read_result(folder_of(Path(cache), cell.key)),)
            group = Group(cell.labels, runs, len(failed), kinds)
            for metric in part.metrics:
                published = row.get(f"{metric}_by_seed", "").split()
                now = [csv_number(value) for value in group.finals(metric)]
                if published or now:
                    yield Repeated(cell.title, metric, " ".join(published[place : place + 1]), " ".join(now))


def main(words: list[str]) -> int:
    """Print every number and return 1 where one differs."""
    parser = argparse.ArgumentParser(description="Run some rows of published tables again.")
    parser.add_argument("folder", type=Path, help="a folder of results")
    parser.add_argument("--study", help="the study's file, by default what the page's command names")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--draw", type=int, default=1, help="another number draws other rows")
    given = parser.parse_args(words)
    page = (given.folder / README).read_text(encoding="utf-8")
    made = re.search(rf"(?m)^{MADE_BY}(\S+)", page)
    name = given.study or (made[1].rstrip("`") if made else "")
    differing = total = 0
    for number in repeat(given.folder, name, given.rows, given.draw):
        total = total + 1
        differing = differing + (number.published != number.now)
        sign = "=" if number.published == number.now else "IS NOT"
        print(f"{number.title}: {number.name} {number.published} {sign} {number.now}", flush=True)

    print(f"{total - differing} of {total} numbers are those of the table")
    return int(differing > 0 or total == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
