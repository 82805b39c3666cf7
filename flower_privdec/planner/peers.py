"""Each peer's noise, ε over the rounds, and claims of the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flower_privdec.engine.spent import json_number
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.ledger.ledger import Spending, spending_of
from flower_privdec.privacy.mechanism.protection import Claim, build_schedule
from flower_privdec.scenario.sections import dynamic

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
