"""The task of all contestants, and the contestants, each set up as its own documentation recommends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

RUNNERS = Path(__file__).resolve().parent / "runners"
IMAGES = 60_000
LIMIT = 1800.0  # seconds until a contestant is given up


@dataclass(frozen=True)
class Task:
    """The task.

    Attributes:
        data: the folder that holds MNIST/raw.
        n_peers, rounds, batch, hidden, learning_rate: federated averaging over rounds of one local epoch each, of
            minibatch steps on an MLP 784-hidden-10.
        privacy: none; example: each example's gradient clipped and noised; local: each peer's update, by the peer
            itself; central: each peer's update clipped, their sum noised by the server.
        clip_norm, epsilon, delta: of the requested privacy.
        noise_multiplier: where a contestant asks for that and not for ε.
        cores: how many it may use.
        outcome: the file it writes.
    """

    data: str
    n_peers: int = 16
    rounds: int = 3
    batch: int = 32
    hidden: int = 200
    learning_rate: float = 0.1
    privacy: str = "none"
    clip_norm: float = 1.0
    epsilon: float = 3.0
    delta: float = 1e-5
    noise_multiplier: float = 0.0
    cores: int = 2
    limit: float = LIMIT
    outcome: str = ""

    @property
    def share(self) -> int:
        """Return how many images each peer holds."""
        return IMAGES // self.n_peers

    @property
    def steps(self) -> int:
        """Return the minibatch steps of a local epoch."""
        return -(-self.share // self.batch)


@dataclass(frozen=True)
class Place:
    """Where a contestant runs.

    Attributes:
        binaries: its environment's folder of commands.
        folder: a folder of its own.
        task: the file that holds the task.
    """

    binaries: Path
    folder: Path
    task: Path


@dataclass(frozen=True)
class Contestant:
    """One row of the comparison.

    Attributes:
        name: of the row; --only takes it.
        tool: of the environment; --only takes it too.
        package: whose version is printed.
        says: what the row is, for the table.
        command: how it is called, given where it runs.
        privacy: of the task.
        protects: the unit of privacy, and the adversary.
        settings: what else of the task differs.
    """

    name: str
    tool: str
    package: str
    says: str
    command: Callable[[Place], list[str]]
    privacy: str = "none"
    protects: str = ""
    settings: tuple[tuple[str, float], ...] = ()

    def task(self, data: Path, outcome: Path, cores: int) -> Task:
        """Return this contestant's task."""
        plain = Task(str(data), privacy=self.privacy, outcome=str(outcome), cores=cores)
        settings: dict[str, Any] = dict(self.settings)
        return replace(plain, **settings)


def runner(script: str, place: Place) -> list[str]:
    """Return the command of a contestant that is a Python script."""
    return [str(place.binaries / "python"), str(RUNNERS / script)]


def flower(place: Place) -> list[str]:
    """Return the command of the Flower app: a SuperNode for each peer, a core for each of those at work."""
    n_peers = json.loads(place.task.read_text())["n_peers"]
    nodes = f"num-supernodes={n_peers} client-resources-num-cpus=1"
    return [str(place.binaries / "flwr"), "run", str(RUNNERS / "flower_app"), "--stream", "--federation-config", nodes]


EXAMPLE = "one example of a peer, from everybody"
LOCAL = "all of a peer's data, from everybody"
CENTRAL = "all of a peer's data, from everybody but the server"
AT_EXAMPLES = (("learning_rate", 0.5),)
OPACUS = (*AT_EXAMPLES, ("noise_multiplier", 0.69))  # ε = 3 over the whole run by the exact accountant
FLOWER_CENTRAL = (("noise_multiplier", 2.4),)  # and so is this
CONTESTANTS = (
    Contestant("flower_privdec", "flower_privdec", "flower-privdec", "no server", partial(runner, "privdec.py")),
    Contestant("pfl-research", "pfl-research", "pfl", "server", partial(runner, "pfl_server.py")),
    Contestant("flower", "flower", "flwr", "server", flower),
    Contestant("p2pfl", "p2pfl", "p2pfl", "no server", partial(runner, "p2pfl_peers.py")),
    Contestant(
        "flower_privdec-example",
        "flower_privdec",
        "flower-privdec",
        "no server, rigorous",
        partial(runner, "privdec.py"),
        "example",
        EXAMPLE,
        AT_EXAMPLES,
    ),
    Contestant("flower-opacus", "flower", "flwr", "server, Opacus", flower, "example", EXAMPLE, OPACUS),
    Contestant("flower-local", "flower", "flwr", "server, LocalDpMod", flower, "local", LOCAL),
    Contestant(
        "flower-central", "flower", "flwr", "server-side fixed clipping", flower, "central", CENTRAL, FLOWER_CENTRAL
    ),
    Contestant(
        "pfl-research-local", "pfl-research", "pfl", "local Gaussian", partial(runner, "pfl_server.py"), "local", LOCAL
    ),
    Contestant(
        "pfl-research-central",
        "pfl-research",
        "pfl",
        "central Gaussian",
        partial(runner, "pfl_server.py"),
        "central",
        CENTRAL,
    ),
    Contestant(
        "p2pfl-local", "p2pfl", "p2pfl", "compression local_dp", partial(runner, "p2pfl_peers.py"), "local", LOCAL
    ),
)


def chosen(only: list[str]) -> list[Contestant]:
    """Return the contestants that --only names, by row or by tool; all for none."""
    names = {name for contestant in CONTESTANTS for name in (contestant.name, contestant.tool)}
    for name in only:
        if name not in names:
            sys.exit(f"--only {name} must be one of {', '.join(sorted(names))}")
    return [one for one in CONTESTANTS if not only or {one.name, one.tool} & set(only)]


def write(task: Task, path: Path) -> None:
    """Write a task for a contestant to read."""
    path.write_text(json.dumps(asdict(task)))
