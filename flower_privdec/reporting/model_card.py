"""The card of an exported model: what it is, how it was trained, how good it is, and what it reveals.

Whoever gets the model gets the card, so it says what the peers of a run agree on and what everybody may know: paths,
addresses, commands and peers' names are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from flower_privdec.common.formatting import epsilon_text, setting
from flower_privdec.reporting import wording
from flower_privdec.reporting.data_protection import Table, escaped, markdown_lines, notice_in_short
from flower_privdec.reporting.run_folder import Result, RunGroup
from flower_privdec.scenario.loading import PATHS, file_form, write_yaml

# In this order; `compute` and `evaluation` change nothing about the model.
SECTIONS = ("data", "features", "task", "model", "algorithm", "topology", "participation", "privacy", "attack")
NETWORK = ("codec", "robust")  # what of `network` decides numbers; the rest is addresses and times
# What says where something lies, and the name under which a ledger counts the data. By their whole paths: a table may
# have a column called `test`.
HIDDEN = {*PATHS, ("data", "source")}
PLACE = re.compile(r"~|.*[/\\]")  # in the arguments of parts of one's own, whose keys nobody else knows

HEADER = """---
library_name: pytorch
tags: [differential-privacy, decentralized-learning, flower-privdec]
---
"""


@dataclass(frozen=True)
class ModelFacts:
    """What a card says about the file itself.

    Attributes:
        whose: `mean model of all peers`, or `model of peer 3`.
        file: its name and format.
        inputs, outputs: what they are, with their shapes.
    """

    whose: str
    file: str
    inputs: str
    outputs: str
    n_parameters: int


def model_card(run: Result, facts: ModelFacts) -> str:
    """Return the card as Markdown, beginning with the header that model hubs read."""
    lines = [HEADER, f"# {escaped(run.scenario.name)}: {facts.whose}", ""]
    for title, blocks in (
        ("The model", [_model(facts)]),
        ("How it was trained", _training(run)),
        ("How good it is", _quality(run)),
        ("Privacy", _privacy(run)),
    ):
        lines += [f"## {title}", ""]
        for block in blocks:
            lines += [*markdown_lines(block), ""]

    lines += ["## Scenario", "", "What all peers agreed on, without paths and addresses:", ""]
    lines += ["```yaml", public_yaml(run).rstrip(), "```", ""]
    hidden = [".".join(path) for path in _hidden_arguments(_public_form(run), ())]
    if hidden:
        names = ", ".join(f"`{name}`" for name in hidden)
        lines += [f"Left out because they look like paths or addresses: {names}.", ""]
    return "\n".join(lines)


def _model(facts: ModelFacts) -> Table:
    rows = [
        ("file", facts.file),
        ("input", facts.inputs),
        ("output", facts.outputs),
        ("parameters", f"{facts.n_parameters:,}"),
    ]
    return Table(("", ""), rows)


def _training(run: Result) -> list[str | list[str] | Table]:
    summary = run.summary
    done = summary.get("rounds_done", summary["rounds"])
    rounds = f"{summary['rounds']:,}"
    if not run.finished:
        rounds = f"{done:,} of {rounds}: the run was not finished"
    rows = [
        ("peers", f"{summary['n_peers']:,}, without a server that sees data or models of one peer"),
        ("algorithm", summary["algorithm"]),
        ("rounds", rounds),
        ("graph", run.scenario.topology.name),
        ("seed", str(summary["seed"])),
    ]
    made = summary.get("made", {})
    rows += [(name, made[name]) for name in ("versions", "hardware") if name in made]
    return [
        Table(("", ""), rows),
        "Inputs are prepared as the sections data and features of the scenario below say.",
    ]


def _quality(run: Result) -> list[str | list[str] | Table]:
    summary = run.summary
    rows = []
    for name, kind in summary["metrics"].items():
        values = summary[name]
        if not values:
            continue
        cells = [wording.measured(values[which], kind) for which in ("mean_model", "peer_mean", "peer_min", "peer_max")]
        rows.append((kind["title"], *cells))
    if not rows:
        return ["This run has no evaluation on the public test set."]
    blocks: list[str | list[str] | Table] = [
        Table(("on the public test set", "mean model", "peers' models, mean", "lowest", "highest"), rows),
    ]
    sample = wording.sample_error(summary)
    if sample is not None:
        blocks.append(
            f"The peers' models are {sample}. Others may be lower than the lowest and higher than the highest."
        )
    of_classes = wording.by_class(summary)
    if of_classes:
        blocks.append(Table(wording.CLASS_HEADS, of_classes))
    blocks.append("Nothing is known about other data, or about other groups within these.")
    return blocks


def _privacy(run: Result) -> list[str | list[str] | Table]:
    blocks: list[str | list[str] | Table] = []
    rows = run.summary["privacy"]
    if rows and wording.is_private(run.summary):
        # The summary's own words name the ledger's folder.
        scope = "this run alone"
        if run.scenario.private is not None and run.scenario.private.ledger:
            scope = "all runs on the peer's ledger"

        def cells(row: dict[str, Any]) -> list[str]:
            numbers = [epsilon_text(row["epsilon"]), setting(row["delta"])]
            return [*numbers, *(str(row[key]) for key in ("unit", "adjacency", "calibration")), scope]

        heads = ("peers", "ε", "δ", "unit", "adjacency", "calibration", "scope")
        blocks.append(Table(heads, wording.alike(rows, cells)))
    else:
        blocks.append(wording.guarantee(run.summary))
    blocks += notice_in_short(RunGroup(run.scenario.name, (run,)))
    return blocks


def public_yaml(run: Result) -> str:
    """Return the sections of a run's scenario that the model follows from, without paths and addresses."""
    kept = {name: _without_places(value, (name,)) for name, value in _public_form(run).items()}
    return write_yaml(kept, allow_unicode=True)


def _public_form(run: Result) -> dict[str, Any]:
    """Return the sections of a run's scenario that the model follows from, as they are in a file."""
    form = file_form(run.scenario)
    kept = {name: form[name] for name in SECTIONS if name in form}
    network = {name: form["network"][name] for name in NETWORK if name in form["network"]}
    if network != {"codec": {"name": "exact"}}:
        kept["network"] = network
    return kept


def _hidden_arguments(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the arguments of own parts that a card leaves out: what a part was given is told by name."""
    if isinstance(value, dict):
        items = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list):
        items = [(str(place), part) for place, part in enumerate(value)]
    else:
        return

    for key, part in items:
        here = (*path, key)
        if "arguments" in path and _is_place(part, here):
            yield here
        else:
            yield from _hidden_arguments(part, here)


def _without_places(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        inner = {key: (part, (*path, key)) for key, part in value.items()}
        return {key: _without_places(*pair) for key, pair in inner.items() if not _is_place(*pair)}
    if isinstance(value, list):
        return [_without_places(part, path) for part in value if not _is_place(part, path)]
    if isinstance(value, str) and PurePath(value).is_absolute():
        return PurePath(value).name
    return value


def _is_place(value: Any, path: tuple[str, ...]) -> bool:
    if path in HIDDEN:
        return True
    return "arguments" in path and isinstance(value, str) and PLACE.match(value) is not None
