"""A dataset of a user's own: a function of a half that returns x and y, or a class of `Dataset`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import is_given, load_own, users_code
from flower_privdec.data.arrays import from_arrays
from flower_privdec.data.dataset import Dataset, Request, Source, Split
from flower_privdec.data.intake import NOTHING, Intake
from flower_privdec.data.token_columns import TokenColumns

GIVEN = "data.dataset"  # how errors call arrays that were given in Python
USUAL_VOCABULARY = 30_522  # that of BERT, in a suggestion


@runtime_checkable
class Tabled(Protocol):
    """Arrays that may have been tables, and tell what was read of these."""

    def intake(self, part: str, root: str = ...) -> Intake: ...


def read_own(own: OwnSection, request: Request) -> Source:
    """Return a dataset of a user's own: of a function, or of a `Dataset`, which is made with the arguments.

    The function is called with a half, "train" or "test", and its arguments, with root if the request has one. It
    returns x and y, which are read like the arrays of an .npz file; or, with `data.columns`, tokenized texts in one of
    the forms that `TokenColumns` takes. A process that needs only the public test set requests only that half.

    Raises:
        ScenarioError: the function cannot be imported. When a half is read: it fails, or returns something else.
    """
    part = load_own(own.module, "data.dataset.module")
    if isinstance(part, type) and issubclass(part, Dataset):
        with users_code(f"data.dataset.module={own.module!r} could not be read", "code.fails"):
            source: Source = part(**own.arguments).read(request)
        if not isinstance(source, Source):
            raise ScenarioError(
                f"data.dataset.module={own.module!r}: read() returns {type(source).__name__} and must return a Source, "
                "as `embedded` of flower_privdec.data.dataset does",
                code="data.no-source",
            )
        if request.section.columns is not None and source.n_tokens != request.n_tokens:
            raise ScenarioError(
                f"data.dataset.module={own.module!r} is a Dataset, and data.columns is of a function that returns "
                "columns: name a function, or leave data.columns out",
                code="data.columns",
            )
        return source

    half = partial(_call_for_half, own, request)
    return Source(partial(half, "train"), partial(half, "test"), targets=request.targets, n_tokens=request.n_tokens)


def _call_for_half(own: OwnSection, request: Request, part: str) -> Split:
    target = own.module
    arguments = dict(own.arguments)
    if request.root is not None:
        arguments = {"root": request.root, **arguments}

    # Arrays that were given in Python have no module to name, and their errors name the argument instead.
    where = f"data.dataset.module={target!r}"
    names = None
    if is_given(target):
        where = GIVEN
        names = (f"data.{part}: x", f"data.{part}: y")

    with users_code(f"{where} fails on {part!r} with {arguments}", code="code.fails"):
        given = load_own(target, "data.dataset.module")
        returned = given(part, **arguments)

    intake = NOTHING
    if isinstance(given, Tabled):
        intake = given.intake(part, **arguments)
    texts = TokenColumns.of(returned)
    sizes = request.section.columns
    if texts is not None and sizes is None and texts.has_tokens:
        raise ScenarioError(
            f"{where} returns columns for {part!r}: name those that the model takes in data.columns, with how many "
            f"values each has, as {texts.sizes(USUAL_VOCABULARY)}",
            code="data.columns",
        )
    if texts is None or sizes is None:
        x, y = _pair_of_arrays(returned, part, where, request)
    else:
        x, y, intake = texts.packed(sizes, request.targets, f"{where} ({part})")
    return replace(from_arrays(x, y, part, where, request, names), intake=intake)


def _pair_of_arrays(returned: Any, part: str, where: str, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, of which a user's function returned a pair.

    Raises:
        ScenarioError: it returned something else.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ScenarioError(f"{where} must return x and y for {part!r}, a pair of arrays", code="data.no-pair")
    if request.section.columns is not None and where != GIVEN:
        raise ScenarioError(
            f"{where} returns a pair of arrays for {part!r}, and data.columns is of tokenized texts: return a mapping "
            "of columns or a Hugging Face dataset, or set data.vocabulary in the place of data.columns",
            code="data.columns",
        )

    try:
        return np.asarray(returned[0]), np.asarray(returned[1])
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors on a GPU
        raise ScenarioError(
            f"{where} returns for {part!r} what are not arrays: {one_line(error)}", code="data.no-arrays"
        ) from error
