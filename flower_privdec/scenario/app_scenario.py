"""The scenario of peers that run a Flower app: all of a scenario but data, model and algorithm, which are the app's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator
from pydantic.types import Discriminator

from flower_privdec.scenario.fields import Count, Name, PathText, Positive, Section
from flower_privdec.scenario.loading import load_scenario, parse_model, read_text, read_yaml
from flower_privdec.scenario.located_file import LocatedFile
from flower_privdec.scenario.network_section import NetworkSection
from flower_privdec.scenario.schema import MOST_PEERS, MOST_ROUNDS, ParticipationSection, Scenario, Seed
from flower_privdec.scenario.shipped import find_scenario
from flower_privdec.scenario.topology_section import TopologyChoice, TopologySection

FORM = "a scenario for an app is a mapping of sections (name, n_peers, rounds, privacy, network, ...)"


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
    Annotated[Literal["none"], Tag("none")] | Annotated[AppPrivacySection, Tag("section")],
    Discriminator(lambda value: "none" if isinstance(value, str) else "section"),
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
        train_config: laid over what the ServerApp tells the train function.
        evaluate_config: what the evaluate function is told.
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

    @model_validator(mode="after")
    def _an_address_a_peer(self) -> AppScenario:
        peers = self.network.peers
        if peers is not None and len(peers) != self.n_peers:
            raise ValueError(
                f"network.peers lists {len(peers)} peers for n_peers={self.n_peers}: give each its address"
            )
        return self

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


def parse_app_scenario(text: str, *, where: str = "scenario", overrides: Iterable[str] = ()) -> AppScenario:
    """Read an app's scenario from YAML text; see `parse_scenario`."""
    return parse_model(AppScenario, text, form=FORM, where=where, overrides=overrides)


def load_app_scenario(path: Path, overrides: Iterable[str] = ()) -> AppScenario:
    """Read an app's scenario from a file; see `parse_scenario`."""
    return parse_app_scenario(read_text(find_scenario(path)), where=str(path), overrides=overrides)


def load_for_network(path: Path, overrides: Iterable[str] = ()) -> Scenario | AppScenario:
    """Read the scenario of a network's peers: an app's, where the file has no section data, model or algorithm."""
    file = find_scenario(path)
    sections = read_yaml(read_text(file), str(file))[0]
    load = load_scenario if {"data", "model", "algorithm"} & sections.keys() else load_app_scenario
    return load(file, overrides)
