"""Data given in Python: arrays, tensors and torch datasets, as what a user's own dataset function would return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from flower_privdec.common.formatting import one_line
from flower_privdec.errors import RAISED_BY_USERS, ScenarioError

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Copies of the arrays that were given.

    Attributes:
        train: x and y of everybody together, or of each peer.
        test: x and y of the public test set.
        each: whether there is one pair for each peer.
    """

    train: list[Pair]
    test: Pair
    each: bool

    @classmethod
    def of(cls, train: Any, test: Any) -> Arrays:
        """Take data in one of the forms that `make_scenario` describes.

        Raises:
            ScenarioError: they are something else.
        """
        each = isinstance(train, list)
        if each and not train:
            raise ScenarioError("data.train lists nobody's data: give a pair (x, y) or a torch dataset for each peer")
        parts = [(f"data.train[{i}]", part) for i, part in enumerate(train)] if each else [("data.train", train)]
        if test is None:
            raise ScenarioError("data.test is missing: give a public test set beside data.train")
        return cls([_pair(part, where) for where, part in parts], _pair(test, "data.test"), each)

    def __call__(self, part: str, root: str = "0") -> Pair:
        """Return a half, as `data.dataset.module` has it; root is the peer's number, where each has data of its own."""
        return self.test if part == "test" else self.train[int(root)]


def _pair(value: Any, where: str) -> Pair:
    if isinstance(value, Dataset):
        return _read(value, where)
    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        raise ScenarioError(
            f"{where} is a {kind}: it must be a tuple (x, y) of arrays, or a torch dataset of such pairs"
        )
    return _array(value[0], f"{where}: x"), _array(value[1], f"{where}: y")


def _read(dataset: Any, where: str) -> Pair:
    """Read a torch dataset whole: every example once, in order."""
    try:
        count = len(dataset)
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"{where} is a dataset without a length: give one that has one, or arrays") from error
    try:
        pairs = [dataset[i] for i in range(count)]
    except RAISED_BY_USERS as error:  # a user's own dataset may raise anything
        raise ScenarioError(f"{where}: the dataset fails: {one_line(error)}") from error
    if not pairs or not all(isinstance(each, tuple | list) and len(each) == 2 for each in pairs):
        raise ScenarioError(f"{where}: the dataset must have examples, each of them a pair (x, y)")
    x, y = zip(*pairs, strict=True)
    return _stack(x, f"{where}: x"), _stack(y, f"{where}: y")


def _stack(values: Sequence[Any], where: str) -> np.ndarray:
    parts = [_array(value, where) for value in values]
    if len({part.shape for part in parts}) > 1:
        raise ScenarioError(f"{where} has shapes {sorted({part.shape for part in parts})}: all examples' must be alike")
    return np.stack(parts)


def _array(value: Any, where: str) -> np.ndarray:
    """Return a copy of an array, a tensor or lists of numbers."""
    try:
        array = np.array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise ScenarioError(f"{where} is no array: {one_line(error)}") from error
    if array.dtype.kind not in "buif":
        raise ScenarioError(f"{where} is a {type(value).__name__} of {array.dtype}: it must be an array of numbers")
    return array
