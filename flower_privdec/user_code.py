"""A user's own parts, which a scenario names as `package.module:name`: found, imported, and refused in one line.

They are imported from where the command runs, as any module is: whoever writes a scenario runs code by it. So a process
that takes scenarios from others says which modules they may name (`only_from`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from flower_privdec.errors import ScenarioError
from flower_privdec.words import did_you_mean, one_line

_allowed: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)


@contextmanager
def only_from(modules: Iterable[str]) -> Iterator[None]:
    """Import no user's code inside but from some modules, named in full."""
    token = _allowed.set(frozenset(modules))
    try:
        yield
    finally:
        _allowed.reset(token)


def load_own(
    target: str, key: str, *, accepts: Callable[[Any], bool] = callable, must_be: str = "something to call"
) -> Any:
    """Import what a scenario names.

    Args:
        target: `package.module:name`.
        key: where it stands in the scenario, for errors: `algorithm.module`.
        accepts: whether it is what it has to be.
        must_be: that in words.

    Raises:
        ScenarioError: it is not there, cannot be imported, is not allowed here (`only_from`), or is something else.
    """
    where = f"{key}={target!r}"
    path, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), name)):
        raise ScenarioError(f"{where} must be 'package.module:name'")
    allowed = _allowed.get()
    if allowed is not None and path not in allowed:
        raise ScenarioError(f"{where}: this process imports no module but {sorted(allowed)}: its owner has to allow it")
    module = _import(path, where)
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ScenarioError(f"{where}: {path} has no {name}{did_you_mean(name, known)}")
    part = getattr(module, name)
    if not accepts(part):
        kind = part.__name__ if isinstance(part, type) else f"of type {type(part).__name__}"
        raise ScenarioError(f"{where}: {name} is {kind} and must be {must_be}")
    return part


def _import(path: str, where: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{path}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name}; it must be importable from where the command runs"
            raise ScenarioError(f"{where}: {reason}") from error
        raise ScenarioError(f"{where}: importing {path} failed: {one_line(error)}") from error
    except SyntaxError as error:
        place = f"{error.filename or path}, line {error.lineno}"
        raise ScenarioError(f"{where}: {place} is not valid Python ({error.msg}); mend the line") from error
    except SystemExit as error:
        raise ScenarioError(
            f"{where}: importing {path} ends the program; put what it runs under if __name__ == '__main__'"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ScenarioError(f"{where}: importing {path} failed: {one_line(error)}") from error
