"""Rehearse a deployment from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from flower_privdec.api.argument_errors import argument_error, check_callbacks
from flower_privdec.api.notebook_display import ShowsItself
from flower_privdec.api.running import OnEvaluation, stopping, threads_kept
from flower_privdec.api.scenarios import as_path, as_scenario, make_scenario, plain
from flower_privdec.common.errors import called_from_python
from flower_privdec.common.formatting import shown
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.rehearsal.rehearsal import Rehearsal
from flower_privdec.rehearsal.weather import weather
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.plots import html_of, picture
from flower_privdec.reporting.rehearsals import PEERS, TIMELINE, WAITS, draw_rehearsal, read_table, rehearsal_text
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.loading import write_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class RehearsalResult(ShowsItself):
    """What a rehearsal came to; printed, the table of `privdec rehearse`.

    Attributes:
        summary: that of a run, with the virtual clock's seconds, ends, calls, bytes and faults.
        metrics: a record for each evaluation, as of a run; `seconds` are the virtual clock's.
        timeline, peers, waits: the lines of its tables, whose values are text.
        text: the table of what became of the peers.
    """

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    timeline: list[dict[str, str]]
    peers: list[dict[str, str]]
    waits: list[dict[str, str]]
    text: str

    def __str__(self) -> str:
        """Return the table of what became of the peers."""
        return self.text

    def _repr_html_(self) -> str:
        return html_of(str(self), picture("the rehearsal", self.plot))

    def plot(self) -> Figure:
        """Return its picture.

        Raises:
            ScenarioError: matplotlib is not installed.
        """
        with drawing():
            return draw_rehearsal(self.timeline, self.peers)


@called_from_python()
def rehearse(
    scenario: Scenario | str | Path,
    *,
    faults: Mapping[str, Any] | str | Path | None = None,
    random_faults: float | None = None,
    slow: str | None = None,
    step_seconds: float | Literal["measure"] | None = None,
    peers: int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> RehearsalResult:
    """Rehearse a deployment: all peers of a scenario in this process, on a virtual clock.

    Args:
        scenario: a scenario, or the path of its file.
        faults: what links and devices are like and what goes wrong, as a mapping or a YAML file.
        random_faults: draw faults at random in place of that, so many for each peer on average.
        slow: SHARE:FACTOR; `20%:5` makes a fifth of the devices five times slower.
        step_seconds: the duration of a private step on a device, 0.1 by default; or `measure`, for that on this
            machine.
        peers: their number, in place of the scenario's.
        seed: of the faults; by default that of `faults`, or of the scenario.
        out: a new folder for the results. Without one nothing is left on disk.
        on_evaluation: called with each evaluation's metrics. When it returns True the rehearsal ends there.

    Raises:
        ScenarioError: something does not fit, or the folder holds another run; nothing was written.
        RunError: no peer came through a round that is evaluated.

    Privacy: none. Noise and batches follow from the scenario's seed; nothing of it may be published as private.
    """
    check_callbacks(on_evaluation=on_evaluation)
    loaded = as_scenario(scenario)
    if peers is not None:
        loaded = make_scenario(loaded, n_peers=peers)
    for name, value in (("random_faults", random_faults), ("step_seconds", step_seconds)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_measured = name == "step_seconds" and value == "measure"
        if value is not None and not (is_number or is_measured):
            raise argument_error(f"{name}={shown(value)} must be a number")

    given: FaultSchedule | Path | None = None
    if isinstance(faults, Mapping):
        given = FaultSchedule.parse(write_yaml(plain(faults)))
    elif faults is not None:
        given = as_path(faults, "faults")
    schedule = weather(
        loaded,
        given,
        random_faults=random_faults,
        slow=slow,
        step_seconds=None if isinstance(step_seconds, str) else step_seconds,
        seed=seed,
    )

    with TemporaryDirectory(prefix="privdec-") as temporary, threads_kept():
        folder = Path(temporary) / "rehearsal" if out is None else as_path(out, "out")
        rehearsal = Rehearsal(loaded, folder, schedule, measure=step_seconds == "measure")
        summary = rehearsal.run(stopping(on_evaluation, loaded.rounds))
        return RehearsalResult(
            summary=summary,
            metrics=read_metrics(folder),
            timeline=read_table(folder / TIMELINE),
            peers=read_table(folder / PEERS),
            waits=read_table(folder / WAITS),
            text=rehearsal_text(summary, folder),
        )
