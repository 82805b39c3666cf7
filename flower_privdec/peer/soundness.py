"""What no working device sends: numbers that are not finite, or far off, and push-sum weights that cannot be.

Such rows would replace the model of each peer that they reach, or end its run, so nobody takes them in. In asynchronous
mode a peer closes its edge to the sender. In synchronous mode it goes on, with its own rows in place of the sender's
(`stand_in`): so no liar can stop the others, and Σ w stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flower_privdec.common.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


SURPLUS = 2.0  # a share's weight is at most so many times that of all peers
# A number of a neighbour's model is at most so many times the largest of one's own (or 1, if that is smaller).
FAR = 1e6
KNOWN = 1e-3  # if everybody knows a weight, a share's may differ by this part of it, by rounding


def what_is_wrong(
    values: Mapping[str, Tensor], own: Mapping[str, Tensor], most_weight: float, known_weight: float | None = None
) -> str:
    """Return in words what is wrong with a neighbour's rows, or a share of them; empty if nothing is.

    The bound on weights: all together are the number of peers, or somewhat more if peers lost their state or were
    restored from an old copy. (If peers count by their examples there is none.) The bound on the model, x / w, stops a
    device whose numbers broke. It does not stop a careful liar.

    Args:
        values: the rows, decoded.
        own: the receiver's own.
        most_weight: the largest weight that a share may have.
        known_weight: the weight that this share must have; None if the receiver cannot know.
    """
    weight = weight_of(values)
    if not (0 < weight <= most_weight and math.isfinite(weight)):
        return f"it sent a share of weight {weight:g}, which must be above 0 and at most {most_weight:g}"
    if known_weight is not None and abs(weight - known_weight) > KNOWN * known_weight:
        return f"it sent a share of weight {weight:g}, which must be {known_weight:g}, as all weights are known"

    names = [name for name in values if name != "w"]
    largest = _largest(values, names) / weight
    if largest <= FAR:  # sound whatever this peer's own numbers are, so do not look at them
        return ""
    mine = _largest(own, names) / (weight_of(own) or 1.0)
    most = FAR * max(1.0, mine)
    if largest <= most:
        return ""
    return f"it sent a model with a number of {largest:.3g}, and {most:.3g} is a million times this peer's largest"


def stand_in(own: Mapping[str, Tensor], part: float, known_weight: float | None) -> dict[str, Tensor]:
    """Return what counts in place of what a neighbour sent: some of the peer's own rows.

    Args:
        own: the peer's rows.
        part: the part of its rows that a neighbour sends; 1 if it sends whole rows.
        known_weight: the weight of the neighbour's share, if everybody knows it: then as much of `own`; else None.
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
        # Several times as fast as a norm. If there is a NaN, it is both.
        least, most = map(float, torch.aminmax(values[name]))
        if math.isnan(most):
            return math.nan
        largest = max(largest, -least, most)
    return largest
