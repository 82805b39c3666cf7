"""Errors that a user can act on: each message names the value, the rule and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar


class CodedError(Exception):
    """An error that names the rule that was broken.

    Attributes:
        code: a stable name of the rule, such as `privacy.budget-spent`; messages may be reworded, codes stay. Empty
            where a rule has no name yet.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ArgumentError(CodedError, ValueError):
    """An argument breaks a rule, which is the caller's mistake; or, in a validator of pydantic, a key of a scenario."""


class PrivdecError(CodedError):
    """Something the user can mend; the command line prints it as one line and exits with status 2.

    Attributes:
        exit_status: of the command.
    """

    exit_status = 2


class ScenarioError(PrivdecError):
    """A scenario, a file or an option breaks a rule; nothing was written."""


class BudgetError(PrivdecError):
    """A step would exceed a privacy budget, or a ledger cannot be trusted."""


class RunError(PrivdecError):
    """A run that had started could not go on."""

    exit_status = 1


class NotAgreedError(RunError):
    """A peer's rounds are done, and its model is not the one that its neighbours have."""

    exit_status = 3


class StoppedError(PrivdecError):
    """The user pressed Ctrl-C; the message says how to go on."""


RAISED_BY_USERS = (Exception, SystemExit)  # what a user's own code may raise: anything, sys.exit too, but not Ctrl-C


_from_python: ContextVar[bool] = ContextVar("from_python", default=False)


@contextmanager
def called_from_python() -> Iterator[None]:
    """Let errors name arguments of a Python function where they would name options of a command."""
    token = _from_python.set(True)
    try:
        yield
    finally:
        _from_python.reset(token)


def option(name: str, value: object = None) -> str:
    """Return an option of a command as an error names it, or the argument of that name where Python calls.

    Examples:
        >>> option("out", "a.png"), option("resume", True)
        ('--out a.png', '--resume')
        >>> with called_from_python():
        ...     option("out", "a.png"), option("resume", True)
        ('out=a.png', 'resume=True')
    """
    if _from_python.get():
        return name.replace("-", "_") if value is None else f"{name.replace('-', '_')}={value}"
    return f"--{name}" if value is None or value is True else f"--{name} {value}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: `; did you mean 'x'?`, or nothing where none is near it."""
    near = nearest(str(word), list(known))
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return which of some words another stands for: by its beginning or initials, as part of it, or by its spelling.

    Examples:
        >>> nearest("p", ["name", "probability"]), nearest("lr", ["name", "learning_rate"]), nearest("zzz", ["name"])
        ('probability', 'learning_rate', None)
    """
    plain = {candidate: re.sub("[-_ ]", "", candidate).lower() for candidate in known}
    typed = re.sub("[-_ ]", "", word).lower()[:80]
    parts = set(re.split("[-_ .]", word.lower()))
    begins = [candidate for candidate in known if typed and plain[candidate].startswith(typed)]
    short = [
        candidate for candidate in known if typed == "".join(part[:1] for part in re.split("[-_ ]", candidate.lower()))
    ]
    spelt = difflib.get_close_matches(typed, list(plain.values()), n=1, cutoff=0.6)
    alike = [candidate for candidate in known if plain[candidate] in spelt]
    inside = [candidate for candidate in known if candidate.lower() in parts]
    return next(iter([*begins, *short, *alike, *inside]), None)
