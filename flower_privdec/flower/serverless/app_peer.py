"""A peer of a network that trains a Flower app's model, with no server: its transport is that of every other peer."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from flower_privdec.common.files import write_atomically
from flower_privdec.core import Algorithm, Exchange, Mix, State
from flower_privdec.core.algorithm import Step
from flower_privdec.engine.spent import json_number
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.flower.mods.peer_state import PeerState, numpy_arrays
from flower_privdec.flower.mods.private_update import (
    APP_SPENT,
    LEAST_WEIGHT,
    UNPROTECTED,
    PeerLedger,
    bare_words,
    keep_metrics,
    protected,
    solved_noise,
    take_step,
)
from flower_privdec.flower.serverless.driven_app import TrainedApp
from flower_privdec.flower.serverless.initial_arrays import InitialArrays, save_initial
from flower_privdec.graph.mixing import Mixing
from flower_privdec.network.peer.foreground import peer_of
from flower_privdec.network.peer.peer import PeerDevice, RunningPeer
from flower_privdec.network.peer.trainer import Head, noise_source, rows_path
from flower_privdec.privacy.ledger.ledger import RunName
from flower_privdec.scenario import numbers_hash
from flower_privdec.scenario.app_scenario import AppPrivacySection, AppScenario

log = logging.getLogger("flwr.privdec")

INITIAL, MODEL = "initial.safetensors", "model.safetensors"
KEPT = "kept."  # before the number of an array that is not mixed
ENVIRONMENT = "a Flower app, system entropy"


class AppTraining(Algorithm):
    """Stochastic Gradient Push, with an app's training in the place of a gradient step; see `PeerMod`."""

    weights = "column-stochastic"
    open_rows = ("x", "w")

    def __init__(self, train: Step, mix: Mix) -> None:
        self.program = (train, mix)

    @property
    def name(self) -> str:
        """Return its name in errors."""
        return "app"


class AppTrainer:
    """Trains an app's model as a peer's step; see Trainer.

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),  u = train(z) - z,  z = x / w

    Folder: what a peer's has, and initial.safetensors (what all begin with, public), model.safetensors (z and the
    arrays that are not mixed, at the last evaluation) and metrics.jsonl (the metrics of the app's evaluate function,
    which do not leave).

    Args:
        scenario: with the digest of the initial arrays.
        peer: its number.
        folder: the peer's own.
        initial: what all peers begin with.
        app: what trains.
        private: what protects this peer; None for no protection.

    Attributes:
        idle: why it does not train, or not now; empty where it does.

    Raises:
        ScenarioError: a part of the scenario cannot be had.

    Privacy: that of `PeerMod`: unit one peer with all its data; adjacency: its update of every round replaced by zero;
    one Gaussian release a round, charged on disk before the app trains, and again where a round is taken again after a
    crash. It holds against all neighbours together, and against whatever sees their traffic.
    """

    paid, steps_per_round, device = 0, 1, torch.device("cpu")

    def __init__(
        self,
        scenario: AppScenario,
        peer: int,
        folder: Path,
        initial: InitialArrays,
        app: TrainedApp,
        private: AppPrivacySection | None,
    ) -> None:
        torch.set_num_threads(scenario.compute.threads)
        self.scenario, self.idle = scenario, ""
        self.ledger: PeerLedger | None = None
        self._peer, self._folder, self._initial, self._app = peer, folder, initial, app
        self._private, self._arrays, self._exhausted = private, initial.layout, False
        self._mix = Mix(("x", "w"))
        self.algorithm = AppTraining(lambda _, state: self._train(state), self._mix)
        mixing, self.participation = build_exchange(scenario, self.algorithm)
        assert mixing is not None
        self.mixing: Mixing = mixing
        digest = numbers_hash(scenario)
        self.run = RunName(digest[:32], digest, ENVIRONMENT)
        own = None if private is None else private.ledger
        self.ledger_folder = folder / "ledger" if own is None else Path(own)

    @property
    def head(self) -> Head | None:
        """See Trainer."""
        return None if self.ledger is None else self.ledger.head

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer."""
        if (private := self._private) is not None:
            budget = private.epsilon or math.inf
            boot = secrets.randbits(62)
            self.ledger = PeerLedger(self.ledger_folder, self.scenario.name, boot, self._peer, private.delta, budget)
        try:
            if self.ledger is not None and state is None:
                self.ledger.check_budget(self._noise)
            elif self.ledger is not None:
                self.ledger.check_head(head)
            if not (self._folder / INITIAL).exists():
                save_initial(self._folder / INITIAL, self._initial)
        except BaseException:
            self.close()
            raise
        return self._first_state() if state is None else state

    def _first_state(self) -> State:
        """Return the state before round 0: x [1, d], w [1], bare [1], and the bytes of each array that is not mixed.

        `bare` counts the updates without protection, whatever protects the peer when it continues.
        """
        layout, arrays = self._arrays, self._initial.arrays
        x = torch.from_numpy(layout.vector(arrays).astype(layout.dtype))[None]
        own = {"bare": torch.zeros(1, dtype=torch.int64), **_kept_rows(layout.kept(arrays))}
        return State(np.array([self._peer]), rows={"x": x, "w": torch.ones(1, dtype=x.dtype), **own})

    def use_mixing(self, mixing: Mixing) -> None:
        """See Trainer; no step depends on it."""

    def is_active(self, round_index: int) -> bool:
        """See Trainer: it participates, within its budget."""
        if self._exhausted or not self.participation.active(round_index)[self._peer]:
            return False
        return self.ledger is None or self.ledger.allows(self._noise)

    @cached_property
    def _noise(self) -> float:
        """Return the noise multiplier: the scenario's, or what keeps the budget over this peer's rounds."""
        scenario, private = self.scenario, self._private
        assert private is not None
        if private.noise_multiplier is not None:
            return private.noise_multiplier
        assert private.epsilon is not None
        active = self.participation.active
        takes_all = scenario.participation.kind == "all"
        rounds = scenario.rounds if takes_all else sum(bool(active(k)[self._peer]) for k in range(scenario.rounds))
        return solved_noise(private.epsilon, private.delta, max(1, rounds))

    # --- a round ---

    def advance(self, state: State) -> Exchange | None:
        """See Trainer."""
        if state.at == 0:
            self._train(state)
            state.at = 1
        if state.at == 1:
            state.waiting = True
            return self._mix
        state.at, state.round_index = 0, state.round_index + 1
        return None

    def _train(self, state: State) -> None:
        """Take a round's step, where this peer is active, has some mass, and can pay for it."""
        k, weight = state.round_index, float(state.rows["w"][0])
        if self._exhausted or not self.participation.active(k)[self._peer]:
            return None
        if weight < LEAST_WEIGHT:
            self.idle = f"it holds {weight:.2g} of the mass, and waits for a share before it trains"
            return None
        self.idle, private, protect = "", self._private, None
        if private is not None:
            assert self.ledger is not None
            if not self.ledger.charge(k + 1, self._noise):
                budget = self.ledger.budget
                why = f"its next update would exceed epsilon = {budget:g}; it trains no more, and goes on relaying"
                return self._exhaust(k + 1, why)
            protect = partial(protected, private.clip_norm, self._noise)
        mass = self._mass(state)
        if not take_step(mass, lambda arrays: self._app.train(arrays, k + 1), protect, k + 1):
            return self._exhaust(k + 1, APP_SPENT)
        state.rows["x"][0].copy_(torch.from_numpy(mass.x))
        state.rows["bare"].fill_(mass.bare)
        state.rows.update(_kept_rows(mass.kept))
        return None

    def _exhaust(self, server_round: int, why: str) -> None:
        self._exhausted, self.idle = True, why
        log.warning("peer %s, round %s: %s", self._peer, server_round, why)

    def _mass(self, state: State) -> PeerState:
        """Return the mass and what is not mixed, as arrays that may be changed."""
        x, w = state.rows["x"][0].numpy().copy(), float(state.rows["w"][0])
        kept = {}
        whole = [part for part in self._arrays.parts if np.dtype(part[1]).kind != "f"]
        for number, (name, kind, shape) in enumerate(whole):
            kept[name] = state.rows[f"{KEPT}{number}"][0].numpy().view(kind).reshape(shape).copy()
        return PeerState(self.scenario.name, self._peer, self._arrays, x, w, kept, bare=int(state.rows["bare"][0]))

    # --- what others and its owner see ---

    def result(self, state: State) -> PeerState:
        """Return the mass as it is now, and the arrays that are not mixed."""
        mass = self._mass(state)
        mass.round_index, mass.paid = state.round_index, 0 if self.ledger is None else self.ledger.n_entries
        return mass

    def evaluate(self, state: State) -> None:
        """See Trainer: keep the model, let the app evaluate it, and hand it in where the scenario allows that.

        Privacy: the app's metrics are of private examples, and stay in the folder; no loss is reported.
        """
        mass = self._mass(state)
        if mass.w > 0:
            self.finish(state)
            record = mass.layout.record(mass.model(), mass.kept)
            metrics = self._app.evaluate(record, state.round_index)
            records = {name: dict(metric) for name, metric in metrics.items()}
            keep_metrics(self._folder, state.round_index, "evaluate", records)
        if self.scenario.network.hands_in:
            facts = {"epsilon": json_number(self._epsilon(state)), "privacy": self._privacy(state)}
            rows = {name: state.rows[name].numpy() for name in ("x", "w")}
            write_atomically(rows_path(self._folder, state.round_index), save(rows, {"privdec": json.dumps(facts)}))

    def finish(self, state: State) -> None:
        """See Trainer; the model is that of the last round, with what came while others finished."""
        mass = self._mass(state)
        if mass.w > 0:
            arrays = numpy_arrays(mass.layout.record(mass.model(), mass.kept))
            content = save({name: np.array(value, order="C") for name, value in arrays.items()})
            write_atomically(self._folder / MODEL, content, private=True)

    def status(self, state: State) -> dict[str, Any]:
        """See Trainer; with the unit of ε, and why the peer does not train where it does not."""
        return {
            "loss": None,
            "epsilon": json_number(self._epsilon(state)),
            "budget": None if self._private is None else self._private.epsilon,
            "noise": noise_source(insecure_seeds=False),
            "privacy": self._privacy(state),
            "idle": self.idle,
        }

    def _privacy(self, state: State) -> str:
        if self.ledger is None:
            return UNPROTECTED
        bare = int(state.rows["bare"][0])
        return bare_words(bare) if bare else str(self.ledger.spent)

    def _epsilon(self, state: State) -> float:
        return math.inf if self.ledger is None or int(state.rows["bare"][0]) else self.ledger.spent.epsilon

    def close(self) -> None:
        """See Trainer."""
        if self.ledger is not None:
            self.ledger.close()


def _kept_rows(kept: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return arrays that are not mixed as rows of bytes, [1, n] each, whatever their types."""
    flat = [np.array(value, order="C").reshape(-1).view(np.uint8) for value in kept.values()]
    return {f"{KEPT}{number}": torch.from_numpy(row)[None] for number, row in enumerate(flat)}


def app_peer(
    scenario: AppScenario,
    device: PeerDevice,
    initial: InitialArrays,
    app: TrainedApp,
    resume: bool = False,
    own: AppPrivacySection | None = None,
) -> RunningPeer:
    """Return a peer of an app that runs in the mode of the scenario's network; see RunningPeer and AppTrainer.

    Args:
        own: what protects this peer, in place of the scenario's.

    Raises:
        ScenarioError: the initial arrays are not those that the scenario names, or see RunningPeer.
        BudgetError: see RunningPeer.
    """
    if device.insecure_seeds:
        raise ScenarioError("--insecure-seeds draws batches, and an app draws its own: leave it out")
    initial.check()
    digest = initial.digest
    if scenario.initial not in (None, digest):
        raise ScenarioError(
            f"initial={scenario.initial} is of other arrays than those here, {digest}: give --initial FILE, the "
            f"{INITIAL} of another peer's folder"
        )
    named = scenario.model_copy(update={"initial": digest})
    trainer = AppTrainer(named, device.peer, device.folder, initial, app, own or scenario.private)
    return peer_of(trainer, device, resume)


def initial_path(folder: Path) -> Path:
    """Return where a peer's folder has the arrays that it began with."""
    return folder / INITIAL
