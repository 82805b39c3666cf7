"""How a peer protects what it sends: the clip norm, the noise, and the budget they are held to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from flower_privdec.common.arguments import check_numbers
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.mods.peer_ledger import check_budget, solved_noise
from flower_privdec.flower.mods.peer_place import PeerPlace


@dataclass(frozen=True)
class PeerPrivacy:
    """What an app asks for.

    Attributes:
        clip_norm: the most that a round's update may move the model, in Euclidean norm; None for no protection.
        noise_multiplier: noise std over the clip norm; None to solve it from epsilon.
        epsilon: the budget over all rounds and runs of this peer; None for no limit.
        delta: δ.
    """

    clip_norm: float | None
    noise_multiplier: float | None
    epsilon: float | None
    delta: float

    def __post_init__(self) -> None:
        check_numbers(asdict(self))
        for name, value in (("clip_norm", self.clip_norm), ("epsilon", self.epsilon)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ScenarioError(f"{name}={value} must be finite and > 0; leave it out for none")
        noise = self.noise_multiplier
        if noise is not None and not (noise > 0 and math.isfinite(noise)):
            raise ScenarioError(f"noise_multiplier={noise} must be finite and > 0; leave it out to have no noise")
        if self.delta is None or not 0 < self.delta < 1:
            raise ScenarioError(f"delta={self.delta} must be in (0, 1); well below one over the number of peers")
        if (self.clip_norm is None) != (noise is None and self.epsilon is None):
            raise ScenarioError(
                f"clip_norm={self.clip_norm}, noise_multiplier={noise}, epsilon={self.epsilon}: a peer is protected by "
                "clip_norm together with noise_multiplier, or with the epsilon from which the noise is solved; give "
                "both, or neither"
            )

    @property
    def on(self) -> bool:
        """Return whether anything is protected."""
        return self.clip_norm is not None

    def budget(self, place: PeerPlace) -> tuple[float, float]:
        """Return ε and δ to which a peer is held: the stricter of the app's and its owner's.

        Raises:
            BudgetError: the owner's budget cannot be kept.
        """
        delta = self.delta if place.delta is None else min(self.delta, place.delta)
        check_budget(place.epsilon, delta, self.clip_norm, "the node-config")
        return min(place.epsilon, self.epsilon or math.inf), delta

    def noise(self, place: PeerPlace, rounds: int) -> float:
        """Return the noise multiplier of a run of so many rounds."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        epsilon, delta = self.budget(place)
        return solved_noise(epsilon, delta, max(1, rounds))
