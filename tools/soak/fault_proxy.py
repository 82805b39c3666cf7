"""A proxy between peers that delays, throttles, cuts and swallows, so that what they do about it can be seen.

It needs no privileges, listens on this machine alone, and sees bytes that it cannot read: TLS goes through it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from threading import Thread
from typing import Any, Literal, Self

from flower_privdec.common.errors import ArgumentError

PIECE = 1 << 16  # bytes that are read at a time, and the room for those that wait to be read
PAUSE = 0.02  # seconds after which what comes is another message
WAITING = 64  # pieces that are on their way at a time
HERE = "127.0.0.1"
PATIENCE = 10.0  # seconds that the proxy's own thread may take over anything
RECORD_HEADER = 5  # bytes before each record of TLS, of which the last two are its length

Direction = Literal["there", "back"]
CutPlace = Literal["before", "within", "after"]


@dataclass(frozen=True)
class RecordCut:
    """Where a connection is cut: at a place in the bytes of one direction, whenever they come.

    TLS sends records, whose lengths it tells to everybody; a short message is one of them.

    Attributes:
        direction: "there", of who dialled, or "back".
        record: which of that direction's records, from 1; the first few are the handshake.
        place: "before" it, so that it is lost; "within" it; or "after" it, so that it arrives and its answer is lost.
    """

    direction: Direction
    record: int
    place: CutPlace


class RecordCounter:
    """Finds the place of a cut in the bytes of its direction, however these fall into pieces."""

    def __init__(self, cut: RecordCut) -> None:
        self._cut = cut
        self._number = 0  # of the record whose header comes, or came last
        self._header = bytearray()
        self._left = 0  # bytes of a record's content that are still to come, or to pass before the cut

    def passing(self, piece: bytes) -> int | None:
        """Return how many bytes of a piece pass before the cut; None if all do, and it is not there yet."""
        at = 0
        while at < len(piece):
            if self._left:
                taken = min(self._left, len(piece) - at)
                self._left -= taken
                at += taken
                if not self._left and self._number == self._cut.record:
                    return at
                continue

            if not self._header:
                self._number += 1
                if self._number == self._cut.record and self._cut.place == "before":
                    return at
            self._header.append(piece[at])
            at += 1
            if len(self._header) == RECORD_HEADER:
                self._left = int.from_bytes(self._header[-2:])
                self._header.clear()
                if self._number == self._cut.record and self._cut.place == "within":
                    self._left = max(1, self._left // 2)
        return None


def counter_of(cut: RecordCut | None, direction: str) -> RecordCounter | None:
    """Return what finds a cut in one direction of a connection; None if there is none in it."""
    if cut is None or cut.direction != direction:
        return None
    return RecordCounter(cut)


@dataclass(frozen=True)
class LinkFaults:
    """What a link does to the bytes that go over it.

    Attributes:
        cut: chance that a piece, of at most 64 KiB, is lost, and the connection with it.
        lose: chance that a message is lost, and the connection with it: what follows without a pause in one direction.
        delay: seconds that every piece is on its way.
        jitter: seconds more at most; pieces stay in order.
        rate: bytes a second in each direction; None for as many as there are.
        black_hole: whether nothing comes out on the other side until that is over, as where a cable is pulled out:
            connections are accepted, and no byte passes.
        cuts: where the next connections are cut, one after the other.

    Raises:
        ValueError: a number is none of these.
    """

    cut: float = 0.0
    lose: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    black_hole: bool = False
    cuts: tuple[RecordCut, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("cut", "lose"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r} must be a chance, from 0 to 1", code="faults.setting"
                )
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r} must be seconds, >= 0 and finite", code="faults.setting"
                )
        if self.rate is not None and not self.rate > 0:
            raise ArgumentError(
                f"rate={self.rate!r} must be bytes a second, > 0, or None for no limit", code="faults.setting"
            )


class FaultyLink:
    """One listener, from which everything goes to one address; used by the thread of its proxy.

    What happens to a piece is drawn from the link's seed and the numbers of its connection and its own in it; how a
    stream falls into pieces is the kernel's to say.

    Args:
        target: HOST:PORT.
        seed: of all that is drawn.
        faults: what happens to the bytes at first.

    Attributes:
        server, address: that it listens on.
        faults: what happens to the bytes from now on.
        bytes: that came through, in both directions.
        connections, cuts: how many there were.
    """

    def __init__(self, target: str, seed: str, faults: LinkFaults) -> None:
        self._target = target
        self._seed = seed
        self.address = ""
        self.faults = faults
        self.bytes = self.connections = self.cuts = 0
        self._cuts = deque[RecordCut]()
        self._through = asyncio.Event()
        self._open = set[asyncio.StreamWriter]()

    async def listen(self) -> None:
        """Begin to take connections."""
        await self.set(self.faults)
        self.server = await asyncio.start_server(self._connect, HERE, 0, limit=PIECE)
        self.address = f"{HERE}:{self.server.sockets[0].getsockname()[1]}"

    async def set(self, faults: LinkFaults) -> None:
        """Do something else to the bytes from now on."""
        self.faults = faults
        self._cuts = deque(faults.cuts)
        if faults.black_hole:
            self._through.clear()
        else:
            self._through.set()

    async def cut(self) -> None:
        """Cut every connection that is open now."""
        self.cuts += len(self._open) // 2
        for writer in self._open:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy what comes over a connection both ways, until one side closes it or it is cut."""
        self.connections += 1
        seed = f"{self._seed} {self.connections}"
        writers = {writer}
        try:
            await self._through.wait()
            host, _, port = self._target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=PIECE)
            writers.add(far_writer)
            self._open |= writers

            async with asyncio.TaskGroup() as both:
                cut = self._cuts.popleft() if self._cuts else None
                both.create_task(self._way(reader, far_writer, Random(f"{seed} there"), counter_of(cut, "there")))
                both.create_task(self._way(far_reader, writer, Random(f"{seed} back"), counter_of(cut, "back")))
        except* OSError:  # nothing listens, one side hung up, or it was cut
            pass
        finally:
            self._open -= writers
            for end in writers:
                end.transport.abort()

    async def _way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: Random, counter: RecordCounter | None
    ) -> None:
        """Copy one side's bytes to the other until it closes."""
        under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(WAITING)
        carrying = asyncio.ensure_future(self._carry(under_way, writer))
        last = -PAUSE
        try:
            while not carrying.done():
                piece = await reader.read(PIECE)
                now = asyncio.get_running_loop().time()
                faults = self.faults
                lose = faults.lose if now - last > PAUSE else 0.0  # the piece begins a message
                if piece and draw.random() < 1 - (1 - faults.cut) * (1 - lose):
                    self.cuts += 1
                    raise ConnectionResetError

                last = now
                passing = None if counter is None else counter.passing(piece)
                due = now + faults.delay + draw.random() * faults.jitter
                if passing is not None:
                    await under_way.put((due, piece[:passing] or None))
                    await under_way.put((due, None))
                    break
                await under_way.put((due, piece))
                if not piece:
                    break
            await carrying
        finally:
            carrying.cancel()

    async def _carry(self, under_way: asyncio.Queue[tuple[float, bytes | None]], writer: asyncio.StreamWriter) -> None:
        """Write what is under way, piece by piece; b"" ends this direction, and None is where it is cut."""
        while True:
            due, piece = await under_way.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await self._through.wait()
            if piece is None:
                # What was written before has to leave: the connection is aborted now, with all that still waits.
                writer.transport.set_write_buffer_limits(0)
                await writer.drain()
                self.cuts += 1
                raise ConnectionResetError
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

    def __init__(self, seed: int = 0, faults: LinkFaults | None = None) -> None:
        """Begin, with no link yet.

        Args:
            seed: of all that is drawn.
            faults: what each link does from its beginning; nothing by default.
        """
        self._seed = seed
        self._first = faults or LinkFaults()
        self._links = dict[Hashable, FaultyLink]()
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
            raise ArgumentError(f"link {name!r} is there already", code="faults.link")
        link = self._links[name] = FaultyLink(target, f"{self._seed} {name!r}", self._first)
        self._done(link.listen())
        return link.address

    def through(self, peer: int, addresses: Sequence[str | None]) -> tuple[str | None, ...]:
        """Return the addresses at which a peer reaches all others through links (peer, other), and its own as it is.

        Links that are there already stay as they are.

        Args:
            peer: whose links they are.
            addresses: HOST:PORT of every peer; None of one that only dials out.
        """
        proxied = list(addresses)
        for other, target in enumerate(addresses):
            if other == peer or target is None:
                continue
            made = self._links.get((peer, other))
            proxied[other] = self.link((peer, other), target) if made is None else made.address
        return tuple(proxied)

    @property
    def names(self) -> list[Hashable]:
        """Return the names of all links, in the order in which they were made."""
        return list(self._links)

    def set(self, name: Hashable, faults: LinkFaults) -> None:
        """Let a link do something else to what goes over it from now on; `LinkFaults()` heals it."""
        self._done(self._links[name].set(faults))

    def faults(self, name: Hashable) -> LinkFaults:
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
        self._done(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _end(self) -> None:
        """Listen no more, and cut what is open."""
        for link in self._links.values():
            link.server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
