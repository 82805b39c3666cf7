"""Laws and refusals of participation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.participation import PARTICIPATIONS, build_participation

laws = settings(max_examples=40)


def test_all_are_active_every_round() -> None:
    everybody = build_participation("all", 5, 3)
    assert everybody.active(0).tolist() == [True] * 5
    assert everybody.active(99).all()


@laws
@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 1000))
def test_uniform_activates_the_ceiling_of_the_share(n: int, percent: int, k: int) -> None:
    active = build_participation("uniform", n, 7, fraction=percent / 100).active(k)
    assert active.dtype == bool
    assert active.shape == (n,)
    assert active.sum() == math.ceil(n * percent / 100 - 1e-12) == -(-n * percent // 100)


def test_a_tiny_share_still_activates_one() -> None:
    assert build_participation("uniform", 10, 7, fraction=1e-12).active(0).sum() == 1


def test_draws_are_keyed_by_seed_and_round() -> None:
    one, same, other = (build_participation("uniform", 40, seed, fraction=0.5) for seed in (1, 1, 2))
    assert np.array_equal(one.active(4), same.active(4))
    assert not np.array_equal(one.active(4), one.active(5))
    assert not np.array_equal(one.active(4), other.active(4))


def test_every_peer_is_active_as_often() -> None:
    participation = build_participation("uniform", 10, 1, fraction=0.3)
    counts = sum(participation.active(k).astype(int) for k in range(1000))
    assert ((counts - 300) ** 2 / 210).sum() * 9 / 10 < 27.9  # chi-squared, 9 degrees of freedom, 0.1 %


@pytest.mark.parametrize(
    ("kind", "fraction", "refusal"),
    [
        ("some", None, ("catalogue.unknown", "participation.kind='some'")),
        ("all", 0.5, ("participation.fraction", r"fraction=0\.5")),
        ("uniform", None, ("participation.fraction", "fraction=None")),
        ("uniform", 0.0, ("participation.fraction", r"fraction=0\.0")),
        ("uniform", 1.1, ("participation.fraction", r"fraction=1\.1")),
        ("uniform", float("nan"), ("participation.fraction", "fraction=nan")),
    ],
)
def test_bad_participation_is_refused(kind: str, fraction: float | None, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal):
        build_participation(kind, 4, 0, fraction)


def test_participation_of_no_peer_is_refused() -> None:
    with raises(ScenarioError, "participation.n-peers", "n_peers=0"):
        build_participation("all", 0, 0)
    assert set(PARTICIPATIONS) == {"all", "uniform", "edges"}
