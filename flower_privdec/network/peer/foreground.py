"""A peer in the foreground of a terminal or a service: a status line, a clean stop, and its status on request."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from flower_privdec.algorithms import build_algorithm
from flower_privdec.common.deferred import is_small
from flower_privdec.common.errors import (
    ArgumentError,
    BudgetError,
    MembersChangedError,
    NotAgreedError,
    PrivdecError,
    ScenarioError,
    StoppedError,
)
from flower_privdec.common.exit_codes import INTERRUPTED
from flower_privdec.common.files import MODEL, write_atomically
from flower_privdec.common.formatting import one_line, printable
from flower_privdec.common.logs import CLEAR_LINE, TerminalHandler, event
from flower_privdec.experiment.agreement import build_exchange, check_reach
from flower_privdec.experiment.data_read import data_read
from flower_privdec.experiment.pair_plan import secret_pairs
from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.lifetime import DONE, KILLED, End, Lifetime, now
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.network.peer.small_peer import check_small
from flower_privdec.network.peer.status import status_line
from flower_privdec.network.transport.record_signatures import CertificateSignatures
from flower_privdec.network.transport.tls import identities, validity_of
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.extension import check_bound
from flower_privdec.peer.member_graph import MemberGraph, check_joins, what_stays
from flower_privdec.peer.peer import PeerPlace, RunningPeer
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.trainer import ScenarioTrainer, Trainer
from flower_privdec.pushsum.membership import Member
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import AppScenario, NetworkPeer, checked_address

if TYPE_CHECKING:  # a server of HTTP, which is imported if it is asked for
    from flower_privdec.network.peer.telemetry import Telemetry

_log = logging.getLogger(__name__)

LINE_SECONDS = 1.0  # between two status lines on a terminal; elsewhere there is one an evaluation
WAITING_SECONDS = 3.0  # until a peer that has taken rounds says what it waits for
DOWN_SECONDS = 5.0  # until a neighbour that cannot be reached is said to be down
AGAIN_SECONDS = 60.0  # until it says so again, if there is no terminal
PARENTS_END_SIGNAL = 1  # PR_SET_PDEATHSIG: the kernel signals this process when its parent ends
MOST_UNFOUNDED = 3  # times in a row that lines are reported missing, and none is once they are to be charged
MODES: dict[str, type[RunningPeer]] = {"asynchronous": AsynchronousPeer, "synchronous": SynchronousPeer}


def peer_of(trainer: Trainer, device: PeerDevice) -> RunningPeer:
    """Return a peer that trains, in the mode of its scenario's network; see RunningPeer."""
    scenario = trainer.scenario
    if trainer.pair_secrets is not None and device.files is not None:
        device = replace(device, signatures=device.files.signatures())
    elif trainer.pair_secrets is not None and device.credentials is not None:
        device = replace(device, signatures=CertificateSignatures(device.credentials, identities(scenario)))
    return MODES[scenario.network.mode](trainer, device)


def running_peer(scenario: Scenario, device: PeerDevice) -> RunningPeer:
    """Return a peer of a scenario, in the graph of those who take part now; see ScenarioTrainer and RunningPeer.

    Raises:
        ScenarioError: it is to join a run that cannot take it.
    """
    if is_small():
        check_small(scenario)
    own = scenario
    if device.peer >= scenario.n_peers and device.members is not None:
        own = joined_scenario(scenario, device)
    check_bound(own, device.peer, device.max_epsilon)

    rounds = None
    member_list = device.members
    if member_list is not None:
        # The members are of the scenario, whatever this peer is.
        algorithm = build_algorithm(scenario.algorithm)
        cancels = len(secret_pairs(scenario)) > 0
        device = replace(device, stays=what_stays(scenario, algorithm, cancels))
        if own is not scenario:
            check_joins(scenario, algorithm, cancels)
        members = member_list.members
        if "add" not in device.stays:
            first, _ = build_exchange(scenario, algorithm)
            if first is not None:
                is_extended = "extend" not in device.stays
                graph = MemberGraph.of(scenario, first, members, is_extended)
                device = replace(device, graph=graph)
                rounds = graph.rounds[-1]
                # After one was shut out the others go on over the edges that there are.
                try:
                    check_reach(members.dialling(device.addresses), graph.mixing)
                except ScenarioError as error:
                    _log.warning("of those who take part now: %s", error)

    trainer = ScenarioTrainer(
        own, device.peer, device.folder, device.data, device.insecure_seeds, rounds, device.max_epsilon
    )
    return peer_of(trainer, device)


def joined_scenario(scenario: Scenario, device: PeerDevice) -> Scenario:
    """Return a scenario as a peer that joined has it: with as many peers as there are numbers up to its own.

    Raises:
        ScenarioError: the scenario gives no part to a peer that it does not know.
    """
    assert device.members is not None
    n_peers = device.peer + 1
    if device.data is None and not scenario.data.each_its_own:
        raise ScenarioError(
            f"peer {device.peer} joined, and the scenario's data are dealt out to {scenario.n_peers} peers: give it "
            "its own, by --data",
            code="members.data",
        )

    if scenario.private is not None and isinstance(scenario.private.epsilon, tuple):
        raise ScenarioError(
            f"peer {device.peer} joined, and privacy.epsilon lists a budget for each of the {scenario.n_peers} peers "
            "that began: a run that peers join has one for all",
            code="members.budget",
        )

    known = device.members.members.all[:n_peers]
    peers = [_place_of(one, device.addresses[one.number]) for one in known]
    network = scenario.network.model_copy(update={"peers": peers})
    return scenario.model_copy(update={"n_peers": n_peers, "network": network})


def _place_of(member: Member, address: str | None) -> NetworkPeer:
    """Return where a member is, as a scenario says it."""
    if address is None:
        return NetworkPeer(dial="out", identity=member.identity)
    return NetworkPeer(address=address, identity=member.identity)


def run_peer(
    scenario: Scenario,
    peer: int,
    folder: Path,
    certificates: Path,
    *,
    data: str | None = None,
    listen: str | None = None,
    insecure_seeds: bool = False,
    loss: float = 0.0,
    with_parent: bool = False,
    charge_missing: bool = False,
    charge_witnessed: bool = False,
    max_epsilon: float | None = None,
    new_data: bool = False,
    telemetry: Telemetry | None = None,
) -> None:
    """Run one peer until its rounds are done, SIGTERM or Ctrl-C; it begins, or continues if its folder holds the run.

    Args:
        folder: its own.
        certificates: a folder with its certificate, its key and the authority's certificate.
        data: its own data, taken whole, in place of its part of the scenario's `data.root`.
        listen: HOST:PORT that it listens on, in place of the scenario's.
        insecure_seeds: draw noise and batches from the scenario's seed.
        loss: see PeerDevice.
        with_parent: stop when stdin ends, as it does when the parent process ends.
        charge_missing: charge what the ledger lacks and neighbours have seen, and stop.
        charge_witnessed: charge it whenever that is found, within a bound, and go on; see `run_unattended`.
        max_epsilon: what the owner of the device allows more rounds to cost in all; see `extension`.
        new_data: whether its owner says that its data changed.
        telemetry: what tells programs on this device of the peer; None for none.

    Raises:
        ScenarioError: what is given does not fit, before any work.
        NotAgreedError: the rounds are done, and the model is not the one that its neighbours have.
        RunError: the run could not go on; all is on disk.
        StoppedError: it received SIGTERM or Ctrl-C.
    """
    made = 0

    def make() -> RunningPeer:
        nonlocal made
        made += 1
        device = device_of(scenario, peer, folder, certificates, data, insecure_seeds, listen)
        device = replace(device, loss=loss, max_epsilon=max_epsilon, new_data=new_data)
        running = running_peer(scenario, device)
        if isinstance(running.trainer, ScenarioTrainer) and made == 1:
            # For the peer's owner: it stays in this process's log.
            experiment = running.trainer.experiment
            for half, line in data_read(experiment, experiment.own.examples).items():
                _log.info("%s: %s", half, line, extra=event("data", half=half))
        return running

    if charge_witnessed:
        run_unattended(make, scenario.evaluation.every, with_parent, telemetry)
        return

    while True:
        running = make()
        try:
            run_in_foreground(running, scenario.evaluation.every, with_parent, charge_missing, telemetry=telemetry)
            return
        except MembersChangedError as change:
            _log.info("%s", change, extra=event("members"))
            begin_again(running)


def begin_again(running: RunningPeer) -> None:
    """Prepare for the next process of a peer, within this one.

    Raises:
        StoppedError: the peer was stopped.
    """
    # A signal that comes before the next peer is there ends the process: all is on disk.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if running.is_stopping:
        raise StoppedError(f"the same command continues from {running.device.folder}", code="peer.stopped")


def run_unattended(
    make: Callable[[], RunningPeer], every: int, with_parent: bool, telemetry: Telemetry | None = None
) -> None:
    """Run a peer whose owner said once that what its ledger lost may be charged without asking again.

    Each time that neighbours report lines that the ledger lacks, as after a lost folder, they are charged, and the
    peer is built again: how many steps its budget still allows is computed when its ledger is opened. It ends only if
    the lines may be a neighbour's lie: see `PlannedLedger.charge_confirmed`; or if they are taken back, MOST_UNFOUNDED
    times, when they are to be charged. Each start may count a step too many, so a liar could use a budget up by starts.

    Args:
        make: builds the peer, from what is in its folder.
        every, with_parent, telemetry: see `run_in_foreground`.

    Raises:
        BudgetError: too few neighbours confirm what is missing, or the ledger cannot be trusted otherwise.
        StoppedError: it received SIGTERM or Ctrl-C.
    """
    unfounded = 0  # times in a row that lines were reported missing, and none was once they were to be charged
    while True:
        running = make()
        try:
            run_in_foreground(running, every, with_parent, telemetry=telemetry)
            return
        except MembersChangedError as change:
            _log.info("%s", change, extra=event("members"))
            begin_again(running)
            continue
        except BudgetError as error:
            if error.code != "ledger.witnessed":
                raise
            missing = error
            _log.warning(
                "%s; it charges them, as --charge-witnessed allows", error, extra=event("charge", reason=error.code)
            )

        begin_again(running)
        charged = run_in_foreground(
            make(), every, with_parent, charge_missing=True, only_confirmed=True, telemetry=telemetry
        )
        unfounded = 0 if charged else unfounded + 1
        if unfounded >= MOST_UNFOUNDED:
            raise BudgetError(
                f"{missing}. That was said {unfounded} times, and taken back whenever the lines were to be charged: "
                "whoever says so lies, or its device is broken; see to it, then start this peer again",
                code="ledger.not-confirmed",
            )


def device_of(
    scenario: Scenario | AppScenario,
    peer: int,
    folder: Path,
    certificates: Path,
    data: str | None = None,
    insecure_seeds: bool = False,
    listen: str | None = None,
) -> PeerDevice:
    """Return the device of a peer; see `run_peer`."""
    files = PeerFiles(scenario, peer, folder, certificates)
    if scenario.network.peers is None:
        raise ScenarioError(
            "network.peers is missing: list the address of every peer, as {address: 10.0.0.7:7100}; `privdec up` runs "
            "all peers on this machine without",
            code="peer.addresses",
        )
    if listen is not None:
        try:
            checked_address(listen)
        except ArgumentError as error:
            raise ScenarioError(f"--listen {listen}: {error}", code=error.code) from error

    directory = files.directory()
    directory.check_dialled(own=peer)
    if listen is None and peer < len(scenario.network.peers):
        listen = scenario.network.peers[peer].listen
    return PeerDevice(
        peer,
        folder,
        files.credentials,
        directory.addresses,
        listen=listen,
        data=data,
        insecure_seeds=insecure_seeds,
        files=files,
        members=files.members,
    )


def run_in_foreground(
    running: RunningPeer,
    every: int,
    with_parent: bool,
    charge_missing: bool = False,
    only_confirmed: bool = False,
    telemetry: Telemetry | None = None,
) -> int:
    """Run a peer until its rounds are done, SIGTERM or Ctrl-C, and write its last status to summary.json.

    A peer that was done before takes no round; it waits for its neighbours to end, and keeps the summary of its run.

    Args:
        every: how many rounds lie between two status lines if there is no terminal.
        with_parent, charge_missing, telemetry: see `run_peer`.
        only_confirmed: see `RunningPeer.begin_charging`.

    Returns:
        How many lines that its ledger lacked were charged.
    """
    folder = running.device.folder
    was_done = running.state.round_index >= running.end
    summary = folder / "summary.json"
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    if with_parent:
        if sys.platform == "linux":  # else a peer that is paused would not see it
            ctypes.CDLL(None).prctl(PARENTS_END_SIGNAL, signal.SIGCONT)
        Thread(target=_stop_at_end, args=(running,), daemon=True).start()

    driver = Driver(running)
    line = _StatusLine(running, every)
    lifetime = Lifetime(folder)
    end = End(KILLED)
    try:
        driver.open(not charge_missing, only_confirmed)
        if telemetry is not None:
            telemetry.attach(driver, lifetime, lambda: _expiry(running.device))
        line.begin()
        if charge_missing:
            charged = driver.charge_witnessed()
            if only_confirmed:
                _log.warning("charged %d lines that the ledger lacked", charged, extra=event("charged", lines=charged))
            else:
                print(f"{folder}: charged {charged} lines that the ledger lacked; start the peer again")
            end = End("charged", 0)
            return charged
        driver.run(line)
        if not (was_done and summary.exists()):
            write_atomically(summary, (json.dumps(running.status(), indent=2) + "\n").encode(), public=True)
        if (why := running.shortcoming()) is not None:
            raise NotAgreedError(f"peer {running.device.peer}: {why}", code="network.not-agreed")
        line.last(folder / MODEL)
        end = End(DONE, 0)
        return 0
    except StoppedError as error:
        end = End(error.code, INTERRUPTED, str(error))
        raise
    except PrivdecError as error:
        end = End(error.code, error.exit_status, str(error))
        raise
    except BaseException as error:
        end = End(type(error).__name__, 1, one_line(error))
        raise
    finally:
        line.end()
        driver.close()
        lifetime.end(replace(end, at=now()))


def _expiry(device: PeerPlace) -> float | None:
    """Return when a device's certificate expires, in seconds since 1970; None if it has none."""
    if not isinstance(device, PeerDevice):
        return None
    credentials = device.credentials
    if device.files is not None:  # which may have been renewed
        credentials = device.files.credentials
    return None if credentials is None else validity_of(credentials.certificate)[1].timestamp()


def _stop_at_end(running: RunningPeer) -> None:
    while os.read(sys.stdin.fileno(), 1):  # sys.stdin would hold a lock that the interpreter wants when it ends
        pass
    running.stop()


class NeighbourNotes:
    """Logs that a neighbour that was there is down, and that it is up again.

    A call that fails is made again at once, so it is down only if that lasts; and one that comes and goes is mentioned
    once in AGAIN_SECONDS. Those that have not come yet are what a peer that waits says.
    """

    def __init__(self, running: RunningPeer) -> None:
        self._running = running
        self._since: dict[int, float] = {}  # when its trouble began
        self._said: dict[int, float] = {}  # when that was said, of those that are down
        self._again: dict[int, float] = {}  # before that nothing more is said

    def look(self, now: float) -> None:
        """Look at the neighbours at a moment."""
        unheard, trouble = self._running.status_of_neighbors()
        for number, why in trouble.items():
            since = self._since.setdefault(number, now)
            is_due = now - since >= DOWN_SECONDS and now >= self._again.get(number, now)
            if is_due and number not in self._said and number not in unheard:
                self._said[number] = since
                self._again[number] = now + AGAIN_SECONDS
                _log.warning("peer %d is down: %s", number, why, extra=event("down", neighbour=number))

        for number in [one for one in self._since if one not in trouble]:
            del self._since[number]
            since_said = self._said.pop(number, None)
            if since_said is not None:
                seconds = round(now - since_said)
                fields = event("up", neighbour=number, seconds=seconds)
                _log.info("peer %d is up again, after %d s", number, seconds, extra=fields)


class _StatusLine:
    """Shows how a peer does, and what it waits for: over the same line on a terminal.

    The log has a line an evaluation, and one while the peer waits: at once before its first round, later if no
    round ended for WAITING_SECONDS; again if that changed, but not within WAITING_SECONDS; and every AGAIN_SECONDS.
    """

    def __init__(self, running: RunningPeer, every: int) -> None:
        self._running = running
        self._every = every
        self._terminal = any(isinstance(handler, TerminalHandler) for handler in logging.getLogger().handlers)
        self._guard = Lock()
        self._over = Event()
        self._is_shown = False
        self._round_at = self._waiting_at = float("-inf")  # when a round ended, and when a wait was logged last
        self._shown_at = float("-inf")
        self._waiting = ""
        self._notes = NeighbourNotes(running)
        self._thread = Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        """Begin to look at what the peer waits for."""
        self._thread.start()

    def __call__(self, running: RunningPeer) -> None:
        """Log a peer's status if it was evaluated, and show it unless one was shown just now."""
        round_index = running.state.round_index
        self._round_at = time.monotonic()
        self._waiting = ""
        is_logged = round_index % self._every == 0 or round_index == running.rounds
        is_shown = self._terminal and self._round_at - self._shown_at >= LINE_SECONDS
        if is_logged or is_shown:
            status = running.status()
            text = status_line(status)
            self._show(text)
            if is_logged:
                _log.info("%s", text, extra=event("round", **_fields(status)))

    def last(self, model: Path) -> None:
        """Log the last status, with the path of the model."""
        status = self._running.status()
        text = f"{status_line(status)}  model {model}"
        self._show(text)
        _log.info("%s", text, extra=event("done", **_fields(status), model=str(model)))

    def _watch(self) -> None:
        while not self._over.is_set():
            now = time.monotonic()
            self._notes.look(now)
            if now - self._round_at >= WAITING_SECONDS and (waiting := self._running.waiting()):
                self._show(waiting)
                pause = AGAIN_SECONDS if waiting == self._waiting else WAITING_SECONDS
                if now - self._waiting_at >= pause:
                    _log.info("%s", waiting, extra=event("waiting", peer=self._running.device.peer))
                    self._waiting = waiting
                    self._waiting_at = now
            self._over.wait(LINE_SECONDS)

    def _show(self, text: str) -> None:
        """Show a line on a terminal."""
        with self._guard:
            if self._terminal and not self._over.is_set():
                self._is_shown = True
                self._shown_at = time.monotonic()
                print(f"{CLEAR_LINE}{printable(text)}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        with self._guard:
            self._over.set()
            if self._is_shown:
                print(file=sys.stderr)


def _fields(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record of the log has of a status, beside its line."""
    names = ("name", "peer", "round", "rounds", "loss", "epsilon", "budget", "neighbours", "down", "bytes_sent")
    return {name: status[name] for name in (*names, "bytes_received")}
