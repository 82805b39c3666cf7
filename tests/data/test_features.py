"""Features: kymatio's numbers, one example at a time, kept on disk, and no change of what a ledger counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT, SHARED
from raising import raises
from torch import Tensor
from whole_dataset import Whole, load_dataset

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import cache_folder
from flower_privdec.data import features
from flower_privdec.data.feature_cache import cached
from flower_privdec.data.features import Extractor, apply_features, whitening
from flower_privdec.data.scattering import Scattering2D, n_paths
from flower_privdec.data.strokes import draw_strokes
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario, parse_scenario, to_yaml
from flower_privdec.scenario.sections import FeaturesSection

SMALL: dict[str, Any] = {"kind": "scattering", "scales": 1, "angles": 4, "groups": 5, "pool": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _own_extractor() -> Iterator[None]:
    features._extractor.cache_clear()
    yield
    features._extractor.cache_clear()


@pytest.fixture
def few_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whiten by few drawings, to be quick."""
    monkeypatch.setattr(features, "DRAWINGS", 60)


def section(**changes: Any) -> FeaturesSection:
    return FeaturesSection.model_validate(SMALL | changes)


def images(count: int, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> Tensor:
    return torch.rand((count, *shape), generator=torch.Generator().manual_seed(seed))


# --- the transform


@pytest.mark.parametrize(
    ("shape", "scales", "angles", "order"),
    [((28, 28), 2, 8, 2), ((8, 8), 2, 4, 2), ((17, 24), 3, 3, 2), ((9, 11), 1, 6, 2), ((28, 20), 2, 8, 1)],
)
def test_scattering_is_kymatios(shape: tuple[int, int], scales: int, angles: int, order: int) -> None:
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    x = images(5, shape)
    expected = ScatteringTorch2D(scales, shape, L=angles, max_order=order)(x)
    found = Scattering2D(shape, scales, angles, order)(x)
    assert found.shape[1] == n_paths(scales, angles, order)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def test_paths_of_the_published_setting() -> None:
    assert n_paths(scales=2, angles=8, order=2) == 81


# --- the extractor


@pytest.mark.usefixtures("few_drawings")
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12)])
@pytest.mark.parametrize("whiten", ["none", "strokes"])
def test_an_examples_features_depend_on_no_other(shape: tuple[int, ...], whiten: str) -> None:
    extract = Extractor(section(whitening=whiten if shape[0] == 1 else "none"), shape)
    x = images(40, shape)
    together = extract(x)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(extract(x[order]), together[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(extract(x[7:9]), together[7:9], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_drawings")
def test_features_have_the_requested_norm_and_number() -> None:
    z = Extractor(section(norm=3.0, whitening="strokes"), (1, 8, 8))(images(20))
    assert z.shape == (20, 5 * 2 * 2)
    assert z.dtype is torch.float32
    torch.testing.assert_close(z.norm(dim=1), torch.full((20,), 3.0))
    assert Extractor(section(), (3, 8, 8))(images(2, (3, 8, 8))).shape == (2, 3 * 5 * 2 * 2)


def test_features_ignore_brightness_and_contrast_but_not_the_image() -> None:
    extract, x = Extractor(section(), (1, 8, 8)), images(10)
    torch.testing.assert_close(extract(5 * x - 2), extract(x), rtol=1e-3, atol=1e-4)
    assert (extract(x.flip(2)) - extract(x)).norm(dim=1).min() > 0.1


def test_an_image_of_one_grey_has_finite_features() -> None:
    assert torch.isfinite(Extractor(section(), (1, 8, 8))(torch.full((2, 1, 8, 8), 0.3))).all()


def test_whitening_evens_out_the_variances_down_to_the_ridge() -> None:
    scales = torch.tensor([8.0, 4.0, 1.0, 0.01])
    z = torch.randn((4000, 4), generator=torch.Generator().manual_seed(2)) * scales + 3
    mean, matrix = whitening(z, ridge=0.01)
    after = torch.cov(((z - mean) @ matrix).T, correction=0)
    values = torch.linalg.eigvalsh(torch.cov(z.T, correction=0))
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(((z - mean) @ matrix).mean(0), torch.zeros(4), rtol=0, atol=1e-4)
    expected = values / (values / values[-1] + 0.01)
    torch.testing.assert_close(torch.linalg.eigvalsh(after), expected.sort().values, rtol=1e-3, atol=1e-5)


def test_drawings_are_centred_ink_and_reproducible() -> None:
    drawn = draw_strokes(12, (28, 28))
    assert drawn.dtype == np.float32
    assert (drawn.min(), drawn.max()) == (0, 1)
    np.testing.assert_array_equal(draw_strokes(5, (28, 28)), drawn[:5])
    mass = drawn.sum((1, 2))
    for axis in (1, 2):
        centre = (drawn.sum(axis) * np.arange(28)).sum(1) / mass
        assert np.abs(centre - 13.5).max() <= 0.5 + 1e-6
    assert len(np.unique(drawn.reshape(12, -1), axis=0)) == 12


# --- a dataset's features


def test_features_are_the_extractors() -> None:
    raw = images(30)
    made = apply_features(raw, section())
    assert made.shape == (30, 20)
    torch.testing.assert_close(made, Extractor(section(), (1, 8, 8))(raw))


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = images(30)
    whole = apply_features(raw, section())
    monkeypatch.setattr(features, "CHUNK", 7)
    monkeypatch.setattr(features, "VERSION", -1)
    torch.testing.assert_close(apply_features(raw, section()), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "shape", "words"),
    [
        ({}, (30,), ["images", "[30]", "remove"]),
        ({"scales": 3}, (1, 8, 8), ["features.scales=3", "more than 8 pixels"]),
        ({"pool": 5}, (1, 8, 8), ["features.pool=5", "<= 4"]),
        ({"groups": 2}, (1, 8, 8), ["features.groups=2", "5 channels", "1, 5", "or 0"]),
        ({"whitening": "strokes"}, (3, 8, 8), ["features.whitening=strokes", "not 3", "none"]),
    ],
)
def test_unfit_settings_are_refused_before_any_work(
    changes: dict[str, Any], shape: tuple[int, ...], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError) as caught:
        apply_features(images(4, shape), section(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "cache").exists()


# --- in a scenario


def test_a_scenario_trains_on_features(tiny: Callable[..., Scenario], build: Callable[..., Experiment]) -> None:
    setting = "features={kind: scattering, scales: 1, angles: 4, groups: 5, pool: 2}"
    experiment = build(setting)
    assert experiment.public.input_shape == (20,)
    assert experiment.initial.shape == (20 * 10 + 10,)
    assert experiment.public.name == build().public.name  # the same ledger pays
    scenario = tiny(setting)
    assert scenario.features == section()
    assert parse_scenario(to_yaml(scenario)) == scenario


def test_a_wrong_key_or_kind_is_explained(tiny: Callable[..., Scenario]) -> None:
    with raises(ScenarioError, "scenario.extra_forbidden", r"features\.angle'.*'angles'"):
        tiny("features={kind: scattering, angle: 4}")
    with raises(ScenarioError, "scenario.literal_error", "features.kind='wavelets'"):
        tiny("features={kind: wavelets}")


@pytest.mark.parametrize("name", ["mnist-scattering-eps1", "mnist-scattering-eps3"])
def test_scenarios_that_need_mnist_can_be_read(name: str) -> None:
    text = (ROOT / "scenarios" / f"{name}.yaml").read_text()
    scenario = parse_scenario(text)
    assert scenario.features is not None
    assert scenario.private is not None
    assert scenario.private.delta == 1e-5


def test_features_make_mnist_easy(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / "MNIST" / "raw").is_dir():
        pytest.skip(f"SKIPPED for want of data: {SHARED}/MNIST/raw has the images this test is about")
    monkeypatch.setattr(features, "DRAWINGS", 400)
    raw = load_dataset("mnist", str(SHARED), samples=600, test_samples=400)
    wanted = FeaturesSection(kind="scattering", whitening="strokes")
    train, test = (apply_features(x, wanted) for x in (raw.x_train, raw.x_test))
    made = replace(raw, x_train=train, x_test=test)
    assert train.shape == (600, 81 * 16)
    assert _nearest_mean(made) > 0.9 > 0.85 > _nearest_mean(raw)


def _nearest_mean(data: Whole) -> float:
    train, test = data.x_train.flatten(1), data.x_test.flatten(1)
    means = torch.stack([train[data.y_train == label].mean(0) for label in range(data.n_classes)])
    return float((torch.cdist(test, means).argmin(1) == data.y_test).double().mean())


# --- on disk


def keep(x: Tensor, result: Tensor | None, **recipe: Any) -> Tensor:
    """Ask for features that `result` is the outcome of; None: they must not be computed."""

    def compute() -> Tensor:
        assert result is not None, "computed, though they are kept"
        return result

    return cached(recipe, x, compute)


def kept_files() -> list[Path]:
    return sorted(path for path in (cache_folder() / "features").iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("what", ["cpu_model", "features_version"])
def test_another_machine_or_version_recomputes_features(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section = FeaturesSection(kind="scattering", scales=1, pool=2, groups=0)
    apply_features(images(6), section)
    before = len(kept_files())
    apply_features(images(6), section)
    assert len(kept_files()) == before
    monkeypatch.setattr(f"flower_privdec.data.features.{what}", lambda: "another")
    apply_features(images(6), section)
    assert len(kept_files()) == before + 1


def test_features_are_computed_once() -> None:
    x, result = images(6), torch.randn(6, 3)
    assert torch.equal(keep(x, result, norm=1.0), result)
    assert torch.equal(keep(x.clone(), None, norm=1.0), result)
    assert [path.suffix for path in kept_files()] == [".safetensors"]


@pytest.mark.parametrize("change", ["recipe", "example", "shape"])
def test_anything_else_is_computed_afresh(change: str) -> None:
    x, result = images(6), torch.randn(6, 3)
    keep(x, result, norm=1.0)
    other = {"example": x + torch.eye(6).reshape(6, 6, 1, 1)[:, :1], "shape": x.reshape(6, 64)}.get(change, x)
    assert torch.equal(keep(other, result + 1, norm=2.0 if change == "recipe" else 1.0), result + 1)
    assert len(kept_files()) == 2


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [_flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-8])],
    ids=["one bit", "empty", "cut short"],
)
def test_a_damaged_file_is_said_and_replaced(harm: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]) -> None:
    x, result = images(6), torch.randn(6, 3)
    keep(x, result)
    harm(kept_files()[0])
    assert torch.equal(keep(x, result), result)
    assert "damaged" in capsys.readouterr().err
    assert torch.equal(keep(x, None), result)


def test_a_file_under_anothers_name_is_not_believed(capsys: pytest.CaptureFixture[str]) -> None:
    x, result = images(6), torch.randn(6, 3)
    keep(x, result)
    keep(x + 1, result + 1)
    first, second = kept_files()
    first.write_bytes(second.read_bytes())
    second.unlink()
    assert torch.equal(keep(x, result), result)
    assert torch.equal(keep(x + 1, result + 1), result + 1)
    assert "damaged" in capsys.readouterr().err


def test_only_their_owner_may_read_features() -> None:
    keep(images(6), torch.randn(6, 3))
    assert kept_files()[0].stat().st_mode & 0o077 == 0
    assert (cache_folder() / "features").stat().st_mode & 0o077 == 0


def test_features_work_if_the_cache_is_not_writable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    x, result = images(6), torch.randn(6, 3)
    assert torch.equal(keep(x, result), result)
    assert "not cached" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing_and_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("flower_privdec.common.files.os.replace", full)
    x, result = images(6), torch.randn(6, 3)
    assert torch.equal(keep(x, result), result)
    assert kept_files() == []
    assert "No space left" in capsys.readouterr().err
