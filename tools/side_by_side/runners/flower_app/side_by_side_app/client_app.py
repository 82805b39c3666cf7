"""The ClientApp: a local epoch; by Opacus where examples are protected, under LocalDpMod where updates are."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from opacus import PrivacyEngine
from shared import given, images, model, shares
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()
TASK = given()
if TASK["privacy"] == "local":
    MODS = [LocalDpMod(TASK["clip_norm"], TASK["clip_norm"], TASK["epsilon"], TASK["delta"])]
else:
    MODS = []


@cache
def training_images() -> tuple[torch.Tensor, torch.Tensor]:
    return images(TASK["data"], train=True)


def loader(peer: int) -> DataLoader:
    """Return the batches of a peer's share."""
    x, y = training_images()
    share = torch.from_numpy(shares(len(x), TASK["n_peers"])[peer])
    return DataLoader(TensorDataset(x[share], y[share]), batch_size=TASK["batch"], shuffle=True)


def epoch(network: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> None:
    """Train for one epoch."""
    network.train()
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()


def private_epoch(network: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> float:
    """Train for one epoch with Opacus, and return the ε that its accountant gives this epoch."""
    engine = PrivacyEngine()
    wrapped, private, sampled = engine.make_private(
        module=network,
        optimizer=optimizer,
        data_loader=batches,
        noise_multiplier=TASK["noise_multiplier"],
        max_grad_norm=TASK["clip_norm"],
    )
    epoch(wrapped, private, sampled)
    return float(engine.get_epsilon(TASK["delta"]))


@app.train(mods=MODS)
def train(message: Message, context: Context) -> Message:
    """Train on this client's share for one epoch."""
    network = model(TASK["hidden"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=TASK["learning_rate"])
    batches = loader(int(context.node_config["partition-id"]))
    # equal shares count alike: the number of examples would be one more thing to protect
    metrics = {"num-examples": 1}
    if TASK["privacy"] == "example":
        metrics["epsilon"] = private_epoch(network, optimizer, batches)
    else:
        epoch(network, optimizer, batches)
    arrays = ArrayRecord(network.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message)
