"""What a run would cost, before it starts: noise, ε over the rounds, memory, time, and what looks unsound."""

from __future__ import annotations

import math
import os
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from flower_privdec.evaluation import evaluate
from flower_privdec.experiment import Experiment
from flower_privdec.graphs import connectivity
from flower_privdec.runtime.engine import Engine
from flower_privdec.runtime.recorder import evaluation_rounds, json_number
from flower_privdec.wording import epsilon_text, memory, number, peer_ranges, setting

TIMED_ROUNDS = 5
TIMED_SECONDS = 20.0  # a slow model is timed over fewer rounds
WEAK_EPSILON = 10.0
HOPELESS_SIGNAL = 1.5  # in trials, digits at 2.4 reached 38 %, at 1.1 no more than 22 %, near chance
LARGEST_EVALUATION_SHARE = 0.3


def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Plan a run: compute its noise and ε, time a few rounds in memory; charge no ledger and write nothing.

    Returns:
        peers: for each, sigma (noise std on its averaged gradient at rounds 0, K/2 and K-1),
            noise_multiplier (at round 0), epsilon, epsilon_after_quarters, delta, and what a paper's
            formulas say (claimed_epsilon, mu_total, mu_0, mu_bar; None where there is none);
        optimal_rounds (None where no formula gives it), memory_bytes, seconds, topology (None when nothing is
        exchanged), warnings; infinite ε is the string "inf".
    """
    seconds, evaluation_share = estimate_seconds(experiment)
    needed = memory_bytes(experiment)
    topology = None if experiment.mixing is None else connectivity(experiment.mixing)
    return {
        "name": experiment.scenario.name,
        "rounds": experiment.scenario.rounds,
        "peers": peer_rows(experiment),
        "optimal_rounds": None,
        "memory_bytes": needed,
        "seconds": seconds,
        "topology": topology,
        "warnings": [
            *privacy_warnings(experiment),
            *network_warnings(experiment, topology),
            *cost_warnings(needed, evaluation_share),
        ],
    }


def noise_std(experiment: Experiment, round_index: int) -> np.ndarray:
    """Return σ of every peer: the noise std on each coordinate of its averaged gradient, [n_peers]."""
    plan = experiment.plan
    if plan is None:
        return np.zeros(experiment.scenario.n_peers)
    sigma = plan.clip_norm(round_index) * plan.noise_multiplier(round_index) / experiment.sampler.normalizer
    return np.asarray(sigma)


def peer_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the plan's row of every peer."""
    rounds, plan, private = experiment.scenario.rounds, experiment.plan, experiment.scenario.private
    n_peers = experiment.scenario.n_peers
    sigma = np.stack([noise_std(experiment, k) for k in (0, rounds // 2, rounds - 1)], axis=1)
    multiplier = np.zeros(n_peers) if plan is None else plan.noise_multiplier(0)
    quarters = [math.ceil(rounds * quarter / 4) for quarter in (1, 2, 3, 4)]
    spent = [[math.inf] * n_peers if plan is None else plan.epsilons(k) for k in quarters]
    delta = None if private is None else np.broadcast_to(private.delta, (n_peers,))
    return [
        {
            "peer": peer,
            "sigma": sigma[peer].tolist(),
            "noise_multiplier": float(multiplier[peer]),
            "epsilon": json_number(float(spent[-1][peer])),
            "epsilon_after_quarters": [json_number(float(values[peer])) for values in spent],
            "delta": None if delta is None else float(delta[peer]),
            "claimed_epsilon": None,
            "mu_total": None,
            "mu_0": None,
            "mu_bar": None,
        }
        for peer in range(n_peers)
    ]


def memory_bytes(experiment: Experiment) -> int:
    """Estimate the peak memory of the tensors of a run, in bytes; the interpreter and torch come on top.

    The sum of
    - state: max(3, slots + 1) buffers of n d numbers: the algorithm's rows, one to mix into, one to work in;
    - data: the training and test examples, and the training examples once more in the run's number type;
    - activations: for one round's batch of every peer, the input and twice the outputs of all leaf modules
      (forward and backward), capped by compute.memory_mib, which the gradient kernel keeps to.
    """
    scenario, dataset = experiment.scenario, experiment.dataset
    bytes_each = experiment.initial.element_size()
    rows = max(3, experiment.algorithm.slots + 1) * scenario.n_peers * experiment.initial.numel() * bytes_each
    data = sum(t.nbytes for t in (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test))
    data += dataset.x_train.numel() * bytes_each
    per_example = math.prod(dataset.input_shape) + 2 * outputs_per_example(experiment.module, dataset.input_shape)
    batch = int(experiment.sampler.normalizer.sum() * per_example * bytes_each)
    return int(rows + data + min(batch, scenario.compute.memory_mib << 20))


def outputs_per_example(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Count the numbers that all leaf modules together put out for one example."""
    counts: list[int] = []
    leaves = [leaf for leaf in module.modules() if not list(leaf.children())]
    handles = [leaf.register_forward_hook(lambda _m, _i, out: counts.append(out.numel())) for leaf in leaves]
    parameter = next(module.parameters())
    try:
        with torch.no_grad():
            module(torch.zeros((1, *input_shape), dtype=parameter.dtype, device=parameter.device))
    finally:
        for handle in handles:
            handle.remove()
    return sum(counts)


def estimate_seconds(experiment: Experiment) -> tuple[float, float]:
    """Estimate a run's training and evaluation time from a few rounds run in memory, with no ledger.

    Returns:
        Seconds in all, and the share of them that evaluation takes.
    """
    scenario = experiment.scenario
    torch.set_num_threads(scenario.compute.threads)
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.round()  # warm-up
    times: list[float] = []
    while len(times) < TIMED_ROUNDS and sum(times) < TIMED_SECONDS:
        times.append(_timed(engine.round))
    one_evaluation = _timed(lambda: evaluate(experiment, engine.state.rows, engine.state.round_index))
    training = median(times) * scenario.rounds
    evaluation = one_evaluation * len(evaluation_rounds(scenario.rounds, scenario.evaluation.every))
    return training + evaluation, evaluation / (training + evaluation)


def _timed(work: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def best_signal(experiment: Experiment) -> float:
    """Return the signal to noise ratio that a run could reach at best, averaged over the network.

        C sqrt(n K a) / (σ sqrt(d))

    The gradients of K rounds, clipped at C and all in one direction, add up to C K; the noise of n peers, a
    share a of them active, with std σ on each of d coordinates, adds up to a norm of σ sqrt(d K / (n a)).
    """
    plan, scenario = experiment.plan, experiment.scenario
    sigma = np.median(noise_std(experiment, scenario.rounds // 2))
    if plan is None or sigma == 0:
        return math.inf
    clip = float(np.median(plan.clip_norm(scenario.rounds // 2)))
    together = 1.0 if experiment.mixing is None else scenario.n_peers * (scenario.participation.fraction or 1.0)
    return clip * math.sqrt(together * scenario.rounds) / float(sigma * math.sqrt(experiment.initial.numel()))


def privacy_warnings(experiment: Experiment) -> list[str]:
    """Return what looks unsound about noise and budgets."""
    private, plan = experiment.scenario.private, experiment.plan
    if private is None or plan is None:
        return ["privacy is none: ε = ∞, messages and models may reveal any example"]
    found = []
    sizes = experiment.sampler.partition_sizes
    delta = np.broadcast_to(private.delta, (experiment.scenario.n_peers,))
    loose = np.flatnonzero(delta * sizes >= 1)
    if len(loose):
        first = loose[0]
        found.append(
            f"δ = {setting(float(delta[first]))} >= 1/J = 1/{sizes[first]} (peers "
            f"{peer_ranges(loose.tolist())}): revealing one example outright "
            f"would be allowed; take δ well below 1/{sizes[loose].max()}"
        )
    largest = max(plan.epsilons(experiment.scenario.rounds))
    if largest > WEAK_EPSILON:
        found.append(
            f"ε reaches {epsilon_text(json_number(largest))}, above {WEAK_EPSILON:g}: a weak guarantee; "
            "lower privacy.epsilon or the rounds"
        )
    signal = best_signal(experiment)
    if signal < HOPELESS_SIGNAL:
        found.append(
            f"signal to noise over the whole run is {number(signal)} even if all gradients agree, too little "
            "to learn from; take larger batches, more examples a peer, a smaller model or a larger ε"
        )
    return found


def network_warnings(experiment: Experiment, topology: dict[str, Any] | None) -> list[str]:
    """Return what to know about participation and graph."""
    scenario = experiment.scenario
    found = []
    if experiment.participation.kind != "all":
        active = int(experiment.participation.active(0).sum())
        found.append(
            f"{active} of {scenario.n_peers} peers are active in a round; who is active can be seen, so it "
            "amplifies no privacy, and a peer pays for each round in which it is active"
        )
    joint = topology["joint_connectivity"] if topology else None
    if joint is not None and joint > scenario.rounds:
        found.append(f"rounds={scenario.rounds} end before the graph has joined all peers ({joint} rounds): raise it")
    return found


def cost_warnings(needed: int, evaluation_share: float) -> list[str]:
    """Return what to know about memory and time."""
    found = []
    if evaluation_share > LARGEST_EVALUATION_SHARE:
        found.append(f"evaluation takes {100 * evaluation_share:.0f} % of the time; raise evaluation.every")
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * here:
        found.append(f"needs about {memory(needed)} and this machine has {memory(here)}")
    return found
