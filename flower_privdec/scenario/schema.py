"""The whole scenario, of a simulation or of peers that run a Flower app, and the rules across its sections."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import Field, PrivateAttr, Tag, model_validator

from flower_privdec import catalogue
from flower_privdec.common.user_code import Given, find_given, is_given, raised_at
from flower_privdec.errors import RAISED_BY_USERS, PrivdecError, ScenarioError
from flower_privdec.scenario.findings import LocatedFile
from flower_privdec.scenario.sections import (
    SECTION_OR_NONE,
    AlgorithmSection,
    Count,
    DataSection,
    DynSection,
    FeaturesSection,
    Fraction,
    ModelSection,
    Name,
    NetworkSection,
    NonNegative,
    PathText,
    PDSLSection,
    Positive,
    PrivacyChoice,
    PrivacySection,
    Section,
    TaskSection,
    TopologyChoice,
    TopologySection,
    VRSection,
    own_modules,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
AnyScenario = TypeVar("AnyScenario", "Scenario", "AppScenario")
MOST_PEERS, MOST_ROUNDS = 1_000_000, 1_000_000_000


class ParticipationSection(Section):
    """Who is active in a round.

    Attributes:
        kind: `all`; `uniform`: as many in every round, drawn without replacement; or `edges`: the ends of some edges of
            the topology, drawn without replacement, over which alone they exchange.
        fraction: the share of the peers that is active, for kind uniform alone.
        count: how many edges are drawn in a round, for kind edges alone.
    """

    kind: Annotated[str, catalogue.PARTICIPATIONS] = "all"
    fraction: Fraction | None = None
    count: Count | None = None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> ParticipationSection:
        for kind, key in (("uniform", "fraction"), ("edges", "count")):
            if (self.kind == kind) != (getattr(self, key) is not None):
                raise ValueError(f"kind {kind} needs {key}, the other kinds take none")
        return self


class EvaluationSection(Section):
    """When the models are tried on the public test set, and a checkpoint is written.

    Attributes:
        every: how many rounds lie between two evaluations; one more is made at the end.
        peer_samples: test examples for each peer's own model; left out, all. The mean model has them all.
        private: what to do where there is privacy with figures on the peers' own examples, which no ε covers: withhold
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
        threads: of torch in each product; they change no number.
        workers: processes that share the peers of a run on a CPU; they change no number. auto takes the cores that
            this process may use, and as many as pay: small models stay in one process.
        memory_mib: about how much temporary memory gradients may take; it changes no number.
        generator: where a simulation draws noise and batches from. Left out: from keys, so that the run can be repeated
            and its models must not be published under its ε. system: from the operating system, as deployed peers do;
            its models may be published under their ε, no other run repeats it, and a resumed run is charged again for
            the steps that it takes again. comparable: from keys that are equal in all runtimes, to compare their
            trajectories; else a runtime that rounds otherwise has other keys.
    """

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    memory_mib: Annotated[int, Field(ge=16)] = 1024
    generator: Literal["comparable", "system"] | None = None

    @model_validator(mode="after")
    def _threads_or_workers(self) -> ComputeSection:
        if self.workers != "auto" and self.workers > 1 and self.threads > 1:
            raise ValueError(
                f"workers={self.workers} have one thread each, not threads={self.threads}: leave threads out"
            )
        return self


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
        data: which examples are taken and how they are dealt out to the peers.
        model: the initial parameters.
        run: all that happens then: graphs that are drawn, who is active, batches and noise. With privacy, batches and
            noise follow from everything that decides the run's numbers, the other two seeds too.
    """

    data: Seed | None = None
    model: Seed | None = None
    run: Seed | None = None


def _an_address_a_peer(scenario: AnyScenario) -> AnyScenario:
    peers = scenario.network.peers
    if peers is not None and len(peers) != scenario.n_peers:
        raise ValueError(
            f"network.peers lists {len(peers)} peers for n_peers={scenario.n_peers}: give each its address"
        )
    return scenario


class Scenario(LocatedFile):
    """One experiment, complete.

    Attributes:
        name: what to call the run; its results go to runs/NAME unless `--out` says otherwise.
        seed: of all that is drawn, where seeds says no other.
        seeds: one for each kind of draws, so that one of them can vary and the others stay.
        n_peers: how many peers train; 1 only for local and dp-sgd.
        rounds: K.
        data: which data, and how they are dealt out and drawn.
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
        network: where real peers are, and how long they wait; a simulation uses none of it.
    """

    name: Name
    seed: Seed = 1
    seeds: SeedsSection | None = None
    n_peers: Annotated[int, Field(ge=1, le=MOST_PEERS)]
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
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
    network: NetworkSection = NetworkSection()

    @model_validator(mode="before")
    @classmethod
    def _loss_of_dual_averaging(cls, data: Any) -> Any:
        """Take the loss that a section of dual averaging names for the task's, where there is one."""
        algorithm = data.get("algorithm") if isinstance(data, dict) else None
        if not isinstance(algorithm, dict) or "loss" not in algorithm or algorithm.get("name") not in catalogue.DUAL:
            return data
        loss, task = algorithm["loss"], data.get("task") or {}
        if not isinstance(task, dict) or task.get("loss", loss) != loss:
            raise ValueError(f"algorithm.loss={loss!r} is another way to write task.loss, which differs: give one")
        rest = {key: value for key, value in algorithm.items() if key != "loss"}
        return {**data, "algorithm": rest, "task": {**task, "loss": loss}}

    _given: tuple[Given, ...] = PrivateAttr(default=())  # kept for as long as the scenario is

    def model_post_init(self, context: Any) -> None:
        """Keep the parts that were given as Python objects."""
        objects = (find_given(module) for _, module in own_modules(self))
        self._given = tuple(part for part in objects if part is not None)

    @property
    def given(self) -> tuple[Given, ...]:
        """The parts that were given as Python objects."""
        return self._given

    @model_validator(mode="after")
    def _given_data_are_counted_under_a_name(self) -> Scenario:
        ledger = self.private is not None and self.private.ledger is not None
        dataset = self.data.dataset
        if ledger and self.data.source is None and not isinstance(dataset, str) and is_given(dataset.module):
            raise ValueError(
                "data.source is missing: name the source of the data that are given, the same name in every run over "
                "them, under which privacy.ledger counts what is spent"
            )
        return self

    @model_validator(mode="after")
    def _system_noise_needs_privacy(self) -> Scenario:
        if self.compute.generator == "system" and self.private is None:
            raise ValueError("compute.generator=system is for noise, and privacy is none: leave generator out")
        return self

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
    def _a_peer_a_worker(self) -> Scenario:
        workers = self.compute.workers
        if workers != "auto" and workers > self.n_peers:
            raise ValueError(
                f"compute.workers={workers} must be at most n_peers={self.n_peers}: a worker hosts peers; use auto"
            )
        return self

    _addresses = model_validator(mode="after")(_an_address_a_peer)

    @model_validator(mode="after")
    def _one_schedule(self) -> Scenario:
        private = self.private
        if private is None or not isinstance(self.algorithm, DynSection):
            return self
        if private.schedule is not None:
            raise ValueError(f"privacy.schedule: {self.algorithm.name} has a schedule of its own; use privsgp with it")
        return self

    @model_validator(mode="after")
    def _phi_min_is_of_pdsl(self) -> Scenario:
        private, pdsl = self.private, isinstance(self.algorithm, PDSLSection)
        if private is None:
            return self
        needed = pdsl and private.calibration == "paper"
        if needed and private.phi_min is None:
            raise ValueError(
                "privacy.phi_min is missing: calibration paper of pdsl is eq. 27, which divides by φ̂_min, and eq. 19 "
                "makes that 0; give the value to pretend, or use calibration rigorous"
            )
        if private.phi_min is not None and not needed:
            raise ValueError("privacy.phi_min is of PDSL's eq. 27, for calibration paper with pdsl alone: remove it")
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
                "one peer has no neighbor to exchange with; use algorithm local, or more peers"
            )
        return self

    def seed_of(self, draws: Literal["data", "model", "run"]) -> int:
        """Return the seed of one kind of draws."""
        own: int | None = getattr(self.seeds, draws, None)
        return self.seed if own is None else own

    def all_seeds(self) -> dict[str, int]:
        """Return the seed of every kind of draws."""
        return {"data": self.seed_of("data"), "model": self.seed_of("model"), "run": self.seed_of("run")}

    @property
    def private(self) -> PrivacySection | None:
        """Return the privacy section, or None when there is no privacy."""
        return self.privacy if isinstance(self.privacy, PrivacySection) else None


class AppPrivacySection(Section):
    """What protects a whole peer; `privacy: none` protects nothing.

    Attributes:
        clip_norm: C, the most that one round's update moves the model, in Euclidean norm.
        noise_multiplier: the noise's standard deviation over the clip norm; left out, it is solved for epsilon.
        epsilon: ε, what a peer's ledger is held to over all rounds and runs; left out, there is no limit.
        delta: δ, well below one over the number of peers.
        ledger: a folder of ledgers that several runs share; left out, the ledger lies in the peer's own folder.
    """

    clip_norm: Positive
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)]
    ledger: PathText | None = None

    @model_validator(mode="after")
    def _budget_or_noise(self) -> AppPrivacySection:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give epsilon (a budget the noise is solved for), noise_multiplier, or both")
        return self


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
        network: where the peers are, and how long they wait.
    """

    name: Name
    seed: Seed = 1
    n_peers: Annotated[int, Field(ge=2, le=MOST_PEERS)]
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
    topology: TopologyChoice = TopologySection()
    participation: ParticipationSection = ParticipationSection()
    privacy: AppPrivacyChoice
    evaluation: AppEvaluationSection = AppEvaluationSection()
    compute: AppComputeSection = AppComputeSection()
    train_config: dict[str, Any] = Field(default_factory=dict)
    evaluate_config: dict[str, Any] = Field(default_factory=dict)
    run_config: dict[str, Any] = Field(default_factory=dict)
    initial: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    network: NetworkSection = NetworkSection()

    _addresses = model_validator(mode="after")(_an_address_a_peer)

    def seed_of(self, draws: str) -> int:
        """Return the seed, which is that of all draws."""
        return self.seed

    def all_seeds(self) -> dict[str, int]:
        """Return the seeds of all draws."""
        return {"run": self.seed}

    @property
    def private(self) -> AppPrivacySection | None:
        """Return the privacy section, or None when there is no privacy."""
        return self.privacy if isinstance(self.privacy, AppPrivacySection) else None

    @property
    def given(self) -> tuple[()]:
        """Return the parts that were given as Python objects: none."""
        return ()


def placed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Add the line of the file to a function's errors about the scenario that its first argument is or has.

    An error raised by a user's part is reported in one line, without its message, which may reveal data.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first: Any = args[0]
        scenario: LocatedFile = first if isinstance(first, LocatedFile) else first.scenario
        with scenario.located():
            try:
                return function(*args, **kwargs)
            except PrivdecError:
                raise
            except RAISED_BY_USERS as error:
                own = [f"{key}={module!r}" for key, module in own_modules(scenario)]
                if not own or isinstance(error, OSError):
                    raise
                raise ScenarioError(f"{' or '.join(own)} raised {raised_at(error)}; mend the code") from error

    return call
