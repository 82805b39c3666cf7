"""Noise that pairs of peers draw from a common secret and add with opposite signs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise.source import NoisedSum, NoiseMechanism
from flower_privdec.rows.keys import digest
from flower_privdec.scenario.sections import CancellingSection

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.privacy.noise.philox import PhiloxNoise

ENDS = ((0, 1.0), (1, -1.0))  # of a pair, each with the sign of its noise


class CancellingNoise(NoiseMechanism):
    """Independent noise, and noise of pairs that cancels in the sum over peers; see `mechanism.cancelling`.

    In a deployment (secrets are not simulated) all noise is added in float64 and rounded once, and a pair's draw is
    used only once by each of its ends. A peer whose partners are not all there adds more noise of its own if these are
    too few, and one that takes a step again adds all of its noise itself; see `PairPlan.own_with`.

    Privacy: the noise of a step is what the plan solved for, as `mechanism.cancelling` and `mechanism.partners` prove.

    A simulation of complete secrets draws one normal a peer in place of one a pair, from the same law.

    Args:
        plan: the plan of the run.

    Attributes:
        draws_apart: whether a simulation draws for each pair all the same, so that some pairs' noise can be taken off.
    """

    name = "cancelling"
    line = "noise that pairs of peers add with opposite signs, so that it is gone from the mean"
    Section = CancellingSection
    draws_apart: bool = False

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self._source: PhiloxNoise | None = None
        self._of_members: PhiloxNoise | None = None
        self._last: dict[tuple[str, int], int] = {}  # the last step of each sum and peer that shared noise

    def of_new_process(self) -> CancellingNoise:
        """Return the same mechanism, which has drawn nothing yet."""
        return CancellingNoise(self.plan)

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism; if a step has several sums, each has noise of its own."""
        self.add_in_units_(out, std, torch.ones_like(std), noised)

    def needed_std(self, std: Tensor, noised: NoisedSum) -> Tensor:
        """Return the noise V that peers would need by themselves, of whose own noise this is the deviation, [r]."""
        own = torch.from_numpy(self.plan.own[noised.step, noised.peers])
        return std / own.to(std)

    def add_in_units_(self, out: Tensor, std: Tensor, units: Tensor, noised: NoisedSum) -> None:
        """Add noise to rows that are in units of their own.

        Args:
            std: see `add_`; in the units of the sum.
            units: what 1 in each row of `out` is in the units of the sum, [r].
        """
        peers = noised.peers
        row_of = np.full(len(self.plan.weights), -1)
        row_of[peers] = np.arange(len(peers))
        # By what each peer multiplies what is in the units of the conserved sum.
        into_rows = np.zeros(len(self.plan.weights))
        conserved = self.plan.weights[peers] * units.double().cpu().numpy()
        np.divide(1.0, conserved, out=conserved, where=conserved > 0)
        into_rows[peers] = conserved
        own_std = torch.where(units > 0, std / units, torch.zeros_like(std))

        is_common = self.plan.is_complete and not self.draws_apart
        if noised.secrets.simulated and is_common:
            super().add_(out, own_std, noised)
            self._add_common_(out, noised, row_of, std, into_rows)
            return

        # The pairs that draw in this step, and have an end here.
        rows = row_of[self.plan.edges]  # [E, 2], -1 for peers that are not among these
        pair = self.plan.pair_std(noised.step, peers, std.double().cpu().numpy(), noised.name)  # [E]
        chosen = np.flatnonzero((pair > 0) & (rows >= 0).any(axis=1))

        if noised.secrets.simulated:
            super().add_(out, own_std, noised)
            self.add_pairs_(out, noised, chosen, rows, pair, into_rows)
            return

        # A pair's noise can be much larger than what it leaves: both are added before the sum is rounded.
        work = out.double()
        own = self._add_once_(work, noised, chosen, rows, pair, into_rows)
        super().add_(work, own_std.double() * torch.from_numpy(own).to(std.device), noised)
        out.copy_(work)

    def _add_common_(
        self, out: Tensor, noised: NoisedSum, row_of: np.ndarray, std: Tensor, into_rows: np.ndarray
    ) -> None:
        """Add what all pairs draw, if every two peers share a secret: by one draw of each peer.

        With c_ij = a_i a_j and T = Σ_j a_j², peer i adds

            a_i √T g_i - a_i² / √T Σ_j a_j g_j

        Its covariance with peer j is a_i² (T - a_i²) if i = j and -a_i² a_j² = -c_ij² if not, as that of the sums of
        what pairs draw. So the law of all rows is the same, and the noise cancels.
        """
        stds = std.double().cpu().numpy()
        member = self.plan.member_std(noised.step, noised.peers, stds, noised.name)  # a
        members = np.flatnonzero(member > 0)
        if len(members) < 2:
            return
        a = member[members]
        total = math.sqrt(float((a**2).sum()))
        into = into_rows[members]
        factors = np.stack([a * total * into, a, a**2 / total * into])
        source = self._members(noised, out.device)
        source.add_common_(out, row_of[members], factors, noised.step, members, f"common {noised.name}")

    def add_pairs_(
        self,
        out: Tensor,
        noised: NoisedSum,
        chosen: np.ndarray,
        rows: np.ndarray,
        pair: np.ndarray,
        into_rows: np.ndarray,
    ) -> None:
        """Add what some pairs draw from simulated secrets.

        Args:
            chosen: which pairs, int64 [c].
            rows: at which row of `out` the ends of each pair stand, -1 if they do not, int64 [E, 2].
            pair: see `PairPlan.pair_std`.
            into_rows: what takes each peer's from the units of `pair` to those of `out`, float64 [n_peers].
        """
        signs = np.array([sign for _, sign in ENDS])
        scales = pair[chosen, None] * signs * into_rows[self.plan.edges[chosen]]  # [c, 2], in units of the rows
        source = self._pairs(noised, out.device)
        source.add_shared_(out, rows[chosen], scales, noised.step, chosen, f"pair {noised.name}")

    def _add_once_(
        self,
        work: Tensor,
        noised: NoisedSum,
        chosen: np.ndarray,
        rows: np.ndarray,
        pair: np.ndarray,
        into_rows: np.ndarray,
    ) -> np.ndarray:
        """Add what pairs draw, once for each end.

        Returns:
            by how much the own noise of each row has to be larger than planned, float64 [r].
        """
        from flower_privdec.privacy.exact_noise import SystemNormals, key_stream
        from flower_privdec.privacy.noise.deployed import SharedNoise

        # Peers that take the step again: what they drew in it with others is used up.
        peers = noised.peers.tolist()
        again = {peer for peer in peers if self._last.get((noised.name, peer), -1) >= noised.step}
        for peer in peers:
            self._last[noised.name, peer] = noised.step

        normals = SystemNormals(key_stream(), work.shape[1])  # one memory for all draws
        partners: dict[int, list[int]] = {peer: [] for peer in peers}  # of each row, those that it draws with
        for number in chosen.tolist():
            ends = self.plan.edges[number].tolist()
            if not self._shares(noised, *ends):
                continue

            key = digest(32, "pair noise", noised.secrets.of(*ends), noised.step, noised.name)
            for end, sign in ENDS:
                row = rows[number, end]
                peer = ends[end]
                if row < 0 or peer in again:
                    continue
                scale = torch.from_numpy(sign * pair[number : number + 1] * into_rows[peer])
                source = SharedNoise(key, normals)
                source.add_(work[row : row + 1], scale, noised.step, np.array([peer]), "pair")
                partners[peer].append(ends[1 - end])

        return np.array([self._own_noise(noised.step, peer, partners[peer], again) for peer in peers])

    def _shares(self, noised: NoisedSum, peer: int, other: int) -> bool:
        """Return whether two peers share a draw now; where all are counted on, they must."""
        return not self.plan.by_partners or noised.secrets.knows(peer, other)

    def _own_noise(self, step: int, peer: int, partners: list[int], again: set[int]) -> float:
        """Return how much more noise of its own than planned a peer adds that draws with these partners."""
        if not self.plan.by_partners and peer not in again:
            return 1.0
        own = self.plan.own_with(step, peer, np.array(partners, dtype=np.int64))
        return own / float(self.plan.own[step, peer])

    def _members(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._of_members is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {peer: noised.secrets.of_one(peer) for peer in range(len(self.plan.weights))}
            self._of_members = build_noise(keys, device)
        return self._of_members

    def _pairs(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {number: noised.secrets.of(*pair) for number, pair in enumerate(self.plan.edges.tolist())}
            self._source = build_noise(keys, device)
        return self._source
