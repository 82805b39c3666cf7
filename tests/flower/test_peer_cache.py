"""What the peers of one process keep in memory between messages, in place of reading their files again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peer_states import state_in
from raising import raises
from routing_peers import client, first, sets_its_values_once, zeros

from flower_privdec.common.errors import BudgetError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum
from flower_privdec.flower.mods import request_handler
from flower_privdec.flower.node_settings import PeerCache
from flower_privdec.peer.app_state import PeerState, SavedState, state_path
from flower_privdec.peer.app_updates import PeerLedger
from flower_privdec.peer.record_log import RecordLog
from flower_privdec.privacy.ledger.segments import ledger_path, read_chain

PRIVATE: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}


def test_an_entry_counts_while_its_file_is_unchanged(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", PeerCache(is_temporary=False)
    assert cache.get(path, lambda: "none") == "none"
    assert cache.get(path, lambda: pytest.fail("it is not there, as before")) == "none"
    path.write_text("one")
    assert cache.get(path, path.read_text) == "one"
    assert cache.get(path, lambda: pytest.fail("it is the same")) == "one"
    other = tmp_path / "other"
    other.write_text("two")
    os.replace(other, path)
    assert cache.get(path, path.read_text) == "two"
    path.unlink()
    assert cache.get(path, lambda: "none") == "none"


def test_peers_in_a_temporary_folder_write_no_state(tmp_path: Path) -> None:
    grid = LocalGrid(client(sets_its_values_once), 4)
    ours = PushSum(name="run").start(grid, zeros(), 3)
    theirs = PushSum(name="run").start(LocalGrid(client(sets_its_values_once), 4, folder=tmp_path), zeros(), 3)
    assert first(ours.arrays).tolist() == first(theirs.arrays).tolist()
    assert not list(grid.folder.glob("*/run-*"))
    assert len(list(tmp_path.glob("*/run-*"))) == 4


@pytest.mark.parametrize("is_temporary", [True, False])
def test_a_failing_train_function_keeps_the_state(is_temporary: bool, tmp_path: Path) -> None:
    """What the failed message absorbed is absorbed again by the next one: no mass is lost or counted twice."""
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        server_round, peer = message.content["config"]["server-round"], context.node_config["partition-id"]
        if (server_round, peer) == (2, 1):
            raise RuntimeError("once")
        moved = [array + (server_round == 1) * peer for array in message.content["arrays"].to_numpy_ndarrays()]
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({})}), reply_to=message)

    strategy = PushSum(name="run", fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 4, folder=None if is_temporary else tmp_path), ArrayRecord([np.zeros(3)]), 8)
    models = [first(arrays) for arrays in strategy.peer_arrays.values()]
    assert len(models) == 4
    assert np.abs(np.stack(models) - 1.5).max() < 0.05  # the mean of 0, 1, 2 and 3, which all approach


def test_a_state_replaced_between_messages_is_reread(tmp_path: Path) -> None:
    grid, path = LocalGrid(client(sets_its_values_once), 2, folder=tmp_path), state_path(tmp_path / "peer-0", "run")
    PushSum(name="run").start(grid, zeros(), 1)
    early = path.read_bytes()
    PushSum(name="run").start(grid, zeros(), 2)
    late = state_in(tmp_path / "peer-0", "run")
    path.write_bytes(early)
    PushSum(name="run").start(grid, zeros(), 3)
    after = state_in(tmp_path / "peer-0", "run")
    assert late is not None
    assert after is not None
    assert after.shares.incarnation > late.shares.incarnation  # it was noticed that it is an old copy


def test_a_temporary_ledger_verifies_line_by_round(tmp_path: Path) -> None:
    grid = LocalGrid(client(sets_its_values_once, **PRIVATE), 2)
    strategy = PushSum(name="run")
    strategy.start(grid, zeros(), 3)
    _, entries = read_chain(ledger_path(grid.folder / "peer-1", "peer-updates"))
    assert [entry.to_step for entry in entries] == [1, 2, 3]
    assert "3 Gaussian updates" in strategy.reports[1].spent


def test_a_ledger_is_reopened_only_if_its_file_matches(tmp_path: Path) -> None:
    ledger = PeerLedger(tmp_path, "run", 1, 0, 1e-3)
    ledger.charge(1, 1.0)
    ledger.close()
    assert ledger.reopen()
    ledger.charge(2, 1.0)
    with raises(BudgetError, "ledger.in-use"):
        PeerLedger(tmp_path, "run", 1, 0, 1e-3)
    ledger.close()
    _, entries = read_chain(ledger.path)
    assert [entry.to_step for entry in entries] == [1, 2]
    with PeerLedger(tmp_path, "other", 1, 0, 1e-3) as other:
        other.charge(3, 1.0)
    assert not ledger.reopen()
    ledger.path.unlink()
    assert not ledger.reopen()


@pytest.mark.parametrize("is_temporary", [True, False])
def test_a_message_failing_while_saved_keeps_the_state(
    is_temporary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was lost with it is not in the models: what it moved was neither saved nor sent."""
    app, failed = ClientApp(mods=[PeerMod()]), list[int]()
    save = request_handler.save_state

    def fails_once(log: RecordLog, state: PeerState, **options: Any) -> SavedState:
        if state.peer == 1 and state.round_index == 2 and not failed:
            failed.append(state.peer)
            raise OSError("the disk is full")
        return save(log, state, **options)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        moved = [array + (peer == 1) for array in message.content["arrays"].to_numpy_ndarrays()]
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({})}), reply_to=message)

    monkeypatch.setattr(request_handler, "save_state", fails_once)
    strategy = PushSum(name="run", fraction_evaluate=0.0)
    result = strategy.start(LocalGrid(app, 4, folder=None if is_temporary else tmp_path), zeros(), 6)
    assert failed == [1]
    assert float(first(result.arrays)[0]) == pytest.approx(5 / 4)  # of six steps by 1 at one of four peers
