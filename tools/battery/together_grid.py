"""Nodes in this process that run at the same time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from threading import RLock
from typing import Any
from unittest import mock

from flwr.app import Message

from flower_privdec.flower.launch.local_grid import LocalGrid, with_id

_parse: Callable[..., Any] = ast.parse
_parsing = RLock()


@contextmanager
def parsing_in_turn() -> Iterator[None]:
    """Let one thread parse at a time.

    Python 3.11 counts the depth of its parser for all threads together, and fails where two of them parse at once ("AST
    constructor recursion depth mismatch"), as NumPy does for each array that Flower carries.
    """

    def parse(*given: Any, **options: Any) -> Any:
        with _parsing:
            return _parse(*given, **options)

    with mock.patch.object(ast, "parse", parse):
        yield


class TogetherGrid(LocalGrid):
    """Calls a ClientApp in this process, for all nodes at once."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let all messages be answered, each in a thread of its own; return their ids."""
        sent = [with_id(message) for message in messages]
        ids = [message.metadata.message_id for message in sent]
        if sent:
            calls = [partial(copy_context().run, self._deliver, message) for message in sent]
            with parsing_in_turn(), ThreadPoolExecutor(len(sent)) as threads:
                self._replies |= dict(zip(ids, threads.map(lambda call: call(), calls), strict=True))
        return ids
