"""Admission of connections: strangers cannot use up a server's descriptors, and a member has few connections.

gRPC accepts connections itself, and holds no more of them than it is given (`most_connections`). This module watches
them from outside: it reads the process's table of descriptors, and shuts down those connections that have no right to
stay. gRPC sees that the other side hung up. Nothing is added to the path of a message.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import time
from collections import Counter, defaultdict
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network, ip_address
from threading import Event, Lock, Thread
from urllib.parse import unquote

from flower_privdec.common.errors import RunError

HANDSHAKE_SECONDS = 5.0  # until a connection has made a member's call
CONNECTIONS_EACH = 8  # of one member; an honest one has one, one that it lost, and those of `privdec status`
PENDING_EACH = 32  # of one address that have made no member's call yet
MOST_CONNECTIONS, LEAST_CONNECTIONS = 512, 16
MOST_DESCRIPTORS = 4096  # to which a lower soft limit is raised where the hard limit allows it
RESERVED = 96  # descriptors for ledger, checkpoints, data and one's own calls
LOOK_SECONDS = 0.1
REPORT_SECONDS = 60.0  # between two lines on strangers
DESCRIPTORS = "/dev/fd"
_log = logging.getLogger(__name__)

Address = tuple[str, int]  # of the other side


def most_connections(members: int) -> int:
    """Return how many connections a server may hold, so that files can still be opened.

    A soft limit on descriptors is raised as far as the hard limit allows.

    Args:
        members: of the network.

    Raises:
        RunError: too few are left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    used, least = len(os.listdir(DESCRIPTORS)), max(LEAST_CONNECTIONS, 2 * members)
    free = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - used - RESERVED
    if free < least:
        raise RunError(
            f"a limit of {soft} open files (ulimit -n) leaves {max(0, free)} for connections, beside {used} that are "
            f"open and {RESERVED} for files, and {least} are needed: raise it to {used + RESERVED + least} or more",
            code="network.few-descriptors",
        )
    return min(MOST_CONNECTIONS, free)


class Admission:
    """Shuts down connections to a port that have no right to stay.

    A connection is *pending* until a member's call has come over it. One is shut down that is pending for `seconds`, or
    is one too many: the oldest pending ones of an address (of a network of 64 bits, where it has IPv6) beyond
    PENDING_EACH, the oldest pending ones of all beyond half of what the server may hold, and the oldest ones of a
    member beyond CONNECTIONS_EACH. So a newcomer has the time of a handshake, whatever others do.

    Args:
        port: that is listened on.
        most: connections that the server holds at most.
        seconds: see above.
    """

    def __init__(self, port: int, most: int, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Start the watching thread."""
        self._port, self._most, self._seconds = port, most, seconds
        self._guard, self._closed = Lock(), Event()
        self._members: dict[Address, int] = {}
        self._since: dict[Address, float] = {}  # when each connection was first seen
        self._strangers: Counter[str] = Counter()  # connections without a member's call, by host, since the last line
        self._reported = float("-inf")
        Thread(target=self._watch, name="admission", daemon=True).start()

    def admit(self, caller: str, member: int) -> None:
        """Record that a member's call came over a connection.

        Args:
            caller: the connection's other side, as gRPC names it: `ipv4:10.0.0.7:50123`.
        """
        host, _, port = unquote(caller).partition(":")[2].rpartition(":")
        with suppress(ValueError), self._guard:
            self._members[_plain(host.strip("[]")), int(port)] = member

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with suppress(OSError):  # no descriptor is left to list them with: gRPC's own limits hold
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Shut down what must not stay, at a time."""
        handles = self._handles()
        with self._guard:
            gone = self._since.keys() - handles.keys()
            self._strangers.update(host for host, port in gone if (host, port) not in self._members)
            for address in gone:
                del self._since[address]
                self._members.pop(address, None)
            for address in handles:
                self._since.setdefault(address, now)
            excess = self._excess(now)
        for address in excess:
            self._shut_down(address, handles[address])
        self._report(now)

    def _excess(self, now: float) -> set[Address]:
        """Return which connections to shut down."""
        groups: defaultdict[int | str, list[Address]] = defaultdict(list)
        pending = []
        for address in sorted(self._since, key=self._since.__getitem__):
            member = self._members.get(address)
            groups[_network(address[0]) if member is None else member].append(address)
            pending += [address] if member is None else []
        excess = {address for address in pending if now - self._since[address] >= self._seconds}
        excess.update(pending[: max(0, len(pending) - self._most // 2)])
        for group, addresses in groups.items():
            excess.update(
                addresses[: max(0, len(addresses) - (PENDING_EACH if isinstance(group, str) else CONNECTIONS_EACH))]
            )
        return excess

    def _handles(self) -> dict[Address, int]:
        """Return the descriptor of every connection to the port."""
        handles = {}
        for name in os.listdir(DESCRIPTORS):
            with suppress(OSError, ValueError):  # it was closed meanwhile, or is another kind of socket
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if (address := self._address(connection)) is not None:
                        handles[address] = int(name)
        return handles

    def _address(self, connection: socket.socket) -> Address | None:
        """Return the other side of a socket, if it is a connection to the port."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
            return None
        host, port = connection.getpeername()[:2]
        return _plain(host), port

    def _shut_down(self, address: Address, handle: int) -> None:
        """Shut a connection down; a descriptor that means another file by now is left alone."""
        with suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
            if self._address(connection) == address:
                connection.shutdown(socket.SHUT_RDWR)

    def _report(self, now: float) -> None:
        """Log how many strangers came, now and then."""
        if self._strangers and now - self._reported >= REPORT_SECONDS:
            hosts = ", ".join(f"{host} ({times})" for host, times in self._strangers.most_common(3))
            _log.warning(
                "%d connections were closed that made no call of a peer of this scenario, of %d addresses: %s",
                self._strangers.total(),
                len(self._strangers),
                hosts,
            )
            self._strangers.clear()
            self._reported = now

    def close(self) -> None:
        """Stop the watching thread."""
        self._closed.set()


def _plain(host: str) -> str:
    """Return an address in one form: without its zone, and IPv4 where it is IPv4 within IPv6."""
    ip = ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return str(mapped or ip)


def _network(host: str) -> str:
    """Return what one stranger has: an IPv4 address, or a network of IPv6 addresses."""
    return str(IPv6Network((host, 64), strict=False)) if ":" in host else host
