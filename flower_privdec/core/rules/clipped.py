"""Clipped mixing, without the neighbours that stand out: what a scenario calls `clipped`."""

from __future__ import annotations

import numpy as np

from flower_privdec.core.robust_rule import Numbers, RobustRule, Seen, of_the_others

FAR = 3.0  # times the distance of the next: honest models are hardly ever as far apart
NEAR = 0.01  # of the way since the start: models as near are the same, however much nearer others are
BEHIND = 1.5  # times less progress than the next: honest models share most of their way
LAG = 0.2  # of the usual distance behind the next along that way, on average: noise and unlike data point elsewhere
SPREAD = 3.0  # times as far from the middle along that way as the next: a small model's noise points everywhere
STEADY = 2.0  # times as far as the next on average: what is chance averages out


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
    - A lie that hides in the noise of one exchange has to point the same way in many. So a neighbour is also left out
      if it stays behind along the peer's way on average (LAG, SPREAD), or if its average difference is STEADY times
      that of the others; below that it is clipped to theirs. For the latter a peer has to know more than 2 f
      neighbours, of which most are honest.

    Distances are those when each neighbour last came, so a graph on which a peer hears one neighbour a round has them
    too. All is relative to other neighbours: models in another unit give the same, and a peer whose own model is far
    off takes in the others instead of leaving them out.

    Source: the clipping is that of He, Karimireddy and Jaggi, Byzantine-robust decentralized learning via
    ClippedGossip (2022), with a threshold from the other neighbours. Leaving out is in the manner of iterative outlier
    scissors, which Ye, Zhu and Ling (2023) find best among robust rules under noise. That only averages over rounds
    stop a lie that hides in noise is shown by Karimireddy, He and Jaggi, Learning from history (2021).

    Deviations: leaving out needs clear evidence, so that honest peers of unlike data are clipped and not left out; the
    evidence from progress, and averages that the receiver keeps, are ours.
    """

    name = "clipped"
    line = "no farther from a peer's own model than the next neighbour's; those that stand out clearly are left out"

    def kept(self, seen: Seen) -> Numbers:
        distances = seen.distances
        limits = of_the_others(distances, self.byzantine)
        limits = np.where(np.isnan(limits), seen.moved, limits)
        limits = np.maximum(limits, NEAR * seen.moved)

        farther = _times(distances, limits)
        suspicion = farther / FAR
        for progress in seen.progress:
            suspicion = np.maximum(suspicion, self._behind(progress) / BEHIND)

        for ahead in seen.ahead:
            suspicion = np.maximum(suspicion, self._lag(ahead, limits))
        if len(distances) > 2 * self.byzantine:
            steadier = _times(seen.steady, np.maximum(of_the_others(seen.steady, self.byzantine), NEAR * seen.moved))
            suspicion = np.maximum(suspicion, steadier / STEADY)
            farther = np.maximum(farther, steadier)

        # At most as many are left out as may lie; of equal suspicion, the farther.
        most_suspect = np.lexsort((-distances, -suspicion))[: self.byzantine]
        is_left_out = np.zeros(len(distances), dtype=bool)
        is_left_out[most_suspect] = suspicion[most_suspect] > 1

        kept = np.ones(len(distances))
        is_farther = farther > 1
        kept[is_farther] = 1 / farther[is_farther]
        kept[is_left_out | np.isinf(distances)] = 0
        return kept

    def _lag(self, ahead: Numbers, limits: Numbers) -> Numbers:
        """Return how far each is behind the others along the peer's way, in what is suspicious, [N]."""
        least = -of_the_others(-ahead, self.byzantine)
        spread = of_the_others(np.abs(ahead - np.median(ahead)), self.byzantine)
        if np.isnan(least).any():
            return np.zeros(len(ahead))
        return _times(least - ahead, np.maximum(LAG * limits, SPREAD * spread))

    def _behind(self, progress: Numbers) -> Numbers:
        """Return how many times less progress each made than others, [N]: 0 if the others made none, inf for none."""
        least = -of_the_others(-progress, self.byzantine)
        behind = np.zeros(len(progress))
        is_behind = (least > 0) & (progress < least)
        behind[is_behind] = np.inf
        is_slow = is_behind & (progress > 0)
        behind[is_slow] = least[is_slow] / progress[is_slow]
        return behind


def _times(values: Numbers, limits: Numbers) -> Numbers:
    """Return how many times each value is as large as its limit, [N]: 0 if it is no larger, inf if the limit is 0."""
    times = np.zeros(len(values))
    is_larger = values > limits
    with np.errstate(divide="ignore", invalid="ignore"):
        times[is_larger] = (values / limits)[is_larger]
    return times
