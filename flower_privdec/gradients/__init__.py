"""Clipped gradients of a whole cohort."""

from __future__ import annotations

from torch import nn

from flower_privdec.errors import ScenarioError
from flower_privdec.gradients.base import Examples, GradientKernel
from flower_privdec.gradients.factored import FactoredKernel, can_factor
from flower_privdec.gradients.losses import LOSSES, Loss, resolve_loss
from flower_privdec.gradients.per_example import LoopKernel, VmapKernel
from flower_privdec.gradients.stacked import Factors, StackedKernel, parse_stack
from flower_privdec.models import check_model

__all__ = [
    "KERNELS",
    "LOSSES",
    "Examples",
    "Factors",
    "GradientKernel",
    "Loss",
    "StackedKernel",
    "build_kernel",
    "resolve_loss",
]

KERNELS = {
    "auto": "the first of stacked, factored and vmap that fits the model",
    "stacked": "stacks of linear layers: closed form, all peers at once",
    "factored": "linear, convolution and group normalisation layers: one backward pass a peer",
    "vmap": "any module: torch.func, a few examples at a time",
    "loop": "any module: one example at a time (slow; the oracle of the tests)",
}


def build_kernel(
    module: nn.Module, loss: str | Loss, *, kind: str = "auto", memory_bytes: int = 2**28
) -> GradientKernel:
    """Build the gradient kernel for a model.

    Args:
        module: the model; its parameters' values are not used, and it is not changed.
        loss: one of LOSSES.
        kind: one of KERNELS.
        memory_bytes: about how much temporary memory the kernel may take.

    Raises:
        ScenarioError: an unknown kind or loss, a model that cannot be clipped example by example, or a kind
            that does not fit the model.
    """
    if kind not in KERNELS:
        raise ScenarioError(f"gradients={kind!r} must be one of {', '.join(KERNELS)}")
    if memory_bytes < 1:
        raise ScenarioError(f"memory_bytes={memory_bytes} must be > 0")
    check_model(module)
    resolved = resolve_loss(loss)
    if kind == "auto":
        kind = "stacked" if parse_stack(module) else "factored" if can_factor(module) else "vmap"
    if kind == "stacked" and not parse_stack(module):
        raise ScenarioError("gradients='stacked' needs a Sequential of Flatten, Linear, ReLU and Tanh: use auto")
    if kind == "factored" and not can_factor(module):
        raise ScenarioError(
            "gradients='factored' needs every parameter in a Linear, Conv2d (groups=1) or GroupNorm layer: use auto"
        )
    kernels: dict[str, type[StackedKernel | FactoredKernel | VmapKernel | LoopKernel]] = {
        "stacked": StackedKernel,
        "factored": FactoredKernel,
        "vmap": VmapKernel,
        "loop": LoopKernel,
    }
    return kernels[kind](module, resolved, memory_bytes)
