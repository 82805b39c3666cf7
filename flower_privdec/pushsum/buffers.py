"""Bytes to send, in buffers that are not joined before they leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BufferList:
    """Bytes to send, in several buffers that are not joined before they leave and do not change until then."""

    buffers: tuple[Buffer, ...]

    def __len__(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers)

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield all in pieces of some bytes, a shorter one at the end, and one at least."""
        piece, room = list[memoryview](), size
        for buffer in self.buffers:
            left = memoryview(buffer).cast("B")
            while left:
                piece.append(left[:room])
                left, room = left[room:], room - len(piece[-1])
                if not room:
                    yield b"".join(piece)
                    piece, room = [], size
        if piece or not len(self):
            yield b"".join(piece)
