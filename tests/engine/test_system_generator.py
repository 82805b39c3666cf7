"""Runs whose noise and batches are the operating system's: every algorithm, block, worker and shard, and the ledger."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from raising import raises
from shards_together import engines_of, in_shards
from tiny_scenario import Build, Tiny
from variants import VARIANTS, settings_for
from worker_runs import smallest_blocks

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.noise import PairSecrets, SystemNoise

SYSTEM = ["compute.generator=system", "privacy={noise_multiplier: 1.5, delta: 1.0e-3}", "data.samples=120"]
SMALL = ["data.batch.size=6"]
ALL = pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)


def system(*settings: str) -> list[str]:
    own_batch = any("batch=" in setting for setting in settings)
    return [*SYSTEM, *([] if own_batch else SMALL), *settings_for(*settings)]


@contextmanager
def counting() -> Iterator[Counter[int]]:
    """Count the steps that each peer releases inside, of each process of the run that is not forked."""
    add_noise_ = Cohort.add_noise_
    count = Counter[int]()

    def counted(cohort: Cohort, step: PrivateStep) -> None:
        count.update(set(step.peers.tolist()))
        add_noise_(cohort, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Cohort, "add_noise_", counted)
        yield count


def charged(folder: Path, source: str) -> Counter[int]:
    """Return how many steps of each peer a ledger has charges for."""
    steps = Counter[int]()
    for entry in read_entries(folder, source):
        for charge in entry.charges:
            for peer in charge.peers:
                steps[peer] += sum(b - a for parts, _ in charge.parts for a, b in parts)
    return steps


# --- noise


def noises(experiment: Experiment) -> list[torch.Tensor]:
    """Return the noise of every row of every published sum of a short run."""
    with testing.recording() as tape:
        testing.run_rounds(experiment, 3)
    return [
        row
        for step in tape.steps
        for name in step.public
        for row in step.after[name] - step.before[name] - step.raw[name]
    ]


@ALL
def test_two_runs_differ_and_have_deployed_peers_noise(build: Build, variant: list[str]) -> None:
    experiment = build(*system(*variant))
    cohort = experiment.cohort()
    assert type(cohort.noise) is SystemNoise
    assert cohort.apart
    testing.assert_noise(experiment, 3)
    first, second = noises(experiment), noises(experiment)
    assert len(first) == len(second) > 0
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_seeded_run_is_the_same_twice(build: Build) -> None:
    experiment = build(*system("algorithm.name=privsgp")[1:])
    assert torch.equal(*(testing.run_rounds(experiment, 3).state.rows["x"] for _ in range(2)))


def test_batches_and_pair_secrets_are_new_per_cohort(build: Build) -> None:
    experiment = build(*system("algorithm.name=privsgp"))
    cohorts = [experiment.cohort() for _ in range(2)]
    batches = [cohort.data.sampler.batch(0, cohort.rows).index.tolist() for cohort in cohorts]
    assert batches[0] != batches[1]
    assert len({pairs.of(0, 1) for pairs in (*(c.secrets for c in cohorts), PairSecrets(experiment.own.keys))}) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_and_workers_draw_noise_of_their_own(tiny: Tiny, tmp_path: Path, workers: int) -> None:
    scenario = tiny(*system("algorithm.name=privsgp"), "rounds=1")
    for number in range(2):
        with smallest_blocks():
            run(Experiment.build(scenario), tmp_path / str(number), workers=workers)
    one, other = (read_checkpoint(tmp_path / str(number) / "checkpoint").state.rows["x"] for number in range(2))
    assert not any(torch.equal(row, again) for row, again in zip(one, other, strict=True))


def test_shards_draw_noise_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    scenario, shards = tiny(*system("algorithm.name=privsgp")), Shards.split(4, 2)
    make = engines_of(scenario, shards)

    def work(process_group: ProcessGroup) -> torch.Tensor:
        engine = make(process_group)
        assert type(engine.cohort.noise) is SystemNoise
        engine.round()
        process_group.wait_for_all()
        return engine.state.rows["x"]

    one, other = (torch.cat(in_shards(tmp_path, shards, work)) for _ in range(2))
    assert not any(torch.equal(row, again) for row, again in zip(one, other, strict=True))


# --- the ledger


class Killed(BaseException):
    """What nothing catches."""


@ALL
def test_steps_repeated_after_resume_are_charged_again(
    tiny: Tiny, tmp_path: Path, variant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, whole = Experiment.build(tiny(*system(*variant), "rounds=6")), Engine.round
    folder, source, stop_at = (
        tmp_path / "run" / "ledger",
        experiment.public.name,
        random.Random(str(variant)).choice((3, 5)),
    )

    def killed(engine: Engine) -> None:
        whole(engine)
        if engine.state.round_index == stop_at:
            raise Killed

    with counting() as releases:
        monkeypatch.setattr(Engine, "round", killed)
        with pytest.raises(Killed):
            run(experiment, tmp_path / "run")
        assert all(charged(folder, source)[peer] >= count for peer, count in releases.items())
        monkeypatch.setattr(Engine, "round", whole)
        summary = run(experiment, tmp_path / "run", resume=True)
    after, entries, protection = charged(folder, source), read_entries(folder, source), experiment.own.protection
    assert all(after[peer] >= count for peer, count in releases.items())
    assert protection is not None
    planned = sum(spend.to_step - spend.from_step for account in protection.accounts for spend in account.spends)
    assert sum(after.values()) > planned
    assert len({entry.run.id for entry in entries}) == 2
    for row in summary["privacy"]:
        own = [r for e in entries for c in e.charges if row["peer"] in c.peers for r in c.releases]
        assert float(row["epsilon"]) >= epsilon(own, row["delta"]) * (1 - 1e-9)


def test_an_epoch_repeated_after_resume_is_charged_again(tiny: Tiny, tmp_path: Path) -> None:
    """Its examples are drawn again in another order, so an example may take part in it twice."""
    batch = "data.batch={sampling: shuffle, size: 3}"  # 10 steps in an epoch of 30 examples
    scenario = tiny(*system("algorithm.name=privsgp", batch), "rounds=8")
    experiment = Experiment.build(scenario)
    for start in (0, 4):
        cohort = experiment.cohort(tmp_path, start=start)
        assert cohort.ledger is not None
        for step in range(start, 8):
            cohort.ledger.charge(step, cohort.rows)
        epsilons = cohort.ledger.spending.epsilons(8)
        cohort.ledger.close()
    entries = read_entries(tmp_path, "digits")
    assert [[release.steps for c in e.charges for release in c.releases] for e in entries if e.charges] == [[1], [1]]
    assert epsilons[0] == pytest.approx(epsilon([entries[0].charges[0].releases[0].times(2)], 1e-3))


# --- what the user reads


def test_a_summary_states_whether_models_may_be_published(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = system("algorithm.name=privsgp")
    with caplog.at_level(logging.WARNING):
        summary = run(Experiment.build(tiny(*settings)), tmp_path / "system")
        assert "may be published under their ε" in caplog.text
        assert "charged again" in caplog.text
        caplog.clear()
        seeded = run(Experiment.build(tiny(*settings[1:])), tmp_path / "seeded")
        assert not caplog.text
    assert summary["publishable"] is True
    assert "models may be published under this ε" in summary["noise"]
    assert seeded["publishable"] is False
    assert "models must not be published under this ε" in seeded["noise"]
    assert json.loads((tmp_path / "system" / "summary.json").read_text()) == summary
    assert "publishable" not in run(Experiment.build(tiny("privacy=none")), tmp_path / "none")


def test_system_noise_without_privacy_is_refused(tiny: Tiny) -> None:
    with raises(ScenarioError, "compute.generator", "generator=system"):
        tiny("compute.generator=system", "privacy=none")
