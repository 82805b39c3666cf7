"""Numbers and guarantees as text, the same in the terminal, the report and the warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flower_privdec.common.catalogue import BY_CLASS
from flower_privdec.common.formatting import NOTHING, epsilon_text, memory, number, peer_ranges, percent, setting
from flower_privdec.privacy.accountant.readings import right_guesses
from flower_privdec.privacy.mechanism.events import Adversary
from flower_privdec.scenario.algorithm_sections import ALGORITHMS

CLASS_HEADS = ("class", "test examples", "precision", "recall", "F1", "F1 of peers' models")  # of `by_class`
BEYOND = 700.0  # a larger ε: e^ε overflows a float


def shares_models(algorithm: str) -> bool:
    """Return whether an algorithm's peers exchange anything, so that the mean model is one that peers approach."""
    part = ALGORITHMS.get(algorithm)
    return part is None or part.weights is not None


def main_metric(summary: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a run's first metric, and its title, high (whether more is better) and share."""
    first: tuple[str, dict[str, Any]] = next(iter(summary["metrics"].items()))
    return first


def main_models(algorithm: str) -> str:
    """Return the models whose metric is the result of a run, as a summary names them.

    They are the mean model, or, if nothing is exchanged, the peers' models on average: the mean of models that were
    never exchanged is a model that no peer has.
    """
    return "mean_model" if shares_models(algorithm) else "peer_mean"


def main_value(algorithm: str, values: dict[str, float | None] | None) -> float | None:
    """Return the value of a metric for `main_models`."""
    return None if values is None else values[main_models(algorithm)]


def measured(value: float | None, kind: dict[str, Any], deviation: float | None = None) -> str:
    """Return a metric's value as text: a share in percent. With a deviation over seeds: `92.3 ± 0.4 %`."""
    if value is None or deviation is None:
        return percent(value) if kind["share"] else number(value)
    if kind["share"]:
        return f"{100 * value:.1f} ± {percent(deviation)}"
    return f"{number(value)} ± {number(deviation)}"


def named_value(summary: dict[str, Any], models: str | None = None) -> str:
    """Return a run's first metric of some models, with its name unless it is the accuracy: `R² 0.453`.

    Args:
        models: as the summary names them, `mean_model` or `peer_mean`; by default `main_models`.
    """
    if models is None:
        models = main_models(summary["algorithm"])
    name, kind = main_metric(summary)
    value = summary[name][models] if summary[name] else None
    text = measured(value, kind, summary.get("spread", {}).get(models))
    return text if name == "accuracy" else f"{kind['title']} {text}"


def main_loss(algorithm: str, loss: dict[str, float] | None) -> float | None:
    """Return the mean model's loss; None if peers exchange nothing, so that no peer has that model."""
    if not loss or not shares_models(algorithm):
        return None
    return loss["mean_model"]


def peers_values(summary: dict[str, Any]) -> str:
    """Return the first metric of the peers' own models: `89.0 % (87.0–90.4)`, mean, worst and best."""
    values = summary[main_metric(summary)[0]]
    if not values:
        return NOTHING
    text = f"{named_value(summary, 'peer_mean')} ({peers_range(summary).removesuffix(' %')})"
    sample = sample_size(summary)
    return text if sample is None else f"{text}, {sample}"


def sample_size(summary: dict[str, Any]) -> str | None:
    """Return how many peers' models were tried, `200 of 10,000 peers`; None if all were."""
    tried = summary.get("peers_tried")
    return None if not tried else f"{tried['peers']:,.0f} of {tried['of']:,.0f} peers"


def sample_error(summary: dict[str, Any]) -> str | None:
    """Return what the peers' figures are of, if only a sample was tried, with the standard error of their mean.

    Of several runs it is the mean of their errors.
    """
    sample = sample_size(summary)
    if sample is None:
        return None
    name, kind = main_metric(summary)
    error = (summary[name] or {}).get("peer_error")
    return f"a sample, {sample}; standard error of the mean {measured(error, kind)}"


def peers_range(summary: dict[str, Any]) -> str:
    """Return the first metric of the worst and of the best peer's model: `87.0–90.4 %`."""
    name, kind = main_metric(summary)
    values = summary[name]
    if not values or values["peer_min"] is None:
        return NOTHING
    worst = values["peer_min"]
    best = values["peer_max"]
    if not kind["high"]:
        worst, best = best, worst
    return f"{measured(worst, kind).removesuffix(' %')}–{measured(best, kind)}"


def own_labels(summary: dict[str, Any]) -> str | None:
    """Return the accuracies on each peer's own labels as text; None if they were not measured."""
    accuracies = summary.get("personalized")
    if not accuracies:
        return None
    common = f"mean model {percent(accuracies['global_model']['mean'])}"
    personal = accuracies.get("personal_models")
    if not personal:
        return common
    return f"personalized models {percent(personal['mean'])}, {common}"


def by_class(summary: dict[str, Any], most: int | None = None) -> list[tuple[str, ...]]:
    """Return a row for each class: name, test examples, precision, recall and F1, and the peers' worst and best F1.

    Args:
        most: how many rows there may be; of more classes those with the lowest F1 are shown, in their order.
    """
    classes = summary.get("by_class") or {}
    algorithm = summary["algorithm"]

    def f1(label: str) -> float:
        value = main_value(algorithm, classes[label]["f1"])
        return math.inf if value is None else value

    shown = list(classes)
    if most is not None and len(shown) > most:
        worst = set(sorted(shown, key=f1)[:most])
        shown = [label for label in shown if label in worst]

    rows = []
    for label in shown:
        of_class = classes[label]
        of_peers = of_class["f1"]
        cells = [label, f"{of_class['support']:,.0f}"]
        cells += [percent(main_value(algorithm, of_class[name])) for name in BY_CLASS]
        cells.append(f"{percent(of_peers['peer_min']).removesuffix(' %')}–{percent(of_peers['peer_max'])}")
        rows.append(tuple(cells))
    return rows


def sent(summary: dict[str, Any]) -> str | None:
    """Return what an active peer sends in a round as text; None if nothing is exchanged, or it is not known."""
    traffic = summary.get("traffic")
    if not traffic or not traffic["vectors"]:
        return None
    if traffic["vectors"] == 1:
        count = "1 vector"
    else:
        count = f"{traffic['vectors']} vectors"
    return f"{count} ({memory(traffic['bytes'])}) a round from an active peer to each receiver"


def alike(rows: Sequence[dict[str, Any]], text: Callable[[dict[str, Any]], Sequence[str]]) -> list[tuple[str, ...]]:
    """Group the peers whose texts are equal.

    Returns:
        For each distinct text, in order of its first peer: the peers as ranges, and the text.
    """
    peers_of: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        peers_of.setdefault(tuple(text(row)), []).append(row["peer"])
    return [(peer_ranges(peers), *texts) for texts, peers in peers_of.items()]


def epsilon_range(summary: dict[str, Any]) -> str:
    """Return the ε of a run's peers: one value, or least to most."""
    values = [float(row["epsilon"]) for row in summary["privacy"]]
    if not values:
        return epsilon_text(summary.get("epsilon_so_far"))
    low = epsilon_text(min(values))
    high = epsilon_text(max(values))
    return low if low == high else f"{low}–{high}"


def is_private(summary: dict[str, Any]) -> bool:
    """Return whether some peer of a run has a finite ε."""
    return epsilon_range(summary) not in ("∞", NOTHING)


def _span(values: Iterable[float]) -> str:
    ascending = sorted(values)
    low = setting(ascending[0])
    high = setting(ascending[-1])
    return low if low == high else f"{low}–{high}"


def guarantee(summary: dict[str, Any]) -> str:
    """Return each peer's guarantee in one line: ε, δ, unit, adjacency and calibration."""
    rows = summary["privacy"]
    if not rows:
        spent = summary["epsilon_so_far"]
        if spent is None:
            return "ε is not known before the first evaluation"
        if math.isinf(float(spent)):
            return f"ε = {epsilon_text(spent)}"
        return f"ε = {epsilon_text(spent)}, of the peer that spent most, at the last evaluation"
    if not is_private(summary):
        return "ε = ∞ (no privacy)"

    same = alike(rows, lambda row: (epsilon_text(row["epsilon"]), setting(row["delta"])))
    peers = "every peer" if len(same) == 1 else "over the peers"
    facts = []
    for key in ("unit", "adjacency", "calibration"):
        values = sorted({str(row[key]) for row in rows})
        facts.append(f"{key}: {' / '.join(values)}")
    scopes = sorted({row["scope"] for row in rows if "scope" in row})
    return f"{peers}: {budget(summary)} ({'; '.join([', '.join(facts), *scopes])})"


def budget(summary: dict[str, Any]) -> str:
    """Return ε of a run's peers and the δ it holds at: `ε = 2.99 at δ = 1e-5`."""
    text = f"ε = {epsilon_range(summary)}"
    deltas = [row["delta"] for row in summary["privacy"] if row["delta"]]
    return f"{text} at δ = {_span(deltas)}" if deltas else text


def claim(summary: dict[str, Any]) -> str | None:
    """Return a sentence on the ε that a paper's formula claims; None if no paper's formula set the noise."""
    claimed = [row["claimed_epsilon"] for row in summary["privacy"] if row.get("claimed_epsilon") is not None]
    if not claimed:
        return None
    return f"the paper's formula claims ε = {_span(claimed)}: a claim, not a guarantee"


def meaning(summary: dict[str, Any]) -> str:
    """Return a sentence that states a run's privacy guarantee."""
    rows = summary["privacy"]
    largest = max((float(row["epsilon"]) for row in rows), default=float(summary.get("epsilon_so_far") or 0))
    if math.isinf(largest):
        return "Messages and models may reveal anything about the examples they were computed from."

    whose = "peer's data" if rows and rows[0]["unit"] == "peer" else "example"
    factor = "beyond 1e304, which protects no one"
    if largest < BEYOND:
        factor = f"= {number(math.exp(largest))}"
    cancelled = [row for row in rows if "colluding" in row]  # whose noise cancels between peers
    adversary = Adversary(cancelled[0]["colluding"] if cancelled else None)
    sentences = [
        f"For an adversary who sees every message and every model, with {adversary}, the use of any one {whose} "
        f"changes the odds of what they see by at most a factor of e^ε {factor}, except with a probability of about δ."
    ]
    if rows and largest < BEYOND:
        # The factor is of outcomes that hardly ever happen, and frightens if nothing stands beside it.
        right = max(right_guesses([(float(row["epsilon"]), float(row["delta"]))]) for row in rows)
        sentences.append(
            f"If it was used by the toss of a coin, they guess that right at most {at_most(right)} of the time."
        )
    if cancelled:
        if_all_collude = max(float(row["epsilon_if_all_collude"]) for row in cancelled)
        sentences.append(f"Should all other peers collude, ε = {epsilon_text(if_all_collude)}.")
    return " ".join(sentences)


def at_most(chance: float) -> str:
    """Return a chance in percent, rounded up: 0.6531 is `65.4 %`."""
    return f"{min(100.0, math.ceil(1000 * chance - 1e-9) / 10):.1f} %"


def headline(summary: dict[str, Any]) -> str:
    """Return the result of a run in one line."""
    whose = "peers' own models, on average"
    if shares_models(summary["algorithm"]):
        whose = "mean model"
    result = f"{whose} {named_value(summary)} on the test set"
    if "attack" in summary:
        result = f"under attack, {result}"
    if not summary.get("finished", True):
        done = f"{summary['rounds_done']} of {summary['rounds']} rounds"
        kind = "stopped" if "stopped_at" in summary else "unfinished"
        return f"{kind}, {done}: {result} so far, {budget(summary)}"
    return f"{result}, {budget(summary)}"
