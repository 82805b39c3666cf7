"""Batches of examples that were each read and collated alone, and put together here.

A data loader of torch asks a dataset for a whole batch if it can (`__getitems__`), and gives all items to one call of
`collate_fn`. Either may pad to the longest, standardise or mix, so that one example changes the rows of others, each of
which is clipped on its own. Here every item comes from `dataset[i]`, is copied before the next is read, passes
`collate_fn` without company, and becomes a row beside the others. What is left for one example to reach another by is
the dataset's own code, which `separate_items` and `example_checks` look at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from flower_privdec.common.errors import RAISED_BY_USERS
from flower_privdec.training_loop.separate_items import Rows

Collate = Callable[[list[Any]], Any]
CONSTANTS = frozenset((bool, int, float, complex, str, bytes, type(None)))


class MixedBatch:
    """Stands for a batch whose items do not make rows of one shape; an exception would lose its text in a worker."""


class MisfitError(Exception):
    """Parts of two examples cannot be rows of one batch."""


class ExamplesAlone(Dataset[Any]):
    """Makes batches of a dataset's items, each of which is read and collated alone.

    Other attributes are the dataset's, so that a `worker_init_fn` can open its files.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        rows: Rows | None = None,
        *,
        is_proved: bool = False,
        lists_of_items: bool = False,
    ) -> None:
        """Read from a dataset.

        Args:
            collate: of the user's loader; called with one item at a time, unless it is torch's, which stacks.
            rows: of the dataset, if its items are rows of tensors and torch stacks them: these are taken in one go.
            is_proved: whether items are proved to be apart, so that none is written into another's memory.
            lists_of_items: see `merged`.
        """
        # Past `__setattr__`, which sets attributes of the dataset.
        self.__dict__.update(
            _dataset=dataset,
            _collate=collate,
            _rows=rows,
            _taken=as_it_is if is_proved else copied,
            _lists_of_items=lists_of_items,
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the batch of some items; a MixedBatch if they do not make rows of one shape."""
        if self._rows is not None:
            index = torch.from_numpy(self._rows.index[np.asarray(indices)])
            taken = [tensor[index] for tensor in self._rows.tensors]
            return taken if self._rows.is_tuple else taken[0]

        try:
            if self._collate is default_collate:
                return _stacked([self._taken(self._dataset[index]) for index in indices])
            alone = [copied(self._collate([self._dataset[index]])) for index in indices]
            return merged(alone, self._lists_of_items)
        except MisfitError:
            return MixedBatch()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


def as_it_is(value: Any) -> Any:
    """Return what was made ready already."""
    return value


def copied(value: Any) -> Any:
    """Return a copy of an item that keeps its bits when the dataset writes the next one into the same memory."""
    kind = type(value)
    if kind is Tensor:
        return value.clone()
    if kind in CONSTANTS:
        return value
    if kind is tuple or kind is list:
        return kind([copied(part) for part in value])
    if kind is dict:
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value)


def _stacked(items: list[Any]) -> Any:
    """Return torch's batch of items; raises MisfitError unless all have the first one's shapes and types.

    A row's type would otherwise depend on the others': torch makes all of them what the widest needs.
    """
    shapes = _shapes(items[0])
    if any(_shapes(item) != shapes for item in items[1:]):
        raise MisfitError
    return default_collate(items)


def _shapes(value: Any) -> Any:
    """Return what an item is made of, without what it says."""
    kind = type(value)
    if kind in CONSTANTS:
        return kind
    if kind is Tensor or isinstance(value, Tensor | np.ndarray):
        return kind, value.shape, value.dtype
    if kind is tuple:
        return [_shapes(part) for part in value]
    if isinstance(value, Mapping):
        return kind, {key: _shapes(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return kind, [_shapes(part) for part in value]
    return kind


def merged(batches: list[Any], lists_of_items: bool) -> Any:
    """Return one batch of batches of one example each.

    Tensors and arrays [1, ...] are put one under the other, and what has no axis of examples must be the same for all.

    Args:
        lists_of_items: whether a list of one is of one item, and is joined with the others, or of one part.

    Raises:
        MisfitError: shapes, types or constants differ, so that one example would have to change another's row.
    """
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise MisfitError

    if isinstance(first, Tensor):
        return _joined(batches, torch.cat)
    if isinstance(first, np.ndarray):
        return _joined(batches, np.concatenate)

    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            raise MisfitError
        parts = {key: merged([batch[key] for batch in batches], lists_of_items) for key in first}
        if type(first) is dict:
            return parts
        whole: Any = copy.copy(first)  # such as a tokenizer's BatchEncoding
        whole.update(parts)
        return whole

    if isinstance(first, list | tuple):
        if any(len(batch) != len(first) for batch in batches):
            raise MisfitError
        if lists_of_items and type(first) is list and len(first) == 1:
            return [batch[0] for batch in batches]
        columns = [merged([batch[place] for batch in batches], lists_of_items) for place in range(len(first))]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*columns)
        return type(first)(columns)

    if all(same(first, batch) for batch in batches):
        return first
    raise MisfitError


def _joined(batches: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Return arrays [1, ...] as one, or the number that all of them are."""
    first = batches[0]
    if any(batch.shape != first.shape or batch.dtype != first.dtype for batch in batches):
        raise MisfitError
    if first.ndim and len(first) == 1:
        return join(batches)
    if first.ndim == 0 and all(same(first, batch) for batch in batches):
        return first
    raise MisfitError


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, bit for bit and NaN for NaN; what cannot be compared is not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except RAISED_BY_USERS:  # a comparison of a user's own type
        return False
