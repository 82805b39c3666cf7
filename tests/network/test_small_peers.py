"""Peers without torch: in step with others, killed and continued, mixed with others, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import privdec
from raising import raises
from small_network import ROUNDED, VARIANTS, run

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.network.peer import small_peer
from flower_privdec.network.peer.small_peer import check_small
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.scenario import load_scenario

SUPPORT = Path(__file__).parents[1] / "support"
PEERS = 4
TEXT = """\
name: small
seed: 3
n_peers: 4
rounds: 4
data: {dataset: npz, root: "{peer}.npz", test: test.npz, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
topology: {name: directed-exponential}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 2}
network: {mode: synchronous, links: local, deadline: 60.0, final_mixing: 3}
compute: {generator: portable}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Return the file of a scenario, with data of its peers beside it."""
    random = np.random.default_rng(0)
    centers = random.normal(size=(3, 10))
    for name, half, count in [(str(peer), "train", 72) for peer in range(PEERS)] + [("test", "test", 60)]:
        y = random.integers(3, size=count)
        x = (centers[y] + random.normal(size=(count, 10))).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", **{f"x_{half}": x, f"y_{half}": y})
        tokens = random.integers(20, size=(count, 6))
        np.savez(tmp_path / f"words-{name}.npz", **{f"x_{half}": tokens, f"y_{half}": tokens[:, 0] % 3})
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    return path


def run_small(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Run jobs as small peers of another process, and return the rows of each."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    root = SUPPORT.parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{SUPPORT}"}
    done = subprocess.run(
        [sys.executable, SUPPORT / "small_network.py", path],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [dict(np.load(Path(job["folder"]).with_suffix(".npz"))) for job in jobs]


def first_charges(folder: Path) -> dict[str, Any]:
    """Return what each peer's ledger was charged first: its sampling, its noise multiplier, its accountant."""
    found = {}
    for path in sorted(folder.glob("peer-*/ledger/*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        found[path.parts[-3]] = next(line["charges"] for line in lines if line.get("charges"))
    return found


@pytest.mark.slow
def test_small_peers_have_the_numbers_of_others(scenario: Path, tmp_path: Path) -> None:
    jobs = []
    for name, settings in VARIANTS.items():
        jobs.append({"path": str(scenario), "settings": settings, "folder": str(tmp_path / f"small-{name}")})
    of_small = dict(zip(VARIANTS, run_small(tmp_path, jobs), strict=True))

    for name, settings in VARIANTS.items():
        theirs = run(scenario, settings, tmp_path / name)
        ours = of_small[name]
        assert ours.keys() == theirs.keys(), name
        close = 1e-12 if "compute.dtype=float64" in settings else 2e-6
        for row, values in theirs.items():
            assert ours[row].dtype == values.dtype, (name, row)
            scale = max(1.0, float(np.abs(values).max(initial=0)))
            np.testing.assert_allclose(
                ours[row], values, rtol=1e-9, atol=ROUNDED.get(name, close) * scale, err_msg=f"{name}: {row}"
            )
        assert first_charges(tmp_path / f"small-{name}") == first_charges(tmp_path / name), name


@pytest.mark.slow
def test_a_folder_goes_from_torch_to_small_and_back(scenario: Path, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    job = {"path": str(scenario), "settings": ["rounds=9"], "folder": str(folder), "insecure": False}
    begun = run(scenario, ["rounds=9"], folder, insecure=False, until=3)
    (continued,) = run_small(tmp_path, [job | {"until": 6}])
    assert (continued["round"] > begun["round"]).any()
    assert (continued["epsilon"] > begun["epsilon"]).any()

    ended = run(scenario, ["rounds=9"], folder, insecure=False)
    assert (ended["round"] == 12).all()  # with its final mixing
    assert (ended["epsilon"] > continued["epsilon"]).all()
    assert (ended["epsilon"] <= 3.0).all()

    # One chain, whose lines of either kind cost the same; a start may count a step too many, and none too few.
    for peer in range(PEERS):
        (path,) = (folder / f"peer-{peer}" / "ledger").glob("*.jsonl")
        _, entries = read_chain(path)
        steps = sum(entry.to_step - entry.from_step for entry in entries)
        mechanisms = {release.mechanism for entry in entries for one in entry.charges for release in one.releases}
        assert 9 <= steps <= 9 + 2  # it was started again twice
        assert len(mechanisms) == 1


@pytest.mark.slow
def test_up_mixes_small_peers_with_others(scenario: Path, tmp_path: Path) -> None:
    words = ["up", str(scenario), "--insecure-seeds", "--set", "n_peers=2", "--out"]
    privdec(*words, str(tmp_path / "torch"))
    privdec(*words, str(tmp_path / "mixed"), "--small", "1")
    theirs, ours = (read_metrics(tmp_path / out) for out in ("torch", "mixed"))
    for mixed, other in zip(ours, theirs, strict=True):
        assert mixed["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mixed["consensus_distance"] == pytest.approx(other["consensus_distance"], rel=1e-4)
    small = []
    for peer in range(2):
        status = json.loads((tmp_path / "mixed" / "peers" / str(peer) / "summary.json").read_text())
        other = json.loads((tmp_path / "torch" / "peers" / str(peer) / "summary.json").read_text())
        assert status["epsilon"] == pytest.approx(other["epsilon"], rel=1e-9)
        assert status["loss"] == pytest.approx(other["loss"], rel=1e-5)
        small.append(status["small"])
    assert small == [False, True]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model={name: cnn}", "model 'cnn' needs torch"),
        ("model={module: 'torch.nn:Linear'}", "model 'torch.nn:Linear' needs torch"),
        ("features={kind: scattering, pool: 2}", "features needs torch"),
        ("compute.device=cuda", "compute.device=cuda needs torch"),
        ("privacy.noise={module: 'mine:Noise'}", "privacy.noise.module"),
        ("privacy.noise={kind: correlated, bands: 2}", "privacy.noise.kind=correlated needs scipy"),
        (
            "privacy.noise={kind: cancelling, colluding: 1, bands: 2, secrets: {name: random-regular, degree: 2}}",
            "privacy.noise.bands=2 needs scipy; privacy.noise.secrets.name=random-regular needs networkx",
        ),
        ("data={dataset: synthetic-sparse, batch: {size: 12}}", "data.dataset=synthetic-sparse needs scipy"),
        ("topology={name: small-world, degree: 2}", "topology.name=small-world needs networkx"),
    ],
)
def test_a_small_peer_names_what_it_lacks(
    scenario: Path, setting: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_peer, "find_spec", lambda name: None)  # no SciPy
    with raises(ScenarioError, "small.needs-more") as refused:
        check_small(load_scenario(scenario, [setting]))
    assert named in str(refused.value)
    assert str(refused.value).endswith("leave --small out")


def test_a_small_scenario_is_taken(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_peer, "find_spec", lambda name: None)
    for settings in VARIANTS.values():
        check_small(load_scenario(scenario, [one.replace("HERE", str(scenario.parent)) for one in settings]))
