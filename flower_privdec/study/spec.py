"""The form of a study file: parts, axes, tables, figures and checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from flower_privdec.common.formatting import setting
from flower_privdec.errors import ScenarioError
from flower_privdec.scenario.fields import Section
from flower_privdec.scenario.loading import parse_model, read_text
from flower_privdec.scenario.shipped import shipped

Lines = Annotated[list[str], Field(default_factory=list)]


class Point(Section):
    """One place on an axis.

    Attributes:
        label: what to call it.
        settings: `key=value` lines that make it.
        value: where it stands on a numeric axis; left out, it is a category.
    """

    label: str
    settings: Lines
    value: float | None = None


class Axis(Section):
    """What varies between cells: either one key's values, or named points with settings of their own.

    Attributes:
        title: what tables and pictures call it; left out, its name.
        key: of the scenario, as `privacy.epsilon`.
        values: of the key, each a point.
        points: in place of key and values.
    """

    title: str | None = None
    key: str | None = None
    values: list[Any] | None = None
    points: list[Point] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Axis:
        if (self.points is None) == (self.values is None) or (self.values is None) != (self.key is None):
            raise ValueError("give an axis either key and values, or points (label and settings): one of the two")
        labels = self.labels()
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"an axis needs points whose labels differ, not {labels}")
        return self

    def all_points(self) -> list[Point]:
        """Return the points in order; numbers along a key are labelled and placed by themselves."""
        if self.points is not None:
            return self.points
        return [_point(str(self.key), value) for value in self.values or []]

    def labels(self) -> list[str]:
        """Return the points' labels in order."""
        return [point.label for point in self.all_points()]


def _point(key: str, value: Any) -> Point:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Point(
        label=setting(value) if number else str(value),
        settings=[f"{key}={json.dumps(value)}"],
        value=float(value) if number else None,
    )


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
        along: what curves are drawn over: rounds, or the gradients that all peers have computed.
    """

    kind: Literal["curves", "final"]
    metric: str = "accuracy"
    x: str | None = None
    by: str | None = None
    panels: str | None = None
    where: Labelled
    title: str | None = None
    log: bool = False
    along: Literal["rounds", "gradients"] = "rounds"

    def axes(self) -> list[str]:
        """Return the axes it names."""
        return [name for name in (self.x, self.by, self.panels, *self.where) if name is not None]


class Pivot(Section):
    """A table of one metric.

    Attributes:
        rows: the axis down.
        columns: the axis across.
        metric: which.
    """

    rows: str
    columns: str
    metric: str = "accuracy"


class Slope(Section):
    """The metric falls over the rounds at least as fast as a power of them, at every point.

    Attributes:
        kind: `slope`.
        at_most: the largest slope of a line through the logarithms of metric and round.
        first: the round from which the line is fitted; the last should be a hundred times it or more.
        metric: which.
        where: axes that are held, each at a label.
    """

    kind: Literal["slope"]
    at_most: Annotated[float, Field(lt=0)]
    first: Annotated[int, Field(ge=1)]
    metric: str = "suboptimality"
    where: Labelled


class Ordered(Section):
    """The metric rises along these points of an axis, wherever the other axes stand.

    Attributes:
        kind: `ordered`.
        axis: along which.
        order: labels, from the least to the greatest; left out, the axis' own order.
        metric: which.
        where: axes that are held, each at a label.
    """

    kind: Literal["ordered"]
    axis: str
    order: list[str] | None = None
    metric: str = "accuracy"
    where: Labelled


class Best(Section):
    """A point of an axis, or one near it, has the best metric, wherever the other axes stand.

    Attributes:
        kind: `best`.
        axis: along which.
        label: of the point.
        reach: how many places from it count too.
        metric: which.
        where: axes that are held, each at a label.
    """

    kind: Literal["best"]
    axis: str
    label: str
    reach: Annotated[int, Field(ge=0)] = 0
    metric: str = "accuracy"
    where: Labelled


class Above(Section):
    """All cells are better than one of them, the baseline.

    Attributes:
        kind: `above`.
        baseline: its label on each axis that tells it from the others.
        metric: which.
        where: axes that are held, each at a label.
    """

    kind: Literal["above"]
    baseline: Annotated[dict[str, str], Field(min_length=1)]
    metric: str = "accuracy"
    where: Labelled


class Speedup(Section):
    """Points whose value is n times larger reach a level of the metric in n times fewer rounds.

    Attributes:
        kind: `speedup`.
        axis: along which; every point needs a value.
        metric: which.
        levels: of the metric; left out, the best that every cell reaches.
        within: the factor that is still taken for n.
        where: axes that are held, each at a label.
    """

    kind: Literal["speedup"]
    axis: str
    metric: str = "loss"
    levels: list[float] | None = None
    within: Annotated[float, Field(gt=1)] = 1.25
    where: Labelled


Check = Annotated[Slope | Ordered | Best | Above | Speedup, Field(discriminator="kind")]


FORM = "a study is a mapping (name, base, seeds, parts, ...)"
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]  # of a file or a folder
Seeds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1), AfterValidator(lambda seeds: _distinct(seeds))
]


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("must differ from one another: equal seeds are one run")
    return seeds


class Size(Section):
    """What a size of a study changes.

    Attributes:
        settings: laid over the study's own.
        seeds: which each cell repeats; left out, the study's own.
    """

    settings: Lines
    seeds: Seeds | None = None


class PartSize(Size):
    """What a size changes in one part.

    Attributes:
        axes: in place of those of the part with the same name.
    """

    axes: Annotated[dict[str, Axis], Field(default_factory=dict)]


class Part(Section):
    """One question of a study: a grid of cells, its table, figures and, where there is one, a claim.

    Attributes:
        name: of its files.
        title: left out, the name.
        claim: what is said to be true, in words; left out, the part is a table and pictures.
        asks: whose claim it is: the paper's, or ours.
        notes: paragraphs under the title.
        settings: `key=value` lines for all its cells.
        sizes: what a size of the study changes here.
        axes: what varies; every combination is a cell.
        best_over: axes of which each place keeps the point with the best first metric.
        figures: to draw.
        pivot: a table of one metric, one axis down and one across.
        metrics: the table's columns: names that `flower_privdec.study.measured` lists, or dotted keys of
            metrics.jsonl, as accuracy.peer_max.
        fields: keys of the scenario that are columns too.
        checks: what the claim means in numbers.
    """

    name: Name
    title: str | None = None
    claim: str | None = None
    asks: Literal["paper", "us"] = "paper"
    notes: Lines
    settings: Lines
    sizes: Annotated[dict[str, PartSize], Field(default_factory=dict)]
    axes: Annotated[dict[str, Axis], Field(min_length=1)]
    best_over: Lines
    figures: Annotated[list[Figure], Field(default_factory=list)]
    pivot: Pivot | None = None
    metrics: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["accuracy", "loss"])]
    fields: Lines
    checks: Annotated[list[Check], Field(default_factory=list)]

    @property
    def heading(self) -> str:
        """Return what to call it."""
        return self.title or self.name

    @model_validator(mode="after")
    def _known_axes(self) -> Part:
        for size, changes in self.sizes.items():
            for name in changes.axes:
                self._known(f"sizes.{size}.axes", name)
        for i, figure in enumerate(self.figures):
            for name in figure.axes():
                self._known(f"figures.{i}", name)
            if (figure.kind == "final") != (figure.x is not None):
                raise ValueError(f"figures.{i}: a figure of kind final needs x, the axis; curves take none")
        for name in (self.pivot.rows, self.pivot.columns) if self.pivot else ():
            self._known("pivot", name)
        return self

    @model_validator(mode="after")
    def _axes_left(self) -> Part:
        for name in self.best_over:
            self._known("best_over", name)
            if any(name in figure.axes() for figure in self.figures) or any(
                name in (getattr(check, "axis", None), *check.where) for check in self.checks
            ):
                raise ValueError(f"best_over: axis '{name}' is chosen from; figures and checks cannot name it")
        return self

    @model_validator(mode="after")
    def _known_labels(self) -> Part:
        for size in (None, *self.sizes):
            axes = self.axes_at(size)
            for i, figure in enumerate(self.figures):
                _check_labels(f"figures.{i}", figure.where, axes)
            for i, check in enumerate(self.checks):
                _check_labels(f"checks.{i}", check.where, axes)
                if isinstance(check, Above):
                    _check_labels(f"checks.{i}", check.baseline, axes)
                if isinstance(check, Above | Slope):
                    continue
                self._known(f"checks.{i}", check.axis)
                for label in _named_labels(check):
                    _check_labels(f"checks.{i}", {check.axis: label}, axes)
                if isinstance(check, Speedup) and any(p.value is None for p in axes[check.axis].all_points()):
                    raise ValueError(f"checks.{i}: speedup needs a value (n) at every point of axis {check.axis}")
        return self

    def _known(self, where: str, name: str) -> None:
        if name not in self.axes:
            raise ValueError(f"{where}: axis '{name}' must be one of this part's axes ({', '.join(self.axes)})")

    def all_metrics(self) -> dict[str, str]:
        """Return every metric that it names, by where."""
        metrics = {f"metrics.{i}": name for i, name in enumerate(self.metrics)}
        metrics |= {f"figures.{i}.metric": figure.metric for i, figure in enumerate(self.figures)}
        metrics |= {f"checks.{i}.metric": check.metric for i, check in enumerate(self.checks)}
        return metrics | ({"pivot.metric": self.pivot.metric} if self.pivot else {})

    def axes_at(self, size: str | None) -> dict[str, Axis]:
        """Return the axes at a size."""
        changes = self.sizes.get(size) if size else None
        return self.axes | (changes.axes if changes else {})


def _named_labels(check: Ordered | Best | Speedup) -> Iterable[str]:
    if isinstance(check, Best):
        return [check.label]
    return (check.order or []) if isinstance(check, Ordered) else []


def _check_labels(where: str, labels: Mapping[str, str], axes: Mapping[str, Axis]) -> None:
    for name, label in labels.items():
        if name not in axes:
            raise ValueError(f"{where}: axis '{name}' must be one of this part's axes ({', '.join(axes)})")
        axis_labels = axes[name].labels()
        if label not in axis_labels:
            raise ValueError(f"{where}: '{label}' must be a label of axis {name} ({', '.join(axis_labels)})")


class Study(Section):
    """Experiments on one base scenario.

    Attributes:
        name: of the study, and of the folder of its results.
        title: left out, the name.
        paper: whose experiments these are, where they are a paper's.
        base: the path of the scenario that all cells vary, from the study's folder.
        notes: paragraphs under the title.
        settings: `key=value` lines for all cells.
        seeds: which each cell repeats; left out, the base's own seed alone.
        sizes: to choose from by `--size`, the first by default; left out, there is one.
        parts: the questions.
    """

    name: Name
    title: str | None = None
    paper: str | None = None
    base: str
    notes: Lines
    settings: Lines
    seeds: Seeds | None = None
    sizes: Annotated[dict[Name, Size], Field(default_factory=dict)]
    parts: Annotated[list[Part], Field(min_length=1)]

    @property
    def heading(self) -> str:
        """Return what to call it."""
        return self.title or self.name

    @model_validator(mode="after")
    def _known_sizes(self) -> Study:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"parts: their names must differ, not {names}")
        for i, part in enumerate(self.parts):
            for size in part.sizes:
                if size not in self.sizes:
                    sizes = ", ".join(self.sizes) or "none; give it some under sizes"
                    raise ValueError(f"parts.{i}.sizes.{size} must be one of the study's sizes ({sizes})")
        return self

    def size(self, name: str | None) -> str | None:
        """Return the size of some name, by default the first; None where the study has no sizes.

        Raises:
            ScenarioError: a name that no size has.
        """
        if name is None:
            return next(iter(self.sizes), None)
        if name not in self.sizes:
            rule = (
                f"has the sizes {', '.join(self.sizes)}; name one" if self.sizes else "has no sizes; leave --size out"
            )
            raise ScenarioError(f"--size {name}: study {self.name} {rule}")
        return name

    def chosen(self, only: Iterable[str]) -> list[Part]:
        """Return the parts of some names, all by default.

        Raises:
            ScenarioError: a name that no part has.
        """
        requested, names = list(only), [part.name for part in self.parts]
        for name in requested:
            if name not in names:
                raise ScenarioError(f"--only {name}: study {self.name} has the parts {', '.join(names)}; name one")
        return [part for part in self.parts if not requested or part.name in requested]


def study_files() -> dict[str, Path]:
    """Return the studies that can be named: those under scenarios/studies, here or with the package."""
    return shipped("studies")


def load_study(name: str) -> tuple[Study, Path]:
    """Read a study by its name, or from a file.

    Returns:
        The study, and the path of its base scenario.

    Raises:
        ScenarioError: with the line, the value, the rule and the remedy.
    """
    files = study_files()
    if not re.search(r"\.ya?ml$", name) and name not in files:
        raise ScenarioError(
            f"study '{name}' must be one of {', '.join(files) or 'none (no scenarios/studies here)'}, "
            "or the path of a YAML file"
        )
    path = files.get(name, Path(name))
    study = parse_model(Study, read_text(path, "a study"), form=FORM, where=str(path))
    return study, path.parent / study.base
