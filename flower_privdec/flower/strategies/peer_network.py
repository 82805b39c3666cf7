"""The peers of a run as a strategy knows them: their nodes, their last reports, and the shares in transit.

`PeerNetwork` finds the peers and asks them; `RelayStore` holds what they send each other. Neither can read or make a
share: the frames that pass are sealed between two peers (or open, in a simulation), and only their headers are read.

A peer is known by its partition-id, and not by its node: a SuperNode that was started again has another node id and is
the same peer. Of a peer that has begun, one of these holds:

| state | means | in `ask` |
|---|---|---|
| responsive | it answered the last time, without a failure | waited for, gets shares, counts in means |
| silent | no answer yet, or its node is lost | asked too, as a probe, but waited for only if all are silent |
| failing | its last answer was a failure (`train_errors`) | waited for; gets no shares |
| gone | Flower does not list its node any more | not asked |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_privdec.common.errors import RunError
from flower_privdec.flower.error_formatting import LOST_NODE, reason_of
from flower_privdec.flower.mods.peer_messages import (
    FLOWERS_MODS,
    GREET,
    INBOX,
    INITIAL,
    INTRODUCE,
    JOIN,
    LEDGER,
    MASS,
    OUTBOX,
    PEER_MOD_FAILED,
    SAYS,
    WITNESSED_KINDS,
    PeerReport,
    PeerRequest,
    pack_bytes,
    record_in,
    sent_array,
    unpack_bytes,
)
from flower_privdec.graph.mixing import MixingMatrix, average_matrix, mixing_matrix
from flower_privdec.graph.topology import CompleteTopology, Topology
from flower_privdec.peer.app_state import Layout, run_frames
from flower_privdec.peer.app_updates import UNPROTECTED
from flower_privdec.peer.masking import unmasked_sum
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec, FrameHeader, FrameKind

log = logging.getLogger("flwr.privdec")

Label = tuple[int, int, int]  # of a share: sender, the sender's incarnation, number

NO_MOD = (
    "either its ClientApp is not a peer, write app = ClientApp(mods=[PeerMod(...)]); or a mod before PeerMod changes "
    f"or needs what only the app's function gets, put PeerMod first, or {FLOWERS_MODS}"
)
NO_TRAIN = "No train function registered"  # in Flower's error (1.41 to 1.43)
UNNAMED = "register the function that strategies call, @app.train() without a name"
MOST = 2**20  # peers: what masked sums hold, and a graph that fits into memory
MOST_ANNOUNCED = 256  # bytes of an announcement
LOOK = 5.0  # seconds after which a wait looks again which nodes are there
LEAST_TTL = 60.0  # seconds; later Flower drops a message, and its answer


@dataclass
class RelayStore:
    """What is on its way, and what has arrived.

    All of it is in memory: when the ServerApp dies, the senders hand in again what has not arrived.

    Attributes:
        frames: the run's codec, of which only the headers are used.
        held: the shares for each receiver, by label.
        acknowledged: the last acknowledgement for each sender of shares, by the peer that absorbed them.
        incarnations: the incarnation of each peer's state.
        ledger_reports: the last report of each sender, for each receiver.
        announced: the last announcement of each sender's noise, for each receiver; see `peer.app_pairs`.
    """

    frames: FrameCodec
    held: dict[int, dict[Label, bytes]] = field(default_factory=dict)
    acknowledged: dict[int, dict[int, bytes]] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    ledger_reports: dict[int, dict[int, bytes]] = field(default_factory=dict)
    announced: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def receive(self, report: PeerReport, outbox: ArrayRecord | None) -> None:
        """Take in what a peer acknowledges, what it refused, and what it sends.

        Raises:
            RefusedError: a frame is not this peer's, or not of this run.
        """
        if self.incarnations.get(report.peer, report.incarnation) != report.incarnation:
            self._forget(report.peer)
        self.incarnations[report.peer] = report.incarnation

        for receiver, announcement in zip(report.announced_to, report.announced, strict=True):
            if len(announcement) > MOST_ANNOUNCED:
                raise RefusedError(f"an announcement of {len(announcement)} bytes is none")
            self.announced.setdefault(receiver, {})[report.peer] = announcement

        waiting = self.held.setdefault(report.peer, {})
        refused = [label for label in waiting if _name(label) in report.refused_keys]
        for label in refused:
            del waiting[label]  # its sender hands it in again

        shares = [share for _, share in unpack_bytes(outbox)]
        for frame in [*report.acknowledgements, *shares]:
            header = self.frames.read_header(frame, len(frame))
            self._check_sender(header, report, len(frame))

            # A share for a state that its receiver has lost is dropped: nothing can absorb it.
            if header.kind == FrameKind.SHARE and self.incarnations.get(header.receiver) == header.addressed:
                label = (report.peer, report.incarnation, header.number)
                self.held.setdefault(header.receiver, {})[label] = frame
            elif header.kind == FrameKind.ACKNOWLEDGEMENT:
                self._acknowledge(header, frame, waiting)
            elif header.kind == FrameKind.LEDGER_REPORT:
                self.ledger_reports.setdefault(header.receiver, {})[report.peer] = frame

    @staticmethod
    def _check_sender(header: FrameHeader, report: PeerReport, length: int) -> None:
        """Refuse a frame that another peer made, or that is cut short."""
        # A report of a ledger belongs to no incarnation: the ledger outlasts the state.
        incarnation = 0 if header.kind == FrameKind.LEDGER_REPORT else report.incarnation
        is_own = (header.sender, header.incarnation) == (report.peer, incarnation)
        if not is_own or header.length != length:
            raise RefusedError(f"a frame of peer {header.sender} is cut short, or is another's: {header.length} bytes")

    def _acknowledge(self, header: FrameHeader, frame: bytes, waiting: dict[Label, bytes]) -> None:
        """Drop the shares that were absorbed, and keep the acknowledgement for their sender."""
        share_sender = (header.receiver, header.addressed)
        absorbed = [label for label in waiting if label[:2] == share_sender and label[2] <= header.number]
        for label in absorbed:
            del waiting[label]

        # One for an earlier incarnation is of no use. One for a later shows the sender that its state is an old copy.
        if header.addressed >= self.incarnations.get(header.receiver, 0):
            self.acknowledged.setdefault(header.receiver, {})[header.sender] = frame

    def _forget(self, peer: int) -> None:
        """Drop what was for a state that is lost, or from it."""
        self.held.pop(peer, None)
        self.acknowledged.pop(peer, None)
        for waiting in self.held.values():
            from_peer = [label for label in waiting if label[0] == peer]
            for label in from_peer:
                del waiting[label]
        for acknowledgements in self.acknowledged.values():
            acknowledgements.pop(peer, None)

    def inbox(self, receiver: int, kind: str) -> ArrayRecord:
        """Return what waits for a peer in a message of a kind.

        These are the last ledger reports to it, if it may answer them, and its shares, each sender's in their order.
        """
        frames = dict[str, bytes]()
        if kind in WITNESSED_KINDS:
            for sender, report in self.ledger_reports.get(receiver, {}).items():
                frames[f"{LEDGER}{sender}"] = report
        for label, share in sorted(self.held.get(receiver, {}).items()):
            frames[_name(label)] = share
        return pack_bytes(frames)

    def announcements(self, receiver: int, senders: Iterable[int]) -> dict[str, Any]:
        """Return what some peers announced to another one, as a request has it."""
        announced = self.announced.get(receiver, {})
        known = [sender for sender in senders if sender in announced]
        return {"announcers": known, "announced": [announced[sender] for sender in known]}

    def share_status(self, sender: int) -> dict[str, Any]:
        """Return what a peer learns of its own shares: which are held here, and which were absorbed."""
        receivers = []
        numbers = []
        for receiver, labels in self.held.items():
            for label in labels:
                if label[0] == sender:
                    receivers.append(receiver)
                    numbers.append(label[2])
        return {
            "held_by": receivers,
            "held": numbers,
            "acknowledgements": list(self.acknowledged.get(sender, {}).values()),
        }


def _name(label: Label) -> str:
    return ".".join(map(str, label))


def answers(
    grid: Grid,
    unanswered: dict[str, int],
    wanted: set[str],
    patience: float,
    node_of: Callable[[int], int] = lambda node: node,
) -> Iterator[tuple[int, Message]]:
    """Yield what comes in answer to messages, with their senders, until all that are wanted are in or time is up.

    Args:
        unanswered: the receivers, by message id; loses what is answered.
        wanted: the messages whose answers are waited for, for `patience` seconds, or until their node is not there.
        node_of: the node of a receiver.
    """
    deadline = time.monotonic() + patience
    next_look = time.monotonic() + LOOK
    pause = 0.001  # of a grid in this process; it grows to what polling a SuperLink may cost
    while unanswered:
        for reply in grid.pull_messages(list(unanswered)):
            name = reply.metadata.reply_to_message_id
            if name in unanswered:
                yield unanswered.pop(name), reply
        if not wanted & unanswered.keys() or time.monotonic() > deadline:
            return

        # The SuperLink of Flower 1.41 and 1.42 answers in place of a node that it has lost; that of 1.43 does not.
        if time.monotonic() > next_look:
            there = set(grid.get_node_ids())
            wanted = {name for name in wanted & unanswered.keys() if node_of(unanswered[name]) in there}
            next_look = time.monotonic() + LOOK

        pause = min(0.2, 2 * pause)
        time.sleep(pause)


def formatted(peers: Mapping[int, str]) -> str:
    """Return what several peers say, equal words together."""
    return "; ".join(f"{who}: {words}" for words, who in _by_words(peers).items())


def _by_words(peers: Mapping[int, str]) -> dict[str, str]:
    """Return which peers say the same, such as "peers 1, 2", by their words."""
    numbers: dict[str, list[str]] = {}
    for peer, words in sorted(peers.items()):
        numbers.setdefault(words, []).append(str(peer))
    return {words: f"peer{'s' * (len(who) > 1)} {', '.join(who)}" for words, who in numbers.items()}


@dataclass
class PeerNetwork:
    """The peers of one run, and their nodes; see the head of the module.

    Attributes:
        grid: the nodes.
        common: what is said in every message: the run, a simulation's folder, the arrays' key, the rounds.
        timeout: seconds to wait for answers.
        relay_store: the shares on their way.
        config_key: the name of the ConfigRecord that every message has, as Flower's mods expect.
        n_peers: as the nodes say; 0 before the first answer.
        node_of: the node of each peer that was met.
        gone: peers whose node is not there any more.
        silent: peers that did not answer the last time.
        unanswered: the receivers of messages without an answer yet, by message id.
        unmet: introductions without an answer yet: the node, by message id.
        reports: the last of each peer.
        train_errors: peers whose last answer was a failure, and its reason.
        eval_errors: peers whose app could not evaluate, and why; no peer stops training for it.
        has_new: whether a peer was introduced since the last `greet`.
        round_index: the round, from 1, or 0 before the first.
        failures: the answers of the last `ask` that are errors.
        layout: of the model's arrays; once a peer was met, with those that all peers keep to themselves.
        local: the patterns of these, as the peers say them; None before the first was met.
        absent_since: the round in which each peer was lost that is silent or gone, and when, by the monotonic clock.
    """

    grid: Grid
    common: dict[str, Any]
    timeout: float
    relay_store: RelayStore
    layout: Layout
    config_key: str = "config"
    n_peers: int = 0
    node_of: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    unanswered: dict[str, int] = field(default_factory=dict)
    unmet: dict[str, int] = field(default_factory=dict)
    reports: dict[int, PeerReport] = field(default_factory=dict)
    train_errors: dict[int, str] = field(default_factory=dict)
    eval_errors: dict[int, str] = field(default_factory=dict)
    has_new: bool = False
    round_index: int = 0
    failures: list[Message] = field(default_factory=list)
    local: list[str] | None = None
    absent_since: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def there(self) -> list[int]:
        """Return the peers whose node is there, ascending."""
        return [peer for peer in sorted(self.node_of) if peer not in self.gone]

    def peer_at(self, node: int) -> int:
        """Return which peer a node is."""
        return next(peer for peer, other in self.node_of.items() if other == node)

    def find(self, patience: float, least: int = 2) -> None:
        """Meet all peers, or at least some of them within some seconds.

        Args:
            patience: the seconds.
            least: with how many the run begins then.

        Raises:
            RunError: too few are there, or one is not a peer.
        """
        deadline = time.monotonic() + patience
        while not self.n_peers or len(self.node_of) < self.n_peers:
            left = deadline - time.monotonic()
            self.update_members(max(0.0, left))
            if left < 0:
                break
            if not self.node_of:
                time.sleep(0.05)  # no SuperNode has connected yet

        there = len(self.there)
        wanted = self.n_peers
        if there < min(max(1, least), wanted or 2):
            raise RunError(
                f"{there} of {wanted or 'the'} SuperNodes answered within {patience:g} s; start them all",
                code="flower.too-few-nodes",
            )
        if there < wanted:
            log.warning("%s of %s peers are there; the run begins without the others", there, wanted)

    def update_members(self, patience: float) -> None:
        """Notice nodes that are gone, and meet those that are new.

        Args:
            patience: seconds to wait for the answers of nodes that are new.

        Raises:
            RunError: a new node is not a peer, or claims to be one that another node is.
        """
        there = set(self.grid.get_node_ids())
        self.gone = {peer for peer, node in self.node_of.items() if node not in there}
        new = sorted(there - set(self.node_of.values()) - set(self.unmet.values()))

        group = str(self.round_index)
        config = ConfigRecord({"server-round": self.round_index})
        request = PeerRequest(INTRODUCE, **self.common).record()
        contents = {node: RecordDict({SAYS: request, self.config_key: config}) for node in new}
        messages = [Message(contents[node], node, "train", group_id=group) for node in new]
        sent = list(self.grid.push_messages(messages)) if messages else []
        self.unmet |= dict(zip(sent, new, strict=True))

        for node, reply in answers(self.grid, self.unmet, set(sent), patience):
            if reply.has_error():
                raise self._introduction_failed(node, reply)
            report = PeerReport.of(reply.content, f"SuperNode {node}: {NO_MOD}", "flower.no-peer-mod")
            self._admit(report, node, there)
            self._agree_on_local(report, node)
            self.reports[report.peer] = report
            self.has_new = True
            if report.incarnation:
                self._relay(report, None)

    @staticmethod
    def _introduction_failed(node: int, reply: Message) -> RunError:
        """Return the error for a node that did not say which peer it is."""
        why = reason_of(reply.error)
        if reply.error.code == PEER_MOD_FAILED:
            return RunError(f"SuperNode {node} failed: {why}", code="flower.node-failed")

        # Nothing in the node understood the message.
        failed = f"SuperNode {node} failed when asked for its peer, {why}"
        if NO_TRAIN in why:
            return RunError(f"{failed}: {UNNAMED}", code="flower.no-train")
        return RunError(f"{failed}: {NO_MOD}", code="flower.no-peer-mod")

    def _admit(self, report: PeerReport, node: int, there: set[int]) -> None:
        """Let a node be the peer that it says it is.

        Raises:
            RunError: it cannot be.
        """
        if not 0 <= report.peer < report.n_peers <= MOST:
            raise RunError(
                f"SuperNode {node} says partition-id={report.peer} of num-partitions={report.n_peers}: it must be 0 to "
                f"num-partitions - 1, of at most {MOST:,}",
                code="nodes.partition-id",
            )

        self.n_peers = self.n_peers or report.n_peers
        if report.n_peers != self.n_peers:
            raise RunError(
                f"SuperNode {node} says num-partitions={report.n_peers}, others {self.n_peers}: set them alike",
                code="nodes.partition-count",
            )

        # A node takes the place of one that is gone, or silent: a SuperNode was started again.
        before = self.node_of.get(report.peer)
        if before in there and report.peer not in self.silent:
            raise RunError(
                f"SuperNodes {before} and {node} both claim to be peer {report.peer}; give each its own partition-id",
                code="nodes.repeated-peer",
            )

        self.node_of[report.peer] = node
        self.gone.discard(report.peer)
        self.silent.discard(report.peer)

    def _agree_on_local(self, report: PeerReport, node: int) -> None:
        """Keep to the arrays that never leave a peer, as the first that was met says.

        Raises:
            RunError: the patterns are wrong, or another peer keeps others.
        """
        if self.local is None:
            self.layout = self.layout.keeping(report.local)
            self.local = report.local
            self.relay_store.frames = run_frames(self.common["run"], self.layout)
        elif report.local != self.local:
            raise RunError(
                f"SuperNode {node} has PeerMod(local={report.local!r:.200}), and others {self.local!r:.200}: all peers "
                "must share the same arrays, set local alike",
                code="nodes.local",
            )

    def _relay(self, report: PeerReport, outbox: ArrayRecord | None) -> None:
        try:
            self.relay_store.receive(report, outbox)
        except RefusedError as error:
            log.warning("peer %s handed in what is not relayed: %s", report.peer, error)
            self.train_errors[report.peer] = str(error)

    def join(self, initial: ArrayRecord, founding: bool) -> None:
        """Let the peers begin that have no state of this run.

        Args:
            initial: the arrays.
            founding: whether they begin with these as their mass; a peer that comes later begins with no mass.

        Raises:
            RunError: none of them can.
        """
        new = [peer for peer in self.there if not self.reports[peer].incarnation]
        if new:
            contents = {peer: RecordDict({INITIAL: initial}) for peer in new}
            self.ask([self.message(peer, "train", JOIN, contents[peer], founding=founding) for peer in new])
            self.raise_if_all_fail(new)

    def greet(self) -> None:
        """Let private peers report their ledgers, and answer the reports, once some were introduced.

        Raises:
            RunError: all of them fail.
        """
        any_private = any(report.spent for report in self.reports.values())
        if self.has_new and any_private:
            peers = self.members()
            for _ in range(2):  # the reports, then the answers to them
                self.ask([self.message(peer, "train", GREET, RecordDict()) for peer in peers])
                self.raise_if_all_fail(peers)
        self.has_new = False

    @property
    def sealed(self) -> bool:
        """Return whether the peers seal what they send.

        Raises:
            RunError: some do and some do not.
        """
        sealed = sorted(peer for peer, report in self.reports.items() if report.sealed)
        if sealed and len(sealed) < len(self.reports):
            raise RunError(
                f"peers {sealed} seal what they send and the others do not: set PeerMod's seal alike", code="nodes.seal"
            )
        return bool(sealed)

    def members(self) -> list[int]:
        """Return the peers that are there and have a state of this run."""
        return [peer for peer in self.there if self.reports[peer].incarnation]

    def responsive_peers(self) -> list[int]:
        """Return the members that answered the last time, without a failure: they get shares and count in means."""
        return [peer for peer in self.members() if peer not in self.silent and peer not in self.train_errors]

    def message(self, peer: int, category: str, kind: str, content: RecordDict, **more: Any) -> Message:
        """Return a message to a peer, with the shares for it and the facts about its neighbours."""
        known = sorted(self.relay_store.incarnations)
        request = PeerRequest(
            kind,
            peer=peer,
            neighbors=known,
            incarnations=[self.relay_store.incarnations[other] for other in known],
            keys=[self.reports[other].key for other in known],
            **self.common,
            **self.relay_store.share_status(peer),
            **more,
        )

        if kind != JOIN:
            inbox = self.relay_store.inbox(peer, kind)
            if inbox:
                content[INBOX] = inbox
        if self.config_key not in content:  # mods of Flower's expect one
            content[self.config_key] = ConfigRecord({"server-round": self.round_index})
        content[SAYS] = request.record()
        ttl = max(self.timeout, LEAST_TTL)
        group = str(self.round_index)
        return Message(content, self.node_of[peer], category, ttl=ttl, group_id=group)

    def ask(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Send messages, and return the good answers that came in time, by peer; late ones count too.

        A peer without an answer is silent until its answer comes, however late. The call does not wait for silent peers
        while others are asked too; the message to them also serves as a liveness probe.
        """
        sent = list(messages)
        peers = [self.peer_at(message.metadata.dst_node_id) for message in sent]
        waiting = dict(zip(self.grid.push_messages(sent), peers, strict=True))
        self.unanswered |= waiting
        wanted = {name for name, peer in waiting.items() if peer not in self.silent} or set(waiting)

        replies: dict[int, Message] = {}
        self.failures = []
        self.silent |= set(peers)
        lost: dict[int, str] = {}  # why, as the SuperLink says
        for peer, reply in answers(self.grid, self.unanswered, wanted, self.timeout, self.node_of.__getitem__):
            is_late = reply.metadata.reply_to_message_id not in waiting  # an answer to an earlier message
            if reply.has_error() and reply.error.code in LOST_NODE:
                # The SuperLink answers for the node, which stays silent, unless it has answered a later message since.
                if not is_late:
                    lost[peer] = LOST_NODE[reply.error.code]
                    self.failures.append(reply)
                continue

            self.silent.discard(peer)
            self._take_answer(peer, reply)
            if is_late:
                continue
            if reply.has_error():
                self.failures.append(reply)
            else:
                replies[peer] = reply
        if wanted & self.unanswered.keys():
            there = set(self.grid.get_node_ids())
            lost = {peer: LOST_NODE[5] for peer in self.silent if self.node_of[peer] not in there} | lost
        self._note_absent(lost)
        return replies

    def _note_absent(self, lost: Mapping[int, str]) -> None:
        """Log each peer that is lost, with what happens next, and each that is back, once.

        Args:
            lost: why, of those that the SuperLink has lost now.
        """
        absent = self.silent | self.gone
        for peer in sorted(absent - self.absent_since.keys()):
            self.absent_since[peer] = (self.round_index, time.monotonic())
            why = lost.get(peer, f"no answer within {self.timeout:g} s")
            if peer in self.gone:
                why = "its SuperNode is not connected any more"
            log.warning(
                "peer %s (SuperNode %s) is lost since round %s: %s. The others go on without it, and keep the shares "
                "for it. It takes part again once it answers, or when a SuperNode with partition-id=%s is there; it "
                "then goes on from its folder",
                peer,
                self.node_of[peer],
                self.round_index,
                why,
                peer,
            )

        for peer in sorted(self.absent_since.keys() - absent):
            lost_round, lost_at = self.absent_since.pop(peer)
            seconds = time.monotonic() - lost_at
            now = self.round_index
            log.info("peer %s is back in round %s, lost since round %s, %.0f s", peer, now, lost_round, seconds)

    def _take_answer(self, peer: int, reply: Message) -> None:
        """Take in an answer, whenever it comes."""
        if reply.has_error():
            is_evaluation = reply.metadata.message_type == "evaluate"
            errors = self.eval_errors if is_evaluation else self.train_errors
            errors[peer] = reason_of(reply.error)
            return

        try:
            report = PeerReport.of(reply.content, NO_MOD, "flower.no-peer-mod")
        except RunError as error:
            self.train_errors[peer] = str(error)
            return
        if (report.peer, report.n_peers) != (peer, self.n_peers):
            self.train_errors[peer] = (
                f"it says now that it is peer {report.peer} of {report.n_peers}: give it its own partition-id"
            )
            return

        self.train_errors.pop(peer, None)
        if report.unevaluated:
            self.eval_errors[peer] = report.unevaluated
        before = self.reports.get(peer)
        if before is not None and reply.metadata.message_type == "evaluate" and not report.spent:
            report = replace(report, spent=before.spent, epsilon=before.epsilon)  # an evaluation spends nothing
        self.reports[peer] = report
        if report.incarnation:
            self._relay(report, record_in(reply.content, OUTBOX, ArrayRecord))

    def troubles(self) -> str:
        """Return the problems to log: peers that are silent, fail, refuse a share, or have stopped training."""
        troubles = {peer: report.stopped for peer, report in self.reports.items() if report.stopped}
        troubles |= {peer: f"cannot evaluate: {why}" for peer, why in self.eval_errors.items()}
        for peer, report in self.reports.items():
            for why in report.refused:
                troubles[peer] = f"refused: {why}"
        troubles |= self.train_errors
        troubles |= dict.fromkeys(self.silent, "no answer")
        troubles |= dict.fromkeys(self.gone, "gone")
        return formatted(troubles)

    def raise_if_all_fail(self, peers: Iterable[int]) -> None:
        """Raise the errors of some peers if none of them did what was requested."""
        requested = list(peers)
        failed = {peer: "no answer" for peer in requested if peer in self.silent}
        failed |= {peer: self.train_errors[peer] for peer in requested if peer in self.train_errors}
        if failed and len(failed) == len(requested):
            raise RunError(f"no peer could go on: {formatted(failed)}", code="nodes.all-failed")


def masses_in(replies: Mapping[int, Message], size: int, sealed: bool) -> dict[int, np.ndarray]:
    """Return what each peer handed in for the mean, (x, w) as one vector: open, or masked.

    Args:
        replies: each peer's replies.
        size: the length of x.
        sealed: whether they are masked.

    Returns:
        By peer: float64 [size + 1], or masked, uint64 [2, size + 1]. What is of another shape or type, or not finite,
        is left out, and named in the log.
    """
    wanted: tuple[str, tuple[int, ...]] = ("float64", (size + 1,))
    if sealed:
        wanted = ("uint64", (2, size + 1))
    masses: dict[int, np.ndarray] = {}
    for peer, reply in replies.items():
        record = record_in(reply.content, MASS, ArrayRecord)
        if record is None or "mass" not in record:
            continue
        value = None
        with suppress(RunError):
            value = sent_array("mass", record["mass"])
        if value is None or (str(value.dtype), value.shape) != wanted or not np.isfinite(value).all():
            log.warning("what peer %s handed in for the mean is none of %s %s, and left out", peer, *wanted)
        else:
            masses[peer] = value

    return masses


def total_mass(masses: Mapping[int, np.ndarray], wanted: set[int], sealed: bool) -> np.ndarray | None:
    """Return Σ (x, w) over those that handed in their mass, [size + 1]; None if no peer did, or a mask is left over.

    Args:
        masses: what each handed in.
        wanted: the peers that were to have a part in it.
        sealed: whether they are masked. Masks cancel only in the sum over exactly those that are wanted.
    """
    if not masses or (sealed and masses.keys() != wanted):
        log.warning("no mean of the models: peers %s had no part in it", sorted(wanted - masses.keys()))
        return None

    if sealed:
        total = np.asarray(unmasked_sum(masses.values()))
    else:
        total = np.asarray(np.sum(list(masses.values()), axis=0))
    return total if total[-1] > 0 else None


def log_privacy(reports: Mapping[int, PeerReport]) -> None:
    """Log what each peer has spent, with its unit; those that spent the same together."""
    spent = {peer: report.spent or report.app_spent or UNPROTECTED for peer, report in reports.items()}
    for words, peers in _by_words(spent).items():
        log.info("Privacy of %s: %s", peers, words)


def matrix_of(graph: Topology, weights: str, round_index: int, present: np.ndarray) -> tuple[MixingMatrix, bool]:
    """Return how the peers that are present mix in a round, and whether each of them gets their mean.

    Args:
        present: bool [n_peers].
    """
    if isinstance(graph, CompleteTopology):
        return average_matrix(present), True
    return mixing_matrix(graph.edges(round_index), len(present), weights, present), False
