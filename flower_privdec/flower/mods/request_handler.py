"""What a peer of a Flower app does with one message of its strategy: `RequestHandler`.

A message is answered in three turns. `absorb_inbox` takes in what neighbours sent: reports of ledgers first, so that a
ledger that lacks lines stops the peer before its state moves, then acknowledgements and shares. `take_part` pays, lets
the app train and freezes the shares of a round. `answer` saves the state, and only then returns what follows from it.

The app is called by `PeerMod`, and here only as a function from arrays to arrays.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from flower_privdec.common.errors import RunError
from flower_privdec.flower.mods.node_pairs import NodePairs, check_noise, refuse_mesh
from flower_privdec.flower.mods.peer_messages import (
    DELIVER,
    EVALUATE,
    GREET,
    INBOX,
    INITIAL,
    INTRODUCE,
    JOIN,
    LEDGER,
    MASS,
    MESH,
    MODEL,
    OUTBOX,
    SAYS,
    WITNESSED_KINDS,
    PeerReport,
    PeerRequest,
    pack_bytes,
    record_in,
    record_of,
    sent_arrays,
    unpack_bytes,
)
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_pairs import own_at_least
from flower_privdec.peer.app_state import (
    WITNESSED,
    Layout,
    PeerState,
    SavedState,
    boot_of,
    check_shares,
    file_in,
    load_state,
    run_frames,
    save_state,
    state_path,
    witnesses_of,
)
from flower_privdec.peer.app_updates import (
    SOURCE,
    PeerLedger,
    PeerSpent,
    Train,
    local_words,
    noise_for,
    spent_so_far,
    take_step,
    unprotected_words,
)
from flower_privdec.peer.dual_step import DualStep
from flower_privdec.peer.identity import IDENTITY, KNOWN, Identity, KnownPeers, PeerSeal
from flower_privdec.peer.masking import check_set, masked
from flower_privdec.peer.record_log import RecordLog
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import ledger_path, read_entries
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary
from flower_privdec.pushsum.exactly_once import Acknowledgement, FrozenShare, RefusedError, StaleStateError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.witness import LedgerReport, LedgerWitness, WitnessFile
from flower_privdec.scenario.app_sections import AppPrivacySection

log = logging.getLogger("flwr.privdec")

UNWITNESSED = "no neighbour answered its report of its ledger, before which it takes no private step"


def new_incarnation() -> int:
    """Return the number of a state that begins now: more than that of any state which this machine lost."""
    return time.time_ns()


class RequestHandler:
    """One message's work at one peer, whose folder is held meanwhile.

    Args:
        request: what the strategy requests.
        node: the settings of the peer's node.
        privacy: how it protects what it sends.
        seal: whether it seals what it sends, and takes only sealed shares.
        examples: by how many examples it counts in the run, if its noise cancels.
        stored: the state of the node's context.
        local: patterns of the names of the arrays that never leave the peer.

    Raises:
        RunError: it has a state of this run in which others never leave, or noise that cancels cannot be added here.
    """

    def __init__(
        self,
        request: PeerRequest,
        node: PeerSettings,
        privacy: AppPrivacySection | None,
        seal: bool,
        examples: float,
        stored: RecordDict,
        local: tuple[str, ...] = (),
    ) -> None:
        self.request = request
        self.local = local
        self.node = node
        self.seals = seal
        self.privacy = node.binding_privacy(privacy)
        folder = node.folder
        cache = node.cache

        # Who it is, and whom it knows.
        self.identity: Identity = cache.get(file_in(folder, IDENTITY), lambda: Identity(folder))
        self._known_path = node.known_peers or file_in(folder, KNOWN)
        self.known: KnownPeers = cache.get(self._known_path, lambda: KnownPeers(folder, node.known_peers))
        self._seal = PeerSeal(self.identity, self.known) if seal else None

        # Its state. An introduction begins as a new process does: what it answers follows only from what is saved.
        is_introduced = request.kind == INTRODUCE
        self.path = state_path(folder, request.run)
        self._saved: SavedState | None = cache.get(self.path, lambda: load_state(self.path))
        self.state: PeerState | None = None
        if self._saved is not None:
            self.state = self._saved.taken(is_introduced)
            self._check_local(self.state.layout)
        self._dual = DualStep.from_json(request.dual) if request.dual else None
        if self.state is not None and self._dual is not None:
            self.state.dual = (self._dual, max(1, request.round_index))

        self._pairs = self._noise_of_pairs(examples, stored)

        # Its ledger, and what it has seen of its neighbours'; opened once the state is known.
        self._boot = boot_of(folder, is_introduced, cache)
        self._counts: WitnessFile = cache.get(file_in(folder, WITNESSED), self._read_counts)
        self._ledger: PeerLedger | None = None
        self._witness: LedgerWitness | None = None
        self._reporters: set[int] = set()
        self._spent: PeerSpent | None = None
        self._has_charged = False  # lines that the ledger lacked

        # The answer, as far as it is known, and the lines of metrics that stay with the peer.
        self.fields: dict[str, Any] = {}
        self.kept_metrics: list[str] = []
        self.records: dict[str, ArrayRecord] = {}
        self._refused: dict[str, str] = {}

    def _check_local(self, layout: Layout) -> None:
        """Refuse to go on with a run in which the peer shared what is local now, or the other way round."""
        if not self.local and not layout.local:
            return
        kept = layout.keeping(self.local).local
        if kept != layout.local:
            raise RunError(
                f"peer {self.node.peer} began run {self.request.run!r} with the local arrays {list(layout.local)}, and "
                f"PeerMod's local now makes them {list(kept)}: give the run another name",
                code="app.local-changed",
            )

    def _noise_of_pairs(self, examples: float, stored: RecordDict) -> NodePairs | None:
        """Return the message's work with noise of pairs; None if the peer's noise is independent.

        Raises:
            RunError: such noise cannot be added here.
        """
        privacy = self.privacy
        if privacy is None or privacy.noise is None:
            return None

        check_noise(privacy.noise, self.node)
        if self.request.kind == MESH:
            refuse_mesh()

        return NodePairs.of(
            privacy.noise,
            self.node,
            self.request.run,
            self.path,
            needed=noise_for(privacy, self.request.rounds) * privacy.clip_norm,
            examples=examples,
            round_size=self.request.round_size,
            disagreement=self.request.disagreement,
            identity=self.identity,
            known=self.known,
            stored=stored,
        )

    @property
    def _adversary(self) -> Adversary:
        """Return against whom the peer's ε is to hold."""
        if self._pairs is None:
            return EVERYBODY
        return Adversary(colluding=self._pairs.noise.colluding)

    def note_app_budgets(self, budgets: Iterable[tuple[Path, float, str, str]]) -> None:
        """Remember which ledgers of examples the app's training pays into, for `PeerReport.app_spent`."""
        if self.state is not None:
            noted = {str(path): (delta, caveat, assumption) for path, delta, caveat, assumption in budgets}
            self.state.app_ledgers = self.state.app_ledgers | noted

    def _app_spent(self) -> tuple[str, float]:
        """Return what the app's own ledgers hold, in words and as ε, when the run ends; nothing before."""
        if self.state is None or self.request.kind != DELIVER:
            return "", 0.0

        words = []
        largest = 0.0
        for name, (delta, caveat, assumption) in self.state.app_ledgers.items():
            path = Path(name)
            spent = epsilon_of_runs(costs_in(read_entries(path.parent, path.stem)), delta)
            largest = max(largest, math.inf if caveat else spent)
            assumed = f"{assumption}; " if assumption else ""
            words.append(
                f"epsilon = {spent:.4g} at delta = {delta:g} (unit: one example; adjacency: zero-out; "
                f"{assumed}by the app's own ledger {path.name}{caveat})"
            )
        return " and ".join(words), largest

    def close(self) -> None:
        """Release the ledger and the counts of others'."""
        cache = self.node.cache
        self._counts.close()
        cache.put(file_in(self.node.folder, WITNESSED), self._counts)
        if self._ledger is not None:
            self._ledger.close()
            cache.put(self._ledger.path, self._ledger)

    def _read_counts(self) -> WitnessFile:
        # If the one machine of a simulation stops, the counts may be too low, which only misses an old copy.
        node = self.node
        path = node.folder / WITNESSED
        counts = WitnessFile(path, durable=not node.simulated, in_memory=node.cache.is_temporary)
        counts.read()
        return counts

    def _opened_ledger(self, state: PeerState, privacy: AppPrivacySection) -> PeerLedger:
        """Return the peer's ledger, open; read again if it is not as this process left it."""
        node = self.node
        run = (self.request.run, state.shares.incarnation)
        budget = privacy.epsilon or math.inf
        ledger: PeerLedger | None = node.cache.get(ledger_path(node.folder, SOURCE), lambda: None)
        if ledger is None or not ledger.reopen():
            durable = not node.cache.is_temporary
            ledger = PeerLedger(node.folder, *run, state.peer, privacy.delta, budget, durable=durable)
        else:
            ledger.name_run(*run)
            ledger.delta = privacy.delta
            ledger.budget = budget

        ledger.adversary = self._adversary
        ledger.own = 1.0
        ledger.least_own = 1.0
        if self._pairs is not None:
            ledger.own = self._pairs.terms.own
            ledger.least_own = own_at_least(self._pairs.noise, node.n_peers)
        return ledger

    def join(self, content: RecordDict) -> None:
        """Begin a state from the initial arrays, unless there is one.

        Raises:
            RunError: the message has no arrays, or they are not model.
        """
        if self.state is None:
            if INITIAL not in content.array_records:
                raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
            arrays = sent_arrays(content.array_records[INITIAL])
            self.state = PeerState.begun(
                self.request.run, self.node.peer, arrays, self.request.founding, new_incarnation(), self.local
            )
            if self.request.local_record:
                self.state.local_arrays = arrays
            if self._dual is not None:
                self.state.x = np.zeros_like(self.state.x)
            self._save(self.state)

    def _save(self, state: PeerState) -> None:
        """Save a state: of a deployed peer also against a stop of its machine."""
        if self._saved is None:
            log = RecordLog(self.path, count=1)
        else:
            log = self._saved.log
        cache = self.node.cache
        self._saved = save_state(log, state, durable=not self.node.simulated, in_memory=cache.is_temporary)
        cache.put(self.path, self._saved)

    def absorb_inbox(self, content: RecordDict) -> PeerState:
        """Take in reports of ledgers, drop acknowledged shares, absorb those that arrived, and return the state.

        A state that is an old copy begins again without mass.

        Raises:
            RunError: there is no state of this run.
            BudgetError: the ledger lacks lines, and the node's owner does not charge them.
        """
        state = self.state
        request = self.request
        if state is None:
            raise RunError(f"peer {self.node.peer} has no state of run {request.run!r}: its folder is not what it was")

        introduced = dict(zip(request.neighbors, request.keys, strict=True))
        self.known.meet({peer: key for peer, key in introduced.items() if 0 <= peer < self.node.n_peers})
        self.node.cache.put(self._known_path, self.known)

        frames = run_frames(state.run, state.layout, self._seal)
        reports: dict[str, bytes] = {}
        shares: dict[str, bytes] = {}
        for name, frame in unpack_bytes(record_in(content, INBOX, ArrayRecord)):
            if name.startswith(LEDGER):
                reports[name] = frame
            else:
                shares[name] = frame

        # A ledger that lacks lines stops the peer before anything of the state moves.
        self._witness_ledger(state, frames, reports)
        self._introduce(state)
        try:
            for frame in request.acknowledgements:
                if frame not in state.acknowledged:
                    with self._refusing("acknowledgement"):
                        self._receive(state, frames.decode(frame))
                        state.acknowledged.add(frame)
            for name, frame in shares.items():
                with self._refusing(name):
                    self._receive(state, frames.decode(frame))
            state.acknowledged.intersection_update(request.acknowledgements)
        except StaleStateError as error:
            log.warning("peer %s begins again without a model: %s", state.peer, error)
            state.shares.reset()
            self._introduce(state)
        return state

    def _introduce(self, state: PeerState) -> None:
        shares = state.shares
        for neighbor, incarnation in zip(self.request.neighbors, self.request.incarnations, strict=True):
            if neighbor != state.peer and not shares.has_introduced(neighbor, incarnation):
                with self._refusing(f"peer {neighbor}"):
                    shares.introduce(neighbor, incarnation)

    def _witness_ledger(self, state: PeerState, frames: FrameCodec, reports: Mapping[str, bytes]) -> None:
        """Take in what neighbours report, and check or charge what they and the state have seen of the ledger."""
        node = self.node
        request = self.request
        if not reports and (self.privacy is None or request.kind == EVALUATE):
            return  # an evaluation pays for nothing: the next message that may is the one that has to know
        if self.privacy is not None:
            self._ledger = self._opened_ledger(state, self.privacy)
            self._ledger.name_lines(self._boot)
            self._spent = self._ledger.spent
        ledger = self._ledger

        # One challenge for all processes of a start: the directory keeps a peer from running twice.
        witness = LedgerWitness(
            node.peer,
            witnesses_of(node.peer, node.n_peers),
            self._boot,
            ledger,
            self._counts.seen,
            self._counts.write,
            draw=lambda: self._boot,
        )
        self._witness = witness
        for name, frame in reports.items():
            try:
                report = frames.decode(frame)
                if not isinstance(report, LedgerReport) or report.receiver != node.peer:
                    raise RefusedError("it is not a report for this peer")
                witness.receive(report)
                self._reporters.add(report.sender)
            except RefusedError as error:
                self._note_refused(name, error)
        if ledger is None or self.privacy is None:
            return

        if not node.charge_witnessed:
            ledger.check_witnessed(state.paid)
            if witness.problem is not None:
                raise witness.problem
            return

        seen = witness.reported
        counted = {boot: max(lines, seen.get(boot, 0)) for boot, lines in (seen | state.paid).items()}
        charged = ledger.charge_witnessed(counted, self.privacy, request.rounds)
        if charged:
            self._has_charged = True
            log.warning("peer %s charged %s lines that its ledger lacked", node.peer, charged)
            self._spent = ledger.spent
            witness.problem = None

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Note what the protocol refuses, for the answer and the log."""
        try:
            yield
        except RefusedError as error:
            self._note_refused(name, error)

    def _note_refused(self, name: str, error: RefusedError) -> None:
        self._refused[name] = str(error)
        log.warning("peer %s refused %s: %s", self.node.peer, name, error)

    def _receive(self, state: PeerState, message: object) -> None:
        if isinstance(message, Acknowledgement):
            state.shares.acknowledge(message)
        elif not isinstance(message, FrozenShare):
            raise RefusedError("it is not a share")
        elif state.shares.receive(message) and not state.shares.absorb(first_weight=state.first_weight):
            raise RefusedError("it would make the model infinite")

    @property
    def is_due(self) -> bool:
        """Return whether the round that is requested is one in which the peer did not take part yet."""
        return self.state is not None and self.request.round_index > self.state.round_index

    def take_part(self, content: RecordDict, train: Train) -> None:
        """Train, and freeze a share for each receiver; a round in which the peer took part already is not repeated."""
        state = self.state
        request = self.request
        if state is None or not self.is_due:
            return

        model = record_in(content, MODEL, ArrayRecord)
        if model is not None:
            if self.seals and request.wants_mass:  # the round is only for its mean, which is refused before it is paid
                check_set(request.mean_of, state.peer, self.node.mean_peers, state.handed.served)
            state.adopt(sent_arrays(model))

        weights = self._receivers()
        if state.w > 0:
            state.count_in_average()
        has_trained = self._train(state, train)
        self.fields["trained"] = has_trained

        state.idle = model is not None and not has_trained
        state.round_index = request.round_index
        self._hand_in(state)
        if state.w > 0:
            state.shares.split(request.round_index, weights)

    def deliver(self) -> None:
        """Hand in the mass, when it is requested, and the model that a server sent last."""
        if self.state is not None:
            self._hand_in(self.state)
            if self.state.adopted:
                self.records[MODEL] = record_of(self.state.adopted)

    def _receivers(self) -> dict[int, float]:
        """Return who gets which part of the mass: of those that are to have one, all whose key can be trusted.

        Weights by which no peer can send are refused before anything is trained or paid for.
        """
        weights = dict(zip(self.request.receivers, self.request.weights, strict=True))
        check_shares(weights, set(self.request.neighbors) - {self.node.peer})
        if not self.seals:
            return weights

        for receiver in list(weights):
            try:
                self.known.key(receiver)
            except RefusedError as error:
                self._refused[f"to {receiver}"] = str(error)
                log.warning("peer %s sends nothing to peer %s: %s", self.node.peer, receiver, error)
                del weights[receiver]
        return weights

    def _train(self, state: PeerState, train: Train) -> bool:
        """Let the app train from z, and add what it moved by, w · (clipped and noised), to x."""
        request = self.request
        privacy = self.privacy
        ledger = self._ledger
        noise = 0.0
        clip_norm = None
        pairs = None
        if privacy is not None:
            assert ledger is not None
            assert self._witness is not None
            if not self._witness.is_witnessed:
                self.fields["stopped"] = UNWITNESSED
                return False
            noise = noise_for(privacy, request.rounds)
            clip_norm = privacy.clip_norm
        if self._pairs is not None:
            announced = dict(zip(request.announcers, request.announced, strict=True))
            pairs = self._pairs.step(request.round_index, announced)

        hindrance = take_step(state, train, request.round_index, ledger, clip_norm, noise, pairs)
        if ledger is not None:
            self._spent = ledger.spent
            state.paid = dict(ledger.lines)
        if hindrance is not None:
            self.fields |= {"stopped": hindrance.why, "exhausted": hindrance.for_good}
        return hindrance is None

    def _hand_in(self, state: PeerState) -> None:
        """Put (x, w) into the answer: open, or masked so that only the sum over all says something."""
        if not self.request.wants_mass:
            return

        x = state.x.astype(np.float64)
        if state.dual is not None and state.w > 0:
            x = state.w * state.result()
        mass = np.append(x, state.w)  # [d + 1]
        if state.idle:
            mass[:] = 0.0  # a server's mean is over the peers that took a step
        if not self.seals:
            self.records[MASS] = record_of({"mass": mass})
            return

        request = self.request
        try:
            check_set(request.mean_of, state.peer, self.node.mean_peers, state.handed.served)
            handed = state.handed.after(request.round_index, state.round_index, mass, request.mean_of)
            others = set(request.mean_of) - {state.peer}
            self.records[MASS] = record_of({"mass": masked(mass, state.peer, others, self._mask_key)})
            state.handed = handed
        except RunError as error:
            self._refused["the mean"] = str(error)
            log.warning("peer %s has no part in the mean: %s", state.peer, error)

    def _mask_key(self, other: int) -> bytes:
        """Return a key for one mask: of this sum's label and set, and of the two peers' states."""
        request = self.request
        state = self.state
        assert state is not None
        states = dict(zip(request.neighbors, request.incarnations, strict=True))
        states[state.peer] = state.shares.incarnation
        pair = [[peer, states.get(peer)] for peer in sorted((state.peer, other))]
        purpose = json.dumps(["mask", request.run, request.round_index, sorted(set(request.mean_of)), pair]).encode()
        return self.identity.key_for(self.known.key(other), b"", purpose)

    def cache_state(self) -> None:
        """Let the process's next message go on with the state where it lies."""
        if self._saved is not None:
            self._saved.live = self.state

    def answer(self) -> dict[str, Any]:
        """Save the state and return what to answer, once it is on disk."""
        state = self.state
        if state is None:
            return {SAYS: self._report(None, []).record()}

        frames = run_frames(state.run, state.layout, self._seal)
        shares = state.shares
        if self.request.kind == INTRODUCE:
            for neighbor, edge in shares.edges.items():
                shares.introduce(neighbor, edge.incarnation)
        elif self.request.kind != JOIN:
            self._save(state)
            held = set(zip(self.request.held_by, self.request.held, strict=True))
            due = [share for share in shares.shares_to_send() if (share.receiver, share.number) not in held]
            outbox = self._packed(frames, due)
            if outbox:
                self.records[OUTBOX] = outbox
            self._counts.sync()

        self._announce()
        acknowledgements = [b"".join(frames.encode(ack)) for ack in shares.acknowledgements()]
        return {SAYS: self._report(state, acknowledgements).record(), **self.records}

    def _announce(self) -> None:
        """Announce the session of the peer's noise to all that are known: in a greeting, and if it is new."""
        pairs = self._pairs
        if pairs is None:
            return
        if self.request.kind == GREET or pairs.is_new:
            others = [peer for peer in self.request.neighbors if peer != self.node.peer]
            announced = pairs.announced_to(others)
            self.fields |= {"announced_to": list(announced), "announced": list(announced.values())}
        pairs.keep()
        self._refused |= {f"noise with {other}": why for other, why in pairs.refused.items()}

    def _packed(self, frames: FrameCodec, shares: Iterable[FrozenShare[np.ndarray]]) -> ArrayRecord:
        """Return the frames of shares and ledger reports, but of those whose receiver's key cannot be trusted."""
        packed = {}
        for share in shares:
            with self._refusing(f"to {share.receiver}"):
                packed[f"{share.receiver}.{share.number}"] = b"".join(frames.encode(share))

        witness = self._witness
        if witness is None or self.request.kind not in WITNESSED_KINDS:
            return pack_bytes(packed)
        for neighbor in sorted(witness.neighbors & set(self.request.neighbors)):
            if self.privacy is None and neighbor not in self._reporters:
                continue
            try:
                packed[f"{LEDGER}{neighbor}"] = b"".join(frames.encode(witness.report(neighbor)))
            except RefusedError as error:
                self._note_refused(f"to {neighbor}", error)
        return pack_bytes(packed)

    def _report(self, state: PeerState | None, acknowledgements: list[bytes]) -> PeerReport:
        words, epsilon = self._protection(0 if state is None else state.unprotected)
        app_spent, app_epsilon = self._app_spent()
        report: dict[str, Any] = {
            "key": self.identity.public,
            "sealed": self.seals,
            "spent": words,
            "epsilon": epsilon if words else app_epsilon or math.inf,
            "app_spent": app_spent,
            "acknowledgements": acknowledgements,
            "refused_keys": list(self._refused),
            "refused": list(self._refused.values()),
            "address": self.node.address,
            "cancels": self._pairs is not None,
        }
        if self.request.kind == INTRODUCE:
            report["local"] = list(self.local)
        if state is not None:
            report |= {
                "incarnation": state.shares.incarnation,
                "round_index": state.round_index,
                "idle": state.idle,
                "orphaned": state.orphaned + state.shares.orphaned.total(),
                "examples": state.examples,
            }
            if state.handed.served:
                report["mean_of"] = state.handed.served[-1]

        return PeerReport(self.node.peer, self.node.n_peers, **report, **self.fields)

    def _protection(self, unprotected: int) -> tuple[str, float]:
        """Return what the peer has spent, in words and as ε; empty if it has no protection.

        Args:
            unprotected: how many of its updates in this run had none.
        """
        # An evaluation pays for nothing, and the strategy knows what was spent before. Its words need ε, and so SciPy,
        # which each process of a deployed peer imports anew.
        if self.request.kind == EVALUATE and not self._has_charged:
            return "", math.inf

        spent = self._spent
        if spent is None and self.privacy is not None:
            spent = spent_so_far(self.node.folder, self.privacy.delta, self._adversary)
        if spent is None:
            return "", math.inf
        if unprotected:
            return unprotected_words(unprotected), math.inf
        local: tuple[str, ...] = ()
        if self.state is not None:
            local = self.state.layout.local
        return f"{spent}{local_words(local)}", spent.epsilon
