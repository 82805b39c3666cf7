"""What arrays say of examples: their targets, as a task takes them, and tokens in place of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.errors import ScenarioError
from flower_privdec.tasks.kinds import TARGETS, Targets

MOST_CLASSES = 10**9


@dataclass(frozen=True)
class Wanted:
    """How a user's own arrays are to be read.

    Attributes:
        targets: what y is.
        n_tokens: x holds whole numbers 0..n_tokens-1; None where it holds real numbers.
        key: of the scenario, which says where the data lie.
        n_features: how many features examples have, where their file does not say it.
    """

    targets: Targets = "classes"
    n_tokens: int | None = None
    key: str = "data.root"
    n_features: int | None = None


def class_labels(labels: np.ndarray, name: str, minimum: int = 0) -> np.ndarray:
    """Return labels as int64 [N], refusing what is not a whole number of at least `minimum`."""
    right = labels.ndim == 1 and len(labels) > 0 and labels.dtype.kind in "buif"
    if not right or (labels.dtype.kind == "f" and not bool((labels == np.rint(labels)).all())):
        raise ScenarioError(f"{name} is {labels.dtype} {list(labels.shape)}: it must be whole numbers of shape [N]")
    if bool((np.abs(labels.astype(np.float64)) > MOST_CLASSES).any()):  # infinity, too
        raise ScenarioError(f"{name} holds {labels.max()}: a label must be less than {MOST_CLASSES:,}; renumber them")
    whole = labels.astype(np.int64)
    if whole.min() < minimum:
        raise ScenarioError(f"{name} holds {whole.min()}: labels are 0..C-1, or -1 and +1 for two classes")
    return whole


def binary_labels(labels: np.ndarray, where: str) -> np.ndarray:
    """Return labels with -1 and +1 as 0 and 1.

    Raises:
        ScenarioError: -1 stands beside something else than +1.
    """
    if labels.min() >= 0:
        return labels
    if not np.isin(labels, (-1, 1)).all():
        raise ScenarioError(
            f"{where}: it has labels {some(np.unique(labels))}: with -1 the only other label is +1; renumber"
        )
    return (labels > 0).astype(np.int64)


def some(classes: np.ndarray) -> str:
    """List classes, a few of many."""
    listed = ", ".join(str(label) for label in classes[:8])
    return listed if len(classes) <= 8 else f"{listed}, ..."


def read_targets(y: np.ndarray, targets: Targets, name: str) -> np.ndarray:
    """Return targets as a task takes them: int64 [N] of classes, else float32 [N, k].

    Raises:
        ScenarioError: they are something else, with what they must be.
    """
    if targets == "classes":
        return class_labels(y, name, minimum=-1)
    wide = y[:, None] if y.ndim == 1 and targets == "numbers" else y
    if wide.ndim != 2 or 0 in wide.shape or y.dtype.kind not in "buif":
        raise ScenarioError(
            f"{name} is {y.dtype} {list(y.shape)} and the task's loss takes {targets}: {TARGETS[targets]}"
        )
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(wide, dtype=np.float32)
    if targets == "labels" and not bool(np.isin(wide, (0, 1)).all()):
        raise ScenarioError(f"{name} holds other numbers than 0 and 1: {TARGETS['labels']}; mend the file")
    if not bool(np.isfinite(values).all()):
        raise ScenarioError(f"{name} holds NaN or infinity in float32: every target must be finite; mend the file")
    return values


def read_tokens(x: np.ndarray, n_tokens: int, name: str) -> Tensor:
    """Return tokens, int64.

    Raises:
        ScenarioError: they are no whole numbers of 0..n_tokens-1.
    """
    if x.dtype.kind not in "ui":
        raise ScenarioError(f"{name} is {x.dtype}: with data.vocabulary it must be whole numbers 0..{n_tokens - 1}")
    if len(x) and (int(x.min()) < 0 or int(x.max()) >= n_tokens):
        raise ScenarioError(
            f"{name} holds tokens from {x.min()} to {x.max()}: they must be 0..{n_tokens - 1}; mend the file, or raise "
            "data.vocabulary"
        )
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))
