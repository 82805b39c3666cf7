"""What each algorithm's step releases: its noise over the rounds and what it is charged.

A mechanism has one free number, the scale of its noise, which a calibration solves for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flower_privdec.data import Sampler
from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.events import Release, Spend, plan_spends
from flower_privdec.privacy.schedules import Schedule
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.algorithms import FedDeperSection, VRSection


@dataclass(frozen=True)
class Mechanism:
    """A clipped sum over a batch, plus Gaussian noise of scale * shape[k] clip norms in step k.

    Attributes:
        release: one step at noise multiplier 1.
        shape: float64 [steps].
        moves: how far one example of the batch moves what is noised, in clip norms.
    """

    release: Release
    shape: np.ndarray
    moves: float = 1.0

    def noise(self, scale: float) -> np.ndarray:
        """Return the noise multiplier of every step, over the sum of a batch, [steps]."""
        return scale * self.shape

    def spends(self, active: np.ndarray, scale: float) -> tuple[Spend, ...]:
        """Return what a peer pays that is active in some rounds, bool [rounds]."""
        return plan_spends(self.release, active, self.noise(scale) / self.moves)

    def releases(self, active: np.ndarray, scale: float) -> list[Release]:
        """Return the same without saying when: equal steps together."""
        if self.release.sampling == "shuffle":
            return [spend.release for spend in self.spends(active, scale)]
        noises, counts = np.unique(self.noise(scale)[active] / self.moves, return_counts=True)
        return [
            replace(self.release, noise_multiplier=float(noise), steps=int(count))
            for noise, count in zip(noises, counts, strict=True)
        ]


@dataclass(frozen=True)
class Snapshot(Mechanism):
    """SVRG's two kinds of release, g(z) - g(s) + μ with a full gradient μ every m rounds.

    In a snapshot round all J examples are summed: a Gaussian release of noise σ_s. In the others an example
    that is drawn enters with g_z(z) - g_z(s), of norm at most 2 C, and μ is already released: the same
    sampling as a plain step, at half its noise multiplier. μ's noise stays in the next m steps, so it is
    chosen to weigh as much in their sum as their own: σ_s = σ (J / b) / sqrt(m), in clip norms of the sum
    over all J.
    """

    every: int = 1

    def _taken(self) -> np.ndarray:
        return np.asarray(np.arange(len(self.shape)) % self.every == 0)

    def noise(self, scale: float) -> np.ndarray:
        """Return the noise multiplier of every round, over the sum of b examples, [rounds]."""
        weight: np.ndarray = np.where(self._taken(), 1 / math.sqrt(self.every), 1.0)
        return np.asarray(scale * weight * self.shape)

    def spends(self, active: np.ndarray, scale: float) -> tuple[Spend, ...]:
        """Return what a peer pays that is active in some rounds, bool [rounds]."""
        taken, noise = self._taken(), self.noise(scale)
        whole = replace(self.release, sampling="full", sampling_rate=1.0)
        ratio = self.release.dataset_size / self.release.batch_size
        parts = plan_spends(whole, active & taken, noise * ratio) + plan_spends(
            self.release, active & ~taken, noise / self.moves
        )
        return tuple(sorted(parts, key=lambda spend: spend.from_round))

    def releases(self, active: np.ndarray, scale: float) -> list[Release]:
        """Return the same without saying when."""
        return [spend.release for spend in self.spends(active, scale)]


def build_mechanism(scenario: Scenario, sampler: Sampler, peer: int, schedule: Schedule) -> Mechanism:
    """Return the mechanism of one peer under a scenario's algorithm.

    Raises:
        ScenarioError: for a sampling or a schedule under which the algorithm's release has no proved bound.
    """
    size, batch = int(sampler.partition_sizes[peer]), round(float(sampler.normalizer[peer]))
    kind, shape, section = sampler.kind, schedule.noise_shape, scenario.algorithm
    release = Release(kind, float(sampler.sampling_rate[peer]), size, batch, 1.0)
    if isinstance(section, FedDeperSection) and section.rho > 0:
        return Mechanism(release, shape, math.sqrt(2))  # two clipped sums of one batch: see algorithms.feddeper
    if not isinstance(section, VRSection):
        return Mechanism(release, shape)
    if kind == "shuffle":
        raise ScenarioError(
            "data.batch.sampling='shuffle' has no proved privacy with variance reduction, whose table or snapshot "
            "shows every example in every round; use poisson (or uniform)"
        )
    if section.table == "snapshot":
        return Snapshot(release, shape, 2.0, section.snapshot_every)
    if kind == "full":  # g - table + mean(table) over all examples is the mean of g
        return Mechanism(release, shape)
    if np.ptp(schedule.clip_factor) > 0:  # an entry is as long as the clip norm of the round that made it
        raise ScenarioError(
            "privacy.schedule changes the clip norm, and the gradients a table keeps were clipped to that of earlier "
            "rounds; keep the clip norm constant (noise may change), or use algorithm.table=snapshot"
        )
    idle, drawn = table_sensitivities(release.sampling_rate)
    return Mechanism(replace(release, idle=idle / drawn), shape, drawn)


def table_sensitivities(q: float) -> tuple[float, float]:
    """Return how far one example can move a step with a table, in clip norms: (not drawn, drawn) = (q, 2 - q).

    Over the batch S, each of J examples with probability q = b / J, and clip norm C, b times the step is
        Σ_{j in S} (g_j - t_j) + q Σ_j t_j,    |g_j|, |t_j| <= C,
    t_j being the table's gradient of example j. What example z adds is q t_z when it is not drawn, of norm at
    most q C, and g_z - (1 - q) t_z when it is, of norm at most (2 - q) C. Zeroing z removes just that. t_z
    depends on when z was drawn before, which `Release.event` allows.

    This is why PrivSGP-VR's amplification by 1/J (Theorem 2) does not hold as claimed: every step shows q t_z.
    """
    return q, 2 - q
