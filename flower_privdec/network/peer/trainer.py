"""The protocol of what a running peer trains (`Trainer`), and the trainer of a scenario."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save

from flower_privdec.common.files import write_atomically
from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.engine.spent import Spent, check_budget, epsilons, json_number, ledger_folder
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.evaluation import public_losses
from flower_privdec.graph.mixing import Mixing
from flower_privdec.privacy.ledger.ledger import RunName
from flower_privdec.pushsum.lockstep import network_mixing
from flower_privdec.pushsum.witness import EMPTY, Head
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.schema import AppScenario

SECRET_BYTES = 32
INSECURE = "INSECURE: noise and batches follow from the scenario's seed; for tests alone"


class Trainer(Protocol):
    """What a running peer needs of what it trains.

    The peer calls `open` once, then for each round `advance` until that returns None, performing the exchanges between,
    and `close` at the end. It writes the state, `paid`, `head` and `run` into its checkpoints.

    Attributes:
        scenario: name, number of peers, rounds, network, evaluation and threads, on which all peers agree.
        algorithm: the program, whose exchanges the peer performs; its steps are called by `advance` alone.
        mixing: the graph and its weights.
        run: names the run in checkpoints.
        device: where the rows are.
        ledger_folder: where the ledger lies.
        paid: for how many steps the ledger has paid.
        head: of the ledger; None where there is none.
        witnessed: what neighbours see of the ledger; EMPTY where there is none, or noise follows from a seed.
        steps_per_round: private steps.
    """

    @property
    def scenario(self) -> Scenario | AppScenario: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def mixing(self) -> Mixing: ...

    @property
    def run(self) -> RunName: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def ledger_folder(self) -> Path: ...

    @property
    def paid(self) -> int: ...

    @property
    def head(self) -> Head | None: ...

    @property
    def witnessed(self) -> Head: ...

    @property
    def steps_per_round(self) -> int: ...

    def check_witnessed(self, witnessed: Head) -> None:
        """Check that the ledger holds what a neighbour has seen of it.

        Raises:
            BudgetError: it is an old copy.
        """

    def charge_witnessed(self, length: int) -> int:
        """Charge the lines that the ledger lacks of `length`, and return how many there are."""

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """Open the ledger, and return the state to continue from: the one given, or that before round 0.

        Args:
            state, paid, head: of the last checkpoint; None, 0 and None at the beginning.

        Raises:
            BudgetError: the ledger cannot be trusted, is in use, does not continue from the head, or allows no step.
        """

    def use_mixing(self, mixing: Mixing) -> None:
        """Use this mixing in steps that depend on which neighbours were heard."""

    def advance(self, state: State) -> Exchange | None:
        """Take the steps up to the next exchange, each paid for on disk before it reads an example.

        Returns:
            The exchange, or None at the end of a round, when `state.round_index` is the next round.
        """

    def is_active(self, round_index: int) -> bool:
        """Return whether the peer takes private steps in a round."""

    def evaluate(self, state: State) -> None:
        """Evaluate the model, and leave in the peer's folder what the scenario allows others to read there.

        Privacy: what `status` reports of it must come from public examples and of rows that others may see.
        """

    def status(self, state: State) -> dict[str, Any]:
        """Return `loss` (None where there is none), `epsilon`, `budget` and `noise`, and anything more to report."""

    def finish(self, state: State) -> None:
        """Save the model after the last round."""

    def close(self) -> None:
        """Close the ledger; a second time does nothing."""


class ScenarioTrainer:
    """What a scenario trains: its algorithm on this peer's examples; see Trainer.

    Args:
        scenario: the run's.
        peer: its number.
        folder: the peer's own.
        data: where its data lie, in place of the scenario's `data.root`.
        insecure_seeds: whether noise and batches are drawn from the scenario's seed, as in a simulation, for tests.

    Raises:
        ScenarioError: a part of the scenario cannot be had.

    Privacy: noise and batches come from the operating system, and a step that is taken again after a crash is drawn,
    and paid for, again. With insecure_seeds they follow from the scenario, from which the noise can be subtracted.
    """

    def __init__(
        self, scenario: Scenario, peer: int, folder: Path, data: str | None = None, insecure_seeds: bool = False
    ) -> None:
        torch.set_num_threads(scenario.compute.threads)
        agreement = Agreement.of(scenario)
        self.scenario, self.mixing, self.algorithm = scenario, network_mixing(agreement), agreement.algorithm
        self._peer, self._folder, self._insecure = peer, folder, insecure_seeds
        secret = None if insecure_seeds else _secret(folder)
        self.experiment = Experiment.joined(agreement, OwnParts.of(agreement, np.array([peer]), secret, root=data))
        self.run, self.device = self.experiment.own.run, self.experiment.device
        self.ledger_folder = ledger_folder(scenario, folder)
        self._loss: float | None = None

    @property
    def paid(self) -> int:
        """See Trainer."""
        return 0 if self.cohort.ledger is None else self.cohort.ledger.charged

    @property
    def head(self) -> Head | None:
        """See Trainer."""
        return None if self.cohort.ledger is None else self.cohort.ledger.head

    @property
    def steps_per_round(self) -> int:
        """See Trainer."""
        return self.cohort.steps_per_round

    @property
    def witnessed(self) -> Head:
        """See Trainer."""
        ledger = self.cohort.ledger
        return EMPTY if ledger is None or self._insecure else ledger.witnessed

    def check_witnessed(self, witnessed: Head) -> None:
        """See Trainer."""
        if self.cohort.ledger is not None and not self._insecure:
            self.cohort.ledger.check_witnessed(witnessed)

    def charge_witnessed(self, length: int) -> int:
        """See Trainer."""
        ledger = self.cohort.ledger
        return 0 if ledger is None or self._insecure else ledger.charge_witnessed(length)

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer."""
        self.cohort = self.experiment.cohort(self.ledger_folder, start=paid)
        try:
            if state is None:
                check_budget(self.cohort, self.ledger_folder)
                return self.experiment.initial_state(self.cohort)
            if self.cohort.ledger is not None:
                self.cohort.ledger.check_head(head)
            return state
        except BaseException:
            self.close()
            raise

    def use_mixing(self, mixing: Mixing) -> None:
        """See Trainer."""
        self.cohort.mixing = mixing

    def advance(self, state: State) -> Exchange | None:
        """See Trainer."""
        return advance(self.algorithm, self.cohort, state)

    def is_active(self, round_index: int) -> bool:
        """See Trainer."""
        return bool(self.cohort.active(round_index).any())

    def evaluate(self, state: State) -> None:
        """See Trainer.

        Privacy: the loss that the status reports is of public test examples, and of rows that others may see; a loss of
        its own examples would be a release.
        """
        rows = {name: state.rows[name] for name in self.algorithm.open_rows}
        self._loss = public_losses(self.experiment, rows)[0]
        if self.scenario.network.hands_in:
            facts = {"privdec": json.dumps(asdict(Spent.of(self.cohort, state.round_index)))}
            content = save({name: row.cpu().contiguous() for name, row in rows.items()}, facts)
            write_atomically(rows_path(self._folder, state.round_index), content)

    def status(self, state: State) -> dict[str, Any]:
        """See Trainer; the steps of a round that is not over yet are counted."""
        ledger, rounds, private = self.cohort.ledger, state.round_index, self.scenario.private
        if ledger is None:
            epsilon = epsilons(self.cohort, rounds)[0]
        else:
            epsilon = float(ledger.spending.epsilons(max(ledger.charged, rounds * self.cohort.steps_per_round))[0])
        budget = None if private is None else private.epsilon
        return {
            "loss": self._loss,
            "epsilon": json_number(epsilon),
            "budget": budget[self._peer] if isinstance(budget, tuple) else budget,
            "noise": noise_source(self._insecure, private is not None and bool(private.hardened)),
        }

    def finish(self, state: State) -> None:
        """See Trainer; the last evaluation was of the last round."""

    def close(self) -> None:
        """See Trainer."""
        if self.cohort.ledger is not None:
            self.cohort.ledger.close()


def _secret(folder: Path) -> bytes:
    """Return the peer's secret, drawn by the operating system at first use; two processes at once get the same."""
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / "secret", folder / f"secret-{secrets.token_hex(8)}"
    if not path.exists():
        write_atomically(new, secrets.token_bytes(SECRET_BYTES), private=True)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    return path.read_bytes()


def rows_path(folder: Path, round_index: int) -> Path:
    """Return where a peer leaves the rows that others may see after a round."""
    return folder / f"rows-{round_index}.safetensors"


def noise_source(insecure_seeds: bool, hardened: bool = False) -> str:
    """Return the source of a peer's noise, and whether its rounding is hardened."""
    if insecure_seeds:
        return INSECURE
    return f"of the operating system's generator{', hardened: rounded exactly' if hardened else ''}"
