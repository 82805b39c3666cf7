"""Read the public test set, and the private training examples of some peers, divided among them.

A partition is disjoint index arrays, the same for the same seed. `iid` and `sizes` are a keyed permutation cut into
pieces. The partitions by label are flwr-datasets' partitioners (the extra `simulation`), which see nothing but the
labels, in memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.catalogue import DATASETS, PARTITIONS, Targets, fitting
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.user_code import require
from flower_privdec.data.arrays import some
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.own_sets import read_own
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import Features, SparseRows, joined
from flower_privdec.scenario.sections import PEER, DataSection, PartitionSection


def partition(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    """Divide examples among peers.

    Args:
        labels: classes of the training examples, integers [N]; iid and sizes take targets of any kind, [N, ...].
        section: the kind and its options; `sizes` are whole counts, or shares of all examples when they sum to at
            most 1.
        seed: the scenario's seed; the same seed gives the same partition.

    Returns:
        For each peer the rows it holds, int64, sorted; none is held twice, no peer is empty. `iid`,
        `dirichlet` and `sizes` that sum to the whole hand out every example; `shards` leaves out fewer than
        n_peers · shards_per_peer, so that all shards are equal; `pathological` leaves out a class no peer
        drew.

    Raises:
        ScenarioError: an option does not fit the examples, or a peer would hold nothing; with the remedy.

    Examples:
        >>> labels, section = np.repeat([0, 1, 2], 10), PartitionSection(kind="sizes", sizes=[0.5, 0.3, 0.2])
        >>> [len(rows) for rows in partition(labels, 3, section, seed=1)]
        [15, 9, 6]
    """
    labels = np.asarray(labels)
    kind = section.kind
    if kind not in ("iid", "sizes") and (labels.ndim != 1 or labels.dtype.kind not in "ui"):
        raise ScenarioError(
            f"data.partition.kind={kind} partitions classes, and the task's targets are none: use iid or sizes",
            code="data.no-classes",
        )
    _check_most("n_peers", n_peers, len(labels), "the number of training examples: lower it")
    parts = _KINDS[kind](labels, n_peers, section, seed)
    if empty := [peer for peer, part in enumerate(parts) if len(part) == 0]:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        remedy = "larger sizes, more data or fewer peers"
        if kind == "dirichlet":
            remedy = "min_size, a larger alpha or fewer peers"
        raise ScenarioError(f"data.partition.kind={kind} leaves peer {empty[0]}{more} no example: use {remedy}")
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _shuffled(labels: np.ndarray, seed: int) -> np.ndarray:
    return keyed_generator(seed, "partition").permutation(len(labels))


def _sizes(labels: np.ndarray, n_peers: int, section: PartitionSection, seed: int) -> list[np.ndarray]:
    """Divide by counts, or by shares of the whole; a share's count is exact to less than one example."""
    total = len(labels)
    sizes = section.sizes or []
    if len(sizes) != n_peers:
        raise ScenarioError(f"data.partition.sizes={shown(sizes)} must be {n_peers} numbers > 0, one for each peer")
    values = np.array(sizes, dtype=np.float64)
    if values.sum() <= 1 + 1e-9:
        ends = np.minimum(np.floor(np.cumsum(values) * total + 1e-6), total).astype(np.int64)
    elif values.sum() <= total and bool((values == np.rint(values)).all()):
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
            sizes[peer], sizes[giver] = sizes[peer] + 1, sizes[giver] - 1
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
        "iid": lambda labels, n_peers, _, seed: np.array_split(_shuffled(labels, seed), n_peers),
        "dirichlet": _dirichlet,
        "shards": _shards,
        "pathological": _pathological,
        "sizes": _sizes,
    }
)


def _check_most(name: str, value: int, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise ScenarioError(f"{name}={value} must be 1 to {most}, {what}")


# The ledger's name of all data of a user's own: the same rows in another format, or from a renamed function, must not
# start at ε = 0.
OWN = "own"


@dataclass(frozen=True, eq=False)
class PublicSet:
    """The public test set, and the form of all examples.

    Attributes:
        name: its name in DATASETS, or of data of a user's own `data.source` or `own`, under which a ledger counts
            every part, order, format and file of it.
        x: features, float32 [N, *input_shape], or compressed rows of them, or tokens, int64.
        y: classes, int64 [N], of 0..n_classes-1; or numbers or labels, float32 [N, n_classes].
        n_classes: how many classes there are, or how many numbers or labels an example has.
        n_tokens: tokens are 0..n_tokens-1; None where x holds features.
        validation: examples of the test set that are in no test figure; None where none are held out.
    """

    name: str
    x: Features
    y: Tensor
    n_classes: int
    n_tokens: int | None = None
    validation: PublicSet | None = None

    @property
    def sparse(self) -> bool:
        """Whether examples are compressed rows."""
        return isinstance(self.x, SparseRows)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example's features."""
        return tuple(self.x.shape[1:])


@dataclass(frozen=True, eq=False)
class Examples:
    """The private training examples of some peers.

    Attributes:
        x: features, float32 [N, *input_shape], or compressed rows of them, or tokens, int64.
        y: classes, int64 [N]; or numbers or labels, float32 [N, k].
        parts: the rows of each of these peers, int64, none empty.
    """

    x: Features
    y: Tensor
    parts: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> np.ndarray:
        """How many examples each peer has, int64 [m]."""
        return np.array([len(part) for part in self.parts], dtype=np.int64)


def open_dataset(section: DataSection, root: str | None, targets: Targets, key: str = "data.root") -> Source:
    """Return a dataset, to be read lazily.

    Args:
        section: names one of DATASETS, or a user's own function, see `read_own`.
        root: the folder that torchvision's layout is in, or the .npz file; the embedded datasets need none.

    Raises:
        ScenarioError: the name, or the root, is wrong, or it has other targets or no tokens; with the remedy.
    """
    name = section.dataset
    request = Request(section, None if root is None else os.path.expanduser(root), targets, key)
    if not isinstance(name, str):
        return read_own(name, request)
    DATASETS.check(name, "data.dataset")
    part: Any = DATASETS[name]
    source: Source = part().read(request)
    if source.targets != targets:
        raise ScenarioError(
            f"data.dataset={name} has {source.targets} and the task's loss takes {targets}: "
            f"set task.loss to one of {fitting(source.targets)}",
            code="data.targets",
        )
    if section.vocabulary not in (None, source.n_tokens):
        raise ScenarioError(
            f"data.vocabulary is for tokens of your own, and {name} is known: remove it", code="data.vocabulary"
        )
    return source


def name_of(section: DataSection) -> str:
    """Return the name under which a ledger counts a dataset."""
    if isinstance(section.dataset, str) and not DATASETS[section.dataset].own_files:
        return section.dataset
    return section.source or OWN


def read_public(section: DataSection, seed: int, targets: Targets = "classes") -> PublicSet:
    """Read the public test set, and no training example.

    Args:
        section: the scenario's; `validation`, and `test_samples` of the rest, are chosen by generators keyed by `seed`.

    Returns:
        Features scaled by public constants only.

    Raises:
        ScenarioError: the name, a path or a number is wrong; the message has the remedy.
    """
    key, root = ("data.root", section.root) if section.test is None else ("data.test", section.test)
    source = open_dataset(section, root, targets, key)
    where = f"data.dataset={section.dataset}" if root is None else f"{key}={root}"
    if not isinstance(section.dataset, str):
        where = f"data.dataset.module={section.dataset.module!r}"
    split = source.test()
    if targets != "classes":
        n_classes = split.labels.shape[1]
        if section.classes is not None:
            message = f"data.classes={section.classes} counts classes, and the task takes {targets}: remove it"
            raise ScenarioError(message, code="data.classes")
    elif not (n_classes := section.classes or source.n_classes or 0):
        classes = np.unique(split.labels)
        n_classes = max(2, len(classes))
        if classes[-1] == 0 or not np.isin(classes, np.arange(n_classes)).all():
            raise ScenarioError(
                f"{where}: the test set has labels {some(classes)}: they must be 0..C-1, none missing, C >= 2; "
                "renumber them, or say how many classes there are by data.classes"
            )
    source_of_count = where if section.classes is None else f"data.classes={section.classes}"
    _check_labels(split.labels, n_classes, f"{source_of_count}: the test set")
    total = len(split.labels)
    count = section.validation
    name = name_of(section)
    rows = _chosen(total, section.test_samples, seed, "test_samples", name)
    held = None
    if count is not None:
        room = total - (section.test_samples or 1)
        if count > room:
            tested = f"data.test_samples={section.test_samples} are" if section.test_samples else "one at least is"
            most = f"must be at most {room}" if room else "leaves no room"
            raise ScenarioError(
                f"data.validation={count} {most}: {name} has {total} public test examples, of which {tested} for "
                "testing; take fewer of either",
                code="data.validation",
            )
        held = np.asarray(np.arange(total)[_chosen(total, count, seed, "validation", name)])
        rest = np.setdiff1d(np.arange(total), held)
        rows = rest[_chosen(len(rest), section.test_samples, seed, "test_samples", name)]

    def part(rows: Rows, validation: PublicSet | None = None) -> PublicSet:
        y = torch.from_numpy(split.labels[rows])
        return PublicSet(name, split.read(rows), y, n_classes, source.n_tokens, validation)

    return part(rows, None if held is None else part(held))


def read_examples(
    section: DataSection,
    seed: int,
    n_peers: int,
    peers: Sequence[int] | np.ndarray,
    root: str | None = None,
    targets: Targets = "classes",
    *,
    whole: bool = False,
) -> Examples:
    """Read the training examples of some peers.

    Where `data.root` contains {peer}, only these peers' own files are read. Otherwise one dataset is partitioned by its
    labels, and only these peers' features are read; with `whole` it is one peer's own, and nothing is partitioned.

    Args:
        section: the scenario's; `samples` and the partition are drawn by generators keyed by `seed`.
        peers: global ids, ascending.
        root: where to read in place of the scenario's root.
        whole: whether all examples at `root` are the one peer's.

    Raises:
        ScenarioError: the name, a path or a number is wrong; the message has the remedy.
    """
    named: Any = DATASETS[section.dataset] if isinstance(section.dataset, str) else None
    if whole and root is not None and named is not None and not named.reads_files:
        raise ScenarioError(
            f"data.dataset={section.dataset} reads no file, and {root} is given as this peer's own data: leave "
            "--data out, or take a dataset that reads files, such as npz",
            code="data.embedded",
        )
    root = section.root if root is None else root
    if section.each_its_own or whole:
        return _own_files(section, root or "", peers, targets)
    split, chosen, parts = _dealt(section, seed, n_peers, root, targets)
    labels = split.labels[chosen]
    if len(peers) == n_peers:
        return Examples(split.read(chosen), torch.from_numpy(labels), tuple(parts))
    own = [parts[peer] for peer in peers]
    rows = np.concatenate(own)
    places = tuple(np.arange(a, b) for a, b in pairwise(np.cumsum([0, *map(len, own)])))
    return Examples(split.read(np.arange(len(split.labels))[chosen][rows]), torch.from_numpy(labels[rows]), places)


def sizes_of_parts(
    section: DataSection, seed: int, n_peers: int, root: str | None = None, targets: Targets = "classes"
) -> np.ndarray:
    """Return how many examples of one dataset each peer gets, int64 [n_peers]; see `read_examples`.

    Of the training examples it reads the labels alone.
    """
    return np.array([len(part) for part in _dealt(section, seed, n_peers, root, targets)[2]], dtype=np.int64)


def _dealt(
    section: DataSection, seed: int, n_peers: int, root: str | None, targets: Targets
) -> tuple[Split, Rows, list[np.ndarray]]:
    """Return the training examples of one dataset, their rows that are partitioned, and each peer's part of these."""
    split = open_dataset(section, section.root if root is None else root, targets).train()
    chosen = _chosen(len(split.labels), section.samples, seed, "samples", name_of(section))
    return split, chosen, partition(split.labels[chosen], n_peers, section.partition, seed)


def check_fit(examples: Examples, public: PublicSet, root: str | None) -> None:
    """Refuse training examples, read from a place, that do not fit the test set.

    Raises:
        ScenarioError: naming both shapes, or the label.
    """
    place = "data.train" if root in (None, PEER) else f"data.root={root}"
    for what, own, test in (("examples", examples.x, public.x), ("targets", examples.y, public.y)):
        if own.shape[1:] != test.shape[1:]:
            raise ScenarioError(
                f"{place} has training {what} of shape {list(own.shape[1:])} and test {what} of shape "
                f"{list(test.shape[1:])}: they must be equal; mend the data",
                code="data.shapes",
            )
    _check_labels(examples.y.numpy(), public.n_classes, f"{place}: the training set")


def _own_files(section: DataSection, root: str, peers: Sequence[int] | np.ndarray, targets: Targets) -> Examples:
    """Read every peer's own file whole."""
    splits = [open_dataset(section, root.replace(PEER, str(peer)), targets).train() for peer in peers]
    ends = np.cumsum([0, *(len(split.labels) for split in splits)])
    features = [split.read(slice(None)) for split in splits]
    for kind, arrays in (("examples", features), ("targets", [split.labels for split in splits])):
        shapes = sorted({tuple(part.shape[1:]) for part in arrays})
        if len(shapes) > 1:
            raise ScenarioError(
                f"data.root={root} has {kind} of shapes {shapes}: all peers' must be alike; mend the files",
                code="data.shapes",
            )
    parts = tuple(np.arange(a, b) for a, b in pairwise(ends))
    return Examples(joined(features), torch.from_numpy(np.concatenate([split.labels for split in splits])), parts)


def _chosen(total: int, count: int | None, seed: int, key: str, name: str) -> Rows:
    """Return which rows of a half are used: all, or a keyed random choice."""
    if count is None or count == total:
        return slice(None)
    if not 1 <= count <= total:
        raise ScenarioError(
            f"data.{key}={count} must be 1 to {total}, what {name} has: change it or leave it out", code="data.count"
        )
    return np.sort(keyed_generator(seed, f"data.{key}").choice(total, count, replace=False, shuffle=False))


def _check_labels(labels: np.ndarray, n_classes: int, what: str) -> None:
    if labels.ndim == 1 and labels.max() >= n_classes:
        raise ScenarioError(
            f"{what} has label {labels.max()}, and there are {n_classes} classes, 0 to {n_classes - 1}: "
            "mend the data, or data.classes",
            code="data.labels",
        )
