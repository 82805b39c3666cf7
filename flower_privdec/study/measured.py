"""The numbers that a study can measure of a run's evaluations, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_privdec.common.formatting import did_you_mean
from flower_privdec.errors import ScenarioError
from flower_privdec.reporting.wording import main_loss, main_value
from flower_privdec.scenario import Scenario
from flower_privdec.tasks.kinds import MetricKind


@dataclass(frozen=True)
class Reading:
    """A number of a run's evaluation.

    Attributes:
        title: in tables and figures.
        read: returns it from a line of metrics.jsonl and the algorithm's name.
        share: whether it is a fraction, shown in percent.
        low: whether less is better.
        over: reduces the run's values to one; the last by default.
    """

    title: str
    read: Callable[[dict[str, Any], str], float | None]
    share: bool = False
    low: bool = False
    over: Callable[[Sequence[float]], float] = lambda values: values[-1]

    @property
    def sign(self) -> int:
        """Return 1 where more is better, or -1."""
        return -1 if self.low else 1


def _late(values: Sequence[float]) -> float:
    """Return the mean of the last fifth, for runs whose single rounds differ much, as with few active peers."""
    last = values[-max(1, len(values) // 5) :]
    return sum(last) / len(last)


def readings_of(name: str, kind: MetricKind) -> dict[str, Reading]:
    """Return the readings of a task's metric: at the end, late, at its best, and of the peers' models."""

    def mean(line: dict[str, Any], algorithm: str) -> float | None:
        return main_value(algorithm, line.get(name))

    def peers(which: str) -> Callable[[dict[str, Any], str], float | None]:
        return lambda line, _: (line.get(name) or {}).get(which)

    def reading(title: str, read: Callable[[dict[str, Any], str], float | None], **options: Any) -> Reading:
        return Reading(title, read, share=kind.share, low=not kind.high, **options)

    keys = ("mean_model", "peer_mean", "peer_min", "peer_max")
    return {
        name: reading(f"test {kind.title}", mean),
        f"late-{name}": reading(f"test {kind.title}, mean of the last fifth", mean, over=_late),
        f"best-{name}": reading(f"best test {kind.title} of the run", mean, over=max if kind.high else min),
        f"peer-{name}": reading(f"test {kind.title} of the peers' models", peers("peer_mean")),
        f"worst-peer-{name}": reading(
            f"test {kind.title} of the worst peer", peers("peer_min" if kind.high else "peer_max")
        ),
        **{f"{name}.{key}": reading(f"{kind.title} {key.replace('_', ' ')}", peers(key)) for key in keys},
    }


def _key(path: str, *, share: bool) -> Reading:
    """Return the reading of a dotted key of metrics.jsonl."""

    def read(line: dict[str, Any], _algorithm: str) -> float | None:
        value: Any = line
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else float(value)

    return Reading(path.replace(".", " ").replace("_", " "), read, share=share, low=not share)


ALWAYS = {
    "loss": Reading("test loss", lambda m, algorithm: main_loss(algorithm, m["loss"]), low=True),
    "own-labels": Reading(
        "accuracy of personalized models on their peers' own labels",
        lambda m, _: ((m.get("personalized") or {}).get("personal_models") or {}).get("mean"),
        share=True,
    ),
    "suboptimality": Reading("suboptimality", lambda m, _: m.get("suboptimality"), low=True),
    "consensus": Reading("consensus distance", lambda m, _: m["consensus_distance"], low=True),
    **{path: _key(path, share=False) for path in ("loss.mean_model", "consensus_distance", "epsilon", "seconds")},
    **{
        path: _key(path, share=True)
        for models in ("global_model", "personal_models")
        for path in (f"personalized.{models}.{which}" for which in ("mean", "min", "max"))
    },
}
_BY_EXTRA_LABELS = re.compile(r"personalized\.generalization\.(global_model|personal_models)\.\d+")


def kinds_of(scenarios: Iterable[Scenario]) -> dict[str, MetricKind]:
    """Return the kind of each metric that some scenarios evaluate, by name."""
    return {name: kind for scenario in scenarios for name, kind in scenario.task.kinds().items()}


def metric(name: str, kinds: Mapping[str, MetricKind]) -> Reading:
    """Return a metric by its name: one of a task, as late-accuracy, or a key of metrics.jsonl, as accuracy.peer_max.

    Args:
        kinds: the metrics of the task.

    Raises:
        ScenarioError: no metric has that name; the message lists those that exist.
    """
    readings = ALWAYS | {
        key: reading for kind_name, kind in kinds.items() for key, reading in readings_of(kind_name, kind).items()
    }
    if _BY_EXTRA_LABELS.fullmatch(name):
        return _key(name, share=True)
    if name not in readings:
        first = next(iter(kinds), "accuracy")
        raise ScenarioError(
            f"metric {name!r} must be one of {', '.join(kinds)}, loss, consensus, own-labels, or as late-{first}, "
            f"best-{first}, peer-{first}, worst-peer-{first} or {first}.peer_max{did_you_mean(name, readings)}",
            code="study.unknown-metric",
        )
    return readings[name]
