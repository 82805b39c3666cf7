"""What leaves a node under Flower: declared releases and nothing else, whatever a server says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from private_files import closed_files, umask_of_none
from raising import raises
from shards_in_turn import in_turn
from tiny_scenario import Build, Tiny
from variants import PLAIN, VARIANTS, settings_for

from flower_privdec import testing
from flower_privdec.algorithms.feddeper import FedDeper
from flower_privdec.algorithms.privsgp_vr import PrivSGPVR
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.flower import node_settings
from flower_privdec.flower.apps import client_app as clients
from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import CohortRun, Relay, Sharded
from flower_privdec.flower.error_formatting import line_for_server
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.flower.node_settings import HostSettings, PeerSettings, in_simulation
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.ledger.spending import runs_in
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.loading import scenario_hash, without_folders
from flower_privdec.testing import BrokenLaw, Seen
from tools.battery.together_grid import TogetherGrid

HOSTS = {"cohort": (CohortRun, 1), "relay": (Relay, 4), "sharded": (Sharded, 2)}
BLOCKS = "{name: privsgp-vr, table: blocks, learning_rate: 0.1}"
SHORT = ["rounds=4", "data.samples=48", "data.batch.size=4", "privacy.clip_norm=0.05", "algorithm.learning_rate=2.0"]


def bytes_of(content: RecordDict) -> str:
    """Return a hash of every byte that a message carries, but for the clock's."""
    digest = hashlib.sha256()
    for name, record in sorted(content.items()):
        for key, value in sorted(record.items()):
            if key not in testing.TIMES:
                data = value.data if isinstance(record, ArrayRecord) else repr(value).encode()
                digest.update(f"{name}/{key}/".encode() + data)
    return digest.hexdigest()


class Tapped(LocalGrid):
    """A grid on which somebody reads every answer of every node."""

    answers: list[str]

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        assert not reply.has_error(), reply.error.reason
        self.answers.append(bytes_of(reply.content))
        return reply


class TappedTogether(Tapped, TogetherGrid):
    """The same, of nodes that run at the same time."""


def seen_under_flower(host: str) -> Callable[[Experiment], Seen]:
    """Return a function that runs an experiment under Flower and returns what the server sees and leaves."""

    read = OwnParts.of

    def watch(experiment: Experiment) -> Seen:
        strategy, nodes = HOSTS[host]
        clients._build.cache_clear()
        clients._agreement.cache_clear()
        clients._whole.cache_clear()

        def own_parts(agreement: Agreement, peers: np.ndarray | None = None, *_: object, **__: object) -> OwnParts:
            """The own parts of some peers: keys as ever, and the experiment's examples."""
            own, held = read(agreement, peers), experiment.own.examples
            return replace(own, examples=replace(held, parts=tuple(held.parts[peer] for peer in own.peers)))

        with tempfile.TemporaryDirectory() as folder, patch.object(OwnParts, "of", own_parts), in_turn() as turns:
            kind = TappedTogether if strategy is Sharded else Tapped
            grid = kind(client_app(), min(nodes, experiment.scenario.n_peers), folder=Path(folder) / "nodes")
            grid.answers = []
            strategy(experiment.scenario, Path(folder) / "run").start(grid)
            seen = {"answers": sorted(grid.answers), "sent": turns.seen}
            return seen | testing.seen_in_folder(Path(folder) / "run")

    return watch


PAIRS = ["algorithm.name=privsgp", "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0}"]
# Every variant where nodes say something of each step, by relay or sharded in turn; every third algorithm where one
# node says only how the run ended.
HOSTED = [
    *((variant, ("relay", "sharded")[number % 2]) for number, variant in enumerate([*VARIANTS, PAIRS])),
    *((variant, "cohort") for variant in PLAIN[::3]),
]


@pytest.mark.parametrize(("variant", "host"), HOSTED, ids=[" ".join([*each, host]) for each, host in HOSTED])
def test_nothing_but_releases_leaves_a_node(build: Build, variant: list[str], host: str) -> None:
    experiment = build(*SHORT, *settings_for(*variant))
    peer = experiment.scenario.n_peers // 2 if host == "sharded" else 0  # whose shard is not the one that collects
    testing.assert_nothing_else_leaves(experiment, seen_under_flower(host), peer)


@pytest.mark.parametrize(
    ("algorithm", "row", "settings"),
    [
        (PrivSGPVR, "table.mean", ["algorithm.name=privsgp-vr"]),
        (FedDeper, "personal", ["algorithm.name=feddeper", "algorithm.rho=0"]),
    ],
)
def test_a_private_row_in_an_answer_is_found(
    build: Build, monkeypatch: pytest.MonkeyPatch, algorithm: type, row: str, settings: list[str]
) -> None:
    monkeypatch.setattr(algorithm, "open_rows", ("x", "w", row))
    with raises(BrokenLaw, "law.leak", "peer 0"):
        testing.assert_nothing_else_leaves(build(*SHORT, *settings_for(*settings)), seen_under_flower("relay"))


def test_an_answer_holds_only_what_peers_may_see(tiny: Tiny, tmp_path: Path) -> None:
    kept: list[RecordDict] = []

    class Keeping(LocalGrid):
        def _deliver(self, message: Message) -> Message:
            reply = super()._deliver(message)
            kept.append(reply.content)
            return reply

    scenario = tiny("algorithm={name: feddeper, learning_rate: 0.1, rho: 0.0, local_steps: 2}")
    Relay(scenario, tmp_path / "run").start(Keeping(client_app(), 4, folder=tmp_path / "nodes"))
    spent = {"epsilons", "deltas", "claimed", "rounds_run", "replies", "noise", "coalition_seconds"}
    spent |= {"if_all_collude", "colluding", "broken", "breaches", "counted"}
    names = {key for content in kept for record in content.array_records.values() for key in record}
    assert names == {"x", "w"}
    told = {key for content in kept for record in content.config_records.values() for key in record}
    assert told == {"partition-id", "num-partitions", "shards", "round", "at", "waiting", "constants", *spent}
    assert not [record for content in kept for record in content.metric_records.values()]


@pytest.mark.parametrize("host", HOSTS)
def test_files_of_nodes_and_server_are_owner_only(tiny: Tiny, tmp_path: Path, host: str) -> None:
    strategy, nodes = HOSTS[host]
    kind = TogetherGrid if strategy is Sharded else LocalGrid
    scenario = tiny("rounds=1", PAIRS[1])
    with umask_of_none():
        strategy(scenario, tmp_path / "run").start(kind(client_app(), nodes, folder=tmp_path / "nodes"))
    closed = closed_files(tmp_path)
    assert {"checkpoint", "model.safetensors"} <= closed
    assert host == "cohort" or "checkpoint-1" in closed


def test_a_deployed_node_keeps_its_secret_to_itself(tiny: Tiny, tmp_path: Path) -> None:
    with umask_of_none():
        (reply,) = deployed(tmp_path / "node").send_and_receive([order(tiny())])
    assert not reply.has_error()
    assert "secret" in closed_files(tmp_path)


@pytest.mark.parametrize("host", ["relay", "sharded"])
def test_an_inapplicable_claim_is_noted_like_the_engine(build: Build, tmp_path: Path, host: str) -> None:
    lines = ["algorithm={name: dp-dda}", "privacy.calibration=paper", "data.batch={sampling: full}"]
    experiment = build("rounds=1", *lines)
    strategy, nodes = HOSTS[host]
    kind = TogetherGrid if strategy is Sharded else LocalGrid
    strategy(experiment.scenario, tmp_path / host).start(kind(client_app(), nodes))
    noted = json.loads((tmp_path / host / "summary.json").read_text())["claim_note"]
    assert noted == run(experiment, tmp_path / "engine")["claim_note"]
    assert "its claim does not apply here" in noted


@pytest.mark.parametrize("host", ["relay", "sharded"])
@pytest.mark.parametrize(
    "settings",
    [
        ["compute.generator=system", "privacy.noise={kind: correlated, bands: 2}"],
        ["compute.generator=system", "data.batch.sampling=shuffle"],
        ["model={module: 'user_models:adapted'}", "data.batch.sampling=shuffle"],
        ["compute.generator=system", "privacy.ledger=ledger"],
    ],
)
def test_unhostable_scenarios_are_refused_first(tiny: Tiny, tmp_path: Path, host: str, settings: list[str]) -> None:
    strategy, nodes = HOSTS[host]
    grid = LocalGrid(client_app(), nodes, folder=tmp_path / "nodes")
    with raises(ScenarioError, "node.scenario"):
        strategy(tiny(*settings), tmp_path / "run").start(grid)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "is_one"),
    [
        ("task.metrics=[{module: 'user_tasks:nothing'}]", False),
        ("model={module: 'user_models:adapted'}", True),
        ("compute.generator=system", True),
    ],
)
def test_shuffled_epochs_that_are_drawn_anew_get_one_message(
    tiny: Tiny, tmp_path: Path, setting: str, is_one: bool
) -> None:
    scenario = tiny("data.batch.sampling=shuffle", "rounds=3", "evaluation.every=1", setting)
    strategy = CohortRun(scenario, tmp_path / "run")
    grid = LocalGrid(client_app(), 1)
    strategy.start(grid)
    assert (len(strategy._until) == 1) == is_one


# --- what a server may say ---


def order(scenario: Scenario, **fields: object) -> Message:
    values = {"scenario": to_yaml(scenario), "until": 2, "peers": [0], "base": "", "folder": "", "resume": False}
    record = ConfigRecord(values | {"begin": 0} | fields)  # type: ignore[arg-type]
    return Message(RecordDict({"request": record}), 100, "train.relay")


def deployed(folder: Path, **config: object) -> LocalGrid:
    """Return a grid of one node that is no simulation's, with a configuration of its own."""
    given = {"ledger": str(folder), "epsilon": 3.0, "delta": 1e-3, "partition-id": 0, "num-partitions": 4} | config
    own_config = {key: value for key, value in given.items() if value is not None}
    grid = LocalGrid(client_app(), 1, config={0: own_config})  # type: ignore[dict-item]
    node = next(iter(grid.contexts.values()))
    node.node_config = {key: value for key, value in node.node_config.items() if key in own_config}
    return grid


def answer(grid: LocalGrid, message: Message) -> Message:
    (reply,) = grid.send_and_receive([message])
    return reply


def go_on(grid: LocalGrid, scenario: Scenario, heard: Message, **fields: object) -> Message:
    """WorkRequest a node to go on with what it said itself, as if its neighbours had said it."""
    message = order(scenario, **{"begin": -1, **fields})
    for peer in range(1, 4):
        message.content[f"peer-{peer}"] = heard.content.array_records["peer-0"]
    return answer(grid, message)


class Reading(LocalGrid):
    """A grid on which somebody reads every request to a node, and no node works."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sent: list[str] = []

    def _deliver(self, message: Message) -> Message:
        if message.metadata.message_type.startswith("query"):
            return super()._deliver(message)
        self.sent.append(repr(dict(message.content.config_records["request"])))
        return Message(Error(2, "it was read"), reply_to=message)


@pytest.mark.parametrize("mode", ["relay", "sharded"])
def test_no_server_folder_reaches_a_deployed_node(
    tiny: Tiny, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of a simulation are told of them; a node of another machine has its own."""
    monkeypatch.chdir(tmp_path)
    strategy, nodes = HOSTS[mode]
    scenario, sent = tiny("rounds=1", f"data.root={tmp_path}/home-of-somebody/digits"), []
    for config in ({peer: {"ledger": "own"} for peer in range(nodes)}, None):
        grid = Reading(client_app(), nodes, config=config)
        with raises(RunError, "nodes.failed", "it was read"):
            strategy(scenario, Path(f"run-{len(sent)}")).start(grid)
        sent.append(" ".join(grid.sent))
    assert "digits" in sent[0]
    assert str(tmp_path) not in sent[0]
    assert f"{tmp_path}/home-of-somebody/digits" in sent[1]
    assert f"{tmp_path}/run-1" in sent[1]


def test_a_scenario_without_folders_is_the_same_run(tiny: Tiny) -> None:
    scenario = tiny()
    paths = {"root": "/a/b/part-{peer}/own.npz", "test": "/a/c/test.npz", "samples": None}
    scenario = scenario.model_copy(update={"data": scenario.data.model_copy(update=paths)})
    plain = without_folders(scenario)
    assert (plain.data.root, plain.data.test) == ("part-{peer}/own.npz", "test.npz")
    assert scenario_hash(plain) == scenario_hash(scenario)
    assert "/a" not in to_yaml(plain).replace("/own", "")


def test_an_error_shows_no_folder_of_a_node(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = order(tiny("rounds=2"), begin=1)
    refused = answer(deployed(tmp_path / "node"), message)
    assert "checkpoint-1 is not there" in refused.error.reason
    assert "/" not in refused.error.reason
    assert f"{tmp_path}/node/checkpoint-1 is not there" in caplog.text
    for name in ("spoilt", "Dr No's spoilt disk"):
        ledger = tmp_path / name / "ledger" / "digits.jsonl"
        ledger.parent.mkdir(parents=True)
        ledger.write_text("{}\n")
        refused = answer(deployed(tmp_path / name), order(tiny("rounds=2")))
        assert "digits.jsonl" in refused.error.reason
        assert not any(part in refused.error.reason for part in (str(tmp_path), "Dr No", "disk"))
        assert str(ledger) in caplog.text


def test_a_node_in_the_root_folder_keeps_other_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (context,) = deployed(tmp_path / "node").contexts.values()
    line = line_for_server(RunError(f"{tmp_path}/node/ledger: 3 of 4 rounds/steps, either / or"), context)
    assert line == "ledger: 3 of 4 rounds/steps, either / or"


def test_a_nodes_data_error_stays_in_its_log(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the row of a table that is wrong, nor how many examples the node has."""
    table = tmp_path / "wards.csv"
    table.write_text("age,ill\n" + "40,1\n" * 30 + "elderly,0\n")
    public = tmp_path / "public.csv"
    public.write_text("age,ill\n40,1\n60,0\n")
    columns = "{target: ill, numbers: {age: [50, 10]}}"
    wrong_row = f"data={{dataset: csv, root: {table}, test: {public}, table: {columns}, batch: {{size: 2}}}}"
    for number, setting in enumerate((wrong_row, "data.at_least=100000")):
        own = {"data-root": str(table), "data-test": str(public)} if setting == wrong_row else {}
        refused = answer(deployed(tmp_path / str(number), **own), order(tiny("rounds=2", setting)))
        assert "see its own log" in refused.error.reason
        assert not re.search(r"wards|32|age|100000|at_least", refused.error.reason)
    assert "wards.csv:32: column 'age'" in caplog.text
    assert "data.at_least=100000" in caplog.text


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Return a list to which every private step of the test adds its number and the examples it draws."""
    steps: list[tuple[int, list[int]]] = []
    release = Cohort.add_noise_

    def noted(self: Cohort, step: PrivateStep) -> None:
        steps.append((step.step, step.batch.index[step.batch.weight > 0].tolist()))
        release(self, step)

    monkeypatch.setattr(Cohort, "add_noise_", noted)
    return steps


def ledger_of(folder: Path) -> dict:
    return runs_in(read_chain(folder / "ledger" / "digits.jsonl")[1])


def test_a_deployed_node_owns_its_noise_and_ledger(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=2")
    rows = []
    for name in ("a", "b"):
        reply = answer(deployed(tmp_path / name), order(scenario))
        assert not reply.has_error(), reply.error.reason
        rows.append(reply.content.array_records["peer-0"]["x"].numpy())
        (releases,) = next(iter(ledger_of(tmp_path / name).values()))
        assert [(release.sampling, release.steps) for release in releases] == [("poisson", 1)]
    assert not np.array_equal(*rows)  # the same scenario and data: other noise, and other batches
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o77 == 0


def test_a_deployed_node_imports_only_allowed_modules(tiny: Tiny, tmp_path: Path) -> None:
    for setting in (
        "algorithm={module: 'user_parts:HeavyBall', learning_rate: 0.1}",
        "model={module: 'user_models:residual'}",
    ):
        scenario, module = tiny("rounds=2", setting), setting.split("'")[1].partition(":")[0]
        refused = answer(deployed(tmp_path / "node"), order(scenario))
        assert refused.has_error()
        assert f"'{module}:" in refused.error.reason
        assert "its owner has to allow it" in refused.error.reason
        allowed = answer(deployed(tmp_path / module, modules=f"others, {module}"), order(scenario))
        assert not allowed.has_error(), allowed.error.reason


def test_a_deployed_node_pays_for_repeated_steps(tiny: Tiny, tmp_path: Path) -> None:
    for _ in range(3):
        grid = deployed(tmp_path / "node", epsilon=30.0)
        assert not answer(grid, order(tiny("rounds=2"))).has_error()
    paid = ledger_of(tmp_path / "node")
    assert len(paid) == 3


Taken = list[tuple[int, list[int]]]


def test_a_deployed_node_pays_for_steps_in_any_order(tiny: Tiny, tmp_path: Path, taken: Taken) -> None:
    scenario, grid = tiny("rounds=20", "privacy.epsilon=1"), deployed(tmp_path / "node", epsilon=100.0)
    for _ in range(3):  # begun again and again: what the ledger has paid is further than the run is
        reply = answer(grid, order(scenario, until=20))
        for _ in range(3):
            reply = go_on(grid, scenario, reply, until=20)
            assert not reply.has_error(), reply.error.reason
    assert [step for step, _ in taken] == [0, 1, 2, 3] * 3
    paid = [release.steps for (releases,) in ledger_of(tmp_path / "node").values() for release in releases]
    assert sum(paid) == len(taken)


@pytest.mark.parametrize(
    "settings", [[], ["data.batch.sampling=uniform"], ["data.batch.sampling=blocks", "algorithm=" + BLOCKS]]
)
def test_a_repeated_step_draws_its_examples_again(
    tiny: Tiny, tmp_path: Path, taken: Taken, settings: list[str]
) -> None:
    scenario = tiny("rounds=20", "data.batch.size=2", *settings)
    for _ in range(6):
        assert not answer(deployed(tmp_path / "node", epsilon=1e6), order(scenario, until=20)).has_error()
    assert {step for step, _ in taken} == {0}
    assert len({tuple(drawn) for _, drawn in taken}) > 1


def test_a_deployed_node_refuses_another_runs_state(tiny: Tiny, tmp_path: Path) -> None:
    base = "algorithm={name: feddeper, learning_rate: 0.1, local_steps: 2, rho: %s}"
    grid = deployed(tmp_path / "node", epsilon=100.0)
    private = tiny(base % 0.0)  # its personal model is neither clipped nor noised, and must not be sent
    reply = answer(grid, order(private, until=6))
    refused = go_on(grid, tiny(base % 0.5), reply, until=6)
    assert "is in the middle of another run" in refused.error.reason
    assert not go_on(grid, private, reply, until=6).has_error()


def test_a_server_names_neither_code_nor_files(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("alice,52,yes\n")
    call = f'model={{module: "os:system", arguments: {{command: "touch {tmp_path}/ran"}}}}'
    file = f"topology={{name: edge-list, file: {tmp_path}/own.csv}}"
    for setting, rule in ((call, "this process imports no module"), (file, "is not a server's to name")):
        refused = answer(deployed(tmp_path / "node"), order(tiny(setting)))
        assert rule in refused.error.reason
        assert "alice" not in refused.error.reason
    assert not (tmp_path / "ran").exists()


def test_a_nodes_own_budget_overrides_the_scenario(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=2", "privacy.epsilon=1000")
    reply = answer(deployed(tmp_path / "node", epsilon=0.5), order(scenario))
    assert not reply.has_error()
    assert not (tmp_path / "node" / "ledger" / "digits.jsonl").read_text()
    start = Experiment.build(scenario).initial.numpy()
    sent = reply.content.array_records["peer-0"]
    np.testing.assert_array_equal(sent["x"].numpy() / sent["w"].numpy(), start)  # its share of x and of w


@pytest.mark.parametrize(
    ("config", "fields", "settings", "rule"),
    [
        ({"ledger": None}, {}, [], "lacks ledger, which no server may set"),
        ({"epsilon": None, "delta": None}, {}, [], "lacks epsilon, delta,"),
        ({"epsilon": "much"}, {}, [], "epsilon='much' of the node-config must be a number"),
        ({"epsilon": -1.0}, {}, [], "epsilon=-1.0 must be > 0"),
        ({"delta": 2.0}, {}, [], r"delta=2.0 in \(0, 1\)"),
        ({}, {"peers": [2]}, [], "is peer 0 of the 4 peers.* peers 2"),
        ({}, {}, ["privacy=none"], "privacy: none breaks this SuperNode's epsilon=3.0"),
        ({}, {}, ["data.batch.sampling=shuffle"], "'shuffle' must be another on SuperNodes"),
        ({}, {}, ["privacy.ledger=/tmp/elsewhere"], "privacy.ledger=elsewhere is not for relay mode"),
        ({}, {"begin": 4}, [], "checkpoint-4 is not there"),
        ({}, {"begin": -1}, [], r"the node of peers \[0\] has lost its state"),
    ],
)
def test_a_deployed_node_refuses_unauthorized_settings(
    tiny: Tiny, tmp_path: Path, config: dict[str, object], fields: dict[str, object], settings: list[str], rule: str
) -> None:
    reply = answer(deployed(tmp_path / "node", **config), order(tiny(*settings), **fields))
    assert re.search(rule, reply.error.reason)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_clock_that_is_set_back_loses_no_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm.name=local", "rounds=3")
    node = deployed(tmp_path / "node")
    for until in (1, 2, 3):
        assert not answer(node, order(scenario, until=until, begin=until - 1)).has_error()
        for path in (tmp_path / "node").glob("checkpoint-*"):
            os.utime(path, (2**32 - until, 2**32 - until))  # what comes next is older
    assert {path.name for path in (tmp_path / "node").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}


@pytest.mark.parametrize("host", ["cohort"])
def test_no_deployed_node_hosts_everybody(tiny: Tiny, tmp_path: Path, host: str) -> None:
    message = order(tiny(), folder=str(tmp_path / "run"), base=str(tmp_path))
    message.metadata.message_type = "train.cohort"
    reply = answer(deployed(tmp_path / "node"), message)
    assert "one node hosts all peers only in a simulation" in reply.error.reason
    assert not (tmp_path / "run").exists()


def test_a_deployed_node_reads_its_own_data(tiny: Tiny, tmp_path: Path) -> None:
    arrays = {"x_train": np.eye(8, 5), "y_train": np.arange(8) % 2, "x_test": np.eye(4, 5), "y_test": np.arange(4) % 2}
    np.savez(tmp_path / "own.npz", **arrays)
    data = "data={dataset: npz, root: /etc/passwd, batch: {sampling: poisson, size: 1}}"
    reply = answer(deployed(tmp_path / "node", **{"data-root": str(tmp_path / "own.npz")}), order(tiny(data)))
    assert not reply.has_error(), reply.error.reason
    refused = answer(deployed(tmp_path / "other"), order(tiny(data)))
    assert "data.root=None is not a file" in refused.error.reason


@pytest.mark.parametrize("label", ["PLANTED", "4711.25"])
def test_a_tables_error_stays_with_its_node(
    label: str, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{row},{row % 2}" for row in range(8)]
    (tmp_path / "test.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    (tmp_path / "own.csv").write_text("\n".join(["age,sick", *rows, f"1,{label}"]) + "\n")
    table = "{numbers: {age: [4, 2]}, target: sick}"
    data = f"data={{dataset: csv, root: a.csv, test: b.csv, table: {table}, batch: {{sampling: poisson, size: 1}}}}"
    config = {"data-root": str(tmp_path / "own.csv"), "data-test": str(tmp_path / "test.csv")}
    reply = answer(deployed(tmp_path / "node", **config), order(tiny(data)))
    assert "peers [0] cannot build them from the scenario and its own data" in reply.error.reason
    for word in (label, "own.csv", "sick", "row"):
        assert word not in reply.error.reason
    assert "own.csv:10: column 'sick'" in caplog.text  # the owner's own log


SIMULATED = {"partition-id": 0, "num-partitions": 4}  # a node-config of Flower's simulation


class Ray:
    """Ray as a process has it: a worker of a cluster, or a driver that called `ray.init()`."""

    SCRIPT_MODE, WORKER_MODE = 0, 1

    def __init__(self, mode: int) -> None:
        self.worker = SimpleNamespace(mode=mode)

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Ray:
        return self


def test_no_message_turns_a_process_into_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_simulation(SIMULATED)
    with node_settings.simulating():
        assert in_simulation({**SIMULATED, "folder": "own"})
    monkeypatch.setitem(sys.modules, "ray", Ray(Ray.WORKER_MODE))
    assert in_simulation(SIMULATED)


@pytest.mark.parametrize("mode", [Ray.SCRIPT_MODE, Ray.WORKER_MODE], ids=["driver", "worker"])
def test_starting_ray_does_not_make_a_simulation(mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The app's own `ray.init()` makes its process a driver; not even a worker's has an owner's node-config."""
    monkeypatch.setitem(sys.modules, "ray", Ray(mode))
    owned = {**SIMULATED, "folder": str(tmp_path)}
    assert not in_simulation(owned)
    assert in_simulation(SIMULATED) == (mode == Ray.WORKER_MODE)
    context = Context(1, 2, owned, RecordDict(), {})
    assert not PeerSettings.of(context, -1, "", None).simulated
    with raises(RunError, "node.missing", names="ledger, epsilon, delta"):
        HostSettings.of(context, "run")


def test_the_ledger_says_what_the_messages_say(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny()
    relay = Relay(scenario, tmp_path / "run")
    relay.start(LocalGrid(client_app(), 4, folder=tmp_path / "nodes"))
    assert relay._spent.rounds_run == [6] * 4
    for path in tmp_path.glob("nodes/*/*/ledger/digits.jsonl"):
        ((releases,),) = runs_in(read_chain(path)[1]).values()
        assert relay._spent.epsilons[0] == epsilon(releases, 1e-3)
