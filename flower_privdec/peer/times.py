"""How long a peer waits: all times of a run follow from its kind of links, and from one deadline.

A scenario names the links (`network.links`) and may set the deadline (`network.deadline`); the other times are nobody's
to choose. `PeerPlace.times` replaces them all, which is for tests and for callers that run a peer on somebody's behalf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flower_privdec.scenario.sections import NetworkSection

POLL = 0.2


@dataclass(frozen=True)
class Times:
    """The times of one peer, in seconds.

    Attributes:
        start: how long a peer that begins waits for all of its neighbours; an asynchronous one then begins with those
            that are there.
        deadline: how long it waits for them later, if it has to: a synchronous peer in each exchange, an asynchronous
            one after its last round. A call that takes half as long is given up and made again.
        retry: until what was not answered is sent again.
        give_up: after how long a peer ends that has met no neighbour (synchronous: not all of them).
        standstill: after how long a peer ends that waits, if neither it nor a neighbour came to another round; more if
            its own steps take long, see `RunningPeer.check_standstill`.
        poll: between two looks at what only time changes, and at whether to stop.
    """

    start: float
    deadline: float
    retry: float
    give_up: float = math.inf
    standstill: float = math.inf
    poll: float = POLL

    @property
    def rest(self) -> float:
        """Return until when a neighbour is called again from which nothing new comes, or that is not there."""
        return max(self.retry, self.deadline / RESTS)

    @classmethod
    def of(cls, network: NetworkSection) -> Times:
        """Return the times of a scenario's peers."""
        times = LINKS[network.links]
        if network.deadline is None:
            return times

        # Neighbours boot and read their data before they answer, so the first wait is never the shorter one.
        start = max(times.start, network.deadline)
        standstill = max(times.standstill, PATIENT * network.deadline)
        return replace(times, start=start, deadline=network.deadline, standstill=standstill)


RESTS = 10.0  # in a deadline: in each of them a neighbour is called once at least
PATIENT = 30.0  # deadlines in which a run stands still, at least, until its peers end
MINUTE = 60.0

# A `retry` shorter than a message takes sends it twice; one that is longer delays what was lost.
# After a standstill a person has to see to it, so it is as long as a site's reboot, or a night's repair of a line.
LINKS = {
    "local": Times(start=60.0, deadline=10.0, retry=0.1, standstill=10 * MINUTE),
    "lan": Times(start=60.0, deadline=10.0, retry=1.0, standstill=60 * MINUTE),
    "wan": Times(start=300.0, deadline=60.0, retry=5.0, standstill=240 * MINUTE),
}
