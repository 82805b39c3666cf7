"""A run in blocks by several processes: the same bits for any number, and nothing lost or left when one ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import forked, privdec, status_of
from raising import raises
from salts import pin_salts
from tiny_scenario import TINY
from variants import PLAIN, settings_for
from worker_runs import children, is_alive, smallest_blocks, whole

from flower_privdec.common import machine
from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.core import Edges
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run
from flower_privdec.engine.workers import WorkerPool, partitioning
from flower_privdec.engine.workers.forked import EdgeBox, shared_copy
from flower_privdec.engine.workers.worker_pool import PaidLedger
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.scenario import parse_scenario

pytestmark = pytest.mark.skipif(not partitioning.can_fork(), reason="workers are forked, on Linux")
LIMIT = 120  # seconds that a test waits for a state that comes in a moment

OTHERS: set[int] = set()  # processes that this one had before a test


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of algorithms of one's own be compared."""
    pin_salts(monkeypatch)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def until(state: Callable[[], object]) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + LIMIT
    while not state():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", range(len(PLAIN)), ids=[" ".join(variant) for variant in PLAIN])
def test_any_number_of_workers_gives_the_same_bits(number, build, tmp_path):
    experiment = build(*settings_for(*PLAIN[number]), "rounds=3")
    n_peers = experiment.scenario.n_peers
    rows, figures = whole(experiment, tmp_path / "1", 1)
    more = [2 + number % 2] if n_peers > 1 else []  # blocks of equal and of unequal size in turn
    for workers in more:
        again, said = whole(experiment, tmp_path / str(workers), workers)
        assert same(rows, again)
        assert said == figures
    assert_close(rows, undivided(experiment))
    models = [(tmp_path / str(w) / "model.safetensors").read_bytes() for w in (1, *more)]
    assert len(set(models)) == 1


def undivided(experiment: Experiment) -> dict[str, torch.Tensor]:
    """Return the final rows of the engine in one piece."""
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(experiment.scenario.rounds)
    return engine.state.rows


def assert_close(rows: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert rows.keys() == others.keys()
    for name, part in others.items():
        torch.testing.assert_close(rows[name], part, rtol=1e-6, atol=1e-9)


LARGER = {
    "mlp": ["n_peers=7", "model={name: mlp, hidden: [19]}", "compute.dtype=float32"],
    "cnn": ["n_peers=5", "model.name=cnn-small", "compute.dtype=float32"],
    "few active": ["n_peers=10", "participation={kind: uniform, fraction: 0.4}", "compute.dtype=float32"],
    "server": ["topology.name=server", "algorithm.name=fedavg", "participation={kind: uniform, fraction: 0.5}"],
    "random graph": ["n_peers=7", "algorithm.name=d-psgd", "topology.name=erdos-renyi", "compute.dtype=float32"],
}


@pytest.mark.parametrize("settings", LARGER.values(), ids=LARGER)
def test_bits_agree_for_every_model_and_graph(settings, build, tmp_path):
    experiment = build(*settings, "rounds=3")
    rows, figures = whole(experiment, tmp_path / "1", 1)
    again, said = whole(experiment, tmp_path / "3", 3)
    assert same(rows, again)
    assert said == figures


@pytest.mark.parametrize(("first", "then"), [(1, 2), (3, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_workers(build, tmp_path, first, then):
    experiment = build("algorithm.name=privsgp-vr")
    rows, _ = whole(experiment, tmp_path / "undisturbed", 1)
    with smallest_blocks():
        stopped = Run(experiment, tmp_path / "run", workers=first)
    stopped.advance()
    stopped.close()
    again, _ = whole(experiment, tmp_path / "run", then, resume=True)
    assert same(rows, again)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3


def test_rows_that_a_step_replaces_are_noticed(build, tmp_path):
    experiment = build("algorithm={module: 'worker_runs:Growing', learning_rate: 0.5}", "rounds=4")
    rows, figures = whole(experiment, tmp_path / "1", 1)
    again, said = whole(experiment, tmp_path / "2", 2)
    assert "before" in rows
    assert same(rows, again)
    assert_close(rows, undivided(experiment))
    assert said == figures


@pytest.fixture(autouse=True)
def _others() -> None:
    """Remember what other tests have started."""
    OTHERS.clear()
    OTHERS.update(children(os.getpid()))


def own_workers() -> list[int]:
    return [child for child in children(os.getpid()) if child not in OTHERS]


def paid_steps(out: Path) -> int:
    (ledger,) = (out / "ledger").glob("*.jsonl")
    return max(payment.to_step for payment in read_chain(ledger)[1])


def test_a_killed_worker_ends_the_run_and_loses_nothing(build, tmp_path):
    experiment = build()
    rows, figures = whole(experiment, tmp_path / "undisturbed", 2)
    with smallest_blocks():
        under_way = Run(experiment, tmp_path / "run", workers=2)
    first = under_way.advance()
    (worker,) = own_workers()
    os.kill(worker, signal.SIGINT)  # is the run's own affair, and changes nothing
    assert under_way.advance() == json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    os.kill(worker, signal.SIGKILL)
    with raises(RunError, "run.worker-ended", r"round \d+: .*peers 2-3 .*SIGKILL.* --resume"):
        under_way.advance()
    under_way.close()
    assert not own_workers()
    assert paid_steps(tmp_path / "run") >= 5
    again, said = whole(experiment, tmp_path / "run", 2, resume=True)
    assert same(rows, again)
    assert first["round"] == 2
    assert said == figures[2:]


def test_a_worker_holds_no_lock(build, tmp_path):
    experiment = build()
    with smallest_blocks():
        under_way = Run(experiment, tmp_path / "run", workers=3)
    under_way.advance()
    for worker in own_workers():
        held = [os.readlink(f"/proc/{worker}/fd/{file}") for file in os.listdir(f"/proc/{worker}/fd")]
        assert not [name for name in held if name.startswith(str(tmp_path))]
    with raises(ScenarioError, "run.in-use"):
        Run(experiment, tmp_path / "run", resume=True)
    files = len(os.listdir("/proc/self/fd"))
    under_way.close()
    assert len(os.listdir("/proc/self/fd")) < files
    assert not own_workers()


def test_runs_leave_no_file_open(build, tmp_path):
    experiment = build("rounds=2")
    whole(experiment, tmp_path / "first", 2)
    files = len(os.listdir("/proc/self/fd"))
    whole(experiment, tmp_path / "second", 3)
    assert len(os.listdir("/proc/self/fd")) == files


def own(name: str) -> str:
    return f"algorithm={{module: 'worker_runs:{name}', learning_rate: 0.5}}"


def test_a_users_error_in_a_worker_is_located_privately(build, tmp_path):
    with pytest.raises(RunError) as raised:
        whole(build(own("Clumsy")), tmp_path / "run", 2)
    said = str(raised.value)
    assert "raised LookupError (" in said
    assert "worker_runs.py, line" in said
    assert "tensor" not in said
    assert not own_workers()


def test_a_users_exit_in_a_worker_ends_the_run(build, tmp_path):
    with raises(RunError, "run.worker-ended", r"round 1: .*peers 2-3 .*status 7"):
        whole(build(own("Leaving")), tmp_path / "run", 2)
    assert not own_workers()


def run_in_a_group(*words: object) -> int:
    """Run a command in a group of its own, in the smallest blocks; SIGINT may be ignored where the tests run."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with smallest_blocks():
        return privdec(*words)


def test_a_forked_process_frees_no_earlier_garbage(tmp_path):
    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            (tmp_path / "freed").write_text(str(os.getpid()))

    Cycle()
    assert status_of(forked(lambda: 0 * gc.collect())) == 0
    assert (tmp_path / "freed").read_text() == str(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_lingers_when_the_run_is_ended(tmp_path, how):
    scenario, out = tmp_path / "tiny.yaml", tmp_path / "run"
    scenario.write_text(TINY)
    words = ["--set", "rounds=100000", "--set", "evaluation.every=20", "--set", "compute.workers=2"]
    process = forked(run_in_a_group, "run", scenario, "--out", out, *words)
    lines = out / "metrics.jsonl"  # of which the second comes after the first one's checkpoint
    until(lambda: not process.is_alive() or (lines.exists() and lines.read_text().count("\n") > 1))
    assert process.is_alive()
    workers = children(process.pid)
    assert workers
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.kill()
    assert status_of(process) == (130 if how is signal.SIGINT else -how)
    until(lambda: not any(map(is_alive, workers)))
    experiment = Experiment.build(parse_scenario((out / "scenario.yaml").read_text()))
    going_on = Run(experiment, out, resume=True, workers=1)  # folder and ledger are free
    assert going_on.round_index >= 20
    going_on.close()


def test_a_small_model_stays_in_one_process(build, tmp_path):
    experiment = build()
    assert partitioning.partition_cohort(experiment) == partitioning.Partitioning((0, 4), 1)
    under_way = Run(experiment, tmp_path / "run")
    assert isinstance(under_way.engine, Engine)
    under_way.close()


def test_auto_takes_as_many_cores_as_pay(build, monkeypatch):
    experiment = build()
    with smallest_blocks():
        for cores, workers in ((1, 1), (2, 2), (3, 3), (64, 4)):
            monkeypatch.setattr(partitioning, "available_cores", lambda cores=cores: cores)
            assert partitioning.partition_cohort(experiment) == partitioning.Partitioning((0, 1, 2, 3, 4), workers)


def test_blocks_depend_only_on_the_scenario(build, monkeypatch):
    experiment = build("model={name: mlp, hidden: [900, 900]}", "n_peers=6", "data.batch.size=20")
    cuts = set()
    for cores in (1, 5):
        monkeypatch.setattr(partitioning, "available_cores", lambda cores=cores: cores)
        cuts |= {partitioning.partition_cohort(experiment, workers).cuts for workers in (None, 1, 2)}
    assert len(cuts) == 1
    assert len(cuts.pop()) > 2


def test_every_block_has_one_worker():
    for blocks in range(1, 17):
        for workers in range(1, blocks + 1):
            partitioned = partitioning.Partitioning(tuple(range(blocks + 1)), workers)
            hosted = [partitioned.of(worker) for worker in range(workers)]
            assert [block for blocks_of_one in hosted for block in blocks_of_one] == list(range(blocks))
            assert max(map(len, hosted)) - min(map(len, hosted)) <= 1
            assert all(hosted)


WRONG = {
    "more than peers": ("compute.workers=5", ("compute.workers", "compute.workers=5")),
    "none": ("compute.workers=0", ("scenario.literal_error", "compute.workers")),
    "threads too": ("compute={workers: 2, threads: 2}", ("compute.threads", "workers=2")),
}


@pytest.mark.parametrize(("setting", "refusal"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_of_workers_is_refused(tiny, setting, refusal):
    with raises(ScenarioError, *refusal):
        tiny(setting)


def test_more_workers_than_pay_or_than_cores_are_said(build, caplog, monkeypatch):
    experiment = build("compute.workers=3")
    assert partitioning.partition_cohort(experiment).workers == 1
    assert "uses only 1" in caplog.text
    monkeypatch.setattr(partitioning, "available_cores", lambda: 2)
    with smallest_blocks():
        assert partitioning.partition_cohort(experiment).workers == 3
    assert "share 2 cores" in caplog.text


def test_without_fork_one_process_takes_all_blocks(build, monkeypatch):
    monkeypatch.setattr(partitioning, "can_fork", lambda: False)
    monkeypatch.setattr(partitioning, "available_cores", lambda: 8)
    experiment = build()
    with smallest_blocks():
        assert partitioning.partition_cohort(experiment) == partitioning.Partitioning((0, 1, 2, 3, 4), 1)
        with raises(ScenarioError, "workers.no-fork", r"compute.workers=2"):
            partitioning.partition_cohort(experiment, 2)


def test_auto_is_one_beside_processes_or_threads(build, monkeypatch):
    monkeypatch.setattr(partitioning, "available_cores", lambda: 8)
    with smallest_blocks():
        threaded = build("compute.threads=2")
        assert partitioning.partition_cohort(threaded).workers == 1
        experiment = build()
        assert partitioning.partition_cohort(experiment).workers == 4
        monkeypatch.setattr(partitioning.multiprocessing, "parent_process", lambda: object())
        assert partitioning.partition_cohort(experiment).workers == 1


def test_the_number_of_workers_decides_no_number(tiny):
    from flower_privdec.scenario import numbers_hash, scenario_hash, seedless_hash

    for hashed in (scenario_hash, numbers_hash, seedless_hash):
        assert hashed(tiny("compute.workers=2")) == hashed(tiny())


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_are_counted_within_affinity_and_quota(tmp_path, monkeypatch, files, cores):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.available_cores() == cores


def test_a_block_takes_no_step_that_was_not_paid(build, tmp_path):
    ledger = build().cohort(tmp_path).ledger
    paid = torch.zeros(1, dtype=torch.int64)
    part = PaidLedger(ledger, 2, 4, paid)
    assert part.allowed(0).tolist() == [True, True]
    with raises(BudgetError, "ledger.not-paid", "step 0"):
        part.charge(0, np.arange(2))
    paid[0] = 1
    part.charge(0, np.arange(2))
    with pytest.raises(BudgetError):
        part.charge(1, np.arange(2))
    ledger.close()


def test_rounds_are_paid_before_any_block_begins_with_them(build, tmp_path, monkeypatch):
    experiment = build("rounds=40", "evaluation.every=40")
    with smallest_blocks():
        under_way = Run(experiment, tmp_path / "run", workers=2)
    engine, seen = under_way.engine, []
    assert isinstance(engine, WorkerPool)
    order = engine._order
    monkeypatch.setattr(engine, "_order", lambda what: (seen.append((what, paid_steps(tmp_path / "run"))), order(what)))
    under_way.advance()
    under_way.close()
    ordered = [(count, paid) for count, paid in seen if isinstance(count, int)]
    assert len(ordered) > 1
    assert sum(count for count, _ in ordered) == 40
    for number, (_, paid) in enumerate(ordered):
        assert paid >= sum(count for count, _ in ordered[: number + 1])


def test_a_box_holds_what_was_put_in_last():
    box = EdgeBox()
    for count in (3, 0, 5, 1):
        edges = Edges(np.arange(count), np.arange(count) + 1, torch.randn(count, 7))
        box.put([{"gradient": edges}, {}])
        first, second = box.look()
        assert second == {}
        assert np.array_equal(first["gradient"].own, edges.own)
        assert np.array_equal(first["gradient"].other, edges.other)
        assert torch.equal(first["gradient"].values, edges.values)
    box.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_shared_copy_lies_as_the_original_does(dtype):
    for rows in (
        torch.arange(5),
        torch.ones(3, 300),
        torch.ones(4, 2, 3),
        torch.ones(4, 320)[:, :300],
        torch.ones(0, 3),
    ):
        typed = rows.to(dtype)
        copy = shared_copy(typed)
        assert torch.equal(copy, typed)
        assert copy.stride() == typed.stride()
        assert copy.data_ptr() % 64 == 0


def test_a_study_runs_its_cells_in_one_process_each(tmp_path, monkeypatch):
    from flower_privdec.studies import cells

    seen = {}

    def run(_experiment, out, **given):
        seen.update(given)
        for name in cells.READ_FILES:
            (out / name).write_text("")

    monkeypatch.setattr("flower_privdec.engine.run.run", run)
    folder = cells.folder_of(tmp_path, cells.cell_key(parse_scenario(TINY)))
    cells.run_cell(TINY, folder)
    assert seen["workers"] == 1
    assert json.loads((folder / "cell.json").read_text())["seconds"] >= 0
