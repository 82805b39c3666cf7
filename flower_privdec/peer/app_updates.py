"""An app's updates: each is charged, clipped as a whole, noised, and added to the peer's mass.

`take_step` is the only path from what an app trained to what a peer sends. `PeerLedger` pays for it, on disk and before
the app runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from flower_privdec.common.arguments import check_numbers
from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.peer.app_pairs import StepPairs
from flower_privdec.peer.app_state import AppModel, Arrays
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import ACCEPTED, noise_multiplier
from flower_privdec.privacy.exact_noise import PIECE, exactly_noised
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Charge, Entry, RunName, read_entries
from flower_privdec.privacy.ledger.spending import releases_in
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary, Release, canonical, towards
from flower_privdec.privacy.updates import UPDATES
from flower_privdec.scenario.app_sections import AppNoiseSection, AppPrivacySection

log = logging.getLogger("flwr.privdec")

SOURCE = "peer-updates"  # what the ledger is of; the file is FOLDER/peer-updates.jsonl
UNIT = "one peer with all its data"
ADJACENCY = "its update of every round replaced by zero"
UNPROTECTED = f"epsilon = inf (unit: {UNIT}); what an app's own training protects is not counted here"


def unprotected_words(updates: int) -> str:
    """Return what to report of ε if some updates of a run were made without protection."""
    return f"epsilon = inf (unit: {UNIT}; {updates} update{'s' * (updates > 1)} of this run had no protection)"


def local_words(local: Sequence[str]) -> str:
    """Return what to add about arrays that never leave a peer: ε says nothing of them; empty if there are none."""
    if not local:
        return ""
    return f"; for what is shared: {', '.join(local)} never leave the peer, and no noise covers them"


@lru_cache(maxsize=64)
def update_release(noise: float, steps: int = 1) -> Release:
    """Return what a round releases: one Gaussian sum that the peer's whole update enters, as its only example."""
    return Release("full", 1.0, 1, 1, noise_multiplier=noise, steps=steps)


@lru_cache(maxsize=64)
def solved_noise(budget: float, delta: float, rounds: int) -> float:
    """Return the least noise multiplier with which so many rounds keep a budget."""
    common = {"sampling": "full", "sampling_rate": 1.0, "dataset_size": 1, "batch_size": 1}
    return noise_multiplier(budget, delta, steps=rounds, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PeerSpent:
    """What a peer has spent by now.

    Attributes:
        releases: all of them, equal ones together.
        delta: δ.
        adversary: against whom its ε is to hold.
    """

    releases: tuple[Release, ...]
    delta: float
    adversary: Adversary = EVERYBODY

    @cached_property
    def epsilon(self) -> float:
        """Return ε against the adversary, an upper bound."""
        return epsilon(towards(self.releases, self.adversary), self.delta)

    def __str__(self) -> str:
        return self._words

    @cached_property
    def _words(self) -> str:
        against = ""
        if self.adversary != EVERYBODY:
            if_all = epsilon(self.releases, self.delta)
            against = f"against {self.adversary}, and {if_all:.4g} if all other peers do; "

        charged = " and ".join(
            f"{release.steps} Gaussian update{'s' * (release.steps > 1)} of noise multiplier "
            f"{release.noise_multiplier:.4g}"
            for release in towards(self.releases, self.adversary)
        )
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} (unit: {UNIT}; adjacency: {ADJACENCY}; "
            f"{against}charged: {charged or 'nothing'})"
        )


class PeerLedger(Ledger):
    """The open ledger of one peer's updates.

    Each round draws fresh noise, so each charge counts, that of a round begun twice as well.

    Attributes:
        peer: its id.
        delta: δ at which ε is reported.
        budget: the ε that all runs together may not exceed, or ∞.
        adversary: against whom that and every ε is to hold.
        own: if noise of pairs is added, the least own noise over what the peer needs by itself; else 1.
        least_own: the same of any line of the run, also of those that are lost: a strategy can change `own`.
    """

    adversary: Adversary = EVERYBODY
    own: float = 1.0
    least_own: float = 1.0

    def __init__(
        self,
        folder: Path,
        run: str,
        incarnation: int,
        peer: int,
        delta: float,
        budget: float = math.inf,
        *,
        durable: bool = True,
    ) -> None:
        """Open the ledger in a folder.

        Args:
            run: the run's name.
            incarnation: of the peer in that run.
            durable: see `Ledger`.

        Raises:
            BudgetError: the ledger is in use or fails verification.
        """
        super().__init__(folder, SOURCE, durable=durable)
        self._added_up: tuple[list[Entry], int, tuple[Release, ...]] = ([], 0, ())
        self._spent: PeerSpent | None = None
        self.peer = peer
        self.delta = delta
        self.budget = budget
        self.name_run(run, incarnation)

    def name_run(self, run: str, incarnation: int) -> None:
        """Let the lines from now on be of a run, and of the peer's incarnation in it."""
        self._run = RunName(f"{run}-{incarnation}", run, "system entropy")

    @property
    def spent(self) -> PeerSpent:
        """Return the total of all charges of all runs."""
        releases = self.releases
        last = self._spent
        is_same = last is not None and last.releases is releases
        if last is None or not is_same or (last.delta, last.adversary) != (self.delta, self.adversary):
            last = PeerSpent(releases, self.delta, self.adversary)
            self._spent = last
        return last

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return all charges of all runs, equal ones together; what was added up before is not added up again."""
        entries, number, releases = self._added_up
        if entries is not self.entries or number > len(entries):  # another list, whose entries were merged
            number = 0
            releases = ()
        if number < len(self.entries):
            releases = canonical((*releases, *releases_in(self.entries[number:])))
        self._added_up = (self.entries, len(self.entries), releases)
        return releases

    def release(self, noise: float, own: float | None = None) -> Release:
        """Return what a round releases, at a noise multiplier that the peer needs by itself.

        If pairs share noise, that much is left against `adversary`, and only own noise if all other peers collude.

        Args:
            own: in place of the peer's own noise now.
        """
        if self.adversary.colluding is None:
            return update_release(noise)
        own_noise = noise * (self.own if own is None else own)
        return replace(update_release(own_noise), against=((self.adversary.colluding, noise),))

    def fits(self, charge: Charge, budget: float, delta: float) -> bool:
        """Return whether a budget allows one more charge, against the adversary; see `WitnessedLedger`."""
        if math.isinf(budget):
            return True
        return epsilon(towards((*self.releases, *charge.releases), self.adversary), delta) <= budget

    def charge_witnessed(self, witnessed: Mapping[int, int], privacy: AppPrivacySection, rounds: int) -> int:
        """Charge the lines that the ledger lacks, each as an update of the run's noise; return how many there are.

        If the noise is solved for a budget, all lines cost at least one update that spends it by itself: they may be of
        a time with fewer rounds and less noise, and a strategy says how many rounds there are. They cost no more, for
        the budget allowed them, and Gaussian updates of any noise cost together what one of Σ 1 / σ² does.

        Args:
            witnessed: see `Ledger.lacks`.
            privacy: what the app asks for.
            rounds: how many rounds the run has.
        """
        missing = self.lacks(witnessed)
        if missing:
            noise = noise_for(privacy, rounds)
            updates = missing
            if privacy.noise_multiplier is None:
                # What is solved for a budget may leave a little of it.
                least = noise_for(privacy, 1) * ACCEPTED
                if updates / noise**2 < 1 / least**2:
                    noise = least
                    updates = 1

            run = replace(self._run, id=f"{self._run.id}-witnessed-{self.n_entries}")
            release = self.release(noise, self.least_own)
            charge = Charge((self.peer,), ((((0, missing),), release.times(updates)),))
            self.append(run, 0, missing, [charge], witnessed=witnessed)
        return missing

    def allows(self, noise: float) -> bool:
        """Return whether the budget allows one more update of a noise multiplier."""
        return self.fits(Charge((self.peer,), (((), self.release(noise)),)), self.budget, self.delta)

    def charge(self, round_index: int, noise: float) -> bool:
        """Charge one round's update, on disk before it is computed, and return True; False if the budget is spent.

        Args:
            round_index: from 1.
            noise: the noise multiplier.

        Raises:
            BudgetError: the disk fails.
        """
        if not self.allows(noise):
            return False
        steps = (round_index - 1, round_index)
        self.append(self._run, *steps, [Charge((self.peer,), (((steps,), self.release(noise)),))])
        return True

    def check_budget(self, noise: float) -> None:
        """Refuse a run of which no update fits the budget.

        Raises:
            BudgetError: with what is spent.
        """
        if not self.allows(noise):
            raise BudgetError(
                f"{self.path}: epsilon = {self.spent.epsilon:.4g} is spent, and privacy.epsilon={self.budget:g} allows "
                f"this run no update of noise multiplier {noise:.4g}; raise the budget or the noise",
                code="ledger.budget-spent",
            )


def spent_so_far(folder: Path, delta: float, adversary: Adversary = EVERYBODY) -> PeerSpent:
    """Return the total of a peer's ledger without locking it.

    Args:
        delta, adversary: see `PeerSpent`.

    Raises:
        BudgetError: it fails verification.
    """
    return PeerSpent(releases_in(read_entries(folder, SOURCE)), delta, adversary)


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm of a vector, float [d], without overflow below it; NaN or ∞ if it has such."""
    # Pairwise in each piece, on one core, and without a second vector of this size.
    squares = np.empty(min(PIECE, vector.size))
    sums = []
    with np.errstate(over="ignore"):
        for start in range(0, vector.size, PIECE):
            part = vector[start : start + PIECE].astype(np.float64, copy=False)
            square = np.square(part, out=squares[: part.size])
            sums.append(float(square.sum()))
    length = math.sqrt(sum(sums))
    if 1e-100 < length < 1e100:  # no square of a number that matters was 0 or infinite
        return length

    largest = max(float(vector.max(initial=0.0)), -float(vector.min(initial=0.0)))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(vector / np.float64(largest)))


def clipped(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Return u · min(1, C / ‖u‖), float64 [d]; a zero update stays zero.

    Args:
        update: finite, [d].
        clip_norm: C.
    """
    vector = np.asarray(update, np.float64)
    length = norm(vector)
    if length <= clip_norm:
        return vector

    # In place from here on, in a vector of this function's own.
    short = vector.copy() if vector is update else vector
    if math.isfinite(length):
        short *= clip_norm / length
    else:
        short /= float(np.max(np.abs(short)))
        short *= clip_norm / float(np.linalg.norm(short))

    length = norm(short)
    if length > clip_norm:  # rounding could leave it a hair too long
        short *= clip_norm / length
    return short


def unsound(update: np.ndarray) -> str:
    """Return what is wrong with an update in words; empty if nothing is."""
    if math.isfinite(float(update.sum())):  # as with an infinite number or NaN among them it is not
        return ""
    if np.isnan(update).any():
        return f"{int(np.isnan(update).sum())} of its {update.size} numbers are NaN"
    infinite = int((~np.isfinite(update)).sum())
    if infinite:
        return f"{infinite} of its {update.size} numbers are infinite"
    return ""


def app_privacy(
    clip_norm: float | None,
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float,
    noise: AppNoiseSection | None = None,
) -> AppPrivacySection | None:
    """Return what an app asks for; None if it gives no clip norm, noise or budget.

    Args:
        noise: how noise cancels; None for independent noise.

    Raises:
        ScenarioError: a value of the wrong kind or out of its range, or a clip norm without noise, or noise without a
            clip norm.
    """
    given = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
    check_numbers({**given, "delta": delta})
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    # If nothing is asked for, only δ is checked: the two numbers stand for any that are right.
    checked = numbers or {"clip_norm": 1.0, "noise_multiplier": 1.0}
    section = _validated({**checked, "delta": delta, "noise": noise})
    if noise is not None and not numbers:
        raise ScenarioError(
            "PeerMod: noise says how peers add noise, and nothing asks for any: give clip_norm, and epsilon or "
            "noise_multiplier",
            code="privacy.no-noise",
        )
    return section if numbers else None


def app_noise(noise: Mapping[str, Any]) -> AppNoiseSection:
    """Return how an app asks for its noise.

    Raises:
        ScenarioError: a key is missing, unknown or out of its range.
    """
    stand_ins = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    section = _validated({**stand_ins, "noise": dict(noise)}).noise
    assert section is not None
    return section


def _validated(data: dict[str, Any]) -> AppPrivacySection:
    """Return what an app asks for; raises ScenarioError."""
    try:
        return AppPrivacySection.model_validate(data)
    except ValidationError:
        from flower_privdec.scenario.loading import validated  # over the classes of a whole scenario, for its words

        return validated(AppPrivacySection, data, "PeerMod")


def noise_for(privacy: AppPrivacySection, rounds: int) -> float:
    """Return the noise multiplier: the given one, or the least with which so many rounds keep the budget."""
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None
    return solved_noise(privacy.epsilon, privacy.delta, max(1, rounds))


LEAST_WEIGHT = 1e-6  # with less of the mass a peer waits for some before it trains again
APP_SPENT = "its app's own budget allows no more training; it only exchanges"
Train = Callable[[Arrays], Arrays]


class NoStep(NamedTuple):
    """Why a peer took no step.

    Attributes:
        why: in words.
        for_good: whether it takes none in later rounds either, a budget being spent.
    """

    why: str
    for_good: bool


def take_step(
    state: AppModel,
    train: Train,
    round_index: int,
    ledger: PeerLedger | None,
    clip_norm: float | None,
    noise: float,
    pairs: StepPairs | None = None,
) -> NoStep | None:
    """Charge one update, let the app train, and add m · (u · min(1, C / ‖u‖) + N(0, σ² C² I)) to x.

    u is what the app moved z by. m is the peer's number of examples, 1 if peers count alike, and at most 2 w: of a
    peer that holds little of the mass, z = x / w would leap.

    Args:
        state: its x, and the arrays that are not mixed, are put in place.
        train: returns arrays of the state's layout, as `returned_arrays` has them.
        round_index: from 1.
        ledger: None for no protection.
        clip_norm: C; None if there is no ledger.
        noise: σ, noise std over C.
        pairs: the peer's pairs in the round; None if its noise is independent.

    Returns:
        None if a step was taken. If the app's own ledger, as `private` has one, allows no more, the state is as
        it was, and the words of that ledger stay in the app's log.

    Privacy: one Gaussian release of the whole update, charged before the app runs. Without protection the state counts
    the update in `unprotected`.
    """
    if state.w < LEAST_WEIGHT:
        return NoStep(f"it holds {state.w:.2g} of the mass, and waits for a share before it trains", for_good=False)

    # Pay first and durably. A crash may then count an update too many, never one too few.
    observer = UPDATES.observer()
    if pairs is not None and observer is not None:
        raise ScenarioError(
            "auditing_updates sees each peer's update by itself, and checks noise that is independent: audit the app "
            "without PeerMod's noise",
            code="audit.app-noise",
        )
    if ledger is not None and observer is not None:
        observer.admit(ledger, ledger.delta)
    if ledger is not None and not ledger.charge(round_index, noise):
        why = f"its next update would exceed epsilon = {ledger.budget:g}; it stops training and only exchanges"
        return NoStep(why, for_good=True)

    given = state.given_model()  # [d]
    try:
        returned = train(state.layout.arrays(given, state.unmixed))
    except BudgetError:
        return NoStep(APP_SPENT, for_good=True)

    with np.errstate(all="ignore"):  # even if the app lets numpy raise
        update = state.layout.moved_by(returned, given)  # [d]
        wrong = unsound(update)
        odd = state.layout.odd_local(returned)
        if odd and not wrong:
            wrong = f"its local array {odd!r} is not finite"
        if wrong:
            update = np.zeros_like(update)
        else:
            state.unmixed = state.layout.unmixed(returned)

        # An update that counts as zero gets its noise too: that it was unsound is of the app's data.
        weight = min(state.examples, 2 * state.w)
        if clip_norm is not None and ledger is not None and observer is not None:
            update = observer.released(ledger, update, clip_norm, noise, protected)
        elif clip_norm is not None and pairs is not None:
            short = clipped(update, clip_norm)
            update = pairs.noised(short, noise * clip_norm, weight)
        elif clip_norm is not None:
            update = protected(clip_norm, noise, update)

        if state.dual is not None:
            averaging, t = state.dual
            weight *= averaging.weight(t)
        step = update if weight == 1 else weight * update

        after = np.empty_like(state.x)  # [d]
        np.add(state.x, step, out=after, casting="same_kind")
        infinite = unsound(after)
        if infinite:
            wrong = wrong or infinite
        else:
            state.x = after
            state.unprotected += clip_norm is None

    if wrong:
        words = "peer %s, round %s: %s, so its update counts as zero; lower the learning rate, or look at its data"
        log.warning(words, state.peer, round_index, wrong)
    return None


def protected(clip_norm: float, noise: float, update: np.ndarray) -> np.ndarray:
    """Return u · min(1, C / ‖u‖) + N(0, σ² C² I), [d] of u's type or of float64, by the operating system's entropy.

    Args:
        clip_norm: C.
        noise: σ, over C.
        update: u, finite, [d].

    Privacy: one Gaussian release of the whole update, which has to be paid for before; rounded exactly, which costs
    little beside an app's training.
    """
    short = update
    if not norm(update) <= clip_norm:
        short = clipped(update, clip_norm)
    return exactly_noised(short, noise * clip_norm)
