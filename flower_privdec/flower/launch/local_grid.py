"""Nodes in this process: a Grid without Ray or a SuperLink, for tests and notebooks.

What it needs of Flower's internals (the identity of the running task, message ids) is here alone.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_privdec.common.arguments import check_kinds, check_paths, check_whole
from flower_privdec.common.formatting import did_you_mean
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.node_settings import simulating


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


def run_in_process(
    app: Path | str, n_nodes: int, *, config: Mapping[str, Any] | None = None, folder: Path | None = None
) -> LocalGrid:
    """Run a Flower app's ServerApp over nodes in this process, to its end.

    Args:
        app: the app's folder, with its pyproject.toml.
        n_nodes: how many nodes; each gets its partition-id and num-partitions, as in Flower's simulation.
        config: laid over the run-config of the app's pyproject.toml; keys that it has.
        folder: where the nodes keep what is theirs; by default it goes with the grid.

    Returns:
        The grid, whose contexts are the nodes'.

    Raises:
        ScenarioError: the folder is no Flower app, or has no such key.
    """
    check_app(app, n_nodes, config)
    with opened_app(Path(app), config or {}) as opened:
        grid = LocalGrid(opened.client, n_nodes, folder=folder, run_config=opened.run_config)
        opened.server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), dict(opened.run_config)))
    return grid


@dataclass(frozen=True)
class OpenedApp:
    """A Flower app whose modules are loaded.

    Attributes:
        server, client: its two components.
        run_config: of its pyproject.toml, with what was laid over it.
    """

    server: ServerApp
    client: ClientApp
    run_config: dict[str, Any]


@contextmanager
def opened_app(app: Path, config: Mapping[str, Any]) -> Iterator[OpenedApp]:
    """Load a Flower app from its folder, whose modules can be imported until the end; see `run_in_process`.

    Raises:
        ScenarioError: the folder is no Flower app, or has no such key.
    """
    settings = read_app(app)
    run_config = _laid_over(settings["config"], config)
    with _importable(app.absolute()):
        server, client = (_load(settings["components"][name]) for name in ("serverapp", "clientapp"))
        if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
            raise ScenarioError(f"{app}: its components are {type(server).__name__} and {type(client).__name__}")
        yield OpenedApp(server, client, run_config)


def check_app(app: object, n_nodes: object, config: object) -> None:
    """Refuse what cannot be run.

    Raises:
        ScenarioError: naming it.
    """
    if app is None or n_nodes is None:
        raise ScenarioError("give the app's folder, and how many nodes it runs on")
    check_paths({"app": app})
    check_whole({"n_nodes": n_nodes})
    check_kinds({"config": config}, (Mapping,), "a dict")
    if n_nodes < 1:  # type: ignore[operator]
        raise ScenarioError(f"n_nodes={n_nodes} must be >= 1")


def read_app(app: Path) -> dict[str, Any]:
    """Return what an app's pyproject.toml says of its components and its run-config, flat.

    Raises:
        ScenarioError: it says nothing of the kind.
    """
    path = app / "pyproject.toml"
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        components = {name: str(said["components"][name]) for name in ("serverapp", "clientapp")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{path} must be a Flower app's, with [tool.flwr.app.components]: {error!r}") from error
    return {"components": components, "config": _flat(said.get("config", {}))}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _laid_over(config: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        if key in config and isinstance(value, str) != isinstance(config[key], str):
            raise ScenarioError(
                f"{key}={value!r} must be of the kind that the app's run-config has, as {config[key]!r}"
            )
        if key not in config:
            raise ScenarioError(
                f"{key!r} is no key of the app's run-config{did_you_mean(key, config)}; it has {list(config)}"
            )
    return {**config, **given}


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let an app's modules be imported, and forget them afterwards: the next app may have some of the same name."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def _load(reference: str) -> object:
    module, _, name = reference.partition(":")
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except (ModuleNotFoundError, ValueError) as error:
        if not module.startswith(getattr(error, "name", None) or ""):
            raise  # what the app itself imports
        raise ScenarioError(f"component {reference!r} of pyproject.toml is in no module: {error}") from error
    if not hasattr(found, name):
        raise ScenarioError(f"component {reference!r} of pyproject.toml: {module} has no {name!r}")
    return getattr(found, name)
