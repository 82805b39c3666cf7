"""One peer of a network: its own data, its own ledger, its own folder, and what it says to its neighbours."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from flower_privdec.common.files import write_atomically
from flower_privdec.common.folder_lock import FolderLock
from flower_privdec.core import Exchange, State, advance
from flower_privdec.engine.checkpoint import Checkpoint, check_state, load_checkpoint, save_checkpoint
from flower_privdec.engine.recorder import evaluation_rounds
from flower_privdec.engine.spent import Spent, check_budget, epsilons, json_number, ledger_folder
from flower_privdec.errors import ScenarioError, StoppedError
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.evaluation import public_losses
from flower_privdec.network.peer.share_files import ShareFiles
from flower_privdec.network.transport.certificates import identities
from flower_privdec.network.transport.connection_manager import Courier, Mail
from flower_privdec.network.transport.identity import Credentials
from flower_privdec.pushsum.timetable import Timetable
from flower_privdec.scenario import Scenario, scenario_hash, to_yaml

SECRET_BYTES = 32
POLL = 0.2  # seconds between two looks at whether to stop
OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PeerDevice:
    """What a device says of itself.

    Attributes:
        peer: which peer it is.
        folder: where its checkpoints, its ledger and its secret lie.
        credentials: by which others know it.
        addresses: HOST:PORT of every peer.
        data: where its data lie, in place of the scenario's `data.root`; None where the scenario is right.
        insecure_seeds: whether noise and batches are drawn from the scenario's seed, as in a simulation, for tests.
    """

    peer: int
    folder: Path
    credentials: Credentials
    addresses: tuple[str, ...]
    data: str | None = None
    insecure_seeds: bool = False


class RunningPeer(ABC):
    """One peer of a run, from its beginning or its last checkpoint to the end of the rounds.

    Before it sends anything, what it will need to send it again is on its disk; so whatever ends its process, it goes
    on from there, and its neighbours with it.

    Privacy: noise and batches come from the operating system, and a step that is taken again after a crash is drawn,
    and paid for, anew. With insecure_seeds they follow from the scenario, and whoever has that can take the noise off.

    Attributes:
        generations: how many checkpoints are kept.
    """

    generations: ClassVar[int]

    def __init__(self, scenario: Scenario, device: PeerDevice, resume: bool = False) -> None:
        """Read what is this peer's own; send nothing yet.

        Raises:
            ScenarioError: a part of the scenario cannot be had, or the folder holds another run, or nothing to resume.
            BudgetError: the ledger cannot be trusted, is in use, or allows no step.
        """
        torch.set_num_threads(scenario.compute.threads)
        self.device = device
        agreement = self._agreement(scenario)
        self.timetable = Timetable(agreement)
        device.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(device.folder)
        self._lock.take()
        try:
            self._own(scenario, agreement, resume)
        except BaseException:
            self._lock.release()
            raise

    def _agreement(self, scenario: Scenario) -> Agreement:
        """Return what all peers know."""
        return Agreement.of(scenario)

    def _joined(self, agreement: Agreement) -> Experiment:
        """Return that and this peer's own parts."""
        device = self.device
        secret = None if device.insecure_seeds else self._secret()
        return Experiment.joined(agreement, OwnParts.of(agreement, np.array([device.peer]), secret, root=device.data))

    def _own(self, scenario: Scenario, agreement: Agreement, resume: bool) -> None:
        self.experiment, self._hash = self._joined(agreement), scenario_hash(scenario)
        self._shares_on_disk = ShareFiles(self.device.folder)
        kept = self._kept(resume)
        last = kept[-1] if kept else None
        start = last.transport["paid"] if last else 0
        self.cohort = self.experiment.cohort(ledger_folder(scenario, self.device.folder), start=start)
        try:
            if last is None:
                self._check_budget(ledger_folder(scenario, self.device.folder))
            elif self.cohort.ledger is not None:
                self.cohort.ledger.check_head(last.head)
            self.state = last.state if last else self.experiment.initial_state(self.cohort)
            self._prepare(scenario, kept)
        except BaseException:
            self._close_ledger()
            raise

    def _check_budget(self, ledger: Path) -> None:
        """Refuse a new run that the ledger in a folder allows no step."""
        check_budget(self.cohort, ledger)

    def _close_ledger(self) -> None:
        if self.cohort.ledger is not None:
            self.cohort.ledger.close()

    def _prepare(self, scenario: Scenario, kept: list[Checkpoint]) -> None:
        network = scenario.network
        self.courier = Courier(self._mail(kept), self.status, network.retry, network.deadline / 2)
        self._stopped = Event()
        self._loss: float | None = None
        if not (self.device.folder / "scenario.yaml").exists():
            write_atomically(self.device.folder / "scenario.yaml", to_yaml(scenario).encode())

    @abstractmethod
    def _mail(self, kept: list[Checkpoint]) -> Mail:
        """Return what the courier is to carry, going on from the checkpoints kept, the older first."""

    # --- what is on disk ---

    def _secret(self) -> bytes:
        path = self.device.folder / "secret"
        if not path.exists():
            write_atomically(path, secrets.token_bytes(SECRET_BYTES), private=True)
        return path.read_bytes()

    def _paths(self) -> list[Path]:
        return [self.device.folder / f"checkpoint-{number}" for number in range(self.generations)]

    def _kept(self, resume: bool) -> list[Checkpoint]:
        """Return the checkpoints to go on from, the older first; none at the beginning of a run."""
        folder, experiment = self.device.folder, self.experiment
        there = [path for path in self._paths() if path.exists()]
        if there and not resume:
            raise ScenarioError(f"{folder} already holds a run; give --resume to go on with it, or another --out")
        if resume and not there:
            raise ScenarioError(f"{folder} holds no checkpoint to resume from; leave --resume out")
        scenario = experiment.scenario
        kept = [load_checkpoint(path, self._hash, experiment.own.run, experiment.device) for path in there]
        for path, each in zip(there, kept, strict=True):
            check_state(path, each.state, experiment.own.peers, scenario.rounds)
        return sorted(kept, key=lambda each: each.transport["place"])

    def _save(
        self, place: int, state: State, transport: Mapping[str, Any], carried: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put a state on disk, with what belongs to it, in the place of the oldest.

        Args:
            place: a number that grows.
            transport, carried: see Checkpoint; what is carried never changes.
        """
        ledger, experiment = self.cohort.ledger, self.experiment
        facts = {**transport, "place": place, "paid": 0 if ledger is None else ledger.charged}
        head = None if ledger is None else ledger.head
        found = Checkpoint(state, self._hash, experiment.own.run, head=head, transport=facts, carried=carried or {})
        self._shares_on_disk.keep(found.carried)
        save_checkpoint(self._paths()[place % self.generations], found, self._shares_on_disk.place)
        self._shares_on_disk.tidy()

    # --- a run ---

    def open(self) -> int:
        """Listen and begin to call; return the port that is listened on."""
        names, peer = identities(self.experiment.scenario), self.device.peer
        others = {each: self.device.addresses[each] for each in self.timetable.neighbours(peer)}
        members = {name: number for number, name in enumerate(names)}
        self._begin()
        return self.courier.open(self.device.addresses[peer], self.device.credentials, members, others, self._cap())

    def run(self, on_round: OnRound | None = None) -> None:
        """Take part until the rounds are done and the neighbours have what they need.

        Args:
            on_round: called after every round with `status`.

        Raises:
            RunError: the run cannot go on, as the neighbours are.
            StoppedError: `stop` was called; the state is on disk.
        """
        rounds, algorithm = self.experiment.scenario.rounds, self.experiment.algorithm
        looked = set(evaluation_rounds(rounds, self.experiment.scenario.evaluation.every))
        self._meet()
        while self.state.round_index < rounds:
            if self.state.at == 0:
                self._before(self.state.round_index)
            exchange = advance(algorithm, self.cohort, self.state)
            if exchange is not None:
                self._exchange(exchange)
                continue
            if self.state.round_index in looked:
                self._look()
            if on_round is not None:
                on_round(self.status())
        self._leave()

    @abstractmethod
    def _begin(self) -> None:
        """Make ready what is said first, before anybody calls."""

    @abstractmethod
    def _cap(self) -> int:
        """Return the bytes that a call has at most."""

    @abstractmethod
    def _meet(self) -> None:
        """Wait for the neighbours, before the first step."""

    @abstractmethod
    def _before(self, round_index: int) -> None:
        """Make sure that a round's steps can be taken."""

    @abstractmethod
    def _exchange(self, exchange: Exchange) -> None:
        """Perform an exchange, with its place in the program."""

    @abstractmethod
    def _leave(self) -> None:
        """Give the neighbours what they need, after the last round."""

    @abstractmethod
    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and nothing is left to say to it."""

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"the same command with --resume goes on from {self.device.folder}")

    def stop(self) -> None:
        """End the run at the next wait, with its state on disk."""
        self._stopped.set()

    def close(self) -> None:
        """Let go of the network, the ledger and the folder."""
        self.courier.close()
        self._close_ledger()
        self._lock.release()

    # --- what others and its owner see ---

    def _rows_of(self, exchange: Exchange) -> dict[str, Tensor]:
        return {name: self.state.rows[exchange.shaped(name)][0] for name in exchange.names}

    def _look(self) -> None:
        """Try this peer's model, and hand it in where the scenario allows that.

        Privacy: the loss that its status tells is of public test examples, and of rows that others may see; a loss of
        its own examples would be a release.
        """
        rows = {name: self.state.rows[name] for name in self.experiment.algorithm.open_rows}
        self._loss = public_losses(self.experiment, rows)[0]
        if self.experiment.scenario.network.hands_in:
            self._hand_in(rows)

    def _hand_in(self, rows: dict[str, Tensor]) -> None:
        """Leave rows that others may see, and what was spent, for whoever may read this peer's folder."""
        round_index, spent = self.state.round_index, Spent.of(self.cohort, self.state.round_index)
        content = save(
            {name: row.cpu().contiguous() for name, row in rows.items()}, {"privdec": json.dumps(asdict(spent))}
        )
        write_atomically(rows_path(self.device.folder, round_index), content)

    def _traffic(self) -> dict[str, int]:
        return {"bytes_sent": self.courier.sent, "bytes_heard": self.courier.heard}

    def status(self) -> dict[str, Any]:
        """Return how this peer does: round, loss, ε, its neighbours, which of them are down and why, bytes.

        The loss is of its model on public test examples at the last evaluation; None before one, or where it is not
        finite.
        """
        scenario = self.experiment.scenario
        budget = None if scenario.private is None else scenario.private.epsilon
        return {
            "name": scenario.name,
            "peer": self.device.peer,
            "round": self.state.round_index,
            "rounds": scenario.rounds,
            "loss": self._loss,
            "epsilon": json_number(self._epsilon()),
            "budget": budget[self.device.peer] if isinstance(budget, tuple) else budget,
            "neighbours": self.timetable.neighbours(self.device.peer),
            "down": {str(peer): why for peer, why in sorted(self.courier.trouble.items()) if not self._is_over(peer)},
            **self._traffic(),
            "noise": noise_said(scenario, self.device.insecure_seeds),
        }

    def _epsilon(self) -> float:
        """Return what is spent by now, the steps of a round that is not over yet included."""
        ledger, rounds = self.cohort.ledger, self.state.round_index
        if ledger is None:
            return epsilons(self.cohort, rounds)[0]
        return float(ledger.spending.epsilons(max(ledger.charged, rounds * self.cohort.steps_per_round))[0])


def rows_path(folder: Path, round_index: int) -> Path:
    """Return where a peer leaves the rows that others may see after a round."""
    return folder / f"rows-{round_index}.safetensors"


def noise_said(scenario: Scenario, insecure_seeds: bool) -> str:
    """Say where a peer's noise comes from, and how it is rounded where that is exactly."""
    if insecure_seeds:
        return "INSECURE: noise and batches follow from the scenario's seed; for tests alone"
    hardened = getattr(scenario.private, "hardened", False)  # what an app's privacy section does not have
    return f"of the operating system's generator{', hardened: rounded exactly' if hardened else ''}"
