"""What keeps the examples of a batch apart: checks of a data loader's items and rows, and GroupNorm for BatchNorm.

Each item must be one example: read alone, drawn once, in a row that the others do not change. Example-level privacy
bounds what one item of a dataset changes. If items read others (pairs, triplets, standardisation by the data's own
mean), or one occurs several times, one example changes several rows of a batch, each of which is clipped on its own.

`separate_items` knows kinds of datasets whose items are apart by construction. For every other dataset some items, the
*probes*, are read again here, from a copy in which one example stands in the place of all (`stand_ins`). An item that
is another one there reads more than its own example. That finds mistakes and proves nothing: ε then holds if item i
reads only example i, which every summary says.

Items may be random. One that is the same when it is read twice under one seed is compared; of any other it is only
watched which items of the datasets within it reads. If an item draws random numbers, it is read under many seeds, since
it may reach others only now and then.

What these checks cannot see: what an item does too rarely, statistics of the data that were computed before the dataset
was made, copies of an example under another index, other files, and what a loop does to a batch that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import DataLoader, default_collate

from flower_privdec.common.arguments import check_whole
from flower_privdec.common.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.models import is_constant_norm, keeps_statistics
from flower_privdec.training_loop.clipped_sum import withheld
from flower_privdec.training_loop.example_fetch import Collate, ExamplesAlone, MisfitError, copied, merged, same
from flower_privdec.training_loop.separate_items import ItemPlaces, Items, look
from flower_privdec.training_loop.stand_ins import Read, ReadWatch, StandIn, same_random_numbers

PROBES = 8  # items of a dataset that are read before a run, evenly spaced
DRAWS = 64  # seeds under which each is read, if it draws random numbers
_SEED = 20_000  # the first of these seeds


@dataclass(frozen=True)
class LoaderExamples:
    """What a data loader reads, and what is known of it.

    Attributes:
        unproved: what is not proved to keep examples apart, by name; empty if all is.
    """

    unproved: tuple[str, ...]
    _loader: DataLoader[Any]
    _items: Items
    _places: ItemPlaces

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderExamples:
        """Look at a loader's examples before one is read.

        Raises:
            ScenarioError: an item occurs twice.
        """
        places = ItemPlaces()
        items = look(loader.dataset, places)
        unproved = list(items.unproved)
        if loader.collate_fn is not default_collate:
            unproved.append("the collate_fn")
        if loader.worker_init_fn is not None:
            unproved.append("the worker_init_fn")
        _check_repeats(items.ids)
        return cls(tuple(dict.fromkeys(unproved)), loader, items, places)

    def checked(self) -> ExamplesAlone:
        """Try the dataset and the `collate_fn` on some items; return what makes batches of all.

        Raises:
            ScenarioError: an item occurs twice, reads other items, or is changed by the others of its batch.
            RunError: an item cannot be read; the message is withheld.
        """
        items = self._items
        n_datasets = len(items.owners)
        per_dataset = max(2, PROBES // max(1, n_datasets))  # at least two, to compare them
        probes: list[int] = []
        for number in range(n_datasets):
            probes += _spaced(np.flatnonzero(items.owner == number), per_dataset)
        _check_repeats(_try_items(items, probes, self._places))

        dataset = self._loader.dataset
        collate = self._loader.collate_fn
        if collate is default_collate:
            return ExamplesAlone(dataset, collate, items.rows, is_proved=not items.unproved)
        return ExamplesAlone(dataset, collate, lists_of_items=self._try_collate(collate))

    def _try_collate(self, collate: Collate) -> bool:
        """Try a `collate_fn` on some items; return whether the batches that it makes are lists of items.

        Raises:
            ScenarioError: what it makes of several items is not what it makes of each alone, put together.
            RunError: it fails; the message is withheld.
        """
        dataset: Any = self._loader.dataset

        # Together, one by one, and one by one backwards, which shows whether it carries something on to the next.
        failure = ""
        try:
            with same_random_numbers(_SEED):
                indices = _spaced(np.arange(len(dataset)), PROBES)
                probes = [copied(dataset[index]) for index in indices]
                together = collate([copied(probe) for probe in probes])
                forwards = [copied(collate([copied(probe)])) for probe in probes]
                backwards = [copied(collate([copied(probe)])) for probe in reversed(probes)]
        except RAISED_BY_USERS as error:
            failure = type(error).__name__
        # Outside of `except`: an error raised in it would carry the other one, with its message, along.
        if failure:
            raise withheld("the dataset or the collate_fn", failure)

        if not all(self._reads_one(collate, index, probe) for index, probe in zip(indices, probes, strict=True)):
            raise mixed_batch()

        if all(map(same, forwards, reversed(backwards))):
            for lists_of_items in (False, True):
                try:
                    if same(merged(forwards, lists_of_items), together):
                        return lists_of_items
                except MisfitError:
                    continue
        raise mixed_batch()

    def _reads_one(self, collate: Collate, index: int, item: Any) -> bool:
        """Return whether a `collate_fn` needs nothing but the item that it is given, and the example of that.

        It may be an object that holds the dataset. So the item is also given to a copy of it, in which the item's
        example stands in the place of all.
        """
        rows = len(self._items.ids)

        def read(copy: Any) -> Any:
            return copy([copied(item)])

        plain = StandIn(collate, rows)
        alone = StandIn(collate, rows, index)
        try:
            expected, drew = plain.read(read, _SEED)
            again, _ = StandIn(collate, rows).read(read, _SEED)
        except RAISED_BY_USERS:  # the copy fails, and what it was made of does not
            return True

        repeats = same(expected, again)
        draws = DRAWS if drew or not repeats else 1
        for seed in range(_SEED, _SEED + draws):
            expected, _ = plain.read(read, seed)
            try:
                batch, _ = alone.read(read, seed)
            except RAISED_BY_USERS:
                return False
            if repeats and not same(batch, expected):
                return False
            if any(self._has_read_another(index, watch) for watch in alone.watched):
                return False
        return True

    def _has_read_another(self, index: int, watch: ReadWatch) -> bool:
        """Return whether an example of these items, other than that of item `index`, was read from a dataset."""
        ids = look(watch.dataset, self._places).ids
        own = self._items.ids[index]
        return any(ids[place] in self._items.ids and ids[place] != own for place in watch.read)


def assumption_of(unproved: tuple[str, ...]) -> str:
    """Return in words what ε assumes about the examples; empty if all is proved."""
    if not unproved:
        return ""
    return f"if item i reads example i only, which is not proved of {', '.join(unproved)}"


def mixed_batch() -> ScenarioError:
    """Return the error of items that do not make rows, or of a `collate_fn` that lets them reach each other."""
    return ScenarioError(
        "the examples do not make rows of one shape, or the collate_fn makes another row of an example among others "
        "than alone, so that one example would change the rows of others, which are clipped each on its own: pad to a "
        "fixed length that is not of the data and pass a mask (tokenizers, and DataCollatorWithPadding, by "
        "padding='max_length', max_length=128; pad_sequence only pads to the longest), return tensors [examples, ...], "
        "scale by constants, mix no examples, and draw random numbers in the dataset",
        code="training-loop.collate-mixes",
    )


def _check_repeats(ids: np.ndarray) -> None:
    """Raise ScenarioError if two items are one example."""
    examples, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(examples) < len(ids):
        raise ScenarioError(
            f"{int((counts > 1).sum())} of {len(examples)} examples occur several times in the dataset, item "
            f"{first[counts.argmax()]} {counts.max()} times: one example would count as several, each "
            "clipped on its own; give every index once (Subset, ConcatDataset), and more passes in place of copies",
            code="training-loop.repeated-example",
        )


def _try_items(items: Items, probes: list[int], places: ItemPlaces) -> np.ndarray:
    """Try some items; return which example each item is, as far as reading the probes shows more than `look` knew.

    Raises:
        ScenarioError: see `_Trial.run`.
        RunError: see `_Trial.run`.
    """
    ids = items.ids.copy()
    for number, owner in enumerate(items.owners):
        own_probes = sorted({int(items.own[probe]) for probe in probes if items.owner[probe] == number})
        if not own_probes:
            continue
        ids_within = _Trial(owner, places).run(own_probes)
        if ids_within is None:
            continue

        # Two ways to number the same items: the one that finds more repeats is right.
        used = items.owner == number
        followed = ids_within[items.own[used]]
        if len(np.unique(followed)) < len(np.unique(ids[used])):
            ids[used] = followed
    return ids


def _spaced(values: np.ndarray, count: int) -> list[int]:
    """Return some values, evenly spaced."""
    places = {number * len(values) // count for number in range(count)}
    return [int(values[place]) for place in sorted(places)]


class _RowRead(NamedTuple):
    """An item that read one row of a dataset within its own.

    Attributes:
        item: the index of the item.
        watch: the dataset that it read.
        row: the index of the row that it read there.
    """

    item: int
    watch: ReadWatch
    row: int


class _Trial:
    """Reads items of a dataset whose class is a user's own, from copies of it."""

    def __init__(self, dataset: Any, places: ItemPlaces) -> None:
        self._dataset = dataset
        self._places = places

    def run(self, probes: list[int]) -> np.ndarray | None:
        """Try some items; return which example each item of the dataset is, if it reads them from a dataset within.

        Returns:
            The ids of all items; None if it is not known which item reads what.

        Raises:
            ScenarioError: an item reads others, or there are more items than examples.
            RunError: an item cannot be read.
        """
        reads: list[_RowRead] = []
        integers: list[np.ndarray] = []
        for place, probe in enumerate(probes):
            # Two others that may be read before it: the last one and one that is far away.
            others = [probes[place - 1], probes[place - len(probes) // 2]]
            alone = self._alone(probe, [other for other in others if other != probe])
            if alone is None:
                return None

            # Of each dataset within it reads one row at most, or it would not be alone.
            for watch in alone.watched:
                if watch.read:
                    row = next(iter(watch.read))
                    reads.append(_RowRead(probe, watch, int(row)))
            integers = alone.integers
            for items in alone.lists:
                _check_repeats(look(items, self._places).ids)
        return self._examples_within(reads, integers, len(probes))

    def _alone(self, index: int, others: list[int]) -> StandIn | None:
        """Return a copy in which one row stands for all and the item is still the same; None if no copy can be read.

        Args:
            others: items that may be read before it, and may not change it.

        Raises:
            ScenarioError: the item is another one in every such copy, so it reads other examples.
            RunError: the item cannot be read.
        """
        dataset = self._dataset
        rows = len(dataset)
        name = type(dataset).__name__

        def read(copy: Any) -> Any:
            return copy[index]

        failure = ""
        try:
            plain = StandIn(dataset, rows)
            expected, drew = plain.read(read, _SEED)
            fresh, _ = StandIn(dataset, rows).read(read, _SEED)
        except RAISED_BY_USERS as error:
            failure = type(error).__name__
        if failure:
            self._check_readable(index)
            return None  # the copy fails, and the dataset does not

        repeats = same(expected, fresh)
        if repeats and len(others) > 1 and not self._is_same_after(read, others):
            raise _reads_others(index, name)

        # Its row may have another number, if the dataset holds an array of integers that says which item is which row.
        candidates = [index, *(int(numbers[index]) for numbers in plain.integers)]
        draws = DRAWS if drew or not repeats else 1
        for row in dict.fromkeys(row for row in candidates if 0 <= row < rows):
            alone = StandIn(dataset, rows, row)
            if not self._is_unchanged(alone, read, draws, repeats):
                continue

            # From a dataset within that has as many items it should read one of its own numbers. If it reads another,
            # and also depends on the row, it is made of two examples.
            expects = {row, *candidates}
            strays = any(not watch.read <= expects and len(watch.dataset) == rows for watch in alone.watched)
            if strays and repeats and self._depends_on_row(read, expected, row):
                break
            return alone
        raise _reads_others(index, name)

    def _depends_on_row(self, read: Read, expected: Any, row: int) -> bool:
        """Return whether an item changes if the next row stands for all, in place of this one."""
        rows = len(self._dataset)
        try:
            item, _ = StandIn(self._dataset, rows, (row + 1) % rows).read(read, _SEED)
        except RAISED_BY_USERS:
            return True
        return not same(item, expected)

    def _is_unchanged(self, alone: StandIn, read: Read, draws: int, repeats: bool) -> bool:
        """Return whether an item of a copy is the dataset's, and reads at most one item of each dataset within."""
        plain = StandIn(self._dataset, len(self._dataset))
        for seed in range(_SEED, _SEED + draws):
            expected, _ = plain.read(read, seed)
            try:
                item, _ = alone.read(read, seed)
            except RAISED_BY_USERS:
                return False
            if repeats and not same(item, expected):
                return False
            if any(len(watch.read) > 1 for watch in alone.watched):
                return False
        return True

    def _is_same_after(self, read: Read, others: list[int]) -> bool:
        """Return whether an item is the same whichever of some others was read before it."""
        items = []
        for other in others:
            copy = StandIn(self._dataset, len(self._dataset))
            copy.read(lambda dataset, other=other: dataset[other], _SEED)  # type: ignore[misc]
            items.append(copy.read(read, _SEED)[0])
        return all(same(items[0], item) for item in items[1:])

    def _check_readable(self, index: int) -> None:
        """Raise RunError if an item cannot be read; its message is withheld."""
        failure = ""
        try:
            with same_random_numbers(_SEED):
                self._dataset[index]
        except RAISED_BY_USERS as error:
            failure = type(error).__name__
        # Outside of `except`: an error raised in it would carry the other one, with its message, along.
        if failure:
            raise withheld("the dataset", failure)

    def _examples_within(self, reads: list[_RowRead], integers: list[np.ndarray], probes: int) -> np.ndarray | None:
        """Return which example of a dataset within each item reads; None if unknown.

        Args:
            reads: what the probes read.
            integers: arrays that may say which row each item reads.
            probes: the number of probes.
        """
        count = len(self._dataset)
        known: np.ndarray | None = None
        datasets_within = {id(read.watch.dataset): read.watch.dataset for read in reads}
        for key, dataset in datasets_within.items():
            pairs = [(read.item, read.row) for read in reads if id(read.watch.dataset) == key]
            ids = _try_items(look(dataset, self._places), [row for _, row in pairs], self._places)
            if len(pairs) < probes:  # some items do without it
                continue

            # Item i reads row i, or row numbers[i] of such an array, if that is so for all probes.
            is_followed = False
            for numbers in (np.arange(count), *integers):
                fits = numbers.min() >= 0 and numbers.max() < len(ids)
                if fits and all(numbers[probe] == row for probe, row in pairs):
                    is_followed = True
                    if known is None or len(np.unique(ids[numbers])) < len(np.unique(known)):
                        known = ids[numbers]

            examples = len(np.unique(ids))
            if examples < count and not is_followed:
                raise ScenarioError(
                    f"{type(self._dataset).__name__} has {count} items of the {examples} examples of its "
                    f"{type(dataset).__name__}, so that some occur several times: give every example once, and more "
                    "passes in place of copies",
                    code="training-loop.repeated-example",
                )
        return known


def _reads_others(index: int, name: str) -> ScenarioError:
    return ScenarioError(
        f"item {index} of {name} depends on other items of it (pairs, triplets, mixup, or scaling by the data's own "
        "mean?), so that one example changes several, each clipped on its own: make items of one example each, and "
        "scale by constants",
        code="training-loop.item-reads-others",
    )


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace each BatchNorm of a model by a GroupNorm (Wu and He 2018), in place, and return the model.

    A frozen BatchNorm stays. A GroupNorm keeps weight, bias and eps. It has as many groups as divide the channels and
    leave two or more channels in each, and at most `groups`. Running statistics are dropped, so all peers must replace
    theirs before they exchange models.

    Args:
        model: changed in place; one that is itself a BatchNorm is returned as a GroupNorm.
        groups: the most groups of a layer.

    Raises:
        ScenarioError: the model is not a torch module, `groups` is not a whole number or below 1, or a lazy layer does
            not know its channels yet.

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
    """Return what takes a module's place; `done` has it already if the module stands in several places."""
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
        replacement.weight = norm.weight
        replacement.bias = norm.bias
    return replacement
