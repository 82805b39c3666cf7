"""Copies of a user's dataset in which one example stands in the place of all, to see whether an item notices.

An item that reads only its own example is the same in such a copy. One that reads others (pairs, mixup, scaling by the
data's own mean) changes. The copy reaches what a dataset holds: arrays, lists, tables, other datasets, objects and the
functions that these call, with what such functions close over and the globals of their module. Datasets within are
watched (`ReadWatch`), since an item may read them in another order than its own.

The copy is as shallow as it can be: `_of` returns the value itself if there is nothing to replace in it, and what
cannot be copied stays as it is. So a copy may miss something, and never breaks the dataset.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_privdec.common.errors import RAISED_BY_USERS
from flower_privdec.training_loop.example_fetch import copied
from flower_privdec.training_loop.separate_items import PLAIN, is_table

DEPTH = 8  # of objects within objects that are copied
LONG = 1_000  # of longer lists only the list is copied, and not what is in it
LIBRARIES = {"torch", "numpy", "pandas", "pyarrow", "polars", "PIL", "datasets", "torchvision", "scipy", "sklearn"}
LIBRARIES |= {"transformers", "tokenizers", "h5py", "zarr", "lmdb", "flwr", "flwr_datasets"}
LIBRARIES |= sys.stdlib_module_names - {"__main__"}
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HOLDERS = (nn.Module, Dataset, types.SimpleNamespace)  # classes of libraries that hold what a user gives them
Read = Callable[[Any], Any]


class StandIn:
    """A copy of a dataset, or of a function that may read one.

    Attributes:
        copy: a copy of the given object.
        watched: datasets within, by the order in which they were met.
        lists: lists of as many tuples, lists or dicts, which may be the items themselves.
        integers: arrays of as many whole numbers as the dataset has items, which may say what each reads.
    """

    def __init__(self, subject: Any, rows: int, row: int | None = None) -> None:
        """Copy a subject.

        Args:
            rows: how many items the dataset has.
            row: if given, everything with as many rows holds this one in all of them, and datasets within are watched.
        """
        self._rows = rows
        self._row = row
        self._top = subject
        self._done: dict[int, tuple[Any, Any]] = {}
        self._generators: list[Any] = []
        self.watched: list[ReadWatch] = []
        self.integers: list[np.ndarray] = []
        self.lists: list[Any] = []
        self.copy = self._of(subject, DEPTH)

    def read(self, read: Read, seed: int) -> tuple[Any, bool]:
        """Return what is read under a seed, and whether random numbers were drawn; raises what reading raises."""
        for watch in self.watched:
            watch.read.clear()
        with same_random_numbers(seed), warnings.catch_warnings():
            # Of arrays that may not be written to, as one row in the place of all.
            warnings.simplefilter("ignore")
            for generator in self._generators:
                _reseed(generator, seed)
            before = self._states()
            item = copied(read(self.copy))
            return item, self._states() != before

    def _states(self) -> list[Any]:
        """Return the states of all random generators that can be seeded here."""
        legacy: Any = np.random.get_state()  # noqa: NPY002
        shared = [random.getstate(), torch.get_rng_state().numpy().tobytes(), legacy[1].tobytes(), legacy[2]]
        return [*shared, *map(_state, self._generators)]

    def _of(self, value: Any, depth: int) -> Any:
        """Return the copy of a value; the value itself if it holds nothing that could be replaced."""
        is_atom = isinstance(value, (*PLAIN, type, types.ModuleType, types.BuiltinFunctionType))
        if depth == 0 or is_atom:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = (value, value)  # where a circle of references ends
            try:
                new = self._new(value, depth - 1)
            except RAISED_BY_USERS:  # a class whose objects cannot be copied or measured: it stays as it is
                new = value
            self._done[id(value)] = (value, new)
        return self._done[id(value)][1]

    def _new(self, value: Any, depth: int) -> Any:
        """Return the copy of a value, by its kind; the order of the kinds matters, for some are several."""
        if isinstance(value, GENERATORS):
            return self._generator(value)
        if value is not self._top and is_dataset(value) and self._row is not None:
            return self._watched(value, depth)
        if is_table(value):
            return self._table(value, depth)
        is_number = isinstance(value, Tensor | np.ndarray) and value.ndim == 0
        if isinstance(value, Sized) and not is_number:
            self._note_integers(value)
            one_row = self._one_row(value)
            if one_row is not None:
                return one_row
        if isinstance(value, Tensor | np.ndarray):
            return value

        # Collections, with copies of what is in them unless they are long.
        if type(value) in (list, tuple, set):
            if len(value) > LONG:
                return type(value)(value)
            return type(value)([self._of(part, depth) for part in value])
        if type(value) is dict:
            if len(value) > LONG:
                return dict(value)
            return {key: self._of(part, depth) for key, part in value.items()}

        # What can be called, and objects.
        if isinstance(value, functools.partial):
            arguments = [self._of(part, depth) for part in value.args]
            return functools.partial(self._of(value.func, depth), *arguments, **self._of(value.keywords, depth))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._of(value.__self__, depth))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if type(value) in (property, staticmethod, classmethod):
            function = value.fget if isinstance(value, property) else value.__func__
            return type(value)(self._of(function, depth))
        return self._object(value, depth)

    def _generator(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            generator: Any = torch.Generator(value.device).set_state(value.get_state())
        else:
            try:
                generator = copy.deepcopy(value)
            except RAISED_BY_USERS:  # one of the operating system's entropy, which nothing repeats
                return value
        self._generators.append(generator)
        return generator

    def _note_integers(self, value: Any) -> None:
        if len(value) != self._rows or not isinstance(value, Tensor | np.ndarray | list | tuple | range):
            return
        if isinstance(value, list | tuple) and not all(type(part) is int for part in value):
            if value is not self._top and all(isinstance(part, tuple | list | dict) for part in value):
                self.lists.append(value)
            return

        array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
        if array.ndim == 1 and array.dtype.kind in "iu":
            self.integers.append(array.astype(np.int64))

    def _one_row(self, value: Any) -> Any:
        """Return a value of as many rows as the dataset with one of them in all; None if it is not of that kind."""
        row = self._row
        rows = self._rows
        if row is None or len(value) != rows:
            return None

        if isinstance(value, Tensor) and value.layout is torch.strided and value.ndim:
            return value[row : row + 1].expand_as(value)
        if isinstance(value, np.ndarray) and value.ndim:
            return np.broadcast_to(value[row : row + 1], value.shape)
        if hasattr(value, "iloc"):  # a table or a column of pandas
            return value.iloc[[row] * rows].set_axis(value.index)
        if type(value).__module__.startswith("pyarrow"):
            return value.take([row] * rows)
        if type(value).__module__.startswith("polars"):
            return value[[row] * rows]
        if type(value) in (list, tuple):
            # A pair of arrays in a dataset of two items is not a list of two examples.
            is_of_arrays = any(
                isinstance(part, Tensor | np.ndarray) and part.ndim and len(part) == rows for part in value
            )
            if is_of_arrays:
                return None
            return type(value)([value[row]] * rows)
        if type(value) is dict and row in value:
            return dict.fromkeys(value, value[row])
        return None

    def _watched(self, value: Any, depth: int) -> Any:
        """Return what takes the place of a dataset within: its items are its own, but noted; all else has one row."""
        if is_table(value):
            behind = self._table(value, depth)
        else:
            behind = self._object(value, depth)
        within = StandIn(value, len(value))
        self._generators += within._generators
        watch = ReadWatch(value, within.copy, behind)
        self.watched.append(watch)
        return watch.stand_in

    def _table(self, value: Any, depth: int) -> Any:
        """Return a copy of a Hugging Face table, with a copy of its transform."""
        if self._row is not None and len(value) == self._rows:
            new = value.select([self._row] * self._rows)
        else:
            new = copy.copy(value)
        new._format_kwargs = self._of(value._format_kwargs, depth)
        return new

    def _function(self, value: types.FunctionType, depth: int) -> Any:
        """Return a function that reads copies of what it closes over, of its defaults, and of globals that it names."""
        if is_of_library(value):
            return value
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(types.CellType(self._of(cell.cell_contents, depth)))
            except ValueError:  # an empty one
                cells.append(cell)

        names = {name for code in _codes(value.__code__) for name in code.co_names}
        globals_of = value.__globals__
        named = {name: self._of(globals_of[name], depth) for name in names & globals_of.keys()}
        defaults = self._of(value.__defaults__, depth)
        globals_of_copy = {**globals_of, **named}
        closure = tuple(cells) or None
        function = types.FunctionType(value.__code__, globals_of_copy, value.__name__, defaults, closure)
        function.__kwdefaults__ = self._of(value.__kwdefaults__, depth)
        return function

    def _object(self, value: Any, depth: int) -> Any:
        """Return a copy of an object with copies of its attributes; the object itself if it cannot be copied."""
        if is_of_library(type(value)) and not isinstance(value, HOLDERS):
            return value
        try:
            new = copy.copy(value)
        except RAISED_BY_USERS:  # an open file, a lock
            return value
        if new is value or type(new) is not type(value):
            return value
        self._done[id(value)] = (value, new)

        attributes = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            for name in _slots_of(kind):
                if hasattr(value, name):
                    attributes[name] = getattr(value, name)

        for name, part in attributes.items():
            copied_part = self._of(part, depth)
            if copied_part is not part:
                object.__setattr__(new, name, copied_part)
        self._set_class(new, depth)
        return new

    def _set_class(self, new: Any, depth: int) -> None:
        """Let an object's methods, if its class is a user's, read copies of globals and of class attributes.

        The object gets a class derived from its own, in which these are replaced.
        """
        kind = type(new)
        of_users = [base for base in kind.__mro__ if not is_of_library(base)]
        attributes: dict[str, Any] = {}
        for base in reversed(of_users):
            for name, value in vars(base).items():
                if name.startswith("__") and name not in ("__getitem__", "__call__"):
                    continue
                copied_part = self._of(value, depth)
                if copied_part is not value:
                    attributes[name] = copied_part
        if not attributes:
            return

        body = {**attributes, "__module__": kind.__module__, "__slots__": ()}
        try:
            new.__class__ = type(kind.__name__, (kind,), body)
        except TypeError:  # a class that may not be derived from, or with another layout
            return


class ReadWatch:
    """Notes which items of a dataset are read.

    Attributes:
        dataset: the dataset.
        stand_in: takes its place: an object of its class, whose items are the dataset's.
        read: the indices of items that were read.
    """

    def __init__(self, dataset: Any, items: Any, behind: Any) -> None:
        """Watch a dataset.

        Args:
            items: a copy of it, whose items are read.
            behind: a copy, whose attributes, columns and methods the stand-in has.
        """
        self.dataset = dataset
        self.read: set[int] = set()
        count = len(dataset)

        def getitem(stand_in: Any, index: Any) -> Any:
            if isinstance(index, str):  # a column, of all rows
                return behind[index]
            if isinstance(index, slice):
                self.read.update(range(*index.indices(count)))
            elif isinstance(index, list | tuple | np.ndarray | Tensor | int | np.integer | range):
                places = np.asarray(index).reshape(-1)
                if places.dtype == bool:
                    places = np.flatnonzero(places)
                self.read.update(int(place) % count for place in places)
            return items[index]

        def getitems(stand_in: Any, indices: Any) -> Any:
            return [stand_in[index] for index in indices]

        def iterate(stand_in: Any) -> Iterator[Any]:
            return (stand_in[index] for index in range(count))

        methods: dict[str, Any] = {"__getitem__": getitem, "__iter__": iterate, "__len__": lambda stand_in: count}
        if hasattr(dataset, "__getitems__"):
            methods["__getitems__"] = getitems
        try:
            self.stand_in = copy.copy(behind)
            kind = type(self.stand_in)
            self.stand_in.__class__ = type(kind.__name__, (kind,), methods)
        except RAISED_BY_USERS:  # a class that cannot be copied or derived from
            delegate = {"__getattr__": lambda stand_in, name: getattr(behind, name)}
            self.stand_in = type(type(dataset).__name__, (), {**methods, **delegate})()


def is_dataset(value: Any) -> bool:
    """Return whether a value is a dataset that can be watched, rather than an array or a collection."""
    if is_table(value):
        return True
    has_items = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    if not has_items or isinstance(value, dict | list | tuple | str | Tensor | np.ndarray):
        return False
    return isinstance(value, Dataset) or not is_of_library(type(value))


def is_of_library(value: Any) -> bool:
    """Return whether a class or function is a library's, and holds nothing of a user's."""
    module = getattr(value, "__module__", None) or ""
    library, _, _ = module.partition(".")
    return library in LIBRARIES


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        legacy: Any = generator.get_state()
        return legacy[1].tobytes(), legacy[2]
    return generator.getstate()


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)


@contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Draw a seed's random numbers inside, and leave the generators as they were."""
    python = random.getstate()
    legacy = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond for each kind of device
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
