"""Nodes in this process that run at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from flwr.app import Message

from flower_privdec.flower.launch.local_grid import LocalGrid, with_id


class TogetherGrid(LocalGrid):
    """Calls a ClientApp in this process, for all nodes at once."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let all messages be answered, each in a thread of its own; return their ids."""
        asked = [with_id(message) for message in messages]
        ids = [message.metadata.message_id for message in asked]
        if asked:
            with ThreadPoolExecutor(len(asked)) as threads:
                self._replies |= dict(zip(ids, threads.map(self._deliver, asked), strict=True))
        return ids
