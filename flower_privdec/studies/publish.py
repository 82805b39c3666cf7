"""Write a study's results: CSV tables, pictures, and a README with tables and verdicts."""

from __future__ import annotations

import csv
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from flower_privdec import __version__
from flower_privdec.common.errors import RunError, ScenarioError, option
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import NOTHING, duration, epsilon_text, setting, shown
from flower_privdec.studies.cells import Outcome
from flower_privdec.studies.results import Group, PartResult, criterion, csv_number, judge, value_text
from flower_privdec.studies.spec import Check, Part, Pivot, Slope, Speedup, Study
from flower_privdec.studies.study_pictures import Looks, looks_of, save_figure, title_of

AXIS = "axis."  # before an axis' name in a CSV file, where other columns may have that name
MOST_BUDGETS = 6  # in one cell of a table; if there are more, the least and the greatest


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def pivot_table(pivot: Pivot, result: PartResult) -> tuple[list[str], list[list[str]]]:
    """Return one metric as a table of two axes; a third axis makes more rows."""
    across = result.axes[pivot.columns]
    down = [name for name in result.axes if name not in (pivot.columns, pivot.rows)]
    down.append(pivot.rows)
    head = [result.title(name) for name in down]
    head += [f"{result.title(pivot.columns)} {label}" for label in across.labels()]

    rows = []
    for outer in result.places({}, [pivot.columns, pivot.rows]):
        for label in result.axes[pivot.rows].labels():
            place = outer | {pivot.rows: label}
            groups = [result.at(place | {pivot.columns: column}) for column in across.labels()]
            values = [_value(group, pivot.metric) for group in groups]
            rows.append([place[name] for name in down] + values)
    return head, rows


def columns(result: PartResult) -> list[str]:
    """Return the headings of the table of all cells."""
    names = [result.title(name) for name in (*result.axes, *result.chosen)]
    names += [path.rpartition(".")[2].replace("_", " ") for path in result.part.fields]
    names += [result.metric(name).title for name in result.part.metrics]
    if result.claims_epsilon:
        names.append("ε (claimed)")
    return [*names, "ε (exact)", "δ", "seeds"]


def row(result: PartResult, group: Group) -> list[str]:
    """Return a group's row in the table of all cells."""
    part = result.part
    cells = [*group.labels, *group.chosen, *(group.field(path) for path in part.fields)]
    cells += [_value(group, name) for name in part.metrics]
    if result.claims_epsilon:
        cells.append(budgets_text(group.budgets("claimed_epsilon"), setting))
    cells.append(budgets_text(group.budgets("epsilon"), epsilon_text))
    cells.append(budgets_text(group.budgets("delta"), setting))

    seeds = str(group.n_runs)
    if not group.complete:
        seeds = f"{seeds} ({group.missing} missing)"
    return [*cells, seeds]


def _value(group: Group, name: str) -> str:
    """Return a metric's mean and spread as text, or what there is in place of a number."""
    if group.missing and not group.n_runs:
        return "not run"
    if group.final(name) is None and group.finals(name):
        return "no number"
    return value_text(group.metric(name), group.final(name), spread=True)


def budgets_text(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return the distinct ones of ascending budgets, `1.00, 3.00`; if there are many, their range: `0.21 to 3.00`."""
    texts = list(dict.fromkeys(map(text, values)))
    if len(texts) > MOST_BUDGETS:
        return f"{texts[0]} to {texts[-1]}"
    return ", ".join(texts) or NOTHING


def to_csv(result: PartResult) -> str:
    """Return the numbers of all cells. Several in one field, of seeds or budgets, are separated by spaces."""

    def texts(values: Iterable[float | None]) -> list[str]:
        return ["" if value is None else csv_number(value) for value in values]

    part = result.part
    axes = [f"{AXIS}{name}" for name in (*result.axes, *result.chosen)]
    measured = [f"{name}_{what}" for name in part.metrics for what in ("mean", "std", "by_seed")]
    budgets = ("claimed_epsilon", "epsilon", "delta")

    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*axes, *part.fields, *measured, *budgets, "seeds"])
    for group in result.groups:
        line = [*group.labels, *group.chosen, *(group.field(path) for path in part.fields)]
        for name in part.metrics:
            estimate = group.final(name)
            mean_and_std = [None, None] if estimate is None else [estimate.mean, estimate.std]
            line += texts(mean_and_std)
            line.append(" ".join(texts(group.finals(name))))
        for key in budgets:
            distinct = dict.fromkeys(texts(group.budgets(key)))
            line.append(" ".join(distinct))
        writer.writerow([*line, group.n_runs])
    return file.getvalue()


def curves_to_csv(result: PartResult) -> str | None:
    """Return the curves over the rounds that figures draw and checks are judged by; None if there are none."""
    part = result.part
    drawn = [figure.metric for figure in part.figures if figure.kind == "curves"]
    judged = [check.metric for check in part.checks if isinstance(check, Slope | Speedup)]
    names = list(dict.fromkeys([*judged, *drawn]))
    if not names:
        return None

    counts_gradients = any(figure.along == "gradients" for figure in part.figures)
    measured = [f"{name}_{what}" for name in names for what in ("mean", "std", "by_seed")]
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    gradients = ["gradients"] if counts_gradients else []
    writer.writerow([*(f"{AXIS}{name}" for name in result.axes), "round", *gradients, *measured])
    for group in result.groups:
        curves = [group.mean_curve(name) for name in names]
        known = [curve for curve in curves if curve is not None]
        if not known:
            continue

        for k, round_index in enumerate(known[0].rounds):  # the same for all metrics of a run
            line: list[Any] = [*group.labels, round_index]
            if counts_gradients:
                line.append(csv_number(round_index * group.gradients_per_round()))
            for curve in curves:
                line += ["", "", ""] if curve is None else curve.cells(k)
            writer.writerow(line)
    return file.getvalue()


ONE_DATA_SET = "All runs of this study, over cells and seeds, use the same data set."
EACH_ALONE = (
    "Each run's ε stands alone: it is what releasing that one run would cost. Each seed is a run, a release of its own "
    "of the same data: releasing all of them would add up to far more. Where a part does not say otherwise, the choice "
    "between settings is made on the public test set."
)
WHOSE = {"paper": "The paper's claim", "us": "Beyond the paper"}
HOW_JUDGED = (
    "A claim that one mean is larger than another is judged by the 95 % interval of their difference over the seeds "
    "(Welch's t), in brackets where two means are compared: shown where the whole interval is as claimed, contradicted "
    "where it is wholly on the other side (of zero, or of the shortfall that is allowed), not shown where it excludes "
    "the claimed size but not a smaller one, and undecided otherwise, as with one seed or a run that ends without a "
    "number. What is claimed to be the best is compared with every other that is not near enough to count. A speed-up "
    "or a power of the rounds is read off each seed's own curve. A cell is a combination of the other axes; by more "
    "than the spread means that the interval is on one side. Comparisons are not corrected for their number."
)
TWO_EPSILONS = (
    "ε (exact) is the accountant's, for what the run did: unit example, adjacency zero-out. Where there is a column "
    "ε (claimed), the noise was computed by the paper's formula; its ε is a claim, not a guarantee."
)


def scope_of_epsilon(results: Sequence[PartResult]) -> str:
    """Return a sentence on what an ε of a study covers; "" if no run has one."""
    scenarios = [cell.scenario for result in results for cell in result.cells]
    if all(scenario.private is None for scenario in scenarios):
        return ""
    data = {(repr(scenario.data.dataset), scenario.data.root) for scenario in scenarios}
    if len(data) == 1:
        return f"{ONE_DATA_SET} {EACH_ALONE}"
    return EACH_ALONE


def make_folder(study: Study, size: str | None, out: Path) -> None:
    """Create the folder to publish to, before hours of cells are run.

    Raises:
        ScenarioError: it cannot be made or written to, or has a README.md of something else.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(
            f"{option('out', shown(str(out))[1:-1])}: cannot be created ({error.strerror}); give another",
            code="study.unwritable",
        ) from error

    if not os.access(out, os.W_OK | os.X_OK):
        raise ScenarioError(f"{option('out', out)}: cannot be written to; give another", code="study.unwritable")
    if (out / README).exists() and not _published_before(study, size, out):
        raise ScenarioError(
            f"{option('out', out)}: has a {README} that is not of this study ({_title(study, size)[2:]}) and would be "
            "overwritten; give another",
            code="study.folder-taken",
        )


README = "README.md"
MADE_BY = "Made by `privdec study "


def _title(study: Study, size: str | None) -> str:
    if size is None:
        return f"# {study.heading}"
    return f"# {study.heading} ({size} size)"


def _published_before(study: Study, size: str | None, out: Path) -> tuple[str, dict[str, str]] | None:
    """Return the head of this study's README.md and its sections by heading; None if the file is missing."""
    path = out / README
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    head, *sections = re.split(r"(?m)^(?=## )", text)
    if head.partition("\n")[0] != _title(study, size) or f"\n{MADE_BY}" not in head:
        return None
    return head, {section.partition("\n")[0][3:]: section for section in sections}


def _earlier(study: Study, results: Sequence[PartResult], head: str, sections: dict[str, str]) -> dict[str, str]:
    """Return the sections of parts that are not published now, by their parts' names, each with what made it."""
    made = next(line for line in head.splitlines() if line.startswith(MADE_BY))
    published_now = {result.part.name for result in results}
    earlier = {}
    for part in study.parts:
        if part.name in published_now or part.heading not in sections:
            continue
        heading, _, text = sections[part.heading].strip().partition("\n\n")
        if not text.startswith(MADE_BY):  # what made the page so far made it
            text = f"{made}\n\n{text}"
        earlier[part.name] = f"{heading}\n\n{text}"
    return earlier


def publish(
    study: Study,
    size: str | None,
    command: str,
    results: Sequence[PartResult],
    failed: Sequence[Outcome],
    out: Path,
) -> None:
    """Write table-PART.csv, the curves that checks need, the figures and README.md to a folder.

    Parts that are published there already and are not among the results stay, with the command that made them.

    Args:
        size: the size of the study; None if it has none.
        command: that reproduces what is published.

    Raises:
        RunError: it cannot be written; the cells are kept.
    """
    old_head, sections = _published_before(study, size, out) or ("", {})
    earlier = _earlier(study, results, old_head, sections) if old_head else {}

    # What is said of all parts holds for the earlier ones too.
    scope = scope_of_epsilon(results)
    if earlier and (not scope or scope not in old_head):
        some_are_private = bool(scope) or EACH_ALONE.partition(":")[0] in old_head
        scope = EACH_ALONE if some_are_private else ""
    judged = any(result.part.checks for result in results)
    if earlier and HOW_JUDGED in old_head:
        judged = True

    runs = len(frozenset().union(*(result.finished for result in results)))
    seconds = sum(result.seconds for result in results)
    made = (
        f"Made by `{command}` with flower-privdec {__version__}: {runs} runs, {duration(seconds)} of CPU time "
        f"in all, one thread each, on a machine with {os.cpu_count()} cores ({platform.machine()})."
    )
    head = head_of(study, size, [made], scope, judged)
    if failed:
        listed = "\n".join(f"- {outcome.cell.title}: {outcome.error}" for outcome in failed)
        head.append(f"**{len(failed)} runs failed:**\n\n{listed}")

    try:
        make_folder(study, size, out)
        for result in results:
            _write(out / f"table-{result.part.name}.csv", to_csv(result))
            curves = curves_to_csv(result)
            if curves is not None:
                _write(out / f"curves-{result.part.name}.csv", curves)
        written = dict(earlier)
        looks = looks_of(results)
        for result in results:
            written[result.part.name] = section_of(result, drawn(result, out, looks))
        in_order = [written[part.name] for part in study.parts if part.name in written]
        _write(out / README, "\n\n".join([*head, *in_order]) + "\n")
    except OSError as error:
        raise RunError(
            f"{out}: cannot be written ({error}); give another {option('out')}, the cells are kept"
        ) from error


def _write(path: Path, text: str) -> None:
    write_atomically(path.resolve(), text.encode(), public=True)  # a link stays, and what it leads to is written


def verdict_blocks(check: Check, result: PartResult) -> list[str]:
    """Return the paragraphs on a check: its criterion and verdict, and the cases."""
    verdict = judge(check, result)
    cases = []
    for case in verdict.cases:
        outcome = f"{case.outcome}, {case.where}" if case.where else case.outcome
        cases.append(f"- {outcome}: {case.numbers}")
    return [f"Criterion: {criterion(check, result)}. **{verdict.sentence}**", "\n".join(cases)]


def head_of(study: Study, size: str | None, made: Sequence[str], scope: str, judged: bool) -> list[str]:
    """Return the paragraphs at the top of a study's page.

    Args:
        made: the lines on what made the results.
        scope: what an ε covers; "" if the study states no ε.
        judged: whether claims are judged on the page.
    """
    head = [_title(study, size)]
    if study.paper:
        head.append(study.paper)
    head += [*made, *study.notes]
    if scope:
        head += [scope, TWO_EPSILONS]
    head.append("Values are mean ± standard deviation over the seeds.")
    if judged:
        head.append(HOW_JUDGED)
    return head


def drawn(result: PartResult, out: Path, looks: Looks) -> list[str]:
    """Draw the figures of a part that have anything to show, and return the links to them."""
    return [
        figure_link(result, i)
        for i, figure in enumerate(result.part.figures)
        if save_figure(figure, result, out / figure_name(result.part, i), looks)
    ]


def figure_name(part: Part, i: int) -> str:
    """Return the file name of one of a part's figures."""
    return f"{part.name}-{i + 1}.svg"


def figure_link(result: PartResult, i: int) -> str:
    """Return the link to one of a part's figures, in Markdown."""
    return f"![{title_of(result.part.figures[i], result)}]({figure_name(result.part, i)})"


def section_of(result: PartResult, figures: Sequence[str], made: str | None = None) -> str:
    """Return a part's section: what it asks, the verdicts, the links to its figures, and its tables.

    Args:
        made: the line on what made it, if that is not what made the page.
    """
    part = result.part
    blocks = [f"## {part.heading}"]
    if made:
        blocks.append(made)
    if part.claim:
        blocks.append(f"{WHOSE[part.asks]}: {part.claim}")
    blocks += part.notes
    if result.chosen:
        choices = [f"{result.title(name)} of {', '.join(axis.labels())}" for name, axis in result.chosen.items()]
        better = result.metric(part.metrics[0]).title
        blocks.append(f"In every cell the {' and '.join(choices)} with the best {better} is chosen.")

    for check in part.checks:
        blocks += verdict_blocks(check, result)
    blocks += figures

    pivot, cells = tables(result)
    if pivot is None or part.pivot is None:
        blocks.append(cells)
    else:
        blocks.append(f"{result.metric(part.pivot.metric).title.capitalize()}:\n\n{pivot}")
        blocks.append(f"<details><summary>All cells</summary>\n\n{cells}\n\n</details>")
    return "\n\n".join(blocks)


def tables(result: PartResult) -> tuple[str | None, str]:
    """Return a part's table of two axes, None if it has none, and its table of all cells."""
    pivot = None
    if result.part.pivot:
        pivot = markdown(*pivot_table(result.part.pivot, result))
    cells = markdown(columns(result), [row(result, group) for group in result.groups])
    return pivot, cells
