"""The regularizers of convex learning, and the step of dual averaging that each has in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from flower_privdec.common.catalogue import Choice
from flower_privdec.common.deferred import nn
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import Finite, Positive, Section, check_keys

if TYPE_CHECKING:
    from torch import Tensor


ROUNDING = 1e-6
REGULARIZERS = Choice(
    {
        "none": "nothing",
        "l2": "`weight` times half the squared norm, μ‖x‖²/2; strongly convex",
        "l1": "`weight` times the sum of absolute values, φ‖x‖_1",
        "elastic-net": "l2 by `weight` and l1 by `l1_weight`; strongly convex",
        "box": "every parameter between `lower` and `upper`",
        "ball": "a norm of at most `radius`",
    }
)
REGULARIZER_KEYS = {
    "none": (),
    "l2": ("weight",),
    "l1": ("weight",),
    "elastic-net": ("weight", "l1_weight"),
    "box": ("lower", "upper"),
    "ball": ("radius",),
}


class RegularizerSection(Section):
    """h, which is added to the mean loss; it weighs every parameter, the bias too.

    Attributes:
        kind: which function:
        weight: μ of l2 and elastic-net, φ of l1.
        l1_weight: φ of elastic-net.
        lower: the lower bound of the box.
        upper: the upper bound of the box.
        radius: the radius of the ball.
    """

    kind: Annotated[str, REGULARIZERS]
    weight: Positive | None = None
    l1_weight: Positive | None = None
    lower: Finite | None = None
    upper: Finite | None = None
    radius: Positive | None = None

    def _check(self) -> None:
        check_keys(self, REGULARIZER_KEYS)
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ArgumentError(f"lower={self.lower:g} must be <= upper={self.upper:g}", code="regularizer.bounds")

    @property
    def strongly_convex(self) -> bool:
        """Whether h is strongly convex."""
        return self.kind in ("l2", "elastic-net")


@dataclass(frozen=True)
class Regularizer:
    """A convex function h of a model x, the bias included:

        h(x) = l2 ‖x‖² / 2 + l1 ‖x‖_1,  and ∞ where some x_k is outside [lower, upper] or ‖x‖ > radius

    A bounded radius stands alone: together with the others the step below would not be its closed form.

    Attributes:
        l2: μ >= 0, by which h is strongly convex.
        l1: φ >= 0.
        lower, upper: the sides of the box.
        radius: the radius of the ball around 0.
    """

    l2: float = 0.0
    l1: float = 0.0
    lower: float = -math.inf
    upper: float = math.inf
    radius: float = math.inf

    def __post_init__(self) -> None:
        alone = (self.l2, self.l1, self.lower, self.upper) == (0.0, 0.0, -math.inf, math.inf)
        if math.isfinite(self.radius) and not alone:
            raise ArgumentError(
                "a ball has its step in closed form only by itself, without l1, l2 and a box", code="regularizer.ball"
            )

    def minimizer(self, z: Tensor, scale: float, gamma: float) -> Tensor:
        """Return argmin_x <z, x> + scale h(x) + gamma ‖x‖² / 2 for each row z, in closed form.

        With s = scale l2 + gamma, coordinate by coordinate: -z / s after the soft threshold at scale l1, then into the
        box, for a parabola's least value in an interval is at the point nearest its middle. In a ball, -z / s moved
        straight towards 0, onto the sphere where it lies outside.

        Args:
            z: [m, d].
            scale: ι A_t >= 0. At 0 what is finite of h vanishes; box and ball stay.
            gamma: γ_t >= 0.

        Returns:
            A new tensor [m, d].

        Raises:
            ScenarioError: s = 0, where there is no least value, or more than one point that has it.

        Examples:
            >>> import torch
            >>> Regularizer(l1=1.0).minimizer(torch.tensor([[-3.0, 1.5]]), scale=1.0, gamma=2.0).tolist()
            [[1.0, -0.25]]

        Source: Dual averaging, eq. 6 of Liu et al. (2024), with d(x) = ‖x‖² / 2.
        """
        return self.step_from_(-z, scale, gamma)

    def step_from_(self, minus_z: Tensor, scale: float, gamma: float) -> Tensor:
        """Turn rows -z into the minimizers of `minimizer`, in place, and return them.

        Raises:
            ScenarioError: as there.
        """
        strength = scale * self.l2 + gamma
        if not strength > 0:
            raise ScenarioError(
                f"gamma={gamma:g} must be > 0 if the regularizer is not strongly convex: the step has no single "
                "least value; raise algorithm.gamma, or use an l2 or elastic-net regularizer",
                code="regularizer.not-strongly-convex",
            )

        x = minus_z
        if scale * self.l1 > 0:
            x.copy_(nn.functional.softshrink(x, scale * self.l1))
        x.div_(strength)
        if math.isfinite(self.radius):
            return x.mul_((self.radius / x.norm(dim=1, keepdim=True)).clamp_(max=1.0))
        if math.isfinite(self.lower) or math.isfinite(self.upper):
            x.clamp_(self.lower, self.upper)
        return x

    def value(self, x: Tensor) -> float:
        """Return h of one model, [d]; ∞ outside box and ball, by more than the rounding of an average in float32."""
        low = self.lower - ROUNDING * (1 + abs(self.lower))
        high = self.upper + ROUNDING * (1 + abs(self.upper))
        is_outside_box = bool((x < low).any() | (x > high).any())
        if is_outside_box or float(x.norm()) > self.radius * (1 + ROUNDING):
            return math.inf

        return self.l2 * float(x.square().sum()) / 2 + self.l1 * float(x.abs().sum())


def build_regularizer(section: RegularizerSection) -> Regularizer:
    """Return the regularizer that a section of a scenario describes."""
    weight = section.weight or 0.0
    if section.kind == "l1":
        return Regularizer(l1=weight)
    if section.kind == "box":
        return Regularizer(lower=_or(section.lower, -math.inf), upper=_or(section.upper, math.inf))
    if section.kind == "ball":
        return Regularizer(radius=_or(section.radius, math.inf))
    return Regularizer(l2=weight, l1=section.l1_weight or 0.0)


def _or(number: float | None, otherwise: float) -> float:
    return otherwise if number is None else number
