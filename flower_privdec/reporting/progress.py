"""Progress of a run in the terminal: a bar or plain lines, and TensorBoard."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RichCast
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from flower_privdec.common.catalogue import BY_CLASS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import duration, epsilon_text, number
from flower_privdec.reporting.wording import main_value, measured
from flower_privdec.scenario import Scenario

Metrics = dict[str, Any]
OnMetrics = Callable[[Metrics], None]
PLAIN_LINES = 10
NARROW_BAR = 80  # columns


class Views:
    """What is told of a run's progress: its evaluations, and how long the rest takes as the run itself sees it.

    Attributes:
        views: each is called with the metrics of every evaluation.
        seconds_left: at the last evaluation; None if the run does not know.
    """

    def __init__(self) -> None:
        self.views: list[OnMetrics] = []
        self.seconds_left: float | None = None

    def expect(self, seconds_left: float | None) -> None:
        """Note how long the rest will take."""
        self.seconds_left = seconds_left

    def __call__(self, metrics: Metrics) -> None:
        """Show the metrics of an evaluation."""
        for view in self.views:
            view(metrics)


@contextmanager
def progress(
    scenario: Scenario,
    folder: Path,
    *,
    tensorboard: bool = False,
    console: Console | None = None,
    below: Sequence[RichCast] = (),
    first: Sequence[str] = (),
) -> Iterator[Views]:
    """Show a run's progress on stderr while the context lasts; write nothing before the first metrics.

    Args:
        tensorboard: write scalars for TensorBoard as well, to the run's folder tensorboard.
        console: where to print; stderr by default.
        below: what a terminal shows below the bar, redrawn with it.
        first: lines to print before the first metrics. A run that cannot start then says only why.

    Yields:
        A function to call with each evaluation's metrics (a line of metrics.jsonl).

    Raises:
        ScenarioError: when TensorBoard is requested and not installed.
    """
    console = console or error_console()
    with ExitStack() as stack:
        shown = Views()
        shown.views.append(_printed_once(first, console))
        if tensorboard:
            shown.views.append(stack.enter_context(_tensorboard(folder)))
        if console.is_terminal:
            shown.views.append(stack.enter_context(_bar(scenario, console, below, shown)))
        else:
            shown.views.append(_plain_lines(scenario, console, shown))
        yield shown


def _printed_once(lines: Sequence[str], console: Console) -> Callable[[Metrics], None]:
    """Return a view that prints lines at the first metrics."""
    waiting = list(lines)

    def on_metrics(metrics: Metrics) -> None:
        while waiting:
            console.print(waiting.pop(0), soft_wrap=True)

    return on_metrics


def error_console() -> Console:
    """Return stderr, for progress and failures of a running command."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _values(scenario: Scenario, metrics: Metrics) -> str:
    name, kind = next(iter(scenario.task.described().items()))
    value = main_value(scenario.algorithm.name, metrics[name])
    return (
        f"{kind['title']} {measured(value, kind)}  "
        f"consensus distance {number(metrics['consensus_distance'])}  ε {epsilon_text(metrics['epsilon'])}"
    )


def _time_left(scenario: Scenario, shown: Views) -> Callable[[Metrics], str]:
    """Tell the time left: as the run itself sees it, or else from the rounds since the first line; at that one nothing.

    What came before the first line also compiled, and filled caches.
    """
    first: tuple[float, int] | None = None

    def left(metrics: Metrics) -> str:
        nonlocal first
        now = time.monotonic()
        done = metrics["round"]
        if done >= scenario.rounds:
            return "done"
        if first is None:
            first = now, done
            return "" if shown.seconds_left is None else f"{duration(shown.seconds_left)} left"
        pace = (now - first[0]) / max(done - first[1], 1)
        return f"{duration(pace * (scenario.rounds - done))} left"

    return left


def counting_bar(console: Console) -> Progress:
    """Return a bar with a count, the elapsed time, and the task's field `left`.

    On a narrow terminal a long description is cut, and the time is left out.
    """
    narrow = console.width < NARROW_BAR
    room = Column(no_wrap=True, overflow="ellipsis", max_width=console.width // 3 if narrow else None)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=room),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *([] if narrow else [TimeElapsedColumn()]),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )


@contextmanager
def rounds(name: str, unit: str = "round") -> Iterator[Callable[[int, int], None]]:
    """Show the round of a run on stderr: a bar on a terminal, a few lines elsewhere.

    Args:
        unit: what is counted, if not rounds.

    Yields:
        A function to call with the round and the number of rounds.
    """
    console = error_console()
    tenths_shown = 0
    with counting_bar(console) as bar:
        task = bar.add_task(name, total=None, left="starting")

        def show(done: int, total: int) -> None:
            nonlocal tenths_shown
            bar.update(task, completed=done, total=total, left="")
            if not console.is_terminal and PLAIN_LINES * done // total > tenths_shown:
                tenths_shown = PLAIN_LINES * done // total
                console.print(f"{name}: {unit} {done}/{total}", soft_wrap=True)

        yield show


@contextmanager
def _bar(scenario: Scenario, console: Console, below: Sequence[RichCast], shown: Views) -> Iterator[OnMetrics]:
    bar = counting_bar(console)
    task = bar.add_task(scenario.name, total=scenario.rounds, left="")
    values = Text(style="dim")
    left = _time_left(scenario, shown)

    def show(metrics: Metrics) -> None:
        bar.update(task, completed=metrics["round"], left=left(metrics))
        values.plain = _values(scenario, metrics)

    with Live(Group(bar, values, *below), console=console, refresh_per_second=8):
        yield show


def _plain_lines(scenario: Scenario, console: Console, shown: Views) -> OnMetrics:
    tenths_shown = 0
    left = _time_left(scenario, shown)

    def show(metrics: Metrics) -> None:
        nonlocal tenths_shown
        tail = left(metrics)
        tenths = PLAIN_LINES * metrics["round"] // scenario.rounds
        if tenths > tenths_shown:
            tenths_shown = tenths
            counter = f"{metrics['round']:{len(str(scenario.rounds))}d}/{scenario.rounds}"
            console.print(
                f"{scenario.name}: round {counter}  {_values(scenario, metrics)}  {tail}".rstrip(), soft_wrap=True
            )

    return show


@contextmanager
def _tensorboard(folder: Path) -> Iterator[OnMetrics]:
    if importlib.util.find_spec("tensorboard") is None:
        raise ScenarioError(
            "--tensorboard needs the package tensorboard, which is not installed; "
            "pip install 'flower-privdec[tensorboard]', or leave the option out",
            code="reporting.no-tensorboard",
        )
    writers: list[Any] = []

    def show(metrics: Metrics) -> None:
        if not writers:
            from torch.utils.tensorboard import SummaryWriter

            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=metrics["round"]))
        for name, value in scalars(metrics).items():
            writers[0].add_scalar(name, value, metrics["round"])
        writers[0].flush()

    try:
        yield show
    finally:
        for writer in writers:
            writer.close()


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return the finite numbers of a line of metrics; nested names are joined by a slash."""
    apart = ("personalized", "by_class")
    nested = {name: values for name, values in metrics.items() if isinstance(values, dict) and name not in apart}
    for label, of_class in metrics.get("by_class", {}).items():
        nested |= {f"by_class/{label}/{name}": of_class[name] for name in BY_CLASS}
    flat = {f"{name}/{key}": value for name, values in nested.items() for key, value in values.items()}
    flat |= {key: metrics[key] for key in ("consensus_distance", "epsilon", "seconds")}
    return {key: float(value) for key, value in flat.items() if value is not None and float(value) < float("inf")}
