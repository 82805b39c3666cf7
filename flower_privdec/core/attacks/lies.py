"""The lies that papers try, and a few that devices tell by themselves when their numbers break."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flower_privdec.common.catalogue import AttackKeys
from flower_privdec.common.deferred import torch
from flower_privdec.common.fields import Positive
from flower_privdec.core.attack import Attack

if TYPE_CHECKING:
    from torch import Tensor


class SignFlip(Attack):
    """The liar's model with the opposite sign."""

    name = "sign-flip"
    line = "minus the liar's own model"

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return -own


class Scale(Attack):
    """The liar's model times a factor: a large one drowns the others, 0 makes them forget."""

    class Section(AttackKeys):
        """The keys of scaling.

        Attributes:
            factor: of any sign.
        """

        factor: float = -10.0

    name = "scale"
    line = "the liar's own model times `factor`"

    def __init__(self, peers: Collection[int], factor: float) -> None:
        super().__init__(peers)
        self.factor = factor

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return own * self.factor


class Noise(Attack):
    """The liar's model with noise: in the standard deviation of all numbers of the honest models."""

    class Section(AttackKeys):
        """The keys of noise.

        Attributes:
            strength: how many times the standard deviation.
        """

        strength: Positive = 30.0

    name = "noise"
    line = "the liar's own model, with noise of `strength` times the honest models' standard deviation"

    def __init__(self, peers: Collection[int], strength: float) -> None:
        super().__init__(peers)
        self.strength = strength

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(own.shape, generator=generator, dtype=own.dtype, device=own.device)
        return own + self.strength * honest.std() * noise


class Mimic(Attack):
    """The model of one honest peer, always the same: it counts twice, and the liar's data not at all.

    Source: Karimireddy, He and Jaggi, Byzantine-robust learning on heterogeneous datasets via bucketing (2022).
    """

    name = "mimic"
    line = "the model of the first peer that does not lie"

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return honest[0].clone()


class ALittleIsEnough(Attack):
    """The honest mean, moved by some standard deviations of the honest models in each coordinate.

    Source: Baruch, Baruch and Goldberg, A little is enough (2019).
    """

    class Section(AttackKeys):
        """The keys of a little.

        Attributes:
            strength: z, how many standard deviations.
        """

        strength: Positive = 1.5

    name = "alie"
    line = "the honest mean less `strength` standard deviations in each coordinate (A little is enough)"

    def __init__(self, peers: Collection[int], strength: float) -> None:
        super().__init__(peers)
        self.strength = strength

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return honest.mean(0) - self.strength * honest.std(0)


class MinusMean(Attack):
    """Minus the mean of the honest models, which pulls all of them to zero."""

    name = "minus-mean"
    line = "minus the honest mean"

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return -honest.mean(0)


class NotANumber(Attack):
    """NaN, as a device sends whose own training diverged."""

    name = "nan"
    line = "NaN in place of each number"

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        return torch.full_like(own, torch.nan)


class OneWay(Attack):
    """The honest mean, moved in every round in one direction by the usual distance of an honest model.

    In each round it looks like noise. Over many it takes all models with it.
    """

    class Section(AttackKeys):
        """The keys of a lie that points one way.

        Attributes:
            strength: how many times the mean distance of an honest model from the honest mean.
        """

        strength: Positive = 0.8

    name = "one-way"
    line = "the honest mean, moved by `strength` times the usual distance, always in one direction drawn at random"

    def __init__(self, peers: Collection[int], strength: float) -> None:
        super().__init__(peers)
        self.strength = strength

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        mean: Tensor = honest.mean(0)
        always_the_same = torch.Generator(mean.device).manual_seed(1)
        direction = torch.randn(mean.shape, generator=always_the_same, dtype=mean.dtype, device=mean.device)
        lie: Tensor = mean + direction * (self.strength * _usual_distance(honest) / direction.norm())
        return lie


class Hidden(Attack):
    """The honest mean, moved back along its own way by the usual distance of an honest model: hidden in its noise."""

    class Section(AttackKeys):
        """The keys of a hidden lie.

        Attributes:
            strength: how many times the mean distance of an honest model from the honest mean.
        """

        strength: Positive = 0.8

    name = "hidden"
    line = "the honest mean, moved towards zero by `strength` times the usual distance: no farther than the others"

    def __init__(self, peers: Collection[int], strength: float) -> None:
        super().__init__(peers)
        self.strength = strength

    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        mean: Tensor = honest.mean(0)
        length: Tensor = mean.norm().clamp(min=1e-30)
        return mean - mean * (self.strength * _usual_distance(honest) / length)


def _usual_distance(honest: Tensor) -> Tensor:
    """Return the mean distance of an honest model from the honest mean."""
    distances: Tensor = (honest - honest.mean(0)).norm(dim=1)
    return distances.mean()
