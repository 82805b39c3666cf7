"""A model's arrays as one vector: which arrays a framework has is its own affair, and all that is mixed is one row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord

from flower_privdec.errors import RunError

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays, in their order.

    Floating arrays make up the vector that is mixed, clipped and noised: float64 if one of them is, else float32.
    Arrays of whole numbers and truth values (counters, masks) are each peer's own and enter nothing.

    Attributes:
        parts: (name, type, shape) of each array.
    """

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """Return the layout of arrays.

        Raises:
            RunError: nothing in them is floating, or a type has no mean.
        """
        layout = cls(tuple((name, str(value.dtype), value.shape) for name, value in arrays.items()))
        for name, value in arrays.items():
            if value.dtype.kind not in "fiub":
                raise RunError(
                    f"array {name!r} has type {value.dtype} and must be of real or whole numbers: split it into those"
                )
        if not any(value.dtype.kind == "f" for value in arrays.values()):
            raise RunError(f"the model's arrays {list(arrays)} have no floating one, so nothing can be mixed")
        return layout

    @classmethod
    def from_json(cls, parts: list[tuple[str, str, list[int]]]) -> Layout:
        """Return the layout that `parts` say, as JSON has them."""
        return cls(tuple((str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in parts))

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the vector's type."""
        return np.result_type(np.float32, *(kind for _, kind, _ in self._floating())).newbyteorder("=")

    @property
    def size(self) -> int:
        """Return how many numbers the vector has."""
        return sum(math.prod(shape) for _, _, shape in self._floating())

    def _floating(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [part for part in self.parts if np.dtype(part[1]).kind == "f"]

    def vector(self, arrays: Arrays) -> np.ndarray:
        """Return the floating arrays as one vector, float64 [size]."""
        parts = [np.asarray(arrays[name], dtype=np.float64).reshape(-1) for name, _, _ in self._floating()]
        return np.concatenate(parts)

    def kept(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that are not mixed."""
        floating = {name for name, _, _ in self._floating()}
        return {name: np.asarray(value) for name, value in arrays.items() if name not in floating}

    def record(self, vector: np.ndarray, kept: Arrays) -> ArrayRecord:
        """Return a vector, and what is not mixed, as the record that the framework knows: same names, order, types."""
        arrays, start = {}, 0
        for name, kind, shape in self.parts:
            if name in kept:
                arrays[name] = Array(np.asarray(kept[name]))
                continue
            stop = start + math.prod(shape)
            with np.errstate(over="ignore"):
                arrays[name] = Array(vector[start:stop].reshape(shape).astype(kind))
            start = stop
        return ArrayRecord(arrays)

    def misfit(self, arrays: Arrays) -> str:
        """Return in words how arrays do not fit; empty where they do. Types of the same kind fit: they are cast."""
        other = Layout(tuple((name, str(value.dtype), value.shape) for name, value in arrays.items()))
        same = {name: kind for name, kind, _ in self.parts}
        alike = tuple(
            (name, same[name] if _same_kind(kind, same.get(name)) else kind, shape) for name, kind, shape in other.parts
        )
        return self.differs(Layout(alike))

    def differs(self, other: Layout) -> str:
        """Return in words how another layout differs from this one; empty where it does not."""
        if self.parts == other.parts:
            return ""
        ours, theirs = ({name: part for name, *part in each.parts} for each in (self, other))
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                said = [" ".join(map(str, each[name])) if name in each else "missing" for each in (theirs, ours)]
                return f"array {name!r} is {said[0]} and must be {said[1]}"
        return f"the arrays are in the order {list(theirs)} and must be in the order {list(ours)}"


def _same_kind(one: str, other: str | None) -> bool:
    return other is not None and (np.dtype(one).kind == "f") == (np.dtype(other).kind == "f")


def numpy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return a record's arrays as NumPy's."""
    return {name: array.numpy() for name, array in record.items()}
