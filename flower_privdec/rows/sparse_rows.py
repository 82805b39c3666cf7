"""Sparse examples: compressed rows of many features, few of which are not 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from flower_privdec.common.deferred import scipy, torch

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_INDEX = 1 << 24  # a packed batch holds indices as float32, which has no odd numbers above this
Chosen: TypeAlias = "slice | np.ndarray | Tensor"


class SparseRows:
    """Features [N, D] in compressed rows, float32, with the part of a tensor's interface that examples need.

    Attributes:
        matrix: the rows, with ascending indices, none of them twice in a row, and finite values.
    """

    def __init__(self, matrix: scipy.sparse.csr_matrix) -> None:
        """Convert rows to their canonical form, which is the one that is hashed."""
        self.matrix = scipy.sparse.csr_matrix(matrix, dtype=np.float32)
        self.matrix.sum_duplicates()

    @property
    def shape(self) -> torch.Size:
        """[N, D]."""
        return torch.Size(self.matrix.shape)

    @property
    def nbytes(self) -> int:
        """The memory of the rows, in bytes."""
        return int(self.matrix.data.nbytes + self.matrix.indices.nbytes + self.matrix.indptr.nbytes)

    def __len__(self) -> int:
        """Return N."""
        return int(self.matrix.shape[0])

    def __getitem__(self, rows: Chosen) -> SparseRows:
        """Return some rows."""
        if isinstance(rows, torch.Tensor):
            rows = rows.numpy()
        return SparseRows(self.matrix[rows])

    def dense(self) -> Tensor:
        """Return dense rows, [N, D]; only for few rows."""
        return torch.from_numpy(self.matrix.toarray())

    def packed(self, rows: np.ndarray) -> Tensor:
        """Return some rows as [*rows.shape, 2, L]: their indices and their values, both as floats, padded with 0."""
        flat = rows.reshape(-1)
        starts = self.matrix.indptr[flat]
        counts = np.diff(self.matrix.indptr)[flat]

        # L is the length of the longest row; `inside` [r, L] is False in the padding of shorter ones.
        columns = np.arange(max(1, int(counts.max(initial=0))))
        inside = columns < counts[:, None]
        places = (starts[:, None] + columns)[inside]

        pairs = np.zeros((len(flat), 2, len(columns)), np.float32)
        pairs[:, 0][inside] = self.matrix.indices[places]
        pairs[:, 1][inside] = self.matrix.data[places]
        # L is named: of no rows, as in a step in which all peers are spent, it could not be worked out.
        return torch.from_numpy(pairs).view(*rows.shape, 2, len(columns))

    def content(self) -> Sequence[np.ndarray]:
        """Return the rows' arrays in a canonical form, for a hash."""
        # SciPy chooses 32 or 64 bits for indices by their size; the hash must not depend on that.
        return [
            np.ascontiguousarray(self.matrix.indptr, dtype=np.int64),
            np.ascontiguousarray(self.matrix.indices, dtype=np.int64),
            np.ascontiguousarray(self.matrix.data, dtype=np.float32),
        ]


Features: TypeAlias = "Tensor | SparseRows"


def joined(parts: Sequence[Features]) -> Features:
    """Concatenate examples, which are all tensors or all compressed rows."""
    compressed = [part for part in parts if isinstance(part, SparseRows)]
    if compressed:
        return SparseRows(scipy.sparse.vstack([part.matrix for part in compressed], format="csr"))
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
