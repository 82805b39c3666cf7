"""Published pictures: plain text on every axis, and drawn from the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from svg_pictures import assert_alike, texts_of

from flower_privdec.reporting.look import SERIES
from flower_privdec.studies.publish import drawn
from flower_privdec.studies.study_pictures import looks_of
from tools.docs import claims, leaving_picture

PUBLISHED = sorted((ROOT / "results").glob("*/*.svg"))


def test_no_published_picture_has_raw_tex() -> None:
    assert len(PUBLISHED) > 90
    for picture in PUBLISHED:
        assert "mathdefault" not in picture.read_text(encoding="utf-8"), picture.name
        assert not any("$" in text or "1e" in text for text in texts_of(picture)), picture.name


def test_published_pictures_have_one_style() -> None:
    for picture in PUBLISHED:
        text = picture.read_text(encoding="utf-8")
        assert any(colour in text for colour in SERIES), f"{picture}: run python -m tools.docs.pictures"


def drawn_again(folder: Path) -> set[Path]:
    """Draw the pictures of `claims.PUBLISHED` from the published numbers, and return which they are, as published."""
    again = set()
    for _, _, published, parts in claims.results():
        out = folder / published.name
        out.mkdir()
        for part in parts:
            drawn(part, out, looks_of(parts))
        for picture in out.iterdir():
            original = published / picture.name
            assert_alike(picture, original)
            again.add(original)
    return again


def test_a_picture_is_what_its_tables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PUBLISHED", [("pdsl-cifar", "laptop")])
    assert [path.name for path in drawn_again(tmp_path)] == ["per-round-1.svg"]


@pytest.mark.parametrize("drawing", leaving_picture.DRAWINGS, ids=lambda drawing: drawing.folder)
def test_joined_pictures_are_what_their_tables_say(drawing: leaving_picture.Drawing, tmp_path: Path) -> None:
    leaving_picture.draw(drawing, tmp_path / leaving_picture.NAME)
    assert_alike(tmp_path / leaving_picture.NAME, drawing.path)


@pytest.mark.slow
def test_every_picture_is_what_its_tables_say(tmp_path: Path) -> None:
    joined = {drawing.path for drawing in leaving_picture.DRAWINGS}
    assert drawn_again(tmp_path) | joined == set(PUBLISHED)
