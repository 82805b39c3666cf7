"""What a study can measure: a number of a run's evaluations, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from flower_privdec.reporting.wording import main_accuracy, main_loss
from flower_privdec.words import did_you_mean


@dataclass(frozen=True)
class Metric:
    """A number of a run's evaluation.

    Attributes:
        title: what it is.
        read: gets it from a line of metrics.jsonl and the algorithm's name.
        share: whether it is a share, shown in percent.
        low: whether less is better.
        over: makes one number of the run's; the last by default.
    """

    title: str
    read: Callable[[dict[str, Any], str], float | None]
    share: bool = False
    low: bool = False
    over: Callable[[Sequence[float]], float] = lambda values: values[-1]


def _late(values: Sequence[float]) -> float:
    """Return the mean of the last fifth: what is left when single rounds differ much, as with few active peers."""
    last = values[-max(1, len(values) // 5) :]
    return sum(last) / len(last)


def _accuracy(line: dict[str, Any], algorithm: str) -> float | None:
    return main_accuracy(algorithm, line["accuracy"])


METRICS = {
    "accuracy": Metric("test accuracy", _accuracy, share=True),
    "late-accuracy": Metric("test accuracy, mean of the last fifth", _accuracy, share=True, over=_late),
    "best-accuracy": Metric("best test accuracy of the run", _accuracy, share=True, over=max),
    "loss": Metric("test loss", lambda m, algorithm: main_loss(algorithm, m["loss"]), low=True),
    "peer-accuracy": Metric("test accuracy of the peers' models", lambda m, _: m["accuracy"]["peer_mean"], share=True),
    "worst-peer": Metric("test accuracy of the worst peer", lambda m, _: m["accuracy"]["peer_min"], share=True),
    "own-labels": Metric(
        "accuracy of personalized models on their peers' own labels",
        lambda m, _: ((m.get("personalized") or {}).get("personal_models") or {}).get("mean"),
        share=True,
    ),
    "consensus": Metric("consensus distance", lambda m, _: m["consensus_distance"], low=True),
}
_OWN = tuple(f"personalized.{models}" for models in ("global_model", "personal_models"))
KEYS = (
    *(f"accuracy.{key}" for key in ("mean_model", "peer_mean", "peer_min", "peer_max")),
    *("loss.mean_model", "consensus_distance", "epsilon", "seconds"),
    *(f"{models}.{key}" for models in _OWN for key in ("mean", "min", "max")),
)
_BY_EXTRA_LABELS = re.compile(r"personalized\.generalization\.(global_model|personal_models)\.\d+")


def _known(name: str) -> str:
    names = (*METRICS, *KEYS)
    if name not in names and not _BY_EXTRA_LABELS.fullmatch(name):
        choice = f"{', '.join(METRICS)}, or a key of metrics.jsonl, as accuracy.peer_max"
        raise ValueError(f"must be one of {choice}{did_you_mean(name, names)}")
    return name


MetricName = Annotated[str, AfterValidator(_known)]


def metric(name: str) -> Metric:
    """Return a metric by its name, or the one at a dotted path of metrics.jsonl, as accuracy.peer_max."""
    if name in METRICS:
        return METRICS[name]

    def read(line: dict[str, Any], _algorithm: str) -> float | None:
        value: Any = line
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else float(value)

    share = name.startswith(("accuracy", "personalized"))
    low = not share
    return Metric(name.replace(".", " ").replace("_", " "), read, share=share, low=low)
