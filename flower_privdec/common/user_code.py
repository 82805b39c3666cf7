"""Import a user's own parts, which a scenario names as `package.module:name`.

They are imported from where the command runs, like any module. So a scenario can run code, and a process that takes
scenarios from others lists the modules that they may name (`only_from`).

A Python object that lies in no module can be given too. It is named `__python__:LABEL_TOKEN`, in this process only, for
as long as some scenario uses it. The token is random, since a hash of the object could confirm a guess of its content.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from flower_privdec.common.errors import RAISED_BY_USERS, PrivdecError, ScenarioError, did_you_mean
from flower_privdec.common.formatting import one_line

PYTHON = "__python__"
PATHS = sysconfig.get_paths()
LIBRARIES = (  # code below these folders is not the user's
    *(PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<",
)
TOKEN_DIGITS = 16
_TOKEN = re.compile(rf"({PYTHON}:\w+)_[0-9a-f]{{{TOKEN_DIGITS}}}\b")

_allowed: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)


@contextmanager
def only_from(modules: Iterable[str]) -> Iterator[None]:
    """Import user's code only from some modules inside, named in full."""
    token = _allowed.set(frozenset(modules))
    try:
        yield
    finally:
        _allowed.reset(token)


@dataclass(eq=False)
class Given:
    """A part that was given as a Python object.

    Attributes:
        target: its name in a scenario.
        value: the object.
        content: a hash of the object, which tells it from others; it stays in this process.
        tell: returns that hash as of now; None for an object that cannot change.
        seen: the hash when it was last looked at; `content` until it completed itself, see `completing_itself`.
    """

    target: str
    value: Any
    content: bytes
    tell: Callable[[], bytes] | None
    seen: bytes = b""

    def __post_init__(self) -> None:
        """Take the first content for what was seen."""
        self.seen = self.content


_given: WeakValueDictionary[str, Given] = WeakValueDictionary()


def give(value: Any, label: str, content: bytes, tell: Callable[[], bytes] | None = None) -> Given:
    """Give a Python object a name that a scenario can have; equal content gets the same name."""
    if not label.isidentifier():
        label = "unnamed"
    prefix = f"{PYTHON}:{label}_"

    for other in list(_given.values()):
        # The length tells the label "net" from "net_2", whose names begin alike.
        has_this_label = other.target.startswith(prefix) and len(other.target) == len(prefix) + TOKEN_DIGITS
        if other.content == content and has_this_label:
            return other

    part = Given(prefix + secrets.token_hex(TOKEN_DIGITS // 2), value, content, tell)
    _given[part.target] = part
    return part


@contextmanager
def completing_itself(target: object) -> Iterator[None]:
    """Call a given part inside, which may then complete itself: a change that it makes there is none of its owner's.

    A model of transformers, for one, fills in its configuration, which the given function closes over.
    """
    yield
    given = find_given(target)
    if given is not None and given.tell is not None:
        given.seen = given.tell()


def is_given(target: object) -> bool:
    """Return whether a target names a part that was given as an object, here or in another process."""
    return isinstance(target, str) and target.startswith(f"{PYTHON}:")


def find_given(target: object) -> Given | None:
    """Return the part of a name; None unless it was given in this process and a scenario still uses it."""
    return _given.get(target) if isinstance(target, str) else None


def without_tokens(text: str) -> str:
    """Return a text without the tokens of given parts, so that it is the same in every process."""
    return _TOKEN.sub(r"\1", text)


def load_own(
    target: str, key: str, *, accepts: Callable[[Any], bool] = callable, must_be: str = "something to call"
) -> Any:
    """Import a part that a scenario names.

    Args:
        target: `package.module:name`.
        key: the key of the scenario, for errors, such as `algorithm.module`.
        accepts: returns whether the part is of the right kind.
        must_be: that kind, in words.

    Raises:
        ScenarioError: it is missing, cannot be imported, is not allowed here (`only_from`), or is of another kind.
    """
    where = f"{key}={target!r}"
    path, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), name)):
        raise ScenarioError(f"{where} must be 'package.module:name'", code="code.name")

    allowed = _allowed.get()
    if allowed is not None and path not in allowed:
        raise ScenarioError(
            f"{where}: this process imports no module but {sorted(allowed)}: its owner has to allow it",
            code="code.not-allowed",
        )

    if path == PYTHON:
        given = find_given(target)
        if given is None:
            raise ScenarioError(
                f"{where}: it was given as a Python object, which is not here: give it again, or put it into a module "
                "and name that, as package.module:name",
                code="code.not-here",
            )
        if given.tell is not None and given.tell() != given.seen:
            raise ScenarioError(
                f"{where}: what was given has changed since (a global or a value that it uses, perhaps): "
                "make the scenario again",
                code="code.changed",
            )
        part = given.value
    else:
        module = _import(path, where)
        if not hasattr(module, name):
            names = [public for public in vars(module) if not public.startswith("_")]
            raise ScenarioError(f"{where}: {path} has no {name}{did_you_mean(name, names)}", code="code.no-name")
        part = getattr(module, name)

    if not accepts(part):
        kind = f"of type {type(part).__name__}"
        if isinstance(part, type):
            kind = f"the class {part.__name__}"
        raise ScenarioError(f"{where}: {name} is {kind} and must be {must_be}", code="code.kind")
    return part


def _import(path: str, where: str) -> ModuleType:
    """Import a module by its path, from the current folder too."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())

    # A module that was written a moment ago may be missing from Python's listing of its folder.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # Missing may be this module, or one that it imports itself.
        if error.name is not None and f"{path}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name}; it must be importable from where the command runs"
            raise ScenarioError(f"{where}: {reason}", code="code.import") from error
        raise _not_imported(where, path, error) from error
    except SyntaxError as error:
        if error.lineno:
            place = f"{error.filename or path}, line {error.lineno}"
        else:
            place = path
        raise ScenarioError(
            f"{where}: {place} is not valid Python ({error.msg}); mend the line", code="code.import"
        ) from error
    except SystemExit as error:
        raise ScenarioError(
            f"{where}: importing {path} ends the program; put what it runs under if __name__ == '__main__'",
            code="code.import",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise _not_imported(where, path, error) from error


def _not_imported(where: str, path: str, error: Exception) -> ScenarioError:
    reason = f"{one_line(error)}{last_line_of_users(error)}"
    return ScenarioError(f"{where}: importing {path} failed: {reason}", code="code.import")


@contextmanager
def users_code(problem: str, code: str = "") -> Iterator[None]:
    """Turn an error of a user's own code inside into one line: PROBLEM: ERROR (FILE, line NUMBER).

    Raises:
        ScenarioError: that line. Errors of this package pass unchanged.
    """
    try:
        yield
    except PrivdecError:
        raise
    except RAISED_BY_USERS as error:
        raise ScenarioError(f"{problem}: {one_line(error)}{last_line_of_users(error)}", code=code) from error


def require(module: str, purpose: str, remedy: str) -> Any:
    """Import an optional module, or raise ScenarioError with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise ScenarioError(
            f"{purpose} needs {missing}, which is not installed: {remedy}", code="code.not-installed"
        ) from error


class RaisedElsewhere(Exception):  # noqa: N818 (an error of another process)
    """An error of another process of a run: `place`, which may be shown, and its traceback, which is private."""

    def __init__(self, place: str, trace: str) -> None:
        super().__init__(place, trace)
        self.place = place
        self.trace = trace

    def __str__(self) -> str:
        return f"in another process of this run:\n{self.trace}"


def last_line_of_users(error: BaseException) -> str:
    """Return ` (FILE, line NUMBER)` of the user's code that led to an error; empty if none did.

    If a file with a relative path was looked for, its absolute path is added.
    """
    frame = _frame_of(error)
    if frame is None or not _is_users(frame):
        return ""

    tried = ""
    path = getattr(error, "filename", None)
    if isinstance(path, str) and not os.path.isabs(path):
        tried = f", tried {os.path.abspath(path)}"
    return f" ({frame.filename}, line {frame.lineno}{tried})"


def raised_at(error: BaseException) -> str:
    """Return an error's type and the last line of a user's code that led to it, else the line that raised it.

    Its message, which may reveal data, is left out.
    """
    if isinstance(error, RaisedElsewhere):
        return error.place

    frame = _frame_of(error)
    if frame is None:
        return type(error).__name__
    return f"{type(error).__name__} ({frame.filename}, line {frame.lineno})"


def _frame_of(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of a user's code that led to an error, else the one that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_users(frame):
            return frame
    return frames[-1] if frames else None


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(LIBRARIES)
