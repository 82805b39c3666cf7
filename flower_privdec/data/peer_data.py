"""The examples of a step: gathered on the device, as `Sampler` chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ArgumentError
from flower_privdec.data.datasets import Examples
from flower_privdec.data.sampling import LocalBatch, Sampler, padded
from flower_privdec.rows.sparse_rows import SparseRows


@dataclass(frozen=True)
class Batch:
    """The examples that m peers use in a step, on the device.

    Attributes:
        x: features [m, B, *input_shape], of compressed rows packed [m, B, 2, L], or tokens, int64.
        y: classes, int64 [m, B]; or numbers or labels [m, B, k].
        weight: [m, B] in the run's dtype, 1 for an example, 0 for padding (whose x and y are some example's).
        index: int64 [m, B], local positions.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor

    def repeated(self, row: int, times: int) -> Batch:
        """Return one peer's batch repeated, without a copy."""
        parts = (self.x, self.y, self.weight, self.index)
        return Batch(*(part[row].expand(times, *part.shape[1:]) for part in parts))


class PeerData:
    """The peers' training examples on a device, from which the batch of each step is gathered.

    Attributes:
        sampler: what decides which examples a step uses.
    """

    def __init__(self, examples: Examples, sampler: Sampler, device: torch.device | str, dtype: torch.dtype) -> None:
        """Move the training examples of the peers hosted here to the device, once."""
        sizes = examples.sizes
        if not np.array_equal(sizes, sampler.partition_sizes):
            raise ArgumentError(
                f"the sampler is for peers of {sampler.partition_sizes} examples, not {sizes}", code="batch.sampler"
            )

        self.sampler = sampler
        self.device = torch.device(device)
        self.dtype = dtype
        self.input_shape = tuple(examples.x.shape[1:])

        # The examples of all peers by peer: where each peer's begin, and which rows of x and y they are.
        self._start = np.cumsum([0, *sizes])[:-1]
        self._row = np.concatenate(examples.parts)

        # Compressed rows stay on the CPU; those of a batch are moved.
        x = examples.x
        self._x = x if isinstance(x, SparseRows) else self._placed(x).reshape(len(x), -1)
        self._y = self._placed(examples.y)
        self._full: tuple[bytes, Batch] | None = None

    def part(self, start: int, stop: int) -> PeerData:
        """Return some of the peers' examples, which are not copied."""
        some = copy(self)
        some.sampler = self.sampler.part(start, stop)
        some._start = self._start[start:stop]
        some._full = None
        return some

    def _placed(self, values: Tensor) -> Tensor:
        """Move values to the device, and what is no whole number into the number type."""
        dtype = self.dtype if values.is_floating_point() else values.dtype
        return values.to(self.device, dtype)

    def batch(self, step: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return the examples that some peers, [r] in any order, use in a step, as `Sampler.batch` chooses them.

        Returns:
            The batch, to be read only: with sampling `full` the same tensors come back every step.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self.sampler.kind != "full":
            return self._gather(rows, self.sampler.batch(step, rows))

        key = rows.tobytes()
        if self._full is None or self._full[0] != key:
            self._full = None  # frees the last one before the next is made
            self._full = (key, self._gather(rows, self.sampler.batch(step, rows)))
        return self._full[1]

    def examples(self, rows: Sequence[int] | np.ndarray, start: int, stop: int) -> Batch:
        """Return the local examples [start, stop) of some peers; weight 0 past a peer's last one."""
        rows = np.asarray(rows, dtype=np.int64)
        return self._gather(rows, padded(np.arange(start, stop), self.sampler.partition_sizes[rows]))

    def block(self, rows: Sequence[int] | np.ndarray, numbers: np.ndarray) -> Batch:
        """Return one fixed batch of each peer, as `Sampler.block` numbers them."""
        rows = np.asarray(rows, dtype=np.int64)
        return self._gather(rows, self.sampler.block(rows, numbers))

    def _gather(self, rows: np.ndarray, local: LocalBatch) -> Batch:
        # One transfer to the device instead of three.
        packed = np.empty((3, *local.index.shape), np.int64)
        starts = self._start.take(rows)[:, None]
        self._row.take(starts + local.index, out=packed[0])
        packed[1] = local.index
        packed[2] = local.weight
        places, index, weight = torch.from_numpy(packed).to(self.device).unbind(0)

        flat = places.reshape(-1)
        if isinstance(self._x, SparseRows):
            x = self._x.packed(packed[0]).to(self.device)
        else:
            x = self._x.index_select(0, flat).view(*places.shape, *self.input_shape)
        y = self._y.index_select(0, flat).view(*places.shape, *self._y.shape[1:])
        return Batch(x, y, weight.to(self.dtype), index)
