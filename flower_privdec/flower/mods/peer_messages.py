"""The messages between a strategy and the peers of a Flower app, and the records that they carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flower_privdec.common.errors import RunError
from flower_privdec.peer.app_pairs import UNTOLD
from flower_privdec.peer.app_state import Arrays

R = TypeVar("R", ArrayRecord, ConfigRecord)

# The names of a message's records.
SAYS = "privdec.says"  # the PeerRequest, or the PeerReport
INITIAL = "privdec.initial"
MODEL = "privdec.model"
INBOX = "privdec.inbox"
OUTBOX = "privdec.outbox"
MASS = "privdec.mass"

# The kinds of a request.
INTRODUCE = "introduce"
JOIN = "join"
GREET = "greet"
ROUND = "round"
DELIVER = "deliver"
EVALUATE = "evaluate"
MESH = "mesh"

LEDGER = "ledger of "  # before the name of a sender or receiver: a report, among the shares
PEER_MOD_FAILED = 1002  # the code of an error that the mod itself answers with; Flower's own are small


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
        round_size, disagreement: how many peers take part in a round, and how much of the variance of noise that
            cancels is left in their models; 0 and UNTOLD if that is not known.
        announcers, announced: round: the peers whose noise may cancel this one's, and what they announced to it.
    """

    together = (
        ("receivers", "weights"),
        ("neighbors", "incarnations", "keys"),
        ("held_by", "held"),
        ("announcers", "announced"),
    )

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
    round_size: int = 0
    disagreement: float = UNTOLD
    announcers: list[int] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)


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
        cancels: whether it adds noise that cancels between peers.
        announced_to, announced: the peers to which it announces its session, and what; see `peer.app_pairs`.
        local: when introduced, the patterns of the names of arrays that never leave it.
    """

    together = (("refused_keys", "refused"), ("announced_to", "announced"))

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
    cancels: bool = False
    announced_to: list[int] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)
    local: list[str] = field(default_factory=list)


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


def record_in(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name and kind; None if it is missing."""
    record = content.get(name)
    return record if isinstance(record, kind) else None


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's."""
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return arrays as the record that the framework knows: same names, order and types."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
