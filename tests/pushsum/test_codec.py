"""Wire codecs: whatever one rounds away, no mass is lost, for those by name and one of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.core import Mix, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.pushsum.codecs.casts import BFloat16Codec, ExactCodec
from flower_privdec.pushsum.codecs.sparse import TopKCodec
from flower_privdec.pushsum.coded_mix import CodedMix
from flower_privdec.pushsum.exactly_once import FrozenShare, PushSumProtocol, RefusedError, Shared
from flower_privdec.pushsum.frames import (
    FrameCodec,
    TensorArithmetic,
    WireCodec,
    codec_text,
    formats_of,
    frame_size,
    pack,
    unpack,
    wire_codec,
)

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


def frames_of(arithmetic: TensorArithmetic, mass: dict[str, Tensor]) -> FrameCodec:
    formats = formats_of({name: arithmetic.encode(row) for name, row in mass.items()})
    return FrameCodec(b"run", formats, check=arithmetic.checks(mass))


def exchanged(arithmetic: TensorArithmetic, seed: int, rounds: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let three peers mix over frames; return Σ x before and after, and Σ w before and after, as fractions of 2^-60."""
    draw = np.random.default_rng(seed)
    masses = [{"x": dyadic(draw, 9), "w": torch.tensor(1.0, dtype=torch.float64)} for _ in range(3)]
    before = {name: sum(exact(mass[name]) for mass in masses) for name in ("x", "w")}
    frames = frames_of(arithmetic, masses[0])
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

    def freeze(
        self, mass: Mapping[str, Tensor], weight: float, told: Mapping[str, Tensor], number: int = 0
    ) -> Shared[Tensor]:
        shared = super().freeze(mass, weight, told, number)
        return replace(shared, parts={name: value * weight for name, value in mass.items()})


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"exact"}))
def test_a_sender_that_forgets_what_was_rounded_is_caught(name: str) -> None:
    x, x_after, *_ = exchanged(Forgetful(ALL[name]), seed=1)
    assert max(abs(x - x_after)) > TOLERANCE * 2.0**11


def test_bfloat16_takes_two_bytes_and_keeps_weights() -> None:
    arithmetic, rows = TensorArithmetic(BFloat16Codec()), {"x": torch.randn(1000), "w": torch.tensor(1 / 3)}
    assert {name: arithmetic.encode(row).nbytes for name, row in rows.items()} == {"x": 2000, "w": 4}
    assert arithmetic.decode(arithmetic.encode(rows["w"]), rows["w"]) == rows["w"]


def test_an_unknown_codec_is_refused(tiny: Tiny) -> None:
    with raises(ScenarioError, "scenario.literal_error", names="network.codec.*'int3'.*did you mean 'int"):
        tiny("network={codec: int3}")
    with raises(ScenarioError, "network.codec", names="int3.*did you mean 'int"):
        wire_codec("int3")
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


# --- a scenario's keys ---


def test_a_codec_has_keys_of_its_own(tiny: Tiny) -> None:
    network = tiny("network={codec: {name: top-k, part: 0.05}}").network
    assert codec_text(network.codec) == "top-k (part=0.05, differences=True)"
    assert network.codec == tiny("network.codec.name=top-k", "network.codec.part=0.05").network.codec
    assert tiny("network={codec: bfloat16}").network.codec == tiny("network={codec: {name: bfloat16}}").network.codec


@pytest.mark.parametrize(
    ("codec", "code", "names"),
    [
        ("{name: top-k, part: 0}", "scenario.greater_than", "network.codec.part=0"),
        ("{name: top-k, part: .nan}", "scenario.finite_number", "network.codec.part"),
        ("{name: top-k, part: 2}", "scenario.less_than_equal", "network.codec.part=2"),
        ("{name: int8, part: 0.5}", "scenario.other-choice", "part.*it belongs to"),
        ("{name: int8, block: 0}", "scenario.greater_than_equal", "network.codec.block=0"),
        ("{name: top-kk}", "scenario.literal_error", "did you mean 'top-k'"),
    ],
)
def test_a_wrong_key_of_a_codec_is_named(tiny: Tiny, codec: str, code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names):
        tiny(f"network={{codec: {codec}}}")


# --- rows of every kind ---

SIZES = (0, 1, 2, 7, 8, 255, 256, 257, 1000)
ROUNDING = sorted(CODECS.keys() - {"exact", "float32", "bfloat16"})


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e25, 3.4e38, 1e-44])
def test_decoded_rows_are_finite_and_decode_to_themselves(name: str, dtype: torch.dtype, scale: float) -> None:
    arithmetic = TensorArithmetic(wire_codec(name))
    draw = torch.Generator().manual_seed(3)
    for size in SIZES:
        row = torch.empty(size, dtype=dtype).uniform_(-1, 1, generator=draw) * scale
        sent = arithmetic.encode(row, 5)
        arithmetic.check(sent, row)
        decoded = arithmetic.decode(sent, row)
        assert decoded.shape == row.shape
        assert decoded.dtype == dtype
        assert bool(torch.isfinite(decoded).all())
        assert torch.equal(arithmetic.decode(arithmetic.encode(decoded, 5), row), decoded)
        assert size == 0 or float((row - decoded).abs().max()) <= float(row.abs().max())


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_refused(name: str, wrong: float) -> None:
    arithmetic = TensorArithmetic(wire_codec(name))
    row = torch.ones(300)
    indices = torch.arange(300)
    if name == "random-k":
        indices = arithmetic.decode(arithmetic.encode(row), row).nonzero().reshape(-1)
    row[indices[7]] = wrong
    sent = arithmetic.encode(row)
    assert not bool(torch.isfinite(arithmetic.decode(sent, row)).all())
    with raises(ArgumentError, "codec.scale"):
        arithmetic.check(sent, row)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("int8", 1000 + 2 * 4),
        ("int4", 500 + 2 * 16),
        ({"name": "top-k", "part": 0.25}, 125 + 250 + 2),
        ({"name": "top-k", "part": 0.01}, 4 * 10 + 10 + 2),
        ({"name": "random-k", "part": 0.25}, 8 + 250 + 2),
    ],
)
def test_a_row_has_as_many_bytes(codec: Any, size: int) -> None:
    keys = {"name": codec} if isinstance(codec, str) else codec
    arithmetic = TensorArithmetic(wire_codec(CODECS.section(**keys)))
    mass = {"x": torch.randn(1000), "w": torch.tensor(0.7)}
    shared = arithmetic.freeze(mass, 0.5, {})
    assert shared.values["x"].nbytes == size
    frames = frames_of(arithmetic, mass)
    share = FrozenShare(0, 1, 1, 1, 1, 1, 1, shared.values)
    assert sum(map(len, frames.encode(share))) == frame_size(formats_of(shared.values)) <= frames.cap


def test_each_number_has_its_turn_in_random_k() -> None:
    arithmetic = TensorArithmetic(wire_codec(CODECS.section("random-k", part=0.3)))
    row = torch.ones(101)
    for first in (0, 4, 8):
        turns = [arithmetic.decode(arithmetic.encode(row, first + turn), row) for turn in range(4)]
        assert bool((sum(turns) > 0).all())
        assert [int(turn.sum().round()) for turn in turns] == [31] * 4
    assert not torch.equal(
        arithmetic.decode(arithmetic.encode(row, 0), row), arithmetic.decode(arithmetic.encode(row, 4), row)
    )


# --- differences ---


@pytest.mark.parametrize("name", ["int4", "top-k", "random-k"])
def test_models_agree_with_differences_and_do_not_without(name: str) -> None:
    apart = {}
    for differences in (True, False):
        arithmetic = TensorArithmetic(wire_codec(CODECS.section(name, differences=differences)))
        x, w = mixed(arithmetic, rounds=120)
        models = x / w
        apart[differences] = float((models - models.mean(0)).norm() / models.norm())
        assert torch.allclose(x.sum(0), START.sum(0), atol=1e-9)
        assert float(w.sum()) == pytest.approx(4, abs=1e-12)
    assert apart[True] < 1e-3 < apart[False]


START = torch.randn(4, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def mixed(arithmetic: TensorArithmetic, rounds: int) -> tuple[Tensor, Tensor]:
    """Return x and w of four peers in a directed ring with a chord after some rounds of sending halves."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    masses = [{"x": row.clone(), "w": torch.tensor(1.0, dtype=torch.float64)} for row in START]
    told: dict[tuple[int, int], Mapping[str, Tensor]] = {edge: {} for edge in edges}
    for number in range(rounds):
        shares = {}
        for edge in edges:
            weight = arithmetic.damping * (1 / 3 if edge[0] == 0 else 1 / 2)
            shares[edge] = arithmetic.freeze(masses[edge[0]], weight, told[edge], number)
        for (sender, receiver), shared in shares.items():
            parts, heard = arithmetic.open(shared.values, masses[receiver], told[sender, receiver])
            assert all(torch.equal(parts[name], shared.parts[name]) for name in parts)
            told[sender, receiver] = heard
            for name, part in parts.items():
                masses[sender][name] -= part
                masses[receiver][name] += part
    return torch.stack([mass["x"] for mass in masses]), torch.stack([mass["w"] for mass in masses]).reshape(4, 1)


def test_what_was_told_is_put_back_from_a_checkpoint() -> None:
    arithmetic = TensorArithmetic(wire_codec("int4"))
    masses = [{"x": torch.randn(300), "w": torch.tensor(1.0)} for _ in range(2)]
    a, b = (PushSumProtocol(i, [0, 1], 5 + i, masses[i], arithmetic) for i in range(2))
    commit(a, b)
    shake(a, b)
    a.split(0, {1: 0.5})
    commit(a)
    b.receive(a.shares_to_send()[0])
    b.absorb()
    for peer, machine in enumerate((a, b)):
        durable = machine.snapshot(1)
        facts, tensors = pack(durable)
        again = unpack(peer, json.loads(json.dumps(facts)), tensors, masses[peer])
        edge, restored = durable.edges[1 - peer], again.edges[1 - peer]
        for kept, back in ((edge.told, restored.told), (edge.heard, restored.heard)):
            assert kept.keys() == back.keys()
            assert all(torch.equal(kept[name], back[name]) for name in kept)
    assert torch.equal(a.edges[1].told["x"], b.edges[0].heard["x"])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_noise_that_cancels_still_cancels_in_the_mean(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    noise = 100 * torch.randn(4, 50, dtype=torch.float64, generator=draw)
    noise[3] = -noise[:3].sum(0)  # as pairs of peers add it, it is gone from the sum
    clean = torch.randn(4, 50, dtype=torch.float64, generator=draw)
    mixing = Mixing(build_topology("directed-exponential", 4), "column-stochastic")
    state = State(np.arange(4), rows={"x": clean + noise, "w": torch.ones(4, dtype=torch.float64)})
    coded = CodedMix(TensorArithmetic(wire_codec(name)))
    for round_index in range(9):
        state.round_index = round_index
        coded.together_(Mix(("x", "w")), state, mixing)
        torch.testing.assert_close(state.rows["x"].mean(0), clean.mean(0), rtol=0, atol=1e-11)
    assert float(state.rows["w"].sum()) == pytest.approx(4, abs=1e-12)


# --- hostile frames ---


def spoiled(name: str, at: int, values: list[int], **keys: Any) -> str:
    """Return why a frame is refused whose row has other bytes in a place than it was encoded to."""
    arithmetic = TensorArithmetic(wire_codec(CODECS.section(name, **keys)))
    mass = {"x": torch.linspace(-1, 1, 300), "w": torch.tensor(1.0)}
    frames = frames_of(arithmetic, mass)
    shared = arithmetic.freeze(mass, 0.5, {})
    sent = shared.values["x"].clone()
    sent[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    share = FrozenShare(3, 1, 1, 1, 1, 1, 1, {**shared.values, "x": sent})
    with raises(RefusedError, "frame.codec", names="peer 3: 'x': ") as refused:
        frames.decode(bytearray().join(frames.encode(share)))
    return str(refused.value)


NAN = [0xC0, 0x7F]  # as a bfloat16
NEGATIVE = [0x80, 0xBF]


def test_wrong_scales_and_steps_are_refused() -> None:
    assert "scale of block 1 is nan" in spoiled("int8", 302, NAN)
    assert "scale of block 0 is -1" in spoiled("int8", 300, NEGATIVE)
    assert "-128 steps" in spoiled("int8", 17, [0x80])
    assert "-8 steps" in spoiled("int4", 17, [0x18])
    assert "scale of block 4 is nan" in spoiled("int4", 158, NAN)
    assert "scale of block 0 is nan" in spoiled("random-k", 8 + 75, NAN)
    assert "scale of block 0 is nan" in spoiled("top-k", 38 + 75, NAN)


def test_wrong_places_are_refused() -> None:
    few = {"part": 0.01}
    assert "an index is 300, which must be below 300" in spoiled("top-k", 8, [44, 1, 0, 0], **few)
    assert "4294967295, which must be below 300" in spoiled("top-k", 8, [255] * 4, **few)
    assert "ascend, each once" in spoiled("top-k", 0, [0, 0, 0, 0, 0, 0, 0, 0], **few)
    assert "ascend, each once" in spoiled("top-k", 0, [9, 0, 0, 0, 7, 0, 0, 0], **few)
    assert "numbers are sent, and 75 of 300 must be" in spoiled("top-k", 0, [0, 0])
    assert "79 numbers are sent" in spoiled("top-k", 37, [0xFF])
    assert "which must be below 300" in bits_behind_the_row()


def bits_behind_the_row() -> str:
    codec = TopKCodec(0.25, None, differences=True)
    row = torch.linspace(-1, 1, 300)
    sent = codec.encode(row)
    sent[0] = 255 ^ 128  # one fewer of the first eight, which are among the largest
    sent[37] |= 128
    with raises(ArgumentError, "codec.indices") as refused:
        codec.check(sent, row)
    return str(refused.value)


def test_a_refused_frame_changes_nothing() -> None:
    arithmetic = TensorArithmetic(wire_codec("top-k"))
    masses = [{"x": torch.randn(300), "w": torch.tensor(1.0)} for _ in range(2)]
    frames = frames_of(arithmetic, masses[0])
    a, b = (PushSumProtocol(i, [0, 1], 5 + i, masses[i], arithmetic) for i in range(2))
    commit(a, b)
    shake(a, b)
    a.split(0, {1: 0.5})
    commit(a)
    frame = bytearray().join(frames.encode(a.shares_to_send()[0]))
    frame[-8:] = b"\xff" * 8  # a scale, and what pads the frame
    before = masses[1]["x"].clone()
    for wrong in (frame, frame[:-8], frame + bytes(8)):
        with pytest.raises(RefusedError):
            frames.decode(wrong)
    assert torch.equal(masses[1]["x"], before)
    assert b.edges[0].heard == {}
