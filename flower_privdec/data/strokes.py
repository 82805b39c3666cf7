"""Synthetic drawings of random pen strokes, similar to handwriting.

They are public: drawn from fixed keys, with constants chosen once, and no example of any data set is looked at.
"""

from __future__ import annotations

import numpy as np

from flower_privdec.rows.keys import keyed_generator

REACH = (9 / 28, 7 / 28)  # how far the points of a stroke lie from the centre, of height and width
PEN = (0.8 / 28, 1.6 / 28)  # half the width of the line, of the shorter side
DOTS = 16  # places in a segment from which distances to the line are measured
# Uniform cubic Catmull-Rom spline: powers of the position in the segment by the four points around it.
_SPLINE = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2


def draw_strokes(count: int, shape: tuple[int, int]) -> np.ndarray:
    """Draw images of one or two curved strokes each, centred by mass.

    Args:
        count: how many; the first ones are the same for any count.
        shape: height and width in pixels.

    Returns:
        float32 [count, height, width], 0 is paper and 1 is ink.
    """
    return np.stack([_drawing(keyed_generator(0, "strokes", i), shape) for i in range(count)])


def _drawing(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    ink = np.zeros(shape)
    for _ in range(generator.integers(1, 3)):
        corners = generator.uniform(-1, 1, (generator.integers(3, 6), 2)) * REACH + 0.5
        pen = generator.uniform(*PEN) * min(shape)
        np.maximum(ink, _line(_curve(corners) * shape - 0.5, pen, shape), out=ink)
    return _centred(ink).astype(np.float32)


def _curve(corners: np.ndarray) -> np.ndarray:
    """Return dots along the smooth curve through some corners, [dots, 2]."""
    ends = 2 * corners[[0, -1]] - corners[[1, -2]]
    around = np.concatenate([ends[:1], corners, ends[1:]])
    place = np.linspace(0, 1, DOTS)[:, None] ** np.arange(4)
    segments = [place @ _SPLINE @ around[i : i + 4] for i in range(len(corners) - 1)]
    return np.concatenate(segments)


def _line(dots: np.ndarray, pen: float, shape: tuple[int, int]) -> np.ndarray:
    """Return the ink of a line through some dots: full within 2/3 of the pen, none beyond twice the pen."""
    rows = (np.arange(shape[0]) - dots[:, :1]) ** 2
    columns = (np.arange(shape[1]) - dots[:, 1:]) ** 2
    distance = np.sqrt((rows[:, :, None] + columns[:, None, :]).min(0))
    return np.asarray(np.clip(1.5 - 0.75 * distance / pen, 0, 1))


def _centred(ink: np.ndarray) -> np.ndarray:
    """Shift an image by whole pixels so that its centre of mass is at its centre."""
    mass = ink.sum()
    means = [(ink.sum(1 - axis) * np.arange(size)).sum() / mass for axis, size in enumerate(ink.shape)]
    shift = [round((size - 1) / 2 - mean) for mean, size in zip(means, ink.shape, strict=True)]
    return np.roll(ink, shift, axis=(0, 1))
