"""Closed-form gradients of stacks of linear layers, all rows at once, added directly to the rows.

The gradient of one example in a linear layer is the outer product of delta (the derivative in the layer's
output) and its input a, so its squared norm is |delta|^2 (|a|^2 + 1) with bias (Goodfellow 2015), and a clipped sum
over examples is one product of deltas scaled by the clip coefficient. Nothing of size m x d is ever made: layers
are strided views, and a divisor is folded into activations (W a / w) and deltas. Norms are upper bounds (`protocol`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flower_privdec.common.deferred import nn, torch
from flower_privdec.gradients.chain import parse_chain
from flower_privdec.gradients.protocol import (
    Clipping,
    GradientKernel,
    Inputs,
    LabelledInputs,
    Parameter,
    beyond,
    constant,
    floor,
    inputs_like,
    is_plain,
    layout,
    length,
    row_chunks,
    slack,
)
from flower_privdec.rows.sparse_rows import SparseRows
from flower_privdec.tasks.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

# The most examples and columns of a product over inputs that rows share: its parts stay in the cache.
SHARED_EXAMPLES = 1024
SHARED_COLUMNS = 1024


@dataclass(frozen=True)
class Layer:
    """A linear layer and the activation after it. A single example a row is a column, which is faster."""

    weight: Parameter
    bias: Parameter | None
    activation: type[nn.Module]

    def forward(self, params: Tensor, a: Tensor, divisor: Tensor | None) -> Tensor:
        """Return the layer's output [m, B, out] for inputs [m, B, in]."""
        weight = self.weight.view(params)  # [m, out, in]
        bias = None if self.bias is None else self.bias.view(params)  # [m, out]
        if a.shape[1] == 1:
            z = _product(bias, 2, weight, a.transpose(1, 2)).transpose(1, 2)
        else:
            z = _product(bias, 1, a, weight.transpose(1, 2))
        if divisor is not None:
            z.div_(divisor[:, None, None])
        return self.activate_(z)

    def linear_shared(self, params: Tensor, a: Tensor) -> Tensor:
        """Return the layer's output [m, N, out], before the activation, for inputs [N, in] that all rows share."""
        weight = self.weight.view(params).flatten(0, 1).t()  # [in, m * out]: one product for all rows
        if self.bias is None:
            z = a @ weight
        else:
            z = torch.addmm(self.bias.view(params).flatten(), a, weight)
        return z.view(len(a), len(params), -1).transpose(0, 1)

    def activate_(self, z: Tensor) -> Tensor:
        """Apply the activation in place."""
        if self.activation is nn.ReLU:
            return z.relu_()
        if self.activation is nn.Tanh:
            return z.tanh_()
        return z

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
        if divisor is not None:
            below.div_(divisor[:, None, None])
        return below

    def norms(self, a: Tensor, delta: Tensor, layers: int) -> Tensor:
        """Return upper bounds (1 + slack) (floor + |delta|) |(a, 1)|, with a floor in place of a missing bias.

        Args:
            a: the inputs, of which an example may list only those that are not 0.
            layers: the layers of the model.
        """
        out, inner = self.weight.shape
        if self.bias is None:
            least = floor(a, inner)
        else:
            least = constant(1.0, a.dtype, a.device)  # the input of the bias
        size = torch.hypot(length(a), least)
        more = slack(a.dtype, inner, out, layers)
        return size.mul_(torch.add(floor(a, out), length(delta), alpha=1 + more))

    def push_(self, out: Tensor, delta: Tensor, a: Tensor) -> None:
        """Add sum_b delta_b a_b^T and, for the bias, sum_b delta_b."""
        if a.shape[1] == 1:
            self.weight.view(out).addcmul_(delta.transpose(1, 2), a)
        else:
            self.weight.view(out).baddbmm_(delta.transpose(1, 2), a)
        if self.bias is not None:
            total = delta[:, 0] if a.shape[1] == 1 else delta.sum(1)
            self.bias.view(out).add_(total)


def _product(bias: Tensor | None, axis: int, left: Tensor, right: Tensor) -> Tensor:
    """Return the product of each row's matrices, plus a bias [m, out] that is the same along an axis."""
    if bias is None:
        return torch.bmm(left, right)
    return torch.baddbmm(bias.unsqueeze(axis), left, right)


@dataclass(frozen=True)
class Factors:
    """Every example's unclipped gradient in factors: layer l's is `deltas[l][i, b]` (outer) `activations[l][i, b]`.

    Every number is finite: if a gradient is not, its deltas and its norm are 0.

    Attributes:
        deltas: for each layer [m, B, out], also the gradient of the bias.
        activations: for each layer [m, B, in]; the first is a view of the batch, or a copy if that is not finite.
        norms: upper bounds [m, B] on the norms of the whole gradients, see `protocol`.
    """

    deltas: list[Tensor]
    activations: list[Tensor]
    norms: Tensor


class StackedKernel(GradientKernel):
    """The kernel for Sequential stacks of Flatten, Linear, ReLU, Tanh and Identity; see GradientKernel."""

    def __init__(self, module: nn.Module, layers: list[Layer], loss: Loss, memory_bytes: int) -> None:
        super().__init__(module, loss, memory_bytes)
        self.layers = layers
        self._width = 3 * sum(sum(layer.weight.shape) for layer in layers)

    def factors(self, params: Tensor, batch: Inputs, divisor: Tensor | None = None) -> Factors:
        """Return every example's gradient at params / divisor as factors; writes nothing."""
        with torch.no_grad():
            # Forward: the input of each layer, and the last output.
            a = inputs_like(batch.x.flatten(2), params)
            inputs = [a]
            for layer in self.layers:
                a = layer.forward(params, a, divisor)
                inputs.append(a)

            # Backward: the derivative in the output of each layer.
            delta = self._loss.derivative(a, batch.y)
            deltas = []
            for index in reversed(range(len(self.layers))):
                deltas.append(self.layers[index].backward_(delta, inputs[index + 1]))
                if index:
                    delta = self.layers[index].pull(params, delta, divisor)
            deltas.reverse()

            activations = inputs[:-1]
            triples = zip(self.layers, activations, deltas, strict=True)
            parts = [layer.norms(a, delta, len(self.layers)) for layer, a, delta in triples]
            if len(parts) == 1:
                norms = parts[0]
            else:
                norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)

            # Zeros for examples whose gradients are not finite; the others are unchanged.
            bad = beyond(norms, wait=norms.is_cpu)
            if bad is not None:
                deltas = [delta.masked_fill(bad.unsqueeze(-1), 0) for delta in deltas]
                activations = [torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0) for a in activations]
                norms = norms.masked_fill(bad, 0)
            return Factors(deltas, activations, norms)

    def accumulate_(self, out: Tensor, factors: Factors, coefficient: Tensor) -> Tensor:
        """Add sum_b coefficient[i, b] * gradient[i, b] to out[i], in place, and return out."""
        with torch.no_grad():
            for layer, delta, a in zip(self.layers, factors.deltas, factors.activations, strict=True):
                layer.push_(out, delta * coefficient[..., None], a)
        return out

    def _row_bytes(self, batch: LabelledInputs, element_size: int) -> int:
        return batch.weight.shape[1] * self._width * element_size

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        factors = self.factors(params, batch, clipping.divisor)
        self.accumulate_(out, factors, clipping.coefficient(factors.norms, batch.weight))
        return factors.norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        first, *rest = self.layers
        m = params.shape[0]
        out = params.new_empty(m, x.shape[0], self.layers[-1].weight.shape[0])
        per_example = self._width * params.element_size()
        examples = min(SHARED_EXAMPLES, max(1, self._memory // per_example))
        together = min(SHARED_COLUMNS // first.weight.shape[0], self._memory // (per_example * examples))

        with torch.no_grad():
            for rows in row_chunks(m, 1, together):
                for part in row_chunks(x.shape[0], 1, examples):
                    shared = inputs_like(x[part].flatten(1), params)
                    a = first.activate_(first.linear_shared(params[rows], shared))
                    for layer in rest:
                        a = layer.forward(params[rows], a, None)
                    out[rows, part] = a
        return out

    def blended_logits(self, params: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        first, *rest = self.layers
        c = len(weights)
        out = params.new_empty(c, x.shape[0], self.layers[-1].weight.shape[0])
        examples = row_chunks(x.shape[0], max(c, len(params)) * self._width * params.element_size(), self._memory)
        with torch.no_grad():
            models = weights @ params if rest else params  # not read without further layers
            for part in examples:
                # Outputs of the first layer are linear in its parameters: blend these outputs, which are fewer.
                z = first.linear_shared(params, inputs_like(x[part].flatten(1), params))
                a = first.activate_((weights @ z.flatten(1)).view(c, *z.shape[1:]))
                for layer in rest:
                    a = layer.forward(models, a, None)
                out[:, part] = a
        return out


def parse_stack(module: nn.Module, input_shape: Sequence[int]) -> list[Layer] | None:
    """Return the layers of a stack for examples of a shape; None if the module is not a stack."""
    steps = parse_chain(module)
    rows = layout(module)
    frozen = len(rows) < len(dict(module.named_parameters()))
    if steps is None or frozen or not all(map(is_plain, module.modules())):
        return None

    place_of = {id(parameter): rows[name] for name, parameter in module.named_parameters()}
    layers: list[Layer] = []
    flat = len(input_shape) == 1
    for _, part in steps:
        if type(part) in (nn.Conv2d, nn.MaxPool2d):
            return None
        if type(part) is nn.Flatten:
            flat |= not layers
        elif type(part) is nn.Linear:
            bias = None if part.bias is None else place_of[id(part.bias)]
            layers.append(Layer(place_of[id(part.weight)], bias, nn.Identity))
        elif type(part) in (nn.ReLU, nn.Tanh):
            if not layers or layers[-1].activation is not nn.Identity:
                return None
            layers[-1] = Layer(layers[-1].weight, layers[-1].bias, type(part))

    # Layers that share a parameter would each be clipped with only their own part of its gradient.
    used = [place.name for layer in layers for place in (layer.weight, layer.bias) if place is not None]
    has_shared = len(set(used)) < len(used)
    if not layers or not flat or has_shared:
        return None
    return layers


class SparseLinearKernel(GradientKernel):
    """The kernel for a single linear layer of sparse examples; see GradientKernel.

    A batch holds examples packed, [m, B, 2, L]: the indices of their features and the values, padded with zeros
    (`SparseRows.packed`). An example's gradient is delta (outer) (a, 1), of which only the columns of its own
    features are added to. On a GPU the additions come in any order, so the last bits of a sum may differ.
    """

    def __init__(self, module: nn.Module, layer: Layer, loss: Loss, memory_bytes: int) -> None:
        super().__init__(module, loss, memory_bytes)
        self.layers = [layer]

    def _row_bytes(self, batch: LabelledInputs, element_size: int) -> int:
        return 4 * batch.weight.shape[1] * batch.x.shape[-1] * (self.layers[0].weight.shape[0] + 2) * element_size

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        layer = self.layers[0]
        m, examples, _, longest = batch.x.shape
        k = layer.weight.shape[0]

        # Forward, with the weights of each example's own features.
        columns = batch.x[:, :, 0].long().view(m, 1, -1).expand(m, k, -1)
        values = batch.x[:, :, 1].to(params)
        weights = layer.weight.view(params).gather(2, columns).view(m, k, examples, longest)
        z = (weights * values.unsqueeze(1)).sum(-1).transpose(1, 2)  # [m, examples, k]
        if layer.bias is not None:
            z = z + layer.bias.view(params).unsqueeze(1)
        if clipping.divisor is not None:
            z = z / clipping.divisor[:, None, None]
        delta = self._loss.derivative(z, batch.y)

        norms = layer.norms(values, delta, 1)
        bad = beyond(norms, wait=norms.is_cpu)
        if bad is not None:
            delta = delta.masked_fill(bad.unsqueeze(-1), 0)
            norms = norms.masked_fill(bad, 0)

        # Add delta (outer) (a, 1) to the columns of each example's features.
        delta *= clipping.coefficient(norms, batch.weight).unsqueeze(-1)
        terms = delta.transpose(1, 2).unsqueeze(-1) * values.unsqueeze(1)
        layer.weight.view(out).scatter_add_(2, columns, terms.reshape(m, k, -1))
        if layer.bias is not None:
            layer.bias.view(out).add_(delta.sum(1))
        return norms

    def logits(self, params: Tensor, x: SparseRows) -> Tensor:
        layer = self.layers[0]
        weights = layer.weight.view(params).detach().cpu().numpy()
        z = torch.stack([torch.from_numpy(x.matrix @ weight.T) for weight in weights]).to(params)
        if layer.bias is None:
            return z
        return z + layer.bias.view(params).unsqueeze(1)

    def blended_logits(self, params: Tensor, weights: Tensor, x: SparseRows) -> Tensor:
        return torch.einsum("cn,nek->cek", weights, self.logits(params, x))
