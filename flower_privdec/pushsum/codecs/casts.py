"""Wire codecs that send the numbers themselves, perhaps in a shorter type; see `pushsum.frames.WireCodec`.

Only encoding a row needs torch: a process that only reads headers does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from flower_privdec.common.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class ExactCodec:
    """Sends rows as they are."""

    name = "exact"
    line = "rows as they are"

    def encode(self, row: Tensor) -> Tensor:
        """Return the row itself."""
        return row

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent."""
        return sent.to(like)


class CastCodec:
    """Sends rows as numbers of a shorter type, which rounds what it cannot hold.

    Attributes:
        dtype: the type, by torch's name.
    """

    dtype: ClassVar[str]

    def encode(self, row: Tensor) -> Tensor:
        """Return the row, rounded."""
        shorter: torch.dtype = getattr(torch, self.dtype)
        return row.to(shorter)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the rounded row in the type of another."""
        return sent.to(like)


class Float32Codec(CastCodec):
    """Four bytes a number."""

    name = "float32"
    line = "four bytes a number, rounded; for push-sum, which keeps what rounding takes away"
    dtype = "float32"


class BFloat16Codec(CastCodec):
    """Two bytes a number."""

    name = "bfloat16"
    line = "two bytes a number, rounded; for push-sum, which keeps what rounding takes away"
    dtype = "bfloat16"
