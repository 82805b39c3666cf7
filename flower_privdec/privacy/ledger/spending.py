"""What a ledger's entries cost, and how many more steps fit a budget beside them.

Reading: `runs_in`, `costs_in` and `releases_in` turn entries into releases, which the accountant composes into an ε.

Planning: an `Account` is one peer's plan for a run, with its budget. `Spending` puts the accounts of one process beside
what the ledger already has, and says for each peer which step is the first that it may not take.

Listening: a Flower app's own training code opens its budget by itself, deep inside (`private_loop.private`). The peer
around it has to report the ε of that ledger, so it listens while the code runs (`noting_budgets`).

Two runs over one data source may deal its examples to peers in different ways. Within one partition an example stays at
one peer, so costs are added up peer by peer. Across partitions nothing is known about where it was, so each example is
charged as if it had been at the peer that paid most: an upper bound whatever the partitions were.

An ε holds against one adversary (`events.Adversary`). Every release keeps its noise against each, so all runs are
composed against one and the same adversary, whichever is asked about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from flower_privdec.privacy.accountant.accounting import Alternatives, epsilon_of_runs, last_that_fits
from flower_privdec.privacy.ledger.segments import Charge, Entry, RunName, read_entries
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary, Release, Spend, canonical, towards

# --- what entries cost ---


def releases_in(entries: Iterable[Entry], *more: Charge) -> tuple[Release, ...]:
    """Return all releases of some entries and further charges, equal mechanisms together."""
    releases: list[Release] = []
    for entry in entries:
        for charge in entry.charges:
            releases += charge.releases
    for charge in more:
        releases += charge.releases
    return canonical(releases)


def charged_until(entries: Iterable[Entry], run: str) -> int:
    """Return the step before which all steps of a run are charged."""
    return max((entry.to_step for entry in entries if entry.run.id == run), default=0)


def charged_by_peer(entries: Iterable[Entry], run: str) -> dict[int, int]:
    """Return, by peer, the step before which all of the peer's own active steps of a run are charged."""
    ends: dict[int, int] = {}
    for entry in entries:
        if entry.run.id != run:
            continue
        for charge in entry.charges:
            end = max(b for steps, _ in charge.parts for _, b in steps)
            for peer in charge.peers:
                ends[peer] = max(end, ends.get(peer, 0))
    return ends


def runs_in(entries: Iterable[Entry], adversary: Adversary = EVERYBODY) -> dict[str, Alternatives]:
    """Return the cost of each run by itself against an adversary, by its id: the different lists its peers paid for.

    See `costs_in` for the cost of all runs together.
    """
    runs = _paid_by_peer((entry.run.id, entry) for entry in entries)
    return {run: _alternatives(peers, adversary) for run, peers in runs.items()}


def costs_in(entries: Iterable[Entry], adversary: Adversary = EVERYBODY) -> list[Alternatives]:
    """Return the cost of all runs, for `epsilon_of_runs` to compose against an adversary.

    Runs of one partition are one item, in which each peer's costs are added up (see above).

    Args:
        entries: the entries of one ledger.
        adversary: who sees all these runs; by default all other peers together.
    """
    groups = _paid_by_peer((entry.run.partition or entry.run.id, entry) for entry in entries)
    return [_alternatives(peers, adversary) for peers in groups.values()]


def _paid_by_peer(named: Iterable[tuple[str, Entry]]) -> dict[str, dict[int, list[Release]]]:
    """Return the releases charged to each peer in the entries of each name."""
    paid: dict[str, dict[int, list[Release]]] = {}
    for name, entry in named:
        for charge in entry.charges:
            for peer in charge.peers:
                paid.setdefault(name, {}).setdefault(peer, []).extend(charge.releases)
    return paid


def _alternatives(peers: Mapping[int, Iterable[Release]], adversary: Adversary) -> Alternatives:
    """Return the different lists of releases that peers paid for, as an adversary sees them, in order of peers."""
    lists = [towards(releases, adversary) for releases in peers.values()]
    return tuple(dict.fromkeys(lists))


# --- what still fits ---


@dataclass(frozen=True)
class Account:
    """One peer's plan for a run, and its budget for the data over all runs.

    Attributes:
        peer: its global id.
        spends: the cost of its active steps, in order of steps; none overlap.
        budget: ε, or None for no limit. Everything is recorded either way.
        delta: δ of the budget.
        adversary: the one that the budget has to hold against.
        at_once: how many steps are taken all or none, as those of a round are.
    """

    peer: int
    spends: tuple[Spend, ...]
    budget: float | None
    delta: float
    adversary: Adversary = EVERYBODY
    at_once: int = 1

    def releases(self, start: int, stop: int) -> tuple[Release, ...]:
        """Return the releases of steps [start, stop), equal mechanisms together."""
        parts = (spend.between(start, stop) for spend in self.spends)
        return canonical(part.release for part in parts if part is not None)

    def towards(self, adversary: Adversary) -> Account:
        """Return the account as an adversary sees it: each step at the noise that it cannot take off."""
        seen = tuple(replace(spend, release=spend.release.towards(adversary)) for spend in self.spends)
        return replace(self, spends=seen, adversary=adversary)


class Spending:
    """The cost of some peers' accounts beside the charges of all other runs over the same data.

    ε grows with every release. So a plan that fits its budget beside the recorded charges is allowed as a whole, and of
    any other plan the longest prefix that fits.

    Many peers usually have the same plan (one `spends` object) and the same past. ε is computed once for each such
    group, not once for each peer.

    Attributes:
        accounts: the accounts of the peers hosted here.
        start: the step from which this run continues.
        steps: the number of steps in its plan.
        limits: int64 [m], the first step that each account's peer may not take.
        others_cancelled: whether noise cancelled between peers in another run, so that its cost depends on who asks.
    """

    def __init__(
        self,
        others: Sequence[Entry],
        accounts: Sequence[Account],
        *,
        partition: str = "",
        charged: Mapping[int, int] | None = None,
        start: int = 0,
    ) -> None:
        """Compute the limits.

        Args:
            others: what the ledger has of other runs over the data.
            accounts: the accounts of the peers hosted here.
            partition: of this run, see `RunName`. Costs of other runs of the same partition are counted peer by peer.
            charged: the step up to which each peer was charged for this run. These steps may be taken whatever the
                budget is now.
            start: the step from which this run continues; what came before is among the others.
        """
        self.start = start
        self.accounts = tuple(accounts)
        self.steps = max((account.spends[-1].to_step for account in accounts if account.spends), default=0)
        self.others_cancelled = any(release.against for release in releases_in(others))

        same_partition = []
        self._elsewhere = []
        for entry in others:
            if partition and entry.run.partition == partition:
                same_partition.append((partition, entry))
            else:
                self._elsewhere.append(entry)
        self._paid = _paid_by_peer(same_partition).get(partition, {})

        # Memos; see `_paid_before`, `_epsilon` and `_costs_elsewhere`.
        self._costs: dict[Adversary, list[Alternatives]] = {}
        self._seen: dict[tuple[int, Adversary], tuple[Release, ...]] = {}
        self._equal: dict[tuple[Release, ...], tuple[Release, ...]] = {}
        self._epsilons: dict[tuple[object, ...], float] = {}

        limits = self._limits(charged or {})
        self.limits = np.array(limits, dtype=np.int64)

    def epsilons(self, steps: int, adversary: Adversary | None = None) -> np.ndarray:
        """Return the ε of each peer after `steps` steps of this run, over all runs in the ledger, [m].

        Args:
            adversary: who looks; by default the adversary of the peer's budget.
        """
        values = []
        for account, limit in zip(self.accounts, self.limits.tolist(), strict=True):
            value = self._epsilon(account, min(steps, limit), adversary or account.adversary)
            values.append(value)
        return np.array(values)

    def _limits(self, charged: Mapping[int, int]) -> list[int]:
        """Return the first step that each account's peer may not take."""
        limit_of: dict[tuple[object, ...], int] = {}
        limits = []
        for account in self.accounts:
            covered = max(self.start, charged.get(account.peer, 0))
            # Peers that paid the same so far and plan the same have the same limit.
            key = (*self._key(account, account.adversary), account.budget, covered)
            if key not in limit_of:
                limit_of[key] = self._limit(account, covered)
            limits.append(limit_of[key])
        return limits

    def _limit(self, account: Account, covered: int) -> int:
        """Return the first step that a peer may not take, of which those before `covered` are charged already."""
        fits = partial(self._fits, account)
        if covered >= self.steps or fits(self.steps):
            return self.steps

        last = last_that_fits(fits, covered, self.steps)
        # A round of which only a part fits is not begun, so that it is not paid for either.
        whole_rounds = last - last % account.at_once
        return max(covered, whole_rounds)

    def _fits(self, account: Account, stop: int) -> bool:
        if account.budget is None:
            return True
        return self._epsilon(account, stop, account.adversary) <= account.budget

    def _epsilon(self, account: Account, stop: int, adversary: Adversary) -> float:
        """Return ε after `stop` steps of this run, over all runs."""
        key = (*self._key(account, adversary), stop)
        if key not in self._epsilons:
            planned = towards(account.releases(self.start, stop), adversary)
            own = canonical([*self._paid_before(account.peer, adversary), *planned])
            runs = self._costs_elsewhere(adversary)
            if own:
                runs = [*runs, (own,)]
            self._epsilons[key] = epsilon_of_runs(runs, account.delta)
        return self._epsilons[key]

    def _key(self, account: Account, adversary: Adversary) -> tuple[object, ...]:
        """Return what ε of an account depends on, besides the step."""
        paid = self._paid_before(account.peer, adversary)
        # By identity: comparing plans of thousands of spends would cost more than computing ε again. The accounts and
        # `_equal` hold on to both objects, so no other object gets their id.
        return id(account.spends), id(paid), account.delta, adversary

    def _paid_before(self, peer: int, adversary: Adversary) -> tuple[Release, ...]:
        """Return the releases that a peer paid for in other runs of this partition; equal results are one object."""
        if (peer, adversary) not in self._seen:
            paid = towards(self._paid.get(peer, ()), adversary)
            self._seen[peer, adversary] = self._equal.setdefault(paid, paid)
        return self._seen[peer, adversary]

    def _costs_elsewhere(self, adversary: Adversary) -> list[Alternatives]:
        """Return the cost of the runs of other partitions."""
        if adversary not in self._costs:
            self._costs[adversary] = costs_in(self._elsewhere, adversary)
        return self._costs[adversary]


def spending_beside(entries: Sequence[Entry], run: RunName, accounts: Sequence[Account], start: int = 0) -> Spending:
    """Return the cost of a run beside the other runs in a ledger's entries."""
    others = [entry for entry in entries if entry.run.id != run.id]
    charged = charged_by_peer(entries, run.id)
    return Spending(others, accounts, partition=run.partition, charged=charged, start=start)


def spending_of(
    directory: Path | str, source: str, run: RunName, accounts: Sequence[Account], start: int = 0
) -> Spending:
    """Return the cost of a run beside a ledger's other runs, without locking or changing it.

    Raises:
        BudgetError: the ledger cannot be read or fails verification.
    """
    return spending_beside(read_entries(directory, source), run, accounts, start)


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
