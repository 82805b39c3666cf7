"""Synthetic drawings: images of curved pen strokes, for what all such images have in common."""

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
    drawings = []
    for i in range(count):
        generator = keyed_generator(0, "strokes", i)
        ink = np.zeros(shape)
        n_strokes = generator.integers(1, 3)
        for _ in range(n_strokes):
            n_corners = generator.integers(3, 6)
            corners = generator.uniform(-1, 1, (n_corners, 2)) * REACH + 0.5
            pen = generator.uniform(*PEN) * min(shape)
            dots = _along(corners) * shape - 0.5
            np.maximum(ink, _line(dots, pen, shape), out=ink)
        drawings.append(_centred(ink).astype(np.float32))
    return np.stack(drawings)


def _along(corners: np.ndarray) -> np.ndarray:
    """Return dots on the spline through some corners [n, 2], DOTS for each of its n - 1 segments."""
    # A segment needs a point beyond each of its ends: the first and the last are mirrored.
    before = 2 * corners[[0]] - corners[[1]]
    after = 2 * corners[[-1]] - corners[[-2]]
    around = np.concatenate([before, corners, after])

    place = np.linspace(0, 1, DOTS)[:, None] ** np.arange(4)  # [DOTS, 4], powers 0 to 3
    segments = [place @ _SPLINE @ around[i : i + 4] for i in range(len(corners) - 1)]
    return np.concatenate(segments)


def _line(dots: np.ndarray, pen: float, shape: tuple[int, int]) -> np.ndarray:
    """Return the ink of a line through some dots: full within 2/3 of the pen, none beyond twice the pen."""
    rows = (np.arange(shape[0]) - dots[:, :1]) ** 2
    columns = (np.arange(shape[1]) - dots[:, 1:]) ** 2
    squares = rows[:, :, None] + columns[:, None, :]  # [dots, height, width]
    distance = np.sqrt(squares.min(0))
    return np.asarray(np.clip(1.5 - 0.75 * distance / pen, 0, 1))


def _centred(ink: np.ndarray) -> np.ndarray:
    """Shift an image by whole pixels so that its centre of mass is at its centre."""
    mass = ink.sum()
    shift = []
    for axis, size in enumerate(ink.shape):
        profile = ink.sum(1 - axis)
        mean = (profile * np.arange(size)).sum() / mass
        shift.append(round((size - 1) / 2 - mean))
    return np.roll(ink, shift, axis=(0, 1))
