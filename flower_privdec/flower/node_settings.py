"""A node's own settings, read from its node-config: its peers, folder, data, budget, keys and addresses.

The rule of this module: what protects a node comes from its owner, in the node-config, and from no message. Two kinds
of nodes read it: `PeerSettings` is of one peer of a user's app (`PeerMod`), `HostSettings` of a node that hosts peers
of a scenario (`client_app`).

Either is told first whether it runs in a simulation (`in_simulation`), for only then does it take folders, modules and
keys from the server: in a simulation one person owns them all.
"""

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
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.common.files import make_owners_folder, write_atomically
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.common.user_code import only_from
from flower_privdec.scenario.app_sections import AppPrivacySection

if TYPE_CHECKING:  # over torch and the classes of a scenario, which a node that is one peer of an app does not need
    from flower_privdec.engine.shards.rendezvous import Rendezvous
    from flower_privdec.experiment import Agreement, Experiment, OwnParts
    from flower_privdec.flower.apps.records import WorkRequest
    from flower_privdec.scenario import Scenario
    from flower_privdec.scenario.sections import CancellingSection

log = logging.getLogger("flwr.privdec")

FOLDER = "PRIVDEC_FOLDER"  # environment variable: the folder of a simulation's peers
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # environment variable, as CUDA reads it
SECRET_BYTES = 32
SIMULATED_KEYS = {PARTITION_ID_KEY, NUM_PARTITIONS_KEY}  # all that a node-config of Flower's simulation has
SHARD_KEYS = ("shard-address", "shard-rendezvous")
START = "start the SuperNode with --node-config 'partition-id=I num-partitions=N folder=\"FOLDER\"'"
PAIRED = """start it with --node-config '... known-peers="FILE" colluding=Q'"""
GIVE = "start it with --node-config 'partition-id=I num-partitions=N ledger=\"FOLDER\" epsilon=E delta=D'"

# --- simulations ---


class PeerCache:
    """Caches the contents of peers' files in the memory of the one process that runs all peers.

    An entry counts as long as its file is the one that was read or written: of the same inode, size and time.

    Args:
        is_temporary: whether the peers' folders are removed with their grid, so that no state has to be written,
            nothing has to outlast the machine, and no other process writes to them: entries always count.
    """

    def __init__(self, is_temporary: bool) -> None:
        self.is_temporary = is_temporary
        self._entries: dict[Path, tuple[tuple[int, ...] | None, Any]] = {}

    def get(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return what a file holds: the entry if it still counts, else what `read` returns."""
        signature, value = self._entries.get(path, ((), None))
        if signature != self._signature(path):
            value = read()
            self.put(path, value)
        return value

    def put(self, path: Path, value: Any) -> None:
        """Record what a file holds now. One that does not exist holds it until it exists."""
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

    No message can change the answer.
    """
    if _in_process.get() is not None:
        return True

    # flwr (1.41 to 1.43) does not tell a ClientApp that it is simulated. Its Ray backend runs it in a worker process
    # of Ray. A SuperNode runs it in a process of its own, which is not a worker but a driver if the app calls
    # `ray.init()`.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    in_worker = ray.get_runtime_context().worker.mode == ray.WORKER_MODE

    # The backend gives a node only its partition. Any other key comes from an owner.
    return in_worker and node_config.keys() <= SIMULATED_KEYS


def see_gpus(visible: str) -> None:
    """Let this process of a simulation see the GPUs that the ServerApp sees.

    Ray (2.55) sets CUDA_VISIBLE_DEVICES to nothing in a worker that asked for no GPU, and flwr (1.41 to 1.43) asks for
    none unless `--federation-config client-resources-num-gpus=1.0` says so. A newcomer's `flwr run` would then compute
    on the CPU, beside an idle GPU. CUDA reads the variable once, when it starts: call this before.

    Args:
        visible: the ServerApp's CUDA_VISIBLE_DEVICES, "all" if it is not set; empty to change nothing.
    """
    if not visible or os.environ.get(VISIBLE_GPUS) != "":
        return
    if visible == "all":
        del os.environ[VISIBLE_GPUS]
    else:
        os.environ[VISIBLE_GPUS] = visible


# --- a peer of a user's app ---


@dataclass(frozen=True)
class PeerSettings:
    """The settings of a node that is one peer of a user's app (`PeerMod`).

    Attributes:
        peer, n_peers: its index, and the number of peers.
        folder: the folder of its state, ledger and identity.
        simulated: whether the node is one of a simulation.
        epsilon, delta: its owner's budget, which limits it as well as the app's; ∞ and None if the owner set none.
        known_peers: the file of pinned keys, or None.
        address: HOST:PORT at which other peers can reach it; empty if they cannot.
        certificates: the folder with its certificate, as `privdec certs` makes it; None if it has none.
        mean_peers: the fewest peers of a masked sum that this one enters; 0 in a simulation, for any two.
        charge_witnessed: whether to charge what the ledger lacks and neighbours have counted, and continue.
        colluding: the fewest colluding peers against which its ε is to hold; None if its owner does not say.
        cache: the cache of the process that runs all peers; a new one for each message if each peer has a process.
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
    colluding: int | None = None
    cache: PeerCache = field(default_factory=lambda: PeerCache(is_temporary=False), compare=False)

    @classmethod
    def of(cls, context: Context, addressed: int, run_folder: str, folder: Path | None) -> PeerSettings:
        """Read a node's configuration.

        Args:
            addressed: the peer that the message is for; -1 for any.
            run_folder: the default parent of a simulation's peer folders.
            folder: the app's default, if the node-config has no `folder`.

        Raises:
            RunError: the node-config lacks a partition or a folder, or the message is for another peer.
        """
        config = context.node_config
        simulated = in_simulation(config)

        peer = _whole(config, "partition-id", START)
        total = _whole(config, "num-partitions", START)
        if not 0 <= peer < total:
            raise RunError(f"partition-id={peer} must be 0 to {total - 1}; {START}", code="node.partition")
        if addressed not in (-1, peer):
            raise RunError(f"the message is for peer {addressed}, and this SuperNode is peer {peer}", code="node.peer")

        own_folder = config.get("folder", folder)
        if not own_folder and simulated:
            own_folder = run_folder
        if not own_folder:
            raise RunError(f"this SuperNode has no folder for its state and ledger: {START}", code="node.folder")

        # By default a deployed peer enters no sum of fewer than all peers.
        mean_peers = 0 if simulated else total
        if "mean-peers" in config:
            mean_peers = _whole(config, "mean-peers", START)
            if not 2 <= mean_peers <= total:
                raise RunError(
                    f"mean-peers={mean_peers} must be 2 to num-partitions={total}; {START}", code="node.peers"
                )

        charge_witnessed = config.get("charge-missing", False)
        if not isinstance(charge_witnessed, bool):
            raise RunError(f"charge-missing={charge_witnessed!r} must be true or false; {START}", code="node.charge")

        epsilon, delta = _budget(config, START)
        certificates = _path(config, "certificates")
        return cls(
            peer,
            total,
            _peer_folder(str(own_folder), os.environ.get("HOME"), peer),
            simulated,
            epsilon,
            delta,
            known_peers=_path(config, "known-peers"),
            address="" if certificates is None else str(config.get("address", "")),
            certificates=certificates,
            mean_peers=mean_peers,
            charge_witnessed=charge_witnessed,
            colluding=_whole(config, "colluding", PAIRED) if "colluding" in config else None,
            cache=_in_process.get() or PeerCache(is_temporary=False),
        )

    def binding_privacy(self, privacy: AppPrivacySection | None) -> AppPrivacySection | None:
        """Return what an app asks for, with the stricter of its budget and that of the peer's owner.

        Raises:
            BudgetError: the owner has a budget and nothing is protected.
        """
        if privacy is None:
            if math.isfinite(self.epsilon):
                raise BudgetError(
                    f"epsilon={self.epsilon} of the node-config needs clip_norm and noise: say "
                    "PeerMod(clip_norm=..., epsilon=...)"
                )
            return None

        epsilon = min(self.epsilon, privacy.epsilon or math.inf)
        delta = privacy.delta
        if self.delta is not None:
            delta = min(privacy.delta, self.delta)
        return privacy.model_copy(update={"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta})


@lru_cache(maxsize=4096)
def _peer_folder(parent: str, home: str | None, peer: int) -> Path:
    """Return a peer's folder; `home` is what `~` in its parent follows from."""
    return Path(parent).expanduser() / f"peer-{peer}"


def safe_name(name: str) -> str:
    """Return a run's name with all characters replaced that a folder's name cannot have."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80].lstrip(".") or "run"


# --- a host of a scenario's peers ---


def has_shard_addresses(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node's owner says where it meets the other shards."""
    return any(key in node_config for key in SHARD_KEYS)


@dataclass(frozen=True)
class HostSettings:
    """The settings of a node that hosts peers of a scenario.

    Attributes:
        simulated: whether the node is one of a simulation; only then do noise and batches follow from the scenario.
        folder: the folder of its ledger, its checkpoints and its secret.
        data_root: its data, in place of the scenario's; None in a simulation.
        data_test: the public test set, likewise; None if it is with the data.
        epsilon, delta: the ledger's budget, which no scenario can raise; None in a simulation.
        partition: the index of its peer or shard; None in a simulation, in which the server assigns peers.
        partitions: the number of shards; None if the node-config has none.
        place: the rendezvous of the shards; None if the node-config has none.
        modules: the full names of a user's own modules that a scenario may import; in a simulation it may import any.
        known_peers: the file of the identities with which it agrees on secrets of pairs; None if it does not.
        colluding: the fewest colluding peers against which its ε is to hold; None if it adds no noise of pairs.
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
            RunError: a deployed node's configuration lacks a key.
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

        place = None
        if has_shard_addresses(config):
            address, rendezvous = (str(config.get(key, "")) for key in SHARD_KEYS)
            place = Rendezvous.given(address, rendezvous)

        epsilon, delta = _budget(config, GIVE)
        return cls(
            simulated=False,
            folder=Path(str(config["ledger"])),
            data_root=_text(config, "data-root"),
            data_test=_text(config, "data-test"),
            epsilon=epsilon,
            delta=delta,
            partition=_whole(config, "partition-id", GIVE),
            partitions=_whole(config, "num-partitions", GIVE) if "num-partitions" in config else None,
            place=place,
            modules=frozenset(str(config.get("modules", "")).replace(",", " ").split()),
            known_peers=_path(config, "known-peers"),
            colluding=_whole(config, "colluding", PAIRED) if "colluding" in config else None,
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
            RunError: it needs of a deployed node what only a simulation permits.
        """
        from flower_privdec.scenario import parse_scenario

        # An actor of Ray's starts in a folder of its own; the user's modules and data are relative to this one.
        if self.simulated and request.base and Path.cwd() != Path(request.base):
            os.chdir(request.base)

        scenario = parse_scenario(request.scenario)
        check_hosting(scenario, simulated=self.simulated)
        if self.simulated:
            return scenario

        problem = self._not_hosted(scenario, request) or self._not_allowed(scenario) or self._no_data(scenario)
        if problem:
            raise RunError(problem, code="node.scenario")

        paths = {"test": self.data_test}
        if not scenario.data.each_its_own:
            paths["root"] = self.data_root
        return scenario.model_copy(update={"data": scenario.data.model_copy(update=paths)})

    def _not_hosted(self, scenario: Scenario, request: WorkRequest) -> str:
        """Return why the request's peers are not this node's; empty if they are."""
        from flower_privdec.scenario.sections import PEER

        if request.shards:
            role = f"shard {self.partition} of {self.partitions}"
            own_peers = self._shard_peers(scenario.n_peers, request.shards)
        else:
            role = f"peer {self.partition}"
            own_peers = [self.partition]

        if not request.peers or request.peers != own_peers:
            return (
                f"this SuperNode is {role} of the {scenario.n_peers} peers, and the request is for peers "
                f"{peer_ranges(request.peers)} of {request.shards} shards: run one SuperNode a peer or a shard"
            )

        if scenario.data.each_its_own and len(request.peers) > 1 and PEER not in (self.data_root or PEER):
            return (
                f"data-root={self.data_root!r} of this SuperNode must have {PEER} in it, for each of its "
                f"{len(request.peers)} peers has a file of its own: start it with --node-config '... "
                f'data-root="FOLDER/{PEER}.npz"\''
            )

        return ""

    def _shard_peers(self, n_peers: int, n_shards: int) -> list[int | None]:
        """Return the peers of this node's own shard; none if the request is for another number of shards."""
        from flower_privdec.engine.shards.communication_plan import Shards

        shards = Shards.split(n_peers, self.partitions or 1)
        shard = self.partition or 0
        if len(shards) != n_shards or not 0 <= shard < len(shards):
            return []
        return list(shards.peers(shard).tolist())

    def _not_allowed(self, scenario: Scenario) -> str:
        """Return what of a server's scenario this node's owner does not allow; empty if nothing."""
        from flower_privdec.scenario.sections import CancellingSection, TopologySection

        private = scenario.private
        topology = scenario.topology
        if private is None and self.epsilon != math.inf:
            return f"privacy: none breaks this SuperNode's epsilon={self.epsilon}: set a privacy section"
        if isinstance(topology, TopologySection) and topology.file_to_read is not None:
            return f"topology.file={topology.file_to_read!r} is not a server's to name: name a graph"
        if private is not None and isinstance(private.noise, CancellingSection):
            problem = self._no_pairs(private.noise)
            if problem:
                return problem
        if scenario.model.origin is not None:
            return f"model.from={scenario.model.origin!r} is not a server's to name: name a model"
        return ""

    def _no_pairs(self, noise: CancellingSection) -> str:
        """Return why this node's owner does not allow noise that cancels between peers; empty if they do."""
        if noise.secrets.file_to_read is not None:
            return f"privacy.noise.secrets.file={noise.secrets.file_to_read!r} is not a server's to name: name a graph"

        if self.known_peers is None or self.colluding is None:
            from flower_privdec.peer.identity import public_key

            public_key(self.folder)  # writes identity.pub, which the error names
            return (
                "privacy.noise.kind=cancelling is for this SuperNode's owner to allow, who names the others' keys "
                'in a file {"PEER": "KEY"} (its own is in identity.pub, beside its ledger), and how many peers may '
                f"collude: {PAIRED}"
            )

        if noise.colluding < self.colluding:
            return (
                f"privacy.noise.colluding={noise.colluding} must be >= colluding={self.colluding} of this SuperNode's "
                "node-config, because its epsilon must hold against as many: raise it in the scenario"
            )
        return ""

    def _no_data(self, scenario: Scenario) -> str:
        """Return which of its own data this node lacks; empty if none."""
        data = scenario.data
        if data.each_its_own and (self.data_root is None or self.data_test is None):
            return (
                f"data.root={data.root}: each peer has its own file, so this SuperNode's own data-root and data-test "
                'must be given: start it with --node-config \'... data-root="FILE" data-test="FILE"\''
            )
        return ""

    def parts(self, agreement: Agreement, request: WorkRequest) -> OwnParts:
        """Read the private parts of a request's peers, with this node's keys and data; see `OwnParts.of`."""
        from flower_privdec.experiment import OwnParts

        # A deployed node's names of runs follow from a secret that never leaves it.
        secret = None
        if not self.simulated:
            path = self.folder / "secret"
            make_owners_folder(self.folder)
            if not path.exists():
                write_atomically(path, secrets.token_bytes(SECRET_BYTES))
            secret = path.read_bytes()

        if request.shards:
            runtime = f"{request.shards} shards"
        else:
            runtime = f"relay over {request.nodes} nodes"
        peers = np.asarray(request.peers)
        return OwnParts.of(agreement, peers, secret, self.data_root, runtime, salt=request.salt or None)

    def run_folder(self, experiment: Experiment, request: WorkRequest) -> Path:
        """Return the folder of a run's checkpoints; in a simulation its ledger is there too, of this run only."""
        if not self.simulated:
            return self.folder
        name = f"peers-{request.peers[0]}-{request.peers[-1]}"
        return self.folder / (experiment.own.run.id[:16] or "unprotected") / name


def check_hosting(scenario: Scenario, *, simulated: bool, salted: bool = False) -> None:
    """Refuse a scenario whose peers cannot be spread over several nodes.

    The server checks this before it starts, and each node does so for itself.

    Args:
        simulated: whether the nodes are a simulation's.
        salted: whether it has code of a user's own, so that each message pays for what it draws.

    Raises:
        ScenarioError: with the setting, and what to take in its place.
    """
    from flower_privdec.scenario.sections import CancellingSection

    together = "leave mode out, for a simulation that hosts all peers in one SuperNode"
    private = scenario.private
    cancelling = private is not None and isinstance(private.noise, CancellingSection)
    if cancelling and scenario.data.each_its_own and scenario.data.at_least is None:
        raise ScenarioError(
            "privacy.noise.kind=cancelling needs the number of every peer's examples, and no node has those of other "
            f"peers: set data.at_least, a number that each peer has, or {together}",
            code="noise.cancelling-sizes",
        )

    if private is not None and private.ledger is not None:
        raise ScenarioError(
            f"privacy.ledger={private.ledger} is not for relay mode or shards, in which each node keeps a ledger of "
            f"its own: leave it out, or {together}",
            code="node.scenario",
        )

    draws_anew = salted or scenario.compute.generator == "system" or not simulated
    if scenario.data.batch.sampling == "shuffle" and draws_anew:
        raise ScenarioError(
            "data.batch.sampling='shuffle' must be another on SuperNodes whose batches come from the operating system "
            f"or that have code of your own, for its epochs end with a process: take poisson or uniform, or {together}",
            code="node.scenario",
        )
    if private is not None and private.correlated_noise is not None and draws_anew:
        raise ScenarioError(
            "noise that is correlated over steps (privacy.noise.kind=correlated, or bands of kind=cancelling) must be "
            "left out on SuperNodes whose noise comes from the operating system or that have code of your own, for "
            f"what is remembered of it ends with each message; or {together}",
            code="node.scenario",
        )


# --- values of a node-config ---


def _text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    return None if value is None else str(value)


def _path(config: Mapping[str, Any], key: str) -> Path | None:
    value = config.get(key)
    return None if value is None else Path(str(value)).expanduser()


def _whole(config: Mapping[str, Any], key: str, remedy: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RunError(f"{key}={value!r} must be a whole number; {remedy}", code="node.whole-number")
    return value


def _budget(config: Mapping[str, Any], remedy: str) -> tuple[float, float | None]:
    """Return the owner's ε and δ: ∞ and None if the node-config has none."""
    epsilon = _number(config, "epsilon", remedy)
    delta = _number(config, "delta", remedy)
    # NaN compares as False, and is refused as well.
    if not (epsilon is None or epsilon > 0) or not (delta is None or 0 < delta < 1):
        raise RunError(
            f"epsilon={epsilon} must be > 0 (inf for no limit) and delta={delta} in (0, 1); {remedy}",
            code="node.budget",
        )
    return math.inf if epsilon is None else epsilon, delta


def _number(config: Mapping[str, Any], key: str, remedy: str) -> float | None:
    if config.get(key) is None:
        return None
    try:
        return float(config[key])
    except (TypeError, ValueError):
        raise RunError(
            f"{key}={config[key]!r} of the node-config must be a number; {remedy}", code="node.number"
        ) from None
