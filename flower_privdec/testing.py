"""Privacy laws that every algorithm must satisfy, as test functions for this package's and users' own algorithms.

Each law runs an experiment twice on different data. The second run publishes the releases of the first (the *tape*), so
that every observer has seen the same up to each step. Then
    - a step's next release moves by no more than its algorithm declares (`assert_sensitivity`),
    - each release has the noise of the plan, from a draw that is used once (`assert_noise`), and
    - no other output of a peer differs (`assert_nothing_else_leaves`).
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ArgumentError, CodedError
from flower_privdec.core import Exchange
from flower_privdec.core.cohort import STEPS, Cohort, PrivateStep
from flower_privdec.data import Batch, LocalBatch, PeerData
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.privacy.noise import NoiseSource
from flower_privdec.rows.sparse_rows import Features, SparseRows

TIMES = ("seconds", "wall_seconds", "peer_steps_per_second", "coalition_seconds", "coalition_share_of_wall_time")


@dataclass(frozen=True)
class Released:
    """A record of one private step of some rows.

    Attributes:
        step: its number in the run.
        peers: int64 [r].
        receivers: int64 [r], the only receiver of each row's sums; None if every neighbour gets them.
        positions: the local positions each row drew.
        unit: [r], one clip norm in the sums.
        before: the rows before each sum is added, [r, d].
        raw: each sum without noise, [r, d].
        after: the rows with the sum added and, if it is published, its noise, [r, d].
        public: the names of the sums that are published.
    """

    step: int
    peers: np.ndarray
    receivers: np.ndarray | None
    positions: list[set[int]]
    unit: Tensor
    before: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    public: tuple[str, ...]


@dataclass
class Tape:
    """The private steps of a run, in order."""

    steps: list[Released] = field(default_factory=list)


Publish = Callable[[Cohort, PrivateStep], None]


def _take(cohort: Cohort, step: PrivateStep, publish: Publish) -> Released:
    """Take a private step, publish its sums by a function, and return a record of it."""
    before = {name: out.clone() for name, out in step.sums.items()}
    step.estimate(cohort, step)
    raw = {name: out - before[name] for name, out in step.sums.items()}
    publish(cohort, step)

    clip = torch.ones_like(step.scale) if step.clip_norm is None else step.clip_norm
    drawn = [set(index[mask].tolist()) for index, mask in zip(step.batch.index, step.batch.weight > 0, strict=True)]
    if drawn:
        positions = [drawn[row] for row in step.batch_row.tolist()]
    else:
        positions = [set[int]() for _ in step.peers]  # a step that is noise only has no batch

    return Released(
        step=step.step,
        peers=step.peers,
        receivers=step.receivers,
        positions=positions,
        unit=step.scale.abs() * clip,
        before=before,
        raw=raw,
        after={name: out.clone() for name, out in step.sums.items()},
        public=tuple(step.noise_std),
    )


@dataclass
class _Recorder:
    """Records each private step that it takes."""

    tape: Tape

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        """See StepObserver."""
        self.tape.steps.append(_take(cohort, step, Cohort.add_noise_))


@contextmanager
def recording() -> Iterator[Tape]:
    """Record every private step that is taken inside, in the same thread."""
    tape = Tape()
    with STEPS.open_to(_Recorder(tape)):
        yield tape


@dataclass
class _Player:
    """Publishes a tape's releases in place of those computed, which it records on another."""

    tape: Tape
    again: Tape

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        """See StepObserver."""
        past = self.tape.steps[len(self.again.steps)]
        assert (past.step, past.peers.tolist()) == (step.step, step.peers.tolist())

        start = {name: step.sums[name].clone() for name in step.noise_std}

        def publish(_: Cohort, step: PrivateStep) -> None:
            for name in step.noise_std:
                if torch.equal(start[name], past.before[name]):
                    step.sums[name].copy_(past.after[name])  # added to the same rows: the same bits
                else:
                    step.sums[name].copy_(start[name] + (past.after[name] - past.before[name]))

        self.again.steps.append(_take(cohort, step, publish))


@contextmanager
def replaying(tape: Tape) -> Iterator[Tape]:
    """Publish a tape's releases in place of those computed inside; record the computed ones on another tape."""
    again = Tape()
    with STEPS.open_to(_Player(tape, again)):
        yield again


@contextmanager
def zeroed_out(peer: int, example: int) -> Iterator[None]:
    """Replace the gradient of one local example of one peer by zero, wherever it is used inside."""
    gather = PeerData._gather

    def without(data: PeerData, rows: np.ndarray, local: LocalBatch) -> Batch:
        hidden = (local.index == example) & (data.sampler.peers[rows] == peer)[:, None]
        return gather(data, rows, LocalBatch(local.index, np.where(hidden, 0, local.weight).astype(np.float32)))

    with patch.object(PeerData, "_gather", without):
        yield


def run_rounds(experiment: Experiment, rounds: int) -> Engine:
    """Run some rounds in the engine, keeping no ledger.

    Raises:
        ArgumentError: the scenario has fewer rounds; noise is planned only for these.
    """
    _check_rounds(experiment, rounds, least=0)
    cohort = experiment.cohort()
    arithmetic = experiment.arithmetic
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort), arithmetic)
    for _ in range(rounds):
        engine.round()
    return engine


def _check_rounds(experiment: Experiment, rounds: int, least: int = 1) -> None:
    planned = experiment.scenario.rounds
    if not least <= rounds <= planned:
        raise ArgumentError(
            f"rounds={rounds} must be {least} to {planned}, the rounds of the scenario: try fewer, or raise its rounds",
            code="testing.rounds",
        )


class BrokenLaw(CodedError, AssertionError):  # noqa: N818 (a law of an experiment; the code may be right)
    """A law of privacy does not hold for an experiment."""


def _hold(condition: bool, message: str, code: str) -> None:
    if not condition:
        raise BrokenLaw(message, code=code)


# --- one example moves a release by no more than declared ---


def assert_sensitivity(
    experiment: Experiment, rounds: int, *examples: int, peer: int = 0, slack: float = 1e-6
) -> float:
    """Check that zeroing one example out moves each release by no more than its algorithm declares.

    Args:
        experiment: with privacy; in float64, or rounding hides small moves.
        examples: of a peer, each tried by itself; by default the first that is drawn.
        slack: relative, for rounding.

    Returns:
        The most that a release moved, over what is declared.

    Raises:
        BrokenLaw: the message names the step, the sum, and how far it moved.
    """
    with recording() as tape:
        run_rounds(experiment, rounds)
    drawing = drawings_of(experiment, experiment.own.peers, experiment.own.sampler)[peer]

    most = 0.0
    for example in examples or (_first_drawn(tape, peer),):
        with replaying(tape) as again, zeroed_out(peer, example):
            run_rounds(experiment, rounds)

        for one, other in zip(tape.steps, again.steps, strict=True):
            declared = {release.name: release for release in experiment.algorithm.released(one.step, drawing) or ()}
            for row, name in product(np.flatnonzero(one.peers == peer).tolist(), one.public):
                release = declared[name]
                takes_part = release.over == "all" or example in one.positions[row]
                allowed = release.drawn if takes_part else release.idle
                moved = float((one.raw[name][row] - other.raw[name][row]).norm() / one.unit[row])

                message = f"step {one.step}: sum {name!r} of peer {peer} moves by {moved:.6g} clip norms"
                message = f"{message}, declared {allowed:.6g}"
                _hold(moved <= allowed * (1 + slack) + slack, message, "law.sensitivity")
                if allowed:
                    most = max(most, moved / allowed)
    return most


def _first_drawn(tape: Tape, peer: int) -> int:
    """Return a peer's example of the first step that draws one; 0 if none does."""
    for step in tape.steps:
        for row in np.flatnonzero(step.peers == peer).tolist():
            drawn = step.positions[row]
            if len(drawn):
                return int(min(drawn))
    return 0


# --- each release has its noise ---


Draw = tuple[int, int, str, int | None]  # peer, step, purpose, receiver


class _Watched:
    """A noise source that records the standard deviation of every draw."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self.drawn: dict[Draw, float] = {}

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """See NoiseSource."""
        to = [None] * len(peers) if receivers is None else receivers.tolist()
        for peer, receiver, scale in zip(peers.tolist(), to, std.tolist(), strict=True):
            draw = peer, step, purpose, receiver
            message = f"a draw of noise is used twice: peer {peer}, step {step}, {purpose!r}"
            _hold(draw not in self.drawn, message, "law.noise-twice")
            self.drawn[draw] = scale
        self._source.add_(out, std, step, peers, purpose, receivers)


def assert_noise(experiment: Experiment, rounds: int) -> None:
    """Check that each published sum has the noise of the plan, and that no draw is used twice.

    Raises:
        BrokenLaw: the message names the step and the sum.
    """
    _check_rounds(experiment, rounds)
    plan = experiment.own.protection
    assert plan is not None
    cohort = experiment.cohort()
    watched = _Watched(cohort.noise)
    cohort.noise = watched
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    with recording() as tape:
        for _ in range(rounds):
            engine.round()

    drawings = drawings_of(experiment, experiment.own.peers, experiment.own.sampler)
    for step in tape.steps:
        for row, peer in enumerate(step.peers.tolist()):
            for declared in experiment.algorithm.released(step.step, drawings[peer]) or ():
                multiplier = 0.0
                if declared.to != "self":  # what stays with the peer has no noise
                    multiplier = plan.noise_multipliers[step.step, peer] * declared.noise
                receiver = None if step.receivers is None else int(step.receivers[row])
                std = watched.drawn.get((peer, step.step, declared.name, receiver))
                units = cohort.mechanism.drawn_std(step.step, peer)
                if units is not None and std is not None:
                    std *= multiplier * float(step.unit[row]) / units  # what was added is looked at below
                _check_noise(step, row, declared.name, multiplier, std)


def _check_noise(step: Released, row: int, name: str, multiplier: float, std: float | None) -> None:
    """Check a sum's noise as it was asked for, and as it was added."""
    where = f"step {step.step}: sum {name!r} of peer {step.peers[row]}"
    expected = multiplier * float(step.unit[row])
    after = step.after[name][row]
    rounding = max(1e-9, 8 * torch.finfo(after.dtype).eps)  # relative

    message = f"{where} has noise {std}, and must have {expected}"
    _hold(abs((std or 0.0) - expected) <= rounding * expected, message, "law.noise")

    noise = after - step.before[name][row] - step.raw[name][row]  # [d]
    size = float(noise.norm()) / math.sqrt(len(noise))
    if expected:
        # The root mean square of d normals is off by 1 / sqrt(2 d), and by 7 times that once in 10^12 times. What pairs
        # of peers share comes on top, so only too little is a mistake.
        least = max(0.1, 1 - 7 / math.sqrt(2 * len(noise)))
        message = f"{where}: its noise of {expected} was not added; what was added has {size:.4g}"
        _hold(size > least * expected, message, "law.noise")
    else:
        only_rounding = max(1e-9, rounding * float(after.norm()))
        _hold(size <= only_rounding, f"{where}: noise was added, and none is declared", "law.noise")


# --- nothing else leaves ---

Seen = dict[str, list[str]]  # by observation point, hashes of the data that passed


def other_data(experiment: Experiment, row: int) -> Experiment:
    """Return an experiment in which all training examples of one row are replaced, targets included."""
    examples = experiment.own.examples
    chosen = torch.from_numpy(examples.parts[row])
    y = examples.y.clone()
    if isinstance(examples.x, SparseRows):
        x: Features = _other_rows(examples.x, examples.parts[row])
    else:
        x = examples.x.clone()
        x[chosen] = _other(torch.flip(x[chosen], [0]), experiment.public.n_tokens)
    y[chosen] = _other(y[chosen], experiment.public.n_classes)
    return replace(experiment, own=replace(experiment.own, examples=replace(examples, x=x, y=y)))


def _other_rows(x: SparseRows, rows: np.ndarray) -> SparseRows:
    """Return sparse rows of which some have other values at other features."""
    changed = x.matrix.tolil()
    changed[rows] = x.matrix[rows[::-1]][:, ::-1] * -0.7
    return SparseRows(changed.tocsr())


def _other(values: Tensor, count: int | None) -> Tensor:
    """Return numbers other than those given; tokens and classes stay below `count`."""
    if count is None or values.is_floating_point():
        return values * -0.7 + 0.3
    return (values + 1) % count


def seen_in_engine(experiment: Experiment) -> Seen:
    """Run in the engine; return the rows passed to exchanges, and the metrics, summary and models."""
    observed: Seen = {"exchange": []}
    perform = Engine.perform

    def watched(engine: Engine, exchange: Exchange) -> None:
        mixing = engine.cohort.mixing
        sent = {} if mixing is None else exchange.outgoing(engine.state, mixing)
        observed["exchange"] += [
            f"{link} {name} {_hash(row)}" for link, rows in sent.items() for name, row in rows.items()
        ]
        perform(engine, exchange)

    with tempfile.TemporaryDirectory() as folder, patch.object(Engine, "perform", watched):
        run(experiment, Path(folder) / "run")
        return observed | seen_in_folder(Path(folder) / "run")


def seen_in_folder(folder: Path) -> Seen:
    """Return the metrics, summary and models of a run's folder, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    records = [
        json.dumps({key: value for key, value in record.items() if key not in TIMES}) for record in [*lines, summary]
    ]
    models = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {"metrics and summary": records, "models": [models]}


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def assert_nothing_else_leaves(
    experiment: Experiment, watch: Callable[[Experiment], Seen] = seen_in_engine, peer: int = 0
) -> None:
    """Check that no output of a peer but its declared releases depends on its examples.

    Args:
        experiment: a short one, whose partition does not depend on labels.
        watch: runs an experiment and returns all that an observer sees.
        peer: whose examples are all replaced.

    Raises:
        BrokenLaw: the message names the place in which something differs.
    """
    with recording() as tape:
        expected = watch(experiment)
    with replaying(tape) as again:
        observed = watch(other_data(experiment, peer))

    moved = any(
        not torch.equal(one.raw[name], other.raw[name])
        for one, other in zip(tape.steps, again.steps, strict=True)
        for name in one.raw
    )
    message = "the other data change nothing: the law says nothing about this experiment"
    _hold(moved or not tape.steps, message, "law.same-data")

    assert observed.keys() == expected.keys()
    for place, value in expected.items():
        message = f"{place}: what leaves peer {peer} depends on examples beside what is declared"
        _hold(observed[place] == value, message, "law.leak")
