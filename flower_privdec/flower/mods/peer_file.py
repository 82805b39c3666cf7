"""A peer's state as a file: what survives the process, the SuperNode and the machine's restart."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_privdec.common.files import write_atomically
from flower_privdec.errors import RunError
from flower_privdec.flower.mods.layout import Layout
from flower_privdec.flower.mods.peer_state import OutLink, PeerState

FORMAT = "flower-privdec-peer-1"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other message is at work on a peer's folder, and hold it.

    Raises:
        RunError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error.strerror}); give another folder") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def state_path(folder: Path, run: str) -> Path:
    """Return where a run's state lies; a run's name is anybody's words, so it is only hashed."""
    return folder / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}.safetensors"


def save_state(path: Path, state: PeerState, *, durable: bool = True) -> None:
    """Write a state, whole or not at all; if `durable`, safe on disk whatever happens to the machine."""
    arrays = {"x": state.x} | {f"kept/{name}": np.array(value, order="C") for name, value in state.kept.items()}
    arrays |= {f"local/{name}": np.array(value, order="C") for name, value in state.local_arrays.items()}
    for receiver, link in state.links.items():
        for number, content in link.frozen.items():
            arrays[f"frozen/{receiver}/{number}"] = np.frombuffer(content, dtype=np.uint8)
    said = {
        "format": FORMAT,
        "run": state.run,
        "peer": state.peer,
        "w": state.w.hex(),
        "epoch": state.epoch,
        "round": state.round_index,
        "stranded": state.stranded,
        "handed": state.handed,
        "paid": state.paid,
        "bare": state.bare,
        "idle": state.idle,
        "layout": state.layout.parts,
        "links": {receiver: [link.epoch, link.sent] for receiver, link in state.links.items()},
        "received": [[who, *pair] for who, epochs in state.received.items() for pair in epochs.items()],
    }
    write_atomically(path, save(arrays, {"state": json.dumps(said)}), private=True, durable=durable)


def load_state(path: Path) -> PeerState | None:
    """Read a state, or None where there is none.

    Raises:
        RunError: the file cannot be read, or is no state.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            said = json.loads(file.metadata()["state"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return _state(said, arrays)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RunError(f"{path} is no peer's state ({error}); restore it, or delete it to begin anew") from error


def _state(said: dict[str, object], arrays: dict[str, np.ndarray]) -> PeerState:
    if said["format"] != FORMAT:
        raise ValueError(f"format {said['format']!r}, not {FORMAT}")
    links = {int(receiver): OutLink(int(epoch), int(sent)) for receiver, (epoch, sent) in said["links"].items()}  # type: ignore[attr-defined]
    received: dict[int, dict[int, int]] = {}
    for sender, epoch, number in said["received"]:  # type: ignore[attr-defined]
        received.setdefault(int(sender), {})[int(epoch)] = int(number)
    for name, value in arrays.items():
        if name.startswith("frozen/"):
            _, receiver, number = name.split("/")
            links[int(receiver)].frozen[int(number)] = value.tobytes()
    return PeerState(
        run=str(said["run"]),
        peer=int(said["peer"]),  # type: ignore[call-overload]
        layout=Layout.from_json(said["layout"]),  # type: ignore[arg-type]
        x=arrays["x"],
        w=float.fromhex(str(said["w"])),
        kept={name.removeprefix("kept/"): value for name, value in arrays.items() if name.startswith("kept/")},
        epoch=int(said["epoch"]),  # type: ignore[call-overload]
        round_index=int(said["round"]),  # type: ignore[call-overload]
        links=links,
        received=received,
        stranded=int(said["stranded"]),  # type: ignore[call-overload]
        handed=int(said["handed"]),  # type: ignore[call-overload]
        paid=int(said["paid"]),  # type: ignore[call-overload]
        bare=int(said["bare"]),  # type: ignore[call-overload]
        idle=bool(said["idle"]),
        local_arrays={
            name.removeprefix("local/"): value for name, value in arrays.items() if name.startswith("local/")
        },
    )
