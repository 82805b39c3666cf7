"""What a Python object would do, as a hash: its code, what that code looks up, and every value it holds.

A part that is given as an object has no file to tell its versions apart, and the noise of a run is keyed by what
decides its numbers. So whatever cannot be told apart is refused, and never left out.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

import numpy as np
import torch

from flower_privdec.errors import ScenarioError
from flower_privdec.experiment.model_code import code_of, is_installed

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, np.dtype, np.ufunc, torch.memory_format, torch.layout)
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
)
_LOOKED_UP = ("LOAD_GLOBAL", "LOAD_NAME")
_WRITTEN_FOR_PYTHON = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"})


def tell(value: object) -> bytes:
    """Return a hash of all that decides what an object does.

    Of functions and classes it takes the byte code, defaults, closures, bases and the globals they look up; of modules
    of the user's the source, of installed ones the version; of other objects what pickle would keep. No number of a
    line and no place in memory counts, so that the same code is the same in another process.

    Raises:
        ScenarioError: something in it cannot be told apart (an open file, a generator, a lock, ...), naming it.
    """
    teller = _Teller()
    teller.add(value)
    return teller.digest.digest()


class _Teller:
    """Feeds an object, and all that it leads to, into a hash."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=32)
        self.seen: dict[int, tuple[int, object]] = {}  # objects are kept, so that no other takes their place

    def say(self, *words: object) -> None:
        """Feed words in, each with its length."""
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self.digest.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any) -> None:
        """Feed a value in."""
        if isinstance(value, _PLAIN) and type(value).__module__ == "builtins":
            self.say("plain", type(value).__name__, repr(value))
        elif id(value) in self.seen:
            self.say("again", self.seen[id(value)][0])
        else:
            self.seen[id(value)] = len(self.seen), value
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, _NAMED):
            self.say("named", type(value).__name__, repr(value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.say("array", value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif type(value) in (tuple, list):
            self.say(type(value).__name__, len(value))
            self._add_all(value)
        elif type(value) in (set, frozenset):
            self.say(type(value).__name__, *sorted(tell(member) for member in value))
        elif type(value) in (dict, types.MappingProxyType):
            self.say("dict", len(value))
            self._add_all(part for item in value.items() for part in item)
        elif get_origin(value) is not None:
            self.say("type")
            self._add_all((get_origin(value), get_args(value)))
        else:
            self._add_code(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _add_tensor(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided:
            raise _untold(value)
        data = value.detach().cpu().contiguous().reshape(-1)
        self.say(
            "tensor", value.dtype, tuple(value.shape), value.requires_grad, data.view(torch.uint8).numpy().tobytes()
        )

    def _add_code(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            self.say("module", value.__name__, *_module_code(value.__name__))
        elif isinstance(value, types.CodeType):
            self._add_byte_code(value)
        elif isinstance(value, types.MethodType):
            self.say("method")
            self._add_all((value.__self__, value.__func__))
        elif isinstance(value, staticmethod | classmethod):
            self.say(type(value).__name__)
            self.add(value.__func__)
        elif isinstance(value, property | functools.cached_property):
            self.say(type(value).__name__)
            self._add_all([getattr(value, name, None) for name in ("fget", "fset", "fdel", "func")])
        elif isinstance(value, _BUILT_IN):
            self.say("built in", getattr(value, "__module__", None), value.__qualname__)
            owner = getattr(value, "__self__", None)
            self.add(None if isinstance(owner, types.ModuleType) else owner)
        else:
            self._add_object(value)

    def _add_function(self, value: types.FunctionType) -> None:
        if self._stands_for_itself(value):
            return
        self.say("function")
        self.add(value.__code__)
        self._add_all((value.__defaults__, value.__kwdefaults__, dict(vars(value))))
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not bound yet
                self.say("empty")
        for name in sorted(set(_looked_up(value.__code__))):
            self.say(name)
            if name in value.__globals__:
                self.add(value.__globals__[name])
        for name in sorted(set(_imported(value.__code__))):
            self.say("import", name, *_module_code(name))

    def _add_byte_code(self, code: types.CodeType) -> None:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self.say("code", *counts, code.co_code, code.co_exceptiontable)
        self._add_all((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        self._add_all(code.co_consts)

    def _add_class(self, value: type) -> None:
        if self._stands_for_itself(value):
            return
        self.say("class", value.__qualname__)
        self._add_all((type(value), value.__bases__))
        for name, part in sorted(vars(value).items()):
            if name not in _WRITTEN_FOR_PYTHON and not name.startswith("__pydantic"):
                self.say(name)
                self.add(part)

    def _stands_for_itself(self, value: Any) -> bool:
        """Say the name and the version of what is installed, which cannot change beside them."""
        module = getattr(value, "__module__", None) or ""
        there: Any = sys.modules.get(module)
        for name in value.__qualname__.split("."):
            there = getattr(there, name, None)
        if there is not value or not is_installed(module):
            return False
        self.say("installed", module, value.__qualname__, *_module_code(module))
        return True

    def _add_object(self, value: Any) -> None:
        """Feed in what pickle would keep of an object."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # any object's own method
            raise _untold(value) from error
        self.say("object", type(value).__qualname__)
        if isinstance(reduced, str):
            self.say(reduced)
            return
        make, arguments, state, items, pairs = (*reduced, *(None,) * 5)[:5]
        self._add_all((make, arguments, state, list(items or ()), list(pairs or ())))


def _untold(value: object) -> ScenarioError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ScenarioError(f"it holds an object of type {kind}, whose versions cannot be told apart")


def _module_code(name: str) -> Iterator[bytes]:
    """Yield the source of a module and of all it imports; of what is installed the version."""
    stand_in = type("_StandIn", (), {"__module__": name})
    return code_of([stand_in])


def _looked_up(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that a code, or one inside it, looks up."""
    for inner in _codes(code):
        yield from (step.argval for step in dis.get_instructions(inner) if step.opname in _LOOKED_UP)


def _imported(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        yield from (step.argval for step in dis.get_instructions(inner) if step.opname == "IMPORT_NAME" and step.argval)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
