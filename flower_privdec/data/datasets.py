"""Load a dataset by name, whole or a keyed random subset of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.catalogue import DATASETS
from flower_privdec.data import npz, readers
from flower_privdec.data.own_arrays import OWN, read_own
from flower_privdec.data.readers import Rows, Source, Split
from flower_privdec.errors import ScenarioError
from flower_privdec.rows import keyed_generator

_READERS: dict[str, Callable[[str | None], Source]] = DATASETS.bind(
    {
        "digits": readers.read_digits,
        "breast-cancer": readers.read_breast_cancer,
        "mnist": readers.read_mnist,
        "fashion-mnist": readers.read_fashion_mnist,
        "cifar10": readers.read_cifar10,
        "npz": npz.read_npz,
    }
)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory: private training examples and a public test set.

    Attributes:
        name: its name in DATASETS, or `own`: under it a ledger counts it, whatever part of it, order or file is used.
        x_train, x_test: features, float32 [N, *input_shape].
        y_train, y_test: classes, int64 [N], of 0..n_classes-1.
        n_classes: the number of classes, public.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    n_classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example's features."""
        return tuple(self.x_train.shape[1:])


def load_dataset(
    name: str,
    root: str | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    test_samples: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Dataset:
    """Load a dataset.

    Args:
        name: one of DATASETS, or `package.module:name` of a user's own function, see `read_own`.
        root: the folder that torchvision's layout is in, or the .npz file; the embedded datasets need none.
        samples: take so many training examples, chosen by a generator keyed by `seed`; None takes all.
        seed: the scenario's seed.
        test_samples: the same for the test set.
        arguments: what a user's own function is called with.

    Returns:
        The dataset; one float32 copy of the features it uses, scaled by public constants only.

    Raises:
        ScenarioError: the name, root, file or a number is wrong; the message has the remedy.
    """
    if ":" in name:
        source, name = read_own(name, root, arguments or {}), OWN
    else:
        DATASETS.check(name, "data.dataset")
        source = _READERS[name](root)
    x_train, y_train = _take(source.train, samples, seed, "samples", name)
    x_test, y_test = _take(source.test, test_samples, seed, "test_samples", name)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ScenarioError(
            f"data.root={root} has training examples of shape {list(x_train.shape[1:])} and test examples of "
            f"shape {list(x_test.shape[1:])}: they must be equal; mend the file"
        )
    return Dataset(name, x_train, y_train, x_test, y_test, source.n_classes)


def _take(split: Split, count: int | None, seed: int, key: str, name: str) -> tuple[Tensor, Tensor]:
    total = len(split.labels)
    rows: Rows = slice(None)
    if count is not None and not 1 <= count <= total:
        raise ScenarioError(f"data.{key}={count} must be 1 to {total}, what {name} has: change it or leave it out")
    if count is not None and count < total:
        chosen = keyed_generator(seed, f"data.{key}").choice(total, count, replace=False, shuffle=False)
        rows = np.sort(chosen)
    return split.read(rows), torch.from_numpy(split.labels[rows])
