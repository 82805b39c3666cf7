"""The ClientApp: a peer that trains two models, of which one never leaves it."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from feddeper.task import accuracy, build_model, digits
from flower_privdec.flower import PeerMod, personalized, train_two_models

app = ClientApp(mods=[PeerMod()])  # PeerMod(clip_norm=..., epsilon=..., delta=...) protects each peer


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train both models on the one digit this peer has."""
    peer = int(context.node_config["partition-id"])
    shuffle = torch.Generator().manual_seed(1000 * int(message.content["config"]["server-round"]) + peer)
    data = TensorDataset(*digits(peer))
    batches = DataLoader(data, int(context.run_config["batch-size"]), shuffle=True, generator=shuffle)
    return train_two_models(message, build_model(), functional.cross_entropy, batches)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Try the global and the personalized model on test images of this peer's digit."""
    test = digits(int(context.node_config["partition-id"]), test=True)
    common = accuracy(message.content["arrays"].to_torch_state_dict(), *test)
    own = accuracy(personalized(message), *test)
    metrics = MetricRecord({"global-model": common, "personalized-model": own, "num-examples": 1})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
