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

    In a deployment (secrets are not simulated) all noise is added in float64 and rounded once, and each end uses a
    pair's draw only once. If too few of its partners are there, a peer adds more noise of its own, the less the more
    its partners have promised to add; if it takes a step again, it adds all of its noise itself. See
    `PairPlan.own_with`.

    In a simulation in which every two peers share a secret, what all pairs draw is made of one normal for each peer in
    place of one for each pair, with the same law (`_add_common_`).

    Privacy: the noise of a step is what the plan solved for, as `mechanism.cancelling` and `mechanism.partners` prove.

    Args:
        plan: the plan of the run.

    Attributes:
        draws_apart: make a simulation draw for each pair even so; an audit can then subtract the noise of some pairs.
    """

    name = "cancelling"
    line = "noise that pairs of peers add with opposite signs, so that it is gone from the mean"
    Section = CancellingSection
    draws_apart: bool = False

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self._pair_source: PhiloxNoise | None = None
        self._peer_source: PhiloxNoise | None = None
        self._last: dict[tuple[str, int], int] = {}  # for each sum and peer, the last step in which it shared noise

    def of_new_process(self) -> CancellingNoise:
        """Return the same mechanism, which has drawn nothing yet."""
        return CancellingNoise(self.plan)

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism; if a step has several sums, each gets noise of its own."""
        self.add_in_units_(out, std, torch.ones_like(std), noised)

    def needed_std(self, std: Tensor, noised: NoisedSum) -> Tensor:
        """Return V, the std of the noise that peers would need by themselves, given `std` of their own noise, [r]."""
        own = torch.from_numpy(self.plan.own[noised.step, noised.peers])
        return std / own.to(std)

    def add_in_units_(self, out: Tensor, std: Tensor, units: Tensor, noised: NoisedSum) -> None:
        """Add noise to rows, each of which is in a unit of its own.

        Three units occur: that of a row of `out`, that of the peer's released sum, and that of the sum over all peers
        which mixing conserves. In the last one the two ends of a pair add the same number.

        Args:
            std: see `add_`; in the unit of the released sum.
            units: how many units of the released sum 1 in each row of `out` is, [r].
        """
        peers = noised.peers
        row_of = np.full(len(self.plan.weights), -1)
        row_of[peers] = np.arange(len(peers))

        # What takes each peer's noise from the unit of the conserved sum to that of its row; 0 if the row has none.
        in_conserved = self.plan.weights[peers] * units.double().cpu().numpy()
        into_rows = np.zeros(len(self.plan.weights))
        into_rows[peers] = np.divide(1.0, in_conserved, out=np.zeros_like(in_conserved), where=in_conserved > 0)
        own_std = torch.where(units > 0, std / units, torch.zeros_like(std))

        is_common = self.plan.is_complete and not self.draws_apart
        if noised.secrets.simulated and is_common:
            super().add_(out, own_std, noised)
            self._add_common_(out, noised, row_of, std, into_rows)
            return

        # The pairs that draw in this step and have an end among these peers.
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
        """Add noise with the law of what all pairs draw, by one normal g_i of each peer, if all share secrets.

        With c_ij = a_i a_j and T = Σ_j a_j², peer i adds

            a_i √T g_i - a_i² / √T Σ_j a_j g_j

        The variance of this is a_i² (T - a_i²) = Σ_{j≠i} c_ij², and its covariance with what peer j adds is
        -a_i² a_j² = -c_ij²: both as if each pair had drawn. So the law of all rows is the same, and the noise cancels.
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
        source = self._source_of_peers(noised, out.device)
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
            rows: the row of `out` of each end of each pair, -1 if it is not among them, int64 [E, 2].
            pair: see `PairPlan.pair_std`.
            into_rows: what takes each peer's noise from the unit of `pair` to that of its row, float64 [n_peers].
        """
        signs = np.array([sign for _, sign in ENDS])
        scales = pair[chosen, None] * signs * into_rows[self.plan.edges[chosen]]  # [c, 2], in units of the rows
        source = self._source_of_pairs(noised, out.device)
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
            The factor by which the own noise of each row must be larger than planned, float64 [r].
        """
        from flower_privdec.privacy.exact_noise import SystemNormals, key_stream
        from flower_privdec.privacy.noise.deployed import SharedNoise

        # Peers that take the step again, which have used up what they drew in it with others: in it and in all before
        # the last one, however far they go back.
        peers = noised.peers.tolist()
        last = {peer: self._last.get((noised.name, peer), -1) for peer in peers}
        again = {peer for peer in peers if noised.step <= last[peer]}
        for peer in peers:
            self._last[noised.name, peer] = max(noised.step, last[peer])

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

        return np.array([self._own_noise(noised, peer, partners[peer], again) for peer in peers])

    def _shares(self, noised: NoisedSum, peer: int, other: int) -> bool:
        """Return whether two peers share a draw now. If the plan counts on all peers, every pair has to."""
        return not self.plan.by_partners or noised.secrets.knows(peer, other)

    def _own_noise(self, noised: NoisedSum, peer: int, partners: list[int], again: set[int]) -> float:
        """Return the factor on a peer's planned own noise, if it draws with only these partners."""
        if not self.plan.by_partners and peer not in again:
            return 1.0

        # What it has promised it keeps, and it counts on what its partners have promised.
        step = noised.step
        promised = np.array([noised.secrets.promised(other, step) for other in partners])
        at_least = noised.secrets.promised(peer, step)
        own = self.plan.own_with(step, peer, np.array(partners, dtype=np.int64), promised, at_least)
        return own / float(self.plan.own[step, peer])

    def _source_of_peers(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._peer_source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {peer: noised.secrets.of_one(peer) for peer in range(len(self.plan.weights))}
            self._peer_source = build_noise(keys, device)
        return self._peer_source

    def _source_of_pairs(self, noised: NoisedSum, device: torch.device) -> PhiloxNoise:
        if self._pair_source is None:
            from flower_privdec.privacy.noise import build_noise

            keys = {number: noised.secrets.of(*pair) for number, pair in enumerate(self.plan.edges.tolist())}
            self._pair_source = build_noise(keys, device)
        return self._pair_source
