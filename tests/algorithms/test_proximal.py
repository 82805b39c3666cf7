"""The regularizers and their closed steps, against a minimiser that knows neither."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from scipy import optimize

from flower_privdec.algorithms.proximal import Regularizer, RegularizerSection, build_regularizer
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.scenario.loading import validated

numbers = st.floats(-4, 4)
weights = st.floats(0.01, 3)
REGULARIZERS = st.one_of(
    st.just(Regularizer()),
    st.builds(Regularizer, l2=weights),
    st.builds(Regularizer, l1=weights),
    st.builds(Regularizer, l1=weights, l2=weights),
    st.builds(lambda low, wide: Regularizer(lower=low, upper=low + wide), st.floats(-2, 1), st.floats(0.01, 3)),
    st.builds(Regularizer, radius=weights),
)


def by_scipy(h: Regularizer, z: np.ndarray, scale: float, gamma: float) -> float:
    """Return the least value of <z, x> + scale h(x) + gamma |x|² / 2, with x = p - n where h has kinks."""
    d, strength = len(z), scale * h.l2 + gamma

    def value(parts: np.ndarray) -> float:
        x = parts[:d] - parts[d:]
        return float(z @ x + scale * h.l1 * parts.sum() + strength * x @ x / 2)

    if math.isfinite(h.radius):
        ball = {"type": "ineq", "fun": lambda x: h.radius**2 - x @ x, "jac": lambda x: -2 * x}
        start = -z * min(0.1, h.radius) / (1 + np.linalg.norm(z))
        found = optimize.minimize(
            lambda x: z @ x + strength * x @ x / 2, start, jac=lambda x: z + strength * x, constraints=[ball],
            method="SLSQP", options={"ftol": 1e-13, "maxiter": 500},
        )  # fmt: skip
        return float(found.fun)
    if math.isfinite(h.lower):
        bounds = [(h.lower, h.upper)] * d
        found = optimize.minimize(lambda x: z @ x + strength * x @ x / 2, np.full(d, h.lower), bounds=bounds, tol=1e-13)
        return float(found.fun)
    return float(optimize.minimize(value, np.zeros(2 * d), bounds=[(0, None)] * (2 * d), tol=1e-13).fun)


@settings(max_examples=150)
@given(REGULARIZERS, st.lists(numbers, min_size=1, max_size=3), st.floats(0, 3), st.floats(0.05, 3))
def test_no_minimiser_finds_less(h: Regularizer, z: list[float], scale: float, gamma: float) -> None:
    row = torch.tensor([z], dtype=torch.float64)
    x = h.minimizer(row, scale, gamma)[0]
    assert math.isfinite(h.value(x))
    value = float(row[0] @ x) + scale * h.value(x) + gamma * float(x @ x) / 2
    least = by_scipy(h, np.array(z), scale, gamma)
    assert value <= least + 1e-9 * (1 + abs(least))
    assert least <= value + 1e-5 * (1 + abs(value))


@settings(max_examples=60)
@given(REGULARIZERS, st.floats(0, 3), st.floats(0.05, 3), st.integers(0, 99))
def test_it_is_the_only_stationary_point(h: Regularizer, scale: float, gamma: float, seed: int) -> None:
    """At the minimum the slope towards any other allowed point is not negative."""
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    x = h.minimizer(z, scale, gamma)

    def value(row: int, at: torch.Tensor) -> float:
        return float(z[row] @ at) + scale * (h.value(at) if scale else 0.0) + gamma * float(at @ at) / 2

    for row in range(4):
        for _ in range(8):
            other = h.minimizer(torch.randn(1, 5, generator=generator, dtype=torch.float64), 1.0, 0.3)[0]
            for step in (1e-4, 0.1, 1.0):
                assert value(row, x[row] + step * (other - x[row])) >= value(row, x[row]) - 1e-12


@settings(max_examples=60)
@given(REGULARIZERS, st.floats(0, 2), st.floats(0.05, 2), st.integers(0, 99))
def test_rows_are_taken_apart(h: Regularizer, scale: float, gamma: float, seed: int) -> None:
    z = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    together = h.minimizer(z, scale, gamma)
    for row in range(6):
        torch.testing.assert_close(h.minimizer(z[row : row + 1], scale, gamma)[0], together[row], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("h", "scale"),
    [
        (Regularizer(), 1.0),
        (Regularizer(l1=1.0), 1.0),
        (Regularizer(lower=-1.0, upper=1.0), 1.0),
        (Regularizer(radius=1.0), 1.0),
        (Regularizer(l2=1.0), 0.0),
    ],
)
def test_a_step_without_a_single_least_value_is_refused(h: Regularizer, scale: float) -> None:
    with raises(ScenarioError, "regularizer.not-strongly-convex", "gamma=0") as refused:
        h.minimizer(torch.ones(1, 2), scale, 0.0)
    assert "\n" not in str(refused.value)


def test_gamma_may_be_zero_if_regularizer_is_strongly_convex() -> None:
    x = Regularizer(l1=0.5, l2=2.0).minimizer(torch.tensor([[-3.0, 0.5, 4.0]]), scale=1.0, gamma=0.0)
    torch.testing.assert_close(x, torch.tensor([[1.25, 0.0, -1.75]]))


def test_scale_zero_leaves_the_box_and_the_ball() -> None:
    z = torch.tensor([[-30.0, 40.0]])
    torch.testing.assert_close(Regularizer(radius=1.0).minimizer(z, 0.0, 1.0), torch.tensor([[0.6, -0.8]]))
    torch.testing.assert_close(Regularizer(lower=0.0, upper=2.0).minimizer(z, 0.0, 1.0), torch.tensor([[2.0, 0.0]]))


def test_infinite_numbers_stay_infinite() -> None:
    z = torch.tensor([[math.nan, 1.0], [math.inf, 1.0]])
    for h in (Regularizer(l2=1.0), Regularizer(l1=1.0), Regularizer(radius=1.0)):
        assert not torch.isfinite(h.minimizer(z, 1.0, 1.0)).all(1).any()


def test_a_ball_combines_with_no_other_regularizer() -> None:
    with raises(ArgumentError, "regularizer.ball"):
        Regularizer(radius=1.0, l1=0.1)


@pytest.mark.parametrize(
    ("section", "built"),
    [
        ({"kind": "none"}, Regularizer()),
        ({"kind": "l2", "weight": 0.5}, Regularizer(l2=0.5)),
        ({"kind": "l1", "weight": 0.5}, Regularizer(l1=0.5)),
        ({"kind": "elastic-net", "weight": 0.5, "l1_weight": 0.25}, Regularizer(l2=0.5, l1=0.25)),
        ({"kind": "box", "lower": 0.0, "upper": 1.0}, Regularizer(lower=0.0, upper=1.0)),
        ({"kind": "ball", "radius": 2.0}, Regularizer(radius=2.0)),
    ],
)
def test_every_kind_is_built(section: dict[str, object], built: Regularizer) -> None:
    assert build_regularizer(RegularizerSection.model_validate(section)) == built


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ({"kind": "l2"}, "scenario.incomplete"),
        ({"kind": "none", "weight": 1.0}, "scenario.other-choice"),
        ({"kind": "l1", "weight": 1.0, "radius": 1.0}, "scenario.other-choice"),
        ({"kind": "box", "lower": 1.0, "upper": 0.0}, "regularizer.bounds"),
        ({"kind": "box", "lower": 1.0}, "scenario.incomplete"),
        ({"kind": "ball", "radius": math.inf}, "scenario.finite_number"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: dict[str, object], code: str) -> None:
    with raises(ScenarioError, code):
        validated(RegularizerSection, section, "it")
