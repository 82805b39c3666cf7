"""Audits of a scenario: what attacks show of its ε, beside what its accountant prints and what a paper claims.

The upper bound that is printed is proved; an audit looks for a mistake in the proof, in the declaration, or in the
code that carries it out. It can refute an ε, and never prove one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.audits.bounds import epsilon_from_scores
from flower_privdec.audits.canaries import Canaries, audited_plan, with_canaries
from flower_privdec.audits.noise_check import too_small
from flower_privdec.audits.observer import Observer, run_once
from flower_privdec.audits.replica import replica_scores
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.events import Release, towards
from flower_privdec.privacy.mechanism.protection import Protection

CANARIES = "canaries in the scenario's own steps"
REPLICA = "a replica of the declared releases"


@dataclass(frozen=True)
class AuditedPeers:
    """An audit's result for the peers that pay for the same releases.

    Attributes:
        peers: their global ids.
        claimed_epsilon: the paper's formula's; None unless it gave the noise.
        epsilon: the accountant's, an upper bound, at `delta`.
        delta: δ.
        canary_lower_bound: what canaries in the real steps show.
        trials: how many, with a canary and without.
        replica_lower_bound: what a replica of the declared releases shows.
        replica_trials: how many of these.
        scores: the log likelihood ratios of the replica, without and with the example; for a picture.
    """

    peers: tuple[int, ...]
    claimed_epsilon: float | None
    epsilon: float
    delta: float
    canary_lower_bound: float
    trials: int
    replica_lower_bound: float
    replica_trials: int
    scores: tuple[np.ndarray, np.ndarray] = field(repr=False, compare=False)

    @property
    def shown(self) -> float:
        """The larger of both lower bounds."""
        return max(self.canary_lower_bound, self.replica_lower_bound)

    @property
    def violated(self) -> bool:
        """Whether the printed ε is refuted."""
        return self.shown > self.epsilon

    @property
    def claim_refuted(self) -> bool:
        """Whether the paper's claim is refuted."""
        return self.claimed_epsilon is not None and self.shown > self.claimed_epsilon


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        groups: the groups of peers that pay alike, the one whose ε is nearest to being refuted first.
        confidence: the chance, at least, with which all lower bounds hold together.
        defects: what was not as planned, declared or charged, a line each, by kind.
        rounds: the number of rounds of each run.
    """

    groups: tuple[AuditedPeers, ...]
    confidence: float
    defects: dict[str, str]
    rounds: int

    @property
    def holds(self) -> bool:
        """Whether no attack refutes the printed ε, and nothing is other than planned."""
        return not self.defects and not any(group.violated for group in self.groups)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.holds:
            return "no attack refutes the printed ε"

        faults = [
            f"ε = {group.epsilon:.4g} is refuted: at least {group.shown:.4g}" for group in self.groups if group.violated
        ]
        return "; ".join([*faults, *self.defects.values()])

    def to_json(self) -> dict[str, Any]:
        """Return the audit as a JSON object: at the top the larger lower bound of its first group."""
        groups = [
            {name: _number(value) for name, value in vars(group).items() if name != "scores"} for group in self.groups
        ]
        first = self.groups[0]
        by_canaries = first.canary_lower_bound >= first.replica_lower_bound

        return {
            "claimed_epsilon": groups[0]["claimed_epsilon"],
            "epsilon": groups[0]["epsilon"],
            "epsilon_lower_bound": _number(first.shown),
            "method": CANARIES if by_canaries else REPLICA,
            "trials": first.trials if by_canaries else first.replica_trials,
            "confidence": self.confidence,
            "rounds": self.rounds,
            "holds": self.holds,
            "defects": self.defects,
            "groups": groups,
        }


def _number(value: Any) -> Any:
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def audit(
    experiment: Experiment,
    *,
    trials: int = 2000,
    replica: int = 100_000,
    seed: int = 0,
    confidence: float = 0.95,
    on_trials: Callable[[int, int], None] = lambda count, total: None,
) -> Audit:
    """Attack every peer of a scenario, and return what the attacks show of its ε.

    Args:
        experiment: with privacy; its ledger is not touched.
        trials: how many canaries are looked for, at least: each run of the scenario has one at each peer. An ε of 4
            takes some 1,000 to be shown, and each further unit e times as many.
        replica: how many trials of the declared releases without a model, with an example and as many without.
        seed: keys coins, batches and noise; two audits of one seed are the same.
        confidence: the chance, at least, with which all lower bounds hold together.
        on_trials: is called after each run with the number of trials so far, and `trials`.

    Raises:
        ScenarioError: an argument is out of range, or the scenario promises no ε that this can audit.
    """
    for name, value, least in (("trials", trials, 8), ("replica", replica, 8)):
        if value < least:
            raise ScenarioError(f"{name}={value} must be >= {least}", code="audit.trials")
    if not 0.5 <= confidence < 1:
        raise ScenarioError(f"confidence={confidence} must be in [0.5, 1)", code="audit.confidence")

    canaries = with_canaries(experiment)
    plan = audited_plan(experiment)
    defects = ledger_defects(canaries, plan, seed)

    observers: list[Observer] = []
    presences: list[np.ndarray] = []
    n_peers = len(experiment.own.peers)
    while (count := len(presences) * n_peers) < trials:
        on_trials(count, trials)
        present, observer = run_once(canaries, seed, len(presences))
        presences.append(present)
        observers.append(observer)
        defects |= observer.defects
    on_trials(trials, trials)
    defects |= noise_defects(observers)

    there = np.array(presences)  # [runs, peers], as the scores
    scores = np.array([observer.scores for observer in observers])
    by_cost: dict[tuple[object, ...], list[int]] = {}
    for row, account in enumerate(plan.accounts):
        by_cost.setdefault((account.spends, account.delta), []).append(row)

    # Each group has two lower bounds, and all of them have to hold together.
    level = 1 - (1 - confidence) / (2 * len(by_cost))
    epsilons = plan.epsilons(experiment.scenario.rounds)
    groups = []
    for rows in by_cost.values():
        account = plan.accounts[rows[0]]
        claim = plan.claims[rows[0]]
        score = scores[:, rows]
        with_it = there[:, rows]
        absent, present = replica_scores(_all(account), replica, seed)
        groups.append(
            AuditedPeers(
                peers=tuple(int(experiment.own.peers[row]) for row in rows),
                claimed_epsilon=None if claim is None else claim.epsilon,
                epsilon=epsilons[rows[0]],
                delta=account.delta,
                canary_lower_bound=epsilon_from_scores(score[~with_it], score[with_it], account.delta, level),
                trials=score.size,
                replica_lower_bound=epsilon_from_scores(absent, present, account.delta, level),
                replica_trials=2 * replica,
                scores=(absent, present),
            )
        )
    groups.sort(key=lambda group: group.epsilon - group.shown)
    return Audit(tuple(groups), confidence, defects, experiment.scenario.rounds)


def _all(account: Account) -> tuple[Release, ...]:
    """Return all releases of an account, as its budget's adversary sees them."""
    last = max((spend.to_step for spend in account.spends), default=0)
    return account.towards(account.adversary).releases(0, last)


def ledger_defects(canaries: Canaries, plan: Protection, seed: int) -> dict[str, str]:
    """Run once with a ledger, and return whether it charged less than what an observer saw cost."""
    with tempfile.TemporaryDirectory() as folder:
        observer = run_once(canaries, seed, -1, Path(folder))[1]
        entries = read_entries(folder, canaries.experiment.public.name)

    charged: dict[int, list[Release]] = {}
    for entry in entries:
        for charge in entry.charges:
            for peer in charge.peers:
                charged.setdefault(peer, []).extend(charge.releases)

    for row, peer in enumerate(canaries.experiment.own.peers.tolist()):
        account = plan.accounts[row]
        seen = [release.times(count) for release, count in observer.cost[row].items()]
        cost = epsilon(seen, account.delta)
        paid = epsilon(towards(charged.get(peer, ()), account.adversary), account.delta)
        if paid < cost * (1 - 1e-9):
            return {"ledger": f"the ledger charges peer {peer} ε = {paid:.4g} for releases that cost {cost:.4g}"}
    return {}


def noise_defects(observers: list[Observer]) -> dict[str, str]:
    """Return by how much noise is smaller than planned, if that is not chance; else nothing."""
    for kind in ("noise", "left"):
        parts = [part.ravel() for observer in observers for part in getattr(observer, kind)]
        wrong = too_small(float(sum((part**2).sum() for part in parts)), sum(map(len, parts)))
        if wrong:
            return wrong
    return {}
