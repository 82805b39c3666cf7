"""The comparison with other tools: its measuring, its accounting and its page, without those tools."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT
from scipy.optimize import brentq
from scipy.stats import norm

from flower_privdec.scenario import parse_scenario
from tools.side_by_side import __main__ as script
from tools.side_by_side import accountant, environments, measuring, results, task

SCRIPT = ROOT / "tools" / "side_by_side"
sys.path.insert(0, str(task.RUNNERS))  # scripts of other environments, which have nothing of tools
privdec, shared = map(importlib.import_module, ("privdec", "shared"))

MIB = 2**20
LIMIT = 120.0
WAIT = (
    "import os, time\nuntil = time.monotonic() + 100\n"
    "while not os.path.exists({seen!r}) and time.monotonic() < until: time.sleep(0.05)"
)
HOLD = "held = bytearray(b'x') * (64 * 2**20)\n"
ROW = results.Row("flower", "flower", "1.41.0", "server", "none", "", 27.04, 1.52, 40.0, 3 * 2**30, 0.5, 0.943)


@dataclass
class Seen:
    """What a test waits for."""

    path: Path
    enough: Callable[[measuring.Watch, list[int]], bool] = lambda watch, found: False

    @property
    def waiting(self) -> str:
        """Code that waits until a watch has seen it, and gives up before a test would."""
        return WAIT.format(seen=str(self.path))

    @property
    def holding(self) -> str:
        """The same, of a process that holds 64 MiB."""
        return HOLD + self.waiting


# --- measuring ---


def measured(tmp_path: Path, code: str, limit: float = LIMIT) -> measuring.Measured:
    return measuring.measure([sys.executable, "-c", code], tmp_path, tmp_path / "log.txt", limit)


def alive(process: int) -> bool:
    return process in measuring.processes()


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A file that appears when a watch has seen what a test waits for; the processes of the test wait for it."""
    waiting, look = Seen(tmp_path / "seen"), measuring.Watch.look

    def looking(watch: measuring.Watch) -> list[int]:
        found = look(watch)
        if waiting.enough(watch, found):
            waiting.path.touch()
        return found

    monkeypatch.setattr(measuring.Watch, "look", looking)
    return waiting


def test_memory_and_cpu_of_a_child_count(tmp_path: Path, seen: Seen) -> None:
    seen.enough = lambda watch, found: watch.peak_bytes > 64 * MIB and sum(watch.cpu.values()) > 0
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {seen.holding!r}])"
    took = measured(tmp_path, child)
    assert took.status == 0
    assert took.peak_bytes > 64 * MIB
    assert took.cpu_seconds > 0
    assert not took.stopped


def test_shared_pages_count_once(tmp_path: Path, seen: Seen) -> None:
    seen.enough = lambda watch, found: len(found) == 4
    took = measured(tmp_path, f"import os\n{HOLD}os.fork()\nos.fork()\n{seen.waiting}")
    assert 64 * MIB < took.peak_bytes < 2 * 64 * MIB


@pytest.mark.parametrize("environment", ["None", "{}"], ids=["marked", "without its mark"])
def test_a_daemon_counts_and_does_not_stay(tmp_path: Path, seen: Seen, environment: str) -> None:
    seen.enough = lambda watch, found: watch.peak_bytes > 64 * MIB
    daemon, stays = tmp_path / "daemon", f"{HOLD}import time\ntime.sleep(1000)"
    code = (
        "import subprocess, sys\n"
        f"made = subprocess.Popen([sys.executable, '-c', {stays!r}], start_new_session=True, env={environment})\n"
        f"open({str(daemon)!r}, 'w').write(str(made.pid))\n{seen.waiting}"
    )
    assert measured(tmp_path, code).peak_bytes > 64 * MIB
    assert not alive(int(daemon.read_text()))


def test_a_limit_ends_what_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "GRACE", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    took = measured(tmp_path, deaf, limit=1.0)
    assert took.stopped == "time limit"
    assert took.status != 0


def test_ending_a_measurement_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, seen = measuring.Watch.look, []

    def ended(watch: measuring.Watch) -> list[int]:
        found = look(watch)
        seen.append(found)
        if len(seen) == 1:
            raise SystemExit("ended")
        return found

    monkeypatch.setattr(measuring.Watch, "look", ended)
    with pytest.raises(SystemExit):
        measured(tmp_path, "import time; time.sleep(1000)")
    assert seen[0]
    assert not any(alive(process) for process in seen[0])


def test_nothing_of_others_is_counted() -> None:
    assert measuring.Watch("a mark that nobody has").look() == []


# --- accounting ---


def test_the_exact_accountant_agrees_with_the_closed_form() -> None:
    """Three Gaussian releases are one with 1/√3 of the noise, whose δ(ε) is known (Balle and Wang 2018, eq. 6)."""
    sigma = 1.6
    mu = np.sqrt(3) / sigma
    given = task.Task("", privacy="local")
    known = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - given.delta, 0.1, 50)
    assert accountant.exact_epsilon(given, sigma) == pytest.approx(known, rel=1e-3)


def test_files_that_requirements_name_exist() -> None:
    folder = environments.requirements("flower").parent
    for path in sorted(folder.glob("*.txt")):
        for name in re.findall(r"(?m)^-[cr] (\S+)", path.read_text(encoding="utf-8")):
            assert (folder / name).is_file(), f"{path.name}: {name}"


def test_without_noise_nothing_is_promised() -> None:
    assert accountant.exact_epsilon(task.Task("", privacy="local"), 0.0) == math.inf


def test_examples_are_in_few_minibatches() -> None:
    given = task.Task("", privacy="example")
    assert accountant.exact_epsilon(given, 0.69) == pytest.approx(3.0, rel=0.01)
    assert accountant.exact_epsilon(replace(given, rounds=6), 0.69) > 3.0


def test_the_noise_asked_for_gives_the_epsilon_asked_for() -> None:
    for contestant in task.CONTESTANTS:
        given = contestant.task(Path(), Path(), 2)
        if given.noise_multiplier:
            assert accountant.exact_epsilon(given, given.noise_multiplier) == pytest.approx(given.epsilon, rel=0.02)


# --- the task ---


def test_rows_are_chosen_by_name_and_by_tool() -> None:
    assert [one.name for one in task.chosen(["flower-opacus"])] == ["flower-opacus"]
    assert {one.tool for one in task.chosen(["flower_privdec"])} == {"flower_privdec"}
    assert len(task.chosen(["flower_privdec"])) == 2
    assert task.chosen([]) == list(task.CONTESTANTS)
    with pytest.raises(SystemExit) as refusal:
        task.chosen(["pysyft"])
    assert "pysyft" in str(refusal.value)


@pytest.mark.parametrize("contestant", task.CONTESTANTS, ids=lambda one: one.name)
def test_a_contestant_is_complete(contestant: task.Contestant, tmp_path: Path) -> None:
    """Its command and files are there, and what it is given can be read."""
    place = task.Place(tmp_path / "bin", tmp_path, tmp_path / "task.json")
    task.write(contestant.task(tmp_path, tmp_path / "outcome.json", 2), place.task)
    command = contestant.command(place)
    assert command[0].startswith(str(tmp_path / "bin"))
    assert any(Path(word).exists() for word in command[1:])
    assert environments.requirements(contestant.tool).exists()
    assert bool(contestant.protects) == (contestant.privacy != "none")


@pytest.mark.parametrize("tool", sorted({one.tool for one in task.CONTESTANTS} - {environments.OWN}))
def test_every_version_is_pinned(tool: str) -> None:
    _, *lines = environments.requirements(tool).read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    packages = {one.package for one in task.CONTESTANTS if one.tool == tool}
    assert packages <= {line.partition("==")[0] for line in lines}


@pytest.mark.parametrize("contestant", task.chosen(["flower_privdec"]), ids=lambda one: one.name)
def test_the_projects_own_task_is_a_scenario(contestant: task.Contestant) -> None:
    given = contestant.task(Path("data"), Path("outcome"), 2)
    asked = json.loads(json.dumps(vars(given)))

    scenario = parse_scenario(privdec.scenario(asked))
    assert scenario.algorithm.local_steps == given.steps == 118
    assert scenario.n_peers == 16
    assert (scenario.privacy == "none") == (given.privacy == "none")


def test_images_are_read_and_dealt_out(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.arange(3 * 784, dtype=np.uint8)
    (raw / "train-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 3, 28, 28) + pixels.tobytes())
    (raw / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 3) + bytes([7, 0, 9]))
    x, y = shared.images(str(tmp_path), train=True)
    assert x.shape == (3, 784)
    assert y.tolist() == [7, 0, 9]
    assert x[0, 255].item() == pytest.approx((1 - shared.MEAN) / shared.STD, rel=1e-6)
    partitioned = shared.shares(100, 16)
    assert sorted(np.concatenate(partitioned)) == list(range(100))
    assert {len(part) for part in partitioned} == {6, 7}


def test_all_begin_with_one_model_and_hand_back_alike(tmp_path: Path) -> None:
    first, second = shared.model(200), shared.model(200)
    assert sum(p.numel() for p in first.parameters()) == 159_010
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    outcome = shared.Outcome({"outcome": str(tmp_path / "outcome.json")})
    outcome.start()
    outcome.write(outcome.began + 6.0, 0.5, claimed_epsilon=3.0)
    said = json.loads((tmp_path / "outcome.json").read_text())
    assert said == {"training_seconds": pytest.approx(6.0), "accuracy": 0.5, "claimed_epsilon": 3.0}


# --- environments ---


def test_an_environment_is_rebuilt_if_its_versions_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1\n")
    called: list[list[str]] = []

    def run(command: list[object], **_: object) -> None:
        called.append([str(word) for word in command])
        (tmp_path / "flower").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "requirements", lambda tool: pins)
    monkeypatch.setattr(subprocess, "run", run)
    assert environments.make("flower", tmp_path) == tmp_path / "flower" / "bin"
    assert [command[1:3] for command in called] == [["-m", "venv"], ["-m", "pip"]]
    environments.make("flower", tmp_path)
    assert len(called) == 2
    pins.write_text("a==2\n")
    environments.make("flower", tmp_path)
    assert len(called) == 4


def test_this_checkout_is_installed_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    (tmp_path / environments.OWN).mkdir()
    monkeypatch.setattr(subprocess, "run", lambda command, **_: called.append([str(word) for word in command]))
    for _ in range(2):
        environments.make(environments.OWN, tmp_path)
    assert [command[-1] for command in called[:2]] == [
        str(tmp_path / environments.OWN),
        str(environments.requirements(environments.OWN)),
    ]
    assert called[2][-1] == str(ROOT)


# --- results ---


def test_the_page_is_what_the_file_says() -> None:
    found = results.load()
    assert results.FILE.with_name("README.md").read_text(encoding="utf-8") == results.page(found)
    assert [row.name for row in found.rows] == [one.name for one in task.CONTESTANTS]


def test_a_row_takes_the_place_of_its_like(tmp_path: Path) -> None:
    path = tmp_path / "side" / "results.json"
    order = ["flower_privdec", "flower"]
    found = results.Results("a machine", 2, 1e-5, ()).with_row(ROW, order)
    found = found.with_row(replace(ROW, name="flower_privdec", tool="flower_privdec"), order)
    found = found.with_row(replace(ROW, seconds=30.0, exact_epsilon=math.inf), order)
    results.save(found, path)
    assert results.load(path) == found
    assert [(row.name, row.seconds) for row in found.rows] == [("flower_privdec", 27.04), ("flower", 30.0)]
    assert sorted(os.listdir(path.parent)) == ["README.md", "results.json"]


def test_a_table_shows_figures_bounds_and_failures() -> None:
    private = replace(ROW, privacy="local", claimed_epsilon=3.0, claimed_for="one message", exact_epsilon=4.741)
    unnoised = replace(private, exact_epsilon=math.inf)
    failed = replace(ROW, failed="time limit", accuracy=None, seconds_a_round=None)
    text = results.tables(results.Results("a machine", 2, 1e-5, (ROW, private, unnoised, failed)))
    assert "| flower (server) | 1.41.0 | 27 | 1.52 | 40 | 3.00 GiB | 94.3 % | 0.5 |" in text
    assert "| 3.00 | one message | 4.75 |" in text
    assert "| 3.00 | one message | ∞ |" in text
    assert "δ = 1e-5." in text
    assert "| flower (server) | 1.41.0 | time limit | – |" in text


def test_a_contestant_without_result_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    took = measuring.Measured(3.0, 1.0, MIB, 0.0, "", 1)
    contestant = task.chosen(["flower-opacus"])[0]
    given = contestant.task(tmp_path, tmp_path / "outcome.json", 2)
    row = script.row_of(contestant, given, took, "1.41.0", tmp_path / "log.txt")
    assert row.failed == "failed with status 1"
    assert "log.txt" in capsys.readouterr().err


def test_a_result_becomes_a_row(tmp_path: Path) -> None:
    took = measuring.Measured(30.0, 20.0, MIB, 0.0, "", 0)
    contestant = task.chosen(["flower-opacus"])[0]
    given = contestant.task(tmp_path, tmp_path / "outcome.json", 2)
    said = {"training_seconds": 9.0, "accuracy": 0.85, "claimed_epsilon": 2.0, "noise_multiplier": 0.69}
    Path(given.outcome).write_text(json.dumps(said))
    row = script.row_of(contestant, given, took, "1.41.0", tmp_path / "log.txt")
    assert (row.seconds_a_round, row.claimed_epsilon, row.claimed_for) == (3.0, 2.0, "one round")
    assert row.exact_epsilon == pytest.approx(3.0, rel=0.01)


def test_the_environment_of_a_contestant_is_its_own(tmp_path: Path) -> None:
    place = task.Place(tmp_path / "bin", tmp_path / "run", tmp_path / "task.json")
    given = script.variables(place)
    assert given["PATH"].startswith(str(tmp_path / "bin") + os.pathsep)
    assert given["FLWR_HOME"] == str(tmp_path / "run" / "flwr")
    assert given["FLWR_LOCAL_CONTROL_API_PORT"] != given["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
