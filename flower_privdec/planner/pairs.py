"""What a plan says of noise that cancels between peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flower_privdec.experiment import Experiment
from flower_privdec.planner.pairwise import least_own_noise
from flower_privdec.privacy.mechanism.cancelling import PairPlan, Trade, best_strength, solve_by_partners, trades


def pair_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return the effect of noise that cancels between peers, see `make_plan`; None if no noise cancels."""
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
        network_strength = best_strength(_network_trades(pairs, needed), deployed=True)

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
    }


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
