"""The laws that every row obeys that runs, and how a row that is refused goes on."""

from __future__ import annotations

import json
import logging
import math
import shutil
import stat
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from flower_privdec.common.errors import BudgetError, PrivdecError, RunError, ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.core.robust_mix import is_weight
from flower_privdec.experiment import Experiment, run_name
from flower_privdec.graph.participation import Leaving, activity
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.reporting.ledgers import ledger_facts, ledgers_below
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.testing import BrokenLaw, assert_noise, assert_sensitivity
from tools.battery import parts
from tools.battery.independent import Step, counted
from tools.battery.ledgers import composed_ledger
from tools.battery.measured import ALL, Measured, Sampling, bounds, composed, measuring
from tools.battery.rows import Case, more_rounds, run_row
from tools.battery.whitened import bands_of, whitened

ABOVE = 1.02  # what a printed ε may be, over an independent one
BELOW = 1 - 1e-6
SMALL = 2e-3  # of an ε, below the grid of the independent one
REFUSALS = (ScenarioError, BudgetError)


class Broken(Exception):  # noqa: N818 (a law's, not the program's)
    """A law does not hold for a row.

    Attributes:
        law: its name.
    """

    def __init__(self, law: str, text: str) -> None:
        super().__init__(text)
        self.law = law


@dataclass(frozen=True)
class Violation:
    """A law that a row broke.

    Attributes:
        law: its name.
        text: what was seen.
        row: the levels that are not plain.
    """

    law: str
    text: str
    row: str

    def __str__(self) -> str:
        return f"[{self.law}] {self.text}\n    {self.row}"


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        refusal: why it was refused; None if it ran.
        is_late: whether it had run, and was to go on.
        violations: the laws that it broke.
    """

    refusal: PrivdecError | None = None
    is_late: bool = False
    violations: list[Violation] = field(default_factory=list)


def hold(condition: bool, law: str, text: str) -> None:
    """Raise Broken unless a law holds."""
    if not condition:
        raise Broken(law, text)


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep the package's warnings to the user in a list, and let Python's own be errors."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("", "flwr")]
    before = [logger.handlers for logger in loggers]
    for logger in loggers:
        logger.handlers = [handler]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lines
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers = handlers


def refusal_of(case: Case) -> PrivdecError | None:
    """Return why a row is refused before any work, None if it builds; what a runtime refuses comes later."""
    case.write(in_yaml=False)
    with quiet(), case.entered(at_home=True):
        try:
            Experiment.build(case.scenario("python"))
        except REFUSALS as error:
            return error
    return None


class LateRefusal(Exception):  # noqa: N818 (a refusal is no error of the program)
    """A run that had ended was to go on, and was refused.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: PrivdecError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def try_case(case: Case) -> Outcome:
    """Write a row, and run it by all laws."""
    outcome = Outcome()
    shutil.rmtree(case.folder, ignore_errors=True)
    case.write()
    with quiet(), case.entered(), trying(case, outcome):
        _try(case, outcome)
    return outcome


@contextmanager
def trying(case: Case, outcome: Outcome) -> Iterator[None]:
    """Note what a law, or a refusal, has to say of what is done inside."""
    try:
        yield
    except Broken as error:
        outcome.violations.append(violation(case, error.law, str(error)))
    except LateRefusal as error:
        outcome.refusal = error.refusal
        outcome.is_late = True
    except REFUSALS as error:
        outcome.refusal = error
        outcome.violations += _after_refusal(case, error)
    except RunError as error:
        if error.code == "run.diverged":
            return  # as it may with so much noise, and it says so
        outcome.violations.append(violation(case, "a run that starts ends", f"{error.code}: {error}"))
    except BrokenLaw as error:
        outcome.violations.append(violation(case, error.code, str(error)))
    except Exception:
        text = "".join(traceback.format_exc().splitlines(keepends=True)[-9:])
        outcome.violations.append(violation(case, "no traceback", text))


def violation(case: Case, law: str, text: str) -> Violation:
    plain = Case.of((0,) * len(case.names), case.folder).names
    levels = {name: level for name, level in case.meaning.items() if level != plain[name]}
    return Violation(law, text, json.dumps(levels, ensure_ascii=False))


def _after_refusal(case: Case, error: PrivdecError) -> list[Violation]:
    """Return what a refusal should not have left."""
    violations = []
    if not error.code:
        violations.append(violation(case, "a refusal has a code", str(error)))
    if "\n" in str(error) or len(str(error)) > 900:
        violations.append(violation(case, "a refusal is one line", str(error)))
    left = [path for name in ("out", "ledgers") for path in (case.folder / name).rglob("*") if path.is_file()]
    if left:
        violations.append(violation(case, "a refusal leaves nothing", f"{error.code}: {left[:3]}: {error}"))
    return violations


# --- one row ---


def _try(case: Case, outcome: Outcome) -> None:
    scenario = case.scenario()
    experiment = Experiment.build(scenario)
    runtime, ending = case.option("runtime", "engine"), case.option("ending", "")
    out = case.folder / "out"

    def law(check: Callable[..., object], *arguments: Any) -> None:
        with trying(case, outcome):
            check(*arguments)

    law(_forms_agree, case, scenario)
    law(_keys, case, experiment)
    with one_salt():
        taken, summary = _run(case, experiment)
    for measured in taken.fewest:
        law(_mass_is_kept, measured)
        law(_nobody_away_steps, measured)
        law(_noise_is_whitened, measured)
    law(_nothing_else_costs, case, experiment)
    if scenario.private is not None:
        law(_epsilon_holds, experiment, summary, taken)
        law(_laws_of_noise, experiment)
        law(_ledger_agrees, experiment, summary, out, ending)
    law(_plan_agrees, case, experiment, summary, ending)
    law(_files_are_private, out)
    if not _is_plain(case, scenario):
        law(_runtimes_agree, case, experiment, out, runtime, ending)
    second = case.option("second")
    if second is not None:
        law(_second_run, case, second, taken, out)


def _is_plain(case: Case, scenario: Scenario) -> bool:
    """Return whether the row's run is one that can be measured itself."""
    runtime, ending = case.option("runtime", "engine"), case.option("ending", "")
    return runtime == "engine" and scenario.compute.generator != "system" and not ending


@dataclass(frozen=True)
class Taken:
    """The runs, or parts of runs, whose steps some ε counts together.

    Attributes:
        fewest: the steps that were taken for certain.
        most: those that may have been taken, or that peers have to count as taken.
    """

    fewest: list[Measured]
    most: list[Measured]

    def then(self, measured: Measured) -> Taken:
        """Return the same with another run after them."""
        return Taken([*self.fewest, measured], [*self.most, measured])


def _run(case: Case, experiment: Experiment) -> tuple[Taken, dict[str, Any]]:
    """Run a row; return what was measured, of it or of the same run in the engine, and its summary."""
    runtime = case.option("runtime", "engine")
    ending = case.option("ending", "")
    out = case.folder / "out"
    if _is_plain(case, experiment.scenario):
        with measuring(experiment) as measured:
            summary = run_row(experiment, out, runtime)
        taken = Taken([measured], [measured])
    elif ending:
        taken, summary = _run_with_ending(case, experiment, out, runtime, ending)
    else:
        reference = _reference(case, experiment)
        # The watched reference drew pair by pair, where a simulation draws once a peer.
        with patch.object(CancellingNoise, "draws_apart", True):
            summary = run_row(experiment, out, runtime)
        taken = Taken([reference], [reference])
    if summary is None:
        raise Broken("a run that starts ends", "it has no summary")
    return taken, summary


@contextmanager
def one_salt() -> Iterator[None]:
    """Let the runs inside that have code of a user's own have one salt, so that they can be compared."""
    with patch.object(run_name, "new_salt", lambda: "of all runs of a row"):
        yield


def _is_salted(experiment: Experiment) -> bool:
    """Return whether a run draws from a salt of its own, for it has code that may do anything."""
    return experiment.own.unsalted is not None


def _keyed(experiment: Experiment) -> Experiment:
    """Return a run whose noise comes from keys, so that it can be watched."""
    scenario = experiment.scenario
    if scenario.compute.generator != "system":
        return experiment
    changed = {"compute": scenario.compute.model_copy(update={"generator": None})}
    return Experiment.build(scenario.model_copy(update=changed))


def _reference(case: Case, experiment: Experiment) -> Measured:
    """Return what the engine's straight run measures, with noise from keys; its ledger is its own."""
    reference = _keyed(experiment)
    private = experiment.scenario.private
    with measuring(reference) as measured:
        run_row(reference, case.folder / "reference", "engine")
    if private is not None and private.ledger:
        shutil.rmtree(private.ledger)  # what the row itself charges is counted apart
    return measured


def _run_with_ending(
    case: Case, experiment: Experiment, out: Path, runtime: str, ending: str
) -> tuple[Taken, dict[str, Any] | None]:
    """Run a row up to where it ends early, or is to have more rounds, and go on with it."""
    if ending == "more rounds":
        taken = _with_more_rounds(case, experiment)
        run_row(experiment, out, runtime)
        before = _contents(out)
        try:
            longer = more_rounds(case, experiment.scenario, out)
            summary = run_row(Experiment.build(longer), out, runtime, resume=True)
        except REFUSALS as error:
            hold(
                _contents(out) == before, "a refusal leaves nothing", f"{error.code} changed the run's folder: {error}"
            )
            raise LateRefusal(error) from error
        return taken, summary

    reference = _reference(case, experiment)
    with measuring(experiment) as before_it:
        first = run_row(experiment, out, runtime, ends=ending)
    # A cohort that draws anew gets all of its shuffled epochs in one message, after which there is nothing to stop. So
    # it does with correlated noise, also if `bands: auto` turns out to be 1, which only who reads the data can know.
    private = experiment.scenario.private
    is_correlated = private is not None and private.correlated_noise is not None
    is_paid_together = is_correlated or _paid_together(experiment, 0) > 1
    is_one_message = runtime == "cohort" and experiment.own.draws_anew and is_paid_together
    hold(
        first is None or "stopped_at" in first or "rounds_done" in first or is_one_message,
        "a stopped run is a stopped one",
        f"its summary has no stopped_at: {first and list(first)}",
    )
    again = Experiment.build(case.scenario())
    with measuring(again) as after_it:
        summary = run_row(again, out, runtime, resume=True)

    if not experiment.own.draws_anew:
        # A step that is taken again has the noise that it had, and is one step.
        return Taken([reference], [reference]), summary
    if runtime == "engine" and experiment.scenario.compute.generator != "system":
        charged = _whole_epochs(_up_to_evaluation(before_it, reference), reference)
        return Taken([before_it, after_it], [charged, _whole_epochs(after_it, reference)]), summary
    # Other noise is another release, which is paid for again: at most that of all steps. With a budget, what was paid
    # for again may leave no room for the last steps, so nothing is known to have been taken.
    fewest = reference
    private = experiment.scenario.private
    if private is not None and private.epsilon is not None:
        fewest = replace(reference, steps=[])
    return Taken([fewest], [reference, reference]), summary


def _up_to_evaluation(killed: Measured, reference: Measured) -> Measured:
    """Return the steps of a straight run up to the evaluation that a killed run was on its way to.

    An engine pays for the rounds up to an evaluation at once, before it takes the first of them. Which of them a
    process that was killed has taken nobody knows, so they stay paid for.
    """
    experiment = reference.experiment
    last = max((record.step for record in killed.steps), default=-1)
    block = experiment.scenario.evaluation.every * experiment.algorithm.steps_per_round
    end = block * (last // block + 1)
    return replace(reference, steps=[record for record in reference.steps if record.step < end])


def _whole_epochs(part: Measured, whole: Measured) -> Measured:
    """Return all steps of the shuffled epochs that a part of a run has begun; without epochs the part itself.

    An epoch is paid for when it begins, as its dearest step, and by each process that draws it anew.
    """
    experiment = whole.experiment
    lengths = [_paid_together(experiment, peer) for peer in range(len(experiment.own.peers))]
    if max(lengths) == 1 or not part.steps:
        return part

    numbers = [record.step for record in part.steps]
    first = min(min(numbers) // length * length for length in lengths)
    end = max((max(numbers) // length + 1) * length for length in lengths)
    return replace(whole, steps=[record for record in whole.steps if first <= record.step < end])


def _paid_together(experiment: Experiment, peer: int) -> int:
    """Return how many steps in a row a peer pays for when it takes the first of them."""
    plan = experiment.own.protection
    if plan is not None and plan.correlation is not None:
        return plan.correlation.bands
    return Sampling.of(experiment, peer).epoch


def _with_more_rounds(case: Case, experiment: Experiment) -> Taken:
    """Return a run that is over and gets more rounds, as the engine measures it in the folder of references."""
    reference = _keyed(experiment)
    folder = case.folder / "reference"
    private = experiment.scenario.private
    with measuring(reference) as first:
        run_row(reference, folder, "engine")
    try:
        other = case.other(compute__generator=None) if reference is not experiment else case
        longer = Experiment.build(more_rounds(other, reference.scenario, folder))
        with measuring(longer) as rest:
            run_row(longer, folder, "engine", resume=True)
    except REFUSALS:
        return Taken([first], [first])  # as the row itself is
    finally:
        if private is not None and private.ledger:
            shutil.rmtree(private.ledger)
    # What is correlated over steps is made of what was drawn before.
    rest.draws.normals.update(first.draws.normals)
    return Taken([first, rest], [first, rest])


def _contents(folder: Path) -> dict[str, bytes]:
    """Return what the files of a folder hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the laws ---


def _plain_text(case: Case, scenario: Scenario) -> str:
    return to_yaml(scenario).replace(f"{case.folder}/", "").replace(str(case.folder), "")


def _forms_agree(case: Case, scenario: Scenario) -> None:
    """YAML, `--set` and Python make one scenario."""
    if case.has_objects:
        return
    expected = yaml.safe_load(_plain_text(case, scenario))
    for form in ("file", "settings", "leaves", "python"):
        if case.option("place") == "elsewhere" and form != "file":
            continue
        other = yaml.safe_load(_plain_text(case, case.scenario(form)))
        differing = [
            f"{key}: {other.get(key)}" for key in expected.keys() | other if expected.get(key) != other.get(key)
        ]
        hold(not differing, "yaml, --set and Python agree", f"as {form}: {differing[:3]}")


def _keys(case: Case, experiment: Experiment) -> None:
    """What changes numbers changes keys, and what changes nothing does not."""
    edit = case.option("edit")
    if edit is None or not experiment.own.keys or experiment.scenario.compute.generator == "system":
        return
    before = {experiment.own.run.id, *experiment.own.keys.values()}
    other = case
    undo: Callable[[], None] | None = None
    if edit == "setting":
        other = case.other(seeds={"run": 99})
    elif edit != "nothing":
        undo = _edit(case, edit)
    try:
        case.forget()
        after = Experiment.build(other.scenario()).own
    finally:
        if undo is not None:
            undo()
            case.forget()
    now: set[bytes | str] = set(after.keys.values())
    if not _is_salted(experiment):  # else its id is by what can be seen of its code
        now.add(after.run.id)
    shared = before & now
    if edit == "nothing" and not _is_salted(experiment):
        hold(len(shared) == len(before), "the same run has the same keys", "a second build has others")
    else:
        hold(
            not shared,
            "what changes numbers changes keys",
            f"after an edit of the {edit} {len(shared)} keys are the same",
        )


def _edit(case: Case, edit: str) -> Callable[[], None]:
    """Change a file of the row; return what takes it back."""
    if edit == "model's dict":
        parts.POWER = 2.0
        return lambda: setattr(parts, "POWER", 1.0)
    name = {
        **{"graph file": "edges.txt", "secrets file": "secrets.txt"},
        **{"loss's source": f"{case.module}.py", "model's source": f"{case.module}.py"},
        **{"file that the loss reads": "read.json", "file that the graph reads": "read.json"},
    }.get(edit)
    if edit == "graph file" and case.meaning["graph"] == "directed file":
        name = "arcs.txt"
    if name is None:
        name = _data_file(case, train=edit == "example")
    if name is None:
        return lambda: None
    path = case.path_of(name)
    if not path.exists():
        path = case.folder / name
    edited = path / "cat" / "0.png" if path.is_dir() else path
    before = edited.read_bytes()
    _change(path, edit)

    def undo() -> None:
        edited.write_bytes(before)

    return undo


def _data_file(case: Case, *, train: bool) -> str | None:
    data = case.data()["data"]
    value = data["root" if train else "test"] if data.get("test") or train else data["root"]
    return str(value).replace("{peer}", "1")


def _change(path: Path, edit: str) -> None:
    if path.is_dir():
        (path / "cat" / "0.png").write_bytes((path / "cat" / "1.png").read_bytes())
    elif path.suffix == ".npz":
        with np.load(path) as file:
            arrays = dict(file)
        x = arrays["x_train" if edit == "example" else "x_test"]
        x[0, 0] += 0.5
        np.savez(path, **arrays)
    elif path.suffix == ".txt":
        lines = path.read_text().splitlines()
        lines[-1] = "1 3" if len(lines) > 4 else "0 2"
        path.write_text("\n".join(["0 1", "1 2", "2 3", "3 0", lines[-1]]) + "\n")
    elif path.suffix == ".py":
        path.write_text(path.read_text().replace("SHIFT = 0.25", "SHIFT = 0.75"))
    elif path.suffix == ".json":
        path.write_text(json.dumps({"factor": 0.25}))
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(path)
        ages = table["age"].to_pylist()
        ages[0] += 1
        parquet.write_table(table.set_column(0, "age", [ages]), path)
    else:
        lines = path.read_text().splitlines()
        lines[1] = lines[1].replace(lines[1].split(",")[0], "33") if "," in lines[1] else lines[1].replace("1:", "1:9")
        path.write_text("\n".join(lines) + "\n")


def _adversaries(row: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name of each ε of a summary's row, and how many peers its adversary colludes with."""
    yield "epsilon", row.get("colluding", ALL)
    if "epsilon_if_all_collude" in row and "unit" in row:  # a network's peers choose another strength of pairs
        yield "epsilon_if_all_collude", ALL


def _epsilon_holds(experiment: Experiment, summary: dict[str, Any], taken: Taken) -> None:
    """Each printed ε is at least an independent composition of all that was released, and at most 2 % above."""
    plan = experiment.own.protection
    # A network's peers take another strength of pairs than the engine, in which noise is measured.
    other_pairs = "unit" not in summary["privacy"][0] and plan is not None and plan.pairs is not None
    is_open = any(_is_undeclared(run) or _outlives_budgets(run) for run in taken.most)
    for row in summary["privacy"]:
        peer = row["peer"]
        delta = row["delta"]
        for name, colluding in _adversaries(row):
            if other_pairs:
                continue
            low = _bounds_of(taken.fewest, peer, colluding, delta)[0]
            high = math.inf
            if not is_open and not (colluding != ALL and any(_counts_by_partners(run) for run in taken.most)):
                high = _bounds_of(taken.most, peer, colluding, delta)[1]
            _between(float(row[name]), low, high, name, peer)
        if "epsilon_of_replies_to_one" in row:
            low = _bounds_of_replies(taken.fewest, peer, delta)[0]
            high = math.inf
            if not any(_is_undeclared(run) for run in taken.most):
                high = _bounds_of_replies(taken.most, peer, delta)[1]
            _between(float(row["epsilon_of_replies_to_one"]), low, high, "epsilon of replies", peer)


def _mass_is_kept(measured: Measured) -> None:
    """No exchange of shares adds or loses mass, however shares are rounded; a rule or a lie changes models only."""
    experiment = measured.experiment
    scenario = experiment.scenario
    changes_models = scenario.network.robust is not None or scenario.attack is not None
    tolerance = 1e-9 if scenario.compute.dtype == "float64" else 1e-5
    for name, lost in measured.lost.items():
        if is_weight(name) or not changes_models:
            hold(lost <= tolerance, "mass is kept", f"an exchange of {name} adds or loses {lost:.3g} of it")


def _nobody_away_steps(measured: Measured) -> None:
    """A peer that has left takes no step, so that it is charged for none (`_epsilon_holds`)."""
    experiment = measured.experiment
    if not isinstance(experiment.participation, Leaving):
        return
    for record in measured.steps:
        round_index = record.step // experiment.algorithm.steps_per_round
        is_there = experiment.participation.present(round_index)[record.peers]
        text = f"step {record.step} is taken by peers {record.peers[~is_there].tolist()}, which are away"
        hold(bool(is_there.all()), "who is away takes no step", text)


def _noise_is_whitened(measured: Measured) -> None:
    """Noise that is correlated is made of the normals that were drawn, and forgotten after as many steps as it says."""
    plan = measured.experiment.own.protection
    if bands_of(measured) == 1 or plan is None or plan.correlation is None:
        return
    tolerance = 1e-6 if measured.experiment.scenario.compute.dtype == "float64" else 1e-2
    for peer in measured.experiment.own.peers.tolist():
        found = whitened(measured, peer)
        law = "noise of steps is what is drawn"
        hold(found.missed <= tolerance, law, f"{found.missed:.3g} of peer {peer}'s is not")
        hold(found.beyond <= tolerance, law, f"peer {peer}'s is not forgotten: {found.beyond:.3g} of a column is left")
        hold(found.wandered == 0, law, f"peer {peer} draws {found.wandered} examples of another group")
        norms = found.moves / found.alone
        most = float(norms.max(initial=0.0))
        charged = plan.correlation.norm
        text = f"an example moves a block of peer {peer} by {most:.6g} clip norms, {charged:.6g} are charged"
        hold(most <= charged * (1 + tolerance), law, text)


def _nothing_else_costs(case: Case, experiment: Experiment) -> None:
    """How messages are rounded, who judges them and who lies is no matter of privacy: the plan's ε is the same."""
    scenario = experiment.scenario
    network = scenario.network
    if scenario.private is None or scenario.compute.generator == "system":
        return
    if network.codec.name == "exact" and network.robust is None and scenario.attack is None:
        return
    plain = case.other(network__codec="exact", network__robust=None, attack=None)
    expected = [float(one["epsilon"]) for one in make_plan(Experiment.build(plain.scenario()))["peers"]]
    planned = [float(one["epsilon"]) for one in make_plan(Experiment.build(case.scenario()))["peers"]]
    text = f"{planned} are planned, and {expected} without codec, rule and liars"
    hold(planned == expected, "codecs, rules and lies cost no ε", text)


def _is_undeclared(run: Measured) -> bool:
    """Return whether nothing is declared of a run's noise: it costs ε = ∞, whatever it is, and so does what follows."""
    plan = run.experiment.own.protection
    return plan is not None and None in plan.kinds


def _counts_by_partners(run: Measured) -> bool:
    """Return whether a peer's noise is counted with its own partners only, as if some were away: all hide it better."""
    plan = run.experiment.own.protection
    return plan is not None and plan.pairs is not None and bool(plan.pairs.by_partners)


def _outlives_budgets(run: Measured) -> bool:
    """Return whether pairs of peers share noise and some peer stops before the plan does.

    What the others share with it then hides them too, and they are charged as if it went on.
    """
    experiment = run.experiment
    plan = experiment.own.protection
    if plan is None or plan.pairs is None:
        return False
    planned = activity(experiment.participation, experiment.scenario.rounds)
    return any((active < planned[round_index]).any() for round_index, active in run.active.items())


def _bounds_of(runs: list[Measured], peer: int, colluding: int, delta: float) -> tuple[float, float]:
    """Return bounds of the ε of a peer's last run and all others, at the same peer and at the dearest."""
    last, others = runs[-1], runs[:-1]
    own = composed(last, peer, colluding)
    lows, highs = [], []
    choices: list[list[list[list[Step]]]] = [[]]
    for other in others:
        peers = range(len(other.experiment.own.peers))
        if other.experiment.own.run.partition == last.experiment.own.run.partition:
            peers = range(peer, peer + 1)  # which holds the same examples in both
        kinds = {counted(composed(other, one, colluding)[1]): composed(other, one, colluding) for one in peers}
        choices = [[*chosen, part] for chosen in choices for part in kinds.values()]
    for chosen in choices:
        highs.append(bounds([own, *chosen], delta)[1])
    same = [composed(other, min(peer, len(other.experiment.own.peers) - 1), colluding) for other in others]
    lows.append(bounds([own, *same], delta)[0])
    return max(lows), max(highs)


def _bounds_of_replies(runs: list[Measured], peer: int, delta: float) -> tuple[float, float]:
    lows, highs = [0.0], [0.0]
    receivers = {cost.receiver for run in runs for cost in run.costs(peer)} - {None}
    for receiver in receivers:
        low, high = bounds([composed(run, peer, ALL, receiver) for run in runs], delta)
        lows.append(low)
        highs.append(high)
    whole = bounds([composed(run, peer, ALL) for run in runs], delta)[1]
    return max(lows), whole


def _between(printed: float, low: float, high: float, name: str, peer: int) -> None:
    text = f"{name} of peer {peer} is {printed:.5g}; independently it is {low:.5g} to {high:.5g}"
    hold(printed >= low * BELOW - SMALL, "no ε is below the truth", text)
    hold(printed <= high * ABOVE + SMALL, "no ε is 2 % above the truth", text)


def _laws_of_noise(experiment: Experiment) -> None:
    """Noise measured is noise planned, and no example moves a release by more than declared."""
    plan = experiment.own.protection
    if plan is None or experiment.scenario.compute.generator == "system":
        return
    noise = experiment.scenario.private and experiment.scenario.private.noise
    if not isinstance(noise, OwnSection):
        assert_noise(experiment, 2)
    dtype = experiment.initial.dtype
    if dtype == torch.float64 and experiment.mixing is not None:
        assert_sensitivity(experiment, 2)


def _plan_agrees(case: Case, experiment: Experiment, summary: dict[str, Any], ending: str) -> None:
    """The plan has the ε that the summary has."""
    if ending == "more rounds" or (ending and experiment.own.draws_anew):
        return  # other rounds were planned, or steps were taken again
    if case.option("runtime") == "network" and experiment.own.protection and experiment.own.protection.pairs:
        return  # whose peers take another strength of pairs, which may leave some of them more noise
    facts = make_plan(Experiment.build(case.scenario()))
    for planned, row in zip(facts["peers"], summary["privacy"], strict=True):
        expected, printed = float(planned["epsilon"]), float(row["epsilon"])
        system = experiment.scenario.compute.generator == "system"
        text = f"peer {row['peer']}: planned {expected}, printed {printed}"
        if facts.get("ledger") is None or not system:
            hold(math.isclose(expected, printed, rel_tol=1e-9), "plan and summary agree", text)


def _ledger_agrees(experiment: Experiment, summary: dict[str, Any], out: Path, ending: str) -> None:
    """`privdec ledger` has the largest ε of the summary, and what the file's own lines compose to."""
    private = experiment.scenario.private
    if private is None:
        return
    deltas = {row["delta"] for row in summary["privacy"]}
    if len(deltas) > 1:
        return
    (delta,) = deltas
    folder = Path(private.ledger) if private.ledger else out
    nodes = out.with_name(out.name + "-nodes")  # which keep a ledger each
    paths = ledgers_below(nodes if nodes.exists() and any(nodes.rglob("ledger")) else folder)
    for name, colluding in _adversaries(summary["privacy"][0]):
        against = None if colluding == ALL else colluding
        facts = [ledger_facts(path, delta, colluding=against) for path in paths]
        largest = max(float(one["epsilon"]) for one in facts)
        printed = max(float(row[name]) for row in summary["privacy"])
        text = f"{name}: the ledger has {largest}, the summary {printed}"
        agree = math.isclose(largest, printed, rel_tol=1e-6, abs_tol=1e-9)
        if ending == "more rounds":  # runs of other partitions, in each of which the dearest peer counts
            agree = agree or largest > printed
        hold(agree, "ledger and summary agree", text)
        for path, one in zip(paths, facts, strict=True):
            below, above = composed_ledger(path, delta, against)
            text = f"`privdec ledger` prints {one['epsilon']}, its lines cost {below:.5g} to {above:.5g}"
            value = float(one["epsilon"])
            hold(below * BELOW - SMALL <= value <= above * ABOVE + SMALL, "a ledger's ε is that of its lines", text)


def _files_are_private(out: Path) -> None:
    """No other user may read what a run keeps for itself."""
    for folder in (out, out.with_name(out.name + "-nodes")):
        for path in folder.rglob("*") if folder.exists() else ():
            keeps = path.name.startswith("checkpoint") or path.suffix in (".key", ".sealed")
            if path.is_file() and keeps:
                mode = stat.S_IMODE(path.stat().st_mode)
                hold(mode & 0o077 == 0, "files are private", f"{path.name} has mode {mode:o}")


def _rows_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "checkpoint")


def _runtimes_agree(case: Case, experiment: Experiment, out: Path, runtime: str, ending: str) -> None:
    """Engine, workers, Flower and a network, straight and resumed, take one trajectory, or say that they do not."""
    scenario = experiment.scenario
    same_keys = (
        scenario.compute.generator == "portable"
        or scenario.private is None
        or runtime in ("engine", "workers", "cohort")
    )
    draws_anew = scenario.compute.generator == "system" or (bool(ending) and _is_salted(experiment))
    if draws_anew or not same_keys or ending == "more rounds":
        return
    reference = case.folder / "reference"
    expected, rows = _rows_of(reference), _rows_of(out)
    plan = experiment.own.protection
    if runtime == "network" and plan is not None and (plan.pairs is not None or _is_salted(experiment)):
        return  # whose peers agree on secrets of their own, or draw from their operating systems
    if scenario.algorithm.name == "pdsl" and scenario.compute.dtype == "float32" and runtime != "cohort":
        return  # which weighs by accuracies, and a rounding may turn one
    exact = runtime in ("engine", "workers", "cohort")
    tolerance = 1e-9 if scenario.compute.dtype == "float64" else 1e-4
    if exact:
        tolerance = 0.0
    elif scenario.features is not None:
        tolerance = max(tolerance, 1e-5)  # features are float32, rounded by how many images are transformed together
    for name in sorted(rows.keys() & expected.keys()):
        one, other = rows[name], expected[name]
        if one.shape != other.shape:
            continue
        # What a rule has not measured yet is NaN.
        equal = torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        law = "straight and resumed agree" if ending else "runtimes agree"
        hold(equal, law, f"{name} differs by {float((one - other).abs().max()):.3g}")


def _second_run(case: Case, changed: dict[str, Any], first: Taken, out: Path) -> None:
    """Another run over the same data: what it prints counts both."""
    more = {key.replace(".", "__"): value for key, value in changed.items()}
    start = more.get("model__from")
    if start is not None:
        more["model__from"] = str(out)
    shared = "privacy.ledger" in case.settings()
    second = case.other(**more)
    if start is not None:
        for key in ("name", "module", "arguments", "init"):
            second.removed.add(f"model.{key}")
    try:
        again = Experiment.build(second.scenario())
    except REFUSALS as error:
        hold("\n" not in str(error), "a refusal is one line", str(error))
        return
    other = case.folder / "second" / "out"
    if again.scenario.compute.generator == "system":
        return
    try:
        with measuring(again) as measured:
            summary = run_row(again, other, "engine")
    except REFUSALS as error:
        hold(
            error.code in ("ledger.spent-elsewhere", "ledger.no-step"),
            "a refusal is before the start",
            f"{error.code}: {error}",
        )
        return
    assert summary is not None
    is_other = _is_salted(again) or again.own.run.id != first.most[0].experiment.own.run.id
    counts_both = (shared or start is not None) and is_other
    taken = first.then(measured) if counts_both else Taken([measured], [measured])
    _epsilon_holds(again, summary, taken)
