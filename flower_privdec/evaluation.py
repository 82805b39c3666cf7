"""Accuracy, loss and consensus of the peers' models on the public test set."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flower_privdec.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.gradients import resolve_loss


def consensus_distance(models: Tensor) -> float:
    """Return the root mean square distance of the peers' models [m, d] from their mean."""
    mean = models.mean(0)
    squares = [float((row - mean).square().sum()) for row in models]
    return math.sqrt(sum(squares) / len(squares))


def evaluate(experiment: Experiment, rows: dict[str, Tensor], round_index: int) -> dict[str, Any]:
    """Try the network's mean model and every peer's on the test set.

    Args:
        rows: the state's rows of all peers.
        round_index: rounds done so far, for the error message.

    Returns:
        accuracy (mean_model, peer_mean, peer_min, peer_max), loss (mean_model, in nats), consensus_distance.

    Raises:
        RunError: when a peer's parameters are no longer finite.
    """
    models = experiment.algorithm.debiased(rows)
    finite = torch.isfinite(models).all(1)
    if not bool(finite.all()):
        peer = int((~finite).nonzero()[0])
        raise RunError(
            f"round {round_index}: the parameters of peer {peer} are no longer finite: the run diverged; "
            "lower algorithm.learning_rate or the noise"
        )
    mean = experiment.algorithm.network_mean(rows)
    loss = resolve_loss(experiment.scenario.model.loss)
    labels = experiment.dataset.y_test.to(models.device)

    def accuracy(logits: Tensor) -> float:
        return float((loss.predict(logits) == labels).double().mean())

    logits = _logits(experiment, mean)
    peers = [accuracy(_logits(experiment, model)) for model in models]
    return {
        "accuracy": {
            "mean_model": accuracy(logits),
            "peer_mean": sum(peers) / len(peers),
            "peer_min": min(peers),
            "peer_max": max(peers),
        },
        "loss": {"mean_model": float(loss.value(logits, labels).mean())},
        "consensus_distance": consensus_distance(models),
    }


def _logits(experiment: Experiment, model: Tensor) -> Tensor:
    x_test = experiment.dataset.x_test.to(model.device, model.dtype)
    return experiment.kernel.logits(model.unsqueeze(0), x_test)[0]
