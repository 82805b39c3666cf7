"""Wire codecs that send whole steps of a block's scale in place of numbers: one byte a number, or half of one.

A row is cut into blocks. Each block has a scale, the size of a step, so that its largest number is the most steps that
fit; it is sent as a bfloat16, whose few digits make every multiple exact: what was decoded is encoded to the same bytes
again. A block with a number that is not finite has such a scale, and is refused by its receiver.

Numbers are rounded to the nearest step. Nothing is drawn: what is cut off stays with the sender, so there is no bias
that random rounding would have to undo, and nearest steps have less error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from flower_privdec.common.catalogue import CodecKeys
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError
from flower_privdec.common.fields import Count

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BYTES = 2  # a bfloat16


def quantized(row: Tensor, most: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the steps of a row, int16 [n] from -most to most, and the scales of its blocks, bfloat16 [blocks]."""
    # bfloat16 has the range of float32, so what is larger than that is infinite on the wire, and refused.
    wide = row.reshape(-1).to(torch.promote_types(row.dtype, torch.float32))
    n = len(wide)
    blocks = math.ceil(n / block)
    padded = torch.nn.functional.pad(wide, (0, blocks * block - n)).reshape(blocks, block)

    largest = padded.abs().amax(dim=1) if n else padded.new_zeros(0)
    scales = (largest / most).to(torch.bfloat16)

    # The scale of the largest numbers is rounded up to one whose multiples would be infinite.
    highest = torch.tensor(torch.finfo(torch.float32).max / (most + 1), dtype=wide.dtype).to(torch.bfloat16)
    is_too_large = torch.isfinite(largest) & (scales > highest) & (largest <= torch.finfo(torch.float32).max)
    scales = torch.where(is_too_large, highest.to(scales.device), scales)

    divisors = scales.to(wide.dtype)[:, None]
    steps = torch.where(divisors > 0, padded / divisors, torch.zeros_like(padded))
    steps = steps.round_().nan_to_num_(0.0).clamp_(-most, most)
    return steps.reshape(-1)[:n].to(torch.int16), scales


def dequantized(steps: Tensor, scales: Tensor, block: int, like: Tensor) -> Tensor:
    """Return the numbers of steps and scales, [n], in the type and on the device of `like`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    widths = scales.to(like.device, wide).repeat_interleave(block)[: len(steps)]
    return (steps.to(like.device, wide) * widths).to(like.dtype)


def scale_bytes(scales: Tensor) -> Tensor:
    """Return scales as bytes, the lower one first, uint8 [2 * blocks]."""
    bits = scales.view(torch.int16).to(torch.int32)
    return torch.stack([bits & 255, bits >> 8 & 255], dim=1).reshape(-1).to(torch.uint8)


def scales_of(sent: Tensor) -> Tensor:
    """Return the scales of their bytes, bfloat16 [blocks]."""
    low, high = sent.reshape(-1, SCALE_BYTES).to(torch.int32).unbind(1)
    bits = low | high << 8
    return bits.to(torch.int16).view(torch.bfloat16)


def check_scales(scales: Tensor) -> None:
    """Refuse scales that no block has.

    Raises:
        ArgumentError: names the first.
    """
    wrong = ~(torch.isfinite(scales) & (scales >= 0))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"the scale of block {at} is {float(scales[at])}, which must be finite and >= 0", code="codec.scale"
        )


class ByteSteps:
    """A byte for each of n numbers, then the scales: what `int8`, `top-k` and `random-k` have in common.

    Args:
        block: how many numbers share a scale.
    """

    most = 127

    def __init__(self, block: int) -> None:
        self.block = block

    def size(self, n: int) -> int:
        """Return the bytes of n numbers."""
        return n + SCALE_BYTES * math.ceil(n / self.block)

    def encode(self, row: Tensor) -> Tensor:
        """Return numbers as bytes, uint8 [size]."""
        steps, scales = quantized(row, self.most, self.block)
        return torch.cat([steps.to(torch.int8).view(torch.uint8), scale_bytes(scales)])

    def decode(self, sent: Tensor, n: int, like: Tensor) -> Tensor:
        """Return n numbers, [n]."""
        steps = sent[:n].contiguous().view(torch.int8)
        return dequantized(steps, scales_of(sent[n:]), self.block, like)

    def check(self, sent: Tensor, n: int) -> None:
        """Refuse bytes that no numbers are encoded as.

        Raises:
            ArgumentError: names the fault.
        """
        check_scales(scales_of(sent[n:]))
        lowest = sent[:n].contiguous().view(torch.int8)
        if n and int(lowest.min()) < -self.most:
            raise ArgumentError("a number is -128 steps, which must be -127 to 127", code="codec.steps")


class StepKeys(CodecKeys):
    """Keys of the codecs that send steps.

    Attributes:
        block: how many numbers share a scale; smaller blocks round less, and cost two bytes each.
        differences: whether a share has what changed since the last one to the same neighbour, so that rounding fades
            away as the models agree. Each end then keeps a model for each neighbour.
    """

    block: Count = 256
    differences: bool = False


class Int8Codec:
    """One byte a number: see `StepKeys` for the arguments."""

    name = "int8"
    line = "one byte a number, steps of a scale that a block of numbers shares; for push-sum"
    Section: ClassVar[type[CodecKeys]] = StepKeys

    def __init__(self, block: int, differences: bool) -> None:
        self.remembers = differences
        self._bytes = ByteSteps(block)

    def encode(self, row: Tensor) -> Tensor:
        """Return steps and scales, uint8."""
        return self._bytes.encode(row)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row."""
        return self._bytes.decode(sent, like.numel(), like).reshape(like.shape)

    def check(self, sent: Tensor, like: Tensor) -> None:
        """Refuse bytes that no row is encoded as."""
        self._bytes.check(sent, like.numel())


class HalfStepKeys(StepKeys):
    """Keys of `int4`; see StepKeys."""

    block: Count = 64
    differences: bool = True


class Int4Codec:
    """Half a byte a number: see `HalfStepKeys` for the arguments."""

    name = "int4"
    line = "half a byte a number, of what changed since the last share to a neighbour; for push-sum"
    Section: ClassVar[type[CodecKeys]] = HalfStepKeys
    most = 7

    def __init__(self, block: int, differences: bool) -> None:
        self.remembers = differences
        self._block = block

    def cautions(self) -> list[str]:
        """Return a warning if models will not agree."""
        if self.remembers:
            return []
        return ["15 steps without differences: models stay apart by their rounding; leave differences on, or take int8"]

    def encode(self, row: Tensor) -> Tensor:
        """Return pairs of steps, each 8 to 15 below zero as in two's complement, and scales, uint8."""
        steps, scales = quantized(row, self.most, self._block)
        halves = torch.nn.functional.pad(steps & 15, (0, len(steps) % 2)).reshape(-1, 2)
        pairs = halves[:, 0] | halves[:, 1] << 4
        return torch.cat([pairs.to(torch.uint8), scale_bytes(scales)])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row."""
        n = like.numel()
        halves = self._halves(sent, n)
        steps = torch.where(halves > self.most, halves - 16, halves)[:n]
        scales = scales_of(sent[math.ceil(n / 2) :])
        return dequantized(steps, scales, self._block, like).reshape(like.shape)

    def check(self, sent: Tensor, like: Tensor) -> None:
        """Refuse bytes that no row is encoded as."""
        n = like.numel()
        check_scales(scales_of(sent[math.ceil(n / 2) :]))
        halves = self._halves(sent, n)
        if bool((halves[:n] == self.most + 1).any()):
            raise ArgumentError("a number is -8 steps, which must be -7 to 7", code="codec.steps")
        if bool(halves[n:].any()):
            raise ArgumentError("the half byte behind the last number must be zero", code="codec.steps")

    @staticmethod
    def _halves(sent: Tensor, n: int) -> Tensor:
        """Return all half bytes of n numbers, int16, one more if n is odd."""
        pairs = sent[: math.ceil(n / 2)].to(torch.int16)
        return torch.stack([pairs & 15, pairs >> 4], dim=1).reshape(-1)
