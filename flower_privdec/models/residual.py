"""ResNet-18 (He et al. 2016) with GroupNorm, which does not mix the examples of a batch."""

from __future__ import annotations

from flower_privdec.common.catalogue import ModelKeys
from flower_privdec.common.deferred import nn
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import Count
from flower_privdec.models import Model, Shape, image_shape


class ResidualModel(Model):
    """ResNet-18 for small images: no pooling behind the first convolution, whose kernel is 3 x 3."""

    name = "resnet18-gn"
    line = "ResNet-18 with GroupNorm for small images"

    class Section(ModelKeys):
        """ResNet-18 with GroupNorm.

        Attributes:
            groups: the groups of channels that are normalised together.
            width: channels of the first stage.
        """

        groups: Count = 32
        width: Count = 64

    section: Section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return four stages of two blocks; each but the first halves the image and doubles the channels."""
        from flower_privdec.models.layers import ResidualBlock, conv_norm

        groups = self.section.groups
        width = self.section.width
        channels = image_shape(shape)[0]
        if width % groups:
            raise ScenarioError(
                f"model.width={width} must be a multiple of model.groups={groups}: change one of them",
                code="model.groups",
            )

        layers: list[nn.Module] = [conv_norm(channels, width, 3, 1, groups), nn.ReLU()]
        size = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                layers.append(ResidualBlock(size, width * 2**stage, stride, groups))
                size = width * 2**stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, n_outputs))
