"""Read the formats that datasets come in: targets first, features only of the requested rows.

No statistic of a private example is computed here: features are scaled by constants that were public before
the data was opened, so that reading costs no privacy. A user's own files and functions may be hostile.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import importlib.util
import io
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy
import torch
from numpy.lib import format as npy
from torch import Tensor

from flower_privdec.common.catalogue import TARGETS, Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.files import tried
from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import is_given, load_own, require, users_code
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import LARGEST_INDEX, Features, SparseRows
from flower_privdec.scenario.sections import DataSection

Rows = np.ndarray | slice
Constants = tuple[tuple[float, ...], tuple[float, ...]]
HalfReader = Callable[[Path, bool], tuple[np.ndarray, np.ndarray]]  # (folder, train) -> images, labels

# Constants published with each benchmark (mean and deviation of its pixels in [0, 1]), never recomputed.
MNIST_PIXELS = ((0.1307,), (0.3081,))
FASHION_PIXELS = ((0.2860,), (0.3530,))
CIFAR10_PIXELS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# Any other 8-bit image: mid-grey is 0, black is -2, white is 2.
PLAIN_PIXELS = ((0.5,), (0.25,))

# The decade of each measure of a cell nucleus, in pixels or as a ratio: radius, texture, perimeter, area,
# smoothness, compactness, concavity, concave points, symmetry, fractal dimension; standard errors a decade
# lower.
NUCLEUS_DECADES = (10.0, 10.0, 100.0, 1000.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
# A usual age, sex (1 or 2), body mass index, blood pressure and six blood values, and a step of each.
PATIENT_MIDDLE = (50.0, 1.5, 25.0, 100.0, 200.0, 100.0, 50.0, 4.0, 4.5, 90.0)
PATIENT_STEPS = (10.0, 0.5, 5.0, 10.0, 50.0, 50.0, 10.0, 1.0, 0.5, 10.0)
DIGITS_TRAIN, BREAST_CANCER_TRAIN = 1440, 448  # 8 peers of 180, and of 56
DIABETES_TRAIN, SYNTHETIC_TRAIN = 352, 2000  # 8 peers of 44, and of 250
SPLIT_SEED = 1797  # of the embedded datasets' train/test split: the same in every scenario


@dataclass(frozen=True)
class Split:
    """Half a dataset: its targets (int64, or float32 [N, k]), and a way to read some rows (float32, or tokens)."""

    labels: np.ndarray
    read: Callable[[Rows], Features]


@dataclass(frozen=True)
class Source:
    """A dataset whose halves are read lazily: a process that needs only the public test set reads no more.

    Attributes:
        train, test: read a half.
        n_classes: where the format determines it; None where the test set's labels do.
        targets: the kind of an example's target.
        n_tokens: examples are whole numbers 0..n_tokens-1; None where they are real numbers.
    """

    train: Callable[[], Split]
    test: Callable[[], Split]
    n_classes: int | None = None
    targets: Targets = "classes"
    n_tokens: int | None = None


@dataclass(frozen=True)
class Request:
    """A dataset to be read.

    Attributes:
        section: the scenario's, which names it.
        root: where it lies; None where nothing says so.
        targets: the kind of target that the task takes.
        key: of the scenario, that gives the root.
    """

    section: DataSection
    root: str | None
    targets: Targets = "classes"
    key: str = "data.root"

    @property
    def where(self) -> str:
        """Return the key and the root, by which errors begin."""
        return f"{self.key}={self.root}"

    @property
    def n_tokens(self) -> int | None:
        """Return how many tokens there are; None where examples are real numbers."""
        return self.section.vocabulary

    def path(self, needs: str = "the path of one; give it", *, folder: bool = False) -> str:
        """Return the path of the dataset's file or folder; raises ScenarioError where it is none."""
        if self.root is None or not (Path(self.root).is_dir() if folder else Path(self.root).is_file()):
            kind, code = ("folder", "data.no-root") if folder else ("file", "data.no-file")
            path = self.root and tried(self.root)
            dataset = self.section.dataset
            raise ScenarioError(f"{self.key}={path} is no {kind}: dataset {dataset} needs {needs}", code=code)
        return self.root


class Dataset:
    """A dataset that a scenario can name: a class with its name and its line, which reads it.

    It takes part as a built-in if its file lies in `flower_privdec/data/sets`, and as a user's own by its module.

    Attributes:
        name: what a scenario calls it.
        line: what `privdec list` says of it.
        own_files: whether it is a format of a user's own files, which a ledger counts under data.source.
        reads_files: whether it lies at data.root.
        needs: keys of the section data that belong to it, and that it needs.
        takes: keys of the section data that belong to it, and that it may have.
    """

    name: str = ""
    line: str = ""
    own_files: bool = False
    reads_files: bool = True
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def read(self, request: Request) -> Source:
        """Return the dataset, whose halves are read when they are asked for."""
        raise NotImplementedError


def scale_pixels(images: Tensor, constants: Constants) -> Tensor:
    """Convert 8-bit images [N, C, H, W] to (v / 255 - mean) / std in one float32 tensor."""
    mean, std = (torch.tensor(part).view(-1, 1, 1) * 255 for part in constants)
    x = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return x.sub_(mean).div_(std)


def embedded(
    x: np.ndarray | SparseRows,
    labels: np.ndarray,
    n_train: int,
    name: str,
    targets: Targets = "classes",
    n_tokens: int | None = None,
) -> Source:
    """Split an embedded dataset by one fixed permutation."""
    order = keyed_generator(SPLIT_SEED, f"split {name}").permutation(len(labels))
    if isinstance(x, SparseRows):
        features: Features = x
    else:
        features = torch.from_numpy(x.astype(np.float32 if n_tokens is None else np.int64))
    labels = labels.astype(np.int64 if targets == "classes" else np.float32)

    def split(rows: np.ndarray) -> Split:
        part = features[torch.from_numpy(rows)]
        return Split(labels[rows], lambda chosen: part[chosen])

    n_classes = int(labels.max()) + 1 if targets == "classes" else None
    return Source(lambda: split(order[:n_train]), lambda: split(order[n_train:]), n_classes, targets, n_tokens)


def read_digits() -> Source:
    """Read scikit-learn's 1,797 digits: [1, 8, 8], counts of 0 to 16 scaled to [0, 1]."""
    table = _sklearn_table("digits", "digits.csv.gz", delimiter=",")
    return embedded(table[:, :-1].reshape(-1, 1, 8, 8) / 16.0, table[:, -1], DIGITS_TRAIN, "digits")


def nucleus_features(x: np.ndarray) -> np.ndarray:
    """Transform the 30 measures of breast-cancer: log2(0.1 + x / decade), the doublings from a round number.

    Each value depends on its own example and on NUCLEUS_DECADES only. Standardising by the training set's
    mean and deviation would publish both: a release that no ledger counts.
    """
    decades = np.array(NUCLEUS_DECADES)
    return np.asarray(np.log2(0.1 + x / np.concatenate([decades, decades / 10, decades])))


def read_breast_cancer() -> Source:
    """Read scikit-learn's 569 tumours: [30] by `nucleus_features`."""
    table = _sklearn_table("breast-cancer", "breast_cancer.csv", delimiter=",", skiprows=1)
    return embedded(nucleus_features(table[:, :-1]), table[:, -1], BREAST_CANCER_TRAIN, "breast-cancer")


def read_diabetes() -> Source:
    """Read scikit-learn's 442 patients: [10] and how far the disease went in a year, by constants known before."""
    data, target = (_sklearn_table("diabetes", f"diabetes_{part}.csv.gz") for part in ("data_raw", "target"))
    x = (data - np.array(PATIENT_MIDDLE)) / np.array(PATIENT_STEPS)
    return embedded(x, (target[:, None] - 150) / 100, DIABETES_TRAIN, "diabetes", "numbers")


@lru_cache
def _sklearn_table(name: str, file: str, **options: Any) -> np.ndarray:
    """Read a table that comes with scikit-learn, which takes long to import and is not."""
    sklearn_spec = importlib.util.find_spec("sklearn")
    if sklearn_spec is None or sklearn_spec.origin is None:
        raise ScenarioError(f"data.dataset={name} needs sklearn, which is not installed: pip install scikit-learn")
    path = Path(sklearn_spec.origin).parent / "datasets" / "data" / file
    try:
        return np.loadtxt(path, **options)
    except (OSError, ValueError) as error:
        raise ScenarioError(
            f"data.dataset={name}: {path} of scikit-learn cannot be read ({one_line(error)}): install scikit-learn 1.4 "
            "or later"
        ) from error


_IDX_HEADER = {1: 0x801, 3: 0x803}  # of bytes, by the number of axes


def _read_idx_half(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (folder / name for name in (_IDX[:2] if train else _IDX[2:]))
    return _read_idx(images, 3), _read_idx(labels, 1)


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file of bytes: 0, 0, 8, the number of axes, their sizes in four bytes each, and the bytes."""
    with path.open("rb") as file:
        magic, *shape = np.fromfile(file, ">u4", 1 + axes).tolist() or [0]
        size = path.stat().st_size - file.tell()
        if magic != _IDX_HEADER[axes] or len(shape) != axes or math.prod(shape) != size:
            raise ValueError(f"{path.name} is no whole idx file of {axes} axes of bytes")
        return np.fromfile(file, np.uint8).reshape(shape)


def _read_cifar10_half(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read half of CIFAR-10, which torchvision unpickles, after its checksums."""
    datasets = require("torchvision.datasets", "data.dataset=CIFAR10", "pip install 'flower-privdec[images]'")
    data = datasets.CIFAR10(folder.parent, train=train, download=False)
    return data.data, np.asarray(data.targets)


_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
IMAGE_SETS: dict[str, tuple[str, tuple[str, ...], Constants, HalfReader]] = {
    "MNIST": ("MNIST/raw", _IDX, MNIST_PIXELS, _read_idx_half),  # [1, 28, 28]
    "FashionMNIST": ("FashionMNIST/raw", _IDX, FASHION_PIXELS, _read_idx_half),  # [1, 28, 28]
    "CIFAR10": ("cifar-10-batches-py", _CIFAR, CIFAR10_PIXELS, _read_cifar10_half),  # [3, 32, 32]
}


def read_images(kind: str, request: Request) -> Source:
    """Read one of IMAGE_SETS under the root, as torchvision unpacks it: images [C, H, W] of ten classes."""
    folder, files, constants, read = IMAGE_SETS[kind]
    key = request.key
    root = request.root

    def half(train: bool) -> Split:
        if root is None:
            raise ScenarioError(
                f"{key} is missing: {kind} is read from ROOT/{folder}; give that root, or use digits",
                code="data.no-root",
            )
        path = Path(root) / folder
        for file in files:
            if not (path / file).is_file():
                raise ScenarioError(
                    f"{key}={tried(root)} has no {folder}/{file}: it must be a folder with torchvision's unpacked "
                    f"{kind}; point it there, or use digits, which needs no file",
                    code="data.no-file",
                )
        where = f"{key}={path.parent} holds a damaged {kind}"
        try:
            data, targets = read(path, train)
        except (RuntimeError, OSError, ValueError, AssertionError, KeyError, IndexError, EOFError) as error:
            raise ScenarioError(f"{where}: {one_line(error)}; unpack it afresh") from error
        labels = class_labels(targets, f"{where}: its labels")
        if len(labels) != len(data) or labels.max() > 9:
            raise ScenarioError(
                f"{where}: {len(data)} images, {len(labels)} labels up to {labels.max()}, and it must have one label "
                "of 0..9 for each; unpack it afresh"
            )
        images = channels_first(torch.from_numpy(data))
        return Split(labels, lambda rows: scale_pixels(images[rows], constants))

    return Source(lambda: half(True), lambda: half(False), 10)


def channels_first(images: Tensor) -> Tensor:
    """View [N, H, W] or [N, H, W, C] images as [N, C, H, W]."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)


LABELS = 6
LABEL_FEATURES = 20
SPARSE_FEATURES, SPARSE_WORDS = 47_236, 75  # rcv1's, before repeats are joined
TOPICS = 4
WORDS = 200
LONGEST = 20
OWN_WORDS = 40


def draw_labels(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw examples that have any of six labels, each where a direction of the features leads far enough.

    Returns:
        Features, float32 [count, 20], and labels, float32 [count, 6], the first in half of the examples, the last in
        a tenth.
    """
    generator = keyed_generator(0, "synthetic labels")
    directions = generator.standard_normal((LABEL_FEATURES, LABELS)) / LABEL_FEATURES**0.5
    x = generator.standard_normal((count, LABEL_FEATURES))
    scores = x @ directions + 0.3 * generator.standard_normal((count, LABELS))
    return x.astype(np.float32), (scores > np.linspace(0, 1.3, LABELS)).astype(np.float32)


def draw_words(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw texts of 5 to 20 words about one of four topics; half of a text's words are its topic's own.

    Returns:
        Words 1..199, padded with 0, int64 [count, 20], and topics, int64 [count].
    """
    generator = keyed_generator(0, "synthetic words")
    topics = generator.integers(TOPICS, size=count)
    common = generator.integers(1, WORDS, (count, LONGEST))
    own = 1 + topics[:, None] * OWN_WORDS + generator.integers(OWN_WORDS, size=(count, LONGEST))
    words = np.where(generator.random((count, LONGEST)) < 0.5, own, common)
    lengths = generator.integers(5, LONGEST + 1, count)
    return np.where(np.arange(LONGEST) < lengths[:, None], words, 0), topics


def draw_sparse(count: int) -> tuple[SparseRows, np.ndarray]:
    """Draw texts as rcv1 has them: some 73 of 47,236 words each, by Zipf's law, and the side of a plane they are on.

    Every row has norm 1. So from μ = 1 on, the hinge with the l2 regularizer μ has its minimum where no margin has
    reached 1, at x* = Σ_b c_b y_b a_b / μ, with F(x*) = 1 - |Σ_b c_b y_b a_b|² / (2 μ), c_b an example's weight.

    Returns:
        Features, float32 [count, 47236] in compressed rows, and classes, int64 [count].
    """
    generator = keyed_generator(0, "synthetic sparse")
    lengths = 1 + generator.poisson(SPARSE_WORDS, count)
    words = np.minimum(np.exp(generator.random(lengths.sum()) * np.log(SPARSE_FEATURES)), SPARSE_FEATURES - 1)
    columns = generator.permutation(SPARSE_FEATURES)[words.astype(np.int64)]
    values = generator.random(lengths.sum()) + 0.1
    x = scipy.sparse.csr_matrix((values, columns, np.cumsum([0, *lengths])), shape=(count, SPARSE_FEATURES))
    x.sum_duplicates()
    x = scipy.sparse.diags(1 / np.sqrt(np.asarray(x.multiply(x).sum(1)).ravel())) @ x
    scores = x @ generator.standard_normal(SPARSE_FEATURES)
    return SparseRows(x.astype(np.float32).tocsr()), (scores > 0).astype(np.int64)


MOST_CLASSES = 10**9


def class_labels(labels: np.ndarray, name: str, minimum: int = 0) -> np.ndarray:
    """Return labels as int64 [N], refusing what is not a whole number of at least `minimum`."""
    right = labels.ndim == 1 and len(labels) > 0 and labels.dtype.kind in "buif"
    if not right or (labels.dtype.kind == "f" and not bool((labels == np.rint(labels)).all())):
        raise ScenarioError(
            f"{name} is {labels.dtype} {list(labels.shape)}: it must be whole numbers of shape [N]; for "
            "regression set task: {loss: mse}",
            code="data.labels",
        )
    if bool((np.abs(labels.astype(np.float64)) > MOST_CLASSES).any()):  # infinity, too
        raise ScenarioError(
            f"{name} holds {labels.max()}: a label must be less than {MOST_CLASSES:,}; renumber them",
            code="data.labels",
        )
    whole = labels.astype(np.int64)
    if whole.min() < minimum:
        raise ScenarioError(
            f"{name} holds {whole.min()}: labels are 0..C-1, or -1 and +1 for two classes", code="data.labels"
        )
    return whole


def binary_labels(labels: np.ndarray, where: str) -> np.ndarray:
    """Return labels with -1 and +1 as 0 and 1.

    Raises:
        ScenarioError: -1 stands beside something else than +1.
    """
    if labels.min() >= 0:
        return labels
    if not np.isin(labels, (-1, 1)).all():
        raise ScenarioError(
            f"{where}: it has labels {some(np.unique(labels))}: with -1 the only other label is +1; renumber",
            code="data.labels",
        )
    return (labels > 0).astype(np.int64)


def some(classes: np.ndarray) -> str:
    """List classes, a few of many."""
    listed = ", ".join(str(label) for label in classes[:8])
    return listed if len(classes) <= 8 else f"{listed}, ..."


def read_targets(y: np.ndarray, targets: Targets, name: str) -> np.ndarray:
    """Return targets as a task takes them: int64 [N] of classes, else float32 [N, k].

    Raises:
        ScenarioError: they are something else, with what they must be.
    """
    if targets == "classes":
        return class_labels(y, name, minimum=-1)
    wide = y[:, None] if y.ndim == 1 and targets == "numbers" else y
    if wide.ndim != 2 or 0 in wide.shape or y.dtype.kind not in "buif":
        raise ScenarioError(
            f"{name} is {y.dtype} {list(y.shape)} and the task's loss takes {targets}: {TARGETS[targets]}",
            code="data.targets",
        )
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(wide, dtype=np.float32)
    if targets == "labels" and not bool(np.isin(wide, (0, 1)).all()):
        raise ScenarioError(
            f"{name} holds other numbers than 0 and 1: {TARGETS['labels']}; mend the file", code="data.labels"
        )
    if not bool(np.isfinite(values).all()):
        raise ScenarioError(
            f"{name} holds NaN or infinity in float32: every target must be finite; mend the file",
            code="data.not-finite",
        )
    return values


_ARRAYS = ("x", "y")
_JPEG = ("jpeg", "offset", "label")


def read_npz(request: Request) -> Source:
    """Read an .npz file: x_train, y_train, x_test, y_test, or {train,test}_{jpeg,offset,label}; either half alone too.

    Targets and tokens are read as the request says. Otherwise 8-bit images ([N, H, W] or [N, H, W, C]) are scaled by
    PLAIN_PIXELS; every other array is taken as it is. Labels -1 and +1 become 0 and 1.
    JPEG images are a re-encoding: near their originals, not equal; report that with any result.
    """
    path = request.path("the path of an .npz with x_train, y_train, x_test and y_test")
    train, test = (partial(_read_half, path, part, request) for part in ("train", "test"))
    return Source(train, test, targets=request.targets, n_tokens=request.n_tokens)


def _read_half(path: str, part: str, request: Request) -> Split:
    where = request.where
    forms = [[f"{part}_{kind}" for kind in _JPEG], [f"{kind}_{part}" for kind in _ARRAYS]]
    arrays = read_members(path, forms, where)
    if f"{part}_jpeg" not in arrays:
        return from_arrays(arrays[f"x_{part}"], arrays[f"y_{part}"], part, where, request)
    if request.n_tokens is not None or request.targets != "classes":
        raise ScenarioError(f"{where} holds JPEG images with classes: they are no tokens, and need a loss of classes")
    stream = arrays[f"{part}_jpeg"]
    offset = arrays[f"{part}_offset"]
    labels = class_labels(arrays[f"{part}_label"], f"{where}: {part}_label", minimum=-1)
    right = stream.dtype == np.uint8 and stream.ndim == 1 and offset.dtype.kind in "ui" and offset.ndim == 1
    if not right or len(offset) != len(labels) + 1:
        raise ScenarioError(
            f"{where}: {part}_jpeg must be one row of bytes (uint8) with {len(labels) + 1} offsets for its "
            f"{len(labels)} labels: got {stream.dtype} {list(stream.shape)} and {len(offset)} offsets"
        )
    offset = offset.astype(np.int64)
    if offset[0] < 0 or offset[-1] > len(stream) or bool((np.diff(offset) <= 0).any()):
        raise ScenarioError(f"{where}: {part}_offset must increase from >= 0 to <= {len(stream)}: mend the file")

    def read(rows: Rows) -> Tensor:
        chosen = np.arange(len(labels))[rows].tolist()
        files = [stream[offset[row] : offset[row + 1]].tobytes() for row in chosen]
        names = [f"{where}: {part}_jpeg: image {row}" for row in chosen]
        return decode_images(list(map(io.BytesIO, files)), names, formats=["JPEG"])

    return Split(binary_labels(labels, where), read)


def from_arrays(
    x: np.ndarray, y: np.ndarray, part: str, where: str, request: Request, names: tuple[str, str] | None = None
) -> Split:
    """Return one half of a dataset from arrays in memory, read like those of an .npz file; `names` are for errors."""
    name, y_name = names or (f"{where}: x_{part}", f"{where}: y_{part}")
    labels = read_targets(y, request.targets, y_name)
    if x.dtype.kind not in "buif" or x.ndim < 2 or 0 in x.shape[1:]:
        raise ScenarioError(f"{name} is {x.dtype} {list(x.shape)}: it must be numbers, [examples, features...]")
    if len(x) != len(labels):
        raise ScenarioError(
            f"{name} has {len(x)} rows for {len(labels)} labels: there must be one for each", code="data.lengths"
        )
    if request.targets == "classes":
        labels = binary_labels(labels, where)
    if request.n_tokens is not None:
        most = request.n_tokens - 1
        if x.dtype.kind not in "ui":
            raise ScenarioError(
                f"{name} is {x.dtype}: with data.vocabulary it must be whole numbers 0..{most}", code="data.tokens"
            )
        if len(x) and (int(x.min()) < 0 or int(x.max()) > most):
            raise ScenarioError(
                f"{name} holds tokens from {x.min()} to {x.max()}: they must be 0..{most}; mend the file, or raise "
                "data.vocabulary",
                code="data.tokens",
            )
        tokens = torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))
        return Split(labels, lambda rows: tokens[rows])
    if x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3))):
        images = channels_first(torch.from_numpy(x))
        return Split(labels, lambda rows: scale_pixels(images[rows], PLAIN_PIXELS))
    return Split(labels, lambda rows: _finite(x[rows], name))


def _finite(x: np.ndarray, name: str) -> Tensor:
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ScenarioError(
            f"{name} holds NaN or infinity in float32: every feature must be finite; mend it", code="data.not-finite"
        )
    return tensor


_8_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "La", "RGBa")  # of Pillow


def decode_images(files: Sequence[Any], names: Sequence[str], formats: Sequence[str] | None = None) -> Tensor:
    """Decode images of one size to RGB [N, 3, height, width], scaled by PLAIN_PIXELS.

    Args:
        files: paths, or open files.
        names: of the images, in errors.
        formats: those that are read; by default all that Pillow knows.

    Raises:
        ScenarioError: one is no such image, of another size or of 16 bits, or several in one; or all together need
            more memory than is free.
    """
    pillow = require("PIL.Image", "a data set of images", "pip install 'flower-privdec[images]'")
    images = np.zeros((0, 1, 1, 3), np.uint8)
    for position, (file, name) in enumerate(zip(files, names, strict=True)):
        try:
            with pillow.open(file, formats=formats) as image:
                if getattr(image, "n_frames", 1) > 1 or image.mode not in _8_BITS:
                    kind = f"{image.n_frames} images in one" if getattr(image, "n_frames", 1) > 1 else image.mode
                    raise ScenarioError(
                        f"{name} is {kind} and must be one image of 8 bits a channel: convert it", code="data.image"
                    )
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            kind = " or ".join(formats or ["image"])
            raise ScenarioError(
                f"{name} is no {kind} ({type(error).__name__}); mend or remove it", code="data.image"
            ) from error
        if position == 0:
            check_room(2 * len(files) * pixels.nbytes, f"{len(files)} images like {name}", "give fewer or smaller ones")
            images = np.empty((len(files), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            (height, width), (tall, wide) = pixels.shape[:2], images.shape[1:3]
            raise ScenarioError(
                f"{name} is {height} x {width} pixels and those before it {tall} x {wide}: all must be alike; resize "
                "them",
                code="data.image",
            )
        images[position] = pixels
    return scale_pixels(channels_first(torch.from_numpy(images)), PLAIN_PIXELS)


_DAMAGED = (  # an encrypted or oddly compressed member is a RuntimeError
    *(OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, OverflowError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)


def read_members(path: str, forms: Sequence[Sequence[str]], where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, in the first of some forms that it begins to have; nothing is unpickled.

    Args:
        forms: the names of the arrays in each form; the last one is required where none fits.
        where: names the file in an error.

    Raises:
        ScenarioError: it is no such file, lacks an array, or an array in it is damaged or does not fit into memory.
    """
    arrays: dict[str, np.ndarray] = {}
    name = ""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            names = next((form for form in forms if form[0] in members), forms[-1])
            if missing := [name for name in names if name not in members]:
                raise ScenarioError(f"{where} lacks {', '.join(missing)}: it must hold {', '.join(names)}")
            size = sum(members[name].file_size for name in names)
            check_room(2 * size, f"{where}: what it unpacks to", "give a smaller file")
            for name in names:
                with archive.open(members[name]) as file:
                    arrays[name] = npy.read_array(file, allow_pickle=False)
            return arrays
    except ScenarioError:
        raise
    except _DAMAGED as error:
        with open(path, "rb") as file:
            reason = "a single array" if file.read(6) == npy.MAGIC_PREFIX else one_line(error)
        raise ScenarioError(
            f"{where} cannot be read as .npz ({name and f'{name}: '}{reason}): save the arrays again with numpy.savez"
        ) from error


def read_own(own: OwnSection, request: Request) -> Source:
    """Return a dataset of a user's own: of a function, or of a `Dataset`, which is made with the arguments.

    The function is called with a half, "train" or "test", and its arguments, with root where the request has one. It
    returns x and y, which are read like the arrays of an .npz file. A process that needs only the public test set
    requests that half alone.

    Raises:
        ScenarioError: the function cannot be imported. A half that is read: it fails, or returns something else.
    """
    part = load_own(own.module, "data.dataset.module")
    if isinstance(part, type) and issubclass(part, Dataset):
        with users_code(f"data.dataset.module={own.module!r} could not be read", "code.fails"):
            source: Source = part(**own.arguments).read(request)
        return source

    half = partial(_call_for_half, own, request)
    return Source(partial(half, "train"), partial(half, "test"), targets=request.targets, n_tokens=request.n_tokens)


def _call_for_half(own: OwnSection, request: Request, part: str) -> Split:
    target = own.module
    arguments = ({} if request.root is None else {"root": request.root}) | own.arguments
    where = "data.dataset" if is_given(target) else f"data.dataset.module={target!r}"
    with users_code(f"{where} fails on {part!r} with {arguments}", code="code.fails"):
        arrays = load_own(target, "data.dataset.module")(part, **arguments)
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ScenarioError(f"{where} must return x and y for {part!r}, a pair of arrays", code="data.no-pair")
    try:
        x, y = (np.asarray(half) for half in arrays)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors elsewhere
        raise ScenarioError(
            f"{where} returns for {part!r} what are no arrays: {one_line(error)}", code="data.no-arrays"
        ) from error
    names = (f"data.{part}: x", f"data.{part}: y") if is_given(target) else None
    return from_arrays(x, y, part, where, request, names)


LONGEST_LINE = 1 << 26  # bytes; an example of a million features has a third of it
LOOK_EVERY = 1 << 25  # bytes of text between two checks of free memory
MEMORY_FACTOR = (
    4  # times the bytes of text that reading them takes at most: "1:1 " is 4 bytes, and an index and a value 12
)
_OPENED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Lines:
    """The lines of a file as they are read, counted, so that an error can name its line."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self.file = file
        self.where = where
        self.number = 0
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        """Return bytes, as a file does: scikit-learn checks for this method."""
        return self.file.read(size)

    def __iter__(self) -> Iterator[bytes]:
        """Yield every line, of those that are not too long, while there is room for what they hold."""
        checked = 0
        while line := self.file.readline(LONGEST_LINE):
            self.number, self.size = self.number + 1, self.size + len(line)
            if len(line) == LONGEST_LINE:
                raise ScenarioError(
                    f"{self.where}:{self.number}: has more than {LONGEST_LINE:,} bytes; mend the file",
                    code="data.long-line",
                )
            if self.size - checked > LOOK_EVERY:
                checked = self.size
                rest = f"{self.where}: what follows line {self.number:,}"
                check_room(MEMORY_FACTOR * LOOK_EVERY, rest, "give a smaller file")
            yield line


def read_svmlight(request: Request) -> Source:
    """Read one svmlight file: the training set at `data.root`, or the test set at `data.test`; indices count from 1."""
    path = request.path()
    where = request.where
    features = request.section.n_features or 0

    def half() -> Split:
        if features > LARGEST_INDEX:
            message = f"data.n_features={features} must be <= {LARGEST_INDEX:,}; hash the features to fewer"
            raise ScenarioError(message, code="data.n-features")
        matrix, labels = _parsed(path, where, features)
        if request.targets != "classes":
            message = f"{where}: svmlight files have one label each, and the task's loss takes {request.targets}"
            raise ScenarioError(message, code="data.targets")
        y = binary_labels(class_labels(labels, f"{where}: the labels", minimum=-1), where)
        rows = SparseRows(matrix)
        return Split(y, lambda chosen: rows[chosen])

    return Source(half, half, targets=request.targets)


def _parsed(root: str, where: str, features: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Return the examples [N, features], with indices from 0, and their labels."""
    load = require("sklearn.datasets", "data.dataset=svmlight", "pip install scikit-learn").load_svmlight_file
    lines: Lines | None = None
    try:
        with _OPENED.get(Path(root).suffix, open)(root, "rb") as file:
            lines = Lines(file, where)
            matrix, labels = load(lines, dtype=np.float32, n_features=None, zero_based=True)
    except (ValueError, OverflowError, UnicodeError) as error:
        number = "" if lines is None else f":{lines.number}"
        raise ScenarioError(
            f"{where}{number}: is no example `label index:value ...` ({one_line(error)}); mend the line",
            code="data.line",
        ) from error
    except _UNREADABLE as error:
        raise ScenarioError(
            f"{where} cannot be read ({one_line(error)}); give it whole", code="data.unreadable"
        ) from error
    if not matrix.shape[0]:
        raise ScenarioError(f"{where} holds no example; give another file", code="data.empty")
    wrong = (matrix.indices < 1) | (matrix.indices > features) | ~np.isfinite(matrix.data)
    if wrong.any():
        place = int(np.argmax(wrong))
        row = int(np.searchsorted(matrix.indptr, place, side="right")) - 1
        entry = f"{matrix.indices[place]}:{matrix.data[place]:g}"
        raise ScenarioError(
            f"{where}:{_line_of(root, row)}: has {entry}: indices are 1 to data.n_features={features:,} and values "
            "finite in float32; mend the line",
            code="data.entry",
        )
    shape = (matrix.shape[0], features)
    return scipy.sparse.csr_matrix((matrix.data, matrix.indices - 1, matrix.indptr), shape=shape), labels


def _line_of(root: str, row: int) -> int:
    """Return the number of the line that holds an example, counting those without one."""
    with _OPENED.get(Path(root).suffix, open)(root, "rb") as file:
        for number, line in enumerate(file, start=1):
            row -= bool(line.split(b"#", 1)[0].strip())
            if row < 0:
                return number
    return 0
