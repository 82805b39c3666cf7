"""Models, losses and batches on which the gradient kernels are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flower_privdec.gradients import (
    GradientKernel,
    StackedKernel,
)
from flower_privdec.gradients.factored import FactoredKernel
from flower_privdec.gradients.per_example import VmapKernel
from flower_privdec.models import build_model
from flower_privdec.tasks.losses import LOSSES, Loss

CLASSES = 4


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    weight: Tensor

    def rows(self, rows: Any) -> Batch:
        return Batch(self.x[rows], self.y[rows], self.weight[rows])


class Residual(nn.Module):
    """A block whose layers are not a chain, with a norm and a pooling of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = torch.relu(x + self.second(torch.relu(x)))
        return self.last(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Layers called several times, over sequences: images [b, 2, 6, 6] seen as 12 steps of 6 features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        for _ in range(2):
            x = torch.tanh(self.inner(x))
        return self.outer(x).mean(1) + self.outer(x[:, 0])


class Scaled(nn.Module):
    """A parameter of its own: nothing but vmap fits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(72)
        self.layer = nn.Linear(72, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x.flatten(1)) * self.scale)


class Tied(nn.Module):
    """Two layers that share a weight, and a part that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(72, 72)
        self.second = nn.Linear(72, 72)
        self.second.weight = self.first.weight
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.flatten(1))))[:, :CLASSES]


def strided() -> nn.Module:
    """Convolutions with every option, wide and narrow, sharing one in-place activation."""
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(
        nn.Conv2d(2, 9, (3, 2), stride=(1, 2), padding=(2, 1)),
        relu,
        nn.Identity(),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.Sequential(nn.Conv2d(9, 3, 2, dilation=(2, 1), bias=False), relu),
        nn.Conv2d(3, 3, 1),
        nn.Flatten(),
        relu,
        nn.LazyLinear(5),
        nn.Tanh(),
        nn.Linear(5, CLASSES),
    )


def named(name: str, **options: Any) -> Any:
    return lambda outputs: build_model(name, SHAPE, outputs, seed=3, **options)


SHAPE = (2, 6, 6)


MODELS: dict[str, tuple[Any, type]] = {
    "linear": (named("linear"), StackedKernel),
    "linear without bias": (named("linear", bias=False), StackedKernel),
    "mlp": (named("mlp", hidden=[7, 5]), StackedKernel),
    "mlp tanh": (named("mlp", hidden=[6], activation="tanh"), StackedKernel),
    "cnn-small": (named("cnn-small", channels=[4, 9], hidden=[8]), FactoredKernel),
    "cnn-dyn-d2p": (named("cnn-dyn-d2p", hidden=[6]), FactoredKernel),
    "cnn-pdsl": (named("cnn-pdsl", channels=[3, 4]), FactoredKernel),
    "cnn-feddeper": (named("cnn-feddeper", channels=[4, 8], hidden=[9, 6]), FactoredKernel),
    "resnet18-gn": (named("resnet18-gn", groups=2, width=4), FactoredKernel),
    "strided": (lambda _: strided(), FactoredKernel),
    "residual": (lambda _: Residual(), FactoredKernel),
    "recurrent": (lambda _: Recurrent(), FactoredKernel),
    "scaled": (lambda _: Scaled(), VmapKernel),
    "tied": (lambda _: Tied(), VmapKernel),
}


ORDER = {"stacked": StackedKernel, "factored": FactoredKernel, "vmap": VmapKernel}


MARGINS = [name for name, loss in LOSSES.items() if loss.single]


OTHERS = [name for name, loss in LOSSES.items() if loss.targets != "classes"]


def targets_of(loss: Loss, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Targets of some examples, as the loss takes them."""
    g = torch.Generator().manual_seed(seed)
    if loss.targets == "numbers":
        return 3 * torch.randn(*shape, CLASSES, generator=g, dtype=dtype)
    if loss.targets == "labels":
        return torch.randint(0, 2, (*shape, CLASSES), generator=g).to(dtype)
    return torch.randint(0, 2 if loss.single else CLASSES, shape, generator=g)


def module_of(name: str, outputs: int = CLASSES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = MODELS[name][0](outputs)
        module(torch.zeros(2, *SHAPE))  # lazy layers take their shape
    return module


def added(kernel: GradientKernel, params: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What the kernel adds to zeros, and the norms."""
    out = torch.zeros_like(params)
    norms = kernel.add_clipped_(out, params, *rest)
    return out, norms
