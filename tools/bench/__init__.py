"""`privdec bench`: the engine beside a plain loop over peers, side by side in one process, and more with --all."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.experiment.agreement import resolve_device
from tools.bench import catalogue_table, flower_relay, local_steps, noise, peak_memory, processes, sharding
from tools.bench.comparison import SCALES, measure_workload, scaling
from tools.bench.ledgers import SECONDS, ledger_share
from tools.bench.printing import print_results
from tools.bench.two_workers import compare_workers
from tools.bench.workloads import WORKLOADS, Setup, Workload

WITH_LEDGER = ("W1", "W2")
EXTRA_ROUNDS = 10

Results = dict[str, dict[str, Any]]


def main(
    workloads: list[str],
    *,
    device: str = "cpu",
    rounds: int = 15,
    peers: int | None = None,
    extras: bool = False,
    algorithms: bool = False,
    as_json: bool = False,
) -> None:
    """Measure and print.

    Args:
        workloads: names; all for none.
        device: cpu or cuda.
        rounds: how often each variant is timed.
        peers: in W1 to W4, instead of each workload's own number; without the run with ledgers.
        extras: also Opacus, vmap, one process a peer, Flower's relay, scaling and peak memory.
        algorithms: measure the algorithms of the catalogue instead; `workloads` are their names then.
        as_json: print {"W1": {...}, ...} instead of tables.

    Raises:
        ScenarioError: an unknown workload, or a device that is not here.
        RunError: an engine that does not compute what the plain loop computes; nothing more is timed.
    """
    if algorithms:
        _measure_algorithms(workloads, device, rounds, as_json)
        return

    results = measure(workloads, device=device, rounds=rounds, peers=peers, extras=extras)
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        print_results(results)


def _measure_algorithms(titles: list[str], device: str, rounds: int, as_json: bool) -> None:
    if device != "cpu":
        raise ScenarioError(f"device={device!r} must be cpu with --algorithms: leave it out", code="bench.device")
    results = catalogue_table.measure_catalogue(titles, rounds)
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        catalogue_table.print_catalogue(results)


def measure(
    workloads: list[str],
    *,
    device: str = "cpu",
    rounds: int = 15,
    peers: int | None = None,
    extras: bool = False,
    ledger_seconds: float = SECONDS,
) -> Results:
    """Return what `main` prints, by workload."""
    names = _names(workloads)
    where = resolve_device(device)
    chosen = [WORKLOADS[name].resized(peers or WORKLOADS[name].n_peers) for name in names if name in WORKLOADS]
    results: Results = {}
    for workload in chosen:
        _say(f"{workload.name}: comparing in float64, then timing {workload.describe()}")
        results[workload.name] = measure_workload(workload, where, rounds, extras)
        if where.type == "cpu" and peers is None:
            _say(f"{workload.name}: two workers against one")
            _try(results[workload.name], "workers", partial(compare_workers, workload, rounds))
        if workload.name in WITH_LEDGER and ledger_seconds > 0 and peers is None:
            _say(f"{workload.name}: a run of {ledger_seconds:g} s with its ledgers")
            setup = Setup.build(workload, where)
            results[workload.name]["ledger"] = ledger_share(setup, ledger_seconds)

    if local_steps.NAME in names:
        _say(f"{local_steps.NAME}: comparing in float64, then timing {local_steps.WORKLOAD.describe()}")
        results[local_steps.NAME] = local_steps.measure_feddeper(local_steps.WORKLOAD, where, rounds)
    if noise.NAME in names:
        _say(f"{noise.NAME}: timing the sources of noise")
        results[noise.NAME] = noise.measure_noise(where, rounds)
    if sharding.NAME in names and where.type == "cpu":
        _say(f"{sharding.NAME}: timing two shards beside one process, and beside bare gloo")
        results[sharding.NAME] = sharding.measure_sharding()
    if extras and chosen:
        _add_extras(results, chosen, where)
    return results


def _names(wanted: list[str]) -> list[str]:
    names = [*WORKLOADS, local_steps.NAME, noise.NAME, sharding.NAME]
    for name in wanted:
        if name not in names:
            raise ScenarioError(f"workload={name!r} must be one of {', '.join(names)}", code="bench.unknown")
    return wanted or names


def _add_extras(results: Results, workloads: list[Workload], device: torch.device) -> None:
    for workload in workloads:
        result = results[workload.name]
        _say(f"{workload.name}: more peers, peak memory, relay")
        _try(result, "scaling", partial(scaling, workload, device))
        if device.type == "cpu":
            _try(result, "memory", partial(peak_memory.peak_memory, workload.name, _many(workload)))
            _try(result, "relay", partial(_relay, workload))
    if device.type == "cpu":
        _say(f"one process for each of {processes.PEERS} peers, over gloo")
        _add_gloo(results, workloads)
        _say("Flower's relay mode under `flwr run`")
        first = workloads[0]
        _try(results[first.name], "flwr_run", partial(_flwr_run, first))


def _many(workload: Workload) -> int:
    return SCALES[-2] if workload.model.startswith("cnn") else SCALES[-1]


def _relay(workload: Workload) -> dict[str, float]:
    if importlib.util.find_spec("flwr") is None:
        raise PrivdecError("flwr is not installed")
    return {"ms": flower_relay.in_process(workload, EXTRA_ROUNDS), "nodes": workload.n_peers}


def _flwr_run(workload: Workload) -> dict[str, float]:
    for package in ("flwr", "ray"):
        if importlib.util.find_spec(package) is None:
            raise PrivdecError(f"{package} is not installed")
    return {"ms": flower_relay.by_flwr_run(workload), "nodes": flower_relay.FLWR_PEERS}


def _add_gloo(results: Results, workloads: list[Workload]) -> None:
    """Add what one process a peer takes, beside the engine with as many peers."""
    times: dict[str, Any] = {}
    names = [workload.name for workload in workloads]
    _try(times, "gloo", partial(processes.gloo_rounds, names, EXTRA_ROUNDS))
    for workload in workloads:
        result = results[workload.name]
        if "gloo" not in times:
            result["left_out"] += times["left_out"]
            continue
        alone = processes.engine_ms(workload, EXTRA_ROUNDS)
        result["gloo"] = times["gloo"][workload.name] | {"engine_ms": alone}
        result["gloo"]["ratio_to_engine"] = result["gloo"]["cpu_ms"] / alone


def _try(result: dict[str, Any], key: str, work: Callable[[], Any]) -> None:
    """Add a measurement, or the reason why there is none."""
    try:
        result[key] = work()
    except (PrivdecError, OSError, ImportError, TimeoutError) as error:
        result.setdefault("left_out", []).append(f"{key}: left out, {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
