"""The functions of torch that peers call, over `small_tensor`; each computes what torch's of the same name does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flower_privdec.small.small_tensor import (
    DType,
    Largest,
    Tensor,
    bfloat16,
    converted,
    float32,
    int64,
    operands,
    plain,
    shape_of,
)

# --- new tensors ---


def from_numpy(array: np.ndarray) -> Tensor:
    return Tensor(array)


def tensor(values: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    array = np.array(plain(values))
    if dtype is None:
        dtype = float32 if array.dtype == np.float64 and not isinstance(values, np.ndarray) else None
    if dtype is None:
        return Tensor(array)
    return converted(Tensor(array), dtype)


def as_tensor(values: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    if isinstance(values, Tensor):
        return values if dtype is None else values.to(dtype)
    if isinstance(values, np.ndarray):
        return Tensor(values) if dtype is None else Tensor(values).to(dtype)
    return tensor(values, dtype)


def _of(dtype: DType | None) -> np.dtype[Any]:
    return (dtype or float32).storage


def zeros(*shape: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    return Tensor(np.zeros(shape_of(shape), _of(dtype)), dtype or float32)


def ones(*shape: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    return Tensor(np.ones(shape_of(shape), _of(dtype)), dtype or float32)


def empty(*shape: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    return Tensor(np.empty(shape_of(shape), _of(dtype)), dtype or float32)


def full(shape: Any, value: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    return Tensor(np.full(shape_of((shape,)), plain(value), _of(dtype)), dtype or float32)


def zeros_like(like: Tensor, dtype: DType | None = None) -> Tensor:
    return Tensor(np.zeros(like.array.shape, (dtype or like.dtype).storage), dtype or like.dtype)


def ones_like(like: Tensor, dtype: DType | None = None) -> Tensor:
    return Tensor(np.ones(like.array.shape, (dtype or like.dtype).storage), dtype or like.dtype)


def empty_like(like: Tensor, dtype: DType | None = None) -> Tensor:
    return Tensor(np.empty(like.array.shape, (dtype or like.dtype).storage), dtype or like.dtype)


def full_like(like: Tensor, value: Any, dtype: DType | None = None) -> Tensor:
    return Tensor(np.full(like.array.shape, plain(value), (dtype or like.dtype).storage), dtype or like.dtype)


def arange(*ends: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    made = Tensor(np.arange(*ends))
    return made if dtype is None else made.to(dtype)


def linspace(start: float, end: float, steps: int, dtype: DType | None = None) -> Tensor:
    return Tensor(np.linspace(start, end, steps).astype(_of(dtype)))


def eye(n: int, dtype: DType | None = None, device: object = None) -> Tensor:
    return Tensor(np.eye(n, dtype=_of(dtype)))


def randn(*shape: Any, generator: Any, dtype: DType | None = None) -> Tensor:
    sizes = shape_of(shape)
    return Tensor(generator.normal(math.prod(sizes)).reshape(sizes)).to(dtype or float32)


def randint(*arguments: Any, generator: Any, dtype: DType | None = None, device: object = None) -> Tensor:
    """Return whole numbers from the first end, or 0, to below the second; arguments are ends and a shape."""
    *ends, shape = arguments
    low, high = (0, *ends)[-2:]
    sizes = shape_of((shape,))
    drawn = low + generator.words(math.prod(sizes)).astype(np.int64) % (high - low)
    return Tensor(drawn.reshape(sizes)).to(dtype or int64)


# --- several tensors as one ---


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(np.concatenate([part.array for part in parts], axis=dim), parts[0].dtype)


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(np.stack([part.array for part in parts], axis=dim), parts[0].dtype)


def as_strided(x: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    in_bytes = [stride * x.array.itemsize for stride in strides]
    return Tensor(np.lib.stride_tricks.as_strided(x.array, shape, in_bytes), x.dtype)


def split(x: Tensor, sizes: int | Sequence[int]) -> list[Tensor]:
    if isinstance(sizes, int):
        return list(x.split(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    return [x[start:end] for start, end in pairwise(ends)]


# --- number by number ---


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype is other.dtype:
        return Tensor(np.where(condition.array, one.array, other.array), one.dtype)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return Tensor(np.where(condition.array, *operands(one, other)))
    return Tensor(np.where(condition.array, one, other)).to(float32)


def add(one: Tensor, other: Any, alpha: Any = 1, out: Tensor | None = None) -> Tensor:
    return _into(one.add(other, alpha=alpha), out)


def mul(one: Tensor, other: Any, out: Tensor | None = None) -> Tensor:
    return _into(one * other, out)


def rsub(one: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return other - one * alpha  # type: ignore[no-any-return]


def minimum(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(np.minimum(*operands(one, other)))


def maximum(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(np.maximum(*operands(one, other)))


def hypot(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(np.hypot(*operands(one, other)))


def addcmul(x: Tensor, one: Tensor, other: Tensor, value: Any = 1) -> Tensor:
    product = one * other
    return x.add(product if value == 1 else product * value)


def lerp(start: Tensor, end: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
    return _into(start + (end - start) * weight, out)


def abs(x: Tensor) -> Tensor:
    return Tensor(np.abs(x.numbers))


def log(x: Tensor) -> Tensor:
    return Tensor(np.log(x.array))


def log1p(x: Tensor) -> Tensor:
    return Tensor(np.log1p(x.array))


def sigmoid(x: Tensor) -> Tensor:
    positive = np.exp(-np.abs(x.array))
    return Tensor(np.where(x.array >= 0, 1 / (1 + positive), positive / (1 + positive)))


def relu(x: Tensor) -> Tensor:
    return x.clone().relu_()


def isfinite(x: Tensor) -> Tensor:
    return x.isfinite()


def isnan(x: Tensor) -> Tensor:
    return x.isnan()


def nan_to_num(x: Tensor, nan: float = 0.0, posinf: float = 0.0, neginf: float = 0.0) -> Tensor:
    return Tensor(np.nan_to_num(x.array, nan=nan, posinf=posinf, neginf=neginf))


def _into(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


# --- products ---


def bmm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    return _into(left @ right, out)


def baddbmm(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return start + left @ right


def addmm(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return start + left @ right


def dot(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(np.dot(one.array, other.array))


def einsum(formula: str, *parts: Tensor) -> Tensor:
    return Tensor(np.einsum(formula, *(part.array for part in parts)))


def index_select(x: Tensor, dim: int, index: Tensor, out: Tensor | None = None) -> Tensor:
    return _into(x.index_select(dim, index), out)


# --- a few numbers of many ---


class Ends(NamedTuple):
    """The least and the largest number."""

    min: Tensor
    max: Tensor


def aminmax(x: Tensor) -> Ends:
    return Ends(x.min(), x.max())


def equal(one: Tensor, other: Tensor) -> bool:
    return bool(np.array_equal(one.array, other.array))


def allclose(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(np.allclose(one.array, other.array, rtol, atol, equal_nan))


def std_mean(x: Tensor, dim: Any = None) -> tuple[Tensor, Tensor]:
    return Tensor(np.std(x.array, axis=dim, ddof=1)), Tensor(np.mean(x.array, axis=dim))


def topk(x: Tensor, k: int, sorted: bool = True) -> Largest:
    places = np.argsort(-x.array, kind="stable")[:k]
    return Largest(Tensor(x.array[places], x.dtype), Tensor(places))


def searchsorted(ordered: Tensor, values: Tensor, right: bool = False) -> Tensor:
    """Return where values belong among ordered numbers, along the last axis."""
    lines = ordered.array.reshape(-1, ordered.array.shape[-1])
    wanted = values.array.reshape(-1, values.array.shape[-1])
    side = "right" if right else "left"
    places = [np.searchsorted(line, want, side) for line, want in zip(lines, wanted, strict=True)]
    return Tensor(np.array(places, dtype=np.int64).reshape(values.array.shape))


def bincount(places: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return how often each whole number is there, or what the weights of each add up to."""
    summed = None
    if weights is not None:
        summed = weights.array
    return Tensor(np.bincount(places.array, summed, minlength))


class Limits:
    """The limits of a type of floating numbers; see torch.finfo."""

    def __init__(self, dtype: DType) -> None:
        if dtype is bfloat16:
            self.eps = 2.0**-7
            self.tiny = 2.0**-126
            self.max = float.fromhex("0x1.fep127")
            return
        limits = np.finfo(dtype.storage)
        self.eps = float(limits.eps)
        self.tiny = float(limits.tiny)
        self.max = float(limits.max)


# --- torch.linalg, torch.nn.functional, torch.ops.aten ---


class Orthogonal(NamedTuple):
    """An orthogonal matrix and a triangular one."""

    Q: Tensor
    R: Tensor


def qr(x: Tensor, mode: str = "reduced") -> Orthogonal:
    if mode == "r":
        return Orthogonal(empty(0), Tensor(np.linalg.qr(x.array, "r")))
    q, r = np.linalg.qr(x.array)
    return Orthogonal(Tensor(q), Tensor(r))


def vector_norm(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return x.norm(dim=dim, keepdim=keepdim)


def softplus(x: Tensor) -> Tensor:
    return Tensor(np.logaddexp(x.array, x.array.dtype.type(0)))


def softshrink(x: Tensor, threshold: float) -> Tensor:
    """Return numbers moved towards 0 by a threshold, and 0 if they are nearer."""
    least = x.array.dtype.type(threshold)
    nearer = np.where(x.array > least, x.array - least, np.where(x.array < -least, x.array + least, 0 * x.array))
    return Tensor(nearer, x.dtype)


def one_hot(classes: Tensor, n_classes: int) -> Tensor:
    return Tensor(np.eye(n_classes, dtype=np.int64)[classes.array])


def pad(x: Tensor, widths: Sequence[int]) -> Tensor:
    """Return a tensor with zeros before and behind its last axes, which are named from the last."""
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)][::-1]
    return Tensor(np.pad(x.array, [(0, 0)] * (x.ndim - len(pairs)) + pairs), x.dtype)


def threshold_backward(delta: Tensor, output: Tensor, threshold: float, grad_input: Tensor) -> Tensor:
    np.multiply(delta.array, output.array > threshold, out=grad_input.array)
    return grad_input


def tanh_backward(delta: Tensor, output: Tensor, grad_input: Tensor) -> Tensor:
    np.multiply(delta.array, 1 - np.square(output.array), out=grad_input.array)
    return grad_input
