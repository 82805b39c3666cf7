"""The section that says what is learned: the loss, and the metrics by which models are tried."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from flower_privdec.catalogue import LOSSES, METRICS
from flower_privdec.scenario.fields import Count, Section
from flower_privdec.tasks.kinds import LOSS_KINDS, METRIC_KINDS, USUAL_METRICS, MetricKind, Targets, unfit

TAKEN = {  # what else stands beside metrics in a run's files
    *("round", "loss", "consensus_distance", "personalized", "epsilon", "seconds", "name", "algorithm", "runtime"),
    *("n_peers", "rounds", "rounds_done", "seed", "seeds", "metrics", "traffic", "privacy", "budget_note", "noise"),
    *("numbers", "budget", "spread", "n_runs"),
    *("evaluation_private", "wall_seconds", "peer_steps_per_second", "epsilon_so_far", "finished", "consensus"),
    *("generalization", "own-labels", "label", "suboptimality", "optimum", "claim_note"),
}


class OwnLossSection(Section):
    """A loss of your own.

    Attributes:
        module: `package.module:function`, imported from where the command runs: a function of one example's outputs
            [k] and its target, in torch operations, that returns one number.
        targets: what it takes: classes (a whole number), numbers or labels (0 or 1, each as many as an example has).
        outputs: how many the model has; left out, as many as there are classes, numbers or labels.
    """

    module: str
    targets: Literal["classes", "numbers", "labels"] = "classes"
    outputs: Count | None = None


class OwnMetricSection(Section):
    """A metric of your own.

    Attributes:
        module: `package.module:function`, imported from where the command runs: a function of a model's outputs [N, k]
            and the targets [N] or [N, w] of the public test set, that returns one number.
        name: what to call it; left out, the function's name.
        better: whether more or less of it is better.
        share: whether it is a share of 1, shown in percent.
    """

    module: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] | None = None
    better: Literal["higher", "lower"] = "higher"
    share: bool = False

    def kind(self) -> MetricKind:
        """Return what is known of it."""
        return MetricKind(self.title, ("classes", "numbers", "labels"), self.better == "higher", self.share)

    @property
    def title(self) -> str:
        """What to call it."""
        return self.name or self.module.rpartition(":")[2]


def _tag(value: Any) -> str:
    return "named" if isinstance(value, str) else "own"


LossChoice = Annotated[
    Annotated[str, LOSSES, Tag("named")] | Annotated[OwnLossSection, Tag("own")],
    Discriminator(_tag),
]
MetricChoice = Annotated[
    Annotated[str, METRICS, Tag("named")] | Annotated[OwnMetricSection, Tag("own")],
    Discriminator(_tag),
]


class TaskSection(Section):
    """What is learned.

    Attributes:
        loss: of one example; it says what targets an example has. One of your own is a section with module.
        metrics: by which models are tried on the public test set, the first one first; left out, what is usual for the
            loss. One of your own is a section with module.
    """

    loss: LossChoice = "cross-entropy"
    metrics: list[MetricChoice] = Field(default=["accuracy"], min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _usual_metrics(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("metrics") is not None:
            return data
        loss = data.get("loss", "cross-entropy")
        kinds = LOSS_KINDS.get(loss) if isinstance(loss, str) else None
        targets = kinds.targets if kinds else loss.get("targets") if isinstance(loss, dict) else None
        return {**data, "metrics": list(USUAL_METRICS.get(targets or "classes", ("accuracy",)))}

    @model_validator(mode="after")
    def _metrics_of_the_task(self) -> TaskSection:
        names = list(self.kinds())
        for metric in self.metrics:
            if isinstance(metric, OwnMetricSection):
                if metric.title in TAKEN:
                    raise ValueError(f"metrics: the name {metric.title} is taken in a run's files: give another")
            elif self.own_loss is not None and self.own_loss.outputs is not None:
                raise ValueError(
                    f"{metric} cannot be told of the outputs of loss {self.loss_name}: give metrics of your own"
                )
            elif wrong := unfit(metric, self.loss_name, self.targets):
                raise ValueError(f"{metric} {wrong}")
        if len(names) < len(self.metrics):
            raise ValueError(f"metrics names one of {', '.join(names)} twice: keep one")
        return self

    def kinds(self) -> dict[str, MetricKind]:
        """Return what is known of each metric, by its name."""
        return {
            metric if isinstance(metric, str) else metric.title: METRIC_KINDS[metric]
            if isinstance(metric, str)
            else metric.kind()
            for metric in self.metrics
        }

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each metric's name with its title, whether more is better, and whether it is a share of 1."""
        return {n: {"title": kind.title, "high": kind.high, "share": kind.share} for n, kind in self.kinds().items()}

    @property
    def own_loss(self) -> OwnLossSection | None:
        """The loss of the user's own, or None."""
        return self.loss if isinstance(self.loss, OwnLossSection) else None

    @property
    def loss_name(self) -> str:
        """What the loss is called."""
        return self.loss if isinstance(self.loss, str) else self.loss.module

    @property
    def targets(self) -> Targets:
        """What an example's target is."""
        return LOSS_KINDS[self.loss].targets if isinstance(self.loss, str) else self.loss.targets
