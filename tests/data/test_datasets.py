"""Datasets: every loader on files of its real format, subsets and one-line errors."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SHARED
from raising import raises
from whole_dataset import load_dataset

from flower_privdec.common.catalogue import DATASETS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.datasets import open_dataset
from flower_privdec.data.pixels import CIFAR10_PIXELS, FASHION_PIXELS, MNIST_PIXELS
from flower_privdec.data.sets.bundled_sets import _sklearn_table, nucleus_features
from flower_privdec.scenario.sections import DataSection


def refused(*needles: str, root: Any = None, name: str = "npz", **options: Any) -> None:
    """Check that loading fails with one line that holds all needles."""
    with pytest.raises(ScenarioError) as caught:
        load_dataset(name, None if root is None else str(root), **options)
    text = str(caught.value)
    assert "\n" not in text
    for needle in needles:
        assert needle in text, f"{needle!r} is not in {text!r}"


# --- embedded


def test_digits_are_all_there_once_and_in_range() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    assert data.x_train.shape == (1440, 1, 8, 8)
    assert data.x_test.shape == (357, 1, 8, 8)
    assert data.input_shape == (1, 8, 8)
    assert (data.x_train.dtype, data.y_train.dtype, data.n_classes) == (torch.float32, torch.int64, 10)
    assert data.x_train.min() == 0
    assert data.x_train.max() == 1
    ours = np.c_[
        torch.cat([data.x_train, data.x_test]).flatten(1).numpy() * 16,
        torch.cat([data.y_train, data.y_test]).numpy(),
    ]
    bunch = load_digits()
    theirs = np.c_[bunch.data, bunch.target]
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_embedded_split_is_the_same_for_every_seed() -> None:
    assert torch.equal(load_dataset("digits", seed=1).x_train, load_dataset("digits", seed=2).x_train)


def test_breast_cancer_is_learnable_after_a_per_example_transform() -> None:
    from sklearn.datasets import load_breast_cancer
    from sklearn.linear_model import LogisticRegression

    data = load_dataset("breast-cancer")
    assert data.x_train.shape == (448, 30)
    assert data.x_test.shape == (121, 30)
    assert data.n_classes == 2
    raw = load_breast_cancer().data
    np.testing.assert_array_equal(nucleus_features(raw[7:8])[0], nucleus_features(raw)[7])
    model = LogisticRegression(max_iter=3000).fit(data.x_train.numpy(), data.y_train.numpy())
    assert model.score(data.x_test.numpy(), data.y_test.numpy()) >= 0.93


# --- torchvision's formats


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def idx_folder(root: Path, kind: str = "MNIST", n_train: int = 12, n_test: int = 5) -> dict[str, np.ndarray]:
    folder, rng, made = root / kind / "raw", np.random.default_rng(3), {}
    folder.mkdir(parents=True)
    for part, n in (("train", n_train), ("t10k", n_test)):
        made[f"{part}-images"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        made[f"{part}-labels"] = np.arange(n, dtype=np.uint8) % 10
        write_idx(folder / f"{part}-images-idx3-ubyte", made[f"{part}-images"])
        write_idx(folder / f"{part}-labels-idx1-ubyte", made[f"{part}-labels"])
    return made


@pytest.mark.parametrize(
    ("name", "kind", "constants"),
    [("mnist", "MNIST", MNIST_PIXELS), ("fashion-mnist", "FashionMNIST", FASHION_PIXELS)],
)
def test_idx_files(tmp_path: Path, name: str, kind: str, constants: Any) -> None:
    made = idx_folder(tmp_path, kind)
    data = load_dataset(name, str(tmp_path))
    for part, x, y in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
        expected = (made[f"{part}-images"] / 255.0 - constants[0][0]) / constants[1][0]
        np.testing.assert_allclose(x[:, 0].numpy(), expected, atol=1e-6)
        np.testing.assert_array_equal(y.numpy(), made[f"{part}-labels"])
    assert data.input_shape == (1, 28, 28)
    assert data.n_classes == 10


def test_a_missing_mnist_root_names_path_and_remedy(tmp_path: Path) -> None:
    refused("data.root is missing", "digits", name="mnist")
    refused(str(tmp_path), "MNIST/raw/train-images-idx3-ubyte", "digits", root=tmp_path, name="mnist")
    idx_folder(tmp_path)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    refused("t10k-labels-idx1-ubyte", root=tmp_path, name="mnist")


def cut_images(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_label(folder: Path) -> None:
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(11))


def label_ten(folder: Path) -> None:
    write_idx(folder / "train-labels-idx1-ubyte", np.full(12, 10))


def wrong_magic(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte").write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize("harm", [cut_images, lose_a_label, label_ten, wrong_magic])
def test_damaged_idx_files_are_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    idx_folder(tmp_path)
    harm(tmp_path / "MNIST/raw")
    refused(str(tmp_path), "MNIST", root=tmp_path, name="mnist")


def cifar_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Write tiny batches in CIFAR-10's pickled format and tell torchvision their checksums."""
    from torchvision.datasets import CIFAR10

    folder, rng, made = root / "cifar-10-batches-py", np.random.default_rng(4), {}
    folder.mkdir()

    def dump(file: str, content: dict[str, Any]) -> str:
        raw = pickle.dumps(content)
        (folder / file).write_bytes(raw)
        return hashlib.md5(raw, usedforsecurity=False).hexdigest()

    sums = []
    for file, _ in CIFAR10.train_list + CIFAR10.test_list:
        made[file] = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
        sums.append([file, dump(file, {"data": made[file], "labels": [1, 9, 0]})])
    meta = dump("batches.meta", {"label_names": [str(label) for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(CIFAR10, "test_list", sums[5:])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta})
    return made


@pytest.mark.slow
def test_cifar10_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cifar_folder(tmp_path, monkeypatch)
    data = load_dataset("cifar10", str(tmp_path))
    assert data.x_train.shape == (15, 3, 32, 32)
    assert data.x_train.is_contiguous()
    mean, std = (np.array(part).reshape(3, 1, 1) for part in CIFAR10_PIXELS)
    expected = (made["data_batch_2"].reshape(3, 3, 32, 32) / 255.0 - mean) / std
    np.testing.assert_allclose(data.x_train[3:6].numpy(), expected, atol=1e-6)
    expected = (made["test_batch"].reshape(3, 3, 32, 32) / 255.0 - mean) / std
    np.testing.assert_allclose(data.x_test.numpy(), expected, atol=1e-6)
    assert data.y_train.tolist() == [1, 9, 0] * 5


def test_cifar10_of_another_checksum_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        cifar_folder(tmp_path, patch)
    refused(str(tmp_path), "damaged", root=tmp_path, name="cifar10")


def test_real_mnist() -> None:
    if not (SHARED / "MNIST/raw/train-images-idx3-ubyte").is_file():
        pytest.skip(f"REAL MNIST NOT TESTED: {SHARED}/MNIST/raw is not there")
    data = load_dataset("mnist", str(SHARED), samples=2000, seed=1)
    full_test = torch.bincount(data.y_test, minlength=10).tolist()
    assert full_test == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.x_train.shape == (2000, 1, 28, 28)
    assert abs(float(data.x_train.mean())) < 0.05  # the published constants standardise it


# --- .npz


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    made: dict[str, Any] = {
        "x_train": rng.normal(size=(6, 4)),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.normal(size=(3, 4)),
        "y_test": np.array([2, 1, 0]),
    }
    made.update(changes)
    return {key: value for key, value in made.items() if value is not None}


def npz(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, **content)
    return path


def test_npz_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    content = arrays()
    data = load_dataset("npz", str(npz(tmp_path, content)))
    np.testing.assert_array_equal(data.x_train.numpy(), content["x_train"].astype(np.float32))
    np.testing.assert_array_equal(data.y_test.numpy(), content["y_test"])
    assert (data.n_classes, data.x_train.dtype, data.y_test.dtype) == (3, torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_npz_labels_minus_and_plus_one(tmp_path: Path, dtype: Any) -> None:
    signs = np.array([-1, 1, 1, -1, 1, 1], dtype=dtype)
    data = load_dataset("npz", str(npz(tmp_path, arrays(y_train=signs, y_test=np.ones(3, dtype)))))
    assert data.y_train.tolist() == [0, 1, 1, 0, 1, 1]
    assert data.y_test.tolist() == [1, 1, 1]
    assert data.n_classes == 2


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 3), (5, 6, 1)])
def test_npz_8_bit_images_are_scaled(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(6).integers(0, 256, (6, *shape), dtype=np.uint8)
    data = load_dataset("npz", str(npz(tmp_path, arrays(x_train=images, x_test=images[:3]))))
    chw = images[:, None] if len(shape) == 2 else images.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.x_train.numpy(), (chw / 255.0 - 0.5) / 0.25, atol=1e-6)


WRONG = [
    (arrays(x_test=None, y_test=None), ["lacks x_test, y_test"]),
    (arrays(x_train=np.full((6, 4), np.nan)), ["x_train", "NaN"]),
    (arrays(x_train=np.full((6, 4), 1e300)), ["x_train", "infinity"]),
    (arrays(x_train=np.zeros((5, 4))), ["5 rows for 6 labels"]),
    (arrays(x_train=np.zeros(6)), ["x_train", "[examples, features...]"]),
    (arrays(x_train=np.array([["a"] * 4] * 6)), ["x_train", "<U1"]),
    (arrays(x_train=np.zeros((6, 4), complex)), ["x_train", "complex128"]),
    (arrays(x_test=np.zeros((3, 5))), ["[4]", "[5]"]),
    (arrays(x_train=np.array([[{}] * 4] * 6)), ["x_train", "numpy.savez"]),
    (arrays(y_train=np.array([0.5, 1, 2, 0, 1, 2])), ["y_train", "whole numbers"]),
    (arrays(y_train=np.array([0, np.nan, 2, 0, 1, 2])), ["y_train", "whole numbers"]),
    (arrays(y_train=np.array([0, np.inf, 2, 0, 1, 2])), ["y_train"]),
    (arrays(y_train=np.eye(6)), ["y_train", "[6, 6]"]),
    (arrays(y_train=np.array([-2, 1, 2, 0, 1, 2])), ["-2", "0..C-1"]),
    (arrays(y_train=np.array([-1, 1, 2, 0, 1, 2])), ["-1, 0, 1, 2"]),
    (arrays(y_train=np.array([4, 1, 2, 0, 1, 2])), ["training set", "label 4", "3 classes", "data.classes"]),
    (arrays(y_test=np.array([0, 1, 3])), ["test set", "0, 1, 3", "none missing", "data.classes"]),
    (arrays(y_train=np.zeros(6), y_test=np.zeros(3)), ["C >= 2"]),
    (arrays(x_train=np.zeros((0, 4)), y_train=np.zeros(0)), ["y_train", "no examples"]),
]


@pytest.mark.parametrize(("content", "needles"), WRONG, ids=[str(needles) for _, needles in WRONG])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_npz_that_is_wrong(tmp_path: Path, content: dict[str, Any], needles: list[str]) -> None:
    refused("data.npz", *needles, root=npz(tmp_path, content))


def test_npz_that_is_no_npz(tmp_path: Path) -> None:
    refused("data.root=None", "x_train")
    refused("is not a file", root=tmp_path / "absent.npz")
    refused("is not a file", root=tmp_path)
    path = tmp_path / "data.npz"
    path.write_text("x,y\n1,2\n")
    refused("cannot be read as .npz", root=path)
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    path.write_bytes(buffer.getvalue())
    refused("single array", root=path)
    whole = npz(tmp_path, arrays()).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read as .npz", root=path)


def jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def jpeg_arrays(sizes: tuple[int, ...] = (8, 8, 8)) -> tuple[dict[str, Any], list[bytes]]:
    rng = np.random.default_rng(7)
    files = [jpeg(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for size in sizes]
    stream = np.frombuffer(b"".join(files), np.uint8)
    offset = np.cumsum([0] + [len(file) for file in files])
    labels = np.arange(len(files), dtype=np.uint8)
    made = {}
    for part in ("train", "test"):
        made.update({f"{part}_jpeg": stream, f"{part}_offset": offset, f"{part}_label": labels})
    return made, files


def test_npz_of_jpeg_images(tmp_path: Path) -> None:
    from PIL import Image

    content, files = jpeg_arrays()
    data = load_dataset("npz", str(npz(tmp_path, content)))
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    expected = (decoded.transpose(0, 3, 1, 2) / 255.0 - 0.5) / 0.25
    np.testing.assert_allclose(data.x_train.numpy(), expected, atol=1e-6)
    assert data.y_train.tolist() == [0, 1, 2]
    part = load_dataset("npz", str(npz(tmp_path, content)), samples=2, seed=1)
    np.testing.assert_allclose(part.x_train.numpy(), expected[part.y_train.numpy()], atol=1e-6)


def test_npz_of_jpeg_images_that_is_wrong(tmp_path: Path) -> None:
    content, _ = jpeg_arrays((8, 8, 9))
    refused("test_jpeg: image 2", "9 x 9", root=npz(tmp_path, content))
    content, _ = jpeg_arrays()
    refused("lacks test_label", root=npz(tmp_path, {k: v for k, v in content.items() if k != "test_label"}))
    shifted = content["train_offset"] + np.array([0, 7, 0, 0])
    refused("train_jpeg: image 1", "cannot be read as JPEG", root=npz(tmp_path, {**content, "train_offset": shifted}))
    far = content["train_offset"] + np.array([0, 0, 0, 1])
    refused("train_offset", "must increase", root=npz(tmp_path, {**content, "train_offset": far}))
    refused("4 offsets", "2 labels", root=npz(tmp_path, {**content, "train_label": np.arange(2)}))


def test_shared_cifar10_jpeg() -> None:
    path = SHARED / "cifar10_jpeg.npz"
    if not path.is_file():
        pytest.skip(f"REAL JPEG FILE NOT TESTED: {path} is not there")
    data = load_dataset("npz", str(path), samples=300, test_samples=50, seed=1)
    assert data.x_train.shape == (300, 3, 32, 32)
    assert data.x_test.shape == (50, 3, 32, 32)
    assert data.n_classes == 10
    assert 0.5 < float(data.x_train.std()) < 1.5


# --- subsets, names


def test_samples_are_a_keyed_subset() -> None:
    whole = load_dataset("digits")
    some, again, other = (
        load_dataset("digits", samples=100, seed=seed, test_samples=tests)
        for seed, tests in ((1, None), (1, 10), (2, None))
    )
    assert len(some.x_train) == 100
    assert torch.equal(some.x_train, again.x_train)  # the test set has no part in it
    assert not torch.equal(some.x_train, other.x_train)
    assert (len(again.x_test), len(some.x_test)) == (10, 357)
    pairs = {(x.numpy().tobytes(), int(y)) for x, y in zip(whole.x_train, whole.y_train, strict=True)}
    assert {(x.numpy().tobytes(), int(y)) for x, y in zip(some.x_train, some.y_train, strict=True)} <= pairs
    assert torch.equal(load_dataset("digits", samples=1440, seed=5).x_train, whole.x_train)


@pytest.mark.parametrize(("key", "value"), [("samples", 0), ("samples", 1441), ("test_samples", 358)])
def test_samples_out_of_range(key: str, value: int) -> None:
    refused(f"data.{key}={value}", "must be 1 to", name="digits", **{key: value})


def test_unknown_dataset_names_the_nearest() -> None:
    refused("data.dataset='mnst'", "did you mean 'mnist'?", name="mnst")
    refused("data.dataset='zzz'", *DATASETS, name="zzz")


def test_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    _sklearn_table.cache_clear()
    refused("sklearn", "pip install scikit-learn", name="digits")


OWN_CLASSES = """\
import numpy as np
from flower_privdec.data.dataset import Dataset, embedded

class Coins(Dataset):
    name = "coins"
    line = "coins"

    def read(self, request):
        return embedded(np.zeros((20, 2)), np.arange(20) % 2, 10, "coins")
"""


def test_a_users_own_set_must_have_the_losss_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_coins.py").write_text(OWN_CLASSES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    section = DataSection.model_validate({"dataset": {"module": "own_coins:Coins"}, "batch": {"size": 2}})
    assert open_dataset(section, None, "classes").targets == "classes"
    with raises(ScenarioError, "data.targets", "set task.loss"):
        open_dataset(section, None, "numbers")
