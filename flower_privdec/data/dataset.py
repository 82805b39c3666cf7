"""What a dataset is: a class that turns a request into two halves, each read when it is asked for.

    Request   which dataset a scenario names, where it lies, and which targets the task takes
    Dataset   the door: `read` checks the request and returns a Source
    Source    the training half and the test half; nothing is read yet
    Split     one half: all of its targets, and a function that reads the features of some rows

No reader computes a statistic of a private example. Features are scaled by constants that were public before the data
was opened, so reading costs no privacy. A user's own files and functions may be hostile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.files import tried
from flower_privdec.data.intake import NOTHING, Intake
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario.sections import DataSection

Rows = np.ndarray | slice

SPLIT_SEED = 1797  # keys the split of datasets held in memory into two halves: the same in every scenario


@dataclass(frozen=True)
class Split:
    """Half a dataset.

    Attributes:
        labels: the targets of all its examples: classes, int64 [N]; or numbers or labels, float32 [N, k].
        read: returns the features of some rows: float32, or int64 if they are tokens.
        intake: what its reader says of files and columns, and of what it left; see `intake`.
    """

    labels: np.ndarray
    read: Callable[[Rows], Features]
    intake: Intake = NOTHING


@dataclass(frozen=True)
class Source:
    """A dataset whose halves are read lazily: a process that needs only the public test set reads no more.

    Attributes:
        train, test: read a half.
        n_classes: how many classes the format says there are; None if the labels of the test set say it.
        targets: the kind of an example's target.
        n_tokens: examples are whole numbers 0..n_tokens-1; None if they are real numbers.
    """

    train: Callable[[], Split]
    test: Callable[[], Split]
    n_classes: int | None = None
    targets: Targets = "classes"
    n_tokens: int | None = None


@dataclass(frozen=True)
class Request:
    """A dataset to be read.

    Attributes:
        section: the scenario's, which names it.
        root: the folder or file that holds it; None if nothing says so.
        targets: the kind of target that the task takes.
        key: the key of the scenario that gives the root.
    """

    section: DataSection
    root: str | None
    targets: Targets = "classes"
    key: str = "data.root"

    @property
    def where(self) -> str:
        """Return the key and the root, with which errors begin."""
        return f"{self.key}={self.root}"

    @property
    def n_tokens(self) -> int | None:
        """Return how many tokens there are; None if examples are real numbers."""
        return self.section.n_tokens

    def path(self, needs: str = "the path of one; give it", *, folder: bool = False) -> str:
        """Return the path of the dataset's file, or of its folder.

        Args:
            needs: what the dataset needs there, for the error.
            folder: whether it is a folder.

        Raises:
            ScenarioError: there is no such file or folder.
        """
        kind = "file"
        code = "data.no-file"
        exists = self.root is not None and Path(self.root).is_file()
        if folder:
            kind = "folder"
            code = "data.no-root"
            exists = self.root is not None and Path(self.root).is_dir()

        if self.root is None or not exists:
            path = self.root and tried(self.root)
            dataset = self.section.dataset
            raise ScenarioError(f"{self.key}={path} is not a {kind}: dataset {dataset} needs {needs}", code=code)
        return self.root


class Dataset:
    """A dataset that a scenario can name: a class with its name and its line, which reads it.

    It takes part as a built-in if its file lies in `flower_privdec/data/sets`, and as a user's own by its module.

    Attributes:
        name: what a scenario calls it.
        line: what `privdec list` says of it.
        own_files: whether it is a format of a user's own files, which a ledger counts under data.source.
        reads_files: whether it lies at data.root.
        needs: keys of the section data that belong to it, and that it needs.
        takes: keys of the section data that belong to it, and that it may have.
    """

    name: str = ""
    line: str = ""
    own_files: bool = False
    reads_files: bool = True
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def read(self, request: Request) -> Source:
        """Return the dataset, whose halves are read when they are asked for."""
        raise NotImplementedError(f"{type(self).__name__} must define read(self, request)")


def embedded(
    x: np.ndarray | SparseRows,
    labels: np.ndarray,
    n_train: int,
    name: str,
    targets: Targets = "classes",
    n_tokens: int | None = None,
) -> Source:
    """Return a dataset that is held in memory, split into two halves by one fixed permutation.

    Args:
        x: features or tokens, [N, ...].
        labels: targets, [N] or [N, k].
        n_train: the number of training examples; the others are for testing.
        name: keys the permutation.
        targets: the kind of the targets.
        n_tokens: the number of tokens; None if features are real numbers.

    Raises:
        ArgumentError: x and labels do not have these forms, or leave no example for training or for testing.
    """
    _check_embedded(x, labels, n_train, name, targets)

    features: Features
    if isinstance(x, SparseRows):
        features = x
    elif n_tokens is None:
        features = torch.from_numpy(x.astype(np.float32))
    else:
        features = torch.from_numpy(x.astype(np.int64))

    n_classes = None
    if targets == "classes":
        labels = labels.astype(np.int64)
        n_classes = int(labels.max()) + 1
    else:
        labels = labels.astype(np.float32)

    order = keyed_generator(SPLIT_SEED, f"split {name}").permutation(len(labels))

    def split(rows: np.ndarray) -> Split:
        part = features[torch.from_numpy(rows)]
        return Split(labels[rows], lambda chosen: part[chosen])

    return Source(lambda: split(order[:n_train]), lambda: split(order[n_train:]), n_classes, targets, n_tokens)


def _check_embedded(x: np.ndarray | SparseRows, labels: np.ndarray, n_train: int, name: str, targets: Targets) -> None:
    if len(x) != len(labels):
        raise ArgumentError(
            f"dataset {name}: x has {len(x)} examples and labels has {len(labels)}: give one label for each example",
            code="data.embedded",
        )
    if not 0 < n_train < len(labels):
        raise ArgumentError(
            f"dataset {name}: n_train={n_train} must be 1 to {len(labels) - 1}, so that some of the {len(labels)} "
            "examples are left for testing",
            code="data.embedded",
        )

    values = np.asarray(labels)
    is_wrong = not np.isfinite(values).all()
    rule = "finite numbers"
    if targets == "classes":
        rule = "whole numbers from 0, one for each example"
        is_wrong = is_wrong or values.ndim != 1 or bool((values < 0).any() or (values != np.floor(values)).any())
    if is_wrong:
        raise ArgumentError(f"dataset {name}: labels must be {rule}", code="data.embedded")
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():
        raise ArgumentError(
            f"dataset {name}: x has NaN or infinity: replace them by a public constant", code="data.embedded"
        )
