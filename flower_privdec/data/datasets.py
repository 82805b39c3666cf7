"""Read the public test set, and the private training examples of some peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from flower_privdec.catalogue import DATASETS
from flower_privdec.data import readers
from flower_privdec.data.partition import partition
from flower_privdec.data.readers import Rows, Source, Wanted, read_npz, read_own, read_svmlight, some
from flower_privdec.data.sparse_rows import Features, SparseRows, joined
from flower_privdec.errors import ScenarioError
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario.sections import PEER, DataSection
from flower_privdec.tasks.kinds import Targets, fitting

_READERS: dict[str, Callable[[str | None, Wanted], Source]] = DATASETS.bind(
    {
        "digits": readers.read_digits,
        "breast-cancer": readers.read_breast_cancer,
        "mnist": partial(readers.read_images, "MNIST"),
        "fashion-mnist": partial(readers.read_images, "FashionMNIST"),
        "cifar10": partial(readers.read_images, "CIFAR10"),
        "diabetes": readers.read_diabetes,
        "synthetic-labels": readers.read_synthetic_labels,
        "synthetic-words": readers.read_synthetic_words,
        "synthetic-sparse": readers.read_synthetic_sparse,
        "npz": read_npz,
        "svmlight": read_svmlight,
    }
)
OWN = "own"  # the ledger's name of all data of users' functions: a renamed function must not start at ε = 0


@dataclass(frozen=True, eq=False)
class PublicSet:
    """The public test set, and the form of all examples.

    Attributes:
        name: its name in DATASETS, `data.source`, or `own`, under which a ledger counts every part, order and file of
            it.
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
        targets: what the task's loss takes.
        key: of the scenario, that gives `root`.

    Raises:
        ScenarioError: the name, or the root, is wrong, or it has other targets or no tokens; with the remedy.
    """
    name, requested = section.dataset, Wanted(targets, section.vocabulary, key, section.n_features)
    if not isinstance(name, str):
        return read_own(name.module, root, name.arguments, requested)
    DATASETS.check(name, "data.dataset")
    source = _READERS[name](root, requested)
    if source.targets != targets:
        raise ScenarioError(
            f"data.dataset={name} has {source.targets} and the task's loss takes {targets}: "
            f"set task.loss to one of {fitting(source.targets)}"
        )
    if section.vocabulary not in (None, source.n_tokens):
        raise ScenarioError(f"data.vocabulary is for tokens of your own, and {name} is known: remove it")
    return source


def name_of(section: DataSection) -> str:
    """Return the name under which a ledger counts a dataset."""
    return section.dataset if isinstance(section.dataset, str) else section.source or OWN


def read_public(section: DataSection, seed: int, targets: Targets = "classes") -> PublicSet:
    """Read the public test set, and no training example.

    Args:
        section: the scenario's; `validation`, and `test_samples` of the rest, are chosen by generators keyed by `seed`.
        seed: the scenario's seed.
        targets: what the task's loss takes.

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
            raise ScenarioError(message)
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
    held, rows = _held_out(len(split.labels), section, seed)

    def part(rows: Rows, validation: PublicSet | None = None) -> PublicSet:
        y = torch.from_numpy(split.labels[rows])
        return PublicSet(name_of(section), split.read(rows), y, n_classes, source.n_tokens, validation)

    return part(rows, None if held is None else part(held))


def read_examples(
    section: DataSection,
    seed: int,
    n_peers: int,
    peers: Sequence[int] | np.ndarray,
    root: str | None = None,
    targets: Targets = "classes",
) -> Examples:
    """Read the training examples of some peers.

    Where `data.root` contains {peer}, only these peers' own files are read. Otherwise one dataset is partitioned by its
    labels, and only these peers' features are read.

    Args:
        section: the scenario's; `samples` and the partition are drawn by generators keyed by `seed`.
        seed: the scenario's seed.
        n_peers: of the whole network.
        peers: global ids, ascending.
        root: where to read in place of the scenario's root.
        targets: what the task's loss takes.

    Raises:
        ScenarioError: the name, a path or a number is wrong; the message has the remedy.
    """
    root = section.root if root is None else root
    if section.each_its_own:
        return _own_files(section, root or "", peers, targets)
    split = open_dataset(section, root, targets).train()
    chosen = _chosen(len(split.labels), section.samples, seed, "samples", name_of(section))
    labels, options = split.labels[chosen], section.partition.model_dump(exclude={"kind"}, exclude_none=True)
    parts = partition(labels, n_peers, section.partition.kind, seed, **options)
    if len(peers) == n_peers:
        return Examples(split.read(chosen), torch.from_numpy(labels), tuple(parts))
    own = [parts[peer] for peer in peers]
    rows = np.concatenate(own)
    places = tuple(np.arange(a, b) for a, b in pairwise(np.cumsum([0, *map(len, own)])))
    return Examples(split.read(np.arange(len(split.labels))[chosen][rows]), torch.from_numpy(labels[rows]), places)


def check_fit(examples: Examples, public: PublicSet, root: str | None) -> None:
    """Refuse training examples, read from a place, that do not fit the test set.

    Raises:
        ScenarioError: naming both shapes, or the label.
    """
    for what, own, test in (("examples", examples.x, public.x), ("targets", examples.y, public.y)):
        if own.shape[1:] != test.shape[1:]:
            raise ScenarioError(
                f"data.root={root} has training {what} of shape {list(own.shape[1:])} and test {what} of shape "
                f"{list(test.shape[1:])}: they must be equal; mend the file"
            )
    _check_labels(examples.y.numpy(), public.n_classes, f"data.root={root}: the training set")


def _own_files(section: DataSection, root: str, peers: Sequence[int] | np.ndarray, targets: Targets) -> Examples:
    """Read every peer's own file whole."""
    splits = [open_dataset(section, root.replace(PEER, str(peer)), targets).train() for peer in peers]
    ends = np.cumsum([0, *(len(split.labels) for split in splits)])
    features = [split.read(slice(None)) for split in splits]
    for kind, arrays in (("examples", features), ("targets", [split.labels for split in splits])):
        shapes = sorted({tuple(part.shape[1:]) for part in arrays})
        if len(shapes) > 1:
            raise ScenarioError(
                f"data.root={root} has {kind} of shapes {shapes}: all peers' must be alike; mend the files"
            )
    parts = tuple(np.arange(a, b) for a, b in pairwise(ends))
    return Examples(joined(features), torch.from_numpy(np.concatenate([split.labels for split in splits])), parts)


def _chosen(total: int, count: int | None, seed: int, key: str, name: str) -> Rows:
    """Return which rows of a half are used: all, or a keyed random choice."""
    if count is None or count == total:
        return slice(None)
    if not 1 <= count <= total:
        raise ScenarioError(f"data.{key}={count} must be 1 to {total}, what {name} has: change it or leave it out")
    return np.sort(keyed_generator(seed, f"data.{key}").choice(total, count, replace=False, shuffle=False))


def _held_out(total: int, section: DataSection, seed: int) -> tuple[Rows | None, Rows]:
    """Return which rows of the test set are for validation, or None, and which are for testing: others."""
    name, count = name_of(section), section.validation
    if count is None:
        return None, _chosen(total, section.test_samples, seed, "test_samples", name)
    _chosen(total, section.test_samples, seed, "test_samples", name)
    room = total - (section.test_samples or 1)
    if count > room:
        tested = f"data.test_samples={section.test_samples} are" if section.test_samples else "one at least is"
        most = f"must be at most {room}" if room else "leaves no room"
        raise ScenarioError(
            f"data.validation={count} {most}: {name} has {total} public test examples, of which {tested} for testing; "
            "take fewer of either"
        )
    held = np.asarray(np.arange(total)[_chosen(total, count, seed, "validation", name)])
    rest = np.setdiff1d(np.arange(total), held)
    return held, rest[_chosen(len(rest), section.test_samples, seed, "test_samples", name)]


def _check_labels(labels: np.ndarray, n_classes: int, what: str) -> None:
    if labels.ndim == 1 and labels.max() >= n_classes:
        raise ScenarioError(
            f"{what} has label {labels.max()}, and there are {n_classes} classes, 0 to {n_classes - 1}: "
            "mend the data, or data.classes"
        )
