"""The client: trains on its own digits, and evaluates on its own."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.flower import PeerMod
from pytorch_digits.task import Net, fit, load_data, score

app = ClientApp(mods=[PeerMod(clip_norm=0.5, epsilon=200.0, delta=0.01)])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train for some epochs from the model that came, and answer with what became of it."""
    config = context.run_config
    node = context.node_config
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(node["partition-id"], node["num-partitions"], config["batch-size"])
    loss = fit(net, loader, config["local-epochs"], msg.content["config"]["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Try the model that came on the client's own test digits."""
    config = context.run_config
    node = context.node_config
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(node["partition-id"], node["num-partitions"], config["batch-size"])
    loss, accuracy = score(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_accuracy": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
