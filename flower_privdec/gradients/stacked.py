"""Closed-form gradients of stacks of linear layers, all rows at once, written straight into the rows.

The gradient of one example in a linear layer is the outer product of delta (the derivative in the layer's
output) and its input a, so its squared norm is |delta|^2 (|a|^2 + 1) with bias (Goodfellow 2015), and a clipped sum
over examples is one product of deltas scaled by the clip coefficient. Nothing of size m x d is ever made: layers
are strided views, and a divisor is folded into activations (W a / w) and deltas. Norms are upper bounds (`bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flower_privdec.gradients.protocol import (
    Inputs,
    LabelledInputs,
    Parameter,
    beyond,
    coefficient,
    constant,
    floor,
    inputs_like,
    is_plain,
    layout,
    length,
    row_chunks,
    slack,
)
from flower_privdec.tasks.losses import Loss

SHARED_EXAMPLES, SHARED_COLUMNS = 1024, 1024  # of a product over inputs that rows share: then its parts stay in cache


@dataclass(frozen=True)
class Layer:
    """A linear layer and the activation after it. A single example a row is a column, which is faster."""

    weight: Parameter
    bias: Parameter | None
    activation: type[nn.Module]

    def forward(self, params: Tensor, a: Tensor, divisor: Tensor | None) -> Tensor:
        """Return the layer's output [m, B, out] for inputs [m, B, in]."""
        weight, bias = self.weight.view(params), None if self.bias is None else self.bias.view(params)
        if a.shape[1] == 1:
            z = _product(None if bias is None else bias.unsqueeze(2), weight, a.transpose(1, 2)).transpose(1, 2)
        else:
            z = _product(None if bias is None else bias.unsqueeze(1), a, weight.transpose(1, 2))
        if divisor is not None:
            z.div_(divisor[:, None, None])
        return self.activate_(z)

    def forward_shared(self, params: Tensor, a: Tensor) -> Tensor:
        """Return the layer's output [m, N, out] for inputs [N, in] that all rows share, by one product."""
        return self.activate_(self.linear_shared(params, a))

    def linear_shared(self, params: Tensor, a: Tensor) -> Tensor:
        """Return the same before the activation."""
        weight = self.weight.view(params).flatten(0, 1).t()
        z = a @ weight if self.bias is None else torch.addmm(self.bias.view(params).flatten(), a, weight)
        return z.view(len(a), len(params), -1).transpose(0, 1)

    def activate_(self, z: Tensor) -> Tensor:
        if self.activation is nn.ReLU:
            return z.relu_()
        return z.tanh_() if self.activation is nn.Tanh else z

    def backward_(self, delta: Tensor, output: Tensor) -> Tensor:
        """Turn the derivative in the layer's output into that before its activation, in place."""
        if self.activation is nn.ReLU:
            torch.ops.aten.threshold_backward.grad_input(delta, output, 0.0, grad_input=delta)
        elif self.activation is nn.Tanh:
            torch.ops.aten.tanh_backward.grad_input(delta, output, grad_input=delta)
        return delta

    def pull(self, params: Tensor, delta: Tensor, divisor: Tensor | None) -> Tensor:
        """Return the derivative in the layer's input."""
        weight = self.weight.view(params)
        if delta.shape[1] == 1:
            below = torch.bmm(weight.transpose(1, 2), delta.transpose(1, 2)).transpose(1, 2)
        else:
            below = torch.bmm(delta, weight)
        return below if divisor is None else below.div_(divisor[:, None, None])

    def push_(self, out: Tensor, delta: Tensor, a: Tensor) -> None:
        """Add sum_b delta_b a_b^T and, for the bias, sum_b delta_b."""
        if a.shape[1] == 1:
            self.weight.view(out).addcmul_(delta.transpose(1, 2), a)
        else:
            self.weight.view(out).baddbmm_(delta.transpose(1, 2), a)
        if self.bias is not None:
            self.bias.view(out).add_(delta[:, 0] if a.shape[1] == 1 else delta.sum(1))


def _product(bias: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if bias is None else torch.baddbmm(bias, left, right)


@dataclass(frozen=True)
class Factors:
    """Every example's gradient, factored: layer l's is deltas[l][i, b] (outer) activations[l][i, b], not clipped.

    Every number is finite: where a gradient is not, its deltas and its norm are 0.

    Attributes:
        deltas: for each layer [m, B, out], also the gradient of the bias.
        activations: for each layer [m, B, in]; the first is a view of the batch, or a copy where that is not finite.
        norms: upper bounds [m, B] on the norms of the whole gradients, see `bounds`.
    """

    deltas: list[Tensor]
    activations: list[Tensor]
    norms: Tensor


class StackedKernel:
    """The kernel for Sequential stacks of Flatten, Linear, ReLU, Tanh and Identity; see GradientKernel."""

    def __init__(self, module: nn.Module, layers: list[Layer], loss: Loss, memory_bytes: int) -> None:
        self.layers = layers
        self.d = sum(parameter.numel() for parameter in module.parameters())
        self._loss, self._memory = loss, memory_bytes
        self._width = 3 * sum(sum(layer.weight.shape) for layer in layers)

    def factors(self, params: Tensor, batch: Inputs, divisor: Tensor | None = None) -> Factors:
        """Return every example's gradient at params / divisor as factors; writes nothing."""
        with torch.no_grad():
            a = inputs_like(batch.x.flatten(2), params)
            inputs = [a]
            for layer in self.layers:
                a = layer.forward(params, a, divisor)
                inputs.append(a)
            delta = self._loss.derivative(a, batch.y)
            deltas = []
            for index in reversed(range(len(self.layers))):
                deltas.append(self.layers[index].backward_(delta, inputs[index + 1]))
                if index:
                    delta = self.layers[index].pull(params, delta, divisor)
            deltas.reverse()
            return _finite(Factors(deltas, inputs[:-1], self._norms(deltas, inputs)))

    def accumulate_(self, out: Tensor, factors: Factors, coefficient: Tensor) -> Tensor:
        """Add sum_b coefficient[i, b] * gradient[i, b] to out[i], in place, and return out."""
        with torch.no_grad():
            for layer, delta, a in zip(self.layers, factors.deltas, factors.activations, strict=True):
                layer.push_(out, delta * coefficient[..., None], a)
        return out

    def add_clipped_(
        self,
        out: Tensor,
        params: Tensor,
        batch: LabelledInputs,
        clip_norm: Tensor | None,
        scale: Tensor,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Add clipped gradient sums in place; see GradientKernel."""
        m, examples = batch.weight.shape
        chunks = row_chunks(m, examples * self._width * params.element_size(), self._memory)
        if len(chunks) == 1:
            factors = self.factors(params, batch, divisor)
            self.accumulate_(out, factors, coefficient(factors.norms, batch.weight, clip_norm, scale))
            return factors.norms
        norms = params.new_empty(m, examples)
        for rows in chunks:
            part = _Rows(batch.x[rows], batch.y[rows], batch.weight[rows])
            clip, share = (None if numbers is None else numbers[rows] for numbers in (clip_norm, divisor))
            norms[rows] = self.add_clipped_(out[rows], params[rows], part, clip, scale[rows], share)
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs; see GradientKernel."""
        (first, *rest), m = self.layers, params.shape[0]
        out = params.new_empty(m, x.shape[0], self.layers[-1].weight.shape[0])
        per_example = self._width * params.element_size()
        examples = min(SHARED_EXAMPLES, max(1, self._memory // per_example))
        together = min(SHARED_COLUMNS // first.weight.shape[0], self._memory // (per_example * examples))
        with torch.no_grad():
            for rows in row_chunks(m, 1, together):
                for part in row_chunks(x.shape[0], 1, examples):
                    a = first.forward_shared(params[rows], inputs_like(x[part].flatten(1), params))
                    for layer in rest:
                        a = layer.forward(params[rows], a, None)
                    out[rows, part] = a
        return out

    def blended_logits(self, params: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [c, N, k] of blended models for shared inputs; see GradientKernel."""
        (first, *rest), c = self.layers, len(weights)
        out = params.new_empty(c, x.shape[0], self.layers[-1].weight.shape[0])
        examples = row_chunks(x.shape[0], max(c, len(params)) * self._width * params.element_size(), self._memory)
        with torch.no_grad():
            models = weights @ params if rest else params
            for part in examples:
                z = first.linear_shared(params, inputs_like(x[part].flatten(1), params))
                a = first.activate_((weights @ z.flatten(1)).view(c, *z.shape[1:]))
                for layer in rest:
                    a = layer.forward(models, a, None)
                out[:, part] = a
        return out

    def _norms(self, deltas: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """Return upper bounds (1 + slack) (floor + |delta|) |(a, 1)|, in which a floor stands for a missing bias."""
        parts = []
        for layer, delta, a in zip(self.layers, deltas, inputs, strict=False):
            out, inner = layer.weight.shape
            least = floor(a, inner) if layer.bias is None else constant(1.0, a.dtype, a.device)
            more = slack(a.dtype, inner, out, len(self.layers))
            size = torch.hypot(length(a), least)
            parts.append(size.mul_(torch.add(floor(a, out), length(delta), alpha=1 + more)))
        norms: Tensor = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)
        return norms


def _finite(factors: Factors) -> Factors:
    """Let examples count as zero whose gradients are not finite; numbers of the others stay as they are."""
    bad = beyond(factors.norms, ask=factors.norms.is_cpu)
    if bad is None:
        return factors
    deltas = [delta.masked_fill(bad.unsqueeze(-1), 0) for delta in factors.deltas]
    activations = [torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0) for a in factors.activations]
    return Factors(deltas, activations, factors.norms.masked_fill(bad, 0))


@dataclass(frozen=True)
class _Rows:
    x: Tensor
    y: Tensor
    weight: Tensor


def parse_stack(module: nn.Module, input_shape: Sequence[int]) -> list[Layer] | None:
    """Return the layers of a stack for examples of some shape, or None where the module is anything else."""
    parts = _leaves(module)
    if parts is None:
        return None
    places = {id(parameter): name for name, parameter in module.named_parameters()}
    where = layout(module)
    layers: list[Layer] = []
    flat = len(input_shape) == 1
    for part in parts:
        if type(part) is nn.Flatten:
            flat |= not layers
        elif type(part) is nn.Linear:
            bias = None if part.bias is None else where[places[id(part.bias)]]
            layers.append(Layer(where[places[id(part.weight)]], bias, nn.Identity))
        elif type(part) in (nn.ReLU, nn.Tanh):
            if not layers or layers[-1].activation is not nn.Identity:
                return None
            layers[-1] = Layer(layers[-1].weight, layers[-1].bias, type(part))
    used = [place.name for layer in layers for place in (layer.weight, layer.bias) if place is not None]
    return layers if layers and flat and len(set(used)) == len(used) else None


def _leaves(module: nn.Module) -> list[nn.Module] | None:
    """The modules of (nested) Sequentials in order of call, or None where one is of another kind."""
    if not is_plain(module):
        return None
    if type(module) is nn.Sequential:
        found: list[nn.Module] = []
        for child in module:
            leaves = _leaves(child)
            if leaves is None:
                return None
            found += leaves
        return found
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return [module]
    return [module] if type(module) in (nn.Linear, nn.ReLU, nn.Tanh, nn.Identity) else None
