"""The source of a user's own code, and of all that it imports: what can be seen of it, for names of runs and cells."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path

from flower_privdec.common.errors import RAISED_BY_USERS

SHIPPED = ("torch", "flower_privdec", "builtins")  # packages whose versions stand in the environment
_STANDARD = Path(os.__file__).resolve().parent  # the folder of the standard library
# CPython 3.11 counts the recursion of `ast.parse` per interpreter: two threads that parse at once may fail.
_PARSING = threading.Lock()


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def code_of(parts: Iterable[object]) -> Iterator[bytes]:
    """Yield the sources of classes and functions: of their modules, their bases' modules, and all that these import.

    For an installed module its version stands for its source, and for one without source (compiled, or typed in) its
    name. What a file imports by a computed name is not seen.

    Args:
        parts: classes, functions, or objects of any class.
    """
    modules = set[str]()
    for part in parts:
        if inspect.isclass(part) or inspect.isroutine(part):
            written = part
        else:
            written = type(part)
        classes = inspect.getmro(written) if inspect.isclass(written) else (written,)
        modules |= {str(each_class.__module__) for each_class in classes}
    return sources_of(modules)


def sources_of(modules: set[str]) -> Iterator[bytes]:
    """Yield the source of each of some modules and of all that they import, each once, in the order of their names."""
    waiting = set(modules)
    visited = set(modules)
    while waiting:
        name = min(waiting)
        waiting.discard(name)

        package = name.partition(".")[0]
        if package in SHIPPED:
            continue
        if is_installed(package):
            yield f"{package} {installed_version(package)}".encode()
            continue

        path = _file(name)
        if path is None:
            yield name.encode()
            continue
        source = path.read_bytes()
        yield name.encode() + source

        # Relative imports start at the package: the module itself if it is one, else the one that it is in.
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imports = _imported(source, home) - visited
        waiting |= imports
        visited |= imports


def is_installed(module: str) -> bool:
    """Return whether a module is identified by a version: shipped with this package, compiled in, or installed.

    Installed is what lies beside the metadata of a distribution, in any folder of `sys.path`: of the interpreter, of a
    user, of another environment. A package in editable mode lies elsewhere, and its source counts.
    """
    package = module.partition(".")[0]
    if package in SHIPPED or package in sys.builtin_module_names:
        return True

    path = _file(package)
    if path is None:
        return False
    folder = path.parents[1] if path.name == "__init__.py" else path.parent
    return path.is_relative_to(_STANDARD) or _has_distributions(folder)


@functools.cache
def _has_distributions(folder: Path) -> bool:
    return any(folder.glob("*.dist-info/METADATA"))


def _file(name: str) -> Path | None:
    """Return the file of a Python module; None if there is no such module or no source."""
    origin: str | None = None
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        try:
            spec = find_spec(name)
        except RAISED_BY_USERS:  # to look into a package imports it
            spec = None
        origin = None if spec is None else spec.origin

    if origin is None or not origin.endswith(".py") or not Path(origin).is_file():
        return None
    return Path(origin).resolve()


@functools.lru_cache(maxsize=1024)
def _imported(source: bytes, package: str) -> frozenset[str]:
    """Return the names of all modules that a source may import, also inside functions."""
    try:
        with _PARSING:
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # named somewhere, but never imported
        return frozenset()

    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, package)
            # `from a import b` may name a module a.b as well as something in a.
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)
