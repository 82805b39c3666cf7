"""Measure how many rounds a second peers keep while one of them is flooded: `python -m tools.floods`.

Four private peers run on this machine. Each flood goes to peer 0 from a process of its own, for some seconds between
two calm spells of the same length; printed is the rate of the other honest peers over the mean of both spells, and that
of peer 0. Peer 3 is the member whose certificate a flood uses: it goes on, and its own edge lacks what the flood takes
of its four calls at a time. The flood's own process takes time of the same processors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flower_privdec.common.errors import RunError
from flower_privdec.network.local.peer_processes import PeerProcesses, Watch, on_this_machine
from flower_privdec.network.transport.failures import address_of
from flower_privdec.network.transport.streams import CALL, HEADER, StreamConnection
from flower_privdec.network.transport.tls import credentials_of, identities, stream_context
from flower_privdec.scenario import Scenario, load_scenario

PEERS = 4
TARGET = 0
MEMBER = 3
STRANGER = "127.0.0.9"
SETTINGS = [
    f"n_peers={PEERS}",
    "rounds=1000000",
    "evaluation.every=1000000",
    "privacy={noise_multiplier: 1.0, delta: 1.0e-3}",
]
# Connections that a stranger holds; and opens, or calls that a member makes, a second
OPEN = 1300
EACH_SECOND = 100
Flood = Callable[[str, Path, Scenario], None]


def silent(address: str, certificates: Path, scenario: Scenario) -> None:
    """Open connections that send nothing, and hold them."""
    _hold(address, lambda connection: None)


def handshakes(address: str, certificates: Path, scenario: Scenario) -> None:
    """Begin TLS with each connection, and stop in the middle of it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def greet(connection: socket.socket) -> None:
        connection.setblocking(False)
        incoming = ssl.MemoryBIO()
        outgoing = ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing).do_handshake()
        connection.send(outgoing.read())

    _hold(address, greet)


def _hold(address: str, greet: Callable[[socket.socket], None]) -> None:
    host, _, port = address.rpartition(":")
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            held.append(socket.create_connection((host, int(port)), 1.0, source_address=(STRANGER, 0)))
            greet(held[-1])
        while len(held) > OPEN:
            held.pop(0).close()
        time.sleep(1 / EACH_SECOND)


def dripping(address: str, certificates: Path, scenario: Scenario) -> None:
    """Hold sixty calls of a member, each of which sends a byte a second."""
    held: list[ssl.SSLSocket] = []
    while True:
        for stream in held:
            with suppress(OSError):
                stream.send(b"\0")
        while len(held) >= 60:
            held.pop(0).close()
        with suppress(OSError):
            held.append(_stream(address, certificates, scenario))
            held[-1].sendall(HEADER.pack(CALL, 1, 1000))
        time.sleep(1 / EACH_SECOND)


def malformed(address: str, certificates: Path, scenario: Scenario) -> None:
    """Make calls of a member with bytes that are no message."""
    own = credentials_of(scenario, certificates, MEMBER)
    link = StreamConnection(address, identities(scenario)[TARGET], own, 1 << 20)
    while True:
        with suppress(RunError):
            link.call([bytes(1000)], 5.0)
        time.sleep(1 / EACH_SECOND)


def _stream(address: str, certificates: Path, scenario: Scenario) -> ssl.SSLSocket:
    context = stream_context(credentials_of(scenario, certificates, MEMBER), is_called=False)
    plain = socket.create_connection(address_of(address), 1.0)
    return context.wrap_socket(plain, server_hostname=identities(scenario)[TARGET])


FLOODS: dict[str, Flood] = {flood.__name__: flood for flood in (silent, handshakes, dripping, malformed)}


def main() -> None:
    """Print a line for each flood; exit with status 1 where a peer ended."""
    parser = argparse.ArgumentParser(prog="python -m tools.floods", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each spell (default: %(default)s)")
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help=f"{', '.join(FLOODS)} (default: all)")
    chosen = parser.parse_args()
    names = chosen.floods or list(FLOODS)
    if unknown := sorted(set(names) - set(FLOODS)):
        parser.error(f"{unknown[0]} must be one of {', '.join(FLOODS)}")
    scenario = on_this_machine(load_scenario("digits", overrides=SETTINGS))
    rounds = dict.fromkeys(range(PEERS), 0)

    def note(peer: int, status: dict[str, Any] | None, word: str) -> None:
        rounds[peer] = rounds[peer] if status is None else status["round"]

    def spell() -> tuple[float, float]:
        """Return the rounds a second of the others' slowest and of the target."""
        before = dict(rounds)
        since = time.monotonic()
        time.sleep(chosen.seconds)
        passed = time.monotonic() - since
        speeds = {peer: (rounds[peer] - before[peer]) / passed for peer in rounds}
        return min(speed for peer, speed in speeds.items() if peer not in (TARGET, MEMBER)), speeds[TARGET]

    with tempfile.TemporaryDirectory(prefix="floods") as folder, PeerProcesses(scenario, Path(folder)) as processes:
        processes.prepare()
        for peer in processes.peers:
            processes.start(peer)
        with Watch(processes, note):
            while min(rounds.values()) < 20:
                time.sleep(0.2)
            assert scenario.network.peers is not None
            address = scenario.network.peers[TARGET].address
            calm = spell()
            for name in names:
                flooding = multiprocessing.Process(
                    target=FLOODS[name], args=(address, processes.certificates, scenario), daemon=True
                )
                flooding.start()
                during = spell()
                flooding.terminate()
                flooding.join()
                time.sleep(10)  # until what it left is closed
                after = spell()
                usual = (calm[0] + after[0]) / 2
                print(
                    f"{name:10}  others {during[0]:6.2f} of {usual:6.2f} rounds a second "
                    f"({during[0] / usual:.0%}), the flooded one {during[1]:6.2f}",
                    flush=True,
                )
                calm = after
        ended = [peer for peer in processes.peers if processes.status(peer) is not None]
        sys.exit(f"peers {ended} ended: {processes.last_line(ended[0])}" if ended else None)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
