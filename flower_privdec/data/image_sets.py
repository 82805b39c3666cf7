"""MNIST, Fashion-MNIST and CIFAR-10 as torchvision unpacks them: nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import tried
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import require
from flower_privdec.data.arrays import class_labels
from flower_privdec.data.dataset import Request, Source, Split
from flower_privdec.data.pixels import (
    CIFAR10_PIXELS,
    FASHION_PIXELS,
    MNIST_PIXELS,
    Constants,
    channels_first,
    scale_pixels,
)

HalfReader = Callable[[Path, bool], tuple[np.ndarray, np.ndarray]]  # (folder, train) -> images, labels

# The first four bytes of an idx file, by the number of axes of its array: 0, 0, 8 for bytes, and that number.
_IDX_HEADER = {1: 0x801, 3: 0x803}

_IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")


def _read_idx_half(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    names = _IDX_TRAIN if train else _IDX_TEST
    images = _read_idx(folder / names[0], 3)
    labels = _read_idx(folder / names[1], 1)
    return images, labels


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file of bytes: the header, the size of each axis in four bytes, and the bytes."""
    with path.open("rb") as file:
        magic, *shape = np.fromfile(file, ">u4", 1 + axes).tolist() or [0]
        size = path.stat().st_size - file.tell()
        if magic != _IDX_HEADER[axes] or len(shape) != axes or math.prod(shape) != size:
            raise ValueError(f"{path.name} is not a whole idx file of {axes} axes of bytes")
        return np.fromfile(file, np.uint8).reshape(shape)


def _read_cifar10_half(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read half of CIFAR-10 by torchvision, which compares checksums before it unpickles."""
    datasets = require("torchvision.datasets", "data.dataset=CIFAR10", "pip install 'flower-privdec[images]'")
    data = datasets.CIFAR10(folder.parent, train=train, download=False)
    return data.data, np.asarray(data.targets)


# By torchvision's name: the folder under the root, the files in it, the constants of the pixels, and the reader.
IMAGE_SETS: dict[str, tuple[str, tuple[str, ...], Constants, HalfReader]] = {
    "MNIST": ("MNIST/raw", _IDX_TRAIN + _IDX_TEST, MNIST_PIXELS, _read_idx_half),  # [1, 28, 28]
    "FashionMNIST": ("FashionMNIST/raw", _IDX_TRAIN + _IDX_TEST, FASHION_PIXELS, _read_idx_half),  # [1, 28, 28]
    "CIFAR10": ("cifar-10-batches-py", _CIFAR, CIFAR10_PIXELS, _read_cifar10_half),  # [3, 32, 32]
}


def read_images(kind: str, request: Request) -> Source:
    """Return one of IMAGE_SETS under the root: images [C, H, W] of ten classes."""
    return Source(partial(_read_half, kind, request, True), partial(_read_half, kind, request, False), 10)


def _read_half(kind: str, request: Request, train: bool) -> Split:
    folder, files, constants, read = IMAGE_SETS[kind]
    key = request.key
    root = request.root
    if root is None:
        raise ScenarioError(
            f"{key} is missing: {kind} is read from ROOT/{folder}; give that root, or use digits", code="data.no-root"
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
    # What torchvision and a pickle of CIFAR-10 raise for a damaged file.
    except (RuntimeError, OSError, ValueError, AssertionError, KeyError, IndexError, EOFError) as error:
        raise ScenarioError(f"{where}: {one_line(error)}; unpack it afresh") from error

    labels = class_labels(targets, f"{where}: its labels")
    if len(labels) != len(data) or labels.max() > 9:
        raise ScenarioError(
            f"{where}: {len(data)} images, {len(labels)} labels up to {labels.max()}, and it must have one label of "
            "0..9 for each; unpack it afresh"
        )

    images = channels_first(torch.from_numpy(data))
    return Split(labels, lambda rows: scale_pixels(images[rows], constants))
