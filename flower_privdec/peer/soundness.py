"""What no working device sends: numbers that are not finite, or far off, and push-sum weights that cannot be.

Such rows would replace the model of each peer that they reach, or end its run. Nobody takes them in: a peer that waits
for nobody closes its edge to the sender. Peers that wait for each other go on beside it, each with its own rows in
place of the sender's (`stand_in`), so that no liar can keep them from going on, and Σ w stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SURPLUS = 2.0  # times the weight of all peers: no share has more
FAR = 1e6  # times the largest number of one's own model, and at least of 1: no neighbour's model has a larger one
KNOWN = 1e-3  # of a weight that everybody knows: more is not rounding


def what_is_wrong(
    values: Mapping[str, Tensor], own: Mapping[str, Tensor], most_weight: float, known_weight: float | None = None
) -> str:
    """Return in words what is wrong with a neighbour's rows, or a share of them; empty if nothing is.

    All weights together are the number of peers, and more if some lost their state or were restored from an old copy;
    numbers of examples have no bound. The model, x / w, has one that stops a device whose numbers broke, and not a
    careful liar.

    Args:
        values: the rows, decoded.
        own: the receiver's own.
        most_weight: that a share may have.
        known_weight: that this share has to have; None if the receiver cannot know.
    """
    weight = weight_of(values)
    if not (0 < weight <= most_weight and math.isfinite(weight)):
        return f"it sent a share of weight {weight:g}, which must be above 0 and at most {most_weight:g}"
    if known_weight is not None and abs(weight - known_weight) > KNOWN * known_weight:
        return f"it sent a share of weight {weight:g}, and everybody's weights make it {known_weight:g}"

    names = [name for name in values if name != "w"]
    largest = _largest(values, names) / weight
    if largest <= FAR:  # whatever this peer's own numbers are
        return ""
    mine = _largest(own, names) / (weight_of(own) or 1.0)
    most = FAR * max(1.0, mine)
    if largest <= most:
        return ""
    return f"it sent a model with a number of {largest:.3g}, and {most:.3g} is a million times this peer's largest"


def stand_in(own: Mapping[str, Tensor], part: float, known_weight: float | None) -> dict[str, Tensor]:
    """Return what counts in place of a neighbour's rows: a peer's own.

    Args:
        own: its rows.
        part: of them, 1 if rows are sent as they are.
        known_weight: of the neighbour's share; None if nobody knows it.
    """
    weight = weight_of(own)
    if known_weight is not None and weight > 0:
        part = known_weight / weight
    return {name: row * part for name, row in own.items()}


def weight_of(values: Mapping[str, Tensor]) -> float:
    """Return the push-sum weight among some values; 1 if there is none."""
    return float(values["w"]) if "w" in values else 1.0


def _largest(values: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """Return the largest magnitude among some values."""
    largest = 0.0
    for name in names:
        # Several times as fast as a norm. NaN is both the least and the most, and nothing is larger.
        least, most = map(float, torch.aminmax(values[name]))
        if math.isnan(most):
            return math.nan
        largest = max(largest, -least, most)
    return largest
