"""Time one workload: the plain loop, the engine with each generator, and whatever else can run here."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.noise import build_noise
from tools.bench import limit
from tools.bench.equality import check_equal
from tools.bench.rivals import OpacusLoop, PeerLoop, Rival, TextbookVmap
from tools.bench.timing import Times, Work, paired, quiet, ratio
from tools.bench.workloads import Setup, Workload

LOOP, TORCH, FAST = "plain loop over peers", "engine, torch alone", "engine, fast generator"
OPACUS, VMAP = "loop with Opacus", "vmap(vmap(grad))"
ENGINES = {"fast": FAST, "torch": TORCH}
SCALES = (10, 100, 1000)
SLOW_SCALES = (10, 100)
SCALING_ROUNDS = 5
CHECKED = 100  # peers, at most, whose step is checked before anything is timed


def generators(device: torch.device) -> tuple[list[str], str | None]:
    """Return the noise generators that run here, the quickest first, and why the fast one does not."""
    try:
        build_noise("fast", {}, device)
    except ScenarioError as error:
        return ["torch"], str(error)
    return ["fast", "torch"], None


def rivals(extras: bool) -> tuple[dict[str, type[Rival]], list[str]]:
    """Return what the engine is compared with beside the loop, and what is left out, with the reason."""
    if not extras:
        return {}, []
    if importlib.util.find_spec("opacus") is None:
        return {VMAP: TextbookVmap}, [f"{OPACUS}: left out, opacus is not installed"]
    return {OPACUS: OpacusLoop, VMAP: TextbookVmap}, []


def measure_workload(workload: Workload, device: torch.device, rounds: int, extras: bool) -> dict[str, Any]:
    """Check that all ways agree, then time them.

    Returns:
        ratio_to_loop, fraction_of_limit, times_the_limit and peer_steps_per_second of the quickest engine here;
        the same with `_torch` behind it for torch alone; limit, compile_seconds; and for every variant its
        milliseconds a round, peer steps per second and ratio to the loop.

    Raises:
        RunError: one of them computes something else.
    """
    kinds, left_out = rivals(extras)
    with quiet():
        check_equal(workload.resized(min(workload.n_peers, CHECKED)), device)
        check_equal(workload.resized(4), device, kinds)
        names, reason = generators(device)
        setup = Setup.build(workload, device)
        works: dict[str, Work] = {LOOP: PeerLoop(setup).round}
        works |= {ENGINES[name]: setup.engine(name).round for name in names}
        works |= {name: kind(setup).round for name, kind in kinds.items()}
        parts = limit.works(setup, names)
        times = paired(works | parts | {"peak": limit.peak(setup)}, rounds, device)
    if reason is not None:
        left_out = [f"{FAST}: left out, {reason}", *left_out]
    facts = _facts(setup, times, names, [LOOP, *ENGINES.values(), *kinds])
    return {"description": f"{workload.describe()}, d = {setup.d:,}", **facts, "left_out": left_out}


def _facts(setup: Setup, times: dict[str, Times], names: list[str], order: list[str]) -> dict[str, Any]:
    n, loop = setup.workload.n_peers, times[LOOP].clock
    limits = {name: _limit(times, name) for name in names}
    facts: dict[str, Any] = {}
    for name in reversed(names):  # the quickest comes last, and gives the figures without a suffix
        engine = times[ENGINES[name]].clock
        figures = {
            "ratio_to_loop": ratio(loop, engine),
            "fraction_of_limit": ratio(limits[name], engine),
            "times_the_limit": ratio(engine, limits[name]),
            "fraction_of_limit_at_peak": ratio(_limit(times, name, setup), engine),
            "peer_steps_per_second": n / float(np.median(engine)),
        }
        facts |= figures if name == names[0] else {}
        facts |= {f"{key}_torch": value for key, value in figures.items()} if name == "torch" else {}
    facts["limit"] = {f"{part}_ms": times[part].facts()["ms"] for part in ("gemm", "copy", *_noises(names))}
    facts["compile_seconds"] = times[ENGINES[names[0]]].first
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


def _noises(names: list[str]) -> list[str]:
    return [f"noise-{name}" for name in names]


def _limit(times: dict[str, Times], generator: str, at_peak: Setup | None = None) -> np.ndarray:
    """Return noise + products + copy of each timed round; the products as measured, or at the peak speed."""
    products = times["gemm"].clock
    if at_peak is not None:
        products = times["peak"].clock * (limit.operations(at_peak) / (2 * limit.PEAK_SIZE**3))
    return np.asarray(times[f"noise-{generator}"].clock + products + times["copy"].clock)


def scaling(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Time the engine for more and more peers.

    Returns:
        Nanoseconds for each peer and parameter, by the number of peers, and the largest over the smallest.
    """
    generator = generators(device)[0][0]
    cost = {}
    with quiet():
        for n_peers in SLOW_SCALES if workload.model.startswith("cnn") else SCALES:
            setup = Setup.build(workload.resized(n_peers), device)
            times = paired({"engine": setup.engine(generator).round}, SCALING_ROUNDS, device)
            cost[str(n_peers)] = float(np.median(times["engine"].clock)) * 1e9 / (n_peers * setup.d)
    return {"ns_per_peer_and_parameter": cost, "spread": max(cost.values()) / min(cost.values())}
