"""A(DP)²SGD: one peer at an event, pairs that average, gradients of stale models, and who pays for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_references import NoiseTape, softmax_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.algorithms.adp2_sgd import Waking
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine

PEERS, EVENTS = 4, 30


def asynchronous(build, *more, staleness=None, graph="ring"):
    stale = "" if staleness is None else f", staleness: {staleness}"
    algorithm = f"algorithm={{name: adp2-sgd, learning_rate: 0.5{stale}}}"
    return build(algorithm, f"topology={{name: {graph}}}", f"rounds={EVENTS}", *more)


class Watched:
    """A kernel that keeps the models gradients were taken at."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.padding = kernel.padding
        self.points = []

    def add_clipped_(self, out, params, *rest):
        self.points.append(params.clone())
        return self.kernel.add_clipped_(out, params, *rest)


class Tape(NoiseTape):
    """Noise that can be replayed, and who asked for it."""

    def __init__(self, dimension):
        super().__init__(dimension)
        self.asked = []

    def add_(self, out, std, round_index, peers, purpose="noise", receivers=None):
        self.asked.append((round_index, list(map(int, peers))))
        super().add_(out, std, round_index, peers, purpose)


def watched_run(experiment):
    """Return the models before every event and after the last, what gradients were taken at, and the noise."""
    cohort = experiment.cohort()
    cohort.noise, cohort.kernel = Tape(650), Watched(cohort.kernel)
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    models = [engine.state.rows["x"].clone()]
    for _ in range(experiment.scenario.rounds):
        engine.round()
        models.append(engine.state.rows["x"].clone())
    return torch.stack(models), torch.cat(cohort.kernel.points), cohort.noise


def wakes(experiment):
    return [int(np.flatnonzero(experiment.participation.active(k))[0]) for k in range(experiment.scenario.rounds)]


def reference(experiment, tape, staleness):
    """AD-PSGD's loop as its pseudocode reads, with a clipped and noised gradient, in NumPy."""
    x = np.tile(experiment.initial.numpy(), (PEERS, 1))
    stale, read = x.copy(), np.zeros(PEERS)
    features = experiment.own.examples.x.double().numpy().reshape(-1, 64)
    labels = experiment.own.examples.y.numpy()
    for k, i in enumerate(wakes(experiment)):
        late = k - read > staleness
        stale[late], read[late] = x[late], k
        drawn = experiment.own.sampler.batch(k, [i])
        rows = experiment.own.examples.parts[i][drawn.index[0][drawn.weight[0] > 0]]
        g = softmax_gradients(features[rows], stale[i, :640].reshape(10, 64), stale[i, 640:], labels[rows])
        g *= np.minimum(1, 1 / np.linalg.norm(g, axis=1, keepdims=True))
        noise = -experiment.own.protection.noise_multiplier(k)[i] * tape.draw(k, i)
        (j,) = {int(peer) for peer in experiment.mixing.links(k).ravel()} - {i}
        x[[i, j]] = (x[i] + x[j]) / 2
        x[i] -= 0.5 * (g.sum(0) + noise) / 12
        stale[i], read[i] = x[i], k
    return x


@pytest.mark.parametrize("staleness", [2, None])
def test_it_follows_its_reference(build, staleness):
    experiment = asynchronous(build, staleness=staleness)
    models, _, tape = watched_run(experiment)
    x = reference(experiment, tape, staleness or 4 * PEERS)
    np.testing.assert_allclose(models[-1].numpy(), x, rtol=1e-9, atol=1e-11)


def test_one_peer_steps_and_one_pair_averages_per_event(build):
    experiment = asynchronous(build)
    models, points, tape = watched_run(experiment)
    assert len(points) == EVENTS
    for k, i in enumerate(wakes(experiment)):
        edges = experiment.mixing.links(k)
        (j,) = {int(peer) for peer in edges.ravel()} - {i}
        assert sorted(map(tuple, edges.tolist())) == sorted([(i, j), (j, i)])
        assert abs(i - j) in (1, PEERS - 1)  # neighbours on the ring
        average, others = (models[k, i] + models[k, j]) / 2, [p for p in range(PEERS) if p not in (i, j)]
        assert torch.equal(models[k + 1, others], models[k, others])
        torch.testing.assert_close(models[k + 1, j], average, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(models[k + 1, i], average, atol=1e-6)
    assert tape.asked == [(k, [i]) for k, i in enumerate(wakes(experiment))]


@settings(max_examples=10)
@given(st.integers(1, 12), st.integers(0, 99))
def test_gradients_are_never_older_than_the_staleness(build, staleness, seed):
    experiment = asynchronous(build, f"seed={seed}", "privacy=none", staleness=staleness)
    models, points, _ = watched_run(experiment)
    ages, last = [], {}
    for k, i in enumerate(wakes(experiment)):
        (events,) = np.nonzero((models[: k + 1, i] == points[k]).all(1).numpy())
        assert len(events)  # it was this peer's model at some time
        ages.append(k - int(events.max()))
        assert ages[-1] <= staleness
        if k - last.get(i, 0) > staleness:  # not its last event's, but one read again since
            assert int(events.max()) > last.get(i, 0) + 1
        last[i] = k
    assert max(ages) > 0


@pytest.mark.parametrize("graph", ["ring", "complete", "random-edges, edges: 1", "erdos-renyi, probability: 0.7"])
def test_averaging_conserves_the_mean(build, graph):
    experiment = asynchronous(build, "privacy=none", "algorithm.learning_rate=1e-300", graph=graph)
    cohort = experiment.cohort()
    state = experiment.initial_state(cohort)
    state.rows["x"] = torch.from_numpy(np.random.default_rng(1).normal(size=(PEERS, 650)))
    start, spread = state.rows["x"].mean(0), state.rows["x"].std(0).norm()
    engine = Engine(experiment.algorithm, cohort, state)
    for _ in range(EVENTS):
        engine.round()
    torch.testing.assert_close(engine.state.rows["x"].mean(0), start, rtol=1e-12, atol=1e-13)
    assert engine.state.rows["x"].std(0).norm() < 0.7 * spread


def test_a_peer_without_an_awake_neighbour_steps_by_itself(build):
    experiment = asynchronous(build, graph="random-edges, edges: 1")
    models, _, _ = watched_run(experiment)
    alone = [k for k in range(EVENTS) if not len(experiment.mixing.links(k))]
    assert len(alone) > 5
    for k in alone:
        moved = (models[k + 1] != models[k]).any(1).numpy()
        np.testing.assert_array_equal(moved, experiment.participation.active(k))


def test_a_peer_pays_only_when_it_wakes(build):
    experiment = asynchronous(build, "privacy.epsilon=[0.5, 1.0, 2.0, 3.0]")
    woken = np.array(wakes(experiment))
    for peer, (account, spent) in enumerate(
        zip(experiment.own.protection.accounts, experiment.own.protection.epsilons(EVENTS), strict=True)
    ):
        paid = {k for spend in account.spends for k in range(spend.from_step, spend.to_step)}
        assert paid == set(np.flatnonzero(woken == peer).tolist())
        assert 0.995 * account.budget <= spent <= account.budget
    everybody = build("algorithm={name: dp2-sgd, learning_rate: 0.5}", "topology.name=ring", f"rounds={EVENTS}")
    seldom = asynchronous(build)
    assert seldom.own.protection.noise_multiplier(0).max() < everybody.own.protection.noise_multiplier(0).min()


def test_a_sleeping_peer_pays_nothing_and_keeps_its_model(build):
    experiment = asynchronous(build, "rounds=2")
    asleep = sorted(set(range(PEERS)) - set(wakes(experiment)))
    assert asleep
    assert all(experiment.own.protection.accounts[peer].spends == () for peer in asleep)
    assert [experiment.own.protection.epsilons(2)[peer] for peer in asleep] == [0.0] * len(asleep)


def test_the_order_of_events_is_the_seeds_and_even():
    waking = Waking(5, seed=9)
    order = [waking.peer(k) for k in range(4000)]
    assert order == [Waking(5, seed=9).peer(k) for k in range(4000)]
    assert order != [Waking(5, seed=10).peer(k) for k in range(4000)]
    assert np.abs(np.bincount(order) - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)
    assert all(replace(waking).active(k).sum() == 1 for k in range(20))


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["topology={name: directed-ring}"], ("mixing.directed", "directed-ring")),
        (["topology={name: server}"], ("mixing.directed",)),
        (["participation={kind: uniform, fraction: 0.5}"], ("mixing.directed",)),
        (["algorithm.staleness=0"], ("scenario.greater_than_equal", "algorithm.staleness=0")),
    ],
)
def test_wrong_settings_are_refused_in_one_line(build, settings, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal) as refused:
        asynchronous(build, *settings)
    assert "\n" not in str(refused.value)
