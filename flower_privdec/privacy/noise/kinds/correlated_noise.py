"""Noise of a step that takes back a part of that of the steps before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.privacy.mechanism.correlation import INDEPENDENT_STEPS, Correlation
from flower_privdec.privacy.mechanism.declared import Declaration
from flower_privdec.privacy.noise.source import NoisedSum, NoiseMechanism
from flower_privdec.scenario.sections import CorrelatedSection

KIND = "privacy.noise.kind=correlated"


class CorrelatedNoise(NoiseMechanism):
    """Noise w_t = z_t - Σ_j c_j w_{t-j} of independent normals z; see `mechanism.correlation`.

    The noise of the last steps is the mechanism's state. If all numbers are drawn from keys, it is rows of the state
    like any other, so that a resumed run goes on with it. A process that draws what no one can draw again keeps it in
    its own memory only, and begins without any: it is what hides the last steps.

    Privacy: a step costs what a Gaussian release costs whose sum an example moves by |c| clip norms, once in each block
    of b steps; see `mechanism.correlation`.

    Args:
        correlation: how steps are correlated; by default not at all.
        draws_anew: whether each process draws numbers of its own.
    """

    name = "correlated"
    line = "noise that takes back a part of that of earlier steps, so that less of it adds up in the model"
    Section = CorrelatedSection

    def __init__(self, correlation: Correlation = INDEPENDENT_STEPS, *, draws_anew: bool = False) -> None:
        self.correlation = correlation
        self._draws_anew = draws_anew
        self._slots = [f"past{number}" for number in range(correlation.bands - 1)]
        self._memory: dict[str, Tensor] = {}  # the rows of the state, if a process keeps them to itself
        self._last: dict[int, int] = {}  # the last step of each peer, likewise
        if not draws_anew:
            self.state = tuple(self._slots)  # type: ignore[misc]

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
                f"{KIND} is for steps that publish one sum over their batch, and this algorithm's publish {found}: "
                "take algorithm.name=privsgp, or leave privacy.noise out",
                code="noise.correlated-sums",
            )

        norm = self.correlation.norm
        return tuple(part if part.to == "self" else replace(part, drawn=part.drawn * norm) for part in sums)

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism.

        Raises:
            RunError: a process that draws anew takes a step again, or one from before.
        """
        if not self._slots:
            super().add_(out, std, noised)
            return

        dtype = torch.float64 if self._draws_anew else out.dtype
        fresh = torch.zeros_like(out, dtype=dtype)
        std = std.to(dtype)
        super().add_(fresh, std, noised)

        # Noise is remembered in standard deviations, which may change from step to step.
        fresh.mul_(torch.where(std > 0, 1 / std, 0.0)[:, None])
        self._correlate_(fresh, noised)
        if self._draws_anew:
            # Rounded once, as deployed noise always is.
            out.copy_(torch.addcmul(out.double(), fresh, std[:, None]))
        else:
            out.addcmul_(fresh, std[:, None])

    def _correlate_(self, fresh: Tensor, noised: NoisedSum) -> None:
        """Turn z into w, and remember it."""
        state = self._state(fresh, noised)
        n_rows = len(state[self._slots[0]])
        rows: Tensor | slice = slice(None)  # of all rows: a slice spares copies
        if len(noised.rows) < n_rows or not np.array_equal(noised.rows, np.arange(n_rows)):
            rows = torch.from_numpy(noised.rows).to(fresh.device)

        # Noise is correlated over steps that follow each other: after a gap a peer begins without memory.
        forgets = self._forgetting(noised)
        if forgets.any():
            places = torch.from_numpy(noised.rows[forgets]).to(fresh.device)
            for name in self._slots:
                state[name][places] = 0

        # A ring: the noise of step t is in slot t mod (b - 1).
        for lag, coefficient in enumerate(self.correlation.coefficients[1:], start=1):
            slot = state[self._slots[(noised.step - lag) % len(self._slots)]]
            fresh.sub_(slot[rows], alpha=coefficient)
        state[self._slots[noised.step % len(self._slots)]][rows] = fresh

    def _state(self, fresh: Tensor, noised: NoisedSum) -> dict[str, Tensor]:
        """Return the rows of all peers in which the noise of past steps is, by slot."""
        if not self._draws_anew:
            return {name: noised.state[name] for name in self._slots}

        n_rows = int(noised.rows.max(initial=-1)) + 1
        for name in self._slots:
            kept = self._memory.get(name)
            known = 0 if kept is None else len(kept)
            if known < n_rows:
                grown = torch.zeros(n_rows, fresh.shape[1], dtype=fresh.dtype, device=fresh.device)
                if kept is not None:
                    grown[:known] = kept
                self._memory[name] = grown
        return self._memory

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


def _described(name: str, to: str, idle: float) -> str:
    kind = f"{name!r} to {'all' if to == 'all' else 'single neighbours'}"
    if idle > 0:
        kind += " that examples move which are not drawn"
    return kind
