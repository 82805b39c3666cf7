"""Tensors of a peer without torch: an array of NumPy behind the names of torch's methods that peers use.

What differs between the two libraries is decided here, as torch has it:

    a number without axes     is a view that can be written to, and never changes the type of a tensor with axes
    whole numbers             divided, or met by a float, become float32; their sum is int64
    bfloat16                  NumPy has no such type: its bits lie in a uint16 array, and what is computed is float32
    view                      shares memory, or fails

There is no autograd: gradients are written out (`gradients.stacked`, `gradients.words`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class TensorSize(tuple[int, ...]):
    """A shape."""

    def numel(self) -> int:
        """Return how many numbers a tensor of this shape has."""
        return math.prod(self)

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class DType:
    """A type of numbers; there is one object for each."""

    def __init__(self, name: str, storage: str | None = None) -> None:
        """Take torch's name, and the type of the array that holds the bits if it has another name in NumPy."""
        self.name = name
        self.storage = np.dtype(storage or name)
        self.itemsize = self.storage.itemsize
        self.is_floating_point = "float" in name
        self.is_complex = False

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return named_dtype, (self.name,)


float64 = DType("float64")
float32 = DType("float32")
float16 = DType("float16")
bfloat16 = DType("bfloat16", "uint16")
int64 = DType("int64")
int32 = DType("int32")
int16 = DType("int16")
int8 = DType("int8")
uint8 = DType("uint8")
uint16 = DType("uint16")
bool_ = DType("bool")
DTYPES = (float64, float32, float16, int64, int32, int16, int8, uint8, uint16, bool_)
_OF_ARRAY = {dtype.storage: dtype for dtype in DTYPES}
_BY_NAME = {dtype.name: dtype for dtype in (*DTYPES, bfloat16)}


def named_dtype(name: str) -> DType:
    """Return the type of a name."""
    return _BY_NAME[name]


class SmallDevice:
    """Where a tensor lies: in the memory of the CPU, whatever was asked for.

    On `meta`, which only counts parameters, an array has a shape and no memory of that size.
    """

    def __init__(self, type: str | SmallDevice = "cpu") -> None:
        self.type = type.type if isinstance(type, SmallDevice) else str(type)
        self.index = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SmallDevice) and other.type == self.type

    def __hash__(self) -> int:
        return hash(self.type)

    def __str__(self) -> str:
        return self.type

    def __repr__(self) -> str:
        return f"device(type='{self.type}')"

    def __enter__(self) -> SmallDevice:
        _default.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _default.pop()


_default: list[SmallDevice] = []  # of new parameters, the last one first
CPU = SmallDevice()


def is_meta() -> bool:
    """Return whether parameters that are made now are only counted."""
    return bool(_default) and _default[-1].type == "meta"


class Largest(NamedTuple):
    """The largest numbers, or the sorted ones, and their places."""

    values: Tensor
    indices: Tensor


class Tensor:
    """An array with torch's methods; those whose names end with an underscore write into it.

    Attributes:
        array: the numbers; of bfloat16 their bits.
        dtype: their type.
        requires_grad: whether it is a trained parameter, or was computed of some.
    """

    __slots__ = ("array", "dtype", "requires_grad")
    __array_priority__ = 1000  # NumPy leaves operators of an array and a tensor to the tensor

    is_cuda = False
    is_cpu = True
    device = CPU
    layout = "strided"

    def __init__(self, array: Any, dtype: DType | None = None, requires_grad: bool = False) -> None:
        self.array: np.ndarray = np.asarray(array)
        self.dtype = dtype or _OF_ARRAY[self.array.dtype]
        self.requires_grad = requires_grad

    # --- what it is ---

    @property
    def shape(self) -> TensorSize:
        return TensorSize(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, other: Tensor) -> None:
        self.array = other.array

    @property
    def T(self) -> Tensor:  # noqa: N802 (torch's name)
        return Tensor(self.array.T, self.dtype)

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.array.shape[axis]

    def dim(self) -> int:
        return self.array.ndim

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        return strides if axis is None else strides[axis]

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0]

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self.requires_grad = requires_grad
        return self

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __float__(self) -> float:
        return float(self.numbers)

    def __int__(self) -> int:
        return int(self.array)

    def __index__(self) -> int:
        return int(self.array)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"tensor({self.array!r})"

    def __deepcopy__(self, _memo: object) -> Tensor:
        return Tensor(self.array.copy(), self.dtype, self.requires_grad)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self.array)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype=dtype)

    @property
    def numbers(self) -> np.ndarray:
        """The numbers, to be read: of bfloat16 as float32."""
        return converted(self, float32).array if self.dtype is bfloat16 else self.array

    def item(self) -> Any:
        return self.numbers.item()

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def numpy(self, force: bool = False) -> np.ndarray:
        return self.array

    # --- copies and other types ---

    def detach(self) -> Tensor:
        return Tensor(self.array, self.dtype)

    def cpu(self) -> Tensor:
        return self

    def clone(self) -> Tensor:
        return Tensor(np.array(self.array, order="K"), self.dtype)

    def contiguous(self) -> Tensor:
        return self if self.array.flags.c_contiguous else Tensor(np.ascontiguousarray(self.array), self.dtype)

    def to(self, *wanted: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        """Return the tensor in the type that is named, or that another tensor has; devices change nothing."""
        for one in wanted:
            if isinstance(one, DType):
                dtype = one
            elif isinstance(one, Tensor):
                dtype = one.dtype
        if dtype is None or dtype is self.dtype:
            return self
        return converted(self, dtype)

    def type_as(self, other: Tensor) -> Tensor:
        return self.to(other.dtype)

    def double(self) -> Tensor:
        return self.to(float64)

    def float(self) -> Tensor:
        return self.to(float32)

    def long(self) -> Tensor:
        return self.to(int64)

    def int(self) -> Tensor:
        return self.to(int32)

    def bool(self) -> Tensor:
        return self.to(bool_)

    def _made(self, maker: Callable[..., np.ndarray], shape: Sequence[Any], dtype: DType | None, *more: Any) -> Tensor:
        of = dtype or self.dtype
        return Tensor(maker(shape_of(shape), *more, dtype=of.storage), of)

    def new_zeros(self, *shape: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        return self._made(np.zeros, shape, dtype)

    def new_ones(self, *shape: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        return self._made(np.ones, shape, dtype)

    def new_empty(self, *shape: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        return self._made(np.empty, shape, dtype)

    def new_full(self, shape: Any, value: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        return self._made(np.full, (shape,), dtype, value)

    def new_tensor(self, values: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        of = dtype or self.dtype
        return Tensor(np.array(plain(values), dtype=of.storage), of)

    # --- other shapes of the same memory ---

    def view(self, *shape: Any) -> Tensor:
        """Return the same memory in another shape, or as numbers of another type of the same size.

        Raises:
            ValueError: it does not lie as the shape needs it.
        """
        if len(shape) == 1 and isinstance(shape[0], DType):
            return Tensor(self.array.view(shape[0].storage), shape[0])
        return Tensor(np.reshape(self.array, shape_of(shape), copy=False), self.dtype)

    def view_as(self, other: Tensor) -> Tensor:
        return self.view(*other.shape)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape_of(shape)), self.dtype)

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        shape = self.array.shape
        end = end % max(1, len(shape))
        return Tensor(
            self.array.reshape(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]), self.dtype
        )

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Tensor:
        shape = self.array.shape
        axis = axis % len(shape)
        return Tensor(self.array.reshape(*shape[:axis], *sizes, *shape[axis + 1 :]), self.dtype)

    def unsqueeze(self, axis: int) -> Tensor:
        return Tensor(np.expand_dims(self.array, axis), self.dtype)

    def squeeze(self, axis: int | None = None) -> Tensor:
        if axis is not None and self.array.shape[axis] != 1:
            return self
        return Tensor(np.squeeze(self.array, axis), self.dtype)

    def transpose(self, one: int, other: int) -> Tensor:
        return Tensor(np.swapaxes(self.array, one, other), self.dtype)

    def t(self) -> Tensor:
        return Tensor(self.array.T, self.dtype)

    def permute(self, *axes: Any) -> Tensor:
        return Tensor(np.transpose(self.array, shape_of(axes)), self.dtype)

    def expand(self, *shape: Any) -> Tensor:
        """Return the tensor repeated without a copy; -1 leaves an axis as it is."""
        wanted = shape_of(shape)
        own = (1,) * (len(wanted) - self.ndim) + self.array.shape
        sizes = tuple(old if new == -1 else new for new, old in zip(wanted, own, strict=True))
        return Tensor(np.broadcast_to(self.array, sizes), self.dtype)

    def expand_as(self, other: Tensor) -> Tensor:
        return self.expand(*other.shape)

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        places: list[slice] = [slice(None)] * self.ndim
        places[axis] = slice(start, start + length)
        return Tensor(self.array[tuple(places)], self.dtype)

    def split(self, size: int, dim: int = 0) -> tuple[Tensor, ...]:
        whole = self.array.shape[dim]
        return tuple(self.narrow(dim, start, min(size, whole - start)) for start in range(0, whole, size))

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        parts = np.moveaxis(self.array, dim, 0)
        return tuple(Tensor(parts[i, ...], self.dtype) for i in range(len(parts)))

    def diagonal(self, dim1: int = 0, dim2: int = 1) -> Tensor:
        return Tensor(np.diagonal(self.array, axis1=dim1, axis2=dim2), self.dtype)

    def repeat_interleave(self, times: int) -> Tensor:
        return Tensor(np.repeat(self.array, times), self.dtype)

    def repeat(self, *times: Any) -> Tensor:
        return Tensor(np.tile(self.array, shape_of(times)), self.dtype)

    # --- places ---

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[places_of(key)], self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.to(self.dtype).array
        self.array[places_of(key)] = value

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        return Tensor(np.take(self.array, index.array, axis), self.dtype)

    def gather(self, axis: int, index: Tensor) -> Tensor:
        return Tensor(np.take_along_axis(self.array, index.array, axis), self.dtype)

    def scatter(self, axis: int, index: Tensor, value: Any) -> Tensor:
        out = self.clone()
        np.put_along_axis(out.array, index.array, plain(value), axis)
        return out

    def scatter_add(self, axis: int, index: Tensor, value: Tensor) -> Tensor:
        return self.clone().scatter_add_(axis, index, value)

    def scatter_add_(self, axis: int, index: Tensor, value: Tensor) -> Tensor:
        axis = axis % self.ndim
        places = list(np.indices(index.array.shape, sparse=True))
        places[axis] = index.array
        np.add.at(self.array, tuple(places), value.array[tuple(map(slice, index.array.shape))])
        return self

    def index_add_(self, axis: int, index: Tensor, value: Tensor) -> Tensor:
        np.add.at(np.moveaxis(self.array, axis, 0), index.array, np.moveaxis(value.array, axis, 0))
        return self

    def index_copy_(self, axis: int, index: Tensor, value: Tensor) -> Tensor:
        np.moveaxis(self.array, axis, 0)[index.array] = np.moveaxis(value.to(self.dtype).array, axis, 0)
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> Tensor:
        return Tensor(np.where(mask.array, self.array.dtype.type(value), self.array), self.dtype)

    def masked_fill_(self, mask: Tensor, value: Any) -> Tensor:
        np.copyto(self.array, self.array.dtype.type(plain(value)), where=np.broadcast_to(mask.array, self.array.shape))
        return self

    def nonzero(self) -> Tensor:
        return Tensor(np.stack(np.nonzero(self.array), axis=-1))

    def unique(self, return_inverse: bool = False) -> Any:
        if not return_inverse:
            return Tensor(np.unique(self.array), self.dtype)
        values, inverse = np.unique(self.array, return_inverse=True)
        return Tensor(values, self.dtype), Tensor(inverse.reshape(self.array.shape))

    def diff(self) -> Tensor:
        return Tensor(np.diff(self.array), self.dtype)

    def sort(self, axis: int = -1) -> Largest:
        order = np.argsort(self.array, axis, kind="stable")
        return Largest(Tensor(np.take_along_axis(self.array, order, axis), self.dtype), Tensor(order))

    # --- written into ---

    def copy_(self, other: Any) -> Tensor:
        source = other.to(self.dtype).array if isinstance(other, Tensor) else other
        np.copyto(self.array, source, casting="unsafe")
        return self

    def zero_(self) -> Tensor:
        self.array[...] = 0
        return self

    def fill_(self, value: Any) -> Tensor:
        self.array[...] = plain(value)
        return self

    def _added(self, other: Any, alpha: Any, operation: Any) -> np.ndarray:
        ours, theirs = operands(self, other)
        if alpha != 1:
            theirs = theirs * ours.dtype.type(alpha)
        return operation(ours, theirs)

    def add(self, other: Any, alpha: Any = 1) -> Tensor:
        return Tensor(self._added(other, alpha, np.add))

    def sub(self, other: Any, alpha: Any = 1) -> Tensor:
        return Tensor(self._added(other, alpha, np.subtract))

    def add_(self, other: Any, alpha: Any = 1) -> Tensor:
        return self._put(np.add, other, alpha)

    def sub_(self, other: Any, alpha: Any = 1) -> Tensor:
        return self._put(np.subtract, other, alpha)

    def _put(self, operation: Any, other: Any, alpha: Any = 1) -> Tensor:
        value = plain(other)
        if alpha != 1:
            value = value * self.array.dtype.type(alpha)
        operation(self.array, value, out=self.array, casting="unsafe", dtype=self.array.dtype)
        return self

    def mul_(self, other: Any) -> Tensor:
        return self._put(np.multiply, other)

    def div_(self, other: Any) -> Tensor:
        return self._put(np.divide, other)

    def addcmul_(self, one: Tensor, other: Tensor, value: Any = 1) -> Tensor:
        return self.add_(one * other, alpha=value)

    def addmm_(self, left: Tensor, right: Tensor) -> Tensor:
        self.array += left.array @ right.array
        return self

    def baddbmm_(self, left: Tensor, right: Tensor) -> Tensor:
        self.array += left.array @ right.array
        return self

    def lerp_(self, end: Tensor, weight: Any) -> Tensor:
        return self.add_((end - self) * weight)

    def clamp(self, min: Any = None, max: Any = None) -> Tensor:
        return Tensor(np.clip(self.array, _bound(self, min), _bound(self, max)), self.dtype)

    def clamp_(self, min: Any = None, max: Any = None) -> Tensor:
        np.clip(self.array, _bound(self, min), _bound(self, max), out=self.array)
        return self

    def clamp_min(self, least: Any) -> Tensor:
        return self.clamp(min=least)

    def clamp_min_(self, least: Any) -> Tensor:
        return self.clamp_(min=least)

    def clamp_max_(self, most: Any) -> Tensor:
        return self.clamp_(max=most)

    def relu_(self) -> Tensor:
        np.maximum(self.array, 0, out=self.array)
        return self

    # --- one number of many ---

    def _reduced(self, operation: Any, axis: Any, keepdim: bool, dtype: DType | None = None) -> Tensor:
        array = self.numbers
        if dtype is not None:
            array = array.astype(dtype.storage, copy=False)
        return Tensor(operation(array, axis=axis, keepdims=keepdim))

    def sum(self, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
        return self._reduced(np.sum, dim, keepdim, dtype or (None if self.dtype.is_floating_point else int64))

    def mean(self, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
        return self._reduced(np.mean, dim, keepdim, dtype)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return Tensor(self.numbers.max())
        places = np.argmax(self.array, dim, keepdims=True)
        values = np.take_along_axis(self.array, places, dim)
        if not keepdim:
            return Largest(Tensor(values.squeeze(dim), self.dtype), Tensor(places.squeeze(dim)))
        return Largest(Tensor(values, self.dtype), Tensor(places))

    def min(self) -> Tensor:
        return Tensor(self.numbers.min())

    def amax(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._reduced(np.max, dim, keepdim)

    def amin(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._reduced(np.min, dim, keepdim)

    def all(self, dim: Any = None) -> Tensor:
        return self._reduced(np.all, dim, False)

    def any(self, dim: Any = None) -> Tensor:
        return self._reduced(np.any, dim, False)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return Tensor(np.argmax(self.array, dim, keepdims=keepdim) if dim is not None else np.argmax(self.array))

    def dot(self, other: Tensor) -> Tensor:
        return Tensor(np.dot(self.array, other.array))

    def cumsum(self, dim: int) -> Tensor:
        return Tensor(np.cumsum(self.array, dim))

    def norm(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return Tensor(np.sqrt(np.sum(np.square(self.array), axis=dim, keepdims=keepdim)))

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        top = np.max(self.array, axis=dim, keepdims=True)
        top = np.where(np.isfinite(top), top, 0).astype(self.array.dtype, copy=False)
        total = np.log(np.sum(np.exp(self.array - top), axis=dim, keepdims=True)) + top
        return Tensor(total if keepdim else total.squeeze(dim))

    def softmax(self, dim: int) -> Tensor:
        powers = np.exp(self.array - np.max(self.array, axis=dim, keepdims=True))
        powers /= np.sum(powers, axis=dim, keepdims=True)
        return Tensor(powers)

    def log_softmax(self, dim: int) -> Tensor:
        return self - self.logsumexp(dim, keepdim=True)

    # --- comparisons ---

    def gt(self, other: Any) -> Tensor:
        return self > other

    def nan_to_num_(self, nan: float = 0.0) -> Tensor:
        self.array[np.isnan(self.array)] = nan
        return self

    def isfinite(self) -> Tensor:
        return Tensor(np.isfinite(self.numbers))

    def isnan(self) -> Tensor:
        return Tensor(np.isnan(self.numbers))

    def __matmul__(self, other: Tensor) -> Tensor:
        return Tensor(np.matmul(self.array, other.array))

    def __invert__(self) -> Tensor:
        return Tensor(np.invert(self.array), self.dtype)

    def __neg__(self) -> Tensor:
        return Tensor(np.negative(self.array), self.dtype)


def plain(value: Any) -> Any:
    """Return the array of a tensor, the number of a NumPy scalar, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, np.generic):
        return value.item()
    return value


def _bound(tensor: Tensor, value: Any) -> Any:
    """Return an end of a range in the type of the tensor that it bounds."""
    value = plain(value)
    if isinstance(value, np.ndarray):
        return value.astype(tensor.array.dtype, copy=False)
    return value


def shape_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape that is given as numbers, or as one sequence of them."""
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = shape[0]
    return tuple(int(size) for size in shape)


def places_of(key: Any) -> Any:
    """Return an index for NumPy that gives a view, also of a single number, unless it lists places."""
    parts = key if isinstance(key, tuple) else (key,)
    chosen = tuple(plain(part) for part in parts)
    lists_places = any(isinstance(part, np.ndarray | list) for part in chosen)
    if lists_places or any(part is Ellipsis for part in chosen):
        return chosen
    return (*chosen, Ellipsis)


def promoted(one: DType, other: DType) -> DType:
    """Return the type that numbers of two types are computed in: a float's before a whole number's."""
    if one is other:
        return one
    if one.is_floating_point != other.is_floating_point:
        return one if one.is_floating_point else other
    if bfloat16 in (one, other):
        return float32 if float16 in (one, other) else promoted(float32, other if one is bfloat16 else one)
    return _OF_ARRAY[np.promote_types(one.storage, other.storage)]


def _kind(dtype: DType) -> int:
    if dtype is bool_:
        return 0
    return 2 if dtype.is_floating_point else 1


def operands(left: Any, right: Any) -> tuple[Any, Any]:
    """Return what NumPy is to combine two tensors, or a tensor and a number, of: in torch's type of the result."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype is right.dtype:
            return left.numbers, right.numbers
        wanted = promoted(left.dtype, right.dtype)
        # A number without axes keeps the type of the other, unless it is of a higher kind.
        if left.ndim and not right.ndim and _kind(left.dtype) >= _kind(right.dtype):
            wanted = left.dtype
        elif right.ndim and not left.ndim and _kind(right.dtype) >= _kind(left.dtype):
            wanted = right.dtype
        return left.to(wanted).numbers, right.to(wanted).numbers

    if isinstance(left, Tensor):
        return left.to(_beside_number(left.dtype, right)).numbers, plain(right)
    return plain(left), right.to(_beside_number(right.dtype, left)).numbers


def _beside_number(dtype: DType, number: Any) -> DType:
    """Return the type of a tensor that meets a number of Python."""
    if isinstance(number, float | np.floating) and not dtype.is_floating_point:
        return float32
    if isinstance(number, int | np.integer) and not isinstance(number, bool) and dtype is bool_:
        return int64
    return dtype


def converted(tensor: Tensor, dtype: DType) -> Tensor:
    """Return a tensor in another type; to bfloat16 numbers round to the nearest, halves to even."""
    array = tensor.array
    if tensor.dtype is bfloat16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if dtype is not bfloat16:
        with np.errstate(over="ignore", invalid="ignore"):
            return Tensor(array.astype(dtype.storage), dtype)

    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return Tensor(np.where(is_nan, 0x7FC0, rounded).astype(np.uint16), bfloat16)


def _binary(operation: Any, swapped: bool = False) -> Callable[[Tensor, Any], Any]:
    def combine(self: Tensor, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        ours, theirs = operands(other, self) if swapped else operands(self, other)
        return Tensor(operation(ours, theirs))

    return combine


def _divided(ours: np.ndarray, theirs: Any) -> np.ndarray:
    """Divide; whole numbers by whole numbers are float32."""
    if not any(np.issubdtype(np.asarray(part).dtype, np.floating) for part in (ours, theirs)):
        return np.divide(ours, theirs).astype(np.float32)
    return np.divide(ours, theirs)


_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": _divided,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_IN_PLACE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide}
_OF_ONE = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sign": np.sign,
    "tanh": np.tanh,
    "square": np.square,
    "neg": np.negative,
    "round": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
    "reciprocal": np.reciprocal,
}


def _in_place(operation: Any) -> Callable[[Tensor, Any], Tensor]:
    def combine(self: Tensor, other: Any) -> Tensor:
        return self._put(operation, other)

    return combine


def _of_one(operation: Any) -> Callable[[Tensor], Tensor]:
    def apply(self: Tensor) -> Tensor:
        return Tensor(operation(self.numbers))

    return apply


def _of_one_in_place(operation: Any) -> Callable[[Tensor], Tensor]:
    def apply(self: Tensor) -> Tensor:
        operation(self.array, out=self.array)
        return self

    return apply


for _name, _operation in (_OPERATORS | _COMPARISONS).items():
    setattr(Tensor, f"__{_name}__", _binary(_operation))
for _name, _operation in _OPERATORS.items():
    setattr(Tensor, f"__r{_name}__", _binary(_operation, swapped=True))
for _name, _operation in _IN_PLACE.items():
    setattr(Tensor, f"__i{_name}__", _in_place(_operation))
for _name, _operation in _OF_ONE.items():
    setattr(Tensor, _name, _of_one(_operation))
    setattr(Tensor, f"{_name}_", _of_one_in_place(_operation))
setattr(Tensor, "__abs__", _of_one(np.abs))  # noqa: B010 (mypy takes no assignment to a class)
for _name, _operation in {"mul": np.multiply, "div": _divided}.items():
    setattr(Tensor, _name, _binary(_operation))
