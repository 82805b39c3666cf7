"""The gradients that a training loop finds between `backward()` and `step()`.

A loop may print their norm, clip them once more, or scale them: what it does with a noised mean is no release of its
own. The noise is added when something first looks at one of them, at the latest by `step()`. So a batch whose
gradients nobody saw costs nothing if the loop then turns out to be wrong, as by a second `backward()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

KIND = {  # functions and attributes of a tensor that do not depend on its numbers
    *("dim", "size", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("requires_grad", "grad_fn", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse"),
}


class NoisedGradient(Tensor):
    """A gradient whose numbers are filled in when something first reads or changes them."""

    _fill: Callable[[], None]

    @staticmethod
    def of(parameter: Tensor, fill: Callable[[], None]) -> NoisedGradient:
        """Return the gradient of a parameter.

        Args:
            fill: fills it in, by `set`; called before its numbers are used, each time.
        """
        gradient = torch.empty_like(parameter, requires_grad=False).as_subclass(NoisedGradient)
        gradient._fill = fill
        return gradient

    def set(self, numbers: Tensor) -> None:
        """Fill the numbers in."""
        with torch._C.DisableTorchFunctionSubclass():
            self.copy_(numbers)

    def plain(self) -> Tensor:
        """Return the same gradient, in the same memory, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    # torch would copy or save the class, with what fills it.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self._fill()
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._fill()
        return self.plain().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_name(function) not in KIND:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, NoisedGradient):
                    leaf._fill()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def function_name(function: Any) -> str:
    """Return the name of a function of tensors, or of the attribute that it reads."""
    # torch gives a method itself, but an attribute's getter, which is bound to the attribute.
    attribute: str = getattr(getattr(function, "__self__", None), "__name__", "")
    name: str = getattr(function, "__name__", "")
    return attribute or name
