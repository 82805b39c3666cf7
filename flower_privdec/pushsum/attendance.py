"""Whom a peer shares noise with in a round: each decides for itself, by how far it knows the others to be.

A pair's noise is gone from the sum once both ends have taken the step. Whoever is gone takes no more steps, so noise
that others go on sharing with it stays in the sum for good. No agreement is needed to leave it out: a peer accounts for
its own noise and that of its partners in the step (`privacy.mechanism.partners`), and whoever is not there costs
accuracy, never ε.

| a partner is | it counts |
|---|---|
| not heard yet, by this process; or a neighbour that cannot be reached | no |
| silent for some of this peer's own rounds, and not ahead: down, cut off, or stopped | no, until it gets on again |
| another process than before, or one that gets on again | from the later of the two peers' rounds on |
| behind, and gets on; or ahead, and perhaps done | yes: what comes late cancels late |

The third line makes both ends begin with the same step, though neither asks the other: a process has no draws in common
with anybody for rounds that the other had passed when they met. So a peer that comes back, some rounds behind, adds
nothing that nobody would take out again. And if a partner got on by more than that since this peer's last round,
it has left this peer out in the meantime, by the same rule, and the two begin again as well.

How many rounds: SILENT, in which peers that are only late have got on, and those that news of the farthest peer takes.
To leave out somebody who is there costs what one round too many costs with somebody who is gone, so it is not long.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

from flower_privdec.common.formatting import peer_ranges

_log = logging.getLogger(__name__)

SILENT = 3  # of one's own rounds in which a neighbour did not get on, until it is left out
LEVEL = 2  # rounds in which peers that begin together may differ


@dataclass
class Attendant:
    """What a peer knows of one partner.

    Attributes:
        process: names its process, the other end of a secret.
        round_index: how far it is, as far as is known.
        got_on: this peer's own round in which that last changed.
        begins: the first round in which noise is shared with it.
        is_left_out: whether it was not, in the last round.
    """

    process: Hashable
    round_index: int
    got_on: int
    begins: int
    is_left_out: bool = False


class Attendance:
    """The partners of a peer, round by round.

    Args:
        peer: its number.
        partners: those that it shares noise with if they are there.
        news: how many rounds old what is known of a peer may be.

    Attributes:
        absent: the partners that do not count in this round.
        since: the round from which each of them did not.
        gone: those of them that have been silent for some rounds.
    """

    def __init__(self, peer: int, partners: Iterable[int], news: int = 0) -> None:
        self.peer = peer
        self._patience = SILENT + news
        self.absent: frozenset[int] = frozenset()
        self.since: dict[int, int] = {}
        self.gone: frozenset[int] = frozenset()
        self._partners = sorted(partners)
        self._known: dict[int, Attendant] = {}

    def begin_round(
        self, round_index: int, heard: Mapping[int, tuple[Hashable, int]], unreachable: Collection[int] = ()
    ) -> frozenset[int]:
        """Return who does not count in a round, whose steps are about to be taken.

        Args:
            round_index: this peer's.
            heard: of each partner that was heard, its process, and how far it is.
            unreachable: neighbours that cannot be reached now.
        """
        absent = set[int]()
        for partner in self._partners:
            if partner not in heard:
                absent.add(partner)
                continue
            known = self._update(partner, round_index, *heard[partner])
            is_ahead = known.round_index > round_index
            is_silent = partner in unreachable or round_index - known.got_on > self._patience
            known.is_left_out = is_silent and not is_ahead
            if known.is_left_out or round_index < known.begins:
                absent.add(partner)

        for partner in sorted(absent ^ self.absent):
            self._note(partner, round_index, partner in absent)
        self.absent = frozenset(absent)
        self.gone = frozenset(partner for partner in absent if self._is_gone(partner, round_index))
        return self.absent

    def _is_gone(self, partner: int, round_index: int) -> bool:
        """Return whether a partner that does not count has been silent for some rounds, be it a neighbour or not.

        So all peers find out at about the same time, and a connection that is cut for a moment changes nothing.
        """
        known = self._known.get(partner)
        if known is None:
            return round_index - self.since[partner] > self._patience
        return known.is_left_out and round_index - known.got_on > self._patience

    def _update(self, partner: int, round_index: int, process: Hashable, reached: int) -> Attendant:
        """Return what is known of a partner now."""
        before = self._known.get(partner)
        if before is None or before.process != process:
            begins = round_index
            if abs(reached - round_index) > LEVEL:
                begins = max(reached, round_index)
            self._known[partner] = Attendant(process, reached, round_index, begins)
            return self._known[partner]

        if reached > before.round_index:
            has_left_out = reached - before.round_index > self._patience
            if before.is_left_out or has_left_out:
                before.begins = max(reached, round_index)
            before.round_index = reached
            before.got_on = round_index
        return before

    def _note(self, partner: int, round_index: int, is_absent: bool) -> None:
        """Record, and log, that a partner is left out from a round on, or counts again."""
        if not is_absent:
            _log.info("peer %d shares noise with peer %d again, from round %d on", self.peer, partner, round_index)
            del self.since[partner]
            return

        self.since[partner] = round_index
        known = self._known.get(partner)
        if known is None:
            why = "was not heard yet"
        elif round_index < known.begins:
            why = f"was in round {known.begins} when they met"
        else:
            why = f"was last heard of in round {known.round_index}"
        _log.warning(
            "peer %d shares no noise with peer %d from round %d on, which %s; it adds what it needs without",
            self.peer,
            partner,
            round_index,
            why,
        )


def left_out_text(by_peer: Mapping[int, Iterable[tuple[int, int]]]) -> str:
    """Return in words who is left out by whom and since when; "" if nobody is.

    Args:
        by_peer: by peer, the partners that it leaves out, each with the round since which it does.
    """
    peers = defaultdict[int, set[int]](set)
    rounds = defaultdict[int, list[int]](list)
    for peer, left_out in by_peer.items():
        for partner, since in left_out:
            peers[partner].add(peer)
            rounds[partner].append(since)
    each = []
    for partner in sorted(peers):
        each.append(f"peer {partner} by peers {peer_ranges(peers[partner])} since round {min(rounds[partner])}")
    return ", ".join(each)
