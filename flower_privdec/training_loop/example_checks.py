"""What keeps the examples of a batch apart: checks of a data loader's items and rows, and GroupNorm for BatchNorm.

Each item must be one example: read alone, drawn once, in a row that the others do not change. Example-level privacy
bounds what one item of a dataset changes. If items read others (pairs, triplets, standardisation by the data's own
mean), or one occurs several times, one example changes several rows of a batch, each of which is clipped on its own.

`separate_items` knows kinds of datasets whose items are apart by construction. For every other dataset some items are
read again here, from a copy in which one example stands in the place of all (`stand_ins`). That finds mistakes and
proves nothing: ε then holds if item i reads only example i, which is said beside it.

What these checks cannot see: what an item does too rarely, statistics of the data that were computed before the dataset
was made, copies of an example under another index, other files, and what a loop does to a batch that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
DRAWS = 64  # how often each is read with other random numbers, if it draws any
_SEED = 20_000  # the first of these


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
        """Read some items to try the dataset and the `collate_fn`; return what makes batches of them.

        Raises:
            ScenarioError: an item occurs twice, reads other items, or is changed by the others of its batch.
            RunError: an item cannot be read; the message is withheld.
        """
        items = self._items
        count = max(2, PROBES // max(1, len(items.owners)))
        probes: list[int] = []
        for number in range(len(items.owners)):
            probes += _spaced(np.flatnonzero(items.owner == number), count)
        _check_repeats(_tried(items, probes, self._places))

        dataset = self._loader.dataset
        collate = self._loader.collate_fn
        if collate is default_collate:
            return ExamplesAlone(dataset, collate, items.rows, is_proved=not items.unproved)
        return ExamplesAlone(dataset, collate, lists_of_items=self._tried_collate(collate))

    def _tried_collate(self, collate: Collate) -> bool:
        """Return whether a `collate_fn` makes lists of items, having tried it on a few.

        Raises:
            ScenarioError: a batch of several is not what it makes of each alone.
            RunError: it fails; the message is withheld.
        """
        dataset: Any = self._loader.dataset

        # Some items: together, one by one, and one by one in the other order, which shows a state that is carried on.
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
        """Return whether a `collate_fn` makes the same of an item if one example stands for all that it reaches."""
        rows = len(self._items.ids)

        def read(copy: Any) -> Any:
            return copy([copied(item)])

        plain = StandIn(collate, rows)
        alone = StandIn(collate, rows, index)
        try:
            expected, drew = plain.read(read, _SEED)
            repeats = same(expected, StandIn(collate, rows).read(read, _SEED)[0])
        except RAISED_BY_USERS:  # the copy fails, and what it was made of does not
            return True

        # Once if nothing is drawn; else under many seeds, since it may reach others only now and then.
        draws = DRAWS if drew or not repeats else 1
        for seed in range(_SEED, _SEED + draws):
            expected, _ = plain.read(read, seed)
            try:
                batch, _ = alone.read(read, seed)
            except RAISED_BY_USERS:
                return False
            if repeats and not same(batch, expected):
                return False
            if any(self._is_another(index, watch) for watch in alone.watched):
                return False
        return True

    def _is_another(self, index: int, watch: ReadWatch) -> bool:
        """Return whether an example of these other than one item's was read from a dataset."""
        ids = look(watch.dataset, self._places).ids
        own = self._items.ids[index]
        return any(ids[place] in self._items.ids and ids[place] != own for place in watch.read)


def assumption_of(unproved: tuple[str, ...]) -> str:
    """Return in words what ε assumes of the examples; empty if all is proved."""
    if not unproved:
        return ""
    return f"if item i reads example i only, which is not proved of {', '.join(unproved)}"


def mixed_batch() -> ScenarioError:
    """Return the error of items that do not make rows, or of a `collate_fn` that lets them reach each other."""
    return ScenarioError(
        "the examples do not make rows of one shape, or the collate_fn makes another row of an example among others "
        "than alone, so that one example would change the rows of others, which are clipped each on its own: pad to a "
        "fixed length that is not of the data and pass a mask (not pad_sequence, which pads to the longest), return "
        "tensors [examples, ...], scale by constants, mix no examples, and draw random numbers in the dataset",
        code="training-loop.collate-mixes",
    )


def _check_repeats(ids: np.ndarray) -> None:
    """Raise ScenarioError if items are one example."""
    examples, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(examples) < len(ids):
        raise ScenarioError(
            f"{int((counts > 1).sum())} of {len(examples)} examples occur several times in the dataset, item "
            f"{first[counts.argmax()]} {counts.max()} times: one example would count as several, each "
            "clipped on its own; give every index once (Subset, ConcatDataset), and more passes in place of copies",
            code="training-loop.repeated-example",
        )


def _tried(items: Items, probes: list[int], places: ItemPlaces) -> np.ndarray:
    """Try some items; return the numbers of the examples that items are, as far as they can be followed.

    Raises:
        ScenarioError: see `_Trial.of`.
        RunError: see `_Trial.of`.
    """
    ids = items.ids.copy()
    for number, owner in enumerate(items.owners):
        own = sorted({int(items.own[probe]) for probe in probes if items.owner[probe] == number})
        within = _Trial(owner, places).of(own) if own else None
        if within is not None:
            # Take the numbers by which more items turn out to be one example.
            used = items.owner == number
            followed = within[items.own[used]]
            if len(np.unique(followed)) < len(np.unique(ids[used])):
                ids[used] = followed
    return ids


def _spaced(values: np.ndarray, count: int) -> list[int]:
    """Return some values, evenly spaced."""
    places = {number * len(values) // count for number in range(count)}
    return [int(values[place]) for place in sorted(places)]


class _Trial:
    """Reads items of a dataset whose class is a user's own, from copies of it."""

    def __init__(self, dataset: Any, places: ItemPlaces) -> None:
        self._dataset = dataset
        self._places = places

    def of(self, probes: list[int]) -> np.ndarray | None:
        """Try some items; return the numbers of the examples that items are, of a dataset within, if they are known.

        Raises:
            ScenarioError: an item reads others, or there are more items than examples.
            RunError: an item cannot be read.
        """
        reads: list[tuple[int, ReadWatch, int]] = []
        integers: list[np.ndarray] = []
        for place, probe in enumerate(probes):
            others = [probes[place - 1], probes[place - len(probes) // 2]]
            alone = self._alone(probe, [other for other in others if other != probe])
            if alone is None:
                return None
            reads += [(probe, watch, int(next(iter(watch.read)))) for watch in alone.watched if watch.read]
            integers = alone.integers
            for items in alone.lists:
                _check_repeats(look(items, self._places).ids)
        return self._examples_within(reads, integers, len(probes))

    def _alone(self, index: int, others: list[int]) -> StandIn | None:
        """Return the copy in which an item stays the same while one example stands for all; None if none can be made.

        Raises:
            ScenarioError: the item is another one in each such copy, so it reads other examples.
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

        # An item may read its row under another number, which then stands in an array of as many.
        candidates = [index, *(int(numbers[index]) for numbers in plain.integers)]
        draws = DRAWS if drew or not repeats else 1
        for row in dict.fromkeys(row for row in candidates if 0 <= row < rows):
            alone = StandIn(dataset, rows, row)
            if not self._is_unchanged(alone, read, draws, repeats):
                continue
            expects = {row, *candidates}
            strays = any(not watch.read <= expects and len(watch.dataset) == rows for watch in alone.watched)
            if strays and repeats and self._depends_on_row(read, expected, row):
                break  # it has a row of its own, and another one's item
            return alone
        raise _reads_others(index, name)

    def _depends_on_row(self, read: Read, expected: Any, row: int) -> bool:
        """Return whether an item changes if another row than its own stands for all."""
        rows = len(self._dataset)
        try:
            item, _ = StandIn(self._dataset, rows, (row + 1) % rows).read(read, _SEED)
        except RAISED_BY_USERS:
            return True
        return not same(item, expected)

    def _is_unchanged(self, alone: StandIn, read: Read, draws: int, repeats: bool) -> bool:
        """Return whether items of a copy are those of the dataset, and read one item of each dataset within."""
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
        """Return whether an item is the same whichever other one was read before."""
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

    def _examples_within(
        self, reads: list[tuple[int, ReadWatch, int]], integers: list[np.ndarray], probes: int
    ) -> np.ndarray | None:
        """Return the numbers of the examples of a dataset within, by the items that read them; None if unknown."""
        count = len(self._dataset)
        known: np.ndarray | None = None
        within = {id(watch.dataset): watch.dataset for _, watch, _ in reads}
        for key, dataset in within.items():
            pairs = [(probe, row) for probe, watch, row in reads if id(watch.dataset) == key]
            ids = _tried(look(dataset, self._places), [row for _, row in pairs], self._places)
            if len(pairs) < probes:  # an item may do without it
                continue

            # Which item reads which row: its own number, or what an array of as many numbers says.
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
    """Put a GroupNorm in the place of each BatchNorm of a model (Wu and He 2018), in place, and return the model.

    A frozen one stays. Each other one keeps its weight, bias and eps, and takes the most groups, up to `groups`, that
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
        replacement.weight = norm.weight
        replacement.bias = norm.bias
    return replacement
