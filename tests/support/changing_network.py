"""Light peers on a virtual clock whose list of members changes while they run."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any

from flower_privdec.common.errors import PrivdecError
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.mass_of_shares import MassOfShares
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.pushsum.membership import MemberList, Members
from tools.schedules.light_peers import LightDisk, LightHome

CALM = "links: {latency: 0.05}, work: {train: 0.2, save: 0.05}"


def sign(content: bytes) -> bytes:
    return hmac.digest(b"authority", content, "sha256")


def verify(content: bytes, signature: bytes) -> bool:
    return signature == sign(content)


class ChangingHome(LightHome):
    """Light peers that keep the list of members in their folders.

    Attributes:
        operators: the list as its authority has it.
        kept: by peer, the list in its folder.
    """

    def __init__(self, **case: Any) -> None:
        super().__init__(**case)
        self.first = Members.first("light", [f"peer-{peer}.light" for peer in range(self.scenario.n_peers)])
        self.operators = MemberList(self.first, verify)
        self.kept: dict[int, bytes] = {}

    def list_of(self, peer: int) -> MemberList:
        def keep(content: bytes) -> None:
            self.kept[peer] = content

        made = MemberList(self.first, verify, keep)
        made.take(self.kept.get(peer, b""), "its folder")
        return made

    def start(self, peer: int, disk: LightDisk, draw: Callable[[], int]) -> RunningPeer:
        return self.start_with(peer, disk, draw, self.list_of(peer))


class Changing:
    """A network whose operator adds entries at some moments and puts the list into one peer's folder.

    The law of mass is checked after each event.

    Args:
        changes: (moment, peer that is given the list, change).
        faults: of the schedule, as YAML.
        peers: how many machines there are in the end.
    """

    def __init__(
        self,
        changes: Sequence[tuple[float, int, dict[str, Any]]],
        *,
        faults: str = "",
        rest: str = CALM,
        peers: int | None = None,
        **case: Any,
    ) -> None:
        self.home = ChangingHome(**case)
        law = MassOfShares(moved=lambda checkpoint: float(checkpoint.state.rows["moved"].sum()) * 3)
        self.law = law
        schedule = FaultSchedule.parse(f"{{{rest}, faults: [{faults}]}}")
        machines = range(peers or self.home.scenario.n_peers)
        self.network = VirtualNetwork(self.home, machines, schedule, law.check)
        for moment, given, change in changes:
            self.network.at(moment, lambda given=given, change=change: self._change(given, change))  # type: ignore[misc]

    def _change(self, given: int, change: dict[str, Any]) -> None:
        self.home.operators.append(change, sign)
        self.give(given)

    def give(self, peer: int) -> None:
        """Put the operator's list into a peer's folder, which a process looks at."""
        process = self.network.machines[peer].process
        content = self.home.operators.content
        if process is None or process.is_over or process.peer.device.members is None:
            self.home.kept[peer] = content
            return
        process.peer.device.members.take(content, "a file")
        process.look()

    def run(self) -> dict[int, PrivdecError | Exception | None]:
        """Let all come to their ends, and return these."""
        try:
            self.network.run()
        finally:
            self.network.close()
        return self.network.ends

    def weights(self) -> dict[int, float]:
        """Return the push-sum weight that each disk holds, with the shares that nobody has added."""
        found = {}
        for number, books in self.law._held.items():
            shares = [self.law._shares[name] for name in books.frozen]
            found[number] = books.weight + sum(share.weight for share in shares if not share.was_added)
        return found
