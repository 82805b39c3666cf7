"""A SuperNode's part in a mesh: all rounds inside one train message, over direct connections to the other nodes.

The SuperLink and the ServerApp introduce the nodes: they say who is where, what the graph is, and how many rounds there
are. What they say is not trusted with more than that. It names no path, no code and no key: a node's certificate and
the authority's come from its own node-config, so whoever introduces the nodes cannot stand between them; the budget is
the node's own; and the node listens where its own node-config says, and nowhere else. What they can do: send nodes to
addresses where nobody, or somebody else, answers the handshake; and say nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, MetricRecord

from flower_privdec.errors import RunError
from flower_privdec.flower.mods.peer_state import PeerState, numpy_arrays
from flower_privdec.flower.mods.private_update import PeerPrivacy
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.flower.serverless.app_peer import AppTrainer, app_peer
from flower_privdec.flower.serverless.initial_arrays import InitialArrays
from flower_privdec.network.peer.peer import PeerDevice
from flower_privdec.network.transport.tls import credentials_of
from flower_privdec.scenario.app_scenario import AppPrivacySection, AppScenario, parse_app_scenario
from flower_privdec.scenario.topology_section import TopologySection

if TYPE_CHECKING:
    from flower_privdec.flower.mods.peer_mod import Asked

NEEDS = 'start the SuperNode with --node-config \'address="HOST:PORT" certificates="FOLDER" ...\''
LEAST_RETRY = 0.05  # seconds: no message makes a node call others as fast as it can


@dataclass(frozen=True)
class MeshApp:
    """An app's train function, called within a message; it is not asked to evaluate there.

    Attributes:
        call: given arrays and the round, returns the arrays after training.
    """

    call: Callable[[ArrayRecord, int], ArrayRecord]

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """See TrainedApp."""
        return self.call(arrays, server_round)

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> Mapping[str, MetricRecord]:
        """See TrainedApp."""
        return {}


def run_mesh(asked: Asked, place: PeerSettings, privacy: PeerPrivacy, initial: ArrayRecord, app: MeshApp) -> PeerState:
    """Run a peer until its rounds are done, or on from where it was, and return its mass.

    Raises:
        RunError: the run could not go on, or what is asked is more than a SuperLink may ask.
        ScenarioError: certificates or arrays do not fit.
        BudgetError: the ledger cannot be trusted, or is in use.
    """
    scenario = _agreed(asked, place)
    assert scenario.network.peers is not None
    assert place.certificates is not None
    folder = mesh_folder(place, asked.run)
    credentials = credentials_of(scenario, place.certificates, place.peer)
    addresses = tuple(each.address for each in scenario.network.peers)
    device = PeerDevice(place.peer, folder, credentials, addresses)
    begun = InitialArrays(numpy_arrays(initial), asked.arrays)
    resume = any(folder.glob("checkpoint-?"))
    running = app_peer(scenario, device, begun, app, resume, _own_privacy(place, privacy))
    try:
        running.open()
        running.run()
        assert isinstance(running.trainer, AppTrainer)
        return running.trainer.result(running.state)
    finally:
        running.close()


def mesh_folder(place: PeerSettings, run: str) -> Path:
    """Return where a node keeps a mesh run's checkpoints."""
    return place.folder / f"mesh-{run}"


def _agreed(asked: Asked, place: PeerSettings) -> AppScenario:
    """Return the scenario that a message brings, where it says no more than it may.

    Raises:
        RunError: naming what is too much, or what this node lacks.
    """
    scenario = parse_app_scenario(asked.scenario, where="the scenario of the train message")
    if not place.address or place.certificates is None:
        raise RunError(f"peer {place.peer} has no address or no certificates of its own; {NEEDS}")
    topology, peers = scenario.topology, scenario.network.peers
    if not isinstance(topology, TopologySection) or topology.file is not None:
        raise RunError("the scenario of the train message names code or a file, which no message may")
    if scenario.private is not None or scenario.network.hands_in or scenario.run_config:
        raise RunError("the scenario of the train message has privacy, hand_in or run_config, which are the node's own")
    if scenario.network.retry < LEAST_RETRY:
        raise RunError(f"network.retry={scenario.network.retry} of the train message must be >= {LEAST_RETRY}")
    if scenario.name != asked.run or scenario.n_peers != place.n_peers or peers is None:
        raise RunError(
            f"the scenario of the train message is of {scenario.name!r} with {scenario.n_peers} peers, and this is run "
            f"{asked.run!r} with {place.n_peers}, all of whose addresses have to be there"
        )
    if peers[place.peer].address != place.address:
        raise RunError(f"the train message says that this node is at {peers[place.peer].address}, not {place.address}")
    return scenario


def _own_privacy(place: PeerSettings, privacy: PeerPrivacy) -> AppPrivacySection | None:
    """Return what protects this peer: as the app says, held to its owner's budget, in its own ledger."""
    if privacy.clip_norm is None:
        privacy.budget(place)  # which refuses an owner's budget that nothing keeps
        return None
    epsilon, delta = privacy.budget(place)
    return AppPrivacySection(
        clip_norm=privacy.clip_norm,
        noise_multiplier=privacy.noise_multiplier,
        epsilon=epsilon if epsilon < float("inf") else None,
        delta=delta,
        ledger=str(place.folder),
    )
