"""A study as data: cells laid over a base scenario, what to draw, and a claim a machine can check."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario.fields import Section
from flower_privdec.scenario.loading import parse_model, read_text
from flower_privdec.words import setting

FORM = "a study is a mapping (name, title, base, sizes, parts, ...)"
STUDIES = Path("scenarios") / "studies"
SizeName = Literal["laptop", "paper"]
Lines = Annotated[list[str], Field(default_factory=list)]
Labelled = Annotated[dict[str, str], Field(default_factory=dict)]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]


class Point(Section):
    """One place on an axis: what to call it and the settings that make it."""

    label: str
    settings: Lines
    value: float | None = None


class Axis(Section):
    """What varies between cells: either one key's values, or named points with settings of their own."""

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


class Size(Section):
    """What a size of a study lays over its base, and the seeds each cell repeats."""

    settings: Lines
    seeds: Seeds


class PartSize(Section):
    """What a size changes in one part."""

    settings: Lines
    seeds: Seeds | None = None
    axes: Annotated[dict[str, Axis], Field(default_factory=dict)]


class Figure(Section):
    """A picture: a metric over the rounds, or its final value along an axis."""

    kind: Literal["curves", "final"]
    metric: str = "accuracy"
    x: str | None = None  # final: the axis along which
    by: str | None = None  # the axis whose points are lines
    panels: str | None = None  # the axis whose points are pictures side by side
    where: Labelled  # axes that are held, at which label
    title: str
    log: bool = False

    def axes(self) -> list[str]:
        """Return the axes it names."""
        return [name for name in (self.x, self.by, self.panels, *self.where) if name is not None]


class Pivot(Section):
    """A table of one metric: one axis down, one across."""

    rows: str
    columns: str
    metric: str = "accuracy"


class Ordered(Section):
    """The metric rises along these points of an axis, wherever the other axes stand."""

    kind: Literal["ordered"]
    axis: str
    order: list[str] | None = None  # from the least to the greatest; by default the axis' own order
    metric: str = "accuracy"
    where: Labelled


class Best(Section):
    """A point of an axis, or one at most `reach` places from it, has the best metric."""

    kind: Literal["best"]
    axis: str
    label: str
    reach: Annotated[int, Field(ge=0)] = 0
    metric: str = "accuracy"
    where: Labelled


class Above(Section):
    """All cells are better than one of them, the baseline."""

    kind: Literal["above"]
    baseline: dict[str, str]
    metric: str = "accuracy"
    where: Labelled


class Speedup(Section):
    """Points whose value is n times larger reach a level of the metric in n times fewer rounds."""

    kind: Literal["speedup"]
    axis: str
    metric: str = "loss"
    levels: list[float] | None = None  # by default the best that every cell reaches
    within: Annotated[float, Field(gt=1)] = 1.25  # the factor that is still taken for n
    where: Labelled


Check = Annotated[Ordered | Best | Above | Speedup, Field(discriminator="kind")]


class Part(Section):
    """One question of a study: a grid of cells, figures, a table and the paper's claim."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    title: str
    claim: str
    asks: Literal["paper", "us"] = "paper"  # whose claim it is
    notes: Lines
    settings: Lines
    sizes: Annotated[dict[SizeName, PartSize], Field(default_factory=dict)]
    axes: Annotated[dict[str, Axis], Field(min_length=1)]
    best_over: Lines  # axes of which each place keeps the point with the best first metric
    figures: Annotated[list[Figure], Field(default_factory=list)]
    pivot: Pivot | None = None
    metrics: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["accuracy", "loss"])]
    fields: Lines  # keys of the scenario that are columns too
    checks: Annotated[list[Check], Field(min_length=1)]

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

    def axes_at(self, size: str | None) -> dict[str, Axis]:
        """Return the axes at a size."""
        changes = self.sizes.get(size) if size else None  # type: ignore[call-overload]
        return self.axes | (changes.axes if changes else {})


def _named_labels(check: Ordered | Best | Speedup) -> Iterable[str]:
    if isinstance(check, Best):
        return [check.label]
    return (check.order or []) if isinstance(check, Ordered) else []


def _check_labels(where: str, labels: Mapping[str, str], axes: Mapping[str, Axis]) -> None:
    for name, label in labels.items():
        if name not in axes:
            raise ValueError(f"{where}: axis '{name}' must be one of this part's axes ({', '.join(axes)})")
        known = axes[name].labels()
        if label not in known:
            raise ValueError(f"{where}: '{label}' must be a label of axis {name} ({', '.join(known)})")


class Study(Section):
    """A paper's experiments on one base scenario, in two sizes."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    title: str
    paper: str
    base: str
    notes: Lines
    sizes: dict[SizeName, Size]
    parts: Annotated[list[Part], Field(min_length=1)]

    @model_validator(mode="after")
    def _both_sizes(self) -> Study:
        if set(self.sizes) != {"laptop", "paper"}:
            raise ValueError(f"sizes: a study comes in laptop and paper, not in {', '.join(self.sizes) or 'none'}")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"parts: their names must differ, not {names}")
        return self

    def chosen(self, only: Iterable[str]) -> list[Part]:
        """Return the parts of some names, all by default.

        Raises:
            ScenarioError: a name that no part has.
        """
        wanted, names = list(only), [part.name for part in self.parts]
        for name in wanted:
            if name not in names:
                raise ScenarioError(f"--only {name}: study {self.name} has the parts {', '.join(names)}; name one")
        return [part for part in self.parts if not wanted or part.name in wanted]


def study_files() -> dict[str, Path]:
    """Return the studies that can be named: those under scenarios/studies, here or beside the package."""
    found: dict[str, Path] = {}
    for root in (Path(), Path(__file__).resolve().parents[2]):
        for path in sorted((root / STUDIES).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load_study(name: str) -> tuple[Study, Path]:
    """Read a study by its name, or from a file.

    Returns:
        The study, and the path of its base scenario.

    Raises:
        ScenarioError: with the line, the value, the rule and the remedy.
    """
    known = study_files()
    if not re.search(r"\.ya?ml$", name) and name not in known:
        raise ScenarioError(
            f"study '{name}' must be one of {', '.join(known) or 'none (no scenarios/studies here)'}, "
            "or the path of a YAML file"
        )
    path = known.get(name, Path(name))
    study = parse_model(Study, read_text(path, "a study"), form=FORM, where=str(path))
    return study, path.parent / study.base
