"""One peer of a network: its own data, its own ledger, its own folder, and its exchanges with its neighbours."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from flower_privdec.common.errors import RunError, ScenarioError, StoppedError
from flower_privdec.common.files import CHECKPOINTS, MODEL, FolderLock, write_atomically
from flower_privdec.core import Algorithm, Exchange, Mix, State, advance
from flower_privdec.core.exchange import Payload
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.checkpoint import Checkpoint, CheckpointLog, check_run, check_state
from flower_privdec.experiment.evaluation import public_losses
from flower_privdec.experiment.noise_statement import NOISE
from flower_privdec.experiment.pair_plan import secret_pairs
from flower_privdec.experiment.recorder import (
    check_no_training_loss,
    check_one_stage,
    check_own_ledgers,
    evaluation_rounds,
    state_dict_of,
)
from flower_privdec.experiment.spent import (
    Spent,
    check_budget,
    epsilons,
    json_number,
    ledger_folder,
)
from flower_privdec.experiment.view import pair_run
from flower_privdec.graph.mixing import Link, Mixing
from flower_privdec.network.peer.connections import Connections, Session
from flower_privdec.network.transport.faulty_transport import Faults, FaultyTransport
from flower_privdec.network.transport.grpc_transport import GrpcTransport
from flower_privdec.network.transport.tls import Credentials, identities
from flower_privdec.network.transport.transport import Transport
from flower_privdec.privacy.ledger.charges import RunName
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Head
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary
from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.pushsum.frames import REPORT, RowFormats, TensorArithmetic, formats_of, wire_codec
from flower_privdec.pushsum.lockstep import Timetable, final_rounds
from flower_privdec.pushsum.witness import LedgerWitness, WitnessFile, draw_boot
from flower_privdec.scenario import Scenario, numbers_hash, scenario_hash, to_yaml
from flower_privdec.scenario.sections import PEER, AppScenario

POLL = 0.2  # seconds between two looks at whether to stop
AGREE, APART = 0.005, 0.03  # of the norm: models as near need no more mixing; as far apart at the end, do not agree
REPORT_SECONDS = 2.0  # for all neighbours to report, where one has
OnRound = Callable[["RunningPeer"], None]


@dataclass(frozen=True)
class PeerDevice:
    """The device that a peer runs on.

    Attributes:
        peer: which peer it is.
        folder: where its checkpoints, its ledger and its secret lie.
        credentials: by which others know it.
        addresses: HOST:PORT of every peer.
        data: its own data, taken whole, in place of its part of the scenario's `data.root`; None where there are none.
        insecure_seeds: whether noise and batches are drawn from the scenario's seed, as in a simulation, for tests.
        transport: in place of gRPC over TLS, which needs credentials and addresses.
        loss: chance that a call to another peer, or its answer, is lost on purpose.
        witnessed: the file of what it has counted of its neighbours' ledgers; `witnessed` in its folder when None.
    """

    peer: int
    folder: Path
    credentials: Credentials | None = None
    addresses: tuple[str, ...] = ()
    data: str | None = None
    insecure_seeds: bool = False
    transport: Transport | None = None
    loss: float = 0.0
    witnessed: Path | None = None


class RunningPeer(ABC):
    """One peer of a run, from the last checkpoint of its folder, or its beginning, to the end of the rounds.

    Before it sends anything, all that it needs to send it again is on its disk; however its process ends, it
    continues from there, and its neighbours with it.

    Args:
        trainer: what it trains.
        device: where it runs.

    Attributes:
        generations: how many checkpoints stay on disk.
        final: rounds of final mixing, if they suffice.
        end: the round after the last that final mixing can take; a peer that is there is done.
        distances: in final mixing, from each neighbour's model to this peer's when it last came, over the larger norm.
        waits_for: what a peer waits for before its next step, or its end; empty where it waits for nothing.

    Raises:
        ScenarioError: the folder holds another run, or the network cannot carry the algorithm.
        BudgetError: the ledger cannot be trusted, is in use, or allows no step.

    Privacy: that of its trainer; what it sends beside are counters.
    """

    generations: ClassVar[int]
    waits_for = ""

    def __init__(self, trainer: Trainer, device: PeerDevice) -> None:
        self.trainer = trainer
        self.device = device
        scenario = trainer.scenario
        self.rounds = scenario.rounds
        self.network = scenario.network
        self.mixing = trainer.mixing
        self.final, self._left = final_rounds(trainer.mixing, scenario.rounds, self.network.final_mixing)
        further = self._more_final_rounds(self.final) if self.network.final_mixing == "auto" else 0
        self.timetable = Timetable(trainer.algorithm, trainer.mixing, scenario.rounds, self.final + further)
        self.end, self.distances = self.timetable.end, dict[int, float]()
        self.arithmetic = TensorArithmetic(wire_codec(self.network.codec))
        if not (self.mixing.sends_shares or self.arithmetic.is_exact):
            raise ScenarioError(
                f"network.codec={self.network.codec} rounds rows, and algorithm.name={trainer.algorithm.name} sends "
                "rows whose rounding no sender's mass takes back: use exact, or an algorithm of push-sum",
                code="network.codec-without-shares",
            )
        if self.network.robust is not None and (
            self.mixing.sends_shares or not all(isinstance(one, Mix) for one in self.timetable.exchanges.values())
        ):
            raise ScenarioError(
                f"network.robust clips the rows of gossip, and algorithm.name={trainer.algorithm.name} sends push-sum "
                "shares, or gradients: take an algorithm that gossips alone, such as d-psgd, or leave it out",
                code="network.robust-without-gossip",
            )
        codec = "" if self.arithmetic.is_exact else f", {self.network.codec}"
        codec += f", {self.final} rounds of final mixing"
        codec += f", constants {trainer.constants}" if trainer.constants else ""
        self._digest = scenario_hash(scenario) + codec
        self._run_id, self._stopped = (numbers_hash(scenario) + codec).encode(), Event()
        device.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(device.folder)
        self._lock.take()
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        trainer = self.trainer
        folder = self.device.folder
        checkpoints = self._checkpoints()
        last = checkpoints[-1] if checkpoints else None
        state = (None, 0, None) if last is None else (last.state, last.transport["paid"], last.head)
        self.state = trainer.open(*state)
        try:
            peer = self.device.peer
            boot = draw_boot()
            ledger = trainer.witnessed_ledger
            if ledger is not None:
                ledger.name_lines(boot)
            self._counts, neighbors = (
                WitnessFile(self.device.witnessed or folder / "witnessed"),
                self.timetable.neighbours(peer),
            )
            seen = self._counts.read({} if last is None else last.transport["witnessed"])
            pairs = trainer.pair_secrets
            self.witness = LedgerWitness(peer, neighbors, boot, ledger, seen, self._counts.write, pairs=pairs)
            session = self._make_session(checkpoints)
            self.connections = Connections(session, self.status, self.network.retry, self.network.deadline / 2)
            if not (folder / "scenario.yaml").exists():
                write_atomically(folder / "scenario.yaml", to_yaml(trainer.scenario).encode(), public=True)
        except BaseException:
            trainer.close()
            raise

    @abstractmethod
    def _make_session(self, checkpoints: list[Checkpoint]) -> Session:
        """Return the session, continued from the checkpoints, the older first."""

    # --- what is on disk ---

    def _checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none at the beginning of a run."""
        trainer = self.trainer
        path = self.device.folder / CHECKPOINTS
        self._log = CheckpointLog(path, self.generations)
        checkpoints = self._log.read(trainer.device)
        for checkpoint in checkpoints:
            check_run(path, checkpoint, self._digest, trainer.run)
            check_state(path, checkpoint.state, np.array([self.device.peer]), self.end)
        return checkpoints

    def _save(
        self, place: int, state: State, transport: Mapping[str, Any], carried: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put a state on disk, with what belongs to it; meanwhile the ledger's disk reserves the next private step.

        `place` grows, and what is `carried` never changes; see Checkpoint.
        """
        trainer = self.trainer
        paid, head = trainer.reserve()
        facts = {**transport, "place": place, "paid": paid, "witnessed": self._counts.unsynced()}
        checkpoint = Checkpoint(state, self._digest, trainer.run, head=head, transport=facts, carried=carried or {})
        self._log.write(checkpoint)

    # --- a run ---

    def open(self, begin: bool = True) -> int:
        """Listen and begin to call; return the port that is listened on.

        Args:
            begin: whether to take part; else it reports and charges alone, see `charge_witnessed`.
        """
        device = self.device
        transport = self.device.transport
        if transport is None:
            assert device.credentials is not None
            names = identities(self.trainer.scenario)
            transport = GrpcTransport(device.peer, device.addresses, names, device.credentials)
        if device.loss:
            transport = FaultyTransport(transport, device.peer, Faults(lose=device.loss))
        self.waits_for = "its neighbours"
        if begin:
            self._begin()
        else:
            full = self.connections.session
            self.connections.session = Session(self.witness, full.frames, full.most - 1, full.cap - REPORT, self.end)
        return self.connections.open(transport, self.timetable.neighbours(device.peer))

    def run(self, on_round: OnRound | None = None) -> None:
        """Take part until the rounds are done and the neighbours have what they need.

        Args:
            on_round: called after every round with this peer, whose `status` computes ε when it is requested.

        Raises:
            RunError: the run cannot continue, as the neighbours are.
            StoppedError: `stop` was called; the state is on disk.
        """
        evaluated = set(evaluation_rounds(self.rounds, self.trainer.scenario.evaluation.every))
        self._meet()
        self.waits_for = ""
        if self._has_steps():
            self._await_witness()
        while self.state.round_index < self.rounds:
            if self.state.at == 0:
                self._before(self.state.round_index)
            exchange = self.trainer.advance(self.state)
            if exchange is not None:
                self._exchange(exchange)
                continue
            if self.state.round_index in evaluated:
                self.trainer.evaluate(self.state)
            if on_round is not None:
                on_round(self)
        while self.state.round_index < self.end:
            self._mix_finally()
        self.trainer.finish(self._trained)
        self.waits_for = "its neighbours to end"
        self._leave()
        self.waits_for = ""

    def _has_steps(self) -> bool:
        """Return whether steps are left to take."""
        return self.state.round_index < self.rounds

    @property
    def _trained(self) -> State:
        """Return the state as of the last round, where it is beyond: final mixing takes no steps."""
        return replace(self.state, round_index=min(self.state.round_index, self.rounds))

    def _mix_finally(self) -> None:
        """Perform a round of final mixing."""
        self.state.at = self.timetable.final_at
        self.state.waiting = True
        self.distances = {}
        self._exchange(self.timetable.final_exchange)
        self.state.at = 0
        self.state.round_index = self.state.round_index + 1

    @staticmethod
    def _more_final_rounds(final: int) -> int:
        """Return how many rounds of final mixing may follow where the models do not agree yet."""
        return 0

    def _measure(self, received: Mapping[int, Mapping[str, Tensor]], own: Tensor | None = None) -> None:
        """Measure in final mixing how far the models of some neighbours are from this peer's.

        `received` are their rows or shares, decoded, and `own` is this peer's model when they came, by default its
        state's.
        """
        if own is None:
            own = self._model({name: self.state.rows[name][0] for name in self.timetable.final_exchange.names})
        for neighbor, values in received.items():
            theirs = self._model(values)
            largest = max(float(own.norm()), float(theirs.norm()))
            distance = float((own - theirs).norm()) / largest if largest > 0 else 0.0
            self.distances[neighbor] = distance if math.isfinite(distance) else 2.0  # at most; too large to add

    def _model(self, values: Mapping[str, Tensor]) -> Tensor:
        name = self.timetable.final_exchange.names[0]
        weight = values.get(name.removesuffix("x") + "w")
        return values[name] if weight is None else values[name] / weight

    def shortcoming(self) -> str | None:
        """Return in words why this peer's model, at the end, is not the one that its neighbours have; None if it is."""
        if self.state.round_index < self.end or not self.final:
            return None
        byzantine = 0 if self.network.robust is None else self.network.robust.byzantine
        farthest = sorted(self.distances, key=lambda j: -self.distances[j])[byzantine:]  # who lies has any model
        if not farthest or (distance := self.distances[farthest[0]]) <= APART:
            return None
        return (
            f"after {self.final} rounds of final mixing its model is {distance:.1%} from that of peer {farthest[0]}; "
            "raise network.final_mixing, or take a graph with more edges"
        )

    def _await_witness(self) -> None:
        """Wait until neighbours have reported what they have seen of the ledger, before a step is taken.

        After REPORT_SECONDS one is enough, or after network.start where noise is shared with all of them.
        """
        patience = min(REPORT_SECONDS, self.network.start)
        if self.trainer.pair_secrets and (self.network.mode == "synchronous" or self.state.round_index == 0):
            patience = self.network.start  # noise that is shared with fewer neighbours does not cancel
        self._await_reports(patience, self.connections.wait)

    def _await_reports(self, patience: float, wait: Callable[[Callable[[], bool], float], bool]) -> None:
        """Wait until all neighbours have reported; after `patience` seconds one is enough."""
        since = time.monotonic()
        witness = self.witness
        self.waits_for = "its neighbours' reports on its ledger"
        while not wait(lambda: all(map(witness.has_heard, witness.neighbors)), POLL):
            self._check_stopped()
            waited = time.monotonic() - since
            if witness.is_witnessed and waited > patience:
                break
            if waited > self.network.give_up_seconds and not witness.is_witnessed:
                why = "; ".join(self.connections.why(peer) for peer in sorted(witness.neighbors))
                raise RunError(
                    f"no neighbour reported for {self.network.give_up:g} s what it has seen of this peer's ledger "
                    f"({why}), and no step is taken before; start one of them, or raise network.give_up, or leave it "
                    "out",
                    code="network.no-witness",
                )
        self.waits_for = ""

    def charge_witnessed(self) -> int:
        """Charge the lines that the ledger lacks and neighbours have seen, in place of `run`; return how many.

        Waits until all neighbours have reported; after network.start seconds one is enough.

        Raises:
            RunError: no neighbour reports within network.give_up.
            StoppedError: `stop` was called.
        """
        with self.connections.changed:  # which `connections.wait` would leave by the error that is mended here
            self._await_reports(self.network.start, self.connections.changed.wait_for)
        return self.trainer.charge_witnessed(self.witness.reported)

    @abstractmethod
    def _begin(self) -> None:
        """Prepare what is sent first, before any neighbour calls."""

    def _meet(self) -> None:  # noqa: B027
        """Wait for the neighbours before the first step, where the first exchange does not."""

    def _before(self, round_index: int) -> None:  # noqa: B027
        """Make sure that a round's steps can be taken, where that is not certain."""

    @abstractmethod
    def _exchange(self, exchange: Exchange) -> None:
        """Perform an exchange, with its place in the program."""

    @abstractmethod
    def _leave(self) -> None:
        """Give the neighbours what they need, after the last round."""

    @abstractmethod
    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and nothing is left to send to it."""

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"the same command continues from {self.device.folder}", code="peer.stopped")

    def stop(self) -> None:
        """End the run at the next wait, with its state on disk."""
        self._stopped.set()

    def close(self) -> None:
        """Release the network, the ledger and the folder."""
        self.connections.close()
        self.trainer.close()
        self._counts.close()
        self._log.close()
        self._lock.release()

    # --- rows on the wire ---

    def _formats(self, exchange: Exchange) -> RowFormats:
        """Return how the rows of an exchange look on the wire."""
        rows = {name: self.state.rows[exchange.shaped(name)][0] for name in exchange.names}
        return formats_of({name: self.arithmetic.encode(row) for name, row in rows.items()})

    def _clipped(self, received: Mapping[Link, Payload]) -> Mapping[Link, Payload]:
        """Return the rows of an exchange's senders, those of the farthest clipped; see ClippedSection."""
        if self.network.robust is None or not received:
            return received
        clipped: dict[Link, dict[str, Tensor]] = {link: {} for link in received}
        for name in next(iter(received.values())):
            own = self.state.rows[name][0]
            apart = {link: values[name].double() - own.double() for link, values in received.items()}
            distances = {link: float(difference.norm()) for link, difference in apart.items()}
            nearest = sorted(distances.values(), reverse=True)[self.network.robust.byzantine :]
            limit = nearest[0] if nearest else 0.0
            for link, distance in distances.items():
                near = received[link][name] if distance <= limit else (own + apart[link] * (limit / distance)).to(own)
                clipped[link][name] = near
        return dict(clipped)

    def _decoded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows that were received, on this peer's device."""
        if self.arithmetic.is_exact:
            device = self.trainer.device
            return {name: value if value.device == device else value.to(device) for name, value in values.items()}
        return {name: self.arithmetic.decode(value, self.state.rows[name][0]) for name, value in values.items()}

    # --- what others and its owner see ---

    def waiting(self) -> str:
        """Return in words what this peer waits for, and why it lacks which neighbours; empty where for nothing."""
        if not self.waits_for:
            return ""
        unheard, trouble = self.status_of_neighbors()
        missing = [self.connections.why(peer) for peer in sorted({*unheard, *trouble})]
        return f"peer {self.device.peer} waits for {self.waits_for}" + f" ({'; '.join(missing)})" * bool(missing)

    def status_of_neighbors(self) -> tuple[list[int], dict[int, str]]:
        """Return which neighbours have not reported since this start, and why others cannot be reached."""
        neighbors = [one for one in self.timetable.neighbours(self.device.peer) if not self._is_over(one)]
        trouble = {one: why for one, why in sorted(self.connections.trouble.items()) if one in neighbors}
        return [one for one in neighbors if not self.witness.has_heard(one)], trouble

    def status(self) -> dict[str, Any]:
        """Return the status: round, loss, ε, neighbours, which of them are down and why or not yet heard, bytes.

        The loss is of its model on public test examples at the last evaluation; None before one, or where it is not
        finite.
        """
        scenario = self.trainer.scenario
        connections = self.connections
        unheard, trouble = self.status_of_neighbors()
        return {
            "name": scenario.name,
            "peer": self.device.peer,
            "round": min(self.state.round_index, self.rounds),
            "rounds": self.rounds,
            "waits_for": self.waits_for,
            "neighbours": self.timetable.neighbours(self.device.peer),
            "down": {str(peer): why for peer, why in trouble.items()},
            "unheard": unheard,
            "quarantined": {str(peer): why for peer, why in connections.session.quarantined.items()},
            "bytes_sent": connections.bytes_sent,
            "bytes_received": connections.bytes_received,
            **self.trainer.status(self._trained),
        }


SECRET_BYTES = 32
INSECURE = "INSECURE: noise and batches follow from the scenario's seed; for tests alone"


class Trainer(Protocol):
    """What a running peer needs of what it trains.

    The peer calls `open` once, then for each round `advance` until that returns None, performing the exchanges between,
    and `close` at the end. It writes the state, `run` and what `reserve` returns into its checkpoints.

    Attributes:
        scenario: name, number of peers, rounds, network, evaluation and threads, on which all peers agree.
        algorithm: the program, whose exchanges the peer performs; its steps are called by `advance` alone.
        mixing: the graph and its weights.
        run: names the run in checkpoints.
        device: where the rows are.
        constants: a hash of the parts of the model that are not trained; "" where it has none, or they are not known.
        witnessed_ledger: that neighbours see; None where there is none, or noise follows from a seed.
        pair_secrets: with neighbours, whose reports carry the keys; None where noise does not cancel between peers.
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
    def witnessed_ledger(self) -> Ledger | None: ...

    def reserve(self) -> tuple[int, Head | None]:
        """Return for how many steps the ledger has paid, and its head; 0 and None where there is none.

        It may then begin to put the next private step's charge on disk; the step waits for it.
        """

    @property
    def pair_secrets(self) -> AgreedSecrets | None: ...

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        """Charge the lines that the ledger lacks, see `Ledger.lacks`, and return how many there are."""

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
        """Return `loss` (None where there is none), `epsilon`, `budget` and `noise`, and anything more to report.

        Where noise cancels between peers, `epsilon` is against as many colluders as the scenario names, and
        `epsilon_if_all_collude` against all other peers.
        """

    def finish(self, state: State) -> None:
        """Save the model after final mixing, and leave it where the scenario allows others to read it."""

    def close(self) -> None:
        """Close the ledger; a second time does nothing."""


class ScenarioTrainer:
    """What a scenario trains: its algorithm on this peer's examples; see Trainer.

    Args:
        scenario: the run's.
        peer: its number.
        folder: the peer's own.
        data: its own data, taken whole, in place of its part of the scenario's `data.root`.
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
        self._peer = peer
        self._folder = folder
        self._insecure = insecure_seeds
        if insecure_seeds and scenario.compute.generator == "system":
            raise ScenarioError(
                "--insecure-seeds draws from the scenario's seed, and compute.generator=system does not: leave one out",
                code="peer.insecure-system",
            )
        # Drawn here and written by `open`, for all of the scenario is checked before anything is on disk.
        self._secret = None if insecure_seeds else _drawn_secret(folder)
        own = OwnParts.of(agreement, np.array([peer]), self._secret, data, "network", whole=data is not None)
        self.experiment = Experiment.joined(agreement, own)
        self.run = self.experiment.own.run
        self.device = self.experiment.device
        self.constants = agreement.constants
        self._ledger_folder = ledger_folder(scenario, folder)
        self.pair_secrets = None
        if len(secret_pairs(scenario)):
            self.pair_secrets = AgreedSecrets([peer], pair_run(self.experiment), identities(scenario))
        root = scenario.data.root if data is None else data
        self._held = -1
        is_own = data is not None or scenario.data.each_its_own
        is_private = scenario.private is not None and is_own and not insecure_seeds
        self._data = Path(root.replace(PEER, str(peer))) if root is not None and is_private else None
        self._loss: float | None = None

    @property
    def witnessed_ledger(self) -> CohortLedger | None:
        return None if self._insecure else self.cohort.ledger

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

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer; locks the peer's data file, whose examples another peer's ledger would count alone."""
        if self._secret is not None:
            _keep_secret(self._folder, self._secret)
        self.cohort = self.experiment.cohort(self._ledger_folder, start=paid)
        if self.pair_secrets is not None:
            self.cohort.secrets = self.pair_secrets
        try:
            self._held = -1 if self._data is None else _hold(self._data)
            if state is None:
                check_budget(self.cohort, self._ledger_folder)
                return self.experiment.initial_state(self.cohort)
            if self.cohort.ledger is not None:
                self.cohort.ledger.check_head(head)
            return state
        except BaseException:
            self.close()
            raise

    def use_mixing(self, mixing: Mixing) -> None:
        self.cohort.mixing = mixing

    def advance(self, state: State) -> Exchange | None:
        return advance(self.algorithm, self.cohort, state)

    def is_active(self, round_index: int) -> bool:
        return bool(self.cohort.active(round_index).any())

    def evaluate(self, state: State) -> None:
        """See Trainer.

        Privacy: the loss that the status reports is of public test examples, and of rows that others may see; a loss of
        its own examples would be a release.
        """
        self._hand_in(state, rows_path(self._folder, state.round_index))

    def _hand_in(self, state: State, path: Path) -> None:
        """Leave the device's model in its folder, and the rows to be handed in where the scenario allows it."""
        rows = {name: state.rows[name] for name in self.algorithm.open_rows}
        self._loss = public_losses(self.experiment, rows)[0]
        model = self.algorithm.models(rows)[0]
        if bool(model.isfinite().all()):  # else the last one stays
            write_atomically(self._folder / MODEL, save(state_dict_of(self.experiment, model)))
        if self.scenario.network.hands_in:
            facts = asdict(Spent.of(self.cohort, state.round_index)) | {"noise": self.experiment.own.source}
            content = save({name: row.cpu().contiguous() for name, row in rows.items()}, {"privdec": json.dumps(facts)})
            write_atomically(path, content)

    def status(self, state: State) -> dict[str, Any]:
        """See Trainer; the steps of a round that is not over yet are counted."""
        private = self.scenario.private
        protection = self.cohort.protection
        pairs = None if protection is None else protection.pairs
        budget = None if private is None else private.epsilon
        return {
            "loss": self._loss,
            "epsilon": json_number(self._epsilon(state)),
            "epsilon_if_all_collude": None if pairs is None else json_number(self._epsilon(state, EVERYBODY)),
            "colluding": None if pairs is None else pairs.colluding,
            "budget": budget[self._peer] if isinstance(budget, tuple) else budget,
            "noise": INSECURE if self._insecure else NOISE[self.experiment.own.source],
        }

    def _epsilon(self, state: State, adversary: Adversary | None = None) -> float:
        """Return the peer's ε so far, with all that is charged of a round that is not over yet."""
        ledger = self.cohort.ledger
        if ledger is None:
            return epsilons(self.cohort, state.round_index, adversary)[0]
        steps = max(ledger.charged, state.round_index * self.cohort.steps_per_round)
        return float(ledger.spending.epsilons(steps, adversary)[0])

    def finish(self, state: State) -> None:
        self._hand_in(state, rows_path(self._folder, None))

    def close(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        if self.cohort.ledger is not None:
            self.cohort.ledger.close()


def network_mixing(agreement: Agreement) -> Mixing:
    """Return the mixing of an agreement, for a network of peers.

    Raises:
        ScenarioError: the algorithm exchanges nothing, or averages at a server, which a network of peers does not have;
            its shares or its pairs' noise need peers that wait for each other; or peers that are no neighbours would
            share a secret.
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
    check_one_stage(agreement.scenario, "each peer of a network has planned, and noted, its own noise")
    if mixing is None:
        raise ScenarioError(
            f"algorithm.name={agreement.algorithm.name} exchanges nothing, so there is no network: use `privdec run`",
            code="network.no-exchange",
        )
    if agreement.scenario.topology.name == "server":
        raise ScenarioError(
            "topology.name='server' averages at a server, and a network has only peers: use complete, the graph in "
            "which all peers are neighbours, or, for scaffold, which has no other graph, run it by `privdec run`",
            code="network.server",
        )
    exchanges = sum(isinstance(item, Exchange) for item in agreement.algorithm.program)
    if agreement.scenario.network.mode == "asynchronous" and mixing.sends_shares and exchanges > 1:
        raise ScenarioError(
            f"algorithm.name={agreement.algorithm.name} sends push-sum shares {exchanges} times a round "
            f"(topology.mixing_steps={agreement.algorithm.mixing_steps}), and network.mode=asynchronous counts them "
            "once a round: use network.mode synchronous, or one mixing step",
            code="network.shares-a-round",
        )
    _check_pairs(agreement.scenario, mixing)
    return mixing


def _check_pairs(scenario: Scenario, mixing: Mixing) -> None:
    """Refuse pairs of peers that cannot agree on a secret, and exchanges in which late noise would never cancel."""
    pairs = secret_pairs(scenario)
    name = scenario.topology.name
    where = "privacy.noise.secrets"
    edges = set(map(tuple, np.sort(mixing.topology.support(), axis=1).tolist()))
    for one, other in (pair for pair in pairs.tolist() if tuple(pair) not in edges):
        raise ScenarioError(
            f"{where}: peers {one} and {other} would share a secret, and peers of a network agree on secrets with "
            f"their neighbours alone: set {where}={name}, or topology.name=complete",
            code="noise.cancelling-neighbours",
        )
    if len(pairs) and scenario.network.mode == "asynchronous" and not mixing.sends_shares:
        raise ScenarioError(
            "privacy.noise.kind=cancelling with network.mode=asynchronous needs exchanges that conserve the sum when "
            f"peers are late, and those of algorithm.name={scenario.algorithm.name} do not: use network.mode "
            "synchronous, or an algorithm of push-sum, such as privsgp",
            code="noise.cancelling-late",
        )


def _hold(data: Path) -> int:
    """Lock a peer's own data file against other peers of this machine; return its descriptor, -1 where none can be."""
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
