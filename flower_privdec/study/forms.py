"""What a part of a study shows and looks for: pictures, a table of two axes, and checks of its claim."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flower_privdec.scenario.fields import Section
from flower_privdec.study.measured import MetricName

Labelled = Annotated[dict[str, str], Field(default_factory=dict)]


class Figure(Section):
    """A picture: a metric over the rounds, or its final value along an axis.

    Attributes:
        kind: `curves` over the rounds, or `final` values: lines along an axis of numbers, points along categories.
        metric: which.
        x: the axis along which, for final.
        by: the axis whose points are colours.
        panels: the axis whose points are pictures side by side.
        where: axes that are held, each at a label.
        title: over the picture; left out, the metric.
        log: whether the metric's axis is logarithmic.
    """

    kind: Literal["curves", "final"]
    metric: MetricName = "accuracy"
    x: str | None = None
    by: str | None = None
    panels: str | None = None
    where: Labelled
    title: str | None = None
    log: bool = False

    def axes(self) -> list[str]:
        """Return the axes it names."""
        return [name for name in (self.x, self.by, self.panels, *self.where) if name is not None]


class Pivot(Section):
    """A table of one metric: one axis down, one across."""

    rows: str
    columns: str
    metric: MetricName = "accuracy"


class Ordered(Section):
    """The metric rises along these points of an axis, wherever the other axes stand."""

    kind: Literal["ordered"]
    axis: str
    order: list[str] | None = None  # from the least to the greatest; by default the axis' own order
    metric: MetricName = "accuracy"
    where: Labelled


class Best(Section):
    """A point of an axis, or one at most `reach` places from it, has the best metric."""

    kind: Literal["best"]
    axis: str
    label: str
    reach: Annotated[int, Field(ge=0)] = 0
    metric: MetricName = "accuracy"
    where: Labelled


class Above(Section):
    """All cells are better than one of them, the baseline."""

    kind: Literal["above"]
    baseline: Annotated[dict[str, str], Field(min_length=1)]
    metric: MetricName = "accuracy"
    where: Labelled


class Speedup(Section):
    """Points whose value is n times larger reach a level of the metric in n times fewer rounds."""

    kind: Literal["speedup"]
    axis: str
    metric: MetricName = "loss"
    levels: list[float] | None = None  # by default the best that every cell reaches
    within: Annotated[float, Field(gt=1)] = 1.25  # the factor that is still taken for n
    where: Labelled


Check = Annotated[Ordered | Best | Above | Speedup, Field(discriminator="kind")]
