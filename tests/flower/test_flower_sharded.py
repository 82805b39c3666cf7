"""Sharded mode under Flower: nodes that run at the same time, fail, go on, and say for themselves what they host."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import flower_runs
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec import load_run
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.flower.apps import server_app
from flower_privdec.flower.apps.client_app import Node, client_app
from flower_privdec.flower.apps.server_app import CohortRun, Relay, Sharded, hosting, scenario_strategy
from flower_privdec.flower.launch.launcher import flower_run
from flower_privdec.flower.launch.local_grid import LocalGrid, with_id
from flower_privdec.flower.node_settings import VISIBLE_GPUS, see_gpus
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.scenario import Scenario, to_yaml
from tools.battery.together_grid import TogetherGrid


def test_a_failed_shard_is_named_and_the_run_resumes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Node.save

    def full(node: Node, state: State, cohort: Cohort) -> None:
        if node.experiment.own.peers[0] == 2 and state.round_index == 4:
            raise OSError(errno.ENOSPC, "No space left on device", "checkpoint-4")
        save(node, state, cohort)

    run(Experiment.build(tiny()), tmp_path / "engine")
    with monkeypatch.context() as broken:
        broken.setattr(Node, "save", full)
        with raises(RunError, "nodes.failed", names="peers 2 to 3 .*OSError.* No space left") as failed:
            flower_runs.run_under_flower(tiny(), tmp_path / "flower", "sharded")
    assert "peers 0 to 1" not in str(failed.value)
    assert "the shards keep round 2: mend it, then run the same command with --resume" in str(failed.value)
    nodes = {path.parent.name: path for path in (tmp_path / "flower-nodes").glob("*/peers-*/checkpoint-4")}
    assert set(nodes) <= {"peers-0-1"}  # it may have come so far, and goes back
    with raises(ScenarioError, "api.no-model"):
        load_run(tmp_path / "flower").model()
    flower_runs.run_under_flower(tiny(), tmp_path / "flower", "sharded", resume=True)
    flower_runs.assert_same_run(tmp_path / "flower", tmp_path / "engine")


def test_a_finished_run_can_be_concluded_again(tiny: Tiny, tmp_path: Path) -> None:
    out = flower_runs.run_under_flower(tiny("rounds=2"), tmp_path / "flower", "sharded")
    models, lines = (out / "model.safetensors").read_bytes(), (out / "metrics.jsonl").read_text()
    (out / "summary.json").unlink()
    flower_runs.run_under_flower(tiny("rounds=2"), out, "sharded", resume=True)
    assert (out / "summary.json").exists()
    assert ((out / "model.safetensors").read_bytes(), (out / "metrics.jsonl").read_text()) == (models, lines)


def test_a_run_refuses_another_number_of_shards(tiny: Tiny, tmp_path: Path) -> None:
    flower_runs.run_under_flower(tiny("rounds=2"), tmp_path / "flower", "sharded")
    grid = TogetherGrid(client_app(), 3, folder=tmp_path / "flower-nodes")
    with raises(RunError, "shards.count", names="2 shards.*3"):
        Sharded(tiny("rounds=2"), tmp_path / "flower", resume=True).start(grid)


def test_messages_stay_few_however_often_it_evaluates(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharded, "MESSAGES", 2)
    asked: list[str] = []
    deliver = TogetherGrid._deliver

    def counted(grid: TogetherGrid, message: Message) -> Message:
        asked.append(message.metadata.message_type)
        return deliver(grid, message)

    monkeypatch.setattr(TogetherGrid, "_deliver", counted)
    out = flower_runs.run_under_flower(tiny("evaluation.every=1"), tmp_path / "flower", "sharded")
    assert [line["round"] for line in flower_runs.metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert asked.count("train.sharded") == 2 * 2


def failing(tiny: Tiny, tmp_path: Path, why: dict[int, str | None], n_nodes: int = 3) -> str:
    """Return what a strategy says where nodes answer with errors, or with None, nothing."""

    class Broken(TogetherGrid):
        def pull_messages(self, message_ids: object) -> list[Message]:
            return [reply for reply in super().pull_messages(message_ids) if reply is not None]

        def _deliver(self, message: Message) -> Message:
            place = message.metadata.dst_node_id - 100
            if message.metadata.message_type == "train.sharded":
                said = why[place]
                return None if said is None else Message(Error(2, said), reply_to=message)
            return super()._deliver(message)

    strategy = Sharded(tiny("n_peers=6"), tmp_path / "run")
    with pytest.raises(RunError) as failed:
        strategy.start(Broken(client_app(), n_nodes))
    return str(failed.value)


LOST = "lost touch with the shard of peers 2-3 in round 7 (Connection closed by peer)"


@pytest.mark.parametrize(
    ("why", "named_peers", "words"),
    [
        (
            {0: LOST, 1: "the disk is on fire", 2: LOST},
            "2 to 3",
            "the disk is on fire (the others lost touch in round 7)",
        ),
        ({0: LOST, 1: None, 2: LOST}, "2 to 3", "it does not answer; see the SuperNode's log (the others lost"),
        ({0: LOST, 1: LOST, 2: LOST}, "0 to 1", LOST),
        (
            {0: LOST, 1: "<class 'ray.exceptions.ActorDiedError'>:<'The actor died.'>", 2: LOST},
            "2 to 3",
            "its process has ended (killed, or out of memory)",
        ),
    ],
)
def test_the_shard_that_knows_why_is_blamed(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: dict[int, str | None],
    named_peers: str,
    words: str,
) -> None:
    monkeypatch.setattr(server_app, "GRACE", 0.3)
    said = failing(tiny, tmp_path, why)
    assert said.startswith(f"the SuperNode of peers {named_peers} failed: ")
    assert words in said
    assert "nothing is kept: mend it, then run the same command" in said


# --- deployed nodes, which decide for themselves ---


def deployed(tmp_path: Path, n_nodes: int = 2, **more: object) -> TogetherGrid:
    """Return nodes that are no simulation's, each with a folder, a budget and an address of its own."""
    rendezvous = own_addresses(1)[0]
    configs = {
        place: {
            **{"ledger": str(tmp_path / f"node-{place}"), "epsilon": 3.0, "delta": 1e-3},
            **{"shard-address": "127.0.0.1", "shard-rendezvous": rendezvous},
            **more,
        }
        for place in range(n_nodes)
    }
    grid = TogetherGrid(client_app(), n_nodes, config=configs)  # type: ignore[arg-type]
    for context in grid.contexts.values():
        context.node_config = {key: each for key, each in context.node_config.items() if each is not None}
        context.node_config.pop("folder")
    return grid


def test_deployed_nodes_host_shares_and_keep_their_own_ledgers(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=2")
    grid = deployed(tmp_path)
    Sharded(scenario, tmp_path / "run").start(grid)
    run(Experiment.build(scenario), tmp_path / "engine")
    ours, theirs = (flower_runs.metrics(tmp_path / name)[-1] for name in ("run", "engine"))
    assert ours["epsilon"] == theirs["epsilon"]
    assert ours["loss"] != theirs["loss"]  # their noise is not that of a simulation
    for place, peers in enumerate(([0, 1], [2, 3])):
        paid = read_chain(tmp_path / f"node-{place}" / "ledger" / "digits.jsonl")[1]
        assert [(each.from_step, each.to_step) for each in paid] == [(0, 1), (1, 2)]
        assert {peer for each in paid for share in each.charges for peer in share.peers} == set(peers)


def order(scenario: Scenario, **fields: object) -> Message:
    values = {"scenario": to_yaml(scenario), "until": 2, "peers": [0, 1], "begin": 0, "shards": 2, "token": "t"}
    return with_id(Message(RecordDict({"request": ConfigRecord(values | fields)}), 100, "train.sharded"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "fields", "settings", "rule"),
    [
        ({"shard-address": None, "shard-rendezvous": None}, {}, [], "lacks shard-address and shard-rendezvous"),
        ({"shard-rendezvous": None}, {}, [], "shard-rendezvous='' must be an IP address"),
        ({"shard-address": "0.0.0.0"}, {}, [], "shard-address='0.0.0.0' and shard-rendezvous"),
        (
            {},
            {"peers": [2, 3]},
            [],
            "is shard 0 of 2 of the 4 peers.* peers 2-3",
        ),
        ({}, {"peers": [0, 1, 2, 3], "shards": 1}, [], "peers 0-3 of 1 shards"),
        ({}, {"peers": [0], "shards": 4}, [], "peers 0 of 4 shards"),
        ({}, {"peers": []}, [], "is shard 0 of 2 of the 4 peers"),
        ({}, {"peers": [0, 1], "shards": 0}, [], "is peer 0 of the 4 peers.* peers 0-1"),
        ({}, {}, ["privacy=none"], "privacy: none breaks this SuperNode's epsilon=3.0"),
        ({}, {}, ["privacy.ledger=/tmp/elsewhere"], "is not for relay mode or shards"),
        (
            {"data-root": "own.npz", "data-test": "test.npz"},
            {},
            ["data={dataset: npz, root: 'x/{peer}.npz', test: t.npz, batch: {sampling: poisson, size: 1}}"],
            r"data-root='own.npz' of this SuperNode must have \{peer\} in it",
        ),
    ],
)
def test_a_deployed_node_hosts_only_its_own_share(
    tiny: Tiny, tmp_path: Path, config: dict[str, object], fields: dict[str, object], settings: list[str], rule: str
) -> None:
    grid = deployed(tmp_path, **config)
    (reply,) = grid.send_and_receive([order(tiny(*settings), **fields)])
    assert re.search(rule, reply.error.reason)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_deployed_node_continues_only_from_its_rounds(tiny: Tiny, tmp_path: Path) -> None:
    for begin, rule in ((-1, "has lost its state"), (4, "checkpoint-4 is not there")):
        grid = deployed(tmp_path, 1)
        (reply,) = grid.send_and_receive([order(tiny(), peers=[0, 1, 2, 3], shards=1, begin=begin)])
        assert rule in reply.error.reason


def test_an_address_that_others_reach_is_said(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_privdec.engine.shards.rendezvous.Rendezvous.is_open", True)
    Sharded(tiny("rounds=1"), tmp_path / "run").start(deployed(tmp_path))
    assert "Rows pass 127.0.0.1 unencrypted: keep its ports to machines that you trust" in caplog.text


# --- the mode that nobody has to name ---


def chosen(grid: LocalGrid, mode: str = "auto") -> type:
    return hosting(mode, grid)[0]


def test_auto_mode_follows_from_where_the_nodes_run(tmp_path: Path) -> None:
    own = {"ledger": str(tmp_path), "epsilon": 3.0, "delta": 1e-3}
    elsewhere = LocalGrid(client_app(), 2, config={peer: dict(own) for peer in range(2)})
    assert chosen(LocalGrid(client_app(), 2)) is CohortRun
    assert chosen(elsewhere) is Relay
    assert chosen(deployed(tmp_path)) is Sharded
    assert [chosen(grid, "relay") for grid in (LocalGrid(client_app(), 2), deployed(tmp_path))] == [Relay] * 2
    assert [chosen(grid, "sharded") for grid in (LocalGrid(client_app(), 2), elsewhere)] == [Sharded] * 2


def test_deployed_shards_need_no_mode_and_are_asked_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    deliver = TogetherGrid._deliver

    def counted(grid: TogetherGrid, message: Message) -> Message:
        asked.append(message.metadata.message_type)
        return deliver(grid, message)

    monkeypatch.setattr(TogetherGrid, "_deliver", counted)
    (tmp_path / "mine.yaml").write_text(to_yaml(tiny("rounds=2", "evaluation.every=2")))
    context = Context(7, 0, {}, RecordDict(), {"scenario": "mine.yaml", "base": str(tmp_path)})
    grid = deployed(tmp_path)
    strategy = scenario_strategy(grid, context, tmp_path)
    strategy.start(grid)
    assert strategy.numbers == Sharded.numbers
    assert (tmp_path / "runs" / "tiny-7" / "summary.json").exists()
    assert sorted(asked) == ["query.partition"] * 2 + ["train.sharded"] * 2


@pytest.mark.parametrize(
    ("hidden", "server", "seen"),
    [("", "all", None), ("", "1", "1"), ("", "", ""), ("0", "all", "0"), (None, "1", None)],
)
def test_a_simulation_sees_the_gpus_that_the_server_sees(
    hidden: str | None, server: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray hides them from ClientApps that ask for none."""
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    if hidden is not None:
        monkeypatch.setenv(VISIBLE_GPUS, hidden)
    see_gpus(server)
    assert os.environ.get(VISIBLE_GPUS) == seen


# --- the launcher ---


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mode": "shards"}, "mode='shards' .*did you mean 'sharded'"),
        ({"mode": "sharded", "n_supernodes": 5}, "flower.supernodes: n_supernodes=5 .* n_peers=4"),
        ({"mode": "sharded", "n_supernodes": 3}, "flower.supernodes: n_supernodes=3 .*cpus=1 .* at most 2"),
        ({"mode": "sharded", "n_supernodes": 2, "cpus": 2}, "flower.supernodes: n_supernodes=2 .*cpus=2 .* at most 1"),
    ],
)
def test_shards_that_cannot_run_together_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], rule: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("flower_privdec.flower.launch.launcher.find_spec", lambda name: name)
    with pytest.raises(ScenarioError) as refused:
        flower_run(tiny(), tmp_path / "run", **options)  # type: ignore[arg-type]
    assert re.search(rule, f"{refused.value.code}: {refused.value}")
    assert not (tmp_path / "run").exists()
