"""The sections that an app's peer reads: its privacy and its noise.

They stand apart from the scenario's, because each message to a deployed peer starts a process of its own, and building
the classes of a whole scenario would take it longer than all else of this package.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flower_privdec.common.errors import ArgumentError
from flower_privdec.common.fields import PathText, Positive, Section


class AppNoiseSection(Section):
    """Noise that the peers of an app's round add with opposite signs, so that it is gone from the mean.

    Attributes:
        kind: cancelling.
        colluding: with how many peers an adversary who sees all messages may collude; ε holds against that.
        absent: of how many peers of a round less than all a peer adds no more noise than planned. If more are absent,
            it adds more, and ε holds as well.
        strength: standard deviation of all the noise that a peer shares with others, over the noise that it would need
            by itself; auto weighs what it leaves in the models.
    """

    kind: Literal["cancelling"]
    colluding: Annotated[int, Field(ge=0)]
    absent: Annotated[int, Field(ge=0)] = 0
    strength: Literal["auto"] | Annotated[Positive, Field(le=64)] = "auto"


class AppPrivacySection(Section):
    """What protects a whole peer; `privacy: none` protects nothing.

    Attributes:
        clip_norm: C, the most that one round's update moves the model, in Euclidean norm.
        noise_multiplier: the noise's standard deviation over the clip norm; left out, it is solved for epsilon.
        epsilon: ε, what a peer's ledger is held to over all rounds and runs; left out, there is no limit.
        delta: δ, well below one over the number of peers.
        ledger: a folder of ledgers that several runs share; left out, the ledger lies in the peer's own folder.
        noise: cancelling, for peers that a strategy relays; left out, each peer's noise is independent.
    """

    clip_norm: Positive
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)]
    ledger: PathText | None = None
    noise: AppNoiseSection | None = None

    def _check(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ArgumentError(
                "give epsilon (a budget the noise is solved for), noise_multiplier, or both", code="privacy.no-noise"
            )
