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
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.flower.mods.peer_ledger import PeerLedger
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.privacy.ledger.ledger import RunName
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
    ledger: PeerLedger | None
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
            ledger = PeerLedger(
                folder, self.scenario.name, secrets.randbits(62), peer, private.delta, private.epsilon or math.inf
            )
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
