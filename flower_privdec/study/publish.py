"""Write a study's results: CSV tables, figures, and a README with tables and verdicts."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec import __version__
from flower_privdec.common.formatting import NOTHING, duration, epsilon_text, setting, shown
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.reporting.plots import SERIES, drawing, line_style, new_figure
from flower_privdec.study.claims import criterion, judge, value_text
from flower_privdec.study.results import Group, PartResult
from flower_privdec.study.runner import Outcome
from flower_privdec.study.spec import Figure, Pivot, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    texts = list(dict.fromkeys(map(text, values)))
    return f"{texts[0]} to {texts[-1]}" if len(texts) > MOST_BUDGETS else ", ".join(texts) or NOTHING


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


ALONG = {"rounds": "round", "gradients": "gradients computed, all peers together"}


def save_figure(figure: Figure, result: PartResult, path: Path) -> bool:
    """Draw one figure of a part to an SVG file; return whether there was anything to draw."""
    panels = result.axes[figure.panels].labels() if figure.panels else [None]
    with drawing(salt=path.stem):
        canvas = new_figure(max(5.2, 3.5 * len(panels)), 3.4)
        all_axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        has_data = False
        for axes, panel in zip(all_axes, panels, strict=True):
            place = figure.where | ({figure.panels: panel} if figure.panels and panel else {})
            has_data |= _draw_panel(axes, figure, result, place)
            if figure.panels:
                axes.set_title(f"{result.axes[figure.panels].title or figure.panels} {panel}", fontsize=9.5)
        if not has_data:
            return False
        _label(all_axes, figure, result)
        canvas.suptitle(title_of(figure, result), x=0.01, ha="left", fontsize=10.5)
        canvas.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return True


def title_of(figure: Figure, result: PartResult) -> str:
    """Return what to write over a figure: its title, or its metric."""
    return figure.title or result.metric(figure.metric).title.capitalize()


def _label(all_axes: np.ndarray, figure: Figure, result: PartResult) -> None:
    measured = result.metric(figure.metric)
    all_axes[0].set_ylabel(measured.title + (" (%)" if measured.share else ""))
    for axes in all_axes:
        axes.set_xlabel(ALONG[figure.along] if figure.x is None else result.axes[figure.x].title or figure.x)
        if figure.log:
            axes.set_yscale("log")
    if figure.by:
        all_axes[-1].legend(frameon=False, fontsize=8.5, title=result.axes[figure.by].title or figure.by)


def _draw_panel(axes: Axes, figure: Figure, result: PartResult, place: dict[str, str]) -> bool:
    """Draw every line of a panel; axes that are neither held nor drawn stand at each of their points."""
    free = [figure.x] if figure.x else []
    lines = result.places(place, free)
    labels = result.axes[figure.by].labels() if figure.by else []
    has_data = False
    for i, line in enumerate(lines):
        style = labels.index(line[figure.by]) if figure.by else i
        label = line[figure.by] if figure.by else None
        if figure.x is None:
            has_data |= _draw_curve(axes, figure, result.at(line), style, label)
        else:
            groups = [result.at(line | {figure.x: name}) for name in result.axes[figure.x].labels()]
            beside = (i - (len(lines) - 1) / 2) * min(0.1, 0.6 / len(lines))
            has_data |= _draw_finals(axes, figure, result, groups, style, label, beside)
    return has_data


def _draw_curve(axes: Axes, figure: Figure, group: Group, style: int, label: str | None) -> bool:
    curves = group.curves(figure.metric)
    if curves is None:
        return False
    rounds, values = curves
    if figure.along == "gradients":
        rounds = rounds * group.gradients_per_round()
    values = 100 * values if group.metric(figure.metric).share else values
    series, dash = line_style(style)
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else 0.0
    axes.plot(rounds, mean, dash, color=SERIES[series], label=label)
    axes.fill_between(rounds, mean - std, mean + std, color=SERIES[series], alpha=0.16, linewidth=0)
    return True


def _draw_finals(
    axes: Axes, figure: Figure, result: PartResult, groups: list[Group], style: int, label: str | None, beside: float
) -> bool:
    """Draw a line along numbers; along categories, between which nothing lies, points, `beside` those of others."""
    points = result.axes[str(figure.x)].all_points()
    finals = [
        (point, i, group.final(figure.metric)) for i, (point, group) in enumerate(zip(points, groups, strict=True))
    ]
    present = [(point, i, estimate) for point, i, estimate in finals if estimate is not None]
    numeric = all(point.value is not None for point in points)
    if not numeric:
        axes.set_xticks(range(len(points)), [point.label for point in points])
        axes.set_xlim(-0.5, len(points) - 0.5)
    if not present:
        return False
    scale = 100 if result.metric(figure.metric).share else 1
    series, dash = line_style(style)
    axes.errorbar(
        [point.value if point.value is not None and numeric else i + beside for point, i, _ in present],
        [scale * estimate.mean for _, _, estimate in present],
        [scale * (estimate.std or 0) for _, _, estimate in present],
        linestyle=dash if numeric else "none",
        marker="o",
        markersize=4,
        capsize=2.5,
        color=SERIES[series],
        label=label,
    )
    return True


ONE_DATA_SET = "All runs of this study, over cells and seeds, use the same data set."
EACH_ALONE = (
    "Each run's ε stands alone: it is what releasing that one run would cost. Releasing all of them would add up to "
    "far more. The choice between settings is made on the public test set."
)
WHOSE = {"paper": "The paper's claim", "us": "Beyond the paper"}
TWO_EPSILONS = (
    "ε (exact) is the accountant's, for what the run did: unit example, adjacency zero-out. Where a column "
    "ε (claimed) stands beside it, the noise was computed by the paper's formula; its ε is a claim, not a guarantee."
)


@dataclass(frozen=True)
class Provenance:
    """How a study was run: what its README says of it.

    Attributes:
        size: of the study; None where it has none.
        command: what makes it again.
    """

    size: str | None
    command: str


def make_folder(out: Path) -> None:
    """Make the folder to publish to before hours of cells are run.

    Raises:
        ScenarioError: it cannot be made, or not be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(
            f"--out {shown(str(out))[1:-1]}: cannot be made ({error.strerror}); give another"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ScenarioError(f"--out {out}: cannot be written to; give another")


def publish(
    study: Study, origin: Provenance, results: Sequence[PartResult], failed: Sequence[Outcome], out: Path
) -> None:
    """Write table-PART.csv, the pictures and README.md to a folder.

    Raises:
        RunError: when it cannot be written; the cells are kept.
    """
    try:
        _write(study, origin, results, failed, out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error}); give another --out, the cells are kept") from error


def _write(
    study: Study, origin: Provenance, results: Sequence[PartResult], failed: Sequence[Outcome], out: Path
) -> None:
    make_folder(out)
    for result in results:
        (out / f"table-{result.part.name}.csv").write_text(to_csv(result), encoding="utf-8")
    sections = [_section(result, out) for result in results]
    text = "\n\n".join([*_head(study, origin, results, failed), *sections]) + "\n"
    (out / "README.md").write_text(text, encoding="utf-8")


def _head(study: Study, origin: Provenance, results: Sequence[PartResult], failed: Sequence[Outcome]) -> list[str]:
    cells = [cell for result in results for cell in result.cells]
    runs = len({cell.key for cell in cells})
    seconds = sum(result.seconds for result in results)
    size = f" ({origin.size} size)" if origin.size else ""
    lines = [
        f"# {study.heading}{size}",
        *([study.paper] if study.paper else ()),
        f"Made by `{origin.command}` with flower-privdec {__version__}: {runs} runs, {duration(seconds)} of CPU time "
        f"in all, one thread each, on a machine with {os.cpu_count()} cores ({platform.machine()}).",
        *study.notes,
        *_on_privacy(results),
        "Values are mean ± standard deviation over the seeds.",
    ]
    if failed:
        listed = "\n".join(f"- {outcome.cell.title}: {outcome.error}" for outcome in failed)
        lines.append(f"**{len(failed)} runs failed:**\n\n{listed}")
    return lines


def _on_privacy(results: Sequence[PartResult]) -> list[str]:
    """Say what the columns of ε mean, where something is private."""
    scenarios = [cell.scenario for result in results for cell in result.cells]
    if all(scenario.private is None for scenario in scenarios):
        return []
    data = {(repr(scenario.data.dataset), scenario.data.root) for scenario in scenarios}
    return [f"{ONE_DATA_SET} {EACH_ALONE}" if len(data) == 1 else EACH_ALONE, TWO_EPSILONS]


def _section(result: PartResult, out: Path) -> str:
    part = result.part
    blocks = [f"## {part.heading}", *([f"{WHOSE[part.asks]}: {part.claim}"] if part.claim else ()), *part.notes]
    if result.chosen:
        names = " and ".join(axis.title or name for name, axis in result.chosen.items())
        better = result.metric(part.metrics[0]).title
        blocks.append(f"In every cell the {names} with the best {better} is chosen.")
    for check in part.checks:
        verdict = judge(check, result)
        cases = "\n".join(
            f"- {_mark(case.holds)} {case.where}{': ' if case.where else ''}{case.numbers}" for case in verdict.cases
        )
        blocks += [f"Looked for: {criterion(check, result)}. **{verdict.sentence}**", cases]
    for i, figure in enumerate(part.figures):
        path = out / f"{part.name}-{i + 1}.svg"
        if save_figure(figure, result, path):
            blocks.append(f"![{title_of(figure, result)}]({path.name})")
    if part.pivot:
        blocks.append(
            f"{result.metric(part.pivot.metric).title.capitalize()}:\n\n{markdown(*pivot_table(part.pivot, result))}"
        )
    table = markdown(columns(result), [row(result, group) for group in result.groups])
    blocks.append(f"<details><summary>All cells</summary>\n\n{table}\n\n</details>" if part.pivot else table)
    return "\n\n".join(blocks)


def _mark(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "not decided"}[holds] + ","
