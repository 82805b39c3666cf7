"""The plan of a run, with its estimated time; nothing is charged or written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from flower_privdec.data import Sampler
from flower_privdec.engine.recorder import count_evaluations
from flower_privdec.engine.workers import deal, start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.memory import memory_need, outputs_per_example, shortage, table_bytes
from flower_privdec.gradients import explain_kernel
from flower_privdec.planner.checks import (
    algorithm_warnings,
    cost_warnings,
    ledger_facts,
    ledger_warnings,
    network_warnings,
    peer_rows,
    privacy_warnings,
)
from flower_privdec.planner.optimum import optimum
from flower_privdec.reporting.graph_view import connectivity

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
    public = experiment.public
    test_size = min(len(public.y), max(LEAST_TESTED, _affordable(experiment)))
    timed = replace(timed, public=replace(public, x=public.x[:test_size], y=public.y[:test_size]))
    cohort = timed.cohort()
    began = time.perf_counter()
    state = timed.initial_state(cohort)
    filling = time.perf_counter() - began
    engine = start_engine(timed, cohort, state)
    rounds = experiment.scenario.rounds
    try:
        times = [_timed(experiment, partial(engine.rounds, 1))]  # the first warms up, and of SVRG is a snapshot
        while len(times) < min(1 + TIMED_ROUNDS, rounds) and sum(times) < TIMED_SECONDS:
            times.append(_timed(experiment, partial(engine.rounds, 1)))
        state = engine.collected()
        one = _timed(experiment, lambda: evaluate(timed, state.rows, state.round_index, timed.own, engine.trial))
    finally:
        engine.close()
    per_round = median(times[1:] or times)
    training = per_round * rounds
    if experiment.algorithm.table is not None:
        passes = experiment.algorithm.full_passes(rounds)
        training += filling * shrunk + passes * max(0.0, times[0] * shrunk - per_round)
    evaluations = count_evaluations(rounds, experiment.scenario.evaluation.every)
    evaluation = one * len(public.y) / test_size * evaluations
    return training + evaluation, evaluation / (training + evaluation)


def _shrunk(experiment: Experiment) -> tuple[Experiment, float]:
    """Return the experiment with fewer examples a peer, and how many times fewer, where a table takes them all."""
    if experiment.algorithm.table is None:
        return experiment, 1.0
    sampler, examples = experiment.own.sampler, experiment.own.examples
    batch = 1 if sampler.kind == "full" else math.ceil(float(sampler.normalizer.max()))
    limit = max(2 * batch, min(FILLED, _affordable(experiment) // experiment.scenario.n_peers))
    examples = replace(examples, parts=tuple(part[:limit] for part in examples.parts))
    size = None if sampler.kind == "full" else sampler.size or batch
    smaller = Sampler(sampler.kind, size, examples.sizes, sampler.keys, sampler.peers, small_peers="full")
    own = replace(experiment.own, examples=examples, sampler=smaller)
    return replace(experiment, own=own), float(sampler.partition_sizes.max() / examples.sizes.max())


def _affordable(experiment: Experiment) -> int:
    """Return how many examples the model can be evaluated on in little time."""
    return NUMBERS // outputs_per_example(experiment.module, experiment.public.x)


def _timed(experiment: Experiment, work: Callable[[], object]) -> float:
    cuda = experiment.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Plan a run: compute its noise and ε, time a few rounds in memory; charge no ledger and write nothing.

    Returns:
        peers: for each, sigma (noise std on its averaged gradient at rounds 0, K/2 and K-1),
            noise_multiplier (at round 0), epsilon, epsilon_after_quarters (of this run alone),
            epsilon_of_replies_to_one (of the replies to one neighbour alone, which are not all that it receives; None
            where all neighbours receive the same), delta, active_rounds and expected_rounds (None where all peers are
            active in all rounds), and the values of a paper's formulas (claimed_epsilon, claimed_after_quarters,
            mu_total, mu_0, mu_bar; None where there is none);
        ledger: where the scenario names one, its folder, the largest ε of any peer before and after this run;
        optimal_rounds and the other values of `planner.optimum`;
        gradients: which kernel computes them, and why that one;
        memory_bytes, memory (its parts), tables (bytes of each kind, for privsgp-vr) and table (the one used);
        workers (how many processes here), seconds (None where the run does not fit into memory), topology (None when
            nothing is exchanged), warnings; infinite ε is the string "inf".
    """
    scenario = experiment.scenario
    dealing, missing = deal(experiment), shortage(experiment)
    section, need = scenario.algorithm, memory_need(experiment, dealing.workers)
    seconds, evaluation_share = (None, 0.0) if missing else estimate_seconds(experiment)
    topology = None if experiment.mixing is None else connectivity(experiment.mixing)
    table, public = experiment.algorithm.table, experiment.public
    return {
        "name": scenario.name,
        "algorithm": section.name,
        "rounds": scenario.rounds,
        "peers": peer_rows(experiment),
        "ledger": ledger_facts(experiment),
        **optimum(experiment),
        "gradients": explain_kernel(experiment.module, public.input_shape, public.n_tokens, sparse=public.sparse),
        "memory_bytes": need.total,
        "memory": asdict(need),
        "tables": table_bytes(experiment) if table else None,
        "table": table,
        "workers": dealing.workers,
        "seconds": seconds,
        "topology": topology,
        "warnings": [
            *privacy_warnings(experiment),
            *ledger_warnings(experiment),
            *network_warnings(experiment, topology),
            *algorithm_warnings(experiment),
            *cost_warnings(missing, seconds, evaluation_share),
        ],
    }
