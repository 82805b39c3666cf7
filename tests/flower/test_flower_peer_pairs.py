"""Noise that cancels between the peers of a Flower app: less in the mean at the same ε, whoever fails or lies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from raising import raises
from routing_peers import ReadingGrid, ask_otherwise, client, failing, first, request_in, zeros
from sklearn.datasets import load_digits

from flower_privdec.audits.peer_updates import auditing_updates
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import DualAveraging, FedDeper, Gossip, LocalGrid, PeerMod, PushSum, public_key
from flower_privdec.flower.mods import node_pairs
from flower_privdec.peer import app_pairs
from flower_privdec.peer.app_pairs import StepPairs
from flower_privdec.peer.app_updates import SOURCE, solved_noise, spent_so_far
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.mechanism.events import Adversary

CANCELLING = {"kind": "cancelling", "colluding": 1}
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 3.0, "delta": 1e-5, "noise": CANCELLING}
SIZE = 2000
SERVER = 3.0 / 8  # the noise of a trusted server's mean of eight peers
Step = tuple[int, int]  # peer and round


def stays(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
    return arrays


class Steps:
    """What peers did with noise of pairs."""

    def __init__(self) -> None:
        self.drawn = list[tuple[bytes, int]]()  # (key, peer)
        self.partners: dict[Step, list[int]] = {}
        self.hidden: dict[Step, float] = {}  # the noise that hides an update, over what the peer needs

    def last_of(self, peer: int) -> list[list[int]]:
        """Return the partners of a peer in its steps, in order."""
        return [partners for (one, _), partners in sorted(self.partners.items()) if one == peer]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Record each step, and each draw with the peer that adds it."""
    seen = Steps()
    peers = list[int]()
    noised = StepPairs.noised
    add = app_pairs.add_drawn_
    exactly = app_pairs.exactly_noised

    def recording(step: StepPairs, values: np.ndarray, std: float, weight: float) -> np.ndarray:
        peers.append(step.peer)
        used = len(seen.drawn)

        def own(total: np.ndarray, own_std: float) -> np.ndarray:
            place = (step.peer, step.round_index)
            partners = list(step.partners) if len(seen.drawn) > used else []
            seen.partners[place] = partners
            needed = step.session.terms.needed
            variance = (own_std * weight / needed) ** 2
            left = []
            for other in partners:
                terms = step.partners[other].terms
                square = app_pairs.pair_square(step.session.terms, terms)
                theirs = (terms.own * terms.needed) ** 2
                left.append(square * theirs / (square + theirs) / needed**2)
            variance += sum(sorted(left)[: max(0, len(left) - step.colluding)])
            seen.hidden[place] = np.sqrt(variance) * needed / (std * weight)
            return exactly(total, own_std)

        monkeypatch.setattr(app_pairs, "exactly_noised", own)
        return noised(step, values, std, weight)

    def drawing(total: np.ndarray, key: bytes, scale: float) -> None:
        seen.drawn.append((key, peers[-1]))
        add(total, key, scale)

    monkeypatch.setattr(StepPairs, "noised", recording)
    monkeypatch.setattr(app_pairs, "add_drawn_", drawing)
    yield seen

    # Laws of every run: a peer adds a draw once, at most two peers add it, and an update has the noise that it needs.
    assert all(times == 1 for times in Counter(seen.drawn).values())
    assert all(ends <= 2 for ends in Counter(key for key, _ in set(seen.drawn)).values())
    assert all(hidden >= 1 - 1e-9 for hidden in seen.hidden.values())


def changing(change: Callable[[int, Message], Message | None], *args: Any, **options: Any) -> LocalGrid:
    """Return a grid whose server may change each message to a peer, or answer it itself."""
    grid = LocalGrid(*args, **options)
    deliver = grid._deliver

    def carried(message: Message) -> Message:
        answer = change(message.metadata.dst_node_id - 100, message)
        return answer or deliver(message)

    grid._deliver = carried  # type: ignore[method-assign]
    return grid


def begun(grid: LocalGrid, rounds: int, topology: str = "complete", **options: Any) -> PushSum:
    strategy = PushSum(topology, fraction_evaluate=0.0, **options)
    strategy.noise = first(strategy.start(grid, zeros(SIZE), rounds).arrays)  # type: ignore[attr-defined]
    return strategy


def asked_for_round(message: Message) -> int:
    """Return the round that a message asks a peer to take part in; 0 if it asks for something else."""
    asked = request_in(message)
    return asked.round_index if asked.kind == "round" else 0


def test_the_mean_has_hardly_more_noise_than_a_servers(steps):
    strategy = begun(LocalGrid(client(stays, **PRIVATE), 8), 1)
    assert 1.0 * SERVER < strategy.noise.std() < 1.3 * SERVER
    assert len(steps.drawn) == 8 * 7
    alone = begun(LocalGrid(client(stays, **PRIVATE | {"noise": None}), 8), 1)
    assert alone.noise.std() == pytest.approx(np.sqrt(8) * SERVER, rel=0.06)
    assert alone.reports[0].epsilon == strategy.reports[0].epsilon


@pytest.mark.parametrize("topology", ["directed-exponential", "ring"])
def test_noise_cancels_over_a_graph_of_few_neighbours(topology, steps):
    strategy = begun(LocalGrid(client(stays, **PRIVATE), 8), 3, topology)
    assert strategy.noise.std() < 0.6 * np.sqrt(3) * np.sqrt(8) * SERVER
    assert {len(partners) for partners in steps.partners.values()} == {7}


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: DualAveraging("ring", regularizer={"kind": "l1", "weight": 0.01}, fraction_evaluate=0.0),
        lambda: Gossip("complete", fraction_evaluate=0.0),
        lambda: FedDeper(learning_rate=0.1, rho=0.03, fraction_evaluate=0.0),
        lambda: PushSum("complete", fraction_train=0.5, fraction_evaluate=0.0),
    ],
    ids=["dual-averaging", "gossip", "feddeper", "half-of-the-peers"],
)
def test_other_strategies_pair_the_peers_of_a_round(strategy, steps):
    made = strategy()
    made.start(LocalGrid(client(stays, **PRIVATE), 8), zeros(100), 2)
    half = made.fraction_train == 0.5
    assert {len(partners) for partners in steps.partners.values()} == {3 if half else 7}


def test_examples_that_are_said_weigh_the_noise(steps):
    """The mean has what the peer of most examples needs in it: 17 of 108."""
    app = client(stays, **PRIVATE, examples=lambda context: 10.0 + context.node_config["partition-id"])
    strategy = begun(LocalGrid(app, 8), 1)
    assert 3.0 * 17 / 108 < strategy.noise.std() < 3.0 * 17 / 108 * 1.4
    assert {len(partners) for partners in steps.partners.values()} == {7}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 digits of 4 x 4 pixels and a constant, and their labels, in the order of a seed."""
    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16 - 0.3).reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)
    order = np.random.default_rng(0).permutation(len(x))
    return np.hstack([x, np.full((len(x), 1), 0.5)])[order], labels[order]


def descending(x: np.ndarray, y: np.ndarray, n_peers: int) -> Callable[..., list[np.ndarray]]:
    """Return five steps of softmax regression on a peer's part."""

    def step(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
        w = arrays[0].copy()
        for _ in range(5):
            scores = np.exp(x[peer::n_peers] @ w)
            off = scores / scores.sum(1, keepdims=True) - np.eye(10)[y[peer::n_peers]]
            w -= 6.0 * x[peer::n_peers].T @ off / len(off)
        return [w]

    return step


@pytest.mark.slow
def test_an_app_is_as_good_as_with_a_server():
    """At equal ε, each for itself, with pairs, and by Flower's FedAvg with noise of a server that all trust."""
    x, y = digits()
    step = descending(x[400:], y[400:], 16)
    private = {"clip_norm": 2.0, "epsilon": 8.0, "delta": 1e-2}

    def accuracy(arrays: ArrayRecord) -> float:
        return float(((x[:400] @ first(arrays)).argmax(1) == y[:400]).mean())

    def among_peers(**options: Any) -> float:
        grid = LocalGrid(client(step, **private | options), 16)
        strategy = PushSum("complete", fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord([np.zeros((17, 10))]), 10)
        assert strategy.reports[0].epsilon <= 8.0
        return accuracy(result.arrays)

    fedavg = FedAvg(fraction_evaluate=0.0, min_train_nodes=16, min_available_nodes=16)
    noise = solved_noise(8.0, 1e-2, 10)
    server = DifferentialPrivacyServerSideFixedClipping(fedavg, noise, 2.0, 16)
    plain = ClientApp()
    plain.train()(client_train(step))
    trusted = accuracy(server.start(LocalGrid(plain, 16), ArrayRecord([np.zeros((17, 10))]), num_rounds=10).arrays)

    pairs = np.mean([among_peers(noise=CANCELLING) for _ in range(2)])  # 76 %
    alone = np.mean([among_peers() for _ in range(2)])  # 50 %
    assert trusted > 0.68  # 78 %
    assert pairs > trusted - 0.1
    assert pairs > alone + 0.1


def client_train(step: Callable[..., list[np.ndarray]]) -> Callable[[Message, Context], Message]:
    """Return the train function of an app without a mod."""

    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        trained = ArrayRecord(step(arrays, int(str(context.node_config["partition-id"])), 0))
        content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return train


# Peers that fail, leave and come back.


def test_a_failed_peer_is_no_partner_for_a_round(steps):
    def change(peer: int, message: Message) -> Message | None:
        return failing(message, None) if peer == 3 and asked_for_round(message) == 2 else None

    begun(changing(change, client(stays, **PRIVATE), 8), 6)
    assert [len(partners) for partners in steps.last_of(0)] == [7, 7, 6, 7, 7, 7]
    assert [len(partners) for partners in steps.last_of(3)] == [7, 0, 7, 7, 7]  # the third round it takes alone


def test_a_restarted_peer_shares_noise_by_a_new_session(steps):
    sessions = set[object]()

    def change(peer: int, message: Message) -> None:
        if peer == 3:
            state = grid.contexts[103].state
            sessions.add(state.config_records.get(node_pairs.SESSION, {}).get(node_pairs.PRIVATE))
            if asked_for_round(message) == 3:  # its node's memory is lost
                state.clear()

    grid = changing(change, client(stays, **PRIVATE), 8)
    begun(grid, 5)
    assert len(sessions - {None}) == 2
    assert [len(partners) for partners in steps.last_of(3)] == [7, 7, 0, 7, 7]
    assert [len(partners) for partners in steps.last_of(0)] == [7] * 5
    matched = Counter(Counter(key for key, _ in steps.drawn).values())
    assert matched[1] == 7  # of the round in which it was alone


def test_a_restored_folder_never_repeats_a_draw(steps, tmp_path):
    kept: dict[Path, bytes] = {}

    def change(peer: int, message: Message) -> None:
        if peer == 2 and asked_for_round(message) == 2:
            kept.update({path: path.read_bytes() for path in (tmp_path / "peer-2").iterdir() if path.is_file()})
        if peer == 2 and asked_for_round(message) == 4:
            for path, content in kept.items():
                path.write_bytes(content)

    grid = changing(change, client(stays, **PRIVATE), 4, folder=tmp_path)
    grid.contexts[102].node_config["charge-missing"] = True
    begun(grid, 6)
    assert [len(partners) for partners in steps.last_of(2)][:3] == [3, 3, 3]


def test_a_peer_with_spent_budget_is_no_partner(steps, tmp_path):
    """The others would add noise for it in each round that is left."""
    grid = LocalGrid(client(stays, **PRIVATE), 4, folder=tmp_path)
    begun(grid, 2, name="one")
    spent = spent_so_far(tmp_path / "peer-1", 1e-5, Adversary(colluding=1)).epsilon
    grid.contexts[101].node_config["epsilon"] = spent * 1.3
    steps.partners.clear()
    begun(grid, 6, name="two")
    assert 0 < len(steps.last_of(1)) < 5
    assert sorted(steps.partners[0, 6]) == [2, 3]


# A server that lies.


def test_a_lying_server_costs_accuracy_and_no_privacy(steps):
    heard: dict[int, dict[str, Any]] = {}

    def change(peer: int, message: Message) -> None:
        asked = request_in(message)
        done = asked_for_round(message)
        if done == 1:
            heard[peer] = {"announcers": asked.announcers, "announced": asked.announced}
        elif done == 2 and peer < 3:  # withholds some of them
            ask_otherwise(message, announcers=asked.announcers[:2], announced=asked.announced[:2])
        elif done == 3:  # changes one, and gives another a wrong name
            changed = list(asked.announced)
            changed[0] = bytes([changed[0][0] ^ 1]) + changed[0][1:]
            changed[1], changed[2] = changed[2], changed[1]
            ask_otherwise(message, announced=changed)
        elif done == 4:
            ask_otherwise(message, round_size=10**6)
        elif done == 5:  # another round than the others'
            ask_otherwise(message, round_index=5 + peer % 2)
        elif done == 7:
            ask_otherwise(message, **heard[peer])

    begun(changing(change, client(stays, **PRIVATE), 6), 8)
    assert [len(partners) for partners in steps.last_of(0)][:3] == [5, 2, 2]
    assert len(steps.last_of(4)[1]) == 5


def test_a_session_that_changed_is_announced_anew(steps):
    """Terms follow from what the strategy says, and partners have to know them."""

    def change(peer: int, message: Message) -> None:
        if asked_for_round(message) >= 2:
            ask_otherwise(message, round_size=5)

    begun(changing(change, client(stays, **PRIVATE), 6), 4)
    assert [len(partners) for partners in steps.last_of(0)] == [5, 0, 5, 5]


def test_no_message_has_a_session_key_or_a_draw(steps):
    grid = ReadingGrid(client(stays, **PRIVATE, seal=True), 4)
    begun(grid, 2, "directed-exponential")
    everything = b"".join(grid.seen)
    for context in grid.contexts.values():
        private = context.state.config_records[node_pairs.SESSION][node_pairs.PRIVATE]
        assert private not in everything
        assert repr(private).encode()[2:-1] not in everything
    assert all(key not in everything for key, _ in steps.drawn)


# Ledgers and budgets.


def test_the_ledger_keeps_both_epsilons(tmp_path, caplog):
    strategy = begun(LocalGrid(client(stays, **PRIVATE), 4, folder=tmp_path), 2)
    against_one = spent_so_far(tmp_path / "peer-0", 1e-5, Adversary(colluding=1)).epsilon
    against_all = spent_so_far(tmp_path / "peer-0", 1e-5).epsilon
    assert strategy.reports[0].epsilon == against_one < against_all
    assert f"against up to 1 peer colluding, and {against_all:.4g} if all other peers do" in caplog.text
    (release,) = {
        release for entry in read_entries(tmp_path / "peer-0", SOURCE) for release in entry.charges[0].releases
    }
    own = own_noise_of(4)
    assert release.noise_multiplier == pytest.approx(3.0 * own)
    assert release.against == ((1, 3.0),)


def own_noise_of(n_peers: int) -> float:
    """Return the own noise of peers that are alike, with one colluder, at the strength that a server's mean allows."""
    strength = app_pairs.best_strength(n_peers - 1, n_peers - 2, 0.0)
    return app_pairs.least_own(n_peers - 1, n_peers - 2, strength)


def test_a_run_against_everybody_counts_own_noise(tmp_path):
    begun(LocalGrid(client(stays, **PRIVATE), 4, folder=tmp_path), 1, name="pairs")
    own = PRIVATE | {"noise": None}
    later = begun(LocalGrid(client(stays, **own), 4, folder=tmp_path), 1, name="independent")
    assert later.reports[0].epsilon == spent_so_far(tmp_path / "peer-0", 1e-5).epsilon
    assert later.reports[0].epsilon > 1.3 * spent_so_far(tmp_path / "peer-0", 1e-5, Adversary(colluding=1)).epsilon


def test_noise_is_solved_for_the_budget_against_colluders(tmp_path):
    options = {"clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-5, "noise": CANCELLING}
    told = begun(LocalGrid(client(stays, **options), 4, folder=tmp_path), 10).reports[0]
    assert 1.98 < told.epsilon <= 2.0
    assert told.round_index == 10


# SuperNodes, and what is refused.


def deployed(folder: Path, n_peers: int = 3, **config: Any) -> LocalGrid:
    keys = {str(peer): public_key(folder / f"peer-{peer}") for peer in range(n_peers)}
    (folder / "known.json").write_text(json.dumps(keys))
    given = {"folder": str(folder), "known-peers": str(folder / "known.json"), "colluding": 1} | config
    given = {key: value for key, value in given.items() if value is not None}
    return LocalGrid(client(stays, **PRIVATE), n_peers, config=dict.fromkeys(range(n_peers), given))


def test_owners_of_supernodes_allow_the_noise(steps, tmp_path):
    strategy = begun(deployed(tmp_path), 2)
    assert {len(partners) for partners in steps.partners.values()} == {2}
    assert strategy.noise.std() < 3.0


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"known-peers": None}, ("flower.node-failed", "known-peers")),
        ({"colluding": None}, ("flower.node-failed", "known-peers")),
        ({"colluding": 2}, ("flower.node-failed", "must be >= colluding=2")),
    ],
)
def test_supernodes_refuse_what_their_owners_did_not_allow(config, refusal: tuple[str, str], tmp_path):
    with raises(RunError, *refusal):
        begun(deployed(tmp_path, **config), 1)
    assert not list(tmp_path.glob("peer-*/*.jsonl"))


def test_a_server_cannot_put_a_key_between_pinned_peers(steps, tmp_path):
    grid = deployed(tmp_path)
    stranger = bytes.fromhex(public_key(tmp_path / "stranger"))
    deliver = grid._deliver

    def carried(message: Message) -> Message:
        """Introduce another identity for peer 2."""
        asked = request_in(message)
        if asked.neighbors and message.metadata.dst_node_id != 102:
            keys = dict(zip(asked.neighbors, asked.keys, strict=True)) | {2: stranger}
            ask_otherwise(message, keys=[keys[other] for other in asked.neighbors])
        return deliver(message)

    grid._deliver = carried  # type: ignore[method-assign]
    PushSum("complete", fraction_evaluate=0.0).start(grid, zeros(100), 2)
    assert steps.partners == {(0, 1): [1], (1, 1): [0], (0, 2): [1], (1, 2): [0]}


@pytest.mark.parametrize(
    ("noise", "refusal"),
    [
        ({"kind": "cancelling"}, ("scenario.missing", "colluding")),
        ({"kind": "cancelling", "colluding": -1}, ("scenario.greater_than_equal", "colluding=-1")),
        ({"kind": "cancelling", "colluding": 1, "absent": 0.5}, ("scenario.int_type", "absent")),
        ({"kind": "cancelling", "colluding": 1, "strength": 0}, ("scenario.literal_error", "strength=0")),
        ({"kind": "gaussian", "colluding": 1}, ("scenario.literal_error", "kind")),
        ({"kind": "cancelling", "colluding": 1, "secrets": "ring"}, ("scenario.extra_forbidden", "secrets")),
        ("cancelling", ("argument.kind", "noise")),
    ],
)
def test_wrong_noise_is_refused_when_the_app_is_made(noise, refusal: tuple[str, str]):
    with raises(ScenarioError, *refusal):
        PeerMod(clip_norm=1.0, noise_multiplier=1.0, noise=noise)


def test_noise_without_protection_is_refused():
    with raises(ScenarioError, "privacy.no-noise"):
        PeerMod(noise=CANCELLING)


@pytest.mark.parametrize(
    ("options", "n_peers", "names"),
    [({}, 2, "their sum must be < 1"), ({"share_metrics": True}, 4, "give PeerMod examples=")],
    ids=["two-peers", "examples-are-private"],
)
def test_what_cannot_cancel_is_refused_before_a_charge(options, n_peers, names, tmp_path):
    grid = LocalGrid(client(stays, **PRIVATE, **options), n_peers, folder=tmp_path)
    with raises(RunError, "flower.node-failed", names):
        begun(grid, 1)
    assert not list(tmp_path.glob("peer-*/*.jsonl"))


def test_a_mesh_refuses_noise_that_cancels():
    with raises(RunError, "flower.mesh-noise"):
        node_pairs.refuse_mesh()


def test_audits_of_updates_refuse_noise_of_pairs():
    with auditing_updates(), raises(RunError, "nodes.all-failed", "audit the app without"):
        begun(LocalGrid(client(stays, **PRIVATE), 4), 1)
