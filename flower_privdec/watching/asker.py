"""Where the live page learns of peers: their answers to calls for their status, and the folder of `privdec up`.

One thread asks all peers, each again a moment after its last answer, as a member: with the certificate and key of one
of them. A peer that has more of the list of members is asked for that too; the authority's signatures say whether it
counts, so a page that stays open for weeks shows who joins and who leaves. It sends nothing else, and peers count no
such call as one of a neighbour's.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.graph.topology import build_topology
from flower_privdec.network.peer.lifetime import FILE, read_process
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.network.peer.status import STATUS_CAP, STATUS_REQUEST, members_request
from flower_privdec.network.transport.in_threads import evented
from flower_privdec.network.transport.named import transport_of
from flower_privdec.network.transport.transport import EventConnection
from flower_privdec.pushsum.membership import MemberList
from flower_privdec.scenario import load_scenario
from flower_privdec.scenario.loading import load_app_scenario, load_membership
from flower_privdec.scenario.sections import Membership
from flower_privdec.watching.board import MOST_DRAWN, Board

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # to wait for an answer
# Bytes of an answer, and of it for each peer that it may be about: to look at one that is large costs time of the page.
LEAST_ANSWER = 1 << 17
PEER_BYTES = 1 << 12
TURN_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks at the folder
LEAST_EVERY = 0.2
LINE_BYTES = 1 << 20  # of one line of metrics
NETWORK = "network.yaml"


@dataclass(frozen=True)
class Target:
    """What is watched.

    Attributes:
        scenario: who the peers are.
        edges: pairs that exchange in some round, as far as the scenario says.
        files: the certificate of the member that asks, and the list of members, from which follows where the peers are.
        member: which peer asks.
        folder: of `privdec up`; None for deployed peers.
        stamp: of the file of the folder's addresses, which changes if the run is started again.
    """

    scenario: Membership
    edges: tuple[tuple[int, int], ...]
    files: PeerFiles
    member: int
    folder: Path | None = None
    stamp: tuple[int, int] = (0, 0)

    @classmethod
    def of_folder(cls, folder: Path) -> Target:
        """Return the peers of a folder that `privdec up` wrote.

        Raises:
            ScenarioError: it wrote no such folder.
        """
        path = folder / NETWORK
        if not path.is_file():
            raise ScenarioError(
                f"{folder} holds no run of `privdec up`: {NETWORK} is missing; give the folder of its --out, or the "
                "scenario of deployed peers",
                code="watch.no-network",
            )
        stamp = _stamp(path)
        return cls._of(path, (), folder / "certs", 0, folder, stamp)

    @classmethod
    def of_scenario(cls, path: Path, settings: Iterable[str], certificates: Path, member: int) -> Target:
        """Return deployed peers.

        Raises:
            ScenarioError: the scenario has no addresses, or the certificate cannot be read.
        """
        return cls._of(path, settings, certificates, member, None, (0, 0))

    @classmethod
    def _of(
        cls,
        path: Path,
        settings: Iterable[str],
        certificates: Path,
        member: int,
        folder: Path | None,
        stamp: tuple[int, int],
    ) -> Target:
        settings = tuple(settings)
        scenario = load_membership(path, settings)
        peers = scenario.network.peers
        if peers is None:
            raise ScenarioError(
                "network.peers is missing, so nobody knows where the peers are: list their addresses, or give the "
                "folder of `privdec up`",
                code="peer.addresses",
            )

        files = PeerFiles(scenario, member, None, certificates, option="--as")
        return cls(scenario, edges_of(path, settings), files, member, folder, stamp)

    @property
    def n_peers(self) -> int:
        """Return how many peers there ever were."""
        return len(self.files.members.members.all)

    def board(self) -> Board:
        """Return what is known at first: who the peers are."""
        where = f"deployed peers, asked as peer {self.member}"
        if self.folder is not None:
            where = f"privdec up, {self.folder}"
        return Board(self.scenario.name, self.n_peers, where, self.edges, is_deployed=self.folder is None)


def edges_of(path: Path, settings: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Return the edges of a scenario's graph; none if only its peers can tell, or if they are too many to draw."""
    scenario: Any
    try:
        scenario = load_scenario(path, settings)
    except ScenarioError:
        scenario = load_app_scenario(path, settings)
    if scenario.n_peers > MOST_DRAWN:
        return ()
    try:
        section = scenario.topology
        graph = build_topology(section.name, scenario.n_peers, seed=scenario.seed_of("run"), **section.options())
    except (PrivdecError, TypeError, AttributeError) as error:
        _log.info("the graph is drawn as far as the peers tell it (%s)", one_line(error))
        return ()
    return tuple((int(i), int(j)) for i, j in graph.support())


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file is replaced."""
    try:
        there = path.stat()
    except OSError:
        return (0, 0)
    return (there.st_ino, there.st_mtime_ns)


class Asker:
    """Tells a board of the peers, in a thread of its own; a context manager.

    Args:
        target: what is watched.
        every: seconds between a peer's answer and the next call.
    """

    def __init__(self, target: Target, every: float) -> None:
        self.board = target.board()
        self._target = target
        self._every = max(every, LEAST_EVERY)
        self._over = Event()
        self._records: BinaryIO | None = None
        self._part = b""  # of a line of metrics that is not whole yet
        self._thread = Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._records is not None:
            self._records.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._follow(self._target)
            except Exception:  # the page goes on with what is known
                _log.exception("watching failed, and begins again")
                self._over.wait(LOOK_SECONDS)

    def _follow(self, target: Target) -> None:
        """Ask the peers until this is over, they begin again elsewhere, or the list or this certificate changes."""
        files = target.files
        entries = len(files.members.entries)
        credentials = files.credentials
        self.board.listed(files.members.members)

        directory = files.directory()
        transport = evented(
            transport_of(target.scenario, target.member, directory.addresses, credentials, directory.identities)
        )
        if hasattr(transport, "update"):
            transport.update(directory, credentials)  # whose certificates count
        cap = min(STATUS_CAP, LEAST_ANSWER + PEER_BYTES * target.n_peers)
        questions = [_Question(j, transport.connect(j, cap), self.board, files.members) for j in range(target.n_peers)]
        look_at = 0.0
        try:
            while not self._over.is_set():
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + LOOK_SECONDS
                    if self._look():
                        return
                    files.look()
                if len(files.members.entries) != entries or files.credentials is not credentials:
                    return
                for question in questions:
                    question.ask(now, self._every)
                transport.turn(TURN_SECONDS)
        finally:
            for question in questions:
                question.connection.close()
            transport.close()

    # --- the folder ---

    def _look(self) -> bool:
        """Look at the folder, if there is one; return whether its peers have begun again at other addresses."""
        folder = self._target.folder
        if folder is None:
            return False
        stamp = _stamp(folder / NETWORK)
        if stamp not in ((0, 0), self._target.stamp):
            try:
                again = Target.of_folder(folder)
            except PrivdecError:  # it is being written
                return False
            if again.n_peers == self.board.n_peers:
                self._target = again
                self.board.restarted()
                return True

        for number in range(self.board.n_peers):
            process = read_process(folder / "peers" / str(number) / FILE)
            if process is not None:
                runs = process["end"] is None and _is_running(process["process"])
                self.board.process(number, process["starts"], runs, process["end"])
        self._read_records(folder / "metrics.jsonl")
        self._read_end(folder)
        return False

    def _read_records(self, path: Path) -> None:
        """Read the evaluations that came since the last look."""
        if self._records is not None and _stamp(path)[0] != os.fstat(self._records.fileno()).st_ino:
            self._records.close()
            self._records = None
        if self._records is None:
            try:
                self._records = path.open("rb")
            except OSError:
                return
            self._part = b""
        if os.fstat(self._records.fileno()).st_size < self._records.tell():  # it was cut, as at a resume
            self._records.seek(0)
            self._part = b""
        *lines, self._part = (self._part + self._records.read()).split(b"\n")
        if len(self._part) > LINE_BYTES:
            self._part = b""
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                self.board.measured(record)

    def _read_end(self, folder: Path) -> None:
        summary = folder / "summary.json"
        if _stamp(summary) <= (0, 0) or _stamp(summary)[1] < self._target.stamp[1]:
            return  # of the run before this one
        try:
            content = json.loads(summary.read_bytes())
            stopped = content.get("stopped_by")
        except (OSError, ValueError, AttributeError):
            return
        self.board.finish("the run is finished" if stopped is None else f"the run was stopped ({one_line_of(stopped)})")


def one_line_of(value: object) -> str:
    """Return a value as short text."""
    return " ".join(str(value).split())[:100]


def _is_running(process: int) -> bool:
    """Return whether a process of this machine runs; one that is there and not ours does."""
    if process <= 0:
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


class _Question:
    """Calls for one peer's status, and for what it has of the list of members and this program lacks."""

    def __init__(self, peer: int, connection: EventConnection, board: Board, members: MemberList) -> None:
        self.connection = connection
        self._peer = peer
        self._board = board
        self._members = members
        self._has_more_entries = False  # by its last status
        self._is_asking = False
        self._again = 0.0

    def ask(self, now: float, every: float) -> None:
        """Call, unless a call is under way or the last was just now."""
        if self._is_asking or now < self._again:
            return
        self._is_asking = True
        if self._has_more_entries:
            height = len(self._members.entries)
            self.connection.post([members_request(height)], ANSWER_SECONDS, self._list_came)
        else:
            self.connection.post([STATUS_REQUEST], ANSWER_SECONDS, partial(self._status_came, every))

    def _list_came(self, answer: memoryview | RunError) -> None:
        # A status is next in any case, so that a peer which hands out no list, or a wrong one, is shown as the others.
        self._is_asking = False
        self._has_more_entries = False
        if isinstance(answer, RunError):
            _log.info("peer %d hands out no list of members (%s)", self._peer, one_line(answer))
            return
        self._members.take(bytes(answer), f"peer {self._peer}")

    def _status_came(self, every: float, answer: memoryview | RunError) -> None:
        self._is_asking = False
        self._again = time.monotonic() + every
        if isinstance(answer, RunError):
            self._board.silent(self._peer, str(answer))
            return

        try:
            status = json.loads(bytes(answer))
        except (ValueError, RecursionError):
            status = None
        if not isinstance(status, dict):
            self._board.silent(self._peer, "it answers what is no status")
            return

        # A peer that has more of the list of members is asked for that next, at once.
        height = self._board.answered(self._peer, status)
        if height > len(self._members.entries):
            self._has_more_entries = True
            self._again = 0.0
