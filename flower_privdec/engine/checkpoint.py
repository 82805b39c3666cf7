"""A run's state on disk, whole and safe to read: safetensors with a few strings beside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_privdec.common.files import open_file, replacing
from flower_privdec.common.formatting import one_line, peer_ranges, shown
from flower_privdec.core import Edges, State
from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.ledger.ledger import RunName

EDGE, CARRIED = "edge.", "carried."  # prefixes of the names of edges and of a transport's tensors, which are no rows
BESIDE = "share-{}.safetensors"  # files beside a checkpoint that hold tensors of it
_A_FILE_BESIDE = re.compile(re.escape(BESIDE).replace(r"\{\}", "[0-9a-f]{16}"))

Place = tuple[str, str]  # a file beside a checkpoint, and the name of a tensor in it


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
        carried: its tensors.
    """

    state: State
    scenario: str
    run: RunName
    seconds: float = 0.0
    head: tuple[int, str] | None = None
    transport: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)


def _nowhere(tensor: Tensor) -> Place | None:
    return None


def save_checkpoint(path: Path, checkpoint: Checkpoint, beside: Callable[[Tensor], Place | None] = _nowhere) -> None:
    """Write a checkpoint atomically.

    Args:
        beside: maps a tensor to where beside the path its numbers are on disk already; None where they are not.
    """
    state = checkpoint.state
    tensors = dict(state.rows)
    tensors |= {EDGE + name: edges.values for name, edges in state.edges.items()}
    tensors |= {CARRIED + name: tensor for name, tensor in checkpoint.carried.items()}
    facts: dict[str, Any] = {
        "scenario": checkpoint.scenario,
        "run": asdict(checkpoint.run),
        "seconds": checkpoint.seconds,
        "head": checkpoint.head,
        "transport": dict(checkpoint.transport),
        "round_index": state.round_index,
        "at": state.at,
        "peers": state.peers.tolist(),
        "edges": {name: [edges.own.tolist(), edges.other.tolist()] for name, edges in state.edges.items()},
        "tensors": _layout(tensors),
        "beside": {name: place for name, tensor in tensors.items() if (place := beside(tensor)) is not None},
    }
    own = {name: tensor for name, tensor in tensors.items() if name not in facts["beside"]}
    write_tensors(path, own, {"privdec": json.dumps(facts)})


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in sorted(tensors.items())}


def load_checkpoint(path: Path, scenario: str, run: RunName, device: torch.device) -> Checkpoint:
    """Read a checkpoint back, bit for bit.

    Args:
        scenario: hash of the scenario that would go on.
        run: what that run is called here and now.

    Raises:
        ScenarioError: when the file is no whole checkpoint, or the run could not go on from it with the same numbers.
    """
    facts, rows = _read(path, device)
    if facts.scenario != scenario:
        raise ScenarioError(
            f"{path}: is a checkpoint of another scenario; resume with the scenario.yaml beside it, "
            "or start again with another --out",
            code="checkpoint.other-scenario",
        )
    made = facts.run
    if made.environment != run.environment:
        raise ScenarioError(
            f"{path}: was made with {made.environment}, and here is {run.environment}, which draws other numbers; "
            "resume where it was made, or start again with another --out",
            code="checkpoint.other-environment",
        )
    if made.id != run.id:
        raise ScenarioError(
            f"{path}: was made with other data, another version of the model's code or in another runtime; restore "
            "them, or start again with another --out",
            code="checkpoint.other-data",
        )
    return _checkpoint(facts, rows)


def check_state(path: Path, state: State, peers: np.ndarray, rounds: int, rows: Iterable[str] = ("x",)) -> None:
    """Refuse the state of other peers, or of a round that a run does not have.

    Args:
        path: where it was read from.
        peers: global ids of those hosted here.
        rounds: of the run.
        rows: names of those that there must be.

    Raises:
        ScenarioError: naming what is wrong.
    """
    if missing := [name for name in rows if name not in state.rows]:
        raise ScenarioError(
            f"{path}: lacks {missing}; restore it from a copy, or start again with another --out",
            code="checkpoint.incomplete",
        )
    if not np.array_equal(state.peers, peers):
        raise ScenarioError(
            f"{path}: holds the peers {peer_ranges(state.peers.tolist())}, and here are {peer_ranges(peers.tolist())}; "
            "resume where it was made, or start again with another --out",
            code="checkpoint.other-peers",
        )
    if state.round_index > rounds:
        raise ScenarioError(
            f"{path}: is of round {state.round_index} of rounds={rounds}; restore it from a copy, or start again with "
            "another --out",
            code="checkpoint.round",
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read any checkpoint, to look at; a run goes on from `load_checkpoint`.

    Raises:
        ScenarioError: when the file is no checkpoint.
    """
    return _checkpoint(*_read(path, torch.device("cpu")))


Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Facts(BaseModel):
    """What a checkpoint has beside its tensors; see `save_checkpoint`."""

    model_config = ConfigDict(strict=True)

    scenario: str
    run: RunName
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    head: tuple[Count, str] | None
    transport: dict[str, Count | dict[str, Any]]
    round_index: Count
    at: Count
    peers: list[Count]
    edges: dict[str, tuple[list[Count], list[Count]]]
    tensors: dict[str, list[Any]]
    beside: dict[str, Place]


def _read(path: Path, device: torch.device) -> tuple[_Facts, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = _Facts.model_validate_json(file.metadata()["privdec"])
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        for name, place in facts.beside.items():
            rows[name] = _beside(path.parent, place, device).reshape(facts.tensors[name][1:])
        _check_fit(facts, rows)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as a checkpoint ({one_line(error)}); restore it from a copy, or start again with "
            "another --out",
            code="checkpoint.unreadable",
        ) from error
    return facts, rows


def _beside(folder: Path, place: Place, device: torch.device) -> Tensor:
    """Return a tensor of its own from a file beside a checkpoint."""
    file, name = place
    if not _A_FILE_BESIDE.fullmatch(file):
        raise ValueError(f"{shown(file, 40)} is no file of its own")
    with safe_open(folder / file, framework="pt", device=str(device)) as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _check_fit(facts: _Facts, tensors: Mapping[str, Tensor]) -> None:
    """Refuse facts that are not those of the tensors; raises ValueError."""
    if facts.tensors != _layout(tensors):
        raise ValueError("its tensors are not those that were written")
    rows = [tensor for name, tensor in tensors.items() if not name.startswith((EDGE, CARRIED))]
    if sorted(set(facts.peers)) != facts.peers or any(len(row) != len(facts.peers) for row in rows):
        raise ValueError(f"its peers are {shown(facts.peers, 40)}, or have rows of another number")
    if {EDGE + name for name in facts.edges} != {name for name in tensors if name.startswith(EDGE)}:
        raise ValueError("its edges are not those of its tensors")
    if any(not len(own) == len(other) == len(tensors[EDGE + name]) for name, (own, other) in facts.edges.items()):
        raise ValueError("its edges are not as many as their values")


def _checkpoint(facts: _Facts, tensors: dict[str, Tensor]) -> Checkpoint:
    carried = {name.removeprefix(CARRIED): tensors.pop(name) for name in list(tensors) if name.startswith(CARRIED)}
    edges = {
        name: Edges(np.asarray(own, dtype=np.int64), np.asarray(other, dtype=np.int64), tensors.pop(EDGE + name))
        for name, (own, other) in facts.edges.items()
    }
    state = State(np.asarray(facts.peers, dtype=np.int64), facts.round_index, facts.at, tensors, edges)
    return Checkpoint(state, facts.scenario, facts.run, facts.seconds, facts.head, facts.transport, carried)


NAMES = {
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file in the place of another, whole or not at all.

    Args:
        tensors: by name; wherever and however they lie.
        facts: strings beside them.

    Raises:
        OSError: the disk is full, or the path cannot be written.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    described: dict[str, Any] = {"__metadata__": dict(facts)}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    rows = (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in ordered.values()
    )
    with replacing(path) as part, os.fdopen(open_file(part, os.O_WRONLY), "wb", buffering=0) as file:
        for remaining in (memoryview(len(header).to_bytes(8, "little") + header), *rows):
            while remaining:
                remaining = remaining[file.write(remaining) :]
