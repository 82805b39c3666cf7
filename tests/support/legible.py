"""Whether a picture can be read: in grey, by the colour-blind, and without knowing TeX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

Colour = str | tuple[float, ...]

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009,
# severity 1, on linear RGB.
SIGHTS = {
    "everybody": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE_POINT = np.array([0.95047, 1.0, 1.08883])


def linear(colour: Colour) -> np.ndarray:
    """Return a colour as linear RGB."""
    values = np.array(to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(first: Colour, second: Colour) -> float:
    """Return the contrast of two colours, 1 to 21, as WCAG defines it: all that is left of them in grey."""
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (first, second))
    return (lighter + 0.05) / (darker + 0.05)


def distance(first: Colour, second: Colour, sight: str) -> float:
    """Return how far apart two colours are in CIELAB to an eye of `SIGHTS`."""
    places = []
    for colour in (first, second):
        seen = np.clip(SIGHTS[sight] @ linear(colour), 0, 1)
        x, y, z = np.cbrt(np.maximum(TO_XYZ @ seen / WHITE_POINT, 1e-6))
        places.append(np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)]))
    return float(np.linalg.norm(places[0] - places[1]))


def texts_of(figure: Figure) -> list[str]:
    """Return all texts of a figure as they would be written."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels(which="both")  # which makes the texts, without the time that a layout takes
    written = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    return [text for text in written if text]


def looks_in(axes: Axes) -> Iterator[tuple[Any, Any, Any]]:
    """Yield colour, dashes and mark of each named line of a panel."""
    for handle in axes.get_legend_handles_labels()[0]:
        line = handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
        if isinstance(line, Line2D):
            dashes = None if line.get_linestyle() == "None" else str(line._unscaled_dash_pattern)
            yield line.get_color(), dashes, line.get_marker()


def check_legible(figure: Figure) -> None:
    """Assert that a picture has plain texts, named axes, and lines that differ in grey."""
    for text in texts_of(figure):
        assert "$" not in text, text
        assert "mathdefault" not in text, text
        assert text.strip()

    panels = [axes for axes in figure.axes if axes.get_visible() and axes.axison and axes.get_label() != "<colorbar>"]
    for axes in panels:
        lines = list(looks_in(axes))
        for first, second in combinations(lines, 2):
            in_grey = contrast(first[0], second[0]) >= 1.3
            assert first[1:] != second[1:] or in_grey, f"two lines look alike in grey: {first}"
        assert all(label.strip() for label in axes.get_legend_handles_labels()[1])

    if panels:
        assert any(axes.get_xlabel() or not _counts(axes.get_xticklabels()) for axes in panels)
        named = [axes for axes in panels if axes.get_ylabel() or not _counts(axes.get_yticklabels())]
        assert named
        for axes in panels:
            shared = axes.get_shared_y_axes().get_siblings(axes)
            assert any(one in named for one in shared), f"{axes.get_title('left')}: its y axis has no name"
        titled = any(axes.get_title("left") for axes in panels)
        assert titled or figure.get_suptitle()


def _counts(labels: Iterable[Text]) -> bool:
    """Return whether an axis has numbers, and not names or nothing."""
    texts = [label.get_text() for label in labels if label.get_text()]
    return any(text[0].isdigit() or text[0] == "−" for text in texts)
