"""Accuracy, loss and consensus of the peers' models on the public test set."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flower_privdec.errors import RunError
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_labels import try_on_shards
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.gradients import resolve_loss
from flower_privdec.gradients.protocol import row_chunks
from flower_privdec.scenario import Scenario

OUTPUT_BYTES = 2**26  # the outputs of so many models as are tried at once
LARGEST_LOSS = 1e6  # beyond it a run only waits for infinity
HOPELESS_LOSS, HOPELESS_ACCURACY = 20.0, 0.05  # without noise: times a blind guess's loss, and above its accuracy


def consensus_distance(models: Tensor) -> float:
    """Return the root mean square distance of the peers' models [m, d] from their mean."""
    mean = models.mean(0)
    squares = [float((row - mean).square().sum()) for row in models]
    return math.sqrt(sum(squares) / len(squares))


def evaluate(
    agreement: Agreement, rows: dict[str, Tensor], round_index: int, own: OwnParts | None = None
) -> dict[str, Any]:
    """Try the network's mean model and every peer's on the test set.

    Args:
        rows: the state's rows of all peers, at least those that others may see.
        round_index: rounds done so far.
        own: of all peers, where they are at hand.

    Returns:
        accuracy (mean_model, peer_mean, peer_min, peer_max), loss (mean_model, in nats), consensus_distance;
        and for methods of several local steps personalized, see `own_labels.try_on_shards`, where there is no
        privacy to lose by it.

    Raises:
        RunError: when the run has diverged.
    """
    algorithm, loss = agreement.algorithm, resolve_loss(agreement.scenario.model.loss)
    models = algorithm.debiased(rows)
    _check_finite(agreement, models, round_index)
    x, labels = agreement.public.x.to(models), agreement.public.y.to(models.device)
    outputs = agreement.kernel.logits(algorithm.network_mean(rows).unsqueeze(0), x)[0]
    right, value = loss.predict(outputs) == labels, float(loss.value(outputs, labels).mean())
    accuracy, n_classes = float(right.double().mean()), agreement.public.n_classes
    blind = accuracy <= 1 / n_classes + HOPELESS_ACCURACY and value > HOPELESS_LOSS * math.log(n_classes)
    together = algorithm.weights is not None  # the mean of models that never met may be anything
    if not value < LARGEST_LOSS or (blind and together and agreement.scenario.private is None):
        raise _diverged(
            agreement, round_index, f"the mean model's test loss is {value:.3g} and its accuracy {accuracy:.1%}"
        )
    metrics = {
        "accuracy": {"mean_model": accuracy, **_peer_accuracy(agreement, models, x, labels)},
        "loss": {"mean_model": value},
        "consensus_distance": consensus_distance(models),
    }
    if own is not None and algorithm.tried_on_own_labels and shows_private(agreement.scenario):
        personal, last = algorithm.personal(rows), round_index >= agreement.scenario.rounds
        if personal is not None:
            _check_finite(agreement, personal, round_index)
        metrics["personalized"] = try_on_shards(agreement, own, rows, right, last)
    return metrics


def shows_private(scenario: Scenario) -> bool:
    """Return whether figures may be computed from private labels, which no account covers.

    They may where nothing is private, or where the scenario says that it ignores what they tell (evaluation.private).
    """
    return scenario.private is None or scenario.evaluation.private == "ignored"


def _peer_accuracy(agreement: Agreement, models: Tensor, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the mean, least and greatest accuracy of the peers' models; one that all share is tried once."""
    few = _spaced(len(labels), agreement.scenario.evaluation.peer_samples)
    x, labels = x[few], labels[few]
    loss, kernel = resolve_loss(agreement.scenario.model.loss), agreement.kernel
    shared = all(torch.equal(model, models[0]) for model in models)
    tried, peers = models[:1] if shared else models, []
    for rows in row_chunks(len(tried), len(labels) * agreement.public.n_classes * x.element_size(), OUTPUT_BYTES):
        right = loss.predict(kernel.logits(tried[rows], x)) == labels
        peers += right.double().mean(1).tolist()
    return {"peer_mean": sum(peers) / len(peers), "peer_min": min(peers), "peer_max": max(peers)}


def _check_finite(agreement: Agreement, models: Tensor, round_index: int) -> None:
    finite = torch.isfinite(models).all(1)
    if not bool(finite.all()):
        peer = int((~finite).nonzero()[0])
        raise _diverged(agreement, round_index, f"the parameters of peer {peer} are no longer finite")


def _diverged(agreement: Agreement, round_index: int, what: str) -> RunError:
    keys = [f"algorithm.{key}" for key in agreement.algorithm.steadied_by]
    return RunError(f"round {round_index}: {what}: the run diverged; lower {', '.join(keys)} or the noise")


def _spaced(n: int, count: int | None) -> Tensor | slice:
    """Return `count` places of n, evenly spaced; all of them, as a slice, by default."""
    return slice(None) if count is None or count >= n else torch.arange(count) * n // count
