"""Errors that a user can act on: each message names the value, the rule and the remedy."""

from __future__ import annotations


class PrivdecError(Exception):
    """Something the user can mend; the command line prints it as one line and exits with status 2.

    Attributes:
        code: a stable name of the rule that was broken, such as `privacy.budget-spent`; messages may be reworded, codes
            stay. Empty where a rule has no name yet.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ScenarioError(PrivdecError):
    """A scenario, a file or an option breaks a rule; nothing was written."""


class BudgetError(PrivdecError):
    """A step would exceed a privacy budget, or a ledger cannot be trusted."""


class RunError(PrivdecError):
    """A run that had started could not go on."""


class StoppedError(PrivdecError):
    """The user pressed Ctrl-C; the message says how to go on."""


RAISED_BY_USERS = (Exception, SystemExit)  # what a user's own code may raise: anything, sys.exit too, but not Ctrl-C
