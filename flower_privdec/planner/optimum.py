"""How many rounds PrivSGP-VR's bound likes best, and how that depends on ε."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.planner import estimate
from flower_privdec.planner.peers import noise_std
from flower_privdec.privacy.mechanism.paper import optimal_rounds
from flower_privdec.privacy.mechanism.schedules import build_schedule
from flower_privdec.scenario.schema import PlanSection

CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NOTHING: dict[str, Any] = {
    "optimal_rounds": None,
    "optimal_rounds_curve": [],
    "optimal_rounds_constants": {},
    "optimal_rounds_note": None,
    "accountant": None,
}


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
        accountant: under calibration rigorous c_2, which makes eq. 11 the noise that the accountant asks for,
            and K* with it; else None.

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    private = experiment.scenario.private
    if experiment.algorithm.weights != "column-stochastic" or private is None or private.epsilon is None:
        return dict(NOTHING)
    try:
        constants = find_constants(experiment) | {"c_2": (private.c_2, "scenario")}
    except ScenarioError as error:
        return NOTHING | {"optimal_rounds_note": str(error)}
    epsilons = np.broadcast_to(np.asarray(private.epsilon, dtype=np.float64), (experiment.scenario.n_peers,))
    curve = sorted({*CURVE, *([float(epsilons[0])] if np.ptp(epsilons) == 0 else [])})
    return {
        "optimal_rounds": max(1, round(best(experiment, constants, epsilons, private.c_2))),
        "optimal_rounds_curve": [
            [each, max(1, round(best(experiment, constants, np.full_like(epsilons, each), private.c_2)))]
            for each in curve
        ],
        "optimal_rounds_constants": {name: {"value": v, "from": source} for name, (v, source) in constants.items()},
        "optimal_rounds_note": None,
        "accountant": _accountant(experiment, constants, epsilons),
    }


Constants = dict[str, tuple[float, str]]


def find_constants(experiment: Experiment) -> Constants:
    """Return every constant of eq. 12 but c_2 and the budgets, with where it is from.

    Raises:
        ScenarioError: where one is not given and cannot be estimated.
    """
    given, initial = experiment.scenario.plan or PlanSection(), experiment.initial
    sample: list[estimate.Objective] = []

    def objective() -> estimate.Objective:
        if not sample:
            sample.append(estimate.public_sample(experiment))
        return sample[0]

    ways: dict[str, tuple[str, Callable[[], float]]] = {
        "smoothness": ("estimated", lambda: estimate.smoothness(experiment, objective())),
        "gradient_bound": ("clip norm", lambda: _largest_clip(experiment)),
        "initial_gap": ("estimated", lambda: estimate.initial_gap(objective())),
        "heterogeneity": ("estimated", lambda: estimate.heterogeneity(experiment, objective())),
        "initial_norm_squared": ("scenario", lambda: float(initial.double().square().sum())),
        "dimension": ("scenario", initial.numel),
        "dataset_size": ("scenario", lambda: _dataset_size(experiment)),
    }
    return {
        name: (way(), source) if (value := getattr(given, name)) is None else (value, "given")
        for name, (source, way) in ways.items()
    }


def _largest_clip(experiment: Experiment) -> float:
    return float(build_schedule(experiment.scenario).clip_norm.max())


def _dataset_size(experiment: Experiment) -> float:
    """Return J with J^-2 the mean of J_i^-2, peers weighted as eq. 12 does, log(1/δ_i) / ε_i²."""
    private, sizes = experiment.scenario.private, experiment.own.sampler.partition_sizes
    if private is None or private.epsilon is None:
        return float(sizes.mean())
    share = np.log(1 / np.asarray(private.delta)) / np.asarray(private.epsilon) ** 2
    share = np.broadcast_to(share, sizes.shape)
    size = math.sqrt(float(share.sum() / (share / sizes.astype(np.float64) ** 2).sum()))
    return float(round(size)) if math.isclose(size, round(size), rel_tol=1e-9) else size


def best(experiment: Experiment, constants: Constants, epsilons: np.ndarray, c_2: float) -> float:
    """Return K* of eq. 12 for some budgets, not rounded."""
    private = experiment.scenario.private
    value = {name: number for name, (number, _) in constants.items()}
    return optimal_rounds(
        smoothness=value["smoothness"],
        gradient_bound_squared=value["gradient_bound"] ** 2,
        initial_gap=value["initial_gap"],
        heterogeneity=value["heterogeneity"],
        initial_norm_squared=value["initial_norm_squared"],
        dataset_size=value["dataset_size"],
        dimension=int(value["dimension"]),
        c_2=c_2,
        epsilons=epsilons,
        deltas=np.broadcast_to(np.asarray(private.delta if private else 0.5), epsilons.shape),
    )


def _accountant(experiment: Experiment, constants: Constants, epsilons: np.ndarray) -> dict[str, float] | None:
    """Return the c_2 with which eq. 11 gives the noise in the plan at its K, and K* with that c_2."""
    plan, private, rounds = experiment.own.protection, experiment.scenario.private, experiment.scenario.rounds
    if plan is None or private is None or private.calibration == "paper" or private.noise_multiplier is not None:
        return None
    bound, size = constants["gradient_bound"][0], experiment.own.sampler.partition_sizes
    per_unit = 3 * bound * np.sqrt(rounds * np.log(1 / np.asarray(private.delta))) / (size * epsilons)
    c_2 = float(np.median(noise_std(experiment, rounds // 2) / per_unit))
    if not c_2 > 0:
        return None
    return {"c_2": c_2, "optimal_rounds": max(1, round(best(experiment, constants, epsilons, c_2)))}
