"""The section of dual averaging: a regularizer in place of a learning rate."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from flower_privdec.catalogue import DUAL, DUAL_SCHEDULES, REGULARIZERS
from flower_privdec.scenario.fields import NonNegative, Positive, Section

Finite = Annotated[float, Field(allow_inf_nan=False)]
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
        kind: none; l2, μ‖x‖²/2; l1, φ‖x‖_1; elastic-net, both; box and ball confine the parameters.
        weight: μ of l2 and elastic-net, φ of l1.
        l1_weight: φ of elastic-net.
        lower: of box.
        upper: of box.
        radius: of ball.
    """

    kind: Annotated[str, REGULARIZERS]
    weight: Positive | None = None
    l1_weight: Positive | None = None
    lower: Finite | None = None
    upper: Finite | None = None
    radius: Positive | None = None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> RegularizerSection:
        required = REGULARIZER_KEYS[self.kind]
        for key in ("weight", "l1_weight", "lower", "upper", "radius"):
            is_set = getattr(self, key) is not None
            if is_set and key not in required:
                raise ValueError(f"{key} is no key of kind {self.kind}: remove it")
            if not is_set and key in required:
                raise ValueError(f"kind {self.kind} needs {key}: add it")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower:g} must be <= upper={self.upper:g}")
        return self

    @property
    def strongly_convex(self) -> bool:
        """Whether h is strongly convex."""
        return self.kind in ("l2", "elastic-net")


class DualAveragingSection(Section):
    """Dual averaging of a convex loss and a regularizer. It has no learning rate.

    `loss`, written here, is task.loss: where both are given they must be the same, and `privdec show` has it in task.

    Attributes:
        name: which algorithm.
        regularizer: h, which is added to the loss.
        schedule: strongly-convex weighs round t by a_t = t, and γ_t is gamma, for a strongly convex regularizer;
            convex weighs all rounds alike, and γ_t is gamma sqrt(t).
        gamma: γ, by which half the squared norm of the model holds it back; 0, the value of the theory, for the
            strongly convex schedule alone.
    """

    name: Annotated[str, DUAL]
    regularizer: RegularizerSection = RegularizerSection(kind="l2", weight=0.0005)
    schedule: Annotated[str, DUAL_SCHEDULES] = "strongly-convex"
    gamma: NonNegative = 20.0

    @model_validator(mode="after")
    def _schedule_of_the_regularizer(self) -> DualAveragingSection:
        if self.schedule == "strongly-convex" and not self.regularizer.strongly_convex:
            raise ValueError(
                f"schedule strongly-convex must have a strongly convex regularizer, and {self.regularizer.kind} is "
                "none: use l2 or elastic-net, or schedule convex"
            )
        if self.schedule == "convex" and not self.gamma > 0:
            raise ValueError("gamma=0.0 must be > 0 for schedule convex, whose steps nothing else bounds")
        return self
