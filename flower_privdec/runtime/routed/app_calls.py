"""How an app's own functions are called: where they may keep something, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from flwr.app import ArrayRecord, RecordDict

from flower_privdec.errors import RunError

_folder: ContextVar[Path] = ContextVar("folder")


def peer_folder() -> Path:
    """Return the folder of the peer whose train or evaluate function is running, for what it wants to keep.

    A ledger of its examples, say: `private(..., ledger=peer_folder() / "examples.jsonl")` counts over all rounds, and
    for each peer apart. In a simulation the folder is the run's, as the peer's own ledger is.

    Raises:
        RunError: no function of an app with PeerMod is running.
    """
    try:
        return _folder.get()
    except LookupError:
        raise RunError("peer_folder() is for the functions of an app with PeerMod: call it inside one") from None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let `peer_folder` be a folder, for as long as an app's function runs."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def returned_arrays(content: RecordDict, key: str, peer: int) -> ArrayRecord:
    """Return the arrays of an app's answer.

    Raises:
        RunError: there are none, or several and none under the key.
    """
    records = content.array_records
    if key not in records and len(records) != 1:
        raise RunError(
            f"the train function of peer {peer} returned {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} "
            f"and none named {key!r}: return the trained model, as RecordDict({{{key!r}: ArrayRecord(...)}})"
        )
    return records[key] if key in records else next(iter(records.values()))
