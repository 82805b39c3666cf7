"""What the terminal shows of a run under way: progress, rounds of an app, and a live table of peers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from rich import box
from rich.console import Console, Group, RichCast
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from flower_privdec.common.formatting import duration, epsilon_text, memory, number
from flower_privdec.errors import ScenarioError
from flower_privdec.network.peer.status import is_insecure, neighbours_text, spent_text
from flower_privdec.reporting.wording import main_value, measured
from flower_privdec.scenario import Scenario

Metrics = dict[str, Any]
PLAIN_LINES = 10
NARROW_BAR = 80  # columns


class _View(Protocol):
    def __call__(self, metrics: Metrics) -> None: ...


@contextmanager
def progress(
    scenario: Scenario,
    folder: Path,
    *,
    tensorboard: bool = False,
    console: Console | None = None,
    below: Sequence[RichCast] = (),
) -> Iterator[Callable[[Metrics], None]]:
    """Show a run's progress on stderr while the context lasts; write nothing before the first metrics.

    Args:
        scenario: the run's.
        folder: the run's; TensorBoard's files go to its folder tensorboard.
        tensorboard: write scalars for TensorBoard as well.
        console: where to print; stderr by default.
        below: what else a terminal shows, redrawn with the bar.

    Yields:
        What to call with each evaluation's metrics (a line of metrics.jsonl).

    Raises:
        ScenarioError: when TensorBoard is asked for and not installed.
    """
    console = console or error_console()
    with ExitStack() as stack:
        views: list[_View] = []
        if tensorboard:
            views.append(stack.enter_context(_tensorboard(folder)))
        shown = _bar(scenario, console, below) if console.is_terminal else _plain(scenario, console)
        views.append(stack.enter_context(shown))

        def on_metrics(metrics: Metrics) -> None:
            for view in views:
                view(metrics)

        yield on_metrics


def error_console() -> Console:
    """Return stderr, as it is written to while something runs."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _values(scenario: Scenario, metrics: Metrics) -> str:
    name, kind = next(iter(scenario.task.described().items()))
    value = main_value(scenario.algorithm.name, metrics[name])
    return (
        f"{kind['title']} {measured(value, kind)}  "
        f"consensus distance {number(metrics['consensus_distance'])}  ε {epsilon_text(metrics['epsilon'])}"
    )


class _Clock:
    """Time left, from the rounds since the first line; at that one, from the time that training took so far."""

    def __init__(self, scenario: Scenario) -> None:
        self.rounds = scenario.rounds
        self.first: tuple[float, int] | None = None

    def left(self, metrics: Metrics) -> str:
        now, done = time.monotonic(), metrics["round"]
        if self.first is None:
            self.first = now, done
            pace = metrics["seconds"] / max(done, 1)
        else:
            pace = (now - self.first[0]) / max(done - self.first[1], 1)
        return duration(pace * (self.rounds - done))


def counting_bar(console: Console) -> Progress:
    """Return a bar of what is done of how much, the time that took, and the task's field `left`.

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
def rounds(name: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show which round a run of many is in, on stderr: a bar on a terminal, a few lines elsewhere.

    Args:
        name: the run's.
        console: where to print; stderr by default.

    Yields:
        What to call with a round and how many there are.
    """
    console = console or error_console()
    tenths_shown = 0
    with counting_bar(console) as bar:
        task = bar.add_task(name, total=None, left="starting")

        def show(done: int, total: int) -> None:
            nonlocal tenths_shown
            bar.update(task, completed=done, total=total, left="")
            if not console.is_terminal and PLAIN_LINES * done // total > tenths_shown:
                tenths_shown = PLAIN_LINES * done // total
                console.print(f"{name}: round {done}/{total}", soft_wrap=True)

        yield show


@contextmanager
def _bar(scenario: Scenario, console: Console, below: Sequence[RichCast]) -> Iterator[_View]:
    bar = counting_bar(console)
    task = bar.add_task(scenario.name, total=scenario.rounds, left="")
    values, clock = Text(style="dim"), _Clock(scenario)

    def show(metrics: Metrics) -> None:
        done = metrics["round"]
        left = f"{clock.left(metrics)} left" if done < scenario.rounds else "done"
        bar.update(task, completed=done, left=left)
        values.plain = _values(scenario, metrics)

    with Live(Group(bar, values, *below), console=console, refresh_per_second=8):
        yield show


@contextmanager
def _plain(scenario: Scenario, console: Console) -> Iterator[_View]:
    tenths_shown, clock = 0, _Clock(scenario)
    width = len(str(scenario.rounds))

    def show(metrics: Metrics) -> None:
        nonlocal tenths_shown
        left, tenths = clock.left(metrics), PLAIN_LINES * metrics["round"] // scenario.rounds
        if tenths > tenths_shown:
            tenths_shown = tenths
            tail = "done" if metrics["round"] == scenario.rounds else f"{left} left"
            where = f"{scenario.name}: round {metrics['round']:{width}d}/{scenario.rounds}"
            console.print(f"{where}  {_values(scenario, metrics)}  {tail}", soft_wrap=True)

    yield show


@contextmanager
def _tensorboard(folder: Path) -> Iterator[_View]:
    if importlib.util.find_spec("tensorboard") is None:
        raise ScenarioError(
            "--tensorboard needs the package tensorboard, which is not installed; "
            "pip install 'flower-privdec[tensorboard]', or leave the option out"
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
    """Return a line of metrics as named numbers: nested names joined by a slash, what is not finite left out."""
    nested = {name: values for name, values in metrics.items() if isinstance(values, dict) and name != "personalized"}
    named = {f"{name}/{key}": value for name, values in nested.items() for key, value in values.items()}
    named |= {key: metrics[key] for key in ("consensus_distance", "epsilon", "seconds")}
    return {key: float(value) for key, value in named.items() if value is not None and float(value) < float("inf")}


OnMetrics = Callable[[Metrics], None]
OnStatus = Callable[[int, dict[str, Any] | None, str], None]
HEADINGS = ("peer", "round", "loss", "ε spent", "neighbours", "sent", "heard", "")


class PeersTable:
    """Each peer's last status line, as a table that is redrawn whenever it is shown."""

    def __init__(self, n_peers: int) -> None:
        """Begin with peers that have said nothing.

        Args:
            n_peers: how many there are.
        """
        self._known: dict[int, dict[str, Any]] = {}
        self._words = dict.fromkeys(range(n_peers), "starting")
        self._lock = Lock()

    def tell(self, peer: int, status: dict[str, Any] | None, word: str) -> None:
        """Take in what a peer says.

        Args:
            peer: which.
            status: what it says; None where it does not answer, and what it said before stays.
            word: what is to be said of it.
        """
        with self._lock:
            self._words[peer] = word
            if status is not None:
                self._known[peer] = status

    def __rich__(self) -> Table:
        """Return the table as it is now."""
        with self._lock:
            statuses, words = dict(self._known), dict(self._words)
        insecure = any(is_insecure(status) for status in statuses.values())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="INSECURE seeds: for tests" if insecure else None)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in ("neighbours", "") else "right", no_wrap=True)
        for peer, word in words.items():
            table.add_row(str(peer), *(_cells(statuses[peer]) if peer in statuses else [""] * 6), word)
        return table


def _cells(status: dict[str, Any]) -> list[str]:
    return [
        f"{status['round']}/{status['rounds']}",
        number(status["loss"]),
        spent_text(status),
        neighbours_text(status).replace(" neighbours", ""),
        memory(status["bytes_sent"]),
        memory(status["bytes_received"]),
    ]


@contextmanager
def network_progress(
    scenario: Scenario, folder: Path, *, console: Console | None = None
) -> Iterator[tuple[OnMetrics, OnStatus | None]]:
    """Show how a network does on stderr while the context lasts: on a terminal with a table of its peers.

    Args:
        scenario: the run's.
        folder: the run's.
        console: where to print; stderr by default.

    Yields:
        What to call with each evaluation's metrics, and with what each peer says of itself; None where that is not
        shown.
    """
    console = console or error_console()
    table = PeersTable(scenario.n_peers) if console.is_terminal else None
    with progress(scenario, folder, console=console, below=[] if table is None else [table]) as on_metrics:
        yield on_metrics, None if table is None else table.tell
