"""A peer's steps as a mechanism with one free number, the scale of its noise, which a calibration solves for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.mechanism.declared import Declaration, Declares, Drawing, joint_release, to_one
from flower_privdec.privacy.mechanism.events import Release, Spend, plan_spends
from flower_privdec.privacy.mechanism.schedules import Schedule


@dataclass(frozen=True, eq=False)
class Mechanism:
    """The steps of one peer: each publishes what its kind declares, with noise of scale * shape[k] clip norms.

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

    def noise(self, scale: float) -> dict[str, np.ndarray]:
        """Return for every sum the noise multiplier of each step, over the sum of a batch, [steps]."""
        names = dict.fromkeys(part.name for kind in self.kinds for part in kind or () if part.to != "self")
        return {name: scale * self.shape * self._factors(name)[self.kind_of] for name in names}

    def _factors(self, name: str) -> np.ndarray:
        """Return the noise of a sum over the step's in every kind; 0 where a step does not have it."""
        return np.array([sum(part.noise for part in kind or () if part.name == name) for kind in self.kinds])

    @property
    def answers(self) -> bool:
        """Whether some sum goes to each neighbour by itself."""
        return any(part.to == "neighbour" for kind in self.kinds for part in kind or ())

    def receivers(self, name: str) -> np.ndarray:
        """Return to how many neighbours a sum goes in each step, one to each, int64 [steps]."""
        counts = [sum(part.receivers for part in kind or () if part.name == name) for kind in self.kinds]
        return np.asarray(np.array(counts, dtype=np.int64)[self.kind_of])

    def to_one(self) -> Mechanism:
        """Return the mechanism as far as one neighbour is sent what it publishes."""
        return replace(self, kinds=tuple(map(to_one, self.kinds)))

    def spends(self, active: np.ndarray, scale: float) -> tuple[Spend, ...]:
        """Return what a peer pays that is active in some steps, bool [steps]."""
        parts = [
            part
            for kind, release in self._released()
            for part in plan_spends(
                release, active & (self.kind_of == kind), scale * self.shape * release.noise_multiplier
            )
        ]
        return tuple(sorted(parts, key=lambda spend: spend.from_step))

    def releases(self, active: np.ndarray, scale: float) -> list[Release]:
        """Return the same without saying when: equal steps together."""
        if self.drawing.sampling == "shuffle":
            return [spend.release for spend in self.spends(active, scale)]
        spends = []
        for kind, release in self._released():
            chosen = scale * self.shape[active & (self.kind_of == kind)] * release.noise_multiplier
            noises, counts = np.unique(chosen, return_counts=True)
            spends += [
                replace(release, noise_multiplier=float(noise), steps=int(count))
                for noise, count in zip(noises, counts, strict=True)
            ]
        return spends

    def _released(self) -> Iterator[tuple[int, Release]]:
        """Yield each kind that costs something, with one step of it at noise multiplier 1."""
        return ((kind, release) for kind, release in enumerate(self._joint) if release is not None)

    @cached_property
    def _joint(self) -> tuple[Release | None, ...]:
        return tuple(joint_release(kind, self.drawing) for kind in self.kinds)


def build_mechanism(
    algorithm: Declares,
    drawing: Drawing,
    schedule: Schedule,
    noised: Callable[[Declaration], Declaration] = lambda sums: sums,
) -> Mechanism:
    """Return the mechanism of a peer, from what its algorithm declares.

    Args:
        schedule: of steps.
        noised: returns what a step costs under the noise that it gets; by default independent normals.

    Raises:
        ScenarioError: for a sampling or a schedule under which what is declared has no proved bound.
    """
    if algorithm.remembers_clipped and np.ptp(schedule.clip_factor) > 0:
        raise ScenarioError(
            "privacy.schedule changes the clip norm, and the gradients a table keeps were clipped to that of earlier "
            "steps; keep the clip norm constant (noise may change), or use algorithm.table=snapshot"
        )
    numbers: dict[Declaration, int] = {}
    kind_of = np.empty(len(schedule.noise_shape), dtype=np.int64)
    for step in range(len(kind_of)):
        kind_of[step] = numbers.setdefault(noised(algorithm.released(step, drawing)), len(numbers))
    if drawing.sampling == "shuffle" and len(numbers) > 1:
        raise ScenarioError(
            f"data.batch.sampling='shuffle' has no proved privacy with {algorithm.name}, whose steps are not all "
            "alike; use poisson (or uniform)"
        )
    return Mechanism(drawing, tuple(numbers), kind_of, schedule.noise_shape)
