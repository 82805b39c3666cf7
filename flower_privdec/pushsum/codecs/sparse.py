"""Wire codecs that send a part of a row's numbers, one byte each: the largest, or those whose turn it is.

Of a share as it is they would leave most of x with the sender and take all of w to the receiver, so that models would
never agree: they swing by as much as they are large. So they send *differences*: both ends keep the model that the
sender's shares have told so far, a share says what changed most, and it stands for that model as a whole (see
`pushsum.frames.Shared`). What is left out is left for later shares.

A model that is told late pushes its sender the other way, by the share's weight. With many numbers left out the graph's
weights would overshoot, so shares have a part of them (`damping`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from flower_privdec.common.catalogue import CodecKeys
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError
from flower_privdec.common.fields import Fraction
from flower_privdec.pushsum.codecs.quantized import ByteSteps

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BYTES = 4
COUNT_BYTES = 8
BLOCK = 256  # numbers that share a scale
MOST_NUMBERS = 2**31  # of a row, so that products of places fit into 64 bits


class PartKeys(CodecKeys):
    """Keys of the codecs that send a part of a row.

    Attributes:
        part: which share of the numbers is sent.
        damping: which part of the graph's weights a share has; left out, what was measured to converge.
        differences: whether a share has what changed since the last one to the same neighbour; without it, models do
            not agree.
    """

    part: Fraction = 0.25
    damping: Fraction | None = None
    differences: bool = True


class PartCodec:
    """What `top-k` and `random-k` have in common: k numbers of a row.

    Args:
        part, damping, differences: see PartKeys.

    Attributes:
        remembers, damping: see `pushsum.frames.WireCodec`.
    """

    Section: ClassVar[type[CodecKeys]] = PartKeys
    stable: ClassVar[float]  # times the part: the largest damping that was measured to converge on all graphs

    def __init__(self, part: float, damping: float | None, differences: bool) -> None:
        self.remembers = differences
        self.damping = 1.0
        if damping is not None:
            self.damping = damping
        elif differences:
            self.damping = min(1.0, self.stable * part)
        self._part = part
        self._bytes = ByteSteps(BLOCK)

    def cautions(self) -> list[str]:
        """Return a warning if models will not agree, or late."""
        part = f"part={self._part:g}"
        if not self.remembers:
            return [f"{part} without differences: models do not agree, only their mean is good; leave differences on"]

        stable = min(1.0, self.stable * self._part)
        if self.damping > stable:
            return [
                f"damping={self.damping:g} with {part} was seen to drive models apart; at most {stable:g} was measured "
                "to converge"
            ]
        if self.damping < 1:
            times = 1 / self.damping
            return [
                f"{part} sends a part {self.damping:g} of the graph's weights, so models agree about {times:.3g} times "
                "more slowly, and final mixing takes as many times more rounds; int4 needs 4.25 bits a number and none "
                "of that"
            ]
        return []

    def count(self, n: int) -> int:
        """Return how many of n numbers are sent."""
        if n > MOST_NUMBERS:
            raise ArgumentError(f"a row of {n} numbers must have at most {MOST_NUMBERS}", code="codec.row")
        return math.ceil(self._part * n)


class TopKCodec(PartCodec):
    """Sends the largest numbers, and where they are: a bit for each number of the row, or an index for each sent."""

    name = "top-k"
    line = "the largest changes since the last share to a neighbour, a byte each; for push-sum"
    stable = 2.0

    def encode(self, row: Tensor) -> Tensor:
        """Return places, steps and scales, uint8."""
        flat = row.reshape(-1)
        k = self.count(len(flat))
        largest = torch.topk(flat.abs(), k, sorted=False).indices
        indices = largest.sort().values
        return torch.cat([self._places(indices, len(flat)), self._bytes.encode(flat[indices])])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row, with zeros for what was not sent."""
        n = like.numel()
        k = self.count(n)
        indices = self._indices(sent, n).to(like.device)
        numbers = self._bytes.decode(sent[self._place_bytes(n) :], k, like)
        return like.new_zeros(n).index_copy_(0, indices, numbers).reshape(like.shape)

    def check(self, sent: Tensor, like: Tensor) -> None:
        """Refuse bytes that no row is encoded as."""
        n = like.numel()
        k = self.count(n)
        indices = self._indices(sent, n)
        if len(indices) != k:
            raise ArgumentError(f"{len(indices)} numbers are sent, and {k} of {n} must be", code="codec.indices")

        ends = [int(end) for end in (indices.min(), indices.max())] if k else []
        if any(not 0 <= end < n for end in ends):
            raise ArgumentError(f"an index is {ends[-1]}, which must be below {n}", code="codec.indices")
        if bool((indices.diff() <= 0).any()):
            raise ArgumentError("indices must ascend, each once", code="codec.indices")
        self._bytes.check(sent[self._place_bytes(n) :], k)

    def _is_bitmap(self, n: int) -> bool:
        return math.ceil(n / 8) <= INDEX_BYTES * self.count(n)

    def _place_bytes(self, n: int) -> int:
        if self._is_bitmap(n):
            return math.ceil(n / 8)
        return INDEX_BYTES * self.count(n)

    def _places(self, indices: Tensor, n: int) -> Tensor:
        """Return where the numbers are that are sent, as bytes."""
        if self._is_bitmap(n):
            bits = torch.zeros(8 * math.ceil(n / 8), dtype=torch.int32, device=indices.device)
            bits[indices] = 1
            values = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=indices.device)
            return (bits.reshape(-1, 8) * values).sum(dim=1).to(torch.uint8)
        return torch.stack([indices >> shift & 255 for shift in (0, 8, 16, 24)], dim=1).reshape(-1).to(torch.uint8)

    def _indices(self, sent: Tensor, n: int) -> Tensor:
        """Return what `_places` says, int64."""
        places = sent[: self._place_bytes(n)].to(torch.int64)
        if self._is_bitmap(n):
            bits = torch.stack([places >> shift & 1 for shift in range(8)], dim=1).reshape(-1)
            return bits.nonzero().reshape(-1)
        parts = places.reshape(-1, INDEX_BYTES)
        return parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16 | parts[:, 3] << 24


class RandomKCodec(PartCodec):
    """Sends numbers whose turn it is: each row is gone through again and again, each time in another order.

    The order follows from how many shares came before over this edge, which is public and sent in place of places.
    """

    name = "random-k"
    line = "some of the changes since the last share to a neighbour, each in its turn, a byte each; for push-sum"
    stable = 0.5
    counts = True

    def encode(self, row: Tensor, number: int) -> Tensor:
        """Return the number of the share, steps and scales, uint8."""
        flat = row.reshape(-1)
        indices = self._turn(number, len(flat), flat)
        counted = torch.tensor([*number.to_bytes(COUNT_BYTES, "little")], dtype=torch.uint8, device=flat.device)
        return torch.cat([counted, self._bytes.encode(flat[indices])])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row, with zeros for what was not sent."""
        n = like.numel()
        number = int.from_bytes(bytes(sent[:COUNT_BYTES].tolist()), "little")
        indices = self._turn(number, n, like)
        numbers = self._bytes.decode(sent[COUNT_BYTES:], self.count(n), like)
        return like.new_zeros(n).index_copy_(0, indices, numbers).reshape(like.shape)

    def check(self, sent: Tensor, like: Tensor) -> None:
        """Refuse bytes that no row is encoded as; any number of a share names places of the row."""
        self._bytes.check(sent[COUNT_BYTES:], self.count(like.numel()))

    def _turn(self, number: int, n: int, like: Tensor) -> Tensor:
        """Return the places of the numbers whose turn it is, int64 [k], each once."""
        from flower_privdec.rows.keys import digest  # imports NumPy, without which scenarios are read

        k = self.count(n)
        if not k:
            return torch.zeros(0, dtype=torch.int64, device=like.device)
        passes, turn = divmod(number, math.ceil(n / k))

        # An order of all places in steps of one length, which has no factor in common with how many there are.
        drawn = digest(16, "random-k", n, passes)
        offset = int.from_bytes(drawn[:8], "little") % n
        stride = int.from_bytes(drawn[8:], "little") % n
        while math.gcd(stride, n) != 1:
            stride = (stride + 1) % n
        places = (turn * k + torch.arange(k, device=like.device)) % n
        return (offset + stride * places) % n
