"""What a strategy says to a peer's mod and the mod to the strategy, beside the app's own records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flower_privdec.errors import RunError

SAYS, INITIAL, MODEL, INBOX, OUTBOX, MASS = (
    f"privdec.{name}" for name in ("says", "initial", "model", "inbox", "outbox", "mass")
)
INTRODUCE, JOIN, ROUND, DELIVER, EVALUATE, MESH = "introduce", "join", "round", "deliver", "evaluate", "mesh"


class _Said:
    """A record of plain fields.

    Attributes:
        together: fields that are lists of one length.
    """

    together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def record(self) -> ConfigRecord:
        """Return the fields as a record."""
        return ConfigRecord({name: getattr(self, name) for name in self.__dataclass_fields__})  # type: ignore[attr-defined]

    @classmethod
    def of(cls, content: RecordDict, remedy: str) -> Self:
        """Read what a message says.

        Raises:
            RunError: it says nothing of the kind; the remedy says what to do.
        """
        given: Mapping[str, Any] = content.config_records.get(SAYS, {})
        kinds = {name: each.type for name, each in cls.__dataclass_fields__.items()}  # type: ignore[attr-defined]
        if given.keys() != kinds.keys() or not all(_is(given[name], kind) for name, kind in kinds.items()):
            raise RunError(remedy)
        for together in cls.together:
            if len({len(given[name]) for name in together}) > 1:
                raise RunError(f"a message whose {', '.join(together)} are not of one length is none of ours: {remedy}")
        return cls(**given)


def _is(value: object, kind: str) -> bool:
    """Return whether a value is of a field's type, as the type is written here."""
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is(each, kind[5:-1]) for each in value)
    return type(value) is {"int": int, "float": float, "str": str, "bool": bool, "bytes": bytes}[kind]


@dataclass(frozen=True)
class Asked(_Said):
    """What the strategy asks of a peer. It names no key, no ledger and, outside a simulation, no path.

    Attributes:
        kind: introduce, join, round, deliver, evaluate or mesh.
        run: the run's name.
        peer: who is asked.
        folder: where a simulation's peers keep what is theirs.
        arrays: the key of the ArrayRecord that the app's functions look for.
        local_record: the name of an ArrayRecord that never leaves the peer: the initial arrays at first, then what the
            app's train function last answered under that name; it is given to both of the app's functions. Empty: none.
        round_index, rounds: the round, from 1, and how many there will be.
        founding: join: whether the initial arrays are this peer's mass, or only say what a model looks like.
        receivers, weights: round: to whom W[j, peer] of the mass goes.
        wants_mass: whether to hand in (x, w), for the mean of the network.
        mean_of: of which peers that mean is, when their masses are masked.
        serial: deliver: rises from one mean to the next.
        neighbors, epochs, keys: of all peers that are known: the epoch of each one's state and its public key.
        held_by, held: which shares need not be handed in again: receivers and numbers.
        taken_by, taken_epochs, taken: who has which share of this peer's in its mass: receiver, epoch, number.
        scenario: mesh: what the peers agree on, and where they are, as YAML.
    """

    together = (
        ("receivers", "weights"),
        ("neighbors", "epochs", "keys"),
        ("held_by", "held"),
        ("taken_by", "taken_epochs", "taken"),
    )

    kind: str
    run: str = ""
    peer: int = -1
    folder: str = ""
    arrays: str = "arrays"
    local_record: str = ""
    round_index: int = 0
    rounds: int = 0
    founding: bool = False
    receivers: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    wants_mass: bool = False
    mean_of: list[int] = field(default_factory=list)
    serial: int = 0
    neighbors: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    held_by: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    taken_by: list[int] = field(default_factory=list)
    taken_epochs: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    scenario: str = ""


@dataclass(frozen=True)
class Told(_Said):
    """What a peer says of itself.

    Attributes:
        peer, n_peers: which it is, of how many.
        epoch: of its state of this run; 0 where it has none.
        round_index: the last round in which it took part.
        key: its public key.
        sealed: whether it seals what it sends.
        trained: whether it trained now.
        idle: over a server, whether it took no step in the last round that it took part in.
        stopped: why it did not train; empty where it did.
        exhausted: whether that is for good, its budget being spent.
        spent: its ε in words, with unit, adjacency and what was charged; empty where nothing is protected.
        epsilon: its ε; ∞ where nothing is protected.
        senders, sender_epochs, taken: which shares are in its mass: sender, epoch, number.
        refused_keys, refused: the shares that it refused, and why.
        stranded: how many of its shares went to states that were lost.
        address: HOST:PORT at which other peers can reach it; empty where they cannot.
    """

    together = (("senders", "sender_epochs", "taken"), ("refused_keys", "refused"))

    peer: int
    n_peers: int
    epoch: int = 0
    round_index: int = 0
    key: bytes = b""
    sealed: bool = False
    trained: bool = False
    idle: bool = False
    stopped: str = ""
    exhausted: bool = False
    spent: str = ""
    epsilon: float = 0.0
    senders: list[int] = field(default_factory=list)
    sender_epochs: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    refused_keys: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    stranded: int = 0
    address: str = ""


def pack_bytes(shares: Mapping[str, bytes]) -> ArrayRecord:
    """Return shares as a record that Flower carries in pieces, whatever they hold."""
    return ArrayRecord(
        {name: Array("uint8", (len(content),), "privdec.share", content) for name, content in shares.items()}
    )


def unpack_bytes(record: ArrayRecord | None) -> Iterable[tuple[str, bytes]]:
    """Return the shares of a record, in their order."""
    return [(name, array.data) for name, array in (record or {}).items()]
