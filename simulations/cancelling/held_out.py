"""MNIST with pixels between 0 and 1, with its own test set or, to choose learning rates on, without it."""

from __future__ import annotations

import torchvision

HELD_OUT = 10_000


def mnist(part: str, root: str, held_out: bool):  # type: ignore[no-untyped-def]
    """Return images and classes.

    Args:
        part: "train" or "test".
        root: torchvision's.
        held_out: whether the last 10,000 training images take the place of the test set.
    """
    data = torchvision.datasets.MNIST(root, train=held_out or part == "train")
    images = data.data.numpy() / 255
    classes = data.targets.numpy()
    if held_out:
        chosen = slice(None, -HELD_OUT) if part == "train" else slice(-HELD_OUT, None)
        images = images[chosen]
        classes = classes[chosen]
    return images[:, None], classes
