"""What nodes answer: where they are, what the network's models are worth, and what was spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from flwr.app import ConfigRecord, MetricRecord

from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.spent import Spent

METRICS, PLACE, SPENT = "metrics", "place", "spent"
Number = TypeVar("Number", int, float)


def spent_record(cohort: Cohort, rounds: int) -> ConfigRecord:
    """Return what the peers have spent as a record, in which NaN stands for no claim."""
    spent = Spent.of(cohort, rounds)
    record = ConfigRecord({"epsilons": spent.epsilons, "deltas": spent.deltas, "rounds_run": spent.rounds_run})
    record["replies"] = spent.replies
    record["claimed"] = [math.nan if claim is None else claim for claim in spent.claimed]
    return record


def spent_of(told: Sequence[ConfigRecord]) -> Spent:
    """Return what all peers have spent, from the records of their nodes in order."""
    claimed = [None if math.isnan(claim) else claim for claim in _joined(told, "claimed", float)]
    epsilons, deltas, replies = (_joined(told, name, float) for name in ("epsilons", "deltas", "replies"))
    return Spent(epsilons, deltas, claimed, _joined(told, "rounds_run", int), replies=replies)


def _joined(told: Sequence[ConfigRecord], name: str, kind: type[Number]) -> list[Number]:
    """Return what the nodes, in the order of their peers, tell of each of them."""
    return [kind(value) for record in told for value in record[name]]  # type: ignore[union-attr]


def flat_record(metrics: dict[str, Any], prefix: str = "") -> MetricRecord:
    """Return nested metrics as the flat numbers a MetricRecord holds; "inf" becomes infinity, None is left out.

    Left out too is what each peer made of each neighbour, `shapley`, of which there may be very much: the file has it.
    """
    flat = MetricRecord()
    for name, value in metrics.items():
        if name == "shapley":
            continue
        if isinstance(value, dict):
            flat.update(flat_record(value, f"{prefix}{name}."))
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, int) else float(value)
    return flat
