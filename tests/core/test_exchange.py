"""Exchanges: what each peer sends and makes of what it hears is what the engine's short cut does for all at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from exchanging import CrossGradient
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from salts import pin_salts
from tiny_scenario import Build
from torch import Tensor

from flower_privdec import testing
from flower_privdec.common.errors import ArgumentError, RunError
from flower_privdec.core import Edges, Exchange, Gather, Mix, Reply, State
from flower_privdec.core.exchange import Messages
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import build_participation
from flower_privdec.graph.topology import build_topology
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism.events import ONE_NEIGHBOUR
from flower_privdec.privacy.mechanism.protection import Protection

GRAPHS = {
    "directed-exponential": "column-stochastic",
    "star": "column-stochastic",
    "complete": "column-stochastic",
    "ring": "metropolis",
    "star, metropolis": "metropolis",
    "torus": "metropolis",
    "complete, metropolis": "metropolis",
    "server": "server",
}


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of algorithms of one's own be compared."""
    pin_salts(monkeypatch)


def mixing_of(name: str, n: int, fraction: float) -> Mixing:
    kind = "all" if fraction == 1 else "uniform"
    everybody = build_participation(kind, n, 3, fraction=None if fraction == 1 else fraction)
    return Mixing(build_topology(name.split(",")[0], n, seed=1), GRAPHS[name], everybody)


def state_of(peers: np.ndarray, rows: dict[str, Tensor], k: int) -> State:
    return State(peers, k, 0, {name: value[torch.from_numpy(peers)].clone() for name, value in rows.items()})


def split(n: int, cuts: list[int]) -> list[np.ndarray]:
    """Return the peers of some cohorts that together host everybody."""
    order = np.random.default_rng(sum(cuts)).permutation(n)
    ends = sorted({0, *(cut % n for cut in cuts), n})
    return [np.sort(order[a:b]) for a, b in pairwise(ends)]


def deliver(exchange: Exchange, states: list[State], mixing: Mixing) -> None:
    """Carry every message from the cohort that sends it to the one that waits for it, and to no other."""
    sent: dict = {}
    for state in states:
        outgoing = exchange.outgoing(state, mixing)
        assert {sender for sender, _ in outgoing} <= set(state.peers.tolist())
        assert not sent.keys() & outgoing.keys()
        sent |= outgoing
    awaited = [link for state in states for link in exchange.awaited(state, mixing)]
    assert sorted(awaited) == sorted(sent)  # nothing is sent that nobody waits for
    for state in states:
        own: Messages = {link: sent[link] for link in exchange.awaited(state, mixing)}
        exchange.incoming(state, mixing, own).apply_(state)


@pytest.mark.parametrize("graph", GRAPHS)
@given(
    n=st.integers(2, 9),
    k=st.integers(0, 5),
    fraction=st.sampled_from([1.0, 0.6]),
    cuts=st.lists(st.integers(0, 20), max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=25)
def test_messages_do_what_the_short_cut_does(
    graph: str, n: int, k: int, fraction: float, cuts: list[int], dtype: torch.dtype
) -> None:
    n = 4 if graph == "torus" else max(n, 4)  # so that more than one is active
    mixing = mixing_of(graph, n, fraction)
    generator = torch.Generator().manual_seed(n * 100 + k)
    rows = {
        "x": torch.randn(n, 33, generator=generator, dtype=dtype),
        "w": torch.rand(n, generator=generator, dtype=dtype),
    }
    everybody = np.arange(n)
    for exchange in (Mix(("x", "w")), Gather(("x", "w"))):
        whole = state_of(everybody, rows, k)
        exchange.together(whole, mixing, {}).apply_(whole)
        parts = [state_of(peers, rows, k) for peers in split(n, cuts)]
        deliver(exchange, parts, mixing)
        assert all(part.at == 1 for part in parts)
        for part in parts:
            for row, peer in enumerate(part.peers.tolist()):
                for name, value in part.rows.items():
                    torch.testing.assert_close(value[row], whole.rows[name][peer])
                for name, edges in part.edges.items():
                    assert_same(edges.of(peer), whole.edges[name].of(peer))


def assert_same(one: Edges, other: Edges) -> None:
    assert np.array_equal(one.own, other.own)
    assert np.array_equal(one.other, other.other)
    assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("graph", ["star", "ring", "directed-exponential", "complete"])
@given(n=st.integers(4, 9), cuts=st.lists(st.integers(0, 20), max_size=9), k=st.integers(0, 3))
@settings(max_examples=15)
def test_an_answer_comes_from_each_whom_one_sent_to(graph: str, n: int, cuts: list[int], k: int) -> None:
    mixing = mixing_of(graph, n, 1.0)
    ids = {"x": torch.arange(n, dtype=torch.float64)[:, None]}
    for hosts in ([np.arange(n)], split(n, cuts)):
        states = [state_of(peers, ids, k) for peers in hosts]
        for exchange in (Gather(("x",)), Reply(("x",))):
            if len(hosts) == 1:
                exchange.together(states[0], mixing, {}).apply_(states[0])
            else:
                deliver(exchange, states, mixing)
            if isinstance(exchange, Gather):
                for state in states:  # what i makes for j: 100 i + j
                    edges = state.edges["x"]
                    assert torch.equal(edges.values[:, 0], torch.from_numpy(edges.other).double())
                    values = torch.from_numpy(100 * edges.own + edges.other).double()[:, None]
                    state.edges["x"] = Edges(edges.own, edges.other, values)
        for state in states:
            edges = state.edges["x"]
            out = {tuple(link) for link in mixing.links(k).tolist() if link[0] in state.peers}
            assert {(int(a), int(b)) for a, b in zip(edges.own, edges.other, strict=True)} == out
            assert torch.equal(edges.values[:, 0], torch.from_numpy(100 * edges.other + edges.own).double())


def test_only_the_sender_decides_its_split() -> None:
    """Column-stochastic shares add up to the row, whatever the receivers are told."""
    mixing = mixing_of("star", 5, 1.0)
    rows = {"x": torch.randn(5, 7, dtype=torch.float64)}
    for peer in range(5):
        state = state_of(np.array([peer]), rows, 0)
        sent = Mix(("x",)).outgoing(state, mixing)
        kept = float(mixing.matrix(0).dense()[peer, peer])
        total = kept * state.rows["x"][0] + sum(payload["x"] for payload in sent.values())
        torch.testing.assert_close(total, rows["x"][peer])
        assert len({id(payload) for payload in sent.values()}) == 1  # all receivers get the same


def test_an_exchange_changes_nothing_but_what_it_returns() -> None:
    mixing = mixing_of("star", 5, 1.0)
    rows = {"x": torch.randn(5, 7, dtype=torch.float64)}
    for exchange in (Mix(("x",)), Gather(("x",))):
        state = state_of(np.arange(5), rows, 0)
        messages = exchange.outgoing(state, mixing)
        for payload in messages.values():
            payload["x"].add_(0)  # theirs to read
        exchange.incoming(state, mixing, messages)
        assert torch.equal(state.rows["x"], rows["x"])
        assert not state.edges
        for payload in messages.values():
            payload["x"].fill_(7.0)  # no message is a view of the state
        assert torch.equal(state.rows["x"], rows["x"])


def spoil(messages: dict, link: tuple[int, int], how: str) -> dict:
    row = messages[link]["x"]
    changed = {
        "missing": None,
        "nameless": {},
        "short": {"x": row[:-1]},
        "single": {"x": row.float()},
        "nan": {"x": row * torch.nan},
        "infinite": {"x": row + torch.inf},
    }[how]
    return {key: value for key, value in (messages | {link: changed}).items() if value is not None}


@pytest.mark.parametrize(
    ("how", "code", "names"),
    [
        ("missing", "exchange.missing", "peer 0, round 0: .*peer 3"),
        ("nameless", "exchange.row-missing", "peer 0, round 0: 'x' of peer 3"),
        ("short", "exchange.shape", r"peer 0, round 0: 'x' of peer 3 .*\[6\] torch.float64, .*\[7\] torch.float64"),
        ("single", "exchange.shape", r"'x' of peer 3 .*\[7\] torch.float32, .*\[7\] torch.float64"),
        ("nan", "exchange.not-finite", "'x' of peer 3"),
        ("infinite", "exchange.not-finite", "'x' of peer 3"),
    ],
)
@pytest.mark.parametrize("exchange", [Mix(("x",)), Gather(("x",))], ids=["mix", "gather"])
def test_wrong_messages_are_refused_and_change_nothing(exchange: Exchange, how: str, code: str, names: str) -> None:
    mixing = mixing_of("star", 5, 1.0)
    rows = {"x": torch.randn(5, 7, dtype=torch.float64)}
    everybody = state_of(np.arange(5), rows, 0)
    state = state_of(np.array([0]), rows, 0)
    messages = {link: dict(row) for link, row in exchange.outgoing(everybody, mixing).items() if link[1] == 0}
    with raises(RunError, code, names=names):
        exchange.incoming(state, mixing, spoil(messages, (3, 0), how))
    assert torch.equal(state.rows["x"], rows["x"][:1])
    assert state.at == 0


# --- an algorithm that gathers and replies, in every runtime ---


def reference(experiment: Experiment, rounds: int) -> Tensor:
    """Return the models after some rounds, by loops over peers and neighbours."""
    cohort = experiment.cohort()
    x = experiment.algorithm.initial(cohort)["x"]
    for k in range(rounds):
        cohort.add_step_(x, x, k)
        links, before = experiment.mixing.links(k), x.clone()  # type: ignore[union-attr]
        for i in range(len(x)):
            out = np.sort(links[links[:, 0] == i, 1])
            weights = 1.0 + out
            said = sum(w * (before[i] - before[j]) for w, j in zip(weights, out.tolist(), strict=True))
            x[i] -= 0.3 * said / weights.sum()
    return x


CROSS = "algorithm={module: exchanging:CrossGradient, learning_rate: 0.5}"
STARS = ["topology.name=star", "n_peers=5", "rounds=4", "data.samples=250"]


@pytest.fixture
def courteous(build: Build) -> Experiment:
    """Return an experiment whose peers have unequal numbers of neighbours."""
    return build(*STARS, "algorithm={module: exchanging:Courteous, learning_rate: 0.5}")


def test_a_gathering_algorithm_follows_its_reference(courteous: Experiment) -> None:
    x = testing.run_rounds(courteous, 4).state.rows["x"]
    torch.testing.assert_close(x, reference(courteous, 4), rtol=1e-11, atol=1e-13)
    testing.assert_sensitivity(courteous, 4)
    testing.assert_nothing_else_leaves(courteous)


def test_edges_are_read_back_from_a_checkpoint(courteous: Experiment, tmp_path: Path) -> None:
    state = courteous.initial_state(courteous.cohort())
    mixing = courteous.mixing
    assert mixing is not None
    Gather(("x",)).together(state, mixing, {}).apply_(state)
    save_checkpoint(tmp_path / "c", Checkpoint(state, "hash", courteous.own.run, transport={"sent": 2**40}))
    found = load_checkpoint(tmp_path / "c", "hash", courteous.own.run, courteous.device)
    assert found.transport == {"sent": 2**40}
    back = found.state
    assert (back.round_index, back.at, list(back.rows)) == (0, 1, ["x"])
    assert_same(back.edges["x"], state.edges["x"])


@pytest.mark.parametrize("nodes", [5, 2])
def test_a_gathering_algorithm_is_the_same_in_relay(courteous: Experiment, tmp_path: Path, nodes: int) -> None:
    pytest.importorskip("flwr")
    from flower_privdec.flower.apps.client_app import client_app
    from flower_privdec.flower.apps.server_app import Relay
    from flower_privdec.flower.launch.local_grid import LocalGrid

    relay = Relay(courteous.scenario, tmp_path / "run")
    relay.start(LocalGrid(client_app(), nodes))
    expected = testing.run_rounds(courteous, 4).state.rows["x"]
    torch.testing.assert_close(relay.state.rows["x"], expected, rtol=1e-11, atol=1e-13)


# --- something of one's own for each neighbour: cross-gradients, taken at what each sent ---


@pytest.fixture
def crossing(build: Build) -> Experiment:
    """Return an experiment whose peers answer each neighbour with a release of its own."""
    return build(*STARS, CROSS)


def test_releases_for_a_neighbour_each_keep_all_laws(crossing: Experiment) -> None:
    testing.assert_sensitivity(crossing, 4, peer=0)
    testing.assert_sensitivity(crossing, 4, peer=1)
    testing.assert_noise(crossing, 4)
    testing.assert_nothing_else_leaves(crossing)


def test_each_neighbour_costs(crossing: Experiment, build: Build) -> None:
    """The hub of a star answers four, and each of those one: the same ε needs twice the noise of it."""
    plan = protection(crossing)
    joint = [account.spends[0].release.noise_multiplier for account in plan.accounts]
    np.testing.assert_allclose(joint, joint[0], rtol=0.01)  # what colluding neighbours see together costs the same
    np.testing.assert_allclose(plan.noise_multiplier(0)[0], 2 * plan.noise_multiplier(0)[1:], rtol=0.01)
    assert plan.receivers["gradient"].tolist() == [[4, 1, 1, 1, 1]] * 4


def test_replies_to_one_neighbour_tell_less_than_all_together(crossing: Experiment) -> None:
    plan = protection(crossing)
    total, replies = plan.epsilons(4), plan.epsilons(4, ONE_NEIGHBOUR)
    assert replies[0] < 0.5 * total[0]
    np.testing.assert_allclose(replies[1:], total[1:], rtol=1e-12)
    releases = plan.accounts[0].releases(0, 4)
    alone = [replace(each, noise_multiplier=2 * each.noise_multiplier) for each in releases]
    assert replies[0] == pytest.approx(epsilon(alone, 1e-3), rel=1e-9)


def test_neighbours_are_counted_round_by_round(build: Build) -> None:
    """On a graph drawn anew each round, and with some peers absent, each round costs what is then answered."""
    graph = "topology={name: random-edges, edges: 3, supergraph: complete}"
    for more in ([graph], ["topology.name=complete", "participation={kind: uniform, fraction: 0.6}"]):
        experiment = build(*STARS[1:], *more, CROSS)
        plan, mixing = protection(experiment), experiment.mixing
        assert mixing is not None
        for k in range(4):
            heard = np.bincount(mixing.links(k)[:, 1], minlength=5)
            np.testing.assert_array_equal(plan.receivers["gradient"][k], heard)
        assert np.ptp(plan.receivers["gradient"], axis=0).max() > 0
        testing.assert_noise(experiment, 4)
        for account in plan.accounts:
            assert {each.steps for each in account.releases(0, 4)}
        assert max(plan.epsilons(4)) <= 3.0


def test_a_release_for_more_neighbours_than_declared_is_refused(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setattr(CrossGradient, "untold", 1)
    with raises(ArgumentError, "release.neighbours", "'gradient'"):
        testing.run_rounds(build(*STARS[1:], "topology.name=ring", CROSS), 1)


def protection(experiment: Experiment) -> Protection:
    assert experiment.own.protection is not None
    return experiment.own.protection


@pytest.mark.parametrize("nodes", [5, 2])
def test_releases_for_each_neighbour_agree_in_relay(crossing: Experiment, tmp_path: Path, nodes: int) -> None:
    pytest.importorskip("flwr")
    from flower_privdec.flower.apps.client_app import client_app
    from flower_privdec.flower.apps.server_app import Relay
    from flower_privdec.flower.launch.local_grid import LocalGrid

    relay = Relay(crossing.scenario, tmp_path / "run")
    relay.start(LocalGrid(client_app(), nodes))
    expected = testing.run_rounds(crossing, 4).state.rows["x"]
    torch.testing.assert_close(relay.state.rows["x"], expected, rtol=1e-11, atol=1e-13)
