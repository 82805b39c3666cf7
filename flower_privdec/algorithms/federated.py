"""Methods of several local steps between exchanges: FedAvg, FedProx and SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import numpy as np
from pydantic import Field

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import NonNegative
from flower_privdec.core.cohort import Cohort, StepRequest
from flower_privdec.core.exchange import Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.rows.tensors import aligned, empty_rows, put_back
from flower_privdec.scenario import DescentSection

if TYPE_CHECKING:
    from torch import Tensor


WALKING = 4  # rows of [d] that a walk works on for each peer
WALKED_BYTES = (
    2**26
)  # of walks at once on a CPU: products of several peers are faster than of one whose rows are cached

Pull: TypeAlias = "Callable[[Tensor, Tensor], object]"  # of y; writes where it leads into another tensor

LocalSteps = Annotated[int, Field(ge=1, le=1_000_000)]


class LocalStepsSection(DescentSection):
    """Several local steps between two exchanges.

    Attributes:
        local_steps: τ, how many in a round.
    """

    local_steps: LocalSteps = 10


class FedAvg(SGP):
    """Take τ local steps from the common model, then average over the active peers.

        y ← x,  τ times: y ← y - η g̃_i(y),  then x ← Σ over the active peers of (J_i / Σ J) y_i

    J_i is a peer's number of examples; with weighting uniform each active peer counts 1/m. No peer has to know
    another's number: it sends J_i y_i and, as its push weight w_i, J_i, so that the ratio of the two means is the sum
    above. On a graph without a server w starts at J_i and x at J_i x^0, and J_i times the walk from z = x / w is added.

    Privacy: where the scenario has a privacy section, each of the τ steps is a release. The weights are public, for
    every number of examples is (adjacency is zero-out); a peer's noise enters the mean with its weight.

    Deviations from the paper: none without privacy. Source: McMahan et al. 2017, Algorithm 1.
    """

    name = "fedavg"
    line = "several local steps, then averaging (FedAvg); over a graph: local-step push-sum"

    class Section(LocalStepsSection):
        """FedAvg: several local steps, then an average.

        Attributes:
            weighting: a peer counts by its number of examples, as in the paper, or all count alike.
        """

        weighting: Literal["examples", "uniform"] = "examples"

    released = one_sum
    tried_on_own_labels = True

    def __init__(self, section: LocalStepsSection) -> None:
        super().__init__(section)
        self.by_examples = getattr(section, "weighting", "uniform") == "examples"
        weigh = (self.weigh,) if self.by_examples else ()
        self.program = (*weigh, self.local, Mix(("x", "w")))

    def local(self, cohort: Cohort, state: State) -> None:
        """Walk τ steps from z = x / w at every active row, and add the walk to x."""
        from flower_privdec.gradients.protocol import row_chunks

        active = np.flatnonzero(cohort.active(state.round_index))
        x = state.rows["x"]
        at_once = len(active)
        if x.device.type == "cpu":
            at_once = WALKED_BYTES // (WALKING * x[0].nbytes)
        for part in row_chunks(len(active), 1, at_once):
            rows = active[part]
            where = torch.as_tensor(rows, device=cohort.device)
            start = aligned(x[where]).div_(state.rows["w"][where].unsqueeze(1))
            walked = self.walk(cohort, state, rows, start).sub_(start)
            if self.by_examples:
                walked *= self.examples(cohort)[where].unsqueeze(1)
            for row, step in zip(rows.tolist(), walked, strict=True):
                x[row].add_(step)

    def weigh(self, cohort: Cohort, state: State) -> None:
        """Put its own number of examples into a peer's push weight again, after the server averaged them.

        The others' rows enter no average, and the server writes over them.
        """
        if cohort.mixing is None or cohort.mixing.weights != "server":
            return

        takes_part = cohort.participation.active(state.round_index)[cohort.peers]
        where = cohort.places(np.flatnonzero(takes_part))
        x = state.rows["x"][where]
        w = state.rows["w"][where]
        sizes = self.examples(cohort)[where]
        x.mul_((sizes / w).unsqueeze(1))
        put_back(state.rows["x"], where, x)
        state.rows["w"][where] = sizes

    def conserved_weights(self, sizes: np.ndarray) -> np.ndarray:
        """Return J_i if peers count by their examples, for x_i is then J_i times the model."""
        if self.by_examples:
            return sizes.astype(np.float64)
        return super().conserved_weights(sizes)

    @staticmethod
    def examples(cohort: Cohort) -> Tensor:
        """Return every row's number of examples, [m]."""
        return cohort.tensor(cohort.data.sampler.partition_sizes.astype(np.float64))

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x^0 and the push weights: J_i x^0 and J_i where peers count by their examples, else x^0 and 1."""
        rows = super().initial(cohort)
        if self.by_examples:
            sizes = self.examples(cohort)
            rows["x"].mul_(sizes.unsqueeze(1))
            rows["w"].copy_(sizes)
        return rows

    def walk(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Tensor:
        """Return where τ steps from `start` lead, [active, d], in a tensor of its own."""
        y = aligned(start)
        pull = self.pull(cohort, state, rows, start)

        # A pull is by y as it is before the step, like the gradient. So it goes elsewhere, and the gradient is added to
        # it there: one pass over the rows for both. Without a pull the step is in place.
        ahead = y
        if pull is not None:
            ahead = empty_rows(y, *y.shape)
        for step in range(self.steps_per_round):
            if pull is not None:
                pull(y, ahead)
            cohort.descend_rows_(
                StepRequest(
                    sums={"gradient": ahead}, params=y, round_index=state.round_index, local_step=step, rows=rows
                )
            )
            y, ahead = ahead, y
        return y

    def pull(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Pull | None:
        """Return what moves y in a step besides the gradient, in a walk from `start`; None if nothing does."""
        return None


class FedProx(FedAvg):
    """FedAvg with a proximal term: y ← y - η (g̃_i(y) + μ (y - x)).

    Privacy: as FedAvg. Deviations from the paper: peers are drawn alike and weighted by their examples, where the
    paper draws them by their examples and weights them alike: the same mean in expectation.

    Source: Li et al. 2020 (FedProx), Algorithm 2, with SGD as the local solver.
    """

    name = "fedprox"
    line = "FedAvg with a proximal term (FedProx)"

    class Section(FedAvg.Section):
        """FedAvg with a proximal term.

        Attributes:
            proximal: μ, by which half the squared distance to the round's first model is added to the loss.
        """

        proximal: NonNegative = 0.01

    released = one_sum

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.proximal = section.proximal

    def pull(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Pull | None:
        """Return the way to y - η μ (y - x)."""
        share = self.rate(cohort, state, rows) * self.proximal
        return lambda y, ahead: torch.lerp(y, start, share, out=ahead)

    @staticmethod
    def rate(cohort: Cohort, state: State, rows: np.ndarray) -> Tensor:
        """Return η of some rows, [active, 1]."""
        rates = cohort.learning_rate.at(state.round_index)[cohort.peers[rows]]
        return cohort.tensor(rates).unsqueeze(1)


class Scaffold(FedAvg):
    """FedAvg whose steps are corrected by control variates, c_i of each peer and c of the server.

        τ times: y ← y - η (g̃_i(y) - c_i + c)
        c_i⁺ = c_i - c + (x - y) / (τ η)                                        (option II)
        x ← x + mean over active (y - x),  c ← c + (m/n) mean over active (c_i⁺ - c_i)

    A peer sends two vectors a round.

    Privacy: c_i⁺ is computed from what was released, so it costs nothing more.

    Deviations from the paper: none without privacy. Source: Karimireddy et al. 2020, Algorithm 1.
    """

    name = "scaffold"
    line = "FedAvg with control variates (SCAFFOLD); twice the traffic; topology server"

    class Section(LocalStepsSection):
        """SCAFFOLD: several local steps, corrected by control variates."""

        no_optimizer = "computes its control variates from its steps, which must be plain"

    needs = ("topology.name=server",)
    slots = 5
    noise_follows_rate = False  # control variates carry gradients, whatever the rate
    open_rows = ("x", "w", "change")
    released = one_sum

    def __init__(self, section: LocalStepsSection) -> None:
        super().__init__(section)
        self.program = (self.local, Mix(("x", "w", "change")), self.learn)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return FedAvg's rows and zero control variates."""
        rows = super().initial(cohort)
        return rows | {name: torch.zeros_like(rows["x"]) for name in ("control", "common", "change")}

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Refuse any graph but the server's: c is one vector that all peers agree on."""
        if topology.name != "server":
            raise ScenarioError(
                f"algorithm.name=scaffold on topology {topology.name} must be on topology server: c is common to all",
                code="mixing.no-server",
            )
        return super().exchange(topology, weights, participation, seed)

    def walk(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Tensor:
        """Walk, then renew the control variates of the active rows."""
        y = super().walk(cohort, state, rows, start)
        where = torch.as_tensor(rows, device=cohort.device)
        length = self.steps_per_round * FedProx.rate(cohort, state, rows)
        change = (start - y) / length - state.rows["common"][where]
        state.rows["change"][where] = change
        state.rows["control"][where] += change
        return y

    def pull(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Pull | None:
        """Return the way to y - η (c - c_i), whose control variates stay as they are during a walk."""
        where = torch.as_tensor(rows, device=cohort.device)
        shift = empty_rows(start, *start.shape)
        torch.add(state.rows["common"][where], state.rows["control"][where], alpha=-1, out=shift)
        shift.mul_(FedProx.rate(cohort, state, rows))
        return lambda y, ahead: torch.add(y, shift, alpha=-1, out=ahead)

    def learn(self, cohort: Cohort, state: State) -> None:
        """Add the share of the active peers' mean change to c; `change` was averaged over them.

        It is then 0 for the next round: a peer whose budget is spent takes no step, but still counts as active.
        """
        share = float(cohort.participation.active(state.round_index).mean())
        state.rows["common"].add_(state.rows["change"], alpha=share)
        state.rows["change"].zero_()
