"""A scenario made concrete: data, graph, model, algorithm and privacy, checked before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_privdec.algorithms import Algorithm, State, build_algorithm
from flower_privdec.cohort import Cohort, LearningRate
from flower_privdec.data import Dataset, PeerData, Sampler, load_dataset, partition
from flower_privdec.data.features import apply_features
from flower_privdec.errors import ScenarioError
from flower_privdec.gradients import GradientKernel, build_kernel, resolve_loss
from flower_privdec.memory import check_memory
from flower_privdec.mixing import Mixing
from flower_privdec.models import build_model, flatten
from flower_privdec.participation import Participation, build_participation
from flower_privdec.privacy.ledger import CohortLedger
from flower_privdec.privacy.plan import PrivacyPlan, build_plan
from flower_privdec.randomness import build_noise
from flower_privdec.scenario import Scenario
from flower_privdec.topology import build_topology

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    """Return the device a scenario asks for; refuse a GPU where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ScenarioError("compute.device='cuda' needs a GPU that torch can use and none is here; use cpu or auto")
    return torch.device(name)


def build_exchange(scenario: Scenario, algorithm: Algorithm) -> tuple[Mixing | None, Participation]:
    """Return the graph's mixing weights (None for an algorithm that exchanges nothing) and who is active."""
    participation = build_participation(
        scenario.participation.kind, scenario.n_peers, scenario.seed, fraction=scenario.participation.fraction
    )
    if algorithm.weights is None:
        return None, participation
    section = scenario.topology
    topology = build_topology(section.name, scenario.n_peers, seed=scenario.seed, **section.options())
    weights: str = section.weights
    if section.name == "server":
        weights = "server"
    elif weights == "auto" and algorithm.weights == "doubly-stochastic":
        weights = "doubly-stochastic" if topology.directed else "metropolis"
    elif weights == "auto":
        weights = algorithm.weights
    elif weights == "column-stochastic" and algorithm.weights == "doubly-stochastic":
        raise ScenarioError(
            f"topology.weights='column-stochastic' does not keep the mean of {algorithm.name}: "
            "use auto, metropolis or doubly-stochastic, or a push-sum algorithm such as privsgp"
        )
    return algorithm.exchange(topology, weights, participation, scenario.seed)


@dataclass(frozen=True)
class Experiment:
    """Everything a run of a scenario needs, for the whole network; building it writes nothing."""

    scenario: Scenario
    dataset: Dataset
    partition: list[np.ndarray]
    sampler: Sampler
    algorithm: Algorithm
    mixing: Mixing | None
    participation: Participation
    plan: PrivacyPlan | None
    kernel: GradientKernel
    module: torch.nn.Module
    initial: Tensor
    device: torch.device
    learning_rate: LearningRate

    @classmethod
    def build(cls, scenario: Scenario) -> Experiment:
        """Build all parts of a scenario.

        Raises:
            ScenarioError: when a part cannot be had or two parts do not fit.
        """
        device = resolve_device(scenario.compute.device)
        algorithm = build_algorithm(scenario.algorithm)
        mixing, participation = build_exchange(scenario, algorithm)
        dataset, parts, sampler = _build_data(scenario)
        plan = build_plan(scenario, scenario.private, sampler, participation) if scenario.private else None
        module = _build_module(scenario, dataset)
        dtype = DTYPES[scenario.compute.dtype]
        kernel = build_kernel(
            module.to(device, dtype),
            scenario.model.loss,
            dataset.input_shape,
            memory_bytes=scenario.compute.memory_mib << 20,
        )
        algorithm.check_model(kernel)
        rate = np.broadcast_to(np.asarray(scenario.algorithm.learning_rate, dtype=np.float64), (scenario.n_peers,))
        return cls(
            scenario=scenario,
            dataset=dataset,
            partition=parts,
            sampler=sampler,
            algorithm=algorithm,
            mixing=mixing,
            participation=participation,
            plan=plan,
            kernel=kernel,
            module=module,
            initial=flatten(module).to(device, dtype),
            device=device,
            learning_rate=LearningRate(rate, scenario.algorithm.learning_rate_decay, scenario.rounds),
        )

    def cohort(
        self, peers: np.ndarray | None = None, ledger_dir: Path | None = None, run_id: str = "unrecorded"
    ) -> Cohort:
        """Return the cohort that hosts some peers (all by default).

        Args:
            peers: global ids, or None for the whole network.
            ledger_dir: where the peers' ledgers lie; None keeps no ledger (for tests and timings).
            run_id: names this run in the ledger, so that a resumed run is not charged twice.

        Raises:
            ScenarioError: when their state does not fit into free memory.
        """
        scenario = self.scenario
        peers = np.arange(scenario.n_peers) if peers is None else np.sort(np.asarray(peers, dtype=np.int64))
        check_memory(self, peers)
        ledger = None
        if self.plan is not None and ledger_dir is not None:
            accounts = [self.plan.accounts[peer] for peer in peers]
            ledger = CohortLedger.open(ledger_dir, self.dataset.fingerprint, run_id, accounts)
        return Cohort(
            peers=peers,
            n_peers=scenario.n_peers,
            initial=self.initial,
            kernel=self.kernel,
            data=PeerData(
                self.dataset,
                self.partition,
                self.sampler,
                self.device,
                self.initial.dtype,
                peers=None if len(peers) == scenario.n_peers else peers,
            ),
            mixing=self.mixing,
            participation=self.participation,
            noise=build_noise(scenario.compute.generator, scenario.seed, scenario.n_peers, self.device),
            learning_rate=self.learning_rate,
            steps_per_round=self.algorithm.steps_per_round,
            plan=self.plan,
            ledger=ledger,
        )

    def initial_state(self, cohort: Cohort) -> State:
        """Return the state before round 0."""
        return State(peers=cohort.peers, rows=self.algorithm.initial(cohort))


def _build_data(scenario: Scenario) -> tuple[Dataset, list[np.ndarray], Sampler]:
    section = scenario.data
    dataset = load_dataset(
        section.dataset,
        section.root,
        samples=section.samples,
        test_samples=section.test_samples,
        seed=scenario.seed,
    )
    options = section.partition.model_dump(exclude={"kind"}, exclude_none=True)
    labels = dataset.y_train.numpy()
    parts = partition(labels, scenario.n_peers, section.partition.kind, scenario.seed, **options)
    sizes = np.array([len(part) for part in parts])
    sampler = Sampler(section.batch.sampling, section.batch.size, sizes, scenario.seed)
    if scenario.features is not None:
        dataset = apply_features(dataset, scenario.features)
    return dataset, parts, sampler


def _build_module(scenario: Scenario, dataset: Dataset) -> torch.nn.Module:
    section = scenario.model
    outputs = resolve_loss(section.loss).n_outputs(dataset.n_classes)
    name = "linear" if section.name == "softmax" else section.name
    return build_model(name, dataset.input_shape, outputs, seed=scenario.seed, init=section.init, **section.options())
