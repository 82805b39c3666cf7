"""The ServerApp: the strategy FedDeper over a server."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from feddeper.task import CLIENTS, accuracy, build_model, digits
from flower_privdec.common.errors import RunError
from flower_privdec.flower import FedDeper
from flower_privdec.flower.error_formatting import one_line_failure

app = ServerApp()


@app.main()
@one_line_failure()
def main(grid: Grid, context: Context) -> None:
    """Train, and try the global model on all digits after every round."""
    config = context.run_config
    nodes = len(list(grid.get_node_ids()))
    if nodes != CLIENTS:
        raise RunError(
            f"{nodes} SuperNodes must be {CLIENTS}, one for each digit: flwr run . --stream "
            f"--federation-config 'num-supernodes={CLIENTS} client-resources-num-cpus=1'"
        )
    test = digits(test=True)
    strategy = FedDeper(
        learning_rate=config["learning-rate"],
        rho=config["rho"],
        mixing_rate=config["mixing-rate"],
        local_steps=config["local-steps"],
        fraction_train=config["fraction-train"],
    )
    strategy.start(
        grid,
        ArrayRecord(build_model().state_dict()),
        num_rounds=config["num-rounds"],
        evaluate_fn=lambda _, arrays: MetricRecord({"accuracy": accuracy(arrays.to_torch_state_dict(), *test)}),
    )
