"""The fault schedule: kinds, places and durations drawn from a seed, whatever the peers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from flower_privdec.common.errors import ScenarioError, did_you_mean
from tools.soak.fault_proxy import LinkFaults

Pair = tuple[int, int]
ON_LINKS = {
    "cut": "a connection is cut",
    "loss": "one piece in ten is lost, and the connection with it",
    "delay": "everything takes up to half a second longer",
    "throttle": "a link carries 100 kB a second",
    "black-hole": "nothing comes through",
}
ON_PEERS = {
    "kill": "a peer is ended by SIGKILL and started again",
    "pause": "a peer is stopped by SIGSTOP and goes on by SIGCONT",
    "isolate": "nothing comes through from or to a peer",
}
ON_FOLDERS = {
    "restore": "a peer's folder is put back as it was some seconds ago",
    "copy": "a copy of a peer's folder runs beside it",
    "lose": "a peer's folder is gone",
    "delete": "a peer's ledger is deleted",
}
KINDS = ON_LINKS | ON_PEERS | ON_FOLDERS


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of KINDS.
        after: seconds since the fault before it.
        seconds: how long it lasts.
        peer: that it affects, or the sender of its link.
        other: the receiver of its link; None for a fault of a peer.
    """

    kind: str
    after: float
    seconds: float
    peer: int
    other: int | None = None

    @property
    def on_link(self) -> LinkFaults:
        """Return what it does to a link."""
        return {
            "loss": LinkFaults(cut=0.1),
            "delay": LinkFaults(delay=0.05, jitter=0.45),
            "throttle": LinkFaults(rate=1e5),
            "black-hole": LinkFaults(black_hole=True),
            "isolate": LinkFaults(black_hole=True),
        }.get(self.kind, LinkFaults())

    def __str__(self) -> str:
        """Say what it is."""
        if self.other is None:
            where = f"peer {self.peer}"
        else:
            where = f"link {self.peer} to {self.other}"
        return f"{self.kind} of {where} for {self.seconds:.2f} s"


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse kinds of faults that there are none of.

    Raises:
        ScenarioError: naming the kind, and those that there are.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ScenarioError(f"--fault {kind!r} must be one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")


def faults(seed: int, links: Sequence[Pair], kinds: Sequence[str], every: float, longest: float) -> Iterator[Fault]:
    """Yield faults without end.

    Args:
        seed: of all that is drawn.
        links: (sender, receiver) of those that carry anything.
        kinds: of faults.
        every: seconds between two of them, on average.
        longest: seconds that one lasts at most.
    """
    draw = Random(seed)
    peers = sorted({peer for pair in links for peer in pair})
    while True:
        kind = draw.choice(kinds)
        after = draw.uniform(0.5, 1.5) * every
        seconds = draw.uniform(0.1, 1.0) * longest
        peer, other = draw.choice(links)
        if kind not in ON_LINKS:
            yield Fault(kind, after, seconds, draw.choice(peers))
        else:
            yield Fault(kind, after, 0.0 if kind == "cut" else seconds, peer, other)
