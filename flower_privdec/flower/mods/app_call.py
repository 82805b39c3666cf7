"""Calling a user's app in a peer's place: nothing else does that.

`answer_of` calls it. What it may answer is checked by `returned_arrays`, and what of its metrics stays is kept by
`keep_metrics`. An app's failure is an `AppFailedError`, whose details may tell of its data: a caller that protects the
app's examples keeps them in its log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_privdec.common.errors import RAISED_BY_USERS, BudgetError, RunError
from flower_privdec.common.files import owners_file
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import last_line_of_users
from flower_privdec.flower.error_formatting import reason
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_state import Arrays, Layout
from flower_privdec.scenario.sections import AppPrivacySection

R = TypeVar("R", ArrayRecord, ConfigRecord)

App = Callable[[Message, Context], Message]
MOST_WORDS = 200  # characters of an app's own error

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
        raise RunError(
            "peer_folder() is for the functions of an app with PeerMod: call it inside one", code="app.peer-folder"
        ) from None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let `peer_folder` be a folder, for as long as an app's function runs."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's."""
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return arrays as the record that the framework knows: same names, order and types."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


class AppFailedError(RunError):
    """An app raised, or answered with an error or with no model of the peer's.

    Attributes:
        what: what the app did, which tells nothing of its data.
        details: what is wrong with it, and what to do; may tell of its data.
        raised: what it raised; None if it returned.
        reply_code: the code of the error that it answered with; None if it did not.
    """

    def __init__(
        self, what: str, details: str, raised: BaseException | None = None, reply_code: int | None = None
    ) -> None:
        super().__init__(f"the app {what}; {details}")
        self.what = what
        self.details = details
        self.raised = raised
        self.reply_code = reply_code


def answer_of(app: App, message: Message, context: Context, folder: Path) -> RecordDict:
    """Let an app answer a message, with `peer_folder` set.

    Raises:
        BudgetError: the app's own ledger allows no more training.
        AppFailedError: it failed, or its answer is none.
    """
    try:
        with working_in(folder):
            reply = app(message, context)
    except BudgetError:
        raise
    except RAISED_BY_USERS as error:
        words = " ".join(str(error).split())[:MOST_WORDS]
        details = f"{words}{last_line_of_users(error)}".strip()
        raise AppFailedError(f"raised {type(error).__name__}", details, raised=error) from error

    if not isinstance(reply, Message):
        raise AppFailedError(f"returned a {type(reply).__name__}", "it must return Message(..., reply_to=msg)")
    if reply.has_error():
        raise AppFailedError("answered with an error", reason(reply.error.reason), reply_code=reply.error.code)
    return reply.content


def record_in(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name and kind; None if it is missing."""
    record = content.get(name)
    return record if isinstance(record, kind) else None


def returned_arrays(content: RecordDict, key: str, layout: Layout) -> Arrays:
    """Return the arrays of a train function's answer.

    Args:
        content: the answer.
        key: under which they are, if there are several.
        layout: the layout of the arrays that it was given.

    Raises:
        AppFailedError: there are none, or several and none under the key, or others than were given.
    """
    records = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    if key not in records and len(records) != 1:
        raise AppFailedError(
            "returned no model",
            f"its answer has {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} and none named {key!r}: "
            f"return RecordDict({{{key!r}: ArrayRecord(...)}})",
        )

    returned = records[key] if key in records else next(iter(records.values()))
    arrays: Arrays = {}
    try:
        arrays = numpy_arrays(returned)
        difference = layout.misfit(arrays)
    except (TypeError, ValueError) as error:  # what Flower says of arrays of another framework
        difference = f"they cannot be read as NumPy's: {one_line(error)}"

    if difference:
        raise AppFailedError("returned other arrays than it was given", difference)

    return arrays


def keep_metrics(folder: Path, round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Add an app's metrics to the peer's own file, from which they do not leave."""
    with open(folder / "metrics.jsonl", "a", opener=owners_file) as file:
        for metrics in records.values():
            file.write(json.dumps({"round": round_index, "of": kind, **metrics}) + "\n")


def binding_privacy(privacy: AppPrivacySection | None, node: PeerSettings) -> AppPrivacySection | None:
    """Return what an app asks for, with the stricter of its budget and that of the peer's owner.

    Raises:
        BudgetError: the owner has a budget and nothing is protected.
    """
    if privacy is None:
        if math.isfinite(node.epsilon):
            raise BudgetError(
                f"epsilon={node.epsilon} of the node-config needs clip_norm and noise: say PeerMod(clip_norm=..., "
                "epsilon=...)"
            )
        return None

    epsilon = min(node.epsilon, privacy.epsilon or math.inf)
    delta = privacy.delta
    if node.delta is not None:
        delta = min(privacy.delta, node.delta)
    return privacy.model_copy(update={"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta})
