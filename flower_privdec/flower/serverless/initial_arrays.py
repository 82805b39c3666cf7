"""What an app's peers begin with: arrays, and what the train function is told, as a file to be handed around."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import one_line
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.mods.peer_state import Layout

FORMAT = "flower-privdec-initial-1"
Config = dict[str, Any]


@dataclass(frozen=True)
class InitialArrays:
    """What all peers of an app begin with.

    Attributes:
        arrays: the model's, by name, in the order in which the app has them.
        key: under which name the app's functions look for them.
        configs: what else the ServerApp tells the train function, by name.
    """

    arrays: Mapping[str, np.ndarray]
    key: str = "arrays"
    configs: Mapping[str, Config] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Return names, shapes and types of the arrays."""
        return Layout.of(self.arrays)

    @property
    def digest(self) -> str:
        """Return a hash of the arrays: names, order, types, shapes and numbers."""
        found = hashlib.sha256(json.dumps(self.layout.parts).encode())
        for value in self.arrays.values():
            found.update(np.ascontiguousarray(value).tobytes())
        return found.hexdigest()

    def check(self) -> None:
        """Refuse arrays that nobody can begin with.

        Raises:
            ScenarioError: they are not finite.
            RunError: they are no model.
        """
        if not np.isfinite(self.layout.vector(self.arrays)).all():
            raise ScenarioError("the initial arrays are not finite: check how the model is made")


def save_initial(path: Path, initial: InitialArrays) -> None:
    """Write what peers begin with, for others to be given."""
    facts = {"format": FORMAT, "order": list(initial.arrays), "key": initial.key, "configs": initial.configs}
    arrays = {name: np.array(value, order="C") for name, value in initial.arrays.items()}
    write_atomically(path, save(arrays, {"initial": json.dumps(facts, default=_as_json)}))


def load_initial(path: Path) -> InitialArrays:
    """Read what peers begin with; nothing in the file is ever executed.

    Raises:
        ScenarioError: it cannot be read, or holds something else.
    """
    try:
        with safe_open(path, "np") as file:
            facts = json.loads(file.metadata()["initial"], object_hook=_from_json)
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']!r}, not {FORMAT}")
            arrays = {str(name): file.get_tensor(name) for name in facts["order"]}
            return InitialArrays(arrays, str(facts["key"]), dict(facts["configs"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(
            f"{path} holds no initial arrays ({one_line(error)}); give the initial.safetensors of a peer's folder"
        ) from error


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} cannot be in a config")


def _from_json(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"], validate=True) if value.keys() == {"base64"} else value
