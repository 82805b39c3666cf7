"""A proxy between peers that delays, throttles, cuts and swallows, so that what they do about it can be seen.

It needs no privileges, listens on this machine alone, and sees bytes that it cannot read: TLS goes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from flower_privdec.network.transport.transport import Answer, Connection, Content, Transport, UnreachableError

T = TypeVar("T")
PIECE = 1 << 16  # bytes that are read at a time, and the room for those that wait to be read
PAUSE = 0.02  # seconds after which what comes is another message
WAITING = 64  # pieces that are on their way at a time
HERE = "127.0.0.1"
PATIENCE = 10.0  # seconds that the proxy's own thread may take over anything


@dataclass(frozen=True)
class Faults:
    """What a link does to the bytes that go over it.

    Attributes:
        cut: chance that a piece, of at most 64 KiB, is lost, and the connection with it.
        lose: chance that a message is lost, and the connection with it: what follows without a pause in one direction.
        delay: seconds that every piece is on its way.
        jitter: seconds more at most; pieces stay in order.
        rate: bytes a second in each direction; None for as many as there are.
        black_hole: whether nothing comes out on the other side until that is over, as where a cable is pulled out:
            connections are accepted, and no byte passes.

    Raises:
        ValueError: a number is none of these.
    """

    cut: float = 0.0
    lose: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    black_hole: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("cut", "lose"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a chance, from 0 to 1")
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be seconds, >= 0 and finite")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate={self.rate!r} must be bytes a second, > 0, or None for no limit")


class FaultyTransport:
    """Another transport whose calls get lost and late, for peers of one process; see Transport.

    Args:
        transport: which carries the calls that arrive.
        seed: of all that is drawn.
        faults: of each call to others: `lose`, of the call or of its answer, `delay` with `jitter`, and `black_hole`.
    """

    def __init__(self, transport: Transport, seed: int = 0, faults: Faults | None = None) -> None:
        self._transport, self._seed, self._first = transport, seed, faults or Faults()
        self._faults: dict[int, Faults] = {}

    def set(self, peer: int, faults: Faults) -> None:
        """Change what happens to the calls to a peer from now on; `Faults()` heals them."""
        self._faults[peer] = faults

    def faults(self, peer: int) -> Faults:
        """Return what happens to the calls to a peer."""
        return self._faults.get(peer, self._first)

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        """See Transport."""
        return self._transport.serve(answer, cap, callers)

    def connect(self, peer: int, cap: int) -> FaultyConnection:
        """See Transport."""
        return FaultyConnection(self._transport.connect(peer, cap), self, peer, Random(f"{self._seed} {peer}"))

    def close(self) -> None:
        """See Transport."""
        self._transport.close()


class FaultyConnection:
    """Calls to one peer that get lost and late; see Connection."""

    def __init__(self, connection: Connection, transport: FaultyTransport, peer: int, draw: Random) -> None:
        self._connection, self._transport, self._peer, self._draw = connection, transport, peer, draw
        self.sending = 0.0

    def call(self, content: Content, seconds: float) -> memoryview:
        """See Connection."""
        self._lose()
        answer = self._connection.call(content, seconds)
        self._lose()
        return answer

    def _lose(self) -> None:
        faults = self._transport.faults(self._peer)
        time.sleep(faults.delay + self._draw.random() * faults.jitter)
        if faults.black_hole or self._draw.random() < faults.lose:
            raise UnreachableError(f"a call to peer {self._peer}, or its answer, was lost", code="call.lost")

    def diagnosis(self) -> str:
        """See Connection."""
        return self._connection.diagnosis()

    def close(self) -> None:
        """See Connection."""
        self._connection.close()


class FaultyLink:
    """One listener, from which everything goes to one address; used by the thread of its proxy.

    What happens to a piece is drawn from the link's seed and the numbers of its connection and its own in it; how a
    stream falls into pieces is the kernel's to say.

    Attributes:
        faults: what happens to the bytes from now on.
        bytes: that came through, in both directions.
        connections, cuts: how many there were.
    """

    def __init__(self, target: str, seed: str, faults: Faults) -> None:
        """Say where to; nothing is taken yet.

        Args:
            target: HOST:PORT.
            seed: of all that is drawn.
            faults: what happens to the bytes at first.
        """
        self._target, self._seed, self.faults = target, seed, faults
        self.bytes = self.connections = self.cuts = 0
        self._listener = socket.create_server((HERE, 0))
        self._listener.setblocking(False)
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self._through, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()
        self._open = set[asyncio.StreamWriter]()

    async def listen(self) -> None:
        """Begin to take connections."""
        await self.set(self.faults)
        self._start(self._accept())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def set(self, faults: Faults) -> None:
        """Do something else to the bytes from now on."""
        self.faults = faults
        if faults.black_hole:
            self._through.clear()
        else:
            self._through.set()

    async def cut(self) -> None:
        """Cut every connection that is open now."""
        self.cuts += len(self._open) // 2
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        """Listen no more, and cut what is open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            self._take((await asyncio.get_running_loop().sock_accept(self._listener))[0])

    def _take(self, taken: socket.socket) -> None:
        self.connections += 1
        self._start(self._connect(taken, self.connections)).add_done_callback(lambda _: taken.close())

    async def _connect(self, taken: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            await self._through.wait()
            host, _, port = self._target.rpartition(":")
            far = await asyncio.open_connection(host.strip("[]"), int(port), limit=PIECE)
            near = await asyncio.open_connection(sock=taken, limit=PIECE)
            await self._both_ways(number, near, far)

    async def _both_ways(
        self,
        number: int,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        writers = {near[1], far[1]}
        self._open |= writers
        ways = [(near[0], far[1], "there"), (far[0], near[1], "back")]
        tasks = [asyncio.ensure_future(self._way(a, b, Random(f"{self._seed} {number} {name}"))) for a, b, name in ways]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._open -= writers
            for writer in writers:
                writer.transport.abort()

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: Random) -> None:
        """Copy one side's bytes to the other until it closes."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING)
        carrying = asyncio.ensure_future(self._carry(under_way, writer))
        last = -PAUSE
        try:
            while not carrying.done():
                piece = await reader.read(PIECE)
                now = asyncio.get_running_loop().time()
                if piece and draw.random() < self._chance(now - last > PAUSE):
                    self.cuts += 1
                    raise ConnectionResetError
                last = now
                await under_way.put((now + self.faults.delay + draw.random() * self.faults.jitter, piece))
                if not piece:
                    break
            await carrying
        finally:
            carrying.cancel()

    def _chance(self, begins: bool) -> float:
        """Return the chance that a piece is lost, which may begin a message."""
        passes = (1 - self.faults.cut) * (1 - self.faults.lose * begins)
        return 1 - passes

    async def _carry(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, piece = await under_way.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await self._through.wait()
            if not piece:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()
            self.bytes += len(piece)
            if self.faults.rate is not None:
                await asyncio.sleep(len(piece) / self.faults.rate)


class FaultProxy:
    """Links between peers that can be made to fail, in a thread of their own; a context manager.

    The same seed draws the same for the same link; see `FaultyLink`.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        """Begin, with no link yet.

        Args:
            seed: of all that is drawn.
            faults: what each link does from its beginning; nothing by default.
        """
        self._seed, self._first, self._links = seed, faults or Faults(), dict[Hashable, FaultyLink]()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()

    def link(self, name: Hashable, target: str) -> str:
        """Make a link, and return the address from which all goes to another.

        Args:
            name: of the link, as (sender, receiver).
            target: HOST:PORT; need not be listened on yet.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._links:
            raise ValueError(f"link {name!r} is there already")
        link = self._links[name] = FaultyLink(target, f"{self._seed} {name!r}", self._first)
        self._done(link.listen())
        return link.address

    def through(self, peer: int, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses at which a peer reaches all others through links (peer, other), and its own as it is.

        Links that are there already stay as they are.

        Args:
            peer: whose links they are.
            addresses: HOST:PORT of every peer.
        """
        proxied = list(addresses)
        for other in sorted({*range(len(proxied))} - {peer}):
            made = self._links.get((peer, other))
            proxied[other] = made.address if made is not None else self.link((peer, other), proxied[other])
        return tuple(proxied)

    @property
    def names(self) -> list[Hashable]:
        """Return the names of all links, in the order in which they were made."""
        return list(self._links)

    def set(self, name: Hashable, faults: Faults) -> None:
        """Let a link do something else to what goes over it from now on; `Faults()` heals it."""
        self._done(self._links[name].set(faults))

    def faults(self, name: Hashable) -> Faults:
        """Return what a link does to what goes over it."""
        return self._links[name].faults

    def cut(self, name: Hashable) -> None:
        """Cut every connection that is open over a link."""
        self._done(self._links[name].cut())

    def counts(self, name: Hashable) -> dict[str, int]:
        """Return how many connections a link has had, how many were cut, and the bytes that came through."""
        link = self._links[name]
        return {"connections": link.connections, "cuts": link.cuts, "bytes": link.bytes}

    def close(self) -> None:
        """Cut everything and stop; a second time does nothing."""
        if self._loop.is_closed():
            return
        for link in self._links.values():
            self._done(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
