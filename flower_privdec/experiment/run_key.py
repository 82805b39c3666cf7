"""The key of a run: a hash of all that determines its numbers, from which its noise and batches are drawn.

Two runs that differ in anything (algorithm, budget, seed, one pixel of some peer's data, an edge of a graph's file,
device, versions, how sums are rounded) have different keys and share no draw, so that no noise cancels between them;
the same run has the same keys and gives the same bits.

A key is made of what was built: the edges of graphs, tensors, examples. What code of a user's own computes cannot be
known: it may read a file whenever it is called. A run with such code has a random *salt* in its keys, so that no other
run shares its noise. The salt is kept nowhere, for the code of a resumed run, or of a copy of its folder, may read
other files. What can be seen of the code is in the key too, but only to refuse a run that would go on with other code.
"""

from __future__ import annotations

import ast
import copyreg
import dis
import functools
import hashlib
import inspect
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec import __version__
from flower_privdec.common.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.common.user_code import Given
from flower_privdec.data import Examples, PublicSet
from flower_privdec.experiment.checkpoint import numbers_of
from flower_privdec.graph.topology import CompleteTopology, RandomEdges, StaticTopology, Topology
from flower_privdec.privacy.noise import has_triton
from flower_privdec.rows.sparse_rows import Features, SparseRows

KEY_BYTES = 32
SEEDED = "fast"  # names the noise stream of simulations in their keys: another name would draw other numbers


def environment(source: str, device: torch.device) -> str:
    """Return what beside the scenario and the data decides the numbers: noise source, device and versions.

    Args:
        source: SEEDED, or of the operating system `system` or `exact`.
    """
    parts = [f"flower-privdec {__version__}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    if source == SEEDED:
        compiler = "triton" if device.type == "cuda" and has_triton() else "numba"
        parts.append(f"{compiler} {installed_version(compiler)}")
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return ", ".join([source, where, *parts])


def shared_secret(
    scenario: str,
    environment: str,
    public: PublicSet,
    initial: Tensor,
    module: nn.Module,
    graphs: Iterable[bytes],
    parts: Sequence[object],
) -> bytes:
    """Return a hash of what all peers of a run have in common.

    Args:
        scenario: the hash of what of the scenario decides the numbers.
        environment: see the function of that name.
        public: the test set, and what of it is for validation, which some algorithms look at.
        module, initial: the model, and its parameters before round 0, [d].
        graphs: the edges on which models are mixed, and those of pairs that share secrets, see `edges_of`.
        parts: what else of the run a user may have written: classes, functions, objects of any class, and what was
            given in Python; of data that was given each peer hashes its own.
    """
    sets = [public] if public.validation is None else [public, public.validation]
    tested = b"".join(fingerprint(dataset.x, dataset.y) for dataset in sets)
    model = hashlib.blake2b(numbers_of(initial), digest_size=KEY_BYTES).digest()
    named = [part for part in parts if not isinstance(part, Given)]
    contents = [part.content for part in parts if isinstance(part, Given) and part.tell is not None]
    code = [*code_of([*module.modules(), *named]), *contents]
    drawn_on = _hash(*graphs)
    return _hash(scenario.encode(), environment.encode(), tested, model, drawn_on, *code, *held_by(module))


def edges_of(topology: Topology | None) -> bytes:
    """Return what a graph is: its kind, and the edges of all its rounds together.

    Which of them a round uses follows from the scenario. Those of a complete graph follow from the number of peers, and
    may be too many to list.
    """
    if topology is None:
        return b""
    kind = f"{type(topology).__name__} {topology.name} {topology.directed} ".encode()
    graph = topology.supergraph if isinstance(topology, RandomEdges) else topology
    if isinstance(graph, CompleteTopology):
        return kind
    return kind + np.ascontiguousarray(graph.support(), dtype=np.int64).tobytes()


def is_known_by_its_edges(topology: Topology | None) -> bool:
    """Return whether `edges_of` tells a graph from all others that a user's own function could return."""
    return topology is None or type(topology) in (StaticTopology, CompleteTopology)


def salted(keys: Mapping[int, bytes], salt: str) -> dict[int, bytes]:
    """Return keys that no run with another salt has."""
    return {peer: _hash(key, salt.encode()) for peer, key in keys.items()}


def fingerprint(x: Features, y: Tensor) -> bytes:
    """Return the BLAKE2b hash of examples in their order; private, for it confirms a guess of all of them."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    compressed = isinstance(x, SparseRows)
    arrays = [torch.from_numpy(part) for part in x.content()] if isinstance(x, SparseRows) else [x]

    # Each array goes after its type and shape, so that no two sets of arrays are the same bytes.
    digest.update(repr((tuple(x.shape), compressed)).encode())
    for array in (*arrays, y):
        digest.update(f"{array.dtype} {tuple(array.shape)} ".encode())
        digest.update(numbers_of(array))
    return digest.digest()


def content_of(arrays: Iterable[np.ndarray]) -> bytes:
    """Return a hash of arrays, of what type and shape they are and what they hold."""
    return tensors_hash({str(place): torch.from_numpy(array) for place, array in enumerate(arrays)}).encode()


def fingerprints(examples: Examples, peers: np.ndarray) -> dict[int, bytes]:
    """Return the fingerprint of each peer's examples, by global id."""
    prints = {}
    for peer, rows in zip(peers.tolist(), examples.parts, strict=True):
        prints[peer] = fingerprint(*examples_of(examples, rows))
    return prints


def all_data(prints: Mapping[int, bytes]) -> bytes:
    """Return a hash of the data of all peers of a simulation, from their fingerprints.

    Privacy: a peer's later steps begin at what others sent it, so that other data of another peer change its numbers.
    """
    return _hash(*(prints[peer] for peer in sorted(prints)))


def own_keys(shared: bytes, prints: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the key of each peer in this run, from which its noise and its batches are drawn.

    Args:
        shared: see `shared_secret`; in a simulation with `all_data`.
        prints: the fingerprint of each peer's examples, by global id.
    """
    return {peer: _hash(shared, str(peer).encode(), own) for peer, own in prints.items()}


def partition_name(prints: Mapping[int, bytes], secret: bytes | None) -> str:
    """Return the name of who holds which examples, 32 hexadecimal digits: the same in all runs of this partition.

    Args:
        prints: see `own_keys`.
        secret: of a deployed peer, without which no one can confirm a guess of its examples by the name.
    """
    parts = [str(peer).encode() + b" " + prints[peer] for peer in sorted(prints)]
    return _hash(b"partition", secret or b"", *parts).hex()[:32]


def data_id(public: PublicSet, initial: Tensor, examples: Examples) -> str:
    """Return what a run without privacy is called: a hash of its data and of the model before round 0.

    It confirms a guess of all examples at once, and stays with the checkpoints of those who have them.
    """
    sets = [public] if public.validation is None else [public, public.validation]
    model = bytes(numbers_of(initial))
    parts = [fingerprint(*examples_of(examples, rows)) for rows in examples.parts]
    return _hash(b"data", model, *(fingerprint(dataset.x, dataset.y) for dataset in sets), *parts).hex()[:32]


def examples_of(examples: Examples, rows: np.ndarray) -> tuple[Features, Tensor]:
    """Return one peer's examples, in their order."""
    chosen = torch.from_numpy(rows)
    return examples.x[chosen], examples.y[chosen]


def run_id(keys: Mapping[int, bytes]) -> str:
    """Return the name of a run of some peers, 32 hexadecimal digits: a hash that does not reveal their keys."""
    return _hash(b"run", *(keys[peer] for peer in sorted(keys))).hex()[:32]


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


SHIPPED = ("torch", "flower_privdec", "builtins")  # packages that stand in the environment with their versions
_STANDARD = Path(os.__file__).resolve().parent  # the folder of the standard library
# CPython 3.11 counts the recursion of `ast.parse` per interpreter: two threads that parse at once may fail.
_PARSING = threading.Lock()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def code_of(parts: Iterable[object]) -> Iterator[bytes]:
    """Return the source files of classes and functions by name: theirs, their bases', and all that these import.

    Of what is installed the version stands for the code, and of what was compiled or typed in the name. What a file
    imports by a computed name is not seen.

    Args:
        parts: classes, functions, or objects of any class.
    """
    written = [part if inspect.isclass(part) or inspect.isroutine(part) else type(part) for part in parts]
    bases = [base for part in written for base in (inspect.getmro(part) if inspect.isclass(part) else (part,))]
    return _sources({str(base.__module__) for base in bases})


def _sources(waiting: set[str]) -> Iterator[bytes]:
    """Yield the source of each of some modules and of all they import; of what is installed the version."""
    visited = set(waiting)
    while waiting:
        name = min(waiting)
        waiting.discard(name)
        package = name.partition(".")[0]
        if package in SHIPPED:
            continue
        path = _file(package)
        if is_installed(package):
            yield f"{package} {installed_version(package)}".encode()
            continue
        path = path if name == package else _file(name)
        if path is None:
            yield name.encode()
            continue
        source = path.read_bytes()
        yield name.encode() + source
        imports = _imported(source, name if path.name == "__init__.py" else name.rpartition(".")[0]) - visited
        waiting = waiting | imports
        visited = visited | imports


def is_installed(module: str) -> bool:
    """Return whether a module is identified by a version: shipped with this package, compiled in, or installed.

    Installed is what lies beside the facts of a distribution, in whichever folder of `sys.path`: of the interpreter, of
    a user, of another environment. What is installed in editable mode lies elsewhere, and its source counts.
    """
    package = module.partition(".")[0]
    path = _file(package)
    if package in SHIPPED or package in sys.builtin_module_names:
        return True
    if path is None:
        return False
    folder = path.parents[1] if path.name == "__init__.py" else path.parent
    return path.is_relative_to(_STANDARD) or _has_distributions(folder)


@functools.cache
def _has_distributions(folder: Path) -> bool:
    return any(folder.glob("*.dist-info/METADATA"))


def _file(name: str) -> Path | None:
    """Return the file a Python module is in; None where there is no such module or no source."""
    try:
        spec = None if name in sys.modules else find_spec(name)
    except RAISED_BY_USERS:  # to look into a package imports it
        spec = None
    origin = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec else None) or ""
    return Path(origin).resolve() if origin.endswith(".py") and Path(origin).is_file() else None


@functools.lru_cache(maxsize=1024)
def _imported(source: bytes, package: str) -> frozenset[str]:
    """Return the names of all modules that a source may import, also inside functions."""
    try:
        with _PARSING:
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # one that is named somewhere, and imported never
        return frozenset()
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, package) if node.level else base
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def held_by(module: nn.Module) -> Iterator[bytes]:
    """Yield what modules hold beside trained parameters: numbers, strings, tensors and constants, by their names."""
    for path, part in module.named_modules():
        frozen = {name: p.detach() for name, p in part.named_parameters(recurse=False) if not p.requires_grad}
        held = {**vars(part), **dict(part.named_buffers(recurse=False)), **frozen}
        yield f"{path} {type(part).__module__}.{type(part).__qualname__}".encode()
        for name, value in sorted(held.items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                if value.layout is torch.strided:
                    content = f"{value.dtype} {tuple(value.shape)}".encode()
                    yield name.encode() + content + hashlib.sha256(numbers_of(value)).digest()
            elif all(isinstance(part, _PLAIN) for part in (value if isinstance(value, tuple | list) else (value,))):
                yield name.encode() + repr(value).encode()


def constants_hash(module: nn.Module) -> str:
    """Return a hash of a model's frozen parameters and buffers, which all peers must have alike; "" where it has none.

    The initial parameters that are trained follow from the scenario, and constants may come from a file of each peer's.
    """
    constants = {name: p for name, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())
    return tensors_hash(constants) if constants else ""


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(numbers_of(tensor))
    return digest.hexdigest()


_NAMED = (torch.dtype, torch.device, np.dtype, np.ufunc, torch.memory_format, torch.layout)
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
_WRAPPED = ("__func__", "fget", "fset", "fdel", "func")
_LOOKED_UP = ("LOAD_GLOBAL", "LOAD_NAME")
_WRITTEN_FOR_PYTHON = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"})


def object_hash(value: object) -> bytes:
    """Return a hash of all that decides what an object does: of what pickle would save of it, but for code.

    Of functions and classes it takes the byte code, defaults, closures, bases and the globals they look up; of modules
    of the user's the source, of installed ones the version. No line number and no address counts, so that the same
    code is the same in another process.

    Raises:
        ScenarioError: something in it cannot be hashed (an open file, a generator, a lock, ...), naming it.
    """
    digest = hashlib.blake2b(digest_size=32)
    _ObjectPickler(types.SimpleNamespace(write=digest.update), protocol=3).dump(value)
    return digest.digest()


def _hashed(*_parts: object) -> None:
    """Stand for the function that makes an object, in a pickle that is never read back."""


class _ObjectPickler(pickle._Pickler):  # of Python: that of C knows a text by its address, and sets by their order
    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def memoize(self, obj: Any) -> None:
        """Remember an object that was saved, but no text: equal ones need not be one."""
        if not isinstance(obj, str | bytes):
            super().memoize(obj)  # type: ignore[misc]

    def save_set(self, obj: Iterable[object]) -> None:
        """Save a set regardless of its order."""
        self.save((type(obj).__name__, *sorted(object_hash(member) for member in obj)))  # type: ignore[attr-defined]

    dispatch[set] = dispatch[frozenset] = save_set

    def reducer_override(self, value: Any) -> Any:
        """Return what to save of an object; NotImplemented for what pickle saves by its content itself."""
        if value is _hashed:
            return NotImplemented
        if isinstance(value, types.FunctionType | type) and _stands_where_it_says(value):
            return _hashed, ("installed", value.__module__, value.__qualname__, *_sources({value.__module__}))
        if isinstance(value, types.FunctionType):
            return _hashed, ("function",), _function_parts(value)
        if isinstance(value, type):
            parts = {name: part for name, part in sorted(vars(value).items()) if not name.startswith("__pydantic")}
            own = [(name, part) for name, part in parts.items() if name not in _WRITTEN_FOR_PYTHON]
            return _hashed, ("class", value.__qualname__), (type(value), value.__bases__, own)
        if isinstance(value, types.ModuleType):
            return _hashed, ("module", value.__name__, *_sources({value.__name__}))
        if isinstance(value, types.CodeType):
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            return _hashed, ("code", *counts, value.co_code, value.co_exceptiontable, *names, list(value.co_consts))
        if isinstance(value, _WRAPPERS):
            return _hashed, (type(value).__name__,), [getattr(value, name, None) for name in _WRAPPED]
        if isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            owner = None if isinstance(owner, types.ModuleType) else owner
            return _hashed, ("built in", getattr(value, "__module__", None), value.__qualname__, owner)
        if isinstance(value, _NAMED):
            return _hashed, ("named", type(value).__name__, repr(value))
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise _unhashable(value)
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _hashed, ("tensor", str(value.dtype), tuple(value.shape), value.requires_grad, content)
        if isinstance(value, types.MappingProxyType):
            return _hashed, ("dict", dict(value))
        if get_origin(value) is not None:
            return _hashed, ("type", get_origin(value), get_args(value))
        if type(value) in self.dispatch or type(value) in copyreg.dispatch_table:
            return NotImplemented
        try:
            reduced = value.__reduce_ex__(3)
        except Exception as error:  # any object's own method
            raise _unhashable(value) from error
        return (_hashed, (type(value).__qualname__, reduced)) if isinstance(reduced, str) else reduced


def _function_parts(value: types.FunctionType) -> list[object]:
    """Return what a function consists of, its globals and the modules that it imports."""
    parts: list[object] = [value.__code__, value.__defaults__, value.__kwdefaults__, dict(vars(value))]
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # not bound yet
            parts.append(cell.cell_contents)
    codes = [value.__code__]
    steps = list[dis.Instruction]()
    for code in codes:  # and those inside it
        steps += dis.get_instructions(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for name in sorted({step.argval for step in steps if step.opname in _LOOKED_UP}):
        parts += [name, value.__globals__[name]] if name in value.__globals__ else [name]
    for name in sorted({step.argval for step in steps if step.opname == "IMPORT_NAME" and step.argval}):
        parts += ["import", name, *_sources({name})]
    return parts


def _stands_where_it_says(value: Any) -> bool:
    """Return whether a class or a function is an installed module's, found there by its name."""
    module = getattr(value, "__module__", None) or ""
    there: Any = sys.modules.get(module)
    for name in value.__qualname__.split("."):
        there = getattr(there, name, None)
    return there is value and is_installed(module)


def _unhashable(value: object) -> ScenarioError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ScenarioError(f"it holds an object of type {kind}, whose content cannot be hashed", code="api.not-hashable")
