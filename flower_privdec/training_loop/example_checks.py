"""What keeps the examples of a batch apart: checks of a data loader's items and rows, and GroupNorm for BatchNorm.

Each item must be one example: read alone, drawn once, in a row that the others do not change. Example-level privacy
bounds what one item of a dataset changes. A dataset whose items read others (pairs, triplets, standardisation by the
data's own mean), one that holds an item several times, and a `collate_fn` that pads to the longest or mixes rows let
one example change several rows of a batch, each of which is clipped on its own.

What these checks cannot see: statistics of the data that were computed before the dataset was made, copies of an
example under another index, and what a loop does to a batch that it was given.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from flower_privdec.common.arguments import check_whole
from flower_privdec.common.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.models import is_constant_norm, keeps_statistics

PROBES = 8  # items of a dataset that are read before a run, evenly spaced
_SEED = 20_000  # of the random numbers that a dataset draws while it is probed


def check_examples(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """Check a loader's dataset, and its `collate_fn` on a few items; return the `collate_fn` that checks each batch.

    Raises:
        ScenarioError: an item occurs twice, reads other items, or is changed by the others of its batch.
    """
    dataset: Any = loader.dataset
    datasets: list[Any] = []
    items = _indices(dataset, datasets)
    examples, counts = np.unique(items, return_counts=True)
    if counts.max() > 1:
        raise ScenarioError(
            f"{int((counts > 1).sum())} of {len(examples)} examples occur several times in the dataset, item "
            f"{examples[counts.argmax()] % 2**40} {counts.max()} times: one example would count as several, each "
            "clipped on its own; give every index once (Subset, ConcatDataset), and more passes in place of copies",
            code="training-loop.repeated-example",
        )
    probes = sorted({index * len(dataset) // PROBES for index in range(PROBES)} & {*range(len(dataset))})
    for probe in probes:
        place, index = divmod(int(items[probe]), 2**40)
        _check_alone(datasets[place], index)
    if loader.collate_fn is default_collate:  # which stacks rows
        return default_collate
    collate = partial(_collate_apart, loader.collate_fn)
    try:
        with _same_random_numbers():
            batch = collate([dataset[index] for index in probes])
    except RAISED_BY_USERS:  # which the first batch will raise, without its message
        return collate
    if isinstance(batch, MixedBatch):
        raise mixed_batch()
    return collate


class MixedBatch:
    """Stands for a batch whose rows depend on each other; an exception would lose its text in a worker."""


def _collate_apart(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return the batch of a `collate_fn`; a MixedBatch unless each row is what the example gives alone."""
    batch, alone = collate(samples), (collate([sample]) for sample in samples)
    rows = all(_is_row(batch, one, row, len(samples)) for row, one in enumerate(alone))
    return batch if rows else MixedBatch()


def mixed_batch() -> ScenarioError:
    """Return the error of a `collate_fn` that lets examples reach each other."""
    return ScenarioError(
        "the collate_fn makes another row of an example among others than alone, so that one example changes the rows "
        "of others, which are clipped each on its own: pad to a fixed length and pass a mask (not pad_sequence, which "
        "pads to the longest), return tensors [examples, ...], scale by constants, mix no examples, and draw random "
        "numbers in the dataset",
        code="training-loop.collate-mixes",
    )


def _is_row(batch: Any, alone: Any, row: int, size: int) -> bool:
    """Return whether the part of a batch that belongs to one row is what `collate_fn` makes of that example alone."""
    if type(batch) is not type(alone):
        return False
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or alone.ndim == 0 or len(batch) != size or len(alone) != 1:
            return batch.ndim == 0 and _same(batch, alone)
        return _same(batch[row], alone[0])
    if isinstance(batch, np.ndarray):
        return _is_row(torch.from_numpy(batch), torch.from_numpy(alone), row, size)
    if isinstance(batch, Mapping):
        return batch.keys() == alone.keys() and all(_is_row(batch[key], alone[key], row, size) for key in batch)
    if isinstance(batch, list | tuple):
        if len(batch) == len(alone) and all(_is_row(*pair, row, size) for pair in zip(batch, alone, strict=True)):
            return True
        return len(batch) == size and len(alone) == 1 and _same(batch[row], alone[0])
    return _same(batch, alone)


def _same(one: Any, other: Any) -> bool:
    """Return whether two items are equal, bit for bit and NaN for NaN; what cannot be compared is not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except RAISED_BY_USERS:  # a comparison of a user's own type
        return False


def _indices(dataset: Any, datasets: list[Any]) -> np.ndarray:
    """Return [items]: each item's index in the dataset beneath, plus 2^40 times that one's place in `datasets`."""
    if type(dataset).__getitem__ is Subset.__getitem__:
        return _indices(dataset.dataset, datasets)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return np.concatenate([_indices(part, datasets) for part in dataset.datasets])
    places = [place for place, other in enumerate(datasets) if other is dataset] or [len(datasets)]
    if places == [len(datasets)]:
        datasets.append(dataset)
    return np.arange(len(dataset)) + (places[0] << 40)


class _Watched(Dataset[Any]):
    """A dataset within another one, which notes what indices are read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._read = dataset, set[int]()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self._read.update(range(*index.indices(len(self))))
        elif isinstance(index, list | tuple | np.ndarray | Tensor | int | np.integer) and not isinstance(index, bool):
            self._read.update(int(one) % len(self) for one in np.ravel(index))
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


def _check_alone(dataset: Any, index: int) -> None:
    """Refuse a dataset whose item at `index` depends on other items.

    The dataset is copied, and every array, list or table of as many rows as it has items holds row `index` in all its
    rows; datasets in it are watched, and its random generators repeat. An item that reads its own row alone stays as it
    was.

    Raises:
        ScenarioError: it does not.
    """
    if not hasattr(dataset, "__dict__"):
        return
    watched: list[_Watched] = []
    item, failed = None, False
    try:
        alone = copy.copy(dataset)
        alone.__dict__.update(_alone(vars(dataset), len(dataset), index, watched))
        with _same_random_numbers():
            expected = _repeating(dataset)[index]
        with _same_random_numbers():
            repeatable = _same(expected, _repeating(dataset)[index])
    except RAISED_BY_USERS:  # a class that cannot be copied, or an item that cannot be read, as its batch will raise
        return
    try:
        with _same_random_numbers():
            item = _repeating(alone)[index]
    except RAISED_BY_USERS:
        failed = True
    if failed or (repeatable and not _same(item, expected)) or any(len(inner._read) > 1 for inner in watched):
        raise ScenarioError(
            f"item {index} of {type(dataset).__name__} depends on other items of it (pairs, triplets, or scaling by "
            "the data's own mean?), so that one example changes several, each clipped on its own: make items of one "
            "example each, and scale by constants",
            code="training-loop.item-reads-others",
        )
    if len(watched) == 1 and watched[0]._read and len(watched[0]) < len(dataset) and repeatable:
        raise ScenarioError(
            f"{type(dataset).__name__} has {len(dataset)} items of the {len(watched[0])} of its "
            f"{type(watched[0]._dataset).__name__}, so that some occur several times: give every example once, and "
            "more passes in place of copies",
            code="training-loop.repeated-example",
        )


def _repeating(dataset: Any) -> Any:
    """Return a copy of a dataset whose own random generators begin where they are now; raises what copying raises."""
    repeating = copy.copy(dataset)
    for name, value in vars(dataset).items():
        if isinstance(value, torch.Generator):
            repeating.__dict__[name] = torch.Generator(value.device).set_state(value.get_state())
        elif isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            repeating.__dict__[name] = copy.deepcopy(value)
    return repeating


def _alone(value: Any, rows: int, index: int, watched: list[_Watched]) -> Any:
    """Return a value in which everything with as many rows as the dataset holds one row in all of them."""
    if isinstance(value, Tensor) and value.layout is torch.strided and value.ndim and len(value) == rows:
        return value[index : index + 1].expand_as(value)
    if isinstance(value, np.ndarray) and value.ndim and len(value) == rows:
        return np.broadcast_to(value[index : index + 1], value.shape)
    if hasattr(value, "iloc") and len(value) == rows:  # a table or a column of pandas
        return value.iloc[[index] * rows].set_axis(value.index)
    if type(value) in (list, tuple):
        arrays = any(isinstance(part, Tensor | np.ndarray) and part.ndim and len(part) == rows for part in value)
        same = [value[index]] * rows if len(value) == rows and not arrays else None
        return type(value)(same or [_alone(part, rows, index, watched) for part in value])
    if type(value) is dict:
        if len(value) == rows and index in value:
            return dict.fromkeys(value, value[index])
        return {key: _alone(part, rows, index, watched) for key, part in value.items()}
    if (isinstance(value, Dataset) and hasattr(value, "__len__")) or type(value).__module__.startswith("datasets."):
        watched.append(_Watched(value))
        return watched[-1]
    return value


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Draw the same random numbers each time, and leave the generators as they were."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(_SEED)
        np.random.seed(_SEED)  # noqa: NPY002
        torch.manual_seed(_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Put a GroupNorm in the place of each BatchNorm of a model (Wu and He 2018), in place, and return the model.

    One that is frozen stays. Each other keeps its weight, bias and eps, and takes the most groups, up to `groups`, that
    divide the channels and leave two or more in each. Running statistics go: all peers must do so before they exchange
    models.

    Args:
        model: changed in place; one that is itself a BatchNorm is returned as a GroupNorm.
        groups: the most groups of a layer.

    Raises:
        ScenarioError: the model is none, `groups` is no whole number or below 1, or a lazy layer does not know its
            channels yet.

    Examples:
        >>> group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups
        4
    """
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    check_whole({"groups": groups})
    if groups is None or groups < 1:
        raise ScenarioError(f"groups={groups} must be >= 1", code="training-loop.groups")
    return _replaced(model, groups, {})


def _replaced(part: nn.Module, groups: int, done: dict[int, nn.Module]) -> nn.Module:
    """Return what takes a module's place, the same one wherever the module stands."""
    if id(part) not in done:
        done[id(part)] = part
        if keeps_statistics(part) and not is_constant_norm(part):
            done[id(part)] = _grouped(part, groups)
        for name, child in part.named_children():
            setattr(part, name, _replaced(child, groups, done))
    return done[id(part)]


def _grouped(norm: nn.Module, groups: int) -> nn.Module:
    if isinstance(norm, LazyModuleMixin) or not isinstance(norm, _BatchNorm | _InstanceNorm):
        raise ScenarioError(
            f"{type(norm).__name__} does not know its channels yet: call the model on one batch first",
            code="training-loop.lazy-norm",
        )
    channels = int(norm.num_features)
    count = max(n for n in range(1, groups + 1) if channels % n == 0 and (n == 1 or channels // n > 1))
    replacement = nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine).train(norm.training)
    if norm.affine:
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return replacement
