"""Frames: their bytes are fixed, one form alone is right, and whatever is wrong is refused before it costs anything."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_privdec.pushsum.exactly_once import LAST, FrozenShare, RefusedError
from flower_privdec.pushsum.frames import (
    HEADER,
    FrameCodec,
    FrameHeader,
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
    "70727664 0300 03 00 01000000 02000000 0400000000000000 00000000 02000000"
    "0000000001000000 0000000002000000 4d00000000000000 0500000000000000 d000000000000000"
    "630dcd2966c4336691125448bbb25b4f"
    "02 01 000000000000 0200000000000000 0000000000000000 0000000000000000 0000000000000000"
    "02 00 000000000000 0000000000000000 0000000000000000 0000000000000000 0000000000000000"
    + "00" * (192 - 168)
    + "0000803f 000000c0 0000003f 00000000"
).replace(" ", "")
GOLDEN_WORDS = {
    "hello": (
        "70727664 0300 01 01 01000000 02000000 0400000000000000 00000000 00000000"
        "0000000001000000 0000000000000000 4d00000000000000 0000000000000000 a000000000000000"
        "630dcd2966c4336691125448bbb25b4f"
        "4e00000000000000 4f00000000000000 0000000001000000 0900000000000000 4d00000000000000"
        "0800000000000000 0600000000000000 0700000000000000 3700000000000000"
    ),
    "acknowledgement": (
        "70727664 0300 02 00 01000000 02000000 0000000000000000 00000000 00000000"
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
    header = replace(read_header(data, len(data)), **values)
    return HEADER.pack(*vars(header).values()) + bytes(data[HEADER.size :])


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
def test_what_is_encoded_is_decoded_to_the_same(message: Any) -> None:
    assert same(fuzz.FRAMES.decode(encode(message)), message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 1, 2, 2)])
def test_rows_of_any_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = {"a": torch.randn(3, dtype=dtype), "b": torch.randn(shape, dtype=dtype), "c": torch.randn(2, dtype=dtype)}
    message = RowMessage(3, 4, 2**63 - 1, 2**32 - 1, rows)
    assert same(decode(encode(message), formats_of(rows)), message)


def test_decoded_rows_are_views_of_the_frame_and_can_be_written() -> None:
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
    "nothing": (b"", "a frame of 0 bytes must have a header of 88"),
    "magic": (changed(magic=b"PK\3\4"), r"a frame that begins with b'PK\\x03\\x04' must begin with b'prvd'"),
    "version": (changed(version=4), "a frame of peer 1 has version 4 of the protocol, not 3"),
    "another run": (
        changed(run=b"x" * 16),
        "a frame of peer 1 is of run 7878.*, not 630d.*; give all peers one scenario and one model",
    ),
    "sealed": (changed(flags=2), "a frame of peer 1 is sealed; seal at all peers, or at none"),
    "kind": (changed(kind=9), "a frame of peer 1 is of kind 9, which must be one of 1 to 6"),
    "kind 0": (changed(kind=0), "a frame of peer 1 is of kind 0"),
    "another kind": (changed(kind=1), "a frame of peer 1 of kind 1 has 208 bytes, which must be 160"),
    "flags": (changed(flags=1), "a frame of peer 1 of kind 3 must have zeros where it has no field"),
    "place": (changed(at=1), "must have zeros where it has no field"),
    "round": (changed(round_index=2**63), r"of round 9223372036854775808, which must be < 2\^63"),
    "length": (changed(length=2**62), "claims 4611686018427387904 bytes, which must be 88 to 256"),
    "short length": (changed(length=207), "a frame of peer 1 has 208 bytes and claims 207"),
    "rows": (changed(rows=2**32 - 1), "a frame of peer 1 has 4294967295 rows, not 2; all peers must run one scenario"),
    "trailing": (encode(SHARE) + b"\0", "a frame of peer 1 has 209 bytes and claims 208"),
    "cut": (encode(SHARE)[:-1], "a frame of peer 1 has 207 bytes and claims 208"),
    "dtype": (
        patched(88, b"\3"),
        r"'x' is described as 1 axes of \[2, 0, 0, 0\] float64, which must be 1 of \[2\] float32",
    ),
    "unknown dtype": (patched(88, b"\x80"), r"'x' is described as 1 axes of \[2, 0, 0, 0\] type 128, which must be"),
    "axes": (patched(89, b"\xff"), r"'x' is described as 255 axes of \[2, 0, 0, 0\] float32, which must be"),
    "shape": (patched(96, struct.pack("<Q", 2**63)), r"'x' is described as 1 axes of \[9223372036854775808, 0, 0, 0\]"),
    "hidden axis": (patched(104, b"\1"), r"'x' is described as 1 axes of \[2, 1, 0, 0\]"),
    "filler": (patched(91, b"\1"), "'x' is described as"),
    "gap": (patched(176, b"\1"), "a frame of peer 1 must have zeros between its rows"),
    "gap at the end": (patched(207, b"\1"), "a frame of peer 1 must have zeros between its rows"),
    "NaN": (patched(X_AT + 4, struct.pack("<f", math.nan)), r"'x'\[1\] is nan, which must be finite"),
    "infinity": (patched(X_AT, struct.pack("<f", -math.inf)), r"'x'\[0\] is -inf, which must be finite"),
    "a weight that is NaN": (patched(W_AT, struct.pack("<f", math.nan)), r"'w'\[0\] is nan, which must be finite"),
    "negative weight": (patched(W_AT, struct.pack("<f", -0.5)), r"'w'\[0\] is -0.5, which must be >= 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_in_one_line(name: str) -> None:
    data, says = WRONG[name]
    before = bytes(data)
    with pytest.raises(RefusedError, match=says) as caught:
        decode(data, FORMATS)
    assert len(str(caught.value).splitlines()) == 1
    assert data == before


def test_a_cap_holds_below_what_the_layout_takes() -> None:
    with pytest.raises(RefusedError, match="which must be 88 to 100"):
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


def test_frames_and_shares_need_no_grpc() -> None:
    names = ("flower_privdec.pushsum.frames", "flower_privdec.pushsum.frames", "tools.fuzz")
    lines = ["import sys", "sys.modules['grpc'] = None"]
    lines += [f"import {name}" for name in names]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_a_layout_of_no_rows_is_a_header() -> None:
    assert frame_size({}) == HEADER.size == len(encode(RowMessage(0, 1, 0, 0, {})))
    assert frame_size({"x": RowFormat((0,), torch.float32)}) == 128
    assert isinstance(read_header(encode(SHARE), 208), FrameHeader)


def test_what_is_sent_is_the_rows_themselves_and_no_copy() -> None:
    rows = {"x": torch.arange(1000.0), "w": torch.tensor(0.5)}
    parts = FrameCodec(RUN).encode(replace(SHARE, values=rows))
    before = b"".join(parts)
    assert sum(map(len, parts)) == len(before) == frame_size(formats_of(rows))
    rows["x"][999] = -1
    after = b"".join(parts)
    assert before != after == encode(replace(SHARE, values=rows))
