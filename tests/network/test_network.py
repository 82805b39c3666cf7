"""Real peers over gRPC and TLS on this machine: the engine's trajectory, whoever is killed, and who is not let in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import privdec
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Tiny
from variants import VARIANTS, settings_for

pytest.importorskip("grpc")

from networked import LONG, Killed, devices, driver_of, finish, holding, mortal, run_network, trainer_of, wait_until

from flower_privdec import testing
from flower_privdec.common.errors import BudgetError, RunError, ScenarioError, StoppedError
from flower_privdec.common.formatting import number
from flower_privdec.core import advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.evaluation import public_figures
from flower_privdec.experiment.spent import epsilons
from flower_privdec.network.local.up import Up
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.status import STATUS_REQUEST, status_line
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import credentials_of, make_certificates
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import rows_path
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec, Progress, RowMessage
from flower_privdec.pushsum.witness import LedgerReport

QUICK = f"network={{mode: synchronous, links: local, deadline: {LONG}, final_mixing: 0}}"
NEEDS_A_SERVER = ("scaffold",)
ALONE = ("local", "dp-sgd")
TOGETHER = [v for v in VARIANTS if v[0].removeprefix("algorithm.name=") not in (*NEEDS_A_SERVER, *ALONE)]


@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=[" ".join(variant) for variant in TOGETHER])
def test_a_network_does_what_the_engine_does(number: int, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(*TOGETHER[number]), "rounds=3", QUICK)
    found, wanted = (
        run_network(scenario, tmp_path, memory=number % 4 > 0),
        testing.run_rounds(Experiment.build(scenario), 3).state.rows,
    )
    for name, rows in wanted.items():
        torch.testing.assert_close(found[name], rows, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", NEEDS_A_SERVER)
def test_a_server_graph_is_refused_with_the_nearest_one(name: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(f"algorithm.name={name}"))
    with raises(ScenarioError, "network.server", names="topology.name=.server"):
        running_peer(scenario, devices(scenario, tmp_path)[0])
    assert not (tmp_path / "peer-0").exists()


def test_algorithms_without_exchange_need_no_network(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm.name=local")
    with raises(ScenarioError, "network.no-exchange", names="algorithm.name=local"):
        running_peer(scenario, devices(scenario, tmp_path)[0])


# --- killed and started again ---


POINTS = {  # before and after everything that is saved, sent or used
    "before a commit": ("_save", "before"),
    "after a commit": ("_save", "after"),
    "after it began to send": ("_arrive", "after"),
    "when all was heard": ("await_neighbours", "after"),
    "before it hands in": ("trainer.evaluate", "before"),
    "after it handed in": ("trainer.evaluate", "after"),
    "at the end": ("_leave", "before"),
}


@pytest.mark.parametrize(
    ("name", "point", "moment"),
    [(name, point, 1 + (i + j) % 2) for i, name in enumerate(["privsgp", "d-psgd"]) for j, point in enumerate(POINTS)],
)
def test_a_peer_that_dies_goes_on_from_its_disk(name: str, point: str, moment: int, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(f"algorithm.name={name}"), "rounds=4", QUICK, "evaluation.every=2")
    wanted = testing.run_rounds(Experiment.build(scenario), 4).state.rows["x"]
    theirs = devices(scenario, tmp_path, memory=moment > 1)
    peers = [running_peer(scenario, device) for device in theirs]
    moment = 1 if point == "at the end" else moment
    mortal(peers[1], POINTS[point], moment)
    with ThreadPoolExecutor(len(peers)) as pool:
        running = [pool.submit(finish, peer) for peer in peers]
        with pytest.raises(Killed):
            running[1].result(LONG)
        again = running_peer(scenario, theirs[1])
        rows = [finish(again), *(running[peer].result(LONG) for peer in (0, 2, 3))]
    found = torch.cat([rows[place]["x"] for place in (1, 0, 2, 3)])
    torch.testing.assert_close(found, wanted)


# --- who and what is not let in ---


def test_another_scenario_is_refused_on_both_sides(tiny: Tiny, tmp_path: Path) -> None:
    one, other = tiny(QUICK, "rounds=3"), tiny(QUICK, "rounds=3", "algorithm.learning_rate=0.4")
    theirs = devices(one, tmp_path)
    peers = [running_peer(other if device.peer == 2 else one, device) for device in theirs]
    ours, others = (peers[j].session.frames.run.hex() for j in (0, 2))
    named = f"is of run {ours}, not {others}", f"is of run {others}, not {ours}"

    with ThreadPoolExecutor(len(peers)) as pool:
        ends = [pool.submit(finish, peer) for peer in peers]

        def knows(j: int) -> bool:
            """Return whether a peer was refused, and ended, or refuses another, which it will name when it ends."""
            said = (
                [str(ends[j].exception())] if ends[j].done() else [one.refused for one in peers[j].neighbours.values()]
            )
            return any(words in each for words in named for each in said)

        wait_until(lambda: knows(2) and any(knows(j) for j in (0, 1, 3)))
        assert peers[2].state.round_index == 0
        for peer in peers:
            peer.stop()


def test_a_hostile_neighbour_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=3")
    theirs = devices(scenario, tmp_path)
    peer = running_peer(scenario, theirs[0])
    frames = peer.session.frames
    driver = driver_of(peer)
    port = driver.open()
    peer._save(0, peer.state, {})
    peer._arrive(peer.state, 0)
    before = {name: row.clone() for name, row in peer.state.rows.items()}
    link = StreamConnection(f"127.0.0.1:{port}", "peer-0.tiny", theirs[3].credentials, 1 << 20)
    right = RowMessage(3, 0, 0, 1, {"x": before["x"][0], "w": before["w"][0]})

    def call(message: Any, codec: FrameCodec = frames) -> bytes:
        return b"".join(b"".join(codec.encode(part)) for part in (LedgerReport(3, 0, 1, 1, 0, (), ()), message))

    try:
        for content, code in {
            call(right)[:-1]: "frame.length",
            call(right) + b"\x00" * (1 << 20): "call.too-long",
            call(replace(right, round_index=4)): "peer.round",
            call(replace(right, at=0)): "frame.exchange",
            call(replace(right, sender=2)): "call.not-its-own",
            call(right, FrameCodec(bytes(32))): "frame.run",
            call(Progress(3, 0, 99)): "lockstep.place",
            b"".join(frames.encode(right)): "call.no-report",
        }.items():
            with raises(RefusedError, code):
                link.call([content], LONG)
        assert not peer.machine.received()
        assert all(torch.equal(before[name], row) for name, row in peer.state.rows.items())
        peer.session.fatal = None
        link.call([call(right)], LONG)
        link.call([call(replace(right, values={name: row * 0 for name, row in right.values.items()}))], LONG)
        ((sender, rows),) = peer.machine.received().items()  # a second time, and other rows, change nothing
        assert sender == 3
        assert all(torch.equal(rows[name], row) for name, row in right.values.items())
        assert json.loads(bytes(link.call([STATUS_REQUEST], LONG)))["round"] == 0
    finally:
        link.close()
        driver.close()


# --- its disk and its ledger ---


def test_noise_is_the_systems_unless_asked_otherwise(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=2")
    rows = []
    for folder, insecure in (("a", False), ("b", False), ("c", True)):
        peers = [running_peer(scenario, each) for each in devices(scenario, tmp_path / folder, insecure_seeds=insecure)]
        with ThreadPoolExecutor(len(peers)) as pool:
            rows.append(torch.cat([each["x"] for each in pool.map(finish, peers)]))
        assert peers[0].status()["noise"].startswith("INSECURE") == insecure
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("point", POINTS)
def test_every_step_that_was_ever_taken_is_paid_for(
    point: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody outside counts the steps of a peer that dies and goes on, and looks into its ledger."""
    taken, release = [], Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        taken.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    scenario = tiny(QUICK, "rounds=4", "evaluation.every=2")
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=point != "after a commit")
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], POINTS[point], 1)
    with ThreadPoolExecutor(len(peers)) as pool:
        running = [pool.submit(finish, peer) for peer in peers]
        with pytest.raises(Killed):
            running[1].result(LONG)
        finish(running_peer(scenario, theirs[1]))
        for peer in (0, 2, 3):
            running[peer].result(LONG)
    for peer in range(4):
        (ledger,) = (tmp_path / f"peer-{peer}" / "ledger").glob("*.jsonl")
        paid = sum(payment.to_step - payment.from_step for payment in read_chain(ledger)[1])
        reserved = paid - taken.count(peer)  # a step that the process which died did not come to
        assert 0 <= reserved <= (peer == 1), f"peer {peer}"
    lost = 1 if point in ("before a commit", "before it hands in", "after it handed in", "at the end") else 0
    assert taken.count(1) in (3, 4, 4 + lost)  # the budget may lack the step that was reserved


def test_a_step_shows_in_status_before_its_round_ends(tiny: Tiny, tmp_path: Path) -> None:
    peer = running_peer(tiny(QUICK, "rounds=4"), devices(tiny(), tmp_path)[0])
    assert peer.status()["epsilon"] == 0
    assert advance(trainer_of(peer).experiment.algorithm, trainer_of(peer).cohort, peer.state) is not None
    assert peer.status()["round"] == 0
    assert peer.status()["epsilon"] == epsilons(trainer_of(peer).cohort, 1)[0] > 0
    peer.close()


def test_a_ledger_precedes_messages_and_is_missed_if_lost(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=4")
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    peers = [running_peer(scenario, device) for device in theirs]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    (ledger,) = (tmp_path / "peer-0" / "ledger").glob("*.jsonl")
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4  # one a step: no more is reserved than is taken
    ledger.write_bytes(b"".join(lines[:-1]))
    with raises(BudgetError, "ledger.stale", names=f"{len(lines) - 1} .* {len(lines)}"):
        running_peer(scenario, theirs[0])
    ledger.unlink()
    with raises(BudgetError, "ledger.stale", names=f"0 .* {len(lines)}"):
        running_peer(scenario, theirs[0])


def test_a_folder_is_one_runs_and_one_processes(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=2")
    device = devices(scenario, tmp_path)[0]
    peer = running_peer(scenario, device)
    with raises(ScenarioError, "run.in-use"):
        running_peer(scenario, device)
    peer._save(0, peer.state, {})
    peer.close()
    with raises(ScenarioError, "checkpoint.other-scenario"):
        running_peer(tiny(QUICK, "rounds=3"), device)
    running_peer(scenario, device).close()


@pytest.mark.parametrize("moment", ["before it begins", "in its second round"])
def test_a_stopped_peer_continues_later(moment: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=4")
    wanted = testing.run_rounds(Experiment.build(scenario), 4).state.rows["x"]
    theirs = devices(scenario, tmp_path)
    peers = [running_peer(scenario, device) for device in theirs]
    if moment == "before it begins":
        peers[1].stop()
    else:
        exchange = peers[1]._exchange
        peers[1]._exchange = lambda item: (peers[1].stop() if peers[1].state.round_index else None, exchange(item))[1]  # type: ignore[method-assign, func-returns-value]
    with ThreadPoolExecutor(len(peers)) as pool:
        running = [pool.submit(finish, peer) for peer in peers]
        with raises(StoppedError, "peer.stopped"):
            running[1].result(LONG)
        rows = [
            finish(running_peer(scenario, theirs[1])),
            *(running[peer].result(LONG) for peer in (0, 2, 3)),
        ]
    torch.testing.assert_close(torch.cat([rows[place]["x"] for place in (1, 0, 2, 3)]), wanted)


def outcome_code(peer: RunningPeer) -> str:
    """Return the code of the error that ends a peer."""
    with pytest.raises(RunError) as caught:
        finish(peer)
    return caught.value.code


def test_a_silent_neighbour_is_named_with_the_cause(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("network.mode=synchronous", "rounds=2")
    times = Times(start=60.0, deadline=0.5, retry=0.1, give_up=0.5)
    peer = running_peer(scenario, replace(devices(scenario, tmp_path)[0], times=times))
    assert outcome_code(peer) == "network.no-witness"  # before it takes a step
    peer = running_peer(scenario, replace(devices(scenario, tmp_path / "again", dials_out=())[0], times=times))
    peer.witness._boots[1] = 1
    exchange = holding(peer._exchange, lambda: wait_until(lambda: bool(peer.neighbours[3].trouble)))
    peer._exchange = exchange  # type: ignore[method-assign]
    with raises(RunError, "network.silent", names=r"peers \[3\] for 0\.5 s \(peer-3\.tiny at "):
        finish(peer)


def test_a_running_peer_says_how_it_does(
    tiny: Tiny, tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, certs = tiny(QUICK, "rounds=3"), tmp_path / "certs"
    make_certificates(scenario, certs)
    device = devices(scenario, tmp_path)[2]
    peer = running_peer(scenario, replace(device, credentials=credentials_of(scenario, certs, 2)))
    try:
        driver = driver_of(peer)
        driver._call_next = lambda *_: None  # type: ignore[method-assign]
        port = driver.open()
        words = ["status", f"127.0.0.1:{port}", "--certs", str(certs), "--as", "3"]
        assert privdec(*words, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["peer"], said["round"], said["rounds"], said["budget"]) == (2, 0, 3, 3.0)
        assert privdec(*words) == 0
        line = capsys.readouterr().out
        assert "tiny: peer 2  round 0/3  loss –  ε 0 of 3.00  waits for its neighbours' reports on its ledger" in line
        assert "0/3 neighbours up" in line
        assert "not yet heard: 0, 1, 3" in line
        assert privdec("status", "127.0.0.1:1", "--certs", str(certs)) == 1
        assert "127.0.0.1:1: " in capsys.readouterr().err
        assert privdec("status", f"127.0.0.1:{port}", "--certs", str(tmp_path)) == 2
        assert "cannot be read" in capsys.readouterr().err
    finally:
        driver.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--id", "1"], "authority.pem: cannot be read"),
        (["--id", "-1"], "-1 is not in the range"),
        (["--id", "0", "--set", "network={peers: [{address: 'a:1'}]}"], "network.peers lists 1 peers for n_peers=4"),
        (["--id", "0", "--set", "network={peers: [{address: here}]}"], "must be HOST:PORT"),
        (["--id", "0", "--set", "network={peers: [{address: 'a:70000'}]}"], "must be HOST:PORT"),
        (["--id", "0", "--set", "network.deadline=0"], "network.deadline=0 must be > 0"),
        (["--id", "0", "--set", "network.deadlin=1"], "did you mean 'deadline'?"),
        (["--id", "0", "--set", "network.give_up=1"], "unknown key"),
        (["--id", "0", "--set", "network.links=moon"], "network.links='moon'"),
    ],
)
def test_wrong_words_are_one_line_and_leave_nothing(
    words: list[str], said: str, tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    out = tmp_path / "out"
    assert privdec("peer", str(tmp_path / "tiny.yaml"), "--out", str(out), "--certs", str(tmp_path), *words) == 2
    *begin, error = capsys.readouterr().err.splitlines()
    assert said in error
    assert all(" info: peer " in line for line in begin)  # that it starts, once the options are known
    assert not out.exists()


def test_a_number_beyond_the_members_is_refused(
    tiny_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    assert privdec("certs", tmp_path / "tiny.yaml", "--out", tmp_path / "certs") == 0
    words = ["--id", 4, "--out", tmp_path / "out", "--certs", tmp_path / "certs"]
    assert privdec("peer", tmp_path / "tiny.yaml", *words) == 2
    assert "--id 4 must be 0 to 3: n_peers=4" in capsys.readouterr().err


def test_a_named_ledger_counts_all_runs_of_a_peer(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=2", f"privacy.ledger={tmp_path / 'ledger'}")
    with raises(ScenarioError, "local.one-ledger", names="privacy.ledger="):
        Up(scenario, tmp_path / "up")
    peer = running_peer(scenario, devices(scenario, tmp_path)[0])
    assert (tmp_path / "ledger" / "digits.jsonl").exists()
    peer.close()


def test_a_status_reports_public_loss_and_live_neighbours(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, "rounds=3", "evaluation.every=2")
    peers, said = [running_peer(scenario, device) for device in devices(scenario, tmp_path)], []
    evaluate = peers[1].trainer.evaluate
    peers[1].trainer.evaluate = lambda state: (evaluate(state), said.append(peers[1].status()))  # type: ignore[method-assign]
    assert peers[1].status()["loss"] is None
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    engine = Experiment.build(scenario)
    for status in said:
        rows = testing.run_rounds(engine, status["round"]).state.rows
        assert status["loss"] == pytest.approx(public_figures(engine, rows)[1][0])
    assert [status["round"] for status in said] == [2, 3]
    assert status_line(said[1]).startswith(f"peer 1  round 3/3  loss {number(said[1]['loss'])}  ε ")
    down = said[1] | {"neighbours": [0, 2, 3], "down": {"2": "gone"}}
    assert "2/3 neighbours up  down: 2" in status_line(down)


def test_a_loss_that_is_not_finite_is_none(tiny: Tiny) -> None:
    engine = Experiment.build(tiny())
    rows = testing.run_rounds(engine, 1).state.rows
    wanted = public_figures(engine, rows)
    rows["x"][2] = float("nan")
    rows["w"][3] = 0.0  # a peer that has just come back without its mass
    rows["x"][3] = 0.0
    nothing = (None, dict.fromkeys(wanted[0][1]))
    assert public_figures(engine, rows) == [*wanted[:2], nothing, nothing]
    assert all(figure is not None for _, figures in wanted for figure in figures.values())


@pytest.mark.parametrize("name", ["privsgp", "d-psgd", "feddeper", "pdsl"])
def test_a_device_has_its_own_model_at_the_end(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """By the names of its module, after final mixing, also where nothing is handed in to others."""
    scenario = tiny(
        QUICK, *settings_for(f"algorithm.name={name}"), "network.hand_in=false", "rounds=2", "compute.dtype=float64"
    )
    rows, agreement = run_network(scenario, tmp_path), Agreement.of(scenario)
    for peer, model in enumerate(agreement.algorithm.debiased(rows)):
        state = load_file(tmp_path / f"peer-{peer}" / "model.safetensors")
        assert torch.equal(torch.cat([state[name].flatten() for name in agreement.module.state_dict()]), model)


@pytest.mark.parametrize(
    ("setting", "handed"), [("network={}", True), ("network.hand_in=false", False), ("network.hand_in=true", True)]
)
def test_a_peer_hands_in_where_that_is_allowed(setting: str, handed: bool, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(QUICK, setting, "rounds=2", "evaluation.every=1")
    run_network(scenario, tmp_path)
    for peer in range(4):
        handed_in = [rows_path(tmp_path / f"peer-{peer}", round_index).exists() for round_index in (1, 2)]
        assert handed_in == [handed, handed]  # `privdec up` deletes those of rounds before, and no peer does


def test_devices_submit_nothing_unless_allowed(tiny: Tiny, tmp_path: Path) -> None:
    listed = "network={peers: [" + ", ".join(f"{{address: '127.0.0.1:{7100 + i}'}}" for i in range(4)) + "]}"
    assert tiny().network.hands_in
    assert not tiny(listed).network.hands_in
    assert tiny(listed, "network.hand_in=true").network.hands_in
    for settings_given in ((listed,), ("network.hand_in=false",)):
        with raises(ScenarioError, "up.hand-in", names="network.hand_in=false"):
            Up(tiny(*settings_given), tmp_path / "up")
    Up(tiny(listed, "network.hand_in=true"), tmp_path / "up")
    assert not (tmp_path / "up").exists()


def test_addresses_elsewhere_are_not_this_machines_to_start(tiny: Tiny, tmp_path: Path) -> None:
    away = "network={peers: [" + ", ".join(f"{{address: '10.0.0.{i}:7100'}}" for i in range(4)) + "]}"
    with raises(ScenarioError, "local.elsewhere", names=r"10\.0\.0\.0:7100"):
        Up(tiny(away), tmp_path / "up")
    twice = "network={peers: [" + ", ".join(["{address: 'a:1'}"] * 4) + "]}"
    with raises(ScenarioError, "network.repeated-peer", names="'a:1'"):
        tiny(twice)
    assert not (tmp_path / "up").exists()
