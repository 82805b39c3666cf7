"""A network of namespaces whose packets go through this process, which delays, loses and throttles them.

Each device is a network namespace with one TUN interface, `lan0`. Needs root, `ip` and /dev/net/tun, and nothing of the
kernel's traffic control.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Thread
from types import TracebackType
from typing import Self

from tools.lab.nat import Nat

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
# Bytes of a packet; seconds that packets wait for a slow line before they are dropped
MTU = 1500
QUEUE = 0.5
SUBNET = "10.77.0."
ROUTERS = 128


class UnavailableError(Exception):
    """This machine, or this user, cannot make such a network."""


@dataclass(frozen=True)
class Line:
    """What happens to the packets that a device sends.

    Attributes:
        delay: seconds that each is on its way.
        loss: chance that one is lost.
        rate: bits a second; None for no limit.
    """

    delay: float = 0.0
    loss: float = 0.0
    rate: float | None = None


class Air:
    """The network; a context manager that leaves no namespace behind.

    Args:
        count: of devices.
        line: of each.
        seed: of the losses.
        hidden: those behind a router of their own each (`nat`), which only dial out.

    Raises:
        UnavailableError: there is no root, `ip` or TUN here.
    """

    def __init__(self, count: int, line: Line, seed: int = 0, hidden: Collection[int] = ()) -> None:
        self._prefix = f"privdec{os.getpid()}"
        self._draw = Random(seed)
        self.spaces = [f"{self._prefix}-{device}" for device in range(count)]
        self.addresses = [f"{SUBNET}{device + 1}" for device in range(count)]
        self.line = line
        # Each router's public address is beside those of the devices.
        routers = {self.addresses[device]: f"{SUBNET}{ROUTERS + device}" for device in hidden}
        self.nat = Nat({socket.inet_aton(own): socket.inet_aton(public) for own, public in routers.items()})
        self._groups = [set(range(count))]
        self.packets = self.lost = 0
        self._made = list[str]()
        self._tuns = list[int]()
        self._thread = Thread(target=self._carry, daemon=True)
        self._is_over = False

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
            raise UnavailableError("it needs root, `ip` and /dev/net/tun")
        try:
            for space, address in zip(self.spaces, self.addresses, strict=True):
                self._make(space, address)
        except (OSError, subprocess.SubprocessError) as error:
            self._remove()
            words = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            raise UnavailableError(f"network namespaces with TUN: {words or error}") from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        self._remove()

    def partition(self, *groups: Collection[int]) -> None:
        """Let packets through within each group alone, and drop all others."""
        self._groups = [set(group) for group in groups]

    def heal(self) -> None:
        """Let all packets through."""
        self._groups = [set(range(len(self.spaces)))]

    def move(self, device: int, address: str) -> None:
        """Give a device another address; what is sent to the old one is dropped."""
        space = self.spaces[device]
        old = self.addresses[device]
        ip("-n", space, "addr", "del", f"{old}/24", "dev", "lan0")  # and with it all others of its subnet
        ip("-n", space, "addr", "add", f"{address}/24", "dev", "lan0")
        self.addresses = [address if j == device else known for j, known in enumerate(self.addresses)]

    def name(self, readers: Collection[int], names: Sequence[str]) -> None:
        """Write into some devices' hosts files by which names all devices are reached, at the addresses of now."""
        hosts = "".join(f"{address} {name}\n" for address, name in zip(self.addresses, names, strict=True))
        for device in readers:
            path = _hosts(self.spaces[device])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("127.0.0.1 localhost\n" + hosts)  # in place: it is mounted where the device runs

    def command(self, device: int, *words: str) -> tuple[str, ...]:
        """Return a command that runs on a device."""
        return ("ip", "netns", "exec", self.spaces[device], *words)

    def _make(self, space: str, address: str) -> None:
        ip("netns", "add", space)
        self._made.append(space)
        with ThreadPoolExecutor(1) as pool:  # a namespace is a thread's
            self._tuns.append(pool.submit(_open_tun, space).result())
        ip("-n", space, "addr", "add", f"{address}/24", "dev", "lan0")
        ip("-n", space, "link", "set", "lan0", "mtu", str(MTU), "up")
        ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for tun in self._tuns:
            os.close(tun)
        for space in self._made:
            with suppress(subprocess.SubprocessError):
                ip("netns", "del", space)
            shutil.rmtree(_hosts(space).parent, ignore_errors=True)
        self._tuns = []
        self._made = []

    def _carry(self) -> None:
        """Carry packets until the network ends."""
        senders = {tun: device for device, tun in enumerate(self._tuns)}
        free_at = [0.0] * len(senders)  # when each device's line has sent all that waits
        waiting: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, where, what
        while not self._is_over:
            pause = 0.1
            if waiting:
                pause = min(0.1, max(0.0, waiting[0][0] - time.monotonic()))
            for tun in select.select(senders, [], [], pause)[0]:
                packet = os.read(tun, MTU + 4)
                device = senders[tun]
                now = time.monotonic()
                translated = self._translated(packet)
                if translated is None:
                    continue
                packet = translated
                receiver = self._receiver(device, packet)
                if receiver is None:
                    continue

                self.packets += 1
                free_at[device] = max(now, free_at[device])
                if self._draw.random() < self.line.loss or free_at[device] - now > QUEUE:
                    self.lost += 1
                    continue
                free_at[device] += 8 * len(packet) / self.line.rate if self.line.rate else 0.0
                heapq.heappush(waiting, (free_at[device] + self.line.delay, self.packets, receiver, packet))

            while waiting and waiting[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(waiting)
                with suppress(OSError):  # its interface is down
                    os.write(self._tuns[receiver], packet)

    def _translated(self, packet: bytes) -> bytes | None:
        """Return what a packet becomes at the routers on its way; None if one drops it, or it is no IPv4."""
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return None
        leaving = self.nat.outgoing(packet)
        return None if leaving is None else self.nat.incoming(leaving)

    def _receiver(self, sender: int, packet: bytes) -> int | None:
        """Return the device that a packet is for; None if it is out of reach."""
        to = ".".join(map(str, packet[16:20]))
        receiver = self.addresses.index(to) if to in self.addresses else None
        is_reached = receiver is not None and any({sender, receiver} <= group for group in self._groups)
        return receiver if is_reached else None


def ip(*words: str) -> None:
    """Run `ip`; see its manual."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def enter(space: str) -> None:
    """Move this thread, and those that it starts, into a network namespace."""
    with open(f"/run/netns/{space}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), space)


def _open_tun(space: str) -> int:
    enter(space)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"lan0", IFF_TUN | IFF_NO_PI))
    return tun


def _hosts(space: str) -> Path:
    return Path("/etc/netns") / space / "hosts"
