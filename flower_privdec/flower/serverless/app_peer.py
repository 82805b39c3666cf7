"""A peer of a network that trains a Flower app's model, with no server: the transport is that of every other peer."""

from __future__ import annotations

import json
import logging
import math
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord
from safetensors.numpy import save
from torch import Tensor

from flower_privdec.common.files import write_atomically
from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.checkpoint import Checkpoint
from flower_privdec.engine.spent import json_number
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.flower.mods.layout import numpy_arrays
from flower_privdec.flower.mods.peer_ledger import UNPROTECTED, PeerLedger, bare_words, solved_noise
from flower_privdec.flower.mods.peer_state import PeerState
from flower_privdec.flower.mods.private_update import APP_SPENT, LEAST_WEIGHT, keep_metrics, protected, take_step
from flower_privdec.flower.serverless.app_parts import KEPT, AppCohort, AppExperiment
from flower_privdec.flower.serverless.driven_app import TrainedApp
from flower_privdec.flower.serverless.initial_arrays import InitialArrays, save_initial
from flower_privdec.network.peer.asynchronous_peer import AsynchronousPeer
from flower_privdec.network.peer.peer import OnRound, PeerDevice, RunningPeer, rows_path
from flower_privdec.network.peer.synchronous_peer import SynchronousPeer
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.app_scenario import AppPrivacySection, AppScenario

log = logging.getLogger("flwr.privdec")

INITIAL, MODEL = "initial.safetensors", "model.safetensors"


class AppPeer(RunningPeer):
    """One peer of a run, whose step is an app's training; see RunningPeer.

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),  u = train(z) - z,  z = x / w

    Folder: what a peer's has, and initial.safetensors (what all begin with, public), model.safetensors (z and the
    arrays that are not mixed, at the last evaluation) and metrics.jsonl (what the app's evaluate function says, which
    does not leave).

    Args:
        scenario: with the digest of the initial arrays.
        device: as of every peer; its data and batches are the app's.
        initial: what all peers begin with.
        app: what trains.
        resume: go on from the folder's checkpoint.
        own: what protects this peer, in place of the scenario's.

    Raises:
        ScenarioError, BudgetError: see RunningPeer.

    Privacy: that of `PeerMod`: unit one peer with all its data; adjacency: its update of every round replaced by zero;
    one Gaussian release a round, charged on disk before the app trains, and anew where a round is taken again after a
    crash. It holds against all neighbours together, and whoever has their traffic.
    """

    def __init__(
        self,
        scenario: AppScenario,
        device: PeerDevice,
        initial: InitialArrays,
        app: TrainedApp,
        resume: bool = False,
        own: AppPrivacySection | None = None,
    ) -> None:
        if device.insecure_seeds:
            raise ScenarioError("--insecure-seeds draws batches, and an app draws its own: leave it out")
        self._initial, self._app, self._arrays = initial, app, initial.layout
        self._private = own or scenario.private
        self.idle = ""  # why it trains no more, or not now
        super().__init__(scenario.as_scenario, device, resume)

    # --- what it is built of ---

    def _agreement(self, scenario: Scenario) -> Agreement:
        agreed = cast(AppScenario, scenario)
        found = AppExperiment.of(
            agreed, self._private, self.device.peer, self._train, lambda: self._noise, self._first_rows()
        )
        return cast(Agreement, found)

    def _joined(self, agreement: Agreement) -> Experiment:
        return cast(Experiment, agreement)

    def _prepare(self, scenario: Scenario, kept: list[Checkpoint]) -> None:
        super()._prepare(scenario, kept)
        if not (self.device.folder / INITIAL).exists():
            save_initial(self.device.folder / INITIAL, self._initial)

    def _first_rows(self) -> dict[str, Tensor]:
        """Return the rows before round 0: x [1, d], w [1], bare [1], and the bytes of each array that is not mixed.

        `bare` counts the updates without protection, whatever protects the peer when it goes on.
        """
        layout, arrays = self._arrays, self._initial.arrays
        x = torch.from_numpy(layout.vector(arrays).astype(layout.dtype))[None]
        own = {"bare": torch.zeros(1, dtype=torch.int64), **_kept_rows(layout.kept(arrays))}
        return {"x": x, "w": torch.ones(1, dtype=x.dtype), **own}

    @property
    def _ledger(self) -> PeerLedger | None:
        return cast("PeerLedger | None", self.cohort.ledger)

    @cached_property
    def _noise(self) -> float:
        """Return the noise multiplier: what was given, or what keeps the budget over this peer's rounds."""
        scenario, private = self.experiment.scenario, self._private
        assert private is not None
        if private.noise_multiplier is not None:
            return private.noise_multiplier
        active = self.experiment.participation.active
        everybody = scenario.participation.kind == "all"
        rounds = (
            scenario.rounds if everybody else sum(bool(active(k)[self.device.peer]) for k in range(scenario.rounds))
        )
        return solved_noise(cast(float, private.epsilon), private.delta, max(1, rounds))

    def _check_budget(self, ledger: Path) -> None:
        if self._ledger is not None:
            self._ledger.check_budget(self._noise)

    # --- a round ---

    def _train(self, cohort: Cohort, state: State) -> None:
        """Take a round's step, where this peer is active, has some mass, and can pay for it."""
        k, held = state.round_index, float(state.rows["w"][0])
        if cast(AppCohort, cohort).exhausted or not cohort.participation.active(k)[self.device.peer]:
            return
        if held < LEAST_WEIGHT:
            self.idle = f"it holds {held:.2g} of the mass, and waits for a share before it trains"
            return
        self.idle, private, noise = "", self._private, 0.0
        if private is not None:
            noise = self._noise
            if not self._pays(k + 1, noise):
                return
        mass = self._mass(state)
        protect = None if private is None else partial(protected, private.clip_norm, noise)
        if not take_step(mass, lambda arrays: self._app.train(arrays, k + 1), protect, k + 1):
            self._exhaust(k + 1, APP_SPENT)
            return
        state.rows["x"][0].copy_(torch.from_numpy(mass.x))
        state.rows["bare"].fill_(mass.bare)
        state.rows.update(_kept_rows(mass.kept))

    def _pays(self, server_round: int, noise: float) -> bool:
        ledger = self._ledger
        assert ledger is not None
        if ledger.charge(server_round, noise):
            return True
        why = f"its next update would exceed epsilon = {ledger.budget:g}; it trains no more, and goes on relaying"
        self._exhaust(server_round, why)
        return False

    def _exhaust(self, server_round: int, why: str) -> None:
        cast(AppCohort, self.cohort).exhausted, self.idle = True, why
        log.warning("peer %s, round %s: %s", self.device.peer, server_round, why)

    def _mass(self, state: State) -> PeerState:
        """Return the mass and what is not mixed, as arrays that may be changed."""
        x, w = state.rows["x"][0].numpy().copy(), float(state.rows["w"][0])
        kept, bare = self._kept_arrays(state), self._bare(state)
        return PeerState(self.experiment.scenario.name, self.device.peer, self._arrays, x, w, kept, bare=bare)

    def _bare(self, state: State) -> int:
        return int(state.rows["bare"][0])

    def _kept_arrays(self, state: State) -> dict[str, np.ndarray]:
        whole = [part for part in self._arrays.parts if np.dtype(part[1]).kind != "f"]
        found = {}
        for number, (name, kind, shape) in enumerate(whole):
            found[name] = state.rows[f"{KEPT}{number}"][0].numpy().view(kind).reshape(shape).copy()
        return found

    # --- what others and its owner see ---

    def run(self, on_round: OnRound | None = None) -> None:
        """See RunningPeer; at the end the model is that of the last round, with what came while others finished."""
        super().run(on_round)
        self._keep_model(self._mass(self.state))

    def result(self) -> PeerState:
        """Return the mass as it is now, and the arrays that are not mixed."""
        mass = self._mass(self.state)
        mass.round_index, mass.paid = self.state.round_index, 0 if self._ledger is None else self._ledger.n_entries
        return mass

    def _look(self) -> None:
        """Keep the model, let the app try it, and hand it in where the scenario allows that.

        Privacy: what the app says is of private examples, and stays in the folder; no loss is told.
        """
        mass = self._mass(self.state)
        if mass.w > 0:
            self._keep_model(mass)
            record = mass.layout.record(mass.model(), mass.kept)
            keep_metrics(self.device.folder, self.state.round_index, "evaluate", self._tried(record))
        if self.experiment.scenario.network.hands_in:
            self._hand_in({name: self.state.rows[name] for name in ("x", "w")})

    def _tried(self, record: ArrayRecord) -> dict[str, dict[str, Any]]:
        found = self._app.evaluate(record, self.state.round_index)
        return {name: dict(metrics) for name, metrics in found.items()}

    def _keep_model(self, mass: PeerState) -> None:
        if mass.w > 0:
            arrays = numpy_arrays(mass.layout.record(mass.model(), mass.kept))
            content = save({name: np.array(value, order="C") for name, value in arrays.items()})
            write_atomically(self.device.folder / MODEL, content, private=True)

    def _hand_in(self, rows: dict[str, Tensor]) -> None:
        facts = {"epsilon": json_number(self._epsilon()), "privacy": self._privacy()}
        content = save({name: row.numpy() for name, row in rows.items()}, {"privdec": json.dumps(facts)})
        write_atomically(rows_path(self.device.folder, self.state.round_index), content)

    def status(self) -> dict[str, Any]:
        """See RunningPeer; with what ε is of, and why the peer does not train where it does not."""
        budget = None if self._private is None else self._private.epsilon
        return {**super().status(), "budget": budget, "privacy": self._privacy(), "idle": self.idle}

    def _privacy(self) -> str:
        if self._ledger is None:
            return UNPROTECTED
        bare = self._bare(self.state)
        return bare_words(bare) if bare else str(self._ledger.spent)

    def _epsilon(self) -> float:
        return math.inf if self._ledger is None or self._bare(self.state) else self._ledger.spent.epsilon


def _kept_rows(kept: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return arrays that are not mixed as rows of bytes, [1, n] each, whatever their types."""
    flat = [np.array(value, order="C").reshape(-1).view(np.uint8) for value in kept.values()]
    return {f"{KEPT}{number}": torch.from_numpy(each)[None] for number, each in enumerate(flat)}


class AsynchronousAppPeer(AppPeer, AsynchronousPeer):
    """An app's peer that goes on without those who do not come."""


class SynchronousAppPeer(AppPeer, SynchronousPeer):
    """An app's peer that waits for its neighbours in every round."""


APP_MODES: dict[str, type[AppPeer]] = {"asynchronous": AsynchronousAppPeer, "synchronous": SynchronousAppPeer}


def app_peer(
    scenario: AppScenario,
    device: PeerDevice,
    initial: InitialArrays,
    app: TrainedApp,
    resume: bool = False,
    own: AppPrivacySection | None = None,
) -> AppPeer:
    """Return a peer of an app that runs as the scenario's network says; see AppPeer.

    Raises:
        ScenarioError: the initial arrays are not those that the scenario names.
    """
    initial.check()
    digest = initial.digest
    if scenario.initial not in (None, digest):
        raise ScenarioError(
            f"initial={scenario.initial} is of other arrays than those here, {digest}: give --initial FILE, the "
            f"{INITIAL} of another peer's folder"
        )
    named = scenario.model_copy(update={"initial": digest})
    return APP_MODES[scenario.network.mode](named, device, initial, app, resume, own)


def initial_path(folder: Path) -> Path:
    """Return where a peer's folder has what it began with."""
    return folder / INITIAL
