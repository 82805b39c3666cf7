"""The ClientApp: two models, of which one stays."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from feddeper_plain.task import accuracy, build_model, digits, loss
from flower_privdec.flower.strategies.feddeper_strategy import personalized, train_two_models

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train both models on the one digit this client has."""
    peer = int(context.node_config["partition-id"])
    shuffle = torch.Generator().manual_seed(1000 * int(message.content["config"]["server-round"]) + peer)
    data = TensorDataset(*digits(peer))
    batches = DataLoader(data, int(context.run_config["batch-size"]), shuffle=True, generator=shuffle)
    return train_two_models(message, context, build_model(), loss, batches)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Try the global and the personalized model on test images of this client's digit."""
    common = message.content["arrays"].to_torch_state_dict()
    own = personalized(context) or common
    test = digits(int(context.node_config["partition-id"]), test=True)
    metrics = {"global-model": accuracy(common, *test), "personalized-model": accuracy(own, *test), "num-examples": 1}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
