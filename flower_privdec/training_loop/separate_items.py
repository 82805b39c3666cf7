"""What is known of a dataset without reading it: which kinds keep their items apart, and which items are one example.

Example-level privacy bounds what one *item* of a dataset changes. For the kinds that are recognised here an item is a
row of an array, a table or a list, or a file of its own, so that nothing that stands in another item can reach it: it
is *proved*. Code of a user's own, such as a dataset class or a transform, may read what it likes. Then ε holds if item
i reads only example i, and every summary says so.

`look` goes through the wrappers of torch, and returns the `Items`: which example each one is (by where it lies in
memory), what is not proved, and whose items can be read to try them (`example_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

PLACES = 2**40  # more than any dataset has items
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)  # values that hold nothing of another item

# Datasets of torchvision whose item i is row i of `data`, or the file that `samples[i]` names.
OF_ARRAYS = ("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST", "CIFAR10", "CIFAR100", "SVHN", "STL10", "USPS")
OF_FILES = ("DatasetFolder", "ImageFolder")
# Transforms of torchvision that do not only see one item: they call a function of the user's, or take a batch.
NOT_OF_AN_ITEM = ("Lambda", "MixUp", "CutMix")


@dataclass(frozen=True)
class Rows:
    """Tensors whose rows can be taken in one go, since rows are all that items are.

    Attributes:
        tensors: tensors with the same number of rows.
        index: the row of each item, int64 [items].
        is_tuple: whether an item is a tuple of rows, rather than one row.
    """

    tensors: tuple[Tensor, ...]
    index: np.ndarray
    is_tuple: bool


@dataclass(frozen=True)
class Items:
    """What is known of a dataset's items.

    Attributes:
        ids: of the example that each item is; items with one number are one example. int64 [items].
        unproved: the datasets and transforms that are not proved to keep items apart, by name.
        owners: the datasets among those of which items can be read to try them.
        owner: of each item: its place in `owners`, or -1. int64 [items].
        own: of each item: its index in its owner. int64 [items].
        rows: if all items are rows of tensors.
    """

    ids: np.ndarray
    unproved: tuple[str, ...] = ()
    owners: tuple[Any, ...] = ()
    owner: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: Rows | None = None

    @classmethod
    def proved(cls, ids: np.ndarray, rows: Rows | None = None) -> Items:
        """Return items that are apart by construction."""
        return cls(ids, (), (), np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64), rows)

    @classmethod
    def opaque(cls, ids: np.ndarray, dataset: Any, *unproved: str) -> Items:
        """Return items of which only reading them can tell anything."""
        return cls(ids, unproved, (dataset,), np.zeros(len(ids), dtype=np.int64), np.arange(len(ids)))

    def __getitem__(self, index: np.ndarray) -> Items:
        """Return what is known of some of these items."""
        rows = self.rows
        if rows is not None:
            rows = Rows(rows.tensors, rows.index[index], rows.is_tuple)
        return Items(self.ids[index], self.unproved, self.owners, self.owner[index], self.own[index], rows)


@dataclass
class ItemPlaces:
    """Numbers for the memory and the objects that items lie in, the same number for the same place."""

    numbers: dict[Any, int] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)  # so that no other object gets its id meanwhile

    def ids(self, place: Any, offsets: np.ndarray | range) -> np.ndarray:
        """Return numbers for offsets within a place: negative ones, while addresses in memory are positive."""
        number = self.numbers.setdefault(place, len(self.numbers) + 1)
        return np.asarray(offsets, dtype=np.int64) - number * PLACES

    def of(self, owner: Any, count: int) -> np.ndarray:
        """Return numbers for an object's items."""
        self.held.append(owner)
        return self.ids(id(owner), range(count))


def look(dataset: Any, places: ItemPlaces) -> Items:
    """Look at a dataset's items, through the wrappers of torch, without reading one."""
    kind = type(dataset)
    if kind is TensorDataset:
        return _of_tensors(dataset, dataset.tensors, places)
    if kind is Tensor:
        return _of_tensors(dataset, (dataset,), places)
    if kind in (np.ndarray, np.memmap):
        return _of_array(dataset, places)
    if kind in (list, tuple):
        return _of_list(dataset, places)
    # A class derived from Subset that reads as Subset does is one, too.
    if getattr(kind, "__getitem__", None) is Subset.__getitem__:
        return _of_subset(dataset, places)
    if getattr(kind, "__getitem__", None) is ConcatDataset.__getitem__:
        return _of_parts(dataset, places)
    if kind is StackDataset:
        return _of_stack(dataset, places)
    if is_table(dataset):
        return _of_table(dataset, places)
    if is_of(dataset, "torchvision.datasets", (*OF_ARRAYS, *OF_FILES)):
        return _of_torchvision(dataset, places)
    return Items.opaque(places.of(dataset, len(dataset)), dataset, kind.__name__)


def is_table(dataset: Any) -> bool:
    """Return whether this is a table of Hugging Face's `datasets`, of that very class."""
    return type(dataset).__module__ == "datasets.arrow_dataset" and type(dataset).__name__ == "Dataset"


def is_of(value: Any, module: str, names: Sequence[str]) -> bool:
    """Return whether a value's class is one of a library's own, by name, and not derived from it."""
    library = sys.modules.get(module)
    return library is not None and any(type(value) is getattr(library, name, None) for name in names)


def are_rows_apart(array: Tensor | np.ndarray) -> bool:
    """Return whether no two rows of an array share memory, as sliding windows and expanded rows do."""
    if isinstance(array, Tensor):
        if array.layout is not torch.strided:
            return False
        strides = array.stride()
    else:
        strides = tuple(stride // max(array.itemsize, 1) for stride in array.strides)

    axes = sorted((abs(stride), size) for stride, size in zip(strides, array.shape, strict=True) if size > 1)
    reach = 0  # the place of the last element that the axes so far reach
    for stride, size in axes:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def share_rows(arrays: Sequence[Tensor | np.ndarray]) -> bool:
    """Return whether row i of one array may share memory with another's row j, as in a series beside its next values.

    Each is taken to have its own rows apart, see `are_rows_apart`, or to be one row for all items.
    """
    layouts = [_layout(array) for array in arrays]
    not_empty = [layout for layout in layouts if layout is not None]
    return any(_share(one, other) for one, other in combinations(not_empty, 2))


@dataclass(frozen=True)
class _Layout:
    """Where an array lies: bytes from `start` to before `end`; rows have `width` bytes, `pitch` after each other."""

    device: str
    start: int
    end: int
    pitch: int
    width: int
    strides: tuple[int, ...]


def _layout(array: Tensor | np.ndarray) -> _Layout | None:
    """Return where an array lies; None if it holds nothing."""
    if row_addresses(array) is None:
        return None
    if isinstance(array, Tensor):
        device = str(array.device)
        start = array.data_ptr()
        strides = tuple(stride * array.element_size() for stride in array.stride())
        size = array.element_size()
    else:
        device = "cpu"
        start = int(array.__array_interface__["data"][0])
        strides = array.strides
        size = array.itemsize

    below = sum(min(0, stride) * (length - 1) for stride, length in zip(strides, array.shape, strict=True))
    above = sum(max(0, stride) * (length - 1) for stride, length in zip(strides, array.shape, strict=True))
    width = size + sum(abs(stride) * (length - 1) for stride, length in zip(strides[1:], array.shape[1:], strict=True))
    return _Layout(device, start + below, start + above + size, strides[0], width, strides)


def _share(one: _Layout, other: _Layout) -> bool:
    if one.device != other.device or one.end <= other.start or other.end <= one.start:
        return False
    if one.start == other.start and one.strides == other.strides:
        return one.pitch == 0  # the same cells for the same items
    if one.pitch != other.pitch or one.pitch <= 0:
        return True

    # Columns of one table: both rows i lie within one row of it.
    first = min(one.start, other.start)
    return max(one.start + one.width, other.start + other.width) - first > one.pitch


def row_addresses(array: Tensor | np.ndarray) -> np.ndarray | None:
    """Return where each row of an array begins in memory, int64 [rows]; None if it holds none there."""
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.numel() == 0 or array.ndim == 0 or array.data_ptr() == 0:
            return None
        first = array.data_ptr()
        stride = array.stride(0) * array.element_size()
    else:
        if array.dtype.hasobject or array.size == 0 or array.ndim == 0:
            return None
        first = array.__array_interface__["data"][0]
        stride = array.strides[0]
    return first + stride * np.arange(len(array), dtype=np.int64)


def _of_tensors(dataset: Any, tensors: Sequence[Tensor], places: ItemPlaces) -> Items:
    if not all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
        return Items.opaque(places.of(dataset, len(dataset)), dataset, f"a {type(dataset).__name__} of other classes")

    # Labels may be one number for all, expanded: the widest tensor tells examples apart.
    widest = max(tensors, key=lambda tensor: tensor.numel())
    ids = row_addresses(widest)
    if ids is None:
        ids = places.of(dataset, len(dataset))
    places.held.append(dataset)

    if not all(len(tensor) == 1 or are_rows_apart(tensor) or _is_constant(tensor) for tensor in tensors):
        return Items.opaque(ids, dataset, "a tensor whose rows share memory")
    if share_rows(tensors):
        return Items.opaque(ids, dataset, "tensors that share memory")
    rows = Rows(tuple(tensors), np.arange(len(ids)), type(dataset) is TensorDataset)
    return Items.proved(ids, rows)


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all rows of a tensor are one row, as one label for all is."""
    return tensor.layout is torch.strided and tensor.stride(0) == 0


def _of_array(dataset: np.ndarray, places: ItemPlaces) -> Items:
    ids = row_addresses(dataset)
    if ids is None:
        ids = places.of(dataset, len(dataset))
    places.held.append(dataset)
    if dataset.dtype.hasobject or not are_rows_apart(dataset):
        return Items.opaque(ids, dataset, "an array whose rows share memory")
    return Items.proved(ids)


def _of_list(dataset: Sequence[Any], places: ItemPlaces) -> Items:
    """Return what is known of a list of items. They are proved apart if they are plain values that share no memory."""
    places.held.append(dataset)

    # Python keeps one object for equal numbers and words: only other objects tell that two items are one.
    ids = places.ids(id(dataset), range(len(dataset)))
    is_one_object = [type(item) in PLAIN or (type(item) is tuple and not item) for item in dataset]
    own = np.array([0 if is_one else id(item) for is_one, item in zip(is_one_object, dataset, strict=True)])
    ids = np.where(own > 0, own, ids)

    name = type(dataset).__name__
    spans: list[tuple[int, int, int]] = []
    if not all(_is_plain(item, number, spans) for number, item in enumerate(dataset)):
        return Items.opaque(ids, dataset, f"a {name} of {type(dataset[0]).__name__}")

    # Spans in order of memory: one that begins before an earlier one ends shares memory with it.
    spans.sort()
    reach = 0
    owner = -1
    for start, end, number in spans:
        if start < reach and number != owner:
            return Items.opaque(ids, dataset, f"a {name} of items that share memory")
        if end > reach:
            reach = end
            owner = number
    return Items.proved(ids)


def _is_plain(value: Any, number: int, spans: list[tuple[int, int, int]]) -> bool:
    """Return whether a value is made of numbers, words and arrays; append the memory of these and the item's number."""
    kind = type(value)
    if kind in PLAIN:
        return True

    # Collections, with all that is in them.
    if kind in (dict, list) and value:  # one that is in two items shows each what is in the other
        spans.append((id(value), id(value) + 1, number))
    if kind is dict:
        return all(_is_plain(part, number, spans) for part in value.values())
    if kind in (list, tuple):
        return all(_is_plain(part, number, spans) for part in value)

    # Arrays.
    if kind is Tensor and value.layout is torch.strided:
        if value.numel():
            start = value.data_ptr()
            last = value.numel() - 1
            if not value.is_contiguous():
                last = sum(stride * (size - 1) for stride, size in zip(value.stride(), value.shape, strict=True))
            spans.append((start, start + (last + 1) * value.element_size(), number))
        return True
    if kind is np.ndarray and not value.dtype.hasobject:
        if value.size:
            start, end = np.lib.array_utils.byte_bounds(value)
            spans.append((start, end, number))
        return True
    return kind.__module__.startswith("PIL.") or isinstance(value, np.generic)


def _of_subset(dataset: Any, places: ItemPlaces) -> Items:
    inner = look(dataset.dataset, places)
    index = np.asarray(dataset.indices, dtype=np.int64).reshape(-1)
    index = np.where(index < 0, index + len(inner.ids), index)
    return _named(inner[index], dataset, Subset)


def _of_parts(dataset: Any, places: ItemPlaces) -> Items:
    looks = [look(part, places) for part in dataset.datasets]
    owners: list[Any] = []
    owner = []
    for part in looks:
        owner.append(np.where(part.owner < 0, -1, part.owner + len(owners)))
        owners += part.owners
    unproved = tuple(dict.fromkeys(name for part in looks for name in part.unproved))
    ids = np.concatenate([part.ids for part in looks])
    own = np.concatenate([part.own for part in looks])
    return _named(Items(ids, unproved, tuple(owners), np.concatenate(owner), own), dataset, ConcatDataset)


def _named(items: Items, dataset: Any, kind: type) -> Items:
    """Return items with the name of their dataset among the unproved, if it is not of that very class."""
    if type(dataset) is kind:
        return items
    return replace(items, unproved=(*items.unproved, type(dataset).__name__), rows=None)


def _of_stack(dataset: Any, places: ItemPlaces) -> Items:
    parts = dataset.datasets
    if isinstance(parts, dict):
        parts = parts.values()
    looks = [look(part, places) for part in parts]

    # An example that occurs twice in one part occurs twice in the whole.
    ids = min(looks, key=lambda part: len(np.unique(part.ids))).ids
    unproved = tuple(dict.fromkeys(name for part in looks for name in part.unproved))
    if not unproved and (share_rows(_arrays_in(parts)) or _at_several_places([part.ids for part in looks])):
        unproved = ("parts of a StackDataset that share memory",)
    if unproved:
        return Items.opaque(ids, dataset, *unproved)
    return Items.proved(ids)


def _arrays_in(parts: Iterable[Any]) -> list[Tensor | np.ndarray]:
    """Return the arrays that parts of a dataset are, or are made of."""
    arrays: list[Tensor | np.ndarray] = []
    for part in parts:
        if type(part) is TensorDataset:
            arrays += part.tensors
        elif isinstance(part, Tensor | np.ndarray):
            arrays.append(part)
    return arrays


def _at_several_places(ids: Sequence[np.ndarray]) -> bool:
    """Return whether an example is in other items of one part than of another."""
    for one, other in combinations(ids, 2):
        _, place, other_place = np.intersect1d(one, other, return_indices=True)
        if bool((place != other_place).any()):
            return True
    return False


def _of_table(dataset: Any, places: ItemPlaces) -> Items:
    """Return what is known of a Hugging Face table: rows of Arrow, formatted one by one unless a transform is set."""
    places.held.append(dataset)
    table = dataset.data
    numbers = []
    done = 0
    chunks = table.column(0).chunks if table.num_columns else []
    for chunk in chunks:
        buffers = [buffer.address for buffer in chunk.buffers() if buffer is not None]
        if buffers:  # the same memory, whichever selection or concatenation it stands in
            numbers.append(places.ids(("buffer", buffers[-1]), chunk.offset + np.arange(len(chunk))))
        else:
            numbers.append(places.ids(("table", id(dataset)), done + np.arange(len(chunk))))
        done += len(chunk)

    if numbers:
        ids = np.concatenate(numbers)
    else:
        ids = places.of(dataset, table.num_rows)
    if dataset._indices is not None:
        ids = ids[dataset._indices.column(0).to_numpy().astype(np.int64)]
    if dataset._format_type == "custom":
        return Items.opaque(ids, dataset, "the transform of a Dataset")
    return Items.proved(ids)


def _of_torchvision(dataset: Any, places: ItemPlaces) -> Items:
    library = sys.modules["torchvision.datasets"]
    name = type(dataset).__name__
    places.held.append(dataset)
    unproved = []

    ids: np.ndarray | None
    if is_of(dataset, "torchvision.datasets", OF_FILES):
        ids = np.array([places.ids(("file", str(sample[0])), range(1))[0] for sample in dataset.samples])
        if dataset.loader not in (library.folder.default_loader, library.folder.pil_loader):
            unproved.append(f"the loader of {name}")
    else:
        data = dataset.data
        is_array = type(data) in (Tensor, np.ndarray)
        ids = row_addresses(data) if is_array else None
        if ids is None or not are_rows_apart(data):
            unproved.append(name)

    transforms = [vars(dataset).get(role) for role in ("transform", "target_transform", "transforms")]
    if not all(map(_is_transform_of_an_item, transforms)):
        unproved.append(f"the transform of {name}")
    if ids is None:
        ids = places.of(dataset, len(dataset))
    if unproved:
        return Items.opaque(ids, dataset, *unproved)
    return Items.proved(ids)


def _is_transform_of_an_item(transform: Any) -> bool:
    """Return whether a transform is torchvision's own, down to its parts, and works on one item."""
    kind = type(transform)
    if transform is None or transform in (int, float, str):
        return True
    if kind is nn.Sequential:
        return all(map(_is_transform_of_an_item, transform))
    if kind.__module__ == "torchvision.datasets.vision":  # a pair of two transforms
        return _is_transform_of_an_item(transform.transform) and _is_transform_of_an_item(transform.target_transform)
    if not kind.__module__.startswith("torchvision.transforms.") or kind.__name__ in NOT_OF_AN_ITEM:
        return False
    parts = [part for value in vars(transform).values() for part in _parts(value)]
    return all(_is_transform_of_an_item(part) for part in parts if callable(part) and not isinstance(part, type))


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a transform's attribute that may be transforms."""
    if isinstance(value, list | tuple | nn.ModuleList):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return [value]
