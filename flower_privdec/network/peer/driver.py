"""Runs one peer in real time: its program, what others ask it, and its calls to them, one after the other.

The peer itself has no thread and no clock (`flower_privdec.peer`). The driver is a loop:

    let the peer go on until it waits, or has work to do        `on_tick`
    give the answers that were held back, and make the calls    `_speak`
    do the work; or let the transport tell what comes, until the wait may be over

A wait ends when something comes, or at the moment that the peer named. One thread does all that, so what comes costs no
handover. But work may take long: a gradient step, a write to a disk that hangs, somebody's own training. Neighbours
wait for answers meanwhile, and give up calls in the end. So *work that took more than BRIEF the last few times, or is
done for the first time, is done while another thread goes on with the loop*, which begins and ends with it. The work
stays in the thread that called `run`: users' code may need the main one. Brief work delays an answer hardly more than a
network does. Work that was brief so far and lasts this time, as on a disk that hangs, is noticed by a thread that looks
every BRIEF seconds, and goes on with the loop in its place (`_StandIn`).

There is news for a neighbour if the peer went on, or if something came from that neighbour; seldom by time, or by
another's message. So after a message the loop looks for news for its sender, and for all neighbours once the peer went
on, or after a moment, which is every `retry` seconds if nothing comes.

At any moment one thread runs the loop: the one that called `run`, or one of the two beside it during long work, and
from `open` to `run` and from there to `close`. The lock is held whenever the peer is called; it is free during work and
during waits.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from threading import Event, Lock, RLock, Thread
from typing import Any, Self

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.peer.durations import Durations
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.network.peer.status import STATUS_REQUEST, requested_height
from flower_privdec.network.transport.faulty_transport import Faults, FaultyTransport
from flower_privdec.network.transport.in_threads import evented
from flower_privdec.network.transport.named import transport_of
from flower_privdec.network.transport.tls import UTC_NOW, Credentials
from flower_privdec.network.transport.transport import Content, EventConnection, EventTransport, Reply, Transport
from flower_privdec.peer.driving import CALL_FAILED, Pause, Work
from flower_privdec.peer.peer import OnRound, PeerPlace, RunningPeer
from flower_privdec.peer.session import Messages
from flower_privdec.peer.times import POLL
from flower_privdec.pushsum.exactly_once import RefusedError

_log = logging.getLogger(__name__)

BRIEF = 0.1  # seconds of work during which nobody is answered
REMEMBERED = 4  # times of each kind of work, by which it is brief or long
ALL_NEWS = 10  # times in `retry` seconds that there is a look for news for all neighbours, if something comes
LOOK_SECONDS = 1.0  # between two looks at whether the files of the device changed
LISTENED = 0.005  # seconds ago: no work waits for another look at what came, so soon after one


@dataclass(frozen=True)
class PeerDevice(PeerPlace):
    """The device that a peer runs on.

    Attributes:
        credentials: by which others know it.
        addresses: HOST:PORT of every peer, None for one that only dials out.
        listen: HOST:PORT that this one listens on; left out, its address.
        transport: in place of the one that the scenario names, which is given credentials and addresses.
        loss: chance that a call to another peer, or its answer, is lost on purpose.
        files: its certificate and the list of members, which may change while it runs; None if they do not.
        max_epsilon: the ε that its owner allows more rounds than the scenario's; None for the scenario's budget.
    """

    credentials: Credentials | None = None
    addresses: tuple[str | None, ...] = ()
    listen: str | None = None
    transport: Transport | EventTransport | None = None
    loss: float = 0.0
    files: PeerFiles | None = None
    max_epsilon: float | None = None


class Driver:
    """A peer's clock and connections.

    Args:
        peer: on a `PeerDevice`.

    Attributes:
        lock: held whenever the peer is called.
        commits: how long it took to put the peer's state on disk.
    """

    def __init__(self, peer: RunningPeer) -> None:
        self.peer = peer
        self.lock = RLock()
        self._rest = peer.times.rest  # seconds that a neighbour is not called, at most
        self._retry = peer.times.retry  # seconds until it is asked again for news that only time brings
        self._patience = peer.times.deadline / 2  # seconds that a call may take
        self._holding = min(self._retry, self._patience) / 2  # seconds that an answer may be held back
        self._lines: dict[int, _Line] = {}
        self._held: list[_HeldAnswer] = []
        self._heard = set[int]()  # neighbours from whom something came, since there was last a look for news for them
        self._looked_at_all = -math.inf  # when there was last a look for news for all neighbours
        self._listened = 0.0  # when it was last looked at what came
        self._pause: Pause | None = None
        self.commits = Durations()
        self._took: dict[str, deque[float]] = {}  # seconds of the last few times, by the kind of work
        # Built before the peer begins: a transport that cannot be built costs no privacy.
        self._transport = _transport_of(peer)
        self._beside: _LoopBeside | None = None
        self._stand_in = _StandIn(self)

        # What of the device's files the transport and the peer go by.
        self._files: PeerFiles | None = getattr(peer.device, "files", None)
        self._looks_at_files = 0.0
        self._entries = -1
        self._shown: Credentials | None = None
        self._not_listening = ""

    # --- a peer's life ---

    def open(self, begin: bool = True, only_confirmed: bool = False) -> int:
        """Listen and begin to call; return the port that is listened on.

        Args:
            begin: whether to take part; else the peer only reports and charges, see `charge_witnessed`.
            only_confirmed: see `RunningPeer.begin_charging`.
        """
        peer = self.peer
        if begin:
            peer.begin()
        else:
            peer.begin_charging(only_confirmed)

        # Up to the first wait: what neighbours are greeted with is in the store then.
        while True:
            pause = self._go_on()
            if not isinstance(pause, Work):
                break
            _do(pause)

        cap = peer.conversation.cap
        neighbors = list(peer.neighbours)
        port = self._transport.listen(self._take, cap, len(neighbors))
        self._lines = {j: _Line(self._transport.connect(j, cap)) for j in neighbors}
        peer.diagnose = lambda j: self._lines[j].connection.diagnosis()
        self._beside = _LoopBeside(self)
        return port

    def run(self, on_round: OnRound | None = None) -> None:
        """Let the peer take part until the rounds are done and the neighbours have what they need.

        Args:
            on_round: see RunningPeer.

        Raises:
            RunError: the run cannot continue, as the neighbours are.
            StoppedError: the peer was stopped; its state is in the store.
        """
        self.peer.on_round = on_round
        self._to_the_end()

    def charge_witnessed(self) -> int:
        """Charge the lines that the ledger lacks and neighbours have seen, in place of `run`; return how many.

        Raises:
            RunError: no neighbour reports within `times.give_up`.
            StoppedError: the peer was stopped.
        """
        self._to_the_end()
        charged: int = self.peer.result
        return charged

    def close(self) -> None:
        """Stop calling and listening, and release the peer."""
        try:
            self._end_beside()
        finally:
            with self.lock:
                for held in self._held:
                    self._answer(held)
                self._held = []
            for line in self._lines.values():
                line.is_over = True
                line.connection.close()
            self._transport.close()
            self.peer.close()

    def status(self) -> dict[str, Any]:
        """Return the peer's status, in any thread."""
        with self.lock:
            return self.peer.status()

    def quiet_seconds(self) -> float:
        """Return for how many seconds it was not looked at what came; 0 before it listens."""
        if self._listened == 0:
            return 0.0
        return time.monotonic() - self._listened

    # --- the loop ---

    def _to_the_end(self) -> None:
        self._end_beside()
        with self._stand_in:
            while True:
                pause = self._go_on()
                if pause is None:
                    break
                if isinstance(pause, Work):
                    self._perform(pause)
                else:
                    self.speak_and_listen(pause.until)
        self.speak_and_listen(0.0)
        self._beside = _LoopBeside(self)

    def _go_on(self) -> Pause | None:
        """Let the peer go on as far as it goes."""
        with self.lock:
            pause = self.peer.on_tick(time.monotonic())
            if pause is not self._pause:
                self._pause = pause
                self._looked_at_all = -math.inf
        return pause

    def _perform(self, work: Work) -> None:
        """Do a peer's work; if it may take long, another thread goes on with the loop."""
        began = time.monotonic()
        took = self._took.setdefault(work.kind, deque(maxlen=REMEMBERED))

        # The least of them: other processes on the machine make now one and now another take longer.
        if took and min(took) <= BRIEF:
            if began > self._listened + LISTENED and work.kind != "save":  # what it saves leaves after that
                self.speak_and_listen(0.0)
                began = time.monotonic()
            self._stand_in.watch(began)
            try:
                _do(work)
            finally:
                self._stand_in.take_over()
        else:
            self._beside = _LoopBeside(self)
            try:
                _do(work)
            finally:
                self._end_beside()
        seconds = time.monotonic() - began
        took.append(seconds)
        if work.kind == "save":
            self.commits.add(seconds)

    def _end_beside(self) -> None:
        beside = self._beside
        if beside is not None:
            self._beside = None
            beside.end()

    def wake(self) -> None:
        """End a wait, in any thread."""
        self._transport.wake()

    def speak_and_listen(self, until: float) -> None:
        """Say what there is to say, and let the transport tell what comes, up to a moment at most."""
        with self.lock:
            now = time.monotonic()
            if self._files is not None:
                self._keep_up(self._files, now)
            until = min(until, self._speak(now))
        self._transport.turn(min(until - now, POLL))
        self._listened = time.monotonic()

    def _speak(self, now: float) -> float:
        """Give the answers that were held back, and make the calls that are due.

        Returns:
            The moment of the next answer or call that only time brings.
        """
        session = self.peer.conversation
        if self._held:
            self._answer_held(now)

        neighbors: Collection[int] = self._lines
        if 0 <= now - self._looked_at_all < self._retry / ALL_NEWS:
            neighbors = self._heard
        else:
            self._looked_at_all = now
        following = self._looked_at_all + self._retry
        if neighbors is self._heard and neighbors:
            following = self._looked_at_all + self._retry / ALL_NEWS
        for held in self._held:
            following = min(following, held.until)

        self._heard = set()
        for neighbor in neighbors:
            line = self._lines[neighbor]
            if line.is_calling or line.is_over:
                continue
            # No pause is longer: one that seems to be was begun by another clock.
            if 0 < line.again - now <= self._rest:
                self._heard.add(neighbor)
                following = min(following, line.again)
                continue
            try:
                if line.calls or session.has_news(neighbor, now):
                    line.calls = line.calls or session.calls(neighbor, now)
                    self._call_next(neighbor, line)
            except Exception as error:
                self._end_with(neighbor, error)
        return following

    # --- what changes while it runs ---

    def _keep_up(self, files: PeerFiles, now: float) -> None:
        """Go on with a certificate that was renewed, and with entries of the list of members that are new."""
        is_time = now >= self._looks_at_files
        if is_time:
            self._looks_at_files = now + LOOK_SECONDS
            files.look()
        is_renewed = files.credentials is not self._shown
        is_changed = len(files.members.entries) != self._entries
        if not (is_renewed or is_changed or (is_time and self._not_listening)):
            return

        self._entries = len(files.members.entries)
        directory = files.directory()
        if hasattr(self._transport, "update"):
            try:
                self._transport.update(directory, files.credentials)
                self._not_listening = ""
            except RunError as error:
                if str(error) != self._not_listening:
                    _log.warning("this peer has another address in the list of members: %s", error)
                self._not_listening = str(error)

        roster = self.peer.roster
        if roster is not None and self._shown is not None and is_renewed:
            roster.sign_again(files.signatures())
        self._shown = files.credentials
        if is_changed:
            self.peer.members_changed()

    def _answer_held(self, now: float) -> None:
        """Give the answers that say all they will, or were held back long enough."""
        session = self.peer.conversation
        held = self._held
        self._held = []
        for one in held:
            if now >= one.until or session.is_answered(one.caller, one.messages):
                self._answer(one)
                self._heard.add(one.caller)
            else:
                self._held.append(one)

    # --- calls of others ---

    def _take(self, caller: int, content: memoryview, reply: Reply) -> None:
        """Take in a call. Its answer is held back for a moment if it will say more then."""
        session = self.peer.conversation
        with self.lock:
            if content == STATUS_REQUEST:
                reply([json.dumps({**self.peer.status(), "clock": UTC_NOW().isoformat()}).encode()])
                return

            # The list is signed, and no secret: whoever watches the peers learns from it who joined and who left.
            height = requested_height(content)
            if height is not None:
                files = self._files
                reply([b"" if files is None else files.members.after(height)])
                return

            now = time.monotonic()
            if caller in self._lines:
                self._heard.add(caller)
                self._lines[caller].again = 0.0  # it is there now

            try:
                messages = session.read(caller, content)
                session.bytes_received += len(content)
                make_answer = session.receive(caller, messages, now)
            except RunError as error:
                self._refuse(caller, error, reply)
                return
            except Exception as error:  # whatever a neighbour sends, it does not end this peer
                _log.exception("a call of peer %s could not be taken in", caller)
                self._refuse(caller, RunError(f"it failed ({one_line(error)})", code=CALL_FAILED), reply)
                return

            session.neighbours[caller].refused = ""
            session.neighbours[caller].call_again = 0.0
            held = _HeldAnswer(caller, messages, make_answer, now + self._holding, reply)
            if session.is_answered(caller, messages):
                self._answer(held)
            else:
                self._held.append(held)

    def _answer(self, held: _HeldAnswer) -> None:
        try:
            content = self.peer.conversation.write(held.caller, held.make_answer())[1]
        except RunError as error:
            self._refuse(held.caller, error, held.reply)
        else:
            held.reply(content)

    def _refuse(self, caller: int, error: RunError, reply: Reply) -> None:
        neighbours = self.peer.conversation.neighbours
        if caller in neighbours:
            neighbours[caller].refused = str(error)
        reply(RefusedError(str(error), code=error.code))

    # --- calls to others ---

    def _end_with(self, neighbor: int, error: Exception) -> None:
        """End the run, since nothing can be sent to a neighbour: its peer would wait for that for ever."""
        fatal = RunError(f"nothing can be sent to peer {neighbor} any more ({one_line(error)})", code="network.failed")
        fatal.__cause__ = error
        self.peer.conversation.fatal = fatal
        self._lines[neighbor].is_over = True

    def _call_next(self, neighbor: int, line: _Line) -> None:
        """Make the next call to a neighbour."""
        if not line.calls:
            return
        session = self.peer.conversation
        whole, content = session.write(neighbor, line.calls.pop(0))
        line.is_calling = True
        began = time.monotonic()

        def done(answer: memoryview | RunError) -> None:
            if line.is_over:
                return
            with self.lock:
                line.is_calling = False
                self._heard.add(neighbor)
                try:
                    self._answered(neighbor, line, whole, content, answer, began)
                except Exception as error:
                    self._end_with(neighbor, error)

        line.connection.post(content, self._patience, done)

    def _answered(
        self,
        neighbor: int,
        line: _Line,
        sent: Messages,
        content: Content,
        answer: memoryview | RunError,
        began: float,
    ) -> None:
        """Take in what became of a call."""
        session = self.peer.conversation
        now = time.monotonic()
        try:
            if isinstance(answer, RunError):
                raise answer
            messages = session.read(neighbor, answer)
            session.bytes_sent += sum(map(len, content))
            session.took(neighbor, now - began, line.connection.sending)
            session.answered(neighbor, sent, messages, now)
        except RunError as error:
            line.calls = []  # those after it follow from it
            line.again = session.failed(neighbor, error, now)


@dataclass
class _Line:
    """Calls to one neighbour.

    Attributes:
        calls: those to make, one after the other.
        is_calling: whether one is under way.
        again: the moment from which another may be made, after one that failed.
        is_over: whether what becomes of them matters no more.
    """

    connection: EventConnection
    calls: list[Messages] = field(default_factory=list)
    is_calling: bool = False
    again: float = 0.0
    is_over: bool = False


@dataclass(frozen=True)
class _HeldAnswer:
    """A call that is not answered yet, until when it is at the latest, and how."""

    caller: int
    messages: Messages
    make_answer: Callable[[], Messages]
    until: float
    reply: Reply


class _LoopBeside:
    """A thread that goes on with a driver's loop, without its peer's program, until `end`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_ending = False
        self._error: BaseException | None = None
        self._thread = Thread(target=self._go_on, name="peer-loop", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        try:
            while not self._is_ending:
                self._driver.speak_and_listen(math.inf)
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """End the thread; raises what ended it before."""
        self._is_ending = True
        self._driver.wake()
        self._thread.join()
        if self._error is not None:
            raise self._error


class _StandIn:
    """A thread that goes on with a driver's loop while work lasts that was thought to be brief."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_ending = Event()
        self._began = math.inf  # when the work under way did
        self._turn = Lock()  # held while this thread has the loop
        self._error: BaseException | None = None
        self._thread = Thread(target=self._look, name="peer-stand-in", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ending.set()
        self._thread.join()

    def watch(self, began: float) -> None:
        """Go on with the loop if the work that begins now lasts."""
        self._began = began

    def take_over(self) -> None:
        """Take the loop back, as the work is done; raises what ended the loop meanwhile."""
        self._began = math.inf
        if not self._turn.acquire(blocking=False):
            self._driver.wake()
            self._turn.acquire()
        self._turn.release()
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        while not self._is_ending.wait(BRIEF):
            with self._turn:
                # The error is there before the turn is over, so that who waits for the turn sees it.
                try:
                    while time.monotonic() - self._began > BRIEF:
                        self._driver.speak_and_listen(math.inf)
                except BaseException as error:
                    self._error = error
                    return


def _do(work: Work) -> None:
    work.result = work.do()
    work.is_done = True


def _transport_of(peer: RunningPeer) -> EventTransport:
    """Return the transport of a peer's device."""
    device: Any = peer.device
    assert isinstance(device, PeerDevice), "a driver needs the device's credentials and addresses"
    transport = device.transport
    if transport is None:
        assert device.credentials is not None
        names = None if device.files is None else device.files.directory().identities
        transport = transport_of(
            peer.trainer.scenario, device.peer, device.addresses, device.credentials, names, device.listen
        )
    if device.loss:
        return FaultyTransport(transport, device.peer, Faults(lose=device.loss))
    return evented(transport)
