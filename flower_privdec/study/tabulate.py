"""Tables of a study: its cells with mean and spread, one metric by two axes, and all numbers as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO

from flower_privdec.common.formatting import NOTHING, epsilon_text, setting
from flower_privdec.study.claims import value_text
from flower_privdec.study.forms import Pivot
from flower_privdec.study.results import Group, PartResult

MOST_BUDGETS = 6  # in one cell of a table; of more the least and the greatest stand


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def pivot_table(pivot: Pivot, result: PartResult) -> tuple[list[str], list[list[str]]]:
    """Return one metric as a table of two axes; a third axis makes more rows."""
    across, measured = result.axes[pivot.columns], result.metric(pivot.metric)
    others = [name for name in result.axes if name != pivot.columns and name != pivot.rows]
    head = [result.axes[name].title or name for name in [*others, pivot.rows]]
    head += [f"{across.title or pivot.columns} {label}" for label in across.labels()]
    rows = []
    for outer in result.places({}, [pivot.columns, pivot.rows]):
        for label in result.axes[pivot.rows].labels():
            place = outer | {pivot.rows: label}
            groups = [result.at(place | {pivot.columns: column}) for column in across.labels()]
            values = [value_text(measured, group.final(pivot.metric), spread=True) for group in groups]
            rows.append([place[name] for name in [*others, pivot.rows]] + values)
    return head, rows


def _claims_epsilon(result: PartResult) -> bool:
    return any(group.budgets("claimed_epsilon") for group in result.groups)


def columns(result: PartResult) -> list[str]:
    """Return the headings of the table of all cells."""
    part = result.part
    names = [axis.title or name for name, axis in [*result.axes.items(), *result.chosen.items()]]
    names += [path.rpartition(".")[2].replace("_", " ") for path in part.fields]
    names += [result.metric(name).title for name in part.metrics]
    return names + (["ε (claimed)"] if _claims_epsilon(result) else []) + ["ε (exact)", "δ", "seeds"]


def row(result: PartResult, group: Group) -> list[str]:
    """Return what the table of all cells says of one place."""
    part = result.part
    cells = [*group.labels, *group.chosen, *(group.field(path) for path in part.fields)]
    cells += [value_text(result.metric(name), group.final(name), spread=True) for name in part.metrics]
    if _claims_epsilon(result):
        cells.append(budgets_text(group.budgets("claimed_epsilon"), setting))
    seeds = str(len(group.runs)) + ("" if group.complete else f" ({group.missing} missing)")
    exact = budgets_text(group.budgets("epsilon"), epsilon_text)
    return [*cells, exact, budgets_text(group.budgets("delta"), setting), seeds]


def budgets_text(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return every distinct budget, ascending: `1.00, 3.00`; of many the span: `0.21 to 3.00`.

    Args:
        values: ascending.
        text: puts one in words.
    """
    said = list(dict.fromkeys(map(text, values)))
    return f"{said[0]} to {said[-1]}" if len(said) > MOST_BUDGETS else ", ".join(said) or NOTHING


def to_csv(result: PartResult) -> str:
    """Return the numbers of all cells; where there are several, of seeds or budgets, a space between each two."""
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
        privacy = [
            " ".join(dict.fromkeys(map(_plain, group.budgets(key)))) for key in ("claimed_epsilon", "epsilon", "delta")
        ]
        fields = [group.field(path) for path in part.fields]
        writer.writerow([*group.labels, *group.chosen, *fields, *values, *privacy, len(group.runs)])
    return file.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
