"""Models of a user's own, for tests: scenarios name them as `user_models:factory`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A small network with a shortcut: nothing but example-wise operations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 16)
        self.back = nn.Linear(16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        x = x.flatten(1)
        logits: Tensor = self.out(x + self.back(torch.relu(self.inner(x))))
        return logits


class Unproved(nn.Module):
    """A network whose largest feature scales all of an example, by an operation for which nothing is proved."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        logits: Tensor = self.out(x.flatten(1) / x.flatten(1).abs().max(1, keepdim=True).values.clamp(min=0.5))
        return logits


class Tokens(nn.Module):
    """An embedding of pixels taken for tokens, as of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.out = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        logits: Tensor = self.out(self.embed((x.flatten(1) * 16).long().clamp(0, 16)).mean(1))
        return logits


def residual() -> nn.Module:
    """Return a small network with a shortcut."""
    return Residual()


def unproved() -> nn.Module:
    """Return a network that keeps examples apart in a way that is not proved."""
    return Unproved()


def tokens() -> nn.Module:
    """Return an embedding of pixels."""
    return Tokens()


def convolutional() -> nn.Module:
    """Return a small stack with a convolution."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10))


class Tied(nn.Module):
    """A network that uses a parameter twice, and scales by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.last = nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight
        self.out = nn.Linear(64, 10, bias=False)
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        logits: Tensor = self.out(self.last(torch.tanh(self.first(x.flatten(1) * self.scale))))
        return logits


def tied() -> nn.Module:
    """Return a network that uses a parameter twice."""
    return Tied()


class Halves(nn.Module):
    """A layer that returns two tensors, as recurrent layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two halves of rows, [b, 32] each."""
        return x[:, :32], x[:, 32:]


class Halved(nn.Module):
    """A network with such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        first, second = self.halves(x.flatten(1))
        logits: Tensor = self.out(first * second)
        return logits


def halved() -> nn.Module:
    """Return a network with a layer that returns two tensors."""
    return Halved()


class Adapted(nn.Module):
    """A frozen network of images with a BatchNorm, an adapter of low rank beside its last layer, and a trained head."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 12)
        )
        with torch.no_grad():
            self.features[4].bias.add_(shift)
            self.features[1].running_mean.fill_(0.1)
        self.features.requires_grad_(False)
        self.down = nn.Linear(108, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        inner = self.features[:4](x)
        logits: Tensor = self.head(torch.tanh(self.features[4](inner) + self.up(self.down(inner))))
        return logits


def adapted(shift: float = 0.0) -> nn.Module:
    """Return a network most of which is frozen; `shift` moves frozen weights."""
    return Adapted(shift).train()


class Attending(nn.Module):
    """Rows of an image that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 10]."""
        rows = x.squeeze(1)
        logits: Tensor = self.out(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))
        return logits


def attending() -> nn.Module:
    """Return a small network with attention."""
    return Attending()
