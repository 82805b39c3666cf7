"""A scenario made concrete: data, graph, model, algorithm and privacy, checked before any work starts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_privdec.algorithms import Algorithm, State, build_algorithm
from flower_privdec.algorithms.cohort import Cohort, LearningRate
from flower_privdec.data import Dataset, PeerData, Sampler, load_dataset, partition
from flower_privdec.data.features import apply_features
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment.memory import check_memory
from flower_privdec.experiment.number_range import check_number_range
from flower_privdec.experiment.run_key import environment, own_keys, run_id, shared_secret
from flower_privdec.gradients import GradientKernel, build_kernel, resolve_loss
from flower_privdec.mixing import Mixing
from flower_privdec.models import build_model, flatten
from flower_privdec.participation import Participation, build_participation
from flower_privdec.privacy.declared import Drawing
from flower_privdec.privacy.ledger import CohortLedger
from flower_privdec.privacy.ledger_format import RunName
from flower_privdec.privacy.protection import Protection, build_protection
from flower_privdec.rows import build_noise, resolve_generator
from flower_privdec.scenario import Scenario, numbers_hash
from flower_privdec.topology import build_topology

Budget = tuple[float, float]  # ε and δ
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
    """Everything a run of a scenario needs, for the whole network; building it writes nothing.

    Attributes:
        keys: what each peer's noise and batches are drawn from, see `run_key`.
        run: what ledgers and checkpoints call the run.
        deployed: whether batches and noise are the operating system's, and never the same twice.
    """

    scenario: Scenario
    dataset: Dataset
    partition: list[np.ndarray]
    sampler: Sampler
    algorithm: Algorithm
    mixing: Mixing | None
    participation: Participation
    plan: Protection | None
    kernel: GradientKernel
    module: torch.nn.Module
    initial: Tensor
    device: torch.device
    learning_rate: LearningRate
    keys: Mapping[int, bytes]
    run: RunName
    deployed: bool = False

    @classmethod
    def build(cls, scenario: Scenario, secret: bytes | None = None) -> Experiment:
        """Build all parts of a scenario.

        Args:
            secret: of a deployed peer, which nobody else knows: its run's name follows from it, and its batches and
                noise come from the operating system. None is a simulation, whose numbers can be drawn again.

        Raises:
            ScenarioError: when a part cannot be had or two parts do not fit.
        """
        device = resolve_device(scenario.compute.device)
        algorithm = build_algorithm(scenario.algorithm)
        mixing, participation = build_exchange(scenario, algorithm)
        dataset, parts = _build_data(scenario)
        module, dtype = _build_module(scenario, dataset), DTYPES[scenario.compute.dtype]
        initial = flatten(module).to(device, dtype)
        keys, run = _name_run(scenario, dataset, parts, module, initial, secret)
        sampler = _build_sampler(scenario, parts, keys)
        plan = None
        if scenario.private is not None:
            plan = build_protection(scenario, scenario.private, algorithm, drawings_of(sampler), participation)
        kernel = build_kernel(
            module.to(device, dtype),
            scenario.model.loss,
            dataset.input_shape,
            memory_bytes=scenario.compute.memory_mib << 20,
        )
        algorithm.check_model(kernel)
        base = np.broadcast_to(np.asarray(scenario.algorithm.learning_rate, dtype=np.float64), (scenario.n_peers,))
        rate = LearningRate(base, scenario.algorithm.learning_rate_decay, scenario.rounds)
        if plan is not None:
            check_number_range(plan, rate, sampler.partition_sizes, sampler.normalizer)
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
            initial=initial,
            device=device,
            learning_rate=rate,
            keys=keys,
            run=run,
            deployed=secret is not None,
        )

    def cohort(
        self,
        peers: np.ndarray | None = None,
        ledger_dir: Path | None = None,
        budget: Budget | None = None,
        start: int = 0,
    ) -> Cohort:
        """Return the cohort that hosts some peers (all by default).

        Args:
            peers: global ids, or None for the whole network.
            ledger_dir: where the ledger lies; None keeps none (for tests and timings).
            budget: ε and δ to hold the ledger to in place of the scenario's.
            start: the step from which a deployed peer goes on: what it draws from there is new, examples and noise,
                and paid for anew.

        Raises:
            ScenarioError: when their state does not fit into free memory.
            BudgetError: when the ledger cannot be trusted or is in use.
        """
        scenario = self.scenario
        peers = np.arange(scenario.n_peers) if peers is None else np.sort(np.asarray(peers, dtype=np.int64))
        check_memory(self, peers)
        ledger = None if ledger_dir is None else self._open_ledger(peers, ledger_dir, budget, start)
        return Cohort(
            peers=peers,
            n_peers=scenario.n_peers,
            initial=self.initial,
            kernel=self.kernel,
            data=PeerData(
                self.dataset,
                self.partition,
                self.sampler.afresh() if self.deployed else self.sampler,
                self.device,
                self.initial.dtype,
                peers=None if len(peers) == scenario.n_peers else peers,
            ),
            mixing=self.mixing,
            participation=self.participation,
            noise=build_noise("system" if self.deployed else scenario.compute.generator, self.keys, self.device),
            learning_rate=self.learning_rate,
            steps_per_round=self.algorithm.steps_per_round,
            plan=self.plan,
            ledger=ledger,
            apart=self.deployed and self.plan is not None,
        )

    def _open_ledger(self, peers: np.ndarray, folder: Path, budget: Budget | None, start: int) -> CohortLedger | None:
        if self.plan is None:
            return None
        accounts = [self.plan.accounts[peer] for peer in peers]
        if budget is not None:
            accounts = [replace(account, budget=budget[0], delta=budget[1]) for account in accounts]
        if not self.deployed:
            return CohortLedger.open(folder, self.dataset.name, self.run, accounts)
        fresh = replace(self.run, id=secrets.token_hex(16))
        return CohortLedger.open(folder, self.dataset.name, fresh, accounts, block=1, fresh=True, start=start)

    def initial_state(self, cohort: Cohort) -> State:
        """Return the state before round 0."""
        return State(peers=cohort.peers, rows=self.algorithm.initial(cohort))


def _build_data(scenario: Scenario) -> tuple[Dataset, list[np.ndarray]]:
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
    return dataset if scenario.features is None else apply_features(dataset, scenario.features), parts


def _name_run(
    scenario: Scenario,
    dataset: Dataset,
    parts: list[np.ndarray],
    module: torch.nn.Module,
    initial: Tensor,
    secret: bytes | None,
) -> tuple[dict[int, bytes], RunName]:
    """Return every peer's key, and what ledgers call the run; without privacy there is nothing to keep apart."""
    generator = "system" if secret else resolve_generator(scenario.compute.generator, initial.device)
    made_with = environment(generator, initial.device)
    decided = numbers_hash(scenario)
    if scenario.private is None:
        return {}, RunName(decided[:32], decided, made_with)
    factory = scenario.model.module
    shared = shared_secret(decided, made_with, dataset, module, initial, factory) + (secret or b"")
    keys = own_keys(shared, dataset, dict(enumerate(parts)))
    return keys, RunName(run_id(keys), decided, made_with)


def _build_sampler(scenario: Scenario, parts: list[np.ndarray], keys: Mapping[int, bytes]) -> Sampler:
    """Return the sampler, keyed by the run where there is privacy; else by the seed, whatever is run with it."""
    batch, sizes = scenario.data.batch, np.array([len(part) for part in parts])
    seeds = dict.fromkeys(range(scenario.n_peers), scenario.seed)
    return Sampler(batch.sampling, batch.size, sizes, seeds if scenario.private is None else keys)


def drawings_of(sampler: Sampler) -> list[Drawing]:
    """Return how each peer draws its examples, as what its steps release depends on it."""
    facts = zip(
        sampler.sampling_rate.tolist(), sampler.partition_sizes.tolist(), sampler.normalizer.tolist(), strict=True
    )
    return [Drawing(sampler.kind, rate, size, batch) for rate, size, batch in facts]


def _build_module(scenario: Scenario, dataset: Dataset) -> torch.nn.Module:
    section = scenario.model
    outputs = resolve_loss(section.loss).n_outputs(dataset.n_classes)
    name = "linear" if section.name == "softmax" else section.name
    return build_model(name, dataset.input_shape, outputs, seed=scenario.seed, init=section.init, **section.options())
