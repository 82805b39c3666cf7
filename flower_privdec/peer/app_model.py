"""An app's model as a peer holds it: named arrays, of which the floating ones make up the x of push-sum.

The model that the app sees is z = x / w. Counters, masks and whatever else is not floating stay with the peer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.peer.dual_step import DualStep

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
                    f"array {name!r} has type {value.dtype} and must be of real or whole numbers: split it into those",
                    code="app.arrays",
                )
        if not any(value.dtype.kind == "f" for value in arrays.values()):
            raise RunError(
                f"the model's arrays {list(arrays)} have no floating one, so nothing can be mixed: bytes, as of trees, "
                "have no mean; take a model of real-valued parameters",
                code="app.arrays",
            )
        return layout

    @classmethod
    def from_json(cls, parts: list[tuple[str, str, list[int]]]) -> Layout:
        """Return the layout that `parts` say, as JSON has them."""
        return cls(tuple((str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in parts))

    @cached_property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the vector's type."""
        return np.dtype(np.float64 if any(np.dtype(kind).itemsize > 4 for _, kind, _ in self._floating) else np.float32)

    @cached_property
    def size(self) -> int:
        """Return how many numbers the vector has."""
        return sum(math.prod(shape) for _, _, shape in self._floating)

    @cached_property
    def _floating(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [part for part in self.parts if np.dtype(part[1]).kind == "f"]

    def vector(self, arrays: Arrays) -> np.ndarray:
        """Return the floating arrays as one vector, float64 [size]."""
        return np.concatenate([np.ravel(arrays[name]) for name, _, _ in self._floating], dtype=np.float64)

    def moved_by(self, arrays: Arrays, start: np.ndarray) -> np.ndarray:
        """Return the floating arrays minus a vector, [size] of the vector's type."""
        update = np.empty(self.size, self.dtype)
        begin = 0
        for name, _, shape in self._floating:
            end = begin + math.prod(shape)
            np.subtract(np.ravel(arrays[name]), start[begin:end], out=update[begin:end], casting="same_kind")
            begin = end
        return update

    @cached_property
    def only_kind(self) -> np.dtype[np.floating] | None:
        """Return the type of all floating arrays; None if they have several."""
        kinds = {kind for _, kind, _ in self._floating}
        return np.dtype(kinds.pop()) if len(kinds) == 1 else None

    def rounded(self, vector: np.ndarray) -> np.ndarray:
        """Return a vector as `arrays` has it, rounded to the arrays' types, [size]."""
        with np.errstate(over="ignore"):
            if self.only_kind is not None:
                return vector.astype(self.only_kind, copy=False)
            ends = np.cumsum([math.prod(shape) for _, _, shape in self._floating])[:-1]
            parts = zip(np.split(vector, ends), self._floating, strict=True)
            return np.concatenate([part.astype(kind).astype(np.float64) for part, (_, kind, _) in parts])

    def unmixed(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the arrays that are not mixed."""
        floating = {name for name, _, _ in self._floating}
        return {name: np.asarray(value) for name, value in arrays.items() if name not in floating}

    def arrays(self, vector: np.ndarray, unmixed: Arrays) -> dict[str, np.ndarray]:
        """Return a vector [size], and what is not mixed, as the app's arrays: same names, order, types and shapes."""
        arrays = dict[str, np.ndarray]()
        start = 0
        for name, kind, shape in self.parts:
            if name in unmixed:
                arrays[name] = np.asarray(unmixed[name])
                continue
            stop = start + math.prod(shape)
            with np.errstate(over="ignore"):
                arrays[name] = vector[start:stop].reshape(shape).astype(kind, copy=False)
            start = stop
        return arrays

    def misfit(self, arrays: Arrays) -> str:
        """Return in words how arrays do not fit; empty if they do. Types of the same kind fit: they are cast."""
        kinds = {name: kind for name, kind, _ in self.parts}
        ours = {name: f"{kind} {shape}" for name, kind, shape in self.parts}
        theirs = dict[str, str]()
        for name, value in arrays.items():
            is_cast = name in kinds and (np.dtype(kinds[name]).kind == "f") == (value.dtype.kind == "f")
            theirs[name] = f"{kinds[name] if is_cast else value.dtype} {value.shape}"
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return f"array {name!r} is {theirs.get(name, 'missing')} and must be {ours.get(name, 'missing')}"
        if list(ours) != list(theirs):
            return f"the arrays are in the order {list(theirs)} and must be in the order {list(ours)}"
        return ""


def mass_of(x: np.ndarray, w: float) -> dict[str, np.ndarray]:
    """Return (x, w) as the protocol holds them; x [d] stays where it lies."""
    return {"x": np.ascontiguousarray(x), "w": np.array(w, np.float64)}


@dataclass
class AppModel:
    """The mass (x, w) of a model, and what belongs to it.

    Attributes:
        peer: whose it is.
        layout: of the model's arrays.
        mass: x [d] and w, by name.
        unmixed: the arrays that are not mixed.
        unprotected: how many of the peer's own updates are in it without protection.
        examples: the number of examples by which its next update counts.
        first_weight: what it brings into the run: 1, or its number of examples; if it came later, or its state was an
            old copy, with its first share.
        average: of dual averaging, over the models with which it took part; empty before the first.
        average_weight: what that average has added up.
        dual: how x / w gives the model in dual averaging, and the round for which; None elsewhere. Not on disk.
    """

    peer: int
    layout: Layout
    mass: MutableMapping[str, np.ndarray]
    unmixed: dict[str, np.ndarray]
    unprotected: int = 0
    examples: float = 1.0
    first_weight: float = 1.0
    average: np.ndarray = field(default_factory=lambda: np.empty(0))
    average_weight: float = 0.0
    dual: tuple[DualStep, int] | None = None

    @property
    def x(self) -> np.ndarray:
        """Return x [d], where it lies."""
        return self.mass["x"]

    @x.setter
    def x(self, value: np.ndarray) -> None:
        self.mass["x"] = mass_of(value, 0.0)["x"]

    @property
    def w(self) -> float:
        """Return the push-sum weight."""
        return float(self.mass["w"])

    def model(self) -> np.ndarray:
        """Return z = x / w, float64 [d]; in dual averaging the step along it.

        Raises:
            RunError: there is no mass yet.
        """
        if not self.w > 0:
            raise RunError(f"peer {self.peer} has no model yet: its first share has not come")
        z = np.asarray(np.divide(self.x, self.w, dtype=np.float64))
        return z if self.dual is None else self.dual[0].point(z, self.dual[1])

    def given_model(self) -> np.ndarray:
        """Return the model as the app's train function is given it, rounded to the arrays' types, [d]."""
        kind = self.layout.only_kind
        if kind is None or self.dual is not None or not self.w > 0:
            return self.layout.rounded(self.model())
        if kind == self.x.dtype and self.w == 1:
            return self.x
        with np.errstate(over="ignore"):
            out = np.empty(self.layout.size, kind)
            np.divide(self.x, self.w, out=out, dtype=np.float64, casting="unsafe")
        return out

    def result(self) -> np.ndarray:
        """Return the model to evaluate and to hand in, float64 [d]: z, or in dual averaging the average."""
        return self.average if self.average_weight else self.model()

    def count_in_average(self) -> None:
        """Take the model into the running average of dual averaging."""
        if self.dual is not None:
            weight = self.dual[0].weight(self.dual[1])
            before = self.average if self.average_weight else 0.0
            self.average_weight += weight
            self.average = before + weight / self.average_weight * (self.model() - before)

    def recount(self, examples: float) -> None:
        """Let the peer count by a number of examples from now on.

        Of the mass that it brought into the run there is then so much, at its model as it is; so Σ w is the number of
        all examples, and Σ x / Σ w, once the models agree, their mean weighted by them.
        """
        more = examples - self.first_weight
        w = self.w
        if more and w + more > 0:
            self.x = (self.x.astype(np.float64) * ((w + more) / w)).astype(self.x.dtype)
            self.mass["w"] = mass_of(self.x, w + more)["w"]
            self.first_weight = examples
        self.examples = examples
