"""What other commands of `privdec` do, from Python: networks on this machine, graphs, reports, ledgers and studies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_privdec.api.argument_errors import argument_error, check_callbacks
from flower_privdec.api.notebook_display import ShowsItself
from flower_privdec.api.pandas_frames import as_frame
from flower_privdec.api.run_result import RunResult
from flower_privdec.api.running import OnEnd, OnEvaluation, stopping, threads_kept, train_into
from flower_privdec.api.scenarios import as_path, as_scenario, check_everywhere
from flower_privdec.audits.app_audit import audit_app as attack_app
from flower_privdec.audits.audit import Audit
from flower_privdec.audits.audit import audit as attack
from flower_privdec.audits.one_run import OneRun
from flower_privdec.audits.report import audit_text, draw_audit
from flower_privdec.common.errors import called_from_python
from flower_privdec.common.formatting import shown
from flower_privdec.common.user_code import require
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.console import comparison_text, topology_text
from flower_privdec.reporting.ledgers import ledger_facts, ledgers_below
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.page import write_report
from flower_privdec.reporting.plots import build_graph, describe, draw_topology, html_of, picture
from flower_privdec.scenario import Scenario
from flower_privdec.studies.cells import CACHE
from flower_privdec.studies.publish import columns, row
from flower_privdec.studies.results import criterion, judge
from flower_privdec.studies.runner import Publication, run_and_publish

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@called_from_python()
def up(
    scenario: Scenario | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    loss: float = 0.0,
    kill: Mapping[int, int] | None = None,
    restart: Mapping[int, int] | None = None,
    insecure_seeds: bool = False,
    on_evaluation: OnEvaluation | None = None,
    on_end: OnEnd | None = None,
) -> RunResult:
    """Run all peers of a scenario as processes on this machine, over TLS, as they would run on devices.

    Args:
        scenario: a scenario, or the path of its file.
        out: the folder of the results. By default it is a temporary one, deleted with the result, ledgers included.
        resume: continue from the checkpoints in `out`.
        loss: share of all messages that are lost on purpose, from 0 to below 1.
        kill: the round after which a peer is killed for good, by peer.
        restart: the round after which a peer is killed and restarted, by peer.
        insecure_seeds: INSECURE: draw noise and batches from the scenario's seed, for tests.
        on_evaluation: called with each evaluation's metrics. When it returns True the peers stop: the result has the
            models of that round and the ε of all that the ledgers were charged; `resume` continues. Ctrl-C leaves
            the same.
        on_end: as of `run`.

    Raises:
        ScenarioError: when something does not fit, or the folder holds another run.
        RunError: when a peer failed.

    Privacy: as the scenario declares; each peer has its own ledger in the folder, and noise of the operating system.
    """
    from flower_privdec.network.local.up import Up, injected_kills

    check_callbacks(on_evaluation=on_evaluation, on_end=on_end)
    if out is None and resume:
        raise argument_error("resume=True needs out, the folder of the run to resume")

    folder = None if out is None else as_path(out, "out")
    loaded = as_scenario(scenario)
    check_everywhere(loaded, "every peer is a process of its own")
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        raise argument_error(f"loss={shown(loss)} must be a share, from 0 to below 1")

    # In the form in which the command line has them, so that both are checked by one rule.
    faults = []
    for name, rounds in (("kill", kill or {}), ("restart", restart or {})):
        if not isinstance(rounds, Mapping):
            raise argument_error(f"{name}={shown(rounds)} must be a mapping from peers to rounds, as {{3: 100}}")
        faults.append([f"{peer}@{when}" for peer, when in rounds.items()])
    killed, restarted = faults
    kills = injected_kills(killed, restarted, loaded.n_peers, loaded.rounds)

    def train(folder: Path) -> None:
        peers = Up(loaded, folder, resume=resume, insecure_seeds=insecure_seeds, loss=loss, kills=kills)
        peers.run(stopping(on_evaluation, loaded.rounds))

    return train_into(train, folder, on_end)


@dataclass(frozen=True, eq=False, repr=False)
class GraphDescription(ShowsItself):
    """The graph of a scenario; printed, the output of `privdec topology`.

    Attributes:
        facts: all of it, as `privdec topology --json` prints it.
    """

    scenario: Scenario
    facts: dict[str, Any]

    def __str__(self) -> str:
        """Return the facts, and the edges of a small graph."""
        return topology_text(self.facts)

    def _repr_html_(self) -> str:
        mixing = build_graph(self.scenario)
        if mixing is None:
            return html_of(str(self), [])
        return html_of(str(self), picture("the graph", partial(draw_topology, mixing.topology)))

    def plot(self) -> Figure:
        """Return a figure of the graph, a circle for each of its first rounds.

        Raises:
            ScenarioError: nothing is exchanged, or matplotlib is not installed.
        """
        mixing = build_graph(self.scenario)
        if mixing is None:
            raise argument_error(str(self.facts["note"]))
        with drawing():
            return draw_topology(mixing.topology)


@called_from_python()
def topology(scenario: Scenario | str | Path, *, out: str | Path | None = None) -> GraphDescription:
    """Describe the graph of a scenario: edges, spectral gap, rounds until jointly connected.

    Args:
        scenario: a scenario, or the path of its file.
        out: a .png, .svg or .pdf file to draw it to.

    Raises:
        ScenarioError: a graph that can never agree, or a file that cannot be written.
    """
    loaded = as_scenario(scenario)
    picture_file = None if out is None else as_path(out, "out")
    return GraphDescription(loaded, describe(loaded, picture_file))


@dataclass(frozen=True, eq=False, repr=False)
class AuditResult(ShowsItself, Audit):
    """The result of an audit; printed, the table of `privdec audit`."""

    def __str__(self) -> str:
        """Return ε as claimed, as printed and as shown, of each group of peers that pay alike."""
        return audit_text(self)

    def _repr_html_(self) -> str:
        return html_of(str(self), picture("the audit", self.plot))

    def plot(self) -> Figure:
        """Return a figure of the table, and of the replica's likelihood ratios without an example and with it.

        Raises:
            ScenarioError: matplotlib is not installed.
        """
        with drawing():
            return draw_audit(self)


@called_from_python()
def audit(scenario: Scenario | str | Path, *, trials: int = 2000, replica: int = 100_000, seed: int = 0) -> AuditResult:
    """Attack a scenario's ε: the lower bound that canaries show, beside the printed and the claimed one.

    Args:
        scenario: a scenario, or the path of its file; its ledger is not touched.
        trials: how many canaries are looked for, at least; each run of the scenario has one at each peer.
        replica: how many trials of the declared releases without a model, with an example and as many without.
        seed: keys coins, batches and noise; two audits of one seed are the same.

    Raises:
        ScenarioError: there is no ε that can be audited, or an argument is out of range.
    """
    loaded = as_scenario(scenario)
    with threads_kept():
        result = attack(Experiment.build(loaded), trials=trials, replica=replica, seed=seed)
    return AuditResult(**vars(result))


def audit_app(
    app: str | Path,
    n_nodes: int = 8,
    *,
    trials: int = 64,
    one_run: int | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_trials: Callable[[int, int], None] = lambda count, total: None,
) -> OneRun:
    """Attack the ε of a Flower app with PeerMod: of its peers' updates, or of its peers' examples.

    The app's ServerApp runs over nodes in this process, in a folder that is removed, as do its peers' ledgers.

    Args:
        app: the app's folder, with its pyproject.toml.
        n_nodes: how many peers a run has.
        trials: how many peers' updates are there or not by a coin, at least: the app is run again for each `n_nodes`.
        one_run: instead, how many of each peer's first examples are in or out by coins, in one run of the app, where it
            trains under `private` or `fit_privately`.
        config: overrides the run-config of the app's pyproject.toml; keys that it has.
        seed: the seed of the coins; noise and batches are the operating system's if the app's are.
        on_trials: called after each run with the number of trials so far, and `trials`.

    Raises:
        ScenarioError: the folder is not a Flower app, or a ledger of the app has payments of real training.
        RunError: nothing is protected in it, or the app fails.
    """
    install = "pip install flower-privdec"
    flower = require("flower_privdec.flower.launch.local_grid", "an audit of a Flower app", install)
    run = partial(flower.run_in_process, as_path(app, "app").absolute(), n_nodes, config=config)
    return attack_app(
        lambda folder: run(folder=folder), n_nodes, trials=trials, one_run=one_run, seed=seed, on_trials=on_trials
    )


@called_from_python()
def report(runs: RunResult | str | Path | Sequence[RunResult | str | Path], out: str | Path = "report.html") -> Path:
    """Write a self-contained HTML page about one run, or comparing several; or only a part of it.

    Args:
        runs: results, or folders of runs, finished or under way.
        out: a page (.html), what ε means for a data protection officer (.md), a table (.csv, or .tex with booktabs),
            or curves (.pdf, or .png of the first).

    Returns:
        The path of the page.

    Raises:
        ScenarioError: a folder that is not a run, or a page that cannot be written.
    """
    several = [runs] if isinstance(runs, RunResult | str | Path) else list(runs)
    if not several:
        raise argument_error("runs is empty: give the folders of runs, or their results")
    folders = [one.folder if isinstance(one, RunResult) else as_path(one, "runs") for one in several]
    page = as_path(out, "out")
    write_report(folders, page)
    return page


@called_from_python()
def ledger(
    path: str | Path, delta: float, *, epsilon: float | None = None, colluding: int | None = None, check: bool = False
) -> list[dict[str, Any]]:
    """Verify ledgers, and return what each run spent, the ε of all together, and what is left of a budget.

    Args:
        path: a ledger, SOURCE.jsonl, or a folder with some.
        delta: δ at which ε is computed, in (0, 1): a ledger holds releases, and no δ.
        epsilon: a budget of which to return what is left.
        colluding: against how many colluding peers ε holds; None for all other peers.
        check: whether dp-accounting composes the same events too (extra `accounting`).

    Returns:
        For each ledger what `privdec ledger --json` prints.

    Raises:
        BudgetError: a ledger cannot be read or fails verification, which names the line.
        ScenarioError: there is no ledger, or an argument breaks a rule.
    """
    return [ledger_facts(file, delta, epsilon, colluding, check=check) for file in ledgers_below(as_path(path, "path"))]


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult(ShowsItself):
    """A study's published parts; printed, its verdicts and tables.

    Attributes:
        folder: the folder of README.md, the tables as CSV and the figures.
        failures: the errors of failed runs, by their titles.
    """

    folder: Path
    failures: dict[str, str]
    _publication: Publication

    @property
    def verdicts(self) -> dict[str, list[str]]:
        """For each part what its checks come to, one sentence each."""
        verdicts = {}
        for result in self._publication.parts:
            checks = result.part.checks
            verdicts[result.part.name] = [f"{criterion(one, result)}: {judge(one, result).sentence}" for one in checks]
        return verdicts

    def frame(self, part: str | None = None) -> Any:
        """Return the table of a part, by default the first, as a pandas DataFrame of texts.

        Raises:
            ScenarioError: there is no such part, or pandas is not installed.
        """
        by_name = {result.part.name: result for result in self._publication.parts}
        name = next(iter(by_name)) if part is None else part
        if name not in by_name:
            raise argument_error(f"part={shown(part)} must be one of {', '.join(by_name)}")
        heads = columns(by_name[name])
        rows = [dict(zip(heads, row(by_name[name], group), strict=True)) for group in by_name[name].groups]
        return as_frame(rows)

    def __str__(self) -> str:
        """Return each part's table and verdicts."""
        blocks = []
        for result in self._publication.parts:
            rows = [row(result, group) for group in result.groups]
            note = "\n".join(self.verdicts[result.part.name])
            blocks.append(f"{result.part.heading}\n{comparison_text(columns(result), rows, note)}")
        failed = [f"{title} failed: {why}" for title, why in self.failures.items()]
        return "\n".join([*blocks, *failed, f"published: {self.folder}/README.md"])


@called_from_python()
def study(
    name: str | Path,
    *,
    size: str | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    cache: str | Path = CACHE,
) -> StudyResult:
    """Run a grid of scenarios, a paper's or your own, and write tables, plots and whether its claims are reproduced.

    Args:
        name: the name of a bundled study, or the path of its file.
        size: one of the study's sizes; by default its first.
        out: folder to publish to; by default results/NAME[-SIZE].
        jobs: processes, one thread each; 1 runs all in this one, and 0 publishes what is finished.
        only: parts to run.
        settings: values that override each scenario, by dotted key, as `{"rounds": 10}`.
        cache: folder of finished runs, so that the same study resumes after an interrupt.

    Raises:
        ScenarioError: a study or a cell that breaks a rule; nothing has run then.
    """
    if not isinstance(name, str | Path):
        raise argument_error(f"name={shown(name)} must be the name of a study, or the path of its file")
    if isinstance(only, str) or isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0:
        raise argument_error(f"only={shown(only)} must be a list of parts, and jobs={shown(jobs)} a whole number >= 0")

    published = run_and_publish(
        str(name),
        lambda title, cells: nullcontext(lambda outcome: None),
        size=size,
        out=None if out is None else as_path(out, "out"),
        jobs=jobs,
        only=only,
        settings=[f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()],
        cache=as_path(cache, "cache"),
    )

    failures = {outcome.cell.title: str(outcome.error) for outcome in published.failed}
    return StudyResult(published.folder, failures, published)
