"""The mod that makes a Flower ClientApp a peer, and the messages between it and a strategy."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from flower_privdec.common.arguments import check_kinds, check_numbers, check_paths
from flower_privdec.common.errors import RAISED_BY_USERS, BudgetError, RunError
from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.common.user_code import last_line_of_users
from flower_privdec.flower.error_formatting import USER_ERRORS, line_for_server
from flower_privdec.flower.mods.app_call import (
    App,
    AppFailedError,
    answer_of,
    binding_privacy,
    keep_metrics,
    numpy_arrays,
    record_in,
    record_of,
    returned_arrays,
)
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_state import (
    WITNESSED,
    Arrays,
    Layout,
    PeerState,
    SavedState,
    alone_in,
    boot_of,
    check_shares,
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
    app_privacy,
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
from flower_privdec.privacy.ledger.spending import costs_in, noting_budgets
from flower_privdec.pushsum.exactly_once import Acknowledgement, FrozenShare, RefusedError, StaleStateError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.witness import LedgerReport, LedgerWitness, WitnessFile
from flower_privdec.scenario.sections import AppPrivacySection

log = logging.getLogger("flwr.privdec")

SAYS, INITIAL, MODEL, INBOX, OUTBOX, MASS = (
    f"privdec.{name}" for name in ("says", "initial", "model", "inbox", "outbox", "mass")
)
INTRODUCE = "introduce"
JOIN = "join"
GREET = "greet"
ROUND = "round"
DELIVER = "deliver"
EVALUATE = "evaluate"
MESH = "mesh"
LEDGER = "ledger of "  # before the name of a sender or receiver: a report, among the shares
UNWITNESSED = "no neighbour answered its report of its ledger, before which it takes no private step"


class _Record:
    """A record of plain fields.

    Attributes:
        together: fields that are lists of one length.
    """

    together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def record(self) -> ConfigRecord:
        """Return the fields as a record, without those that are as by default."""
        given = self.__dict__
        defaults = _DEFAULTS[type(self)]
        return ConfigRecord({name: value for name, value in given.items() if value != defaults.get(name)})

    @classmethod
    def of(cls, content: RecordDict, remedy: str, code: str) -> Self:
        """Read the record of a message.

        Raises:
            RunError: it has none of the kind; the remedy says what to do, and the code is the error's.
        """
        given: dict[str, Any] = dict(record_in(content, SAYS, ConfigRecord) or {})
        kinds = _KINDS[cls]
        needed = _KINDS[cls].keys() - _DEFAULTS[cls].keys()
        if not needed <= given.keys() <= kinds.keys() or not all(_is(given[name], kinds[name]) for name in given):
            raise RunError(remedy, code=code)
        for together in cls.together:
            if len({len(given.get(name, ())) for name in together}) > 1:
                raise RunError(
                    f"a message whose {', '.join(together)} are not of one length is none of ours: {remedy}", code=code
                )
        return cls(**given)


def _is(value: object, kind: str) -> bool:
    """Return whether a value is of a field's type, as the type is written here."""
    if kind.startswith("list["):
        return isinstance(value, list) and {*map(type, value)} <= {_TYPES[kind[5:-1]]}
    return type(value) is _TYPES[kind]


_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "bytes": bytes}


@dataclass(frozen=True)
class PeerRequest(_Record):
    """What the strategy asks of a peer. It names no key, no ledger and, outside a simulation, no path.

    Attributes:
        kind: introduce, join, greet (only reports of ledgers), round, deliver, evaluate or mesh.
        run: the run's name.
        peer: the receiver.
        folder: where a simulation's peers keep their files.
        arrays: the key of the ArrayRecord that the app's functions look for.
        local_record: the name of an ArrayRecord that never leaves the peer: the initial arrays at first, then what the
            app's train function last answered under that name; it is given to both of the app's functions. Empty: none.
        dual: the step of dual averaging (`DualStep`) that gives the peer's model; empty if x / w is it.
        weighted_by: the metric of the app by whose value the peer counts, if its metrics leave; empty: by 1.
        round_index, rounds: the round, from 1, and how many there will be; deliver: the round whose mean it is.
        founding: join: whether the initial arrays are this peer's mass, or only say what a model looks like.
        receivers, weights: round: the peers j that W[j, peer] of the mass goes to.
        wants_mass: whether to hand in (x, w), for the mean of the network.
        mean_of: the peers whose mean it is, if their masses are masked.
        neighbors, incarnations, keys: all peers that are known: the incarnation of each one's state and its public key.
        held_by, held: which shares need not be handed in again: receivers and numbers.
        acknowledgements: frames: which shares of this peer's are in others' mass.
        scenario: mesh: what the peers agree on, and where they are, as YAML.
    """

    together = (("receivers", "weights"), ("neighbors", "incarnations", "keys"), ("held_by", "held"))

    kind: str
    run: str = ""
    peer: int = -1
    folder: str = ""
    arrays: str = "arrays"
    local_record: str = ""
    dual: str = ""
    weighted_by: str = ""
    round_index: int = 0
    rounds: int = 0
    founding: bool = False
    receivers: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    wants_mass: bool = False
    mean_of: list[int] = field(default_factory=list)
    neighbors: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    held_by: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    acknowledgements: list[bytes] = field(default_factory=list)
    scenario: str = ""


@dataclass(frozen=True)
class PeerReport(_Record):
    """A peer's report to the strategy.

    Attributes:
        peer, n_peers: which it is, of how many.
        incarnation: the incarnation of its state in this run; 0 if it has no state.
        round_index: the last round in which it took part.
        key: its public key.
        sealed: whether it seals what it sends.
        trained: whether it trained now.
        idle: over a server, whether it took no step in the last round that it took part in.
        stopped: why it did not train; empty if it did.
        exhausted: whether that is for good, its budget being spent.
        spent: its ε in words, with unit, adjacency and what was charged; empty if nothing is protected.
        epsilon: its ε; ∞ if nothing is protected. If the app protects its examples, at the end theirs.
        app_spent: that of the app's examples in words, at the end.
        acknowledgements: frames: which shares are in its mass on disk.
        refused_keys, refused: the shares that it refused, and why.
        orphaned: how many of its shares went to states that were lost.
        address: HOST:PORT at which other peers can reach it; empty if they cannot.
        mean_of: the peers of the last masked sum that it entered.
        examples: the public number by which it counts.
        keeps_metrics: whether the app's metrics stay in its folder.
    """

    together = (("refused_keys", "refused"),)

    peer: int
    n_peers: int
    incarnation: int = 0
    round_index: int = 0
    key: bytes = b""
    sealed: bool = False
    trained: bool = False
    idle: bool = False
    stopped: str = ""
    exhausted: bool = False
    spent: str = ""
    epsilon: float = 0.0
    app_spent: str = ""
    acknowledgements: list[bytes] = field(default_factory=list)
    refused_keys: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    orphaned: int = 0
    address: str = ""
    mean_of: list[int] = field(default_factory=list)
    examples: float = 1.0
    keeps_metrics: bool = False


_KINDS: dict[type, dict[str, str]] = {  # of each record: its fields' types, as they are written here
    record: {part.name: str(part.type) for part in fields(record)} for record in (PeerRequest, PeerReport)
}
_DEFAULTS: dict[type, dict[str, Any]] = {
    record: {
        part.name: [] if part.default is MISSING else part.default
        for part in fields(record)
        if part.default is not MISSING or part.default_factory is not MISSING
    }
    for record in (PeerRequest, PeerReport)
}


def pack_bytes(shares: Mapping[str, bytes]) -> ArrayRecord:
    """Return shares as a record that Flower carries in pieces, whatever they hold."""
    return ArrayRecord(
        {name: Array("uint8", (len(content),), "privdec.share", content) for name, content in shares.items()}
    )


def unpack_bytes(record: ArrayRecord | None) -> Iterable[tuple[str, bytes]]:
    """Return the shares of a record, in their order."""
    return [(name, array.data) for name, array in (record or {}).items()]


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
    """

    def __init__(self, request: PeerRequest, node: PeerSettings, privacy: AppPrivacySection | None, seal: bool) -> None:
        self.request = request
        self.node = node
        self.seals = seal
        self.privacy = binding_privacy(privacy, node)
        folder = node.folder
        cache = node.cache

        # Who it is, and whom it knows.
        self.identity: Identity = cache.get(folder / IDENTITY, lambda: Identity(folder))
        self._known_path = node.known_peers or folder / KNOWN
        self.known: KnownPeers = cache.get(self._known_path, lambda: KnownPeers(folder, node.known_peers))
        self._seal = PeerSeal(self.identity, self.known) if seal else None

        # Its state. An introduction begins as a new process does: what it answers follows only from what is saved.
        is_introduced = request.kind == INTRODUCE
        self.path = state_path(folder, request.run)
        self._saved: SavedState | None = cache.get(self.path, lambda: load_state(self.path))
        self.state: PeerState | None = None
        if self._saved is not None:
            self.state = self._saved.taken(is_introduced)
        self._dual = DualStep.from_json(request.dual) if request.dual else None
        if self.state is not None and self._dual is not None:
            self.state.dual = (self._dual, max(1, request.round_index))

        # Its ledger, and what it has seen of its neighbours'; opened once the state is known.
        self._boot = boot_of(folder, is_introduced, cache)
        self._counts: WitnessFile = cache.get(folder / WITNESSED, self._read_counts)
        self._ledger: PeerLedger | None = None
        self._witness: LedgerWitness | None = None
        self._reporters: set[int] = set()
        self._spent: PeerSpent | None = None

        # The answer, as far as it is known.
        self.fields: dict[str, Any] = {}
        self.records: dict[str, ArrayRecord] = {}
        self._refused: dict[str, str] = {}

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
        cache.put(self.node.folder / WITNESSED, self._counts)
        if self._ledger is not None:
            self._ledger.close()
            cache.put(self._ledger.path, self._ledger)

    def _read_counts(self) -> WitnessFile:
        counts = WitnessFile(self.node.folder / WITNESSED, durable=not self.node.cache.is_temporary)
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
            return PeerLedger(node.folder, *run, state.peer, privacy.delta, budget, durable=durable)

        ledger.name_run(*run)
        ledger.delta = privacy.delta
        ledger.budget = budget
        return ledger

    def join(self, content: RecordDict) -> None:
        """Begin a state from the initial arrays, unless there is one.

        Raises:
            RunError: the message has no arrays, or they are no model.
        """
        if self.state is None:
            if INITIAL not in content.array_records:
                raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
            arrays = numpy_arrays(content.array_records[INITIAL])
            self.state = PeerState.begun(
                self.request.run, self.node.peer, arrays, self.request.founding, new_incarnation()
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
        for neighbor, incarnation in zip(self.request.neighbors, self.request.incarnations, strict=True):
            if neighbor != state.peer:
                with self._refusing(f"peer {neighbor}"):
                    state.shares.introduce(neighbor, incarnation)

    def _witness_ledger(self, state: PeerState, frames: FrameCodec, reports: Mapping[str, bytes]) -> None:
        """Take in what neighbours report, and check or charge what they and the state have seen of the ledger."""
        node = self.node
        request = self.request
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
            with self._refusing(name):
                report = frames.decode(frame)
                if not isinstance(report, LedgerReport) or report.receiver != node.peer:
                    raise RefusedError("it is no report for this peer")
                witness.receive(report)
                self._reporters.add(report.sender)
        if ledger is None or self.privacy is None:
            return

        if not node.charge_witnessed:
            ledger.check_witnessed(state.paid)
            if witness.problem is not None:
                raise witness.problem
            return

        seen = witness.reported
        counted = {boot: max(lines, seen.get(boot, 0)) for boot, lines in (seen | state.paid).items()}
        charged = ledger.charge_witnessed(counted, noise_for(self.privacy, request.rounds))
        if charged:
            log.warning("peer %s charged %s lines that its ledger lacked", node.peer, charged)
            self._spent = ledger.spent
            witness.problem = None

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Note what the protocol refuses, for the answer and the log."""
        try:
            yield
        except RefusedError as error:
            self._refused[name] = str(error)
            log.warning("peer %s refused %s: %s", self.node.peer, name, error)

    def _receive(self, state: PeerState, message: object) -> None:
        if isinstance(message, Acknowledgement):
            state.shares.acknowledge(message)
        elif not isinstance(message, FrozenShare):
            raise RefusedError("it is no share")
        elif state.shares.receive(message) and not state.shares.absorb(first_weight=state.first_weight):
            raise RefusedError("it would make the model infinite")

    def take_part(self, content: RecordDict, train: Train) -> None:
        """Train, and freeze a share for each receiver; a round in which the peer took part already is not repeated."""
        state = self.state
        request = self.request
        if state is None or request.round_index <= state.round_index:
            return

        model = record_in(content, MODEL, ArrayRecord)
        if model is not None:
            if self.seals and request.wants_mass:  # the round is only for its mean, which is refused before it is paid
                check_set(request.mean_of, state.peer, self.node.mean_peers, state.handed.served)
            state.adopt(numpy_arrays(model))

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
                adopted = {name: Array(value) for name, value in self.state.adopted.items()}
                self.records[MODEL] = ArrayRecord(adopted)

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
        if privacy is not None:
            assert ledger is not None
            assert self._witness is not None
            if not self._witness.is_witnessed:
                self.fields["stopped"] = UNWITNESSED
                return False
            noise = noise_for(privacy, request.rounds)
            clip_norm = privacy.clip_norm

        hindrance = take_step(state, train, request.round_index, ledger, clip_norm, noise)
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
            self.records[MASS] = ArrayRecord({"mass": Array(mass)})
            return

        request = self.request
        try:
            check_set(request.mean_of, state.peer, self.node.mean_peers, state.handed.served)
            handed = state.handed.after(request.round_index, state.round_index, mass, request.mean_of)
            others = set(request.mean_of) - {state.peer}
            self.records[MASS] = ArrayRecord({"mass": Array(masked(mass, state.peer, others, self._mask_key))})
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
            self.records[OUTBOX] = self._packed(frames, due)
            self._counts.sync()

        acknowledgements = [b"".join(frames.encode(ack)) for ack in shares.acknowledgements()]
        return {SAYS: self._report(state, acknowledgements).record(), **self.records}

    def _packed(self, frames: FrameCodec, shares: Iterable[FrozenShare[np.ndarray]]) -> ArrayRecord:
        """Return the frames of shares and ledger reports, but of those whose receiver's key cannot be trusted."""
        packed = {}
        for share in shares:
            with self._refusing(f"to {share.receiver}"):
                packed[f"{share.receiver}.{share.number}"] = b"".join(frames.encode(share))

        witness = self._witness
        if witness is None:
            return pack_bytes(packed)
        for neighbor in sorted(witness.neighbors & set(self.request.neighbors)):
            if self.privacy is not None or neighbor in self._reporters:
                with self._refusing(f"to {neighbor}"):
                    packed[f"{LEDGER}{neighbor}"] = b"".join(frames.encode(witness.report(neighbor)))
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
        }
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
        spent = self._spent
        if spent is None and self.privacy is not None:
            spent = spent_so_far(self.node.folder, self.privacy.delta)
        if spent is None:
            return "", math.inf
        if unprotected:
            return unprotected_words(unprotected), math.inf
        return str(spent), spent.epsilon


Setting = float | str | Callable[[Context], float | None] | None
PEER_MOD_FAILED = 1002  # the code of an error that the mod itself answers with; Flower's own are small
RUN_CONFIG = "run-config:"
MOST_EXAMPLES = 2.0**40


def is_key(value: object) -> bool:
    """Return whether a setting names a key of the run-config."""
    return isinstance(value, str) and value.startswith(RUN_CONFIG) and value != RUN_CONFIG


def setting_of(name: str, given: Setting, context: Context) -> float | None:
    """Return a setting's number: as given, or what a function of the context or a key of the run-config has.

    Raises:
        RunError: the run-config has no such key, or the value is no number.
    """
    value: Any = given
    if callable(given):
        try:
            value = given(context)
        except RAISED_BY_USERS as error:
            log.exception("%s: the function that gives it failed", name)
            what = f"{type(error).__name__}{last_line_of_users(error)}; see the node's own log"
            raise RunError(f"{name}: the function that gives it raised {what}", code="flower.setting") from None

    if isinstance(value, str):
        key = value.removeprefix(RUN_CONFIG)
        if not is_key(value) or key not in context.run_config:
            raise RunError(
                f"{name}={value!r} must be a number, a function of the context, or 'run-config:KEY' with one of the "
                f"app's keys, {sorted(context.run_config)}",
                code="flower.setting",
            )
        value = context.run_config[key]

    number: Any = value.item() if isinstance(value, np.generic) else value
    if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
        raise RunError(f"{name}={value!r} of this run must be a number, without quotes", code="flower.setting")

    return number


_privacy_of = lru_cache(maxsize=64, typed=True)(app_privacy)  # of a message's numbers, which are most often the same


LEGACY_RECORDS = ("('fitins.", "('evaluateins.")
LEGACY_CLIENT = (
    "the ClientApp has a client_fn, Flower's legacy interface: register its functions instead, `@app.train()` with "
    "def train(message, context), which reads message.content['arrays'].to_numpy_ndarrays() and returns "
    "Message(RecordDict({'arrays': ArrayRecord(ndarrays), 'metrics': MetricRecord({'num-examples': n})}), "
    "reply_to=message), and `@app.evaluate()` likewise"
)
TWICE = (
    "PeerMod stands twice before the app's function: keep one, in ClientApp(mods=[...]), or in @app.train(mods=[...]) "
    "and @app.evaluate(mods=[...])"
)
NO_STRATEGY = (
    "the message comes from no strategy of flower_privdec (or from another version): start PushSum or Gossip in the "
    "ServerApp, and keep PeerMod to what they call, @app.train(mods=[peer]) and @app.evaluate(mods=[peer])"
)


class PeerMod:
    """Keep a peer's model between rounds, mix it with its neighbours', and protect what leaves.

    In every round the mod adds the neighbours' shares to (x, w), lets the app's own train function start from
    z = x / w in place of a global model, and takes what it returns as the peer's update u = z' - z:

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),    then  (x, w) W[j, i]  to each out-neighbour j

    The app's evaluate function is given z. One mod object serves both: `ClientApp(mods=[PeerMod(...)])`, or
    `@app.train(mods=[peer])` and `@app.evaluate(mods=[peer])`. Arrays of any framework do; those of whole numbers stay
    with the peer. State, ledger and identity are files in the peer's folder: the node-config's `folder`, or `folder`
    here; in a simulation by default the one that the strategy names.

    Args:
        clip_norm: C, the most by which one round's update moves the model; None for no protection. It and the four
            numbers below may also be "run-config:KEY", or a function of the context.
        noise_multiplier: σ, noise std over C; None to solve it from epsilon for the rounds that the strategy plans.
        epsilon: budget of the peer over all rounds and runs; a round that would exceed it is not trained. A SuperNode's
            own `epsilon` and `delta` in its node-config hold whatever the app says.
        delta: δ.
        folder: where the peer's folder is, unless its node-config has one.
        seal: whether shares are sealed end to end (`PeerSeal`), and open ones refused; by default wherever the peer is
            not one of a simulation.
        examples: the number of examples by which the peer counts, and which every receiver of a share learns. By
            default it is what the app reports if its metrics leave, and 1 if they do not. ε does not cover it.
        share_metrics: whether the app's metrics (losses, accuracies, numbers of examples) of private data leave, which
            no ε covers. By default a protected peer keeps them in metrics.jsonl in its folder, and another sends them:
            say False if the app's own training protects its examples. If they stay, so does what the app says
            when it fails. Of what it answers beside metrics and the model's arrays nothing leaves.

    Raises:
        ScenarioError: a value of the wrong type or out of range, or a clip norm without noise, or noise without a
            clip norm.

    Privacy: unit one peer with all its data; adjacency: its update of every round replaced by zero; one Gaussian
    release a round, charged on disk before the update is made, in a round that fails or is repeated too. It holds
    against any reader of all that the peer sends: relay, neighbours, strangers. Whether a peer takes part, when, how
    long that takes and whether its app fails is open. Noise is the operating system's.

    Deviations from the paper: the update is weighed by w, where Stochastic Gradient Push adds a gradient as it is:
    several local steps over a small w would overshoot. If w = 1, as on the directed exponential graph with everybody
    active, it is the same.

    Source: Assran et al. 2019, Stochastic Gradient Push, Algorithm 1; Gossip: the same with doubly stochastic weights.
    """

    def __init__(
        self,
        *,
        clip_norm: Setting = None,
        noise_multiplier: Setting = None,
        epsilon: Setting = None,
        delta: Setting = 1e-5,
        examples: Setting = None,
        folder: Path | str | None = None,
        seal: bool | None = None,
        share_metrics: bool | None = None,
    ) -> None:
        check_paths({"folder": folder})
        check_kinds({"seal": seal, "share_metrics": share_metrics}, (bool,), "True, False or None")
        self._settings = {
            "clip_norm": clip_norm,
            "noise_multiplier": noise_multiplier,
            "epsilon": epsilon,
            "delta": delta,
        }
        self._examples = examples

        # What is a function or a key of the run-config is checked when a message comes.
        given = {**self._settings, "examples": examples}
        later = {name for name, value in given.items() if callable(value) or is_key(value)}
        check_numbers({name: value for name, value in given.items() if name not in later})
        if not later & self._settings.keys():
            app_privacy(**self._settings)  # type: ignore[arg-type]

        is_protected = any(value is not None for name, value in self._settings.items() if name != "delta")
        self.folder = None if folder is None else Path(folder)
        self.seal = seal
        self.keeps_metrics = is_protected if share_metrics is None else not share_metrics
        self.withholds = is_protected or self.keeps_metrics

    def privacy_of(self, context: Context) -> AppPrivacySection | None:
        """Return what the app asks for in a run; None for no protection.

        Raises:
            RunError, ScenarioError: a setting is missing or wrong.
        """
        numbers = {name: setting_of(name, value, context) for name, value in self._settings.items()}
        return _privacy_of(**numbers)

    def __call__(self, message: Message, context: Context, app: App) -> Message:
        """Answer a message in the app's place, and let it answer what is its own."""
        try:
            return self._answer(message, context, app)
        except USER_ERRORS as error:
            return Message(Error(PEER_MOD_FAILED, line_for_server(error, context)), reply_to=message)

    def _answer(self, message: Message, context: Context, app: App) -> Message:
        request = PeerRequest.of(message.content, NO_STRATEGY, "flower.no-strategy")
        node = PeerSettings.of(context, request.peer, request.folder, self.folder)
        with alone_in(node.folder):
            seals = not node.simulated if self.seal is None else self.seal
            with closing(RequestHandler(request, node, self.privacy_of(context), seals)) as peer:
                peer.fields["keeps_metrics"] = self.keeps_metrics
                from_app = self._work(peer, message, context, app)
                answer = Message(RecordDict({**from_app, **peer.answer()}), reply_to=message)
                peer.cache_state()
                return answer

    def _work(self, peer: RequestHandler, message: Message, context: Context, app: App) -> dict[str, MetricRecord]:
        """Handle a request, and return what of the app's own answer is sent along."""
        kind = peer.request.kind
        content = message.content
        from_app = RecordDict()
        if kind == INTRODUCE:
            return {}
        if kind == JOIN:
            peer.join(content)
            return {}
        if kind == MESH:
            self._mesh(peer, message, context, app)
            return {}
        state = peer.absorb_inbox(content)

        def call(model: ArrayRecord) -> RecordDict:
            from_app.update(self._call(peer, model, message, context, app))
            return from_app

        def train(arrays: Arrays) -> Arrays:
            trained = self._trained(peer, call(record_of(arrays)), state.layout)
            if peer.request.weighted_by:
                state.recount(self._count(peer, from_app, context))
            return trained

        if kind == ROUND:
            peer.take_part(content, train)
            self._renew_local_arrays(peer, state, from_app)
        elif kind == EVALUATE:
            model = self._evaluated(state, content)
            if model is not None:
                call(model)
        elif kind == DELIVER:
            peer.deliver()
        return self._leaving(peer, from_app)

    @staticmethod
    def _evaluated(state: PeerState, content: RecordDict) -> ArrayRecord | None:
        """Return the model to evaluate: the one that the message has, or the peer's; None if it has none yet."""
        sent = record_in(content, MODEL, ArrayRecord)
        if sent is not None:
            return sent
        if not state.w > 0:
            return None
        own = state.average if state.average_weight else state.given_model()
        return record_of(state.layout.arrays(own, state.unmixed))

    def _mesh(self, peer: RequestHandler, message: Message, context: Context, app: App) -> None:
        """Run all rounds with the other peers directly, and keep the resulting state.

        A peer that is done runs on from its last checkpoint while others are not, so that they reach it, or not at all.
        """
        from flower_privdec.flower.serverless import InitialArrays, mesh_folder, run_mesh  # over torch

        content = message.content
        request = peer.request
        done = peer.state
        if done is not None:
            if done.round_index != request.rounds:
                raise RunError(
                    f"peer {peer.node.peer} has a state of run {request.run!r} after round {done.round_index} "
                    f"of {request.rounds}, which a mesh cannot continue from: give the run another name"
                )
            is_whole = len(request.neighbors) == peer.node.n_peers  # which all have a state
            if is_whole or not (mesh_folder(peer.node, request.run) / CHECKPOINTS).exists():
                return
        if INITIAL not in content.array_records:
            raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
        layout = Layout.of(numpy_arrays(content.array_records[INITIAL]))
        sent_configs = {name: dict(config) for name, config in content.config_records.items() if name != SAYS}

        def train(arrays: Arrays, server_round: int) -> Arrays:
            configs = {
                name: ConfigRecord({**config, "server-round": server_round}) for name, config in sent_configs.items()
            }
            message.content = RecordDict({**configs})
            answer = self._call(peer, record_of(arrays), message, context, app)
            keep_metrics(peer.node.folder, server_round, "train", answer.metric_records)
            return self._trained(peer, answer, layout)

        initial = InitialArrays(numpy_arrays(content.array_records[INITIAL]), request.arrays)
        mixed = run_mesh(request.run, request.scenario, initial, peer.node, peer.privacy, train)
        peer.state = PeerState.after_rounds(mixed, request.run, request.rounds, new_incarnation())
        if done is not None:
            peer.state.handed = done.handed

    def _count(self, peer: RequestHandler, answer: RecordDict, context: Context) -> float:
        """Return the public number of examples by which a peer counts: the owner's, else the app's if it leaves."""
        count: Any = setting_of("examples", self._examples, context)
        if count is None and not self.keeps_metrics:
            metrics: Mapping[str, Any] = next(iter(answer.metric_records.values()), {})
            count = metrics.get(peer.request.weighted_by)
        if count is None:
            return 1.0
        if isinstance(count, int | float) and 0 < count < MOST_EXAMPLES:
            return float(count)
        words = "peer %s: %s=%r must be above 0 and below %.0f: the peer counts by 1 in this round"
        log.warning(words, peer.node.peer, peer.request.weighted_by, count, MOST_EXAMPLES)
        return 1.0

    def _call(
        self, peer: RequestHandler, model: ArrayRecord, message: Message, context: Context, app: App
    ) -> RecordDict:
        """Let the app's own function answer, with the peer's model under the name of the global one."""
        given = RecordDict({peer.request.arrays: model})
        for name, record in message.content.items():
            if name in (SAYS, INITIAL, MODEL, INBOX):
                continue
            # An app may write into its configs, which the next call is given again.
            given[name] = ConfigRecord(dict(record)) if isinstance(record, ConfigRecord) else record
        message.content = given
        if peer.state is not None and peer.state.local_arrays:
            local = {name: Array(value) for name, value in peer.state.local_arrays.items()}
            message.content[peer.request.local_record] = ArrayRecord(local)
        with noting_budgets() as budgets:
            try:
                return answer_of(app, message, context, peer.node.folder)
            except BudgetError:
                log.exception("peer %s: the app's own budget", peer.node.peer)
                raise
            except AppFailedError as error:
                raise self._explained(peer, error) from None
            finally:
                peer.note_app_budgets(budgets)

    def _explained(self, peer: RequestHandler, error: AppFailedError) -> RunError:
        """Return what to answer when an app failed; what it raised stays in the log if its data are protected."""
        if error.reply_code == PEER_MOD_FAILED:
            return RunError(TWICE, code="flower.peer-mod-twice")
        raised = error.raised
        if raised is None:
            return self._failed(peer, error.what, error.details)
        if isinstance(raised, KeyError) and str(raised.args[:1]).startswith(LEGACY_RECORDS):
            return RunError(LEGACY_CLIENT, code="flower.legacy-client")

        line = last_line_of_users(raised)
        if line or self.withholds:
            log.error("peer %s: its app %s%s", peer.node.peer, error.what, line, exc_info=raised)
        return self._failed(peer, error.what, "" if self.withholds else error.details)

    def _trained(self, peer: RequestHandler, content: RecordDict, layout: Layout) -> Arrays:
        """Return the arrays of the train function's answer; see `returned_arrays`."""
        try:
            return returned_arrays(content, peer.request.arrays, layout)
        except AppFailedError as error:
            raise self._failed(peer, error.what, error.details) from None

    def _renew_local_arrays(self, peer: RequestHandler, state: PeerState, answer: RecordDict) -> None:
        """Keep the record of a train function's answer that never leaves, if it is the model's and finite."""
        name = peer.request.local_record
        if not state.local_arrays or name not in answer.array_records:
            return
        arrays = numpy_arrays(answer.array_records[name])
        if difference := state.layout.misfit(arrays):
            raise self._failed(peer, f"returned another {name} than the model's", difference)
        if np.isfinite(state.layout.vector(arrays)).all():
            state.local_arrays = arrays

    def _failed(self, peer: RequestHandler, what: str, details: str) -> RunError:
        """Return an error that says what an app did; details may tell of its data, and stay where all such does."""
        if details and self.withholds:
            log.warning("peer %s: its app %s: %s", peer.node.peer, what, details)
        return RunError(f"its app {what}" + ("; see its own log" if self.withholds else f": {details}"))

    def _leaving(self, peer: RequestHandler, from_app: RecordDict) -> dict[str, MetricRecord]:
        """Return what of the app's answer leaves: its metrics, unless they are of private data."""
        if self.keeps_metrics:
            keep_metrics(peer.node.folder, peer.request.round_index, peer.request.kind, from_app.metric_records)
            return {}
        return {name: record for name, record in from_app.items() if isinstance(record, MetricRecord)}
