"""Published SVG pictures: their texts and lines, and whether two are alike."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np


def texts_of(picture: Path) -> list[str]:
    """Return the texts of an SVG file, in order."""
    text = picture.read_text(encoding="utf-8")
    return [html.unescape(found) for found in re.findall(r"<text[^>]*>([^<]*)</text>", text)]


def lines_of(picture: Path) -> np.ndarray:
    """Return the coordinates of all lines and areas of an SVG file, in order, in points [N]."""
    text = picture.read_text(encoding="utf-8")
    drawn_paths = " ".join(re.findall(r' d="([^"]*)"', text))
    return np.array(re.findall(r"-?\d+(?:\.\d+)?", drawn_paths), dtype=float)


def assert_alike(picture: Path, original: Path) -> None:
    """Both have the same texts, and the same lines to a tenth of a point."""
    remedy = f"{original}: run python -m tools.docs.pictures, or of the gallery python -m tools.docs.gallery --draw"
    assert texts_of(picture) == texts_of(original), remedy
    lines = lines_of(picture)
    wanted = lines_of(original)
    assert lines.shape == wanted.shape, remedy
    assert np.abs(lines - wanted).max() < 0.1, remedy
