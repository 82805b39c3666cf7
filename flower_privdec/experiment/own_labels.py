"""Models tried on each peer's own labels: the personalized ones, and the network's mean model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.gradients.protocol import inputs_like
from flower_privdec.rows.keys import keyed_generator


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
    held, counts = held_labels(own, agreement.public.n_classes), _per_label(agreement, torch.ones_like(right))
    common = np.broadcast_to(_per_label(agreement, right), held.shape)
    accuracies: dict[str, Any] = {"global_model": _spread(_accuracy(held, common, counts))}
    models = agreement.algorithm.personal(rows)
    if models is None:
        return accuracies
    wanted = np.ones_like(held) if last else held
    personal = np.stack([_hits(agreement, *pair) for pair in zip(models, wanted, strict=True)])
    accuracies["personal_models"] = _spread(_accuracy(held, personal, counts))
    if last:
        shards = _growing(held, agreement.scenario.seed_of("data"))
        accuracies["generalization"] = {
            name: {str(extra): _spread(_accuracy(more, hits, counts))["mean"] for extra, more in enumerate(shards)}
            for name, hits in (("personal_models", personal), ("global_model", common))
        }
    return accuracies


def _growing(held: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return the labels of every peer's shard with 0, 1, ... extra ones, until some peer has them all."""
    order = [
        keyed_generator(seed, "extra labels", peer).permutation(np.flatnonzero(~own)) for peer, own in enumerate(held)
    ]
    shards = [held]
    for extra in range(min(len(labels) for labels in order)):
        more = shards[-1].copy()
        more[np.arange(len(held)), [labels[extra] for labels in order]] = True
        shards.append(more)
    return shards


def _hits(agreement: Agreement, model: Tensor, wanted: np.ndarray) -> np.ndarray:
    """Return how many test examples of each wanted label a model gets right, [n_classes]; 0 of the others."""
    labels = agreement.public.y
    chosen = torch.from_numpy(wanted)[labels]
    x = inputs_like(agreement.public.x[chosen], model)
    right = torch.zeros(len(labels), dtype=torch.bool)
    if len(x):
        outputs = agreement.kernel.logits(model.unsqueeze(0), x)[0].cpu()
        right[chosen] = agreement.loss.predict(outputs) == labels[chosen]
    return _per_label(agreement, right)


def _per_label(agreement: Agreement, right: Tensor) -> np.ndarray:
    labels, n_classes = agreement.public.y, agreement.public.n_classes
    return np.bincount(labels.numpy(), weights=right.cpu().numpy(), minlength=n_classes)


def _accuracy(shards: np.ndarray, hits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the share of right answers on each peer's shard, without the peers whose shard is empty."""
    examples = (shards * counts).sum(1)
    return np.asarray((shards * hits).sum(1)[examples > 0] / examples[examples > 0])


def _spread(values: np.ndarray) -> dict[str, float]:
    """Return mean, least and most over the peers; 0 where no peer has a test example."""
    if not len(values):
        return {"mean": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
