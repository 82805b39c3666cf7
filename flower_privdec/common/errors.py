"""Errors that a user can act on: each message names the value, the rule and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from flower_privdec.common.exit_codes import FAILED, NOT_AGREED, STALLED, STATUS_OF, WRONG_INPUT

# A part that was given as a Python object has a name that means nothing to its owner (`common.user_code`).
_GIVEN = re.compile(r"'?__python__:(\w+)_[0-9a-f]{16}\b'?")


class CodedError(Exception):
    """An error that names the rule that was broken.

    Attributes:
        code: a stable name of the rule, such as `privacy.budget-spent`. Messages may be reworded, codes stay. It is
            empty if the rule has no name yet.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(_GIVEN.sub(r"\1", message))
        self.code = code


class ArgumentError(CodedError, ValueError):
    """An argument breaks a rule: of a function, by the caller's mistake, or a key of a scenario in its validator."""


class PrivdecError(CodedError):
    """An error that the user can mend. The command line prints it as one line and exits with `exit_status`.

    Attributes:
        exit_status: that of the error's class, unless its code has its own; see `exit_codes`.
    """

    exit_status = WRONG_INPUT

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.exit_status = STATUS_OF.get(code, self.exit_status)


class ScenarioError(PrivdecError):
    """A scenario, a file or an option breaks a rule; nothing was written."""


class BudgetError(PrivdecError):
    """A step would exceed a privacy budget, or a ledger cannot be trusted."""


class RunError(PrivdecError):
    """A run that had started could not go on."""

    exit_status = FAILED


class NotAgreedError(RunError):
    """A peer's rounds are done, but its model differs from its neighbours'."""

    exit_status = NOT_AGREED


class StandstillError(RunError):
    """Nothing that a peer waits for has come for so long that the peer ended; its state is on disk."""

    exit_status = STALLED


class MembersChangedError(PrivdecError):
    """The members of a network changed, and a peer has to begin again with the new graph; its state is on disk."""


class StoppedError(PrivdecError):
    """The user pressed Ctrl-C; the message says how to go on."""


# What a user's own code may raise: any error, and sys.exit(). Ctrl-C (KeyboardInterrupt) is not the code's.
RAISED_BY_USERS = (Exception, SystemExit)


_from_python: ContextVar[bool] = ContextVar("from_python", default=False)


@contextmanager
def called_from_python() -> Iterator[None]:
    """Let errors name arguments of a Python function instead of options of a command."""
    token = _from_python.set(True)
    try:
        yield
    finally:
        _from_python.reset(token)


def option(name: str, value: object = None) -> str:
    """Return an option as an error names it: of the command, or, for a caller from Python, of the function.

    Examples:
        >>> option("out", "a.png"), option("resume", True)
        ('--out a.png', '--resume')
        >>> with called_from_python():
        ...     option("out", "a.png"), option("resume", True)
        ('out=a.png', 'resume=True')
    """
    if _from_python.get():
        argument = name.replace("-", "_")
        if value is None:
            return argument
        return f"{argument}={value}"

    is_flag = value is None or value is True
    if is_flag:
        return f"--{name}"
    return f"--{name} {value}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: `; did you mean 'x'?`, or nothing if no known word is near."""
    near = nearest(str(word), list(known))
    if near is None:
        return ""
    return f"; did you mean {near!r}?"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that another word probably means: by its beginning, its initials, its spelling or a part.

    Examples:
        >>> nearest("p", ["name", "probability"]), nearest("lr", ["name", "learning_rate"]), nearest("zzz", ["name"])
        ('probability', 'learning_rate', None)
    """
    typed = _plain(word)[:80]  # get_close_matches takes long for long words
    typed_parts = set(re.split("[-_ .]", word.lower()))
    close = difflib.get_close_matches(typed, [_plain(candidate) for candidate in known], n=1, cutoff=0.6)

    # The surest sign comes first.
    if typed:
        longer = [candidate for candidate in known if _plain(candidate).startswith(typed)]
        if longer:
            return min(longer, key=len)
    for candidate in known:
        initials = "".join(part[:1] for part in re.split("[-_ ]", candidate.lower()))
        if typed == initials:
            return candidate
    for candidate in known:
        if _plain(candidate) in close:
            return candidate
    for candidate in known:
        if candidate.lower() in typed_parts:
            return candidate
    return None


def _plain(word: str) -> str:
    """Return a word in small letters, without what separates its parts."""
    return re.sub("[-_ ]", "", word).lower()
