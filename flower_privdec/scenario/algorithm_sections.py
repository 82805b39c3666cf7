"""The `algorithm` section: one form for each family of algorithms, told apart by the name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flower_privdec.scenario.fields import Count, NonNegative, PerPeer, Section

Growth = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class GradientSection(Section):
    """What all algorithms that descend along gradients share.

    Attributes:
        name: which algorithm.
        learning_rate: γ, of all peers or of each.
        learning_rate_decay: the share of the rounds, at the end, over which the learning rate falls linearly to 0.
    """

    learning_rate: PerPeer
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.0


class SGDSection(GradientSection):
    """Stochastic gradient steps."""

    name: Literal["sgp", "privsgp", "d-psgd", "dp2-sgd", "dp-sgd", "local"]


class VRSection(GradientSection):
    """PrivSGP-VR: which memory of gradients reduces the variance.

    Attributes:
        table: `factored` keeps every example's gradient by its layers' factors, for stacks of linear layers; `dense`
            keeps the gradients themselves, for any model; `blocks` one for each fixed batch, with
            data.batch.sampling: blocks; `snapshot` an earlier model and its full gradient (SVRG).
        snapshot_every: after how many rounds a snapshot is taken anew; for table snapshot alone.
    """

    name: Literal["privsgp-vr"]
    table: Literal["factored", "blocks", "snapshot", "dense"] = "factored"
    snapshot_every: Count = 100


class DynD2PSection(GradientSection):
    """Dyn-D2P: a decaying clip norm and a growing per-step budget.

    Attributes:
        initial_clip: C_0, the clip norm at the start; left out, it is privacy.clip_norm.
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
    """

    name: Literal["dyn-d2p"]
    initial_clip: PerPeer | None = None
    rho_c: Growth = 2.0
    rho_mu: Growth = 2.0


class DynCSection(GradientSection):
    """Dyn[C]-D2P: a decaying clip norm, a constant per-step budget.

    Attributes:
        initial_clip: C_0, the clip norm at the start; left out, it is privacy.clip_norm.
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
    """

    name: Literal["dyn-c-d2p"]
    initial_clip: PerPeer | None = None
    rho_c: Growth = 2.0


class DynMuSection(GradientSection):
    """Dyn[μ]-D2P: a constant clip norm, a growing per-step budget.

    Attributes:
        clip_norm: C; left out, it is privacy.clip_norm.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
    """

    name: Literal["dyn-mu-d2p"]
    clip_norm: PerPeer | None = None
    rho_mu: Growth = 2.0


class ConstSection(GradientSection):
    """Const-D2P: a constant clip norm and per-step budget.

    Attributes:
        clip_norm: C; left out, it is privacy.clip_norm.
    """

    name: Literal["const-d2p"]
    clip_norm: PerPeer | None = None


class AsynchronousSection(GradientSection):
    """A(DP)²SGD: one peer wakes at a time and uses a gradient of a stale model.

    Attributes:
        staleness: the most events since the model was read; left out, it is 4 n_peers.
    """

    name: Literal["adp2-sgd"]
    staleness: Count | None = None


class LocalStepsSection(GradientSection):
    """Several local steps between two exchanges.

    Attributes:
        local_steps: τ, how many in a round.
    """

    name: Literal["scaffold"]
    local_steps: Count = 10


class FedAvgSection(GradientSection):
    """FedAvg: several local steps, then an average.

    Attributes:
        local_steps: τ, how many in a round.
        weighting: a peer counts by its number of examples, as in the paper, or all count alike.
    """

    name: Literal["fedavg"]
    local_steps: Count = 10
    weighting: Literal["examples", "uniform"] = "examples"


class FedProxSection(GradientSection):
    """FedAvg with a proximal term.

    Attributes:
        local_steps: τ, how many in a round.
        proximal: μ, by which half the squared distance to the round's first model is added to the loss.
        weighting: a peer counts by its number of examples, as in the paper, or all count alike.
    """

    name: Literal["fedprox"]
    local_steps: Count = 10
    proximal: NonNegative = 0.01
    weighting: Literal["examples", "uniform"] = "examples"


class FedDeperSection(GradientSection):
    """FedDeper: a depersonalized and a personalized model at every peer.

    Attributes:
        local_steps: τ, how many in a round; feddeper* takes half of them.
        rho: ρ, the strength of the penalty that pulls the model that is sent away from the personalized one.
        mixing_rate: λ, the share of the model that is sent in the personalized one at the end of a round; at least
            1/2, unless any_mixing_rate is true.
        any_mixing_rate: whether to allow a mixing rate below 1/2, of which the paper proves nothing.
    """

    name: Literal["feddeper", "feddeper*"]
    local_steps: Count = 10
    rho: Annotated[float, Field(ge=0, lt=1)] = 0.003
    mixing_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    any_mixing_rate: bool = False

    @model_validator(mode="after")
    def _mixing_rate_of_the_paper(self) -> FedDeperSection:
        if self.mixing_rate < 0.5 and not self.any_mixing_rate:
            raise ValueError(
                f"mixing_rate={self.mixing_rate} must be in [1/2, 1], for which FedDeper is analysed; "
                "set any_mixing_rate: true to try another"
            )
        return self


DynSection = DynD2PSection | DynCSection | DynMuSection | ConstSection
AlgorithmSection = Annotated[
    SGDSection
    | VRSection
    | DynD2PSection
    | DynCSection
    | DynMuSection
    | ConstSection
    | AsynchronousSection
    | LocalStepsSection
    | FedAvgSection
    | FedProxSection
    | FedDeperSection,
    Field(discriminator="name"),
]


def dynamic(section: GradientSection) -> tuple[PerPeer | None, float, float] | None:
    """Return (clip norm or None, ρ_c, ρ_μ) of the Dyn-D2P family, or None for another."""
    if not isinstance(section, DynSection):
        return None
    clip = getattr(section, "initial_clip", None) or getattr(section, "clip_norm", None)
    return clip, getattr(section, "rho_c", 1.0), getattr(section, "rho_mu", 1.0)


def steps_per_round(section: GradientSection) -> int:
    """Return how many private steps an active peer takes in a round: τ, half of it for feddeper*, else 1."""
    steps: int = getattr(section, "local_steps", 1)
    return max(1, steps // 2) if getattr(section, "name", "") == "feddeper*" else steps
