"""Read the public test set, and the private training examples of some peers, divided among them.

    open_dataset     a dataset by its name or a user's own, nothing read yet
    read_public      the test set, and what it says of all examples: their shape, and how many classes there are
    read_examples    training examples: each peer's own file, or its part of one dataset (`partitions`)
    check_fit        whether the second fits the first

A process that hosts some peers reads the features of these peers only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.catalogue import DATASETS, Targets, fitting
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.user_code import is_given
from flower_privdec.data.arrays import some
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.intake import NOTHING, Intake, listed
from flower_privdec.data.own_sets import read_own
from flower_privdec.data.partitions import partition
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import Features, SparseRows, joined
from flower_privdec.scenario.sections import PEER, DataSection

if TYPE_CHECKING:
    from torch import Tensor


# The ledger's name of all data of a user's own: the same rows in another format, or from a renamed function, must not
# start at ε = 0.
OWN = "own"

MOST_NAMED = 20  # classes in an error


@dataclass(frozen=True, eq=False)
class PublicSet:
    """The public test set, and the form of all examples.

    Attributes:
        name: under which a ledger counts every part, order, format and file of it: its name in DATASETS, or
            `data.source` or `own` for data of a user's own.
        x: features, float32 [N, *input_shape], or compressed rows of them, or tokens, int64.
        y: classes, int64 [N], of 0..n_classes-1; or numbers or labels, float32 [N, n_classes].
        n_classes: how many classes there are, or how many numbers or labels an example has.
        n_tokens: tokens are 0..n_tokens-1; None if x holds features.
        validation: examples of the test set that are held out, in no test figure; None if there are none.
        intake: what was read of the whole test set, and what was left.
    """

    name: str
    x: Features
    y: Tensor
    n_classes: int
    n_tokens: int | None = None
    validation: PublicSet | None = None
    intake: Intake = NOTHING

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
        intakes: what was read of the one dataset or of each peer's own, and what was left; it never leaves the peer.
    """

    x: Features
    y: Tensor
    parts: tuple[np.ndarray, ...]
    intakes: tuple[Intake, ...] = ()

    @property
    def sizes(self) -> np.ndarray:
        """How many examples each peer has, int64 [m]."""
        return np.array([len(part) for part in self.parts], dtype=np.int64)


def open_dataset(section: DataSection, root: str | None, targets: Targets, key: str = "data.root") -> Source:
    """Return a dataset, to be read lazily.

    Args:
        section: names one of DATASETS, or a user's own function, see `read_own`.
        root: the folder with torchvision's layout, or the file; None for datasets that need none.
        targets: the kind of target that the task takes.
        key: the key of the scenario that gives the root.

    Raises:
        ScenarioError: the name, or the root, is wrong, or it has other targets or no tokens; with the remedy.
    """
    name = section.dataset
    if root is not None:
        root = os.path.expanduser(root)
    request = Request(section, root, targets, key)
    if not isinstance(name, str):
        own = read_own(name, request)
        _check_targets(own, targets, f"data.dataset.module={name.module!r}")
        return own

    DATASETS.check(name, "data.dataset")
    part: Any = DATASETS[name]
    source: Source = part().read(request)
    _check_targets(source, targets, f"data.dataset={name}")
    if section.vocabulary not in (None, source.n_tokens):
        raise ScenarioError(
            f"data.vocabulary is for tokens of your own, and {name} is known: remove it", code="data.vocabulary"
        )
    return source


def _check_targets(source: Source, targets: Targets, where: str) -> None:
    """Refuse a dataset whose targets the task's loss does not take."""
    if source.targets != targets:
        raise ScenarioError(
            f"{where} has {source.targets} and the task's loss takes {targets}: "
            f"set task.loss to one of {fitting(source.targets)}",
            code="data.targets",
        )


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
    key = "data.root"
    root = section.root
    if section.test is not None:
        key = "data.test"
        root = section.test
    source = open_dataset(section, root, targets, key)
    split = source.test()

    where = place_of(section, root, key, "test")
    n_classes = _n_classes(section, source, split, targets, where)

    name = name_of(section)
    rows, held = _tested(section, len(split.labels), seed, name)

    def part(rows: Rows, validation: PublicSet | None = None) -> PublicSet:
        x = split.read(rows)
        y = torch.from_numpy(split.labels[rows])
        return PublicSet(name, x, y, n_classes, source.n_tokens, validation, intake.shaped(x.shape))

    counted_classes = None
    if targets == "classes":
        counted_classes = n_classes
    intake = split.intake.of(where, split.labels, counted_classes)
    _check_nothing_is_empty([intake], section, where)

    validation = None
    if held is not None:
        validation = part(held)
    return part(rows, validation)


def place_of(section: DataSection, root: str | None, key: str = "data.root", half: str = "train") -> str:
    """Return what to call the place of half a dataset in a line."""
    if not isinstance(section.dataset, str):
        if is_given(section.dataset.module):
            return f"data.{half}"
        return f"data.dataset.module={section.dataset.module!r}"
    if root is None:
        return f"data.dataset={section.dataset}"
    return f"{key}={root}"


def _check_nothing_is_empty(intakes: Sequence[Intake], section: DataSection, where: str) -> None:
    """Refuse all peers' data, or the test set, if a class of the scenario has no example, or a column no value.

    One peer's own data may lack a class, or a column that `missing` allows it to lack.

    Raises:
        ScenarioError: it names them.
    """
    if section.labels is not None:
        lacking = [set(one.empty_classes()) for one in intakes]
        none = set.intersection(*lacking)
        if none:
            names = [name for name in section.labels if name in none]
            raise ScenarioError(
                f"{where} has no example of {listed(map(repr, names))}, which data.labels lists: add some, or take it "
                "out of data.labels at all peers",
                code="data.empty-class",
            )

    empty = set.intersection(*(set(one.empty) for one in intakes))
    if empty:
        raise ScenarioError(
            f"{where} has no value in column {listed(map(repr, sorted(empty)))}, which data.table names: add some, or "
            "take it out of data.table at all peers",
            code="data.empty-column",
        )


def _n_classes(section: DataSection, source: Source, split: Split, targets: Targets, where: str) -> int:
    """Return how many classes there are, or how many numbers or labels an example has.

    Args:
        source: the dataset.
        split: its test half.
        targets: the kind of target that the task takes.
        where: what to call it in an error.

    Raises:
        ScenarioError: the labels of the test set do not say how many, or are not of these classes.
    """
    if targets != "classes":
        if section.classes is not None:
            message = f"data.classes={section.classes} counts classes, and the task takes {targets}: remove it"
            raise ScenarioError(message, code="data.classes")
        return int(split.labels.shape[1])

    n_classes = section.classes or source.n_classes or 0
    if not n_classes:
        classes = np.unique(split.labels)
        n_classes = max(2, len(classes))
        if classes[-1] == 0 or not np.isin(classes, np.arange(n_classes)).all():
            remedy = "renumber them, or say how many classes there are by data.classes"
            if section.table is not None and len(classes) > 1:
                remedy = (
                    f"set data.labels={[str(label) for label in classes]}, with the classes that others have beside"
                )
            raise ScenarioError(
                f"{where}: the test set has labels {some(classes)}: they must be 0..C-1, none missing, C >= 2; "
                f"{remedy}",
                code="data.labels",
            )

    source_of_count = where
    if section.classes is not None:
        source_of_count = f"data.classes={section.classes}"
    _check_labels(split.labels, n_classes, f"{source_of_count}: the test set")
    return n_classes


def _tested(section: DataSection, total: int, seed: int, name: str) -> tuple[Rows, np.ndarray | None]:
    """Return which public test examples are for testing, and which are held out for validation; None if none are.

    Args:
        total: how many there are.
        name: what to call the dataset in an error.
    """
    rows = _chosen(total, section.test_samples, seed, "test_samples", name)
    count = section.validation
    if count is None:
        return rows, None

    room = total - (section.test_samples or 1)
    if count > room:
        tested = "one at least is"
        if section.test_samples:
            tested = f"data.test_samples={section.test_samples} are"
        most = "leaves no room"
        if room:
            most = f"must be at most {room}"
        raise ScenarioError(
            f"data.validation={count} {most}: {name} has {total} public test examples, of which {tested} for "
            "testing; take fewer of either",
            code="data.validation",
        )

    everything = np.arange(total)
    held = np.asarray(everything[_chosen(total, count, seed, "validation", name)])
    rest = np.setdiff1d(everything, held)
    return rest[_chosen(len(rest), section.test_samples, seed, "test_samples", name)], held


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

    If `data.root` contains {peer}, only these peers' own files are read. Otherwise one dataset is partitioned by its
    labels, and only these peers' features are read; with `whole` it is one peer's own, and nothing is partitioned.

    Args:
        section: the scenario's; `samples` and the partition are drawn by generators keyed by `seed`.
        n_peers: how many peers the whole network has.
        peers: global ids of those whose examples are read, ascending.
        root: where to read in place of the scenario's root.
        targets: the kind of target that the task takes.
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
    if root is None:
        root = section.root
    if section.each_its_own or whole:
        return _own_files(section, root or "", n_peers, peers, targets)

    split, chosen, parts = _dealt(section, seed, n_peers, root, targets)
    labels = split.labels[chosen]
    if len(peers) == n_peers:
        x = split.read(chosen)
        return Examples(x, torch.from_numpy(labels), tuple(parts), (split.intake.shaped(x.shape),))

    # Parts count the chosen examples; a split is read by the numbers of the rows in the whole file.
    own = [parts[peer] for peer in peers]
    rows = np.concatenate(own)
    rows_of_file = np.arange(len(split.labels))[chosen][rows]
    places = _consecutive([len(part) for part in own])
    x = split.read(rows_of_file)
    return Examples(x, torch.from_numpy(labels[rows]), places, (split.intake.shaped(x.shape),))


def _counted(split: Split, section: DataSection, root: str | None, targets: Targets) -> Split:
    """Return training examples whose intake has their numbers."""
    n_classes = None
    if targets == "classes":
        n_classes = len(section.labels or ()) or section.classes or 1
    intake = split.intake.of(place_of(section, root), split.labels, n_classes)
    return replace(split, intake=intake)


def _consecutive(sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the rows of parts that follow one another, by their sizes."""
    ends = np.cumsum([0, *sizes])
    return tuple(np.arange(start, stop) for start, stop in pairwise(ends))


def sizes_of_parts(
    section: DataSection, seed: int, n_peers: int, root: str | None = None, targets: Targets = "classes"
) -> np.ndarray:
    """Return how many examples of one dataset each peer gets, int64 [n_peers]; see `read_examples`.

    Of the training examples it reads the labels only.
    """
    _, _, parts = _dealt(section, seed, n_peers, root, targets)
    return np.array([len(part) for part in parts], dtype=np.int64)


def _dealt(
    section: DataSection, seed: int, n_peers: int, root: str | None, targets: Targets
) -> tuple[Split, Rows, list[np.ndarray]]:
    """Return the training examples of one dataset, their rows that are partitioned, and each peer's part of these."""
    if root is None:
        root = section.root
    split = _counted(open_dataset(section, root, targets).train(), section, root, targets)
    _check_nothing_is_empty([split.intake], section, split.intake.where)
    chosen = _chosen(len(split.labels), section.samples, seed, "samples", name_of(section))
    parts = partition(split.labels[chosen], n_peers, section.partition, seed)
    return split, chosen, parts


def training_place(root: str | None) -> str:
    """Return where training examples were read from, by the key that a user gave: of files, or of Python objects."""
    if root in (None, PEER):
        return "data.train"
    return f"data.root={root}"


def check_fit(examples: Examples, public: PublicSet, root: str | None) -> None:
    """Refuse training examples, read from a place, that do not fit the test set.

    Raises:
        ScenarioError: naming both shapes, or the label.
    """
    place = training_place(root)
    for what, own, test in (("examples", examples.x, public.x), ("targets", examples.y, public.y)):
        if own.shape[1:] != test.shape[1:]:
            remedy = "mend the data"
            if public.n_tokens is not None and what == "examples":
                remedy = "tokenize all by padding='max_length', truncation=True and one max_length"
            raise ScenarioError(
                f"{place} has training {what} of shape {list(own.shape[1:])} and test {what} of shape "
                f"{list(test.shape[1:])}: they must be equal; {remedy}",
                code="data.shapes",
            )
    _check_labels(examples.y.numpy(), public.n_classes, f"{place}: the training set")


def _own_files(
    section: DataSection, root: str, n_peers: int, peers: Sequence[int] | np.ndarray, targets: Targets
) -> Examples:
    """Read every peer's own file whole."""
    splits = []
    for peer in peers:
        own = root.replace(PEER, str(peer))
        splits.append(_counted(open_dataset(section, own, targets).train(), section, own, targets))

    labels = [split.labels for split in splits]
    features = [split.read(slice(None)) for split in splits]
    for kind, arrays in (("examples", features), ("targets", labels)):
        shapes = sorted({tuple(part.shape[1:]) for part in arrays})
        if len(shapes) > 1:
            raise ScenarioError(
                f"{training_place(root)} has {kind} of shapes {shapes}: all peers' must be alike; mend the files",
                code="data.shapes",
            )

    parts = _consecutive([len(part) for part in labels])
    intakes = tuple(split.intake.shaped(x.shape) for split, x in zip(splits, features, strict=True))
    if len(peers) == n_peers:
        _check_nothing_is_empty(intakes, section, training_place(root))
    return Examples(joined(features), torch.from_numpy(np.concatenate(labels)), parts, intakes)


def _chosen(total: int, count: int | None, seed: int, key: str, name: str) -> Rows:
    """Return which rows of a half are used: all, or a keyed random choice, ascending."""
    if count is None or count == total:
        return slice(None)
    if not 1 <= count <= total:
        raise ScenarioError(
            f"data.{key}={count} must be 1 to {total}, what {name} has: change it or leave it out", code="data.count"
        )
    generator = keyed_generator(seed, f"data.{key}")
    return np.sort(generator.choice(total, count, replace=False, shuffle=False))


def _check_labels(labels: np.ndarray, n_classes: int, what: str) -> None:
    if labels.ndim == 1 and labels.max() >= n_classes:
        raise ScenarioError(
            f"{what} has label {labels.max()}, and there are {n_classes} classes, 0 to {n_classes - 1}: "
            "mend the data, or data.classes",
            code="data.labels",
        )
