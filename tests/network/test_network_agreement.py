"""What a device can rely on: a start together, a pace, no step alone or of little weight, and one model at the end."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from asynchronous_network import AGREEING, STILL, check_mass, initial
from networked import LONG, Killed, devices, finish, go_on, mortal, running, wait_until
from raising import raises
from safetensors.torch import load_file
from share_machines import commit, greeted_sessions
from tiny_scenario import Tiny
from variants import VARIANTS, modes_in_turn, settings_for

from flower_privdec.cli import main
from flower_privdec.common.errors import NotAgreedError, ScenarioError
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Agreement
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import rounds_to_agree
from flower_privdec.graph.topology import build_topology
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import run_in_foreground, running_peer
from flower_privdec.network.transport.faulty_transport import Faults, FaultyTransport
from flower_privdec.network.transport.transport import MemoryNetwork
from flower_privdec.peer import pace
from flower_privdec.peer.driving import Program
from flower_privdec.peer.pace import LEAST, WeightFloor
from flower_privdec.peer.peer import APART, RunningPeer
from flower_privdec.peer.trainer import rows_path
from flower_privdec.scenario import Scenario
from tools.soak.checks import Models, isolated_problem, last_models, models_problem

EXCHANGING = [v for v in VARIANTS if v[0].removeprefix("algorithm.name=") not in ("scaffold", "local", "dp-sgd")]
ENDLESS = ("rounds=30000", "evaluation.every=30000", "privacy={noise_multiplier: 1.0, delta: 1.0e-3}")


def in_memory(scenario: Scenario, folder: Path) -> list[RunningPeer]:
    """Return the peers of a scenario, of one process, whose calls can be made to fail."""
    network = MemoryNetwork()
    return [
        running_peer(
            scenario,
            PeerDevice(
                peer,
                folder / f"peer-{peer}",
                insecure_seeds=True,
                transport=FaultyTransport(network.transport(peer), peer),
            ),
        )
        for peer in range(scenario.n_peers)
    ]


def cut_off(peers: list[RunningPeer], peer: int, faults: Faults) -> None:
    """Set what happens to all calls from and to a peer."""
    for one in peers:
        for other in peers:
            if one is not other and peer in (one.device.peer, other.device.peer):
                transport: Any = one.device.transport
                transport.set(other.device.peer, faults)


def models_of(scenario: Scenario, peers: list[RunningPeer]) -> torch.Tensor:
    """Return the models that peers leave when they agree; later they relay, and their rows move."""
    handed_in = [load_file(rows_path(peer.device.folder, None)) for peer in peers]
    rows = {name: torch.cat([each[name] for each in handed_in]) for name in handed_in[0]}
    return Agreement.of(scenario).algorithm.models(rows)


def farthest(models: torch.Tensor) -> float:
    return float((models - models.mean(0)).norm(dim=1).max() / models.mean(0).norm())


# --- the end together ---


@pytest.mark.parametrize(
    ("variant", "mode"),
    [pytest.param(variant, mode, id=f"{' '.join(variant)}-{mode}") for variant, mode in modes_in_turn(EXCHANGING, 0)],
)
def test_all_devices_end_with_one_model(variant: list[str], mode: str, tiny: Tiny, tmp_path: Path) -> None:
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}}}"
    scenario = tiny(*settings_for(*variant), "rounds=2", network)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    assert farthest(models_of(scenario, peers)) < APART
    for peer in peers:
        assert peer.shortcoming() is None
        assert peer.status()["round"] == 2
        assert rows_path(peer.device.folder, None).exists()


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_finite_graphs_agree_exactly_without_further_steps(
    mode: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, release = Counter[int](), Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        taken[int(cohort.peers[0])] += 1
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}}}"
    scenario = tiny("rounds=6", network)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    spent = []
    with ThreadPoolExecutor(len(peers)) as pool:
        futures = [pool.submit(finish, p, lambda p: spent.append(p.status()["epsilon"])) for p in peers]
        for future in futures:
            future.result(LONG)
    assert farthest(models_of(scenario, peers)) < (1e-9 if mode == "synchronous" else APART)
    assert taken == dict.fromkeys(range(4), 6)
    assert {peer.status()["epsilon"] for peer in peers} == {max(spent)}


def test_a_peer_ends_once_all_its_neighbours_agree(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=3", AGREEING, STILL, "privacy=none")
    peers = in_memory(scenario, tmp_path)
    last = scenario.rounds + peers[0].final - 1  # the first round of final mixing in which a peer may end

    def move(peer: RunningPeer) -> None:  # as late shares do, so that pairs agree, and each with no other one
        exchange = peer._exchange_finally  # type: ignore[attr-defined]

        def moved(*arguments: Any) -> Program[None]:
            if peer.state.round_index in (last - 1, last):
                mass = peer.protocol.mass  # type: ignore[attr-defined]
                mass["x"] = mass["x"] + mass["w"]
            return exchange(*arguments)

        peer._exchange_finally = moved  # type: ignore[attr-defined]

    for odd in peers[1::2]:
        move(odd)
    with running(peers) as futures:
        for future in futures:
            future.result(LONG)
    assert [peer.shortcoming() for peer in peers] == [None] * 4
    assert farthest(models_of(scenario, peers)) < APART


FINAL_POINTS = {
    "before a round": ("_exchange_finally", "before"),
    "after a round": ("_exchange_finally", "after"),
    "after it split": ("exchanges.split", "after"),
    "before it adds what came": ("exchanges.absorb", "before"),
    "before the model is saved": ("trainer.finish", "before"),
    "after the model is saved": ("trainer.finish", "after"),
}


@pytest.mark.parametrize("point", FINAL_POINTS)
def test_a_peer_dying_in_final_mixing_loses_no_mass(
    point: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, release = Counter[int](), Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        taken[int(cohort.peers[0])] += 1
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    scenario = tiny("rounds=4", AGREEING, "algorithm.learning_rate=1.0e-12")
    theirs = devices(scenario, tmp_path, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mix = peers[1]._mix_finally

    def dying() -> Program[None]:  # from its first round of final mixing on
        peers[1]._mix_finally = mix  # type: ignore[method-assign]
        mortal(peers[1], FINAL_POINTS[point], 1)
        return mix()

    peers[1]._mix_finally = dying  # type: ignore[method-assign]
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        again = running_peer(scenario, theirs[1])
        go_on(again, [futures[peer] for peer in (0, 2, 3)])
    check_mass(tmp_path, initial(scenario))
    assert taken == dict.fromkeys(range(4), 4)
    assert again.shortcoming() is None
    assert farthest(models_of(scenario, [again])) < APART


def test_lost_calls_lose_no_mass_in_final_mixing(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, "network={links: local, deadline: 1.0}", "privacy=none")
    peers = in_memory(scenario, tmp_path)
    for peer, shift in zip(peers, (0.0, 1.0, 2.0, 3.0), strict=True):
        peer.state.rows["x"] += shift
        transport: Any = peer.device.transport
        for other in peers:
            transport.set(other.device.peer, Faults(lose=0.1))
    with running(peers) as futures:
        for future in futures:
            future.result(LONG)
    check_mass(tmp_path, initial(scenario) + 1.5)
    assert farthest(models_of(scenario, peers)) < APART


def test_a_device_with_another_model_says_so(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tiny("rounds=1", "network={links: local, deadline: 1.5}")  # in which the three hear each other
    peers = in_memory(scenario, tmp_path)
    exchange = peers[3]._exchange

    def isolated(*arguments: Any) -> Program[None]:
        if peers[3].state.round_index == 1:
            cut_off(peers, 3, Faults(black_hole=True))
        return exchange(*arguments)

    peers[3]._exchange = isolated  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(finish, peer) for peer in peers[:3]]
        with raises(NotAgreedError, "network.not-agreed", names="peer 3"):
            run_in_foreground(peers[3], 1, with_parent=False)
        for future in others:
            future.result(LONG)
    assert rows_path(peers[3].device.folder, None).exists()
    assert farthest(models_of(scenario, peers[:3])) < APART
    error = NotAgreedError("its model is its own")
    capsys.readouterr()
    monkeypatch.setattr(main, "app", lambda *arguments, **options: (_ for _ in ()).throw(error))
    with pytest.raises(SystemExit) as left:
        main.main(["peer"])
    assert left.value.code == 3
    assert capsys.readouterr().err == "error: its model is its own\n"


@pytest.mark.parametrize(
    ("graph", "weights", "n", "rounds"),
    [
        ("directed-exponential", "column-stochastic", 8, 3),
        ("directed-exponential", "column-stochastic", 4, 2),
        ("complete", "column-stochastic", 5, 1),
        ("ring", "metropolis", 4, 7),
    ],
)
def test_as_many_rounds_as_the_graph_needs(graph: str, weights: str, n: int, rounds: int) -> None:
    found, left = rounds_to_agree(Mixing(build_topology(graph, n), weights), 5, 99, 1e-3)
    assert found == rounds
    assert left <= 1e-3
    fewer, more = rounds_to_agree(Mixing(build_topology(graph, n), weights), 5, rounds - 1, 1e-3)
    assert (fewer, more > 1e-3) == (rounds - 1, True)


def test_a_graph_of_too_many_peers_needs_a_number() -> None:
    with raises(ScenarioError, "network.final-mixing", names="n_peers=2000"):
        rounds_to_agree(Mixing(build_topology("ring", 2000), "metropolis"), 0, 9, 1e-3)


# --- pace, quorum, weight ---


class NobodyOnTime(pace.StragglerPolicy):
    on_time = property(lambda self: set(), lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize("lead", [1, 3])
@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
def test_a_peer_is_boundedly_ahead_of_its_slowest_neighbour(name: str, lead: int, tiny: Tiny, tmp_path: Path) -> None:
    network = f"network={{links: local, deadline: {LONG}, lead: {lead}, alone: go-on}}"
    scenario = tiny(*settings_for(f"algorithm.name={name}"), "topology.name=complete", *ENDLESS, network)
    peers: list[Any] = list(in_memory(scenario, tmp_path))
    for peer in peers:  # which wait for the pace alone: the slowest holds weight that the others would wait for
        peer.policy, peer.floor = NobodyOnTime(LONG), WeightFloor(0.0, LONG, 0.0)
    begin, go = Event(), Event()

    def held(advance: Any, slow: bool) -> Any:
        def after(state: Any) -> Any:
            if state.at == 0 and state.round_index == 0:
                begin.wait(LONG)
            if slow and state.at == 0 and state.round_index == 2:
                go.wait(LONG)
            return advance(state)

        return after

    for peer in peers:
        peer.trainer.advance = held(peer.trainer.advance, peer is peers[0])
    with running(peers) as futures:
        wait_until(lambda: all(p.protocol.is_open(j) for p in peers for j in p.neighbours))
        begin.set()
        wait_until(lambda: all(p.state.round_index >= 1 + lead and p.waits_for.startswith("peer 0") for p in peers[1:]))
        for peer in peers[1:]:  # what one was behind when it was greeted again does not count
            assert peer.state.round_index <= 2 + lead + peer._pace._met.get(0, (None, 0))[1]
        go.set()
        wait_until(lambda: all(peer.state.round_index > 8 + lead for peer in peers))
        for peer in peers:
            peer.stop()
        for future in futures:
            assert future.exception(LONG) is not None


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
def test_a_peer_cut_off_takes_one_step_and_recovers(name: str, tiny: Tiny, tmp_path: Path) -> None:
    network = "network={links: local, deadline: 0.3}"
    scenario = tiny(*settings_for(f"algorithm.name={name}"), "topology.name=complete", *ENDLESS, network)
    peers = in_memory(scenario, tmp_path)
    alone, steps, advance = peers[3], Counter[str](), peers[3].trainer.advance

    def counted(state: Any) -> Any:
        if state.at == 0:
            if steps["all"] == 3:
                cut_off(peers, 3, Faults(black_hole=True))
            steps["all"] += 1
        return advance(state)

    alone.trainer.advance = counted  # type: ignore[method-assign]
    with running(peers) as futures:
        wait_until(lambda: alone.waits_for.startswith("1 of its neighbours"))
        others = [peer.state.round_index for peer in peers[:3]]
        wait_until(lambda: all(peer.state.round_index > k + 9 for peer, k in zip(peers[:3], others, strict=True)))
        wait_until(lambda: alone.status()["waits_for"] != "")
        assert steps["all"] in (4, 5)  # the one under way as it was cut off, and one more
        cut_off(peers, 3, Faults())
        wait_until(lambda: steps["all"] > 9)
        for peer in peers:
            peer.stop()
        for future in futures:
            assert future.exception(LONG) is not None


def test_a_waiting_peer_never_shows_an_empty_reason(tiny: Tiny, tmp_path: Path) -> None:
    network = "network={links: local, deadline: 0.3}"
    scenario = tiny(*settings_for("algorithm.name=d-psgd"), "topology.name=complete", *ENDLESS, network)
    peer: Any = in_memory(scenario, tmp_path)[3]
    shown = list[str]()

    # A page reads the reason at any moment, so every value that it ever has counts, not the last one only.
    class Noted(type(peer)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "waits_for":
                shown.append(value)
            super().__setattr__(name, value)

    peer.__class__ = Noted
    for _ in range(2):
        assert peer._must_wait(1)
    assert shown
    assert all(shown)


def test_a_peer_continues_without_neighbours_if_allowed(tiny: Tiny, tmp_path: Path) -> None:
    network = "network={links: local, deadline: 0.3, alone: go-on}"
    scenario = tiny(*settings_for("algorithm.name=d-psgd"), *ENDLESS, network)
    peers = in_memory(scenario, tmp_path)
    with running(peers) as futures:
        wait_until(lambda: peers[3].state.round_index > 2)
        cut_off(peers, 3, Faults(black_hole=True))
        since = peers[3].state.round_index
        wait_until(lambda: peers[3].state.round_index > since + 9)
        for peer in peers:
            peer.stop()
        for future in futures:
            assert future.exception(LONG) is not None


def held(tiny: Tiny, folder: Path, *settings: str) -> Any:
    """Return a peer that has met its three neighbours in its last step."""
    scenario = tiny(AGREEING, "topology.name=complete", *settings)
    peer: Any = running_peer(scenario, devices(scenario, folder, memory=True)[0])
    peer.session.steps = 5
    has_met(peer, {1: 5, 2: 5, 3: 5})
    return peer


def has_met(peer: Any, steps: dict[int, int]) -> None:
    """Let a peer have met neighbours in some of its steps, and the others in none."""
    for j, known in peer.neighbours.items():
        known.met = steps.get(j)


@pytest.mark.parametrize(("quorum", "met", "waits"), [(1, {1: 5}, False), (1, {1: 4}, True), (3, {1: 5, 2: 5}, True)])
def test_a_quorum_needs_exchanges_not_greetings(
    quorum: int, met: dict[int, int], waits: bool, tiny: Tiny, tmp_path: Path
) -> None:
    peer = held(tiny, tmp_path, AGREEING.replace("}", f", quorum: {quorum}}}"))
    has_met(peer, met)
    peer.protocol._open = {1, 2, 3}  # all of them have greeted it
    assert peer._must_wait(3) is waits
    peer.close()


def test_a_greeting_is_no_exchange_and_a_share_is() -> None:
    sender, receiver = greeted_sessions()
    known = receiver.neighbours[0]
    receiver.receive(0, [sender.protocol.hello(1)], 0.0)
    assert known.met is None
    sender.protocol.split(0, {1: 0.5})
    commit(sender.protocol)
    (share,) = sender.protocol.shares_to_send()
    receiver.receive(0, [share], 0.0)
    assert known.met == 0
    receiver.protocol.absorb()
    commit(receiver.protocol)
    known.met = None
    receiver.receive(0, [share], 0.0)  # repeated: it is acknowledged, and is no exchange
    assert known.met is None


def test_low_weight_takes_no_step_and_lowers_the_floor(tiny: Tiny, tmp_path: Path) -> None:
    peer = held(tiny, tmp_path)
    for weight, waits in ((1.0, False), (LEAST, False), (0.9 * LEAST, True)):
        peer.state.rows["w"].fill_(weight)
        assert peer._must_wait(3) is waits
    peer.now = 0.9 * peer.times.deadline
    assert peer._must_wait(3)
    peer.now = 1.1 * peer.times.deadline  # all may have as little, and one has to go on
    assert not peer._must_wait(3)
    peer.close()


# --- what the soak checks ---


def test_isolated_steps_and_unlike_models_are_problems(tmp_path: Path) -> None:
    assert isolated_problem(5, 7) is None
    assert "took 3 private steps" in str(isolated_problem(5, 8))
    assert models_problem([tmp_path], Models(4, APART)) is None
    assert "one is 50.0% from the mean" in str(models_problem([tmp_path], Models(4, 0.5)))
    assert last_models([tmp_path]) is None
    shutil.rmtree(tmp_path)
