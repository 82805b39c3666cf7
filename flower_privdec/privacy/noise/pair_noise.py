"""Noise that pairs of peers draw from a common secret and add with opposite signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise.source import NoisedSum, NoiseMechanism
from flower_privdec.rows.keys import digest

if TYPE_CHECKING:
    from flower_privdec.privacy.noise.philox import PhiloxNoise

ENDS = ((0, 1.0), (1, -1.0))  # of a pair, each with the sign of its noise


class CancellingNoise(NoiseMechanism):
    """Independent noise, and noise of pairs that cancels in the sum over peers; see `mechanism.cancelling`.

    Where secrets are not simulated, all noise is added in float64 and rounded once, and a pair's draw is used once by
    each of its ends: a peer that has no secret with another, or takes the step again, adds as much noise of its own.

    Privacy: the noise of a step is what the plan solved for, as `mechanism.cancelling` proves.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self._source: PhiloxNoise | None = None
        self._last: dict[tuple[str, int], int] = {}  # the last step of each sum and peer that shared noise

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism; where a step has several sums, each has noise of its own."""
        edges = self.plan.edges
        peers = noised.peers
        row_of = np.full(len(self.plan.weights), -1)
        row_of[peers] = np.arange(len(peers))
        rows = row_of[edges]  # [E, 2], -1 of peers that are not among these
        pair = self.plan.pair_std(noised.step, peers, std.double().cpu().numpy(), noised.name)
        chosen = np.flatnonzero((pair > 0) & (rows >= 0).any(axis=1))
        if noised.secrets.simulated:
            super().add_(out, std, noised)
            self.add_pairs_(out, noised, chosen, rows, pair)
            return
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
            rows: where the ends of each pair stand in `out`, -1 where they do not, int64 [E, 2].
            pair: see `PairPlan.pair_std`.
        """
        scales = pair[chosen, None] * np.array([sign for _, sign in ENDS]) / self.plan.weights[self.plan.edges[chosen]]
        source = self._pairs(noised, out.device)
        source.add_shared_(out, rows[chosen], scales, noised.step, chosen, f"pair {noised.name}")

    def _add_once_(
        self, work: Tensor, noised: NoisedSum, chosen: np.ndarray, rows: np.ndarray, pair: np.ndarray
    ) -> None:
        """Add what pairs draw, once for each end, or as much that is a peer's own."""
        from flower_privdec.privacy.noise.deployed import SharedNoise, SystemNoise

        again = {int(one) for one in noised.peers if self._last.get((noised.name, int(one)), -1) >= noised.step}
        self._last |= {(noised.name, int(one)): noised.step for one in noised.peers}
        one = torch.ones(1, dtype=torch.float64)
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
                drawn = torch.zeros(1, work.shape[1], dtype=torch.float64)
                source = SystemNoise() if key is None or peer in again else SharedNoise(key)
                source.add_(drawn, one, noised.step, np.array([peer]), "pair")
                scale = sign * pair[number] / self.plan.weights[peer]
                work[row].add_(drawn[0].to(work.device), alpha=float(scale))

    def _pairs(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {number: noised.secrets.of(*pair) for number, pair in enumerate(self.plan.edges.tolist())}
            self._source = build_noise(keys, device)
        return self._source
