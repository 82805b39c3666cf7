"""Nodes in this process: a Grid without Ray or a SuperLink, for tests and notebooks.

What it needs of Flower's internals (the identity of the running task, message ids) is here alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_privdec.common.arguments import check_whole
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.apps.own import simulating


class LocalGrid(Grid):
    """Calls a ClientApp in this process, one node after the other.

    Args:
        client_app: what every node runs.
        n_nodes: how many nodes there are.
        run_id: the run they take part in.
        folder: where the nodes keep what is theirs; None is a temporary folder that goes with the grid.
        config: more of each node's own configuration; nodes that say more than their folder are no simulation's.
        run_config: the run's, which every node is given.

    Raises:
        ScenarioError: there is no node.
    """

    def __init__(
        self,
        client_app: ClientApp,
        n_nodes: int,
        run_id: int = 1,
        folder: Path | None = None,
        config: Mapping[int, UserConfig] | None = None,
        run_config: UserConfig | None = None,
    ) -> None:
        check_whole({"n_nodes": n_nodes})
        if n_nodes < 1:
            raise ScenarioError(f"n_nodes={n_nodes} must be >= 1")
        self.client_app = client_app
        self._temporary = TemporaryDirectory() if folder is None else None
        own = str(self._temporary.name if self._temporary is not None else folder)
        self._simulated = config is None
        self._run = Run.create_empty(run_id)
        self.contexts = {
            100 + i: Context(
                run_id=run_id,
                node_id=100 + i,
                node_config={"partition-id": i, "num-partitions": n_nodes, "folder": own, **(config or {}).get(i, {})},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(n_nodes)
        }
        self._replies: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, 1, 1

    @property
    def run(self) -> Run:
        """Return the run."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Take part in another run."""
        self._run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message; kept for Flower's older interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let every message be answered; return the messages' ids."""
        ids = []
        for message in messages:
            named(message)
            ids.append(message.metadata.message_id)
            self._replies[ids[-1]] = self._deliver(message)
        return ids

    def _deliver(self, message: Message) -> Message:
        try:
            with simulating() if self._simulated else nullcontext():
                return self.client_app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to some messages."""
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the answers to messages."""
        return list(self.pull_messages(self.push_messages(messages)))


def named(message: Message) -> Message:
    """Give a message an id, without which nobody can reply to it, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message


def message_to(node_id: int, kind: str, content: RecordDict) -> Message:
    """Return a message to a node of this process, as it would come from a SuperLink.

    Args:
        kind: of the function that is to answer, train or evaluate.
    """
    return named(Message(content, node_id, kind))
