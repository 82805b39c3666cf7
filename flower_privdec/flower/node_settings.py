"""A node's own settings, from its node-config: its peer, folder, data, budget, keys, and where its noise comes from."""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.common.user_code import only_from
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.rendezvous import GIVE as SHARD
from flower_privdec.engine.shards.rendezvous import MeetingPlace
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.flower.apps.records import Order
from flower_privdec.scenario import Scenario, parse_scenario
from flower_privdec.scenario.data_section import PEER
from flower_privdec.scenario.topology_section import TopologySection

log = logging.getLogger("flwr.privdec")

FOLDER = "PRIVDEC_FOLDER"  # the environment's word on where a simulation's peers keep what is theirs
START = "start the SuperNode with --node-config 'partition-id=I num-partitions=N folder=\"FOLDER\"'"


@dataclass(frozen=True)
class PeerSettings:
    """A node's own place.

    Attributes:
        peer, n_peers: which it is, of how many.
        folder: where its state, ledger and identity lie.
        simulated: whether the node is one of a simulation.
        epsilon, delta: the budget that its owner sets, whatever the app says; ∞ and None where there is none.
        known_peers: the file of pinned keys, or None.
        address: HOST:PORT at which other peers can reach it; empty where they cannot.
        certificates: the folder with its certificate, as `privdec certs` makes it; None where it has none.
    """

    peer: int
    n_peers: int
    folder: Path
    simulated: bool
    epsilon: float
    delta: float | None
    known_peers: Path | None
    address: str = ""
    certificates: Path | None = None

    @classmethod
    def of(cls, context: Context, addressed: int, run_folder: str, folder: Path | None) -> PeerSettings:
        """Read a node's configuration.

        Args:
            addressed: the peer that the message is for; -1 for any.
            run_folder: where a simulation's peers keep their folders by default.
            folder: the app's, where the node-config has no `folder`.

        Raises:
            RunError: it does not say which peer it is, or where its things are kept; or the message is for another.
        """
        config, simulated = context.node_config, in_simulation()
        peer, total = (_whole(config, key, START) for key in ("partition-id", "num-partitions"))
        if not 0 <= peer < total:
            raise RunError(f"partition-id={peer} must be 0 to {total - 1}; {START}")
        if addressed not in (-1, peer):
            raise RunError(f"the message is for peer {addressed}, and this SuperNode is peer {peer}")
        own = config.get("folder", folder) or (run_folder if simulated else None)
        if not own:
            raise RunError(f"this SuperNode must say where its state and ledger are kept: {START}")
        given, certificates = config.get("known-peers"), config.get("certificates")
        return cls(
            peer,
            total,
            Path(str(own)).expanduser() / f"peer-{peer}",
            simulated,
            *_budget(config, START),
            None if given is None else Path(str(given)).expanduser(),
            "" if certificates is None else str(config.get("address", "")),
            None if certificates is None else Path(str(certificates)).expanduser(),
        )


def safe_name(name: str) -> str:
    """Return a folder's name for a run, whatever that is called."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80].lstrip(".") or "run"


SECRET_BYTES = 32
GIVE = "start it with --node-config 'partition-id=I num-partitions=N ledger=\"FOLDER\" epsilon=E delta=D'"

_in_process: ContextVar[bool] = ContextVar("in_process", default=False)


@contextmanager
def simulating() -> Iterator[None]:
    """Mark what runs inside as a simulation: one user's process plays the server and all nodes."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def in_simulation() -> bool:
    """Return whether this process is a simulation's: an in-process grid, or a worker of Flower's Ray backend.

    A SuperNode runs its ClientApp in neither, and nothing that a message says has a part in it.
    """
    ray = sys.modules.get("ray")
    return _in_process.get() or (ray is not None and bool(ray.is_initialized()))


@dataclass(frozen=True)
class HostSettings:
    """A node's own part.

    Attributes:
        simulated: whether the node is one of a simulation; only then is noise drawn from keys that can be drawn again.
        folder: where its ledger, its checkpoints and its secret lie.
        data_root: where its data lie, in place of the scenario's; None in a simulation.
        data_test: where the public test set lies, likewise; None where it is with the data.
        epsilon, delta: the budget that its ledger is held to, whatever the scenario says; None in a simulation.
        partition: which peer or which shard it is; None in a simulation, where the server deals the peers out.
        partitions: of how many shards; None where nobody has said.
        place: where its shard meets the others (sharded mode); None where nobody has said.
        modules: those of its owner's that a scenario may name, in full; in a simulation it may name any.
    """

    simulated: bool
    folder: Path
    data_root: str | None = None
    data_test: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    partition: int | None = None
    partitions: int | None = None
    place: MeetingPlace | None = None
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, context: Context, run: str) -> HostSettings:
        """Read a node's configuration.

        Args:
            run: the folder of the run, in which a simulation's nodes keep what is theirs unless told otherwise.

        Raises:
            RunError: when a deployed node does not say what it has to.
        """
        config = context.node_config
        if in_simulation():
            return cls(True, Path(str(config.get("folder") or Path(run) / "nodes")))
        missing = [key for key in ("ledger", "epsilon", "delta", "partition-id") if key not in config]
        if missing:
            raise RunError(f"this SuperNode's own {', '.join(missing)} must be given, whatever a server sends: {GIVE}")
        epsilon, delta = _budget(config, GIVE)
        root, test = (None if config.get(key) is None else str(config[key]) for key in ("data-root", "data-test"))
        folder, partition = Path(str(config["ledger"])), _whole(config, "partition-id", GIVE)
        partitions = _whole(config, "num-partitions", GIVE) if "num-partitions" in config else None
        modules = frozenset(str(config.get("modules", "")).replace(",", " ").split())
        place = None
        if "shard-address" in config or "shard-meeting" in config:
            place = MeetingPlace.given(str(config.get("shard-address", "")), str(config.get("shard-meeting", "")))
        return cls(False, folder, root, test, epsilon, delta, partition, partitions, place, modules)

    def meeting(self, order: Order) -> MeetingPlace:
        """Return where the shards of an order meet: what the node's owner says, or in a simulation a file.

        Raises:
            RunError: the owner of a deployed node has not said.
        """
        if self.simulated:
            return MeetingPlace(path=self.folder / f"meeting-{order.token}")
        if self.place is None:
            raise RunError(
                "this SuperNode's own shard-address and shard-meeting must be given: shards send rows to each other "
                f"without encryption, on a private network of machines that trust each other; start it with {SHARD}"
            )
        if self.place.is_open:
            log.warning("Rows pass %s unencrypted: keep its ports to machines that you trust", self.place.address)
        return self.place

    def allowing(self) -> AbstractContextManager[None]:
        """Import nobody's code inside but what the node's owner allows: a server may write any scenario."""
        return nullcontext() if self.simulated else only_from(self.modules)

    def scenario(self, order: Order) -> Scenario:
        """Return the scenario of an order as far as this node goes along with it.

        Raises:
            RunError: when it asks a deployed node for what only a simulation may do.
        """
        if self.simulated and order.base and Path.cwd() != Path(order.base):
            os.chdir(order.base)
        scenario = parse_scenario(order.scenario)
        if scenario.private is not None and scenario.private.ledger is not None:
            raise RunError(
                f"privacy.ledger={scenario.private.ledger} is not for relay mode or shards, where each node keeps a "
                "ledger of its own: leave it out, or use cohort mode"
            )
        if self.simulated:
            return scenario
        self._check_peers(order, scenario)
        if scenario.private is None and self.epsilon != math.inf:
            raise RunError(f"privacy: none breaks this SuperNode's epsilon={self.epsilon}: set a privacy section")
        if scenario.data.batch.sampling == "shuffle":
            raise RunError(
                "data.batch.sampling='shuffle' must be another on a SuperNode: its epochs end with a process"
            )
        if isinstance(scenario.topology, TopologySection) and scenario.topology.file is not None:
            raise RunError(f"topology.file={scenario.topology.file!r} is not a server's to name: name a graph")
        paths = {"test": self.data_test}
        if not scenario.data.each_its_own:
            paths["root"] = self.data_root
        elif self.data_root is None or self.data_test is None:
            raise RunError(
                f"data.root={scenario.data.root}: each peer has its own file, so this SuperNode's own data-root and "
                'data-test must be given: start it with --node-config \'... data-root="FILE" data-test="FILE"\''
            )
        return scenario.model_copy(update={"data": scenario.data.model_copy(update=paths)})

    def _check_peers(self, order: Order, scenario: Scenario) -> None:
        """Refuse to host other peers than a deployed node's own configuration says.

        Raises:
            RunError: naming them.
        """
        if not order.shards:
            if order.peers != [self.partition]:
                raise RunError(f"this SuperNode is peer {self.partition}, not {order.peers}: run one SuperNode a peer")
            return
        shards, shard = Shards.deal(scenario.n_peers, self.partitions or 1), self.partition or 0
        if len(shards) != order.shards or not 0 <= shard < len(shards) or order.peers != shards.peers(shard).tolist():
            raise RunError(
                f"this SuperNode is partition {self.partition} of {self.partitions} and hosts that share of the "
                f"{scenario.n_peers} peers, not peers {peer_ranges(order.peers)} of {order.shards} shards"
            )
        if scenario.data.each_its_own and len(order.peers) > 1 and PEER not in (self.data_root or PEER):
            raise RunError(
                f"data-root={self.data_root!r} of this SuperNode must have {PEER} in it, for each of its "
                f"{len(order.peers)} peers has a file of its own: start it with --node-config '... "
                f'data-root="FOLDER/{PEER}.npz"\''
            )

    def parts(self, agreement: Agreement, peers: Sequence[int]) -> OwnParts:
        """Read what is its peers' own, with this node's keys, and from its own place; see `OwnParts.of`."""
        secret = None if self.simulated else self._secret()
        return OwnParts.of(agreement, np.asarray(peers), secret, root=self.data_root)

    def _secret(self) -> bytes:
        """Return what this node's runs are named by, made once by the operating system and told to nobody."""
        path = self.folder / "secret"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomically(path, secrets.token_bytes(SECRET_BYTES), private=True)
        return path.read_bytes()

    def run_folder(self, experiment: Experiment, order: Order) -> Path:
        """Return where a run's checkpoints lie; in a simulation its ledger too, which is then this run's alone."""
        if not self.simulated:
            return self.folder
        name = f"peers-{order.peers[0]}-{order.peers[-1]}"
        return self.folder / (experiment.own.run.id[:16] or "unprotected") / name


def _whole(config: Mapping[str, Any], key: str, remedy: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RunError(f"{key}={value!r} must be a whole number; {remedy}", code="node.whole-number")
    return value


def _budget(config: Mapping[str, Any], remedy: str) -> tuple[float, float | None]:
    """Return the owner's ε and δ: ∞ and None where the node-config has none."""
    epsilon, delta = (_number(config, key, remedy) for key in ("epsilon", "delta"))
    if not (epsilon is None or epsilon > 0) or not (delta is None or 0 < delta < 1):
        raise RunError(
            f"epsilon={epsilon} must be > 0 (inf for no limit) and delta={delta} in (0, 1); {remedy}",
            code="node.budget",
        )
    return math.inf if epsilon is None else epsilon, delta


def _number(config: Mapping[str, Any], key: str, remedy: str) -> float | None:
    try:
        return None if config.get(key) is None else float(config[key])
    except (TypeError, ValueError):
        raise RunError(
            f"{key}={config[key]!r} of the node-config must be a number; {remedy}", code="node.number"
        ) from None
