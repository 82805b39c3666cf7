"""A rehearsal: the engine's numbers if nothing goes wrong, the same bytes for one seed, and the truth about faults."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from tiny_scenario import Tiny
from torch import Tensor
from variants import VARIANTS, modes_in_turn, settings_for

from flower_privdec import testing
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.memory_trainer import MEASURED_ROUNDS, MemoryHome, SharedParts
from flower_privdec.peer.memory_trainer import rehearsed as in_rehearsal
from flower_privdec.rehearsal.rehearsal import Rehearsal
from flower_privdec.rehearsal.weather import weather
from flower_privdec.scenario import Scenario

ALONE = ("scaffold", "local", "dp-sgd")  # or by a server
EXCHANGING = [variant for variant in VARIANTS if variant[0].removeprefix("algorithm.name=") not in ALONE]
MODES = {
    "synchronous": "network={mode: synchronous, final_mixing: 0}",
    "asynchronous": "network={mode: asynchronous}",
}


def rehearsed(scenario: Scenario, folder: Path, faults: str = "{}", **options: Any) -> Rehearsal:
    """Rehearse a scenario to its end."""
    rehearsal = Rehearsal(scenario, folder, weather(scenario, FaultSchedule.parse(faults), **options))
    rehearsal.run()
    return rehearsal


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# --- the engine's numbers ---


@pytest.mark.parametrize(
    ("variant", "mode"),
    [pytest.param(variant, mode, id=f"{' '.join(variant)}-{mode}") for variant, mode in modes_in_turn(EXCHANGING, 1)],
)
def test_every_algorithm_comes_to_its_end(variant: list[str], mode: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(*variant), "rounds=2", MODES[mode])
    rehearsal = rehearsed(scenario, tmp_path)
    assert {end.end for end in rehearsal.ends} == {"finished"}
    assert {end.round for end in rehearsal.ends} == {2}
    if mode == "synchronous":
        wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds).state
        for name in wanted.rows:
            rows = torch.cat([peer.state.rows[name] for peer in rehearsal.network.peers.values()])
            torch.testing.assert_close(rows, wanted.rows[name], msg=name)


def test_metrics_and_budgets_are_those_of_a_run(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(MODES["synchronous"])
    run(Experiment.build(scenario), tmp_path / "engine")
    rehearsed(scenario, tmp_path / "rehearsal")
    engine = read_metrics(tmp_path / "engine")
    rehearsal = read_metrics(tmp_path / "rehearsal")
    for one, other in zip(rehearsal, engine, strict=True):
        del one["seconds"]
        del other["seconds"]
        assert one.pop("epsilon") >= other.pop("epsilon")  # peers may be ahead, or have reserved a step
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-9), name

    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("engine", "rehearsal")]
    spent = [[row["epsilon"] for row in summary["privacy"]] for summary in summaries]
    assert spent[0] == spent[1]
    assert summaries[1]["publishable"] is False


def test_asynchronous_peers_are_as_good_as_the_engine(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        "rounds=30", "evaluation.every=30", "privacy={epsilon: 10.0, delta: 1.0e-3}", "data.test_samples=300"
    )
    run(Experiment.build(scenario), tmp_path / "engine")
    rehearsed(scenario, tmp_path / "rehearsal")
    wanted = json.loads((tmp_path / "engine" / "summary.json").read_text())["accuracy"]["mean_model"]
    got = json.loads((tmp_path / "rehearsal" / "summary.json").read_text())["accuracy"]
    assert got["peer_min"] > wanted - 0.03


# --- one seed ---


def test_one_seed_writes_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("network.links=wan")
    options: dict[str, Any] = {"random_faults": 1.0, "slow": "25%:4"}
    folders = [tmp_path / name for name in ("first", "again")]
    for folder in folders:
        Rehearsal(scenario, folder, weather(scenario, None, seed=5, **options)).run()
    for name in ("metrics.jsonl", "timeline.csv", "peers.csv", "waits.csv", "faults.yaml"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert "kind: slow" in (folders[0] / "faults.yaml").read_text()


def test_the_faults_written_repeat_a_rehearsal(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny()
    first = tmp_path / "first"
    Rehearsal(scenario, first, weather(scenario, None, random_faults=1.0, seed=8)).run()
    again = tmp_path / "again"
    Rehearsal(scenario, again, weather(scenario, first / "faults.yaml")).run()
    assert (first / "peers.csv").read_bytes() == (again / "peers.csv").read_bytes()


# --- how long it takes ---

STEP = 1.0  # seconds of a round's private steps
WRITE = 0.1
WAY = 0.01  # of a message
MIXINGS = "topology={{name: directed-exponential, mixing_steps: {}}}"

# Of a round: how many exchanges it has, how many of them follow another one with the same neighbour at once, settings.
EXCHANGES = {
    "1": (1, 0, []),
    "1, and a step that is not private": (1, 0, settings_for("algorithm.name=d-psgd")),
    "2 mixings": (2, 0, [MIXINGS.format(2)]),
    "2, asking and answering": (2, 1, settings_for("algorithm.name=dp-cga")),
    "3 mixings": (3, 0, [MIXINGS.format(3)]),
    "3, asking, answering and mixing": (3, 2, settings_for("algorithm.name=pdsl")),
}


def timed(scenario: Scenario, folder: Path, way: float, write: float) -> float:
    """Rehearse a scenario; return how long a round takes until the last peer is through.

    What each peer does and waits for is its whole time.
    """
    seconds = f"{{links: {{latency: {way}}}, work: {{train: {STEP}, save: {write}, evaluate: 0}}}}"
    rehearsal = rehearsed(scenario, folder, seconds)
    for end in rehearsal.ends:
        writes = rehearsal.network.machines[end.peer].performed["save"]
        assert end.worked == pytest.approx(scenario.rounds * STEP + writes * write)
        assert end.ended_at == pytest.approx(end.worked + end.waited)

    through = {k: min(one.seconds for one in rehearsal.moments if one.round_min >= k) for k in (2, 4)}
    return (through[4] - through[2]) / 2


@pytest.mark.parametrize("exchanges", EXCHANGES)
def test_a_round_takes_its_work_and_its_waits(exchanges: str, tiny: Tiny, tmp_path: Path) -> None:
    """A step, whatever the program has beside it; for each exchange, a write and the way of a message.

    A neighbour says that it used what came once that is on its disk, and is called again after that: a way more, if no
    step lies between.
    """
    count, at_once, settings = EXCHANGES[exchanges]
    scenario = tiny(*settings, "network={mode: synchronous, final_mixing: 0}", "rounds=5", "evaluation.every=5")
    wanted = STEP + count * (WRITE + WAY) + at_once * WAY
    assert timed(scenario, tmp_path, WAY, WRITE) == pytest.approx(wanted)


@pytest.mark.parametrize("exchanges", EXCHANGES)
def test_an_asynchronous_round_takes_its_steps(exchanges: str, tiny: Tiny, tmp_path: Path) -> None:
    """Where writes and messages take no time; else it also writes what comes between two exchanges."""
    count, _, settings = EXCHANGES[exchanges]
    scenario = tiny(*settings, "network={links: local, final_mixing: 0}", "rounds=5", "evaluation.every=5")
    assert timed(scenario, tmp_path / "free", 0.0, 0.0) == pytest.approx(STEP)
    if exchanges == "2 mixings":
        least = STEP + count * (WRITE + WAY)
        assert least <= timed(scenario, tmp_path / "costly", WAY, WRITE) + 1e-9 <= least + count * WRITE


def test_who_takes_no_step_works_for_none(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("participation={kind: uniform, fraction: 0.5}", MODES["synchronous"], "rounds=8")
    rehearsal = rehearsed(scenario, tmp_path, f"{{work: {{train: {STEP}, save: 0, evaluate: 0}}}}")
    assert sum(end.worked for end in rehearsal.ends) == pytest.approx(8 * 2 * STEP)


@pytest.mark.parametrize("name", ["privsgp", "dp-cga", "pdsl", "fedavg"])
def test_measured_steps_are_those_of_a_round(
    name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of algorithms too that begin a round by asking, or take several steps in it."""
    cohorts = []
    cohort_of = SharedParts.cohort_of

    def recorded(self: SharedParts, peer: int) -> Cohort:
        cohorts.append(cohort_of(self, peer))
        return cohorts[-1]

    home = MemoryHome(in_rehearsal(tiny(*settings_for(f"algorithm.name={name}"))))
    monkeypatch.setattr(SharedParts, "cohort_of", recorded)
    assert home.step_seconds() > 0
    assert cohorts[-1].steps_taken == MEASURED_ROUNDS * cohorts[-1].steps_per_round


# --- what slow devices and faults cost ---


def test_slow_devices_cost_time_and_are_named(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(MODES["synchronous"])
    quick = rehearsed(scenario, tmp_path / "quick")
    slow = rehearsed(scenario, tmp_path / "slow", "faults: [{kind: slow, peer: 2, factor: 10}]")
    assert slow.network.now > 8 * quick.network.now
    assert slow.ends[2].worked > 8 * slow.ends[0].worked
    waited_for = {end.longest_for for end in slow.ends if end.peer != 2 and end.waited > 1}
    assert 2 in waited_for
    lines = table(tmp_path / "slow" / "timeline.csv")
    assert float(lines[-1]["seconds"]) == pytest.approx(slow.network.now)


def test_a_slower_step_takes_longer(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny()
    assert rehearsed(scenario, tmp_path / "one", step_seconds=1.0).network.now > 6
    measured = Rehearsal(scenario, tmp_path / "two", weather(scenario, None), measure=True)
    assert 0 < measured.schedule.work["train"] < 1


def test_a_lost_ledger_is_charged_what_was_released(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("rounds=8")
    lost = "faults: [{kind: lose, peer: 1, at: 0.4, down: 0.1}]"
    rehearsal = rehearsed(scenario, tmp_path, lost)
    end = rehearsal.ends[1]
    assert end.epsilon >= end.epsilon_released > 0
    assert rehearsal.network.faults["lose"] == 1


def test_steps_taken_again_after_a_crash_are_paid_again(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("privacy={noise_multiplier: 1.0, delta: 1.0e-3}")
    crashed = "faults: [{kind: crash, peer: 0, work: train, nth: 5, point: after, down: 0.2}]"
    ends = rehearsed(scenario, tmp_path, crashed).ends
    assert ends[0].epsilon > ends[1].epsilon


@pytest.mark.parametrize("kind", ["correlated", "cancelling, colluding: 1"])
def test_a_restarted_peer_remembers_no_noise(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """With code of one's own its draws are new, and it takes steps again that it has not saved."""
    scenario = tiny(
        "rounds=4",
        f"privacy={{epsilon: 1000.0, noise_multiplier: 2.0, delta: 1.0e-3, noise: {{kind: {kind}, bands: 3}}}}",
        "task={loss: {module: 'user_tasks:cross_entropy'}}",
    )
    crashed = "faults: [{kind: crash, peer: 3, work: train, nth: 3, point: after, down: 0.5}]"
    rehearsal = rehearsed(scenario, tmp_path, crashed)
    assert {end.end for end in rehearsal.ends} == {"finished"}


def test_an_old_folder_stops_peers_who_wait(tiny: Tiny, tmp_path: Path) -> None:
    """They have used what it did not send yet; it says so at once, and they wait for it as long as for any other."""
    restored = (
        "{work: {train: 0.2, save: 0.02}, faults: [{kind: restore, peer: 2, copied_at: 0.9, at: 2.0, down: 0.3}]}"
    )
    waiting = tiny("rounds=8", "network={mode: synchronous, deadline: 5.0}")
    ends = rehearsed(waiting, tmp_path / "waiting", restored).ends
    assert [end.end for end in ends] == ["network.silent", "network.silent", "lockstep.stale", "network.silent"]
    assert "is an old copy; restore the newest" in ends[2].why

    going_on = tiny("rounds=8", "network.deadline=5.0")
    assert {end.end for end in rehearsed(going_on, tmp_path / "going-on", restored).ends} == {"finished"}


def test_wrong_clocks_stop_no_virtual_time(tiny: Tiny, tmp_path: Path) -> None:
    clocks = "faults: [{kind: clock, peer: 0, at: 0.123, rate: 0.3}, {kind: clock, peer: 1, at: 0.1, rate: 1.7}]"
    rehearsal = rehearsed(tiny(), tmp_path, clocks)
    assert {end.end for end in rehearsal.ends} == {"finished"}


def test_who_never_ends_is_told(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("network.deadline=2.0")
    rehearsal = rehearsed(scenario, tmp_path, "faults: [{kind: crash, peer: 3, at: 0.3}]")
    lines = table(tmp_path / "peers.csv")
    assert lines[3]["end"] == "virtual.killed"
    assert float(lines[3]["ended_at"]) == 0.3
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ends"]["virtual.killed"] == 1
    assert summary["budget_note"] == "peer 3 did not get to the end, and its ε is of all that its ledger was charged"
    assert rehearsal.stuck == ""


def test_a_killed_peers_last_model_counts_no_more(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def counted(agreement: Agreement, rows: dict[str, Tensor], round_index: int, *rest: Any) -> dict[str, Any]:
        tried.append((round_index, len(rows["x"])))
        return evaluate(agreement, rows, round_index, *rest)

    monkeypatch.setattr("flower_privdec.experiment.recorder.evaluate", counted)
    scenario = tiny("network.deadline=2.0", "rounds=8", "evaluation.every=1")
    rehearsed(scenario, tmp_path, "faults: [{kind: crash, peer: 3, at: 0.3}]")
    assert tried[0] == (1, 4)
    assert tried[-1] == (8, 3)


def test_peers_that_warn_alike_warn_in_one_line(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three peers share no noise with the one that is gone."""
    noise = "privacy.noise={kind: cancelling, colluding: 1, secrets: complete, strength: 2.0}"
    scenario = tiny(noise, "rounds=20", "network.links=local", "topology.name=complete")
    rehearsal = rehearsed(scenario, tmp_path, "faults: [{kind: crash, peer: 3, at: 0.6}]")
    assert rehearsal.ends[3].end == "virtual.killed"
    (line,) = [record.getMessage() for record in caplog.records if "shares no noise" in record.getMessage()]
    assert "(and 2 more lines like this)" in line
    assert "peer 3 by peers 0-2" in json.loads((tmp_path / "summary.json").read_text())["left_out"]


def test_no_model_and_no_ledger_is_left(tiny: Tiny, tmp_path: Path) -> None:
    rehearsed(tiny(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {".lock"}
    assert names == {
        "scenario.yaml", "metrics.jsonl", "summary.json", "faults.yaml", "timeline.csv", "peers.csv", "waits.csv"
    }  # fmt: skip


# --- wrong inputs ---


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"random_faults": 0.0}, "rehearse.random-faults"),
        ({"random_faults": float("nan")}, "rehearse.random-faults"),
        ({"slow": "a fifth"}, "rehearse.slow"),
        ({"slow": "0%:5"}, "rehearse.slow"),
        ({"slow": "20%:-1"}, "rehearse.slow"),
        ({"slow": "20%:1e999"}, "rehearse.slow"),
        ({"step_seconds": -1.0}, "rehearse.step-seconds"),
        ({"step_seconds": float("inf")}, "rehearse.step-seconds"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], code: str, tiny: Tiny) -> None:
    with raises(Exception, code):
        weather(tiny(), None, **options)


def test_faults_of_unknown_peers_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{kind: slow, peer: 4, factor: 2}]\n")
    with raises(Exception, "faults.peer"):
        weather(tiny(), path)
    with raises(Exception, "rehearse.faults"):
        weather(tiny(), path, random_faults=0.5)


def test_a_folder_with_a_run_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    rehearsed(tiny(), tmp_path)
    with raises(Exception, "run.folder-taken"):
        rehearsed(tiny(), tmp_path)


def test_more_peers_than_memory_holds_are_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_privdec.rehearsal.rehearsal.available_bytes", lambda device: 700_000)
    with raises(Exception, "rehearse.memory"):
        rehearsed(tiny(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rehearsed(tiny("n_peers=2"), tmp_path / "out")


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_liar_is_named_and_ends_nobody(mode: str, tiny: Tiny, tmp_path: Path) -> None:
    robust = f"network={{mode: {mode}, robust: {{kind: clipped, byzantine: 1}}}}"
    scenario = tiny("n_peers=5", "topology.name=complete", "rounds=8", robust)
    rehearsal = rehearsed(scenario, tmp_path, "faults: [{kind: lie, peer: 4, says: scaled, factor: -10}]")
    assert {end.end for end in rehearsal.ends[:4]} == {"finished"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "peer 4 stood out" in summary["doubted"]
    assert summary["lied"] == "peer 4 sent its own numbers times -10, from 0 s on"


IMPOSSIBLE = {
    "synchronous": (
        "weight, factor: -1",
        "weight, factor: 0",
        "weight, factor: 1.0e+300",
        "nan",
        "scaled, factor: 1.0e+300",
    ),
    "asynchronous": ("weight, factor: -1",),  # of the rest, test_network_hostile.py
}


@pytest.mark.parametrize("mode", IMPOSSIBLE)
def test_impossible_numbers_end_nobody_else(mode: str, tiny: Tiny, tmp_path: Path) -> None:
    for number, lie in enumerate(IMPOSSIBLE[mode]):
        scenario = tiny("n_peers=5", "topology.name=directed-exponential", "rounds=4", f"network.mode={mode}")
        folder = tmp_path / str(number)
        rehearsal = rehearsed(scenario, folder, f"faults: [{{kind: lie, peer: 4, says: {lie}}}]")
        assert {end.end for end in rehearsal.ends[:4]} == {"finished"}, lie
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["quarantined"].startswith("peer 4, by "), lie


def test_no_liar_moves_a_weight_that_all_know(tiny: Tiny, tmp_path: Path) -> None:
    """Nor by so little that it looks like rounding: honest peers would then be taken for liars one day."""
    lies = ("weight, factor: 3", "weight, factor: 1.0e-6", "weight, factor: 1.0004")
    for number, lie in enumerate(lies):
        scenario = tiny("n_peers=5", "topology.name=complete", "rounds=15", MODES["synchronous"])
        rehearsal = rehearsed(scenario, tmp_path / str(number), f"faults: [{{kind: lie, peer: 4, says: {lie}}}]")
        assert {end.end for end in rehearsal.ends} == {"finished"}
        for peer in range(4):
            running = rehearsal.network.peers[peer]
            assert float(running.state.rows["w"][0]) == pytest.approx(1.0, abs=2e-4), lie
            assert {j for j, one in running.neighbours.items() if one.quarantined} <= {4}, lie


def test_who_was_passed_over_is_asked_for_no_answer(tiny: Tiny, tmp_path: Path) -> None:
    """Two peers that pass over each other's requests owe each other no replies, and wait for none."""
    pdsl = settings_for("algorithm.name=pdsl")
    network = "network={mode: asynchronous, links: local, deadline: 100.0}"
    scenario = tiny(*pdsl, "topology={name: star}", network)
    late = "faults: [{kind: join, peer: 2, at: 0.001}, {kind: join, peer: 3, at: 0.001}]"
    rehearsal = rehearsed(scenario, tmp_path, late, step_seconds=0.05, seed=0)
    assert {end.end for end in rehearsal.ends} == {"finished"}
    assert rehearsal.network.now < 20
