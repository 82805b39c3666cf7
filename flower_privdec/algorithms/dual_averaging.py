"""DP-DDA: dual averaging of convex losses over the peers that are active, who are few in each round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from flower_privdec.algorithms.proximal import Regularizer, RegularizerSection, build_regularizer
from flower_privdec.common.catalogue import Choice
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import NonNegative
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort, LearningRate
from flower_privdec.core.exchange import Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.rows.tensors import empty_rows
from flower_privdec.scenario.algorithm_sections import AlgorithmSection

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.gradients import GradientKernel


FEW = 0.25  # of the peers: then most rows of a round's weights are the identity's, and nothing is copied for them
TOGETHER = 1 << 20  # numbers of so many rows at once are stepped, which bounds what a step takes beside the state


DUAL_SCHEDULES = Choice(
    {
        "strongly-convex": "a_t = t and γ_t = `gamma`; with an l2 or elastic-net regularizer",
        "convex": "a_t = 1 and γ_t = `gamma` sqrt(t)",
    }
)


class DualAveragingSection(AlgorithmSection):
    """Dual averaging of a convex loss and a regularizer. It has no learning rate.

    `loss`, written here, is task.loss: where both are given they must be the same, and `privdec show` has it in task.

    Attributes:
        regularizer: h, which is added to the loss.
        schedule: the weight a_t of round t, and γ_t:
        gamma: γ, by which half the squared norm of the model holds it back; 0, the value of the theory, for the
            strongly convex schedule alone.
    """

    regularizer: RegularizerSection = RegularizerSection(kind="l2", weight=0.0005)
    schedule: Annotated[str, DUAL_SCHEDULES] = "strongly-convex"
    gamma: NonNegative = 20.0

    @model_validator(mode="before")
    @classmethod
    def _no_optimizer(cls, data: Any) -> Any:
        if isinstance(data, dict) and "optimizer" in data:
            raise ArgumentError(
                "optimizer must be left out: dual averaging sums its gradients and takes no step along them",
                code="algorithm.optimizer",
            )
        if isinstance(data, dict) and "average" in data:
            raise ArgumentError(
                "average must be left out: the models of dual averaging are running averages already",
                code="algorithm.average",
            )
        return data

    @property
    def own_start(self) -> bool:
        """Whether it begins with parameters of its own: with the step from z = 0."""
        return True

    def _check(self) -> None:
        if self.schedule == "strongly-convex" and not self.regularizer.strongly_convex:
            raise ArgumentError(
                f"schedule strongly-convex must have a strongly convex regularizer, and {self.regularizer.kind} is "
                "none: use l2 or elastic-net, or schedule convex",
                code="regularizer.not-strongly-convex",
            )
        if self.schedule == "convex" and not self.gamma > 0:
            raise ArgumentError(
                "gamma=0.0 must be > 0 for schedule convex, whose steps nothing else bounds",
                code="regularizer.not-strongly-convex",
            )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, with the key that `in_scenario` takes for another section."""
        reference = super().__get_pydantic_json_schema__(core, handler)
        properties = handler.resolve_ref_schema(reference)["properties"]
        properties["loss"] = {"type": "string", "description": "another way to write task.loss"}
        return reference

    @classmethod
    def in_scenario(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Take the loss that a section of dual averaging names for the task's."""
        algorithm = data["algorithm"]
        if "loss" not in algorithm:
            return data

        loss = algorithm["loss"]
        task = data.get("task") or {}
        if not isinstance(task, dict) or task.get("loss", loss) != loss:
            raise ArgumentError(
                f"algorithm.loss={loss!r} is another way to write task.loss, which differs: give one",
                code="task.loss-twice",
            )
        rest = {key: value for key, value in algorithm.items() if key != "loss"}
        return {**data, "algorithm": rest, "task": {**task, "loss": loss}}


@dataclass(frozen=True)
class DualSchedule:
    """a_t and γ_t of round t >= 1; A_t is a_1 + ... + a_t.

    Source: Liu et al. (2024), Corollaries 3.2 (strongly convex) and 3.4 (convex).
    """

    strongly_convex: bool
    gamma: float

    def weight(self, t: int) -> float:
        """Return a_t."""
        return float(t) if self.strongly_convex else 1.0

    def total(self, t: int) -> float:
        """Return A_t."""
        return t * (t + 1) / 2 if self.strongly_convex else float(t)

    def pull(self, t: int) -> float:
        """Return γ_t."""
        return self.gamma if self.strongly_convex else self.gamma * math.sqrt(t)


class DPDDA(Algorithm):
    """Add up weighted subgradients, mix the sums among the active peers, and step from 0 along them.

    In round t = 1, 2, ... at each active peer i, with W^(t) over the active peers and the identity for the others,

        ζ_i = g̃_i(x_i^(t)),   z_i ← Σ_j w_ij^(t) (z_j + a_t ζ_j)
        x_i^(t+1) = argmin_x <z_i, x> + ι A_{t+1} h(x) + γ_{t+1} ‖x‖² / 2

    An inactive peer keeps z_i and x_i. A peer's model is its running average x̃_i = Σ_t a_t x_i^(t) / A_t, kept by
    x̃ ← x̃ + (a_t / A_t) (x^(t) - x̃), whose numbers never grow as A_t does. ι is a peer's chance to be active in a round,
    the mean over the peers. The state holds -z, to which steps are added as everywhere else.

    x_i^(1) is the step from z = 0: the point of the box that is nearest to 0, and 0 for the other regularizers,
    whatever `model.init` says. The loss must be convex in the parameters, which a single linear layer ensures.

    Privacy: a message is z_i + a_t ζ_i, in which ζ_i is clipped per example and noised before a_t multiplies it (one
    release a round in which the peer is active). Who is active can be seen, so it amplifies nothing: a peer pays for
    the rounds in which it is active. z, x and x̃ are functions of what was released.

    Deviations from the paper: gradients are clipped example by example, where the paper has a Lipschitz constant;
    the noised sum over a batch is divided by the expected batch size; ι counts a peer once where two of the sampled
    edges share it (0.19 for 2 edges among 20 peers, where the paper says 0.2).

    Source: Liu, Johansson and Shi (2024), Algorithm 1, with eqs. 5 and 6.
    """

    name = "dp-dda"
    line = "dual averaging of convex losses over the active peers (DP-DDA, Alg. 1)"

    Section = DualAveragingSection

    needs = ("topology.name=ring",)
    variants = (
        (
            "algorithm.schedule=convex",
            "algorithm.gamma=0.5",
            "algorithm.regularizer={kind: l1, weight: 0.01}",
        ),
        ("participation={kind: edges, count: 1}",),
    )
    weights = "doubly-stochastic"
    slots = 3
    open_rows = ("x", "dual", "average")
    steadied_by = ("regularizer", "schedule")
    paper_noise = "subsampling"
    released = one_sum

    def __init__(self, section: DualAveragingSection) -> None:
        super().__init__(section)
        self.regularizer: Regularizer = build_regularizer(section.regularizer)
        self.schedule = DualSchedule(section.schedule == "strongly-convex", section.gamma)
        self.program = (self.average, self.subgradient, Mix(("dual",)), self.step)

    def step_sizes(self, n_peers: int, rounds: int) -> LearningRate:
        """Return a_t, which takes the place of a learning rate."""
        return LearningRate(np.ones(n_peers), 0.0, rounds, growing=self.schedule.strongly_convex)

    def check_model(self, kernel: GradientKernel) -> None:
        """Refuse what is not a single linear layer: convex in its parameters, and not stuck at 0."""
        from flower_privdec.gradients import SparseLinearKernel, StackedKernel

        if not isinstance(kernel, StackedKernel | SparseLinearKernel) or len(kernel.layers) != 1:
            raise ScenarioError(
                f"algorithm.name={self.name} must have a model that is one linear layer: dual averaging is of convex "
                "losses and starts at 0; use model linear (or softmax), or for texts an algorithm such as privsgp",
                code="model.not-linear",
            )

    def buffers(self, participation: Participation) -> int:
        """Return only the state's buffers if few peers are active: their rows are mixed and stepped in place."""
        if participation.chances.mean() <= FEW:
            return self.slots
        return super().buffers(participation)

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return z = 0, x^(1), and room for the average."""
        scale = float(cohort.participation.chances.mean()) * self.schedule.total(1)
        first = self.regularizer.minimizer(torch.zeros_like(cohort.initial)[None], scale, self.schedule.pull(1))
        m = len(cohort.peers)
        d = len(cohort.initial)
        x, dual, average = (empty_rows(cohort.initial, m, d) for _ in range(3))  # aligned: no kernel copies them
        return {"x": x.copy_(first.expand(m, -1)), "dual": dual.zero_(), "average": average.copy_(x)}

    def average(self, cohort: Cohort, state: State) -> None:
        """Take x^(t) into the running average, of peers that are not active too."""
        t = state.round_index + 1
        state.rows["average"].lerp_(state.rows["x"], self.schedule.weight(t) / self.schedule.total(t))

    def subgradient(self, cohort: Cohort, state: State) -> None:
        """Add -a_t ζ to -z of the active rows."""
        cohort.add_step_(state.rows["dual"], state.rows["x"], state.round_index)

    def step(self, cohort: Cohort, state: State) -> None:
        """Step from 0 along the mixed sums, at the peers that took part."""
        t = state.round_index + 2
        scale = float(cohort.participation.chances.mean()) * self.schedule.total(t)
        pull = self.schedule.pull(t)
        rows = np.flatnonzero(cohort.participation.active(state.round_index)[cohort.peers])
        x = state.rows["x"]
        dual = state.rows["dual"]

        # Everybody's rows are slices of the state, in which the step is taken; some peers' have to be gathered.
        at_once = max(1, TOGETHER // len(cohort.initial))
        for start in range(0, len(rows), at_once):
            stop = start + at_once
            if len(rows) == len(x):
                self.regularizer.step_from_(x[start:stop].copy_(dual[start:stop]), scale, pull)
            else:
                chosen = torch.as_tensor(rows[start:stop], device=cohort.device)
                x[chosen] = self.regularizer.step_from_(dual[chosen], scale, pull)

    @property
    def final_exchange(self) -> Mix:
        """Return the mixing of the running averages, which are the models."""
        return Mix(("average",))

    def debiased(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the running averages x̃, [m, d]."""
        return rows["average"]

    def network_mean(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the running averages, [d]."""
        return rows["average"].mean(0)


class DDA(DPDDA):
    """Dual averaging with everybody active, ι = 1: the baseline of DP-DDA.

    Source: Duchi et al. 2012 and Liu et al. 2022, in the form of Liu et al. (2024), Algorithm 1.
    """

    name = "dda"
    line = "dual averaging with everybody active: the baseline of dp-dda"

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Return the mixing and that everybody is active."""
        if participation.kind != "all":
            raise ScenarioError(
                f"participation.kind={participation.kind} must be all for dda; use dp-dda, of which it is the baseline",
                code="participation.kind",
            )
        return super().exchange(topology, weights, participation, seed)

    released = one_sum
