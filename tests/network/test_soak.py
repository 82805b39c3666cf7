"""The soak breaks things, and finds what does not hold: each of its looks is shown what is wrong and what is right."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import privdec
from raising import raises
from tiny_scenario import Tiny

pytest.importorskip("grpc")

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.network.local.peer_processes import on_this_machine
from flower_privdec.peer.store import CheckpointLog
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise import PairSecrets
from flower_privdec.pushsum.exactly_once import FIRST, Durable, Edge, FrozenShare
from flower_privdec.pushsum.frames import pack
from flower_privdec.rows.keys import digest
from tools.soak import Soak, SoakedRun, Tally
from tools.soak.checks import Paid, ledger_problem, look_at_ledger, weight_on_disk
from tools.soak.fault_schedule import KINDS, ON_LINKS, ON_PEERS, Fault, faults
from tools.soak.release_counter import ReleaseObserver, count_into, counted_in, left_of

LINKS = [(0, 1), (1, 0), (1, 2), (2, 1)]
ROUNDS = 20
SETTINGS = ["n_peers=2", f"rounds={ROUNDS}", "topology.name=complete"]
SETTINGS += ["network={mode: synchronous, links: local, deadline: 200.0}"]
NEVER = Fault("cut", 1e9, 0.0, 0, 1)


# --- faults ---


def test_a_seed_says_which_faults_come() -> None:
    def drawn(seed: int) -> list[Fault]:
        return list(islice(faults(seed, LINKS, list(KINDS), 3.0, 2.0), 200))

    found = drawn(1)
    assert found == drawn(1)
    assert found != drawn(2)
    assert {fault.kind for fault in found} == set(KINDS)
    for fault in found:
        assert 1.5 <= fault.after <= 4.5
        assert fault.seconds <= 2.0
        assert (fault.peer, fault.other) in LINKS if fault.kind in ON_LINKS else fault.other is None
    assert str(Fault("pause", 1.0, 0.5, 2)) == "pause of peer 2 for 0.50 s"
    assert str(Fault("delay", 1.0, 0.5, 2, 1)) == "delay of link 2 to 1 for 0.50 s"


WRONG = [
    (["--minutes", "0"], "--minutes 0 must be > 0"),
    (["--minutes", "nan"], "--minutes nan must be > 0"),
    (["--minutes", "1", "--longest", "inf"], "--longest inf must be > 0 and finite"),
    (["--minutes", "1", "--fault", "kil"], "--fault 'kil' must be one of cut, loss, .*; did you mean 'kill'"),
    (["--minutes", "1", "--out", "."], r"\. is there already; give another --out"),
    (["--minutes", "1", "--set", "topology.name=server", "--set", "algorithm.name=scaffold"], "averages at a server"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_words_are_one_line_and_leave_nothing(
    given: list[str],
    said: str,
    tiny_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny_text)
    assert privdec("soak", "tiny.yaml", *given) == 2
    assert re.fullmatch(f"error: .*{said}.*\n", capsys.readouterr().err)
    assert os.listdir() == ["tiny.yaml"]


# --- looks ---


@pytest.mark.parametrize(
    ("paid", "counted", "later", "lives", "said"),
    [
        (7, 7, 7, 1, None),
        (8, 7, 7, 1, None),  # under way, or lost with its process
        (9, 7, 7, 1, "it pays for 9 steps, and 7 were taken by 1 processes"),
        (9, 7, 8, 1, None),
        (9, 7, 7, 2, None),
        (6, 7, 7, 5, "it pays for 6 steps, and 7 were taken"),
        (4, 4, 4, 1, "it paid for 5 steps, and now for 4"),
    ],
)
def test_a_ledger_unlike_the_count_is_found(paid: int, counted: int, later: int, lives: int, said: str | None) -> None:
    found = ledger_problem(Paid(paid, 1, paid), Paid(5, 1, 5), counted, later, lives)
    assert found is None if said is None else str(found).startswith(said)


def test_reserved_steps_are_a_starts_to_lose() -> None:
    assert ledger_problem(Paid(8, 4, 2), Paid(), 4, 4, 1) is None
    assert ledger_problem(Paid(12, 4, 3), Paid(), 4, 4, 1) is not None


def test_every_private_step_is_counted_and_in_the_ledger(
    build: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_privdec import testing
    from flower_privdec.engine.run import run

    monkeypatch.setattr(Cohort, "release_rows_", Cohort.release_rows_)
    counts, experiment = tmp_path / "counts", build("n_peers=1", "algorithm.name=dp-sgd", "rounds=3")
    assert counted_in(counts) == 0
    count_into(counts)
    run(experiment, tmp_path / "run")
    assert counted_in(counts) == 3
    folder = tmp_path / "run" / "ledger"
    paid, problem = look_at_ledger(folder, counts, Paid(), 1)
    assert (paid.steps, problem) == (3, None)
    testing.run_rounds(experiment, 2)  # which keeps no ledger
    assert look_at_ledger(folder, counts, paid, 1)[1] == "it pays for 3 steps, and 5 were taken"
    (ledger,) = folder.glob("*.jsonl")
    content = ledger.read_bytes()
    last = content.rindex(b'"hash":"') + len(b'"hash":"')
    ledger.write_bytes(content[:last] + (b"0" if content[last : last + 1] != b"0" else b"1") + content[last + 1 :])
    with raises(BudgetError, "ledger.damaged"):
        look_at_ledger(folder, counts, paid, 1)


def test_the_observer_counts_over_processes_copies_and_losses(tmp_path: Path) -> None:
    lines = {
        "0.1": "saved a 2\nsent A 3\nsaved b 3\nsent B 4\n",  # the fourth step reached nobody
        "0.2": "resumed b\nsent C 1\n",  # continues after three steps
        "0.3": "resumed a\nsent D 2\n",  # a backup of after two
        "0.4": "sent E 1\n",  # an empty folder
        "1.1": "received A\nreceived C\nreceived D\nsent X 9\n",
        "2.1": "received A\nreceived E\nrecei",
    }
    observer = ReleaseObserver(tmp_path)
    for life, text in lines.items():
        (tmp_path / f"{life}.events").write_text(text)
        observer.look()
    assert (observer.received(0), observer.received(1)) == (3 + 1 + 2 + 1, 0)
    (tmp_path / "2.1.events").write_text("received A\nreceived E\nreceived B\n")
    observer.look()
    assert observer.received(0) == 8


def test_weight_that_is_missing_at_the_end_is_found(build: Callable[..., Experiment], tmp_path: Path) -> None:
    experiment = build("n_peers=2")
    folders, older = [tmp_path / str(peer) for peer in range(2)], dict[int, bytes]()
    for peer, folder in enumerate(folders):
        folder.mkdir()
        own = Experiment.build(experiment.scenario, experiment.own.peers[peer : peer + 1])
        log = CheckpointLog(folder / CHECKPOINTS, 2)
        for place, weight in enumerate((0.9, (0.6, 1.4)[peer])):
            state = replace(own.initial_state(own.cohort()), round_index=place)
            state.rows["w"].fill_(weight)
            kept = Checkpoint(state, "", experiment.own.run, transport={"place": place})
            log.write(kept)
            older.setdefault(peer, (folder / CHECKPOINTS).read_bytes())
        log.close()
    found = weight_on_disk(folders, at_the_end=True)
    assert found is not None
    assert found.is_right
    assert (found.expected, found.total) == (2, pytest.approx(2.0))
    assert found.rounding < 1e-12
    assert weight_on_disk(folders, at_the_end=False) is None
    (folders[1] / CHECKPOINTS).write_bytes(older[1])
    found = weight_on_disk(folders, at_the_end=True)
    assert found is not None
    assert not found.is_right


def test_asynchronous_peers_disks_tell_their_weight_anytime(build: Callable[..., Experiment], tmp_path: Path) -> None:
    experiment = build("n_peers=2")
    folders = [tmp_path / str(peer) for peer in range(2)]
    for peer, folder in enumerate(folders):
        folder.mkdir()
        own = Experiment.build(experiment.scenario, experiment.own.peers[peer : peer + 1])
        state = own.initial_state(own.cohort())
        weight = torch.tensor((0.5, 1.0)[peer], dtype=torch.float64)
        state.rows["w"].fill_(weight)
        values = {"x": state.rows["x"][0], "w": weight}
        share = FrozenShare(0, 1, FIRST, FIRST, 1, 7, 0, {"x": values["x"].clone(), "w": weight.clone()})
        link = Edge(FIRST, 1, 7, (share,)) if peer == 0 else Edge(FIRST)
        facts, carried = pack(Durable(FIRST, 1, values, {1 - peer: link}))
        transport = {"shares": facts, "place": 1}
        log = CheckpointLog(folder / CHECKPOINTS, 1)
        log.write(Checkpoint(state, "", own.own.run, transport=transport, carried=carried))
        log.close()
    found = weight_on_disk(folders, at_the_end=False)
    assert found is not None
    assert (found.total, found.expected, found.is_right) == (2.0, 2, True)
    assert not replace(found, total=1.5).is_right
    assert not replace(found, total=float("nan")).is_right
    (folders[1] / CHECKPOINTS).unlink()
    assert weight_on_disk(folders, at_the_end=False) is None


# --- runs ---


@pytest.fixture
def soaked(tiny: Tiny, tmp_path: Path) -> Iterator[Callable[..., SoakedRun]]:
    def made(*wrong: Fault, patience: float = 600.0, mode: str = "synchronous", rounds: int = ROUNDS) -> SoakedRun:
        scenario = on_this_machine(tiny(*SETTINGS, f"network.mode={mode}", f"rounds={rounds}"))
        wrongs, links = chain(wrong, repeat(NEVER)), [(0, 1), (1, 0)]
        return SoakedRun(scenario, tmp_path / "run", links, wrongs, patience, Tally(), weighed=True)

    return made


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ({"0.1": "drawn A\nnoised gradient 1.2\n", "1.1": "drawn A\nnoised gradient 0.999999999\n"}, None),
        ({"0.1": "drawn A\n", "0.2": "drawn B\n", "1.1": "drawn A\ndrawn B\n"}, None),
        ({"0.1": "drawn A\ndrawn A\n"}, "peer 0 added a draw .* two releases"),
        ({"0.1": "drawn A\n", "1.1": "drawn A\n", "0.2": "drawn A\n"}, "peer 0 added a draw"),
        ({"0.1": "drawn A\n", "1.1": "drawn A\n", "2.1": "drawn A\n"}, "peers 0, 1, 2 added one draw"),
        ({"0.1": "noised gradient 1.0\nnoised gradient 0.97\n"}, "peer 0 has 0.97 times the noise"),
    ],
)
def test_the_observer_finds_noise_that_an_epsilon_lacks(lines, problem: str | None, tmp_path: Path) -> None:
    observer = ReleaseObserver(tmp_path)
    for life, text in lines.items():
        (tmp_path / f"{life}.events").write_text(text)
    observer.look()
    reason = observer.pairs_problem()
    assert (reason is None) if problem is None else re.search(problem, reason or "")


class Promised(PairSecrets):
    """Secrets of a peer whose partners have promised much."""

    def promised(self, peer: int, step: int) -> float:
        return 0.8


def test_the_observer_counts_promised_noise_and_broken_promises() -> None:
    pairs = np.stack(np.triu_indices(4, 1), axis=1)
    plan = PairPlan(pairs, 0, 2.0, np.ones((1, 4)), np.ones(4), True, by_partners="a test")
    secrets = Promised({peer: bytes([peer]) * 32 for peer in range(4)})
    noised = SimpleNamespace(step=0, peers=np.array([0]), name="gradient", secrets=secrets)
    keys = [digest(32, "pair noise", secrets.of(0, other), 0, "gradient") for other in (1, 2)]

    planned = float(plan.own[0, 0])
    own = plan.own_with(0, 0, np.array([1, 2]), np.full(2, 0.8), 0.8)
    assert left_of(plan, noised, planned, own, keys) >= 1 - 1e-9
    assert left_of(plan, noised, planned, 0.4, keys) == pytest.approx(0.5)


def follow(run: SoakedRun, until: Callable[[], bool]) -> None:
    """Go on until something is so."""
    end = time.monotonic() + 500
    while not until():
        assert time.monotonic() < end, run.line()
        run.step()
        time.sleep(0.05)


def wrong_with(run: SoakedRun, *wrong: Fault) -> None:
    run._faults, run._next = chain(wrong, repeat(NEVER)), None


@pytest.mark.slow
def test_a_run_with_all_kinds_of_faults_ends(soaked: Callable[..., SoakedRun]) -> None:
    rounds = 600  # more than the peers go through while the faults come
    with soaked(rounds=rounds) as run:
        follow(run, lambda: counted_in(run.out / "peers" / "1.releases") > 0)
        wrong_with(run, Fault("kill", 0.0, 0.1, 1))
        follow(run, lambda: run.tally.crashes == 1)
        wrong_with(run, *(Fault(kind, 0.35, 0.3, 0, None if kind in ON_PEERS else 1) for kind in ON_LINKS | ON_PEERS))
        follow(run, run.finished)
        run.conclude()
    tally = run.tally
    assert tally.finished == 1
    assert tally.weight is not None
    assert tally.weight.is_right
    assert tally.weight.expected == 2
    assert tally.faults["isolate"] >= 1
    assert 1 <= tally.faults["kill"] == tally.crashes <= 2
    assert 2 * rounds - tally.crashes <= tally.total("taken") <= tally.total("paid") <= 2 * rounds + tally.crashes
    assert tally.first
    assert all(tally.largest[peer] >= first > 1 << 20 for peer, first in tally.first.items())
    assert len((run.out / "faults.log").read_text().splitlines()) == sum(tally.faults.values())


@pytest.mark.slow
def test_asynchronous_peers_are_soaked_too(soaked: Callable[..., SoakedRun]) -> None:
    with soaked(mode="asynchronous") as run:
        follow(run, lambda: counted_in(run.out / "peers" / "1.releases") > 0)
        wrong_with(run, *(Fault(kind, 0.0, 0.1, 1, None if kind in ON_PEERS else 0) for kind in ("kill", "black-hole")))
        follow(run, run.finished)
        run.conclude()
    tally = run.tally
    assert tally.finished == 1
    assert tally.weight is not None
    assert tally.weight.is_right
    assert tally.weight.expected == 2
    assert tally.crashes <= 1
    assert 2 * ROUNDS - tally.crashes <= tally.total("taken") <= tally.total("paid") <= 2 * ROUNDS + tally.crashes


@pytest.mark.slow
def test_a_broken_law_ends_the_run_with_reason(soaked: Callable[..., SoakedRun]) -> None:
    counts = "peers/1.releases"
    with soaked(patience=-1.0, rounds=5_000) as run:  # even a peer that came further just now is too late
        with raises(RunError, "soak.no-progress", names=str(run.out)):
            run.step()
        run._patience = 600.0
        follow(run, lambda: counted_in(run.out / counts) > 0)
        for peer in run.processes.peers:
            run.processes.signal(peer, signal.SIGSTOP)  # so that nothing changes under the checks
        (run.out / counts).write_bytes(bytes(1 << 20))
        with raises(RunError, "soak.ledger", names="peer 1: .* 1048576 were taken"):
            run._look()
        os.kill(run.processes.pid(0), signal.SIGKILL)
        with raises(RunError, "soak.peer-ended", names="peer 0"):
            follow(run, lambda: False)


@pytest.mark.slow
def test_the_command_soaks_until_the_time_is_over(
    tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ["--minutes", "0.05", "--seed", "4", "--out", str(tmp_path / "out"), "--every", "0.5", "--fault", "cut"]
    assert privdec("soak", str(tmp_path / "tiny.yaml"), *words, *settings) == 0
    lines = capsys.readouterr().out.splitlines()
    progress = re.compile(r"[\d.]+ s  run \d+  rounds \d+ to \d+ of 20  \d+ faults.*")
    assert all(progress.fullmatch(line) for line in lines if "  run " in line)  # none on a slow machine
    assert lines[-1] == "all invariants held"
    for peer in (0, 1):
        counts = rf"peer {peer}: \d+ steps taken, \d+ received, \d+ paid for.*"
        assert any(re.fullmatch(counts, line) for line in lines)
    assert any(re.fullmatch(r"seed 4: \d+ runs, \d+ of them to their end, \d+ rounds", line) for line in lines)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"run-1"}


@pytest.mark.parametrize("broken", [False, True])
def test_an_audit_of_processes_is_a_soak_losing_folders(
    broken: bool, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, object]] = []

    class Recorded(Soak):
        def __init__(self, *given: object, **options: object) -> None:
            made.append(options)
            super().__init__(*given, **options)  # type: ignore[arg-type]

        def run(self, say: object = print) -> Tally:
            self.tally.by_peer[1].update(taken=9, received=8, paid=7)
            self.tally.by_peer[2].update(taken=5, ledgerless=1)
            if broken:
                raise RunError("the ledger of peer 1: it pays for 7 steps, and 8 were taken", code="soak.ledger")
            return self.tally

    monkeypatch.setattr("tools.soak.Soak", Recorded)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny_text)
    assert privdec("audit", "tiny.yaml", "--process", "0.5", "--seed", "3") == broken
    printed = capsys.readouterr()
    assert made == [{"minutes": 0.5, "seed": 3, "kinds": ("kill", "restore", "copy", "lose", "delete")}]
    assert "peer 1: 9 steps taken, 8 received, 7 paid for\n" in printed.out
    assert "peer 2: 5 steps taken, 0 received, 0 paid for; without a ledger when the time was over\n" in printed.out
    assert ("all invariants held" in printed.out) != broken
    assert ("it pays for 7 steps" in printed.err) == broken


@pytest.mark.slow
def test_the_command_says_what_broke(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: SoakedRun) -> None:
        raise RunError("something does not hold", code="test.broken")

    monkeypatch.setattr(SoakedRun, "step", broken)
    soak = Soak(tiny(*SETTINGS), tmp_path / "out", minutes=1.0, seed=1)
    with raises(RunError, "test.broken"):
        soak.run(lambda line: None)
    assert soak.summary()[0].startswith("seed 1: 1 runs, 0 of them to their end")
    with raises(ScenarioError, "soak.folder", names="out"):
        Soak(tiny(*SETTINGS), tmp_path / "out", minutes=1.0)
