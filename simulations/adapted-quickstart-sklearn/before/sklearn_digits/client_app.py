"""The client: trains on its own digits, and evaluates on its own."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearn_digits.task import get_params, load_data, make_model, set_params

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train for some epochs from the model that came, and answer with what became of it."""
    config = context.run_config
    node = context.node_config
    model = make_model(config["local-epochs"], config["penalty"])
    x, y, _, _ = load_data(node["partition-id"], node["num-partitions"])
    coef, intercept = msg.content["arrays"].to_numpy_ndarrays()
    model.fit(x, y, coef_init=coef, intercept_init=intercept)
    loss = log_loss(y, model.predict_proba(x), labels=model.classes_)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(get_params(model)), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Try the model that came on the client's own test digits."""
    config = context.run_config
    node = context.node_config
    model = make_model(config["local-epochs"], config["penalty"])
    set_params(model, msg.content["arrays"].to_numpy_ndarrays())
    _, _, x, y = load_data(node["partition-id"], node["num-partitions"])
    metrics = MetricRecord({"accuracy": model.score(x, y), "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
