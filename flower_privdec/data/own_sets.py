"""A dataset of a user's own: a function of a half that returns x and y, or a class of `Dataset`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import is_given, load_own, users_code
from flower_privdec.data.arrays import from_arrays
from flower_privdec.data.dataset import Dataset, Request, Source, Split
from flower_privdec.data.intake import Intake


@runtime_checkable
class Tabled(Protocol):
    """Arrays that may have been tables, and tell what was read of these."""

    def intake(self, part: str, root: str = ...) -> Intake: ...


def read_own(own: OwnSection, request: Request) -> Source:
    """Return a dataset of a user's own: of a function, or of a `Dataset`, which is made with the arguments.

    The function is called with a half, "train" or "test", and its arguments, with root if the request has one. It
    returns x and y, which are read like the arrays of an .npz file. A process that needs only the public test set
    requests only that half.

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
        where = "data.dataset"
        names = (f"data.{part}: x", f"data.{part}: y")

    with users_code(f"{where} fails on {part!r} with {arguments}", code="code.fails"):
        given = load_own(target, "data.dataset.module")
        arrays = given(part, **arguments)
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ScenarioError(f"{where} must return x and y for {part!r}, a pair of arrays", code="data.no-pair")

    try:
        x = np.asarray(arrays[0])
        y = np.asarray(arrays[1])
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors on a GPU
        raise ScenarioError(
            f"{where} returns for {part!r} what are not arrays: {one_line(error)}", code="data.no-arrays"
        ) from error
    split = from_arrays(x, y, part, where, request, names)
    if isinstance(given, Tabled):
        split = replace(split, intake=given.intake(part, **arguments))
    return split
