"""The clipping and noise of some peers in every step, solved from their budgets.

A peer's steps are a *mechanism* with one free number, the scale of its noise: given, solved by the accountant, or by a
paper's formula, with the ε that the paper claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.graph.topology import Participation, activity
from flower_privdec.privacy.accountant.accounting import epsilon, last_that_fits
from flower_privdec.privacy.accountant.calibration import scale_for_budget
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.declared import Declaration, Declares, Drawing, joint_release
from flower_privdec.privacy.mechanism.events import (
    EVERYBODY,
    ONE_NEIGHBOUR,
    Adversary,
    Release,
    Spend,
    plan_spends,
    towards,
)
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CancellingSection, PrivacySection

UNLIMITED = "inf"  # an unbounded ε in JSON, which has no infinity

Factors = Mapping[str, float | None] | None
Solution = tuple[float, "Claim | None", Account]
FACTORS = {"moments": 1.0, "moments-table": 3.0}  # of eq. 11: how far an example moves a step, in clip norms
UNSCHEDULED = ("moments-table", "cross-gradients", "subsampling")  # formulas for steps that are all alike
QUARTERS = (0.25, 0.5, 0.75, 1.0)
MOST_SPENT = 0.98  # of a budget, after which more rounds are not planned


@dataclass(frozen=True, eq=False)
class Mechanism:
    """The steps of one peer: each publishes the sums of its kind, with noise of scale * shape[k] clip norms.

    Attributes:
        drawing: how the peer draws examples.
        kinds: the different declarations of its steps.
        kind_of: int64 [steps], which of them a step has.
        shape: float64 [steps].
    """

    drawing: Drawing
    kinds: tuple[Declaration, ...]
    kind_of: np.ndarray
    shape: np.ndarray

    def receivers(self, name: str) -> np.ndarray:
        """Return the number of neighbours that get a sum in each step, one each, int64 [steps]."""
        counts = [sum(part.receivers for part in kind or () if part.name == name) for kind in self.kinds]
        return np.asarray(np.array(counts, dtype=np.int64)[self.kind_of])

    def spends(
        self,
        active: np.ndarray,
        scale: float,
        own: np.ndarray | float = 1.0,
        left: Mapping[int, np.ndarray] | None = None,
    ) -> tuple[Spend, ...]:
        """Return the cost to a peer that is active in some steps, bool [steps].

        Args:
            own: of noise that cancels between peers, what is left of it if all other peers collude, over the noise at
                this scale, [steps].
            left: likewise if so many collude, by their number.
        """
        spends = list[Spend]()
        for kind, release in self._released:
            whole = scale * self.shape * release.noise_multiplier
            against = {q: whole * share for q, share in (left or {}).items()}
            spends += plan_spends(release, active & (self.kind_of == kind), whole * own, against)
        return tuple(sorted(spends, key=lambda spend: spend.from_step))

    def releases(self, active: np.ndarray, scale: float) -> list[Release]:
        """Return the releases of `spends`, equal steps together."""
        if self.drawing.sampling == "shuffle":
            return [spend.release for spend in self.spends(active, scale)]
        spends = []
        for kind, release in self._released:
            chosen = scale * self.shape[active & (self.kind_of == kind)] * release.noise_multiplier
            noises, counts = np.unique(chosen, return_counts=True)
            spends += [
                replace(release, noise_multiplier=float(noise), steps=int(count))
                for noise, count in zip(noises, counts, strict=True)
            ]
        return spends

    @cached_property
    def _released(self) -> tuple[tuple[int, Release], ...]:
        """Each kind with a cost, and the release of one such step at noise multiplier 1."""
        releases = (joint_release(kind, self.drawing) for kind in self.kinds)
        return tuple((kind, release) for kind, release in enumerate(releases) if release is not None)


def build_mechanism(
    algorithm: Declares,
    drawing: Drawing,
    schedule: Schedule,
    noised: Callable[[Declaration], Declaration] = lambda sums: sums,
) -> Mechanism:
    """Return the mechanism of a peer, from its algorithm's declarations.

    Args:
        schedule: of steps.
        noised: returns a step's cost under its noise; by default independent normals.

    Raises:
        ScenarioError: for a sampling or a schedule under which the declared sums have no proved bound.
    """
    if algorithm.remembers_clipped and np.ptp(schedule.clip_factor) > 0:
        raise ScenarioError(
            "privacy.schedule changes the clip norm, and the gradients a table keeps were clipped to that of earlier "
            "steps; keep the clip norm constant (noise may change), or use algorithm.table=snapshot",
            code="privacy.schedule",
        )
    numbers: dict[Declaration, int] = {}
    kind_of = np.empty(len(schedule.noise_shape), dtype=np.int64)
    for step in range(len(kind_of)):
        kind_of[step] = numbers.setdefault(noised(algorithm.released(step, drawing)), len(numbers))
    if drawing.sampling == "shuffle" and len(numbers) > 1:
        raise ScenarioError(
            f"data.batch.sampling='shuffle' has no proved privacy with {algorithm.name}, whose steps are not all "
            "alike; use poisson (or uniform)",
            code="privacy.sampling",
        )
    return Mechanism(drawing, tuple(numbers), kind_of, schedule.noise_shape)


@dataclass(frozen=True)
class Claim:
    """The ε that a paper's formula claims for one peer.

    Attributes:
        epsilon: the ε it claims at the peer's δ, for the whole run or for one round.
        each_round: whether it is for one round.
        mu_total, mu_0: of Gaussian differential privacy, where the formula uses it.
        quarters: the ε it claims after each quarter of the rounds, where the paper has that.
        breach: the condition of the formula that does not hold; None where all do.
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
        clip_norms: float64 [steps, m], where a round has `steps_per_round` steps.
        noise_multipliers: likewise; noise std over clip norm, of the sum over a batch.
        accounts: one for each peer.
        claims: of the paper's formula, where it gave the noise; else None for each peer.
        calibration: the method that gave the noise.
        kinds: for each kind of step, the sums it has, with the noise of each over the step's; None for a sum that
            stays on the peer, and for the whole kind where nothing is declared.
        kind_of: int64 [steps].
        receivers: of each sum that goes to single neighbours, the number of them in every step, int64 [steps, m].
        pairs: of noise that cancels between peers, of which `noise_multipliers` are a peer's own; None without.
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
            sums: the names of the step's sums.
            copies: how many of each sum every peer makes, for one neighbour each, int64 [m]; by default one for all.

        Raises:
            ArgumentError: the sums are not the declared ones, or more copies than declared.
        """
        factors = self.kinds[self.kind_of[step]]
        names = tuple(sums)
        if factors is None:
            factors = dict.fromkeys(names, 1.0)
        elif factors.keys() != set(names):
            raise ArgumentError(
                f"step {step} makes the sums {sorted(names)} and declares {sorted(factors)}", code="release.sums"
            )
        elif copies is not None:
            for name in (name for name, noise in factors.items() if noise is not None):
                declared = self.receivers[name][step] if name in self.receivers else np.ones_like(copies)
                for row in np.flatnonzero(copies > declared)[:1]:
                    raise ArgumentError(
                        f"step {step} makes sum {name!r} for {copies[row]} neighbours and declares {declared[row]}",
                        code="release.neighbours",
                    )
        return {name: self.noise_multipliers[step] * noise for name, noise in factors.items() if noise is not None}

    @property
    def others(self) -> dict[str, Adversary]:
        """Return the adversaries that another ε than the budget's holds against, by what a summary calls theirs.

        `replies`: one neighbour, by the replies to it alone, which is no bound on all that it hears; only if an
        algorithm sends some. `if_all_collude`: all other peers together; only if noise cancels between peers, else the
        budget is against these.
        """
        adversaries = dict[str, Adversary]()
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
        return () if self.pairs is None else tuple(account.towards(EVERYBODY) for account in self.accounts)

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

    Who is active is public and decided beforehand, so a peer's noise is solved for its own number of
    active rounds: activity amplifies nothing and idle rounds cost nothing.

    A run that was given more rounds has paid for those before them, which its accounts begin with; the noise of the
    others is solved from what they leave of the budget.

    Args:
        algorithm: declares its steps' releases.
        drawings: how each of these peers draws its examples.
        participation: of the whole network.
        peers: global ids, int64 [m].
        weight_factor: of the mixing weights, in a paper's formula.
        noised: returns a step's cost under its noise; by default independent normals.
        pair: returns the pairs' noise, from the noise that each peer would need by itself in every step, over the
            factor of its sums, float64 [steps, m]; None where noise does not cancel.

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

    def of_peers(value: float | Sequence[float]) -> list[float]:
        return list(np.broadcast_to(np.asarray(value, dtype=np.float64), (scenario.n_peers,))[peers].tolist())

    per_round = algorithm.steps_per_round
    schedule = build_schedule(scenario).repeated(per_round)
    active = activity(participation, scenario.rounds)[:, peers].repeat(per_round, axis=0)
    first = scenario.first_round * per_round  # the step with which the plan begins
    active[:first] = False
    deltas = of_peers(section.delta)
    budgets = [None] * len(peers) if section.epsilon is None else of_peers(section.epsilon)
    by_drawing = {drawing: build_mechanism(algorithm, drawing, schedule, noised) for drawing in dict.fromkeys(drawings)}
    mechanisms = [by_drawing[drawing] for drawing in drawings]
    share = float(participation.chances.mean())  # ι
    solver = _Solver(scenario, section, algorithm, schedule, first, share, weight_factor)
    solved: dict[tuple[Any, ...], Solution] = {}  # equal peers share one tuple of spends
    noise = np.empty(active.shape)
    scales = np.empty(len(peers))
    accounts = []
    claims = []
    for row, (mechanism, budget, delta) in enumerate(zip(mechanisms, budgets, deltas, strict=True)):
        paid = () if before is None else before.accounts[row].spends
        key = (mechanism.drawing, active[:, row].tobytes(), budget, delta, id(paid))
        if key not in solved:
            solved[key] = solver.solve(mechanism, active[:, row], budget, delta, _cut(paid, 0, first))
        scales[row], claim, account = solved[key]
        noise[:, row] = scales[row] * schedule.noise_shape
        accounts.append(replace(account, peer=int(peers[row])))
        claims.append(claim)
    kinds, kind_of = _kinds(list(by_drawing.values()))
    clip_norms = schedule.clip_factor[:, None] * schedule.clip_norm[peers]
    plan = None
    if pair is not None:
        plan = replace(pair(np.where(active, clip_norms * noise, 0.0)), factors=kinds, kind_of=kind_of)
        noise *= plan.own
        accounts = _paired(accounts, mechanisms, active, scales, plan)
    if before is not None:
        clip_norms = np.concatenate([before.clip_norms[:first], clip_norms[first:]])
        noise[:first] = before.noise_multipliers[:first]
    to_some = {part.name for m in mechanisms for kind in m.kinds for part in kind or () if part.to == "neighbour"}
    return Protection(
        clip_norms=clip_norms,
        noise_multipliers=noise,
        accounts=tuple(accounts),
        claims=tuple(claims),
        calibration=section.calibration,
        kinds=kinds,
        kind_of=kind_of,
        steps_per_round=per_round,
        receivers={name: np.stack([m.receivers(name) for m in mechanisms], axis=1) for name in sorted(to_some)},
        pairs=plan,
    )


@dataclass(frozen=True)
class _Solver:
    """Solves the noise of single peers.

    Attributes:
        first: the step with which the plan begins; those before it are paid.
        share: of the peers that are active in a round, on average (ι).
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
    ) -> Solution:
        """Return the scale of one peer's noise, the claim where a paper's formula gave it, and the peer's account.

        Args:
            paid: what it spent in the steps before the plan.
        """
        claim = None
        past = [spend.release for spend in paid]
        if past and budget is not None and (spent := epsilon(past, delta)) > MOST_SPENT * budget:
            raise ScenarioError(
                f"rounds={self.scenario.rounds}: the first {self.scenario.first_round} rounds have spent "
                f"ε = {spent:.4g} of privacy.epsilon={budget:g}, which leaves nothing for others: raise it, as by "
                f"--set privacy.epsilon={2 * budget:g}, or end here",
                code="run.budget-spent",
            )
        if budget is not None and None in mechanism.kinds:
            own = self.section.noise
            under = f" under privacy.noise.module={own.module!r}" if isinstance(own, OwnSection) else ""
            raise ScenarioError(
                f"algorithm.name={self.algorithm.name!r} declares no releases{under}, so its ε is ∞ and no noise keeps "
                f"privacy.epsilon={budget:g}; declare what its steps release (`released`), or set privacy: none",
                code="privacy.undeclared",
            )
        if self.section.noise_multiplier is not None:
            scale = self.section.noise_multiplier
        elif budget is None or not mechanism.releases(active, 1.0):
            scale = 1.0
        elif self.section.calibration == "paper":
            scale, claim = self._by_paper(mechanism.drawing, active, budget, delta)
        else:
            scale = scale_for_budget(lambda scale: [*past, *mechanism.releases(active, scale)], budget, delta)
        budget = None if claim else budget
        planned = _cut(mechanism.spends(active, scale), self.first, len(active))
        per_round = self.algorithm.steps_per_round
        account = Account(0, paid + planned, budget, delta, at_once=per_round)
        if budget is not None and cost(account, len(active)) > budget:  # the noise was not solved for
            last = last_that_fits(lambda stop: cost(account, stop) <= budget, self.first, len(active))
            last -= last % per_round  # a round of which a part fits is not begun
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
            account = replace(account, spends=present)
        return scale, claim, account

    def _by_paper(self, drawing: Drawing, active: np.ndarray, budget: float, delta: float) -> tuple[float, Claim]:
        """Return the scale by eq. 11 (PrivSGP-VR), 8, 9, or Prop. 4 (Dyn-D2P), eq. 27 (PDSL), or Th. 1 (DP-DDA)."""
        formula = self.algorithm.paper_noise
        q = drawing.size
        b = drawing.batch
        scheduled = not self.schedule.constant and formula == "moments"  # Dyn-D2P's Algorithm 2 on PrivSGP's steps
        if formula is None or (formula in UNSCHEDULED and not self.schedule.constant):
            changed = " with a schedule" if formula else ""
            raise ScenarioError(
                f"privacy.calibration='paper' has no formula for {self.algorithm.name}{changed}: no paper claims an ε "
                "for it; use calibration rigorous",
                code="privacy.no-formula",
            )
        if formula == "subsampling":
            rounds = len(active)
            quarters = tuple(paper.epsilon_after(budget, t) for t in QUARTERS)
            sigma = paper.subsampled_sigma(budget, delta, rounds=rounds, dataset_size=q, share=self.share)
            breach = paper.subsampling_breach(budget, rounds=rounds, dataset_size=q, batch=b, share=self.share)
            return sigma * b, Claim(budget, quarters=quarters, breach=breach)
        if formula == "cross-gradients":
            sigma = paper.cross_gradient_sigma(budget, delta, self.section.phi_min or 1.0, self.weight_factor)
            return sigma * b, Claim(budget, each_round=True)
        if formula != "gdp" and not scheduled:
            sigma = paper.moments_sigma(budget, delta, int(active.sum()), q, self.section.c_2, factor=FACTORS[formula])
            return sigma * b, Claim(budget)
        total = paper.gdp_mu(budget, delta)
        shape = self.schedule.noise_shape[active]
        if self.schedule.exponential is None:
            return paper.proposition_4(total, drawing.rate, shape), Claim(budget, total)
        mu_0 = paper.gdp_mu_0(total, drawing.rate, shape**-2.0)
        return 1 / mu_0, Claim(budget, total, mu_0)


def _check_more_rounds(section: PrivacySection) -> None:
    """Refuse more rounds where what the first ones cost does not follow from what is noted of them."""
    why = "calibration=paper, whose formula is for one plan" if section.calibration == "paper" else ""
    if isinstance(section.noise, CancellingSection):
        why = "noise.kind=cancelling, whose noise was to cancel at the end of the first plan"
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
        with_least: see `paper.Breach`; only for who has the peers' data.

    Returns:
        The words, by the condition.
    """
    remedy = "its claim does not apply here; lower privacy.epsilon, take more rounds or larger batches"
    words: dict[str, str] = {}
    for claim in plan.claims:
        if claim is not None and claim.breach is not None:
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
    """Return accounts whose steps are charged at what noise that cancels leaves against each adversary.

    Args:
        accounts, mechanisms: of some peers, with the noise that each would need by itself.
        active: bool [steps, m].
        scales: of each peer's noise, [m].
        plan: of all peers.
    """
    left = plan.left_against()
    adversary = Adversary(plan.colluding)
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
            charged = active[:, row] & (np.arange(len(active)) < last)
            spends_of[key] = mechanism.spends(charged, float(scales[row]), own, against)
        paired.append(replace(account, spends=spends_of[key], adversary=adversary))
    return paired


def _kinds(mechanisms: Sequence[Mechanism]) -> tuple[tuple[Factors, ...], np.ndarray]:
    """Return the sums of each kind of step with their noise, and the kind of every step, which all peers must share."""
    numbers: dict[tuple[tuple[str, float | None], ...] | None, int] = {}
    schedules = []
    for mechanism in mechanisms:
        keys = [
            None if kind is None else tuple((part.name, None if part.to == "self" else part.noise) for part in kind)
            for kind in mechanism.kinds
        ]
        schedules.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys])[mechanism.kind_of])
    if any(not np.array_equal(schedule, schedules[0]) for schedule in schedules):
        message = "an algorithm must declare the same sums and relative noise for every peer"
        raise ScenarioError(message, code="privacy.declared")
    return tuple(None if schedule is None else dict(schedule) for schedule in numbers), schedules[0]


@dataclass(frozen=True)
class Schedule:
    """C_k and the shape of σ_k / C_k over the rounds.

    Attributes:
        clip_norm: float64 [n_peers], C_0 of each peer.
        clip_factor: float64 [rounds], C_k / C_0.
        noise_shape: float64 [rounds], the noise multiplier of round k at scale 1.
        exponential: (ρ_c, ρ_μ) where the shape is Dyn-D2P's, None where it is given by lists.
    """

    clip_norm: np.ndarray
    clip_factor: np.ndarray
    noise_shape: np.ndarray
    exponential: tuple[float, float] | None

    @property
    def constant(self) -> bool:
        """Return whether every round is alike."""
        return self.exponential == (1.0, 1.0)

    def repeated(self, times: int) -> Schedule:
        """Return the schedule of steps, so many a round, instead of rounds."""
        return replace(self, clip_factor=self.clip_factor.repeat(times), noise_shape=self.noise_shape.repeat(times))


def build_schedule(scenario: Scenario) -> Schedule:
    """Return the schedule of a scenario with privacy.

        C_k = C_0 ρ_c^{-k/K},  μ_k = μ_0 ρ_μ^{k/K},  σ_k = C_k / μ_k

    so the noise multiplier σ_k / C_k is (1/μ_0) ρ_μ^{-k/K}: a shape times the scale 1/μ_0.

    Source: Dyn-D2P (Zhu et al.), Algorithm 1, lines 5 to 8 (and 2 for lists).
    """
    private = scenario.private
    if private is None:
        raise ValueError("a scenario without privacy has no schedule")
    rounds = scenario.rounds
    section = private.schedule
    clip, rho_c, rho_mu = scenario.algorithm.own_schedule or (None, 1.0, 1.0)
    clip = clip or private.clip_norm
    if np.ndim(clip) and np.size(clip) != scenario.n_peers:
        raise ScenarioError(
            f"algorithm: its clip norm lists {np.size(clip)} numbers for n_peers={scenario.n_peers}: give one a peer",
            code="privacy.clip-norm",
        )
    norms = np.broadcast_to(np.asarray(clip, dtype=np.float64), (scenario.n_peers,))
    if section is not None and (section.clip_norms is not None or section.noise is not None):
        factor = _stretch([1.0] if section.clip_norms is None else section.clip_norms, rounds, "clip_norms")
        sigma = _stretch([1.0] if section.noise is None else section.noise, rounds, "noise")
        return Schedule(norms, factor, sigma / factor, None)
    if section is not None:
        rho_c = section.rho_c
        rho_mu = section.rho_mu
    share = np.arange(rounds) / rounds
    return Schedule(norms, rho_c**-share, rho_mu**-share, (rho_c, rho_mu))


def _stretch(values: Sequence[float], rounds: int, name: str) -> np.ndarray:
    """Return one value a round: the list itself, or straight lines through fewer values."""
    if not 1 <= len(values) <= rounds:
        raise ScenarioError(
            f"privacy.schedule.{name} lists {len(values)} values for rounds={rounds}: give one a round, or fewer",
            code="privacy.schedule",
        )
    knots = np.linspace(0, max(rounds - 1, 1), len(values))
    return np.asarray(np.interp(np.arange(rounds), knots, np.asarray(values, dtype=np.float64)))
