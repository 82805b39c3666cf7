"""Draw the README's picture of noise that cancels, with peers that leave: `python -m tools.docs.leaving_picture`.

Its lines are rows of two published studies of the same peers: those of peers that leave are in one, those of a trusted
server and of peers that each hide themselves in the other.
"""

from __future__ import annotations

from pathlib import Path

from flower_privdec.scenario import load_scenario
from flower_privdec.studies.spec import Figure, Point, kinds_of, load_study
from flower_privdec.studies.study_pictures import save_figure
from tools.docs.claims import ROOT, published

FOLDERS = [ROOT / "results" / "cancelling-laptop", ROOT / "results" / "cancelling-leaving-laptop"]
PICTURE = FOLDERS[1] / "beside-a-server.svg"
LINES = (
    "trusted server",
    "cancelling",
    "two may be absent, all stay",
    "two leave early",
    "two leave late",
    "each for itself",
)


def draw(path: Path = PICTURE) -> None:
    """Draw the accuracy by ε, each line at the rates that were chosen for it."""
    study, base = load_study(str(ROOT / "simulations" / "cancelling" / "leaving.yaml"))
    (part,) = [part for part in study.parts if part.name == "table"]
    points = [Point.model_validate({"label": label}) for label in LINES]
    axes = part.axes | {"noise": part.axes["noise"].model_copy(update={"points": points})}
    part = part.model_copy(update={"axes": axes})

    result = published(FOLDERS, part, study.size(None) or "", kinds_of([load_scenario(base)]))
    title = "Test accuracy by ε, also of those that stay when two leave"
    figure = Figure.model_validate({"kind": "final", "x": "epsilon", "by": "noise", "title": title})
    save_figure(figure, result, path)


if __name__ == "__main__":
    draw()
