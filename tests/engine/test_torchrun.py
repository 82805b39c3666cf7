"""The example that spreads a cohort over ranks of torchrun (`simulations/scale-out`), against the engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import forked, status_of
from paths import ROOT, python_path
from ports import own_addresses
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Tiny

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.recorder import model_tensors
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.scenario import Scenario, to_yaml

UNBOUNDED = ["rounds=2", "privacy={noise_multiplier: 1.5, delta: 1.0e-3}"]  # the second run may spend, too
EXAMPLE = ROOT / "simulations" / "scale-out" / "shards.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("scale_out", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_of(example: ModuleType, rank: int, count: int, address: str, words: list[str]) -> None:
    """Be one rank, with the environment that torchrun gives it."""
    host, _, port = address.partition(":")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR=host, MASTER_PORT=port)
    example.main(words)


def assert_as_engine(scenario: Scenario, folder: Path, count: int) -> None:
    """Compare the folder that rank 0 wrote with an engine's run of all peers, under the keys of a run in shards."""
    agreement = Agreement.of(scenario)
    experiment = Experiment.joined(agreement, OwnParts.of(agreement, runtime=f"{count} shards"))
    expected = model_tensors(agreement, testing.run_rounds(experiment, scenario.rounds).state.rows, scenario.rounds)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12)

    result = read_result(folder)
    assert [line["round"] for line in result.metrics] == [2, 4, 6]
    assert [row["rounds_run"] for row in result.summary["privacy"]] == [6] * 4
    assert all(2.9 < row["epsilon"] <= 3.0 for row in result.summary["privacy"])
    assert len(list((folder / "ledger").glob("*/*.jsonl"))) == count


def test_ranks_train_as_the_engine_does(example: ModuleType, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("topology.name=directed-exponential-full")
    (tmp_path / "tiny.yaml").write_text(to_yaml(scenario))
    for count in (2, 3):
        (address,) = own_addresses(1)
        words = [str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / f"{count}")]
        ranks = [forked(rank_of, example, rank, count, address, words) for rank in range(count)]
        assert [status_of(rank) for rank in ranks] == [0] * count
        assert_as_engine(scenario, tmp_path / f"{count}", count)


def test_no_rank_pays_if_another_cannot_begin(example: ModuleType, tiny: Tiny, tmp_path: Path) -> None:
    """Rank 0 finds another run in the folder, before the others have charged anything for theirs."""
    ledgers = []
    for seed, wanted in ((3, 0), (4, 1)):
        (tmp_path / "tiny.yaml").write_text(to_yaml(tiny(f"seed={seed}", *UNBOUNDED)))
        (address,) = own_addresses(1)
        words = [str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run")]
        ranks = [forked(rank_of, example, rank, 2, address, words) for rank in range(2)]
        assert [status_of(rank) for rank in ranks] == [wanted] * 2
        ledgers.append([path.read_bytes() for path in sorted((tmp_path / "run" / "ledger").glob("*/*.jsonl"))])
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) == 2


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny()))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    words += [str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "two")]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], check=True, env=environment, capture_output=True)
    assert_as_engine(tiny(), tmp_path / "two", 2)


def test_a_process_without_a_rank_says_how_to_start(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        example.main(["digits", "--out", str(tmp_path)])
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("network.codec=int8", "network.codec"),
        ("privacy.ledger=ledgers", "privacy.ledger"),
        ("privacy.noise={kind: cancelling, colluding: 1}", "privacy.noise.kind"),
    ],
)
def test_what_shards_do_not_do_is_refused(example: ModuleType, tiny: Tiny, setting: str, key: str) -> None:
    with raises(ScenarioError, "shards.scenario", key):
        example.check(tiny(setting))
