"""How every picture looks: its colours, lines, marks, numbers, spreads and legends.

A picture may be printed in grey, be shown 600 pixels wide on a phone, or be read by somebody who cannot tell red from
green. So no two curves differ by their colours only: each of them has a `Look`, with a colour, dashes and a mark, and
`look` numbers them such that the first 56 differ in their dashes or in their mark. A label has one look in all pictures
of a page, because its number is its place among the page's labels.

The colours are those of Okabe and Ito, made dark enough for thin lines on white (a contrast of 3 and more).

What draws a picture does so in five steps: `drawing` sets the style, `new_figure` and `new_axes` make room and give
every axis its plain numbers, `log_scale` makes one logarithmic, `plot_curve` and `plot_spread` draw, and `add_legend`
names the lines beside the axes, so that no line is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.errors import ScenarioError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

Numbers = Sequence[float] | np.ndarray

INK = "#1f2328"
MUTED = "#59636e"
GRID = "#d8dee4"
PAPER = "#fefefe"
SERIES = ("#0069a6", "#c44500", "#009e73", "#c0609a", "#30363d", "#b09100", "#3d9bd8", "#7d3c1c")
PAGE_COLOURS = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"series-{i}" for i, colour in enumerate(SERIES)
}
DARK = {
    **{"ink": "#e6edf3", "muted": "#9aa5b1", "grid": "#30363d", "paper": "#161b22"},
    **{"series-0": "#5ab0f0", "series-1": "#ff8f4f", "series-2": "#3fd0a0", "series-3": "#ee9fca"},
    **{"series-4": "#e6edf3", "series-5": "#e8c63c", "series-6": "#9fdcff", "series-7": "#c98d6b"},
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is one
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.handlelength": 3.4,  # so that dashes can be told apart
}

DASHES: tuple[tuple[float, ...], ...] = (  # of each line: on, off, on, off, ... in widths of the line
    (),
    (4.5, 1.8),
    (1.0, 1.5),
    (6.0, 1.8, 1.0, 1.8),
    (9.0, 2.5),
    (4.0, 1.6, 1.0, 1.6, 1.0, 1.6),
    (2.4, 1.2),
)
MARKS: dict[str, str] = {  # matplotlib's name: the mark as a path around (0, 0), in an SVG
    "o": "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
    "s": "M-3-3H3V3H-3z",
    "^": "M0-3.8L3.6 3H-3.6z",
    "D": "M0-4L4 0L0 4L-4 0z",
    "v": "M0 3.8L3.6-3H-3.6z",
    "P": "M-1.3-3.8H1.3V-1.3H3.8V1.3H1.3V3.8H-1.3V1.3H-3.8V-1.3H-1.3z",
    "X": "M-3.6-2L-2-3.6L0-1.6L2-3.6L3.6-2L1.6 0L3.6 2L2 3.6L0 1.6L-2 3.6L-3.6 2L-1.6 0z",
    "*": "M0-4.4L1.1-1.4H4.2L1.7 0.5L2.6 3.6L0 1.8L-2.6 3.6L-1.7 0.5L-4.2-1.4H-1.1z",
}
LETTERS_AN_INCH = 13  # of the numbers and names at an axis
HANDLE = 11  # letters that a line takes in a legend, with the room beside it
MARKED = 7  # places of a curve that have a mark, at most
MOST_BANDS = 3  # curves; bands of more would cover each other
MOST_CURVES = len(DASHES) * len(MARKS)  # that can be told apart


@dataclass(frozen=True)
class Look:
    """How a curve is drawn.

    Attributes:
        series: the number of its colour.
        dashes: lengths on and off, in widths of the line; none for a solid line.
        mark: matplotlib's name of its mark.
    """

    series: int
    dashes: tuple[float, ...]
    mark: str

    @property
    def colour(self) -> str:
        """Return its colour on white."""
        return SERIES[self.series]

    @property
    def size(self) -> float:
        """Return the size of its mark: those with thin arms are larger."""
        return {"P": 6.0, "X": 6.0, "*": 8.0}.get(self.mark, 5.0)

    @property
    def line(self) -> Any:
        """Return its dashes as matplotlib takes them."""
        return (0, self.dashes) if self.dashes else "solid"

    def key(self) -> str:
        """Return the line with its mark as SVG, for a legend in a page; it follows the page's colours."""
        colour = f"var(--series-{self.series})"
        dashes = ""
        if self.dashes:
            lengths = " ".join(f"{2.4 * length:g}" for length in self.dashes)
            dashes = f' stroke-dasharray="{lengths}"'
        return (
            '<svg class="key" viewBox="0 0 44 12" aria-hidden="true">'
            f'<path d="M1 6H43" fill="none" stroke="{colour}" stroke-width="2.4"{dashes}/>'
            f'<path d="{MARKS[self.mark]}" transform="translate(22 6)" fill="{colour}"/></svg>'
        )


def look(index: int) -> Look:
    """Return how the curve with a number is drawn.

    Dashes repeat after 7 curves, colours with their marks after 8: so the first `MOST_CURVES` differ in both or in one,
    also in grey.
    """
    series = index % len(SERIES)
    return Look(series, DASHES[index % len(DASHES)], tuple(MARKS)[series])


# --- numbers ---

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LEAST_PLAIN = 1e-6
MOST_PLAIN = 1e9


def axis_texts(values: Sequence[float], *, each_its_own: bool = False) -> list[str]:
    """Return numbers as plain text: `0.5`, `1.0`, `1,000`, `−2`; very small and very large ones as `2×10⁻⁷`.

    Args:
        each_its_own: whether each has as few decimals as it needs; else all have as many as one of them needs.
    """
    finite = [value for value in values if math.isfinite(value)]
    if any(value and not LEAST_PLAIN <= abs(value) < MOST_PLAIN for value in finite):
        return [_as_power(value) for value in values]

    # Differences of numbers that a computer has added up, such as 0.30000000000000004, are not meant.
    largest = max(map(abs, finite), default=0.0)
    digits = 9 - math.floor(math.log10(largest)) if largest else 0
    needed = [_decimals(value, digits) for value in finite]
    texts = []
    for value in values:
        decimals = _decimals(value, digits) if each_its_own else max(needed, default=0)
        texts.append(f"{value:,.{decimals}f}".replace("-", "−"))
    return texts


def _decimals(value: float, most: int) -> int:
    """Return how many decimals a number has, at most so many."""
    if not math.isfinite(value) or most <= 0:
        return 0
    text = f"{abs(value):.{most}f}".rstrip("0")
    return len(text.partition(".")[2])


def _as_power(value: float) -> str:
    """Return a number as a digit and a power of ten, without markup: `2×10⁻⁷`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}".replace("-", "−")
    digits, _, exponent = f"{value:.6e}".partition("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPT)
    factor = f"{float(digits):g}".replace("-", "−")
    return power if factor == "1" else f"{factor}×{power}"


# --- figures ---


@contextmanager
def drawing(salt: str = "privdec") -> Iterator[None]:
    """Draw with this package's style; the salt makes the identifiers in an SVG unique to it.

    Raises:
        ScenarioError: when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ScenarioError(
            "pictures need matplotlib, which is not installed: pip install 'flower-privdec[plots]'",
            code="reporting.no-matplotlib",
        ) from error
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches; it belongs to no window, and a notebook shows it as the value of a cell."""
    from flower_privdec.reporting.notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def new_axes(figure: Figure, rows: int = 1, columns: int = 1, **options: Any) -> np.ndarray:
    """Return the axes of a figure, [rows, columns], whose numbers are plain text."""
    from flower_privdec.reporting.ticks import FittingTicks, PlainNumbers

    places: np.ndarray = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in places.flat:
        axes.xaxis.set_major_locator(FittingTicks())
        axes.xaxis.set_major_formatter(PlainNumbers())
        axes.yaxis.set_major_formatter(PlainNumbers())
    return places


def in_percent(axes: Axes, along: str = "y") -> None:
    """Let the numbers of an axis be percentages."""
    from flower_privdec.reporting.ticks import PlainNumbers

    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_formatter(PlainNumbers(" %"))


def whole_numbers(axes: Axes, along: str = "x") -> None:
    """Let the numbers of an axis that counts be whole ones."""
    axis = axes.yaxis if along == "y" else axes.xaxis
    locator: Any = axis.get_major_locator()
    locator.set_params(integer=True)


def width_of(axes: Axes) -> float:
    """Return the width of a panel in inches."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return float(axes.get_window_extent().width / figure.dpi)


def log_scale(axes: Axes, along: str = "y") -> None:
    """Make an axis logarithmic: a few round numbers, plain."""
    from matplotlib.ticker import NullFormatter, NullLocator

    from flower_privdec.reporting.ticks import LogTicks

    axis = axes.yaxis if along == "y" else axes.xaxis
    formatter = axis.get_major_formatter()
    axes.set(**{f"{along}scale": "log"})
    axis.set_major_locator(LogTicks())
    axis.set_major_formatter(formatter)
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def fits_below(names: Sequence[str], inches: float) -> bool:
    """Return whether names fit side by side below an axis of some width."""
    widest = max(map(len, names), default=0)
    return (widest + 2) * len(names) <= LETTERS_AN_INCH * inches


def categories_down(axes: Axes, names: Sequence[str]) -> None:
    """Let names stand one below the other at the left of a picture, the first on top, however long they are."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def set_title(axes: Axes, title: str, note: str = "", *, size: float = 10.5) -> None:
    """Set what a picture shows, and below it in smaller letters what its bands or bars are."""
    axes.set_title(title, loc="left", fontsize=size, pad=18 if note else 6)
    if note:
        above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(note, (0, 1), xytext=(0, 5), color=MUTED, fontsize=8.5, **above)


def title_with_legend(axes: Axes, title: str, columns: int, *, size: float = 9.5) -> None:
    """Set the title of one of several panels, and between it and the axes its own legend, which hides no data there."""
    entries = len(axes.get_legend_handles_labels()[1])
    rows = math.ceil(entries / columns)
    axes.set_title(title, loc="left", fontsize=size, pad=7 + 13 * rows)
    close: dict[str, Any] = {
        "borderpad": 0.2,
        "borderaxespad": 0.2,
        "columnspacing": 1.0,
        "handlelength": 2.3,
        "handletextpad": 0.5,
    }
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **close)


def aside(of: int) -> float:
    """Return by which share of an axis the bars of so many lines stand apart."""
    return min(0.006, 0.06 / of)


def marked(n_points: int, place: int, of: int) -> list[int]:
    """Return at which points of a curve its marks and spreads stand: a few, at other places than those of its rivals.

    Args:
        n_points: of the curve.
        place: its place among the curves of the picture.
        of: how many curves there are.
    """
    step = max(1, math.ceil(n_points / MARKED))
    first = (place * step // max(1, of)) % step
    return list(range(first, n_points, step))


def plot_curve(
    axes: Axes, x: Numbers, y: Numbers, number: int, *, of: int, place: int | None = None, **options: Any
) -> None:
    """Draw a curve with its look.

    Args:
        number: of its look, the same in all pictures of a page.
        of: how many curves the picture has; one that is by itself has no marks, unless it has a single point.
        place: its place among them; by default its number.
        options: matplotlib's, such as the label.
    """
    its = look(number)
    style: dict[str, Any] = {"color": its.colour, "linestyle": its.line}
    if of > 1 or len(x) == 1:
        where = marked(len(x), number if place is None else place, of)
        style |= {"marker": its.mark, "markevery": where, "markersize": its.size}
        style |= {"markeredgecolor": PAPER, "markeredgewidth": 0.6}
    axes.plot(x, y, **(style | options))


def plot_spread(
    axes: Axes, x: Numbers, low: np.ndarray, high: np.ndarray, number: int, *, of: int, place: int | None = None
) -> None:
    """Draw the spread of a curve: a band with edges, or bars at a few places if bands would cover each other."""
    its = look(number)
    if of <= MOST_BANDS:
        axes.fill_between(x, low, high, facecolor=(its.colour, 0.13), edgecolor=(its.colour, 0.6), linewidth=0.7)
        return

    # Bars at the same place stand side by side.
    place = number if place is None else place
    where = marked(len(x), place, of)
    positions = np.asarray(x, dtype=float)
    beside = 0.0
    if len(x) < MARKED * 2:
        beside = (place % of - (of - 1) / 2) * aside(of) * float(np.ptp(positions))
    axes.vlines(positions[where] + beside, low[where], high[where], colors=its.colour, linewidth=1.1, alpha=0.85)


def add_legend(figure: Figure, title: str = "", *, below: bool = False, labels: Sequence[str] = ()) -> Legend | None:
    """Name the lines of all panels, each once, beside the panels or below them; None if no line has a name.

    Args:
        labels: in this order; by default as they were drawn.
    """
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    order = [label for label in labels or handles if label in handles]
    if not order:
        return None

    place: dict[str, Any] = {"loc": "outside right center"}
    if below:
        longest = max(map(len, order))
        columns = max(1, int(figure.get_figwidth() * LETTERS_AN_INCH / (longest + HANDLE)))
        place = {"loc": "outside lower left", "ncols": min(columns, len(order))}
    return figure.legend(
        [handles[label] for label in order], order, title=title or None, fontsize=8.5, alignment="left", **place
    )


def described(figure: Figure, title: str) -> str:
    """Return the text for those who do not see a picture: its title, and where each named line begins and ends."""
    parts = []
    for axes in figure.axes:
        for line in axes.get_lines():
            label = str(line.get_label())
            values = np.asarray(line.get_ydata(), dtype=float)
            places = np.asarray(line.get_xdata(), dtype=float)
            known = np.flatnonzero(np.isfinite(values))
            if label.startswith("_") or not len(known):
                continue

            write = axes.yaxis.get_major_formatter()
            first = known[0]
            last = known[-1]
            text = f"{label}: {_short(values[last], write)}"
            if last > first:
                text = f"{label}: from {_short(values[first], write)} to {_short(values[last], write)}"
            where = axes.get_xlabel()
            if where and places[last] == int(places[last]):
                text += f" ({where} {places[last]:,.0f})"
            parts.append(text)
    return f"{title}. {'; '.join(parts)}" if parts else title


def _short(value: float, formatter: Any) -> str:
    """Return a number in three digits, with the unit of its axis."""
    unit = getattr(formatter, "unit", "")
    return axis_texts([float(f"{value:.3g}")])[0] + unit


def light_and_dark() -> tuple[str, str]:
    """Return the colours of a page as variables of CSS, light and dark."""
    light = ";".join(f"--{name}:{colour}" for colour, name in PAGE_COLOURS.items())
    dark = ";".join(f"--{name}:{colour}" for name, colour in DARK.items())
    return light, dark
