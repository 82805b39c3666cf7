"""Public features of CIFAR-10 for a linear model: `python cifar_features.py cifar10_jpeg.npz` writes two files.

Random filters of 6 by 6 pixels, with both signs of their answers, averaged over the quarters of an image: nothing is
fitted to an image. `runs/cifar.npz` has the test images, and `runs/cifar-held-out.npz` the last 10,000 training images
in their place, to choose learning rates on.
"""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import adaptive_avg_pool2d, conv2d

FILTERS = 300
SIDE = 6
HELD_OUT = 10_000
NORM = 4.0


def images(data: dict[str, np.ndarray], part: str) -> np.ndarray:
    """Return the images of a part, [N, 3, 32, 32] in 0 to 1."""
    content = data[f"{part}_jpeg"].tobytes()
    ends = data[f"{part}_offset"]
    pixels = [np.asarray(Image.open(io.BytesIO(content[start:end])).convert("RGB")) for start, end in pairwise(ends)]
    return np.stack(pixels).transpose(0, 3, 1, 2).astype(np.float32) / 255


def features(pixels: np.ndarray, count: int = FILTERS) -> np.ndarray:
    """Return features of norm NORM, [N, 8 count], of each image by itself, from as many filters."""
    filters = torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    filters -= filters.mean(dim=(1, 2, 3), keepdim=True)
    parts = []
    for batch in torch.from_numpy(pixels).split(500):
        answers = conv2d((batch - batch.mean((1, 2, 3), keepdim=True)), filters, stride=2)
        answers = answers / answers.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-3)
        both = torch.cat([answers, -answers], dim=1).sub(0.5).relu()
        flat = adaptive_avg_pool2d(both, 2).flatten(1)
        flat = flat - flat.mean(1, keepdim=True)
        parts.append(NORM * flat / flat.norm(dim=1, keepdim=True))
    return torch.cat(parts).numpy()


if __name__ == "__main__":
    data = dict(np.load(sys.argv[1]))
    (x, y), (x_test, y_test) = ((features(images(data, part)), data[f"{part}_label"]) for part in ("train", "test"))
    Path("runs").mkdir(exist_ok=True)
    np.savez("runs/cifar.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    rest = slice(None, -HELD_OUT)
    np.savez(
        "runs/cifar-held-out.npz",
        x_train=x[rest],
        y_train=y[rest],
        x_test=x[-HELD_OUT:],
        y_test=y[-HELD_OUT:],
    )
