"""PDSL and CGA: reference trajectories in plain NumPy, their games and projections, and what is refused."""

from __future__ import annotations

import html
import json
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_references import softmax_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_kernel import build_kernel
from raising import raises
from scipy.optimize import minimize
from tiny_scenario import Build

from flower_privdec import testing
from flower_privdec.algorithms.cga import agreeable
from flower_privdec.algorithms.pdsl import PDSL
from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.core.validation import Validation
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Experiment
from flower_privdec.models import build_model, flatten
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.mechanism.events import ONE_NEIGHBOUR
from flower_privdec.reporting.console import plan_text
from flower_privdec.tasks.losses import resolve_loss

PUBLIC = ["data.test_samples=60", "data.validation=40"]
PDSL_STAR = ["algorithm={name: pdsl, learning_rate: 0.3}", "topology.name=star", *PUBLIC]
CGA_STAR = ["algorithm={name: dp-cga, learning_rate: 0.3}", "topology.name=star"]
ROUNDS = 4


class Tape:
    """Noise that a reference can replay: a fixed normal vector for each round, peer and receiver."""

    @staticmethod
    def draw(step: int, peer: int, receiver: int) -> np.ndarray:
        return np.random.default_rng([step, peer, receiver]).standard_normal(650)

    def add_(self, out, std, step, peers, purpose="noise", receivers=None):  # type: ignore[no-untyped-def]
        for row, (peer, receiver) in enumerate(zip(peers.tolist(), receivers.tolist(), strict=True)):
            out[row] += std[row] * torch.from_numpy(self.draw(step, peer, receiver))


def taped(experiment: Experiment, rounds: int = ROUNDS) -> Engine:
    cohort = experiment.cohort()
    cohort.noise = Tape()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine


# --- references ---


def cross_gradient(experiment: Experiment, k: int, j: int, i: int, z: np.ndarray) -> np.ndarray:
    """Return ĝ_ji: of peer j's batch of round k at peer i's model z, clipped to 1 example by example, noised."""
    batch = experiment.own.sampler.batch(k, [j])
    rows = experiment.own.examples.parts[j][batch.index[0][batch.weight[0] > 0]]
    features = experiment.own.examples.x.double().numpy().reshape(240, -1)
    g = softmax_gradients(features[rows], z[:640].reshape(10, 64), z[640:], experiment.own.examples.y.numpy()[rows])
    g *= np.minimum(1, 1 / np.linalg.norm(g, axis=1, keepdims=True))
    return (g.sum(0) + experiment.own.protection.noise_multiplier(k)[j] * Tape.draw(k, j, i)) / 12


def star_weights(n: int = 4) -> np.ndarray:
    """Return Metropolis weights of a star about peer 0: 1/n along each edge, the rest to oneself."""
    w = np.eye(n) * (1 - 1 / n)
    w[0], w[:, 0] = 1 / n, 1 / n
    return w


def reference_pdsl(experiment: Experiment, rounds: int, rate: float, alpha: float) -> tuple[np.ndarray, list]:
    """PDSL (Alg. 1) as its pseudocode reads, by loops, with the Shapley values of eq. 7 over all permutations."""
    w, n, told = star_weights(), 4, []
    features = experiment.public.validation.x.double().numpy().reshape(40, -1)
    labels = experiment.public.validation.y.numpy()
    x, u = np.tile(experiment.initial.numpy(), (n, 1)), np.zeros((n, 650))

    def worth(models: list[np.ndarray]) -> Fraction:
        if not models:
            return Fraction(0)
        z = np.mean(models, axis=0)
        hits = np.argmax(features @ z[:640].reshape(10, 64).T + z[640:], axis=1) == labels
        return Fraction(int(hits.sum()), len(labels))

    for k in range(rounds):
        u_hat, x_hat, values = np.empty_like(u), np.empty_like(x), {}
        for i in range(n):
            members = [j for j in range(n) if w[i, j] > 0]
            g = {j: cross_gradient(experiment, k, j, i, x[i]) for j in members}
            candidate = {j: x[i] - rate * g[j] for j in members}
            phi = dict.fromkeys(members, Fraction(0))
            orders = list(permutations(members))
            for order in orders:
                for place, j in enumerate(order):
                    before = [candidate[m] for m in order[:place]]
                    phi[j] += (worth([*before, candidate[j]]) - worth(before)) / len(orders)
            low, high = min(phi.values()), max(phi.values())
            hat = {j: float((phi[j] - low) / (high - low)) if high > low else 1.0 for j in members}
            pi = {j: hat[j] / (w[i, j] * sum(hat.values())) for j in members}
            u_hat[i] = alpha * u[i] + sum(pi[j] * g[j] for j in members)
            x_hat[i] = x[i] - rate * u_hat[i]
            values[i] = {j: float(value) for j, value in phi.items()}
        x, u = w @ x_hat, w @ u_hat
        told.append(values)
    return x, told


def test_pdsl_follows_the_numpy_reference(build: Build) -> None:
    experiment = build(*PDSL_STAR)
    engine = taped(experiment)
    x, told = reference_pdsl(experiment, ROUNDS, 0.3, 0.5)
    assert np.abs(x - experiment.initial.numpy()).max() > 1e-2
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
    assert max(np.ptp(list(phi.values())) for phi in told[-1].values()) > 0.01
    for row, phi in told[-1].items():  # rounds 2 and 3 are at hand: the metrics have a line every 2
        found = engine.state.rows["shapley"][row, 1, : len(phi)].numpy()
        np.testing.assert_allclose(found, [phi[j] for j in sorted(phi)], atol=1e-12)
    assert engine.state.rows["evaluations"].tolist() == [ROUNDS * 15, *[ROUNDS * 3] * 3]


def test_cga_follows_the_numpy_reference(build: Build) -> None:
    """CGA by loops, its program solved by a general solver."""
    experiment, w, rate, beta = build(*CGA_STAR), star_weights(), 0.3, 0.5
    engine = taped(experiment)
    x, v = np.tile(experiment.initial.numpy(), (4, 1)), np.zeros((4, 650))
    opposed = 0
    for k in range(ROUNDS):
        after = w @ x
        for i in range(4):
            members = [j for j in range(4) if w[i, j] > 0]
            g = np.stack([cross_gradient(experiment, k, j, i, x[i]) for j in members])
            opposed += bool((g @ g[members.index(i)] < 0).any())
            v[i] = beta * v[i] - rate * projected(g, members.index(i))
            after[i] += v[i]
        x = after
    assert opposed > 3  # the program has something to do
    assert np.abs(x - experiment.initial.numpy()).max() > 1e-2
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-5, atol=1e-6)


def projected(g: np.ndarray, own: int) -> np.ndarray:
    """Return the z nearest to g[own] that no row of g opposes, by its dual."""
    gram = g @ g.T
    found = minimize(
        lambda u: 0.5 * u @ gram @ u + gram[own] @ u,
        np.zeros(len(g)),
        jac=lambda u: gram @ u + gram[own],
        bounds=[(0, None)] * len(g),
        method="L-BFGS-B",
        options={"ftol": 1e-18, "gtol": 1e-14, "maxiter": 10_000},
    )
    return g[own] + found.x @ g


# --- the program of CGA ---


@given(n=st.integers(1, 8), d=st.integers(1, 12), seed=st.integers(0, 10**6), degenerate=st.booleans())
@settings(max_examples=80)
def test_no_gradient_opposes_the_direction_and_it_is_nearest(n: int, d: int, seed: int, degenerate: bool) -> None:
    random = np.random.default_rng(seed)
    g = random.normal(size=(n, d)) * 10.0 ** random.integers(-6, 7)
    if degenerate:
        g[-1], g[n // 2] = -2 * g[0], 0
    own = int(random.integers(n))
    multipliers = agreeable(torch.from_numpy(g), own)
    z, size = multipliers @ g, np.abs(g).max() or 1.0
    assert (multipliers >= 0).all()
    assert (g @ z >= -1e-7 * size**2).all()
    if (g @ g[own] >= 0).all():
        np.testing.assert_allclose(z, g[own], atol=1e-7 * size)
    for _ in range(10):  # any other feasible point is as far at least: projections are unique
        other = np.maximum(random.normal(size=n), 0) @ g
        if (g @ other >= 0).all():
            assert np.linalg.norm(z - g[own]) <= np.linalg.norm(other - g[own]) + 1e-6 * size


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e25, 1e-30])
def test_gradients_of_any_size_have_a_direction(value: float) -> None:
    g = torch.tensor([[value, value], [0.0, -value]], dtype=torch.float32)
    usual = np.isfinite(value) and value != 0
    expected = agreeable(torch.tensor([[1.0, 1.0], [0.0, -1.0]]), 0) if usual else [1.0, 0.0]
    np.testing.assert_allclose(agreeable(g, 0), expected, rtol=1e-6)


# --- what coalitions are worth ---

MODELS = {"softmax": {}, "mlp": {"hidden": [7]}, "cnn-small": {}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["auto", "loop"])
def test_blended_models_predict_like_blended_parameters(name: str, kind: str) -> None:
    module = build_model(name, [1, 8, 8], 10, seed=1, **MODELS[name]).double()
    kernel = build_kernel(module, "cross-entropy", [1, 8, 8], kind=kind)
    generator = torch.Generator().manual_seed(0)
    members = flatten(module) + 0.3 * torch.randn(5, kernel.d, generator=generator, dtype=torch.float64)
    weights = torch.rand(9, 5, generator=generator, dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    x = torch.rand(13, 1, 8, 8, generator=generator, dtype=torch.float64)
    expected = kernel.logits(weights @ members, x)
    torch.testing.assert_close(kernel.blended_logits(members, weights, x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_model_that_is_not_finite_is_worth_nothing(value: float) -> None:
    module = build_model("mlp", [1, 4, 4], 3, seed=1, hidden=[5]).double()
    kernel = build_kernel(module, "cross-entropy", [1, 4, 4])
    generator = torch.Generator().manual_seed(0)
    validation = Validation(
        torch.rand(30, 1, 4, 4, generator=generator, dtype=torch.float64),
        torch.zeros(30).long(),
        resolve_loss("cross-entropy"),
    )
    members = flatten(module).expand(3, -1).clone()
    coalitions = np.array([[True, False, False], [True, True, False], [False, True, False], [True, False, True]])
    before = validation.hits(kernel, members, coalitions)
    members[1] = value
    found = validation.hits(kernel, members, coalitions)
    np.testing.assert_array_equal(found[[0, 3]], before[[0, 3]])
    np.testing.assert_array_equal(found[[1, 2]], 0)
    assert before.max() > 0 or (validation.y == 0).all()


# --- what it tells ---


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_round_is_reported_and_a_resumed_run_agrees(build: Build, tmp_path: Path) -> None:
    experiment = build(*PDSL_STAR, "rounds=5")
    summary = run(experiment, tmp_path / "whole")
    lines = lines_of(tmp_path / "whole")
    assert [list(line["shapley"]) for line in lines] == [["1", "2"], ["3", "4"], ["5"]]
    for line in lines:
        for told in line["shapley"].values():
            assert {int(peer): [int(j) for j in told[peer]] for peer in told} == {
                0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 2], 3: [0, 3],
            }  # fmt: skip
    assert summary["coalition_evaluations"] == 5 * (15 + 3 * 3) == lines[-1]["coalition_evaluations"]
    assert 0 < summary["coalition_share_of_wall_time"] < 1
    broken = Run(build(*PDSL_STAR, "rounds=5"), tmp_path / "cut")
    broken.advance()
    broken.close()
    again = run(build(*PDSL_STAR, "rounds=5"), tmp_path / "cut", resume=True)
    assert again["coalition_evaluations"] == summary["coalition_evaluations"]
    told = ("shapley", "coalition_evaluations", "loss")
    assert [[line[key] for key in told] for line in lines_of(tmp_path / "cut")] == [
        [line[key] for key in told] for line in lines
    ]


def test_a_run_evaluated_once_reports_all_rounds(build: Build, tmp_path: Path) -> None:
    run(build(*PDSL_STAR, "rounds=3", "evaluation.every=1000000000"), tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert list(line["shapley"]) == ["1", "2", "3"]
    assert all(len(set(told["0"].values())) > 1 for told in line["shapley"].values())


def test_a_spent_neighbour_answers_zero_and_others_continue(build: Build, tmp_path: Path) -> None:
    """The hub's budget allows fewer rounds than the leaves' at the same noise."""
    given = "privacy={epsilon: 3.0, delta: 1.0e-3, noise_multiplier: 1.5}"
    experiment = build(*PDSL_STAR, given)
    plan = experiment.own.protection
    assert plan is not None
    ends = [account.spends[-1].to_step for account in plan.accounts]
    assert ends == [2, 6, 6, 6]
    cohort = experiment.cohort(tmp_path / "ledger")
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    with testing.recording() as tape:
        for _ in range(6):
            engine.round()
    state = engine.state
    assert {peer for step in tape.steps if step.step >= ends[0] for peer in step.peers.tolist()} <= {1, 2, 3}
    assert torch.isfinite(state.rows["x"]).all()
    assert max(plan.epsilons(6)) <= 3.0


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_each_neighbours_contribution_is_drawn(build: Build, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flower_privdec.reporting.look import drawing
    from flower_privdec.reporting.page import write_report
    from flower_privdec.reporting.plots import draw_contributions, save_run_plots

    run(build(*PDSL_STAR, "rounds=3", "evaluation.every=1"), tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    with drawing():
        figure = draw_contributions(lines)
        assert draw_contributions([{"round": 1}]) is None
    assert figure is not None
    curves = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    told = [line["shapley"][str(line["round"])] for line in lines]
    np.testing.assert_allclose(curves["peer 2"].get_ydata(), [each["0"]["2"] for each in told])
    hub = [np.mean([each[i]["0"] for i in ("1", "2", "3")]) for each in told]
    np.testing.assert_allclose(curves["peer 0"].get_ydata(), hub)
    assert tmp_path / "run" / "plots" / "contributions.png" in save_run_plots(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "page.html")
    page = html.unescape((tmp_path / "page.html").read_text())
    assert "what each peer's gradients add" in page.lower()


def test_the_summary_tells_the_budget_and_the_replies_apart(build: Build, tmp_path: Path) -> None:
    summary = run(build(*PDSL_STAR), tmp_path / "run")
    plan = build(*PDSL_STAR).own.protection
    assert plan is not None
    for row, total, reply in zip(summary["privacy"], plan.epsilons(6), plan.epsilons(6, ONE_NEIGHBOUR), strict=True):
        assert row["epsilon"] == pytest.approx(total)
        assert row["epsilon_of_replies_to_one"] == pytest.approx(reply)
    peers = make_plan(build(*PDSL_STAR))["peers"]
    assert [row["epsilon_of_replies_to_one"] for row in peers] == pytest.approx(plan.epsilons(6, ONE_NEIGHBOUR))
    assert "ε of the replies to" in plan_text(make_plan(build(*PDSL_STAR)), verbose=True)  # the heading may wrap


def test_shapley_values_of_a_round_add_up(build: Build) -> None:
    monte_carlo = "algorithm={name: pdsl, learning_rate: 0.3, shapley: monte-carlo, permutations: 4}"
    for algorithm in (PDSL_STAR[0], monte_carlo):
        experiment = build(algorithm, *PDSL_STAR[1:])
        sums = taped(experiment, 2).state.rows["shapley"].sum(2).numpy()
        shares = sums * 40
        np.testing.assert_allclose(shares, np.round(shares), atol=1e-9)  # so many of 40 right
        assert (shares > 0).all()


def test_subsamples_change_each_round_and_permutations_by_peer(build: Build) -> None:
    seen: list[tuple[int, ...]] = []
    hits = Validation.hits

    def noted(self: Validation, kernel, models, coalitions):  # type: ignore[no-untyped-def]
        seen.append((len(self), int(self.x.double().sum() * 1e6)))
        return hits(self, kernel, models, coalitions)

    algorithm = "algorithm={name: pdsl, learning_rate: 0.3, validation_subsample: 10}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validation, "hits", noted)
        taped(build(algorithm, *PDSL_STAR[1:]), 3)
    assert {size for size, _ in seen} == {10}
    assert len(seen) == 12
    assert len({total for _, total in seen}) == 3  # one a round, for all peers


def test_validation_examples_follow_the_data_seed_and_test_nothing(build: Build) -> None:
    whole = build("data.test_samples=327", "data.validation=30")  # all there are
    held, tested = whole.public.validation, whole.public
    assert held is not None
    rows = {tuple(row) for row in held.x.reshape(30, -1).tolist()}
    assert len(held.y) == 30
    shared = sum(tuple(row) in rows for row in tested.x.reshape(len(tested.y), -1).tolist())
    assert shared == 0
    again, other = build(*PUBLIC).public.validation, build(*PUBLIC, "seeds={data: 9}").public.validation
    assert torch.equal(again.x, build(*PUBLIC, "seeds={run: 9}").public.validation.x)
    assert not torch.equal(again.x, other.x)


# --- what is refused ---

REFUSED = {
    "no validation set": (
        ["data={dataset: digits, batch: {sampling: poisson, size: 12}}"],
        ("pdsl.validation", "data.validation"),
    ),
    "too large": (["data.validation=5000"], ("data.validation", "data.validation=5000")),
    "more tests than there are": (["data.test_samples=400"], ("data.count", "data.test_samples=400")),
    "no room": (["data.test_samples=357"], ("data.validation", "data.validation=40")),
    "private": (["data.validation={from: train}"], ("data.validation-is-private",)),
    "directed": (["topology.name=directed-exponential"], ("mixing.not-symmetric",)),
    "directed ring": (["topology.name=directed-ring"], ("mixing.not-symmetric",)),
    "server": (["topology.name=server"], ("mixing.server",)),
    "push-sum weights": (["topology.weights=column-stochastic"], ("mixing.mean-not-kept",)),
    "no permutation": (
        ["algorithm={name: pdsl, learning_rate: 0.1, shapley: monte-carlo, permutations: 0}"],
        ("scenario.greater_than_equal",),
    ),
    "permutations of exact": (
        ["algorithm={name: pdsl, learning_rate: 0.1, permutations: 3}"],
        ("scenario.other-choice",),
    ),
    "no number of permutations": (
        ["algorithm={name: pdsl, learning_rate: 0.1, shapley: monte-carlo}"],
        ("scenario.incomplete",),
    ),
    "too many for exact": (["n_peers=13", "topology.name=complete"], ("pdsl.neighbourhood",)),
    "subsample": (
        ["algorithm={name: pdsl, learning_rate: 0.1, validation_subsample: 41}"],
        ("pdsl.subsample", "validation_subsample=41"),
    ),
    "noise that overflows": (
        ["privacy={noise_multiplier: 1e15, delta: 1e-3, clip_norm: 1e20}", "algorithm.learning_rate=1e-10"],
        ("experiment.range", "8.*e.33"),
    ),
    "no φ_min": (["privacy.calibration=paper"], ("privacy.phi-min", "privacy.paper.phi_min")),
    "φ_min of nothing": (["privacy.paper.phi_min=0.1"], ("privacy.phi-min", "privacy.paper.phi_min")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused_in_one_line(build: Build, case: str) -> None:
    given, refusal = REFUSED[case]
    with raises(PrivdecError, *refusal):
        build(*PDSL_STAR, *given)


def test_twelve_in_a_neighbourhood_are_exact(build: Build) -> None:
    experiment = build(*PDSL_STAR, "n_peers=12", "topology.name=complete")
    assert experiment.algorithm.section.shapley == "exact"


def test_shuffled_epochs_on_a_changing_graph_have_no_proof(build: Build) -> None:
    graph = "topology={name: random-edges, edges: 3, supergraph: complete}"
    with raises(ScenarioError, "privacy.sampling"):
        build(*PDSL_STAR, graph, "data.batch.sampling=shuffle")


# --- privacy ---


def test_the_papers_formula_is_a_claim_beside_exact_epsilon(build: Build) -> None:
    experiment = build(
        *PDSL_STAR,
        "topology.name=complete",
        "privacy={epsilon: 300.0, delta: 1e-3, calibration: paper, paper: {phi_min: 0.5}}",
    )
    plan, peers = make_plan(experiment), make_plan(experiment)["peers"]
    sigma = 2 * (4 + 4 * 4) * np.sqrt(2 * np.log(1.25 / 1e-3)) / (0.5 * 300 * np.sqrt(4 * 16))  # eq. 27, ω = 1/4
    np.testing.assert_allclose(experiment.own.protection.noise_multiplier(0), 12 * sigma)
    assert peers[0]["claimed_epsilon"] == 300
    assert 0.1 < peers[0]["epsilon"] < 300
    assert any("eq. 27 of PDSL is for one round, and there are 6" in warning for warning in plan["warnings"])


def test_the_budget_covers_own_gradient_and_all_replies(build: Build) -> None:
    """On a star: the hub releases four sums a round, a leaf two; each alone would cost less."""
    plan = build(*PDSL_STAR).own.protection
    assert plan is not None
    assert plan.receivers["gradient"][0].tolist() == [4, 2, 2, 2]
    np.testing.assert_allclose(plan.noise_multiplier(0)[0], np.sqrt(2) * plan.noise_multiplier(0)[1], rtol=0.01)
    for total, reply in zip(plan.epsilons(6), plan.epsilons(6, ONE_NEIGHBOUR), strict=True):
        assert 2.9 < total <= 3.0
        assert reply < 0.8 * total


def test_absent_peers_keep_what_they_have_and_cost_nothing(build: Build) -> None:
    experiment = build(*PDSL_STAR, "topology.name=complete", "participation={kind: uniform, fraction: 0.5}")
    cohort = experiment.cohort()
    state = experiment.initial_state(cohort)
    before = state.rows["x"].clone()
    Engine(experiment.algorithm, cohort, state).round()
    moved = (state.rows["x"] != before).any(1).numpy()
    np.testing.assert_array_equal(moved, experiment.participation.active(0))
    told = PDSL.extra_metrics(experiment.algorithm, state.rows, range(1), experiment.mixing)["shapley"]["1"]
    active = np.flatnonzero(experiment.participation.active(0)).tolist()
    assert {int(i): [int(j) for j in phi] for i, phi in told.items()} == dict.fromkeys(active, active)
