"""The plan of a run: its noise, ε, claims, best number of rounds, cost and warnings; nothing is charged or written.

The best number of rounds minimises PrivSGP-VR's error bound (eq. 12). An estimate of its constants from the training
examples would be a release that no ledger counts. So every constant is measured at x0 on a keyed sample of the test
set, which is public here:

- L: the largest absolute eigenvalue of the Hessian of the mean loss, by power iteration on exact
  Hessian-vector products. It is the smoothness at x0, a lower bound of that along a run.
- F0: the mean loss, an upper bound of f(x0) - f* because no loss here is negative.
- b²: the spread of the peers' gradients, (1/n) Σ_i ‖∇f_i - ∇f‖², if they had parts of the test set, partitioned as the
  training set is. Each part is halved, and the product of the two halves' deviations is free of the bias that the
  noise of small parts would add; a negative result counts as 0.
- ‖x0‖², d and J, the mean number of examples of a peer, need no data but the public numbers of examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.errors import RAISED_BY_USERS, PrivdecError, ScenarioError
from flower_privdec.common.formatting import duration, epsilon_text, number, peer_ranges, setting
from flower_privdec.data import partition
from flower_privdec.engine.workers import partition_cohort, start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.memory_estimate import memory_need, outputs_per_example, shortage, table_bytes
from flower_privdec.experiment.spent import budget_note, json_number, shortfall
from flower_privdec.gradients import explain_kernel
from flower_privdec.gradients.protocol import batchable, inputs_like, reason
from flower_privdec.graph.mixing import MOST_MEASURED
from flower_privdec.graph.topology import activity
from flower_privdec.models import trained
from flower_privdec.planner.pairwise import least_own_noise
from flower_privdec.privacy.accountant.accounting import epsilon, loose_delta
from flower_privdec.privacy.ledger.spending import spending_of
from flower_privdec.privacy.mechanism.cancelling import best_strength
from flower_privdec.privacy.mechanism.clip_schedule import build_schedule
from flower_privdec.privacy.mechanism.paper import optimal_rounds
from flower_privdec.privacy.mechanism.protection import breaches
from flower_privdec.pushsum.lockstep import final_rounds
from flower_privdec.reporting.plots import connectivity
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import SparseRows
from flower_privdec.scenario.sections import PlanSection
from flower_privdec.tasks.losses import Loss

WEAK_EPSILON = 10.0
HOPELESS_SIGNAL = 1.5  # in trials, digits at 2.4 reached 38 %, at 1.1 no more than 22 %, near chance
LARGEST_EVALUATION_SHARE = 0.3
LEAST_EVALUATION = 10.0  # seconds, below which its share of the time does not matter
LEAST_INCREASE = 1.01  # of ε over Poisson sampling, below which there is no warning


def best_signal(experiment: Experiment) -> float:
    """Return the signal to noise ratio that a run could reach at best, averaged over the network.

        C sqrt(n T a) / (σ sqrt(d))

    The gradients of T steps, clipped at C and all in one direction, add up to C T; the noise of n peers, a share a of
    them active, with std σ on each of d coordinates, adds up to a norm of σ sqrt(d T / (n a)). C and σ are those of
    the middle round.
    """
    plan = experiment.own.protection
    scenario = experiment.scenario
    sigma = np.median(noise_std(experiment, scenario.rounds // 2))
    if plan is None or sigma == 0:
        return math.inf
    per_round = experiment.algorithm.steps_per_round
    clip = float(np.median(plan.clip_norm(scenario.rounds // 2 * per_round)))
    steps = scenario.rounds * per_round
    together = 1.0 if experiment.mixing is None else float(experiment.participation.chances.sum())
    return clip * math.sqrt(together * steps) / float(sigma * math.sqrt(experiment.initial.numel()))


def privacy_warnings(experiment: Experiment) -> list[str]:
    """Return warnings about noise and budgets, and about a paper's formula where it does not hold."""
    plan = experiment.own.protection
    private = experiment.scenario.private
    rounds = experiment.scenario.rounds
    if plan is None or private is None:
        return ["privacy is none: ε = ∞, messages and models may reveal any example"]
    spent = plan.epsilons(rounds)
    sizes = experiment.own.sampler.partition_sizes
    warnings = []
    claims = {peer: claim for peer, claim in enumerate(plan.claims) if claim}
    above = [peer for peer, claim in claims.items() if spent[peer] > claim.epsilon]
    if above:
        claimed = _range([setting(function([claim.epsilon for claim in claims.values()])) for function in (min, max)])
        exact = _range([epsilon_text(json_number(function(spent[peer] for peer in above))) for function in (min, max)])
        warnings.append(
            f"calibration paper claims ε = {claimed}; the accountant gives ε = {exact} for the same noise (peers "
            f"{peer_ranges(above)}): the claim does not hold; calibration rigorous keeps the budget"
        )
    if any(claim.each_round for claim in claims.values()):
        warnings.append(
            f"eq. 27 of PDSL is for one round, and there are {rounds:,}; it divides by φ̂_min, here taken to be "
            f"{setting(private.phi_min)}, which the paper's own eq. 19 makes 0, and the noise infinite; use "
            "calibration rigorous"
        )
    gaussian = [claim for claim in claims.values() if claim.mu_total is not None]
    needed = 1 / float(experiment.own.sampler.sampling_rate.min()) ** 2
    if gaussian and rounds < needed:
        formula = "Proposition 4" if gaussian[0].mu_0 is None else "eq. 8"
        warnings.append(
            f"{formula} of Dyn-D2P is a limit for K far above (J/b)² = {needed:,.0f}, and rounds={rounds:,} is "
            f"{'below' if needed < 2 * rounds else f'{needed / rounds:,.0f} times below'} it; use calibration rigorous"
        )
    warnings += breaches(plan, with_least=True).values()
    delta = np.broadcast_to(private.delta, sizes.shape)
    loose = np.flatnonzero(delta * sizes >= 1)
    if len(loose):
        first = loose[0]
        peers = f" (peers {peer_ranges(loose.tolist())})"
        warnings.append(loose_delta(float(delta[first]), int(sizes[first]), peers, int(sizes[loose].max())))
    account = plan.accounts[int(np.argmax(spent))]
    releases = [spend.release for spend in account.spends]
    if not math.isinf(max(spent)) and any(release.sampling == "uniform" for release in releases):
        poisson = epsilon([replace(release, sampling="poisson") for release in releases], account.delta)
        if max(spent) > LEAST_INCREASE * poisson:
            warnings.append(
                f"data.batch.sampling uniform costs ε = {epsilon_text(max(spent))} where poisson at the same noise "
                f"costs {epsilon_text(poisson)}; use poisson"
            )
    if max(spent) > WEAK_EPSILON:
        warnings.append(
            f"ε reaches {epsilon_text(json_number(max(spent)))}, above {WEAK_EPSILON:g}: a weak guarantee; "
            "lower privacy.epsilon or the rounds"
        )
    signal = best_signal(experiment)
    if signal < HOPELESS_SIGNAL:
        warnings.append(
            f"signal to noise over the whole run is {number(signal)} even if all gradients agree, too little "
            "to learn from; take larger batches, more examples a peer, a smaller model or a larger ε"
        )
    return warnings


def _range(ends: Sequence[str]) -> str:
    return "–".join(dict.fromkeys(ends))


def ledger_facts(experiment: Experiment) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the ledger's folder and the largest ε of any peer before and after the run, and which steps it refuses.

    A budget, or what other runs have spent of it, may end the run's steps before its plan does.
    """
    private = experiment.scenario.private
    plan = experiment.own.protection
    facts = note = None
    folder = None if private is None else private.ledger or experiment.inherited
    if private is not None and plan is not None and folder is not None:
        name = experiment.public.name
        run = experiment.own.run
        spending = spending_of(folder, name, run, plan.accounts, experiment.first_step)
        before, after = (json_number(float(spending.epsilons(steps).max())) for steps in (0, spending.steps))
        facts = {"folder": str(folder), "epsilon_before": before, "epsilon_after": after}
        note = budget_note(spending, experiment.algorithm.steps_per_round)
    if note is None and plan is not None:  # noise from the scenario may use the budget up before the last round
        rounds = experiment.scenario.rounds
        ends = np.array([account.spends[-1].to_step if account.spends else 0 for account in plan.accounts])
        active = activity(experiment.participation, rounds)
        within_budget = np.arange(rounds)[:, None] * plan.steps_per_round < ends
        note = shortfall(experiment.participation, (active & within_budget).sum(axis=0).tolist(), rounds)
    return facts, [] if note is None else [note]


def final_mixing(experiment: Experiment) -> int | None:
    """Return how many rounds of mixing without steps follow the last where the peers are a network's; None for none.

    It is None too where the graph is too large to measure.
    """
    scenario = experiment.scenario
    mixing = experiment.mixing
    setting = scenario.network.final_mixing
    if mixing is None or scenario.topology.name == "server" or (setting == "auto" and mixing.n_peers > MOST_MEASURED):
        return None
    return final_rounds(mixing, scenario.rounds, setting)[0]


def network_warnings(experiment: Experiment, topology: dict[str, Any] | None) -> list[str]:
    """Return warnings about participation, graph, and the algorithm's settings on them."""
    scenario = experiment.scenario
    warnings = []
    active = int(experiment.participation.active(0).sum())
    if experiment.participation.kind != "all":
        warnings.append(
            f"{active} of {scenario.n_peers} peers are active in a round; an adversary sees who is active, so that "
            "amplifies no privacy, and a peer pays for each round in which it is active"
        )
    joint = topology["joint_connectivity"] if topology else None
    if joint is not None and joint > scenario.rounds:
        warnings.append(
            f"rounds={scenario.rounds} end before the graph has joined all peers ({joint} rounds): raise it"
        )
    server = scenario.topology.name == "server"
    return warnings + experiment.algorithm.cautions(active, scenario.n_peers, scenario.rounds, server=server)


def cost_warnings(shortage: str | None, seconds: float | None, evaluation_share: float) -> list[str]:
    """Return warnings about memory and time."""
    warnings = [] if shortage is None else [f"a run would be refused here: {shortage}"]
    evaluation = evaluation_share * (seconds or 0.0)
    if evaluation_share > LARGEST_EVALUATION_SHARE and evaluation > LEAST_EVALUATION:
        warnings.append(
            f"evaluation takes {100 * evaluation_share:.0f} % of the time, about {duration(evaluation)}; "
            "raise evaluation.every"
        )
    return warnings


def noise_std(experiment: Experiment, round_index: int) -> np.ndarray:
    """Return σ of every peer in a round: the noise std on each coordinate of its averaged gradient, [n_peers]."""
    plan = experiment.own.protection
    if plan is None:
        return np.zeros(experiment.scenario.n_peers)
    step = round_index * experiment.algorithm.steps_per_round
    sigma = plan.clip_norm(step) * plan.noise_multiplier(step) / experiment.own.sampler.normalizer
    return np.asarray(sigma)


def peer_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the plan's row of every peer; see `make_plan`."""
    rounds = experiment.scenario.rounds
    plan = experiment.own.protection
    private = experiment.scenario.private
    n_peers = experiment.scenario.n_peers
    participation = experiment.participation
    sigma = np.stack([noise_std(experiment, k) for k in (0, rounds // 2, rounds - 1)], axis=1)
    multiplier = np.zeros(n_peers) if plan is None else plan.noise_multiplier(0)
    quarters = [math.ceil(rounds * quarter / 4) for quarter in (1, 2, 3, 4)]
    spent = [[math.inf] * n_peers if plan is None else plan.epsilons(k) for k in quarters]
    delta = None if private is None else np.broadcast_to(private.delta, (n_peers,))
    partial = participation.kind != "all"
    active = activity(participation, rounds).sum(axis=0)
    others = {} if plan is None else {name: plan.epsilons(rounds, one) for name, one in plan.others.items()}
    replies = others.get("replies")
    larger = others.get("if_all_collude")
    dynamics = private is not None and (experiment.scenario.algorithm.own_schedule or private.schedule) is not None
    exponential = build_schedule(experiment.scenario).exponential if dynamics else None

    def claimed(peer: int) -> dict[str, Any]:
        """Return the paper's claims; μ_0 = C_0 / σ_0 is Dyn-D2P's budget of round 0, by eq. 8 or by the accountant.

        Where ρ_μ = 1 it is that of every round, μ̄ (eq. 9).
        """
        claim = None if plan is None else plan.claims[peer]
        mu_0 = claim and claim.mu_0
        if dynamics and mu_0 is None and multiplier[peer] > 0:
            mu_0 = 1 / float(multiplier[peer])
        return {
            "claimed_epsilon": claim and claim.epsilon,
            "claimed_after_quarters": claim and claim.quarters and list(claim.quarters),
            "mu_total": claim and claim.mu_total,
            "mu_0": mu_0,
            "mu_bar": mu_0 if exponential is not None and exponential[1] == 1.0 else None,
        }

    return [
        {
            "peer": peer,
            "sigma": sigma[peer].tolist(),
            "noise_multiplier": float(multiplier[peer]),
            "epsilon": json_number(float(spent[-1][peer])),
            "epsilon_after_quarters": [json_number(float(values[peer])) for values in spent],
            "epsilon_of_replies_to_one": json_number(replies[peer]) if replies else None,
            "epsilon_if_all_collude": json_number(larger[peer]) if larger else None,
            "delta": None if delta is None else float(delta[peer]),
            "active_rounds": int(active[peer]) if partial else None,
            "expected_rounds": rounds * float(participation.chances[peer]) if partial else None,
            **claimed(peer),
        }
        for peer in range(n_peers)
    ]


ITERATIONS = 20  # of the power method, at most
SETTLED = 5e-3  # the relative change of its eigenvalue at which it stops
LEAST_SAMPLE, MOST_SAMPLE = 64, 2048  # examples
MISSING = "planner.constant-missing"
SAMPLE_NUMBERS = 1 << 22  # numbers that the layers may put out for a sample: larger models get smaller samples


@dataclass(frozen=True)
class Objective:
    """The mean loss at a module's own parameters, on public examples x and y.

    Attention and recurrent layers are computed by operations that have second derivatives.
    """

    module: nn.Module
    loss: Loss
    x: Tensor
    y: Tensor

    def value(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the mean loss of some examples, a scalar that autograd can differentiate."""
        with batchable(self.module):
            return self.loss.value(self.module(self.x[rows]), self.y[rows]).mean()

    def gradient(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return its gradient, [d]."""
        return _flat(torch.autograd.grad(self.value(rows), list(trained(self.module).values())))

    def curvature(self, start: Tensor) -> float:
        """Return the largest absolute eigenvalue of the Hessian, by power iteration from a vector [d]."""
        parameters = list(trained(self.module).values())
        gradients = torch.autograd.grad(self.value(), parameters, create_graph=True)
        if not any(part.requires_grad for part in gradients):
            return 0.0
        gradient = _flat(gradients)
        direction = start / start.norm()
        eigenvalue = 0.0
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        for _ in range(ITERATIONS):
            product = _flat(torch.autograd.grad(gradient @ direction, parameters, **options))
            previous = eigenvalue
            eigenvalue = float(product.norm())
            if eigenvalue == 0 or abs(eigenvalue - previous) <= SETTLED * eigenvalue:
                break
            direction = product / eigenvalue
        return eigenvalue


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def public_sample(experiment: Experiment) -> Objective:
    """Return the loss at x0 on a keyed sample of the test set."""
    public = experiment.public
    module = experiment.module
    size = SAMPLE_NUMBERS // outputs_per_example(module, public.x)
    size = min(len(public.y), max(LEAST_SAMPLE, min(MOST_SAMPLE, size)))
    rows = keyed_generator(experiment.scenario.seed_of("data"), "plan sample").permutation(len(public.y))[:size]
    x = public.x[rows]
    x = inputs_like(x.dense() if isinstance(x, SparseRows) else x, experiment.initial)
    return Objective(module, experiment.loss, x, public.y[rows].to(x.device))


def initial_gap(objective: Objective) -> float:
    """Estimate F0; refuse a loss that is not positive, as a user's own may be."""
    gap = objective.value().item()
    if not gap > 0:
        raise ScenarioError(
            f"plan.initial_gap is missing and the loss at x0 is {gap:.3g}, no upper bound on f(x0) - f*: set it",
            code=MISSING,
        )
    return gap


def smoothness(experiment: Experiment, objective: Objective) -> float:
    """Estimate L; refuse where the Hessian vanishes at x0, as of a hinge loss."""
    generator = keyed_generator(experiment.scenario.seed_of("model"), "plan direction")
    start = torch.as_tensor(generator.standard_normal(experiment.initial.numel())).to(experiment.initial)
    curvature = objective.curvature(start)
    if not curvature > 0:
        raise ScenarioError(
            "plan.smoothness is missing and the loss has no curvature at x0 to estimate it by: add it", code=MISSING
        )
    return curvature


def heterogeneity(experiment: Experiment, objective: Objective) -> float:
    """Estimate b²; refuse where the sample cannot be partitioned as the training set is."""
    scenario = experiment.scenario
    section = scenario.data.partition
    sizes = experiment.own.sampler.partition_sizes
    if section.kind == "sizes":
        section = section.model_copy(update={"sizes": (sizes / sizes.sum()).tolist()})
    if section.min_size is not None:
        least = max(1, min(section.min_size, len(objective.y) // scenario.n_peers))
        section = section.model_copy(update={"min_size": least})
    y = objective.y.cpu().numpy()
    try:
        parts = partition(y, scenario.n_peers, section, scenario.seed_of("data"))
    except ScenarioError as error:
        raise ScenarioError(
            f"plan.heterogeneity is missing and cannot be estimated ({error}): add it", code=MISSING
        ) from error
    if min(map(len, parts)) < 2:
        raise ScenarioError(
            f"plan.heterogeneity is missing and {len(y)} test examples are too few to estimate it for "
            f"{scenario.n_peers} peers: add it",
            code=MISSING,
        )
    halves = [torch.stack([objective.gradient(part[half::2]) for part in parts]) for half in (0, 1)]
    first, second = (half - half.mean(0) for half in halves)
    return max(0.0, float((first * second).sum(1).mean()))


CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def optimum(experiment: Experiment) -> dict[str, Any]:
    """Return PrivSGP-VR's best number of rounds, for push-sum algorithms with a budget.

        K* = (13 F0 + 6 L ‖x0‖² + 18 L b²) J² n / (216 L d c_2² G² Σ_i log(1/δ_i) / ε_i²)

    For peers of unequal J_i the terms of the sum are over J_i², as eq. 11 makes their noise. The bound is that
    of PrivSGP-VR with batches of one; for other push-sum algorithms it is a guide.

    Returns:
        optimal_rounds: K*, rounded; None where there is no budget, no push-sum, or a constant is missing that
            cannot be estimated (optimal_rounds_note says which).
        optimal_rounds_curve: [ε, K*] for all peers at the same ε.
        optimal_rounds_constants: for each constant its value and where it is from: given, estimated, clip norm
            or scenario.
        accountant: under calibration rigorous the c_2 with which eq. 11 gives the plan's noise at its K, and K* with
            that c_2; else None.

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    private = experiment.scenario.private
    unknown: dict[str, Any] = dict.fromkeys(("optimal_rounds", "optimal_rounds_note", "accountant"))
    unknown |= {"optimal_rounds_curve": [], "optimal_rounds_constants": {}}
    if experiment.algorithm.weights != "column-stochastic" or private is None or private.epsilon is None:
        return unknown
    try:
        constants = find_constants(experiment)
    except ScenarioError as error:
        return unknown | {"optimal_rounds_note": str(error)}
    rounds = experiment.scenario.rounds
    n_peers = experiment.scenario.n_peers
    epsilons = np.broadcast_to(np.asarray(private.epsilon, dtype=np.float64), (n_peers,))
    deltas = np.broadcast_to(np.asarray(private.delta), (n_peers,))
    value = {name: number for name, (number, _) in constants.items()}

    def best(epsilons: np.ndarray, c_2: float) -> int:
        return max(1, round(optimal_rounds(**value, c_2=c_2, epsilons=epsilons, deltas=deltas)))

    accountant = None
    if private.calibration != "paper" and private.noise_multiplier is None:
        size = experiment.own.sampler.partition_sizes
        per_unit = 3 * value["gradient_bound"] * np.sqrt(rounds * np.log(1 / np.asarray(private.delta)))
        c_2 = float(np.median(noise_std(experiment, rounds // 2) / (per_unit / (size * epsilons))))
        accountant = {"c_2": c_2, "optimal_rounds": best(epsilons, c_2)} if c_2 > 0 else None
    curve = sorted({*CURVE, *([float(epsilons[0])] if np.ptp(epsilons) == 0 else [])})
    return {
        "optimal_rounds": best(epsilons, private.c_2),
        "optimal_rounds_curve": [[epsilon, best(np.full_like(epsilons, epsilon), private.c_2)] for epsilon in curve],
        "optimal_rounds_constants": {
            name: {"value": v, "from": source}
            for name, (v, source) in (constants | {"c_2": (private.c_2, "scenario")}).items()
        },
        "optimal_rounds_note": None,
        "accountant": accountant,
    }


Constants = dict[str, tuple[float, str]]


def find_constants(experiment: Experiment) -> Constants:
    """Return every constant of eq. 12 but c_2 and the budgets, each with its source.

    Raises:
        ScenarioError: where one is missing and cannot be estimated: the model may have no second derivatives.
    """
    section = experiment.scenario.plan or PlanSection()
    initial = experiment.initial
    objective = cache(partial(public_sample, experiment))
    estimates: dict[str, tuple[str, Callable[[], float]]] = {
        "smoothness": ("estimated", lambda: smoothness(experiment, objective())),
        "gradient_bound": ("clip norm", lambda: float(build_schedule(experiment.scenario).clip_norm.max())),
        "initial_gap": ("estimated", lambda: initial_gap(objective())),
        "heterogeneity": ("estimated", lambda: heterogeneity(experiment, objective())),
        "initial_norm_squared": ("scenario", lambda: float(initial.double().square().sum())),
        "dimension": ("scenario", initial.numel),
        "dataset_size": ("scenario", lambda: _dataset_size(experiment)),
    }
    constants: Constants = {}
    for name, (source, estimate) in estimates.items():
        given = getattr(section, name)
        try:
            constants[name] = (estimate(), source) if given is None else (given, "given")
        except PrivdecError:
            raise
        except RAISED_BY_USERS as error:  # of the user's forward, differentiated twice
            why = f"plan.{name} is missing and cannot be estimated ({reason(error)}): set it, or do without K*"
            raise ScenarioError(why, code=MISSING) from None
    return constants


def _dataset_size(experiment: Experiment) -> float:
    """Return J with J^-2 the mean of J_i^-2, peers weighted as eq. 12 does, log(1/δ_i) / ε_i²."""
    private = experiment.scenario.private
    sizes = experiment.own.sampler.partition_sizes
    if private is None or private.epsilon is None:
        return float(sizes.mean())
    weight = np.log(1 / np.asarray(private.delta)) / np.asarray(private.epsilon) ** 2
    weight = np.broadcast_to(weight, sizes.shape)
    size = math.sqrt(float(weight.sum() / (weight / sizes.astype(np.float64) ** 2).sum()))
    return float(round(size)) if math.isclose(size, round(size), rel_tol=1e-9) else size


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
        times = [_timed(experiment, partial(engine.rounds, 1))]  # warms up, compiles, takes the snapshot of SVRG
        while len(times) < min(1 + TIMED_ROUNDS, rounds) and sum(times[1:]) < TIMED_SECONDS:
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
    evaluation = one * len(public.y) / test_size * -(-rounds // experiment.scenario.evaluation.every)
    return training + evaluation, evaluation / (training + evaluation)


def _shrunk(experiment: Experiment) -> tuple[Experiment, float]:
    """Return the experiment with fewer examples a peer, and how many times fewer, where a table takes them all."""
    if experiment.algorithm.table is None:
        return experiment, 1.0
    sampler = experiment.own.sampler
    examples = experiment.own.examples
    batch = 1 if sampler.kind == "full" else math.ceil(float(sampler.normalizer.max()))
    limit = max(2 * batch, min(FILLED, _affordable(experiment) // experiment.scenario.n_peers))
    examples = replace(examples, parts=tuple(part[:limit] for part in examples.parts))
    section = sampler.section
    if sampler.kind != "full":
        size = section.size or batch
        section = section.model_copy(update={"size": size, "rate": None, "small_peers": "full"})
    smaller = sampler.like(section=section, partition_sizes=examples.sizes)
    own = replace(experiment.own, examples=examples, sampler=smaller)
    protection = own.protection
    if protection is not None and protection.pairs is not None:
        # Noise of pairs is planned for the sizes of batches, which by a rate differ between peers.
        before = protection.pairs
        pairs = before.for_batches(smaller.normalizer / sampler.normalizer)
        multipliers = protection.noise_multipliers / before.own * pairs.own
        own = replace(own, protection=replace(protection, pairs=pairs, noise_multipliers=multipliers))
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


def pair_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return what noise that cancels between peers gives, of which `make_plan` tells; None without."""
    protection = experiment.own.protection
    pairs = None if protection is None else protection.pairs
    if pairs is None:
        return None
    degrees = np.bincount(pairs.edges.ravel(), minlength=experiment.scenario.n_peers)
    first = int(pairs.needed.any(axis=1).argmax())
    own = pairs.own[first]
    needed = pairs.needed[first]
    least = least_own_noise(pairs, first)
    alone = float(np.linalg.norm(needed)) or 1.0
    active = max(1, int((needed > 0).sum()))
    return {
        "colluding": pairs.colluding,
        "secrets_of_a_peer": [int(degrees.min()), int(degrees.max())],
        "strength": pairs.strength,
        "network_strength": best_strength(pairs.trades, deployed=True) if pairs.trades else pairs.strength,
        "mode_advice": _mode_advice(experiment),
        "mean_noise": float(np.linalg.norm(own * needed)) / alone,
        "least_mean_noise": None if least is None else least / alone,
        "trusted_server": float(1 / np.sqrt(active)),
        "trades": [
            {
                "strength": one.strength,
                "mean_noise": math.sqrt(one.mean * active),
                "models_noise": math.sqrt(one.models),
            }
            for one in pairs.trades
        ],
    }


def _mode_advice(experiment: Experiment) -> str | None:
    """Return why a network of peers cannot run this in asynchronous mode, and what to set; None where it can."""
    scenario = experiment.scenario
    mixing = experiment.mixing
    steps = experiment.algorithm.mixing_steps
    if mixing is None or scenario.network.mode == "synchronous" or (mixing.sends_shares and steps == 1):
        return None
    asynchronous = "network.mode=asynchronous"
    why = (
        f"counts shares once a round and topology.mixing_steps={steps} sends them {steps} times"
        if mixing.sends_shares
        else f"loses what comes late and algorithm.name={scenario.algorithm.name} conserves no sum then"
    )
    return f"{asynchronous} {why}: a network needs network.mode=synchronous"


def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Plan a run: compute its noise and ε, time a few rounds in memory; charge no ledger and write nothing.

    Returns:
        what the attributes of `flower_privdec.api.running.Plan` describe; of each peer also active_rounds and
            expected_rounds (None where all peers are active in all rounds) and claimed_after_quarters;
        the other values of `optimum`;
        pairs: of noise that cancels between peers its strength, and that which it has on a network, mode_advice where a
            network needs another mode than the scenario's, the number of secrets of a peer (least and most), the noise
            of the mean over that of independent noise, a lower bound on that with these pairs (None for too many sets
            of colluders), what a trusted server's would be, and the trades of other strengths: that noise, and how much
            the pairs' noise is in the peers' models at their steps, over the noise that each would need by itself; None
            without;
        gradients: which kernel computes them, and why that one;
        memory (its parts), tables (bytes of each kind, for privsgp-vr), table (the one used) and workers (how many
            processes here); infinite ε is the string "inf".
    """
    scenario = experiment.scenario
    partitioning = partition_cohort(experiment)
    missing = shortage(experiment)
    section = scenario.algorithm
    need = memory_need(experiment, partitioning.workers)
    seconds, evaluation_share = (None, 0.0) if missing else estimate_seconds(experiment)
    topology = None if experiment.mixing is None else connectivity(experiment.mixing)
    if topology is not None:
        topology["final_mixing"] = final_mixing(experiment)
    table = experiment.algorithm.table
    ledger, ledger_warnings = ledger_facts(experiment)
    return {
        "name": scenario.name,
        "algorithm": section.name,
        "rounds": scenario.rounds,
        "peers": peer_rows(experiment),
        "ledger": ledger,
        **optimum(experiment),
        "pairs": pair_facts(experiment),
        "gradients": explain_kernel(experiment.kernel),
        "memory_bytes": need.total,
        "memory": asdict(need),
        "tables": table_bytes(experiment) if table else None,
        "table": table,
        "workers": partitioning.workers,
        "seconds": seconds,
        "topology": topology,
        "warnings": [
            *privacy_warnings(experiment),
            *ledger_warnings,
            *network_warnings(experiment, topology),
            *cost_warnings(missing, seconds, evaluation_share),
        ],
    }
