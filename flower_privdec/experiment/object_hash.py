"""A hash of what a Python object does, for parts that were given as objects and lie in no module.

It names a part, so that a run is not continued with another, and a finished cell of a study is found again. It protects
nothing: a run with a user's own code has a salt in its keys (`run_key`).

The hash is of a walk through everything that the object refers to. Each kind of object is described by a list of parts,
which are walked in turn, and whose descriptions end in plain values:

    a function      its byte code, defaults, attributes and closure, and the globals and modules that it names
    a class         its bases and attributes
    a module        its source; an installed module, class or function its name and version
    a container     its members
    any other       what pickle would save: `__reduce_ex__`

Neither line numbers nor addresses count, so that the same code has the same hash in another process. If in doubt an
object has no hash (`ScenarioError`), and its part then counts as different from all others.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment.checkpoint import numbers_of
from flower_privdec.experiment.source_code import is_installed, sources_of

PROTOCOL = 3  # of pickle: `__reduce_ex__(5)` would return large arrays as buffers, which are not parts to walk through

PLAIN = (type(None), type(...), type(NotImplemented), bool, int, float, complex, str)
NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout, np.dtype, np.ufunc)
BUILT_IN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
)
WRAPPED = {  # what wraps functions in a class, and the attributes that hold them
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
}
LOOKED_UP = ("LOAD_GLOBAL", "LOAD_NAME")  # byte code that looks a name up among the globals
WRITTEN_BY_PYTHON = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"}

Description = tuple[str, Iterable[object]]  # a kind and its parts


def object_hash(value: object) -> bytes:
    """Return a hash of all that decides what an object does, 32 bytes.

    Raises:
        ScenarioError: something in it cannot be hashed (an open file, a generator, a lock, ...); naming it.
    """
    walk = _Walk()
    try:
        walk.visit(value)
    except RecursionError as error:
        raise _unhashable(value) from error
    return walk.digest()


class _Walk:
    """A walk through an object, which hashes each thing in it when it comes to it first."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        # The place of each object in the walk, by its address. It keeps the object too: the address of one that was
        # made for its description could otherwise be used again by another.
        self._seen: dict[int, tuple[int, object]] = {}

    def digest(self) -> bytes:
        """Return the hash of all that was visited."""
        return self._hash.digest()

    def visit(self, value: object) -> None:
        """Hash an object and all that it refers to."""
        # Plain values are equal whether or not they are one object.
        if type(value) in PLAIN:
            self._write(type(value).__name__, repr(value).encode())
            return
        if type(value) is bytes:
            self._write("bytes", value)
            return

        if id(value) in self._seen:
            place, _ = self._seen[id(value)]
            self._write("again", str(place).encode())
            return
        self._seen[id(value)] = (len(self._seen), value)

        kind, parts = _described(value)
        parts = list(parts)
        self._write(kind, str(len(parts)).encode())
        for part in parts:
            self.visit(part)

    def _write(self, kind: str, content: bytes) -> None:
        # Lengths first, so that no two walks are the same bytes.
        for piece in (kind.encode(), content):
            self._hash.update(len(piece).to_bytes(8, "little"))
            self._hash.update(piece)


def _described(value: Any) -> Description:
    """Return what kind of thing an object is, and the parts that decide what it does."""
    kind = type(value)

    if kind is tuple or kind is list:
        return kind.__name__, value
    if kind is dict or kind is types.MappingProxyType:
        return "dict", [part for item in value.items() for part in item]
    if kind is set or kind is frozenset:
        # In an order that is the same in each process: that of their hashes.
        return kind.__name__, sorted(object_hash(member) for member in value)

    if isinstance(value, types.FunctionType | type) and _is_of_installed_module(value):
        return "installed", (value.__module__, value.__qualname__, *sources_of({value.__module__}))
    if isinstance(value, types.FunctionType):
        return "function", _parts_of_function(value)
    if isinstance(value, type):
        return "class", _parts_of_class(value)
    if isinstance(value, types.ModuleType):
        return "module", (value.__name__, *sources_of({value.__name__}))
    if isinstance(value, types.CodeType):
        return "code", _parts_of_code(value)
    if get_origin(value) is not None:  # list[int]
        return "type", (get_origin(value), *get_args(value))

    for wrapper, names in WRAPPED.items():
        if isinstance(value, wrapper):
            return wrapper.__name__, [getattr(value, name) for name in names]
    if isinstance(value, BUILT_IN):
        owner = getattr(value, "__self__", None)  # of a bound method: the object that it belongs to
        if isinstance(owner, types.ModuleType):
            owner = None  # of a function: its module, which __module__ names already
        return "built in", (getattr(value, "__module__", None), value.__qualname__, owner)

    if isinstance(value, NAMED):
        return "named", (kind.__name__, repr(value))
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _unhashable(value)
        content = bytes(numbers_of(value))
        return "tensor", (str(value.dtype), tuple(value.shape), value.requires_grad, content)
    return _as_pickle_saves(value)


def _as_pickle_saves(value: Any) -> Description:
    """Describe an object by what pickle would save of it."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = value.__reduce_ex__(PROTOCOL) if reduce is None else reduce(value)
    except Exception as error:  # any object's own method
        raise _unhashable(value) from error

    if isinstance(reduced, str):
        # Pickle saves a name only. A wrapper such as functools.lru_cache has what it wraps among its attributes.
        return "name", (type(value).__qualname__, reduced, dict(getattr(value, "__dict__", {})))

    # The function that makes it, its arguments, its state, and iterators over its members and items. The last three
    # may be left out.
    padded = (*reduced, None, None, None)
    function, arguments, state, members, items = padded[:5]
    return "object", (function, arguments, state, list(members or ()), list(items or ()))


def _parts_of_class(value: type) -> list[object]:
    parts: list[object] = [value.__qualname__, type(value), value.__bases__]
    for name, part in sorted(vars(value).items()):
        if name not in WRITTEN_BY_PYTHON and not name.startswith("__pydantic"):
            parts += [name, part]
    return parts


def _parts_of_code(code: types.CodeType) -> list[object]:
    """Return what byte code does, without its file, its name and its lines."""
    return [
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        *(code.co_code, code.co_exceptiontable),
        *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        list(code.co_consts),
    ]


def _parts_of_function(value: types.FunctionType) -> list[object]:
    """Return what a function consists of, and the globals and modules that it and the functions inside it name."""
    parts: list[object] = [value.__code__, value.__defaults__, value.__kwdefaults__, dict(vars(value))]
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # not bound yet
            parts.append(cell.cell_contents)

    codes = [value.__code__]
    globals_named = set[str]()
    imported = set[str]()
    for code in codes:  # the list grows on the way, by the code of inner functions
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in LOOKED_UP:
                globals_named.add(step.argval)
            elif step.opname == "IMPORT_NAME" and step.argval:
                imported.add(step.argval)

    for name in sorted(globals_named):
        parts.append(name)
        if name in value.__globals__:  # else a built-in, or defined later
            parts.append(value.__globals__[name])
    for name in sorted(imported):
        parts += ["import", name, *sources_of({name})]
    return parts


def _is_of_installed_module(value: Any) -> bool:
    """Return whether an installed module has a class or function under the name that it says it has."""
    module = getattr(value, "__module__", None) or ""
    looked_up: Any = sys.modules.get(module)
    for name in value.__qualname__.split("."):
        looked_up = getattr(looked_up, name, None)
    return looked_up is value and is_installed(module)


def _unhashable(value: object) -> ScenarioError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ScenarioError(f"it holds an object of type {kind}, whose content cannot be hashed", code="api.not-hashable")
