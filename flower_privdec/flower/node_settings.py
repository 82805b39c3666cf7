"""A node's own settings, read from its node-config: its peers, folder, data, budget, keys and addresses."""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import make_owners_folder, write_atomically
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.common.user_code import only_from
from flower_privdec.scenario import Scenario, parse_scenario
from flower_privdec.scenario.sections import PEER, CancellingSection, TopologySection

if TYPE_CHECKING:  # over torch, which a node that is one peer of an app does not need
    from flower_privdec.engine.shards.rendezvous import Rendezvous
    from flower_privdec.experiment import Agreement, Experiment, OwnParts
    from flower_privdec.flower.apps.records import WorkRequest

log = logging.getLogger("flwr.privdec")

FOLDER = "PRIVDEC_FOLDER"  # environment variable: the folder of a simulation's peers
SECRET_BYTES = 32
SIMULATED_KEYS = {PARTITION_ID_KEY, NUM_PARTITIONS_KEY}  # all that a node-config of Flower's simulation has
START = "start the SuperNode with --node-config 'partition-id=I num-partitions=N folder=\"FOLDER\"'"
PAIRED = """start it with --node-config '... known-peers="FILE" colluding=Q'"""
GIVE = "start it with --node-config 'partition-id=I num-partitions=N ledger=\"FOLDER\" epsilon=E delta=D'"


@dataclass(frozen=True)
class PeerSettings:
    """The settings of a node that is one peer of a user's app (`PeerMod`).

    Attributes:
        peer, n_peers: its index, and the number of peers.
        folder: of its state, ledger and identity.
        simulated: whether the node is one of a simulation.
        epsilon, delta: its owner's budget, which holds beside the app's; ∞ and None where there is none.
        known_peers: the file of pinned keys, or None.
        address: HOST:PORT at which other peers can reach it; empty where they cannot.
        certificates: the folder with its certificate, as `privdec certs` makes it; None where it has none.
        mean_peers: the fewest peers of a masked sum that this one enters; 0 in a simulation, for any two.
        charge_witnessed: whether to charge what the ledger lacks and neighbours have counted, and continue.
        cache: of the process that runs all peers; a new one for each message where each has a process.
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
    mean_peers: int = 0
    charge_witnessed: bool = False
    cache: PeerCache = field(default_factory=lambda: PeerCache(is_temporary=False), compare=False)

    @classmethod
    def of(cls, context: Context, addressed: int, run_folder: str, folder: Path | None) -> PeerSettings:
        """Read a node's configuration.

        Args:
            addressed: the peer that the message is for; -1 for any.
            run_folder: the default parent of a simulation's peer folders.
            folder: the app's default, where the node-config has no `folder`.

        Raises:
            RunError: the node-config lacks a partition or a folder, or the message is for another peer.
        """
        config = context.node_config
        simulated = in_simulation(context.node_config)
        peer, total = (_whole(config, key, START) for key in ("partition-id", "num-partitions"))
        if not 0 <= peer < total:
            raise RunError(f"partition-id={peer} must be 0 to {total - 1}; {START}", code="node.partition")
        if addressed not in (-1, peer):
            raise RunError(f"the message is for peer {addressed}, and this SuperNode is peer {peer}", code="node.peer")
        own = config.get("folder", folder) or (run_folder if simulated else None)
        if not own:
            raise RunError(f"this SuperNode has no folder for its state and ledger: {START}", code="node.folder")
        known_peers = config.get("known-peers")
        certificates = config.get("certificates")
        mean_peers = _whole(config, "mean-peers", START) if "mean-peers" in config else 0 if simulated else total
        if "mean-peers" in config and not 2 <= mean_peers <= total:
            raise RunError(f"mean-peers={mean_peers} must be 2 to num-partitions={total}; {START}", code="node.peers")
        charge = config.get("charge-witnessed", False)
        if not isinstance(charge, bool):
            raise RunError(f"charge-witnessed={charge!r} must be true or false; {START}", code="node.charge")
        return cls(
            peer,
            total,
            Path(str(own)).expanduser() / f"peer-{peer}",
            simulated,
            *_budget(config, START),
            None if known_peers is None else Path(str(known_peers)).expanduser(),
            "" if certificates is None else str(config.get("address", "")),
            None if certificates is None else Path(str(certificates)).expanduser(),
            mean_peers,
            charge,
            _in_process.get() or PeerCache(is_temporary=False),
        )


def safe_name(name: str) -> str:
    """Return a run's name with all characters replaced that a folder's name cannot have."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80].lstrip(".") or "run"


class PeerCache:
    """What the files of peers hold, in the memory of the one process that runs them all.

    An entry counts as long as its file is the one that was read or written: of the same inode, size and time.

    Args:
        is_temporary: whether the peers' folders are removed with their grid, so that no state has to be written,
            nothing has to outlast the machine, and no other process writes to them: entries always count.
    """

    def __init__(self, is_temporary: bool) -> None:
        self.is_temporary = is_temporary
        self._entries: dict[Path, tuple[tuple[int, ...] | None, Any]] = {}

    def get(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return what a file holds, as `read` returns it where the entry does not count."""
        signature, value = self._entries.get(path, ((), None))
        if signature != self._signature(path):
            value = read()
            self.put(path, value)
        return value

    def put(self, path: Path, value: Any) -> None:
        """Record what a file holds now; one that is not there holds it until it is."""
        self._entries[path] = (self._signature(path), value)

    def _signature(self, path: Path) -> tuple[int, ...] | None:
        if self.is_temporary:
            return None
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_in_process: ContextVar[PeerCache | None] = ContextVar("in_process", default=None)


@contextmanager
def simulating(cache: PeerCache | None = None) -> Iterator[None]:
    """Mark what runs inside as a simulation: one process runs the server and all nodes, and has the cache."""
    token = _in_process.set(cache or PeerCache(is_temporary=False))
    try:
        yield
    finally:
        _in_process.reset(token)


def in_simulation(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node is one of a simulation: of an in-process grid, or of Flower's Ray backend.

    Flower's backend gives a node its partition alone and runs it in a worker process of Ray. A SuperNode runs its
    ClientApp in a process of its own, which is a driver where the app calls `ray.init()`; and an owner's node-config
    with any other key is no simulation's. No message can change the answer.
    """
    ray = sys.modules.get("ray")
    in_worker = ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
    return _in_process.get() is not None or (in_worker and node_config.keys() <= SIMULATED_KEYS)


@dataclass(frozen=True)
class HostSettings:
    """The settings of a node that hosts peers of a scenario.

    Attributes:
        simulated: whether the node is one of a simulation; only then do noise and batches follow from the scenario.
        folder: of its ledger, its checkpoints and its secret.
        data_root: its data, in place of the scenario's; None in a simulation.
        data_test: the public test set, likewise; None where it is with the data.
        epsilon, delta: the ledger's budget, which no scenario can raise; None in a simulation.
        partition: the index of its peer or shard; None in a simulation, where the server assigns peers.
        partitions: the number of shards; None where the node-config has none.
        place: the rendezvous of the shards (sharded mode); None where the node-config has none.
        modules: the full names of a user's own modules that a scenario may import; in a simulation it may import any.
        known_peers: the file of the identities with which it agrees on secrets of pairs; None where it does not.
        colluding: the fewest colluding peers against which its ε is to hold; None where it adds no noise of pairs.
    """

    simulated: bool
    folder: Path
    data_root: str | None = None
    data_test: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    partition: int | None = None
    partitions: int | None = None
    place: Rendezvous | None = None
    modules: frozenset[str] = frozenset()
    known_peers: Path | None = None
    colluding: int | None = None

    @classmethod
    def of(cls, context: Context, run: str) -> HostSettings:
        """Read a node's configuration.

        Args:
            run: the run's folder, the default parent of a simulation's node folders.

        Raises:
            RunError: when a deployed node's configuration lacks a key.
        """
        from flower_privdec.engine.shards.rendezvous import Rendezvous

        config = context.node_config
        if in_simulation(config):
            return cls(True, Path(str(config.get("folder") or Path(run) / "nodes")))
        missing = [key for key in ("ledger", "epsilon", "delta", "partition-id") if key not in config]
        if missing:
            raise RunError(
                f"this SuperNode's node-config lacks {', '.join(missing)}, which no server may set: {GIVE}",
                code="node.missing",
            )
        epsilon, delta = _budget(config, GIVE)
        root, test = (None if config.get(key) is None else str(config[key]) for key in ("data-root", "data-test"))
        folder = Path(str(config["ledger"]))
        partition = _whole(config, "partition-id", GIVE)
        partitions = _whole(config, "num-partitions", GIVE) if "num-partitions" in config else None
        modules = frozenset(str(config.get("modules", "")).replace(",", " ").split())
        place = None
        if "shard-address" in config or "shard-rendezvous" in config:
            place = Rendezvous.given(str(config.get("shard-address", "")), str(config.get("shard-rendezvous", "")))
        identities = Path(str(config["known-peers"])).expanduser() if "known-peers" in config else None
        colluding = _whole(config, "colluding", PAIRED) if "colluding" in config else None
        return cls(
            False, folder, root, test, epsilon, delta, partition, partitions, place, modules, identities, colluding
        )

    def rendezvous(self, request: WorkRequest) -> Rendezvous:
        """Return the rendezvous of a request's shards: the node-config's, or in a simulation a file.

        Raises:
            RunError: a deployed node's configuration has none.
        """
        from flower_privdec.engine.shards.rendezvous import GIVE as SHARD
        from flower_privdec.engine.shards.rendezvous import Rendezvous

        if self.simulated:
            return Rendezvous(path=self.folder / f"rendezvous-{request.token}")
        if self.place is None:
            raise RunError(
                "this SuperNode's node-config lacks shard-address and shard-rendezvous: shards send rows to each other "
                f"without encryption, on a private network of machines that trust each other; start it with {SHARD}",
                code="node.missing",
            )
        if self.place.is_open:
            log.warning("Rows pass %s unencrypted: keep its ports to machines that you trust", self.place.address)
        return self.place

    def allowing(self) -> AbstractContextManager[None]:
        """Import inside only those users' modules that the node-config allows: a server may write any scenario."""
        return nullcontext() if self.simulated else only_from(self.modules)

    def scenario(self, request: WorkRequest) -> Scenario:
        """Return the scenario of a request, with this node's own data paths.

        Raises:
            ScenarioError: no node can host a part of its peers, see `check_hosting`.
            RunError: when it needs of a deployed node what only a simulation permits.
        """
        if self.simulated and request.base and Path.cwd() != Path(request.base):
            os.chdir(request.base)
        scenario = parse_scenario(request.scenario)
        data = scenario.data
        private = scenario.private
        topology = scenario.topology
        noise = None if private is None else private.noise
        own_peers = [self.partition]
        role = f"peer {self.partition}"
        if request.shards:
            from flower_privdec.engine.shards.communication_plan import Shards

            shards = Shards.split(scenario.n_peers, self.partitions or 1)
            shard = self.partition or 0
            own_peers = []
            role = f"shard {self.partition} of {self.partitions}"
            if len(shards) == request.shards and 0 <= shard < len(shards):
                own_peers = shards.peers(shard).tolist()
        check_hosting(scenario, simulated=self.simulated)
        if self.simulated:
            return scenario
        problem = ""
        if not request.peers or request.peers != own_peers:
            problem = (
                f"this SuperNode is {role} of the {scenario.n_peers} peers, and the request is for peers "
                f"{peer_ranges(request.peers)} of {request.shards} shards: run one SuperNode a peer or a shard"
            )
        elif data.each_its_own and len(request.peers) > 1 and PEER not in (self.data_root or PEER):
            problem = (
                f"data-root={self.data_root!r} of this SuperNode must have {PEER} in it, for each of its "
                f"{len(request.peers)} peers has a file of its own: start it with --node-config '... "
                f'data-root="FOLDER/{PEER}.npz"\''
            )
        elif private is None and self.epsilon != math.inf:
            problem = f"privacy: none breaks this SuperNode's epsilon={self.epsilon}: set a privacy section"
        elif isinstance(topology, TopologySection) and topology.file is not None:
            problem = f"topology.file={topology.file!r} is not a server's to name: name a graph"
        elif isinstance(noise, CancellingSection) and noise.secrets.file is not None:
            problem = f"privacy.noise.secrets.file={noise.secrets.file!r} is not a server's to name: name a graph"
        elif isinstance(noise, CancellingSection) and (self.known_peers is None or self.colluding is None):
            from flower_privdec.flower.mods.peer_state import public_key

            public_key(self.folder)
            problem = (
                "privacy.noise.kind=cancelling is for this SuperNode's owner to allow, who names the others' keys "
                'in a file {"PEER": "KEY"} (its own is in identity.pub, beside its ledger), and how many peers may '
                f"collude: {PAIRED}"
            )
        elif isinstance(noise, CancellingSection) and noise.colluding < (self.colluding or 0):
            problem = (
                f"privacy.noise.colluding={noise.colluding} must be >= colluding={self.colluding} of this SuperNode's "
                "node-config, for its epsilon is to hold against as many: raise it in the scenario"
            )
        elif scenario.model.origin is not None:
            problem = f"model.from={scenario.model.origin!r} is not a server's to name: name a model"
        elif data.each_its_own and (self.data_root is None or self.data_test is None):
            problem = (
                f"data.root={data.root}: each peer has its own file, so this SuperNode's own data-root and data-test "
                'must be given: start it with --node-config \'... data-root="FILE" data-test="FILE"\''
            )
        if problem:
            raise RunError(problem, code="node.scenario")
        paths = {"test": self.data_test} if data.each_its_own else {"test": self.data_test, "root": self.data_root}
        return scenario.model_copy(update={"data": data.model_copy(update=paths)})

    def parts(self, agreement: Agreement, request: WorkRequest) -> OwnParts:
        """Read the private parts of a request's peers, with this node's keys and data; see `OwnParts.of`."""
        from flower_privdec.experiment import OwnParts

        secret = None
        path = self.folder / "secret"
        if not self.simulated:  # the secret key of this node's run names, which never leaves
            make_owners_folder(self.folder)
            if not path.exists():
                write_atomically(path, secrets.token_bytes(SECRET_BYTES))
            secret = path.read_bytes()
        runtime = f"{request.shards} shards" if request.shards else f"relay over {request.nodes} nodes"
        peers = np.asarray(request.peers)
        salt = request.salt or None
        return OwnParts.of(agreement, peers, secret, self.data_root, runtime, salt=salt)

    def run_folder(self, experiment: Experiment, request: WorkRequest) -> Path:
        """Return the folder of a run's checkpoints; in a simulation its ledger too, which is then this run's alone."""
        if not self.simulated:
            return self.folder
        name = f"peers-{request.peers[0]}-{request.peers[-1]}"
        return self.folder / (experiment.own.run.id[:16] or "unprotected") / name


def check_hosting(scenario: Scenario, *, simulated: bool, salted: bool = False) -> None:
    """Refuse a scenario whose peers cannot be spread over nodes, as in Flower's modes relay and sharded.

    The server asks before it starts, and each node for itself.

    Args:
        simulated: whether the nodes are a simulation's.
        salted: whether it has code of a user's own, so that each message pays for what it draws.

    Raises:
        ScenarioError: with the setting, and what to take in its place.
    """
    private = scenario.private
    batch = scenario.data.batch
    cancelling = private is not None and isinstance(private.noise, CancellingSection)
    if cancelling and scenario.data.each_its_own and scenario.data.at_least is None:
        raise ScenarioError(
            "privacy.noise.kind=cancelling needs the number of every peer's examples, and no node has those of other "
            "peers: set data.at_least, a number that each peer has, or use cohort mode",
            code="noise.cancelling-sizes",
        )
    if private is not None and private.ledger is not None:
        raise ScenarioError(
            f"privacy.ledger={private.ledger} is not for relay mode or shards, where each node keeps a ledger of its "
            "own: leave it out, or use cohort mode",
            code="node.scenario",
        )
    draws_anew = salted or scenario.compute.generator == "system" or not simulated
    if batch.sampling == "shuffle" and draws_anew:
        raise ScenarioError(
            "data.batch.sampling='shuffle' must be another on SuperNodes whose batches come from the operating system "
            "or that have code of your own, for its epochs end with a process: take poisson or uniform, or in a "
            "simulation cohort mode",
            code="node.scenario",
        )


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
