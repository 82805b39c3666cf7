"""Baselines for the engine: a plain loop over peers (column A), Opacus in that loop, and textbook vmap.

Each is written as one would write it without this package, and does the same work: draw the examples, clip each
one's gradient, add Gaussian noise, descend, and push-sum along the round's edges.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flower_privdec.rows.sparse_rows import SparseRows
from tools.bench.workloads import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Setup

Draw = Callable[[int], tuple[Tensor, Tensor]]
Tape = Callable[[int, int], Tensor]


def plain_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a batch, summed, as PyTorch's users write it."""
    if name == "cross-entropy":
        return lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="sum")
    return lambda outputs, y: torch.relu(1 - (2 * y - 1) * outputs[:, 0]).sum()


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that the last backward pass left."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Baseline(ABC):
    """One way to run the workload's rounds.

    Args:
        setup: the workload.
        tape: the noise of (round, peer), [d], instead of random numbers; for the equality check.
        draw: the examples of a round, (x [n, B, ...], y [n, B]), instead of random ones; likewise.
    """

    def __init__(self, setup: Setup, tape: Tape | None = None, draw: Draw | None = None) -> None:
        self.setup = setup
        self.tape = tape
        self.draw = draw
        self.n = setup.workload.n_peers
        self.batch = setup.workload.batch
        self.loss = plain_loss(setup.workload.loss)
        self.round_index = 0
        shape = (self.n, setup.workload.examples)
        x = setup.examples.x
        if isinstance(x, SparseRows):
            raise TypeError("the baselines take dense examples alone")
        self._x = x.to(setup.device, setup.dtype).view(*shape, *setup.workload.shape)
        self._y = setup.examples.y.to(setup.device).view(shape)

    @abstractmethod
    def load(self, x: Tensor, w: Tensor) -> None:
        """Set parameters [n, d] and push weights [n]."""

    @abstractmethod
    def rows(self) -> tuple[Tensor, Tensor]:
        """Return parameters [n, d] and push weights [n]."""

    @abstractmethod
    def round(self) -> None:
        """Run one round."""

    def neighbours(self) -> np.ndarray:
        """Return the round's mixing matrix W, [n, n]."""
        return self.setup.mixing.matrix(self.round_index).dense()


class PeerLoop(Baseline):
    """Column A: a module for each peer, and one backward pass for each example."""

    def __init__(self, setup: Setup, tape: Tape | None = None, draw: Draw | None = None) -> None:
        super().__init__(setup, tape, draw)
        self.models = [copy.deepcopy(setup.module) for _ in range(self.n)]
        self.parameters = [list(model.parameters()) for model in self.models]
        self.weights = [1.0] * self.n
        self.hears: dict[int, list[dict[int, float]]] = {}

    def load(self, x: Tensor, w: Tensor) -> None:
        """See Baseline."""
        self.weights = w.tolist()
        with torch.no_grad():
            for parameters, row in zip(self.parameters, x, strict=True):
                parts = torch.split(row, [parameter.numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))

    def rows(self) -> tuple[Tensor, Tensor]:
        """See Baseline."""
        rows = [torch.cat([parameter.detach().flatten() for parameter in peer]) for peer in self.parameters]
        return torch.stack(rows), torch.tensor(self.weights, dtype=self.setup.dtype)

    def round(self) -> None:
        """Take every peer's step, one after the other; then average along the edges."""
        drawn = None if self.draw is None else self.draw(self.round_index)
        for peer in range(self.n):
            x, y = self._examples(peer) if drawn is None else (drawn[0][peer], drawn[1][peer])
            self._step(peer, x, y)
        self._mix()
        self.round_index += 1

    def _examples(self, peer: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(self._x.shape[1], device=self._x.device)[: self.batch]
        return self._x[peer, chosen], self._y[peer, chosen]

    def _step(self, peer: int, x: Tensor, y: Tensor) -> None:
        parameters = self.parameters[peer]
        weight = self.weights[peer]
        with torch.no_grad():
            if weight != 1:
                for parameter in parameters:
                    parameter.div_(weight)
        total = self.clipped_sum(peer, x, y)
        noises = self._noise(peer, total)
        with torch.no_grad():
            for parameter, part, noise in zip(parameters, total, noises, strict=True):
                if weight != 1:
                    parameter.mul_(weight)
                part.add_(noise, alpha=NOISE_MULTIPLIER * CLIP_NORM)
                parameter.sub_(part, alpha=LEARNING_RATE / self.batch)

    def clipped_sum(self, peer: int, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the sum of clipped gradients, a tensor for each parameter."""
        model = self.models[peer]
        parameters = self.parameters[peer]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for b in range(len(y)):
            model.zero_grad()
            torch.autograd.backward(self.loss(model(x[b : b + 1]), y[b : b + 1]))
            gradients = gradients_of(parameters)
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            factor = (CLIP_NORM / norm).clamp(max=1)
            for part, gradient in zip(total, gradients, strict=True):
                part.add_(gradient * factor)
        return total

    def _noise(self, peer: int, like: list[Tensor]) -> list[Tensor]:
        if self.tape is None:
            return [torch.randn_like(part) for part in like]
        parts = torch.split(self.tape(self.round_index, peer), [part.numel() for part in like])
        return [part.view_as(other) for part, other in zip(parts, like, strict=True)]

    @torch.no_grad()
    def _mix(self) -> None:
        sent = [[parameter.clone() for parameter in parameters] for parameters in self.parameters]
        row_of = self._weights_of_round()
        for peer, heard in enumerate(row_of):
            for index, parameter in enumerate(self.parameters[peer]):
                parameter.mul_(heard.get(peer, 0.0))
                for other, weight in heard.items():
                    if other != peer:
                        parameter.add_(sent[other][index], alpha=weight)
        self.weights = [sum(weight * self.weights[other] for other, weight in heard.items()) for heard in row_of]

    def _weights_of_round(self) -> list[dict[int, float]]:
        """Return for each peer the weight it gives to each peer it hears in the round."""
        phase = self.round_index % (self.setup.mixing.topology.period or 1)
        if phase not in self.hears:
            rows = self.neighbours()
            self.hears[phase] = [{int(other): float(row[other]) for other in np.flatnonzero(row)} for row in rows]
        return self.hears[phase]


class OpacusLoop(PeerLoop):
    """A loop over peers whose examples' gradients come from Opacus' hooks, a batch at a time."""

    def __init__(self, setup: Setup, tape: Tape | None = None, draw: Draw | None = None) -> None:
        super().__init__(setup, tape, draw)
        from opacus import GradSampleModule

        self.models = [GradSampleModule(model, loss_reduction="sum") for model in self.models]

    def clipped_sum(self, peer: int, x: Tensor, y: Tensor) -> list[Tensor]:
        """See PeerLoop."""
        model = self.models[peer]
        parameters = self.parameters[peer]
        model.zero_grad()
        torch.autograd.backward(self.loss(model(x), y))
        samples: list[Tensor] = [parameter.grad_sample for parameter in parameters]  # type: ignore[attr-defined]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factor = (CLIP_NORM / norms).clamp(max=1)
        return [torch.einsum("b,b...->...", factor, sample) for sample in samples]


class TextbookVmap(Baseline):
    """All peers and examples at once: vmap(vmap(grad)), and a dense matrix that mixes."""

    def __init__(self, setup: Setup, tape: Tape | None = None, draw: Draw | None = None) -> None:
        super().__init__(setup, tape, draw)
        self.names = [name for name, _ in setup.module.named_parameters()]
        self.shapes = [parameter.shape for parameter in setup.module.parameters()]
        self.gradients = vmap(vmap(grad(self._one), in_dims=(None, 0, 0)))
        first = torch.cat([parameter.detach().flatten() for parameter in setup.module.parameters()])
        self.load(first.expand(self.n, -1), torch.ones(self.n, dtype=setup.dtype, device=setup.device))

    def _one(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.loss(functional_call(self.setup.module, parameters, (x[None],)), y[None])

    def load(self, x: Tensor, w: Tensor) -> None:
        """See Baseline."""
        parts = torch.split(x, [shape.numel() for shape in self.shapes], dim=1)
        self.stacked = [part.reshape(self.n, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        self.weights = w

    def rows(self) -> tuple[Tensor, Tensor]:
        """See Baseline."""
        return torch.cat([part.flatten(1) for part in self.stacked], dim=1), self.weights

    @torch.no_grad()
    def round(self) -> None:
        """Take all peers' steps at once; then mix by the dense matrix."""
        x, y = self._examples() if self.draw is None else self.draw(self.round_index)
        point = {name: part / self._per_row(part) for name, part in zip(self.names, self.stacked, strict=True)}
        gradients: dict[str, Tensor] = self.gradients(point, x, y)
        norms = torch.stack([g.flatten(2).norm(dim=2) for g in gradients.values()]).norm(dim=0)
        factor = (CLIP_NORM / norms).clamp(max=1)
        total = [torch.einsum("nb,nb...->n...", factor, g) for g in gradients.values()]
        matrix = torch.from_numpy(self.neighbours()).to(self.weights)
        self.stacked = [
            torch.tensordot(
                matrix, part - LEARNING_RATE / self.batch * (t + NOISE_MULTIPLIER * CLIP_NORM * noise), dims=1
            )
            for part, t, noise in zip(self.stacked, total, self._noise(total), strict=True)
        ]

        self.weights = matrix @ self.weights
        self.round_index += 1

    def _per_row(self, part: Tensor) -> Tensor:
        return self.weights.view(-1, *[1] * (part.ndim - 1))

    def _examples(self) -> tuple[Tensor, Tensor]:
        order = torch.rand(self._y.shape, device=self._y.device).argsort(1)[:, : self.batch]
        peer = torch.arange(self.n, device=self._y.device)[:, None]
        return self._x[peer, order], self._y[peer, order]

    def _noise(self, like: list[Tensor]) -> list[Tensor]:
        if self.tape is None:
            return [torch.randn_like(part) for part in like]
        rows = torch.stack([self.tape(self.round_index, peer) for peer in range(self.n)])
        parts: Any = torch.split(rows, [shape.numel() for shape in self.shapes], dim=1)
        return [part.reshape(other.shape) for part, other in zip(parts, like, strict=True)]
