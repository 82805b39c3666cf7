"""Calls go both ways over one stream, whichever side opened it, so that a device that only dials out is called too."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from networked import LONG, devices, running
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec import testing
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.network.transport import streams
from flower_privdec.network.transport.kinds.over_tls import TlsTransport
from flower_privdec.network.transport.stream_server import StreamServer
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import Authority, make_certificates
from flower_privdec.network.transport.transport import Reply, UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario import parse_scenario, to_yaml

NAMES = ("peer-0.tiny", "peer-1.tiny")
CAP = 1 << 23


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


class Ends:
    """Peers whose transports are in this thread: each answers a call with its number and what was said."""

    def __init__(self, authority: Authority) -> None:
        self.stack = ExitStack()
        self.credentials = [authority.issue(name) for name in NAMES]
        self.transports: dict[int, TlsTransport] = {}
        self.links: dict[int, StreamConnection] = {}

    def begin(self, peer: int, addresses: tuple[str | None, ...], **options: Any) -> None:
        """Begin a peer, in the place of one that began before."""
        transport = TlsTransport(peer, addresses, NAMES, self.credentials[peer], **options)
        self.stack.callback(transport.close)

        def take(caller: int, content: memoryview, reply: Reply) -> None:
            reply([b"%d>%d:" % (caller, peer), content])

        transport.listen(take, CAP, 1)
        self.transports[peer] = transport
        self.links[peer] = transport.connect(1 - peer, CAP)

    def server(self, peer: int) -> StreamServer:
        server = self.transports[peer]._server
        assert server is not None
        return server

    def streams(self, peer: int) -> int:
        """Return how many streams the other side has opened to a peer."""
        return len(self.server(peer)._streams_of[1 - peer])

    def until(self, ready: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if ready():
                return
            for transport in self.transports.values():
                transport.turn(0.005)
        raise AssertionError("it is not so")

    def call(self, caller: int, content: bytes) -> bytes:
        """Call the other peer, and return its answer; raises what the call does."""
        answers: list[Any] = []
        self.links[caller].post([content], LONG, answers.append)
        self.until(lambda: bool(answers))
        if isinstance(answers[0], RunError):
            raise answers[0]
        return bytes(answers[0])


@pytest.fixture
def both(authority: Authority) -> Iterator[Ends]:
    ends = Ends(authority)
    with ends.stack:
        yield ends


def begin(both: Ends, dials_out: bool = True) -> tuple[str | None, ...]:
    """Begin two peers, of which the second only dials out, or both have an address; return their addresses."""
    one, other = own_addresses(2)
    addresses = (one, None if dials_out else other)
    for peer in range(2):
        both.begin(peer, addresses)
    if dials_out:
        both.until(lambda: both.server(0).offered(NAMES[1]) is not None)
    return addresses


def test_a_dialling_device_is_called_over_its_stream(both: Ends) -> None:
    begin(both)  # it has not called yet
    assert both.call(0, b"hello") == b"0>1:hello"
    assert both.call(1, b"and you") == b"1>0:and you"
    assert (both.streams(0), both.streams(1), both.server(1).port) == (1, 0, 0)


def test_the_number_of_a_call_begins_again(both: Ends) -> None:
    begin(both)
    for link in both.links.values():
        link._number = streams.MOST_NUMBER - 3
    for _ in range(5):
        assert both.call(0, b"?") == b"0>1:?"
        assert both.call(1, b"?") == b"1>0:?"


@pytest.mark.parametrize("first", [0, 1])
def test_one_stream_is_enough_for_two_that_dial(first: int, both: Ends) -> None:
    begin(both, dials_out=False)
    for caller in (first, 1 - first, first, 1 - first):
        assert both.call(caller, b"?") == b"%d>%d:?" % (caller, 1 - caller)
    assert both.streams(1 - first) == 1
    assert both.streams(first) == 0


@pytest.mark.parametrize("dials", ["one", "both"])
def test_calls_at_once_each_way_are_all_answered(dials: str, both: Ends) -> None:
    """Large ones fill both directions; where both dial at once, each side keeps its own stream."""
    begin(both, dials_out=dials == "one")
    wanted = 12
    heard: dict[int, list[bytes]] = {0: [], 1: []}

    def call(caller: int) -> None:
        content = bytes([len(heard[caller]), caller]) * (1 << 20)

        def answered(answer: Any) -> None:
            assert bytes(answer) == b"%d>%d:" % (caller, 1 - caller) + content
            heard[caller].append(b"")
            if len(heard[caller]) < wanted:
                call(caller)

        both.links[caller].post([content], LONG, answered)

    call(0)
    call(1)
    both.until(lambda: all(len(answers) == wanted for answers in heard.values()))
    assert both.streams(0) + both.streams(1) == (2 if dials == "both" else 1)


def test_a_lost_stream_is_replaced_by_the_other(both: Ends) -> None:
    begin(both, dials_out=False)
    answers: list[Any] = []
    for link in both.links.values():
        link.post([b"?"], LONG, answers.append)
    both.until(lambda: len(answers) == 2)
    both.links[0]._stream.close("cut")  # type: ignore[union-attr]
    both.until(lambda: both.streams(1) == 0)
    assert both.call(0, b"still") == b"0>1:still"
    assert (both.streams(0), both.streams(1)) == (1, 0)


def test_a_lost_stream_is_opened_again_unasked(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REOPEN_SECONDS", 0.01)
    begin(both)
    for _ in range(3):
        both.server(0).offered(NAMES[1]).close("cut")  # type: ignore[union-attr]
        assert both.server(0).offered(NAMES[1]) is None
        both.until(lambda: both.server(0).offered(NAMES[1]) is not None)
        assert both.call(0, b"?") == b"0>1:?"


class NoPause:
    """In place of a pause, which it notes and does not take."""

    taken: ClassVar[list[float]] = []

    def __init__(self, loop: streams.StreamLoop, seconds: float, go_on: Callable[[], None]) -> None:
        self.taken.append(seconds)
        loop.later(go_on)


def test_a_stream_that_lasted_is_replaced_without_pause(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not last is opened again ever later, so that nobody is dialled without end."""
    begin(both)
    monkeypatch.setattr(streams, "StreamPause", NoPause)
    monkeypatch.setattr(NoPause, "taken", [])
    monkeypatch.setattr(streams, "REOPEN_SECONDS", 1000.0)
    server = both.server(0)

    def cut() -> None:
        server.offered(NAMES[1]).close("cut")  # type: ignore[union-attr]
        both.until(lambda: server.offered(NAMES[1]) is not None)

    for _ in range(2):
        both.links[1]._opened_at -= 1000.0
        cut()
    assert NoPause.taken == []
    for _ in range(3):
        cut()
    first = streams.LOOK_SECONDS
    assert NoPause.taken == [first, 2 * first, 4 * first]


def test_an_absent_peer_is_dialled_until_it_is_there(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REOPEN_SECONDS", 0.01)
    addresses = (own_addresses(1)[0], None)
    both.begin(1, addresses)
    for _ in range(30):
        both.transports[1].turn(0.01)
    both.begin(0, addresses)
    both.until(lambda: both.server(0).offered(NAMES[1]) is not None)
    assert both.call(0, b"?") == b"0>1:?"


def test_a_newer_stream_ends_calls_over_a_dead_one(both: Ends) -> None:
    """Behind a NAT that forgot the first, nothing of it comes any more, and nothing says so."""
    addresses = begin(both)
    dead = both.transports.pop(1)  # nobody reads what comes to it
    answers: list[Any] = []
    both.links[0].post([b"into nothing"], LONG, answers.append)
    both.transports[0].turn(0.01)
    assert answers == []
    both.begin(1, addresses)
    both.until(lambda: bool(answers))
    assert isinstance(answers[0], UnreachableError)
    assert both.call(0, b"again") == b"0>1:again"
    assert both.streams(0) == 1
    dead.turn(0.0)


def test_without_its_stream_such_a_device_is_named(both: Ends) -> None:
    both.begin(0, (own_addresses(1)[0], None))
    with raises(UnreachableError, "call.dials-out", names="peer-1.tiny only dials out"):
        both.call(0, b"?")
    assert "peer-1.tiny only dials out" in both.links[0].diagnosis()


def test_a_strangers_offer_is_passed_over(both: Ends, authority: Authority) -> None:
    """And who only asks, as for a status, offers nothing."""
    begin(both)
    loop = both.transports[0]._loop
    stranger = StreamConnection(
        both.links[1].address, NAMES[0], authority.issue("peer-7.tiny"), CAP, loop, both.server(0)
    )
    asking = StreamConnection(both.links[1].address, NAMES[0], both.credentials[1], CAP, loop)
    offered = both.server(0)._offered
    both.until(lambda: 1 in offered)
    mine = offered[1]
    answers: list[Any] = []
    for link in (stranger, asking):
        link.post([b"?"], LONG, answers.append)
    both.until(lambda: len(answers) == 2)
    assert offered == {1: mine}
    assert sorted(type(answer) for answer in answers if isinstance(answer, Exception)) == [RefusedError]


def test_an_expired_certificate_is_not_called_back(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(both)
    assert both.call(0, b"?") == b"0>1:?"
    monkeypatch.setattr(streams, "UTC_NOW", lambda: datetime.now(UTC) + timedelta(days=400))
    with raises(UnreachableError, "call.unanswered", names="its certificate is refused here"):
        both.call(0, b"?")


def test_all_addresses_of_a_name_are_tried_at_once(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the first two, or they are of a family that is not here; the one that answers is kept."""
    gone, gone_too = own_addresses(2)
    here = str(begin(both)[0])
    real = socket.getaddrinfo
    tried: list[Any] = []

    def several(host: str, port: int, *more: Any, **options: Any) -> Any:
        if options.get("flags"):
            raise socket.gaierror
        return [real(*address.split(":"), type=socket.SOCK_STREAM)[0] for address in (gone, gone_too, here)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    dial = StreamConnection._connect_to
    monkeypatch.setattr(StreamConnection, "_connect_to", lambda link, found: (tried.append(link), dial(link, found))[1])
    link = StreamConnection("peer-0.lab:7100", NAMES[0], both.credentials[1], CAP, both.transports[1]._loop)
    for number in range(2):
        answers: list[Any] = []
        link.post([b"?"], LONG, answers.append)
        both.until(lambda answers=answers: bool(answers))  # type: ignore[misc]
        assert bytes(answers[0]) == b"1>0:?", number
        link._stream.close("cut")  # type: ignore[union-attr]
    assert len(tried) == 4
    assert set(tried) == {link}


@pytest.mark.parametrize("listen", ["0.0.0.0", "[::]", "127.0.0.1"])
def test_a_peer_listens_apart_from_its_address(listen: str, both: Ends) -> None:
    if listen == "[::]" and not has_ipv6():
        pytest.skip("NOT TESTED: no IPv6 here")
    addresses = (own_addresses(1)[0], None)
    port = addresses[0].partition(":")[2]
    both.begin(0, addresses, listen=f"{listen}:{port}")
    both.begin(1, addresses)
    assert both.call(1, b"?") == b"1>0:?"
    assert both.call(0, b"?") == b"0>1:?"
    if listen == "[::]":
        both.links[1].address = f"[::1]:{port}"
        both.links[1]._stream.close("to dial again")  # type: ignore[union-attr]
        assert both.call(1, b"six") == b"1>0:six"


def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system have no IPv6, as a kernel that was started without."""
    real = socket.socket

    class Without(real):  # type: ignore[valid-type, misc]
        def __init__(self, family: int = -1, *more: Any, **options: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *more, **options)

    monkeypatch.setattr(socket, "socket", Without)


def test_a_family_that_is_not_here_ends_nothing(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has an address of it too is dialled and listened on; an address of it is named."""
    without_ipv6(monkeypatch)
    real = socket.getaddrinfo

    def two(host: str, port: int, *more: Any, **options: Any) -> Any:
        if host != "peer-0.lab":
            return real(host, port, *more, **options)
        if options.get("flags"):
            raise socket.gaierror
        return [real(one, port, type=socket.SOCK_STREAM)[0] for one in ("::1", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    port = own_addresses(1)[0].partition(":")[2]
    addresses = (f"peer-0.lab:{port}", None)
    both.begin(0, addresses)
    both.begin(1, addresses)
    assert both.call(1, b"?") == b"1>0:?"

    both.links[1].address = "[::1]:7100"
    both.links[1]._stream.close("to dial again")  # type: ignore[union-attr]
    with raises(UnreachableError, "call.unanswered", names=os.strerror(errno.EAFNOSUPPORT)):
        both.call(1, b"?")
    assert "this device has no IPv6" in both.links[1].diagnosis()
    with raises(RunError, "listen.no-family", names="this device has no IPv6"):
        both.begin(0, ("[::1]:7100", None))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


# --- scenarios ---

PLACES = "network={{mode: synchronous, links: local, deadline: 100, final_mixing: 0, peers: [{}]}}"


def places(*addresses: str | None) -> str:
    each = ("dial: out" if address is None else f"address: '{address}'" for address in addresses)
    return PLACES.format(", ".join(f"{{{place}}}" for place in each))


WRONG = {
    "two that only dial": ((None, None, "10.0.0.3:7100", "10.0.0.4:7100"), "network.dials-out"),
    "link-local without an interface": (("[fe80::1]:7100", "a:1", "b:1", "c:1"), "network.link-local"),
    "no address of IPv6": (("[1::2::3]:7100", "a:1", "b:1", "c:1"), "network.address"),
    "an IPv4 address in brackets": (("[10.0.0.1]:7100", "a:1", "b:1", "c:1"), "network.address"),
    "an IPv4 address within one of IPv6": (("[::ffff:10.0.0.1]:7100", "a:1", "b:1", "c:1"), "network.address"),
    "one address in two spellings": (("[fd00::1]:71", "[fd00:0::0:1]:71", "b:1", "c:1"), "network.repeated-peer"),
    "one name in two spellings": (("ward.lan:71", "Ward.lan:71", "b:1", "c:1"), "network.repeated-peer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_addresses_that_cannot_work_are_refused(case: str, tiny: Tiny) -> None:
    addresses, code = WRONG[case]
    with raises(ScenarioError, code):
        Experiment.build(tiny(places(*addresses)))


@pytest.mark.parametrize("place", ["{identity: a}", "{}", "{address: null}", "{address: 'c:1', dial: out}"])
def test_a_peer_has_an_address_or_dials_out(place: str, tiny: Tiny) -> None:
    with raises(ScenarioError, "network.no-address"):
        tiny(f"network={{peers: [{place}, {{dial: out}}, {{address: 'a:1'}}, {{address: 'b:1'}}]}}")


def test_an_interface_may_be_named_for_link_local_addresses(tiny: Tiny) -> None:
    scenario = tiny(places("[fe80::1%eth0]:7100", None, "[fd00::7]:7100", "ward.lan:7100"))
    again = parse_scenario(to_yaml(scenario))
    assert again.network.peers == scenario.network.peers
    assert again.network.peers is not None
    assert again.network.peers[1].address is None


@pytest.mark.parametrize("anywhere", ["0.0.0.0:7100", "[::]:7100"])
def test_nobody_dials_all_addresses_of_a_device(anywhere: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(places("10.0.0.1:7100", anywhere, "10.0.0.3:7100", None))
    make_certificates(scenario, tmp_path)
    with raises(ScenarioError, "peer.anywhere", names="listen"):
        device_of(scenario, 0, tmp_path, tmp_path)
    assert device_of(scenario, 1, tmp_path, tmp_path).listen is None
    assert device_of(scenario, 1, tmp_path, tmp_path, listen="[::1]:7200").listen == "[::1]:7200"
    with raises(ScenarioError, "network.address", names="--listen here"):
        device_of(scenario, 1, tmp_path, tmp_path, listen="here")


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_star_trains_whose_leaves_only_dial(mode: str, tiny: Tiny, tmp_path: Path) -> None:
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}, final_mixing: 0}}"
    scenario = tiny(network, "topology.name=star", "rounds=4")
    theirs = devices(scenario, tmp_path, dials_out=(1, 2, 3))
    peers = [running_peer(scenario, device) for device in theirs]
    with running(peers) as futures:
        rows = [future.result(LONG) for future in futures]
    if mode == "synchronous":
        wanted = testing.run_rounds(Experiment.build(scenario), 4)
        torch.testing.assert_close(torch.cat([row["x"] for row in rows]), wanted.state.rows["x"])
