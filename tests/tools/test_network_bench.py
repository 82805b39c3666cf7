"""The network's benchmark: real processes beside bare gRPC, and figures that follow from their stamps."""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path

import pytest
from raising import raises

pytest.importorskip("grpc")

from flower_privdec.cli import main
from flower_privdec.common.errors import RunError
from tools.bench import network
from tools.bench.network import NetworkPace
from tools.bench.together import together


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two peers with a model of a few hundred parameters, on one disk."""
    text = network.BASE.replace("n_peers: 8", "n_peers: 2")
    monkeypatch.setattr(network, "BASE", text)
    monkeypatch.setattr(network, "SIZES", {"small": ("few parameters", "model.hidden=[4]", 2)})
    monkeypatch.setattr(network, "MEMORY", Path("/nowhere"))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_peers_are_timed_beside_bare_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "WARM_UP", 1)
    words = ["network-bench", "--out", str(tmp_path), "--size", "small", "--mode", "synchronous", "--json"]
    with pytest.raises(SystemExit) as left:
        main.main(words)
    assert not left.value.code
    out, said = capsys.readouterr()
    found = json.loads(out)["small synchronous"]
    assert found["messages"] == 1
    assert found["disk"]["bytes"] > 0
    assert found["floor"]["rounds_per_second"] > 0
    assert found["disk"]["syncs"] >= 1
    assert found["disk"]["written"] > 0
    assert found["computing_ms"] > 0
    assert found["disk"]["cpu_ms"] > 0
    assert "memory" not in found
    assert list(tmp_path.iterdir()) == []
    assert "few parameters, 2 peers, network.mode=synchronous" in said
    assert "bare gRPC with TLS" in said
    assert "times the floor" in said


def test_a_pace_follows_from_the_stamps() -> None:
    """Two processes of five rounds, of which three are counted: 2 s a round, and 4 s; 0.5 s CPU each."""
    stamps = [
        [[9, 0, 0, 0, 0], [10, 1, 0, 0, 0], [12, 1.5, 0.1, 2, 7], [14, 2, 0.2, 4, 14], [99, 9, 9, 9, 9]],
        [[9, 0, 0, 0, 0], [10, 1, 0, 0, 0], [14, 1.5, 0.3, 2, 9], [18, 2, 0.6, 4, 18], [99, 9, 9, 9, 9]],
    ]
    pace = NetworkPace.of(stamps, slice(1, -1))
    assert pace.rounds_per_second == pytest.approx((0.5 + 0.25) / 2)
    assert pace.cpu_ms == pytest.approx(1000)
    assert (pace.sync_ms, pace.syncs, pace.bytes) == pytest.approx((200, 2, 8))


@pytest.mark.slow
def test_a_failing_process_is_reported_and_none_stays() -> None:
    with raises(RunError, "bench.process-failed"):
        together([(divmod, (1, 0))] * 2)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others() -> None:
    with raises(RunError, "bench.process-failed"):
        together([(signal.raise_signal, (signal.SIGKILL,)), (signal.pause, ())])
    assert not multiprocessing.active_children()
