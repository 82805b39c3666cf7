"""What a study can measure: a number of a run's evaluations, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from flower_privdec.reporting.wording import main_loss, main_value
from flower_privdec.tasks.kinds import METRIC_KINDS, MetricKind
from flower_privdec.words import did_you_mean


@dataclass(frozen=True)
class Reading:
    """A number of a run's evaluation.

    Attributes:
        title: what it is.
        read: gets it from a line of metrics.jsonl and the algorithm's name.
        share: whether it is a share, shown in percent.
        low: whether less is better.
        over: makes one number of the run's; the last by default.
        of: the task's metric without which there is none.
    """

    title: str
    read: Callable[[dict[str, Any], str], float | None]
    share: bool = False
    low: bool = False
    over: Callable[[Sequence[float]], float] = lambda values: values[-1]
    of: str | None = None


def _late(values: Sequence[float]) -> float:
    """Return the mean of the last fifth: what is left when single rounds differ much, as with few active peers."""
    last = values[-max(1, len(values) // 5) :]
    return sum(last) / len(last)


def readings_of(name: str, kind: MetricKind) -> dict[str, Reading]:
    """Return what can be looked at of a task's metric: at the end, late, at its best, and of the peers' models."""

    def mean(line: dict[str, Any], algorithm: str) -> float | None:
        return main_value(algorithm, line.get(name))

    def peers(which: str) -> Callable[[dict[str, Any], str], float | None]:
        return lambda line, _: (line.get(name) or {}).get(which)

    def made(title: str, read: Callable[[dict[str, Any], str], float | None], **options: Any) -> Reading:
        return Reading(title, read, share=kind.share, low=not kind.high, of=name, **options)

    return {
        name: made(f"test {kind.title}", mean),
        f"late-{name}": made(f"test {kind.title}, mean of the last fifth", mean, over=_late),
        f"best-{name}": made(f"best test {kind.title} of the run", mean, over=max if kind.high else min),
        f"peer-{name}": made(f"test {kind.title} of the peers' models", peers("peer_mean")),
        f"worst-peer-{name}": made(
            f"test {kind.title} of the worst peer", peers("peer_min" if kind.high else "peer_max")
        ),
    }


METRICS = {
    **{key: metric for name, kind in METRIC_KINDS.items() for key, metric in readings_of(name, kind).items()},
    "loss": Reading("test loss", lambda m, algorithm: main_loss(algorithm, m["loss"]), low=True),
    "own-labels": Reading(
        "accuracy of personalized models on their peers' own labels",
        lambda m, _: ((m.get("personalized") or {}).get("personal_models") or {}).get("mean"),
        share=True,
    ),
    "consensus": Reading("consensus distance", lambda m, _: m["consensus_distance"], low=True),
}
_OWN_LABELS = tuple(f"personalized.{models}" for models in ("global_model", "personal_models"))
KEYS = (
    *(f"{name}.{key}" for name in METRIC_KINDS for key in ("mean_model", "peer_mean", "peer_min", "peer_max")),
    *("loss.mean_model", "consensus_distance", "epsilon", "seconds"),
    *(f"{models}.{key}" for models in _OWN_LABELS for key in ("mean", "min", "max")),
)
_BY_EXTRA_LABELS = re.compile(r"personalized\.generalization\.(global_model|personal_models)\.\d+")


def _known(name: str) -> str:
    names = (*METRICS, *KEYS)
    if name not in names and not _BY_EXTRA_LABELS.fullmatch(name):
        choice = f"{', '.join(METRIC_KINDS)}, loss, consensus or own-labels, or as late-accuracy or accuracy.peer_max"
        raise ValueError(f"must be one of {choice}{did_you_mean(name, names)}")
    return name


MetricName = Annotated[str, AfterValidator(_known)]


def metric(name: str) -> Reading:
    """Return a metric by its name, or the one at a dotted path of metrics.jsonl, as accuracy.peer_max."""
    if name in METRICS:
        return METRICS[name]

    def read(line: dict[str, Any], _algorithm: str) -> float | None:
        value: Any = line
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else float(value)

    first = name.partition(".")[0]
    kind = METRIC_KINDS.get(first)
    share, low = (kind.share, not kind.high) if kind else (first == "personalized", first != "personalized")
    title = name.replace(".", " ").replace("_", " ")
    return Reading(title, read, share=share, low=low, of=first if kind else None)
