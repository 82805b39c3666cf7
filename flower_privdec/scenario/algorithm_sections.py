"""What the sections of all algorithms share, and how a scenario finds the section of the one it names.

Each algorithm declares its own keys in a class `Section` inside it (`flower_privdec.algorithms`). Rooms below the
algorithms ask a section what they have to know, and know none by name:

    steps_per_round     how many private steps an active peer takes in a round
    own_schedule        the clip norms and noise that the algorithm itself changes over the rounds
    sampled_blocks      whether it draws whole blocks of examples
    own_start           whether it begins with other parameters than the model's
    unused_keys         which of its keys have no effect beside others of them
    in_scenario         takes keys of the plain scenario that are written in the algorithm's section
    check_scenario      refuses a scenario that the algorithm cannot be part of
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import ConfigDict, Field

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import Fraction, PerPeer, Positive, Section
from flower_privdec.common.registry import OwnPart, PartField, RegisteredPart, Registry, own_form
from flower_privdec.common.user_code import find_given, is_given, load_own

if TYPE_CHECKING:
    from flower_privdec.scenario.sections import Scenario


class OwnSchedule(NamedTuple):
    """Clip norms and noise that an algorithm changes over the rounds by itself, in place of privacy.schedule.

    Attributes:
        clip_norm: C_0, at the start; None if it is privacy.clip_norm.
        rho_c: by how much the clip norm has fallen at the end.
        rho_mu: by how much a step's budget has grown at the end.
    """

    clip_norm: PerPeer | None
    rho_c: float
    rho_mu: float


class AlgorithmSection(Section):
    """What every algorithm's section answers to the rest of the package."""

    paper_constants: ClassVar[tuple[str, ...]] = ()  # keys of privacy.paper that its formula for the noise needs

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """What the scenario calls the algorithm."""

    @property
    def steps_per_round(self) -> int:
        """How many private steps an active peer takes in a round: `local_steps`, if the algorithm has that key."""
        steps: int = getattr(self, "local_steps", 1)
        return steps

    @property
    def own_schedule(self) -> OwnSchedule | None:
        """The clip norms and noise that the algorithm itself schedules; None if privacy.schedule may."""
        return None

    @property
    def sampled_blocks(self) -> bool:
        """Whether the algorithm draws whole blocks of examples, by data.batch.sampling: blocks."""
        return False

    @property
    def own_start(self) -> bool:
        """Whether the algorithm begins with parameters of its own, whatever the model's are."""
        return False

    def unused_keys(self) -> Iterator[tuple[str, str, str]]:
        """Yield each key of the section that has no effect beside others of it, the reason, and what to choose."""
        yield from ()

    @classmethod
    def in_scenario(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return a scenario's plain data with keys moved to other sections that this one lets users write in it."""
        return data

    def check_scenario(self, scenario: Scenario) -> None:
        """Raise ArgumentError, which begins with the key it blames, if the algorithm cannot be part of a scenario."""


class OptimizerSection(Section):
    """What a peer makes of its noised gradient before it takes a step; it costs no ε.

    Attributes:
        name: `sgd` takes the gradient itself; `momentum` adds to it a share of the last direction; `adam` divides its
            running mean by the root of that of its square.
        momentum: the share, of momentum.
        beta1: of adam, the share of the last mean in the new one.
        beta2: of adam, the share of the last mean of squares in the new one.
        eps: of adam, what is added to the root.
    """

    name: Literal["sgd", "momentum", "adam"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8

    def _check(self) -> None:
        for key, name in {"momentum": "momentum", "beta1": "adam", "beta2": "adam", "eps": "adam"}.items():
            if key not in self.model_fields_set or name == self.name:
                continue

            # A file that has every default visible, as `privdec show` prints it, reads back.
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ArgumentError(
                    f"{key} belongs to optimizer {name}, not to {self.name}: remove it", code="optimizer.key"
                )


class AverageSection(Section):
    """Averaged iterates, which are evaluated and handed out in the place of the last ones; they cost no ε.

    Attributes:
        kind: `ema`, an exponential moving average over the rounds.
        decay: the share of the last average in the new one; in round k = 0, 1, ... at most k / (k + 1).
    """

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95


class DescentSection(AlgorithmSection):
    """Keys of all algorithms that descend along gradients.

    Attributes:
        learning_rate: γ, one for all peers or one a peer.
        learning_rate_decay: the share of the rounds, at the end, over which the learning rate falls to 0.
        learning_rate_schedule: how it falls: linear, which it is left out, or cosine, half a wave; cosine over all
            rounds if learning_rate_decay is 0.
        learning_rate_warmup: the share of the rounds, at the beginning, over which the rate rises linearly to γ.
        optimizer: what each peer makes of its noised gradient; left out, the step is γ times the gradient.
        average: what is evaluated and handed out is each peer's average over the rounds; left out, its last model.
    """

    learning_rate: PerPeer
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    learning_rate_schedule: Literal["linear", "cosine"] | None = None
    learning_rate_warmup: Fraction | None = None
    optimizer: OptimizerSection | None = None
    average: AverageSection | None = None

    def unused_keys(self) -> Iterator[tuple[str, str, str]]:
        """Yield how the rate falls, if it does not."""
        yield from super().unused_keys()
        if self.learning_rate_schedule == "linear" and self.learning_rate_decay == 0:
            yield "learning_rate_schedule", "algorithm.learning_rate_decay=0", "set over which share of the rounds"

    no_optimizer: ClassVar[str] = ""  # why the algorithm takes only plain steps

    def _check(self) -> None:
        if self.optimizer is not None and self.no_optimizer:
            raise ArgumentError(
                f"optimizer must be left out: {getattr(self, 'name', 'it')} {self.no_optimizer}; take privsgp, d-psgd, "
                "fedavg, local or another that takes steps along gradients alone",
                code="algorithm.optimizer",
            )


class AbsentAlgorithmSection(DescentSection):
    """The section of an algorithm that is a Python object of another process: its keys are unknown here."""

    model_config = ConfigDict(extra="allow")


class AlgorithmPart(RegisteredPart, Protocol):
    """An algorithm's class, as far as a scenario looks at it.

    Attributes:
        Section: declares its keys.
        weights: the mixing weights that its theory needs; None if it exchanges nothing.
    """

    Section: ClassVar[type[Any]]
    weights: ClassVar[Literal["column-stochastic", "doubly-stochastic"] | None]


ALGORITHMS: Registry[AlgorithmPart] = Registry("algorithm.name", "flower_privdec.algorithms", DescentSection)


def own_algorithm(module: object) -> type[AlgorithmPart] | None:
    """Return a user's algorithm; None if it is a Python object of another process.

    Raises:
        ScenarioError: the class cannot be imported, or is not an algorithm.
    """
    if not isinstance(module, str):
        raise ScenarioError(f"algorithm.module={module!r} must be 'package.module:name'", code="code.name")
    if is_given(module) and find_given(module) is None:
        return None
    own: type[AlgorithmPart] = load_own(
        module,
        "algorithm.module",
        accepts=lambda part: isinstance(part, type) and hasattr(part, "Section"),
        must_be="a subclass of flower_privdec.core.Algorithm",
    )
    return own


def own_algorithm_form(data: Mapping[Any, Any]) -> type[Section]:
    """Return the form of the section of a user's algorithm, by its plain data.

    Raises:
        ScenarioError: the class cannot be imported, or is not an algorithm.
    """
    module = data["module"]
    own = own_algorithm(module)
    if own is None:
        return own_form(AbsentAlgorithmSection)
    section: Any = own.Section
    if not (isinstance(section, type) and issubclass(section, AlgorithmSection)):
        raise ScenarioError(
            f"algorithm.module={module!r}: Section must be a subclass of flower_privdec.scenario.DescentSection",
            code="code.kind",
        )
    return own_form(section)


AlgorithmChoice = Annotated[
    AlgorithmSection,
    PartField(
        ALGORITHMS,
        own=own_algorithm_form,
        usual_own=lambda: own_form(DescentSection),
        unknown="union_tag_invalid",
    ),
]


def algorithm_class(section: AlgorithmSection) -> type[AlgorithmPart] | None:
    """Return the class of the algorithm that a section chooses; None if it is an object of another process."""
    if isinstance(section, OwnPart):
        return own_algorithm(section.module)
    return ALGORITHMS[section.name]
