"""The algorithms of the catalogue as plain loops over peers, as one would write them without this package.

A peer is a vector of parameters and whatever else its algorithm keeps. A module is loaded with a vector, examples go
through it one by one to be clipped (without privacy a batch at once), and models are averaged along the edges of the
round. Graphs, who is active, and which examples are drawn are the engine's: what is compared is the computing. So are
Shapley values and the small program of CGA, which no loop over peers changes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.algorithms.cga import agreeable
from flower_privdec.algorithms.shapley import Game, aggregation_weights, exact
from flower_privdec.core import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.engine import Engine
from flower_privdec.rows.keys import keyed_generator
from tools.bench.baselines import plain_loss
from tools.bench.catalogue_tasks import Task
from tools.bench.workloads import SEED, Setup, peer_data

EVERYBODY = -1  # the receiver of what all may see


class ReplayedNoise:
    """Noise that a loop can draw again: a fixed normal vector for each step, peer and receiver."""

    def __init__(self, d: int) -> None:
        self.d = d

    def draw(self, step: int, peer: int, receiver: int = EVERYBODY) -> Tensor:
        """Return the noise of a peer in a step, float64 [d]."""
        generator = keyed_generator(SEED, "replayed", step, peer, receiver + 1)
        return torch.from_numpy(generator.standard_normal(self.d))

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add std[i] times the noise of peer i."""
        to = np.full(len(peers), EVERYBODY) if receivers is None else receivers
        for row, scale, peer, receiver in zip(out, std, peers.tolist(), to.tolist(), strict=True):
            row.add_(scale * self.draw(step, peer, receiver))


class CatalogueLoop(ABC):
    """A loop over peers that does what an engine does.

    Args:
        task: what is run.
        setup: its data and model.
        engine: of the same task; it lends its graph, its settings and the models it starts from, and is not changed.
        noise: to be drawn again; None draws by torch.
    """

    def __init__(self, task: Task, setup: Setup, engine: Engine, noise: ReplayedNoise | None = None) -> None:
        self.task = task
        self.setup = setup
        self.algorithm: Any = engine.algorithm
        self.cohort: Cohort = engine.cohort
        self.noise = noise
        self.n = task.workload.n_peers
        self.module = copy.deepcopy(setup.module)
        self.parameters = list(self.module.parameters())
        self.loss = plain_loss(task.workload.loss)

        # Examples of its own: a sampler keeps what it drew last, which the engine's would lose by turns.
        peers = np.arange(self.n)
        self.data = peer_data(task.workload, setup.examples, peers, setup.device, setup.dtype)
        self.batch_size = float(self.data.sampler.normalizer[0])
        self.first = [row.clone() for row in engine.state.rows["x"]]
        self.begin()

    def begin(self) -> None:
        """Start at round 0 with the first models; an algorithm adds what it keeps beside them."""
        self.k = 0
        self.x = self.first

    @abstractmethod
    def round(self) -> None:
        """Run one round, the k-th."""

    def rounds(self) -> None:
        """Run the rounds that are timed together."""
        for _ in range(self.task.unit):
            self.round()
            self.k += 1

    def rows(self) -> dict[str, list[Tensor]]:
        """Return rows that the engine's state has to have, by name."""
        return {"x": self.x}

    # --- what all loops do ---

    @property
    def active(self) -> list[int]:
        """Return who takes part in the round."""
        return [int(peer) for peer in np.flatnonzero(self.cohort.participation.active(self.k))]

    @property
    def rate(self) -> float:
        """Return γ of the round, the same for all peers."""
        return float(self.cohort.learning_rate.at(self.k)[0])

    def step_number(self, local_step: int = 0) -> int:
        """Return the number of a step in the run."""
        return self.k * self.cohort.steps_per_round + local_step

    def zeros(self) -> list[Tensor]:
        """Return a vector of zeros for each peer."""
        return [torch.zeros_like(row) for row in self.x]

    def drawn(self, peer: int, local_step: int = 0) -> tuple[Tensor, Tensor]:
        """Return a peer's batch, x [b, ...] and y [b]."""
        batch = self.data.batch(self.step_number(local_step), [peer])
        count = int((batch.weight[0] > 0).sum())
        return batch.x[0, :count], batch.y[0, :count]

    def views(self, vector: Tensor) -> list[Tensor]:
        """View a vector in the shapes of the parameters."""
        parts = torch.split(vector, [parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def load(self, vector: Tensor) -> None:
        """Let the module compute at a vector."""
        for parameter, part in zip(self.parameters, self.views(vector), strict=True):
            parameter.data = part

    def clip_norm(self, peer: int) -> float:
        """Return C of the round."""
        protection = self.cohort.protection
        assert protection is not None
        return float(protection.clip_norms[self.step_number(), peer])

    def summed(self, vector: Tensor, x: Tensor, y: Tensor, peer: int) -> Tensor:
        """Return the sum of the gradients at a vector, [d]: with privacy each clipped to C."""
        self.load(vector)
        if self.cohort.protection is None:
            gradients = torch.autograd.grad(self.loss(self.module(x), y), self.parameters)
            return torch.cat([gradient.flatten() for gradient in gradients])

        clip_norm = self.clip_norm(peer)
        total = torch.zeros_like(vector)
        parts = self.views(total)
        for b in range(len(y)):
            gradients = torch.autograd.grad(self.loss(self.module(x[b : b + 1]), y[b : b + 1]), self.parameters)
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            factor = (clip_norm / norm).clamp(max=1)
            for part, gradient in zip(parts, gradients, strict=True):
                part.add_(gradient * factor)
        return total

    def noised(self, mean: Tensor, peer: int, local_step: int = 0, receiver: int = EVERYBODY) -> Tensor:
        """Add the noise of a step to the mean of its clipped gradients, in place."""
        protection = self.cohort.protection
        if protection is None:
            return mean
        number = self.step_number(local_step)
        std = protection.clip_norms[number, peer] * protection.noise_multipliers[number, peer] / self.batch_size
        if self.noise is None:
            return mean.add_(torch.randn_like(mean), alpha=float(std))
        sign = 1 if receiver != EVERYBODY else -1  # steps are -γ times a mean, cross-gradients are the mean itself
        return mean.add_(self.noise.draw(number, peer, receiver), alpha=sign * float(std))

    def gradient(self, vector: Tensor, peer: int, local_step: int = 0) -> Tensor:
        """Return g̃ of a peer at a vector: the noised mean of its clipped gradients."""
        x, y = self.drawn(peer, local_step)
        return self.noised(self.summed(vector, x, y, peer).div_(self.batch_size), peer, local_step)

    def heard(self) -> list[list[tuple[int, float]]]:
        """Return whom each peer hears in the round, with its weight."""
        mixing = self.cohort.mixing
        assert mixing is not None
        key = self.k
        if mixing.participation.kind == "all" and mixing.topology.period is not None:
            key = self.k % mixing.topology.period
        if getattr(self, "_heard_at", None) != key:
            self._heard_at = key
            self._heard: list[list[tuple[int, float]]] = [[] for _ in range(self.n)]
            for sender, receiver, weight in mixing.matrix(self.k).terms():
                self._heard[receiver].append((sender, weight))
        return self._heard

    def mixed(self, rows: list[Tensor]) -> list[Tensor]:
        """Return Σ_j W_ij row_j for each peer i; the very row of a peer that hears nobody."""
        result = []
        for peer, terms in enumerate(self.heard()):
            if terms == [(peer, 1.0)]:
                result.append(rows[peer])
                continue
            total = torch.zeros_like(rows[peer])
            for sender, weight in terms:
                total.add_(rows[sender], alpha=weight)
            result.append(total)
        return result


class PushSumLoop(CatalogueLoop):
    """SGP, PrivSGP and Dyn-D2P with its special cases."""

    def begin(self) -> None:
        """Start with push weights of 1."""
        super().begin()
        self.w = [1.0] * self.n

    def round(self) -> None:
        """Step from z = x / w, then mix x and w."""
        for peer in range(self.n):
            self.x[peer].sub_(self.estimate(self.x[peer] / self.w[peer], peer), alpha=self.rate)
        self.x = self.mixed(self.x)
        self.w = [sum(weight * self.w[sender] for sender, weight in terms) for terms in self.heard()]

    def estimate(self, z: Tensor, peer: int) -> Tensor:
        """Return what the peer descends along."""
        return self.gradient(z, peer)


class TableLoop(PushSumLoop):
    """PrivSGP-VR with a gradient for each example, or for each block of them, written out."""

    def begin(self) -> None:
        """Fill the table at the first models."""
        super().begin()
        self.by_block = self.algorithm.table == "blocks"
        self.table: list[list[Tensor]] = []
        for peer, vector in enumerate(self.x):
            examples = int(self.data.sampler.partition_sizes[peer])
            entries = examples
            if self.by_block:
                entries = int(self.data.sampler.blocks(np.array([peer]))[0])
            self.table.append([self.entry(vector, peer, number) for number in range(entries)])
        self.mean = [torch.stack(entries).mean(0) for entries in self.table]

    def entry(self, vector: Tensor, peer: int, number: int) -> Tensor:
        """Return the gradient of an example, or the mean of a block's."""
        if self.by_block:
            batch = self.data.block(np.array([peer]), np.array([number]))
            count = int((batch.weight[0] > 0).sum())
            return self.summed(vector, batch.x[0, :count], batch.y[0, :count], peer).div_(self.batch_size)
        batch = self.data.examples([peer], number, number + 1)
        return self.summed(vector, batch.x[0], batch.y[0], peer)

    def estimate(self, z: Tensor, peer: int) -> Tensor:
        """Return SAGA's estimate, noised, and renew the table."""
        index = self.data.sampler.batch(self.step_number(), [peer]).index[0].tolist()
        entries = self.table[peer]
        numbers = [index[0] % len(entries)] if self.by_block else index

        step = self.mean[peer].clone()
        for number in numbers:
            new = self.entry(z, peer, number)
            change = new - entries[number]
            step.add_(change, alpha=1.0 if self.by_block else 1 / self.batch_size)
            self.mean[peer].add_(change, alpha=1 / len(entries))
            entries[number] = new
        return self.noised(step, peer)


class SnapshotLoop(PushSumLoop):
    """PrivSGP-VR with a snapshot (SVRG)."""

    def begin(self) -> None:
        """Start without a snapshot."""
        super().begin()
        self.snapshot = self.zeros()
        self.anchor = self.zeros()

    def estimate(self, z: Tensor, peer: int) -> Tensor:
        """Return a full gradient every so many rounds, and a corrected one between them, noised."""
        if self.k % self.algorithm.every == 0:
            every = self.data.examples([peer], 0, int(self.data.sampler.partition_sizes[peer]))
            mean = self.summed(z, every.x[0], every.y[0], peer).div_(every.y.shape[1])
            self.snapshot[peer] = z
            self.anchor[peer] = self.noised(mean, peer)
            return self.anchor[peer]

        x, y = self.drawn(peer)
        change = self.summed(z, x, y, peer) - self.summed(self.snapshot[peer], x, y, peer)
        return self.noised(change.div_(self.batch_size).add_(self.anchor[peer]), peer)


class AloneLoop(CatalogueLoop):
    """Local training, and DP-SGD at one peer."""

    def round(self) -> None:
        """Step."""
        for peer in range(self.n):
            self.x[peer].sub_(self.gradient(self.x[peer], peer), alpha=self.rate)


class GossipLoop(CatalogueLoop):
    """D-PSGD and its private forms."""

    def round(self) -> None:
        """Take all gradients, mix, then step."""
        steps = [self.gradient(row, peer) for peer, row in enumerate(self.x)]
        self.x = self.mixed(self.x)
        for row, step in zip(self.x, steps, strict=True):
            row.sub_(step, alpha=self.rate)


class MuffliatoLoop(AloneLoop):
    """Muffliato without acceleration."""

    def round(self) -> None:
        """Step, then mix several times."""
        super().round()
        for _ in range(self.algorithm.section.gossip_steps):
            self.x = self.mixed(self.x)


class TrackingLoop(CatalogueLoop):
    """NET-FLEET with noise."""

    def begin(self) -> None:
        """Start with nothing tracked."""
        super().begin()
        self.v = self.zeros()
        self.last = self.zeros()

    def round(self) -> None:
        """Walk along the tracked gradients, then mix models and them."""
        for peer in range(self.n):
            for local_step in range(self.cohort.steps_per_round):
                new = self.gradient(self.x[peer], peer, local_step)
                self.v[peer].add_(new).sub_(self.last[peer])
                self.last[peer] = new
                self.x[peer].sub_(self.v[peer], alpha=self.rate)
        self.x = self.mixed(self.x)
        self.v = self.mixed(self.v)

    def rows(self) -> dict[str, list[Tensor]]:
        """Return x and -γ v, as the state holds it."""
        return {"x": self.x, "correction": [row * -self.rate for row in self.v]}


class AveragingLoop(CatalogueLoop):
    """FedAvg: the peers' models are one after every round."""

    def begin(self) -> None:
        """Start at the common model; the engine's x may be a multiple of it."""
        super().begin()
        self.common = self.cohort.initial.clone()

    def round(self) -> None:
        """Walk from the common model at each active peer, then average."""
        walked = [self.walk(peer) for peer in self.active]
        self.common = torch.stack(walked).mean(0)

    def walk(self, peer: int) -> Tensor:
        """Return where a peer's local steps lead."""
        y = self.common.clone()
        for local_step in range(self.cohort.steps_per_round):
            g = self.gradient(y, peer, local_step)
            y.sub_(self.direction(peer, y, g), alpha=self.rate)
        return y

    def direction(self, peer: int, y: Tensor, g: Tensor) -> Tensor:
        """Return what a local step descends along."""
        return g

    def rows(self) -> dict[str, list[Tensor]]:
        """Return the common model for each peer."""
        return {"z": [self.common] * self.n}


class ProximalLoop(AveragingLoop):
    """FedProx."""

    def direction(self, peer: int, y: Tensor, g: Tensor) -> Tensor:
        """Pull towards the common model."""
        return g.add_(y - self.common, alpha=self.algorithm.proximal)


class ControlledLoop(AveragingLoop):
    """SCAFFOLD."""

    def begin(self) -> None:
        """Start with control variates of 0."""
        super().begin()
        self.control = self.zeros()
        self.server_control = torch.zeros_like(self.common)

    def direction(self, peer: int, y: Tensor, g: Tensor) -> Tensor:
        """Correct by the control variates."""
        return g.sub_(self.control[peer]).add_(self.server_control)

    def round(self) -> None:
        """Walk, average, and renew the control variates."""
        active = self.active
        start = self.common
        walked = [self.walk(peer) for peer in active]
        self.common = torch.stack(walked).mean(0)

        changes = []
        for peer, y in zip(active, walked, strict=True):
            change = (start - y) / (self.cohort.steps_per_round * self.rate) - self.server_control
            self.control[peer] += change
            changes.append(change)
        self.server_control = self.server_control + torch.stack(changes).mean(0) * (len(active) / self.n)

    def rows(self) -> dict[str, list[Tensor]]:
        """Return models and control variates."""
        return super().rows() | {"control": self.control, "common": [self.server_control] * self.n}


class DepersonalizedLoop(AveragingLoop):
    """FedDeper."""

    def begin(self) -> None:
        """Start with personal models."""
        super().begin()
        self.personal = [row.clone() for row in self.x]

    def walk(self, peer: int) -> Tensor:
        """Walk y and v together."""
        y = self.common.clone()
        v = self.personal[peer]
        for local_step in range(self.cohort.steps_per_round):
            g_y = self.gradient(y, peer, local_step)
            g_v = self.gradient(v, peer, local_step)
            pull = v + y - 2 * self.common
            y.sub_(g_y, alpha=self.rate).sub_(pull, alpha=self.algorithm.rho)
            v.sub_(g_v, alpha=self.rate)
        v.lerp_(y, self.algorithm.mixing_rate)
        return y

    def rows(self) -> dict[str, list[Tensor]]:
        """Return models and personal models."""
        return super().rows() | {"personal": self.personal}


class DualLoop(CatalogueLoop):
    """Dual averaging."""

    def begin(self) -> None:
        """Start with z = 0; the state holds -z."""
        super().begin()
        self.dual = self.zeros()
        self.average = [row.clone() for row in self.x]

    def round(self) -> None:
        """Average, add up subgradients, mix them, and step from 0."""
        t = self.k + 1
        schedule = self.algorithm.schedule
        share = schedule.weight(t) / schedule.total(t)
        for average, x in zip(self.average, self.x, strict=True):
            average.lerp_(x, share)
        for peer in self.active:
            self.dual[peer].sub_(self.gradient(self.x[peer], peer), alpha=self.rate)
        self.dual = self.mixed(self.dual)

        h = self.algorithm.regularizer
        iota = float(self.cohort.participation.chances.mean())
        strength = iota * schedule.total(t + 1) * h.l2 + schedule.pull(t + 1)
        for peer in self.active:
            self.x[peer] = self.dual[peer] / strength

    def rows(self) -> dict[str, list[Tensor]]:
        """Return x, -z and the averages."""
        return {"x": self.x, "dual": self.dual, "average": self.average}


class WakingLoop(CatalogueLoop):
    """A(DP)²SGD: one peer wakes at a time."""

    def begin(self) -> None:
        """Start with stale models that are fresh."""
        super().begin()
        self.stale = [row.clone() for row in self.x]
        self.read_at = [0] * self.n

    def round(self) -> None:
        """Average with a neighbour, and step along the gradient of a stale model."""
        limit = self.algorithm.staleness or 4 * self.n
        for peer in range(self.n):
            if self.k - self.read_at[peer] > limit:
                self.stale[peer] = self.x[peer].clone()
                self.read_at[peer] = self.k
        steps = {peer: self.gradient(self.stale[peer], peer) for peer in self.active}
        self.x = self.mixed(self.x)
        for peer, step in steps.items():
            self.x[peer].sub_(step, alpha=self.rate)
            self.stale[peer] = self.x[peer].clone()
            self.read_at[peer] = self.k


class CrossLoop(CatalogueLoop):
    """What PDSL and CGA share."""

    def answers(self) -> list[tuple[list[int], Tensor]]:
        """Return whom each peer hears, and its gradients of their data at its model, [k, d]."""
        found = []
        for peer, terms in enumerate(self.heard()):
            members = sorted(sender for sender, _ in terms)
            rows = [self.cross_gradient(self.x[peer], member, peer) for member in members]
            found.append((members, torch.stack(rows)))
        return found

    def cross_gradient(self, vector: Tensor, member: int, asking: int) -> Tensor:
        """Return the noised mean gradient of a member's batch at the model of the peer that asks."""
        x, y = self.drawn(member)
        return self.noised(self.summed(vector, x, y, member).div_(self.batch_size), member, receiver=asking)


class ProjectedLoop(CrossLoop):
    """CGA."""

    def begin(self) -> None:
        """Start without momentum."""
        super().begin()
        self.v = self.zeros()

    def round(self) -> None:
        """Descend from the mean of the neighbours' models along the direction that none opposes."""
        answers = self.answers()
        mixed = self.mixed(self.x)
        for peer, (members, gradients) in enumerate(answers):
            shares = torch.as_tensor(agreeable(gradients, members.index(peer))).to(gradients)
            self.v[peer].mul_(self.algorithm.momentum).sub_(shares @ gradients, alpha=self.rate)
            mixed[peer].add_(self.v[peer])
        self.x = mixed

    def rows(self) -> dict[str, list[Tensor]]:
        """Return models and momenta."""
        return {"x": self.x, "v": self.v}


class ShapleyLoop(CrossLoop):
    """PDSL with exact Shapley values, every coalition tried by a module of its own."""

    def begin(self) -> None:
        """Start without momentum."""
        super().begin()
        self.u = self.zeros()

    def round(self) -> None:
        """Weigh the gradients by what they add, step, and mix models and momenta."""
        for peer, (members, gradients) in enumerate(self.answers()):
            models = self.x[peer] - self.rate * gradients
            values = exact(self.game(models))
            omega = dict(self.heard()[peer])
            shares = aggregation_weights(values, [omega[member] for member in members])
            self.u[peer].mul_(self.algorithm.options.momentum).add_(torch.as_tensor(shares).to(gradients) @ gradients)
            self.x[peer].sub_(self.u[peer], alpha=self.rate)
        self.x = self.mixed(self.x)
        self.u = self.mixed(self.u)

    def game(self, models: Tensor) -> Game:
        """Return the game of some models."""
        validation = self.cohort.validation
        assert validation is not None
        x: Any = validation.x

        def hits(coalitions: np.ndarray) -> np.ndarray:
            counts = []
            for coalition in coalitions:
                self.load(models[torch.from_numpy(coalition)].mean(0))
                with torch.no_grad():
                    counts.append(int((self.module(x).argmax(1) == validation.y).sum()))
            return np.array(counts)

        return Game(len(models), hits, len(validation.y))

    def rows(self) -> dict[str, list[Tensor]]:
        """Return models and momenta."""
        return {"x": self.x, "u": self.u}


LOOPS: dict[str, type[CatalogueLoop]] = {
    "adp2-sgd": WakingLoop,
    "dp-cga": ProjectedLoop,
    "d-psgd": GossipLoop,
    "dp2-sgd": GossipLoop,
    "dp-dpsgd": GossipLoop,
    "dp-dda": DualLoop,
    "dda": DualLoop,
    "dyn-d2p": PushSumLoop,
    "dyn-c-d2p": PushSumLoop,
    "dyn-mu-d2p": PushSumLoop,
    "const-d2p": PushSumLoop,
    "feddeper": DepersonalizedLoop,
    "feddeper*": DepersonalizedLoop,
    "fedavg": AveragingLoop,
    "fedprox": ProximalLoop,
    "scaffold": ControlledLoop,
    "local": AloneLoop,
    "dp-sgd": AloneLoop,
    "muffliato": MuffliatoLoop,
    "dp-net-fleet": TrackingLoop,
    "pdsl": ShapleyLoop,
    "sgp": PushSumLoop,
    "privsgp": PushSumLoop,
}


def build_loop(task: Task, setup: Setup, engine: Engine, noise: ReplayedNoise | None = None) -> CatalogueLoop:
    """Return the loop of a task's algorithm."""
    loop: Callable[..., CatalogueLoop]
    if task.algorithm == "privsgp-vr":
        loop = SnapshotLoop if engine.algorithm.table == "snapshot" else TableLoop
    else:
        loop = LOOPS[task.algorithm]
    return loop(task, setup, engine, noise)


def engine_rows(algorithm: Algorithm, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an engine's rows by the names of a loop's: z is each peer's model."""
    return rows | {"z": algorithm.debiased(rows)}
