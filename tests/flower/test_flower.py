"""Flower's runtime without Ray: the ClientApp is called in process by a LocalGrid."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_runs import HOSTS, assert_same_run, final_rows, run_under_flower
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from raising import raises
from tiny_scenario import Tiny
from variants import choosing, settings_for

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core import State
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.records import WorkRequest, pack_rows, pack_state, unpack_rows, unpack_state
from flower_privdec.flower.apps.server_app import (
    CohortRun,
    Relay,
    ScenarioStrategy,
    Sharded,
    find_nodes,
    scenario_strategy,
)
from flower_privdec.flower.launch import launcher, supervisor
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.flower.node_settings import HostSettings
from flower_privdec.planner.plan import make_plan
from flower_privdec.scenario import Scenario, to_yaml

# Every algorithm among several nodes, by relay or sharded in turn; every third one on one node, which runs the engine.
THREAD_EXITS = {"x86_64": 60, "aarch64": 93}  # the number of Linux's system call `exit`, which ends one thread

HOSTED = [
    *((name, ("sharded", "relay")[number % 2]) for number, name in enumerate(ALGORITHMS)),
    *((name, "cohort") for name in list(ALGORITHMS)[::3]),
]


@pytest.fixture(scope="module")
def engine_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Path]:
    """Return a function that runs a scenario in the engine, once for all tests."""
    done: dict[str, Path] = {}

    def engine_run(scenario: Scenario) -> Path:
        text = to_yaml(scenario)
        if text not in done:
            done[text] = tmp_path_factory.mktemp("engine") / "run"
            run(Experiment.build(scenario), done[text])
        return done[text]

    return engine_run


@pytest.mark.parametrize(("name", "host"), HOSTED)
def test_engine_and_flower_follow_one_trajectory(
    tiny: Tiny, tmp_path: Path, engine_runs: Callable[[Scenario], Path], name: str, host: str
) -> None:
    scenario = tiny(*settings_for(choosing(name)), "rounds=5")  # the last line of the metrics is of one round
    engine, flower = engine_runs(scenario), run_under_flower(scenario, tmp_path / "flower", host)
    assert_same_run(flower, engine)
    summary, expected = (json.loads((folder / "summary.json").read_text()) for folder in (flower, engine))
    assert summary.keys() - {"numbers"} == expected.keys()
    assert ("about 1e-6 in float32" in summary.get("numbers", "")) == (host != "cohort")
    assert (summary["runtime"], summary["privacy"]) == ("flower", expected["privacy"])
    assert summary.get("coalition_share_of_wall_time", 1) > 0


@pytest.mark.parametrize("host", HOSTS)
def test_runtimes_share_no_noise_unless_portable(
    tiny: Tiny, tmp_path: Path, engine_runs: Callable[[Scenario], Path], host: str
) -> None:
    scenario = tiny("compute.generator=null", "rounds=2")
    rows = [final_rows(out)["x"] for out in (run_under_flower(scenario, tmp_path / "f", host), engine_runs(scenario))]
    assert torch.equal(*rows) == (host == "cohort")
    assert torch.allclose(*rows) == (host == "cohort")


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["correlated", "cancelling, colluding: 1"])
def test_correlated_noise_is_the_engines_under_flower(
    tiny: Tiny, engine_runs: Callable[[Scenario], Path], tmp_path: Path, host: str, kind: str
) -> None:
    scenario = tiny(f"privacy.noise={{kind: {kind}, bands: 3}}", "rounds=5")
    assert_same_run(run_under_flower(scenario, tmp_path / "flower", host), engine_runs(scenario))


def test_a_cohort_drawing_anew_pays_an_epoch_once(tiny: Tiny, tmp_path: Path) -> None:
    """Rounds of one epoch, an evaluation after each: shuffling anew in every message would cost an epoch each."""
    settings = [
        "compute.generator=system",
        "data.batch={sampling: shuffle, size: 5}",
        "privacy={noise_multiplier: 2.0, delta: 1.0e-3}",
        "evaluation.every=1",
        "rounds=4",
    ]
    scenario = tiny(*settings)
    out = run_under_flower(scenario, tmp_path / "out", "cohort")
    printed = [row["epsilon"] for row in json.loads((out / "summary.json").read_text())["privacy"]]
    planned = [row["epsilon"] for row in make_plan(Experiment.build(scenario))["peers"]]
    assert printed == pytest.approx(planned, rel=1e-9)


@pytest.mark.parametrize("n_nodes", [3, 6])
def test_nodes_share_unevenly_or_stay_idle(
    tiny: Tiny, tmp_path: Path, engine_runs: Callable[[Scenario], Path], n_nodes: int
) -> None:
    Relay(tiny(), tmp_path / "relay").start(LocalGrid(client_app(), n_nodes))
    assert_same_run(tmp_path / "relay", engine_runs(tiny()))


@pytest.mark.parametrize(
    "settings",
    [
        ["compute.dtype=float32", "privacy=none"],
        ["participation={kind: uniform, fraction: 0.5}"],
        ["topology.name=server", "participation={kind: uniform, fraction: 0.5}"],
        ["topology.name=erdos-renyi", "topology.probability=0.6", "algorithm.name=d-psgd"],
        ["evaluation.every=4"],
        ["data.batch={sampling: poisson, rate: 0.13}", "data.partition={kind: sizes, sizes: [3, 20, 90, 127]}"],
        ["data.batch.small_peers=full", "data.partition={kind: sizes, sizes: [3, 20, 90, 127]}"],
        [
            "algorithm={name: pdsl, learning_rate: 0.3, validation_subsample: 20}",
            *("topology.name=complete", "participation={kind: uniform, fraction: 0.75}", "data.validation=40"),
        ],
        [
            "algorithm={name: dp-cga, learning_rate: 0.3}",
            "topology={name: random-edges, edges: 3, supergraph: complete}",
        ],
        *(
            [
                f"algorithm={{name: privsgp-vr, learning_rate: 0.5, table: {table}}}",
                f"data.batch.sampling={'blocks' if table == 'blocks' else 'poisson'}",
                "data.partition={kind: sizes, sizes: [100, 30, 70, 40]}",
            ]
            for table in ("factored", "blocks", "snapshot", "dense")
        ),
    ],
    ids=lambda settings: settings[0],
)
def test_relay_follows_the_engine(
    tiny: Tiny, tmp_path: Path, engine_runs: Callable[[Scenario], Path], settings: list[str]
) -> None:
    scenario = tiny(*settings)
    assert_same_run(run_under_flower(scenario, tmp_path / "relay", "relay"), engine_runs(scenario))


def failing_app(train_messages: int, kind: str) -> ClientApp:
    """Return a ClientApp that raises at one of its train messages."""
    good, app, left = client_app(), ClientApp(), [train_messages]

    @app.train(kind)
    def train(message: Message, context: Context) -> Message:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("the disk is on fire")
        return good(message, context)

    app.query("partition")(good)
    return app


@pytest.mark.parametrize(("host", "kind", "after"), [("relay", "relay", 14), ("cohort", "cohort", 1)])
def test_failed_run_says_why_and_resumes_where_it_was(
    tiny: Tiny, tmp_path: Path, engine_runs: Callable[[Scenario], Path], host: str, kind: str, after: int
) -> None:
    scenario = tiny()
    with raises(RunError, "nodes.failed", names="peers? .*the disk is on fire"):
        run_under_flower(scenario, tmp_path / "flower", host, failing_app(after, kind))
    assert not (tmp_path / "flower" / "summary.json").exists()
    run_under_flower(scenario, tmp_path / "flower", host, resume=True)
    assert_same_run(tmp_path / "flower", engine_runs(scenario))


def test_relay_needs_the_nodes_own_checkpoints(tiny: Tiny, tmp_path: Path) -> None:
    class StopHereError(Exception):
        pass

    def interrupt(line: dict[str, object]) -> None:
        if line["round"] == 4:
            raise StopHereError

    with pytest.raises(StopHereError):
        run(Experiment.build(tiny()), tmp_path / "both", on_metrics=interrupt)
    with raises(ScenarioError, "checkpoint.other-data"):
        run_under_flower(tiny(), tmp_path / "both", "relay", resume=True)


@pytest.mark.parametrize("strategy", [Relay, Sharded])
def test_nodes_of_some_peers_refuse_codecs_and_attacks(
    strategy: type[ScenarioStrategy], tiny: Tiny, tmp_path: Path
) -> None:
    attack = "attack={kind: nan, peers: [1]}"
    with raises(ScenarioError, "flower.codec", "int8.*privdec run"):
        strategy(tiny("network={codec: int8}"), tmp_path / "run")
    with raises(ScenarioError, "attack.apart"):
        strategy(tiny(attack), tmp_path / "run")
    CohortRun(tiny("network={codec: int8}", attack), tmp_path / "run")


def test_node_that_does_not_answer_is_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = LocalGrid.push_messages

    def lose_one(grid: LocalGrid, messages: list[Message]) -> list[str | None]:
        """Return None for a message that cannot be sent, as a SuperLink's grid does."""
        sent: list[str | None] = list(everything(grid, messages))
        if messages[0].metadata.message_type == "train.relay":
            sent[3] = None
        return sent

    grid = LocalGrid(client_app(), 4)
    find_nodes(grid)
    strategy = Relay(tiny(), tmp_path / "run")
    everything_found = find_nodes(grid)
    monkeypatch.setattr("flower_privdec.flower.apps.server_app.find_nodes", lambda grid: everything_found)
    monkeypatch.setattr(LocalGrid, "push_messages", lose_one)
    with raises(RunError, "nodes.silent", names="peer 3"):
        strategy.start(grid)


def test_nodes_are_found_in_the_order_of_their_partitions() -> None:
    grid = LocalGrid(client_app(), 3)
    for node, partition in zip(grid.contexts, (2, 0, 1), strict=True):
        grid.contexts[node].node_config["partition-id"] = partition
    assert list(find_nodes(grid)) == [101, 102, 100]


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"partition-id": 0, "num-partitions": 2}, "SuperNodes 100 and 101 .* partition 0"),
        ({"partition-id": 5, "num-partitions": 2}, "SuperNode 101 .*partition-id=5"),
        ({}, "--node-config"),
    ],
)
def test_node_with_a_wrong_partition_is_refused(config: dict[str, int], rule: str) -> None:
    grid = LocalGrid(client_app(), 2)
    grid.contexts[101].node_config = dict(config)
    with raises(RunError, "nodes.partition", names=rule):
        find_nodes(grid)


def test_missing_nodes_are_counted() -> None:
    grid = LocalGrid(client_app(), 3)
    grid.contexts.pop(102)
    with raises(RunError, "nodes.missing", names="2 of 3"):
        find_nodes(grid, patience=0.1)


class Tampering(LocalGrid):
    """Changes the rows on their way, as a broken router or another scenario's peer would."""

    def __init__(self, change: Callable[[RecordDict, str], None]) -> None:
        super().__init__(client_app(), 4)
        self.change = change

    def _deliver(self, message: Message) -> Message:
        for key in [key for key in message.content if key.startswith("peer-")]:
            self.change(message.content, key)
        return super()._deliver(message)


def drop_record(content: RecordDict, key: str) -> None:
    del content[key]


def drop_weight(content: RecordDict, key: str) -> None:
    del content.array_records[key]["w"]


def poison(content: RecordDict, key: str) -> None:
    rows = unpack_rows(content.array_records[key], torch.device("cpu"))
    content[key] = pack_rows({"x": rows["x"] * torch.inf, "w": rows["w"]})


def cut_row(content: RecordDict, key: str) -> None:
    rows = unpack_rows(content.array_records[key], torch.device("cpu"))
    content[key] = pack_rows({"x": rows["x"][:-1], "w": rows["w"]})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (drop_record, ("nodes.failed", "the message of peer . is missing")),
        (drop_weight, ("nodes.failed", "'w' of peer . is missing")),
        (poison, ("nodes.failed", "'x' of peer . is not finite")),
        (cut_row, ("nodes.failed", r"'x' of peer . is \[649\] torch.float64, not \[650\]")),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tiny: Tiny, tmp_path: Path, change: Callable[[RecordDict, str], None], refusal: tuple[str, ...]
) -> None:
    with raises(RunError, *refusal):
        Relay(tiny(), tmp_path / "run").start(Tampering(change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_travel_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([[1 / 3, -0.0, 1e-45], [torch.inf, -torch.inf, torch.nan]], dtype=dtype)
    state = State(np.array([3, 7]), 5, 1, {"x": values, "w": values[:, 0].clone()})
    content = RecordDict()
    pack_state(state, content)
    back = unpack_state(content, torch.device("cpu"))
    assert back is not None
    assert (back.peers.tolist(), back.round_index, back.at) == ([3, 7], 5, 1)
    for name, rows in state.rows.items():
        assert back.rows[name].dtype == dtype
        assert back.rows[name].numpy().tobytes() == rows.numpy().tobytes()


@pytest.mark.parametrize("method", ["_messages", "aggregate_train"])
def test_router_opens_no_rows(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    routed, evaluated = getattr(Relay, method), []
    calls = []

    def route(strategy: Relay, server_round: int, *arguments: object) -> object:
        with monkeypatch.context() as patch:
            patch.delattr("flwr.app.Array.numpy")
            calls.append(server_round)
            return routed(strategy, server_round, *arguments)

    monkeypatch.setattr(Relay, method, route)
    monkeypatch.setattr(Relay, "_evaluate", lambda strategy, answers: evaluated.append(strategy._round))
    monkeypatch.setattr(Relay, "_conclude", lambda strategy: None)
    run_under_flower(tiny(), tmp_path / "run", "relay")
    assert len(calls) == 6 + 3
    assert evaluated == [2, 4, 6]  # then alone rows are opened, those that other peers may see


def settings_of(folder: Path, **config: str | bool) -> ScenarioStrategy:
    return scenario_strategy(LocalGrid(client_app(), 4), Context(7, 0, {}, RecordDict(), dict(config)), folder)


def test_run_config_chooses_the_scenario(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml(tiny()))
    chosen = settings_of(tmp_path, scenario="mine.yaml", set="rounds=3; seed=9", base=str(tmp_path))
    assert (chosen.scenario.rounds, chosen.scenario.seed, type(chosen)) == (3, 9, CohortRun)
    assert chosen.out == tmp_path / "runs" / "tiny-7"


def test_own_modules_are_imported_from_the_base(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's process and a simulated node's start elsewhere; both read the scenario."""
    source = "from flower_privdec.algorithms.sgp import PrivSGP\n\nclass Mine(PrivSGP):\n    pass\n"
    (tmp_path / "based_here.py").write_text(source)
    text = to_yaml(tiny()).replace("name: privsgp", "module: based_here:Mine")
    (tmp_path / "mine.yaml").write_text(text)
    before = Path.cwd()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        read = settings_of(tmp_path, scenario="mine.yaml", base=str(tmp_path))
        assert read.scenario.algorithm.name == "based_here:Mine"
        assert Path.cwd() == before
    sys.modules.pop("based_here")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(before)
        own = HostSettings(True, tmp_path / "nodes")
        assert own.scenario(WorkRequest(text, 1, [0], base=str(tmp_path))) == read.scenario
    sys.modules.pop("based_here")


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"scenario": "mine.yaml", "mode": "gossip"}, "mode='gossip' .*auto, sharded, relay"),
        ({"scenario": "other.yaml"}, "scenario='other.yaml'"),
        ({}, "scenario=''"),
        ({"scenario": "mine.yaml", "mode": "rely"}, "mode='rely' .*'relay'"),
        ({"scenario": "mine.yaml", "resume": "no"}, "resume='no'"),
        ({"scenario": "mine.yaml", "base": "/nowhere"}, "base='/nowhere'"),
    ],
)
def test_wrong_run_config_is_refused(tiny: Tiny, tmp_path: Path, config: dict[str, str], rule: str) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml(tiny()))
    with raises(ScenarioError, "flower.run-config", names=rule):
        settings_of(tmp_path, **config)


def test_a_wrong_override_in_the_run_config_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml(tiny()))
    with raises(ScenarioError, "scenario.greater_than_equal", "rounds=0"):
        settings_of(tmp_path, scenario="mine.yaml", set="rounds=0")


def test_evaluate_fn_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> None: ...

    with raises(RunError, "strategy.evaluate-fn"):
        Relay(tiny(), tmp_path / "run").start(LocalGrid(client_app(), 4), evaluate_fn=evaluate)


@pytest.mark.parametrize(
    ("settings", "arguments", "rule"),
    [
        (["data={dataset: mnist, root: /nowhere, batch: {size: 4}}"], {}, "data.root=/nowhere"),
        ([], {"mode": "gossip"}, "mode='gossip'"),
        ([], {"n_supernodes": 2}, "flower.supernodes: n_supernodes=2 .* 1, which hosts all"),
        ([], {"mode": "relay", "n_supernodes": 5}, "flower.supernodes: n_supernodes=5 .* n_peers=4"),
        ([], {"resume": True}, "no checkpoint"),
        ([], {"cpus": 10_000}, "flower.resources: cpus=10000"),
        ([], {"gpus": 64.0}, "flower.resources: gpus=64.0"),
    ],
)
def test_launcher_refuses_before_anything_starts(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    arguments: dict[str, object],
    rule: str,
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(launcher, "LocalSuperLink", lambda: started.append(True))
    with pytest.raises(ScenarioError) as error:
        launcher.flower_run(tiny(*settings), tmp_path / "run", **arguments)
    assert re.search(rule, f"{error.value.code}: {error.value}")
    assert started == []
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(
    platform.machine() not in THREAD_EXITS or not Path("/proc").is_dir(), reason="a system call of Linux"
)
def test_a_process_lives_as_long_as_its_last_thread(tmp_path: Path) -> None:
    """Its files and locks are open until then, though its state is that of a process that only waits to be reaped."""
    ends_first_thread = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
    script = f"{ends_first_thread}; ctypes.CDLL(None).syscall({THREAD_EXITS[platform.machine()]}, 0)"
    process = subprocess.Popen([sys.executable, "-c", script], env={"MARK": str(tmp_path)})
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)
        assert supervisor.family(-1, str(tmp_path)) == {process.pid}
    finally:
        process.kill()
        process.wait()
    assert supervisor.family(-1, str(tmp_path)) == set()


def test_the_supervisor_ends_with_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "supervised"
    folder.mkdir()
    script = "import subprocess, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-I", supervisor.__file__, str(folder), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"MARK": str(folder), "PATH": "/usr/bin:/bin"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    family = supervisor.family(process.pid, str(folder))
    process.stdin.close()
    process.wait(timeout=200)
    assert len(family) == 3
    assert supervisor.family(process.pid, str(folder)) == set()
    assert not folder.exists()
