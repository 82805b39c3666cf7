"""Metrics, loss and consensus of the peers' models on the public test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.catalogue import BY_CLASS
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.gradients.protocol import inputs_like, row_chunks
from flower_privdec.graph.participation import present
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario import Scenario
from flower_privdec.tasks.losses import weights_of
from flower_privdec.tasks.metrics import count_by_class, measure_by_class

if TYPE_CHECKING:
    from torch import Tensor

Figures = dict[str, float | None]  # the task's metrics of one model; None for one that is not finite
Trial = Callable[[], list[dict[str, list[float]]]]  # the metrics of all peers' models, part by part
OUTPUT_BYTES = 2**26  # of the models that are tried at once
LARGEST_LOSS = 1e6  # beyond it, or so many times the loss of outputs 0, a run only waits for infinity
# A run without noise is hopeless if its loss is so many times a blind guess's, and its accuracy no more above one's.
HOPELESS_LOSS = 20.0
HOPELESS_ACCURACY = 0.05


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
    """Try the network's mean model and every peer's on the test set after so many rounds, of the peers that are there.

    Args:
        rows: the state's rows of all peers, at least those that others may see.
        round_index: rounds done so far.
        own: of all peers, if they are at hand.
        trial: tries the peers' models elsewhere, see `try_models`; by default they are tried here.

    Returns:
        round; for each of the task's metrics mean_model, peer_mean, peer_min and peer_max (None if one is not finite);
        of a sample of peers also peer_error, see `_spread`, and how many were tried, of how many (peers_tried);
        by_class if the scenario asks for it, see `_by_class`; loss (mean_model, in nats); training_loss if the scenario
        asks for it, see `training_loss`; consensus_distance; for methods of several local steps that learn classes
        personalized, see `try_on_shards`, if there is no privacy to lose by it; and what the algorithm reports of the
        rounds since the last evaluation.

    Raises:
        RunError: the run has diverged.
    """
    algorithm = agreement.algorithm
    kernel = agreement.kernel
    there = present(agreement.participation, round_index)
    staying = rows_of(there, rows)
    models = algorithm.models(staying)  # [m, d]
    _check_finite(agreement, models, round_index)

    x = inputs_like(agreement.public.x, models)
    targets = agreement.public.y.to(models.device)
    outputs = kernel.logits(algorithm.mean_model(staying).unsqueeze(0), x)  # [1, N, k]
    loss = _sound_loss(agreement, outputs[0], targets, round_index)

    # A model that all peers share is tried once.
    places = sampled(agreement, there, len(models))
    if all(torch.equal(model, models[0]) for model in models):
        parts = [_try(agreement, models[:1])]
        places = None
    elif places is not None:
        parts = [_try(agreement, models[torch.from_numpy(places).to(models.device)])]
    elif trial is None:
        parts = [_try(agreement, models)]
    else:
        parts = trial()

    measured: dict[str, Any] = {}
    for name, of_mean_model in _measure(agreement, outputs, targets).items():
        of_peers = [value for part in parts for value in part[name]]
        if places is None and len(of_peers) == len(there):  # the trial elsewhere tries all
            of_peers = [value for value, is_there in zip(of_peers, there, strict=True) if is_there]
        measured[name] = {"mean_model": finite(of_mean_model[0]), **_spread(of_peers, len(models), places)}

    metrics: dict[str, Any] = {"round": round_index} | _by_class(agreement, measured)
    if places is not None:
        metrics["peers_tried"] = {"peers": len(places), "of": len(models)}
    metrics["loss"] = {"mean_model": loss}
    metrics["consensus_distance"] = consensus_distance(models)

    if own is not None and agreement.scenario.evaluation.training_loss:
        metrics["training_loss"] = {"mean_model": finite(training_loss(agreement, own, rows))}

    by_label = algorithm.tried_on_own_labels and agreement.loss.targets == "classes"
    if own is not None and by_label and shows_private(agreement.scenario):
        personal = algorithm.personal(rows)
        if personal is not None:
            _check_finite(agreement, personal, round_index)
        right = agreement.loss.predict(outputs[0]) == targets
        last = round_index >= agreement.scenario.rounds
        tried = None if places is None else np.flatnonzero(there)[places]
        metrics["personalized"] = try_on_shards(agreement, own, rows, right, last, tried)

    every = agreement.scenario.evaluation.every
    last_evaluation = max(0, round_index - 1) // every * every
    return metrics | algorithm.extra_metrics(rows, range(last_evaluation, round_index), agreement.mixing)


def rows_of(there: np.ndarray, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of the peers that are there, bool [n_peers]; unchanged if only some peers are at hand."""
    if there.all() or any(len(row) != len(there) for row in rows.values()):
        return rows
    return {name: row[torch.from_numpy(there).to(row.device)] for name, row in rows.items()}


def sampled(agreement: Agreement, there: np.ndarray, n_models: int) -> np.ndarray | None:
    """Return the places, among the models at hand, of those that are tried, ascending; None for all of them.

    The peers come in an order that is drawn once from the scenario's seed, and the first ones that are there are tried:
    so evaluations of one run, of a resumed one, and of runs that differ in anything but the seed try the same peers.
    The draw has a purpose of its own, by which no other draw of the run depends on it.

    Args:
        there: which peers are there, bool [n_peers].
        n_models: how many models are at hand: of all peers that are there, or of fewer.
    """
    wanted = agreement.scenario.evaluation.peers
    if wanted is None or wanted >= n_models:
        return None

    # Without some peers of a network, a model's place does not tell whose it is: then places are drawn.
    peers = np.arange(n_models)
    if np.count_nonzero(there) == n_models:
        peers = np.flatnonzero(there)
    order = keyed_generator(agreement.scenario.seed_of("run"), "evaluated peers").permutation(len(there))
    chosen = order[np.isin(order, peers)][:wanted]
    return np.sort(np.searchsorted(peers, chosen))


def _spread(values: list[float], n_models: int, places: np.ndarray | None) -> dict[str, float | None]:
    """Return the mean, the least and the greatest of the peers' values; None for all if one is not finite.

    Of a sample also `peer_error`, the standard error of its mean as an estimate of that of all n models,
    s / √m √(1 - m / n) of m values with standard deviation s. Its least and greatest bound no other.
    """
    spread: dict[str, float | None] = {"peer_mean": None, "peer_min": None, "peer_max": None}
    if places is not None:
        spread["peer_error"] = None
    if not all(map(math.isfinite, values)):
        return spread

    spread |= {"peer_mean": sum(values) / len(values), "peer_min": min(values), "peer_max": max(values)}
    if places is not None:
        variance = float(np.var(values, ddof=1)) / len(values)
        spread["peer_error"] = math.sqrt(variance * (1 - len(values) / n_models))
    return spread


def peers_metrics(agreement: Agreement, rows: dict[str, Tensor]) -> dict[str, list[float | None]]:
    """Return each of the task's metrics for every peer's model; None if it is not finite."""
    measured = _try(agreement, agreement.algorithm.models(rows))
    return _by_class(agreement, {name: [finite(value) for value in values] for name, values in measured.items()})


def public_figures(agreement: Agreement, rows: dict[str, Tensor]) -> list[tuple[float | None, Figures]]:
    """Return, for each peer's model, the loss on public test examples, in nats, and the task's metrics on them.

    Args:
        rows: the rows of the peers that are at hand, at least those that others may see.

    Returns:
        None for what is not finite.

    Privacy: none is spent; the rows follow from what was released, and the examples are public.
    """
    models = agreement.algorithm.models(rows)
    x = inputs_like(agreement.public.x, models)
    targets = agreement.public.y.to(models.device)
    few = _spaced(len(targets), agreement.scenario.evaluation.peer_samples)
    x = x[few]
    targets = targets[few]

    found: list[tuple[float | None, Figures]] = []
    for model in models:
        outputs = agreement.kernel.logits(model.unsqueeze(0), x)
        loss = finite(float(agreement.loss.value(outputs[0], targets).mean()))
        measured = _measure(agreement, outputs, targets)
        figures: Figures = {name: finite(values[0]) for name, values in measured.items()}
        if loss is None:  # outputs that are not finite have an accuracy, which means nothing
            figures = dict.fromkeys(figures)
        found.append((loss, figures))
    return found


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
    """Return a number as metrics hold it: None if it is not finite."""
    return value if math.isfinite(value) else None


def shows_private(scenario: Scenario) -> bool:
    """Return whether figures may be computed from private labels, which no account covers.

    They may if nothing is private, or if the scenario ignores what they reveal (evaluation.private).
    """
    return scenario.private is None or scenario.evaluation.private == "ignored"


def _measure(agreement: Agreement, outputs: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """Return the task's metrics of some models' outputs [m, N, k], one value a model.

    Those of single classes, if the scenario asks for them, are `by_class/CLASS/f1` and the like.
    """
    loss = agreement.loss
    values = {metric.name: metric.measure(loss, outputs, targets).tolist() for metric in agreement.metrics}
    if agreement.scenario.evaluation.by_class:
        for name, of_classes in measure_by_class(loss, outputs, targets).items():  # [m, C]
            for place, of_class in enumerate(of_classes.T.tolist()):
                values[_of_class(place, name)] = of_class
    return values


def _of_class(place: int, name: str) -> str:
    return f"by_class/{place}/{name}"


def _by_class(agreement: Agreement, measured: dict[str, Any]) -> dict[str, Any]:
    """Gather what was measured of single classes: `{"by_class": {class: {"support", "precision", "recall", "f1"}}}`.

    A class goes by the name that the scenario gives it, or else by its number; its support is how many examples of the
    whole public test set are of it.
    """
    if not agreement.scenario.evaluation.by_class:
        return measured

    public = agreement.public
    remaining = dict(measured)
    by_class: dict[str, Any] = {}
    for place, support in enumerate(count_by_class(agreement.loss, public.y, public.n_classes)):
        of_class: dict[str, Any] = {"support": support}
        for name in BY_CLASS:
            of_class[name] = remaining.pop(_of_class(place, name))
        by_class[public.intake.class_name(place)] = of_class
    return remaining | {"by_class": by_class}


def try_models(agreement: Agreement, rows: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the metrics of some peers' models, one value a peer.

    Args:
        rows: the state's rows of these peers, at least those that others may see.
    """
    return _try(agreement, agreement.algorithm.models(dict(rows)))


def try_mean_model(agreement: Agreement, rows: dict[str, Tensor]) -> dict[str, float | None]:
    """Return the metrics of the mean of some peers' models; None for one that is not finite."""
    measured = _try(agreement, agreement.algorithm.mean_model(rows).unsqueeze(0))
    return {name: finite(values[0]) for name, values in measured.items()}


def _try(agreement: Agreement, models: Tensor) -> dict[str, list[float]]:
    targets = agreement.public.y.to(models.device)
    few = _spaced(len(targets), agreement.scenario.evaluation.peer_samples)
    x = inputs_like(agreement.public.x, models)[few]
    targets = targets[few]
    by_metric: dict[str, list[float]] = {}
    bytes_of_one = len(targets) * agreement.public.n_classes * models.element_size()
    for rows in row_chunks(len(models), bytes_of_one, OUTPUT_BYTES):
        outputs = agreement.kernel.logits(models[rows], x)
        for name, values in _measure(agreement, outputs, targets).items():
            by_metric.setdefault(name, []).extend(values)
    return by_metric


def _sound_loss(agreement: Agreement, outputs: Tensor, targets: Tensor, round_index: int) -> float:
    """Return the mean model's loss.

    Raises:
        RunError: it only grows, or without noise it is far worse than a blind guess.
    """
    loss = agreement.loss
    value = float(loss.value(outputs, targets).mean())
    of_zeros = finite(float(loss.value(torch.zeros_like(outputs), targets).mean())) or 0.0
    text = f"the mean model's test loss is {value:.3g}"

    hopeless = False
    if loss.targets == "classes":
        n_classes = agreement.public.n_classes
        accuracy = float((loss.predict(outputs) == targets).double().mean())
        blind_loss = math.log(n_classes)
        if loss.class_weights is not None:
            blind_loss *= float(weights_of(loss.class_weights, targets, outputs).mean())
        hopeless = accuracy <= 1 / n_classes + HOPELESS_ACCURACY and value > HOPELESS_LOSS * blind_loss
        text += f" and its accuracy {accuracy:.1%}"

    # Noise makes losses large too, and the mean of models that were never exchanged may be anything.
    exchanges = agreement.algorithm.weights is not None
    if hopeless and exchanges and agreement.scenario.private is None:
        raise _diverged(agreement, round_index, text)
    if not value < LARGEST_LOSS * max(1.0, of_zeros):  # NaN is not below it either
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
    if count is None or count >= n:
        return slice(None)
    return torch.arange(count) * n // count


def held_labels(own: OwnParts, n_classes: int) -> np.ndarray:
    """Return which labels each peer's training shard holds, bool [n_peers, n_classes]; private, see `try_on_shards`."""
    labels = own.examples.y.numpy()
    held = np.zeros((len(own.examples.parts), n_classes), dtype=bool)
    for row, part in enumerate(own.examples.parts):
        held[row, labels[part]] = True
    return held


def try_on_shards(
    agreement: Agreement,
    own: OwnParts,
    rows: dict[str, Tensor],
    right: Tensor,
    last: bool,
    tried: np.ndarray | None = None,
) -> dict[str, Any]:
    """Try models on each peer's own test shard: the public test examples of the labels its training shard holds.

    Args:
        own: of all peers.
        rows: the state's rows of all peers.
        right: bool [N], which test examples the mean model gets right.
        last: whether the run ends here; then the personalized models are also tried with extra labels.
        tried: the peers of a sample, whose shards and models alone count; None for all.

    Returns:
        global_model and, if the algorithm has them, personal_models: accuracy (mean, min, max) over the peers whose
        shard is not empty. At the end also generalization: mean accuracy of both by the number of extra label classes
        added to every shard one by one, in an order drawn for each peer (FedDeper, Fig. 5b).

    Privacy: which labels a peer holds comes from its private data, and a personalized model is not noised if nothing
        computed from it is released. No account covers these numbers: they are for simulations, whose data are at hand,
        and no peer would publish them.
    """
    peers = np.arange(agreement.scenario.n_peers) if tried is None else tried
    held = held_labels(own, agreement.public.n_classes)[peers]
    counts = _per_label(agreement, torch.ones_like(right))  # test examples of each label
    common = np.broadcast_to(_per_label(agreement, right), held.shape)
    accuracies: dict[str, Any] = {"global_model": _accuracy(held, common, counts)}

    models = agreement.algorithm.personal(rows)
    if models is None:
        return accuracies

    # At the end every label is tried, as shards with extra labels need them.
    labels = np.ones_like(held) if last else held
    personal = np.stack(
        [_hits(agreement, models[int(peer)], tried_labels) for peer, tried_labels in zip(peers, labels, strict=True)]
    )
    accuracies["personal_models"] = _accuracy(held, personal, counts)
    if not last:
        return accuracies

    generalization: dict[str, dict[str, float]] = {"personal_models": {}, "global_model": {}}
    for extra, shards in enumerate(_growing_shards(peers, held, agreement.scenario.seed_of("data"))):
        generalization["personal_models"][str(extra)] = _accuracy(shards, personal, counts)["mean"]
        generalization["global_model"][str(extra)] = _accuracy(shards, common, counts)["mean"]
    accuracies["generalization"] = generalization
    return accuracies


def _hits(agreement: Agreement, model: Tensor, tried_labels: np.ndarray) -> np.ndarray:
    """Return how many test examples of each label a model [d] gets right; of labels that are not tried, 0."""
    labels = agreement.public.y
    chosen = torch.from_numpy(tried_labels)[labels]
    x = inputs_like(agreement.public.x[chosen], model)
    right = torch.zeros(len(labels), dtype=torch.bool)
    if len(x):
        outputs = agreement.kernel.logits(model.unsqueeze(0), x)[0].cpu()
        right[chosen] = agreement.loss.predict(outputs) == labels[chosen]
    return _per_label(agreement, right)


def _growing_shards(peers: np.ndarray, held: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yield which labels each peer's shard has with 0, 1, ... extra ones, until some peer has all labels.

    Args:
        peers: their numbers.
        held: the labels of each of these peers' own shards, bool [peers, n_classes].
        seed: the seed of the order in which a peer gets the others.
    """
    orders = []
    for peer, own_labels in zip(peers.tolist(), held, strict=True):
        missing = np.flatnonzero(~own_labels)
        orders.append(keyed_generator(seed, "extra labels", peer).permutation(missing))

    shards = held
    yield shards
    for extra in range(min(map(len, orders))):
        shards = shards.copy()
        for row, order in enumerate(orders):
            shards[row, order[extra]] = True
        yield shards


def _per_label(agreement: Agreement, right: Tensor) -> np.ndarray:
    labels = agreement.public.y
    n_classes = agreement.public.n_classes
    return np.bincount(labels.numpy(), weights=right.cpu().numpy(), minlength=n_classes)


def _accuracy(shards: np.ndarray, hits: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return mean, least and most share of right answers over the peers' shards that are not empty; 0 without any."""
    examples = (shards * counts).sum(1)
    has_some = examples > 0
    values = (shards * hits).sum(1)[has_some] / examples[has_some]
    if not len(values):
        return {"mean": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
