"""A peer's rows as the mass that shares are taken from and added to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch import Tensor

from flower_privdec.core import State
from flower_privdec.rows.tensors import all_finite

AT_ONCE = 2**17  # numbers whose sum stays in cache
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class RowMass(MutableMapping[str, Tensor]):
    """Some named rows of a state of one peer: `mass["x"]` is [d], `mass["w"]` has no axis.

    What is set is written into the row, which stays where it lies; steps may put other rows in their place.

    Args:
        state: of one peer.
        names: of the rows that an exchange mixes.
    """

    def __init__(self, state: State, names: Iterable[str]) -> None:
        self._state, self._names = state, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._state.rows[name][0]

    def __setitem__(self, name: str, value: Tensor) -> None:
        row = self._state.rows[name][0]
        if value.data_ptr() != row.data_ptr():
            row.copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"row {name!r} belongs to the algorithm and must stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorArithmetic:
    """Rows on any device; what leaves is of a type of its own, and is subtracted as it leaves.

    In floating point each addition rounds, as in any mixing; the number subtracted here is the one added there.

    Args:
        wire: the type that is sent.
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire

    def part(self, value: Tensor, weight: float) -> Tensor:
        """See Arithmetic."""
        return (value * weight).to(self.wire)

    def subtract(self, value: Tensor, part: Tensor) -> Tensor:
        """See Arithmetic; in place."""
        return value.sub_(part.to(value))

    def add(self, value: Tensor, part: Tensor) -> Tensor:
        """See Arithmetic; in place."""
        return value.add_(part.to(value))

    def nothing(self, value: Tensor) -> Tensor:
        """See Arithmetic."""
        return torch.zeros_like(value)

    def copy(self, value: Tensor) -> Tensor:
        """See Arithmetic."""
        return value.clone()

    def same(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic; -0 is not 0 here."""
        return value.dtype == part.dtype and torch.equal(_bits(value), _bits(part))

    def fits(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic."""
        pairs = zip(value.reshape(-1).split(AT_ONCE), part.reshape(-1).split(AT_ONCE), strict=True)
        return all(all_finite(ours + theirs.to(ours)) for ours, theirs in pairs)


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(BITS[value.element_size()])
