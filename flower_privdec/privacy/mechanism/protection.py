"""What some peers of a run will release: the clipping and noise of each in every step, solved from its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.graph.participation import Participation
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.search import last_that_fits
from flower_privdec.privacy.ledger.cohort_ledger import Account
from flower_privdec.privacy.mechanism.declared import Declaration, Declares, Drawing
from flower_privdec.privacy.mechanism.events import Spend
from flower_privdec.privacy.mechanism.mechanisms import Mechanism, build_mechanism
from flower_privdec.privacy.mechanism.scale import Claim, Solver
from flower_privdec.privacy.mechanism.schedules import build_schedule
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import PrivacySection

UNLIMITED = "inf"  # how JSON, which has no infinity, says that there is no bound on ε

Factors = Mapping[str, float | None] | None


def cost(account: Account, steps: int) -> float:
    """Return ε of what a peer releases in the first steps of a run."""
    parts = (spend.between(0, steps) for spend in account.spends)
    return epsilon([part.release for part in parts if part is not None], account.delta)


@dataclass(frozen=True)
class Protection:
    """Clip norms and noise multipliers of the peers hosted here, and the accounts they are charged to.

    Attributes:
        clip_norms: float64 [steps, m], where a round has `steps_per_round` steps.
        noise_multipliers: likewise; noise std over clip norm, of the sum over a batch.
        accounts: one for each peer.
        claims: what the paper's formula claims, where it made the noise; else None for each peer.
        calibration: how the noise was solved for.
        kinds: for each kind of step, the sums it has, with the noise of each over the step's; None for a sum that
            stays on the peer, and for the whole kind where nothing is declared.
        kind_of: int64 [steps].
        receivers: of each sum that goes to each neighbour, to how many in every step, int64 [steps, m].
        replies: for each peer what one neighbour is told by what it alone is sent, as an account; empty where all of a
            peer's sums go to everybody.
    """

    clip_norms: np.ndarray
    noise_multipliers: np.ndarray
    accounts: tuple[Account, ...]
    claims: tuple[Claim | None, ...]
    calibration: str
    kinds: tuple[Factors, ...]
    kind_of: np.ndarray
    steps_per_round: int = 1
    receivers: Mapping[str, np.ndarray] = field(default_factory=dict)
    replies: tuple[Account, ...] = ()

    def part(self, start: int, stop: int) -> Protection:
        """Return the slice for peers [start, stop)."""
        return replace(
            self,
            clip_norms=self.clip_norms[:, start:stop],
            noise_multipliers=self.noise_multipliers[:, start:stop],
            accounts=self.accounts[start:stop],
            claims=self.claims[start:stop],
            receivers={name: counts[:, start:stop] for name, counts in self.receivers.items()},
            replies=self.replies[start:stop],
        )

    def clip_norm(self, step: int) -> np.ndarray:
        """Return the clip norm of every peer in a step, [m]."""
        return np.asarray(self.clip_norms[step])

    def noise_multiplier(self, step: int) -> np.ndarray:
        """Return the noise multiplier of every peer in a step, over the sum of a batch, [n_peers].

        Where a step has several sums, that of the one with the least noise.
        """
        factors = [factor for factor in (self.kinds[self.kind_of[step]] or {}).values() if factor is not None]
        return np.asarray(self.noise_multipliers[step] * min(factors, default=1.0))

    def noise(self, step: int, sums: Iterable[str], copies: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the noise multiplier of each sum of a step that is published, [n_peers], by name.

        Args:
            sums: the sums that the step is about to make.
            copies: how many of each every peer makes, for a neighbour each, int64 [m]; by default one for everybody.

        Raises:
            TypeError: where they are not those that the algorithm declares, or more.
        """
        factors, names = self.kinds[self.kind_of[step]], tuple(sums)
        if factors is None:
            factors = dict.fromkeys(names, 1.0)
        elif factors.keys() != set(names):
            raise TypeError(f"step {step} makes the sums {sorted(names)} and declares {sorted(factors)}")
        elif copies is not None:
            self._check_copies(step, [name for name, noise in factors.items() if noise is not None], copies)
        return {name: self.noise_multipliers[step] * noise for name, noise in factors.items() if noise is not None}

    def _check_copies(self, step: int, sums: Iterable[str], copies: np.ndarray) -> None:
        """Refuse more copies of a sum than a peer declares receivers."""
        for name in sums:
            declared = self.receivers[name][step] if name in self.receivers else np.ones_like(copies)
            for row in np.flatnonzero(copies > declared)[:1]:
                raise TypeError(
                    f"step {step} makes sum {name!r} for {copies[row]} neighbours and declares {declared[row]}"
                )

    def epsilons(self, rounds: int) -> list[float]:
        """Return ε of every peer after so many rounds."""
        return [cost(account, rounds * self.steps_per_round) for account in self.accounts]

    def reply_epsilons(self, rounds: int) -> list[float]:
        """Return ε of what one neighbour is told by the replies to it alone, of every peer after so many rounds.

        It bounds what these replies tell, and nothing else: the neighbour hears also what was made of the replies to
        others, and of that `epsilons` are the bound. Empty where all of a peer's sums go to everybody.
        """
        return [cost(account, rounds * self.steps_per_round) for account in self.replies]


def _each(value: float | Sequence[float], n_peers: int, peers: np.ndarray) -> list[float]:
    numbers: list[float] = np.broadcast_to(np.asarray(value, dtype=np.float64), (n_peers,))[peers].tolist()
    return numbers


def build_protection(
    scenario: Scenario,
    section: PrivacySection,
    algorithm: Declares,
    drawings: Sequence[Drawing],
    participation: Participation,
    peers: np.ndarray,
    weight_factor: float = 1.0,
    noised: Callable[[Declaration], Declaration] = lambda sums: sums,
) -> Protection:
    """Solve each peer's noise from its budget, for the steps of the rounds in which it is active.

    Who is active is public and decided beforehand, so a peer's noise is solved for its own number of
    active rounds: activity amplifies nothing and idle rounds cost nothing.

    Args:
        algorithm: says what its steps release.
        drawings: how each of these peers draws its examples.
        participation: who is active, of the whole network.
        peers: global ids, int64 [m].
        weight_factor: what the mixing weights add to a paper's formula.
        noised: returns what a step costs under the noise that it gets; by default independent normals.

    Raises:
        ScenarioError: when a budget is below what any noise can keep, the algorithm declares no release, or a
            paper's formula does not apply.
    """
    n_peers, each_round = scenario.n_peers, algorithm.steps_per_round
    schedule = build_schedule(scenario).repeated(each_round)
    active = np.stack([participation.active(k)[peers] for k in range(scenario.rounds)]).repeat(each_round, axis=0)
    deltas = _each(section.delta, n_peers, peers)
    budgets = [None] * len(peers) if section.epsilon is None else _each(section.epsilon, n_peers, peers)
    mechanisms = {drawing: build_mechanism(algorithm, drawing, schedule, noised) for drawing in dict.fromkeys(drawings)}
    share = float(participation.chances.mean())
    solver, same = Solver(section, algorithm, schedule, weight_factor, share), _Same()
    noise, scales, accounts, claims = np.empty(active.shape), np.empty(len(peers)), [], []
    for row, facts in enumerate(zip(drawings, budgets, deltas, strict=True)):
        scale, claim, account = same.solve(solver, mechanisms[facts[0]], active[:, row], *facts[1:])
        scales[row], noise[:, row] = scale, scale * schedule.noise_shape
        accounts.append(replace(account, peer=int(peers[row])))
        claims.append(claim)
    kinds, kind_of = _kinds(list(mechanisms.values()))
    return Protection(
        clip_norms=schedule.clip_factor[:, None] * schedule.clip_norm[peers],
        noise_multipliers=noise,
        accounts=tuple(accounts),
        claims=tuple(claims),
        calibration=section.calibration,
        kinds=kinds,
        kind_of=kind_of,
        steps_per_round=each_round,
        receivers=_receivers([mechanisms[drawing] for drawing in drawings]),
        replies=_replies(accounts, [mechanisms[drawing] for drawing in drawings], active, scales),
    )


def breaches(plan: Protection) -> list[str]:
    """Say which conditions of a paper's formula the peers' claims break, the first peer's of each kind."""
    breaches = [claim.breach for claim in plan.claims if claim is not None and claim.breach is not None]
    kinds = {breach.split("=")[0]: breach for breach in reversed(breaches)}
    remedy = "what it claims is not even claimed here; lower privacy.epsilon, take more rounds or larger batches"
    return [f"privacy.calibration=paper: {breach}: {remedy}" for breach in kinds.values()]


class _Same:
    """What was solved for a peer, once for all that are alike; they share one tuple of spends."""

    def __init__(self) -> None:
        self._solved: dict[tuple[Any, ...], tuple[float, Claim | None, Account]] = {}

    def solve(
        self, solver: Solver, mechanism: Mechanism, active: np.ndarray, budget: float | None, delta: float
    ) -> tuple[float, Claim | None, Account]:
        """Return the scale of a peer's noise, a paper's claim, and the account (of peer 0)."""
        key = (mechanism.drawing, active.tobytes(), budget, delta)
        if key not in self._solved:
            scale, claim = solver.scale(mechanism, active, budget, delta)
            account = Account(0, mechanism.spends(active, scale), None if claim else budget, delta)
            self._solved[key] = scale, claim, _within_budget(account, len(active))
        return self._solved[key]


def _replies(
    accounts: Sequence[Account], mechanisms: Sequence[Mechanism], active: np.ndarray, scales: np.ndarray
) -> tuple[Account, ...]:
    """Return what one neighbour of each peer is told by what it alone is sent, in the steps that are paid for.

    Args:
        active: bool [steps, m].
        scales: of each peer's noise, [m].
    """
    if not any(mechanism.answers for mechanism in mechanisms):
        return ()
    spends_of: dict[tuple[int, int], tuple[Spend, ...]] = {}  # equal accounts use one tuple of spends
    for account, mechanism, mask, scale in zip(accounts, mechanisms, active.T, scales.tolist(), strict=True):
        key, last = (id(mechanism), id(account.spends)), account.spends[-1].to_step if account.spends else 0
        if key not in spends_of:
            spends_of[key] = mechanism.to_one().spends(mask & (np.arange(len(mask)) < last), scale)
    return tuple(
        replace(account, spends=spends_of[id(mechanism), id(account.spends)], budget=None)
        for account, mechanism in zip(accounts, mechanisms, strict=True)
    )


def _kinds(mechanisms: Sequence[Mechanism]) -> tuple[tuple[Factors, ...], np.ndarray]:
    """Return the sums of each kind of step with their noise, and the kind of every step: alike for all peers.

    How many neighbours a sum goes to may differ.

    Raises:
        ScenarioError: where they are not alike.
    """
    numbers: dict[tuple[tuple[str, float | None], ...] | None, int] = {}
    schedules = []
    for mechanism in mechanisms:
        own = np.array([numbers.setdefault(_factors(kind), len(numbers)) for kind in mechanism.kinds])
        schedules.append(own[mechanism.kind_of])
    if any(not np.array_equal(schedule, schedules[0]) for schedule in schedules):
        raise ScenarioError("an algorithm must declare the same sums and relative noise for every peer")
    return tuple(None if schedule is None else dict(schedule) for schedule in numbers), schedules[0]


def _factors(kind: Declaration) -> tuple[tuple[str, float | None], ...] | None:
    """Return the noise of every declared sum, None for one that stays on the peer, as a hashable key."""
    return None if kind is None else tuple((part.name, None if part.to == "self" else part.noise) for part in kind)


def _receivers(mechanisms: Sequence[Mechanism]) -> dict[str, np.ndarray]:
    """Return to how many neighbours each peer sends a sum of its own in every step, int64 [steps, m], by name."""
    names = {
        part.name
        for mechanism in mechanisms
        for kind in mechanism.kinds
        for part in kind or ()
        if part.to == "neighbour"
    }
    return {name: np.stack([mechanism.receivers(name) for mechanism in mechanisms], axis=1) for name in sorted(names)}


def _within_budget(account: Account, steps: int) -> Account:
    """Return the account cut to the steps its budget allows, where the noise was given and not solved for.

    Raises:
        ScenarioError: when the budget allows not even one step.
    """
    if account.budget is None or cost(account, steps) <= account.budget:
        return account
    budget = account.budget
    last = last_that_fits(lambda stop: cost(account, stop) <= budget, 0, steps)
    parts = (spend.between(0, last) for spend in account.spends)
    present = tuple(part for part in parts if part is not None)
    if not present:
        raise ScenarioError(
            f"privacy.epsilon={account.budget:g} is below what a peer's first step costs, "
            f"{cost(account, account.spends[0].from_step + 1):.3g}; raise it or privacy.noise_multiplier"
        )
    return replace(account, spends=present)
