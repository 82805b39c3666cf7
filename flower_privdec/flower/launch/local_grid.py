"""Nodes in this process: a Grid without Ray or a SuperLink, and the loader of an app's folder.

All use of Flower's internals (the identity of the running task, message ids) is here. They are those of flwr 1.41 to
1.43.
"""

from __future__ import annotations

import importlib
import sys
import time
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
from flower_privdec.common.errors import ScenarioError, did_you_mean
from flower_privdec.flower.node_settings import PeerCache, simulating

FIRST_NODE = 100  # the id of a LocalGrid's first node


class LocalGrid(Grid):
    """Calls a ClientApp in this process, one node after the other.

    Args:
        client_app: what every node runs.
        n_nodes: how many nodes there are.
        run_id: the run's.
        folder: the nodes' own folder; None is a temporary one that is removed with the grid.
        config: more of each node's own configuration, by index; the nodes are then deployed ones, not a simulation's.
        run_config: the run's, for every node.

    Attributes:
        folder: the nodes' own.

    Raises:
        ScenarioError: there is no node, or no ClientApp.
    """

    def __init__(
        self,
        client_app: ClientApp,
        n_nodes: int,
        run_id: int = 1,
        folder: Path | str | None = None,
        config: Mapping[int, UserConfig] | None = None,
        run_config: UserConfig | None = None,
    ) -> None:
        check_whole({"n_nodes": n_nodes})
        check_paths({"folder": folder})
        app: object = client_app
        if not callable(app):
            problem = f"client_app is a {type(app).__name__} and must be a ClientApp"
            raise ScenarioError(f"{problem}; run_in_process(FOLDER, {n_nodes}) takes an app's folder", code="grid.app")
        if n_nodes is None or n_nodes < 1:
            raise ScenarioError(f"n_nodes={n_nodes} must be >= 1", code="grid.nodes")

        self.client_app = client_app
        self._simulated = config is None
        self._run = Run.create_empty(run_id)
        self._replies: dict[str, Message] = {}

        self._temporary: TemporaryDirectory[str] | None = None
        if folder is None:
            self._temporary = TemporaryDirectory()
            folder = self._temporary.name
        self.folder = Path(folder).absolute()
        self._cache = PeerCache(self.is_temporary)

        self.contexts: dict[int, Context] = {}
        for index in range(int(n_nodes)):
            node_id = FIRST_NODE + index
            node_config: UserConfig = {"partition-id": index, "num-partitions": int(n_nodes)}
            node_config["folder"] = str(self.folder)
            node_config |= (config or {}).get(index, {})
            self.contexts[node_id] = Context(
                run_id=run_id,
                node_id=node_id,
                node_config=node_config,
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )

        # flwr (1.41 to 1.43) puts the identity of this process into every Message; a SuperLink would have given it one.
        TaskIdentity.run_id = run_id
        TaskIdentity.node_id = 1
        TaskIdentity.task_id = 1

    @property
    def simulates(self) -> bool:
        """Return whether its nodes are a simulation's, and may be told of this machine's folders."""
        return self._simulated

    @property
    def is_temporary(self) -> bool:
        """Return whether the nodes' folder is removed with the grid."""
        return self._temporary is not None

    @property
    def run(self) -> Run:
        """Return the run."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message; an abstract method of Flower's older interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the ClientApp with every message; return the messages' ids."""
        ids = []
        for message in messages:
            message_id = with_id(message).metadata.message_id
            self._replies[message_id] = self._deliver(message)
            ids.append(message_id)
        return ids

    def _deliver(self, message: Message) -> Message:
        """Return the ClientApp's reply, or an error as a SuperNode would report it."""
        try:
            with simulating(self._cache) if self._simulated else nullcontext():
                return self.client_app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    # flwr before 1.43 has `message_ids` for both arguments, and only that by position.
    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies to some messages, each once; None stands for all messages.

        Args:
            reply_to_message_ids: the ids of the messages.
            message_ids: the same by the name that flwr before 1.43 has for it.

        Raises:
            TypeError: both are given.
        """
        if message_ids is not None and reply_to_message_ids is not None:
            raise TypeError("give reply_to_message_ids or message_ids, not both: they are two names of one argument")

        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        if wanted is None:
            wanted = self._replies
        return [self._replies.pop(name) for name in list(wanted) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the replies that come in time; later ones are left for `pull_messages`.

        Args:
            messages: to the nodes, which are called one after the other.
            timeout: the seconds that each node has from when it is called: on machines of their own they would work at
                the same time. None: as long as it takes.
        """
        in_time: list[str] = []
        for message in messages:
            begun = time.monotonic()
            sent = self.push_messages([message])
            if timeout is None or time.monotonic() - begun <= timeout:
                in_time.extend(sent)
        return list(self.pull_messages(in_time))


def simulates(grid: Grid) -> bool:
    """Return whether a grid's nodes are those of a simulation on this machine; no node decides it."""
    if isinstance(grid, LocalGrid):
        return grid.simulates
    # Flower's simulation (1.41 to 1.43) gives the ServerApp an InMemoryGrid, a deployment another kind. It is told by
    # its name: to import the class takes a ServerApp as long as all else of Flower's.
    return any(base.__name__ == "InMemoryGrid" and base.__module__.startswith("flwr.") for base in type(grid).__mro__)


def with_id(message: Message) -> Message:
    """Give a message an id, which Flower needs for a reply and a SuperLink would assign, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message


def run_in_process(
    app: Path | str, n_nodes: int, *, config: Mapping[str, Any] | None = None, folder: Path | None = None
) -> LocalGrid:
    """Run a Flower app's ServerApp over nodes in this process, to its end.

    Args:
        app: the app's folder, with its pyproject.toml.
        n_nodes: how many nodes; each gets its partition-id and num-partitions, as in Flower's simulation.
        config: overrides the run-config of the app's pyproject.toml; keys that it has.
        folder: the nodes' own folder; by default a temporary one that is removed with the grid.

    Returns:
        The grid, whose contexts are the nodes'.

    Raises:
        ScenarioError: the folder is not a Flower app, or has no such key.
    """
    check_kinds({"config": config}, (Mapping,), "a dict")
    with opened_app(app, config or {}) as opened:
        grid = LocalGrid(opened.client, n_nodes, folder=folder, run_config=opened.run_config)
        opened.server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), dict(opened.run_config)))
    return grid


@dataclass(frozen=True)
class OpenedApp:
    """A Flower app whose modules are loaded.

    Attributes:
        server, client: its two components.
        run_config: the run-config in its pyproject.toml, with overrides.
    """

    server: ServerApp
    client: ClientApp
    run_config: dict[str, Any]


@contextmanager
def opened_app(app: Path | str, overrides: Mapping[str, Any]) -> Iterator[OpenedApp]:
    """Load a Flower app from its folder; its modules can be imported inside, and are unloaded afterwards.

    Raises:
        ScenarioError: the folder is not a Flower app, or its run-config has no such key.
    """
    settings = read_app(app)
    config = settings["config"]
    for key, value in overrides.items():
        problem = ""
        if key not in config:
            problem = f"{key!r} is not a key of the app's run-config{did_you_mean(key, config)}; it has {list(config)}"
        elif isinstance(value, str) != isinstance(config[key], str):
            problem = f"{key}={value!r} must be of the kind that the app's run-config has, as {config[key]!r}"
        if problem:
            raise ScenarioError(problem, code="flower.run-config")

    folder = Path(app).absolute()
    sys.path.insert(0, str(folder))
    try:
        server = _load(settings["components"]["serverapp"])
        client = _load(settings["components"]["clientapp"])
        if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
            raise ScenarioError(f"{app}: its components are {type(server).__name__} and {type(client).__name__}")
        yield OpenedApp(server, client, {**config, **overrides})
    finally:
        sys.path.remove(str(folder))
        # The next app may have modules of the same names.
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def read_app(app: Path | str | None) -> dict[str, Any]:
    """Return `components` and the flat run-config `config` of an app's pyproject.toml; raises ScenarioError."""
    check_paths({"app": app})
    if app is None:
        raise ScenarioError("app=None must be the app's folder", code="app.pyproject")

    path = Path(app) / "pyproject.toml"
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        components = {name: str(section["components"][name]) for name in ("serverapp", "clientapp")}
    except OSError as error:
        raise ScenarioError(
            f"{path}: cannot be read ({error.strerror}); give the folder of a Flower app", code="app.pyproject"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ScenarioError(
            f"{path} must be a Flower app's, with [tool.flwr.app.components]: {error!r}", code="app.pyproject"
        ) from error
    return {"components": components, "config": _flat(section.get("config", {}))}


def read_config(app: Path | str, pairs: Iterable[str]) -> dict[str, Any]:
    """Parse KEY=VALUE overrides of an app's run-config; a VALUE that is not valid TOML is taken as text.

    Raises:
        ScenarioError: the folder is not a Flower app, or has no such key.
    """
    keys = read_app(app)["config"]
    config = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or key not in keys:
            raise ScenarioError(
                f"run-config {pair!r} must be KEY=VALUE with a key of the app's: {', '.join(keys)}",
                code="flower.run-config",
            )
        try:
            config[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            config[key] = text  # plain text, without quotes

    return config


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys such as `a.b`, as Flower hands a run-config to an app."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _load(reference: str) -> object:
    """Return a component, which pyproject.toml names as module:name."""
    path, _, name = reference.partition(":")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except (ModuleNotFoundError, ValueError) as error:
        if not path.startswith(getattr(error, "name", None) or ""):
            raise  # the module is there, and something that it imports is not
        raise ScenarioError(f"component {reference!r} of pyproject.toml: {error}", code="app.component") from error
    if not hasattr(module, name):
        raise ScenarioError(f"component {reference!r} of pyproject.toml: {path} has no {name!r}", code="app.component")
    return getattr(module, name)
