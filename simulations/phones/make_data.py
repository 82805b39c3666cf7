"""Digits for 10,000 phones, 20 images each: `python make_data.py` writes `runs/phones.npz`.

An image of the training set is one of scikit-learn's 1,500 training digits with noise, since there are too few digits
for so many phones. The test set is the 297 others as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

PHONES = 10_000
IMAGES = 20  # of each phone
TRAIN = 1_500
WHITE = 16.0
NOISE = 0.1  # standard deviation, of white


def phones() -> dict[str, np.ndarray]:
    """Return the arrays of the file: features, float32 [N, 64], and classes, int64 [N]."""
    generator = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x / WHITE).astype(np.float32)

    chosen = generator.integers(TRAIN, size=PHONES * IMAGES)
    noise = generator.standard_normal((len(chosen), x.shape[1]), dtype=np.float32)
    return {
        "x_train": x[chosen] + np.float32(NOISE) * noise,
        "y_train": y[chosen],
        "x_test": x[TRAIN:],
        "y_test": y[TRAIN:],
    }


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    arrays: dict[str, Any] = phones()
    np.savez("runs/phones.npz", **arrays)
