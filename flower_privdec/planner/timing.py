"""How long a run will take, from a few of its rounds, run in memory and with no ledger."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from flower_privdec.engine.workers import start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.memory_estimate import outputs_per_example

TIMED_ROUNDS = 5
TIMED_SECONDS = 4.0  # a slow model is timed over fewer rounds
FILLED = 256  # the most examples of each peer on which filling a table is timed
LEAST_TESTED = 64  # the fewest test examples on which an evaluation is timed
NUMBERS = 1 << 24  # what all layers may put out for the examples: a larger model is timed on fewer


def estimate_seconds(experiment: Experiment) -> tuple[float, float]:
    """Estimate a run's training and evaluation time from a few rounds run in memory, with no ledger.

    With variance reduction, all examples of a peer fill a table or make a snapshot: that is timed on some of them.

    Returns:
        Seconds in all, and the share of them that evaluation takes.
    """
    torch.set_num_threads(experiment.scenario.compute.threads)
    timed, shrunk = _shrunk(experiment)
    public = experiment.public
    test_size = min(len(public.y), max(LEAST_TESTED, _affordable(experiment)))
    timed = replace(timed, public=replace(public, x=public.x[:test_size], y=public.y[:test_size]))

    cohort = timed.cohort()
    began = time.perf_counter()
    state = timed.initial_state(cohort)
    filling = time.perf_counter() - began

    rounds = experiment.scenario.rounds
    engine = start_engine(timed, cohort, state)
    try:
        first = _timed(experiment, partial(engine.rounds, 1))  # warms up, compiles, takes the snapshot of SVRG
        later: list[float] = []
        while len(later) < min(TIMED_ROUNDS, rounds - 1) and sum(later) < TIMED_SECONDS:
            later.append(_timed(experiment, partial(engine.rounds, 1)))
        state = engine.collected()
        evaluating = _timed(experiment, lambda: evaluate(timed, state.rows, state.round_index, timed.own, engine.trial))
    finally:
        engine.close()

    per_round = median(later or [first])
    training = per_round * rounds
    if experiment.algorithm.table is not None:
        passes = experiment.algorithm.full_passes(rounds)
        training += filling * shrunk + passes * max(0.0, first * shrunk - per_round)

    evaluations = -(-rounds // experiment.scenario.evaluation.every)
    evaluation = evaluating * len(public.y) / test_size * evaluations
    return training + evaluation, evaluation / (training + evaluation)


def _shrunk(experiment: Experiment) -> tuple[Experiment, float]:
    """Return the experiment with fewer examples a peer if a table takes all of them, and how many times fewer."""
    if experiment.algorithm.table is None:
        return experiment, 1.0

    sampler = experiment.own.sampler
    is_full = sampler.kind == "full"
    batch = 1 if is_full else math.ceil(float(sampler.normalizer.max()))
    limit = max(2 * batch, min(FILLED, _affordable(experiment) // experiment.scenario.n_peers))
    examples = experiment.own.examples
    examples = replace(examples, parts=tuple(part[:limit] for part in examples.parts))

    section = sampler.section
    if not is_full:
        section = section.model_copy(update={"size": section.size or batch, "rate": None, "small_peers": "full"})
    smaller = sampler.like(section=section, partition_sizes=examples.sizes)
    own = replace(experiment.own, examples=examples, sampler=smaller)

    protection = own.protection
    if protection is not None and protection.pairs is not None:
        # Noise of pairs is planned for the sizes of batches, which by a rate differ between peers.
        before = protection.pairs
        pairs = before.for_batches(smaller.normalizer / sampler.normalizer)
        multipliers = protection.noise_multipliers / before.own * pairs.own
        own = replace(own, protection=replace(protection, pairs=pairs, noise_multipliers=multipliers))

    shrunk = float(sampler.partition_sizes.max() / examples.sizes.max())
    return replace(experiment, own=own), shrunk


def _affordable(experiment: Experiment) -> int:
    """Return how many examples the model can be evaluated on in little time."""
    return NUMBERS // outputs_per_example(experiment.module, experiment.public.x)


def _timed(experiment: Experiment, work: Callable[[], object]) -> float:
    """Return how many seconds a piece of work takes, with all that it starts on a GPU."""
    on_gpu = experiment.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
