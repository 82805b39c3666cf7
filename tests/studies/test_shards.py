"""Models tried on each peer's own labels, what a peer sends, and runs that are stopped because they diverge."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from raising import raises

from flower_privdec.algorithms.feddeper import growth
from flower_privdec.common.catalogue import METRIC_KINDS
from flower_privdec.common.errors import RunError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import evaluation
from flower_privdec.experiment.evaluation import evaluate, held_labels, try_on_shards
from flower_privdec.experiment.recorder import traffic
from flower_privdec.planner.warnings import network_warnings
from flower_privdec.reporting import plots
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.wording import own_labels, sent
from flower_privdec.studies.cells import expand
from flower_privdec.studies.spec import load_study, metric

DEPER = ["algorithm.name=feddeper", "algorithm.local_steps=3", "topology.name=server", "privacy=none"]
OWN_LABELS = ["data.partition={kind: pathological, classes_per_peer: 2}", "n_peers=5"]
HALF = "participation={kind: uniform, fraction: 0.5}"


def engine_after(experiment, rounds=3):
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine


def predictions(experiment, model):
    """Softmax regression as plain matrix products."""
    x = experiment.public.x.double().numpy().reshape(-1, 64)
    return (x @ model[:640].reshape(10, 64).T + model[640:]).argmax(1)


@pytest.mark.slow
@pytest.mark.usefixtures("label_partitions")
def test_shard_accuracy_uses_test_examples_with_peers_labels(build):
    experiment = build(*DEPER, *OWN_LABELS)
    rows = engine_after(experiment).state.rows
    found = evaluate(experiment, rows, 3, experiment.own)["personalized"]
    y, mean = experiment.public.y.numpy(), rows["x"].mean(0).numpy()
    own, common = [], []
    for peer, part in enumerate(experiment.own.examples.parts):
        labels = set(experiment.own.examples.y.numpy()[part].tolist())
        assert labels == set(np.flatnonzero(held_labels(experiment.own, 10)[peer]).tolist())
        mine = np.isin(y, list(labels))
        own.append((predictions(experiment, rows["personal"][peer].numpy()) == y)[mine].mean())
        common.append((predictions(experiment, mean) == y)[mine].mean())
    for name, values in (("personal_models", own), ("global_model", common)):
        assert found[name] == pytest.approx({"mean": np.mean(values), "min": min(values), "max": max(values)})
    assert len({round(value, 6) for value in own}) > 1
    assert "generalization" not in found


@pytest.mark.usefixtures("label_partitions")
def test_extra_labels_reach_from_shard_to_whole_test_set(build):
    experiment = build(*DEPER, *OWN_LABELS)
    rows = engine_after(experiment).state.rows
    found = evaluate(experiment, rows, 6, experiment.own)["personalized"]
    curve, common = (found["generalization"][name] for name in ("personal_models", "global_model"))
    assert list(curve) == [str(extra) for extra in range(9)]  # 2 labels of 10 are a peer's own
    assert curve["0"] == found["personal_models"]["mean"]
    y = experiment.public.y.numpy()
    whole = [(predictions(experiment, model.numpy()) == y).mean() for model in rows["personal"]]
    assert curve["8"] == pytest.approx(np.mean(whole))
    assert common["8"] == pytest.approx((predictions(experiment, rows["x"].mean(0).numpy()) == y).mean())
    again = evaluate(experiment, rows, 6, experiment.own)["personalized"]
    assert again == found


@pytest.mark.usefixtures("label_partitions")
def test_methods_without_personalized_models_try_the_mean_model(build):
    experiment = build(*DEPER, *OWN_LABELS, "algorithm={name: scaffold, learning_rate: 0.5, local_steps: 2}")
    found = evaluate(experiment, engine_after(experiment).state.rows, 6, experiment.own)
    assert list(found["personalized"]) == ["global_model"]
    other = build("privacy=none")
    assert "personalized" not in evaluate(other, engine_after(other).state.rows, 6, other.own)


@pytest.mark.usefixtures("label_partitions")
def test_a_peer_without_test_examples_is_left_out(build):
    experiment = build(*DEPER, *OWN_LABELS)
    experiment.public.y[:] = int(experiment.own.examples.y[experiment.own.examples.parts[0][0]])
    rows = engine_after(experiment).state.rows
    right = torch.ones(100, dtype=torch.bool)
    found = try_on_shards(experiment, experiment.own, rows, right, last=False)
    assert found["global_model"] == {"mean": 1.0, "min": 1.0, "max": 1.0}


def test_one_model_shared_by_all_is_tried_once(build, monkeypatch):
    experiment = build(*DEPER, HALF, "algorithm={name: fedavg, learning_rate: 0.5}")
    rows = engine_after(experiment).state.rows
    tried = []
    logits = type(experiment.kernel).logits
    monkeypatch.setattr(
        type(experiment.kernel), "logits", lambda self, p, x: tried.append(len(x)) or logits(self, p, x)
    )
    found = evaluate(experiment, rows, 3)["accuracy"]
    assert tried == [100, 100]
    assert found["peer_min"] == found["peer_max"] == found["mean_model"]


@pytest.mark.parametrize("at_once", [1, 100 * 10 * 8, 2**26])
def test_every_peer_s_accuracy_is_its_own(build, monkeypatch, at_once):
    monkeypatch.setattr(evaluation, "OUTPUT_BYTES", at_once)
    experiment = build("algorithm={name: local, learning_rate: 0.5}", "privacy=none")
    rows, x, labels = engine_after(experiment).state.rows, experiment.public.x, experiment.public.y
    found = evaluate(experiment, rows, 3)["accuracy"]
    weights, biases = rows["x"].split([640, 10], dim=1)
    outputs = torch.einsum("nf,mof->mno", x.flatten(1).double(), weights.view(4, 10, 64)) + biases[:, None]
    expected = (outputs.argmax(-1) == labels).double().mean(1)
    assert len(set(expected.tolist())) > 1
    assert found["peer_mean"] == pytest.approx(float(expected.mean()))
    assert (found["peer_min"], found["peer_max"]) == (float(expected.min()), float(expected.max()))


@pytest.mark.parametrize(("name", "vectors"), [("fedavg", 1), ("fedprox", 1), ("scaffold", 2), ("feddeper", 1)])
def test_the_summary_counts_what_a_peer_sends(build, name, vectors):
    experiment = build(*DEPER[2:], f"algorithm.name={name}")
    rows = experiment.initial_state(experiment.cohort()).rows
    assert traffic(experiment.algorithm, rows) == {"vectors": vectors, "bytes": vectors * 650 * 8}


@pytest.mark.usefixtures("label_partitions", "pictures")
def test_a_run_leaves_metrics_summary_and_plots(build, tmp_path):
    experiment = build(*DEPER, *OWN_LABELS, HALF)
    summary = run(experiment, tmp_path / "run")
    plots.save_run_plots(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["personalized"]["personal_models"]["mean"] >= 0 for line in lines)
    assert [("generalization" in line["personalized"]) for line in lines] == [False, False, True]
    assert summary["personalized"] == lines[-1]["personalized"]
    assert summary["traffic"] == {"vectors": 1, "bytes": 5200}
    assert {"personalized.png", "own-labels.png", "generalization.png"} <= {
        path.name for path in (tmp_path / "run" / "plots").iterdir()
    }
    assert own_labels(summary).startswith("personalized models ")
    assert sent(summary) == "1 vector (5.08 KiB) a round from an active peer to each receiver"
    active = sum(int(experiment.participation.active(k).sum()) for k in range(6))
    assert sum(row["rounds_run"] for row in summary["privacy"]) == active
    seconds = 3 * active / summary["peer_steps_per_second"]
    assert seconds == pytest.approx(summary["wall_seconds"], abs=6e-4)  # which is rounded to 1 ms


def test_pictures_are_drawn_if_there_is_data():
    with drawing():
        assert plots.draw_generalization({"round": 3}) is None
        tried = {"personal_models": {"0": 0.9, "1": 0.5}, "global_model": {"0": 0.7, "1": 0.6}}
        figure = plots.draw_generalization({"personalized": {"generalization": tried}})
    assert figure.axes[0].get_lines()[0].get_ydata() == pytest.approx([90, 50])


def test_a_diverging_run_or_personal_model_is_stopped(build, monkeypatch):
    experiment = build(*DEPER)
    rows = engine_after(experiment).state.rows
    with raises(RunError, "run.diverged", "round 3"):
        evaluate(experiment, rows | {"x": rows["x"] * 1e9}, 3)
    wrong = rows["x"].clone()
    wrong[:, -1] += 500  # the last class's bias: every guess is the same, and sure of itself
    with raises(RunError, "run.diverged", "round 3"):
        evaluate(experiment, rows | {"x": wrong}, 3)
    monkeypatch.setattr(type(experiment.algorithm), "weights", None)  # as of local, whose mean model is nobody's
    assert evaluate(experiment, rows | {"x": wrong}, 3)["accuracy"]["mean_model"] <= 0.2
    personal = rows["personal"].clone()
    personal[2, 5] = float("inf")
    with raises(RunError, "run.diverged", "peer 2"):
        evaluate(experiment, rows | {"personal": personal}, 3, experiment.own)


def deper(build, peers, fraction, *settings):
    return build(
        *DEPER, f"n_peers={peers}", f"participation={{kind: uniform, fraction: {fraction}}}", "rounds=500", *settings
    )


@pytest.mark.parametrize(
    ("peers", "fraction", "rho", "warned"),
    [(100, 0.05, 0.03, True), (100, 0.05, 0.003, False), (10, 0.5, 0.03, False)],
)
def test_only_the_papers_diverging_settings_are_warned_of(build, peers, fraction, rho, warned):
    settings = ["algorithm.local_steps=10", f"algorithm.rho={rho}", "data.samples=1000", "data.batch.size=4"]
    _, *warnings = network_warnings(deper(build, peers, fraction, *settings), None)  # the first is of participation
    assert bool(warnings) == warned
    if warned:
        assert "1.23 a round" in warnings[0]
        assert "rho=0.03" in warnings[0]


def test_others_and_graphs_are_not_warned_of(build):
    settings = ["algorithm.local_steps=10", "algorithm.rho=0.03", "data.samples=1000", "data.batch.size=4"]
    graph = deper(build, 100, 0.05, *settings, "topology.name=directed-exponential")
    assert "5 of 100 peers are active" in "".join(network_warnings(graph, None))
    assert len(network_warnings(graph, None)) == 1
    assert not network_warnings(build(), None)


@pytest.mark.parametrize("graph", ["server", "directed-exponential-full"])
def test_growth_is_what_the_personalized_models_do_without_gradients(build, graph):
    """Averaged over who is active, the mean deviation v - x grows by the factor, with no gradient to damp it."""
    experiment = deper(build, 10, 0.3, "algorithm.learning_rate=1e-300", "algorithm.rho=0.2", f"topology.name={graph}")
    engine = engine_after(experiment, 0)
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(10, 650)))
    start = experiment.initial + noise
    ratios = []
    for k in range(200):
        engine.state.round_index, engine.state.rows = k, experiment.algorithm.initial(engine.cohort)
        engine.state.rows["personal"] = start.clone()
        engine.round()
        rows = engine.state.rows
        after = rows["personal"].mean(0) - experiment.algorithm.network_mean(rows)
        ratios.append(float(after @ noise.mean(0) / noise.mean(0).square().sum()))
    expected = growth(0.2, 3, experiment.algorithm.mixing_rate, 0.3, server=graph == "server")
    assert np.mean(ratios) == pytest.approx(expected, abs=4 * np.std(ratios) / 200**0.5)
    assert abs(expected - 1) > 0.05


def test_a_study_can_take_best_or_late_accuracy():
    values, kinds = [0.1, 0.9, 0.5, 0.6, 0.7, 0.8, 0.6, 0.7, 0.6, 0.8], {"accuracy": METRIC_KINDS["accuracy"]}
    assert metric("accuracy", kinds).over(values) == 0.8
    assert metric("best-accuracy", kinds).over(values) == 0.9
    assert metric("late-accuracy", kinds).over(values) == pytest.approx(0.7)
    assert metric("personalized.personal_models.mean", kinds).share
    line = {"personalized": {"personal_models": {"mean": 0.4}}}
    assert metric("personalized.personal_models.mean", kinds).read(line, "feddeper") == 0.4


def test_the_feddeper_study_is_complete_in_both_sizes():
    study, base = load_study("feddeper")
    for size in ("laptop", "paper"):
        cells = expand(study, base, size, study.parts)
        assert {cell.part for cell in cells} == {part.name for part in study.parts}
        assert min(Counter((cell.part, cell.labels) for cell in cells).values()) >= 3  # seeds
