"""What of a user's own parts decides the numbers of a run beside parameters: their code, and what a model holds."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path

from torch import Tensor, nn

from flower_privdec.errors import RAISED_BY_USERS

SHIPPED = ("torch", "flower_privdec", "builtins")  # packages whose code the environment's versions tell
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# CPython 3.11 counts the recursion of `ast.parse` per interpreter: two threads that parse at once may fail.
_PARSING = threading.Lock()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def installed_version(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def code_of(parts: Iterable[object]) -> Iterator[bytes]:
    """Yield the source files of classes and functions by name: theirs, their bases', and all that these import.

    Of what is installed the version stands for the code, and of what was compiled or typed in the name. What a file
    imports by a computed name is not seen.

    Args:
        parts: classes, functions, or objects of any class.
    """
    written = [part if inspect.isclass(part) or inspect.isroutine(part) else type(part) for part in parts]
    bases = [base for part in written for base in (inspect.getmro(part) if inspect.isclass(part) else (part,))]
    waiting = {str(base.__module__) for base in bases}
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
        imports = set(_imported(source, name if path.name == "__init__.py" else name.rpartition(".")[0])) - visited
        waiting, visited = waiting | imports, visited | imports


def is_installed(module: str) -> bool:
    """Return whether a module is one that its version tells: shipped with this package, compiled in, or installed."""
    package = module.partition(".")[0]
    path = _file(package)
    if package in SHIPPED or package in sys.builtin_module_names:
        return True
    return path is not None and any(path.is_relative_to(folder) for folder in _INSTALLED)


def _file(name: str) -> Path | None:
    """Return the file a Python module is in; None where there is no such module or no source."""
    try:
        spec = None if name in sys.modules else find_spec(name)
    except RAISED_BY_USERS:  # to look into a package imports it
        spec = None
    origin = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec else None) or ""
    return Path(origin).resolve() if origin.endswith(".py") and Path(origin).is_file() else None


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield the names of all modules that a source may import, also inside functions."""
    try:
        with _PARSING:
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # one that is named somewhere, and imported never
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, package) if node.level else base
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def held_by(module: nn.Module) -> Iterator[bytes]:
    """Yield what the parts of a model hold beside parameters: numbers, words and tensors, by their names."""
    for path, part in module.named_modules():
        held = {**vars(part), **dict(part.named_buffers(recurse=False))}
        yield f"{path} {type(part).__module__}.{type(part).__qualname__}".encode()
        for name, value in sorted(held.items()):
            yield from (name.encode() + content for content in _told(value))


def _told(value: object) -> Iterable[bytes]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        data = value.detach().cpu().contiguous()
        return [f"{data.dtype} {tuple(data.shape)}".encode() + hashlib.sha256(data.numpy().data).digest()]
    parts = value if isinstance(value, tuple | list) else (value,)
    return [repr(value).encode()] if all(isinstance(part, _PLAIN) for part in parts) else []
