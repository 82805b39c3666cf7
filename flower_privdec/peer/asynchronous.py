"""A peer that does not wait for neighbours that are late: a slow or lost one costs only its own edges.

Push-sum algorithms send shares that are added exactly once (`ShareExchange`), under any loss, repetition and kill. All
others send rows, of which a neighbour uses the newest it has, once (`RowExchange`); the weight of a neighbour that was
not heard in time returns to the peer itself for that round. `StragglerPolicy` decides which neighbours to wait for.

A peer takes a private step only while a quorum of its neighbours exchange with it, while it is not too far ahead of
the slowest of those that are up, and while its push-sum weight is not so small that the step would be too long. Else it
waits; meanwhile it acknowledges, relays, and mixes without a step after `times.retry` seconds, and then at growing
intervals of up to `times.rest`, so that two peers that can reach each other never wait for each other for ever. After
the last round it mixes without steps, in rounds in which it waits for its neighbours, until its model agrees with
theirs in all rounds of a period of the graph.

| it is | and goes on when | meanwhile it |
|---|---|---|
| meeting | all neighbours have greeted it, or `times.start` has passed and one has | greets |
| joining | a neighbour's model has come | greets |
| before a step | it has a quorum, no great lead and enough weight (`_must_wait`) | relays, mixes, acknowledges |
| in an exchange | what it waits for has come, or the straggler policy's patience is over | |
| in final mixing | all that are up have sent | relays |
| leaving | all neighbours are done and informed, or lost for `network.deadline` | relays |

A peer that has nothing of a run that others have begun without it joins them as they are: with the rows of the first
neighbour that sends some, and in push-sum with the model of its first share and the weight of a peer that begins, as
`PushSumProtocol.absorb` explains. A peer whose checkpoint is an old copy learns it from its neighbours, and is reset so
too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from flower_privdec.common.errors import NotAgreedError, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.core import Exchange, Reply
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.graph.mixing import PartlyHeard
from flower_privdec.peer.asynchronous_session import AsynchronousSession
from flower_privdec.peer.driving import Program, Wait, Work
from flower_privdec.peer.extension import GAP
from flower_privdec.peer.neighbour import Neighbour
from flower_privdec.peer.pace import TINY, Pace, StragglerPolicy, Want, WeightFloor
from flower_privdec.peer.peer import AGREE, RunningPeer
from flower_privdec.peer.row_exchange import RowExchange
from flower_privdec.peer.share_exchange import ShareExchange
from flower_privdec.pushsum.exactly_once import FIRST, PushSumProtocol
from flower_privdec.pushsum.frames import FrameCodec, RowMass, pack, unpack
from flower_privdec.pushsum.lockstep import Turn

SPAN = 16  # rounds of a random graph in which a peer exchanges with all of its quorum
GREETING_SECONDS = 2.0  # for the others, if they are known to be under way already


class AsynchronousPeer(RunningPeer):
    """One peer of a run that continues without neighbours that are late; see RunningPeer.

    It keeps one checkpoint, with the shares that are in flight.

    Attributes:
        protocol: its shares; without mass if it gossips rows.
        exchanges: how it exchanges: shares or rows.
        policy, floor: which neighbours it waits for, and with which weight it takes steps.
        partly, partly_final: the mixing of those that were heard, in rounds and in final mixing.
        replies: the exchanges in which a neighbour is answered.
        is_joining: whether it waits for a model of the others, whose run began without it.
        is_alone: whether it waits for a quorum.
        waited: seconds in the exchange under way that were spent on waiting for others.
        late: neighbours that were late already in the exchange under way.
        first_weight: its push-sum weight at the beginning of the run: 1, or its number of examples.
    """

    generations: ClassVar[int] = 1

    # --- from a checkpoint to a session ---

    def _make_session(self, checkpoints: list[Checkpoint]) -> AsynchronousSession:
        peer = self.device.peer
        neighbors = self.others
        self.partly = PartlyHeard(self.mixing, peer)
        self.partly_final = PartlyHeard(self.timetable.final_mixing, peer)
        self.trainer.use_mixing(self.partly)

        # After a restart the others may have used its rows, and left.
        self._resumed = bool(checkpoints)
        first = self.times.deadline
        if checkpoints:
            first = min(GREETING_SECONDS, first)
        self.policy = StragglerPolicy(first, len(self.timetable.exchanges))
        self.is_joining = False
        self.is_alone = False
        self.waited = 0.0
        self.late: set[int] = set()
        self._commits = 0
        self._has_split = False  # whether the shares of the exchange under way are in the store, from before a restart
        self._pace = Pace(self.network.lead)
        self._agreed = set[int]()  # rounds of a period in which what came agreed with this peer, since some did not

        exchanges = self.timetable.exchanges
        self._places = sorted(exchanges)  # in a round's program
        formats = {at: self._formats(exchange) for at, exchange in exchanges.items()}
        self.replies = [at for at, exchange in exchanges.items() if isinstance(exchange, Reply)]
        self.exchanges: ShareExchange | RowExchange
        if self.mixing.sends_shares:
            # All exchanges of a round are alike. The session looks at the numbers: if the frame were refused for them,
            # the share would be sent for ever.
            alike = next(iter(formats.values()))
            shares = {name: replace(row, judged=True) for name, row in alike.items()}
            frames = FrameCodec(self._run_id, shares, {}, check=self._check_of_rows())
            self.exchanges = ShareExchange(self)
        else:
            formats[self.timetable.final_at] = self._formats(self.timetable.final_exchange)
            shares = {}
            frames = FrameCodec(self._run_id, None, formats)
            self.exchanges = RowExchange(self)
        mass = RowMass(self.state, shares)
        self.protocol = PushSumProtocol(peer, neighbors, self.witness.boot, mass, self.arithmetic)

        by_examples = getattr(self.trainer.algorithm, "by_examples", False)
        total = math.inf if by_examples else float(self.trainer.scenario.n_peers)
        silent = [j for j in neighbors if peer not in self.timetable.receivers_ever(j)]
        self.session: AsynchronousSession = self.exchanges.session_class(
            self.protocol,
            self.witness,
            frames,
            self.replies,
            self.times.retry,
            self.count(self.end),
            total,
            silent,
        )
        self.session.resumed_at = self.count(self.state.round_index)
        self.first_weight = self.weight()
        if checkpoints:
            self._restore(checkpoints[-1])

        self._span = self.mixing.topology.period or SPAN
        self.floor = WeightFloor(self.exchanges.usual_weight(), self.times.deadline, self.now)
        was_reset = bool(mass) and self.protocol.incarnation > FIRST  # with nothing, so that shares may come
        self.session.is_new = not self.protocol.has_met and not was_reset
        return self.session

    def _restore(self, checkpoint: Checkpoint) -> None:
        facts = checkpoint.transport
        try:
            durable = unpack(self.device.peer, facts["shares"], checkpoint.carried, dict(self.protocol.mass))
            replied = {int(neighbor): int(k) for neighbor, k in facts["replied"].items()}
            distances = {int(neighbor): float(part) for neighbor, part in facts["distances"].items()}
            self.first_weight = float(facts["weights"]["first"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(
                f"{self.store.path} cannot be read as a checkpoint ({one_line(error)}); restore it from a copy, or "
                "start again with another --out: the peer then joins the others as they are",
                code="checkpoints.damaged",
            ) from error
        self.protocol.restore(durable, with_new=self.device.graph is not None)
        self._commits = facts["place"]
        for j, known in self.neighbours.items():
            known.request = replied.get(j)
            known.distance = distances.get(j)

        # In a round's program `final_at` is behind all exchanges: a peer that is there is in final mixing, or has just
        # finished a round and is in no exchange.
        is_final = self.state.round_index >= self.rounds
        places = {self.timetable.final_at} if is_final else self.timetable.exchanges
        self._has_split = self.state.at in places and durable.round_index > self.here

    def take_split(self) -> bool:
        """Return whether the shares of the exchange under way are in the store since before a restart; once."""
        has_split = self._has_split
        self._has_split = False
        return has_split

    def _has_steps(self) -> bool:
        """See RunningPeer: none if shares of the last round are in the store, for they hold its steps."""
        has_sent_some = self._has_split or self.here > self.count(self.state.round_index)
        is_last = self.state.round_index + 1 >= self.rounds
        return super()._has_steps() and not (is_last and has_sent_some)

    def _begin(self) -> Program[None]:
        self.floor.start(self.now)
        if self._resumed:
            return

        # Who joined by the list of members knows that it is late, and has nothing to give up first.
        graph = self.device.graph
        if graph is not None and self.device.peer >= graph.scenario.n_peers:
            self.session.is_new = False
            self.session.joins = True
            if self.protocol.mass:
                self.protocol.reset()
        yield from self.commit(0)

    # --- how far peers are ---

    def count(self, round_index: int) -> int:
        """Return the count of exchanges before a round, by which this peer and its neighbours say how far they are.

        Shares are counted exchange by exchange, so that those of one round are told apart. Rows name their exchange,
        and are counted by rounds.
        """
        within = min(round_index, self.rounds) * self.exchanges.per_round
        passed = len([end for end in self.ends if round_index >= end])
        return within + max(0, round_index - self.rounds) + GAP * passed  # a round of final mixing has one exchange

    def place_of(self, count: int) -> int:
        """Return a count without the final mixing of ends that are none any more, see `extension`."""
        place = count
        for number, end in enumerate(self.ends):
            last = end * self.exchanges.per_round
            if count < last + GAP * number:
                break
            place = max(last, count - GAP * (number + 1))
        return place

    def round_of(self, count: int) -> int:
        """Return the round that a peer is in, given how many exchanges it has done: the inverse of `count`."""
        place = self.place_of(count)
        within = self.rounds * self.exchanges.per_round
        if place < within:
            return place // self.exchanges.per_round
        return self.rounds + place - within

    @property
    def here(self) -> int:
        """Return how many exchanges this peer has done, see `count`."""
        before = self.count(self.state.round_index)
        if self.state.round_index >= self.rounds:
            return before
        done = bisect_left(self._places, self.state.at)
        return before + done * self.exchanges.per_round // len(self._places)

    # --- what is in the store ---

    def commit(self, count: int, wanted: Collection[int] = ()) -> Program[None]:
        """Put everything in the store, and send what follows from it.

        Args:
            count: how many exchanges this peer has done, as the store is to say.
            wanted: neighbours that may wait for a share.
        """
        durable = self.protocol.snapshot(count)
        facts, carried = pack(durable)
        rows = self.state.rows | {name: value[None] for name, value in durable.mass.items()}
        requests = {str(j): one.request for j, one in self.neighbours.items() if one.request is not None}
        transport: dict[str, Any] = {
            "shares": facts,
            "replied": requests,
            "distances": {str(neighbor): part for neighbor, part in self.distances.items()},
            "weights": {"first": self.first_weight},
        }
        state = copy(self.state)
        state.rows = rows  # not aligned, as only a state that computes needs that

        # Nothing is sent before it is on the disk.
        self._commits += 1
        yield from self._saving(self._commits, state, transport, carried)
        self.protocol.committed(durable)
        self.session.committed(wanted, self._uninformed(count))

    # --- peers that leave for good ---

    def members_changed(self) -> None:
        """See RunningPeer: who leaves is passed over from now on, and given nothing new, by others that leave too."""
        super().members_changed()
        members = self.device.members
        if members is None:
            return
        for one in members.members.all:
            if one.left and one.number in self.neighbours:
                self.policy.on_time = self.policy.on_time - {one.number}
                self.exchanges.part(one.number)

    def open_of(self, neighbors: Iterable[int]) -> set[int]:
        """Return those of some neighbours whose edges are open, and that stay."""
        return self.protocol.open_of(neighbors) - self.session.parting

    @property
    def is_leaving(self) -> bool:
        members = self.device.members
        if members is None or self.device.peer >= len(members.members.all):
            return False
        return members.members.all[self.device.peer].left > 0

    def _part(self) -> Program[None]:
        """See RunningPeer: hand everything over, and leave once no neighbour has anything for this peer."""
        if self.weight() > 0:
            yield Work("finish", partial(self.trainer.finish, self._trained))
        self.waits_for = "its neighbours to take over what it holds"
        yield from self.exchanges.hand_over()
        self.waits_for = ""

    def is_due(self, round_index: int) -> bool:
        """Return whether a round is one that is committed, and in which shares are sent."""
        return (round_index + 1) % self.network.commit_every == 0 or round_index + 1 >= self.rounds

    def reset(self) -> Program[None]:
        """Begin a new life without mass, which takes over the model that comes with its first share."""
        self.session.stale = None
        self.protocol.reset()
        yield from self.commit(self.here)

    # --- the neighbours ---

    def _meet(self) -> Program[None]:
        """Greet the neighbours; a peer that finds them under way, and has nothing of the run, joins as they are."""
        since = self.now
        while True:
            yield from self.wait(lambda: self._has_greeted(since), self.now + self.times.poll)
            if self._has_greeted(since):
                break
            self.check_standstill()
            has_met_none = not self.protocol.open_of(self.neighbours)
            if self.now - since > self.times.give_up and has_met_none:
                why = "; ".join(map(self.why, self.neighbours))
                raise RunError(
                    f"none of the peers {[*self.neighbours]} could be greeted for {self.times.give_up:g} s "
                    f"({why}); mend that, then run the same command again",
                    code="network.unreachable",
                )

        self.session.is_new = False
        self.is_joining = self.session.joins and not self.protocol.mass
        opened = [one for one in self.neighbours.values() if self.protocol.is_open(one.number)]
        self.policy.start(self.now, [one.number for one in opened])
        for one in opened:
            if one.met is None:
                one.met_at = self.now

    def _has_greeted(self, since: float) -> bool:
        """Return whether all neighbours are open that are not quarantined, or enough of them to begin."""
        parting = self.session.parting
        in_graph = self.timetable.neighbours(self.device.peer)
        staying = [j for j in in_graph if not self.neighbours[j].quarantined and j not in parting]
        opened = [self.protocol.is_open(j) for j in staying]
        if all(opened):
            return True

        patience = self.times.start
        if self._resumed or self.session.joins:
            patience = GREETING_SECONDS
        is_late = self.now - since > patience
        return is_late and (any(opened) or self.protocol.round_index >= self.count(self.rounds))

    def wait(self, ready: Callable[[], bool], until: float) -> Program[bool]:
        """Wait for a condition, or up to a moment; meanwhile reset this peer if it has to be."""
        while True:
            self._check_stopped()
            is_ready = yield Wait(
                lambda: self.session.stale is not None or ready(), min(until, self.now + self.times.poll)
            )
            if self.session.stale is not None:
                yield from self.reset()
            elif is_ready or self.now >= until:
                return bool(is_ready)

    def _before(self, round_index: int) -> Program[None]:
        """Wait until a round's steps may be taken: with a model, a quorum, no great lead, and enough weight."""
        if self._must_wait(round_index):
            yield from self._wait_relaying(
                lambda: self.is_leaving or self.is_outdated or not self._must_wait(round_index),
                self.count(round_index),
                every=self.times.retry,
            )
        self.waits_for = ""
        self.session.report(Want.UNKNOWN, self.floor.level)
        if self.exchanges.takes_part(round_index):
            self.session.steps += 1

    def _unreachable(self) -> set[int]:
        members = self.device.members
        left: set[int] = set()
        if members is not None:
            left = {one.number for one in members.members.all if not one.is_present}
        return (self.neighbours.keys() - self.protocol.open_of(self.neighbours)) | left

    def _must_wait(self, round_index: int) -> bool:
        """Return whether a round's steps have to wait, and note for what."""
        network = self.network
        neighbours = self.neighbours
        is_active = self.trainer.is_active(round_index)
        weight = self.weight()

        needed = 0
        if is_active and network.alone == "wait":
            needed = min(network.quorum, len({*self.timetable.neighbours(self.device.peer)} - self.session.parting))
        least = self.session.steps - self._span
        exchanging = [one.met for one in neighbours.values() if one.met is not None and one.met > least]
        self.is_alone = bool(needed) and (len(exchanging) < needed or max(exchanging) < self.session.steps)
        lacks_weight = self.floor.lacks(weight, self.now)

        rounds = dict[int, int]()
        boots = dict[int, int]()
        for j, one in neighbours.items():
            if self.is_up(one):
                rounds[j] = self.round_of(max(one.reached_round, one.stepped))
                if one.boot is not None:
                    boots[j] = one.boot
        slowest = self._pace.slowest(round_index, rounds, boots)

        # Noted in one assignment: a status page reads it at any moment, from another thread.
        reason = ""
        if self.is_joining or weight <= 0:
            reason = "a model of a neighbour"
        elif self.is_alone:
            reason = f"{needed} of its neighbours to exchange with it"
        elif slowest is not None:
            reason = f"peer {slowest}, which is in round {rounds[slowest]}"
        elif lacks_weight and is_active:
            reason = f"shares of its neighbours, for its push-sum weight {weight:.2g} is below {self.floor.value:.2g}"
        self.waits_for = reason
        return bool(reason)

    def is_up(self, known: Neighbour, at_the_end: bool = False) -> bool:
        """Return whether a neighbour exchanges with this peer; `at_the_end` also whether it greets, its rounds done."""
        last = known.met_at
        if at_the_end and known.round_index >= self.count(self.rounds):
            last = max(known.heard_at, last)
        if known.quarantined or known.number in self.session.parting:
            return False
        if not (at_the_end or self.protocol.is_open(known.number)):
            return False
        return self.now - last < max(self.times.deadline, self.policy.patience)

    def turn(self, round_index: int, at: int) -> Turn:
        """Return this peer's part in an exchange."""
        return self.timetable.turn(self.device.peer, self.timetable.place(round_index, at))

    def _wait_relaying(
        self,
        ready: Callable[[], bool],
        count: int,
        every: float | None = None,
        saved: int | None = None,
        gathering: float = 0.0,
    ) -> Program[None]:
        """Wait for a condition; meanwhile acknowledge and relay what comes, see `_relay`, and mix without steps.

        Args:
            ready: the condition.
            count: how many exchanges this peer has done.
            every: seconds between two times that it mixes with all neighbours; None for never. It does so at once if no
                neighbour has exchanged with this process yet, or if it can only wait for what it begins itself.
            saved: see `_relay`.
            gathering: seconds that what came first waits for the rest, so that one write to the disk does for all.
        """
        has_met_some = any(one.met is not None for one in self.neighbours.values())
        due = self.now
        if every is not None and has_met_some:
            due += every

        while not ready():
            if gathering and self.exchanges.has_news(count):
                yield from self.wait(ready, self.now + gathering)
            self.exchanges.adopt()
            yield from self._relay(count, saved)
            if every is not None and (self.now >= due or self.can_begin()):
                yield from self.exchanges.mix_meanwhile(count)
                due = self.now + every
                every = min(2 * every, self.times.rest)  # the more often it has mixed, the less there is to mix
            self._check_left()
            self.check_standstill()
            yield from self.wait(lambda: self.exchanges.has_news(count) or ready(), self.now + self.times.poll)
        yield from self._relay(count, saved)  # before others wait for an acknowledgement while this peer works

    def _relay(self, count: int, saved: int | None = None) -> Program[bool]:
        """Take part in the mixing of neighbours that are behind this peer; return whether there was some.

        Args:
            count: how many exchanges this peer has done.
            saved: how many the store is to say; by default as many.
        """
        if self.session.stale is not None:
            yield from self.reset()
        return (yield from self.exchanges.relay(count, count if saved is None else saved))

    def _check_left(self) -> None:
        """Give up if all neighbours are done and gone."""
        left = [
            one.number in self.session.parting
            or (one.reached_round >= self.count(self.end) and not self.protocol.is_open(one.number))
            for one in map(self.neighbours.__getitem__, self.timetable.neighbours(self.device.peer))
        ]
        if self.state.round_index < self.rounds and all(left):
            self.trainer.finish(self._trained)
            raise NotAgreedError(
                f"all neighbours of peer {self.device.peer} are done and have left, and it is in round "
                f"{self.state.round_index} of {self.rounds}: its model is its own; take that of another device",
                code="network.not-agreed",
            )

    def weight(self) -> float:
        """Return this peer's push-sum weight; 1 if it has none."""
        return float(self.protocol.mass["w"]) if "w" in self.protocol.mass else 1.0

    def _uninformed(self, count: int) -> list[int]:
        """Return the neighbours that may soon wait for this peer, as they have not heard how far it is."""
        lead = self.network.lead
        if lead is None:
            return []
        most = max(1, lead - 1) * self.exchanges.per_round

        # A neighbour will wait if it is far ahead of what it knows of this peer, or if this peer has gone far since.
        # One to which an answer is held back hears it after the next commit.
        news = [one for one in self.neighbours.values() if one.reported_to < count and not one.answering]
        far = [one.number for one in news if max(count, one.reached_round) - one.reported_to >= most]
        return [j for j in far if self.protocol.is_open(j)]

    def behind(self, neighbors: Iterable[int], count: int) -> list[int]:
        """Return which of some neighbours have not done as many exchanges."""
        return [j for j in neighbors if self.neighbours[j].reached_round < count]

    def is_under_way(self) -> bool:
        """Return whether something is on its way to a neighbour that is up, or came and is not acknowledged."""
        protocol = self.protocol
        opened = [one for one in self.neighbours.values() if protocol.is_open(one.number)]
        sent = any(protocol.owes(one.number) or one.queue.rows for one in opened)
        return sent or bool(protocol.waiting_rounds() or protocol.uncommitted())

    def can_begin(self) -> bool:
        """Return whether this peer waits for a quorum and nothing is under way, so that it must begin an exchange."""
        if not self.is_alone or self.weight() <= TINY:
            return False
        ready = [j for j in self.timetable.receivers_ever(self.device.peer) if self.protocol.is_ready(j)]
        met = [self.neighbours[j].met for j in ready]
        has_unmet = any(step is None or step < self.session.steps for step in met)
        return has_unmet and not self.is_under_way()

    # --- exchanges ---

    def await_neighbours(self, wanted: Collection[int], has_come: Callable[[int], bool], until: float) -> Program[None]:
        """Wait for those of some neighbours that the straggler policy waits for, up to a moment."""
        began = self.now
        awaited = self.policy.on_time.intersection(wanted)

        def all_came() -> bool:
            return all(map(has_come, self.protocol.open_of(awaited)))

        yield from self.wait(all_came, until)
        self.waited += self.now - began

    def await_senders(
        self,
        wanted: Collection[int],
        has_come: Callable[[int], bool],
        is_past: Callable[[int], bool] | None = None,
        acknowledge: Callable[[], Program[bool]] | None = None,
    ) -> Program[None]:
        """Wait for what some neighbours send, as long as the straggler policy says, and tell it who was there.

        Args:
            wanted: the neighbours.
            has_come: whether a neighbour's part has come.
            is_past: whether a neighbour has passed this exchange, so that nothing will come from it.
            acknowledge: acknowledges what came of other exchanges, and returns whether there was any. Until that is
                done, a neighbour that sent such a thing sends nothing more, and is not waited for.
        """
        until = self.now + self.policy.patience

        def is_over(j: int) -> bool:
            waits_for_answer = acknowledge is not None and j in self.protocol.waiting_rounds()
            return waits_for_answer or has_come(j) or (is_past is not None and is_past(j))

        while True:
            yield from self.await_neighbours(set(wanted) - self.late, is_over, until)
            if acknowledge is None or not (yield from acknowledge()):
                break

        # What a neighbour that lags behind sends is of a round before this one, but shows that it is there.
        new = self.session.senders(self.state.at)
        there = {neighbor for neighbor in wanted if has_come(neighbor) or neighbor in new}
        self.policy.end(self.now, there, set(wanted) - there, self.waited, self.session.message_seconds())

    def begin_exchange(self) -> None:
        """Record the beginning of an exchange, for the straggler policy."""
        self.waited = 0.0
        reached = {j: one.reached for j, one in self.neighbours.items() if one.reached is not None}
        self.policy.begin(reached)

    def _exchange(self, exchange: Exchange) -> Program[None]:
        if self.state.round_index >= self.rounds:
            yield from self._exchange_finally(exchange)
        else:
            yield from self.exchanges.perform(exchange)

    # --- the end ---

    @staticmethod
    def more_final_rounds(final: int) -> int:
        """See RunningPeer: if some peers are gone, over the others alone the graph takes longer to agree."""
        return 2 * final + 8

    def _mix_finally(self) -> Program[None]:
        """See RunningPeer; the distances are those of the last round in which there was something to compare."""
        before = self.distances
        yield from super()._mix_finally()
        if not self.distances:
            for j, distance in before.items():
                self.neighbours[j].distance = distance

    def shortcoming(self) -> str | None:
        if self.state.round_index >= self.end and self.final and not self.distances:
            return (
                "none of its neighbours took part in final mixing with it, so its model is its own; take that of "
                "another device"
            )
        return super().shortcoming()

    def _exchange_finally(self, exchange: Exchange) -> Program[None]:
        """Exchange in a round of final mixing, and wait for all neighbours that are up."""
        k = self.state.round_index
        self.waits_for = f"its neighbours in round {k - self.rounds + 1} of final mixing"
        yield from self.exchanges.perform_finally(exchange, self.turn(k, self.state.at))

        # All rounds of a period of the graph have to agree: in a single one a peer may hear only one neighbour.
        period = self.mixing.topology.period
        distances = self.distances
        if distances and max(distances.values()) <= AGREE:
            self._agreed.add(k % period if period else k)
        elif distances:
            self._agreed.clear()

        agrees = len(self._agreed) >= (period or self.final)
        has_mixed_enough = k + 1 >= self.rounds + self.final
        if k + 1 == self.end or (has_mixed_enough and agrees):
            self.state.round_index = self.end - 1  # so that no round follows this one
            self.waits_for = ""

    def await_finally(self, wanted: Collection[int], has_come: Callable[[int], bool], saved: int) -> Program[None]:
        """Wait for what some neighbours send in a round of final mixing, as long as they are up.

        A neighbour that greets and sends nothing is given up after `times.start` seconds, for good.

        Args:
            wanted: the neighbours.
            has_come: whether a neighbour's part has come.
            saved: how many exchanges the store says meanwhile, see `commit`.
        """
        until = self.now + self.times.start

        def ready() -> bool:
            missing = [self.neighbours[j] for j in wanted if not has_come(j)]
            awaited = [one for one in missing if not one.is_given_up and self.is_up(one, at_the_end=True)]
            if self.now > until:
                for one in awaited:
                    one.is_given_up = True
            return all(one.is_given_up for one in awaited)

        # As long as a message takes: a round of final mixing lasts two or three of these.
        gathering = min(self.session.message_seconds(), self.times.retry)
        yield from self._wait_relaying(ready, self.count(self.rounds), saved=saved, gathering=gathering)

    def _leave(self) -> Program[None]:
        """Relay for neighbours that are not done, and stay until all of them know all that they need.

        If only such are left that cannot be reached, or that are done, leave after `times.deadline` seconds.
        """
        end = self.count(self.end)
        yield from self.commit(end, self.neighbours)
        lost = self.now
        while not self.is_stopping:
            self.check_graph()
            if self.is_leaving:
                yield from self._part()
                break
            waiting = [j for j in self.neighbours if not self._is_over(j)]
            if self.protocol.open_of(self.behind(waiting, end)):
                lost = self.now
            if not waiting or self.now - lost > self.times.deadline:
                break
            has_relayed = yield from self._relay(end, end)
            if not has_relayed:
                yield Wait(self._something_came, self.now + self.times.poll, despite_problems=True)

    def _something_came(self) -> bool:
        """Return whether there may be something to relay, or a neighbour may be done."""
        if self.session.stale is not None or self.exchanges.has_news(self.count(self.end)):
            return True
        return all(map(self._is_over, self.neighbours))

    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and has all that this peer owes it or has left; or is quarantined."""
        known = self.neighbours[neighbor]
        if known.quarantined:
            return True
        if neighbor in self.session.parting:
            return self.session.has_parted(neighbor) or self.session.is_lost(neighbor)
        if neighbor not in self.timetable.neighbours(self.device.peer) and not self.protocol.owes(neighbor):
            return True
        end = self.count(self.end)
        if known.round_index < end:
            return False
        is_informed = self.session.is_informed(neighbor, end) and not self.protocol.owes(neighbor)
        return is_informed or self.session.is_lost(neighbor)
