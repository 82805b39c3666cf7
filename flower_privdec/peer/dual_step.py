"""Dual averaging at a peer of a Flower app: the model that a sum of updates gives, in NumPy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np

from flower_privdec.common.errors import RunError


@dataclass(frozen=True)
class DualStep:
    """The step of dual averaging, as `algorithms.dual_averaging` has it.

        x_t = argmin_x <-s, x> + ι A_t (l2 ‖x‖²/2 + l1 ‖x‖_1) + γ_t ‖x‖²/2, inside the box or the ball

    with s the sum of a_t times the updates, a_t = t and γ_t = γ if strongly convex, else a_t = 1 and γ_t = γ √t, and
    A_t = a_1 + ... + a_t.

    Attributes:
        strongly_convex, gamma: the schedule, and γ.
        l2, l1, lower, upper, radius: of the regularizer; radius stands alone.
        chance: ι, of a peer to be active in a round.
    """

    strongly_convex: bool
    gamma: float
    l2: float = 0.0
    l1: float = 0.0
    lower: float = -math.inf
    upper: float = math.inf
    radius: float = math.inf
    chance: float = 1.0

    @classmethod
    def from_json(cls, text: str) -> DualStep | None:
        """Return the step that an untrusted message names; None for an empty text.

        Raises:
            RunError: it is not such a step.
        """
        if not text:
            return None
        try:
            given = json.loads(text)
            step = cls(bool(given.pop("strongly_convex")), **{name: float(value) for name, value in given.items()})
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise RunError("the message has no settings of dual averaging", code="flower.dual") from error
        is_bounded = step.lower <= step.upper and step.radius > 0 < step.chance <= 1
        if not (is_bounded and step.l1 >= 0 <= step.l2 and 0 < step.pull(1) + step.chance * step.l2 < math.inf):
            raise RunError("the settings of dual averaging have no least value: raise gamma", code="flower.dual")
        return step

    def to_json(self) -> str:
        """Return the settings as `from_json` reads them."""
        return json.dumps(asdict(self))

    def weight(self, t: int) -> float:
        """Return a_t, of round t >= 1."""
        return float(t) if self.strongly_convex else 1.0

    def pull(self, t: int) -> float:
        """Return γ_t."""
        return self.gamma if self.strongly_convex else self.gamma * math.sqrt(t)

    def point(self, s: np.ndarray, t: int) -> np.ndarray:
        """Return x_t, float64 [d], for s [d]."""
        scale = self.chance * (t * (t + 1) / 2 if self.strongly_convex else t)
        x = np.sign(s) * np.maximum(np.abs(s) - scale * self.l1, 0) / (scale * self.l2 + self.pull(t))
        if math.isfinite(self.radius):
            return np.asarray(x * min(1.0, self.radius / max(float(np.linalg.norm(x)), 1e-300)))
        return np.asarray(np.clip(x, self.lower, self.upper))
