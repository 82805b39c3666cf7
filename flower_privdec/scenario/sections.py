"""Scenarios, of a simulation or of peers that run a Flower app: strict pydantic models, and rules across sections.

A section is one mapping of the file (`common.fields`). It declares the keys that all choices share; keys that belong to
one choice, such as a graph's degree, are declared by the class of that choice, and a registry joins the two
(`common.registry`). Rules are checked where the key that they blame is declared:

    _check            of one section, whose values must fit each other
    check_scenario    of a section, whose values must fit other sections; `Scenario._check` calls it

An error of `_check` names a key of its own section, and one of `check_scenario` a key from the root of the file.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from flower_privdec.common import catalogue
from flower_privdec.common.catalogue import (
    ATTACKS,
    BY_CLASS,
    CODECS,
    DATASETS,
    LEAST_WEIGHT,
    LOSS_KINDS,
    METRIC_KINDS,
    MODELS,
    MOST_WEIGHT,
    NOISES,
    ROBUST_RULES,
    TOPOLOGIES,
    TRANSPORTS,
    USUAL_METRICS,
    AttackKeys,
    CodecKeys,
    GraphSection,
    MetricKind,
    NoiseKeys,
    RobustKeys,
    Targets,
    unfit,
)
from flower_privdec.common.errors import RAISED_BY_USERS, ArgumentError, PrivdecError, ScenarioError
from flower_privdec.common.fields import (
    SECTION_OR_NAME,
    SECTION_OR_NONE,
    Count,
    Fraction,
    Growth,
    Name,
    NonNegative,
    OwnSection,
    PathText,
    PerPeer,
    Positive,
    Section,
    check_keys,
    own_modules,
    per_peer_lists,
)
from flower_privdec.common.registry import PartField, PartName
from flower_privdec.common.user_code import Given, find_given, is_given, raised_at
from flower_privdec.scenario.algorithm_sections import (
    ALGORITHMS,
    AlgorithmChoice,
    AlgorithmSection,
    algorithm_class,
)
from flower_privdec.scenario.app_sections import AppPrivacySection
from flower_privdec.scenario.file_sections import ImagesSection, TableSection
from flower_privdec.scenario.findings import Places, located

PEER = "{peer}"  # in data.root, for a peer's number


class PartitionSection(Section):
    """How the training examples are partitioned among the peers.

    Attributes:
        kind: how:
        alpha: of the Dirichlet distribution, small is skewed; only for kind dirichlet.
        min_size: the least examples a peer holds, only for kind dirichlet: one that drew fewer is given random
            examples of the peers that hold most; left out, what is drawn stays, and a peer without any is refused.
        shards_per_peer: only for kind shards.
        classes_per_peer: only for kind pathological.
        sizes: one count, or one share of the whole, for each peer; only for kind sizes.
    """

    kind: Annotated[str, catalogue.PARTITIONS] = "iid"
    alpha: Positive | None = None
    min_size: Count | None = None
    shards_per_peer: Count | None = None
    classes_per_peer: Count | None = None
    sizes: list[Positive] | None = None

    def _check(self) -> None:
        more = {"shards": ["shards_per_peer"], "pathological": ["classes_per_peer"], "sizes": ["sizes"]}
        check_keys(self, {"dirichlet": ["alpha", "min_size"], **more}, optional=["min_size"])


class BatchSection(Section):
    """How a peer draws its examples for a step.

    Attributes:
        sampling: which examples of a peer:
        size: examples in a batch, on average for poisson; every sampling but full needs it, or a rate.
        rate: in place of size, only for poisson: the probability of every example to be drawn, the same at every peer.
            A peer of J examples then draws rate J on average, by which its sums are divided; privacy is amplified
            alike at all peers, and a peer with few examples has the more noise in its mean.
        small_peers: what happens if a peer holds fewer examples than size: it is refused; or full, it takes all that it
            holds in every step. Nothing is then amplified for it, so that it needs more noise for the same ε.
    """

    sampling: Annotated[str, catalogue.SAMPLINGS] = "poisson"
    size: Count | None = None
    rate: Annotated[float, Field(ge=1e-9, le=1, allow_inf_nan=False)] | None = None  # less: gaps between draws overflow
    small_peers: Literal["refused", "full"] = "refused"

    def _check(self) -> None:
        if self.rate is not None and self.sampling != "poisson":
            remedy = "give size, or use poisson"
            if self.sampling == "full":
                remedy = "remove it"
            raise ArgumentError(
                f"rate belongs to sampling poisson, not to {self.sampling}: {remedy}", code="batch.rate"
            )

        if self.sampling == "full" and self.size is not None:
            raise ArgumentError("sampling full takes every local example: remove size", code="batch.size")
        if self.size is not None and self.rate is not None:
            raise ArgumentError("size and rate both set how much is drawn: give one", code="batch.size")
        if self.sampling != "full" and self.size is None and self.rate is None:
            needed = "size (examples a step)"
            if self.sampling == "poisson":
                needed += " or rate"
            raise ArgumentError(f"sampling {self.sampling} needs {needed}: add it", code="batch.size")

        if self.small_peers == "full" and self.size is None:
            raise ArgumentError(
                "small_peers is for peers with fewer examples than size, and size is not given: remove small_peers",
                code="batch.small-peers",
            )


def _public(value: Any) -> Any:
    """Refuse a validation set that is not taken from the public test set."""
    if isinstance(value, str | dict | list):
        raise ArgumentError(
            "must be how many examples of the public test set to take: weights by private examples would reveal them, "
            "and no ε here covers that",
            code="data.validation-is-private",
        )
    return value


DatasetChoice = Annotated[
    Annotated[str, PartName(DATASETS), Tag("named")] | Annotated[OwnSection, Tag("own")], SECTION_OR_NAME
]


def _not_of_dataset(key: str) -> ArgumentError:
    """Return the error of a key that the dataset lacks, or does not take: it names those that do."""
    needing = [name for name, part in DATASETS.items() if key in part.needs]
    taking = [name for name, part in DATASETS.items() if key in part.takes]

    rule = "which needs it"
    if len(needing) > 1:
        rule = "which need it"
    if taking and needing:
        rule += f", and {', '.join(taking)}"
    elif taking:
        rule = "which may have it"
    if key == "labels":
        rule = "each class once"
    return ArgumentError(
        f"{key} is of dataset {', '.join(needing or taking)}, {rule}, and of no other",
        code=f"data.{key.replace('_', '-')}",
    )


TOKEN_LABELS = ("labels", "label", "label_ids")  # what tokenized datasets call their targets
MOST_TOKENS = 2**62  # as many as int64 holds


class DataSection(Section):
    """Which data, how much of it, and how it is partitioned and sampled.

    Attributes:
        dataset: `digits` and `breast-cancer` are embedded; `npz` is a file of your own with the arrays x_train,
            y_train, x_test and y_test. A function of your own is called with "train" or "test", its arguments, and root
            if that is given; it returns x and y.
        root: the folder in which the data lie, or the .npz file; nothing is downloaded. A relative path begins in the
            folder of the scenario's file, as those of test, `model.from`, `privacy.ledger` and a graph's `file` do,
            whether a command or Python reads it; one that `--set` or Python gives, where the command runs. A function
            gets `{peer}` by itself as the peer's number.
            With `{peer}` in it, for the peer's number, each peer has a file of its own and nothing is partitioned; so
            has a device that names its own by `privdec peer --data`.
        test: where the public test set lies, in place of root; needed if root has `{peer}`, and for svmlight.
        source: of data of your own, the name under which a ledger counts them, in whichever format they are; by
            default `own`.
        n_features: of svmlight, which needs it: how many features there are; indices are 1 to n_features.
        table: of csv and parquet, which need it: the columns.
        images: of image-folder, which may have it: how files are read, as DICOM and images of 16 bits are.
        labels: the names of the classes, in their order: the target's values of csv and parquet, left out if they
            are 0, 1, 2, ...; the folders of image-folder, which needs it.
        classes: how many there are; left out, they are counted.
        vocabulary: how many tokens there are, if examples of your own are whole numbers 0..vocabulary-1; left out,
            they are real numbers.
        columns: of tokenized texts of your own, in the place of vocabulary: the arguments of the model, and how many
            values each has, as `{input_ids: 30522, attention_mask: 2}`.
        at_least: a number of examples that every peer has at least, which all peers may know; one that has fewer is
            refused. Noise that cancels between peers is calibrated to it, and needs it if each peer has data of its
            own, whose number is private.
        samples: how many training examples to take, at random; left out, all.
        test_samples: how many of the public test set to take; left out, all.
        validation: how many more of the public test set to keep out of every test figure, for an algorithm that weighs
            what it receives by them, as pdsl does and must; with others they are only kept out, so that all are tried
            on the same examples. Left out, none.
        partition: how the training examples are partitioned.
        batch: how a peer draws its examples.
    """

    dataset: DatasetChoice
    root: PathText | None = None
    test: PathText | None = None
    source: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    n_features: Count | None = None
    table: TableSection | None = None
    images: ImagesSection | None = None
    labels: Annotated[list[str], Field(min_length=2)] | None = None
    classes: Annotated[int, Field(ge=2)] | None = None
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    columns: dict[str, Count] | None = None
    at_least: Count | None = None
    samples: Count | None = None
    test_samples: Count | None = None
    validation: Annotated[Count | None, BeforeValidator(_public)] = None
    partition: PartitionSection = PartitionSection()
    batch: BatchSection

    @property
    def n_tokens(self) -> int | None:
        """How many tokens of your own there are, those of several columns packed; None if examples are numbers."""
        if self.columns is None:
            return self.vocabulary
        return math.prod(self.columns.values())

    @property
    def each_its_own(self) -> bool:
        """Whether each peer has a file of its own, so that nothing is partitioned."""
        return self.root is not None and PEER in self.root

    def _check(self) -> None:
        part = None
        if isinstance(self.dataset, str):
            part = DATASETS[self.dataset]
        if self.source is not None and part is not None and not part.own_files:
            raise ArgumentError(
                f"source is for data of your own, and dataset={self.dataset} has a name: remove it", code="data.source"
            )

        if self.columns is not None:
            self._check_columns(self.columns)

        # Keys that belong to some datasets, whose classes say so themselves.
        needs: tuple[str, ...] = ()
        takes: tuple[str, ...] = ()
        if part is not None:
            needs = part.needs
            takes = (*part.needs, *part.takes)
        for key in ("n_features", "table", "images", "labels"):
            is_given = getattr(self, key) is not None
            if (is_given and key not in takes) or (not is_given and key in needs):
                raise _not_of_dataset(key)

        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise _not_of_dataset("labels")
        if self.labels is not None and self.table is not None:
            self.table.check_listed("labels", self.table.target, self.labels)
        if self.labels is not None and self.classes not in (None, len(self.labels)):
            raise ArgumentError(
                f"classes={self.classes} and {len(self.labels)} labels differ: leave classes out", code="data.labels"
            )
        if "test" in needs and self.test is None:
            raise ArgumentError(
                f"test is missing: dataset {self.dataset} needs the public test set beside root",
                code="data.no-test",
            )

        # What peers with a file each must say, and what has no meaning for them.
        if not self.each_its_own:
            return
        if self.test is None:
            raise ArgumentError(
                f"test is missing: if root has {PEER}, name the test set that all peers share", code="data.no-test"
            )
        for key in ("samples", "partition"):
            is_default = getattr(self, key) == type(self).model_fields[key].default
            if key in self.model_fields_set and not is_default:
                raise ArgumentError(
                    f"{key} is for one dataset that is partitioned, and root has {PEER}: remove one of them",
                    code="data.own-files",
                )

    def _check_columns(self, columns: dict[str, int]) -> None:
        if isinstance(self.dataset, str):
            raise ArgumentError(
                f"columns are of tokenized texts of your own, and dataset={self.dataset} has none: name a function "
                "that returns them, as module of data.dataset",
                code="data.columns",
            )
        if self.vocabulary is not None:
            raise ArgumentError(
                f"vocabulary={self.vocabulary} and columns both say how many tokens there are: leave vocabulary out",
                code="data.columns",
            )
        for name in columns:
            if not name.isidentifier() or name in TOKEN_LABELS:
                raise ArgumentError(
                    f"columns.{name} must be an argument of the model, such as input_ids, and no label, which goes to "
                    "the loss: take it out",
                    code="data.columns",
                )
        n_tokens = math.prod(columns.values())
        if not 2 <= n_tokens <= MOST_TOKENS:
            raise ArgumentError(
                f"columns have {n_tokens:,} combinations of values: there must be 2 to {MOST_TOKENS:,}; say how many "
                "values each really has",
                code="data.columns",
            )

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse data without a name in a shared ledger, and blocks for an algorithm that does not draw them."""
        dataset = self.dataset
        shares_ledger = scenario.private is not None and scenario.private.ledger is not None
        is_object = not isinstance(dataset, str) and is_given(dataset.module)
        if shares_ledger and is_object and self.source is None:
            raise ArgumentError(
                "data.source is missing: name the source of the data that are given, the same name in every run over "
                "them, under which privacy.ledger counts what is spent",
                code="data.source",
            )

        self._check_test_is_public(scenario)
        if scenario.algorithm.sampled_blocks != (self.batch.sampling == "blocks"):
            raise ArgumentError(
                "data.batch.sampling: blocks and algorithm.table blocks (of privsgp-vr) need each other: set both, or "
                "set data.batch.sampling=poisson and leave algorithm.table out",
                code="batch.blocks",
            )

    def _check_test_is_public(self, scenario: Scenario) -> None:
        """Refuse a test set that is a private file by its name: every figure of the run would be one of its rows."""
        if scenario.private is None or self.root is None or self.test is None or not isinstance(self.dataset, str):
            return
        roots = re.escape(self.root).replace(re.escape(PEER), r"\d+")
        if re.fullmatch(roots, self.test):
            raise ArgumentError(
                f"data.test={self.test} is the private data of data.root: name a public test set, for its figures are "
                "covered by no ε",
                code="data.test-is-private",
            )


class FeaturesSection(Section):
    """How each example is turned into features, by itself and with nothing fitted on private data.

    Attributes:
        kind: a wavelet scattering transform (extra `features`).
        scales: J, wavelets of 1, 2, ... 2^(J-1) pixels; the output is 2^J times smaller.
        angles: L, how many directions.
        order: how many wavelets in a row, 1 or 2.
        groups: of channels, each normalised over one example; 0 for none.
        pool: the side to which each channel is averaged.
        whitening: by mean and covariance of the features of drawn pen strokes, or none.
        ridge: what whitening adds to the variances, as a share of the largest.
        norm: of the features of every example.
    """

    kind: Annotated[str, catalogue.FEATURES]
    scales: Annotated[int, Field(ge=1, le=8)] = 2
    angles: Annotated[int, Field(ge=1, le=32)] = 8
    order: Annotated[int, Field(ge=1, le=2)] = 2
    groups: Annotated[int, Field(ge=0)] = 27
    pool: Count = 4
    whitening: Literal["none", "strokes"] = "none"
    ridge: Positive = 0.01
    norm: Positive = 4.0


class ModelSection(Section):
    """The model that every peer trains; without name and module, the model of the run from which it starts.

    Attributes:
        from: the folder of a finished run whose mean model this one starts from; name may be left out then. On the
            same data it must be private if this run is, and both are charged in its ledger.
        init: torch's own initial parameters, drawn by the seed, or all zero.
    """

    origin: PathText | None = Field(default=None, alias="from")
    init: Annotated[str, catalogue.INITS] = "default"

    @model_validator(mode="before")
    @classmethod
    def _one_of(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        named = data.get("name") is not None
        own = data.get("module") is not None
        is_both = named and own
        is_neither = not named and not own
        if is_both or (is_neither and data.get("from") is None):
            raise ArgumentError("give either a model's name, or module: package.module:factory", code="model.one-of")
        if not own and data.get("arguments"):
            raise ArgumentError(
                "arguments belong to a module of your own: remove them, or give module", code="model.arguments"
            )
        return data

    @property
    def target(self) -> str | None:
        """The model's name, or the module of a user's own; None if it is that of the run from which it starts."""
        target: str | None = getattr(self, "name", None) or getattr(self, "module", None)
        return target

    def options(self) -> dict[str, Any]:
        """Return the keys of the model itself, as `build_model` takes them."""
        return self.model_dump(exclude={"name", "module", "origin", "init"}, exclude_none=True)


class OwnModelSection(ModelSection):
    """A model of your own.

    Attributes:
        module: where it is, as `package.module:factory`, imported from where the command runs: a function that returns
            a torch module, or a `flower_privdec.models.Model`.
        arguments: what the function is called with, by name; or the keys of the Model.
    """

    module: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def _check(self) -> None:
        if ":" not in self.module:
            raise ArgumentError(f"module={self.module!r} must be 'package.module:factory'", code="code.name")


ModelChoice = Annotated[
    ModelSection,
    PartField(
        MODELS,
        own=lambda data: OwnModelSection,
        usual_own=lambda: OwnModelSection,
        more=ModelSection,
        nameless=ModelSection,
        stray="scenario.other-choice",
    ),
]


TAKEN = {  # names that a run's files have beside those of metrics
    *("round", "loss", "consensus_distance", "personalized", "epsilon", "seconds", "name", "algorithm", "runtime"),
    *("n_peers", "rounds", "rounds_done", "seed", "seeds", "metrics", "traffic", "privacy", "budget_note", "noise"),
    *("balance_note", "noise_note"),
    *("numbers", "budget", "spread", "n_runs", "stopped_at", "stopped_by", "started_from"),
    *("evaluation_private", "wall_seconds", "peer_steps_per_second", "epsilon_so_far", "finished", "consensus"),
    *("generalization", "own-labels", "label", "suboptimality", "optimum", "claim_note", "training_loss", "by_class"),
}


class OwnLossSection(Section):
    """A loss of your own.

    Attributes:
        module: `package.module:function`, imported from where the command runs: a function of one example's outputs
            [k] and its target, in torch operations, that returns one number.
        targets: what it takes: classes (a whole number), numbers or labels (0 or 1, each as many as an example has).
        outputs: how many the model has; left out, as many as there are classes, numbers or labels.
    """

    module: str
    targets: Literal["classes", "numbers", "labels"] = "classes"
    outputs: Count | None = None


class OwnMetricSection(Section):
    """A metric of your own.

    Attributes:
        module: `package.module:function`, imported from where the command runs: a function of a model's outputs [N, k]
            and the targets [N] or [N, w] of the public test set, that returns one number.
        name: what to call it; left out, the function's name.
        better: whether more or less of it is better.
        share: whether it is a share of 1, shown in percent.
    """

    module: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] | None = None
    better: Literal["higher", "lower"] = "higher"
    share: bool = False

    def kind(self) -> MetricKind:
        """Return the metric's properties."""
        high = self.better == "higher"
        return MetricKind(self.title, ("classes", "numbers", "labels"), high=high, share=self.share)

    @property
    def title(self) -> str:
        """The metric's name."""
        return self.name or self.module.rpartition(":")[2]


LossChoice = Annotated[
    Annotated[str, catalogue.LOSSES, Tag("named")] | Annotated[OwnLossSection, Tag("own")], SECTION_OR_NAME
]
MetricChoice = Annotated[
    Annotated[str, catalogue.METRICS, Tag("named")] | Annotated[OwnMetricSection, Tag("own")], SECTION_OR_NAME
]


class TaskSection(Section):
    """What is learned.

    Attributes:
        loss: of one example; it says what targets an example has. One of your own is a section with module.
        class_weights: one public number for each class, 0 or 1e-6 to 1e6, by which the loss of its examples is
            multiplied. The gradient is clipped afterwards, so that ε stays as it is, and a weight that lifts gradients
            over the clip norm adds nothing. Left out, each is 1.
        metrics: by which models are tried on the public test set, the first one first; left out, what is usual for the
            loss. One of your own is a section with module.
    """

    loss: LossChoice = "cross-entropy"
    class_weights: list[float] | None = Field(default=None, min_length=2)
    metrics: list[MetricChoice] = Field(default=["accuracy"], min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _usual_metrics(cls, data: Any) -> Any:
        """Fill in the metrics that are usual for the loss; a loss that is wrong is refused by its own field later."""
        if not isinstance(data, dict):
            return data
        metrics = data.get("metrics")
        if metrics is not None:
            of_one_class = [name for name in metrics if name in BY_CLASS] if isinstance(metrics, list) else []
            if of_one_class:
                raise ArgumentError(
                    f"metrics: {of_one_class[0]} is of each class, and no one number: say evaluation.by_class=true, or "
                    "take macro-f1",
                    code="metrics.by-class",
                )
            return data

        loss = data.get("loss", "cross-entropy")
        targets: Any = None
        if isinstance(loss, str) and loss in LOSS_KINDS:
            targets = LOSS_KINDS[loss].targets
        elif isinstance(loss, dict):
            targets = loss.get("targets")
        usual = USUAL_METRICS.get(targets or "classes", ("accuracy",))
        return {**data, "metrics": list(usual)}

    def _check(self) -> None:
        self._check_class_weights()
        for metric in self.metrics:
            if isinstance(metric, OwnMetricSection):
                if metric.title in TAKEN:
                    raise ArgumentError(
                        f"metrics: the name {metric.title} is taken in a run's files: give another",
                        code="metrics.name-taken",
                    )
            elif self.own_loss is not None and self.own_loss.outputs is not None:
                raise ArgumentError(
                    f"{metric} cannot be computed from the outputs of loss {self.loss_name}: give metrics of your own",
                    code="metrics.unfit",
                )
            else:
                problem = unfit(metric, self.loss_name, self.targets)
                if problem is not None:
                    raise ArgumentError(f"{metric} {problem}", code="metrics.unfit")

        names = self.kinds()
        if len(names) < len(self.metrics):
            raise ArgumentError(f"metrics names one of {', '.join(names)} twice: keep one", code="metrics.repeated")

    def _check_class_weights(self) -> None:
        if self.class_weights is None:
            return
        if self.targets != "classes":
            raise ArgumentError(
                f"class_weights with loss {self.loss_name}: an example of it has {self.targets} and no class; leave it "
                "out, or weigh them in a loss of your own (task.loss.module)",
                code="task.class-weights",
            )

        for place, weight in enumerate(self.class_weights):
            if not (weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT):
                raise ArgumentError(
                    f"class_weights[{place}]={weight} must be 0, or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
                    code="task.class-weights",
                )

        if not any(self.class_weights):
            raise ArgumentError(
                "class_weights are all 0, so that nothing would be learned: give one class at least a weight above 0",
                code="task.class-weights",
            )

    def kinds(self) -> dict[str, MetricKind]:
        """Return the properties of each metric, by its name."""
        kinds: dict[str, MetricKind] = {}
        for metric in self.metrics:
            if isinstance(metric, OwnMetricSection):
                kinds[metric.title] = metric.kind()
            else:
                kinds.setdefault(metric, METRIC_KINDS[metric])  # a user's own may have the same name
        return kinds

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each metric's name with its title, whether more is better, and whether it is a share of 1."""
        return {n: {"title": kind.title, "high": kind.high, "share": kind.share} for n, kind in self.kinds().items()}

    @property
    def own_loss(self) -> OwnLossSection | None:
        """The loss of the user's own; None if the loss is one of the package."""
        if isinstance(self.loss, OwnLossSection):
            return self.loss
        return None

    @property
    def loss_name(self) -> str:
        """The loss's name, or the module of a user's own."""
        if isinstance(self.loss, str):
            return self.loss
        return self.loss.module

    @property
    def targets(self) -> Targets:
        """What an example's target is."""
        if isinstance(self.loss, str):
            return LOSS_KINDS[self.loss].targets
        return self.loss.targets


Weights = Annotated[str, catalogue.WEIGHTS]
MixingSteps = Annotated[int, Field(ge=1, le=1000)]


class TopologySection(GraphSection):
    """How often, and with which weights, peers exchange over a named graph.

    Attributes:
        weights: auto is what the algorithm's theory needs: column-stochastic for push-sum; for gossip metropolis on an
            undirected graph, doubly-stochastic on a directed one.
        mixing_steps: how often peers exchange after a round's steps, each time on the next graph of the sequence.
    """

    weights: Weights = "auto"
    mixing_steps: MixingSteps = 1


class OwnTopologySection(OwnSection):
    """A graph of a user's own, and with which weights it is mixed.

    The function is called with n_peers and its arguments, and with the scenario's seed if it has a parameter of that
    name and the arguments leave it out. It returns a networkx graph on the nodes 0 to n_peers - 1, for each peer a
    list of those it sends to, or a `flower_privdec.graph.topology.Topology`.

    Attributes:
        weights: as for a named graph.
        mixing_steps: as for a named graph.
    """

    weights: Weights = "auto"
    mixing_steps: MixingSteps = 1

    def options(self) -> dict[str, Any]:
        """Return what the graph is built with."""
        return {"arguments": self.arguments}


EXPONENTIAL = "directed-exponential"
TopologyChoice = Annotated[
    TopologySection | OwnTopologySection,
    PartField(
        TOPOLOGIES,
        own=lambda data: OwnTopologySection,
        usual_own=lambda: OwnTopologySection,
        more=TopologySection,
        default=EXPONENTIAL,
    ),
    Field(
        default_factory=lambda: TOPOLOGIES.section(EXPONENTIAL, TopologySection),
        json_schema_extra={"default": {"name": EXPONENTIAL}},
    ),
]


class ScheduleSection(Section):
    """Clip norms and noise that change over the rounds, C_k and the shape of σ_k of Dyn-D2P (Zhu et al.).

    Either rho_c and rho_mu: C_k = clip_norm ρ_c^{-k/K} and σ_k = C_k / (μ_0 ρ_μ^{k/K}) (Alg. 1). Or lists
    (Alg. 2): clip_norms as factors of clip_norm, and noise, the shape of σ_k, whose scale is solved for;
    one number a round, or fewer, which are joined by straight lines.

    Attributes:
        rho_c: ρ_c, by how much the clip norm has fallen at the end.
        rho_mu: ρ_μ, by how much a step's budget has grown at the end.
        clip_norms: factors of clip_norm over the rounds; not beside rho_c and rho_mu.
        noise: the shape of σ_k over the rounds; not beside rho_c and rho_mu.
    """

    rho_c: Growth = 1.0
    rho_mu: Growth = 1.0
    clip_norms: list[Positive] | None = None
    noise: list[Positive] | None = None

    def _check(self) -> None:
        lists = self.clip_norms is not None or self.noise is not None
        if lists and (self.rho_c, self.rho_mu) != (1.0, 1.0):
            raise ArgumentError(
                "give rho_c and rho_mu, or the lists clip_norms and noise, not both", code="privacy.schedule"
            )


def _named(value: Any) -> Any:
    """Return the section of a graph that only its name stands for."""
    if isinstance(value, str):
        return {"name": value}
    return value


Bands = Literal["auto"] | Annotated[int, Field(ge=1, le=1024)]


class CancellingSection(NoiseKeys):
    """Noise that pairs of peers add with opposite signs, on top of less noise of their own; it is gone from the mean.

    Attributes:
        colluding: with how many peers an adversary who sees all messages may collude; ε holds against that. No default:
            every summary states beside ε what all other peers together would learn.
        absent: how many of a peer's partners may be absent at a time, restarting or gone, before it adds more noise of
            its own to keep its ε. Each costs accuracy from the first round on.
        secrets: the graph whose pairs share a secret: a name of `topology.name`, or a section with its options; on a
            network too, whatever its links are.
        strength: standard deviation of all the noise that a peer shares with others, over the noise that it would need
            by itself, 64 at most; auto takes what `privdec plan` finds best for the graph.
        bands: over how many steps a peer's noise, with what it shares, is correlated besides; see `kind: correlated`.
    """

    colluding: Annotated[int, Field(ge=0)]
    absent: Annotated[int, Field(ge=0)] = 0
    secrets: Annotated[
        GraphSection,
        PartField(TOPOLOGIES),
        BeforeValidator(_named),
        Field(
            default_factory=lambda: TOPOLOGIES.section("complete"), json_schema_extra={"default": {"name": "complete"}}
        ),
    ]
    strength: Literal["auto"] | Annotated[Positive, Field(le=64)] = "auto"
    bands: Bands = 1

    def _check(self) -> None:
        if self.secrets.name in ("server", "random-edges"):
            raise ArgumentError(
                f"secrets={self.secrets.name} is not a graph that stays the same: take complete, for example",
                code="noise.secrets-graph",
            )


class CorrelatedSection(NoiseKeys):
    """Noise that is correlated over the steps of a peer: each step takes back a part of that of the steps before it.

    Attributes:
        bands: the number of steps after which noise is forgotten. Each step draws from one of as many groups of the
            peer's examples, in turn, so that an example is drawn at most once in so many steps. 1 is independent noise;
            auto takes the number, 16 at most, that leaves the least noise in the models at this budget: see
            `privdec plan`.
    """

    bands: Bands = "auto"


NoiseChoice = Annotated[
    NoiseKeys | OwnSection, PartField(NOISES, own=lambda data: OwnSection, usual_own=lambda: OwnSection)
]


def _below_one(delta: float | tuple[float, ...]) -> float | tuple[float, ...]:
    """Refuse a δ of 1 or more, at which a guarantee is none."""
    largest = max(delta) if isinstance(delta, tuple) else delta
    if largest >= 1:
        raise ArgumentError("must be < 1 (well below one over the number of examples)", code="privacy.delta")
    return delta


class PaperSection(Section):
    """Constants of papers' formulas for the noise, by the papers' symbols; calibration rigorous uses none of them.

    Attributes:
        c_2: of PrivSGP-VR's eq. 11, for calibration paper, and of eq. 12, for `privdec plan`.
        phi_min: φ̂_min of PDSL's eq. 27, the smallest share that any neighbour's weight ever has, for calibration paper
            with pdsl, which needs it. The paper's own normalisation makes it 0, and the noise infinite.
    """

    c_2: Positive = 1.0
    phi_min: Annotated[float, Field(gt=0, le=1)] | None = None


class PrivacySection(Section):
    """Each peer's budget, clipping and noise; `privacy: none` trains without any.

    Attributes:
        epsilon: ε, the budget of all peers or of each; the noise is solved for it, or, beside noise_multiplier, it is
            what the ledger is held to.
        delta: δ, well below one over the number of a peer's examples.
        clip_norm: C, to which the gradient of every example is clipped.
        schedule: clip norms and noise that change over the rounds.
        noise_multiplier: the noise's standard deviation over the clip norm; left out, it is solved for epsilon.
        calibration: rigorous solves for the noise by the exact accountant; paper takes a paper's own formula, whose ε
            is then a claim.
        paper: constants of the papers' formulas, by the papers' symbols.
        noise: left out, every sum gets independent Gaussian noise; `kind: cancelling` adds noise that cancels between
            peers; `kind: correlated` subtracts in each step a part of the noise of those before; a subclass of
            `flower_privdec.privacy.noise.NoiseMechanism` of your own has the ε that it declares, else ∞.
        ledger: a folder of ledgers that several runs share, so that ε counts all of them; left out, the ledger lies in
            the run's own folder and counts this run alone.
        noise_cap: by how much the noise in the mean of the peers' models may be larger than in the best mean of them, 1
            or more: peers with much more noise than others (few examples at a common rate, a small budget, a large clip
            norm or learning rate) count less, by weights that all can compute from public settings and sizes; with 1 by
            1 / their noise squared. What is learned then fits their data less. Left out, each peer counts as the
            algorithm says, whatever its noise.
        hardened: whether deployed peers draw and round their noise exactly, so that its digits reveal nothing of the
            sum below it. The noise is then larger by what rounding may add to a sum, 0.01 to 10 % in float32 and hardly
            anything in float64, and takes three to four times as long to draw. It changes no simulation.
    """

    epsilon: PerPeer | None = None
    delta: Annotated[PerPeer, AfterValidator(_below_one)]
    clip_norm: PerPeer = 1.0
    schedule: ScheduleSection | None = None
    noise_multiplier: NonNegative | None = None
    calibration: Literal["rigorous", "paper"] = "rigorous"
    paper: PaperSection = PaperSection()
    noise: NoiseChoice | None = None
    noise_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    ledger: PathText | None = None
    hardened: bool | None = None

    def _check(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ArgumentError(
                "give epsilon (a budget the noise is solved for), noise_multiplier, or both", code="privacy.no-noise"
            )

        if self.calibration == "paper" and (self.epsilon is None or self.noise_multiplier is not None):
            raise ArgumentError(
                "calibration paper computes the noise from epsilon: give epsilon, and no noise_multiplier",
                code="privacy.calibration",
            )

        if self.noise is not None and (self.calibration == "paper" or self.hardened):
            raise ArgumentError(
                "noise changes the noise that calibration paper and hardened are proved for: use calibration rigorous "
                "without hardened, or leave noise out",
                code="privacy.own-noise",
            )

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse constants and noise that do not fit the algorithm."""
        algorithm = scenario.algorithm
        takes_phi_min = "phi_min" in algorithm.paper_constants and self.calibration == "paper"
        if self.paper.phi_min is not None and not takes_phi_min:
            raise ArgumentError(
                "privacy.paper.phi_min is of PDSL's eq. 27, for pdsl with calibration paper: remove it",
                code="privacy.phi-min",
            )

        why = why_no_noise_cap(scenario)
        if self.noise_cap is not None and why is not None:
            raise ArgumentError(f"privacy.noise_cap={self.noise_cap:g} {why}: leave it out", code="privacy.noise-cap")

        if self.correlated_noise is not None:
            self._check_correlated(self.correlated_noise, scenario)

        # What momentum or Adam makes of two peers' noise is no longer equal and opposite.
        has_optimizer = getattr(algorithm, "optimizer", None) is not None
        if isinstance(self.noise, CancellingSection) and has_optimizer:
            raise ArgumentError(
                "algorithm.optimizer with privacy.noise.kind=cancelling must be left out: noise of pairs "
                "cancels only in the sum of plain steps",
                code="algorithm.optimizer",
            )

    @property
    def correlated_noise(self) -> CorrelatedSection | CancellingSection | None:
        """Return the section of noise that is correlated over steps; None if each step has noise of its own."""
        if isinstance(self.noise, CorrelatedSection):
            return self.noise
        if isinstance(self.noise, CancellingSection) and self.noise.bands != 1:
            return self.noise
        return None

    def _check_correlated(self, noise: CorrelatedSection | CancellingSection, scenario: Scenario) -> None:
        """Refuse noise that is correlated over steps if examples may come back at any of them, or nothing to solve."""
        sampling = scenario.data.batch.sampling
        if sampling != "poisson":
            raise ArgumentError(
                f"privacy.noise.bands={noise.bands} draws from groups of examples in turn, each example by itself: set "
                f"data.batch.sampling=poisson, not {sampling}",
                code="noise.correlated-sampling",
            )
        if noise.bands == "auto" and self.epsilon is None:
            raise ArgumentError(
                "privacy.noise.bands=auto takes what is best at a budget, and there is only noise_multiplier: give "
                "epsilon, or a number of bands",
                code="noise.bands",
            )

        # A peer takes back a part of what it drew with another one. If the other rests meanwhile, that does not cancel.
        kind = scenario.participation.kind
        if isinstance(noise, CancellingSection) and kind != "all":
            raise ArgumentError(
                f"privacy.noise.bands={noise.bands} of noise that cancels needs peers that all take every step: what "
                f"they take back would not cancel with participation.kind={kind}; leave bands out, or set it to all",
                code="noise.bands-participation",
            )


PrivacyChoice = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[PrivacySection, Tag("section")], SECTION_OR_NONE
]


ADDRESS = re.compile(r"(?P<host>\[(?P<ipv6>[^\[\]]+)\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
IDENTITY = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def checked_address(value: str) -> str:
    """Return a value that is HOST:PORT.

    Raises:
        ArgumentError: it is not.
    """
    match = ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ArgumentError("must be HOST:PORT, as 10.0.0.7:7100 or [fd00::7]:7100", code="network.address")
    if match["ipv6"] is None:
        return value

    try:
        ip = ipaddress.IPv6Address(match["ipv6"])
    except ValueError as error:
        raise ArgumentError(f"{match['ipv6']} is no address of IPv6 ({error})", code="network.address") from error
    if ip.ipv4_mapped is not None:
        raise ArgumentError(
            f"{match['ipv6']} is an address of IPv4 within one of IPv6: write {ip.ipv4_mapped}:{match['port']}",
            code="network.address",
        )
    if ip.is_link_local and ip.scope_id is None:
        raise ArgumentError(
            f"{match['ipv6']} is link-local, so it is another device's on each link: say on which interface of this "
            f"device, as [{match['ipv6']}%eth0]:{match['port']}, or give an address that is not link-local",
            code="network.link-local",
        )
    return value


def checked_identity(value: str) -> str:
    """Return a value that is a DNS name; raise unless it is."""
    if not IDENTITY.fullmatch(value):
        raise ArgumentError("must be a DNS name in lower case, as peer-3.hospitals", code="network.identity")
    return value


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of an address HOST:PORT, alike for all spellings of one address."""
    host, port = host_and_port(address)
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        return host.lower(), port


def _metrics_address(value: str) -> str:
    """Raise unless a value is HOST:PORT of loopback."""
    checked_address(value)
    if not is_loopback(value):
        raise ArgumentError(
            "must be a loopback address, as 127.0.0.1:9464: other devices would read rounds, ε and neighbours; "
            "`privdec peer --metrics HOST:PORT --expose-metrics` allows that on one device",
            code="metrics.exposed",
        )
    return value


Address = Annotated[str, AfterValidator(checked_address)]
Identity = Annotated[str, AfterValidator(checked_identity)]


def _codec(value: Any) -> Any:
    """Return the section of a codec that only its name stands for."""
    if not isinstance(value, str):
        return value
    if ":" in value:
        return {"module": value}
    return {"name": value}


CodecChoice = Annotated[
    CodecKeys | OwnSection,
    PartField(CODECS, own=lambda data: OwnSection, usual_own=lambda: OwnSection, stray="scenario.other-choice"),
    BeforeValidator(_codec),
]
TransportName = Annotated[str, PartName(TRANSPORTS, own=True)]


def host_label(name: str) -> str:
    """Return a scenario's name as a label of a DNS name: 63 characters at most, of a-z, 0-9 and hyphens within."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "scenario"


def is_loopback(address: str) -> bool:
    """Return whether an address HOST:PORT is one that only this machine reaches."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_anywhere(address: str) -> bool:
    """Return whether an address HOST:PORT stands for all of a device's own, so that no other device can dial it."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class NetworkPeer(Section):
    """One peer of a network.

    Attributes:
        address: HOST:PORT at which the others reach it.
        dial: in the place of an address: out, for a device that nobody can dial, as behind NAT. It dials its
            neighbours, and is called over the streams that it opened.
        listen: HOST:PORT that it listens on, as 0.0.0.0:7100 or [::]:7100; left out, its address, and of a device that
            only dials out nothing.
        identity: the DNS name that its certificate is for; left out, peer-I.NAME with the scenario's name.
    """

    address: Address | None = None
    dial: Literal["out"] | None = None
    listen: Address | None = None
    identity: Identity | None = None

    def _check(self) -> None:
        if self.address is None and self.dial is None:
            raise ArgumentError(
                "address is missing: give the HOST:PORT at which the others reach this peer, or dial: out for a device "
                "that nobody can dial",
                code="network.no-address",
            )
        if self.address is not None and self.dial is not None:
            raise ArgumentError(
                f"address={self.address} and dial: out exclude each other: remove one; what a device that only dials "
                "out listens on for its owner is listen",
                code="network.no-address",
            )


RobustChoice = Annotated[
    RobustKeys | OwnSection, PartField(ROBUST_RULES, own=lambda data: OwnSection, usual_own=lambda: OwnSection)
]
AttackChoice = Annotated[AttackKeys, PartField(ATTACKS, stray="scenario.other-choice")]


class NetworkSection(Section):
    """Where the peers of a network are, and how long they wait for each other.

    Attributes:
        mode: asynchronous, a peer goes on without neighbours that are late; or synchronous, all peers wait for their
            neighbours in every exchange, which gives the numbers of a simulation.
        peers: one for each peer, in the order of their numbers; left out, all are on this machine.
        codec: how rows are encoded on the wire. exact sends them as they are. The others, which are only for push-sum
            shares, round them or send only some numbers; what they cut off stays in the sender's mass. A name, a class
            of your own as `package.module:Name`, or a section with the keys of either. All peers use the same, and a
            simulation rounds as they do.
        transport: what carries calls between peers: tls, streams that stay open; or a class of your own,
            `package.module:Name`. All peers use one.
        links: what connects the peers, from which all times follow: local, one machine; lan, one site; wan, the
            internet, or slow lines.
        deadline: seconds that a peer waits for neighbours if it has to (synchronous: in each exchange; asynchronous:
            after its last round); a call that takes half as long is made again. Left out, 10, or 60 on a wan.
        commit_every: in asynchronous mode, every how many rounds a peer puts its state on disk. Shares of push-sum
            leave only at commits, so that peers exchange as often as they commit.
        quorum: in asynchronous mode, how many neighbours have to exchange with a peer for it to take private steps; a
            peer with fewer neighbours needs all of them.
        alone: what a peer does below the quorum: wait, until enough of its neighbours exchange with it; or go-on, which
            spends its budget without them.
        lead: in asynchronous mode, at how many rounds beyond its slowest neighbour that is up a peer waits; null for no
            limit.
        final_mixing: rounds of mixing after the last round, without private steps, after which the models agree: auto,
            as many as the graph needs; or a number, 0 for none.
        robust: what limits a member that lies, for algorithms that only mix, in simulations too: a rule by its kind, or
            a class of your own; left out, nothing: each member counts by its weight.
        hand_in: whether each peer leaves its model in its folder at every evaluation, for others to read, as `privdec
            up` does; left out, only if peers is left out too: all peers are on one machine then.
        metrics: HOST:PORT on loopback at which each peer serves metrics and health to programs on its own device; left
            out, at none. `privdec up` gives peer I port PORT + I.
    """

    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    codec: CodecChoice = Field(
        default_factory=lambda: CODECS.section("exact"), json_schema_extra={"default": {"name": "exact"}}
    )
    transport: TransportName = "tls"
    peers: list[NetworkPeer] | None = None
    links: Literal["local", "lan", "wan"] = "lan"
    deadline: Positive | None = None
    commit_every: Count = 1
    quorum: Count = 1
    alone: Literal["wait", "go-on"] = "wait"
    lead: Count | None = 4
    final_mixing: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    robust: RobustChoice | None = None
    hand_in: bool | None = None
    metrics: Annotated[str, AfterValidator(_metrics_address)] | None = None

    @property
    def hands_in(self) -> bool:
        """Return whether peers leave their models for others to read."""
        is_on_one_machine = self.peers is None
        return is_on_one_machine if self.hand_in is None else self.hand_in

    def _check(self) -> None:
        peers = self.peers or []
        addresses = [peer.address for peer in peers if peer.address is not None]
        identities = [peer.identity for peer in peers if peer.identity is not None]
        for what, values, alike in (("address", addresses, place_of), ("identity", identities, str)):
            times = Counter(map(alike, values))
            twice = sorted(value for value in values if times[alike(value)] > 1)
            if twice:
                raise ArgumentError(
                    f"{what} {twice[0]!r} is that of two peers: give each its own", code="network.repeated-peer"
                )

    def identities(self, name: str, n_peers: int) -> list[str]:
        """Return the identity of every peer of a scenario of this name."""
        plain = host_label(name)
        given: list[str | None] = [None] * n_peers
        if self.peers is not None:
            given = [peer.identity for peer in self.peers]
        return [identity or f"peer-{peer}.{plain}" for peer, identity in enumerate(given)]


MOST_PEERS = 1_000_000
MOST_ROUNDS = 1_000_000_000


class AbsenceSection(Section):
    """A peer that leaves a simulation, without a word.

    Attributes:
        peer: its number.
        round: the first round in which it is away.
        until: the round in which it is back; left out, it is gone for good.
    """

    peer: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    until: Annotated[int, Field(ge=1)] | None = None

    def _check(self) -> None:
        if self.until is not None and self.until <= self.round:
            raise ArgumentError(
                f"until={self.until} must be above round={self.round}, the first one in which the peer is away",
                code="participation.leaving",
            )


class ParticipationSection(Section):
    """Who is active in a round.

    Attributes:
        kind: which peers:
        fraction: the share of the peers that is active, only for kind uniform.
        count: how many edges are drawn in a round, only for kind edges.
        leaving: peers that leave a simulation, for good or for some rounds, and when; nobody is told beforehand, so all
            plan as if they stayed. Figures are those of the peers that are there.
        noticed_after: for how many rounds the others still count on a peer that left; left out, 4.
    """

    kind: Annotated[str, catalogue.PARTICIPATIONS] = "all"
    fraction: Fraction | None = None
    count: Count | None = None
    leaving: list[AbsenceSection] | None = None
    noticed_after: Annotated[int, Field(ge=0)] | None = None

    def _check(self) -> None:
        check_keys(self, {"uniform": ["fraction"], "edges": ["count"]})
        if self.noticed_after is not None and not self.leaving:
            raise ArgumentError(
                f"noticed_after={self.noticed_after} must stand beside leaving: list there who leaves, or leave it out",
                code="participation.noticed",
            )

    @property
    def says(self) -> str:
        """Return its kind, or that peers leave, as it stands in messages; "all" if everybody is always there."""
        return "leaving" if self.leaving else self.kind

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse absences of peers or in rounds that there are not, and those that leave fewer than two peers."""
        away = sorted(self.leaving or (), key=lambda one: (one.peer, one.round))
        for one in away:
            if one.peer >= scenario.n_peers or one.round >= scenario.rounds:
                raise ArgumentError(
                    f"participation.leaving has peer {one.peer} away from round {one.round} on: peers are 0 to "
                    f"{scenario.n_peers - 1}, and rounds 0 to {scenario.rounds - 1}; list such, or leave "
                    "participation.leaving out",
                    code="participation.leaving",
                )

        for one, other in pairwise(away):
            if one.peer == other.peer and (one.until is None or other.round < one.until):
                raise ArgumentError(
                    f"participation.leaving has peer {one.peer} leave in round {other.round}, in which it is away "
                    f"already since round {one.round}: give `until`, or leave one of the two out",
                    code="participation.leaving",
                )

        for begin in away:
            gone = [one for one in away if one.round <= begin.round and (one.until or math.inf) > begin.round]
            if scenario.n_peers - len(gone) < 2:
                raise ArgumentError(
                    f"participation.leaving leaves {scenario.n_peers - len(gone)} of n_peers={scenario.n_peers} in "
                    f"round {begin.round}: at least 2 must be there",
                    code="participation.leaving",
                )


class EvaluationSection(Section):
    """When the models are tried on the public test set, and a checkpoint is written.

    Attributes:
        every: how many rounds lie between two evaluations; one more is made at the end.
        peers: how many peers' own models are tried, a sample that is drawn from the seed, the same at every evaluation,
            with the standard error of its mean; left out, all. The mean model and the consensus distance are of all.
        peer_samples: test examples for each peer's own model; left out, all. The mean model has them all.
        private: what happens, in a private run, to figures on the peers' own examples, which no ε covers: they are
            withheld; or ignored, they are shown and the summary says so.
        training_loss: whether the mean model is tried on all peers' training examples too, in a simulation. With
            privacy it needs private to be ignored.
        by_class: whether precision, recall and F1 of each class (or label) are written too, beside how many examples of
            the public test set are of it.
    """

    every: Count = 20
    peers: Annotated[int, Field(ge=2)] | None = None
    peer_samples: Count | None = None
    private: Literal["withheld", "ignored"] = "withheld"
    training_loss: bool = False
    by_class: bool = False

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse figures on private examples, unless their owner allows them, and of classes if there are none."""
        task = scenario.task
        if self.by_class and (task.targets == "numbers" or (task.own_loss is not None and task.own_loss.outputs)):
            raise ArgumentError(
                f"evaluation.by_class=true is of classes or labels, and loss {task.loss_name} predicts neither: leave "
                "it out",
                code="evaluation.by-class",
            )
        if scenario.private is not None and self.training_loss and self.private == "withheld":
            raise ArgumentError(
                "evaluation.training_loss is a figure on private examples, which no ε covers: leave it out, or, with "
                "data that anyone may see, say evaluation.private=ignored",
                code="evaluation.training-loss",
            )


class ComputeSection(Section):
    """Where and how the numbers are computed.

    Attributes:
        device: auto is the GPU if torch has one.
        dtype: of parameters and gradients.
        threads: of torch in each product; they change how sums are rounded.
        workers: processes that share the peers of a run on a CPU; they change no number. auto takes the cores that
            this process may use, and as many as pay: small models stay in one process.
        memory_mib: about how much temporary memory gradients may take; it may change how sums
            are rounded.
        generator: where a simulation draws noise and batches from. Left out: from keys, so that the run can be repeated
            on this machine and its models must not be published under its ε. portable: from keys that are the same on
            all machines, in all runtimes and with all versions of libraries, to compare trajectories or to repeat
            a run of others up to rounding. system: from the operating system, as deployed peers do; its models may
            be published under their ε, no other run repeats it, and a resumed run is charged again for the steps that
            it takes again.
    """

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    memory_mib: Annotated[int, Field(ge=16)] = 1024
    generator: Literal["portable", "system"] | None = None

    def _check(self) -> None:
        if self.workers != "auto" and self.workers > 1 and self.threads > 1:
            raise ArgumentError(
                f"workers={self.workers} have one thread each, not threads={self.threads}: leave threads out",
                code="compute.threads",
            )

    def check_scenario(self, scenario: Scenario) -> None:
        """Refuse the system's generator if there is no noise, and more workers than peers."""
        if self.generator == "system" and scenario.private is None:
            raise ArgumentError(
                "compute.generator=system is for noise, and privacy is none: leave generator out",
                code="compute.generator",
            )
        if self.workers != "auto" and self.workers > scenario.n_peers:
            raise ArgumentError(
                f"compute.workers={self.workers} must be at most n_peers={scenario.n_peers}: a worker hosts peers; "
                "use auto",
                code="compute.workers",
            )


class PlanSection(Section):
    """Constants of PrivSGP-VR's eq. 12, by which `privdec plan` finds the best number of rounds.

    Constants of the loss that are left out are estimated on the public test set, and d and J are those of the
    scenario. A run uses none of them.

    Attributes:
        smoothness: L.
        gradient_bound: G; left out, the clip norm.
        initial_gap: F0 = f(x0) - f*.
        heterogeneity: b².
        initial_norm_squared: ‖x0‖².
        dimension: d; left out, the model's number of parameters.
        dataset_size: J; left out, a peer's number of examples.
    """

    smoothness: Positive | None = None
    gradient_bound: Positive | None = None
    initial_gap: Positive | None = None
    heterogeneity: NonNegative | None = None
    initial_norm_squared: NonNegative | None = None
    dimension: Count | None = None
    dataset_size: Count | None = None


Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SeedsSection(Section):
    """A seed for each kind of draws; one that is left out is the scenario's `seed`.

    Attributes:
        data: which examples are taken and how they are partitioned among the peers.
        model: the initial parameters.
        run: all that happens then: graphs that are drawn, who is active, batches and noise. With privacy, batches and
            noise follow from everything that decides the run's numbers, the other two seeds too.
    """

    data: Seed | None = None
    model: Seed | None = None
    run: Seed | None = None


class StageSection(Section):
    """An earlier part of a run that has more rounds now; `--resume` with other rounds or another budget writes it.

    Attributes:
        until: the round at which it ended.
        rounds: for how many rounds it was planned.
        epsilon: its privacy.epsilon.
        noise_multiplier: its privacy.noise_multiplier.
        run: its name in the ledger.
    """

    until: Count
    rounds: Count
    epsilon: PerPeer | None = None
    noise_multiplier: NonNegative | None = None
    run: str

    def _check(self) -> None:
        if self.until > self.rounds:
            raise ArgumentError(f"until={self.until} must be <= rounds={self.rounds}", code="scenario.earlier")


class LocatedFile(Section):
    """A file's section that remembers the lines of its values."""

    _places: Places = PrivateAttr(default_factory=Places)


def _check_addresses(scenario: Scenario | AppScenario | Membership) -> None:
    peers = scenario.network.peers
    if peers is not None and len(peers) != scenario.n_peers:
        raise ArgumentError(
            f"network.peers lists {len(peers)} peers for n_peers={scenario.n_peers}: give each its address",
            code="network.peer-count",
        )


def exchanges_nothing(section: AlgorithmSection) -> bool:
    """Return whether it is known of an algorithm that its peers exchange nothing."""
    algorithm = algorithm_class(section)
    return getattr(algorithm, "weights", "unknown") is None


def why_no_noise_cap(scenario: Scenario) -> str | None:
    """Return why peers cannot count by their noise (`privacy.noise_cap`) in a scenario; None if they can."""
    section = scenario.algorithm
    name = getattr(section, "name", "") or getattr(section, "module", "")
    algorithm = algorithm_class(section)
    if exchanges_nothing(section):
        return f"is about the model that peers share, and algorithm.name={name} exchanges nothing"
    if not getattr(algorithm, "noise_follows_rate", True):
        return f"lowers a peer's steps, and with algorithm.name={name} its noise reaches others by another way too"

    optimizer = getattr(section, "optimizer", None)
    if optimizer is not None and optimizer.name == "adam":
        return "weighs steps by their noise, and algorithm.optimizer=adam makes them alike, however noisy"
    return None


class Scenario(LocatedFile):
    """One experiment, complete.

    Attributes:
        name: what to call the run; its results go to runs/NAME unless `--out` says otherwise.
        seed: of all that is drawn, unless seeds has another.
        seeds: one for each kind of draws, so that one of them can vary and the others stay.
        n_peers: how many peers train; 1 only for local and dp-sgd.
        rounds: K.
        data: which data, and how they are partitioned and sampled.
        features: a fixed feature extractor in front of the model; left out, there is none.
        task: what is learned: the loss, and the metrics; left out, classes by cross-entropy.
        model: what every peer trains.
        algorithm: what peers do in a round; its name decides which keys there are.
        topology: the graph.
        participation: who is active in a round.
        privacy: `none`, or budget, clipping and noise.
        evaluation: when the models are tried on the public test set.
        compute: device, number type and threads.
        plan: constants for `privdec plan`.
        network: where real peers are, and how long they wait; a simulation uses only codec and robust.
        attack: peers that lie, for a simulation that tries what stops them; left out, nobody lies.
        earlier: what the run did before it was given more rounds; a run writes it, and no one else.
    """

    name: Name
    seed: Seed = 1
    seeds: SeedsSection | None = None
    n_peers: Annotated[int, Field(ge=1, le=MOST_PEERS)]
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
    data: DataSection
    features: FeaturesSection | None = None
    task: TaskSection = Field(default_factory=lambda: TaskSection.model_validate({}))
    model: ModelChoice
    algorithm: AlgorithmChoice
    topology: TopologyChoice
    participation: ParticipationSection = ParticipationSection()
    privacy: PrivacyChoice
    evaluation: EvaluationSection = EvaluationSection()
    compute: ComputeSection = ComputeSection()
    plan: PlanSection | None = None
    network: NetworkSection = NetworkSection()
    attack: AttackChoice | None = None
    earlier: list[StageSection] | None = None

    @model_validator(mode="before")
    @classmethod
    def _borrowed_keys(cls, data: Any) -> Any:
        """Move keys that the algorithm's section may hold for another section to their place."""
        if not isinstance(data, dict) or not isinstance(data.get("algorithm"), dict):
            return data
        name = data["algorithm"].get("name")
        if not isinstance(name, str) or name not in ALGORITHMS:
            return data
        return ALGORITHMS[name].Section.in_scenario(data)

    _given: tuple[Given, ...] = PrivateAttr(default=())  # kept for as long as the scenario is

    def model_post_init(self, context: Any) -> None:
        """Keep the parts that were given as Python objects."""
        given = [find_given(module) for _, module in own_modules(self)]
        self._given = tuple(part for part in given if part is not None)

    @property
    def given(self) -> tuple[Given, ...]:
        """The parts that were given as Python objects."""
        return self._given

    def __str__(self) -> str:
        """Return the scenario as YAML, with every default."""
        from flower_privdec.scenario.loading import to_yaml

        return to_yaml(self)

    def _check(self) -> None:
        # Rules across sections that belong to no section.
        earlier_ends = [stage.until for stage in self.earlier or ()]
        ends = [0, *earlier_ends, self.rounds]
        if any(one >= other for one, other in pairwise(ends)):
            raise ArgumentError(
                f"earlier ends at the rounds {earlier_ends}, which must ascend and be below rounds={self.rounds}",
                code="scenario.earlier",
            )
        for name, section in {"algorithm": self.algorithm, "privacy": self.privacy}.items():
            if isinstance(section, Section):
                self._check_per_peer(name, section)

        # The others are methods of the section whose key they blame.
        self.data.check_scenario(self)
        self.compute.check_scenario(self)
        self.evaluation.check_scenario(self)
        self.participation.check_scenario(self)
        _check_addresses(self)
        self._check_attack()
        if self.private is not None:
            self.private.check_scenario(self)

        self.algorithm.check_scenario(self)
        if self.n_peers == 1 and not exchanges_nothing(self.algorithm):
            raise ArgumentError(
                f"n_peers=1 must be >= 2 on the graph {self.topology.name}: "
                "one peer has no neighbor to exchange with; use algorithm local, or more peers",
                code="scenario.n-peers",
            )

    def _check_attack(self) -> None:
        if self.attack is None:
            return

        peers = self.attack.peers
        if len(set(peers)) < len(peers) or max(peers) >= self.n_peers:
            raise ArgumentError(
                f"attack.peers={list(peers)} must be different peers, from 0 to {self.n_peers - 1}: list such, or "
                "leave attack out",
                code="attack.peers",
            )

        if self.n_peers - len(peers) < 2:
            raise ArgumentError(
                f"attack.peers lists {len(peers)} liars of n_peers={self.n_peers}: leave at least 2 that do not lie, "
                "or leave attack out",
                code="attack.peers",
            )

    def _check_per_peer(self, name: str, section: Section) -> None:
        for key, value in per_peer_lists(section):
            if len(value) != self.n_peers:
                raise ArgumentError(
                    f"{name}.{key} lists {len(value)} numbers for n_peers={self.n_peers}: give one a peer",
                    code="scenario.per-peer",
                )

    def seed_of(self, draws: Literal["data", "model", "run"]) -> int:
        """Return the seed of one kind of draws."""
        own: int | None = getattr(self.seeds, draws, None)
        return self.seed if own is None else own

    def all_seeds(self) -> dict[str, int]:
        """Return the seed of every kind of draws."""
        return {"data": self.seed_of("data"), "model": self.seed_of("model"), "run": self.seed_of("run")}

    @property
    def private(self) -> PrivacySection | None:
        """Return the privacy section; None if there is no privacy."""
        return self.privacy if isinstance(self.privacy, PrivacySection) else None

    @property
    def first_round(self) -> int:
        """Return the round at which the stage under way began: 0, unless the run was given more rounds."""
        return self.earlier[-1].until if self.earlier else 0

    def stage_before(self) -> Scenario:
        """Return the scenario as it was before the run was given more rounds."""
        if not self.earlier:
            raise ValueError("the run has one stage")
        *before, last = self.earlier
        changed: dict[str, Any] = {"rounds": last.rounds, "earlier": before or None}
        if self.private is not None:
            noise = {"epsilon": last.epsilon, "noise_multiplier": last.noise_multiplier}
            changed["privacy"] = self.private.model_copy(update=noise)
        return self.model_copy(update=changed)


AppPrivacyChoice = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[AppPrivacySection, Tag("section")], SECTION_OR_NONE
]


class AppEvaluationSection(Section):
    """How often a peer lets the app try its model.

    Attributes:
        every: how many rounds lie between two evaluations; one more is made at the end.
    """

    every: Count = 20


class AppComputeSection(Section):
    """How an app computes.

    Attributes:
        threads: of torch.
    """

    threads: Annotated[int, Field(ge=1, le=1024)] = 1


class AppScenario(LocatedFile):
    """What the peers that run an app agree on; what they train, and on what, is the app's own.

    Attributes:
        name: of the run.
        seed: of graphs that are drawn, of who is active, and of the app's ServerApp while it makes the initial arrays.
        n_peers: how many peers train.
        rounds: K.
        topology: the graph.
        participation: who is active in a round.
        privacy: `none`, or what protects a whole peer.
        evaluation: how often the app tries a peer's model.
        compute: threads.
        train_config: replaces keys of the ServerApp's config for the train function.
        evaluate_config: the config for the evaluate function.
        run_config: laid over the app's run-config.
        initial: a digest of the arrays that all begin with; left out, each peer fills in that of its own, and those
            whose arrays differ refuse each other.
        local: patterns of the names of arrays that never leave a peer, such as [head.*]; see `PeerMod`.
        network: where the peers are, and how long they wait.
    """

    name: Name
    seed: Seed = 1
    n_peers: Annotated[int, Field(ge=2, le=MOST_PEERS)]
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
    topology: TopologyChoice
    participation: ParticipationSection = ParticipationSection()
    privacy: AppPrivacyChoice
    evaluation: AppEvaluationSection = AppEvaluationSection()
    compute: AppComputeSection = AppComputeSection()
    train_config: dict[str, Any] = Field(default_factory=dict)
    evaluate_config: dict[str, Any] = Field(default_factory=dict)
    run_config: dict[str, Any] = Field(default_factory=dict)
    initial: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    local: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    network: NetworkSection = NetworkSection()

    def _check(self) -> None:
        _check_addresses(self)
        if self.private is not None and self.private.noise is not None:
            raise ArgumentError(
                "privacy.noise: an app's peers that have no strategy add independent noise, and noise of pairs needs "
                "both peers to take the same step; leave it out, start PushSum with PeerMod(noise=...), or write the "
                "model as a scenario's",
                code="privacy.app-noise",
            )
        if self.participation.leaving:
            raise ArgumentError(
                "participation.leaving is for simulations of a scenario's own model: leave it out for an app, whose "
                "peers leave when they do",
                code="participation.leaving",
            )

    def seed_of(self, draws: str) -> int:
        """Return the seed, which is that of all draws."""
        return self.seed

    def all_seeds(self) -> dict[str, int]:
        """Return the seeds of all draws."""
        return {"run": self.seed}

    @property
    def private(self) -> AppPrivacySection | None:
        """Return the privacy section; None if there is no privacy."""
        return self.privacy if isinstance(self.privacy, AppPrivacySection) else None

    @property
    def given(self) -> tuple[()]:
        """Return the parts that were given as Python objects: none."""
        return ()


class Membership(LocatedFile):
    """Who the peers of a scenario, or of an app's, are: all that their certificates need.

    Attributes:
        name: of the run.
        n_peers: how many peers there are.
        rounds: K, before the list of members gives the run more.
        network: where they are.
    """

    model_config = ConfigDict(extra="ignore")

    name: Name
    n_peers: Annotated[int, Field(ge=1, le=MOST_PEERS)]
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 1
    network: NetworkSection = NetworkSection()

    def _check(self) -> None:
        _check_addresses(self)


HasPeers = Scenario | AppScenario | Membership

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def placed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Add the line of the file to a function's errors about the scenario that its first argument is or has.

    An error raised by a user's part is reported in one line, without its message, which may reveal data.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first: Any = args[0]
        scenario: LocatedFile = first if isinstance(first, LocatedFile) else first.scenario

        with located(scenario._places, type(scenario)):
            try:
                return function(*args, **kwargs)
            except PrivdecError:
                raise
            except RAISED_BY_USERS as error:
                # Without parts of a user's own it is our mistake; an OSError is of a file, and says which.
                own = [f"{key}={module!r}" for key, module in own_modules(scenario)]
                if not own or isinstance(error, OSError):
                    raise
                raise ScenarioError(
                    f"{' or '.join(own)} raised {raised_at(error)}; mend the code", code="code.fails"
                ) from error

    return call
