"""A model of several inputs or outputs, such as one of `transformers`, called with one tensor and returning one.

Kernels, samplers and peers know an example as one tensor. A tokenized text has several columns of whole numbers, each
with a number of values that is public: input_ids below the size of the vocabulary, attention_mask 0 or 1. So the
columns are the digits of one whole number for each token, the first the least:

    packed = input_ids + 30522 * (attention_mask + 2 * token_type_ids)

Every number below the product of the sizes stands for values that all columns may have. Whatever tries a model on
made-up tokens below that product, as kernels, proofs and exports do, thereby tries it on valid columns.
`data/token_columns.py` packs, and checks what it packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flower_privdec.common.deferred import nn
from flower_privdec.models.layers.model_outputs import likely_place, tensor_at

if TYPE_CHECKING:
    from torch import Tensor

Sizes = Mapping[str, int]  # how many values each column has, by the name of the model's argument


class OneTensor(nn.Module):
    """Calls a model with the columns of packed tokens, and returns its logits.

    Attributes:
        model: the model, under whose own names its parameters are stored.
        sizes: of the columns; None if the model takes the tensor as it is.
    """

    def __init__(self, model: nn.Module, sizes: Sizes | None) -> None:
        super().__init__()
        self.model = model
        self.sizes = None if sizes is None else dict(sizes)
        self.training = model.training

    def forward(self, x: Tensor) -> Any:
        """Return the logits of examples [examples, ...]; all outputs of a model that has none."""
        if self.sizes is None:
            outputs = self.model(x)
        else:
            outputs = self.model(**unpacked(x, self.sizes))
        return logits_of(outputs)


def logits_of(outputs: Any) -> Any:
    """Return the logits among a model's outputs; all that it returned if there are none."""
    place = likely_place(outputs)
    if place is None:
        return outputs
    return tensor_at(outputs, place)


def unpacked(x: Tensor, sizes: Sizes) -> dict[str, Tensor]:
    """Return the columns of packed tokens, by name, each of the shape of x.

    Examples:
        >>> import torch
        >>> unpacked(torch.tensor([[7, 9]]), {"input_ids": 8, "attention_mask": 2})
        {'input_ids': tensor([[7, 1]]), 'attention_mask': tensor([[0, 1]])}
    """
    columns = {}
    rest = x
    for name, size in sizes.items():
        columns[name] = rest % size
        rest = rest // size
    return columns


def own_model(module: nn.Module) -> nn.Module:
    """Return the model as its author made it, without what calls it with one tensor."""
    if isinstance(module, OneTensor):
        return module.model
    return module
