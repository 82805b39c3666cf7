"""Tokenized texts by column, as tokenizers and Hugging Face's `datasets` hold them, packed into one array.

    input_ids        [N, tokens]  below the size of the vocabulary
    attention_mask   [N, tokens]  0 for padding
    labels           [N]          the targets, which the model is not given

The scenario names the columns that the model takes, and how many values each has (`data.columns`). These are public, so
that nothing is counted on private texts. What a model sees of a text is one whole number for each token, whose digits
are the columns (`models/layers/one_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.data.intake import Intake, counted, listed
from flower_privdec.scenario.sections import TOKEN_LABELS

MASK = "attention_mask"
KNOWN = {"input_ids": None, MASK: 2, "token_type_ids": 2}  # what tokenizers return, with the values beside tokens


@dataclass(frozen=True)
class TokenColumns:
    """The columns of some texts.

    Attributes:
        names: of all columns, in their order.
        read: returns the values of one.
    """

    names: Sequence[str]
    read: Callable[[str], Any]

    @classmethod
    def of(cls, value: Any) -> TokenColumns | None:
        """Take a mapping of columns, one beside its labels, or a Hugging Face `Dataset`; None for anything else."""
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Mapping):
            columns, labels = value
            value = {**columns, TOKEN_LABELS[0]: labels}
        if isinstance(value, Mapping):
            return cls([str(name) for name in value], value.__getitem__)

        if is_hugging_face(value):
            # Whatever format or transform is set, columns are read as they are stored.
            stored = value.with_format("numpy")
            return cls(list(value.column_names), lambda name: stored[name][:])
        return None

    @property
    def has_tokens(self) -> bool:
        """Whether a tokenizer made them, by their names."""
        return "input_ids" in self.names

    def sizes(self, vocabulary: int) -> dict[str, int]:
        """Return those columns that models of texts usually take, with how many values each has."""
        return {name: size or vocabulary for name, size in KNOWN.items() if name in self.names}

    def packed(self, sizes: Mapping[str, int], targets: Targets, where: str) -> tuple[np.ndarray, np.ndarray, Intake]:
        """Return packed tokens, int64 [N, tokens], the targets, and what was read and left.

        Args:
            sizes: how many values each column of the model has.
            targets: the kind of target that the task takes.
            where: what to call the place in an error.

        Raises:
            ScenarioError: a column is missing, or is not what it must be.
        """
        label = self._label(where)
        for name in sizes:
            if name not in self.names:
                raise self._missing(name, where)

        columns = {name: _tokens(self.read(name), name, size, where) for name, size in sizes.items()}
        y = _targets(self.read(label), label, targets, where)
        first, *others = columns
        for name in others:
            if columns[name].shape != columns[first].shape:
                raise ScenarioError(
                    f"{where}: column {name!r} is {list(columns[name].shape)} and {first!r} is "
                    f"{list(columns[first].shape)}: they must be alike; tokenize once, with all columns",
                    code="data.lengths",
                )
        _check_masks(columns.get(MASK), where)

        # The first column is the least digit; see `one_tensor`.
        x = np.zeros_like(columns[first])
        for name in reversed(columns):
            x *= sizes[name]
            x += columns[name]

        left = tuple(name for name in self.names if name != label and name not in sizes)
        told = (f"{counted(len(left), 'column')} ({listed(left)})",) if left else ()
        return x, y, Intake(columns=len(sizes) + 1, left=told)

    def _label(self, where: str) -> str:
        """Return the name of the column of labels."""
        found = [name for name in TOKEN_LABELS if name in self.names]
        if len(found) > 1:
            raise ScenarioError(
                f"{where} has the columns {listed(map(repr, found))}, each of which may be the label: leave one",
                code="data.columns",
            )
        if not found:
            raise ScenarioError(
                f"{where} has no column 'labels' (its columns are {listed(self.names)}): add it, or rename the column "
                "of the labels",
                code="data.columns",
            )
        return found[0]

    def _missing(self, name: str, where: str) -> ScenarioError:
        remedy = "add it by the tokenizer, or name in data.columns those that are there"
        if not self.has_tokens and name == "input_ids":
            remedy = "tokenize the texts, as rows.map(lambda row: tokenizer(row['text'], padding='max_length')) does"
        return ScenarioError(
            f"{where} has no column {name!r} (its columns are {listed(self.names)}): {remedy}", code="data.columns"
        )


def is_hugging_face(value: Any) -> bool:
    """Return whether a value is a `Dataset` of Hugging Face, without importing their library."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}" == "datasets.Dataset"


def _array(values: Any, name: str, where: str) -> np.ndarray:
    """Return a column as an array; refuse texts of several lengths, and values that are missing."""
    if isinstance(values, list):
        values = [_on_host(value) for value in values]
    values = _on_host(values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        array = np.array(None)
        lengths = _lengths(values)
        if not lengths:
            raise ScenarioError(
                f"{where}: column {name!r} is no array: {one_line(error)}", code="data.no-arrays"
            ) from None
    else:
        lengths = _lengths(array) if array.dtype == object else []

    if lengths and min(lengths) < max(lengths):
        raise ScenarioError(
            f"{where}: column {name!r} has texts of several lengths: tokenize all to one, which is not taken from the "
            "data, by padding='max_length', truncation=True, max_length=128",
            code="data.ragged",
        )
    if array.dtype == object:
        raise ScenarioError(
            f"{where}: column {name!r} lacks values, or holds some that are no numbers: drop these rows",
            code="data.no-arrays",
        )
    return array


def _on_host(value: Any) -> Any:
    """Return a tensor as an array, wherever it lies; anything else as it is."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value


def _lengths(values: Any) -> list[int]:
    """Return how long the members of a column are; empty if some have no length."""
    try:
        return [len(value) for value in values]
    except TypeError:
        return []


def _tokens(values: Any, name: str, size: int, where: str) -> np.ndarray:
    """Return a column that the model takes, as int64 [N, tokens]."""
    array = _array(values, name, where)
    if array.dtype.kind not in "bui" or array.ndim < 2 or 0 in array.shape[1:]:
        raise ScenarioError(
            f"{where}: column {name!r} is {array.dtype} {list(array.shape)}: it must be whole numbers, "
            "[examples, tokens]",
            code="data.tokens",
        )
    wrong = (array < 0) | (array >= size)
    if wrong.any():
        row = int(np.argmax(wrong.reshape(len(wrong), -1).any(1)))
        raise ScenarioError(
            f"{where}: column {name!r} has other values than 0 to {size - 1} in row {row}, and data.columns.{name}="
            f"{size}: say how many values the model takes (of input_ids, len(tokenizer)), or mend the data",
            code="data.tokens",
        )
    return array.astype(np.int64)


def _targets(values: Any, name: str, targets: Targets, where: str) -> np.ndarray:
    """Return the targets; refuse those that Hugging Face leaves out of its losses, -100, and of its test sets, -1."""
    array = _array(values, name, where)
    if targets != "classes":
        return array
    if array.ndim > 1:
        raise ScenarioError(
            f"{where}: column {name!r} is {list(array.shape)}, and a scenario's loss takes one class for each text: "
            "give one, or train a model of each token in a loop of your own, by `private`",
            code="data.labels",
        )
    if array.dtype.kind not in "buif":
        raise ScenarioError(
            f"{where}: column {name!r} is {array.dtype}: number the classes from 0, as class_encode_column does",
            code="data.labels",
        )
    if array.size and array.min() < 0:
        raise ScenarioError(
            f"{where}: column {name!r} has a negative number in row {int(np.argmin(array))}, as -100 is, which stands "
            "for no label: classes are 0, 1, ...; drop the texts without one",
            code="data.labels",
        )
    return array


def _check_masks(mask: np.ndarray | None, where: str) -> None:
    """Refuse a text all of whose tokens are masked, of which a model would read nothing, or NaN."""
    if mask is None or not len(mask):
        return
    read = mask.reshape(len(mask), -1).any(1)
    if not read.all():
        raise ScenarioError(
            f"{where}: row {int(np.argmin(read))} of {MASK!r} is all 0, so that none of its tokens would be read: drop "
            "such texts",
            code="data.empty-text",
        )
