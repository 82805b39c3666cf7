"""What a peer knows of one neighbour: a single record, which its session and its rounds both read and write."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flower_privdec.peer.pace import Want
from flower_privdec.pushsum.exactly_once import Acknowledgement, FrozenShare, Hello
from flower_privdec.pushsum.frames import RowMessage

if TYPE_CHECKING:
    from torch import Tensor

NOWHERE = -1  # the round or place of a neighbour that has not reported one


@dataclass
class SendQueue:
    """What is to be sent to one neighbour that nobody waits for.

    Attributes:
        hello_at: when the next hello is due.
        report: the round of this peer that it has to hear of, if not by a message then by a call without one.
        hellos: answers to its own hellos.
        acknowledgements: the last one, which acknowledges all shares before it too.
        share: the last share that was brought to it.
        rows: by exchange of the program, those that were not brought to it yet.
    """

    hello_at: float = 0.0
    report: int = NOWHERE
    hellos: list[Hello] = field(default_factory=list)
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    share: FrozenShare[Tensor] | None = None
    rows: dict[int, RowMessage] = field(default_factory=dict)


@dataclass
class Neighbour:
    """One neighbour, as this process knows it. Nothing of it is on disk but for what says so.

    The edge's counters, which are on disk, are in `PushSumProtocol.edges` or `Lockstep`; what the neighbour has counted
    of this peer's ledger is in `LedgerWitness`.

    Attributes:
        number: which peer it is.
        quarantined: why nothing is taken from it until this process ends; "" if it is not.

        boot: the process that reported its round; None before the first hello.
        round_index: its round, as far as is known: that of the shares or rows that it sends next. Only a new process
            sets it back. A message that was under way for a while does not: a hello of the last round may come before a
            share of an earlier one, and is the last message there is.
        reached: its round as far as it follows from what it exchanged: shares or rows, or the acknowledgement of a
            share if it sends neither. None if nothing was exchanged with its process.
        stepped: the round after that of its process's last rows, whose step is done.
        place: round and exchange of its last rows, replies aside.
        request: the round of its last rows, to which a reply answers; on disk.
        rows: by exchange of the program, its newest rows that were not used yet.
        last_added: the round of its last share that was added.
        sent_since: whether a share of it was added since the last exchange in which one was due.
        is_checked: whether its first hello to this process was compared with what it has of this peer's rows.
        distance: in final mixing, from its model to this peer's when it last came, over the larger norm; None before.
            On disk if nobody waits for it.
        is_given_up: whether final mixing goes on without it.

        met: in which of this peer's steps it last exchanged something with it: sent a share or rows, or took some.
        met_at: when that was.
        heard_at: when it last sent anything.

        informed: the last round, or the place, of this peer that it is known to have heard of; None for none.
        reported_to: the last round of this peer in a call or an answer to it.
        want: what it lacks of push-sum weight, as far as it reported since its last share: a `Want`, or a number that
            is none, for a member may send any.
        level: how often its weight floor sank, as far as it reported.
        has_told: whether it knows that this peer has parted from it.

        queue: what is to be sent to it.
        again: by place, when to send rows again that it has not used.
        pause: seconds until it is greeted, or rows are sent to it, again; longer each time while nothing comes of it.
        ask_again: when to ask it again whether it is at the end.
        answering: how many of its calls are waiting for their answer.
        call_again: when it may be called again after a call that failed.

        answered: how many calls to it were answered in all.
        failed: how many were not, in all.
        failures: how many calls in a row were not answered.
        unreached: how many in a row did not reach it; a refusal does.
        unreached_at: when the last of these was counted.
        trouble: why it could not be reached, since it last could; "" if it could.
        refused: what was wrong with its last call that was refused; "" if nothing was.
        quickest: seconds of the quickest call to it since one failed; None before.
        sending: seconds that it last took to hand over a message of several pieces.
        reports_twin: whether it says that two processes run as this peer.
        shuts_out: whether it says that this peer was shut out.
    """

    number: int
    quarantined: str = ""

    # Its process, and how far that is.
    boot: int | None = None
    round_index: int = NOWHERE
    reached: int | None = None
    stepped: int = 0
    place: tuple[int, int] | None = None
    request: int | None = None
    rows: dict[int, RowMessage] = field(default_factory=dict)
    last_added: int = NOWHERE
    sent_since: bool = False
    is_checked: bool = False
    distance: float | None = None
    is_given_up: bool = False

    # When something was exchanged.
    met: int | None = None
    met_at: float = -math.inf
    heard_at: float = -math.inf

    # What each has reported to the other.
    informed: int | None = None
    reported_to: int = NOWHERE
    want: int = Want.UNKNOWN
    level: int = 0
    has_told: bool = False

    # What is to be sent to it.
    queue: SendQueue = field(default_factory=SendQueue)
    again: dict[int, float] = field(default_factory=dict)
    pause: float = 0.0
    ask_again: float = 0.0
    answering: int = 0
    call_again: float = 0.0

    # How calls to it fare.
    answered: int = 0
    failed: int = 0
    failures: int = 0
    unreached: int = 0
    unreached_at: float = -math.inf
    trouble: str = ""
    refused: str = ""
    quickest: float | None = None
    sending: float = 0.0
    reports_twin: bool = False
    shuts_out: bool = False

    @property
    def reached_round(self) -> int:
        """Return its round, 0 if it has not reported one."""
        return max(0, self.round_index)

    def meet(self, step: int, now: float) -> None:
        """Record that it exchanged something with this peer, which is more than a greeting."""
        self.met = step
        self.met_at = now
        self.pause = 0.0

    def pause_again(self, least: float, most: float) -> float:
        """Return for how many seconds nothing is sent to it again, twice as long as the last time."""
        self.pause = min(max(least, 2 * self.pause), most)
        return self.pause

    def is_ahead(self, round_index: int) -> None:
        """Record that it is at least in a round, which follows from what it exchanged."""
        self.round_index = max(round_index, self.reached_round)
        self.reached = self.round_index

    def restart(self, boot: int, round_index: int) -> None:
        """Record that another process of it is in a round: what the one before reached does not count."""
        self.boot = boot
        self.round_index = round_index
        self.reached = None
        self.stepped = 0
        self.unreached = 0
