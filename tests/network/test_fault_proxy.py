"""The fault proxy does what it says to the bytes; and peers behind it do what they do without one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from raising import raises
from variants import settings_for

from flower_privdec.common.errors import ArgumentError

pytest.importorskip("grpc")

from networked import devices, finish

from flower_privdec import testing
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.scenario import Scenario
from tools.soak.fault_proxy import PIECE, CutPlace, FaultProxy, LinkFaults, RecordCounter, RecordCut

LINK = (0, 1)
PATIENCE = 100.0


@pytest.fixture
def echo() -> Iterator[str]:
    """Yield the address of somebody who says everything again."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection = server.accept()[0]
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while said := connection.recv(PIECE):
                connection.sendall(said)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy(seed=3) as made:
        yield made


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def heard(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (piece := connection.recv(count - len(found))):
        found += piece
    return found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_everything_arrives_in_order_and_either_side_may_end(proxy: FaultProxy, echo: str) -> None:
    said = bytes(range(256)) * 8192  # more than fits into what is on its way
    address = proxy.link(LINK, echo)
    assert address.startswith("127.0.0.1:")
    with closing(connected(address)) as connection, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(connection.sendall, said)
        assert heard(connection, len(said)) == said
        sending.result(PATIENCE)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    until(lambda: proxy.counts(LINK) == {"connections": 1, "cuts": 0, "bytes": 2 * len(said)})


def test_a_copy_of_a_peer_uses_its_links(proxy: FaultProxy) -> None:
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    assert proxy.through(0, addresses) == proxy.through(0, addresses)


def test_delayed_bytes_come_later_and_together(proxy: FaultProxy, echo: str) -> None:
    address = proxy.link(LINK, echo)
    proxy.set(LINK, LinkFaults(delay=0.1, jitter=0.05))
    with closing(connected(address)) as connection:
        since = time.monotonic()
        for piece in (b"a", b"b", b"c"):
            connection.sendall(piece)
            time.sleep(0.01)
        assert heard(connection, 3) == b"abc"
        assert time.monotonic() - since >= 0.2  # there and back


def test_a_throttled_link_has_a_rate(proxy: FaultProxy, echo: str) -> None:
    address = proxy.link(LINK, echo)
    proxy.set(LINK, LinkFaults(rate=200_000))
    with closing(connected(address)) as connection:
        since = time.monotonic()
        for _ in range(4):
            connection.sendall(bytes(10_000))
            heard(connection, 10_000)
        assert time.monotonic() - since >= 3 * 10_000 / 200_000


def test_a_cut_ends_what_is_open_and_nothing_else(proxy: FaultProxy, echo: str) -> None:
    address = proxy.link(LINK, echo)
    with closing(connected(address)) as connection:
        connection.sendall(b"before")
        assert heard(connection, 6) == b"before"
        proxy.cut(LINK)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    with closing(connected(address)) as connection:
        connection.sendall(b"after")
        assert heard(connection, 5) == b"after"
    assert proxy.counts(LINK)["cuts"] == 1


def test_a_healed_black_hole_returns_everything(proxy: FaultProxy, echo: str) -> None:
    address = proxy.link(LINK, echo)
    with closing(connected(address)) as before:
        before.sendall(b"0")
        assert heard(before, 1) == b"0"
        proxy.set(LINK, LinkFaults(black_hole=True))
        with closing(connected(address)) as during:
            for connection in (before, during):
                connection.settimeout(0.2)
                connection.sendall(b"1")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
            proxy.set(LINK, LinkFaults())
            for connection in (before, during):
                connection.settimeout(PATIENCE)
                assert heard(connection, 1) == b"1"


def test_the_same_seed_cuts_at_the_same_piece(echo: str) -> None:
    def survived(seed: int, name: object) -> list[int]:
        """Return how many one-byte words each of some connections carried there and back."""
        found = []
        with FaultProxy(seed) as proxy:
            address = proxy.link(name, echo)
            proxy.set(name, LinkFaults(cut=0.1))
            for _ in range(6):
                with closing(connected(address)) as connection:
                    count = 0
                    with suppress(ConnectionError):
                        while count < 200:
                            connection.sendall(b"x")
                            if not connection.recv(1):
                                break
                            count += 1
                    found.append(count)
        return found

    once = survived(1, LINK)
    assert survived(1, LINK) == once
    assert survived(2, LINK) != once
    assert survived(1, (1, 0)) != once
    assert len(set(once)) > 1
    assert max(once) < 200


def test_a_proxy_without_a_peer_refuses_connections(proxy: FaultProxy) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        address = proxy.link(LINK, f"127.0.0.1:{unused.getsockname()[1]}")
        with closing(connected(address)) as connection, suppress(ConnectionError):
            assert connection.recv(1) == b""


def record(content: bytes) -> bytes:
    """Return a record as TLS frames one."""
    return b"\x17\x03\x03" + len(content).to_bytes(2) + content


@pytest.mark.parametrize("piece", [1, 4, 7, 1000])
@pytest.mark.parametrize(("place", "wanted"), [("before", 11), ("within", 19), ("after", 22)])
def test_a_cut_is_at_its_place_in_any_pieces(place: CutPlace, wanted: int, piece: int) -> None:
    said = record(b"hello!") + record(b"world!") + record(b"more")
    counter = RecordCounter(RecordCut("there", 2, place))
    passed = 0
    for begin in range(0, len(said), piece):
        passing = counter.passing(said[begin : begin + piece])
        if passing is not None:
            passed += passing
            break
        passed += piece
    assert passed == wanted


def test_connections_are_cut_one_after_the_other(proxy: FaultProxy, echo: str) -> None:
    said = record(b"hello!")
    address = proxy.link(LINK, echo)
    proxy.set(LINK, LinkFaults(cuts=(RecordCut("there", 2, "before"), RecordCut("back", 1, "within"))))
    for wanted in (said, said[:8], said + said):
        with closing(connected(address)) as connection:
            connection.sendall(said + said)
            answer = b""
            with suppress(ConnectionError):
                answer = heard(connection, 2 * len(said))
        assert wanted.startswith(answer)
        if wanted == said[:8]:
            assert answer == wanted
    assert proxy.counts(LINK)["cuts"] == 2


@pytest.mark.parametrize("black_hole", [False, True])
def test_it_stops_cleanly_while_much_is_under_way(echo: str, black_hole: bool) -> None:
    proxy = FaultProxy()
    address = proxy.link(LINK, echo)
    proxy.set(LINK, LinkFaults(delay=30.0, black_hole=black_hole))
    with closing(connected(address)) as connection:
        connection.sendall(bytes(1 << 20))
        proxy.close()
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    proxy.close()
    assert not any(thread.name == "fault-proxy" for thread in threading.enumerate())
    with pytest.raises(ConnectionError):
        connected(address)


WRONG = [{"cut": -0.1}, {"cut": float("nan")}, {"delay": float("inf")}, {"jitter": -1.0}, {"rate": 0.0}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_number_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with raises(ArgumentError, "faults.setting", f"^{next(iter(wrong))}="):
        LinkFaults(**wrong)  # type: ignore[arg-type]


def test_a_name_is_one_links(proxy: FaultProxy, echo: str) -> None:
    proxy.link(LINK, echo)
    with raises(ArgumentError, "faults.link", r"\(0, 1\)"):
        proxy.link(LINK, echo)


# --- peers behind it ---

FAULTS = {
    "cuts": LinkFaults(cut=0.02),
    "delays": LinkFaults(delay=0.03, jitter=0.05),
    "cuts and delays": LinkFaults(cut=0.02, delay=0.005, jitter=0.02, rate=1e6),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("variant", [["algorithm.name=privsgp"], ["algorithm.name=pdsl"]], ids=" ".join)
def test_peers_behind_it_still_do_what_the_engine_does(
    variant: list[str], faults: str, tiny: Callable[..., Scenario], tmp_path: Path
) -> None:
    scenario = tiny(
        *settings_for(*variant),
        "rounds=4",
        "network={mode: synchronous, links: local, deadline: 120.0, final_mixing: 0}",
    )
    wanted = testing.run_rounds(Experiment.build(scenario), 4).state.rows["x"]
    with FaultProxy(11, FAULTS[faults]) as proxy:
        peers = []
        for device in devices(scenario, tmp_path):
            seen = proxy.through(device.peer, device.addresses)
            peers.append(running_peer(scenario, replace(device, addresses=seen)))
        finished = partial(finish, on_round=partial(cut_all, proxy))
        with ThreadPoolExecutor(len(peers)) as pool:
            found = torch.cat([rows["x"] for rows in pool.map(finished, peers)])
        assert sum(proxy.counts(name)["cuts"] for name in proxy.names) > 0
        assert sum(proxy.counts(name)["bytes"] for name in proxy.names) > wanted.nbytes
    torch.testing.assert_close(found, wanted)


def cut_all(proxy: FaultProxy, running: RunningPeer) -> None:
    """Cut all links after each round of peer 0, but for the last two: after them nobody is left to be asked again."""
    for name in proxy.names if running.device.peer == 0 else ():
        if running.state.round_index < running.rounds - 1:
            proxy.cut(name)
        else:
            proxy.set(name, LinkFaults())
