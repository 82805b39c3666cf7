"""`privdec up`: every peer a process, killed and resumed, and what it leaves."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")

from command_line import privdec
from networked import wait_until
from private_files import closed_files, umask_of_none
from raising import raises
from safetensors.torch import load_file

from flower_privdec.cli import main
from flower_privdec.common.errors import RunError
from flower_privdec.common.logs import message_of
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.network.local import peer_processes, up
from flower_privdec.network.local.peer_processes import PRIVDEC, PeerProcesses, on_this_machine
from flower_privdec.network.local.up import Up, injected_kills
from flower_privdec.network.peer import foreground
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.reporting.ledgers import ledger_facts
from flower_privdec.scenario import Scenario, load_scenario, parse_scenario

pytestmark = pytest.mark.slow
SETTINGS = ["n_peers=3", "rounds=6", "topology.name=directed-ring"]
SETTINGS += ["network={mode: synchronous, links: local, deadline: 200.0, final_mixing: 0}"]


LONGER = ("rounds=40", "evaluation.every=4")


def peers_of(out: Path) -> list[int]:
    """Return the processes that run a peer of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            log = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if log.parent == out / "peers":
            found.append(int(process.name))
    return found


def paid_steps(ledger: Path) -> int:
    """Return how many steps a ledger pays for, without computing what they cost."""
    return sum(entry.to_step - entry.from_step for entry in read_chain(ledger)[1])


def wait_for(path: Path, seconds: float = 200.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} is not there"
        time.sleep(0.05)


@pytest.fixture
def scenario(tiny_text: str, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text)
    return path


def test_a_network_leaves_files_and_numbers_like_a_run(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with umask_of_none():
        assert privdec("up", scenario, "--out", tmp_path / "up", "--insecure-seeds", *settings) == 0
    said = capsys.readouterr()
    assert {"checkpoint", "checkpoints", "model.safetensors", "1.log", "peer-1.key"} <= closed_files(tmp_path / "up")
    assert "INSECURE" in said.out
    assert "each of 3 peers starts and waits for its neighbours" in said.err
    lines = (tmp_path / "up" / "peers" / "1.log").read_text().splitlines()
    begin, train, test, first, *_, last = map(message_of, lines)
    assert begin.startswith(f"peer 1 of {tmp_path / 'up' / 'network.yaml'} starts: ")
    assert train.startswith("train: ")
    assert test.startswith("test: ")
    assert re.fullmatch(r"peer 1 waits for (its neighbours|its neighbours' reports on its ledger)( \(.+\))?", first)
    assert last.endswith(f"  model {tmp_path / 'up' / 'peers' / '1' / 'model.safetensors'}")
    found = json.loads((tmp_path / "up" / "summary.json").read_text())
    wanted = run(Experiment.build(parse_scenario(scenario.read_text(), overrides=SETTINGS)), tmp_path / "engine")
    for key in ("accuracy", "loss", "consensus_distance"):
        assert found[key] == pytest.approx(wanted[key])
    for here, there in zip(found["privacy"], wanted["privacy"], strict=True):
        assert here == pytest.approx(there)
    assert found["runtime"] == "network"
    assert {path.name for path in (tmp_path / "up").iterdir()} >= {
        "metrics.jsonl",
        "model.safetensors",
        "certs",
        "peers",
    }
    assert not peers_of(tmp_path / "up")
    handed_in = {path.name for path in (tmp_path / "up" / "peers" / "1").glob("rows-*")}
    assert handed_in == {"rows-6.safetensors", "rows-final.safetensors"}  # those of earlier rounds are removed


def test_lost_messages_and_a_restart_keep_the_numbers(tiny: Callable[..., Scenario], tmp_path: Path) -> None:
    scenario = tiny(*SETTINGS, "rounds=20", "evaluation.every=4")
    said: dict[int, list[tuple[Any, str]]] = {peer: [] for peer in range(3)}
    due = injected_kills([], ["1@4"], 3, 20)
    network = Up(scenario, tmp_path / "up", insecure_seeds=True, loss=0.05, kills=due)
    found = network.run(None, lambda peer, status, word: said[peer].append((status, word)))
    wanted = run(Experiment.build(scenario), tmp_path / "engine")
    for key in ("accuracy", "loss", "consensus_distance"):
        assert found[key] == pytest.approx(wanted[key])
    for peer, each in said.items():
        assert each[0] == (None, "starting")
        status, word = each[-1]
        assert (status["peer"], status["round"], word) == (peer, 20, "done")
        assert status["loss"] > 0


def test_a_loss_reaches_each_peers_device(
    tiny: Callable[..., Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, lost = PeerProcesses(on_this_machine(tiny(*SETTINGS)), tmp_path, loss=0.25), list[float]()

    def start(name: str, command: list[str], log: Any) -> None:
        with suppress(SystemExit):
            main.main([word for word in command[len(PRIVDEC) :] if word != "--with-parent"])

    monkeypatch.setattr(peer_processes, "start_process", start)
    monkeypatch.setattr(foreground, "run_in_foreground", lambda running, *_, **__: lost.append(running.device.loss))
    processes.prepare()
    processes.start(1)
    assert lost == [0.25]


@pytest.mark.parametrize("loss", ["-0.1", "1", "1.5", "nan"])
def test_a_loss_that_is_no_share_is_refused(
    loss: str, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["up", str(scenario), "--out", str(tmp_path / "up"), "--loss", loss])
    assert left.value.code == 2
    rule = "must be a share, from 0 to below 1: of 1 no message would arrive"
    assert capsys.readouterr().err == f"error: --loss {loss} {rule}\n"
    assert not (tmp_path / "up").exists()


def test_the_others_go_on_without_peers_that_are_gone(
    tiny: Callable[..., Scenario], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 0 - 1 - 2 - 3 peer 1 dies, so that peer 0 has nobody left."""
    quick = "network={links: local, deadline: 1.0}"
    (tmp_path / "line.txt").write_text("0 1\n1 2\n2 3\n")
    line = f"topology={{name: edge-list, directed: false, file: {tmp_path / 'line.txt'}}}"
    scenario = tiny("n_peers=4", "rounds=80", "evaluation.every=20", "algorithm.name=d-psgd", line, quick)
    found = Up(scenario, tmp_path / "up", kills=injected_kills(["1@20"], [], 4, 80)).run()

    assert re.fullmatch(
        r"peer 0 after round \d+ \(cut off: its neighbours \[1\] are gone, and it waits for 1 of \[1\]\), "
        r"peer 1 after round \d+ \(killed by signal 9\); the models above are the others'",
        found["gone"],
    )
    assert "in 2 parts that do not reach each other: [0], [2, 3]" in caplog.text
    assert json.loads((tmp_path / "up" / "peers" / "3" / "summary.json").read_text())["round"] == 80
    assert not peers_of(tmp_path / "up")
    models = load_file(tmp_path / "up" / "model.safetensors")
    for name in [name for name in models if name.startswith("mean/")]:  # of the others, as all figures are
        of_peer = name.removeprefix("mean/")
        torch.testing.assert_close(models[name], (models[f"peer-2/{of_peer}"] + models[f"peer-3/{of_peer}"]) / 2)
    for peer in (0, 1):
        path = tmp_path / "up" / "peers" / str(peer) / "ledger" / "digits.jsonl"
        assert found["privacy"][peer]["epsilon"] == pytest.approx(ledger_facts(path, 1e-3)["epsilon"])


class Logs:
    """Processes of which only the last lines are known."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def status(self, peer: int) -> int | None:
        return None if self.lines[peer] else 0

    def last_line(self, peer: int) -> str:
        return self.lines[peer]


def test_peers_that_wait_for_the_same_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        "peer 0 waits for its end (peer 4 is gone)",
        "",
        "peer 2  round 3/9",
        "peer 3 waits for its end (peer 4 is gone)",
        "peer 4 waits for its neighbours in round 2 of final mixing (peer 6 has not answered yet)",
        "peer 5 waits for its neighbours in round 2 of final mixing (peer 4 has not answered yet; peer 6 (x) is slow)",
    ]
    waits = up._Waits(Logs(*lines))  # type: ignore[arg-type]
    waits.say(range(6))
    assert not caplog.messages
    waits._say_at = 0.0
    for _ in range(2):  # nothing is said twice
        waits.say(range(6))
        waits._say_at = 0.0
    assert caplog.messages == [
        "waiting for its end (peer 4 is gone): peers 0, 3; waiting for its neighbours in round 2 of final mixing: "
        "peers 4, 5"  # each for reasons of its own, which its log has
    ]


def test_a_network_ends_when_nobody_can_go_on(tiny: Callable[..., Scenario], tmp_path: Path) -> None:
    quick = "network={links: local, deadline: 1.0}"
    scenario = tiny(
        "n_peers=3", "rounds=400", "evaluation.every=20", "topology.name=star", "algorithm.name=d-psgd", quick
    )
    with raises(RunError, "up.nobody-left", names=r"peer 0: killed.*peer 1: cut off.*peer 2: cut off"):
        Up(scenario, tmp_path / "up", kills=injected_kills(["0@20"], [], 3, 400)).run()
    summary = json.loads((tmp_path / "up" / "summary.json").read_text())
    assert summary["stopped_by"] == "nobody left"
    assert not peers_of(tmp_path / "up")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kill", "3"], "--kill '3' must be PEER@ROUND, as 3@100"),
        (["--kill", "9@2"], "--kill 9@2: there are the peers 0 to 2"),
        (["--restart", "1@6"], "--restart 1@6: the round must be before the last, 6"),
        (["--kill", "0@1", "--kill", "1@1", "--kill", "2@1"], "--kill ends all 3 peers"),
        (["--kill", "0@1"], "network.mode=synchronous ends with a peer that is gone"),
    ],
)
def test_kills_that_cannot_be_injected_are_refused(
    options: list[str], says: str, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with pytest.raises(SystemExit) as left:
        main.main(["up", str(scenario), "--out", str(tmp_path / "up"), *settings, *options])
    assert left.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "up").exists()


def test_killed_peers_are_named_and_resume_from_disk(tiny: Callable[..., Scenario], tmp_path: Path) -> None:
    scenario, out, killed = tiny(*SETTINGS, *LONGER), tmp_path / "up", list[int]()

    def kill(metrics: dict[str, Any]) -> None:
        if metrics["round"] and not killed:
            killed.append(peers_of(out)[1])
            os.kill(killed[0], signal.SIGKILL)

    with raises(RunError, "up.peer-ended", names=r"^peer \d"):
        Up(scenario, out, insecure_seeds=True).run(kill)
    assert killed
    assert not peers_of(out)
    found = Up(scenario, out, resume=True, insecure_seeds=True).run()
    wanted = run(Experiment.build(scenario), tmp_path / "engine")
    assert found["accuracy"] == pytest.approx(wanted["accuracy"])


def test_a_stopped_runs_summary_covers_all_its_charges(tiny: Callable[..., Scenario], tmp_path: Path) -> None:
    """Peers are past the evaluation at which Ctrl-C comes: their ε is that of their ledgers, not that of its models."""
    cancelling = ["topology.name=complete", "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0}"]
    scenario, out = tiny(*SETTINGS, *LONGER, *cancelling), tmp_path / "up"

    def interrupt(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 4:
            peers = [out / "peers" / str(peer) / "ledger" / "digits.jsonl" for peer in range(3)]
            wait_until(lambda: all(paid_steps(path) > 6 for path in peers))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Up(scenario, out, insecure_seeds=True).run(interrupt)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["stopped_at"], summary["stopped_by"], summary["rounds_done"]) == (4, "interrupt", 4)
    for peer, row in enumerate(summary["privacy"]):
        path = out / "peers" / str(peer) / "ledger" / "digits.jsonl"
        assert row["epsilon"] == pytest.approx(ledger_facts(path, 1e-3, colluding=1)["epsilon"])
        assert row["epsilon_if_all_collude"] == pytest.approx(ledger_facts(path, 1e-3)["epsilon"])
    assert summary["privacy"][0]["epsilon"] > read_metrics(out)[-1]["epsilon"]
    for one in summary["privacy"]:
        assert one["epsilon"] < one["epsilon_if_all_collude"] < math.inf
    assert (out / "model.safetensors").is_file()
    assert Up(scenario, out, resume=True, insecure_seeds=True).run().get("stopped_at") is None


def test_nothing_lingers_when_it_is_killed(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "up"
    settings = [word for setting in (*SETTINGS, "rounds=30000", "privacy=none") for word in ("--set", setting)]
    started = subprocess.Popen([*PRIVDEC, "up", scenario, "--out", out, *settings], stderr=subprocess.DEVNULL)
    wait_for(out / "peers" / "1" / "checkpoints")
    os.kill(peers_of(out)[0], signal.SIGSTOP)
    started.kill()
    started.wait(500)
    until = time.monotonic() + 200
    while peers_of(out):
        assert time.monotonic() < until, "peers go on without who started them"
        time.sleep(0.1)


PARENT = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: wakes up by what Linux alone has")
def test_a_paused_peer_ends_with_its_parent(scenario: Path, tmp_path: Path) -> None:
    """Its group has others in it, so that no shell's rule for groups without a parent wakes it."""
    processes = PeerProcesses(on_this_machine(load_scenario(scenario)), tmp_path / "up")
    processes.out.mkdir()
    processes.prepare()
    words = ["peer", str(processes.out / "network.yaml"), "--id", "0", "--out", str(processes.folder(0))]
    command = [*PRIVDEC, *words, "--certs", str(processes.certificates), "--with-parent"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    peer = int(parent.stdout.readline())
    state = Path(f"/proc/{peer}/stat")
    try:
        wait_for(processes.folder(0) / "checkpoints")
        os.kill(peer, signal.SIGSTOP)
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        parent.kill()
        parent.communicate()
        wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")
    finally:
        with suppress(ProcessLookupError):
            os.kill(peer, signal.SIGKILL)
