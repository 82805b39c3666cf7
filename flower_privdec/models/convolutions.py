"""Convolutional networks for images: one family, whose sizes differ from paper to paper."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flower_privdec.common.catalogue import ACTIVATIONS, ModelKeys
from flower_privdec.common.deferred import nn
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import Count
from flower_privdec.models import Model, Shape, activation_layer, dense_layers, image_shape


class ConvolutionModel(Model):
    """Convolutions, each with an activation and, if asked for, a pooling; then fully connected layers."""

    name = "cnn"
    line = "convolutions, 2 x 2 max pooling, fully connected"

    class Section(ModelKeys):
        """Convolutions, then fully connected layers.

        Attributes:
            channels: the channels of each convolution.
            kernel: side of each convolution in pixels.
            hidden: widths of the hidden layers behind the convolutions.
            activation: behind each layer but the last:
            pool: whether the largest of 2 x 2 pixels is kept after each convolution.
        """

        channels: list[Count] = Field(default=[16, 32])
        kernel: Count = 3
        hidden: list[Count] = Field(default=[64])
        activation: Annotated[str, ACTIVATIONS] = "relu"
        pool: bool = True

    section: Section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return the layers for images of a shape."""
        keys = self.section
        channels, height, width = image_shape(shape)
        layers: list[nn.Module] = []
        for out_channels in keys.channels:
            layers.append(nn.Conv2d(channels, out_channels, keys.kernel, padding=keys.kernel // 2))
            layers.append(activation_layer(keys.activation))
            if keys.pool:
                layers.append(nn.MaxPool2d(2))
                height //= 2
                width //= 2
            channels = out_channels

        if min(height, width) < 1:
            raise ScenarioError(
                f"model.channels={list(keys.channels)} has {len(keys.channels)} poolings of 2 x 2, too many for images "
                f"of {shape[1]} x {shape[2]} pixels: give fewer, or set model.pool to false",
                code="model.pooling",
            )
        dense = dense_layers(channels * height * width, keys.hidden, n_outputs, keys.activation)
        return nn.Sequential(*layers, nn.Flatten(), *dense)


class SmallConvolutionModel(ConvolutionModel):
    """The default sizes."""

    name = "cnn-small"
    line = "two 3x3 convolutions of 16 and 32 channels, fully connected 64"


class DynD2PModel(ConvolutionModel):
    """Dyn-D2P's network."""

    name = "cnn-dyn-d2p"
    line = "Dyn-D2P's shallow CNN: two convolutions and two linear layers (sizes not in the paper)"

    class Section(ConvolutionModel.Section):
        """Dyn-D2P's network."""

        channels: list[Count] = Field(default=[10, 20])
        kernel: Count = 5
        hidden: list[Count] = Field(default=[50])


class PDSLModel(ConvolutionModel):
    """PDSL's network."""

    name = "cnn-pdsl"
    line = "PDSL's CNN for MNIST: two 3x3 convolutions with pooling and one linear layer"

    class Section(ConvolutionModel.Section):
        """PDSL's network."""

        hidden: list[Count] = Field(default=[])


class FedDeperModel(ConvolutionModel):
    """FedDeper's network."""

    name = "cnn-feddeper"
    line = "FedDeper's CNN for MNIST: 32 and 64 3x3 filters, fully connected 1024 and 512"

    class Section(ConvolutionModel.Section):
        """FedDeper's network."""

        channels: list[Count] = Field(default=[32, 64])
        hidden: list[Count] = Field(default=[1024, 512])
