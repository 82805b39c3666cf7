"""Hold the peers' training examples on a device and gather the batches of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.data.datasets import Dataset
from flower_privdec.data.sampling import LocalBatch, Sampler


@dataclass(frozen=True)
class Batch:
    """The examples that m peers use in a round, on the device.

    Attributes:
        x: features [m, B, *input_shape].
        y: classes, int64 [m, B].
        weight: [m, B] in the dtype of x, 1 for an example, 0 for padding (whose x and y are some example's).
        index: int64 [m, B], local positions.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor


class PeerData:
    """The peers' training examples on a device, gathered round by round.

    Attributes:
        sampler: what decides which examples a round uses.
        device, dtype: of the batches.
        input_shape: of one example.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Sequence[np.ndarray],
        sampler: Sampler,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        peers: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Move the training examples to the device, once.

        Args:
            dataset: whose training examples are used.
            partition: the rows of each peer, as `partition` returns them.
            sampler: built for the sizes of that partition.
            device: where batches are wanted.
            dtype: of features and weights.
            peers: hold the examples of these alone; None holds the whole training set.
        """
        sizes = [len(part) for part in partition]
        if not np.array_equal(sizes, sampler.partition_sizes):
            raise ValueError(f"the sampler is for peers of {sampler.partition_sizes} examples, not {sizes}")
        self.sampler = sampler
        self.device, self.dtype, self.input_shape = torch.device(device), dtype, dataset.input_shape
        hosted = np.arange(len(partition)) if peers is None else np.unique(np.asarray(peers, dtype=np.int64))
        rows = np.concatenate([np.zeros(0, np.int64), *(partition[peer] for peer in hosted)])
        self._start = np.full(len(partition), -1)
        self._start[hosted] = np.cumsum([0, *(sizes[peer] for peer in hosted)])[:-1]
        x, y = dataset.x_train, dataset.y_train
        if peers is not None:
            chosen = torch.from_numpy(rows)
            x, y, rows = x[chosen], y[chosen], np.arange(len(rows))
        self._row = rows
        self._x = x.reshape(len(x), -1).to(self.device, dtype)
        self._y = y.to(self.device)
        self._full: tuple[bytes, Batch] | None = None

    def batch(self, round_index: int, peers: Sequence[int] | np.ndarray) -> Batch:
        """Return the examples that some peers use in a round, as `Sampler.batch` chooses them.

        Args:
            round_index: the round, 0 or later.
            peers: global ids of peers held here, [m], in any order.

        Returns:
            The batch, to be read only: with sampling `full` the same tensors come back every round.

        Raises:
            ValueError: a peer is not held here.
        """
        peers = np.asarray(peers, dtype=np.int64)
        if self.sampler.kind != "full":
            return self._gather(peers, self.sampler.batch(round_index, peers))
        key = peers.tobytes()
        if self._full is None or self._full[0] != key:
            self._full = None  # lets go of the last one before the next is made
            self._full = (key, self._gather(peers, self.sampler.batch(round_index, peers)))
        return self._full[1]

    def examples(self, peers: Sequence[int] | np.ndarray, start: int, stop: int) -> Batch:
        """Return the local examples [start, stop) of some peers; weight 0 where a peer has none there."""
        peers = np.asarray(peers, dtype=np.int64)
        positions = np.broadcast_to(np.arange(start, stop), (len(peers), stop - start))
        inside = positions < self.sampler.partition_sizes[peers][:, None]
        return self._gather(peers, LocalBatch(np.where(inside, positions, 0), inside.astype(np.float32)))

    def block(self, peers: Sequence[int] | np.ndarray, numbers: np.ndarray) -> Batch:
        """Return one fixed batch of each peer, as `Sampler.block` numbers them."""
        peers = np.asarray(peers, dtype=np.int64)
        return self._gather(peers, self.sampler.block(peers, numbers))

    def _gather(self, peers: np.ndarray, local: LocalBatch) -> Batch:
        start = self._start.take(peers)
        if len(start) and int(start.min()) < 0:
            raise ValueError(f"peers {peers[start < 0]} are not held here")
        packed = np.empty((3, *local.index.shape), np.int64)  # one transfer to the device instead of three
        self._row.take(start[:, None] + local.index, out=packed[0])
        packed[1], packed[2] = local.index, local.weight
        rows, index, weight = torch.from_numpy(packed).to(self.device).unbind(0)
        flat = rows.reshape(-1)
        x = self._x.index_select(0, flat).view(*rows.shape, *self.input_shape)
        return Batch(x, self._y.index_select(0, flat).view(rows.shape), weight.to(self.dtype), index)
