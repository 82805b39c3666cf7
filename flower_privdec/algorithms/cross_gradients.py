"""Cross-gradients: a peer takes its gradient at its neighbours' models as at its own, on the same examples.

A round of PDSL and of CGA begins alike at peer i, M_i being its neighbours and itself:

    x_j arrives from every neighbour j                                        Gather(("x",))
    ĝ_ij = clipped gradient of F_i(x_j; ξ_i) + noise, for every j in M_i      `cross_gradients`
    ĝ_ij goes back to j, who has then ĝ_ji from every neighbour               Reply(("gradient",))

Clipping is example by example, the noised sum is divided by the expected batch, and all of a peer's ĝ_ij are of one
batch. Only neighbours that are active in the round are there.

Privacy: unit example, adjacency zero-out. Peer i's |M_i| sums of one round, its own among them, are one Gaussian vector
towards colluding neighbours, which an example moves by C sqrt(|M_i|) at most; the budget is held to that, for |M_i| of
each round. What i makes of them (its model, its momentum) and sends on is computed from releases. A single neighbour j
receives ĝ_ij, which an example moves by C, but also i's later models, which are made of ĝ_ii: the smaller ε of the
replies to j does not bound everything that j receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort, StepRequest
from flower_privdec.core.exchange import Edges, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, ReleasedSum

if TYPE_CHECKING:
    from torch import Tensor


class CrossGradients(Algorithm):
    """The common parts of PDSL and CGA."""

    # The hub of a star answers several peers, and each of them only the hub.
    needs: ClassVar[tuple[str, ...]] = ("topology.name=star",)
    weights = "doubly-stochastic"
    slots = 4
    noise_follows_rate = False  # a peer's gradients enter its neighbours' steps, by their rates
    edge_slots = 5

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Refuse a graph whose weights are not symmetric."""
        mixing = Mixing(topology, weights, participation)
        check_symmetric(self.name, mixing)
        return mixing, participation


def cross_gradients(cohort: Cohort, state: State) -> None:
    """Turn the models that were gathered into noised gradients at them, and keep the peer's own apart.

    Afterwards the edges `gradient` hold ĝ_ij for each neighbour j, and the rows `gradient` ĝ_ii. They are 0 where the
    peer takes no step: it is not active, or its budget is spent.
    """
    heard = state.edges.pop("x")
    x = state.rows["x"]

    # A row for each model that a peer answers, its own included, in the order of the peers and then of the senders.
    own = np.concatenate([heard.own, state.peers])
    other = np.concatenate([heard.other, state.peers])
    order = np.lexsort((other, own))
    own = own[order]
    other = other[order]
    models = torch.cat([heard.values, x])[torch.from_numpy(order)]

    gradients = torch.zeros_like(models)
    rows = np.searchsorted(state.peers, own)
    steps = np.flatnonzero(cohort.active(state.round_index)[rows])
    if len(steps):
        chosen = torch.as_tensor(steps, device=x.device)
        part = gradients[chosen]
        cohort.release_rows_(
            StepRequest(
                sums={"gradient": part},
                params=models[chosen],
                round_index=state.round_index,
                rows=rows[steps],
                receivers=other[steps],
            )
        )
        gradients[chosen] = part

    mine = np.flatnonzero(own == other)
    theirs = np.flatnonzero(own != other)
    state.rows["gradient"] = gradients[torch.as_tensor(mine, device=x.device)]
    state.edges["gradient"] = Edges(own[theirs], other[theirs], gradients[torch.as_tensor(theirs, device=x.device)])


def one_for_each(algorithm: object, step: int, drawing: Drawing) -> Declaration:
    """Declare a sum for every neighbour, and one for the peer itself, which its own models show to all."""
    return (ReleasedSum(to="neighbour", receivers=drawing.neighbours(step) + 1),)


def answers(state: State, row: int) -> tuple[np.ndarray, Tensor]:
    """Return M_i of a row, int64 [k] ascending, and ĝ_ji of each j in it, [k, d]: its own and those it was sent."""
    peer = int(state.peers[row])
    gradients = state.edges["gradient"].of(peer)
    place = int(np.searchsorted(gradients.other, peer))
    own = state.rows["gradient"][row : row + 1]
    return np.insert(gradients.other, place, peer), torch.cat([gradients.values[:place], own, gradients.values[place:]])


def check_symmetric(name: str, mixing: Mixing) -> None:
    """Refuse mixing weights that are not symmetric, in any round of a graph that repeats.

    Args:
        name: the name of the algorithm, which requires this.

    Raises:
        ScenarioError: the message names the graph.
    """
    topology = mixing.topology
    if topology.name == "server":
        raise ScenarioError(
            f"algorithm.name={name} on topology server must be on a graph of peers who answer each other: use complete",
            code="mixing.server",
        )

    for k in range(topology.period or 1):
        # Sorted by one end and by the other, the links there and back stand at the same places.
        senders, receivers, weights = mixing.matrix(k).links()
        there = np.lexsort((senders, receivers))
        back = np.lexsort((receivers, senders))
        same_ends = np.array_equal(senders[there], receivers[back]) and np.array_equal(receivers[there], senders[back])
        if not same_ends or not np.allclose(weights[there], weights[back], rtol=1e-12):
            raise ScenarioError(
                f"algorithm.name={name} on topology {topology.name} must have symmetric weights, ω_ij = ω_ji, for "
                "peers reply to their in-neighbors; use an undirected graph, such as ring, bipartite or complete",
                code="mixing.not-symmetric",
            )
