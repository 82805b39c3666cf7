"""The section that puts a fixed feature extractor in front of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flower_privdec.catalogue import FEATURES
from flower_privdec.scenario.fields import Count, Positive, Section


class FeaturesSection(Section):
    """What each example is turned into, by itself and with nothing fitted on private data.

    Attributes:
        kind: a wavelet scattering transform (extra `features`).
        scales: J, wavelets of 1, 2, ... 2^(J-1) pixels; the output is 2^J times smaller.
        angles: L, how many directions.
        order: how many wavelets in a row, 1 or 2.
        groups: of channels, each normalised over one example; 0 for none.
        pool: the side to which each channel is averaged.
        whitening: by mean and covariance of the features of drawn pen strokes, or none.
        ridge: what whitening adds to the variances, as a share of the largest.
        norm: of the features of every example.
    """

    kind: Annotated[str, FEATURES]
    scales: Annotated[int, Field(ge=1, le=8)] = 2
    angles: Annotated[int, Field(ge=1, le=32)] = 8
    order: Annotated[int, Field(ge=1, le=2)] = 2
    groups: Annotated[int, Field(ge=0)] = 27
    pool: Count = 4
    whitening: Literal["none", "strokes"] = "none"
    ridge: Positive = 0.01
    norm: Positive = 4.0
