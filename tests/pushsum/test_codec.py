"""Wire codecs: whatever one rounds away, no mass is lost, for those by name and one of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from share_machines import commit, shake
from tiny_scenario import Tiny
from torch import Tensor

from flower_privdec.common.catalogue import CODECS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.pushsum.codecs.casts import BFloat16Codec, ExactCodec
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.frames import FrameCodec, TensorArithmetic, WireCodec, formats_of, wire_codec

TOLERANCE = 40 * 2.0**60 * 2.0**-53  # each addition rounds, and nothing else


class Eighths:
    """Sends each number as a byte: multiples of an eighth of the largest, of which nothing is left of small ones."""

    def encode(self, row: Tensor) -> Tensor:
        scale = row.abs().max().double().reshape(1)
        steps = (row.double() / scale.clamp_min(1e-300) * 8).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8).reshape(-1)])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        scale, steps = sent[:8].clone().view(torch.float64), sent[8:].view(torch.int8)
        return (steps.double() / 8 * scale).reshape(like.shape).to(like)


def dyadic(draw: np.random.Generator, size: int) -> Tensor:
    """Return numbers whose sums are exact in float64: multiples of 2^-20 below 2^11."""
    return torch.from_numpy(draw.integers(-(2**31), 2**31, size).astype(np.float64) * 2.0**-20)


def exchanged(arithmetic: TensorArithmetic, seed: int, rounds: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let three peers mix over frames; return Σ x before and after, and Σ w before and after, as fractions of 2^-60."""
    draw = np.random.default_rng(seed)
    masses = [{"x": dyadic(draw, 9), "w": torch.tensor(1.0, dtype=torch.float64)} for _ in range(3)]
    before = {name: sum(exact(mass[name]) for mass in masses) for name in ("x", "w")}
    formats = formats_of({name: arithmetic.encode(row) for name, row in masses[0].items()})
    frames = FrameCodec(b"run", formats)
    machines = [PushSumProtocol(i, range(3), 5 + i, masses[i], arithmetic) for i in range(3)]
    commit(*machines)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        shake(machines[a], machines[b])
    for round_index in range(rounds):
        for machine in machines:
            others = [j for j in range(3) if j != machine.peer]
            machine.split(round_index, dict.fromkeys(others, 0.25))
            commit(machine)
        for machine in machines:
            for share in machine.shares_to_send():
                arrived = frames.decode(bytearray().join(frames.encode(share)))
                assert machines[share.receiver].receive(arrived)  # type: ignore[arg-type]
        for machine in machines:
            machine.absorb()
            commit(machine)
        for machine in machines:
            for acknowledgement in machine.acknowledgements():
                machines[acknowledgement.receiver].acknowledge(acknowledgement)
    after = {name: sum(exact(mass[name]) for mass in masses) for name in ("x", "w")}
    return before["x"], after["x"], before["w"], after["w"]  # type: ignore[return-value]


def exact(row: Tensor) -> np.ndarray:
    """Return numbers as Python's integers, in units of 2^-60."""
    return np.array([int(float(each) * 2.0**60) for each in row.reshape(-1)], dtype=object)


ALL: dict[str, WireCodec] = {**{name: wire_codec(name) for name in CODECS}, "eighths": Eighths()}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_codec_loses_mass(name: str, seed: int) -> None:
    x, x_after, w, w_after = exchanged(TensorArithmetic(ALL[name]), seed)
    assert max(abs(x - x_after)) <= TOLERANCE * 2.0**11
    assert max(abs(w - w_after)) <= TOLERANCE


class Forgetful(TensorArithmetic):
    """Subtracts a share as it was before it was encoded: what rounding takes away stays with no peer."""

    def __init__(self, codec: WireCodec) -> None:
        super().__init__(codec)
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}

    def part(self, value: Tensor, weight: float) -> Tensor:
        part = super().part(value, weight)
        self.exact[id(part)] = part, value * weight
        return part

    def subtract(self, value: Tensor, part: Tensor) -> Tensor:
        return value.sub_(self.exact[id(part)][1])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "eighths"])
def test_a_sender_that_forgets_what_was_rounded_is_caught(name: str) -> None:
    x, x_after, *_ = exchanged(Forgetful(ALL[name]), seed=1)
    assert max(abs(x - x_after)) > TOLERANCE * 2.0**11


def test_bfloat16_takes_two_bytes_and_keeps_weights() -> None:
    arithmetic, rows = TensorArithmetic(BFloat16Codec()), {"x": torch.randn(1000), "w": torch.tensor(1 / 3)}
    assert {name: arithmetic.encode(row).nbytes for name, row in rows.items()} == {"x": 2000, "w": 4}
    assert arithmetic.decode(arithmetic.encode(rows["w"]), rows["w"]) == rows["w"]


def test_an_unknown_codec_is_refused(tiny: Tiny) -> None:
    with raises(ScenarioError, "network.codec", names="network.codec.*'int4'"):
        tiny("network={codec: int4}")
    with raises(ScenarioError, "network.codec", names="int4"):
        wire_codec("int4")
    with raises(ScenarioError, "code.kind", names="pathlib:Path.* encode .* decode"):
        wire_codec("pathlib:Path")


def test_an_own_codec_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eighths_codec.py").write_text("from test_codec import Eighths\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert type(wire_codec("eighths_codec:Eighths")).__name__ == "Eighths"


def test_a_cast_decodes_to_the_rows_type_and_device() -> None:
    row = torch.randn(5, dtype=torch.float64)
    sent = BFloat16Codec().encode(row)
    assert sent.dtype == torch.bfloat16
    assert BFloat16Codec().decode(sent, row).dtype == torch.float64
    assert ExactCodec().encode(row) is row
