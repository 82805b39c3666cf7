"""What is timed: four workloads on synthetic data, and the engine as a scenario would build it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.algorithms import build_algorithm
from flower_privdec.core import Algorithm, State
from flower_privdec.core.cohort import Cohort, LearningRate
from flower_privdec.core.validation import Validation
from flower_privdec.data import Examples, PeerData, Sampler
from flower_privdec.engine.engine import Engine
from flower_privdec.gradients import build_kernel
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation, build_participation
from flower_privdec.graph.topology import build_topology
from flower_privdec.models import build_model, flatten, parameter_count
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.privacy.noise import NoiseSource, PairSecrets, build_noise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.rows.keys import keyed_generator, seed_keys
from flower_privdec.scenario.algorithm_sections import ALGORITHMS
from flower_privdec.scenario.sections import BatchSection

SEED = 1
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.05
FOREVER = 2**31  # rounds; nothing of that length is made
PAIR_STRENGTH = 4.0
PAIR_ROUNDS = 20_000


@dataclass(frozen=True)
class Workload:
    """One line of the benchmark: a network and its model, every example clipped, Gaussian noise, push-sum.

    Attributes:
        name: what the command calls it.
        n_peers, batch: peers, and the examples of each in a round (sampled uniformly).
        shape, n_classes: of the examples.
        model, options, loss: what every peer trains.
        examples: how many each peer holds.
        sampling: how a batch is drawn.
    """

    name: str
    n_peers: int
    batch: int
    shape: tuple[int, ...]
    n_classes: int
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    loss: str = "cross-entropy"
    examples: int = 100
    sampling: Literal["uniform", "blocks"] = "uniform"

    def resized(self, n_peers: int) -> Workload:
        """Return the same work for another number of peers."""
        return replace(self, n_peers=n_peers)

    def describe(self) -> str:
        """Say in a few words what it is."""
        sizes = self.options.get("hidden")
        if sizes:
            model = "-".join(map(str, [int(np.prod(self.shape)), *sizes, self.n_classes]))
        else:
            model = self.loss
        return f"{self.n_peers} peers, {self.model} {model}, batch {self.batch}"


IMAGES = {"shape": (1, 28, 28), "n_classes": 10}
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W1", 50, 1, model="mlp", options={"hidden": [100]}, **IMAGES),  # type: ignore[arg-type]
        Workload("W2", 16, 32, model="mlp", options={"hidden": [200]}, **IMAGES),  # type: ignore[arg-type]
        Workload("W3", 20, 32, model="cnn-small", **IMAGES),  # type: ignore[arg-type]
        Workload("W4", 100, 1, (1999,), 2, model="linear", loss="hinge"),  # 1,999 weights and a bias
    )
}


@dataclass(frozen=True)
class Setup:
    """A workload with its data, model and batches, from which the engine and its baselines are built.

    Attributes:
        data: the peers' examples, sampled as the engine samples them.
    """

    workload: Workload
    examples: Examples
    module: nn.Module
    data: PeerData
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def build(cls, workload: Workload, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Setup:
        """Make the data and the parts all contestants share."""
        examples = synthetic(workload)
        outputs = 1 if workload.loss == "hinge" else workload.n_classes
        module = build_model(workload.model, workload.shape, outputs, seed=SEED, **workload.options)
        return cls(
            workload=workload,
            examples=examples,
            module=module.to(device, dtype),
            data=peer_data(workload, examples, np.arange(workload.n_peers), device, dtype),
            device=torch.device(device),
            dtype=dtype,
        )

    @cached_property
    def mixing(self) -> Mixing:
        """Return push-sum weights on the one-peer directed exponential graph."""
        return Mixing(build_topology("directed-exponential", self.workload.n_peers), "column-stochastic")

    @property
    def d(self) -> int:
        """Return the number of parameters."""
        return parameter_count(self.module)

    def engine(self, noise: NoiseSource | None = None) -> Engine:
        """Return the engine that runs PrivSGP on this workload.

        Args:
            noise: where the noise comes from; by default that of a simulation.
        """
        algorithm = build_algorithm(ALGORITHMS.section("privsgp", learning_rate=LEARNING_RATE))
        n_peers = self.workload.n_peers
        everybody = build_participation("all", n_peers)
        protection = constant_protection(n_peers)
        return self.engine_of(algorithm, self.mixing, everybody, LEARNING_RATE, protection, noise)

    def cancelling_engine(self) -> Engine:
        """Return the same engine with noise that cancels, for which each peer has secrets with all others."""
        engine = self.engine()
        n = self.workload.n_peers
        ends = np.stack(np.triu_indices(n, 1), axis=1)
        needed = np.full((PAIR_ROUNDS, n), LEARNING_RATE * CLIP_NORM * NOISE_MULTIPLIER / self.workload.batch)
        plan = PairPlan(ends, 0, PAIR_STRENGTH, needed, np.ones(n), same_rates=True)
        engine.cohort.mechanism = CancellingNoise(plan)
        engine.cohort.secrets = PairSecrets(seed_keys(SEED, range(n)))
        return engine

    def engine_of(
        self,
        algorithm: Algorithm,
        mixing: Mixing | None,
        participation: Participation,
        rate: float | LearningRate,
        protection: Protection | None = None,
        noise: NoiseSource | None = None,
        validation: Validation | None = None,
    ) -> Engine:
        """Return the engine that runs an algorithm on this workload, by default at a constant learning rate."""
        n = self.workload.n_peers
        if isinstance(rate, float):
            rate = LearningRate(np.full(n, rate), 0.0, FOREVER)
        cohort = Cohort(
            peers=np.arange(n),
            n_peers=n,
            initial=flatten(self.module),
            kernel=build_kernel(
                self.module, self.workload.loss, self.workload.shape, single_example=self.workload.batch == 1
            ),
            data=self.data,
            mixing=mixing,
            participation=participation,
            noise=noise or build_noise(seed_keys(SEED, range(n)), self.device),
            learning_rate=rate,
            steps_per_round=algorithm.steps_per_round,
            protection=protection,
            validation=validation,
        )

        return Engine(algorithm, cohort, State(cohort.peers, rows=algorithm.initial(cohort)))


def constant_protection(n_peers: int) -> Protection:
    """Return the same clip norm and noise for every peer and round; no peer is charged."""
    ones = np.broadcast_to(1.0, (FOREVER, n_peers))
    noise = np.broadcast_to(NOISE_MULTIPLIER, ones.shape)
    kinds = ({"gradient": 1.0},)
    kind_of = np.broadcast_to(0, (FOREVER,))
    return Protection(np.broadcast_to(CLIP_NORM, ones.shape), noise, (), (None,) * n_peers, "none", kinds, kind_of)


def peer_data(
    workload: Workload, examples: Examples, peers: np.ndarray, device: torch.device | str, dtype: torch.dtype
) -> PeerData:
    """Return the examples of some peers, sampled as the engine samples them."""
    own = replace(examples, parts=tuple(examples.parts[peer] for peer in peers))
    keys = dict.fromkeys(peers.tolist(), SEED)
    section = BatchSection(sampling=workload.sampling, size=workload.batch)
    return PeerData(own, Sampler(section, own.sizes, keys, peers), device, dtype)


def synthetic(workload: Workload) -> Examples:
    """Return random examples of the workload's shape."""
    generator = keyed_generator(SEED, "benchmark")
    count = workload.n_peers * workload.examples
    x = torch.from_numpy(generator.standard_normal((count, *workload.shape), dtype=np.float32))
    y: Tensor = torch.arange(count) % workload.n_classes
    return Examples(x, y, tuple(np.split(np.arange(count), workload.n_peers)))
