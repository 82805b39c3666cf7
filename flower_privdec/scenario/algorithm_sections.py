"""The `algorithm` section: one form for each family of algorithms, told apart by the name, and users' own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, SerializeAsAny, Tag, WrapValidator, model_validator

from flower_privdec.catalogue import ALGORITHMS, DUAL, DUAL_SCHEDULES, GRADIENT_TABLES, REGULARIZERS, Choice
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import find_given, is_given, load_own, without_tokens
from flower_privdec.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.scenario.fields import OWN_OR_NAMED, Count, NonNegative, PerPeer, Positive, Section

LocalSteps = Annotated[int, Field(ge=1, le=1_000_000)]
Growth = Annotated[float, Field(ge=1, allow_inf_nan=False)]


def dynamic(section: AlgorithmSection) -> tuple[PerPeer | None, float, float] | None:
    """Return (clip norm or None, ρ_c, ρ_μ) of the Dyn-D2P family, or None for another."""
    if not isinstance(section, DynSection):
        return None
    clip = getattr(section, "initial_clip", None) or getattr(section, "clip_norm", None)
    return clip, getattr(section, "rho_c", 1.0), getattr(section, "rho_mu", 1.0)


def steps_per_round(section: AlgorithmSection) -> int:
    """Return how many private steps an active peer takes in a round: τ, half of it for feddeper*, else 1."""
    steps: int = getattr(section, "local_steps", 1)
    return max(1, steps // 2) if section.name == "feddeper*" else steps


Finite = Annotated[float, Field(allow_inf_nan=False)]
REGULARIZER_KEYS = {
    "none": (),
    "l2": ("weight",),
    "l1": ("weight",),
    "elastic-net": ("weight", "l1_weight"),
    "box": ("lower", "upper"),
    "ball": ("radius",),
}


class RegularizerSection(Section):
    """h, which is added to the mean loss; it weighs every parameter, the bias too.

    Attributes:
        kind: none; l2, μ‖x‖²/2; l1, φ‖x‖_1; elastic-net, both; box and ball confine the parameters.
        weight: μ of l2 and elastic-net, φ of l1.
        l1_weight: φ of elastic-net.
        lower: of box.
        upper: of box.
        radius: of ball.
    """

    kind: Annotated[str, REGULARIZERS]
    weight: Positive | None = None
    l1_weight: Positive | None = None
    lower: Finite | None = None
    upper: Finite | None = None
    radius: Positive | None = None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> RegularizerSection:
        required = REGULARIZER_KEYS[self.kind]
        for key in ("weight", "l1_weight", "lower", "upper", "radius"):
            is_set = getattr(self, key) is not None
            if is_set and key not in required:
                raise ValueError(f"{key} is no key of kind {self.kind}: remove it")
            if not is_set and key in required:
                raise ValueError(f"kind {self.kind} needs {key}: add it")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower:g} must be <= upper={self.upper:g}")
        return self

    @property
    def strongly_convex(self) -> bool:
        """Whether h is strongly convex."""
        return self.kind in ("l2", "elastic-net")


class DualAveragingSection(Section):
    """Dual averaging of a convex loss and a regularizer. It has no learning rate.

    `loss`, written here, is task.loss: where both are given they must be the same, and `privdec show` has it in task.

    Attributes:
        name: which algorithm.
        regularizer: h, which is added to the loss.
        schedule: strongly-convex weighs round t by a_t = t, and γ_t is gamma, for a strongly convex regularizer;
            convex weighs all rounds alike, and γ_t is gamma sqrt(t).
        gamma: γ, by which half the squared norm of the model holds it back; 0, the value of the theory, for the
            strongly convex schedule alone.
    """

    name: Annotated[str, DUAL]
    regularizer: RegularizerSection = RegularizerSection(kind="l2", weight=0.0005)
    schedule: Annotated[str, DUAL_SCHEDULES] = "strongly-convex"
    gamma: NonNegative = 20.0

    @model_validator(mode="after")
    def _schedule_of_the_regularizer(self) -> DualAveragingSection:
        if self.schedule == "strongly-convex" and not self.regularizer.strongly_convex:
            raise ValueError(
                f"schedule strongly-convex must have a strongly convex regularizer, and {self.regularizer.kind} is "
                "none: use l2 or elastic-net, or schedule convex"
            )
        if self.schedule == "convex" and not self.gamma > 0:
            raise ValueError("gamma=0.0 must be > 0 for schedule convex, whose steps nothing else bounds")
        return self


class DescentSection(Section):
    """What all algorithms that descend along gradients share.

    Attributes:
        learning_rate: γ, of all peers or of each.
        learning_rate_decay: the share of the rounds, at the end, over which the learning rate falls linearly to 0.
    """

    learning_rate: PerPeer
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.0


class OwnAlgorithmSection(DescentSection):
    """The section of an algorithm of a user's own, whose class names a subclass with its own keys as `Section`.

    Attributes:
        module: where the class lies, `package.module:name`.
    """

    module: str

    @property
    def name(self) -> str:
        """Return what the algorithm is called: where it lies."""
        return without_tokens(self.module)


class AbsentAlgorithmSection(OwnAlgorithmSection):
    """The section of an algorithm that was given as a Python object in another process: its keys are not known."""

    model_config = ConfigDict(extra="allow")


def own_section(module: object) -> type[OwnAlgorithmSection]:
    """Return the form of the section of a user's algorithm.

    Raises:
        ScenarioError: the class cannot be had, or is no algorithm.
    """
    if not isinstance(module, str):
        raise ScenarioError(f"algorithm.module={module!r} must be 'package.module:name'")
    if is_given(module) and find_given(module) is None:
        return AbsentAlgorithmSection
    own: Any = load_own(
        module,
        "algorithm.module",
        accepts=lambda part: isinstance(part, type) and hasattr(part, "Section"),
        must_be="a subclass of flower_privdec.algorithms.Algorithm",
    )
    section: Any = own.Section
    if not (isinstance(section, type) and issubclass(section, OwnAlgorithmSection)):
        raise ScenarioError(
            f"algorithm.module={module!r}: Section must be a subclass of flower_privdec.scenario.OwnAlgorithmSection"
        )
    return section


def by_its_own_form(value: Any, _: object) -> OwnAlgorithmSection:
    """Read a section by the form that the user's own class gives it, in place of the plain one."""
    if isinstance(value, OwnAlgorithmSection):
        return value
    try:
        return own_section(value["module"]).model_validate(value)
    except ValueError:  # pydantic's findings are, too
        raise
    except ScenarioError as error:
        raise ValueError(str(error)) from error
    except RAISED_BY_USERS as error:  # a user's own validator may raise anything
        raise ValueError(f"algorithm.module={value['module']!r}: its Section raised {one_line(error)}") from error


class GradientSection(DescentSection):
    """The section of an algorithm by name.

    Attributes:
        name: which algorithm.
    """

    name: str


class SGDSection(GradientSection):
    """Stochastic gradient steps."""

    name: Annotated[str, ALGORITHMS.some("sgp", "privsgp", "d-psgd", "dp2-sgd", "dp-dpsgd", "dp-sgd", "local")]


class VRSection(GradientSection):
    """PrivSGP-VR: which memory of gradients reduces the variance.

    Attributes:
        table: `factored` keeps every example's gradient by its layers' factors, for stacks of linear layers; `dense`
            keeps the gradients themselves, for any model; `blocks` one for each fixed batch, with
            data.batch.sampling: blocks; `snapshot` an earlier model and its full gradient (SVRG).
        snapshot_every: the number of rounds between two snapshots; for table snapshot only.
    """

    name: Annotated[str, ALGORITHMS.some("privsgp-vr")]
    table: Annotated[str, GRADIENT_TABLES] = "factored"
    snapshot_every: Count = 100


class DynD2PSection(GradientSection):
    """Dyn-D2P: a decaying clip norm and a growing per-step budget.

    Attributes:
        initial_clip: C_0, the clip norm at the start; left out, it is privacy.clip_norm.
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
    """

    name: Annotated[str, ALGORITHMS.some("dyn-d2p")]
    initial_clip: PerPeer | None = None
    rho_c: Growth = 2.0
    rho_mu: Growth = 2.0


class DynCSection(GradientSection):
    """Dyn[C]-D2P: a decaying clip norm, a constant per-step budget.

    Attributes:
        initial_clip: C_0, the clip norm at the start; left out, it is privacy.clip_norm.
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
    """

    name: Annotated[str, ALGORITHMS.some("dyn-c-d2p")]
    initial_clip: PerPeer | None = None
    rho_c: Growth = 2.0


class DynMuSection(GradientSection):
    """Dyn[μ]-D2P: a constant clip norm, a growing per-step budget.

    Attributes:
        clip_norm: C; left out, it is privacy.clip_norm.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
    """

    name: Annotated[str, ALGORITHMS.some("dyn-mu-d2p")]
    clip_norm: PerPeer | None = None
    rho_mu: Growth = 2.0


class ConstSection(GradientSection):
    """Const-D2P: a constant clip norm and per-step budget.

    Attributes:
        clip_norm: C; left out, it is privacy.clip_norm.
    """

    name: Annotated[str, ALGORITHMS.some("const-d2p")]
    clip_norm: PerPeer | None = None


class AsynchronousSection(GradientSection):
    """A(DP)²SGD: one peer wakes at a time and uses a gradient of a stale model.

    Attributes:
        staleness: the most events since the model was read; left out, it is 4 n_peers.
    """

    name: Annotated[str, ALGORITHMS.some("adp2-sgd")]
    staleness: Count | None = None


class MuffliatoSection(GradientSection):
    """Muffliato: several gossip steps after each gradient step.

    Attributes:
        gossip_steps: how many in a round.
        acceleration: none is plain gossip; chebyshev agrees sooner, on an undirected graph that stays the same with
            everybody active.
    """

    name: Annotated[str, ALGORITHMS.some("muffliato")]
    gossip_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    acceleration: Literal["none", "chebyshev"] = "none"


class NetFleetSection(GradientSection):
    """NET-FLEET: local steps along a tracked gradient.

    Attributes:
        local_steps: τ, how many in a round.
    """

    name: Annotated[str, ALGORITHMS.some("dp-net-fleet")]
    local_steps: LocalSteps = 5


class LocalStepsSection(GradientSection):
    """Several local steps between two exchanges.

    Attributes:
        local_steps: τ, how many in a round.
    """

    name: Annotated[str, ALGORITHMS.some("scaffold")]
    local_steps: LocalSteps = 10


class FedAvgSection(GradientSection):
    """FedAvg: several local steps, then an average.

    Attributes:
        local_steps: τ, how many in a round.
        weighting: a peer counts by its number of examples, as in the paper, or all count alike.
    """

    name: Annotated[str, ALGORITHMS.some("fedavg")]
    local_steps: LocalSteps = 10
    weighting: Literal["examples", "uniform"] = "examples"


class FedProxSection(GradientSection):
    """FedAvg with a proximal term.

    Attributes:
        local_steps: τ, how many in a round.
        proximal: μ, by which half the squared distance to the round's first model is added to the loss.
        weighting: a peer counts by its number of examples, as in the paper, or all count alike.
    """

    name: Annotated[str, ALGORITHMS.some("fedprox")]
    local_steps: LocalSteps = 10
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

    name: Annotated[str, ALGORITHMS.some("feddeper", "feddeper*")]
    local_steps: LocalSteps = 10
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


class CrossGradientSection(GradientSection):
    """Cross-gradients projected into one direction.

    Attributes:
        momentum: β, the share of the last round's step in this one's.
    """

    name: Annotated[str, ALGORITHMS.some("dp-cga")]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5


class PDSLSection(GradientSection):
    """PDSL: cross-gradients weighted by what each neighbour's adds to the accuracy on data.validation.

    Attributes:
        momentum: α, the share of the last round's mixed momentum in this one's.
        shapley: `exact` tries every coalition of a neighbourhood, of 12 peers at most; `monte-carlo` those that come
            up in random permutations.
        permutations: R, of each peer in each round; for monte-carlo alone, which needs it.
        truncation: a permutation ends once its accuracy is within this of that of the whole neighbourhood; for
            monte-carlo alone; left out, none ends.
        validation_subsample: how many examples of data.validation to try coalitions on, drawn again in each round; left
            out, all.
    """

    name: Annotated[str, ALGORITHMS.some("pdsl")]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    shapley: Literal["exact", "monte-carlo"] = "exact"
    permutations: Count | None = None
    truncation: Annotated[float, Field(ge=0, le=1)] | None = None
    validation_subsample: Count | None = None

    @model_validator(mode="after")
    def _options_of_monte_carlo(self) -> PDSLSection:
        if self.shapley == "monte-carlo" and self.permutations is None:
            raise ValueError("shapley monte-carlo needs permutations, how many to draw: add it")
        for key in ("permutations", "truncation"):
            if self.shapley == "exact" and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to shapley monte-carlo, not to exact: remove it")
        return self


DynSection = DynD2PSection | DynCSection | DynMuSection | ConstSection
NamedSection = Annotated[
    SGDSection
    | VRSection
    | DynD2PSection
    | DynCSection
    | DynMuSection
    | ConstSection
    | AsynchronousSection
    | MuffliatoSection
    | LocalStepsSection
    | FedAvgSection
    | FedProxSection
    | FedDeperSection
    | NetFleetSection
    | CrossGradientSection
    | PDSLSection
    | DualAveragingSection,
    Field(discriminator="name"),
]


def algorithm_options(name: str) -> dict[str, Any]:
    """Return the keys that an algorithm has beside those of all, with their defaults; None of what others decide."""
    for form in get_args(get_args(NamedSection)[0]):
        if name in next(part for part in form.model_fields["name"].metadata if isinstance(part, Choice)):
            own = {key: field for key, field in form.model_fields.items() if key not in GradientSection.model_fields}
            return {key: _plain(field.get_default()) for key, field in own.items()}
    raise KeyError(name)


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, Section) else value


AlgorithmSection = Annotated[
    Annotated[NamedSection, Tag("named")]
    | Annotated[SerializeAsAny[OwnAlgorithmSection], WrapValidator(by_its_own_form), Tag("own")],
    OWN_OR_NAMED,
]
