"""A run's state on disk, whole and safe to read: safetensors with a few strings beside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flower_privdec.algorithms import Edges, State
from flower_privdec.errors import ScenarioError
from flower_privdec.files import write_atomically
from flower_privdec.privacy.ledger_format import RunName

EDGE = "edge."  # before the names of edges, to tell them from rows


@dataclass(frozen=True)
class Checkpoint:
    """A state between two rounds and what belongs to it.

    Attributes:
        state: the rows of every peer.
        scenario: hash of the scenario it belongs to.
        run: names the run in the ledger.
        seconds: training time so far.
        head: the length and the last hash of the ledger.
        transport: counters that whoever carries the messages goes on from, by name.
    """

    state: State
    scenario: str
    run: RunName
    seconds: float = 0.0
    head: tuple[int, str] | None = None
    transport: Mapping[str, int] = field(default_factory=dict)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    state = checkpoint.state
    tensors = {name: rows.contiguous().cpu() for name, rows in state.rows.items()}
    tensors |= {EDGE + name: edges.values.contiguous().cpu() for name, edges in state.edges.items()}
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
    }
    write_atomically(path, save(tensors, {"privdec": json.dumps(facts)}))


def load_checkpoint(path: Path, scenario: str, run: RunName, device: torch.device) -> Checkpoint:
    """Read a checkpoint back, bit for bit.

    Args:
        scenario: hash of the scenario that would go on.
        run: what that run is called here and now.

    Raises:
        ScenarioError: when the file is no checkpoint, or the run could not go on from it with the same numbers.
    """
    facts, rows = _read(path, device)
    if facts["scenario"] != scenario:
        raise ScenarioError(
            f"{path}: is a checkpoint of another scenario; resume with the scenario.yaml beside it, "
            "or start anew with another --out"
        )
    made = RunName(**facts["run"])
    if made.environment != run.environment:
        raise ScenarioError(
            f"{path}: was made with {made.environment}, and here is {run.environment}, which draws other numbers; "
            "resume where it was made, or start anew with another --out"
        )
    if made.id != run.id:
        raise ScenarioError(
            f"{path}: was made with other data, another version of the model's code or in another runtime; restore "
            "them, or start anew with another --out"
        )
    return Checkpoint(_state(facts, rows), scenario, made, facts["seconds"], facts["head"], facts["transport"])


def read_state(path: Path) -> State:
    """Read the state out of a checkpoint, whoever made it, to look at; a run goes on from `load_checkpoint`.

    Raises:
        ScenarioError: when the file is no checkpoint.
    """
    return _state(*_read(path, torch.device("cpu")))


def _read(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = json.loads(file.metadata()["privdec"])
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as a checkpoint ({error}); start anew with another --out"
        ) from error
    return facts, rows


def _state(facts: dict[str, Any], rows: dict[str, Tensor]) -> State:
    edges = {
        name: Edges(np.asarray(own, dtype=np.int64), np.asarray(other, dtype=np.int64), rows.pop(EDGE + name))
        for name, (own, other) in facts["edges"].items()
    }
    return State(np.asarray(facts["peers"], dtype=np.int64), facts["round_index"], facts["at"], rows, edges)
