"""One cohort in shards that send each other rows: against the engine, and when one of them is not as it should be."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from command_line import forked
from hypothesis import given
from hypothesis import strategies as st
from ports import own_addresses
from raising import raises
from salts import pin_salts
from shards_together import engines_of, in_futures, in_shards
from tiny_scenario import Tiny
from torch import Tensor
from torch.distributed import FileStore
from variants import VARIANTS, settings_for

from flower_privdec import testing
from flower_privdec.common.errors import RunError
from flower_privdec.core import Edges, Exchange, Gather, State
from flower_privdec.engine.shards import process_group as process_groups
from flower_privdec.engine.shards.communication_plan import Shards, Traffic, mix_plan
from flower_privdec.engine.shards.process_group import LostShardError, ProcessGroup
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE, Rendezvous
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.experiment import Experiment
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.scenario import Scenario

SHORT = ["rounds=3", "data.samples=120", "data.batch.size=4"]
OWN = [
    ["topology.name=star", f"algorithm={{module: exchanging:{name}, learning_rate: 0.5}}"]
    for name in ("Courteous", "CrossGradient")
]
WHOLE = [*(settings_for(*variant) for variant in VARIANTS), *OWN]
GRAPHS = [
    ["n_peers=7", "privacy=none"],
    ["n_peers=9", "topology.name=directed-exponential-full"],
    ["n_peers=7", "participation={kind: uniform, fraction: 0.5}"],
    ["n_peers=7", "topology.name=server", "participation={kind: uniform, fraction: 0.3}"],
    ["n_peers=7", "topology={name: erdos-renyi, probability: 0.6}", "algorithm.name=d-psgd"],
    ["n_peers=8", "topology={name: random-edges, edges: 3, supergraph: complete}"],
    ["n_peers=7", "topology.name=complete", "algorithm.name=dp-cga"],
]


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of algorithms of one's own be compared."""
    pin_salts(monkeypatch)


def run_in_shards(scenario: Scenario, folder: Path, count: int) -> tuple[list[State], dict[str, Tensor]]:
    """Return the last state of each shard, and what the first one collects in the end."""
    shards = Shards.split(scenario.n_peers, count)
    make = engines_of(scenario, shards)

    def work(process_group: ProcessGroup) -> tuple[State, dict[str, Tensor] | None]:
        engine = make(process_group)
        for _ in range(scenario.rounds):
            engine.round()
        collected = engine.collect()
        process_group.wait_for_all()
        return engine.state, collected

    found = in_shards(folder, shards, work)
    assert all(collected is None for _, collected in found[1:])
    assert found[0][1] is not None
    return [state for state, _ in found], found[0][1]


def assert_as_engine(scenario: Scenario, folder: Path, count: int) -> None:
    states, collected = run_in_shards(scenario, folder, count)
    experiment = Experiment.build(scenario)
    expected = testing.run_rounds(experiment, scenario.rounds).state
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    for name in ("x", "w"):
        if name in expected.rows:
            close(torch.cat([state.rows[name] for state in states]), expected.rows[name])
    assert collected.keys() == set(experiment.algorithm.open_rows)
    for name, rows in collected.items():
        close(rows, expected.rows[name])


@pytest.mark.slow
def test_shards_do_what_the_engine_does(tiny: Tiny, tmp_path: Path) -> None:
    for number, settings in enumerate(WHOLE):
        assert_as_engine(tiny(*SHORT, *settings), tmp_path, 2 + number % 2)


@pytest.mark.parametrize("long", [0, 2**62], ids=["rows alone", "rows packed"])
def test_shards_do_what_the_engine_does_on_any_graph(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    monkeypatch.setattr(process_groups, "LONG", long)
    for settings in GRAPHS:
        assert_as_engine(tiny(*SHORT, *settings), tmp_path, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_padding_between_sent_rows_is_zero(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(process_groups, "LONG", 0)
    between: list[Tensor] = []
    block = process_groups._block

    def watched(rows: Tensor, start: int, stop: int) -> Tensor:
        found = block(rows, start, stop)
        if found.ndim == 2 and found.shape[1] > rows.shape[1]:
            between.append(found[:, rows.shape[1] :])
        return found

    monkeypatch.setattr(process_groups, "_block", watched)
    for algorithm in ("privsgp-vr", "feddeper"):
        settings = [f"algorithm.name={algorithm}", f"compute={{dtype: {dtype}}}"]
        run_in_shards(tiny(*SHORT, *settings), tmp_path, 2)
    assert between
    assert not any(each.any() for each in between)


def test_one_shard_is_the_engine_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    (state,), _ = run_in_shards(tiny(), tmp_path, 1)
    expected = testing.run_rounds(Experiment.build(tiny()), tiny().rounds).state
    assert torch.equal(state.rows["x"], expected.rows["x"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graph", ["directed-exponential", "erdos-renyi", "directed-ring", "star"])
def test_mixing_has_the_bits_of_the_whole_matrix(graph: str, dtype: torch.dtype) -> None:
    options = {"probability": 0.5} if graph == "erdos-renyi" else {}
    mixing = Mixing(build_topology(graph, 9, seed=1, **options), "column-stochastic")
    x, shards = torch.randn(9, 300, dtype=dtype, generator=torch.Generator().manual_seed(1)), Shards.split(9, 4)
    for k in range(4):
        matrix, found = mixing.matrix(k), torch.full_like(x, torch.nan)
        for shard in range(4):
            plan, peers = mix_plan(matrix, shards, shard), shards.peers(shard)  # type: ignore[arg-type]
            senders = [mix_plan(matrix, shards, other).traffic.sends for other in range(4)]  # type: ignore[arg-type]
            table = torch.full((len(peers) + plan.traffic.foreign, 300), torch.nan, dtype=dtype)
            table[: len(peers)] = x[peers]
            for other, where in plan.traffic.receives.items():
                table[len(peers) :][where] = x[shards.peers(other)][senders[other][shard]]
            out = found[peers[0] : peers[-1] + 1]
            for rows, weights in (*plan.inner, *plan.border):
                out[rows] = weights.apply(table)
        assert torch.equal(found, matrix.apply(x))


@given(n_peers=st.integers(1, 200), count=st.integers(1, 70))
def test_peers_are_dealt_out_evenly(n_peers: int, count: int) -> None:
    shards = Shards.split(n_peers, count)
    expected = np.array_split(np.arange(n_peers), min(count, n_peers))
    assert len(shards) == len(expected)
    for shard, peers in enumerate(expected):
        np.testing.assert_array_equal(shards.peers(shard), peers)
        assert set(shards.of(peers)) == {shard}


def test_a_row_crosses_once_and_nothing_else_does(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tiny("n_peers=8", "topology.name=directed-exponential-full", "rounds=1", "algorithm.name=privsgp-vr")
    sent: dict[int, list[tuple[int, list[int]]]] = {0: [], 1: []}
    engines: dict[int, ShardEngine] = {}
    begin = ProcessGroup.begin

    def watched(process_group: ProcessGroup, rows: list[Tensor], traffic: Traffic, *rest: object) -> object:
        state = engines[process_group.shard].state
        assert all(torch.equal(each, state.rows[name]) for each, name in zip(rows, ("x", "w"), strict=True))
        sent[process_group.shard] += [(shard, which.tolist()) for shard, which in traffic.sends.items()]
        return begin(process_group, rows, traffic, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessGroup, "begin", watched)
    shards = Shards.split(8, 2)
    make = engines_of(scenario, shards)

    def work(process_group: ProcessGroup) -> None:
        engines[process_group.shard] = make(process_group)
        engines[process_group.shard].round()
        process_group.wait_for_all()

    in_shards(tmp_path, shards, work)
    assert sent == {0: [(1, [0, 1, 2, 3])], 1: [(0, [0, 1, 2, 3])]}  # though each hears from 1, 2 and 4 before it


def test_a_mean_sends_sums_and_no_row(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tiny("n_peers=8", "topology.name=server", "rounds=1", "algorithm.name=fedavg")
    monkeypatch.setattr(ProcessGroup, "begin", None)
    shards = Shards.split(8, 2)
    make = engines_of(scenario, shards)
    in_shards(tmp_path, shards, lambda process_group: make(process_group).round())


@pytest.mark.parametrize("topology", ["directed-exponential", "server"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_refused(tiny: Tiny, tmp_path: Path, bad: float, topology: str) -> None:
    shards = Shards.split(4, 2)
    make = engines_of(tiny(f"topology.name={topology}"), shards)

    def work(process_group: ProcessGroup) -> None:
        engine = make(process_group)
        if process_group.shard == 1:
            engine.state.rows["x"][-1, 7] = bad
        engine.round()
        engine.round()

    ends = [future.exception() for future in in_futures(tmp_path, shards, work)]
    assert any(type(end) is RunError and "not finite; a peer diverged" in str(end) for end in ends), ends
    assert all(isinstance(end, RunError) for end in ends)
    if topology != "server":
        assert "round 0: rows of the shard of peers 2-3 are not finite" in str(ends[0])


def test_rows_as_large_as_they_can_be_pass(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=1", "privacy=none", "compute.dtype=float32", "algorithm.learning_rate=1e-30")
    shards = Shards.split(4, 2)
    make = engines_of(scenario, shards)

    def work(process_group: ProcessGroup) -> Tensor:
        engine = make(process_group)
        engine.state.rows["x"].fill_(3e38)
        engine.perform(engine.algorithm.program[1])  # type: ignore[arg-type]
        return engine.state.rows["x"]

    for rows in in_shards(tmp_path, shards, work):
        assert torch.equal(rows, torch.full_like(rows, 3e38))


def test_a_message_of_another_place_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    shards = Shards.split(4, 2)
    make = engines_of(tiny(), shards)

    def work(process_group: ProcessGroup) -> None:
        engine = make(process_group)
        if process_group.shard == 1:
            send = process_group.group.send

            def stale(tensors: list[Tensor], shard: int, tag: int) -> object:
                tensors[0][-8:] = 77
                return send(tensors, shard, tag)

            process_group._group = type("Stale", (), {"send": staticmethod(stale), "recv": process_group.group.recv})()
        engine.round()

    ends = [future.exception() for future in in_futures(tmp_path, shards, work)]
    assert "round 0: rows of the shard of peers 2-3 are of another place" in str(ends[0])


def test_a_leaving_shard_is_named_by_all_waiting(tiny: Tiny, tmp_path: Path) -> None:
    shards = Shards.split(6, 3)
    make = engines_of(tiny("n_peers=6", "topology.name=directed-exponential-full", "rounds=50"), shards)

    def work(process_group: ProcessGroup) -> None:
        engine = make(process_group)
        for _ in range(3 if process_group.shard == 2 else 50):
            engine.round()

    ends = [future.exception() for future in in_futures(tmp_path, shards, work)]
    assert ends[2] is None
    for end in ends[:2]:
        assert isinstance(end, LostShardError)
        assert "lost touch with the shard of peers" in str(end)
        assert "in round 3" in str(end) or "in round 2" in str(end)
    assert any("peers 4-5" in str(end) for end in ends[:2])


@pytest.mark.slow
def test_a_killed_shard_ends_the_others_at_once(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=50")
    path, shards = tmp_path / "rendezvous", Shards.split(4, 2)
    make = engines_of(scenario, shards)

    def dying() -> None:
        make(ProcessGroup.join(FileStore(str(path), 2), 1, shards, THIS_MACHINE)).round()
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(dying)
    try:
        process_group = ProcessGroup.join(FileStore(str(path), 2), 0, shards, THIS_MACHINE, 300)
        engine = make(process_group)
        with raises(LostShardError, "shards.lost", "peers 2-3 in round [12]"):
            [engine.round() for _ in range(50)]
    finally:
        child.kill()
        child.join()


def test_a_silent_shard_is_waited_for_only_so_long(tiny: Tiny, tmp_path: Path) -> None:
    shards = Shards.split(4, 2)
    make = engines_of(tiny(), shards)
    silent: list[ProcessGroup] = []

    def work(process_group: ProcessGroup) -> None:
        if process_group.shard == 1:
            silent.append(process_group)
            process_group.close = lambda: None  # type: ignore[method-assign]
            return
        make(process_group).round()

    end = in_futures(tmp_path, shards, work, patience=0.5)[0].exception()
    assert isinstance(end, LostShardError)
    assert "the shard of peers 2-3 in round 0" in str(end)


def test_shards_that_would_run_something_else_refuse(tmp_path: Path) -> None:
    shards = Shards.split(4, 2)
    work = lambda process_group: process_group.agree(bytes([process_group.shard] * 32))  # noqa: E731
    for end in in_futures(tmp_path, shards, work):
        assert "is about to run something else" in str(end.exception())


def test_an_exchange_of_another_kind_passes_its_messages(tiny: Tiny, tmp_path: Path) -> None:
    methods = {name: getattr(Gather, name) for name in ("outgoing", "incoming", "together")}
    exchange = type("Own", (Exchange,), methods)(("x",))
    shards = Shards.split(4, 2)
    make = engines_of(tiny("topology.name=complete"), shards)

    def work(process_group: ProcessGroup) -> Edges:
        engine = make(process_group)
        engine.state.rows["x"].add_(torch.from_numpy(engine.state.peers)[:, None])
        engine.perform(exchange)
        process_group.wait_for_all()
        return engine.state.edges["x"]

    for edges in in_shards(tmp_path, shards, work):
        gained = edges.values - edges.values[:1] + edges.other[0]
        assert torch.equal(gained[:, 0].round().long(), torch.from_numpy(edges.other))
        assert len(edges.own) == 6


# --- the endpoint ---


def test_shards_that_do_not_come_are_named(tmp_path: Path) -> None:
    place, shards = Rendezvous(path=tmp_path / "rendezvous"), Shards.split(6, 3)
    with (
        raises(LostShardError, "shards.missing", "peers 2-3, the shard of peers 4-5"),
        place.store(0, shards, "token", patience=0.1),
    ):
        pass


def test_shards_meet_at_the_named_address_only(tmp_path: Path) -> None:
    (address,), shards = own_addresses(1), Shards.split(2, 2)
    place, port, seen = Rendezvous.given(THIS_MACHINE, address), int(address.partition(":")[2]), []

    def meet(shard: int) -> None:
        with place.store(shard, shards, "token") as store:
            process_group = ProcessGroup.join(store, shard, shards, place.address, 60)
            process_group.agree(b"a" * 32)
            if shard == 0:
                with socket.create_connection((THIS_MACHINE, port), timeout=60):
                    seen.append("here")
                with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=60):
                    pass
            process_group.wait_for_all()
            process_group.close()

    threads = [Thread(target=meet, args=(shard,)) for shard in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["here"]


def test_the_first_shard_listens_locally_only() -> None:
    place = Rendezvous.given("127.0.0.2", own_addresses(1)[0])
    with raises(RunError, "shards.elsewhere", r"127\.0\.0\.2"), place.store(0, Shards.split(2, 2), "token"):
        pass


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("0.0.0.0", "10.0.0.1:29500"),
        ("::", "10.0.0.1:29500"),
        ("10.0.0.2", "0.0.0.0:29500"),
        ("10.0.0.2", "10.0.0.1"),
        ("10.0.0.2", "10.0.0.1:0"),
        ("10.0.0.2", "10.0.0.1:70000"),
        ("10.0.0.2", "10.0.0.1:port"),
        ("", "10.0.0.1:29500"),
        ("10.0.0.2", ""),
        ("example.org", "10.0.0.1:29500"),
    ],
)
def test_a_place_that_is_no_machines_address_is_refused(address: str, endpoint: str) -> None:
    with raises(RunError, "shards.address"):
        Rendezvous.given(address, endpoint)


def test_a_place_says_whether_others_reach_it() -> None:
    assert not Rendezvous.given("127.0.0.1", "127.0.0.1:29500").is_open
    assert Rendezvous.given("10.0.0.2", "10.0.0.1:29500").is_open
    assert Rendezvous.given("fd00::2", "[fd00::1]:29500").endpoint == ("fd00::1", 29500)
