"""What the mean models of many coalitions are worth: their accuracy on public examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flower_privdec.gradients.protocol import GradientKernel, inputs_like, row_chunks

if TYPE_CHECKING:
    from flower_privdec.data import PublicSet
    from flower_privdec.data.sparse_rows import Features
    from flower_privdec.tasks.losses import Loss

OUTPUT_BYTES = 2**26  # the outputs of so many coalitions as are tried at once


@dataclass(frozen=True, eq=False)
class Validation:
    """Public examples on which coalitions are tried, on the device.

    Attributes:
        x: inputs [N, *shape].
        y: classes, int64 [N].
        loss: says what outputs predict.
    """

    x: Features
    y: Tensor
    loss: Loss

    @staticmethod
    def of(public: PublicSet, loss: Loss, like: Tensor) -> Validation:
        """Place a public set where parameters are."""
        return Validation(inputs_like(public.x, like), public.y.to(like.device), loss)

    def __len__(self) -> int:
        """Return N."""
        return len(self.y)

    def some(self, chosen: np.ndarray) -> Validation:
        """Return some of the examples."""
        rows = torch.as_tensor(chosen, device=self.y.device)
        return Validation(self.x[rows], self.y[rows], self.loss)

    def worth(self, kernel: GradientKernel, models: Tensor, coalitions: np.ndarray) -> np.ndarray:
        """Return the accuracy of the mean model of each coalition, float64 [c] (PDSL, eq. 16 and 17).

        It is 0 where a member's parameters are not finite, and an example whose outputs are not counts as wrong.

        Args:
            models: of the members, [n, d].
            coalitions: bool [c, n], none empty.
        """
        sound = torch.isfinite(models).all(1)
        weights = torch.as_tensor(coalitions / coalitions.sum(1, keepdims=True)).to(models)
        kept, right = torch.where(sound[:, None], models, 0), torch.empty(len(weights), dtype=torch.float64)
        width = kernel.logits(kept[:1], self.x[:1]).shape[2]
        for rows in row_chunks(len(weights), len(self) * width * models.element_size(), OUTPUT_BYTES):
            outputs = kernel.blended_logits(kept, weights[rows], self.x)
            hits = (self.loss.predict(outputs) == self.y) & torch.isfinite(outputs).all(-1)
            right[rows] = hits.double().mean(1).cpu()
        right[(weights[:, ~sound] > 0).any(1).cpu()] = 0.0
        return right.numpy()
