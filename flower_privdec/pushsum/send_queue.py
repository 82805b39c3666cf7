"""What a peer that nobody waits for has to say to one neighbour."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flower_privdec.pushsum.frames import RowMessage
from flower_privdec.pushsum.share_protocol import Acknowledgement, FrozenShare, Hello

GIVEN_UP = 4  # calls in a row that do not reach a neighbour, until it counts as lost


@dataclass
class Outgoing:
    """What is on its way to one neighbour.

    Attributes:
        hello_at: when the next hello is due.
        words: hellos that answer its own.
        taken: the last acknowledgement, which speaks for all before it.
        share: the last that it was brought.
        rows: by place in the program, those that it was not brought yet.
        failures: how many calls in a row did not reach it.
    """

    hello_at: float = 0.0
    words: list[Hello] = field(default_factory=list)
    taken: list[Acknowledgement] = field(default_factory=list)
    share: FrozenShare[Tensor] | None = None
    rows: dict[int, RowMessage] = field(default_factory=dict)
    failures: int = 0

    @property
    def is_given_up(self) -> bool:
        """Return whether too many calls in a row did not reach it."""
        return self.failures >= GIVEN_UP
