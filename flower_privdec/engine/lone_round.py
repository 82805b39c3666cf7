"""Rounds of push-sum whose peers take one example each with a linear model, in one call for all of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.core import Algorithm, State
from flower_privdec.core.cohort import Cohort, noise_std
from flower_privdec.gradients import LoneKernel
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing.kernels import IN_PLACE_FROM
from flower_privdec.privacy.noise import FastNoise
from flower_privdec.rows.aligned import empty_rows, padded

SUM = "gradient"
DOOR = Cohort.release_  # whoever watches it, as the laws of `testing` do, is shown the parts one by one


@dataclass(frozen=True)
class _Block:
    """What some rounds in a row need, worked out together.

    Attributes:
        first: of these rounds.
        places: int64 [rounds, m], where each peer's example lies.
        numbers: [rounds, 3, m], in the rows' number type: what a gradient is multiplied by, its clip norm (infinite
            for none), and the noise's standard deviation.
    """

    first: int
    places: np.ndarray
    numbers: np.ndarray


class LoneRound:
    """Takes whole rounds of `SGP.program` in one compiled loop, which gives the bits that its parts give one by one."""

    def __init__(
        self,
        cohort: Cohort,
        kernel: LoneKernel,
        noise: FastNoise,
        mixing: Mixing,
        examples: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Take a cohort that `of` has looked at."""
        from flower_privdec.engine import round_loops

        self._cohort, self._kernel, self._mixing, m = cohort, kernel, mixing, len(cohort.peers)
        self._rows, self._receivers = cohort.rows, noise.receivers(m)
        drawn = cohort.protection is not None
        self._keys = noise.keys_of(cohort.peers, SUM) if drawn else np.zeros(m, np.uint64)
        self._loop: Any = {torch.float32: round_loops.round32, torch.float64: round_loops.round64}[cohort.dtype]
        self._features, self._targets = examples
        self._block = _Block(0, np.empty((0, m), np.int64), np.empty((0, 3, m)))
        self._views: dict[int, tuple[Tensor, np.ndarray]] = {}
        self._spare: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, algorithm: Algorithm, cohort: Cohort) -> LoneRound | None:
        """Return what takes an algorithm's rounds on a cohort that hosts everybody, or None where it cannot."""
        kernel, noise, sampler = cohort.kernel, cohort.noise, cohort.data.sampler
        plain = algorithm.program == SGP.program and cohort.steps_per_round == 1
        secret = cohort.apart or cohort.headroom != 0
        one_each = sampler.kind in ("uniform", "shuffle") and bool((sampler.sizes == 1).all())
        if not plain or secret or not one_each or cohort.mixing is None:
            return None
        examples = cohort.data.arrays()
        if type(kernel) is not LoneKernel or type(noise) is not FastNoise or examples is None:
            return None
        return cls(cohort, kernel, noise, cohort.mixing, examples)

    def take_(self, state: State) -> bool:
        """Take a state's round, or leave the state as it is; say which.

        Privacy: paid for before an example is read, as the steps one by one are.
        """
        cohort, k, x = self._cohort, state.round_index, state.rows["x"]
        shift = self._mixing.matrix(k).half_shift
        long = x.shape[1] * x.element_size() >= IN_PLACE_FROM
        watched = Cohort.release_ is not DOOR
        if watched or state.at or shift is None or long or not cohort.active(k).all():
            return False
        if cohort.ledger is not None:
            cohort.ledger.charge(k, self._rows)
        if not 0 <= k - self._block.first < len(self._block.places):
            self._block = self._prepared(k)
        self._mix_into_spare(state, k, shift)
        state.round_index += 1
        return True

    def _mix_into_spare(self, state: State, k: int, shift: int) -> None:
        x, w, block = state.rows["x"], state.rows["w"], self._block
        if self._spare is None:
            self._spare = empty_rows(x, *x.shape), torch.empty_like(w)
        out, out_w = self._spare
        self._loop(
            *(self._array(part) for part in (x, w, out, out_w)),
            x.shape[1],
            self._features,
            self._targets,
            block.places[k - block.first],
            block.numbers[k - block.first],
            self._keys,
            self._receivers,
            k,
            shift,
            self._kernel.model,
            self._kernel.limits[x.dtype],
        )
        state.rows["x"], state.rows["w"], self._spare = out, out_w, (x, w)

    def _array(self, part: Tensor) -> np.ndarray:
        """Return rows with their padding, or a vector, as an array; the two buffers of each take turns."""
        known = self._views.get(id(part))
        if known is None or known[0] is not part:
            if len(self._views) >= 8:  # somebody else has put others in their place
                self._views.clear()
            whole = padded(part) if part.ndim == 2 else part
            if whole is None:
                raise TypeError("rows of a state must be aligned")
            known = self._views[id(part)] = part, whole.detach().numpy()
        return known[1]

    def _prepared(self, k: int) -> _Block:
        """Work out what a round and those after it need."""
        cohort = self._cohort
        first, places = cohort.data.lone_places(k)
        rounds = range(first, first + len(places))
        rates = -np.stack([cohort.learning_rate.at(each)[cohort.peers] for each in rounds])
        rates /= cohort.data.sampler.normalizer
        plan, shape = cohort.protection, rates.shape
        if plan is None:
            clips, noises = np.full(shape, np.inf), np.zeros(shape)
        else:
            last = len(plan.clip_norms)
            steps = [min(each, last - 1) for each in rounds]  # a block may reach beyond the run
            clips = np.stack([plan.clip_norm(each) for each in steps])
            noises = np.stack([plan.noise(each, (SUM,)).get(SUM, np.zeros(shape[1])) for each in steps])
            noises = noise_std(rates, clips, noises)
        numbers = np.stack([rates, clips, noises], axis=1)
        return _Block(first, places, cohort.tensor(numbers).numpy())
