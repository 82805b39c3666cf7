"""The section that says what is learned: the loss, and the metrics by which models are tried."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from flower_privdec.catalogue import LOSSES, METRICS
from flower_privdec.scenario.fields import Section
from flower_privdec.tasks.kinds import LOSS_KINDS, METRIC_KINDS, USUAL_METRICS, Targets, unfit


class TaskSection(Section):
    """What is learned.

    Attributes:
        loss: of one example; it says what targets an example has.
        metrics: by which models are tried on the public test set, the first one first; by default what is usual for
            the loss.
    """

    loss: Annotated[str, LOSSES] = "cross-entropy"
    metrics: Annotated[list[Annotated[str, METRICS]], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _usual_metrics(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("metrics") is not None:
            return data
        known = LOSS_KINDS.get(str(data.get("loss", "cross-entropy")))
        return {**data, "metrics": list(USUAL_METRICS[known.targets if known else "classes"])}

    @model_validator(mode="after")
    def _metrics_of_the_task(self) -> TaskSection:
        for name in self.metrics:
            wrong = unfit(name, self.loss)
            if wrong is not None:
                raise ValueError(f"{name} {wrong}")
            if self.metrics.count(name) > 1:
                raise ValueError(f"metrics names {name} twice: keep one")
        return self

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each metric's name with its title, whether more is better, and whether it is a share of 1."""
        kinds = {name: METRIC_KINDS[name] for name in self.metrics}
        return {n: {"title": kind.title, "high": kind.high, "share": kind.share} for n, kind in kinds.items()}

    @property
    def targets(self) -> Targets:
        """What an example's target is."""
        return LOSS_KINDS[self.loss].targets
