"""The metrics that peers report, made fit to be averaged: each peer's are its own app's, and one may have others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from flwr.app import Message, MetricRecord, RecordDict

log = logging.getLogger("flwr.privdec")


def comparable(replies: Iterable[Message], key: str) -> list[RecordDict]:
    """Return what an average can be taken of: the metrics that most peers report, with a weight each.

    Args:
        replies: the peers' answers; those without metrics say nothing.
        key: of the weight. Where some have none, or it is no number >= 0, or all are zero, all count alike.

    Returns:
        Records of the same names, each a number or a list as long as the others'; who reports others is left out, and
        named in the log.
    """
    said = {r.metadata.src_node_id: next(iter(r.content.metric_records.values())) for r in replies if _has(r)}
    shapes = {node: _shape(metrics, key) for node, metrics in said.items()}
    kinds = list(shapes.values())
    usual = max(kinds, key=kinds.count, default=())
    if odd := [node for node, shape in shapes.items() if shape != usual]:
        log.warning("the metrics of SuperNodes %s are not those that the others report, and left out", odd)
    alike = [metrics for node, metrics in said.items() if shapes[node] == usual]
    weights = [_weight(metrics.get(key)) for metrics in alike]
    weighed = all(weight is not None for weight in weights) and sum(weight or 0 for weight in weights) > 0
    return [RecordDict({"metrics": m if weighed else MetricRecord({**m, key: 1})}) for m in alike]


def _has(reply: Message) -> bool:
    return bool(reply.content.metric_records)


def _shape(metrics: MetricRecord, key: str) -> tuple[tuple[str, int], ...]:
    """Return the names and how long each list is, -1 for a number."""
    sizes = {name: len(value) if isinstance(value, list) else -1 for name, value in metrics.items() if name != key}
    return tuple(sorted(sizes.items()))


def _weight(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None
