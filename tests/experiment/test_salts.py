"""Runs with code of a user's own: a salt in their keys, so that none shares its noise with any other run."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy
import torch
from flower_runs import run_under_flower
from raising import raises
from safetensors.torch import load_file
from salts import pin_salts
from tiny_scenario import Build, Tiny

import flower_privdec as fp
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.run_key import content_of, fingerprint
from flower_privdec.graph.topology import DirectedExponential
from flower_privdec.privacy.ledger.segments import verified
from flower_privdec.privacy.ledger.spending import releases_in
from flower_privdec.rows.sparse_rows import SparseRows

OWN = {
    "model": ["model={module: 'user_models:adapted'}"],
    "loss": ["task={loss: {module: 'user_tasks:cross_entropy'}}"],
    "algorithm": ["algorithm={module: 'user_parts:HeavyBall', learning_rate: 0.1}"],
    "noise": ["privacy={epsilon: 3.0, delta: 1e-3, noise: {module: 'own_noises:Same'}}"],
    "a graph that changes": ["topology={module: 'user_parts:changing'}"],
}
BY_CONTENT = {
    "data": ["data={dataset: {module: 'user_parts:blobs'}, batch: {size: 5}}"],
    "metric": ["task={metrics: [{module: 'user_tasks:nothing'}]}"],
    "a graph that stays": ["topology={module: 'user_parts:hub'}"],
}
MODEL = OWN["model"]
SHORT = ["data.samples=60", "data.test_samples=20", "data.batch.size=4", "evaluation.every=2"]


def keys_of(experiment: Experiment) -> set[bytes]:
    return set(experiment.own.keys.values())


# --- which runs have one ---


@pytest.mark.parametrize("kind", OWN)
def test_code_of_ones_own_shares_no_draw(build: Build, kind: str) -> None:
    one, again = build(*OWN[kind], "rounds=1"), build(*OWN[kind], "rounds=1")
    assert not keys_of(one) & keys_of(again)
    assert one.own.sampler.batch(0, [0]).index.tolist() != again.own.sampler.batch(0, [0]).index.tolist()


@pytest.mark.parametrize("kind", BY_CONTENT)
def test_content_keyed_parts_draw_the_same_again(build: Build, kind: str) -> None:
    few = ["rounds=1", "data.samples=60", "data.test_samples=20", "data.batch.size=4"]
    one, again = build(*few, *BY_CONTENT[kind]), build(*few, *BY_CONTENT[kind])
    assert keys_of(one) == keys_of(again)
    assert one.own.run == again.own.run


def test_without_seeded_noise_there_is_no_salt(build: Build) -> None:
    for settings in (["privacy=none"], ["compute={dtype: float64, generator: system}"]):
        own = build(*MODEL, "rounds=1", *settings).own
        assert own.unsalted is None
        assert own.with_salt("any") is own


# --- what the key holds in its place ---


FILES = {
    "graph": ("topology={{name: edge-list, file: {}, directed: false}}",),
    "graph of which edges are drawn": (
        "topology={{name: edge-list, file: {}, directed: false}}",
        "participation={{kind: edges, count: 2}}",
    ),
    "graph of secrets": (
        "privacy.noise={{kind: cancelling, colluding: 1, secrets: {{name: edge-list, file: {}, directed: false}}}}",
        "topology.name=ring",
        "topology.weights=metropolis",
    ),
}


@pytest.mark.parametrize("which", FILES)
def test_a_graph_is_in_the_key_by_its_edges(build: Build, tmp_path: Path, which: str) -> None:
    file, found = tmp_path / "graph.txt", []
    for text in ("0 1\n1 2\n2 3\n3 0\n", "3 0\n2 3 # again\n1 2\n0 1\n", "0 1\n1 2\n2 3\n3 0\n0 2\n1 3\n"):
        file.write_text(text)
        found.append(keys_of(build("rounds=1", *(setting.format(file) for setting in FILES[which]))))
    assert found[0] == found[1]
    assert not found[0] & found[2]


def test_own_graphs_of_another_kind_differ() -> None:
    ring = nx.cycle_graph(4, create_using=nx.DiGraph)
    shifts = [[1, 2], [2, 3], [3, 0], [0, 1]]  # all edges that the exponential graph ever has
    sections = {"privacy": {"epsilon": 3.0, "delta": 1e-3}, "name": "x", "n_peers": 4, "rounds": 1}
    sections |= {"data": {"dataset": "digits", "batch": {"size": 12}}, "model": {"name": "softmax"}}
    sections |= {"algorithm": {"name": "privsgp", "learning_rate": 0.5}}
    built = [
        Experiment.build(fp.make_scenario(sections, topology=graph))
        for graph in (ring, shifts, DirectedExponential(4), DirectedExponential(4))
    ]
    keys = [key for experiment in built for key in keys_of(experiment)]
    assert len(set(keys)) == len(keys)


def test_objects_are_told_apart_by_type_and_shape() -> None:
    ones = torch.ones(2, 2)
    y = torch.zeros(2, dtype=torch.int64)
    features = [ones, ones.reshape(2, 2, 1), ones.to(torch.float64), ones.to(torch.bfloat16), ones.to(torch.int64)]
    features += [SparseRows(scipy.sparse.csr_matrix(ones.numpy()))]
    prints = [fingerprint(x, y) for x in features] + [fingerprint(ones, y.to(torch.float32))]
    assert len(set(prints)) == len(prints)
    arrays = [np.ones(2), np.ones((2, 1)), np.ones(2, np.float32), np.ones(2, np.int64), np.ones(2, bool)]
    assert len({content_of([array]) for array in arrays}) == len(arrays)
    assert content_of([np.ones((2, 2))[:, :1]]) == content_of([np.ones((2, 1))])


# --- one run ---


def test_resumed_copies_of_a_folder_share_no_noise(tiny: Tiny, tmp_path: Path) -> None:
    """Code may read another file in each; with full batches and one noise the difference would be private sums."""
    scenario = tiny(*MODEL, *SHORT, f"privacy={{noise_multiplier: 2.0, delta: 1e-3, ledger: {tmp_path / 'ledger'}}}")
    stopped = run(Experiment.build(scenario), tmp_path / "run", on_metrics=lambda line: line["round"] == 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = (run(Experiment.build(scenario), tmp_path / folder, resume=True) for folder in ("run", "copy"))
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("run", "copy"))
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)

    spent = [summary["privacy"][0]["epsilon"] for summary in (stopped, one, other)]
    assert spent[0] < spent[1] < spent[2]
    steps = sum(
        release.steps
        for path in (tmp_path / "ledger").glob("*.jsonl")
        for _, entries in verified(path)
        for release in releases_in(entry for entry in entries if 0 in entry.charges[0].peers)
    )
    assert steps == 2 + 2 * (scenario.rounds - 2)


def test_a_resumed_run_costs_what_a_straight_one_does(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*MODEL, *SHORT)
    straight = run(Experiment.build(scenario), tmp_path / "straight")
    run(Experiment.build(scenario), tmp_path / "run", on_metrics=lambda line: line["round"] == 2)
    resumed = run(Experiment.build(scenario), tmp_path / "run", resume=True)
    epsilons = [[row["epsilon"] for row in summary["privacy"]] for summary in (straight, resumed)]
    assert epsilons[0] == pytest.approx(epsilons[1])


def runs_in(folder: Path) -> set[str]:
    return {entry.run.id for path in folder.glob("*.jsonl") for _, entries in verified(path) for entry in entries}


def test_an_experiment_run_twice_is_two_runs(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    privacy = f"privacy={{noise_multiplier: 2.0, delta: 1e-3, ledger: {tmp_path / 'ledger'}}}"
    experiment = Experiment.build(tiny(*MODEL, *SHORT, "rounds=2", privacy))
    with caplog.at_level(logging.WARNING):
        summaries = [run(experiment, tmp_path / folder) for folder in ("one", "two")]
    assert len(runs_in(tmp_path / "ledger")) == 2
    assert summaries[1]["privacy"][0]["epsilon"] > summaries[0]["privacy"][0]["epsilon"]
    note = summaries[0]["noise_note"]
    assert note.startswith("model.module='user_models:adapted'")
    assert caplog.messages.count(note) == 2
    assert "noise_note" not in run(Experiment.build(tiny(*SHORT, "rounds=2")), tmp_path / "built-in")


@pytest.mark.parametrize("host", ["relay", "sharded", "cohort"])
def test_all_nodes_of_a_simulation_have_one_salt(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """With one salt they are the engine's numbers, and with a salt that is drawn others."""
    scenario = tiny(*MODEL, *SHORT, "rounds=2")
    drawn = run_under_flower(scenario, tmp_path / "drawn", host)
    pin_salts(monkeypatch)
    pinned = run_under_flower(scenario, tmp_path / "pinned", host)
    run(Experiment.build(scenario), tmp_path / "engine")
    one, other, engine = (load_file(out / "model.safetensors") for out in (drawn, pinned, tmp_path / "engine"))
    for name, value in other.items():
        torch.testing.assert_close(value, engine[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.allclose(one[name], other[name]) for name in other)


def test_a_process_that_was_given_no_salt_is_refused(tiny: Tiny) -> None:
    agreement = Agreement.of(tiny(*MODEL))
    with raises(ScenarioError, "run.salt", "compute.generator=system"):
        OwnParts.of(agreement, np.arange(2))
    with raises(ScenarioError, "run.salt", "leave --insecure-seeds out"):
        OwnParts.of(agreement, np.arange(1), runtime="network")
    OwnParts.of(Agreement.of(tiny(*MODEL, "compute={dtype: float64, generator: system}")), np.arange(2))
    OwnParts.of(agreement, np.arange(1), b"a deployed peer's secret", runtime="network")
    halves = [OwnParts.of(agreement, np.arange(2) + first, salt="one") for first in (0, 2)]
    whole = OwnParts.of(agreement, salt="one")
    assert {**halves[0].keys, **halves[1].keys} == whole.keys


# --- kinds of what code may read ---

READING = {
    "at each call": "def loss(o, t):\n    return cross_entropy(o, t) * float(open(FILE).read())\n",
    "at import": "W = float(open(FILE).read())\ndef loss(o, t):\n    return cross_entropy(o, t) * W\n",
}


@pytest.mark.parametrize("when", READING)
def test_a_loss_that_reads_another_file_shares_no_noise(
    build: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Against the difference of two runs: with one noise it would show the private gradients."""
    monkeypatch.syspath_prepend(str(tmp_path))
    head = f"from torch.nn.functional import cross_entropy\nFILE = {str(tmp_path / 'factor')!r}\n"
    (tmp_path / "reading_loss.py").write_text(head + READING[when])
    noises = []
    for factor in ("1.0", "2.0"):
        (tmp_path / "factor").write_text(factor)
        sys.modules.pop("reading_loss", None)
        importlib.invalidate_caches()
        experiment = build("rounds=1", "task={loss: {module: 'reading_loss:loss'}}", "data.batch={sampling: full}")
        noises.append(experiment.own.keys[0])
    assert noises[0] != noises[1]
