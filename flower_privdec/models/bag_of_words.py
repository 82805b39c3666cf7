"""A model of texts, which are whole numbers: tokens, of which 0 pads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flower_privdec.common.catalogue import ACTIVATIONS, ModelKeys
from flower_privdec.common.fields import Count
from flower_privdec.models import Model, Shape

if TYPE_CHECKING:
    from torch import nn


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
        from flower_privdec.models.layers import MeanOfWords

        keys = self.section
        return MeanOfWords(n_outputs, n_tokens or 1, keys.width, keys.hidden, keys.activation)
