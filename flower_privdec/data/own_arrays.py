"""Read a dataset of a user's own: a function that gives one half of it at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import load_own
from flower_privdec.data.npz import from_arrays
from flower_privdec.data.readers import Source, Split
from flower_privdec.data.targets import Wanted
from flower_privdec.errors import RAISED_BY_USERS, PrivdecError, ScenarioError


def read_own(target: str, root: str | None, arguments: Mapping[str, Any], wanted: Wanted) -> Source:
    """Return a dataset that a user's function gives.

    The function is called with the half that is wanted, "train" or "test", and its arguments. It returns x and y, which
    are read like the arrays of an .npz file. A process that needs only the public test set requests that half alone.

    Args:
        target: where the function lies, `package.module:name`.
        root: given to it by this name, where the scenario has one.
        arguments: by name.
        wanted: how the arrays are to be read.

    Raises:
        ScenarioError: the function cannot be had. A half that is read: it fails, or gives something else.
    """
    load_own(target, "data.dataset.module")
    root_option = {} if root is None else {"root": root}
    half = partial(_read_half, target, {**root_option, **arguments}, wanted)
    return Source(partial(half, "train"), partial(half, "test"), targets=wanted.targets, n_tokens=wanted.n_tokens)


def _read_half(target: str, arguments: Mapping[str, Any], wanted: Wanted, part: str) -> Split:
    where = f"data.dataset.module={target!r}"
    try:
        arrays = load_own(target, "data.dataset.module")(part, **arguments)
    except PrivdecError:
        raise
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise ScenarioError(f"{where} fails on {part!r} with {dict(arguments)}: {one_line(error)}") from error
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ScenarioError(f"{where} must return x and y for {part!r}, a pair of arrays")
    try:
        x, y = (np.asarray(half) for half in arrays)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors elsewhere
        raise ScenarioError(f"{where} returns for {part!r} what are no arrays: {one_line(error)}") from error
    return from_arrays(x, y, part, where, wanted)
