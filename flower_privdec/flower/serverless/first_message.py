"""What a ServerApp would send first, with nobody there to send it to: the arrays that an app's peers begin with."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from typing import NoReturn

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict

from flower_privdec.errors import RunError
from flower_privdec.flower.launch.local_grid import LocalGrid, OpenedApp
from flower_privdec.flower.mods.peer_state import numpy_arrays
from flower_privdec.flower.serverless.initial_arrays import InitialArrays

REMEDY = "or give --initial FILE, the initial.safetensors of another peer's folder"


class _FirstMessage(BaseException):
    """Ends a ServerApp, whatever it catches, with its first message."""

    def __init__(self, message: Message) -> None:
        self.message = message


class _FirstMessageGrid(LocalGrid):
    """Nodes that are there, and of which none ever answers: the first message ends the ServerApp."""

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Take the first message."""
        for message in messages:
            raise _FirstMessage(message)
        raise RunError(f"the app's ServerApp sends no message to anybody; let its strategy train all nodes, {REMEDY}")


def first_train_message(app: OpenedApp, n_peers: int, seed: int) -> InitialArrays:
    """Run an app's ServerApp up to its first train message, and return what that says.

    The generators of Python, NumPy and torch begin at the seed meanwhile, so that all peers get the same arrays, and
    at the system's entropy afterwards: nothing that is drawn later can be foretold from the scenario.

    Raises:
        RunError: it sends something else first, or nothing.
    """
    grid = _FirstMessageGrid(app.client, n_peers, config={}, run_config=app.run_config)
    context = Context(grid.run.run_id, 0, {}, RecordDict(), dict(app.run_config))
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.WARNING)  # its strategies announce a federation that there will not be
    _seed(seed)
    try:
        app.server(grid, context)
    except _FirstMessage as first:
        return _said(first.message)
    finally:
        _seed(None)
        flower.setLevel(level)
    raise RunError(f"the app's ServerApp ended without a message to any node; mend it, {REMEDY}")


def _said(message: Message) -> InitialArrays:
    kind, records = message.metadata.message_type, message.content.array_records
    if kind.split(".")[0] != "train" or len(records) != 1:
        raise RunError(
            f"the first message of the app's ServerApp is of type {kind!r} and has {len(records)} ArrayRecords; it "
            f"must be train with one, as Flower's own strategies send it: take one of those, {REMEDY}"
        )
    ((key, arrays),) = records.items()
    configs = {name: dict(config) for name, config in message.content.config_records.items()}
    return InitialArrays({name: np.array(value) for name, value in numpy_arrays(arrays).items()}, key, configs)


def _seed(seed: int | None) -> None:
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)  # noqa: NPY002 (apps use it)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
