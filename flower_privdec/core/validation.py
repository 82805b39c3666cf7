"""Public examples on which groups of models are tried, as Shapley values of neighbours need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.data import PublicSet
    from flower_privdec.gradients.protocol import GradientKernel
    from flower_privdec.rows.sparse_rows import Features
    from flower_privdec.tasks.losses import Loss


OUTPUT_BYTES = 2**26  # bounds the outputs of the coalitions that are tried at once


@dataclass(frozen=True, eq=False)
class Validation:
    """Public examples on which coalitions of peers are tried, on the device of the parameters.

    Attributes:
        x: inputs [N, *shape].
        y: classes, int64 [N].
        loss: maps outputs to predictions.
    """

    x: Features
    y: Tensor
    loss: Loss

    @staticmethod
    def of(public: PublicSet, loss: Loss, like: Tensor) -> Validation:
        """Place a public set on the device of the parameters."""
        from flower_privdec.gradients.protocol import inputs_like

        return Validation(inputs_like(public.x, like), public.y.to(like.device), loss)

    def __len__(self) -> int:
        """Return N."""
        return len(self.y)

    def some(self, chosen: np.ndarray) -> Validation:
        """Return some of the examples."""
        rows = torch.as_tensor(chosen, device=self.y.device)
        return Validation(self.x[rows], self.y[rows], self.loss)

    def hits(self, kernel: GradientKernel, models: Tensor, coalitions: np.ndarray) -> np.ndarray:
        """Return how many of the N examples the mean model of each coalition hits, int64 [c] (PDSL, eq. 16 and 17).

        A coalition hits none if a member's parameters are not finite. An example counts as wrong if its outputs are
        not finite.

        Args:
            models: the models of all n members, [n, d].
            coalitions: who belongs to which, bool [c, n]; none is empty.
        """
        from flower_privdec.gradients.protocol import row_chunks

        # Zeros stand in for a broken model, since its infinities would spread to every coalition through the product.
        is_sound = torch.isfinite(models).all(1)
        sound_models = torch.where(is_sound[:, None], models, 0)

        # The mean of the members' models is a blend with weights 1 / size.
        sizes = coalitions.sum(1, keepdims=True)
        weights = torch.as_tensor(coalitions / sizes).to(models)

        width = kernel.logits(sound_models[:1], self.x[:1]).shape[2]
        bytes_per_coalition = len(self) * width * models.element_size()

        hits = torch.empty(len(weights), dtype=torch.int64)
        for rows in row_chunks(len(weights), bytes_per_coalition, OUTPUT_BYTES):
            outputs = kernel.blended_logits(sound_models, weights[rows], self.x)
            is_right = self.loss.predict(outputs) == self.y
            is_finite = torch.isfinite(outputs).all(-1)
            hits[rows] = (is_right & is_finite).sum(1).cpu()

        has_broken_member = (weights[:, ~is_sound] > 0).any(1)
        hits[has_broken_member.cpu()] = 0
        return hits.numpy()
