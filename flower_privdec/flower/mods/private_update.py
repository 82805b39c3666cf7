"""A peer's training step and its privacy: the update is charged, clipped as a whole, noised and added to x."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict

from flower_privdec.common.arguments import check_numbers
from flower_privdec.common.formatting import one_line
from flower_privdec.errors import BudgetError, RunError, ScenarioError
from flower_privdec.flower.mods.peer_state import Layout, PeerState, numpy_arrays
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import noise_multiplier
from flower_privdec.privacy.ledger.ledger import Charge, Head, Ledger, RunName, read_entries, releases_in
from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.privacy.noise.deployed import SystemNoise

log = logging.getLogger("flwr.privdec")

SOURCE = "peer-updates"  # what the ledger is of; the file is FOLDER/peer-updates.jsonl
UNIT = "one peer with all its data"
ADJACENCY = "its update of every round replaced by zero"
UNPROTECTED = f"epsilon = inf (unit: {UNIT}); what an app's own training protects is not counted here"


def bare_words(updates: int) -> str:
    """Return what is to be said of ε where some updates of a run were made without protection."""
    return f"epsilon = inf (unit: {UNIT}; {updates} update{'s' * (updates > 1)} of this run had no protection)"


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
    """

    releases: tuple[Release, ...]
    delta: float

    @property
    def epsilon(self) -> float:
        """Return ε, an upper bound."""
        return epsilon(self.releases, self.delta)

    def __str__(self) -> str:
        charged = " and ".join(
            f"{release.steps} Gaussian update{'s' * (release.steps > 1)} of noise multiplier "
            f"{release.noise_multiplier:.4g}"
            for release in self.releases
        )
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} (unit: {UNIT}; adjacency: {ADJACENCY}; "
            f"charged: {charged or 'nothing'})"
        )


class PeerLedger:
    """The open ledger of one peer's updates; a context manager.

    Each round draws fresh noise, so each charge counts, that of a round begun twice as well.

    Args:
        folder: of the ledger's file.
        run: the run's name.
        incarnation: of the peer in that run.
        peer: its id.
        delta: δ at which ε is reported.
        budget: the ε that all runs together may not exceed, or ∞.

    Attributes:
        spent: the total over all runs.

    Raises:
        BudgetError: the ledger is in use or fails verification.
    """

    charged = 0  # no entry of this run covers steps ahead

    def __init__(
        self, folder: Path, run: str, incarnation: int, peer: int, delta: float, budget: float = math.inf
    ) -> None:
        self.peer, self.delta, self.budget = peer, delta, budget
        self._run = RunName(f"{run}-{incarnation}", run, "system entropy")
        self._ledger = Ledger(folder, SOURCE)

    @property
    def spent(self) -> PeerSpent:
        """Return the total of all charges."""
        return PeerSpent(releases_in(self._ledger.entries), self.delta)

    @property
    def n_entries(self) -> int:
        """Return how many charges the ledger holds."""
        return len(self._ledger.entries)

    @property
    def head(self) -> Head:
        """Return what a checkpoint names."""
        return self._ledger.head

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds everything that a checkpoint saw; raises BudgetError."""
        self._ledger.check_head(head)

    @property
    def witnessed(self) -> Head:
        """Return what neighbours see of the ledger; see Ledger."""
        return self._ledger.witnessed

    def check_witnessed(self, witnessed: Head) -> None:
        """Check that the ledger holds what a neighbour has seen of it; raises BudgetError."""
        self._ledger.check_witnessed(witnessed)

    def charge_witnessed(self, length: int, noise: float) -> int:
        """Charge the lines that the ledger lacks, each as an update of a noise multiplier; return how many there are.

        Args:
            length: how many lines neighbours have seen.
        """
        missing = max(0, length - self.witnessed[0])
        if missing:
            run = replace(self._run, id=f"{self._run.id}-witnessed-{length}")
            charge = Charge((self.peer,), ((((0, missing),), update_release(noise).times(missing)),))
            self._ledger.append(run, 0, missing, [charge], witnessed=length)
        return missing

    def check_entries(self, n_entries: int) -> None:
        """Check that the ledger holds at least the charges that the peer's state knows of.

        Raises:
            BudgetError: it was deleted, or is an older copy.
        """
        if self.n_entries < n_entries:
            raise BudgetError(
                f"{self._ledger.path} holds {self.n_entries} charges, and peer {self.peer} has made {n_entries}: it "
                "was deleted, or is an old copy; restore it",
                code="ledger.stale",
            )

    def allows(self, noise: float) -> bool:
        """Return whether the budget allows one more update of a noise multiplier."""
        return self._ledger.fits(Charge((self.peer,), (((), update_release(noise)),)), self.budget, self.delta)

    def charge(self, round_index: int, noise: float) -> bool:
        """Charge one round's update, on disk before it is computed, and return True; False where the budget is spent.

        Args:
            round_index: from 1.
            noise: the noise multiplier.

        Raises:
            BudgetError: the disk fails.
        """
        if not self.allows(noise):
            return False
        steps = (round_index - 1, round_index)
        self._ledger.append(self._run, *steps, [Charge((self.peer,), (((steps,), update_release(noise)),))])
        return True

    def check_budget(self, noise: float) -> None:
        """Refuse a run of which no update fits the budget.

        Raises:
            BudgetError: with what is spent.
        """
        if not self.allows(noise):
            raise BudgetError(
                f"{self._ledger.path}: epsilon = {self.spent.epsilon:.4g} is spent, and privacy.epsilon="
                f"{self.budget:g} allows this run no update of noise multiplier {noise:.4g}; raise the budget or the "
                "noise",
                code="ledger.budget-spent",
            )

    def close(self) -> None:
        """Release the lock."""
        self._ledger.close()

    def __enter__(self) -> PeerLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spent_so_far(folder: Path, delta: float) -> PeerSpent:
    """Return the total of a peer's ledger without locking it.

    Raises:
        BudgetError: it fails verification.
    """
    return PeerSpent(releases_in(read_entries(folder, SOURCE)), delta)


def check_budget(budget: float, delta: float, noise: float | None, where: str) -> None:
    """Refuse a budget that is none, or that no noise keeps.

    Raises:
        BudgetError: naming it.
    """
    if not budget > 0 or not 0 < delta < 1:
        raise BudgetError(f"epsilon={budget} must be > 0 and delta={delta} in (0, 1); set {where}")
    if math.isfinite(budget) and noise is None:
        raise BudgetError(
            f"epsilon={budget} of {where} needs clip_norm and noise: say PeerMod(clip_norm=..., epsilon=...)"
        )


_folder: ContextVar[Path] = ContextVar("folder")


def peer_folder() -> Path:
    """Return the folder of the peer whose train or evaluate function is running, for what it wants to keep.

    A ledger of its examples, say: `private(..., ledger=peer_folder() / "examples.jsonl")` counts over all rounds, and
    for each peer apart. In a simulation the folder is the run's, as the peer's own ledger is.

    Raises:
        RunError: no function of an app with PeerMod is running.
    """
    try:
        return _folder.get()
    except LookupError:
        raise RunError("peer_folder() is for the functions of an app with PeerMod: call it inside one") from None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let `peer_folder` be a folder, for as long as an app's function runs."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class UnfitAnswerError(RunError):
    """An app's answer is no model of the peer's; its details may tell of the app's data.

    Attributes:
        what: what the app did, which tells nothing.
        details: what is wrong with it, and what to do.
    """

    def __init__(self, what: str, details: str) -> None:
        super().__init__(f"the app {what}; {details}")
        self.what, self.details = what, details


def returned_arrays(content: RecordDict, key: str, layout: Layout) -> ArrayRecord:
    """Return the arrays of a train function's answer.

    Args:
        content: the answer.
        key: under which they are, where there are several.
        layout: of the arrays that it was given.

    Raises:
        UnfitAnswerError: there are none, or several and none under the key, or others than were given.
    """
    records = content.array_records
    if key not in records and len(records) != 1:
        raise UnfitAnswerError(
            "returned no model",
            f"its answer has {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} and none named {key!r}: "
            f"return RecordDict({{{key!r}: ArrayRecord(...)}})",
        )
    returned = records[key] if key in records else next(iter(records.values()))
    if difference := _misfit(returned, layout):
        raise UnfitAnswerError("returned other arrays than it was given", difference)
    return returned


def _misfit(returned: ArrayRecord, layout: Layout) -> str:
    """Return in words how arrays that an app returned are not the model's; empty where they are."""
    try:
        return layout.misfit(numpy_arrays(returned))
    except (TypeError, ValueError) as error:  # what Flower says of arrays of another framework
        return f"they cannot be read as NumPy's: {one_line(error)}"


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm of a vector, float64 [d], of any size without overflow; NaN or ∞ where it has such."""
    largest = float(np.max(np.abs(vector), initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(vector / largest))


def clipped(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Return u · min(1, C / ‖u‖), float64 [d]; a zero update stays zero.

    Args:
        update: finite, float64 [d].
        clip_norm: C.
    """
    length = norm(update)
    if length <= clip_norm:
        return update
    largest = float(np.max(np.abs(update)))
    short = (update / largest) * (clip_norm / (length / largest))
    return short * min(1.0, clip_norm / norm(short))  # rounding alone could leave it a hair too long


def noised(update: np.ndarray, std: float) -> np.ndarray:
    """Return an update with N(0, std² I) added from the operating system's entropy, float64 [d]."""
    row = torch.from_numpy(update.astype(np.float64, copy=True))[None]
    SystemNoise().add_(row, torch.tensor([std], dtype=torch.float64), 0, np.zeros(1, dtype=np.int64))
    return np.asarray(row[0].numpy())


def unsound(update: np.ndarray) -> str:
    """Return what is wrong with an update in words; empty where nothing is."""
    if np.isnan(update).any():
        return f"{int(np.isnan(update).sum())} of its {update.size} numbers are NaN"
    infinite = int((~np.isfinite(update)).sum())
    return f"{infinite} of its {update.size} numbers are infinite" if infinite else ""


@dataclass(frozen=True)
class PeerPrivacy:
    """What an app asks for.

    Attributes:
        clip_norm: the most that a round's update may move the model, in Euclidean norm; None for no protection.
        noise_multiplier: noise std over the clip norm; None to solve it from epsilon.
        epsilon: the budget over all rounds and runs of this peer; None for no limit.
        delta: δ.
    """

    clip_norm: float | None
    noise_multiplier: float | None
    epsilon: float | None
    delta: float

    def __post_init__(self) -> None:
        check_numbers(asdict(self))
        for name, value in (("clip_norm", self.clip_norm), ("epsilon", self.epsilon)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ScenarioError(f"{name}={value} must be finite and > 0; leave it out for none")
        noise = self.noise_multiplier
        if noise is not None and not (noise > 0 and math.isfinite(noise)):
            raise ScenarioError(f"noise_multiplier={noise} must be finite and > 0; leave it out to have no noise")
        if self.delta is None or not 0 < self.delta < 1:
            raise ScenarioError(f"delta={self.delta} must be in (0, 1); well below one over the number of peers")
        if (self.clip_norm is None) != (noise is None and self.epsilon is None):
            raise ScenarioError(
                f"clip_norm={self.clip_norm}, noise_multiplier={noise}, epsilon={self.epsilon}: a peer is protected by "
                "clip_norm together with noise_multiplier, or with the epsilon from which the noise is solved; give "
                "both, or neither"
            )

    @property
    def on(self) -> bool:
        """Return whether anything is protected."""
        return self.clip_norm is not None

    def budget(self, place: PeerSettings) -> tuple[float, float]:
        """Return ε and δ to which a peer is held: the stricter of the app's and its owner's.

        Raises:
            BudgetError: the owner's budget cannot be kept.
        """
        delta = self.delta if place.delta is None else min(self.delta, place.delta)
        check_budget(place.epsilon, delta, self.clip_norm, "the node-config")
        return min(place.epsilon, self.epsilon or math.inf), delta

    def noise(self, place: PeerSettings, rounds: int) -> float:
        """Return the noise multiplier of a run of so many rounds."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        epsilon, delta = self.budget(place)
        return solved_noise(epsilon, delta, max(1, rounds))


LEAST_WEIGHT = 1e-6  # with less of the mass a peer waits for some before it trains again
APP_SPENT = "its app's own budget allows no more training; it goes on relaying"
Train = Callable[[ArrayRecord], ArrayRecord]
Protect = Callable[[np.ndarray], np.ndarray]


def take_step(state: PeerState, train: Train, protect: Protect | None, round_index: int) -> bool:
    """Let an app train, and add w · protect(u) to x, with u what it moved z by.

    Args:
        state: which has some mass; its x, and the arrays that are not mixed, are put in place.
        train: returns arrays of the state's layout, as `returned_arrays` has them.
        protect: returns u · min(1, C / ‖u‖) + N(0, σ² C² I) of a finite u, float64 [d]; None for no protection.
        round_index: from 1, for the log.

    Returns:
        Whether the app trained; False where its own ledger, as `private` has one, allows no more: the state is as it
        was, and the words of that ledger stay in the app's log.

    Privacy: one Gaussian release of the whole update, which has to be paid for before. Without protection the state
    counts the update in `bare`.
    """
    given = state.layout.record(state.model(), state.kept)
    try:
        returned = train(given)
    except BudgetError:
        return False
    update = _update(state, given, returned, round_index)
    _move(state, update if protect is None else protect(update), protect is None, round_index)
    return True


def _update(state: PeerState, given: ArrayRecord, returned: ArrayRecord, round_index: int) -> np.ndarray:
    """Return what the arrays moved by; zeros, and a word in the log, where that is no number."""
    arrays = numpy_arrays(returned)
    update: np.ndarray
    with np.errstate(invalid="ignore", over="ignore"):
        update = state.layout.vector(arrays) - state.layout.vector(numpy_arrays(given))
    if wrong := unsound(update):
        _count_as_zero(state, wrong, round_index)
        return np.zeros_like(update)
    state.kept = state.layout.kept(arrays)
    return update


def _move(state: PeerState, update: np.ndarray, bare: bool, round_index: int) -> None:
    """Add w times an update to x, unless that would make the model infinite for ever."""
    with np.errstate(over="ignore"):
        after = (state.x.astype(np.float64) + state.w * update).astype(state.x.dtype)
    if wrong := unsound(after):
        _count_as_zero(state, wrong, round_index)
    else:
        state.x = after
        state.bare += bare


def _count_as_zero(state: PeerState, wrong: str, round_index: int) -> None:
    log.warning(
        "peer %s, round %s: %s, so its update counts as zero; lower the learning rate, or look at its data",
        state.peer,
        round_index,
        wrong,
    )


def protected(clip_norm: float, noise: float, update: np.ndarray) -> np.ndarray:
    """Return u · min(1, C / ‖u‖) + N(0, σ² C² I), float64 [d].

    Args:
        clip_norm: C.
        noise: σ, over C.
        update: u, finite, float64 [d].

    Privacy: one Gaussian release of the whole update, which has to be paid for before.
    """
    return noised(clipped(update, clip_norm), noise * clip_norm)


def keep_metrics(folder: Path, round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Add an app's metrics to the peer's own file, from which they do not leave."""
    with (folder / "metrics.jsonl").open("a") as file:
        for metrics in records.values():
            file.write(json.dumps({"round": round_index, "of": kind, **metrics}) + "\n")
