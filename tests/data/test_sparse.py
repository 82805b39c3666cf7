"""Sparse examples: svmlight files of any kind, the kernel that touches only what they name, and what a run takes."""

from __future__ import annotations

import bz2
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from scipy import sparse
from tiny_scenario import Build
from torch import Tensor, nn

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data import svmlight_files
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.minimum import ConvexObjective, solve
from flower_privdec.gradients import build_kernel
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.console import plan_text
from flower_privdec.rows.sparse_rows import SparseRows

SYNTHETIC = [
    "data={dataset: synthetic-sparse, samples: 240, test_samples: 60, batch: {sampling: poisson, size: 6}}",
    "model={name: linear, bias: false}",
    "topology={name: complete}",
]
DDA = "algorithm={name: dp-dda, loss: hinge, regularizer: {kind: l2, weight: 1.0}, gamma: 0}"


@dataclass
class Packed:
    x: Tensor
    y: Tensor
    weight: Tensor


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(("loss", "outputs"), [("hinge", 1), ("logistic", 1), ("cross-entropy", 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_sparse_kernel_is_the_dense_one(
    bias: bool, loss: str, outputs: int, clip: float | None, divided: bool
) -> None:
    generator = np.random.default_rng(1)
    rows = SparseRows(sparse.random(12, 30, density=0.2, random_state=2, format="csr"))
    module = nn.Linear(30, outputs, bias=bias).double()
    dense, thin = (build_kernel(module, loss, [30], sparse=each) for each in (False, True))
    places = generator.integers(12, size=(3, 4))
    params, out = torch.from_numpy(generator.standard_normal((2, 3, dense.d)))
    y = torch.from_numpy(generator.integers(max(2, outputs), size=(3, 4)))
    weight, scale = torch.tensor([[1.0, 1, 0, 1]] * 3).double(), torch.tensor([1.0, -2.0, 0.5]).double()
    norm = None if clip is None else torch.full((3,), clip).double()
    divisor = torch.tensor([0.5, 1.0, 2.0]).double() if divided else None
    expected, found = out.clone(), out.clone()
    whole = rows.dense().double()[places.reshape(-1)].view(3, 4, 30)
    norms = dense.add_clipped_(expected, params, Packed(whole, y, weight), norm, scale, divisor)
    mine = thin.add_clipped_(found, params, Packed(rows.packed(places), y, weight), norm, scale, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine, norms, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(thin.logits(params, rows), dense.logits(params, rows.dense()), rtol=1e-12, atol=1e-12)
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).double()
    blends = [kernel.blended_logits(params, shares, x) for kernel, x in ((thin, rows), (dense, rows.dense()))]
    torch.testing.assert_close(*blends, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    rows = SparseRows(sparse.csr_matrix(np.array([[1e38, 0.0], [1.0, 1.0]], dtype=np.float32)))
    kernel = build_kernel(nn.Linear(2, 2), "cross-entropy", [2], sparse=True)
    batch = Packed(rows.packed(np.array([[0, 1]])), torch.tensor([[0, 1]]), torch.ones(1, 2))
    out = torch.zeros(1, 6)
    norms = kernel.add_clipped_(out, torch.full((1, 6), 1e30), batch, torch.ones(1), torch.ones(1))
    assert torch.isfinite(out).all()
    assert norms[0, 0] == 0
    assert float(out.norm()) <= 1


def test_sparse_data_refuse_models_beyond_a_linear_layer(build: Build) -> None:
    with raises(ScenarioError, "gradients.sparse"):
        build(*SYNTHETIC[:1], "model={name: mlp, hidden: [3]}")
    with raises(ScenarioError, "features.no-images", "scattering"):
        build(*SYNTHETIC, "features={kind: scattering}")


@pytest.mark.parametrize("algorithm", [DDA, "algorithm={name: privsgp, learning_rate: 0.5}"])
def test_the_laws_of_privacy_hold_for_sparse_examples(build: Build, algorithm: str) -> None:
    small = ["data.samples=48", "data.batch.size=4", "privacy.clip_norm=0.3", "rounds=3"]
    graph = "topology={name: directed-exponential}" if "privsgp" in algorithm else SYNTHETIC[2]
    experiment = build(*SYNTHETIC[:2], graph, algorithm, *small, "task={loss: hinge}")
    assert testing.assert_sensitivity(experiment, 3, *range(4)) > 0
    testing.assert_noise(experiment, 3)
    testing.assert_nothing_else_leaves(experiment)


def test_the_known_optimum_of_drawn_texts_is_optimal(build: Build) -> None:
    experiment = build(*SYNTHETIC, DDA, "privacy=none")
    objective = ConvexObjective.of(experiment, experiment.own)
    sign = 2.0 * objective.targets.numpy() - 1
    x = objective.features.T @ (objective.weights * sign)
    found = solve(objective)
    assert found.gap <= 1e-6
    assert objective.value(x) == pytest.approx(1 - float(x @ x) / 2, abs=1e-9)
    assert found.value - found.gap - 1e-9 <= objective.value(x) <= found.value + 1e-9


def test_dual_averaging_comes_near_the_known_optimum(build: Build, tmp_path: Path) -> None:
    settings = ["privacy=none", "rounds=300", "evaluation.every=300", "participation={kind: edges, count: 1}"]
    summary = run(build(*SYNTHETIC, DDA, *settings), tmp_path / "run")
    assert -1e-6 <= summary["suboptimality"] < 0.02
    assert summary["optimum"]["gap"] <= 1e-6


# --- files ---

LINES = b"# a comment\n+1 1:0.5 3:-2 # and another\n\n-1 2:1\n-1\n+1 3:4e-2\n"


def written(folder: Path, content: bytes, name: str = "train") -> str:
    path = folder / name
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.write(content)
    return str(path)


def of_file(build: Build, train: str, test: str, *more: str) -> Experiment:
    data = f"data={{dataset: svmlight, root: {train}, test: {test}, n_features: 4, batch: {{sampling: full}}}}"
    return build(data, "model={name: linear}", "task={loss: hinge}", "privacy=none", "n_peers=2", *more)


@pytest.mark.parametrize("name", ["train", "train.gz", "train.bz2"])
def test_a_file_is_read_plain_or_compressed(build: Build, tmp_path: Path, name: str) -> None:
    test = written(tmp_path, b"1 4:1\n-1 1:1\n", "test")
    experiment = of_file(build, written(tmp_path, LINES, name), test)
    x = experiment.own.examples.x
    assert isinstance(x, SparseRows)
    expected = [[0.5, 0, -2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0.04, 0]]
    np.testing.assert_array_equal(x.dense().numpy(), np.array(expected, dtype=np.float32))
    assert experiment.own.examples.y.tolist() == [1, 0, 0, 1]
    testing.run_rounds(experiment, 3)


@pytest.mark.parametrize(
    ("content", "code", "names"),
    [
        (b"1 1:1\n-1 2:x\n", "data.line", ":2: .*`label index:value ...`"),
        (b"1 1:1\n\n# c\n-1 3:1 2:1\n", "data.line", ":4: "),
        (b"1 1:1\n-1 0:1\n", "data.entry", ":2: has 0:1: .*data.n_features=4"),
        (b"1 1:1\n# c\n\n-1 5:1\n", "data.entry", ":4: has 5:1: "),
        (b"1 1:1\n-1 1000000000000000:1\n", "data.line", ":2: "),
        (b"1 1:1\n-1 99999999999999999999999:1\n", "data.line", ":2: "),
        (b"1 1:1\n-1 -2:1\n", "data.line", ":2: "),
        (b"1 1:1\n-1 2:nan\n", "data.entry", ":2: has 2:nan: "),
        (b"1 1:1\n-1 2:1e300\n", "data.entry", ":2: has 2:inf: "),
        (b"1 1:1\n\xff\xfe\n", "data.line", ":2: "),
        (b"1 1:1\nnan 2:1\n", "data.labels", r"float64 \[2\]"),
        (b"1 1:1\n-1 2:1\n2 2:1\n", "data.labels", r"-1, 1, 2: .*\+1"),
        (b"0 1:1\n1 2:1\n2 2:1\n", "data.labels", "training set has label 2, .* 2 classes"),
        (b"", "data.empty", ""),
        (b"\n# nothing\n", "data.empty", ""),
    ],
)
def test_a_wrong_file_is_refused_by_line(build: Build, tmp_path: Path, content: bytes, code: str, names: str) -> None:
    train, test = written(tmp_path, content), written(tmp_path, b"1 4:1\n-1 1:1\n", "test")
    with raises(ScenarioError, code, names) as refused:
        of_file(build, train, test)
    assert "\n" not in str(refused.value)


def test_a_truncated_or_endless_file_is_refused(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = written(tmp_path, b"1 4:1\n-1 1:1\n", "test")
    whole = Path(written(tmp_path, LINES * 500, "train.gz"))
    whole.write_bytes(whole.read_bytes()[:-20])
    with raises(ScenarioError, "data.unreadable", r"train\.gz"):
        of_file(build, str(whole), test)
    (tmp_path / "plain.bz2").write_bytes(b"1 1:1\n")
    with raises(ScenarioError, "data.unreadable", r"plain\.bz2"):
        of_file(build, str(tmp_path / "plain.bz2"), test)
    monkeypatch.setattr(svmlight_files, "LONGEST_LINE", 1 << 10)
    with raises(ScenarioError, "data.long-line", r"bomb\.gz:2: .*1,024 bytes"):
        of_file(build, written(tmp_path, b"1 1:1\n" + b" " * 4096, "bomb.gz"), test)
    monkeypatch.setattr(svmlight_files, "LOOK_EVERY", 1 << 12)
    monkeypatch.setattr(svmlight_files, "MEMORY_FACTOR", 1 << 40)
    with raises(ScenarioError, "memory.short", r"bomb\.gz"):
        of_file(build, written(tmp_path, b"1 1:1\n" * 4000, "bomb.gz"), test)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["data.n_features=null"], ("data.n-features", "n_features")),
        (["data.test=null"], ("data.no-test",)),
        (["data.dataset=digits"], ("data.n-features", "n_features")),
        (["data.root=nowhere"], ("data.no-file", "data.root=/.*/nowhere ")),
        (["data.n_features=16777217"], ("data.n-features", "16,777,216")),
        (["task={loss: mse}"], ("data.targets",)),
    ],
)
def test_a_scenario_that_does_not_say_enough_is_refused(
    build: Build, tmp_path: Path, settings: list[str], refusal: tuple[str, ...]
) -> None:
    train, test = written(tmp_path, LINES), written(tmp_path, b"1 4:1\n-1 1:1\n", "test")
    with raises(ScenarioError, *refusal):
        of_file(build, train, test, *settings)


def test_a_peer_may_have_a_file_of_its_own(build: Build, tmp_path: Path) -> None:
    written(tmp_path, b"1 1:1\n-1 2:1\n", "peer-0")
    written(tmp_path, b"1 3:1\n", "peer-1")
    experiment = of_file(build, f"'{tmp_path}/peer-{{peer}}'", written(tmp_path, b"1 4:1\n-1 1:1\n", "test"))
    assert [len(part) for part in experiment.own.examples.parts] == [2, 1]
    assert len(experiment.own.examples.x) == 3


def test_the_plan_says_what_sparse_examples_take(build: Build) -> None:
    plan = make_plan(build(*SYNTHETIC, DDA, "rounds=4"))
    assert plan["gradients"].startswith("sparse (one linear layer")
    d, n = 47236, 4
    assert plan["memory"]["data"] < 240 * 4 * d  # far from dense
    assert plan["memory"]["state"] == 4 * n * d * 8
    few = make_plan(build(*SYNTHETIC, DDA, "rounds=2", "n_peers=16", "participation={kind: edges, count: 1}"))
    assert few["memory"]["state"] == 3 * 16 * d * 8
    assert "memory" in plan_text(few, verbose=True)


def test_a_step_of_spent_peers_packs_no_rows(build: Build, tmp_path: Path) -> None:
    """Noise that cancels goes on after all budgets are spent, for what pairs share; no example is drawn then."""
    budget = "privacy={epsilon: 6, delta: 1.0e-3, noise_multiplier: 0.8, noise: {kind: cancelling, colluding: 0}}"
    experiment = build(*SYNTHETIC, budget, "data.batch.size=30", "rounds=12")
    summary = run(experiment, tmp_path)
    assert max(row["rounds_run"] for row in summary["privacy"]) < 12
    rows = SparseRows(sparse.csr_matrix(np.eye(3, dtype=np.float32)))
    assert rows.packed(np.zeros((0, 2), dtype=np.int64)).shape == (0, 2, 2, 1)
