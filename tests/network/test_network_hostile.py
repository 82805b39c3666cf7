"""A neighbour that says whatever it likes to a peer that nobody waits for: refused by name, and nothing changes."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from asynchronous_network import FOLDERS, QUICK, STILL, stop_all
from networked import LONG, begin_without, devices, driver_of, finish, running, wait_until
from raising import raises
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec.common.errors import RunError
from flower_privdec.core import Exchange
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.status import STATUS_REQUEST
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.asynchronous_session import MANY, AsynchronousSession
from flower_privdec.peer.driving import performed
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.pushsum import frames
from flower_privdec.pushsum.exactly_once import FIRST, Acknowledgement, FrozenShare, Hello, RefusedError
from flower_privdec.pushsum.frames import FrameCodec, Message, RowMessage
from tools.mass_on_disk import mass_on_disk

NAMES = ["privsgp", "d-psgd"]
ROUNDS = 60
END = ROUNDS + 14  # with final mixing


@dataclass
class Hostile:
    """Peer 3 as somebody else wrote it: it has its certificate, and says to peer 0 what it is told to say."""

    target: AsynchronousPeer
    own: AsynchronousPeer
    link: StreamConnection
    said: list[bytes]

    def encode(self, message: Message) -> bytes:
        """Return the frame of a message."""
        return b"".join(self.own.session.frames.encode(message))

    def say(self, *messages: Message | bytes) -> bytes:
        """Say something in one call; return the answer."""
        everything = [self.own.witness.report(0), *messages]
        content = b"".join(each if isinstance(each, bytes | bytearray) else self.encode(each) for each in everything)
        answer = bytes(self.link.call([content], LONG))
        self.said.append(content)
        report, *_ = self.own.session.frames.decode_all(memoryview(bytearray(answer)), MANY)
        self.own.witness.receive(report)  # type: ignore[arg-type]
        return answer[len(self.encode(report)) :]

    def greet(self, **changes: Any) -> None:
        """Shake hands, with some words other than they should be."""
        for _ in range(3):
            answer = self.say(replace(self.own.protocol.hello(0), **changes))
            for word in [self.own.session.frames.decode(bytearray(answer))] if answer else []:
                assert isinstance(word, Hello)
                self.own.protocol.receive_hello(word)
        assert changes or self.target.protocol.is_open(3)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Return rows as an exchange has them."""
        (exchange, *_) = self.target.timetable.exchanges.values()
        return {name: row + 1 for name, row in exchange_rows(self.target, exchange).items()}

    def share(self, **changes: Any) -> FrozenShare[Tensor]:
        """Return a share as it should be, or one that differs from it in something."""
        ours, theirs = self.own.protocol, self.target.protocol
        right = FrozenShare(3, 0, ours.incarnation, theirs.incarnation, 1, ours.boot, 0, self.rows)
        return replace(right, **changes)

    def acknowledgement(self, **changes: Any) -> Acknowledgement:
        """Return an acknowledgement that is not due."""
        ours, theirs = self.own.protocol, self.target.protocol
        right = Acknowledgement(3, 0, ours.incarnation, theirs.incarnation, ours.boot, 1, theirs.boot)
        return replace(right, **changes)

    def message(self, **changes: Any) -> RowMessage:
        """Return rows as they should be, or some that differ in something."""
        return replace(RowMessage(3, 0, 0, next(iter(self.target.timetable.exchanges)), self.rows), **changes)

    def good(self) -> Message:
        """Return rows that the algorithm has, as they should be."""
        return self.share() if self.target.protocol.mass else self.message()

    def bad_rows(self, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Message:
        """Return rows with other values."""
        return replace(self.good(), values=change(self.rows))  # type: ignore[arg-type]


def exchange_rows(peer: RunningPeer, exchange: Exchange) -> dict[str, Tensor]:
    """Return a peer's rows that an exchange sends."""
    return {name: peer.state.rows[exchange.shaped(name)][0] for name in exchange.names}


def known(peer: RunningPeer) -> dict[str, Any]:
    """Return all that a neighbour's words may change, the numbers as bytes."""
    mail: Any = peer.session  # type: ignore[attr-defined]
    protocol: Any = mail.protocol
    rows = {name: value.numpy().tobytes() for name, value in peer.state.rows.items()}
    edges = {j: astuple(replace(edge, frozen=())) for j, edge in protocol.edges.items()}
    frozen = {j: [id(share) for share in edge.frozen] for j, edge in protocol.edges.items()}
    ones = mail.neighbours.items()
    waiting = {j: {at: _content(message) for at, message in one.rows.items()} for j, one in ones}
    held = {j: [_content(share) for share in shares] for j, shares in protocol._inbox.items() if shares}
    where = {j: (one.round_index, one.place) for j, one in ones}
    rounds = where, mail.stale, mail.is_new, mail.joins, mail.fatal
    facts = (
        edges,
        frozen,
        waiting,
        held,
        rounds,
        protocol.incarnation,
        dict(protocol.rejected),
        dict(protocol.orphaned),
    )
    return {"rows": rows, "facts": facts}


def _content(message: Any) -> tuple[Any, ...]:
    return message.round_index, {name: value.numpy().tobytes() for name, value in message.values.items()}


def listening(peer: RunningPeer) -> int:
    """Let a peer listen, and call nobody: who cannot be called is given up, whatever it says; return the port."""
    driver_of(peer)._call_next = lambda *_: None  # type: ignore[method-assign]
    return driver_of(peer).open()


@pytest.fixture(params=NAMES)
def hostile(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Iterator[Hostile]:
    scenario = tiny(*settings_for(f"algorithm.name={request.param}"), "topology.name=complete", f"rounds={ROUNDS}")
    theirs = devices(scenario, tmp_path)
    target, own = running_peer(scenario, theirs[0]), running_peer(scenario, theirs[3])
    assert isinstance(target, AsynchronousPeer)
    assert isinstance(own, AsynchronousPeer)
    port = listening(target)
    performed(own._begin())
    target.session.is_new = False  # it has met the others
    link = StreamConnection(f"127.0.0.1:{port}", "peer-0.tiny", theirs[3].credentials, 1 << 20)
    try:
        yield Hostile(target, own, link, [])
    finally:
        link.close()
        driver_of(target).close()
        own.close()


def with_x(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda rows: rows | {"x": change(rows["x"])}


def first_is(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return with_x(lambda x: torch.cat([torch.tensor([value], dtype=x.dtype), x[1:]]))


Says = Callable[[Hostile], list[Message | bytes]]
FOR_ALL: dict[str, tuple[Says, str]] = {
    "a number less": (lambda h: [h.bad_rows(with_x(lambda x: x[1:]))], "frame.length"),
    "another type": (lambda h: [h.bad_rows(with_x(lambda x: x.float()))], "frame.length"),
    "another shape": (lambda h: [h.bad_rows(with_x(lambda x: x[None]))], "frame.row-format"),
    "half as many bytes": (lambda h: [h.encode(h.good())[:-8]], "frame.length"),
    "NaN": (lambda h: [h.bad_rows(first_is(float("nan")))], "frame.number"),
    "infinity": (lambda h: [h.bad_rows(first_is(float("-inf")))], "frame.number"),
    "a byte more": (lambda h: [h.good(), b"\0"], "frame.length"),
    "zeros after it": (lambda h: [h.good(), bytes(100)], "frame.magic"),
    "another's name": (lambda h: [replace(h.good(), sender=1)], "call.not-its-own"),
    "to somebody else": (lambda h: [replace(h.good(), receiver=2)], "call.not-its-own"),
    "a round that never comes": (lambda h: [replace(h.good(), round_index=2**62)], "peer.round"),
    "a hello from beyond the end": (
        lambda h: [replace(h.own.protocol.hello(0), round_index=2**62)],
        "peer.round",
    ),
    "no frame at all": (lambda h: [b"GET / HTTP/1.1"], "frame.length"),
    "many frames": (lambda h: [h.acknowledgement()] * (MANY + 9), "frame.many"),
    "an acknowledgement that is not due": (
        lambda h: [h.acknowledgement()],
        "share.acknowledgement",
    ),
    "one of number 2^63": (lambda h: [h.acknowledgement(number=2**63)], "share.acknowledgement"),
    "one of another life": (lambda h: [h.acknowledgement(boot=1)], "share.acknowledgement"),
    "one of another incarnation": (lambda h: [h.acknowledgement(incarnation=FIRST + 1)], "edge.incarnation"),
    "another scenario": (lambda h: [b"".join(FrameCodec(bytes(32)).encode(h.own.protocol.hello(0)))], "frame.run"),
    "another version": (
        lambda h: [
            h.encode(h.own.protocol.hello(0))[:4] + bytes([frames.VERSION + 1]) + h.encode(h.own.protocol.hello(0))[5:]
        ],
        "frame.version",
    ),
    "counters that cannot be": (lambda h: [replace(h.own.protocol.hello(0), sent=9)], "edge.counters"),
    "more taken than seen": (lambda h: [replace(h.own.protocol.hello(0), received=9)], "edge.counters"),
}
OF_SHARES: dict[str, tuple[Says, str]] = {
    "rows of an exchange": (lambda h: [h.message()], "frame.exchange"),
    "a negative weight": (
        lambda h: [h.bad_rows(lambda rows: rows | {"w": torch.full_like(rows["w"], -1e-300)})],
        "peer.quarantined",
    ),
    "NaN": (lambda h: [h.bad_rows(first_is(float("nan")))], "peer.quarantined"),
    "infinity": (lambda h: [h.bad_rows(first_is(float("-inf")))], "peer.quarantined"),
    "a share of another incarnation": (lambda h: [h.share(incarnation=FIRST + 2**32)], "edge.incarnation"),
    "a share for another incarnation": (lambda h: [h.share(addressed=FIRST + 2**32)], "edge.incarnation"),
    "a share of another life": (lambda h: [h.share(boot=h.own.protocol.boot + 1)], "share.boot"),
    "no weight": (
        lambda h: [h.bad_rows(lambda rows: rows | {"w": torch.zeros_like(rows["w"])})],
        "peer.quarantined",
    ),
    "a weight of more than all": (
        lambda h: [h.bad_rows(lambda rows: {"x": rows["x"] * 0, "w": torch.full_like(rows["w"], 1e6)})],
        "peer.quarantined",
    ),
    "a share before the first": (lambda h: [h.share(number=0)], "share.boot"),
}
OF_ROWS: dict[str, tuple[Says, str]] = {
    "a share": (lambda h: [h.share()], "frame.exchange"),
    "rows of rounds that are not": (
        lambda h: [replace(h.own.protocol.hello(0), seen=2**64 - 1)],
        "peer.round",
    ),
    "rows of no exchange": (lambda h: [h.message(at=99)], "frame.exchange"),
}
THEN_GREET_ANEW: dict[str, tuple[Says, str]] = {  # what ends the handshake, and no more
    "a share after a gap": (lambda h: [h.share(number=3)], "share.gap"),
    "a rollback that is none": (
        lambda h: [replace(h.own.protocol.hello(0), seen=7, seen_boot=h.target.protocol.boot)],
        "edge.lie",
    ),
    "an incarnation to come": (lambda h: [replace(h.own.protocol.hello(0), knows=FIRST + 2**32)], "edge.lie"),
    "the last incarnation": (lambda h: [replace(h.own.protocol.hello(0), knows=2**64 - 1)], "edge.lie"),
}


def cases(hostile: Hostile) -> dict[str, tuple[Says, str]]:
    of_shares = bool(hostile.target.protocol.mass)
    found = FOR_ALL | (OF_SHARES if of_shares else OF_ROWS)
    return found | {case: each for case, each in THEN_GREET_ANEW.items() if of_shares or "share" not in case}


def test_a_broken_rule_is_named_and_changes_nothing(hostile: Hostile) -> None:
    hostile.greet()
    before = known(hostile.target)
    for case, (says, code) in cases(hostile).items():
        with raises(RefusedError, code) as refused:
            hostile.say(*says(hostile))
        assert hostile.target.neighbours[3].refused in str(refused.value)
        assert known(hostile.target) == before, case
        assert hostile.target.protocol.is_open(3) == (case not in THEN_GREET_ANEW and code != "peer.quarantined"), case
        hostile.target.neighbours[3].quarantined = ""
        hostile.greet()
    assert json.loads(bytes(hostile.link.call([STATUS_REQUEST], LONG)))["round"] == 0
    hostile.say(hostile.good())
    assert known(hostile.target) != before  # what is right is taken


@pytest.mark.parametrize(
    ("x", "weight"),
    [(0.0, 0.0), (0.0, -1.0), (0.0, 9.0), (0.0, 1e6), (0.0, 1e300), (0.0, math.nan), (1e25, 0.25), (-1e5, 1e-12)],
)
def test_an_impossible_share_quarantines_its_sender(hostile: Hostile, x: float, weight: float) -> None:
    """And takes no mass: one share of x = 0 and w = 1e6 made the model of every peer it reached 0."""
    if not hostile.target.protocol.mass:
        pytest.skip("gossip has no weights")
    hostile.greet()
    before = known(hostile.target)
    with raises(RefusedError, "peer.quarantined", names="peer 3 .* peer 0"):
        hostile.say(hostile.bad_rows(lambda rows: far(rows, x, weight)))
    for _ in range(2):
        with raises(RefusedError, "peer.quarantined", names="peer 3"):
            hostile.say(replace(hostile.own.protocol.hello(0)))
    assert known(hostile.target) == before
    assert not hostile.target.protocol.is_open(3)
    assert f"{x:.3g}" if x else "weight" in hostile.target.status()["quarantined"]["3"]
    assert not hostile.target.session.has_news(3, float("inf"))


def far(rows: Mapping[str, Tensor], x: float, weight: float) -> dict[str, Tensor]:
    """Return a share whose model has one number x / weight, and else 0."""
    values = torch.zeros_like(rows["x"])
    values[-1] = x
    return {"x": values, "w": torch.full_like(rows["w"], weight)}


def test_a_large_model_is_accepted_by_a_new_peer(hostile: Hostile) -> None:
    if not hostile.target.protocol.mass:
        pytest.skip("gossip has no weights")
    hostile.greet()
    hostile.say(hostile.bad_rows(lambda rows: far(rows, 1e5, 0.25)))
    assert hostile.target.protocol.waiting_rounds() == {3: 0}


def say_again(hostile: Hostile) -> None:
    """Say everything once more, in another order too; who says old things has to greet anew."""
    for content in (hostile.said + hostile.said[::-1]) * 2:
        with contextlib.suppress(RefusedError):
            hostile.link.call([content], LONG)
    hostile.greet()


def test_repeated_messages_change_nothing(hostile: Hostile) -> None:
    hostile.greet()
    if hostile.own.protocol.mass:
        hostile.own.exchanges.split(0, {0: 0.5})
        performed(hostile.own.commit(1))
        hostile.say(*hostile.own.protocol.shares_to_send())
    else:
        hostile.say(hostile.good())
    hostile.greet()
    before = known(hostile.target)
    say_again(hostile)
    assert known(hostile.target) == before
    if hostile.target.protocol.mass:
        hostile.target.exchanges.absorb()
        performed(hostile.target.commit(1))
        before = known(hostile.target)
        say_again(hostile)
        hostile.target.exchanges.absorb()
        assert known(hostile.target) == before


def test_delayed_messages_set_no_peer_back(hostile: Hostile) -> None:
    """The last hello may overtake a share, or rows: who took its sender to be under way still would wait for nobody."""
    hostile.greet()
    late: Message = hostile.message()
    if hostile.own.protocol.mass:
        hostile.own.exchanges.split(0, {0: 0.5})
        performed(hostile.own.commit(1))
        (late,) = hostile.own.protocol.shares_to_send()
    last = replace(hostile.own.protocol.hello(0), round_index=ROUNDS)
    hostile.say(last, late)
    hostile.say(replace(last, round_index=2))
    assert hostile.target.neighbours[3].round_index == ROUNDS
    hostile.say(replace(last, round_index=2, boot=last.boot + 1, opened=False))
    assert hostile.target.neighbours[3].round_index == 2


@pytest.mark.parametrize("change", [{"sent": 5}, {"sender": 2}])
def test_a_refused_message_makes_no_peer_join_late(change: dict[str, Any], hostile: Hostile) -> None:
    hostile.target.session.is_new = True
    before = known(hostile.target)
    with pytest.raises(RefusedError):
        hostile.say(replace(hostile.own.protocol.hello(0), round_index=9, knows=0, **change))
    assert known(hostile.target) == before


def test_a_peer_that_is_no_neighbour_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("topology.name=directed-ring", f"rounds={ROUNDS}")
    theirs = devices(scenario, tmp_path)
    target, own = running_peer(scenario, theirs[0]), running_peer(scenario, theirs[2])
    port = listening(target)
    link = StreamConnection(f"127.0.0.1:{port}", "peer-0.tiny", theirs[2].credentials, 1 << 20)
    assert isinstance(own, AsynchronousPeer)
    performed(own._begin())
    before = known(target)
    try:
        for message in (
            replace(own.protocol.hello(1), receiver=0, round_index=9),
            Acknowledgement(2, 0, FIRST, FIRST, 1, 1, 1),
            FrozenShare(2, 0, FIRST, FIRST, 1, 1, 0, {name: row[0] for name, row in target.state.rows.items()}),
        ):
            report = replace(own.witness.report(1), receiver=0)
            with raises(RefusedError, "witness.neighbor", names="peer 2 .* peer 0"):
                link.call([b"".join(b"".join(own.session.frames.encode(part)) for part in (report, message))], LONG)
        assert known(target) == before
    finally:
        link.close()
        driver_of(target).close()
        own.close()


def test_a_run_beside_a_hostile_neighbour_keeps_its_mass(tiny: Tiny, tmp_path: Path) -> None:
    """Peer 3 shakes hands and then says everything that is wrong, again and again, and takes no share."""
    scenario = tiny(STILL, "topology.name=complete", "rounds=30000", "evaluation.every=30000", QUICK)
    theirs = devices(scenario, tmp_path)
    peers = [running_peer(scenario, device) for device in theirs]
    begin_without(peers[:3], 3)
    start, own = peers[0].state.rows["x"][0].clone(), peers[3]
    assert isinstance(own, AsynchronousPeer)
    performed(own._begin())
    refused, link = 0, StreamConnection(theirs[0].addresses[0], "peer-0.tiny", theirs[3].credentials, 1 << 20)
    evil = Hostile(peers[0], own, link, [])  # type: ignore[arg-type]
    try:
        with running(peers[:3]) as futures:
            while not any(future.done() for future in futures) and (refused < 50 or peers[0].state.round_index < 10):
                for says in [*(each for each, _ in cases(evil).values()), lambda h: [h.own.protocol.hello(0)]]:
                    try:
                        evil.say(*says(evil))
                    except RefusedError:
                        refused += 1
                    except UnreachableError:  # it is not there yet
                        time.sleep(0.05)
            stop_all(peers[:3], futures)
    finally:
        link.close()
        own.close()
    found = mass_on_disk([tmp_path / name for name in FOLDERS])
    torch.testing.assert_close(found["w"], torch.tensor(4.0, dtype=torch.float64))
    torch.testing.assert_close(found["x"], 4 * start, rtol=0, atol=1e-9)


INTEGERS = [0, 1, 2, 7, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -1.0, float("nan"), float("inf"), 1e25, 3e38, 1e300]


def fuzzed(hostile: Hostile, draw: Random) -> Message:
    """Return a message of any type with a hostile value or two in it."""
    makers = [hostile.own.protocol.hello, lambda _: hostile.acknowledgement(), lambda _: hostile.good()]
    message: Any = draw.choice(makers)(0)
    for _ in range(draw.choice([1, 1, 2, 4])):
        name = draw.choice([name for name in vars(message) if name != "receiver"])
        if name == "values":
            part = draw.choice(sorted(message.values))
            value = torch.full_like(message.values[part], draw.choice(FLOATS))
            message = replace(message, values={**message.values, part: value})
        elif name == "opened":
            message = replace(message, opened=not message.opened)
        else:
            near = [max(0, getattr(message, name) + change) for change in (-1, 1, 2)]
            message = replace(message, **{name: draw.choice(INTEGERS + near)})
    return message


@pytest.mark.parametrize("name", NAMES)
def test_no_message_of_a_member_ends_a_peer(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Hostile values in every field of every message, from the first that a new process gets; the others go on."""
    settings = settings_for(f"algorithm.name={name}")
    scenario = tiny(*settings, "topology.name=complete", "rounds=30000", "evaluation.every=30000", QUICK)
    theirs, draw = devices(scenario, tmp_path), Random(7)
    peers = [running_peer(scenario, device) for device in theirs]
    begin_without(peers[:3], 3)
    own, refused = peers[3], 0
    assert isinstance(own, AsynchronousPeer)
    performed(own._begin())
    link = StreamConnection(theirs[0].addresses[0], "peer-0.tiny", theirs[3].credentials, 1 << 20)
    evil = Hostile(peers[0], own, link, [])  # type: ignore[arg-type]
    try:
        with running(peers[:3]) as futures:
            wait_until(lambda: any(peer.status()["bytes_received"] for peer in peers[:3]))
            for number in range(400):
                evil.target.neighbours[3].quarantined = ""
                with contextlib.suppress(RefusedError, UnreachableError, struct.error, OverflowError):
                    if number % 20 == 19:
                        with contextlib.suppress(AssertionError):  # it may have lost what it remembers by its own lies
                            evil.greet()
                    refused += 1
                    evil.say(fuzzed(evil, draw))
                    refused -= 1
            before = [peer.state.round_index for peer in peers[:3]]
            wait_until(
                lambda: (
                    any(future.done() for future in futures)
                    or all(peer.state.round_index > start for peer, start in zip(peers, before, strict=False))
                )
            )
            assert [future.done() for future in futures] == [False] * 3
            stop_all(peers[:3], futures)
    finally:
        link.close()
        own.close()
    assert refused > 100


def test_an_incarnation_is_announced_only_once_on_disk(hostile: Hostile) -> None:
    """A thread that asks for calls between the two would end, and its neighbour would never be heard again."""
    protocol, mail = hostile.target.protocol, hostile.target.session
    assert mail.has_news(3, float("inf"))
    with driver_of(hostile.target).lock:
        protocol.reset()
        assert not mail.has_news(3, float("inf"))
    performed(hostile.target.commit(0))
    assert mail.has_news(3, float("inf"))
    assert isinstance(mail, AsynchronousSession)


def test_a_failing_thread_ends_the_run_with_reason(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=2")
    peer = running_peer(scenario, devices(scenario, tmp_path)[0])

    def broken(*_: Any) -> Any:
        raise KeyError("nobody thought of this")

    peer.session.calls = broken  # type: ignore[attr-defined]
    with raises(RunError, "network.failed", names="peer 3 .*KeyError: 'nobody thought"):
        finish(peer)
