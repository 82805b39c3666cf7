"""What a study leaves to be published: a table for each part, pictures, and one README with the verdicts."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from flower_privdec import __version__
from flower_privdec.study.claims import judge, value_text, wanted
from flower_privdec.study.figures import save_figure
from flower_privdec.study.results import Group, PartResult, metric
from flower_privdec.study.runner import Outcome
from flower_privdec.study.spec import Pivot, Study
from flower_privdec.words import duration, epsilon_text, setting

ONE_DATA_SET = (
    "All runs of this study, over cells and seeds, use the same data set. Each run's ε stands alone: it is what "
    "releasing that one run would cost. Releasing all of them would add up to far more. The choice between "
    "settings is made on the public test set."
)
WHOSE = {"paper": "The paper's claim", "us": "Beyond the paper"}
TWO_EPSILONS = (
    "ε (exact) is the accountant's, for what the run did: unit example, adjacency zero-out. Where a column "
    "ε (claimed) stands beside it, the noise was computed by the paper's formula; its ε is a claim, not a guarantee."
)


@dataclass(frozen=True)
class Made:
    """How a study was run: what its README says of it.

    Attributes:
        size: laptop or paper.
        command: what makes it again.
    """

    size: str
    command: str


def publish(study: Study, made: Made, results: Sequence[PartResult], failed: Sequence[Outcome], out: Path) -> None:
    """Write table-PART.csv, the pictures and README.md to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        (out / f"table-{result.part.name}.csv").write_text(_csv(result), encoding="utf-8")
    sections = [_section(result, out) for result in results]
    text = "\n\n".join([*_head(study, made, results, failed), *sections]) + "\n"
    (out / "README.md").write_text(text, encoding="utf-8")


def _head(study: Study, made: Made, results: Sequence[PartResult], failed: Sequence[Outcome]) -> list[str]:
    cells = [cell for result in results for cell in result.cells]
    runs = len({cell.key for cell in cells})
    seconds = sum(result.seconds for result in results)
    lines = [
        f"# {study.title} ({made.size} size)",
        study.paper,
        f"Made by `{made.command}` with flower-privdec {__version__}: {runs} runs, {duration(seconds)} of CPU time "
        f"in all, one thread each, on a machine with {os.cpu_count()} cores ({platform.machine()}).",
        *study.notes,
        ONE_DATA_SET,
        TWO_EPSILONS,
        "Values are mean ± standard deviation over the seeds.",
    ]
    if failed:
        listed = "\n".join(f"- {outcome.cell.title}: {outcome.error}" for outcome in failed)
        lines.append(f"**{len(failed)} runs failed:**\n\n{listed}")
    return lines


def _section(result: PartResult, out: Path) -> str:
    part = result.part
    blocks = [f"## {part.title}", f"{WHOSE[part.asks]}: {part.claim}", *part.notes]
    if result.chosen:
        names = " and ".join(axis.title or name for name, axis in result.chosen.items())
        better = metric(part.metrics[0]).title
        blocks.append(f"In every cell the {names} with the best {better} is chosen, as the paper does.")
    for check in part.checks:
        verdict = judge(check, result)
        cases = "\n".join(
            f"- {_mark(case.holds)} {case.where}{': ' if case.where else ''}{case.numbers}" for case in verdict.cases
        )
        blocks += [f"Looked for: {wanted(check, result)}. **{verdict.sentence}**", cases]
    for i, figure in enumerate(part.figures):
        path = out / f"{part.name}-{i + 1}.svg"
        if save_figure(figure, result, path):
            blocks.append(f"![{figure.title}]({path.name})")
    if part.pivot:
        blocks.append(f"{metric(part.pivot.metric).title.capitalize()}:\n\n{_markdown(*_pivot(part.pivot, result))}")
    table = _markdown(_columns(result), [_row(result, group) for group in result.groups])
    blocks.append(f"<details><summary>All cells</summary>\n\n{table}\n\n</details>" if part.pivot else table)
    return "\n\n".join(blocks)


def _mark(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "not decided"}[holds] + ","


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _pivot(pivot: Pivot, result: PartResult) -> tuple[list[str], list[list[str]]]:
    """Return one metric as a table of two axes; a third axis makes more rows."""
    across = result.axes[pivot.columns]
    others = [name for name in result.axes if name != pivot.columns and name != pivot.rows]
    head = [result.axes[name].title or name for name in [*others, pivot.rows]]
    head += [f"{across.title or pivot.columns} {label}" for label in across.labels()]
    rows = []
    for outer in result.places({}, [pivot.columns, pivot.rows]):
        for label in result.axes[pivot.rows].labels():
            place = outer | {pivot.rows: label}
            groups = [result.at(place | {pivot.columns: column}) for column in across.labels()]
            values = [value_text(pivot.metric, group.final(pivot.metric), spread=True) for group in groups]
            rows.append([place[name] for name in [*others, pivot.rows]] + values)
    return head, rows


def _claims_epsilon(result: PartResult) -> bool:
    return any(group.largest("claimed_epsilon") is not None for group in result.groups)


def _columns(result: PartResult) -> list[str]:
    part = result.part
    names = [axis.title or name for name, axis in [*result.axes.items(), *result.chosen.items()]]
    names += [path.rpartition(".")[2].replace("_", " ") for path in part.fields]
    names += [metric(name).title for name in part.metrics]
    return names + (["ε (claimed)"] if _claims_epsilon(result) else []) + ["ε (exact)", "δ", "seeds"]


def _row(result: PartResult, group: Group) -> list[str]:
    part = result.part
    cells = [*group.labels, *group.chosen, *(group.field(path) for path in part.fields)]
    cells += [value_text(name, group.final(name), spread=True) for name in part.metrics]
    if _claims_epsilon(result):
        cells.append(setting(group.largest("claimed_epsilon")))
    seeds = str(len(group.runs)) + ("" if group.complete else f" ({group.missing} missing)")
    return [*cells, epsilon_text(group.largest("epsilon")), setting(group.largest("delta")), seeds]


def _csv(result: PartResult) -> str:
    part, file = result.part, StringIO()
    writer = csv.writer(file, lineterminator="\n")
    measured = [f"{name}_{what}" for name in part.metrics for what in ("mean", "std", "by_seed")]
    writer.writerow(
        [*result.axes, *result.chosen, *part.fields, *measured, "claimed_epsilon", "epsilon", "delta", "seeds"]
    )
    for group in result.groups:
        values: list[str] = []
        for name in part.metrics:
            estimate = group.final(name)
            values += [_plain(estimate.mean), _plain(estimate.std)] if estimate else ["", ""]
            values.append(" ".join(map(_plain, group.finals(name))))
        privacy = [_plain(group.largest(key)) for key in ("claimed_epsilon", "epsilon", "delta")]
        fields = [group.field(path) for path in part.fields]
        writer.writerow([*group.labels, *group.chosen, *fields, *values, *privacy, len(group.runs)])
    return file.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
