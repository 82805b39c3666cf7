"""Who learns what of one example: the releases of a scenario, and the ε of each observer."""

from __future__ import annotations

import json
import math
from typing import Any

import typer

from flower_privdec.common.formatting import epsilon_text
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.experiment.spent import json_number
from flower_privdec.graph.participation import Leaving
from flower_privdec.planner.pairwise import by_colluders, not_computed, views
from flower_privdec.privacy.mechanism.declared import Drawing, ReleasedSum
from flower_privdec.privacy.mechanism.events import EVERYBODY, ONE_NEIGHBOUR
from flower_privdec.reporting.console import comparison_text

UNIT = "one example of one peer"
ADJACENCY = "zero-out: the example's gradient is replaced by zero wherever it would be used; its peer's size is public"
MOST_STEPS = 10_000  # whose declarations are listed
HOW_DRAWN = {
    "poisson": "each example is in a step's batch by an independent draw",
    "uniform": "a batch of fixed size is drawn without replacement in each step",
    "shuffle": "an epoch's batches are disjoint; drawing amplifies nothing",
    "full": "all examples are in every step; nothing is amplified",
    "blocks": "one of some fixed batches is drawn in each step; which one counts as public",
}
ALONE = (
    "what one peer that colludes with no other learns, at most, where peers mix in step; over all rounds it is "
    "no bound: others' steps count as given, and follow from models that hold the example"
)
SEES = {
    "all": "to everybody who sees the peer's messages",
    "neighbour": "a sum of its own to each neighbour",
    "self": "which stays on the peer, without noise",
}


def privacy_statement(experiment: Experiment) -> dict[str, Any]:
    """Return what a scenario promises, from nothing but its declared releases.

    Returns:
        unit, adjacency; sampling and participation in words; releases: for each kind of step the sums that it makes;
        observers: of each who it is, what it sees, and the least and the largest ε of the peers towards it, "inf" where
        there is no bound; by_distance: what one peer alone sees of others (`pairwise.Distance`), or why that is not
        computed; by_colluders: where noise cancels, the largest ε for each number of colluders.
    """
    own = experiment.own
    scenario = experiment.scenario
    plan = experiment.own.protection
    drawings = drawings_of(experiment, own.peers, own.sampler)
    steps = range(min(scenario.rounds * experiment.algorithm.steps_per_round, MOST_STEPS))
    kinds = dict.fromkeys(experiment.algorithm.released(step, drawings[0]) for step in steps)
    who = scenario.participation.kind
    active = "all peers are active in every round"
    if isinstance(experiment.participation, Leaving):
        active = f"{experiment.participation}: unknown beforehand, so all plan and pay as if they stayed"
    elif who != "all":
        active = f"{who}: who is active is public, so that inactive rounds cost nothing and hide nothing"

    by_distance: str | list[dict[str, Any]] | None = not_computed(experiment)
    if by_distance is None:
        by_distance = [{key: json_number(value) for key, value in vars(one).items()} for one in views(experiment)]

    colluders = []
    if plan is not None and plan.pairs is not None:
        colluders = [[count, json_number(value)] for count, value in by_colluders(experiment)]

    return {
        "unit": UNIT,
        "adjacency": ADJACENCY,
        "sampling": {drawing.sampling: _how_drawn(drawing) for drawing in drawings},
        "participation": active,
        "releases": [None if sums is None else [_sum(part) for part in sums] for sums in kinds],
        "observers": _observers(experiment),
        "by_distance": by_distance,
        "by_colluders": colluders,
    }


def _how_drawn(drawing: Drawing) -> str:
    """Return how a peer draws its examples, in words."""
    if drawing.groups == 1:
        return HOW_DRAWN[drawing.sampling]
    return (
        f"each step draws from the next of {drawing.groups} fixed groups, so that an example is in one of "
        f"{drawing.groups} steps in a row at most; {HOW_DRAWN[drawing.sampling]}"
    )


def _sum(part: ReleasedSum) -> dict[str, Any]:
    return {
        "sum": part.name,
        "to": SEES[part.to],
        "drawn_example_moves_it": part.drawn,
        "other_example_moves_it": part.idle,
        "over": part.over,
    }


def _observers(experiment: Experiment) -> list[dict[str, Any]]:
    """Return each observer, what it sees, and the least and the largest ε of the peers towards it."""
    plan = experiment.own.protection
    rounds = experiment.scenario.rounds
    if plan is None:
        return [_row("everybody", "sums without noise", [math.inf])]

    everything = plan.epsilons(rounds)
    others = "all other peers, relays and servers together"
    if plan.pairs is not None:
        others = f"up to {plan.pairs.colluding} other peers, relays and servers together"
    rows = [
        _row("a reader of the final models", "functions of the releases", everything),
        _row("an eavesdropper, relay or server", "at most every message of the run", everything),
        _row("one neighbour", "what the peer sends it, and what others pass on", everything),
    ]
    if "replies" in plan.others:
        sees = "the gradients for it alone, of all that it receives"
        rows.append(_row("one neighbour, by its replies", sees, plan.epsilons(rounds, ONE_NEIGHBOUR)))
    rows.append(_row(others, "every message and every model", everything))
    if plan.pairs is not None:
        sees = "every message, and the secrets of all pairs"
        rows.append(_row("all other peers together", sees, plan.epsilons(rounds, EVERYBODY)))
    return rows


def _row(observer: str, sees: str, epsilons: list[float]) -> dict[str, Any]:
    return {"observer": observer, "sees": sees, "epsilon": [json_number(min(epsilons)), json_number(max(epsilons))]}


def print_statement(experiment: Experiment, as_json: bool) -> None:
    """Print what a scenario promises towards each observer."""
    statement = privacy_statement(experiment)
    typer.echo(json.dumps(statement, indent=2) if as_json else statement_text(statement))


def statement_text(statement: dict[str, Any]) -> str:
    """Return a statement in words, with a table of observers."""
    lines = [f"unit: {statement['unit']}", f"adjacency: {statement['adjacency']}"]
    lines += [f"sampling {name}: {text}" for name, text in statement["sampling"].items()]
    lines += [f"participation: {statement['participation']}"]
    for sums in statement["releases"]:
        if sums is None:
            lines += ["a step declares nothing: ε = ∞"]
        else:
            lines += [_sentence(part) for part in sums]

    rows = []
    for one in statement["observers"]:
        low, high = map(epsilon_text, one["epsilon"])
        rows.append([one["observer"], one["sees"], low if low == high else f"{low} to {high}"])
    note = "ε of each peer after all rounds, an upper bound; what protects from more also protects from less"
    lines += ["", comparison_text(["observer", "sees", "ε"], rows, note)]
    by_distance = statement["by_distance"]
    if isinstance(by_distance, str):
        lines += ["", f"a single peer, by distance: not computed: {by_distance}"]
    else:
        figures = [
            [f"{one['hops']}", f"{one['pairs']:,}", *(epsilon_text(one[key]) for key in ("one_step", "all_rounds"))]
            for one in by_distance
        ]
        lines += [
            "",
            comparison_text(["hops", "pairs", "ε of one step", "ε if others' steps were given"], figures, ALONE),
        ]

    if statement["by_colluders"]:
        figures = [[str(count), epsilon_text(value)] for count, value in statement["by_colluders"]]
        lines += ["", comparison_text(["colluders", "ε"], figures, "of peers that hold secrets of pairs")]
    return "\n".join(lines)


def _sentence(part: dict[str, Any]) -> str:
    idle = part["other_example_moves_it"]
    rest = f", one that was not drawn by {idle:g}" if idle else ""
    return (
        f"a step makes the sum {part['sum']!r}, {part['to']}: a drawn example moves it by "
        f"{part['drawn_example_moves_it']:g} clip norms at most{rest}"
    )
