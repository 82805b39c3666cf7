"""The pictures of a run's folder: where their numbers stand, and that nothing is missing or cut off."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.reporting import curve_images
from flower_privdec.reporting.curve_images import CurveData, PixelScale, round_numbers, round_powers, save_curve_image

pytest.importorskip("matplotlib")
LINE = (0x00, 0x69, 0xA6)
NOTHING = np.full(5, math.nan)


def _data(**changes: object) -> CurveData:
    values = np.array([1.0, 3.0, 2.0, 4.0, 2.5])
    settings = {
        "title": "Test loss of the mean model",
        "note": "",
        "axis": "loss",
        "unit": "",
        "rounds": np.arange(10, 60, 10),
        "values": values,
        "low": NOTHING,
        "high": NOTHING,
    }
    return CurveData(**(settings | changes))  # type: ignore[arg-type]


def _drawn(data: CurveData, folder: Path) -> np.ndarray:
    """Draw a picture, and return its pixels [height, width, 3]."""
    from PIL import Image

    path = folder / "curve.png"
    save_curve_image(data, path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _columns_of_line(pixels: np.ndarray) -> np.ndarray:
    return np.flatnonzero((pixels == LINE).all(axis=2).any(axis=0))


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "numbers"),
    [
        (0.0, 100.0, 6, False, [0, 20, 40, 60, 80, 100]),
        (0.0, 0.3, 4, False, [0, 0.1, 0.2, 0.3]),
        (0.97, 1.03, 6, False, [0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03][1::2]),
        (0.5, 1.5, 7, True, [1]),
        (-3.0, 2.0, 6, True, [-3, -2, -1, 0, 1, 2]),
        (9.1, 100.9, 2, True, [50, 100]),
    ],
)
def test_numbers_of_an_axis_are_round_and_few(
    low: float, high: float, most: int, whole: bool, numbers: list[float]
) -> None:
    found = round_numbers(low, high, most, whole=whole)
    assert len(found) <= most
    np.testing.assert_allclose(found, numbers, atol=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (1.0, 3.0, [1, 1.5, 2, 2.5, 3]),
        (0.9, 11.0, [1, 2, 5, 10]),
        (1.0, 100.0, [1, 3, 10, 30, 100]),
        (1e-6, 1e3, [1e-6, 1e-4, 1e-2, 1, 100]),
    ],
)
def test_numbers_of_a_logarithmic_axis_are_powers(low: float, high: float, numbers: list[float]) -> None:
    np.testing.assert_allclose(round_powers(low, high), numbers)


def test_equal_factors_are_equally_far_on_a_logarithmic_axis() -> None:
    np.testing.assert_allclose(PixelScale(1, 100, 0, 200, log=True).pixels([1, 10, 100]), [0, 100, 200])
    np.testing.assert_allclose(PixelScale(1, 101, 200, 0).pixels([1, 51, 101]), [200, 100, 0])


LONG = {"title": "Test " + "m" * 90, "note": "n" * 120, "axis": "a" * 60, "unit": " %"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"log": True, "values": np.array([1e-3, 0.0, 1.0, 10.0, 1e4]), "low": np.zeros(5), "high": np.full(5, 1e5)},
        {"low": np.array([0.5, math.nan, 1.0, 1.0, 1.0]), "high": np.array([2.0, 4.0, math.inf, 5.0, 5.0])},
        {"values": np.full(5, 1_000_000.0), "from_zero": True},
        {"values": np.full(5, -2e-7)},
        LONG,
    ],
)
def test_a_curve_is_whole_within_its_edges(changes: dict[str, object], tmp_path: Path) -> None:
    pixels = _drawn(_data(**changes), tmp_path)
    edge = 4
    for margin in (pixels[:edge], pixels[-edge:], pixels[:, :edge], pixels[:, -edge:]):
        assert (margin == 255).all()
    columns = _columns_of_line(pixels)
    assert columns[-1] - columns[0] > 0.6 * pixels.shape[1]


def test_one_evaluation_is_a_dot(tmp_path: Path) -> None:
    one = {name: np.array([2.0]) for name in ("rounds", "values", "low", "high")}
    columns = _columns_of_line(_drawn(_data(**one), tmp_path))
    assert 3 < len(columns) < 15


def test_a_band_is_a_pale_colour_of_its_line(tmp_path: Path) -> None:
    values = _data().values
    pixels = _drawn(_data(low=values - 1, high=values + 1), tmp_path)
    pale = tuple(round(255 + curve_images.BAND * (part - 255)) for part in LINE)
    assert (pixels == pale).all(axis=2).mean() > 0.1


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    curve_images._font.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with raises(ScenarioError, "reporting.no-matplotlib"):
        save_curve_image(_data(), tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())
