"""Light peers on a virtual clock whose list of members changes while they run."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from flower_privdec.common.errors import PrivdecError
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.mass_of_shares import MassOfShares
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.pushsum.membership import MemberList, Members
from tools.schedules.light_peers import LightDisk, LightHome

ADD = {"kind": "add", "peer": 4, "identity": "peer-4.light", "address": "10.0.0.4:7100"}
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
        identities = [f"peer-{peer}.light" for peer in range(self.scenario.n_peers)]
        self.first = Members.first("light", identities, self.scenario.rounds)
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


def at_random(seed: int) -> tuple[Changing, list[int], int]:
    """Return a network in which some join, leave, are killed, and lose calls; who leaves; how many there ever were."""
    draw = Random(seed)
    changes: list[tuple[float, int, dict[str, Any]]] = []
    faults: list[str] = []
    peers = 4
    at = draw.uniform(0.5, 3)
    if draw.random() < 0.6:
        peers = 5
        changes.append((at, draw.randrange(4), ADD))
        faults.append(f"{{kind: join, peer: 4, at: {at + draw.uniform(0.05, 1):.3f}}}")
    if draw.random() < 0.7:
        changes.append((at + draw.uniform(0.01, 2), draw.choice([0, 1, 3]), {"kind": "leave", "peer": 2}))
    if draw.random() < 0.3:
        changes.append((at + draw.uniform(0.01, 2.5), draw.choice([0, 1]), {"kind": "leave", "peer": 3}))
    for _ in range(draw.choice([0, 1, 1, 2])):
        moment = at + draw.uniform(0, 2.5)
        faults.append(f"{{kind: crash, peer: {draw.randrange(4)}, at: {moment:.3f}, down: {draw.uniform(0.1, 2):.2f}}}")

    graph = draw.choice(["directed-exponential", "ring", "complete", "directed-ring"])
    steps = ", mixing_steps: 2" if graph == "directed-exponential" and draw.random() < 0.2 else ""
    links = f"{{latency: 0.05, jitter: {draw.choice([0, 0.1])}, loss: {draw.choice([0, 0.1])}}}"
    changing = Changing(
        sorted(changes, key=lambda change: change[0]),
        faults=", ".join(faults),
        rest=f"seed: {seed}, links: {links}, work: {{train: 0.2, save: 0.05}}",
        peers=peers,
        rounds=10,
        graph=f"{{name: {graph}{steps}}}",
        network="links: local, deadline: 3.0",
    )
    if peers == 5:
        changing.network.at(at + 0.04, lambda: changing.give(4))
    return changing, [change["peer"] for _, _, change in changes if change["kind"] == "leave"], peers
