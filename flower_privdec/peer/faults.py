"""What goes wrong in a simulated network, and when: plain data, read from YAML, or drawn from a seed.

A `FaultSchedule` is the whole weather of a run of `VirtualNetwork`: how its links are, how long work takes, and a list
of faults, each at a moment of the virtual clock (in seconds, from 0). The same schedule and the same peers give the
same events.

    seed: 7
    links: {latency: 0.03, jitter: 0.02, loss: 0.01}
    work: {train: 0.2, save: 0.005}
    faults:
      - {kind: partition, at: 10, until: 20, groups: [[0, 1], [2, 3]]}
      - {kind: crash, peer: 2, at: 12.5, down: 3}
      - {kind: restore, peer: 1, copied_at: 5, at: 20, down: 2}

| kind | what happens |
|---|---|
| link | the links of a time, from or to some peers, are others |
| partition | peers of different groups do not reach each other |
| crash | a process ends, at a moment or at its nth work; what was not on disk is lost; it comes back, or not |
| restore | a process ends, and its folder is put back as it was at an earlier moment |
| lose | a process ends, and its folder is lost |
| freeze | a process stops for a while, and continues: what came meanwhile comes late |
| slow | work takes a multiple of its time |
| clock | a peer's clock jumps ahead, or runs at another rate |
| full-disk | writes fail for a while; who dies of it is started again when there is room |
| join | a peer starts only at this moment |
| lie | what a member sends is not what it has |
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import NonNegative, Positive, Section
from flower_privdec.scenario.loading import parse_model, read_text, write_yaml

FORM = "a schedule of faults is a mapping of seed, links, work and faults"
PeerNumber = Annotated[int, Field(ge=0)]
Chance = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Links(Section):
    """What every link is like, unless a fault of kind link says otherwise.

    Attributes:
        latency: seconds that a message takes, at least.
        jitter: seconds more at most, drawn anew for each message, so that messages overtake each other.
        loss: the chance that a call, or its answer, is lost.
        duplicates: the chance that a call comes a second time, some seconds later.
        bandwidth: bits per second of each direction of a link; left out, without limit.
        device_bandwidth: bits per second that a device sends, and that it receives, over all its links together.
    """

    latency: NonNegative = 0.01
    jitter: NonNegative = 0.0
    loss: Chance = 0.0
    duplicates: Chance = 0.0
    bandwidth: Positive | None = None
    device_bandwidth: Positive | None = None


class _Lasting(Section):
    """A fault that lasts.

    Attributes:
        at, until: from when to when, in seconds; left out, `until` is the end of the run.
    """

    at: NonNegative = 0.0
    until: Positive | None = None

    def _check(self) -> None:
        if self.until is not None and self.until <= self.at:
            raise ArgumentError(f"until={self.until:g} must be after at={self.at:g}", code="faults.until")

    @property
    def end(self) -> float:
        """Return when it is over."""
        return math.inf if self.until is None else self.until


class LinkFault(_Lasting):
    """Some links are other than usual; what is left out stays as it was.

    Attributes:
        at, until: see _Lasting.
        sender, receiver: the direction of the links; left out, from or to any peer.
        peers: all links from and to these, in place of a sender and a receiver.
        latency, jitter, loss, duplicates, bandwidth: see Links.
        device_bandwidth: of the `peers`, see Links; of all if none are named.
    """

    kind: Literal["link"] = "link"
    sender: PeerNumber | None = None
    receiver: PeerNumber | None = None
    peers: list[PeerNumber] | None = None
    latency: NonNegative | None = None
    jitter: NonNegative | None = None
    loss: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    duplicates: Chance | None = None
    bandwidth: Positive | None = None
    device_bandwidth: Positive | None = None

    def _check(self) -> None:
        super()._check()
        has_direction = self.sender is not None or self.receiver is not None
        if self.peers is not None and has_direction:
            raise ArgumentError("peers and sender or receiver both name links: give one", code="faults.link")
        if self.device_bandwidth is not None and has_direction:
            raise ArgumentError(
                f"device_bandwidth={self.device_bandwidth:g} is of devices, and sender and receiver name links: give "
                "peers",
                code="faults.device",
            )

    def concerns(self, sender: int, receiver: int) -> bool:
        """Return whether it is about a link."""
        if self.peers is not None:
            return sender in self.peers or receiver in self.peers
        return self.sender in (None, sender) and self.receiver in (None, receiver)


class Partition(_Lasting):
    """Peers of different groups do not reach each other.

    Attributes:
        at, until: see _Lasting.
        groups: of peers; those that are in none are a group of their own together.
    """

    kind: Literal["partition"]
    groups: list[list[PeerNumber]]

    def group_of(self, peer: int) -> int:
        """Return the number of a peer's group; -1 for those in none."""
        for number, group in enumerate(self.groups):
            if peer in group:
                return number
        return -1


class _Ending(Section):
    """A fault that ends a process.

    Attributes:
        peer: whose.
        down: seconds until another process of it starts; left out, none does.
    """

    peer: PeerNumber
    down: NonNegative | None = None


class Crash(_Ending):
    """A process ends: what it had not put on disk is lost, and what it had not sent is never sent.

    Attributes:
        peer, down: see _Ending.
        at: when; or
        work, nth, point: in place of `at`, at its nth work of a kind, counted from 1 since the run began: `before` it;
            `within`, when it has taken place in part (a step is paid for, a file half written); or `after` it, before
            anything follows.
    """

    kind: Literal["crash"]
    at: NonNegative | None = None
    work: Literal["train", "save", "evaluate", "report", "finish"] | None = None
    nth: Annotated[int, Field(ge=1)] = 1
    point: Literal["before", "within", "after"] = "after"

    def _check(self) -> None:
        if (self.at is None) == (self.work is None):
            raise ArgumentError("a crash needs either at, a moment, or work, a kind of work", code="faults.crash")


class Restore(_Ending):
    """A process ends, and its folder is put back as it was at an earlier moment, as an operator restores a backup.

    Attributes:
        peer, down: see _Ending.
        copied_at: when the copy was made.
        at: when it is put back.
        charges: whether the operator charges what the ledger then lacks, as the error tells him; else the peer ends.
    """

    kind: Literal["restore"]
    copied_at: NonNegative
    at: NonNegative
    charges: bool = True

    def _check(self) -> None:
        if self.copied_at > self.at:
            raise ArgumentError(
                f"copied_at={self.copied_at:g} must not be after at={self.at:g}", code="faults.copied-later"
            )


class Lose(_Ending):
    """A process ends, and its folder is lost.

    Attributes:
        peer, down: see _Ending.
        at: when.
        charges: see Restore.
    """

    kind: Literal["lose"]
    at: NonNegative
    charges: bool = True


class Freeze(_Lasting):
    """A process stops, as a laptop that is closed: it neither works nor answers. What came meanwhile comes at its end.

    Attributes:
        at, until: see _Lasting.
        peer: whose.
    """

    kind: Literal["freeze"]
    peer: PeerNumber


class Slow(_Lasting):
    """All work of a peer takes longer.

    Attributes:
        at, until: see _Lasting.
        peer: whose.
        factor: so many times as long.
    """

    kind: Literal["slow"]
    peer: PeerNumber
    factor: Positive


class WrongClock(Section):
    """A peer's clock is wrong from a moment on. It never goes back: a driver's clock does not.

    Attributes:
        at: when.
        peer: whose.
        jump: seconds that it jumps ahead.
        rate: its seconds in a true one, from then on.
    """

    kind: Literal["clock"]
    at: NonNegative = 0.0
    peer: PeerNumber
    jump: NonNegative = 0.0
    rate: Positive = 1.0


class FullDisk(_Lasting):
    """Nothing can be written at a peer.

    Attributes:
        at, until: see _Lasting.
        peer: whose.
        down: seconds after `until` when it is started again, if it died of it; left out, it is not.
    """

    kind: Literal["full-disk"]
    peer: PeerNumber
    down: NonNegative | None = 0.0


class Join(Section):
    """A peer starts for the first time at a moment, instead of at 0.

    Attributes:
        peer: who.
        at: when.
    """

    kind: Literal["join"]
    peer: PeerNumber
    at: NonNegative


class Lie(_Lasting):
    """What a member sends of its model is not what it has.

    Attributes:
        at, until: see _Lasting.
        peer: who lies.
        says: scaled, its own numbers times `factor`; constant, `factor` everywhere; noise, normal numbers of `factor`;
            nan; or weight, its push-sum weight times `factor`.
        factor: see `says`.
    """

    kind: Literal["lie"]
    peer: PeerNumber
    says: Literal["scaled", "constant", "noise", "nan", "weight"] = "scaled"
    factor: Annotated[float, Field(allow_inf_nan=False)] = -10.0


Fault = LinkFault | Partition | Crash | Restore | Lose | Freeze | Slow | WrongClock | FullDisk | Join | Lie
KINDS: dict[str, type[Section]] = {
    "link": LinkFault,
    "partition": Partition,
    "crash": Crash,
    "restore": Restore,
    "lose": Lose,
    "freeze": Freeze,
    "slow": Slow,
    "clock": WrongClock,
    "full-disk": FullDisk,
    "join": Join,
    "lie": Lie,
}
HONEST = tuple(kind for kind in KINDS if kind != "lie")


class FaultSchedule(Section):
    """All faults of a run; see the module.

    Attributes:
        seed: of all that is drawn while it runs: jitter, losses, duplicates, starts of processes.
        links: what the links are like.
        work: seconds that each kind of work takes (train, save, evaluate, report, finish); 0 for one that is missing.
        faults: what goes wrong, in any order.
    """

    seed: int = 0
    links: Links = Links()
    work: dict[Literal["train", "save", "evaluate", "report", "finish"], NonNegative] = Field(default_factory=dict)
    faults: list[Annotated[Fault, Field(discriminator="kind")]] = Field(default_factory=list)

    @classmethod
    def parse(cls, text: str, where: str = "faults") -> FaultSchedule:
        """Read a schedule from YAML text.

        Args:
            where: what to call the text in an error.

        Raises:
            ScenarioError: with the line, the value, the rule and the remedy.
        """
        return parse_model(cls, text, form=FORM, where=where)

    @classmethod
    def read(cls, path: Path) -> FaultSchedule:
        """Read a schedule from a file; see `parse`."""
        return cls.parse(read_text(path, "a schedule of faults"), str(path))

    def to_yaml(self) -> str:
        """Return the schedule as YAML that reads back to the same, without what has its default."""
        data: dict[str, Any] = {"seed": self.seed}
        data["links"] = self.links.model_dump(exclude_defaults=True)
        data["work"] = dict(self.work)
        data["faults"] = [
            {"kind": fault.kind, **fault.model_dump(exclude={"kind"}, exclude_defaults=True)} for fault in self.faults
        ]
        return write_yaml(data)

    def check(self, n_peers: int, where: str = "faults") -> None:
        """Check that all peers that it names exist, and that none joins twice.

        Raises:
            ScenarioError: one line, with the number of the fault, the value and the rule.
        """
        joined = set[int]()
        for number, fault in enumerate(self.faults):
            for peer in peers_of(fault):
                if peer >= n_peers:
                    raise ScenarioError(
                        f"{where}: faults.{number} ({fault.kind}) names peer {peer}, and the network has peers 0 to "
                        f"{n_peers - 1}",
                        code="faults.peer",
                    )

            if isinstance(fault, Join):
                if fault.peer in joined:
                    raise ScenarioError(
                        f"{where}: faults.{number} lets peer {fault.peer} join a second time: it starts once",
                        code="faults.joins-twice",
                    )
                joined.add(fault.peer)

    @property
    def last_moment(self) -> float:
        """Return the moment after which nothing changes any more; inf if a fault lasts to the end of the run.

        A crash at a work has no moment, and what a peer does then is not counted.
        """
        moments = [0.0]
        for fault in self.faults:
            if isinstance(fault, _Lasting):
                moments.append(fault.end)
            elif fault.at is not None:
                moments.append(fault.at)
            down = getattr(fault, "down", None)
            if down is not None:
                moments[-1] += down
        return max(moments)

    def without(self, number: int) -> FaultSchedule:
        """Return the schedule without one of its faults."""
        faults = [fault for i, fault in enumerate(self.faults) if i != number]
        return self.model_copy(update={"faults": faults})

    @classmethod
    def drawn(
        cls,
        seed: int,
        n_peers: int,
        seconds: float,
        most: int = 8,
        kinds: tuple[str, ...] = HONEST,
        lasting: bool = False,
        count: int | None = None,
    ) -> FaultSchedule:
        """Draw a schedule at random.

        Args:
            seed: of the draw, and of the schedule.
            n_peers: of the network.
            seconds: in which faults begin; they end some time later.
            most: how many faults it has at most.
            kinds: which kinds to draw from.
            lasting: whether some faults last to the end of the run, and some peers never come back.
            count: how many faults are drawn, in place of a number up to `most`; a peer joins once at most.
        """
        draw = Random(seed)

        # The order of the draws is the schedule of a seed: another order would be another schedule.
        links = Links(
            latency=draw.choice([0.001, 0.01, 0.05]),
            jitter=draw.choice([0.0, 0.01, 0.1]),
            loss=draw.choice([0.0, 0.0, 0.02, 0.1]),
            duplicates=draw.choice([0.0, 0.0, 0.05]),
            bandwidth=draw.choice([None, None, 1e6]),
        )
        work = {"train": draw.choice([0.02, 0.1, 0.5]), "save": draw.choice([0.0, 0.005, 0.05])}

        drawing = _Drawing(draw, n_peers, seconds, lasting)
        if count is None:
            count = draw.randint(0, most)
        faults = [drawing.fault(draw.choice(kinds)) for _ in range(count)]

        joins = set[int]()
        kept: list[Any] = []
        for fault in faults:
            if isinstance(fault, Join):
                if fault.peer in joins:
                    continue
                joins.add(fault.peer)
            kept.append(fault)
        return cls.model_validate({"seed": seed, "links": links, "work": work, "faults": kept})


def peers_of(fault: Any) -> set[int]:
    """Return the peers that a fault names."""
    named = {getattr(fault, name, None) for name in ("peer", "sender", "receiver")} - {None}
    listed = set(getattr(fault, "peers", None) or [])
    grouped = {peer for group in getattr(fault, "groups", []) for peer in group}
    return {*named, *listed, *grouped}


class _Drawing:
    """Draws faults."""

    def __init__(self, draw: Random, n_peers: int, seconds: float, lasting: bool) -> None:
        self._draw = draw
        self._n_peers = n_peers
        self._seconds = seconds
        self._lasting = lasting

    def fault(self, kind: str) -> Section:
        """Draw a fault of a kind."""
        keys: dict[str, Any] = getattr(self, "_" + kind.replace("-", "_"))()
        return KINDS[kind].model_validate({"kind": kind, **keys})

    def _moment(self) -> float:
        return round(self._draw.uniform(0, self._seconds), 3)

    def _peer(self) -> int:
        return self._draw.randrange(self._n_peers)

    def _span(self) -> dict[str, Any]:
        at = self._moment()
        if self._lasting and self._draw.random() < 0.1:
            return {"at": at}
        return {"at": at, "until": round(at + 0.001 + self._draw.expovariate(4 / self._seconds), 3)}

    def _down(self) -> dict[str, Any]:
        if self._lasting and self._draw.random() < 0.2:
            return {}
        return {"down": self._draw.choice([0.0, 0.1, 1.0, round(self._draw.uniform(0, self._seconds), 3)])}

    def _link(self) -> dict[str, Any]:
        one = self._peer()
        other = self._peer()
        links: dict[str, Any] = self._draw.choice(
            [{"sender": one, "receiver": other}, {"sender": one}, {"peers": [one]}]
        )
        weather = self._draw.choice(
            [{"loss": 1.0}, {"loss": 0.5}, {"latency": 1.0}, {"jitter": 2.0}, {"bandwidth": 2e4}]
        )
        return {**self._span(), **links, **weather}

    def _partition(self) -> dict[str, Any]:
        cut = self._draw.sample(range(self._n_peers), self._draw.randint(1, max(1, self._n_peers - 1)))
        return {**self._span(), "groups": [sorted(cut)]}

    def _crash(self) -> dict[str, Any]:
        ending = {"peer": self._peer(), **self._down()}
        if self._draw.random() < 0.5:
            return {**ending, "at": self._moment()}
        kind = self._draw.choice(["train", "save", "save", "evaluate", "finish"])
        nth = 1 if kind == "finish" else self._draw.randint(1, 12)
        return {**ending, "work": kind, "nth": nth, "point": self._draw.choice(["before", "within", "after"])}

    def _restore(self) -> dict[str, Any]:
        copied, at = sorted([self._moment(), self._moment()])
        return {"peer": self._peer(), **self._down(), "copied_at": copied, "at": at}

    def _lose(self) -> dict[str, Any]:
        return {"peer": self._peer(), **self._down(), "at": self._moment()}

    def _freeze(self) -> dict[str, Any]:
        return {"peer": self._peer(), **self._span()}

    def _slow(self) -> dict[str, Any]:
        return {"peer": self._peer(), **self._span(), "factor": self._draw.choice([3.0, 10.0, 100.0])}

    def _clock(self) -> dict[str, Any]:
        wrong = self._draw.choice([{"jump": 5.0}, {"jump": 1000.0}, {"rate": 2.0}, {"rate": 0.25}])
        return {"peer": self._peer(), "at": self._moment(), **wrong}

    def _full_disk(self) -> dict[str, Any]:
        return {"peer": self._peer(), **self._span(), **self._down()}

    def _join(self) -> dict[str, Any]:
        return {"peer": self._peer(), "at": self._moment()}

    def _lie(self) -> dict[str, Any]:
        says = self._draw.choice([("scaled", -10.0), ("constant", 0.0), ("noise", 1.0), ("nan", 1.0), ("weight", 3.0)])
        return {"peer": self._peer(), **self._span(), "says": says[0], "factor": says[1]}
