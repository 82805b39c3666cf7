"""The schema of a study file (parts, axes, tables, figures, checks), and the numbers that it can measure, by name."""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from flower_privdec.common.catalogue import BY_CLASS, CLASS_TITLES, MetricKind
from flower_privdec.common.errors import ScenarioError, did_you_mean, option
from flower_privdec.common.fields import Section
from flower_privdec.common.formatting import setting
from flower_privdec.reporting.wording import main_loss, main_value
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.loading import parse_model, read_text, shipped

OF_THE_STUDY = ("seed", "name")  # keys that a study sets itself: `seeds` and its own name


def for_cells(lines: list[str]) -> list[str]:
    """Return settings lines; raises ValueError for a key that a study sets itself."""
    for line in lines:
        key = line.partition("=")[0].strip()
        if key in OF_THE_STUDY:
            rule = "a cell has the study's name"
            if key == "seed":
                rule = "`seeds` of the study are those of every cell"
            raise ValueError(f"'{line}' would be overwritten, for {rule}: leave it out")
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plain(label: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in label):
        raise ValueError(f"{json.dumps(label)} must be one line of text: it is a cell of a table")
    return label


def _no_headings(lines: list[str]) -> list[str]:
    for line in lines:
        if re.search(r"(?m)^#{1,6}\s", line):
            raise ValueError(f"{json.dumps(line[:40])} has a line that begins with #, a heading of the page: reword it")
    return lines


Title = Annotated[str, AfterValidator(_one_line)]
Lines = Annotated[list[str], Field(default_factory=list)]
Notes = Annotated[list[str], Field(default_factory=list), AfterValidator(_no_headings)]
Settings = Annotated[list[str], Field(default_factory=list), AfterValidator(for_cells)]


class Point(Section):
    """One point of an axis.

    Attributes:
        label: its name in tables and figures.
        settings: its `key=value` lines.
        value: its position on a numeric axis; left out, it is a category.
        ignores: axes on which its cells do not depend, such as that of ε without privacy: along them one run is in
            every row.
    """

    label: Annotated[str, AfterValidator(_plain)]
    settings: Settings
    value: float | None = None
    ignores: Lines


class Axis(Section):
    """What varies between cells: either one key's values, or named points with settings of their own.

    Attributes:
        title: its name in tables and figures; left out, its name in the file.
        key: the key of the scenario, such as `privacy.epsilon`.
        values: the values of the key, each a point.
        points: in place of key and values.
    """

    title: Title | None = None
    key: Annotated[str, AfterValidator(str.strip)] | None = None
    values: list[Any] | None = None
    points: list[Point] | None = None

    def _check(self) -> None:
        if (self.points is None) == (self.values is None) or (self.values is None) != (self.key is None):
            raise ValueError("give an axis either key and values, or points (label and settings): one of the two")
        labels = self.labels()
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"an axis needs points whose labels differ, not {labels}")

    def all_points(self) -> list[Point]:
        """Return the points in order; a number of `values` is its own label and position."""
        if self.points is not None:
            return self.points

        points = []
        for value in self.values or []:
            label = str(value)
            position = None
            if isinstance(value, int | float) and not isinstance(value, bool):
                label = _label_of(value)
                position = float(value)
            lines = [f"{self.key}={json.dumps(value, ensure_ascii=False)}"]
            points.append(Point(label=label, settings=lines, value=position, ignores=[]))
        return points

    def labels(self) -> list[str]:
        """Return the points' labels in order."""
        return [point.label for point in self.all_points()]


def _label_of(value: float) -> str:
    """Return a number as it was chosen, in all its digits."""
    text = setting(value)
    return text if float(text) == value else repr(value)


Labelled = Annotated[dict[str, str], Field(default_factory=dict)]


class Figure(Section):
    """A figure: a metric over the rounds, or its final value along an axis.

    Attributes:
        kind: `curves` over the rounds, or `final` values: lines along an axis of numbers, points along categories.
        metric: the metric on the y axis.
        x: the axis on the x axis, for final.
        by: the axis whose points are colours.
        panels: the axis whose points are panels side by side.
        where: fixed axes, each at a label.
        title: left out, the metric.
        log: whether the metric's axis is logarithmic.
        along: the x axis of curves: rounds, or the gradients that all peers have computed.
    """

    kind: Literal["curves", "final"]
    metric: str = "accuracy"
    x: str | None = None
    by: str | None = None
    panels: str | None = None
    where: Labelled
    title: Title | None = None
    log: bool = False
    along: Literal["rounds", "gradients"] = "rounds"

    def axes(self) -> list[str]:
        """Return the names of its axes."""
        return [name for name in (self.x, self.by, self.panels, *self.where) if name is not None]


class Pivot(Section):
    """A table of one metric.

    Attributes:
        rows: the axis down.
        columns: the axis across.
        metric: the metric in its cells.
    """

    rows: str
    columns: str
    metric: str = "accuracy"


class CheckSection(Section):
    """A claim as a condition on the means over the seeds, judged by their difference and its spread.

    Attributes:
        kind: the kind of condition.
        metric: the metric that is compared.
        where: fixed axes, each at a label.
    """

    kind: str
    metric: str = "accuracy"
    where: Labelled


class Slope(CheckSection):
    """The metric falls over the rounds at least as fast as a power of them, at every point.

    Attributes:
        at_most: the largest slope of a line through the logarithms of metric and round.
        first: the round from which the line is fitted; the last should be a hundred times it or more.
    """

    kind: Literal["slope"]
    at_most: Annotated[float, Field(lt=0)]
    first: Annotated[int, Field(ge=1)]
    metric: str = "suboptimality"


class Ordered(CheckSection):
    """The metric rises along these points of an axis, at every point of the other axes.

    Attributes:
        axis: whose points are compared.
        order: labels, from the least to the greatest; left out, the axis' own order.
        by: how much it rises from each to the next at least, in the metric's unit, so that 0.03 is three points of
            accuracy; a negative one allows it to fall by as much.
    """

    kind: Literal["ordered"]
    axis: str
    order: Annotated[list[str], Field(min_length=2)] | None = None
    by: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class Best(CheckSection):
    """A point of an axis, or one near it, has the best metric, at every point of the other axes.

    Attributes:
        axis: whose points are compared.
        label: the label of the point.
        reach: how many places from it count too.
    """

    kind: Literal["best"]
    axis: str
    label: str
    reach: Annotated[int, Field(ge=0)] = 0


class Above(CheckSection):
    """All cells are better than one of them, the baseline.

    Attributes:
        baseline: its label on each axis that distinguishes it from the others.
        without: the labels of these axes whose cells are not compared with it.
    """

    kind: Literal["above"]
    baseline: Annotated[dict[str, str], Field(min_length=1)]
    without: Annotated[dict[str, list[str]], Field(default_factory=dict)]

    def _check(self) -> None:
        for name in self.without:
            if name not in self.baseline:
                raise ValueError(f"without: axis '{name}' must be one of the baseline's ({', '.join(self.baseline)})")


class Speedup(CheckSection):
    """Points whose value is n times larger reach a level of the metric in n times fewer rounds, or in fewer still.

    Attributes:
        axis: whose points are compared; every point needs a value.
        levels: levels of the metric; left out, the best that every cell reaches.
        within: the factor by which the ratio may fall short of n.
    """

    kind: Literal["speedup"]
    axis: str
    metric: str = "loss"
    levels: list[float] | None = None
    within: Annotated[float, Field(gt=1)] = 1.25


class CellSettings(Section):
    """What some cells have beside the settings of their points, such as a learning rate that was chosen for them.

    Attributes:
        where: the cells: axes, each at a label.
        settings: laid over those of the points.
    """

    where: Annotated[dict[str, str], Field(min_length=1)]
    settings: Settings


Check = Annotated[Slope | Ordered | Best | Above | Speedup, Field(discriminator="kind")]


FORM = "a study is a mapping (name, base, seeds, parts, ...)"
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]  # of a file or a folder


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("must differ from one another: equal seeds are one run")
    return seeds


Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1), AfterValidator(_distinct)]


class Size(Section):
    """What a size of a study changes.

    Attributes:
        settings: laid over the study's own.
        seeds: the seeds of each cell's runs; left out, the study's own.
    """

    settings: Settings
    seeds: Seeds | None = None


class PartSize(Size):
    """What a size changes in one part.

    Attributes:
        axes: replace those of the part with the same name.
    """

    axes: Annotated[dict[str, Axis], Field(default_factory=dict)]


class TitledSection(Section):
    """A study or a part of one.

    Attributes:
        name: the name, also of its folder or its files.
        title: left out, the name.
        notes: paragraphs under the title.
        settings: `key=value` lines for all its cells.
    """

    name: Name
    title: Title | None = None
    notes: Notes
    settings: Settings

    @property
    def heading(self) -> str:
        """Return its title."""
        return self.title or self.name


class Part(TitledSection):
    """One question of a study: a grid of cells, its table, figures and perhaps a claim.

    Attributes:
        claim: a sentence that the checks test; left out, the part is a table and figures.
        asks: whose claim it is: the paper's, or ours.
        sizes: what a size of the study changes here.
        axes: what varies; every combination is a cell.
        cases: settings of some of the cells.
        best_over: axes of which only the point with the best first metric is kept.
        chosen_in: an earlier part with `best_over`, such as one that tries learning rates on validation data: each cell
            here has the settings of the point that was best in its place there.
        figures: to draw.
        pivot: a table of one metric, one axis down and one across.
        metrics: the table's columns: names of the list below, or dotted keys of metrics.jsonl, as accuracy.peer_max.
        fields: keys of the scenario that are columns too.
        checks: the claim as conditions on the means.
    """

    claim: Title | None = None
    asks: Literal["paper", "us"] = "paper"
    sizes: Annotated[dict[str, PartSize], Field(default_factory=dict)]
    axes: Annotated[dict[str, Axis], Field(min_length=1)]
    cases: Annotated[list[CellSettings], Field(default_factory=list)]
    best_over: Lines
    chosen_in: str | None = None
    figures: Annotated[list[Figure], Field(default_factory=list)]
    pivot: Pivot | None = None
    metrics: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["accuracy", "loss"])]
    fields: Lines
    checks: Annotated[list[Check], Field(default_factory=list)]

    def _check(self) -> None:
        self._check_names()

        # The labels of an axis depend on the size, and every check has to make sense at each.
        for size in (None, *self.sizes):
            axes = self.axes_at(size)
            _check_points(axes)
            for i, case in enumerate(self.cases):
                _check_labels(f"cases.{i}", case.where.items(), axes)
            for i, figure in enumerate(self.figures):
                _check_labels(f"figures.{i}", figure.where.items(), axes)
            for i, check in enumerate(self.checks):
                _check_check(f"checks.{i}", check, axes, size)

    def _check_names(self) -> None:
        """Refuse names of axes that are unknown, or used twice, or in two ways that exclude each other."""
        named = [(f"sizes.{size}.axes", list(changes.axes)) for size, changes in self.sizes.items()]
        named += [(f"figures.{i}", figure.axes()) for i, figure in enumerate(self.figures)]
        if self.pivot:
            named.append(("pivot", [self.pivot.rows, self.pivot.columns]))

        for key, names in named:
            if len(set(names)) < len(names):
                raise ValueError(f"{key}: its axes must differ from one another, not {', '.join(names)}")
        for key, names in [*named, ("best_over", self.best_over)]:
            for name in names:
                _check_axis(key, name, self.axes)
        for i, figure in enumerate(self.figures):
            if (figure.kind == "final") != (figure.x is not None):
                raise ValueError(f"figures.{i}: a figure of kind final needs x, the axis; curves take none")

        used = {name for figure in self.figures for name in figure.axes()}
        used |= {name for check in self.checks for name in (getattr(check, "axis", None), *check.where) if name}
        if self.pivot:
            used |= {self.pivot.rows, self.pivot.columns}
        for name in self.best_over:
            if name in used:
                raise ValueError(f"best_over: axis '{name}' is chosen from; figures, pivot and checks cannot name it")

    def all_metrics(self) -> dict[str, str]:
        """Return every metric that it names, by the key that names it."""
        metrics = {f"metrics.{i}": name for i, name in enumerate(self.metrics)}
        metrics |= {f"figures.{i}.metric": figure.metric for i, figure in enumerate(self.figures)}
        metrics |= {f"checks.{i}.metric": check.metric for i, check in enumerate(self.checks)}
        if self.pivot:
            metrics["pivot.metric"] = self.pivot.metric
        return metrics

    def axes_at(self, size: str | None) -> dict[str, Axis]:
        """Return the axes at a size."""
        if size is None or size not in self.sizes:
            return self.axes
        return self.axes | self.sizes[size].axes


def _check_points(axes: Mapping[str, Axis]) -> None:
    """Refuse two axes that vary one key, and points that ignore an axis that is not there."""
    for (one, first), (other, second) in itertools.combinations(axes.items(), 2):
        if first.key is not None and second.key is not None and _overlap(first.key, second.key):
            raise ValueError(
                f"axes: '{one}' has the key {first.key} and '{other}' {second.key}, so that the second would "
                "replace what the first sets; vary each key on one axis"
            )

    for name, axis in axes.items():
        for point in axis.all_points():
            for ignored in point.ignores:
                _check_axis(f"axes.{name}, '{point.label}': ignores", ignored, axes)


def _check_check(key: str, check: Check, axes: Mapping[str, Axis], size: str | None) -> None:
    """Refuse a claim about labels that are not there, or about nothing."""
    labels = [*check.where.items()]
    if isinstance(check, Above):
        labels += check.baseline.items()
        labels += [(name, label) for name, left_out in check.without.items() for label in left_out]
    elif not isinstance(check, Slope):
        _check_axis(key, check.axis, axes)

    if isinstance(check, Best):
        labels.append((check.axis, check.label))
    elif isinstance(check, Ordered):
        order = check.order or []
        if len(set(order)) < len(order):
            raise ValueError(f"{key}: the labels of its order must differ, not {check.order}")
        labels += [(check.axis, label) for label in order]
    _check_labels(key, labels, axes)

    if isinstance(check, Speedup) and any((point.value or 0) <= 0 for point in axes[check.axis].all_points()):
        raise ValueError(f"{key}: speedup needs a value > 0 (n) at every point of axis {check.axis}")
    if not _has_comparison(check, axes):
        at = f" at the size {size}" if size else ""
        raise ValueError(f"{key}: the axes leave only one point{at}, so there is nothing to compare; add another")


def _has_comparison(check: Check, axes: Mapping[str, Axis]) -> bool:
    """Return whether a check has two cells to compare, at any place of the other axes."""
    if isinstance(check, Slope):
        return True

    if isinstance(check, Above):
        compared = []
        for name in check.baseline:
            left_out = check.without.get(name, [])
            compared.append([label for label in axes[name].labels() if label not in left_out])
        baseline = tuple(check.baseline.values())
        return any(labels != baseline for labels in itertools.product(*compared))

    labels = axes[check.axis].labels()
    if isinstance(check, Best):
        place = labels.index(check.label)
        return place > check.reach or len(labels) - 1 - place > check.reach
    return len(labels) > 1


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _check_axis(key: str, name: str, axes: Mapping[str, Axis]) -> None:
    if name not in axes:
        raise ValueError(f"{key}: axis '{name}' must be one of this part's axes ({', '.join(axes)})")


def _check_labels(key: str, labels: Iterable[tuple[str, str]], axes: Mapping[str, Axis]) -> None:
    for name, label in labels:
        _check_axis(key, name, axes)
        axis_labels = axes[name].labels()
        if label not in axis_labels:
            raise ValueError(f"{key}: '{label}' must be a label of axis {name} ({', '.join(axis_labels)})")


class Study(TitledSection):
    """Experiments on one base scenario.

    Attributes:
        paper: the paper that the experiments are from.
        base: the scenario that all cells vary: its path from the study's folder, or the name of a bundled one.
        seeds: the seeds of each cell's runs; left out, only the base's own seed.
        sizes: to choose from by `--size`, the first by default; left out, there is one.
        parts: the questions.
    """

    paper: Title | None = None
    base: str
    seeds: Seeds | None = None
    sizes: Annotated[dict[Name, Size], Field(default_factory=dict)]
    parts: Annotated[list[Part], Field(min_length=1)]
    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Return the folder of the study's file, from which its relative paths begin."""
        return self._folder

    def _check(self) -> None:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"parts: their names must differ, not {names}")
        headings = [part.heading for part in self.parts]
        if len(set(headings)) < len(headings):
            raise ValueError(f"parts: their titles must differ, not {headings}")
        for i, part in enumerate(self.parts):
            for size in part.sizes:
                if size not in self.sizes:
                    sizes = ", ".join(self.sizes) or "none; give it some under sizes"
                    raise ValueError(f"parts.{i}.sizes.{size} must be one of the study's sizes ({sizes})")
            if part.chosen_in is not None:
                self._check_source(f"parts.{i}.chosen_in", part, self.parts[:i])

    def _check_source(self, key: str, part: Part, earlier: Sequence[Part]) -> None:
        source = next((other for other in earlier if other.name == part.chosen_in and other.best_over), None)
        if source is None:
            names = ", ".join(other.name for other in earlier if other.best_over) or "there is none"
            raise ValueError(f"{key}: '{part.chosen_in}' must be an earlier part with best_over ({names})")
        if source.chosen_in is not None:
            raise ValueError(f"{key}: '{source.name}' is chosen in {source.chosen_in} itself; choose both in one part")

        # What was chosen at a place there is looked up at the same place here.
        for size in (None, *self.sizes):
            axes = source.axes_at(size)
            axes_here = part.axes_at(size)
            for name in axes:
                if name not in source.best_over:
                    _check_axis(key, name, axes_here)
                    _check_labels(key, [(name, label) for label in axes_here[name].labels()], axes)

    def size(self, name: str | None) -> str | None:
        """Return a size's name, by default the first; None if the study has no sizes.

        Raises:
            ScenarioError: no size has that name.
        """
        if name is None:
            return next(iter(self.sizes), None)
        if name in self.sizes:
            return name

        rule = f"has no sizes; leave {option('size')} out"
        if self.sizes:
            rule = f"has the sizes {', '.join(self.sizes)}; name one"
        raise ScenarioError(f"{option('size', name)}: study {self.name} {rule}", code="study.unknown-size")

    def chosen(self, only: Iterable[str]) -> list[Part]:
        """Return the parts with these names and those that they are chosen in, all by default.

        Raises:
            ScenarioError: no part has one of these names.
        """
        requested = list(only)
        names = [part.name for part in self.parts]
        for name in requested:
            if name not in names:
                raise ScenarioError(
                    f"{option('only', name)}: study {self.name} has the parts {', '.join(names)}; name one",
                    code="study.unknown-part",
                )

        # Backwards, as a part is always chosen in an earlier one.
        for part in reversed(self.parts):
            if part.name in requested and part.chosen_in is not None:
                requested.append(part.chosen_in)
        return [part for part in self.parts if not requested or part.name in requested]


def load_study(name: str) -> tuple[Study, Path]:
    """Read a study by its name, or from a file.

    Returns:
        The study, and the path of its base scenario.

    Raises:
        ScenarioError: with the line, the value, the rule and the remedy.
    """
    files = shipped("studies")
    if not re.search(r"\.ya?ml$", name) and name not in files:
        raise ScenarioError(
            f"study '{name}' must be one of {', '.join(files) or 'none (no scenarios/studies here)'}, "
            f"or the path of a YAML file{did_you_mean(name, files)}; `privdec study --list` describes them",
            code="study.unknown",
        )
    path = files.get(name, Path(name))
    study = parse_model(Study, read_text(path, "a study"), form=FORM, where=str(path))
    study._folder = path.parent
    base = path.parent / study.base
    if not base.exists():
        # A name without a path is a bundled scenario, as everywhere.
        base = shipped().get(study.base, base)
    return study, base


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
        """Return 1 if more is better, else -1."""
        return -1 if self.low else 1


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def _smallest(values: Sequence[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.nan)


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

    best = _largest if kind.high else _smallest
    worst_peer = "peer_min" if kind.high else "peer_max"
    readings = {
        name: reading(f"test {kind.title}", mean),
        f"late-{name}": reading(f"test {kind.title}, mean of the last fifth", mean, over=_late),
        f"best-{name}": reading(f"best test {kind.title} of the run", mean, over=best),
        f"peer-{name}": reading(f"test {kind.title} of the peers' models", peers("peer_mean")),
        f"worst-peer-{name}": reading(f"test {kind.title} of the worst peer", peers(worst_peer)),
    }
    for key in ("mean_model", "peer_mean", "peer_min", "peer_max"):
        readings[f"{name}.{key}"] = reading(f"{kind.title} {key.replace('_', ' ')}", peers(key))
    return readings


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
    "training-loss": Reading(
        "training loss", lambda m, algorithm: main_loss(algorithm, m.get("training_loss")), low=True
    ),
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
_BY_EXTRA_LABELS = re.compile(r"personalized\.generalization\.(global_model|personal_models)\.(\d+)")
_OF_CLASS = re.compile(rf"by_class\.(.+)\.({'|'.join(BY_CLASS)})(?:\.(mean_model|peer_mean|peer_min|peer_max))?")
_WHOSE = {"global_model": "the mean model's", "personal_models": "personalized models'"}


def class_in(name: str) -> str | None:
    """Return the class that a metric is of, as in by_class.cat.f1; None if it is not of one class."""
    match = _OF_CLASS.fullmatch(name)
    if match is None:
        return None
    return match[1]


def is_of_extreme_peers(name: str) -> bool:
    """Return whether a metric is of the worst or the best peer's model, which a sample of peers does not tell."""
    of_personal = re.fullmatch(r"personalized\.\w+\.(min|max)", name)
    return name.startswith("worst-peer-") or name.endswith((".peer_min", ".peer_max")) or of_personal is not None


def _of_class(name: str) -> Reading | None:
    """Return the reading of one class, of the models that matter or of those that the name asks for."""
    match = _OF_CLASS.fullmatch(name)
    if match is None:
        return None
    label, measure, which = match.groups()

    def read(line: dict[str, Any], algorithm: str) -> float | None:
        values = ((line.get("by_class") or {}).get(label) or {}).get(measure)
        if values is None or which is None:
            return main_value(algorithm, values)
        value: float | None = values.get(which)
        return value

    title = f"{CLASS_TITLES[measure]} of class {label}"
    if which is not None:
        title += f", {which.replace('_', ' ')}"
    return Reading(title, read, share=True)


def kinds_of(scenarios: Iterable[Scenario]) -> dict[str, MetricKind]:
    """Return the kind of each metric that some scenarios evaluate, by name."""
    return {name: kind for scenario in scenarios for name, kind in scenario.task.kinds().items()}


def metric(name: str, kinds: Mapping[str, MetricKind]) -> Reading:
    """Return a metric by its name: one of a task, late-accuracy, or a key of metrics.jsonl, accuracy.peer_max.

    Raises:
        ScenarioError: no metric has that name; the message lists those that exist.
    """
    readings = dict(ALWAYS)
    for kind_name, kind in kinds.items():
        readings |= readings_of(kind_name, kind)

    if match := _BY_EXTRA_LABELS.fullmatch(name):
        title = f"{_WHOSE[match[1]]} accuracy on own labels and {match[2]} more"
        return replace(_key(name, share=True), title=title)
    of_class = _of_class(name)
    if of_class is not None:
        return of_class
    if name not in readings:
        first = next(iter(kinds), "accuracy")
        raise ScenarioError(
            f"metric {name!r} must be one of {', '.join(kinds)}, loss, training-loss, consensus, own-labels, or as "
            f"late-{first}, best-{first}, peer-{first}, worst-peer-{first} or {first}.peer_max, or of one class as "
            "by_class.CLASS.f1"
            f"{did_you_mean(name, readings)}",
            code="study.unknown-metric",
        )
    return readings[name]
