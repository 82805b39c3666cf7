"""How an asynchronous peer does push-sum: shares of its mass, each added exactly once.

A round's exchange: wait until each receiver has acknowledged its last share, freeze one for each, commit, send, wait a
moment for the senders of this round, and add what came. What is frozen is subtracted in the same commit, so mass is
lost and doubled nowhere. Beside that a peer gives weight to neighbours that wait for some, and keeps its own above
`WeightFloor`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flower_privdec.core import Exchange
from flower_privdec.peer.asynchronous_session import ShareSession
from flower_privdec.peer.driving import Program
from flower_privdec.peer.pace import TINY, TOKEN, Want
from flower_privdec.pushsum.exactly_once import FrozenShare
from flower_privdec.pushsum.lockstep import Turn

if TYPE_CHECKING:
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

    def usual_weight(self) -> float:
        """Return the least weight that the peer would have if all were as fast and no weight were lost."""
        peer = self._peer
        if "w" not in peer.protocol.mass:
            return 0.0
        if peer.first_weight != 1:  # numbers of examples, whose sum no peer knows
            return peer.weight()

        return float(peer.plan.least_weights[peer.device.peer])

    def is_sent_in(self, round_index: int) -> bool:
        """Return whether something is sent in a round."""
        return self._peer.is_due(round_index)

    # --- a round ---

    def perform(self, exchange: Exchange) -> Program[None]:
        """Perform a round's exchange."""
        peer = self._peer
        k = peer.state.round_index
        has_split = peer.take_split()
        if peer.is_due(k):
            peer.begin_exchange()
            yield from self._push(k, has_split)
        else:
            self.absorb()
        peer.state.at = peer.state.at + 1
        peer.state.waiting = False
        yield from self._settle()

    def _push(self, round_index: int, has_split: bool) -> Program[None]:
        """Send shares, commit, and add those that come.

        `has_split` is whether the shares are in the store already, from before a restart.
        """
        peer = self._peer
        protocol = peer.protocol
        turn = peer.turn(round_index, peer.state.at)
        outgoing: Mapping[int, float] = turn.weights
        incoming = turn.senders
        others = [j for j in peer.timetable.receivers_ever(peer.device.peer) if protocol.is_open(j)]
        if outgoing and others and not any(map(protocol.is_open, outgoing)):
            # Its receivers are down: others get their part.
            outgoing = dict.fromkeys(others, sum(outgoing.values()) / len(others))

        peer.late = set[int]()
        if not has_split:
            peer.late = yield from self._make_ready(outgoing, set(outgoing) - incoming)
            self.split(round_index, outgoing)
            yield from peer.commit(round_index + 1, peer.uninformed(round_index + 1) | {*outgoing})

        def has_come(j: int) -> bool:
            known = peer.neighbours[j]
            return known.sent_since or j in protocol.waiting_rounds() or known.reached_round > round_index

        yield from peer.await_senders(incoming, has_come)
        self.absorb()
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
            return protocol.is_ready(j) or bool(protocol.waiting_rounds())

        while True:
            yield from peer.await_neighbours(receivers, may_go_on, until)
            late = {j for j in receivers if not protocol.is_ready(j)}
            pays = any(map(protocol.is_open, late & peer.policy.on_time))
            if not (pays and peer.now < until and protocol.waiting_rounds()):
                break
            self.absorb()
            yield from peer.commit(peer.state.round_index)
        peer.policy.note(set(unheard) - late, late & set(unheard))
        return late

    def _settle(self) -> Program[None]:
        """Commit once more if an edge is used again in the next round, which has to be acknowledged before."""
        peer = self._peer
        following = peer.state.round_index + 1
        is_due = following < peer.rounds and peer.is_due(following)
        if is_due and peer.protocol.uncommitted() & peer.turn(following, peer.state.at - 1).senders:
            yield from peer.commit(following)

    def split(self, round_index: int, weights: Mapping[int, float], keeping: bool = True) -> None:
        """Freeze shares; `keeping`, their weights are scaled down if less than the floor would be left."""
        peer = self._peer
        if keeping:
            weights = peer.floor.parts(peer.weight(), weights)
        elif peer.weight() <= TINY:
            weights = {}

        # Of what a coarse codec tells late less may leave.
        damping = peer.arithmetic.damping
        if damping < 1:
            weights = {j: weight * damping for j, weight in weights.items()}
        peer.protocol.split(round_index, weights)

    def absorb(self) -> None:
        """Add the shares that came to the mass; in final mixing none of a later round than this peer's."""
        peer = self._peer
        k = peer.state.round_index
        is_final = k >= peer.rounds
        own = None
        if is_final and peer.protocol.mass:
            own = peer._model(peer.protocol.mass).clone()

        models = dict[int, Mapping[str, Tensor]]()  # of final mixing, by their senders

        def keep(share: FrozenShare[Tensor], parts: Mapping[str, Tensor]) -> None:
            if own is not None and peer.rounds <= share.round_index:
                models[share.sender] = parts

        def judged(share: FrozenShare[Tensor], parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            if peer.robust is None:
                return parts
            received = {share.sender: parts}
            return peer.robust.judge(peer.state.edges, peer.device.peer, peer.protocol.mass, received)[share.sender]

        absorbed = peer.protocol.absorb(k if is_final else None, peer.first_weight, keep, judged)
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
        k = peer.state.round_index
        if not peer.take_split():
            if peer.protocol.uncommitted():
                yield from peer.commit(k)
            yield from peer.await_finally(turn.receivers, peer.protocol.is_ready, k)
            self.split(k, turn.weights, keeping=False)
            yield from peer.commit(k + 1, peer.neighbours)

        def has_come(j: int) -> bool:
            return peer.neighbours[j].last_added >= k or peer.protocol.has_passed(j, k)

        yield from peer.await_finally(turn.senders, has_come, k + 1)
        self.absorb()

    # --- while the peer waits ---

    def adopt(self) -> None:
        """See RowExchange: in push-sum the model comes with the first share."""

    def has_news(self, round_index: int) -> bool:
        """Return whether there is something to relay or to report."""
        is_wanted = self._lacking_weight() or self._is_stuck() or self._peer.session.has_report()
        return bool(self._addable() or is_wanted or self._peer.can_begin())

    def mix_meanwhile(self, round_index: int) -> Program[None]:
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
            self.split(max(0, round_index - 1), each, keeping=part > TOKEN)
        yield from peer.commit(round_index, peer.neighbours)

    def relay(self, round_index: int, saved: int) -> Program[bool]:
        """Add shares that came, give some to those that are behind or wait for weight, and report what is lacking."""
        peer = self._peer
        waiting = self._addable()
        lacking = self._lacking_weight()
        if waiting or lacking or peer.protocol.uncommitted():
            self.absorb()
            receivers = dict.fromkeys(lacking, (1 - KEPT) / max(1, len(lacking)))
            behind = peer.behind(waiting, round_index)
            if behind:
                (at,) = peer.timetable.exchanges
                column = peer.turn(min(waiting[j] for j in behind), at).weights
                receivers = {j: column[j] for j in peer.behind(column, round_index)} or receivers
            self.split(max(0, round_index - 1), receivers, keeping=round_index < peer.rounds)
            yield from peer.commit(saved, peer.uninformed(saved) | {*receivers})
        self.report_want(round_index)
        return bool(waiting or lacking)

    def report_want(self, round_index: int) -> None:
        """Report what the peer lacks of weight, and sink its floor if nobody has any to spare."""
        peer = self._peer
        want = peer.floor.want(peer.weight(), peer.is_under_way())
        if want and round_index < peer.rounds:
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
        k = self._peer.state.round_index
        if k < self._peer.rounds:
            return waiting
        return {j: sent for j, sent in waiting.items() if sent <= k}

    def _lacking_weight(self) -> list[int]:
        """Return the neighbours that wait for weight and can be sent some, if this peer has some to spare.

        A peer whose rounds are done takes no step at x / w any more, and its model stays what it is, whatever part of
        its mass it gives away: it keeps nothing for itself while somebody is behind.
        """
        peer = self._peer
        receivers = peer.timetable.receivers_ever(peer.device.peer)
        waiting = [j for j in receivers if peer.neighbours[j].want == Want.WAITS and peer.protocol.is_ready(j)]
        is_done = peer.state.round_index >= peer.rounds
        if not is_done and peer.floor.want(peer.weight(), under_way=False):
            return []
        if peer.weight() <= TINY:
            return []
        return waiting

    def _is_stuck(self) -> bool:
        """Return whether neither this peer nor a neighbour that is up has weight to spare, so that its floor sinks."""
        peer = self._peer
        up = [one for one in peer.neighbours.values() if peer.is_up(one, at_the_end=True)]
        return peer.floor.is_stuck(peer.session.want, [(one.want, one.level) for one in up])
