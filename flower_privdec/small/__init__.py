"""What stands in for torch at a small peer: the part of it that linear and small models need, over NumPy.

`import torch` takes 500 MiB of memory, and a peer of a softmax or a small MLP uses some hundred of its functions. Every
file on a peer's path takes torch from `common.deferred`. In a process that is small, this package is what they get: the
same names, over arrays of NumPy. So algorithms, exchanges, privacy, wire and checkpoints exist once, and a small peer
does what every other peer does: the same batches, clipping, noise, frames, ledger lines and checkpoints, to rounding.

    small_tensor    tensors, types and devices
    operations      functions
    small_modules   layers, and the random numbers that torch begins models with

What is not here needs torch. `network.peer.small` says so before a peer starts; an attribute of torch that is missing
raises `NeedsTorchError`, with its name.
"""

# ruff: noqa: F401 (who takes this for torch reads these names)

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.small import operations, small_modules
from flower_privdec.small.operations import (
    Limits,
    abs,
    add,
    addcmul,
    addmm,
    allclose,
    aminmax,
    arange,
    as_strided,
    as_tensor,
    baddbmm,
    bincount,
    bmm,
    cat,
    dot,
    einsum,
    empty,
    empty_like,
    equal,
    eye,
    from_numpy,
    full,
    full_like,
    hypot,
    index_select,
    isfinite,
    isnan,
    lerp,
    linspace,
    log,
    log1p,
    maximum,
    minimum,
    mul,
    nan_to_num,
    ones,
    ones_like,
    randint,
    randn,
    relu,
    rsub,
    searchsorted,
    sigmoid,
    split,
    stack,
    std_mean,
    tensor,
    topk,
    where,
    zeros,
    zeros_like,
)
from flower_privdec.small.small_modules import Generator, default_generator
from flower_privdec.small.small_tensor import (
    DType,
    SmallDevice,
    Tensor,
    TensorSize,
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    promoted,
    uint8,
    uint16,
)

# Numbers that overflow, and what is not a number, are looked for where it matters: torch says nothing either.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"flower_privdec\.small\.")

__version__ = f"none, NumPy {np.__version__}"
device = SmallDevice
dtype = DType
Size = TensorSize
finfo = Limits
promote_types = promoted
bool = bool_
inf = float("inf")
nan = float("nan")
strided = "strided"


class NeedsTorchError(ScenarioError, AttributeError):
    """Something of torch that a small peer has not."""


def _missing(name: str) -> NeedsTorchError:
    return NeedsTorchError(
        f"{name} is not among what a small peer has without torch: install torch, or leave --small out",
        code="small.needs-torch",
    )


def __getattr__(name: str) -> Any:
    raise _missing(f"torch.{name}")


class _Part:
    """A part of torch: what is here, and an error for anything else."""

    def __init__(self, name: str, **here: Any) -> None:
        vars(self).update(here)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise _missing(f"{self._name}.{attribute}")


class _Without(contextlib.ContextDecorator):
    """Stands for torch.no_grad and torch.enable_grad: there is no autograd to switch."""

    def __enter__(self) -> _Without:
        return self

    def __exit__(self, *_: object) -> None:
        pass


no_grad = enable_grad = inference_mode = _Without


def set_num_threads(threads: int) -> None:
    """Do nothing: products take as many threads as their library was told when it was loaded."""


def get_num_threads() -> int:
    """Return 1."""
    return 1


@contextlib.contextmanager
def _fork_rng(devices: object = ()) -> Iterator[None]:
    """Leave the generator as it was."""
    before = dict(vars(default_generator))
    words = default_generator._twister.state
    try:
        yield
    finally:
        vars(default_generator).update(before)
        default_generator._twister.state = words


def _is_available() -> Any:
    return False


random = _Part("torch.random", fork_rng=_fork_rng)
cuda = _Part("torch.cuda", is_available=_is_available)
linalg = _Part("torch.linalg", vector_norm=operations.vector_norm, qr=operations.qr)
ops = _Part(
    "torch.ops",
    aten=_Part(
        "torch.ops.aten",
        threshold_backward=_Part("torch.ops.aten.threshold_backward", grad_input=operations.threshold_backward),
        tanh_backward=_Part("torch.ops.aten.tanh_backward", grad_input=operations.tanh_backward),
    ),
)
nn = _Part(
    "torch.nn",
    Module=small_modules.Module,
    Parameter=small_modules.TrainedTensor,
    Sequential=small_modules.Sequential,
    Linear=small_modules.Linear,
    Embedding=small_modules.Embedding,
    Flatten=small_modules.Flatten,
    Identity=small_modules.IdentityLayer,
    ReLU=small_modules.ReLU,
    Tanh=small_modules.Tanh,
    functional=_Part(
        "torch.nn.functional",
        softplus=operations.softplus,
        softshrink=operations.softshrink,
        one_hot=operations.one_hot,
        pad=operations.pad,
    ),
    parameter=_Part("torch.nn.parameter", UninitializedParameter=small_modules.UninitializedParameter),
    modules=_Part(
        "torch.nn.modules",
        instancenorm=_Part("torch.nn.modules.instancenorm", _InstanceNorm=small_modules.Absent),
        batchnorm=_Part("torch.nn.modules.batchnorm", _BatchNorm=small_modules.Absent),
        dropout=_Part("torch.nn.modules.dropout", _DropoutNd=small_modules.Absent),
    ),
)
for _absent in ("Conv2d", "MaxPool2d", "GroupNorm", "LayerNorm", "RMSNorm", "RNNBase", "LSTM"):
    setattr(nn, _absent, small_modules.Absent)
