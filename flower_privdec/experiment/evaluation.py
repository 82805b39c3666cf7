"""Metrics, loss and consensus of the peers' models on the public test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.gradients.protocol import inputs_like, row_chunks
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario import Scenario
from flower_privdec.tasks.losses import weights_of

Trial = Callable[[], list[dict[str, list[float]]]]  # the metrics of all peers' models, part by part
OUTPUT_BYTES = 2**26  # the outputs of so many models as are tried at once
LARGEST_LOSS = 1e6  # beyond it, or so many times the loss of outputs 0, a run only waits for infinity
HOPELESS_LOSS, HOPELESS_ACCURACY = 20.0, 0.05  # without noise: times a blind guess's loss, and above its accuracy


def consensus_distance(models: Tensor) -> float:
    """Return the root mean square distance of the peers' models [m, d] from their mean."""
    mean = models.mean(0)
    squares = [float((row - mean).square().sum()) for row in models]
    return math.sqrt(sum(squares) / len(squares))


def evaluate(
    agreement: Agreement,
    rows: dict[str, Tensor],
    round_index: int,
    own: OwnParts | None = None,
    trial: Trial | None = None,
) -> dict[str, Any]:
    """Try the network's mean model and every peer's on the test set after so many rounds.

    Args:
        rows: the state's rows of all peers, at least those that others may see.
        round_index: rounds done so far.
        own: of all peers, where they are at hand.
        trial: tries the peers' models elsewhere, see `try_models`; by default they are tried here.

    Returns:
        round; for each of the task's metrics mean_model, peer_mean, peer_min and peer_max (None where one is no finite
        number), loss (mean_model, in nats), training_loss where the scenario asks for it, see `training_loss`,
        consensus_distance; for methods of several local steps that learn classes
        personalized, see `try_on_shards`, where there is no privacy to lose by it; and what the algorithm reports
        of the rounds since the evaluation before.

    Raises:
        RunError: when the run has diverged.
    """
    algorithm = agreement.algorithm
    kernel = agreement.kernel
    models = algorithm.models(rows)
    _check_finite(agreement, models, round_index)
    x = inputs_like(agreement.public.x, models)
    targets = agreement.public.y.to(models.device)
    outputs = kernel.logits(algorithm.mean_model(rows).unsqueeze(0), x)
    value = _sound_loss(agreement, outputs[0], targets, round_index)
    if all(torch.equal(model, models[0]) for model in models):  # one that all share is tried once
        parts = [_try(agreement, models[:1])]
    else:
        parts = [_try(agreement, models)] if trial is None else trial()
    metrics: dict[str, Any] = {"round": round_index}
    for name, mean in _measure(agreement, outputs, targets).items():
        peers = [value for part in parts for value in part[name]]
        ends = (sum(peers) / len(peers), min(peers), max(peers)) if all(map(math.isfinite, peers)) else (None,) * 3
        spread = dict(zip(("peer_mean", "peer_min", "peer_max"), ends, strict=True))
        metrics[name] = {"mean_model": finite(mean[0]), **spread}
    metrics |= {"loss": {"mean_model": value}, "consensus_distance": consensus_distance(models)}
    if own is not None and agreement.scenario.evaluation.training_loss:
        metrics["training_loss"] = {"mean_model": finite(training_loss(agreement, own, rows))}
    by_label = algorithm.tried_on_own_labels and agreement.loss.targets == "classes"
    if own is not None and by_label and shows_private(agreement.scenario):
        personal = algorithm.personal(rows)
        last = round_index >= agreement.scenario.rounds
        if personal is not None:
            _check_finite(agreement, personal, round_index)
        right = agreement.loss.predict(outputs[0]) == targets
        metrics["personalized"] = try_on_shards(agreement, own, rows, right, last)
    every = agreement.scenario.evaluation.every
    since = range(max(0, round_index - 1) // every * every, round_index)
    return metrics | algorithm.extra_metrics(rows, since, agreement.mixing)


def peers_metrics(agreement: Agreement, rows: dict[str, Tensor]) -> dict[str, list[float | None]]:
    """Return each of the task's metrics for every peer's model, None where it is no finite number."""
    measured = _try(agreement, agreement.algorithm.models(rows))
    return {name: [finite(value) for value in values] for name, values in measured.items()}


def public_losses(agreement: Agreement, rows: dict[str, Tensor]) -> list[float | None]:
    """Return the loss of each peer's model on public test examples, in nats; None where it is not finite.

    Args:
        rows: of the peers that are at hand, at least those that others may see.

    Privacy: none is spent; the rows follow from what was released, and the examples are public.
    """
    models = agreement.algorithm.models(rows)
    x = inputs_like(agreement.public.x, models)
    targets = agreement.public.y.to(models.device)
    few = _spaced(len(targets), agreement.scenario.evaluation.peer_samples)
    x = x[few]
    targets = targets[few]
    outputs = (agreement.kernel.logits(model.unsqueeze(0), x)[0] for model in models)
    return [finite(float(agreement.loss.value(output, targets).mean())) for output in outputs]


def training_loss(agreement: Agreement, own: OwnParts, rows: dict[str, Tensor]) -> float:
    """Return the mean model's loss f(x̄) = (1/n) Σ_i (1/J_i) Σ_j l(x̄; example j of peer i), in nats.

    Args:
        own: of all n peers; peer i has J_i examples.
        rows: the state's rows of all peers.

    Privacy: computed from raw examples; no account covers it.
    """
    model = agreement.algorithm.mean_model(rows).unsqueeze(0)
    losses = []
    for part in own.examples.parts:
        chosen = torch.from_numpy(part)
        outputs = agreement.kernel.logits(model, inputs_like(own.examples.x[chosen], model))[0]
        targets = own.examples.y[chosen].to(outputs.device)
        losses.append(float(agreement.loss.value(outputs, targets).mean(dtype=torch.float64)))
    return sum(losses) / len(losses)


def finite(value: float) -> float | None:
    """Return a number as metrics hold it: None where it is not finite."""
    return value if math.isfinite(value) else None


def shows_private(scenario: Scenario) -> bool:
    """Return whether figures may be computed from private labels, which no account covers.

    They may where nothing is private, or where the scenario says that it ignores what they tell (evaluation.private).
    """
    return scenario.private is None or scenario.evaluation.private == "ignored"


def _measure(agreement: Agreement, outputs: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """Return the task's metrics of some models' outputs [m, N, k], one value a model."""
    return {metric.name: metric.measure(agreement.loss, outputs, targets).tolist() for metric in agreement.metrics}


def try_models(agreement: Agreement, rows: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the metrics of some peers' models, one value a peer.

    Args:
        rows: the state's rows of these peers, at least those that others may see.
    """
    return _try(agreement, agreement.algorithm.models(dict(rows)))


def _try(agreement: Agreement, models: Tensor) -> dict[str, list[float]]:
    targets = agreement.public.y.to(models.device)
    few = _spaced(len(targets), agreement.scenario.evaluation.peer_samples)
    x = inputs_like(agreement.public.x, models)[few]
    targets = targets[few]
    by_metric: dict[str, list[float]] = {metric.name: [] for metric in agreement.metrics}
    output_bytes = len(targets) * agreement.public.n_classes * models.element_size()
    for rows in row_chunks(len(models), output_bytes, OUTPUT_BYTES):
        for name, values in _measure(agreement, agreement.kernel.logits(models[rows], x), targets).items():
            by_metric[name] += values
    return by_metric


def _sound_loss(agreement: Agreement, outputs: Tensor, targets: Tensor, round_index: int) -> float:
    """Return the mean model's loss.

    Raises:
        RunError: it only grows, or without noise it is far worse than a blind guess.
    """
    loss = agreement.loss
    n_classes = agreement.public.n_classes
    value = float(loss.value(outputs, targets).mean())
    start = finite(float(loss.value(torch.zeros_like(outputs), targets).mean())) or 0.0
    text = f"the mean model's test loss is {value:.3g}"
    blind = False
    if loss.targets == "classes":
        accuracy = float((loss.predict(outputs) == targets).double().mean())
        blind_loss = math.log(n_classes)
        if loss.class_weights is not None:
            blind_loss *= float(weights_of(loss.class_weights, targets, outputs).mean())
        blind = accuracy <= 1 / n_classes + HOPELESS_ACCURACY and value > HOPELESS_LOSS * blind_loss
        text += f" and its accuracy {accuracy:.1%}"
    together = agreement.algorithm.weights is not None  # the mean of models that never met may be anything
    if not value < LARGEST_LOSS * max(1.0, start) or (blind and together and agreement.scenario.private is None):
        raise _diverged(agreement, round_index, text)
    return value


def _check_finite(agreement: Agreement, models: Tensor, round_index: int) -> None:
    finite = torch.stack([torch.isfinite(model).all() for model in models])  # row by row: no copy of them all
    if not bool(finite.all()):
        peer = int((~finite).nonzero()[0])
        raise _diverged(agreement, round_index, f"the parameters of peer {peer} are no longer finite")


def _diverged(agreement: Agreement, round_index: int, what: str) -> RunError:
    keys = [f"algorithm.{key}" for key in agreement.algorithm.steadied_by]
    return RunError(
        f"round {round_index}: {what}: the run diverged; lower {', '.join(keys)} or the noise", code="run.diverged"
    )


def _spaced(n: int, count: int | None) -> Tensor | slice:
    """Return `count` places of n, evenly spaced; all of them, as a slice, by default."""
    return slice(None) if count is None or count >= n else torch.arange(count) * n // count


def held_labels(own: OwnParts, n_classes: int) -> np.ndarray:
    """Return which labels each peer's training shard holds, bool [n_peers, n_classes]; private, see `try_on_shards`."""
    labels = own.examples.y.numpy()
    held = np.zeros((len(own.examples.parts), n_classes), dtype=bool)
    for row, part in enumerate(own.examples.parts):
        held[row, labels[part]] = True
    return held


def try_on_shards(
    agreement: Agreement, own: OwnParts, rows: dict[str, Tensor], right: Tensor, last: bool
) -> dict[str, Any]:
    """Try models on each peer's own test shard: the public test examples of the labels its training shard holds.

    Args:
        own: of all peers.
        rows: the state's rows of all peers.
        right: bool [N], which test examples the mean model gets right.
        last: whether the run ends here; then the personalized models are also tried with extra labels.

    Returns:
        global_model and, where the algorithm has them, personal_models: accuracy (mean, min, max) over the
        peers whose shard is not empty. At the end also generalization: mean accuracy of both by the number of
        extra label classes added to every shard one by one, in an order drawn for each peer (FedDeper, Fig. 5b).

    Privacy: which labels a peer holds comes from its private data, and where nothing computed from a
        personalized model is released it is not noised either. No account covers these numbers: they are for
        simulations, whose data are at hand, and no peer would publish them.
    """
    held = held_labels(own, agreement.public.n_classes)
    counts = _per_label(agreement, torch.ones_like(right))
    common = np.broadcast_to(_per_label(agreement, right), held.shape)
    accuracies: dict[str, Any] = {"global_model": _accuracy(held, common, counts)}
    models = agreement.algorithm.personal(rows)
    if models is None:
        return accuracies
    wanted = np.ones_like(held) if last else held
    labels = agreement.public.y
    hits_of_peers = []
    for model, wanted_labels in zip(models, wanted, strict=True):
        chosen = torch.from_numpy(wanted_labels)[labels]
        x = inputs_like(agreement.public.x[chosen], model)
        hit = torch.zeros(len(labels), dtype=torch.bool)
        if len(x):
            outputs = agreement.kernel.logits(model.unsqueeze(0), x)[0].cpu()
            hit[chosen] = agreement.loss.predict(outputs) == labels[chosen]
        hits_of_peers.append(_per_label(agreement, hit))
    personal = np.stack(hits_of_peers)
    accuracies["personal_models"] = _accuracy(held, personal, counts)
    if last:
        seed = agreement.scenario.seed_of("data")
        missing = [np.flatnonzero(~own_labels) for own_labels in held]
        order = [keyed_generator(seed, "extra labels", peer).permutation(labels) for peer, labels in enumerate(missing)]
        shards = [held]  # with 0, 1, ... extra labels, until some peer has them all
        for extra in range(min(map(len, order))):
            more = shards[-1].copy()
            more[np.arange(len(held)), [labels[extra] for labels in order]] = True
            shards.append(more)
        accuracies["generalization"] = {
            name: {str(extra): _accuracy(more, hits, counts)["mean"] for extra, more in enumerate(shards)}
            for name, hits in (("personal_models", personal), ("global_model", common))
        }
    return accuracies


def _per_label(agreement: Agreement, right: Tensor) -> np.ndarray:
    labels = agreement.public.y
    n_classes = agreement.public.n_classes
    return np.bincount(labels.numpy(), weights=right.cpu().numpy(), minlength=n_classes)


def _accuracy(shards: np.ndarray, hits: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return mean, least and most share of right answers over the peers' shards that are not empty; 0 without any."""
    examples = (shards * counts).sum(1)
    values = (shards * hits).sum(1)[examples > 0] / examples[examples > 0]
    if not len(values):
        return {"mean": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
