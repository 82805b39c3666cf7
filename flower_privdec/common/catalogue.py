"""The names that a scenario or an option can give, with a line on each: schema, errors and `privdec list` follow.

There are two kinds of names. A `Registry` collects the parts of which users can add their own: graphs, datasets,
models, noises, codecs and transports (`common.registry`; algorithms have theirs in `scenario.algorithm_sections`). A
`Choice` is a closed list; what is built by its names lies in a room above, which binds it when it is imported (`bind`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from flower_privdec.common.errors import ArgumentError, ScenarioError, did_you_mean
from flower_privdec.common.fields import Section
from flower_privdec.common.registry import RegisteredPart, Registry

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Choice:
    """The names that a scenario may give in one place; `Annotated[str, choice]` is a field that takes only these.

    Attributes:
        lines: what `privdec list` says of each name.
    """

    lines: Mapping[str, str]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.lines)

    def __contains__(self, name: object) -> bool:
        """Return whether a name is one of the choice."""
        return name in self.lines

    def check(self, name: str, key: str) -> None:
        """Refuse a name that is not one of the choice.

        Raises:
            ScenarioError: the message names the key of the scenario, all names, and the nearest.
        """
        if name not in self:
            message = f"{key}={name!r} must be one of {', '.join(self)}{did_you_mean(name, self)}"
            raise ScenarioError(message, code="catalogue.unknown")

    def bind(self, built: Mapping[str, T]) -> dict[str, T]:
        """Return what is built by each name.

        Raises:
            ValueError: the names differ.
        """
        if set(built) != set(self):
            raise ArgumentError(
                f"the catalogue and what is built differ in {sorted(set(built) ^ set(self))}", code="catalogue.differs"
            )
        return {name: built[name] for name in self}

    def some(self, *names: str) -> Choice:
        """Return a choice among some of the names."""
        return Choice({name: self.lines[name] for name in names})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's form of a field that takes these names."""
        return core_schema.literal_schema(list(self))


class GraphSection(Section):
    """The keys that belong to a graph: none, unless its own Section declares some."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """What the scenario calls the graph."""

    def options(self) -> dict[str, Any]:
        """Return the keys of the graph itself, as `build_topology` takes them."""
        return self.model_dump(exclude={"name", "weights", "mixing_steps"}, exclude_none=True)

    @property
    def file_to_read(self) -> str | None:
        """The file that the graph is read from; None if it is not. A scenario from elsewhere may name none."""
        return getattr(self, "file", None)


TOPOLOGIES: Registry[RegisteredPart] = Registry("topology.name", "flower_privdec.graph.graphs", GraphSection)
WEIGHTS = Choice(
    {
        "auto": "what the algorithm needs, on this graph",
        "column-stochastic": "1/(out-degree + 1) to each out-neighbour and itself; any graph, for push-sum",
        "metropolis": "1/(1 + the larger degree); undirected graphs, symmetric and doubly stochastic",
        "doubly-stochastic": "1/(degree + 1); graphs in which all in- and out-degrees are the same",
        "max-degree": "1/(1 + the largest degree of all), uniform; undirected graphs, symmetric and doubly stochastic",
    }
)
PARTICIPATIONS = Choice(
    {
        "all": "everybody, every round",
        "uniform": "ceil(`fraction` n) peers, drawn uniformly at random each round",
        "edges": "the ends of `count` edges of the topology, drawn afresh each round; only these edges are used",
    }
)


class DatasetPart(RegisteredPart, Protocol):
    """A dataset's class, as far as a scenario looks at it.

    Attributes:
        own_files: whether it is a format of a user's own files, which a ledger counts under data.source.
        needs: keys of the section data that belong to it, and that it needs.
        takes: keys of the section data that belong to it, and that it may have.
    """

    own_files: bool
    needs: tuple[str, ...]
    takes: tuple[str, ...]


DATASETS: Registry[DatasetPart] = Registry("data.dataset", "flower_privdec.data.sets", Section)
PARTITIONS = Choice(
    {
        "iid": "equal random shares; sizes differ by one example at most",
        "dirichlet": "every class is divided by a Dirichlet draw: alpha (small is skewed)",
        "shards": "sorted by label and cut into shards, assigned at random: shards_per_peer",
        "pathological": "each peer holds exactly so many classes: classes_per_peer",
        "sizes": "random shares of given sizes: sizes (one count or one share of the whole for each peer)",
    }
)
SAMPLINGS = Choice(
    {
        "poisson": "each local example by itself, with probability `rate`, or size / count: what amplification needs",
        "uniform": "exactly size distinct local examples, drawn afresh each round",
        "shuffle": "consecutive batches of size from each epoch's permutation, no incomplete one",
        "full": "all local examples",
        "blocks": "one of count // size fixed batches (all examples of equal position modulo that number), at random",
    }
)
Targets = Literal["classes", "numbers", "labels"]
TARGETS: dict[Targets, str] = {
    "classes": "each example is of one class, 0..C-1: y is whole numbers [N]",
    "numbers": "each example has one or more numbers (regression): y is finite numbers [N] or [N, k]",
    "labels": "each example has any of several labels: y is 0 or 1 in [N, k]",
}


@dataclass(frozen=True)
class LossKind:
    """Properties of a named loss.

    Attributes:
        targets: what it takes.
        line: what `privdec list` says of it.
        log_odds: whether the outputs it trains are log-odds, from which a log loss can be computed.
    """

    targets: Targets
    line: str
    log_odds: bool = False


LOSS_KINDS = {
    "cross-entropy": LossKind("classes", "of classes: softmax over one output a class", log_odds=True),
    "logistic": LossKind("classes", "of two classes: log-odds of the second, one output", log_odds=True),
    "hinge": LossKind("classes", "of two classes: margin, one output"),
    "squared-hinge": LossKind("classes", "of two classes: squared margin, one output"),
    "mse": LossKind("numbers", "of numbers: squared error, mean over an example's numbers"),
    "mae": LossKind("numbers", "of numbers: absolute error, mean over an example's numbers"),
    "huber": LossKind(
        "numbers", "of numbers: half the squared error up to 1, linear beyond, mean over an example's numbers"
    ),
    "binary-cross-entropy": LossKind(
        "labels", "of any of several labels: log-odds of each, mean over the labels", log_odds=True
    ),
}
# Of a class: beyond these, products with gradients could vanish or overflow.
LEAST_WEIGHT = 1e-6
MOST_WEIGHT = 1e6
LOSSES = Choice({name: kind.line for name, kind in LOSS_KINDS.items()})


def fitting(targets: Targets) -> str:
    """Return the names of the losses that take some targets."""
    return ", ".join(name for name, kind in LOSS_KINDS.items() if kind.targets == targets)


@dataclass(frozen=True)
class MetricKind:
    """Properties of a metric.

    Attributes:
        title: what it is, in a table or over a curve.
        targets: the kinds of task that it fits.
        line: what `privdec list` says of it.
        high: whether more is better.
        share: whether it is a share of 1, shown in percent.
        log_odds: whether it needs outputs that are log-odds.
    """

    title: str
    targets: tuple[Targets, ...]
    line: str = ""
    high: bool = True
    share: bool = True
    log_odds: bool = False


def _error(title: str, line: str) -> MetricKind:
    return MetricKind(title, ("numbers",), line, high=False, share=False)


METRIC_KINDS = {
    "accuracy": MetricKind("accuracy", ("classes",), "of classes: the share that is right"),
    "balanced-accuracy": MetricKind(
        "balanced accuracy", ("classes",), "of classes: the share of each that is right, mean over the classes"
    ),
    "macro-f1": MetricKind("macro F1", ("classes", "labels"), "of classes or labels: F1 of each, mean over all"),
    "log-loss": MetricKind(
        "log loss",
        ("classes",),
        "of classes: minus the log-likelihood, mean over the examples; for log-odds",
        high=False,
        share=False,
        log_odds=True,
    ),
    "rmse": _error("RMSE", "of numbers: root of the mean squared error"),
    "mse": _error("MSE", "of numbers: mean squared error"),
    "mae": _error("MAE", "of numbers: mean absolute error"),
    "r2": MetricKind(
        "R²",
        ("numbers",),
        "of numbers: share of the variance that is explained, mean over an example's numbers",
        share=False,
    ),
    "micro-f1": MetricKind("micro F1", ("labels",), "of labels: F1 over all labels together"),
    "subset-accuracy": MetricKind(
        "subset accuracy", ("labels",), "of labels: the share of examples of which every label is right"
    ),
    "mean-average-precision": MetricKind(
        "mean average precision", ("labels",), "of labels: area under precision over recall, mean over the labels"
    ),
    "roc-auc": MetricKind(
        "ROC AUC",
        ("classes", "labels"),
        "of classes or labels: area under the ROC curve; of more than two each against the rest, mean over all",
    ),
    "average-precision": MetricKind(
        "average precision",
        ("classes",),
        "of classes: area under precision over recall; of more than two each against the rest, mean over all",
    ),
}
CLASS_TITLES = {"precision": "precision", "recall": "recall", "f1": "F1"}  # of one class, by evaluation.by_class
BY_CLASS = tuple(CLASS_TITLES)
METRICS = Choice({name: kind.line for name, kind in METRIC_KINDS.items()})
USUAL_METRICS: dict[Targets, tuple[str, ...]] = {
    "classes": ("accuracy",),
    "numbers": ("rmse", "r2"),
    "labels": ("micro-f1", "mean-average-precision"),
}


def unfit(metric: str, loss: str, targets: Targets) -> str | None:
    """Return why a metric does not fit models trained by a loss for some targets; None if it fits."""
    kind = METRIC_KINDS[metric]
    if targets not in kind.targets:
        fit = ", ".join(name for name, other in METRIC_KINDS.items() if targets in other.targets)
        return f"is a metric of {' and '.join(kind.targets)}, and loss {loss} is for {targets}: use {fit}"
    if kind.log_odds and not (loss in LOSS_KINDS and LOSS_KINDS[loss].log_odds):
        return f"needs log-odds, which loss {loss} does not train: use cross-entropy or logistic, or leave it out"
    return None


FEATURES = Choice(
    {"scattering": "wavelet scattering of images, whitened on drawn pen strokes if asked; nothing private goes in"}
)


class ModelKeys(Section):
    """The keys that belong to a model: none, unless its own Section declares some."""


MODELS: Registry[RegisteredPart] = Registry("model.name", "flower_privdec.models", ModelKeys)


class NoiseKeys(Section):
    """The keys of a kind of noise, with which its class is called: none, unless its own Section declares some."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """What the scenario calls the noise."""

    def options(self) -> dict[str, Any]:
        """Return the keys of the noise itself."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "kind"}


NOISES: Registry[RegisteredPart] = Registry("privacy.noise.kind", "flower_privdec.privacy.noise.kinds", NoiseKeys)


class CodecKeys(Section):
    """The keys of a wire codec, with which its class is called: none, unless its own Section declares some."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """What the scenario calls the codec."""

    def options(self) -> dict[str, Any]:
        """Return the keys of the codec itself."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}


class RobustKeys(Section):
    """The keys of a rule that limits members that lie; a rule's own Section may declare more.

    Attributes:
        byzantine: how many of a peer's neighbours may send it anything.
    """

    byzantine: Annotated[int, Field(ge=1)]

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """What the scenario calls the rule."""

    def options(self) -> dict[str, Any]:
        """Return the keys with which the rule's class is called."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "kind"}


ROBUST_RULES: Registry[RegisteredPart] = Registry("network.robust.kind", "flower_privdec.core.rules", RobustKeys)


class AttackKeys(Section):
    """The keys of an attack; an attack's own Section may declare more.

    Attributes:
        peers: those that lie.
    """

    peers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """What the scenario calls the attack."""

    def options(self) -> dict[str, Any]:
        """Return the keys with which the attack's class is called."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "kind"}


ATTACKS: Registry[RegisteredPart] = Registry("attack.kind", "flower_privdec.core.attacks", AttackKeys)
CODECS: Registry[RegisteredPart] = Registry("network.codec.name", "flower_privdec.pushsum.codecs", CodecKeys)
TRANSPORTS: Registry[RegisteredPart] = Registry("network.transport", "flower_privdec.network.transport.kinds", Section)
ACTIVATIONS = Choice({"relu": "max(0, x)", "tanh": "the hyperbolic tangent"})
INITS = Choice({"default": "torch's own, keyed by the seed", "zeros": "every parameter 0"})
FLOWER_MODES = Choice(
    {
        "auto": "a simulation computes all peers in one SuperNode; deployed SuperNodes host one each, or a shard",
        "sharded": "each SuperNode hosts a shard of the peers, and they send each other rows directly",
        "relay": "each SuperNode hosts one peer, or some, and the ServerApp routes what they send",
    }
)
