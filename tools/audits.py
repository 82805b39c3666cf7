"""The table of docs/audit.md: every algorithm's ε as claimed, as printed, and as an audit shows at least.

python -m tools.audits [--trials N] [ALGORITHM ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.audits.audit import AuditedPeers, audit
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import parse_scenario

SCENARIO = """\
name: audited
seed: 1
n_peers: 8
rounds: 30
data: {dataset: digits, samples: 1440, test_samples: 100, validation: 40, batch: {sampling: poisson, size: 18}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
"""
PAPER = ["privacy.calibration=paper", "privacy.paper.c_2=0.3724", "data.batch={sampling: poisson, size: 1}"]
DUAL = "algorithm={{name: {}, regularizer: {{kind: l2, weight: 0.01}}}}"
GRAPHS = ("topology.name=directed-exponential", "topology.name=ring", "topology.name=server")
NO_CLAIM = ("privacy.no-formula", "paper.proposition-4")  # no paper claims an ε for such steps
HEAD = (
    "| algorithm | noise | claimed ε | printed ε | canaries: ε ≥ | replica: ε ≥ | best below printed |\n"
    "|---|---|---|---|---|---|---|"
)
BY_SAMPLING = ("privsgp", "privsgp-vr")  # a plain sum and a table's, whose bounds are others for uniform sampling
UNIFORM = "data.batch={sampling: uniform, size: 18}"
REPLICA = 1_000_000  # trials with an example, and as many without


def experiments(name: str) -> Iterator[tuple[str, Experiment]]:
    """Yield an algorithm's experiments: with the accountant's noise, and with its paper's if that has a formula."""
    if name.endswith("dda"):
        chosen = DUAL.format(name)
    else:
        chosen = f"algorithm.name={name}"
    sizes = ["n_peers=1", "data.samples=180"] if name == "dp-sgd" else []
    built, graph = _first_that_fits([chosen, *sizes])

    yield "rigorous", built
    if name in BY_SAMPLING:
        yield "rigorous, uniform", Experiment.build(parse_scenario(SCENARIO, overrides=[chosen, graph, UNIFORM]))
    more = ["privacy.paper.phi_min=0.1"] if name == "pdsl" else []  # which its eq. 27 divides by
    try:
        yield "paper", Experiment.build(parse_scenario(SCENARIO, overrides=[chosen, *sizes, graph, *PAPER, *more]))
    except ScenarioError as error:
        if error.code not in NO_CLAIM:
            raise


def _first_that_fits(overrides: list[str]) -> tuple[Experiment, str]:
    """Return an experiment on the first graph that the algorithm accepts, and the setting that names it."""
    for name in GRAPHS[:-1]:
        try:
            return Experiment.build(parse_scenario(SCENARIO, overrides=[*overrides, name])), name
        except ScenarioError:
            continue
    return Experiment.build(parse_scenario(SCENARIO, overrides=[*overrides, GRAPHS[-1]])), GRAPHS[-1]


def line(name: str, noise: str, group: AuditedPeers) -> str:
    """Return an algorithm's row of the table."""
    if group.claimed_epsilon is None:
        claimed = "–"
    else:
        claimed = epsilon_text(group.claimed_epsilon)
    shown = f"{group.canary_lower_bound:.2f} | {group.replica_lower_bound:.2f}"
    below = epsilon_text(group.epsilon - group.shown)
    return f"| {name} | {noise} | {claimed} | {epsilon_text(group.epsilon)} | {shown} | {below} |"


def main(
    algorithms: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    trials: Annotated[int, typer.Option(help="Canaries for each.")] = 1000,
) -> None:
    """Print the table."""
    typer.echo(HEAD)
    for name in algorithms or ALGORITHMS:
        for noise, experiment in experiments(name):
            result = audit(experiment, trials=trials, replica=REPLICA)
            typer.echo(line(name, noise, result.groups[0]))
            if not result.holds:
                raise SystemExit(f"{name}: {result.verdict}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
