"""Whether numbers are numbers, in one pass over them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN.

    Their sum then is none, which is quicker to find than the least and the most of them; where it is, these two decide,
    for finite numbers may have an infinite sum.
    """
    if not values.numel() or math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(values))
