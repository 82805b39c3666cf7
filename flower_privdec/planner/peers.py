"""What a plan says of each peer: its noise, and its ε by the accountant and by a paper's claim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_privdec.experiment import Experiment
from flower_privdec.experiment.noise_balance import balance_of
from flower_privdec.experiment.spent import json_number
from flower_privdec.graph.participation import activity, expected_rounds
from flower_privdec.privacy.mechanism.peer_mechanism import build_schedule
from flower_privdec.privacy.mechanism.protection import Claim


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
    n_peers = experiment.scenario.n_peers
    plan = experiment.own.protection
    private = experiment.scenario.private
    participation = experiment.participation
    takes_part_in_all = participation.kind == "all"
    active_rounds = activity(participation, rounds).sum(axis=0)
    expected = expected_rounds(participation, rounds)
    claimed = Claimed.of(experiment)
    balance = balance_of(experiment)

    first_middle_last = (0, rounds // 2, rounds - 1)
    sigma = np.stack([noise_std(experiment, k) for k in first_middle_last], axis=1)
    quarters = [math.ceil(rounds * quarter / 4) for quarter in (1, 2, 3, 4)]

    if plan is None:
        multiplier = np.zeros(n_peers)
        spent = [[math.inf] * n_peers for _ in quarters]
        others = {}
    else:
        multiplier = plan.noise_multiplier(0)
        spent = [plan.epsilons(k) for k in quarters]
        others = {name: plan.epsilons(rounds, adversary) for name, adversary in plan.others.items()}
    replies = others.get("replies")
    if_all_collude = others.get("if_all_collude")

    deltas: list[float | None] = [None] * n_peers
    if private is not None:
        deltas = np.broadcast_to(private.delta, (n_peers,)).tolist()

    rows = []
    for peer in range(n_peers):
        row = {
            "peer": peer,
            "sigma": sigma[peer].tolist(),
            "noise_multiplier": float(multiplier[peer]),
            "epsilon": json_number(float(spent[-1][peer])),
            "epsilon_after_quarters": [json_number(float(values[peer])) for values in spent],
            "epsilon_of_replies_to_one": json_number(replies[peer]) if replies else None,
            "epsilon_if_all_collude": json_number(if_all_collude[peer]) if if_all_collude else None,
            "delta": deltas[peer],
            "noise_share": None if balance is None else float(balance.shares[peer]),
            "weight": None if balance is None else float(balance.weights[peer]),
            "active_rounds": None if takes_part_in_all else int(active_rounds[peer]),
            "expected_rounds": None if takes_part_in_all else float(expected[peer]),
        }
        rows.append(row | claimed.row(peer))
    return rows


@dataclass(frozen=True)
class Claimed:
    """What the papers claim of each peer.

    Attributes:
        claims: the claim of each peer; None if its noise does not follow a paper's formula.
        mu_0: C_0 / σ_0 of each peer by the accountant, Dyn-D2P's budget of round 0; None if its schedule is not used.
        is_same_in_all_rounds: whether ρ_μ = 1, so that μ_0 is the budget of every round, μ̄ (eq. 9).
    """

    claims: tuple[Claim | None, ...]
    mu_0: tuple[float | None, ...]
    is_same_in_all_rounds: bool

    @classmethod
    def of(cls, experiment: Experiment) -> Claimed:
        """Return the claims on an experiment."""
        n_peers = experiment.scenario.n_peers
        plan = experiment.own.protection
        private = experiment.scenario.private
        if plan is None or private is None:
            return cls((None,) * n_peers, (None,) * n_peers, is_same_in_all_rounds=False)

        has_schedule = experiment.scenario.algorithm.own_schedule or private.schedule is not None
        if not has_schedule:
            return cls(tuple(plan.claims), (None,) * n_peers, is_same_in_all_rounds=False)

        mu_0 = tuple(1 / float(noise) if noise > 0 else None for noise in plan.noise_multiplier(0))
        exponential = build_schedule(experiment.scenario).exponential
        is_same = exponential is not None and exponential[1] == 1.0
        return cls(tuple(plan.claims), mu_0, is_same_in_all_rounds=is_same)

    def row(self, peer: int) -> dict[str, Any]:
        """Return the claims on a peer; μ_0 by the paper's eq. 8 if that gave the noise, else by the accountant."""
        claim = self.claims[peer]
        mu_0 = self.mu_0[peer]
        if claim is None:
            row: dict[str, Any] = {"claimed_epsilon": None, "claimed_after_quarters": None, "mu_total": None}
        else:
            quarters = list(claim.quarters) if claim.quarters else None
            row = {
                "claimed_epsilon": claim.epsilon,
                "claimed_after_quarters": quarters,
                "mu_total": claim.mu_total,
            }
            if claim.mu_0 is not None:
                mu_0 = claim.mu_0
        return row | {"mu_0": mu_0, "mu_bar": mu_0 if self.is_same_in_all_rounds else None}
