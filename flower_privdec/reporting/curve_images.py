"""The pictures that a run leaves in its folder: one curve each, as a PNG file drawn by Pillow.

matplotlib takes as long to import and to draw four curves as a small run takes for everything else. A curve over the
rounds needs little of it: two axes, a grid, a line and its band. So these are drawn here, in the colours of `look` and
in matplotlib's font, and look like the pictures of a page.

Lines are drawn three times as large and made smaller, which smooths them. Text is smooth by itself, and is written
after that.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.reporting.look import GRID, INK, MUTED, PAPER, SERIES, axis_texts, no_matplotlib

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH = 780  # pixels: six inches at 130 dots an inch
HEIGHT = 416
DOTS_AN_INCH = 130
SMOOTHING = 3  # how much larger lines are drawn
BAND = 0.13  # how much of a curve's colour its band has, the rest is white

EDGE = 14  # pixels around everything
GAP = 9  # between a tick, its number and the name of the axis
TICK = 6  # how long a tick is
TEXT = 17  # height of a letter in pixels
TITLE = 19
NOTE = 15
LEAST_TEXT = 9  # a long title becomes no smaller than that

MOST_BELOW = 7  # numbers below the picture
MOST_BESIDE = 6
STEPS = (1.0, 2.0, 2.5, 5.0)  # what numbers at an axis are multiples of, and these times powers of ten


@dataclass(frozen=True)
class CurveData:
    """What a picture shows.

    Attributes:
        title: stands above it, and `note` below the title, in smaller letters.
        axis: the name of the vertical axis.
        unit: stands after each number there.
        rounds, values: the curve, of finite numbers.
        low, high: its band, at the same rounds; NaN or infinite where it has none.
        log: whether the vertical axis is logarithmic.
        from_zero: whether it begins at 0.
    """

    title: str
    note: str
    axis: str
    unit: str
    rounds: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    log: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class PixelScale:
    """Where the numbers of one axis stand.

    Attributes:
        low, high: the least and the greatest number that is shown.
        start, stop: their pixels.
        log: whether equal factors are equally far apart.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def pixels(self, numbers: Any) -> np.ndarray:
        """Return where numbers stand."""
        shown = np.asarray(numbers, dtype=float)
        low = self.low
        high = self.high
        if self.log:
            shown = np.log(shown)
            low = math.log(low)
            high = math.log(high)
        return self.start + (shown - low) / (high - low) * (self.stop - self.start)


def save_curve_image(data: CurveData, path: Path) -> None:
    """Draw a curve into a PNG file.

    Raises:
        ScenarioError: matplotlib, with Pillow and the font, is not installed.
    """
    bottom, top = _shown(data)
    beside = round_powers(bottom, top) if data.log else round_numbers(bottom, top, MOST_BESIDE)
    numbers = [text + data.unit for text in axis_texts(beside, each_its_own=data.log)]

    # Room at the left for the name of the axis and its widest number, and above for the title.
    font = _font(TEXT)
    left = EDGE + TEXT + GAP + max((font.getlength(text) for text in numbers), default=0.0) + GAP + TICK
    above = EDGE + TITLE + GAP
    if data.note:
        above += NOTE + GAP
    floor = HEIGHT - EDGE - TEXT - GAP - TEXT - GAP - TICK

    first = float(data.rounds[0])
    last = float(data.rounds[-1])
    beyond = 0.01 * (last - first) or 0.5
    across = PixelScale(first - beyond, last + beyond, left, WIDTH - 2 * EDGE)
    upwards = PixelScale(bottom, top, floor, above, data.log)
    below = _fitting(across, font)

    image = _lines(data, across, upwards, below, beside)
    _write(image, data, across, upwards, below, list(zip(beside, numbers, strict=True)))
    image.save(path, format="PNG", dpi=(DOTS_AN_INCH, DOTS_AN_INCH))


def round_numbers(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return the most round numbers between two, evenly apart, of which there are at most so many.

    Args:
        most: at least 2.
        whole: whether only integers are round enough.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    while True:
        for factor in STEPS:
            step = factor * power
            if whole and step != round(step):
                continue

            # Ends that a sum of floating-point numbers missed by a rounding are still ends.
            first = math.ceil(low / step - 1e-9)
            last = math.floor(high / step + 1e-9)
            if last - first < most:
                return [number * step for number in range(first, last + 1)]
        power *= 10


def round_powers(low: float, high: float) -> list[float]:
    """Return a few round numbers between two positive ones, about equally many times as large as one another."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return round_numbers(low, high, MOST_BESIDE)

    # Halves of a decade, or its thirds if it is the only one; powers of ten, some left out, if there are many.
    digits: tuple[float, ...] = (1.0,)
    if decades < 1.4:
        digits = (1.0, 2.0, 5.0)
    elif decades < 2.2:
        digits = (1.0, 3.0)
    apart = math.ceil(decades / MOST_BESIDE)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [digit * 10.0**exponent for exponent in exponents if exponent % apart == 0 for digit in digits]
    return [number for number in numbers if low * 0.999 <= number <= high * 1.001]


def _shown(data: CurveData) -> tuple[float, float]:
    """Return the least and the greatest number of the vertical axis."""
    if data.from_zero:
        return 0.0, 1.1 * float(data.values.max()) or 1.0

    shown = np.concatenate([data.values, data.low, data.high])
    shown = shown[np.isfinite(shown)]
    if data.log:
        shown = shown[shown > 0]
    low = float(shown.min())
    high = float(shown.max())
    if data.log:
        room = (high / low) ** 0.05
        return low / room, high * room
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - room, high + room


def _fitting(across: PixelScale, font: Any) -> list[float]:
    """Return as many round numbers below an axis as stand there without touching one another."""
    numbers: list[float] = []
    for most in range(MOST_BELOW, 1, -1):
        numbers = round_numbers(across.low, across.high, most, whole=True)
        texts = axis_texts(numbers)
        needed = sum(font.getlength(text) + 2 * GAP for text in texts)
        if needed <= across.stop - across.start:
            break
    return numbers


def _lines(
    data: CurveData, across: PixelScale, upwards: PixelScale, below: Sequence[float], beside: Sequence[float]
) -> Image:
    """Return the picture without its text."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH * SMOOTHING, HEIGHT * SMOOTHING), "white")
    pen = ImageDraw.Draw(image)
    line = round(1.5 * SMOOTHING)

    def segment(x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        pen.line([(x0 * SMOOTHING, y0 * SMOOTHING), (x1 * SMOOTHING, y1 * SMOOTHING)], fill=colour, width=line)

    def points(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
        return list(zip((across.pixels(x) * SMOOTHING).tolist(), (upwards.pixels(y) * SMOOTHING).tolist(), strict=True))

    # The band first: the grid can then be seen on it.
    has_band = np.isfinite(data.low) & np.isfinite(data.high)
    if data.log:
        has_band &= (data.low > 0) & (data.high > 0)
    for part in _runs(has_band):
        rounds = data.rounds[part]
        upper = points(rounds, data.high[part])
        lower = points(rounds, data.low[part])
        if len(rounds) > 1:
            pen.polygon(upper + lower[::-1], fill=_blended(SERIES[0], BAND))
            for edge in (upper, lower):
                pen.line(edge, fill=_blended(SERIES[0], 0.6), width=line)

    for number in beside:
        y = float(upwards.pixels(number))
        segment(across.start, y, across.stop, y, GRID)
        segment(across.start - TICK, y, across.start, y, MUTED)
    for number in below:
        x = float(across.pixels(number))
        segment(x, upwards.start, x, upwards.start + TICK, MUTED)
    segment(across.start, upwards.start, across.stop, upwards.start, MUTED)
    segment(across.start, upwards.start, across.start, upwards.stop, MUTED)

    # Of a logarithmic axis, 0 is infinitely far below: the line has a gap there.
    drawn = np.ones(len(data.rounds), dtype=bool)
    if data.log:
        drawn = data.values > 0
    for part in _runs(drawn):
        curve = points(data.rounds[part], data.values[part])
        if len(curve) > 1:
            pen.line(curve, fill=SERIES[0], width=round(3.2 * SMOOTHING), joint="curve")
        else:
            ((x, y),) = curve
            radius = 4.5 * SMOOTHING
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=SERIES[0], outline=PAPER, width=line)
    return image.reduce(SMOOTHING)


def _write(
    image: Image,
    data: CurveData,
    across: PixelScale,
    upwards: PixelScale,
    below: Sequence[float],
    beside: Sequence[tuple[float, str]],
) -> None:
    """Write title, numbers and names into a picture."""
    from PIL import Image, ImageDraw

    pen = ImageDraw.Draw(image)
    font = _font(TEXT)
    room = WIDTH - EDGE - across.start

    title, of_title = _fitted(data.title, TITLE, room)
    pen.text((across.start, EDGE), title, fill=INK, font=of_title, anchor="lt")
    if data.note:
        note, of_note = _fitted(data.note, NOTE, room)
        pen.text((across.start, EDGE + TITLE + GAP), note, fill=MUTED, font=of_note, anchor="lt")

    for number, text in beside:
        place = (across.start - TICK - GAP, float(upwards.pixels(number)))
        pen.text(place, text, fill=MUTED, font=font, anchor="rm")
    foot = upwards.start + TICK + GAP
    for number, text in zip(below, axis_texts(below), strict=True):
        pen.text((float(across.pixels(number)), foot), text, fill=MUTED, font=font, anchor="mt")
    middle = (across.start + across.stop) / 2
    pen.text((middle, HEIGHT - EDGE), "round", fill=MUTED, font=font, anchor="mb")

    # Pillow writes from left to right only: a name that stands upright is turned.
    length = round(upwards.start - upwards.stop)
    upright = Image.new("RGB", (length, TEXT + GAP), "white")
    name, of_name = _fitted(data.axis, TEXT, length)
    ImageDraw.Draw(upright).text((length / 2, 0), name, fill=MUTED, font=of_name, anchor="ma")
    image.paste(upright.rotate(90, expand=True), (EDGE // 2, round(upwards.stop)))


def _runs(mask: np.ndarray) -> list[slice]:
    """Return the stretches of a mask that are true."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [slice(start, stop) for start, stop in ends.reshape(-1, 2).tolist()]


def _blended(colour: str, share: float) -> tuple[int, ...]:
    """Return a colour thinned with white."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return tuple(round(255 + share * (part - 255)) for part in parts)


def _fitted(text: str, size: int, room: float) -> tuple[str, Any]:
    """Return a text that fits into some pixels, and its font: smaller if it has to be, and at last cut off."""
    while size > LEAST_TEXT and _font(size).getlength(text) > room:
        size -= 1
    font = _font(size)
    if font.getlength(text) <= room:
        return text, font

    while font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "...", font


@cache
def _font(size: int) -> Any:
    """Return matplotlib's font, which is found without importing matplotlib.

    Raises:
        ScenarioError: matplotlib is not installed, or has no such font.
    """
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise no_matplotlib()
    from PIL import ImageFont

    folder = Path(spec.submodule_search_locations[0])
    return ImageFont.truetype(folder / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", size)
