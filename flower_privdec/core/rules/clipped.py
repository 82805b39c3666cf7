"""Clipped mixing, without the neighbours that stand out: what a scenario calls `clipped`."""

from __future__ import annotations

import numpy as np

from flower_privdec.core.robust_rule import Numbers, RobustRule, Seen, of_the_others

FAR = 3.0  # times the distance of the next: honest models are hardly ever as far apart
NEAR = 0.01  # of the way since the start: models as near are the same, however much nearer others are
BEHIND = 1.5  # times less progress than the next: honest models share most of their way


class Clipped(RobustRule):
    """Clips every neighbour to the distance of the others, and leaves out those that stand out.

    With f the number of neighbours that may lie, in each exchange:

    - A neighbour's model counts no farther from the peer's own than the f-th farthest of the *other* neighbours
      (or than the peer has moved since the start, as long as fewer than f others are known; and at least NEAR of that,
      since the models agree at the end, and then some honest one is many times as far as the next).
    - The f neighbours that stand out most are left out, if they stand out clearly: FAR times as far as that, or
      BEHIND times less progress along the peer's own way than the f-th least of the others. A model that points
      the other way is therefore left out however near it is, which a distance does not show while the models
      are small beside their noise.

    Distances are those when each neighbour last came, so a graph on which a peer hears one neighbour a round has them
    too. All is relative to other neighbours: models in another unit give the same, and a peer whose own model is far
    off takes in the others instead of leaving them out.

    Source: the clipping is that of He, Karimireddy and Jaggi, Byzantine-robust decentralized learning via
    ClippedGossip (2022), with a threshold from the other neighbours. Leaving out is in the manner of iterative outlier
    scissors, which Ye, Zhu and Ling (2023) find best among robust rules under noise.

    Deviations: leaving out needs clear evidence, so that honest peers of unlike data are clipped and not left out; the
    evidence from progress is ours.
    """

    name = "clipped"
    line = "no farther from a peer's own model than the next neighbour's; those that stand out clearly are left out"

    def kept(self, seen: Seen) -> Numbers:
        distances = seen.distances
        limits = of_the_others(distances, self.byzantine)
        limits = np.where(np.isnan(limits), seen.moved, limits)
        limits = np.maximum(limits, NEAR * seen.moved)

        # How many times farther than the others: 0 if it is no farther at all, inf if these are all at the same place.
        farther = np.zeros(len(distances))
        is_farther = distances > limits
        with np.errstate(divide="ignore", invalid="ignore"):
            farther[is_farther] = (distances / limits)[is_farther]

        suspicion = farther / FAR
        for progress in seen.progress:
            suspicion = np.maximum(suspicion, self._behind(progress) / BEHIND)

        # At most as many are left out as may lie; of equal suspicion, the farther.
        most_suspect = np.lexsort((-distances, -suspicion))[: self.byzantine]
        is_left_out = np.zeros(len(distances), dtype=bool)
        is_left_out[most_suspect] = suspicion[most_suspect] > 1

        kept = np.ones(len(distances))
        kept[is_farther] = 1 / farther[is_farther]
        kept[is_left_out | np.isinf(distances)] = 0
        return kept

    def _behind(self, progress: Numbers) -> Numbers:
        """Return how many times less progress each made than others, [N]: 0 if the others made none, inf for none."""
        least = -of_the_others(-progress, self.byzantine)
        behind = np.zeros(len(progress))
        is_behind = (least > 0) & (progress < least)
        behind[is_behind] = np.inf
        is_slow = is_behind & (progress > 0)
        behind[is_slow] = least[is_slow] / progress[is_slow]
        return behind
