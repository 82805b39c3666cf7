"""Sections of a scenario file as strict pydantic models; unknown keys and wrong types are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic.types import Discriminator

from flower_privdec import catalogue
from flower_privdec.scenario.algorithm_sections import AlgorithmSection, DynSection, VRSection
from flower_privdec.scenario.features_section import FeaturesSection
from flower_privdec.scenario.fields import (
    OWN_OR_NAMED,
    Count,
    Fraction,
    NonNegative,
    OwnSection,
    PerPeer,
    Positive,
    Section,
)
from flower_privdec.scenario.task_section import TaskSection

PEER = "{peer}"  # in data.root, for a peer's number
CNN_OPTIONS = ("channels", "kernel", "hidden", "activation", "pool")
MODEL_OPTIONS = {
    "linear": ("bias",),
    "softmax": ("bias",),
    "mlp": ("hidden", "activation"),
    **dict.fromkeys((name for name in catalogue.MODELS if name.startswith("cnn")), CNN_OPTIONS),
    "resnet18-gn": ("groups", "width"),
    "text": ("width", "hidden", "activation"),
}


class PartitionSection(Section):
    """How the training examples are dealt out to the peers.

    Attributes:
        kind: `iid` is equal random shares; `dirichlet` divides every class by a Dirichlet draw; `shards` sorts by
            label, cuts, and deals out; `pathological` gives each peer a few classes; `sizes` is random shares of
            given sizes.
        alpha: of the Dirichlet distribution, small is skewed; for kind dirichlet alone.
        shards_per_peer: for kind shards alone.
        classes_per_peer: for kind pathological alone.
        sizes: one count, or one share of the whole, for each peer; for kind sizes alone.
    """

    kind: Annotated[str, catalogue.PARTITIONS] = "iid"
    alpha: Positive | None = None
    shards_per_peer: Count | None = None
    classes_per_peer: Count | None = None
    sizes: list[Positive] | None = None

    @model_validator(mode="after")
    def _needs_its_option(self) -> PartitionSection:
        needed = {
            "dirichlet": "alpha",
            "shards": "shards_per_peer",
            "pathological": "classes_per_peer",
            "sizes": "sizes",
        }
        for kind, option in needed.items():
            given = getattr(self, option) is not None
            if given and kind != self.kind:
                raise ValueError(f"{option} belongs to kind {kind}, not to {self.kind}: remove it")
            if not given and kind == self.kind:
                raise ValueError(f"kind {kind} needs {option}: add it")
        return self


class BatchSection(Section):
    """How a peer draws its examples for a step.

    Attributes:
        sampling: `poisson` draws each example by itself, with probability rate, or size / count, as the accountant's
            amplification needs it; `uniform` exactly size distinct ones; `shuffle` runs through each epoch's
            permutation; `full` takes all; `blocks` is one of count // size fixed batches.
        size: examples in a batch, on average for poisson; every sampling but full needs it, or a rate.
        rate: in place of size, of poisson alone: the probability of every example to be drawn, the same at every peer.
            A peer of J examples then draws rate J on average, by which its sums are divided; privacy is amplified
            alike at all peers, and a peer with few examples has the more noise in its mean.
        small_peers: what becomes of a peer that holds fewer examples than size: it is refused; or full, it takes all
            it holds in every step. Nothing is then amplified for it, so that it needs more noise for the same ε.
    """

    sampling: Annotated[str, catalogue.SAMPLINGS] = "poisson"
    size: Count | None = None
    rate: Annotated[float, Field(ge=1e-9, le=1)] | None = None
    small_peers: Literal["refused", "full"] = "refused"

    @model_validator(mode="after")
    def _size_or_rate(self) -> BatchSection:
        if self.rate is not None and self.sampling != "poisson":
            raise ValueError(
                f"rate belongs to sampling poisson, not to {self.sampling}: "
                + ("remove it" if self.sampling == "full" else "give size, or use poisson")
            )
        if self.sampling == "full" and self.size is not None:
            raise ValueError("sampling full takes every local example: remove size")
        if self.size is not None and self.rate is not None:
            raise ValueError("size and rate are two ways to say how much is drawn: give one")
        if self.sampling != "full" and self.size is None and self.rate is None:
            either = "size (examples a step) or rate" if self.sampling == "poisson" else "size (examples a step)"
            raise ValueError(f"sampling {self.sampling} needs {either}: add it")
        if self.small_peers == "full" and self.size is None:
            raise ValueError("small_peers is for peers that hold fewer than size, and there is no size: remove it")
        return self


def _dataset_tag(value: Any) -> str:
    return "named" if isinstance(value, str) else "own"


DatasetChoice = Annotated[
    Annotated[str, catalogue.DATASETS, Tag("named")] | Annotated[OwnSection, Tag("own")],
    Discriminator(_dataset_tag),
]


class DataSection(Section):
    """Which data, how much of it, and how it is dealt and drawn.

    Attributes:
        dataset: `digits` and `breast-cancer` are embedded; `npz` is a file of your own with the arrays x_train,
            y_train, x_test and y_test. A function of your own is called with "train" or "test", its arguments, and root
            where that is given; it returns x and y.
        root: the folder in which the data lie, or the .npz file, from where the command runs; nothing is downloaded.
            With `{peer}` in it, for the peer's number, each peer has a file of its own and nothing is dealt out.
        test: where the public test set lies, in place of root; needed where root has `{peer}`.
        classes: how many there are; left out, they are counted.
        vocabulary: how many tokens there are, where examples of your own are whole numbers 0..vocabulary-1; left out,
            they are numbers to reckon with.
        samples: how many training examples to take, at random; left out, all.
        test_samples: how many of the public test set to take; left out, all.
        partition: how the training examples are dealt out.
        batch: how a peer draws its examples.
    """

    dataset: DatasetChoice
    root: str | None = None
    test: str | None = None
    classes: Annotated[int, Field(ge=2)] | None = None
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    samples: Count | None = None
    test_samples: Count | None = None
    partition: PartitionSection = PartitionSection()
    batch: BatchSection

    @property
    def each_its_own(self) -> bool:
        """Whether each peer has a file of its own, so that nothing is dealt out."""
        return self.root is not None and PEER in self.root

    @model_validator(mode="after")
    def _own_files(self) -> DataSection:
        if not self.each_its_own:
            return self
        if self.test is None:
            raise ValueError(f"test is missing: where root has {PEER}, name the test set that all peers share")
        for key in ("samples", "partition"):
            if key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for one dataset that is dealt out, and root has {PEER}: remove one of them")
        return self


class ModelSection(Section):
    """The model every peer trains.

    Attributes:
        name: of a model that `privdec list` describes; left out where module is given.
        init: torch's own initial parameters, drawn by the seed, or all zero.
        bias: whether each output has one, of linear and softmax; left out, true.
        hidden: widths of the hidden layers, of mlp, text and the models named cnn; left out, [100] for mlp, [64] for
            cnn and none for text.
        activation: of mlp, text and the models named cnn; left out, relu.
        channels: of each convolution, of the models named cnn; left out, [16, 32] for cnn.
        kernel: side of each convolution in pixels, of the models named cnn; left out, 3 for cnn.
        pool: whether the largest of 2 x 2 pixels is kept after each convolution, of the models named cnn.
        groups: of channels that are normalised together, of resnet18-gn; left out, 32.
        width: channels of the first stage, of resnet18-gn; left out, 64; or numbers a token is turned into, of text;
            left out, 32.
        module: your own, as `package.module:factory`, imported from where the command runs.
        arguments: what the factory is called with, by name.
    """

    name: Annotated[str, catalogue.MODELS] | None = None
    init: Annotated[str, catalogue.INITS] = "default"
    bias: bool | None = None
    hidden: list[Count] | None = None
    activation: Annotated[str, catalogue.ACTIVATIONS] | None = None
    channels: list[Count] | None = None
    kernel: Count | None = None
    pool: bool | None = None
    groups: Count | None = None
    width: Count | None = None
    module: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_of_the_model(self) -> ModelSection:
        if (self.name is None) == (self.module is None):
            raise ValueError("give either a model's name, or module: package.module:factory")
        if self.module is None and self.arguments:
            raise ValueError("arguments belong to a module of your own: remove them, or give module")
        given, own = set(self._given()), MODEL_OPTIONS.get(self.name or "", ())
        for key in sorted(given - set(own)):
            takers = ", ".join(name for name, options in MODEL_OPTIONS.items() if key in options)
            raise ValueError(f"{key} belongs to {takers}, not to {self.name or self.module}: remove it")
        return self

    def _given(self) -> dict[str, Any]:
        every = {option for options in MODEL_OPTIONS.values() for option in options}
        return self.model_dump(include=every, exclude_none=True)

    def options(self) -> dict[str, Any]:
        """Return the options given for the model itself."""
        return self._given() if self.module is None else {"arguments": self.arguments}


Weights = Annotated[str, catalogue.WEIGHTS]


class TopologySection(Section):
    """Who can send to whom, and with which weights it is mixed.

    Attributes:
        name: of the graph; `privdec list` describes each, `server` is an average over the active peers.
        weights: auto is what the algorithm's theory needs: column-stochastic for push-sum; for gossip metropolis on an
            undirected graph, doubly-stochastic on a directed one.
        degree: neighbours of each peer, of random-regular and small-world.
        probability: of each edge, of erdos-renyi.
        rewire: the chance that an edge is moved, of small-world.
        edges: how many a round, of random-edges.
        file: of edge-list, a line `sender receiver` for each edge.
        directed: whether the file's edges go one way.
        rows: of torus; left out, as square as n_peers allows.
        cols: of torus.
        supergraph: the graph from which random-edges draws.
    """

    name: Annotated[str, catalogue.TOPOLOGIES] = "directed-exponential"
    weights: Weights = "auto"
    degree: Count | None = None
    probability: Fraction | None = None
    rewire: Annotated[float, Field(ge=0, le=1)] | None = None
    edges: Count | None = None
    file: str | None = None
    directed: bool | None = None
    rows: Count | None = None
    cols: Count | None = None
    supergraph: Annotated[str, catalogue.TOPOLOGIES] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options given for the graph itself."""
        return self.model_dump(exclude={"name", "weights"}, exclude_none=True)


class OwnTopologySection(OwnSection):
    """A graph of a user's own, and with which weights it is mixed.

    The function is called with n_peers and its arguments, and with the scenario's seed where it has a parameter of
    this name that the arguments leave out. It returns a networkx graph on the nodes 0 to n_peers - 1, for each peer a
    list of those it sends to, or a `flower_privdec.topology.Topology`.

    Attributes:
        weights: as for a named graph.
    """

    weights: Weights = "auto"

    def options(self) -> dict[str, Any]:
        """Return what the graph is built with."""
        return {"arguments": self.arguments}


TopologyChoice = Annotated[
    Annotated[TopologySection, Tag("named")] | Annotated[OwnTopologySection, Tag("own")], OWN_OR_NAMED
]


class ParticipationSection(Section):
    """Who is active in a round.

    Attributes:
        kind: `all`, or `uniform`: as many in every round, drawn without replacement.
        fraction: the share of the peers that is active, for kind uniform alone.
    """

    kind: Annotated[str, catalogue.PARTICIPATIONS] = "all"
    fraction: Fraction | None = None

    @model_validator(mode="after")
    def _fraction_of_uniform(self) -> ParticipationSection:
        if (self.kind == "uniform") != (self.fraction is not None):
            raise ValueError("kind uniform needs fraction, kind all takes none")
        return self


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

    rho_c: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    rho_mu: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    clip_norms: list[Positive] | None = None
    noise: list[Positive] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ScheduleSection:
        lists = self.clip_norms is not None or self.noise is not None
        if lists and (self.rho_c, self.rho_mu) != (1.0, 1.0):
            raise ValueError("give rho_c and rho_mu, or the lists clip_norms and noise, not both")
        return self


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
        c_2: the constant of PrivSGP-VR's eq. 11, for calibration paper, and of eq. 12, for `privdec plan`.
        ledger: a folder of ledgers that several runs share, so that ε counts all of them; left out, the ledger lies in
            the run's own folder and counts this run alone.
    """

    epsilon: PerPeer | None = None
    delta: Annotated[PerPeer, BeforeValidator(lambda value: _below_one(value))]
    clip_norm: PerPeer = 1.0
    schedule: ScheduleSection | None = None
    noise_multiplier: NonNegative | None = None
    calibration: Literal["rigorous", "paper"] = "rigorous"
    c_2: Positive = 1.0
    ledger: str | None = None

    @model_validator(mode="after")
    def _budget_or_noise(self) -> PrivacySection:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give epsilon (a budget the noise is solved for), noise_multiplier, or both")
        if self.calibration == "paper" and (self.epsilon is None or self.noise_multiplier is not None):
            raise ValueError("calibration paper computes the noise from epsilon: give epsilon, and no noise_multiplier")
        return self


def _below_one(value: Any) -> Any:
    """Refuse a delta of 1 or more, for one number or for a list."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(x, int | float) and x >= 1 for x in numbers):
        raise ValueError("must be < 1 (well below one over the number of examples)")
    return value


def _privacy_tag(value: Any) -> str:
    return "none" if isinstance(value, str) else "section"


PrivacyChoice = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[PrivacySection, Tag("section")],
    Discriminator(_privacy_tag),
]


class EvaluationSection(Section):
    """When the models are tried on the public test set, and a checkpoint is written.

    Attributes:
        every: how many rounds lie between two evaluations; one more is made at the end.
        peer_samples: test examples for each peer's own model; left out, all. The mean model has them all.
        private: what to do where there is privacy with figures on the peers' own labels, which no ε covers: withhold
            them, or ignore that and say so in the summary.
    """

    every: Count = 20
    peer_samples: Count | None = None
    private: Literal["withheld", "ignored"] = "withheld"


class ComputeSection(Section):
    """Where and how the numbers are computed.

    Attributes:
        device: auto is the GPU where torch has one.
        dtype: of parameters and gradients.
        threads: of torch; they change no number.
        generator: of the noise in simulation: fast needs the extra `fast`, auto takes it where it is installed.
        memory_mib: about how much temporary memory gradients may take; it changes no number.
    """

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    threads: Count = 1
    generator: Literal["auto", "fast", "torch"] = "auto"
    memory_mib: Annotated[int, Field(ge=16)] = 1024


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


class Scenario(Section):
    """One experiment, complete.

    Attributes:
        name: what to call the run; its results go to runs/NAME unless `--out` says otherwise.
        seed: decides partition, batches without privacy, the model's initial parameters and graphs that are drawn.
        n_peers: how many peers train; 1 only for local and dp-sgd.
        rounds: K.
        data: which data, and how they are dealt out and drawn.
        features: a fixed feature extractor in front of the model; left out, there is none.
        model: what every peer trains, and by which loss.
        algorithm: what peers do in a round; its name decides which keys there are.
        topology: the graph.
        participation: who is active in a round.
        privacy: `none`, or budget, clipping and noise.
        evaluation: when the models are tried on the public test set.
        compute: device, number type, threads and generator.
        plan: constants for `privdec plan`.
    """

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    n_peers: Count
    rounds: Count
    data: DataSection
    features: FeaturesSection | None = None
    task: TaskSection = Field(default_factory=lambda: TaskSection.model_validate({}))
    model: ModelSection
    algorithm: AlgorithmSection
    topology: TopologyChoice = TopologySection()
    participation: ParticipationSection = ParticipationSection()
    privacy: PrivacyChoice
    evaluation: EvaluationSection = EvaluationSection()
    compute: ComputeSection = ComputeSection()
    plan: PlanSection | None = None

    @model_validator(mode="after")
    def _one_number_a_peer(self) -> Scenario:
        clips = ("learning_rate", "initial_clip", "clip_norm")
        lists = {f"algorithm.{key}": getattr(self.algorithm, key, None) for key in clips}
        if isinstance(self.privacy, PrivacySection):
            for key in ("epsilon", "delta", "clip_norm"):
                lists[f"privacy.{key}"] = getattr(self.privacy, key)
        for key, value in lists.items():
            if isinstance(value, tuple) and len(value) != self.n_peers:
                raise ValueError(f"{key} lists {len(value)} numbers for n_peers={self.n_peers}: give one a peer")
        return self

    @model_validator(mode="after")
    def _one_schedule(self) -> Scenario:
        private = self.private
        if private is None or not isinstance(self.algorithm, DynSection):
            return self
        if private.schedule is not None:
            raise ValueError(f"privacy.schedule: {self.algorithm.name} has a schedule of its own; use privsgp with it")
        return self

    @model_validator(mode="after")
    def _blocks_go_together(self) -> Scenario:
        blocks = isinstance(self.algorithm, VRSection) and self.algorithm.table == "blocks"
        if blocks != (self.data.batch.sampling == "blocks"):
            raise ValueError("data.batch.sampling: blocks and algorithm.table blocks (of privsgp-vr) need each other")
        return self

    @model_validator(mode="after")
    def _a_graph_needs_two(self) -> Scenario:
        alone = self.algorithm.name in catalogue.ALONE
        if self.algorithm.name == "dp-sgd" and self.n_peers > 1:
            raise ValueError(
                f"n_peers={self.n_peers} must be 1 for dp-sgd, the centralized reference; use local for more"
            )
        if self.n_peers == 1 and not alone:
            raise ValueError(
                f"n_peers=1 must be >= 2 on the graph {self.topology.name}: "
                "one peer has nobody to exchange with; use algorithm local, or more peers"
            )
        return self

    @property
    def private(self) -> PrivacySection | None:
        """Return the privacy section, or None when there is no privacy."""
        return self.privacy if isinstance(self.privacy, PrivacySection) else None
