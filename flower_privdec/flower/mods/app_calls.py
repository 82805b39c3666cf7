"""How an app's own functions are called: where they may keep something, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from flwr.app import ArrayRecord, RecordDict

from flower_privdec.common.formatting import one_line
from flower_privdec.errors import RunError
from flower_privdec.flower.mods.layout import Layout, numpy_arrays

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


class UnfitAnswerError(RunError):
    """An app's answer is no model of the peer's; its details may tell of the app's data.

    Attributes:
        what: what the app did, which tells nothing.
        details: what is wrong with it, and what to do.
    """

    def __init__(self, what: str, details: str) -> None:
        super().__init__(f"the app {what}; {details}")
        self.what, self.details = what, details


def returned_arrays(content: RecordDict, key: str, layout: Layout) -> ArrayRecord:
    """Return the arrays of a train function's answer.

    Args:
        content: the answer.
        key: under which they are, where there are several.
        layout: of the arrays that it was given.

    Raises:
        UnfitAnswerError: there are none, or several and none under the key, or others than were given.
    """
    records = content.array_records
    if key not in records and len(records) != 1:
        raise UnfitAnswerError(
            "returned no model",
            f"its answer has {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} and none named {key!r}: "
            f"return RecordDict({{{key!r}: ArrayRecord(...)}})",
        )
    returned = records[key] if key in records else next(iter(records.values()))
    if difference := _misfit(returned, layout):
        raise UnfitAnswerError("returned other arrays than it was given", difference)
    return returned


def _misfit(returned: ArrayRecord, layout: Layout) -> str:
    """Return in words how arrays that an app returned are not the model's; empty where they are."""
    try:
        return layout.misfit(numpy_arrays(returned))
    except (TypeError, ValueError) as error:  # what Flower says of arrays of another framework
        return f"they cannot be read as NumPy's: {one_line(error)}"
