"""What a networked peer is built of, where an app trains: stand-ins for algorithm, experiment, cohort and ledger."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_privdec.core import Algorithm, Mix, State
from flower_privdec.core.algorithm import Step
from flower_privdec.errors import BudgetError
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.flower.mods.peer_ledger import SOURCE, PeerLedger, PeerSpent, update_release
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.privacy.ledger.ledger_file import LedgerFile
from flower_privdec.privacy.ledger.ledger_format import NOTHING, RunName
from flower_privdec.privacy.mechanism.events import canonical
from flower_privdec.scenario import numbers_hash
from flower_privdec.scenario.app_scenario import AppPrivacySection, AppScenario

KEPT = "kept."  # before the number of an array that is not mixed
ENVIRONMENT = "a Flower app, system entropy"


class AppTraining(Algorithm):
    """Stochastic Gradient Push, with an app's training in the place of a gradient step; see `PeerMod`.

    Args:
        train: the step.
    """

    weights = "column-stochastic"
    open_rows = ("x", "w")

    def __init__(self, train: Step) -> None:
        self.program = (train, Mix(("x", "w")))

    @property
    def name(self) -> str:
        """Return what it is called in errors."""
        return "app"


class AppLedger:
    """A peer's ledger, open for as long as it runs.

    Args:
        folder: where the file lies.
        run: the run's name in it.
        peer: whose it is.
        delta, budget: δ, and the ε that no run may exceed.

    Attributes:
        budget: ε, or ∞.
        spent: by now.
        paid: nothing that a checkpoint has to know.
    """

    paid = 0

    def __init__(self, folder: Path, run: str, peer: int, delta: float, budget: float) -> None:
        self._ledger, self._run, self._peer = PeerLedger(folder, delta, budget), run, peer
        self._life = secrets.randbits(62)
        self.budget = budget
        self._file = LedgerFile(folder, SOURCE)
        self.spent: PeerSpent = self._ledger.spent_in(self._file)

    @property
    def lines(self) -> int:
        """Return how many payments the file holds."""
        return len(self._file.payments)

    @property
    def head(self) -> tuple[int, str]:
        """Return what a checkpoint names."""
        return self._file.head

    def check_head(self, head: tuple[int, str] | None) -> None:
        """Check that the file still holds all that a checkpoint saw; raises BudgetError."""
        length, digest = head or (0, NOTHING)
        self._file.check_head(int(length), str(digest))

    def allows(self, noise: float) -> bool:
        """Return whether one more update can be paid for."""
        after = PeerSpent(canonical([*self.spent.releases, update_release(noise)]), self.spent.delta)
        return math.isinf(self.budget) or after.epsilon <= self.budget

    def check_budget(self, noise: float) -> None:
        """Refuse a run of which not one update can be paid for.

        Raises:
            BudgetError: naming what is spent.
        """
        if not self.allows(noise):
            raise BudgetError(
                f"{self._file.path}: epsilon = {self.spent.epsilon:.4g} is spent, and privacy.epsilon={self.budget:g} "
                f"allows this run no update of noise multiplier {noise:.4g}; raise the budget or the noise"
            )

    def pay(self, server_round: int, noise: float) -> bool:
        """Pay for a round's update, on disk, before it is made; return whether the budget allows it.

        Raises:
            BudgetError: the file cannot be written.
        """
        after = self._ledger.pay_into(self._file, self._run, self._life, server_round, self._peer, noise)
        self.spent = after or self.spent
        return after is not None

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


@dataclass
class AppCohort:
    """One peer, as the steps of its program have it.

    Attributes:
        noise: returns its noise multiplier, where it is protected.
        exhausted: whether a budget, the peer's or the app's own, has ended its training for as long as it runs.
    """

    peers: np.ndarray
    n_peers: int
    dtype: torch.dtype
    mixing: Mixing | None
    participation: Participation
    ledger: AppLedger | None
    noise: Callable[[], float]
    protection: None = None
    steps_per_round: int = 1
    exhausted: bool = False

    def active(self, round_index: int) -> np.ndarray:
        """Return whether the peer takes its step in a round, bool [1]: participating, and within its budget."""
        active = np.asarray(self.participation.active(round_index)[self.peers]) & (not self.exhausted)
        return active & (self.ledger is None or self.ledger.allows(self.noise()))


@dataclass(frozen=True)
class AppOwn:
    """A peer's own name in checkpoints."""

    peers: np.ndarray
    run: RunName


@dataclass(frozen=True)
class AppExperiment:
    """What all peers of an app know, and who one of them is.

    Attributes:
        rows: before round 0, by name.
        private: what protects this peer; None for no protection.
        noise: returns its noise multiplier, where there is protection.
    """

    scenario: AppScenario
    algorithm: AppTraining
    mixing: Mixing
    participation: Participation
    own: AppOwn
    rows: dict[str, Tensor]
    private: AppPrivacySection | None
    noise: Callable[[], float]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(
        cls,
        scenario: AppScenario,
        private: AppPrivacySection | None,
        peer: int,
        train: Step,
        noise: Callable[[], float],
        rows: dict[str, Tensor],
    ) -> AppExperiment:
        """Build what a scenario says.

        Raises:
            ScenarioError: a part of it cannot be had, or two do not fit.
        """
        algorithm = AppTraining(train)
        mixing, participation = build_exchange(scenario.as_scenario, algorithm)
        assert mixing is not None
        decided = numbers_hash(scenario.as_scenario)
        own = AppOwn(np.array([peer]), RunName(decided[:32], decided, ENVIRONMENT))
        return cls(scenario, algorithm, mixing, participation, own, rows, private, noise)

    def cohort(self, ledger_dir: Path, start: int = 0) -> AppCohort:
        """Return the peer, with its ledger where it is protected.

        Raises:
            BudgetError: the ledger cannot be trusted, or is in use.
        """
        ledger, peer, private = None, int(self.own.peers[0]), self.private
        if private is not None:
            folder = ledger_dir if private.ledger is None else Path(private.ledger)
            ledger = AppLedger(folder, self.scenario.name, peer, private.delta, private.epsilon or math.inf)
        return AppCohort(
            peers=self.own.peers,
            n_peers=self.scenario.n_peers,
            dtype=self.rows["x"].dtype,
            mixing=self.mixing,
            participation=self.participation,
            ledger=ledger,
            noise=self.noise,
        )

    def initial_state(self, cohort: AppCohort) -> State:
        """Return the state before round 0."""
        return State(self.own.peers, rows={name: row.clone() for name, row in self.rows.items()})
