"""The interface of gradient kernels, the layout of a row, the clip coefficient, and upper bounds on norms.

A clipped sum is private only if the norm an example is scaled by is at least that of the vector really added for it.
Every norm of this package is therefore an upper bound. With u half the distance from 1 to the next number (6e-8 in
float32), and t the smallest normal number:

1. **Sums.** Squares summed in any order lose at most a factor (1 - u)^n and, by underflow (whether or not the machine
   keeps subnormal numbers), 2 n t: so |v| <= (computed + sqrt(2 n t)) (1 + (n / 2 + 2) u). Vectors longer than LONGEST
   are summed in blocks of BLOCK, whose norms are summed likewise: that keeps (n / 2) u below 1.3e-4 in float32, and the
   floor below sqrt(8 n t), 3e-19 sqrt(n).
2. **Products.** A gradient added as a product u delta^T has norm |u| |delta|, and each factor has its own floor:
   an underflow in one must not be multiplied by the other, which may be huge.
3. **Coefficients.** clip / norm, its product with weight and scale, with delta, and with u round five times; the few
   operations that put a norm together some twenty. ROUNDINGS u covers them all.

The bound is `floor(n) + (1 + slack(n)) computed`. It exceeds the norm by 3e-5 of it or so in the usual sizes.

An example whose bound is beyond LARGEST, infinite or not a number counts as zero: the same for overflow anywhere in
the model as for features, parameters or divisors that are not numbers. Below LARGEST nothing that is computed from
clip / norm underflows, as long as the clip norm and its product with |scale|, which are public, are above 1e-15.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, overload

from flower_privdec.common.deferred import nn, torch
from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.user_code import last_line_of_users
from flower_privdec.models import fix_norms, padding_rows, parameter_count, trained
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.tasks.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 4096  # numbers summed at once
BLOCK = 1024  # numbers in each block of a longer vector
ROUNDINGS = 32  # of u: all that is computed beside sums, see 3
LARGEST = {torch.float32: 2.0**64, torch.float64: 2.0**512}


def length(vectors: Tensor) -> Tensor:
    """Return the norms [...] of vectors [..., n] as computed, of long ones in blocks."""
    n = vectors.shape[-1]
    if n <= LONGEST:
        computed: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return computed

    whole = n - n % BLOCK
    blocks = length(vectors[..., :whole].unflatten(-1, (-1, BLOCK)))
    rest = length(vectors[..., whole:]).unsqueeze(-1)
    return length(torch.cat([blocks, rest], -1))


@cache
def slack(dtype: torch.dtype, *sizes: int) -> float:
    """Return by what fraction the product of norms of vectors of these sizes may exceed the computed one."""
    additions = sum(_summed(n) for n in sizes)
    return (additions / 2 + ROUNDINGS) * torch.finfo(dtype).eps / 2


def _summed(n: int) -> int:
    """Return the most additions that a number goes through on its way into a norm."""
    if n <= LONGEST:
        return n
    return BLOCK + _summed(n // BLOCK + 1)


def floor(like: Tensor, n: int) -> Tensor:
    """Return the largest norm of a vector of n numbers that underflow may hide, without axes; of `like`'s type."""
    return constant(math.sqrt(8 * n * torch.finfo(like.dtype).tiny), like.dtype, like.device)


@cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor without axes, made once."""
    return torch.tensor(value, dtype=dtype, device=device)


def upper(vectors: Tensor) -> Tensor:
    """Return upper bounds [...] on the norms of vectors [..., n]."""
    n = vectors.shape[-1]
    return torch.add(floor(vectors, n), length(vectors), alpha=1 + slack(vectors.dtype, n))


def beyond(norms: Tensor, *, wait: bool = True) -> Tensor | None:
    """Return which norms are infinite, not numbers or beyond LARGEST; None if none is.

    Reading the answer back from a GPU waits for it; without `wait` the mask is returned even if none is.
    """
    largest = LARGEST[norms.dtype]
    if norms.numel() == 0 or (wait and norms.max().item() <= largest):
        return None
    return ~(norms <= largest)  # and not norms > largest, which is false for NaN


class Inputs(Protocol):
    """Examples for each row: x [m, B, *shape], numbers or integer tokens, and targets y [m, B, ...] for the loss."""

    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...


class LabelledInputs(Inputs, Protocol):
    """A batch for each row: inputs with a weight [m, B], 0 for padding."""

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Clipping:
    """What turns each row's gradients into its sum; row i of each tensor [m] belongs to row i.

    Attributes:
        clip_norm: largest L2 norm of one example's gradient; None does not clip.
        scale: factor of the row's sum.
        divisor: push-sum weights that de-bias the parameters; None divides by nothing.
    """

    clip_norm: Tensor | None
    scale: Tensor
    divisor: Tensor | None = None

    def rows(self, rows: slice) -> Clipping:
        """Return the slice for some rows."""
        clip_norm = None if self.clip_norm is None else self.clip_norm[rows]
        divisor = None if self.divisor is None else self.divisor[rows]
        return Clipping(clip_norm, self.scale[rows], divisor)

    def coefficient(self, norms: Tensor, weight: Tensor) -> Tensor:
        """Return scale * weight * min(1, clip_norm / norm) for each example, [m, B]."""
        factor = weight * self.scale.unsqueeze(1)
        if self.clip_norm is None:
            return factor.to(norms.dtype)
        return (self.clip_norm.unsqueeze(1) / norms).clamp_max_(1).mul_(factor)


@dataclass(frozen=True)
class RowsOfBatch:
    """A part of a batch: see LabelledInputs."""

    x: Any
    y: Tensor
    weight: Tensor


class GradientKernel(ABC):
    """Clipped gradients of a cohort: row i of every tensor is one peer's, and depends on no other row.

    Attributes:
        d: the number of trained parameters.
        padding: the columns of a row that no example ever has a gradient in, see `padding_columns`.
    """

    def __init__(self, module: nn.Module, loss: Loss, memory_bytes: int) -> None:
        self.d = parameter_count(module)
        self.padding = padding_columns(module)
        self._loss = loss
        self._memory = memory_bytes

    @torch.no_grad()
    def add_clipped_(
        self,
        out: Tensor,
        params: Tensor,
        batch: LabelledInputs,
        clip_norm: Tensor | None,
        scale: Tensor,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Add clipped gradient sums in place.

            out[i] += scale[i] * sum_b weight[i, b] * g_ib * min(1, clip_norm[i] / |g_ib|)

        where g_ib is the gradient of the loss of example b at params[i] / divisor[i] (Abadi et al. 2016, Alg. 1),
        and |g_ib| an upper bound on its norm (see the module). An example whose gradient is not finite, or longer than
        LARGEST, counts as zero, clipped or not: whether its features, the parameters or the divisor are not finite
        numbers, or anything overflows on the way. An example with a token outside the vocabulary counts as zero too. No
        value raises an error.

        Args:
            out: rows [m, d]; may be params itself, for descent in place.
            params: rows [m, d].
            batch: one batch for each row; the content of padding never matters.
            clip_norm: largest L2 norm of one example's gradient, [m], > 0; None does not clip.
            scale: factor of each row's sum, [m], such as minus the learning rate over the batch size.
            divisor: push-sum weights [m] that de-bias the parameters; None divides by nothing.

        Returns:
            Upper bounds [m, B] on the norms before clipping, by which the gradients were clipped; 0 for examples
            that count as zero. Those of padding mean nothing.

        Privacy: one example changes a row's sum by at most |scale[i]| * clip_norm[i] (zero-out adjacency), whatever
            the example, the others, the parameters and the module (`VmapKernel` lists the modules for which this is not
            promised). It holds for the numbers as they are computed, float32 included: the vector that is added for
            an example is no longer than that, and no bit of another example's vector depends on it. It does not cover
            how the *sum* of these vectors and of `out` is rounded, some 1e-7 of the numbers summed, nor a machine set
            to multiply with less than the full precision of the parameters' type.
            The norms returned are private and must stay on the peer.
        """
        clipping = Clipping(clip_norm, scale, divisor)
        out = out.detach()
        params = params.detach()
        m, examples = batch.weight.shape

        # As many rows at once as fit into memory.
        parts = row_chunks(m, self._row_bytes(batch, params.element_size()), self._memory)
        if len(parts) == 1:
            return self._add_(out, params, batch, clipping)

        norms = params.new_empty(m, examples)
        for rows in parts:
            part = RowsOfBatch(batch.x[rows], batch.y[rows], batch.weight[rows])
            norms[rows] = self._add_(out[rows], params[rows], part, clipping.rows(rows))
        return norms

    def _row_bytes(self, batch: LabelledInputs, element_size: int) -> int:
        """Return how much temporary memory one row takes, if all rows are computed at once."""
        return 0

    @abstractmethod
    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        """Add the sums of rows that fit into memory; see `add_clipped_`."""

    @abstractmethod
    def logits(self, params: Tensor, x: Any) -> Tensor:
        """Return the outputs [m, N, k] of every row's model for shared inputs x [N, *shape]."""

    def blended_logits(self, params: Tensor, weights: Tensor, x: Any) -> Tensor:
        """Return the outputs [c, N, k] of the models weights @ params for shared inputs x [N, *shape].

        A model that begins with a linear layer has the outputs of that layer blended instead of its parameters: they
        are fewer.

        Args:
            params: rows [n, d], finite.
            weights: [c, n]; each row sums to 1.
        """
        return self.logits(weights @ params.detach(), x)


@dataclass(frozen=True)
class Parameter:
    """The place of one parameter in a row."""

    name: str
    start: int
    shape: torch.Size

    def view(self, rows: Tensor) -> Tensor:
        """View it in rows [..., d] as [..., *shape], without a copy."""
        return rows.narrow(-1, self.start, self.shape.numel()).view((*rows.shape[:-1], *self.shape))


def layout(module: nn.Module) -> dict[str, Parameter]:
    """Return where each of the module's trained parameters lies in a row, in the order of named_parameters."""
    parameters = {}
    start = 0
    for name, parameter in trained(module).items():
        parameters[name] = Parameter(name, start, parameter.shape)
        start += parameter.numel()
    return parameters


def padding_columns(module: nn.Module) -> list[slice]:
    """Return where the rows of embeddings for padding lie in a row of parameters, see `padding_rows`."""
    places = layout(module)
    columns = []
    for name, row in padding_rows(module).items():
        width = math.prod(places[name].shape[1:])
        start = places[name].start + row * width
        columns.append(slice(start, start + width))
    return columns


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(module: nn.Module) -> bool:
    """Return whether a module does what its class defines: no hooks, and no method replaced in this very object."""
    replaced = any(callable(getattr(type(module), name, None)) for name in vars(module))
    return not replaced and not any(getattr(module, hooks) for hooks in _HOOKS)


def reason(error: BaseException) -> str:
    """Return an error's kind and the first line of its message, cut at 200 characters."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    return f"{kind}: {lines[0][:200]}"


@overload
def inputs_like(x: Tensor, params: Tensor) -> Tensor: ...
@overload
def inputs_like(x: SparseRows, params: Tensor) -> SparseRows: ...
def inputs_like(x: Features, params: Tensor) -> Features:
    """Return inputs on the parameters' device and in their type; tokens stay integers, compressed rows stay."""
    if isinstance(x, SparseRows):
        return x
    if x.is_floating_point():
        return x.to(params)
    return x.to(params.device)


def _let_masks_batch() -> None:
    """Let transformers write out its attention masks under vmap, if it is imported.

    It leaves a mask out if no token is padded, which vmap cannot ask of many examples at once: it would raise. With
    the mask written out attention is the same. Other calls are as before.
    """
    library = sys.modules.get("transformers.masking_utils")
    masks: Any = getattr(library, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    for name in ("sdpa", "eager"):
        if name in masks and not isinstance(masks[name], _WholeMask):
            masks[name] = _WholeMask(masks[name])


@dataclass(frozen=True)
class _WholeMask:
    """A function of transformers that makes attention masks; under vmap it leaves none out."""

    make: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(mask):
            kwargs["allow_is_causal_skip"] = False
            kwargs["allow_is_bidirectional_skip"] = False
        return self.make(*args, **kwargs)


@contextmanager
def batchable(module: nn.Module) -> Iterator[None]:
    """Compute attention and recurrent layers by operations that vmap can batch and autograd differentiate twice.

    Args:
        module: its recurrent layers are given their first states meanwhile.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _let_masks_batch()
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    handles = [part.register_forward_pre_hook(_first_states, with_kwargs=True) for part in recurrent]

    # oneDNN's recurrent kernels cannot be differentiated twice; None leaves the flag as it is.
    enabled = torch.backends.mkldnn.set_flags(False if recurrent else None, _fp32_precision=None)[0]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.set_flags(enabled, _fp32_precision=None)
        for handle in handles:
            handle.remove()


def _first_states(layer: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a recurrent layer's arguments with zeros for its first states, of as many examples as its input has.

    The layer would make them itself, and vmap cannot batch that. None leaves the arguments as they are.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        return None

    x = args[0]
    lines = layer.num_layers * (1 + layer.bidirectional)
    examples = len(x) if layer.batch_first else x.shape[1]
    states = x.new_zeros(lines, examples, layer.proj_size or layer.hidden_size)
    if isinstance(layer, nn.LSTM):
        return (x, (states, x.new_zeros(lines, examples, layer.hidden_size))), kwargs
    return (x, states), kwargs


def unknown_tokens(x: Tensor, n_tokens: int | None) -> Tensor | None:
    """Return which examples x [b, ...] hold a token outside 0..n_tokens-1, bool [b]; None if none does."""
    if n_tokens is None:
        return None
    unknown = ((x < 0) | (x >= n_tokens)).flatten(1).any(1)
    if not bool(unknown.any()):
        return None
    return unknown


def layer_outputs(module: nn.Module, call: Callable[[], object]) -> list[tuple[nn.Module, int]]:
    """Return how many numbers each layer of a module puts out in a call, in the order in which layers are called."""
    from torch.utils._pytree import tree_leaves

    counts: list[tuple[nn.Module, int]] = []

    def count(layer: nn.Module, _inputs: object, outputs: object) -> None:
        # One tensor, or several, as of an LSTM.
        tensors = [part for part in tree_leaves(outputs) if isinstance(part, torch.Tensor)]
        counts.append((layer, sum(tensor.numel() for tensor in tensors)))

    handles = [part.register_forward_hook(count) for part in module.modules() if not list(part.children())]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return counts


def row_chunks(m: int, bytes_per_row: int, memory_bytes: int) -> list[slice]:
    """Cut m rows into slices whose temporaries fit into memory_bytes, one row at least."""
    size = max(1, memory_bytes // max(1, bytes_per_row))
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]


_LOGIT_TENSORS = 64  # activations alive in a forward pass, as a multiple of the input


class Piece(Protocol):
    """The gradients of b examples in a few parameters, in a form that is cheap to sum."""

    def bound(self) -> Tensor:
        """Return upper bounds [b] on the norms of the vectors that `add_` adds; see `protocol`."""
        ...

    def without(self, bad: Tensor) -> Piece:
        """Return the piece with the gradients of some examples, bool [b], replaced by 0."""
        ...

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """Add the sum of coefficient[b] times gradient b to total [d]."""
        ...


@dataclass(frozen=True)
class Stored:
    """Gradients of one parameter, written out for each example.

    Attributes:
        place: where the parameter lies.
        gradients: [b, ...], in the shape of the parameter or of a part of it.
        part: views that part of the parameter; None for the whole.
    """

    place: Parameter
    gradients: Tensor
    part: Callable[[Tensor], Tensor] | None = None

    def bound(self) -> Tensor:
        """See Piece; computed from the very numbers that `add_` adds."""
        return upper(self.gradients.reshape(self.gradients.shape[0], -1))

    def without(self, bad: Tensor) -> Stored:
        return replace(self, gradients=masked(self.gradients, bad))

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        flat = coefficient @ self.gradients.reshape(self.gradients.shape[0], -1)
        target = self.place.view(total)
        if self.part is not None:
            target = self.part(target)
        target.add_(flat.view(self.gradients.shape[1:]))


def masked(values: Tensor, bad: Tensor, filling: float = 0) -> Tensor:
    """Return values [b, ...] with 0, or another filling, for the examples that are bad [b]."""
    other_axes = (1,) * (values.ndim - 1)
    return values.masked_fill(bad.view(-1, *other_axes), filling)


def _used(weight: Tensor) -> list[int]:
    """Count each row's examples up to the last whose weight is not 0; the rest is padding."""
    m, longest = weight.shape
    # On a GPU, reading counts back costs more than computing padding.
    if longest == 0 or not weight.is_cpu:
        return [longest] * m
    place = torch.arange(1, weight.shape[1] + 1, device=weight.device)
    counts: list[int] = torch.where(weight != 0, place, 0).amax(1).tolist()
    return counts


class RowKernel(GradientKernel):
    """A kernel that computes row by row, and a row's examples in parts that fit into memory."""

    def __init__(self, module: nn.Module, run: nn.Module, loss: Loss, memory_bytes: int) -> None:
        """Copy `run`, which computes what the module does with parameters of the same names.

        Raises:
            ScenarioError: it cannot be copied.
        """
        super().__init__(module, loss, memory_bytes)
        try:
            self._module = fix_norms(copy.deepcopy(run)).requires_grad_(False)
        except RAISED_BY_USERS as error:  # a user's module may hold anything
            raise ScenarioError(
                f"model: it cannot be copied: {reason(error)}; keep no tensors in it that were computed, nor locks or "
                "files (for weight norm use torch.nn.utils.parametrizations)",
                code="model.copy",
            ) from None
        self._layout = layout(module)
        self._parameters = {name: p for name, p in self._module.named_parameters() if name in self._layout}
        self._release()

    @abstractmethod
    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        """Return the gradients of examples x [b, *shape], y [b, ...] at a point [d]."""

    @abstractmethod
    def _parts(self, examples: int, element_size: int) -> Sequence[slice]:
        """Cut a row's examples into parts that fit into memory."""

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        self._module.to(params)
        norms = params.new_zeros(batch.weight.shape)
        for i, used in enumerate(_used(batch.weight)):
            row = clipping.rows(slice(i, i + 1))
            divisor = clipping.divisor
            point = params[i]
            if divisor is not None:
                point = params[i] / divisor[i]
            x = inputs_like(batch.x[i, :used], params)
            y = batch.y[i, :used]

            # `out` may be `params`: as long as a further part reads the point from it, sums go elsewhere.
            parts = self._parts(used, params.element_size())
            direct = len(parts) <= 1 or divisor is not None
            total = out[i] if direct else torch.zeros_like(point)

            for part in parts:
                pieces, norms[i, part] = _finite(self._pieces(point, x[part], y[part]))
                coefficient = row.coefficient(norms[i : i + 1, part], batch.weight[i : i + 1, part])[0]
                for piece in pieces:
                    piece.add_(total, coefficient)
            if not direct:
                out[i].add_(total)
        self._release()
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        params = params.detach()
        x = inputs_like(x, params)
        self._module.to(params)

        parts = self._logit_parts(x.shape[0], x)
        rows = []
        try:
            with torch.no_grad():
                for row in params:
                    outputs = [self._outputs(row, x[part]) for part in parts]
                    rows.append(torch.cat(outputs))
        except RAISED_BY_USERS as error:
            place = last_line_of_users(error)
            raise RunError(f"model: its forward fails on the public test set: {reason(error)}{place}") from error
        self._release()
        return torch.stack(rows)

    def _logit_parts(self, examples: int, x: Tensor) -> list[slice]:
        """Cut shared inputs into parts that fit into memory."""
        return row_chunks(examples, _LOGIT_TENSORS * x[:1].numel() * x.element_size(), self._memory)

    def _load(self, row: Tensor) -> None:
        """Let the module's parameters share memory with a row."""
        for name, parameter in self._parameters.items():
            parameter.data = self._layout[name].view(row)

    def _outputs(self, row: Tensor, x: Tensor) -> Tensor:
        self._load(row)
        outputs: Tensor = self._module(x)
        return outputs

    def _release(self) -> None:
        """Drop the references to the rows."""
        for parameter in self._parameters.values():
            parameter.data = parameter.new_empty(0)


def _finite(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Tensor]:
    """Return the pieces, with zeros for examples whose gradients are not finite, and bounds [b] on the norms."""
    norms = upper(torch.stack([piece.bound() for piece in pieces], 1))
    bad = beyond(norms, wait=norms.is_cpu)
    if bad is None:
        return pieces, norms
    return [piece.without(bad) for piece in pieces], norms.masked_fill(bad, 0)
