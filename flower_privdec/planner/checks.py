"""Each peer's noise, ε and claims in a plan, and warnings about a scenario that is unsound or costly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flower_privdec.common.formatting import duration, epsilon_text, number, peer_ranges, setting
from flower_privdec.engine.spent import budget_note, json_number, shortfall
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.ledger import Spending, spending_of
from flower_privdec.privacy.mechanism.protection import Claim, Protection, breaches, build_schedule
from flower_privdec.scenario.sections import dynamic

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
    plan, scenario = experiment.own.protection, experiment.scenario
    sigma = np.median(noise_std(experiment, scenario.rounds // 2))
    if plan is None or sigma == 0:
        return math.inf
    per_round = experiment.algorithm.steps_per_round
    clip, steps = float(np.median(plan.clip_norm(scenario.rounds // 2 * per_round))), scenario.rounds * per_round
    together = 1.0 if experiment.mixing is None else float(experiment.participation.chances.sum())
    return clip * math.sqrt(together * steps) / float(sigma * math.sqrt(experiment.initial.numel()))


def privacy_warnings(experiment: Experiment) -> list[str]:
    """Return warnings about noise and budgets."""
    plan = experiment.own.protection
    if plan is None:
        return ["privacy is none: ε = ∞, messages and models may reveal any example"]
    spent = plan.epsilons(experiment.scenario.rounds)
    warnings = [*_paper_claims(experiment, plan, spent), *breaches(plan), *_loose_delta(experiment)]
    warnings += _sampling(plan, spent)
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


def _paper_claims(experiment: Experiment, plan: Protection, spent: Sequence[float]) -> Iterator[str]:
    """Yield where a paper's formula does not hold: against the accountant, over several rounds, or at a small K."""
    rounds, private = experiment.scenario.rounds, experiment.scenario.private
    claims = {peer: claim for peer, claim in enumerate(plan.claims) if claim}
    above = [peer for peer, claim in claims.items() if spent[peer] > claim.epsilon]
    if above:
        claimed = _range([claim.epsilon for claim in claims.values()], setting)
        exact = _range([spent[peer] for peer in above], lambda value: epsilon_text(json_number(value)))
        yield (
            f"calibration paper claims ε = {claimed}; the accountant gives ε = {exact} for the same noise (peers "
            f"{peer_ranges(above)}): the claim does not hold; calibration rigorous keeps the budget"
        )
    if private is not None and any(claim.each_round for claim in claims.values()):
        yield (
            f"eq. 27 of PDSL is for one round, and there are {rounds:,}; it divides by φ̂_min, here taken to be "
            f"{setting(private.phi_min)}, which the paper's own eq. 19 makes 0, and the noise infinite; use "
            "calibration rigorous"
        )
    gaussian = [claim for claim in claims.values() if claim.mu_total is not None]
    needed = 1 / float(experiment.own.sampler.sampling_rate.min()) ** 2
    if gaussian and rounds < needed:
        formula = "Proposition 4" if gaussian[0].mu_0 is None else "eq. 8"
        yield (
            f"{formula} of Dyn-D2P is a limit for K far above (J/b)² = {needed:,.0f}, and rounds={rounds:,} is "
            f"{'below' if needed < 2 * rounds else f'{needed / rounds:,.0f} times below'} it; use calibration rigorous"
        )


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low}–{high}"


def _loose_delta(experiment: Experiment) -> Iterator[str]:
    private, sizes = experiment.scenario.private, experiment.own.sampler.partition_sizes
    delta = np.broadcast_to(private.delta if private else 0.0, sizes.shape)
    loose = np.flatnonzero(delta * sizes >= 1)
    if len(loose):
        yield (
            f"δ = {setting(float(delta[loose[0]]))} >= 1/J = 1/{sizes[loose[0]]} (peers "
            f"{peer_ranges(loose.tolist())}): revealing one example outright would be allowed; take δ well below "
            f"1/{sizes[loose].max()}"
        )


def _sampling(plan: Protection, spent: Sequence[float]) -> Iterator[str]:
    """Yield how much ε Poisson sampling would save the peer that spends most, at the same noise."""
    account = plan.accounts[int(np.argmax(spent))]
    releases = [spend.release for spend in account.spends]
    if math.isinf(max(spent)) or not any(release.sampling.startswith("uniform") for release in releases):
        return
    poisson = [replace(release, sampling=release.sampling.replace("uniform", "poisson")) for release in releases]
    other = epsilon(poisson, account.delta)
    if max(spent) > LEAST_INCREASE * other:
        yield (
            f"data.batch.sampling uniform costs ε = {epsilon_text(max(spent))} where poisson at the same noise costs "
            f"{epsilon_text(other)}; use poisson"
        )


def ledger_warnings(experiment: Experiment) -> list[str]:
    """Return where a budget, or what other runs have spent of it, ends the run's steps before its plan does."""
    spending, plan = ledger_spending(experiment), experiment.own.protection
    note = None if spending is None else budget_note(spending, experiment.algorithm.steps_per_round)
    if note is None and plan is not None:  # noise that is given may use the budget up before the last round
        rounds = experiment.scenario.rounds
        ends = np.array([account.spends[-1].to_step if account.spends else 0 for account in plan.accounts])
        active = np.stack([experiment.participation.active(k) for k in range(rounds)])
        within_budget = np.arange(rounds)[:, None] * plan.steps_per_round < ends
        note = shortfall(experiment.participation, (active & within_budget).sum(axis=0).tolist(), rounds)
    return [] if note is None else [note]


def network_warnings(experiment: Experiment, topology: dict[str, Any] | None) -> list[str]:
    """Return warnings about participation and graph."""
    scenario, warnings = experiment.scenario, []
    if experiment.participation.kind != "all":
        active = int(experiment.participation.active(0).sum())
        warnings.append(
            f"{active} of {scenario.n_peers} peers are active in a round; an adversary sees who is active, so that "
            "amplifies no privacy, and a peer pays for each round in which it is active"
        )
    joint = topology["joint_connectivity"] if topology else None
    if joint is not None and joint > scenario.rounds:
        warnings.append(
            f"rounds={scenario.rounds} end before the graph has joined all peers ({joint} rounds): raise it"
        )
    return warnings


def algorithm_warnings(experiment: Experiment) -> list[str]:
    """Return the algorithm's warnings about its settings on this network."""
    scenario = experiment.scenario
    active, server = int(experiment.participation.active(0).sum()), scenario.topology.name == "server"
    return experiment.algorithm.cautions(active, scenario.n_peers, scenario.rounds, server=server)


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


CLAIMED = ("claimed_epsilon", "claimed_after_quarters", "mu_total", "mu_0", "mu_bar")


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
    rounds, plan, private = experiment.scenario.rounds, experiment.own.protection, experiment.scenario.private
    n_peers, participation = experiment.scenario.n_peers, experiment.participation
    sigma = np.stack([noise_std(experiment, k) for k in (0, rounds // 2, rounds - 1)], axis=1)
    multiplier = np.zeros(n_peers) if plan is None else plan.noise_multiplier(0)
    quarters = [math.ceil(rounds * quarter / 4) for quarter in (1, 2, 3, 4)]
    spent = [[math.inf] * n_peers if plan is None else plan.epsilons(k) for k in quarters]
    delta = None if private is None else np.broadcast_to(private.delta, (n_peers,))
    partial = participation.kind != "all"
    active = np.sum([participation.active(k) for k in range(rounds)], axis=0)
    claims = [None] * n_peers if plan is None else plan.claims
    replies = [] if plan is None else plan.reply_epsilons(rounds)
    return [
        {
            "peer": peer,
            "sigma": sigma[peer].tolist(),
            "noise_multiplier": float(multiplier[peer]),
            "epsilon": json_number(float(spent[-1][peer])),
            "epsilon_after_quarters": [json_number(float(values[peer])) for values in spent],
            "epsilon_of_replies_to_one": json_number(replies[peer]) if replies else None,
            "delta": None if delta is None else float(delta[peer]),
            "active_rounds": int(active[peer]) if partial else None,
            "expected_rounds": rounds * float(participation.chances[peer]) if partial else None,
            **_claimed(experiment, claims[peer], float(multiplier[peer])),
        }
        for peer in range(n_peers)
    ]


def ledger_spending(experiment: Experiment) -> Spending | None:
    """Return the run's spending with that of other runs in the ledger that the scenario names; None without one."""
    private = experiment.scenario.private
    if private is None or private.ledger is None or experiment.own.protection is None:
        return None
    return spending_of(private.ledger, experiment.public.name, experiment.own.run, experiment.own.protection.accounts)


def ledger_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return the folder of the ledger, and the largest ε of any peer before and after the run."""
    spending, private = ledger_spending(experiment), experiment.scenario.private
    if spending is None or private is None:
        return None
    before, after = (json_number(float(spending.epsilons(steps).max())) for steps in (0, spending.steps))
    return {"folder": private.ledger, "epsilon_before": before, "epsilon_after": after}


def _claimed(experiment: Experiment, claim: Claim | None, multiplier: float) -> dict[str, Any]:
    """Return claimed ε (of the run and, if the paper has it, by quarter) and μ_tot, and μ_0 and μ̄ of a schedule.

    μ_0 = C_0 / σ_0 is Dyn-D2P's per-step budget in round 0, from eq. 8 or from the accountant;
    where ρ_μ = 1 it is that of every round, μ̄ (eq. 9).
    """
    private = experiment.scenario.private
    claims: dict[str, Any] = dict.fromkeys(CLAIMED)
    if private is None:
        return claims
    if claim is not None:
        claims |= {"claimed_epsilon": claim.epsilon, "mu_total": claim.mu_total, "mu_0": claim.mu_0}
        claims["claimed_after_quarters"] = None if claim.quarters is None else list(claim.quarters)
    scheduled = dynamic(experiment.scenario.algorithm) is not None or private.schedule is not None
    if scheduled and claims["mu_0"] is None and multiplier > 0:
        claims["mu_0"] = 1 / multiplier
    exponential = build_schedule(experiment.scenario).exponential if scheduled else None
    if exponential is not None and exponential[1] == 1.0:
        claims["mu_bar"] = claims["mu_0"]
    return claims
