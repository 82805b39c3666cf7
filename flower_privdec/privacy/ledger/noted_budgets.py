"""How a caller learns which budgets the code that it calls has opened.

A Flower app's own training code opens its budget by itself, deep inside (`private_loop.private`). The peer around it
has to report the ε of that ledger, so it listens while the code runs:

    with noting_budgets() as budgets:
        train()
    # budgets now has what train() opened
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

NotedBudget = tuple[Path, float, str, str]  # ledger, δ, caveat, assumption

_noted: ContextVar[list[NotedBudget] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_budgets() -> Iterator[list[NotedBudget]]:
    """Yield a list that collects the ledger, δ, caveat and assumption of each budget that is opened inside."""
    noted: list[NotedBudget] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_budget(path: Path, delta: float, caveat: str = "", assumption: str = "") -> None:
    """Tell the innermost `noting_budgets`, if there is one, about a budget.

    Args:
        path: the file of its ledger.
        delta: δ of its ε.
        caveat: what ε does not cover, to be shown beside it.
        assumption: what ε assumes, to be shown beside it.
    """
    noted = _noted.get()
    if noted is not None:
        noted.append((path, delta, caveat, assumption))
