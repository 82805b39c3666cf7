"""What the steps of one peer cost, with the scale of its noise left open.

An algorithm declares the sums of each of its steps (`declared`). Here the steps of a run are grouped by what they
declare, and each group is turned into releases for any scale of the noise: the one free number of a peer's plan.

A `Schedule` says how clip norms and noise change over the run: C_k, and the shape of σ_k / C_k. The noise multiplier of
round k is scale * noise_shape[k], and `protection` solves the scale from the peer's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.mechanism.declared import Declaration, Declares, Drawing, joint_release, one_sum
from flower_privdec.privacy.mechanism.events import Release, Spend, plan_spends
from flower_privdec.scenario import Scenario


@dataclass(frozen=True)
class Schedule:
    """C_k and the shape of σ_k / C_k over the rounds.

    Attributes:
        clip_norm: float64 [n_peers], C_0 of each peer.
        clip_factor: float64 [rounds], C_k / C_0.
        noise_shape: float64 [rounds], the noise multiplier of round k at scale 1.
        exponential: (ρ_c, ρ_μ) if the shape is Dyn-D2P's; None if it is given by lists.
    """

    clip_norm: np.ndarray
    clip_factor: np.ndarray
    noise_shape: np.ndarray
    exponential: tuple[float, float] | None

    @property
    def constant(self) -> bool:
        """Return whether every round is alike."""
        return self.exponential == (1.0, 1.0)

    def repeated(self, times: int) -> Schedule:
        """Return the schedule of steps, so many a round, instead of rounds."""
        return replace(self, clip_factor=each(self.clip_factor, times), noise_shape=each(self.noise_shape, times))


# Runs have up to 10^7 steps, mostly alike. A value of each that is always the same stands once in memory: its array has
# stride 0 over the steps.


def always(value: float | np.ndarray, steps: int) -> np.ndarray:
    """Return one value, [...], for every step, read-only, [steps, ...]."""
    row = np.asarray(value)
    return np.broadcast_to(row, (steps, *row.shape))


def is_always(values: np.ndarray) -> bool:
    """Return whether one value in memory stands for every step; arrays with a value for each are not looked at."""
    return len(values) > 0 and values.strides[0] == 0


def each(values: np.ndarray, times: int) -> np.ndarray:
    """Return every value so many times, [times steps, ...], as of the steps of a round."""
    if is_always(values):
        return always(values[0], len(values) * times)
    return values.repeat(times, axis=0)


def by_peer(values: np.ndarray, of_peers: np.ndarray) -> np.ndarray:
    """Return the value of each step times that of each peer, [steps, m], from [steps] and [m]."""
    if is_always(values):
        return always(values[0] * of_peers, len(values))
    return np.asarray(values[:, None] * of_peers)


def build_schedule(scenario: Scenario) -> Schedule:
    """Return the schedule of a scenario with privacy.

        C_k = C_0 ρ_c^{-k/K},  μ_k = μ_0 ρ_μ^{k/K},  σ_k = C_k / μ_k

    so the noise multiplier σ_k / C_k is (1/μ_0) ρ_μ^{-k/K}: a shape times the scale 1/μ_0.

    Source: Dyn-D2P (Zhu et al.), Algorithm 1, lines 5 to 8 (and 2 for lists).
    """
    private = scenario.private
    if private is None:
        raise ValueError("a scenario without privacy has no schedule")

    clip, clip_decay, noise_growth = scenario.algorithm.own_schedule or (None, 1.0, 1.0)  # C_0, ρ_c, ρ_μ
    clip = clip or private.clip_norm
    if np.ndim(clip) and np.size(clip) != scenario.n_peers:
        raise ScenarioError(
            f"algorithm: its clip norm lists {np.size(clip)} numbers for n_peers={scenario.n_peers}: give one a peer",
            code="privacy.clip-norm",
        )
    norms = np.broadcast_to(np.asarray(clip, dtype=np.float64), (scenario.n_peers,))

    rounds = scenario.rounds
    section = private.schedule
    if section is not None and (section.clip_norms is not None or section.noise is not None):
        factor = np.ones(rounds)
        sigma = np.ones(rounds)
        if section.clip_norms is not None:
            factor = _stretched(section.clip_norms, rounds, "clip_norms")
        if section.noise is not None:
            sigma = _stretched(section.noise, rounds, "noise")
        return Schedule(norms, factor, sigma / factor, None)

    if section is not None:
        clip_decay = section.rho_c
        noise_growth = section.rho_mu
    if clip_decay == noise_growth == 1.0:
        same = always(1.0, rounds)
        return Schedule(norms, same, same, (clip_decay, noise_growth))

    share = np.arange(rounds) / rounds  # k / K
    return Schedule(norms, clip_decay**-share, noise_growth**-share, (clip_decay, noise_growth))


def _stretched(values: Sequence[float], rounds: int, name: str) -> np.ndarray:
    """Return one value a round: the list itself, or straight lines through fewer values."""
    if not 1 <= len(values) <= rounds:
        raise ScenarioError(
            f"privacy.schedule.{name} lists {len(values)} values for rounds={rounds}: give one a round, or fewer",
            code="privacy.schedule",
        )
    knots = np.linspace(0, max(rounds - 1, 1), len(values))
    lines = np.interp(np.arange(rounds), knots, np.asarray(values, dtype=np.float64))
    return np.asarray(lines)


@dataclass(frozen=True, eq=False)
class Mechanism:
    """The steps of one peer: each publishes the sums of its kind, with noise of scale * shape[k] clip norms.

    Attributes:
        drawing: how the peer draws examples.
        kinds: the different declarations of its steps.
        kind_of: int64 [steps], which of them a step has.
        shape: float64 [steps].
    """

    drawing: Drawing
    kinds: tuple[Declaration, ...]
    kind_of: np.ndarray
    shape: np.ndarray

    def receivers(self, name: str) -> np.ndarray:
        """Return the number of neighbours that each get one sum of this name in each step, int64 [steps]."""
        counts = [sum(part.receivers for part in kind or () if part.name == name) for kind in self.kinds]
        of_kinds = np.array(counts, dtype=np.int64)
        return np.asarray(of_kinds[self.kind_of])

    def spends(
        self,
        active: np.ndarray,
        scale: float,
        own: np.ndarray | float = 1.0,
        left: Mapping[int, np.ndarray] | None = None,
    ) -> tuple[Spend, ...]:
        """Return the cost to a peer that is active in some steps, bool [steps].

        Args:
            own: of noise that cancels between peers, what is left of it if all other peers collude, over the noise at
                this scale, [steps].
            left: the same if so many collude, by their number.
        """
        spends: list[Spend] = []
        for kind, release in self._released:
            in_steps = active & (self.kind_of == kind)
            noise = scale * self.shape * release.noise_multiplier  # [steps]
            against = {colluders: noise * share for colluders, share in (left or {}).items()}
            spends += plan_spends(release, in_steps, noise * own, against, self.drawing.paid_together)
        return tuple(sorted(spends, key=lambda spend: spend.from_step))

    def releases(self, active: np.ndarray, scale: float) -> list[Release]:
        """Return the releases of `spends`, equal steps together; solving for the scale calls this many times."""
        releases = []
        is_constant = is_always(self.shape) and self.drawing.paid_together == 1
        for kind, release in self._released:
            if is_constant and len(self.kinds) == 1:
                # All active steps are alike: sorting their noises would be most of the time.
                steps = int(np.count_nonzero(active))
                level = scale * float(self.shape[0]) * release.noise_multiplier
                if steps:
                    releases.append(replace(release, noise_multiplier=level, steps=steps))
                continue

            in_steps = active & (self.kind_of == kind)
            noise = scale * self.shape * release.noise_multiplier
            paid = np.where(in_steps, noise, np.inf)

            # Steps that are paid together cost what the one with the least noise does.
            paid = np.minimum.reduceat(paid, np.arange(0, len(paid), self.drawing.paid_together))
            paid = paid[np.isfinite(paid)]
            for level, count in zip(*np.unique(paid, return_counts=True), strict=True):
                releases.append(replace(release, noise_multiplier=float(level), steps=int(count)))
        return releases

    @cached_property
    def _released(self) -> tuple[tuple[int, Release], ...]:
        """Each kind with a cost, and the release of one such step at noise multiplier 1."""
        released = []
        for kind, sums in enumerate(self.kinds):
            release = joint_release(sums, self.drawing)
            if release is not None:
                released.append((kind, release))
        return tuple(released)


def build_mechanism(
    algorithm: Declares,
    drawing: Drawing,
    schedule: Schedule,
    noised: Callable[[Declaration], Declaration] = lambda sums: sums,
) -> Mechanism:
    """Return the mechanism of a peer, from its algorithm's declarations.

    Args:
        schedule: the schedule of steps.
        noised: returns a step's cost under its noise; by default independent normals.

    Raises:
        ScenarioError: no bound is proved for the declared sums under this sampling or schedule.
    """
    clip_changes = np.ptp(schedule.clip_factor) > 0
    if algorithm.remembers_clipped and clip_changes:
        raise ScenarioError(
            "privacy.schedule changes the clip norm, and the gradients a table keeps were clipped to that of earlier "
            "steps; keep the clip norm constant (noise may change), or use algorithm.table=snapshot",
            code="privacy.schedule",
        )

    # Number the declarations in the order in which they first occur.
    n_steps = len(schedule.noise_shape)
    numbers: dict[Declaration, int] = {}
    if getattr(type(algorithm), "released", None) is one_sum:
        # It declares the same in every step, and is asked once.
        numbers[noised(algorithm.released(0, drawing))] = 0
        kind_of = always(0, n_steps)
    else:
        kind_of = np.empty(n_steps, dtype=np.int64)
        for step in range(n_steps):
            declaration = noised(algorithm.released(step, drawing))
            kind_of[step] = numbers.setdefault(declaration, len(numbers))

    if drawing.paid_together > 1 and len(numbers) > 1:
        what = "privacy.noise that is correlated over steps"
        remedy = "leave privacy.noise out"
        if drawing.sampling == "shuffle":
            what = "data.batch.sampling='shuffle'"
            remedy = "use poisson (or uniform)"
        raise ScenarioError(
            f"{what} has no proved privacy with {algorithm.name}, whose steps are not all alike; {remedy}",
            code="privacy.sampling",
        )
    return Mechanism(drawing, tuple(numbers), kind_of, schedule.noise_shape)
