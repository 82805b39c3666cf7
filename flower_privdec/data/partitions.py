"""Divide the training examples of one dataset among peers.

A partition is disjoint index arrays, the same for the same seed. `iid` and `sizes` are a keyed permutation cut into
pieces. The partitions by label are flwr-datasets' partitioners (the extra `simulation`), which see nothing but the
labels, in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from flower_privdec.common.catalogue import PARTITIONS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.user_code import require
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario.sections import PartitionSection


def partition(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    """Divide examples among peers.

    Args:
        labels: classes of the training examples, integers [N]; iid and sizes take targets of any kind, [N, ...].
        section: the kind and its options; `sizes` are whole counts, or shares of all examples if they sum to at most 1.
        seed: the scenario's seed; the same seed gives the same partition.

    Returns:
        For each peer the rows it holds, int64, sorted; none is held twice, no peer is empty. `iid`, `dirichlet` and
        `sizes` that sum to the whole hand out every example; `shards` leaves out fewer than
        n_peers · shards_per_peer, so that all shards are equal; `pathological` leaves out a class no peer drew.

    Raises:
        ScenarioError: an option does not fit the examples, or a peer would hold nothing; with the remedy.

    Examples:
        >>> labels, section = np.repeat([0, 1, 2], 10), PartitionSection(kind="sizes", sizes=[0.5, 0.3, 0.2])
        >>> [len(rows) for rows in partition(labels, 3, section, seed=1)]
        [15, 9, 6]
    """
    labels = np.asarray(labels)
    kind = section.kind
    is_classes = labels.ndim == 1 and labels.dtype.kind in "ui"
    if kind not in ("iid", "sizes") and not is_classes:
        raise ScenarioError(
            f"data.partition.kind={kind} partitions classes, and the task's targets are none: use iid or sizes",
            code="data.no-classes",
        )
    _check_most("n_peers", n_peers, len(labels), "the number of training examples: lower it")

    parts = _KINDS[kind](labels, n_peers, section, seed)
    empty = [peer for peer, part in enumerate(parts) if len(part) == 0]
    if empty:
        more = ""
        if len(empty) > 1:
            more = f" (and {len(empty) - 1} more)"
        remedy = "larger sizes, more data or fewer peers"
        if kind == "dirichlet":
            remedy = "min_size, a larger alpha or fewer peers"
        raise ScenarioError(f"data.partition.kind={kind} leaves peer {empty[0]}{more} no example: use {remedy}")
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _shuffled(labels: np.ndarray, seed: int) -> np.ndarray:
    return keyed_generator(seed, "partition").permutation(len(labels))


def _iid(labels: np.ndarray, n_peers: int, _section: PartitionSection, seed: int) -> list[np.ndarray]:
    return np.array_split(_shuffled(labels, seed), n_peers)


def _sizes(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    """Divide by counts, or by shares of the whole; a share's count is exact to less than one example."""
    total = len(labels)
    sizes = section.sizes or []
    if len(sizes) != n_peers:
        raise ScenarioError(f"data.partition.sizes={shown(sizes)} must be {n_peers} numbers > 0, one for each peer")

    values = np.array(sizes, dtype=np.float64)
    are_shares = values.sum() <= 1 + 1e-9
    are_counts = values.sum() <= total and bool((values == np.rint(values)).all())
    if are_shares:
        # Ends are rounded rather than counts, so roundings do not add up. 1e-6: a sum of shares may be a hair below
        # the whole number it stands for.
        ends = np.minimum(np.floor(np.cumsum(values) * total + 1e-6), total).astype(np.int64)
    elif are_counts:
        ends = np.cumsum(values.astype(np.int64))
    else:
        raise ScenarioError(
            f"data.partition.sizes={shown(sizes)} must be shares that sum to at most 1, or whole counts that "
            f"sum to at most {total}, the number of training examples"
        )
    return np.split(_shuffled(labels, seed)[: ends[-1]], ends[:-1])


def _dirichlet(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    least = section.min_size
    if least is not None:
        _check_most("data.partition.min_size", least, len(labels) // n_peers, "what a peer gets on average: lower it")

    parts = _by_flwr("DirichletPartitioner", labels, n_peers, seed, alpha=section.alpha, min_partition_size=0)
    if least is None:
        return parts

    # Flower's partitioner redraws until every peer holds enough, which may never happen. This keeps what the others
    # drew, and moves as few random examples as possible, each of the peer that then holds most.
    generator = keyed_generator(seed, "partition filled up")
    held = [generator.permutation(part).tolist() for part in parts]
    sizes = np.array([len(part) for part in held])
    for peer in np.flatnonzero(sizes < least).tolist():
        while sizes[peer] < least:
            giver = int(sizes.argmax())
            held[peer].append(held[giver].pop())
            sizes[peer] += 1
            sizes[giver] -= 1
    return [np.array(part) for part in held]


def _shards(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    shards = section.shards_per_peer or 1
    most = len(labels) // n_peers
    _check_most("data.partition.shards_per_peer", shards, most, "what a peer gets at most: change it")
    return _by_flwr("ShardPartitioner", labels, n_peers, seed, num_shards_per_partition=shards)


def _pathological(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    classes = section.classes_per_peer or 1
    most = len(np.unique(labels))
    _check_most("data.partition.classes_per_peer", classes, most, "the number of classes: change it")
    options = {"num_classes_per_partition": classes, "class_assignment_mode": "first-deterministic"}
    return _by_flwr("PathologicalPartitioner", labels, n_peers, seed, **options)


def _by_flwr(name: str, labels: np.ndarray, n_peers: int, seed: int, **options: Any) -> list[np.ndarray]:
    """Run a flwr-datasets partitioner on the labels; a second column keeps the rows through its sorting."""
    purpose = "a partition by label"
    remedy = "pip install 'flower-privdec[simulation]', or use iid or sizes"
    partitioners = require("flwr_datasets.partitioner", purpose, remedy)
    hf = require("datasets", purpose, remedy)

    partitioner = getattr(partitioners, name)(
        num_partitions=int(n_peers),
        partition_by="label",
        shuffle=False,
        seed=int(keyed_generator(seed, "partition").integers(2**62)),
        **options,
    )
    order = _shuffled(labels, seed)  # the partitioners cut each class in the order given
    columns = {"label": labels[order].astype(np.int64), "row": order}
    partitioner.dataset = hf.Dataset.from_dict(columns).with_format("arrow")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class that no peer drew (see `partition`), pyarrow's renamings
            return [np.asarray(partitioner.load_partition(peer)[:]["row"]) for peer in range(n_peers)]
    except ValueError as error:
        raise ScenarioError(
            f"data.partition cannot be made for {n_peers} peers: {one_line(error)}; use fewer"
        ) from error


_KINDS: dict[str, Callable[..., list[np.ndarray]]] = PARTITIONS.bind(
    {
        "iid": _iid,
        "dirichlet": _dirichlet,
        "shards": _shards,
        "pathological": _pathological,
        "sizes": _sizes,
    }
)


def _check_most(name: str, value: int, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise ScenarioError(f"{name}={value} must be 1 to {most}, {what}")
