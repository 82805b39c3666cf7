"""Per-example clipped gradients of a whole cohort: the kernels, and which one a model gets.

A *kernel* adds, for each row of a cohort, the clipped gradients of the row's examples (`GradientKernel.add_clipped_`).
All kernels compute the same sums; they differ in what models they take and how fast they are:

| kernel | takes | by |
|---|---|---|
| `single_example` | a linear model of one output, one example a row | a compiled loop over rows |
| `stacked` | stacks of linear layers | closed forms for all rows at once |
| `factored` | models that `proof` shows to keep examples apart | one backward pass a row |
| `per_example` | any model | torch.func, a few examples at a time |

`protocol` has what they share: the interface, the layout of parameters in a row, and the bounds on norms that make the
clipping private whatever the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flower_privdec.common.deferred import is_small, nn
from flower_privdec.common.errors import ScenarioError
from flower_privdec.gradients.protocol import GradientKernel, LabelledInputs
from flower_privdec.gradients.stacked import Factors, SparseLinearKernel, StackedKernel, parse_stack
from flower_privdec.models import check_model
from flower_privdec.tasks.losses import Loss, resolve_loss

__all__ = [
    "KERNELS",
    "Factors",
    "GradientKernel",
    "LabelledInputs",
    "SparseLinearKernel",
    "StackedKernel",
    "build_kernel",
    "explain_kernel",
]

KERNELS = {
    "auto": "the first of stacked, factored and vmap that fits the model",
    "stacked": "stacks of linear layers: closed form, all peers at once",
    "factored": "models proved to keep examples apart: one backward pass a peer",
    "vmap": "any model: torch.func, a few examples at a time",
}


def build_kernel(
    module: nn.Module,
    loss: str | Loss,
    input_shape: Sequence[int],
    *,
    kind: str = "auto",
    memory_bytes: int = 2**28,
    n_tokens: int | None = None,
    sparse: bool = False,
    single_example: bool = False,
) -> GradientKernel:
    """Build the gradient kernel for a model.

    Args:
        module: any model; the values of its parameters are not used, and it is not changed. If its structure proves
            that it keeps the examples of a batch apart, a batch takes one backward pass; else vmap keeps them apart.
            `VmapKernel` lists what is promised for modules with state.
        loss: the training loss, or its name.
        input_shape: the input shape of one example.
        kind: one of KERNELS.
        memory_bytes: approximate limit of the kernel's temporary memory.
        n_tokens: the inputs are tokens 0..n_tokens-1, indices of an embedding.
        sparse: examples are compressed rows, which only a model of one linear layer can take.
        single_example: most batches have one example: linear models of one output get a compiled loop.

    Raises:
        ScenarioError: an unknown kind or loss, a model that cannot be clipped example by example, or a kind
            that does not fit the model.
    """
    if kind not in KERNELS:
        raise ScenarioError(f"kind={kind!r} must be one of {', '.join(KERNELS)}", code="gradients.kind")
    if memory_bytes < 1:
        raise ScenarioError(f"memory_bytes={memory_bytes} must be > 0", code="gradients.memory")
    check_model(module)
    resolved = resolve_loss(loss)

    # Closed forms, if the model is a stack of linear layers.
    layers = None if n_tokens else parse_stack(module, input_shape)
    if sparse:
        if layers is None or len(layers) != 1:
            message = "sparse examples need a model that is one linear layer: use model linear (or softmax)"
            raise ScenarioError(message, code="gradients.sparse")
        return SparseLinearKernel(module, layers[0], resolved, memory_bytes)
    if n_tokens is not None and kind == "stacked":
        raise ScenarioError(f"kind={kind!r} does not fit tokens, which are indices: use auto", code="gradients.kind")
    if kind == "stacked" and layers is None:
        message = "kind='stacked' needs a Sequential of Flatten, Linear, ReLU and Tanh: use auto"
        raise ScenarioError(message, code="gradients.kind")
    if kind == "auto" and single_example and layers is not None and not is_small():
        from flower_privdec.gradients.single_example import SingleExampleKernel, takes_single_examples

        if takes_single_examples(layers, resolved):
            return SingleExampleKernel(module, layers, resolved, memory_bytes)
    if kind in ("auto", "stacked") and layers is not None:
        return StackedKernel(module, layers, resolved, memory_bytes)

    if is_small():
        from flower_privdec.gradients.words import WordsKernel
        from flower_privdec.models.layers import MeanOfWords

        if type(module) is MeanOfWords and n_tokens is not None:
            return WordsKernel(module, resolved, memory_bytes, math.prod(input_shape), n_tokens)
        raise ScenarioError(
            "the model is no stack of linear layers nor a mean of words, so its gradients need torch: install torch, "
            "or take model softmax, linear, mlp or text",
            code="gradients.needs-torch",
        )

    # One backward pass for a batch, if the model is proved to keep examples apart; else each example by itself.
    from flower_privdec.gradients.factored import FactoredKernel
    from flower_privdec.gradients.per_example import VmapKernel
    from flower_privdec.gradients.proof import Unproved, prove

    chosen_for = "it was asked for"
    if kind in ("auto", "factored"):
        try:
            graph = prove(module, input_shape, n_tokens)
            return FactoredKernel(module, graph, resolved, input_shape, memory_bytes, n_tokens)
        except Unproved as why:
            if kind == "factored":
                message = f"kind='factored' does not fit this model: {why}; use auto"
                raise ScenarioError(message, code="gradients.kind") from None
            chosen_for = f"it is not proved that the model keeps examples apart: {why}"
    return VmapKernel(module, resolved, input_shape, memory_bytes, n_tokens, chosen_for)


def explain_kernel(kernel: GradientKernel) -> str:
    """Return a sentence on a kernel, and why `build_kernel` chose it for its model.

    Examples:
        >>> kernel = build_kernel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "cross-entropy", [64])
        >>> explain_kernel(kernel).split()[0]
        'stacked'
    """
    if isinstance(kernel, SparseLinearKernel):
        return "sparse (one linear layer: only the features of an example are computed), because examples are sparse"
    if isinstance(kernel, StackedKernel):
        return f"stacked ({KERNELS['stacked']}), because the model is a stack of linear layers"
    from flower_privdec.gradients.per_example import VmapKernel

    if isinstance(kernel, VmapKernel):
        return f"vmap ({KERNELS['vmap']}), because {kernel.because}"
    return f"factored ({KERNELS['factored']}), because every operation of its forward is known to keep them apart"
