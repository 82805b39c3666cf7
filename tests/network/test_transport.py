"""The door for transports: peers over memory, with faults and with wire codecs, and how a codec is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from asynchronous_network import FOLDERS, QUICK, STILL, check_mass, initial
from networked import LONG, devices, driver_of, running, wait_until
from raising import raises
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec import testing
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.faulty_transport import Faults, FaultyTransport
from flower_privdec.network.transport.transport import Content, MemoryNetwork, RefusedError, UnreachableError
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.scenario import Scenario
from tools.mass_on_disk import mass_on_disk

SYNCHRONOUS = f"network={{mode: synchronous, links: local, deadline: {LONG}, final_mixing: 0}}"
Rows = dict[str, Tensor]


def in_memory(scenario: Scenario, folder: Path, faults: Faults | None = None, loss: float = 0.0) -> list[RunningPeer]:
    """Return the peers of a scenario, of one process and with no socket between them."""
    network, peers = MemoryNetwork(), []
    for peer in range(scenario.n_peers):
        transport: Any = network.transport(peer)
        if faults is not None:
            transport = FaultyTransport(transport, peer, faults)
        device = PeerDevice(peer, folder / f"peer-{peer}", insecure_seeds=True, transport=transport, loss=loss)
        peers.append(running_peer(scenario, device))
    return peers


def run_all(peers: list[RunningPeer]) -> Rows:
    with running(peers) as futures:
        rows = [future.result(LONG) for future in futures]
    return {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_synchronous_peers_in_memory_do_what_the_engine_does(
    name: str, loss: float, tiny: Tiny, tmp_path: Path
) -> None:
    scenario = tiny(*settings_for(f"algorithm.name={name}"), "rounds=3", SYNCHRONOUS)
    peers = in_memory(scenario, tmp_path, loss=loss)
    rows, wanted = run_all(peers), testing.run_rounds(Experiment.build(scenario), 3)
    torch.testing.assert_close(rows["x"], wanted.state.rows["x"])
    lost = [transport.lost for peer in peers if isinstance(transport := driver_of(peer)._transport, FaultyTransport)]
    assert bool(sum(lost)) == bool(loss)


@pytest.mark.parametrize("wrong", [{"lose": 1.1}, {"lose": float("nan")}, {"delay": -1.0}, {"jitter": float("inf")}])
def test_a_fault_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with raises(ArgumentError, "faults.setting"):
        Faults(**wrong)


@pytest.mark.parametrize("codec", ["exact", "bfloat16", "int8", "int4", "top-k", "random-k"])
@pytest.mark.parametrize("faults", [Faults(), Faults(lose=0.1, jitter=0.001)], ids=["none", "some"])
def test_no_mass_is_lost_with_any_codec(codec: str, faults: Faults, tiny: Tiny, tmp_path: Path) -> None:
    deadline = 1.0 if faults.lose else LONG  # a neighbour whose last message was lost is waited for as long
    network = f"network={{codec: {codec}, links: local, deadline: {deadline}}}"
    scenario = tiny(STILL, network, "rounds=6", "privacy=none")
    run_all(in_memory(scenario, tmp_path, faults))
    check_mass(tmp_path, initial(scenario), codec)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "top-k", "random-k"])
def test_the_engine_rounds_as_synchronous_peers_do(codec: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(SYNCHRONOUS.replace("{", f"{{codec: {codec}, "), "rounds=5")
    rows, wanted = run_all(in_memory(scenario, tmp_path)), testing.run_rounds(Experiment.build(scenario), 5)
    for name in ("x", "w"):
        torch.testing.assert_close(rows[name], wanted.state.rows[name])


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "top-k", "random-k"])
def test_rounding_errors_stay_with_a_synchronous_sender(codec: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, SYNCHRONOUS.replace("{", f"{{codec: {codec}, "), "rounds=9", "privacy=none")
    rows = run_all(in_memory(scenario, tmp_path))
    torch.testing.assert_close(rows["x"].sum(0), 4 * initial(scenario), rtol=0, atol=1e-9)
    assert float(rows["w"].sum()) == pytest.approx(4, abs=1e-12)


def test_a_memory_transport_closes_once_nothing_is_answered() -> None:
    """An answer after the peer has closed its files, or was started again, would be one of no peer."""
    network, entered, leave, order = MemoryNetwork(), Event(), Event(), list[str]()
    transport, connection = network.transport(0), network.transport(1).connect(0, 10)

    def answer(caller: int, content: memoryview) -> Content:
        entered.set()
        leave.wait(LONG)
        order.append("answered")
        return [b"yes"]

    def close() -> None:
        transport.close()
        order.append("closed")

    transport.serve(answer, 10, 1)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(connection.call, [b"?"], LONG)
        assert entered.wait(LONG)
        closing = pool.submit(close)
        wait_until(lambda: 0 not in network.answers)
        with pytest.raises(UnreachableError):
            connection.call([b"?"], LONG)
        leave.set()
        assert bytes(call.result(LONG)) == b"yes"
        closing.result(LONG)
    assert order == ["answered", "closed"]


def test_a_rounding_codec_without_mass_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for("algorithm.name=d-psgd"), "network={codec: bfloat16}")
    device = devices(scenario, tmp_path)[0]
    with raises(ScenarioError, "network.codec-without-shares", names="d-psgd"):
        running_peer(scenario, device)
    with raises(ScenarioError, "network.codec", names="int3"):
        running_peer(
            scenario.model_copy(update={"network": scenario.network.model_copy(update={"codec": "int3"})}), device
        )


def test_a_partition_heals_and_no_mass_is_lost(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(STILL, "topology.name=complete", "rounds=30000", "evaluation.every=30000", QUICK)
    peers = in_memory(scenario, tmp_path, Faults())
    transports: list[Any] = [peer.device.transport for peer in peers]

    def cut(faults: Faults) -> None:
        for peer in range(4):
            for other in range(4):
                if peer // 2 != other // 2:
                    transports[peer].set(other, faults)

    with running(peers) as futures:
        wait_until(lambda: all(peer.state.round_index >= 3 for peer in peers))
        cut(Faults(black_hole=True))
        since = [peer.state.round_index for peer in peers]
        wait_until(lambda: all(peer.state.round_index >= round_ + 5 for peer, round_ in zip(peers, since, strict=True)))
        cut(Faults())
        wait_until(lambda: all(peer.protocol.is_open(j) for peer in peers for j in range(4) if j != peer.device.peer))  # type: ignore[attr-defined]
        for peer in peers:
            peer.stop()
        assert all(future.exception(LONG) is not None for future in futures)
    total = mass_on_disk([tmp_path / name for name in FOLDERS])
    assert float(total["w"]) == pytest.approx(4, abs=1e-9)


def test_memory_refuses_and_reports_as_any_transport() -> None:
    network = MemoryNetwork()
    one, other = network.transport(0), network.transport(1)
    connection = other.connect(0, cap=4)
    with raises(UnreachableError, "call.unanswered", names="peer 0"):
        connection.call([b"?"], 1.0)

    def answer(caller: int, content: memoryview) -> Content:
        if content == b"no":
            raise RefusedError("not that", code="test.refused")
        return [content] * caller

    one.serve(answer, cap=6, callers=1)
    assert connection.call([b"abc"], 1.0) == b"abc"
    with raises(RefusedError, "test.refused", names="not that"):
        connection.call([b"no"], 1.0)
    for content in (b"1234567", b"12345"):
        with raises(RefusedError, "call.too-long"):
            connection.call([content], 1.0)
    one.close()
    with pytest.raises(UnreachableError):
        connection.call([b"?"], 1.0)
