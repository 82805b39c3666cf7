"""What a peer trains: a scenario's algorithm on its own examples, or whatever else is a `Trainer`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import MODEL, write_atomically
from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.checkpoint import tensors_file
from flower_privdec.experiment.evaluation import Figures, public_figures
from flower_privdec.experiment.noise_statement import NOISE
from flower_privdec.experiment.pair_plan import partners, secret_pairs
from flower_privdec.experiment.recorder import (
    check_no_training_loss,
    check_one_stage,
    check_own_ledgers,
    state_dict_of,
)
from flower_privdec.experiment.spent import Spent, check_budget, epsilons, json_number, ledger_folder
from flower_privdec.experiment.view import pair_run
from flower_privdec.graph.mixing import Mixing
from flower_privdec.peer.extension import extended, what_fits
from flower_privdec.privacy.ledger.cohort_ledger import PlannedLedger
from flower_privdec.privacy.ledger.ledger import WitnessedLedger
from flower_privdec.privacy.ledger.segments import Head, RunName
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary
from flower_privdec.privacy.noise.agreed import AgreedSecrets, SessionSecrets
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import PEER, AppScenario

_log = logging.getLogger(__name__)

SECRET_BYTES = 32
ADVERSARIES = {"if_all_collude": "all", "replies": "replies-to-one"}  # `Protection.others` as the status names them
INSECURE = "INSECURE: noise and batches follow from the scenario's seed; for tests alone"


class Trainer(Protocol):
    """What a running peer needs of what it trains.

    The peer calls `open` once, then for each round `advance` until that returns None, performing the exchanges between,
    and `close` at the end. It writes the state, `run` and what `reserve` returns into its checkpoints.

    Attributes:
        scenario: name, number of peers, rounds, network, evaluation and threads, on which all peers agree.
        algorithm: the program, whose exchanges the peer performs; only `advance` calls its steps.
        mixing: the graph and its weights.
        run: names the run in checkpoints.
        device: where the rows are.
        constants: a hash of the parts of the model that are not trained; "" if it has none, or they are not known.
        witnessed_ledger: that neighbours see; None if there is none, or if noise follows from a seed.
        steps_taken: how many private steps it took since `open`; a simulator gives these their time.
        pair_secrets: with the peers that it shares noise with; None if noise does not cancel between peers.
        pair_plan: how much noise peers share, after `open`; None if they share none.
    """

    mixing: Mixing
    run: RunName
    device: torch.device
    constants: str

    @property
    def scenario(self) -> Scenario | AppScenario: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def witnessed_ledger(self) -> WitnessedLedger | None: ...

    @property
    def steps_taken(self) -> int: ...

    def reserve(self) -> tuple[int, Head | None]:
        """Return for how many steps the ledger has paid, and its head; 0 and None if there is none.

        It may then begin to put the next private step's charge on disk; the step waits for it.
        """

    @property
    def pair_secrets(self) -> SessionSecrets | None: ...

    @property
    def pair_plan(self) -> PairPlan | None: ...

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        """Charge the lines that the ledger lacks, see `Ledger.lacks`, and return how many there are."""

    def charge_confirmed(self, confirmed: Mapping[int, int], reported: Mapping[int, int]) -> int:
        """Do so if no lie can have made the lines many, see `PlannedLedger.charge_confirmed`.

        Raises:
            BudgetError: too few neighbours confirm them; nothing was charged.
        """

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
        """Return `loss` (None if there is none), `epsilon`, `budget` and `noise`, and anything more to report.

        It may be `figures`, metrics of the model on public examples; and `adversaries`, ε towards each of them.

        Where noise cancels between peers, `epsilon` is against as many colluders as the scenario names, and
        `epsilon_if_all_collude` against all other peers.
        """

    def finish(self, state: State) -> None:
        """Save the model after final mixing, and leave it for others to read if the scenario allows that."""

    def close(self) -> None:
        """Close the ledger; a second time does nothing."""


class CohortTrainer(ABC):
    """What a scenario trains, as a cohort of this one peer; see Trainer. Where its ledger and its models go is open.

    Args:
        experiment: with the own parts of this peer, or of this peer among others.
        mixing: of the network, see `network_mixing`.
        peer: its number.

    Attributes:
        cohort: of this peer; after `open`.
    """

    cohort: Cohort

    def __init__(self, experiment: Experiment, mixing: Mixing, peer: int) -> None:
        self.experiment = experiment
        self.scenario = experiment.scenario
        self.algorithm = experiment.algorithm
        self.mixing = mixing
        self.run = experiment.own.run
        self.device = experiment.device
        self.constants = experiment.constants
        self.pair_secrets: SessionSecrets | None = None
        self._peer = peer
        self._loss: float | None = None
        self._figures: Figures = {}
        self._active = (-1, False)  # the last answer of `is_active`, with its round

    @property
    @abstractmethod
    def witnessed_ledger(self) -> PlannedLedger | None:
        """See Trainer."""

    @property
    def steps_taken(self) -> int:
        return self.cohort.steps_taken

    @property
    def pair_plan(self) -> PairPlan | None:
        """See Trainer."""
        protection = self.cohort.protection
        return None if protection is None else protection.pairs

    def reserve(self) -> tuple[int, Head | None]:
        """See Trainer; a round is taken with all its steps, or not at all."""
        if (ledger := self.cohort.ledger) is None:
            return 0, None
        paid = ledger.charged
        head = ledger.head
        following = paid // self.cohort.steps_per_round
        if following < self.scenario.rounds and self.is_active(following):
            ledger.reserve()
        return paid, head

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        ledger = self.witnessed_ledger
        return 0 if ledger is None else ledger.charge_witnessed(witnessed)

    def charge_confirmed(self, confirmed: Mapping[int, int], reported: Mapping[int, int]) -> int:
        """See Trainer."""
        ledger = self.witnessed_ledger
        return 0 if ledger is None else ledger.charge_confirmed(confirmed, reported)

    def _continued(self, state: State | None, head: Head | None, ledger_name: Path) -> State:
        """Return the state to continue from, once the cohort's ledger is open; see `Trainer.open`."""
        if state is None:
            check_budget(self.cohort, ledger_name)
            return self.experiment.initial_state(self.cohort)
        if self.cohort.ledger is not None:
            self.cohort.ledger.check_head(head)
        return state

    def use_mixing(self, mixing: Mixing) -> None:
        self.cohort.mixing = mixing

    def advance(self, state: State) -> Exchange | None:
        return advance(self.algorithm, self.cohort, state)

    def is_active(self, round_index: int) -> bool:
        """See Trainer; who takes part and can pay is decided before the run, and asked several times a round."""
        known, is_active = self._active
        if known != round_index:
            is_active = bool(self.cohort.active(round_index).any())
            self._active = (round_index, is_active)
        return is_active

    def status(self, state: State) -> dict[str, Any]:
        """See Trainer; the steps of a round that is not over yet are counted."""
        private = self.scenario.private
        protection = self.cohort.protection
        pairs = None if protection is None else protection.pairs
        budget = None if private is None else private.epsilon
        return {
            "loss": self._loss,
            "figures": self._figures,
            "epsilon": json_number(self.epsilon(state)),
            "adversaries": self._adversaries(state),
            "epsilon_if_all_collude": None if pairs is None else json_number(self.epsilon(state, EVERYBODY)),
            "colluding": None if pairs is None else pairs.colluding,
            "budget": budget[self._peer] if isinstance(budget, tuple) else budget,
            "noise": self._noise,
            "charged_for_lost": 0 if self.cohort.ledger is None else self.cohort.ledger.charged_for_lost(),
        }

    def _adversaries(self, state: State) -> dict[str, float | str]:
        """Return ε towards each adversary that it is counted for, the one that the budget is for first."""
        protection = self.cohort.protection
        first = "all"
        if protection is not None and protection.pairs is not None and protection.pairs.colluding is not None:
            first = f"colluding-{protection.pairs.colluding}"
        spent = {first: json_number(self.epsilon(state))}
        if protection is not None:
            for name, adversary in protection.others.items():
                spent[ADVERSARIES[name]] = json_number(self.epsilon(state, adversary))
        return spent

    @property
    @abstractmethod
    def _noise(self) -> str:
        """Return in words where the noise comes from."""

    def epsilon(self, state: State, adversary: Adversary | None = None) -> float:
        """Return the peer's ε so far, with all that is charged of a round that is not over yet."""
        ledger = self.cohort.ledger
        if ledger is None:
            return epsilons(self.cohort, state.round_index, adversary)[0]
        steps = max(ledger.charged, state.round_index * self.cohort.steps_per_round)
        return float(ledger.spending.epsilons(steps, adversary)[0])

    def close(self) -> None:
        if self.cohort.ledger is not None:
            self.cohort.ledger.close()


class ScenarioTrainer(CohortTrainer):
    """What a scenario trains: its algorithm on this peer's examples, with its ledger on disk; see Trainer.

    Args:
        scenario: the run's.
        peer: its number.
        folder: the peer's own.
        data: its own data, taken whole, in place of its part of the scenario's `data.root`.
        insecure_seeds: whether noise and batches are drawn from the scenario's seed, as in a simulation, for tests.
        rounds: how many the list of members gives the run; None for those of the scenario.
        most: the ε that the owner of the device allows more rounds; None for that of the scenario.

    Raises:
        ScenarioError: a part of the scenario cannot be had.

    Privacy: noise and batches come from the operating system, and a step that is taken again after a crash is drawn,
    and paid for, again. With insecure_seeds they follow from the scenario, from which the noise can be subtracted.
    """

    def __init__(
        self,
        scenario: Scenario,
        peer: int,
        folder: Path,
        data: str | None = None,
        insecure_seeds: bool = False,
        rounds: int | None = None,
        most: float | None = None,
    ) -> None:
        torch.set_num_threads(scenario.compute.threads)
        agreement = Agreement.of(scenario)
        mixing = network_mixing(agreement)
        self._folder = folder
        self._insecure = insecure_seeds
        if insecure_seeds and scenario.compute.generator == "system":
            raise ScenarioError(
                "--insecure-seeds draws from the scenario's seed, and compute.generator=system does not: leave one out",
                code="peer.insecure-system",
            )
        # Drawn here and written by `open`, for all of the scenario is checked before anything is on disk.
        self._secret = None if insecure_seeds else _drawn_secret(folder)
        hosted = np.array([peer])
        own = OwnParts.of(agreement, hosted, self._secret, data, "network", whole=data is not None)
        self._is_extended = rounds is not None and rounds > scenario.rounds
        if rounds is not None and self._is_extended:
            # The run keeps the name and the noise of its first rounds.
            scenario = extended(scenario, own, peer, rounds, most)
            run = own.run
            agreement = Agreement.of(scenario)
            own = OwnParts.of(agreement, hosted, self._secret, data, "network", whole=data is not None)
            own = replace(own, run=run)
        super().__init__(Experiment.joined(agreement, own), mixing, peer)
        self._ledger_folder = ledger_folder(scenario, folder)
        if len(secret_pairs(scenario)):
            names = scenario.network.identities(scenario.name, scenario.n_peers)
            others = partners(scenario, np.array([peer]))
            self.pair_secrets = AgreedSecrets([peer], pair_run(self.experiment), names, partners=others)
        root = scenario.data.root if data is None else data
        self._held = -1
        is_own = data is not None or scenario.data.each_its_own
        is_private = scenario.private is not None and is_own and not insecure_seeds
        self._data: Path | None = None
        if root is not None and is_private:
            self._data = Path(root.replace(PEER, str(peer)))

    @property
    def witnessed_ledger(self) -> PlannedLedger | None:
        return None if self._insecure else self.cohort.ledger

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer; locks the peer's data file, whose examples another peer's ledger would count alone."""
        if self._secret is not None:
            _keep_secret(self._folder, self._secret)
        self.cohort = self.experiment.cohort(self._ledger_folder, start=paid)
        if self.pair_secrets is not None:
            self.cohort.secrets = self.pair_secrets
        try:
            self._held = -1 if self._data is None else _hold(self._data)
            opened = self._continued(state, head, self._ledger_folder)
            self._say_what_fits()
            return opened
        except BaseException:
            self.close()
            raise

    def _say_what_fits(self) -> None:
        """Log how far the owner's bound goes, if the run has more rounds than it covers."""
        ledger = self.cohort.ledger
        if ledger is None or not self._is_extended:
            return
        covered = int(ledger.spending.limits[0]) // self.cohort.steps_per_round
        if covered < self.scenario.rounds:
            _log.warning("%s: %s", self._ledger_folder, what_fits(self.scenario, self._peer, covered))

    def evaluate(self, state: State) -> None:
        """See Trainer.

        Privacy: the loss that the status reports is of public test examples, and of rows that others may see; a loss of
        its own examples would be a release.
        """
        self._hand_in(state, rows_path(self._folder, state.round_index))

    def _hand_in(self, state: State, path: Path) -> None:
        """Leave the device's model in its folder, and the rows to be handed in if the scenario allows that."""
        rows = {name: state.rows[name] for name in self.algorithm.open_rows}
        self._loss, self._figures = public_figures(self.experiment, rows)[0]
        model = self.algorithm.models(rows)[0]
        if bool(model.isfinite().all()):  # else the last one stays
            write_atomically(self._folder / MODEL, tensors_file(state_dict_of(self.experiment, model)))
        if self.scenario.network.hands_in:
            facts = asdict(Spent.of(self.cohort, state.round_index)) | {"noise": self.experiment.own.source}
            if self.pair_secrets is not None:
                facts["left_out"] = sorted(self.pair_secrets.left_out.items())
            content = tensors_file(rows, {"privdec": json.dumps(facts)})
            write_atomically(path, content)

    @property
    def _noise(self) -> str:
        return INSECURE if self._insecure else NOISE[self.experiment.own.source]

    def finish(self, state: State) -> None:
        self._hand_in(state, rows_path(self._folder, None))

    def close(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        super().close()


def network_mixing(agreement: Agreement) -> Mixing:
    """Return the mixing of an agreement, for a network of peers.

    Raises:
        ScenarioError: the algorithm exchanges nothing, or averages at a server, which a network of peers does not have;
            or its shares or its pairs' noise need peers that wait for each other.
    """
    mixing = agreement.mixing
    check_own_ledgers(agreement)

    if agreement.algorithm.averaged and agreement.scenario.network.mode == "asynchronous":
        raise ScenarioError(
            "algorithm.average with network.mode=asynchronous must be left out: shares arrive between the rounds, and "
            "late peers take over rows that have no average; use network.mode synchronous",
            code="algorithm.average",
        )

    check_no_training_loss(agreement.scenario)
    if agreement.scenario.participation.leaving:
        raise ScenarioError(
            "participation.leaving is for simulations, and peers of a network leave by themselves: leave it out, "
            "and noticed_after with it, and stop one by `privdec up --kill PEER@ROUND`",
            code="participation.leaving",
        )

    check_one_stage(agreement.scenario, "each peer of a network has planned, and noted, its own noise")
    if mixing is None:
        raise ScenarioError(
            f"algorithm.name={agreement.algorithm.name} exchanges nothing, so there is no network: use `privdec run`",
            code="network.no-exchange",
        )

    if agreement.scenario.topology.name == "server":
        remedy = "use complete, the graph in which all peers are neighbours"
        if "topology.name=server" in agreement.algorithm.needs:
            remedy = f"{agreement.algorithm.name} has no other graph: run it by `privdec run`"
        raise ScenarioError(
            f"topology.name='server' averages at a server, and a network has only peers: {remedy}",
            code="network.server",
        )
    _check_pairs(agreement.scenario, mixing)
    return mixing


def _check_pairs(scenario: Scenario, mixing: Mixing) -> None:
    """Refuse exchanges in which noise of pairs that comes late would never cancel."""
    if len(secret_pairs(scenario)) and scenario.network.mode == "asynchronous" and not mixing.sends_shares:
        raise ScenarioError(
            "privacy.noise.kind=cancelling with network.mode=asynchronous needs exchanges that conserve the sum when "
            f"peers are late, and those of algorithm.name={scenario.algorithm.name} do not: use network.mode "
            "synchronous, or an algorithm of push-sum, such as privsgp",
            code="noise.cancelling-late",
        )


def _hold(data: Path) -> int:
    """Lock a peer's own data file against other peers of this machine; return its descriptor, -1 if none can be."""
    try:
        file = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # which reading it raises
        return -1

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RunError(
            f"{data} is another peer's, which trains on it now: each ledger would count its examples alone; give each "
            "peer a file of its own",
            code="peer.data-in-use",
        ) from None
    except OSError:  # a file system without locks
        os.close(file)
        return -1
    return file


def _drawn_secret(folder: Path) -> bytes:
    """Return the peer's secret: the one in its folder, or a new one, which is not written yet."""
    path = folder / "secret"
    return path.read_bytes() if path.exists() else secrets.token_bytes(SECRET_BYTES)


def _keep_secret(folder: Path, secret: bytes) -> None:
    """Put a peer's secret on disk, if it is not there yet.

    Raises:
        RunError: another process of this peer has put another one there since this one began.
    """
    path = folder / "secret"
    if not path.exists():
        new = folder / f"secret-{secrets.token_hex(8)}"
        write_atomically(new, secret)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    if path.read_bytes() != secret:
        raise RunError(
            f"{path} is another process's, which began at the same time: run the same command again", code="peer.secret"
        )


def rows_path(folder: Path, round_index: int | None) -> Path:
    """Return where a peer leaves the rows that others may see after a round, or with None after final mixing."""
    return folder / f"rows-{'final' if round_index is None else round_index}.safetensors"
