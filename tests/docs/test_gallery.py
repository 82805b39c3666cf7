"""The gallery: ten results, each with a picture that its kept numbers draw, a command, and figures that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paths import ROOT
from svg_pictures import assert_alike, texts_of

from tools.docs import gallery

PAGE = ROOT / "docs" / "gallery.md"
TEN = [
    "Your own data",
    "Tables of hospitals that do not agree",
    "A folder of images",
    "LoRA",
    "Ten thousand peers",
    "Liars",
    "Who learns what",
    "Devices",
    "A Flower app of your own",
    "A paper's table, run again",
]


def sections() -> dict[str, str]:
    """Return the page's sections by heading."""
    _, *found = re.split(r"(?m)^## ", PAGE.read_text(encoding="utf-8"))
    return {section.partition("\n")[0]: section.partition("\n")[2] for section in found}


def test_ten_results_have_one_picture_and_a_command() -> None:
    found = sections()
    assert [heading for heading in found if heading != "More from the studies"] == TEN
    for heading in TEN:
        text = found[heading]
        (picture,) = re.findall(r"!\[[^\]]+\]\((.*)\)", text)
        assert (PAGE.parent / picture).is_file()
        assert "$ " in text or "`privdec " in text, heading
    pictures = {path.stem for path in gallery.PICTURES.glob("*.svg")}
    assert pictures == set(gallery.STORIES) == {path.stem for path in gallery.PICTURES.glob("*.json")}


@pytest.mark.parametrize("name", gallery.STORIES)
def test_a_gallery_picture_is_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    assert_alike(gallery.save(name, tmp_path), gallery.PICTURES / f"{name}.svg")


@pytest.mark.parametrize("name", gallery.STORIES)
def test_figures_beside_a_picture_are_its_last_numbers(name: str) -> None:
    numbers = json.loads((gallery.PICTURES / f"{name}.json").read_text(encoding="utf-8"))
    (text,) = (text for text in sections().values() if f"gallery/{name}.svg" in text)
    text = " ".join(text.split())
    factor = 100 if numbers["share"] else 1
    for line in numbers["lines"].values():
        mean = factor * line["mean"][-1]
        if "std" in line:
            assert f"{mean:.1f} ± {factor * line['std'][-1]:.1f} %" in text
        elif numbers["share"]:
            assert f"{mean:.1f} %" in text
        else:
            assert f"{mean:.2f}" in text


def test_who_learns_what_is_as_planned_today() -> None:
    """The one picture of a plan, which no processor changes."""
    kept = json.loads((gallery.PICTURES / "who-learns-what.json").read_text(encoding="utf-8"))
    planned = gallery.who_learns_what()
    assert list(kept["lines"]) == list(planned["lines"])
    for name, line in planned["lines"].items():
        assert kept["lines"][name]["mean"] == pytest.approx(line["mean"], rel=1e-3)


def test_a_gallery_picture_has_no_raw_tex() -> None:
    for picture in gallery.PICTURES.glob("*.svg"):
        assert not any("$" in text or "mathdefault" in text for text in texts_of(picture)), picture.name
