"""One example moves a clipped sum by at most the clip norm: for values of every size, as they are really computed."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gradient_problems import CLASSES, MARGINS, MODELS, ORDER, OTHERS, SHAPE, Batch, added, module_of, targets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_kernel import build_kernel
from torch import Tensor, nn

from flower_privdec.algorithms.tables import TABLES
from flower_privdec.core.cohort import PrivateStep, stochastic_gradient
from flower_privdec.gradients import GradientKernel, StackedKernel
from flower_privdec.gradients.factored import Outer
from flower_privdec.gradients.protocol import (
    BLOCK,
    LARGEST,
    LONGEST,
    Clipping,
    Parameter,
    beyond,
    floor,
    length,
    slack,
    upper,
)
from flower_privdec.models import flatten
from flower_privdec.tasks.losses import LOSSES

KINDS = [  # every kernel that fits a model
    (name, kind)
    for name, (_, best) in MODELS.items()
    for kind in [*list(ORDER)[list(ORDER.values()).index(best) :], "loop"]
]
FEW = ["mlp", "cnn-small", "residual", "recurrent", "scaled"]  # one of each kind of path through the kernels
NUMBERS = {
    torch.float32: [0.0, -0.0, 1e-45, 1e-40, 1e-30, 1e-10, 1.0, 1e4, 1e10, -1e15, 1e19, -1e20, 1e38, 3.4028234e38],
    torch.float64: [0.0, -0.0, 5e-324, 1e-310, 1e-200, 1e-100, 1.0, 1e10, -1e100, 1e150, -1e155, 1e300, 1.797e308],
}
FILLS = ("usual", "mixed", "constant", "large", "sparse", "not numbers")


def fill(how: str, shape: Any, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of one kind: as they should be, or extreme in some way."""
    rng, extreme = np.random.default_rng(seed), np.array(NUMBERS[dtype])
    usual, few = rng.standard_normal(shape), rng.random(shape) < 0.2
    values = {
        "usual": usual,
        "mixed": rng.choice(extreme, shape),
        "constant": np.full(shape, rng.choice(extreme)),
        "large": np.clip(usual, -1, 1) * abs(rng.choice(extreme)),
        "sparse": np.where(few, rng.choice(extreme), usual),
        "not numbers": np.where(few, rng.choice([np.nan, np.inf, -np.inf]), usual),
    }
    return torch.from_numpy(np.asarray(values[how], dtype=np.float64)).to(dtype)


def exactly(vector: Tensor) -> Fraction:
    """The squared norm of a vector, without rounding."""
    ratios = [value.as_integer_ratio() for value in vector.flatten().tolist()]
    finest = max((below for _, below in ratios), default=1)  # of powers of two: no fraction has to be reduced
    return Fraction(sum((above * (finest // below)) ** 2 for above, below in ratios), finest**2)


def assert_within(moved: Tensor, limit: float) -> None:
    """The norm is at most the limit: exactly, or for long vectors to 1e-12."""
    assert torch.isfinite(moved).all()
    if moved.numel() <= 1000:
        assert exactly(moved) <= Fraction(limit) ** 2
    else:
        wide = moved.flatten().numpy().astype(np.longdouble)
        assert np.sqrt(np.square(wide).sum()) <= limit * (1 + 1e-12)


@cache
def kernel_of(name: str, kind: str, loss: str = "cross-entropy") -> tuple[nn.Module, GradientKernel]:
    """A model and its kernel, which keeps nothing of its arguments."""
    module = module_of(name, 1 if LOSSES[loss].single else CLASSES)
    if kind == "single":
        return module, build_kernel(module, loss, SHAPE, single_example=True)
    return module, build_kernel(module, loss, SHAPE, kind=kind)


def check_law(name: str, kind: str, loss: str, dtype: torch.dtype, draw: Any) -> None:
    """Alone an example adds at most its share; among others it does, and leaves theirs as they are."""
    module, kernel = kernel_of(name, kind, loss)
    of_params, of_example = draw(st.sampled_from(FILLS[:-1])), draw(st.sampled_from(FILLS))
    seed, clip = draw(st.integers(0, 2**16)), draw(st.sampled_from([1e-3, 0.3, 1.0, 1e3]))
    scale, share = draw(st.sampled_from([1.0, -1e-3, 30.0])), draw(st.sampled_from([None, 0.0, 1e-30, 0.7, math.inf]))
    row = fill(of_params, (1, kernel.d), dtype, seed)
    params = flatten(module).to(dtype) + row / 10 if of_params == "usual" else row
    x = fill("usual", (1, 3, *SHAPE), dtype, seed + 1)
    x[:, 1] = fill(of_example, SHAPE, dtype, seed + 2)
    y = targets_of(LOSSES[loss], (1, 3), seed, dtype)
    if LOSSES[loss].targets != "classes":
        y[:, 1] = fill(draw(st.sampled_from(FILLS)), CLASSES, dtype, seed + 3)
    rest = [torch.tensor([clip], dtype=dtype), torch.tensor([scale], dtype=dtype)]
    rest += [None if share is None else torch.tensor([share], dtype=dtype)]
    limit = float(abs(rest[1]).double() * rest[0].double())
    whole = Batch(x, y, torch.ones(1, 3, dtype=dtype))
    alone, _ = added(kernel, params, Batch(x[:, 1:2], y[:, 1:2], whole.weight[:, :1]), *rest)
    assert_within(alone, limit)
    together, norms = added(kernel, params, whole, *rest)
    without = replace(whole, weight=torch.tensor([[1, 0, 1]], dtype=dtype))
    others, _ = added(kernel, params, without, *rest)
    assert torch.isfinite(norms).all()
    moved = together - others
    assert torch.isfinite(moved).all()
    assert np.linalg.norm(moved.numpy().astype(np.longdouble)) <= limit * (1 + 1e-6)
    if norms[0, 1] == 0:
        assert torch.equal(together, others)
    empty = x.clone()
    empty[:, 1] = 0
    assert torch.equal(added(kernel, params, replace(without, x=empty), *rest)[0], others)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [(*kind, torch.float32) for kind in KINDS] + [(*kind, torch.float64) for kind in KINDS if kind[0] in FEW],
)
@settings(max_examples=5)
@given(data=st.data())
def test_no_value_moves_a_sum_by_more(name: str, kind: str, dtype: torch.dtype, data: Any) -> None:
    check_law(name, kind, "cross-entropy", dtype, data.draw)


@pytest.mark.parametrize("loss", [*MARGINS, *OTHERS])
@pytest.mark.parametrize(("name", "kind"), [*(("mlp", kind) for kind in [*ORDER, "loop"]), ("cnn-small", "factored")])
@settings(max_examples=5)
@given(data=st.data())
def test_no_value_or_target_moves_a_sum_by_more(loss: str, name: str, kind: str, data: Any) -> None:
    check_law(name, kind, loss, torch.float32, data.draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", MARGINS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_value_moves_a_single_examples_sum_by_more(loss: str, dtype: torch.dtype, data: Any) -> None:
    check_law("linear", "single", loss, dtype, data.draw)


@pytest.mark.parametrize("name", ["linear", "linear without bias"])
@pytest.mark.parametrize("loss", MARGINS)
@settings(max_examples=8, deadline=None)
@given(how=st.sampled_from(FILLS), seed=st.integers(0, 2**16), clip=st.sampled_from([None, 0.3]))
def test_one_example_alone_adds_what_it_does_stacked(
    loss: str, name: str, how: str, seed: int, clip: float | None
) -> None:
    (module, stacked), (_, single) = kernel_of(name, "stacked", loss), kernel_of(name, "single", loss)
    params = flatten(module).expand(5, -1).double() + fill("usual", (5, single.d), torch.float64, seed) / 10
    x = fill("usual", (5, 1, *SHAPE), torch.float64, seed + 1)
    x[2] = fill(how, (1, *SHAPE), torch.float64, seed + 2)
    batch = Batch(
        x, targets_of(LOSSES[loss], (5, 1), seed, torch.float64), torch.tensor([[1.0]] * 4 + [[0.0]]).double()
    )
    scale, share = (fill("usual", (5,), torch.float64, seed + 3 + k).abs() + 0.1 for k in range(2))
    rest = (None if clip is None else torch.full((5,), clip).double(), scale, share)
    assert type(single).__name__ == "SingleExampleKernel"
    (sums, norms), (expected, bounds) = added(single, params, batch, *rest), added(stacked, params, batch, *rest)
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(norms[:4], bounds[:4], rtol=1e-9, atol=0)


BAD = (1e20, 3e38, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_an_example_that_overflows_counts_as_zero(name: str, kind: str) -> None:
    """With clipping and without, a bad value in each row; and as padding it changes nothing either."""
    module, kernel = kernel_of(name, kind)
    m, params = len(BAD), flatten(module).repeat(len(BAD), 1)
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0)).repeat(m, 1, 1, 1, 1)
    plain = Batch(x, torch.tensor([[0, 1, 2, 3]]).repeat(m, 1), torch.ones(m, 4))
    poisoned, bad = x.clone(), torch.tensor(BAD)
    poisoned[:, 1, 0, 0, 0] = bad
    poisoned[:, 2] = bad.view(m, 1, 1, 1)
    for clip in (torch.full((m,), 0.5), None):
        keep = torch.tensor([[1.0, 0.0, 0.0, 1.0]]).repeat(m, 1)
        expected, usual = added(kernel, params, replace(plain, weight=keep), clip, torch.ones(m))
        assert expected.any(dim=1).all()
        for weight in (plain.weight, keep):
            sums, norms = added(kernel, params, Batch(poisoned, plain.y, weight), clip, torch.ones(m))
            assert torch.isfinite(norms).all()
            assert torch.equal(norms[:, [0, 3]], usual[:, [0, 3]])
            for row in range(m):
                if norms[row, 1] == norms[row, 2] == 0 or weight is keep:
                    assert torch.equal(sums[row], expected[row])
                else:  # a norm within the model can tame what is large
                    assert (sums[row] - expected[row]).norm() <= 1 + 1e-5 or clip is None


@pytest.mark.parametrize("bad", [0.5, math.nan])
def test_masking_without_asking_gives_the_same_bits(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which is not made to wait for whether there is anything to mask."""
    module, kernel = kernel_of("mlp", "stacked")
    x = torch.randn(1, 3, *SHAPE, generator=torch.Generator().manual_seed(0))
    x[0, 1, 0, 0, 0] = bad
    arguments = (
        flatten(module)[None],
        Batch(x, torch.tensor([[0, 1, 2]]), torch.ones(1, 3)),
        torch.ones(1),
        torch.ones(1),
    )
    waited, _ = added(kernel, *arguments)
    monkeypatch.setattr("flower_privdec.gradients.stacked.beyond", lambda norms, wait: beyond(norms, wait=False))
    assert torch.equal(added(kernel, *arguments)[0], waited)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_parameters_that_are_not_numbers_move_nothing(name: str, kind: str) -> None:
    """And the row beside them steps as ever, with clipping and without."""
    module, kernel = kernel_of(name, kind)
    batch = Batch(torch.ones(4, 2, *SHAPE), torch.tensor([[0, 1]] * 4), torch.ones(4, 2))
    for clip in (None, torch.full((4,), 0.5)):
        params = flatten(module).repeat(4, 1)
        expected, _ = added(kernel, params, batch, clip, torch.ones(4))
        for row, value in enumerate((math.nan, math.inf, 3e38)):
            params[row] = value
        sums, norms = added(kernel, params, batch, clip, torch.ones(4))
        assert not sums[:3].any()
        assert not norms[:3].any()
        assert torch.equal(sums[3], expected[3])


@pytest.mark.parametrize("kind", ["stacked", "factored", "vmap", "loop"])
def test_a_divisor_of_zero_moves_nothing(kind: str) -> None:
    module, kernel = kernel_of("mlp", kind)
    params = flatten(module)[None]
    batch = Batch(torch.ones(1, 2, *SHAPE), torch.tensor([[0, 1]]), torch.ones(1, 2))
    sums, norms = added(kernel, params, batch, torch.ones(1), torch.ones(1), torch.zeros(1))
    assert not sums.any()
    assert not norms.any()


# --- norms ---


@pytest.mark.slow
@settings(max_examples=80)
@given(
    n=st.sampled_from([1, 2, 3, 10, 100, BLOCK, LONGEST, LONGEST + 1, 9 * BLOCK, 10 * BLOCK + 7]),
    how=st.sampled_from([*FILLS[:-1], "falling", "tiny"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_a_norm_is_never_below_the_true_one(n: int, how: str, dtype: torch.dtype, seed: int) -> None:
    """Also where one number hides thousands that each vanish beside it, and where all squares underflow."""
    if how == "falling":
        values = torch.full((n,), 2.0 ** (-12.5 if dtype is torch.float32 else -27), dtype=dtype)
        values[0] = 1
    elif how == "tiny":
        values = fill("usual", n, dtype, seed) * (1e-23 if dtype is torch.float32 else 1e-170)
    else:
        values = fill(how, n, dtype, seed)
    bound = upper(values[None])
    if beyond(bound) is not None:
        return
    true = exactly(values)
    assert Fraction(bound.item()) ** 2 >= true
    relative = Fraction(4 * slack(dtype, n))
    beside = max(0.0, bound.item() - 2 * float(floor(values, n)))
    assert Fraction(beside) ** 2 <= true * (1 + relative)


def test_bounds_are_close() -> None:
    """So close that learning does not notice."""
    assert slack(torch.float32, 784, 100, 2) < 3e-5
    assert slack(torch.float32, 2**30) < 5e-4
    assert slack(torch.float64, 2**30) < 1e-12
    assert float(floor(torch.ones(1), 2**20)) < 1e-15
    assert length(torch.ones(3, 5 * LONGEST)).tolist() == pytest.approx([math.sqrt(5 * LONGEST)] * 3)


@settings(max_examples=100)
@given(
    norm=st.floats(2**-50, LARGEST[torch.float32], width=32),
    clip=st.floats(2**-20, 2**20, width=32),
    scale=st.floats(2**-20, 2**20, width=32),
)
def test_a_coefficient_is_rounded_within_what_slack_allows(norm: float, clip: float, scale: float) -> None:
    """Exactly: coefficient * norm <= scale * clip * (1 + 4 u)."""
    one = torch.ones(1, 1)
    factor = Clipping(clip * one[0], scale * one[0]).coefficient(norm * one, one).item()
    assert Fraction(factor) * Fraction(norm) <= Fraction(scale) * Fraction(clip) * (1 + Fraction(2, 2**23))


class Total(nn.Module):
    """A linear layer summed over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(1)


def tiny_deltas(gap: float, large: float, _: float) -> tuple[nn.Module, list[float], list[float]]:
    """Softmax that is all but sure: deltas whose squares underflow, times a large input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 3)), [0.0] * 6 + [gap, 0.0, 0.0], [large, 0.0]


def tiny_deltas_twice(gap: float, large: float, _: float) -> tuple[nn.Module, list[float], list[list[float]]]:
    """The same for two positions."""
    return Total(), [0.0] * 6 + [gap / 2, 0.0, 0.0], [[large, 0.0], [0.0, 0.0]]


def tiny_inputs(_: float, large: float, tiny: float) -> tuple[nn.Module, list[float], list[float]]:
    """Features whose squares underflow, into layers without bias, times large deltas."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 3, bias=False))
    return module, [1.0, 0.0, 0.0, 1.0, large, 0.0, -large, 0.0, 0.0, large], [tiny, tiny]


@pytest.mark.parametrize(
    ("dtype", "sizes", "clip"), [(torch.float32, (53, 1e18, 1e-23), 1e-7), (torch.float64, (375, 1e153, 1e-163), 1e-12)]
)
@pytest.mark.parametrize("kind", ["stacked", "factored", "vmap", "loop"])
@pytest.mark.parametrize("make", [tiny_deltas, tiny_deltas_twice, tiny_inputs])
def test_an_underflow_in_one_factor_stays_zero(
    make: Any, kind: str, dtype: torch.dtype, sizes: tuple[float, ...], clip: float
) -> None:
    module, numbers, example = make(*sizes)
    row, x = torch.tensor([numbers], dtype=dtype), torch.tensor([[example]], dtype=dtype)
    if kind == "stacked" and isinstance(module, Total):
        return
    kernel, one = build_kernel(module, "cross-entropy", x.shape[2:], kind=kind), torch.ones(1, dtype=dtype)
    batch = Batch(x, torch.zeros(1, 1, dtype=torch.int64), one[None])
    free, norms = added(kernel, row, batch, None, one)
    assert norms >= free.norm() > 2 * clip
    assert_within(added(kernel, row, batch, clip * one, one)[0], float((clip * one).double()))


class Difference(nn.Module):
    """Positions whose outputs are subtracted from each other, neighbours or halves: terms of a gradient cancel."""

    def __init__(self, inner: int, outputs: int, halves: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(inner, outputs)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        half = y.shape[1] // 2
        return (y[:, :half] - y[:, half:] if self.halves else y[:, ::2] - y[:, 1::2]).sum(1)


@pytest.mark.parametrize("kind", ["factored", "vmap", "loop"])
@settings(max_examples=25)
@given(
    sizes=st.sampled_from([(2, 36, 4), (16, 300, 64), (16, 100, 100), (32, 36, 4)]),
    halves=st.booleans(),
    size=st.floats(0, 15),
    apart=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3]),
    among=st.sampled_from([1, 31]),
    seed=st.integers(0, 2**16),
)
def test_terms_that_cancel_do_not_hide_a_gradient(
    kind: str, sizes: tuple[int, int, int], halves: bool, size: float, apart: float, among: int, seed: int
) -> None:
    """Alone and among thirty others, whose sum must not be rounded by terms that are large and cancel."""
    rng, (positions, inner, outputs) = np.random.default_rng(seed), sizes
    once = rng.standard_normal((positions // 2, inner)) * 10**size
    example = np.concatenate([once, once]) if halves else np.repeat(once, 2, axis=0)
    example *= 1 + apart * rng.standard_normal(example.shape)
    x = torch.from_numpy(rng.standard_normal((1, among, positions, inner))).float()
    here = slice(among // 2, among // 2 + 1)
    x[0, here] = torch.from_numpy(example).float()
    y, weight = torch.from_numpy(rng.integers(0, outputs, (1, among))), torch.ones(1, among)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Difference(inner, outputs, halves)
    kernel = build_kernel(module, "cross-entropy", (positions, inner), kind=kind)
    params, one = flatten(module)[None], torch.ones(1)
    whole, _ = added(kernel, params, Batch(x, y, weight), one, one)
    weight[0, here] = 0
    rest, _ = added(kernel, params, Batch(x, y, weight), one, one)
    assert (whole - rest).double().norm() <= 1 + (among > 1) * 1e-4


@pytest.mark.parametrize("name", FEW)
def test_clipping_is_hardly_tighter_than_it_must_be(name: str) -> None:
    """In float32 a clipped example adds the clip norm, less at most 2e-4 of it."""
    module, kernel = kernel_of(name, "auto")
    batch = Batch(
        torch.randn(1, 1, *SHAPE, generator=torch.Generator().manual_seed(0)),
        torch.ones(1, 1, dtype=torch.int64),
        torch.ones(1, 1),
    )
    out, norms = added(kernel, flatten(module)[None], batch, torch.tensor([1e-3]), torch.ones(1))
    assert norms.item() > 1e-2
    assert 1e-3 * (1 - 2e-4) <= out.double().norm().item() <= 1e-3


@settings(max_examples=25)
@given(
    shape=st.sampled_from([(1, 2, 4, 4), (3, 5, 40, 9), (7, 16, 100, 60)]),
    apart=st.sampled_from([None, 0.0, 1e-9, 1e-5]),
    size=st.floats(-10, 10),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_the_bound_of_a_product_over_positions(
    shape: tuple[int, int, int, int], apart: float | None, size: float, dtype: torch.dtype, seed: int
) -> None:
    """At least the exact norm and what rounding may add to it; not much more where nothing cancels."""
    (b, t, k, o), rng = shape, np.random.default_rng(seed)
    u = torch.from_numpy(rng.standard_normal((b, t, k)) * 10**size).to(dtype)
    delta = torch.from_numpy(rng.standard_normal((b, t, o))).to(dtype)
    if apart is not None:
        u[:] = u[:, :1]
        delta[:, 1::2] = -delta[:, : t - 1 : 2] * (1 + apart)
        delta[:, 2 * (t // 2) :] = 0
    bound = Outer(Parameter("w", 0, torch.Size((o, k))), u, delta, None).bound().double().numpy()
    wide = np.einsum("btk,bto->bko", *(part.numpy().astype(np.longdouble) for part in (u, delta)))
    exact = np.sqrt(np.square(wide).sum((1, 2)))
    terms = (u.double().norm(dim=2) * delta.double().norm(dim=2)).sum(1).numpy()
    rounding = b * t * torch.finfo(dtype).eps / 2 * terms
    assert (bound >= exact + rounding).all()
    assert apart is not None or (bound <= exact * (1 + 1e-3)).all()


# --- factors, of which tables are made ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=15)
@given(params=st.sampled_from(FILLS), example=st.sampled_from(FILLS), seed=st.integers(0, 2**16))
def test_factors_are_finite(dtype: torch.dtype, params: str, example: str, seed: int) -> None:
    _, kernel = kernel_of("mlp", "stacked")
    assert isinstance(kernel, StackedKernel)
    x = fill(example, (2, 3, *SHAPE), dtype, seed)
    before = x.clone()
    batch = Batch(x, torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=dtype))
    factors = kernel.factors(fill(params, (2, kernel.d), dtype, seed + 1), batch)
    for value in (*factors.deltas, *factors.activations, factors.norms):
        assert torch.isfinite(value).all()
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("table", ["factored", "dense"])
def test_a_table_forgets_a_gradient_that_became_infinite(build: Any, table: str) -> None:
    """After steps at parameters that are numbers and that are not, the mean is that of the entries again."""
    experiment = build(f"algorithm={{name: privsgp-vr, learning_rate: 0.5, table: {table}}}", "privacy=none")
    cohort, peers = experiment.cohort(), np.arange(4)
    x = cohort.initial.repeat(4, 1)
    state = TABLES[table].initial(cohort, x)
    start = state["table.mean"].clone()
    for number, factor in enumerate((1.0, math.nan, 1.0, math.inf, 1.0)):
        out, batch = torch.zeros_like(x), cohort.data.examples(peers, 0, 20)
        scale = torch.full((4,), 1 / 20, dtype=x.dtype)
        step = PrivateStep(
            sums={"gradient": out},
            params=x * factor,
            divisor=None,
            batch=batch,
            clip_norm=None,
            scale=scale,
            noise_std={},
            estimate=stochastic_gradient,
            peers=peers,
            rows=peers,
            round_index=number,
            step=number,
            receivers=None,
        )
        TABLES[table].add_(state, cohort, step)
        assert all(torch.isfinite(rows).all() for rows in state.values())
        if factor == 1.0:
            torch.testing.assert_close(state["table.mean"], start, rtol=1e-9, atol=1e-12)
        else:
            assert (state["table.mean"] - start).norm() > 1e-3
