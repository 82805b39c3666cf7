"""How long a run would take, from a few rounds in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from flower_privdec.data import Sampler
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.recorder import count_evaluations
from flower_privdec.engine.workers import WorkerPool, start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.memory import outputs_per_example

TIMED_ROUNDS = 5
TIMED_SECONDS = 4.0  # a slow model is timed over fewer rounds
FILLED = 256  # examples a peer from which the filling of a table is timed, fewer of a large model
LEAST_TESTED = 64  # test examples from which an evaluation is timed, more of a small model
NUMBERS = 1 << 24  # what the layers may put out for them: larger models are timed on fewer examples


def estimate_seconds(experiment: Experiment) -> tuple[float, float]:
    """Estimate a run's training and evaluation time from a few rounds run in memory, with no ledger.

    With variance reduction a table is filled, or snapshots are taken, from all examples of a peer: that is
    timed on a part of them.

    Returns:
        Seconds in all, and the share of them that evaluation takes.
    """
    torch.set_num_threads(experiment.scenario.compute.threads)
    timed, shrunk = _shrunk(experiment)
    timed, fewer = _with_fewer_tests(timed)
    cohort = timed.cohort()
    began = time.perf_counter()
    state = timed.initial_state(cohort)
    filling = time.perf_counter() - began
    engine = start_engine(timed, cohort, state)
    try:
        whole, each = _rounds(experiment, engine)
        state = engine.collected()
        one = _timed(experiment, lambda: evaluate(timed, state.rows, state.round_index, timed.own, engine.trial))
    finally:
        engine.close()
    rounds = experiment.scenario.rounds
    training = each * rounds
    if experiment.algorithm.table is not None:
        passes = experiment.algorithm.full_passes(rounds)
        training += filling * shrunk + passes * max(0.0, whole * shrunk - each)
    evaluation = one * fewer * count_evaluations(rounds, experiment.scenario.evaluation.every)
    return training + evaluation, evaluation / (training + evaluation)


def _rounds(experiment: Experiment, engine: Engine | WorkerPool) -> tuple[float, float]:
    """Return the seconds of the first round, which warms up and of SVRG is a snapshot, and of one of the others."""
    whole = _timed(experiment, partial(engine.rounds, 1))
    times = [whole]
    while len(times) < min(1 + TIMED_ROUNDS, experiment.scenario.rounds) and sum(times) < TIMED_SECONDS:
        times.append(_timed(experiment, partial(engine.rounds, 1)))
    return whole, median(times[1:] or times)


def _shrunk(experiment: Experiment) -> tuple[Experiment, float]:
    """Return the experiment with fewer examples a peer, and how many times fewer, where a table takes them all."""
    if experiment.algorithm.table is None:
        return experiment, 1.0
    sampler = experiment.own.sampler
    batch = 1 if sampler.kind == "full" else math.ceil(float(sampler.normalizer.max()))
    kept = max(2 * batch, min(FILLED, _affordable(experiment) // experiment.scenario.n_peers))
    examples = replace(experiment.own.examples, parts=tuple(part[:kept] for part in experiment.own.examples.parts))
    size = None if sampler.kind == "full" else sampler.size or batch
    smaller = Sampler(sampler.kind, size, examples.sizes, sampler.keys, sampler.peers, small_peers="full")
    own = replace(experiment.own, examples=examples, sampler=smaller)
    return replace(experiment, own=own), float(sampler.partition_sizes.max() / examples.sizes.max())


def _affordable(experiment: Experiment) -> int:
    """Return how many examples the model can be tried on in little time."""
    return NUMBERS // outputs_per_example(experiment.module, experiment.public.x)


def _with_fewer_tests(experiment: Experiment) -> tuple[Experiment, float]:
    """Return the experiment with a part of the test set where the model is large, and how many times larger it is."""
    public = experiment.public
    part = min(len(public.y), max(LEAST_TESTED, _affordable(experiment)))
    return replace(experiment, public=replace(public, x=public.x[:part], y=public.y[:part])), len(public.y) / part


def _timed(experiment: Experiment, work: Callable[[], object]) -> float:
    _wait(experiment)
    began = time.perf_counter()
    work()
    _wait(experiment)
    return time.perf_counter() - began


def _wait(experiment: Experiment) -> None:
    """Wait until the device has done what it was given."""
    if experiment.device.type == "cuda":
        torch.cuda.synchronize()
