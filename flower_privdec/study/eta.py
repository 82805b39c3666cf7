"""A study under way: a bar over its cells on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from flower_privdec.common.formatting import duration
from flower_privdec.reporting.console.progress import counting_bar
from flower_privdec.study.cells import Cell
from flower_privdec.study.runner import OnCell, Outcome


class Pace:
    """The time left, from how much of the cells' estimated work is done."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.total = sum(cell.work for cell in cells)
        self.done, self.began = 0.0, time.monotonic()

    def after(self, cell: Cell) -> str:
        """Return the time left after one more cell."""
        self.done += cell.work
        passed = time.monotonic() - self.began
        return duration(max(0.0, passed / self.done * (self.total - self.done)))


@contextmanager
def study_progress(name: str, cells: Sequence[Cell], console: Console | None = None) -> Iterator[OnCell]:
    """Show on stderr how many cells are done while the context lasts; yield what to call after each."""
    console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
    pace, done = Pace(cells), 0
    bar = counting_bar(console)
    with bar:
        task = bar.add_task(f"study {name}", total=len(cells), left="")

        def on_cell(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            left = f"{pace.after(outcome.cell)} left"
            bar.update(task, completed=done, left=left)
            if outcome.error is not None:
                console.print(f"failed: {outcome.cell.title}: {outcome.error}", soft_wrap=True)
            elif not console.is_terminal:
                console.print(f"{done}/{len(cells)}  {outcome.cell.title}  {left}", soft_wrap=True)

        yield on_cell
