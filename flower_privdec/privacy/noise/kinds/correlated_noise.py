"""Noise of a step that takes back a part of that of the steps before it."""

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

AT_ONCE = 2**19  # numbers on a CPU: their noise of some steps fits into a core's cache


class CorrelatedNoise(NoiseMechanism):
    """Noise w_t = z_t - Σ_j c_j w_{t-j} of the noise z of single steps; see `mechanism.correlation`.

    z are independent normals, or a peer's own with what it shares with others, in units of the noise that it needs by
    itself: then what two peers share is taken back by both alike, and cancels as before.

    The noise of the last steps is the mechanism's state. If all numbers are drawn from keys, it is rows of the state
    like any other, so that a resumed run goes on with it. A process that draws what no one can draw again keeps it in
    its own memory only, and begins without any: it is what hides the last steps.

    Privacy: a step costs what a Gaussian release costs whose sum an example moves by |c| clip norms, once in each block
    of b steps; see `mechanism.correlation`.

    Args:
        correlation: how steps are correlated; by default not at all.
        of: makes the noise of a single step.
        draws_anew: whether each process draws numbers of its own.
    """

    name = "correlated"
    line = "noise that takes back a part of that of earlier steps, so that less of it adds up in the model"
    Section = CorrelatedSection

    def __init__(
        self,
        correlation: Correlation = INDEPENDENT_STEPS,
        of: NoiseMechanism = INDEPENDENT,
        *,
        draws_anew: bool = False,
    ) -> None:
        self.correlation = correlation
        self.of = of
        self._draws_anew = draws_anew
        self._count = correlation.bands - 1  # of slots
        self._memory: list[Tensor] = []  # the slots, if a process keeps them to itself
        self._row_of: dict[int, int] = {}  # the row of each peer in them
        self._last: dict[int, int] = {}  # the last step of each peer, likewise
        if not draws_anew:
            self.state = tuple(f"past{slot}" for slot in range(self._count))  # type: ignore[misc]

    def of_new_process(self) -> CorrelatedNoise:
        """Return the same mechanism, which remembers nothing yet."""
        of = self.of
        if isinstance(of, CancellingNoise):
            of = of.of_new_process()
        return CorrelatedNoise(self.correlation, of, draws_anew=self._draws_anew)

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
        """See NoiseMechanism; one band is noise as of any mechanism."""
        if self._count == 0:
            return None
        if isinstance(self.of, CancellingNoise):
            return float(self.of.plan.own[step, peer])
        return 1.0

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism.

        Raises:
            RunError: a process that draws anew takes a step again, or one from before.
        """
        if self._count == 0:
            self.of.add_(out, std, noised)
            return

        slots, slot_rows = self._rows_of_slots(out, noised)
        n_rows = len(slots[0])
        places: Tensor | slice = slice(None)  # of all rows: a slice spares copies
        if len(slot_rows) < n_rows or not np.array_equal(slot_rows, np.arange(n_rows)):
            places = torch.from_numpy(slot_rows).to(out.device)

        # Noise is correlated over steps that follow each other: after a gap a peer begins without memory.
        forgets = self._forgetting(noised)
        if forgets.any():
            forgetful = torch.from_numpy(slot_rows[forgets]).to(out.device)
            for slot in slots:
                slot[forgetful] = 0

        # A ring, in standard deviations: w_t is in slot t mod (b - 1), in place of w of b - 1 steps before.
        past = [slots[(noised.step - lag) % len(slots)][places] for lag in range(1, len(slots) + 1)]
        if isinstance(self.of, CancellingNoise):
            self._add_pairs_(out, std, past, noised, self.of)
        else:
            for rows in _some_rows(out):
                parts = [earlier[rows] for earlier in past]
                noise = self._taken_back(parts)
                units = torch.ones_like(std[rows], dtype=noise.dtype)
                noised.normals.add_(noise, units, noised.step, noised.peers[rows], noised.name)
                _add_scaled_(out[rows], noise, std[rows])
        if not isinstance(places, slice):
            slots[noised.step % len(slots)][places] = past[-1]

    def _add_pairs_(
        self, out: Tensor, std: Tensor, past: list[Tensor], noised: NoisedSum, pairs: CancellingNoise
    ) -> None:
        """Add noise of which peers share a part, which is drawn once for all rows.

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
        """Return what a step takes back of the noise of those before it, in place of the oldest one.

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
            missing = [torch.zeros(n_rows - known, out.shape[1], dtype=torch.float64, device=out.device)] * self._count
            kept = self._memory or [part[:0] for part in missing]
            self._memory = [torch.cat(parts) for parts in zip(kept, missing, strict=True)]
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
        # Rounded once, as deployed noise always is.
        out.copy_(torch.addcmul(out.double(), noise, std.double()[:, None]))


def _some_rows(out: Tensor) -> Iterator[slice]:
    """Yield rows to work on at a time: on a CPU few, whose numbers are then read from memory once."""
    at_once = len(out)
    if out.device.type == "cpu":
        at_once = max(1, AT_ONCE // max(1, out.shape[1]))
    for first in range(0, len(out), max(1, at_once)):
        yield slice(first, first + at_once)


def _described(name: str, to: str, idle: float) -> str:
    kind = f"{name!r} to {'all' if to == 'all' else 'single neighbours'}"
    if idle > 0:
        kind += " that examples move which are not drawn"
    return kind
