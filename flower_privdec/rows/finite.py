"""Whether numbers are numbers, in one pass over them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN, which is the least and the most of any it is among."""
    return not values.numel() or all(math.isfinite(end.item()) for end in torch.aminmax(values))
