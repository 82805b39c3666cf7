"""How an asynchronous peer does push-sum: shares of its mass, each added exactly once.

An exchange: wait until each receiver has acknowledged its last share, freeze one for each, commit, send, wait a
moment for the senders of this exchange, and add what came. What is frozen is subtracted in the same commit, so mass is
lost and doubled nowhere. A round has one exchange or several (`topology.mixing_steps`), each with the next graph of the
sequence; a share that comes too late for its exchange is added in the next one, whichever that is. Beside that a peer
gives weight to neighbours that wait for some, and keeps its own above `WeightFloor`.

How far a peer is, in its shares, hellos and checkpoints, is counted by exchanges (`AsynchronousPeer.count`): with one a
round these are its rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

from flower_privdec.core import Exchange
from flower_privdec.peer.asynchronous_session import ShareSession
from flower_privdec.peer.driving import Program
from flower_privdec.peer.pace import TINY, TOKEN, Want
from flower_privdec.pushsum.exactly_once import FrozenShare
from flower_privdec.pushsum.lockstep import Turn

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.peer.asynchronous import AsynchronousPeer

KEPT = 0.5  # of its weight: what a peer keeps when it mixes while it waits


class ShareExchange:
    """Exchanges of one peer by shares.

    Args:
        peer: whose they are.
    """

    session_class: ClassVar[type[ShareSession]] = ShareSession

    def __init__(self, peer: AsynchronousPeer) -> None:
        self._peer = peer
        self.per_round = len(peer.timetable.exchanges)  # see `AsynchronousPeer.count`

    def usual_weight(self) -> float:
        """Return the least weight that the peer would have if all were as fast and no weight were lost."""
        peer = self._peer
        if "w" not in peer.protocol.mass:
            return 0.0
        if peer.first_weight != 1:  # numbers of examples, whose sum no peer knows
            return peer.weight()

        return float(peer.plan.least_weights[peer.device.peer])

    def takes_part(self, round_index: int) -> bool:
        """Return whether the peer sends something in a round, or is sent something."""
        before = self._peer.count(round_index)
        turns = [self._turn(count) for count in range(before, before + self.per_round)]
        return self._peer.is_due(round_index) and any(turn.senders or turn.receivers for turn in turns)

    # --- a round ---

    def perform(self, exchange: Exchange) -> Program[None]:
        """Perform one of a round's exchanges."""
        peer = self._peer
        k = peer.state.round_index
        has_split = peer.take_split()
        if peer.is_due(k):
            peer.begin_exchange()
            yield from self._push(has_split)
        else:
            self.absorb(early=False)
        peer.state.at = peer.state.at + 1
        peer.state.waiting = False
        yield from self._settle()

    def _turn(self, count: int, peer: int | None = None) -> Turn:
        """Return the part of the peer, or of another, in the exchange after as many others."""
        if peer is None:
            peer = self._peer.device.peer
        return self._peer.timetable.turn(peer, self._peer.place_of(count))

    def _outgoing(self, count: int) -> dict[int, float]:
        """Return which parts of its mass the peer sends in an exchange, by receiver.

        A receiver that is down is passed over: what it was to get goes to those to which it would have sent, so that
        these hear somebody, and the peers that are left mix as a smaller graph of the same kind. If none of them can
        be reached, all others share it.
        """
        peer = self._peer
        me = peer.device.peer
        weights = self._turn(count).weights
        others = peer.open_of(peer.timetable.receivers_ever(me))
        outgoing = {j: weight for j, weight in weights.items() if j in others}
        for down in weights.keys() - outgoing.keys():
            onward = self._turn(count, down).weights
            reached = onward.keys() & {me, *others}
            if not reached:
                reached = {*others}
                onward = dict.fromkeys(sorted(others), 1.0)
            whole = sum(onward.values())
            for j in sorted(reached - {me}):
                outgoing[j] = outgoing.get(j, 0.0) + weights[down] * onward[j] / whole
        return outgoing

    def _incoming(self, count: int) -> set[int]:
        """Return who sends to the peer in an exchange, see `_outgoing`."""
        peer = self._peer
        me = peer.device.peer
        incoming = self._turn(count).senders
        for down in incoming - peer.open_of(incoming):
            behind = self._turn(count, down).senders - {me}
            passing = {j for j in behind & peer.neighbours.keys() if me in peer.timetable.receivers_ever(j)}
            incoming = (incoming | passing) - {down}
        return incoming

    def _push(self, has_split: bool) -> Program[None]:
        """Send shares, commit, and add those that come.

        `has_split` is whether the shares are in the store already, from before a restart.
        """
        peer = self._peer
        protocol = peer.protocol
        here = peer.here
        outgoing = self._outgoing(here)
        incoming = self._incoming(here)
        peer.late = set[int]()
        if not has_split:
            peer.late = yield from self._make_ready(outgoing, set(outgoing) - incoming)
            self.split(here, outgoing)
            yield from peer.commit(here + 1, outgoing)

        def has_come(j: int) -> bool:
            """Return whether a share of this exchange has come, or one at all of a neighbour that is a round behind."""
            known = peer.neighbours[j]
            last = protocol.waiting_rounds().get(j, known.last_added)
            if last >= here or protocol.has_passed(j, here):
                return True
            is_behind = self.per_round == 1 or known.reached_round < here - self.per_round
            return is_behind and (known.sent_since or j in protocol.waiting_rounds())

        def acknowledge() -> Program[bool]:
            """Add shares that are late: their senders have another one for this exchange, which waits for that."""
            held = protocol.waiting_rounds()
            is_late = any(held.get(j, here) < here for j in incoming)
            if is_late:
                self.absorb(early=False)
                yield from peer.commit(here + 1)
            return is_late

        if self.per_round == 1:  # what is late counts
            yield from peer.await_senders(incoming, has_come)
        else:
            yield from peer.await_senders(incoming, has_come, acknowledge=acknowledge)
        self.absorb(early=False)
        for j in incoming:
            peer.neighbours[j].sent_since = False

    def _make_ready(self, receivers: Collection[int], unheard: Collection[int]) -> Program[set[int]]:
        """Wait until shares can be sent, and acknowledge meanwhile what others wait for the same way.

        `unheard` send nothing in this exchange, so that being on time shows only here. Returns those not ready.
        """
        peer = self._peer
        protocol = peer.protocol
        until = peer.now + peer.policy.patience

        def may_go_on(j: int) -> bool:
            return protocol.is_ready(j) or bool(self._in_time())

        while True:
            yield from peer.await_neighbours(receivers, may_go_on, until)
            late = {j for j in receivers if not protocol.is_ready(j)}
            pays = bool(protocol.open_of(late & peer.policy.on_time))
            if not (pays and peer.now < until and self._in_time()):
                break
            self.absorb(early=False)
            yield from peer.commit(peer.here)
        peer.policy.note(set(unheard) - late, late & set(unheard))
        return late

    def _settle(self) -> Program[None]:
        """Commit once more if an edge is used again in the next exchange, which has to be acknowledged before."""
        peer = self._peer
        following = peer.here
        round_index = peer.round_of(following)
        is_due = round_index < peer.rounds and peer.is_due(round_index)
        if is_due and peer.protocol.uncommitted() & self._incoming(following):
            yield from peer.commit(following)

    def split(self, count: int, weights: Mapping[int, float], keeping: bool = True) -> None:
        """Freeze shares; `keeping`, their weights are scaled down if less than the floor would be left.

        `count` is how far the peer is.
        """
        peer = self._peer
        weights = {j: weight for j, weight in weights.items() if j not in peer.session.parting}
        if keeping:
            weights = peer.floor.parts(peer.weight(), weights)
        elif peer.weight() <= TINY:
            weights = {}

        # Of what a coarse codec tells late less may leave.
        damping = peer.arithmetic.damping
        if damping < 1:
            weights = {j: weight * damping for j, weight in weights.items()}
        peer.protocol.split(count, weights)

    def _in_time(self) -> set[int]:
        """Return the senders of shares that came for this exchange, or too late for an earlier one.

        Several exchanges of a round reach the mean in their order: what comes early waits for its own, unless it is so
        early that the others are in another round.
        """
        waiting = self._peer.protocol.waiting_rounds()
        here = self._peer.here
        earliest = max(waiting.values(), default=here)
        if self.per_round == 1 or earliest > here + self.per_round:
            return {*waiting}
        return {j for j, sent in waiting.items() if sent <= here}

    def absorb(self, early: bool = True) -> None:
        """Add the shares that came to the mass; in final mixing none of a later round than this peer's.

        `early` is whether those of later exchanges count too, see `_in_time`.
        """
        peer = self._peer
        first_final = peer.count(peer.rounds)
        is_final = peer.here >= first_final
        own = None
        if is_final and peer.protocol.mass:
            own = peer._model(peer.protocol.mass).clone()

        models: dict[int, Mapping[str, Tensor]] = {}  # of final mixing, by their senders

        def keep(share: FrozenShare[Tensor], parts: Mapping[str, Tensor]) -> None:
            if share.round_index >= first_final:
                models[share.sender] = parts

        def judged(share: FrozenShare[Tensor], parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            assert peer.robust is not None
            received = {share.sender: parts}
            return peer.robust.judge(peer.state.edges, peer.device.peer, peer.protocol.mass, received)[share.sender]

        up_to = None
        if is_final or (not early and self._in_time() != peer.protocol.waiting_rounds().keys()):
            up_to = peer.here
        on_added = None if own is None else keep
        judge = None if peer.robust is None else judged
        absorbed = peer.protocol.absorb(up_to, peer.first_weight, on_added, judge)
        if absorbed and peer.first_weight != 1:
            peer.floor.usual = peer.weight()
        for share in absorbed:
            known = peer.neighbours[share.sender]
            known.sent_since = True
            known.last_added = share.round_index
        if own is not None:
            peer._measure(models, own)

    # --- final mixing ---

    def perform_finally(self, exchange: Exchange, turn: Turn) -> Program[None]:
        """Perform the exchange of a round of final mixing."""
        peer = self._peer
        here = peer.here
        if not peer.take_split():
            if peer.protocol.uncommitted():
                yield from peer.commit(here)
            yield from peer.await_finally(turn.receivers, peer.protocol.is_ready, here)
            self.split(here, turn.weights, keeping=False)
            yield from peer.commit(here + 1, peer.neighbours)

        def has_come(j: int) -> bool:
            """Return whether a share of this exchange has come; one that is held is added when all have."""
            last = peer.protocol.waiting_rounds().get(j, peer.neighbours[j].last_added)
            return last >= here or peer.protocol.has_passed(j, here)

        yield from peer.await_finally(turn.senders, has_come, here + 1)
        self.absorb()

    # --- a peer that leaves for good ---

    def part(self, neighbor: int) -> None:
        """Give a neighbour that leaves no share any more; what it hands over is added like any share."""
        self._peer.session.part(neighbor)

    def hand_over(self) -> Program[None]:
        """Give all mass to neighbours, and what still comes from them too, until nothing does any more.

        A neighbour that has learned of it says, in its hellos, when its last share was taken. One that cannot be
        reached for `network.deadline` may hold a share for this peer, which is lost then, as with any that is gone.
        """
        peer = self._peer
        session = peer.session
        protocol = peer.protocol
        count = peer.here
        peer.first_weight = 0.0  # what comes is no new beginning
        if not peer.arithmetic.is_exact:
            _log.warning(
                "peer %d leaves without handing its part over, for network.codec does not send all of it: it is gone "
                "with what it holds",
                peer.device.peer,
            )
            return

        lost = peer.now
        talked = peer.now
        while True:
            protocol.absorb()
            given = self._takers()
            if given:
                protocol.hand_over(max(0, count - 1), given)
            if given or protocol.uncommitted():
                yield from peer.commit(count, given)

            waiting = [j for j, one in peer.neighbours.items() if not (one.quarantined or session.has_parted(j))]
            is_empty = peer.weight() <= 0 and not any(map(protocol.owes, protocol.open_of(peer.neighbours)))
            if is_empty and not waiting:
                break
            if peer.weight() > 0 and not self._staying():
                text = "peer %d leaves with what it holds: no neighbour is left that could take it over"
                _log.warning(text, peer.device.peer)
                break
            if protocol.open_of(waiting):
                lost = peer.now
            if not is_empty:
                talked = peer.now
            if is_empty and (peer.now - lost > peer.times.deadline or peer.now - talked > peer.times.start):
                text = "peer %d leaves without a word of peers %s, which may hold a share for it"
                _log.warning(text, peer.device.peer, waiting)
                break
            peer.check_standstill()
            yield from peer.wait(self._has_parting_news, peer.now + peer.times.poll)

        # That all was taken is on disk too, so that it is not sent again. The others need not call it any more.
        yield from peer.commit(count)
        for j in peer.neighbours:
            session.part(j)
        until = peer.now + peer.times.retry
        yield from peer.wait(lambda: all(peer.neighbours[j].has_told for j in protocol.open_of(peer.neighbours)), until)

    def _takers(self) -> list[int]:
        """Return who can be given a part of what this peer holds, if it holds some: anybody, if no receiver is up.

        Others that leave too are given none.
        """
        peer = self._peer
        if peer.weight() <= 0:
            return []
        up = peer.open_of(peer.timetable.receivers_ever(peer.device.peer)) or peer.open_of(peer.neighbours)
        return [j for j in sorted(up) if peer.protocol.is_ready(j)]

    def _has_parting_news(self) -> bool:
        """Return whether something came, or can be given, or nothing is left to wait for."""
        peer = self._peer
        if peer.protocol.waiting_rounds() or self._takers():
            return True
        if peer.weight() > 0:
            return not self._staying()
        return all(peer.session.has_parted(j) for j, one in peer.neighbours.items() if not one.quarantined)

    def _staying(self) -> list[int]:
        """Return the neighbours that may take something over, now or once they are back."""
        peer = self._peer
        end = peer.count(peer.end)
        staying = []
        for j, one in peer.neighbours.items():
            has_ended = one.reached_round >= end and not peer.protocol.is_open(j)
            if not (one.quarantined or j in peer.session.parting or has_ended):
                staying.append(j)
        return staying

    # --- while the peer waits ---

    def adopt(self) -> None:
        """See RowExchange: in push-sum the model comes with the first share."""

    def has_news(self, count: int) -> bool:
        """Return whether there is something to relay or to report."""
        is_wanted = self._lacking_weight() or self._is_stuck() or self._peer.session.has_report()
        return bool(self._addable() or is_wanted or self._peer.can_begin())

    def mix_meanwhile(self, count: int) -> Program[None]:
        """Send shares to all neighbours, without a step.

        A peer without weight to spare that needs an exchange sends a token: nobody waits for nothing.
        """
        peer = self._peer
        receivers = peer.timetable.receivers_ever(peer.device.peer)
        self.absorb()
        has_to_spare = not peer.floor.want(peer.weight(), under_way=False)
        part = 1 - KEPT
        if not has_to_spare and peer.is_alone:
            part = TOKEN
        if receivers:
            each = dict.fromkeys(receivers, part / len(receivers))
            self.split(max(0, count - 1), each, keeping=part > TOKEN)
        yield from peer.commit(count, peer.neighbours)

    def relay(self, count: int, saved: int) -> Program[bool]:
        """Add shares that came, give some to those that are behind or wait for weight, and report what is lacking."""
        peer = self._peer
        waiting = self._addable()
        lacking = self._lacking_weight()
        if waiting or lacking or peer.protocol.uncommitted():
            self.absorb()
            receivers = dict.fromkeys(lacking, (1 - KEPT) / max(1, len(lacking)))
            behind = peer.behind(waiting, count)
            is_done = count >= peer.count(peer.rounds)
            if behind:
                column = self._turn(min(waiting[j] for j in behind)).weights
                receivers = {j: column[j] for j in peer.behind(column, count)} or receivers
            self.split(max(0, count - 1), receivers, keeping=not is_done)
            yield from peer.commit(saved, receivers)
        self.report_want(count)
        return bool(waiting or lacking)

    def report_want(self, count: int) -> None:
        """Report what the peer lacks of weight, and sink its floor if nobody has any to spare."""
        peer = self._peer
        want = peer.floor.want(peer.weight(), peer.is_under_way())
        if want and count < peer.count(peer.rounds):
            want = Want.WAITS if peer.is_alone else want
        elif want:
            want = Want.NOTHING_TO_SPARE  # final mixing takes any weight
        peer.session.report(want, peer.floor.level)
        if self._is_stuck():
            peer.floor.sink()
            peer.session.report(Want.UNKNOWN, peer.floor.level)

    def _addable(self) -> dict[int, int]:
        """Return the round of each neighbour's share that may be added now: in final mixing none that is ahead."""
        waiting = self._peer.protocol.waiting_rounds()
        if self._peer.state.round_index < self._peer.rounds:
            return waiting
        return {j: sent for j, sent in waiting.items() if sent <= self._peer.here}

    def _lacking_weight(self) -> list[int]:
        """Return the neighbours that wait for weight and can be sent some, if this peer has some to spare.

        A peer whose rounds are done takes no step at x / w any more, and its model stays what it is, whatever part of
        its mass it gives away: it keeps nothing for itself while somebody is behind.
        """
        peer = self._peer
        receivers = peer.timetable.receivers_ever(peer.device.peer)
        waiting = [j for j in receivers if peer.neighbours[j].want == Want.WAITS and peer.protocol.is_ready(j)]
        waiting = [j for j in waiting if j not in peer.session.parting]
        is_done = peer.state.round_index >= peer.rounds
        if not is_done and peer.floor.want(peer.weight(), under_way=False):
            return []
        if peer.weight() <= TINY:
            return []
        return waiting

    def _is_stuck(self) -> bool:
        """Return whether neither this peer nor a neighbour that is up has weight to spare, so that its floor sinks."""
        peer = self._peer
        if peer.session.want == Want.UNKNOWN:
            return False  # as nearly always; who is up takes longer to find out

        up = [one for one in peer.neighbours.values() if peer.is_up(one, at_the_end=True)]
        return peer.floor.is_stuck(peer.session.want, [(one.want, one.level) for one in up])
