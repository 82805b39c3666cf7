"""A frame from the pieces in which it comes, under a cap that holds before anything is kept."""

from __future__ import annotations

from collections.abc import Iterator

from flower_privdec.runtime.network.frames import HEADER, FrameHeader, read_header
from flower_privdec.runtime.network.share_protocol import RefusedError

PIECE = 2**20  # bytes


def pieces(frame: bytes | bytearray) -> Iterator[memoryview]:
    """Yield a frame in pieces of at most 1 MiB, without copying it."""
    view = memoryview(frame)
    for start in range(0, len(view), PIECE):
        yield view[start : start + PIECE]


class Assembler:
    """Puts the pieces of one frame together: memory for it is taken as they come, and never more than it says and may.

    Args:
        cap: the largest frame that is taken, in bytes.

    Attributes:
        header: once it has come.
    """

    def __init__(self, cap: int) -> None:
        """Begin without a byte."""
        self.cap = cap
        self.header: FrameHeader | None = None
        self._first = bytearray()
        self._frame = bytearray()
        self._filled = 0

    def add(self, piece: bytes | memoryview) -> None:
        """Take the next piece.

        Raises:
            RefusedError: it is too long, the header is wrong, or more comes than the header says.
        """
        if len(piece) > PIECE:
            raise RefusedError(f"a piece of {len(piece)} bytes must have at most {PIECE}")
        if self.header is None:
            piece = self._begin(piece)
        end = self._filled + len(piece)
        if self.header is None:
            return
        if end > self.header.length:
            raise RefusedError(f"a frame of peer {self.header.sender} goes on after its {self.header.length} bytes")
        memoryview(self._frame)[self._filled : end] = piece
        self._filled = end

    def _begin(self, piece: bytes | memoryview) -> bytes | memoryview:
        """Complete the header, and return what remains to be put into the frame, the header first."""
        missing = HEADER.size - len(self._first)
        self._first += piece[:missing]
        if len(self._first) < HEADER.size:
            return b""
        self.header = read_header(self._first, self.cap)
        self._frame = bytearray(self.header.length)  # zeros, which take no memory before they are written
        self._frame[: HEADER.size] = self._first
        self._filled = HEADER.size
        return piece[missing:]

    @property
    def whole(self) -> bool:
        """Whether all that the header says has come."""
        return self.header is not None and self._filled == self.header.length

    def frame(self) -> bytearray:
        """Return the frame, whose bytes the decoded rows will be views of.

        Raises:
            RefusedError: the pieces ended before it did.
        """
        if not self.whole:
            said = (
                "its header" if self.header is None else f"the {self.header.length} bytes of peer {self.header.sender}"
            )
            raise RefusedError(f"a frame ended after {self._filled or len(self._first)} bytes, before {said}")
        return self._frame
