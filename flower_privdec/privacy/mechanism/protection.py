"""The clipping and noise of some peers in every step of a run, solved from their budgets.

    scenario --build_schedule--> Schedule            how C_k and σ_k / C_k change     (peer_mechanism)
    algorithm --build_mechanism--> Mechanism         what a peer's steps cost         (peer_mechanism)
    budget --_Solver.solve--> scale, claim, account  the one free number: the scale of its noise
    all of it --build_protection--> Protection       what a cohort, a ledger and a plan look at

The scale is given (`privacy.noise_multiplier`), solved by the accountant (`calibration: rigorous`), or taken from a
paper's formula together with the ε that the paper claims (`calibration: paper`). Whichever it is, the ε that is printed
is the accountant's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.graph.participation import Leaving, Participation, activity, planned
from flower_privdec.privacy.accountant.accounting import epsilon, last_that_fits
from flower_privdec.privacy.accountant.calibration import scale_for_budget
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.correlation import Correlation, least_ahead
from flower_privdec.privacy.mechanism.declared import Declaration, Declares, Drawing
from flower_privdec.privacy.mechanism.events import EVERYBODY, ONE_NEIGHBOUR, Adversary, Release, Spend, towards
from flower_privdec.privacy.mechanism.peer_mechanism import (
    Mechanism,
    Schedule,
    build_mechanism,
    build_schedule,
    by_peer,
)
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CancellingSection, CorrelatedSection, PrivacySection

UNLIMITED = "inf"  # an unbounded ε in JSON, which has no infinity
MOST_SPENT = 0.98  # of a budget, after which more rounds are not planned

# Of papers' formulas, by `Declares.paper_noise`.
FACTORS = {"moments": 1.0, "moments-table": 3.0}  # of eq. 11: how far an example moves a step, in clip norms
UNSCHEDULED = ("moments-table", "cross-gradients", "subsampling")  # for steps that are all alike
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the rounds

Factors = Mapping[str, float | None] | None  # the noise of each sum of a step over the step's, by the sum's name


@dataclass(frozen=True)
class Claim:
    """The ε that a paper's formula claims for one peer.

    Attributes:
        epsilon: the ε it claims at the peer's δ, for the whole run or for one round.
        each_round: whether it is for one round.
        mu_total, mu_0: of Gaussian differential privacy, if the formula uses it.
        quarters: the ε it claims after each quarter of the rounds, if the paper has that.
        breach: the condition of the formula that does not hold; None if all do.
    """

    epsilon: float
    mu_total: float | None = None
    mu_0: float | None = None
    each_round: bool = False
    quarters: tuple[float, ...] | None = None
    breach: paper.Breach | None = None


def cost(account: Account, steps: int, adversary: Adversary | None = None) -> float:
    """Return the ε of a peer's releases in the first steps of a run; by default against its budget's adversary."""
    return epsilon(towards(account.releases(0, steps), adversary or account.adversary), account.delta)


@dataclass(frozen=True)
class Protection:
    """Clip norms and noise multipliers of the peers hosted here, and the accounts they are charged to.

    Attributes:
        clip_norms: float64 [steps, m]; a round has `steps_per_round` steps.
        noise_multipliers: float64 [steps, m], noise std over clip norm, of the sum over a batch.
        accounts: one for each peer.
        claims: what the paper's formula claims for each peer if it gave the noise; else None for each peer.
        calibration: the method that gave the noise.
        kinds: for each kind of step, the sums it has, with the noise of each over the step's; None for a sum that
            stays on the peer, and for the whole kind if nothing is declared.
        kind_of: int64 [steps].
        receivers: of each sum that goes to single neighbours, the number of them in every step, int64 [steps, m].
        pairs: of noise that cancels between peers, of which `noise_multipliers` are a peer's own; None without.
        correlation: of noise that is correlated over steps, of which `noise_multipliers` are those of z; None without.
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
    pairs: PairPlan | None = None
    correlation: Correlation | None = None

    def part(self, start: int, stop: int) -> Protection:
        """Return the slice for peers [start, stop)."""
        return replace(
            self,
            clip_norms=self.clip_norms[:, start:stop],
            noise_multipliers=self.noise_multipliers[:, start:stop],
            accounts=self.accounts[start:stop],
            claims=self.claims[start:stop],
            receivers={name: counts[:, start:stop] for name, counts in self.receivers.items()},
        )

    def clip_norm(self, step: int) -> np.ndarray:
        """Return the clip norm of every peer in a step, [m]."""
        # A copy: rows that are always the same are read-only.
        return np.array(self.clip_norms[step])

    def noise_multiplier(self, step: int) -> np.ndarray:
        """Return the noise multiplier of every peer in a step, over the sum of a batch, [n_peers].

        If a step has several sums, it is that of the one with the least noise.
        """
        sums = self.kinds[self.kind_of[step]] or {}
        factors = [factor for factor in sums.values() if factor is not None]
        return np.asarray(self.noise_multipliers[step] * min(factors, default=1.0))

    def noise(self, step: int, sums: Iterable[str], copies: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the noise multiplier of each sum of a step that is published, [n_peers], by name.

        Args:
            sums: the names of the step's sums.
            copies: how many of each sum every peer makes, for one neighbour each, int64 [m]; by default one for all.

        Raises:
            ArgumentError: the sums are not the declared ones, or more copies than declared.
        """
        factors = self.kinds[self.kind_of[step]]
        names = tuple(sums)
        if factors is None:
            # Nothing is declared: each sum gets the step's noise, and ε is ∞.
            return dict.fromkeys(names, self.noise_multipliers[step] * 1.0)

        if factors.keys() != set(names):
            raise ArgumentError(
                f"step {step} makes the sums {sorted(names)} and declares {sorted(factors)}", code="release.sums"
            )
        multipliers = {}
        for name, factor in factors.items():
            if factor is None:
                continue  # it stays on its peer
            if copies is not None:
                self._check_copies(step, name, copies)
            multipliers[name] = self.noise_multipliers[step] * factor
        return multipliers

    def _check_copies(self, step: int, name: str, copies: np.ndarray) -> None:
        """Refuse more copies of a sum than declared, int64 [m]."""
        declared = np.ones_like(copies)
        if name in self.receivers:
            declared = self.receivers[name][step]
        too_many = np.flatnonzero(copies > declared)
        if len(too_many):
            row = too_many[0]
            raise ArgumentError(
                f"step {step} makes sum {name!r} for {copies[row]} neighbours and declares {declared[row]}",
                code="release.neighbours",
            )

    @property
    def others(self) -> dict[str, Adversary]:
        """Return the adversaries that another ε than the budget's holds against, by what a summary calls theirs.

        `replies`: one neighbour, by only the replies to it, which is not a bound on all that it hears; if the algorithm
        sends some. `if_all_collude`: all other peers together; if noise cancels between peers. Otherwise the budget is
        against these anyway.
        """
        adversaries: dict[str, Adversary] = {}
        if self.receivers:
            adversaries["replies"] = ONE_NEIGHBOUR
        if self.pairs is not None:
            adversaries["if_all_collude"] = EVERYBODY
        return adversaries

    @property
    def own_alone(self) -> tuple[Account, ...]:
        """Return each peer's account if all other peers collude, so that only its own noise is left.

        Empty if noise does not cancel between peers: the accounts then are these.
        """
        if self.pairs is None:
            return ()
        return tuple(account.towards(EVERYBODY) for account in self.accounts)

    def epsilons(self, rounds: int, adversary: Adversary | None = None) -> list[float]:
        """Return the ε of every peer after some rounds; by default against its budget's adversary."""
        return [cost(account, rounds * self.steps_per_round, adversary) for account in self.accounts]


def build_protection(
    scenario: Scenario,
    section: PrivacySection,
    algorithm: Declares,
    drawings: Sequence[Drawing],
    participation: Participation,
    peers: np.ndarray,
    weight_factor: float = 1.0,
    noised: Callable[[Declaration], Declaration] = lambda sums: sums,
    pair: Callable[[np.ndarray], PairPlan] | None = None,
) -> Protection:
    """Solve each peer's noise from its budget, for the steps of the rounds in which it is active.

    Who is active is public and decided beforehand, so a peer's noise is solved for its own number of active rounds:
    activity amplifies nothing and idle rounds cost nothing.

    A run that was given more rounds has paid for those before them, with which its accounts begin. The noise of the
    others is solved from what these leave of the budget.

    Args:
        algorithm: declares its steps' releases.
        drawings: how each of these peers draws its examples.
        participation: the participation of the whole network.
        peers: global ids, int64 [m].
        weight_factor: the weight factor of the mixing weights, in a paper's formula.
        noised: returns a step's cost under its noise; by default independent normals.
        pair: returns the pairs' noise, from the noise that each peer would need by itself in every step, over the
            factor of its sums, float64 [steps, m]; None if noise does not cancel.

    Raises:
        ScenarioError: a budget is below what any noise can keep, or spent; the algorithm declares no release, or a
            paper's formula does not apply.
    """
    before = None
    if scenario.earlier:
        _check_more_rounds(section)
        earlier = scenario.stage_before()
        assert earlier.private is not None
        before = build_protection(earlier, earlier.private, algorithm, drawings, participation, peers, noised=noised)

    # What all peers share: the steps, which of them are still to be planned, and who is active in each.
    per_round = algorithm.steps_per_round
    schedule = build_schedule(scenario).repeated(per_round)
    first = scenario.first_round * per_round  # the step with which the plan begins
    active = activity(planned(participation), scenario.rounds)[:, peers].repeat(per_round, axis=0)  # bool [steps, m]
    active[:first] = False

    # Who leaves is planned for as if it stayed, and pays for the steps that it takes.
    taken = active
    if isinstance(participation, Leaving):
        taken = active & activity(participation, scenario.rounds)[:, peers].repeat(per_round, axis=0)

    by_drawing = {drawing: build_mechanism(algorithm, drawing, schedule, noised) for drawing in dict.fromkeys(drawings)}
    mechanisms = [by_drawing[drawing] for drawing in drawings]

    # The scale of each peer's noise. Equal peers are solved once, and share one tuple of spends.
    deltas = _of_peers(section.delta, scenario.n_peers, peers)
    budgets: Sequence[float | None] = [None] * len(peers)
    if section.epsilon is not None:
        budgets = _of_peers(section.epsilon, scenario.n_peers, peers)
    share = float(participation.chances.mean())  # ι
    solver = _Solver(scenario, section, algorithm, schedule, first, share, weight_factor)
    solved: dict[tuple[Any, ...], _Solution] = {}
    solutions = []
    for row, (mechanism, budget, delta) in enumerate(zip(mechanisms, budgets, deltas, strict=True)):
        paid = () if before is None else before.accounts[row].spends
        key = (mechanism.drawing, active[:, row].tobytes(), budget, delta, id(paid))
        if key not in solved:
            solved[key] = solver.solve(mechanism, active[:, row], budget, delta, _cut(paid, 0, first))
        solutions.append(solved[key])

    scales = np.array([solution.scale for solution in solutions])  # [m]
    accounts = []
    for row, (peer, solution) in enumerate(zip(peers, solutions, strict=True)):
        account = replace(solution.account, peer=int(peer))
        if not np.array_equal(taken[:, row], active[:, row]):
            # The budget may end a peer's steps before the plan does.
            last = account.spends[-1].to_step if account.spends else 0
            charged = taken[:, row] & (np.arange(len(taken)) < last)
            later = mechanisms[row].spends(charged, solution.scale)
            account = replace(account, spends=_cut(account.spends, 0, first) + later)
        accounts.append(account)
    noise = by_peer(schedule.noise_shape, scales)  # [steps, m]
    clip_norms = by_peer(schedule.clip_factor, schedule.clip_norm[peers])  # [steps, m]
    kinds, kind_of = _kinds(list(by_drawing.values()))

    plan = None
    if pair is not None:
        needed = np.where(active, clip_norms * noise, 0.0)
        plan = replace(pair(needed), factors=kinds, kind_of=kind_of)
        noise = noise * plan.own
        accounts = _paired(accounts, mechanisms, taken, scales, plan)

    if before is not None:
        clip_norms = np.concatenate([before.clip_norms[:first], clip_norms[first:]])
        noise = np.concatenate([before.noise_multipliers[:first], noise[first:]])

    return Protection(
        clip_norms=clip_norms,
        noise_multipliers=noise,
        accounts=tuple(accounts),
        claims=tuple(solution.claim for solution in solutions),
        calibration=section.calibration,
        kinds=kinds,
        kind_of=kind_of,
        steps_per_round=per_round,
        receivers=_receivers(mechanisms),
        pairs=plan,
    )


def _of_peers(value: float | Sequence[float], n_peers: int, peers: np.ndarray) -> list[float]:
    """Return the value of each of some peers, from one value for all, or one for each peer of the network."""
    values = np.broadcast_to(np.asarray(value, dtype=np.float64), (n_peers,))
    return list(values[peers].tolist())


def _receivers(mechanisms: Sequence[Mechanism]) -> dict[str, np.ndarray]:
    """Return `Protection.receivers`."""
    to_neighbours = set()
    for mechanism in mechanisms:
        for kind in mechanism.kinds:
            to_neighbours |= {part.name for part in kind or () if part.to == "neighbour"}
    return {name: np.stack([one.receivers(name) for one in mechanisms], axis=1) for name in sorted(to_neighbours)}


@dataclass(frozen=True)
class _Solution:
    """The noise of one peer.

    Attributes:
        scale: the scale of its noise.
        claim: what the paper's formula claims, if it gave the scale.
        account: what it is charged, under the peer number 0.
    """

    scale: float
    claim: Claim | None
    account: Account


@dataclass(frozen=True)
class _Solver:
    """Solves the noise of single peers.

    Attributes:
        first: the step with which the plan begins; those before it are paid.
        share: the share of the peers that are active in a round, on average (ι).
        weight_factor: see `build_protection`.
    """

    scenario: Scenario
    section: PrivacySection
    algorithm: Declares
    schedule: Schedule
    first: int
    share: float
    weight_factor: float

    def solve(
        self, mechanism: Mechanism, active: np.ndarray, budget: float | None, delta: float, paid: tuple[Spend, ...]
    ) -> _Solution:
        """Return the noise of one peer.

        Args:
            active: in which steps it is active, bool [steps].
            paid: what it spent in the steps before the plan.
        """
        past = [spend.release for spend in paid]
        if budget is not None:
            self._check_solvable(mechanism, budget, delta, past)

        claim = None
        if self.section.noise_multiplier is not None:
            scale = self.section.noise_multiplier
        elif budget is None or not mechanism.releases(active, 1.0):
            scale = 1.0
        elif self.section.calibration == "paper":
            scale, claim = self._by_paper(mechanism.drawing, active, budget, delta)
        else:
            scale = scale_for_budget(lambda scale: [*past, *mechanism.releases(active, scale)], budget, delta)

        # A claimed ε is not a budget: the run takes all its steps, and the accountant's ε stands beside the claim.
        if claim is not None:
            budget = None
        planned = _cut(mechanism.spends(active, scale), self.first, len(active))
        account = Account(0, paid + planned, budget, delta, at_once=self.algorithm.steps_per_round)

        # Noise that was given, not solved for, may cost more than the budget: the plan then ends early.
        if budget is not None and cost(account, len(active)) > budget:
            account = self._shortened(account, budget, len(active), paid)
        return _Solution(scale, claim, account)

    def _check_solvable(self, mechanism: Mechanism, budget: float, delta: float, past: Sequence[Release]) -> None:
        """Refuse a budget that is spent, or that nothing can keep."""
        if past:
            spent = epsilon(past, delta)
            if spent > MOST_SPENT * budget:
                raise ScenarioError(
                    f"rounds={self.scenario.rounds}: the first {self.scenario.first_round} rounds have spent "
                    f"ε = {spent:.4g} of privacy.epsilon={budget:g}, which leaves nothing for others: raise it, as by "
                    f"--set privacy.epsilon={2 * budget:g}, or end here",
                    code="run.budget-spent",
                )

        if None in mechanism.kinds:
            own = self.section.noise
            under = ""
            if isinstance(own, OwnSection):
                under = f" under privacy.noise.module={own.module!r}"
            key = "algorithm.module" if ":" in self.algorithm.name else "algorithm.name"
            raise ScenarioError(
                f"{key}={self.algorithm.name!r} declares no releases{under}, so its ε is ∞ and no noise keeps "
                f"privacy.epsilon={budget:g}; declare what its steps release (`released`, which a class that changes "
                "another one has to declare again), or set privacy: none",
                code="privacy.undeclared",
            )

    def _shortened(self, account: Account, budget: float, n_steps: int, paid: tuple[Spend, ...]) -> Account:
        """Return the account of the whole rounds that fit a budget; refuse a plan of which none fits."""
        per_round = account.at_once
        last = last_that_fits(lambda stop: cost(account, stop) <= budget, self.first, n_steps)
        last -= last % per_round  # a round of which only a part fits is not begun

        parts = (spend.between(0, last) for spend in account.spends)
        present = tuple(part for part in parts if part is not None)
        if present == paid:
            next_step = account.spends[len(paid)].from_step
            end = next_step - next_step % per_round + per_round
            what = "step" if per_round == 1 else f"round of {per_round} steps"
            raise ScenarioError(
                f"privacy.epsilon={budget:g} is below what a peer's first {what} costs, "
                f"{cost(account, end):.3g}; raise it or privacy.noise_multiplier",
                code="privacy.budget",
            )
        return replace(account, spends=present)

    def _by_paper(self, drawing: Drawing, active: np.ndarray, budget: float, delta: float) -> tuple[float, Claim]:
        """Return the scale by the formula that the algorithm names (`Declares.paper_noise`), and what it claims.

        The formulas give σ of an averaged gradient; times the batch, b, it is that of the sum.
        """
        formula = self.algorithm.paper_noise
        is_constant = self.schedule.constant
        if formula is None or (formula in UNSCHEDULED and not is_constant):
            changed = " with a schedule" if formula else ""
            raise ScenarioError(
                f"privacy.calibration='paper' has no formula for {self.algorithm.name}{changed}: no paper claims an ε "
                "for it; use calibration rigorous",
                code="privacy.no-formula",
            )

        examples = drawing.size
        batch = drawing.batch
        rounds = len(active)
        if formula == "subsampling":  # DP-DDA, Th. 1
            quarters = tuple(paper.epsilon_after(budget, t) for t in QUARTERS)
            sigma = paper.subsampled_sigma(budget, delta, rounds=rounds, dataset_size=examples, share=self.share)
            breach = paper.subsampling_breach(
                budget, rounds=rounds, dataset_size=examples, batch=batch, share=self.share
            )
            return sigma * batch, Claim(budget, quarters=quarters, breach=breach)

        if formula == "cross-gradients":  # PDSL, eq. 27
            sigma = paper.cross_gradient_sigma(budget, delta, self.section.paper.phi_min or 1.0, self.weight_factor)
            return sigma * batch, Claim(budget, each_round=True)

        # A schedule on steps of `moments` is Dyn-D2P's Algorithm 2, which has a formula of its own.
        if formula != "gdp" and (formula != "moments" or is_constant):  # PrivSGP-VR, eq. 11
            factor = FACTORS[formula]
            sigma = paper.moments_sigma(
                budget, delta, int(active.sum()), examples, self.section.paper.c_2, factor=factor
            )
            return sigma * batch, Claim(budget)

        total = paper.gdp_mu(budget, delta)
        shape = self.schedule.noise_shape[active]
        if self.schedule.exponential is None:  # Dyn-D2P, Prop. 4
            return paper.proposition_4(total, drawing.rate, shape), Claim(budget, total)
        mu_0 = paper.gdp_mu_0(total, drawing.rate, shape**-2.0)  # Dyn-D2P, eq. 8 and 9
        return 1 / mu_0, Claim(budget, total, mu_0)


def _check_more_rounds(section: PrivacySection) -> None:
    """Refuse more rounds if what the first ones cost does not follow from what is noted of them."""
    why = ""
    if section.calibration == "paper":
        why = "calibration=paper, whose formula is for one plan"
    if isinstance(section.noise, CancellingSection):
        why = "noise.kind=cancelling, whose noise was to cancel at the end of the first plan"
    if isinstance(section.noise, CorrelatedSection):
        why = "noise.kind=correlated, whose noise was planned for the first rounds"
    if why:
        raise ScenarioError(
            f"more rounds cannot be planned with privacy.{why}: start another run with all rounds",
            code="run.more-rounds",
        )


def _cut(spends: Iterable[Spend], start: int, stop: int) -> tuple[Spend, ...]:
    """Return what some spends cost in the steps [start, stop)."""
    parts = (spend.cut(start, stop) for spend in spends)
    return tuple(part for part in parts if part is not None)


def breaches(plan: Protection, *, with_least: bool = False) -> dict[str, str]:
    """Return in words which conditions of a paper's formula the peers' claims break, the first peer's of each.

    Args:
        with_least: see `paper.Breach`; only for those who have the peers' data.

    Returns:
        The words, by the condition.
    """
    remedy = "its claim does not apply here; lower privacy.epsilon, take more rounds or larger batches"
    words: dict[str, str] = {}
    for claim in plan.claims:
        if claim is not None and claim.breach is not None:
            # The first peer that breaks a condition stands for the others.
            text = claim.breach.text(with_least=with_least)
            words.setdefault(claim.breach.condition, f"privacy.calibration=paper: {text}: {remedy}")
    return words


def _paired(
    accounts: Sequence[Account],
    mechanisms: Sequence[Mechanism],
    active: np.ndarray,
    scales: np.ndarray,
    plan: PairPlan,
) -> list[Account]:
    """Return accounts that are charged for the noise that is left against each adversary, when noise cancels.

    Args:
        accounts, mechanisms: of some peers, with the noise that each would need by itself.
        active: bool [steps, m].
        scales: the scale of each peer's noise, [m].
        plan: the plan that all peers have.
    """
    left = plan.left_against()
    adversary = Adversary(plan.colluding)
    n_steps = len(active)
    spends_of: dict[tuple[Any, ...], tuple[Spend, ...]] = {}  # equal accounts share one tuple of spends
    paired = []
    for row, (account, mechanism) in enumerate(zip(accounts, mechanisms, strict=True)):
        own = plan.own[:, row]
        against = {q: shares[:, row] for q, shares in left.items()}
        shares_key = tuple(shares.tobytes() for shares in (own, *against.values()))
        key = (id(mechanism), id(account.spends), shares_key)
        if key not in spends_of:
            # The budget may end a peer's steps before the plan does.
            last = account.spends[-1].to_step if account.spends else 0
            charged = active[:, row] & (np.arange(n_steps) < last)

            # An example that is drawn moves what is correlated with its step, too: all of that hides it.
            groups = mechanism.drawing.groups
            least = {q: least_ahead(shares, groups) for q, shares in against.items()}
            spends_of[key] = mechanism.spends(charged, float(scales[row]), least_ahead(own, groups), least)
        paired.append(replace(account, spends=spends_of[key], adversary=adversary))
    return paired


def _kinds(mechanisms: Sequence[Mechanism]) -> tuple[tuple[Factors, ...], np.ndarray]:
    """Return the sums of each kind of step with their noise, and the kind of every step, which all peers must share."""
    # A kind is told apart by its sums and their noise; the rest of a declaration may differ between peers.
    numbers: dict[tuple[tuple[str, float | None], ...] | None, int] = {}
    schedules = []
    for mechanism in mechanisms:
        own_numbers = []
        for sums in mechanism.kinds:
            key = None
            if sums is not None:
                key = tuple((part.name, None if part.to == "self" else part.noise) for part in sums)
            own_numbers.append(numbers.setdefault(key, len(numbers)))
        schedules.append(np.array(own_numbers)[mechanism.kind_of])

    if any(not np.array_equal(schedule, schedules[0]) for schedule in schedules):
        message = "an algorithm must declare the same sums and relative noise for every peer"
        raise ScenarioError(message, code="privacy.declared")
    kinds = tuple(None if key is None else dict(key) for key in numbers)
    return kinds, schedules[0]
