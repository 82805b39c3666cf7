"""Noise that cancels between peers of Flower nodes: a server that carries all has no secret of theirs."""

from __future__ import annotations

import hmac
import json
import os
from collections import Counter
from copy import deepcopy
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flower_runs
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import RunError
from flower_privdec.core import Mix, State
from flower_privdec.engine.run import run
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.view import pair_run
from flower_privdec.flower.apps.client_app import _take_rows, _take_shares, client_app
from flower_privdec.flower.apps.records import REQUEST, pack_messages
from flower_privdec.flower.apps.server_app import Relay, Sharded
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.flower.node_settings import HostSettings
from flower_privdec.flower.pair_keys import ANNOUNCEMENT, COUNT, PAIRS, PairKeys
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.peer.identity import Identity, public_key
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.privacy.noise.deployed import SharedNoise, SystemNoise
from flower_privdec.scenario import Scenario
from tools.battery.together_grid import TogetherGrid

COMPLETE = ["topology.name=complete", "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0}", "rounds=4"]
DIRECTED = [
    "privacy.noise={kind: cancelling, colluding: 1, secrets: ring, strength: 2.0}",
    "topology={name: directed-exponential, mixing_steps: 2}",
    "rounds=4",
]
FULL = "data.batch={sampling: full}"
HOSTS: dict[str, tuple[type[Relay] | type[Sharded], list[list[int]]]] = {
    "relay": (Relay, [[0], [1], [2], [3]]),
    "sharded": (Sharded, [[0, 1], [2, 3]]),
}
Draw = tuple[bytes, int, int]  # the key of a shared draw, the step, and the peer that adds it


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Draw]:
    """Record each draw that is shared."""
    drawn, add = list[Draw](), SharedNoise.add_

    def recording(source: SharedNoise, out: Any, std: Any, step: int, peers: Any, *rest: Any) -> None:
        assert source._key is not None
        drawn.append((source._key, step, int(peers[0])))
        add(source, out, std, step, peers, *rest)

    monkeypatch.setattr(SharedNoise, "add_", recording)
    return drawn


def assert_used_once(shared: list[Draw], ends: int | None = 2) -> None:
    """Check that no peer added a draw twice, and that so many peers added each."""
    assert shared
    assert max(Counter((key, peer) for key, _, peer in shared).values()) == 1
    if ends is not None:
        assert set(Counter(key for key, *_ in shared).values()) == {ends}


def content_of(message: Message) -> bytes:
    """Return every byte of a message's content."""
    records = [record.items() for record in message.content.values()]
    values = [value for record in records for _, value in record]
    return b"|".join(getattr(one, "data", one if isinstance(one, bytes) else repr(one).encode()) for one in values)


class Relaying:
    """A grid of deployed nodes, whose server may change what it carries."""

    def __init__(self, scenario: Scenario, host: str, folder: Path, **config: Any) -> None:
        self.strategy, self.shards = HOSTS[host]
        places, rendezvous = range(len(self.shards)), own_addresses(1)[0] if host == "sharded" else None
        identities = [public_key(folder / f"node-{place}") for place in places]
        keys_by_peer = {str(peer): identities[place] for place in places for peer in self.shards[place]}
        (folder / "known.json").write_text(json.dumps(keys_by_peer))
        more: dict[str, Any] = {"known-peers": str(folder / "known.json"), "colluding": 1} | config
        if rendezvous is not None:
            more |= {"shard-address": "127.0.0.1", "shard-rendezvous": rendezvous}
        configs = {
            place: {"ledger": str(folder / f"node-{place}"), "epsilon": 3.0, "delta": 1e-3, **more} for place in places
        }
        kind = TogetherGrid if host == "sharded" else LocalGrid
        self.scenario, self.folder = scenario, folder
        self.grid = kind(client_app(), len(places), config=configs)  # type: ignore[arg-type]
        for context in self.grid.contexts.values():
            context.node_config = {key: value for key, value in context.node_config.items() if value is not None}
        self._deliver, self.grid._deliver = self.grid._deliver, self.carried  # type: ignore[method-assign]
        self.sent = list[tuple[int, Message]]()
        self.replies = list[bytes]()
        self.announced: dict[int, list[ConfigRecord]] = {}

    def carried(self, message: Message) -> Message:
        """Carry a message to a node, and return its reply."""
        node = message.metadata.dst_node_id - 100
        self.sent.append((node, deepcopy(message)))
        self.change(node, message)
        reply = self._deliver(message)
        self.replies.append(b"" if reply.has_error() else content_of(reply))
        if message.metadata.message_type == "query.pairs" and not reply.has_error():
            self.announced.setdefault(node, []).append(reply.content.config_records[PAIRS])
        return reply

    def change(self, node: int, message: Message) -> None:
        """Change a message before it is carried."""

    def start(self, resume: bool = False) -> Path:
        self.strategy(self.scenario, self.folder / f"run-{self.scenario.rounds}", resume=resume).start(self.grid)
        return self.folder / f"run-{self.scenario.rounds}"

    def charged(self, node: int = 0) -> list[int]:
        """Return the steps that a node has charged, in order."""
        path = self.folder / f"node-{node}" / "ledger" / "digits.jsonl"
        return [entry.from_step for entry in read_chain(path)[1]] if path.exists() and path.stat().st_size else []


def privacy(out: Path) -> list[dict[str, Any]]:
    """Return what a summary says of each peer's privacy."""
    rows: list[dict[str, Any]] = json.loads((out / "summary.json").read_text())["privacy"]
    return rows


# --- what every runtime agrees on ---


@pytest.mark.parametrize("host", ["relay", "sharded"])
@pytest.mark.parametrize("settings", [COMPLETE, DIRECTED], ids=["complete", "two exchanges a round"])
def test_a_simulation_draws_what_the_engine_draws(settings: list[str], host: str, tiny: Tiny, tmp_path: Path) -> None:
    """Seeded pairs draw the same numbers in every runtime, and both figures of ε are the engine's."""
    run(Experiment.build(tiny(*settings)), tmp_path / "engine")
    out = flower_runs.run_under_flower(tiny(*settings), tmp_path / "flower", host)
    flower_runs.assert_same_run(out, tmp_path / "engine")
    ours, theirs = privacy(out), privacy(tmp_path / "engine")
    assert ours == theirs
    assert all(row["epsilon_if_all_collude"] > row["epsilon"] for row in ours)


@pytest.mark.parametrize("host", ["relay", "sharded"])
def test_it_is_gone_from_the_mean_of_deployed_nodes(
    host: str, tiny: Tiny, tmp_path: Path, shared: list[Draw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a round reaches the mean, and no peer has noise of its own, nodes compute what they would without noise."""
    add = SystemNoise._add_

    def none_of_its_own(source: SystemNoise, out: torch.Tensor, std: torch.Tensor) -> None:
        if source._key is not None:
            add(source, out, std)

    monkeypatch.setattr(SystemNoise, "_add_", none_of_its_own)
    relaying = Relaying(tiny(*COMPLETE, FULL), host, tmp_path)
    out = relaying.start()
    assert_used_once(shared)
    sessions = [context.state.config_records.get(PAIRS, {}) for context in relaying.grid.contexts.values()]
    hidden = {key for key, *_ in shared} | {session["private"] for session in sessions if session}
    assert not [reply for reply in relaying.replies if any(secret in reply for secret in hidden)]
    run(Experiment.build(tiny(*COMPLETE, FULL, "compute.generator=system", "privacy.noise=null")), tmp_path / "plain")
    rows, plain = flower_runs.final_rows(out)["x"], flower_runs.final_rows(tmp_path / "plain")["x"]
    torch.testing.assert_close(rows, plain)
    # By partners a complete graph of equal peers costs what it costs by the covariance of all.
    for ours, theirs in zip(privacy(out), privacy(run_of_engine(tiny, tmp_path, FULL)), strict=True):
        if_all_collude = pytest.approx(theirs["epsilon_if_all_collude"], rel=1e-6)
        assert ours == theirs | {"epsilon_if_all_collude": if_all_collude}


def run_of_engine(tiny: Tiny, tmp_path: Path, *settings: str) -> Path:
    """Run the scenario by the engine, with noise of the operating system, which costs the same."""
    run(Experiment.build(tiny(*COMPLETE, *settings, "compute.generator=system")), tmp_path / "engine")
    return tmp_path / "engine"


@pytest.mark.parametrize("host", ["relay", "sharded"])
def test_a_simulation_with_system_noise_agrees_on_secrets(
    host: str, tiny: Tiny, tmp_path: Path, shared: list[Draw]
) -> None:
    flower_runs.run_under_flower(tiny(*DIRECTED, "compute.generator=system"), tmp_path / "run", host)
    assert_used_once(shared)


def first_rows(relaying: Relaying) -> np.ndarray:
    """Return what each peer of a relayed run sends first, [n_peers, d], as the server has it."""
    rows: dict[int, np.ndarray] = {}
    carried = relaying.grid._deliver

    def read_by_the_server(message: Message) -> Message:
        reply, node = carried(message), message.metadata.dst_node_id - 100
        if message.metadata.message_type == "train.relay" and not reply.has_error():
            rows.setdefault(node, np.array(reply.content.array_records[f"peer-{node}"]["x"].numpy()))
        return reply

    relaying.grid._deliver = read_by_the_server  # type: ignore[method-assign]
    relaying.start()
    return np.stack([rows[node] for node in sorted(rows)])


@pytest.mark.parametrize(("settings", "shares"), [(COMPLETE, 4), (DIRECTED, 2)], ids=["complete", "two exchanges"])
def test_a_server_with_q_colluders_faces_the_charged_noise(
    settings: list[str], shares: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draw is a coordinate of its own here, so that the rows that the server has are the noise's coefficients."""
    coordinates: dict[object, int] = {}

    def on_its_own_coordinate(source: SystemNoise, out: torch.Tensor, std: torch.Tensor) -> None:
        name = source._key or ("own", len(coordinates))
        out[:, coordinates.setdefault(name, len(coordinates))] += std.to(out)

    scenario = tiny(*settings, FULL, "rounds=1")
    for source in (SystemNoise, SharedNoise):
        monkeypatch.setattr(source, "_add_", lambda source, out, std: None)
    plain = first_rows(Relaying(scenario, "relay", tmp_path / "plain"))
    for source in (SystemNoise, SharedNoise):
        monkeypatch.setattr(source, "_add_", on_its_own_coordinate)
    drawn = first_rows(Relaying(scenario, "relay", tmp_path / "drawn")) - plain
    drawn *= shares  # of which a peer sends one
    own = OwnParts.of(Agreement.of(scenario), secret=bytes(32))  # as the nodes plan
    assert own.protection is not None
    assert own.protection.pairs is not None
    needed, alone = own.protection.pairs.needed[0], own.protection.pairs.own[0]
    left: dict[int, list[float]] = {}
    for colluding in (1, 2, 3):
        for honest in combinations(range(4), 4 - colluding):
            others = [peer for peer in range(4) if peer not in honest]
            unknown = drawn[list(honest)] * (drawn[others] == 0).all(axis=0)
            deviations = np.diag(np.linalg.inv(unknown @ unknown.T)) ** -0.5
            left.setdefault(colluding, []).append(float(np.min(deviations / needed[list(honest)])))
    assert min(left[1]) >= 1 - 1e-6
    assert (min(left[1]) == pytest.approx(1, rel=1e-6)) is (settings is COMPLETE)  # whose partners are all others
    assert min(left[2]) < 0.99
    assert min(left[3]) == pytest.approx(alone.min(), rel=1e-6)


@pytest.mark.parametrize("host", ["relay", "sharded"])
def test_machines_on_which_seeded_noise_cannot_cancel_are_refused(
    host: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = count()
    monkeypatch.setattr("flower_privdec.experiment.run_name.cpu_model", lambda: f"machine {next(machines)}")
    code = {"relay": "noise.pair-machines", "sharded": "nodes.failed"}[host]
    with raises(RunError, code, "draw other noise of pairs|about to run something else"):
        flower_runs.run_under_flower(tiny(*COMPLETE, "compute.generator=null"), tmp_path / "run", host)


def test_a_node_plans_the_same_pair_noise_as_all(tiny: Tiny, tmp_path: Path) -> None:
    """So what q colluders, and q + 1, learn of the engine's noise they learn of the nodes'."""
    whole = Experiment.build(tiny(*DIRECTED)).own
    for peers in ([0], [1, 2], [3]):
        part = Experiment.build(tiny(*DIRECTED), np.array(peers)).own
        assert part.protection is not None
        assert whole.protection is not None
        one, other = part.protection.pairs, whole.protection.pairs
        assert one is not None
        assert other is not None
        assert np.array_equal(one.edges, other.edges)
        assert np.array_equal(one.needed, other.needed)
        assert (one.strength, one.colluding) == (other.strength, other.colluding)
        assert part.protection.epsilons(4) == [whole.protection.epsilons(4)[peer] for peer in peers]
        assert {**part.elsewhere, **part.keys} == whole.keys


# --- a server that is not to be trusted, and nodes that fail ---


def forged(relaying: Relaying, node: int, peer: int, honest: bytes) -> dict[str, bytes]:
    """Return what someone in between can put in the place of a peer's announcement to a node."""
    (relaying.folder / "stranger").mkdir(exist_ok=True)
    stranger, victim = (Identity(relaying.folder / name) for name in ("stranger", f"node-{node}"))
    identity = json.loads((relaying.folder / "known.json").read_text())[str(peer)]
    run_of_all = pair_run(Experiment.build(relaying.scenario))
    key = stranger.key_for(victim.public, run_of_all, b"pair announcement")
    sealed = hmac.digest(key, stranger.public + bytes.fromhex(identity), "sha256")
    return {
        "a key of its own": stranger.public + sealed,
        "a key of its own under the seal of another": stranger.public + honest[32:],
        "a key of which everyone knows the secret": bytes(32) + honest[32:],
        "a part": honest[:-1],
        "nothing": b"",
    }


FORGERIES = [
    "a key of its own",
    "a key of its own under the seal of another",
    "a key of which everyone knows the secret",
    "a part",
    "nothing",
    "that of another peer",
    "the node's own",
    "the node's own of an earlier session",
]


@pytest.mark.parametrize("forgery", FORGERIES)
def test_substituted_keys_are_found_before_any_release(
    forgery: str, tiny: Tiny, tmp_path: Path, shared: list[Draw]
) -> None:
    class Substituting(Relaying):
        def change(self, node: int, message: Message) -> None:
            if message.metadata.message_type == "query.pairs":
                self.announced[node] = [self._deliver(deepcopy(message)).content.config_records[PAIRS]]
            if message.metadata.message_type == "train.relay" and node == 0:
                announced = message.content.config_records[PAIRS]
                changed = forged(self, 0, 1, bytes(announced["1"])) | {  # type: ignore[arg-type]
                    "that of another peer": announced["2"],
                    "the node's own": self.announced[0][-1]["1"],
                    "the node's own of an earlier session": self.announced[0][0]["1"],
                }
                announced["1"] = changed[forgery]

    relaying = Substituting(tiny(*COMPLETE), "relay", tmp_path)
    with raises(RunError, "nodes.failed", "key that was announced for peer 1"):
        relaying.start()
    assert relaying.charged(0) == []
    assert not {peer for _, _, peer in shared} & {0}


@pytest.mark.parametrize("forgery", FORGERIES[:2])
def test_shards_between_whom_someone_puts_keys_stop(
    forgery: str, tiny: Tiny, tmp_path: Path, shared: list[Draw], monkeypatch: pytest.MonkeyPatch
) -> None:
    relaying, gather = Relaying(tiny(*COMPLETE), "sharded", tmp_path), ProcessGroup.gather

    def between(group: ProcessGroup, content: bytes) -> list[bytes]:
        gathered = gather(group, content)
        if group.shard == 0 and len(content) > 32:
            gathered[1] = forged(relaying, 0, 2, gathered[1][:ANNOUNCEMENT])[forgery] + gathered[1][ANNOUNCEMENT:]
        return gathered

    monkeypatch.setattr(ProcessGroup, "gather", between)
    with raises(RunError, "nodes.failed", "key that was announced for peer 2"):
        relaying.start()
    assert relaying.charged(0) == []
    assert not {peer for _, _, peer in shared} & {0, 1}


def test_a_node_whose_server_gives_it_another_scenario_stops(tiny: Tiny, tmp_path: Path, shared: list[Draw]) -> None:
    """It would count on noise that the others do not add."""

    class Lying(Relaying):
        def change(self, node: int, message: Message) -> None:
            if node == 3 and REQUEST in message.content.config_records:
                request = message.content.config_records[REQUEST]
                request["scenario"] = str(request["scenario"]).replace("epsilon: 3.0", "epsilon: 1.0")

    relaying = Lying(tiny(*COMPLETE), "relay", tmp_path)
    with raises(RunError, "nodes.failed", "another scenario, version"):
        relaying.start()
    assert not [node for node in range(4) if relaying.charged(node)]


def test_a_node_that_has_other_data_dealt_out_stops(tiny: Tiny, tmp_path: Path, shared: list[Draw]) -> None:
    """Its plan has less noise for the others than they add, or more."""
    rng = np.random.default_rng(0)
    for name, size in (("all", 120), ("more", 124)):
        x, y = rng.random((size, 8), dtype=np.float32), np.arange(size) % 4
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    scenario = tiny(*COMPLETE, f"data={{dataset: npz, root: {tmp_path}/all.npz, batch: {{size: 12}}}}")
    relaying = Relaying(scenario, "relay", tmp_path, **{"data-root": str(tmp_path / "all.npz")})
    relaying.grid.contexts[103].node_config["data-root"] = str(tmp_path / "more.npz")
    with raises(RunError, "nodes.failed", "number of examples there"):
        relaying.start()
    assert not shared


def test_an_old_sessions_announcement_repeats_no_draw(tiny: Tiny, tmp_path: Path, shared) -> None:
    """The node takes the key, which the other has forgotten: noise is left in the mean, and no draw is used twice."""

    class Replaying(Relaying):
        old: bytes | None = None

        def change(self, node: int, message: Message) -> None:
            announced = message.content.config_records.get(PAIRS)
            if announced is not None and node == 0 and message.metadata.message_type == "train.relay":
                announced["1"], self.old = self.old or announced["1"], announced["1"]  # type: ignore[assignment]

    relaying = Replaying(tiny(*COMPLETE), "relay", tmp_path)
    relaying.start()
    first = len(shared)
    relaying.strategy(relaying.scenario, tmp_path / "again").start(relaying.grid)
    assert_used_once(shared, ends=None)
    assert not {key for key, *_ in shared[:first]} & {key for key, *_ in shared[first:]}
    counts = Counter(key for key, *_ in shared[first:])
    assert sorted(counts.values()) == [1] * 2 * 4 + [2] * 5 * 4  # in each round the pair of peers 0 and 1 draws apart


class Failing(Relaying):
    """Nodes, of which one goes wrong at its third train message, once."""

    wrong: str | None = None

    def carried(self, message: Message) -> Message:
        node, context = message.metadata.dst_node_id - 100, self.grid.contexts[message.metadata.dst_node_id]
        mark, before = self.folder / "node-1" / COUNT, deepcopy(context.state)
        text = mark.read_text() if mark.exists() else ""
        reply = super().carried(message)
        third = sum(place == 1 and one.metadata.message_type == "train.relay" for place, one in self.sent) == 3
        if node == 1 and self.wrong is not None and third:
            wrong, self.wrong = self.wrong, None
            if wrong == "died after it had replied":
                context.state = before
            elif wrong == "restored its folder":
                mark.write_text(text)
            elif wrong == "lost its folder's count":
                mark.unlink()
            elif wrong == "restarted":
                context.state = RecordDict()
            elif wrong == "dropped out":
                return Message(Error(2, "it dropped out"), reply_to=message)
        return reply


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("died after it had replied", "does not continue the session"),
        ("restored its folder", "does not continue the session"),
        ("lost its folder's count", "does not continue the session"),
        ("restarted", "has lost its state"),
        ("dropped out", "it dropped out"),
    ],
)
def test_a_rolled_back_node_is_taken_again(
    wrong: str, words: str, tiny: Tiny, tmp_path: Path, shared: list[Draw], caplog: pytest.LogCaptureFixture
) -> None:
    """A node whose context or folder is an old copy would take a step again, with the draws that it has released."""
    relaying = Failing(tiny(*COMPLETE, "evaluation.every=1"), "relay", tmp_path)
    relaying.wrong = wrong
    out = relaying.start()
    assert f"peer 1 is gone in round 1, and the others go on without it: {words}" in caplog.text.replace(
        "this message ", ""
    ).replace("the node of peers [1] ", "")
    assert "peer 1 is there again: it goes on with round 2" in caplog.text
    assert relaying.charged(1) == [0, 1, 2, 3]
    assert "gone" not in json.loads((out / "summary.json").read_text())
    assert_used_once(shared, ends=None)
    matched = Counter(
        step for (key, step), ends in Counter((key, step) for key, step, _ in shared).items() if ends == 2
    )
    assert (matched[0], matched[2], matched[3]) == (6, 6, 6)


class Leaving(Relaying):
    """Nodes, of which some answer nothing any more from a round on."""

    gone_from: dict[int, int]
    error = Error(2, "its machine burnt")
    is_from_superlink = False

    def carried(self, message: Message) -> Message:
        node = message.metadata.dst_node_id - 100
        starts = sum(place == node and one.metadata.message_type == "train.relay" for place, one in self.sent)
        if starts >= 2 * self.gone_from.get(node, 10**6):  # of two messages a round
            reply = Message(self.error, reply_to=message)
            if self.is_from_superlink:
                reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        return super().carried(message)


def test_a_node_that_is_gone_costs_the_others_noise(tiny: Tiny, tmp_path: Path, shared: list[Draw]) -> None:
    """It is no partner from the next round on; each of the others has the noise that it needs, and goes on."""
    settings = [*COMPLETE, "rounds=5", "evaluation.every=1", "privacy.noise.absent=1"]
    relaying = Leaving(tiny(*settings), "relay", tmp_path)
    relaying.gone_from = {3: 2}
    out = relaying.start()
    summary = json.loads((out / "summary.json").read_text())
    assert "peer 3 in round 2 (its machine burnt)" in summary["gone"]
    assert relaying.charged(0) == [0, 1, 2, 3, 4]
    assert relaying.charged(3) == [0, 1]
    assert_used_once(shared, ends=None)
    ends = Counter((key, step) for key, step, _ in shared)
    assert sorted(step for (_, step), count in ends.items() if count == 1) == [2] * 3
    assert Counter(step for (_, step), count in ends.items() if count == 2) == {0: 6, 1: 6, 2: 3, 3: 3, 4: 3}
    assert privacy(out)[0]["epsilon"] == privacy(run_of_engine(tiny, tmp_path, *settings[1:]))[0]["epsilon"]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_node_that_its_superlink_lost_is_named(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flower's SuperLink answers in the node's place, under its own id."""
    settings = [*COMPLETE, "rounds=4", "evaluation.every=1", "privacy.noise.absent=1"]
    relaying = Leaving(tiny(*settings), "relay", tmp_path)
    relaying.gone_from = {3: 2}
    relaying.error = Error(5, "Error: Node Unavailable - The destination node failed to report a heartbeat")
    relaying.is_from_superlink = True
    out = relaying.start()
    assert (
        "peer 3 in round 2 (its SuperNode gives no sign of life)"
        in json.loads((out / "summary.json").read_text())["gone"]
    )
    told = caplog.text.replace("the SuperNode of ", "")
    assert "peer 3 is gone in round 2, and the others go on without it: its SuperNode gives no sign of life" in told
    assert "It takes part again when a SuperNode with its partition-id is there" in told
    assert "heartbeat" not in caplog.text


def test_a_run_of_one_node_ends_and_resumes(tiny: Tiny, tmp_path: Path) -> None:
    relaying = Leaving(tiny(*COMPLETE, "evaluation.every=1"), "relay", tmp_path, epsilon=9.0)
    relaying.gone_from = {1: 1, 2: 1, 3: 2}
    with raises(RunError, "nodes.failed", "fewer than two others are there"):
        relaying.start()
    relaying.gone_from = {}
    out = relaying.start(resume=True)
    assert "gone" not in json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("weights", ["column-stochastic", "metropolis"])
def test_a_lost_node_takes_only_its_own_mass(weights: str) -> None:
    """Whether the sender weighs what it sends, or the receiver: the others' sum stays what it was."""
    n_peers, lost = 6, 2
    mixing = Mixing(build_topology("ring", n_peers), weights)
    algorithm = SimpleNamespace(program=(Mix(("x", "w")),))
    states = []
    for peer in range(n_peers):
        rows = {
            "x": torch.full((1, 3), float(peer**2), dtype=torch.float64),
            "w": torch.ones(1, 1, dtype=torch.float64),
        }
        states.append(State(np.array([peer]), rows=rows, waiting=True))
    content = RecordDict()
    for peer, state in enumerate(states):
        if peer != lost:
            for key, record in pack_messages(
                algorithm.program[0], algorithm.program[0].outgoing(state, mixing)
            ).items():
                content[key] = record

    others = [state for peer, state in enumerate(states) if peer != lost]
    before = sum(state.rows["x"] for state in others)
    for state in others:
        if mixing.sends_shares:
            _take_shares(algorithm, state, mixing, [lost], content)  # type: ignore[arg-type]
        else:
            _take_rows(algorithm, state, mixing.without([lost]), content)  # type: ignore[arg-type]
    torch.testing.assert_close(sum(state.rows["x"] for state in others), before)
    torch.testing.assert_close(sum(state.rows["w"] for state in others), torch.full((1, 1), 5.0, dtype=torch.float64))
    assert not torch.equal(others[0].rows["x"], torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize(("absent", "lost"), [([0], []), ([7], []), ([1], [2])])
def test_a_server_declares_only_other_nodes_gone(
    absent: list[int], lost: list[int], tiny: Tiny, tmp_path: Path
) -> None:
    class Lying(Relaying):
        def change(self, node: int, message: Message) -> None:
            if node == 0 and message.metadata.message_type == "train.relay":
                message.content.config_records[REQUEST]["absent"] = absent
                message.content.config_records[REQUEST]["lost"] = lost

    with raises(RunError, "nodes.failed", "the server says that peers"):
        Lying(tiny(*COMPLETE), "relay", tmp_path).start()


def test_a_repeated_message_repeats_no_draw(tiny: Tiny, tmp_path: Path, shared) -> None:
    """From its own state a node goes on, and a message that would begin again finds the key used."""
    relaying = Relaying(tiny(*COMPLETE), "relay", tmp_path)
    relaying.start()
    trains = [message for node, message in relaying.sent if node == 0 and "train" in message.metadata.message_type]
    replies = [relaying._deliver(deepcopy(message)) for message in trains]
    assert "does not continue the session" in replies[0].error.reason
    assert_used_once(shared, ends=None)


def test_a_session_ends_when_another_begins(tiny: Tiny, tmp_path: Path, shared) -> None:
    """Of two messages at once the one that fails leaves the old context, and a second run would hide that."""

    class Remembering(Relaying):
        def change(self, node: int, message: Message) -> None:
            if node == 0 and message.metadata.message_type == "train.relay" and not hasattr(self, "first"):
                self.first, self.context = deepcopy((message, self.grid.contexts[100].state))

    relaying = Remembering(tiny(*COMPLETE, "rounds=1"), "relay", tmp_path, epsilon=9.0)
    relaying.start()
    Relaying(tiny(*COMPLETE, "rounds=2"), "relay", tmp_path, epsilon=9.0).start()
    relaying.grid.contexts[100].state = relaying.context
    assert "does not continue the session" in relaying._deliver(relaying.first).error.reason
    assert_used_once(shared)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"known-peers": None}, [], "for this SuperNode's owner to allow"),
        ({"colluding": None}, [], "for this SuperNode's owner to allow"),
        ({"colluding": 2}, [], "privacy.noise.colluding=1 must be >= colluding=2"),
        ({}, ["privacy.noise.secrets={name: edge-list, file: edges.txt}"], "is not a server's to name"),
    ],
)
@pytest.mark.parametrize("host", ["relay", "sharded"])
def test_a_server_does_not_choose_who_shares_noise(
    config: dict[str, Any],
    settings: list[str],
    words: str,
    host: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 3\n3 0\n")
    monkeypatch.chdir(tmp_path)
    relaying = Relaying(tiny(*COMPLETE, *settings), host, tmp_path, **config)
    with raises(RunError, "nodes.failed", words):
        relaying.start()


def test_a_peer_whose_identity_is_not_known_is_named(tiny: Tiny, tmp_path: Path) -> None:
    relaying = Relaying(tiny(*COMPLETE), "relay", tmp_path)
    keys_by_peer = json.loads((tmp_path / "known.json").read_text())
    (tmp_path / "known.json").write_text(json.dumps({peer: key for peer, key in keys_by_peer.items() if peer != "2"}))
    with raises(RunError, "nodes.failed", "peer 2 has no key in known.json"):
        relaying.start()


def test_a_secret_binds_identities_and_session_keys(tiny: Tiny, tmp_path: Path) -> None:
    """A copy of a node's context, which has a session's key, does not make the session's secrets."""
    scenario, private = Relaying(tiny(*COMPLETE), "relay", tmp_path).scenario, os.urandom(32)
    nodes = [
        PairKeys(
            HostSettings(False, tmp_path / f"node-{peer}", known_peers=tmp_path / "known.json"),
            Experiment.build(scenario, np.array([peer])),
            private if peer == 0 else None,
        )
        for peer in range(4)
    ]
    for peer, node in enumerate(nodes):
        node.learn({other: nodes[other].announcement(peer) for other in node.partners})
    copy = AgreedSecrets([0], pair_run(Experiment.build(scenario)), "0123", private)
    copy.learn(1, nodes[1].secrets.public)
    assert nodes[0].secrets.of(0, 1) == nodes[1].secrets.of(1, 0) != copy.of(0, 1)
