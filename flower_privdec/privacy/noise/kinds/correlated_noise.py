"""Noise that takes back, in each step, a part of the noise of the steps before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.privacy.mechanism.correlation import INDEPENDENT_STEPS, Correlation
from flower_privdec.privacy.mechanism.declared import Declaration
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.source import INDEPENDENT, NoisedSum, NoiseMechanism
from flower_privdec.scenario.sections import CorrelatedSection

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 2**19  # numbers that are worked on at a time on a CPU: the noise of some steps at these fits into its cache


class CorrelatedNoise(NoiseMechanism):
    """Noise w_t = z_t - Σ_j c_j w_{t-j}, made of the noise z of single steps; see `mechanism.correlation`.

    z are independent normals; or, if peers share noise, a peer's own and what it shares, over the noise that it would
    need by itself. Then both ends of a pair take back alike what they share, and it cancels as before.

    The noise of the last steps has to be remembered. If all numbers are drawn from keys, it is kept as rows of the
    state like any other, and a resumed run goes on with it. A process that draws from the operating system keeps it in
    its memory only, and starts with none: who knew it could uncover the last steps.

    Privacy: a step costs what a Gaussian release costs whose sum an example moves by |c| clip norms, once in each block
    of b steps; see `mechanism.correlation`.

    Args:
        correlation: how steps are correlated; by default not at all.
        single_step: makes z.
        draws_anew: whether each process draws numbers of its own, which no other can draw again.
    """

    name = "correlated"
    line = "noise that takes back a part of that of earlier steps, so that less of it adds up in the model"
    Section = CorrelatedSection

    def __init__(
        self,
        correlation: Correlation = INDEPENDENT_STEPS,
        single_step: NoiseMechanism = INDEPENDENT,
        *,
        draws_anew: bool = False,
    ) -> None:
        self.correlation = correlation
        self.single_step = single_step
        self._draws_anew = draws_anew
        self._n_slots = correlation.bands - 1  # each has the noise of one past step
        if not draws_anew:
            self.state = tuple(f"past{slot}" for slot in range(self._n_slots))  # type: ignore[misc]

        # Only if a process draws anew, and keeps the slots to itself:
        self._memory: list[Tensor] = []  # the slots
        self._row_of: dict[int, int] = {}  # the row of each peer in them
        self._last: dict[int, int] = {}  # the last step of each peer

    def of_new_process(self) -> CorrelatedNoise:
        """Return the same mechanism, which remembers nothing yet."""
        single_step = self.single_step
        if isinstance(single_step, CancellingNoise):
            single_step = single_step.of_new_process()
        return CorrelatedNoise(self.correlation, single_step, draws_anew=self._draws_anew)

    def released(self, sums: Declaration) -> Declaration:
        """See NoiseMechanism: an example that is drawn moves a block of steps by |c| clip norms.

        Raises:
            ScenarioError: a step publishes anything but one sum over its batch, to all.
        """
        if sums is None:
            return None

        published = [part for part in sums if part.to != "self"]
        is_plain = all(part.to == "all" and part.over == "batch" and part.idle == 0 for part in published)
        if len(published) != 1 or not is_plain:
            found = ", ".join(_described(part.name, part.to, part.idle) for part in published) or "none"
            raise ScenarioError(
                "privacy.noise that is correlated over steps is for those that publish one sum over their batch, and "
                f"this algorithm's publish {found}: take algorithm.name=privsgp, or leave privacy.noise out",
                code="noise.correlated-sums",
            )

        norm = self.correlation.norm
        return tuple(part if part.to == "self" else replace(part, drawn=part.drawn * norm) for part in sums)

    def drawn_std(self, step: int, peer: int) -> float | None:
        """See NoiseMechanism; with one band nothing is special."""
        if self._n_slots == 0:
            return None
        if isinstance(self.single_step, CancellingNoise):
            return float(self.single_step.plan.own[step, peer])
        return 1.0

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism.

        Raises:
            RunError: a process that draws anew takes a step again, or one from before.
        """
        if self._n_slots == 0:
            self.single_step.add_(out, std, noised)
            return

        slots, slot_rows = self._rows_of_slots(out, noised)
        n_rows = len(slots[0])
        places: Tensor | slice = slice(None)  # all rows in order, mostly: a slice needs no copy
        if len(slot_rows) < n_rows or not np.array_equal(slot_rows, np.arange(n_rows)):
            places = torch.from_numpy(slot_rows).to(out.device)

        # Noise is correlated over steps that follow each other: after a gap a peer begins without memory.
        forgets = self._forgetting(noised)
        if forgets.any():
            forgetful = torch.from_numpy(slot_rows[forgets]).to(out.device)
            for slot in slots:
                slot[forgetful] = 0

        # The slots are a ring: w_t goes into slot t mod (b - 1), in place of w_{t-b+1}, which no later step needs.
        past = [slots[(noised.step - lag) % len(slots)][places] for lag in range(1, len(slots) + 1)]
        if isinstance(self.single_step, CancellingNoise):
            self._add_pairs_(out, std, past, noised, self.single_step)
        else:
            for rows in _some_rows(out):
                parts = [earlier[rows] for earlier in past]
                noise = self._taken_back(parts)
                units = torch.ones_like(std[rows], dtype=noise.dtype)
                noised.normals.add_(noise, units, noised.step, noised.peers[rows], noised.name)
                _add_scaled_(out[rows], noise, std[rows])
        if not isinstance(places, slice):
            # `past` are copies then, of which the last has w_t by now.
            slots[noised.step % len(slots)][places] = past[-1]

    def _add_pairs_(
        self, out: Tensor, std: Tensor, past: list[Tensor], noised: NoisedSum, pairs: CancellingNoise
    ) -> None:
        """Add noise of which peers share a part. That is drawn for all rows at once, as a draw may enter two of them.

        Args:
            past: see `_taken_back`, of all rows.
        """
        for rows in _some_rows(out):
            self._taken_back([earlier[rows] for earlier in past])
        noise = past[-1]
        units = pairs.needed_std(std, noised)
        pairs.add_in_units_(noise, std, units, noised)
        for rows in _some_rows(out):
            _add_scaled_(out[rows], noise[rows], units[rows])

    def _taken_back(self, past: list[Tensor]) -> Tensor:
        """Return -Σ_j c_j w_{t-j}, which overwrites the oldest noise.

        Args:
            past: w_{t-1}, w_{t-2}, ..., w_{t-b+1} of some rows, [r, d] each.
        """
        noise = past[-1]
        noise.mul_(-self.correlation.coefficients[-1])
        for coefficient, earlier in zip(self.correlation.coefficients[1:-1], past[:-1], strict=True):
            noise.sub_(earlier, alpha=coefficient)
        return noise

    def _rows_of_slots(self, out: Tensor, noised: NoisedSum) -> tuple[list[Tensor], np.ndarray]:
        """Return the noise of past steps by slot, and which rows of it are of the peers of a sum, int64 [r]."""
        if not self._draws_anew:
            return [noised.state[name] for name in self.state], noised.rows

        # By peer: a process may compute its peers in several cohorts, each of which numbers its rows from 0.
        rows = [self._row_of.setdefault(peer, len(self._row_of)) for peer in noised.peers.tolist()]
        n_rows = len(self._row_of)
        known = len(self._memory[0]) if self._memory else 0
        if known < n_rows:
            new_rows = torch.zeros(n_rows - known, out.shape[1], dtype=torch.float64, device=out.device)
            kept = self._memory or [new_rows[:0]] * self._n_slots
            self._memory = [torch.cat((part, new_rows)) for part in kept]
        return self._memory, np.array(rows, dtype=np.int64)

    def _forgetting(self, noised: NoisedSum) -> np.ndarray:
        """Return which rows begin without memory, bool [r]."""
        forgets = np.zeros(len(noised.peers), dtype=bool)
        if noised.round_index > 0:
            forgets |= ~noised.participation.active(noised.round_index - 1)[noised.peers]
        if not self._draws_anew:
            return forgets

        for row, peer in enumerate(noised.peers.tolist()):
            last = self._last.get(peer)
            if last is not None and noised.step <= last:
                raise RunError(
                    f"step {noised.step} of peer {peer} comes after step {last} in one process, which has paid for it "
                    "once: start a new process, which pays for the steps that it takes",
                    code="noise.step-again",
                )
            forgets[row] |= last is None or noised.step != last + 1
            self._last[peer] = noised.step
        return forgets


def _add_scaled_(out: Tensor, noise: Tensor, std: Tensor) -> None:
    """Add noise, times a number for each row."""
    if out.dtype == noise.dtype:
        out.addcmul_(noise, std[:, None])
    else:
        # In float64 until the sum is rounded, once, as deployed noise always is.
        out.copy_(torch.addcmul(out.double(), noise, std.double()[:, None]))


def _some_rows(out: Tensor) -> Iterator[slice]:
    """Yield the rows to work on at a time: few on a CPU, so that their numbers stay in its cache until all is done."""
    at_once = len(out)
    if out.device.type == "cpu":
        at_once = max(1, AT_ONCE // max(1, out.shape[1]))
    for first in range(0, len(out), max(1, at_once)):
        yield slice(first, first + at_once)


def _described(name: str, to: str, idle: float) -> str:
    kind = f"{name!r} to {'all' if to == 'all' else 'single neighbours'}"
    if idle > 0:
        kind += " that also depends on examples that were not drawn"
    return kind
