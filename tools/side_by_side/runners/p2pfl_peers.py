"""The task in p2pfl: every node in the train set, a full mesh in memory, federated averaging by gossip.

Its standalone settings, with heartbeats that forgive a busy machine; Ray as it comes, for without it the nodes quit.
"""

from __future__ import annotations

import time

import lightning
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from p2pfl.communication.protocols.protobuff.memory import MemoryCommunicationProtocol
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
from p2pfl.learning.frameworks.pytorch.lightning_model import LightningModel
from p2pfl.management.logger import logger
from p2pfl.node import Node
from p2pfl.settings import Settings
from p2pfl.utils.topologies import TopologyFactory, TopologyType
from p2pfl.utils.utils import set_standalone_settings, wait_convergence, wait_to_finish
from shared import Outcome, accuracy, classic, given, images, model, shares

PATIENCE = 600  # seconds


class Network(lightning.LightningModule):
    """The model as a Lightning module, as p2pfl's learner wants it."""

    def __init__(self, hidden: int, learning_rate: float) -> None:
        super().__init__()
        self.layers = model(hidden)
        self.learning_rate = learning_rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def training_step(self, batch: dict, batch_index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch["image"].float()), batch["label"])

    def test_step(self, batch: dict, batch_index: int) -> None:
        self.log("loss", torch.nn.functional.cross_entropy(self(batch["image"].float()), batch["label"]))


def relax(task: dict) -> None:
    """Take p2pfl's settings for one machine, and wait long enough for nodes that share two cores."""
    set_standalone_settings()
    Settings.heartbeat.PERIOD = 10
    Settings.heartbeat.TIMEOUT = PATIENCE
    Settings.training.VOTE_TIMEOUT = Settings.training.AGGREGATION_TIMEOUT = PATIENCE
    Settings.training.RAY_ACTOR_POOL_SIZE = task["cores"]
    Settings.gossip.TTL = task["n_peers"]
    Settings.general.LOG_LEVEL = "WARNING"
    logger.set_level("WARNING")


def dataset(x: np.ndarray, y: np.ndarray) -> Dataset:
    return Dataset.from_dict({"image": x, "label": y})


def nodes_of(task: dict) -> list[Node]:
    """Start a node for every share, with the same model."""
    x, y = (part.numpy() for part in images(task["data"], train=True))
    private = {"local_dp": {key: task[key] for key in ("clip_norm", "epsilon", "delta")}}
    nodes = []
    for index, share in enumerate(shares(len(x), task["n_peers"])):
        data = DatasetDict({"train": dataset(x[share], y[share]), "test": dataset(x[share[:32]], y[share[:32]])})
        network = LightningModel(
            Network(task["hidden"], task["learning_rate"]), compression=None if task["privacy"] == "none" else private
        )
        own = P2PFLDataset(data, batch_size=task["batch"])
        nodes.append(Node(network, own, protocol=MemoryCommunicationProtocol(), addr=f"node-{index}"))
        nodes[-1].start()
    return nodes


def main() -> None:
    task = given()
    outcome = Outcome(task)
    relax(task)
    nodes = nodes_of(task)
    try:
        TopologyFactory.connect_nodes(TopologyFactory.generate_matrix(TopologyType.FULL, len(nodes)), nodes)
        wait_convergence(nodes, len(nodes) - 1, wait=PATIENCE)
        outcome.start()
        nodes[0].set_start_learning(rounds=task["rounds"], epochs=1, trainset_size=len(nodes))
        time.sleep(1)
        wait_to_finish(nodes, timeout=task["limit"])
        ended = time.time()
        test = images(task["data"], train=False)
        reached = [accuracy(node.learner.get_model().get_model(), *test) for node in nodes]
        outcome.write(ended, float(np.mean(reached)), **({} if task["privacy"] == "none" else claims(task, nodes[0])))
    finally:
        for node in nodes:
            node.stop()


def claims(task: dict, node: Node) -> dict:
    """Return the ε of one message, as requested, and the noise that is in what a node sends of its training.

    A node sends averages, of its own model alone if need be: they have noise where they keep the setting.
    """
    sent = node.aggregator.aggregate([node.learner.get_model()])
    return {"claimed_epsilon": task["epsilon"], "noise_multiplier": classic(task) if sent.compression else 0.0}


if __name__ == "__main__":
    main()
