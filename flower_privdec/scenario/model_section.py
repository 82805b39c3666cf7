"""The section of the model, by name or of a user's own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from flower_privdec import catalogue
from flower_privdec.scenario.fields import (
    Count,
    Section,
)

CNN_OPTIONS = ("channels", "kernel", "hidden", "activation", "pool")
MODEL_OPTIONS = {
    "linear": ("bias",),
    "softmax": ("bias",),
    "mlp": ("hidden", "activation"),
    **dict.fromkeys((name for name in catalogue.MODELS if name.startswith("cnn")), CNN_OPTIONS),
    "resnet18-gn": ("groups", "width"),
    "text": ("width", "hidden", "activation"),
}


class ModelSection(Section):
    """The model every peer trains.

    Attributes:
        name: of a model that `privdec list` describes; left out where module is given.
        init: torch's own initial parameters, drawn by the seed, or all zero.
        bias: whether each output has one, of linear and softmax; left out, true.
        hidden: widths of the hidden layers, of mlp, text and the models named cnn; left out, [100] for mlp, [64] for
            cnn and none for text.
        activation: of mlp, text and the models named cnn; left out, relu.
        channels: of each convolution, of the models named cnn; left out, [16, 32] for cnn.
        kernel: side of each convolution in pixels, of the models named cnn; left out, 3 for cnn.
        pool: whether the largest of 2 x 2 pixels is kept after each convolution, of the models named cnn.
        groups: of channels that are normalised together, of resnet18-gn; left out, 32.
        width: channels of the first stage, of resnet18-gn; left out, 64; or numbers a token is turned into, of text;
            left out, 32.
        module: your own, as `package.module:factory`, imported from where the command runs.
        arguments: what the factory is called with, by name.
    """

    name: Annotated[str, catalogue.MODELS] | None = None
    init: Annotated[str, catalogue.INITS] = "default"
    bias: bool | None = None
    hidden: list[Count] | None = None
    activation: Annotated[str, catalogue.ACTIVATIONS] | None = None
    channels: list[Count] | None = None
    kernel: Count | None = None
    pool: bool | None = None
    groups: Count | None = None
    width: Count | None = None
    module: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_of_the_model(self) -> ModelSection:
        if (self.name is None) == (self.module is None):
            raise ValueError("give either a model's name, or module: package.module:factory")
        if self.module is not None and ":" not in self.module:
            raise ValueError(f"module={self.module!r} must be 'package.module:factory'")
        if self.module is None and self.arguments:
            raise ValueError("arguments belong to a module of your own: remove them, or give module")
        keys, own = set(self._given()), MODEL_OPTIONS.get(self.name or "", ())
        for key in sorted(keys - set(own)):
            takers = ", ".join(name for name, options in MODEL_OPTIONS.items() if key in options)
            raise ValueError(f"{key} belongs to {takers}, not to {self.name or self.module}: remove it")
        return self

    def _given(self) -> dict[str, Any]:
        every = {option for options in MODEL_OPTIONS.values() for option in options}
        return self.model_dump(include=every, exclude_none=True)

    def options(self) -> dict[str, Any]:
        """Return the options given for the model itself."""
        return self._given() if self.module is None else {"arguments": self.arguments}
