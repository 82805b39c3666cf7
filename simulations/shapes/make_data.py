"""Drawn data of the shapes of rcv1 and epsilon: `python make_data.py` writes three files to `runs`.

Nothing in them is real. rcv1-shaped: texts of some 73 of 47,236 words. epsilon-shaped: 2,000 dense features. Every row
has norm 1; the class is the side of a plane, in epsilon-shaped with noise, by which the plane errs for one in ten.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import dump_svmlight_file

from flower_privdec.data.drawn_sets import draw_sparse

TRAIN = 20_000
TEST = 4_000
FEATURES = 2_000


def epsilon_shaped(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features, float32 [count, 2000], and classes, int64 [count]."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((count, FEATURES), dtype=np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    scores = x @ generator.standard_normal(FEATURES, dtype=np.float32)
    return x, (scores + 0.33 * generator.standard_normal(count) > 0).astype(np.int64)


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    rows, classes = draw_sparse(TRAIN + TEST)
    for name, part in (("train", slice(TRAIN)), ("test", slice(TRAIN, None))):
        dump_svmlight_file(rows.matrix[part], classes[part], f"runs/rcv1-shaped.{name}", zero_based=False)
    x, y = epsilon_shaped(TRAIN + TEST)
    np.savez("runs/epsilon-shaped.npz", x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[TRAIN:], y_test=y[TRAIN:])
