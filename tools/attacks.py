"""What one liar of eight costs, with `network.robust` and without: a table of attacks, as Markdown.

    python -m tools.attacks                                   digits, which come with scikit-learn (some minutes)
    python -m tools.attacks --mnist FOLDER                    MNIST, from the folder that torchvision's files lie in
    python -m tools.attacks --partition dirichlet             unlike data at each peer
    python -m tools.attacks --seeds 3 --graphs complete --algorithms d-psgd

Accuracy is the mean of the honest peers' own models on the test set, in points, over the seeds. All runs of a seed have
the same batches and the same noise, so that a difference is of the attack or of the rule.

What a liar costs is of two kinds. Its own data are gone, whatever the others do: the line "the honest alone" is a run
of the seven others without it. What an attack costs beyond that is in the last columns, one for each rule.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from flower_privdec.common.catalogue import ATTACKS, ROBUST_RULES
from flower_privdec.core.attack import build_attack
from flower_privdec.core.robust_mix import RobustMix
from flower_privdec.core.robust_rule import RobustRule, robust_rule
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import peers_metrics
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.scenario import parse_scenario

LIAR = 7
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nobody lies": ("", {}),
    "sign flip": ("sign-flip", {}),
    "times -10": ("scale", {"factor": -10.0}),
    "times 10": ("scale", {"factor": 10.0}),
    "times 1e25": ("scale", {"factor": 1e25}),
    "large noise": ("noise", {}),
    "mimic": ("mimic", {}),
    "ALIE": ("alie", {}),
    "minus the mean": ("minus-mean", {}),
    "NaN": ("nan", {}),
    "hidden": ("hidden", {}),
    "one way": ("one-way", {}),
}
ALONE = "the honest alone"
DATA = {
    "digits": ("{dataset: digits, batch: {size: 45}, partition: %s}", 60, 1e-3),
    "mnist": ("{dataset: mnist, root: %s, batch: {size: 128}, partition: %s}", 100, 1e-5),
}
PARTITIONS = {"iid": "{kind: iid}", "dirichlet": "{kind: dirichlet, alpha: 0.25, min_size: 60}"}
RATES = {"privsgp": 0.5, "d-psgd": 0.5}


def scenario_text(data: str, rounds: int, delta: float, graph: str, algorithm: str, seed: int) -> str:
    """Return the scenario that the table is about."""
    # D-PSGD has no noise of its own; with a budget it is DP²-SGD.
    name = "dp2-sgd" if algorithm == "d-psgd" else algorithm
    return f"""
name: attacks
seed: {seed}
n_peers: 8
rounds: {rounds}
data: {data}
model: {{name: softmax}}
algorithm: {{name: {name}, learning_rate: {RATES[algorithm]}}}
topology: {{name: {graph}}}
privacy: {{epsilon: 3.0, delta: {delta}, clip_norm: 1.0}}
"""


def accuracies(text: str, rules: Sequence[RobustRule | None], lies: Sequence[str]) -> Iterator[tuple[str, int, float]]:
    """Yield each lie, the number of each rule, and the honest peers' accuracy in points."""
    experiment = Experiment.build(parse_scenario(text))
    for name in lies:
        kind, keys = LIES[name]
        attack = None
        if kind:
            attack = build_attack(ATTACKS.section(kind, peers=[LIAR], **keys))
        for number, rule in enumerate(rules):
            experiment.algorithm.make_robust(RobustMix((), rule=rule, attack=attack, start=experiment.initial))
            cohort = experiment.cohort()
            engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
            engine.rounds(experiment.scenario.rounds)
            accuracy = peers_metrics(experiment, engine.state.rows)["accuracy"][:LIAR]
            yield name, number, 100 * mean(value or 0.0 for value in accuracy)


def accuracy_alone(text: str) -> float:
    """Return the accuracy of the honest peers in a network without the liar, with the data that they have beside it."""
    experiment = Experiment.build(parse_scenario(text))
    cohort = experiment.cohort()
    assert cohort.mixing is not None
    assert cohort.protection is not None
    name = experiment.scenario.topology.name
    honest = replace(
        cohort,
        peers=cohort.peers[:LIAR],
        n_peers=LIAR,
        data=cohort.data.part(0, LIAR),
        protection=cohort.protection.part(0, LIAR),
        mixing=Mixing(build_topology(name, LIAR, seed=1), cohort.mixing.weights),
    )
    engine = Engine(experiment.algorithm, honest, experiment.initial_state(honest))
    engine.rounds(experiment.scenario.rounds)
    accuracy = peers_metrics(experiment, engine.state.rows)["accuracy"]
    return 100 * mean(value or 0.0 for value in accuracy)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mnist", help="the folder that has MNIST/raw; without it, digits")
    parser.add_argument("--partition", choices=PARTITIONS, default="iid")
    parser.add_argument("--graphs", nargs="+", default=["complete", "directed-exponential"])
    parser.add_argument("--algorithms", nargs="+", choices=RATES, default=["privsgp", "d-psgd"])
    parser.add_argument("--rules", nargs="+", choices=ROBUST_RULES, default=["clipped"])
    parser.add_argument("--lies", nargs="+", choices=LIES, default=list(LIES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    data, rounds, delta = DATA["mnist" if options.mnist else "digits"]
    partition = PARTITIONS[options.partition]
    data = data % ((options.mnist, partition) if options.mnist else partition)
    rules = [None, *(robust_rule(ROBUST_RULES.section(kind, byzantine=1)) for kind in options.rules)]

    beyond = [f"{rule}: lost beyond the liar's data" for rule in options.rules]
    print("| algorithm | graph | lie |", " | ".join(["believed", *options.rules, *beyond]), "|")
    print("|---" * (3 + len(rules) + len(beyond)) + "|")
    for algorithm in options.algorithms:
        for graph in options.graphs:
            if algorithm == "d-psgd" and graph == "directed-exponential":
                continue  # its weights are doubly stochastic, which this graph's are as well: nothing new
            found: dict[tuple[str, int], list[float]] = {}
            alone = []
            for seed in range(1, options.seeds + 1):
                text = scenario_text(data, options.rounds or rounds, delta, graph, algorithm, seed)
                alone.append(accuracy_alone(text))
                for name, number, accuracy in accuracies(text, rules, options.lies):
                    found.setdefault((name, number), []).append(accuracy)

            label = f"| {algorithm} | {graph} |"
            cells = [f"{mean(alone):.1f}"] * len(rules) + [""] * len(beyond)
            print(label, ALONE, "|", " | ".join(cells), "|", flush=True)
            for name in options.lies:
                cells = [f"{mean(found[name, number]):.1f}" for number in range(len(rules))]
                lost = [f"{mean(alone) - mean(found[name, number]):.1f}" for number in range(1, len(rules))]
                if not LIES[name][0]:
                    lost = [""] * len(lost)  # nothing is lost
                print(label, name, "|", " | ".join(cells + lost), "|", flush=True)


if __name__ == "__main__":
    main()
