"""A figure that a notebook shows. It is imported only when a picture is drawn, since it imports matplotlib."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

DOTS_AN_INCH = 110


class NotebookFigure(Figure):
    """A figure that shows itself as the value of a cell.

    A notebook shows other figures only once pyplot was imported in it.
    """

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        settings: dict[str, Any] = {"format": "png", "dpi": DOTS_AN_INCH}
        self.savefig(image, **settings)
        return image.getvalue()
