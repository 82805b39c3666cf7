"""The papers' claims and what the committed tables make of them: `python -m tools.docs.claims` writes both.

Verdicts are judged from `results/*/table-*.csv` by the checks of the studies, as a study judges its runs: the page
`docs/claims.md` is written, and each results' README again from the study and the tables, but for what made them.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from flower_privdec.common.catalogue import MetricKind
from flower_privdec.common.formatting import NOTHING
from flower_privdec.scenario import load_scenario
from flower_privdec.studies.publish import (
    AXIS,
    EACH_ALONE,
    HOW_JUDGED,
    MADE_BY,
    ONE_DATA_SET,
    figure_link,
    figure_name,
    head_of,
    markdown,
    section_of,
)
from flower_privdec.studies.results import Estimate, Finding, Group, MeanCurve, PartResult, criterion, judge
from flower_privdec.studies.spec import Check, Part, Slope, Speedup, Study, kinds_of, load_study

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
PUBLISHED = [  # study or its file, size
    ("feddeper", "laptop"),
    ("feddeper", "paper"),
    ("feddeper-cifar", "laptop"),
    ("dyn-d2p", "laptop"),
    ("dyn-d2p-cifar", "laptop"),
    ("privsgp-vr", "laptop"),
    ("privsgp-vr", "paper"),
    ("privsgp-vr-cifar", "laptop"),
    ("dp-dda", "laptop"),
    ("simulations/shapes/study.yaml", "laptop"),
    ("pdsl", "laptop"),
    ("pdsl-cifar", "laptop"),
    ("simulations/compared/study.yaml", "laptop"),
    ("simulations/compared/cifar-study.yaml", "laptop"),
    ("simulations/cancelling/study.yaml", "laptop"),
    ("simulations/cancelling/cifar-study.yaml", "laptop"),
    ("simulations/cancelling/alone.yaml", "laptop"),
    ("simulations/cancelling/leaving.yaml", "laptop"),
    ("simulations/cancelling/correlated-study.yaml", "laptop"),
    ("simulations/cancelling/correlated-pairs-study.yaml", "laptop"),
    ("simulations/traffic/study.yaml", "laptop"),
    ("simulations/traffic/digits-study.yaml", "laptop"),
]
MOST = 2  # cells of a check whose numbers stand on the page
UNJUDGED = "not judged here, for the curves are not published"
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Published(Group):
    """A group whose runs are a row of a published table.

    Attributes:
        cells: the row, by column.
        rounds: of its published curves, one row of a table a round; none if it has none.
    """

    cells: Mapping[str, str] | None = None
    rounds: tuple[Mapping[str, str], ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether the table has the row."""
        return self.cells is not None

    @property
    def n_runs(self) -> int:
        """Return how many runs the row is of."""
        return int((self.cells or {}).get("seeds", 0))

    def finals(self, name: str) -> list[float]:
        """Return each seed's value, where the table has them."""
        return [float(value) for value in (self.cells or {}).get(f"{name}_by_seed", "").split()]

    def budgets(self, key: str) -> list[float]:
        """Return the published budgets."""
        return [float(value) for value in (self.cells or {}).get(key, "").split()]

    def field(self, path: str) -> str:
        """Return a published key of the scenario."""
        return (self.cells or {}).get(path, NOTHING)

    def final(self, name: str) -> Estimate | None:
        """Return mean and spread as published; a seed whose value is not finite is in neither."""
        cells = self.cells or {}
        mean = cells.get(f"{name}_mean")
        std = cells.get(f"{name}_std")
        if not mean:
            return None
        diverged = sum(not math.isfinite(value) for value in self.finals(name))
        return Estimate(float(mean), float(std) if std else None, self.n_runs - diverged, diverged)

    def curves(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the published curves, or None; of some only their means are published."""
        curve = self.mean_curve(name)
        if curve is None or curve.by_seed is None:
            return None
        return curve.rounds, curve.by_seed

    def mean_curve(self, name: str) -> MeanCurve | None:
        """Return the mean and the spread of the published curves, or None."""
        rows = [row for row in self.rounds if row.get(f"{name}_mean")]
        if not rows:
            return None

        rounds = np.asarray([int(row["round"]) for row in rows])
        mean = np.asarray([float(row[f"{name}_mean"]) for row in rows])
        std = None
        if all(row[f"{name}_std"] for row in rows):
            std = np.asarray([float(row[f"{name}_std"]) for row in rows])
        by_seed = None
        if all(row[f"{name}_by_seed"] for row in rows):
            values = [[float(value) for value in row[f"{name}_by_seed"].split()] for row in rows]
            by_seed = np.asarray(values).T
        return MeanCurve(rounds, mean, std, by_seed)

    def gradients_per_round(self) -> float:
        """Return how many gradients all peers compute in a round, as published with the curves."""
        last = self.rounds[-1]
        return float(last["gradients"]) / int(last["round"])


def rows_of(path: Path) -> Rows:
    """Return the rows of a table without those of no run; none if there is no table."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
    else:
        lines = []
    return [row for row in csv.DictReader(lines) if row.get("seeds") != "0"]


def place_of(row: Mapping[str, str], axes: Iterable[str]) -> tuple[str, ...]:
    """Return a row's labels on some axes."""
    return tuple(row[f"{AXIS}{name}"] for name in axes)


def published(folders: Sequence[Path], part: Part, size: str, kinds: Mapping[str, MetricKind]) -> PartResult:
    """Return a part with the rows of its published tables in the place of runs; the last of the folders counts."""
    axes = part.axes_at(size)
    varied = {name: axis for name, axis in axes.items() if name not in part.best_over}
    best = {name: axis for name, axis in axes.items() if name in part.best_over}

    def by_place(kind: str) -> dict[tuple[str, ...], Rows]:
        places: dict[tuple[str, ...], Rows] = {}
        for folder in folders:
            rows = rows_of(folder / f"{kind}-{part.name}.csv")
            places |= {place: [] for place in {place_of(row, varied) for row in rows}}
            for row in rows:
                places[place_of(row, varied)].append(row)
        return places

    table = by_place("table")
    curves = by_place("curves")
    empty = PartResult(part, varied, best, (), (), 0.0)
    groups = []
    for place in empty.places({}, []):
        labels = tuple(place[name] for name in varied)
        row = table.get(labels, [None])[0]
        chosen = place_of(row, best) if row else ("",) * len(best)
        groups.append(Published(labels, (), int(row is None), kinds, chosen, row, tuple(curves.get(labels, ()))))
    return PartResult(part, varied, best, tuple(groups), (), 0.0)


def results() -> Iterator[tuple[Study, str, Path, list[PartResult]]]:
    """Yield each published study with its size, its folder, and its parts that claim something."""
    for name, size in PUBLISHED:
        study, base = load_study(str(ROOT / name) if "/" in name else name)
        folder = ROOT / "results" / f"{study.name}-{size}"
        kinds = kinds_of([load_scenario(base)])
        parts = [part for part in study.parts if (folder / f"table-{part.name}.csv").is_file()]
        yield study, size, folder, [published([folder], part, size, kinds) for part in parts]


PAPERS = {
    "feddeper": "FedDeper",
    "feddeper-cifar": "FedDeper on CIFAR-10",
    "dyn-d2p": "Dyn-D2P",
    "dyn-d2p-cifar": "Dyn-D2P on CIFAR-10",
    "privsgp-vr": "PrivSGP-VR",
    "privsgp-vr-cifar": "PrivSGP-VR on CIFAR-10",
    "dp-dda": "DP-DDA",
    "dp-dda-shapes": "DP-DDA on drawn data",
    "pdsl": "PDSL",
    "pdsl-cifar": "PDSL on CIFAR-10",
}
HEAD = """# Claimed and measured

What five papers claim, and what the published tables make of it.

## All claims on one screen

A row counts criteria: a claim that is judged by two of them counts twice. *Shown* means in every cell, *in part* in
some cells. Of those that are shown in no cell, *not* is contradicted, or not as large as claimed, in at least one; the
others are *undecided*. *Ours* are claims that no paper makes.

{overview}

Studies that claim nothing, only compare, are in [studies](studies.md).

## How it is judged

{rule}

CIFAR-10 is encoded as JPEG files here, a point or two below the original in accuracy. Some studies have two sizes, and
both stand here. `privdec study NAME --size SIZE --only PART` runs a part. Claims of ours are marked. `python -m
tools.docs.claims` makes this page from the tables.
"""


class Standing(StrEnum):
    """What became of a criterion over all its cells, from the best to the worst: the columns of the overview."""

    SHOWN = "shown"
    IN_PART = "in part"
    UNDECIDED = "undecided"
    NOT = "not"
    NOT_JUDGED = "not judged"

    @classmethod
    def of(cls, outcomes: Sequence[Finding]) -> Standing:
        """Return what the outcomes in the cells come to."""
        if all(outcome is Finding.SHOWN for outcome in outcomes):
            return cls.SHOWN
        if Finding.SHOWN in outcomes:
            return cls.IN_PART
        if Finding.CONTRADICTED in outcomes or Finding.NOT_SHOWN in outcomes:
            return cls.NOT
        return cls.UNDECIDED


def overview(published_studies: Iterable[tuple[Study, str, Path, list[PartResult]]]) -> str:
    """Return the table of all studies that claim something: how many of their criteria came to what."""
    rows: list[tuple[str, str, Counter[Standing], str]] = []
    totals: Counter[Standing] = Counter()
    for study, size, folder, parts in published_studies:
        for whose in ("paper", "us"):
            claiming = [result for result in parts if result.part.asks == whose and result.part.checks]
            if not claiming:
                continue

            counts = Counter(standing for result in claiming for standing in _standings(result))
            seeds = sorted({group.n_runs for result in claiming for group in result.groups if group.complete})

            name = f"[{PAPERS[study.name]}](#{_anchor(PAPERS[study.name])})"
            if whose == "us":
                name += ", ours"
            elif size == "laptop":
                totals += counts
            link = f"[{size}](../results/{folder.name}/README.md)"
            rows.append((name, link, counts, " and ".join(str(count) for count in seeds)))
    rows.append(("**the papers' claims in the laptop size**", "", totals, ""))

    # A column that is empty, as that of what is not judged, says nothing.
    shown = [standing for standing in Standing if any(standing in counts for _, _, counts, _ in rows)]
    lines = []
    for name, link, counts, seeds_text in rows:
        cells = [str(counts[standing] or "") for standing in shown]
        lines.append([name, link, str(counts.total()), *cells, seeds_text])
    return markdown(["study", "size, results", "criteria", *shown, "seeds"], lines)


def _standings(result: PartResult) -> list[Standing]:
    """Return what each criterion of a part came to."""
    judged = _judged(result)
    standings = []
    for check in result.part.checks:
        if check in judged:
            standings.append(Standing.of([case.outcome for case in judge(check, result).cases]))
        else:
            standings.append(Standing.NOT_JUDGED)
    return standings


def _anchor(heading: str) -> str:
    """Return the link target of a heading that has no punctuation but hyphens."""
    return heading.lower().replace(" ", "-")


def page() -> str:
    """Return the page of all claims."""
    all_results = list(results())
    blocks = [HEAD.format(rule=HOW_JUDGED, overview=overview(all_results))]
    sections: dict[str, list[list[str]]] = {}
    for study, size, folder, parts in all_results:
        for result in parts:
            link = f"[{result.part.name}, {size}](../results/{folder.name}/README.md)"
            claim = f"{'' if result.part.asks == 'paper' else 'Ours: '}{result.part.claim}"
            for check in result.part.checks:
                row = [claim, "–", UNJUDGED]
                if check in _judged(result):
                    row = [claim, _measured(check, result), f"**{judge(check, result).sentence}**"]
                sections.setdefault(study.name, []).append([*row, f"{link}: {criterion(check, result)}"])
                claim = "the same"

    for name, rows in sections.items():
        blocks.append(f"## {PAPERS[name]}\n\n{markdown(['claimed', 'measured', 'verdict', 'by which check'], rows)}\n")
    return "\n".join(blocks)


def _judged(result: PartResult) -> list[Check]:
    """Return the checks of a part, without those by curves where none are published."""

    def known(check: Check) -> bool:
        if not isinstance(check, Slope | Speedup):
            return True
        return any(group.curves(check.metric) is not None for group in result.groups)

    return [check for check in result.part.checks if known(check)]


def _measured(check: Check, result: PartResult) -> str:
    """Return the numbers of a check's first cells."""
    cases = judge(check, result).cases
    numbers = "; ".join(f"{case.where}{': ' if case.where else ''}{case.numbers}" for case in cases[:MOST])
    return numbers + (f"; and {len(cases) - MOST} more" if len(cases) > MOST else "")


def up_to_date(readme: str, study: Study, size: str, folder: Path, parts: list[PartResult]) -> str:
    """Return a results' README as the study and the tables have it; what made the results, and what failed, stays.

    Raises:
        ValueError: a part has a table, and no section of its heading.
    """
    head, *sections = re.split(r"(?m)^(?=## )", readme)

    def made_in(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(MADE_BY)]

    made = {section.partition("\n")[0]: made_in(section) for section in sections}
    links: dict[str, str] = {file: link for link, file in re.findall(r"(?m)^(!\[.*\]\((.*)\))$", readme)}

    def link(result: PartResult, i: int) -> str:
        """Return the link to a figure, with its own title where the study has another since."""
        file = figure_name(result.part, i)
        now = figure_link(result, i)
        title = now[2:].partition("](")[0]
        if f">{title}<" in html.unescape((folder / file).read_text(encoding="utf-8")):
            return now
        return links[file]

    scope = (f"{ONE_DATA_SET} {EACH_ALONE}" if ONE_DATA_SET in head else EACH_ALONE) if "ε stands alone" in head else ""
    blocks = head_of(study, size, made_in(head), scope, any(result.part.checks for result in parts))
    blocks += re.findall(r"(?m)^\*\*\d+ runs failed:\*\*\n\n(?:- .*\n)+", head)
    for result in parts:
        judged = dataclasses.replace(result, part=result.part.model_copy(update={"checks": _judged(result)}))
        figures = range(len(result.part.figures))
        if f"## {result.part.heading}" not in made:
            raise ValueError(f"{folder.name}: table-{result.part.name}.csv has no section '{result.part.heading}'")
        shown = [link(result, i) for i in figures if (folder / figure_name(result.part, i)).is_file()]
        blocks.append(section_of(judged, shown, "\n\n".join(made[f"## {result.part.heading}"])))
    return "\n\n".join(blocks) + "\n"


def written() -> dict[Path, str]:
    """Return every file that is made from the tables, with its text."""
    files = {PAGE: page()}
    for study, size, folder, parts in results():
        path = folder / "README.md"
        files[path] = up_to_date(path.read_text(encoding="utf-8"), study, size, folder, parts)
    return files


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
