"""Pictures of a study: a metric over the rounds, or at the end of runs along an axis, with its spread over the seeds.

Everything is read from a part's results, which may be runs or what was published of them (tables and curves in CSV):
so a published picture can be drawn again without its runs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.reporting.look import (
    LETTERS_AN_INCH,
    MOST_BANDS,
    MUTED,
    PAPER,
    add_legend,
    aside,
    categories_down,
    drawing,
    fits_below,
    log_scale,
    look,
    new_axes,
    new_figure,
    plot_curve,
    plot_spread,
    whole_numbers,
    width_of,
)
from flower_privdec.reporting.plots import themed
from flower_privdec.studies.results import PartResult
from flower_privdec.studies.spec import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

ALONG = {"rounds": "round", "gradients": "gradients computed, all peers together"}
PANEL = 3.5  # inches of a panel's width, if there are one or two
MOST_ACROSS = 3  # panels side by side: a page shows a picture some 8 inches wide
NARROW = 2.6  # inches of a panel's width, if there are more
FAR = 2.0  # times the width of all other values: a value that lies further from them is not worth the axis' length
FEW = 8  # values for one that may lie far from them
Looks = Mapping[tuple[str, str], int]  # the number of a line's look, by the title of a legend and its name there


def save_figure(figure: Figure, result: PartResult, path: Path, looks: Looks | None = None) -> bool:
    """Draw one figure of a part to an SVG file; return whether there was anything to draw.

    Args:
        looks: see `looks_of`; by default those of this part alone.
    """
    with drawing(salt=path.stem):
        canvas = draw_figure(figure, result, looks)
        if canvas is None:
            return False
        file = StringIO()
        canvas.savefig(file, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
        path.write_text(themed(file.getvalue()), encoding="utf-8")
    return True


def draw_figure(figure: Figure, result: PartResult, looks: Looks | None = None) -> MatplotlibFigure | None:
    """Draw one figure of a part; None if there is nothing to draw. Call it within `drawing`."""
    panels = _panels(figure, result)
    if not panels:
        return None
    canvas, all_axes = _canvas(figure, result, panels)
    if looks is None:
        looks = looks_of([result])

    has_data = False
    down = False
    for axes, panel in zip(all_axes, panels, strict=False):
        place = dict(figure.where)
        if figure.panels and panel:
            place[figure.panels] = panel
            axes.set_title(f"{result.title(figure.panels)} {panel}", loc="left", fontsize=9.5)
        if figure.log:
            log_scale(axes, "x" if _stands_down(axes, figure, result) else "y")
        has_data |= draw_panel(axes, figure, result, place, looks)
        down = _stands_down(axes, figure, result)
    if not has_data:
        return None

    for axes in all_axes[len(panels) :]:  # places of the grid that are left over
        axes.set_visible(False)
    _name_axes(canvas, figure, result, all_axes[: len(panels)], down)

    n_lines = sum(not str(line.get_label()).startswith("_") for line in all_axes[0].get_lines())
    note = _note(figure, result, n_lines)
    title = title_of(figure, result)
    canvas.suptitle(f"{title}\n" if note else title, x=0.01, ha="left", fontsize=10.5)
    if note:
        canvas.text(0.01, 1 - 0.33 / canvas.get_figheight(), note, color=MUTED, fontsize=8.5, ha="left", va="center")
    return canvas


def _panels(figure: Figure, result: PartResult) -> list[str | None]:
    """Return the labels of the panels that have anything to show; [None] for a figure of one panel."""
    if not figure.panels:
        return [None]
    shown: list[str | None] = []
    for label in result.axes[figure.panels].labels():
        groups = [result.at(place) for place in result.places(dict(figure.where) | {figure.panels: label}, [])]
        if figure.x is None:
            has_data = any(group.mean_curve(figure.metric) is not None for group in groups)
        else:
            has_data = any(group.final(figure.metric) is not None for group in groups)
        if has_data:
            shown.append(label)
    return shown


def looks_of(results: Iterable[PartResult]) -> Looks:
    """Return the number of each line's look on a page, where a name has one look under each title of a legend."""
    numbers: dict[str, dict[str, int]] = {}
    for result in results:
        for figure in result.part.figures:
            title = _legend_title(figure, result)
            known = numbers.setdefault(title, {})
            for line in result.places(figure.where, [figure.x] if figure.x else []):
                known.setdefault(_line_name(figure, result, line), len(known))
    return {(title, name): number for title, known in numbers.items() for name, number in known.items()}


def _legend_title(figure: Figure, result: PartResult) -> str:
    return result.title(figure.by) if figure.by else ""


def _line_name(figure: Figure, result: PartResult, line: Mapping[str, str]) -> str:
    """Return the name of a line in the legend: its label, and what else distinguishes it from others of that label."""
    fixed = (figure.by, figure.panels, *figure.where)
    others = [axis for axis in line if axis not in fixed and len(result.axes[axis].labels()) > 1]
    if not others:
        return line[figure.by] if figure.by else ""

    parts = []
    for axis in [figure.by, *others] if figure.by else others:
        label = line[axis]
        is_number = all(point.value is not None for point in result.axes[axis].all_points())
        parts.append(f"{result.title(axis)} {label}" if is_number else label)
    return ", ".join(parts)


def _canvas(
    figure: Figure, result: PartResult, panels: Sequence[str | None]
) -> tuple[MatplotlibFigure, Sequence[Axes]]:
    """Return a figure with room for its panels and for the names of its axes, and its axes, some perhaps left over."""
    across = _across(len(panels))
    rows = math.ceil(len(panels) / across)
    names = _categories(figure, result)

    each = PANEL if across <= 2 else NARROW
    width = max(5.2, each * across)
    height = 2.8
    if names and not fits_below(names, width / across):
        lines = result.places(figure.where, [figure.x or "", figure.panels or ""])
        height = 0.7 + (0.18 + 0.03 * len(lines)) * len(names)
    beside = 1.4 if figure.by and across == 1 else 0.0
    if beside:
        height = max(height, 0.19 * len(result.places(figure.where, [figure.x or ""])))
    below = 0.5 if figure.by and across > 1 else 0.0
    canvas = new_figure(width + beside, height * rows + 0.6 + below)
    return canvas, list(new_axes(canvas, rows, across, sharey=True).flat)


def _across(n_panels: int) -> int:
    """Return how many panels stand side by side."""
    if n_panels == 4:
        return 2
    return min(n_panels, MOST_ACROSS)


def _categories(figure: Figure, result: PartResult) -> list[str]:
    """Return the names along a figure's axis; none if they are numbers."""
    points = result.axes[figure.x].all_points() if figure.x else []
    if all(point.value is not None for point in points):
        return []
    return [point.label for point in points]


def _stands_down(axes: Axes, figure: Figure, result: PartResult) -> bool:
    """Return whether a panel's categories stand one below the other, since they do not fit side by side."""
    names = _categories(figure, result)
    return bool(names) and not fits_below(names, width_of(axes))


def _name_axes(
    canvas: MatplotlibFigure, figure: Figure, result: PartResult, all_axes: Sequence[Axes], down: bool
) -> None:
    """Name the axes, and the lines beside or below the panels."""
    reading = result.metric(figure.metric)
    measure = f"{reading.title} (%)" if reading.share else reading.title
    along = ALONG[figure.along] if figure.x is None else result.title(figure.x)
    beside = "" if down else measure
    below = measure if down else along
    across = _across(len(all_axes))
    for k, axes in enumerate(all_axes):
        if k + across >= len(all_axes):  # no panel is below it
            axes.set_xlabel(below)
        if k % across == 0 and beside:
            height = axes.get_window_extent().height / canvas.dpi
            axes.set_ylabel(textwrap.fill(beside, max(12, int(height * LETTERS_AN_INCH))))

    if any(_line_name(figure, result, line) for line in result.places(figure.where, [figure.x or ""])):
        order = [_in_legend(name) for title, name in looks_of([result]) if title == _legend_title(figure, result)]
        add_legend(canvas, _legend_title(figure, result), below=len(all_axes) > 1, labels=order)


def _note(figure: Figure, result: PartResult, n_lines: int) -> str:
    """Return what the bands or bars of a figure are; "" if there is one seed, and so no spread."""
    most = max((group.n_runs for group in result.groups), default=0)
    if most < 2:
        return ""
    drawn = "bands" if figure.kind == "curves" and n_lines <= MOST_BANDS else "bars"
    note = f"mean of {most} seeds; {drawn}: standard deviation"
    if figure.x is not None and _categories(figure, result) and _span(figure, result, figure.x) is not None:
        note += "; an arrow: beyond the axis"
    return note


def title_of(figure: Figure, result: PartResult) -> str:
    """Return a figure's title, by default its metric."""
    return figure.title or result.metric(figure.metric).title.capitalize()


def draw_panel(
    axes: Axes, figure: Figure, result: PartResult, place: dict[str, str], looks: Looks | None = None
) -> bool:
    """Draw every line of a panel, one for each combination of the axes that are neither fixed nor on the x axis.

    Final values are a line along numbers; along categories they are points, side by side with those of other lines.
    """
    if looks is None:
        looks = looks_of([result])
    lines = result.places(place, [figure.x] if figure.x else [])
    has_data = False
    for i, line in enumerate(lines):
        name = _line_name(figure, result, line)
        pen = Pen(looks.get((_legend_title(figure, result), name), i), i, len(lines), _in_legend(name) or None)
        if figure.x is None:
            has_data |= _draw_curve(axes, figure, result, line, pen)
        elif _categories(figure, result):
            has_data |= _draw_categories(axes, figure, result, line, figure.x, pen)
        else:
            has_data |= _draw_numbers(axes, figure, result, line, figure.x, pen)
    return has_data


@dataclass(frozen=True)
class Pen:
    """How a line of a panel is drawn.

    Attributes:
        number: of its look.
        place: among the lines of the panel.
        of: how many lines the panel has.
        label: its name in the legend; None if it has none.
    """

    number: int
    place: int
    of: int
    label: str | None

    def beside(self, step: float) -> float:
        """Return by how much its points are moved, so that those of all lines stand side by side."""
        return (self.place - (self.of - 1) / 2) * step

    def points(self) -> dict[str, Any]:
        """Return the style of points with bars, and of the line through them."""
        its = look(self.number)
        return {
            "color": its.colour,
            "linestyle": its.line,
            "marker": its.mark,
            "markersize": its.size,
            "markeredgecolor": PAPER,
            "markeredgewidth": 0.6,
            "capsize": 2.0,
            "elinewidth": 1.1,
            "label": self.label,
        }


def _draw_curve(axes: Axes, figure: Figure, result: PartResult, line: dict[str, str], pen: Pen) -> bool:
    """Draw a metric over the rounds of a run: the mean over the seeds, and a standard deviation to either side."""
    group = result.at(line)
    curve = group.mean_curve(figure.metric)
    if curve is None:
        return False

    whole_numbers(axes)
    x = curve.rounds.astype(float)
    if figure.along == "gradients":
        x = x * group.gradients_per_round()
    scale = _scale(figure, result)
    mean = scale * curve.mean
    plot_curve(axes, x, mean, pen.number, place=pen.place, of=pen.of, label=pen.label)
    if curve.std is not None:
        std = scale * curve.std
        plot_spread(axes, x, mean - std, mean + std, pen.number, place=pen.place, of=pen.of)
    return True


def _draw_categories(axes: Axes, figure: Figure, result: PartResult, line: dict[str, str], axis: str, pen: Pen) -> bool:
    """Draw a metric at the end of runs as points by category; categories with long names stand below one another."""
    names = result.axes[axis].labels()
    down = _stands_down(axes, figure, result)
    span = _span(figure, result, axis)
    if down:
        categories_down(axes, names)
    else:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    if span is not None and down:
        axes.set_xlim(*span)
    elif span is not None:
        axes.set_ylim(*span)

    finals = _finals(figure, result, line, axis)
    if not finals:
        return False
    places = {k: k + pen.beside(min(0.16, 0.7 / pen.of)) for k in finals}
    inside = {k: value for k, value in finals.items() if span is None or span[0] <= value[0] <= span[1]}
    means = [mean for mean, _ in inside.values()]
    deviations = [deviation for _, deviation in inside.values()]
    style = pen.points() | {"linestyle": "none"}
    along = [places[k] for k in inside]
    if down:
        axes.errorbar(means, along, xerr=deviations, **style)
    else:
        axes.errorbar(along, means, deviations, **style)

    # What lies beyond the axis is an arrow at its end with the value beside it, so that nothing is left out.
    for k in finals.keys() - inside.keys():
        assert span is not None
        _draw_beyond(axes, finals[k], places[k], span, pen, down=down)
    return True


def _span(figure: Figure, result: PartResult, axis: str) -> tuple[float, float] | None:
    """Return the ends of the axis of values if a few of them lie so far off that all others would fall together."""
    if figure.log:
        return None
    finals = [
        value for line in result.places(figure.where, [axis]) for value in _finals(figure, result, line, axis).values()
    ]
    values = sorted(mean for mean, _ in finals)
    kept = _without_far_ones(values)
    if len(kept) == len(values):
        return None

    lowest = min(mean - deviation for mean, deviation in finals if kept[0] <= mean <= kept[-1])
    highest = max(mean + deviation for mean, deviation in finals if kept[0] <= mean <= kept[-1])
    width = highest - lowest
    # An arrow and its value take as much of the axis as a third of the other values.
    below = 0.35 if values[0] < kept[0] else 0.05
    above = 0.35 if values[-1] > kept[-1] else 0.05
    return lowest - below * width, highest + above * width


def _without_far_ones(values: Sequence[float]) -> Sequence[float]:
    """Return ascending values without those, one in `FEW` at most, that lie `FAR` from all others."""
    most = len(values) // FEW
    for cut in range(1, most + 1):
        width = values[-1] - values[cut]
        if width > 0 and values[cut] - values[cut - 1] > FAR * width:
            values = values[cut:]
            break
    for cut in range(1, most + 1):
        width = values[-1 - cut] - values[0]
        if width > 0 and values[-cut] - values[-1 - cut] > FAR * width:
            return values[:-cut]
    return values


def _draw_beyond(
    axes: Axes, final: tuple[float, float], place: float, span: tuple[float, float], pen: Pen, *, down: bool
) -> None:
    """Draw an arrow at the end of an axis to a value beyond it, and write the value, with its deviation, beside it."""
    mean, deviation = final
    low, high = span
    is_below = mean < low
    inwards = 1 if is_below else -1
    edge = (low if is_below else high) + inwards * 0.03 * (high - low)
    text = f"{mean:.3g}"
    if deviation:
        text += f" ± {deviation:.2g}"

    colour = look(pen.number).colour
    mark: dict[str, Any] = {"color": colour, "markersize": 6, "linestyle": "none"}
    label: dict[str, Any] = {"color": colour, "fontsize": 8.5, "textcoords": "offset points"}
    if down:
        axes.plot([edge], [place], marker="<" if is_below else ">", **mark)
        side = "left" if is_below else "right"
        axes.annotate(text, (edge, place), xytext=(6 * inwards, 0), ha=side, va="center", **label)
    else:
        axes.plot([place], [edge], marker="v" if is_below else "^", **mark)
        side = "bottom" if is_below else "top"
        axes.annotate(text, (place, edge), xytext=(0, 6 * inwards), ha="center", va=side, **label)


def _draw_numbers(axes: Axes, figure: Figure, result: PartResult, line: dict[str, str], axis: str, pen: Pen) -> bool:
    """Draw a metric at the end of runs as a line along the numbers of an axis of the study."""
    points = result.axes[axis].all_points()
    positions = np.array([point.value or 0.0 for point in points])
    labels = [point.label for point in points]
    logarithmic = False
    if _fit(positions, labels, width_of(axes)):
        axes.set_xticks(positions, labels)
    elif positions.min() > 0 and _fit(np.log(positions), labels, width_of(axes)):
        logarithmic = True
        log_scale(axes, "x")
        axes.set_xticks(positions, labels)

    finals = _finals(figure, result, line, axis)
    if not finals:
        return False
    places = positions[list(finals)]
    if pen.of > MOST_BANDS:  # bars at one place would cover each other
        if logarithmic:
            places = places * (positions.max() / positions.min()) ** pen.beside(aside(pen.of))
        else:
            places = places + pen.beside(aside(pen.of)) * np.ptp(positions)
    means = [mean for mean, _ in finals.values()]
    deviations = [deviation for _, deviation in finals.values()]
    axes.errorbar(places, means, deviations, **pen.points())
    return True


def _finals(figure: Figure, result: PartResult, line: dict[str, str], axis: str) -> dict[int, tuple[float, float]]:
    """Return mean and deviation of a metric at the end of runs, by the place on an axis, as far as they are known."""
    scale = _scale(figure, result)
    finals = {}
    for k, label in enumerate(result.axes[axis].labels()):
        estimate = result.at(line | {axis: label}).final(figure.metric)
        if estimate is not None:
            finals[k] = (scale * estimate.mean, scale * (estimate.std or 0.0))
    return finals


def _scale(figure: Figure, result: PartResult) -> float:
    """Return what values are multiplied by: shares are shown in percent."""
    return 100 if result.metric(figure.metric).share else 1


def _in_legend(label: str) -> str:
    """Return a label for a legend; matplotlib would leave out one that begins with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _fit(values: np.ndarray, labels: Sequence[str], inches: float) -> bool:
    """Return whether labels at some numbers do not overlap on an axis of some width."""
    if len(values) < 2 or np.ptp(values) == 0:
        return False
    in_order = sorted(zip(values, labels, strict=True))
    for (first, name), (second, next_name) in pairwise(in_order):
        room = (second - first) / np.ptp(values) * inches * LETTERS_AN_INCH
        if room < (len(name) + len(next_name)) / 2 + 1:
            return False
    return True
