"""Sparse examples: compressed rows of many features of which few are not 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy
import torch
from torch import Tensor

LARGEST_INDEX = 1 << 24  # float32, which a packed batch holds indices in, counts no further by ones
Chosen = slice | np.ndarray | Tensor


class SparseRows:
    """Features [N, D] in compressed rows, float32, with the part of a tensor's interface that examples need.

    Attributes:
        matrix: sorted indices, none twice in a row, every value finite.
    """

    def __init__(self, matrix: scipy.sparse.csr_matrix) -> None:
        """Convert rows to their canonical form, by which they are hashed."""
        self.matrix = scipy.sparse.csr_matrix(matrix, dtype=np.float32)
        self.matrix.sum_duplicates()

    @property
    def shape(self) -> torch.Size:
        """Return [N, D]."""
        return torch.Size(self.matrix.shape)

    @property
    def nbytes(self) -> int:
        """Return how much memory the rows take."""
        return int(self.matrix.data.nbytes + self.matrix.indices.nbytes + self.matrix.indptr.nbytes)

    def __len__(self) -> int:
        """Return N."""
        return int(self.matrix.shape[0])

    def __getitem__(self, rows: Chosen) -> SparseRows:
        """Return some rows."""
        return SparseRows(self.matrix[rows.numpy() if isinstance(rows, Tensor) else rows])

    def dense(self) -> Tensor:
        """Return dense rows, [N, D]: for a few."""
        return torch.from_numpy(self.matrix.toarray())

    def packed(self, rows: np.ndarray) -> Tensor:
        """Return some rows as [*rows.shape, 2, L]: their indices and their values, both as floats, padded with 0."""
        flat = rows.reshape(-1)
        starts = self.matrix.indptr[flat]
        counts = np.diff(self.matrix.indptr)[flat]
        inside = np.arange(max(1, int(counts.max(initial=0)))) < counts[:, None]
        places = (starts[:, None] + np.arange(inside.shape[1]))[inside]
        pairs = np.zeros((len(flat), 2, inside.shape[1]), np.float32)
        pairs[:, 0][inside], pairs[:, 1][inside] = self.matrix.indices[places], self.matrix.data[places]
        return torch.from_numpy(pairs).view(*rows.shape, 2, -1)

    def content(self) -> Sequence[np.ndarray]:
        """Return the rows' arrays in a canonical form, for a hash."""
        parts = (self.matrix.indptr, self.matrix.indices, self.matrix.data)
        return [np.ascontiguousarray(part, dtype=np.float32 if part is parts[2] else np.int64) for part in parts]


Features = Tensor | SparseRows


def joined(parts: Sequence[Features]) -> Features:
    """Return the concatenation of examples: all tensors, or all compressed rows."""
    compressed = [part for part in parts if isinstance(part, SparseRows)]
    if compressed:
        return SparseRows(scipy.sparse.vstack([part.matrix for part in compressed], format="csr"))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])
