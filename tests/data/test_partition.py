"""Partitions: disjoint, sorted, reproducible, nobody empty, and each kind's own law."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from flower_privdec.common.catalogue import PARTITIONS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data import partition
from flower_privdec.data.partitions import _dirichlet
from flower_privdec.scenario.sections import PartitionSection

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
CASES: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.5}),
    ("shards", {"shards_per_peer": 2}),
    ("pathological", {"classes_per_peer": 3}),
    ("sizes", {"sizes": [100, 50, 30, 20, 10, 5, 1]}),
]


def divide(labels: np.ndarray, n_peers: int, kind: str, seed: int, **options: Any) -> list[np.ndarray]:
    return partition(labels, n_peers, PartitionSection(kind=kind, **options), seed)


def check_lawful(parts: list[np.ndarray], n_peers: int, total: int) -> None:
    """Check what holds for every kind: sorted int64, in range, disjoint, nobody empty."""
    assert len(parts) == n_peers
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < total
    for part in parts:
        assert len(part) > 0
        assert (np.diff(part) > 0).all()


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def refused(*needles: str, labels: np.ndarray = LABELS, n_peers: int = 7, kind: str, **options: Any) -> None:
    with pytest.raises(ScenarioError) as caught:
        divide(labels, n_peers, kind, 1, **options)
    text = str(caught.value)
    assert "\n" not in text
    for needle in needles:
        assert needle in text, f"{needle!r} is not in {text!r}"


def test_cases_are_all_kinds() -> None:
    assert [kind for kind, _ in CASES] == list(PARTITIONS)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_every_kind_is_lawful_and_keyed_by_the_seed(kind: str, options: dict[str, Any]) -> None:
    if kind not in ("iid", "sizes"):
        pytest.importorskip("flwr_datasets")
    parts = divide(LABELS, 7, kind, 1, **options)
    check_lawful(parts, 7, len(LABELS))
    assert same(parts, divide(LABELS, 7, kind, 1, **options))
    assert not same(parts, divide(LABELS, 7, kind, 2, **options))


@pytest.mark.usefixtures("label_partitions")
@pytest.mark.parametrize("kind", ["dirichlet", "shards", "pathological"])
def test_examples_of_a_class_are_dealt_at_random(kind: str) -> None:
    ordered = np.sort(LABELS)  # class 0 is rows 0..59
    parts = divide(ordered, 7, kind, 3, **dict(CASES)[kind])
    held = [part[ordered[part] == label] for part in parts for label in range(10)]
    assert sum(len(rows) > 1 and bool((np.diff(rows) > 1).any()) for rows in held) > 5


@given(total=st.integers(1, 400), n_peers=st.integers(1, 40), seed=st.integers(0, 2**63))
@settings(max_examples=30)
def test_iid_sizes_differ_by_one_at_most(total: int, n_peers: int, seed: int) -> None:
    if n_peers > total:
        refused(f"n_peers={n_peers}", labels=np.zeros(total, int), n_peers=n_peers, kind="iid")
        return
    parts = divide(np.zeros(total, int), n_peers, "iid", seed)
    check_lawful(parts, n_peers, total)
    counts = [len(part) for part in parts]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1


def test_iid_of_mnist_size_is_3750_each() -> None:
    assert {len(part) for part in divide(np.zeros(60_000, int), 16, "iid", 1)} == {3750}


@given(counts=st.lists(st.integers(1, 50), min_size=2, max_size=12), spare=st.integers(0, 30))
@settings(max_examples=20)
def test_counts_are_exact(counts: list[int], spare: int) -> None:
    labels = np.zeros(sum(counts) + spare, int)
    for sizes in (counts, [float(count) for count in counts]):
        parts = divide(labels, len(counts), "sizes", 1, sizes=sizes)
        check_lawful(parts, len(counts), len(labels))
        assert [len(part) for part in parts] == counts


@given(
    weights=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12),
    used=st.floats(0.5, 1.0),
    total=st.integers(1000, 2000),
)
@settings(max_examples=20)
def test_shares_are_exact_to_less_than_one_example(weights: list[float], used: float, total: int) -> None:
    shares = [used * weight / sum(weights) for weight in weights]
    parts = divide(np.zeros(total, int), len(shares), "sizes", 1, sizes=shares)
    check_lawful(parts, len(shares), total)
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - share * total) < 1 + 1e-4


def test_shares_that_sum_to_one_cover() -> None:
    parts = divide(LABELS, 3, "sizes", 1, sizes=[1 / 3, 1 / 3, 1 / 3])
    assert [len(part) for part in parts] == [200, 200, 200]
    assert [len(part) for part in divide(LABELS, 1, "sizes", 1, sizes=[1])] == [600]


@pytest.mark.usefixtures("label_partitions")
def test_dirichlet_covers_and_alpha_sets_the_skew() -> None:
    def skew(alpha: float) -> float:
        parts = divide(LABELS, 7, "dirichlet", 1, alpha=alpha)
        assert sum(len(part) for part in parts) == len(LABELS)
        shares = [np.bincount(LABELS[part], minlength=10) / len(part) for part in parts]
        return float(np.mean([share.max() for share in shares]))

    assert skew(1000.0) < 0.15
    assert skew(1000.0) < skew(1.0) < skew(0.1)


@pytest.mark.usefixtures("label_partitions")
def test_shards_are_equal_and_hold_few_classes() -> None:
    parts = divide(LABELS, 7, "shards", 1, shards_per_peer=2)
    assert {len(part) for part in parts} == {2 * (600 // 14)}  # a shard of 42 touches 2 classes of 60 at most
    assert max(len(np.unique(LABELS[part])) for part in parts) <= 4
    exact = divide(LABELS, 5, "shards", 1, shards_per_peer=2)  # 10 shards are the 10 classes
    assert sorted(len(part) for part in exact) == [120] * 5
    assert all(len(np.unique(LABELS[part])) == 2 for part in exact)


@pytest.mark.usefixtures("label_partitions")
@pytest.mark.parametrize("classes", [1, 2, 10])
def test_pathological_peers_hold_exactly_so_many_classes(classes: int) -> None:
    parts = divide(LABELS, 12, "pathological", 1, classes_per_peer=classes)
    assert {len(np.unique(LABELS[part])) for part in parts} == {classes}
    assert sum(len(part) for part in parts) == len(LABELS)  # with peers >= classes every class has a holder


@pytest.mark.usefixtures("label_partitions")
def test_pathological_leaves_out_an_undrawn_class() -> None:
    parts = divide(LABELS, 2, "pathological", 1, classes_per_peer=2)
    assert len(np.unique(LABELS[np.concatenate(parts)])) <= 4


@pytest.mark.slow
@pytest.mark.usefixtures("label_partitions")
@given(least=st.integers(1, 20), seed=st.integers(0, 2**40), alpha=st.sampled_from([0.02, 0.1, 1.0]))
@settings(max_examples=9)
def test_a_least_size_is_met_by_moving_few_examples(least: int, seed: int, alpha: float) -> None:
    """Nobody who drew enough gains, nobody gives away what takes it below another, and everything is assigned."""
    parts = divide(LABELS, 30, "dirichlet", seed, alpha=alpha, min_size=least)
    check_lawful(parts, 30, len(LABELS))
    assert sum(map(len, parts)) == len(LABELS)
    drawn = [np.sort(part) for part in _dirichlet(LABELS, 30, PartitionSection(kind="dirichlet", alpha=alpha), seed)]
    moved = 0
    most = max(map(len, parts))
    for before, after in zip(drawn, parts, strict=True):
        assert len(after) >= least
        kept = np.intersect1d(before, after)
        if len(before) < least:
            assert len(after) == least
            assert len(kept) == len(before)
            moved += least - len(before)
        else:
            assert len(kept) == len(after) >= min(len(before), most - 1)
    assert same(parts, drawn) == (moved == 0)
    assert same(parts, divide(LABELS, 30, "dirichlet", seed, alpha=alpha, min_size=least))


@pytest.mark.usefixtures("label_partitions")
def test_a_least_size_moves_nothing_where_all_hold_enough() -> None:
    wide = divide(LABELS, 7, "dirichlet", 1, alpha=100.0)
    assert same(wide, divide(LABELS, 7, "dirichlet", 1, alpha=100.0, min_size=40))


@pytest.mark.usefixtures("label_partitions")
def test_empty_peer_is_named() -> None:
    refused("leaves peer", "no example", "min_size, a larger alpha", n_peers=60, kind="dirichlet", alpha=0.01)
    refused("leaves peer 1", labels=np.arange(9), n_peers=2, kind="sizes", sizes=[0.5, 0.01])


WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dirichlet", {"alpha": 1.0, "min_size": 86}, ["min_size=86 must be 1 to 85"]),
    ("shards", {"shards_per_peer": 86}, ["shards_per_peer=86", "1 to 85"]),
    ("pathological", {"classes_per_peer": 11}, ["classes_per_peer=11", "1 to 10"]),
    ("sizes", {"sizes": [100] * 6}, ["7 numbers"]),
    ("sizes", {"sizes": [100] * 7}, ["at most 600"]),
    ("sizes", {"sizes": [0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]}, ["at most 1"]),
]


@pytest.mark.parametrize(("kind", "options", "needles"), WRONG)
def test_wrong_options_are_refused(kind: str, options: dict[str, Any], needles: list[str]) -> None:
    refused(*needles, kind=kind, **options)


@pytest.mark.usefixtures("label_partitions")
def test_a_class_too_small_for_its_holders_is_refused() -> None:
    labels = np.array([0] * 50 + [1])
    refused("4 peers", labels=labels, n_peers=4, kind="pathological", classes_per_peer=2)


def test_without_flwr_datasets_only_label_partitions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    for kind, options in CASES:
        if kind in ("iid", "sizes"):
            check_lawful(divide(LABELS, 7, kind, 1, **options), 7, len(LABELS))
        else:
            refused("flwr_datasets", "flower-privdec[simulation]", kind=kind, **options)


SCRIPT = """
import socket, sys
def refuse(*_): raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
import numpy as np
from flower_privdec.data import partition
from flower_privdec.scenario.sections import PartitionSection
labels = np.repeat(np.arange(10), 6000)
partition(labels, 16, PartitionSection(), 1)
lazy = {"torchvision", "sklearn", "flwr_datasets", "datasets", "PIL", "matplotlib"} & set(sys.modules)
assert not lazy, lazy
for kind, options in (("dirichlet", {"alpha": 1.0}), ("shards", {"shards_per_peer": 2})):
    partition(labels, 16, PartitionSection(kind=kind, **options), 1)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("label_partitions")
def test_label_partitions_use_no_network_and_print_nothing(tmp_path: Path) -> None:
    home, plots = (
        tmp_path / "home",
        tmp_path / "plots",
    )  # flwr-datasets imports matplotlib, which keeps a cache
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "MPLCONFIGDIR": str(plots),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "%|" not in done.stderr  # no progress bar
    assert list(home.rglob("*")) == []
