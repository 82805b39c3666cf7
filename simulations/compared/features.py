"""Public features for a linear model: `python -m compared.features mnist ../../shared/data`, in simulations/.

MNIST: means of 2 by 2 pixels. CIFAR-10, from a file of JPEG images: answers of random filters. Nothing is fitted to an
image. `runs/NAME.npz` has the test images, and `runs/NAME-held-out.npz` the last 10,000 training images in their place,
to choose learning rates on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
from cancelling.cifar_features import HELD_OUT, NORM, features, images

FILTERS = 64
Sets = list[tuple[np.ndarray, np.ndarray]]  # of training and test: features [N, d] of norm NORM, classes [N]


def mnist(root: str) -> Sets:
    """Return the means of 2 by 2 pixels of MNIST in torchvision's layout."""

    def pooled(pixels: torch.Tensor) -> np.ndarray:
        # In whole numbers, so that every machine computes the same bits, and with them the same keys.
        sums = pixels.numpy().astype(np.int64).reshape(len(pixels), 14, 2, 14, 2).sum((2, 4)).reshape(len(pixels), -1)
        centred = sums.shape[1] * sums - sums.sum(1, keepdims=True)
        return (NORM * centred / np.sqrt((centred**2).sum(1, keepdims=True))).astype(np.float32)

    parts = [torchvision.datasets.MNIST(root, train=train) for train in (True, False)]
    return [(pooled(part.data), part.targets.numpy()) for part in parts]


def cifar(file: str) -> Sets:
    """Return the answers of random filters to CIFAR-10's images."""
    data = dict(np.load(file))
    return [(features(images(data, part), FILTERS), data[f"{part}_label"]) for part in ("train", "test")]


if __name__ == "__main__":
    name, source = sys.argv[1:]
    (x, y), (x_test, y_test) = {"mnist": mnist, "cifar": cifar}[name](source)
    Path("runs").mkdir(exist_ok=True)
    np.savez(f"runs/{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    rest = slice(None, -HELD_OUT)
    held_out = slice(-HELD_OUT, None)
    np.savez(f"runs/{name}-held-out.npz", x_train=x[rest], y_train=y[rest], x_test=x[held_out], y_test=y[held_out])
