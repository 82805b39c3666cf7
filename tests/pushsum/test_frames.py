"""Frames: their bytes are fixed, one form alone is right, and whatever is wrong is refused before it costs anything."""

from __future__ import annotations

import math
import struct
import sys
import tracemalloc
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor

from flower_privdec.pushsum.exactly_once import LAST, FrozenShare, RefusedError
from flower_privdec.pushsum.frames import (
    HEADER,
    VERSION,
    FrameCodec,
    FrameHeader,
    FrameKind,
    Message,
    RowFormat,
    RowMessage,
    formats_of,
    frame_size,
)
from tools import fuzz

RUN = bytes(range(32))


def encode(message: Message) -> bytes:
    """Return a frame in one piece."""
    return b"".join(FrameCodec(RUN).encode(message))


def decode(data: Any, formats: Any, cap: int | None = None) -> Any:
    """Return the message of a frame whose rows have some formats, in a share and in exchange 2^32 - 1."""
    return FrameCodec(RUN, formats, {2**32 - 1: formats}).decode(data, cap)


def read_header(data: bytes, cap: int) -> FrameHeader:
    return FrameCodec(RUN).read_header(data, cap)


SHARE = FrozenShare(1, 2, 2**32, 2**33, 5, 77, 4, {"x": torch.tensor([1.0, -2.0]), "w": torch.tensor(0.5)})
FORMATS = formats_of(SHARE.values)
X_AT, W_AT = 192, 200  # where the two rows begin

GOLDEN = (
    "70727664 0900 03 00 01000000 02000000 0400000000000000 00000000 02000000"
    "0000000001000000 0000000002000000 4d00000000000000 0500000000000000 d000000000000000"
    "630dcd2966c4336691125448bbb25b4f"
    "02 01 000000000000 0200000000000000 0000000000000000 0000000000000000 0000000000000000"
    "02 00 000000000000 0000000000000000 0000000000000000 0000000000000000 0000000000000000"
    + "00" * (192 - 168)
    + "0000803f 000000c0 0000003f 00000000"
).replace(" ", "")
GOLDEN_WORDS = {
    "hello": (
        "70727664 0900 01 39 01000000 02000000 0400000000000000 00000000 00000000"
        "0000000001000000 0000000000000000 4d00000000000000 0000000000000000 a000000000000000"
        "630dcd2966c4336691125448bbb25b4f"
        "4e00000000000000 4f00000000000000 0000000001000000 0900000000000000 4d00000000000000"
        "0800000000000000 0600000000000000 0700000000000000 3700000000000000"
    ),
    "acknowledgement": (
        "70727664 0900 02 00 01000000 02000000 0000000000000000 00000000 00000000"
        "0000000001000000 0000000002000000 4d00000000000000 0500000000000000 6000000000000000"
        "630dcd2966c4336691125448bbb25b4f"
        "4200000000000000"
    ),
}


def same(a: Any, b: Any) -> bool:
    """Return whether two messages say the same, bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def changed(**values: int | bytes) -> bytes:
    """Return the frame of the share with some fields of its header changed."""
    data = encode(SHARE)
    header = read_header(data, len(data))._replace(**values)
    return HEADER.pack(*header._asdict().values()) + bytes(data[HEADER.size :])


def patched(at: int, part: bytes) -> bytes:
    data = bytearray(encode(SHARE))
    data[at : at + len(part)] = part
    return bytes(data)


def test_the_bytes_of_a_share_are_fixed() -> None:
    assert encode(SHARE).hex() == GOLDEN


@pytest.mark.parametrize(("name", "place"), [("hello", 0), ("acknowledgement", 2)])
def test_the_bytes_of_words_without_rows_are_fixed(name: str, place: int) -> None:
    assert encode(fuzz.examples()[place]).hex() == GOLDEN_WORDS[name].replace(" ", "")


@pytest.mark.parametrize("message", fuzz.examples(), ids=lambda message: type(message).__name__)
def test_frames_round_trip(message: Any) -> None:
    assert same(fuzz.FRAMES.decode(encode(message)), message)


@pytest.mark.parametrize("message", fuzz.examples(), ids=lambda message: type(message).__name__)
def test_no_two_frames_are_one_message(message: Any) -> None:
    data = encode(message)
    header = read_header(data, len(data))
    for name in ("flags", "round_index", "at", "rows", "incarnation", "addressed", "boot", "number"):
        for value in (1, 64, 255):
            other = HEADER.pack(*header._replace(**{name: value})) + data[HEADER.size :]
            try:
                found = fuzz.FRAMES.decode(bytearray(other))
            except RefusedError:
                continue
            assert b"".join(fuzz.FRAMES.encode(found)) == other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 1, 2, 2)])
def test_rows_of_any_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = {"a": torch.randn(3, dtype=dtype), "b": torch.randn(shape, dtype=dtype), "c": torch.randn(2, dtype=dtype)}
    message = RowMessage(3, 4, 2**63 - 1, 2**32 - 1, rows)
    assert same(decode(encode(message), formats_of(rows)), message)


def test_decoded_rows_are_writable_views_of_the_frame() -> None:
    data = bytearray(encode(SHARE))
    message = decode(data, FORMATS)
    assert isinstance(message, FrozenShare)
    data[X_AT : X_AT + 4] = struct.pack("<f", 9.0)
    assert message.values["x"][0] == 9
    message.values["x"].add_(1)


def test_the_largest_numbers_travel() -> None:
    share = FrozenShare(2**32 - 1, 2**32 - 2, LAST, LAST, LAST, LAST, 2**63 - 1, SHARE.values)
    assert same(decode(encode(share), FORMATS), share)


WRONG = {
    "nothing": (b"", "frame.length", "88"),
    "magic": (changed(magic=b"PK\3\4"), "frame.magic", "prvd"),
    "version": (changed(version=VERSION + 1), "frame.version", f"peer 1 .* {VERSION + 1} .* {VERSION}"),
    "another run": (
        changed(run=b"x" * 16),
        "frame.run",
        "7878.*630d",
    ),
    "sealed": (changed(flags=2), "frame.sealed", ""),
    "kind": (changed(kind=max(FrameKind) + 1), "frame.kind", f"{max(FrameKind) + 1}.*1 to {max(FrameKind)}"),
    "kind 0": (changed(kind=0), "frame.kind", "0"),
    "another kind": (changed(kind=1), "frame.length", "208.*160"),
    "flags": (changed(flags=1), "frame.zeros", "kind 3"),
    "place": (changed(at=1), "frame.zeros", ""),
    "round": (changed(round_index=2**63), "frame.round", "9223372036854775808"),
    "length": (changed(length=2**62), "frame.length", "4611686018427387904 .* 88 to 256"),
    "short length": (changed(length=207), "frame.length", "208 .* 207"),
    "rows": (changed(rows=2**32 - 1), "frame.rows", "4294967295 .* 2"),
    "trailing": (encode(SHARE) + b"\0", "frame.length", "209 .* 208"),
    "cut": (encode(SHARE)[:-1], "frame.length", "207 .* 208"),
    "dtype": (
        patched(88, b"\3"),
        "frame.row-format",
        r"'x' .* 1 axes of \[2, 0, 0, 0\] float64.* 1 of \[2\] float32",
    ),
    "unknown dtype": (patched(88, b"\x80"), "frame.row-format", "'x' .* type 128"),
    "axes": (patched(89, b"\xff"), "frame.row-format", "'x' .* 255 axes"),
    "shape": (patched(96, struct.pack("<Q", 2**63)), "frame.row-format", r"\[9223372036854775808,"),
    "hidden axis": (patched(104, b"\1"), "frame.row-format", r"\[2, 1, 0, 0\]"),
    "filler": (patched(91, b"\1"), "frame.row-format", "'x'"),
    "gap": (patched(176, b"\1"), "frame.zeros", "peer 1"),
    "gap at the end": (patched(207, b"\1"), "frame.zeros", "peer 1"),
    "NaN": (patched(X_AT + 4, struct.pack("<f", math.nan)), "frame.number", r"'x'\[1\] is nan"),
    "infinity": (patched(X_AT, struct.pack("<f", -math.inf)), "frame.number", r"'x'\[0\] is -inf"),
    "a weight that is NaN": (patched(W_AT, struct.pack("<f", math.nan)), "frame.number", r"'w'\[0\] is nan"),
    "negative weight": (patched(W_AT, struct.pack("<f", -0.5)), "frame.number", r"'w'\[0\] is -0.5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frames_are_refused_in_one_line(name: str) -> None:
    data, code, names = WRONG[name]
    before = bytes(data)
    with raises(RefusedError, code, names=names) as caught:
        decode(data, FORMATS)
    assert len(str(caught.value).splitlines()) == 1
    assert data == before


def test_a_cap_holds_below_what_the_layout_takes() -> None:
    with raises(RefusedError, "frame.length", names="88 to 100"):
        decode(encode(SHARE), FORMATS, cap=100)


def test_a_large_frame_costs_no_copy_of_its_own() -> None:
    rows = {"x": torch.randn(2**20), "w": torch.tensor(0.25)}
    frame, layout = bytearray(encode(replace(SHARE, values=rows))), formats_of(rows)
    tracemalloc.start()
    message = decode(frame, layout)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(message, FrozenShare)
    assert torch.equal(message.values["x"], rows["x"])
    assert peak < 2**20


def test_a_header_that_claims_much_costs_nothing() -> None:
    tracemalloc.start()
    with pytest.raises(RefusedError):
        decode(changed(length=2**40)[:88], {}, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 2**17
    tracemalloc.stop()


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_bytes_from_nowhere_are_refused(data: bytes) -> None:
    assert not fuzz.survives(data)


@settings(max_examples=300)
@given(
    st.sampled_from(fuzz.examples()),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=9), st.booleans()), max_size=4),
)
def test_damaged_frames_are_refused_or_right(message: Any, faults: list[tuple[int, bytes, bool]]) -> None:
    data = bytearray(encode(message))
    for at, part, insert in faults:
        data[at : at if insert else at + len(part)] = part
    fuzz.survives(bytes(data))


def test_the_command_that_fuzzes_for_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 < fuzz.fuzz(Random(1), 3_000) < 3_000
    monkeypatch.setattr(sys, "argv", ["fuzz", "--minutes", "0.002"])
    fuzz.main()
    assert "taken, all others refused in one line" in capsys.readouterr().out


def test_a_layout_of_no_rows_is_a_header() -> None:
    assert frame_size({}) == HEADER.size == len(encode(RowMessage(0, 1, 0, 0, {})))
    assert frame_size({"x": RowFormat((0,), torch.float32)}) == 128
    assert isinstance(read_header(encode(SHARE), 208), FrameHeader)


def test_encoding_sends_rows_without_a_copy() -> None:
    rows = {"x": torch.arange(1000.0), "w": torch.tensor(0.5)}
    parts = FrameCodec(RUN).encode(replace(SHARE, values=rows))
    before = b"".join(parts)
    assert sum(map(len, parts)) == len(before) == frame_size(formats_of(rows))
    rows["x"][999] = -1
    after = b"".join(parts)
    assert before != after == encode(replace(SHARE, values=rows))
