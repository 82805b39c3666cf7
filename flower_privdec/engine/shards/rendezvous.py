"""The rendezvous of shards: a file on one machine, or a port of the first shard, whose address its owner gives.

Shards exchange through it the ports at which they listen. It has no authentication, nor have their connections: a
process that reaches it can disturb a run, and one that reaches a shard's ports can read and change rows. So a shard
listens on the loopback address alone unless its owner gives another one.
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
        address: of this machine; the shard listens on no other.
        endpoint: HOST:PORT of the first shard; None for a file.
        path: the file, on one machine.
    """

    address: str = THIS_MACHINE
    endpoint: tuple[str, int] | None = None
    path: Path | None = None

    @classmethod
    def given(cls, address: str, endpoint: str) -> Rendezvous:
        """Parse an owner's setting.

        Raises:
            RunError: it is no address of one machine.
        """
        host, colon, port = endpoint.rpartition(":")
        hosts = [_address(text) for text in (address, host.strip("[]"))]
        if not colon or not port.isdecimal() or not 0 < int(port) < 2**16 or None in hosts:
            raise RunError(
                f"shard-address={address!r} and shard-rendezvous={endpoint!r} must be {BESIDE}: start the SuperNode "
                f"with {GIVE}",
                code="shards.address",
            )
        return cls(address, (host.strip("[]"), int(port)))

    @property
    def is_open(self) -> bool:
        """Return whether other machines may reach the shard."""
        return not ipaddress.ip_address(self.address).is_loopback

    @contextmanager
    def store(self, shard: int, shards: Shards, token: str, patience: float = PUNCTUAL) -> Iterator[Store]:
        """Yield the store through which the shards of one message find each other, once all have joined.

        Args:
            token: of the message, so that entries of an earlier one are not taken for its own.
            patience: seconds to wait for the others.

        Raises:
            RunError: naming the shards that are missing, or why the rendezvous fails.
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
        return str(self.path) if self.endpoint is None else f"{self.endpoint[0]}:{self.endpoint[1]}"

    def _open(self, shard: int, count: int, deadline: float) -> Store:
        if self.endpoint is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return FileStore(str(self.path), count)
        host, port = self.endpoint
        wait = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        if shard:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        if host != self.address:
            raise RunError(
                f"the first shard listens at {self.address}, and shard-rendezvous={self._where} is elsewhere",
                code="shards.elsewhere",
            )
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


def _address(text: str) -> str | None:
    """Return an IP address; None where a text is none, or stands for all addresses of a machine."""
    try:
        return None if ipaddress.ip_address(text).is_unspecified else text
    except ValueError:
        return None


def _listen(host: str, port: int, deadline: float) -> socket.socket:
    """Listen at one address; wait for a port that an earlier message has just used."""
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
