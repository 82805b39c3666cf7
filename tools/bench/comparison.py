"""Time one workload: the plain loop, the engine, and whatever else can run here."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from tools.bench import limit
from tools.bench.baselines import Baseline, OpacusLoop, PeerLoop, TextbookVmap
from tools.bench.equality import check_equal
from tools.bench.timing import Times, Work, paired, quiet, ratio
from tools.bench.workloads import Setup, Workload

LOOP = "plain loop over peers"
ENGINE = "engine"
CANCELLING = "engine, noise that cancels"
OPACUS = "loop with Opacus"
VMAP = "vmap(vmap(grad))"
SCALES = (10, 100, 1000)
SLOW_SCALES = (10, 100)
SCALING_ROUNDS = 5
CHECKED = 100  # peers, at most, whose step is checked before anything is timed


def baselines(extras: bool) -> tuple[dict[str, type[Baseline]], list[str]]:
    """Return what the engine is compared with beside the loop, and what is left out, with the reason."""
    if not extras:
        return {}, []
    if importlib.util.find_spec("opacus") is None:
        return {VMAP: TextbookVmap}, [f"{OPACUS}: left out, opacus is not installed"]
    return {OPACUS: OpacusLoop, VMAP: TextbookVmap}, []


def measure_workload(workload: Workload, device: torch.device, rounds: int, extras: bool) -> dict[str, Any]:
    """Check that all ways agree, then time them.

    Returns:
        ratio_to_loop, fraction_of_limit, times_the_limit and peer_steps_per_second of the engine; cancelling, a round
        with noise that cancels over one without; limit, compile_seconds; and for every variant its milliseconds a
        round, peer steps per second and ratio to the loop.

    Raises:
        RunError: one of them computes something else.
    """
    kinds, left_out = baselines(extras)
    with quiet():
        check_equal(workload.resized(min(workload.n_peers, CHECKED)), device)
        check_equal(workload.resized(4), device, kinds)
        setup = Setup.build(workload, device)
        works: dict[str, Work] = {LOOP: PeerLoop(setup).round, ENGINE: setup.engine().round}
        works[CANCELLING] = setup.cancelling_engine().round
        works |= {name: kind(setup).round for name, kind in kinds.items()}
        parts = limit.works(setup)
        times = paired(works | parts | {"peak": limit.peak(setup)}, rounds, device)
    facts = _facts(setup, times, [LOOP, ENGINE, *kinds])
    return {"description": f"{workload.describe()}, d = {setup.d:,}", **facts, "left_out": left_out}


def _facts(setup: Setup, times: dict[str, Times], order: list[str]) -> dict[str, Any]:
    n = setup.workload.n_peers
    loop = times[LOOP].clock
    engine = times[ENGINE].clock
    whole = _limit(times)
    facts: dict[str, Any] = {
        "ratio_to_loop": ratio(loop, engine),
        "fraction_of_limit": ratio(whole, engine),
        "times_the_limit": ratio(engine, whole),
        "fraction_of_limit_at_peak": ratio(_limit(times, setup), engine),
        "peer_steps_per_second": n / float(np.median(engine)),
    }
    facts["limit"] = {f"{part}_ms": times[part].facts()["ms"] for part in ("gemm", "copy", "noise")}
    facts["compile_seconds"] = times[ENGINE].first
    facts["cancelling"] = ratio(times[CANCELLING].clock, engine)
    facts["variants"] = {
        name: times[name].facts()
        | {
            "peer_steps_per_second": n / float(np.median(times[name].clock)),
            "ratio_to_loop": ratio(loop, times[name].clock),
        }
        for name in order
        if name in times
    }

    return facts


def _limit(times: dict[str, Times], at_peak: Setup | None = None) -> np.ndarray:
    """Return noise + products + copy of each timed round; the products as measured, or at the peak speed."""
    products = times["gemm"].clock
    if at_peak is not None:
        products = times["peak"].clock * (limit.operations(at_peak) / (2 * limit.PEAK_SIZE**3))
    return np.asarray(times["noise"].clock + products + times["copy"].clock)


def scaling(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Time the engine for more and more peers.

    Returns:
        Nanoseconds for each peer and parameter, by the number of peers, and the largest over the smallest.
    """
    cost = {}
    with quiet():
        for n_peers in SLOW_SCALES if workload.model.startswith("cnn") else SCALES:
            setup = Setup.build(workload.resized(n_peers), device)
            times = paired({"engine": setup.engine().round}, SCALING_ROUNDS, device)
            cost[str(n_peers)] = float(np.median(times["engine"].clock)) * 1e9 / (n_peers * setup.d)
    return {"ns_per_peer_and_parameter": cost, "spread": max(cost.values()) / min(cost.values())}
