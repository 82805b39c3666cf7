"""The server: hands the model out, and saves it in the end."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from sklearn_digits.task import get_params, load_test, make_model, set_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    config = context.run_config
    model = make_model(config["local-epochs"], config["penalty"])

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_params(model)),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )

    np.savez("final_model.npz", *result.arrays.to_numpy_ndarrays())


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Try a model on the common test set."""
    model = make_model(1, 0.001)
    set_params(model, arrays.to_numpy_ndarrays())
    x, y = load_test()
    return MetricRecord({"accuracy": float(model.score(x, y))})
