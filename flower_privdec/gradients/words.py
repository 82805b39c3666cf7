"""Gradients of the mean of words' embeddings through linear layers, written out: the model `text` of a small peer.

The factors and their bounds are those of `factored`, which torch peers take for this model, so both clip alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flower_privdec.common.deferred import nn
from flower_privdec.gradients.pieces import LookedUp, Outer
from flower_privdec.gradients.protocol import Piece, RowKernel, Stored, masked, row_chunks, unknown_tokens
from flower_privdec.gradients.stacked import Layer, parse_stack
from flower_privdec.models.layers import MeanOfWords
from flower_privdec.tasks.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor


class WordsKernel(RowKernel):
    """The kernel of `MeanOfWords`; see GradientKernel.

    Args:
        module: the model.
        loss, memory_bytes: see GradientKernel.
        longest: how many tokens an example has.
        n_tokens: tokens are 0 to n_tokens - 1.
    """

    def __init__(self, module: MeanOfWords, loss: Loss, memory_bytes: int, longest: int, n_tokens: int) -> None:
        super().__init__(module, module, loss, memory_bytes)
        self._n_tokens = n_tokens
        self._table = self._layout["embedding.weight"]
        width = self._table.shape[1]
        self._layers = self._stack(module.layers, width)
        self._example_numbers = 4 * longest * width + longest**2

    def _stack(self, module: nn.Module, width: int) -> list[Layer]:
        """Return the linear layers, with their places in a row of the whole model."""
        layers = parse_stack(module, [width])
        assert layers is not None  # they are linear layers, as MeanOfWords makes them
        moved = []
        for layer in layers:
            weight = self._layout[f"layers.{layer.weight.name}"]
            bias = None if layer.bias is None else self._layout[f"layers.{layer.bias.name}"]
            moved.append(Layer(weight, bias, layer.activation))
        return moved

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        tokens = x.flatten(1)
        unknown = unknown_tokens(tokens, self._n_tokens)
        if unknown is not None:
            tokens = masked(tokens, unknown)

        # Forward: the mean of the words, the input of each layer, and the last output.
        is_word = (tokens != 0).to(point)  # [b, T]
        count = is_word.sum(1).clamp(min=1).unsqueeze(1)
        words = self._table.view(point)[tokens]  # [b, T, width]
        a = (words * is_word.unsqueeze(2)).sum(1) / count
        inputs = [a]
        for layer in self._layers:
            a = layer.forward(point[None], a[None], None)[0]
            inputs.append(a)

        delta = self._loss.derivative(a, y)
        if unknown is not None:
            delta = masked(delta, unknown, math.nan)  # such an example counts as zero

        # Backward: the derivative in the output of each layer, and in the mean.
        pieces: list[Piece] = []
        for index in reversed(range(len(self._layers))):
            layer = self._layers[index]
            delta = layer.backward_(delta, inputs[index + 1])
            pieces.append(Outer(layer.weight, inputs[index].unsqueeze(1), delta.unsqueeze(1), None))
            if layer.bias is not None:
                pieces.append(Stored(layer.bias, delta))
            delta = layer.pull(point[None], delta[None], None)[0]
        by_token = (delta / count).unsqueeze(1) * is_word.unsqueeze(2)
        return [*pieces, LookedUp(self._table, tokens, by_token)]

    def _parts(self, examples: int, element_size: int) -> Sequence[slice]:
        return row_chunks(examples, self._example_numbers * element_size, self._memory)
