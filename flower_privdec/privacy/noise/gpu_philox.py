"""The noise of a simulation on a GPU: the numbers of `philox`, compiled by Triton, added to all rows in one launch.

Import this module only if there is a GPU: it needs Triton. Words, layout and polynomials are those of `philox`, so that
a GPU draws what a CPU draws, up to roundings (some 1e-7 of a float32 normal, 1e-14 of a float64 one). A GPU is asked
first whether it does (`GPUNoise._try`), because a compiler may round in other ways than expected.

Source: as `philox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.privacy.noise.source import NO_RECEIVER

_MOST_SETS = 16  # of keys and receivers that stay on the device
_BLOCK = 4096  # elements of a row that one program adds to
_AT_ONCE = 2**26  # numbers of pairs that are drawn before they are added

# What `philox` draws for key 1099511627798, step 7 and no receiver: one or two columns of each word, of a radius that
# is refined, at the end of a block and in the next.
_EXPECTED_KEY = 1099511627798
_EXPECTED_STEP = 7
_EXPECTED = {
    0: 1.351081007438877,
    33: 0.7446968593819507,
    66: 1.0491245880597828,
    99: 1.5802805086650944,
    127: -1.3599363465462873,
    1872: -2.3743692477365745,
    1904: -4.10489051254272,
    4095: 1.112579248451285,
    4096: 1.0812301479730426,
    4199: -0.34569075938046845,
}
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}


class GPUNoise(PhiloxNoise):
    """The numbers of PhiloxNoise on a GPU, up to roundings: all rows in one launch, and nothing read back.

    Keys and receivers stay on the device, so that a step like the one before copies nothing to it.
    """

    def __init__(self, keys: Mapping[int, bytes], device: torch.device | str = "cuda") -> None:
        """Compile the kernel, and compare its numbers with the expected ones.

        Raises:
            ImportError: Triton is not installed.
            RunError: this GPU draws other numbers than a CPU.
        """
        self._prepare(add_normals, keys, torch.device(device))
        for dtype in _TOLERANCES:
            self._try(dtype)

    def _prepare(self, kernel: Any, keys: Mapping[int, bytes], device: torch.device) -> None:
        super().__init__(keys)
        self._kernel = kernel
        self._device = device
        self._device_keys: dict[tuple[str, bytes, bytes], Tensor] = {}

    def _on_device(self, rows: Tensor) -> Tensor:
        return rows

    def _words(self, purpose: str, peers: np.ndarray, receivers: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return the rows' keys and receivers, int64 [m] each, which stay on the device for the next steps."""
        key = (purpose, peers.tobytes(), b"" if receivers is None else receivers.tobytes())
        if key not in self._device_keys:
            words = np.stack(super()._words(purpose, peers, receivers)).view(np.int64)
            while len(self._device_keys) >= _MOST_SETS:
                self._device_keys.pop(next(iter(self._device_keys)))
            self._device_keys[key] = torch.from_numpy(words).to(self._device)
        device_keys, device_receivers = self._device_keys[key].unbind(0)
        return device_keys, device_receivers

    def _draw_(self, rows: Tensor, std: Tensor, keys: Tensor, words: Tensor, step: int) -> None:
        grid = (len(rows), -(-rows.shape[1] // _BLOCK))
        double = rows.dtype == torch.float64
        self._kernel[grid](
            rows, rows.stride(0), rows.shape[1], std, keys, words, step, DOUBLE=double, enable_fp_fusion=True
        )

    def add_shared_(
        self, out: Tensor, ends: np.ndarray, scales: np.ndarray, step: int, pairs: np.ndarray, purpose: str
    ) -> None:
        """Add what each pair draws to the rows of its two ends; see PhiloxNoise.add_shared_."""
        size = max(1, _AT_ONCE // max(1, out.shape[1]))
        for start in range(0, len(pairs), size):
            some = slice(start, start + size)
            drawn = torch.zeros(len(pairs[some]), out.shape[1], dtype=out.dtype, device=out.device)
            self.add_(drawn, drawn.new_ones(len(drawn)), step, pairs[some], purpose)

            for end in (0, 1):
                rows = ends[some, end]
                hosted = rows >= 0
                factors = torch.from_numpy(scales[some, end][hosted]).to(out)
                parts = drawn[torch.from_numpy(hosted).to(out.device)] * factors[:, None]
                out.index_add_(0, torch.from_numpy(rows[hosted]).to(out.device), parts)

    def add_common_(
        self, out: Tensor, rows: np.ndarray, factors: np.ndarray, step: int, members: np.ndarray, purpose: str
    ) -> None:
        """Add a draw of each member to its row, less its part of what all drew; see PhiloxNoise.add_common_."""
        gains, shares, parts = torch.from_numpy(factors).to(out)
        hosted = torch.from_numpy(rows >= 0).to(out.device)
        places = torch.from_numpy(rows).to(out.device)
        total = torch.zeros(out.shape[1], dtype=out.dtype, device=out.device)

        size = max(1, _AT_ONCE // max(1, out.shape[1]))
        for start in range(0, len(members), size):
            some = slice(start, start + size)
            drawn = torch.zeros(len(members[some]), out.shape[1], dtype=out.dtype, device=out.device)
            self.add_(drawn, drawn.new_ones(len(drawn)), step, members[some], purpose)
            total += shares[some] @ drawn
            here = hosted[some]
            out.index_add_(0, places[some][here], drawn[here] * gains[some][here, None])
        out.index_add_(0, places[hosted], -parts[hosted, None] * total)

    def _try(self, dtype: torch.dtype) -> None:
        rows = torch.zeros(1, max(_EXPECTED) + 1, dtype=dtype, device=self._device)
        keys, receivers = torch.tensor([[_EXPECTED_KEY], [NO_RECEIVER]], device=self._device).unbind(0)
        self._draw_(rows, rows.new_ones(1), keys, receivers, _EXPECTED_STEP)

        drawn = rows.cpu().double().numpy()[0, list(_EXPECTED)]
        expected = np.array(list(_EXPECTED.values()))
        if not (np.abs(drawn - expected) <= _TOLERANCES[dtype]).all():
            raise RunError(
                f"{self._device} draws other {dtype} noise than a CPU: set compute.device=cpu, and report this GPU",
                code="noise.gpu",
            )


LANES: Any = tl.constexpr(32)  # as in philox: 32 counters make a tile of 128 elements
ROUNDS: Any = tl.constexpr(7)
REFINED: Any = tl.constexpr(2**16)
COUNTERS: Any = tl.constexpr(1024)  # of one program: 4,096 elements


@triton.jit
def normals32(x, y):  # type: ignore[no-untyped-def]
    """Two float32 normals of two words, as philox.normals32 makes them."""
    bits = (x.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = 0.08722349142904505 * m - 0.14366839931705258
    p = (p * m + 0.1495226761942918) * m - 0.16562393578805937
    p = (p * m + 0.1995683350825593) * m - 0.25002074045861866
    p = (p * m + 0.3333418562664761) * m - 0.499999879644504
    p = p * m + 0.9999999741895687
    log = p * m + (exponent - 32).to(tl.float32) * 0.6931471805599453
    radius = tl.sqrt(tl.maximum(-2.0 * log, 0.0))

    # Sine and cosine of the angle, as in philox.
    t = (y << 2).to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10
    z = t * t
    s = (-3.5954507782564404e-05 * z + 0.0024900071270947304) * z - 0.08074543483021228
    s = t * (s * z + 0.7853981609834044)
    c = (-0.0003188805083843841 * z + 0.015849915256886133) * z - 0.30842425356194936
    c = c * z + 0.9999999724233212
    return turned(radius, s, c, y)


@triton.jit
def turned(radius, s, c, y):  # type: ignore[no-untyped-def]
    """Turn a radius and the sine and cosine of an angle into two normals; the top bits of y choose sign and order."""
    signed = tl.where((y & 0x40000000) != 0, -radius, radius)
    swap = (y & 0x80000000) != 0
    return signed * tl.where(swap, s, c), signed * tl.where(swap, c, s)


@triton.jit
def polar64(v, y):  # type: ignore[no-untyped-def]
    """Two float64 normals of radius sqrt(-2 ln(v / 2^32)), as philox.polar64 makes them."""
    bits = v.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True) - 1.0
    q = m / (2.0 + m)
    w = q * q
    p = w * 0.0 + 1.0 / 21.0
    for k in tl.static_range(10):
        p = p * w + 1.0 / (19.0 - 2.0 * k)
    log = 2.0 * q * p + (exponent - 32).to(tl.float64) * 0.6931471805599453
    radius = tl.sqrt(tl.maximum(-2.0 * log, 0.0))

    t = (y << 2).to(tl.int32, bitcast=True).to(tl.float64) * 3.657295198167899e-10
    z = t * t
    s = z * 0.0 + 1.0
    c = z * 0.0 + 1.0
    for k in tl.static_range(7):
        s = 1.0 - s * z / ((14.0 - 2.0 * k) * (15.0 - 2.0 * k))
        c = 1.0 - c * z / ((14.0 - 2.0 * k) * (13.0 - 2.0 * k))
    return turned(radius, s * t, c, y)


@triton.jit
def refined(x, x1, x2):  # type: ignore[no-untyped-def]
    """Where in its cell of the 32-bit grid a radius lies: the word x and 64 bits behind its point."""
    cell = 2.3283064365386963e-10
    return x.to(tl.float64) + (x1.to(tl.float64) + (x2.to(tl.float64) + 0.5) * cell) * cell


@triton.jit
def replaced(n0, n1, v, x, y):  # type: ignore[no-untyped-def]
    """The pair of a radius below REFINED from v, its refined place; any other pair unchanged."""
    m0, m1 = polar64(v, y)
    few = x < REFINED
    return tl.where(few, m0.to(n0.dtype), n0), tl.where(few, m1.to(n1.dtype), n1)


@triton.jit(do_not_specialize=["stride", "d", "step"])  # type: ignore[untyped-decorator]
def add_normals(out, stride, d, std, keys, receivers, step, DOUBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add std[i] * N(0, I) to row i, [d], `stride` elements from the next; program (i, b) to its block b."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(std + row)
    if scale != 0:
        key = tl.load(keys + row)
        k0 = key.to(tl.uint32)
        k1 = (key >> 32).to(tl.uint32)
        counter = tl.program_id(1) * COUNTERS + tl.arange(0, COUNTERS)
        c0 = counter.to(tl.uint32)
        c1 = c0 * 0 + step.to(tl.uint32)
        c2 = c0 * 0 + tl.load(receivers + row).to(tl.uint32)
        x0, x1, x2, x3 = tl.philox_impl(c0, c1, c2, c0 * 0, k0, k1, ROUNDS)

        if DOUBLE:
            n0, n1 = polar64(x0.to(tl.float64) + 0.5, x1)
            n2, n3 = polar64(x2.to(tl.float64) + 0.5, x3)
        else:
            n0, n1 = normals32(x0, x1)
            n2, n3 = normals32(x2, x3)
        if tl.min(tl.minimum(x0, x2), 0) < REFINED:
            y0, y1, y2, y3 = tl.philox_impl(c0, c1, c2, c0 * 0 + 1, k0, k1, ROUNDS)
            n0, n1 = replaced(n0, n1, refined(x0, y0, y1), x0, x1)
            n2, n3 = replaced(n2, n3, refined(x2, y2, y3), x2, x3)

        # Word w of a counter is LANES columns after word w - 1.
        column = (counter // LANES) * (4 * LANES) + counter % LANES
        first = out + row * stride
        add(first, column, d, scale * n0)
        add(first, column + LANES, d, scale * n1)
        add(first, column + 2 * LANES, d, scale * n2)
        add(first, column + 3 * LANES, d, scale * n3)


@triton.jit
def add(first, column, d, values):  # type: ignore[no-untyped-def]
    """Add values to a row, from its first element on, in those columns that it has."""
    inside = column < d
    tl.store(first + column, tl.load(first + column, mask=inside) + values, mask=inside)
