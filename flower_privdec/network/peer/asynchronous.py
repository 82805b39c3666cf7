"""A peer that does not wait for neighbours that are late: a slow or lost one costs its own edges alone.

Push-sum algorithms send shares that are added exactly once (`PushSumProtocol`), under any loss, repetition and kill.
All others send rows, of which a neighbour uses the newest it has, once; the weight of a neighbour that was not heard in
time returns to the peer itself for that round (`PartlyHeard`). `StragglerPolicy` decides which neighbours to wait for.

A peer takes a private step only while a quorum of its neighbours exchange with it, while it is not too far ahead of
the slowest of those that are up, and while its push-sum weight is not so small that the step would be too long. Else it
waits; meanwhile it acknowledges, relays, and mixes without a step every `network.retry` seconds, so that two peers that
can reach each other never wait for each other for ever. After the last round it mixes without steps, in rounds in which
it waits for its neighbours, until its model agrees with theirs in all rounds of a period of the graph.

A peer that has nothing of a run that others have begun without it joins them as they are: with the rows of the first
neighbour that sends some, and in push-sum with the model of its first share and the weight of a peer that begins, as
`PushSumProtocol.absorb` explains. A peer whose checkpoint is an old copy learns it from its neighbours, and is reset so
too.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from flower_privdec.common.errors import NotAgreedError, RunError, ScenarioError
from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.common.formatting import one_line
from flower_privdec.core import Exchange, Mix, Reply, State
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.graph.mixing import PartlyHeard
from flower_privdec.network.peer.connections import Messages, Session
from flower_privdec.network.peer.pace import Pace, Want, WeightFloor
from flower_privdec.network.peer.peer import AGREE, POLL, RunningPeer
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.pushsum.exactly_once import (
    FIRST,
    Acknowledgement,
    FrozenShare,
    Hello,
    PushSumProtocol,
    RefusedError,
    StaleStateError,
)
from flower_privdec.pushsum.frames import (
    SMALL,
    FrameCodec,
    Message,
    RowMass,
    RowMessage,
    TensorArithmetic,
    frame_size,
    pack,
    unpack,
)
from flower_privdec.pushsum.lockstep import Turn
from flower_privdec.pushsum.witness import LedgerReport, LedgerWitness

_log = logging.getLogger(__name__)

SURPLUS = 2.0  # times the weight of all peers: no share has more
FAR = 1e6  # times the largest number of one's own model, and at least of 1: no neighbour's model has a larger one
MANY = 16  # frames in a call beside rows
LOST = 4  # calls in a row that do not reach a neighbour, until it counts as lost
MEASURED = 128  # rounds of a random graph, in which the least weight of a peer is computed
KEPT = 0.5  # of its weight: what a peer keeps where it mixes while it waits
SPAN = 16  # rounds of a random graph in which a peer exchanges with all of its quorum
PATIENCE = 3.0
STRIKES = 2
SEEN = 4
SLOWEST = 2.0
REMEMBERED = 32  # periods
GREETING_SECONDS = 2.0  # for the others, where they are known to be under way already


class StragglerPolicy:
    """Adaptive straggler timeout: which neighbours to wait for, and how long. Pure: timestamps are arguments.

    Peers that are equally fast do better when they wait a moment for each other: a round in which no neighbour is heard
    spends budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *on time*, PATIENCE
    times a period: its own work, from the end of an exchange to the end of the next without such waits, the median of
    the last ones, and the least that a message takes. A neighbour that has not come by then STRIKES times in a row is
    late, and is not waited for any more, and so is one that does not keep up: for its last SEEN rounds that became
    known it needed more than SLOWEST exchanges of this peer each. One that keeps up is waited for again. So a neighbour
    that is ten times slower, or stopped, costs a few periods at the beginning and then nothing, and one that was cut
    off for a while is soon waited for again. A peer goes at its own pace, also where all its neighbours are slower.

    Timestamps are seconds of any clock that never goes back.

    Args:
        first: seconds to wait as long as no period was measured.

    Attributes:
        on_time: the neighbours to wait for in the exchange under way.
    """

    def __init__(self, first: float) -> None:
        """Begin with no neighbour on time."""
        self.on_time: set[int] = set()
        self._first = first
        self._exchanges = 0
        self._strikes: Counter[int] = (
            Counter()
        )  # exchanges in a row in which a neighbour was waited for and had nothing
        self._rounds: dict[int, deque[tuple[int, int]]] = {}  # the last ones that became known, each with `_exchanges`
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._ended: float | None = None

    def start(self, now: float, neighbors: Iterable[int]) -> None:
        """Begin to work at a time, and to wait for some neighbours, which begin together."""
        self._ended = now
        self.on_time |= {*neighbors}

    @property
    def patience(self) -> float:
        """Return how long to wait in an exchange, seconds."""
        return PATIENCE * median(self._periods) if self._periods else self._first

    def begin(self, rounds: Mapping[int, int]) -> None:
        """Record the beginning of an exchange, and which neighbours keep up.

        Args:
            rounds: in which round each neighbour is, as far as is known.
        """
        self._exchanges += 1
        for neighbor, round_index in rounds.items():
            known = self._rounds.setdefault(neighbor, deque(maxlen=SEEN + 1))
            if known and round_index < known[-1][1]:
                known.clear()  # it was put back
            if not known or round_index > known[-1][1]:
                known.append((self._exchanges, round_index))
            if len(known) > SEEN:
                (began, first), (_, last) = known[0], known[-1]
                keeps_up = self._exchanges - began <= SLOWEST * (last - first)
                self.on_time = self.on_time | {neighbor} if keeps_up else self.on_time - {neighbor}

    def end(self, now: float, there: Collection[int], missing: Collection[int], waited: float, message: float) -> None:
        """Record the end of an exchange.

        Args:
            now: a timestamp.
            there: neighbours that had come.
            missing: those that had not; neighbours that had nothing to send are in neither.
            waited: seconds in it that were spent on waiting for others.
            message: seconds that a message takes to a neighbour, at least.
        """
        if self._ended is not None:
            self._periods.append(now - self._ended - waited + message)
        self._ended = now
        self.note(there, missing)

    def note(self, there: Collection[int], missing: Collection[int]) -> None:
        """Record which neighbours had come, and which had not."""
        self._strikes.update(self.on_time & {*missing})
        for neighbor in [j for j in missing if self._strikes[j] >= STRIKES]:
            self.on_time.discard(neighbor)
            self._rounds.pop(neighbor, None)
            self._strikes[neighbor] = 0
        for neighbor in there:
            self._strikes[neighbor] = 0


@dataclass
class SendQueue:
    """What is to be sent to one neighbour.

    Attributes:
        hello_at: when the next hello is due.
        hellos: that answer its own.
        acknowledgements: the last one, which acknowledges all shares before it too.
        share: the last that it was brought.
        rows: by exchange of the program, those that it was not brought yet.
        failures: how many calls in a row did not reach it.
    """

    hello_at: float = 0.0
    hellos: list[Hello] = field(default_factory=list)
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    share: FrozenShare[Tensor] | None = None
    rows: dict[int, RowMessage] = field(default_factory=dict)
    failures: int = 0


class AsynchronousSession(Session):
    """Hellos, shares that count once, and rows of which the newest counts.

    A hello is sent until an edge is open, and then every `retry` seconds, which also reports this peer's round.
    Shares and acknowledgements are sent once they follow from what is on disk, and a share again where the neighbour
    reports that it has not come. Rows of an exchange are replaced by newer ones until they are sent: a slow neighbour
    gets the newest alone.

    Args:
        protocol: this peer's shares; without mass where no push-sum is done, and then for its hellos alone.
        arithmetic: of the shares, which decodes them.
        witness, frames: see Session.
        replies: the exchanges in which a neighbour is answered, whose round the rows are then for.
        n_peers: of the run, which is the push-sum weight of all of them together; inf where no peer knows that.
        retry: seconds between two hellos.
        rounds: of the run.
        silent: neighbours that never send shares or rows to this peer.

    Attributes:
        rounds: the round of each neighbour as far as is known: that of the shares or rows that it sends next. A message
            that was under way for a while does not set it back, only a boot does: a hello of the last round may come
            before a share of an earlier one, and is the last message there is.
        boots: of the process of each neighbour that reported its round.
        reached: the round of each neighbour as far as it follows from what it exchanged: shares or rows, or where it
            sends none, the acknowledgement of a share.
        stepped: the round after that of the last rows of each neighbour's process, whose step is done.
        is_new: whether this peer has nothing of the run yet; then it joins late where a neighbour is under way.
        joins: whether it does.
        places: round and exchange of the last rows of each neighbour, but for replies.
        stale: why this peer must be reset, until it is.
        resumed_at: the round from which this process continues.
        ahead: the last round of which a neighbour reports that it had rows of this peer before; -1 where none does.
        steps: of this peer so far, which `met` refers to.
        met: in which of these steps each neighbour last exchanged with this peer: sent a share or rows, or took some.
        met_at: when that was, by the clock of `time.monotonic`.
        heard_at: when each neighbour last sent anything.
        informed: the last round of this peer that each neighbour is known to have heard of; -1 for none.
        want: what this peer lacks of push-sum weight while it waits, which its hellos report.
        level: how often its weight floor sank, which they report too.
        wants: what each neighbour lacks, as far as it reported since its last share.
        levels: of the weight floors of the neighbours, as far as they reported.
        queues: what is to be sent to each neighbour.
    """

    def __init__(
        self,
        protocol: PushSumProtocol[Tensor],
        arithmetic: TensorArithmetic,
        witness: LedgerWitness,
        frames: FrameCodec,
        replies: Collection[int],
        retry: float,
        rounds: int,
        n_peers: float,
        silent: Collection[int] = (),
    ) -> None:
        sizes = [frame_size(formats) for formats in (frames.shares or {}, *frames.exchanges.values())]
        super().__init__(witness, frames, MANY + len(sizes), sum(sizes) + MANY * SMALL, rounds)
        self.protocol = protocol
        self._arithmetic = arithmetic
        self._replies = replies
        self._retry = retry
        self._most_weight = SURPLUS * n_peers
        self.rounds: dict[int, int] = {}
        self.boots: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.stepped: dict[int, int] = {}
        self._silent = silent
        self.want, self._announced, self.wants = Want.UNKNOWN, Want.UNKNOWN, dict[int, int]()
        self.level, self.levels = 0, dict[int, int]()
        self.is_new = self.joins = False
        self.places: dict[int, tuple[int, int]] = {}
        self.stale: str | None = None
        self.resumed_at = 0
        self.ahead = -1
        self.steps = 0
        self.met: dict[int, int] = {}
        self.met_at: dict[int, float] = {}
        self.heard_at: dict[int, float] = {}
        self._checked: set[int] = set()  # neighbours whose first hello to this process was compared with its rows
        self.queues = {neighbor: SendQueue() for neighbor in witness.neighbors}
        self._answering: Counter[int] = Counter()  # the calls of each neighbour whose answer is held back
        self.informed = dict.fromkeys(witness.neighbors, -1)
        self._rows: dict[int, dict[int, RowMessage]] = {at: {} for at in frames.exchanges}

    # --- for the peer ---

    def committed(self, wanted: Collection[int]) -> None:
        """Send what follows from a commit.

        Args:
            wanted: neighbours that may wait for a share of this round: one that gets none is sent a hello.
        """
        for acknowledgement in self.protocol.acknowledgements():
            self.queues[acknowledgement.receiver].acknowledgements = [acknowledgement]
        due = {share.receiver for share in self.protocol.shares_to_send()}
        for neighbor in set(wanted) - due:
            self.queues[neighbor].hello_at = 0.0

    def senders(self, at: int, since: int = 0) -> set[int]:
        """Return whose rows of an exchange have come, of a round or a later one, and were not collected."""
        return {j for j, message in self._rows.get(at, {}).items() if message.round_index >= since}

    def collect(self, at: int, senders: Collection[int]) -> dict[int, RowMessage]:
        """Return the newest rows of an exchange from each of some neighbours, and forget them."""
        return {neighbor: self._rows[at].pop(neighbor) for neighbor in sorted(senders) if neighbor in self._rows[at]}

    def report(self, want: Want, level: int) -> None:
        """Report what this peer lacks: at once where one waits for weight, and else with the next hello."""
        self.want, self.level, self._announced = want, level, min(want, self._announced)
        if self.has_report():
            self._announced = want
            for queue in self.queues.values():
                queue.hello_at = 0.0

    def has_report(self) -> bool:
        """Return whether there is something to report at once."""
        return self.want > self._announced and Want.WAITS in (self.want, *self.wants.values())

    def is_informed(self, neighbor: int, round_index: int) -> bool:
        """Return whether nothing is left to send to a neighbour, which knows of a round."""
        queue = self.queues[neighbor]
        return not (queue.hellos or queue.acknowledgements) and self.informed[neighbor] >= round_index

    def is_lost(self, neighbor: int) -> bool:
        """Return whether a neighbour has not been reached for some calls; one that refuses them is there."""
        return self.queues[neighbor].failures >= LOST

    # --- see Session ---

    @property
    def round_index(self) -> int:
        return self.protocol.round_index

    def receive(self, caller: int, messages: Messages) -> Callable[[], Messages]:
        """See Session; the answer to a share acknowledges it, where that is on disk by then."""
        replies = self._received(caller, messages)
        held_back = not self.is_answered(caller, messages)
        self._answering[caller] += held_back

        def answer() -> Messages:
            self._answering[caller] -= held_back
            if not self.protocol.is_open(caller):
                return [*replies]
            queue = self.queues[caller]
            acknowledgements = queue.acknowledgements
            queue.acknowledgements = []
            return [*replies, *acknowledgements]

        return answer

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """See Session: the answer to a share that is held waits for the next commit, which acknowledges it."""
        held = caller in self.protocol.waiting_rounds() or caller in self.protocol.uncommitted()
        return not held or not any(isinstance(message, FrozenShare) for message in messages)

    def _received(self, caller: int, messages: Messages) -> list[Hello]:
        """Take messages in and return the hellos that answer them."""
        replies: list[Hello] = []
        if caller in self.quarantined:
            raise RefusedError(
                f"peer {self.peer} takes nothing from peer {caller} any more: {self.quarantined[caller]}",
                code="peer.quarantined",
            )
        self.heard_at[caller] = time.monotonic()
        for message in messages:
            if isinstance(message, Hello):
                reply = self._receive_hello(message)
                replies += [] if reply is None else [reply]
            elif isinstance(message, LedgerReport):
                if message.boot == self.boots.get(caller):
                    self.rounds[caller] = max(message.round_index, self.rounds[caller])
            elif isinstance(message, Acknowledgement):
                if self.protocol.acknowledge(message):
                    self._meet(caller)
                    if caller in self._silent:
                        self.reached[caller] = self.rounds.get(caller, 0)
            elif isinstance(message, FrozenShare):
                self._check_share(message)
                if self.protocol.receive(message):
                    self._meet(caller)
                    self.rounds[caller] = max(message.round_index + 1, self.rounds.get(caller, 0))
                    self.reached[caller] = self.rounds[caller]
                    self.wants.pop(caller, None)
            elif not isinstance(message, RowMessage) or not self.protocol.is_open(caller):
                raise RefusedError(
                    f"peer {caller} must greet peer {self.peer} first, which has started since", code="edge.closed"
                )
            else:
                self._rows[message.at][caller] = message
                self._meet(caller)
                if message.at not in self._replies:
                    self.rounds[caller] = max(message.round_index, self.rounds.get(caller, 0))
                    self.reached[caller] = self.rounds[caller]
                    self.stepped[caller] = message.round_index + 1
                    self.places[caller] = message.round_index, message.at
        return replies

    def _meet(self, neighbor: int) -> None:
        """Record that a neighbour exchanges with this peer, which is more than to greet it."""
        self.met[neighbor], self.met_at[neighbor] = self.steps, time.monotonic()

    def _check_share(self, share: FrozenShare[Tensor]) -> None:
        """Quarantine the sender of a share that no working device sends, which would replace each model it reaches.

        All weights together are the number of peers, and more where some lost their state or were restored from an old
        copy; numbers of examples have no bound. The model, x / w, has one that stops a device whose numbers broke, and
        not a careful liar.
        """
        mass = self.protocol.mass
        values = {name: self._arithmetic.decode(value, mass[name]) for name, value in share.values.items()}
        weight, own_weight = (float(rows["w"]) if "w" in rows else 1.0 for rows in (values, mass))
        if not (0 < weight <= self._most_weight and math.isfinite(weight)):
            why = f"it sent a share of weight {weight:g}, which must be above 0 and at most {self._most_weight:g}"
        else:
            names = [name for name in values if name != "w"]
            own = max(float(torch.linalg.vector_norm(mass[name], math.inf)) for name in names) / (own_weight or 1.0)
            largest = max(float(torch.linalg.vector_norm(values[name], math.inf)) for name in names) / weight
            most = FAR * max(1.0, own)
            if largest <= most:
                return
            why = (
                f"it sent a model with a number of {largest:.3g}, and {most:.3g} is a million times this peer's largest"
            )
        self.quarantined[share.sender] = why
        self.protocol.close(share.sender)
        _log.warning("peer %s is quarantined: %s; restart this peer to take it back", share.sender, why)
        raise RefusedError(f"peer {share.sender} is quarantined by peer {self.peer}: {why}", code="peer.quarantined")

    def _receive_hello(self, hello: Hello) -> Hello | None:
        if self.stale is not None:
            return None
        seen = hello.seen
        has_shares = self.frames.shares is not None
        if not has_shares and seen > self.last_round + 1:
            raise RefusedError(
                f"peer {hello.sender} reports rows of round {seen - 1} of peer {self.peer}, and the run has "
                f"{self.last_round}",
                code="peer.round",
            )
        hello = hello if has_shares else replace(hello, seen=0)
        self.protocol.check_hello(hello)
        neighbor = hello.sender
        queue = self.queues[hello.sender]
        if self.is_new and hello.round_index > 0 and not hello.knows:  # it began without having met this peer
            self.is_new = False
            self.joins = True
            if self.protocol.mass:  # which has to come with the shares of others
                self.stale = f"peer {neighbor} is in round {hello.round_index} already"
                return None
        try:
            reply = self.protocol.receive_hello(hello)
        except StaleStateError as error:
            self.stale = str(error)
            return None
        if self.boots.get(neighbor) != hello.boot:
            self.boots[neighbor] = hello.boot
            self.rounds[neighbor] = hello.round_index
            self.reached.pop(neighbor, None)
            self.stepped.pop(neighbor, None)
            queue.failures = 0  # to reach the process before
        self.rounds[neighbor] = max(hello.round_index, self.rounds[neighbor])
        self.wants[neighbor], self.levels[neighbor] = hello.want, hello.level
        if queue.share is not None and queue.share.number > hello.seen:
            queue.share = None  # it did not come
        if not has_shares and self.protocol.is_open(neighbor) and neighbor not in self._checked:
            self._checked.add(neighbor)
            last = seen - 1
            if last > max(self.resumed_at, self.ahead):  # it had rows which this peer does not remember
                self.ahead = last
                self.joins |= self.is_new  # it has lost all it had
                self.stale = f"peer {neighbor} has rows of round {last} of this peer, which remembers {self.resumed_at}"
        return None if reply is None else self._completed(reply)

    def _completed(self, hello: Hello) -> Hello:
        """Return a hello that reports what this peer lacks of weight, or which rows of a neighbour were the last."""
        if self.frames.shares is not None:
            return replace(hello, want=int(self.want), level=self.level) if self.want else hello
        return replace(hello, seen=self.places.get(hello.receiver, (-1, 0))[0] + 1)

    def has_news(self, neighbor: int, now: float) -> bool:
        queue = self.queues[neighbor]
        if self.stale is not None or not self.protocol.can_greet or neighbor in self.quarantined:
            return False
        if now >= queue.hello_at or queue.hellos:
            return True
        return bool(self._due(neighbor))

    def _due(self, neighbor: int) -> list[Message]:
        """Return what a call has to bring: acknowledgements where no answer will, a share, and rows."""
        if not self.protocol.is_open(neighbor):
            return []
        queue = self.queues[neighbor]
        shares = self.protocol.shares_to_send()
        acknowledgements = [] if self._answering[neighbor] else queue.acknowledgements
        due = [share for share in shares if share.receiver == neighbor and share is not queue.share]
        return [*acknowledgements, *due, *queue.rows.values()]

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        """See Session: one call with everything, hellos first, for without them the rest may be refused."""
        queue = self.queues[neighbor]
        messages: list[Message] = [*queue.hellos]
        if now >= queue.hello_at:
            messages.append(self._completed(self.protocol.hello(neighbor)))
        messages += self._due(neighbor)
        if not all(isinstance(message, Acknowledgement) for message in messages):  # which a hello makes up for
            queue.hello_at = now + self._retry
        return [messages] if messages else []

    def answered(self, neighbor: int, sent: Messages, answer: Messages) -> None:
        queue = self.queues[neighbor]
        queue.failures = 0
        for message in sent:
            if isinstance(message, LedgerReport):
                self.informed[neighbor] = message.round_index
            elif isinstance(message, FrozenShare):
                queue.share = message
            elif isinstance(message, RowMessage):
                self._meet(neighbor)
                if queue.rows.get(message.at) is message:
                    del queue.rows[message.at]
        queue.hellos = [hello for hello in queue.hellos if hello not in sent]
        queue.acknowledgements = [ack for ack in queue.acknowledgements if ack not in sent]
        queue.hellos = [*queue.hellos, *self._received(neighbor, answer)][-1:]

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """See Session: what was lost with the call is sent again, and one that is lost or refuses it is greeted."""
        queue = self.queues[neighbor]
        unreachable = isinstance(error, UnreachableError)
        queue.failures = queue.failures + 1 if unreachable else 0
        if self.is_lost(neighbor) or not unreachable:
            self.protocol.close(neighbor)
            queue.acknowledgements.clear()  # the counters of a hello hold them
        queue.hellos.clear()
        queue.share = None
        queue.hello_at = again


class AsynchronousPeer(RunningPeer):
    """One peer of a run that continues without neighbours that are late; see RunningPeer.

    It keeps one checkpoint, with the shares that are in flight.
    """

    generations: ClassVar[int] = 1

    # --- from a checkpoint to a session ---

    def _make_session(self, checkpoints: list[Checkpoint]) -> AsynchronousSession:
        peer = self.device.peer
        neighbors = self.timetable.neighbours(self.device.peer)
        self._partly = PartlyHeard(self.mixing, peer)
        self._partly_final = PartlyHeard(self.timetable.final_mixing, peer)
        self.trainer.use_mixing(self._partly)
        deadline = self.network.deadline
        # After a restart the others may have used its rows, and left.
        first = min(GREETING_SECONDS, deadline) if checkpoints else deadline
        self.policy = StragglerPolicy(first)
        self._requests: dict[int, int] = {}  # the round of the last rows of each neighbour, to which a reply answers
        self._neighbors = neighbors
        self._commits = 0
        self._joining = False
        timetable = self.timetable
        exchanges = {at: self._formats(exchange) for at, exchange in timetable.exchanges.items()}
        self._replies = [at for at, exchange in self.timetable.exchanges.items() if isinstance(exchange, Reply)]
        shares = None
        if self.mixing.sends_shares:
            (shares,), exchanges = exchanges.values(), {}
        else:
            exchanges[timetable.final_at] = self._formats(timetable.final_exchange)
        mass = RowMass(self.state, shares or ())
        self.protocol = PushSumProtocol(peer, neighbors, self.witness.boot, mass, self.arithmetic)
        frames = FrameCodec(self._run_id, shares, exchanges)
        scenario = self.trainer.scenario
        by_examples = getattr(self.trainer.algorithm, "by_examples", False)
        total = math.inf if by_examples else scenario.n_peers
        silent = [j for j in neighbors if peer not in timetable.receivers_ever(j)]
        self.session = AsynchronousSession(
            self.protocol,
            self.arithmetic,
            self.witness,
            frames,
            self._replies,
            self.network.retry,
            self.end,
            total,
            silent,
        )
        self._resumed = bool(checkpoints)
        self._has_split = False  # whether the shares of the exchange under way are on disk, from before a restart
        self.session.resumed_at = self.state.round_index
        self._first_weight = self._weight()  # of the peer at the beginning of the run: 1, or its number of examples
        if checkpoints:
            self._restore(checkpoints[-1])
        self._span = self.mixing.topology.period or SPAN
        usual = self._lowest_weight() if "w" in mass and self._first_weight == 1 else self._weight()
        self.floor = WeightFloor(usual if "w" in mass else 0.0, deadline, time.monotonic())
        self._pace, self._is_alone = Pace(self.network.lead), False  # whether it waits for a quorum
        self._last_added: dict[int, int] = {}  # the round of the last share of each neighbour that was added
        self._agreed = set[int]()  # rounds of a period in which what came agreed with this peer, since some did not
        self._given_up: set[int] = set()  # neighbours that are not waited for any more in final mixing
        self._waited = 0.0  # seconds, in the exchange under way
        self._new_senders: set[int] = set()  # whose shares were added since the last exchange in which they are due
        was_reset = bool(mass) and self.protocol.incarnation > FIRST  # with nothing, so that shares may come
        self.session.is_new = not self.protocol.has_met and not was_reset
        return self.session

    def _restore(self, checkpoint: Checkpoint) -> None:
        facts = checkpoint.transport
        try:
            durable = unpack(self.device.peer, facts["shares"], checkpoint.carried, dict(self.protocol.mass))
            replied = {int(neighbor): int(k) for neighbor, k in facts["replied"].items()}
            distances = {int(neighbor): float(part) for neighbor, part in facts["distances"].items()}
            self._first_weight = float(facts["weights"]["first"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(
                f"{self.device.folder}/{CHECKPOINTS} cannot be read as a checkpoint ({one_line(error)}); restore it "
                "from a copy, or start again with another --out: the peer then joins the others as they are",
                code="checkpoints.damaged",
            ) from error
        self.protocol.restore(durable)
        self._commits = facts["place"]
        self._requests = replied
        self.distances = distances
        is_final = self.state.round_index >= self.rounds  # else the final place is only where a round is over
        places = {self.timetable.final_at} if is_final else self.timetable.exchanges
        self._has_split = self.state.at in places and durable.round_index > self.state.round_index

    def _has_steps(self) -> bool:
        """See RunningPeer: none where the shares of the last round are on disk, whatever became of the neighbours."""
        return super()._has_steps() and not (self._has_split and self.state.round_index + 1 >= self.rounds)

    def _begin(self) -> None:
        if not self._resumed:
            self._commit(0)

    # --- what is on disk ---

    def _commit(self, round_index: int, wanted: Collection[int] = ()) -> None:
        """Put everything on disk, and send what follows from it; `wanted` are those that may wait for a share."""
        with self.connections.changed:
            durable = self.protocol.snapshot(round_index)
        facts, carried = pack(durable)
        rows = self.state.rows | {name: value[None] for name, value in durable.mass.items()}
        self._commits += 1
        transport = {
            "shares": facts,
            "replied": {str(neighbor): k for neighbor, k in self._requests.items()},
            "distances": {str(neighbor): part for neighbor, part in self.distances.items()},
            "weights": {"first": self._first_weight},
        }
        self._save(self._commits, replace(self.state, rows=rows), transport, carried)
        with self.connections.changed:
            self.protocol.committed(durable)
            self.session.committed(wanted)
            self.connections.notify()

    def _is_due(self, round_index: int) -> bool:
        """Return whether a round is one that is committed, and in which shares are sent."""
        return (round_index + 1) % self.network.commit_every == 0 or round_index + 1 >= self.rounds

    def _reset(self) -> None:
        """Become a new incarnation without mass, which takes over the model that comes with its first share."""
        with self.connections.changed:
            self.session.stale = None
            self.protocol.reset()
        self._commit(self.state.round_index)

    # --- the neighbours ---

    def _meet(self) -> None:
        """Greet the neighbours; a peer that finds them under way, and has nothing of the run, joins as they are."""
        since = time.monotonic()
        while True:
            self._wait(lambda: self._has_greeted(since), POLL)
            if self._has_greeted(since):
                break
            if time.monotonic() - since > self.network.give_up_seconds and not any(
                map(self.protocol.is_open, self._neighbors)
            ):
                why = "; ".join(map(self.connections.why, self._neighbors))
                raise RunError(
                    f"none of the peers {self._neighbors} could be greeted for {self.network.give_up_seconds:g} s "
                    f"({why}); mend that, then run the same command again, or raise network.give_up, or leave it out",
                    code="network.unreachable",
                )
        self.session.is_new = False
        self._joining = self.session.joins and not self.protocol.mass
        now = time.monotonic()
        opened = [*filter(self.protocol.is_open, self._neighbors)]
        self.policy.start(now, opened)
        with self.connections.changed:
            self.session.met_at = dict.fromkeys(opened, now) | self.session.met_at

    def _has_greeted(self, since: float) -> bool:
        """Return whether all neighbours are open that are not quarantined, or enough of them to begin."""
        opened = [self.protocol.is_open(j) for j in self._neighbors if j not in self.session.quarantined]
        patience = GREETING_SECONDS if self._resumed or self.session.joins else self.network.start
        is_late = time.monotonic() - since > patience
        return all(opened) or (is_late and (any(opened) or self.protocol.round_index >= self.rounds))

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, or for some seconds; meanwhile reset this peer where that has to be."""
        until = time.monotonic() + seconds
        while True:
            self._check_stopped()
            left = min(POLL, until - time.monotonic())
            done = self.connections.wait(lambda: self.session.stale is not None or ready(), max(0.0, left))
            if self.session.stale is not None:
                self._reset()
            elif done or left <= 0:
                return done

    def _before(self, round_index: int) -> None:
        """Wait until a round's steps may be taken: with a model, a quorum, no great lead, and enough weight."""
        self._partly.use_senders(None)
        if self._must_wait(round_index):
            self._wait_relaying(lambda: not self._must_wait(round_index), round_index, every=self.network.retry)
        self.waits_for = ""
        with self.connections.changed:
            self.session.report(Want.UNKNOWN, self.floor.level)
        turns = [self._turn(round_index, at) for at in self.timetable.exchanges]
        is_exchanged = self._is_due(round_index) or not self.mixing.sends_shares
        if is_exchanged and any(turn.senders | turn.receivers for turn in turns):
            with self.connections.changed:
                self.session.steps += 1

    def _must_wait(self, round_index: int) -> bool:
        """Return whether a round's steps have to wait, and note for what."""
        session = self.session
        network = self.network
        weight = self._weight()
        is_active = self.trainer.is_active(round_index)
        with self.connections.changed:
            needed = min(network.quorum, len(self._neighbors)) if is_active and network.alone == "wait" else 0
            exchanging = [step for step in session.met.values() if step > session.steps - self._span]
            up = filter(self._is_up, self._neighbors)
            rounds = {j: max(session.rounds.get(j, 0), session.stepped.get(j, 0)) for j in up}
            slowest = self._pace.slowest(round_index, rounds, session.boots)
        lacks_weight = self.floor.lacks(weight, time.monotonic())
        self._is_alone = bool(needed) and (len(exchanging) < needed or max(exchanging) < session.steps)
        self.waits_for = ""
        if self._joining or weight <= 0:
            self.waits_for = "a model of a neighbour"
        elif self._is_alone:
            self.waits_for = f"{needed} of its neighbours to exchange with it"
        elif slowest is not None:
            self.waits_for = f"peer {slowest}, which is in round {rounds[slowest]}"
        elif lacks_weight and is_active:
            below = f"{weight:.2g} is below {self.floor.value:.2g}"
            self.waits_for = f"shares of its neighbours, for its push-sum weight {below}"
        return bool(self.waits_for)

    def _is_up(self, neighbor: int, at_the_end: bool = False) -> bool:
        """Return whether a neighbour exchanges with this peer; `at_the_end` also whether it greets, its rounds done."""
        session = self.session
        last = session.met_at.get(neighbor, float("-inf"))
        if at_the_end and session.rounds.get(neighbor, 0) >= self.rounds:
            last = session.heard_at.get(neighbor, last)
        window = max(self.network.deadline, self.policy.patience)
        is_open = (at_the_end or self.protocol.is_open(neighbor)) and neighbor not in session.quarantined
        return is_open and time.monotonic() - last < window

    def _turn(self, round_index: int, at: int) -> Turn:
        """Return this peer's part in an exchange."""
        return self.timetable.turn(self.device.peer, self.timetable.place(round_index, at))

    def _wait_relaying(
        self, ready: Callable[[], bool], round_index: int, every: float | None = None, saved: int | None = None
    ) -> None:
        """Wait until something is so; meanwhile acknowledge and relay what comes, without a step, see `_relay`.

        It mixes with all neighbours `every` so many seconds: at once where none exchanged with this process yet, or
        where it waits for that and nothing is under way.
        """
        due = time.monotonic() + (every or 0.0) * bool(self.session.met)
        mixes = [at for at, exchange in self.timetable.exchanges.items() if isinstance(exchange, Mix)]

        def has_news() -> bool:
            offers = (j for at in (*mixes, self.timetable.final_at) for j in self.session.senders(at))
            if self._joining and any(True for _ in offers):
                return True
            if self.mixing.sends_shares:
                is_wanted = self._lacking_weight() or self._is_stuck() or self.session.has_report() or self._can_begin()
                return bool(self._addable_shares() or is_wanted)
            return bool(self._behind((j for at in mixes for j in self.session.senders(at)), round_index))

        while not ready():
            if self._joining:
                self._adopt([*mixes, self.timetable.final_at])
            self._relay(round_index, saved)
            now = time.monotonic()
            if every is not None and (now >= due or self._can_begin()):
                self._mix_meanwhile(round_index)
                due = now + every
            self._check_left()
            self._wait(lambda: has_news() or ready(), POLL)
        self._relay(round_index, saved)  # before others wait for an acknowledgement while this peer works

    def _addable_shares(self) -> dict[int, int]:
        """Return the round of each neighbour's share that may be added now: in final mixing none that is ahead."""
        waiting = self.protocol.waiting_rounds()
        k = self.state.round_index
        return waiting if k < self.rounds else {j: sent for j, sent in waiting.items() if sent <= k}

    def _check_left(self) -> None:
        """Give up where all neighbours are done and gone."""
        session = self.session
        protocol = self.protocol
        with self.connections.changed:
            left = [session.rounds.get(j, 0) >= self.end and not protocol.is_open(j) for j in self._neighbors]
        if self.state.round_index < self.rounds and all(left):
            self.trainer.finish(self._trained)
            raise NotAgreedError(
                f"all neighbours of peer {self.device.peer} are done and have left, and it is in round "
                f"{self.state.round_index} of {self.rounds}: its model is its own; take that of another device",
                code="network.not-agreed",
            )

    def _mix_meanwhile(self, round_index: int) -> None:
        """Send shares or rows to all neighbours, without a step."""
        receivers = self.timetable.receivers_ever(self.device.peer)
        if self.mixing.sends_shares:
            self._absorb()
            self._split(max(0, round_index - 1), dict.fromkeys(receivers, (1 - KEPT) / len(receivers)))
            self._commit(round_index, self._neighbors)
            return
        values = {name: self.state.rows[name][0].clone() for name in self.timetable.final_exchange.names}
        self._commit(round_index)
        self._post(self.timetable.final_at, max(0, round_index - 1), dict.fromkeys(receivers, values))

    def _adopt(self, offered: Collection[int]) -> None:
        """Take over the newest rows that neighbours offer in some exchanges, before anything of this peer is sent."""
        for at in offered:
            with self.connections.changed:
                messages = self.session.collect(at, self.session.senders(at))
            if messages:
                newest = self._decoded(max(messages.values(), key=lambda message: message.round_index).values)
                self.state.rows.update({name: value[None].clone() for name, value in newest.items()})
                self._joining = False
                break

    def _absorb(self) -> None:
        k = self.state.round_index
        own = self._model(self.protocol.mass).clone() if k >= self.rounds and self.protocol.mass else None
        with self.connections.changed:
            absorbed = self.protocol.absorb(None if k < self.rounds else k, self._first_weight)
        if absorbed:
            if self._first_weight != 1:
                self.floor.usual = self._weight()
            self._new_senders |= {share.sender for share in absorbed}
            self._last_added |= {share.sender: share.round_index for share in absorbed}
        if own is not None:
            shares = [share for share in absorbed if self.rounds <= share.round_index]
            self._measure({share.sender: self._decoded(share.values) for share in shares}, own)

    def _weight(self) -> float:
        """Return this peer's push-sum weight; 1 where there is none."""
        return float(self.protocol.mass["w"]) if "w" in self.protocol.mass else 1.0

    def _lowest_weight(self) -> float:
        """Return the lowest weight that this peer would have if all were as fast, from 1 at the beginning."""
        n = self.mixing.n_peers
        lowest = 1.0
        weights = torch.ones(n, 1, dtype=torch.float64)
        for k in range(min(self.rounds, MEASURED)):
            weights = self.mixing.matrix(k).apply(weights)
            lowest = min(lowest, float(weights[self.device.peer]))
        return lowest

    # --- exchanges ---

    def _await(self, wanted: Collection[int], has_come: Callable[[int], bool], until: float) -> None:
        """Wait for those of some neighbours that the straggler policy waits for, up to a moment."""
        began = time.monotonic()
        awaited = self.policy.on_time.intersection(wanted)
        self._wait(lambda: not any(self.protocol.is_open(j) and not has_come(j) for j in awaited), until - began)
        self._waited += time.monotonic() - began

    def _await_senders(
        self, wanted: Collection[int], has_come: Callable[[int], bool], is_past: Callable[[int], bool] | None = None
    ) -> None:
        """Wait for what some neighbours send, as long as that pays, and record who of them had come.

        Nothing comes of one that `is_past` this exchange.
        """
        until = time.monotonic() + self.policy.patience
        self._await(set(wanted) - self._late, lambda j: has_come(j) or (is_past is not None and is_past(j)), until)
        new = self.session.senders(self.state.at)  # of rounds before this, where a neighbour lags behind
        there = {neighbor for neighbor in wanted if has_come(neighbor) or neighbor in new}
        with self.connections.changed:
            message = self.connections.message_seconds()
        self.policy.end(time.monotonic(), there, set(wanted) - there, self._waited, message)

    def _exchange(self, exchange: Exchange) -> None:
        k = self.state.round_index
        shares = self.mixing.sends_shares
        if k >= self.rounds:
            self._exchange_finally(exchange)
            return
        is_due = self._is_due(k) or not shares
        if is_due:
            self._waited = 0.0
            with self.connections.changed:
                self.policy.begin(self.session.reached)
        if not shares:
            self._gossip(exchange, self.state)
            return
        has_split = self._has_split
        self._has_split = False
        if is_due:
            self._push(k, has_split)
        else:
            self._absorb()
        self.state.at = self.state.at + 1
        self.state.waiting = False
        self._settle()

    def _settle(self) -> None:
        """Commit once more where an edge is used again in the next round, which has to be acknowledged before."""
        following = self.state.round_index + 1
        is_due = following < self.rounds and self._is_due(following)
        if is_due and self.protocol.uncommitted() & self._turn(following, self.state.at - 1).senders:
            self._commit(following)

    def _push(self, round_index: int, has_split: bool) -> None:
        """Send shares, commit, and add those that come; see `_has_split`."""
        turn = self._turn(round_index, self.state.at)
        is_open = self.protocol.is_open
        outgoing = turn.weights
        incoming = turn.senders
        others = [*filter(is_open, self.timetable.receivers_ever(self.device.peer))]
        if outgoing and others and not any(map(is_open, outgoing)):  # its receivers are down: others get their part
            outgoing = dict.fromkeys(others, sum(outgoing.values()) / len(others))
        self._late = set[int]()
        if not has_split:
            self._late = self._make_ready(outgoing, set(outgoing) - incoming)
            self._split(round_index, outgoing)
            self._commit(round_index + 1, self._uninformed(round_index + 1) | {*outgoing})
        waiting = self.protocol.waiting_rounds
        rounds = self.session.rounds
        self._await_senders(
            incoming, lambda j: j in self._new_senders or j in waiting() or rounds.get(j, 0) > round_index
        )
        self._absorb()
        self._new_senders -= incoming

    def _make_ready(self, receivers: Collection[int], unheard: Collection[int]) -> set[int]:
        """Wait until shares can be sent, and acknowledge meanwhile what others wait for the same way.

        `unheard` send nothing in this exchange, so that being on time shows here alone. Returns those not ready.
        """
        until = time.monotonic() + self.policy.patience
        while True:
            self._await(receivers, lambda j: self.protocol.is_ready(j) or bool(self.protocol.waiting_rounds()), until)
            late = {j for j in receivers if not self.protocol.is_ready(j)}
            pays = any(map(self.protocol.is_open, late & self.policy.on_time))
            if not (pays and time.monotonic() < until and self.protocol.waiting_rounds()):
                break
            self._absorb()
            self._commit(self.state.round_index)
        self.policy.note(set(unheard) - late, late & set(unheard))
        return late

    def _uninformed(self, round_index: int) -> set[int]:
        """Return the neighbours that may soon wait for this peer, as they have not heard how far it is."""
        if (lead := self.network.lead) is None:
            return set()
        return {j for j in self._neighbors if round_index - self.session.reported_to[j] >= max(1, lead - 1)}

    def _split(self, round_index: int, weights: Mapping[int, float], keeping: bool = True) -> None:
        """Freeze shares; `keeping`, their weights are scaled down where less than the floor would be left."""
        with self.connections.changed:
            self.protocol.split(round_index, self.floor.parts(self._weight(), weights) if keeping else weights)

    def _gossip(self, exchange: Exchange, state: State) -> None:
        """Send rows, and continue with those that have come."""
        k = state.round_index
        at = state.at
        sent = exchange.outgoing(state, self.mixing)
        if self._is_due(k):
            self._commit(k, self._uninformed(k))
        self._post(at, k, {receiver: rows for (_, receiver), rows in sent.items()})
        wanted = self._turn(k, at).senders
        self._late = set()

        def is_past(j: int) -> bool:
            at_its_end = self.session.rounds.get(j, 0) >= self.rounds  # where it mixes, and no more
            return self.session.places.get(j, (0, 0)) > (k, at) or (at_its_end and not isinstance(exchange, Mix))

        def has_come(j: int) -> bool:
            """Return whether rows of this round have come, or new ones at all of a neighbour that is far behind."""
            is_far_behind = self.session.places.get(j, (k, 0))[0] < k - 1
            return j in self.session.senders(at, 0 if is_far_behind else k)

        self._await_senders(wanted, has_come, is_past)
        self._mix(exchange, state, wanted)

    def _post(self, at: int, round_index: int, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Send rows of an exchange to some neighbours, for a round; a reply is for that of the request.

        A neighbour whose request came before this process began repeats it.
        """
        rounds = self._requests if at in self._replies else dict.fromkeys(rows, round_index)
        with self.connections.changed:
            for j in rows.keys() & rounds.keys():
                self.session.queues[j].rows[at] = RowMessage(self.device.peer, j, rounds[j], at, rows[j])
            self.connections.notify()

    def _mix(self, exchange: Exchange, state: State, wanted: Collection[int]) -> None:
        """Perform an exchange with the rows that have come."""
        with self.connections.changed:
            messages = self.session.collect(state.at, wanted)
        if state.at == self.timetable.final_at:  # not what a neighbour sent while it waited
            messages = {j: message for j, message in messages.items() if message.round_index >= self.rounds}
        elif isinstance(exchange, Reply):  # a reply belongs to the request of this round
            messages = {j: message for j, message in messages.items() if message.round_index == state.round_index}
        else:
            self._requests.update({j: message.round_index for j, message in messages.items()})
        received: Any = {(j, self.device.peer): self._decoded(message.values) for j, message in messages.items()}
        partly = self._partly
        if state.at == self.timetable.final_at:
            partly = self._partly_final
            self._measure({j: values for (j, _), values in received.items()})
        partly.use_senders(messages)
        exchange.incoming(state, partly, self._clipped(received)).apply_(state)

    # --- the end ---

    @staticmethod
    def _more_final_rounds(final: int) -> int:
        """See RunningPeer: as where some peers are gone, over the others alone the graph takes longer to agree."""
        return 2 * final + 8

    def _mix_finally(self) -> None:
        """See RunningPeer; the distances are those of the last round in which there was something to compare."""
        before = self.distances
        super()._mix_finally()
        self.distances = self.distances or before

    def shortcoming(self) -> str | None:
        if self.state.round_index >= self.end and self.final and not self.distances:
            return (
                "none of its neighbours took part in final mixing with it, so its model is its own; take that of "
                "another device"
            )
        return super().shortcoming()

    def _exchange_finally(self, exchange: Exchange) -> None:
        """Exchange in a round of final mixing, and wait for all neighbours that are up."""
        k = self.state.round_index
        at = self.state.at
        self.waits_for = f"its neighbours in round {k - self.rounds + 1} of final mixing"
        turn = self._turn(k, at)
        senders = turn.senders
        if self.mixing.sends_shares:
            has_split = self._has_split
            self._has_split = False
            if not has_split:
                if self.protocol.uncommitted():
                    self._commit(k)
                self._await_finally(turn.receivers, self.protocol.is_ready, k)
                self._split(k, turn.weights, keeping=False)
                self._commit(k + 1, self._neighbors)
            self._await_finally(
                senders, lambda j: self._last_added.get(j, -1) >= k or self.protocol.has_passed(j, k), k + 1
            )
            self._absorb()
        else:
            rows = exchange.outgoing(self.state, self.timetable.final_mixing)
            self._commit(k, self._neighbors)
            self._post(at, k, {receiver: values for (_, receiver), values in rows.items()})
            has_come = self.session.senders
            self._await_finally(senders, lambda j: j in has_come(at, k) or self.session.rounds.get(j, 0) > k, k)
            self._mix(exchange, self.state, senders)
        period = self.mixing.topology.period
        if self.distances and max(self.distances.values()) <= AGREE:
            self._agreed.add(k % period if period else k)
        elif self.distances:
            self._agreed.clear()
        agrees = len(self._agreed) >= (period or self.final)
        if k + 1 == self.end or (k + 1 >= self.rounds + self.final and agrees):
            self.state.round_index = self.end - 1
            self.waits_for = ""

    def _await_finally(self, wanted: Collection[int], has_come: Callable[[int], bool], saved: int) -> None:
        """Wait for what some neighbours send in a round of final mixing, as long as they are up.

        One that only greets is waited for `network.start` seconds, once. Meanwhile `saved` is the round on disk.
        """
        until = time.monotonic() + self.network.start

        def ready() -> bool:
            with self.connections.changed:
                missing = {j for j in wanted if not has_come(j)}
                awaited = {j for j in missing - self._given_up if self._is_up(j, at_the_end=True)}
            if time.monotonic() > until:
                self._given_up |= awaited
            return not awaited - self._given_up

        self._wait_relaying(ready, self.rounds, saved=saved)

    def _leave(self) -> None:
        """Relay for neighbours that are not done, and stay until all that can be reached know all that they need.

        One that cannot be reached, or is done and cannot be informed, is waited for as long as a deadline.
        """
        self._commit(self.end, self._neighbors)
        lost = time.monotonic()
        while not self._stopped.is_set():
            waiting = [j for j in self._neighbors if not self._is_over(j)]
            if any(map(self.protocol.is_open, self._behind(waiting, self.end))):
                lost = time.monotonic()
            if not waiting or time.monotonic() - lost > self.network.deadline:
                break
            if self._relay(self.end, self.end):
                continue
            with self.connections.changed:
                self.connections.changed.wait(POLL)

    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and has all that this peer owes it or has left; or is quarantined."""
        if neighbor in self.session.quarantined:
            return True
        if self.session.rounds.get(neighbor, -1) < self.end:
            return False
        is_informed = self.session.is_informed(neighbor, self.end) and not self.protocol.owes(neighbor)
        return is_informed or self.session.is_lost(neighbor)

    def _relay(self, round_index: int, saved: int | None = None) -> bool:
        """Take part in the mixing of neighbours in earlier rounds than this peer's; return whether there was some.

        `saved` is the round that is put on disk, by default this peer's.
        """
        if self.session.stale is not None:
            self._reset()
        if self.mixing.sends_shares:
            return self._relay_shares(round_index, round_index if saved is None else saved)
        done = False
        exchanges = dict(self.timetable.exchanges)
        if round_index >= self.end:
            exchanges[self.timetable.final_at] = self.timetable.final_exchange
        for at, exchange in exchanges.items():
            limit = round_index if at == self.timetable.final_at else min(round_index, self.rounds)
            behind = self._behind(self.session.senders(at), limit)
            if behind and isinstance(exchange, Mix):
                state = replace(self.state, round_index=min(self.session.rounds[j] for j in behind), at=at)
                mixing = self.mixing if state.round_index < self.rounds else self.timetable.final_mixing
                sent = exchange.outgoing(state, mixing)
                self._post(at, max(0, round_index - 1), {j: rows for (_, j), rows in sent.items() if j in behind})
                self._mix(exchange, state, self.session.senders(at))
                self.state.rows = state.rows
                done = True
        return done

    def _relay_shares(self, round_index: int, saved: int) -> bool:
        """Add shares that came, give some to those that are behind or wait for weight, and report what is lacking."""
        waiting = self._addable_shares()
        lacking = self._lacking_weight()
        if waiting or lacking or self.protocol.uncommitted():
            self._absorb()
            receivers = dict.fromkeys(lacking, (1 - KEPT) / max(1, len(lacking)))
            if behind := self._behind(waiting, round_index):
                (at,) = self.timetable.exchanges
                column = self._turn(min(waiting[j] for j in behind), at).weights
                receivers = {j: column[j] for j in self._behind(column, round_index)} or receivers
            self._split(max(0, round_index - 1), receivers)
            self._commit(saved, self._uninformed(saved) | {*receivers})
        with self.connections.changed:
            want = self.floor.want(self._weight(), self._is_under_way())
            if want and round_index < self.rounds:
                want = Want.WAITS if self._is_alone else want
            elif want:
                want = Want.NOTHING_TO_SPARE  # final mixing takes any weight
            self.session.report(want, self.floor.level)
            if self._is_stuck():
                self.floor.sink()
                self.session.report(Want.UNKNOWN, self.floor.level)
            self.connections.notify()
        return bool(waiting or lacking)

    def _is_under_way(self) -> bool:
        """Return whether something is on its way to a neighbour that is up, or came and is not acknowledged."""
        protocol = self.protocol
        opened = [*filter(self.protocol.is_open, self._neighbors)]
        sent = any(protocol.owes(j) or self.session.queues[j].rows for j in opened)
        return sent or bool(protocol.waiting_rounds() or protocol.uncommitted())

    def _can_begin(self) -> bool:
        """Return whether this peer waits for an exchange that it can begin itself, as none is under way."""
        if not self._is_alone or self.floor.want(self._weight(), under_way=False):
            return False
        with self.connections.changed:
            met = self.session.met
            steps = self.session.steps
            is_ready = self.protocol.is_ready
            receivers = self.timetable.receivers_ever(self.device.peer)
            unmet = any(is_ready(j) and met.get(j, -1) < steps for j in receivers)
            return unmet and not self._is_under_way()

    def _lacking_weight(self) -> list[int]:
        """Return the neighbours that wait for weight and can be sent some, where this peer has some to spare."""
        waiting = [j for j, want in self.session.wants.items() if want == Want.WAITS and self.protocol.is_ready(j)]
        if not waiting or self.floor.want(self._weight(), under_way=False):
            return []
        return [j for j in self.timetable.receivers_ever(self.device.peer) if j in waiting]

    def _is_stuck(self) -> bool:
        """Return whether neither this peer nor a neighbour that is up has weight to spare, so that its floor sinks."""
        session = self.session
        up = [j for j in self._neighbors if self._is_up(j, at_the_end=True)]
        others = [(session.wants.get(j, Want.UNKNOWN), session.levels.get(j, 0)) for j in up]
        return self.floor.is_stuck(session.want, others)

    def _behind(self, neighbors: Iterable[int], round_index: int) -> list[int]:
        """Return which of some neighbours are in earlier rounds."""
        return [j for j in neighbors if self.session.rounds.get(j, 0) < round_index]
