"""What leaves a peer: its clipped and noised update, charged before it is made, and sealed for those it is for."""

from __future__ import annotations

import errno
import json
import re
from contextlib import suppress

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_states import state_in
from raising import raises
from routing_peers import (
    ReadingGrid,
    client,
    first,
    frozen_share,
    receive,
    request_in,
    sets_its_values_once,
    values_of,
    zeros,
)
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum, peer_folder, private, public_key
from flower_privdec.flower.mods.peer_messages import PeerRequest
from flower_privdec.flower.strategies.peer_network import PeerNetwork
from flower_privdec.peer.app_state import PeerState, run_frames
from flower_privdec.peer.app_updates import PeerLedger, clipped, norm, protected, solved_noise, spent_so_far
from flower_privdec.peer.identity import Identity, KnownPeers, PeerSeal
from flower_privdec.peer.masking import masked, unmasked_sum
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.exact_noise import grid_steps
from flower_privdec.privacy.ledger import ledger as ledger_module
from flower_privdec.privacy.ledger.segments import MERGED
from flower_privdec.privacy.ledger.spending import releases_in
from flower_privdec.pushsum.exactly_once import RefusedError

DELTA = 1e-5


def moves_a_little(arrays, peer, server_round):
    return [arrays[0] + 0.01]


def start(folder, rounds, *, step=moves_a_little, n_peers=2, size=3, name="run", **options):
    grid = LocalGrid(client(step, **options), n_peers, folder=folder)
    strategy = PushSum(name=name, fraction_evaluate=0.0)
    strategy.result = strategy.start(grid, zeros(size), rounds)
    return strategy


def composed(noise, rounds):
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), rounds))
    return accountant.get_epsilon(DELTA)


@pytest.mark.slow
def test_a_ledger_of_100_rounds_matches_dp_accounting(tmp_path):
    options = {"clip_norm": 1.0, "noise_multiplier": 12.0, "delta": DELTA}
    half = start(tmp_path, 50, **options).reports[0].epsilon
    assert half == pytest.approx(composed(12.0, 50), rel=2e-3)
    told = start(tmp_path, 100, **options).reports
    for peer in (0, 1):
        assert told[peer].epsilon == pytest.approx(composed(12.0, 100), rel=2e-3)
        assert told[peer].round_index == 100
    ledger = (tmp_path / "peer-1" / "peer-updates.jsonl").read_text().splitlines()
    assert len(ledger) == 101


def test_the_ledger_is_the_peers_and_adds_up(tmp_path):
    options = {"clip_norm": 1.0, "noise_multiplier": 3.0, "delta": DELTA}
    start(tmp_path, 2, name="one", **options)
    told = start(tmp_path, 3, name="two", **options).reports[0]
    assert told.epsilon == pytest.approx(composed(3.0, 5), rel=2e-3)


def test_epsilon_is_printed_with_unit_adjacency_and_charges(tmp_path, caplog):
    start(tmp_path, 2, clip_norm=1.0, noise_multiplier=3.0)
    (line,) = [record.message for record in caplog.records if record.message.startswith("Privacy of")]
    assert re.match(
        r"Privacy of peers 0, 1: epsilon = 1\.\d+ at delta = 1e-05 \(unit: one peer with all its data", line
    )
    assert "adjacency: its update of every round replaced by zero" in line
    assert "charged: 2 Gaussian updates of noise multiplier 3)" in line


def test_nothing_protected_costs_infinity_and_says_so(tmp_path, caplog):
    told = start(tmp_path, 1).reports[0]
    assert told.epsilon == np.inf
    assert "Privacy of peers 0, 1: epsilon = inf (unit: one peer with all its data)" in caplog.text


def test_an_apps_protected_examples_are_counted_per_peer(tmp_path):
    app, options = ClientApp(mods=[PeerMod(share_metrics=False)]), {"delta": 1e-3, "noise_multiplier": 2.0}
    spent: dict[int, list[float]] = {0: [], 1: []}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = nn.Linear(3, 2)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        peer, data = context.node_config["partition-id"], TensorDataset(torch.ones(40, 3), torch.zeros(40).long())
        given = model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=10), nn.CrossEntropyLoss()
        wrapped = private(*given, ledger=peer_folder() / "examples.jsonl", report=lambda _: None, **options)
        net, optimizer, loader, criterion = wrapped
        for x, y in loader:
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
        spent[peer].append(wrapped.epsilon)
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)

    for rounds in (2, 3):
        grid = LocalGrid(app, 2, folder=tmp_path)
        PushSum(name="e", fraction_evaluate=0.0).start(grid, ArrayRecord(nn.Linear(3, 2).state_dict()), rounds)
    for peer in (0, 1):
        assert (tmp_path / f"peer-{peer}" / "examples.jsonl").is_file()
        assert spent[peer] == sorted(set(spent[peer]))  # it grows from round to round, and over the restart
        assert len(spent[peer]) == 3
    with raises(RunError, "app.peer-folder", r"peer_folder\(\)"):
        peer_folder()


def test_a_reached_budget_stops_training_and_relaying_continues(tmp_path, caplog):
    done = []

    def step(arrays, peer, server_round):
        done.append((peer, server_round))
        return [arrays[0] + 0.01]

    epsilon = composed(2.0, 3) * 1.01
    grid = LocalGrid(client(step, clip_norm=1.0, noise_multiplier=2.0, delta=DELTA), 4, folder=tmp_path)
    grid.contexts[102].node_config.update({"epsilon": epsilon})  # its owner allows less than the app
    strategy = PushSum(name="b", fraction_evaluate=0.0)
    strategy.start(grid, zeros(), 6)
    assert [k for peer, k in done if peer == 2] == [1, 2, 3]
    assert len(done) == 3 * 6 + 3
    state = state_in(tmp_path / "peer-2", "b")
    assert sum(edge.sent for edge in state.shares.edges.values()) == 6  # it went on sending
    assert state.round_index == 6
    assert "3 of 4 peers trained (peer 2: its next update would exceed epsilon" in caplog.text
    assert "it stops training and only exchanges" in caplog.text


def test_training_ends_when_every_budget_is_reached(tmp_path, caplog):
    options = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": DELTA, "epsilon": composed(2.0, 3) * 1.01}
    strategy = PushSum()
    strategy.start(LocalGrid(client(moves_a_little, **options), 2, folder=tmp_path), zeros(), 50)
    assert strategy.reports[0].round_index == 4
    assert "Training stopped: peers 0, 1: its next update would exceed epsilon" in caplog.text
    assert strategy.reports[0].epsilon <= options["epsilon"]


def test_noise_is_solved_for_the_planned_rounds(tmp_path):
    told = start(tmp_path, 20, clip_norm=1.0, epsilon=2.0, delta=DELTA).reports[1]
    assert 0.99 * 2.0 < told.epsilon <= 2.0
    assert told.round_index == 20
    assert composed(solved_noise(2.0, DELTA, 20), 20) == pytest.approx(2.0, rel=1e-2)


def test_a_round_failing_after_payment_is_paid_again(tmp_path):
    def fails(arrays, peer, server_round):
        raise ValueError("secret 4711")

    options = {"clip_norm": 1.0, "noise_multiplier": 3.0, "delta": DELTA}
    with raises(RunError, "nodes.all-failed", "peers 0, 1: its app raised ValueError; see its own log") as error:
        start(tmp_path, 1, step=fails, **options)
    assert "4711" not in str(error.value)  # what an app says of private data stays with the peer
    assert start(tmp_path, 1, **options).reports[0].epsilon == pytest.approx(composed(3.0, 2), rel=2e-3)


def test_an_edited_ledger_is_refused(tmp_path):
    options = {"clip_norm": 1.0, "noise_multiplier": 3.0}
    start(tmp_path, 2, **options)
    path = tmp_path / "peer-0" / "peer-updates.jsonl"
    path.write_text(path.read_text().replace('"noise_multiplier":3.0', '"noise_multiplier":9.0'))
    with raises(RunError, "flower.node-failed", "its hash does not match"):
        start(tmp_path, 3, **options)


# Clipping and noise.


def test_what_is_spent_is_the_sum_of_all_lines(tmp_path):
    """Only new lines are added up, also after the lines of one run were merged."""
    ledger = PeerLedger(tmp_path, "run", 1, 0, DELTA, durable=False)
    for done in range(MERGED + 40):
        ledger.charge(done + 1, 2.0 + done % 3)
        if done % 7 == 0:
            ledger.name_run(f"run {done % 2}", 1)
        assert ledger.releases == releases_in(ledger.entries)
        assert ledger.spent.releases == ledger.releases
        assert ledger.spent is ledger.spent
    assert ledger.spent.epsilon == epsilon(releases_in(ledger.entries), DELTA)
    assert sum(release.steps for release in ledger.releases) == MERGED + 40
    assert len(ledger.entries) < MERGED + 40
    ledger.close()


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8), st.floats(1e-6, 1e6))
@settings(max_examples=60)
def test_no_update_exceeds_the_clip_norm(numbers, clip_norm):
    update = np.array(numbers)
    after = clipped(update, clip_norm)
    assert np.isfinite(after).all()
    assert norm(after) <= clip_norm * (1 + 1e-15)
    if norm(update) <= clip_norm:
        assert after is update


def test_a_zero_update_is_noised_too(tmp_path):
    assert not clipped(np.zeros(4), 1.0).any()
    strategy = start(tmp_path, 1, step=lambda arrays, *_: arrays, clip_norm=2.0, noise_multiplier=1.5, size=4000)
    noise = first(strategy.result.arrays) * np.sqrt(2)  # the mean of two peers
    assert stats.kstest(noise, stats.norm(scale=3.0).cdf).pvalue > 1e-9


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e300])
def test_non_finite_updates_count_as_zero_and_are_named(wrong, tmp_path, caplog):
    def step(arrays, peer, server_round):
        return [np.array([wrong, 1.0, 2.0])] if peer == 0 else arrays

    plain = start(tmp_path / "plain", 2, step=step)
    if wrong < np.inf:
        assert np.isfinite(first(plain.result.arrays)).all()
    else:
        assert "peer 0, round 1: 1 of its 3 numbers are" in caplog.text
        assert "so its update counts as zero" in caplog.text
        assert not first(plain.result.arrays).any()
    noised = start(tmp_path / "noised", 2, step=step, clip_norm=1.0, noise_multiplier=1.0)
    assert np.isfinite(first(noised.result.arrays)).all()
    assert np.abs(first(noised.result.arrays)).max() < 50
    assert caplog.text.count("2 of 2 peers trained") == 4  # nobody is told that it was no number


def test_noise_comes_from_the_system_and_never_repeats(tmp_path):
    one, other = (
        start(tmp_path / name, 1, clip_norm=1.0, noise_multiplier=1.0).result.arrays for name in ("one", "other")
    )
    assert not np.isin(first(one), first(other)).any()


@pytest.mark.parametrize("share", [False, True])
def test_metrics_of_a_protected_peer_stay_unless_shared(share, tmp_path):
    grid = LocalGrid(
        client(moves_a_little, clip_norm=1.0, noise_multiplier=1.0, share_metrics=share), 2, folder=tmp_path
    )
    result = PushSum().start(grid, zeros(), 1)
    assert bool(result.train_metrics_clientapp) is share
    assert bool(result.evaluate_metrics_clientapp) is share
    if not share:
        lines = [json.loads(line) for line in (tmp_path / "peer-0" / "metrics.jsonl").read_text().splitlines()]
        assert [(line["round"], line["of"]) for line in lines] == [(1, "round"), (1, "evaluate")]
        assert lines[0]["loss"] == 0.25


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"clip_norm": 1.0}, ("privacy.no-noise", "noise_multiplier")),
        ({"noise_multiplier": 1.0}, ("scenario.missing", "'clip_norm'")),
        ({"epsilon": 1.0}, ("scenario.missing", "'clip_norm'")),
        ({"clip_norm": 0.0, "noise_multiplier": 1.0}, ("scenario.greater_than", "clip_norm=0.0")),
        ({"clip_norm": 1.0, "noise_multiplier": float("nan")}, ("scenario.finite_number", "noise_multiplier=nan")),
        ({"clip_norm": 1.0, "epsilon": -1.0}, ("scenario.greater_than", "epsilon=-1.0")),
        ({"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 0.0}, ("scenario.greater_than", "delta=0.0")),
    ],
)
def test_wrong_settings_are_refused_when_the_app_is_made(options, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal):
        PeerMod(**options)


# Seals.


def numbers_in(seen: list[bytes], values: np.ndarray) -> bool:
    """Return whether some number of a vector stands in some bytes, in any of the ways that it may be written."""
    content = b"".join(seen)
    ways = [value.tobytes() for value in (*values, *values.astype(np.float32))]
    return any(way in content for way in ways) or any(repr(float(v)).encode() in content for v in values)


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_relayed_sealed_shares_show_no_number_of_a_model(seal, tmp_path):
    grid = ReadingGrid(client(sets_its_values_once, seal=seal), 4, folder=tmp_path)
    PushSum(name="r").start(grid, zeros(), 2, evaluate_fn=lambda *_: None)
    parts = np.concatenate([values_of(peer) * part for peer in range(4) for part in (1.0, 0.5, 0.25)])
    assert sum(len(each) for each in grid.seen) > 1000
    assert numbers_in(grid.seen, parts) is not seal


def test_the_mean_of_unread_models_is_exact(tmp_path):
    grid = LocalGrid(client(sets_its_values_once, seal=True), 6, folder=tmp_path)
    strategy = PushSum(fraction_evaluate=0.0)
    seen = []
    strategy.start(grid, zeros(), 2, evaluate_fn=lambda server_round, arrays: seen.append(first(arrays)))
    np.testing.assert_allclose(seen[1], np.mean([values_of(peer) for peer in range(6)], axis=0), rtol=1e-14)
    assert strategy.peer_arrays == {}


def test_masks_cancel_only_in_the_sum_of_all():
    values = {peer: np.array([1e6, -3.25, 1e-12, 0.0]) * (peer + 1) for peer in (0, 3, 7)}
    shared = {frozenset(pair): bytes([sum(pair)] * 32) for pair in ((0, 3), (0, 7), (3, 7))}
    parts = {
        peer: masked(
            values[peer], peer, values.keys() - {peer}, lambda other, peer=peer: shared[frozenset((peer, other))]
        )
        for peer in values
    }
    np.testing.assert_allclose(unmasked_sum(parts.values()), sum(values.values()), rtol=0, atol=1e-20)
    assert np.abs(unmasked_sum([parts[0], parts[3]])).min() > 1
    with raises(RunError, "masking.too-large"):
        masked(np.array([1e9]), 0, (), lambda _: b"")


@pytest.fixture
def two(tmp_path):
    """Return two peers' states, what the first one sends next, and how the second one takes it."""
    identities = [Identity(folder) for folder in (tmp_path / "a", tmp_path / "b") if not folder.mkdir()]
    known = [KnownPeers(tmp_path / name) for name in ("a", "b")]
    for each in known:
        each.meet({peer: identity.public for peer, identity in enumerate(identities)})
    both = [PeerState.begun("run", peer, {"x": np.ones(3)}, founding=True, incarnation=1) for peer in (0, 1)]
    both[1].shares.introduce(0, both[0].shares.incarnation)

    def frames(by):
        return run_frames("run", both[0].layout, PeerSeal(identities[by], known[by]))

    def send():
        return frozen_share(*both, frames(0))

    def take(share, by=1):
        return receive(both[1], frames(by), share)

    return both, send, take


def test_a_sealed_share_is_taken_once_by_its_receiver(two):
    both, send, take = two
    one, second = send(), send()
    with raises(RefusedError, "share.gap"):
        take(second)
    with raises(RefusedError, "share.seal"):
        take(one, by=0)
    assert take(one)
    mass = both[1].w
    assert not take(one)  # played back
    assert both[1].w == mass == 1.5
    assert take(second)
    share, lost = send(), both[1]
    both[1] = PeerState.begun("run", 1, {"x": np.ones(3)}, founding=True, incarnation=2)
    both[1].shares.introduce(0, both[0].shares.incarnation)
    with raises(RefusedError, "edge.incarnation", f"{lost.shares.incarnation:#x}"):
        take(share)


def test_a_seal_covers_every_byte_of_a_share(two):
    both, send, take = two
    share = send()
    for at in range(len(share)):
        changed = share[:at] + bytes([share[at] ^ 1]) + share[at + 1 :]
        with pytest.raises(RefusedError):
            take(changed)
    for length in range(0, len(share), 7):
        with pytest.raises(RefusedError):
            take(share[:length])
    assert both[1].w == 1.0
    assert take(share)


def test_a_sealing_peer_refuses_an_open_share(two):
    both, _, take = two
    with raises(RefusedError, "frame.sealed"):
        take(frozen_share(*both, run_frames("run", both[0].layout)))


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_share_that_is_not_finite_is_refused(number):
    sender, receiver = (
        PeerState.begun("run", peer, {"x": np.ones(3)}, founding=True, incarnation=1) for peer in (0, 1)
    )
    sender.x[1] = number
    receiver.shares.introduce(0, sender.shares.incarnation)
    frames = run_frames("run", sender.layout)
    with raises(RefusedError, "frame.number"):
        receive(receiver, frames, frozen_share(sender, receiver, frames))
    assert receiver.x.tolist() == [1.0, 1.0, 1.0]


def test_a_key_changed_after_first_use_is_refused(tmp_path, caplog):
    """The relay that introduces the peers swaps a key in a later run, to stand between them."""
    start(tmp_path, 2, seal=True)
    stranger = public_key(tmp_path / "stranger")
    known = tmp_path / "peer-0" / "known-peers.json"
    known.write_text(known.read_text().replace(public_key(tmp_path / "peer-1"), stranger))
    start(tmp_path, 3, seal=True)
    assert "peer 0 sends nothing to peer 1: the key of peer 1 is not the one in" in caplog.text
    assert "2 of 2 peers trained (peer 0: refused: the key of peer 1 is not the one in" in caplog.text
    assert "a man in the middle, or it has a new identity" in caplog.text


def test_pinned_keys_admit_no_other_peer(tmp_path, caplog):
    pinned = tmp_path / "pinned.json"
    pinned.write_text(json.dumps({"1": public_key(tmp_path / "peer-1")}))
    grid = LocalGrid(client(moves_a_little, seal=True), 3, folder=tmp_path)
    for context in grid.contexts.values():
        context.node_config["known-peers"] = str(pinned)
    PushSum(fraction_evaluate=0.0, name="pins").start(grid, zeros(), 2)
    assert "peer 1 sends nothing to peer 2: peer 2 has no key in" in caplog.text
    found = [state_in(tmp_path / f"peer-{peer}", "pins") for peer in range(3)]
    edges = [state.shares.edges for state in found]
    assert [[j for j, edge in each.items() if edge.sent] for each in edges] == [[1], [], [1]]


def test_peers_that_do_not_agree_on_seals_are_named():
    open_app, sealed_app = client(moves_a_little, seal=False), client(moves_a_little, seal=True)
    grid = LocalGrid(lambda m, c: (open_app if c.node_config["partition-id"] else sealed_app)(m, c), 3)
    with raises(RunError, "nodes.seal", r"\[0\]"):
        PushSum().start(grid, zeros(), 1)


def test_a_deployed_peer_seals_and_needs_its_folders():
    app = client(moves_a_little)
    bare = LocalGrid(app, 2, config={})
    for context in bare.contexts.values():
        del context.node_config["folder"]
    with raises(RunError, "flower.node-failed", "has no folder for its state and ledger: start the SuperNode"):
        PushSum(patience=0.2).start(bare, zeros(), 1)
    strategy = PushSum(fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 2, config={}), zeros(), 1)
    assert all(told.sealed for told in strategy.reports.values())


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"weights": [0.7, 0.5]}, ("nodes.all-failed", "must be > 0 with a sum < 1")),
        ({"weights": [float("nan"), 0.1]}, ("nodes.all-failed", "must be > 0 with a sum < 1")),
        ({"weights": [-0.5, 0.5]}, ("nodes.all-failed", "must be > 0 with a sum < 1")),
        ({"receivers": [0, 1]}, ("nodes.all-failed", r"shares for peers \[0\] must be for others that are there")),
        ({"receivers": [1, 9]}, ("nodes.all-failed", r"shares for peers \[9\]")),
    ],
)
def test_an_invalid_relay_costs_a_peer_no_budget(said, refusal: tuple[str, ...], tmp_path, monkeypatch):
    send = PeerNetwork.message

    def lying(self, peer, category, kind, content, **more):
        return send(self, peer, category, kind, content, **(more | said if kind == "round" and peer == 0 else more))

    monkeypatch.setattr(PeerNetwork, "message", lying)
    app = client(moves_a_little, clip_norm=1.0, noise_multiplier=1.0)
    strategy = PushSum("directed-exponential-full", fraction_evaluate=0.0, name="n")
    with raises(RunError, *refusal):
        strategy.start(LocalGrid(lambda m, c: _alone(app, m, c), 3, folder=tmp_path), zeros(), 1)
    assert spent_so_far(tmp_path / "peer-0", DELTA).releases == ()


def _alone(app, message, context):
    """Answer as peer 0 does, and as a peer that fails for the others."""
    if context.node_config["partition-id"] and request_in(message).kind == "round":
        return Message(Error(2, "it is not there"), reply_to=message)
    return app(message, context)


def test_a_relay_cannot_introduce_uncounted_peers(tmp_path):
    start(tmp_path, 1, seal=True)
    grid = LocalGrid(client(moves_a_little, seal=True), 2, folder=tmp_path)
    state = state_in(tmp_path / "peer-0", "run")
    stranger = bytes.fromhex(public_key(tmp_path / "stranger"))
    asked = PeerRequest(
        "deliver",
        "run",
        0,
        wants_mass=True,
        round_index=2**62,
        mean_of=[0, 7],
        neighbors=[7],
        incarnations=[5],
        keys=[stranger],
    )
    (reply,) = grid.send_and_receive([Message(RecordDict({"privdec.says": asked.record()}), 100, "train")])
    assert not reply.has_error()
    assert "privdec.mass" not in reply.content  # a mask that the relay knows would be none
    assert state.model().any()


def test_a_hostile_message_writes_only_in_peers_folder(tmp_path):
    grid = LocalGrid(client(moves_a_little), 2, folder=tmp_path / "in")
    PushSum(name="../../out").start(grid, zeros(), 1)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_ledger_in_use_is_not_paid_from_twice(tmp_path):
    from flower_privdec.privacy.ledger.ledger import Ledger

    with Ledger(tmp_path, "peer-updates"), raises(BudgetError, "ledger.in-use"):
        PeerLedger(tmp_path, "run", 1, 0, DELTA).charge(1, 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_update_is_noised_on_a_grid(dtype: type) -> None:
    """Its digits show nothing of the update: what is released is a multiple of 2^-21 of the noise at least."""
    released = protected(1.0, 1.5, (np.full(4000, 1e-3) * np.pi).astype(dtype))
    step = grid_steps(np.array([1.5])).item()
    assert not np.any(np.remainder(released, step))


@pytest.mark.parametrize("is_full", [False, True])
def test_an_app_whose_charge_fails_does_not_train(is_full, tmp_path, monkeypatch):
    app, trained = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier=1.0, delta=DELTA)]), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(context.node_config["partition-id"])
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    def full(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(ledger_module.os, "write", full)
    with suppress(RunError):
        PushSum(name="e", fraction_evaluate=0.0).start(LocalGrid(app, 2, folder=tmp_path), zeros(), 2)
    assert bool(trained) != is_full


def test_an_update_is_clipped_by_name_without_counters(tmp_path):
    """What Flower 1.42's wrappers do not: BatchNorm's counter takes no share of the norm, and names pair arrays."""
    app = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier=1e-3)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content["arrays"]
        moved = {
            "counter": Array(np.array(100)),
            "last": Array(model["last"].numpy()),
            "first": Array(model["first"].numpy() + 0.5),
        }
        return Message(RecordDict({"arrays": ArrayRecord(moved)}), reply_to=message)

    initial = {"first": np.full(1, 10.0), "last": np.full(1, 20.0), "counter": np.array(0)}
    arrays = ArrayRecord({name: Array(value) for name, value in initial.items()})
    result = PushSum(fraction_evaluate=0.0).start(LocalGrid(app, 2, folder=tmp_path), arrays, 1)
    reached = {name: float(result.arrays[name].numpy().item()) for name in ("first", "last")}
    assert reached == pytest.approx({"first": 10.5, "last": 20.0}, abs=0.02)
