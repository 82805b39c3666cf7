"""Shares that are added exactly once: mass under every schedule of faults, and the engine's numbers without any."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from hosting import hosting
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import mutated
from raising import raises
from relay_schedules import run_relay_schedule
from safetensors.torch import load, save
from share_machines import commit, shake
from share_schedules import Differences, Exact, run_schedule

from flower_privdec.common.errors import ArgumentError, RunError
from flower_privdec.core import advance
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.pushsum import exactly_once
from flower_privdec.pushsum.exactly_once import FIRST, LAST, PushSumProtocol, RefusedError, StaleStateError
from flower_privdec.pushsum.frames import COUNTERS, FrameCodec, RowMass, TensorArithmetic, formats_of, pack, unpack
from flower_privdec.scenario import Scenario

CHUNK = 200
TRIES = 1_000  # schedules that a mutant may survive


# The law: mass is exactly what it was, plus updates, whatever happens.


@pytest.mark.parametrize("first", range(0, 8 * CHUNK, CHUNK))
def test_mass_is_exact_for_every_schedule_of_faults(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_schedule(Random(seed), events=50)


def run_schedules(seeds: Iterable[int], code: ModuleType) -> None:
    for seed in seeds:
        run_schedule(Random(seed), code, events=50)
        run_schedule(Random(seed), code, events=50, lost_disks=True)


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_mass_is_exact_for_schedules_that_can_be_shrunk(draw: Random) -> None:
    run_schedule(draw, events=30)


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_mass_is_exact_when_differences_are_sent(draw: Random) -> None:
    run_schedule(draw, events=40, arithmetic=Differences())


def run_differences(seeds: Iterable[int], code: ModuleType) -> None:
    for seed in seeds:
        run_schedule(Random(seed), code, events=50, arithmetic=Differences())
        run_schedule(Random(seed), code, events=50, lost_disks=True, arithmetic=Differences())


DIFFERENCE_MUTANTS = {
    "what was told is forgotten": ("frozen=frozen, told=shared.told", "frozen=frozen"),
    "what was heard is forgotten": ("received_boot=share.boot, heard=heard", "received_boot=share.boot"),
    "a new incarnation remembers what it told": (
        "Edge(edge.incarnation) for j, edge in self.edges.items()}\n        self._inbox",
        "Edge(edge.incarnation, told=edge.told) for j, edge in self.edges.items()}\n        self._inbox",
    ),
    "a new incarnation is told by the old one's model": (
        "self.edges[neighbor] = Edge(incarnation)",
        "self.edges[neighbor] = Edge(incarnation, told=self.edges[neighbor].told)",
    ),
    "a new incarnation is heard by the old one's model": (
        "self.edges[neighbor] = Edge(incarnation)",
        "self.edges[neighbor] = Edge(incarnation, heard=self.edges[neighbor].heard)",
    ),
    "a share returns by the wrong model": ("self._told_before.get(neighbor, {})", "self.edges[neighbor].told"),
}


@pytest.mark.parametrize("name", DIFFERENCE_MUTANTS)
def test_a_mutant_that_loses_a_told_model_is_caught(name: str) -> None:
    code = mutated(exactly_once, *DIFFERENCE_MUTANTS[name])
    with pytest.raises((AssertionError, RunError)):
        run_differences(range(TRIES), code)


MUTANTS = {
    "no dedupe": ("if number <= edge.received:", "if number < 0:"),
    "a gap is accepted": (
        "if number > expected:",
        "if False:",
        "if number == expected:",
        "if number >= expected:",
    ),
    "acknowledged before the commit": (
        "edge = self._on_disk(neighbor)\n            if",
        "edge = self.edges[neighbor]\n            if",
    ),
    "acknowledged when it comes in": (
        "held.append(share)",
        "self.edges[share.sender] = replace(edge, received=number, received_boot=share.boot)",
    ),
    "sent before the commit": (
        "return [share for share in on_disk if share in self.edges[neighbor].frozen]",
        "return list(self.edges[neighbor].frozen)",
    ),
    "counters are not restored": ("self.edges.update(durable.edges)", "pass"),
    "counters of what came in are not restored": (
        "self.edges.update(durable.edges)",
        "self.edges.update({j: replace(edge, received=0, received_boot=0) for j, edge in durable.edges.items()})",
    ),
    "an unacknowledged share is taken back": (
        "frozen = (*edge.frozen, share)",
        "frozen = (share,)",
        "and len(edge.frozen) < self._window",
        "",
    ),
    "other values are subtracted than sent": (
        "self._arithmetic.subtract(self.mass[name], part)",
        "self._arithmetic.subtract(self.mass[name], part + part / 4096)",
    ),
    "an acknowledgement of the future is believed": ("if ack.number > disk.sent or", "if False and ack.number or"),
    "an acknowledgement of another share is believed": (
        "is_another = boots.get(ack.number, ack.share_boot) != ack.share_boot",
        "is_another = False",
    ),
    "a share is replaced at each try": (
        "return [share for share in on_disk if share in self.edges[neighbor].frozen]",
        "edge = self.edges[neighbor]\n"
        "        return [replace(s, values=self._frozen(0.5, edge).values) for s in on_disk if s in edge.frozen]",
    ),
    "a share for a dead incarnation is absorbed": (
        "if (incarnation, addressed) != (edge.incarnation, self.incarnation):",
        "if incarnation != edge.incarnation:",
    ),
    "a share of a forgotten boot is absorbed": ("if share.boot != boot:", "if False:"),
    "everything is given away": ("self._frozen(weight / rest, edge)", "self._frozen(1 / max(1, len(ready)), edge)"),
    "a rollback is not noticed": ("if theirs.seen > mine.sent:", "if False:"),
    "forgotten shares are not noticed": ("if theirs.acknowledged > mine.received:", "if False:"),
    "a hello reports what is not on disk": (
        "received=edge.received,\n            seen",
        "received=seen,\n            seen",
    ),
    "an old hello is believed": ("if theirs.answers != self._challenges[neighbor]:", "if False:"),
    "a new incarnation keeps its mass": ("self._arithmetic.nothing(self.mass[name])", "self.mass[name]"),
    "a new incarnation keeps its counters": (
        "self.edges = {j: Edge(edge.incarnation) for j, edge in self.edges.items()}",
        "pass",
    ),
    "a share is taken back from the dead": ("if share in on_disk:", "if False:"),
    "a liar is believed": ("if theirs.sender in self._greeted or is_far:", "if is_far:"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    code = mutated(exactly_once, *MUTANTS[name])
    with pytest.raises((AssertionError, RunError)):
        run_schedules(range(TRIES), code)


@pytest.mark.parametrize("window", [1, 3, LAST])
def test_mass_is_exact_for_every_schedule_of_a_relay(window: int) -> None:
    schedules = [run_relay_schedule(Random(seed), window=window) for seed in range(300)]
    most = max(schedule.most for schedule in schedules)
    assert most == window if window < LAST else most > 3


def run_relay_schedules(seeds: Iterable[int], code: ModuleType) -> None:
    for seed in seeds:
        run_relay_schedule(Random(seed), code)


RELAY_MUTANTS = {
    "one share under way alone": ("len(edge.frozen) < self._window", "not edge.frozen"),
    "one more share than the window": ("len(edge.frozen) < self._window", "len(edge.frozen) <= self._window"),
    "no dedupe": ("if number <= edge.received:", "if number < 0:"),
    "a gap is accepted": (
        "if number > expected:",
        "if False:",
        "if number == expected:",
        "if number >= expected:",
    ),
    "a gap closes an edge that no handshake opens": ("if neighbor not in self._agreed:", "if False:"),
    "an acknowledgement is of one share": ("if share.number > number)", "if share.number != number)"),
    "an introduction acknowledges nothing": (
        "self._unacknowledged.add(neighbor)\n\n    def has_introduced",
        "\n    def has_introduced",
    ),
    "a dead incarnation is introduced": ("if incarnation < edge.incarnation:", "if False:"),
    "a new incarnation is not met": ("if incarnation > edge.incarnation:", "if False:"),
    "an introduced neighbour is forgotten": (
        "self.edges.setdefault(neighbor, Edge())",
        "self.edges[neighbor] = Edge()",
    ),
    "an old copy is not noticed": ("if ack.number > disk.sent or", "if False and ack.number or"),
    "counters are not restored": ("self.edges.update(durable.edges)", "pass"),
    "sent before the commit": (
        "return [share for share in on_disk if share in self.edges[neighbor].frozen]",
        "return list(self.edges[neighbor].frozen)",
    ),
    "acknowledged before the commit": (
        "edge = self._on_disk(neighbor)\n            if",
        "edge = self.edges[neighbor]\n            if",
    ),
}


@pytest.mark.parametrize("name", RELAY_MUTANTS)
def test_relay_schedules_catch_every_mutant(name: str) -> None:
    code = mutated(exactly_once, *RELAY_MUTANTS[name])
    with pytest.raises((AssertionError, RunError, KeyError)):
        run_relay_schedules(range(TRIES), code)


# What the module promises, one sentence after the other.


def peers(n: int = 2) -> list[PushSumProtocol[float]]:
    """Return peers of a complete graph, each begun, on disk and open with all others."""
    made = [machine(i, n) for i in range(n)]
    for each in made:
        each.committed(each.snapshot(0))
    for each in made:
        for other in made:
            if other is not each:
                shake(each, other)
    return made


def machine(i: int, n: int = 2, boot: int | None = None, w: int = 1) -> PushSumProtocol[float]:
    mass = {"x": 8.0 * i, "w": float(w)}
    return PushSumProtocol(i, range(n), 100 + i if boot is None else boot, mass, Exact())


def restarted(old: PushSumProtocol[float], boot: int, durable: Any = None) -> PushSumProtocol[float]:
    new = machine(old.peer, len(old.edges) + 1, boot)
    new.restore(old._durable if durable is None else durable)
    return new


def exchange(a: PushSumProtocol[float], b: PushSumProtocol[float]) -> Any:
    """Send a share from one to another, which takes it, commits and acknowledges it."""
    a.split(0, {b.peer: 0.5})
    commit(a)
    (share,) = a.shares_to_send()
    assert b.receive(share)
    b.absorb()
    commit(b)
    (word,) = b.acknowledgements()
    assert a.acknowledge(word)
    return share


def test_weights_for_unready_neighbours_stay_in_the_column() -> None:
    a, b, *_ = peers(4)
    a.close(3)
    assert a.split(0, {1: 0.25, 2: 0.25, 3: 0.25}) == [1, 2]
    assert a.mass["w"] == 1 - 2 * 341 / 1024  # 1 / (ready + 1), as cast
    assert b.split(0, {0: 0.5, 2: 0.125}) == [0, 2]
    assert b.mass["w"] == 3 / 8  # the round's own column where all are ready


def test_nothing_leaves_before_commit_and_retries_are_identical() -> None:
    a, b = peers()
    a.split(0, {1: 0.5})
    assert a.shares_to_send() == []
    pending = a.snapshot(1)
    assert a.shares_to_send() == []
    a.committed(pending)
    (share,) = a.shares_to_send()
    assert a.shares_to_send()[0] is share
    assert b.receive(share)
    assert b.absorb() == [share]
    assert b.acknowledgements() == []
    assert b.uncommitted() == {0}
    commit(b)
    assert [word.number for word in b.acknowledgements()] == [1]
    assert b.acknowledgements() == []
    assert not b.receive(share)  # again: acknowledged, not added
    assert [word.number for word in b.acknowledgements()] == [1]


def test_a_lost_peer_strands_one_share_an_edge() -> None:
    a, b, c = peers(3)
    for _ in range(20):
        a.split(0, {1: 1 / 3, 2: 1 / 3})
        commit(a)
        for share in a.shares_to_send():
            if share.receiver == 1:
                b.receive(share)
        b.absorb()
        commit(b)
        for word in b.acknowledgements():
            a.acknowledge(word)
    assert b.mass["w"] + a.mass["w"] == 2 - 341 / 1024
    assert c.mass["w"] == 1


def test_an_old_checkpoint_is_noticed_and_restarts_empty() -> None:
    a, b = peers()
    old = a._durable
    exchange(a, b)
    back = restarted(a, 7, old)
    with raises(StaleStateError, "share.stale", names="peer 0"):
        shake(b, back)
    with raises(RunError, "share.stale"):
        back.split(0, {1: 0.5})
    back.reset()
    with raises(RunError, "share.uncommitted"):
        back.hello(1)
    commit(back)
    shake(back, b)
    assert back.mass == {"x": 0, "w": 0}
    assert back.incarnation > FIRST
    assert back.is_open(1)
    assert b.is_open(0)
    exchange(b, back)
    assert back.mass["w"] > 0


def test_a_peer_without_weight_adopts_its_first_shares() -> None:
    a, b = peers()
    a.mass["w"] = 0.0
    b.mass["x"] = 3.0
    for number, weight in ((1, 0.5 + 4.0), (2, 0.5 + 4.0 + 0.25)):  # added once, to the first
        b.split(0, {0: 0.5})
        commit(b)
        (share,) = b.shares_to_send()
        assert a.receive(share)
        assert a.absorb(first_weight=4.0) == [share]
        assert (share.number, a.mass["w"]) == (number, weight)
        assert a.mass["x"] == 3.0 * weight
        commit(a)
        (word,) = a.acknowledgements()
        b.acknowledge(word)


def test_a_forgotten_incarnation_is_not_reused() -> None:
    a, b = peers()
    old = a._durable
    exchange(a, b)
    for boot, count in ((7, 2), (9, 3)):
        back = restarted(a, boot, old)
        with pytest.raises(StaleStateError):
            shake(b, back)
        back.reset()
        commit(back)
        shake(back, b)
        assert back.incarnation == count << 32 | boot


def test_an_old_frame_never_changes_anything() -> None:
    a, b = peers()
    first, second = exchange(a, b), exchange(a, b)
    mass = dict(b.mass)
    for share in (first, second, first):
        assert not b.receive(share)
    assert b.absorb() == []
    anew = restarted(b, 7)
    with raises(RefusedError, "edge.closed", names="peer 1"):
        anew.receive(second)
    shake(anew, a)
    assert not anew.receive(second)
    assert b.mass == anew.mass == mass


def test_a_late_commit_undoes_no_later_one() -> None:
    a, _ = peers()
    early, late = a.snapshot(1), a.snapshot(2)
    a.committed(late)
    with raises(RunError, "share.commit-order", names="2 .* 3"):
        a.committed(early)


def test_a_state_of_other_neighbours_is_refused() -> None:
    a, _ = peers()
    with raises(RunError, "share.other-neighbors", names=r"\[1\].*\[1, 2\]"):
        machine(0, 3).restore(a._durable)


def test_shares_for_dead_incarnations_are_stranded_or_refused() -> None:
    a, b = peers()
    a.split(0, {1: 0.5})
    b.split(0, {0: 0.5})
    commit(a, b)
    (late,), (lost,) = a.shares_to_send(), b.shares_to_send()
    a.reset()
    commit(a)
    shake(a, b)
    assert b.orphaned == {0: 1}
    assert b.mass["w"] == 1 / 2
    with raises(RefusedError, "edge.incarnation", names="0x100000000"):
        b.receive(late)
    with raises(RefusedError, "edge.incarnation", names="0x100000000"):
        a.receive(lost)


def test_an_uncommitted_share_returns_when_its_receiver_died() -> None:
    a, b = peers()
    a.split(0, {1: 0.5})
    b.reset()
    commit(b)
    shake(b, a)
    assert a.mass["w"] == 1
    assert not a.orphaned


def test_a_number_frozen_twice_is_noticed() -> None:
    a, b = peers()
    old = a._durable
    a.split(0, {1: 0.5})
    commit(a)
    forked = restarted(a, 7, old)
    b.close(0)
    shake(forked, b)
    forked.split(0, {1: 0.5})
    commit(forked)
    b.receive(forked.shares_to_send()[0])  # b has share 1 of life 7, and a's disk is put back to share 1 of life 100
    with raises(StaleStateError, "share.stale"):
        shake(b, restarted(a, 9))


def test_statements_from_before_a_start_are_not_believed() -> None:
    a, b = peers()
    a.split(0, {1: 0.5})
    commit(a)
    (share,) = a.shares_to_send()
    old = b._durable
    b.receive(share)
    b.absorb()
    commit(b)
    (word,) = b.acknowledgements()
    back = restarted(b, 7, old)
    shake(back, a)
    with raises(RefusedError, "share.acknowledgement"):
        a.acknowledge(word)
    assert back.receive(share)
    stale = b.hello(0)
    shake(restarted(a, 8), back)
    assert back.is_open(0)
    with pytest.raises(RunError):
        back.acknowledge(word)
    assert stale.boot == b.boot


def test_a_hello_tells_what_arrived_before_it_is_stored() -> None:
    a, b = peers()
    a.split(0, {1: 0.5})
    commit(a)
    b.receive(a.shares_to_send()[0])
    told = b.hello(0)
    assert (told.received, told.seen) == (0, 1)


def test_a_liar_is_refused_and_changes_nothing() -> None:
    a, b = peers()
    exchange(a, b)
    before, truth = dict(a.mass), replace(b.hello(0), answers=a.hello(1).challenge)
    for lie in ({"seen": LAST, "received": LAST}, {"seen_boot": 5}, {"sent": LAST, "acknowledged": LAST - 1}):
        with raises(RefusedError, "edge.lie"):
            a.receive_hello(replace(truth, **lie))
        shake(a, b)
    with raises(RefusedError, "edge.lie"):
        a.receive_hello(replace(truth, knows=LAST))
    with raises(RefusedError, "edge.counters"):
        a.receive_hello(replace(truth, acknowledged=3))
    assert a.mass == before
    assert a.incarnation == FIRST


def test_a_claim_exhausting_incarnations_is_refused() -> None:
    a, b = peers()
    back = restarted(a, 7)
    truth = replace(b.hello(0), answers=back.hello(1).challenge)
    with raises(RefusedError, "edge.lie"):
        back.receive_hello(replace(truth, knows=LAST))
    shake(back, b)
    assert back.is_open(1)


def test_the_last_number_of_edge_or_incarnation_is_final() -> None:
    a, _ = peers()
    a.edges[1] = replace(a.edges[1], sent=LAST)
    assert not a.is_ready(1)
    assert a.split(0, {1: 0.5}) == []
    assert a.mass["w"] == 1
    a.incarnation = LAST
    with raises(RunError, "share.last-incarnation"):
        a.reset()


@pytest.mark.parametrize(
    ("change", "names"), [({"sender": 9}, "peer 9 .* peer 0"), ({"receiver": 1}, "peer 1 .* peer 1")]
)
def test_a_hello_of_something_else_is_refused(change: dict[str, Any], names: str) -> None:
    a, b = peers()
    with raises(RefusedError, "edge.neighbor", names=names):
        a.receive_hello(replace(b.hello(0), **change))


@pytest.mark.parametrize("weights", [{1: 1.0}, {1: 0.0}, {1: -0.5}, {1: float("nan")}])
def test_weights_that_leave_the_peer_nothing_are_refused(weights: dict[int, float]) -> None:
    a, _ = peers()
    with raises(RunError, "share.weights"):
        a.split(0, weights)


def test_a_share_making_the_mass_infinite_is_refused() -> None:
    largest = torch.finfo(torch.float32).max
    a, b = (
        PushSumProtocol(i, [0, 1], 5 + i, {"x": torch.full((3,), largest), "w": torch.ones(())}, TensorArithmetic())
        for i in range(2)
    )
    commit(a, b)
    shake(a, b)
    a.split(0, {1: 0.5})
    commit(a)
    b.receive(a.shares_to_send()[0])
    assert b.absorb() == []
    assert b.rejected == {0: 1}
    assert torch.equal(b.mass["x"], torch.full((3,), largest))
    assert not b.is_open(0)


def test_the_machine_has_no_sockets_clocks_or_files() -> None:
    allowed = {"__future__", "collections", "collections.abc", "dataclasses", "typing", "flower_privdec.common.errors"}
    tree = ast.parse(inspect.getsource(exactly_once))
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
    assert {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} <= allowed


# Without faults: the engine's numbers.


class Peer:
    """A networked peer without its network: one row of an experiment, with its shares."""

    def __init__(self, agreement: Agreement, peer: int) -> None:
        own = hosting(agreement, [peer])
        self.algorithm, self.cohort, self.peer = own.algorithm, own.cohort(), peer
        self.state = own.initial_state(self.cohort)
        mass = RowMass(self.state, ("x", "w"))
        self.shares = PushSumProtocol(peer, range(agreement.scenario.n_peers), peer + 1, mass, TensorArithmetic())
        commit(self.shares)

    def split(self) -> None:
        assert advance(self.algorithm, self.cohort, self.state) is not None
        assert self.cohort.mixing is not None
        round_index = self.state.round_index
        terms = self.cohort.mixing.matrix(round_index).terms()
        column = {receiver: weight for sender, receiver, weight in terms if sender == self.peer != receiver}
        assert self.shares.split(round_index, column) == sorted(column)
        commit(self.shares)

    def finish(self) -> None:
        self.shares.absorb(self.state.round_index)
        assert self.cohort.mixing is not None
        if self.cohort.mixing.topology.period == 1:  # the next round uses the same edges
            commit(self.shares)
        self.state.at, self.state.waiting = self.state.at + 1, False
        assert advance(self.algorithm, self.cohort, self.state) is None


def network_round(network: list[Peer]) -> None:
    for each in network:
        each.split()
    for each in network:
        for share in each.shares.shares_to_send():
            network[share.receiver].shares.receive(share)
    for each in network:
        each.finish()
    for each in network:
        for word in each.shares.acknowledgements():
            network[word.receiver].shares.acknowledge(word)


def test_a_state_packs_and_unpacks_bit_for_bit() -> None:
    rows = {"x": torch.randn(5), "w": torch.tensor(1.0)}
    a, *others = (PushSumProtocol(i, range(3), LAST - i, dict(rows), TensorArithmetic()) for i in range(3))
    commit(a, *others)
    for other in others:
        shake(a, other)
    a.split(0, {1: 0.25, 2: 0.25})
    durable = a.snapshot(3)
    facts, tensors = pack(durable)
    assert sorted(tensors) == ["frozen.0.w", "frozen.0.x"]  # two edges, one tensor
    again = unpack(0, json.loads(json.dumps(facts)), load(save(tensors)), durable.mass)
    assert (again.incarnation, again.round_index) == (durable.incarnation, 3)
    frames = FrameCodec(b"run", formats_of(rows))
    for j, edge in durable.edges.items():
        assert replace(edge, frozen=()).__dict__ == replace(again.edges[j], frozen=()).__dict__
        (share,), (other,) = edge.frozen, again.edges[j].frozen
        assert b"".join(frames.encode(share)) == b"".join(frames.encode(other))
    counters, _ = facts["edges"]["1"]
    counters[COUNTERS.index("sent")] = 2
    with raises(ArgumentError, "frame.last-share", "peer 1"):
        unpack(0, facts, tensors, durable.mass)
    counters[COUNTERS.index("sent")] = -1
    with raises(ArgumentError, "frame.count", "sent=-1"):
        unpack(0, facts, tensors, durable.mass)


@pytest.mark.parametrize("graph", ["directed-exponential", "star", "complete", "ring"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_without_faults_shares_follow_the_engine(
    build: Callable[..., Experiment], tiny: Callable[..., Scenario], graph: str, dtype: str
) -> None:
    chosen = (f"topology.name={graph}", "n_peers=5", f"compute.dtype={dtype}", "rounds=4")
    whole, agreement = build(*chosen), Agreement.of(tiny(*chosen))
    cohort = whole.cohort()
    engine = Engine(whole.algorithm, cohort, whole.initial_state(cohort))
    network = [Peer(agreement, peer) for peer in range(5)]
    for one, other in combinations(network, 2):
        shake(one.shares, other.shares)
    for _ in range(4):
        engine.round()
        network_round(network)
    for name in ("x", "w"):
        rows = torch.cat([each.state.rows[name] for each in network])
        assert torch.allclose(rows, engine.state.rows[name], rtol=1e-9 if dtype == "float64" else 1e-4, atol=1e-6)
