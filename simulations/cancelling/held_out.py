"""MNIST without its test set, to choose learning rates on: the last 10,000 training images are the test set here."""

from __future__ import annotations

import torchvision

HELD_OUT = 10_000


def mnist(part: str, root: str):  # type: ignore[no-untyped-def]
    """Return images and classes: the first 50,000 training images for "train", the last 10,000 for "test"."""
    data = torchvision.datasets.MNIST(root, train=True)
    images, classes = data.data.numpy(), data.targets.numpy()
    chosen = slice(None, -HELD_OUT) if part == "train" else slice(-HELD_OUT, None)
    return images[chosen], classes[chosen]
