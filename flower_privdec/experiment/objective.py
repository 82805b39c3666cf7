"""What convex learning minimises, over the training examples of all peers: private, and a figure of research.

Nothing here looks at noise or budgets: a value is computed from raw examples, and no ε covers it. So it is computed
only where nothing is private, or where the scenario says that it ignores what such figures tell (`evaluation.private`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from flower_privdec.algorithms.proximal import Regularizer
from flower_privdec.data.sparse_rows import SparseRows
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.tasks.losses import Loss

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class ConvexObjective:
    """F(x) = (1/n) Σ_i (1/q_i) Σ_j l(x; example j of peer i) + h(x), of one linear layer, in float64.

    A model is a vector [d]: the weights [k, D], then the biases [k] where there are some.

    Attributes:
        features: [N, D], of all peers' examples, with a last column of ones where there is a bias.
        targets: [N, ...].
        weights: [N], 1 / (n q_i) of each example; they sum to 1.
        loss: of an example.
        outputs: k.
        bias: whether there is one.
    """

    features: scipy.sparse.csr_matrix
    targets: Tensor
    weights: Array
    loss: Loss
    regularizer: Regularizer
    outputs: int
    bias: bool

    @staticmethod
    def of(agreement: Agreement, own: OwnParts) -> ConvexObjective:
        """Return what the peers of a run minimise together.

        Args:
            own: of all peers.
        """
        layer, parts = agreement.kernel.layers[0], own.examples.parts  # type: ignore[attr-defined]
        rows = np.concatenate(parts)
        weights = np.concatenate([np.full(len(part), 1 / (len(parts) * len(part))) for part in parts])
        chosen = own.examples.x[torch.from_numpy(rows)]
        held = chosen.matrix if isinstance(chosen, SparseRows) else chosen.flatten(1).numpy()
        features = scipy.sparse.csr_matrix(held, dtype=np.float64)
        if layer.bias is not None:
            features = scipy.sparse.hstack([features, np.ones((len(rows), 1))], format="csr")
        return ConvexObjective(
            features=features,
            targets=own.examples.y[torch.from_numpy(rows)],
            weights=weights,
            loss=agreement.loss,
            regularizer=agreement.algorithm.regularizer,  # type: ignore[attr-defined]
            outputs=layer.weight.shape[0],
            bias=layer.bias is not None,
        )

    @property
    def dimension(self) -> int:
        """Return d."""
        return int(self.features.shape[1]) * self.outputs

    def value(self, x: Tensor | Array) -> float:
        """Return F(x)."""
        model = torch.as_tensor(x).detach().cpu().double()
        outputs = torch.from_numpy(self.features @ self.matrix(model.numpy()))
        losses = self.loss.value(outputs, self.targets).numpy()
        return float(self.weights @ losses) + self.regularizer.value(model)

    def matrix(self, x: Array) -> Array:
        """Return a model as [D, k], so that outputs are features @ matrix."""
        inner = self.features.shape[1] - self.bias
        weight = x[: self.outputs * inner].reshape(self.outputs, inner).T
        return np.vstack([weight, x[self.outputs * inner :][None]]) if self.bias else weight

    def vector(self, matrix: Array) -> Array:
        """Return what `matrix` was made of, [d]."""
        inner = self.features.shape[1] - self.bias
        return np.concatenate([matrix[:inner].T.ravel(), matrix[inner:].ravel()])
