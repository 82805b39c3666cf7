"""The plan of a run: its noise, ε, claims, best number of rounds, cost and warnings; nothing is charged or written.

Each part is a module of its own: `peers` (noise and ε of each), `pairs` (noise that cancels), `optimal_rounds` (K* of
PrivSGP-VR), `timing` and `warnings`. `observers` and `pairwise` say who learns what, for `privdec plan --privacy`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flower_privdec.engine.workers import partition_cohort
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.data_read import data_read
from flower_privdec.experiment.memory_estimate import memory_need, shortage, table_bytes
from flower_privdec.gradients import explain_kernel
from flower_privdec.graph.mixing_speed import MOST_MEASURED
from flower_privdec.planner.bands import band_facts
from flower_privdec.planner.optimal_rounds import optimum
from flower_privdec.planner.pairs import pair_facts
from flower_privdec.planner.peers import peer_rows
from flower_privdec.planner.timing import estimate_seconds
from flower_privdec.planner.traffic import attack_warnings, codec_warnings, traffic_facts
from flower_privdec.planner.warnings import cost_warnings, ledger_facts, network_warnings, privacy_warnings
from flower_privdec.pushsum.lockstep import final_rounds
from flower_privdec.reporting.plots import connectivity
from flower_privdec.scenario.sections import placed
from flower_privdec.scenario.unused_keys import unused_keys


def final_mixing(experiment: Experiment) -> int | None:
    """Return how many rounds of mixing without steps follow the last one on a network.

    None if nothing is exchanged between peers, or if the graph is too large to measure.
    """
    scenario = experiment.scenario
    mixing = experiment.mixing
    setting = scenario.network.final_mixing
    if mixing is None or scenario.topology.name == "server":
        return None
    if setting == "auto" and mixing.n_peers > MOST_MEASURED:
        return None
    return final_rounds(mixing, scenario.rounds, setting, experiment.arithmetic.damping)[0]


@placed
def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Plan a run: compute its noise and ε, time a few rounds in memory; charge no ledger and write nothing.

    Returns:
        what the attributes of `flower_privdec.api.planning.Plan` describe; for each peer also active_rounds and
            expected_rounds (None if all peers are active in all rounds) and claimed_after_quarters;
        the other values of `optimum`;
        pairs: of noise that cancels between peers, see `pair_facts`; None without;
        correlation: of noise that is correlated over steps, see `band_facts`; None without;
        data: what was read of training examples and the test set, and what was left, see `data_read`;
        gradients: which kernel computes them, and why that one;
        memory (its parts), tables (bytes of each kind, for privsgp-vr), table (the one used) and workers (how many
            processes here); infinite ε is the string "inf".
    """
    scenario = experiment.scenario
    table = experiment.algorithm.table
    partitioning = partition_cohort(experiment)
    need = memory_need(experiment, partitioning.workers)

    # What does not fit into memory is not tried.
    missing = shortage(experiment)
    seconds = None
    evaluation_share = 0.0
    if missing is None:
        seconds, evaluation_share = estimate_seconds(experiment)

    topology = None
    if experiment.mixing is not None:
        topology = connectivity(experiment.mixing) | {"final_mixing": final_mixing(experiment)}

    ledger, ledger_warnings = ledger_facts(experiment)
    return {
        "name": scenario.name,
        "algorithm": scenario.algorithm.name,
        "rounds": scenario.rounds,
        "peers": peer_rows(experiment),
        "ledger": ledger,
        **optimum(experiment),
        "pairs": pair_facts(experiment),
        "correlation": band_facts(experiment),
        "gradients": explain_kernel(experiment.kernel),
        "memory_bytes": need.total,
        "memory": asdict(need),
        "tables": table_bytes(experiment) if table else None,
        "table": table,
        "workers": partitioning.workers,
        "seconds": seconds,
        "topology": topology,
        "traffic": traffic_facts(experiment),
        "data": data_read(experiment, experiment.own.examples),
        "warnings": [
            *map(str, unused_keys(scenario)),
            *privacy_warnings(experiment),
            *ledger_warnings,
            *network_warnings(experiment, topology),
            *codec_warnings(experiment),
            *attack_warnings(experiment),
            *cost_warnings(missing, seconds, evaluation_share),
        ],
    }
