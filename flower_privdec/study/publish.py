"""What a study leaves to be published: a table for each part, pictures, and one README with the verdicts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flower_privdec import __version__
from flower_privdec.common.formatting import duration, shown
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.study.claims import judge, wanted
from flower_privdec.study.figures import save_figure, title_of
from flower_privdec.study.results import PartResult
from flower_privdec.study.runner import Outcome
from flower_privdec.study.spec import Study
from flower_privdec.study.tabulate import columns, markdown, pivot_table, row, to_csv

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
class Made:
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


def publish(study: Study, made: Made, results: Sequence[PartResult], failed: Sequence[Outcome], out: Path) -> None:
    """Write table-PART.csv, the pictures and README.md to a folder.

    Raises:
        RunError: when it cannot be written; the cells are kept.
    """
    try:
        _write(study, made, results, failed, out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error}); give another --out, the cells are kept") from error


def _write(study: Study, made: Made, results: Sequence[PartResult], failed: Sequence[Outcome], out: Path) -> None:
    make_folder(out)
    for result in results:
        (out / f"table-{result.part.name}.csv").write_text(to_csv(result), encoding="utf-8")
    sections = [_section(result, out) for result in results]
    text = "\n\n".join([*_head(study, made, results, failed), *sections]) + "\n"
    (out / "README.md").write_text(text, encoding="utf-8")


def _head(study: Study, made: Made, results: Sequence[PartResult], failed: Sequence[Outcome]) -> list[str]:
    cells = [cell for result in results for cell in result.cells]
    runs = len({cell.key for cell in cells})
    seconds = sum(result.seconds for result in results)
    size = f" ({made.size} size)" if made.size else ""
    lines = [
        f"# {study.heading}{size}",
        *([study.paper] if study.paper else ()),
        f"Made by `{made.command}` with flower-privdec {__version__}: {runs} runs, {duration(seconds)} of CPU time "
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
        blocks += [f"Looked for: {wanted(check, result)}. **{verdict.sentence}**", cases]
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
