"""A task for every algorithm of the catalogue: a network, a model and settings like those of its paper, made small.

    TASKS           one for each algorithm, and one more for each further kind of table of PrivSGP-VR
    Task.engine     the engine that runs it, as a scenario would build it, at a constant clip norm and noise
    Task.floor      what a round of it cannot do without

A floor is measured in the same run. It is the time of the matrix products, of the noise, and of one copy of each row
that a round changes, where a row is the d numbers of one peer under one name of the state. So it knows nothing of what
an algorithm has to compute number by number beside that, and of Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from flower_privdec.algorithms import build_algorithm
from flower_privdec.core.validation import Validation
from flower_privdec.engine.engine import Engine
from flower_privdec.graph.participation import build_participation
from flower_privdec.graph.topology import build_topology
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.privacy.noise import NoiseSource
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario.algorithm_sections import ALGORITHMS
from flower_privdec.tasks.losses import resolve_loss
from tools.bench import limit
from tools.bench.timing import Work
from tools.bench.workloads import CLIP_NORM, FOREVER, IMAGES, NOISE_MULTIPLIER, SEED, WORKLOADS, Setup, Workload

RATE = 0.05
PLANNED = 2**15  # rounds of a schedule, far more than are timed


@dataclass(frozen=True)
class Floor:
    """What one unit of rounds takes at least, counted.

    Attributes:
        models: how many rows take gradients together, each with a batch of its own.
        copied: how many rows the rounds change, each counted once for every time that it is changed.
        steps: how often they take them.
        draws: how often they are noised; None for as often.
        full: how many examples of each peer are used once more, in a full gradient.
        tried: how many models are tried on the validation examples.
    """

    models: int
    copied: int
    steps: int = 1
    draws: int | None = None
    full: int = 0
    tried: int = 0


@dataclass(frozen=True)
class Task:
    """What one line of the table is about.

    Attributes:
        title: of the line, and what the command calls it.
        algorithm: its name in the catalogue.
        workload: peers, model and batch.
        floor: what a unit takes at least.
        settings: keys of the algorithm's section.
        topology: the graph's name.
        active: how many peers take part in a round; None for all.
        private: whether examples are clipped one by one and steps are noised.
        decay: ρ_c and ρ_μ, by which clip norm and noise change over the rounds.
        unit: the rounds that are timed together.
        validation: the public examples on which models are tried.
        reason: why it is under 3 times the loop or over 2 times its floor, where it is.
    """

    title: str
    algorithm: str
    workload: Workload
    floor: Floor
    settings: Mapping[str, Any] = field(default_factory=dict)
    topology: str = "ring"
    active: int | None = None
    private: bool = True
    decay: tuple[float, float] = (1.0, 1.0)
    unit: int = 1
    validation: int = 0
    reason: str = ""

    def small(self) -> Task:
        """Return the same task for fewer peers, to be compared in float64."""
        n = min(self.workload.n_peers, 6)
        return replace(
            self, workload=self.workload.resized(n), active=None if self.active is None else min(self.active, 2)
        )

    def setup(self, dtype: torch.dtype = torch.float32) -> Setup:
        """Return its data and model."""
        return Setup.build(self.workload, "cpu", dtype)

    def describe(self) -> str:
        """Say in a few words what it is."""
        some = "" if self.active is None else f"{self.active} active of "
        return f"{some}{self.workload.describe()}, {self.topology}{'' if self.private else ', not private'}"

    def engine(self, setup: Setup, noise: NoiseSource | None = None) -> Engine:
        """Return the engine that runs it.

        Args:
            noise: where the noise comes from; by default that of a simulation.
        """
        n = self.workload.n_peers
        section_class = ALGORITHMS[self.algorithm].Section
        settings = dict(self.settings)
        if "learning_rate" in section_class.model_fields:
            settings["learning_rate"] = RATE
        algorithm = build_algorithm(ALGORITHMS.section(self.algorithm, **settings))

        everybody = build_participation("all", n)
        participation = everybody
        if self.active is not None:
            participation = build_participation("uniform", n, SEED, self.active / n)

        mixing = None
        if algorithm.weights is not None:
            graph = build_topology(self.topology, n)
            weights: str = algorithm.weights
            if weights == "doubly-stochastic" and not graph.directed:
                weights = "metropolis"  # as in a scenario that names none
            mixing, participation = algorithm.exchange(graph, weights, participation, SEED)
        return setup.engine_of(
            algorithm,
            mixing,
            participation,
            algorithm.step_sizes(n, FOREVER),
            self.protection(),
            noise,
            self.public(setup),
        )

    def protection(self) -> Protection | None:
        """Return clip norms and noise for every step; no peer is charged."""
        if not self.private:
            return None

        n = self.workload.n_peers
        share = np.arange(PLANNED) / PLANNED
        clip_norms = CLIP_NORM * self.decay[0] ** -share
        noise = NOISE_MULTIPLIER * self.decay[1] ** -share
        everyone = np.broadcast_to(n, (PLANNED, n))
        return Protection(
            np.broadcast_to(clip_norms[:, None], (PLANNED, n)),
            np.broadcast_to(noise[:, None], (PLANNED, n)),
            (),
            (None,) * n,
            "none",
            ({"gradient": 1.0},),
            np.broadcast_to(0, (PLANNED,)),
            receivers={"gradient": everyone},
        )

    def public(self, setup: Setup) -> Validation | None:
        """Return the validation examples; None if no model is tried."""
        if not self.validation:
            return None
        drawn = keyed_generator(SEED, "validation").standard_normal((self.validation, *self.workload.shape))
        y = torch.arange(self.validation) % self.workload.n_classes
        return Validation(torch.from_numpy(drawn).to(setup.dtype), y, resolve_loss(self.workload.loss))

    def floors(self) -> dict[str, tuple[Work, float]]:
        """Return the parts of the floor, to be timed, and how often a unit takes each."""
        floor = self.floor
        together = Setup.build(replace(self.workload, n_peers=floor.models, examples=self.workload.batch))
        parts = limit.works(together)
        counts: dict[str, tuple[Work, float]] = {"products": (parts["gemm"], floor.steps)}
        if self.private:
            counts["noise"] = (parts["noise"], floor.steps if floor.draws is None else floor.draws)
        if floor.full:
            every = Setup.build(replace(self.workload, n_peers=floor.models, batch=floor.full, examples=floor.full))
            counts["full"] = (limit.works(every)["gemm"], 1.0)

        # Of all peers' rows, as cold as they are in a round: a few rows would stay in the cache.
        counts["copies"] = (limit.copy(self.setup()), floor.copied / self.workload.n_peers)
        if floor.tried:
            batch = self.validation
            tried = Setup.build(replace(self.workload, n_peers=floor.tried, batch=batch, examples=batch))
            counts["trials"] = (limit.forward(tried), 1.0)
        return counts


def _mlp(n_peers: int, batch: int, *hidden: int, examples: int = 100, sampling: str = "uniform") -> Workload:
    options = {"hidden": list(hidden)}
    return Workload("", n_peers, batch, model="mlp", options=options, examples=examples, sampling=sampling, **IMAGES)  # type: ignore[arg-type]


def _cnn(n_peers: int, batch: int, model: str) -> Workload:
    return Workload("", n_peers, batch, model=model, **IMAGES)  # type: ignore[arg-type]


_W1 = WORKLOADS["W1"]
_W2 = WORKLOADS["W2"]
_W4 = WORKLOADS["W4"].resized(1000)
_DYN = _cnn(20, 16, "cnn-dyn-d2p")
_PDSL = _cnn(10, 10, "cnn-pdsl")
_FEDAVG = _mlp(100, 10, 200, 200)
_FEDDEPER = _mlp(100, 32, 512, 256)

_CONVOLUTIONS = "gradients of convolutions are taken peer by peer, and written out example by example to be clipped"
_EVENTS = "an event is one peer's step: what Python does for it is shared with no other peer"
_RESTING = "the averages of peers at rest move too, and each active peer's first draws are made in these rounds"
_READ = "examples, sums, models and averages are read again, beside the rows that are written"
_TABLES = "a table's mean is read and changed beside the sums, and old and new entries are taken apart"
_BATCHES = "without privacy the loop takes a batch by one backward pass, which is matrix products too"

TASKS: dict[str, Task] = {
    task.title: task
    for task in (
        Task("adp2-sgd", "adp2-sgd", _W2, Floor(1, 48, steps=16), unit=16, reason=_EVENTS),
        Task("dp-cga", "dp-cga", _PDSL, Floor(30, 20), reason=_CONVOLUTIONS),
        Task("d-psgd", "d-psgd", _W2, Floor(16, 16), private=False, reason=_BATCHES),
        Task("dp2-sgd", "dp2-sgd", _W2, Floor(16, 16)),
        Task("dp-dpsgd", "dp-dpsgd", _PDSL, Floor(10, 10), topology="complete", reason=_CONVOLUTIONS),
        Task("dp-dda", "dp-dda", _W4, Floor(100, 1200), topology="complete", active=100, reason=_RESTING),
        Task("dda", "dda", _W4, Floor(1000, 3000), reason=_READ),
        Task(
            "dyn-d2p",
            "dyn-d2p",
            _DYN,
            Floor(20, 20),
            topology="directed-exponential",
            decay=(2.0, 2.0),
            reason=_CONVOLUTIONS,
        ),
        Task(
            "dyn-c-d2p",
            "dyn-c-d2p",
            _DYN,
            Floor(20, 20),
            topology="directed-exponential",
            decay=(2.0, 1.0),
            reason=_CONVOLUTIONS,
        ),
        Task(
            "dyn-mu-d2p",
            "dyn-mu-d2p",
            _DYN,
            Floor(20, 20),
            topology="directed-exponential",
            decay=(1.0, 2.0),
            reason=_CONVOLUTIONS,
        ),
        Task("const-d2p", "const-d2p", _DYN, Floor(20, 20), topology="directed-exponential", reason=_CONVOLUTIONS),
        Task(
            "feddeper",
            "feddeper",
            _FEDDEPER,
            Floor(10, 110, steps=10),
            {"local_steps": 10, "rho": 0.003, "mixing_rate": 0.5},
            topology="server",
            active=5,
            private=False,
            reason=_BATCHES,
        ),
        Task(
            "feddeper*",
            "feddeper*",
            _FEDDEPER,
            Floor(10, 110, steps=5),
            {"local_steps": 10, "rho": 0.003, "mixing_rate": 0.5},
            topology="server",
            active=5,
            private=False,
            reason=_BATCHES,
        ),
        Task(
            "fedavg",
            "fedavg",
            _FEDAVG,
            Floor(10, 110, steps=10),
            {"local_steps": 10},
            topology="server",
            active=10,
            private=False,
            reason=_BATCHES,
        ),
        Task(
            "fedprox",
            "fedprox",
            _FEDAVG,
            Floor(10, 110, steps=10),
            {"local_steps": 10, "proximal": 0.01},
            topology="server",
            active=10,
            private=False,
            reason=_BATCHES,
        ),
        Task(
            "scaffold",
            "scaffold",
            _FEDAVG,
            Floor(10, 220, steps=10),
            {"local_steps": 10},
            topology="server",
            active=10,
            private=False,
            reason=_BATCHES,
        ),
        Task("local", "local", _W2, Floor(16, 16)),
        Task("dp-sgd", "dp-sgd", _mlp(1, 256, 1000, examples=1000), Floor(1, 1)),
        Task(
            "muffliato",
            "muffliato",
            _PDSL,
            Floor(10, 50),
            {"gossip_steps": 5},
            reason=_CONVOLUTIONS,
        ),
        Task("dp-net-fleet", "dp-net-fleet", _PDSL, Floor(10, 50, steps=5), {"local_steps": 5}, reason=_CONVOLUTIONS),
        Task("pdsl", "pdsl", _PDSL, Floor(30, 20, tried=70), validation=40, reason=_CONVOLUTIONS),
        Task(
            "privsgp-vr",
            "privsgp-vr",
            replace(_W1, n_peers=20, examples=50),
            Floor(20, 40),
            topology="directed-exponential",
            reason=_TABLES,
        ),
        Task(
            "privsgp-vr, dense",
            "privsgp-vr",
            replace(_W1, n_peers=10, examples=50),
            Floor(10, 30),
            {"table": "dense"},
            topology="directed-exponential",
            reason=_TABLES,
        ),
        Task(
            "privsgp-vr, blocks",
            "privsgp-vr",
            _mlp(20, 10, 100, sampling="blocks"),
            Floor(20, 60),
            {"table": "blocks"},
            topology="directed-exponential",
            reason=_TABLES,
        ),
        Task(
            "privsgp-vr, snapshot",
            "privsgp-vr",
            replace(_W1, n_peers=20, examples=50),
            # One round takes all gradients and changes x, the snapshot and the anchor; nine take two each and change x.
            Floor(20, 240, steps=18, draws=10, full=50),
            {"table": "snapshot", "snapshot_every": 10},
            topology="directed-exponential",
            unit=10,
            reason=_TABLES,
        ),
        Task("sgp", "sgp", _W2, Floor(16, 16), topology="directed-exponential", private=False, reason=_BATCHES),
        Task("privsgp", "privsgp", _W1, Floor(50, 50), topology="directed-exponential"),
    )
}
