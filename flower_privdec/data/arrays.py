"""Arrays of a user's own, checked and turned into targets and features: from an .npz file, a function or Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.catalogue import TARGETS, Targets
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.dataset import Request, Split
from flower_privdec.data.pixels import PLAIN_PIXELS, channels_first, scale_pixels

if TYPE_CHECKING:
    from torch import Tensor


MOST_CLASSES = 10**9


def class_labels(labels: np.ndarray, name: str, minimum: int = 0) -> np.ndarray:
    """Return labels as int64 [N].

    Raises:
        ScenarioError: some are not whole numbers of at least `minimum`.
    """
    if labels.ndim == 1 and len(labels) == 0:
        raise ScenarioError(f"{name} has no examples: there must be at least one", code="data.empty")
    right = labels.ndim == 1 and labels.dtype.kind in "buif"
    if right and labels.dtype.kind == "f":
        right = bool((labels == np.rint(labels)).all())
    if not right:
        raise ScenarioError(
            f"{name} is {labels.dtype} {list(labels.shape)}: it must be whole numbers of shape [N]; for "
            "regression set task: {loss: mse}",
            code="data.labels",
        )

    # Infinity equals its own rint, and is refused here.
    if bool((np.abs(labels.astype(np.float64)) > MOST_CLASSES).any()):
        raise ScenarioError(
            f"{name} holds {labels.max()}: a label must be less than {MOST_CLASSES:,}; renumber them",
            code="data.labels",
        )

    whole = labels.astype(np.int64)
    if whole.min() < minimum:
        raise ScenarioError(
            f"{name} holds {whole.min()}: labels are 0..C-1, or -1 and +1 for two classes", code="data.labels"
        )
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
            f"{where}: it has labels {some(np.unique(labels))}: with -1 the only other label is +1; renumber",
            code="data.labels",
        )
    return (labels > 0).astype(np.int64)


def some(classes: np.ndarray) -> str:
    """List classes, a few of many."""
    listed = ", ".join(str(label) for label in classes[:8])
    if len(classes) <= 8:
        return listed
    return f"{listed}, ..."


def read_targets(y: np.ndarray, targets: Targets, name: str) -> np.ndarray:
    """Return targets as a task takes them: int64 [N] of classes, else float32 [N, k].

    Raises:
        ScenarioError: they are something else, with what they must be.
    """
    if targets == "classes":
        return class_labels(y, name, minimum=-1)

    wide = y
    if y.ndim == 1 and targets == "numbers":
        wide = y[:, None]
    if wide.ndim != 2 or 0 in wide.shape or y.dtype.kind not in "buif":
        raise ScenarioError(
            f"{name} is {y.dtype} {list(y.shape)} and the task's loss takes {targets}: {TARGETS[targets]}",
            code="data.targets",
        )
    if targets == "labels" and not bool(np.isin(wide, (0, 1)).all()):
        raise ScenarioError(
            f"{name} holds other numbers than 0 and 1: {TARGETS['labels']}; mend the file", code="data.labels"
        )

    # A float64 above float32's largest becomes infinite, which is refused here, without NumPy's warning.
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(wide, dtype=np.float32)
    if not bool(np.isfinite(values).all()):
        raise ScenarioError(
            f"{name} holds NaN or infinity in float32: every target must be finite; mend the file",
            code="data.not-finite",
        )
    return values


def from_arrays(
    x: np.ndarray, y: np.ndarray, part: str, where: str, request: Request, names: tuple[str, str] | None = None
) -> Split:
    """Return one half of a dataset from arrays in memory.

    8-bit images, [N, H, W] or [N, H, W, C], are scaled by PLAIN_PIXELS; every other array is taken as it is. Labels -1
    and +1 become 0 and 1.

    Args:
        x: features, [N, ...]; tokens if the request says how many there are.
        y: targets, as the request says.
        part: "train" or "test".
        where: what to call the dataset in an error.
        request: says what targets and features are.
        names: what to call x and y in an error; by default the arrays of an .npz file.

    Raises:
        ScenarioError: an array is not what the request says, or is not as long as the other.
    """
    if names is None:
        names = (f"{where}: x_{part}", f"{where}: y_{part}")
    name, y_name = names

    labels = read_targets(y, request.targets, y_name)
    if x.dtype.kind not in "buif" or x.ndim < 2 or 0 in x.shape[1:]:
        raise ScenarioError(f"{name} is {x.dtype} {list(x.shape)}: it must be numbers, [examples, features...]")
    if len(x) != len(labels):
        raise ScenarioError(
            f"{name} has {len(x)} rows for {len(labels)} labels: there must be one for each", code="data.lengths"
        )
    if request.targets == "classes":
        labels = binary_labels(labels, where)

    if request.n_tokens is not None:
        tokens = _tokens(x, request.n_tokens, name)
        return Split(labels, lambda rows: tokens[rows])

    is_grey = x.ndim == 3
    is_colour = x.ndim == 4 and x.shape[-1] in (1, 3)
    if x.dtype == np.uint8 and (is_grey or is_colour):
        images = channels_first(torch.from_numpy(x))
        return Split(labels, lambda rows: scale_pixels(images[rows], PLAIN_PIXELS))
    return Split(labels, lambda rows: _finite(x[rows], name))


def _tokens(x: np.ndarray, n_tokens: int, name: str) -> Tensor:
    """Return tokens as int64 [N, ...].

    Raises:
        ScenarioError: some are not in 0..n_tokens-1.
    """
    most = n_tokens - 1
    if x.dtype.kind not in "ui":
        raise ScenarioError(
            f"{name} is {x.dtype}: with data.vocabulary it must be whole numbers 0..{most}", code="data.tokens"
        )
    if len(x) and (int(x.min()) < 0 or int(x.max()) > most):
        raise ScenarioError(
            f"{name} holds tokens from {x.min()} to {x.max()}: they must be 0..{most}; mend the file, or raise "
            "data.vocabulary",
            code="data.tokens",
        )
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))


def _finite(x: np.ndarray, name: str) -> Tensor:
    """Return features as float32, of the rows that are asked for only.

    Raises:
        ScenarioError: some are not finite.
    """
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ScenarioError(
            f"{name} holds NaN or infinity in float32: every feature must be finite; mend it", code="data.not-finite"
        )
    return tensor
