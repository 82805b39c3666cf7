"""Put the plan of a run together; nothing is charged or written."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flower_privdec.engine.workers import deal
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory import memory_need, shortage, table_bytes
from flower_privdec.gradients import explain_kernel
from flower_privdec.planner.checks import (
    algorithm_warnings,
    cost_warnings,
    ledger_warnings,
    network_warnings,
    privacy_warnings,
)
from flower_privdec.planner.optimum import optimum
from flower_privdec.planner.peers import ledger_facts, peer_rows
from flower_privdec.planner.seconds import estimate_seconds
from flower_privdec.reporting.graph_view import connectivity


def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Plan a run: compute its noise and ε, time a few rounds in memory; charge no ledger and write nothing.

    Returns:
        peers: for each, sigma (noise std on its averaged gradient at rounds 0, K/2 and K-1),
            noise_multiplier (at round 0), epsilon, epsilon_after_quarters (of this run alone),
            epsilon_of_replies_to_one (what one neighbour learns from the replies to it alone, which is not all that it
            hears; None where all of a peer's messages go to everybody), delta, active_rounds and expected_rounds (None
            where all peers always are), and what a paper's formulas say (claimed_epsilon, claimed_after_quarters,
            mu_total, mu_0, mu_bar; None where there is none);
        ledger: where the scenario names one, its folder, the largest ε of any peer before and after this run;
        optimal_rounds and all that `planner.optimum` says of it;
        gradients: which kernel computes them, and why that one;
        memory_bytes, memory (its parts), tables (bytes of each kind, for privsgp-vr) and table (the one used);
        workers (how many processes here), seconds (None where the run does not fit into memory), topology (None when
            nothing is exchanged), warnings; infinite ε is the string "inf".
    """
    scenario = experiment.scenario
    dealing, missing = deal(experiment), shortage(experiment)
    section, need = scenario.algorithm, memory_need(experiment, dealing.workers)
    seconds, evaluation_share = (None, 0.0) if missing else estimate_seconds(experiment)
    topology = None if experiment.mixing is None else connectivity(experiment.mixing)
    table, public = experiment.algorithm.table, experiment.public
    return {
        "name": scenario.name,
        "algorithm": section.name,
        "rounds": scenario.rounds,
        "peers": peer_rows(experiment),
        "ledger": ledger_facts(experiment),
        **optimum(experiment),
        "gradients": explain_kernel(experiment.module, public.input_shape, public.n_tokens, sparse=public.sparse),
        "memory_bytes": need.total,
        "memory": asdict(need),
        "tables": table_bytes(experiment) if table else None,
        "table": table,
        "workers": dealing.workers,
        "seconds": seconds,
        "topology": topology,
        "warnings": [
            *privacy_warnings(experiment),
            *ledger_warnings(experiment),
            *network_warnings(experiment, topology),
            *algorithm_warnings(experiment),
            *cost_warnings(missing, seconds, evaluation_share),
        ],
    }
