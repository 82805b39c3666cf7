"""What a plan says of noise that cancels between peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flower_privdec.experiment import Experiment
from flower_privdec.planner.pairwise import least_own_noise
from flower_privdec.privacy.mechanism.cancelling import PairPlan, Trade, best_strength, solve_by_partners, trades
from flower_privdec.privacy.mechanism.partners import Partners, left_against, with_more_gone
from flower_privdec.privacy.mechanism.partners import least_own_noise as least_own_noise_by_partners

ABSENT = (0, 1, 2, 3, 4, 8, 16)  # numbers of absent peers that a plan shows
DEGREES = (4, 8, 15, 32, 63, 250, 999)  # of graphs of secrets; complete ones of 16, 64 and 1,000 peers
MORE = 4  # peers that collude beside those counted on


def pair_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return the effect of noise that cancels between peers; None if no noise cancels.

    All noise is that of the first step that has some, over the noise that peers would need without secrets.

    Returns:
        colluding, absent: as in the scenario;
        secrets_of_a_peer: the least and the largest number of secrets that a peer has;
        strength, network_strength: of the noise of pairs, here and on a network;
        mode_advice: what to set if a network needs another mode than the scenario's; None if not;
        mean_noise: the noise of the mean;
        least_mean_noise: a lower bound on it with these pairs; None if there are too many sets of colluders to try;
        trusted_server: the noise of the mean with a trusted server;
        trades: for other strengths the noise of the mean, and that of pairs which is in the models at their steps;
        accounting, counted: how noise is counted, and why, in words;
        by_absent: for numbers of absent peers, the largest own noise of the others, and that of their mean;
        by_degree: for numbers of secrets of each peer, if peers are alike: the draws of a step, the noise of the mean,
            and the noise that is left against four more colluders.
    """
    protection = experiment.own.protection
    pairs = None if protection is None else protection.pairs
    if pairs is None:
        return None

    # All numbers are of the first step in which noise is needed, over those of independent noise of the same ε.
    first = int(pairs.needed.any(axis=1).argmax())
    needed = pairs.needed[first]
    independent = float(np.linalg.norm(needed)) or 1.0
    mean_noise = float(np.linalg.norm(pairs.own[first] * needed))
    least = least_own_noise(pairs, first)
    active = max(1, int((needed > 0).sum()))

    degrees = np.bincount(pairs.edges.ravel(), minlength=experiment.scenario.n_peers)
    network_strength = pairs.strength
    if pairs.trades:
        network_strength = best_strength(_network_trades(pairs, needed), deployed=True, lasting=pairs.lasting)
    network = replace(pairs, needed=needed[None], dropped=None)
    if not pairs.by_partners:
        network = replace(network, strength=network_strength, by_partners="a network")

    rows = []
    for trade in pairs.trades:
        mean = math.sqrt(trade.mean * active)
        models = math.sqrt(trade.models)
        rows.append({"strength": trade.strength, "mean_noise": mean, "models_noise": models})
    return {
        "colluding": pairs.colluding,
        "secrets_of_a_peer": [int(degrees.min()), int(degrees.max())],
        "strength": pairs.strength,
        "network_strength": network_strength,
        "mode_advice": _mode_advice(experiment),
        "mean_noise": mean_noise / independent,
        "least_mean_noise": None if least is None else least / independent,
        "trusted_server": float(1 / np.sqrt(active)),
        "trades": rows,
        "accounting": pairs.accounting,
        "counted": pairs.counted,
        "absent": pairs.absent,
        "by_absent": _by_absent(network),
        "by_degree": _by_degree(network),
    }


def _by_absent(network: PairPlan) -> list[dict[str, Any]]:
    """Return what each number of absent peers costs the others, counted by partners, see `make_plan`.

    Args:
        network: a plan of one step.
    """
    needed = network.needed[0]
    active = np.flatnonzero(needed > 0)
    most = len(active) - 2  # somebody is left to share with
    numbers = sorted({number for number in ABSENT if number < most} | {min(network.absent, max(0, most)), max(0, most)})
    rows = []
    for number in numbers:
        # Evenly spaced, for who is away does not matter if peers are alike.
        away = active[np.arange(number) * len(active) // max(number, 1)]
        there = np.setdiff1d(active, away)
        dropped = np.zeros((1, len(needed)), dtype=bool)
        dropped[0, away] = True
        own = replace(network, dropped=dropped).own[0, there]
        in_mean = float(np.linalg.norm(own * needed[there]) / np.linalg.norm(needed[there]))
        rows.append({"absent": number, "own_noise": float(own.max()), "mean_noise": in_mean})
    return rows


def _by_degree(network: PairPlan) -> list[dict[str, Any]]:
    """Return the price of secrets with so many others, for equal peers, counted by partners, see `make_plan`."""
    dropped = network.colluding + network.absent
    rows = []
    for degree in DEGREES:
        if degree <= dropped:
            continue

        pair = np.full((1, degree), network.strength**2 / degree)
        partners = Partners(np.zeros((1, degree), dtype=np.int64), pair)  # as protected as the peer itself
        need = np.ones(1)
        own = least_own_noise_by_partners(need, partners, dropped)
        more = with_more_gone(own**2, need, partners, dropped)
        left = left_against(own**2, more, need, partners, network.colluding + MORE, network.colluding)

        rows.append(
            {
                "degree": degree,
                "draws": degree + 1,
                "mean_noise": float(own[0]),
                "noise_against_more": float(np.sqrt(left[0])),
            }
        )
    return rows


def _network_trades(pairs: PairPlan, needed: np.ndarray) -> Sequence[Trade]:
    """Return what each strength gives on a network, which counts noise by each peer's own partners."""
    if pairs.by_partners:
        return pairs.trades
    weakest = pairs.trades[0]
    left = weakest.models / weakest.strength**2
    return trades(needed, pairs.edges, pairs.colluding + pairs.absent, left, solve_by_partners)


def _mode_advice(experiment: Experiment) -> str | None:
    """Return why a network of peers cannot run this in asynchronous mode, and what to set; None if it can."""
    scenario = experiment.scenario
    mixing = experiment.mixing
    if mixing is None or scenario.network.mode == "synchronous" or mixing.sends_shares:
        return None

    return (
        "network.mode=asynchronous loses what comes late and "
        f"algorithm.name={scenario.algorithm.name} conserves no sum then: a network needs network.mode=synchronous"
    )
