"""Modules of models that are classes of their own.

A model's file describes it without torch (`common.deferred`), and a class of torch.nn needs torch when it is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flower_privdec.common.deferred import nn, torch
from flower_privdec.models import dense_layers

if TYPE_CHECKING:
    from torch import Tensor


class MeanOfWords(nn.Module):
    """Embed all tokens, take the mean without those that are 0 (padding), and apply linear layers."""

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


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = conv_norm(channels, out_channels, 3, stride, groups)
        self.second = conv_norm(out_channels, out_channels, 3, 1, groups)

        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out_channels:
            self.shortcut = conv_norm(channels, out_channels, 1, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)))
        return torch.relu(y + self.shortcut(x))


def conv_norm(channels: int, out_channels: int, kernel: int, stride: int, groups: int) -> nn.Sequential:
    """Return a convolution and a GroupNorm; height and width are divided by the stride, and 1 keeps them."""
    convolution = nn.Conv2d(channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(groups, out_channels))
