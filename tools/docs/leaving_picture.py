"""Draw the pictures of noise that cancels beside a trusted server: `python -m tools.docs.leaving_picture`.

Their lines are rows of published studies of the same peers: those of a trusted server and of peers that each hide
themselves are in one, those of peers that train alone and of peers that leave each in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flower_privdec.scenario import load_scenario
from flower_privdec.studies.spec import Figure, Point, kinds_of, load_study
from flower_privdec.studies.study_pictures import save_figure
from tools.docs.claims import ROOT, published

RESULTS = ROOT / "results"
NAME = "beside-a-server.svg"
BESIDE = "cancelling-laptop"


@dataclass(frozen=True)
class Drawing:
    """A picture whose lines are rows of two studies.

    Attributes:
        study: the file of the second, in `simulations/cancelling`.
        folder: of its results, where the picture lies.
        lines: the rows that are drawn, of the axis `noise`.
    """

    study: str
    folder: str
    title: str
    lines: tuple[str, ...]

    @property
    def path(self) -> Path:
        return RESULTS / self.folder / NAME


LEAVING = Drawing(
    "leaving.yaml",
    "cancelling-leaving-laptop",
    "Test accuracy by ε, also of those that stay when two leave",
    (
        "trusted server",
        "cancelling",
        "two may be absent, all stay",
        "two leave early",
        "two leave late",
        "each for itself",
    ),
)
ALONE = Drawing(
    "alone.yaml",
    "cancelling-alone-laptop",
    "Test accuracy by ε: alone, peers, a trusted server",
    ("trusted server", "cancelling", "each for itself", "each alone"),
)
DRAWINGS = (LEAVING, ALONE)


def draw(drawing: Drawing, path: Path | None = None) -> None:
    """Draw the accuracy by ε, each line at the rates that were chosen for it."""
    study, base = load_study(str(ROOT / "simulations" / "cancelling" / drawing.study))
    (part,) = [part for part in study.parts if part.name == "table"]
    points = [Point.model_validate({"label": label}) for label in drawing.lines]
    axes = part.axes | {"noise": part.axes["noise"].model_copy(update={"points": points})}
    part = part.model_copy(update={"axes": axes})

    folders = [RESULTS / BESIDE, RESULTS / drawing.folder]
    result = published(folders, part, study.size(None) or "", kinds_of([load_scenario(base)]))
    figure = Figure.model_validate({"kind": "final", "x": "epsilon", "by": "noise", "title": drawing.title})
    save_figure(figure, result, path or drawing.path)


if __name__ == "__main__":
    for drawing in DRAWINGS:
        draw(drawing)
