"""Noise that pairs of peers draw from a common secret and add with opposite signs."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise.source import NoisedSum, NoiseMechanism, NoiseSource

AT_ONCE = 2**22  # numbers that are drawn before they are added


class CancellingNoise(NoiseMechanism):
    """Independent noise, and noise of pairs that cancels in the sum over peers; see `mechanism.cancelling`.

    Privacy: the noise of a step is what the plan solved for, as `mechanism.cancelling` proves.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self._source: NoiseSource | None = None

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism; where a step has several sums, each has noise of its own."""
        super().add_(out, std, noised)
        edges, peers = self.plan.edges, noised.peers
        row_of = torch.full((len(self.plan.weights),), -1)
        row_of[torch.from_numpy(peers)] = torch.arange(len(peers))
        rows = row_of[torch.from_numpy(edges)]  # [E, 2], -1 of peers that are not among these
        pair = self.plan.pair_std(noised.step, peers, std.double().cpu().numpy())
        chosen = torch.from_numpy(pair > 0) & (rows >= 0).any(dim=1)
        weights = torch.from_numpy(self.plan.weights)[torch.from_numpy(edges)]
        for numbers in torch.nonzero(chosen)[:, 0].split(max(1, AT_ONCE // out.shape[1])):
            drawn = torch.zeros(len(numbers), out.shape[1], dtype=out.dtype, device=out.device)
            ones = torch.ones(len(numbers), dtype=std.dtype, device=std.device)
            self._pairs(noised, out.device).add_(drawn, ones, noised.step, numbers.numpy(), f"pair {noised.name}")
            for end, sign in ((0, 1.0), (1, -1.0)):
                hosted = rows[numbers, end] >= 0
                scale = sign * torch.from_numpy(pair)[numbers] / weights[numbers, end]
                parts = drawn[hosted.to(out.device)] * scale[hosted].to(out)[:, None]
                out.index_add_(0, rows[numbers, end][hosted].to(out.device), parts)

    def _pairs(self, noised: NoisedSum, device: torch.device) -> NoiseSource:
        if self._source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {number: noised.secrets.of(*pair) for number, pair in enumerate(self.plan.edges.tolist())}
            self._source = build_noise(keys, device)
        return self._source
