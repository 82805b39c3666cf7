"""A model of texts, which are whole numbers: tokens, of which 0 pads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from flower_privdec.common.catalogue import ACTIVATIONS, ModelKeys
from flower_privdec.common.fields import Count
from flower_privdec.models import Model, Shape, dense_layers


class TextModel(Model):
    """The mean of the embeddings of all tokens but 0, through linear layers."""

    name = "text"
    line = "mean of the embeddings of tokens, of which 0 pads, fully connected"
    takes_tokens = True

    class Section(ModelKeys):
        """The mean of embeddings, then fully connected layers.

        Attributes:
            width: numbers a token is turned into.
            hidden: widths of the hidden layers.
            activation: between two layers:
        """

        width: Count = 32
        hidden: list[Count] = Field(default=[])
        activation: Annotated[str, ACTIVATIONS] = "relu"

    section: Section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return the module."""
        keys = self.section
        return _Text(n_outputs, n_tokens or 1, keys.width, keys.hidden, keys.activation)


class _Text(nn.Module):
    def __init__(self, n_outputs: int, n_tokens: int, width: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        self.layers = nn.Sequential(*dense_layers(width, hidden, n_outputs, activation))

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.flatten(1)  # [examples, tokens]
        words = self.embedding(flat)
        is_word = (flat != 0).unsqueeze(2).to(words)
        count = is_word.sum(1).clamp(min=1)
        outputs: Tensor = self.layers((words * is_word).sum(1) / count)
        return outputs
