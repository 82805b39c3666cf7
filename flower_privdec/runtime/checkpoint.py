"""A run's state on disk, whole and safe to read: safetensors with a few strings beside."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from flower_privdec.algorithms import State
from flower_privdec.errors import ScenarioError


@dataclass(frozen=True)
class Checkpoint:
    """A state between two rounds and what belongs to it.

    Attributes:
        state: the rows of every peer.
        scenario: hash of the scenario it belongs to.
        run_id: names the run in the ledgers.
        seconds: training time so far.
        heads: for each peer, the length and the last hash of its ledger.
    """

    state: State
    scenario: str
    run_id: str
    seconds: float = 0.0
    heads: dict[str, tuple[int, str]] | None = None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash either the old or the new content is there, never a part."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    state = checkpoint.state
    tensors = {name: rows.contiguous().cpu() for name, rows in state.rows.items()}
    facts: dict[str, Any] = {
        "scenario": checkpoint.scenario,
        "run_id": checkpoint.run_id,
        "seconds": checkpoint.seconds,
        "heads": checkpoint.heads,
        "round_index": state.round_index,
        "at": state.at,
        "peers": state.peers.tolist(),
    }
    write_atomically(path, save(tensors, {"privdec": json.dumps(facts)}))


def load_checkpoint(path: Path, scenario: str, device: torch.device) -> Checkpoint:
    """Read a checkpoint back, bit for bit.

    Raises:
        ScenarioError: when the file is no checkpoint, or one of another scenario.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = json.loads(file.metadata()["privdec"])
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as a checkpoint ({error}); start anew with another --out"
        ) from error
    if facts["scenario"] != scenario:
        raise ScenarioError(
            f"{path}: is a checkpoint of another scenario; resume with the scenario.yaml beside it, "
            "or start anew with another --out"
        )
    state = State(np.asarray(facts["peers"], dtype=np.int64), facts["round_index"], facts["at"], rows)
    return Checkpoint(state, scenario, facts["run_id"], facts["seconds"], facts["heads"])
