"""PrivSGP-VR: private stochastic gradient push with variance reduction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np

from flower_privdec.algorithms import snapshot
from flower_privdec.algorithms.sgp import SGP
from flower_privdec.algorithms.tables import GRADIENT_TABLES, TABLES, stacked, table_sizes
from flower_privdec.common.deferred import torch
from flower_privdec.common.fields import Count
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import State
from flower_privdec.privacy.mechanism.declared import ONE_SUM, Declaration, Drawing, ReleasedSum
from flower_privdec.scenario import DescentSection

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.gradients import GradientKernel


class PrivSGPVR(SGP):
    """Push clipped, variance-reduced and noised gradients over directed, time-varying graphs.

    With z_i = x_i / w_i, a table of the gradient each example had when it was last used (φ in the paper),
    and P^k column-stochastic, round k at peer i is

        g_i = ∇f_i(z_i; ξ) - table_i[ξ] + mean(table_i)                   (eq. 6, SAGA)
        table_i[ξ] ← ∇f_i(z_i; ξ)
        x_i^{k+1/2} = x_i^k - γ (g_i + N(0, σ_i² I))
        x_i^{k+1} = Σ_j P_ij^k x_j^{k+1/2},  w_i^{k+1} = Σ_j P_ij^k w_j^k

    Tables: `factored` keeps each example's deltas and activations (exact, for stacks of linear layers),
    `blocks` one mean gradient for each fixed mini-batch, `snapshot` a model and its full gradient (SVRG),
    `dense` the gradients themselves.

    Privacy: the mean of the table depends on every example in every round, so the paper's amplification by
    1/J does not apply as claimed. What a step releases instead is declared and proved in `released`.

    Deviations from the paper: gradients are clipped to C = G, which the paper assumes bounded; batches of any
    size. The table starts with the gradients at x^0, as in the paper.

    Source: PrivSGP-VR (Zhu et al.), Algorithm 1, lines 2 to 12.
    """

    name = "privsgp-vr"
    line = "private SGP with variance reduction (PrivSGP-VR, Alg. 1): SAGA tables or SVRG"

    class Section(DescentSection):
        """PrivSGP-VR: which memory of gradients reduces the variance.

        Attributes:
            table: which gradients are remembered:
            snapshot_every: the number of rounds between two snapshots; for table snapshot only.
        """

        no_optimizer = "corrects each gradient by those of earlier models, which its analysis takes as plain steps"

        table: Annotated[str, GRADIENT_TABLES] = "factored"
        snapshot_every: Count = 100

        def unused_keys(self) -> Iterator[tuple[str, str, str]]:
            """Yield how often a snapshot is taken, if none is."""
            yield from super().unused_keys()
            if self.table != "snapshot" and self.snapshot_every != type(self).model_fields["snapshot_every"].default:
                yield "snapshot_every", f"algorithm.table={self.table}", "set algorithm.table=snapshot"

        @property
        def sampled_blocks(self) -> bool:
            """Whether the table has one gradient for each block of examples."""
            return self.table == "blocks"

    variants = (
        ("algorithm.table=dense",),
        ("algorithm.table=snapshot", "algorithm.snapshot_every=2"),
        ("algorithm.table=blocks", "data.batch.sampling=blocks"),
    )
    paper_noise = "moments-table"

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.table: str = section.table
        self.every = section.snapshot_every
        self.remembers_clipped = self.table != "snapshot"
        self.program = (self.descend, *SGP.program[1:])

    def check_model(self, kernel: GradientKernel) -> None:
        """Refuse a model that is not a stack of linear layers where the table is factored."""
        if self.table == "factored":
            stacked(kernel)

    def table_sizes(self, kernel: GradientKernel, sizes: np.ndarray, d: int, batch: int) -> dict[str, int | None]:
        """See Algorithm; a snapshot is a kind of table, too."""
        return table_sizes(kernel, sizes, d, batch)

    def full_passes(self, rounds: int) -> int:
        """Return how many snapshots are taken."""
        return math.ceil(rounds / self.every) if self.table == "snapshot" else 0

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Declare a step with a table, or one of SVRG's two kinds (`snapshot.released`).

        Over the batch S, each of J examples with probability q = b / J, b times a step with a table is

            Σ_{j in S} (g_j - t_j) + q Σ_j t_j,    |g_j|, |t_j| <= C,

        t_j being the table's gradient of example j. Example z adds q t_z when it is not drawn, of norm at most q C,
        and g_z - (1 - q) t_z when it is, of norm at most (2 - q) C. With all examples drawn the table cancels.
        """
        if self.table == "snapshot":
            return snapshot.released(step, self.every, drawing)
        if drawing.sampling == "full":
            return ONE_SUM
        return (ReleasedSum(drawn=2 - drawing.rate, idle=drawing.rate),)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return SGP's rows and the table at x^0."""
        rows = super().initial(cohort)
        with torch.no_grad():
            if self.table == "snapshot":
                memory = snapshot.initial(rows["x"])
            else:
                memory = TABLES[self.table].initial(cohort, rows["x"])
        return rows | memory

    def descend(self, cohort: Cohort, state: State) -> None:
        """Take x_i ← x_i - γ (g_i + noise), in place."""
        if self.table == "snapshot":
            snapshot.descend(cohort, state, self.every)
            return
        estimate = partial(TABLES[self.table].add_, state.rows)
        cohort.add_step_(
            state.rows["x"], state.rows["x"], state.round_index, divisor=state.rows["w"], estimate=estimate
        )
