"""The ServerApp: a strategy from the library, as any other of Flower's."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from feddeper_plain.task import CLIENTS, accuracy, build_model, digits
from flower_privdec.errors import RunError
from flower_privdec.flower.launch.error_formatting import failing_plainly
from flower_privdec.flower.strategies.feddeper_strategy import FedDeperStrategy

app = ServerApp()


@app.main()
@failing_plainly()
def main(grid: Grid, context: Context) -> None:
    """Train, and try the global model on all digits after every round."""
    given, nodes = context.run_config, len(list(grid.get_node_ids()))
    if nodes != CLIENTS:
        raise RunError(
            f"{nodes} SuperNodes must be {CLIENTS}, one for each digit: flwr run . --stream "
            f"--federation-config 'num-supernodes={CLIENTS} client-resources-num-cpus=1'"
        )
    test = digits(test=True)
    strategy = FedDeperStrategy(
        learning_rate=given["learning-rate"],
        rho=given["rho"],
        mixing_rate=given["mixing-rate"],
        local_steps=given["local-steps"],
        fraction_train=given["fraction-train"],
    )
    strategy.start(
        grid,
        ArrayRecord(build_model().state_dict()),
        num_rounds=given["num-rounds"],
        evaluate_fn=lambda _, arrays: MetricRecord({"accuracy": accuracy(arrays.to_torch_state_dict(), *test)}),
    )
