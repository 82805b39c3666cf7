"""Dyn-D2P: its schedules, its four special cases, and a trajectory in NumPy straight from Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithm_references import NoiseTape, softmax_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine

ROUNDS = 6  # K of the tiny scenario


def algorithm(name, **options):
    inside = ", ".join(f"{key}: {value}" for key, value in {"name": name, "learning_rate": 0.5, **options}.items())
    return f"algorithm={{{inside}}}"


def rows_after(experiment, rounds, tape=None):
    cohort = experiment.cohort()
    if tape is not None:
        cohort.noise = tape
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine.state.rows


def schedules(experiment):
    """Return C_k and σ_k of every round and peer, [K, n]."""
    plan, rounds = experiment.own.protection, range(experiment.scenario.rounds)
    clip = np.stack([plan.clip_norm(k) for k in rounds])
    return clip, clip * np.stack([plan.noise_multiplier(k) for k in rounds])


# --- Algorithm 1 in NumPy ---


def reference(experiment, tape, gamma, batch_size, clip_of, sigma_of):
    """Dyn-D2P, Algorithm 1: lines 3 to 14, with a Poisson batch for ξ and the noise of its sum."""
    n = 4
    x = np.tile(experiment.initial.numpy(), (n, 1))
    w, z = np.ones(n), x.copy()
    features = experiment.own.examples.x.double().numpy().reshape(-1, 64)
    labels = experiment.own.examples.y.numpy()
    clips, sigmas = [], []
    for k in range(experiment.scenario.rounds):
        half, c_k, sigma_k = x.copy(), clip_of(k), sigma_of(k)  # lines 5, 7 and 8
        clips.append(c_k), sigmas.append(sigma_k)
        for i in range(n):
            drawn = experiment.own.sampler.batch(k, [i])  # line 3
            rows = experiment.own.examples.parts[i][drawn.index[0][drawn.weight[0] > 0]]
            g = softmax_gradients(features[rows], z[i, :640].reshape(10, 64), z[i, 640:], labels[rows])  # line 4
            g *= np.minimum(1, c_k[i] / np.linalg.norm(g, axis=1, keepdims=True))  # line 6
            noise = -sigma_k[i] * tape.draw(k, i)  # line 9 (-N and N are alike)
            half[i] -= gamma * (g.sum(0) + noise) / batch_size  # line 10
        hop, p = 2 ** (k % 2), np.zeros((n, n))
        for j in range(n):
            p[j, j] = p[(j + hop) % n, j] = 0.5
        x, w = p @ half, p @ w  # lines 11 to 13
        z = x / w[:, None]  # line 14
    return x, w, np.stack(clips), np.stack(sigmas)


def test_dyn_d2p_follows_algorithm_1_with_its_schedules(build):
    c_0, rho_c, rho_mu = np.array([1.0, 0.5, 2.0, 0.8]), 3.0, 2.0
    name = algorithm("dyn-d2p", initial_clip=c_0.tolist(), rho_c=rho_c, rho_mu=rho_mu)
    experiment, tape = build(name, "privacy.epsilon=[1.0, 2.0, 3.0, 4.0]"), NoiseTape(650)
    mu_0 = 1 / experiment.own.protection.noise_multiplier(0)  # solved from each peer's budget
    assert len(set(mu_0.round(6))) == 4
    x, w, clips, sigmas = reference(
        experiment,
        tape,
        0.5,
        12,
        lambda k: c_0 * rho_c ** (-k / ROUNDS),
        lambda k: c_0 / mu_0 * (rho_c * rho_mu) ** (-k / ROUNDS),
    )
    planned_clips, planned_sigmas = schedules(experiment)
    np.testing.assert_allclose(planned_clips, clips, rtol=1e-12)
    np.testing.assert_allclose(planned_sigmas, sigmas, rtol=1e-12)
    mu_k = mu_0 * rho_mu ** (np.arange(ROUNDS)[:, None] / ROUNDS)
    np.testing.assert_allclose(planned_clips / planned_sigmas, mu_k, rtol=1e-12)
    rows = rows_after(experiment, ROUNDS, tape)
    np.testing.assert_allclose(rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(rows["w"].numpy(), w, rtol=1e-12)


def test_the_general_form_follows_algorithm_2(build):
    clip, noise = np.array([1.0, 0.7, 0.9, 0.4, 0.4, 0.6]), np.array([2.0, 2.5, 1.0, 1.0, 0.5, 0.7])
    lists = f"privacy.schedule={{clip_norms: {clip.tolist()}, noise: {noise.tolist()}}}"
    experiment, tape = build(lists, "privacy.clip_norm=1.5", algorithm("privsgp")), NoiseTape(650)
    scale = schedules(experiment)[1][0] / noise[0]
    x, _, clips, sigmas = reference(
        experiment, tape, 0.5, 12, lambda k: np.full(4, 1.5 * clip[k]), lambda k: scale * noise[k]
    )
    planned_clips, planned_sigmas = schedules(experiment)
    np.testing.assert_allclose(planned_clips, clips, rtol=1e-12)
    np.testing.assert_allclose(planned_sigmas, sigmas, rtol=1e-12)  # the shape is kept, the scale is solved for
    np.testing.assert_allclose(rows_after(experiment, ROUNDS, tape)["x"].numpy(), x, rtol=1e-9, atol=1e-11)


# --- special cases ---

SAME = {
    "dyn-d2p without growth is const-d2p": (
        [algorithm("dyn-d2p", rho_c=1.0, rho_mu=1.0)],
        [algorithm("const-d2p")],
    ),
    "const-d2p is privsgp": ([algorithm("const-d2p", clip_norm=0.7)], [algorithm("privsgp"), "privacy.clip_norm=0.7"]),
    "without a growing budget it is dyn-c-d2p": (
        [algorithm("dyn-d2p", rho_c=2.5, rho_mu=1.0)],
        [algorithm("dyn-c-d2p", rho_c=2.5)],
    ),
    "without a falling clip norm it is dyn-mu-d2p": (
        [algorithm("dyn-d2p", rho_c=1.0, rho_mu=2.5)],
        [algorithm("dyn-mu-d2p", rho_mu=2.5)],
    ),
    "dyn-c-d2p without a falling clip norm is const-d2p": (
        [algorithm("dyn-c-d2p", rho_c=1.0)],
        [algorithm("const-d2p")],
    ),
    "it is privsgp with its schedule": (
        [algorithm("dyn-d2p", initial_clip=0.6, rho_c=2.0, rho_mu=3.0)],
        [algorithm("privsgp"), "privacy.clip_norm=0.6", "privacy.schedule={rho_c: 2.0, rho_mu: 3.0}"],
    ),
    "its clip norm is the scenario's unless it has one": (
        [algorithm("dyn-d2p"), "privacy.clip_norm=0.6"],
        [algorithm("dyn-d2p", initial_clip=0.6)],
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_special_cases_are_the_same_run_bit_for_bit(build, alike, case):
    one, other = (build(*given) for given in SAME[case])
    assert one.own.keys != other.own.keys  # two runs share no draw, unless a test makes them
    other = alike(other, one)
    for a, b in zip(schedules(one), schedules(other), strict=True):
        np.testing.assert_array_equal(a, b)
    rows, again = rows_after(one, ROUNDS), rows_after(other, ROUNDS)
    assert all(torch.equal(rows[name], again[name]) for name in ("x", "w"))


def test_different_members_of_the_family_are_different_runs(build):
    names = ("dyn-d2p", "dyn-c-d2p", "dyn-mu-d2p", "const-d2p")
    ends = [rows_after(build(algorithm(name)), ROUNDS)["x"] for name in names]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_lists_of_the_exponential_shape_are_dyn_d2p(build):
    share = np.arange(ROUNDS) / ROUNDS
    lists = f"{{clip_norms: {(2.0**-share).tolist()}, noise: {(6.0**-share).tolist()}}}"
    general = schedules(build(algorithm("privsgp"), f"privacy.schedule={lists}"))
    own = schedules(build(algorithm("dyn-d2p", rho_c=2.0, rho_mu=3.0)))
    for a, b in zip(general, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)  # the scale is solved to within 0.5 % of the budget


def test_short_lists_interpolate_and_one_number_is_constant(build):
    clip, sigma = schedules(build("privacy.schedule={clip_norms: [2.0, 1.0], noise: [4.0, 1.0, 0.5]}"))
    np.testing.assert_allclose(clip[:, 0], [2.0, 1.8, 1.6, 1.4, 1.2, 1.0])
    np.testing.assert_allclose(sigma[:, 0] / sigma[5, 0] * 0.5, [4.0, 2.8, 1.6, 0.9, 0.7, 0.5])
    flat = schedules(build("privacy.schedule={clip_norms: [1.0], noise: [7.0]}"))
    for a, b in zip(flat, schedules(build()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


@settings(max_examples=8)
@given(st.floats(1.0, 8.0), st.floats(1.0, 8.0), st.integers(1, 40), st.floats(0.5, 5.0))
def test_schedules_fall_as_they_should_and_keep_the_budget(build, rho_c, rho_mu, rounds, budget):
    name = algorithm("dyn-d2p", rho_c=rho_c, rho_mu=rho_mu, initial_clip=1.3)
    experiment = build(name, f"rounds={rounds}", f"privacy.epsilon={budget}", "n_peers=2")
    clip, sigma = schedules(experiment)
    share = np.arange(rounds)[:, None] / rounds
    np.testing.assert_allclose(clip, 1.3 * rho_c**-share * np.ones(2), rtol=1e-12)
    np.testing.assert_allclose(sigma, sigma[0] * (rho_c * rho_mu) ** -share, rtol=1e-12)
    for spent in experiment.own.protection.epsilons(rounds):
        assert 0.995 * budget <= spent <= budget


def test_less_noise_late_costs_more_noise_early(build):
    const, dynamic = (build(algorithm(name)).own.protection for name in ("const-d2p", "dyn-mu-d2p"))
    assert dynamic.noise_multiplier(0)[0] > const.noise_multiplier(0)[0] > dynamic.noise_multiplier(ROUNDS - 1)[0]


# --- refused ---


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ([algorithm("dyn-d2p", rho_c=0.5)], ("scenario.greater_than_equal", "algorithm.rho_c=0.5")),
        ([algorithm("dyn-mu-d2p", rho_mu=0.99)], ("scenario.greater_than_equal", "algorithm.rho_mu=0.99")),
        ([algorithm("dyn-c-d2p", rho_c=".inf")], ("scenario.finite_number", "algorithm.rho_c=inf")),
        ([algorithm("dyn-c-d2p", rho_mu=2.0)], ("scenario.extra_forbidden", "'algorithm.rho_mu'")),
        ([algorithm("const-d2p", rho_c=2.0)], ("scenario.extra_forbidden", "'algorithm.rho_c'")),
        ([algorithm("dyn-d2p", initial_clip=0.0)], ("scenario.not-positive", "initial_clip")),
        ([algorithm("dyn-d2p", initial_clip=[1.0, 2.0])], ("scenario.per-peer",)),
        ([algorithm("dyn-d2p"), "privacy.schedule={rho_c: 2.0}"], ("privacy.schedule", "dyn-d2p")),
        ([algorithm("dyn-d2p"), "rounds=0"], ("scenario.greater_than_equal", "rounds=0")),
        (["privacy.schedule={rho_c: 0.5}"], ("scenario.greater_than_equal", "privacy.schedule.rho_c=0.5")),
        (["privacy.schedule={noise: [1, 2, 3, 4, 5, 6, 7]}"], ("privacy.schedule",)),
        (["privacy.schedule={clip_norms: []}"], ("privacy.schedule", "clip_norms")),
        (["privacy.schedule={clip_norms: 2.0}"], ("scenario.list_type", "privacy.schedule.clip_norms=2.0")),
        (["privacy.schedule={noise: [1.0, -1.0]}"], ("scenario.greater_than", "privacy.schedule.noise.1=-1.0")),
        (["privacy.schedule={noise: [1.0], rho_c: 2.0}"], ("privacy.schedule", "rho_c")),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_line(build, given, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal) as refused:
        build(*given)
    assert "\n" not in str(refused.value)
