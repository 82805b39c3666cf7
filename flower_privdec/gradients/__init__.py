"""Clipped gradients of a whole cohort."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flower_privdec.errors import ScenarioError
from flower_privdec.gradients.factored import FactoredKernel
from flower_privdec.gradients.operations import Unproved
from flower_privdec.gradients.per_example import LoopKernel, VmapKernel
from flower_privdec.gradients.proof import prove
from flower_privdec.gradients.protocol import GradientKernel, LabelledInputs
from flower_privdec.gradients.single_example import SingleExampleKernel, takes_single_examples
from flower_privdec.gradients.sparse_linear import SparseLinearKernel
from flower_privdec.gradients.stacked import Factors, StackedKernel, parse_stack
from flower_privdec.models import check_model
from flower_privdec.tasks.losses import Loss, resolve_loss

__all__ = [
    "KERNELS",
    "Factors",
    "GradientKernel",
    "LabelledInputs",
    "SingleExampleKernel",
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
    "loop": "any model: one example at a time (slow; the oracle of the tests)",
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
        module: the model; its parameters' values are not used, and it is not changed. Any module: where its
            structure proves that it keeps the examples of a batch apart, a batch takes one backward pass; else
            vmap keeps them apart. What is promised of modules that keep something between calls: `VmapKernel`.
        loss: what it is trained by, or its name.
        input_shape: of one example.
        kind: one of KERNELS.
        memory_bytes: about how much temporary memory the kernel may take.
        n_tokens: the inputs are whole numbers 0..n_tokens-1, which are looked up, not reckoned with: vmap or loop.
        sparse: examples are compressed rows, which one linear layer alone can take.
        single_example: most batches have one example: models that `takes_single_examples` accepts get a compiled loop.

    Raises:
        ScenarioError: an unknown kind or loss, a model that cannot be clipped example by example, or a kind
            that does not fit the model.
    """
    if kind not in KERNELS:
        raise ScenarioError(f"kind={kind!r} must be one of {', '.join(KERNELS)}")
    if memory_bytes < 1:
        raise ScenarioError(f"memory_bytes={memory_bytes} must be > 0")
    check_model(module)
    resolved, layers = resolve_loss(loss), None if n_tokens else parse_stack(module, input_shape)
    if sparse:
        if layers is None or len(layers) != 1:
            raise ScenarioError("sparse examples need a model that is one linear layer: use model linear (or softmax)")
        return SparseLinearKernel(module, layers[0], resolved, memory_bytes)
    if n_tokens is not None and kind in ("stacked", "factored"):
        raise ScenarioError(f"kind={kind!r} does not fit tokens, which are looked up: use auto")
    if kind == "stacked" and layers is None:
        raise ScenarioError("kind='stacked' needs a Sequential of Flatten, Linear, ReLU and Tanh: use auto")
    if kind == "auto" and single_example and layers is not None and takes_single_examples(layers, resolved):
        return SingleExampleKernel(module, layers, resolved, memory_bytes)
    if kind in ("auto", "stacked") and layers is not None:
        return StackedKernel(module, layers, resolved, memory_bytes)
    if kind in ("auto", "factored") and n_tokens is None:
        try:
            return FactoredKernel(module, prove(module, input_shape), resolved, input_shape, memory_bytes)
        except Unproved as why:
            if kind == "factored":
                raise ScenarioError(f"kind='factored' does not fit this model: {why}; use auto") from None
    if kind == "loop":
        return LoopKernel(module, resolved, n_tokens)
    return VmapKernel(module, resolved, input_shape, memory_bytes, n_tokens)


def explain_kernel(
    module: nn.Module, input_shape: Sequence[int], n_tokens: int | None = None, *, sparse: bool = False
) -> str:
    """Say in a sentence which kernel `build_kernel` takes for a model by itself, and why.

    Examples:
        >>> explain_kernel(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)), [1, 8, 8]).split()[0]
        'factored'
    """
    if sparse:
        return "sparse (one linear layer: only what an example names is touched), because examples are sparse"
    if n_tokens is not None:
        return f"vmap ({KERNELS['vmap']}), because its examples are tokens, which are looked up"
    if parse_stack(module, input_shape) is not None:
        return f"stacked ({KERNELS['stacked']}), because the model is a stack of linear layers"
    try:
        prove(module, input_shape)
    except Unproved as why:
        return f"vmap ({KERNELS['vmap']}), because it is not proved that the model keeps examples apart: {why}"
    return f"factored ({KERNELS['factored']}), because every operation of its forward is known to keep them apart"
