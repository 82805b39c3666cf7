"""Divide a training set among peers: disjoint index arrays, the same for the same seed.

`iid` and `sizes` are a keyed permutation cut into pieces. The partitions by label are flwr-datasets'
partitioners (the extra `simulation`), which see nothing but the labels, in memory.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from flower_privdec.catalogue import PARTITIONS
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.user_code import require
from flower_privdec.errors import ScenarioError
from flower_privdec.rows.keys import keyed_generator


def partition(labels: np.ndarray, n_peers: int, kind: str, seed: int, **options: Any) -> list[np.ndarray]:
    """Divide examples among peers.

    Args:
        labels: classes of the training examples, integers [N]; iid and sizes take targets of any kind, [N, ...].
        n_peers: number of peers.
        kind: a key of PARTITIONS.
        seed: the scenario's seed; the same seed gives the same partition.
        options: `alpha` > 0 for dirichlet, which also takes `min_size`; `shards_per_peer` for shards;
            `classes_per_peer` for pathological; `sizes` for sizes: whole counts, or shares of all examples when
            they sum to at most 1.

    Returns:
        For each peer the rows it holds, int64, sorted; none is held twice, no peer is empty. `iid`,
        `dirichlet` and `sizes` that sum to the whole hand out every example; `shards` leaves out fewer than
        n_peers · shards_per_peer, so that all shards are equal; `pathological` leaves out a class no peer
        drew.

    Raises:
        ScenarioError: an option is wrong, or a peer would hold nothing; the message has the remedy.

    Examples:
        >>> labels = np.repeat([0, 1, 2], 10)
        >>> [len(rows) for rows in partition(labels, 3, "sizes", 1, sizes=[0.5, 0.3, 0.2])]
        [15, 9, 6]
    """
    labels = np.asarray(labels)
    PARTITIONS.check(kind, "data.partition.kind")
    accepted = dict(list(inspect.signature(_KINDS[kind]).parameters.items())[3:])
    for key in options:
        if key not in accepted:
            hint = f"it takes {', '.join(accepted)}" if accepted else "it takes no options"
            raise ScenarioError(f"data.partition.{key} is no option of kind {kind}: {hint}")
    for key, parameter in accepted.items():
        if key not in options and parameter.default is parameter.empty:
            raise ScenarioError(f"data.partition.{key} is missing: kind {kind} needs it")
    if kind not in ("iid", "sizes") and (labels.ndim != 1 or labels.dtype.kind not in "ui"):
        raise ScenarioError(
            f"data.partition.kind={kind} deals out classes, and the task's targets are none: use iid or sizes"
        )
    if not 1 <= _whole("n_peers", n_peers) <= len(labels):
        raise ScenarioError(f"n_peers={n_peers} must be 1 to {len(labels)}, the number of training examples: lower it")
    parts = _KINDS[kind](labels, n_peers, seed, **options)
    if empty := [peer for peer, part in enumerate(parts) if len(part) == 0]:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        remedy = "larger sizes, more data or fewer peers"
        if kind == "dirichlet":
            remedy = "min_size, a larger alpha or fewer peers"
        raise ScenarioError(f"data.partition.kind={kind} leaves peer {empty[0]}{more} no example: use {remedy}")
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _shuffled(labels: np.ndarray, seed: int) -> np.ndarray:
    return keyed_generator(seed, "partition").permutation(len(labels))


def _sizes(labels: np.ndarray, n_peers: int, seed: int, sizes: Sequence[float]) -> list[np.ndarray]:
    """Divide by counts, or by shares of the whole; a share's count is exact to less than one example."""
    total = len(labels)
    numeric = isinstance(sizes, Sequence | np.ndarray) and all(_is_number(size) and size > 0 for size in sizes)
    if not numeric or len(sizes) != n_peers:
        raise ScenarioError(f"data.partition.sizes={shown(sizes)} must be {n_peers} numbers > 0, one for each peer")
    values = np.array(sizes, dtype=np.float64)
    if values.sum() <= 1 + 1e-9:
        ends = np.minimum(np.floor(np.cumsum(values) * total + 1e-6), total).astype(np.int64)
    elif values.sum() <= total and bool((values == np.rint(values)).all()):
        ends = np.cumsum(values.astype(np.int64))
    else:
        raise ScenarioError(
            f"data.partition.sizes={shown(list(sizes))} must be shares that sum to at most 1, or whole counts that "
            f"sum to at most {total}, the number of training examples"
        )
    return np.split(_shuffled(labels, seed)[: ends[-1]], ends[:-1])


def _dirichlet(
    labels: np.ndarray, n_peers: int, seed: int, alpha: float, min_size: int | None = None
) -> list[np.ndarray]:
    if not _is_number(alpha) or alpha <= 0:
        raise ScenarioError(f"data.partition.alpha={alpha} must be > 0: 100 is near iid, 0.1 is skewed")
    most = len(labels) // n_peers
    if min_size is not None and not 1 <= _whole("data.partition.min_size", min_size) <= most:
        raise ScenarioError(
            f"data.partition.min_size={min_size} must be 1 to {most}, what a peer gets on average: lower it"
        )
    parts = _by_flwr("DirichletPartitioner", labels, n_peers, seed, alpha=float(alpha), min_partition_size=0)
    if min_size is None:
        return parts
    # Flower's partitioner redraws until every peer holds enough, which may never happen. This keeps what the others
    # drew, and moves as few random examples as possible, each of the peer that then holds most.
    generator = keyed_generator(seed, "partition filled up")
    held = [generator.permutation(part).tolist() for part in parts]
    sizes = np.array([len(part) for part in held])
    for peer in np.flatnonzero(sizes < min_size).tolist():
        while sizes[peer] < min_size:
            giver = int(sizes.argmax())
            held[peer].append(held[giver].pop())
            sizes[peer], sizes[giver] = sizes[peer] + 1, sizes[giver] - 1
    return [np.array(part) for part in held]


def _shards(labels: np.ndarray, n_peers: int, seed: int, shards_per_peer: int) -> list[np.ndarray]:
    most = len(labels) // n_peers
    if not 1 <= _whole("data.partition.shards_per_peer", shards_per_peer) <= most:
        raise ScenarioError(
            f"data.partition.shards_per_peer={shards_per_peer} must be 1 to {most}, what a peer gets at most: change it"
        )
    return _by_flwr("ShardPartitioner", labels, n_peers, seed, num_shards_per_partition=int(shards_per_peer))


def _pathological(labels: np.ndarray, n_peers: int, seed: int, classes_per_peer: int) -> list[np.ndarray]:
    n_classes = len(np.unique(labels))
    if not 1 <= _whole("data.partition.classes_per_peer", classes_per_peer) <= n_classes:
        raise ScenarioError(
            f"data.partition.classes_per_peer={classes_per_peer} must be 1 to {n_classes}, the number "
            f"of classes: change it"
        )
    return _by_flwr(
        "PathologicalPartitioner",
        labels,
        n_peers,
        seed,
        num_classes_per_partition=int(classes_per_peer),
        class_assignment_mode="first-deterministic",
    )


def _by_flwr(name: str, labels: np.ndarray, n_peers: int, seed: int, **options: Any) -> list[np.ndarray]:
    """Run a flwr-datasets partitioner on the labels; a second column keeps the rows through its sorting."""
    purpose, remedy = "a partition by label", "pip install 'flower-privdec[simulation]', or use iid or sizes"
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
        "iid": lambda labels, n_peers, seed: np.array_split(_shuffled(labels, seed), n_peers),
        "dirichlet": _dirichlet,
        "shards": _shards,
        "pathological": _pathological,
        "sizes": _sizes,
    }
)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ScenarioError(f"{name}={value} must be a whole number")
    return int(value)
