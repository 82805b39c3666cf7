"""The rendezvous of shards: a file on one machine, or a port of the first shard, whose address its owner gives.

Through it, shards exchange the ports at which they listen. It has no authentication, nor have their connections: a
process that reaches it can disturb a run, and one that reaches a shard's ports can read and change rows. So a shard
listens only on the loopback address unless its owner gives another one.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import LostShardError

THIS_MACHINE = "127.0.0.1"
PUNCTUAL = 300.0  # seconds to wait for the other shards
GIVE = '--node-config \'... shard-address="10.0.0.2" shard-rendezvous="10.0.0.1:29500"\''
BESIDE = "an IP address of this machine, and the first shard's with a port, which is the same for all"


@dataclass(frozen=True)
class Rendezvous:
    """The address at which a shard listens, and that of the rendezvous.

    Attributes:
        address: an address of this machine; the shard listens on no other.
        endpoint: host and port of the first shard; None for a file.
        path: the file, if all shards are on one machine.
    """

    address: str = THIS_MACHINE
    endpoint: tuple[str, int] | None = None
    path: Path | None = None

    @classmethod
    def given(cls, address: str, endpoint: str) -> Rendezvous:
        """Parse an owner's setting.

        Raises:
            RunError: one of the two is not an address of one machine.
        """
        host, _, port = endpoint.rpartition(":")
        host = host.strip("[]")  # around the colons of IPv6

        is_port = port.isdecimal() and 0 < int(port) < 2**16
        if not is_port or not _is_address(address) or not _is_address(host):
            raise RunError(
                f"shard-address={address!r} and shard-rendezvous={endpoint!r} must be {BESIDE}: start the SuperNode "
                f"with {GIVE}",
                code="shards.address",
            )
        return cls(address, (host, int(port)))

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach the shard."""
        return not ipaddress.ip_address(self.address).is_loopback

    @contextmanager
    def store(self, shard: int, shards: Shards, token: str, patience: float = PUNCTUAL) -> Iterator[Store]:
        """Yield the store through which the shards of one message find each other, once all have joined.

        Args:
            token: names the message, so that entries of an earlier one are not mistaken for its own.
            patience: the seconds to wait for the others.

        Raises:
            RunError: shards are missing, or the rendezvous fails; the message names them or the cause.
        """
        deadline = time.monotonic() + patience
        try:
            store = PrefixStore(token, self._open(shard, len(shards), deadline))
            store.set(str(shard), "here")
            self._wait(store, shards, deadline, patience)
        except LostShardError:
            raise
        except (RuntimeError, OSError) as error:
            raise LostShardError(
                f"the shards cannot meet at {self._where} ({one_line(error)[:200]})", code="shards.no-rendezvous"
            ) from error

        try:
            yield store
        finally:
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    @property
    def _where(self) -> str:
        """The place of the rendezvous, for errors."""
        if self.endpoint is None:
            return str(self.path)
        host, port = self.endpoint
        return f"{host}:{port}"

    def _open(self, shard: int, count: int, deadline: float) -> Store:
        """Open the store; the first shard serves it, unless it is a file."""
        if self.endpoint is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return FileStore(str(self.path), count)

        host, port = self.endpoint
        wait = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        if shard > 0:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)

        if host != self.address:
            raise RunError(
                f"the first shard listens at {self.address}, and shard-rendezvous={self._where} is elsewhere",
                code="shards.elsewhere",
            )
        # By itself TCPStore would listen at all addresses of the machine.
        listening = _listen(host, port, deadline)
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listening.detach()
        )

    def _wait(self, store: Store, shards: Shards, deadline: float, patience: float) -> None:
        """Wait until all have registered."""
        missing = set(range(len(shards)))
        while missing := {shard for shard in missing if not store.check([str(shard)])}:
            if time.monotonic() > deadline:
                names = ", ".join(shards.name(shard) for shard in sorted(missing))
                raise LostShardError(
                    f"{names} did not come to {self._where} within {patience:.0f} s: all shards run at the same time, "
                    "in a simulation each on CPUs of its own (num-supernodes times client-resources-num-cpus)",
                    code="shards.missing",
                )
            time.sleep(0.02)


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address of one machine; 0.0.0.0 stands for all addresses of a machine."""
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _listen(host: str, port: int, deadline: float) -> socket.socket:
    """Listen at one address; if an earlier message has just used the port, wait until it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError:
            listening.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return listening
