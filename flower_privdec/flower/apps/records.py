"""Codec of a scenario's messages: requests, rows, states, metrics and budgets as Flower records, without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.core import Edges, Exchange, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Payload
from flower_privdec.experiment.spent import Spent
from flower_privdec.graph.mixing import Link

# Names of records: in messages, and of a state in a node's context.
REQUEST = "request"
PARTITION = "partition"
SHARDS = "shards"  # in PARTITION: whether the node-config has addresses for shards
PROGRESS = "progress"
METRICS = "metrics"
SPENT = "spent"
POSITION = "position"
ROWS = "rows"
EDGES = "edges"


@dataclass(frozen=True)
class WorkRequest:
    """What the ServerApp requests of a node in every train message.

    It names no ledger, no key and, outside a simulation, no path: those are the node's own (`node_settings`). The three
    strategies share it; a field that is for one of them says so.

    Attributes:
        scenario: the scenario, as YAML.
        until: stop when so many rounds are done.
        peers: global ids of the peers that the node hosts.
        base: the folder from which modules of the user's own are imported (simulation).
        folder: the folder of the run (simulation).
        resume: continue from the checkpoint in `folder` (CohortRun).
        begin: continue from the node's own checkpoint of this round; 0 to start over, -1 to continue from the state
            of the last message (Relay).
        shards: the number of shards (Sharded); 0 for the other strategies.
        nodes: the number of nodes (Relay).
        absent, lost: the peers whose nodes are gone now, and those of them that were there when the rows of this
            message were sent (Relay).
        rejoin: at `begin`, continue from whatever state of the run the node has (Relay).
        token: the token of the rendezvous of the shards for this message (Sharded).
        salt: the salt of the run, see `experiment.run_key`, which its nodes must share (simulation).
        command: that was typed to start the run, for its summary (simulation).
        gpus: the ServerApp's CUDA_VISIBLE_DEVICES, "all" if it is not set (simulation); see `see_gpus`.
    """

    scenario: str
    until: int
    peers: list[int]
    base: str = ""
    folder: str = ""
    resume: bool = False
    begin: int = -1
    shards: int = 0
    nodes: int = 0
    absent: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    rejoin: bool = False
    token: str = ""
    salt: str = ""
    command: str = ""
    gpus: str = ""

    def record(self) -> ConfigRecord:
        """Return the request as a record."""
        return ConfigRecord(asdict(self))

    @classmethod
    def of(cls, content: RecordDict) -> WorkRequest:
        """Read the request of a message.

        Raises:
            RunError: the message carries none.
        """
        if REQUEST not in content.config_records:
            raise RunError(f"the message has no record {REQUEST!r}: send it with a strategy of flower_privdec")
        given = content.config_records[REQUEST]
        fields: dict[str, Any] = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        return cls(**fields)


def pack_rows(rows: Mapping[str, Tensor]) -> ArrayRecord:
    """Return named tensors as a record."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in rows.items()})


def unpack_rows(record: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
    """Return a record's arrays as tensors on a device, bit for bit what was packed."""
    return {name: torch.from_numpy(array.numpy()).to(device) for name, array in record.items()}


def pack_peers(state: State, names: Iterable[str]) -> dict[str, ArrayRecord]:
    """Return each peer's rows as a record of its own, so that a router need not decode any."""
    names = tuple(names)
    return {
        row_key(peer): pack_rows({name: state.rows[name][i] for name in names})
        for i, peer in enumerate(state.peers.tolist())
    }


def pack_messages(exchange: Exchange, messages: Mapping[Link, Payload]) -> dict[str, ArrayRecord]:
    """Return an exchange's messages as records by key: one per sender if all its receivers get the same."""
    return {message_key(exchange, link): pack_rows(payload) for link, payload in messages.items()}


def unpack_message(exchange: Exchange, content: RecordDict, link: Link, device: torch.device) -> Payload | None:
    """Return what one peer sent to another; None if it is not in the content."""
    record = content.array_records.get(message_key(exchange, link))
    return None if record is None else unpack_rows(record, device)


def message_key(exchange: Exchange, link: Link) -> str:
    """Return the key of the record that one peer sends to another."""
    sender, receiver = link
    if exchange.differs:
        return f"{row_key(sender)}-to-{receiver}"
    return row_key(sender)


def row_key(peer: int) -> str:
    """Return the key of a peer's own record."""
    return f"peer-{peer}"


def pack_state(state: State, content: RecordDict) -> None:
    """Put a whole state into a message or a context."""
    content[ROWS] = pack_rows(state.rows)

    position = ConfigRecord({"round": state.round_index, "at": state.at, "waiting": state.waiting})
    position["peers"] = state.peers.tolist()
    content[POSITION] = position

    # A record holds either arrays or lists of numbers, so an edge's values and its ends are apart.
    content[EDGES] = pack_rows({name: edges.values for name, edges in state.edges.items()})
    for name, edges in state.edges.items():
        content[f"{EDGES}.{name}"] = ConfigRecord({"own": edges.own.tolist(), "other": edges.other.tolist()})


def unpack_state(content: RecordDict, device: torch.device) -> State | None:
    """Return the state that `pack_state` put there; None if it put none there."""
    if ROWS not in content.array_records:
        return None
    position = content.config_records[POSITION]

    edges = {}
    for name, values in unpack_rows(content.array_records[EDGES], device).items():
        ends = content.config_records[f"{EDGES}.{name}"]
        own = np.asarray(ends["own"], dtype=np.int64)
        other = np.asarray(ends["other"], dtype=np.int64)
        edges[name] = Edges(own, other, values)

    return State(
        peers=np.asarray(position["peers"], dtype=np.int64),
        round_index=int(position["round"]),  # type: ignore[arg-type]
        at=int(position["at"]),  # type: ignore[arg-type]
        rows=unpack_rows(content.array_records[ROWS], device),
        edges=edges,
        waiting=bool(position["waiting"]),
    )


def spent_record(cohort: Cohort, rounds: int, source: str) -> ConfigRecord:
    """Return what the peers have spent, and the source of their noise, as a record; NaN stands for no claim."""
    spent = Spent.of(cohort, rounds)
    record = ConfigRecord({"epsilons": spent.epsilons, "deltas": spent.deltas, "rounds_run": spent.rounds_run})
    record["noise"] = [source]
    record["replies"] = spent.replies
    record["if_all_collude"] = spent.if_all_collude
    record["broken"] = list(spent.breaches)
    record["breaches"] = list(spent.breaches.values())

    # A ConfigRecord holds no None.
    record["colluding"] = [] if spent.colluding is None else [spent.colluding]
    record["counted"] = [] if spent.counted is None else [spent.counted]
    record["claimed"] = [math.nan if claim is None else claim for claim in spent.claimed]
    return record


def spent_of(records: Sequence[ConfigRecord]) -> tuple[Spent, list[str]]:
    """Return what all peers have spent and the sources of their noise, from their nodes' records in order of peers."""

    def joined(name: str) -> list[Any]:
        return [value for record in records for value in record[name]]  # type: ignore[union-attr]

    # If several peers break a condition, the words are the first one's.
    breaches: dict[str, str] = {}
    for condition, words in zip(joined("broken"), joined("breaches"), strict=True):
        breaches.setdefault(condition, words)

    claimed = [None if math.isnan(claim) else claim for claim in joined("claimed")]
    spent = Spent(
        joined("epsilons"),
        joined("deltas"),
        claimed,
        joined("rounds_run"),
        replies=joined("replies"),
        if_all_collude=joined("if_all_collude"),
        colluding=next(iter(joined("colluding")), None),
        breaches=breaches,
        counted=next(iter(joined("counted")), None),
    )
    return spent, joined("noise")


def flat_record(metrics: dict[str, Any], prefix: str = "") -> MetricRecord:
    """Return nested metrics as the flat numbers that a MetricRecord holds.

    "inf" becomes infinity. None is left out, and so is `shapley`, a number for each pair of peers, which metrics.jsonl
    has.
    """
    flat = MetricRecord()
    for name, value in metrics.items():
        if name == "shapley":
            continue
        if isinstance(value, dict):
            flat.update(flat_record(value, f"{prefix}{name}."))
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, int) else float(value)
    return flat
