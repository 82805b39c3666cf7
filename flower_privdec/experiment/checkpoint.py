"""A run's state on disk, whole and safe to read: safetensors with a few strings.

`described` and `restored` turn it into facts and tensors and back, whichever file holds these; a network peer's is a
`peer.record_log`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import open_file, replacing
from flower_privdec.common.formatting import one_line, peer_ranges
from flower_privdec.core import Edges, State
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.rows.tensors import bits_of

if TYPE_CHECKING:
    from torch import Tensor

# All tensors of a checkpoint lie in one file. Those without a prefix are rows of peers.
EDGE = "edge."  # before the name of an edge's values
CARRIED = "carried."  # before the name of a tensor that the transport carries


@dataclass(frozen=True)
class Checkpoint:
    """A state between two rounds and what belongs to it.

    Attributes:
        state: the rows of every peer.
        scenario: hash of the scenario it belongs to.
        run: names the run in the ledger.
        seconds: training time so far.
        head: the length and the last hash of the ledger.
        transport: the transport's own state, as JSON can hold it, by name.
        carried: the tensors of the transport's state, by name.
        metrics: how many bytes metrics.jsonl had, and their hash; None if the folder has no such file.
    """

    state: State
    scenario: str
    run: RunName
    seconds: float = 0.0
    head: tuple[int, str] | None = None
    transport: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: tuple[int, str] | None = None


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    facts, tensors = described(checkpoint)
    write_tensors(path, tensors, {"privdec": json.dumps(facts)})


def described(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint as facts, which JSON can hold, and tensors by name; `restored` is the inverse."""
    state = checkpoint.state
    tensors = dict(state.rows)
    tensors |= {EDGE + name: edges.values for name, edges in state.edges.items()}
    tensors |= {CARRIED + name: tensor for name, tensor in checkpoint.carried.items()}
    facts: dict[str, Any] = {
        "scenario": checkpoint.scenario,
        "run": dict(vars(checkpoint.run)),
        "seconds": checkpoint.seconds,
        "head": checkpoint.head,
        "metrics": checkpoint.metrics,
        "transport": dict(checkpoint.transport),
        "round_index": state.round_index,
        "at": state.at,
        "peers": state.peers.tolist(),
        "edges": {name: [edges.own.tolist(), edges.other.tolist()] for name, edges in state.edges.items()},
        "tensors": _layout(tensors),
    }

    return facts, tensors


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in sorted(tensors.items())}


def load_checkpoint(path: Path, scenario: str, run: RunName, device: torch.device) -> Checkpoint:
    """Read a checkpoint back, bit for bit.

    Args:
        scenario: hash of the scenario that would continue.
        run: the name that such a run has here and now, on this machine and with this data.

    Raises:
        ScenarioError: the file is not a whole checkpoint, or the run could not continue from it with the same numbers.
    """
    checkpoint = read_checkpoint(path, device)
    check_run(path, checkpoint, scenario, run)
    return checkpoint


def _refused(path: Path, problem: str, code: str) -> ScenarioError:
    return ScenarioError(f"{path}: {problem}, or start again with another {option('out')}", code=f"checkpoint.{code}")


def check_run(path: Path, checkpoint: Checkpoint, scenario: str, run: RunName) -> None:
    """Refuse a checkpoint from which a run could not continue with the same numbers; see `load_checkpoint`."""
    if checkpoint.scenario != scenario:
        problem = "is a checkpoint of another scenario; resume with the scenario.yaml beside it"
        raise _refused(path, problem, "other-scenario")
    made = checkpoint.run
    if made.environment != run.environment:
        problem = f"was made with {made.environment}, and here is {run.environment}, which draws other numbers"
        raise _refused(path, f"{problem}; resume where it was made", "other-environment")
    if made.id != run.id:
        problem = "was made with other data, another version of the model's code or in another runtime; restore them"
        raise _refused(path, problem, "other-data")


def check_state(path: Path, state: State, peers: np.ndarray, rounds: int, rows: Iterable[str] = ("x",)) -> None:
    """Refuse the state of other peers, or of a round that a run does not have.

    Args:
        path: the file that it was read from.
        peers: global ids of those hosted here.
        rounds: the number of rounds of the run.
        rows: names of those that there must be.

    Raises:
        ScenarioError: the message names what is wrong.
    """
    missing = [name for name in rows if name not in state.rows]
    if missing:
        raise _refused(path, f"lacks {missing}; restore it from a copy", "incomplete")

    if not np.array_equal(state.peers, peers):
        holds = peer_ranges(state.peers.tolist())
        here = peer_ranges(peers.tolist())
        raise _refused(path, f"holds the peers {holds}, and here are {here}; resume where it was made", "other-peers")

    if state.round_index > rounds:
        problem = f"is of round {state.round_index} of rounds={rounds}; restore it from a copy"
        raise _refused(path, problem, "round")


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read any checkpoint, to look at; a run continues from `load_checkpoint`.

    Raises:
        ScenarioError: the file is not a checkpoint.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = json.loads(file.metadata()["privdec"])
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return restored(facts, rows)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"cannot be read as a checkpoint ({one_line(error)}); restore it from a copy"
        raise _refused(path, problem, "unreadable") from error


Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _Facts(BaseModel):
    """What `described` returns beside tensors, read back from a file that may be damaged."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    scenario: str
    run: RunName
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    head: tuple[Count, str] | None
    metrics: tuple[Count, str] | None
    transport: dict[str, Count | dict[str, Any]]
    round_index: Count
    at: Count
    peers: list[Count]
    edges: dict[str, tuple[list[Count], list[Count]]]
    tensors: dict[str, list[Any]]


def restored(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """Put a checkpoint together again from the facts and tensors that `described` returned.

    Raises:
        ValueError: these are not facts and tensors that `described` can return.
    """
    checked = _Facts.model_validate(facts)
    if checked.tensors != _layout(tensors):
        raise ValueError("its tensors are not those that were written")

    carried: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}  # of edges
    rows: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(CARRIED):
            carried[name.removeprefix(CARRIED)] = tensor
        elif name.startswith(EDGE):
            values[name.removeprefix(EDGE)] = tensor
        else:
            rows[name] = tensor

    peers = checked.peers
    if sorted(set(peers)) != peers or any(len(row) != len(peers) for row in rows.values()):
        raise ValueError("its peers do not ascend, or it has more or fewer rows than peers")
    if checked.edges.keys() != values.keys():
        raise ValueError("some edges have no values, or some values no edges")

    edges = {}
    for name, (own, other) in checked.edges.items():
        if not len(own) == len(other) == len(values[name]):
            raise ValueError(f"the edges {name} have more or fewer values than edges")
        edges[name] = Edges(np.asarray(own, dtype=np.int64), np.asarray(other, dtype=np.int64), values[name])

    state = State(np.asarray(peers, dtype=np.int64), checked.round_index, checked.at, rows, edges)
    return Checkpoint(
        state=state,
        scenario=checked.scenario,
        run=checked.run,
        seconds=checked.seconds,
        head=checked.head,
        transport=checked.transport,
        carried=carried,
        metrics=checked.metrics,
    )


NAMES = {  # of types, in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype): dtype for dtype in NAMES}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file in the place of another, whole or not at all.

    Args:
        tensors, facts: see `pieces_of`.

    Raises:
        OSError: the disk is full, or the path cannot be written.
    """
    pieces = pieces_of(tensors, facts)
    with replacing(path) as part, os.fdopen(open_file(part, os.O_WRONLY), "wb", buffering=0) as file:
        for remaining in pieces:
            # Without a buffer a write may take only some of the bytes.
            while remaining:
                remaining = remaining[file.write(remaining) :]


def tensors_file(tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file; see `pieces_of`."""
    return b"".join(pieces_of(tensors, facts))


def pieces_of(tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None) -> list[memoryview]:
    """Return the parts of a safetensors file: the bytes that safetensors' own writer gives.

    Args:
        tensors: by name, on any device and with any strides.
        facts: strings beside them.
    """
    # The largest numbers first, behind a header of whole eights of bytes: so each number is aligned in a mapped file.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    layout: dict[str, Any] = {}
    if facts is not None:
        layout["__metadata__"] = dict(facts)
    end = 0
    for name, tensor in ordered.items():
        begin = end
        end = begin + tensor.nbytes
        layout[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(layout, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    return [memoryview(len(header).to_bytes(8, "little") + header), *map(numbers_of, ordered.values())]


def numbers_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, on any device and with any strides."""
    return bits_of(tensor).view(np.uint8).data
