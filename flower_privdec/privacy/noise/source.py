"""What every noise source does, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

STEPS = 2**32  # steps of a run, and ids of receivers, are counted in 32 bits
NO_RECEIVER = STEPS - 1  # the counter word of noise that goes to no receiver in particular


class NoiseSource(Protocol):
    """Gaussian noise for the rows of a cohort."""

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place: out[i] += std[i] * N(0, I), keyed by (key of peers[i], purpose, step, receivers[i]).

        Args:
            out: rows [m, d], float32 or float64.
            std: standard deviations [m]; a row with 0 is left as it is.
            step: the number of the private step in the run, 0 <= step < 2**32.
            peers: global ids of the peers whose noise it is, int64 [m].
            purpose: what the noise is for, in any words; two purposes never share numbers.
            receivers: global ids int64 [m], 0 <= id < 2**32 - 1, where a peer draws something else for each
                receiver; None is a stream of its own.

        Raises:
            ValueError: rows, step, peers or receivers break these rules, or a peer has no key here.
        """
        ...


def check_call(out: Tensor, std: Tensor, step: int, peers: np.ndarray, receivers: np.ndarray | None) -> None:
    """Refuse arguments of `NoiseSource.add_` that no source can serve.

    Raises:
        ValueError: naming the value and the rule.
    """
    if out.ndim != 2 or out.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"noise is added to rows [m, d] of float32 or float64, not {out.dtype} {list(out.shape)}")
    if std.shape != out.shape[:1] or peers.shape != (out.shape[0],):
        raise ValueError(f"std {list(std.shape)} and peers {list(peers.shape)} must be [{out.shape[0]}]")
    if not 0 <= step < STEPS:
        raise ValueError(f"step={step} must be >= 0 and < 2**32")
    if receivers is None:
        return
    if receivers.shape != peers.shape:
        raise ValueError(f"receivers {list(receivers.shape)} must be [{out.shape[0]}]")
    if len(receivers) and not (receivers.min() >= 0 and receivers.max() < NO_RECEIVER):
        raise ValueError(f"receivers {receivers.min()}..{receivers.max()} must be >= 0 and < 2**32 - 1")


def pieces(count: int, d: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows [count, d] into pieces of at most `size` elements: some whole rows, or a part of one row.

    Args:
        count: how many rows.
        d: elements of a row, at least 1.
        size: elements of a piece, at least 1.

    Yields:
        The rows and the columns of each piece; a long row's parts, of nearly the same length, one after the other.
    """
    rows, width = max(1, size // d), -(-d // -(-d // size))
    for first in range(0, count, rows):
        for column in range(0, d, width):
            yield slice(first, min(first + rows, count)), slice(column, min(column + width, d))
