"""Noise that pairs of peers draw from a common secret and add with opposite signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise.source import NoisedSum, NoiseMechanism
from flower_privdec.rows.keys import digest
from flower_privdec.scenario.sections import CancellingSection

if TYPE_CHECKING:
    from flower_privdec.privacy.noise.philox import PhiloxNoise

ENDS = ((0, 1.0), (1, -1.0))  # of a pair, each with the sign of its noise


class CancellingNoise(NoiseMechanism):
    """Independent noise, and noise of pairs that cancels in the sum over peers; see `mechanism.cancelling`.

    In a deployment (secrets are not simulated) all noise is added in float64 and rounded once, and a pair's draw is
    used only once by each of its ends: a peer that has no secret with another, or takes the step again, adds as much
    noise of its own.

    Privacy: the noise of a step is what the plan solved for, as `mechanism.cancelling` proves.

    Args:
        plan: the plan of the run.
    """

    name = "cancelling"
    line = "noise that pairs of peers add with opposite signs, so that it is gone from the mean"
    Section = CancellingSection

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self._source: PhiloxNoise | None = None
        self._last: dict[tuple[str, int], int] = {}  # the last step of each sum and peer that shared noise

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism; if a step has several sums, each has noise of its own."""
        peers = noised.peers
        row_of = np.full(len(self.plan.weights), -1)
        row_of[peers] = np.arange(len(peers))
        rows = row_of[self.plan.edges]  # [E, 2], -1 for peers that are not among these

        # The pairs that draw in this step, and have an end here.
        pair = self.plan.pair_std(noised.step, peers, std.double().cpu().numpy(), noised.name)  # [E]
        chosen = np.flatnonzero((pair > 0) & (rows >= 0).any(axis=1))

        if noised.secrets.simulated:
            super().add_(out, std, noised)
            self.add_pairs_(out, noised, chosen, rows, pair)
            return

        # A pair's noise can be much larger than what it leaves: both are added before the sum is rounded.
        work = out.double()
        self._add_once_(work, noised, chosen, rows, pair)
        super().add_(work, std.double(), noised)
        out.copy_(work)

    def add_pairs_(
        self, out: Tensor, noised: NoisedSum, chosen: np.ndarray, rows: np.ndarray, pair: np.ndarray
    ) -> None:
        """Add what some pairs draw from simulated secrets.

        Args:
            chosen: which pairs, int64 [c].
            rows: at which row of `out` the ends of each pair stand, -1 if they do not, int64 [E, 2].
            pair: see `PairPlan.pair_std`.
        """
        signs = np.array([sign for _, sign in ENDS])
        weights = self.plan.weights[self.plan.edges[chosen]]  # [c, 2]
        scales = pair[chosen, None] * signs / weights  # [c, 2], in units of the rows
        source = self._pairs(noised, out.device)
        source.add_shared_(out, rows[chosen], scales, noised.step, chosen, f"pair {noised.name}")

    def _add_once_(
        self, work: Tensor, noised: NoisedSum, chosen: np.ndarray, rows: np.ndarray, pair: np.ndarray
    ) -> None:
        """Add what pairs draw, once for each end, or as much noise of a peer's own."""
        from flower_privdec.privacy.noise.deployed import SharedNoise, SystemNoise

        # Peers that take the step again: what they drew in it with others is used up.
        peers = noised.peers.tolist()
        again = {peer for peer in peers if self._last.get((noised.name, peer), -1) >= noised.step}
        for peer in peers:
            self._last[noised.name, peer] = noised.step

        unit = torch.ones(1, dtype=torch.float64)
        for number in chosen.tolist():
            ends = self.plan.edges[number].tolist()
            key = None
            if noised.secrets.knows(*ends):
                key = digest(32, "pair noise", noised.secrets.of(*ends), noised.step, noised.name)

            for end, sign in ENDS:
                row = rows[number, end]
                peer = ends[end]
                if row < 0:
                    continue
                if key is None or peer in again:
                    source = SystemNoise()
                else:
                    source = SharedNoise(key)
                drawn = torch.zeros(1, work.shape[1], dtype=torch.float64)
                source.add_(drawn, unit, noised.step, np.array([peer]), "pair")
                scale = sign * pair[number] / self.plan.weights[peer]
                work[row].add_(drawn[0].to(work.device), alpha=float(scale))

    def _pairs(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {number: noised.secrets.of(*pair) for number, pair in enumerate(self.plan.edges.tolist())}
            self._source = build_noise(keys, device)
        return self._source
