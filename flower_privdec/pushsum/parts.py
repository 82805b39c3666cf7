"""What is sent, as bytes that lie in several places and are not put together before they leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Parts:
    """Bytes one after the other, wherever they lie; they must stay as they are until they were sent.

    Attributes:
        held: in their order.
    """

    held: tuple[Buffer, ...]

    def __len__(self) -> int:
        return sum(memoryview(part).nbytes for part in self.held)

    def __bytes__(self) -> bytes:
        return b"".join(self.held)

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield all in pieces of some bytes, a shorter one at the end, and one at least."""
        piece, room = list[memoryview](), size
        for part in self.held:
            left = memoryview(part).cast("B")
            while left:
                piece.append(left[:room])
                left, room = left[room:], room - len(piece[-1])
                if not room:
                    yield b"".join(piece)
                    piece, room = [], size
        if piece or not len(self):
            yield b"".join(piece)
