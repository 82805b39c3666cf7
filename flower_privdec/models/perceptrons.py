"""Linear layers: softmax regression, and fully connected networks."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from flower_privdec.common.catalogue import ACTIVATIONS, ModelKeys
from flower_privdec.common.deferred import nn
from flower_privdec.common.fields import Count
from flower_privdec.models import Model, Shape, dense_layers


class LinearModel(Model):
    """One linear layer."""

    name = "linear"
    line = "softmax regression, or one output for a margin loss"

    class Section(ModelKeys):
        """One linear layer.

        Attributes:
            bias: whether each output has one.
        """

        bias: bool = True

    section: Section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return the layer, behind one that flattens an example."""
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), n_outputs, bias=self.section.bias))


class SoftmaxModel(LinearModel):
    """The same by another name."""

    name = "softmax"
    line = "linear by the name it has with cross-entropy"


class PerceptronModel(Model):
    """A fully connected network."""

    name = "mlp"
    line = "fully connected"

    class Section(ModelKeys):
        """A fully connected network.

        Attributes:
            hidden: widths of the hidden layers.
            activation: between two layers:
        """

        hidden: list[Count] = Field(default=[100])
        activation: Annotated[str, ACTIVATIONS] = "relu"

    section: Section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return the layers, behind one that flattens an example."""
        layers = dense_layers(math.prod(shape), self.section.hidden, n_outputs, self.section.activation)
        return nn.Sequential(nn.Flatten(), *layers)
