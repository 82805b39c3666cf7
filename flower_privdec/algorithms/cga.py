"""CGA: cross-gradients projected into one direction that none of them opposes, with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from flower_privdec.algorithms.cross_gradients import CrossGradients, answers, cross_gradients, one_for_each
from flower_privdec.common.deferred import scipy, torch
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Gather, Reply, State
from flower_privdec.scenario import DescentSection

if TYPE_CHECKING:
    from torch import Tensor


class CrossGradientAggregation(CrossGradients):
    """Descend along the direction nearest to one's own gradient that no neighbour's data oppose, and gossip.

    With W symmetric and doubly stochastic, M_i = {j: ω_ij > 0} and ĝ_ji from `cross_gradients`, round t at peer i is

        z_i = argmin_z |z - ĝ_ii|²  with  <z, ĝ_ji> >= 0 for every j in M_i         `agreeable`
        v_i ← β v_i - γ z_i
        x_i ← Σ_j ω_ij x_j + v_i                                                    with the x_j that were gathered

    Privacy: see `cross_gradients`; all that is made of the ĝ costs nothing more.

    Deviations from the paper: gradients are clipped example by example and noised, noise is solved by the exact
    accountant for all rounds, and the peer's own gradient is among those that z must not oppose (noise may turn it
    against nothing else: without it z is the same, for z·ĝ_ii = |z|² + z·(ĝ_ii - z) >= 0 at the minimum). The authors'
    published code differs from their algorithm: it weighs the gradients by ω, wants every multiplier at least 1/2, and
    steps along z + β m; none of that is here.

    Source: Esfandiari et al. 2021 (CGA), Algorithm 1; the program is that of Lopez-Paz and Ranzato 2017 (GEM), eq. 8
    to 11.
    """

    name = "dp-cga"
    line = "cross-gradients projected into one direction that none of them opposes (CGA), noised"

    class Section(DescentSection):
        """Cross-gradients projected into one direction.

        Attributes:
            momentum: β, the share of the last round's step in this one's.
        """

        no_optimizer = "has a momentum of its own, which is sent"

        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5

    released = one_for_each

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.momentum = section.momentum
        self.program = (Gather(("x",)), mix_heard, cross_gradients, Reply(("gradient",)), self.descend)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x, no momentum, and room for the mean of what is heard."""
        rows = super().initial(cohort)
        return rows | {name: torch.zeros_like(rows["x"]) for name in ("v", "mixed")}

    def descend(self, cohort: Cohort, state: State) -> None:
        """Take the projected step of every active peer from the mean of the models that it heard."""
        k = state.round_index
        v = state.rows["v"]
        x = state.rows["x"]
        active = cohort.participation.active(k)
        rates = cohort.learning_rate.at(k)

        for row, peer in enumerate(state.peers.tolist()):
            if not active[peer]:
                continue
            members, gradients = answers(state, row)
            place = int(np.searchsorted(members, peer))
            shares = cohort.tensor(agreeable(gradients, place))
            v[row].mul_(self.momentum).sub_(shares @ gradients, alpha=float(rates[peer]))
            torch.add(state.rows["mixed"][row], v[row], out=x[row])

        del state.rows["gradient"]
        state.edges.clear()


def mix_heard(cohort: Cohort, state: State) -> None:
    """Put Σ_j ω_ij x_j into the rows `mixed`, of one's own model and those that were gathered."""
    if cohort.mixing is None:
        raise TypeError("the models that were gathered have no mixing weights")

    heard = state.edges["x"]
    x = state.rows["x"]
    mixed = state.rows["mixed"]
    for row, peer in enumerate(state.peers.tolist()):
        neighbours = heard.of(peer)
        terms = cohort.mixing.hosted(state.round_index, state.peers).terms[row]
        omega = {sender: weight for sender, _, weight in terms}

        torch.mul(x[row], omega[peer], out=mixed[row])
        weights = cohort.tensor(np.array([omega[sender] for sender in neighbours.other.tolist()]))
        if len(weights):
            mixed[row].add_(weights @ neighbours.values)


def agreeable(gradients: Tensor, own: int) -> np.ndarray:
    """Return c >= 0, [n], for which z = c @ gradients is nearest to gradients[own] among those none of them opposes.

    The dual of the program, min over u >= 0 of |G^T u + g|² with z = g + G^T u, is a non-negative least squares problem
    of n unknowns, as g is a row of G. Gradients that depend on each other make u ambiguous, but z is unique.
    If they are not finite, or all of them are 0, c picks only the peer's own gradient.

    Args:
        gradients: G, [n, d].
        own: which of them is g.

    Examples:
        >>> agreeable(torch.tensor([[1.0, 1.0], [0.0, -2.0]]), 0).tolist()  # z = (1, 0)
        [1.0, 0.5]
    """
    only: np.ndarray = np.eye(len(gradients))[own]
    largest = float(gradients.abs().max())
    if not 0 < largest < np.inf:
        return only
    root = torch.linalg.qr((gradients.double() / largest).T, mode="r")[1].cpu().numpy()  # has their lengths and angles
    multipliers, _ = scipy.optimize.nnls(root, -root[:, own], maxiter=100 * len(gradients))
    return np.asarray(only + multipliers)
