"""What looks unsound or dear about a scenario, in sentences with their remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from flower_privdec.common.formatting import duration, epsilon_text, number, peer_ranges, setting
from flower_privdec.engine.spent import budget_note, json_number, shortfall
from flower_privdec.experiment import Experiment
from flower_privdec.planner.peers import ledger_spending, noise_std
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism.protection import Protection, breaches

WEAK_EPSILON = 10.0
HOPELESS_SIGNAL = 1.5  # in trials, digits at 2.4 reached 38 %, at 1.1 no more than 22 %, near chance
LARGEST_EVALUATION_SHARE = 0.3
WORTH_A_WORD = 10.0  # seconds of evaluation; below this the share of evaluation does not matter
DEARER = 1.01  # how much more ε than under Poisson sampling is worth a word


def best_signal(experiment: Experiment) -> float:
    """Return the signal to noise ratio that a run could reach at best, averaged over the network.

        C sqrt(n T a) / (σ sqrt(d))

    The gradients of T steps, clipped at C and all in one direction, add up to C T; the noise of n peers, a share a of
    them active, with std σ on each of d coordinates, adds up to a norm of σ sqrt(d T / (n a)). C and σ are those of
    the middle round.
    """
    plan, scenario = experiment.own.protection, experiment.scenario
    sigma = np.median(noise_std(experiment, scenario.rounds // 2))
    if plan is None or sigma == 0:
        return math.inf
    per_round = experiment.algorithm.steps_per_round
    clip, steps = float(np.median(plan.clip_norm(scenario.rounds // 2 * per_round))), scenario.rounds * per_round
    together = 1.0 if experiment.mixing is None else float(experiment.participation.chances.sum())
    return clip * math.sqrt(together * steps) / float(sigma * math.sqrt(experiment.initial.numel()))


def privacy_warnings(experiment: Experiment) -> list[str]:
    """Return what looks unsound about noise and budgets."""
    plan = experiment.own.protection
    if plan is None:
        return ["privacy is none: ε = ∞, messages and models may reveal any example"]
    spent = plan.epsilons(experiment.scenario.rounds)
    warnings = [
        *_claims(plan, spent),
        *breaches(plan),
        *_one_round(experiment, plan),
        *_limits(experiment, plan),
        *_loose_delta(experiment),
        *_sampling(plan, spent),
    ]
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


def ledger_warnings(experiment: Experiment) -> list[str]:
    """Return where a budget, or what other runs have spent of it, ends the run's steps before its plan does."""
    spending = ledger_spending(experiment)
    note = None if spending is None else budget_note(spending, experiment.algorithm.steps_per_round)
    note = note or _ends_early(experiment)
    return [] if note is None else [note]


def _ends_early(experiment: Experiment) -> str | None:
    """Say where noise that is given uses the budget up before the last round."""
    protection, rounds = experiment.own.protection, experiment.scenario.rounds
    if protection is None:
        return None
    ends = np.array([account.spends[-1].to_step if account.spends else 0 for account in protection.accounts])
    active = np.stack([experiment.participation.active(k) for k in range(rounds)])
    within_budget = np.arange(rounds)[:, None] * protection.steps_per_round < ends
    return shortfall(experiment.participation, (active & within_budget).sum(axis=0).tolist(), rounds)


def _claims(plan: Protection, spent: list[float]) -> list[str]:
    """Say where the accountant's ε is above what a paper's formula claims."""
    above = [peer for peer, claim in enumerate(plan.claims) if claim and spent[peer] > claim.epsilon]
    if not above:
        return []
    claims = [claim.epsilon for claim in plan.claims if claim]
    exact = [spent[peer] for peer in above]
    return [
        f"calibration paper claims ε = {_span(min(claims), max(claims), setting)}; the accountant gives ε = "
        f"{_span(min(exact), max(exact), lambda value: epsilon_text(json_number(value)))} for the same noise (peers "
        f"{peer_ranges(above)}): the claim does not hold; calibration rigorous keeps the budget"
    ]


def _one_round(experiment: Experiment, plan: Protection) -> list[str]:
    """Say what PDSL's formula leaves out."""
    private = experiment.scenario.private
    if private is None or not any(claim and claim.each_round for claim in plan.claims):
        return []
    return [
        f"eq. 27 of PDSL is for one round, and there are {experiment.scenario.rounds:,}; it divides by φ̂_min, here "
        f"taken to be {setting(private.phi_min)}, which the paper's own eq. 19 makes 0, and the noise infinite; use "
        "calibration rigorous"
    ]


def _span(low: float, high: float, say: Any) -> str:
    return say(low) if say(low) == say(high) else f"{say(low)}–{say(high)}"


def _limits(experiment: Experiment, plan: Protection) -> list[str]:
    """Say where Dyn-D2P's formulas, limits for K far above 1/p², are used at a smaller K."""
    rounds, rate = experiment.scenario.rounds, float(experiment.own.sampler.sampling_rate.min())
    used = [claim for claim in plan.claims if claim and claim.mu_total is not None]
    needed = 1 / rate**2
    if not used or rounds >= needed:
        return []
    formula = "Proposition 4" if used[0].mu_0 is None else "eq. 8"
    return [
        f"{formula} of Dyn-D2P is a limit for K far above (J/b)² = {needed:,.0f}, and rounds={rounds:,} is "
        f"{'below' if needed < 2 * rounds else f'{needed / rounds:,.0f} times below'} it; use calibration rigorous"
    ]


def _loose_delta(experiment: Experiment) -> list[str]:
    private, sizes = experiment.scenario.private, experiment.own.sampler.partition_sizes
    delta = np.broadcast_to(private.delta if private else 0.0, sizes.shape)
    loose = np.flatnonzero(delta * sizes >= 1)
    if not len(loose):
        return []
    first = loose[0]
    return [
        f"δ = {setting(float(delta[first]))} >= 1/J = 1/{sizes[first]} (peers "
        f"{peer_ranges(loose.tolist())}): revealing one example outright "
        f"would be allowed; take δ well below 1/{sizes[loose].max()}"
    ]


def _sampling(plan: Protection, spent: list[float]) -> list[str]:
    """Say how much ε Poisson sampling would save the peer that spends most, at the same noise."""
    account = plan.accounts[int(np.argmax(spent))]
    kinds = {spend.release.sampling for spend in account.spends}
    if not any(kind.startswith("uniform") for kind in kinds) or math.isinf(max(spent)):
        return []
    releases = [spend.release for spend in account.spends]
    poisson = [replace(release, sampling=release.sampling.replace("uniform", "poisson")) for release in releases]
    other = epsilon(poisson, account.delta)
    if max(spent) <= DEARER * other:
        return []
    return [
        f"data.batch.sampling uniform costs ε = {epsilon_text(max(spent))} where poisson at the same noise costs "
        f"{epsilon_text(other)}; use poisson"
    ]


def network_warnings(experiment: Experiment, topology: dict[str, Any] | None) -> list[str]:
    """Return what to know about participation and graph."""
    scenario = experiment.scenario
    warnings = []
    if experiment.participation.kind != "all":
        active = int(experiment.participation.active(0).sum())
        warnings.append(
            f"{active} of {scenario.n_peers} peers are active in a round; who is active can be seen, so it "
            "amplifies no privacy, and a peer pays for each round in which it is active"
        )
    joint = topology["joint_connectivity"] if topology else None
    if joint is not None and joint > scenario.rounds:
        warnings.append(
            f"rounds={scenario.rounds} end before the graph has joined all peers ({joint} rounds): raise it"
        )
    return warnings


def algorithm_warnings(experiment: Experiment) -> list[str]:
    """Return what the algorithm has to say of its settings on this network."""
    scenario = experiment.scenario
    active, server = int(experiment.participation.active(0).sum()), scenario.topology.name == "server"
    return experiment.algorithm.cautions(active, scenario.n_peers, scenario.rounds, server=server)


def cost_warnings(shortage: str | None, seconds: float | None, evaluation_share: float) -> list[str]:
    """Return what to know about memory and time."""
    warnings = []
    if shortage is not None:
        warnings.append(f"a run would be refused here: {shortage}")
    evaluation = evaluation_share * (seconds or 0.0)
    if evaluation_share > LARGEST_EVALUATION_SHARE and evaluation > WORTH_A_WORD:
        warnings.append(
            f"evaluation takes {100 * evaluation_share:.0f} % of the time, about {duration(evaluation)}; "
            "raise evaluation.every"
        )
    return warnings
