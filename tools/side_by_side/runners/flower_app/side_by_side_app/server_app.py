"""The ServerApp: FedAvg over all clients, under Flower's central differential privacy where the task says so."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Result
from shared import Outcome, accuracy, classic, given, images, model

app = ServerApp()


def central(strategy: FedAvg, task: dict) -> Any:
    """Put Flower's clipping and noise on the server around a strategy, with its accountant."""
    config = PrivacyConfig(
        task["delta"], task["n_peers"], NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    )
    return DifferentialPrivacyServerSideFixedClipping(
        strategy, task["noise_multiplier"], task["clip_norm"], task["n_peers"], accountant=RdpAccountant(config)
    )


def claims(task: dict, strategy: Any, result: Result) -> dict:
    """Return the ε that Flower, or Opacus under it, gives the run."""
    if task["privacy"] == "central":
        return {"claimed_epsilon": strategy.privacy_spent().epsilon, "noise_multiplier": task["noise_multiplier"]}
    if task["privacy"] == "local":
        return {"claimed_epsilon": task["epsilon"], "noise_multiplier": classic(task)}
    if task["privacy"] == "example":
        rounds = result.train_metrics_clientapp.values()
        return {
            "claimed_epsilon": max(float(metrics["epsilon"]) for metrics in rounds),
            "noise_multiplier": task["noise_multiplier"],
        }
    return {}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and try the model at the end."""
    task = given()
    outcome = Outcome(task)
    ended = [0.0]
    strategy: Any = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=task["n_peers"])
    if task["privacy"] == "central":
        strategy = central(strategy, task)

    def after_round(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        ended[0] = time.time()
        if server_round == 0:
            outcome.start()
        return MetricRecord({"round": server_round})

    initial = ArrayRecord(model(task["hidden"]).state_dict())
    result = strategy.start(grid, initial, num_rounds=task["rounds"], evaluate_fn=after_round)
    network = model(task["hidden"])
    network.load_state_dict(result.arrays.to_torch_state_dict())
    test = images(task["data"], train=False)
    outcome.write(ended[0], accuracy(network, *test), **claims(task, strategy, result))
