"""The server: hands the model out, and saves it in the end."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_privdec.flower import PushSum
from pytorch_digits.task import Net, load_test, score

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    config = context.run_config
    torch.manual_seed(0)
    net = Net()

    strategy = PushSum("directed-exponential", fraction_evaluate=config["fraction-evaluate"])

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"learning-rate": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )

    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Try a model on the common test set."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = score(net, load_test())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
