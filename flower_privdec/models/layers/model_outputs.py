"""What a model returns: one tensor, or several in a tuple, a dict or an output of `transformers`.

A criterion is given one of them, such as `outputs.logits`, or several. Each has a *place*: its number among the leaves
of what the model returned, which is the same for a batch and for an example alone. transformers tells torch what its
outputs are made of, so that this module needs no import of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError

if TYPE_CHECKING:
    from torch import Tensor

LIKELY = "logits"  # the entry of a model's outputs that a criterion is usually given


@dataclass(frozen=True)
class Output:
    """Stands, in the arguments of a criterion, for the tensor at a place of the model's outputs."""

    place: int = 0


def filled(arguments: Sequence[Any], outputs: Any, made: Callable[[Any], Tensor]) -> list[Any]:
    """Return a criterion's arguments with what is made of a model's outputs in the place of each `Output`."""
    from torch.utils._pytree import tree_map

    def replaced(leaf: Any) -> Any:
        return made(tensor_at(outputs, leaf.place)) if isinstance(leaf, Output) else leaf

    return list(tree_map(replaced, list(arguments)))


def with_tensors(outputs: Any, make: Callable[[Tensor, int], Tensor]) -> Any:
    """Return outputs with each tensor replaced by what is made of it and its place.

    Raises:
        ScenarioError: there is no tensor among them, or the model computed a loss of the batch.
    """
    from torch.utils._pytree import tree_flatten, tree_unflatten

    if isinstance(outputs, torch.Tensor):
        return make(outputs, 0)

    leaves, spec = tree_flatten(outputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ScenarioError(
            f"the model returns a {type(outputs).__name__}: it must return a tensor [examples, ...], or a tuple or a "
            "dict of tensors",
            code="training-loop.model",
        )
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in leaves):
        raise ScenarioError(
            "the model computes a loss of the whole batch by itself (it was given labels?), in which examples cannot "
            "be clipped one by one: give the labels to the criterion only, as in labels = batch.pop('labels'); "
            "loss = criterion(model(**batch).logits, labels)",
            code="training-loop.loss-in-model",
        )

    made = [make(leaf, place) if isinstance(leaf, torch.Tensor) else leaf for place, leaf in enumerate(leaves)]
    return tree_unflatten(made, spec)


def tensor_at(outputs: Any, place: int) -> Any:
    """Return what is at a place of a model's outputs; None if there is nothing."""
    from torch.utils._pytree import tree_flatten

    if isinstance(outputs, torch.Tensor):
        return outputs if place == 0 else None
    leaves = tree_flatten(outputs)[0]
    return leaves[place] if place < len(leaves) else None


def likely_place(outputs: Any) -> int | None:
    """Return the place of the tensor that a loop most likely gives to its criterion; None if none stands out."""
    from torch.utils._pytree import tree_flatten

    if isinstance(outputs, torch.Tensor):
        return 0
    if isinstance(outputs, Mapping) and isinstance(outputs.get(LIKELY), torch.Tensor):
        leaves = tree_flatten(outputs)[0]
        return next(place for place, leaf in enumerate(leaves) if leaf is outputs[LIKELY])
    return None


def part_of_whole(arguments: Sequence[Any]) -> str:
    """Return how to give a criterion one output of those that it was given whole; "" if it was given none whole.

    Args:
        arguments: the criterion's, with an `Output` for each of the model's outputs.
    """
    for argument in arguments:
        if isinstance(argument, Mapping):
            names = [name for name, part in argument.items() if isinstance(part, Output)]
            if not names:
                continue
            name = LIKELY if LIKELY in names else names[0]
            if hasattr(argument, str(name)):  # an output of transformers, whose entries are attributes too
                return f"criterion(outputs.{name}, targets)"
            return f"criterion(outputs[{name!r}], targets)"

        if isinstance(argument, tuple | list) and any(isinstance(part, Output) for part in argument):
            return "criterion(outputs[0], targets)"
    return ""
