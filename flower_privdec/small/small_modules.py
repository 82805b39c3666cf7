"""The modules of small models: layers with parameters by torch's names, and the bytes that torch would draw for them.

A module is called only to be tried (`models.build_model`) and to be looked at. What trains is a kernel, which reads the
layers' shapes.

Initial parameters are torch's, bit for bit if they are uniform: the Mersenne Twister of a 64-bit seed, of which torch
takes the lower 32 bits, and 24 bits of each word for a float32. Classes bear torch's names, for these are in the names
of runs (`experiment.run_key.held_by`): a run that some peers train with torch has one name for all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flower_privdec.small.small_tensor import Tensor, float32, is_meta


class Generator:
    """Random numbers of a seed, as torch's on the CPU."""

    def __init__(self, device: object = "cpu") -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> Generator:
        """Begin again with a seed."""
        self._seed = seed
        self._waiting: float | None = None
        self._twister = np.random.MT19937()
        self._twister._legacy_seeding(seed & 0xFFFFFFFF)  # init_genrand, which torch uses too
        return self

    def seed(self) -> int:
        """Return the seed."""
        return self._seed

    def words(self, count: int) -> np.ndarray:
        """Return words of 32 bits, uint64."""
        return self._twister.random_raw(count)

    def uniform(self, count: int) -> np.ndarray:
        """Return numbers in [0, 1), float32: multiples of 2^-24."""
        words = self.words(count) & np.uint64(0xFFFFFF)
        return words.astype(np.float32) * np.float32(2.0**-24)

    def normal(self, count: int) -> np.ndarray:
        """Return standard normals, float32: Box-Muller of 16 uniform numbers at a time, the last 16 drawn anew."""
        if count < 16:
            return self._few_normals(count)

        numbers = self.uniform(count)
        out = numbers.copy()
        for start in range(0, count - 15, 16):
            out[start : start + 16] = _box_muller(numbers[start : start + 16])
        if count % 16:
            out[-16:] = _box_muller(self.uniform(16))
        return out

    def _few_normals(self, count: int) -> np.ndarray:
        """Return normals of pairs of 53-bit numbers, the cosine's first; the sine's may wait for the next call."""
        out: list[float] = []
        while len(out) < count:
            if self._waiting is not None:
                out.append(self._waiting)
                self._waiting = None
                continue
            angle = 2 * math.pi * self._double()
            radius = math.sqrt(-2 * math.log1p(-self._double()))
            out.append(radius * math.cos(angle))
            self._waiting = radius * math.sin(angle)
        return np.array(out, dtype=np.float32)

    def _double(self) -> float:
        high, low = (int(word) for word in self.words(2))
        return ((high << 32 | low) & (2**53 - 1)) * 2.0**-53


def _box_muller(numbers: np.ndarray) -> np.ndarray:
    """Return 16 normals of 16 uniform numbers: the first eight make radii, the others angles."""
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - numbers[:8]))
    angle = np.float32(2 * math.pi) * numbers[8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


default_generator = Generator()


class TrainedTensor(Tensor):
    """A tensor that is trained."""

    __slots__ = ()

    def __init__(self, array: Any, requires_grad: bool = True) -> None:
        super().__init__(array.array if isinstance(array, Tensor) else array, requires_grad=requires_grad)

    def __deepcopy__(self, _memo: object) -> TrainedTensor:
        return TrainedTensor(self.array.copy(), self.requires_grad)


class UninitializedParameter(TrainedTensor):
    """Stands for torch's, which no module here has."""

    __slots__ = ()


class Module:
    """What has parameters and parts; see torch.nn.Module."""

    training: bool

    def __init__(self) -> None:
        own = vars(self)
        own["training"] = True
        own["_parameters"] = {}
        own["_buffers"] = {}
        own["_modules"] = {}
        own["_is_full_backward_hook"] = None
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            own[hooks] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, TrainedTensor):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        for held in ("_parameters", "_modules", "_buffers"):
            known = vars(self).get(held, {})
            if name in known:
                return known[name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __call__(self, *inputs: Any) -> Tensor:
        output: Tensor = self.forward(*inputs)
        output.requires_grad = True  # through which gradients go, written out
        return output

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        raise NotImplementedError

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module and all its parts, with their paths."""
        yield prefix, self
        for name, part in self._modules.items():
            yield from part.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """Yield the module and all its parts."""
        return (part for _, part in self.named_modules())

    def children(self) -> Iterator[Module]:
        """Yield its own parts."""
        return iter(self._modules.values())

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, TrainedTensor]]:
        """Yield its parameters with their paths."""
        for path, part in self.named_modules():
            if recurse or part is self:
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        yield f"{path}.{name}" if path else name, parameter

    def parameters(self, recurse: bool = True) -> Iterator[TrainedTensor]:
        """Yield its parameters."""
        return (parameter for _, parameter in self.named_parameters(recurse))

    def named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: no module here has buffers."""
        return iter(())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters by their paths."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Copy parameters of the same names."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def to(self, *wanted: Any) -> Module:
        """Bring the parameters into a type."""
        return self._apply(lambda tensor: tensor.to(*wanted))

    def _apply(self, change: Callable[[Tensor], Tensor]) -> Module:
        """Put what a function returns for them in place of the parameters."""
        for parameter in self.parameters():
            other = change(parameter.detach())
            parameter.array = other.array
            parameter.dtype = other.dtype
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Let all parameters be trained, or none."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def eval(self) -> Module:
        """Say that it is not trained."""
        for part in self.modules():
            vars(part)["training"] = False
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other


class Sequential(Module):
    """Parts one after the other."""

    def __init__(self, *parts: Module) -> None:
        super().__init__()
        for place, part in enumerate(parts):
            self._modules[str(place)] = part

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the last part."""
        for part in self._modules.values():
            x = part(x)
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __getitem__(self, place: int) -> Module:
        return list(self._modules.values())[place]


class Linear(Module):
    """W x + b."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

        # As torch computes the bound: 1 / sqrt(in_features), but for its rounding.
        gain = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2))
        bound = math.sqrt(3.0) * (gain / math.sqrt(in_features))
        self.weight = TrainedTensor(_uniform((out_features, in_features), bound))
        if bias:
            self.bias = TrainedTensor(_uniform((out_features,), 1 / math.sqrt(in_features)))
        else:
            self._parameters["bias"] = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out_features]."""
        y = x.to(self.weight.dtype) @ self.weight.t()
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """A row of a table for each token."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None
        self.max_norm = None
        self.norm_type = 2.0
        self.scale_grad_by_freq = False
        shape = (num_embeddings, embedding_dim)
        if is_meta():
            numbers = _nothing(shape)
        else:
            numbers = default_generator.normal(math.prod(shape)).reshape(shape)
        self.weight = TrainedTensor(numbers)
        self.sparse = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows [..., embedding_dim]."""
        return self.weight.detach()[x]


class Flatten(Module):
    """All axes but the first as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = start_dim
        self.end_dim = end_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return [examples, numbers]."""
        return x.flatten(self.start_dim, self.end_dim)


class IdentityLayer(Module):
    """Its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class ReLU(Module):
    """max(0, x)."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """Return max(0, x)."""
        return x.clone().relu_()


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh(x)."""
        return x.clone().tanh_()  # type: ignore[attr-defined, no-any-return]


def _uniform(shape: tuple[int, ...], bound: float) -> np.ndarray:
    """Draw float32 numbers between -bound and bound."""
    if is_meta():
        return _nothing(shape)
    # Torch multiplies and adds with one rounding, as float64 does here.
    high = float(np.float32(bound))
    drawn = default_generator.uniform(math.prod(shape)).astype(np.float64) * (high + high) - high
    return drawn.astype(np.float32).reshape(shape)


def _nothing(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array that has a shape and no memory of that size."""
    return np.broadcast_to(np.zeros((), float32.storage), shape)


class Absent(Module):
    """Stands for a module of torch that no small model has; nothing is an instance of it."""


_PLACES = {
    "container": (Sequential,),
    "linear": (Linear, IdentityLayer),
    "sparse": (Embedding,),
    "flatten": (Flatten,),
    "activation": (ReLU, Tanh),
}
for _place, _classes in _PLACES.items():
    for _class in _classes:
        _class.__module__ = f"torch.nn.modules.{_place}"
        _class.__qualname__ = _class.__name__ = _class.__name__.removesuffix("Layer")
