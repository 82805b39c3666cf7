"""Runs killed at random places and resumed, time and again, are the runs that nobody killed, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import forked, privdec, status_of
from tiny_scenario import TINY
from variants import PLAIN, settings_for

from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment, recorder
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.scenario import parse_scenario
from flower_privdec.testing import TIMES

KILLS = 3  # of each variant
SETTINGS = ["rounds=8", "privacy={noise_multiplier: 1.5, delta: 1.0e-3}", "data.samples=120", "data.batch.size=6"]


class Killed(BaseException):
    """What nothing catches."""


class Blade:
    """Ends a run at one of the places that `places` put it into.

    Attributes:
        left: places to go until then.
    """

    def __init__(self) -> None:
        self.left = -1

    def touch(self) -> None:
        """Count a place, and kill where the last one is reached."""
        self.left -= 1
        if self.left == 0:
            raise Killed


@contextmanager
def places(blade: Blade) -> Iterator[None]:
    """Put a blade before and into every round, evaluation, payment and file that is written."""

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def touched(*args: Any, **kwargs: Any) -> Any:
            blade.touch()
            return function(*args, **kwargs)

        return touched

    def torn(folder: Path, line: str) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line[:40])
            file.flush()
            blade.touch()
            file.write(line[40:])

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in (
            *((Engine, "round"), (Engine, "perform"), (Ledger, "append"), (Ledger, "_sync")),
            *((recorder.Recorder, "record"), (recorder, "save_checkpoint"), (recorder, "write_atomically")),
        ):
            patched.setattr(owner, name, before(getattr(owner, name)))
        patched.setattr(recorder, "append_metrics", torn)
        yield


def told(folder: Path) -> tuple[Any, ...]:
    """Return all that a run's folder says, but for times."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in (summary, *lines):
        for key in TIMES:
            record.pop(key, None)
    return summary, lines, (folder / "model.safetensors").read_bytes()


def assert_same(one: Path, other: Path) -> None:
    """Check that two runs left the same, bit for bit."""
    assert told(one) == told(other)
    first, second = (read_checkpoint(folder / "checkpoint").state for folder in (one, other))
    assert first.rows.keys() == second.rows.keys()
    assert first.edges.keys() == second.edges.keys()
    assert all(torch.equal(first.rows[name], second.rows[name]) for name in first.rows)
    assert all(torch.equal(first.edges[name].values, second.edges[name].values) for name in first.edges)


def scenario_of(variant: list[str]) -> Any:
    settings = settings_for(*variant)
    few = [setting for setting in SETTINGS if "batch.size" not in setting or not any("batch=" in s for s in settings)]
    return parse_scenario(TINY, overrides=[*few, *settings])


@pytest.mark.parametrize("number", range(len(PLAIN)), ids=[" ".join(variant) for variant in PLAIN])
def test_a_run_killed_three_times_ends_the_same(number: int, tmp_path: Path) -> None:
    scenario, draw, blade, kills = scenario_of(PLAIN[number]), random.Random(number), Blade(), 0
    run(Experiment.build(scenario), tmp_path / "whole")
    with places(blade):
        while not (tmp_path / "parted" / "summary.json").exists():
            blade.left = draw.randrange(1, 12) if kills < KILLS else -1
            try:
                resume = (tmp_path / "parted" / "checkpoint").exists()
                run(Experiment.build(scenario), tmp_path / "parted", resume=resume)
            except Killed:
                kills += 1
    assert kills == KILLS
    assert_same(tmp_path / "whole", tmp_path / "parted")


def test_so_many_kills_are_sixty_and_more() -> None:
    assert KILLS * len(PLAIN) >= 60


def reached(checkpoint: Path) -> int:
    """Return the round of a checkpoint; 0 where there is none."""
    return read_checkpoint(checkpoint).state.round_index if checkpoint.exists() else 0


@pytest.mark.slow
def test_killed_processes_leave_a_run_that_can_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(TINY.replace("rounds: 6", "rounds: 100"))
    run(Experiment.build(parse_scenario(scenario.read_text())), tmp_path / "whole")
    take_round = Engine.round

    def slowly(engine: Engine) -> None:
        """Take a round and rest, so that many are left when the process is killed, however late that is."""
        take_round(engine)
        time.sleep(0.05)

    draw, kept = random.Random(1), tmp_path / "parted" / "checkpoint"
    for _ in range(2):  # when it has begun, and when it goes on
        known = reached(kept)
        resume = ["--resume"] if kept.exists() else []
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "round", slowly)
            child = forked(privdec, "run", scenario, "--out", tmp_path / "parted", *resume)
        while child.is_alive() and reached(kept) <= known:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        child.kill()
        assert status_of(child) == -signal.SIGKILL
        state = read_checkpoint(kept).state
        _, payments = read_chain(tmp_path / "parted" / "ledger" / "digits.jsonl")
        assert max(payment.to_step for payment in payments) >= state.round_index > 0
    run(Experiment.build(parse_scenario(scenario.read_text())), tmp_path / "parted", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parted")
