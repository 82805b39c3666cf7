"""One peer of a run: its rounds, from the last checkpoint or the beginning to final mixing and the end.

`RunningPeer.program` is the whole run as a generator (see `driving.py`):

    meet the neighbours, and hear what they have seen of the ledger
    while rounds are left:
        wait until a step may be taken          `_before`
        take the round's steps                  Work "train", paid for on disk before an example is read
        exchange                                `_exchange`: commit, send, wait, mix
    rounds of final mixing, without steps       `_mix_finally`
    stay until the neighbours have all that they need   `_leave`

`AsynchronousPeer` and `SynchronousPeer` say how it meets, waits, exchanges and leaves.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flower_privdec.common.deferred import is_small, torch
from flower_privdec.common.errors import (
    BudgetError,
    MembersChangedError,
    RunError,
    ScenarioError,
    StandstillError,
    StoppedError,
)
from flower_privdec.core import Exchange, State, is_step_next
from flower_privdec.core.robust_mix import DOUBTED, HEARD, TABLE, RobustMix, doubted, is_weight
from flower_privdec.experiment.agreement import build_arithmetic
from flower_privdec.experiment.checkpoint import Checkpoint, check_run, check_state
from flower_privdec.experiment.recorder import evaluation_rounds
from flower_privdec.peer.driving import Pause, Program, Wait, Work
from flower_privdec.peer.member_graph import MemberGraph
from flower_privdec.peer.neighbour import NOWHERE, Neighbour
from flower_privdec.peer.new_data import check_rows, is_of_other_data
from flower_privdec.peer.session import Session
from flower_privdec.peer.store import FolderStore, Store
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import Trainer
from flower_privdec.pushsum.frames import (
    REPORT,
    Check,
    RowFormats,
    TensorArithmetic,
    codec_text,
    formats_of,
    wire_codec,
)
from flower_privdec.pushsum.lockstep import Timetable, final_rounds
from flower_privdec.pushsum.membership import SHUT_OUT, MemberList, MemberNews
from flower_privdec.pushsum.roster import Roster, Signatures
from flower_privdec.pushsum.witness import LedgerWitness, draw_boot
from flower_privdec.scenario import Scenario, numbers_hash, scenario_hash, to_yaml
from flower_privdec.scenario.sections import AppScenario

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

AGREE = 0.005  # of the norm: models as near need no more mixing
APART = 0.03  # of the norm: models as far apart at the end do not agree
FARTHEST = 2.0  # of the norm: two models cannot be farther apart, unless a distance was too large to add
MEASURED = 128  # exchanges of a random graph, in which the least weight of a peer is computed
STEPS_LONG = 20.0  # of its own longest steps, in which a run stands still, at least, until a peer ends
LOOKS = 2.0  # seconds between two looks at whether the run stands still, at most
CHANGED = "peer.members-changed"
ROUNDS = "rounds"  # in a checkpoint: how many the run had then, if that was changed
REPORT_SECONDS = 2.0  # for all neighbours to report, once one has
OnRound = Callable[["RunningPeer"], None]


@dataclass(frozen=True)
class PeerPlace:
    """Where a peer is.

    Attributes:
        peer: which one it is.
        folder: its own, for checkpoints, ledger, secret and model.
        data: its own data, taken whole, in place of its part of the scenario's `data.root`; None if there are none.
        insecure_seeds: whether noise and batches are drawn from the scenario's seed, as in a simulation, for tests.
        witnessed: the file of what it has counted of its neighbours' ledgers; None for one in its folder.
        times: how long it waits; None for the times of its scenario's network.
        draw: returns a random number from 1 to 2^64 - 1, for the names of processes and their challenges.
        signatures: of its identity, by which others know its session key; None if it has none.
        members: the list of members; None if the peers never change.
        graph: over those who take part; None for that of the trainer, whoever joins or leaves.
        stays: kinds of changes that the run cannot follow, each with the reason.
        new_data: whether its owner says that the peer goes on with other data than its folder's checkpoint is of.
    """

    peer: int
    folder: Path
    data: str | None = field(default=None, kw_only=True)
    insecure_seeds: bool = field(default=False, kw_only=True)
    witnessed: Path | None = field(default=None, kw_only=True)
    times: Times | None = field(default=None, kw_only=True)
    draw: Callable[[], int] = field(default=draw_boot, kw_only=True)
    signatures: Signatures | None = field(default=None, kw_only=True)
    members: MemberList | None = field(default=None, kw_only=True)
    graph: MemberGraph | None = field(default=None, kw_only=True)
    stays: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    new_data: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class RunPlan:
    """What every peer of a run computes alike before it begins; peers of one process may share it.

    Attributes:
        final: rounds of final mixing, if they suffice.
        timetable: with further rounds of final mixing, if they do not.
        digest, run_id: name the run in checkpoints, and in frames.
    """

    final: int
    timetable: Timetable
    digest: str
    run_id: bytes

    @classmethod
    def of(
        cls, trainer: Trainer, further: Callable[[int], int], hosted: int = 1, graph: MemberGraph | None = None
    ) -> RunPlan:
        """Return the plan of a trainer's run.

        Args:
            further: returns how many rounds of final mixing may follow, see `RunningPeer.more_final_rounds`.
            hosted: how many peers share it.
            graph: over the members, if they changed.
        """
        scenario: Scenario | AppScenario = trainer.scenario
        first = trainer.mixing
        mixing = first
        among = first
        rounds = scenario.rounds
        if graph is not None:
            scenario = graph.scenario
            rounds = graph.rounds[-1]
            first = graph.first
            mixing = graph.mixing
            among = graph.among
        network = scenario.network
        arithmetic = TensorArithmetic(wire_codec(network.codec))
        final, _ = final_rounds(among, rounds, network.final_mixing, arithmetic.damping)
        final_at_first, _ = final_rounds(first, scenario.rounds, network.final_mixing, arithmetic.damping)
        more = 0
        if network.final_mixing == "auto":
            more = further(final)
        timetable = Timetable(trainer.algorithm, mixing, rounds, final + more, hosted)

        # It is named by the first rounds and graph: whoever has not heard of a change is understood all the same.
        # Peers that would send each other other numbers have other names for the run, and refuse each other's frames.
        codec = "" if arithmetic.is_exact else f", {codec_text(network.codec)}"
        codec += f", {final_at_first} rounds of final mixing"
        codec += f", constants {trainer.constants}" if trainer.constants else ""
        return cls(final, timetable, scenario_hash(scenario) + codec, (numbers_hash(scenario) + codec).encode())

    @cached_property
    def least_weights(self) -> Tensor:
        """Return the least push-sum weight of each peer if all were as fast and no weight were lost, [n_peers]."""
        mixing = self.timetable.mixing
        weights = torch.ones(mixing.n_peers, 1, dtype=torch.float64)
        least = weights
        for place in range(min(self.timetable.rounds * mixing.steps, MEASURED)):
            weights = mixing.matrix(place).apply(weights)
            least = torch.minimum(least, weights)
        return least[:, 0]


class RunningPeer(ABC):
    """One peer of a run, from the last checkpoint of its store, or its beginning, to the end of the rounds.

    Before it sends anything, all that it needs to send it again is in its store; however its process ends, it
    continues from there, and its neighbours with it. A driver calls `begin` once, `on_tick` whenever something came or
    the moment of a wait has come, and `close` at the end.

    Args:
        trainer: what it trains.
        device: where it is.
        store: what it keeps; by default its folder.
        plan: of the run, if peers of this process share one.

    Attributes:
        generations: how many checkpoints it needs.
        times: how long it waits.
        now: the driver's clock at the last call, in seconds.
        final: rounds of final mixing, if they suffice.
        end: the round after the last that final mixing can take; a peer that is there is done.
        waits_for: what a peer waits for before its next step, or its end; empty if it waits for nothing.
        is_stopping: whether the run is to end at the next wait, with its state in the store.
        is_outdated: whether the members changed, so that it has to be started again with another graph.
        others: the neighbours, and those that it had before the members changed.
        diagnose: says why a neighbour that gave trouble cannot be reached; a driver may know better.
        on_round: called after every round with this peer, whose `status` computes ε when it is requested.
        conversation: the session that the driver carries: the peer's own, or one of reports only.

    Raises:
        ScenarioError: the store holds another run, or the network cannot carry the algorithm.
        BudgetError: the ledger cannot be trusted, is in use, or allows no step.

    Privacy: that of its trainer; what it sends beside are counters.
    """

    generations: ClassVar[int]

    def __init__(
        self, trainer: Trainer, device: PeerPlace, store: Store | None = None, plan: RunPlan | None = None
    ) -> None:
        scenario = trainer.scenario
        self.trainer = trainer
        self.device = device
        self.rounds = scenario.rounds
        self.ends: tuple[int, ...] = ()  # rounds that were the last, before the run had more
        if device.graph is not None:
            self.rounds = device.graph.rounds[-1]
            self.ends = device.graph.rounds[:-1]
        self.network = scenario.network
        self.times = device.times or Times.of(scenario.network)
        self.mixing = trainer.mixing if device.graph is None else device.graph.mixing
        self.now = 0.0
        self._since: float | None = None  # when the driver first called
        self.waits_for = ""
        self.is_stopping = False
        self.is_outdated = False
        self._named = set[int]()  # neighbours that stood out, and were logged
        self.diagnose: Callable[[int], str] = lambda peer: self.session.neighbours[peer].trouble
        self.on_round: OnRound | None = None
        self._program: Program[Any] | None = None
        self._pause: Pause | None = None
        self._result: Any = None
        self._got_to: Any = None  # in which rounds this peer and its neighbours are, when that last changed
        self._stood = 0.0  # seconds since, in which this process ran
        self._stood_until = 0.0
        self._longest_step = 0.0
        self._entries = 0  # of the list of members, that this peer has followed
        self.not_followed: dict[int, str] = {}  # entries that the run cannot follow, with the reason

        if device.graph is None or (device.graph.mixing is device.graph.first and not self.ends):
            self.plan = plan or RunPlan.of(trainer, self.more_final_rounds)
        else:
            self.plan = RunPlan.of(trainer, self.more_final_rounds, graph=device.graph)
        self.final = self.plan.final
        self.timetable = self.plan.timetable
        self.end = self.timetable.end
        self.arithmetic = build_arithmetic(scenario, trainer.algorithm, self.mixing)
        self._digest = self.plan.digest
        self._run_id = self.plan.run_id
        self._check_network()

        self.store = store or FolderStore(device.folder, self.generations, device.witnessed)
        self.store.open()
        try:
            self._open()
        except BaseException:
            self.store.close()
            raise

    def _check_network(self) -> None:
        """Refuse what the network cannot do with the algorithm."""
        if getattr(self.trainer.scenario, "attack", None) is not None:
            raise ScenarioError(
                "attack is for simulations of all peers in one process (privdec run, Flower's simulation): leave it "
                "out here; a rehearsal of a network has faults of kind lie",
                code="attack.apart",
            )
        if self.network.robust is not None and self.robust is None:
            raise ScenarioError(
                "network.robust judges the models of a scenario, and an app's peers have none that it knows: leave it "
                "out, or write the model as a scenario's",
                code="network.robust-app",
            )

    def _open(self) -> None:
        """Read the last checkpoint, open the ledger, and prepare the session."""
        trainer = self.trainer
        checkpoints = self._checkpoints()
        last = checkpoints[-1] if checkpoints else None
        if last is None:
            self.state = trainer.open(None, 0, None)
        else:
            self.state = trainer.open(last.state, last.transport["paid"], last.head)

        try:
            boot = self.device.draw()
            ledger = trainer.witnessed_ledger
            if ledger is not None:
                ledger.name_lines(boot)
            counted = self.store.counts.read({} if last is None else last.transport["witnessed"])
            self.others = self._others(last)
            self.witness = LedgerWitness(
                self.device.peer,
                self.others,
                boot,
                ledger,
                counted,
                self.store.counts.write,
                draw=self.device.draw,
            )
            self.session: Session = self._make_session(checkpoints)
            self.session.rest = self.times.rest
            self.conversation: Session = self.session
            self.roster = self._make_roster()
            if self.device.members is not None:
                self.session.hand_on(MemberNews(self.device.peer, self.device.members, self.times.retry))
                self.members_changed()
            self.store.name_scenario(lambda: to_yaml(trainer.scenario))
        except BaseException:
            trainer.close()
            raise

    def _others(self, last: Checkpoint | None) -> list[int]:
        """Return the neighbours in the graph, and those that were before the members changed: shares may be left."""
        others = {*self.timetable.neighbours(self.device.peer)}
        if last is not None and self.device.graph is not None:
            others |= {int(neighbor) for neighbor in last.transport.get("shares", {}).get("edges", {})}
        return sorted(others - {self.device.peer})

    def _make_roster(self) -> Roster | None:
        """Return the session keys of all peers, which the session passes on; None if no noise is shared."""
        device = self.device
        secrets = self.trainer.pair_secrets
        if secrets is None:
            return None
        if device.signatures is None:
            raise ScenarioError(
                "peers that share noise sign the keys for it, and this device has no certificate: give it credentials",
                code="noise.no-identity",
            )

        n_peers = self.trainer.scenario.n_peers
        roster = Roster(
            peer=device.peer,
            n_peers=n_peers,
            neighbours=self.witness.neighbors,
            run=self._run_id,
            secrets=secrets,
            signatures=device.signatures,
            last_round=self.end,
            round_index=self.state.round_index,
            again=self.times.retry,
            news=math.ceil(self._farthest() / len(self.timetable.exchanges)),
            plan=self.trainer.pair_plan,
            steps_per_round=self.trainer.algorithm.steps_per_round,
        )
        self.session.join(roster, n_peers)
        return roster

    def members_changed(self) -> None:
        """Go on with the list of members as it is now; a driver calls it whenever that has more entries."""
        members = self.device.members
        if members is None:
            return
        for entry in members.entries[self._entries :]:
            why = self.device.stays.get(entry.change["kind"])
            if why is not None:
                self.not_followed[entry.number] = f"entry {entry.number} ({entry.says()}) is not followed: {why}"
                _log.warning("the list of members: %s", self.not_followed[entry.number])
        self._entries = len(members.entries)

        graph = self.device.graph
        if graph is not None and not self.is_leaving:
            is_extended = "extend" not in self.device.stays
            has_more_rounds = is_extended and graph.rounds[1:] != members.members.rounds[1:]
            if has_more_rounds or graph.members != members.members.present:
                self.is_outdated = True
        for peer, why in members.members.revoked.items():
            if peer == self.device.peer:
                self.session.fatal = RunError(
                    f"{why}: this device takes no part any more; its ledger and its model stay where they are",
                    code=SHUT_OUT,
                )
            elif peer in self.neighbours and self.neighbours[peer].quarantined != why:
                self.session.shut_out(peer, why)
                _log.warning("peer %d is shut out: %s", peer, why)

    @property
    def is_leaving(self) -> bool:
        """Return whether the list of members says that this peer leaves for good."""
        return False

    def _part(self) -> Program[None]:
        """Hand over what this peer holds, and leave."""
        yield from ()

    def _unreachable(self) -> set[int]:
        """Return the neighbours that cannot be reached now, as far as it does not wait for them."""
        return set()

    def _farthest(self) -> int:
        """Return over how many neighbours news of the farthest peer comes."""
        others = self.timetable.neighbours
        here = [self.device.peer]
        seen = {*here}
        hops = 0
        while len(seen) < self.trainer.scenario.n_peers and here:
            here = sorted({j for peer in here for j in others(peer)} - seen)
            seen.update(here)
            hops += 1
        return hops

    @abstractmethod
    def _make_session(self, checkpoints: list[Checkpoint]) -> Session:
        """Return the session, continued from the checkpoints, the older first."""

    @property
    def neighbours(self) -> dict[int, Neighbour]:
        """Return what is known of each neighbour."""
        return self.session.neighbours

    # --- what is in the store ---

    def _checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none at the beginning of a run."""
        trainer = self.trainer
        checkpoints = self.store.checkpoints.read(trainer.device)
        for checkpoint in checkpoints:
            self._check_run(checkpoint)
            self._continue_after_the_end(checkpoint)
            check_state(self.store.path, checkpoint.state, np.array([self.device.peer]), self.end)
        return checkpoints

    def _check_run(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another run, or of other data unless the owner says that the data are new."""
        run = self.trainer.run
        is_other = is_of_other_data(checkpoint, run)
        if is_other and not self.device.new_data:
            raise ScenarioError(
                f"{self.store.path}: was made with other data; put them back, or say by --new-data that the change is "
                "meant: then both are charged to the same ledger",
                code="checkpoint.other-data",
            )

        if is_other:
            check_rows(self.store.path, checkpoint, self.trainer.algorithm.open_rows)
            checkpoint = replace(checkpoint, run=replace(checkpoint.run, id=run.id))
            _log.warning(
                "peer %d goes on with other data: its ledger charges each example for what was released with both",
                self.device.peer,
            )
        check_run(self.store.path, checkpoint, self._digest, run)

    def _continue_after_the_end(self, checkpoint: Checkpoint) -> None:
        """Set a state in or after the final mixing of a run that has more rounds now to the end of its rounds.

        Raises:
            ScenarioError: it is of more rounds than the list of members gives the run.
        """
        planned = checkpoint.transport.get(ROUNDS)
        if planned is None:
            planned = (*self.ends, self.rounds)[0]
        if planned not in (*self.ends, self.rounds):
            raise ScenarioError(
                f"{self.store.path}: is of a run with {planned} rounds, and by the list of members it has "
                f"{self.rounds}: put the newest copy of the list into the folder of certificates",
                code="checkpoint.rounds",
            )
        state = checkpoint.state
        if planned < self.rounds and state.round_index >= planned:
            state.round_index = planned
            state.at = 0
            state.waiting = False

    def _save(
        self, place: int, state: State, transport: Mapping[str, Any], carried: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put a state in the store, with what belongs to it; meanwhile the ledger reserves the next private step.

        `place` grows, and what is `carried` never changes; see Checkpoint.
        """
        trainer = self.trainer
        paid, head = trainer.reserve()
        facts = {**transport, "place": place, "paid": paid, "witnessed": self.store.counts.unsynced()}
        if self.ends:
            facts[ROUNDS] = self.rounds
        checkpoint = Checkpoint(state, self._digest, trainer.run, head=head, transport=facts, carried=carried or {})
        self.store.checkpoints.write(checkpoint)

    def _saving(
        self,
        place: int,
        state: State,
        transport: Mapping[str, Any] | None = None,
        carried: Mapping[str, Tensor] | None = None,
    ) -> Program[None]:
        """Do so as work, see `_save`."""
        yield Work("save", partial(self._save, place, state, transport or {}, carried))

    # --- for the driver ---

    def begin(self) -> None:
        """Take part in the run from the next tick on.

        No neighbour may be heard before the peer waits for the first time: what it greets them with is in its store
        only then.
        """
        self._start(self._taking_part())

    def begin_charging(self, only_confirmed: bool = False) -> None:
        """Charge what the ledger lacks and neighbours have seen, in place of taking part; `result` is how many lines.

        The peer sends only reports.

        Args:
            only_confirmed: raise BudgetError if too many of the lines may be a neighbour's lie.
        """
        full = self.session
        reports = Session(self.witness, full.frames, full.most - 1, full.cap - REPORT, full.last_round, full.retry)
        reports.neighbours = full.neighbours
        reports.rest = full.rest
        reports.news = full.news
        self.conversation = reports
        self.witness.is_charging = True
        self._start(self._charging(only_confirmed))

    def _start(self, program: Program[Any]) -> None:
        if self._program is not None:
            raise RuntimeError("a peer has one program: it runs already")
        self._program = program
        self._pause = None
        self.waits_for = "its neighbours"

    def on_tick(self, now: float) -> Pause | None:
        """Go on as far as it goes.

        Args:
            now: the driver's clock, which never goes back.

        Returns:
            The work to perform, or what the peer waits for; None at the end of its program.

        Raises:
            RunError: the run cannot continue, as the neighbours are.
            StoppedError: `stop` was called; the state is in the store.
        """
        self.now = now
        if self._since is None:
            self._since = now
        members = self.device.members
        if members is not None and len(members.entries) != self._entries:
            self.members_changed()
        while self._program is not None:
            pause = self._pause
            answer = None
            if isinstance(pause, Work):
                if not pause.is_done:
                    return pause
                answer = pause.result
            elif isinstance(pause, Wait):
                problem = self.conversation.problem
                if problem is not None and not pause.despite_problems:
                    raise problem
                answer = bool(pause.ready())
                if not answer and now < pause.until and not self.is_stopping:
                    return pause

            try:
                self._pause = self._program.send(answer)
            except StopIteration as end:
                self._program = None
                self._result = end.value
        return None

    @property
    def result(self) -> Any:
        """Return what the program returned at its end."""
        return self._result

    def stop(self) -> None:
        """End the run at the next wait, with its state in the store."""
        self.is_stopping = True

    def close(self) -> None:
        """Release the ledger and the store."""
        self.trainer.close()
        self.store.close()

    # --- a run ---

    def _taking_part(self) -> Program[None]:
        """Take part until the rounds are done and the neighbours have what they need."""
        evaluated = set(evaluation_rounds(self.rounds, self.trainer.scenario.evaluation.every))
        yield from self._begin()
        yield from self._meet()
        self.waits_for = ""
        if self._has_steps():
            yield from self._await_witness()

        while self.state.round_index < self.rounds:
            if self.state.at == 0:
                self.check_graph()
                if not self.is_leaving:
                    yield from self._before(self.state.round_index)
                self.check_graph()
                if self.is_leaving:
                    yield from self._part()
                    return
                if self.roster is not None:
                    self.roster.begin_round(self.state.round_index, self._unreachable())
            exchange = yield from self._advancing()
            if exchange is not None:
                yield from self._exchange(exchange)
                continue
            if self.state.round_index in evaluated:
                yield Work("evaluate", partial(self.trainer.evaluate, self.state))
            if self.on_round is not None:
                yield Work("report", partial(self.on_round, self))

        if self.roster is not None:
            self.roster.end_rounds(self.rounds)
        while self.state.round_index < self.end and not self.is_leaving:
            self.check_graph()
            yield from self._mix_finally()
        yield Work("finish", partial(self.trainer.finish, self._trained))

        self.waits_for = "its neighbours to end"
        yield from self._leave()
        self.waits_for = ""

    def _advancing(self) -> Program[Exchange | None]:
        """Take the steps up to the next exchange, or to the end of the round; without any it is no work."""
        if not is_step_next(self.trainer.algorithm, self.state):
            return self.trainer.advance(self.state)

        began = self.now
        exchange: Exchange | None = yield Work("train", partial(self.trainer.advance, self.state))
        self._longest_step = max(self._longest_step, self.now - began)
        return exchange

    def _has_steps(self) -> bool:
        """Return whether steps are left to take."""
        return self.state.round_index < self.rounds

    @property
    def _trained(self) -> State:
        """Return the state as of the last round, even if it is beyond: final mixing takes no steps."""
        return replace(self.state, round_index=min(self.state.round_index, self.rounds))

    @abstractmethod
    def _begin(self) -> Program[None]:
        """Prepare what is sent first, before any neighbour calls."""

    def _meet(self) -> Program[None]:
        """Wait for the neighbours before the first step, unless the first exchange does."""
        yield from ()

    def _before(self, round_index: int) -> Program[None]:
        """Make sure that a round's steps can be taken, unless that is certain."""
        yield from ()

    @abstractmethod
    def _exchange(self, exchange: Exchange) -> Program[None]:
        """Perform an exchange, with its place in the program."""

    @abstractmethod
    def _leave(self) -> Program[None]:
        """Give the neighbours what they need, after the last round."""

    @abstractmethod
    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and nothing is left to send to it."""

    def check_graph(self) -> None:
        """End where nothing is under way, if another graph is to be used, or if the run has more rounds.

        Raises:
            MembersChangedError: whoever runs this peer starts it again.
        """
        if self.is_outdated:
            raise MembersChangedError("the list of members changed: this peer begins again with it", code=CHANGED)

    def _check_stopped(self) -> None:
        if self.is_stopping:
            raise StoppedError(f"the same command continues from {self.device.folder}", code="peer.stopped")

    def check_standstill(self) -> None:
        """End if nothing that this peer waits for can be expected any more; to be called as long as it waits.

        That is so if neither it nor any neighbour came to another round for `times.standstill` seconds, and for 20
        times as long as its own steps take: others may be as slow.

        Raises:
            StandstillError: says for what it waits, and why it lacks which neighbours.
        """
        # A process that was stopped for a while, or whose clock jumped, has not waited all that time.
        seconds = min(self.now - self._stood_until, LOOKS)
        self._stood_until = self.now

        got_to = (self.state.round_index, self.state.at, *(one.round_index for one in self.neighbours.values()))
        if got_to != self._got_to:
            self._got_to = got_to
            self._stood = 0.0
            return
        self._stood += seconds
        patience = max(self.times.standstill, STEPS_LONG * self._longest_step)
        if self._stood > patience:
            raise StandstillError(
                f"nothing got on for {patience:g} s, in round {self.state.round_index} of {self.rounds}: "
                f"{self.waiting()}; all is on disk: start those that are missing, then run the same command again",
                code="network.standstill",
            )

    # --- what the neighbours have seen of the ledger ---

    def _await_witness(self) -> Program[None]:
        """Wait until neighbours have reported what they have seen of the ledger, before a step is taken.

        If noise is shared, wait also for the keys of all with whom it is. After REPORT_SECONDS, or after `times.start`
        if noise is shared, the report of one neighbour is enough.
        """
        patience = min(REPORT_SECONDS, self.times.start)
        begins_or_waits = self.network.mode == "synchronous" or self.state.round_index == 0
        if self.trainer.pair_secrets and begins_or_waits:
            patience = self.times.start  # noise that is shared with fewer peers hides less
        yield from self._await_reports(patience)

    def _await_reports(self, patience: float, despite_problems: bool = False) -> Program[None]:
        """Wait until all neighbours have reported; after `patience` seconds one is enough."""
        since = self.now
        witness = self.witness
        self.waits_for = "its neighbours' reports on its ledger"

        def all_reported() -> bool:
            is_settled = self.roster is None or despite_problems or self.roster.is_settled
            return is_settled and all(map(witness.has_heard, witness.neighbors))

        while not (yield Wait(all_reported, self.now + self.times.poll, despite_problems)):
            self._check_stopped()
            self.check_standstill()
            waited = self.now - since
            if witness.is_witnessed and waited > patience:
                break
            if waited > self.times.give_up and not witness.is_witnessed:
                why = "; ".join(self.why(peer) for peer in sorted(witness.neighbors))
                raise RunError(
                    f"no neighbour reported for {self.times.give_up:g} s what it has seen of this peer's ledger "
                    f"({why}), and no step is taken before; start one of them, then run the same "
                    "command again",
                    code="network.no-witness",
                )
        self.waits_for = ""

    def _charging(self, only_confirmed: bool) -> Program[int]:
        """Charge the lines that the ledger lacks and neighbours have seen; return how many.

        Waits until all neighbours have reported; after `times.start` seconds one is enough.
        """
        # What they report is the very problem that a peer would stop for.
        yield from self._await_reports(self.times.start, despite_problems=True)
        reported = self.witness.reported
        if not only_confirmed:
            return self.trainer.charge_witnessed(reported)

        # One more than may lie; if the scenario names no number of liars, one may.
        liars = 1
        if self.robust is not None and self.robust.rule is not None:
            liars = max(1, self.robust.rule.byzantine)
        confirmed = self.witness.confirmed(liars + 1)
        try:
            return self.trainer.charge_confirmed(confirmed, reported)
        except BudgetError as error:
            names = ", ".join(f"peer {j}" for j in self.witness.beyond(confirmed))
            raise BudgetError(f"by {names}: {error}", code=error.code) from error

    # --- neighbours that lie ---

    @cached_property
    def robust(self) -> RobustMix | None:
        """Return how the peer judges what its neighbours send; None if it takes them as they are."""
        mixes = [one for one in self.timetable.exchanges.values() if isinstance(one, RobustMix)]
        return mixes[0] if mixes else None

    def doubted(self) -> dict[int, str]:
        """Return which neighbours stood out in most exchanges, and in how many; log each once."""
        found = {}
        for j in doubted(self.state.edges):
            tables = [table for name, table in self.state.edges.items() if name.startswith(TABLE)]
            counts = [table.values[table.other == j][0, [HEARD, DOUBTED]].tolist() for table in tables]
            heard, doubts = max(counts, key=lambda count: count[1])
            found[j] = f"its model stood out in {doubts:.0f} of {heard:.0f} exchanges"

        for j, why in found.items():
            if j not in self._named:
                self._named.add(j)
                _log.warning("peer %s may lie, or its device is broken: %s; it counts no more than others", j, why)
        return found

    # --- final mixing ---

    def _mix_finally(self) -> Program[None]:
        """Perform a round of final mixing."""
        self.state.at = self.timetable.final_at
        self.state.waiting = True
        self._forget_distances()
        yield from self._exchange(self.timetable.final_exchange)
        self.state.at = 0
        self.state.round_index = self.state.round_index + 1

    @staticmethod
    def more_final_rounds(final: int) -> int:
        """Return how many rounds of final mixing may follow if the models do not agree yet."""
        return 0

    @property
    def distances(self) -> dict[int, float]:
        """Return how far each neighbour's model was when it last came, of those that came; see Neighbour."""
        return {j: one.distance for j, one in self.neighbours.items() if one.distance is not None}

    def _forget_distances(self) -> None:
        for one in self.neighbours.values():
            one.distance = None

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
            self.neighbours[neighbor].distance = distance if math.isfinite(distance) else FARTHEST

    def _model(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return x, or x / w of push-sum, [d]."""
        name = self.timetable.final_exchange.names[0]
        weight = values.get(name.removesuffix("x") + "w")
        return values[name] if weight is None else values[name] / weight

    def shortcoming(self) -> str | None:
        """Return in words why this peer's model, at the end, is not the one that its neighbours have; None if it is."""
        if self.state.round_index < self.end or not self.final:
            return None
        distances = self.distances
        liars = 0
        if self.robust is not None and self.robust.rule is not None:
            liars = self.robust.rule.byzantine  # who lies has any model
        farthest = sorted(distances, key=lambda j: -distances[j])[liars:]
        if not farthest or distances[farthest[0]] <= APART:
            return None
        return (
            f"after {self.final} rounds of final mixing its model is {distances[farthest[0]]:.1%} from that of peer "
            f"{farthest[0]}; raise network.final_mixing, or take a graph with more edges"
        )

    # --- rows on the wire ---

    def _formats(self, exchange: Exchange) -> RowFormats:
        """Return how the rows of an exchange look on the wire."""
        rows = {name: self.state.rows[exchange.shaped(name)][0] for name in exchange.names}
        formats = formats_of({name: self.arithmetic.encode(row) for name, row in rows.items()})
        if self.robust is None:
            return formats
        return {name: replace(row, judged=not is_weight(name)) for name, row in formats.items()}

    def _check_of_rows(self) -> Check | None:
        """Return what refuses rows of any exchange that the wire codec encodes nothing as."""
        rows: dict[str, Tensor] = {}
        for exchange in (*self.timetable.exchanges.values(), self.timetable.final_exchange):
            rows |= {name: self.state.rows[exchange.shaped(name)][0] for name in exchange.names}
        return self.arithmetic.checks(rows)

    def _decoded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows that were received, on this peer's device."""
        if self.arithmetic.is_exact:
            device = self.trainer.device
            return {name: value if value.device == device else value.to(device) for name, value in values.items()}
        return {name: self.arithmetic.decode(value, self.state.rows[name][0]) for name, value in values.items()}

    # --- what others and its owner see ---

    def why(self, peer: int) -> str:
        """Return in words why nothing came from a neighbour."""
        known = self.neighbours[peer]
        if known.refused:
            return known.refused
        if known.trouble:
            return self.diagnose(peer)
        if self.witness.has_heard(peer):
            return f"peer {peer} is slow, or waits itself"
        return f"peer {peer} has not answered yet"

    def waiting(self) -> str:
        """Return in words what this peer waits for, and why it lacks which neighbours; empty if for nothing."""
        if not self.waits_for:
            return ""
        unheard, trouble = self.status_of_neighbors()
        missing = [self.why(peer) for peer in sorted({*unheard, *trouble})]
        because = f" ({'; '.join(missing)})" if missing else ""
        return f"peer {self.device.peer} waits for {self.waits_for}{because}"

    def status_of_neighbors(self) -> tuple[list[int], dict[int, str]]:
        """Return which neighbours have not reported since this start, and why others cannot be reached."""
        left = [one for one in self.neighbours.values() if not self._is_over(one.number)]
        trouble = {one.number: one.trouble for one in left if one.trouble}
        return [one.number for one in left if not self.witness.has_heard(one.number)], trouble

    def _status_of_members(self) -> dict[str, Any]:
        """Return how many entries the list of members has, if it has some, what is wrong with one, and which stay."""
        members = self.device.members
        if members is None or not (members.entries or members.problem):
            return {}
        not_followed = [why for _, why in sorted(self.not_followed.items())]
        return {"members": {"entries": len(members.entries), "problem": members.problem, "not_followed": not_followed}}

    def _quorum(self) -> int:
        """Return how many neighbours have to be there for it to take steps."""
        neighbours = len(self.neighbours)
        if self.network.mode == "synchronous":
            return neighbours
        return min(self.network.quorum, neighbours)

    def round_of(self, count: int) -> int:
        """Return the round in which a neighbour is that reports how far it is."""
        return count

    def _known(self, one: Neighbour, unheard: Collection[int]) -> dict[str, Any]:
        """Return what the status says of a neighbour."""
        its_round = NOWHERE
        if one.round_index != NOWHERE:
            its_round = self.round_of(one.round_index)

        awaited = False
        if self.waits_for.startswith("peer "):  # for that one
            awaited = self.waits_for.startswith(f"peer {one.number},")
        elif self.waits_for:
            awaited = its_round < self.state.round_index or bool(one.trouble) or one.number in unheard
        return {
            "round": None if its_round == NOWHERE else its_round,
            "answered": one.answered,
            "failed": one.failed,
            "awaited": awaited,
        }

    def status(self) -> dict[str, Any]:
        """Return the status: round, loss, ε, neighbours, which of them are down and why or not yet heard, bytes.

        Loss and figures are of its model on public test examples at the last evaluation; None before one, or if not
        finite. `seconds` is how long this process takes part, `quorum` how many neighbours it needs, and `known` what
        it knows of each: round, calls that were answered and that failed, and whether it waits and lacks that one.
        """
        unheard, trouble = self.status_of_neighbors()
        quarantined = {str(j): one.quarantined for j, one in self.neighbours.items() if one.quarantined}
        return {
            "name": self.trainer.scenario.name,
            "peer": self.device.peer,
            "small": is_small(),
            "round": min(self.state.round_index, self.rounds),
            "rounds": self.rounds,
            "waits_for": self.waits_for,
            "neighbours": self.timetable.neighbours(self.device.peer),
            "down": {str(peer): why for peer, why in trouble.items()},
            "unheard": unheard,
            "seconds": 0.0 if self._since is None else round(self.now - self._since, 1),
            "quorum": self._quorum(),
            "known": {str(j): self._known(one, unheard) for j, one in self.neighbours.items()},
            "quarantined": quarantined,
            **self._status_of_members(),
            "doubted": {str(j): why for j, why in self.doubted().items()},
            "bytes_sent": self.conversation.bytes_sent,
            "bytes_received": self.conversation.bytes_received,
            **({} if self.roster is None else self.roster.status()),
            **self.trainer.status(self._trained),
        }
