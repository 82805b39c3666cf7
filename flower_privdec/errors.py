"""Errors that a user can act on: each message names the value, the rule and the remedy."""

from __future__ import annotations


class PrivdecError(Exception):
    """Something the user can mend; the command line prints it as one line and exits with status 2."""


class ScenarioError(PrivdecError):
    """A scenario, a file or an option breaks a rule; nothing was written."""


class BudgetError(PrivdecError):
    """A step would exceed a privacy budget, or a ledger cannot be trusted."""


class RunError(PrivdecError):
    """A run that had started could not go on."""


class StoppedError(PrivdecError):
    """The user pressed Ctrl-C; the message says how to go on."""


RAISED_BY_USERS = (Exception, SystemExit)  # what a user's own code may raise: anything, sys.exit too, but not Ctrl-C
